"""Blocking calls of the pool's client on threads of their own, with a bound on what waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Jobs:
    """Thread-safe. `n_threads` at work; `waiting_max` jobs in all, what is over that is refused."""

    def __init__(self, name: str, *, n_threads: int, waiting_max: int) -> None:
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._room = waiting_max
        self._closed = False

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T] | None:
        """None when there is no room, or all is closed."""
        with self._lock:
            if self._closed or self._room <= 0:
                return None
            self._room -= 1
            future = self._pool.submit(call, *args)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _future: Future[Any]) -> None:
        with self._lock:
            self._room += 1

    def close(self) -> None:
        """Waits for the jobs that run (each has its deadline); those that wait are cancelled. Idempotent."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
