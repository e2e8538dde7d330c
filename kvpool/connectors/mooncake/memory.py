"""Memory named by pointers: views of it, scatter and gather, staging, and the host allocator of Mooncake's API.

A pointer is trusted as in Mooncake: whoever gives one vouches for its bytes until the call has returned.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kvpool.transport.copy_plan import address_of, copy_runs, merge_runs

STAGING_BYTES_MAX: Final = 64 << 20  # kept for the next call; scattered values are staged in parts of about this size
_WRITABLE: Final = 0x200  # PyBUF_WRITE
_READABLE: Final = 0x100

_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def view_of(pointer: int, size: int, *, writable: bool) -> memoryview:
    """`size` bytes at `pointer`, uint8. No copy; nothing keeps the memory alive."""
    view: memoryview = _from_memory(pointer, size, _WRITABLE if writable else _READABLE)
    return view


def joined(pointers: Sequence[int], sizes: Sequence[int]) -> int:
    """The address of what the pieces are when they lie back to back, else 0."""
    start = end = 0
    for pointer, size in zip(pointers, sizes, strict=True):
        if not size:
            continue
        if start and pointer != end:
            return 0
        start, end = start or pointer, pointer + size
    return start


def gather(target: memoryview, pieces: Sequence[tuple[Sequence[int], Sequence[int]]], *, deadline: float) -> None:
    """The pieces (pointers, sizes) of all values back to back into `target`. Frees the GIL. LinkError past the deadline."""
    _copy(target, pieces, out_of=False, deadline=deadline)


def scatter(source: memoryview, pieces: Sequence[tuple[Sequence[int], Sequence[int]]], *, deadline: float) -> None:
    """`source` into the pieces of all values, back to back. As `gather`."""
    _copy(source, pieces, out_of=True, deadline=deadline)


def _copy(flat: memoryview, pieces: Sequence[tuple[Sequence[int], Sequence[int]]], *, out_of: bool, deadline: float) -> None:
    lengths = np.array([size for _, sizes in pieces for size in sizes], dtype=np.uint64)
    scattered = np.array([pointer for pointers, _ in pieces for pointer in pointers], dtype=np.uint64)
    in_flat = np.uint64(address_of(flat)) + np.cumsum(lengths) - lengths
    targets, sources = (scattered, in_flat) if out_of else (in_flat, scattered)
    copy_runs(*merge_runs(targets, sources, lengths), deadline=deadline)


class Staging:
    """Buffers for values on their way between the pool and scattered memory, kept for the next call. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[np.ndarray[Any, Any]] = []

    def take(self, n_bytes: int) -> np.ndarray[Any, Any]:
        """At least `n_bytes` bytes, of nobody else until `give`."""
        with self._lock:
            for index, buffer in enumerate(self._free):
                if buffer.nbytes >= n_bytes:
                    return self._free.pop(index)
        return np.empty(n_bytes, dtype=np.uint8)

    def give(self, buffer: np.ndarray[Any, Any]) -> None:
        with self._lock:
            self._free.append(buffer)
            self._free.sort(key=lambda one: one.nbytes)
            while sum(one.nbytes for one in self._free) > STAGING_BYTES_MAX:
                self._free.pop(0 if len(self._free) > 1 else -1)


class BufferHandle(bytearray):
    """What `get_buffer` returns: the value, as a buffer, with its address and size."""

    def ptr(self) -> int:
        """Address of the first byte, valid while this object lives."""
        return address_of(memoryview(self))

    def size(self) -> int:
        return len(self)


class MooncakeHostMemAllocator:
    """Page-aligned host memory by its address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}

    def alloc(self, n_bytes: int) -> int:
        """Address of `n_bytes` zeroed bytes; 0 when there is no memory."""
        if n_bytes <= 0:
            return 0
        try:
            block = mmap.mmap(-1, n_bytes)
        except (OSError, OverflowError, ValueError, MemoryError):
            return 0
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(block))
        with self._lock:
            self._maps[pointer] = block
        return pointer

    def free(self, pointer: int) -> int:
        """0, or -1 for what `alloc` did not give."""
        with self._lock:
            block = self._maps.pop(pointer, None)
        if block is None:
            return -1
        block.close()
        return 0


def bind_to_numa_node(node: int) -> None:
    """Binds the calling thread to the CPUs of NUMA node `node`, as far as it may use them. Does nothing for a node that is not
    there. (Memory follows by first touch.)"""
    try:
        with open(f"/sys/devices/system/node/node{int(node)}/cpulist", encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    allowed = cpus & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)
