"""Which of several masters to ask next, as one that looks for the leader sees it. Pure; clients and workers share it.

    current --answers--> stays     --fails, names a leader--> there, once a round     --fails--> the next one that was configured

A round ends when all that are known have failed: then the caller waits a little. An address that failed in this round is not
tried again in it, whoever names it, so that two masters that name each other lead nobody in a circle. Guarded by its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

HINTS_MAX: Final = 4  # addresses that are not configured, followed in one round
EPOCH_MEMORY_S: Final = 30.0  # without a leader of the newest epoch for this long, the store was emptied: what there is counts


class LeaderSearch:
    """`addresses`: "host:port", at least one. `current`: where to go."""

    __slots__ = ("_epoch", "_epoch_at_s", "_failed", "_hinted", "_turn", "addresses", "current")

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(dict.fromkeys(addresses))
        self.current = self.addresses[0]
        self._turn = 0
        self._failed: set[str] = set()
        self._hinted = False
        self._epoch = 0
        self._epoch_at_s = 0.0

    @property
    def several(self) -> bool:
        """Whether there is more than one master, as far as is known."""
        return self._hinted or len(self.addresses) > 1

    def failed(self, hint: str = "") -> bool:
        """`current` did not answer, or does not lead and names `hint` ("": nobody). Goes on. True: the last one of a round."""
        self._failed.add(self.current)
        if hint and hint not in self._failed and len(self._failed) <= len(self.addresses) + HINTS_MAX:
            self._hinted = self._hinted or hint not in self.addresses
            self.current = hint
            return False
        for _ in self.addresses:
            self._turn = (self._turn + 1) % len(self.addresses)
            if self.addresses[self._turn] not in self._failed:
                self.current = self.addresses[self._turn]
                return False
        self._turn = (self._turn + 1) % len(self.addresses)
        self.current = self.addresses[self._turn]
        self._failed.clear()
        return True

    def accepts(self, epoch: int, *, now_s: float) -> bool:
        """`current` answered as the leader of `epoch`. False: a newer epoch was seen, this leader is one of the past: not to be
        used. One master alone is always believed: its state may have been made anew."""
        if self.several and epoch < self._epoch and now_s < self._epoch_at_s + EPOCH_MEMORY_S:
            return False
        self._epoch, self._epoch_at_s = epoch, now_s
        self._failed.clear()
        return True
