"""Which block leaves a tier next. The seam (`EvictionPolicy`) and the textbook's policy, `Lru` with chains tail first; the
learned one is `hazard`.

Owns: the order. Does not own: whether a block may leave (pins, holds, copies below): the caller asks for victims and parks
those that must stay. One policy instance a tier; a group is what can replace each other slot for slot (one arena, one size).

Recency is (tick, rank): the tick is one batch's time, the rank a block's depth in its chain, so within one batch the deepest
block goes first and a prefix gets no hole. A batch that goes on where a recent one ended may use that one's tick: however a
chain was cut into batches, its order is the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from kvpool.core.types import NamespaceUid

RANK_BITS: Final = 24
RANK_MAX: Final = (1 << RANK_BITS) - 1
BUCKET_ENTRIES_MIN: Final = 64  # batches are put together until a bucket has this many: bounds the cost of single blocks

GroupKey = tuple[NamespaceUid, int]  # arena, slot_bytes

TICKS_RECENT: Final = 256  # batches after which a chain's part counts as used at another time than its continuation

NO_LIMIT: Final = -float(1 << 100)  # hotter than every order of a policy
NOT_PARKED: Final = 1  # order values are <= 0 for every tick >= 1


def tick_and_rank(order: int) -> tuple[int, int]:
    """Of a value of `EvictionPolicy.order_of` (not 1)."""
    return -(order >> RANK_BITS), order & RANK_MAX


class Entry:
    """What a policy orders: a block's copy in one tier. Fields belong to the policy, `group` is set before `add`."""

    __slots__ = ("bucket", "group", "parked", "reused")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.bucket: Bucket | None = None
        self.parked = NOT_PARKED
        self.reused = False


class Bucket:
    """Entries of some neighbouring ticks. Values: rank - (tick << RANK_BITS), the greatest goes first."""

    __slots__ = ("entries", "first", "last", "order")

    def __init__(self, tick: int) -> None:
        self.first = self.last = tick
        self.entries: dict[Entry, int] = {}
        self.order: list[Entry] | None = None  # sorted when first asked, the coldest last; may name entries that left


_NOWHERE: Final = Bucket(0)


class Group:
    """Entries that can replace each other. `firsts`: of its buckets, ascending; all ticks of a bucket are under the next one's
    first."""

    __slots__ = ("buckets", "firsts", "key", "n_parked")

    def __init__(self, key: GroupKey) -> None:
        self.key = key
        self.buckets: dict[int, Bucket] = {}
        self.firsts: list[int] = []
        self.n_parked = 0


class EvictionPolicy(Protocol):
    """Order of eviction in one tier. All calls under the owner's lock, each O(entries named)."""

    by_recency: bool
    """Whether what was used longest ago leaves next, always."""

    def at(self, now_ms: int) -> None:
        """It is this time now: before every batch."""
        ...

    def group(self, key: GroupKey) -> Group:
        """The group of this key, made when it is new."""
        ...

    def groups(self) -> Sequence[Group]:
        """All groups that were made and not dropped."""
        ...

    def drop_group(self, key: GroupKey) -> None:
        """Forgets an empty group."""
        ...

    def add(self, entries: Sequence[Entry], tick: int, ranks: Sequence[int]) -> None:
        """New entries in chain order, each with its rank."""
        ...

    def limits(self, entries: Sequence[Entry], tick: int) -> Sequence[tuple[int, float]]:
        """Of new entries, in chain order, of the batch of this tick: (so many of them, nothing may be lost for them that is not
        colder than this order)."""
        ...

    def refused(self, entries: Sequence[Entry], tick: int) -> None:
        """New entries of a chain that were not stored, for they are worth less than what is here."""
        ...

    def touch(self, entries: Sequence[Entry | None], tick: int, rank: int) -> None:
        """Used again, in chain order (None: a gap); entry i has rank `rank + i`. Entries that are not here are skipped. Never
        makes an entry colder."""
        ...

    def remove(self, entry: Entry) -> None:
        """Gone; nothing happens when it is not here."""
        ...

    def victim(self, group: Group) -> Entry | None:
        """The entry of this group that should leave next. It stays until removed, parked or touched."""
        ...

    def victims(self, group: Group, n: int) -> Sequence[Entry]:
        """`victim`, and up to n - 1 that would follow it and have its tick and order."""
        ...

    def spares(self, group: Group, n: int) -> Sequence[Entry]:
        """Up to n entries, alike as `victims`, that should leave before any victim where their blocks are in another tier too."""
        ...

    def retire(self, entries: Sequence[Entry]) -> None:
        """The first so many of `victims` or `spares` leave, in their order: `remove` of each."""
        ...

    def coldest(self, group: Group, n: int) -> list[Entry]:
        """Up to n entries, next victim first."""
        ...

    def tick_of(self, entry: Entry) -> int:
        """When it was last used, 0: not here."""
        ...

    def was_reused(self, entry: Entry) -> bool:
        """Whether it was used again since it was stored, as far as is remembered."""
        ...

    def place_of(self, entry: Entry) -> tuple[int, int]:
        """Tick and rank of an entry that is here."""
        ...

    def order_of(self, entry: Entry) -> float:
        """Where it stands, comparable between the tiers' policies: the greater the sooner it leaves. 1: not here."""
        ...

    def in_order(self, group: Group) -> Iterator[Entry]:
        """All entries that are not parked, about in the order in which they would leave. Nothing may change meanwhile."""
        ...

    def is_recent(self, tick: int, now: int, group: Group) -> bool:
        """Whether a batch that goes on where one of this tick ended belongs to the same use; `now`: the latest tick."""
        ...

    def joins(self, entry: Entry, now: int) -> int:
        """The tick of the use under way that a batch ending in this entry repeats (a get, then the put of the same chain), 0: it
        is a use of its own."""
        ...

    def behind(self, group: Group, tick: int, rank: int) -> list[Entry]:
        """What was used in the same batch as the one of this tick and rank and is deeper; parked ones are left out. Nothing
        where a policy knows what hangs below a block."""
        ...

    def adopt(self, entry: Entry, tick: int, rank: int) -> None:
        """As `add`, of a block that an earlier process left. Only before anything else, and ended by `adopted`."""
        ...

    def adopted(self) -> None:
        """All are adopted."""
        ...

    def is_parked(self, entry: Entry) -> bool:
        """Whether it was parked and is still here."""
        ...

    def park(self, entry: Entry) -> None:
        """May not leave now: it is no victim any more until `unpark` (same place as before) or `touch`."""
        ...

    def unpark(self, entry: Entry) -> None:
        """May leave again; nothing happens when it is not parked."""
        ...


class Lru:
    """Least recently used first; within one tick the deepest first. Equal to `lru()` of the offline study where every batch is
    a whole chain. Parked entries cost nothing while they are parked, so a long-held cold block is looked at once."""

    by_recency = True

    def __init__(self) -> None:
        self._groups: dict[GroupKey, Group] = {}

    def at(self, now_ms: int) -> None:
        del now_ms  # (recency is in ticks)

    def group(self, key: GroupKey) -> Group:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key)
        return group

    def groups(self) -> Sequence[Group]:
        return list(self._groups.values())

    def drop_group(self, key: GroupKey) -> None:
        group = self._groups.get(key)
        if group is not None and not group.buckets and not group.n_parked:
            del self._groups[key]

    def add(self, entries: Sequence[Entry], tick: int, ranks: Sequence[int]) -> None:
        group: Group | None = None
        bucket = _NOWHERE
        base = tick << RANK_BITS
        for i in range(len(entries) - 1, -1, -1):
            entry, rank = entries[i], ranks[i]
            if entry.group is not group:
                group = entry.group
                bucket = self._bucket(group, tick)
                bucket.order = None
            entry.bucket = bucket
            bucket.entries[entry] = (rank if rank < RANK_MAX else RANK_MAX) - base

    def limits(self, entries: Sequence[Entry], tick: int) -> Sequence[tuple[int, float]]:
        del tick
        return ((len(entries), NO_LIMIT),)

    def refused(self, entries: Sequence[Entry], tick: int) -> None:
        pass

    def touch(self, entries: Sequence[Entry | None], tick: int, rank: int) -> None:
        group: Group | None = None
        bucket = _NOWHERE
        values = bucket.entries
        base = rank - (tick << RANK_BITS)
        for i in range(len(entries) - 1, -1, -1):
            entry = entries[i]
            if entry is None:
                continue
            old = entry.bucket
            if old is None:
                if entry.parked == NOT_PARKED:
                    continue
                entry.parked = NOT_PARKED
                entry.group.n_parked -= 1
            if entry.group is not group:
                if group is not None and not bucket.entries:
                    _drop_bucket(group, bucket)
                group = entry.group
                bucket = self._bucket(group, tick)
                bucket.order = None
                values = bucket.entries
            value = base + i if rank + i < RANK_MAX else RANK_MAX - (tick << RANK_BITS)
            if old is not bucket:
                if old is not None:
                    if old.entries[entry] <= value:
                        continue
                    entry.reused = True
                    del old.entries[entry]
                    if not old.entries:
                        _drop_bucket(group, old)
                entry.bucket = bucket
                values[entry] = value
            elif values[entry] > value:
                values[entry] = value
                entry.reused = True
        if group is not None and not bucket.entries:
            _drop_bucket(group, bucket)

    def remove(self, entry: Entry) -> None:
        bucket = entry.bucket
        if bucket is not None:
            entry.bucket = None
            del bucket.entries[entry]
            if not bucket.entries:
                _drop_bucket(entry.group, bucket)
        elif entry.parked != NOT_PARKED:
            entry.parked = NOT_PARKED
            entry.group.n_parked -= 1

    def victim(self, group: Group) -> Entry | None:
        return self._order(group.buckets[group.firsts[0]])[-1] if group.firsts else None

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
        found: list[Entry] = []
        for first in group.firsts:
            bucket = group.buckets[first]
            order = self._order(bucket)
            found += [entry for entry in reversed(order) if entry.bucket is bucket][: n - len(found)]
            if len(found) >= n:
                break
        return found

    def tick_of(self, entry: Entry) -> int:
        if entry.bucket is not None:
            return -(entry.bucket.entries[entry] >> RANK_BITS)
        return 0 if entry.parked == NOT_PARKED else -(entry.parked >> RANK_BITS)

    def order_of(self, entry: Entry) -> int:
        return entry.parked if entry.bucket is None else entry.bucket.entries[entry]

    def was_reused(self, entry: Entry) -> bool:
        return entry.reused

    def place_of(self, entry: Entry) -> tuple[int, int]:
        return tick_and_rank(self.order_of(entry))

    def in_order(self, group: Group) -> Iterator[Entry]:
        for first in group.firsts:
            bucket = group.buckets[first]
            yield from (entry for entry in reversed(self._order(bucket)) if entry.bucket is bucket)

    def is_recent(self, tick: int, now: int, group: Group) -> bool:
        """Whether blocks used at this tick are still far from eviction."""
        victim = self.victim(group)
        horizon = 2 * TICKS_RECENT if victim is None else now - self.tick_of(victim)
        return tick > 0 and now - tick <= min(TICKS_RECENT, horizon // 2)

    def joins(self, entry: Entry, now: int) -> int:
        del entry, now
        return 0

    def adopt(self, entry: Entry, tick: int, rank: int) -> None:
        self.add([entry], tick, [rank])

    def adopted(self) -> None:
        pass

    def is_parked(self, entry: Entry) -> bool:
        return entry.parked != NOT_PARKED

    def behind(self, group: Group, tick: int, rank: int) -> list[Entry]:
        order = (rank if rank < RANK_MAX else RANK_MAX) - (tick << RANK_BITS)
        end = (1 - tick) << RANK_BITS
        at = bisect_right(group.firsts, tick) - 1
        if at < 0:
            return []
        return [entry for entry, value in group.buckets[group.firsts[at]].entries.items() if order < value < end]

    def park(self, entry: Entry) -> None:
        bucket = entry.bucket
        if bucket is not None:
            value = bucket.entries[entry]
            self.remove(entry)
            entry.parked = value
            entry.group.n_parked += 1

    def unpark(self, entry: Entry) -> None:
        value = entry.parked
        if value == NOT_PARKED:
            return
        entry.parked = NOT_PARKED
        group = entry.group
        group.n_parked -= 1
        bucket = self._bucket(group, -(value >> RANK_BITS))
        bucket.order = None
        bucket.entries[entry] = value
        entry.bucket = bucket

    def check(self) -> None:
        """Asserts the invariants. O(entries)."""
        for group in self._groups.values():
            assert group.firsts == sorted(group.buckets), "buckets out of order"
            for first, end in zip(group.firsts, [*group.firsts[1:], 1 << 62], strict=False):
                bucket = group.buckets[first]
                assert bucket.first == first <= bucket.last < end and bucket.entries
                assert all(first <= self.tick_of(e) <= bucket.last for e in bucket.entries), "not in order"
                assert all(e.bucket is bucket and e.group is group and e.parked == NOT_PARKED for e in bucket.entries)

    @staticmethod
    def _order(bucket: Bucket) -> list[Entry]:
        """The bucket's entries, the coldest last; the last one is there."""
        order, entries = bucket.order, bucket.entries
        if order is not None:
            while order and order[-1].bucket is not bucket:
                order.pop()
        if not order:
            order = bucket.order = sorted(entries, key=entries.__getitem__)
        return order

    @staticmethod
    def _bucket(group: Group, tick: int) -> Bucket:
        """Where entries of this tick belong. Neighbouring ticks share a bucket until it is large, so one may begin earlier later
        on, but never reach into another."""
        firsts, buckets = group.firsts, group.buckets
        at = bisect_right(firsts, tick) - 1
        if at >= 0:
            bucket = buckets[firsts[at]]
            if tick > bucket.last:
                if at == len(firsts) - 1 and len(bucket.entries) >= BUCKET_ENTRIES_MIN:
                    firsts.append(tick)
                    buckets[tick] = bucket = Bucket(tick)
                bucket.last = tick
            return bucket
        if firsts and len(buckets[firsts[0]].entries) < BUCKET_ENTRIES_MIN:
            bucket = buckets.pop(firsts[0])
            firsts[0] = bucket.first = tick
        else:
            bucket = Bucket(tick)
            firsts.insert(0, tick)
        buckets[tick] = bucket
        return bucket


def _drop_bucket(group: Group, bucket: Bucket) -> None:
    del group.buckets[bucket.first], group.firsts[bisect_left(group.firsts, bucket.first)]
