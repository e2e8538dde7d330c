"""The async face: the names of the blocking client as coroutines.

Calls run on threads of the client's own (THREADS_MAX at once, further ones queue), so they never block the loop, and never starve
the loop's default executor. Cancelling a coroutine gives up waiting: a call that has begun runs to its deadline on its thread, a
put may still store its blocks, and a get may still write into `out`. So buffers of a cancelled call must not be used again before
that deadline, or the client's `close`, which waits for such calls. Holds and views that a cancelled call got are released.

    client = await kvpool.aio.connect("127.0.0.1:7400")
    ns = await client.namespace("chat", layout, create=True)
    async with ns.hold(hashes) as hold:
        got = await ns.get(hashes[: hold.n_blocks], out, hold=hold)
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from kvpool.client import client as blocking
from kvpool.client.holds import Hold
from kvpool.client.namespace import Namespace
from kvpool.client.put_session import PutSession
from kvpool.client.results import GetResult, PinResult, PutResult, RemoveResult
from kvpool.client.views import View
from kvpool.core.hashing import PrefixHashes
from kvpool.core.layout import KVLayout

__all__ = ["AsyncClient", "AsyncNamespace", "AsyncPutSession", "connect"]

THREADS_MAX: Final = 16

T = TypeVar("T")


class _Threads:
    """Where the blocking calls run."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="kvpool-aio")

    async def run(self, call: Callable[..., T], *args: Any, undo: Callable[[T], None] | None = None, **kwargs: Any) -> T:
        """The call's result. When the coroutine is cancelled, `undo` gets what the call gives after all."""
        future = self._pool.submit(functools.partial(call, *args, **kwargs))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                future.add_done_callback(functools.partial(_undo, undo))
            raise

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True)


def _undo(undo: Callable[[T], None], future: Future[T]) -> None:
    if not future.cancelled() and future.exception() is None:
        undo(future.result())


class _Opened(Generic[T]):
    """What `hold`, `view` and `put_session` answer: to be awaited (then the caller ends it), or used in `async with`."""

    def __init__(self, threads: _Threads, begin: Callable[[], Awaitable[T]], end: Callable[[T], None]) -> None:
        self._threads, self._begin, self._end = threads, begin, end
        self._value: T | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._begin().__await__()

    async def __aenter__(self) -> T:
        self._value = await self._begin()
        return self._value

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        value, self._value = self._value, None
        if value is not None:
            await asyncio.shield(self._threads.run(self._end, value))


class AsyncPutSession:
    """See `put_session.PutSession`; its calls as coroutines."""

    def __init__(self, threads: _Threads, session: PutSession) -> None:
        self._threads, self._session = threads, session
        self.n_blocks = session.n_blocks

    async def write(self, block: int, offset: int, data: Any) -> None:
        await self._threads.run(self._session.write, block, offset, data)

    async def commit(self) -> PutResult:
        return await self._threads.run(self._session.commit)

    async def abort(self) -> None:
        await self._threads.run(self._session.abort)


class AsyncNamespace:
    """See `namespace.Namespace`: the same names, arguments and errors; but `keyed`, for engines' connectors, which block."""

    def __init__(self, threads: _Threads, namespace: Namespace) -> None:
        self._threads, self._blocking = threads, namespace
        self.name, self.layout = namespace.name, namespace.layout
        self.block_bytes, self.replicas = namespace.block_bytes, namespace.replicas

    async def hash(self, tokens: Any, **kwargs: Any) -> PrefixHashes:
        return await self._threads.run(self._blocking.hash, tokens, **kwargs)

    async def hashes(self, digests: Any, **kwargs: Any) -> PrefixHashes:
        return await self._threads.run(self._blocking.hashes, digests, **kwargs)

    async def match(self, hashes: PrefixHashes, **kwargs: Any) -> int:
        return await self._threads.run(self._blocking.match, hashes, **kwargs)

    async def wait(self, hashes: PrefixHashes, **kwargs: Any) -> int:
        return await self._threads.run(self._blocking.wait, hashes, **kwargs)

    async def put(self, hashes: PrefixHashes, blocks: Any, **kwargs: Any) -> PutResult:
        return await self._threads.run(self._blocking.put, hashes, blocks, **kwargs)

    async def get(self, hashes: PrefixHashes, out: Any, **kwargs: Any) -> GetResult:
        return await self._threads.run(self._blocking.get, hashes, out, **kwargs)

    async def take(self, hashes: PrefixHashes, out: Any, **kwargs: Any) -> GetResult:
        return await self._threads.run(self._blocking.take, hashes, out, **kwargs)

    async def prefetch(self, hashes: PrefixHashes, **kwargs: Any) -> int:
        return await self._threads.run(self._blocking.prefetch, hashes, **kwargs)

    async def touch(self, hashes: PrefixHashes, **kwargs: Any) -> int:
        return await self._threads.run(self._blocking.touch, hashes, **kwargs)

    async def remove(self, hashes: PrefixHashes, **kwargs: Any) -> RemoveResult:
        return await self._threads.run(self._blocking.remove, hashes, **kwargs)

    async def pin(self, hashes: PrefixHashes, **kwargs: Any) -> PinResult:
        return await self._threads.run(self._blocking.pin, hashes, **kwargs)

    async def unpin(self, hashes: PrefixHashes, **kwargs: Any) -> PinResult:
        return await self._threads.run(self._blocking.unpin, hashes, **kwargs)

    async def clear(self, **kwargs: Any) -> int:
        return await self._threads.run(self._blocking.clear, **kwargs)

    async def stats(self) -> dict[str, Any]:
        return await self._threads.run(self._blocking.stats)

    def hold(self, hashes: PrefixHashes, **kwargs: Any) -> _Opened[Hold]:
        call = functools.partial(self._blocking.hold, hashes, **kwargs)
        return _Opened(self._threads, lambda: self._threads.run(call, undo=Hold.release), Hold.release)

    def view(self, hashes: PrefixHashes, **kwargs: Any) -> _Opened[View]:
        call = functools.partial(self._blocking.view, hashes, **kwargs)
        return _Opened(self._threads, lambda: self._threads.run(call, undo=View.close), View.close)

    def put_session(self, hashes: PrefixHashes, **kwargs: Any) -> _Opened[AsyncPutSession]:
        call = functools.partial(self._blocking.put_session, hashes, **kwargs)

        async def begin() -> AsyncPutSession:
            return AsyncPutSession(self._threads, await self._threads.run(call, undo=PutSession.abort))

        return _Opened(self._threads, begin, lambda session: session._session.abort())


class AsyncClient:
    """See `client.Client`. Made by `connect`; close it, or use it in `async with`."""

    def __init__(self, threads: _Threads, client: blocking.Client) -> None:
        self._threads, self._blocking = threads, client

    async def namespace(self, name: str, layout: KVLayout, **kwargs: Any) -> AsyncNamespace:
        return AsyncNamespace(self._threads, await self._threads.run(self._blocking.namespace, name, layout, **kwargs))

    async def layouts(self, **kwargs: Any) -> dict[str, KVLayout]:
        return await self._threads.run(self._blocking.layouts, **kwargs)

    async def describe(self, **kwargs: Any) -> dict[str, Any]:
        return await self._threads.run(self._blocking.describe, **kwargs)

    async def close(self) -> None:
        """Ends the client and waits for calls that were cancelled while they ran."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._blocking.close()
        self._threads.shutdown()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


async def connect(master: str | None = None, **kwargs: Any) -> AsyncClient:
    """`kvpool.connect` as a coroutine."""
    threads = _Threads()
    try:
        return AsyncClient(threads, await threads.run(blocking.connect, master, undo=blocking.Client.close, **kwargs))
    except BaseException:
        threads._pool.shutdown(wait=False)
        raise
