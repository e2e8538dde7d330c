"""Holds: readers' promises that named blocks stay where they are until released or the time is up.

Owns: holds by id, by owner and by time, and which views are overdue (quarantined). Does not own: what a hold does to its
blocks (`blocks` counts per block and tier). Pure; time comes in as `now_ms`.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpool.core.types import HoldId, Tiers

if TYPE_CHECKING:
    from kvpool.core.block import Block

HEAP_SLACK: Final = 1024  # outdated entries kept beyond twice the holds before the heap is made anew


@dataclass(slots=True, eq=False)
class Hold:
    """`protects`: block and the one tier whose copy stays. `owner` 0: nobody's, lives by its time alone. `n_bytes`: of the
    blocks, for the quarantine's cap. `overdue`: a view whose time is up, kept because its reader may still look at it."""

    hold_id: HoldId
    owner: int
    view: bool
    deadline_ms: int
    protects: list[tuple[Block, Tiers]]
    n_bytes: int
    overdue: bool = False


class Holds:
    """Not thread-safe. `holds_max` bounds them (each names at most one batch of blocks)."""

    def __init__(self, *, holds_max: int, seed: int) -> None:
        self.holds_max = holds_max
        self.overdue_bytes = 0
        self._by_id: dict[HoldId, Hold] = {}
        self._by_owner: dict[int, set[HoldId]] = {}
        self._heap: list[tuple[int, HoldId]] = []
        self._overdue: dict[HoldId, Hold] = {}  # longest overdue first
        self._random = random.Random(seed)  # ids must not be guessed by other clients: the shell seeds from the system

    def __len__(self) -> int:
        return len(self._by_id)

    def full(self) -> bool:
        return len(self._by_id) >= self.holds_max

    def alive(self, hold_id: int) -> bool:
        return hold_id in self._by_id

    def get(self, hold_id: int) -> Hold | None:
        return self._by_id.get(HoldId(hold_id))

    def add(self, protects: list[tuple[Block, Tiers]], *, owner: int, view: bool, deadline_ms: int, n_bytes: int) -> Hold:
        hold_id = HoldId(0)
        while not hold_id or hold_id in self._by_id:
            hold_id = HoldId(self._random.getrandbits(64))
        hold = self._by_id[hold_id] = Hold(hold_id, owner, view, deadline_ms, protects, n_bytes)
        if owner:
            self._by_owner.setdefault(owner, set()).add(hold_id)
        self._push(hold)
        return hold

    def renew(self, hold_id: int, *, deadline_ms: int) -> bool:
        """A later end (never an earlier one). An overdue view that is still here is in time again. False: gone."""
        hold = self._by_id.get(HoldId(hold_id))
        if hold is None:
            return False
        if hold.overdue:
            self._forgive(hold)
        elif deadline_ms <= hold.deadline_ms:
            return True
        hold.deadline_ms = deadline_ms
        self._push(hold)
        return True

    def drop(self, hold_id: int) -> Hold | None:
        """Takes the hold out; the caller lets its blocks go."""
        hold = self._by_id.pop(HoldId(hold_id), None)
        if hold is not None:
            if hold.overdue:
                self._forgive(hold)
            if hold.owner:
                mine = self._by_owner[hold.owner]
                mine.discard(hold.hold_id)
                if not mine:
                    del self._by_owner[hold.owner]
            if not self._by_id:
                self._heap.clear()
        return hold

    def of_owner(self, owner: int) -> list[HoldId]:
        return list(self._by_owner.get(owner, ()))

    def due(self, now_ms: int) -> list[Hold]:
        """Holds whose time is up and that must be let go now (by `drop`). Views are not among them: they become overdue."""
        ended = []
        while self._heap and self._heap[0][0] <= now_ms:
            deadline_ms, hold_id = heapq.heappop(self._heap)
            hold = self._by_id.get(hold_id)
            if hold is None or hold.deadline_ms != deadline_ms or hold.overdue:
                continue
            if hold.view:
                hold.overdue = True
                self._overdue[hold_id] = hold
                self.overdue_bytes += hold.n_bytes
            else:
                ended.append(hold)
        return ended

    def too_long_overdue(self, bytes_max: int) -> list[int]:
        """Owners whose overdue views must end so that the rest fit in `bytes_max`, the longest overdue first."""
        excess, owners = self.overdue_bytes - bytes_max, []
        for hold in self._overdue.values():
            if excess <= 0:
                break
            excess -= hold.n_bytes
            if hold.owner not in owners:
                owners.append(hold.owner)
        return owners

    def _forgive(self, hold: Hold) -> None:
        hold.overdue = False
        del self._overdue[hold.hold_id]
        self.overdue_bytes -= hold.n_bytes

    def _push(self, hold: Hold) -> None:
        heapq.heappush(self._heap, (hold.deadline_ms, hold.hold_id))
        if len(self._heap) > 2 * len(self._by_id) + HEAP_SLACK:
            self._heap = [(h.deadline_ms, h.hold_id) for h in self._by_id.values() if not h.overdue]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Asserts the invariants. O(holds)."""
        assert self.overdue_bytes == sum(h.n_bytes for h in self._overdue.values())
        assert all(h.overdue == (i in self._overdue) for i, h in self._by_id.items())
        assert set(self._overdue) <= set(self._by_id)
        assert {i for ids in self._by_owner.values() for i in ids} == {i for i, h in self._by_id.items() if h.owner}
        assert len(self._heap) <= 2 * len(self._by_id) + HEAP_SLACK + 1
        waiting = set(self._heap)
        assert all(h.overdue or (h.deadline_ms, i) in waiting for i, h in self._by_id.items())
