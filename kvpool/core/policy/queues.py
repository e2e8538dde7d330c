"""Order of the learned policy: runs of blocks by class and age, the class and age that is worth least first.

All runs of one class and age are worth the same, so the one to go next is found without looking at any other: exactly the
least, where sampling would find about the least. Among equals the one used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from kvpool.core.policy.eviction import Group, GroupKey

if TYPE_CHECKING:
    from kvpool.core.policy.lifetable import LifeTable
    from kvpool.core.policy.runs import Run

class Waiting(OrderedDict["Run", None]):
    """Runs of one class and age in one group, those used longest ago first."""

    __slots__ = ("group",)
    group: RunGroup


class RunGroup(Group):
    """Runs whose blocks can replace each other in one tier, those that may lose one now."""

    __slots__ = ("_by_key", "_heap", "_table", "_version", "n_entries")

    def __init__(self, key: GroupKey, table: LifeTable) -> None:
        super().__init__(key)
        self._table = table
        self._by_key: dict[int, Waiting] = {}
        self._heap: list[tuple[float, int]] = []  # (worth, key): every key that has runs, perhaps some that have none
        self._version = table.version
        self.n_entries = 0  # blocks of the group in the tier, also of runs that may not lose one now

    def push(self, run: Run, key: int) -> Waiting:
        """-> where it waits; `del` it from there."""
        waiting = self._by_key.get(key)
        if waiting is None:
            waiting = self._by_key[key] = Waiting()
            waiting.group = self
        if not waiting:
            heappush(self._heap, (self._table.index[key], key))
            waiting[run] = None
        else:
            waiting[run] = None
            if run.time_s < next(iter(waiting)).time_s:
                waiting.move_to_end(run, last=False)
        return waiting

    def first(self) -> Run | None:
        """The run that should lose its deepest block next."""
        if self._version != self._table.version:
            self._sort()
        heap, by_key = self._heap, self._by_key
        while heap:
            waiting = by_key[heap[0][1]]
            if waiting:
                return next(iter(waiting))
            heappop(heap)
        return None

    def in_order(self) -> Iterator[tuple[float, Run]]:
        """All that may lose a block, with their worth, the next first. Nothing may change meanwhile."""
        if self._version != self._table.version:
            self._sort()
        seen = set()
        for worth, key in sorted(self._heap):
            if key not in seen:
                seen.add(key)
                for run in self._by_key[key]:
                    yield worth, run

    def _sort(self) -> None:
        self._version = self._table.version
        self._heap = [(self._table.index[key], key) for key, waiting in self._by_key.items() if waiting]
        heapify(self._heap)
