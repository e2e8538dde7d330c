"""Classes and ages of the learned policy: small numbers that say what kind of run of blocks this is, and how old.

Owns the bucket edges. What is learned about a class is in `lifetable`. Edges are in blocks and seconds; none depends on capacity
or workload. The first age is no time: where turns of one session follow each other and then another session begins, it is the
other one's coming that says that the first is over.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

N_BINS: Final = 21
FIRST_EDGE_S: Final = 0.5
# Upper edges of the age bins: the first ends when the next request comes, whenever that is; then ages double; the last is open.
EDGES_S: Final[tuple[float, ...]] = (0.0, *(FIRST_EDGE_S * 2.0**j for j in range(N_BINS - 1)))

N_USES: Final = 5
N_TAILS: Final = 2
N_NEW: Final = 6
N_GAPS: Final = 5
N_CLASSES: Final = N_USES * N_TAILS * N_NEW * N_GAPS
TAIL_STEP: Final = N_NEW * N_GAPS * N_BINS
USE_STEP: Final = N_TAILS * TAIL_STEP
USES_MAX: Final = 9  # counted up to here
_USE_EDGES: Final[tuple[int, ...]] = (2, 3, 5, 9)
_NEW_EDGES: Final[tuple[int, ...]] = (3, 6, 12, 24, 48)
_NEW_BUCKETS: Final = bytes(bisect_right(_NEW_EDGES, n) for n in range(_NEW_EDGES[-1]))
_GAP_EDGES_S: Final[tuple[float, ...]] = (4.0, 16.0, 64.0, 256.0)

# For bytes.translate over the use counts of a run's blocks.
USE_BUCKETS: Final = bytes(sum(uses >= edge for edge in _USE_EDGES) for uses in range(256))
ONE_MORE: Final = bytes(min(uses + 1, USES_MAX) for uses in range(256))


def new_bucket(n_blocks: int) -> int:
    """Of the number of a request's blocks that were not known before it."""
    return _NEW_BUCKETS[n_blocks] if n_blocks < _NEW_EDGES[-1] else N_NEW - 1


def gap_bucket(gap_s: float) -> int:
    """Of the time since the previous turn of the chain that a request continues."""
    return bisect_right(_GAP_EDGES_S, gap_s)


def first_key(uses: int, tail: int, new: int, gap: int) -> int:
    """Number of (class, age bin 0); the same class a bin older is one more. All arguments are buckets. (USE_STEP, TAIL_STEP: what
    one more of these adds.)"""
    return (((uses * N_TAILS + tail) * N_NEW + new) * N_GAPS + gap) * N_BINS
