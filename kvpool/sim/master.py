"""A simulated master process: the real terms, leadership and front, elector and redis store, over simulated calls and streams.

`SimMaster` stands for `master.server.Master`: it makes the parts and hands them the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

from kvpool.core.election import LeaseTerms, Role
from kvpool.errors import BY_CODE, ERROR_CODE_KEY, LEADER_KEY, KVPoolError, MasterUnavailable
from kvpool.master.election import Elector
from kvpool.master.leading import Front, Leadership, Term
from kvpool.master.redis_store import RedisStore
from kvpool.master.state import Limits, MasterState
from kvpool.sim.clock import Process
from kvpool.sim.network import Endpoint, Network, Reset
from kvpool.sim.redis import SimRedisLink
from kvpool.sim.store import LocalStore
from kvpool.v1 import master_pb2 as pb

LIMITS: Final = Limits(
    suspect_after_ms=1500, dead_after_ms=4000, rebuild_grace_ms=3000, heartbeat_ms=500, watch_coalesce_ms=5, removal_log_max=64,
    gone_memory_keys=10_000,
)  # fmt: skip
TERMS: Final = LeaseTerms()


class Aborted(Exception):
    """A call ends with this error."""

    def __init__(self, error: KVPoolError) -> None:
        super().__init__(str(error))
        self.error = error


class Call:
    """A grpc.aio context, as the service uses it."""

    def __init__(self, end: Endpoint, *, left_s: float | None) -> None:
        self._end = end
        self._loop = end.process.loop
        self._until = None if left_s is None else self._loop.time() + left_s

    def time_remaining(self) -> float | None:
        return None if self._until is None else self._until - self._loop.time()

    async def abort(self, status: Any, message: str, metadata: Any) -> None:
        del status
        told = dict(metadata or ())
        error = BY_CODE.get(str(told.get(ERROR_CODE_KEY, "internal")), KVPoolError)(message)
        if isinstance(error, MasterUnavailable):
            error.leader = str(told.get(LEADER_KEY, ""))
        raise Aborted(error)

    async def read(self) -> Any:
        try:
            return await self._end.recv()
        except Reset:
            return None

    async def write(self, message: Any) -> None:
        with contextlib.suppress(Reset):  # the call is about to be cancelled
            self._end.send(message)


class SimMaster:
    """`local` None: one of several, whose store is the redis."""

    def __init__(
        self, process: Process, network: Network, address: str, *, local: LocalStore | None, note: Callable[[str, str], None]
    ) -> None:
        self.process, self.network, self.address, self.note = process, network, address, note
        self.leadership: Leadership | None = None
        self._alone: Term | None = None
        self._service: Any = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._n_calls = 0
        network.listen(process, address, self._accept)
        if local is not None:
            process.spawn(self._run_alone(local), name=f"{process.name} start")
            return
        store = RedisStore("redis://store:6379/0", master_id=process.name, terms=TERMS)
        store.owner = process.name
        link: Any = SimRedisLink(network, process)
        store._link = link
        process.call(self._run_among, store)

    async def _run_alone(self, local: LocalStore) -> None:
        store: Any = local
        epoch = await store.open()
        term = Term(store, epoch, settings=LIMITS, leader=self.address, now_ms=self.process.now_ms)
        await term.begin()
        self._alone, self._service = term, term.service
        self.note("leads", f"epoch {epoch}")

    def _run_among(self, store: RedisStore) -> None:
        elector = Elector(store, address=self.address, terms=TERMS, clock=self.process.now_ms)
        leadership = self.leadership = Leadership(
            store, elector, settings=LIMITS, address=self.address, now_ms=self.process.now_ms, tell=self._tell
        )
        self._service = Front(leadership)
        self.process.spawn(elector.run(), name=f"{self.process.name} elector")
        self.process.spawn(leadership.run(), name=f"{self.process.name} leadership")

    async def _tell(self, serves: bool) -> None:
        self.note("leads" if serves else "follows", f"epoch {self.epoch}" if serves else "")

    @property
    def term(self) -> Term | None:
        return self._alone if self.leadership is None else self.leadership.term

    @property
    def state(self) -> MasterState | None:
        term = self.term
        return None if term is None else term.state

    @property
    def epoch(self) -> int:
        state = self.state
        return 0 if state is None else state.epoch

    @property
    def serves(self) -> bool:
        """Whether it answers. A master looks at its lease before each act of a leader."""
        if self.leadership is None:
            return self._alone is not None
        return self.term is not None and self.leadership.elector.standing().role is not Role.FOLLOWER

    # --- calls ----------------------------------------------------------------------------------------------------------

    def _accept(self, end: Endpoint) -> None:
        self._n_calls += 1
        number = self._n_calls
        task = self.process.spawn(self._serve(end, number), name=f"{self.process.name} call")
        self._calls[number] = task
        end.on_end.append(lambda: _cancel(task))

    async def _serve(self, end: Endpoint, number: int) -> None:
        """One connection: unary calls one after the other, or one stream."""
        try:
            while True:
                request = await end.recv()
                if request == "session":
                    await self._session(end)
                    return
                method, message, left_s = request
                if method == "Check":
                    end.send(True)
                    continue
                if method == "Watch":
                    await self._watch(end, message)
                    return
                end.send(await self._unary(end, method, message, left_s))
        except (Reset, asyncio.CancelledError):
            return
        finally:
            self._calls.pop(number, None)
            end.close()

    async def _unary(self, end: Endpoint, method: str, message: Any, left_s: float) -> Any:
        if self._service is None:
            return MasterUnavailable("this master starts")
        try:
            return await getattr(self._service, method)(message, Call(end, left_s=left_s))
        except Aborted as aborted:
            return aborted.error

    async def _session(self, end: Endpoint) -> None:
        service = self._service
        if service is None:
            end.send(MasterUnavailable("this master starts"))
            return
        try:
            await service.Session(None, Call(end, left_s=None))
        except Aborted as aborted:
            end.send(aborted.error)

    async def _watch(self, end: Endpoint, request: pb.WatchRequest) -> None:
        service = self._service
        if service is None:
            end.send(MasterUnavailable("this master starts"))
            return
        events = service.Watch(request, Call(end, left_s=None))
        try:
            async for event in events:
                end.send(event)
        except Aborted as aborted:
            end.send(aborted.error)
        finally:
            closing: Any = events
            await closing.aclose()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
