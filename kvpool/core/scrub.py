"""Which stored copy is re-read next, and what becomes of one that turned out bad. Reading and hashing are `worker.scrub`'s.

A sweep walks one tier's extents, slot by slot, in the order of a list taken at the start of the pass. Extents that are gone by
then are passed over, new ones are met in the next pass; so the table may change as it likes.

Nothing is pinned: a pin would change what is evicted. The verdict is given only when the copy that was read is still the same
one (the generation of its DRAM slot, the identity of its SSD entry): then the slot has had its bytes all the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpool.core.block import DRAM, SSD, Block, SsdCopy
from kvpool.core.slots import INDEX_BITS, Extent, SlabAllocator, Slot

if TYPE_CHECKING:
    from kvpool.core.blocks import BlockTable
    from kvpool.core.types import NamespaceUid, Tiers

COPIES_MAX: Final = 64  # of one step: bounds how long it keeps the table
EXTENTS_MAX: Final = 64  # looked at in one step, full or empty


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy to be read again, as it was when it was chosen. `offset`: of its slot in the namespace's arena (DRAM)."""

    tier: Tiers
    block: Block
    slot: Slot
    entry: SsdCopy | None  # of an SSD copy
    generation: int  # of a DRAM copy's slot
    uid: NamespaceUid
    offset: int
    size: int
    chunk_bytes: int
    sums: bytes  # packed chunk sums; b"" where only `block_sum` is known
    block_sum: int


class Sweep:
    """The place in one tier. Under the table's lock, as the table itself."""

    def __init__(self, tier: Tiers) -> None:
        self.tier = tier
        self.passes = 0  # ended
        self._left: list[int] = []  # extents, the next one last
        self._index = 0  # in that one
        self._under_way = False

    def take(self, table: BlockTable, max_bytes: int) -> list[Copy]:
        """The next copies, `max_bytes` in all or one. `passes` grows when it comes to the end; the call after that begins anew.
        May be empty in the middle of a pass. O(COPIES_MAX); the first of a pass O(extents)."""
        slots = table.dram if self.tier is DRAM else table.ssd
        if slots is None:
            return []
        if not self._under_way:
            self._left = [extent.number for extent in reversed(slots.extents())]
            self._index, self._under_way = 0, True
        found: list[Copy] = []
        taken = 0
        for _ in range(EXTENTS_MAX):
            extent = self._extent(slots)
            if extent is None:
                break
            while (index := extent.free_map.find(b"\0", self._index)) >= 0:
                copy = self._copy(table, extent, index)
                if copy is not None:
                    if found and (taken + copy.size > max_bytes or len(found) == COPIES_MAX):
                        self._index = index
                        return found
                    found.append(copy)
                    taken += copy.size
                self._index = index + 1
            self._left.pop()
            self._index = 0
        if not self._left:
            self._under_way = False
            self.passes += 1
        return found

    def _extent(self, slots: SlabAllocator) -> Extent | None:
        """The one that it is in; None: the pass is over."""
        while self._left:
            first = Slot(self._left[-1] << INDEX_BITS)
            if slots.slot_bytes_at(first):
                return slots.extent_of(first)
            self._left.pop()
            self._index = 0
        return None

    def _copy(self, table: BlockTable, extent: Extent, index: int) -> Copy | None:
        """What lies in a slot that is taken; None: nothing that is served from there (yet, or any more)."""
        owner, slot = extent.owners[index], Slot((extent.number << INDEX_BITS) + index)
        if self.tier is DRAM:
            if not isinstance(owner, Block) or not owner.live or owner.dram != slot or owner.sums is None:
                return None
            offset, _, generation = table.place(owner)
            return Copy(
                DRAM, owner, slot, None, generation, owner.ns, offset, owner.size, owner.chunk_bytes, owner.sums, owner.sum
            )  # fmt: skip
        if not isinstance(owner, SsdCopy) or not owner.block.live or owner.block.ssd_copy is not owner:
            return None
        block = owner.block
        return Copy(SSD, block, slot, owner, 0, block.ns, 0, block.size, block.chunk_bytes, b"", block.sum)


def condemn(table: BlockTable, copy: Copy) -> bool:
    """The bytes that were read of this copy are not those that were put: it is dropped, unless it is another copy by now (then
    the reading says nothing). -> whether it was dropped."""
    block = copy.block
    if not block.live:
        return False
    if copy.tier is DRAM:
        same = block.dram == copy.slot and block.generation == copy.generation
    else:
        same = block.ssd_copy is copy.entry
    if same:
        table.corrupt(block, copy.tier)
    return same
