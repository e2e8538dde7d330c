"""Hit rates of the policies as parts of the offline optimum: `python -m tests.bench.policies [NAME ...]`.

Prints one row a trace and capacity and, at the end, one JSON object with every figure and the machine's facts; exit status 1 when
a goal is missed. The handed-out traces are needed (KVPOOL_SHARED, default ../shared beside the checkout); `documents`,
`books` and `sessions` are made here. NAME: only these traces; --textbook: also the other policies of a worker
and, with one tier, what their papers' have that know nothing of chains.

Goals: a part of the optimum where there is one, a part of the hits from DRAM where there are two tiers, and everywhere at most
.02 of the optimum below LRU. `us a block`: CPU time in the policy alone for each block of a request, without what timing a call
takes; with two tiers also for each that is touched, by a request, a promotion or a demotion.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.core.policy import hazard
from kvpool.core.policy.eviction import EvictionPolicy
from kvpool.core.policy.queued import QUEUED
from kvpool.sim.optimum import optimum_hits
from kvpool.sim.replay import CoreReplay
from kvpool.sim.traces import Request, load_mooncake
from kvpool.worker.server import GC_THRESHOLDS
from tests.support.textbook import TEXTBOOK, access

SHARED = Path(os.environ.get("KVPOOL_SHARED", Path(__file__).resolve().parents[3] / "shared"))
BLOCK_BYTES = 4096
BELOW_LRU_MAX = 0.02
# trace: (blocks of DRAM, blocks of SSD, least part of the optimum, least part of the hits that come from DRAM)
GOALS: dict[str, list[tuple[int, int, float, float]]] = {
    "smoke": [(300, 0, 0.99, 0), (100, 0, 0, 0), (1000, 0, 0, 0)],
    "rag": [(300, 0, 0.995, 0), (1000, 0, 0.999, 0), (100, 0, 0, 0)],
    "conversation": [
        (3000, 0, 0.46, 0), (10_000, 0, 0.65, 0), (30_000, 0, 0.93, 0), (3000, 27_000, 0.915, 0.40),
        (300, 0, 0, 0), (1000, 0, 0, 0), (7000, 0, 0, 0), (21_000, 0, 0, 0), (1000, 5000, 0, 0),
    ],
    "agents": [
        (3000, 0, 0.79, 0), (10_000, 0, 0.90, 0), (30_000, 0, 0.985, 0), (3000, 27_000, 0.98, 0.53),
        (1000, 0, 0, 0), (7000, 0, 0, 0),
    ],
    "documents": [(600, 0, 0, 0), (1500, 0, 0, 0), (5000, 0, 0, 0), (20_000, 0, 0, 0)],
    "sessions": [(300, 0, 0, 0), (1000, 0, 0, 0), (3000, 0, 0, 0), (10_000, 0, 0, 0)],
    "books": [(300, 0, 0, 0), (1000, 0, 0, 0), (3000, 0, 0, 0), (10_000, 0, 0, 0)],
}  # fmt: skip
MADE = ("documents", "books", "sessions")


def documents(
    *, n_requests: int = 4000, n_documents: int = 200, n_blocks: tuple[int, int] = (50, 400), every_ms: float = 400.0
) -> list[Request]:
    """Questions about long documents, asked for by Zipf's law, and one to four blocks of their own."""
    chance = random.Random(1)
    sizes = [chance.randint(*n_blocks) for _ in range(n_documents)]
    weights = [1 / (i + 1) ** 0.8 for i in range(n_documents)]
    found, serial, at_ms = [], 1 << 40, 0.0
    for which in chance.choices(range(n_documents), weights, k=n_requests):
        at_ms += chance.expovariate(1 / every_ms)
        own = chance.randint(1, 4)
        ids = (*range(which * 10_000, which * 10_000 + sizes[which]), *range(serial, serial + own))
        serial += own
        found.append(Request(at_ms, len(ids), 1, ids))
    return found


def sessions(*, n_sessions: int = 600, n_blocks: tuple[int, int] = (300, 1500), every_ms: float = 5000.0) -> list[Request]:
    """One to eight turns on a long document, then the next session's."""
    chance = random.Random(3)
    found, serial, at_ms = [], 1 << 40, 0.0
    for which in range(n_sessions):
        of_document = chance.randint(*n_blocks)
        for _ in range(chance.randint(1, 8)):
            at_ms += chance.expovariate(1 / every_ms)
            own = chance.randint(1, 4)
            ids = (*range(which * 10_000, which * 10_000 + of_document), *range(serial, serial + own))
            serial += own
            found.append(Request(at_ms, len(ids), 1, ids))
    return found


def requests_of(name: str) -> list[Request]:
    """A trace, written in Mooncake's format first."""
    if name == "documents":
        return documents()
    if name == "sessions":
        return sessions()
    if name == "books":  # each longer than the smallest cache
        return documents(n_requests=1500, n_documents=100, n_blocks=(500, 2000), every_ms=3000.0)
    writer = SHARED / "traces" / "to_mooncake.py"
    if not writer.is_file():
        sys.exit(f"{name}: {writer} is missing (KVPOOL_SHARED says where traces are); {', '.join(MADE)} need none")
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "trace.jsonl"
        subprocess.run([sys.executable, str(writer), name, str(out)], check=True)
        return load_mooncake(out)


class Timed:
    """A tier's policy, and the seconds that its calls took, without what it takes to time them: right after each an empty one
    with the same arguments is timed too."""

    spent_s = 0.0
    by_recency: bool

    def __init__(self, inner: EvictionPolicy) -> None:
        self.by_recency = inner.by_recency
        for name in dir(type(inner)):
            call = getattr(inner, name)
            if not name.startswith("_") and callable(call):
                setattr(self, name, self.timed(call))

    @staticmethod
    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.thread_time

        def timing(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            found = call(*args, **kwargs)
            ended = clock()
            _nothing(*args, **kwargs)
            Timed.spent_s += 2 * ended - began - clock()
            return found

        return timing


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def replayed(requests: list[Request], *, policy: str, dram: int, ssd: int) -> tuple[CoreReplay, float]:
    """-> (the replay at its end, microseconds in the policy for each block)."""
    gc.collect()  # (what an earlier replay left is not this one's)
    Timed.spent_s = 0.0
    replaying = CoreReplay(policy=policy, block_bytes=BLOCK_BYTES, dram_bytes=dram * BLOCK_BYTES, ssd_bytes=ssd * BLOCK_BYTES,
                           wrap=Timed)  # fmt: skip
    for request in requests:
        replaying.serve(request)
    return replaying, Timed.spent_s * 1e6 / replaying.outcome.n_blocks


def moved(replaying: CoreReplay) -> int:
    """Blocks that came to the other tier."""
    counters = replaying.table.counters
    return counters["promoted"] + counters["demoted"]


def row(name: str, requests: list[Request], dram: int, ssd: int, goal: float, dram_goal: float) -> dict[str, Any]:
    """One capacity."""
    chains = [request.ids for request in requests]
    best = optimum_hits(chains, dram + ssd)
    found: dict[str, Any] = {"trace": name, "dram_blocks": dram, "ssd_blocks": ssd, "goal": goal, "dram_goal": dram_goal}
    others = QUEUED if "--textbook" in sys.argv else ()
    for policy in ("lru", "hazard", *others):
        replaying, us = replayed(requests, policy=policy, dram=dram, ssd=ssd)
        outcome = replaying.outcome
        found[policy] = {
            "of_optimum": round(outcome.hits / best, 4),
            "dram_share": round(outcome.hits_dram / max(1, outcome.hits), 4),
            "us_per_block": round(us, 2),
            "us_per_touch": round(us * outcome.n_blocks / (outcome.n_blocks + moved(replaying)), 2),
        }
        if policy == "hazard":
            brain = replaying.policy.__self__  # type: ignore[attr-defined]
            found["history_bytes_per_id"] = round(brain.history_bytes_per_id(), 1)
    ours, lru = found["hazard"], found["lru"]
    found["reached"] = (
        ours["of_optimum"] >= goal and ours["of_optimum"] >= lru["of_optimum"] - BELOW_LRU_MAX
        and (not ssd or ours["dram_share"] >= dram_goal) and found["history_bytes_per_id"] <= 48
    )  # fmt: skip
    if others and not ssd:
        for policy, make in TEXTBOOK.items():
            cache = make(dram)
            found[f"textbook_{policy}"] = round(sum(access(cache, ids) for ids in chains) / best, 4)
    return found


def main() -> int:
    """The table."""
    gc.set_threshold(*GC_THRESHOLDS)  # as a worker does
    wanted = [name for name in sys.argv[1:] if name != "--textbook"] or list(GOALS)
    if unknown := [name for name in wanted if name not in GOALS]:
        sys.exit(f"{unknown[0]}: not one of {', '.join(GOALS)}, --textbook")
    rows = []
    for name in wanted:
        requests = requests_of(name)
        for dram, ssd, goal, dram_goal in GOALS[name]:
            found = row(name, requests, dram, ssd, goal, dram_goal)
            rows.append(found)
            ours = found["hazard"]
            touch = f" ({ours['us_per_touch']} for each asked for or moved)" if ssd else ""
            shares = f"  dram share {found['lru']['dram_share']:.3f} {ours['dram_share']:.3f} (goal {dram_goal})" if ssd else ""
            print(
                f"{name:<13}{dram:>7} + {ssd:<6} lru {found['lru']['of_optimum']:.4f}"
                f"  hazard {ours['of_optimum']:.4f} (goal {goal or 'lru - .02'}){shares}"
                f"  us a block: lru {found['lru']['us_per_block']}, hazard {ours['us_per_block']}{touch}"
                f"  history {found['history_bytes_per_id']} bytes an id  {'ok' if found['reached'] else 'SHORT'}",
                flush=True,
            )
            for policy in QUEUED:
                if policy in found:
                    ours, paper = found[policy], found.get(f"textbook_{policy}", "-")
                    print(
                        f"{'':<29}{policy} {ours['of_optimum']:.4f}  the paper's {paper}  dram share {ours['dram_share']:.3f}"
                        f"  us a block {ours['us_per_block']}",
                        flush=True,
                    )
    print(json.dumps({"machine": {
        "python": platform.python_version(), "cpus": os.cpu_count(), "compiled": not hazard.__file__.endswith(".py"),
    }, "rows": rows}))
    return 0 if all(found["reached"] for found in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
