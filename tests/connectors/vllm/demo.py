"""`make demo-vllm`: two vLLM instances, one pool, a conversation with a long system prompt that takes turns between the
instances.

A row a turn: prompt tokens, tokens that came from the pool (by tier) and from the instance's own cache, tokens computed, and the
time to the first token, with the pool and without it. The texts are compared: they must be the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.connectors.vllm.engines import Engine, Result, make_model, prompt, stored
from tests.support.cluster import Cluster

SYSTEM_TOKENS, TURNS, ANSWER_TOKENS = 1500, 8, 32


def turn_of(engine: Engine, context: list[int]) -> tuple[Result, list[int], dict[str, int]]:
    """First the time to one token, then the answer; what came from the pool, by tier."""
    before = engine.metrics()
    first = engine.generate([context], max_tokens=1)[0]
    after = engine.metrics()
    tiers = {tier: int(after.get(f"kvpool:hit_tokens/{tier}", 0) - before.get(f"kvpool:hit_tokens/{tier}", 0))
             for tier in ("device", "dram", "ssd")}  # fmt: skip
    answer = engine.generate([context], max_tokens=ANSWER_TOKENS)[0]
    return first, answer.tokens, tiers


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-vllm-") as scratch:
        directory = Path(scratch)
        (directory / "pool").mkdir()
        model = make_model(directory / "model")
        cluster = Cluster(directory / "pool", dram="256MiB").start()
        print("starting four vLLM instances: two on one pool, two without", flush=True)
        engines = [Engine(model, directory / f"engine-{i}.log", pool=cluster.master_address if i < 2 else None, wait=False)
                   for i in range(4)]  # fmt: skip
        try:
            for engine in engines:
                engine.wait_ready()
                engine.generate([prompt(600, seed=999)], max_tokens=4)  # the first forward sets things up
            rows(cluster, engines)
        finally:
            for engine in engines:
                engine.stop()
            cluster.stop()


def rows(cluster: Cluster, engines: list[Engine]) -> None:
    print(f"{'turn':>4} {'instance':>8} {'prompt':>7} {'own':>6} {'dram':>6} {'ssd':>5} {'computed':>8} {'TTFT':>9}   "
          f"{'own':>6} {'computed':>8} {'TTFT':>9}  same text")  # fmt: skip
    print(f"{'':>13}{'with the pool':>52} {'without':>26}")
    context = prompt(SYSTEM_TOKENS, seed=1)
    for turn in range(TURNS):
        context += prompt(60 + 10 * turn, seed=100 + turn)
        instance = turn % 2
        with_pool, text, tiers = turn_of(engines[instance], context)
        without, plain, _ = turn_of(engines[2 + instance], context)
        own = with_pool.cached - sum(tiers.values())
        print(f"{turn + 1:>4} {'AB'[instance]:>8} {len(context):>7} {own:>6} {tiers['dram']:>6} {tiers['ssd']:>5} "
              f"{len(context) - with_pool.cached:>8} {with_pool.seconds * 1e3:>6.1f} ms   {without.cached:>6} "
              f"{len(context) - without.cached:>8} {without.seconds * 1e3:>6.1f} ms  {text == plain}", flush=True)  # fmt: skip
        context += text
        engines[instance].flush()
        engines[1 - instance].knows(stored(cluster))


if __name__ == "__main__":
    main()
