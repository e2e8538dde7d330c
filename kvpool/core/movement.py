"""Movement between the tiers of one worker: demotion, promotion, bad copies, adoption at start.

Owns: the steps of each and what they do to a block's copies. Does not own: eviction and freeing (`copies`, the base class),
when it is done and the I/O (`worker.mover`, the read path).

    DRAM, dirty .............. clean_candidates -> ssd_reserve -> (write) -> ssd_done -> DRAM + SSD, clean
    SSD only ................. promote_reserve -> (read) -> promote_done -> DRAM + SSD, clean
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Final

from kvpool.core.block import DRAM, SSD, Block, SsdCopy
from kvpool.core.copies import FAILURES_MAX, RESUME_PART, Copies
from kvpool.core.policy.eviction import NO_LIMIT, TICKS_RECENT
from kvpool.core.retention import PRIORITY_DEFAULT, Keep
from kvpool.core.slots import INDEX_MASK, Slot
from kvpool.core.types import NO_PARENT, Key, MissCause, NamespaceUid, Tiers

ADOPTED_PER_TICK: Final = 256
PLAN_LOOKS_MAX: Final = 16_384  # blocks looked at for one plan: it is made under the lock
PLAN_PART: Final = 16  # of DRAM must be stored before it is looked again which dirty blocks leave soon
MOVED_AT_ONCE: Final = 64  # blocks for which room is made in a tier by one call
BOTH_OF_SSD: Final = 2  # one part in this many of the SSD tier may hold copies of what is in DRAM, ahead of need


class Movement(Copies):
    """Demotion and promotion, on top of `Copies`."""

    # --- demotion: DRAM -> SSD ------------------------------------------------------------------------------------------

    def _wants_cleaning(self) -> bool:
        """Whether a block should be written down now: somebody waits for one, or too much of DRAM is dirty. Not ahead of need
        while that would only displace other copies of what is in DRAM (an SSD tier that is small beside it)."""
        if self.ssd is None or not self.ssd_writable:
            return False
        if self._urgent or self._soon or self._through:
            return True
        dirty_bytes = self.dirty_bytes - self._demoting_bytes
        may = (
            bool(self._dirty)
            and self.dram.used_bytes - dirty_bytes < self.ssd.capacity_bytes // BOTH_OF_SSD
            and self.stored_bytes >= self._ahead_from_bytes
        )
        if self._dram_policy.by_recency:
            return may and dirty_bytes > self.limits.low_watermark * self.dram.capacity_bytes
        return may and (bool(self._plan) or self._make_plan())

    def _make_plan(self) -> bool:
        """Looks for dirty blocks among those that leave next: so much of DRAM as should be free or clean. -> whether there are
        any. Not looked again before something changed."""
        if self.stored_bytes < self._plan_from_bytes:
            return False
        self._plan_from_bytes = self.stored_bytes + self.dram.capacity_bytes // PLAN_PART
        left = (1 - self.limits.low_watermark) * self.dram.capacity_bytes - (self.dram.capacity_bytes - self.dram.used_bytes)
        groups = self._dram_policy.groups() if left > 0 else ()
        for group in groups:
            of_group = left / len(groups)
            n_looks = min(PLAN_LOOKS_MAX // len(groups), -(-int(of_group) // group.key[1]))
            for entry in self._dram_policy.coldest(group, n_looks):
                assert isinstance(entry, Block)
                of_group -= entry.size
                if entry in self._dirty:
                    self._plan.append(entry)
                if of_group <= 0:
                    break
        self._plan.reverse()
        return bool(self._plan)

    @property
    def has_actions(self) -> bool:
        """Whether the mover has something to do: actions, or blocks to write down."""
        return self._has_actions() or self._wants_cleaning()

    def clean_candidates(self, max_bytes: int, *, now_ms: int) -> list[Block]:
        """Dirty DRAM blocks to write down now, coldest first, at most `max_bytes` (or one block): those that somebody waits
        for, and as many as bring the dirty bytes under the low watermark. Pinned: each must be ended by `ssd_done`, whatever
        happens."""
        self._budget.at(now_ms)
        found: list[Block] = []
        taken = 0
        wanted: Block | None = None  # ahead of need: a colder one that the SSD tier wants
        while self._wants_cleaning():
            asked = self._urgent or self._soon or self._through
            ahead, tick = not asked, 0
            if asked or self._dram_policy.by_recency:
                block = next(iter(asked or self._dirty))
            else:
                block = self._plan[-1]
                tick = self._dram_policy.tick_of(block) if block in self._dirty else 0
                alike = wanted is not None and wanted.spare_tick == tick and wanted.group is block.group and not block.refused
                if not tick or not ((alike and not self._wants_second_use(block)) or self._ssd_wants(block, tick)):
                    self._plan.pop()
                    continue
                wanted = block
            if found and taken + block.size > max_bytes:
                break
            if ahead:
                block.spare_tick = 0 if self._must_stay(block) else tick or self._dram_policy.tick_of(block)
            self._urgent.pop(block, None)
            self._soon.pop(block, None)
            self._through.pop(block, None)
            if block not in self._dirty:  # it is being written already, or was refused
                continue
            del self._dirty[block]
            block.pins += 1
            block.demoting = True
            self.n_demoting += 1
            self._demoting_bytes += block.size
            self._unplaced.setdefault((block.group, block.spare_tick), set()).add(block)
            taken += block.size
            found.append(block)
        return found

    def ssd_reserve(self, block: Block) -> Slot | None:
        """A slot for a block of `clean_candidates`, evicting from the SSD tier: never the last copy of the chain that is being
        put (one that is longer than both tiers keeps its head), nor of what is hotter than the coldest that is in DRAM alone.
        Drain the actions before writing to it: it may have to be erased first, its file to be made. None: no room for it, or
        the block is gone (`ssd_done(block, None, ok=False)`)."""
        assert block.demoting, "not a block of clean_candidates"
        n_alike = self._placed(block)
        if self.ssd is None or self._ssd_room is None or self._ssd_policy is None or not block.live or block.ssd is not None:
            return None
        if not self._budget.allows() or (self._wants_second_use(block) and not self._ssd_wants(block, block.spare_tick)):
            block.refused = True  # until it is used again
            return None
        if block.size > self.ssd.largest_size():
            return None
        uid = block.space.uid
        group = self._ssd_group(block.space, block.size)
        order = self._dram_policy.order_of(block)
        if not self._ssd_within_quota(block.space, group, size=block.size, spare_tick=block.spare_tick, limit=order):
            block.refused = True
            return None
        owners = [SsdCopy(group, block)]
        slots = self.ssd.allocate(uid, block.size, 1, owners=owners)
        keeps = self._must_stay(block)
        if keeps:
            limit = NO_LIMIT
        else:
            limit = self._coldest_in_dram(block) if self._dram_policy.by_recency else order
        need = 1 if self.shelves or block.space.share is not None else min(MOVED_AT_ONCE, 1 + n_alike)
        while not slots:
            rank = PRIORITY_DEFAULT if block.keep is None else block.keep.rank
            evicted, _ = self._make_room(SSD, group, need, spare_tick=block.spare_tick, limit=limit, rank=rank)
            if not block.live:  # what it hangs on went
                return None
            if not evicted or self.ssd.no_place:
                block.refused = (keeps or limit == order) and self._ssd_wants(block, block.spare_tick)  # not for its order
                return None
            slots = self.ssd.allocate(uid, block.size, 1, owners=owners)
        self._budget.spend(block.size)
        self._collect_ssd()
        self._flights_coldest = max(order, self._flights_coldest if self._n_flights else order)
        self._n_flights += 1
        block.flight = slots[0]
        return block.flight

    def _placed(self, block: Block) -> int:
        """It waits for no slot any more. -> how many do for which the same may leave."""
        of = block.group, block.spare_tick
        alike = self._unplaced.get(of)
        if alike is None or block not in alike:
            return 0
        alike.remove(block)
        if not alike:
            del self._unplaced[of]
        return len(alike)

    def _coldest_in_dram(self, block: Block) -> float:
        """Order of the coldest block that has, or may soon have, no copy but in the DRAM of this one's class; its own where an
        extent is emptied: that goes by no order."""
        policy = self._dram_policy
        order = policy.order_of(block)
        if self._dram_room.is_emptying(block):
            return order
        if self._n_flights:
            order = max(order, self._flights_coldest)
        victim = policy.victim(block.group)
        while isinstance(victim, Block) and (victim.held_dram or victim.pins > victim.demoting):
            self._park_dram(victim)
            victim = policy.victim(block.group)
        return order if victim is None else max(order, policy.order_of(victim))

    def ssd_done_all(self, done: Iterable[tuple[Block, Slot | None, bool]]) -> None:
        """`ssd_done` of each (block, slot, ok), in order."""
        new: list[tuple[int, int, SsdCopy]] = []
        for block, slot, ok in done:
            self._end_demotion(block, slot, ok, new)
        self._add_to_ssd(new)

    def ssd_done(self, block: Block, slot: Slot | None, ok: bool) -> None:
        """Ends a demotion. ok: the record is on disk, the block is clean now. Not ok with a slot: writing failed (tried once
        more later, then the block may be dropped); without one: the tier has no room for it (dropped when it is its turn,
        unless something colder is there by then)."""
        new: list[tuple[int, int, SsdCopy]] = []
        self._end_demotion(block, slot, ok, new)
        self._add_to_ssd(new)

    def _end_demotion(self, block: Block, slot: Slot | None, ok: bool, new: list[tuple[int, int, SsdCopy]]) -> None:
        """`new`: gets (tick, rank, copy), that the SSD tier's policy is told of before anything else happens."""
        assert block.demoting and slot == block.flight, "not the demotion that is under way"
        block.demoting, block.flight = False, None
        self._placed(block)
        self.n_demoting -= 1
        self._n_flights -= slot is not None
        self._demoting_bytes -= block.size
        if slot is not None and ok and block.dirty and self.ssd is not None and self._ssd_policy is not None:
            new.append(self._attach_ssd(block, slot))
            self._undirty(block)
            self.counters["demoted"] += 1
            self._report(block.space.uid, block.key, block.tiers, None, block.size)
        else:
            if slot is not None:
                self._free_ssd(slot)
            if block.dirty:
                self.counters["demote_failed"] += 1
                if slot is None:  # not ahead of need for a while: it would be the same again
                    self._ahead_from_bytes = self.stored_bytes + self.dram.capacity_bytes // RESUME_PART
                else:
                    block.failures += 1
                block.refused = block.refused or block.failures >= FAILURES_MAX
                if not block.refused:
                    self._dirty[block] = None
                    self._dirty.move_to_end(block, last=False)
            if block.gone is not None:
                self._note_lingering(block)
        self.unpin((block,))

    def _attach_ssd(self, block: Block, slot: Slot) -> tuple[int, int, SsdCopy]:
        assert self.ssd is not None and self._ssd_policy is not None
        copy = self.ssd.extent_of(slot).owners[slot & INDEX_MASK]
        assert isinstance(copy, SsdCopy) and copy.block is block
        block.ssd, block.ssd_copy = slot, copy
        tick, rank = self._tick, block.depth
        if block.dram is not None:  # as recent as it is in DRAM
            tick, rank = self._dram_policy.place_of(block)
        return max(1, tick), rank, copy

    def _add_to_ssd(self, new: list[tuple[int, int, SsdCopy]]) -> None:
        """Of one tick at a time; they come the deepest first."""
        for tick, alike in groupby(new, key=itemgetter(0)):
            entries = list(alike)
            entries.reverse()
            assert self._ssd_policy is not None
            self._ssd_policy.add([copy for _, _, copy in entries], tick, [rank for _, rank, _ in entries])

    # --- promotion: SSD -> DRAM -----------------------------------------------------------------------------------------

    def promote_reserve(self, block: Block, *, wanted: bool = False, n_more: int = 0) -> Slot | None:
        """A DRAM slot for a pinned SSD block. Never waits: free room or clean victims only, that are worth less than it (where a
        policy knows worth; wanted: whatever they are worth, somebody asked for it to be there). n_more: blocks of its chain that
        are asked for next: room for them may be made with its own. None: no such room (for one that is wanted some is written
        down then), it is in DRAM, another promotion of it is under way, or it is gone. End it by `promote_done`; the block is
        pinned until then."""
        if not block.live or block.dram is not None or block.ssd is None or block.promoting or block.ssd_copy is None:
            return None
        assert self._ssd_policy is not None
        if not wanted and not self._dram_policy.by_recency and self.dram.capacity_bytes - self.dram.used_bytes < block.size:
            victim = self._dram_policy.victim(block.group)
            if victim is not None and self._dram_policy.order_of(victim) <= self._ssd_policy.order_of(block.ssd_copy):
                return None  # it would be the next to leave
        tick = self._ssd_policy.tick_of(block.ssd_copy)
        at_once = 1 if self.shelves or block.space.share is not None else min(1 + n_more, MOVED_AT_ONCE)
        slots, unclean = self._dram_slots([block], block.group, tick=tick, at_once=at_once)
        if not slots:
            if wanted:  # (there is room for it the next time)
                self._write_first(unclean, tick)
            return None
        block.promoting, block.flight = True, slots[0]
        block.pins += 1
        return slots[0]

    def promote_done(self, block: Block, slot: Slot, sums: bytes | None, ok: bool) -> None:
        """Ends a promotion. ok: the bytes are in the slot and were checked; `sums`: their packed chunk sums."""
        assert block.promoting and slot == block.flight, "not the promotion that is under way"
        block.promoting, block.flight = False, None
        if ok and block.live:
            block.dram = slot
            block.sums = sums if sums is not None else block.sums
            tick, rank = self._tick, block.depth
            if self._ssd_policy is not None and block.ssd_copy is not None:
                tick, rank = self._ssd_policy.place_of(block.ssd_copy)
            self._dram_policy.add([block], max(1, tick), [rank])
            if block.ssd is None:
                self._make_dirty(block)
            self.counters["promoted"] += 1
            self._report(block.space.uid, block.key, block.tiers, None, block.size)
        else:
            self._free_dram(slot)
            self.counters["promote_failed"] += 1
        self.unpin((block,))

    # --- copies that turn out bad, tiers that come and go ---------------------------------------------------------------

    def corrupt(self, block: Block, tier: Tiers) -> None:
        """The copy in this tier does not match its checksums: it is not served again. Without another copy the block is
        gone."""
        if self._lose_copy(block, tier, MissCause.CORRUPT):
            self.counters["corrupt_dram" if tier is DRAM else "corrupt_ssd"] += 1

    def drop_tier(self, tier: Tiers) -> int:
        """All copies in this tier are lost (its device failed for good). -> how many. Without another copy: WORKER_LOST."""
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
            self._expel(block, cause, tier)
            self._note_lingering(block)
        else:
            self._copy_lost(block, tier)
            if block.ssd is None and self.ssd is not None:
                self._make_dirty(block)
            self._report(block.space.uid, block.key, block.tiers, None, block.size)
        return True

    def adopted(self, *, now_ms: int = 0) -> None:
        """No more records will be adopted; before anything is served. (Then they all grow older at once: some us each.)"""
        self._tick += TICKS_RECENT + 1  # (no batch goes on with what an earlier process did)
        if self._ssd_policy is not None:
            self._ssd_policy.adopted()
            self._ssd_policy.at(now_ms)

    def adopt(
        self, uid: NamespaceUid, key: Key, size: int, sum: int, depth: int, parent: bytes, slot: Slot, seq: int,  # noqa: A002
        *, keep: Keep | None = None,
    ) -> bool:  # fmt: skip
        """Start of the SSD tier: the checked record in `slot` (of an extent taken by `ssd.adopt_extent`) becomes a block. Call
        in order of `seq`, the oldest first. False, erase it: the namespace is not open here, the key is there already, its
        size is not the namespace's, or the slot cannot be its."""
        del seq
        space = self.spaces.get(uid)
        if space is None or self.ssd is None or self._ssd_policy is None or key in space.blocks or len(parent) != len(NO_PARENT):
            return False
        if not 1 <= size <= space.spec.block_bytes or not (space.spec.variable or size == space.spec.block_bytes):
            return False
        if self.counters["adopted"] % ADOPTED_PER_TICK == 0:
            self._tick += 1
        block = Block(space, key, size, self._dram_group(space, size), depth, parent, depth, self._tick)
        slot_bytes = self.ssd.slot_bytes_at(slot)
        copy = SsdCopy(self._ssd_policy.group((uid, slot_bytes)), block)
        if not self.ssd.adopt(uid, slot, size=size, owner=copy):
            return False
        block.ssd, block.ssd_copy, block.sum, block.live = slot, copy, sum, True
        space.blocks[key] = block
        space.causes.pop(key, None)
        self._ssd_policy.adopt(copy, self._tick, depth)
        if keep is not None:
            block.keep = keep
            self._arrived(block)
        self.counters["adopted"] += 1
        self._report(uid, key, 2, None, size)
        return True
