"""Copies between shared memory and callers' buffers: which bytes are one run, and the copying.

Owns addresses. Pure up to `copy_runs`, which frees the GIL while it copies; callers keep the buffers alive and have checked
bounds. Addresses instead of array slices: thousands of places are merged by a few numpy operations, without objects for each.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.transport.base import LinkCause, LinkError, Strided

U64 = npt.NDArray[np.uint64]

COPY_BYTES_MAX: Final = 32 << 20  # of one copy: the deadline is looked at between them


def address_of(buffer: memoryview) -> int:
    """Of its first byte; 0 for an empty one."""
    if not buffer.nbytes:
        return 0
    if not buffer.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])


def addresses_of(buffers: Sequence[memoryview]) -> U64:
    """u64 [n]."""
    if isinstance(buffers, Strided):
        steps = np.arange(len(buffers), dtype=np.uint64) * np.uint64(buffers.each)
        return steps + np.uint64(address_of(buffers.whole))
    return np.array([address_of(buffer) for buffer in buffers], dtype=np.uint64)


def merge_runs(targets: U64, sources: U64, lengths: U64) -> tuple[U64, U64, U64]:
    """n copies of `lengths` bytes -> the fewest copies in the same order: neighbours that touch at both ends become one."""
    if len(lengths) < 2:
        return targets, sources, lengths
    apart = (targets[1:] != targets[:-1] + lengths[:-1]) | (sources[1:] != sources[:-1] + lengths[:-1])
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return targets[starts], sources[starts], np.add.reduceat(lengths, starts)


def copy_runs(targets: U64, sources: U64, lengths: U64, *, deadline: float) -> None:
    """Raises LinkError (TIMEOUT) between two runs; what was copied by then stays."""
    for target, source, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        for at in range(0, length, COPY_BYTES_MAX):
            if time.monotonic() >= deadline:
                raise LinkError(LinkCause.TIMEOUT, "deadline passed while copying from shared memory")
            ctypes.memmove(target + at, source + at, min(COPY_BYTES_MAX, length - at))


def split_by_bytes(sizes: Sequence[int], limit: int, *, n_max: int) -> Iterator[tuple[int, int]]:
    """Consecutive index ranges (start, stop) of at most `n_max` items and `limit` bytes together; a larger item goes alone."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and (total + size > limit or i - start >= n_max):
            yield start, i
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def cut_lanes(sizes: Sequence[int], n_lanes: int, *, lane_bytes_min: int) -> list[tuple[int, int]]:
    """At most `n_lanes` consecutive ranges of about the same bytes, none (but a lone block) below `lane_bytes_min`."""
    n, total = len(sizes), sum(sizes)
    n_lanes = max(1, min(n_lanes, n, total // max(1, lane_bytes_min)))
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    cuts = [int(np.searchsorted(ends, total * lane // n_lanes, side="left")) + 1 for lane in range(1, n_lanes)]
    edges = [0, *cuts, n]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]
