"""`kvpool replay --engine sim`: a trace through the core of one worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpool.cli.common import print_json

if TYPE_CHECKING:
    from kvpool.sim.traces import Request, Served


def replay_sim(
    requests: Sequence[Request], *, policy: str, block_bytes: int, dram_bytes: int, ssd_bytes: int, as_json: bool
) -> tuple[dict[str, Any], list[Served]]:
    """Replays and prints: the facts that the real engine prints, as far as there are such without bytes and time, and what of the
    offline optimum at the same number of blocks was reached. -> these facts, and a row of each request."""
    from kvpool.sim.optimum import optimum_hits
    from kvpool.sim.replay import CoreReplay

    start_s = time.monotonic()
    replaying = CoreReplay(policy=policy, block_bytes=block_bytes, dram_bytes=dram_bytes, ssd_bytes=ssd_bytes)
    for request in requests:
        replaying.serve(request)
    outcome = replaying.outcome
    seconds = time.monotonic() - start_s
    best = optimum_hits((request.ids for request in requests), (dram_bytes + ssd_bytes) // block_bytes)
    facts: dict[str, Any] = {
        "engine": "sim", "policy": policy, "requests": outcome.n_requests, "blocks": outcome.n_blocks,
        "hit_blocks": outcome.hits, "hit_rate": round(outcome.hits / max(1, outcome.n_blocks), 6),
        "hits_by_tier": {"device": 0, "dram": outcome.hits_dram, "ssd": outcome.hits_ssd},
        "of_optimum": round(outcome.hits / best, 4) if best else 1.0,
        "miss_causes": dict(sorted(outcome.missed.items())), "stored_blocks": outcome.stored,
        "ssd_blocks_written": outcome.ssd_written, "corrupt_blocks": 0, "errors": 0, "seconds": round(seconds, 3),
    }  # fmt: skip
    if as_json:
        print_json(facts)
        return facts, outcome.rows
    tiers = ", ".join(f"{name} {n}" for name, n in facts["hits_by_tier"].items() if n) or "none"
    print(f"requests       {facts['requests']} with {facts['blocks']} blocks in {seconds:.1f} s")
    print(f"hit rate       {facts['hit_rate']:.4f} ({outcome.hits} blocks; by tier: {tiers})")
    print(f"of the optimum {facts['of_optimum']:.4f} at the same number of blocks")
    print(f"stored         {outcome.stored} blocks; {outcome.ssd_written} written to SSD")
    return facts, outcome.rows
