"""Simulated disk of one host, and the worker's things on it: slab files with records, and its small durable state.

Owns what outlives a process. `SimSsd` stands for `worker.tiers.ssd.SsdTier` with its files (`ssd_extent`, `slab_scan`), in the
same order: zero the record, write the payload, write the record; nothing synced on the way but erasures before a removal is
confirmed. `SimState` stands for `worker.state.WorkerState`. A payload is a block's few bytes (`PARTS` parts, `values`), which can
tear between parts.

    process killed    what was written is there, the write under way is torn where it was
    power cut         of what was not synced each change is there or not, by chance
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.slots import INDEX_BITS, INDEX_MASK, Slot
from kvpool.core.types import PAGE_BYTES, NamespaceUid
from kvpool.sim.clock import Process, SimLoop
from kvpool.sim.values import NOTHING, PART_BYTES, PARTS, sum_of
from kvpool.worker.tiers.base import BlockMeta, TierError, Trouble
from kvpool.worker.tiers.slab_file import Geometry

RECORD_ROOM: Final = PAGE_BYTES


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """`whole`: its own checksum is right."""

    meta: BlockMeta
    seq: int
    whole: bool = True


class SlabFile:
    """One slab file: records and payloads by slot index, as written and as synced."""

    def __init__(self, namespace: NamespaceUid, geometry: Geometry) -> None:
        self.namespace, self.geometry = namespace, geometry
        self.records: dict[int, DiskRecord] = {}
        self.payload: dict[int, bytes] = {}
        self.synced_records: dict[int, DiskRecord] = {}
        self.synced_payload: dict[int, bytes] = {}


class Disk:
    """Of one host. `full`, `failing`, `stalled`: what it does to those who use it now."""

    def __init__(self, loop: SimLoop, chance: random.Random) -> None:
        self.loop, self.random = loop, chance
        self.files: dict[int, SlabFile] = {}
        self.namespaces: dict[NamespaceUid, NamespaceSpec] = {}
        self.applied: dict[NamespaceUid, int] = {}
        self.full = False
        self.failing = False
        self.stalled = False
        self.tear_next = False  # the next payload is written in part, and nobody is told

    @property
    def used_bytes(self) -> int:
        return sum(file.geometry.file_bytes for file in self.files.values())

    def sync(self) -> None:
        for file in self.files.values():
            file.synced_records, file.synced_payload = dict(file.records), dict(file.payload)

    def power_cut(self) -> None:
        """What was not synced is there or not; a payload may be there in part."""
        draw = self.random
        for file in self.files.values():
            for index in sorted({*file.records, *file.synced_records}):
                if draw.random() < 0.5:
                    _put(file.records, index, file.synced_records.get(index))
            for index in sorted(file.payload):
                before, now = file.synced_payload.get(index, NOTHING), file.payload[index]
                if now != before and draw.random() < 0.5:
                    cut = draw.randrange(PARTS) * PART_BYTES
                    file.payload[index] = now[:cut] + before[cut:]
        self.sync()

    def flip(self) -> str:
        """One bit of one payload, or one record, goes bad. Returns where, "" when nothing is there."""
        places = [(number, index) for number, file in self.files.items() for index in file.records]
        if not places:
            return ""
        number, index = self.random.choice(places)
        file = self.files[number]
        if self.random.random() < 0.3:
            record = file.records[index]
            file.records[index] = DiskRecord(record.meta, record.seq, whole=False)
            return f"record {number}/{index}"
        raw = bytearray(file.payload.get(index, NOTHING))
        raw[self.random.randrange(len(raw))] ^= 1 << self.random.randrange(8)
        file.payload[index] = bytes(raw)
        return f"payload {number}/{index}"


def _put(table: dict[int, DiskRecord], index: int, record: DiskRecord | None) -> None:
    if record is None:
        table.pop(index, None)
    else:
        table[index] = record


class SimState:
    """Stands for `worker.state.WorkerState`: every write is durable when it returns."""

    def __init__(self, disk: Disk, worker_id: str) -> None:
        self.disk, self.worker_id = disk, worker_id

    def namespaces(self) -> list[NamespaceSpec]:
        return list(self.disk.namespaces.values())

    def put_namespace(self, spec: NamespaceSpec) -> None:
        self.disk.namespaces[spec.uid] = spec

    def forget_namespace(self, uid: NamespaceUid) -> None:
        self.disk.namespaces.pop(uid, None)
        self.disk.applied.pop(uid, None)

    def applied_seq(self, uid: NamespaceUid) -> int | None:
        return self.disk.applied.get(uid)

    def set_applied_seq(self, uid: NamespaceUid, seq: int) -> None:
        self.disk.applied[uid] = seq

    def close(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class Found:
    """A record that may be adopted."""

    slot: Slot
    meta: BlockMeta
    seq: int


class SimSsd:
    """One process' use of the disk. Calls take their time; they raise TierError as the real tier does."""

    def __init__(self, disk: Disk, process: Process, *, capacity_bytes: int) -> None:
        self.disk, self.process, self.capacity_bytes = disk, process, capacity_bytes
        self.directory = f"/{process.host}"
        self.next_seq = 1
        self._out: str | None = None

    @property
    def state(self) -> str:
        return self._out or "ok"

    def set_out(self, reason: str | None) -> None:
        self._out = reason

    async def _io(self, *, writes: bool) -> None:
        """One call's time, and its fate. A stalled device is waited for; a write that ends after STALL_S has failed."""
        loop, disk = self.disk.loop, self.disk
        await sleep(loop, 0.00005 + 0.0005 * disk.random.random())
        waited = 0.0
        while disk.stalled:
            await sleep(loop, 0.05)
            waited += 0.05
            if waited >= STALL_S:
                raise TierError(Trouble.STALLED, "the device does not answer")
        if disk.failing:
            raise TierError(Trouble.IO, "input/output error")
        if writes and disk.full:
            raise TierError(Trouble.FULL, "no space left on device")

    async def create_extent(self, number: int, *, namespace: NamespaceUid, slot_bytes: int, n_slots: int) -> None:
        geometry = Geometry(slot_bytes, n_slots)
        if number in self.disk.files:
            return
        if self.disk.used_bytes + geometry.file_bytes > self.capacity_bytes:
            raise TierError(Trouble.FULL, "the file would go over the cap")
        await self._io(writes=True)
        self.disk.files[number] = SlabFile(namespace, geometry)

    def drop_extent(self, number: int) -> None:
        self.disk.files.pop(number, None)

    async def write(self, slot: Slot, meta: BlockMeta, data: bytes) -> None:
        """Record away, payload part by part, record."""
        disk = self.disk
        file = self._file(slot)
        index = slot & INDEX_MASK
        file.records.pop(index, None)
        await self._io(writes=True)
        torn, disk.tear_next = disk.tear_next, False
        before = file.payload.get(index, NOTHING)
        for part in range(PARTS):
            if torn and part == PARTS // 2:
                break
            at = (part + 1) * PART_BYTES
            file.payload[index] = data[:at] + before[at:]
            await sleep(disk.loop, 0.00005)
        await self._io(writes=True)
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        file.records[index] = DiskRecord(meta, seq)

    async def read_block(self, slot: Slot, *, block_sum: int) -> bytes:
        await self._io(writes=False)
        data = self._file(slot).payload.get(slot & INDEX_MASK, NOTHING)
        if sum_of(data) != block_sum:
            raise TierError(Trouble.DAMAGED, "checksum differs")
        return data

    async def erase(self, slots: Sequence[Slot]) -> None:
        if not slots:
            return
        await self._io(writes=False)
        for slot in slots:
            file = self.disk.files.get(slot >> INDEX_BITS)
            if file is not None:
                file.records.pop(slot & INDEX_MASK, None)

    async def sync(self) -> None:
        await self._io(writes=False)
        self.disk.sync()

    async def probe(self) -> None:
        await self._io(writes=True)

    def _file(self, slot: Slot) -> SlabFile:
        file = self.disk.files.get(slot >> INDEX_BITS)
        if file is None:
            raise TierError(Trouble.DAMAGED, "no slab file")
        return file

    def scan(self) -> list[tuple[int, SlabFile, list[Found]]]:
        """At start: files with the records that can be trusted, the newest of each key; the others are zeroed."""
        newest: dict[bytes, int] = {}
        for file in self.disk.files.values():
            for index, record in list(file.records.items()):
                if not record.whole:
                    del file.records[index]
                    continue
                key = file.namespace + record.meta.key
                newest[key] = max(newest.get(key, 0), record.seq)
                self.next_seq = max(self.next_seq, record.seq + 1)
        found = []
        for number, file in sorted(self.disk.files.items()):
            adopted = []
            for index, record in sorted(file.records.items()):
                if newest[file.namespace + record.meta.key] == record.seq:
                    adopted.append(Found(Slot(number << INDEX_BITS | index), record.meta, record.seq))
                else:
                    del file.records[index]
            found.append((number, file, adopted))
        return found


STALL_S: Final = 5.0


async def sleep(loop: SimLoop, delay_s: float) -> None:
    """As asyncio.sleep, at less cost."""
    waiter = loop.create_future()
    loop.call_later(delay_s, _wake, waiter)
    await waiter


def _wake(waiter: object) -> None:
    if not waiter.done():  # type: ignore[attr-defined]
        waiter.set_result(None)  # type: ignore[attr-defined]
