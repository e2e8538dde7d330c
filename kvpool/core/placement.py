"""Which workers a put should go to. Pure; the same answer in the master and in every client that knows the same workers.

A chain stays together: where its parent lives comes first, then the writer's own host, then the others in an order drawn from
the chain's first key (weighted rendezvous: Thaler & Ravishankar, "Using name-based mappings to increase hit rates", 1998), so
that chains spread by capacity and a worker that comes or goes moves only its own share. A worker without room (it would have to
evict) comes after those that have it. Copies beyond the first prefer other hosts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from kvpool.core.types import Key, WorkerId

RAMP_MS: Final = 10_000  # until a new worker has its whole share
SHARE_MIN: Final = 0.1  # of it, at the start: what nobody writes to is never seen to work


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that can be written to. Bytes are of its DRAM tier, as of its last heartbeat."""

    worker_id: WorkerId
    host_id: str
    free_bytes: int
    capacity_bytes: int
    share: float = 1.0  # of what its capacity entitles it to


def share(up_ms: float) -> float:
    """The part of its share that a worker gets which has been up for so long."""
    return min(1.0, max(SHARE_MIN, up_ms / RAMP_MS))


def rendezvous(worker_id: WorkerId, *, key: Key, weight: float) -> float:
    """Score of a worker for a key: the highest one of all workers has the key; shares go by weight."""
    draw = (xxhash.xxh3_64_intdigest(worker_id.encode() + b"\0" + key) + 0.5) / 2.0**64
    return weight / -math.log(draw) if draw < 1.0 else math.inf


def place(
    candidates: Sequence[Candidate],
    *,
    key: Key,
    parent_workers: Collection[WorkerId] = (),
    host_id: str = "",
    need_bytes: int = 0,
    n_workers: int = 1,
) -> list[Candidate]:
    """Up to `n_workers` different workers for a run whose first key is `key`, best first; fewer when there are fewer."""

    def rank(candidate: Candidate) -> tuple[bool, bool, bool, float, str]:
        return (
            candidate.free_bytes < need_bytes,
            candidate.worker_id not in parent_workers,
            not host_id or candidate.host_id != host_id,
            -rendezvous(candidate.worker_id, key=key, weight=max(1, candidate.capacity_bytes) * candidate.share),
            candidate.worker_id,
        )

    ranked = sorted(candidates, key=rank)
    chosen: list[Candidate] = []
    hosts: set[str] = set()
    for candidate in ranked:  # one of each host first
        if len(chosen) < n_workers and candidate.host_id not in hosts:
            chosen.append(candidate)
            hosts.add(candidate.host_id)
    for candidate in ranked:
        if len(chosen) < n_workers and candidate not in chosen:
            chosen.append(candidate)
    return chosen
