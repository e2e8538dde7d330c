"""The L2 adapter, made by LMCache's own plug-in factory, against a real pool of processes."""

from __future__ import annotations

import argparse
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import add_l2_adapters_args, parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from kvpool.errors import InvalidArgument
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

MakeCluster = Callable[..., Cluster]
PLENTY_MS = 3_000
SLACK_S = 1.5
SHAPE = torch.Size([2, 2, 16, 16])
DTYPE = torch.bfloat16


class Seen(L2AdapterListener):
    """What the adapter tells LMCache."""

    def __init__(self) -> None:
        self.stored: list[tuple[ObjectKey, int]] = []
        self.accessed: list[ObjectKey] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
        self.stored += list(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: Any) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: Any) -> None:
        self.deleted += keys


class L2:
    """An adapter as LMCache's controllers use it: submit, wait for the descriptor, ask."""

    def __init__(self, master: str, /, **params: Any) -> None:
        config = PluginL2AdapterConfig.from_dict({
            "module_path": "kvpool.connectors.lmcache", "class_name": "KVPoolL2Adapter",
            "adapter_params": {"master": master, "deadline_ms": PLENTY_MS} | params,
        })  # fmt: skip
        self.adapter = create_l2_adapter(config)
        self.adapter.set_backend_identity("plugin")

    def _signalled(self, fd: int, ask: Callable[[], Any]) -> Any:
        while (result := ask()) is None:
            assert select.select([fd], [], [], 20.0)[0], "the descriptor was not signalled"
            os.eventfd_read(fd)
        return result

    def store(self, keys: list[ObjectKey], objs: list[Any]) -> Any:
        task = self.adapter.submit_store_task(keys, objs)
        done: dict[int, Any] = {}

        def ask() -> Any:
            done.update(self.adapter.pop_completed_store_tasks())
            return done.get(task)

        return self._signalled(self.adapter.get_store_event_fd(), ask)

    def lookup(self, keys: list[ObjectKey], *, shape: torch.Size = SHAPE, dtype: torch.dtype = DTYPE) -> list[bool]:
        layout = {group: MemoryLayoutDesc([shape], [dtype]) for group in {key.object_group_id for key in keys}}
        task = self.adapter.submit_lookup_and_lock_task(keys, layout)
        fd = self.adapter.get_lookup_and_lock_event_fd()
        bitmap = self._signalled(fd, lambda: self.adapter.query_lookup_and_lock_result(task))
        assert self.adapter.query_lookup_and_lock_result(task) is None, "told once"
        return [bitmap.test(i) for i in range(len(keys))]

    def load(self, keys: list[ObjectKey], objs: list[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objs)
        bitmap = self._signalled(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))
        assert self.adapter.query_load_result(task) is None, "told once"
        return [bitmap.test(i) for i in range(len(keys))]


def objects(n: int, *, seed: int | None = None, shape: torch.Size = SHAPE, dtype: torch.dtype = DTYPE) -> list[Any]:
    """LMCache's memory objects; zeros without a seed."""
    made = []
    for index in range(n):
        size = shape.numel() * dtype.itemsize
        raw = torch.zeros(size, dtype=torch.uint8)
        if seed is not None:
            raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed * 100 + index))
        meta = MemoryObjMetadata(shape=shape, dtype=dtype, address=0, phy_size=size, ref_count=1, fmt=MemoryFormat.KV_2LTD,
                                 shapes=[shape], dtypes=[dtype])  # fmt: skip
        made.append(TensorMemoryObj(raw, meta, None))
    return made


def keys_of(n: int, *, first: int = 0, **changes: Any) -> list[ObjectKey]:
    facts = {"model_name": "org/tiny", "kv_rank": 0x01000100} | changes
    return [ObjectKey(chunk_hash=(0xABC000 + first + i).to_bytes(16, "big"), **facts) for i in range(n)]


def content(objs: list[Any]) -> list[bytes]:
    return [bytes(obj.byte_array) for obj in objs]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.2f} s"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory: Path = tmp_path_factory.mktemp("pool")
    cluster = Cluster(directory, n_workers=2).start()
    yield cluster
    cluster.stop()


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., L2]]:
    made: list[L2] = []

    def begin(master: str, /, **params: Any) -> L2:
        made.append(L2(master, **({"namespace": f"t{abs(hash(request.node.name)) % 10**8}"} | params)))
        return made[-1]

    yield begin
    for one in made:
        one.adapter.close()


def test_objects_of_one_server_reach_another_byte_by_byte(pool: Cluster, start: Callable[..., L2]) -> None:
    a, b = start(pool.master_address), start(pool.master_address)
    seen = Seen()
    a.adapter.register_listener(seen)
    keys, objs = keys_of(5), objects(5, seed=1)
    assert b.lookup(keys) == [False] * 5
    result = a.store(keys[:4], objs[:4])
    size = SHAPE.numel() * 2
    assert (result.is_successful(), result.bytes_transferred()) == (True, 4 * size)
    assert seen.stored == [(key, size) for key in keys[:4]]
    assert b.lookup(keys) == [True] * 4 + [False]
    targets = objects(5)
    assert b.load(keys, targets) == [True] * 4 + [False]
    assert content(targets[:4]) == content(objs[:4])
    assert content(targets[4:]) == [bytes(size)]
    b.adapter.submit_unlock(keys[:4])
    again = a.store(keys[:4], objects(4, seed=2))
    assert (again.is_successful(), again.bytes_transferred()) == (True, 0), "there already: the first bytes stay"
    assert b.load(keys[:1], targets[4:]) == [True]
    assert content(targets[4:]) == content(objs[:1])
    assert a.adapter.get_usage().total_bytes_used == 4 * size


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LMCache imports its other adapters, which have old imports
def test_the_configuration_file_is_what_lmcache_takes(pool: Cluster, start: Callable[..., L2]) -> None:
    text = (Path(__file__).parents[3] / "clients" / "lmcache" / "l2.json").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser()
    add_l2_adapters_args(parser)
    (config,) = parse_args_to_l2_adapters_config(parser.parse_args(["--l2-adapter", text])).adapters
    assert isinstance(config, PluginL2AdapterConfig)
    assert start(pool.master_address, **(config.adapter_params | {"master": pool.master_address})).lookup(keys_of(1)) == [False]


def test_a_gap_is_one_object_and_not_the_rest(pool: Cluster, start: Callable[..., L2]) -> None:
    l2 = start(pool.master_address)
    keys, objs = keys_of(6), objects(6, seed=3)
    there = [0, 2, 3, 5]
    assert l2.store([keys[i] for i in there], [objs[i] for i in there]).is_successful()
    assert l2.lookup(keys) == [i in there for i in range(6)]
    targets = objects(6)
    assert l2.load(keys, targets) == [i in there for i in range(6)]
    assert [content(targets)[i] for i in there] == [content(objs)[i] for i in there]
    l2.adapter.submit_unlock([keys[i] for i in there])


def test_descriptors_are_three_and_signalled_for_their_own_tasks(pool: Cluster, start: Callable[..., L2]) -> None:
    l2 = start(pool.master_address).adapter
    store, lookup, load = l2.get_store_event_fd(), l2.get_lookup_and_lock_event_fd(), l2.get_load_event_fd()
    assert len({store, lookup, load}) == 3
    assert not select.select([store, lookup, load], [], [], 0)[0]
    task = l2.submit_load_task(keys_of(1, first=900), objects(1))
    assert select.select([store, lookup, load], [], [], 20)[0] == [load]
    assert l2.query_load_result(task + 1) is None
    assert l2.query_load_result(task).popcount() == 0
    assert l2.query_load_result(task) is None


def test_all_fields_of_a_key_and_the_objects_type_count(pool: Cluster, start: Callable[..., L2]) -> None:
    l2 = start(pool.master_address)
    key, objs = keys_of(1), objects(1, seed=4)
    assert l2.store(key, objs).is_successful()
    for change in ({"model_name": "org/other"}, {"kv_rank": 0x02000200}, {"object_group_id": 1}, {"cache_salt": "u1"}):
        assert l2.lookup(keys_of(1, **change)) == [False], change
        assert l2.load(keys_of(1, **change), objects(1)) == [False], change
    assert l2.lookup(key, dtype=torch.float16) == [False], "another type of the same size"
    assert l2.load(key, objects(1, dtype=torch.float16)) == [False]
    assert l2.lookup(key, shape=torch.Size([2, 2, 32, 8])) == [False], "another shape of the same size"
    assert l2.lookup(key) == [True]
    l2.adapter.submit_unlock(key)


def test_two_identities_never_mix_and_the_log_says_so(
    pool: Cluster, start: Callable[..., L2], caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    a = start(pool.master_address, identity="fp8 of bfloat16")
    with caplog.at_level(logging.WARNING, logger="kvpool.lmcache"):
        b = start(pool.master_address, identity="fp8 of float16")
    shape = torch.Size([100])
    key, objs = keys_of(1), objects(1, seed=5, shape=shape, dtype=torch.uint8)
    assert a.store(key, objs).is_successful()
    assert (a.lookup(key), b.lookup(key)) == ([True], [False])
    assert b.load(key, objects(1, shape=shape, dtype=torch.uint8)) == [False]
    assert [r for r in caplog.records if "event=pool_separated" in r.getMessage() and "fp8 of bfloat16" in r.getMessage()]
    targets = objects(1, shape=shape, dtype=torch.uint8)
    assert a.load(key, targets) == [True]
    assert content(targets) == content(objs)


def test_a_value_of_the_wrong_size_is_no_object(pool: Cluster, start: Callable[..., L2]) -> None:
    l2 = start(pool.master_address, max_object_bytes=4096)
    key = keys_of(1)
    shape = torch.Size([100])
    assert l2.store(key, objects(1, seed=6, shape=shape, dtype=torch.uint8)).is_successful()
    assert l2.load(key, objects(1, shape=torch.Size([50]), dtype=torch.uint8)) == [False]
    assert l2.load(key, objects(1, shape=torch.Size([200]), dtype=torch.uint8)) == [False]
    assert not l2.store(keys_of(1, first=5), objects(1, seed=7, shape=torch.Size([5000]), dtype=torch.uint8)).is_successful()
    assert l2.store([], []).is_successful()
    assert l2.lookup([]) == []
    assert l2.load([], []) == []


def test_what_a_lookup_found_stays_until_it_is_unlocked(make_cluster: MakeCluster, start: Callable[..., L2]) -> None:
    """In a pool that is full: locked objects are not evicted for others, unlocked ones are."""
    l2 = start(make_cluster(dram="8MiB", env={"KVPOOL_WORKER__POLICY": "lru"}).master_address)  # (what is put last stays)
    shape = torch.Size([1 << 19])
    locked, objs = keys_of(3), objects(3, seed=8, shape=shape, dtype=torch.uint8)
    assert l2.store(locked, objs).is_successful()
    assert l2.lookup(locked) == [True] * 3
    assert l2.adapter.report_status()["locked_key_count"] == 3

    def press(first: int) -> None:
        for i in range(24):
            l2.store(keys_of(1, first=first + i), objects(1, seed=9, shape=shape, dtype=torch.uint8))

    press(100)
    targets = objects(3, shape=shape, dtype=torch.uint8)
    assert l2.load(locked, targets) == [True] * 3
    assert content(targets) == content(objs)
    l2.adapter.submit_unlock(locked)
    assert l2.adapter.report_status()["locked_key_count"] == 0
    press(200)
    assert l2.load(locked, targets) == [False] * 3
    l2.adapter.submit_unlock(locked)


def test_delete_is_final(pool: Cluster, start: Callable[..., L2]) -> None:
    l2 = start(pool.master_address)
    seen = Seen()
    l2.adapter.register_listener(seen)
    keys = keys_of(3)
    assert l2.store(keys, objects(3, seed=10)).is_successful()
    l2.adapter.delete(keys[1:])
    assert seen.deleted == keys[1:]
    assert l2.load(keys, objects(3)) == [True, False, False]
    wait_until(lambda: l2.lookup(keys) == [True, False, False], what="events of the store may come after the removal")
    l2.adapter.delete(keys_of(1, first=77))
    assert seen.deleted == keys[1:]
    l2.adapter.submit_unlock(keys[:1])


def test_a_killed_worker_costs_a_deadline_and_hits_return(make_cluster: MakeCluster, start: Callable[..., L2]) -> None:
    cluster = make_cluster()
    l2 = start(cluster.master_address, deadline_ms=300)
    keys, objs = keys_of(3), objects(3, seed=11)
    wait_until(lambda: l2.store(keys, objs).is_successful())
    assert l2.lookup(keys) == [True] * 3
    cluster.worker().kill()
    for _ in range(3):
        with within(0.3 + SLACK_S):
            assert l2.load(keys, objects(3)) == [False] * 3
        with within(0.3 + SLACK_S):
            assert not l2.store(keys_of(1, first=50), objs[:1]).is_successful()
        with within(0.6 + SLACK_S):
            l2.lookup(keys)
    l2.adapter.submit_unlock(keys)
    cluster.start_worker(0)
    wait_until(lambda: l2.store(keys, objs).is_successful(), timeout_s=20)
    targets = objects(3)
    wait_until(lambda: l2.load(keys, targets) == [True] * 3, timeout_s=10)
    assert content(targets) == content(objs)


def test_objects_are_served_while_the_master_is_dead_and_a_late_pool_is_used(
    make_cluster: MakeCluster, start: Callable[..., L2]) -> None:  # fmt: skip
    cluster = make_cluster()
    l2 = start(cluster.master_address, deadline_ms=500)
    keys, objs = keys_of(3), objects(3, seed=12)
    wait_until(lambda: l2.store(keys, objs).is_successful())
    assert cluster.master is not None
    cluster.master.kill()
    targets = objects(3)
    with within(1.5 + SLACK_S):
        assert l2.lookup(keys) == [True] * 3
    with within(0.5 + SLACK_S):
        assert l2.load(keys, targets) == [True] * 3
    assert content(targets) == content(objs)
    late = start(cluster.master_address, deadline_ms=500, start_wait_ms=100)
    with within(SLACK_S):
        assert (late.lookup(keys), late.load(keys, objects(3))) == ([False] * 3, [False] * 3)
        assert not late.store(keys, objs).is_successful()
        assert late.adapter.report_status()["is_healthy"] is False
    cluster.start_master()
    wait_until(lambda: late.lookup(keys) == [True] * 3, timeout_s=20)
    again = objects(3)
    assert late.load(keys, again) == [True] * 3
    assert content(again) == content(objs)
    assert late.adapter.report_status()["is_healthy"] is True


def test_tasks_beyond_the_bound_fail_at_once(
    make_cluster: MakeCluster, start: Callable[..., L2], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("kvpool.connectors.lmcache.l2.TASKS_MAX", 6)
    cluster = make_cluster()
    l2 = start(cluster.master_address, deadline_ms=2_000)
    keys, objs = keys_of(1), objects(1, seed=13)
    assert l2.store(keys, objs).is_successful()
    cluster.worker().pause()
    tasks = [l2.adapter.submit_load_task(keys, objects(1)) for _ in range(6)]
    with within(1.0):
        over = [l2.adapter.submit_load_task(keys, objects(1)) for _ in range(3)]
        assert [l2.adapter.query_load_result(task).popcount() for task in over] == [0] * 3
    assert l2.adapter.report_status()["refused_tasks"] == 3
    cluster.worker().resume()
    wait_until(lambda: l2.adapter.query_load_result(tasks[-1]) is not None, timeout_s=20)


def test_many_threads_at_once(pool: Cluster, start: Callable[..., L2]) -> None:
    l2 = start(pool.master_address).adapter
    objs = {i: objects(2, seed=200 + i) for i in range(6)}
    tasks: dict[int, tuple[int, list[Any]]] = {}
    stored: dict[int, Any] = {}

    def submit(i: int) -> None:
        l2.submit_store_task(keys_of(2, first=10 * i), objs[i])

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(stored.update(l2.pop_completed_store_tasks()) or stored) == 6, timeout_s=20)
    assert all(result.is_successful() for result in stored.values())
    for round_ in range(24):
        targets = objects(2)
        tasks[l2.submit_load_task(keys_of(2, first=10 * (round_ % 6)), targets)] = (round_ % 6, targets)
    for task, (i, targets) in tasks.items():
        found: list[Any] = []
        wait_until(lambda task=task, found=found: found.append(l2.query_load_result(task)) or found[-1] is not None, timeout_s=20)
        assert found[-1].popcount() == 2
        assert content(targets) == content(objs[i])


@pytest.mark.parametrize(("params", "named"), [({"masterr": "x"}, "masterr"), ({"deadline_ms": "x"}, "deadline_ms"),
                                               ({"max_object_bytes": 0}, "max_object_bytes")])  # fmt: skip
def test_a_wrong_setting_stops_the_start_and_is_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        L2("127.0.0.1:1", **params)
