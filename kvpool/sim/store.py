"""The simulated store of a master on its own, what LMDB keeps in its directory. That of several masters is `redis`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvpool.core.removals import Removal
from kvpool.core.types import Epoch, Key, NamespaceUid, WorkerId
from kvpool.master.store import NamespaceRecord, PinRecord, WorkerRecord
from kvpool.sim.clock import Process
from kvpool.sim.disk import sleep


@dataclass(slots=True)
class StoreData:
    """What outlives masters."""

    namespaces: dict[NamespaceUid, NamespaceRecord] = field(default_factory=dict)
    removal_log: dict[NamespaceUid, list[Removal]] = field(default_factory=dict)
    pins: dict[tuple[NamespaceUid, Key], PinRecord] = field(default_factory=dict)
    workers: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    epoch: int = 0


class LocalStore:
    """LMDB of one master. Each write is on disk when it returns."""

    def __init__(self, data: StoreData, process: Process) -> None:
        self.data, self.process = data, process
        self.master_id = process.name

    async def open(self) -> Epoch:
        self.data.epoch += 1
        return Epoch(self.data.epoch)

    async def _write(self) -> StoreData:
        await sleep(self.process.loop, 0.0005)
        return self.data

    async def put_namespace(self, record: NamespaceRecord) -> None:
        (await self._write()).namespaces[record.spec.uid] = record

    async def delete_namespace(self, uid: NamespaceUid) -> None:
        data = await self._write()
        data.namespaces.pop(uid, None)
        data.removal_log.pop(uid, None)
        data.pins = {name: pin for name, pin in data.pins.items() if name[0] != uid}

    async def log_removal(self, uid: NamespaceUid, removal: Removal, *, first_seq: int) -> None:
        data = await self._write()
        record = data.namespaces.get(uid)
        if record is None:
            return
        log = [one for one in data.removal_log.get(uid, ()) if first_seq <= one.seq < removal.seq]
        data.removal_log[uid] = [*log, removal]
        data.namespaces[uid] = replace(record, spec=replace(record.spec, removal_seq=removal.seq))

    async def put_pins(self, uid: NamespaceUid, pins: Sequence[PinRecord]) -> None:
        (await self._write()).pins.update({(uid, pin.key): pin for pin in pins})

    async def delete_pins(self, uid: NamespaceUid, keys: Sequence[Key]) -> None:
        data = await self._write()
        for key in keys:
            data.pins.pop((uid, key), None)

    async def put_worker(self, record: WorkerRecord) -> None:
        (await self._write()).workers[record.worker_id] = record

    async def delete_worker(self, worker_id: WorkerId) -> None:
        (await self._write()).workers.pop(worker_id, None)

    async def namespaces(self) -> list[NamespaceRecord]:
        return list(self.data.namespaces.values())

    async def removals(self, uid: NamespaceUid) -> Sequence[Removal]:
        return list(self.data.removal_log.get(uid, ()))

    async def pins(self) -> list[tuple[NamespaceUid, PinRecord]]:
        return [(uid, pin) for (uid, _), pin in self.data.pins.items()]

    async def workers(self) -> list[WorkerRecord]:
        return list(self.data.workers.values())

    async def ping(self) -> None:
        """It is there."""

    async def close(self) -> None:
        """Nothing to do."""
