"""What is known of how long a block is worth keeping: hints of its put, expiry, pins. Pure values and the order among them.

Owns the hints' meaning and packed form, the times of expiry (`Expiries`) and the shelves of blocks that leave a tier before or
after the policy's order (`Shelves`). What is done with them is `keeping`; the policy's order itself is `policy`.

`priority` is 0..100 with 35 as default, as in TensorRT-LLM's KvCacheRetentionConfig: lower ones leave a tier first, higher ones
last, and soft pins after all of them; within one priority the least recently used goes first, a chain from its tail.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from kvpool.core.pins import PinLevel
from kvpool.core.types import Tiers
from kvpool.errors import InvalidArgument

if TYPE_CHECKING:
    from kvpool.core.block import Block
    from kvpool.core.policy.eviction import Group

PRIORITY_MAX: Final = 100
PRIORITY_DEFAULT: Final = 35
SOFT_RANK: Final = PRIORITY_MAX + 1  # of soft pins, and of hard ones beyond their share
TTL_S_MAX: Final = 10 * 365 * 24 * 3600
NEVER_MS: Final = 1 << 62  # later than every clock

_TIME_BITS: Final = 56
_TIME_MASK: Final = (1 << _TIME_BITS) - 1


def pack_hint(time_ms: int, priority: int | None = None) -> int:
    """u64 of one block's hints: a time (0: none) and a priority (None: the default)."""
    return min(max(0, time_ms), _TIME_MASK) | (0 if priority is None else priority + 1) << _TIME_BITS


def unpack_hint(packed: int) -> tuple[int, int]:
    """(time, priority); a priority that a later release may know is taken for the highest."""
    above = packed >> _TIME_BITS
    return packed & _TIME_MASK, PRIORITY_DEFAULT if above == 0 else min(above - 1, PRIORITY_MAX)


def hint_of(keep: Keep | None, now_ms: int) -> int:
    """Of a block that goes to another worker: what is left of its time, and its priority."""
    if keep is None:
        return 0
    return pack_hint(max(1, keep.expires_ms - now_ms) if keep.expires_ms else 0, keep.priority)


def check_priority(priority: object) -> int | None:
    """Itself when it is None or in range. Raises InvalidArgument."""
    if priority is None:
        return None
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= PRIORITY_MAX:
        raise InvalidArgument(f"priority: {priority!r} is not an integer in 0..{PRIORITY_MAX} (default {PRIORITY_DEFAULT})")
    return priority


def check_seconds(name: str, seconds: object) -> int:
    """Milliseconds of a time in seconds, 0 for None. Raises InvalidArgument."""
    if seconds is None:
        return 0
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= TTL_S_MAX:
        raise InvalidArgument(f"{name}: {seconds!r} is not in 0..{TTL_S_MAX} seconds (more than 0)")
    return max(1, int(seconds * 1000))


def life_ms(ttl_ms: int, retain_ms: int) -> int:
    """How long a block lives, 0: no end. A hint makes it shorter than the namespace's time, never longer."""
    return min(ttl_ms, retain_ms) if ttl_ms and retain_ms else ttl_ms or retain_ms


class Keep:
    """Of a block that is kept otherwise than by the policy alone. `expires_ms` 0: never. `hard_in`: the tier whose copy a hard
    pin protects, NONE: no such pin, or its share was taken."""

    __slots__ = ("expires_ms", "hard_in", "level", "priority")

    def __init__(self, expires_ms: int = 0, priority: int = PRIORITY_DEFAULT) -> None:
        self.expires_ms, self.priority = expires_ms, priority
        self.level = PinLevel.NONE
        self.hard_in = Tiers.NONE

    @property
    def rank(self) -> int:
        """The greater the later it leaves; PRIORITY_DEFAULT: by the policy's order."""
        return SOFT_RANK if self.level else self.priority

    @property
    def is_plain(self) -> bool:
        return not self.level and not self.expires_ms and self.priority == PRIORITY_DEFAULT


class Expiries:
    """Blocks by the time when they expire."""

    __slots__ = ("_heap", "_n", "next_ms")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Block]] = []  # may name blocks that are gone, or were renewed
        self._n = 0
        self.next_ms = NEVER_MS

    def add(self, block: Block, expires_ms: int) -> None:
        self._n += 1
        heapq.heappush(self._heap, (expires_ms, self._n, block))
        self.next_ms = self._heap[0][0]

    def due(self, now_ms: int, *, n_max: int) -> list[Block]:
        """Live blocks whose time is up, at most n_max; they are not named again."""
        found: list[Block] = []
        heap = self._heap
        while heap and heap[0][0] <= now_ms and len(found) < n_max:
            expires_ms, _, block = heapq.heappop(heap)
            if block.live and block.keep is not None and block.keep.expires_ms == expires_ms:
                found.append(block)
        self.next_ms = heap[0][0] if heap else NEVER_MS
        return found


class _Shelf:
    """Blocks of one rank. `queues`: the coldest of them by (tier, group), the next to go last; made when asked for."""

    __slots__ = ("blocks", "queues")

    def __init__(self) -> None:
        self.blocks: dict[Block, None] = {}
        self.queues: dict[tuple[Tiers, int], list[tuple[int, int, Block]]] = {}


QUEUE_MIN: Final = 64
QUEUE_PART: Final = 8  # one part in this many of a shelf is put in order at once: its cost is spread over so many victims


class Shelves:
    """Blocks whose rank is not the default. `tick_of(block, tier)`: when its copy there was last used."""

    __slots__ = ("_barren", "_shelves", "_tick_of")

    def __init__(self, tick_of: Callable[[Block, Tiers], int]) -> None:
        self._shelves: dict[int, _Shelf] = {}
        self._tick_of = tick_of
        self._barren: set[tuple[int, Tiers, int]] = set()  # where nothing was found; not looked at again before `refresh`

    def __len__(self) -> int:
        return sum(len(shelf.blocks) for shelf in self._shelves.values())

    def __bool__(self) -> bool:
        return bool(self._shelves)

    def add(self, block: Block, rank: int) -> None:
        if rank != PRIORITY_DEFAULT:
            self._shelves.setdefault(rank, _Shelf()).blocks[block] = None
            self._barren.clear()

    def discard(self, block: Block, rank: int) -> None:
        shelf = self._shelves.get(rank)
        if shelf is not None:
            shelf.blocks.pop(block, None)
            if not shelf.blocks:
                del self._shelves[rank]

    def ranks(self, *, low: bool) -> list[int]:
        """Of shelves below the default, or above it, in the order in which they are given up."""
        return sorted(rank for rank in self._shelves if (rank < PRIORITY_DEFAULT) is low)

    def refresh(self) -> None:
        """Some times a second: what was in the way may be there no more."""
        self._barren.clear()

    def coldest(self, rank: int, tier: Tiers, group: Group) -> Iterator[Block]:
        """Blocks of one shelf with a copy of this group, the next to go first, each once; at most a queue's length a call."""
        place = (rank, tier, id(group))
        if place in self._barren:
            return
        shelf = self._shelves.get(rank)
        n_given = 0
        while shelf is not None and shelf.blocks:
            queue = shelf.queues.get((tier, id(group)))
            if not queue:
                if n_given:
                    return
                queue = self._queue(shelf, tier, group)
                if not queue:
                    self._barren.add(place)
                    return
                shelf.queues = {(tier, id(group)): queue} if len(shelf.queues) > QUEUE_MIN else shelf.queues
                shelf.queues[tier, id(group)] = queue
            tick, _, block = queue.pop()
            if block in shelf.blocks and _is_in(block, tier, group) and self._tick_of(block, tier) == -tick:
                n_given += 1
                yield block

    def put_back(self, rank: int, tier: Tiers, group: Group, blocks: list[Block]) -> None:
        """These, of `coldest`, did not go yet: they are the next again."""
        shelf = self._shelves.get(rank)
        if shelf is not None and blocks:
            queue = shelf.queues.setdefault((tier, id(group)), [])
            queue += [(-self._tick_of(block, tier), block.depth, block) for block in reversed(blocks)]

    def _queue(self, shelf: _Shelf, tier: Tiers, group: Group) -> list[tuple[int, int, Block]]:
        there = [(-self._tick_of(block, tier), block.depth, block) for block in shelf.blocks if _is_in(block, tier, group)]
        n = max(QUEUE_MIN, len(there) // QUEUE_PART)
        return heapq.nlargest(n, there, key=lambda entry: entry[:2])[::-1]


def _is_in(block: Block, tier: Tiers, group: Group) -> bool:
    if tier is Tiers.DRAM:
        return block.dram is not None and block.group is group
    return block.ssd_copy is not None and block.ssd_copy.group is group
