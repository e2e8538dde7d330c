"""The worker's session with the master: who we are, what we have, and what it tells us to remove.

    connect ─▶ hello ─▶ welcome ─▶ apply namespaces and missed removals ─▶ inventory, when wanted ─▶ reports ⇄ acks
       ▲                                   (one after the other, in a thread of its own)             heartbeats, tasks
       └──────────── lost, refused, silent: again after 100-500 ms, for ever; the data plane goes on meanwhile

With several masters the next one is tried at once, or the one that is said to lead (`core.leaders`); there is a pause after a
round of all of them. While a leader says that its lease is over, the others are asked whether one of them leads now.

Owns the gRPC stream and its order. Not: what is reported (`core.session`), what a removal does (`node`). Runs on the main loop;
everything slow (disk, locks held long) runs in one thread, so that heartbeats never wait for it.

A removal is answered when its blocks are invisible, their SSD records are zeroed on the device and its number is noted. While the
master is away, or has not said a word for SILENCE_S, puts are answered `unlisted` at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvpool
from kvpool.core.keys import split_keys
from kvpool.core.leaders import LeaderSearch
from kvpool.core.quota import Share
from kvpool.core.session import SESSION_PROTOCOL, Report
from kvpool.core.types import KEY_BYTES, MAX_BATCH_KEYS, NamespaceUid
from kvpool.errors import KVPoolError, MasterUnavailable
from kvpool.master.wire import spec_from_proto
from kvpool.transport.host import host_id
from kvpool.transport.rpc import auth_metadata, error_of, open_channel
from kvpool.v1 import master_pb2 as pb
from kvpool.v1 import master_pb2_grpc

if TYPE_CHECKING:
    from kvpool.config import WorkerSettings
    from kvpool.worker.node import Node

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 3.0  # from the attempt to connect to the welcome
CONNECT_S: Final = 0.5  # where there are other masters to try: one that is stopped accepts connections and says nothing
NOTED_MAX: Final = 32
ELSEWHERE_S: Final = 1.0  # between two looks for another leader while this one's lease is over
SERVICE: Final = pb.DESCRIPTOR.services_by_name["Master"].full_name
PASSING: Final = frozenset(("master_unavailable", "store_unavailable", "fenced"))  # refusals of a master that stops or is deposed
RETRY_S_MIN: Final = 0.1
RETRY_S_MAX: Final = 0.5
REFUSED_RETRY_S: Final = 2.0  # a wrong token or version does not get right by asking often
SILENCE_S: Final = 1.2  # without a word from a master that owes us one
INVENTORY_KEYS: Final = 8192  # of one part: a few ms of the master's loop
NAMESPACE_RETRY_S: Final = 1.0  # after a disk that did not forget what was removed
TASKS_MAX: Final = 1024  # that wait; beyond, the stream is not read
_EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]
VERSION: Final = getattr(kvpool, "__version__", "0.1.0")


class Refused(KVPoolError):
    """The master does not want this worker; the message says why. `passing`: it, or another master, may want it very soon."""

    code = "refused"

    def __init__(self, text: str, *, passing: bool) -> None:
        super().__init__(text)
        self.passing = passing


class Agent:
    """Create it on the running loop; `run` until cancelled. `registered` while a session is there; `first` once there was one."""

    def __init__(
        self, node: Node, settings: WorkerSettings, *, token: str, address: str, unix_name: str, http: str,
        now_s: Callable[[], float] = time.monotonic, chance: random.Random | None = None,
    ) -> None:  # fmt: skip
        """`now_s`: a monotonic clock; `chance`: of the pauses between attempts."""
        self.node = node
        self._now_s = now_s
        self._chance = chance or random.Random()
        self.registered = False
        self.master = ""  # address of the one whose session is up
        self.on_drain: Callable[[pb.DrainTask], None] | None = None  # what the master wants; on the loop, must not wait
        self.drain_status: Callable[[], pb.DrainStatus | None] = lambda: None
        self.first = asyncio.Event()
        self.last_error = ""
        self.counters = {"sessions": 0, "session_errors": 0, "inventories": 0, "removal_tasks": 0, "reports_sent": 0}
        self._search = LeaderSearch([part.strip() for part in settings.master.split(",")])
        self._connect_s = CONNECT_S
        self._noted: set[str] = set()  # what has gone wrong since the last session
        self._lapsed = False  # the master's lease is over, as it says itself
        self._metadata = auth_metadata(token)
        self._info = pb.HolderInfo(
            worker_id=node.worker_id, incarnation=node.incarnation, host_id=host_id(), address=address, unix_name=unix_name
        )
        self._http = http
        self._epoch = 0
        self._heartbeat_s = 0.5
        self._heard_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._woken = False
        self._outbox: deque[pb.WorkerMessage] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpool-agent")
        self._leaving: str | None = None
        self._making_inventory = False
        self._tasks: asyncio.Queue[Callable[[], object]] = asyncio.Queue(TASKS_MAX)  # of the session
        self._named_pins: dict[NamespaceUid, set[bytes]] | None = None  # since the welcome, until it is known that they are all
        self._unapplied: dict[bytes, pb.NamespaceUpdate] = {}  # by uid: could not be applied, and is tried again
        node.on_record(self.wake)

    # --- from any thread ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There is something to report."""
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wake.set)

    def beat(self) -> None:
        """A heartbeat that is not waited for: something changed that others should know."""
        if self.registered:
            self._say(pb.WorkerMessage(heartbeat=self._heartbeat()))

    # --- on the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sessions, one after the other."""
        delay = RETRY_S_MIN
        try:
            while self._leaving is None:
                address = self._search.current
                started = self._now_s()
                wait_s, hint = delay, ""
                try:
                    await self._session(address)
                    self.last_error = f"the master at {address} ended the session"
                except Refused as error:
                    self._note(str(error))
                    wait_s = delay if error.passing else REFUSED_RETRY_S
                except grpc.RpcError as error:
                    reason = error_of(error, address=address)
                    self._note(str(reason))
                    wait_s = delay if reason.retryable or reason.code == "internal" else REFUSED_RETRY_S
                    hint = reason.leader if isinstance(reason, MasterUnavailable) else ""
                except (TimeoutError, OSError, KVPoolError, asyncio.InvalidStateError) as error:  # at last: a write on its end
                    self._note(f"the master at {address}: {error or 'no answer in time'}")
                    hint = error.leader if isinstance(error, MasterUnavailable) else ""
                if self._leaving is not None:
                    return
                if not self._search.failed(hint):
                    continue
                self._connect_s = min(HELLO_TIMEOUT_S, 1.5 * self._connect_s)
                await asyncio.sleep(wait_s * self._chance.uniform(0.8, 1.2))
                lasted = self._now_s() - started > HELLO_TIMEOUT_S
                delay = RETRY_S_MIN if lasted else min(RETRY_S_MAX, delay * 1.5)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def leave(self, reason: str, *, timeout_s: float = 1.0) -> None:
        """Says good-bye to the master, if there is one, and ends `run` after it."""
        self._leaving = reason
        until = self._now_s() + timeout_s
        self._outbox.append(pb.WorkerMessage(leave=pb.Leave(reason=reason)))
        self._wake.set()
        while self.registered and self._outbox and self._now_s() < until:
            await asyncio.sleep(0.01)

    def _note(self, error: str) -> None:
        self.counters["session_errors"] += 1
        self.last_error = error
        if error not in self._noted:  # several masters that are away say the same in turn
            log.warning("event=session_failed reason=%r", error)
            if len(self._noted) >= NOTED_MAX:
                self._noted.clear()
            self._noted.add(error)

    async def _session(self, address: str) -> None:
        node = self.node
        group: list[asyncio.Task[None]] = []
        call, close = self._open(address)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                with node.lock:
                    next_seq = node.reporter.next_seq
                async with asyncio.timeout(self._connect_s if self._search.several else HELLO_TIMEOUT_S):
                    await call.write(pb.WorkerMessage(hello=self._hello(next_seq)))
                message = await call.read()
            if message is _EOF:
                await _raise_end(call)
            self._check_refused(message)
            if message.WhichOneof("message") != "welcome":
                raise KVPoolError("the first message is no welcome")
            self._heard(message)
            self._heartbeat_s = max(0.01, message.welcome.heartbeat_ms / 1000 or 0.5)
            self._outbox.clear()
            tasks: asyncio.Queue[Callable[[], object]] = asyncio.Queue(TASKS_MAX)
            self._tasks = tasks
            self._unapplied.clear()
            with node.lock:
                if message.welcome.inventory_wanted:
                    node.reporter.reset()
                else:
                    node.reporter.rewind()
            tasks.put_nowait(lambda: self._apply_welcome(message.welcome))
            if message.welcome.inventory_wanted or next_seq == 0:
                tasks.put_nowait(self._queue_inventory)
            self.registered, self.master, self._lapsed = True, address, False
            self._connect_s = CONNECT_S
            self._noted.clear()
            self._drain(message.welcome.drain)
            self.counters["sessions"] += 1
            self.last_error = ""
            log.info("event=session_up master=%s epoch=%d inventory=%s", address, self._epoch, message.welcome.inventory_wanted)
            node.listed.set_session(up=True)
            group = [
                asyncio.create_task(self._read(call, tasks)),
                asyncio.create_task(self._write(call)),
                asyncio.create_task(self._work(tasks)),
                asyncio.create_task(self._watch_silence()),
                asyncio.create_task(self._look_elsewhere()),
            ]
            done, _ = await asyncio.wait(group, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.registered, self.master = False, ""
            node.listed.set_session(up=False)
            for task in group:
                task.cancel()
            await asyncio.gather(*group, return_exceptions=True)
            await close()

    def _open(self, address: str) -> tuple[Any, Callable[[], Awaitable[None]]]:
        """The stream to the master at this address, nothing sent yet, and what ends it."""
        channel = open_channel(address, aio=True)
        stub = master_pb2_grpc.MasterStub(channel)  # type: ignore[no-untyped-call]
        return stub.Session(metadata=self._metadata), channel.close

    def _hello(self, next_seq: int) -> pb.WorkerHello:
        node = self.node
        dram = node.tier_status()[0]
        info = pb.HolderInfo()
        info.CopyFrom(self._info)
        info.capacity_bytes, info.free_bytes = dram.capacity_bytes, dram.capacity_bytes - dram.used_bytes
        return pb.WorkerHello(
            protocol=SESSION_PROTOCOL, version=VERSION, info=info, last_epoch=self._epoch, next_seq=next_seq, http=self._http,
            pid=os.getpid(), removals=[pb.AppliedRemovals(namespace=uid, removal_seq=seq) for uid, seq in node.applied_seqs()],
        )  # fmt: skip

    # --- what runs while a session is there -----------------------------------------------------------------------------

    async def _read(self, call: Any, tasks: asyncio.Queue[Callable[[], object]]) -> None:
        while True:
            message = await call.read()
            if message is _EOF:
                await _raise_end(call)
                return
            self._heard(message)
            kind = message.WhichOneof("message")
            if kind == "heartbeat":
                self._lapsed = not message.heartbeat
            elif kind == "ack":
                self.node.on_ack(message.ack.seq)
                self.wake()  # the window has room again
            elif kind == "remove":
                await tasks.put(lambda task=message.remove: self._remove(task))  # type: ignore[misc]
            elif kind == "namespace":
                await tasks.put(lambda update=message.namespace: self._apply_namespace(update))  # type: ignore[misc]
            elif kind == "inventory_wanted":
                log.info("event=inventory_wanted reason=%r", message.inventory_wanted.reason)
                with self.node.lock:
                    self.node.reporter.reset()
                await tasks.put(self._queue_inventory)
            elif kind == "pin":
                await tasks.put(lambda task=message.pin: self._pin(task))  # type: ignore[misc]
            elif kind == "quotas":
                await tasks.put(lambda update=message.quotas: self._set_shares(update))  # type: ignore[misc]
            elif kind == "drain":
                self._drain(message.drain)
            elif kind == "refused":
                self._check_refused(message)

    async def _write(self, call: Any) -> None:
        """The only writer: what is in the outbox, then reports, then a heartbeat when it is due."""
        heartbeat_at = self._now_s()
        while True:
            self._woken = False
            self._wake.clear()
            while self._outbox:
                message = self._outbox[0]
                await call.write(message)
                if self._outbox and self._outbox[0] is message:
                    self._outbox.popleft()
                if message.WhichOneof("message") == "leave":
                    await call.done_writing()
                    return
            while not self._outbox and (report := self._take()) is not None:
                await call.write(pb.WorkerMessage(report=report))
                self.counters["reports_sent"] += 1
                if self._now_s() >= heartbeat_at:
                    break
            if self._now_s() >= heartbeat_at:
                heartbeat_at = self._now_s() + self._heartbeat_s
                await call.write(pb.WorkerMessage(heartbeat=self._heartbeat()))
                continue
            if self._outbox:
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(0.0, heartbeat_at - self._now_s()))

    async def _work(self, tasks: asyncio.Queue[Callable[[], object]]) -> None:
        while True:
            task = await tasks.get()
            await self._loop.run_in_executor(self._thread, task)
            if tasks.empty():
                self.first.set()

    async def _watch_silence(self) -> None:
        """A master that is connected and says nothing (stopped, overloaded) is as good as away for whoever waits."""
        limit = max(SILENCE_S, 3 * self._heartbeat_s)
        while True:
            await asyncio.sleep(limit / 6)
            silent = self._now_s() - self._heard_at > limit
            if silent and self.node.listed.up:
                log.warning("event=master_silent seconds=%.1f", self._now_s() - self._heard_at)
                self.node.listed.set_session(up=False)
                if self._search.several:
                    raise KVPoolError(f"it said nothing for {self._now_s() - self._heard_at:.1f} s")
            elif not silent and not self.node.listed.up:
                self.node.listed.set_session(up=True)

    async def _look_elsewhere(self) -> None:
        """A leader that cannot reach the store goes on with what it has. Another one may have been elected meanwhile."""
        while True:
            await asyncio.sleep(ELSEWHERE_S)
            for address in self._search.addresses if self._lapsed else ():
                if address != self.master and await _leads(address):
                    error = MasterUnavailable(f"its lease is over, and the master at {address} leads")
                    error.leader = address
                    raise error

    def _heard(self, message: pb.MasterMessage) -> None:
        self._heard_at = self._now_s()
        epoch = message.epoch or self._epoch
        if not self._search.accepts(epoch, now_s=self._heard_at):
            raise KVPoolError(f"it leads epoch {epoch}, which is over: epoch {self._epoch} was seen")
        self._epoch = epoch

    def _heartbeat(self) -> pb.Heartbeat:
        uses = [pb.NamespaceUse(namespace=uid, dram_bytes=d, ssd_bytes=s) for uid, d, s, _ in self.node.quota_uses()]
        return pb.Heartbeat(tiers=self.node.tier_status(), drain=self.drain_status(), uses=uses)

    def _drain(self, task: pb.DrainTask) -> None:
        if self.on_drain is not None:
            self.on_drain(task)

    def _check_refused(self, message: pb.MasterMessage) -> None:
        if message.WhichOneof("message") == "refused":
            code = message.refused.code
            raise Refused(f"the master refuses this worker: {message.refused.reason} ({code})", passing=code in PASSING)

    def _take(self) -> pb.Report | None:
        with self.node.lock:
            report = None if self._making_inventory else self.node.reporter.take()
        return None if report is None else _report_to_proto(report)

    # --- in the agent's thread, one after the other ---------------------------------------------------------------------

    def _say(self, message: pb.WorkerMessage) -> None:
        self._outbox.append(message)
        self.wake()

    def _apply_welcome(self, welcome: pb.Welcome) -> None:
        self._named_pins = {}
        named = {NamespaceUid(update.namespace.uid) for update in welcome.namespaces}
        for uid in self.node.known_namespaces() - named:
            self.node.delete_namespace(uid)  # deleted while we were away
        for update in welcome.namespaces:
            self._apply_namespace(update)

    def _apply_namespace(self, update: pb.NamespaceUpdate) -> None:
        self._unapplied.pop(update.namespace.uid, None)
        try:
            if update.deleted:
                self.node.delete_namespace(NamespaceUid(update.namespace.uid))
                return
            spec = spec_from_proto(update.namespace)
            self.node.catch_up(
                spec, drop_all=update.drop_blocks or update.missed_all, missed=list(_batches(update.missed_keys)),
            )  # fmt: skip
        except KVPoolError as error:
            log.error("event=namespace_unusable name=%r reason=%r", update.namespace.name, str(error))
        except Exception:
            log.exception("event=namespace_failed name=%r", update.namespace.name)  # it stays blocked: nothing wrong is served
            self._apply_later(update)

    def _apply_later(self, update: pb.NamespaceUpdate) -> None:
        """Once more after a while, unless the session ends or the master says something newer of the namespace."""
        self._unapplied[update.namespace.uid] = update
        tasks = self._tasks

        def again() -> None:
            if tasks is self._tasks and self._unapplied.get(update.namespace.uid) is update:
                try:
                    tasks.put_nowait(lambda: self._apply_namespace(update))
                except asyncio.QueueFull:
                    self._loop.call_later(NAMESPACE_RETRY_S, again)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._loop.call_later, NAMESPACE_RETRY_S, again)

    def _remove(self, task: pb.RemoveTask) -> None:
        self.counters["removal_tasks"] += 1
        done = pb.TaskDone(task_id=task.task_id)
        try:
            codes, n_removed = self.node.remove(
                NamespaceUid(task.namespace), None if task.all else task.keys, removal_seq=task.removal_seq
            )
            done.codes, done.n_removed = codes, n_removed
        except Exception as error:
            log.exception("event=removal_failed")
            done.error = str(error) or type(error).__name__
        self._say(pb.WorkerMessage(task_done=done))

    def _pin(self, task: pb.PinTask) -> None:
        done = pb.TaskDone(task_id=task.task_id)
        codes = []
        for batch in task.batches:
            uid, keys = NamespaceUid(batch.namespace), split_keys(batch.keys)
            codes.append(self.node.pin(uid, keys, batch.levels, struct.unpack(f"<{len(keys)}Q", batch.ttls_ms)))
            if self._named_pins is not None:
                self._named_pins.setdefault(uid, set()).update(keys)
        if task.last and self._named_pins is not None:
            self.node.keep_only_pins(self._named_pins)
            self._named_pins = None
        done.codes = b"".join(codes)
        if task.task_id:
            self._say(pb.WorkerMessage(task_done=done))

    def _set_shares(self, update: pb.QuotaUpdate) -> None:
        self.node.set_shares({NamespaceUid(s.namespace): Share(s.dram_bytes, s.ssd_bytes) for s in update.shares})

    def _queue_inventory(self) -> None:
        """Everything that this worker has, as parts; reports go on behind it."""
        self.counters["inventories"] += 1
        with self.node.lock:
            self._making_inventory = True  # no report may leave between this and the parts
            next_seq = self.node.reporter.begin_inventory()
            snapshot = self.node.table.snapshot()  # its parts are made outside: what changes meanwhile is reported behind them
        part = pb.InventoryPart(next_seq=next_seq, first=True)
        n_keys = 0
        parts = []
        for uid, keys, tiers, sizes in snapshot:
            for at in range(0, len(tiers), INVENTORY_KEYS):
                stop = min(at + INVENTORY_KEYS, len(tiers))
                if n_keys and n_keys + stop - at > INVENTORY_KEYS:
                    parts.append(part)
                    part, n_keys = pb.InventoryPart(next_seq=next_seq), 0
                part.batches.append(
                    pb.ReportBatch(
                        namespace=uid, keys=bytes(keys[at * KEY_BYTES : stop * KEY_BYTES]), tiers=bytes(tiers[at:stop]),
                        sizes=bytes(sizes[4 * at : 4 * stop]),
                    )
                )
                n_keys += stop - at
        part.last = True
        parts.append(part)
        self._outbox.extend(pb.WorkerMessage(inventory=part) for part in parts)
        self._making_inventory = False
        self.wake()


async def _leads(address: str) -> bool:
    """Whether the master there says that it leads."""
    channel = open_channel(address, aio=True)
    try:
        make: Any = health_pb2_grpc.HealthStub
        answer = await make(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=CONNECT_S)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    except grpc.RpcError:
        return False
    finally:
        await channel.close()


async def _raise_end(call: Any) -> None:
    """The stream has ended: raises what the master said, if it was an error."""
    code = await call.code()
    if code != grpc.StatusCode.OK:
        initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
        raise grpc.aio.AioRpcError(code, initial, trailing, await call.details(), None)


def _report_to_proto(report: Report) -> pb.Report:
    return pb.Report(
        seq=report.seq,
        batches=[pb.ReportBatch(namespace=b.namespace, keys=b.keys, tiers=b.tiers, sizes=b.sizes) for b in report.batches],
    )


def _batches(keys: bytes) -> Iterator[bytes]:
    step = MAX_BATCH_KEYS * KEY_BYTES
    for at in range(0, len(keys), step):
        yield keys[at : at + step]
