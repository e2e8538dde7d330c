"""A trace through the worker's own core in one process: its table, its policy and its mover's decisions, without bytes.

Owns the steps of a request (get, promotions, put, writing down), made as a client and a worker make them. Every decision is
`core.blocks`'. The real pool's replay is `cli.drive`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.core.block import Block, Limits
from kvpool.core.blocks import BlockTable
from kvpool.core.keys import KeyBatch
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.policy.eviction import EvictionPolicy
from kvpool.core.policy.make import policy_of
from kvpool.core.slots import SlabAllocator
from kvpool.core.types import PAGE_BYTES, NamespaceUid
from kvpool.sim.traces import Request, Served

BATCH_BYTES = 8 << 20  # of the mover's rounds, as a worker's
ROUNDS_MAX = 1000  # of the mover that one put waits for
SUMS = bytes(8)


@dataclass(slots=True)
class Outcome:
    """What a replay came to, in blocks."""

    n_requests: int = 0
    n_blocks: int = 0
    hits_dram: int = 0
    hits_ssd: int = 0
    stored: int = 0
    ssd_written: int = 0
    waits: int = 0  # puts that waited for the mover
    missed: dict[str, int] = field(default_factory=dict)
    rows: list[Served] = field(default_factory=list)  # of requests, in their order

    @property
    def hits(self) -> int:
        return self.hits_dram + self.hits_ssd


class CoreReplay:
    """One worker's core. `dram_bytes` and `ssd_bytes` (0: no such tier) as a worker's settings."""

    def __init__(
        self, *, policy: str, block_bytes: int, dram_bytes: int, ssd_bytes: int = 0, seed: int = 0,
        wrap: Callable[[EvictionPolicy], EvictionPolicy] = lambda made: made,
    ) -> None:  # fmt: skip
        """`wrap`: what stands before each tier's policy (to measure it)."""
        self.outcome = Outcome()
        self._block_bytes = block_bytes
        self.policy: Callable[[], EvictionPolicy] = policy_of(policy)
        ssd = SlabAllocator(capacity_bytes=ssd_bytes, align=PAGE_BYTES, grow=False) if ssd_bytes else None
        self.table = BlockTable(
            dram=SlabAllocator(capacity_bytes=dram_bytes), ssd=ssd, policy=lambda: wrap(self.policy()), limits=Limits(seed=seed)
        )
        layout = KVLayout.opaque(block_bytes, 512)
        self._uid = NamespaceUid(bytes(16))
        self.table.open_namespace(NamespaceSpec.of("replay", layout, uid=self._uid))
        self._keys: dict[int, bytes] = {}

    def serve(self, request: Request) -> None:
        """One request: get its longest prefix, put what was missing."""
        outcome, table, now_ms = self.outcome, self.table, int(request.timestamp_ms)
        n = len(request.ids)
        outcome.n_requests += 1
        outcome.n_blocks += n
        if not n:
            outcome.rows.append(Served(request.timestamp_ms, 0))
            return
        batch = KeyBatch(self._uid, b"".join(map(self._key, request.ids)))
        dram, ssd = self._get(batch, now_ms)
        outcome.rows.append(Served(request.timestamp_ms, n, dram=dram, ssd=ssd))
        hits = dram + ssd
        if hits < n:
            self._put(batch.slice(hits, n), now_ms)
        if table.has_actions:
            self._write_down(now_ms)

    def _get(self, batch: KeyBatch, now_ms: int) -> tuple[int, int]:
        """-> hits in DRAM, on SSD."""
        outcome, table = self.outcome, self.table
        pinned = table.pin(batch, now_ms=now_ms)
        hits = [block for block in pinned.blocks if block is not None]
        cold = [block for block in hits if block.dram is None]
        for n_before, block in enumerate(cold):
            slot = table.promote_reserve(block, n_more=len(cold) - n_before - 1)
            if slot is not None:
                table.promote_done(block, slot, SUMS, ok=True)
        table.unpin(hits)
        outcome.hits_dram += len(hits) - len(cold)
        outcome.hits_ssd += len(cold)
        if len(hits) < len(batch):
            cause = pinned.causes[len(hits)]
            if cause is not None:
                outcome.missed[cause.value] = outcome.missed.get(cause.value, 0) + 1
        return len(hits) - len(cold), len(cold)

    def _put(self, batch: KeyBatch, now_ms: int) -> None:
        table, sizes = self.table, [self._block_bytes] * len(batch)
        reserved = table.reserve(batch, sizes, now_ms=now_ms)
        rounds = 0
        while reserved.must_wait and rounds < ROUNDS_MAX:
            self.outcome.waits += not rounds
            rounds += 1
            table.abort(reserved.blocks)
            self._write_down(now_ms)
            reserved = table.reserve(batch, sizes, now_ms=now_ms, use=reserved.use)
        blocks = [block for block in reserved.blocks if block is not None]
        table.commit(blocks, [SUMS] * len(blocks), now_ms=now_ms)
        self.outcome.stored += len(blocks)

    def _write_down(self, now_ms: int) -> None:
        table = self.table
        while True:
            table.drain_actions()
            blocks: list[Block] = table.clean_candidates(BATCH_BYTES, now_ms=now_ms)
            if not blocks:
                return
            slots = [table.ssd_reserve(block) for block in blocks]
            table.drain_actions()
            table.ssd_done_all([(block, slot, slot is not None) for block, slot in zip(blocks, slots, strict=True)])
            self.outcome.ssd_written += len(slots) - slots.count(None)

    def _key(self, block_id: int) -> bytes:
        key = self._keys.get(block_id)
        if key is None:
            key = self._keys[block_id] = hashlib.sha256(block_id.to_bytes(8, "little")).digest() + b"\0\0"
        return key
