"""Life tables: by class and age, how many runs of blocks got there, how many were used again there, and what that makes of a
run's worth.

Owns the counts, their smoothing and the index. Does not own what a run is (`hazard`). Life tables and their estimate are
Kaplan and Meier's (1958); the index, the best ratio of hits to block-seconds over all times at which one may give up, is
Gittins' (1979); hit density by class and age is from LHD (NSDI 2018).
"""

from __future__ import annotations

import struct
from array import array
from typing import Final, TypeAlias

import numpy as np
import xxhash
from librt.vecs import vec

from kvpool.core.policy.classes import EDGES_S, FIRST_EDGE_S, N_BINS, N_CLASSES, N_GAPS, N_NEW, N_TAILS, N_USES

DECAY: Final = 0.95  # of all counts at a refresh
SHRINKAGE: Final = 20.0  # runs that a coarser class's estimate weighs in a finer one's
PRIOR: Final = 0.25  # chance of use in one doubling of age before anything is known: the order of LRU
CHANCE_MAX: Final = 0.999
EVIDENCE_MIN: Final = 300.0  # runs, the later ones weighing more, that say enough to refuse a put by
_LEVELS: Final = (N_USES, N_TAILS, N_NEW, N_GAPS)  # a class by use count has so many finer ones by tail, and so on
PAUSE: Final = 4  # times the mean time between requests
REQUESTS_KEPT: Final = 64  # whose mean distance in time counts
_MAGIC: Final = b"KVLT\x02"
_HEAD: Final = struct.Struct("<5sHHQ")  # magic, classes, bins, xxh3-64 of the rest

Floats: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class LifeTable:
    """`index[key]`: the worth of a run of that class and age: hits to come for each block and second that it is kept; what is
    worth least leaves first. `version` grows whenever it changed."""

    def __init__(self) -> None:
        self._counts: Floats = np.zeros((2, N_CLASSES, N_BINS))  # reached, used
        self.reached: vec[float] = _zeros()  # by key, since the last refresh
        self.used: vec[float] = _zeros()
        self._unseen: Floats = gittins(np.full((1, N_BINS), PRIOR), FIRST_EDGE_S / 2)  # of classes not seen yet
        self._index: Floats = np.repeat(self._unseen, N_CLASSES, axis=0)
        self.index: vec[float] = vec[float](self._index.ravel())  # (the same)
        self.version = 0
        self.by_time = False  # worth goes by age alone
        self._request_s = FIRST_EDGE_S  # mean time between two requests
        self.is_sure = False  # enough was seen to refuse new blocks by it

    def next_request(self, gap_s: float) -> None:
        """So long after the one before it. (A long pause counts as a short one: it says nothing of the time between others.)"""
        mean_s = self._request_s
        self._request_s += (min(gap_s, PAUSE * mean_s + FIRST_EDGE_S) - mean_s) / REQUESTS_KEPT

    def refresh(self, *, by_time: bool = False, n_due: int = 1) -> None:
        """Takes in what was counted since the last time and makes the index anew. by_time: worth goes by age alone, as before
        anything was learned. n_due: refreshes that this one stands for. O(classes seen), about 1 ms for 200."""
        if by_time is not self.by_time:
            self.by_time = by_time
            self._index[:] = self._unseen
        counts = self._counts
        for counted, table in zip((self.reached, self.used), counts, strict=True):
            table += np.frombuffer(memoryview(counted)).reshape(N_CLASSES, N_BINS)
        self.reached, self.used = _zeros(), _zeros()
        np.maximum(counts, 0.0, out=counts)
        self._estimate()
        counts *= DECAY**n_due

    def _estimate(self) -> None:
        """Chances of use: each class's own, shrunk to those of the coarser classes above it."""
        counts = self._counts
        sums = [counts]
        for n_finer in reversed(_LEVELS[1:]):
            coarser = sums[-1].reshape(2, -1, n_finer, N_BINS).sum(2)
            sums.append(coarser)
        chance: Floats = np.full((1, N_BINS), PRIOR)
        chance[0, 0] = 0.0  # (how soon the next request comes says nothing of whose it is)
        for (reached, used), n_finer in zip(reversed([*sums, sums[-1].sum(1, keepdims=True)]), (1, *_LEVELS), strict=True):
            chance = SHRINKAGE * np.repeat(chance, n_finer, axis=0)
            chance += used
            chance /= reached + SHRINKAGE
        began = counts[0, :, 0]
        seen = np.flatnonzero(began)
        if len(seen) and not self.by_time:
            self._index[seen] = gittins(np.minimum(chance[seen], CHANCE_MAX), self._request_s)
        self.index = vec[float](self._index.ravel())
        self.is_sure = float(began.sum()) >= EVIDENCE_MIN and not self.by_time
        self.version += 1

    def to_bytes(self) -> bytes:
        """For another process of the same worker; what was not taken in by a refresh is left out."""
        body = self._counts.astype("<f4").tobytes()
        return _HEAD.pack(_MAGIC, N_CLASSES, N_BINS, xxhash.xxh3_64_intdigest(body)) + body

    def from_bytes(self, saved: bytes) -> None:
        """What `to_bytes` made, in the place of what is here. ValueError when it is not that."""
        if len(saved) != _HEAD.size + 2 * N_CLASSES * N_BINS * 4:
            raise ValueError(f"{len(saved)} bytes are no saved life table")
        magic, n_classes, n_bins, digest = _HEAD.unpack_from(saved)
        body = saved[_HEAD.size :]
        if (magic, n_classes, n_bins) != (_MAGIC, N_CLASSES, N_BINS) or digest != xxhash.xxh3_64_intdigest(body):
            raise ValueError("not a life table of this version, or damaged")
        tables = np.frombuffer(body, dtype="<f4").astype(np.float64).reshape(2, N_CLASSES, N_BINS)
        if not np.isfinite(tables).all() or (tables < 0).any():
            raise ValueError("counts that are no counts")
        self._counts = tables
        self._estimate()


def _zeros() -> vec[float]:
    return vec[float](array("d", bytes(8 * N_CLASSES * N_BINS)))


def gittins(chance: Floats, first_s: float) -> Floats:
    """Chances of use [n, bins] of those that reach a bin, the width of the first bin -> index [n, bins], in uses a
    block-second."""
    widths_s = np.diff(np.array(EDGES_S), prepend=-first_s)
    chance = np.ascontiguousarray(chance.T)
    stay = 1 - chance
    cost = widths_s[:, np.newaxis] * (1 - 0.5 * chance)  # a use comes in the middle of its bin
    events = np.stack((chance, cost), axis=1)  # [bins, 2, n]
    here, index = np.ones_like(chance)[:, np.newaxis], np.zeros_like(chance)
    sums, part = np.zeros_like(events), np.empty_like(events)  # hits, seconds
    for last in range(N_BINS):  # given up so many bins later: bin j + last is the last one
        n = N_BINS - last
        here, sums, part, best = here[:n], sums[:n], part[:n], index[:n]
        sums += np.multiply(here, events[last:], out=part)
        np.maximum(best, np.divide(sums[:, 0], sums[:, 1], out=part[:, 0]), out=best)
        here *= stay[last:, np.newaxis]
    return index.T
