"""Rings: a small piece of memory of one connection's own that a client of this host fills with the blocks it puts.

Owns memfds, mappings and the budget over all connections. What is done with their bytes is `write_path`.
The memfd is sealed against shrinking, so that no client can make the worker fault on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.core.types import PAGE_BYTES

RING_BYTES_MIN: Final = 64 << 10


class Ring:
    """`array`: uint8 [n_bytes], shared with the client, which may write at any time: copy first, check the copy."""

    def __init__(self, n_bytes: int) -> None:
        """Raises OSError when there are no descriptors or no memory."""
        self.n_bytes = n_bytes
        self.fd = os.memfd_create("kvpool-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, n_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self.fd, n_bytes)
        except OSError:
            os.close(self.fd)
            raise
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def close_fd(self) -> None:
        """The client has it now; the mapping stays."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Nothing may copy from it any more."""
        self.close_fd()
        self.array = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


class RingBudget:
    """Bytes of all rings together; thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used

    def open(self, wanted_bytes: int, *, limit_bytes: int) -> Ring | None:
        """A ring of the wanted size, at most `limit_bytes`, whole pages; None when the budget has no room for it."""
        n_bytes = min(max(wanted_bytes, RING_BYTES_MIN), max(limit_bytes, RING_BYTES_MIN))
        n_bytes = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            if self._used + n_bytes > self.total_bytes:
                return None
            self._used += n_bytes
        try:
            return Ring(n_bytes)
        except OSError:
            with self._lock:
                self._used -= n_bytes
            return None

    def give_back(self, ring: Ring) -> None:
        ring.close()
        with self._lock:
            self._used -= ring.n_bytes
