"""Lines of blocks, as the textbook's policies (`queued`) keep them: which block is in which line, and whose turn is next.

    a line   turn 3: b7   turn 3: b6   turn 5: c2   turn 9: c1 ...      the least turn leaves next
    aside    b6: it has a child in its tier, or may not leave now; at its turn it is passed over, and when that is over it is
             back at its place

A turn is a batch's tick and, within it, the deepest block first. Owns places and turns, O(log blocks) for what enters and leaves
and O(1) for a use: that its turn came later is found when the earlier one is reached. Does not own which line a block belongs
to, nor whether it may leave.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from operator import attrgetter
from typing import Final

from kvpool.core.policy.eviction import NO_LIMIT, RANK_BITS, RANK_MAX, Entry, Group, GroupKey

# whether an entry may leave its tier, and why not
GOES: Final = 0
PARKED: Final = 1
HAS_CHILD: Final = 2  # what hangs on it goes first
StaysOf = Callable[[Entry], int]

SORT_MAX: Final = 16_384  # records of a line that are sorted at once, under the owner's lock
HEAP_SLACK: Final = 1024  # turns that are over, before the heap is made anew
SHRINK_PART: Final = 1024  # each block that leaves takes the capacity so much nearer to the number that is there

LOSE_NOTHING: Final = 0.0  # colder than every order here


def turn_of(tick: int, rank: int) -> int:
    """The earlier the less; in one tick the deeper the less."""
    return (tick << RANK_BITS) + RANK_MAX - (rank if rank < RANK_MAX else RANK_MAX)


def tick_of(turn: int) -> int:
    """Of `turn_of`."""
    return turn >> RANK_BITS


def rank_of(turn: int) -> int:
    """Of `turn_of`."""
    return RANK_MAX - (turn & RANK_MAX)


class Place:
    """Where an entry is. `turn`: in its line. `used`, `before`: turns of its last use and the last but one, 0: there was none.
    `uses`: for the policy. `aside`: it was passed over and is in no heap."""

    __slots__ = ("aside", "before", "entry", "line", "turn", "used", "uses")

    def __init__(self, entry: Entry, used: int) -> None:
        self.entry, self.used = entry, used
        self.line: Line | None = None
        self.turn = self.before = self.uses = 0
        self.aside = False


class Line:
    """Some places, by turn. `n`: how many, with those aside."""

    __slots__ = ("_heap", "_serial", "n")

    def __init__(self) -> None:
        # one record of each place in the line that is not aside, with its turn or an earlier one; and of some that left
        self._heap: list[tuple[int, int, Place]] = []
        self._serial = count()  # of equal turns the first to come is first
        self.n = 0

    def push(self, place: Place) -> None:
        """It has no record here."""
        heappush(self._heap, (place.turn, next(self._serial), place))
        if len(self._heap) > 2 * self.n + HEAP_SLACK:
            self._heap = [record for record in self._heap if record[2].line is self]
            heapify(self._heap)

    def head(self) -> Place | None:
        """Whose turn is next."""
        heap = self._heap
        while heap:
            turn, serial, place = heap[0]
            if place.line is not self:
                heappop(heap)
            elif place.turn != turn:
                heapreplace(heap, (place.turn, serial, place))
            else:
                return place
        return None

    def pass_over(self, place: Place) -> None:
        """Its head waits aside."""
        place.aside = True
        heappop(self._heap)

    def in_turn(self) -> Iterator[Place]:
        """All but those aside, about by turn. Nothing may change meanwhile."""
        if len(self._heap) <= SORT_MAX:
            self._heap.sort()  # (a heap, still)
        later = []
        for turn, _, place in self._heap if len(self._heap) <= SORT_MAX else self._walk():
            if place.line is self:
                if place.turn == turn:
                    yield place
                else:
                    later.append(place)
        later.sort(key=attrgetter("turn"))
        yield from later

    def _walk(self) -> Iterator[tuple[int, int, Place]]:
        """Its records in order, each O(log of those before it): who looks at some does not wait for all to be sorted."""
        heap = self._heap
        ahead = [(heap[0], 0)]
        while ahead:
            record, at = heappop(ahead)
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(heap):
                    heappush(ahead, (heap[below], below))
            yield record


class LinedGroup(Group, ABC):
    """Entries that can replace each other, in two lines. What is a policy's own: `admit`, `hit`, `left`, `first`."""

    __slots__ = ("capacity", "fresh_tick", "lines", "n_fresh", "places")

    def __init__(self, key: GroupKey) -> None:
        super().__init__(key)
        self.places: dict[Entry, Place] = {}
        self.lines = Line(), Line()
        self.fresh_tick = self.n_fresh = 0  # so many of the latest batch came into the first line
        self.capacity = 0.0  # the most that were here lately: how many there is room for

    @abstractmethod
    def admit(self, place: Place, name: int) -> None:
        """A new place, to be `put` into a line. It may have uses from the other tier. `name`: hash of its key."""

    @abstractmethod
    def hit(self, place: Place, turn: int) -> None:
        """Used again, in another batch: at this turn. `place.used` is still the last use's."""

    @abstractmethod
    def left(self, place: Place, name: int) -> None:
        """It is gone, but still says which line it was in."""

    @abstractmethod
    def first(self, stays: StaysOf, tick: int) -> Place | None:
        """The place that leaves next; the same when asked again. tick: the latest batch's."""

    @abstractmethod
    def limits(self, names: Sequence[int], turn: int) -> list[tuple[int, float]]:
        """Of new ones of a chain, in its order: as of `EvictionPolicy.limits`. `turn`: of the last, or any of that tick."""

    @abstractmethod
    def refused(self, name: int, turn: int) -> None:
        """It was not stored, but would have been used at this turn."""

    def order(self, place: Place) -> int:
        """Comparable between the tiers: the greater the sooner it leaves."""
        return -place.used

    def arrive(self, entry: Entry, name: int, turn: int, elsewhere: Place | None) -> None:
        """A new entry. elsewhere: where the block is in the other tier."""
        tick = tick_of(turn)
        if tick != self.fresh_tick:
            self.fresh_tick, self.n_fresh = tick, 0
        place = self.places[entry] = Place(entry, turn)
        if elsewhere is not None:
            place.before, place.uses = elsewhere.before, elsewhere.uses
        if len(self.places) > self.capacity:
            self.capacity = float(len(self.places))
        self.admit(place, name)
        self.n_fresh += place.line is self.lines[0]

    def use(self, entry: Entry, turn: int) -> None:
        """Nothing happens when it is not here, or was used later."""
        place = self.places.get(entry)
        if place is not None and turn > place.used:
            if turn >> RANK_BITS > place.used >> RANK_BITS:
                entry.reused = True
                self.hit(place, turn)
                place.before = place.used
            place.used = turn

    def leave(self, entry: Entry, name: int) -> None:
        """It is here, and goes."""
        place = self.places.pop(entry)
        line = place.line
        assert line is not None
        line.n -= 1
        self.capacity -= (self.capacity - len(self.places)) / SHRINK_PART
        self.left(place, name)
        place.line = None

    def put(self, place: Place, line: Line, turn: int) -> None:
        """Into this line, out of another."""
        place.turn = turn
        if place.line is not line:
            if place.line is not None:
                place.line.n -= 1
            place.line = line
            line.n += 1
            if not place.aside:
                line.push(place)

    def wake(self, entry: Entry) -> None:
        """It may leave again, perhaps."""
        place = self.places.get(entry)
        if place is not None and place.aside:
            place.aside = False
            assert place.line is not None
            place.line.push(place)

    def _self_limits(
        self, names: Sequence[int], turn: int, line: Line, least: float, known: Sequence[Collection[int]]
    ) -> list[tuple[int, float]]:
        """Of a policy whose new ones push each other out of this line, down to so many: they take its place, and no more."""
        own = self.n_fresh if self.fresh_tick == tick_of(turn) else 0
        left = max(line.n, int(least), 1) - own
        n = 0
        for name in names:
            if not any(name in gone for gone in known):
                if left <= 0:
                    break
                left -= 1
            n += 1
        return [part for part in ((n, NO_LIMIT), (len(names) - n, LOSE_NOTHING)) if part[0]]

    def in_order(self) -> Iterator[Entry]:
        """All, about as they would leave; those aside last. Nothing may change meanwhile."""
        for line in self.lines:
            for place in line.in_turn():
                yield place.entry
        for place in self.places.values():
            if place.aside:
                yield place.entry

    def check(self, stays: StaysOf) -> None:
        """Asserts the invariants. O(entries)."""
        for line in self.lines:
            records = [place for _, _, place in line._heap if place.line is line]
            assert len(records) == len(set(records)), "twice in a line"
            assert all(turn <= place.turn for turn, _, place in line._heap if place.line is line), "its turn came earlier"
            members = [place for place in self.places.values() if place.line is line]
            assert line.n == len(members)
            assert {place for place in members if not place.aside} == set(records), "in a line, but not in its heap"
        assert sum(line.n for line in self.lines) == len(self.places)
        assert all(entry is place.entry and entry.group is self for entry, place in self.places.items())
        assert all(stays(place.entry) for place in self.places.values() if place.aside), "aside without reason"
