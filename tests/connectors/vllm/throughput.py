"""Throughput of vLLM with an empty pool (every block is saved, none is found) against vLLM without a connector.

Both engines run at the same time and are asked in turn, A B A B, with prompts that nobody has seen; the medians are compared,
of the time and of the CPU time of the whole engine process (on a machine that others use, the first says little): `python -m
tests.connectors.vllm.throughput [ROUNDS]` (`make bench-vllm`).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from tests.connectors.vllm.engines import Engine, make_model, prompt
from tests.support.cluster import Cluster

N_PROMPTS, PROMPT_TOKENS, MAX_TOKENS = 4, 2000, 16


def measure(directory: Path, *, rounds: int) -> dict[str, object]:
    """Tokens per second of both, medians over the rounds, and their ratio."""
    model = make_model(directory / "model")
    pool = directory / "pool"
    pool.mkdir()
    cluster = Cluster(pool, dram="512MiB").start()
    engines: dict[str, Engine] = {}
    try:
        for name, address in (("none", None), ("kvpool", cluster.master_address)):
            engines[name] = Engine(model, directory / f"{name}.log", pool=address)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(rounds + 1):  # the first round warms both up
            for name, engine in engines.items():
                prompts = [prompt(PROMPT_TOKENS, seed=hash_of(turn, name, i)) for i in range(N_PROMPTS)]
                found = engine.generate(prompts, max_tokens=MAX_TOKENS, together=True)
                assert all(one.external == 0 and one.cached == 0 for one in found)
                if turn:
                    seconds[name].append(found[0].seconds)
                    cpu_seconds[name].append(found[0].cpu_seconds)
        engines["kvpool"].flush()
        saved = engines["kvpool"].metrics()["kvpool:saved_blocks"]
    finally:
        for engine in engines.values():
            engine.stop()
        cluster.stop()
    tokens = N_PROMPTS * (PROMPT_TOKENS + MAX_TOKENS)
    speed = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    cpu_speed = {name: tokens / statistics.median(times) for name, times in cpu_seconds.items()}
    return {"machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}, "prompt_tokens": PROMPT_TOKENS, "prompts": N_PROMPTS,
            "rounds": rounds, "saved_blocks": int(saved), "tokens_per_s": {k: round(v, 1) for k, v in speed.items()},
            "seconds": {k: [round(t, 3) for t in v] for k, v in seconds.items()},
            "tokens_per_cpu_s": {k: round(v, 1) for k, v in cpu_speed.items()},
            "of_none": round(speed["kvpool"] / speed["none"], 4),
            "of_none_cpu": round(cpu_speed["kvpool"] / cpu_speed["none"], 4)}  # fmt: skip


def hash_of(turn: int, name: str, i: int) -> int:
    """A seed that no other prompt has."""
    return 1_000_000 + turn * 1000 + (500 if name == "kvpool" else 0) + i


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="kvpool-throughput-") as scratch:
        print(json.dumps(measure(Path(scratch), rounds=int(sys.argv[1]) if len(sys.argv) > 1 else 9)))
