"""Recency and holds of the worker's table: what is used, and what must stay readable.

Owns: ticks of batches, which copies holds keep, how much may be held. Does not own: holds by id and time (`holds`), copies
(`movement`, `copies`: the base classes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvpool.core.block import DRAM, SSD, Block, Bump, GenerationOf, Held, Limits, Report, Space
from kvpool.core.holds import Hold, Holds
from kvpool.core.keys import KeyBatch, split_keys
from kvpool.core.movement import Movement
from kvpool.core.policy.eviction import EvictionPolicy, Group
from kvpool.core.slots import SlabAllocator
from kvpool.core.types import HASH_BYTES, KEY_BYTES, BlockCode, HoldId, Key, MissCause, NamespaceUid, Tiers, miss_code
from kvpool.errors import NamespaceNotFound

ANCESTORS_MAX: Final = 4096  # refreshed when only a chain's deep end is used

FULL, LATER, HELD = int(BlockCode.FULL), int(BlockCode.LATER), int(BlockCode.HIT_SHARED)


class Holding(Movement):
    """Recency and holds, on top of `Movement`."""

    def __init__(
        self, *, dram: SlabAllocator, ssd: SlabAllocator | None, policy: Callable[[], EvictionPolicy], reporter: Report,
        limits: Limits, bump: Bump, generation: GenerationOf,
    ) -> None:  # fmt: skip
        super().__init__(dram=dram, ssd=ssd, policy=policy, reporter=reporter, limits=limits, bump=bump, generation=generation)
        self._holds = Holds(holds_max=limits.holds_max, seed=limits.seed)

    def _serving(self, uid: NamespaceUid) -> Space:
        space = self.spaces.get(uid)
        if space is None or space.blocked:
            why = "catching up with removals" if space else "not known"
            raise NamespaceNotFound(f"namespace {uid.hex()} is {why} on this worker")
        return space

    def _miss(self, space: Space, key: Key, hold_id: int = 0) -> MissCause:
        why = self._gone.why(space.causes, key)
        if hold_id and why[0] is MissCause.EVICTED and not self._holds.alive(hold_id):
            why = (MissCause.EXPIRED, why[1])
        space.misses[why] = space.misses.get(why, 0) + 1
        self.counters["misses"] += 1
        return why[0]

    # --- recency --------------------------------------------------------------------------------------------------------

    def _tick_for(self, space: Space, batch: KeyBatch, *, again: Sequence[Block | None] = ()) -> int:
        """The tick of a batch: a new one, or, for the continuation of a chain used just now, that one's: however a chain is cut
        into batches its order is depth. One of a chain not used lately refreshes what is above it (a prefix gets no hole).
        again: what is here of a batch that may only repeat a use under way, as the put that follows a get."""
        deepest = next((block for block in reversed(again) if block is not None), None)
        if deepest is not None and (tick := self._joined(deepest)):
            return tick
        above = None
        if batch.chained and batch.depth and batch.keys:
            above = space.blocks.get(batch.parent + batch.keys[HASH_BYTES:KEY_BYTES])
        if above is None:
            self._tick += 1
            return self._tick
        tick = self.used_at(above)
        if self._is_recent(tick, above.group):
            return tick
        self._tick += 1
        chain: list[Block | None] = [above]
        shard = above.key[HASH_BYTES:]
        while above.depth and len(chain) < ANCESTORS_MAX:
            parent = space.blocks.get(above.parent + shard)
            if parent is None or parent.depth >= above.depth:
                break
            chain.append(parent)
            above = parent
        chain.reverse()
        self._touch(chain, self._tick, above.depth)
        return self._tick

    def _joined(self, block: Block) -> int:
        if block.dram is not None and (tick := self._dram_policy.joins(block, self._tick)):
            return tick
        if block.ssd_copy is not None and self._ssd_policy is not None:
            return self._ssd_policy.joins(block.ssd_copy, self._tick)
        return 0

    def used_at(self, block: Block) -> int:
        """The tick of the last batch that used it: the greater the later; 0 for one that is in no tier."""
        tick = self._dram_policy.tick_of(block)
        if block.ssd_copy is not None and self._ssd_policy is not None:
            tick = max(tick, self._ssd_policy.tick_of(block.ssd_copy))
        return tick

    def _is_recent(self, tick: int, group: Group) -> bool:
        """Whether a batch that goes on where one of this tick ended is the same use."""
        return self._dram_policy.is_recent(tick, self._tick, group)

    def _touch(self, blocks: Sequence[Block | None], tick: int, rank: int, *, again: bool = False) -> None:
        """Blocks of one batch in chain order (None: a gap) were used; the first has this rank. again: by a put that waited: what
        was refused meanwhile is not tried again for it."""
        self._dram_policy.touch(blocks, tick, rank)
        if self._ssd_policy is not None:
            self._ssd_policy.touch([b.ssd_copy if b is not None else None for b in blocks], tick, rank)
            dirty = self._dirty
            for block in reversed(blocks):
                if block is not None and block.dirty:
                    if block in dirty:
                        dirty.move_to_end(block)
                    elif block.refused and not block.demoting and not again:  # it is worth another try
                        block.refused, block.n_asks = False, 0
                        dirty[block] = None

    # --- holds ----------------------------------------------------------------------------------------------------------

    def hold(self, batch: KeyBatch, *, ttl_ms: int, now_ms: int, owner: int, view: bool, first_miss: bool = True) -> Held:
        """Promises that these blocks stay readable for `ttl_ms` (at most the limit). view: the DRAM copies themselves stay in
        place until released, also past their time (quarantine), so a view needs an owner. owner: the connection whose end ends
        it, 0: none.

        A block in both tiers is held in DRAM, or on SSD where too much of DRAM is held. See `Held`."""
        space = self._serving(batch.namespace)
        self._dram_policy.at(now_ms)
        n = len(batch)
        keys = split_keys(batch.keys)
        over = self._expire_named(space, keys, now_ms)
        codes = bytearray([LATER]) * n
        found: list[Block | None] = [None] * n
        if self._holds.full():
            return Held(HoldId(0), 0, bytearray([FULL]) * n)
        protects: list[tuple[Block, Tiers]] = []
        count = -1
        for i, key in enumerate(keys):
            block = space.blocks.get(key) if key not in over else None
            if block is None:
                codes[i] = miss_code(self._miss(space, key) if key not in over else MissCause.EXPIRED)
            else:
                tier = self._protect(block, view=view)
                if tier is None:
                    codes[i] = FULL
                else:
                    codes[i] = HELD
                    found[i] = block
                    protects.append((block, tier))
                    continue
            count = i if count < 0 else count
            if first_miss:
                break
        if not protects:
            return Held(HoldId(0), 0, codes)
        self._touch(found, self._tick_for(space, batch), batch.depth)
        return Held(self._add_hold(protects, ttl_ms, now_ms, owner=owner, view=view), n if count < 0 else count, codes)

    def hold_blocks(self, blocks: Sequence[Block], *, ttl_ms: int, now_ms: int, owner: int) -> tuple[HoldId, int]:
        """Holds the DRAM copies of blocks that the caller has pinned (no use is counted). -> (hold id or 0, how many leading
        ones are held: it ends where too much is held, or at a block that is not in DRAM or was removed since)."""
        protects: list[tuple[Block, Tiers]] = []
        if not self._holds.full():
            for block in blocks:
                if not block.live or self._protect(block, view=True) is None:
                    break
                protects.append((block, DRAM))
        if not protects:
            return HoldId(0), 0
        return self._add_hold(protects, ttl_ms, now_ms, owner=owner, view=False), len(protects)

    def _add_hold(self, protects: list[tuple[Block, Tiers]], ttl_ms: int, now_ms: int, *, owner: int, view: bool) -> HoldId:
        assert owner or not view, "a view needs an owner"
        n_bytes = sum(block.size for block, _ in protects)
        deadline_ms = now_ms + min(max(0, ttl_ms), self.limits.hold_ttl_ms_max)
        self.counters["holds"] += 1
        return self._holds.add(protects, owner=owner, view=view, deadline_ms=deadline_ms, n_bytes=n_bytes).hold_id

    def _protect(self, block: Block, *, view: bool) -> Tiers | None:
        """Counts one hold on the copy that will stay; None: none may."""
        held, size = self.held_bytes, block.size
        if block.dram is not None:
            if block.held_dram:
                block.held_dram += 1
                return DRAM
            if held[DRAM] + size <= self.dram.capacity_bytes * self.limits.held_fraction:
                block.held_dram = 1
                held[DRAM] += size
                return DRAM
        if block.ssd is not None and not view and self.ssd is not None:
            if block.held_ssd:
                block.held_ssd += 1
                return SSD
            if held[SSD] + size <= self.ssd.capacity_bytes * self.limits.held_fraction:
                block.held_ssd = 1
                held[SSD] += size
                return SSD
        return None

    def _let_go(self, hold: Hold) -> None:
        for block, tier in hold.protects:
            if tier is DRAM:
                block.held_dram -= 1
                idle = not block.held_dram
            else:
                block.held_ssd -= 1
                idle = not block.held_ssd
            if idle:
                self.held_bytes[tier] -= block.size
                if block.on_idle:
                    self._settle(block)

    def renew(self, ids: Sequence[int], ttl_ms: int, now_ms: int) -> bytes:
        """u8 [n]: 1 where the hold lives (and ends at the earliest in `ttl_ms` now), 0 where it is gone."""
        deadline_ms = now_ms + min(max(0, ttl_ms), self.limits.hold_ttl_ms_max)
        return bytes(self._holds.renew(i, deadline_ms=deadline_ms) for i in ids)

    def release(self, ids: Iterable[int]) -> None:
        """Ends holds; unknown ones are skipped."""
        for hold_id in ids:
            hold = self._holds.drop(hold_id)
            if hold is not None:
                self._let_go(hold)

    def release_owner(self, owner: int) -> None:
        """The connection is closed: its holds end, overdue views too."""
        self.release(self._holds.of_owner(owner))

    def expire(self, now_ms: int) -> list[int]:
        """Ends the holds whose time is up. Overdue views stay (their readers may still look) within the quarantine's cap. ->
        owners past it: their connections must be dropped, then `release_owner`. Call some times a second."""
        self._look_after(now_ms)
        for hold in self._holds.due(now_ms):
            self.counters["holds_expired"] += 1
            self.release([hold.hold_id])
        return self._holds.too_long_overdue(int(self.dram.capacity_bytes * self.limits.quarantine_fraction))

    @property
    def n_holds(self) -> int:
        return len(self._holds)
