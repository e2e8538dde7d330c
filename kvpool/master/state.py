"""All that a master knows while it runs, and every step that changes it. No gRPC, no streams: `service` and `session` call it.

Owns the catalog, the members, the memory of the gone, each namespace's removals and the ring of events, and keeps them in step: a
change of the index goes into the catalog, into `gone` and into the ring in one step, without a wait in between. What must
survive is written to the store first. On the loop only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvpool.core.catalog import Catalog, Gone, Replicas
from kvpool.core.drain import Phase
from kvpool.core.keys import split_keys
from kvpool.core.membership import Change, Member, Membership, WorkerState
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.pins import PinBook
from kvpool.core.removals import Missed, Removal, RemovalLog
from kvpool.core.session import Inbox, ReportBatch, unpack_cause
from kvpool.core.types import Epoch, Holder, Key, MissCause, NamespaceUid, WorkerId
from kvpool.errors import KVPoolError, LayoutMismatch, MasterUnavailable, NamespaceNotFound, QuotaExceeded
from kvpool.master.store import NamespaceRecord, PinRecord, Store, WorkerRecord
from kvpool.master.watch import Changed, Counters, Emptied, EventLog, HolderRetired, HolderSeen
from kvpool.v1 import master_pb2 as pb

log = logging.getLogger(__name__)

NAMESPACES_MAX: Final = 10_000  # all of them go into every Welcome
KNOWN_WORKERS_MAX: Final = 4_096  # workers that may have blocks while they are away; past it the oldest are forgotten
LOAD_NAMESPACES: Final = 16  # whose removals are read at the same time
PURGE_KEYS: Final = 8_192  # looked at in one step of a purge: a few ms of the loop
TIERS_ONLY: Final = bytes(state & 0x0F for state in range(256))
DOWN: Final = int(WorkerState.DOWN)


@dataclass(slots=True)
class Namespace:
    spec: NamespaceSpec
    log: RemovalLog
    ordinal: int
    born_here: bool  # created in this epoch: what is not remembered as gone was never stored
    misses: dict[MissCause, int] = field(default_factory=dict)
    pins: PinBook = field(default_factory=PinBook)  # times of the wall clock


@dataclass(slots=True)
class Extra:
    """What a member's stream said beyond its info."""

    inbox: Inbox = field(default_factory=Inbox)
    tiers: tuple[pb.TierStatus, ...] = ()
    http: str = ""
    pid: int = 0
    version: str = ""
    drain: pb.DrainStatus | None = None  # as its last heartbeat said
    uses: tuple[pb.NamespaceUse, ...] = ()  # of namespaces with a quota, as its last heartbeat said


@dataclass(slots=True)
class Counts:
    """Plain ints; `http` exports them."""

    reports: int = 0
    report_keys: int = 0
    reports_duplicate: int = 0
    reports_gap: int = 0
    inventories: int = 0
    inventory_keys: int = 0
    sessions: int = 0
    sessions_refused: int = 0
    workers_lost: int = 0
    removals: int = 0
    removals_pending: int = 0
    peers_reported: int = 0
    lookups: int = 0
    lookup_keys: int = 0
    rpc_errors: dict[str, int] = field(default_factory=dict)


class MasterState:
    """Made by `load`. `now_ms` is a monotonic clock, `wall_ms` that of the store."""

    def __init__(self, store: Store, epoch: Epoch, *, settings: Limits, now_ms: Callable[[], int],
                 wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:  # fmt: skip
        self.store = store
        self.epoch = epoch
        self.settings = settings
        self.now_ms, self.wall_ms = now_ms, wall_ms
        self.catalog = Catalog()
        self.gone = Gone(settings.gone_memory_keys)
        self.events = EventLog(coalesce_ms=settings.watch_coalesce_ms)
        self.watch_counters = Counters()
        self.counts = Counts()
        self.namespaces: dict[NamespaceUid, Namespace] = {}
        self.by_name: dict[str, Namespace] = {}
        self.records: dict[WorkerId, WorkerRecord] = {}
        self.extras: dict[WorkerId, Extra] = {}
        self.members: Membership = self._membership(())
        self._ordinal = 0
        self._creating = asyncio.Lock()
        self.pinning = asyncio.Lock()  # the same of pins
        self._logging = asyncio.Lock()  # removals reach the store one after the other
        self._unsure: dict[str, NamespaceUid] = {}  # namespaces whose creation the store did not confirm
        self._unwritten: dict[WorkerId, None] = {}  # workers whose record the store does not have as it is here
        self.write_wanted = asyncio.Event()
        self.purge_wanted = asyncio.Event()
        self.leader = ""

    def _membership(self, known: Sequence[WorkerId]) -> Membership:
        s = self.settings
        return Membership(
            suspect_after_ms=s.suspect_after_ms,
            dead_after_ms=s.dead_after_ms,
            rebuild_grace_ms=s.rebuild_grace_ms,
            known=known,
            now_ms=self.now_ms(),
        )

    async def load(self) -> None:
        """Reads back what the store has. Workers that were connected when a master last wrote are waited for (`complete`)."""
        for record, entries in await self._with_removals(await self.store.namespaces()):
            removals = RemovalLog.of(entries, keys_max=self.settings.removal_log_max, seq=record.spec.removal_seq)
            self._add(Namespace(replace(record.spec, removal_seq=removals.seq), removals, record.ordinal, born_here=False))
            self._ordinal = max(self._ordinal, record.ordinal)
        for uid, pin in await self.store.pins():
            if uid in self.namespaces:
                self.namespaces[uid].pins.set(pin.key, pin.level, pin.until_ms)
        for worker in await self.store.workers():
            if worker.connected:  # it may have seen every namespace that there is
                worker = replace(worker, seen_ordinal=self._ordinal)
            self.records[worker.worker_id] = worker
        self.members = self._membership([w.worker_id for w in self.records.values() if w.connected])

    async def _with_removals(self, records: list[NamespaceRecord]) -> list[tuple[NamespaceRecord, Sequence[Removal]]]:
        """Each with what its log has, some of them read at the same time: a store may be far away."""
        found: list[tuple[NamespaceRecord, Sequence[Removal]]] = [(r, ()) for r in records if not r.spec.removal_seq]
        some = [record for record in records if record.spec.removal_seq]
        for start in range(0, len(some), LOAD_NAMESPACES):
            part = some[start : start + LOAD_NAMESPACES]
            found += zip(part, await asyncio.gather(*(self.store.removals(r.spec.uid) for r in part)), strict=True)
        return found

    # --- namespaces -----------------------------------------------------------------------------------------------------

    def _add(self, namespace: Namespace) -> None:
        self.namespaces[namespace.spec.uid] = self.by_name[namespace.spec.name] = namespace
        self.catalog.open_namespace(namespace.spec.uid, sized=namespace.spec.variable)

    def has_namespace(self, uid: NamespaceUid) -> bool:
        return uid in self.namespaces

    def namespace(self, uid: NamespaceUid) -> Namespace:
        try:
            return self.namespaces[uid]
        except KeyError:
            raise NamespaceNotFound(f"namespace: no namespace has the uid {uid.hex()} (any more)") from None

    async def create(self, wanted: NamespaceSpec) -> tuple[NamespaceSpec, bool]:
        """The namespace of this name, made when there is none. (spec, True when it was made.) Raises LayoutMismatch when the
        existing one has another layout, hash or salt."""
        async with self._creating:
            existing = self.by_name.get(wanted.name)
            if existing is not None:
                _check_same(existing.spec, wanted)
                return existing.spec, False
            if len(self.namespaces) >= NAMESPACES_MAX:
                raise QuotaExceeded(f"namespace: {NAMESPACES_MAX} namespaces exist, which is the limit")
            # Where the store did not answer, the record may be there: the next attempt writes over it, for one name has one uid.
            uid = self._unsure.get(wanted.name) or NamespaceUid(os.urandom(16))
            spec = replace(wanted, uid=uid, removal_seq=0)
            try:
                await self.store.put_namespace(NamespaceRecord(spec, self._ordinal + 1))
            except BaseException:
                self._unsure[wanted.name] = uid
                while len(self._unsure) > NAMESPACES_MAX:
                    del self._unsure[next(iter(self._unsure))]
                raise
            self._unsure.pop(wanted.name, None)
            self._ordinal += 1
            self._add(Namespace(spec, RemovalLog(keys_max=self.settings.removal_log_max), self._ordinal, born_here=True))
            log.info("event=namespace_created name=%r uid=%s block_bytes=%d", spec.name, spec.uid.hex(), spec.block_bytes)
            return spec, True

    def open(self, name: str, *, fingerprint: bytes) -> NamespaceSpec:
        """The namespace of this name. A fingerprint that is given must be its own."""
        namespace = self.by_name.get(name)
        if namespace is None:
            raise NamespaceNotFound(f"namespace: {name!r} does not exist")
        if fingerprint and fingerprint != namespace.spec.fingerprint:
            raise LayoutMismatch(
                f"namespace: {name!r} has the layout fingerprint {namespace.spec.fingerprint.hex()}, not {fingerprint.hex()}"
            )
        return namespace.spec

    async def delete(self, namespace: Namespace) -> None:
        """Forgets the namespace for good; a worker that comes back with blocks of it is told to drop them."""
        async with self._creating:
            await self.store.delete_namespace(namespace.spec.uid)
        if self.namespaces.pop(namespace.spec.uid, None) is None:
            return
        del self.by_name[namespace.spec.name]
        self.catalog.drop_namespace(namespace.spec.uid)
        self.purge_wanted.set()
        self.events.append(Emptied(namespace.spec.uid))
        log.info("event=namespace_deleted name=%r uid=%s", namespace.spec.name, namespace.spec.uid.hex())

    # --- workers --------------------------------------------------------------------------------------------------------

    def known_away(self, namespace: Namespace, connected: set[WorkerId]) -> list[WorkerId]:
        """Workers that may have blocks of the namespace and cannot be told now."""
        return sorted(
            record.worker_id
            for record in self.records.values()
            if record.worker_id not in connected and (record.connected or record.seen_ordinal >= namespace.ordinal)
        )

    async def remember(self, member: Member, extra: Extra, *, connected: bool) -> None:
        """Writes down that this worker may have blocks. One that leaves empty is through with its drain."""
        info = member.info
        before = self.records.get(info.worker_id)
        draining = before is not None and before.draining and not (member.drained and not connected)
        rate_bytes = before.drain_rate_bytes if before is not None and draining else 0
        await self._write_worker(
            WorkerRecord(info.worker_id, info.incarnation, info.host_id, info.address, extra.http, self._ordinal, connected,
                         draining, rate_bytes)
        )  # fmt: skip

    async def remember_away(self, worker_id: WorkerId) -> None:
        """The worker is away; it may have blocks of every namespace that there is by now."""
        record = self.records.get(worker_id)
        if record is not None and record.connected:
            self.records[worker_id] = replace(record, seen_ordinal=self._ordinal, connected=False)
            self._write_later(worker_id)

    async def _write_worker(self, record: WorkerRecord) -> None:
        self.records.pop(record.worker_id, None)
        self.records[record.worker_id] = record
        self._unwritten[record.worker_id] = None
        await self.write_workers()
        while len(self.records) > KNOWN_WORKERS_MAX:
            oldest = next((r for r in self.records.values() if self.members.get(r.worker_id) is None), None)
            if oldest is None:
                break
            log.warning("event=worker_forgotten worker=%s reason=too_many_known", oldest.worker_id)
            await self.forget_worker(oldest.worker_id)

    async def forget_worker(self, worker_id: WorkerId) -> None:
        """It cannot have blocks any more."""
        if self.records.pop(worker_id, None) is not None:
            self._unwritten[worker_id] = None
            await self.write_workers()

    def _write_later(self, worker_id: WorkerId) -> None:
        self._unwritten[worker_id] = None
        self.write_wanted.set()

    async def write_workers(self) -> bool:
        """Writes the records of workers that the store does not have yet. False: it is away, they wait here; sessions go on."""
        for worker_id in list(self._unwritten):
            if worker_id not in self._unwritten:
                continue  # another call is at it
            del self._unwritten[worker_id]
            record = self.records.get(worker_id)
            try:
                if record is None:
                    await self.store.delete_worker(worker_id)
                else:
                    await self.store.put_worker(record)
            except BaseException as error:
                self._write_later(worker_id)
                if isinstance(error, MasterUnavailable):  # the store is away, or another master leads
                    return False
                raise
        return True

    async def rewrite(self) -> None:
        """Writes all that must survive into a store that was set back and has lost writes which it had confirmed. What it still
        has right is left alone; may be repeated."""
        async with self._creating, self._logging, self.pinning:
            stored = {record.spec.uid: record for record in await self.store.namespaces()}
            for uid in stored.keys() - self.namespaces.keys():
                await self.store.delete_namespace(uid)
            for uid, namespace in list(self.namespaces.items()):
                before = stored.get(uid)
                if before is None or before != NamespaceRecord(namespace.spec, namespace.ordinal):
                    await self.store.put_namespace(NamespaceRecord(namespace.spec, namespace.ordinal))
                there = await self.store.removals(uid)
                own = namespace.log.entries
                n_same = next((i for i, (a, b) in enumerate(zip(there, own, strict=False)) if a != b), min(len(there), len(own)))
                for removal in own[n_same:]:
                    await self.store.log_removal(uid, removal, first_seq=own[0].seq)
            await rewrite_pins(self)
            away = [worker.worker_id for worker in await self.store.workers() if worker.worker_id not in self.records]
            self._unwritten.update(dict.fromkeys([*away, *self.records]))
        await self.write_workers()

    # --- drains ---------------------------------------------------------------------------------------------------------

    def drain_task(self, worker_id: WorkerId) -> pb.DrainTask:
        """What an operator wants of this worker."""
        record = self.records.get(worker_id)
        if record is None or not record.draining:
            return pb.DrainTask()
        return pb.DrainTask(active=True, rate_bytes=record.drain_rate_bytes)

    async def set_drain(self, member: Member, *, draining: bool, rate_bytes: int) -> pb.DrainTask:
        """Writes the operator's wish down; what the worker must be told. A later word replaces an earlier one."""
        worker_id = member.info.worker_id
        record = self.records.get(worker_id)
        if record is None:
            raise KVPoolError(f"worker {worker_id!r} is just coming or going; try again")
        record = replace(record, draining=draining, drain_rate_bytes=rate_bytes if draining else 0)
        await self.store.put_worker(record)  # before it is known here: an operator hears at once that the store is away
        self.records[worker_id] = record
        extra = self.extras.get(worker_id)
        if extra is not None:
            extra.drain = None
        self.settle(self.members.drain(worker_id, draining=draining))
        log.info("event=drain worker=%s draining=%s rate_bytes=%d", worker_id, draining, rate_bytes)
        return self.drain_task(worker_id)

    def note_drain(self, member: Member, extra: Extra, said: pb.DrainStatus | None) -> None:
        """What a heartbeat says of a drain. It may be older than the operator's last word."""
        worker_id = member.info.worker_id
        wanted = self.drain_task(worker_id).active
        if said is None and wanted:
            return
        if said is not None and not said.leaving and not wanted:
            said = None
        extra.drain = said
        done = said is not None and said.phase == Phase.DONE
        self.settle(self.members.drain(worker_id, draining=said is not None, drained=done))

    async def forget(self, worker_id: WorkerId) -> None:
        """The worker is away for good: no removal waits for it. Should it come back all the same, it is told what it missed."""
        await self.store.delete_worker(worker_id)
        self.settle(self.members.leave(worker_id))
        self.records.pop(worker_id, None)
        log.info("event=worker_forgotten worker=%s reason=operator", worker_id)

    def settle(self, change: Change) -> None:
        """Does what a step of the members calls for: events, entries taken out."""
        for holder in change.retired:
            self.catalog.retire(holder)
            self.events.append(HolderRetired(holder))
        if change.retired:
            self.purge_wanted.set()
        for worker_id in change.changed:
            member = self.members.get(worker_id)
            if member is None:
                self.extras.pop(worker_id, None)
                continue
            for info in self._infos(member):
                self.events.append(HolderSeen(info))

    def purge_step(self) -> bool:
        """Takes some entries of retired holders out; True while there is more to do."""
        more, lost = self.catalog.purge(PURGE_KEYS)
        by_namespace: dict[NamespaceUid, list[Key]] = {}
        for uid, key in lost:
            by_namespace.setdefault(uid, []).append(key)
        for uid, keys in by_namespace.items():
            self.gone.add(uid, keys, MissCause.WORKER_LOST)
        return more

    def complete(self) -> bool:
        return self.members.complete(now_ms=self.now_ms())

    def _infos(self, member: Member) -> list[pb.HolderInfo]:
        info = member.info
        return [
            pb.HolderInfo(
                holder=holder,
                worker_id=info.worker_id,
                incarnation=info.incarnation,
                host_id=info.host_id,
                address=info.address,
                unix_name=info.unix_name,
                state=int(member.told_state),
                free_bytes=member.free_bytes,
                capacity_bytes=member.capacity_bytes,
                up_ms=member.up_ms(self.now_ms()),
            )
            for holder in member.holders
        ]

    def holder_info(self, holder: Holder) -> pb.HolderInfo | None:
        member = self.members.of_holder(holder)
        if member is None:
            return None
        return next(info for info in self._infos(member) if info.holder == holder)

    def holder_infos(self) -> list[pb.HolderInfo]:
        return [info for member in self.members for info in self._infos(member)]

    def worker_statuses(self) -> list[pb.WorkerStatus]:
        """Members, then workers that are known and away (DOWN)."""
        statuses = []
        for member in self.members:
            extra = self.extras.get(member.info.worker_id) or Extra()
            drain = extra.drain
            if drain is None and member.draining:
                drain = pb.DrainStatus(rate_bytes=self.drain_task(member.info.worker_id).rate_bytes)
            statuses.append(
                pb.WorkerStatus(
                    info=self._infos(member)[0], tiers=extra.tiers, http=extra.http, pid=extra.pid, version=extra.version,
                    drain=drain,
                )
            )
        for record in self.records.values():
            if self.members.get(record.worker_id) is None:
                info = pb.HolderInfo(
                    worker_id=record.worker_id,
                    incarnation=record.incarnation,
                    host_id=record.host_id,
                    address=record.address,
                    state=DOWN,
                )
                drain = pb.DrainStatus(rate_bytes=record.drain_rate_bytes) if record.draining else None
                statuses.append(pb.WorkerStatus(info=info, http=record.http, drain=drain))
        return statuses

    # --- the index ------------------------------------------------------------------------------------------------------

    def apply(self, holder: Holder, batch: ReportBatch) -> bool:
        """One namespace's changes of one holder. False: there is no such namespace (any more)."""
        uid = batch.namespace
        if uid not in self.namespaces:
            return False
        gone = self.catalog.apply(uid, holder, batch.keys, batch.tiers, sizes=batch.sizes)
        self.events.append(Changed(uid, holder, batch.keys, batch.tiers.translate(TIERS_ONLY)))
        if gone:
            by_cause: dict[MissCause, list[Key]] = {}
            keys = split_keys(batch.keys)
            for i in gone:
                by_cause.setdefault(unpack_cause(batch.tiers[i]) or MissCause.UNKNOWN, []).append(keys[i])
            for cause, names in by_cause.items():
                self.gone.add(uid, names, cause)
        return True

    def locate(self, namespace: Namespace, keys: Sequence[Key]) -> list[Replicas]:
        self.counts.lookups += 1
        self.counts.lookup_keys += len(keys)
        return self.catalog.locate(namespace.spec.uid, keys)

    def miss_cause(self, namespace: Namespace, key: Key) -> MissCause:
        """Why nobody has the key; counted for the namespace."""
        uid = namespace.spec.uid
        if self.catalog.lost(uid, key):
            cause = MissCause.WORKER_LOST
        else:
            never = namespace.born_here and not self.gone.forgot
            cause = self.gone.cause(uid, key) or (MissCause.NEVER_STORED if never else MissCause.UNKNOWN)
        namespace.misses[cause] = namespace.misses.get(cause, 0) + 1
        return cause

    async def log_removal(self, namespace: Namespace, keys: bytes, *, everything: bool) -> Removal:
        """Writes the removal down. From its end to the caller's next wait nothing else runs on the loop: the caller tells the
        workers before it waits, and a worker that says hello later finds it in the log."""
        async with self._logging:
            removal = Removal(namespace.log.seq + 1, keys, everything)
            first_seq = removal.seq if everything else namespace.log.first_seq
            await self.store.log_removal(namespace.spec.uid, removal, first_seq=first_seq)
            self.namespace(namespace.spec.uid)  # deleted meanwhile: NamespaceNotFound
            namespace.log.append(removal)
            namespace.spec = replace(namespace.spec, removal_seq=removal.seq)
            self.counts.removals += 1
            return removal

    def take_out(self, namespace: Namespace, removal: Removal) -> tuple[bytearray, int]:
        """The removed keys leave the index. Returns u8 [n] of which were there, and how many keys that are in all."""
        uid = namespace.spec.uid
        if removal.everything:
            n = self.catalog.drop_all(uid)
            self.purge_wanted.set()
            self.events.append(Emptied(uid))
            return bytearray(), n
        keys = split_keys(removal.keys)
        by_holder: dict[Holder, list[Key]] = {}
        had = bytearray(len(keys))
        for i, (key, replicas) in enumerate(zip(keys, self.catalog.locate(uid, keys), strict=True)):
            had[i] = bool(replicas)
            for holder, _ in replicas:
                by_holder.setdefault(holder, []).append(key)
        n = self.catalog.forget(uid, keys)
        for holder, names in by_holder.items():
            self.events.append(Changed(uid, holder, b"".join(names), bytes(len(names))))
        self.gone.add(uid, (key for key, was in zip(keys, had, strict=True) if was), MissCause.REMOVED)
        return had, n

    def missed(self, namespace: Namespace, applied_seq: int) -> Missed | None:
        return namespace.log.missed(applied_seq)


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings that the state needs (`config.MasterSettings` has them, with defaults and docs)."""

    suspect_after_ms: int
    dead_after_ms: int
    rebuild_grace_ms: int
    heartbeat_ms: int
    watch_coalesce_ms: int
    removal_log_max: int
    gone_memory_keys: int


async def rewrite_pins(state: MasterState) -> None:
    """The store gets what is pinned, and loses what is not; with `pinning` held."""
    stored: dict[NamespaceUid, dict[Key, PinRecord]] = {}
    for uid, pin in await state.store.pins():
        stored.setdefault(uid, {})[pin.key] = pin
    for uid, namespace in list(state.namespaces.items()):
        own = {key: PinRecord(key, level, until_ms) for key, level, until_ms in namespace.pins.items()}
        there = stored.get(uid, {})
        if missing := [pin for key, pin in own.items() if there.get(key) != pin]:
            await state.store.put_pins(uid, missing)
        if ended := [key for key in there if key not in own]:
            await state.store.delete_pins(uid, ended)


def _check_same(existing: NamespaceSpec, wanted: NamespaceSpec) -> None:
    """Raises LayoutMismatch naming everything that differs."""
    differs = []
    if existing.fingerprint != wanted.fingerprint:
        before, after = existing.layout, wanted.layout
        for name in before.__dataclass_fields__:
            if getattr(before, name) != getattr(after, name):
                differs.append(f"{name} is {getattr(before, name)!r}, not {getattr(after, name)!r}")
    if existing.hash != wanted.hash:
        differs.append(f"hash is {existing.hash.value!r}, not {wanted.hash.value!r}")
    if existing.salt != wanted.salt:
        differs.append("salt is another one")
    if differs or existing.fingerprint != wanted.fingerprint:
        raise LayoutMismatch(
            f"namespace: {existing.name!r} exists with the layout fingerprint {existing.fingerprint.hex()}, yours is "
            f"{wanted.fingerprint.hex()}: {'; '.join(differs)}"
        )
