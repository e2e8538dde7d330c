"""What stays longer, and what goes earlier, than the policy alone would have it: expiry, priorities, pins, quotas.

Owns: what these do to blocks of one worker's table. Does not own: their values and order (`retention`, `pins`, `quota`), copies
(`copies`, which is built on this class), the policy's order.

    expired ............. a miss at once, its slots are freed at once or by the timer; a hold keeps it for its reader
    low priority ........ leaves a tier before the policy is asked
    high, soft pin ...... may leave only when the policy has nothing else in the tier; lower priorities first
    hard pin ............ the copy in one tier does not leave; all together at most `pinned_fraction` of each tier
    quota ............... a namespace at its part makes room among its own blocks only
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvpool.core.pins import PINS_MAX, PinLevel
from kvpool.core.retention import NEVER_MS, PRIORITY_DEFAULT, SOFT_RANK, Expiries, Keep, Shelves, life_ms, unpack_hint
from kvpool.core.room import Leave
from kvpool.core.types import Key, MissCause, NamespaceUid, Tiers

if TYPE_CHECKING:
    from kvpool.core.block import Block, Limits, Space
    from kvpool.core.policy.eviction import Entry, EvictionPolicy, Group
    from kvpool.core.quota import Share
    from kvpool.core.room import Room
    from kvpool.core.slots import SlabAllocator

EXPIRE_BLOCKS_MAX: Final = 512  # in one look of the timer: some ms of the lock
TRIM_BLOCKS_MAX: Final = 128  # of one namespace over its quota, in one look
RETRY_PINS_MAX: Final = 512  # hard pins beyond the share that are tried again in one look
YIELD_MAX: Final = 64  # kept blocks of other classes offered to the policy at once

NO_LIMIT: Final = -float(1 << 100)  # hotter than every order of a policy
ABSENT, PINNED, REFUSED = 0, 1, 2  # codes of `pin_keys`
DRAM: Final = Tiers.DRAM
SSD: Final = Tiers.SSD


class Keeping:
    """Base of `Copies`."""

    dram: SlabAllocator
    ssd: SlabAllocator | None
    limits: Limits
    counters: dict[str, int]
    spaces: dict[NamespaceUid, Space]
    _dram_policy: EvictionPolicy
    _ssd_policy: EvictionPolicy | None
    _dram_room: Room
    _ssd_room: Room | None
    _tick: int
    _urgent: dict[Block, None]

    def __init__(self) -> None:
        self.shelves = Shelves(self._used_in)
        self.pinned_bytes = {DRAM: 0, SSD: 0}  # of copies that hard pins protect
        self.over_quota = False  # whether the last `_dram_slots` got fewer because of a quota
        self._expiries = Expiries()
        self._expired_held: dict[Block, None] = {}
        self._yield_rank = PRIORITY_DEFAULT  # blocks of a greater rank stay
        self._refused: dict[Block, None] = {}  # pinned hard, beyond the share
        self._n_pins = 0

    # --- what `Copies` does -------------------------------------------------------------------------------------------------

    def _may_leave_dram(self, entry: Entry, spare_tick: int) -> Leave:
        raise NotImplementedError

    def _may_leave_ssd(self, entry: Entry, spare_tick: int) -> Leave:
        raise NotImplementedError

    def _evict_dram(self, entry: Entry) -> None:
        raise NotImplementedError

    def _evict_ssd(self, entry: Entry) -> None:
        raise NotImplementedError

    def _drop_live(self, block: Block, cause: MissCause) -> None:
        raise NotImplementedError

    def _used_in(self, block: Block, tier: Tiers) -> int:
        if tier is DRAM:
            return self._dram_policy.tick_of(block)
        return 0 if self._ssd_policy is None or block.ssd_copy is None else self._ssd_policy.tick_of(block.ssd_copy)

    # --- blocks that come and go ----------------------------------------------------------------------------------------

    def _keep_of(self, space: Space, hint: int, now_ms: int) -> Keep | None:
        """Of a block that is put with this hint; None: nothing is special."""
        retain_ms, priority = unpack_hint(hint)
        lives = life_ms(space.spec.ttl_ms, retain_ms)
        if not lives and priority == PRIORITY_DEFAULT:
            return None
        return Keep(now_ms + lives if lives else 0, priority)

    def _arrived(self, block: Block) -> None:
        """It is live from now on: what was said of it before applies."""
        pins = block.space.pins
        pin = pins.get(block.key) if pins else None
        if pin is not None:
            block.keep = block.keep or Keep()
            block.keep.level = pin[0]
        keep = block.keep
        if keep is not None:
            if keep.expires_ms:
                self._expiries.add(block, keep.expires_ms)
            self.shelves.add(block, keep.rank)
            if keep.level is PinLevel.HARD:
                self._protect_hard(block)

    def _put_again(self, space: Space, keys: Sequence[Key], hints: Sequence[int], now_ms: int) -> None:
        """These keys are being put: those that are here live on (no `hints`: as the namespace has it)."""
        if self._expired_held or self._expiries.next_ms < NEVER_MS:
            for i, key in enumerate(keys):
                block = space.blocks.get(key)
                if block is not None and block.keep is not None:
                    self._renew(block, hints[i] if hints else 0, now_ms)

    def _renew(self, block: Block, hint: int, now_ms: int) -> None:
        """It was put again: it lives at least as long as that put wants."""
        keep = block.keep
        if keep is not None and keep.expires_ms:
            lives = life_ms(block.space.spec.ttl_ms, unpack_hint(hint)[0])
            if not lives or now_ms + lives > keep.expires_ms:
                keep.expires_ms = now_ms + lives if lives else 0
                self._expired_held.pop(block, None)
                if lives:
                    self._expiries.add(block, keep.expires_ms)

    def _unkeep(self, block: Block) -> None:
        """A block that is kept specially is gone."""
        keep = block.keep
        if keep is not None:
            self.shelves.discard(block, keep.rank)
            self._unprotect(block, keep)
            self._refused.pop(block, None)
            self._expired_held.pop(block, None)
            block.keep = None

    def _stays(self, block: Block, tier: Tiers) -> bool:
        """Whether its copy there may not leave now for another block."""
        keep = block.keep
        return keep is not None and (keep.hard_in is tier or keep.rank > self._yield_rank)

    # --- expiry ---------------------------------------------------------------------------------------------------------

    def _expire_named(self, space: Space, keys: Iterable[Key], now_ms: int) -> set[Key]:
        """Drops those of these keys whose time is up. -> those that a hold keeps: misses for everybody but its reader."""
        kept: set[Key] = set()
        if now_ms >= self._expiries.next_ms or self._expired_held:
            for key in keys:
                block = space.blocks.get(key)
                keep = block.keep if block is not None else None
                if block is not None and keep is not None and 0 < keep.expires_ms <= now_ms and not self._expire(block):
                    kept.add(key)
        return kept

    def _expire(self, block: Block) -> bool:
        if block.held_dram or block.held_ssd:
            self._expired_held[block] = None
            return False
        self._drop_live(block, MissCause.EXPIRED)
        self.counters["expired"] += 1
        return True

    def _look_after(self, now_ms: int) -> None:
        """Some times a second: what is due."""
        self._dram_policy.at(now_ms)  # (also while nobody asks: not all ages at the next request)
        for block in [b for b in self._expired_held if not b.held_dram and not b.held_ssd][:EXPIRE_BLOCKS_MAX]:
            del self._expired_held[block]
            self._expire(block)
        for block in self._expiries.due(now_ms, n_max=EXPIRE_BLOCKS_MAX):
            self._expire(block)
        self.shelves.refresh()
        for space in self.spaces.values():
            if space.pins:
                self._end_pins(space, space.pins.expire(now_ms, n_max=EXPIRE_BLOCKS_MAX))
            if space.share is not None:
                self._trim(space, space.share)
        for block in list(self._refused)[:RETRY_PINS_MAX]:
            del self._refused[block]
            self._protect_hard(block)  # (puts it back where there is still no room)

    # --- pins -----------------------------------------------------------------------------------------------------------

    def pin_keys(self, uid: NamespaceUid, keys: Sequence[Key], levels: Sequence[int], ends_ms: Sequence[int]) -> bytes:
        """Pins keys until their time (level NONE: ends their pin), those that are not here for when they come. -> u8 [n]: ABSENT,
        PINNED (or unpinned) here, REFUSED: pinned hard, but the share of the tier is taken: evicted last. Unknown namespace, or
        past the bound: ABSENT."""
        space = self.spaces.get(uid)
        codes = bytearray(len(keys))
        if space is None:
            return bytes(codes)
        for i, key in enumerate(keys):
            level = PinLevel(levels[i]) if levels[i] <= PinLevel.HARD else PinLevel.HARD
            if level is PinLevel.NONE:
                if space.pins.drop(key):
                    self._n_pins -= 1
            elif key in space.pins or self._n_pins < PINS_MAX:
                self._n_pins += key not in space.pins
                space.pins.set(key, level, ends_ms[i])
            else:
                continue
            block = space.blocks.get(key)
            if block is not None:
                self._set_level(block, level)
                missed = level is PinLevel.HARD and block.keep is not None and not block.keep.hard_in
                codes[i] = REFUSED if missed else PINNED
        return bytes(codes)

    def drop_pins(self, uid: NamespaceUid) -> None:
        """Ends all pins of the namespace here: the master tells them anew."""
        space = self.spaces.get(uid)
        if space is not None:
            self._end_pins(space, space.pins.clear())

    def _end_pins(self, space: Space, keys: Iterable[Key]) -> None:
        for key in keys:
            self._n_pins -= 1
            block = space.blocks.get(key)
            if block is not None:
                self._set_level(block, PinLevel.NONE)

    def _set_level(self, block: Block, level: PinLevel) -> None:
        """Of a live block."""
        keep = block.keep = block.keep or Keep()
        if keep.level is level:
            if level is PinLevel.HARD and not keep.hard_in:
                self._protect_hard(block)
            return
        self.shelves.discard(block, keep.rank)
        self._unprotect(block, keep)
        self._refused.pop(block, None)
        keep.level = level
        self.shelves.add(block, keep.rank)
        if level is PinLevel.HARD:
            self._protect_hard(block)
        elif keep.is_plain:
            block.keep = None
        if not level:
            self._offer(block)

    def _offer(self, block: Block) -> None:
        """The policy may name it as a victim again."""
        if not block.pins:
            if block.dram is not None and not block.held_dram:
                self._dram_policy.unpark(block)
            if block.ssd_copy is not None and not block.held_ssd and self._ssd_policy is not None:
                self._ssd_policy.unpark(block.ssd_copy)

    def _protect_hard(self, block: Block) -> None:
        """The copy in DRAM, else the one on SSD, as far as the tier's share goes."""
        keep = block.keep
        if keep is None or keep.level is not PinLevel.HARD:
            return
        for tier, slot, slots in ((DRAM, block.dram, self.dram), (SSD, block.ssd, self.ssd)):
            most = 0.0 if slot is None or slots is None else slots.capacity_bytes * self.limits.pinned_fraction
            if self.pinned_bytes[tier] + block.size <= most:
                keep.hard_in = tier
                self.pinned_bytes[tier] += block.size
                return
        self._refused[block] = None

    def _unprotect(self, block: Block, keep: Keep) -> None:
        if keep.hard_in:
            self.pinned_bytes[keep.hard_in] -= block.size
            keep.hard_in = Tiers.NONE

    def _copy_lost(self, block: Block, tier: Tiers) -> None:
        """A live block's copy in this tier is bad: a hard pin protects the other one."""
        if block.keep is not None and block.keep.hard_in is tier:
            self._unprotect(block, block.keep)
            self._protect_hard(block)

    @staticmethod
    def _matters(block: Block) -> bool:
        """Whether it has a priority above the default, or a pin waits for it."""
        return (block.keep is not None and block.keep.rank > PRIORITY_DEFAULT) or (
            bool(block.space.pins) and block.key in block.space.pins
        )

    # --- room -----------------------------------------------------------------------------------------------------------

    def _make_room(
        self, tier: Tiers, group: Group, need: int, *, spare_tick: int, limit: Any = NO_LIMIT, rank: int = SOFT_RANK,
        at_once: int = 1,
    ) -> tuple[int, list[Entry]]:
        """As `Room.make`, in this order: low priorities, the policy's, then high priorities and soft pins, not above `rank`,
        and only when nothing else is left, however hot."""
        room = self._dram_room if tier is DRAM else self._ssd_room
        assert room is not None
        if not self.shelves:
            return room.make(group, need, now=self._tick, spare_tick=spare_tick, limit=limit, at_once=at_once)
        n_low, dirty = self._give_up(tier, group, need, spare_tick, low=True)
        if n_low >= need or dirty:
            return n_low, dirty
        evicted, dirty = room.make(group, need - n_low, now=self._tick, spare_tick=spare_tick, limit=limit)
        if n_low or evicted or dirty:
            return n_low + evicted, dirty
        if rank <= PRIORITY_DEFAULT:
            return 0, []
        least: Any = NO_LIMIT
        if limit != NO_LIMIT and room.could_make(group, now=self._tick, spare_tick=spare_tick, limit=least):
            return 0, []
        n_kept, dirty = self._give_up(tier, group, need, spare_tick, low=False)
        if n_kept or dirty:
            return n_kept, dirty
        return self._yield_others(tier, room, group, need, spare_tick, limit)

    def _give_up(
        self, tier: Tiers, group: Group, need: int, spare_tick: int, *, low: bool
    ) -> tuple[int, list[Entry]]:
        """Evicts up to `need` blocks of this class by their rank. What must be written down first (or is just now) is the next
        that is looked at: others written instead would take its place on SSD, and so on."""
        evicted, dirty = 0, []
        for rank in self.shelves.ranks(low=low):
            self._yield_rank = max(PRIORITY_DEFAULT, rank)
            again: list[Block] = []
            try:
                for entry, leave in self._copies_of(rank, tier, group, spare_tick):
                    if leave is Leave.YES:
                        self._evict_dram(entry) if tier is DRAM else self._evict_ssd(entry)
                        evicted += 1
                    elif tier is DRAM and (leave is Leave.DIRTY or self._is_only_written(entry)):
                        dirty.append(entry)
                        again.append(entry)  # type: ignore[arg-type]
                    if evicted + len(dirty) >= need:
                        return evicted, dirty
            finally:
                self._yield_rank = PRIORITY_DEFAULT
                self.shelves.put_back(rank, tier, group, again)
        return evicted, dirty

    def _is_only_written(self, entry: Entry) -> bool:
        """Whether it may not leave DRAM for no other reason than that it is being written down."""
        block: Block = entry  # type: ignore[assignment]
        return block.demoting and block.pins == 1 and block.live and not block.held_dram and not self._stays(block, DRAM)

    def _copies_of(self, rank: int, tier: Tiers, group: Group, spare_tick: int) -> Iterator[tuple[Entry, Leave]]:
        """Copies that are not of the asking batch itself, and whether each may leave. (On SSD none that is there to empty an
        extent of DRAM: one of them would take another's place, and so on.)"""
        for block in self.shelves.coldest(rank, tier, group):
            if self._used_in(block, tier) != spare_tick:
                if tier is DRAM:
                    yield block, self._may_leave_dram(block, spare_tick)
                elif block.ssd_copy is not None and (block.dram is None or not self._dram_room.is_emptying(block)):
                    yield block.ssd_copy, self._may_leave_ssd(block.ssd_copy, spare_tick)

    def _yield_others(
        self, tier: Tiers, room: Room, group: Group, need: int, spare_tick: int, limit: Any
    ) -> tuple[int, list[Entry]]:
        """Kept blocks of other classes, for whole extents: the policy is offered some of the lowest rank."""
        policy = self._dram_policy if tier is DRAM else self._ssd_policy
        assert policy is not None
        others = [other for other in policy.groups() if other is not group]
        for rank in self.shelves.ranks(low=False) if others else ():
            offered = 0
            for other in others:
                for block in self.shelves.coldest(rank, tier, other):
                    entry: Entry | None = block if tier is DRAM else block.ssd_copy
                    if entry is not None and offered < YIELD_MAX:
                        policy.unpark(entry)
                        offered += 1
            if offered:
                self._yield_rank = rank
                try:
                    evicted, dirty = room.make(group, need, now=self._tick, spare_tick=spare_tick, limit=limit)
                finally:
                    self._yield_rank = PRIORITY_DEFAULT
                if evicted or dirty:
                    return evicted, dirty
        return 0, []

    # --- quotas ---------------------------------------------------------------------------------------------------------

    def set_share(self, uid: NamespaceUid, share: Share | None) -> None:
        """What the namespace may take here from now on; None: no bound. What is over it goes by and by."""
        space = self.spaces.get(uid)
        if space is not None:
            space.share = share

    def used_bytes_of(self, uid: NamespaceUid) -> tuple[int, int]:
        """Bytes of its slots in (DRAM, SSD)."""
        return self.dram.arena_bytes_used(uid), 0 if self.ssd is None else self.ssd.arena_bytes_used(uid)

    def _within_quota(self, space: Space, group: Group, n: int, *, size: int, tick: int) -> tuple[int, list[Entry]]:
        """How many of n DRAM slots the quota allows, once the namespace's own coldest went; what of these must be written down
        first for more."""
        self.over_quota = False
        share = space.share
        if share is None:
            return n, []
        slot_bytes = self.dram.slot_bytes(space.uid, size)
        dirty: list[Entry] = []
        while True:
            left = max(0, (share.dram - self.dram.arena_bytes_used(space.uid)) // slot_bytes)
            if left >= n:
                return n, []
            evicted, unclean = self._evict_own_of(space, DRAM, group, n - left, tick)
            dirty += unclean
            if not evicted:
                self.over_quota = True
                return left, dirty

    def _ssd_within_quota(self, space: Space, group: Group, *, size: int, spare_tick: int, limit: Any) -> bool:
        """Whether one SSD slot more is within the quota, once the namespace's own coldest went."""
        share = space.share
        if share is None or self.ssd is None:
            return True
        slot_bytes = self.ssd.slot_bytes(space.uid, size)
        if slot_bytes > share.ssd:
            return False
        while self.ssd.arena_bytes_used(space.uid) + slot_bytes > share.ssd:
            if not self._evict_own_of(space, SSD, group, 1, spare_tick, limit)[0]:
                return False
        return True

    def _evict_own_of(
        self, space: Space, tier: Tiers, group: Group, need: int, spare_tick: int, limit: Any = NO_LIMIT
    ) -> tuple[int, list[Entry]]:
        """Evicts blocks of one namespace: of this class, else of its others; kept ones last."""
        policy, room = (self._dram_policy, self._dram_room) if tier is DRAM else (self._ssd_policy, self._ssd_room)
        assert policy is not None and room is not None
        groups = [group, *(other for other in policy.groups() if other.key[0] == space.uid and other is not group)]
        dirty: list[Entry] = []
        for low in (True, None, False):
            if low is not None and not self.shelves:
                continue
            for one in groups:
                if low is None:
                    evicted, unclean, _ = room._evict_own(one, need, spare_tick, limit)
                else:
                    evicted, unclean = self._give_up(tier, one, need, spare_tick, low=low)
                dirty += unclean
                if evicted or dirty:
                    return evicted, dirty
        return 0, dirty

    def _trim(self, space: Space, share: Share) -> None:
        """A namespace that is over its part (which became smaller) loses its coldest."""
        for tier, slots, most in ((DRAM, self.dram, share.dram), (SSD, self.ssd, share.ssd)):
            policy = self._dram_policy if tier is DRAM else self._ssd_policy
            if slots is None or policy is None:
                continue
            n = 0
            while slots.arena_bytes_used(space.uid) > most and n < TRIM_BLOCKS_MAX:
                mine = [group for group in policy.groups() if group.key[0] == space.uid]
                if not mine:
                    break
                evicted, dirty = self._evict_own_of(space, tier, mine[0], 1, 0)
                for entry in dirty:
                    self._hurry(entry)
                if not evicted:
                    break
                n += evicted
                self.counters["quota_evicted"] += evicted

    def _hurry(self, entry: Entry) -> None:
        """To be written down soon: it is to leave DRAM."""
        block: Block = entry  # type: ignore[assignment]
        if block.dirty and not block.demoting:
            self._urgent[block] = None

    def keep_gauges(self) -> dict[str, int]:
        """Present values, for `gauges`."""
        return {"pins": self._n_pins, "pinned_dram_bytes": self.pinned_bytes[DRAM], "pinned_ssd_bytes": self.pinned_bytes[SSD],
                "pins_refused": len(self._refused), "kept_blocks": len(self.shelves),
                "expired_held": len(self._expired_held)}  # fmt: skip

    def check_keeping(self) -> None:
        """Asserts what is kept here (tests)."""
        live = [block for space in self.spaces.values() for block in space.blocks.values()]
        for tier in (DRAM, SSD):
            hard = [b for b in live if b.keep is not None and b.keep.hard_in is tier]
            assert self.pinned_bytes[tier] == sum(b.size for b in hard), "bytes of hard pins"
            assert all((b.dram if tier is DRAM else b.ssd) is not None for b in hard), "a hard pin on a copy that is not there"
        for space in self.spaces.values():
            for key, level, _ in space.pins.items():
                block = space.blocks.get(key)
                assert block is None or (block.keep is not None and block.keep.level is level), "a pin that was not applied"
        assert self._n_pins == sum(len(space.pins) for space in self.spaces.values())
        n_ranked = sum(block.keep is not None and block.keep.rank != PRIORITY_DEFAULT for block in live)
        assert len(self.shelves) == n_ranked, "shelves and blocks differ"
        assert all(b.live for b in [*self._refused, *self._expired_held])


