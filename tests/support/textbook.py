"""The textbook's policies as their papers have them, over whole requests: what the workers' are compared with.

Caches of ids of one size that know nothing of chains, served one request after another. A request's hits are the blocks of its
longest prefix that is cached; afterwards each of its blocks is used or stored, the deepest first, so that a chain is lost from
its end.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol


class Policy(Protocol):
    """A cache of `capacity` blocks with its policy."""

    def __contains__(self, block: int) -> bool:
        """Whether it is cached."""
        ...

    def use(self, block: int) -> None:
        """A block was asked for: used when it is cached, else stored, which may evict others (or not be done)."""
        ...


def access(policy: Policy, ids: Sequence[int]) -> int:
    """One request, root first. -> its hits."""
    hits = next((n for n, block in enumerate(ids) if block not in policy), len(ids))
    for block in reversed(ids):
        policy.use(block)
    return hits


LRU2_PAST: Final = 4


class LruCache:
    """Least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, block: int) -> None:
        self._blocks[block] = None
        self._blocks.move_to_end(block)
        if len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class Lru2Cache:
    """LRU-2 (O'Neil and others, SIGMOD 1993): the one whose last use but one is longest ago goes first; of those used once, the
    least recently used. Uses are remembered for four times as many blocks as are cached."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._clock = 0
        self._uses: dict[int, tuple[int, int]] = {}  # of cached blocks: last but one (0: none), last
        self._heap: list[tuple[int, int, int]] = []
        self._past: OrderedDict[int, int] = OrderedDict()  # last uses of those that left

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, block: int) -> None:
        self._clock += 1
        if block in self._uses:
            before = self._uses[block][1]
        else:
            before = self._past.pop(block, 0)
            while len(self._uses) >= self._capacity:
                self._evict()
        self._uses[block] = (before, self._clock)
        heapq.heappush(self._heap, (before, self._clock, block))

    def _evict(self) -> None:
        while True:
            *uses, block = heapq.heappop(self._heap)
            if self._uses.get(block) == tuple(uses):
                del self._uses[block]
                self._past[block] = uses[1]
                if len(self._past) > LRU2_PAST * self._capacity:
                    self._past.popitem(last=False)
                return


class S3FifoCache:
    """S3-FIFO (Yang and others, SOSP 2023): a small queue for the new, a main one for what was used again, ghosts of the small
    one's victims."""

    SMALL_PART: Final = 10
    USES_MAX: Final = 3

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_max = max(1, capacity // self.SMALL_PART)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, block: int) -> None:
        if block in self._uses:
            self._uses[block] = min(self.USES_MAX, self._uses[block] + 1)
            return
        while len(self._uses) >= self._capacity:
            self._evict()
        self._uses[block] = 0
        if block in self._ghosts:
            del self._ghosts[block]
            self._main.append(block)
        else:
            self._small.append(block)

    def _evict(self) -> None:
        if len(self._small) >= self._small_max or not self._main:
            block = self._small.popleft()
            if self._uses[block] > 1:
                self._uses[block] = 0
                self._main.append(block)
                return
            del self._uses[block]
            self._ghosts[block] = None
            if len(self._ghosts) > self._capacity:
                self._ghosts.popitem(last=False)
            return
        block = self._main.popleft()
        if self._uses[block]:
            self._uses[block] -= 1
            self._main.append(block)
        else:
            del self._uses[block]


class ArcCache:
    """ARC (Megiddo and Modha, FAST 2003): what was used once and what was used again, each with ghosts that say which of the two
    should be larger."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # of `once`
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._once_gone: OrderedDict[int, None] = OrderedDict()
        self._again_gone: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._again

    def use(self, block: int) -> None:
        once, again, once_gone, again_gone = self._once, self._again, self._once_gone, self._again_gone
        if block in once:
            del once[block]
        elif block in again:
            again.move_to_end(block)
            return
        elif block in once_gone:
            self._target = min(self._capacity, self._target + max(1.0, len(again_gone) / len(once_gone)))
            self._replace(in_again=False)
            del once_gone[block]
        elif block in again_gone:
            self._target = max(0.0, self._target - max(1.0, len(once_gone) / len(again_gone)))
            self._replace(in_again=True)
            del again_gone[block]
        else:
            self._make_room()
            once[block] = None
            return
        again[block] = None

    def _make_room(self) -> None:
        once, gone = self._once, self._once_gone
        if len(once) + len(gone) >= self._capacity:
            if len(once) < self._capacity:
                gone.popitem(last=False)
                self._replace(in_again=False)
            else:
                once.popitem(last=False)
        else:
            total = len(once) + len(gone) + len(self._again) + len(self._again_gone)
            if total >= self._capacity:
                if total >= 2 * self._capacity and self._again_gone:
                    self._again_gone.popitem(last=False)
                self._replace(in_again=False)

    def _replace(self, *, in_again: bool) -> None:
        once, again = self._once, self._again
        if len(once) + len(again) < self._capacity:
            return
        if once and (len(once) > self._target or (in_again and len(once) == self._target) or not again):
            block, _ = once.popitem(last=False)
            self._once_gone[block] = None
        else:
            block, _ = again.popitem(last=False)
            self._again_gone[block] = None


TEXTBOOK: Final[dict[str, Callable[[int], Policy]]] = {
    "lru": LruCache, "lru2": Lru2Cache, "s3fifo": S3FifoCache, "arc": ArcCache,
}  # fmt: skip
