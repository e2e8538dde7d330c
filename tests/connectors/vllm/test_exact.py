"""Tokens and log-probabilities of engines that load from the pool, against engines without a connector; and against wrong blocks.

Equal output alone proves nothing, for an engine that computes everything gives it too; nor do hits that are only counted. So each
case counts the hits and then runs again on a pool whose blocks have other blocks' bytes: the output must be another.

What an engine computes depends in its last bits on how many tokens it computes at once. An engine with hits is compared to one
that has the same blocks in its own prefix cache ("warm"), one without hits to one whose cache is empty ("cold").
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.engines import (
    BLOCK,
    HITS,
    LENGTHS,
    PROMPTS,
    Engine,
    Reference,
    assert_equal,
    converse,
    corrupt,
    differs,
    full_blocks,
    last_prompt,
    prompt,
    stored,
    transfer_to,
    wait_stored,
)

pytestmark = pytest.mark.timeout(1800)


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
    n_stored = stored(cluster)
    assert corrupt(cluster, engine) == n_stored
    wrong = engine.generate(PROMPTS)
    assert [one.external for one in wrong] == HITS
    assert differs(wrong, reference.warm)


def test_a_producer_process_then_a_consumer_process(make_cluster: Callable[..., Any], start_engine: Callable[..., Engine],
                                                    reference: Reference) -> None:  # fmt: skip
    cluster = make_cluster()
    fill(cluster, start_engine, reference)
    n_stored = sum((n + 7) // BLOCK for n in LENGTHS)  # blocks that filled up while tokens were made are saved too
    wait_stored(cluster, n_stored)
    consumer = start_engine(cluster.master_address, role="kv_consumer")
    consumer.knows(n_stored)
    check_hits(consumer, cluster, reference)
    metrics = consumer.metrics()
    assert metrics["kvpool:hit_tokens/dram"] == 2 * sum(HITS) + HITS[0]
    assert metrics["kvpool:load_seconds_count"] == 7 and "kvpool:saved_blocks" not in {k for k, v in metrics.items() if v}
    assert "event=kvpool_ready who=scheduler" in consumer.log_text()


def fill_itself(engine: Engine, cluster: Any, reference: Reference, n_shards: int = 1) -> int:
    """The engine computes all prompts, and saves them. Blocks in the pool then."""
    found = engine.generate(PROMPTS)
    assert_equal(found, reference.cold)
    assert [one.external for one in found] == [0, 0, 0]
    wanted = n_shards * sum((n + 7) // BLOCK for n in LENGTHS)
    wait_stored(cluster, wanted)
    return wanted


def test_prefix_caching_off_beside_another_connector(make_cluster: Callable[..., Any], start_engine: Callable[..., Engine],
                                                     reference: Reference, tmp_path: Path) -> None:  # fmt: skip
    """Under MultiConnector, whose other child saves to files."""
    cluster = make_cluster()
    ours = transfer_to(cluster.master_address)
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_producer",
             "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "other")}}  # fmt: skip
    both = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"connectors": [ours, other]}}  # fmt: skip
    engine = start_engine(cluster.master_address, transfer=both, enable_prefix_caching=False)
    engine.knows(fill_itself(engine, cluster, reference))
    found = engine.generate(PROMPTS)
    assert [one.external for one in found] == HITS
    assert_equal(found, reference.warm)
    corrupt(cluster)
    wrong = engine.generate(PROMPTS)
    assert [one.external for one in wrong] == HITS
    assert differs(wrong, reference.warm)


def test_sync_loads_and_chunked_prefill(make_cluster: Callable[..., Any], start_engine: Callable[..., Engine]) -> None:
    """The pool has the first five blocks; what follows is computed in pieces of 64 tokens, beside a load within the step."""
    heads, whole = [prompt(170, seed=n) for n in (300, 400)], [prompt(n, seed=n) for n in (300, 400)]
    alone = start_engine(max_num_batched_tokens=64)
    cold, warm = alone.generate(heads), alone.generate(whole)
    alone.stop()
    cluster = make_cluster()
    engine = start_engine(cluster.master_address, max_num_batched_tokens=64, extra={"load_async": False, "save_decode": False})
    assert_equal(engine.generate(heads), cold)
    engine.flush()
    engine.knows(10)
    engine.reset()
    found = engine.generate(whole)
    assert [one.external for one in found] == [5 * BLOCK, 5 * BLOCK]
    assert_equal(found, warm)
    engine.flush()
    n_stored = 300 // BLOCK + 400 // BLOCK
    wait_stored(cluster, n_stored)  # what was computed in pieces is saved, what tokens were made of is not
    engine.knows(n_stored)
    corrupt(cluster, engine)
    engine.reset()
    wrong = engine.generate(whole)
    assert [one.external for one in wrong] == [9 * BLOCK, 12 * BLOCK]
    assert differs(wrong, warm)


def test_two_tensor_parallel_ranks(make_cluster: Callable[..., Any], start_engine: Callable[..., Engine]) -> None:
    """All in processes of their own, as vLLM does by default: what travels between the halves is pickled. Each rank saves and
    loads its own share; a block is there when all shares are."""
    settings = {"tensor_parallel_size": 2, "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}}
    alone = start_engine(**settings)
    reference = Reference(alone.generate(PROMPTS), alone.generate(PROMPTS), [])
    alone.stop()
    cluster = make_cluster()
    engine = start_engine(cluster.master_address, **settings)
    fill_itself(engine, cluster, reference, n_shards=2)
    engine.reset()
    found = engine.generate(PROMPTS, params={"kvpool_blocks": 1000})
    assert [one.external for one in found] == HITS
    assert_equal(found, reference.warm)
    assert found[0].params == {"kvpool_blocks": 193 // BLOCK}
    engine.reset()
    assert corrupt(cluster) == stored(cluster)
    wrong = engine.generate(PROMPTS, params={"kvpool_blocks": 1000})
    assert [one.external for one in wrong] == HITS
    assert differs(wrong, reference.warm)


def test_a_conversation_on_two_instances_in_turn(make_cluster: Callable[..., Any], start_engine: Callable[..., Engine],
                                                 reference: Reference) -> None:  # fmt: skip
    """Each turn's earlier blocks are there, whichever instance computed them; the output is that of a single instance."""
    cluster = make_cluster()
    engines = [start_engine(cluster.master_address, wait=False) for _ in range(2)]
    for engine in engines:
        engine.wait_ready()

    def seen_by_the_other(turn: int) -> None:
        if turn:
            n_blocks = (len(last_prompt(reference.turns[:turn])) + 24 - 1) // BLOCK
            wait_stored(cluster, n_blocks)
            engines[turn % 2].knows(n_blocks)

    found = converse(engines, seen_by_the_other)
    assert_equal(found, reference.turns)
    assert [one.cached for one in found] == [one.cached for one in reference.turns]
    assert all(one.external > 0 for one in found[1:]), "each turn has blocks that only the other instance computed"
    n_stored = corrupt(cluster, engines[0])
    engines[1].knows(n_stored + 1)
    for engine in engines:
        engine.reset()
    last = last_prompt(reference.turns)
    for engine in engines:
        wrong = engine.generate([last], max_tokens=24)
        assert wrong[0].external == full_blocks(len(last)) * BLOCK
        assert differs(wrong, reference.turns[-1:])


def test_preemption_under_a_small_cache(make_cluster: Callable[..., Any], start_engine: Callable[..., Engine]) -> None:
    """Four requests in room for two: those that are preempted come back with the blocks that they had saved."""
    prompts = [prompt(150, seed=n) for n in range(4)]
    alone = start_engine()
    wanted = alone.generate(prompts, max_tokens=100)
    alone.stop()
    cluster = make_cluster()
    engine = start_engine(cluster.master_address, num_gpu_blocks_override=20, max_model_len=512)
    found = engine.generate(prompts, max_tokens=100, together=True)
    metrics = engine.metrics()
    assert_equal(found, wanted)
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["kvpool:hit_tokens/dram"] > 0
    n_stored = 4 * ((150 + 100 - 1) // BLOCK)
    wait_stored(cluster, n_stored)
    engine.knows(n_stored)
    corrupt(cluster, engine)
    engine.reset()
    wrong = engine.generate(prompts, max_tokens=100)
    assert [one.external for one in wrong] == [full_blocks(150) * BLOCK] * 4
    assert differs(wrong, wanted)
