"""Reuse distances of a trace: how many distinct blocks were used between two uses of the same block (Mattson and others 1970).

Owns the distances and what an LRU of some size would hit by them; exact for few blocks, else of a sample of the ids (SHARDS:
Waldspurger, Park, Garthwaite and Ahmad, FAST 2015). The page that draws them is `cli.report`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

SAMPLE_IDS_MAX = 1 << 15  # ids that are followed: one use costs a bisection and a move within a list of so many
HOT_PART = 32  # one id in the sample's so many is taken for its many uses: a prompt's head that all share is not left to chance


@dataclass(frozen=True, slots=True)
class Reuse:
    """Reuse distances of one trace. A block that is twice in one request counts once for it.

    `step`: one of so many ids was followed (1: all, the distances are exact), a power of two. `counts[k]`: reuses, as estimated,
    at a distance of k * step blocks up to the next. Uses, blocks and blocks used once are exact.
    """

    step: int
    n_uses: int
    n_blocks: int
    n_once: int
    counts: tuple[float, ...]

    @property
    def n_reuses(self) -> int:
        """Uses of blocks that had been used before."""
        return self.n_uses - self.n_blocks

    def bins(self) -> list[int]:
        """Reuses by distance in powers of two: bin 0 is [0, step), bin k is [2**(k - 1) * step, 2**k * step)."""
        sums = [0.0] * ((len(self.counts) - 1).bit_length() + 1 if self.counts else 0)
        for distance, n in enumerate(self.counts):
            sums[distance.bit_length()] += n
        edges = np.rint(np.cumsum(sums, dtype=np.float64))  # rounded as sums: the bins add up to all
        return [int(n) for n in np.diff(edges, prepend=0)]

    def lru_hits(self, capacity: int) -> int:
        """Uses that an LRU of `capacity` blocks hits (chains used from their tail): those at a distance below it."""
        return round(sum(self.counts[: -(-capacity // self.step)]))


def reuse_distances(requests: Iterable[Sequence[int]], *, ids_max: int = SAMPLE_IDS_MAX) -> Reuse:
    """The distances of all uses of blocks (ids below 2**64) in `requests`, each a chain from its root.

    A use's distance is taken when its request begins, and a chain is used from its tail, as the pool does: then the uses with a
    distance below N are those that an LRU of N blocks hits. Exact for up to `ids_max` distinct ids. With more, ids are followed
    by a hash of theirs, at the largest rate 1 / 2**k at which `ids_max` are enough; the most used ones are all counted, by the
    followed ones used since; the others are weighted so that all reuses are there.
    """
    chains = [ids if len(set(ids)) == len(ids) else tuple(dict.fromkeys(ids)) for ids in requests]
    ids = np.fromiter(chain.from_iterable(chains), dtype=np.uint64)
    distinct, n_uses = np.unique(ids, return_counts=True)
    hashes = mix(distinct)
    step = 1
    while np.count_nonzero(hashes & np.uint64(step - 1) == 0) > ids_max:
        step *= 2
    followed = distinct[hashes & np.uint64(step - 1) == 0]
    hot = distinct[np.argsort(n_uses, kind="stable")[len(distinct) - ids_max // HOT_PART :]] if step > 1 else distinct[:0]
    if step > 1:
        ends = np.cumsum([len(chain_) for chain_ in chains])
        counted = np.flatnonzero((mix(ids) & np.uint64(step - 1) == 0) | np.isin(ids, hot))
        cuts = np.searchsorted(counted, ends).tolist()
        kept = ids[counted].tolist()
        chains = [kept[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]
    sampled, known = _distances(chains, followed=set(followed.tolist()), hot=set(hot.tolist()))
    n_sampled = len(ids) - len(distinct) - sum(known)  # reuses that the sample stands for
    weight = n_sampled / max(1, sum(sampled))
    return Reuse(
        step=step,
        n_uses=len(ids),
        n_blocks=len(distinct),
        n_once=int(np.count_nonzero(n_uses == 1)),
        counts=tuple(weight * n + m for n, m in zip(sampled, known, strict=True)),
    )


def _distances(
    chains: Iterable[Sequence[int]], *, followed: Collection[int], hot: Collection[int]
) -> tuple[list[int], list[int]]:
    """-> counts by distance in followed blocks: of followed ones that are not hot, of hot ones.

    The stack is the ascending list of the followed blocks' last uses: what lies behind a block's own was used since.
    """
    cool_counts: list[int] = []
    hot_counts: list[int] = []
    last: dict[int, int] = {}
    stack: list[int] = []
    now = 0
    for ids in chains:
        n = len(stack)
        for block in ids:
            if (at := last.get(block)) is not None:
                distance = n - bisect_right(stack, at)
                if distance >= len(cool_counts):
                    more = [0] * (distance + 1 - len(cool_counts))
                    cool_counts += more
                    hot_counts += more
                (hot_counts if block in hot else cool_counts)[distance] += 1
        for block in reversed(ids):
            if block in followed:
                if (at := last.get(block)) is not None:
                    del stack[bisect_left(stack, at)]
                now += 1
                stack.append(now)
            last[block] = now
    return cool_counts, hot_counts


def mix(ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64 (Steele, Lea, Flood 2014): a permutation of 64-bit numbers, so no two ids share a result."""
    z = ids + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
