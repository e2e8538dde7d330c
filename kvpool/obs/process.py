"""What a role asks of the kernel about its own process."""

from __future__ import annotations

import ctypes
import os
import signal
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


def ignore_stops() -> None:
    """From here on SIGTERM and SIGINT do nothing: the stop is under way, and ends by itself. Main thread only."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
