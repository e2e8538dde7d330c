"""The HiCache backend, made by SGLang's own factory with SGLang's own host pools, against a real pool of processes."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvpool.errors import InvalidArgument
from tests.connectors.sglang import real
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

MakeCluster = Callable[..., Cluster]
PLENTY_MS = 3_000  # a deadline that a busy machine keeps
SLACK_S = 1.5  # what a call may take past its deadline on a busy machine


class Engines:
    """Backends of a test in namespaces of its own, closed at its end."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.made: list[Any] = []

    def start(self, master: str, pool: Any, *, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
        """A backend as the cache controller makes it: factory, then the host pool."""
        given = {"backend_name": "kvpool", "module_path": "kvpool.connectors.sglang_hicache",
                 "class_name": "KVPoolHiCacheStorage", "interface_v1": 1, "master": master, "deadline_ms": PLENTY_MS,
                 "namespace": self.prefix}  # fmt: skip
        config = real.config(extra_config=given | (extra or {}), **changes)
        backend = StorageBackendFactory.create_backend("dynamic", config, pool)
        self.made.append(backend)
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
        return backend


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Master of a pool for the tests that break nothing in it."""
    directory: Path = tmp_path_factory.mktemp("pool")
    cluster = Cluster(directory, n_workers=2).start()
    yield cluster.master_address
    cluster.stop()


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    made = Engines(f"t{abs(hash(request.node.name)) % 10**8}")
    yield made
    for backend in made.made:
        backend.close()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.2f} s"


def chain(n: int, *, first: int = 0, page_size: int = 8) -> list[str]:
    return real.page_hashes(list(range(first, first + n * page_size)), page_size)


def other_side(pool: Any, make: Callable[..., Any], **shape: Any) -> Any:
    """A second engine's host pool of the same kind, with other bytes in it."""
    pool_2 = make(layout=pool.layout, **shape)
    real.fill(pool_2, 99)
    return pool_2


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head", "layer_first"])
def test_pages_of_one_engine_reach_another_byte_by_byte(shared: str, engines: Engines, layout: str) -> None:
    pool_a = real.mha_pool(layout=layout)
    real.fill(pool_a, 1)
    pool_b = other_side(pool_a, real.mha_pool)
    a, b = engines.start(shared, pool_a), engines.start(shared, pool_b)
    keys = chain(6)
    assert b.batch_exists(keys) == 0
    assert b.batch_get_v1(keys, real.indices(pool_b, range(6))) == [False] * 6
    assert a.batch_set_v1(keys[:5], real.indices(pool_a, [9, 2, 4, 0, 7])) == [True] * 5
    assert (a.batch_exists(keys), b.batch_exists(keys)) == (5, 5)
    untouched = real.page_bytes(pool_b, 15)
    assert b.batch_get_v1(keys, real.indices(pool_b, [1, 3, 5, 6, 8, 10])) == [True] * 5 + [False]
    for target, source in zip([1, 3, 5, 6, 8], [9, 2, 4, 0, 7], strict=True):
        assert real.page_bytes(pool_b, target) == real.page_bytes(pool_a, source)
    assert real.page_bytes(pool_b, 15) == untouched
    assert a.batch_set_v1(keys[:5], real.indices(pool_a, [1] * 5)) == [True] * 5, "there already: the first bytes stay"
    assert b.batch_get_v1(keys[:1], real.indices(pool_b, [0])) == [True]
    assert real.page_bytes(pool_b, 0) == real.page_bytes(pool_a, 9)


def test_the_configuration_file_is_what_the_factory_takes(shared: str, engines: Engines) -> None:
    file = Path(__file__).parents[3] / "clients" / "sglang" / "kvpool.json"
    engine = engines.start(shared, real.mha_pool(), extra=json.loads(file.read_text(encoding="utf-8")) | {"master": shared})
    assert engine.batch_exists(chain(1)) == 0
    assert engine._stores["kv"].link.settings.deadline_ms == 200


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_the_generic_calls_see_the_same_pages(shared: str, engines: Engines, layout: str) -> None:
    pool = real.mha_pool(layout=layout)
    real.fill(pool, 2)
    engine = engines.start(shared, pool, extra={"interface_v1": 0})
    keys = chain(5)
    values = [pool.get_data_page(page * pool.page_size) for page in range(4)]
    assert engine.batch_set(keys[:4], values)
    assert engine.batch_exists(keys) == 4
    targets = [pool.get_dummy_flat_data_page() for _ in keys]
    got = engine.batch_get(keys, targets)
    assert [torch.equal(g.view(torch.uint8), v.view(torch.uint8)) for g, v in zip(got, values, strict=False)] == [True] * 4
    assert [got[i].data_ptr() == targets[i].data_ptr() for i in range(4)] == [True] * 4, "in place"
    assert got[4] is None
    assert (engine.exists(keys[0]), engine.exists(keys[4])) == (True, False)
    assert engine.set("any string", values[1])
    alone = engine.get("any string")
    assert torch.equal(alone.view(torch.uint8), values[1].view(torch.uint8))
    assert alone.dtype == pool.dtype
    assert engine.get("another") is None
    assert engine.batch_get_v1(keys, real.indices(pool, range(8, 13))) == [True] * 4 + [False], "both interfaces, one pool"
    assert [real.page_bytes(pool, 8 + i) for i in range(4)] == [real.page_bytes(pool, i) for i in range(4)]


def test_mla_ranks_share_one_copy_and_other_ranks_have_their_own(shared: str, engines: Engines) -> None:
    keys = chain(3)
    mla_0, mla_1 = real.mla_pool(), real.mla_pool()
    real.fill(mla_0, 3)
    writer = engines.start(shared, mla_0, is_mla_model=True, tp_size=2, tp_rank=0, model_name="mla")
    reader = engines.start(shared, mla_1, is_mla_model=True, tp_size=2, tp_rank=1, model_name="mla")
    assert writer.batch_set_v1(keys, real.indices(mla_0, range(3))) == [True] * 3
    assert reader.batch_get_v1(keys, real.indices(mla_1, range(3))) == [True] * 3
    assert [real.page_bytes(mla_1, i) for i in range(3)] == [real.page_bytes(mla_0, i) for i in range(3)]
    rank_0, rank_1 = real.mha_pool(), real.mha_pool()
    real.fill(rank_0, 4)
    real.fill(rank_1, 5)
    first = engines.start(shared, rank_0, tp_size=2, tp_rank=0)
    second = engines.start(shared, rank_1, tp_size=2, tp_rank=1)
    assert first.batch_set_v1(keys, real.indices(rank_0, range(3))) == [True] * 3
    assert second.batch_exists(keys) == 0, "another rank's heads"
    assert second.batch_set_v1(keys, real.indices(rank_1, range(3))) == [True] * 3
    assert second.batch_get_v1(keys, real.indices(rank_1, range(5, 8))) == [True] * 3
    assert [real.page_bytes(rank_1, 5 + i) for i in range(3)] == [real.page_bytes(rank_1, i) for i in range(3)]


@pytest.mark.parametrize(
    ("what", "shape", "changes", "extra"),
    [
        ("model", {}, {"model_name": "other/tiny"}, {}),
        ("revision", {}, {}, {"revision": "v2"}),
        ("dtype", {"dtype": "float16"}, {}, {}),
        ("page_tokens", {"page_size": 16}, {}, {}),
        ("layout", {"layout": "page_head"}, {}, {}),
        ("head_num", {"heads": 4, "head_dim": 8}, {}, {}),
        ("tp_size", {}, {"tp_size": 2}, {}),
    ],
)
def test_two_configurations_never_mix_and_the_log_says_what_differs(
    shared: str, engines: Engines, caplog: pytest.LogCaptureFixture, what: str, shape: dict[str, Any],
    changes: dict[str, Any], extra: dict[str, Any]) -> None:  # fmt: skip
    pool_a, pool_b = real.mha_pool(), real.mha_pool(**shape)
    real.fill(pool_a, 6)
    real.fill(pool_b, 7)
    a = engines.start(shared, pool_a)
    with caplog.at_level(logging.WARNING, logger="kvpool.sglang"):
        b = engines.start(shared, pool_b, extra=extra, **changes)
    keys = chain(3)
    assert a.batch_set_v1(keys, real.indices(pool_a, range(3))) == [True] * 3
    before = [real.page_bytes(pool_b, i) for i in range(3)]
    assert b.batch_exists(keys) == 0
    assert b.batch_get_v1(keys, real.indices(pool_b, range(3))) == [False] * 3
    assert [real.page_bytes(pool_b, i) for i in range(3)] == before
    assert b.batch_set_v1(keys, real.indices(pool_b, range(3))) == [True] * 3
    assert b.batch_get_v1(keys, real.indices(pool_b, range(5, 8))) == [True] * 3
    assert [real.page_bytes(pool_b, 5 + i) for i in range(3)] == before, "its own"
    assert a.batch_get_v1(keys, real.indices(pool_a, range(5, 8))) == [True] * 3
    assert [real.page_bytes(pool_a, 5 + i) for i in range(3)] == [real.page_bytes(pool_a, i) for i in range(3)]
    said = [record.getMessage() for record in caplog.records if "event=pool_separated" in record.getMessage()]
    assert len(said) == 1
    assert f"{what}=" in said[0]


def test_a_value_of_the_wrong_size_is_no_page(shared: str, engines: Engines) -> None:
    pool = real.mha_pool()
    real.fill(pool, 8)
    engine = engines.start(shared, pool)
    keys = chain(3)
    store = engine._stores["kv"]
    short = store.pages.hashes(keys)
    bytes_of_part = store.pages.sizes[0]
    blocks = [bytes([i]) * (bytes_of_part - (100 if i == 3 else 0)) for i in range(6)]
    assert store.link.namespace.put(short, blocks).n_there == 6
    assert engine.batch_get_v1(keys, real.indices(pool, range(3))) == [True, False, False]
    assert engine.batch_get(keys)[1] is None
    assert not engine.set(keys[0], torch.zeros(7)), "a value of another size than a page's"
    assert not engine.batch_set(keys, [torch.zeros(7)])
    assert engine.batch_get_v1(keys, real.indices(pool, range(2))) == [False] * 3, "indices for two of three pages"
    assert engine.batch_set_v1(keys, None) == [False] * 3


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_worker_costs_a_deadline_and_hits_return(make_cluster: MakeCluster, engines: Engines, transport: str) -> None:
    cluster = make_cluster()
    pool = real.mha_pool()
    real.fill(pool, 9)
    engine = engines.start(cluster.master_address, pool, extra={"transport": transport, "deadline_ms": 300})
    keys, where = chain(4), real.indices(pool, range(4))
    wait_until(lambda: engine.batch_set_v1(keys, where) == [True] * 4)
    cluster.worker().kill()
    for _ in range(5):
        with within(0.3 + SLACK_S):
            assert engine.batch_get_v1(keys, real.indices(pool, range(8, 12))) == [False] * 4
        with within(0.3 + SLACK_S):
            assert engine.batch_set_v1(chain(2, first=500), real.indices(pool, range(2))) == [False] * 2
        with within(0.3 + SLACK_S):
            engine.batch_exists(keys)
    cluster.start_worker(0)
    wait_until(lambda: engine.batch_set_v1(keys, where) == [True] * 4, timeout_s=20)
    wait_until(lambda: engine.batch_get_v1(keys, real.indices(pool, range(8, 12))) == [True] * 4, timeout_s=10)
    assert [real.page_bytes(pool, 8 + i) for i in range(4)] == [real.page_bytes(pool, i) for i in range(4)]


def test_a_frozen_worker_is_waited_for_no_longer_than_the_deadline(make_cluster: MakeCluster, engines: Engines) -> None:
    cluster = make_cluster()
    pool = real.mha_pool()
    real.fill(pool, 10)
    engine = engines.start(cluster.master_address, pool, extra={"deadline_ms": 200})
    keys, where = chain(4), real.indices(pool, range(4))
    wait_until(lambda: engine.batch_set_v1(keys, where) == [True] * 4)
    cluster.worker().pause()
    for _ in range(4):
        with within(0.2 + SLACK_S):
            assert engine.batch_get_v1(keys, real.indices(pool, range(8, 12))) == [False] * 4
    cluster.worker().resume()
    wait_until(lambda: engine.batch_get_v1(keys, real.indices(pool, range(8, 12))) == [True] * 4, timeout_s=20)
    assert [real.page_bytes(pool, 8 + i) for i in range(4)] == [real.page_bytes(pool, i) for i in range(4)]


def test_pages_are_served_while_the_master_is_dead(make_cluster: MakeCluster, engines: Engines) -> None:
    cluster = make_cluster()
    pool = real.mha_pool()
    real.fill(pool, 11)
    engine = engines.start(cluster.master_address, pool, extra={"deadline_ms": 500})
    keys, where = chain(4), real.indices(pool, range(4))
    wait_until(lambda: engine.batch_set_v1(keys, where) == [True] * 4)
    assert cluster.master is not None
    cluster.master.kill()
    with within(0.5 + SLACK_S):
        assert engine.batch_exists(keys) == 4
    with within(0.5 + SLACK_S):
        assert engine.batch_get_v1(keys, real.indices(pool, range(8, 12))) == [True] * 4
    assert [real.page_bytes(pool, 8 + i) for i in range(4)] == [real.page_bytes(pool, i) for i in range(4)]
    longer = chain(6)
    with within(0.5 + SLACK_S):
        assert engine.batch_get_v1(longer, real.indices(pool, range(8, 14))) == [True] * 4 + [False] * 2
    with within(2.0 + SLACK_S):
        engine.clear()
    cluster.start_master()
    wait_until(lambda: engine.batch_set_v1(longer, real.indices(pool, range(6))) == [True] * 6, timeout_s=20)
    wait_until(lambda: engine.batch_exists(longer) == 6, timeout_s=20, what="the new master's index is known")


def test_a_pool_that_is_absent_at_start_is_used_when_it_comes(make_cluster: MakeCluster, engines: Engines) -> None:
    cluster = make_cluster()
    assert cluster.master is not None
    cluster.worker().kill()
    cluster.master.kill()
    pool = real.mha_pool()
    real.fill(pool, 12)
    keys, where = chain(3), real.indices(pool, range(3))
    with within(0.1 + SLACK_S):
        engine = engines.start(cluster.master_address, pool, extra={"start_wait_ms": 100})
    with within(SLACK_S):
        assert engine.batch_exists(keys) == 0
        assert engine.batch_get_v1(keys, where) == [False] * 3
        assert engine.batch_set_v1(keys, where) == [False] * 3
        assert engine.batch_get(keys) == [None] * 3
        assert (engine.set(keys[0], torch.zeros(4)), engine.exists(keys[0])) == (False, False)
        engine.clear()
    cluster.start_master()
    cluster.start_worker(0)
    wait_until(lambda: engine.batch_set_v1(keys, where) == [True] * 3, timeout_s=20)
    assert engine.batch_get_v1(keys, real.indices(pool, range(5, 8))) == [True] * 3
    assert [real.page_bytes(pool, 5 + i) for i in range(3)] == [real.page_bytes(pool, i) for i in range(3)]


def test_another_pool_at_the_same_address_is_used(make_cluster: MakeCluster, engines: Engines) -> None:
    """The pool was set up anew: its master counts from the beginning and knows no namespace."""
    cluster = make_cluster()
    pool = real.mha_pool()
    real.fill(pool, 16)
    engine = engines.start(cluster.master_address, pool, extra={"deadline_ms": 500})
    keys, where = chain(3), real.indices(pool, range(3))
    wait_until(lambda: engine.batch_set_v1(keys, where) == [True] * 3)
    assert cluster.master is not None
    cluster.worker().kill()
    cluster.master.kill()
    for name in ("master", "worker-0"):
        shutil.rmtree(cluster.directory / name)
    cluster.start_master()
    cluster.start_worker(0)
    wait_until(lambda: engine.batch_set_v1(keys, where) == [True] * 3, timeout_s=40)
    assert engine.batch_get_v1(keys, real.indices(pool, range(5, 8))) == [True] * 3
    assert [real.page_bytes(pool, 5 + i) for i in range(3)] == [real.page_bytes(pool, i) for i in range(3)]


def test_a_closed_backend_finds_nothing_and_does_not_raise(shared: str, engines: Engines) -> None:
    pool = real.mha_pool()
    engine = engines.start(shared, pool)
    keys, where = chain(2), real.indices(pool, range(2))
    assert engine.batch_set_v1(keys, where) == [True] * 2
    engine.close()
    engine.close()
    assert (engine.batch_exists(keys), engine.batch_get_v1(keys, where)) == (0, [False] * 2)
    assert engine.batch_set_v1(keys, where) == [False] * 2


def test_clear_removes_the_pages_of_this_configuration_alone(shared: str, engines: Engines) -> None:
    pool_a, pool_b = real.mha_pool(), real.mha_pool()
    a, b = engines.start(shared, pool_a), engines.start(shared, pool_b, model_name="other")
    keys = chain(4)
    where = real.indices(pool_a, range(4))
    assert a.batch_set_v1(keys, where) == b.batch_set_v1(keys, where) == [True] * 4
    a.clear()
    assert (a.batch_exists(keys), b.batch_exists(keys)) == (0, 4)
    assert a.batch_get_v1(keys, real.indices(pool_a, range(4))) == [False] * 4
    assert a.batch_set_v1(keys, real.indices(pool_a, range(4))) == [True] * 4


def test_many_threads_at_once_get_only_what_was_put(shared: str, engines: Engines) -> None:
    pools = [real.mha_pool(pages=64) for _ in range(2)]
    for seed, pool in enumerate(pools):
        real.fill(pool, 20)  # the same bytes in both: whoever puts a page first, it has these
    backends = [engines.start(shared, pool) for pool in pools]
    failures: list[str] = []

    def work(thread: int) -> None:
        engine, pool = backends[thread % 2], pools[thread % 2]
        keys = chain(4, first=1_000 * (thread % 4))
        source, target = range(4 * (thread % 4), 4 * (thread % 4) + 4), range(32 + 4 * thread, 36 + 4 * thread)
        for _ in range(15):
            if engine.batch_set_v1(keys, real.indices(pool, source)) != [True] * 4:
                failures.append("set")
            if engine.batch_get_v1(keys, real.indices(pool, target)) != [True] * 4:
                failures.append("get")
            if [real.page_bytes(pool, t) for t in target] != [real.page_bytes(pool, s) for s in source]:
                failures.append("bytes")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:5]


def test_a_chain_that_is_continued_keeps_its_place(shared: str, engines: Engines) -> None:
    pool = real.mha_pool()
    real.fill(pool, 13)
    engine = engines.start(shared, pool)
    keys = chain(8)
    later = HiCacheStorageExtraInfo(prefix_keys=keys[:4])
    assert engine.batch_set_v1(keys[:4], real.indices(pool, range(4)), HiCacheStorageExtraInfo(prefix_keys=[])) == [True] * 4
    assert engine.batch_set_v1(keys[4:], real.indices(pool, range(4, 8)), later) == [True] * 4
    assert engine.batch_exists(keys[4:], later) == engine.batch_exists(keys[4:]) == 4
    assert engine.batch_get_v1(keys, real.indices(pool, range(8, 16))) == [True] * 8
    assert [real.page_bytes(pool, 8 + i) for i in range(8)] == [real.page_bytes(pool, i) for i in range(8)]


def test_a_second_pool_of_a_hybrid_model(shared: str, engines: Engines) -> None:
    kv, swa = real.mha_pool(), real.mha_pool(layers=1)
    real.fill(kv, 14)
    real.fill(swa, 15)
    engine = engines.start(shared, kv)
    engine.register_mem_host_pool_v2(swa, PoolName.SWA)
    keys = chain(6)
    assert engine.batch_set_v1(keys[:5], real.indices(kv, range(5))) == [True] * 5
    whole = PoolTransfer(name=PoolName.SWA, keys=keys[:2], host_indices=real.indices(swa, range(2)))
    tail = PoolTransfer(name=PoolName.SWA, keys=keys[3:5], host_indices=real.indices(swa, range(3, 5)))
    assert engine.batch_set_v2([whole]) == {PoolName.SWA: [True, True]}
    assert engine.batch_set_v2([tail]) == {PoolName.SWA: [True, True]}
    every = engine.batch_exists_v2(keys, [PoolTransfer(name=PoolName.SWA)])
    assert (every.kv_hit_pages, every.extra_pool_hit_pages) == (2, {PoolName.KV: 5, PoolName.SWA: 2})
    assert every.restorable_prefix_pages == [1, 2]
    window = PoolTransfer(name=PoolName.SWA, keys=["", ""], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    last = engine.batch_exists_v2(keys, [window])
    assert (last.kv_hit_pages, last.restorable_prefix_pages) == (5, [1, 2, 5])
    back = PoolTransfer(name=PoolName.SWA, keys=keys[3:6], host_indices=real.indices(swa, range(8, 11)))
    assert engine.batch_get_v2([back]) == {PoolName.SWA: [True, True, False]}
    assert [real.page_bytes(swa, 8 + i) for i in range(2)] == [real.page_bytes(swa, 3 + i) for i in range(2)]
    unknown = PoolTransfer(name=PoolName.MAMBA, keys=keys[:1], host_indices=real.indices(swa, [0]))
    assert engine.batch_get_v2([unknown]) == {PoolName.MAMBA: [False]}
    assert engine.batch_exists_v2(keys, [unknown]).kv_hit_pages == 0


def test_metrics_are_the_engines_own(shared: str, engines: Engines) -> None:
    pool = real.mha_pool()
    engine = engines.start(shared, pool, enable_storage_metrics=True)
    keys, where = chain(3), real.indices(pool, range(3))
    assert engine.batch_set_v1(keys, where) == engine.batch_get_v1(keys, where) == [True] * 3
    stats = engine.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
    assert stats.prefetch_bandwidth[0] > 0
    assert engine.get_stats().prefetch_pgs == []
    assert engines.start(shared, real.mha_pool()).get_stats() is None


@pytest.mark.parametrize(
    ("extra", "named"),
    [({"deadline_mss": 5}, "deadline_ms"), ({"deadline_ms": "fast"}, "deadline_ms"), ({"replicas": True}, "replicas"),
     ({"deadline_ms": -1}, "deadline_ms")],
)  # fmt: skip
def test_a_wrong_setting_stops_the_start_and_is_named(engines: Engines, extra: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        engines.start("127.0.0.1:1", real.mha_pool(), extra=extra)
