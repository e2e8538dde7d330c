"""Quotas: how a namespace's bytes are split over the live workers' tiers. Pure; the master computes it, workers keep to it.

A namespace's quota bounds the bytes of slots that it takes in all tiers of all workers together: every copy counts, in DRAM and
on SSD. Each (worker, tier) gets a part in proportion to its size, in whole blocks where blocks have one size, so that no part is
smaller than a block unless it is nothing; where sizes differ the largest counts for a worker and for its DRAM. What a worker may
hold is thus known to itself; nobody is asked at a put.
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


def shares(
    quota_bytes: int, *, unit: int, capacities: Mapping[WorkerId, tuple[int, int]], largest: int = 0
) -> dict[WorkerId, Share]:
    """The parts of a quota. `capacities`: bytes of (DRAM, SSD) of each live worker. `unit`: bytes of a block (1: of any size).
    `largest`: of the largest block, where sizes differ.

    Workers get whole largest blocks; largest remainders get what is left over, in order of the ids, and the one with most what
    is less than a block. A worker that gets anything gets a largest block in DRAM first: puts go there."""
    sizes = {worker: sum(capacities[worker]) for worker in sorted(capacities)}
    total = sum(sizes.values())
    if not total:
        return {worker: Share(0, 0) for worker in sizes}
    step = max(unit, largest)
    steps = quota_bytes // step
    whole = {worker: steps * size // total for worker, size in sizes.items()}
    left = steps - sum(whole.values())
    for worker in sorted(sizes, key=lambda w: (-(steps * sizes[w] % total), w))[:left]:
        whole[worker] += 1
    most = max(sizes, key=lambda w: whole[w])
    rest = (quota_bytes - steps * step) // unit * unit
    found = {}
    for worker, n in whole.items():
        dram, ssd = capacities[worker]
        part = n * step + (rest if worker == most else 0)
        n_dram = min(part, max(step, part * dram // (dram + ssd) // unit * unit)) if ssd else part
        found[worker] = Share(n_dram, part - n_dram)
    return found
