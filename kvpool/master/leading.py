"""One master among several: what it has while it leads, and what it answers while it does not.

    Elector ─standing─▶ Leadership ─▶ Term (state, sessions, service; loaded from the store, one for each epoch that it leads)
                             ▲
    calls ─▶ Front ──────────┘  before and after each call, and before each message of a stream: is it (still) this master?

    LEADER     serves.                         LAPSED     serves what is in memory, writes nothing: the store is away
    FOLLOWER   refuses, and says who leads

Who leads is decided in `core.election` and asked for by `election`. A term's writes carry its epoch; those of a term that is over
are refused here, and by the store. A process that stood still asks the store before it answers anything (`Elector.confirmed`).
A leader that lapsed and lost all its workers refuses too: they have found another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn

from kvpool.core.election import Role, Standing
from kvpool.core.removals import Removal
from kvpool.core.types import Epoch, Key, NamespaceUid, WorkerId
from kvpool.errors import Fenced, KVPoolError, MasterUnavailable, StoreUnavailable
from kvpool.master.election import Elector
from kvpool.master.pinning import end_pins
from kvpool.master.redis_store import WRITE_S, RedisStore
from kvpool.master.service import MasterService
from kvpool.master.session import Sessions
from kvpool.master.state import Limits, MasterState
from kvpool.master.store import NamespaceRecord, PinRecord, Store, WorkerRecord
from kvpool.transport.rpc import status_of
from kvpool.v1 import master_pb2 as pb
from kvpool.v1 import master_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

RELOAD_S: Final = 0.3  # between two attempts of a new leader to read the state
LOAD_S: Final = 30.0  # one attempt
HELLO_S: Final = 1.0  # for a worker that is refused to finish its hello


class Term:
    """What a master has while it leads: on its own, all the time; among several, for one epoch."""

    def __init__(self, store: Store, epoch: Epoch, *, settings: Limits, leader: str, now_ms: Callable[[], int]) -> None:
        self.state = MasterState(store, epoch, settings=settings, now_ms=now_ms)
        self.state.leader = leader
        self.sessions = Sessions(self.state)
        self.service = MasterService(self.state, self.sessions)
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Reads the state; calls may be served when it returns."""
        await self.state.load()
        heartbeat_s = self.state.settings.heartbeat_ms / 1000
        self._tasks = [
            asyncio.ensure_future(forever("tick", lambda: _tick(self.sessions, heartbeat_s))),
            asyncio.ensure_future(forever("pins", lambda: _end_pins(self.state, heartbeat_s))),
            asyncio.ensure_future(forever("purge", lambda: _purge(self.state))),
            asyncio.ensure_future(forever("write_workers", lambda: _write_workers(self.state, heartbeat_s))),
        ]

    def close(self, reason: str) -> None:
        """All streams end, with this reason."""
        self.sessions.close_all(reason)
        self.state.events.close()

    async def end(self) -> None:
        """Ends what `begin` began. A second call does nothing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []


async def forever(name: str, step: Callable[[], Awaitable[None]]) -> None:
    """Repeats a step; an error in one is logged and does not end the others."""
    while True:
        try:
            await step()
        except Exception:
            log.exception("event=step_failed step=%s", name)
            await asyncio.sleep(0.1)


async def _tick(sessions: Sessions, heartbeat_s: float) -> None:
    await sessions.tick()
    await asyncio.sleep(heartbeat_s)


async def _end_pins(state: MasterState, heartbeat_s: float) -> None:
    await asyncio.sleep(heartbeat_s)
    await end_pins(state)


async def _purge(state: MasterState) -> None:
    await state.purge_wanted.wait()
    state.purge_wanted.clear()
    while state.purge_step():
        await asyncio.sleep(0)


async def _write_workers(state: MasterState, heartbeat_s: float) -> None:
    await state.write_wanted.wait()
    state.write_wanted.clear()
    if not await state.write_workers():
        await asyncio.sleep(heartbeat_s)


class TermStore:
    """The shared store as one term may use it (see `store.Store`). `turn`: one for all terms of the process, so that a write that
    waits for its turn while the term ends is never made under a later epoch."""

    def __init__(self, store: RedisStore, elector: Elector, epoch: Epoch, *, turn: asyncio.Lock) -> None:
        self.master_id = store.master_id
        self._store, self._elector, self._epoch, self._turn = store, elector, epoch, turn

    async def _write(self, write: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(WRITE_S), self._turn:
                standing = self._elector.standing()
                if standing.role is Role.FOLLOWER or standing.epoch != self._epoch:
                    raise Fenced("store: this master is not the leader any more")
                if standing.role is Role.LAPSED:
                    raise StoreUnavailable("store: it does not answer; namespaces and removals must wait until it is back")
                await write()
        except TimeoutError:
            raise StoreUnavailable("store: no answer in time") from None

    async def open(self) -> Epoch:
        return self._epoch

    async def namespaces(self) -> list[NamespaceRecord]:
        return await self._store.namespaces()

    async def removals(self, uid: NamespaceUid) -> Sequence[Removal]:
        return await self._store.removals(uid)

    async def pins(self) -> list[tuple[NamespaceUid, PinRecord]]:
        return await self._store.pins()

    async def workers(self) -> list[WorkerRecord]:
        return await self._store.workers()

    async def put_namespace(self, record: NamespaceRecord) -> None:
        await self._write(lambda: self._store.put_namespace(record))

    async def delete_namespace(self, uid: NamespaceUid) -> None:
        await self._write(lambda: self._store.delete_namespace(uid))

    async def log_removal(self, uid: NamespaceUid, removal: Removal, *, first_seq: int) -> None:
        await self._write(lambda: self._store.log_removal(uid, removal, first_seq=first_seq))

    async def put_pins(self, uid: NamespaceUid, pins: Sequence[PinRecord]) -> None:
        await self._write(lambda: self._store.put_pins(uid, pins))

    async def delete_pins(self, uid: NamespaceUid, keys: Sequence[Key]) -> None:
        await self._write(lambda: self._store.delete_pins(uid, keys))

    async def put_worker(self, record: WorkerRecord) -> None:
        await self._write(lambda: self._store.put_worker(record))

    async def delete_worker(self, worker_id: WorkerId) -> None:
        await self._write(lambda: self._store.delete_worker(worker_id))

    async def ping(self) -> None:
        await self._store.ping()

    async def close(self) -> None:
        """The process' store lives on."""


class Leadership:
    """This master's part, on its loop: `run` makes and ends terms as the standing changes; `confirm` is asked by every call."""

    def __init__(
        self, store: RedisStore, elector: Elector, *, settings: Limits, address: str, now_ms: Callable[[], int],
        tell: Callable[[bool], Awaitable[None]],
    ) -> None:  # fmt: skip
        """`tell`: whether this master serves now, at each change, for its health service."""
        self.elector = elector
        self._tell = tell
        self.term: Term | None = None
        self._store = store
        self._settings, self._address, self._now_ms = settings, address, now_ms
        self._turn = asyncio.Lock()
        self._set_back = 0  # of the store's counter: what this term has mended

    def leader(self) -> str:
        """Where the leader is, "" unknown."""
        return self.elector.standing().leader

    def refusal(self, standing: Standing) -> MasterUnavailable:
        """Why this master does not answer."""
        if standing.role is Role.FOLLOWER:
            where = f"the leader is at {standing.leader}" if standing.leader else "no leader is known at present"
            error = MasterUnavailable(f"this master is a standby; {where}")
            error.leader = standing.leader if standing.leader != self._address else ""
            return error
        return MasterUnavailable("this master leads, and has not read its state yet")

    async def leading(self) -> Term:
        """The term that serves now. Raises MasterUnavailable that says who leads."""
        term = self.term
        if term is None:
            raise self.refusal(self.elector.standing())
        await self.confirm(term)
        return term

    async def confirm(self, term: Term) -> None:
        """Raises MasterUnavailable unless `term` is this master's to serve, at this moment."""
        standing = self.elector.standing()
        if standing.role is Role.LAPSED:
            standing = await self.elector.confirmed()
        if standing.role is Role.FOLLOWER or term is not self.term or standing.epoch != term.state.epoch:
            raise self.refusal(standing)
        if standing.role is Role.LAPSED and term.state.counts.sessions and not term.sessions.streams:
            raise MasterUnavailable("this master leads no more, as far as it can know: the store and all workers are away")

    async def run(self) -> None:
        """Until cancelled; ends the term then."""
        mend = asyncio.ensure_future(forever("mend", self._mend))
        try:
            while True:
                standing = self.elector.standing()
                await self._become(standing)
                await self.elector.changed(standing)
        finally:
            mend.cancel()
            await asyncio.gather(mend, return_exceptions=True)
            await self._end("the master is stopping")

    async def _become(self, standing: Standing) -> None:
        term = self.term
        if term is not None and (standing.role is Role.FOLLOWER or standing.epoch != term.state.epoch):
            await self._end("another master leads")
        while standing.role is Role.LEADER and self.term is None:
            try:
                async with asyncio.timeout(LOAD_S):
                    await self._load(standing.epoch)
            except (KVPoolError, TimeoutError) as error:
                log.error("event=state_not_loaded epoch=%d error=%r", standing.epoch, str(error) or "no end in time")
                await asyncio.sleep(RELOAD_S)
                if self.elector.standing() != standing:
                    return

    async def _load(self, epoch: Epoch) -> None:
        self._set_back = self._store.counts.rolled_back
        await self._store.open()
        store = TermStore(self._store, self.elector, epoch, turn=self._turn)
        term = Term(store, epoch, settings=self._settings, leader=self._address, now_ms=self._now_ms)
        await term.begin()
        now = self.elector.standing()
        if now.role is Role.FOLLOWER or now.epoch != epoch:
            await term.end()
            return
        self.term = term
        await self._tell(True)
        log.info("event=leading epoch=%d namespaces=%d known_workers=%d", epoch, len(term.state.namespaces),
                 len(term.state.records))  # fmt: skip

    async def _end(self, reason: str) -> None:
        term, self.term = self.term, None
        if term is not None:
            term.close(reason)
            await self._tell(False)
            await term.end()

    async def _mend(self) -> None:
        """A store that was set back gets again what it had confirmed."""
        await asyncio.sleep(self._settings.heartbeat_ms / 1000)
        term, seen = self.term, self._store.counts.rolled_back
        if term is None or seen == self._set_back:
            return
        try:
            await term.state.rewrite()
        except MasterUnavailable as error:
            log.warning("event=store_not_mended error=%r", str(error))
            return
        if term is self.term:
            self._set_back = seen
        log.warning("event=store_mended epoch=%d namespaces=%d", term.state.epoch, len(term.state.namespaces))


class Front(pb_grpc.MasterServicer):
    """The Master service of one among several: hands each call to the term, as long as there is one to answer for it."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        for method in pb.DESCRIPTOR.services_by_name["Master"].methods_by_name.values():
            if not (method.client_streaming or method.server_streaming):
                setattr(self, method.name, self._unary(method.name))

    def _unary(self, name: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def handler(request: Any, context: Any) -> Any:
            term = await self._admit(context)
            reply = await getattr(term.service, name)(request, context)
            await self._confirm(term, context)  # it may have stood still meanwhile
            return reply

        return handler

    async def _admit(self, context: Any) -> Term:
        try:
            return await self._leadership.leading()
        except MasterUnavailable as error:
            await _refuse(error, context)

    async def _confirm(self, term: Term, context: Any) -> None:
        try:
            await self._leadership.confirm(term)
        except MasterUnavailable as error:
            await _refuse(error, context)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchEvent]:
        term = await self._admit(context)
        async with contextlib.aclosing(term.service.Watch(request, context)) as events:  # type: ignore[type-var]
            async for event in events:
                await self._confirm(term, context)
                yield event

    async def Session(self, request_iterator: Any, context: Any) -> None:
        if self._leadership.term is None:
            with contextlib.suppress(Exception):  # a worker that is refused while it still writes its hello does not hear why
                async with asyncio.timeout(HELLO_S):
                    await context.read()
        term = await self._admit(context)
        await term.service.Session(request_iterator, _Confirmed(context, self._leadership, term))


class _Confirmed:
    """A stream's context that writes for the leader only. Its heartbeats are false while the lease is over: the worker then asks
    the other masters whether one of them leads."""

    def __init__(self, context: Any, leadership: Leadership, term: Term) -> None:
        self._context, self._leadership, self._term = context, leadership, term

    async def write(self, message: pb.MasterMessage) -> None:
        await self._leadership.confirm(self._term)
        if message.WhichOneof("message") == "heartbeat":
            message.heartbeat = self._leadership.elector.standing().role is Role.LEADER
        await self._context.write(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def _refuse(error: MasterUnavailable, context: Any) -> NoReturn:
    status, message, metadata = status_of(error)
    await context.abort(status, message, metadata)
    raise AssertionError("abort returned")
