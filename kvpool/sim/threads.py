"""Code that is written for threads, on the simulated loop: the client and the drain run as they are, and still from one seed.

Each of their threads is a greenlet, driven by a task of its process: where it would block it hands what it waits for to its task,
which waits on the loop. `stand_ins` puts this module's clock, locks, threads and pools, and the simulated ways to masters and
workers, into their place in those modules for the time of a run. As gevent does it, for these modules alone.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from greenlet import getcurrent, greenlet

from kvpool.sim.clock import here

T = TypeVar("T")

VIEW_TTL_MS: Final = 800  # of a view's hold in a run, which is short
MODULES: Final = (
    "kvpool.client.context", "kvpool.client.holds", "kvpool.client.master", "kvpool.client.mirror", "kvpool.client.mirror_index",
    "kvpool.client.peers", "kvpool.client.put_session", "kvpool.client.reading", "kvpool.client.views", "kvpool.client.writing",
    "kvpool.worker.drain", "kvpool.worker.elsewhere", "kvpool.worker.sender",
)  # fmt: skip


async def blocking(call: Callable[..., T], *args: Any) -> T:
    """Runs blocking code as a part of the present process. Cancelled: what it waits for raises CancelledError."""
    thread = greenlet(call)
    thread.gr_context = contextvars.copy_context()
    asked: Any = thread.switch(*args)
    while not thread.dead:
        try:
            answer = await asked
        except BaseException as error:
            asked = thread.throw(error)
        else:
            asked = thread.switch(answer)
    result: T = asked
    return result


def wait(awaitable: Awaitable[T]) -> T:
    """By blocking code: waits for this. In the loop's own code there is nothing that could wait."""
    driver = getcurrent().parent
    assert driver is not None, "only code under `blocking` can wait"
    answer: T = driver.switch(awaitable)
    return answer


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _Waiters:
    """Who waits for something to change."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def wait(self, timeout: float | None) -> None:
        """Until `wake` or the time is up."""
        loop = here().loop
        waiter = loop.create_future()
        timer = None if timeout is None else loop.call_later(timeout, _settle, waiter, context=contextvars.copy_context())
        self._waiting.append(waiter)
        try:
            wait(waiter)
        finally:
            self._waiting.remove(waiter)
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        for waiter in self._waiting:
            _settle(waiter)


class Lock:
    """threading.Lock."""

    def __init__(self) -> None:
        self._held = False
        self._waiters: _Waiters | None = None

    def acquire(self) -> bool:
        while self._held:
            if self._waiters is None:
                self._waiters = _Waiters()
            self._waiters.wait(None)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        if self._waiters is not None:
            self._waiters.wake()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """threading.Event."""

    def __init__(self) -> None:
        self._set = False
        self._waiters = _Waiters()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._waiters.wait(timeout)
        return self._set


class Condition:
    """threading.Condition."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or Lock()
        self._waiters = _Waiters()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> None:
        self._lock.release()
        try:
            self._waiters.wait(timeout)
        finally:
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        loop = here().loop
        until = None if timeout is None else loop.time() + timeout
        while not (found := predicate()) and (until is None or loop.time() < until):
            self.wait(None if until is None else until - loop.time())
        return found

    def notify_all(self) -> None:
        self._waiters.wake()


class Thread:
    """threading.Thread, of the process that starts it."""

    def __init__(self, *, target: Callable[[], None], name: str = "", daemon: bool = False) -> None:
        del daemon
        self._target, self.name = target, name
        self._done = Event()
        self._done.set()

    def start(self) -> None:
        self._done.clear()
        here().spawn(blocking(self._run), name=self.name)

    def _run(self) -> None:
        current: Any = getcurrent()
        current.simulated_thread = self
        try:
            self._target()
        finally:
            self._done.set()

    def is_alive(self) -> bool:
        return not self._done.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._done.wait(timeout)


class Job:
    """concurrent.futures.Future: of work that a process does meanwhile. `work` begins it, and raises what `result` raises."""

    def __init__(self, work: Callable[[], Awaitable[Any]], *, name: str) -> None:
        self._waiters = _Waiters()
        self.ended = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._calls: list[Callable[[Job], None]] = []
        self._task = here().spawn(self._run(work), name=name)

    async def _run(self, work: Callable[[], Awaitable[Any]]) -> None:
        try:
            value = await work()
        except BaseException as error:
            self.end(error=error)
            if not isinstance(error, Exception):
                raise
        else:
            self.end(value)

    def end(self, value: Any = None, *, error: BaseException | None = None) -> None:
        """The first end counts."""
        if not self.ended:
            self.ended, self._value, self._error = True, value, error
            self._waiters.wake()
            for call in self._calls:
                call(self)

    def result(self, timeout: float | None = None) -> Any:
        """TimeoutError when there is none in time."""
        if not self.ended:
            self._waiters.wait(timeout)
        if not self.ended:
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> None:
        self._task.cancel()

    def add_done_callback(self, call: Callable[[Job], None]) -> None:
        if self.ended:
            call(self)
        else:
            self._calls.append(call)


class Executor:
    """concurrent.futures.ThreadPoolExecutor, with as many threads as it takes."""

    def __init__(self, _workers: int, *, thread_name_prefix: str = "") -> None:
        self._name = thread_name_prefix

    def submit(self, call: Callable[..., Any], *args: Any) -> Job:
        return Job(lambda: blocking(call, *args), name=self._name)

    def shutdown(self, **_: Any) -> None:
        """Its jobs keep their own deadlines."""


def wait_all(jobs: Sequence[Job]) -> None:
    """concurrent.futures.wait."""
    for job in jobs:
        if not job.ended:
            job._waiters.wait(None)


def _sleep(delay_s: float) -> None:
    wait(asyncio.sleep(delay_s))


def _uniform(low: float, high: float) -> float:
    return here().random.uniform(low, high)


@contextmanager
def stand_ins(*, link: Callable[..., Any], channel: Callable[..., Any]) -> Iterator[None]:
    """For a run. `link(worker, options, deadline=)` and `channel(address, token)`: made by the process whose code asks."""
    names: dict[str, Any] = {
        "time": SimpleNamespace(monotonic=lambda: here().now_s(), sleep=_sleep),
        "random": SimpleNamespace(uniform=_uniform),
        "threading": SimpleNamespace(
            Lock=Lock, Event=Event, Condition=Condition, Thread=Thread,
            current_thread=lambda: getattr(getcurrent(), "simulated_thread", None),
        ),
        "ThreadPoolExecutor": Executor,
        "wait": wait_all,
        "make_link": link,
        "open_channel": channel,
        "VIEW_TTL_MS": VIEW_TTL_MS,
        "RENEW_S": VIEW_TTL_MS / 1e3 / 3,
        "host_id": lambda: here().host,
    }  # fmt: skip
    clock = {"time": names["time"]}
    places = [(import_module(module), names) for module in MODULES]
    chance = {"os": SimpleNamespace(urandom=lambda n: here().random.randbytes(n))}
    places += [(import_module("kvpool.master.state"), chance), (import_module("kvpool.master.redis_store"), clock)]
    before = [(module, name, getattr(module, name)) for module, new in places for name in new if hasattr(module, name)]
    for module, new in places:
        for name, value in new.items():
            if hasattr(module, name):
                setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
