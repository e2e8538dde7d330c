"""The store of several masters: Redis, alone, under Sentinel or as a Cluster.

    {kvpool:POOL}:meta              hash     epoch, owner, address, writes     see `redis_scripts`
    {kvpool:POOL}:lease             string   owner of the lease, with a time to live
    {kvpool:POOL}:namespaces        hash     uid -> JSON
    {kvpool:POOL}:removal_seqs      hash     uid -> number of the newest removal
    {kvpool:POOL}:removals:UID      list     u64 little-endian number | u8 everything | keys; trimmed with each new one
    {kvpool:POOL}:pins              hash     uid and key -> u8 level, u64 little-endian end (ms of the wall clock)
    {kvpool:POOL}:workers           hash     worker id -> JSON

Every write is a script that changes nothing unless this store's (epoch, owner) lead, and that is numbered: one that was held
up on the way is refused when a later one came before it. What is read is checked as if a stranger had written it.

Durability is that of the redis: with `appendfsync everysec` a crash of its machine can lose the last second. Replication is
asynchronous: where replicas are connected, a write waits WAIT_MS for one of them (`unreplicated` counts those that got none).
What a fail-over loses all the same is noticed by the numbers (`rolled_back`). Who leads is decided in `core.election`;
connections, deadlines and errors are `redis_link`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvpool.core.election import LeaseTerms, Role
from kvpool.core.removals import Removal
from kvpool.core.types import KEY_BYTES, UID_BYTES, Epoch, Key, NamespaceUid, WorkerId
from kvpool.errors import ConfigError, Fenced, KVPoolError, StoreUnavailable
from kvpool.master import redis_scripts as scripts
from kvpool.master.election import Elector, LeaseReply, end_task
from kvpool.master.redis_link import RedisLink, StoreDamaged, parse
from kvpool.master.store import (
    PIN_BYTES,
    NamespaceRecord,
    PinRecord,
    WorkerRecord,
    namespace_from_bytes,
    namespace_to_bytes,
    pin_from_bytes,
    pin_to_bytes,
    worker_from_bytes,
    worker_to_bytes,
)

log = logging.getLogger(__name__)

WRITE_S: Final = 1.5  # a whole write: its turn, the script, the replica
WARM_S: Final = 2.0  # to connect, after a request about the lease failed
WAIT_MS: Final = 100  # for a replica; shorter than a read's timeout
REPLICAS_KNOWN_S: Final = 5.0  # then redis is asked again how many there are
PINS_A_WRITE: Final = 4_096  # some ms of redis, which does nothing else meanwhile
PAGE: Final = 256  # records or log entries in one answer
OPEN_EXTRA_MS: Final = 1_000  # over a lease's time, in which a master that died lets the place go

_ENTRY: Final = struct.Struct("<QB")  # number, everything


@dataclass(slots=True)
class StoreCounts:
    """Plain ints; `http` exports them."""

    writes: int = 0
    fenced: int = 0
    unreplicated: int = 0
    rolled_back: int = 0


class RedisStore:
    """See `store.Store`. Between `adopt(epoch)` and `adopt(None)` it writes; without, all writes raise Fenced. `open` sees to it
    by itself where no `Elector` of the caller's does. Raises StoreUnavailable within WRITE_S when redis does not answer."""

    def __init__(self, url: str, *, master_id: str = "", address: str = "", terms: LeaseTerms | None = None) -> None:
        self.place = parse(url)
        self.master_id = master_id or f"m-{uuid.uuid4().hex[:12]}"
        self.owner = f"{self.master_id}.pid{os.getpid()}.{uuid.uuid4().hex}"  # of one start: who comes back is another one
        self.terms = terms or LeaseTerms()
        self.counts = StoreCounts()
        self._address = address
        tag = f"{{kvpool:{self.place.pool}}}"
        self._meta, self._lease = f"{tag}:meta", f"{tag}:lease"
        self._namespaces, self._seqs, self._workers = f"{tag}:namespaces", f"{tag}:removal_seqs", f"{tag}:workers"
        self._removals_prefix, self._pins = f"{tag}:removals:", f"{tag}:pins"
        self._link = RedisLink(self.place, slot_key=self._meta)
        self._epoch: Epoch | None = None
        self._holder = ""  # of the lease, where it was another's
        self._turn = asyncio.Lock()  # writes reach redis in the order of their numbers
        self._number = 0
        self._confirmed = 0
        self._replicas = 0
        self._replicas_at = -REPLICAS_KNOWN_S
        self._keeper: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None

    @property
    def link_counts(self) -> Any:
        return self._link.counts

    # --- the place ------------------------------------------------------------------------------------------------------

    async def open(self) -> Epoch:
        """With an epoch that was adopted: that one. Else takes the lease and keeps it until `close`; ConfigError when another
        master keeps it."""
        if self._link.closed:
            self._link = RedisLink(self.place, slot_key=self._meta)
        await self._check_server()
        if self._epoch is not None:
            return self._epoch
        elector = Elector(self, address=self._address, terms=self.terms)
        self._keeper = asyncio.create_task(elector.run(), name="kvpool-lease")
        try:
            async with asyncio.timeout((self.terms.ttl_ms + OPEN_EXTRA_MS) / 1000):
                standing = elector.standing()
                while standing.role is not Role.LEADER:
                    standing = await elector.changed(standing)
            return standing.epoch
        except TimeoutError:
            await self.close()
            raise ConfigError(f"store: {self.place} is in use by the master {self._holder or 'whose name is unknown'}") from None
        except BaseException:
            await self.close()
            raise

    async def _check_server(self) -> None:
        info = await self._info()
        if info.get("role") != "master":
            raise StoreUnavailable(f"store: {self.place} is a replica (its role is {info.get('role')!r}), which takes no writes")
        with contextlib.suppress(KVPoolError):  # some services allow no INFO of this kind
            durable = await self._link.call("INFO", "persistence")
            if isinstance(durable, dict) and not int(durable.get("aof_enabled", 1)):
                log.warning("event=store_not_durable store=%s reason=appendonly_is_off", self.place)

    async def _info(self) -> dict[str, Any]:
        info = await self._link.call("INFO", "replication")
        if not isinstance(info, dict):
            raise StoreUnavailable(f"store: {self.place} does not speak as redis does")
        replicas = (value for name, value in info.items() if name.startswith("slave") and isinstance(value, dict))
        self._replicas = sum(value.get("state") == "online" for value in replicas)
        self._replicas_at = time.monotonic()
        return info

    async def ping(self) -> None:
        await self._link.call("HGET", self._meta, "epoch")

    async def close(self) -> None:
        """Gives the lease back when `open` took it; bounded, also while redis is away."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await end_task(keeper)
        self._epoch = None
        if self._warming is not None:
            await end_task(self._warming)
        await self._link.close()

    # --- the lease: what an Elector asks for ----------------------------------------------------------------------------

    def adopt(self, epoch: Epoch | None) -> None:
        """From here on writes carry this epoch; None: none are made."""
        self._epoch = epoch

    async def take(self, *, floor: Epoch, address: str) -> LeaseReply:
        """The lease and a new epoch above `floor`, or who has it. With replicas, one has the epoch, or WAIT_MS are over."""
        script = ["EVAL", scripts.TAKE, 2, self._meta, self._lease, self.owner, address, self.terms.ttl_ms, floor]
        reply = _lease_reply((await self._lease_calls([script, *self._wait()]))[0])
        if reply.granted:
            self._number = self._confirmed = reply.writes
        else:
            self._holder = f"{reply.owner} at {reply.address}" if reply.address else reply.owner
        return reply

    async def renew(self, epoch: Epoch, *, address: str) -> LeaseReply:
        confirmed = self._confirmed
        script = ["EVAL", scripts.RENEW, 2, self._meta, self._lease, self.owner, epoch, self.terms.ttl_ms, address]
        reply = _lease_reply((await self._lease_calls([script]))[0])
        if reply.granted and reply.writes < confirmed and epoch == self._epoch:
            self.counts.rolled_back += 1
            self._confirmed = reply.writes
            log.error("event=store_rolled_back store=%s lost_writes=%d", self.place, confirmed - reply.writes)
        return reply

    async def _lease_calls(self, commands: list[list[Any]]) -> list[Any]:
        try:
            return await self._link.calls(commands, lane="lease")
        except BaseException:  # cancelled too: its connection is gone, and making one may take longer than a reply may
            if self._warming is None or self._warming.done():
                self._warming = asyncio.create_task(self._warm(), name="kvpool-lease-warm")
            raise

    async def _warm(self) -> None:
        """Leaves a connection for the next request about the lease."""
        with contextlib.suppress(KVPoolError):
            await self._link.call("PING", lane="lease", deadline_s=WARM_S)

    async def release(self, epoch: Epoch) -> None:
        await self._link.call("EVAL", scripts.RELEASE, 2, self._meta, self._lease, self.owner, epoch, lane="lease")

    # --- writes ---------------------------------------------------------------------------------------------------------

    def _wait(self) -> list[list[Any]]:
        return [["WAIT", 1, WAIT_MS]] if self._replicas else []

    async def _write(self, script: str, keys: Sequence[str], *args: Any) -> None:
        """One numbered, fenced write. Cancelled or StoreUnavailable: it may be done, but never after a later one."""
        try:
            async with asyncio.timeout(WRITE_S), self._turn:
                epoch = self._epoch
                if epoch is None:
                    raise Fenced("store: this master is not the leader")
                if time.monotonic() - self._replicas_at > REPLICAS_KNOWN_S:
                    await self._info()
                self._number += 1
                number = self._number
                command = ["EVAL", script, len(keys), *keys, self.owner, epoch, number, *args]
                answers = await self._link.calls([command, *self._wait()])
                if answers[0] != number:
                    raise StoreUnavailable(f"store: {self.place} answered write {number} with {answers[0]!r:.100}")
                self._confirmed = max(self._confirmed, number)
                self.counts.writes += 1
                if len(answers) > 1 and int(answers[1]) < 1:
                    self.counts.unreplicated += 1
                    log.warning("event=write_unreplicated store=%s waited_ms=%d", self.place, WAIT_MS)
        except TimeoutError:
            raise StoreUnavailable(f"store: no answer from {self.place} in time") from None
        except Fenced:
            self.counts.fenced += 1
            raise

    async def put_namespace(self, record: NamespaceRecord) -> None:
        raw = namespace_to_bytes(record)
        keys = (self._meta, self._namespaces, self._seqs)
        await self._write(scripts.PUT_NAMESPACE, keys, record.spec.uid.hex(), raw, record.spec.removal_seq)

    async def delete_namespace(self, uid: NamespaceUid) -> None:
        await self._write(scripts.DELETE_NAMESPACE, (*self._namespace_keys(uid), self._pins), uid.hex(), uid)

    async def log_removal(self, uid: NamespaceUid, removal: Removal, *, first_seq: int) -> None:
        entry = _ENTRY.pack(removal.seq, removal.everything) + removal.keys
        await self._write(scripts.LOG_REMOVAL, self._namespace_keys(uid), uid.hex(), removal.seq, first_seq, entry)

    async def put_pins(self, uid: NamespaceUid, pins: Sequence[PinRecord]) -> None:
        keys = (self._meta, self._namespaces, self._pins)
        for start in range(0, len(pins), PINS_A_WRITE):
            packed = b"".join(uid + pin.key + pin_to_bytes(pin) for pin in pins[start : start + PINS_A_WRITE])
            await self._write(scripts.PUT_PINS, keys, uid.hex(), UID_BYTES + KEY_BYTES, PIN_BYTES, packed)

    async def delete_pins(self, uid: NamespaceUid, keys: Sequence[Key]) -> None:
        for start in range(0, len(keys), PINS_A_WRITE):
            packed = b"".join(uid + key for key in keys[start : start + PINS_A_WRITE])
            await self._write(scripts.DELETE_PINS, (self._meta, self._pins), UID_BYTES + KEY_BYTES, packed)

    async def put_worker(self, record: WorkerRecord) -> None:
        await self._write(scripts.PUT_WORKER, (self._meta, self._workers), record.worker_id, worker_to_bytes(record))

    async def delete_worker(self, worker_id: WorkerId) -> None:
        await self._write(scripts.DELETE_WORKER, (self._meta, self._workers), worker_id)

    def _namespace_keys(self, uid: NamespaceUid) -> tuple[str, ...]:
        return (self._meta, self._namespaces, self._seqs, self._removals_prefix + uid.hex())

    # --- reads ----------------------------------------------------------------------------------------------------------

    async def namespaces(self) -> list[NamespaceRecord]:
        seqs = {}
        async for field, raw in self._hash(self._seqs):
            if not raw.isdigit() or len(raw) > 15:
                raise self._damaged(f"{self._seqs}, field {field!r}", "no number")
            seqs[field] = int(raw)
        found = []
        async for field, raw in self._hash(self._namespaces):
            try:
                record = namespace_from_bytes(raw)
                uid = record.spec.uid
                if field.decode() != uid.hex() or len(uid) != UID_BYTES or type(record.ordinal) is not int:
                    raise ValueError("the record is of another namespace")
                spec = replace(record.spec, removal_seq=seqs.get(field, record.spec.removal_seq)).check()
            except (KVPoolError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise self._damaged(f"{self._namespaces}, field {field!r}", "no namespace") from error
            found.append(NamespaceRecord(spec, record.ordinal))
        return found

    async def removals(self, uid: NamespaceUid) -> Sequence[Removal]:
        key = self._removals_prefix + uid.hex()
        found: list[Removal] = []
        while True:
            page = await self._read(key, "LRANGE", key, len(found), len(found) + PAGE - 1)
            for raw in page:
                n_keys, rest = divmod(len(raw) - _ENTRY.size, KEY_BYTES)
                if rest or n_keys < 0:
                    raise self._damaged(key, "no removal")
                seq, kind = _ENTRY.unpack_from(raw)
                if kind > 1 or (found and seq <= found[-1].seq):
                    raise self._damaged(key, "no removal")
                found.append(Removal(seq, raw[_ENTRY.size :], bool(kind)))
            if len(page) < PAGE:
                return found

    async def pins(self) -> list[tuple[NamespaceUid, PinRecord]]:
        found = []
        async for name, raw in self._hash(self._pins):
            try:
                found.append(pin_from_bytes(name, raw))
            except ValueError as error:
                raise self._damaged(f"{self._pins}, field {name!r:.100}", "no pin") from error
        return found

    async def workers(self) -> list[WorkerRecord]:
        found = []
        async for field, raw in self._hash(self._workers):
            try:
                record = worker_from_bytes(raw)
                if field.decode() != record.worker_id or not _is_worker(record):
                    raise ValueError("a field has a wrong type")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise self._damaged(f"{self._workers}, field {field!r}", "no worker") from error
            found.append(record)
        return found

    async def _hash(self, key: str) -> AsyncIterator[tuple[bytes, bytes]]:
        """All fields of a hash, page by page: what is there from begin to end is given once."""
        cursor, seen = 0, set()
        while True:
            cursor, page = await self._read(key, "HSCAN", key, cursor, "COUNT", PAGE)
            for field, raw in page.items():
                if field not in seen:
                    seen.add(field)
                    yield field, raw
            if not int(cursor):
                return

    async def _read(self, key: str, *command: Any) -> Any:
        try:
            return await self._link.call(*command)
        except KVPoolError as error:
            if "WRONGTYPE" in str(error):
                raise self._damaged(key, "of another type") from error
            raise

    def _damaged(self, where: str, what: str) -> StoreDamaged:
        return StoreDamaged(f"store: the value under {where} in {self.place} is {what}; this pool did not write it")


def _is_worker(record: WorkerRecord) -> bool:
    texts = (record.worker_id, record.host_id, record.address, record.http)
    numbers = (record.incarnation, record.seen_ordinal, record.drain_rate_bytes)
    switches = (record.connected, record.draining)
    return all(type(value) is kind for kind, values in ((str, texts), (int, numbers), (bool, switches)) for value in values)


def _lease_reply(raw: Any) -> LeaseReply:
    """Raises StoreUnavailable when it is not what the scripts answer."""
    try:
        word, epoch, owner, address, left_ms, writes = raw
        return LeaseReply(
            granted=word in (b"taken", b"renewed"),
            epoch=Epoch(int(epoch)),
            owner=owner.decode(),
            address=address.decode(),
            left_ms=int(left_ms),
            writes=int(writes),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise StoreUnavailable("store: the answer about the lease is not one of the pool's scripts") from error
