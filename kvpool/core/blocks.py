"""The worker's table of blocks: what is there, reserved, gone. One a worker, under the node's one lock.

Owns: namespaces, keys, reservations, pins, removal, the inventory. Does not own: holds and recency (`holding`), copies in
tiers and their eviction (`copies`, `movement`: the base classes), slots (`slots`), the order of eviction (`policy`), reports
to the master (`session.Reporter`), bytes and I/O (`worker.tiers`, `worker.mover`).

Every call is O(keys named), whatever the table has. Nothing here waits: where room may come later the answer says `must_wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from kvpool.core.block import (
    DRAM,
    SSD,
    Action,
    Block,
    Bump,
    GenerationOf,
    Held,
    Limits,
    Pinned,
    Report,
    Reserved,
    Space,
    SsdErase,
    SsdExtentCreated,
    SsdExtentDropped,
)
from kvpool.core.hashing import block_sum
from kvpool.core.holding import Holding
from kvpool.core.keys import KeyBatch, split_keys
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.policy.eviction import NO_LIMIT, Entry, EvictionPolicy, Group, Lru
from kvpool.core.quota import shares
from kvpool.core.room import Leave
from kvpool.core.slots import CloseArena, PopulateExtent, PunchExtent, SlabAllocator, Slot
from kvpool.core.types import HASH_BYTES, BlockCode, Key, MissCause, NamespaceUid, WorkerId

__all__ = [
    "Action", "Block", "BlockTable", "CloseArena", "Held", "Limits", "Pinned", "PopulateExtent", "PunchExtent", "Reserved",
    "Slot", "SsdErase", "SsdExtentCreated", "SsdExtentDropped",
]  # fmt: skip

SNAPSHOT_KEYS: Final = 8192  # a part of an inventory

RESERVED, ALREADY, FULL = int(BlockCode.RESERVED), int(BlockCode.ALREADY), int(BlockCode.FULL)
REJECTED, STORED = int(BlockCode.REJECTED), int(BlockCode.STORED)


class BlockTable(Holding):
    """Not thread-safe: every call under the node's lock. Pure: I/O comes out of `drain_actions`.

    dram, ssd: the tiers' allocators (ssd None: no such tier). policy: makes one eviction policy a tier. reporter(uid, key,
    tiers now, cause when gone, size): called for every visible change, in order. bump(arena, gen_index): the slot was freed,
    its generation word must grow before this returns (no I/O). generation(arena, gen_index): that word.
    """

    def __init__(
        self, *, dram: SlabAllocator, ssd: SlabAllocator | None = None, policy: Callable[[], EvictionPolicy] = Lru,
        reporter: Report | None = None, limits: Limits | None = None, bump: Bump | None = None,
        generation: GenerationOf | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            dram=dram, ssd=ssd, policy=policy, reporter=reporter or _report_nothing, limits=limits or Limits(),
            bump=bump or _bump_nothing, generation=generation or _no_generation,
        )  # fmt: skip

    # --- namespaces -----------------------------------------------------------------------------------------------------

    def open_namespace(self, spec: NamespaceSpec) -> None:
        """From now on blocks of this namespace are taken. Again: only its name and quota may differ (a layout never
        changes)."""
        space = self.spaces.get(spec.uid)
        if space is not None:
            space.spec = spec
            return
        if spec.uid in self._closing:
            raise ValueError(f"namespace {spec.uid.hex()} was closed and is opened again: uids are made once")
        self.dram.open_arena(spec.uid, largest_bytes=spec.block_bytes)
        if self.ssd is not None:
            self.ssd.open_arena(spec.uid, largest_bytes=spec.block_bytes)
        group = self._dram_policy.group((spec.uid, self.dram.slot_bytes(spec.uid, spec.block_bytes)))
        self.spaces[spec.uid] = space = Space(spec, self.dram, self._generation, group)
        if spec.quota_bytes:  # until the master tells this worker's part, all of it is the bound
            mine = WorkerId("")
            sizes = {mine: (self.dram.capacity_bytes, 0 if self.ssd is None else self.ssd.capacity_bytes)}
            unit, largest = 1 if spec.variable else spec.block_bytes, spec.block_bytes
            space.share = shares(spec.quota_bytes, unit=unit, largest=largest, capacities=sizes)[mine]

    def close_namespace(self, uid: NamespaceUid) -> int:
        """Deleted: its blocks are gone at once. -> how many. `CloseArena` comes when the last pin or hold on them goes; a uid
        is not opened again after that."""
        space = self.spaces.get(uid)
        if space is None:
            return 0
        n = self.remove_all(uid)
        self.drop_pins(uid)
        del self.spaces[uid]
        self._closing[uid] = space
        self.dram.close_arena(uid)
        if self.ssd is not None:
            self.ssd.close_arena(uid)
        self._finish_closing(space)
        return n

    def namespaces(self) -> list[NamespaceSpec]:
        return [space.spec for space in self.spaces.values()]

    def spec(self, uid: NamespaceUid) -> NamespaceSpec | None:
        space = self.spaces.get(uid)
        return space.spec if space is not None else None

    def set_blocked(self, uid: NamespaceUid, blocked: bool) -> None:
        """While blocked nothing is served or taken (removals are being caught up): the same as an unknown namespace."""
        self.spaces[uid].blocked = blocked

    def blocked(self, uid: NamespaceUid) -> bool:
        space = self.spaces.get(uid)
        return space is not None and space.blocked

    # --- put ------------------------------------------------------------------------------------------------------------

    def reserve(self, batch: KeyBatch, sizes: Sequence[int], *, now_ms: int, hints: Sequence[int] = (), use: int = 0) -> Reserved:
        """Slots for the blocks of a put, [n] each; blocks become visible by `commit`. Evicts others for it, never blocks of its
        own chain that are above, nor pinned or held ones. Where there is too little room the head is stored, the tail is FULL.

        ALREADY: live here, or the second of two equal keys in this batch. Two puts of one key at a time both get RESERVED.
        REJECTED: a size that the namespace does not have. `hints` [n] or empty: `retention.pack_hint` of each. use: of the
        attempt that had to wait; this one is no use of its own, and what the SSD tier refused meanwhile stays refused. Raises
        NamespaceNotFound (also while the namespace is blocked), ValueError when sizes are not n."""
        space = self._serving(batch.namespace)
        self._dram_policy.at(now_ms)
        keys = split_keys(batch.keys)
        n = len(keys)
        self._put_again(space, keys, hints, now_ms)
        if len(sizes) != n:
            raise ValueError(f"{len(sizes)} sizes for {n} keys")
        if isinstance(sizes, np.ndarray):
            sizes = sizes.tolist()
        live = space.blocks
        tick = use or self._tick_for(space, batch, again=[live.get(key) for key in keys])
        codes = bytearray([FULL]) * n
        blocks: list[Block | None] = [None] * n
        there: list[Block | None] = [None] * n
        fresh: list[Block] = []
        repeats: list[tuple[int, int]] = []
        first_at: dict[Key, int] = {}
        spec, depth = space.spec, batch.depth
        block_bytes, variable, chained, above = spec.block_bytes, spec.variable, batch.chained, batch.parent
        exact = space.exact_group
        for i, key in enumerate(keys):
            size = sizes[i]
            block = live.get(key)
            if block is not None:
                there[i] = block
                codes[i] = ALREADY
            elif size != block_bytes and not (variable and 0 < size < block_bytes):
                codes[i] = REJECTED
            elif first_at.setdefault(key, i) != i:
                repeats.append((i, first_at[key]))
            else:
                group = exact if size == block_bytes else self._dram_group(space, size)
                if chained:
                    parent = keys[i - 1][:HASH_BYTES] if i else above
                    fresh.append(Block(space, key, size, group, depth + i, parent, depth + i, tick))
                else:
                    fresh.append(Block(space, key, size, group, depth, above, depth + i, tick))
        if hints or spec.ttl_ms:
            for block in fresh:
                block.keep = self._keep_of(space, hints[block.rank - depth] if hints else 0, now_ms)
        if len(fresh) < n:
            self._touch(there, tick, depth, again=use > 0)
        must_wait = self._place_fresh(space, fresh, there, codes, tick=tick, depth=depth, chained=chained) if fresh else False
        for block in fresh:
            if block.dram is not None:
                i = block.rank - depth
                blocks[i] = block
                codes[i] = RESERVED
        for i, first in repeats:
            codes[i] = ALREADY if codes[first] == RESERVED else codes[first]
        counters = self.counters
        counters["already"] += codes.count(ALREADY)
        counters["full"] += codes.count(FULL)
        counters["rejected"] += codes.count(REJECTED)
        over_quota = bool(fresh) and self.over_quota
        counters["quota_full"] += codes.count(FULL) if over_quota else 0
        return Reserved(codes, blocks, must_wait, over_quota, tick)

    def _place_fresh(
        self,
        space: Space,
        fresh: list[Block],
        there: list[Block | None],
        codes: bytearray,
        *,
        tick: int,
        depth: int,
        chained: bool,
    ) -> bool:
        """Gives slots to new blocks, in order, runs of one size at a time. -> must_wait."""
        waiting: list[Entry] = []
        short = over_quota = self.over_quota = False
        start = 0
        while start < len(fresh) and not (short and chained):
            group = fresh[start].group
            end = start + 1
            while end < len(fresh) and fresh[end].group is group:
                end += 1
            run = fresh[start:end]
            slots = self._run_slots(run, group, tick, waiting, chained=chained)
            over_quota = over_quota or self.over_quota
            for block, slot in zip(run, slots, strict=False):
                block.dram = slot
            space.reserved.update(run[: len(slots)])
            if len(slots) < len(run):
                short = not self._take_own_tail(space, run[len(slots) :], there, codes, depth)
            start = end
        self.over_quota = over_quota
        if short and self.ssd is not None:
            for block in self._soon:
                block.spare_tick = tick
            self._write_first(waiting, tick)
        must_wait = short and (bool(waiting) or bool(self._soon) or self.n_demoting > 0)
        self._waits(tick, must_wait)
        if short and chained and not must_wait:
            unworthy = [block for block in fresh if block.dram is None]
            self._dram_policy.refused(unworthy, tick)
            learned = not self._dram_policy.by_recency
            if learned and not over_quota and self._dram_room.could_make(
                fresh[0].group, now=self._tick, spare_tick=tick, limit=NO_LIMIT
            ):
                self.counters["refused"] += len(unworthy)
        return must_wait

    def _run_slots(
        self, run: list[Block], group: Group, tick: int, waiting: list[Entry], *, chained: bool
    ) -> list[Slot]:
        """Up to one slot for each, in order, as far as what must leave for them is worth less than they are; whatever it is worth
        where they are no chain's, or somebody said that they matter."""
        is_room = self.dram.capacity_bytes - self.dram.used_bytes >= len(run) * run[0].size
        if is_room or not chained or any(map(self._matters, run)):
            parts: Sequence[tuple[int, float]] = ((len(run), NO_LIMIT),)
        else:
            parts = self._dram_policy.limits(run, tick)
        slots: list[Slot] = []
        for n, limit in parts:
            part = run[len(slots) : len(slots) + n]
            more, dirty = self._dram_slots(part, group, tick=tick, limit=limit)
            waiting += dirty
            slots += more
            if len(more) < n:
                break
        return slots

    def _take_own_tail(self, space: Space, run: list[Block], there: list[Block | None], codes: bytearray, depth: int) -> bool:
        """The rest of a run gets the slots of deeper blocks of the same batch: a head without its tail is worth something, a
        tail without its head is not. -> whether all of the run got one."""
        deepest = len(there) - 1
        for block in run:
            while deepest > block.rank - depth:
                old, deepest = there[deepest], deepest - 1
                if old is None or old.group is not block.group or old.dram is None:
                    continue
                if self._may_leave_dram(old, old.tick) is not Leave.YES:
                    continue
                codes[deepest + 1] = FULL if old.ssd is None else ALREADY
                self._evict_dram(old)
                slots = self.dram.allocate(space.uid, block.size, 1, owners=[block])
                if slots:
                    block.dram = slots[0]
                    space.reserved.add(block)
                    break
            if block.dram is None:
                return False
        return True

    def commit(self, blocks: Sequence[Block | None], sums: Sequence[bytes], *, now_ms: int) -> bytes:
        """The bytes of reserved blocks are in their slots: visible from here. `sums[i]`: packed u64 chunk sums of block i. ->
        BlockCode [n]: STORED, ALREADY (another put of the key was first; the slot is free again), FULL (the key was removed
        meanwhile, or None given)."""
        self._dram_policy.at(now_ms)
        totals = [block_sum(packed) if block is not None else 0 for block, packed in zip(blocks, sums, strict=True)]
        codes = bytearray([FULL]) * len(blocks)
        ordered: dict[int, list[Block]] = {}
        report, with_ssd = self._report, self.ssd is not None
        for i, block in enumerate(blocks):
            if block is None:
                continue
            space = block.space
            space.reserved.remove(block)
            key = block.key
            if block.gone is not None:
                self._free_reserved(block)
                continue
            if key in space.blocks:
                codes[i] = ALREADY
                block.gone = MissCause.UNKNOWN
                self._free_reserved(block)
                continue
            space.blocks[key] = block
            if space.causes:
                space.causes.pop(key, None)
            block.live = True
            block.sums = sums[i]
            block.sum = totals[i]
            codes[i] = STORED
            tick = block.tick
            if tick in ordered:
                ordered[tick].append(block)
            else:
                ordered[tick] = [block]
            if block.keep is not None or space.pins:
                self._arrived(block)
            report(space.uid, key, 1, None, block.size)
        for tick, group in ordered.items():
            if tick != self._tick and not self._is_recent(tick, group[0].group):  # a put that took long
                self._tick += 1
                tick = self._tick
            self._dram_policy.add(group, tick, [block.rank for block in group])
            if with_ssd:
                for block in reversed(group):
                    self._make_dirty(block)
        self.counters["stored"] += codes.count(STORED)
        self.stored_bytes += sum(block.size for group in ordered.values() for block in group)
        return bytes(codes)

    def abort(self, blocks: Iterable[Block | None]) -> None:
        """Reserved blocks that will not be committed (None and committed ones are skipped)."""
        for block in blocks:
            if block is not None and block in block.space.reserved:
                block.space.reserved.remove(block)
                block.gone = block.gone or MissCause.UNKNOWN
                self._free_reserved(block)
                self.counters["aborted"] += 1

    def _free_reserved(self, block: Block) -> None:
        assert block.dram is not None and not block.pins
        slot, block.dram = block.dram, None
        self._free_dram(slot)

    # --- get ------------------------------------------------------------------------------------------------------------

    def pin(self, batch: KeyBatch, *, now_ms: int, hold_id: int = 0, touch: bool = True, first_miss: bool = True) -> Pinned:
        """Pins the blocks that are here for a transfer: none of their copies is freed before `unpin`. first_miss: stop at the
        first that is not here. hold_id: the reader's hold; when that has ended a miss is `expired`. touch: this is a use."""
        space = self._serving(batch.namespace)
        self._dram_policy.at(now_ms)
        keys = split_keys(batch.keys)
        n = len(keys)
        blocks: list[Block | None] = [None] * n
        causes: list[MissCause | None] = [None] * n
        over = self._expire_named(space, keys, now_ms)
        if over and self._holds.alive(hold_id):
            over.clear()  # (this is the reader that the hold is for)
        get = space.blocks.get
        n_dram = n_ssd = 0
        for i, key in enumerate(keys):
            block = get(key) if key not in over else None
            if block is None:
                causes[i] = self._miss(space, key, hold_id) if key not in over else MissCause.EXPIRED
                if first_miss:
                    break
                continue
            block.pins += 1
            blocks[i] = block
            if block.dram is not None:
                n_dram += 1
            else:
                n_ssd += 1
        if touch and n_dram + n_ssd:
            again = blocks if hold_id else ()  # (the hold was the use)
            self._touch(blocks, self._tick_for(space, batch, again=again), batch.depth)
            self.counters["hits_dram"] += n_dram
            self.counters["hits_ssd"] += n_ssd
        return Pinned(blocks, causes)

    def place(self, block: Block) -> tuple[int, int, int]:
        """Of a pinned or held block in DRAM: (offset in its arena, index of its generation word, that word now)."""
        assert block.dram is not None
        arena, offset, gen_index = self.dram.place(block.dram)
        return offset, gen_index, self._generation(arena, gen_index)

    def tiers_of(self, batch: KeyBatch, *, now_ms: int, touch: bool, hints: Sequence[int] = ()) -> bytes:
        """Tiers [n] that each key is in here, 0: not here. touch: this is a use. `hints` [n]: of a put that only asks whether
        the blocks are here, as of `reserve`."""
        space = self._serving(batch.namespace)
        self._dram_policy.at(now_ms)
        get = space.blocks.get
        keys = split_keys(batch.keys)
        if hints:
            self._put_again(space, keys, hints, now_ms)
        over = self._expire_named(space, keys, now_ms)
        found = [get(key) if key not in over else None for key in keys]
        if touch and any(found):
            self._touch(found, self._tick_for(space, batch, again=found), batch.depth)
        return bytes(block.tiers if block is not None else 0 for block in found)

    # --- removal --------------------------------------------------------------------------------------------------------

    def remove(self, batch: KeyBatch | tuple[NamespaceUid, bytes], *, cause: MissCause = MissCause.REMOVED) -> bytes:
        """Invisible at once, puts under way of these keys too (their commit says FULL); slots are freed by the last user. Works
        on blocked namespaces. u8 [n]: 1 where the key was here. Confirm to others only when no record of it is on disk: after
        `drain_actions` and its work, and with `with_records` erased."""
        uid, packed = (batch.namespace, batch.keys) if isinstance(batch, KeyBatch) else batch
        space = self.spaces.get(uid)
        keys = split_keys(packed)
        had = bytearray(len(keys))
        if space is None:
            return bytes(had)
        for i, key in enumerate(keys):
            block = space.blocks.get(key)
            if block is not None:
                had[i] = 1
                self._drop_live(block, cause)
            elif key in space.causes:
                space.causes[key] = (cause, space.causes[key][1])
        if space.reserved:
            named = set(keys)
            for block in space.reserved:
                if block.key in named:
                    block.gone = cause
        self.counters["removed"] += had.count(1)
        return bytes(had)

    def remove_all(self, uid: NamespaceUid) -> int:
        """Every block of the namespace, and the puts under way. -> how many blocks were here. O(blocks), some 5 us each: where
        the lock must not be held that long, block the namespace and `remove` its keys in parts first."""
        space = self.spaces.get(uid)
        if space is None:
            return 0
        blocks = list(space.blocks.values())
        for block in blocks:
            self._drop_live(block, MissCause.REMOVED)
        for block in space.reserved:
            block.gone = MissCause.REMOVED
        self.counters["removed"] += len(blocks)
        return len(blocks)

    def with_records(self, uid: NamespaceUid, keys: bytes | None = None) -> list[Block]:
        """Blocks of these packed keys (None: all), live or gone, that have a record on disk (`ssd_slots`) or get one soon
        (`demoting`). What must be erased before a removal of them may be confirmed. Ask before removing; pin them meanwhile."""
        space = self.spaces.get(uid)
        if space is None:
            return []
        if keys is None:
            found = [*space.blocks.values(), *space.lingering]
        else:
            named = split_keys(keys)
            found = [block for key in named if (block := space.blocks.get(key)) is not None]
            if space.lingering:
                wanted = set(named)
                found += [block for block in space.lingering if block.key in wanted]
        return [block for block in found if block.demoting or block.ssd_slots]

    # --- what there is --------------------------------------------------------------------------------------------------

    def snapshot(self) -> Iterator[tuple[NamespaceUid, bytes, bytes, bytes]]:
        """The inventory: (uid, packed keys, tiers u8 [n], sizes u32 little-endian [n]) in parts. Calling it takes the list of
        blocks (under the lock); the parts may be made later, they show each block as it is by then (changes were reported)."""
        lists = [(uid, list(space.blocks.values())) for uid, space in self.spaces.items()]
        return _parts(lists)

    def gauges(self) -> dict[str, int]:
        """Present values, beside `counters`."""
        return {
            "held_dram_bytes": self.held_bytes[DRAM], "held_ssd_bytes": self.held_bytes[SSD], "holds": len(self._holds),
            "quarantined_bytes": self._holds.overdue_bytes, "dirty_bytes": self.dirty_bytes, "demoting": self.n_demoting,
            "gone_keys": len(self._gone), **self.keep_gauges(),
            "reserved": sum(len(space.reserved) for space in [*self.spaces.values(), *self._closing.values()]),
        }  # fmt: skip

    def misses(self) -> dict[NamespaceUid, dict[MissCause, int]]:
        """Misses since the start by namespace and cause."""
        found: dict[NamespaceUid, dict[MissCause, int]] = {}
        for uid, _, cause, n in self.misses_by_tier():
            of_space = found.setdefault(uid, {})
            of_space[cause] = of_space.get(cause, 0) + n
        return found

    def misses_by_tier(self) -> list[tuple[NamespaceUid, str, MissCause, int]]:
        """Misses since the start: (namespace, tier that had the last copy or "none", cause, count)."""
        return [
            (uid, "none" if tier is None else "dram" if tier is DRAM else "ssd", cause, n)
            for uid, space in self.spaces.items()
            for (cause, tier), n in space.misses.items()
        ]

    def check(self) -> None:
        """Asserts every invariant (tests). O(everything)."""
        from kvpool.core.check import check_copies  # (it is for tests alone)

        check_copies(self)
        self._holds.check()


def _report_nothing(uid: NamespaceUid, key: Key, tiers: int, cause: MissCause | None, size: int) -> None:
    del uid, key, tiers, cause, size


def _bump_nothing(arena: NamespaceUid, gen_index: int) -> None:
    del arena, gen_index


def _no_generation(arena: NamespaceUid, gen_index: int) -> int:
    del arena, gen_index
    return 0


def _parts(lists: list[tuple[NamespaceUid, list[Block]]]) -> Iterator[tuple[NamespaceUid, bytes, bytes, bytes]]:
    for uid, blocks in lists:
        for start in range(0, len(blocks), SNAPSHOT_KEYS):
            part = [(b.key, b.tiers, b.size) for b in blocks[start : start + SNAPSHOT_KEYS] if b.live]
            if part:
                sizes = np.array([size for _, _, size in part], dtype="<u4").tobytes()
                yield uid, b"".join(key for key, _, _ in part), bytes(tiers for _, tiers, _ in part), sizes
