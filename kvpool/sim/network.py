"""Simulated network: connections between processes with delay, loss, partitions in each direction, and what a death does to them.

Owns connections and what is under way on them. A connection keeps order, two connections do not; a lost packet of a real
network is a delay or, past what TCP mends, a reset: here `reset`. Messages are Python objects, handed over as they are: who
sends one does not change it any more. `Pool` keeps connections as a real link does.

    process killed      its peers are told (a reset), after what it had sent before
    host gone           nobody is told: who waits finds out by its own deadline, or by KEEPALIVE_S
    partition           what is sent stays under way; KEEPALIVE_S later both ends give the connection up
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvpool.sim.clock import Process, SimLoop

KEEPALIVE_S: Final = 3.0  # without a word through
LOCAL_S: Final = (0.00002, 0.0001)  # delay within a host
POOL_IDLE_MAX: Final = 4


class Reset(ConnectionError):
    """The connection is over."""


class Refused(ConnectionError):
    """Nobody listens there."""


@dataclass(slots=True)
class Quality:
    """Of the cables of one run."""

    delay_s: float = 0.0004
    jitter_s: float = 0.0004
    slow_share: float = 0.01  # of messages that take `slow_s` more
    slow_s: float = 0.03
    loss: float = 0.0  # share of messages that end their connection


class Endpoint:
    """One end of a connection. `recv` by one task at a time; `on_end` is called once, in the world's context, when it is over."""

    __slots__ = ("_inbox", "_loop", "_network", "_waiter", "last_at", "on_end", "over", "peer", "process", "stalled")

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._loop, self.process = network, network.loop, process
        self.peer: Endpoint = self
        self._inbox: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.on_end: list[Callable[[], None]] = []
        self.over = False  # no more can be sent, nor will anything come
        self.last_at = 0.0  # when the latest message to this end arrives
        self.stalled: list[Any] = []  # to this end, held up by a partition

    @property
    def n_waiting(self) -> int:
        """Messages that have come and were not taken."""
        return len(self._inbox)

    def send(self, message: Any) -> None:
        """Raises Reset when the connection is known to be over; otherwise nobody knows whether it arrives."""
        if self.over:
            raise Reset("the connection is over")
        self._network.carry(self.peer, message)

    async def recv(self, until: float | None = None) -> Any:
        """The next message. TimeoutError at `until` (the loop's time), Reset when the connection is over."""
        while not self._inbox:
            if self.over:
                raise Reset("the connection is over")
            if until is not None and self._loop.time() >= until:
                raise TimeoutError("no answer in time")
            waiter = self._waiter = self._loop.create_future()
            timer = None if until is None else self._loop.call_at(until, _settle, waiter)
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        return self._inbox.popleft()

    def close(self) -> None:
        """The other end hears of it after what was sent before."""
        if not self.over:
            self._end()
            self._network.carry(self.peer, _OVER)

    def arrive(self, message: Any) -> None:
        """By the network."""
        if self.over or not self.process.alive:
            return
        if message is _OVER:
            self._end()
        else:
            self._inbox.append(message)
            if self._waiter is not None:
                _settle(self._waiter)

    def _end(self) -> None:
        self.over = True
        self._network.forget(self)
        if self._waiter is not None:
            _settle(self._waiter)
        calls, self.on_end = self.on_end, []
        for call in calls:
            self.process.call(call)


_OVER: Final = object()


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Network:
    """All cables. Addresses are names; a process that listens says under which."""

    def __init__(self, loop: SimLoop, chance: random.Random, quality: Quality) -> None:
        self.loop, self.random, self.quality = loop, chance, quality
        self.gone_hosts: dict[str, None] = {}
        self._blocked: dict[tuple[str, str], float] = {}  # (from host, to host) -> since
        self._listening: dict[str, tuple[Process, Callable[[Endpoint], None]]] = {}
        self._ends: dict[Endpoint, None] = {}
        self._known: dict[Process, None] = {}
        self._connecting: list[tuple[Process, str, asyncio.Future[Endpoint]]] = []
        self.down = False
        self.on_reset: Callable[[Endpoint, Endpoint], None] = lambda _near, _far: None

    # --- processes ------------------------------------------------------------------------------------------------------

    def listen(self, process: Process, address: str, handler: Callable[[Endpoint], None]) -> None:
        """`handler(endpoint)` in the process' context for each connection."""
        self._listening[address] = process, handler
        self._notice(process)

    def _notice(self, process: Process) -> None:
        """When it dies, so do its connections."""
        if process not in self._known:
            self._known[process] = None
            process.on_end.append(lambda: self._died(process))

    def unlisten(self, process: Process) -> None:
        """No new connections to this process."""
        for address in [a for a, (p, _) in self._listening.items() if p is process]:
            del self._listening[address]

    def _died(self, process: Process) -> None:
        self.unlisten(process)
        told = process.host not in self.gone_hosts
        for end in [end for end in self._ends if end.process is process]:
            end.over = True
            self.forget(end)
            if told:
                self.carry(end.peer, _OVER)

    async def connect(self, process: Process, address: str, until: float | None = None) -> Endpoint:
        """Refused, or TimeoutError at `until`."""
        future: asyncio.Future[Endpoint] = self.loop.create_future()
        self._notice(process)
        self._connecting.append((process, address, future))
        self.loop.in_world(self._delay(process.host, self._host_of(address)), self._try_connect, process, address, future)
        timer = None
        if until is not None:
            timer = self.loop.call_at(until, _fail, future, TimeoutError(f"no connection to {address} in time"))
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()

    def _host_of(self, address: str) -> str:
        found = self._listening.get(address)
        return found[0].host if found is not None else address.partition(":")[0]

    def _try_connect(self, process: Process, address: str, future: asyncio.Future[Endpoint]) -> None:
        if future.done() or not process.alive or self.down:
            self._connecting = [c for c in self._connecting if c[2] is not future]
            return
        host = self._host_of(address)
        if not self.reaches(process.host, host) or not self.reaches(host, process.host):
            return  # tried again when the cable is mended
        self._connecting = [c for c in self._connecting if c[2] is not future]
        found = self._listening.get(address)
        if found is None or not found[0].alive:
            _fail(future, Refused(f"nobody listens at {address}"))
            return
        theirs, handler = found
        near, far = Endpoint(self, process), Endpoint(self, theirs)
        near.peer, far.peer = far, near
        self._ends[near] = self._ends[far] = None
        theirs.call(handler, far)
        self.loop.in_world(self._delay(host, process.host), _give, future, near)

    def forget(self, end: Endpoint) -> None:
        self._ends.pop(end, None)

    # --- messages -------------------------------------------------------------------------------------------------------

    def _delay(self, source: str, target: str) -> float:
        draw = self.random.random
        if source == target:
            low, high = LOCAL_S
            return low + (high - low) * draw()
        quality = self.quality
        delay = quality.delay_s + quality.jitter_s * draw()
        return delay + quality.slow_s * draw() if draw() < quality.slow_share else delay

    def carry(self, target: Endpoint, message: Any) -> None:
        """A message to this end gets under way."""
        if self.down:
            return
        source, host = target.peer.process.host, target.process.host
        if source != host:
            if not self.reaches(source, host):
                target.stalled.append(message)
                return
            if self.quality.loss and message is not _OVER and self.random.random() < self.quality.loss:
                self.reset(target)
                return
        at = max(target.last_at, self.loop.time() + self._delay(source, host))
        target.last_at = at
        self.loop.in_world(at - self.loop.time(), self._arrive, target, message)

    def _arrive(self, target: Endpoint, message: Any) -> None:
        if target.stalled or not self.reaches(target.peer.process.host, target.process.host):
            target.stalled.append(message)
        else:
            target.arrive(message)

    # --- trouble --------------------------------------------------------------------------------------------------------

    def reaches(self, source: str, target: str) -> bool:
        if source == target:
            return target not in self.gone_hosts
        return (source, target) not in self._blocked and target not in self.gone_hosts and source not in self.gone_hosts

    def reset(self, end: Endpoint) -> None:
        """Both ends hear that the connection is over; what was under way is lost."""
        self.on_reset(end, end.peer)
        for one in (end, end.peer):
            self.loop.in_world(self._delay("a", "b"), one.arrive, _OVER)

    def reset_between(self, near: str, far: str) -> None:
        """All connections between two hosts are reset."""
        for end in list(self._ends):
            if end.process.host == near and end.peer.process.host == far:
                self.reset(end)

    def block(self, source: str, target: str) -> None:
        """From now on nothing of host `source` reaches host `target`."""
        since = self._blocked.setdefault((source, target), self.loop.time())
        self.loop.in_world(KEEPALIVE_S, self._give_up, source, target, since)

    def unblock(self, source: str, target: str) -> None:
        if self._blocked.pop((source, target), None) is not None:
            self.mend()

    def mend(self) -> None:
        """Sends on what was held up, where it can go again."""
        for end in list(self._ends):
            if end.stalled and self.reaches(end.peer.process.host, end.process.host):
                held, end.stalled = end.stalled, []
                for message in held:
                    self.carry(end, message)
        for process, address, future in list(self._connecting):
            self.loop.in_world(self._delay(process.host, self._host_of(address)), self._try_connect, process, address, future)

    def unblock_all(self) -> None:
        self._blocked.clear()
        self.mend()

    def _give_up(self, source: str, target: str, since: float) -> None:
        if self._blocked.get((source, target)) != since:
            return
        for end in list(self._ends):
            if (end.process.host, end.peer.process.host) in ((source, target), (target, source)):
                end.arrive(_OVER)

    def vanish(self, host: str) -> None:
        """The host loses power: no word of its processes any more. Kill them after this."""
        self.gone_hosts[host] = None
        self.loop.in_world(KEEPALIVE_S, self._give_up_on, host)

    def appear(self, host: str) -> None:
        """The host is on again."""
        self.gone_hosts.pop(host, None)
        self._give_up_on(host)
        self.mend()

    def _give_up_on(self, host: str) -> None:
        for end in list(self._ends):
            if end.peer.process.host == host and not end.peer.process.alive:
                end.arrive(_OVER)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _give(future: asyncio.Future[Endpoint], end: Endpoint) -> None:
    if future.done():
        end.close()
    else:
        future.set_result(end)


class Pool:
    """Connections of one process to one address, one request at a time on each; what failed is not used again."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network, self._process, self.address = network, process, address
        self._idle: list[Endpoint] = []

    async def call(self, request: Any, until: float) -> Any:
        """The answer. Raises Reset, Refused, TimeoutError."""
        end = await self.take(until)
        try:
            end.send(request)
            answer = await end.recv(until)
        except BaseException:
            end.close()
            raise
        self.give(end)
        return answer

    async def take(self, until: float) -> Endpoint:
        while self._idle:
            end = self._idle.pop()
            if not end.over:
                return end
        return await self._network.connect(self._process, self.address, until)

    def give(self, end: Endpoint) -> None:
        if len(self._idle) < POOL_IDLE_MAX and not end.over:
            self._idle.append(end)
        else:
            end.close()

    def post(self, message: Any) -> None:
        """Sends something that is not answered, on an idle connection if there is one."""
        if self._idle and not self._idle[-1].over:
            self._idle[-1].send(message)

    def close(self) -> None:
        idle, self._idle = self._idle, []
        for end in idle:
            end.close()
