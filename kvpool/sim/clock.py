"""Simulated time: an event loop whose clock jumps from event to event, and processes that can be paused, skewed and killed.

Owns time, order and processes. The order of what runs depends on the program and its seed alone: nothing reads the wall clock,
no callback goes by a hash or an address. The loop is an asyncio loop, so that the master's and the agent's own code run on it as
they are. What travels between processes is `network`, what outlives them is `disk`.

Every callback carries a context, and with it the process that asked for it:

    paused     its callbacks are put aside, in order, timers that came due too; resuming runs them
    killed     its callbacks never run again; what it had waited for is forgotten

After Zhou et al., FoundationDB (SIGMOD 2021), and TigerBeetle's simulator.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("kvpool_sim_process", default=None)
STEPS_MAX: Final = 5_000_000  # callbacks of one run: beyond, something spins
_WORLD: Final = contextvars.Context()  # of what belongs to no process: cables, faults


class Process:
    """What can be paused and killed. `random` is its own, so that others' draws do not change it. `name` is of one start."""

    def __init__(self, loop: SimLoop, name: str, *, host: str, seed: str) -> None:
        self.loop, self.name, self.host = loop, name, host
        self.random = random.Random(f"{seed}/{name}")
        self.alive = True
        self.paused = False
        self.paused_s = 0.0  # in all, pauses that have ended
        self.paused_at = 0.0
        self.jumped_s = 0.0  # how far its clock was set forward
        self.rate = 1.0  # how fast its clock runs
        self.parked: list[asyncio.Handle] = []
        self.on_end: list[Callable[[], None]] = []
        loop.processes.append(self)
        self._context = _WORLD.copy()
        self._context.run(_PROCESS.set, self)

    def now_s(self) -> float:
        """Its monotonic clock."""
        return 1_000.0 + self.loop.time() * self.rate + self.jumped_s

    def now_ms(self) -> int:
        return int(self.now_s() * 1000)

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str = "") -> asyncio.Task[T]:
        """Runs a coroutine as a part of this process."""
        return self.loop.create_task(coro, name=name or self.name, context=self._context.copy())

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Runs a function as a part of this process, soon."""
        self.loop.call_soon(function, *args, context=self._context)

    def pause(self) -> None:
        if self.alive and not self.paused:
            self.paused, self.paused_at = True, self.loop.time()

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self.paused_s += self.loop.time() - self.paused_at
            self.loop.requeue(self.parked)
            self.parked = []

    def kill(self) -> None:
        """Ends it as SIGKILL does: nothing of it runs any more, not even its `finally` (what would have is kept for `end`)."""
        if self.alive:
            self.alive, self.paused = False, False
            ends, self.on_end = self.on_end, []
            for call in ends:
                self.loop.call_soon(call, context=_WORLD)


def here() -> Process:
    """The process whose code runs now."""
    process = _PROCESS.get()
    assert process is not None, "this code belongs to a process"
    return process


class SimLoop(asyncio.AbstractEventLoop):
    """Of one run. `run_until` drives it; `troubles` has what went wrong unexpectedly, in words."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._n = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = 256
        self._jobs: dict[Any, deque[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]]] = {}
        self._ending = False
        self.processes: list[Process] = []
        self.steps = 0
        self.troubles: list[str] = []

    # --- what asyncio asks of a loop ------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + max(0.0, delay), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._n += 1
        heapq.heappush(self._timers, (when, self._n, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it is passed over when it comes up

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None) -> asyncio.Task[Any]:
        """The loop keeps its tasks: what a dead process left behind must not be collected, which would run its `finally`."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        if len(self._tasks) >= self._prune_at:
            self._prune()
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """The work of an executor's one thread, one after the other; `func` may give a coroutine, for work that takes its time.
        As with threads: cancelling what is under way does not end it."""
        future = self.create_future()
        jobs = self._jobs.setdefault(executor, deque())
        jobs.append((future, func, args))
        if len(jobs) == 1:
            self.create_task(self._thread(jobs), name="thread")
        return future

    async def _thread(self, jobs: deque[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]]) -> None:
        while jobs:
            future, func, args = jobs[0]
            if not future.cancelled():
                try:
                    result = func(*args)
                    if asyncio.iscoroutine(result):
                        result = await result
                    if not future.done():
                        future.set_result(result)
                except Exception as error:
                    if not future.done():
                        future.set_exception(error)
            jobs.popleft()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.troubles.append(f"{context.get('message')}: {error!r}{where(error)}")

    # --- driving --------------------------------------------------------------------------------------------------------

    def in_world(self, delay: float, callback: Any, *args: Any) -> asyncio.TimerHandle:
        """A callback that belongs to no process."""
        return self.call_at(self._now + delay, callback, *args, context=_WORLD)

    def requeue(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def run_until(self, when: float) -> None:
        """Runs what is due up to this time."""
        asyncio._set_running_loop(self)
        try:
            self._run_until(when)
        finally:
            asyncio._set_running_loop(None)

    def _run_until(self, when: float) -> None:
        ready, timers = self._ready, self._timers
        while True:
            while ready:
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                process = handle._context.get(_PROCESS)  # type: ignore[attr-defined]
                if process is not None and (process.paused or not process.alive) and not self._ending:
                    process.parked.append(handle)
                    continue
                self.steps += 1
                handle._run()
            if self.steps > STEPS_MAX:
                raise RuntimeError(f"{STEPS_MAX} callbacks by {self._now:.3f} s: something spins")
            if not timers or timers[0][0] > when:
                break
            self._now = max(self._now, timers[0][0])
            while timers and timers[0][0] <= self._now:
                ready.append(heapq.heappop(timers)[2])
        self._now = max(self._now, when)

    def _prune(self) -> None:
        left = []
        for task in self._tasks:
            if not task.done():
                left.append(task)
            elif not task.cancelled() and task._log_traceback:
                error = task.exception()
                if error is not None:
                    self.troubles.append(f"task {task.get_name()} failed: {error!r}{where(error)}")
        self._tasks = left
        self._prune_at = max(256, 2 * len(left))

    def end(self) -> list[str]:
        """Ends all tasks, of dead processes too, after the story is over; returns the troubles of the time before."""
        self._prune()
        troubles = list(self.troubles)
        self._ending = True
        for process in self.processes:
            self.requeue(process.parked)
            process.parked = []
        for _ in range(8):
            left = [task for task in self._tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            self.run_until(self._now + 60.0)
        for task in self._tasks:
            if task.done():
                _ = task.cancelled() or task.exception()
            else:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks, self._timers = [], []
        self._ready.clear()
        return troubles


def where(error: BaseException | None) -> str:
    """The innermost line of an exception."""
    trace = error.__traceback__ if error is not None else None
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f" at {trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
