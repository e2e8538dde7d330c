"""vLLM's own MooncakeStoreConnector, unmodified, on kvpool: exact tokens and log-probabilities, and hits that count.

Each case runs again on a scrambled store, whose output must be another, and on an emptied one, whose hits must be none: equal
output alone proves nothing, and neither do hits alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpool.connectors.mooncake import MooncakeDistributedStore
from tests.connectors.mooncake.engines import gets
from tests.connectors.vllm.engines import Engine, Result, assert_equal, differs, prompt
from tests.support.cluster import Cluster

pytestmark = pytest.mark.timeout(1200)
FIRST = prompt(193, seed=1)  # six blocks and one token: the forward pass that dies where AMX was not asked for
PROMPTS = [FIRST, [*FIRST, *prompt(107, seed=2)], [*FIRST[:160], *prompt(40, seed=3)]]
LOCAL = [0, 192, 160]  # tokens that an engine has itself by then
CACHED = [192, 288, 192]
HITS = [192, 96, 32]  # the rest comes from the store: 320
BLOCKS = 10
SAVED_S = 120.0
HEARD_S = 20.0
EXTRA = {"enable_group_semantics": True, "lookup_async": True, "cache_prefix": "p", "preferred_segment": "10.0.0.1:12345"}


@dataclass(frozen=True)
class Reference:
    cold: list[Result]
    warm: list[Result]


def reference_of(model: Path, directory: Path, **settings: Any) -> Reference:
    """An engine without a connector: with nothing in its own cache, and with all."""
    engine = Engine(model, directory / "reference.log", **settings)
    try:
        cold, warm = engine.generate(PROMPTS), engine.generate(PROMPTS)
    finally:
        engine.stop()
    assert [one.cached for one in cold] == LOCAL
    assert [one.cached for one in warm] == CACHED
    return Reference(cold, warm)


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_of(model, tmp_path_factory.mktemp("reference"))


@pytest.fixture
def pool(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(dram="128MiB")


def store_of(pool: Cluster) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    assert store.setup("test", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", pool.master_address) == 0
    return store


def fill(pool: Cluster, start_engine: Callable[..., Engine], reference: Reference, *, ranks: int = 1, **settings: Any) -> None:
    """A producer computes all prompts, saves all blocks and ends."""
    producer = start_engine(pool.master_address, "kv_producer", **settings)
    found = producer.generate(PROMPTS)
    assert [one.external for one in found] == [0, 0, 0]
    assert_equal(found, reference.cold)
    store, end = store_of(pool), time.monotonic() + SAVED_S
    try:
        while len(store.get_all_keys()) < BLOCKS * ranks:
            assert time.monotonic() < end, f"saved: {store.get_all_keys()}\n{producer.log_text()[-4000:]}"
            threading.Event().wait(0.05)
        assert len(store.get_all_keys()) == BLOCKS * ranks
    finally:
        store.close()
    producer.stop()


def scramble(pool: Cluster) -> int:
    """Every value gets its bytes in another order."""
    store = store_of(pool)
    try:
        keys = store.get_all_keys()
        for key in keys:
            value = store.get(key)
            assert store.upsert(key, value[len(value) // 2 :] + value[: len(value) // 2]) == 0
        return len(keys)
    finally:
        store.close()


def generate_knowing(consumer: Engine, hits: list[int]) -> list[Result]:
    """When the consumer's index has heard of what was changed (a moment after the change), so that it finds so many tokens."""
    end = time.monotonic() + HEARD_S
    found = consumer.generate(PROMPTS)
    while [one.external for one in found] != hits:
        assert time.monotonic() < end, found
        consumer.reset()
        found = consumer.generate(PROMPTS)
    return found


def check_consumer(pool: Cluster, start_engine: Callable[..., Engine], reference: Reference, *, ranks: int = 1,
                   **settings: Any) -> Engine:  # fmt: skip
    consumer = start_engine(pool.master_address, "kv_consumer", **settings)
    found = consumer.generate(PROMPTS)
    assert [one.external for one in found] == HITS
    assert [one.cached for one in found] == CACHED
    assert_equal(found, reference.warm)
    consumer.reset()
    assert scramble(pool) == BLOCKS * ranks
    wrong = generate_knowing(consumer, HITS)
    assert differs(wrong, reference.warm)
    consumer.reset()
    store = store_of(pool)
    assert store.remove_all(force=True) == BLOCKS * ranks
    store.close()
    removed = generate_knowing(consumer, [0, 0, 0])
    assert_equal(removed, reference.cold)
    return consumer


def test_in_process(pool: Cluster, start_engine: Callable[..., Engine], reference: Reference) -> None:
    fill(pool, start_engine, reference)
    check_consumer(pool, start_engine, reference)


def test_groups_async_lookup_prefix_segment_and_chunked_prefill(pool: Cluster, start_engine: Callable[..., Engine], model: Path,
                                                               tmp_path: Path) -> None:  # fmt: skip
    chunked = {"max_num_batched_tokens": 64}
    reference = reference_of(model, tmp_path, **chunked)
    settings: dict[str, Any] = {"extra": EXTRA, "env": {"VLLM_MOONCAKE_STORE_TIER_LOG": "1"}, **chunked}
    fill(pool, start_engine, reference, **settings)
    check_consumer(pool, start_engine, reference, **settings)


def test_multiprocess(pool: Cluster, start_engine: Callable[..., Engine], reference: Reference) -> None:
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # the same numbers, from processes of its own
    fill(pool, start_engine, reference, env=env)
    check_consumer(pool, start_engine, reference, env=env)


def test_tensor_parallel(pool: Cluster, start_engine: Callable[..., Engine], model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, "tensor_parallel_size": 2}
    reference = reference_of(model, tmp_path, **settings)
    fill(pool, start_engine, reference, ranks=2, **settings)
    check_consumer(pool, start_engine, reference, ranks=2, **settings)


@pytest.mark.parametrize("fault", ["MOONCAKE_KILL", "MOONCAKE_STOP"])
def test_the_worker_fails_while_the_engine_loads(pool: Cluster, start_engine: Callable[..., Engine], reference: Reference,
                                                 tmp_path: Path, fault: str) -> None:  # fmt: skip
    """The output is right, and no request tries more than three times: a key whose get failed stops existing."""
    fill(pool, start_engine, reference)
    consumer = start_engine(pool.master_address, "kv_consumer", policy="recompute", traced=True,
                            env={fault: str(pool.worker(0).pid)})  # fmt: skip
    found = consumer.generate(PROMPTS)
    assert_equal(found, reference.cold)
    failed = [codes for codes in gets(tmp_path, 1) if min(codes) < 0]
    assert 1 <= len(failed) <= 3, gets(tmp_path, 1)
