"""Slab allocator: exact capacities, classes, runs, extents that change hands, places."""

from __future__ import annotations

import itertools

import pytest

from kvpool.core.slots import (
    EXTENT_BYTES,
    INDEX_BITS,
    CloseArena,
    PopulateExtent,
    PunchExtent,
    SlabAllocator,
    Slot,
    size_class,
)
from kvpool.core.types import PAGE_BYTES, NamespaceUid

A, B, C = (NamespaceUid(bytes([i]) * 16) for i in (1, 2, 3))


def opened(capacity_bytes: int, largest_bytes: int, **more: object) -> SlabAllocator:
    slots = SlabAllocator(capacity_bytes=capacity_bytes, **more)  # type: ignore[arg-type]
    slots.open_arena(A, largest_bytes=largest_bytes)
    return slots


@pytest.mark.parametrize(
    ("n", "block_bytes"),
    [
        (300, 16384),
        (1, 16384),
        (7, 12345),
        (1000, 12345),
        (64, 1 << 20),
        (3, 100 << 20),
        (17, 1),
        (5000, 513),
        (9, (64 << 20) + 1),
    ],
)
@pytest.mark.parametrize("at_a_time", [1, 64, 10_000])
def test_exactly_n_blocks_fit(n: int, block_bytes: int, at_a_time: int) -> None:
    slots = opened(n * block_bytes, block_bytes)
    got: list[Slot] = []
    while more := slots.allocate(A, block_bytes, at_a_time):
        got += more
    assert len(got) == len(set(got)) == n == slots.n_blocks
    assert slots.used_bytes == n * block_bytes
    places = sorted(slots.place(slot)[1] for slot in got)
    assert all(b - a >= block_bytes for a, b in itertools.pairwise(places)), "slots overlap"
    assert places[-1] + block_bytes <= slots.arena_bytes
    assert all(slots.place(slot)[2] < slots.gen_words for slot in got)
    assert len({slots.place(slot)[2] for slot in got}) == n
    slots.check()
    for slot in got:
        slots.free(slot)
    assert slots.used_bytes == slots.n_blocks == 0
    assert len(slots.allocate(A, block_bytes, n + 5)) == n
    slots.check()


def test_size_classes_lose_at_most_an_eighth() -> None:
    previous = 0
    for size in [*range(513, 5000), *(s + d for s in (1 << k for k in range(13, 31)) for d in (-1, 0, 1, s // 3))]:
        slot_bytes = size_class(size)
        assert size <= slot_bytes and (slot_bytes - size) / slot_bytes <= 0.125
        assert slot_bytes >= previous or size < previous
        previous = slot_bytes
    assert size_class(1) == size_class(512) == 512
    assert size_class(16384) == 16384


def test_a_block_of_the_full_size_loses_nothing_among_smaller_ones() -> None:
    slots = opened(10 * 12345, 12345)
    assert slots.slot_bytes(A, 12345) == 12345
    assert slots.slot_bytes(A, 12300) == 12345, "no class is larger than the largest block"
    assert slots.slot_bytes(A, 12288) == 12288


def test_runs_are_unbroken_where_possible() -> None:
    slots = opened(64 * 4096, 4096)
    first = slots.allocate(A, 4096, 12)
    assert first == list(range(first[0], first[0] + 12))
    for slot in first[2:4] + first[6:11]:
        slots.free(slot)
    again = slots.allocate(A, 4096, 5)
    assert again == first[6:11], "the hole that fits, not the first pieces"
    assert slots.allocate(A, 4096, 2) == first[2:4]


def test_owners_follow_their_slots() -> None:
    slots = opened(8 * 4096, 4096)
    got = slots.allocate(A, 4096, 3, owners=["a", "b", "c"])
    slots.free(got[1])
    extent = slots.extents_of(A, 4096)[0]
    assert [owner for owner in extent.owners if owner is not None] == ["a", "c"]
    assert slots.allocate(A, 4096, 1, owners=["d"]) == [got[1]]
    assert extent.owners[got[1] & 0xFFFFFFFF] == "d"


def test_free_twice_is_a_bug() -> None:
    slots = opened(4 * 4096, 4096)
    (slot,) = slots.allocate(A, 4096, 1)
    assert slots.free(slot) == (A, slots.place(slot)[2])
    with pytest.raises(AssertionError, match="freed twice"):
        slots.free(slot)


def test_an_empty_extent_goes_to_whoever_needs_it() -> None:
    slots = opened(1 << 20, 4096)
    slots.open_arena(B, largest_bytes=100_000)
    mine = slots.allocate(A, 4096, 1000)
    assert len(mine) == 256 and slots.allocate(B, 100_000, 1) == []
    emptied = [s for s in mine if s >> INDEX_BITS == mine[0] >> INDEX_BITS]
    for slot in emptied[:-1]:
        slots.free(slot)
    assert slots.allocate(B, 100_000, 1) == [], "one slot of it is still in use"
    slots.free(emptied[-1])
    slots.check()
    others = {s >> INDEX_BITS for s in mine} - {mine[0] >> INDEX_BITS}
    for slot in [s for s in mine if s >> INDEX_BITS in sorted(others)[:3]]:
        slots.free(slot)
    assert len(slots.allocate(B, 100_000, 1)) == 1
    assert any(isinstance(action, PunchExtent) and action.arena == A for action in slots.drain_actions())
    slots.check()


def test_an_extent_grows_when_bytes_come_back() -> None:
    """Otherwise small leftovers would become small extents for ever."""
    slots = opened(258 * 4096, 4096, extent_bytes=256 << 10)
    slots.open_arena(B, largest_bytes=4096)
    mine = slots.allocate(A, 4096, 256)
    left = slots.allocate(B, 4096, 10)
    assert len(left) == 2
    for slot in mine[:64]:
        slots.free(slot)
    more = slots.allocate(B, 4096, 62)
    assert len(more) == 62 and len(slots.extents_of(B, 4096)) == 1
    slots.check()


def test_an_extent_that_cannot_grow_starts_whole() -> None:
    slots = SlabAllocator(capacity_bytes=1 << 20, extent_bytes=256 << 10, grow=False, align=4096, overhead_bytes=lambda n: 4096)
    slots.open_arena(A, largest_bytes=5000)
    slots.allocate(A, 5000, 1)
    (extent,) = slots.extents()
    assert extent.slot_bytes == 8192 and extent.n_slots == 32
    assert slots.extent_bytes_total == 32 * 8192 + 4096
    taken = slots.allocate(A, 5000, 1000)
    assert slots.extent_bytes_total <= slots.capacity_bytes and len(taken) + 1 == sum(e.n_slots for e in slots.extents())
    slots.check()


def test_a_punched_place_is_used_again_only_when_the_shell_has_done_it() -> None:
    slots = opened(1 << 20, 4096, extent_bytes=512 << 10)
    slots.open_arena(B, largest_bytes=4096)
    mine = slots.allocate(A, 4096, 256)
    (first, second) = slots.extents_of(A, 4096)
    for slot in mine:
        slots.free(slot)
    taken = slots.allocate(B, 4096, 256)  # both of A's extents are given up
    assert len(taken) == 256 and slots.extents_of(A, 4096) == []
    for slot in taken:
        slots.free(slot)
    slots.allocate(A, 4096, 1)
    assert slots.extents_of(A, 4096)[0].position not in (first.position, second.position)
    assert any(isinstance(action, PunchExtent) for action in slots.drain_actions())
    assert slots.has_actions
    slots.drain_actions()  # says that the punches were done
    assert not slots.has_actions
    slots.allocate(A, 4096, 200)
    assert first.position in {e.position for e in slots.extents_of(A, 4096)}
    slots.check()


def test_populate_names_the_new_bytes_alone() -> None:
    slots = opened(312 * 4096, 4096, extent_bytes=1 << 20)
    slots.open_arena(B, largest_bytes=4096)
    taken = slots.allocate(B, 4096, 200)
    slots.allocate(A, 4096, 1)
    (populate,) = [a for a in slots.drain_actions() if isinstance(a, PopulateExtent) and a.arena == A]
    assert (populate.offset_bytes, populate.length_bytes, populate.n_slots) == (0, 56 * 4096, 56)
    for slot in taken:
        slots.free(slot)
    slots.allocate(A, 4096, 100)
    (grown,) = [a for a in slots.drain_actions() if isinstance(a, PopulateExtent)]
    assert (grown.offset_bytes, grown.n_slots) == (56 * 4096, 56 + grown.length_bytes // 4096)


def test_arena_closes_with_its_last_slot() -> None:
    slots = opened(1 << 20, 4096)
    one, two = slots.allocate(A, 4096, 2)
    slots.close_arena(A)
    slots.free(one)
    assert not slots.is_closed(A) and slots.allocate(A, 4096, 1) == []
    assert CloseArena(A) not in slots.drain_actions()
    slots.free(two)
    assert slots.is_closed(A) and slots.drain_actions()[-1] == CloseArena(A)
    assert slots.extent_bytes_total == 0
    slots.check()


def test_a_slot_over_an_extent_has_its_own() -> None:
    slots = opened(1 << 30, 200 << 20)
    got = slots.allocate(A, 200 << 20, 9)
    assert len(got) == 5 and len(slots.extents()) == 5
    assert slots.stride_bytes == EXTENT_BYTES
    offsets = [slots.place(slot)[1] for slot in got]
    assert offsets == [i * 4 * EXTENT_BYTES for i in range(5)]


def test_largest_size_is_the_whole_tier() -> None:
    slots = opened(1_000_000, 1_000_000)
    assert slots.largest_size() == 1_000_000
    assert len(slots.allocate(A, slots.largest_size(), 1)) == 1
    assert SlabAllocator(capacity_bytes=0).largest_size() == 0


def test_adopts_extents_and_slots_of_an_earlier_process() -> None:
    slots = SlabAllocator(capacity_bytes=1 << 20, align=4096, grow=False)
    slots.open_arena(A, largest_bytes=8192)
    assert slots.adopt_extent(7, A, slot_bytes=8192, n_slots=10)
    assert not slots.adopt_extent(7, A, slot_bytes=8192, n_slots=10), "number taken"
    assert not slots.adopt_extent(8, B, slot_bytes=8192, n_slots=10), "arena not open"
    assert not slots.adopt_extent(9, A, slot_bytes=8192, n_slots=1000), "over the budget"
    slot = Slot(7 << INDEX_BITS | 3)
    assert slots.adopt(A, slot, size=8000, owner="x")
    assert not slots.adopt(A, slot, size=8000), "in use"
    assert not slots.adopt(A, Slot(slot + 7), size=8000), "no such slot"
    assert not slots.adopt(A, Slot(slot + 1), size=8193), "too small"
    assert not slots.adopt(B, Slot(slot + 1), size=1), "not its arena"
    assert len(slots.allocate(A, 8192, 9)) == 9
    (fresh,) = slots.allocate(A, 8192, 1)
    assert fresh >> INDEX_BITS > 9, "numbers of refused extents are not used either: their files may still be there"
    slots.check()


def test_places_in_pieces_say_so() -> None:
    slots = opened(64 << 20, 8 << 20, extent_bytes=PAGE_BYTES)
    slots._arenas[A].free_positions = [(0, 1), (2, 1)]
    assert slots.allocate(A, 8 << 20, 1) == [] and slots.no_place
    assert len(slots.allocate(A, 4096, 1)) == 1 and not slots.no_place


def test_room_is_known_without_taking_it() -> None:
    """Also what empty extents of other classes would give, and what an extent costs beside its slots."""
    slots = SlabAllocator(capacity_bytes=100_000, extent_bytes=40_000, align=4096, overhead_bytes=lambda n: 4096, grow=False)
    slots.open_arena(A, largest_bytes=8192)
    slots.open_arena(B, largest_bytes=16384)
    taken: list[Slot] = []
    while slots.has_room(A, 8192):
        got = slots.allocate(A, 8192, 1)
        assert got, "it said that there is room"
        taken += got
    assert slots.allocate(A, 8192, 1) == [] and not slots.has_room(B, 16384)
    for slot in taken[:-1]:
        assert not slots.has_room(B, 16384) or slots.allocate(B, 16384, 0) == []
        slots.free(slot)
    assert slots.has_room(A, 8192) and slots.has_room(B, 16384) and slots.allocate(B, 16384, 1)
    slots.close_arena(A)
    assert not slots.has_room(A, 8192)
    slots.check()
