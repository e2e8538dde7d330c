"""The textbook's policies beside LRU, of blocks in chains: S3-FIFO, ARC and LRU-2, each as two lines (`lines`).

Owns which line a block is in, and ghosts: the names of blocks that left. Does not own chains: a block with a child in its tier is
passed over until it has none. Of each tier, namespace and size there is one of these, as large as there are blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final

from kvpool.core.policy.eviction import RANK_BITS, GroupKey
from kvpool.core.policy.lines import HAS_CHILD, Line, LinedGroup, Place, StaysOf, rank_of, tick_of, turn_of

SMALL_PART: Final = 10
USES_MAX: Final = 3
PAST_RATIO: Final = 4  # of what is here: so many that left are remembered by LRU-2
ORDER_BITS: Final = 60  # of a turn: batches of a worker are counted in fewer


class S3Fifo(LinedGroup):
    """S3-FIFO (Yang and others, SOSP 2023): a small queue for the new, a main one for what was used again, ghosts of the small
    one's victims."""

    __slots__ = ("_ghosts",)

    def __init__(self, key: GroupKey) -> None:
        super().__init__(key)
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def admit(self, place: Place, name: int) -> None:
        small, main = self.lines
        if name in self._ghosts:
            del self._ghosts[name]
            place.entry.reused = True
            self.put(place, main, place.used)
        else:
            self.put(place, small, place.used)

    def hit(self, place: Place, turn: int) -> None:
        del turn  # (it stays where it is)
        if place.uses < USES_MAX:
            place.uses += 1
            if place.aside:
                self.wake(place.entry)

    def limits(self, names: Sequence[int], turn: int) -> list[tuple[int, float]]:
        return self._self_limits(names, turn, self.lines[0], self.capacity / SMALL_PART, (self._ghosts,))

    def refused(self, name: int, turn: int) -> None:
        del turn
        self._ghosts[name] = None
        while len(self._ghosts) > self.capacity:
            self._ghosts.popitem(last=False)

    def left(self, place: Place, name: int) -> None:
        if place.line is self.lines[0]:
            self.refused(name, 0)

    def first(self, stays: StaysOf, tick: int) -> Place | None:
        small, main = self.lines
        while True:
            place = small.head() if main.n <= self.capacity - self.capacity / SMALL_PART else None
            place = place or main.head() or small.head()
            if place is None:
                return None
            line = place.line
            assert line is not None
            if line is small and place.uses > 1:
                place.uses = 0
                self.put(place, main, turn_of(tick, rank_of(place.turn)))
            elif line is main and place.uses:
                place.uses -= 1
                self.put(place, main, turn_of(tick, rank_of(place.turn)))
            elif not (why := stays(place.entry)):
                return place
            elif line is small and why == HAS_CHILD:
                self.put(place, main, turn_of(tick, rank_of(place.turn)))
            else:
                line.pass_over(place)


class Arc(LinedGroup):
    """ARC (Megiddo and Modha, FAST 2003): what was used once and what was used again, each with ghosts that say which of the two
    should be larger."""

    __slots__ = ("_again_gone", "_once_gone", "_target")

    def __init__(self, key: GroupKey) -> None:
        super().__init__(key)
        self._once_gone: OrderedDict[int, None] = OrderedDict()
        self._again_gone: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0  # of those used once

    def admit(self, place: Place, name: int) -> None:
        once_gone, again_gone = self._once_gone, self._again_gone
        again = place.before > 0
        if name in once_gone:
            self._target = min(self.capacity, self._target + max(1.0, len(again_gone) / len(once_gone)))
            del once_gone[name]
            again = place.entry.reused = True
        elif name in again_gone:
            self._target = max(0.0, self._target - max(1.0, len(once_gone) / len(again_gone)))
            del again_gone[name]
            again = place.entry.reused = True
        self.put(place, self.lines[again], place.used)

    def hit(self, place: Place, turn: int) -> None:
        self.put(place, self.lines[1], turn)

    def limits(self, names: Sequence[int], turn: int) -> list[tuple[int, float]]:
        return self._self_limits(names, turn, self.lines[0], self._target, (self._once_gone, self._again_gone))

    def refused(self, name: int, turn: int) -> None:
        del turn
        self._went(name, self._once_gone)

    def left(self, place: Place, name: int) -> None:
        self._went(name, self._once_gone if place.line is self.lines[0] else self._again_gone)

    def _went(self, name: int, gone: OrderedDict[int, None]) -> None:
        once, _ = self.lines
        once_gone, again_gone = self._once_gone, self._again_gone
        gone[name] = None
        while once_gone and len(once_gone) + once.n > self.capacity:
            once_gone.popitem(last=False)
        while len(once_gone) + len(again_gone) + len(self.places) > 2 * self.capacity:
            (again_gone or once_gone).popitem(last=False)

    def first(self, stays: StaysOf, tick: int) -> Place | None:
        del tick
        once, again = self.lines
        return _first_of((once, again) if again.n < self.capacity - self._target else (again, once), stays)


class Lru2(LinedGroup):
    """LRU-2 (O'Neil and others, SIGMOD 1993): the one whose last use but one is longest ago goes first, before it what was used
    once, the least recently used first. Uses are remembered of four times as many blocks as are here."""

    __slots__ = ("_past",)

    def __init__(self, key: GroupKey) -> None:
        super().__init__(key)
        self._past: OrderedDict[int, int] = OrderedDict()

    def admit(self, place: Place, name: int) -> None:
        once, again = self.lines
        past = self._past.pop(name, 0)
        if past:
            place.entry.reused = True
        if not place.before and tick_of(past) < tick_of(place.used):
            place.before = past
        self.put(place, again if place.before else once, place.before or place.used)

    def hit(self, place: Place, turn: int) -> None:
        del turn  # (that is its last use, from here on)
        self.put(place, self.lines[1], place.used)

    def limits(self, names: Sequence[int], turn: int) -> list[tuple[int, float]]:
        orders = [self._order(self._past.get(name, 0), turn) for name in names]
        return [(len(list(alike)), order) for order, alike in groupby(orders)]

    def left(self, place: Place, name: int) -> None:
        self.refused(name, place.used)

    def refused(self, name: int, turn: int) -> None:
        self._past[name] = turn
        while len(self._past) > PAST_RATIO * self.capacity:
            self._past.popitem(last=False)

    def first(self, stays: StaysOf, tick: int) -> Place | None:
        del tick
        return _first_of(self.lines, stays)

    def order(self, place: Place) -> int:
        return self._order(place.before, place.used)

    @staticmethod
    def _order(before: int, used: int) -> int:
        return -((before >> RANK_BITS) << ORDER_BITS) - used


def _first_of(lines: tuple[Line, Line], stays: StaysOf) -> Place | None:
    for line in lines:
        while (place := line.head()) is not None:
            if not stays(place.entry):
                return place
            line.pass_over(place)
    return None


QUEUED: Final[dict[str, Callable[[GroupKey], LinedGroup]]] = {"s3fifo": S3Fifo, "arc": Arc, "lru2": Lru2}
