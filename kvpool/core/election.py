"""Who leads, as one candidate sees it: a lease with a fencing epoch, kept in a store that all masters share. Pure.

The store grants a lease of `ttl_ms` and a new epoch with it; the holder renews in time. Whoever holds a lease counts it from
the moment *before* the request left, less a margin, on its own monotonic clock: its lease is over for itself before it is over
for the store, whatever was paused or slow in between. Safety does not rest on that, nor on any clock: each write to the store
carries (epoch, owner) and is refused when the store has another pair. The clock keeps the *answers* of two leaders apart.

    FOLLOWER --granted--> LEADER --no renewal in time--> LAPSED --renewed, same epoch--> LEADER
        ^                    \\________ lost ____________/
        |_________________________________/

LAPSED: the store is away (or this process was). What is in memory may be served on; nothing durable is done. Nobody can say
whether there is another leader by now. The store says so as soon as it is back.

Sending, timing and tasks are in `master.election`; the store's side is in `master.redis_store`. After Gray and Cheriton, Leases
(SOSP 1989), and the fencing tokens of Chubby (OSDI 2006).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvpool.core.types import Epoch

NO_EPOCH: Final = Epoch(0)
WAIT_MS_MIN: Final = 10  # between two requests: a store that answers nonsense at once is not asked in a tight loop


class Role(Enum):
    FOLLOWER = "follower"
    LEADER = "leader"
    LAPSED = "lapsed"


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """A take-over takes at most ttl_ms + poll_ms + reply_ms after the last renewal."""

    ttl_ms: int = 1_500
    renew_ms: int = 500  # one may fail before the lease is over
    margin_ms: int = 250  # clocks that run differently, and what a leader does between looking at the clock and acting
    poll_ms: int = 200  # of a follower; after a failure too
    reply_ms: int = 400  # an answer later than this is not counted on

    def __post_init__(self) -> None:
        if min(self.ttl_ms, self.renew_ms, self.margin_ms, self.poll_ms, self.reply_ms) <= 0:
            raise ValueError("LeaseTerms: all times must be positive")
        if self.renew_ms + self.reply_ms + self.margin_ms >= self.ttl_ms:
            raise ValueError("LeaseTerms: one late renewal must fit into a lease: renew + reply + margin < ttl")


@dataclass(frozen=True, slots=True)
class Take:
    """Ask for the lease, with an epoch above `floor` when it is free."""

    number: int
    floor: Epoch


@dataclass(frozen=True, slots=True)
class Renew:
    """Ask to keep the lease of `epoch`; it may have run out, as long as nobody took it since."""

    number: int
    epoch: Epoch


Ask = Take | Renew


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease is ours, for `ttl_ms` from when the store answered."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Refused:
    """Somebody else has the lease, or the epoch is over. `owner` "": nobody. `left_ms`: of the holder's lease."""

    epoch: Epoch
    owner: str = ""
    address: str = ""
    left_ms: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """`epoch`: own one as LEADER and LAPSED; the newest one known as FOLLOWER. `leader`: the leader's address, "" unknown."""

    role: Role
    epoch: Epoch
    leader: str


class Election:
    """One candidate. The caller asks `ask`, sends what it gives, and hands back `answer` or `failed` with its number; `standing`
    may be asked at any time and must be asked again before each act of a leader. One request is under way at a time."""

    __slots__ = ("_address", "_ask", "_epoch", "_floor", "_leader", "_leading", "_next_ms", "_number", "_sent_ms",
                 "_valid_until_ms", "terms")  # fmt: skip

    def __init__(self, *, address: str = "", terms: LeaseTerms | None = None) -> None:
        self.terms = terms or LeaseTerms()
        self._address = address
        self._leading = False
        self._epoch = NO_EPOCH  # own, while leading
        self._floor = NO_EPOCH  # the newest that was ever seen, anybody's: a store that forgot must not give it out again
        self._leader = ""
        self._valid_until_ms = 0
        self._ask: Ask | None = None
        self._sent_ms = 0
        self._next_ms: int | None = None  # None: at once
        self._number = 0

    def standing(self, now_ms: int) -> Standing:
        if not self._leading:
            return Standing(Role.FOLLOWER, self._floor, self._leader)
        role = Role.LEADER if now_ms < self._valid_until_ms else Role.LAPSED
        return Standing(role, self._epoch, self._address)

    def ask(self, now_ms: int) -> Ask | None:
        """What is to be sent now, if anything. A request without an answer for `reply_ms` is given up."""
        if self._ask is not None:
            if now_ms < self._sent_ms + self.terms.reply_ms:
                return None
            self.failed(self._ask.number, now_ms)
        if self._next_ms is not None and now_ms < self._next_ms:
            return None
        self._number += 1
        self._ask = Renew(self._number, self._epoch) if self._leading else Take(self._number, self._floor)
        self._sent_ms = now_ms
        return self._ask

    def answer(self, number: int, reply: Granted | Refused, now_ms: int) -> None:
        """The store's answer. That of a request that was given up changes nothing."""
        if self._ask is None or number != self._ask.number:
            return
        asked, self._ask = self._ask, None
        self._floor = max(self._floor, reply.epoch)
        if isinstance(reply, Granted):
            if isinstance(asked, Renew) and reply.epoch != asked.epoch:
                raise ValueError(f"epoch {asked.epoch} was renewed as {reply.epoch}")
            self._leading = True
            self._epoch = reply.epoch
            self._valid_until_ms = self._sent_ms + self.terms.ttl_ms - self.terms.margin_ms
            self._next_ms = self._sent_ms + self.terms.renew_ms
            return
        self._leader = reply.address
        wait_ms = self.terms.poll_ms
        if self._leading:
            self._leading = False
            self._epoch = NO_EPOCH
        elif reply.owner:
            wait_ms = min(wait_ms, reply.left_ms + 1)
        self._next_ms = now_ms + max(WAIT_MS_MIN, wait_ms)

    def failed(self, number: int, now_ms: int) -> None:
        """The store did not answer. A leader stays what its lease makes it."""
        if self._ask is not None and number == self._ask.number:
            self._ask = None
            self._next_ms = now_ms + self.terms.poll_ms

    def resign(self, now_ms: int) -> None:
        """No leader any more, by its own will; the caller tells the store. Others come first: it asks again after `ttl_ms`."""
        self._leading = False
        self._epoch = NO_EPOCH
        self._ask = None
        self._leader = ""
        self._next_ms = now_ms + self.terms.ttl_ms

    def wait_ms(self, now_ms: int) -> int:
        """Until `ask` or `standing` may give something new, when nothing comes in."""
        if self._ask is not None:
            times = [self._sent_ms + self.terms.reply_ms]
        else:
            times = [now_ms if self._next_ms is None else self._next_ms]
        if self._leading and now_ms < self._valid_until_ms:
            times.append(self._valid_until_ms)
        return max(0, min(times) - now_ms)
