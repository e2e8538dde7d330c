"""The worker's table against a small model: what was committed and not removed may be found, with its own bytes; nothing else.

The fake memory of the rig makes reuse of a slot in use visible: every pin compares the bytes. After every step `check` asserts
all invariants of the table, and that the reports add up to exactly what is there."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.core.block import Block, Limits, Reserved
from kvpool.core.keys import KeyBatch
from kvpool.core.slots import Slot
from kvpool.core.types import BlockCode, Key, MissCause, NamespaceUid, Tiers
from tests.support.tables import BLOCK, SUMS, Rig, chain, spec_of, uid_of

SIZES = {1: BLOCK, 2: 20_000}  # block bytes of namespaces 1 and 2
batches = st.builds(
    lambda ns, name, start, n: chain(name, start + n, start, ns=ns),
    st.sampled_from([1, 2]), st.sampled_from("abcdef"), st.integers(0, 6), st.integers(1, 12),
)  # fmt: skip


class BlocksMachine(RuleBasedStateMachine):
    """With the textbook's policy; the learned one below.

    Model: `stored`, keys whose commit said STORED (or ALREADY) and that were not removed since. A hit must be of these."""

    policy = "lru"

    @initialize(n_dram=st.integers(0, 40), n_ssd=st.none() | st.integers(0, 60), gone=st.integers(0, 20), low=st.floats(0, 1))
    def start(self, n_dram: int, n_ssd: int | None, gone: int, low: float) -> None:
        limits = Limits(gone_keys_max=gone, low_watermark=low, quarantine_fraction=0.1, hold_ttl_ms_max=500, holds_max=12)
        specs = [spec_of(i, size) for i, size in SIZES.items()]
        self.rig = Rig(n_dram, n_ssd, limits=limits, specs=specs, policy=self.policy)
        self.table = self.rig.table
        self.stored: set[tuple[NamespaceUid, Key]] = set()
        self.removed: set[tuple[NamespaceUid, Key]] = set()
        self.reservations: list[tuple[KeyBatch, Reserved]] = []
        self.pins: list[list[Block]] = []
        self.holds: dict[int, list[tuple[Block, Key]]] = {}
        self.views: dict[int, int] = {}
        self.demotions: list[tuple[Block, Slot | None]] = []
        self.promotions: list[tuple[Block, Slot]] = []

    # --- puts

    @rule(batch=batches, short=st.integers(0, 3))
    def reserve(self, batch: KeyBatch, short: int) -> None:
        full = SIZES[batch.namespace[0]]
        reserved = self.rig.reserve(batch, [full if i % 4 else full - 100 * short for i in range(len(batch))])
        for code, block, key in zip(reserved.codes, reserved.blocks, batch.split(), strict=True):
            assert (code == BlockCode.RESERVED) == (block is not None)
            assert code != BlockCode.ALREADY or (batch.namespace, key) in self.stored
            assert code in (BlockCode.RESERVED, BlockCode.ALREADY, BlockCode.FULL)
        assert not reserved.must_wait or (BlockCode.FULL in reserved.codes and self.table.ssd is not None)
        self.reservations.append((batch, reserved))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), part=st.booleans())
    def commit(self, data: st.DataObject, part: bool) -> None:
        batch, reserved = self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1)))
        self.rig.fill(reserved)
        blocks = [block for block in reserved.blocks if block is not None]
        if part:
            self.table.abort(blocks[len(blocks) // 2 :])
            blocks = blocks[: len(blocks) // 2]
        codes = self.table.commit(blocks, [SUMS] * len(blocks), now_ms=self.rig.now)
        for block, code in zip(blocks, codes, strict=True):
            if code == BlockCode.STORED:
                self.stored.add((batch.namespace, block.key))
                self.removed.discard((batch.namespace, block.key))
            elif code == BlockCode.ALREADY:
                assert (batch.namespace, block.key) in self.stored

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        _, reserved = self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1)))
        self.table.abort(reserved.blocks)

    # --- gets

    @rule(batch=batches, first_miss=st.booleans(), touch=st.booleans())
    def pin(self, batch: KeyBatch, first_miss: bool, touch: bool) -> None:
        pinned = self.table.pin(batch, now_ms=self.rig.now, first_miss=first_miss, touch=touch)
        for key, block, cause in zip(batch.split(), pinned.blocks, pinned.causes, strict=True):
            assert block is None or cause is None
            if block is not None:
                assert block.key == key and (batch.namespace, key) in self.stored
                assert self.rig.bytes_of(block) == key
            elif cause is not None and (batch.namespace, key) in self.removed:
                assert cause in (MissCause.REMOVED, MissCause.UNKNOWN)
        self.pins.append([block for block in pinned.blocks if block is not None])

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.table.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    # --- holds

    @rule(batch=batches, ttl=st.integers(0, 300), view=st.booleans(), owner=st.integers(0, 2))
    def hold(self, batch: KeyBatch, ttl: int, view: bool, owner: int) -> None:
        owner = owner or (1 if view else 0)
        held = self.rig.hold(batch, ttl_ms=ttl, view=view, owner=owner)
        blocks = self.table.spaces[batch.namespace].blocks
        named = [blocks[key] for key, code in zip(batch.split(), held.codes, strict=True) if code == BlockCode.HIT_SHARED]
        assert held.count == len(named) and bool(held.hold_id) == bool(named)
        if named:
            self.holds[held.hold_id] = [(block, block.key) for block in named]
        if named and view:
            self.views[held.hold_id] = owner

    @rule(ms=st.integers(1, 400))
    def time_passes(self, ms: int) -> None:
        self.rig.now += ms
        for owner in self.table.expire(self.rig.now):
            self.table.release_owner(owner)
        self.forget_ended()
        assert self.table.gauges()["quarantined_bytes"] <= self.table.dram.capacity_bytes * 0.1

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), renew=st.booleans())
    def renew_or_release(self, data: st.DataObject, renew: bool) -> None:
        hold_id = data.draw(st.sampled_from(sorted(self.holds)))
        if renew:
            assert self.table.renew([hold_id], 200, self.rig.now) == b"\x01"
        else:
            self.table.release([hold_id])
        self.forget_ended()

    def forget_ended(self) -> None:
        self.holds = {i: blocks for i, blocks in self.holds.items() if self.table._holds.alive(i)}

    # --- removal

    @rule(batch=batches)
    def remove(self, batch: KeyBatch) -> None:
        here = self.table.spaces[batch.namespace].blocks
        expected = bytes(key in here for key in batch.split())
        assert self.table.remove(batch) == expected
        for key, had in zip(batch.split(), expected, strict=True):
            self.stored.discard((batch.namespace, key))
            if had:
                self.removed.add((batch.namespace, key))

    @rule(ns=st.sampled_from([1, 2]))
    def remove_all(self, ns: int) -> None:
        here = {(uid_of(ns), key) for key in self.table.spaces[uid_of(ns)].blocks}
        assert self.table.remove_all(uid_of(ns)) == len(here)
        self.removed |= here
        self.stored = {name for name in self.stored if name[0] != uid_of(ns)}

    # --- mover

    @rule(n_bytes=st.integers(1, 100_000))
    def demote(self, n_bytes: int) -> None:
        blocks = self.table.clean_candidates(n_bytes, now_ms=self.rig.now)
        assert sum(block.size for block in blocks[1:]) <= n_bytes
        self.demotions += [(block, self.table.ssd_reserve(block)) for block in blocks]

    @precondition(lambda self: self.demotions)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def demote_done(self, data: st.DataObject, ok: bool) -> None:
        block, slot = self.demotions.pop(data.draw(st.integers(0, len(self.demotions) - 1)))
        self.rig.apply()
        if slot is not None:
            assert slot not in self.rig.disk, "not erased before it is written"
            self.rig.disk[slot] = block.key
        self.table.ssd_done(block, slot, ok=ok and slot is not None)

    @rule(batch=batches)
    def promote(self, batch: KeyBatch) -> None:
        pinned = self.rig.pin(batch, first_miss=False)
        for block in pinned.blocks:
            slot = self.table.promote_reserve(block) if block is not None else None
            if block is not None and slot is not None:
                self.promotions.append((block, slot))
        self.table.unpin(pinned.blocks)

    @precondition(lambda self: self.promotions)
    @rule(data=st.data(), ok=st.booleans())
    def promote_done(self, data: st.DataObject, ok: bool) -> None:
        block, slot = self.promotions.pop(data.draw(st.integers(0, len(self.promotions) - 1)))
        arena, offset, _ = self.table.dram.place(slot)
        self.rig.memory[arena, offset] = block.key
        self.table.promote_done(block, slot, SUMS, ok=ok)

    @rule(writable=st.booleans())
    def ssd_goes_and_comes(self, writable: bool) -> None:
        self.table.ssd_writable = writable and self.table.ssd is not None

    @precondition(lambda self: any(self.pins))
    @rule(data=st.data(), tier=st.sampled_from([Tiers.DRAM, Tiers.SSD]))
    def corrupt(self, data: st.DataObject, tier: Tiers) -> None:
        block = data.draw(st.sampled_from([block for blocks in self.pins for block in blocks]))
        for blocks in self.holds.values():  # a held copy that went bad is no promise any more
            blocks[:] = [(held, key) for held, key in blocks if held is not block]
        for blocks in self.pins:
            if block in blocks:
                self.table.unpin([block] * blocks.count(block))
                blocks[:] = [other for other in blocks if other is not block]
        self.table.corrupt(block, tier)

    @rule()
    def drain(self) -> None:
        self.rig.apply()

    # --- always

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.check()
        assert {(uid, key) for uid, key in self.rig.index} <= self.stored
        assert len(self.rig.index) <= len(self.stored)

    @invariant()
    def what_is_held_or_pinned_is_readable(self) -> None:
        if not hasattr(self, "rig"):
            return
        for blocks in self.pins:
            for block in blocks:
                if block.dram is not None or block.ssd is not None:
                    assert self.rig.bytes_of(block) == block.key
        for blocks_ in self.holds.values():
            for block, key in blocks_:
                assert block.dram is not None or block.ssd is not None, "held, and yet its copy is gone"
                assert self.rig.bytes_of(block) == key, "held, and yet its slot was used again"

    def teardown(self) -> None:
        """Nothing may be left when everybody has gone."""
        if not hasattr(self, "rig"):
            return
        for _, reserved in self.reservations:
            self.table.abort(reserved.blocks)
        for blocks in self.pins:
            self.table.unpin(blocks)
        for block, slot in self.demotions:
            self.table.ssd_done(block, slot, ok=False)
        for block, slot in self.promotions:
            self.table.promote_done(block, slot, None, ok=False)
        self.table.release(list(self.holds))
        for ns in SIZES:
            self.table.close_namespace(uid_of(ns))
        assert self.table.dram.n_blocks == 0 and self.table.dram.extent_bytes_total == 0, "leaked slots"
        assert self.table.ssd is None or self.table.ssd.n_blocks == 0, "leaked SSD slots"
        assert not self.table._closing and not self.table._dirty and not self.table._urgent
        assert self.table.held_bytes == {Tiers.DRAM: 0, Tiers.SSD: 0}
        self.rig.apply()
        assert not self.rig.disk, "a removed block's record is still on disk"


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class ChainsMachine(RuleBasedStateMachine):
    """Chains that are put and used as a whole: whatever the two tiers lose, a prefix of each is left over both together, also
    where several namespaces hand extents to each other."""

    policy = "lru"

    @initialize(
        n_dram=st.sampled_from([8, 16, 40, 100]), n_ssd=st.sampled_from([0, 8, 24, 80]), low=st.sampled_from([0.0, 0.5, 1.0]),
        n_spaces=st.sampled_from([1, 1, 3]),
    )  # fmt: skip
    def start(self, n_dram: int, n_ssd: int, low: float, n_spaces: int) -> None:
        specs = [spec_of(i + 1) for i in range(n_spaces)]
        self.rig = Rig(n_dram, n_ssd, limits=Limits(low_watermark=low), specs=specs, policy=self.policy)
        self.n_spaces, self.n_max = n_spaces, n_dram + n_ssd
        self.chains: dict[int, int] = {}
        self.demotions: list[tuple[Block, Slot | None]] = []

    def whole(self, number: int) -> KeyBatch:
        return chain(f"{number}-", self.chains[number], ns=1 + number % self.n_spaces)

    def put(self, number: int, part: int, max_bytes: int) -> None:
        whole = self.whole(number)
        self.finish()
        for at in range(0, len(whole), part):
            if BlockCode.FULL in self.rig.put_waiting(whole.slice(at, min(len(whole), at + part)), max_bytes=max_bytes):
                break

    @rule(n=st.integers(1, 12) | st.integers(1, 200), part=st.sampled_from([1, 3, 8, 400]),
          max_bytes=st.sampled_from([1, 4 * BLOCK, 1 << 30]))  # fmt: skip
    def put_new(self, n: int, part: int, max_bytes: int) -> None:
        number = len(self.chains)
        self.chains[number] = min(n, self.n_max)
        self.put(number, part, max_bytes)

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), part=st.sampled_from([1, 8, 400]))
    def put_again(self, data: st.DataObject, part: int) -> None:
        self.put(data.draw(st.integers(0, len(self.chains) - 1)), part, 1 << 30)

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), promote=st.booleans())
    def get(self, data: st.DataObject, promote: bool) -> None:
        whole = self.whole(data.draw(st.integers(0, len(self.chains) - 1)))
        self.rig.get(whole)
        if promote:
            self.rig.promote(whole)

    @rule(n_bytes=st.integers(1, 100_000))
    def demote(self, n_bytes: int) -> None:
        for block in self.rig.table.clean_candidates(n_bytes, now_ms=0):
            self.demotions.append((block, self.rig.table.ssd_reserve(block)))

    @rule()
    def finish(self) -> None:
        self.rig.apply()
        for block, slot in self.demotions:
            if slot is not None:
                self.rig.disk[slot] = block.key
            self.rig.table.ssd_done(block, slot, ok=slot is not None)
        self.demotions.clear()

    @invariant()
    def each_is_a_prefix(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.check()
        for number in self.chains if not self.demotions else ():
            tiers = bytes(self.rig.has(self.whole(number)))
            assert not any(tiers[(tiers + b"\0").index(0) :]), f"a hole in {number}: {''.join('.DSB'[i] for i in tiers)}"


TestChains = ChainsMachine.TestCase
TestChains.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
