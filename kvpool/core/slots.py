"""Slab allocator of one tier: which bytes of the tier belong to which slot.

Owns: extents (runs of equal slots), their free maps, the tier's byte budget, places in arenas. Does not own: blocks and what
is evicted (`blocks`), memory and files (`worker.tiers`). Pure: what the shell must do comes out of `drain_actions`.

    budget (capacity_bytes) ── bytes are handed to extents of any arena and class, in whole slots

    arena of a namespace     position 0          position 1          position 2 ...     (virtual, sparse; stride_bytes apart)
                             ┌──┬──┬──┬──┬──┐    ┌─────┬─────┬───┐   (a slot over stride_bytes: its own extent, several
                             positions) │s0│s1│s2│s3│s4│    │ s0  │ s1  │   │
                             └──┴──┴──┴──┴──┘    └─────┴─────┴───┘
                             extent, class 12 KiB  extent, class 20 KiB

A slot number is extent number << 32 | index. Extents never move. An extent whose slots are all free stays with its class as a
spare until another class needs its bytes. Slab allocation after Bonwick (USENIX 1994); classes share pages as in memcached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NewType

from kvpool.core.types import PAGE_BYTES, NamespaceUid

Slot = NewType("Slot", int)

EXTENT_BYTES: Final = 64 << 20  # large enough that populating and punching are rare, small enough to change hands
EXTENT_BYTES_MIN: Final = 64 << 10
EXTENTS_MIN: Final = 16  # a small pool has at least about this many, so that two classes can share it
SLOT_BYTES_MIN: Final = 512
SLOTS_PER_EXTENT_MAX: Final = 8192  # bounds the work of emptying one extent; also spaces the generation words
SPARE_POSITIONS: Final = 256  # of an arena beyond twice the tier: one partly filled extent a size class
RUN_SEARCH_EXTENTS: Final = 8  # extents looked at for one unbroken run before taking pieces
INDEX_BITS: Final = 32
INDEX_MASK: Final = (1 << INDEX_BITS) - 1
_FREE, _USED = b"\x01", b"\x00"


def _no_overhead(_: int) -> int:
    return 0


def size_class(size: int) -> int:
    """Smallest class that holds `size` bytes: eight a doubling, so at most 1/9 of a slot is lost; never under 512 bytes."""
    if size <= SLOT_BYTES_MIN:
        return SLOT_BYTES_MIN
    step = 1 << ((size - 1).bit_length() - 4)
    return -(-size // step) * step


@dataclass(frozen=True, slots=True)
class PopulateExtent:
    """New bytes for an extent: its pages may be populated, its file created. `offset_bytes`: in the arena; of a grown extent
    only the new part (`n_slots`: all slots that it has now)."""

    number: int
    arena: NamespaceUid
    offset_bytes: int
    length_bytes: int
    slot_bytes: int
    n_slots: int


@dataclass(frozen=True, slots=True)
class PunchExtent:
    """The extent is gone: give its pages (or its file) back. Its place is not used again before this was done."""

    number: int
    arena: NamespaceUid
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class CloseArena:
    """No slot of this arena is left and none will come: its memory may be closed."""

    arena: NamespaceUid


SlabAction = PopulateExtent | PunchExtent | CloseArena


class Extent:
    """`n_slots` slots of `slot_bytes` at `position` of `arena`. `owners[i]`: what the caller stored in slot i, None when
    free."""

    __slots__ = ("arena", "free_map", "n_free", "n_positions", "n_slots", "number", "owners", "position", "slot_bytes")

    def __init__(self, number: int, arena: NamespaceUid, slot_bytes: int, position: int, n_positions: int) -> None:
        self.number, self.arena, self.slot_bytes = number, arena, slot_bytes
        self.position, self.n_positions = position, n_positions
        self.n_slots = self.n_free = 0
        self.free_map = bytearray()
        self.owners: list[Any] = []

    def grow(self, n_slots: int) -> None:
        self.n_slots += n_slots
        self.n_free += n_slots
        self.free_map += _FREE * n_slots
        self.owners += [None] * n_slots


class _Class:
    """All extents of one (arena, slot size)."""

    __slots__ = ("extents", "partial", "with_free")

    def __init__(self) -> None:
        self.extents: dict[int, Extent] = {}
        self.with_free: dict[int, Extent] = {}
        self.partial: Extent | None = None  # has fewer slots than it could have; grows first


class _Arena:
    __slots__ = ("classes", "closing", "free_positions", "largest_bytes", "n_used", "used_bytes")

    def __init__(self, largest_bytes: int, positions: int) -> None:
        self.largest_bytes = largest_bytes
        self.classes: dict[int, _Class] = {}
        self.free_positions: list[tuple[int, int]] = [(0, positions)]  # (start, count), by start, never adjacent
        self.n_used = 0
        self.used_bytes = 0
        self.closing = False


class SlabAllocator:
    """Slots of one tier within `capacity_bytes`. Not thread-safe: the owner's lock guards it.

    align: slot sizes are rounded up to it (SSD: 4096 for direct I/O; DRAM: 1, so that N * block_bytes hold N blocks).
    overhead_bytes: bytes that an extent of n slots costs beside its slots (SSD: header and record table); counted in the
    budget. grow: extents may get more slots later (memory can, a file with a fixed record table cannot).
    """

    def __init__(self, *, capacity_bytes: int, extent_bytes: int | None = None, align: int = 1,
                 overhead_bytes: Callable[[int], int] | None = None, grow: bool = True) -> None:  # fmt: skip
        if capacity_bytes < 0 or align < 1:
            raise ValueError(f"capacity_bytes {capacity_bytes} or align {align} is out of range")
        if grow and overhead_bytes is not None:
            raise ValueError("an extent with overhead (a file with a fixed record table) cannot grow")
        wanted = extent_bytes or min(EXTENT_BYTES, max(EXTENT_BYTES_MIN, capacity_bytes // EXTENTS_MIN))
        self.capacity_bytes = capacity_bytes
        self.stride_bytes = -(-wanted // PAGE_BYTES) * PAGE_BYTES
        self.slots_per_position = min(SLOTS_PER_EXTENT_MAX, max(1, self.stride_bytes // SLOT_BYTES_MIN))
        self.positions = 2 * -(-capacity_bytes // self.stride_bytes) + SPARE_POSITIONS
        self.arena_bytes = self.positions * self.stride_bytes  # virtual size of each arena
        self.gen_words = self.positions * self.slots_per_position  # generation words of each arena
        self.used_bytes = 0  # in slots that are allocated
        self.n_blocks = 0
        self.no_place = False  # the last `allocate` fell short for want of a place in the arena: eviction would not help
        self.extent_bytes_total = 0  # budget handed out, overhead included
        self._align, self._grow = align, grow
        self._overhead = overhead_bytes or _no_overhead
        self._arenas: dict[NamespaceUid, _Arena] = {}
        self._extents: dict[int, Extent] = {}
        self._spares: dict[int, Extent] = {}  # empty extents, oldest first
        self._next_number = 1
        self._actions: list[SlabAction] = []
        self._cooling: list[tuple[_Arena, int, int]] = []  # positions of punched extents, not handed out yet
        self._handed_out: list[tuple[_Arena, int, int]] = []

    # --- arenas ---------------------------------------------------------------------------------------------------------

    def open_arena(self, arena: NamespaceUid, *, largest_bytes: int) -> None:
        """Before the first slot of a namespace. `largest_bytes`: its block size; slots of that size lose nothing."""
        known = self._arenas.get(arena)
        if known is None:
            self._arenas[arena] = _Arena(largest_bytes, self.positions)
        else:
            known.closing = False

    def close_arena(self, arena: NamespaceUid) -> None:
        """No new slots; extents go back, and `CloseArena` comes out, when the last slot is free (perhaps at once)."""
        known = self._arenas.get(arena)
        if known is not None:
            known.closing = True
            self._finish_closing(arena, known)

    def is_closed(self, arena: NamespaceUid) -> bool:
        """Never opened, or closed and empty."""
        return arena not in self._arenas

    def slot_bytes(self, arena: NamespaceUid, size: int) -> int:
        """Bytes of the slot that a block of `size` bytes gets."""
        largest = self._arenas[arena].largest_bytes
        exact = size if size == largest else min(size_class(size), largest)
        return -(-exact // self._align) * self._align

    def largest_size(self) -> int:
        """Bytes of the largest block that could ever be stored."""
        most = self.capacity_bytes - self._overhead(1)
        return max(0, min(most, self.arena_bytes) // self._align * self._align)

    # --- slots ----------------------------------------------------------------------------------------------------------

    def allocate(self, arena: NamespaceUid, size: int, n: int, *, owners: Sequence[object] | None = None) -> list[Slot]:
        """Up to n slots for blocks of `size` bytes, in unbroken runs where possible. Fewer than n: no room (evict, ask again).

        owners: n values to remember with the slots, given out in order (see `extents_of`)."""
        home = self._arenas[arena]
        slot_bytes = self.slot_bytes(arena, size)
        if home.closing or n <= 0:
            return []
        marks: Sequence[object] = owners if owners is not None else [True] * n
        of_class = home.classes.get(slot_bytes)
        if of_class is None:
            of_class = home.classes[slot_bytes] = _Class()
        slots: list[Slot] = []
        self.no_place = False
        while len(slots) < n:
            if not of_class.with_free and not self._add_extent(arena, home, of_class, slot_bytes, n - len(slots)):
                break
            self._take(of_class, n, marks, slots)
        if not of_class.extents:
            del home.classes[slot_bytes]
        taken = len(slots)
        home.n_used += taken
        home.used_bytes += taken * slot_bytes
        self.n_blocks += taken
        self.used_bytes += taken * slot_bytes
        return slots

    def _take(self, of_class: _Class, n: int, marks: Sequence[object], slots: list[Slot]) -> None:
        """Appends slots from extents that have free ones: one run if an extent has it, else pieces, lowest index first."""
        need = n - len(slots)
        run = _FREE * need
        for looked, extent in enumerate(of_class.with_free.values()):
            if looked == RUN_SEARCH_EXTENTS:
                break
            if extent.n_free >= need:
                start = extent.free_map.find(run)
                if start >= 0:
                    self._mark(of_class, extent, start, need, marks, slots)
                    return
        for extent in list(of_class.with_free.values()):
            at = 0
            while need and extent.n_free:
                start = extent.free_map.find(_FREE, at)
                end = extent.free_map.find(_USED, start)
                at = extent.n_slots if end < 0 else end
                count = min(at - start, need)
                self._mark(of_class, extent, start, count, marks, slots)
                need -= count
            if not need:
                return

    def _mark(self, of_class: _Class, extent: Extent, start: int, count: int, marks: Sequence[object], slots: list[Slot]) -> None:
        if extent.n_free == extent.n_slots:
            self._spares.pop(extent.number, None)
        done = len(slots)
        extent.free_map[start : start + count] = _USED * count
        extent.owners[start : start + count] = marks[done : done + count]
        extent.n_free -= count
        if not extent.n_free:
            del of_class.with_free[extent.number]
        first = (extent.number << INDEX_BITS) + start
        slots.extend(range(first, first + count))  # type: ignore[arg-type]

    def arena_bytes_used(self, arena: NamespaceUid) -> int:
        """Bytes of the arena's slots that are taken; 0: there is no such arena."""
        home = self._arenas.get(arena)
        return 0 if home is None else home.used_bytes

    def has_room(self, arena: NamespaceUid, size: int) -> bool:
        """Whether `allocate` would find bytes for one block of `size` (a place in the arena it may yet lack)."""
        home = self._arenas[arena]
        slot_bytes = self.slot_bytes(arena, size)
        of_class = home.classes.get(slot_bytes)
        if home.closing:
            return False
        if of_class is not None and of_class.with_free:
            return True
        left = self.capacity_bytes - self.extent_bytes_total
        left += sum(self._cost(extent.n_slots, extent.slot_bytes) for extent in self._spares.values())
        return self._fit(left, slot_bytes, 1) > 0

    def free(self, slot: Slot) -> tuple[NamespaceUid, int]:
        """Gives a slot back. -> (arena, gen_index) of it. An extent that becomes empty stays as a spare of its class."""
        extent = self._extents[slot >> INDEX_BITS]
        index = slot & INDEX_MASK
        assert not extent.free_map[index], f"slot {slot:#x} freed twice"
        extent.free_map[index] = 1
        extent.owners[index] = None
        extent.n_free += 1
        self.n_blocks -= 1
        self.used_bytes -= extent.slot_bytes
        arena = extent.arena
        home = self._arenas[arena]
        home.n_used -= 1
        home.used_bytes -= extent.slot_bytes
        if extent.n_free == 1:
            home.classes[extent.slot_bytes].with_free[extent.number] = extent
        if extent.n_free == extent.n_slots:
            self._spares[extent.number] = extent
            if home.closing:
                gen_index = extent.position * self.slots_per_position + index
                self._finish_closing(arena, home)
                return arena, gen_index
        return arena, extent.position * self.slots_per_position + index

    def place(self, slot: Slot) -> tuple[NamespaceUid, int, int]:
        """-> (arena, offset in the arena in bytes, index of its generation word)."""
        extent = self._extents[slot >> INDEX_BITS]
        index = slot & INDEX_MASK
        position = extent.position
        return extent.arena, position * self.stride_bytes + index * extent.slot_bytes, position * self.slots_per_position + index

    def slot_bytes_at(self, slot: Slot) -> int:
        """Bytes of this slot, 0: there is no such extent."""
        extent = self._extents.get(slot >> INDEX_BITS)
        return extent.slot_bytes if extent is not None else 0

    def extent_of(self, slot: Slot) -> Extent:
        """The extent that has this slot. To be read only."""
        return self._extents[slot >> INDEX_BITS]

    def extents_of(self, arena: NamespaceUid, slot_bytes: int) -> list[Extent]:
        """Extents of one class, oldest first. To be read only; `owners` has what `allocate` was given."""
        home = self._arenas.get(arena)
        of_class = home.classes.get(slot_bytes) if home is not None else None
        return list(of_class.extents.values()) if of_class is not None else []

    def extents(self) -> list[Extent]:
        """All extents, oldest first. To be read only."""
        return list(self._extents.values())

    # --- extents --------------------------------------------------------------------------------------------------------

    def _cost(self, n_slots: int, slot_bytes: int) -> int:
        return n_slots * slot_bytes + self._overhead(n_slots)

    def _fit(self, budget: int, slot_bytes: int, n_slots_max: int) -> int:
        """How many slots, overhead included, fit in `budget` bytes."""
        n = min(n_slots_max, budget // slot_bytes)
        while n > 0 and self._cost(n, slot_bytes) > budget:
            over = self._cost(n, slot_bytes) - budget
            n -= max(1, over // (2 * slot_bytes))
        return max(0, n)

    def _add_extent(self, arena: NamespaceUid, home: _Arena, of_class: _Class, slot_bytes: int, wanted: int) -> bool:
        """Grows the class by a new extent, or by more slots for its partly filled one. Takes empty extents of others."""
        full = min(self.slots_per_position, max(1, self.stride_bytes // slot_bytes))
        partial = of_class.partial
        n_max = full - partial.n_slots if partial is not None else full
        n = self._fit(self.capacity_bytes - self.extent_bytes_total, slot_bytes, n_max)
        enough = min(n_max, wanted) if self._grow else n_max  # an extent that cannot grow starts whole
        while n < enough and self._spares:
            self._drop_extent(next(iter(self._spares.values())))
            n = self._fit(self.capacity_bytes - self.extent_bytes_total, slot_bytes, n_max)
        if n == 0:
            return False
        partial = of_class.partial  # (a spare that was dropped may have been it)
        if partial is None:
            n_positions = -(-slot_bytes // self.stride_bytes)
            position = self._take_positions(home, n_positions)
            if position < 0:
                self._give_up_spares(home)
                return False
            extent = Extent(self._next_number, arena, slot_bytes, position, n_positions)
            self._next_number += 1
            self._extents[extent.number] = of_class.extents[extent.number] = extent
            self.extent_bytes_total += self._overhead(n)
        else:
            extent = partial
            n = min(n, full - extent.n_slots)
        offset = extent.position * self.stride_bytes + extent.n_slots * slot_bytes
        extent.grow(n)
        of_class.with_free[extent.number] = extent
        of_class.partial = extent if self._grow and extent.n_slots < full else None
        self.extent_bytes_total += n * slot_bytes
        self._actions.append(PopulateExtent(extent.number, arena, offset, n * slot_bytes, slot_bytes, extent.n_slots))
        return True

    def _drop_extent(self, extent: Extent) -> None:
        assert extent.n_free == extent.n_slots, "an extent in use was dropped"
        home = self._arenas[extent.arena]
        of_class = home.classes[extent.slot_bytes]
        del self._extents[extent.number], of_class.extents[extent.number], of_class.with_free[extent.number]
        self._spares.pop(extent.number, None)
        if of_class.partial is extent:
            of_class.partial = None
        if not of_class.extents:
            home.classes.pop(extent.slot_bytes)
        self.extent_bytes_total -= self._cost(extent.n_slots, extent.slot_bytes)
        length = extent.n_slots * extent.slot_bytes
        self._actions.append(PunchExtent(extent.number, extent.arena, extent.position * self.stride_bytes, length))
        self._cooling.append((home, extent.position, extent.n_positions))

    def _finish_closing(self, arena: NamespaceUid, home: _Arena) -> None:
        if home.n_used == 0:
            for of_class in list(home.classes.values()):
                for extent in list(of_class.extents.values()):
                    self._drop_extent(extent)
            del self._arenas[arena]
            self._actions.append(CloseArena(arena))

    def _give_up_spares(self, home: _Arena) -> None:
        """The arena's places are in pieces: those of its empty extents come back when they were punched."""
        self.no_place = True
        for extent in [spare for spare in self._spares.values() if self._arenas[spare.arena] is home]:
            self._drop_extent(extent)

    def _take_positions(self, home: _Arena, count: int) -> int:
        """First position of `count` free ones in a row, -1: none."""
        for i, (start, free) in enumerate(home.free_positions):
            if free >= count:
                if free == count:
                    del home.free_positions[i]
                else:
                    home.free_positions[i] = (start + count, free - count)
                return start
        return -1

    def _give_positions(self, home: _Arena, position: int, n_positions: int) -> None:
        ranges = sorted([*home.free_positions, (position, n_positions)])
        merged = ranges[:1]
        for begin, count in ranges[1:]:
            last, length = merged[-1]
            if last + length == begin:
                merged[-1] = (last, length + count)
            else:
                merged.append((begin, count))
        home.free_positions = merged

    @property
    def has_actions(self) -> bool:
        return bool(self._actions or self._cooling or self._handed_out)

    def drain_actions(self) -> list[SlabAction]:
        """What the shell must do, in order. One consumer: calling this says that all that was returned before has been done
        (only then are the places of punched extents used again)."""
        for home, position, n_positions in self._handed_out:
            self._give_positions(home, position, n_positions)
        self._handed_out, self._cooling = self._cooling, []
        actions, self._actions = self._actions, []
        return actions

    # --- taking over what is on disk ------------------------------------------------------------------------------------

    def adopt_extent(self, number: int, arena: NamespaceUid, *, slot_bytes: int, n_slots: int) -> bool:
        """Start of an SSD tier: this extent exists already. False: over the budget, number taken, or arena not open."""
        home = self._arenas.get(arena)
        self._next_number = max(self._next_number, number + 1)
        if home is None or home.closing or number in self._extents or n_slots < 1 or slot_bytes < 1 or slot_bytes % self._align:
            return False
        cost = self._cost(n_slots, slot_bytes)
        position = -1
        if self.extent_bytes_total + cost <= self.capacity_bytes:
            position = self._take_positions(home, max(1, -(-n_slots * slot_bytes // self.stride_bytes)))
        if position < 0:
            return False
        extent = Extent(number, arena, slot_bytes, position, max(1, -(-n_slots * slot_bytes // self.stride_bytes)))
        extent.grow(n_slots)
        of_class = home.classes.setdefault(slot_bytes, _Class())
        self._extents[number] = of_class.extents[number] = of_class.with_free[number] = self._spares[number] = extent
        self.extent_bytes_total += cost
        return True

    def adopt(self, arena: NamespaceUid, slot: Slot, *, size: int = 1, owner: object = True) -> bool:
        """Takes exactly this slot of an adopted extent. False: no such slot in this arena, too small for `size`, or in use."""
        extent = self._extents.get(slot >> INDEX_BITS)
        index = slot & INDEX_MASK
        if extent is None or extent.arena != arena or size > extent.slot_bytes or index >= extent.n_slots:
            return False
        if not extent.free_map[index]:
            return False
        home = self._arenas[arena]
        self._mark(home.classes[extent.slot_bytes], extent, index, 1, [owner], [])
        home.n_used += 1
        home.used_bytes += extent.slot_bytes
        self.n_blocks += 1
        self.used_bytes += extent.slot_bytes
        return True

    # --- for tests ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts every invariant. O(slots)."""
        used = blocks = total = 0
        seen: dict[NamespaceUid, list[tuple[int, int]]] = {}
        per_arena: dict[NamespaceUid, int] = dict.fromkeys(self._arenas, 0)
        for number, extent in self._extents.items():
            n_free = extent.free_map.count(1)
            assert extent.number == number and len(extent.free_map) == len(extent.owners) == extent.n_slots > 0
            assert n_free == extent.n_free
            assert all((owner is None) == bool(free) for owner, free in zip(extent.owners, extent.free_map, strict=True))
            assert (number in self._spares) == (n_free == extent.n_slots)
            of_class = self._arenas[extent.arena].classes[extent.slot_bytes]
            assert of_class.extents[number] is extent and (number in of_class.with_free) == (n_free > 0)
            taken = extent.n_slots - n_free
            used, blocks = used + taken * extent.slot_bytes, blocks + taken
            total += self._cost(extent.n_slots, extent.slot_bytes)
            per_arena[extent.arena] += taken
            assert extent.n_slots * extent.slot_bytes <= extent.n_positions * self.stride_bytes
            seen.setdefault(extent.arena, []).append((extent.position, extent.n_positions))
        assert used == self.used_bytes and blocks == self.n_blocks and total == self.extent_bytes_total
        assert total <= self.capacity_bytes
        for arena, home in self._arenas.items():
            assert home.n_used == per_arena[arena]
            assert sum(len(c.extents) for c in home.classes.values()) == len(seen.get(arena, []))
            ranges = sorted(seen.get(arena, []) + home.free_positions)
            assert all(a + n <= b for (a, n), (b, _) in pairwise(ranges)), "places overlap"
            assert not ranges or ranges[-1][0] + ranges[-1][1] <= self.positions
