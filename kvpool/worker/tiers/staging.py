"""Staging memory: page-aligned buffers for direct I/O, from one bounded budget.

Owns the buffers; what is read into them is the caller's. Waiting is first come, first served, with a deadline.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from types import TracebackType

from kvpool.worker.tiers.base import TierError, Trouble, round_up


class Staging:
    """One buffer that was taken: `view` is a writable memoryview [n_bytes], page-aligned. Give it back once, with `release`
    or by leaving the `with`. Sub-views must be gone by then: the memory is used again."""

    __slots__ = ("_map", "_pool", "view")

    def __init__(self, pool: StagingPool, memory: mmap.mmap, n_bytes: int) -> None:
        self._pool: StagingPool | None = pool
        self._map = memory
        self.view = memoryview(memory)[:n_bytes]

    def release(self) -> None:
        """Any thread; the second time does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self.view.release()
            pool._give_back(self._map, reusable=not _is_viewed(self._map))

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class StagingPool:
    """Bounded page-aligned memory, `capacity_bytes` in all; thread-safe.

    A buffer larger than the whole pool is given out when nothing else is: one block of the largest size must be readable.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._waiting: deque[object] = deque()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._free_bytes = 0
        self._used_bytes = 0
        self._closed = False

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def kept_bytes(self) -> int:
        """Given back and kept for the next."""
        return self._free_bytes

    @property
    def waiting(self) -> int:
        """How many calls wait for memory."""
        return len(self._waiting)

    def take(self, n_bytes: int, *, deadline: float) -> Staging:
        """A buffer of at least `n_bytes` (rounded up to pages), waited for until `deadline` (time.monotonic() seconds).

        Raises TierError BUSY when the deadline passes first (nothing is left behind), CLOSED after close.
        """
        length = round_up(max(n_bytes, 1))
        ticket = object()
        with self._room:
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or not self._fits(length):
                    if self._closed:
                        raise TierError(Trouble.CLOSED, "staging memory is closed")
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._room.wait(left):
                        if self._waiting[0] is ticket and self._fits(length):
                            break
                        raise TierError(Trouble.BUSY, f"no {length} bytes of staging memory before the deadline")
                if self._closed:
                    raise TierError(Trouble.CLOSED, "staging memory is closed")
                memory = self._take_free(length)
                self._used_bytes += length
            finally:
                self._waiting.remove(ticket)
                self._room.notify_all()
        try:
            return Staging(self, memory if memory is not None else mmap.mmap(-1, length), length)
        except OSError as error:
            with self._room:
                self._used_bytes -= length
                self._room.notify_all()
            raise TierError(Trouble.BUSY, f"no {length} bytes of staging memory: {error.strerror}") from error

    def close(self) -> None:
        """Frees what is not in use; buffers that are out are freed when they are given back."""
        with self._room:
            self._closed = True
            for maps in self._free.values():
                for memory in maps:
                    memory.close()
            self._free.clear()
            self._free_bytes = 0
            self._room.notify_all()

    def _fits(self, length: int) -> bool:
        return self._used_bytes + length <= self.capacity_bytes or self._used_bytes == 0

    def _take_free(self, length: int) -> mmap.mmap | None:
        """A kept buffer of this length, or None; drops other kept ones when a new one would go over the budget."""
        maps = self._free.get(length)
        if maps:
            self._free_bytes -= length
            return maps.pop()
        while self._free_bytes and self._used_bytes + self._free_bytes + length > self.capacity_bytes:
            kept = next(n for n, some in self._free.items() if some)
            self._free[kept].pop().close()
            self._free_bytes -= kept
        self._free = {n: some for n, some in self._free.items() if some}
        return None

    def _give_back(self, memory: mmap.mmap, *, reusable: bool) -> None:
        with self._room:
            length = len(memory)
            self._used_bytes -= length
            if reusable and not self._closed and self._used_bytes + self._free_bytes + length <= self.capacity_bytes:
                self._free.setdefault(length, []).append(memory)
                self._free_bytes += length
            elif reusable:
                memory.close()
            self._room.notify_all()


def _is_viewed(memory: mmap.mmap) -> bool:
    """Whether somebody still has a view of it: then nobody else may use it. (Python refuses to resize such a map.)"""
    try:
        memory.resize(len(memory))
    except BufferError:
        return True
    return False
