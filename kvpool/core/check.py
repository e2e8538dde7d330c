"""Every invariant of the worker's table as assertions. For tests and for debugging a worker; O(everything)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.core.block import DRAM, SSD, Block, SsdCopy
from kvpool.core.slots import SlabAllocator

if TYPE_CHECKING:
    from kvpool.core.copies import Copies


def check_copies(table: Copies) -> None:
    """Slot accounting, no slot in two blocks, membership in policies, dirty and held bytes, reservations."""
    in_dram, in_ssd = _owners(table.dram), _owners(table.ssd)
    known: set[Block] = set()
    for space in [*table.spaces.values(), *table._closing.values()]:
        for key, block in space.blocks.items():
            known.add(block)
            _check_live(table, block)
            assert block.key == key and block.space is space and key not in space.causes
        for block in space.lingering:
            assert block.gone is not None and (block.ssd_slots or block.demoting), f"nothing of it is on disk: {block}"
        for block in space.reserved:
            known.add(block)
            assert not block.live and block.dram is not None and block.ssd is None and not block.pins, block
            assert not table._dram_policy.tick_of(block), "a reserved block can be evicted"
            assert in_dram[block.dram] is block
    for slot, block in in_dram.items():
        doomed = [s for tier, s in block.doomed or () if tier is DRAM]
        assert slot == block.dram or (block.promoting and slot == block.flight) or slot in doomed, f"slot of nobody: {block}"
        assert block in known or block.pins or block.held_dram, f"gone, unused, and yet it has a slot: {block}"
    for slot, block in in_ssd.items():
        doomed = [s for tier, s in block.doomed or () if tier is SSD]
        assert slot == block.ssd or (block.demoting and slot == block.flight) or slot in doomed, f"slot of nobody: {block}"
        assert block in known or block in block.space.lingering, f"gone, on disk, and not remembered: {block}"
        assert block in known or block.pins or block.held_ssd, f"gone, unused, and yet it has a slot: {block}"
    blocks = known | set(in_dram.values()) | set(in_ssd.values())
    assert table.held_bytes[DRAM] == sum(b.size for b in blocks if b.held_dram), "held bytes of DRAM"
    assert table.held_bytes[SSD] == sum(b.size for b in blocks if b.held_ssd), "held bytes of SSD"
    assert table.dirty_bytes == sum(b.size for b in blocks if b.dirty), "dirty bytes"
    assert table.n_demoting == sum(b.demoting for b in blocks)
    assert all(b.dirty and b.live and not b.demoting for b in table._dirty), "cleaned or gone, but queued for writing"
    assert all(b.dirty and b.live for b in [*table._urgent, *table._soon])
    entries = {e for g in table._dram_policy.groups() for e in table._dram_policy.in_order(g)}
    assert entries <= {b for b in known if b.live and b.dram is not None}, "policy has what is not in DRAM"
    if table._ssd_policy is not None:
        copies = {e for g in table._ssd_policy.groups() for e in table._ssd_policy.in_order(g)}
        assert copies <= {b.ssd_copy for b in known if b.live and b.ssd_copy is not None}, "policy has what is not on SSD"
    table.check_keeping()
    table.dram.check()
    if table.ssd is not None:
        table.ssd.check()
    for policy in (table._dram_policy, table._ssd_policy):
        check = getattr(policy, "check", None)
        if check is not None:
            check()
    assert len(table._gone) <= table.limits.gone_keys_max


def _check_live(table: Copies, block: Block) -> None:
    assert block.live and block.gone is None and (block.dram is not None or block.ssd is not None), block
    assert (block.ssd is None) == (block.ssd_copy is None), block
    assert block.dirty == (table.ssd is not None and block.ssd is None), block
    idle = not block.pins and not block.held_dram and block.keep is None
    if block.dram is not None:
        parked = table._dram_policy.is_parked(block)
        assert table._dram_policy.tick_of(block), f"in DRAM, but never a victim: {block}"
        assert not parked or block.on_idle, f"parked for good: {block}"
        assert not idle or not parked or block in table._soon, f"idle, but no victim: {block}"
        assert block.group.key == (block.ns, table.dram.extent_of(block.dram).slot_bytes)
    copy = block.ssd_copy
    if copy is not None:
        assert table._ssd_policy is not None
        parked = table._ssd_policy.is_parked(copy)
        assert table._ssd_policy.tick_of(copy) and (not parked or block.on_idle), f"on SSD, but never a victim: {block}"
        assert block.pins or block.held_ssd or block.keep is not None or not parked, f"idle, but no victim: {block}"
    if block.dirty and not block.demoting and not block.refused:
        assert block in table._dirty, f"dirty, but never written down: {block}"


def _owners(slots: SlabAllocator | None) -> dict[int, Block]:
    found: dict[int, Block] = {}
    for extent in slots.extents() if slots is not None else ():
        for index, owner in enumerate(extent.owners):
            if owner is not None:
                assert isinstance(owner, (Block, SsdCopy))
                found[(extent.number << 32) + index] = owner.block if isinstance(owner, SsdCopy) else owner
    return found
