"""What a role asks of the kernel about its own process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

from kvpool.errors import KVPoolError

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(pid: int) -> None:
    """The kernel kills this process when the thread of `pid` that started it ends, however that happens. Raises KVPoolError when
    `pid` is not the parent, or not any more."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise KVPoolError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != pid:
        raise KVPoolError(f"parent_pid: {pid} is not the parent of this process (any more)")


def on_stops(loop: asyncio.AbstractEventLoop, stop: Callable[[int], object]) -> None:
    """SIGTERM and SIGINT call `stop` with their number on the loop, until `ignore_stops`. Main thread only.

    Not the loop's own handlers: a loop that closes gives those signals back to what ends the process on the spot, and one that
    comes while the process gives its things back would spoil the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: loop.call_soon_threadsafe(stop, number))


def ignore_stops() -> None:
    """From here on SIGTERM and SIGINT do nothing: the stop is under way, and ends by itself. Called before the loop of `on_stops`
    is closed. Main thread only."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
