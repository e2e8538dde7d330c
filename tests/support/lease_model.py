"""What the scripts of the lease do, in plain words: the model that election and scripts are held against."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.core.election import Ask, Granted, LeaseTerms, Refused, Take
from kvpool.core.types import Epoch

TERMS = LeaseTerms(ttl_ms=2_000, renew_ms=600, margin_ms=300, poll_ms=250, reply_ms=500)


class ModelStore:
    """`accepted`: (epoch, owner) of each write that is in the store."""

    def __init__(self) -> None:
        self.epoch = 0
        self.owner = ""
        self.holder = ""
        self.until_ms = 0
        self.accepted: list[tuple[int, str]] = []
        self.up = True

    def ask(self, owner: str, ask: Ask, now_ms: int) -> Granted | Refused:
        holder = self.holder if now_ms < self.until_ms else ""
        if isinstance(ask, Take):
            if holder not in ("", owner) and self.epoch >= ask.floor:
                return Refused(Epoch(self.epoch), holder, f"{holder}:1", self.until_ms - now_ms)
            self.epoch, self.owner = max(self.epoch, ask.floor) + 1, owner
        elif (self.epoch, self.owner) != (ask.epoch, owner):
            return Refused(Epoch(self.epoch), holder, f"{holder}:1" if holder else "", 0)
        self.holder, self.until_ms = owner, now_ms + TERMS.ttl_ms
        return Granted(Epoch(self.epoch))

    def write(self, owner: str, epoch: int) -> None:
        if (self.epoch, self.owner) == (epoch, owner):
            self.accepted.append((epoch, owner))

    def snapshot(self) -> Callable[[], None]:
        """A call of what this gives sets the store back, as a fail-over to a replica that lags does."""
        saved = (self.epoch, self.owner, self.holder, self.until_ms, list(self.accepted))

        def restore() -> None:
            self.epoch, self.owner, self.holder, self.until_ms, accepted = saved
            self.accepted = list(accepted)

        return restore
