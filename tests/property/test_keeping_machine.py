"""Pins, expiry, priorities and quotas on top of the table's machine: nothing that a hard pin protects is evicted, no namespace
grows past its quota, no reader without a hold gets what has expired."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvpool.core.block import Block, Limits
from kvpool.core.keys import KeyBatch
from kvpool.core.pins import PinLevel
from kvpool.core.quota import Share
from kvpool.core.retention import pack_hint
from kvpool.core.types import BlockCode, MissCause, NamespaceUid
from tests.property.test_blocks_machine import SIZES, BlocksMachine, batches
from tests.support.tables import BLOCK, SUMS, Rig, chain, spec_of, uid_of

hints = st.builds(pack_hint, st.sampled_from([0, 0, 50, 400]), st.sampled_from([None, None, 0, 20, 60, 100]))
shares = st.none() | st.builds(lambda a, b: Share(a * BLOCK, b * BLOCK), st.integers(0, 20), st.integers(0, 20))


class KeepingMachine(BlocksMachine):
    policy = "lru"

    @initialize(n_dram=st.integers(2, 20), n_ssd=st.none() | st.integers(2, 20), pinned=st.sampled_from([0.0, 0.3, 0.6, 1.0]))
    def start(self, n_dram: int, n_ssd: int | None, pinned: float) -> None:  # type: ignore[override]
        super().start(n_dram, n_ssd, 10, 0.5)
        limits = Limits(gone_keys_max=10, quarantine_fraction=0.1, hold_ttl_ms_max=500, holds_max=12, pinned_fraction=pinned)
        specs = [spec_of(i, size) for i, size in SIZES.items()]
        self.rig = Rig(n_dram, n_ssd, limits=limits, specs=specs, policy=self.policy)
        self.table = self.rig.table
        self.hard: list[tuple[Block, int]] = []
        self.used: dict[tuple[NamespaceUid, int], int] = {}

    @rule(batch=batches, data=st.data())
    def put_with_hints(self, batch: KeyBatch, data: st.DataObject) -> None:
        some = data.draw(st.lists(hints, min_size=len(batch), max_size=len(batch)))
        sizes = [SIZES[batch.namespace[0]]] * len(batch)
        reserved = self.table.reserve(batch, sizes, now_ms=self.rig.now, hints=some)
        assert not reserved.over_quota or self.table.spaces[batch.namespace].share is not None
        assert not reserved.over_quota or BlockCode.FULL in reserved.codes or BlockCode.ALREADY in reserved.codes
        self.reservations.append((batch, reserved))
        self.commit_last()

    @rule(names=st.permutations("abcdef"), ns=st.sampled_from([1, 2]))
    def flood(self, names: list[str], ns: int) -> None:
        for name in names:
            batch = chain(name, 6, ns=ns)
            self.reservations.append((batch, self.table.reserve(batch, [SIZES[ns]] * 6, now_ms=self.rig.now)))
            self.commit_last()

    def commit_last(self) -> None:
        batch, reserved = self.reservations.pop()
        self.rig.fill(reserved)
        blocks = [block for block in reserved.blocks if block is not None]
        self.table.commit(blocks, [SUMS] * len(blocks), now_ms=self.rig.now)
        self.stored |= {(batch.namespace, block.key) for block in blocks}
        self.removed -= {(batch.namespace, block.key) for block in blocks}

    @rule(batch=batches, level=st.sampled_from(PinLevel), ttl=st.integers(0, 500))
    def pin_keys(self, batch: KeyBatch, level: PinLevel, ttl: int) -> None:
        n, here = len(batch), self.table.spaces[batch.namespace].blocks
        codes = self.table.pin_keys(batch.namespace, batch.split(), [level] * n, [self.rig.now + ttl] * n)
        for key, code in zip(batch.split(), codes, strict=True):
            assert (code != 0) == (key in here)
            assert code != 2 or level is PinLevel.HARD

    @rule(ns=st.sampled_from([1, 2]), share=shares)
    def quota(self, ns: int, share: Share | None) -> None:
        self.table.set_share(uid_of(ns), share)

    @rule(batch=batches)
    def read(self, batch: KeyBatch) -> None:
        found = self.rig.pin(batch, first_miss=False)
        for block in found.blocks:
            assert block is None or block.keep is None or not 0 < block.keep.expires_ms <= self.rig.now
        self.table.unpin(found.blocks)

    @invariant()
    def hard_pins_stay(self) -> None:
        if not hasattr(self, "hard"):
            return
        for block, until in self.hard:
            assert block.live or block.gone is not MissCause.EVICTED or until <= self.rig.now, "a hard pin was evicted"
        live = [block for space in self.table.spaces.values() for block in space.blocks.values()]
        self.hard = []
        for block in live:
            pin = block.space.pins.get(block.key)
            if pin is not None and block.keep is not None and block.keep.hard_in:
                self.hard.append((block, pin[1]))
        for tier, slots in ((1, self.table.dram), (2, self.table.ssd)):
            n_bytes = sum(b.size for b in live if b.keep is not None and b.keep.hard_in == tier)
            assert slots is None or n_bytes <= slots.capacity_bytes * self.table.limits.pinned_fraction

    @invariant()
    def quotas_hold(self) -> None:
        if not hasattr(self, "used"):
            return
        for uid, space in self.table.spaces.items():
            for tier, n_bytes in enumerate(self.table.used_bytes_of(uid)):
                if space.share is not None:
                    most = (space.share.dram, space.share.ssd)[tier]
                    assert n_bytes <= max(most, self.used.get((uid, tier), 0)), "grew past its quota"
                self.used[uid, tier] = n_bytes


TestKeeping = KeepingMachine.TestCase
TestKeeping.settings = settings(
    max_examples=30, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
