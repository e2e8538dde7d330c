"""Tokens and log-probabilities of engines that load from the pool, against engines without a connector; and against wrong blocks.

Equal output alone proves nothing, for an engine that computes everything gives it too; nor do hits that are only counted. So each
case counts the hits and then runs again on a pool whose blocks have other blocks' bytes: the output must be another.

What an engine computes depends in its last bits on how many tokens it computes at once. An engine with hits is compared to one that
has the same blocks in its own prefix cache ("warm"), one without hits to one whose cache is empty ("cold").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.engines import (
    BLOCK,
    Engine,
    Result,
    assert_equal,
    corrupt,
    differs,
    full_blocks,
    prompt,
    stored,
)

pytestmark = pytest.mark.timeout(900)
LENGTHS = (193, 300, 200)  # 193: six blocks and one token, the case where vLLM's AMX kernel used to die
PROMPTS = [prompt(n, seed=n) for n in LENGTHS]
HITS = [full_blocks(n) * BLOCK for n in LENGTHS]


@dataclass(frozen=True)
class Reference:
    cold: list[Result]
    warm: list[Result]


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """An engine without a connector."""
    engine = Engine(model, tmp_path_factory.mktemp("reference") / "engine.log")
    cold = engine.generate(PROMPTS)
    warm = engine.generate(PROMPTS)
    engine.stop()
    assert [one.cached for one in warm] == HITS
    return Reference(cold, warm)


def fill(cluster: Any, start_engine: Callable[..., Engine], reference: Reference, **settings: Any) -> None:
    """A producer computes all prompts and ends."""
    producer = start_engine(cluster.master_address, role="kv_producer", **settings)
    found = producer.generate(PROMPTS)
    assert_equal(found, reference.cold)
    assert [one.external for one in found] == [0, 0, 0]
    producer.stop()


def check_hits(engine: Engine, cluster: Any, reference: Reference) -> None:
    """All full blocks come from the pool and the output is exact; with wrong blocks in the pool it is another."""
    found = engine.generate(PROMPTS)
    assert [one.external for one in found] == HITS
    assert_equal(found, reference.warm)
    engine.reset()
    assert engine.generate(PROMPTS[:1])[0].external == HITS[0], "the same request again, the engine's own cache is empty"
    engine.reset()
    assert corrupt(cluster) == stored(cluster)
    wrong = engine.generate(PROMPTS)
    assert [one.external for one in wrong] == HITS
    assert differs(wrong, reference.warm)


def test_a_producer_process_then_a_consumer_process(make_cluster: Callable[..., Any], start_engine: Callable[..., Engine],
                                                    reference: Reference) -> None:  # fmt: skip
    cluster = make_cluster()
    fill(cluster, start_engine, reference)
    n_stored = stored(cluster)
    assert n_stored == sum((n + 7) // BLOCK for n in LENGTHS), "blocks that filled up while tokens were made are saved too"
    consumer = start_engine(cluster.master_address, role="kv_consumer")
    consumer.knows(n_stored)
    check_hits(consumer, cluster, reference)
    metrics = consumer.metrics()
    assert metrics["kvpool:hit_tokens/dram"] == 2 * sum(HITS) + HITS[0]
    assert metrics["kvpool:load_seconds_count"] == 7 and "kvpool:saved_blocks" not in {k for k, v in metrics.items() if v}
    assert "event=kvpool_ready who=scheduler" in consumer.log_text()
