"""The removals of one namespace: a counted, bounded log, and what a worker that was away has missed of it. Pure.

Removals are numbered from 1. A removal of everything makes what came before it pointless, so the log begins anew there. A
worker whose number lies before the log's begin is told to drop all of the namespace's blocks. Keeping it on disk is the store's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvpool.core.types import KEY_BYTES


@dataclass(frozen=True, slots=True)
class Removal:
    """Number `seq` took out `keys` (n * 34 bytes), or with `everything` all there was."""

    seq: int
    keys: bytes
    everything: bool = False

    @property
    def weight(self) -> int:
        """What it takes of the log's bound."""
        return max(1, len(self.keys) // KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Missed:
    """What a worker must do before it serves the namespace: with `drop_blocks` forget all its blocks; else with `everything` the
    same, then remove `keys`."""

    keys: bytes = b""
    everything: bool = False
    drop_blocks: bool = False


class RemovalLog:
    """`keys_max`: keys of all removals that are remembered together; the newest removal is always kept."""

    __slots__ = ("_entries", "_keys_max", "_n_keys", "seq")

    def __init__(self, *, keys_max: int, seq: int = 0) -> None:
        self._keys_max = keys_max
        self._entries: deque[Removal] = deque()
        self._n_keys = 0
        self.seq = seq  # of the last removal

    @property
    def first_seq(self) -> int:
        """The oldest removal that is remembered; `seq + 1` when none is."""
        return self._entries[0].seq if self._entries else self.seq + 1

    @property
    def entries(self) -> tuple[Removal, ...]:
        """All that are remembered, in order of their numbers."""
        return tuple(self._entries)

    def append(self, removal: Removal) -> None:
        """Adds removal number `seq + 1`."""
        if removal.seq != self.seq + 1:
            raise ValueError(f"removal {removal.seq} cannot follow {self.seq}")
        self.seq = removal.seq
        if removal.everything:
            self._entries.clear()
            self._n_keys = 0
        self._entries.append(removal)
        self._n_keys += removal.weight
        while self._n_keys > self._keys_max and len(self._entries) > 1:
            self._n_keys -= self._entries.popleft().weight

    @classmethod
    def of(cls, entries: Iterable[Removal], *, keys_max: int, seq: int) -> RemovalLog:
        """What a store gave back: `seq` is the newest number that it gave out. After a gap (a store that was set back, and
        written to before that was noticed) the log begins anew: a worker that may have missed what is lost drops its blocks."""
        log = cls(keys_max=keys_max, seq=seq)
        for entry in entries:
            if entry.seq != log.seq + 1 or not log._entries:
                log = cls(keys_max=keys_max, seq=entry.seq - 1)
            log.append(entry)
        return log if log.seq >= seq else cls(keys_max=keys_max, seq=seq)

    def missed(self, applied_seq: int) -> Missed | None:
        """What a worker that applied all up to `applied_seq` has missed; None: nothing. A number of the future (a store that was
        set back) counts as knowing nothing."""
        if applied_seq == self.seq:
            return None
        if self._entries and self._entries[0].everything and applied_seq < self._entries[0].seq:
            return Missed(b"".join(entry.keys for entry in self._entries), everything=True)
        if applied_seq > self.seq or applied_seq + 1 < self.first_seq:
            return Missed(drop_blocks=True)
        return Missed(b"".join(entry.keys for entry in self._entries if entry.seq > applied_seq))
