"""A worker's arena as a client sees it: the blocks' bytes, read-only, and the generation words that guard them.

Owns the two mappings of one namespace of one worker incarnation. Places in it come from READ answers (`shm`); a place is good as
long as its generation word has not changed, which must be looked at after the bytes were copied.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.core.frames import AttachRequest, CodesAnswer, FrameError, Op
from kvpool.core.types import NamespaceUid
from kvpool.transport.connection import Connection

_GENERATIONS_UNIT: Final = 1024  # ATTACH's count is in these


class ArenaMap:
    """Read-only; any thread. The mappings go when neither this object nor a view of it is left."""

    __slots__ = ("_data", "_generations", "address", "n_bytes", "n_generations")

    def __init__(self, data_fd: int, generations_fd: int, *, n_bytes: int, n_generations: int) -> None:
        """The descriptors stay the caller's. Raises OSError or ValueError when they are no such memory."""
        data = mmap.mmap(data_fd, n_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        generations = mmap.mmap(generations_fd, 8 * n_generations, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._data = np.frombuffer(data, dtype=np.uint8)
        self._generations = np.frombuffer(generations, dtype="<u8")
        self.address = int(self._data.ctypes.data)
        self.n_bytes = n_bytes
        self.n_generations = n_generations

    def view(self, offset: int, length: int) -> memoryview:
        """Read-only bytes of a place. The caller has checked that it lies inside."""
        return self._data.data[offset : offset + length].toreadonly()

    def generations(self, indexes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The words now (a copy)."""
        return self._generations[indexes]


def attach(connection: Connection, namespace: NamespaceUid, *, deadline: float) -> ArenaMap:
    """Asks for the namespace's arena and maps it. Raises LinkError; keeps no descriptor in any case."""
    answer = connection.call(Op.ATTACH, AttachRequest(namespace).encode(), deadline=deadline, n_fds=2)
    try:
        codes = CodesAnswer.decode(answer.meta)
        return ArenaMap(*answer.fds, n_bytes=codes.number, n_generations=codes.count * _GENERATIONS_UNIT)
    except (FrameError, OSError, ValueError) as error:
        raise connection.protocol_error(f"arena: {error}") from error
    finally:
        for fd in answer.fds:
            os.close(fd)
