"""Copies of blocks in the tiers of one worker: taking and freeing slots, eviction, demotion, promotion.

Owns: which copies a block has, what leaves a tier, what is dirty (not in the SSD tier yet). Does not own: keys, reservations,
holds (`blocks`), the order of eviction (`policy`), the search for room (`room`), the I/O (`worker.mover`).

`BlockTable` is built on this class; the split is by size only. All calls under the node's lock.

    DRAM, no SSD tier ........ dropped when cold
    DRAM, dirty .............. clean_candidates -> ssd_reserve -> (write) -> ssd_done -> DRAM + SSD, clean
    DRAM + SSD, clean ........ DRAM copy dropped when cold (report: SSD only); SSD copy dropped when cold there (dirty again)
    SSD only ................. promote_reserve -> (read) -> promote_done -> DRAM + SSD, clean
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvpool.core.block import (
    DRAM,
    SSD,
    Action,
    Block,
    Bump,
    GenerationOf,
    Limits,
    Report,
    Space,
    SsdCopy,
    SsdErase,
    SsdExtentCreated,
    SsdExtentDropped,
)
from kvpool.core.gone import Gone
from kvpool.core.policy.eviction import Entry, EvictionPolicy, Group
from kvpool.core.room import Leave, Room
from kvpool.core.slots import PopulateExtent, PunchExtent, SlabAllocator, Slot
from kvpool.core.types import NO_PARENT, Key, MissCause, NamespaceUid, Tiers

FAILURES_MAX: Final = 2  # of writing one block down; then it may be dropped
ADOPTED_PER_TICK: Final = 256

COUNTERS: Final = (
    "stored", "already", "full", "rejected", "aborted", "hits_dram", "hits_ssd", "misses", "evicted", "evicted_dram",
    "evicted_ssd", "dropped_dirty", "demoted", "demote_failed", "promoted", "promote_failed", "corrupt_dram", "corrupt_ssd",
    "removed", "adopted", "holds", "holds_expired",
)  # fmt: skip


class Copies:
    """State of both tiers. `ssd` None: there is no SSD tier."""

    def __init__(self, *, dram: SlabAllocator, ssd: SlabAllocator | None, policy: Callable[[], EvictionPolicy], reporter: Report,
                 limits: Limits, bump: Bump | None, generation: GenerationOf | None) -> None:  # fmt: skip
        self.dram, self.ssd, self.limits = dram, ssd, limits
        self.ssd_writable = ssd is not None
        """Set by the shell: False while writing to the SSD tier fails. Then cold dirty blocks are dropped instead of waited for."""
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.spaces: dict[NamespaceUid, Space] = {}
        self.dirty_bytes = 0  # size of DRAM blocks that have yet to be written down
        self.n_demoting = 0
        self._demoting_bytes = 0
        self.held_bytes = {DRAM: 0, SSD: 0}
        self._report = reporter
        self._bump: Bump = bump or (lambda arena, gen_index: None)
        self._generation: GenerationOf = generation or (lambda arena, gen_index: 0)
        self._gone = Gone(keys_max=limits.gone_keys_max)
        self._closing: dict[NamespaceUid, Space] = {}
        self._tick = 0
        self._dirty: OrderedDict[Block, None] = OrderedDict()  # least recently used first
        self._urgent: dict[Block, None] = {}  # dirty ones that somebody waits for
        self._ssd_actions: list[Action] = []  # SSD actions in order
        self._dram_policy = policy()
        self._dram_room = Room(dram, self._dram_policy, may_leave=self._may_leave_dram, evict=self._evict_dram, park=self._park_dram,
                               slot_of=_dram_slot)  # fmt: skip
        self._ssd_policy: EvictionPolicy | None = None
        self._ssd_room: Room | None = None
        if ssd is not None:
            self._ssd_policy = policy()
            self._ssd_room = Room(ssd, self._ssd_policy, may_leave=self._may_leave_ssd, evict=self._evict_ssd, park=self._park_ssd,
                                  slot_of=_ssd_slot)  # fmt: skip

    # --- what the rooms ask ---------------------------------------------------------------------------------------------

    def _may_leave_dram(self, entry: Entry) -> Leave:
        assert isinstance(entry, Block)
        if entry.pins or entry.held_dram or not entry.live:
            return Leave.BUSY
        if entry.dirty and not entry.refused and self.ssd_writable:
            return Leave.DIRTY
        return Leave.YES

    def _may_leave_ssd(self, entry: Entry) -> Leave:
        assert isinstance(entry, SsdCopy)
        block = entry.block
        return Leave.BUSY if block.pins or block.held_ssd or block.ssd_copy is not entry or not block.live else Leave.YES

    def _park_dram(self, entry: Entry) -> None:
        assert isinstance(entry, Block)
        entry.on_idle = True
        self._dram_policy.park(entry)

    def _park_ssd(self, entry: Entry) -> None:
        assert isinstance(entry, SsdCopy) and self._ssd_policy is not None
        entry.block.on_idle = True
        self._ssd_policy.park(entry)

    def _evict_dram(self, entry: Entry) -> None:
        assert isinstance(entry, Block) and entry.dram is not None
        block = entry
        slot, block.dram = entry.dram, None
        self._dram_policy.remove(block)
        if block.dirty:
            self._undirty(block)
            self.counters["dropped_dirty"] += 1
        self._free_dram(slot)
        if block.ssd is None:
            self._expel(block, MissCause.EVICTED)
            self.counters["evicted"] += 1
        else:
            self.counters["evicted_dram"] += 1
            self._report(block.space.uid, block.key, 2, None, block.size)

    def _evict_ssd(self, entry: Entry) -> None:
        assert isinstance(entry, SsdCopy)
        block = entry.block
        slot = block.ssd
        assert slot is not None
        self._lose_ssd_entry(block)
        self._free_ssd(slot)
        if block.dram is None:
            self._expel(block, MissCause.EVICTED)
            self.counters["evicted"] += 1
        else:
            self._make_dirty(block)
            self.counters["evicted_ssd"] += 1
            self._report(block.space.uid, block.key, 1, None, block.size)

    # --- small steps ----------------------------------------------------------------------------------------------------

    def _expel(self, block: Block, cause: MissCause) -> None:
        """A live block is not to be found any more. Its copies are the caller's (see `_release_copies`)."""
        space = block.space
        block.live = False
        block.gone = cause
        del space.blocks[block.key]
        self._gone.remember(space.causes, block.key, cause)
        self._report(space.uid, block.key, 0, cause, block.size)

    def _drop_live(self, block: Block, cause: MissCause) -> None:
        """Expels a live block with all its copies; slots that are in use are freed by the last user."""
        self._expel(block, cause)
        self._dram_policy.remove(block)
        if block.dirty:
            self._undirty(block)
        self._release_copies(block)

    def _release_copies(self, block: Block) -> None:
        """Frees what nobody uses of a gone block, and marks it for `_settle` when something is left."""
        if block.dram is not None and not block.pins and not block.held_dram:
            slot, block.dram = block.dram, None
            self._free_dram(slot)
        if block.ssd is not None and not block.pins and not block.held_ssd:
            slot = block.ssd
            self._lose_ssd_entry(block)
            self._free_ssd(slot)
        elif block.ssd_copy is not None and self._ssd_policy is not None:
            self._ssd_policy.remove(block.ssd_copy)
        block.on_idle = block.dram is not None or block.ssd is not None or block.doomed is not None

    def _settle(self, block: Block) -> None:
        """The last pin, or the last hold on one tier, is gone."""
        if block.pins:
            return
        if block.doomed is not None:
            left = []
            for tier, slot in block.doomed:
                if block.held_dram if tier is DRAM else block.held_ssd:
                    left.append((tier, slot))
                elif tier is DRAM:
                    self._free_dram(slot)
                else:
                    self._free_ssd(slot)
            block.doomed = left or None
        if block.gone is not None:
            self._release_copies(block)
            return
        if not block.held_dram:
            self._dram_policy.unpark(block)
        if block.ssd_copy is not None and not block.held_ssd and self._ssd_policy is not None:
            self._ssd_policy.unpark(block.ssd_copy)
        block.on_idle = block.held_dram > 0 or block.held_ssd > 0 or block.doomed is not None

    def _free_dram(self, slot: Slot) -> None:
        arena, gen_index = self.dram.free(slot)
        self._bump(arena, gen_index)
        if arena in self._closing:
            self._finish_closing(self._closing[arena])

    def _free_ssd(self, slot: Slot) -> None:
        assert self.ssd is not None
        self._collect_ssd()
        self._ssd_actions.append(SsdErase(slot))
        arena, _ = self.ssd.free(slot)
        if arena in self._closing:
            self._finish_closing(self._closing[arena])

    def _finish_closing(self, space: Space) -> None:
        if self.dram.is_closed(space.uid) and (self.ssd is None or self.ssd.is_closed(space.uid)):
            del self._closing[space.uid]

    def _lose_ssd_entry(self, block: Block) -> None:
        assert self._ssd_policy is not None and block.ssd_copy is not None
        self._ssd_policy.remove(block.ssd_copy)
        block.ssd = block.ssd_copy = None

    def _make_dirty(self, block: Block) -> None:
        if not block.dirty:
            block.dirty = True
            self.dirty_bytes += block.size
            self._dirty[block] = None

    def _undirty(self, block: Block) -> None:
        block.dirty = False
        self.dirty_bytes -= block.size
        self._dirty.pop(block, None)
        self._urgent.pop(block, None)

    def _unpin_one(self, block: Block) -> None:
        assert block.pins > 0, "unpinned more often than pinned"
        block.pins -= 1
        if block.on_idle:
            self._settle(block)

    def _dram_slots(self, blocks: list[Block], group: Group, *, tick: int) -> tuple[list[Slot], list[Entry]]:
        """Up to one DRAM slot for each of these blocks of one group, evicting. -> (slots, what must be written down for more)."""
        uid, size = blocks[0].space.uid, blocks[0].size
        slots = self.dram.allocate(uid, size, len(blocks), owners=blocks)
        dirty: list[Entry] = []
        while len(slots) < len(blocks):
            short = len(blocks) - len(slots)
            evicted, unclean = self._dram_room.make(group, short, now=self._tick, spare_tick=tick)
            dirty += unclean
            if not evicted:
                break
            slots += self.dram.allocate(uid, size, short, owners=blocks[len(slots) :])
        return slots, dirty

    # --- demotion: DRAM -> SSD ------------------------------------------------------------------------------------------

    def clean_candidates(self, max_bytes: int, *, now_ms: int) -> list[Block]:
        """Dirty DRAM blocks to write down now, coldest first, at most `max_bytes` (or one block): those that somebody waits for, and
        as many as keep the dirty bytes under the low watermark. Pinned: each must be ended by `ssd_done`, whatever happens."""
        del now_ms
        if self.ssd is None or not self.ssd_writable:
            return []
        found: list[Block] = []
        taken = 0
        allowed = int(self.limits.low_watermark * self.dram.capacity_bytes)
        while self._urgent or (self._dirty and self.dirty_bytes - self._demoting_bytes > allowed):
            block = next(iter(self._urgent or self._dirty))
            if found and taken + block.size > max_bytes:
                break
            self._urgent.pop(block, None)
            if self._dirty.pop(block, 0) == 0:  # it is being written already
                continue
            block.pins += 1
            block.demoting = True
            self.n_demoting += 1
            self._demoting_bytes += block.size
            taken += block.size
            found.append(block)
        return found

    def ssd_reserve(self, block: Block) -> Slot | None:
        """A slot for a block of `clean_candidates`, evicting from the SSD tier. Drain the actions before writing to it: it may have to
        be erased first, its file to be made. None: no room, or the block is gone (end it with `ssd_done(block, None, ok=False)`)."""
        assert block.demoting, "not a block of clean_candidates"
        if self.ssd is None or self._ssd_room is None or self._ssd_policy is None or not block.live or block.ssd is not None:
            return None
        space = block.space
        group = self._ssd_policy.group((space.uid, self.ssd.slot_bytes(space.uid, block.size)))
        copy = SsdCopy(group, block)
        slots = self.ssd.allocate(space.uid, block.size, 1, owners=[copy])
        while not slots:
            evicted, _ = self._ssd_room.make(group, 1, now=self._tick, spare_tick=-1)
            if not evicted:
                return None
            slots = self.ssd.allocate(space.uid, block.size, 1, owners=[copy])
        self._collect_ssd()
        block.flight = slots[0]
        return block.flight

    def ssd_done(self, block: Block, slot: Slot | None, ok: bool) -> None:  # noqa: FBT001
        """Ends a demotion. ok: the record is on disk, the block is clean now. Not ok with a slot: writing failed (tried once more
        later, then the block may be dropped); without one: the tier has no room for it (may be dropped)."""
        assert block.demoting and slot == block.flight, "not the demotion that is under way"
        block.demoting, block.flight = False, None
        self.n_demoting -= 1
        self._demoting_bytes -= block.size
        if slot is not None and ok and block.live and block.dirty and self.ssd is not None and self._ssd_policy is not None:
            self._attach_ssd(block, slot)
            self._undirty(block)
            self.counters["demoted"] += 1
            self._report(block.space.uid, block.key, block.tiers, None, block.size)
        else:
            if slot is not None:
                self._free_ssd(slot)
            if block.dirty:
                self.counters["demote_failed"] += 1
                block.failures += 1
                block.refused = slot is None or block.failures >= FAILURES_MAX
                self._dirty[block] = None
                self._dirty.move_to_end(block, last=False)
                if block.refused:
                    del self._dirty[block]
        self._unpin_one(block)

    def _attach_ssd(self, block: Block, slot: Slot, *, tick: int = 0) -> None:
        assert self.ssd is not None and self._ssd_policy is not None
        copy = self.ssd.extent_of(slot).owners[slot & 0xFFFFFFFF]
        assert isinstance(copy, SsdCopy) and copy.block is block
        block.ssd, block.ssd_copy = slot, copy
        tick = tick or self._dram_policy.tick_of(block) or self._tick
        self._ssd_policy.add([copy], max(1, tick), [block.depth])
        if block.held_ssd:
            self._park_ssd(copy)

    # --- promotion: SSD -> DRAM -----------------------------------------------------------------------------------------

    def promote_reserve(self, block: Block) -> Slot | None:
        """A DRAM slot for a pinned SSD block. Never waits: free room or clean victims only. None: no such room, it is in DRAM, another
        promotion of it is under way, or it is gone. A slot must be ended by `promote_done`; the block is pinned until then."""
        if not block.live or block.dram is not None or block.ssd is None or block.promoting or block.ssd_copy is None:
            return None
        assert self._ssd_policy is not None
        slots, _ = self._dram_slots([block], block.group, tick=self._ssd_policy.tick_of(block.ssd_copy))
        if not slots:
            return None
        block.promoting, block.flight = True, slots[0]
        block.pins += 1
        return slots[0]

    def promote_done(self, block: Block, slot: Slot, sums: bytes | None, ok: bool) -> None:  # noqa: FBT001
        """Ends a promotion. ok: the bytes are in the slot and were checked; `sums`: their packed chunk sums."""
        assert block.promoting and slot == block.flight, "not the promotion that is under way"
        block.promoting, block.flight = False, None
        if ok and block.live:
            block.dram = slot
            block.sums = sums if sums is not None else block.sums
            tick = self._ssd_policy.tick_of(block.ssd_copy) if self._ssd_policy is not None and block.ssd_copy is not None else 0
            self._dram_policy.add([block], max(1, tick or self._tick), [block.depth])
            if block.ssd is None:
                self._make_dirty(block)
            self.counters["promoted"] += 1
            self._report(block.space.uid, block.key, block.tiers, None, block.size)
        else:
            self._free_dram(slot)
            self.counters["promote_failed"] += 1
        self._unpin_one(block)

    # --- copies that turn out bad, tiers that come and go ---------------------------------------------------------------

    def corrupt(self, block: Block, tier: Tiers) -> None:
        """The copy in this tier does not match its checksums: it is not served again. Without another copy the block is gone."""
        if self._lose_copy(block, tier, MissCause.CORRUPT):
            self.counters["corrupt_dram" if tier is DRAM else "corrupt_ssd"] += 1

    def drop_tier(self, tier: Tiers) -> int:
        """All copies in this tier are lost (its device failed for good). -> how many. Blocks without another copy miss as WORKER_LOST."""
        lost = 0
        for space in self.spaces.values():
            for block in list(space.blocks.values()):
                lost += self._lose_copy(block, tier, MissCause.WORKER_LOST)
        return lost

    def _lose_copy(self, block: Block, tier: Tiers, cause: MissCause) -> bool:
        slot = block.dram if tier is DRAM else block.ssd
        if not block.live or slot is None:
            return False
        if tier is DRAM:
            block.dram = None
            self._dram_policy.remove(block)
            if block.dirty:
                self._undirty(block)
        else:
            self._lose_ssd_entry(block)
        if block.pins or (block.held_dram if tier is DRAM else block.held_ssd):
            block.doomed = [*(block.doomed or ()), (tier, slot)]
            block.on_idle = True
        elif tier is DRAM:
            self._free_dram(slot)
        else:
            self._free_ssd(slot)
        if block.dram is None and block.ssd is None:
            self._expel(block, cause)
        else:
            if block.ssd is None and self.ssd is not None:
                self._make_dirty(block)
            self._report(block.space.uid, block.key, block.tiers, None, block.size)
        return True

    def adopt(self, uid: NamespaceUid, key: Key, size: int, sum: int, depth: int, parent: bytes, slot: Slot,  # noqa: A002
              seq: int) -> bool:  # fmt: skip
        """Start of the SSD tier: the checked record in `slot` (of an extent taken by `ssd.adopt_extent`) becomes a block. Call in order of
        `seq`, the oldest first. False: the namespace is not open here, the key is there already, or the slot cannot be its: erase it."""
        del seq
        space = self.spaces.get(uid)
        if space is None or self.ssd is None or self._ssd_policy is None or key in space.blocks or len(parent) != len(NO_PARENT):
            return False
        if not 1 <= size <= space.spec.block_bytes or not (space.spec.variable or size == space.spec.block_bytes):
            return False
        if self.counters["adopted"] % ADOPTED_PER_TICK == 0:
            self._tick += 1
        block = Block(space, key, size, self._dram_group(space, size), depth, parent, depth, self._tick)
        copy = SsdCopy(self._ssd_policy.group((uid, self.ssd.slot_bytes(uid, size))), block)
        if not self.ssd.adopt(uid, slot, size=size, owner=copy):
            return False
        block.ssd, block.ssd_copy, block.sum, block.live = slot, copy, sum, True
        space.blocks[key] = block
        space.causes.pop(key, None)
        self._ssd_policy.add([copy], self._tick, [depth])
        self.counters["adopted"] += 1
        self._report(uid, key, 2, None, size)
        return True

    def _dram_group(self, space: Space, size: int) -> Group:
        if size == space.spec.block_bytes:
            return space.exact_group
        return self._dram_policy.group((space.uid, self.dram.slot_bytes(space.uid, size)))

    # --- what the shell must do -----------------------------------------------------------------------------------------

    def drain_actions(self) -> list[Action]:
        """What the shell must do, in this order, outside the lock. One consumer (the mover): calling it says that all it got before has
        been done. A removal may be confirmed when the actions drained after it are done."""
        actions: list[Action] = [*self.dram.drain_actions()]
        if self.ssd is not None:
            self._collect_ssd()
            actions += self._ssd_actions
            self._ssd_actions = []
        return actions

    def _collect_ssd(self) -> None:
        assert self.ssd is not None
        for action in self.ssd.drain_actions():
            if isinstance(action, PopulateExtent):
                self._ssd_actions.append(SsdExtentCreated(action.number, action.arena, action.slot_bytes, action.n_slots))
            elif isinstance(action, PunchExtent):
                self._ssd_actions.append(SsdExtentDropped(action.number))


def _dram_slot(entry: Entry) -> Slot:
    assert isinstance(entry, Block) and entry.dram is not None
    return entry.dram


def _ssd_slot(entry: Entry) -> Slot:
    assert isinstance(entry, SsdCopy) and entry.block.ssd is not None
    return entry.block.ssd
