"""One tier's face of the learned policy (`hazard.Hazard`): the `EvictionPolicy` that rooms and copies talk to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final, cast

from kvpool.core.policy.eviction import NO_LIMIT, Entry, Group, GroupKey
from kvpool.core.policy.queues import RunGroup
from kvpool.core.policy.runs import (
    DRAM,
    IN,
    IN_ANY,
    IN_SSD,
    PARKED,
    PARKED_SSD,
    SSD,
    TWICE,
    is_parent,
    link,
    mark_twice,
    ssd_group,
)

if TYPE_CHECKING:
    from kvpool.core.block import Block, SsdCopy
    from kvpool.core.policy.hazard import Hazard
    from kvpool.core.policy.runs import Run

JOIN_TICKS: Final = 256  # a later batch of a chain used so few batches ago, and
JOIN_S: Final = 60.0  # so few seconds, is of the same request
TIE: Final = 1e-12  # of the order, a second: of equals the one used longer ago goes first,
DEEPER: Final = 1e-15  # a block of depth: and of one run the deeper one
NOT_HERE: Final = 1


class HazardTier:
    """One tier's `EvictionPolicy`, a face of the worker's `Hazard`."""

    by_recency = False

    def __init__(self, brain: Hazard, tier: int) -> None:
        self._brain, self._tier = brain, tier
        self._in, self._parked = IN[tier], PARKED[tier]
        self._groups: dict[GroupKey, RunGroup] = {}
        self.lean = False  # of what is in both tiers the copy here goes first (SSD)
        self._all_groups: Sequence[Group] = ()  # made anew when they change: others go through it meanwhile

    def at(self, now_ms: int) -> None:
        self._brain.at(now_ms)

    def group(self, key: GroupKey) -> Group:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = RunGroup(key, self._brain.table)
            self._all_groups = (*self._groups.values(),)
        return group

    def groups(self) -> Sequence[Group]:
        return self._all_groups

    def drop_group(self, key: GroupKey) -> None:
        group = self._groups.get(key)
        if group is not None and not group.n_entries:
            del self._groups[key]
            self._all_groups = (*self._groups.values(),)

    def add(self, entries: Sequence[Entry], tick: int, ranks: Sequence[int]) -> None:
        del ranks
        brain, tier, bit = self._brain, self._tier, self._in
        fresh: list[Block] = []
        above: Block | None = None
        last: Run | None = None
        brain.n_copies += len(entries)
        for entry in entries:
            block = self._block(entry)
            of: RunGroup = entry.group  # type: ignore[assignment]
            of.n_entries += 1
            where, run, up = block.where, block.run, block.up
            if not where & IN_ANY:
                brain.n_cached += 1
                if up is None:
                    if above is not None and above.kid is None and is_parent(above, block):
                        block.up = up = above
                        above.kid = block
                    else:
                        link(block, above)
                        up = block.up
            block.where = where | bit
            if tier == DRAM and up is not None:
                up.n_dram_kids += 1
            if run is None:
                fresh.append(block)
                if up is not above and up is not None and up.run is not None:
                    brain.consider(up.run)
            else:
                if tier == DRAM:
                    if where & IN_SSD:
                        mark_twice(block)
                    run.joined_dram(block)
                    brain.consider(run)
                    if up is not None and up.n_dram_kids == 1 and up.run is not None and up.run is not run:
                        brain.consider_dram(up.run)
                else:
                    run.joined_ssd(block)
                    if run is not last:
                        if last is not None:
                            brain.consider_ssd(last)
                        last = run
            above = block
        if last is not None:
            brain.consider_ssd(last)
        if brain.n_cached > brain.n_cached_max:
            brain.n_cached_max = brain.n_cached
        if fresh:
            brain.stored(fresh, tick)

    def limits(self, entries: Sequence[Entry], tick: int) -> Sequence[tuple[int, float]]:
        blocks = cast("Sequence[Block]", entries)
        if not self._brain.table.is_sure or blocks[-1].rank - blocks[0].rank != len(blocks) - 1:
            return ((len(blocks), NO_LIMIT),)
        late = 1 + TIE * self._brain.now_s
        return [(n, -worth * late) for n, worth in self._brain.worth_new(blocks, tick)]

    def refused(self, entries: Sequence[Entry], tick: int) -> None:
        self._brain.refused(cast("list[Block]", list(entries)), tick)

    def touch(self, entries: Sequence[Entry | None], tick: int, rank: int) -> None:
        del rank
        if self._tier == DRAM:  # (the SSD copies of the same blocks are named to the other one)
            self._brain.used(cast("Sequence[Block | None]", entries), tick)

    def remove(self, entry: Entry) -> None:
        brain, tier = self._brain, self._tier
        block = self._block(entry)
        where = block.where
        if not where & self._in:
            return
        if where & TWICE:
            ssd_group(block).twice.pop(block, None)
        where = block.where = where & ~(self._in | self._parked | TWICE)
        group: RunGroup = entry.group  # type: ignore[assignment]
        group.n_entries -= 1
        brain.n_copies -= 1
        run = block.run
        assert run is not None
        if tier == DRAM:
            run.n_dram -= 1
        else:
            run.n_ssd -= 1
        up = block.up
        above = up.run if up is not None and up.run is not run else None
        if tier == DRAM:
            if up is not None:
                up.n_dram_kids -= 1
                if above is not None:
                    brain.consider_dram(above)
            if where & IN_ANY:
                brain.consider(run)
                return
        elif where & IN_ANY:
            brain.consider_ssd(run)
            return
        brain.n_cached -= 1
        brain.leave(block)
        if above is not None:
            brain.consider_ssd(above)

    def victim(self, group: Group) -> Entry | None:
        run = cast(RunGroup, group).first()
        if run is None:
            return None
        return run.deepest_in_dram() if self._tier == DRAM else run.deepest_on_ssd().ssd_copy

    def victims(self, group: Group, n: int) -> Sequence[Entry]:
        run = cast(RunGroup, group).first()
        if run is None:
            return ()
        if self._tier == DRAM:
            deepest = run.deepest_in_dram()
            return (deepest,) if n == 1 else run.end_of(n, deepest)
        deepest = run.deepest_on_ssd()
        if n == 1:
            return (cast("Entry", deepest.ssd_copy),)
        return [cast("Entry", block.ssd_copy) for block in run.ssd_end_of(n, deepest)]

    def spares(self, group: Group, n: int) -> Sequence[Entry]:
        """Lean: copies of blocks of one run that are in DRAM too, those that came there last first: they stay there longest."""
        twice = cast(RunGroup, group).twice
        if not self.lean or not twice:
            return ()
        blocks = list(islice(reversed(twice), n))
        run = blocks[0].run
        return [cast("Entry", block.ssd_copy) for block in takewhile(lambda block: block.run is run, blocks)]

    def retire(self, entries: Sequence[Entry]) -> None:
        brain, tier = self._brain, self._tier
        if tier == DRAM:
            blocks = cast("list[Block]", list(entries))
        else:
            blocks = [entry.block for entry in cast("Sequence[SsdCopy]", entries)]
        if not blocks:
            return
        run = blocks[0].run
        assert run is not None
        n, stays = len(blocks), blocks[0].where & IN[1 - tier]
        if not stays and not run.ends_in(blocks):
            for entry in entries:
                self.remove(entry)
            return
        cast(RunGroup, entries[0].group).n_entries -= n
        brain.n_copies -= n
        if tier == DRAM:
            run.n_dram -= n
        else:
            run.n_ssd -= n
        if not stays:
            brain.n_cached -= n
            brain.retire(blocks, tier)
            return
        here = ~(self._in | self._parked | TWICE)
        twice = ssd_group(blocks[0]).twice
        for block in blocks:
            if block.where & TWICE:
                twice.pop(block, None)
            block.where &= here
        if tier == SSD:
            brain.consider_ssd(run)
            return
        for block in blocks:
            if block.up is not None:
                block.up.n_dram_kids -= 1
        brain.consider(run)
        up = blocks[-1].up
        if up is not None and up.run is not None and up.run is not run:
            brain.consider_dram(up.run)

    def coldest(self, group: Group, n: int) -> list[Entry]:
        found: list[Entry] = []
        for entries in self._runs_in_order(group):
            found += entries
            if len(found) >= n:
                break
        return found[:n]

    def in_order(self, group: Group) -> Iterator[Entry]:
        for entries in self._runs_in_order(group):
            yield from entries

    def _runs_in_order(self, group: Group) -> Iterator[list[Entry]]:
        """Blocks of this tier, a run at a time, about in the order in which they would leave: when a run has left, the one above
        it is next in its turn. Nothing may change meanwhile."""
        above: list[tuple[float, int, Run]] = []
        seen: set[Run] = set()
        for worth, run in cast(RunGroup, group).in_order():
            while above and above[0][0] <= worth:
                yield self._of_run(heappop(above)[2], above, seen)
            if run not in seen:
                seen.add(run)
                yield self._of_run(run, above, seen)
        while above:
            yield self._of_run(heappop(above)[2], above, seen)

    def _of_run(self, run: Run, above: list[tuple[float, int, Run]], seen: set[Run]) -> list[Entry]:
        here = self._in
        mask = here | self._parked
        blocks = [block for block in reversed(run.members) if block is not None and block.where & mask == here]
        first = run.members[0]
        up = first.up.run if first is not None and first.up is not None else None
        if up is not None and up not in seen and (up.n_dram if self._tier == DRAM else up.n_ssd):
            seen.add(up)
            heappush(above, (self._brain.worth(up), up.no, up))
        return cast("list[Entry]", blocks if self._tier == DRAM else [block.ssd_copy for block in blocks])

    def tick_of(self, entry: Entry) -> int:
        block = self._block(entry)
        return block.run.tick if block.run is not None and block.where & self._in else 0

    def was_reused(self, entry: Entry) -> bool:
        block = self._block(entry)
        return block.run is not None and block.run.uses[block.run.index(block)] > 1

    def place_of(self, entry: Entry) -> tuple[int, int]:
        block = self._block(entry)
        return block.run.tick if block.run is not None and block.where & self._in else 0, block.rank

    def order_of(self, entry: Entry) -> float:
        block = self._block(entry)
        run = block.run
        if run is None or not block.where & self._in:
            return NOT_HERE
        return -self._brain.worth(run) * (1 + TIE * run.time_s - DEEPER * block.rank)

    def is_recent(self, tick: int, now: int, group: Group) -> bool:
        del group
        return tick > 0 and now - tick <= JOIN_TICKS

    def adopt(self, entry: Entry, tick: int, rank: int) -> None:
        del tick, rank
        block = self._block(entry)
        cast(RunGroup, entry.group).n_entries += 1
        self._brain.n_copies += 1
        block.where |= self._in
        self._brain.adopt(block)

    def adopted(self) -> None:
        self._brain.adopted()

    def behind(self, group: Group, tick: int, rank: int) -> list[Entry]:
        del group, tick, rank
        return []  # (what hangs below a block that is lost goes with it)

    def joins(self, entry: Entry, now: int) -> int:
        tick, run = self.tick_of(entry), self._block(entry).run
        under_way = run is not None and 0 < now - tick + 1 <= JOIN_TICKS and self._brain.now_s - run.time_s <= JOIN_S
        return tick if under_way else 0

    def park(self, entry: Entry) -> None:
        block = self._block(entry)
        if block.where & (self._in | self._parked) == self._in:
            block.where |= self._parked
            if self._tier == SSD and block.where & TWICE:
                ssd_group(block).twice.pop(block, None)
            self._brain.consider(block.run)  # type: ignore[arg-type]

    def is_parked(self, entry: Entry) -> bool:
        return bool(self._block(entry).where & self._parked)

    def unpark(self, entry: Entry) -> None:
        block = self._block(entry)
        if block.where & self._parked:
            block.where &= ~self._parked
            if self._tier == SSD and block.where & TWICE:
                ssd_group(block).twice[block] = None
            self._brain.consider(block.run)  # type: ignore[arg-type]

    def check(self) -> None:
        for group in self._groups.values():
            for block in group.twice:
                assert block.where & (IN_ANY | PARKED_SSD | TWICE) == IN_ANY | TWICE, "no second copy"
                assert ssd_group(block) is group
        self._brain.check()

    def _block(self, entry: Entry) -> Block:
        return cast("Block", entry) if self._tier == DRAM else cast("SsdCopy", entry).block
