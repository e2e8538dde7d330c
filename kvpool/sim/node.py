"""A simulated worker's inside: the real table, reporter, slots and `Node`, over simulated memory and disk.

`SimNode` stands for `worker.node.Node` where that waits for the disk (removals), `SimMover` for `worker.mover.Mover`, `load` for
`worker.ssd_load`, `build` for `worker.build`: the same steps in the same order, waiting on the simulated loop, not in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from kvpool.core.block import Action, Block, SsdErase, SsdExtentCreated, SsdExtentDropped
from kvpool.core.blocks import BlockTable, Limits
from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.policy.make import policy_of
from kvpool.core.session import Reporter
from kvpool.core.slots import CloseArena, PopulateExtent, PunchExtent, SlabAllocator, Slot
from kvpool.core.types import PAGE_BYTES, Incarnation, MissCause, NamespaceUid, Tiers
from kvpool.sim.clock import Process
from kvpool.sim.disk import Disk, SimSsd, SimState, sleep
from kvpool.sim.memory import SimDram
from kvpool.sim.values import sums_of
from kvpool.worker.node import EXPIRE_S, SETTLE_S, Node
from kvpool.worker.tiers.base import BlockMeta, TierError, Trouble
from kvpool.worker.tiers.slab_file import Geometry

RETRY_S: Final = (0.5, 8.0)
BATCH_BYTES: Final = 16 << 10  # of one round of the mover: some blocks


class SimMover:
    """Writes blocks down, carries out the table's actions, takes the SSD tier out and tries it again."""

    def __init__(self, node: SimNode, ssd: SimSsd | None) -> None:
        self.node, self.table, self.ssd, self.loop = node, node.table, ssd, node.process.loop
        self._applying = asyncio.Lock()
        self._unmade: dict[int, SsdExtentCreated] = {}
        self._unerased: dict[Slot, None] = {}
        self._wake = asyncio.Event()
        self._retry_s = RETRY_S[0]
        self._retry_at: float | None = None

    def kick(self) -> None:
        self._wake.set()

    async def apply_actions(self) -> bool:
        """False: a record could not be zeroed."""
        async with self._applying:
            return await self._apply_all()

    async def _apply_all(self) -> bool:
        if self._retry_at is None and (self._unerased or self._unmade):
            await self._retry_undone()
        while actions := self.table.drain_actions():
            erases: list[Slot] = []
            for action in actions:
                if isinstance(action, SsdErase):
                    erases.append(action.slot)
                    continue
                await self._erase(erases)
                erases = []
                await self._apply(action)
            await self._erase(erases)
        return not self._unerased

    async def _apply(self, action: Action) -> None:
        node = self.node
        try:
            match action:
                case PopulateExtent():
                    pass
                case PunchExtent():
                    node.memory.punch(action.arena, action.offset_bytes, action.length_bytes)
                case CloseArena():
                    node.memory.close_arena(action.arena)
                case SsdExtentCreated():
                    self._unmade[action.number] = action
                    await self._make(action)
                case SsdExtentDropped():
                    self._unmade.pop(action.number, None)
                    self._unerased = {slot: None for slot in self._unerased if slot >> 32 != action.number}
                    assert self.ssd is not None
                    self.ssd.drop_extent(action.number)
        except TierError as error:
            self._failed(error)

    async def _make(self, extent: SsdExtentCreated) -> None:
        assert self.ssd is not None
        await self.ssd.create_extent(
            extent.number, namespace=extent.arena, slot_bytes=extent.slot_bytes, n_slots=extent.n_slots
        )
        self._unmade.pop(extent.number, None)

    async def _erase(self, slots: Sequence[Slot]) -> None:
        if not slots:
            return
        assert self.ssd is not None
        try:
            await self.ssd.erase(slots)
        except TierError as error:
            self._unerased.update(dict.fromkeys(slots))
            self._failed(error)

    async def _retry_undone(self) -> None:
        if self._unerased:
            slots, self._unerased = self._unerased, {}
            await self._erase(sorted(slots))
        for extent in list(self._unmade.values()):
            try:
                await self._make(extent)
            except TierError as error:
                self._failed(error)
                return

    async def run(self) -> None:
        while True:
            if not self._wake.is_set():
                left = None if self._retry_at is None else max(0.0, self._retry_at - self.loop.time())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._wake.wait()
            self._wake.clear()
            if self._retry_at is not None and self.loop.time() >= self._retry_at:
                await self._try_again()
            await self.apply_actions()
            while self._retry_at is None:
                blocks = self.table.clean_candidates(BATCH_BYTES, now_ms=self.node.now_ms())
                if not blocks:
                    break
                await self._write_down(blocks)
                self.node.room_made()

    async def _write_down(self, blocks: Sequence[Block]) -> None:
        assert self.ssd is not None
        reserved: list[tuple[Block, Slot]] = []
        for block in blocks:
            slot = self.table.ssd_reserve(block)
            if slot is None:
                self.table.ssd_done(block, None, ok=False)
            else:
                reserved.append((block, slot))
        if not reserved:
            return
        written: set[Slot] = set()
        async with self._applying:
            await self._apply_all()
            for _, slot in reserved:
                self._unerased.pop(slot, None)
        for block, slot in reserved:
            if self._retry_at is None:
                assert block.dram is not None
                arena, offset, _ = self.table.dram.place(block.dram)
                meta = BlockMeta(block.ns, block.key, block.size, block.sum, block.depth, block.parent)
                try:
                    await self.ssd.write(slot, meta, self.node.memory.read(arena, offset))
                    written.add(slot)
                    self._retry_s = RETRY_S[0]
                except TierError as error:
                    self._failed(error)
        self.table.ssd_done_all([(block, slot, slot in written) for block, slot in reserved])

    def ssd_failed(self, error: TierError) -> None:
        self._failed(error)

    def _failed(self, error: TierError) -> None:
        if error.is_out and self._retry_at is None and self.ssd is not None:
            self.node.note("ssd out", error.reason)
            self.ssd.set_out(error.reason)
            self._retry_at = self.loop.time() + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_S[1])
            self.table.ssd_writable = False
            self.node.room_made()
            self.kick()

    async def _try_again(self) -> None:
        assert self.ssd is not None
        self._retry_at = None
        try:
            await self.ssd.probe()
        except TierError as error:
            self._failed(error)
            return
        await self.apply_actions()
        if self._retry_at is None:
            self.ssd.set_out(None)
            self.table.ssd_writable = True
            self.node.note("ssd in", "")


class SimNode(Node):
    """The real node; `memory` and `device` are what lies below. `note(what, detail)`: for the story."""

    def __init__(
        self, process: Process, *, worker_id: str, incarnation: Incarnation, table: BlockTable, reporter: Reporter,
        memory: SimDram, device: SimSsd | None, state: SimState, note: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        dram: Any = memory
        ssd: Any = device
        kept: Any = state
        staging: Any = None
        super().__init__(
            worker_id=worker_id, incarnation=incarnation, table=table, reporter=reporter, dram=dram, ssd=ssd, staging=staging,
            state=kept, lock=threading.Lock(), io_threads=1,
        )  # fmt: skip
        self.process, self.memory, self.device, self.note = process, memory, device, note
        self.movement = SimMover(self, device)
        mover: Any = self.movement
        self.mover = mover
        self.loads: dict[Block, asyncio.Future[None]] = {}

    def now_ms(self) -> int:  # type: ignore[override]
        return self.process.now_ms()

    async def expire(self) -> None:
        """Stands for the thread that ends holds."""
        while True:
            await sleep(self.process.loop, EXPIRE_S)
            owners = list(self.table.expire(self.now_ms()))
            self.after_decision()
            for call in self._drop_calls if owners else ():
                call(owners)

    # --- removals, as in `Node`, with waits ------------------------------------------------------------------------------

    async def catch_up_slowly(self, spec: NamespaceSpec, *, drop_all: bool, missed: Sequence[bytes]) -> None:
        """`Node.catch_up`."""
        uid = spec.uid
        known = self._specs.get(uid)
        if known is None:
            self.open_namespace(spec, applied_seq=spec.removal_seq, blocked=False)
        for keys in (None,) if drop_all else ():
            await self.remove_slowly(uid, keys, removal_seq=spec.removal_seq)
        for keys in missed:
            await self.remove_slowly(uid, keys, removal_seq=spec.removal_seq)
        noted = self.state.applied_seq(uid)
        if noted is None or known is None or replace(known, removal_seq=0) != replace(spec, removal_seq=0):
            self.state.put_namespace(spec)
        if noted != spec.removal_seq:
            self.state.set_applied_seq(uid, spec.removal_seq)
        self._specs[uid] = spec
        self._applied[uid] = spec.removal_seq
        self._blocked.discard(uid)

    async def remove_noted(self, uid: NamespaceUid, keys: bytes | None, *, removal_seq: int) -> tuple[bytes, int]:
        """`Node.remove`."""
        if uid not in self._specs:
            return bytes(len(KeyBatch(uid, keys or b"", chained=False))), 0
        codes, n_removed = await self.remove_slowly(uid, keys, removal_seq=removal_seq)
        if removal_seq == self._applied.get(uid, 0) + 1:
            self.state.set_applied_seq(uid, removal_seq)
            self._applied[uid] = removal_seq
        return codes, n_removed

    async def remove_slowly(self, uid: NamespaceUid, keys: bytes | None, *, removal_seq: int) -> tuple[bytes, int]:
        """`Node._remove_for_good`."""
        codes, n_removed = b"", 0
        self._begun[uid] = max(removal_seq, self._begun.get(uid, 0))
        kept = sorted(self.table.with_records(uid, keys), key=lambda block: (block.key, block.ssd_slots))
        for block in kept:
            block.pins += 1
        slots = [slot for block in kept for slot in block.ssd_slots]
        if keys is None:
            n_removed = self.table.remove_all(uid)
        else:
            codes = bytes(self.table.remove(KeyBatch(uid, keys, chained=False), cause=MissCause.REMOVED))
            n_removed = sum(codes)
        self._room_freed()
        self.after_decision()
        try:
            if self.device is not None:
                until = self.process.now_s() + SETTLE_S
                while any(block.demoting for block in kept):
                    if self.process.now_s() > until:
                        raise TierError(Trouble.STALLED, "the disk did not end its writes")
                    await sleep(self.process.loop, 0.001)
                await self.device.erase(slots)
                if not await self.movement.apply_actions():
                    raise TierError(Trouble.IO, "the disk does not zero the records of removed blocks")
                await self.device.sync()
        finally:
            self.table.unpin(kept)
            self.after_decision()
        return codes, n_removed

    # --- from SSD, as in `ssd_load` ---------------------------------------------------------------------------------------

    async def load(self, block: Block, *, until: float, wanted: bool = False, n_more: int = 0) -> int | bytes:
        """A pinned block from SSD: its offset in the arena when it is in DRAM now, else its bytes."""
        if block.dram is not None:
            return self.offset(block)
        theirs = self.loads.get(block)
        if theirs is not None:
            while not theirs.done():
                if self.process.loop.time() >= until:
                    raise TierError(Trouble.BUSY, "another reader's load was not over before the deadline")
                await sleep(self.process.loop, 0.0005)
            if block.dram is not None:
                return self.offset(block)
            return await self._load_alone(block, wanted=wanted, n_more=n_more)
        mine = self.loads[block] = self.process.loop.create_future()
        try:
            return await self._load_alone(block, wanted=wanted, n_more=n_more)
        finally:
            del self.loads[block]
            mine.set_result(None)

    async def _load_alone(self, block: Block, *, wanted: bool, n_more: int) -> int | bytes:
        ssd, slot = self.device, block.ssd
        if ssd is None or slot is None:
            raise TierError(Trouble.DAMAGED, "the block's copy is gone")
        try:
            data = await ssd.read_block(slot, block_sum=block.sum)
        except TierError as error:
            if error.trouble is Trouble.DAMAGED:
                self.table.corrupt(block, Tiers.SSD)
                self.after_decision()
            raise
        target = None if block.dram is not None else self.table.promote_reserve(block, wanted=wanted, n_more=n_more)
        self.after_decision()
        if target is None:
            return data
        arena, offset, _ = self.table.dram.place(target)
        await sleep(self.process.loop, 0.0001)
        self.memory.write(arena, offset, data)
        self.table.promote_done(block, target, sums_of(data), ok=True)
        is_there = block.dram == target
        self.after_decision()
        return offset if is_there else data


def build(
    process: Process, disk: Disk, *, worker_id: str, incarnation: Incarnation, dram_bytes: int, ssd_bytes: int, policy: str,
    on_report: Callable[[NamespaceUid, bytes, int, MissCause | None], None], on_bump: Callable[[NamespaceUid, int], None],
    note: Callable[[str, str], None],
) -> SimNode:  # fmt: skip
    """The node with what an earlier process left on SSD, not yet served. `worker.build.build_node`."""
    state = SimState(disk, worker_id)
    device = SimSsd(disk, process, capacity_bytes=ssd_bytes) if ssd_bytes else None
    memory = SimDram(on_bump=on_bump)
    reporter = Reporter()

    def record(uid: NamespaceUid, key: bytes, tiers: int, cause: MissCause | None, size: int) -> None:
        on_report(uid, key, tiers, cause)
        reporter.record(uid, key, tiers, cause, size)

    table = BlockTable(
        dram=SlabAllocator(capacity_bytes=dram_bytes),
        ssd=None if device is None else ssd_slots(ssd_bytes),
        policy=policy_of(policy),
        reporter=record,
        limits=Limits(seed=random.Random(f"{process.name} holds").getrandbits(64)),
        bump=memory.bump,
        generation=memory.generation,
    )
    node = SimNode(process, worker_id=worker_id, incarnation=incarnation, table=table, reporter=reporter, memory=memory,
                   device=device, state=state, note=note)  # fmt: skip
    for spec in state.namespaces():
        applied = state.applied_seq(spec.uid)
        node.open_namespace(spec, applied_seq=0 if applied is None else applied, blocked=True)
    if device is not None:
        adopt(node, device)
    return node


def ssd_slots(size_bytes: int) -> SlabAllocator:
    return SlabAllocator(
        capacity_bytes=size_bytes,
        align=PAGE_BYTES,
        overhead_bytes=lambda n_slots: Geometry(PAGE_BYTES, n_slots).file_bytes - n_slots * PAGE_BYTES,
        grow=False,
    )


def adopt(node: SimNode, device: SimSsd) -> None:
    """`worker.build._adopt`."""
    table = node.table
    assert table.ssd is not None
    known = {spec.uid for spec in node.specs() if node.state.applied_seq(spec.uid) is not None}
    blocks = []
    for number, file, found in device.scan():
        uid, geometry = file.namespace, file.geometry
        if uid not in known or not table.ssd.adopt_extent(
            number, uid, slot_bytes=geometry.slot_bytes, n_slots=geometry.n_slots
        ):
            device.drop_extent(number)
            continue
        blocks += found
    blocks.sort(key=lambda one: one.seq)
    for one in blocks:
        meta = one.meta
        if not table.adopt(
            meta.namespace, meta.key, meta.size, meta.block_sum, meta.depth, meta.parent, one.slot, one.seq
        ):
            device.disk.files[one.slot >> 32].records.pop(one.slot & 0xFFFFFFFF, None)
    table.adopted()
