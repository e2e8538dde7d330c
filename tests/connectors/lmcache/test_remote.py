"""The remote plug-in, loaded by LMCache's own RemoteBackend with its own memory, against a real pool of processes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

MakeCluster = Callable[..., Cluster]
PLENTY_MS = 3_000  # a deadline that a busy machine keeps
SLACK_S = 1.5  # what a call may take past its deadline on a busy machine
CHUNK = 16
MODEL = "org/tiny"


class Engine:
    """One LMCache engine's remote side: LMCache's own memory, loop and RemoteBackend."""

    def __init__(self, master: str, *, class_name: str = "KVPoolConnectorAdapter", extra: dict[str, Any] | None = None,
                 config: dict[str, Any] | None = None, model: str = MODEL, world_size: int = 1,
                 dtype: torch.dtype = torch.bfloat16, layers: int = 2, chunk: int = CHUNK) -> None:  # fmt: skip
        prefix = "remote_storage_plugin.kvpool."
        given = {"module_path": "kvpool.connectors.lmcache", "class_name": class_name, "master": master, "deadline_ms": PLENTY_MS}
        settings = {prefix + key: value for key, value in (given | (extra or {})).items()}
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=chunk, local_cpu=False, max_local_cpu_size=0.02, remote_storage_plugins=["kvpool"], extra_config=settings,
            **(config or {}))  # fmt: skip
        self.metadata = LMCacheMetadata(model, world_size, world_size, 0, 0, dtype, (layers, 2, chunk, 2, 8), chunk_size=chunk)
        self.memory = LocalCPUBackend(self.config, self.metadata)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.backend = RemoteBackend(self.config, self.metadata, self.loop, self.memory, plugin_name="kvpool")
        self.dtype, self.model, self.world_size = dtype, model, world_size

    @property
    def connector(self) -> Any:
        return self.backend.connection.getWrappedConnector()

    def run(self, work: Any, timeout_s: float = 20.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def keys(self, n: int, *, first: int = 0, **changes: Any) -> list[CacheEngineKey]:
        facts = {"model_name": self.model, "world_size": self.world_size, "worker_id": 0, "dtype": self.dtype} | changes
        return [CacheEngineKey(chunk_hash=0x5EED0000 + first + i, **facts) for i in range(n)]

    def chunks(self, n: int, *, seed: int, tokens: int | None = None) -> list[Any]:
        """Memory objects of LMCache's allocator with every byte from the seed."""
        made = []
        for index in range(n):
            obj = self.memory.allocate(self.metadata.get_shapes(tokens), self.metadata.get_dtypes(), MemoryFormat.KV_2LTD)
            data = torch.randint(0, 256, (obj.get_size(),), dtype=torch.uint8,
                                 generator=torch.Generator().manual_seed(seed * 1000 + index))  # fmt: skip
            obj.raw_data[: obj.get_size()].view(torch.uint8).copy_(data)
            made.append(obj)
        return made

    def put(self, keys: list[CacheEngineKey], objs: list[Any]) -> None:
        """As LMCache stores: submit, and wait until nothing is under way."""
        self.backend.batched_submit_put_task(keys, objs)
        self.run(self.connector.batched_async_contains("after", keys))
        wait_until(lambda: all(obj.get_ref_count() == 1 for obj in objs), what="the put gave its references back")

    def close(self) -> None:
        self.run(self.backend.connection.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.memory.memory_allocator.close()


def content(obj: Any) -> bytes:
    return bytes(obj.byte_array)


def drop(objs: list[Any]) -> None:
    for obj in objs:
        if obj is not None:
            obj.ref_count_down()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.2f} s"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A pool for the tests that break nothing in it."""
    directory: Path = tmp_path_factory.mktemp("pool")
    cluster = Cluster(directory, n_workers=2).start()
    yield cluster
    cluster.stop()


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """start(master, ...) makes an engine in a namespace of the test's own; closed after it."""
    made: list[Engine] = []

    def begin(master: str, **settings: Any) -> Engine:
        extra = {"namespace": f"t{abs(hash(request.node.name)) % 10**8}"} | settings.pop("extra", {})
        made.append(Engine(master, extra=extra, **settings))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


@pytest.mark.parametrize("class_name", ["KVPoolConnectorAdapter", "KVPoolConnector"])
def test_chunks_of_one_engine_reach_another_byte_by_byte(pool: Cluster, start: Callable[..., Engine], class_name: str) -> None:
    a, b = start(pool.master_address, class_name=class_name), start(pool.master_address, class_name=class_name)
    keys, objs = a.keys(5), a.chunks(4, seed=1)
    assert b.backend.batched_contains(keys) == 0
    assert b.backend.get_blocking(keys[0]) is None
    a.put(keys[:4], objs)
    assert a.backend.batched_contains(keys) == b.backend.batched_contains(keys) == 4
    assert [b.backend.contains(key) for key in keys] == [True] * 4 + [False]
    assert [b.connector.exists_sync(key) for key in keys] == [True] * 4 + [False]
    assert b.run(b.backend.batched_async_contains("id", keys)) == 4
    got = b.backend.batched_get_blocking(keys)
    assert [content(obj) for obj in got[:4]] == [content(obj) for obj in objs]
    assert got[4] is None
    one = b.backend.get_blocking(keys[2])
    assert content(one) == content(objs[2])
    assert (one.get_shape(), one.get_dtype(), one.get_memory_format()) == (
        objs[2].get_shape(), objs[2].get_dtype(), MemoryFormat.KV_2LTD)  # fmt: skip
    assert one.get_ref_count() == 1
    leading = b.run(b.backend.batched_get_non_blocking("id", [keys[0], keys[4], keys[1]]))
    assert [content(obj) for obj in leading] == [content(objs[0])], "what comes after a gap is not given"
    drop([*got, one, *leading, *objs])


def test_the_configuration_file_is_what_lmcache_takes(pool: Cluster, start: Callable[..., Engine]) -> None:
    config = LMCacheEngineConfig.from_file(str(Path(__file__).parents[3] / "clients" / "lmcache" / "lmcache.yaml"))
    assert config.remote_storage_plugins == ["kvpool"]
    given = {key.rpartition(".")[2]: value for key, value in config.extra_config.items()}
    engine = start(pool.master_address, class_name=given.pop("class_name"), extra=given | {"master": pool.master_address})
    assert engine.connector._link.settings.deadline_ms == 200
    assert engine.run(engine.connector.ping()) == 0


def test_a_gap_is_one_chunk_and_not_the_rest(pool: Cluster, start: Callable[..., Engine]) -> None:
    engine = start(pool.master_address)
    keys, objs = engine.keys(4), engine.chunks(4, seed=2)
    engine.put([keys[0], keys[2], keys[3]], [objs[0], objs[2], objs[3]])
    got = engine.run(engine.connector.batched_get(keys))
    assert [None if obj is None else content(obj) for obj in got] == [content(objs[0]), None, content(objs[2]), content(objs[3])]
    assert engine.backend.batched_contains(keys) == 1
    drop([*got, *objs])


def test_a_chunk_with_fewer_tokens_keeps_its_shape(pool: Cluster, start: Callable[..., Engine]) -> None:
    engine = start(pool.master_address)
    keys = engine.keys(2)
    full, part = engine.chunks(1, seed=3)[0], engine.chunks(1, seed=4, tokens=5)[0]
    engine.put(keys, [full, part])
    got = engine.backend.batched_get_blocking(keys)
    assert [content(obj) for obj in got] == [content(full), content(part)]
    assert list(got[1].get_shape()) == [2, 2, 5, 16] == list(part.get_shape())
    assert torch.equal(got[1].tensor.view(torch.uint8), part.tensor.view(torch.uint8))
    drop([*got, full, part])


def test_all_fields_of_a_key_count(pool: Cluster, start: Callable[..., Engine]) -> None:
    engine = start(pool.master_address)
    key, obj = engine.keys(1)[0], engine.chunks(1, seed=5)[0]
    engine.put([key], [obj])
    others = [engine.keys(1, **change)[0] for change in (
        {"model_name": "org/other"}, {"world_size": 2}, {"worker_id": 1}, {"dtype": torch.float16},
        {"request_configs": {"lmcache.tag.user": "u1"}},
    )]  # fmt: skip
    assert [engine.connector.exists_sync(other) for other in [key, *others]] == [True] + [False] * 5
    layer = key.split_layers(2)[0]
    assert not engine.connector.exists_sync(layer)
    assert engine.connector.remove_sync(key)
    assert engine.backend.get_blocking(key) is None
    wait_until(lambda: not engine.connector.exists_sync(key), what="events of the put may come after the removal")
    assert not engine.connector.remove_sync(key)
    drop([obj])


@pytest.mark.parametrize(
    ("what", "changes", "extra", "config"),
    [
        ("dtype", {"dtype": torch.float16}, {}, {}),
        ("model", {"model": "someone/tiny"}, {}, {}),
        ("revision", {}, {"revision": "v2"}, {}),
        ("chunk_tokens", {"chunk": 32}, {}, {}),
        ("shapes", {"layers": 4}, {}, {}),
        ("world_size", {"world_size": 2}, {}, {}),
        ("hash", {}, {}, {"pre_caching_hash_algorithm": "sha256_cbor"}),
    ],
)
def test_two_configurations_never_mix_and_the_log_says_what_differs(
    pool: Cluster, start: Callable[..., Engine], caplog: pytest.LogCaptureFixture, what: str, changes: dict[str, Any],
    extra: dict[str, Any], config: dict[str, Any]) -> None:  # fmt: skip
    a = start(pool.master_address)
    with caplog.at_level(logging.WARNING, logger="kvpool.lmcache"):
        b = start(pool.master_address, extra=extra, config=config, **changes)
    keys, objs = a.keys(2), a.chunks(2, seed=6)
    a.put(keys, objs)
    assert a.backend.batched_contains(keys) == 2
    assert b.backend.batched_contains(keys) == 0, "the same keys, asked by the other engine"
    assert b.backend.batched_get_blocking(keys) == [None, None]
    own, mine = b.keys(2), b.chunks(2, seed=7)
    b.put(own, mine)
    for engine, names, wanted in ((a, keys, objs), (b, own, mine)):
        got = engine.backend.batched_get_blocking(names)
        assert [content(obj) for obj in got] == [content(obj) for obj in wanted]
        drop([*got, *wanted])
    said = [record.getMessage() for record in caplog.records if "event=pool_separated" in record.getMessage()]
    assert len(said) == 1
    assert f"{what}=" in said[0]


def test_described_values_come_back_with_their_own_shape(pool: Cluster, start: Callable[..., Engine]) -> None:
    """Layer-wise chunks: not of the shape that the engine's metadata says."""
    engine = start(pool.master_address, config={"use_layerwise": True})
    key = engine.keys(1)[0].split_layers(2)
    objs = []
    for layer, tokens in enumerate((16, 7)):
        obj = engine.memory.allocate(torch.Size([tokens, 2, 16]), torch.bfloat16, MemoryFormat.KV_T2D)
        obj.raw_data[: obj.get_size()].view(torch.uint8).fill_(layer + 1)
        objs.append(obj)
    engine.put(key, objs)
    got = engine.run(engine.connector.batched_get(key))
    assert [content(obj) for obj in got] == [content(obj) for obj in objs]
    assert [list(obj.get_shape()) for obj in got] == [[16, 2, 16], [7, 2, 16]]
    assert {obj.get_memory_format() for obj in got} == {MemoryFormat.KV_T2D}
    drop([*got, *objs])


def test_a_value_of_the_wrong_size_is_no_chunk(pool: Cluster, start: Callable[..., Engine]) -> None:
    import kvpool
    from kvpool.connectors.lmcache.values import engine_key_digest

    engine = start(pool.master_address)
    key = engine.keys(1)[0]
    namespace = engine.connector._link.namespace
    assert namespace.put(kvpool.PrefixHashes(engine_key_digest(key)), [b"x" * 100]).n_there == 1
    assert engine.backend.contains(key)
    assert engine.backend.get_blocking(key) is None
    odd = engine.memory.allocate(torch.Size([3, 3]), torch.bfloat16, MemoryFormat.KV_2LTD)
    engine.put(engine.keys(1, first=9), [odd])
    assert not engine.backend.contains(engine.keys(1, first=9)[0]), "a shape that could not be made again is not stored"
    drop([odd])


def test_memory_that_is_full_is_a_miss_and_leaks_nothing(pool: Cluster, start: Callable[..., Engine]) -> None:
    engine = start(pool.master_address)
    keys, objs = engine.keys(3), engine.chunks(3, seed=8)
    engine.put(keys, objs)
    drop(objs)
    hoard: list[Any] = []
    while (obj := engine.memory.allocate(engine.metadata.get_shapes(), engine.metadata.get_dtypes(), MemoryFormat.KV_2LTD,
                                         eviction=False)) is not None:  # fmt: skip
        hoard.append(obj)
    hoard.pop().ref_count_down()
    with within(2 * PLENTY_MS / 1e3):
        got = engine.run(engine.connector.batched_get(keys))
    assert got[1:] == [None, None]
    drop([*got, *hoard])
    again = engine.run(engine.connector.batched_get(keys))
    assert all(obj is not None for obj in again)
    drop(again)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_worker_costs_a_deadline_and_hits_return(
    make_cluster: MakeCluster, start: Callable[..., Engine], transport: str) -> None:  # fmt: skip
    cluster = make_cluster()
    engine = start(cluster.master_address, extra={"deadline_ms": 300, "transport": transport})
    keys, objs = engine.keys(3), engine.chunks(3, seed=9)
    engine.put(keys, objs)
    wait_until(lambda: engine.backend.batched_contains(keys) == 3)
    cluster.worker().kill()
    for _ in range(4):
        with within(0.6 + SLACK_S):
            assert engine.run(engine.connector.batched_get(keys)) == [None] * 3
        with within(0.3 + SLACK_S):
            engine.put(engine.keys(1, first=50), objs[:1])
    cluster.start_worker(0)

    def stored_again() -> bool:
        engine.put(keys, objs)
        return bool(engine.backend.batched_contains(keys) == 3)

    wait_until(stored_again, timeout_s=20)
    got = engine.backend.batched_get_blocking(keys)
    assert [content(obj) for obj in got] == [content(obj) for obj in objs]
    drop([*got, *objs])


def test_chunks_are_served_while_the_master_is_dead(make_cluster: MakeCluster, start: Callable[..., Engine]) -> None:
    cluster = make_cluster()
    engine = start(cluster.master_address, extra={"deadline_ms": 500})
    keys, objs = engine.keys(3), engine.chunks(3, seed=10)
    engine.put(keys, objs)
    wait_until(lambda: engine.backend.batched_contains(keys) == 3)
    assert engine.run(engine.connector.ping()) == 0
    assert cluster.master is not None
    cluster.master.kill()
    with within(1.0 + SLACK_S):
        got = engine.backend.batched_get_blocking(keys)
    assert [content(obj) for obj in got] == [content(obj) for obj in objs]
    with within(0.5 + SLACK_S):
        assert engine.backend.batched_contains(engine.keys(5)) == 3
    with within(0.5 + SLACK_S):
        assert not engine.connector.remove_sync(keys[0])
    cluster.start_master()
    more = engine.keys(2, first=70)
    wait_until(lambda: engine.connector.remove_sync(keys[2]) or not engine.connector.exists_sync(keys[2]), timeout_s=20)
    engine.put(more, objs[:2])
    wait_until(lambda: engine.backend.batched_contains(more) == 2, timeout_s=10)
    drop([*got, *objs])


def test_a_pool_that_is_absent_at_start_is_used_when_it_comes(make_cluster: MakeCluster, start: Callable[..., Engine]) -> None:
    cluster = make_cluster()
    assert cluster.master is not None
    cluster.worker().kill()
    cluster.master.kill()
    with within(SLACK_S + 2):
        engine = start(cluster.master_address, extra={"start_wait_ms": 100})
    keys, objs = engine.keys(2), engine.chunks(2, seed=11)
    with within(SLACK_S):
        assert engine.backend.batched_contains(keys) == 0
        assert engine.backend.batched_get_blocking(keys) == [None, None]
        engine.put(keys, objs)
        assert engine.run(engine.connector.ping()) == 1
    cluster.start_master()
    cluster.start_worker(0)

    def stored() -> bool:
        engine.put(keys, objs)
        return bool(engine.backend.batched_contains(keys) == 2)

    wait_until(stored, timeout_s=20)
    got = engine.backend.batched_get_blocking(keys)
    assert [content(obj) for obj in got] == [content(obj) for obj in objs]
    drop([*got, *objs])


def test_many_engines_calls_at_once(pool: Cluster, start: Callable[..., Engine]) -> None:
    engine = start(pool.master_address)
    objs = [engine.chunks(2, seed=100 + i) for i in range(6)]

    async def one(i: int) -> list[bytes | None]:
        keys = engine.keys(2, first=10 * i)
        for obj in objs[i]:
            obj.ref_count_up()  # LMCache's wrapper gives one reference back
        await engine.backend.connection.batched_put(keys, objs[i])
        got = await engine.connector.batched_get(keys)
        found = [None if obj is None else content(obj) for obj in got]
        drop(got)
        return found

    async def all_at_once() -> list[list[bytes | None]]:
        return await asyncio.gather(*(one(i % 6) for i in range(24)))

    for i, found in enumerate(engine.run(all_at_once(), 40)):
        assert found == [content(obj) for obj in objs[i % 6]], i
    for pair in objs:
        drop(pair)


def test_a_cancelled_get_gives_its_memory_back(make_cluster: MakeCluster, start: Callable[..., Engine]) -> None:
    cluster = make_cluster()
    engine = start(cluster.master_address, extra={"deadline_ms": 1_500})
    keys, objs = engine.keys(2), engine.chunks(2, seed=12)
    engine.put(keys, objs)
    wait_until(lambda: engine.backend.batched_contains(keys) == 2)
    drop(objs)
    allocator = engine.memory.memory_allocator.pin_allocator
    before = allocator.total_allocated_size
    cluster.worker().pause()
    future = asyncio.run_coroutine_threadsafe(engine.connector.batched_get(keys), engine.loop)
    wait_until(lambda: allocator.total_allocated_size > before, what="the get has its memory")
    future.cancel()
    cluster.worker().resume()
    wait_until(lambda: allocator.total_allocated_size == before, what="it was given back")
