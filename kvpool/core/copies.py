"""Copies of blocks in the tiers of one worker: taking and freeing slots, eviction.

Owns: which copies a block has, what leaves a tier, what is dirty (not in the SSD tier yet), what the shell must do. Does not
own: copying between tiers (`movement`), keys, reservations, holds (`blocks`, `holding`), the order of eviction (`policy`), the
search for room (`room`). `BlockTable` is built on this class by way of `Movement` and `Holding`; the split is by subject.

    DRAM, no SSD tier ... dropped when cold
    DRAM, dirty ......... must be written down before it may be dropped (unless the SSD tier is out or refuses it)
    DRAM + SSD, clean ... DRAM copy dropped when cold (report: SSD only); SSD copy dropped when cold there (dirty again)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Final, cast

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
from kvpool.core.keeping import Keeping
from kvpool.core.namespaces import WritePolicy
from kvpool.core.policy.admission import WriteBudget
from kvpool.core.policy.eviction import NO_LIMIT, Entry, EvictionPolicy, Group
from kvpool.core.room import Leave, Room
from kvpool.core.slots import PopulateExtent, PunchExtent, SlabAllocator, Slot
from kvpool.core.types import MissCause, NamespaceUid, Tiers

FAILURES_MAX: Final = 2  # of writing one block down; then it may be dropped
ASKS_MAX: Final = 2  # of the SSD tier once more for one that it refused, until it is used again
WAITING_MAX: Final = 16  # puts whose blocks are kept while they wait for room
RESUME_PART: Final = 32  # of DRAM must be stored before writing ahead goes on, once it displaced copies of what is in DRAM

COUNTERS: Final = (
    "stored", "already", "full", "refused", "rejected", "aborted", "hits_dram", "hits_ssd", "misses", "evicted", "evicted_dram",
    "evicted_ssd", "dropped_dirty", "demoted", "demote_failed", "promoted", "promote_failed", "corrupt_dram", "corrupt_ssd",
    "removed", "adopted", "holds", "holds_expired", "expired", "quota_full", "quota_evicted",
)  # fmt: skip


class Copies(Keeping):
    """State of both tiers. `ssd` None: there is no SSD tier."""

    def __init__(
        self, *, dram: SlabAllocator, ssd: SlabAllocator | None, policy: Callable[[], EvictionPolicy], reporter: Report,
        limits: Limits, bump: Bump, generation: GenerationOf,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dram, self.ssd, self.limits = dram, ssd, limits
        self.ssd_writable = ssd is not None
        """Set by the shell: False while writing to the SSD tier fails; then cold dirty blocks are dropped, not waited for."""
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.spaces: dict[NamespaceUid, Space] = {}
        self.dirty_bytes = 0  # size of DRAM blocks that have yet to be written down
        self.stored_bytes = 0  # since the start
        self.n_demoting = 0
        self._demoting_bytes = 0
        self._n_flights = 0  # demotions that have a slot
        self._unplaced: dict[tuple[Group, int], set[Block]] = {}  # those that have none yet, by class and tick that is spared
        self._flights_coldest: float = NO_LIMIT  # order of the coldest of them, since there were none
        self.held_bytes = {DRAM: 0, SSD: 0}
        self._budget = WriteBudget(bytes_per_s=limits.ssd_bytes_per_s, bytes_per_day=limits.ssd_bytes_per_day)
        self._report = reporter
        self._bump, self._generation = bump, generation
        self._gone = Gone(keys_max=limits.gone_keys_max)
        self._closing: dict[NamespaceUid, Space] = {}
        self._tick = 0
        self._ahead_from_bytes = 0  # of stored_bytes: no writing ahead before
        self._dirty: OrderedDict[Block, None] = OrderedDict()  # least recently used first
        self._soon: OrderedDict[Block, None] = OrderedDict()  # some of them, set aside until they are written down
        self._plan: list[Block] = []  # some of them, those that leave next last
        self._plan_from_bytes = 0  # of stored_bytes: no new plan before
        self._urgent: dict[Block, None] = {}  # dirty ones that somebody waits for
        self._waiting: dict[int, None] = {}  # ticks of puts that wait for room, perhaps of some that gave up
        self._through: dict[Block, None] = {}  # dirty ones of namespaces whose blocks are written down at once
        self._ssd_actions: list[Action] = []  # SSD actions in order
        self._dram_policy = policy()
        self._dram_room = Room(
            dram,
            self._dram_policy,
            may_leave=self._may_leave_dram,
            evict=self._evict_dram,
            evict_many=self._evict_dram_many,
            park=self._park_dram,
            set_aside=self._set_aside,
            slot_of=_dram_slot,
            survives=self._survives_in_ssd,
            orphaned=self._drop_orphans,
            waiting=self._waiting,
            is_of=self._is_of,
            carries=self._carries,
            n_below=self._n_below,
            is_writing=self._is_writing,
        )
        self._ssd_policy: EvictionPolicy | None = None
        self._ssd_room: Room | None = None
        if ssd is not None:
            self._ssd_policy = policy()
            self._ssd_room = Room(
                ssd,
                self._ssd_policy,
                may_leave=self._may_leave_ssd,
                evict=self._evict_ssd,
                evict_many=self._evict_ssd_many,
                park=self._park_ssd,
                set_aside=self._set_aside,
                slot_of=_ssd_slot,
                survives=self._survives_in_dram,
                orphaned=self._drop_orphans,
                waiting=self._waiting,
                is_of=self._is_of,
                carries=self._carries,
                n_below=self._n_below,
                is_writing=self._is_writing,
            )

    # --- what the rooms ask ---------------------------------------------------------------------------------------------

    def _may_leave_dram(self, entry: Entry, spare_tick: int) -> Leave:
        assert isinstance(entry, Block)
        if entry.pins or entry.held_dram or not entry.live or (entry.keep is not None and self._stays(entry, DRAM)):
            return Leave.BUSY
        return Leave.DIRTY if entry.dirty and self._ssd_wants(entry, spare_tick) else Leave.YES

    def _ssd_wants(self, block: Block, spare_tick: int) -> bool:
        """Whether the SSD tier should have this dirty block: it has room, or something colder that may be lost for it. So what
        goes for good is the coldest of both tiers: a chain loses its tail first, wherever its parts lie."""
        if not self.ssd_writable or self.ssd is None or self._ssd_room is None or self._ssd_policy is None:
            return False
        if block.refused and not self._may_ask_again(block, spare_tick):
            return False
        if not self._budget.allows():
            return False
        must_stay = self._must_stay(block)
        if must_stay and not block.refused:
            return True
        if not must_stay and self._wants_second_use(block) and not self._dram_policy.was_reused(block):
            return False
        uid, size = block.space.uid, block.size
        fits = size <= self.ssd.largest_size()
        if fits and self.ssd.has_room(uid, size):
            return True
        order = NO_LIMIT if must_stay else self._dram_policy.order_of(block)
        if not must_stay and self._n_flights and order < self._flights_coldest:  # something colder will be there soon
            return True
        if not fits:
            return False
        group = self._ssd_group(block.space, size)
        return self._ssd_room.could_make(group, now=self._tick, spare_tick=spare_tick, limit=order)

    def _wants_second_use(self, block: Block) -> bool:
        """Whether the SSD tier takes it only once it was used again."""
        return self.limits.second_use or block.space.spec.write_policy is WritePolicy.SELECTIVE

    def _waits(self, tick: int, must_wait: bool) -> None:
        """The put of this tick waits for room from now on, or does not. (By recency its chain is the last to leave anyway.)"""
        self._waiting.pop(tick, None)
        if must_wait and not self._dram_policy.by_recency:
            self._waiting[tick] = None
            if len(self._waiting) > WAITING_MAX:
                del self._waiting[next(iter(self._waiting))]

    def gave_up(self, use: int) -> None:
        """The put that had to wait (`Reserved.use`) is not tried again: nothing is kept for it any more."""
        self._waiting.pop(use, None)

    def _must_stay(self, block: Block) -> bool:
        """What is below it in its chain is on SSD, so it should be. (Not in an extent that is emptied: that goes with it.)"""
        if block.kid is None or block.n_dram_kids:
            return False
        return not (self._dram_room.emptying and self._dram_room.is_emptying(block))

    def _may_ask_again(self, block: Block, spare_tick: int) -> bool:
        """Whether one that the SSD tier refused while it spared another tick is asked for once more: all that hangs below it
        would be lost with it."""
        may = block.n_asks < ASKS_MAX and block.failures < FAILURES_MAX
        return may and spare_tick != block.spare_tick and self._must_stay(block)

    def _ask_again(self, block: Block, spare_tick: int) -> None:
        if block.refused and self._may_ask_again(block, spare_tick):
            block.refused, block.spare_tick = False, spare_tick
            block.n_asks += 1
            self._dirty[block] = None

    def _carries(self, entry: Entry) -> bool:
        """Whether what hangs below it is on SSD, and lost with it. (An SSD copy leaves after those.)"""
        return isinstance(entry, Block) and self._must_stay(entry)

    def _n_below(self, entry: Entry, n_max: int) -> int:
        """How many blocks hang below it, where the policy knows that; n_max: or more."""
        assert isinstance(entry, Block)
        kids, n = [entry.kid], 0
        while kids and n < n_max:
            kid = kids.pop()
            while kid is not None and n < n_max:
                n += 1
                kids.append(kid.kid)
                kid = kid.next_kid
        return n

    def _is_writing(self) -> bool:
        """Whether blocks of DRAM are being written down, or will be: what a put waits for."""
        return self.ssd_writable and (self.n_demoting > 0 or bool(self._soon))

    def _may_leave_ssd(self, entry: Entry, spare_tick: int) -> Leave:
        del spare_tick
        assert isinstance(entry, SsdCopy)
        block = entry.block
        if block.keep is not None and self._stays(block, SSD):
            return Leave.BUSY
        return Leave.BUSY if block.pins or block.held_ssd or block.ssd_copy is not entry or not block.live else Leave.YES

    def _survives_in_ssd(self, entry: Entry, spare_tick: int) -> bool:
        assert isinstance(entry, Block)
        return entry.ssd is not None or (entry.dirty and self._ssd_wants(entry, spare_tick))

    def _park_dram(self, entry: Entry) -> None:
        assert isinstance(entry, Block)
        entry.on_idle = True
        self._dram_policy.park(entry)

    def _set_aside(self, entries: Sequence[Entry], spare_tick: int) -> None:
        """The first is dirty and should leave DRAM: it is written down soon and passed over until then. With it those above."""
        first = entries[0]
        assert isinstance(first, Block)
        if first in self._soon:  # (it was one of those above)
            self._soon.move_to_end(first, last=False)
        for entry in entries:
            assert isinstance(entry, Block)
            if entry.dirty and not entry.demoting:
                self._ask_again(entry, spare_tick)
                self._soon[entry] = None
        self._park_dram(first)

    def _write_first(self, entries: Sequence[Entry], tick: int) -> None:
        """These must be written down so that there is room for a batch of this tick."""
        for entry in entries:
            if isinstance(entry, Block) and entry.dirty and not entry.demoting:
                self._ask_again(entry, tick)
                self._urgent[entry] = None
                entry.spare_tick = tick

    def _none_aside(self) -> None:
        """The SSD tier takes nothing now: those set aside may leave without it."""
        soon, self._soon = self._soon, OrderedDict()
        for block in soon:
            if block.on_idle and not block.pins and not block.held_dram and not block.held_ssd:
                self._settle(block)

    def _park_ssd(self, entry: Entry) -> None:
        assert isinstance(entry, SsdCopy) and self._ssd_policy is not None
        entry.block.on_idle = True
        self._ssd_policy.park(entry)

    def _evict_dram(self, entry: Entry) -> None:
        assert isinstance(entry, Block) and entry.dram is not None
        block = entry
        slot, block.dram = entry.dram, None
        if block.ssd is None and block.kid is not None:
            self._drop_below(block)
        self._dram_policy.remove(block)
        if block.dirty:
            self._undirty(block)
            self.counters["dropped_dirty"] += 1
        self._free_dram(slot)
        if block.ssd is None:
            self._expel(block, MissCause.EVICTED, DRAM)
            self.counters["evicted"] += 1
        else:
            self.counters["evicted_dram"] += 1
            self._report(block.space.uid, block.key, 2, None, block.size)

    def _evict_dram_many(self, entries: Sequence[Entry]) -> None:
        blocks = cast("Sequence[Block]", entries)
        stay = blocks[0].ssd is not None
        if self.ssd is not None and not stay and not _is_an_end(blocks):
            for entry in entries:
                self._evict_dram(entry)
            return
        self._dram_policy.retire(entries)
        for block in blocks:
            assert block.dram is not None and (block.ssd is not None) is stay
            slot, block.dram = block.dram, None
            if block.dirty:
                self._undirty(block)
                self.counters["dropped_dirty"] += 1
            self._free_dram(slot)
            if stay:
                self._report(block.space.uid, block.key, 2, None, block.size)
            else:
                self._expel(block, MissCause.EVICTED, DRAM)
        self.counters["evicted_dram" if stay else "evicted"] += len(blocks)

    def _evict_ssd_many(self, entries: Sequence[Entry]) -> None:
        blocks = [entry.block for entry in cast("Sequence[SsdCopy]", entries)]
        stay = blocks[0].dram is not None
        if self._ssd_policy is None or self._dram_room.emptying or (not stay and not _is_an_end(blocks)):
            for entry in entries:
                self._evict_ssd(entry)
            return
        self._ssd_policy.retire(entries)
        for block in blocks:
            assert block.ssd is not None and (block.dram is not None) is stay
            slot = block.ssd
            block.ssd = block.ssd_copy = None
            self._free_ssd(slot)
            if stay:
                self._make_dirty(block, displaced=True)
                self._report(block.space.uid, block.key, 1, None, block.size)
            else:
                self._expel(block, MissCause.EVICTED, SSD)
        if stay:
            self._ahead_from_bytes = self.stored_bytes + self.dram.capacity_bytes // RESUME_PART
        self.counters["evicted_ssd" if stay else "evicted"] += len(blocks)

    def _evict_ssd(self, entry: Entry) -> None:
        assert isinstance(entry, SsdCopy)
        block = entry.block
        slot = block.ssd
        assert slot is not None
        emptying = self._dram_room.emptying and self._ssd_policy is not None
        tick, rank = self._ssd_policy.place_of(entry) if emptying else (0, 0)  # type: ignore[union-attr]
        if block.dram is None and block.kid is not None:
            self._drop_below(block)
        self._lose_ssd_entry(block)
        self._free_ssd(slot)
        if block.dram is None:
            if emptying:  # (not the coldest of both tiers then)
                self._drop_orphans(block.space.uid, {tick: rank})
            self._expel(block, MissCause.EVICTED, SSD)
            self.counters["evicted"] += 1
        else:
            self._make_dirty(block, displaced=True)
            self._ahead_from_bytes = self.stored_bytes + self.dram.capacity_bytes // RESUME_PART
            self.counters["evicted_ssd"] += 1
            self._report(block.space.uid, block.key, 1, None, block.size)

    def _survives_in_dram(self, entry: Entry, spare_tick: int) -> bool:
        """A copy in an extent that is being emptied does not count: it would have to be written down again at once."""
        del spare_tick
        assert isinstance(entry, SsdCopy)
        return entry.block.dram is not None and not self._dram_room.is_emptying(entry.block)

    def _drop_orphans(self, uid: NamespaceUid, lost: dict[int, int]) -> None:
        """An extent was emptied: what is deeper in the chains of those lost (by tick, their rank) goes too, from both tiers. It
        is colder, and nobody can reach it."""
        for policy in (self._dram_policy, self._ssd_policy):
            for group in policy.groups() if policy is not None else ():
                if group.key[0] == uid:
                    for tick, rank in lost.items():
                        for entry in policy.behind(group, tick, rank) if policy is not None else ():
                            self._drop_orphan(entry.block if isinstance(entry, SsdCopy) else entry)

    def _drop_below(self, block: Block) -> None:
        """It is lost for good: what hangs below it goes first (where the policy knows that)."""
        below: list[Block] = []
        kids = [block.kid]
        while kids:
            kid = kids.pop()
            while kid is not None:
                below.append(kid)
                kids.append(kid.kid)
                kid = kid.next_kid
        for orphan in reversed(below):
            self._drop_orphan(orphan)

    def _is_of(self, entry: Entry, ticks: Collection[int]) -> bool:
        """Whether it, or what hangs below it (where the policy knows that), was used at one of these."""
        found = [entry.block if isinstance(entry, SsdCopy) else entry]
        while found:
            block = found.pop()
            assert isinstance(block, Block)
            if max(self._used_in(block, DRAM), self._used_in(block, SSD)) in ticks:
                return True
            kid = block.kid
            while kid is not None:
                found.append(kid)
                kid = kid.next_kid
        return False

    def _drop_orphan(self, entry: Entry) -> None:
        assert isinstance(entry, Block)
        block = entry
        busy = block.pins > block.demoting or block.held_dram or block.held_ssd or (block.keep is not None and block.keep.hard_in)
        if block.live and block.depth and not busy:
            if block.dirty:
                self.counters["dropped_dirty"] += 1
            self._drop_live(block, MissCause.EVICTED)
            self.counters["evicted"] += 1

    # --- small steps ----------------------------------------------------------------------------------------------------

    def _expel(self, block: Block, cause: MissCause, tier: Tiers) -> None:
        """A live block is not to be found any more. Its copies are the caller's (see `_release_copies`)."""
        space = block.space
        block.live = False
        block.gone = cause
        del space.blocks[block.key]
        if block.keep is not None:
            self._unkeep(block)
        self._gone.remember(space.causes, block.key, (cause, tier))
        self._report(space.uid, block.key, 0, cause, block.size)

    def _drop_live(self, block: Block, cause: MissCause) -> None:
        """Expels a live block with all its copies; slots that are in use are freed by the last user."""
        self._expel(block, cause, DRAM if block.dram is not None else SSD)
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
        if self.ssd is not None:
            self._note_lingering(block)

    def _note_lingering(self, block: Block) -> None:
        """A gone block whose record is still on disk, or is being written: `blocks.with_records` must find it."""
        if block.demoting or block.ssd_slots:
            block.space.lingering.add(block)
        else:
            block.space.lingering.discard(block)

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

    def unpin(self, blocks: Iterable[Block | None]) -> None:
        """Ends transfers, once a pin (None is skipped)."""
        for block in blocks:
            if block is not None:
                assert block.pins > 0, "unpinned more often than pinned"
                block.pins -= 1
                if block.on_idle:
                    self._settle(block)

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
            for policy in (self._dram_policy, self._ssd_policy):
                for group in policy.groups() if policy is not None else ():
                    if policy is not None and group.key[0] == space.uid:
                        policy.drop_group(group.key)

    def _lose_ssd_entry(self, block: Block) -> None:
        assert self._ssd_policy is not None and block.ssd_copy is not None
        self._ssd_policy.remove(block.ssd_copy)
        block.ssd = block.ssd_copy = None

    def _make_dirty(self, block: Block, *, displaced: bool = False) -> None:
        """displaced: its copy on SSD went for another. (Written at once again it would displace one in turn, without end.)"""
        if not block.dirty:
            block.dirty = True
            self.dirty_bytes += block.size
            self._dirty[block] = None
            if block.space.spec.write_policy is WritePolicy.THROUGH and not displaced:
                self._through[block] = None

    def _undirty(self, block: Block) -> None:
        block.dirty = False
        self.dirty_bytes -= block.size
        self._dirty.pop(block, None)
        self._urgent.pop(block, None)
        self._soon.pop(block, None)
        self._through.pop(block, None)

    def _dram_slots(
        self, blocks: Sequence[Block], group: Group, *, tick: int, limit: float = NO_LIMIT, at_once: int = 1
    ) -> tuple[list[Slot], list[Entry]]:
        """Up to one DRAM slot for each of these blocks of one group, evicting (`at_once`: see `Room.make`). -> (slots, what must
        be written down for more)."""
        uid, size = blocks[0].space.uid, blocks[0].size
        if size > self.dram.largest_size():
            return [], []
        if self._soon and not self.ssd_writable:
            self._none_aside()
        n, dirty = self._within_quota(blocks[0].space, group, len(blocks), size=size, tick=tick)
        slots = self.dram.allocate(uid, size, n, owners=blocks)
        while len(slots) < n:
            short = n - len(slots)
            evicted, unclean = self._make_room(DRAM, group, short, spare_tick=tick, limit=limit, at_once=at_once)
            dirty += unclean
            if not evicted or self.dram.no_place:
                break
            slots += self.dram.allocate(uid, size, short, owners=blocks[len(slots) :])
        return slots, dirty

    def _dram_group(self, space: Space, size: int) -> Group:
        if size == space.spec.block_bytes:
            return space.exact_group
        return self._dram_policy.group((space.uid, self.dram.slot_bytes(space.uid, size)))

    def _ssd_group(self, space: Space, size: int) -> Group:
        assert self.ssd is not None and self._ssd_policy is not None
        exact = size == space.spec.block_bytes
        group = space.exact_ssd_group if exact else None
        if group is None:
            group = self._ssd_policy.group((space.uid, self.ssd.slot_bytes(space.uid, size)))
            if exact:
                space.exact_ssd_group = group
        return group

    # --- what the shell must do -----------------------------------------------------------------------------------------

    def _has_actions(self) -> bool:
        """Whether `drain_actions` has something."""
        return bool(self._ssd_actions) or self.dram.has_actions or (self.ssd is not None and self.ssd.has_actions)

    def drain_actions(self) -> list[Action]:
        """What the shell must do, in this order, outside the lock. One consumer at a time: calling it says that all that was
        handed out before has been done. A removal may be confirmed when the actions drained after it are done."""
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


def _is_an_end(blocks: Sequence[Block]) -> bool:
    """Whether nothing hangs below these, each the parent of the one before, but they themselves."""
    if blocks[0].kid is not None:
        return False
    return all(above.kid is block and block.next_kid is None for block, above in pairwise(blocks))


def _dram_slot(entry: Entry) -> Slot:
    assert isinstance(entry, Block) and entry.dram is not None
    return entry.dram


def _ssd_slot(entry: Entry) -> Slot:
    assert isinstance(entry, SsdCopy) and entry.block.ssd is not None
    return entry.block.ssd
