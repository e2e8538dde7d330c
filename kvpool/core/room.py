"""Making room in one tier: whose slots are given up for a put, a demotion or a promotion.

Owns: the search for victims, in the same size class or by emptying a whole extent of another. Does not own: the order
(`policy.eviction`), what eviction of a block means (`copies`).

Within a class: coldest first, slot for slot. Across classes bytes change hands an extent at a time; that is done when the
asking class has nothing to give up, or its coldest is much younger than the other's (memcached's slab rebalancing by tail age).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Final

from kvpool.core.policy.eviction import NO_LIMIT, Entry, EvictionPolicy, Group
from kvpool.core.slots import INDEX_BITS, SlabAllocator, Slot
from kvpool.core.types import NamespaceUid

DONORS_MAX: Final = 8  # other classes looked at, in turn, when the asking one could help itself
EXTENTS_MAX: Final = 64  # looked at in one call before giving up
COLD_EXTENTS_MAX: Final = 8  # extents taken by coldness, the rest in turn
COLDEST_MAX: Final = 64  # of a donor's coldest entries that say which extent to empty
TAIL_AGE_RATIO: Final = 2  # a donor's coldest must be this much older than the asking class's
DEAR_MAX: Final = 64  # entries passed over because others are lost with them; then the one with the fewest goes
BELOW_MAX: Final = 64  # of which so many are counted
ASIDE_MIN: Final = 8  # entries that must be cleaned first are passed over up to this many, or as many as are needed


class Leave(Enum):
    """Whether an entry may leave its tier now."""

    YES = 1
    BUSY = 2  # pinned, held or reserved
    DIRTY = 3  # must be written down first


class Room:
    """Evicts from one tier. `may_leave`, `evict` and `slot_of` are the owner's; `evict` frees the entry's slot at once."""

    def __init__(
        self, slots: SlabAllocator, policy: EvictionPolicy, *, may_leave: Callable[[Entry, int], Leave],
        evict: Callable[[Entry], None], evict_many: Callable[[Sequence[Entry]], None], park: Callable[[Entry], None],
        set_aside: Callable[[Sequence[Entry], int], None], slot_of: Callable[[Entry], Slot],
        survives: Callable[[Entry, int], bool], orphaned: Callable[[NamespaceUid, dict[int, int]], None],
        waiting: Mapping[int, None], is_of: Callable[[Entry, Collection[int]], bool], carries: Callable[[Entry], bool],
        n_below: Callable[[Entry, int], int], is_writing: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`may_leave(entry, spare_tick)`. `evict_many`: of what `policy.victims` gave, from its first on. `set_aside(entries,
        spare_tick)`: the first of these must be cleaned, and is no victim until then (where a policy is not by recency: a put
        waits for no write while there is a clean one). `survives(entry, spare_tick)`: whether the block would still be there
        when the entry leaves this tier (perhaps after a write). `orphaned(arena, {tick: rank})`: an extent was emptied and these
        went for good, the first in order of each tick: what is behind them in a chain is not to be reached any more. `waiting`:
        ticks of puts that wait for room; nothing of them is lost. `is_of(entry, ticks)`: whether it, or what hangs on it, was
        used at one of these. `carries(entry)`: whether others, in another tier, are lost with it: of its class it goes when
        nothing else may (DEAR_MAX such are passed over) and none comes by being cleaned (`is_writing()`), the one with the
        fewest (`n_below(entry, n_max)`) first."""
        self._slots, self._policy = slots, policy
        self._may_leave, self._evict, self._evict_many, self._park, self._slot_of = may_leave, evict, evict_many, park, slot_of
        self._set_aside, self._survives, self._orphaned = set_aside, survives, orphaned
        self._waiting, self._is_of = waiting, is_of
        self._carries, self._n_below, self._is_writing = carries, n_below, is_writing
        self._turn = 0
        self.emptying = 0  # number of the extent whose dirty blocks are being written down for somebody, 0: none

    def make(
        self, group: Group, need: int, *, now: int, spare_tick: int, limit: float = NO_LIMIT, at_once: int = 1
    ) -> tuple[int, list[Entry]]:
        """Tries to free `need` slots of this group. -> (entries evicted, entries that must be cleaned first).

        now: the current tick. at_once: up to so many are evicted where they are alike for the policy, though fewer are needed
        now. spare_tick: entries used at this tick (the asking batch's own chain) are left alone where that would lose them.
        limit: only what is colder than this order is lost (of whole extents: the class's coldest is). Evicted may be more than
        needed (an extent is emptied whole) or too little: ask the allocator, then again while something was evicted."""
        evicted = self._evict_spares(group, need, spare_tick, at_once)
        if evicted:
            return evicted, []
        donor = self._older_donor(group, now)
        self._turn += DONORS_MAX
        looks = [EXTENTS_MAX]
        dirty: list[Entry] = []
        if donor is not None and self._tail(donor) > limit:
            evicted = self._empty_extent(donor, dirty, (spare_tick, now), looks)
            if evicted:
                return evicted, []
            dirty.clear()  # (its own class will do)
        evicted, dirty, holds_back = self._evict_own(group, need, spare_tick, limit, at_once)
        if not evicted and not dirty and not holds_back:
            others = [other for other in self._policy.groups() if other is not group]
            for other in sorted(others, key=lambda g: self._tail_tick(g, now)):
                if self._tail(other) <= limit:
                    break
                evicted = self._empty_extent(other, dirty, (spare_tick, now), looks)
                if evicted or dirty or not looks[0]:
                    break
        return evicted, dirty

    def could_make(self, group: Group, *, now: int, spare_tick: int, limit: float) -> bool:
        """Whether `make` would find something to evict, as far as one look tells."""
        policy = self._policy
        spares = policy.spares(group, 1)
        if spares and self._may_leave(spares[0], spare_tick) is Leave.YES and self._survives(spares[0], spare_tick):
            return True
        entry = policy.victim(group)
        while entry is not None and self._may_leave(entry, spare_tick) is Leave.BUSY:
            self._park(entry)
            entry = policy.victim(group)
        if entry is not None:
            if policy.order_of(entry) > limit and not self._is_spared(policy.tick_of(entry), spare_tick):
                return True
            if self._survives(entry, spare_tick):
                return True
        donor = self._older_donor(group, now)
        if donor is not None and self._tail(donor) > limit:
            return True
        return any(self._tail(other) > limit for other in policy.groups() if other is not group)

    def _is_spared(self, tick: int, spare_tick: int) -> bool:
        return tick == spare_tick or tick in self._waiting

    def is_emptying(self, entry: Entry) -> bool:
        """Whether its slot is in the extent whose blocks are written down to empty it."""
        return self._slot_of(entry) >> INDEX_BITS == self.emptying

    def _evict_own(
        self, group: Group, need: int, spare_tick: int, limit: float, at_once: int = 1
    ) -> tuple[int, list[Entry], bool]:
        """-> (evicted, to be cleaned first, whether there are others, which wait until what is being cleaned may leave)."""
        policy = self._policy
        aside: list[Entry] = []
        own: list[Entry] = []
        dear: list[Entry] = []
        evicted = 0
        while evicted < need:
            entries = policy.victims(group, max(need - evicted, at_once))
            if not entries:
                break
            entry = entries[0]
            leave = self._may_leave(entry, spare_tick)
            if leave is Leave.YES and not self._survives(entry, spare_tick):  # (a dirty one would be written down)
                if self._is_spared(policy.tick_of(entry), spare_tick):
                    policy.park(entry)
                    own.append(entry)
                    continue
                if policy.order_of(entry) <= limit:
                    break
                if self._carries(entry):
                    policy.park(entry)
                    dear.append(entry)
                    if len(dear) >= DEAR_MAX:
                        break
                    continue
            if leave is Leave.YES:
                evicted += self._evict_alike(entries, spare_tick)
            elif leave is Leave.BUSY:
                self._park(entry)
            elif not policy.by_recency:
                self._set_aside(entries, spare_tick)
            else:
                policy.park(entry)
                aside.append(entry)
                if len(aside) >= max(ASIDE_MIN, need - evicted):
                    break
        for entry in reversed(own):
            policy.unpark(entry)
        for entry in reversed(dear):
            policy.unpark(entry)
        holds_back = bool(dear) and not evicted and not aside and self._is_writing()
        if dear and not evicted and not aside and not holds_back:
            self._evict(min(dear, key=lambda entry: self._n_below(entry, BELOW_MAX)))
            evicted = 1
        for entry in reversed(aside):
            policy.unpark(entry)
        return evicted, aside, holds_back

    def _evict_alike(self, entries: Sequence[Entry], spare_tick: int) -> int:
        """The first, and those behind it that may leave and survive it as it does. -> how many."""
        n, alike = 1, self._survives(entries[0], spare_tick)
        while (
            n < len(entries)
            and self._may_leave(entries[n], spare_tick) is Leave.YES
            and self._survives(entries[n], spare_tick) is alike
        ):
            n += 1
        if n == 1:
            self._evict(entries[0])
        else:
            self._evict_many(entries[:n])
        return n

    def _evict_spares(self, group: Group, need: int, spare_tick: int, at_once: int) -> int:
        """Copies that nothing is lost with, where the policy names some. -> how many."""
        policy = self._policy
        kept: list[Entry] = []
        evicted = 0
        while evicted < need and (entries := policy.spares(group, max(need - evicted, at_once))):
            leave = self._may_leave(entries[0], spare_tick)
            if leave is Leave.YES and self._survives(entries[0], spare_tick):
                evicted += self._evict_alike(entries, spare_tick)
            elif leave is Leave.BUSY:
                self._park(entries[0])
            else:
                policy.park(entries[0])
                kept.append(entries[0])
        for entry in reversed(kept):
            policy.unpark(entry)
        return evicted

    def _tail(self, group: Group) -> float:
        """Order of its coldest entry; NO_LIMIT: it has none."""
        victim = self._policy.victim(group)
        return NO_LIMIT if victim is None else self._policy.order_of(victim)

    def _tail_tick(self, group: Group, now: int) -> int:
        victim = self._policy.victim(group)
        return now + 1 if victim is None else self._policy.tick_of(victim)

    def _older_donor(self, group: Group, now: int) -> Group | None:
        """A class whose coldest entry is much older than this one's coldest. (None also when this one has nothing: then `make`
        looks at all others.)"""
        groups = self._policy.groups()
        if len(groups) < 2:
            return None
        own_age = now - self._tail_tick(group, now)
        if own_age < 0:
            return None
        best, best_age = None, max(1, own_age) * TAIL_AGE_RATIO
        for step in range(min(DONORS_MAX, len(groups))):
            other = groups[(self._turn + step) % len(groups)]
            age = now - self._tail_tick(other, now)
            if other is not group and age > best_age:
                best, best_age = other, age
        return best

    def _empty_extent(self, donor: Group, dirty: list[Entry], spare: tuple[int, int], looks: list[int]) -> int:
        """Evicts every block of one extent of the donor: the one with most of its coldest blocks, else any that has no busy
        one, and would lose nothing of the ticks in `spare` (the asking batch's, the latest). -> how many; 0: none could be
        emptied; `dirty` then has what to write down so that one can. `looks[0]` counts down."""
        arena, slot_bytes = donor.key
        spare_tick = spare[0]
        extents = {extent.number: extent for extent in self._slots.extents_of(arena, slot_bytes)}
        tally = Counter(self._slots.extent_of(self._slot_of(entry)).number for entry in self._policy.coldest(donor, COLDEST_MAX))
        first = [self.emptying, *(number for number, _ in tally.most_common(COLD_EXTENTS_MAX))]
        rest = list(extents)
        at = self._turn % max(1, len(rest))
        for number in [*first, *rest[at:], *rest[:at]]:
            extent = extents.pop(number, None)
            if extent is None:
                continue
            if not looks[0]:
                break
            looks[0] -= 1
            spared = {*spare, *self._waiting}
            owners: list[Entry] = [owner for owner in extent.owners if owner is not None]
            unclean = []
            for owner in owners:
                leave = self._may_leave(owner, spare_tick)
                if leave is Leave.BUSY:
                    break
                if not self._survives(owner, spare_tick) and self._is_of(owner, spared):
                    break
                if leave is Leave.DIRTY:
                    unclean.append(owner)
            else:
                if unclean:
                    dirty += unclean
                    self.emptying = number
                    return 0
                lost = self._first_lost(owners, spare_tick)
                for owner in owners:
                    if self._may_leave(owner, spare_tick) is not Leave.BUSY:  # (it may have gone with another, as its orphan)
                        self._evict(owner)
                if lost:
                    self._orphaned(arena, lost)
                if number == self.emptying:
                    self.emptying = 0
                return len(owners)
        self._turn += 1
        return 0

    def _first_lost(self, owners: list[Entry], spare_tick: int) -> dict[int, int]:
        """Of those that do not survive: the least rank of each tick."""
        first: dict[int, int] = {}
        for owner in owners:
            if not self._survives(owner, spare_tick):
                tick, rank = self._policy.place_of(owner)
                first[tick] = min(rank, first.get(tick, rank))
        return first
