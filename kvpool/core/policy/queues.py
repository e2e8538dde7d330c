"""Order of the learned policy: runs of blocks by class and age, the class and age that is worth least first.

All runs of one class and age are worth the same, so the one to go next is found without looking at any other: exactly the
least, where sampling would find about the least. Among equals the one used longest ago goes first, also where classes are
worth the same (all are before anything was learned).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace, merge
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from kvpool.core.policy.eviction import Group, GroupKey

if TYPE_CHECKING:
    from kvpool.core.block import Block
    from kvpool.core.policy.lifetable import LifeTable
    from kvpool.core.policy.runs import Run


HEAP_SLACK: Final = 1024  # times that are over, before the heap is made anew


class Turn:
    """A run's place among those of its class and age in one group; `queue` None: it has left it."""

    __slots__ = ("after", "before", "group", "queue", "run")

    def __init__(self, run: Run, group: RunGroup) -> None:
        self.run, self.group = run, group
        self.queue: Queue | None = None
        self.before: Turn | None = None
        self.after: Turn | None = None

    def leave(self) -> None:
        queue, before, after = self.queue, self.before, self.after
        if queue is None:
            return
        if before is None:
            queue.first = after
        else:
            before.after = after
        if after is None:
            queue.last = before
        else:
            after.before = before
        self.queue = self.before = self.after = None


class Queue:
    """Runs of one class and age in one group, those used longest ago first."""

    __slots__ = ("first", "key", "last", "older")

    def __init__(self, key: int) -> None:
        self.key = key
        self.first: Turn | None = None
        self.last: Turn | None = None
        self.older: Queue | None = None  # of the same class, an age bin older: where most runs go that leave this one

    def append(self, turn: Turn) -> None:
        last = self.last
        turn.queue, turn.before = self, last
        if last is None:
            self.first = turn
        else:
            last.after = turn
        self.last = turn

    def put_first(self, turn: Turn) -> None:
        """Of one that is not empty."""
        first = self.first
        assert first is not None
        turn.queue, turn.after = self, first
        self.first = first.before = turn

    def runs(self) -> Iterator[Run]:
        """All, in order."""
        turn = self.first
        while turn is not None:
            yield turn.run
            turn = turn.after


class RunGroup(Group):
    """Runs whose blocks can replace each other in one tier, those that may lose one now."""

    __slots__ = ("_by_key", "_heap", "_table", "_version", "n_entries", "twice")

    def __init__(self, key: GroupKey, table: LifeTable) -> None:
        super().__init__(key)
        self._table = table
        self._by_key: dict[int, Queue] = {}
        # (worth, time of its first run, key): every key that has runs, perhaps some that have none, or with a time that is over.
        self._heap: list[tuple[float, float, int]] = []
        self._version = table.version
        self.twice: dict[Block, None] = {}  # of an SSD tier: blocks marked `TWICE` that are not parked
        self.n_entries = 0  # blocks of the group in the tier, also of runs that may not lose one now

    def push(self, run: Run, key: int) -> Turn:
        """The run is of this class and age, and may lose a block. -> its place."""
        turn = Turn(run, self)
        self.queue(turn, key)
        return turn

    def queue(self, turn: Turn, key: int) -> None:
        """The same of one that has left its queue."""
        queue = self._by_key.get(key)
        if queue is None:
            queue = self._by_key[key] = Queue(key)
        self._put(turn, queue)

    def grow_older(self, turn: Turn, key: int) -> None:
        """The same of one that is in the queue of this key or of a younger age, most often the age before."""
        queue = turn.queue
        assert queue is not None
        turn.leave()
        if queue.key == key - 1:
            older = queue.older
            if older is None:
                older = self._by_key.get(key)
                if older is None:
                    older = self._by_key[key] = Queue(key)
                queue.older = older
            self._put(turn, older)
        else:
            self.queue(turn, key)

    def _put(self, turn: Turn, queue: Queue) -> None:
        first, time_s = queue.first, turn.run.time_s
        if first is None or time_s >= first.run.time_s:
            queue.append(turn)
            if first is not None:
                return
        else:
            queue.put_first(turn)
        heappush(self._heap, (self._table.index[queue.key], time_s, queue.key))
        if len(self._heap) > 2 * len(self._by_key) + HEAP_SLACK:  # (nobody asks while there is room)
            self._sort()

    def first(self) -> Run | None:
        """The run that should lose its deepest block next."""
        if self._version != self._table.version:
            self._sort()
        heap, by_key = self._heap, self._by_key
        while heap:
            worth, time_s, key = heap[0]
            turn = by_key[key].first
            if turn is not None:
                run = turn.run
                if run.time_s <= time_s:
                    return run
                heapreplace(heap, (worth, run.time_s, key))
            else:
                heappop(heap)
        return None

    def in_order(self) -> Iterator[tuple[float, Run]]:
        """All that may lose a block, with their worth, the next first. Nothing may change meanwhile."""
        if self._version != self._table.version:
            self._sort()
        heap, by_key = self._heap.copy(), self._by_key
        while heap:
            worth, _, key = heappop(heap)
            keys = {key: None}
            while heap and heap[0][0] == worth:
                keys[heappop(heap)[2]] = None
            if len(keys) == 1:
                for run in by_key[key].runs():
                    yield worth, run
            else:
                for run in merge(*(by_key[key].runs() for key in keys), key=attrgetter("time_s")):
                    yield worth, run

    def _sort(self) -> None:
        self._version = self._table.version
        by_key: dict[int, Queue] = {}
        heap: list[tuple[float, float, int]] = []
        index = self._table.index
        for key, queue in self._by_key.items():
            if queue.first is not None:
                by_key[key] = queue
                heap.append((index[key], queue.first.run.time_s, key))
            if queue.older is not None and queue.older.first is None:
                queue.older = None  # (it is dropped)
        heapify(heap)
        self._by_key, self._heap = by_key, heap
