"""The simulated store of masters: what Redis keeps for several of them, or LMDB for one, with every write's epoch on record.

`StoreData` is what is kept, and what the scripts of `master.redis_scripts` do with it (lease, fenced and numbered writes).
`LocalStore` stands for `master.lmdb_store.LmdbStore`, `SharedStore` for `master.redis_store.RedisStore`, over the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvpool.core.election import LeaseTerms
from kvpool.core.removals import Removal
from kvpool.core.types import Epoch, NamespaceUid, WorkerId
from kvpool.errors import KVPoolError, MasterUnavailable
from kvpool.master.election import LeaseReply
from kvpool.master.store import NamespaceRecord, WorkerRecord
from kvpool.sim.clock import Process
from kvpool.sim.disk import sleep
from kvpool.sim.network import Endpoint, Network, Pool, Reset

WRITE_S: Final = 1.0
ADDRESS: Final = "store"


class Fenced(MasterUnavailable):
    """Another master leads by now."""


@dataclass(slots=True)
class StoreData:
    """What outlives masters. `accepted`: (time, epoch, owner, what) of every write that was accepted."""

    namespaces: dict[NamespaceUid, NamespaceRecord] = field(default_factory=dict)
    removals: dict[NamespaceUid, list[Removal]] = field(default_factory=dict)
    workers: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    epoch: int = 0
    owner: str = ""
    holder: str = ""
    holder_address: str = ""
    until_s: float = 0.0
    writes: int = 0
    accepted: list[tuple[float, int, str, str]] = field(default_factory=list)

    # --- the lease ------------------------------------------------------------------------------------------------------

    def take(self, owner: str, address: str, floor: int, ttl_ms: int, now_s: float) -> LeaseReply:
        holder = self.holder if now_s < self.until_s else ""
        if holder not in ("", owner) and self.epoch >= floor:
            return self._reply(False, now_s)
        self.epoch, self.owner = max(self.epoch, floor) + 1, owner
        self.holder, self.holder_address, self.until_s = owner, address, now_s + ttl_ms / 1000
        return self._reply(True, now_s)

    def renew(self, owner: str, address: str, epoch: int, ttl_ms: int, now_s: float) -> LeaseReply:
        if (self.epoch, self.owner) != (epoch, owner):
            return self._reply(False, now_s)
        self.holder, self.holder_address, self.until_s = owner, address, now_s + ttl_ms / 1000
        return self._reply(True, now_s)

    def release(self, owner: str, epoch: int) -> None:
        if (self.epoch, self.owner) == (epoch, owner):
            self.owner = self.holder = self.holder_address = ""

    def _reply(self, granted: bool, now_s: float) -> LeaseReply:
        alive = now_s < self.until_s
        left_ms = max(0, int((self.until_s - now_s) * 1000))
        return LeaseReply(granted=granted, epoch=Epoch(self.epoch), owner=self.holder if alive else "",
                          address=self.holder_address if alive else "", left_ms=left_ms, writes=self.writes)  # fmt: skip

    # --- writes ---------------------------------------------------------------------------------------------------------

    def write(self, owner: str, epoch: int, number: int, what: str, change: Callable[[StoreData], None], now_s: float) -> int:
        if not self.may_write(owner, epoch):
            raise Fenced(f"epoch {epoch} is over, the store has epoch {self.epoch}")
        if number < self.writes:
            raise MasterUnavailable(f"write {number} comes after {self.writes}")
        if number > self.writes:
            self.writes = number
            self.accepted.append((now_s, epoch, owner, what))
            change(self)
        return number

    def may_write(self, owner: str, epoch: int) -> bool:
        return (self.epoch, self.owner) == (epoch, owner)

    def log_removal(self, uid: NamespaceUid, removal: Removal, first_seq: int) -> None:
        record = self.namespaces.get(uid)
        if record is None:
            return
        self.namespaces[uid] = replace(record, spec=replace(record.spec, removal_seq=removal.seq))
        log = [entry for entry in self.removals.get(uid, []) if first_seq <= entry.seq < removal.seq]
        self.removals[uid] = [*log, removal]

    def delete_namespace(self, uid: NamespaceUid) -> None:
        self.namespaces.pop(uid, None)
        self.removals.pop(uid, None)


class _Writes:
    """The writes of `master.store.Store`, as changes."""

    async def _write(self, what: str, change: Callable[[StoreData], None]) -> None:
        raise NotImplementedError

    async def put_namespace(self, record: NamespaceRecord) -> None:
        await self._write("namespace", lambda data: data.namespaces.update({record.spec.uid: record}))

    async def delete_namespace(self, uid: NamespaceUid) -> None:
        await self._write("delete", lambda data: data.delete_namespace(uid))

    async def log_removal(self, uid: NamespaceUid, removal: Removal, *, first_seq: int) -> None:
        await self._write(f"removal {removal.seq}", lambda data: data.log_removal(uid, removal, first_seq))

    async def put_worker(self, record: WorkerRecord) -> None:
        await self._write(f"worker {record.worker_id}", lambda data: data.workers.update({record.worker_id: record}))

    async def delete_worker(self, worker_id: WorkerId) -> None:
        await self._write(f"no worker {worker_id}", lambda data: _forget(data, worker_id))


def _forget(data: StoreData, worker_id: WorkerId) -> None:
    data.workers.pop(worker_id, None)


class LocalStore(_Writes):
    """LMDB in the directory of one master."""

    def __init__(self, data: StoreData, process: Process) -> None:
        self.data, self.process = data, process
        self.master_id = process.name
        self._epoch = 0

    async def open(self) -> Epoch:
        self.data.epoch += 1
        self.data.owner, self._epoch = self.master_id, self.data.epoch
        return Epoch(self._epoch)

    async def _write(self, what: str, change: Callable[[StoreData], None]) -> None:
        await sleep(self.process.loop, 0.0005)  # on disk
        self.data.write(self.master_id, self._epoch, self.data.writes + 1, what, change, self.process.loop.time())

    async def namespaces(self) -> list[NamespaceRecord]:
        return list(self.data.namespaces.values())

    async def removals(self, uid: NamespaceUid) -> Sequence[Removal]:
        return list(self.data.removals.get(uid, ()))

    async def workers(self) -> list[WorkerRecord]:
        return list(self.data.workers.values())

    async def ping(self) -> None:
        """It is there."""

    async def close(self) -> None:
        """Nothing to do."""


class SharedStore(_Writes):
    """Redis as one master uses it: store and lease."""

    def __init__(self, process: Process, network: Network, terms: LeaseTerms) -> None:
        self.process, self.terms = process, terms
        self.master_id = process.name
        self._pool = Pool(network, process, ADDRESS)
        self._epoch: Epoch | None = None
        self._number = 0
        self._turn = asyncio.Lock()

    async def open(self) -> Epoch:
        assert self._epoch is not None, "open after adopt"
        return self._epoch

    def adopt(self, epoch: Epoch | None) -> None:
        self._epoch = epoch

    async def take(self, *, floor: Epoch, address: str) -> LeaseReply:
        reply: LeaseReply = await self._ask(("take", self.master_id, address, floor, self.terms.ttl_ms))
        if reply.granted:
            self._number = reply.writes
        return reply

    async def renew(self, epoch: Epoch, *, address: str) -> LeaseReply:
        reply: LeaseReply = await self._ask(("renew", self.master_id, address, epoch, self.terms.ttl_ms))
        return reply

    async def release(self, epoch: Epoch) -> None:
        await self._ask(("release", self.master_id, epoch))

    async def _write(self, what: str, change: Callable[[StoreData], None]) -> None:
        try:
            async with asyncio.timeout(WRITE_S), self._turn:
                if self._epoch is None:
                    raise Fenced("store: this master is not the leader")
                self._number += 1
                await self._ask(("write", self.master_id, self._epoch, self._number, what, change))
        except TimeoutError:
            raise MasterUnavailable("store: no answer in time") from None

    async def namespaces(self) -> list[NamespaceRecord]:
        return list(await self._read(lambda data: list(data.namespaces.values())))

    async def removals(self, uid: NamespaceUid) -> Sequence[Removal]:
        return list(await self._read(lambda data: list(data.removals.get(uid, ()))))

    async def workers(self) -> list[WorkerRecord]:
        return list(await self._read(lambda data: list(data.workers.values())))

    async def _read(self, what: Callable[[StoreData], Any]) -> Any:
        return await self._ask(("read", what))

    async def ping(self) -> None:
        await self._read(lambda data: data.epoch)

    async def close(self) -> None:
        self._epoch = None
        self._pool.close()

    async def _ask(self, request: tuple[Any, ...]) -> Any:
        try:
            answer = await self._pool.call(request, self.process.loop.time() + WRITE_S)
        except (ConnectionError, TimeoutError) as error:
            raise MasterUnavailable(f"store: {error}") from error
        if isinstance(answer, KVPoolError):
            raise answer
        return answer


class StoreServer:
    """The redis process."""

    def __init__(self, data: StoreData, process: Process, network: Network) -> None:
        self.data, self.process = data, process
        network.listen(process, ADDRESS, self._accept)

    def _accept(self, end: Endpoint) -> None:
        self.process.spawn(self._serve(end), name="store call")

    async def _serve(self, end: Endpoint) -> None:
        while True:
            try:
                request = await end.recv()
                end.send(self._do(request))
            except Reset:
                return

    def _do(self, request: tuple[Any, ...]) -> Any:
        data, now = self.data, self.process.loop.time()
        op, *rest = request
        args: Any = rest
        try:
            if op == "read":
                return args[0](data)
            if op == "release":
                return data.release(*args)
            return getattr(data, op)(*args, now)
        except KVPoolError as error:
            return error
