"""A block table with a fake memory below it: every slot's bytes are one value, so that reuse too early shows."""

from __future__ import annotations

import hashlib
from collections import defaultdict

from kvpool.core.block import Block, Held, Limits, Pinned, Reserved, SsdErase
from kvpool.core.blocks import BlockTable
from kvpool.core.keys import KeyBatch, pack_keys
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.policy.make import policy_of
from kvpool.core.slots import SlabAllocator, Slot
from kvpool.core.types import HASH_BYTES, NO_PARENT, Key, MissCause, NamespaceUid, Tiers

BLOCK = 4096
SUMS = bytes(range(8))
ROUNDS_MAX = 400  # of the mover for one put


def uid_of(i: int) -> NamespaceUid:
    return NamespaceUid(bytes([i]) * 16)


def spec_of(i: int = 1, block_bytes: int = BLOCK, *, variable: bool = True) -> NamespaceSpec:
    layout = KVLayout.opaque(block_bytes, 16)
    spec = NamespaceSpec.of(f"ns{i}", layout, uid=uid_of(i))
    return spec if variable else NamespaceSpec(**{**{f: getattr(spec, f) for f in spec.__slots__}, "variable": False})


def hash_of(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def batch_of(names: list[object], *, ns: int = 1, parent: object = None, depth: int = 0, chained: bool = True) -> KeyBatch:
    """Keys named by anything; in a chain the names must be unique for their prefix (as hashes are)."""
    above = NO_PARENT if parent is None else hash_of(parent)
    return KeyBatch(uid_of(ns), pack_keys(b"".join(map(hash_of, names)), shard=0), above, depth, chained)


def chain(name: str, n: int, start: int = 0, *, ns: int = 1) -> KeyBatch:
    """Blocks start..n-1 of the chain `name`."""
    names: list[object] = [f"{name}{i}" for i in range(start, n)]
    return batch_of(names, ns=ns, parent=f"{name}{start - 1}" if start else None, depth=start)


class Rig:
    """Table, fake memory, fake disk, and what was reported. All calls as the worker makes them."""

    def __init__(self, n_dram: int, n_ssd: int | None = None, *, block: int = BLOCK, limits: Limits | None = None,
                 specs: list[NamespaceSpec] | None = None, dram_bytes: int | None = None,
                 policy: str = "lru") -> None:  # fmt: skip
        self.block = block
        self.index: dict[tuple[NamespaceUid, Key], int] = {}  # what the master would know
        self.causes: dict[tuple[NamespaceUid, Key], MissCause] = {}
        self.reports = 0
        self.words: defaultdict[tuple[NamespaceUid, int], int] = defaultdict(int)
        self.memory: dict[tuple[NamespaceUid, int], Key] = {}
        self.disk: dict[Slot, Key] = {}
        self.now = 0
        ssd = None
        if n_ssd is not None:
            ssd = SlabAllocator(capacity_bytes=n_ssd * block, align=4096, grow=False)
        dram = SlabAllocator(capacity_bytes=dram_bytes if dram_bytes is not None else n_dram * block)
        self.table = BlockTable(
            dram=dram, ssd=ssd, policy=policy_of(policy), reporter=self._report, limits=limits, bump=self._bump,
            generation=lambda arena, i: self.words[arena, i],
        )  # fmt: skip
        for spec in specs or [spec_of(1, block)]:
            self.table.open_namespace(spec)

    def _report(self, uid: NamespaceUid, key: Key, tiers: int, cause: MissCause | None, size: int) -> None:
        assert (cause is None) == (tiers != 0) and size > 0
        self.reports += 1
        if tiers:
            self.index[uid, key] = tiers
        else:
            assert cause is not None
            self.causes[uid, key] = cause
            assert self.index.pop((uid, key), 0), "gone twice, or never there"

    def _bump(self, arena: NamespaceUid, gen_index: int) -> None:
        self.words[arena, gen_index] += 1

    # --- put

    def reserve(self, batch: KeyBatch, sizes: list[int] | None = None, *, use: int = 0) -> Reserved:
        return self.table.reserve(batch, sizes or [self.block] * len(batch), now_ms=self.now, use=use)

    def fill(self, reserved: Reserved) -> None:
        for block in reserved.blocks:
            if block is not None:
                assert block.dram is not None
                arena, offset, _ = self.table.dram.place(block.dram)
                self.memory[arena, offset] = block.key

    def commit(self, reserved: Reserved) -> bytes:
        blocks = [block for block in reserved.blocks if block is not None]
        return self.table.commit(blocks, [SUMS] * len(blocks), now_ms=self.now)

    def put(self, batch: KeyBatch, sizes: list[int] | None = None) -> bytearray:
        """Codes as a client would see them."""
        reserved = self.reserve(batch, sizes)
        self.fill(reserved)
        made = iter(self.commit(reserved))
        return bytearray(next(made) if block is not None else code
                         for code, block in zip(reserved.codes, reserved.blocks, strict=True))  # fmt: skip

    def put_waiting(self, batch: KeyBatch, *, sizes: list[int] | None = None, max_bytes: int = 1 << 30) -> bytearray:
        """As a worker does it: while the tier makes room the put is aborted, the mover goes round, and it tries again."""
        use = 0
        for _ in range(ROUNDS_MAX):
            reserved = self.reserve(batch, sizes, use=use)
            if not reserved.must_wait:
                self.fill(reserved)
                self.commit(reserved)
                return reserved.codes
            use = reserved.use
            self.table.abort(reserved.blocks)
            self.write_down(max_bytes=max_bytes, rounds=1)
        raise AssertionError("a put that waits for ever")

    # --- get

    def bytes_of(self, block: Block) -> Key:
        """What a reader of this pinned or held block gets."""
        if block.dram is not None:
            arena, offset, _ = self.table.dram.place(block.dram)
            return self.memory[arena, offset]
        assert block.ssd is not None
        return self.disk[block.ssd]

    def pin(self, batch: KeyBatch, *, first_miss: bool = True, hold_id: int = 0) -> Pinned:
        pinned = self.table.pin(batch, now_ms=self.now, first_miss=first_miss, hold_id=hold_id)
        for block in pinned.blocks:
            if block is not None:
                assert self.bytes_of(block) == block.key, "somebody else's bytes"
        return pinned

    def get(self, batch: KeyBatch) -> int:
        """Leading hits."""
        pinned = self.pin(batch)
        self.table.unpin(pinned.blocks)
        return sum(block is not None for block in pinned.blocks)

    def has(self, batch: KeyBatch) -> list[int]:
        return list(self.table.tiers_of(batch, now_ms=self.now, touch=False))

    def hold(self, batch: KeyBatch, *, ttl_ms: int = 1000, owner: int = 0, view: bool = False) -> Held:
        return self.table.hold(batch, ttl_ms=ttl_ms, now_ms=self.now, owner=owner, view=view)

    def cause(self, batch: KeyBatch, *, hold_id: int = 0) -> MissCause | None:
        """Of the first miss."""
        pinned = self.table.pin(batch, now_ms=self.now, touch=False, hold_id=hold_id)
        self.table.unpin(pinned.blocks)
        return next((cause for cause in pinned.causes if cause is not None), None)

    # --- mover

    def apply(self) -> None:
        for action in self.table.drain_actions():
            if isinstance(action, SsdErase):
                self.disk.pop(action.slot, None)

    def write_down(self, *, max_bytes: int = 1 << 30, rounds: int = 100, ok: bool = True) -> int:
        """The mover's work until there is none. -> blocks written."""
        written = 0
        for _ in range(rounds):
            blocks = self.table.clean_candidates(max_bytes, now_ms=self.now)
            if not blocks:
                break
            slots = [self.table.ssd_reserve(block) for block in blocks]
            self.apply()
            for block, slot in zip(blocks, slots, strict=True):
                if slot is not None and ok:
                    assert slot not in self.disk, "a record was not erased before its slot was written again"
                    self.disk[slot] = self.bytes_of_dram(block)
                self.table.ssd_done(block, slot, ok=ok and slot is not None)
                written += slot is not None and ok
        return written

    def bytes_of_dram(self, block: Block) -> Key:
        assert block.dram is not None
        arena, offset, _ = self.table.dram.place(block.dram)
        return self.memory[arena, offset]

    def write_all_down(self) -> int:
        """Makes every dirty block clean."""
        for block in list(self.table._dirty):
            self.table._urgent[block] = None
        return self.write_down()

    def promote(self, batch: KeyBatch, *, wanted: bool = False) -> list[bool]:
        """Reads and promotes what is on SSD alone."""
        pinned = self.pin(batch, first_miss=False)
        done = []
        n_more = sum(block is not None and block.dram is None for block in pinned.blocks)
        for block in pinned.blocks:
            n_more -= block is not None and block.dram is None
            slot = self.table.promote_reserve(block, wanted=wanted, n_more=n_more) if block is not None else None
            if block is not None and slot is not None:
                assert block.ssd is not None
                arena, offset, _ = self.table.dram.place(slot)
                self.memory[arena, offset] = self.disk[block.ssd]
                self.table.promote_done(block, slot, SUMS, ok=True)
            done.append(slot is not None)
        self.table.unpin(pinned.blocks)
        return done

    def check(self) -> None:
        self.table.check()
        live = {(uid, key): block.tiers for uid, space in self.table.spaces.items() for key, block in space.blocks.items()}
        assert live == self.index, "reports and table differ"


def key_at(batch: KeyBatch, i: int) -> Key:
    return batch.split()[i]


DRAM, SSD, BOTH = int(Tiers.DRAM), int(Tiers.SSD), int(Tiers.DRAM | Tiers.SSD)
assert len(hash_of(1)) == HASH_BYTES
