"""Simulated gRPC of blocking callers: channels to a master, over the simulated network, that the generated stubs use.

One call at a time goes over a connection; a channel keeps some. What goes wrong is an RpcError with the code that grpc gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import grpc

from kvpool.errors import KVPoolError
from kvpool.sim.clock import Process
from kvpool.sim.disk import sleep
from kvpool.sim.network import Endpoint, Network, Pool, Refused
from kvpool.sim.threads import Job, wait
from kvpool.transport.rpc import status_of

CONNECT_S: Final = 1.0
KEEPALIVE_S: Final = 15.0  # a stream without a word for so long is over
AGAIN_S: Final = 0.1  # until a call that waits for a connection tries again


class Broken(grpc.RpcError):
    """A call's end that is no answer."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        super().__init__(details)
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata


def _cancelled() -> Broken:
    return Broken(grpc.StatusCode.CANCELLED, "the channel was closed")


def _unavailable(error: Exception) -> Broken:
    return Broken(grpc.StatusCode.UNAVAILABLE, str(error))


class Channel:
    """To one master, of one process."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self.network, self.process, self.address = network, process, address
        self.pool = Pool(network, process, address)
        self.closed = False
        self.jobs: dict[Job, None] = {}
        self.streams: dict[Stream, None] = {}

    def unary_unary(self, path: str, **_: Any) -> Unary:
        return Unary(self, path.rpartition("/")[2])

    def unary_stream(self, path: str, **_: Any) -> Any:
        return partial(Stream, self, path.rpartition("/")[2])

    def stream_stream(self, path: str, **_: Any) -> None:
        """Nobody who blocks has one."""

    def check(self) -> None:
        if self.closed:
            raise ValueError("the channel is closed")

    def close(self) -> None:
        self.closed = True
        for job in list(self.jobs):
            job.end(error=_cancelled())
            job.cancel()
        for stream in list(self.streams):
            stream.cancel()
        self.pool.close()


class Unary:
    """One method: called, or begun with `future`."""

    def __init__(self, channel: Channel, method: str) -> None:
        self._channel, self._method = channel, method

    def __call__(self, request: Any, *, timeout: float, wait_for_ready: bool = False) -> Any:
        return self._begin(request, timeout, wait_for_ready).result()

    def future(self, request: Any, *, timeout: float) -> Job:
        return self._begin(request, timeout, False)

    def _begin(self, request: Any, timeout: float, wait_for_ready: bool) -> Job:
        self._channel.check()
        job = Job(lambda: self._call(request, timeout, wait_for_ready), name=f"{self._channel.process.name} {self._method}")
        self._channel.jobs[job] = None
        job.add_done_callback(lambda job: self._channel.jobs.pop(job, None))
        return job

    async def _call(self, request: Any, timeout: float, wait_for_ready: bool) -> Any:
        loop = self._channel.process.loop
        until = loop.time() + timeout
        while True:
            try:
                answer = await self._channel.pool.call((self._method, request, until - loop.time()), until)
            except TimeoutError as error:
                raise Broken(grpc.StatusCode.DEADLINE_EXCEEDED, str(error)) from error
            except Refused as error:
                if not wait_for_ready:
                    raise _unavailable(error) from error
                await sleep(loop, min(AGAIN_S, max(0.0, until - loop.time())))
                continue
            except ConnectionError as error:
                raise _unavailable(error) from error
            if isinstance(answer, KVPoolError):
                raise Broken(*status_of(answer))
            return answer


class Stream:
    """What a server streams; an iterator that blocks."""

    def __init__(self, channel: Channel, method: str, request: Any) -> None:
        channel.check()
        self._channel, self._method, self._request = channel, method, request
        self._end: Endpoint | None = None
        self._over = False
        channel.streams[self] = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return wait(self._next())

    async def _next(self) -> Any:
        process = self._channel.process
        loop = process.loop
        try:
            if self._end is None:
                end = await self._channel.network.connect(process, self._channel.address, loop.time() + CONNECT_S)
                self._end = end
                if self._over:
                    end.close()
                    raise _cancelled()
                end.send((self._method, self._request, None))
            event = await self._end.recv(loop.time() + KEEPALIVE_S)
        except (ConnectionError, TimeoutError) as error:
            raise (_cancelled() if self._over else _unavailable(error)) from error
        if isinstance(event, KVPoolError):
            raise Broken(*status_of(event))
        return event

    def cancel(self) -> None:
        self._over = True
        self._channel.streams.pop(self, None)
        if self._end is not None:
            self._end.close()
