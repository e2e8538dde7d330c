"""How a get reaches its blocks: the read plan, what is tried next after a failure, and the breaker of each worker.

Pure: decides only. Who has what comes from the catalog (mirror or master), bytes move in `transport`, and `client.reading`
carries the steps out: `Fetch.plan` says what to read where, answers come back through `answered` and `failed`, until nothing
is left.

    located   b0:{1,2} b1:{1,2} b2:{2} b3:{}     peers (the caller's numbers of workers) by block
    plan      peer 1: b0 b1    peer 2: b2         one read a peer; b3 is hopeless, so nothing past it is asked for
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvpool.core.types import BlockCode, MissCause, Tiers, miss_cause

Candidate = tuple[int, int]  # (peer, Tiers)
Candidates = tuple[Candidate, ...]
CostOf = Callable[[int], int | MissCause]  # of a peer; a MissCause: it cannot be used now, and why

SSD_COST: Final = 64  # against DRAM; less than the cost of leaving the host
REMOTE_COST: Final = 160  # of a peer on another host; 0 on the own one
SUSPECT_COST: Final = 1600  # a worker whose heartbeats are late is the last choice
ROUNDS_MAX: Final = 8  # a get that is sent on from replica to replica ends here, whatever the deadline

# Which of several causes is told: the first of these that any replica gave.
_TELLING: Final = (
    MissCause.REMOVED,
    MissCause.CORRUPT,
    MissCause.TIMEOUT,
    MissCause.WORKER_LOST,
    MissCause.EVICTED,
    MissCause.EXPIRED,
    MissCause.STALE_INDEX,
    MissCause.NEVER_STORED,
    MissCause.UNKNOWN,
)
_RANK: Final = {cause: rank for rank, cause in enumerate(_TELLING)}
_HITS: Final = (BlockCode.HIT_INLINE, BlockCode.HIT_SHARED)
_FAST: Final = int(Tiers.DRAM | Tiers.DEVICE)


@dataclass(frozen=True, slots=True)
class Read:
    """One request to make: these blocks (indices, ascending) from this peer. `alternatives`: another replica could serve."""

    peer: int
    blocks: Sequence[int]
    alternatives: bool = False

    def run(self) -> Read:
        """Its first blocks up to a gap."""
        n = 1
        while n < len(self.blocks) and self.blocks[n] == self.blocks[0] + n:
            n += 1
        return Read(self.peer, range(self.blocks[0], self.blocks[0] + n), self.alternatives)


@dataclass(slots=True)
class Fetch:
    """The state of one get of `n` blocks. Not thread-safe: answers of parallel reads are given to it one after the other."""

    n: int
    located: list[Candidates] = field(default_factory=list)  # of the leading blocks whose places are known
    peer_of: list[int] = field(default_factory=list)  # [n]: who served it, -1: nobody yet
    tiers: bytearray = field(default_factory=bytearray)  # [n]: from where
    sizes: list[int] = field(default_factory=list)  # [n]
    n_leading: int = 0  # served without a gap
    refused: int = -1  # first block whose buffer does not fit the value; nothing past it is wanted
    _failed: dict[int, dict[int, MissCause]] = field(default_factory=dict)  # block -> peer -> why not
    _doubted: set[int] = field(default_factory=set)  # peers that failed for a block: asked last for the others

    def __post_init__(self) -> None:
        self.peer_of = [-1] * self.n
        self.tiers = bytearray(self.n)
        self.sizes = [0] * self.n

    def locate(self, start: int, places: Sequence[Candidates]) -> None:
        """Where blocks start.. are; replaces what was known of them. Peers that already failed for a block stay failed."""
        del self.located[start:]
        self.located.extend(places[: self.n - start])

    def plan(self, cost: CostOf) -> list[Read]:
        """The next reads, one a peer: every block that is not served yet, up to the first that nobody is left to serve.

        `cost` of a peer; a MissCause instead says that it cannot be used now, and why. Empty answer: nothing left to try.
        """
        known = self.located[self.n_leading :]
        if known and not self._failed and known[0] and known.count(known[0]) == len(known) and self.refused < 0:
            peer = _cheapest(known[0], cost, -1, {}, self._doubted)
            if peer >= 0:
                return [Read(peer, range(self.n_leading, self.n_leading + len(known)), len(known[0]) > 1)]
        chosen: dict[int, list[int]] = {}
        previous = -1
        end = len(self.located) if self.refused < 0 else self.refused
        for index in range(self.n_leading, end):
            if self.peer_of[index] >= 0:
                continue
            previous = _cheapest(self.located[index], cost, previous, self._failed.get(index, {}), self._doubted)
            if previous < 0:
                for peer, _ in self.located[index]:
                    price = cost(peer)
                    if isinstance(price, MissCause):
                        self._failed.setdefault(index, {}).setdefault(peer, price)
                break
            chosen.setdefault(previous, []).append(index)
        return [Read(peer, _as_range(blocks), self._spare(blocks[0])) for peer, blocks in chosen.items()]

    def _spare(self, index: int) -> bool:
        return len(self.located[index]) > 1 + len(self._failed.get(index, ()))

    def answered(self, read: Read, codes: bytes, tiers: bytes, sizes: Sequence[int]) -> list[int]:
        """A peer's answer. Returns the blocks that the index named and the peer does not have (the index is stale there)."""
        blocks = read.blocks
        n = len(blocks)
        if isinstance(blocks, range) and codes.count(codes[:1]) == n == len(codes) and n and codes[0] in _HITS:
            start, stop = blocks.start, blocks.stop
            self.peer_of[start:stop] = [read.peer] * n
            self.tiers[start:stop] = tiers
            self.sizes[start:stop] = sizes
            self._advance()
            return []
        stale = []
        for position, index in enumerate(blocks):
            code = codes[position]
            if code in _HITS:
                self.peer_of[index], self.tiers[index], self.sizes[index] = read.peer, tiers[position], sizes[position]
            elif code == BlockCode.REJECTED:
                self.refused = index if self.refused < 0 else min(self.refused, index)
            elif code != BlockCode.LATER or position == 0:
                cause = miss_cause(code) or MissCause.UNKNOWN
                if cause in (MissCause.NEVER_STORED, MissCause.UNKNOWN):
                    cause = MissCause.STALE_INDEX  # the index said that it is there
                if cause not in (MissCause.TIMEOUT, MissCause.WORKER_LOST):
                    stale.append(index)
                self._note(index, read.peer, cause)
        self._advance()
        return stale

    def failed(self, read: Read, cause: MissCause) -> None:
        """The peer could not be used for any of these blocks."""
        for index in read.blocks:
            self._note(index, read.peer, cause)

    def _note(self, index: int, peer: int, cause: MissCause) -> None:
        self._failed.setdefault(index, {})[peer] = cause
        self._doubted.add(peer)

    def _advance(self) -> None:
        try:
            self.n_leading = self.peer_of.index(-1, self.n_leading)
        except ValueError:
            self.n_leading = self.n

    def why(self) -> tuple[MissCause, int] | None:
        """Why block `n_leading` was not served by those who were tried, and which peer says so; None: nobody was tried."""
        causes = self._failed.get(self.n_leading)
        if not causes:
            return None
        peer = min(causes, key=lambda one: _RANK[causes[one]])
        return causes[peer], peer


def _cheapest(
    places: Candidates, cost: CostOf, previous: int, failed: Mapping[int, MissCause], doubted: Collection[int]
) -> int:
    """The best peer of one block; at the same cost the one that also serves the block before it. -1: none. A peer that has lost
    one block of a chain has lost what is below it too, most often: else each round would find one block out."""
    best, best_cost = -1, (False, 0, False)
    for peer, tiers in places:
        price = cost(peer)
        if isinstance(price, MissCause) or peer in failed:
            continue
        if not tiers & _FAST:
            price += SSD_COST
        candidate = (peer in doubted, price, peer != previous)
        if best < 0 or candidate < best_cost:
            best, best_cost = peer, candidate
    return best


def _as_range(blocks: list[int]) -> Sequence[int]:
    return range(blocks[0], blocks[-1] + 1) if blocks[-1] - blocks[0] + 1 == len(blocks) else blocks


# --- time --------------------------------------------------------------------------------------------------------------

TRANSFER_BASE_MS: Final = 2_000
TRANSFER_BYTES_PER_S: Final = 100_000_000  # the slowest link that is still worth waiting for
CALL_MS: Final = 1_000
PROBE_MS: Final = 250  # what one call risks on a worker that was found dead or frozen before


def transfer_ms(n_bytes: int) -> int:
    """Default deadline of a call that moves this many bytes."""
    return TRANSFER_BASE_MS + n_bytes * 1000 // TRANSFER_BYTES_PER_S


def attempt_ms(left_ms: float, *, alternatives: bool, probing: bool) -> float:
    """How much of the time that is left one peer gets: half, when another replica could still serve after it."""
    if probing:
        return min(left_ms, PROBE_MS)
    return left_ms / 2 if alternatives else left_ms


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


FAILURES_MAX: Final = 3
OPEN_MS_MIN: Final = 500
OPEN_MS_MAX: Final = 8_000


@dataclass(slots=True)
class Breaker:
    """Of one peer: after `failures_max` failures in a row calls stop asking it; after a pause one call at a time probes it.

    `cause`: of the last failure, what calls that do not even ask report. The pause doubles with every failed probe.
    """

    failures_max: int = FAILURES_MAX
    open_ms_min: int = OPEN_MS_MIN
    open_ms_max: int = OPEN_MS_MAX

    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    cause: MissCause = MissCause.WORKER_LOST
    open_ms: int = 0  # the pause now
    retry_at_ms: float = 0.0

    def usable(self, now_ms: float) -> bool:
        """Whether a call may ask the peer now. Does not change anything; `begin` does."""
        return self.state is BreakerState.CLOSED or now_ms >= self.retry_at_ms

    def begin(self, now_ms: float) -> bool:
        """A call goes to the peer; True: it is a probe, others stay away until it ended (or another pause has passed)."""
        if self.state is BreakerState.CLOSED:
            return False
        self.state = BreakerState.HALF_OPEN
        self.retry_at_ms = now_ms + self.open_ms
        return True

    def succeeded(self) -> None:
        """The peer answered, whatever it said."""
        if self.failures:
            self.state, self.failures, self.open_ms = BreakerState.CLOSED, 0, 0

    def failed(self, now_ms: float, cause: MissCause) -> None:
        """The peer could not be reached, or did not answer in time."""
        self.failures += 1
        self.cause = cause
        if self.state is BreakerState.HALF_OPEN:
            self.open_ms = min(2 * self.open_ms, self.open_ms_max)
        elif self.failures < self.failures_max:
            return
        else:
            self.open_ms = max(self.open_ms, self.open_ms_min)
        self.state = BreakerState.OPEN
        self.retry_at_ms = now_ms + self.open_ms
