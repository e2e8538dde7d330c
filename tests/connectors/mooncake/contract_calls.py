"""The calls of the contract: run in a process of their own against whatever `mooncake.store` is there; prints one JSON object.

    python contract_calls.py HOST MASTER SECTION...
    python contract_calls.py HOST MASTER before|after CALL...     (on stores that are not open yet, or not any more)

A section is a function below. Each call's answer is recorded under "section.call"; an exception by its type's name. Needs only
the standard library, so that it runs in any environment.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import mooncake.store as mooncake  # the real one or the shim: as the environment has it

KIB = 1024
Record = Callable[..., Any]


class Memory:
    """Memory with an address."""

    def __init__(self, content: bytes | int) -> None:
        raw = bytes(content) if isinstance(content, int) else content
        self.buffer = ctypes.create_string_buffer(raw, len(raw))
        self.ptr, self.size = ctypes.addressof(self.buffer), len(raw)

    @property
    def content(self) -> bytes:
        return self.buffer.raw


def pattern(seed: int, size: int) -> bytes:
    return bytes((seed * 31 + i * 7 + i // 251) & 0xFF for i in range(size))


def text(value: bytes) -> str:
    return value.decode("latin-1") if len(value) <= 16 else f"{len(value)} bytes"


def single(store: Any, record: Record) -> None:
    record("put", lambda: store.put("a", b"hello"))
    record("get", lambda: text(store.get("a")))
    record("put of an existing key", lambda: store.put("a", b"other"))
    record("get after it", lambda: text(store.get("a")))
    record("is_exist", lambda: store.is_exist("a"))
    record("is_exist of a miss", lambda: store.is_exist("none"))
    record("get_size", lambda: store.get_size("a"))
    record("get_size of a miss", lambda: store.get_size("none"))
    record("get of a miss", lambda: text(store.get("none")))
    record("get_buffer of a miss", lambda: store.get_buffer("none"))
    record("get_buffer", lambda: text(bytes(memoryview(store.get_buffer("a")))))
    record("get_buffer size", lambda: store.get_buffer("a").size())
    record("get_buffer len", lambda: len(store.get_buffer("a")))
    record("get_buffer ptr", lambda: text(ctypes.string_at((held := store.get_buffer("a")).ptr(), held.size())))
    record("put of no bytes", lambda: store.put("empty", b""))
    record("is_exist of it", lambda: store.is_exist("empty"))
    record("put of an empty key", lambda: store.put("", b"x"))
    record("is_exist of an empty key", lambda: store.is_exist(""))
    record("get of an empty key", lambda: text(store.get("")))
    record("put with a long key", lambda: store.put("k" * 64 * KIB, b"x"))
    record("put with any characters", lambda: store.put("a/b c\u00e9\u4e2d\n@", b"odd"))
    record("get with any characters", lambda: text(store.get("a/b c\u00e9\u4e2d\n@")))
    record("put of a bytearray", lambda: store.put("ba", bytearray(b"ba")))
    record("put of a memoryview", lambda: store.put("mv", memoryview(b"memory")[1:]))
    record("get of it", lambda: text(store.get("mv")))
    record("put of text", lambda: store.put("t", "text"))
    record("put with a key that is no text", lambda: store.put(7, b"x"))
    record("put with a config", lambda: store.put("c", b"x", mooncake.ReplicateConfig()))
    record("put with config=None", lambda: store.put("c2", b"x", None))
    record("put_parts", lambda: store.put_parts("parts", b"one,", b"", b"two"))
    record("get of put_parts", lambda: text(store.get("parts")))
    record("put_parts of nothing", lambda: store.put_parts("parts0"))
    record("put_batch", lambda: store.put_batch(["b1", "b2"], [b"1", b"22"]))
    record("put_batch of other lengths", lambda: store.put_batch(["b3", "b4"], [b"1"]))
    record("put_batch of nothing", lambda: store.put_batch([], []))
    record("get_batch", lambda: [text(value) for value in store.get_batch(["b1", "none", "b2"])])
    record("get_batch of nothing", lambda: store.get_batch([]))
    record("batch_get_buffer", lambda: [one and text(bytes(memoryview(one))) for one in store.batch_get_buffer(["b2", "none"])])
    record("get_hostname is text", lambda: isinstance(store.get_hostname(), str))
    record("health_check", lambda: store.health_check())


def pointers(store: Any, record: Record) -> None:
    source, target = Memory(pattern(1, 64 * KIB)), Memory(64 * KIB)
    record("register_buffer", lambda: store.register_buffer(source.ptr, source.size))
    record("register_buffer again", lambda: store.register_buffer(source.ptr, source.size))
    record("register_buffer of no bytes", lambda: store.register_buffer(target.ptr, 0))
    record("put_from", lambda: store.put_from("p", source.ptr, source.size))
    record("get_into", lambda: store.get_into("p", target.ptr, target.size))
    record("its bytes", lambda: target.content == source.content)
    record("get_into a larger buffer", lambda: store.get_into("p", (large := Memory(65 * KIB)).ptr, large.size))
    record("get_into a smaller buffer", lambda: store.get_into("p", target.ptr, 64 * KIB - 1))
    record("is_exist after it", lambda: store.is_exist("p"))
    record("get_into of a miss", lambda: store.get_into("none", target.ptr, 10))
    record("put_from of no bytes", lambda: store.put_from("p0", source.ptr, 0))
    record("put_from unregistered memory", lambda: store.put_from("pu", target.ptr, 4 * KIB))
    record("get_into unregistered memory", lambda: store.get_into("pu", target.ptr, 4 * KIB))
    record("batch_put_from", lambda: store.batch_put_from(["q1", "q2"], [source.ptr, source.ptr + KIB], [KIB, 2 * KIB]))
    record("batch_put_from again", lambda: store.batch_put_from(["q1", "q3"], [source.ptr + 9, source.ptr + KIB], [KIB, KIB]))
    record("batch_get_into", lambda: store.batch_get_into(
        ["q1", "none", "q2"], [target.ptr, target.ptr + 8 * KIB, target.ptr + 9 * KIB], [KIB, KIB, 2 * KIB]))  # fmt: skip
    record("batch_get_into: bytes", lambda: [target.content[:KIB] == source.content[:KIB],
                                             target.content[9 * KIB : 11 * KIB] == source.content[KIB : 3 * KIB]])  # fmt: skip
    record("batch_get_into larger and smaller", lambda: store.batch_get_into(
        ["q1", "q2"], [target.ptr, target.ptr + 4 * KIB], [2 * KIB, KIB]))  # fmt: skip
    record("batch_put_from of nothing", lambda: store.batch_put_from([], [], []))
    record("batch_get_into of nothing", lambda: store.batch_get_into([], [], []))
    record("batch_put_from of other lengths", lambda: store.batch_put_from(["x1", "x2"], [source.ptr], [KIB]))
    record("batch_get_into of other lengths", lambda: store.batch_get_into(["q1", "q2"], [target.ptr], [KIB]))
    record("batch_put_from one key twice", lambda: store.batch_put_from(["d", "d"], [source.ptr, source.ptr + 1], [KIB, KIB]))
    record("metadata", lambda: store.put_from_with_metadata("m", source.ptr, target.ptr, 6, 3))
    record("metadata: order", lambda: ["data first", "metadata first"][store.get("m") == target.content[:3] + source.content[:6]])
    record("unregister_buffer", lambda: store.unregister_buffer(source.ptr))
    record("unregister_buffer again", lambda: store.unregister_buffer(source.ptr))


def multi(store: Any, record: Record) -> None:
    source, target = Memory(pattern(2, 64 * KIB)), Memory(64 * KIB)
    store.register_buffer(source.ptr, source.size)
    store.register_buffer(target.ptr, target.size)

    def parts(memory: Memory, *places: tuple[int, int]) -> tuple[list[int], list[int]]:
        return [memory.ptr + at for at, _ in places], [n for _, n in places]

    def call(function: Any, keys: list[str], *values: tuple[list[int], list[int]]) -> Any:
        return function(keys, [p for p, _ in values], [n for _, n in values])

    put, get = store.batch_put_from_multi_buffers, store.batch_get_into_multi_buffers
    scattered = parts(source, (8 * KIB, KIB), (0, 2 * KIB), (32 * KIB, KIB))
    dense = parts(source, (KIB, KIB), (2 * KIB, KIB))
    record("put", lambda: call(put, ["s", "t"], scattered, dense))
    record("put again", lambda: call(put, ["s", "u"], dense, dense))
    record("put with a config", lambda: put(["w"], [dense[0]], [dense[1]], mooncake.ReplicateConfig()))
    into = parts(target, (40 * KIB, 2 * KIB), (10 * KIB, 2 * KIB))
    record("get", lambda: call(get, ["s", "none", "t"], into, parts(target, (0, KIB)), parts(target, (20 * KIB, 2 * KIB))))
    expected = source.content[8 * KIB : 9 * KIB] + source.content[: 2 * KIB] + source.content[32 * KIB : 33 * KIB]
    record("get: bytes", lambda: [target.content[40 * KIB : 42 * KIB] + target.content[10 * KIB : 12 * KIB] == expected,
                                  target.content[20 * KIB : 22 * KIB] == source.content[KIB : 3 * KIB]])  # fmt: skip
    record("get as a whole", lambda: text(store.get("s")) if store.get("s") == expected else "other bytes")
    record("get into larger", lambda: call(get, ["t"], parts(target, (0, 2 * KIB), (4 * KIB, KIB))))
    record("get into smaller", lambda: call(get, ["t"], parts(target, (0, KIB))))
    record("exist after it", lambda: store.batch_is_exist(["t", "none", "s"]))
    record("get of nothing", lambda: call(get, []))
    record("put of nothing", lambda: call(put, []))
    record("put of other lengths", lambda: put(["x", "y"], [dense[0]], [dense[1]]))
    record("put of other numbers of parts", lambda: put(["x"], [dense[0]], [[KIB]]))
    record("put of no parts", lambda: put(["x"], [[]], [[]]))
    record("put of an empty part", lambda: call(put, ["x0"], parts(source, (0, KIB), (2 * KIB, 0))))
    record("exist of nothing", lambda: store.batch_is_exist([]))


def remove(store: Any, record: Record) -> None:
    names = [f"r{i}" for i in range(8)]
    for name in names:
        store.put(name, name.encode() * 3)
    record("remove", lambda: store.remove("r0"))
    record("remove again", lambda: store.remove("r0"))
    record("is_exist after it", lambda: store.is_exist("r0"))
    record("get after it", lambda: text(store.get("r0")))
    record("put after it", lambda: store.put("r0", b"new"))
    record("get after that", lambda: text(store.get("r0")))
    record("remove just after a get", lambda: store.remove("r0"))
    record("remove by force", lambda: store.remove("r0", True))
    record("batch_remove", lambda: store.batch_remove(["r1", "none"]))
    record("batch_remove of nothing", lambda: store.batch_remove([]))
    record("remove_by_regex: found anywhere", lambda: store.remove_by_regex("2"))
    record("remove_by_regex: anchored", lambda: store.remove_by_regex("^r[34]$", True))
    record("remove_by_regex: no match", lambda: store.remove_by_regex("^x"))
    record("remove_by_regex: no pattern", lambda: store.remove_by_regex("r[", True))
    record("exist after them", lambda: store.batch_is_exist(names))
    record("batch_replica_clear", lambda: store.batch_replica_clear(["none"]))
    record("remove_all", lambda: store.remove_all(force=True) >= 3)
    record("remove_all of nothing", lambda: store.remove_all(force=True))
    record("exist after it", lambda: store.batch_is_exist(names))
    record("put after remove_all", lambda: [store.put("r5", b"again"), text(store.get("r5"))])


def upsert(store: Any, record: Record) -> None:
    source = Memory(pattern(3, 4 * KIB))
    store.register_buffer(source.ptr, source.size)
    record("new", lambda: [store.upsert("u", b"first"), text(store.get("u"))])
    record("same size", lambda: [store.upsert("u", b"other"), text(store.get("u"))])
    record("other size", lambda: [store.upsert("u", b"longer value"), text(store.get("u"))])
    record("no bytes", lambda: store.upsert("u", b""))
    record("parts", lambda: [store.upsert_parts("u", b"a", b"b"), text(store.get("u"))])
    record("batch", lambda: [store.upsert_batch(["u", "v"], [b"1", b"2"]), text(store.get("u")), text(store.get("v"))])
    record("from", lambda: [store.upsert_from("u", source.ptr, 16), store.get("u") == source.content[:16]])
    record("batch from", lambda: [store.batch_upsert_from(["u", "w"], [source.ptr + 1, source.ptr], [9, 8]),
                                  store.get("u") == source.content[1:10]])  # fmt: skip
    record("get_size", lambda: store.get_size("u"))
    record("put after it", lambda: [store.put("u", b"zzz"), store.get_size("u")])


def ranges(store: Any, record: Record) -> None:
    value = pattern(4, 8 * KIB)
    store.put("g", value)
    store.put("h", value[::-1])
    target = Memory(16 * KIB)
    store.register_buffer(target.ptr, target.size)
    wanted = ([["g", "h", "none"]], [[[0, 100], [200], [300]]], [[[10, 4000], [0], [0]]], [[[50, 60], [70], [5]]])
    record("get_into_ranges", lambda: store.get_into_ranges([target.ptr], *wanted))
    record("its bytes", lambda: [target.content[:50] == value[10:60], target.content[100:160] == value[4000:4060],
                                 target.content[200:270] == value[::-1][:70]])  # fmt: skip
    record("past the end", lambda: store.get_into_ranges([target.ptr], [["g"]], [[[0]]], [[[8 * KIB - 4]]], [[[8]]]))
    record("start", lambda: store.batch_get_session_start(["g", "h", "none"]))
    places = [[target.ptr, target.ptr + KIB], [target.ptr + 4 * KIB]]
    record("layers", lambda: store.batch_get_into_multi_buffer_ranges(
        ["g", "h"], places, [[KIB, 512], [2 * KIB]], [[0, 2 * KIB], [KIB]]))  # fmt: skip
    record("layers: bytes", lambda: [target.content[: KIB + 512] == value[:KIB] + value[2 * KIB : 2 * KIB + 512],
                                     target.content[4 * KIB : 6 * KIB] == value[::-1][KIB : 3 * KIB]])  # fmt: skip
    record("layer past the end", lambda: store.batch_get_into_multi_buffer_ranges(
        ["g"], [[target.ptr]], [[KIB]], [[8 * KIB - 1]]))  # fmt: skip
    record("end", lambda: store.batch_get_session_end(["g", "h"]))
    record("layer after the end", lambda: store.batch_get_into_multi_buffer_ranges(["g"], [[target.ptr]], [[KIB]], [[0]]))
    record("end again", lambda: store.batch_get_session_end(["g"]))
    source = Memory(pattern(5, 4 * KIB))
    store.register_buffer(source.ptr, source.size)
    record("put start", lambda: store.batch_put_session_start(["n", "o"], [4 * KIB, KIB]))
    record("put start of an existing key", lambda: store.batch_put_session_start(["g"], [KIB]))
    record("put start again", lambda: store.batch_put_session_start(["n"], [4 * KIB]))
    record("exist while it goes on", lambda: store.batch_is_exist(["n", "o"]))
    record("put layer 2", lambda: store.batch_put_from_multi_buffer_ranges(
        ["n", "o"], [[source.ptr + 2 * KIB], [source.ptr]], [[2 * KIB], [KIB]], [[2 * KIB], [0]]))  # fmt: skip
    record("put past the end", lambda: store.batch_put_from_multi_buffer_ranges(["n"], [[source.ptr]], [[KIB]], [[4 * KIB - 1]]))
    record("put layer 1", lambda: store.batch_put_from_multi_buffer_ranges(["n"], [[source.ptr]], [[2 * KIB]], [[0]]))
    record("put end", lambda: store.batch_put_session_end(["n", "o"]))
    record("put: bytes", lambda: [store.get("n") == source.content, store.get("o") == source.content[:KIB]])
    record("put layer after the end", lambda: store.batch_put_from_multi_buffer_ranges(["n"], [[source.ptr]], [[KIB]], [[0]]))
    record("put start, revoke", lambda: [store.batch_put_session_start(["x"], [KIB]), store.batch_put_session_revoke(["x"])])
    record("exist after revoke", lambda: store.is_exist("x"))
    record("put after revoke", lambda: [store.put("x", b"x"), text(store.get("x"))])
    record("put end of no session", lambda: store.batch_put_session_end(["none"]))
    record("put revoke of no session", lambda: store.batch_put_session_revoke(["none"]))


def query(store: Any, record: Record) -> None:
    store.put("a", b"12345")
    record("batch_get_replica_desc: keys", lambda: sorted(store.batch_get_replica_desc(["a", "none"])))
    one = store.get_replica_desc("a")
    record("get_replica_desc", lambda: [len(one), one[0].is_memory_replica(), one[0].is_disk_replica(),
                                        one[0].is_local_disk_replica()])  # fmt: skip
    record("status", lambda: one[0].status.name)
    record("memory descriptor", lambda: one[0].get_memory_descriptor().buffer_descriptor.size)
    record("get_replica_desc of a miss", lambda: store.get_replica_desc("none"))


def config(store: Any, record: Record) -> None:
    def fresh(**fields: Any) -> Any:
        made = mooncake.ReplicateConfig()
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    plain = fresh()
    record("defaults", lambda: {name: getattr(plain, name) for name in (
        "replica_num", "nof_replica_num", "dfs_replica_num", "soft_pin_ttl_ms", "with_hard_pin", "preferred_segment",
        "preferred_segments", "preferred_nof_segments", "prefer_alloc_in_same_node", "group_ids")})  # fmt: skip
    record("enums", lambda: [int(plain.soft_pin_action), int(plain.data_type), int(mooncake.SoftPinAction.ENABLE),
                             int(mooncake.ObjectDataType.TENSOR), mooncake.SoftPinAction(2).name])  # fmt: skip
    record("unknown field", lambda: fresh(bogus=1))
    record("wrong type", lambda: fresh(replica_num="1"))
    record("group_ids as text", lambda: fresh(group_ids="abc"))
    record("replica_num=2", lambda: store.put("k1", b"x", fresh(replica_num=2)))
    record("replica_num=0", lambda: store.put("k0", b"x", fresh(replica_num=0)))
    record("hard pin", lambda: store.put("k2", b"x", fresh(with_hard_pin=True)))
    record("soft pin", lambda: store.put("k3", b"x", fresh(soft_pin_action=mooncake.SoftPinAction.ENABLE, soft_pin_ttl_ms=1000)))
    record("segment that is not there", lambda: store.put("k4", b"x", fresh(preferred_segment="10.0.0.1:1")))
    record("data_type", lambda: store.put("k5", b"x", fresh(data_type=mooncake.ObjectDataType.TENSOR)))
    record("group_ids", lambda: store.put_batch(["k6", "k7"], [b"x", b"y"], fresh(group_ids=["g", "g"])))
    record("group_ids of another length", lambda: store.put_batch(["k8", "k9"], [b"x", b"y"], fresh(group_ids=["g"])))


def threads(store: Any, record: Record) -> None:
    """Eight threads on one store at once."""
    wrong: list[str] = []

    def work(number: int) -> None:
        value = pattern(number, 20_000 + number)
        source, target = Memory(value), Memory(len(value))
        for i in range(20):
            key = f"th{number}-{i}"
            if store.put_from(key, source.ptr, source.size) != 0:
                wrong.append(f"put {key}")
            if store.get_into(key, target.ptr, target.size) != len(value) or target.content != value:
                wrong.append(f"get {key}")
            if store.batch_is_exist([key, "none"]) != [1, 0]:
                wrong.append(f"exist {key}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    record("wrong answers", lambda: wrong)


def host_memory(store: Any, record: Record) -> None:
    allocator = mooncake.MooncakeHostMemAllocator()
    pointer = allocator.alloc(1 << 20)
    record("alloc", lambda: pointer > 0)

    def use() -> list[Any]:
        ctypes.memset(pointer, 7, 1 << 20)
        return [store.register_buffer(pointer, 1 << 20), store.put_from("hm", pointer, 1 << 20),
                store.get("hm") == b"\7" * (1 << 20), store.unregister_buffer(pointer)]  # fmt: skip

    record("use", use)
    record("free", lambda: allocator.free(pointer))
    record("bind_to_numa_node", lambda: mooncake.bind_to_numa_node(0))


SECTIONS: dict[str, Callable[[Any, Record], None]] = {
    one.__name__: one for one in (single, pointers, multi, remove, upsert, ranges, query, config, threads, host_memory)
}
# Calls on a store that is not open: the original crashes in most of them, and so does this process then.
LONELY: dict[str, Callable[[Any], Any]] = {
    "is_exist": lambda store: store.is_exist("a"),
    "batch_is_exist": lambda store: store.batch_is_exist(["a"]),
    "put": lambda store: store.put("a", b"x"),
    "get": lambda store: text(store.get("a")),
    "get_buffer": lambda store: store.get_buffer("a"),
    "get_size": lambda store: store.get_size("a"),
    "put_from": lambda store: store.put_from("a", Memory(8).ptr, 8),
    "get_into": lambda store: store.get_into("a", Memory(8).ptr, 8),
    "batch_put_from_multi_buffers": lambda store: store.batch_put_from_multi_buffers(["a"], [[Memory(8).ptr]], [[8]]),
    "batch_get_into_multi_buffers": lambda store: store.batch_get_into_multi_buffers(["a"], [[Memory(8).ptr]], [[8]]),
    "remove": lambda store: store.remove("a"),
    "remove_all": lambda store: store.remove_all(),
    "batch_get_replica_desc": lambda store: store.batch_get_replica_desc(["a"]),
    "register_buffer": lambda store: store.register_buffer(Memory(8).ptr, 8),
    "health_check": lambda store: store.health_check(),
    "close": lambda store: store.close(),
}


def main(host: str, master: str, wanted: list[str]) -> None:
    answers: dict[str, Any] = {}

    def recorder(section: str) -> Record:
        def record(name: str, call: Callable[[], Any]) -> None:
            try:
                answer = call()
            except Exception as error:
                answer = f"raises {type(error).__name__}"
            answers[f"{section}: {name}"] = answer

        return record

    if wanted[0] in ("before", "after"):
        for name in wanted[1:]:
            store = mooncake.MooncakeDistributedStore()
            if wanted[0] == "after":
                assert store.setup(host, "P2PHANDSHAKE", 0, 32 << 20, "tcp", "", master) == 0
                assert store.close() == 0
            recorder(f"{wanted[0]} the store is open")(name, partial(LONELY[name], store))
    else:
        store = mooncake.MooncakeDistributedStore()
        record = recorder("setup")
        record("setup", lambda: store.setup(host, "P2PHANDSHAKE", 0, 32 << 20, "tcp", "", master))
        for section in wanted:
            SECTIONS[section](store, recorder(section))
            store.remove_all(force=True)
        record("close", lambda: store.close())
        record("close again", lambda: store.close())
        other = mooncake.MooncakeDistributedStore()
        settings = {"local_hostname": host, "metadata_server": "P2PHANDSHAKE", "global_segment_size": "0",
                    "local_buffer_size": "16MB", "protocol": "tcp", "device_name": "", "master_server_addr": master}  # fmt: skip
        record("setup(dict)", lambda: other.setup(settings))
        record("put after it", lambda: [other.put("sd", b"x"), text(other.get("sd"))])
    sys.stdout.write("\nCONTRACT " + json.dumps(answers, default=repr) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
