"""Emptying a worker: in which order its blocks go, how fast, who has room, how long it will take. Pure.

Owns these decisions. Does not own: which blocks have no other copy (the master's index says), the moving itself (`worker.drain`),
who drains (`membership`). Hot chains first, each as a whole with its head first, so that whatever has been moved when the time
is up is worth the most and no prefix gets a hole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Protocol, TypeVar

from kvpool.core.keys import KeyBatch
from kvpool.core.types import HASH_BYTES, NO_PARENT, Key, NamespaceUid

BATCH_BYTES: Final = 8 << 20  # of one move: large enough for full speed, small enough to stop soon
BATCH_BLOCKS: Final = 1024
RATE_PARTS: Final = 8  # a batch is at most this part of a second's rate
SPARE_PART: Final = 64  # of a worker's room is left to it: it has puts of its own
TOLD_LAG_MS: Final = 1500  # a worker's told room is this old at most: what was sent to it in the meantime is taken off


class Phase(IntEnum):
    """As it travels in DrainStatus.phase."""

    LOOKING = 0
    MOVING = 1
    DONE = 2
    STUCK = 3


class Movable(Protocol):
    """What of a block the order needs."""

    @property
    def ns(self) -> NamespaceUid: ...
    @property
    def key(self) -> Key: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def depth(self) -> int: ...
    @property
    def size(self) -> int: ...


B = TypeVar("B", bound=Movable)


def parent_key(block: Movable) -> Key | None:
    """The key of the block above it, of the same shard; None at a root."""
    return block.parent + block.key[HASH_BYTES:] if block.depth or block.parent != NO_PARENT else None


def chains(blocks: Sequence[B], used_at: Callable[[B], int]) -> Iterator[list[B]]:
    """The blocks as runs, each a piece of one chain from its top down, no block twice; the run with the most recently used block
    first. Where a chain forks, the most recently used branch goes with the head."""
    by_key: dict[tuple[NamespaceUid, Key], B] = {(block.ns, block.key): block for block in blocks}
    below: dict[tuple[NamespaceUid, Key], list[B]] = {}
    hottest = sorted(blocks, key=lambda block: (-used_at(block), block.depth))
    for block in hottest:
        above = parent_key(block)
        if above is not None:
            below.setdefault((block.ns, above), []).append(block)  # the hottest child first
    left = {id(block) for block in by_key.values()}
    for start in hottest:
        if id(start) not in left:
            continue
        run = [start]
        left.discard(id(start))
        while (up := _next_above(run[-1], by_key, left)) is not None:
            run.append(up)
            left.discard(id(up))
        run.reverse()
        while (down := _next_below(run[-1], below, left)) is not None:
            run.append(down)
            left.discard(id(down))
        yield run


def _next_above(block: B, by_key: dict[tuple[NamespaceUid, Key], B], left: set[int]) -> B | None:
    above = parent_key(block)
    up = None if above is None else by_key.get((block.ns, above))
    return up if up is not None and id(up) in left and up.depth == block.depth - 1 else None


def _next_below(block: B, below: dict[tuple[NamespaceUid, Key], list[B]], left: set[int]) -> B | None:
    for child in below.get((block.ns, block.key), ()):
        if id(child) in left and child.depth == block.depth + 1:
            return child
    return None


def batched(runs: Iterable[list[B]], *, bytes_max: int = BATCH_BYTES) -> Iterator[list[B]]:
    """Runs cut into parts of at most `bytes_max` (or one block); runs of one block that are chains of their own are put
    together, as long as they are of one namespace."""
    part: list[B] = []
    n_bytes = 0
    of_singles = False
    for run in runs:
        alone = len(run) == 1 and parent_key(run[0]) is None
        joins = alone and of_singles and bool(part) and part[0].ns == run[0].ns
        for i, block in enumerate(run):
            together = joins if i == 0 else True
            if part and not (together and len(part) < BATCH_BLOCKS and n_bytes + block.size <= bytes_max):
                yield part
                part, n_bytes = [], 0
            part.append(block)
            n_bytes += block.size
        of_singles = alone
    if part:
        yield part


def batch_of(blocks: Sequence[Movable]) -> KeyBatch:
    """The keys of one part of `batched`, as a put names them."""
    first = blocks[0]
    chained = len(blocks) > 1 and blocks[1].depth == first.depth + 1 and parent_key(blocks[1]) == first.key
    keys = b"".join(block.key for block in blocks)
    return KeyBatch(first.ns, keys, first.parent, first.depth, chained or parent_key(first) is not None)


@dataclass(slots=True)
class Pace:
    """A rate limit: `wait_ms` before each part. 0: none."""

    rate_bytes: int = 0
    _free_at_ms: float = 0.0

    @property
    def batch_bytes(self) -> int:
        return min(BATCH_BYTES, max(1, self.rate_bytes // RATE_PARTS)) if self.rate_bytes else BATCH_BYTES

    def wait_ms(self, now_ms: float) -> float:
        """How long the next part must wait."""
        return max(0.0, self._free_at_ms - now_ms)

    def sent(self, n_bytes: int, now_ms: float) -> None:
        """A part went out: it uses up its time from now, or from the end of the part before. Time not used is not saved up."""
        if self.rate_bytes:
            self._free_at_ms = max(now_ms, self._free_at_ms) + 1000.0 * n_bytes / self.rate_bytes


@dataclass(slots=True)
class Room:
    """What one other worker was told to have."""

    free_bytes: int
    capacity_bytes: int
    sent: deque[tuple[float, int]] = field(default_factory=deque)


class Rooms:
    """Who can take how much: free bytes as workers last told, less what was sent to them since, less a spare part."""

    def __init__(self) -> None:
        self._rooms: dict[str, Room] = {}

    def told(self, rooms: dict[str, tuple[int, int]], *, now_ms: float) -> None:
        """(free, capacity) bytes of every worker that may be written to now."""
        before, self._rooms = self._rooms, {}
        for name, (free_bytes, capacity_bytes) in rooms.items():
            sent = before[name].sent if name in before else deque()
            while sent and now_ms - sent[0][0] > TOLD_LAG_MS:
                sent.popleft()
            self._rooms[name] = Room(free_bytes, capacity_bytes, sent)

    def sent(self, name: str, n_bytes: int, *, now_ms: float) -> None:
        if name in self._rooms:
            self._rooms[name].sent.append((now_ms, n_bytes))

    def full(self, name: str) -> None:
        """It took less than it should have: nothing more goes there before it tells anew."""
        if name in self._rooms:
            self._rooms[name].free_bytes = 0

    def of(self, name: str) -> int:
        """Bytes that it can take."""
        room = self._rooms.get(name)
        if room is None:
            return 0
        return max(0, room.free_bytes - room.capacity_bytes // SPARE_PART - sum(n for _, n in room.sent))

    def names(self) -> list[str]:
        return list(self._rooms)


@dataclass(slots=True)
class Progress:
    """What a drain has done and has to do."""

    phase: Phase = Phase.LOOKING
    blocks_left: int = 0
    bytes_left: int = 0
    blocks_moved: int = 0
    bytes_moved: int = 0
    reason: str = ""
    _busy_ms: float = 0.0
    _since_ms: float | None = None

    def begin(self, blocks: int, n_bytes: int, *, now_ms: float) -> None:
        """A look found this much to move."""
        if self._since_ms is not None:  # the pass before was cut short
            self._busy_ms += now_ms - self._since_ms
        self.phase, self.reason = Phase.MOVING, ""
        self.blocks_left, self.bytes_left = blocks, n_bytes
        self._since_ms = now_ms

    def moved(self, blocks: int, n_bytes: int) -> None:
        self.blocks_moved += blocks
        self.bytes_moved += n_bytes
        self.left(blocks, n_bytes)

    def left(self, blocks: int, n_bytes: int) -> None:
        """So much less is to be moved (it is somewhere else, or gone)."""
        self.blocks_left = max(0, self.blocks_left - blocks)
        self.bytes_left = max(0, self.bytes_left - n_bytes)

    def end(self, phase: Phase, reason: str = "", *, now_ms: float) -> None:
        """The pass is over."""
        if self._since_ms is not None:
            self._busy_ms += now_ms - self._since_ms
            self._since_ms = None
        self.phase, self.reason = phase, reason
        if phase is Phase.DONE:
            self.blocks_left = self.bytes_left = 0

    def eta_ms(self, *, rate_bytes: int, now_ms: float) -> int:
        """Time until all is moved, from the speed so far and the limit; 0: not known, or nothing to do."""
        if self.phase is not Phase.MOVING or not self.bytes_left:
            return 0
        busy_ms = self._busy_ms + (now_ms - self._since_ms if self._since_ms is not None else 0.0)
        speed = 1000.0 * self.bytes_moved / busy_ms if busy_ms > 0 else 0.0
        if rate_bytes:
            speed = min(speed, rate_bytes) if self.bytes_moved >= rate_bytes else rate_bytes
        return int(1000.0 * self.bytes_left / speed) + 1 if speed > 0 else 0
