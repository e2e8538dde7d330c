"""The ring: memory that one connection shares with its worker, through which puts go.

Owns the mapping and which part of it is free. What lies in it is said by WRITE and FILL frames (`shm`). The ring is cut in equal
parts; a part is free again when the request that named it was answered.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

import numpy as np

from kvpool.core.frames import CodesAnswer, FrameError, NumberRequest, Op
from kvpool.transport.base import LinkCause, LinkError
from kvpool.transport.connection import Connection

RING_BYTES: Final = 32 << 20  # asked for; the worker may give less
N_PARTS: Final = 4  # one is filled while the worker reads the others; small enough to stay near the caches


class Ring:
    """`address`: of the mapping's first byte. The mapping lives as long as this object; one user at a time."""

    __slots__ = ("_array", "address", "n_bytes", "part_bytes")

    def __init__(self, fd: int, n_bytes: int) -> None:
        """Maps `fd` (which stays the caller's). Raises OSError or ValueError when it is no such memory."""
        mapping = mmap.mmap(fd, n_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._array = np.frombuffer(mapping, dtype=np.uint8)
        self.address = int(self._array.ctypes.data)
        self.n_bytes = n_bytes
        self.part_bytes = n_bytes // N_PARTS // 4096 * 4096


def ring_of(connection: Connection, *, deadline: float) -> Ring | None:
    """The connection's ring, made at first use; None when the worker has no memory left for one (payload then goes over the
    socket). Raises LinkError."""
    if connection.ring is not None or connection.ring_refused:
        return connection.ring
    try:
        answer = connection.call(Op.RING, NumberRequest(RING_BYTES).encode(), deadline=deadline, n_fds=1)
    except LinkError as error:
        if error.cause is LinkCause.BUSY and connection.clean:
            connection.ring_refused = True
            return None
        raise
    (fd,) = answer.fds
    try:
        n_bytes = CodesAnswer.decode(answer.meta).number
        if n_bytes < N_PARTS * 4096:
            raise ValueError(f"a ring of {n_bytes} bytes")
        connection.ring = Ring(fd, n_bytes)
    except (FrameError, OSError, ValueError) as error:
        raise connection.protocol_error(f"ring: {error}") from error
    finally:
        os.close(fd)
    return connection.ring
