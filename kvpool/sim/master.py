"""A simulated master process: the real service, sessions, state and elector, over simulated calls and streams.

`SimMaster` stands for `master.server.Master`: it makes the parts, runs the ticks, serves. With a shared store it serves while it
leads, and goes on with what it has in memory while nobody can say who leads (`core.election`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

from kvpool.core.election import LeaseTerms, Role, Standing
from kvpool.errors import BY_CODE, ERROR_CODE_KEY, KVPoolError, MasterUnavailable
from kvpool.master.election import Elector
from kvpool.master.service import MasterService
from kvpool.master.session import Sessions
from kvpool.master.state import Limits, MasterState
from kvpool.sim.clock import Process
from kvpool.sim.disk import sleep
from kvpool.sim.network import Endpoint, Network, Reset
from kvpool.sim.store import LocalStore, SharedStore
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
        code = str(dict(metadata or ()).get(ERROR_CODE_KEY, "internal"))
        raise Aborted(BY_CODE.get(code, KVPoolError)(message))

    async def read(self) -> Any:
        try:
            return await self._end.recv()
        except Reset:
            return None

    async def write(self, message: Any) -> None:
        with contextlib.suppress(Reset):  # the call is about to be cancelled
            self._end.send(message)


class SimMaster:
    """`serving`: state and sessions while it answers. `shared` None: its own store. `on_serve(master)`: it begins to answer."""

    def __init__(
        self, process: Process, network: Network, address: str, *, local: LocalStore | None, note: Callable[[str, str], None]
    ) -> None:
        self.process, self.network, self.address, self.note = process, network, address, note
        self.state: MasterState | None = None
        self.sessions: Sessions | None = None
        self.service: MasterService | None = None
        self.elector: Elector | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._n_calls = 0
        network.listen(process, address, self._accept)
        if local is not None:
            self.store: Any = local
            process.spawn(self._run_alone(), name=f"{process.name} start")
        else:
            self.store = SharedStore(process, network, TERMS)
            self.elector = Elector(self.store, address=address, terms=TERMS, clock=process.now_ms)
            process.spawn(self.elector.run(), name=f"{process.name} elector")
            process.spawn(self._follow(self.elector), name=f"{process.name} standing")
        process.spawn(self._tick(), name=f"{process.name} tick")

    # --- who leads ------------------------------------------------------------------------------------------------------

    async def _run_alone(self) -> None:
        await self._begin(await self.store.open())

    async def _follow(self, elector: Elector) -> None:
        """Loads when it leads anew, lets go when another one does."""
        standing = elector.standing()
        epoch = 0
        while True:
            if standing.role is Role.FOLLOWER or (epoch and standing.epoch != epoch):
                self._end("another master leads")
                epoch = 0
            if standing.role is Role.LEADER and not epoch:
                try:
                    await self._begin(standing.epoch)
                    epoch = standing.epoch
                except KVPoolError:
                    await sleep(self.process.loop, 0.1)
                    standing = elector.standing()
                    continue
            standing = await elector.changed(standing)

    async def _begin(self, epoch: Any) -> None:
        state = MasterState(self.store, epoch, settings=LIMITS, now_ms=self.process.now_ms)
        await state.load()
        standing = self.standing()
        if standing is not None and (standing.role is Role.FOLLOWER or standing.epoch != epoch):
            raise MasterUnavailable("the lease was lost while loading")
        state.leader = self.address
        self.sessions = Sessions(state)
        self.service = MasterService(state, self.sessions)
        self.state = state
        self.note("leads", f"epoch {epoch}")

    def _end(self, reason: str) -> None:
        if self.state is None:
            return
        assert self.sessions is not None
        self.note("follows", reason)
        self.sessions.close_all(reason)
        self.state.events.close()
        self.state = self.sessions = self.service = None
        for task in self._calls.values():
            task.cancel()

    def standing(self) -> Standing | None:
        return None if self.elector is None else self.elector.standing()

    @property
    def serves(self) -> bool:
        """Whether it answers. A master looks at its lease before each act of a leader."""
        standing = self.standing()
        return self.state is not None and (standing is None or standing.role is not Role.FOLLOWER)

    async def _tick(self) -> None:
        while True:
            await sleep(self.process.loop, LIMITS.heartbeat_ms / 1000)
            if self.serves and self.state is not None and self.sessions is not None:
                try:
                    await self.sessions.tick()
                except KVPoolError:
                    continue  # the store is away: said again at the next tick
                if self.state is not None:
                    while self.state.purge_step():
                        await asyncio.sleep(0)

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

    def _refusal(self) -> KVPoolError:
        return MasterUnavailable("this master does not lead")

    async def _unary(self, end: Endpoint, method: str, message: Any, left_s: float) -> Any:
        if not self.serves:
            return self._refusal()
        try:
            return await getattr(self.service, method)(message, Call(end, left_s=left_s))
        except Aborted as aborted:
            return aborted.error

    async def _session(self, end: Endpoint) -> None:
        service = self.service
        if not self.serves or service is None:
            end.send(self._refusal())
            return
        try:
            await service.Session(None, Call(end, left_s=None))
        except Aborted as aborted:
            end.send(aborted.error)

    async def _watch(self, end: Endpoint, request: pb.WatchRequest) -> None:
        service = self.service
        if not self.serves or service is None:
            end.send(self._refusal())
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
