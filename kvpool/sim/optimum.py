"""The offline optimum over whole requests: what every policy is measured by."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


def optimum_hits(requests: Iterable[Sequence[int]], capacity: int) -> int:
    """Hits of the offline optimum (Belady 1966; Mattson and others 1970), which may also not store: what is used furthest in the
    future goes first, of equals the deepest. On chains no policy has more."""
    chains = list(requests)
    never = len(chains)
    upcoming: dict[int, int] = {}
    following: list[list[int]] = []
    for number in range(never - 1, -1, -1):
        following.append([upcoming.get(block, never) for block in chains[number]])
        upcoming.update(dict.fromkeys(chains[number], number))
    hits = 0
    cached: dict[int, int] = {}  # block -> number of the request that uses it next
    furthest: list[tuple[int, int, int]] = []
    for chain, nexts in zip(chains, reversed(following), strict=True):
        hits += next((n for n, block in enumerate(chain) if block not in cached), len(chain))
        for depth, (block, at) in enumerate(zip(chain, nexts, strict=True)):
            if at == never:
                cached.pop(block, None)
            else:
                cached[block] = at
                heapq.heappush(furthest, (-at, -depth, block))
        while len(cached) > capacity:
            at, _, block = heapq.heappop(furthest)
            if cached.get(block) == -at:
                del cached[block]
    return hits
