"""What SGLang 0.5.23, LMCache 0.5.6 and vLLM's encoder cache do with Mooncake's store, call for call, and how they judge it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.connectors.mooncake import MooncakeDistributedStore, MooncakeHostMemAllocator, ObjectDataType, ReplicateConfig
from tests.support.cluster import Cluster

KIB, MIB = 1 << 10, 1 << 20
PAGES, PAGE = 8, 4 * KIB
ENCODER_CACHE_CODES = {-200, -600, -702, -703, -704, -705, -707, -900, -901}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pool = Cluster(tmp_path_factory.mktemp("pool"), dram="64MiB").start()
    yield pool
    pool.stop()


@pytest.fixture
def store() -> Iterator[MooncakeDistributedStore]:
    made = MooncakeDistributedStore()
    yield made
    assert made.close() == 0


def pages_of(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (2, PAGES, PAGE), dtype=np.uint8)


# --- SGLang's HiCache backend ------------------------------------------------------------------------------------------------


def sglang_setup(store: MooncakeDistributedStore, cluster: Cluster, **more: Any) -> None:
    """Eight positional arguments, the last an engine; then the warm-up."""
    assert not store.setup("localhost", "P2PHANDSHAKE", 4 * MIB, 16 * MIB, "tcp", "", cluster.master_address, None, **more)
    key, value = "sglang_mooncake_store_warmup_key" + str(more), bytes(4 * KIB)
    assert store.put(key, value) == 0
    assert store.is_exist(key) == 1
    assert store.get(key) == value


def test_sglang_pages_by_batch(store: MooncakeDistributedStore, cluster: Cluster) -> None:
    """batch_set puts what batch_is_exist does not have, 0 is success; batch_get wants more than 0; clear without force."""
    sglang_setup(store, cluster, tenant_id="sglang")
    allocator = MooncakeHostMemAllocator()
    pool_ptr = allocator.alloc(2 * PAGES * PAGE)
    assert pool_ptr != 0
    assert store.register_buffer(pool_ptr, 2 * PAGES * PAGE) == 0
    host = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (2 * PAGES * PAGE)).from_address(pool_ptr))
    host = host.reshape(2, PAGES, PAGE)
    original = pages_of(1)
    host[:] = original
    keys = [f"model_{i:064x}_0_{part}" for i in range(PAGES) for part in "kv"]
    places = [host[part, i].ctypes.data for i in range(PAGES) for part in (0, 1)]
    sizes = [PAGE] * len(keys)

    exist = store.batch_is_exist(keys)
    assert exist == [0] * len(keys)
    assert store.batch_put_from(keys, places, sizes) == [0] * len(keys)
    assert [one == 1 for one in store.batch_is_exist(keys)] == [True] * len(keys)
    assert store.batch_put_from(keys, places, sizes) == [0] * len(keys), "again: 0, as for new ones"

    host[:] = 0
    assert all(n > 0 for n in store.batch_get_into(keys, places, sizes))
    assert np.array_equal(host, original)
    missing = store.batch_get_into([keys[0], "model_none_0_k"], places[:2], sizes[:2])
    assert missing[0] == PAGE and missing[1] < 0
    store.remove_all()
    assert store.batch_is_exist(keys) == [0] * len(keys)
    assert allocator.free(pool_ptr) == 0


def test_sglang_multi_buffers_with_groups(store: MooncakeDistributedStore, cluster: Cluster) -> None:
    """MLA and hybrid models: one key for a page, several buffers; a config with group_ids, where the class has it."""
    sglang_setup(store, cluster, enable_ssd_offload=True, ssd_offload_path="somewhere", tenant_id="sglang-multi")
    config = ReplicateConfig()
    assert hasattr(config, "group_ids") and not hasattr(config, "session_ids")
    keys = [f"page-{i}" for i in range(PAGES)]
    config.group_ids = ["group"] * PAGES
    host = pages_of(2)
    original = host.copy()
    places = [[host[part, i].ctypes.data for part in (0, 1)] for i in range(PAGES)]
    assert store.batch_put_from_multi_buffers(keys, places, [[PAGE, PAGE]] * PAGES, config) == [0] * PAGES
    host[:] = 0
    assert store.batch_get_into_multi_buffers(keys, places, [[PAGE, PAGE]] * PAGES) == [2 * PAGE] * PAGES
    assert np.array_equal(host, original)


def test_sglang_direct_linker_reads_layer_by_layer(store: MooncakeDistributedStore, cluster: Cluster) -> None:
    sglang_setup(store, cluster, tenant_id="sglang-direct")
    layers, rows = 4, pages_of(3).reshape(-1, 4, PAGE // 2)
    keys = [f"direct-{i}" for i in range(len(rows))]
    flat = [row.ctypes.data for row in rows]
    assert store.batch_put_from(keys, flat, [rows[0].nbytes] * len(rows)) == [0] * len(rows)
    assert store.batch_get_session_start(keys) == [0] * len(keys)
    out = np.zeros_like(rows)
    for layer in range(layers):
        places = [[out[i, layer].ctypes.data] for i in range(len(rows))]
        sizes = [[PAGE // 2]] * len(rows)
        offsets = [[layer * PAGE // 2]] * len(rows)
        assert store.batch_get_into_multi_buffer_ranges(keys, places, sizes, offsets) == [PAGE // 2] * len(rows)
    assert store.batch_get_session_end(keys) == 0
    assert np.array_equal(out, rows)


def test_values_of_a_get_session_stay_while_the_pool_is_overrun(make_cluster: Callable[..., Cluster],
                                                                store: MooncakeDistributedStore) -> None:  # fmt: skip
    sglang_setup(store, make_cluster(dram="16MiB"))
    value, out = pages_of(4).reshape(-1), np.zeros(MIB, dtype=np.uint8)
    assert store.put("held", value) == 0
    assert store.batch_get_session_start(["held"]) == [0]
    for i in range(40):
        store.put(f"other-{i}", np.full(MIB, i, dtype=np.uint8))
    n = value.nbytes
    assert store.batch_get_into_multi_buffer_ranges(["held"], [[out.ctypes.data]], [[n]], [[0]]) == [n]
    assert np.array_equal(out[:n], value)
    assert store.batch_get_session_end(["held"]) == 0


# --- LMCache's mooncakestore connector ---------------------------------------------------------------------------------------


def lmcache_setup(store: MooncakeDistributedStore, cluster: Cluster) -> ReplicateConfig:
    """A dict whose values are all text; its result is not looked at, so that it must work."""
    store.setup({"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", "global_segment_size": "3355443200",
                 "local_buffer_size": "1073741824", "protocol": "tcp", "device_name": "", "mooncake_extra": "x",
                 "master_server_address": cluster.master_address, "tenant_id": "lmcache"})  # fmt: skip
    config = ReplicateConfig()
    config.replica_num = 1
    config.preferred_segment = store.get_hostname()
    return config


def test_lmcache_chunks_with_their_metadata(store: MooncakeDistributedStore, cluster: Cluster) -> None:
    """The default: put_parts without a config, its result ignored; batch_get_buffer, buffers or None; exist is truth."""
    lmcache_setup(store, cluster)
    metadata, chunk = bytes(range(28)), pages_of(5)
    assert not store.is_exist("m@1@0@abc@bfloat16")
    store.put_parts("m@1@0@abc@bfloat16", metadata, chunk)
    assert store.is_exist("m@1@0@abc@bfloat16")
    assert [one == 1 for one in store.batch_is_exist(["m@1@0@abc@bfloat16", "m@1@0@def@bfloat16"])] == [True, False]
    there, missing = store.batch_get_buffer(["m@1@0@abc@bfloat16", "m@1@0@def@bfloat16"])
    assert missing is None and there is not None
    view = memoryview(there)
    assert bytes(view[: len(metadata)]) == metadata
    assert bytes(view[len(metadata) :]) == chunk.tobytes()


def test_lmcache_chunks_in_place(store: MooncakeDistributedStore, cluster: Cluster) -> None:
    """save_chunk_meta=False: registered memory, a config; a get's bytes may be fewer than the buffer has."""
    config = lmcache_setup(store, cluster)
    pinned = pages_of(6).reshape(-1)
    original = pinned.copy()
    assert store.register_buffer(pinned.ctypes.data, pinned.nbytes) == 0
    half = pinned.nbytes // 2
    assert store.put_from("plain", pinned.ctypes.data, half, config) == 0
    assert store.batch_put_from(["b0", "b1"], [pinned.ctypes.data, pinned.ctypes.data + half], [half, 100], config) == [0, 0]
    pinned[:] = 0
    assert store.batch_get_into(["b0", "b1"], [pinned.ctypes.data, pinned.ctypes.data + half], [half, half]) == [half, 100]
    assert np.array_equal(pinned[: half + 100], original[: half + 100])
    assert store.unregister_buffer(pinned.ctypes.data) == 0


def test_an_lmcache_that_lost_its_pool_sees_no_hit(make_cluster: Callable[..., Cluster], store: MooncakeDistributedStore) -> None:
    """A negative answer of is_exist would count as a hit."""
    cluster = make_cluster()
    lmcache_setup(store, cluster)
    store.put_parts("key", b"meta", b"data")
    cluster.worker(0).kill()
    assert cluster.master is not None
    cluster.master.kill()
    assert store.batch_get_buffer(["key"]) == [None]
    assert store.is_exist("key") == 0 and store.batch_is_exist(["key", "other"]) == [0, 0]


# --- vLLM's encoder cache ----------------------------------------------------------------------------------------------------


def test_the_encoder_cache_knows_every_code(make_cluster: Callable[..., Cluster], store: MooncakeDistributedStore) -> None:
    """Another code than these means to it that the I/O goes on: it would not use the store any more."""
    cluster = make_cluster()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", cluster.master_address) == 0
    config = ReplicateConfig()
    config.data_type = ObjectDataType.TENSOR
    tensor, out = pages_of(7).reshape(-1), np.zeros(2 * PAGES * PAGE, dtype=np.uint8)
    keys, at = ["ec-1", "ec-2", "ec-none"], [tensor.ctypes.data] * 3
    capacity = [tensor.nbytes, 10, 10]

    def check(codes: list[int]) -> None:
        for code, most in zip(codes, capacity, strict=True):
            assert 0 <= code <= most or code in ENCODER_CACHE_CODES, codes

    assert set(store.batch_put_from(keys[:2], at[:2], [tensor.nbytes] * 2, config)) == {0}
    got = store.batch_get_into(keys, [out.ctypes.data] * 3, capacity)
    check(got)
    assert got[0] == tensor.nbytes and got[1] < 0 and got[2] < 0
    cluster.worker(0).kill()
    results: list[list[int]] = []

    def get() -> None:
        results.append(store.batch_get_into(keys, [out.ctypes.data] * 3, capacity))

    threads = [threading.Thread(target=get) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for codes in results:
        check(codes)
    put = store.batch_put_from(["ec-3"], at[:1], [10], config)
    assert put[0] in ENCODER_CACHE_CODES
    assert store.unregister_buffer(tensor.ctypes.data) == -600
