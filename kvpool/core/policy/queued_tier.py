"""One tier's face of the textbook's policies (`queued`): the `EvictionPolicy` that rooms and copies talk to.

Owns families of blocks (`runs.link`), what is parked, and when a block that was passed over may leave again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, cast

from kvpool.core.policy import lines
from kvpool.core.policy.eviction import Entry, EvictionPolicy, Group, GroupKey
from kvpool.core.policy.lines import LinedGroup, Place, rank_of, tick_of, turn_of
from kvpool.core.policy.runs import DRAM, IN, IN_ANY, IN_DRAM, PARKED, PARKED_DRAM, PARKED_SSD, is_parent, link, unlink

if TYPE_CHECKING:
    from kvpool.core.block import Block

JOIN_TICKS: Final = 256  # a later batch of a chain used so few batches ago, and
JOIN_MS: Final = 60_000  # so little time, is of the same request
NOT_HERE: Final = 1


class Queued:
    """A policy of the textbook of one worker, all tiers. Not thread-safe: under the owner's lock."""

    def __init__(self, make: Callable[[GroupKey], LinedGroup]) -> None:
        self.make = make
        self.now_ms = 0.0
        self.tick = 0  # the latest batch's
        self._began_ms: OrderedDict[int, float] = OrderedDict()  # of the latest batches
        self._n_tiers = 0

    def tier(self) -> EvictionPolicy:
        """The policy of the next tier: DRAM first, then SSD."""
        made = QueuedTier(self, self._n_tiers)
        self._n_tiers += 1
        return made

    def batch(self, tick: int) -> None:
        """Something of this tick happens."""
        if tick not in self._began_ms:
            self._began_ms[tick] = self.now_ms
            if len(self._began_ms) > JOIN_TICKS:
                self._began_ms.popitem(last=False)
            if tick > self.tick:
                self.tick = tick

    def is_under_way(self, tick: int) -> bool:
        """Whether what happens now may be of the request of this tick."""
        return self.now_ms - self._began_ms.get(tick, -JOIN_MS - 1) <= JOIN_MS


class QueuedTier:
    """One tier's `EvictionPolicy`."""

    by_recency = False

    def __init__(self, brain: Queued, tier: int) -> None:
        self._brain, self._tier = brain, tier
        self._in, self._parked = IN[tier], PARKED[tier]
        self._stays = _stays_in_dram if tier == DRAM else _stays_on_ssd
        self._groups: dict[GroupKey, LinedGroup] = {}
        self._all_groups: Sequence[Group] = ()  # made anew when they change: others go through it meanwhile
        self._adopting: list[Block] = []

    def at(self, now_ms: int) -> None:
        self._brain.now_ms = max(self._brain.now_ms, now_ms)

    def group(self, key: GroupKey) -> Group:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = self._brain.make(key)
            self._all_groups = (*self._groups.values(),)
        return group

    def groups(self) -> Sequence[Group]:
        return self._all_groups

    def drop_group(self, key: GroupKey) -> None:
        group = self._groups.get(key)
        if group is not None and not group.places:
            del self._groups[key]
            self._all_groups = (*self._groups.values(),)

    def add(self, entries: Sequence[Entry], tick: int, ranks: Sequence[int]) -> None:
        self._brain.batch(tick)
        tier = self._tier
        above: Block | None = None
        for entry, rank in zip(entries, ranks, strict=True):
            block = self._block(entry)
            if not block.where & IN_ANY and block.up is None:
                if above is not None and above.kid is None and is_parent(above, block):
                    block.up = above
                    above.kid = block
                else:
                    link(block, above)
            block.where |= self._in
            elsewhere = _place(block.ssd_copy if tier == DRAM else block)
            cast(LinedGroup, entry.group).arrive(entry, hash(block.key), turn_of(tick, rank), elsewhere)
            if tier == DRAM:
                if block.up is not None:
                    block.up.n_dram_kids += 1
                if block.ssd_copy is not None:  # (that may leave now, whatever hangs below it)
                    _wake(block.ssd_copy)
            above = block

    def limits(self, entries: Sequence[Entry], tick: int) -> Sequence[tuple[int, float]]:
        group = cast(LinedGroup, entries[0].group)
        names = [hash(self._block(entry).key) for entry in entries]
        return group.limits(names, turn_of(tick, 0))

    def refused(self, entries: Sequence[Entry], tick: int) -> None:
        for entry in reversed(entries):
            block = self._block(entry)
            cast(LinedGroup, entry.group).refused(hash(block.key), turn_of(tick, block.rank))

    def touch(self, entries: Sequence[Entry | None], tick: int, rank: int) -> None:
        self._brain.batch(tick)
        in_dram = self._tier == DRAM  # (the SSD copies of the same blocks are named to the other one)
        above: Entry | None = None
        for i, entry in enumerate(entries):
            if entry is not None:
                if in_dram and i and entry.up is None and entry.where & IN_ANY:  # type: ignore[attr-defined]
                    link(cast("Block", entry), cast("Block | None", above))
                cast(LinedGroup, entry.group).use(entry, turn_of(tick, rank + i))
            above = entry

    def remove(self, entry: Entry) -> None:
        block, tier = self._block(entry), self._tier
        if not block.where & self._in:
            return
        block.where &= ~(self._in | self._parked)
        cast(LinedGroup, entry.group).leave(entry, hash(block.key))
        up = block.up
        if tier == DRAM and up is not None:
            up.n_dram_kids -= 1
            if not up.n_dram_kids:
                _wake(up)
        if not block.where & IN_ANY:
            unlink(block)
            if up is not None and up.kid is None and up.ssd_copy is not None:
                _wake(up.ssd_copy)

    def victim(self, group: Group) -> Entry | None:
        place = cast(LinedGroup, group).first(self._stays, self._brain.tick)
        return None if place is None else place.entry

    def victims(self, group: Group, n: int) -> Sequence[Entry]:
        del n
        victim = self.victim(group)
        return () if victim is None else (victim,)

    def spares(self, group: Group, n: int) -> Sequence[Entry]:
        del group, n
        return ()

    def retire(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.remove(entry)

    def coldest(self, group: Group, n: int) -> list[Entry]:
        return list(islice(self.in_order(group), n))

    def in_order(self, group: Group) -> Iterator[Entry]:
        return (entry for entry in cast(LinedGroup, group).in_order() if not self.is_parked(entry))

    def tick_of(self, entry: Entry) -> int:
        place = _place(entry)
        return 0 if place is None else tick_of(place.used)

    def was_reused(self, entry: Entry) -> bool:
        return entry.reused

    def place_of(self, entry: Entry) -> tuple[int, int]:
        place = _place(entry)
        return (0, self._block(entry).rank) if place is None else (tick_of(place.used), rank_of(place.used))

    def order_of(self, entry: Entry) -> float:
        place = _place(entry)
        return NOT_HERE if place is None else cast(LinedGroup, entry.group).order(place)

    def is_recent(self, tick: int, now: int, group: Group) -> bool:
        del group
        return tick > 0 and now - tick <= JOIN_TICKS

    def joins(self, entry: Entry, now: int) -> int:
        tick = self.tick_of(entry)
        return tick if tick and now - tick < JOIN_TICKS and self._brain.is_under_way(tick) else 0

    def behind(self, group: Group, tick: int, rank: int) -> list[Entry]:
        del group, tick, rank
        return []  # (what hangs below a block that is lost goes with it)

    def adopt(self, entry: Entry, tick: int, rank: int) -> None:
        block = self._block(entry)
        block.where |= self._in
        cast(LinedGroup, entry.group).arrive(entry, hash(block.key), turn_of(tick, rank), None)
        self._adopting.append(block)

    def adopted(self) -> None:
        blocks, self._adopting = self._adopting, []
        for block in blocks:
            link(block, None)

    def park(self, entry: Entry) -> None:
        block = self._block(entry)
        if block.where & self._in:
            block.where |= self._parked

    def is_parked(self, entry: Entry) -> bool:
        return bool(self._block(entry).where & self._parked)

    def unpark(self, entry: Entry) -> None:
        block = self._block(entry)
        if block.where & self._parked:
            block.where &= ~self._parked
            _wake(entry)

    def check(self) -> None:
        """Asserts the invariants. O(everything)."""
        for group in self._groups.values():
            group.check(self._stays)
            for entry in group.places:
                block = self._block(entry)
                kids = []
                kid = block.kid
                while kid is not None:
                    assert kid.up is block and kid.where & IN_ANY, "a child that is gone"
                    kids.append(kid)
                    kid = kid.next_kid
                assert block.where & self._in and block.n_dram_kids == sum(bool(kid.where & IN_DRAM) for kid in kids)

    def _block(self, entry: Entry) -> Block:
        return entry if self._tier == DRAM else entry.block  # type: ignore[attr-defined, return-value]


def _place(entry: Entry | None) -> Place | None:
    return None if entry is None else cast(LinedGroup, entry.group).places.get(entry)


def _wake(entry: Entry) -> None:
    cast(LinedGroup, entry.group).wake(entry)


def _stays_in_dram(entry: Entry) -> int:
    block = cast("Block", entry)
    if block.where & PARKED_DRAM:
        return lines.PARKED
    return lines.HAS_CHILD if block.n_dram_kids else lines.GOES


def _stays_on_ssd(entry: Entry) -> int:
    """(A copy of a block that is in DRAM too may go, whatever hangs on that.)"""
    block: Block = entry.block  # type: ignore[attr-defined]
    if block.where & PARKED_SSD:
        return lines.PARKED
    return lines.HAS_CHILD if block.kid is not None and not block.where & IN_DRAM else lines.GOES
