"""Hit rates of the policies as parts of the offline optimum, on the handed-out traces: `python -m tests.bench.policies`.

Prints one row a trace and capacity and, at the end, one JSON object with every figure and the machine's facts. Needs the traces
(KVPOOL_SHARED, default ../shared beside the checkout). Options: names of traces, to run only these; --textbook, to run the
textbook's policies too.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvpool.core.policy.textbook import TEXTBOOK, access, optimum_hits
from kvpool.sim.replay import CoreReplay
from kvpool.sim.traces import Request, load_mooncake

SHARED = Path(os.environ.get("KVPOOL_SHARED", Path(__file__).resolve().parents[3] / "shared"))
BLOCK_BYTES = 4096
# trace: (blocks of DRAM, blocks of SSD, least part of the optimum, least part of the hits that come from DRAM)
GOALS: dict[str, list[tuple[int, int, float, float]]] = {
    "smoke": [(300, 0, 0.99, 0)],
    "rag": [(300, 0, 0.995, 0), (1000, 0, 0.999, 0)],
    "conversation": [(3000, 0, 0.46, 0), (10_000, 0, 0.65, 0), (30_000, 0, 0.93, 0), (3000, 27_000, 0.915, 0.40)],
    "agents": [(3000, 0, 0.79, 0), (10_000, 0, 0.90, 0), (30_000, 0, 0.985, 0), (3000, 27_000, 0.98, 0.53)],
}


def requests_of(name: str) -> list[Request]:
    """A trace, written in Mooncake's format first."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "trace.jsonl"
        subprocess.run([sys.executable, str(SHARED / "traces" / "to_mooncake.py"), name, str(out)], check=True)
        return load_mooncake(out)


def row(name: str, requests: list[Request], dram: int, ssd: int, goal: float, dram_goal: float) -> dict[str, Any]:
    """One capacity."""
    chains = [request.ids for request in requests]
    best = optimum_hits(chains, dram + ssd)
    found: dict[str, Any] = {"trace": name, "dram_blocks": dram, "ssd_blocks": ssd, "goal": goal, "dram_goal": dram_goal}
    for policy in ("lru", "hazard"):
        start_s = time.process_time()
        replaying = CoreReplay(
            policy=policy, block_bytes=BLOCK_BYTES, dram_bytes=dram * BLOCK_BYTES, ssd_bytes=ssd * BLOCK_BYTES
        )
        for request in requests:
            replaying.serve(request)
        outcome = replaying.outcome
        spent_us = (time.process_time() - start_s) * 1e6
        found[policy] = {
            "of_optimum": round(outcome.hits / best, 4),
            "dram_share": round(outcome.hits_dram / max(1, outcome.hits), 4),
            "us_per_block_with_the_table": round(spent_us / outcome.n_blocks, 2),
        }
        if policy == "hazard":
            brain = replaying.policy.__self__  # type: ignore[attr-defined]
            found["history_bytes_per_id"] = round(brain.history_bytes_per_id(), 1)
    if "--textbook" in sys.argv and not ssd:
        for policy, make in TEXTBOOK.items():
            cache = make(dram)
            found[f"textbook_{policy}"] = round(sum(access(cache, ids) for ids in chains) / best, 4)
    return found


def main() -> None:
    """The table."""
    wanted = [name for name in sys.argv[1:] if name in GOALS] or list(GOALS)
    rows = []
    for name in wanted:
        requests = requests_of(name)
        for dram, ssd, goal, dram_goal in GOALS[name]:
            found = row(name, requests, dram, ssd, goal, dram_goal)
            rows.append(found)
            ours = found["hazard"]
            reached = ours["of_optimum"] >= goal and (not ssd or ours["dram_share"] >= dram_goal)
            shares = f"dram share {ours['dram_share']:.3f} (goal {dram_goal})"
            print(
                f"{name:<13}{dram:>7} + {ssd:<6} lru {found['lru']['of_optimum']:.4f}"
                f"  hazard {ours['of_optimum']:.4f} (goal {goal})"
                f"  {shares}  {ours['us_per_block_with_the_table']} us a block,"
                f" history {found['history_bytes_per_id']} bytes an id  {'ok' if reached else 'SHORT'}",
                flush=True,
            )
    print(json.dumps({"machine": {"python": platform.python_version(), "cpus": os.cpu_count()}, "rows": rows}))


if __name__ == "__main__":
    main()
