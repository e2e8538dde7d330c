"""Streams of workers: hello, reports and inventories in, acknowledgements and tasks out.

    hello ─▶ Welcome (namespaces, what each missed, inventory wanted?) ─▶ reports ─▶ acks     RemoveTask ─▶ TaskDone
                                                                       └▶ gap ─▶ InventoryWanted ─▶ inventory parts ─▶ ack

Owns the streams and the removals under way. A worker has one stream: a newer one replaces the older. A report is acknowledged
after the index has it. A worker is listed here in the same step in which its Welcome is made, so that every removal is either in
the Welcome or sent as a task. What a report does to the index is `state`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import kvpool
from kvpool.core import version
from kvpool.core.membership import Member, WorkerInfo
from kvpool.core.removals import Removal
from kvpool.core.session import SESSION_PROTOCOL, Accept, ReportBatch
from kvpool.core.types import KEY_BYTES, MAX_BATCH_KEYS, UID_BYTES, Holder, Incarnation, NamespaceUid, Tier, WorkerId
from kvpool.errors import InvalidArgument, KVPoolError, VersionMismatch
from kvpool.master.pinning import all_pins
from kvpool.master.quotas import Quotas, Shares, changed
from kvpool.master.state import Extra, MasterState, Namespace
from kvpool.master.wire import spec_to_proto
from kvpool.v1 import master_pb2 as pb

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 5.0  # for a stream to say who it is
OUTBOX_BYTES_MAX: Final = 64 << 20  # waiting for one worker: one that reads nothing is cut, and catches up at its next hello
OUTBOX_MESSAGES_MAX: Final = 4_096
WELCOME_MISSED_BYTES_MAX: Final = 32 << 20  # of all namespaces; past it a worker drops blocks instead (messages are limited)
NAME_BYTES_MAX: Final = 256  # ids, addresses, host ids
TIERS_MAX: Final = 8  # of one heartbeat
LAST_WRITE_S: Final = 1.0  # for the message that is being written when a stream is to end
DRAIN_REASON_MAX: Final = 1_000  # characters
HELLO_NAMESPACES_MAX: Final = 65_536
SLICE_KEYS: Final = 4_096  # of an inventory that are applied at once: a few ms of the loop


@dataclass(slots=True)
class Task:
    """One removal or pin at one worker. `done`: u8 [n] of its codes and the number removed; None when it can no longer answer."""

    worker_id: WorkerId
    n_keys: int
    done: asyncio.Future[tuple[bytes, int] | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Closed(Exception):
    """The stream ends: `refused` is the last thing it says."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.refused = pb.Refused(code=code, reason=reason)


class Outbox:
    """What is to be sent on one stream, in order; acknowledgements and heartbeats merge."""

    __slots__ = ("_ack", "_bytes", "_ended", "_epoch", "_heartbeat", "_messages", "_wake")

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._messages: deque[tuple[pb.MasterMessage, int]] = deque()
        self._bytes = 0
        self._ack = 0
        self._heartbeat = False
        self._ended = False
        self._wake = asyncio.Event()

    def put(self, message: pb.MasterMessage) -> bool:
        """False when the outbox is full: the stream must be closed."""
        size = message.ByteSize()
        if len(self._messages) >= OUTBOX_MESSAGES_MAX or (self._messages and self._bytes + size > OUTBOX_BYTES_MAX):
            return False
        message.epoch = self._epoch
        self._messages.append((message, size))
        self._bytes += size
        self._wake.set()
        return True

    def ack(self, seq: int) -> None:
        self._ack = max(self._ack, seq)
        self._wake.set()

    def heartbeat(self) -> None:
        self._heartbeat = True
        self._wake.set()

    def end(self) -> None:
        """Nothing more is to be sent: the iteration ends."""
        self._ended = True
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[pb.MasterMessage]:
        while not self._ended:
            await self._wake.wait()
            self._wake.clear()
            while (self._messages or self._ack or self._heartbeat) and not self._ended:
                if self._messages:
                    message, size = self._messages.popleft()
                    self._bytes -= size
                elif self._ack:
                    message, self._ack = pb.MasterMessage(epoch=self._epoch, ack=pb.ReportAck(seq=self._ack)), 0
                else:
                    message, self._heartbeat = pb.MasterMessage(epoch=self._epoch, heartbeat=True), False
                yield message


class Stream:
    """One worker's stream after its hello."""

    def __init__(self, member: Member, extra: Extra, *, epoch: int) -> None:
        self.worker_id = member.info.worker_id
        self.member = member
        self.extra = extra
        self.outbox = Outbox(epoch)
        self.closing: asyncio.Future[Closed] = asyncio.get_running_loop().create_future()
        self.tasks: dict[int, Task] = {}
        self.told_deleted: set[NamespaceUid] = set()
        self.told_shares: Shares = {}
        self.has_disk = True  # until its first heartbeat says what it has
        self.left = False

    def close(self, code: str, reason: str) -> None:
        if not self.closing.done():
            self.closing.set_result(Closed(code, reason))

    def send(self, **message: Any) -> None:
        if not self.outbox.put(pb.MasterMessage(**message)):
            self.close("quota_exceeded", "too much is waiting to be sent to this worker")


class Sessions:
    """All streams of workers."""

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self.streams: dict[WorkerId, Stream] = {}
        self.open_streams = 0  # those that have not said hello among them
        self.quotas = Quotas(state)
        self._last_task = state.epoch << 32  # a worker may still answer what a master of before asked it

    # --- a stream -------------------------------------------------------------------------------------------------------

    async def serve(self, context: Any) -> None:
        """One Session call, to its end."""
        self.open_streams += 1
        stream: Stream | None = None
        try:
            stream = await self._welcome(context)
            reader = asyncio.ensure_future(self._read(context, stream))
            writer = asyncio.ensure_future(self._write(context, stream))
            ends: list[asyncio.Future[Any]] = [reader, writer, stream.closing]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not writer.done():  # a write that is cancelled takes the stream with it, and what is to be said last
                    stream.outbox.end()
                    await asyncio.wait([writer], timeout=LAST_WRITE_S)
            finally:
                for task in (reader, writer):
                    task.cancel()
                results = await asyncio.gather(reader, writer, return_exceptions=True)
            if stream.closing.done():
                raise stream.closing.result()
            for result in results:
                if isinstance(result, Exception):
                    raise result
        except Closed as closed:
            self._state.counts.sessions_refused += 1
            log.info("event=session_closed worker=%s code=%s reason=%r", stream.worker_id if stream else "?",
                     closed.refused.code, closed.refused.reason)  # fmt: skip
            message = pb.MasterMessage(epoch=self._state.epoch, refused=closed.refused)
            with contextlib.suppress(Exception):  # the peer may be gone: it then learns nothing, and comes back
                async with asyncio.timeout(1.0):
                    await context.write(message)
        finally:
            self.open_streams -= 1
            if stream is not None:
                await self._ended(stream)

    async def _welcome(self, context: Any) -> Stream:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            raise Closed("deadline_exceeded", f"no hello within {HELLO_TIMEOUT_S} s") from None
        if not isinstance(first, pb.WorkerMessage) or first.WhichOneof("message") != "hello":
            raise Closed("invalid_argument", "the first message of a session must be its hello")
        hello = first.hello
        try:
            info = _check_hello(hello)
        except KVPoolError as error:
            raise Closed(error.code, str(error)) from error
        state = self._state
        older = self.streams.get(info.worker_id)
        if older is not None:
            older.close("replaced", f"worker {info.worker_id} opened a newer session")
            self._lose_tasks(older)
        record = state.records.get(info.worker_id)
        seasoned = record is not None and record.incarnation == info.incarnation  # new to this master alone
        member, change = state.members.hello(info, now_ms=state.now_ms(), seasoned=seasoned)
        change += state.members.drain(info.worker_id, draining=record is not None and record.draining, drained=member.drained)
        extra = state.extras.get(info.worker_id)
        if extra is None or change.retired:  # a new member, or a new incarnation of one
            extra = Extra()
        extra.http, extra.pid, extra.version = hello.http, hello.pid, hello.version
        room = {"free_bytes": hello.info.free_bytes, "capacity_bytes": hello.info.capacity_bytes}
        change += state.members.room(info.worker_id, **room)
        resumes = hello.last_epoch == state.epoch and extra.inbox.resume(hello.next_seq)
        if not resumes:
            extra.inbox.resume(0)
            change += state.members.want_inventory(info.worker_id, now_ms=state.now_ms())
        stream = Stream(member, extra, epoch=state.epoch)
        # From here to the Welcome in the outbox there is no wait: see the module's words on removals.
        state.settle(change)
        self.streams[info.worker_id] = stream
        state.extras[info.worker_id] = extra
        stream.send(welcome=self._make_welcome(hello, inventory_wanted=not resumes))
        for task in all_pins(state):
            stream.send(pin=task)
        self.tell_quotas()
        if resumes:
            stream.outbox.ack(extra.inbox.expected - 1)  # the acknowledgement of the last stream's end may have been lost with it
        state.counts.sessions += 1
        log.info("event=session worker=%s incarnation=%016x holder=%d resumes=%s", info.worker_id, info.incarnation,
                 member.holder, resumes)  # fmt: skip
        try:
            await state.remember(member, extra, connected=True)
        except BaseException:
            await self._ended(stream)
            raise
        return stream

    def _make_welcome(self, hello: pb.WorkerHello, *, inventory_wanted: bool) -> pb.Welcome:
        state = self._state
        applied = {bytes(entry.namespace): entry.removal_seq for entry in hello.removals}
        updates = []
        room = WELCOME_MISSED_BYTES_MAX
        for uid, namespace in state.namespaces.items():
            update = pb.NamespaceUpdate(namespace=spec_to_proto(namespace.spec))
            missed = state.missed(namespace, applied.pop(uid, 0))
            if missed is not None and (missed.drop_blocks or len(missed.keys) > room):
                update.drop_blocks = True
            elif missed is not None:
                update.missed_all, update.missed_keys = missed.everything, missed.keys
                room -= len(missed.keys)
            updates.append(update)
        updates += [pb.NamespaceUpdate(namespace=pb.Namespace(uid=uid), deleted=True) for uid in applied]
        return pb.Welcome(inventory_wanted=inventory_wanted, namespaces=updates, heartbeat_ms=state.settings.heartbeat_ms,
                          drain=state.drain_task(WorkerId(hello.info.worker_id)))  # fmt: skip

    async def _write(self, context: Any, stream: Stream) -> None:
        async for message in stream.outbox:
            await context.write(message)

    async def _read(self, context: Any, stream: Stream) -> None:
        state = self._state
        while isinstance(message := await context.read(), pb.WorkerMessage):
            if self.streams.get(stream.worker_id) is not stream or state.members.get(stream.worker_id) is not stream.member:
                return  # replaced, or taken for dead: a new hello sorts it out
            state.settle(state.members.heard(stream.worker_id, now_ms=state.now_ms()))
            try:
                await self._handle(stream, message)
            except KVPoolError as error:
                raise Closed(error.code, str(error)) from error
            if stream.left:
                return
            await asyncio.sleep(0)  # other streams and calls between two batches

    async def _ended(self, stream: Stream) -> None:
        """The stream is over: its tasks will not be answered, the worker is suspected or has left."""
        state = self._state
        self._lose_tasks(stream)
        if self.streams.get(stream.worker_id) is not stream:
            return
        del self.streams[stream.worker_id]
        member = state.members.get(stream.worker_id)
        if not stream.left:
            if member is stream.member:
                state.settle(state.members.disconnected(stream.worker_id))
            log.info("event=session_ended worker=%s", stream.worker_id)
            return
        state.settle(state.members.leave(stream.worker_id))
        log.info("event=worker_left worker=%s", stream.worker_id)
        if stream.has_disk:
            await state.remember(stream.member, stream.extra, connected=False)
        else:
            await state.forget_worker(stream.worker_id)

    def _lose_tasks(self, stream: Stream) -> None:
        for task in stream.tasks.values():
            if not task.done.done():
                task.done.set_result(None)
        stream.tasks.clear()

    # --- messages -------------------------------------------------------------------------------------------------------

    async def _handle(self, stream: Stream, message: pb.WorkerMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "report":
            self._report(stream, message.report)
        elif kind == "inventory":
            await self._inventory(stream, message.inventory)
        elif kind == "heartbeat":
            self._heartbeat(stream, message.heartbeat)
        elif kind == "task_done":
            self._task_done(stream, message.task_done)
        elif kind == "leave":
            stream.left = True
        elif kind == "hello":
            raise InvalidArgument("hello: a session has one, at its start")
        # anything else is of a newer worker, and means nothing here

    def _report(self, stream: Stream, report: pb.Report) -> None:
        state, inbox = self._state, stream.extra.inbox
        batches = _check_batches(report.batches)
        accept = inbox.accept(report.seq)
        if accept is Accept.OK:
            for batch in batches:
                self._apply(stream, stream.member.holder, batch)
            state.counts.reports += 1
            state.counts.report_keys += sum(len(batch.tiers) for batch in batches)
        elif accept is Accept.DUPLICATE:
            state.counts.reports_duplicate += 1
        elif accept is Accept.GAP:
            state.counts.reports_gap += 1
            reason = f"report {report.seq} came where {inbox.expected} was expected"
            log.warning("event=report_gap worker=%s reason=%r", stream.worker_id, reason)
            state.settle(state.members.want_inventory(stream.worker_id, now_ms=state.now_ms()))
            stream.send(inventory_wanted=pb.InventoryWanted(reason=reason))
        if accept in (Accept.OK, Accept.DUPLICATE):
            stream.outbox.ack(inbox.expected - 1)

    async def _inventory(self, stream: Stream, part: pb.InventoryPart) -> None:
        """Applied in slices, for others to run in between. A stream that ends meanwhile leaves an inventory that is not complete,
        so that another one is asked for."""
        state, inbox = self._state, stream.extra.inbox
        batches = _check_batches(part.batches)
        if part.last and part.next_seq == 0:
            raise InvalidArgument("inventory.next_seq: must not be 0")
        if not inbox.inventory_part(part.next_seq, first=part.first, last=False):
            return
        if part.first:
            _, change = state.members.begin_inventory(stream.worker_id, now_ms=state.now_ms())
            state.settle(change)
        holder = stream.member.next_holder
        assert holder is not None
        for piece in _slices(batches):
            self._apply(stream, holder, piece)
            state.counts.inventory_keys += len(piece.tiers)
            await asyncio.sleep(0)
            if state.members.of_holder(holder) is not stream.member:
                return  # taken out meanwhile: replaced, or taken for dead
        state.members.inventory_part(stream.worker_id, now_ms=state.now_ms())
        if part.last:
            inbox.inventory_part(part.next_seq, first=False, last=True)
            state.settle(state.members.end_inventory(stream.worker_id))
            state.counts.inventories += 1
            log.info("event=inventory worker=%s holder=%d keys=%d", stream.worker_id, stream.member.holder,
                     state.catalog.count_of(stream.member.holder))  # fmt: skip
            stream.outbox.ack(part.next_seq - 1)

    def _apply(self, stream: Stream, holder: Holder, batch: ReportBatch) -> None:
        if not self._state.apply(holder, batch) and batch.namespace not in stream.told_deleted:
            if len(stream.told_deleted) >= HELLO_NAMESPACES_MAX:
                stream.told_deleted.clear()  # telling twice does no harm
            stream.told_deleted.add(batch.namespace)
            stream.send(namespace=pb.NamespaceUpdate(namespace=pb.Namespace(uid=batch.namespace), deleted=True))

    def _heartbeat(self, stream: Stream, heartbeat: pb.Heartbeat) -> None:
        if len(heartbeat.tiers) > TIERS_MAX:
            raise InvalidArgument(f"heartbeat.tiers: {len(heartbeat.tiers)} tiers; the limit is {TIERS_MAX}")
        if len(heartbeat.uses) > HELLO_NAMESPACES_MAX or any(len(use.namespace) != UID_BYTES for use in heartbeat.uses):
            raise InvalidArgument(f"heartbeat.uses: at most {HELLO_NAMESPACES_MAX} namespaces with uids of {UID_BYTES} bytes")
        stream.extra.tiers, stream.extra.uses = tuple(heartbeat.tiers), tuple(heartbeat.uses)
        stream.has_disk = any(tier.tier == Tier.SSD.value for tier in heartbeat.tiers)
        self._state.note_drain(stream.member, stream.extra, _check_drain(heartbeat))
        for tier in heartbeat.tiers:
            if tier.tier == Tier.DRAM.value:
                free_bytes = max(0, tier.capacity_bytes - tier.used_bytes)
                members = self._state.members
                self._state.settle(members.room(stream.worker_id, free_bytes=free_bytes, capacity_bytes=tier.capacity_bytes))
        self.tell_quotas()

    def _task_done(self, stream: Stream, done: pb.TaskDone) -> None:
        task = stream.tasks.pop(done.task_id, None)
        if task is None or task.done.done():
            return  # nobody waits any more
        if done.error or len(done.codes) != task.n_keys:
            log.warning("event=task_failed worker=%s error=%r codes=%d", stream.worker_id, done.error[:200], len(done.codes))
            task.done.set_result(None)
        else:
            task.done.set_result((done.codes, done.n_removed))

    # --- to all workers -------------------------------------------------------------------------------------------------

    def tell_namespace(self, namespace: Namespace) -> None:
        """A new namespace, to every connected worker."""
        for stream in self.streams.values():
            stream.send(namespace=pb.NamespaceUpdate(namespace=spec_to_proto(namespace.spec)))
        self.tell_quotas()

    def tell_quotas(self) -> None:
        """Each worker's parts of the quotas, where they are not what it was told last. After its Welcome."""
        current = self.quotas.current()
        for stream in self.streams.values():
            update = changed(stream.told_shares, current.get(stream.worker_id, {}))
            if update is not None:
                stream.told_shares = dict(current[stream.worker_id])
                stream.send(quotas=update)

    def send_pins(self, batch: pb.PinBatch) -> list[Task]:
        """Queues pins for every connected worker, without waiting."""
        tasks = []
        for stream in self.streams.values():
            self._last_task += 1
            task = Task(stream.worker_id, len(batch.levels))
            stream.tasks[self._last_task] = task
            tasks.append(task)
            stream.send(pin=pb.PinTask(task_id=self._last_task, batches=[batch]))
        return tasks

    def tell_deleted(self, uid: NamespaceUid) -> None:
        for stream in self.streams.values():
            stream.send(namespace=pb.NamespaceUpdate(namespace=pb.Namespace(uid=uid), deleted=True))

    def tell_drain(self, worker_id: WorkerId, task: pb.DrainTask) -> None:
        """To one worker, where it is connected: what the store has now. Else its next Welcome says it."""
        stream = self.streams.get(worker_id)
        if stream is not None:
            stream.send(drain=task)

    def send_removal(self, namespace: Namespace, removal: Removal) -> list[Task]:
        """Queues the removal for every connected worker, without waiting."""
        tasks = []
        for stream in self.streams.values():
            self._last_task += 1
            task = Task(stream.worker_id, len(removal.keys) // KEY_BYTES)
            stream.tasks[self._last_task] = task
            tasks.append(task)
            stream.send(
                remove=pb.RemoveTask(
                    task_id=self._last_task,
                    namespace=namespace.spec.uid,
                    keys=removal.keys,
                    all=removal.everything,
                    removal_seq=removal.seq,
                )
            )
        return tasks

    def give_up(self, tasks: list[Task]) -> None:
        """Nobody waits for these any more."""
        waited = {id(task) for task in tasks}
        for stream in self.streams.values():
            for task_id in [task_id for task_id, task in stream.tasks.items() if id(task) in waited]:
                del stream.tasks[task_id]

    # --- time -----------------------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Once a heartbeat: says that the master lives, and takes out who was silent for too long."""
        state = self._state
        change = state.members.tick(now_ms=state.now_ms())
        state.settle(change)
        for worker_id in change.changed:
            if state.members.get(worker_id) is not None:
                continue
            state.counts.workers_lost += 1
            log.warning("event=worker_lost worker=%s", worker_id)
            stream = self.streams.get(worker_id)
            if stream is not None:
                stream.close("dead", "nothing was heard of this worker for too long")
            await state.remember_away(worker_id)
        self.tell_quotas()
        for stream in self.streams.values():
            stream.outbox.heartbeat()

    def close_all(self, reason: str) -> None:
        for stream in list(self.streams.values()):
            stream.close("master_unavailable", reason)


# --- what comes from the wire -------------------------------------------------------------------------------------------


def _check_hello(hello: pb.WorkerHello) -> WorkerInfo:
    if hello.protocol != SESSION_PROTOCOL:
        raise VersionMismatch(f"protocol: the worker speaks session protocol {hello.protocol}, this master {SESSION_PROTOCOL}")
    version.check(hello.version, peer_name="worker", own=kvpool.__version__, own_name="master")
    info = hello.info
    for name in ("worker_id", "host_id", "address", "unix_name"):
        value = getattr(info, name)
        if len(value.encode()) > NAME_BYTES_MAX or not (value.isprintable() or name == "unix_name"):
            raise InvalidArgument(f"info.{name}: must be at most {NAME_BYTES_MAX} printable bytes")
    for name in ("worker_id", "address"):
        if not getattr(info, name):
            raise InvalidArgument(f"info.{name}: must not be empty")
    if not info.incarnation:
        raise InvalidArgument("info.incarnation: must not be 0")
    if len(hello.removals) > HELLO_NAMESPACES_MAX:
        raise InvalidArgument(f"removals: {len(hello.removals)} namespaces; the limit is {HELLO_NAMESPACES_MAX}")
    if any(len(entry.namespace) != UID_BYTES for entry in hello.removals):
        raise InvalidArgument(f"removals.namespace: must have {UID_BYTES} bytes")
    return WorkerInfo(WorkerId(info.worker_id), Incarnation(info.incarnation), info.host_id, info.address, info.unix_name)


def _check_drain(heartbeat: pb.Heartbeat) -> pb.DrainStatus | None:
    if not heartbeat.HasField("drain"):
        return None
    drain = heartbeat.drain
    if len(drain.reason) > DRAIN_REASON_MAX:
        raise InvalidArgument(f"heartbeat.drain.reason: {len(drain.reason)} characters; the limit is {DRAIN_REASON_MAX}")
    return drain


def _slices(batches: list[ReportBatch]) -> Iterator[ReportBatch]:
    """The same in batches of at most SLICE_KEYS keys."""
    for batch in batches:
        for start in range(0, len(batch.tiers), SLICE_KEYS):
            stop = start + SLICE_KEYS
            yield ReportBatch(
                batch.namespace, batch.keys[KEY_BYTES * start : KEY_BYTES * stop], batch.tiers[start:stop],
                batch.sizes[4 * start : 4 * stop],
            )  # fmt: skip


def _check_batches(batches: Any) -> list[ReportBatch]:
    checked = []
    total = 0
    for batch in batches:
        n = len(batch.tiers)
        total += n
        if len(batch.namespace) != UID_BYTES:
            raise InvalidArgument(f"batches.namespace: {len(batch.namespace)} bytes; {UID_BYTES} are needed")
        if len(batch.keys) != n * KEY_BYTES:
            raise InvalidArgument(f"batches.keys: {len(batch.keys)} bytes for {n} tiers; {KEY_BYTES} each are needed")
        if len(batch.sizes) not in (0, 4 * n):
            raise InvalidArgument(f"batches.sizes: {len(batch.sizes)} bytes for {n} keys; 4 each are needed")
        checked.append(ReportBatch(NamespaceUid(batch.namespace), batch.keys, batch.tiers, batch.sizes))
    if total > MAX_BATCH_KEYS:
        raise InvalidArgument(f"batches: {total} keys in one message; the limit is {MAX_BATCH_KEYS}")
    return checked
