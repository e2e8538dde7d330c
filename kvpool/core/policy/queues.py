"""Order of the learned policy: runs of blocks by class and age, the class and age that is worth least first.

All runs of one class and age are worth the same, so the one to go next is found without looking at any other: exactly the
least, where sampling would find about the least. Among equals the one used longest ago goes first, also where classes are
worth the same (all are before anything was learned).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final

from kvpool.core.policy.eviction import Group, GroupKey

if TYPE_CHECKING:
    from kvpool.core.block import Block
    from kvpool.core.policy.lifetable import LifeTable
    from kvpool.core.policy.runs import Run


HEAP_SLACK: Final = 1024  # times that are over, before the heap is made anew


class Waiting:
    """Runs of one class and age in one group, those used longest ago first."""

    __slots__ = ("group", "runs")

    def __init__(self, group: RunGroup) -> None:
        self.group = group
        self.runs: OrderedDict[Run, None] = OrderedDict()


class RunGroup(Group):
    """Runs whose blocks can replace each other in one tier, those that may lose one now."""

    __slots__ = ("_by_key", "_heap", "_table", "_version", "n_entries", "twice")

    def __init__(self, key: GroupKey, table: LifeTable) -> None:
        super().__init__(key)
        self._table = table
        self._by_key: dict[int, Waiting] = {}
        # (worth, time of its first run, key): every key that has runs, perhaps some that have none, or with a time that is over
        self._heap: list[tuple[float, float, int]] = []
        self._version = table.version
        self.twice: dict[Block, None] = {}  # of an SSD tier: blocks that came to DRAM too and are not parked
        self.n_entries = 0  # blocks of the group in the tier, also of runs that may not lose one now

    def push(self, run: Run, key: int) -> Waiting:
        """-> where it waits; `del` it from its `runs`."""
        waiting = self._by_key.get(key)
        if waiting is None:
            waiting = self._by_key[key] = Waiting(self)
        runs = waiting.runs
        if runs:
            runs[run] = None
            if run.time_s >= next(iter(runs)).time_s:
                return waiting
            runs.move_to_end(run, last=False)
        else:
            runs[run] = None
        heappush(self._heap, (self._table.index[key], run.time_s, key))
        if len(self._heap) > 2 * len(self._by_key) + HEAP_SLACK:  # (nobody asks while there is room)
            self._sort()
        return waiting

    def first(self) -> Run | None:
        """The run that should lose its deepest block next."""
        if self._version != self._table.version:
            self._sort()
        heap, by_key = self._heap, self._by_key
        while heap:
            worth, time_s, key = heap[0]
            runs = by_key[key].runs
            if runs:
                run = next(iter(runs))
                if run.time_s <= time_s:
                    return run
                heapreplace(heap, (worth, run.time_s, key))
            else:
                heappop(heap)
        return None

    def in_order(self) -> Iterator[tuple[float, Run]]:
        """All that may lose a block, with their worth, the next first. Nothing may change meanwhile."""
        self._sort()
        for worth, runs in groupby(sorted(self._heap), key=itemgetter(0)):
            alike = [self._by_key[key].runs for _, _, key in runs]
            for run in alike[0] if len(alike) == 1 else merge(*alike, key=attrgetter("time_s")):
                yield worth, run

    def _sort(self) -> None:
        self._version = self._table.version
        self._by_key = {key: waiting for key, waiting in self._by_key.items() if waiting.runs}
        index = self._table.index
        self._heap = [(index[key], next(iter(waiting.runs)).time_s, key) for key, waiting in self._by_key.items()]
        heapify(self._heap)
