"""Reuse distances of a trace: how many distinct blocks were used between two uses of the same block (Mattson and others 1970).

Owns the distances and what an LRU of some size would hit by them; exact for few blocks, else of a sample of the ids (SHARDS:
Waldspurger, Park, Garthwaite and Ahmad, FAST 2015). The page that draws them is `cli.report`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

SAMPLE_IDS_MAX = 1 << 15  # ids that are followed: one use costs a bisection and a move within a list of so many


@dataclass(frozen=True, slots=True)
class Reuse:
    """Reuse distances of one trace. A block that is twice in one request counts once for it.

    `step`: one of so many ids was followed (1: all, the distances are exact), a power of two. `sampled[k]`: reuses of followed
    blocks with k followed blocks used since, which stands for k * step blocks. Uses, blocks and blocks used once are exact.
    """

    step: int
    n_uses: int
    n_blocks: int
    n_once: int
    sampled: tuple[int, ...]

    @property
    def n_reuses(self) -> int:
        """Uses of blocks that had been used before."""
        return self.n_uses - self.n_blocks

    def bins(self) -> list[int]:
        """Reuses by distance in powers of two, estimated: bin 0 is [0, step), bin k is [2**(k - 1) * step, 2**k * step)."""
        counts = [0] * ((len(self.sampled) - 1).bit_length() + 1 if self.sampled else 0)
        for distance, n in enumerate(self.sampled):
            counts[distance.bit_length()] += n
        edges = np.rint(np.cumsum(counts, dtype=np.float64) * self._weight())  # rounded as sums: the bins add up to n_reuses
        return [int(n) for n in np.diff(edges, prepend=0)]

    def lru_hits(self, capacity: int) -> int:
        """Uses that an LRU of `capacity` blocks hits (chains used from their tail), estimated: those at a distance below it."""
        return round(sum(self.sampled[: -(-capacity // self.step)]) * self._weight())

    def _weight(self) -> float:
        """Reuses that one of the sample stands for. Hot blocks make a sample of ids too large or small; its shape is kept."""
        return self.n_reuses / max(1, sum(self.sampled))


def reuse_distances(requests: Iterable[Sequence[int]], *, ids_max: int = SAMPLE_IDS_MAX) -> Reuse:
    """The distances of all uses of blocks (ids below 2**64) in `requests`, each a chain from its root.

    A use's distance is taken when its request begins, and a chain is used from its tail, as the pool does: then the uses with a
    distance below N are those that an LRU of N blocks hits. Exact for up to `ids_max` distinct ids; with more, ids are followed
    by a hash of theirs, at the largest rate 1 / 2**k at which `ids_max` are enough.
    """
    chains = [ids if len(set(ids)) == len(ids) else tuple(dict.fromkeys(ids)) for ids in requests]
    ids = np.fromiter(chain.from_iterable(chains), dtype=np.uint64)
    distinct, n_uses = np.unique(ids, return_counts=True)
    places = mix(distinct)
    step = 1
    while np.count_nonzero(places & np.uint64(step - 1) == 0) > ids_max:
        step *= 2
    if step > 1:
        ends = np.cumsum([len(chain_) for chain_ in chains])
        followed = np.flatnonzero(mix(ids) & np.uint64(step - 1) == 0)
        cuts = np.searchsorted(followed, ends).tolist()
        kept = ids[followed].tolist()
        chains = [kept[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]
    return Reuse(
        step=step,
        n_uses=len(ids),
        n_blocks=len(distinct),
        n_once=int(np.count_nonzero(n_uses == 1)),
        sampled=tuple(_distances(chains)),
    )


def _distances(chains: Iterable[Sequence[int]]) -> list[int]:
    """-> counts by distance. The stack is the ascending list of the blocks' last uses: what lies behind was used since."""
    counts: list[int] = []
    last: dict[int, int] = {}
    stack: list[int] = []
    now = 0
    for ids in chains:
        n = len(stack)
        for block in ids:
            if (at := last.get(block)) is not None:
                distance = n - 1 - bisect_left(stack, at)
                if distance >= len(counts):
                    counts.extend([0] * (distance + 1 - len(counts)))
                counts[distance] += 1
        for block in reversed(ids):
            if (at := last.get(block)) is not None:
                del stack[bisect_left(stack, at)]
            now += 1
            last[block] = now
            stack.append(now)
    return counts


def mix(ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64 (Steele, Lea, Flood 2014): a permutation of 64-bit numbers, so no two ids share a result."""
    z = ids + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
