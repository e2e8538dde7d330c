"""The slab allocator against a model: a dict of slots in use with the bytes that each must have to itself."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.core.slots import PunchExtent, SlabAllocator, Slot
from kvpool.core.types import NamespaceUid

ARENAS = [NamespaceUid(bytes([i]) * 16) for i in range(3)]
LARGEST = {ARENAS[0]: 4096, ARENAS[1]: 12345, ARENAS[2]: 150_000}


class SlotsMachine(RuleBasedStateMachine):
    """Model: `used` slot -> (arena, size, place). No two overlap; the sum of slots is within the capacity."""

    @initialize(capacity=st.integers(0, 1 << 20), grow=st.booleans(), align=st.sampled_from([1, 4096]))
    def start(self, capacity: int, grow: bool, align: int) -> None:
        overhead = None if grow else lambda n: 4096 + 128 * n
        self.slots = SlabAllocator(capacity_bytes=capacity, align=align, grow=grow, overhead_bytes=overhead)
        self.used: dict[Slot, tuple[NamespaceUid, int]] = {}
        self.order: list[Slot] = []
        self.punched: list[tuple[NamespaceUid, int, int]] = []  # handed to the shell, not done yet
        for arena, largest in LARGEST.items():
            self.slots.open_arena(arena, largest_bytes=largest)

    @rule(arena=st.sampled_from(ARENAS), part=st.integers(1, 100), n=st.integers(0, 60))
    def allocate(self, arena: NamespaceUid, part: int, n: int) -> None:
        size = max(1, LARGEST[arena] * part // 100)
        got = self.slots.allocate(arena, size, n, owners=list(range(n)))
        assert len(got) <= n and len(set(got)) == len(got) and not set(got) & set(self.used)
        for slot in got:
            self.used[slot] = (arena, size)
            self.order.append(slot)
        if len(got) < n and not self.slots.no_place:
            left = self.slots.capacity_bytes - self.slots.extent_bytes_total
            slot_bytes = self.slots.slot_bytes(arena, size)
            assert left < slot_bytes + self.slots._overhead(1), "there was room for one more"
            assert not self.slots._spares, "an empty extent was kept while somebody needed its bytes"

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.order:
            start = data.draw(st.integers(0, len(self.order) - 1))
            n = data.draw(st.integers(1, 40))
            for slot in self.order[start : start + n]:
                arena, _ = self.used.pop(slot)
                assert self.slots.free(slot)[0] == arena
            del self.order[start : start + n]

    @rule()
    def drain(self) -> None:
        self.punched = [
            (action.arena, action.offset_bytes, action.length_bytes)
            for action in self.slots.drain_actions()
            if isinstance(action, PunchExtent)
        ]

    @invariant()
    def no_overlap(self) -> None:
        if not hasattr(self, "slots"):
            return
        self.slots.check()
        places = []
        for slot, (arena, size) in self.used.items():
            where, offset, gen_index = self.slots.place(slot)
            assert where == arena and offset >= 0 and offset + size <= self.slots.arena_bytes
            assert 0 <= gen_index < self.slots.gen_words
            places.append((arena, offset, size))
        places += self.punched  # what the shell may be punching now belongs to nobody
        places.sort()
        for (arena, offset, size), (other, start, _) in itertools.pairwise(places):
            assert arena != other or offset + size <= start, "two slots share bytes, or a slot is being punched"
        assert len(self.used) == self.slots.n_blocks
        words = [(self.used[slot][0], self.slots.place(slot)[2]) for slot in self.used]
        assert len(set(words)) == len(words), "two slots share a generation word"


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
