"""Quotas: how a namespace's bytes are split over the live workers' tiers. Pure; the master computes it, workers keep to it.

A namespace's quota bounds the bytes of slots that it takes in all tiers of all workers together: every copy counts, in DRAM and
on SSD. Each (worker, tier) gets a part in proportion to its size, in whole blocks where blocks have one size, so that no part is
smaller than a block unless it is nothing. What a worker may hold is thus known to itself; nobody is asked at a put.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.core.types import WorkerId


@dataclass(frozen=True, slots=True)
class Share:
    """What a namespace may take at one worker, bytes."""

    dram: int
    ssd: int


def shares(quota_bytes: int, *, unit: int, capacities: Mapping[WorkerId, tuple[int, int]]) -> dict[WorkerId, Share]:
    """The parts of a quota. `capacities`: bytes of (DRAM, SSD) of each live worker. `unit`: bytes of a block (1: of any size).

    Largest remainders get what is left over, in order of the ids. A worker that gets anything gets a block in DRAM first: puts
    go there."""
    sizes = {worker: sum(capacities[worker]) for worker in sorted(capacities)}
    total = sum(sizes.values())
    units = quota_bytes // unit
    if not total:
        return {worker: Share(0, 0) for worker in sizes}
    whole = {worker: units * size // total for worker, size in sizes.items()}
    left = units - sum(whole.values())
    for worker in sorted(sizes, key=lambda w: (-(units * sizes[w] % total), w))[:left]:
        whole[worker] += 1
    found = {}
    for worker, n in whole.items():
        dram, ssd = capacities[worker]
        n_dram = min(n, max(1, n * dram // (dram + ssd))) if dram + ssd else 0
        found[worker] = Share(n_dram * unit, (n - n_dram) * unit if ssd else 0)
        if not ssd:
            found[worker] = Share(n * unit, 0)
    return found
