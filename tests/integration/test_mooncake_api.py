"""Mooncake's Python API on a real pool: the rules that its users rely on, across processes and under faults.

What each call returns beside real Mooncake is in tests/connectors/mooncake; here is what only kvpool promises.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.connectors import mooncake
from kvpool.connectors.mooncake import MooncakeDistributedStore, ReplicateConfig, SoftPinAction
from kvpool.connectors.mooncake import pool as pool_module
from tests.support.cluster import Cluster
from tests.support.mooncake import shim_env

ENCODER_CACHE_CODES = {-200, -600, -702, -703, -704, -705, -707, -900, -901}
KIB, MIB = 1 << 10, 1 << 20


def open_store(cluster: Cluster, **more: Any) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1:1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", cluster.master_address, **more) == 0
    return store


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(dram="256MiB")


@pytest.fixture
def store(cluster: Cluster) -> Iterator[MooncakeDistributedStore]:
    opened = open_store(cluster)
    yield opened
    assert opened.close() == 0


def random_bytes(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


# --- values and memory ------------------------------------------------------------------------------------------------------


def test_scattered_values_of_any_size_come_back_exactly(store: MooncakeDistributedStore,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Parts in any order and size, gaps between them, more than is staged at once."""
    monkeypatch.setattr(pool_module, "STAGING_BYTES_MAX", 2 * MIB)
    source, target = random_bytes(16 * MIB), np.zeros(16 * MIB, dtype=np.uint8)
    chance = np.random.default_rng(1)
    keys, parts, at = [], [], 0
    while at + 4 * MIB < source.nbytes:
        lengths = [int(n) for n in chance.integers(1, MIB, chance.integers(1, 5))]
        starts = [at + sum(lengths[:i]) + 7 * i for i in range(len(lengths))]
        chance.shuffle(order := list(range(len(lengths))))
        parts.append([(starts[i], lengths[i]) for i in order])
        keys.append(f"scattered-{len(keys)}")
        at = starts[-1] + lengths[-1]

    def pointers(base: int) -> list[list[int]]:
        return [[base + start for start, _ in one] for one in parts]

    sizes = [[n for _, n in one] for one in parts]
    assert store.batch_put_from_multi_buffers(keys, pointers(source.ctypes.data), sizes, ReplicateConfig()) == [0] * len(keys)
    got = store.batch_get_into_multi_buffers(keys, pointers(target.ctypes.data), sizes)
    assert got == [sum(one) for one in sizes]
    expected = np.zeros_like(source)
    for one in parts:
        for start, n in one:
            expected[start : start + n] = source[start : start + n]
    assert np.array_equal(target, expected), "every part, and nothing beside the parts"
    assert store.get(keys[0]) == b"".join(source[start : start + n].tobytes() for start, n in parts[0])


def test_a_value_larger_than_what_is_staged_and_one_that_is_too_large(store: MooncakeDistributedStore) -> None:
    value = random_bytes(70 * MIB)
    assert store.put("large", value) == 0
    assert store.get_size("large") == value.nbytes
    handle = store.get_buffer("large")
    assert handle is not None and np.array_equal(np.frombuffer(handle, dtype=np.uint8), value)
    assert store.put("more than the pool has", np.zeros(300 * MIB, dtype=np.uint8)) == -200
    over = pool_module.VALUE_BYTES_MAX + 1
    assert store.put_from("over the limit", value.ctypes.data, over) == -600
    assert store.batch_is_exist(["more than the pool has", "over the limit"]) == [0, 0]


def test_a_get_is_whole_or_an_error_and_its_neighbours_are_not_hurt(store: MooncakeDistributedStore) -> None:
    value, out = random_bytes(64 * KIB), np.zeros(64 * KIB, dtype=np.uint8)
    for key in ("a", "b", "c"):
        assert store.put(key, value) == 0
    store.remove("b")
    half = 32 * KIB
    pointers = [[out.ctypes.data, out.ctypes.data + half]] * 3
    codes = store.batch_get_into_multi_buffers(["a", "b", "c"], pointers, [[half, half - 1], [half, half], [half, half]])
    assert codes == [-600, -704, 64 * KIB]
    assert np.array_equal(out, value)
    assert all(code in ENCODER_CACHE_CODES for code in codes if code < 0)


def test_a_full_pool_says_so_and_what_it_has_stays_exact(make_cluster: Callable[..., Cluster]) -> None:
    store = open_store(make_cluster(dram="64MiB"))
    values = {f"fill-{i}": random_bytes(2 * MIB, seed=i) for i in range(48)}
    codes = [store.put(key, value) for key, value in values.items()]
    assert set(codes) <= {0, -200}
    there = [key for key in values if store.is_exist(key)]
    assert there
    for key in there:
        assert store.get(key) in (values[key].tobytes(), b"")
    assert store.close() == 0


def test_nothing_of_a_put_session_is_visible_before_its_end_and_a_part_of_it_never(store: MooncakeDistributedStore) -> None:
    value = random_bytes(8 * KIB)
    assert store.batch_put_session_start(["whole", "part"], [8 * KIB, 8 * KIB]) == [0, 0]
    first = [[value.ctypes.data]] * 2, [[4 * KIB]] * 2, [[0]] * 2
    assert store.batch_put_from_multi_buffer_ranges(["whole", "part"], *first) == [4 * KIB] * 2
    assert store.batch_is_exist(["whole", "part"]) == [0, 0]
    rest = [[value.ctypes.data + 4 * KIB]], [[4 * KIB]], [[4 * KIB]]
    assert store.batch_put_from_multi_buffer_ranges(["whole"], *rest) == [4 * KIB]
    codes = store.batch_put_session_end(["whole", "part"])
    assert codes[0] == 0 and codes[1] < 0
    assert store.batch_is_exist(["whole", "part"]) == [1, 0]
    assert store.get("whole") == value.tobytes()


# --- keys -------------------------------------------------------------------------------------------------------------------

CHILD = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("h", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", sys.argv[1], tenant_id=sys.argv[2]) == 0
exec(sys.argv[3])
store.close()
"""


def in_child(cluster: Cluster, code: str, *, tenant: str = "default") -> str:
    command = [sys.executable, "-c", CHILD, cluster.master_address, tenant, code]
    done = subprocess.run(command, env=shim_env(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_and_values_are_seen_by_every_process(cluster: Cluster, store: MooncakeDistributedStore) -> None:
    assert store.put("mine/1", b"one") == 0
    said = in_child(cluster, "print(store.get('mine/1'), store.put_batch(['theirs/1', 'theirs/2'], [b'x', b'y']),"
                             " store.get_all_keys())")  # fmt: skip
    assert said.strip() == "b'one' 0 ['mine/1', 'theirs/1', 'theirs/2']"
    assert store.get_all_keys() == ["mine/1", "theirs/1", "theirs/2"]
    assert store.remove_by_regex("^theirs/[1]") == 1
    assert store.get_all_keys() == ["mine/1", "theirs/2"]
    assert in_child(cluster, "print(store.batch_is_exist(['theirs/1', 'theirs/2']), store.remove_all())").strip() == "[0, 1] 2"
    assert store.get_all_keys() == []
    assert store.put("mine/1", b"again") == 0
    assert store.get_all_keys() == ["mine/1"], "its record went with the rest, and was made again"


def test_many_names(store: MooncakeDistributedStore) -> None:
    """More than one page of the master's list, and more than one record."""
    keys = [f"{'n' * 200}-{i}" for i in range(12_000)]
    value = random_bytes(16)
    pointers = [value.ctypes.data] * len(keys)
    assert store.batch_put_from(keys, pointers, [16] * len(keys)) == [0] * len(keys)
    assert sum(store.batch_is_exist(keys)) == len(keys)
    assert store.get_all_keys() == sorted(keys)
    assert store.remove_by_regex("-1....$") == 2000
    assert store.remove_all() == 10_000


def test_tenants_do_not_see_each_other(cluster: Cluster, store: MooncakeDistributedStore) -> None:
    assert store.put("key", b"default's") == 0
    code = "print(store.is_exist('key'), store.put('key', b'other'), store.remove_all())"
    said = in_child(cluster, code, tenant="other/tenant")
    assert said.split() == ["0", "0", "1"]
    assert store.get("key") == b"default's"


def test_an_upsert_is_seen_by_another_process(cluster: Cluster, store: MooncakeDistributedStore) -> None:
    assert store.put("key", b"first") == 0
    assert in_child(cluster, "print(store.get('key'), store.upsert('key', b'second one'))").strip() == "b'first' 0"
    assert store.get("key") == b"second one"


# --- faults -----------------------------------------------------------------------------------------------------------------


def test_setup_without_a_master_ends_with_an_error(unused_port: int) -> None:
    store = MooncakeDistributedStore()
    began = time.monotonic()
    assert store.setup("h", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", f"127.0.0.1:{unused_port}") == -900
    assert time.monotonic() - began < 15
    assert store.put("a", b"x") == -600


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_set_up_twice_and_again_after_close(cluster: Cluster) -> None:
    store = open_store(cluster)
    assert store.put("a", b"x") == 0
    assert store.setup("h", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", cluster.master_address) == -600
    assert store.close() == 0 and store.close() == 0
    assert store.setup({"local_hostname": "h", "metadata_server": "", "master_server_address": cluster.master_address}) == 0
    assert store.get("a") == b"x"
    assert store.close() == 0


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_a_key_whose_get_failed_does_not_exist_until_it_is_put_again(cluster: Cluster, store: MooncakeDistributedStore,
                                                                     fault: str) -> None:  # fmt: skip
    """vLLM asks again at once whether it exists, and would try for ever."""
    out = np.zeros(KIB, dtype=np.uint8)
    keys = ["a", "b"]
    assert store.put_batch(keys, [random_bytes(KIB), random_bytes(KIB, 1)]) == 0
    assert store.batch_is_exist(keys) == [1, 1]
    getattr(cluster.worker(0), fault)()
    codes = store.batch_get_into(keys, [out.ctypes.data] * 2, [KIB] * 2)
    assert all(code in ENCODER_CACHE_CODES for code in codes), codes
    assert store.batch_is_exist(keys) == [0, 0]
    if fault == "kill":
        cluster.start_worker(0)
    else:
        cluster.worker(0).resume()
    end = time.monotonic() + 60
    while (code := store.put("a", random_bytes(KIB))) != 0:  # until the client tries the worker again
        assert code in (-200, -900) and time.monotonic() < end
    assert store.is_exist("a") == 1
    assert store.get("a") == random_bytes(KIB).tobytes()


def test_a_key_that_fails_for_this_store_only_comes_back_by_time(cluster: Cluster, store: MooncakeDistributedStore,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(pool_module, "GONE_S", 0.3)
    out = np.zeros(16, dtype=np.uint8)
    assert store.put("a", random_bytes(17)) == 0
    assert store.get_into("a", out.ctypes.data, 16) == -600
    assert store.is_exist("a") == 0
    end = time.monotonic() + 30
    while not store.is_exist("a"):
        assert time.monotonic() < end
    assert store.get_into("a", out.ctypes.data, 16) == -600 and store.is_exist("a") == 0
    assert len(store.get("a")) == 17 and store.is_exist("a") == 1, "a get that succeeds brings it back"


def test_while_the_master_is_away_what_is_known_is_read(cluster: Cluster, store: MooncakeDistributedStore) -> None:
    assert store.put("a", b"value") == 0
    assert cluster.master is not None
    cluster.master.kill()
    assert store.get("a") == b"value" and store.is_exist("a") == 1
    assert store.is_exist("never") == 0
    assert store.health_check() == -900
    assert store.remove("a") == -900
    assert store.remove_all() == -900 and store.remove_by_regex(".") == -900
    assert store.put("b", b"put meanwhile") == 0 and store.get("b") == b"put meanwhile"
    cluster.start_master()
    end = time.monotonic() + 30
    while store.health_check() != 0:
        assert time.monotonic() < end


def test_an_upsert_whose_removal_is_not_confirmed_puts_nothing(make_cluster: Callable[..., Cluster]) -> None:
    """Else the old value could come back with its worker."""
    cluster = make_cluster(n_workers=2, dram="64MiB")
    store = open_store(cluster)
    assert store.put("a", b"old") == 0
    holder = store.get_replica_desc("a")[0].get_memory_descriptor().buffer_descriptor.transport_endpoint
    worker = next(one for one in (cluster.worker(0), cluster.worker(1)) if one.address == holder)
    worker.pause()
    assert store.upsert("a", b"new") == -900
    assert store.get("a") in (b"", b"old")
    worker.resume()
    end = time.monotonic() + 30
    while store.upsert("a", b"new") != 0:
        assert time.monotonic() < end
    assert store.get("a") == b"new"
    assert store.close() == 0


def test_close_ends_calls_under_way_and_none_crashes(cluster: Cluster) -> None:
    store = open_store(cluster)
    source, wrong = random_bytes(4 * MIB), []
    begun = threading.Barrier(5)

    def work(number: int) -> None:
        target = np.zeros(4 * MIB, dtype=np.uint8)
        begun.wait()
        for i in range(100_000):
            key = f"{number}-{i % 4}"
            put = store.put_from(key, source.ctypes.data, source.nbytes)
            got = store.get_into(key, target.ctypes.data, target.nbytes)
            if got not in ENCODER_CACHE_CODES and got != target.nbytes:
                wrong.append((put, got))
            if got == target.nbytes and not np.array_equal(source, target):
                wrong.append("bytes")
            if put == -600:
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    assert store.close() == 0
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not wrong
    assert store.batch_is_exist(["a"]) == [0] and store.get("a") == b"" and store.put("a", b"x") == -600


# --- pins -------------------------------------------------------------------------------------------------------------------


def test_pins_of_objects_are_the_pools_and_outlive_pressure(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(dram="16MiB")
    store = MooncakeDistributedStore()
    assert store.setup("h", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", cluster.master_address) == 0
    value = bytes(MIB // 2)
    hard, soft, plain, off = (ReplicateConfig() for _ in range(4))
    hard.with_hard_pin, soft.soft_pin_action, off.soft_pin_action = True, SoftPinAction.ENABLE, SoftPinAction.DISABLE
    soft.soft_pin_ttl_ms = 3_600_000
    for key, config in (("hard", hard), ("soft", soft), ("was soft", soft), ("plain", plain)):
        assert store.put(key, value, config) == 0
    assert store.put("was soft", value, off) == 0  # (there already: its pin ends)
    for number in range(64):
        assert store.put(f"other {number}", value) == 0
    assert store.batch_is_exist(["hard", "soft", "was soft", "plain"]) == [1, 1, 0, 0]
    assert store.close() == 0


# --- what has no counterpart ------------------------------------------------------------------------------------------------


def test_what_has_no_counterpart_is_said_once(cluster: Cluster, caplog: pytest.LogCaptureFixture,
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("kvpool.connectors.mooncake.config._said", set())
    store = MooncakeDistributedStore()
    config = ReplicateConfig()
    config.with_hard_pin, config.preferred_segment, config.group_ids = True, "10.0.0.1:1", ["g"]
    with caplog.at_level(logging.WARNING, logger="kvpool.mooncake"):
        assert store.setup("h", "P2PHANDSHAKE", 1 << 30, 1 << 20, "rdma", "mlx5_0", cluster.master_address, None,
                           enable_ssd_offload=True, ssd_offload_path="somewhere") == 0  # fmt: skip
        for key in ("a", "b"):
            assert store.put(key, b"x", config) == 0
    said = [record.getMessage() for record in caplog.records]
    for word in ("global_segment_size", "rdma", "enable_ssd_offload", "preferred_segment", "group_ids"):
        assert sum(word in line for line in said) == 1, said
    assert store.close() == 0


def test_the_module_has_the_names_that_programs_import() -> None:
    for name in ("MooncakeDistributedStore", "ReplicateConfig", "SoftPinAction", "ObjectDataType", "MooncakeHostMemAllocator",
                 "bind_to_numa_node"):  # fmt: skip
        assert hasattr(mooncake, name)
    assert hasattr(ReplicateConfig, "group_ids"), "vLLM looks at the class"
