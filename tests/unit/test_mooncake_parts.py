"""Parts of the Mooncake API that need no pool: memory by its address, records of names, sizes as text, its value types."""

from __future__ import annotations

import ctypes
from collections import OrderedDict

import numpy as np
import pytest

from kvpool.connectors.mooncake import MooncakeDistributedStore, MooncakeHostMemAllocator, ReplicateConfig, SoftPinAction
from kvpool.connectors.mooncake import pool as pool_module
from kvpool.connectors.mooncake.memory import STAGING_BYTES_MAX, BufferHandle, Staging, gather, joined, scatter, view_of
from kvpool.connectors.mooncake.names import RECORD_BYTES_MAX, _names_in, _records, digest_of
from kvpool.connectors.mooncake.pool import NAMESPACE, Gone, check_pieces, namespace_name
from kvpool.connectors.mooncake.store import _n_bytes
from kvpool.core.namespaces import check_name

FAR = 1e12


def test_pieces_that_touch_are_one() -> None:
    assert joined([100], [10]) == 100
    assert joined([100, 110, 115], [10, 5, 1]) == 100
    assert joined([100, 111], [10, 5]) == 0
    assert joined([110, 100], [5, 10]) == 0, "the order counts"
    assert joined([7, 100, 3, 110], [0, 10, 0, 5]) == 100, "an empty part is nowhere"


def test_gather_and_scatter_are_inverse() -> None:
    source = np.arange(256, dtype=np.uint8)
    base = source.ctypes.data
    flat = bytearray(9)
    gather(memoryview(flat), [([base + 200, base + 5], [3, 2]), ([base], [4])], deadline=FAR)
    assert list(flat) == [200, 201, 202, 5, 6, 0, 1, 2, 3]
    target = np.zeros(256, dtype=np.uint8)
    at = target.ctypes.data
    scatter(memoryview(flat), [([at + 200, at + 5], [3, 2]), ([at], [4])], deadline=FAR)
    assert target[200:203].tolist() == [200, 201, 202] and target[5:7].tolist() == [5, 6] and target[:4].tolist() == [0, 1, 2, 3]
    assert int(target.sum()) == sum(flat)


def test_a_view_is_the_memory_itself() -> None:
    memory = np.zeros(8, dtype=np.uint8)
    view_of(memory.ctypes.data + 2, 3, writable=True)[:] = b"abc"
    assert memory.tobytes() == b"\0\0abc\0\0\0"
    assert view_of(memory.ctypes.data, 8, writable=False).readonly


def test_staging_is_of_one_caller_and_bounded() -> None:
    staging = Staging()
    first, second = staging.take(1000), staging.take(1000)
    assert first is not second
    staging.give(first)
    assert staging.take(500) is first
    staging.give(staging.take(STAGING_BYTES_MAX + 1))
    assert staging.take(STAGING_BYTES_MAX + 1) is not first
    assert sum(one.nbytes for one in staging._free) <= STAGING_BYTES_MAX


def test_pieces_are_checked() -> None:
    assert check_pieces([1], [1]) and check_pieces([1, 2], [0, 1])
    for pointers, sizes in (([], []), ([1], [1, 2]), ([0], [1]), ([1], [-1])):
        assert not check_pieces(pointers, sizes)
    with pytest.raises(TypeError):
        check_pieces(["1"], [1])  # type: ignore[list-item]


def test_records_name_every_key_once_and_are_bounded() -> None:
    names = ["", "a", "\u4e2d" * 100, "x" * 60_000, *(f"{i}" + "y" * 50_000 for i in range(40)), "odd\udc80"]
    named = [(name, digest_of(name)) for name in names]
    found: list[str] = []
    digests: list[bytes] = []
    n = 0
    for record, part in _records(named):
        assert len(record) <= RECORD_BYTES_MAX
        found += _names_in(memoryview(record))
        digests += part
        n += 1
    assert found == names and digests == [digest for _, digest in named]
    assert n == 3


def test_keys_that_failed_are_gone_for_a_while_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, now = Gone(), 1000.0
    monkeypatch.setattr(pool_module.time, "monotonic", lambda: now)
    monkeypatch.setattr(pool_module, "GONE_MAX", 100)
    gone.add([b"a", b"b"])
    gone.drop([b"b"])
    assert b"a" in gone and b"b" not in gone
    now += pool_module.GONE_S + 0.1
    assert b"a" not in gone
    gone.add([bytes([i]) for i in range(250)])
    assert len(gone._until) <= 100 and bytes([249]) in gone
    gone.add([b"a"])
    assert len(gone._until) <= 100 and b"a" in gone


def test_each_tenant_has_a_namespace_of_its_own() -> None:
    tenants = ["", "default", "a", "a/b", "a b", "\u4e2d", "x" * 500, "@", "#", "mooncake"]
    names = [namespace_name(tenant) for tenant in tenants]
    assert names[0] == names[1] == NAMESPACE
    assert len(set(names)) == len(names) - 1
    for name in names:
        check_name(name)


@pytest.mark.parametrize(("text", "size"), [("16MB", 16 << 20), ("1.5 gb", 3 << 29), ("123", 123), (64, 64), ("2KiB", 2048),
                                            ("", 0), ("none", 0)])  # fmt: skip
def test_sizes_as_text(text: str | int, size: int) -> None:
    assert _n_bytes(text) == size


def test_a_config_takes_its_own_fields_only() -> None:
    one, other = ReplicateConfig(), ReplicateConfig()
    one.preferred_segments.append("x")  # type: ignore[attr-defined]
    assert other.preferred_segments == []
    one.soft_pin_action = SoftPinAction.ENABLE
    for name, value in (("soft_pin_action", 1), ("with_hard_pin", 1), ("replica_num", True), ("group_ids", [1])):
        with pytest.raises(TypeError, match=name):
            setattr(one, name, value)
    with pytest.raises(AttributeError):
        one.replicas = 2  # type: ignore[attr-defined]


def test_host_memory_is_its_callers_until_it_is_freed() -> None:
    allocator = MooncakeHostMemAllocator()
    pointer = allocator.alloc(10_000)
    assert pointer and pointer % 4096 == 0
    ctypes.memset(pointer, 1, 10_000)
    assert allocator.free(pointer + 1) == -1
    assert allocator.free(pointer) == 0 and allocator.free(pointer) == -1
    assert allocator.alloc(0) == 0 and allocator.alloc(1 << 62) == 0


def test_a_buffer_handle_names_its_memory() -> None:
    handle = BufferHandle(b"value")
    assert handle.size() == 5 and ctypes.string_at(handle.ptr(), 5) == b"value"


def test_a_store_that_is_not_set_up_answers_every_call() -> None:
    store = MooncakeDistributedStore()
    one, memory = ["a"], BufferHandle(8)
    at = memory.ptr()
    answers: OrderedDict[str, object] = OrderedDict(
        put=store.put("a", b"x"), put_parts=store.put_parts("a", b"x"), put_batch=store.put_batch(one, [b"x"]),
        upsert=store.upsert("a", b"x"), get_size=store.get_size("a"), get_into=store.get_into("a", at, 8),
        remove=store.remove("a"), remove_all=store.remove_all(), remove_by_regex=store.remove_by_regex("."),
        register=store.register_buffer(at, 8), unregister=store.unregister_buffer(at),
    )  # fmt: skip
    assert set(answers.values()) == {-600}, answers
    assert store.batch_get_session_start(one)[0] < 0 and store.batch_get_session_end(one) < 0
    assert store.batch_put_session_start(one, [8])[0] < 0 and store.batch_put_session_end(one)[0] < 0
    assert store.batch_put_session_revoke(one)[0] < 0
    assert store.batch_get_into_multi_buffer_ranges(one, [[at]], [[8]], [[0]])[0] < 0
    assert store.batch_put_from_multi_buffer_ranges(one, [[at]], [[8]], [[0]])[0] < 0
    assert store.get_into_ranges([at], [one], [[[0]]], [[[0]]], [[[8]]]) == [[[-600]]]
    assert store.get("a") == b"" and store.get_batch(one) == [b""] and store.batch_get_buffer(one) == [None]
    assert store.batch_is_exist(one) == [0] and store.get_all_keys() == [] and store.batch_get_replica_desc(one) == {}
    assert store.batch_replica_clear(one) == [] and store.health_check() == 1 and store.close() == 0
