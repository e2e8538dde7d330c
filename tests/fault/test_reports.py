"""Public bug reports of other stores as black-box tests: integrity, lifetime, hashes, protocol. Named by the reports' ids.

Scaled in `make test`, at the reports' own numbers in `make reports`. Failures of machines, disks and networks are in
`test_reports_failures`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import resource
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

import kvpool
from kvpool.core.frames import Flag, Header, KeysRequest, Op, ReadRequest, Status
from kvpool.core.keys import KeyBatch
from kvpool.core.types import KEY_BYTES, MAX_BATCH_KEYS, HoldId, MissCause, NamespaceUid, Outcome, RemoveOutcome
from kvpool.errors import InvalidArgument, KVPoolError, LayoutMismatch
from kvpool.transport.rpc import open_channel
from kvpool.v1 import master_pb2 as pb
from kvpool.v1 import master_pb2_grpc
from tests.support.cluster import Cluster
from tests.support.observe import half_closed, http_get, listening, metrics, now, usage
from tests.support.payload import check, payload, payloads
from tests.support.processes import Role, cli_env, run_cli
from tests.support.raw_client import RawClient, write_meta
from tests.support.scale import FULL, scaled
from tests.support.waiting import pause, wait_until

pytestmark = [pytest.mark.reports, pytest.mark.timeout(1800)] if FULL else [pytest.mark.timeout(60)]

MakeCluster = Callable[..., Cluster]
Connect = Callable[..., kvpool.Client]
MIB = 1 << 20
KIB = 1 << 10
ROOT = Path(__file__).parents[2]
BACK_S = 30.0  # what a cause leaves behind is gone by then
SLACK_S = 2.0  # a call past its deadline
GUARD = 0xEE


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker without SSD that tests share which break nothing; each has its own namespaces."""
    cluster = Cluster(tmp_path_factory.mktemp("pool"), dram=scaled("192MiB", "512MiB")).start()
    yield cluster
    cluster.stop()


@pytest.fixture
def connect(pool: Cluster) -> Iterator[Connect]:
    clients: list[kvpool.Client] = []

    def make(**settings: Any) -> kvpool.Client:
        clients.append(kvpool.connect(pool.master_address, **settings))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def opaque(block_bytes: int, *, block_tokens: int = 1) -> kvpool.KVLayout:
    return kvpool.KVLayout.opaque(block_bytes=block_bytes, block_tokens=block_tokens)


def keyed(client: kvpool.Client, name: str, block_bytes: int, **more: Any) -> kvpool.Namespace:
    """A namespace of keys that are apart, not a chain: as stores with string keys have them."""
    return client.namespace(name, opaque(block_bytes), create=True, hash="external", **more)


def key(ns: kvpool.Namespace, *names: object) -> kvpool.PrefixHashes:
    return ns.hashes([f"key-{name}".encode().ljust(16, b".") for name in names])


def read(ns: kvpool.Namespace, name: object, *, versions: Sequence[int] = (1,), size: int | None = None, **more: Any) -> bool:
    """Get of one key with CHECK; False: a miss."""
    size = ns.block_bytes if size is None else size
    out = np.full((1, size), GUARD, np.uint8)
    got = ns.get(key(ns, name), out, **more)
    if not got.n_blocks:
        assert got.miss is not None, got
        return False
    check(name, out[0], versions=versions, size=got.sizes[0])
    assert got.sizes == [size]
    return True


def store(ns: kvpool.Namespace, *names: object, version: int = 1, size: int | None = None, **more: Any) -> kvpool.PutResult:
    size = ns.block_bytes if size is None else size
    return ns.put(key(ns, *names), payloads(names, version=version, size=size), **more)


def python(source: str, *args: object, env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
    """A client program of its own."""
    command = [sys.executable, "-c", source, *map(str, args)]
    return subprocess.Popen(command, text=True, env=cli_env(env), cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE, **more)


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[Any]) -> Iterator[None]:
    """These programs are gone after the block, whatever happens."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(20)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def said(process: subprocess.Popen[str], timeout_s: float = 60.0) -> str:
    """The output of a program that must end well."""
    with ended(process):
        out, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, out
        return out.strip()


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """All calls in threads of their own; their results, or the first error."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


@contextlib.contextmanager
def meanwhile(*bodies: Callable[[int], None]) -> Iterator[list[int]]:
    """Each body again and again (its argument: which time) in a thread of its own; an error of one fails the block. Counts."""
    stop, counts, errors = threading.Event(), [0] * len(bodies), []

    def run(index: int) -> None:
        try:
            while not stop.is_set() and not errors:
                bodies[index](counts[index])
                counts[index] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        if errors:
            raise errors[0]


def settled(role: Role) -> bool:
    """Nothing is held, reserved or in quarantine."""
    return all(now(role, what) == 0 for what in ("holds", "held_dram_bytes", "held_ssd_bytes", "reserved", "quarantined_bytes"))


def relayed(make_proxy: Callable[..., Any], role: Role) -> Any:
    """The relay in front of a worker that was started with `advertise 127.0.0.2`: TCP clients come through it."""
    host, _, port = role.address.rpartition(":")
    assert host == "127.0.0.2"
    return make_proxy(f"127.0.0.1:{port}", listen=role.address)


RELAYED = ("--advertise", "127.0.0.2")


# --- integrity -----------------------------------------------------------------------------------------------------------


def test_B01_what_failed_to_be_stored_is_not_there(make_cluster: MakeCluster) -> None:
    """There is no put to a named tier: blocks go down by themselves, so the device fails while they do (a file size limit of the
    running worker, in the middle of its slab files)."""
    cluster = make_cluster(dram="8MiB", ssd="64MiB")
    worker, n = cluster.worker(), 24
    ns = keyed(cluster.connect(), "b01", MIB)
    stored: set[int] = set()

    def put(names: Sequence[int]) -> None:
        done = store(ns, *names, deadline_ms=5_000)
        assert len(done.outcomes) == len(names), "a result for each key"
        for name, outcome, reason in zip(names, done.outcomes, done.reasons, strict=True):
            assert outcome in (Outcome.STORED, Outcome.ALREADY) or reason, "what failed says why"
            if outcome in (Outcome.STORED, Outcome.ALREADY):
                stored.add(name)

    def look(names: Sequence[int]) -> set[int]:
        there = set()
        for name in names:
            listed = ns.match(key(ns, name))
            if read(ns, name):
                assert name in stored, f"key {name} was not stored, and is there"
                there.add(name)
            elif listed:
                assert not ns.match(key(ns, name)) or not ns.touch(key(ns, name)), f"key {name} is listed and cannot be read"
        return there

    put(range(8))
    slabs = wait_until(lambda: sorted(cluster.ssd_dir(0).glob("slab-*")), what="slab files")
    limit = min(slab.stat().st_size for slab in slabs) * 3 // 10
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for first in range(8, n, 4):
        put(range(first, first + 4))
    assert len(stored) >= 8 and look(range(n)), "memory goes on without the disk"
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    worker.kill()
    cluster.start_worker(0)
    wait_until(lambda: cluster.connect().describe()["complete"])
    look(range(n))
    for first in range(0, n, 4):
        put(range(first, first + 4))
    assert stored == set(range(n)), "what failed can be put again"
    wait_until(lambda: len(look(range(n))) == n, what="all 24 fit into both tiers")


def test_B01_a_source_that_fails_half_way_leaves_nothing(connect: Connect) -> None:
    ns = keyed(connect(), "b01-source", MIB)
    data = payloads(range(8), size=MIB)
    broken: list[Any] = [*data[:3], object(), *data[4:]]
    with pytest.raises(InvalidArgument, match=r"blocks\[3\]"):
        ns.put(key(ns, *range(8)), broken)

    def parts() -> Iterator[bytes]:
        yield from (data[0], data[1], data[2])
        raise RuntimeError("the source ends half way")

    with pytest.raises(RuntimeError, match="half way"), ns.put_session(key(ns, *range(8))) as session:
        for index, part in enumerate(parts()):
            session.write(index, 0, part)
    with ns.put_session(key(ns, *range(8))) as session:  # half of block 3 is missing
        for index in range(8):
            session.write(index, 0, data[index][: MIB // 2] if index == 3 else data[index])
        done = session.commit()
    for name in range(8):
        assert read(ns, name) is (done.outcomes[name] is Outcome.STORED), done
    assert done.outcomes[3] is Outcome.REJECTED and done.reasons[3]
    assert store(ns, *range(8)).n_there == 8
    assert all(read(ns, name) for name in range(8))


def test_B04_another_layout_of_the_same_size_is_refused(connect: Connect) -> None:
    shape: dict[str, Any] = {"model": "m", "revision": "1", "dtype": "bfloat16", "n_layers": 1, "n_kv_heads": 8, "head_dim": 128,
                             "block_tokens": 16, "format": "NHD/K-then-V"}  # fmt: skip
    right = kvpool.KVLayout(**shape)
    ns = connect().namespace("b04", right, create=True)
    hashes, data = ns.hash(range(64)), payloads(range(4), size=right.block_bytes)
    assert ns.put(hashes, data).n_there == 4
    wrong = [{"dtype": "float16"}, {"dtype": "float8_e4m3fn", "head_dim": 256}, {"format": "NHD/packed"}, {"format": "HND/1"},
             {"n_kv_heads": 16, "planes": 1}, {"n_kv_heads": 4, "n_layers": 2}, {"n_kv_heads": 16, "tp_size": 2},
             {"n_kv_heads": 128, "head_dim": 8}, {"revision": "2"}, {"model": "other"}]  # fmt: skip
    for change in wrong:
        other = kvpool.KVLayout(**(shape | change))
        assert other.block_bytes == right.block_bytes, "the byte count does not tell them apart"
        for create in (False, True):
            with pytest.raises(LayoutMismatch):
                connect().namespace("b04", other, create=create)
    for salt, hash_ in ((b"x", "sha256"), (b"", "xxh3_128")):
        with pytest.raises(LayoutMismatch):
            connect().namespace("b04", right, create=True, salt=salt, hash=hash_)
    reader = connect().namespace("b04", right)
    out = np.zeros_like(data)
    assert reader.get(hashes, out).n_blocks == 4
    assert (out == data).all()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_B04_a_buffer_of_another_size_spills_nothing(connect: Connect, transport: str) -> None:
    """Uneven parts of one value (64 + 64 for 100 bytes): a get takes one buffer a block; a byte range is the part."""
    n = 100_000
    client = connect(transport=transport)
    fixed_layout = kvpool.KVLayout(model="m", revision="1", dtype="float16", n_layers=1, n_kv_heads=1, head_dim=n // 4,
                                   block_tokens=1, format="NHD/1")  # fmt: skip
    fixed, free = client.namespace(f"b04f-{transport}", fixed_layout, create=True), keyed(client, f"b04o-{transport}", 2 * n)
    assert fixed.block_bytes == n
    data = payload("a", 1, n)
    assert fixed.put(fixed.hash([1]), [data]).n_there == free.put(key(free, "a"), [data]).n_there == 1
    for size in (n - 1, n, n + 1, 2 * n):
        for ns, hashes in ((fixed, fixed.hash([1])), (free, key(free, "a"))):
            memory = bytearray([GUARD]) * (size + 64)
            try:
                got = ns.get(hashes, [memoryview(memory)[:size]])
            except InvalidArgument as error:
                assert ns is fixed and size != n and "out[0]" in str(error)
                assert memory == bytes([GUARD]) * len(memory)
                continue
            assert memory[size:] == bytes([GUARD]) * 64
            if size < n:
                assert (ns, got.n_blocks) == (free, 0) and "out[0]" in got.reason
                assert memory == bytes([GUARD]) * len(memory), "nothing written"
            else:
                assert (got.n_blocks, got.sizes) == (1, [n])
                assert memory[:n] == data and memory[n:] == bytes([GUARD]) * (size + 64 - n)
    for at, length in ((0, 64_000), (64_000, 36_000)):
        part = bytearray(length)
        assert free.get(key(free, "a"), [part], byte_range=(at, length)).n_blocks == 1
        assert part == data[at : at + length]
    memory = bytearray([GUARD]) * 64_000
    got = free.get(key(free, "a"), [memory], byte_range=(64_000, 64_000))
    assert (got.n_blocks, memory) == (0, bytes([GUARD]) * 64_000), "a range past the value's end is not made up"
    with pytest.raises(InvalidArgument, match="contiguous"):
        free.get(key(free, "a"), [np.zeros(2 * n, np.uint8)[::2]])


def test_B31_blocks_that_went_down_and_came_up_are_still_themselves(make_cluster: MakeCluster) -> None:
    n, n_readers = scaled(40, 200), scaled(4, 8)
    cluster = make_cluster(dram=scaled("8MiB", "32MiB"), ssd=scaled("96MiB", "512MiB"))
    clients = [cluster.connect(transport=transport) for transport in ("shm", "tcp")]
    spaces = [keyed(client, "b31", MIB) for client in clients]
    small = [keyed(client, "b31-small", 64 * KIB) for client in clients]
    put = [0]

    def reader(seed: int) -> Callable[[int], None]:
        chance, ns = random.Random(seed), spaces[seed % 2]

        def one(_: int) -> None:
            if put[0]:
                read(ns, chance.randrange(put[0]), deadline_ms=5_000)

        return one

    def short_lived(seed: int) -> Callable[[int], None]:
        ns = small[seed % 2]

        def one(turn: int) -> None:
            name = f"{seed}/{turn}"
            store(ns, name, deadline_ms=5_000)
            read(ns, name, deadline_ms=5_000)
            if turn >= 8:
                ns.remove(key(ns, f"{seed}/{turn - 8}"), deadline_ms=5_000)

        return one

    with meanwhile(*map(reader, range(n_readers)), *map(short_lived, range(scaled(2, 4)))) as counts:
        for name in range(n):
            wait_until(lambda name=name: store(spaces[0], name, deadline_ms=5_000).n_there == 1, what=f"room for {name}")
            put[0] = name + 1
        end = time.monotonic() + scaled(2.0, 300.0)
        wait_until(lambda: time.monotonic() >= end and min(counts) > 3, timeout_s=scaled(30, 400))
    for _ in range(2):
        for name in range(n):
            assert read(spaces[0], name, deadline_ms=5_000), f"{name}: it fits, and is not there"
    told = metrics(cluster.worker())
    assert told['kvpool_block_events_total{event="demoted"}'] > n / 2, told
    assert told['kvpool_block_events_total{event="promoted"}'] > 0, told


def test_B45_exists_size_list_and_get_agree(make_cluster: MakeCluster) -> None:
    n = scaled(32, 100)
    cluster = make_cluster(dram=scaled("8MiB", "32MiB"), ssd=scaled("16MiB", "48MiB"))
    client = cluster.connect()
    ns = keyed(client, "b45", MIB)

    def agree(name: object, *, tries: int) -> bool:
        """exists, get and get as part of a batch say the same, at the latest when nothing is evicted in between."""
        for _ in range(tries):
            exists = ns.match(key(ns, name)) == 1
            got = read(ns, name)
            out = np.zeros((2, MIB), np.uint8)
            batch = ns.get(key(ns, name, "never"), out)
            if batch.n_blocks:
                check(name, out[0])
                assert batch.sizes == [MIB]
            if exists == got == (batch.n_blocks == 1):
                return got
        raise AssertionError(f"key {name}: exists={exists}, get={got}, batch_get={batch.n_blocks}")

    for name in range(n):
        assert store(ns, name, deadline_ms=10_000).outcomes == [Outcome.STORED]
        agree(name // 2, tries=20)
    wait_until(lambda: metrics(cluster.worker())["kvpool_reports_pending"] == 0)

    def listed() -> set[bytes]:
        told = run_cli("ls", "b45", "--master", cluster.master_address, "--json")
        return {bytes.fromhex(row["hash"]) for row in json.loads(told.stdout)["blocks"]}

    def there() -> set[bytes]:
        return {bytes(key(ns, name)) for name in range(n) if agree(name, tries=20)}

    wait_until(lambda: listed() == there(), what="the list has what can be got, when the last puts have settled down")
    found = there()
    assert scaled(12, 40) <= len(found) < n, "both tiers are full, and more was put"
    for empty in (b"", np.zeros((0,), np.uint8)):
        with pytest.raises(InvalidArgument, match=r"blocks\[0\]: 0 bytes"):
            ns.put(key(ns, "zero"), [empty])
    with pytest.raises(InvalidArgument, match="size"):
        ns.put_session(key(ns, "zero"), size=0)
    for name in ("zero", "never"):
        got = ns.get(key(ns, name), [bytearray(1)])
        assert (got.n_blocks, got.sizes, ns.match(key(ns, name))) == (0, [], 0)
        assert got.miss in (MissCause.NEVER_STORED, MissCause.UNKNOWN)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("mirror", [True, False])
def test_B65_the_same_key_twice_in_one_batch(connect: Connect, transport: str, mirror: bool) -> None:
    """A get serves a prefix: what follows a missing key in [a, x, a, x] is no position that it called ok."""
    ns = keyed(connect(transport=transport, mirror=mirror), f"b65-{transport}-{mirror}", MIB)
    assert store(ns, "a", "b", "c").n_there == 3
    names = ["a", "b", "a", "c", "a"]
    for out in (np.full((5, MIB), GUARD, np.uint8), [bytearray([GUARD]) * MIB for _ in names]):
        got = ns.get(key(ns, *names), out)
        assert (got.n_blocks, len(got.sizes), len(got.sources), got.miss) == (5, 5, 5, None)
        for name, row in zip(names, out, strict=True):
            check(name, row)
    part = [bytearray([GUARD]) * 1000 for _ in names]
    assert ns.get(key(ns, *names), part, byte_range=(5000, 1000)).n_blocks == 5
    assert [bytes(row) for row in part] == [payload(name, 1, MIB)[5000:6000] for name in names]
    rows = np.full((4, MIB), GUARD, np.uint8)
    got = ns.get(key(ns, "a", "x", "a", "x"), rows)
    assert (got.n_blocks, len(got.sizes), got.miss) == (1, 1, MissCause.NEVER_STORED)
    check("a", rows[0])
    assert (rows[[1, 3]] == GUARD).all()
    done = ns.put(key(ns, "new", "new"), [payload("new", 1, MIB), payload("new", 2, MIB)])
    assert done.outcomes == [Outcome.STORED, Outcome.ALREADY]
    assert read(ns, "new", versions=[1])
    assert ns.match(key(ns, "a", "a", "x")) == ns.touch(key(ns, "a", "a", "x")) == 2
    with ns.hold(key(ns, "a", "a", "x"), ttl_ms=5_000) as hold:
        assert hold.n_blocks == 2
    removed = ns.remove(key(ns, "a", "a"))
    assert len(removed.outcomes) == 2 and removed.outcomes[0] is RemoveOutcome.REMOVED
    assert not read(ns, "a")
    with ns.put_session(key(ns, "twice", "twice")) as session:
        session.write(0, 0, payload("twice", 1, MIB))
        assert session.commit().outcomes[0] is Outcome.STORED
    assert read(ns, "twice")


# --- lifetime ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ways", [("get", "batch", "prefix under a hold", "range"), ("ssd",)], ids=["memory", "ssd"])
def test_B05_a_slow_get_outlives_every_lease(make_cluster: MakeCluster, make_proxy: Callable[..., Any],
                                             ways: Sequence[str]) -> None:  # fmt: skip
    """No GPU here, and no copies between workers in this version; a hold of 500 ms ends in the middle of the transfer."""
    n, rounds = scaled(4, 32), scaled(1, 50)
    cluster = make_cluster(dram=f"{2 * n}MiB", ssd=f"{3 * n}MiB" if "ssd" in ways else None, worker_args=RELAYED)
    worker = cluster.worker()
    proxy = relayed(make_proxy, worker)
    reader = cluster.connect(transport="tcp").namespace("b05", opaque(n * MIB), create=True, hash="external")
    blocks = cluster.connect(transport="tcp").namespace("b05-batch", opaque(MIB), create=True)
    writer, churn = cluster.connect(transport="shm"), keyed(cluster.connect(transport="shm"), "churn", MIB)
    big, chain = keyed(writer, "b05", n * MIB), writer.namespace("b05-batch", opaque(MIB))
    numbers = itertools.count()
    served = dict.fromkeys(ways, 0)

    def evict(_: int) -> None:
        store(churn, next(numbers), deadline_ms=5_000)

    def slowly(way: str) -> int:
        if way in ("get", "ssd"):
            return int(read(reader, "k", deadline_ms=60_000))
        length = (100_000, 900_000) if way == "range" else (0, MIB)
        out = np.full((n, length[1]), GUARD, np.uint8)
        with contextlib.ExitStack() as stack:
            hold = None
            if way == "prefix under a hold":
                hold = stack.enter_context(blocks.hold(blocks.hash(range(n)), ttl_ms=500))
            got = blocks.get(blocks.hash(range(n)), out, hold=hold, byte_range=length if way == "range" else None,
                             deadline_ms=60_000)  # fmt: skip
        for name in range(got.n_blocks):
            assert out[name].tobytes() == payload(name, 1, MIB)[length[0] : length[0] + length[1]], name
        assert got.n_blocks == n or got.miss is not None
        return got.n_blocks

    for way in [*ways] * rounds:
        proxy.pass_on()
        if way in ("get", "ssd"):
            assert store(big, "k", deadline_ms=20_000).n_there == 1
            if way == "ssd":
                for turn in range(2 * n):
                    store(churn, f"down-{turn}", deadline_ms=20_000)
        else:
            assert chain.put(chain.hash(range(n)), payloads(range(n), size=MIB), deadline_ms=20_000).n_there == n
        proxy.pass_on(bytes_per_s=scaled(4, 8) * MIB)
        with meanwhile(evict) as turns:
            served[way] += slowly(way)
            assert turns[0], "others put meanwhile"
        wait_until(lambda: settled(worker))
    assert all(served.values()), "some were served whole"


STOPPED_READER = """
import sys, kvpool, numpy as np
from tests.support.payload import payloads
n, block = int(sys.argv[2]), 1 << 20
client = kvpool.connect(sys.argv[1], transport="shm", deadline_ms=60_000)
ns = client.namespace("stopped", kvpool.KVLayout.opaque(block_bytes=block), create=True)
hashes, want = ns.hash(range(n)), payloads(range(n), size=block)
out = np.zeros_like(want)
served = 0
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "end":
        break
    ns.put(hashes, want, deadline_ms=5_000)
    for _ in range(int(line)):
        out.fill(0)
        got = ns.get(hashes, out, deadline_ms=100)
        assert (out[: got.n_blocks] == want[: got.n_blocks]).all(), got
        assert got.n_blocks == n or got.miss is not None, got
        served += got.n_blocks
    print("turn", flush=True)
print(served, flush=True)
client.close()
"""


def test_B05_a_reader_that_was_stopped_serves_no_other_keys_bytes(make_cluster: MakeCluster) -> None:
    """Shared memory in place of a relay: the reader is stopped in its copies for longer than the workers keep what it reads (its
    deadline and 1 s), while its slots are given to others."""
    n, rounds, chance = 16, scaled(2, 200), random.Random(5)
    cluster = make_cluster(dram="24MiB")
    churn = keyed(cluster.connect(), "churn", MIB)
    reader = python(STOPPED_READER, cluster.master_address, n)
    with ended(reader):
        assert reader.stdin is not None and reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        for round_ in range(rounds):
            reader.stdin.write("20\n")
            reader.stdin.flush()
            pause(chance.uniform(0.02, 0.15))  # so that it is somewhere in its copies
            reader.send_signal(signal.SIGSTOP)
            end = time.monotonic() + 1.4
            turn = 0
            while time.monotonic() < end or turn < 48:
                store(churn, f"{round_}/{turn}", deadline_ms=5_000)
                turn += 1
            reader.send_signal(signal.SIGCONT)
            assert reader.stdout.readline() == "turn\n", "the reader ended"
        out, _ = reader.communicate("end\n", timeout=30)
        assert reader.returncode == 0 and int(out) > 0
    wait_until(lambda: settled(cluster.worker()))


def test_B12_promises_without_a_read_end_by_themselves(make_cluster: MakeCluster) -> None:
    n, rounds, ttl_ms, chance = 32, scaled(80, 1000), scaled(500, 2000), random.Random(12)
    cluster = make_cluster(dram="64MiB")
    worker = cluster.worker()
    client = cluster.connect()
    ns = client.namespace("b12", opaque(MIB), create=True)
    hashes = ns.hash(range(n))
    assert ns.put(hashes, payloads(range(n), size=MIB)).n_there == n
    out = np.zeros((4, MIB), np.uint8)
    n_lost = 0

    async def cancelled() -> None:
        async with await kvpool.aio.connect(cluster.master_address, mirror=False) as face:
            other = await face.namespace("b12", opaque(MIB))
            asked = [asyncio.ensure_future(other.hold(hashes, ttl_ms=ttl_ms)) for _ in range(4)]
            await asyncio.sleep(0)
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    for _ in range(rounds):
        what = chance.choices(("load four", "load nothing", "cancel", "time out", "drop"), (10, 10, 1, 10, 2))[0]
        if what == "cancel":
            asyncio.run(cancelled())
        elif what == "time out":
            with contextlib.suppress(KVPoolError):
                ns.hold(hashes, ttl_ms=ttl_ms, deadline_ms=0.2)
        elif what == "drop":
            gone = kvpool.connect(cluster.master_address)
            space = gone.namespace("b12", opaque(MIB))
            space.hold(hashes, ttl_ms=ttl_ms)
            space.view(hashes)
            session = space.put_session(space.hash([n_lost, 10**6]))
            n_lost += 1
            session.write(0, 0, b"x" * 1000)
            gone.close()
        else:
            hold = ns.hold(hashes, ttl_ms=ttl_ms)
            if what == "load four":
                assert ns.get(hashes[:4], out, hold=hold).n_blocks == min(4, hold.n_blocks)
    wait_until(lambda: settled(worker), timeout_s=2 * ttl_ms / 1e3 + SLACK_S)
    others = ns.hash(range(1000, 1064))
    done = ns.put(others, payloads(range(64), size=MIB))
    assert done.outcomes == [Outcome.STORED] * 64, done.reasons
    assert settled(worker)


BUSY_CLIENT = """
import sys, threading, itertools, numpy as np, kvpool
address, transport, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = kvpool.connect(address, transport=transport, deadline_ms=60_000)
ns = client.namespace("b13", kvpool.KVLayout.opaque(block_bytes=1 << 20), create=True)
hashes = ns.hash(range(8))
ns.put(hashes, np.full((8, 1 << 20), 7, np.uint8), deadline_ms=10_000)
holds = [ns.hold(hashes, ttl_ms=int(sys.argv[4])) for _ in range(16)]
views = [ns.view(hashes) for _ in range(2)] if transport == "shm" else []
session = ns.put_session(ns.hash(range(seed * 100, seed * 100 + 4)))
session.write(0, 0, bytes(1000))
def putting(n):
    for i in itertools.count():
        ns.put(ns.hash([seed, n, i]), np.full((3, 1 << 20), i % 256, np.uint8), deadline_ms=10_000)
def getting(n):
    out = np.zeros((8, 1 << 20), np.uint8)
    while True:
        ns.get(hashes, out, deadline_ms=10_000)
for work in (putting, putting, getting, getting):
    threading.Thread(target=work, args=(seed * 7 + id(work) % 5,), daemon=True).start()
print("busy", flush=True)
sys.stdin.read()
"""

POLITE_CLIENT = """
import sys, kvpool
from tests.support.payload import payloads
with kvpool.connect(sys.argv[1], deadline_ms=60_000) as client:
    ns = client.namespace("polite", kvpool.KVLayout.opaque(block_bytes=1 << 20), create=True)
    print(ns.put(ns.hash(range(8)), payloads(range(8), size=1 << 20), deadline_ms=20_000).n_there)
"""


def test_B13_a_client_that_is_killed_takes_nothing_along(make_cluster: MakeCluster) -> None:
    rounds, at_a_time, ttl_ms = scaled(1, 10), 2, scaled(500, 2000)
    cluster = make_cluster(dram="64MiB")
    worker, master = cluster.worker(), cluster.master
    assert master is not None
    address = cluster.master_address

    def round_(number: int) -> None:
        clients = [python(BUSY_CLIENT, address, ("shm", "tcp")[i % 2], number * 2 + i, ttl_ms) for i in range(at_a_time)]
        with ended(*clients):
            for client in clients:
                assert client.stdout is not None
                assert client.stdout.readline() == "busy\n"
            held = now(worker, "holds")
            assert held >= 16, held
            for client in clients:
                client.kill()

    def back() -> bool:
        return settled(worker) and metrics(worker)["kvpool_connections"] <= 2 and not half_closed(worker)

    round_(0)  # memory that stays with the process comes with the first
    wait_until(back, timeout_s=BACK_S)
    before = usage(worker), usage(master)
    for number in range(rounds):
        round_(number + 1)
    wait_until(back, timeout_s=BACK_S)
    for role, was in zip((worker, master), before, strict=True):
        wait_until(lambda role=role, was=was: usage(role).fds <= was.fds and usage(role).threads <= was.threads + 2,
                   timeout_s=BACK_S)  # fmt: skip
        assert usage(role).rss < was.rss + 48 * MIB
    assert usage(worker).memfd_bytes <= 66 * MIB, "rings of the dead are given back"
    assert said(python(POLITE_CLIENT, address)) == "8"
    reader = cluster.connect().namespace("polite", opaque(MIB))
    out = np.zeros((8, MIB), np.uint8)
    assert reader.get(reader.hash(range(8)), out, deadline_ms=5_000).n_blocks == 8, "what a client put outlives it"
    assert all(check(name, row) for name, row in enumerate(out))
    rest = keyed(cluster.connect(), "rest", MIB)
    assert store(rest, *range(64)).outcomes == [Outcome.STORED] * 64, "the whole pool can be filled"


def test_B13_calls_given_up_while_the_worker_stood_still_leave_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram="32MiB")
    worker = cluster.worker()
    spaces = [keyed(cluster.connect(transport=transport), "abort", MIB) for transport in ("shm", "tcp")]
    assert store(spaces[0], *range(8)).n_there == 8
    assert all(read(ns, 0) for ns in spaces)
    worker.pause()

    def give_up(ns: kvpool.Namespace, i: int) -> None:
        began = time.monotonic()
        with contextlib.suppress(KVPoolError):
            ns.hold(key(ns, *range(8)), ttl_ms=300, deadline_ms=200)
        read(ns, i, deadline_ms=200)
        store(ns, f"late-{i}", deadline_ms=200)
        assert time.monotonic() - began < 0.6 + SLACK_S

    at_once(*(lambda ns=ns, i=i: give_up(ns, i) for ns in spaces for i in range(4)))
    worker.resume()
    wait_until(lambda: settled(worker), timeout_s=BACK_S)
    for ns in spaces:
        wait_until(lambda ns=ns: read(ns, 3), what="the worker is used again")
    assert wait_until(lambda: store(spaces[0], *range(100, 132)).outcomes == [Outcome.STORED] * 32)


SLOW_WRITER = """
import sys, kvpool
from tests.support.payload import payload
block, names = int(sys.argv[2]), sys.argv[3:]
client = kvpool.connect(sys.argv[1], transport="tcp", deadline_ms=60_000)
ns = client.namespace("b15", kvpool.KVLayout.opaque(block_bytes=block), create=True, hash="external")
import threading
for name in names:
    hashes = ns.hashes([f"key-{name}".encode().ljust(16, b".")])
    threading.Thread(target=ns.put, args=(hashes, [payload(name, 1, block)]), kwargs={"deadline_ms": 60_000}).start()
"""


FREE_S = scaled(0.0, 1.0) + SLACK_S


def test_B15_a_writer_killed_in_mid_put_leaves_no_key_in_progress(make_cluster: MakeCluster,
                                                                  make_proxy: Callable[..., Any]) -> None:  # fmt: skip
    n, block, rounds = scaled(4, 2), scaled(8, 32) * MIB, scaled(1, 10)
    cluster = make_cluster(dram="64MiB", worker_args=RELAYED)
    worker = cluster.worker()
    proxy = relayed(make_proxy, worker)
    ns = keyed(cluster.connect(transport="shm"), "b15", block)
    for round_ in range(rounds):
        names = [f"{round_}/{i}" for i in range(n)]
        passed = proxy.n_bytes
        proxy.pass_on(bytes_per_s=4 * MIB)
        writer = python(SLOW_WRITER, cluster.master_address, block, *names)
        with ended(writer):
            wait_until(lambda: now(worker, "reserved") == n and proxy.n_bytes > passed + scaled(2, 8) * MIB, timeout_s=30)
            for name in names:
                assert not read(ns, name) and ns.match(key(ns, name)) == ns.touch(key(ns, name)) == 0, "in mid-put: a miss"
            writer.kill()
        for name in names:  # at once
            assert not read(ns, name) and ns.match(key(ns, name)) == 0
            assert ns.remove(key(ns, name)).outcomes == [RemoveOutcome.ABSENT]
            proxy.pass_on()  # what is under way in the network still, and then the end of the connection
            # the pool has room for nothing else at full size: what was reserved is free again within a second
            wait_until(lambda name=name: store(ns, name, version=2, deadline_ms=10_000).outcomes == [Outcome.STORED],
                       timeout_s=FREE_S, what="stored by another writer")  # fmt: skip
            assert read(ns, name, versions=[2])
        wait_until(lambda: settled(worker))
    fill = keyed(cluster.connect(), "fill", MIB)
    assert store(fill, *range(64), deadline_ms=20_000).outcomes == [Outcome.STORED] * 64, "all space is back"
    assert now(worker, "reserved") == 0


# --- hashes --------------------------------------------------------------------------------------------------------------

HASHING = """
import os, sys, kvpool
from kvpool.core.hashing import HashKind, chain_root, hash_tokens
def keys():
    found = []
    for kind in (HashKind.SHA256, HashKind.XXH3_128):
        for salt in (b"", b"salt"):
            root = chain_root(kind, fingerprint=kvpool.KVLayout.opaque(block_bytes=4096, block_tokens=16).fingerprint, salt=salt)
            plain = hash_tokens(kind, range(1024), block_tokens=16, root=root)
            for same in ({"parent": None}, {"extra": b""}, {"extra": []}, {"parent": None, "extra": ()}):
                assert hash_tokens(kind, list(range(1024)), block_tokens=16, root=root, **same) == plain, same
            found += [plain, hash_tokens(kind, range(1024), block_tokens=16, root=root, extra=b"lora"),
                      hash_tokens(kind, range(1024), block_tokens=16, root=root, extra=[(20, 40, b"image")])]
    assert all(len(one) == 64 for one in found)
    return "".join(bytes(one).hex() for one in found)
print(keys(), flush=True)
pid = os.fork()
if pid == 0:
    print(keys(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""

PREFIX_WRITER = """
import sys, kvpool
from tests.support.payload import payloads
with kvpool.connect(sys.argv[1], deadline_ms=60_000) as client:
    ns = client.namespace("b08", kvpool.KVLayout.opaque(block_bytes=4096, block_tokens=16), create=True, salt=b"s")
    assert ns.put(ns.hash(range(1024)), payloads(range(64), size=4096), deadline_ms=20_000).n_there == 64
"""

PREFIX_READER = """
import sys, numpy as np, kvpool
from tests.support.payload import check
with kvpool.connect(sys.argv[1], deadline_ms=60_000) as client:
    ns = client.namespace("b08", kvpool.KVLayout.opaque(block_bytes=4096, block_tokens=16), salt=b"s")
    out, hashes = np.zeros((64, 4096), np.uint8), ns.hash(range(1024))
    assert ns.match(hashes, deadline_ms=20_000) == ns.get(hashes, out, deadline_ms=20_000).n_blocks == 64
    assert all(check(i, row) for i, row in enumerate(out))
    print(ns.match(ns.hash(range(1024), extra=b""), deadline_ms=20_000))
"""


def test_B08_keys_are_the_same_in_every_process(pool: Cluster) -> None:
    """One Python version is at hand."""
    seeds: list[dict[str, str]] = [{}, {"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "1"}]
    writer = python(PREFIX_WRITER, pool.master_address, env=seeds[1])
    told = [said(one) for one in [python(HASHING, env=seed) for seed in seeds]]
    lines = [line for one in told for line in one.splitlines()]
    assert (len(lines), len(set(lines))) == (6, 1)
    assert len({lines[0][i : i + 64] for i in range(0, len(lines[0]), 64)}) == 2 * 2 * (64 * 2 + 63), "and otherwise differ"
    said(writer)
    assert said(python(PREFIX_READER, pool.master_address, env=seeds[2])) == "64"


def test_B30_an_image_is_part_of_every_key_from_it_on(connect: Connect) -> None:
    n, before = scaled(200, 2000), 4
    ns = connect().namespace("b30", opaque(64, block_tokens=16), create=True)
    tokens = np.array([*range(1, 65), *[32_000] * 576, *range(65, 129)])
    chance = random.Random(30)
    images = [chance.randbytes(32) for _ in range(n - 100)]
    images += [images[i][:8] + chance.randbytes(24) for i in range(50)]
    images += [chance.randbytes(24) + images[i][-8:] for i in range(50)]
    chains = [ns.hash(tokens, extra=[(64, 640, image)]) for image in images]
    chains += [ns.hash(tokens, extra=[(64 + shift, 640, images[0])]) for shift in (1, 15, 16)]
    chains += [ns.hash(tokens, extra=[(64, 639, images[0])]), ns.hash(tokens)]
    for block in range(len(chains[0])):
        distinct = len({bytes(one[block : block + 1]) for one in chains})
        assert distinct == (1 if block < before else len(chains) - 1 if block == before else len(chains)), block
    assert chains[n + 2][before] == chains[n + 4][before], "an image that begins a block later is not in this one"
    data = payloads(range(44), size=64)
    assert ns.put(chains[0], data).n_there == 44
    out = np.zeros_like(data)
    for other in chains[1:]:
        got = ns.get(other, out)
        assert (got.n_blocks, got.miss) == (before, MissCause.NEVER_STORED)
    assert {ns.match(other) for other in chains[1:50]} == {before}
    assert ns.get(ns.hash(tokens, extra=[(64, 640, images[0])]), out).n_blocks == 44
    assert (out == data).all()


@pytest.mark.parametrize("ssd", [False, True], ids=["dram", "both tiers"])
def test_B58_a_prefix_gets_no_hole_and_its_tail_goes_first(make_cluster: MakeCluster, ssd: bool) -> None:
    """Both tiers: the pool is what both have; a disk may keep what was used before rather than take what was used once."""
    block, n, room = 64 * KIB, 128, 256
    cluster = make_cluster(dram="4MiB" if ssd else "16MiB", ssd="13MiB" if ssd else None)
    client = cluster.connect()
    ns = client.namespace("b58", opaque(block), create=True)
    hashes, data = ns.hash(range(n)), payloads(range(n), size=block)

    def put(first: int, stop: int) -> list[Outcome]:
        outcomes = []
        for at in range(first, stop, 16):
            outcomes += ns.put(hashes[at : at + 16], data[at : at + 16], deadline_ms=20_000).outcomes
        return outcomes

    def there() -> list[bool]:
        return [ns.match(hashes[i : i + 1]) == 1 for i in range(n)]  # a lookup at the master is no use

    assert put(0, n) == [Outcome.STORED] * n
    assert ns.remove(hashes[:1]).outcomes == [RemoveOutcome.REMOVED]
    out = np.zeros((n, block), np.uint8)
    assert ns.match(hashes) == ns.touch(hashes) == ns.get(hashes, out).n_blocks == 0, "the gap is at the head"
    assert ns.match(hashes[5:6]) == 1 and ns.get(hashes[5:6], out[:1]).n_blocks == 1, "but each is there by its key"
    assert out[0].tobytes() == data[5].tobytes()
    assert put(0, n) == [Outcome.STORED] + [Outcome.ALREADY] * (n - 1)
    for _ in range(10):
        assert ns.match(hashes) == n
        for at in range(n // 2, n, 16):
            assert ns.get(hashes[at : at + 16], out[:16], deadline_ms=10_000).n_blocks == 16
    other = keyed(client, "other", block)
    found: list[bool] = []
    for turn in range(0, 16 * room, 16):  # the policy may prefer what was used often, for a while
        assert store(other, *range(turn, turn + 16), deadline_ms=20_000).n_there == 16
        if turn >= room - n // 2 and turn % 64 == 0:
            found = there()
            kept = found.index(False) if False in found else n
            assert not any(found[kept:]), f"no prefix: {''.join('.x'[one] for one in found)}"
            if kept <= n // 2 or (ssd and kept < n and turn > 2 * room):
                break
    assert kept < n, "nothing of the chain ever goes"
    assert ns.get(hashes, out).n_blocks == ns.match(hashes) == kept
    assert (out[:kept] == data[:kept]).all()


def test_B64_keys_are_compared_whole_in_every_tier(make_cluster: MakeCluster) -> None:
    """Keys are bytes, so integers wrap nowhere; token ids are integers of 32 bits, others are refused."""
    n, chance = scaled(200, 1000), random.Random(64)
    cluster = make_cluster(dram="1MiB", ssd="16MiB")
    ns = keyed(cluster.connect(), "b64", 4096)
    ours, theirs = [], []
    for _ in range(n):
        one, other, bit = chance.randbytes(32), chance.randbytes(24), chance.randrange(256)
        ours += [one, one[::-1], one[16:] + one[:16]]
        flipped = (int.from_bytes(ours[-1], "big") ^ 1 << bit).to_bytes(32, "big")
        theirs += [one[:8] + other, other + ours[-2][-8:], flipped]
    for at in range(0, 3 * n, 50):
        part = ours[at : at + 50]
        assert ns.put(ns.hashes(part), payloads([one.hex() for one in part], size=4096), deadline_ms=10_000).n_there == len(part)
    hits = [0]

    def no_cross_hits() -> None:
        role = cluster.worker()
        with RawClient(role.address) as raw:
            answer, _ = raw.read(ns.hashes(theirs).key_batch(ns._spec.uid))
            assert not (answer.entries["code"] < 32).any(), "one of a pair was served for the other"
        out = np.zeros((1, 4096), np.uint8)
        for mine, other in list(zip(ours, theirs, strict=True))[:: scaled(10, 1)]:
            assert ns.match(ns.hashes([other])) == ns.get(ns.hashes([other]), out).n_blocks == 0
            if ns.get(ns.hashes([mine]), out).n_blocks:
                check(mine.hex(), out[0])
                hits[0] += 1

    no_cross_hits()
    assert hits[0] == len(ours[:: scaled(10, 1)])
    told = metrics(cluster.worker())
    assert told['kvpool_tier_blocks{tier="ssd"}'] > n, "most lie on disk"
    cluster.worker().stop()
    cluster.start_worker(0)
    wait_until(lambda: cluster.connect().describe()["complete"])
    hits[0] = 0
    no_cross_hits()
    assert hits[0] > 0, "found again in the files"
    for digest in (b"x" * 7, b"", b"x" * 65):
        with pytest.raises(InvalidArgument, match=r"digests\[0\].*8"):
            ns.hashes([digest])
    lengths = [b"k" * 8, b"k" * 9, b"k" * 16, b"k" * 31, b"k" * 32, b"k" * 33, b"k" * 64, (b"k" * 8).ljust(32, b"\0")]
    assert len({bytes(ns.hashes([one])) for one in lengths}) == len(lengths)


@pytest.mark.parametrize("kind", ["sha256", "xxh3_128"])
def test_B64_token_blocks_do_not_collide(connect: Connect, kind: str) -> None:
    n = scaled(40_000, 200_000)
    ns = connect().namespace(f"b64-{kind}", opaque(64, block_tokens=16), create=True, hash=kind)
    tokens = np.random.default_rng(64).integers(0, 128_000, 16 * n, dtype=np.uint32)
    digests = bytes(ns.hash(tokens))
    assert len(digests) == 32 * n, "256 bits each"
    assert len({digests[i : i + 32] for i in range(0, len(digests), 32)}) == n
    assert len({digests[i : i + 8] for i in range(0, len(digests), 32)}) == n
    for k in (0, 1, 7, 2**31, 2**32 - 1):
        one = ns.hash([k] * 16)
        for wrong in (k + 2**32, k + 2**64, -k - 1):
            with pytest.raises(InvalidArgument, match="token"):
                ns.hash([wrong] * 16)
        assert one != ns.hash([(k + 1) % 2**32] * 16)
    with pytest.raises(InvalidArgument, match="token"):
        ns.hash([1.5] * 16)


# --- protocol ------------------------------------------------------------------------------------------------------------

TINY = kvpool.KVLayout(model="tiny", revision="1", dtype="float16", n_layers=1, n_kv_heads=1, head_dim=16, block_tokens=1,
                       format="NHD/1")  # fmt: skip
assert TINY.block_bytes == 64


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_B43_blocks_around_the_message_limit(connect: Connect, transport: str) -> None:
    ns = keyed(connect(transport=transport), f"b43-{transport}", 64 * MIB)
    for size in (4_194_303, 4_194_304, 4_194_305, 16 * MIB, scaled(20, 64) * MIB):
        assert store(ns, size, size=size, deadline_ms=20_000).outcomes == [Outcome.STORED]
        assert read(ns, size, size=size, deadline_ms=20_000)
        ns.remove(key(ns, size))
    with pytest.raises(InvalidArgument, match=str(64 * MIB)):
        ns.put(key(ns, "more"), [np.zeros(64 * MIB + 1, np.uint8)])
    with pytest.raises(InvalidArgument, match=str(1 << 30)):
        opaque((1 << 30) + 1)


@pytest.mark.timeout(scaled(60, 1200))
def test_B43_batches_of_any_number_of_keys(make_cluster: MakeCluster) -> None:
    """64 bytes a key; what one call sends as one message is limited to 16,384 blocks by name (holds, put sessions)."""
    cluster = make_cluster(dram=scaled("64MiB", "512MiB"))
    client = cluster.connect()
    deadline: dict[str, Any] = {"deadline_ms": scaled(30_000, 300_000)}
    for n in (1, 1_000, *scaled((17_000,), (10_000, 100_000, 1_000_000))):
        ns = client.namespace(f"b43-{n}", TINY, create=True, hash="external")
        rows = np.arange(n * 32, dtype=np.uint16).reshape(n, 32).view(np.uint8)
        hashes = ns.hashes([i.to_bytes(8, "little") * 8 for i in range(n)])
        assert ns.match(hashes, **deadline) == ns.get(hashes, np.zeros_like(rows), **deadline).n_blocks == 0
        assert ns.put(hashes, rows, **deadline).count(Outcome.STORED) == n
        out = np.zeros_like(rows)
        assert ns.match(hashes, **deadline) == ns.get(hashes, out, **deadline).n_blocks == n
        assert (out == rows).all()
        if n < MAX_BATCH_KEYS:
            continue
        for call in (lambda: ns.hold(hashes), lambda: ns.put_session(hashes)):
            with pytest.raises(InvalidArgument, match=str(MAX_BATCH_KEYS)):
                call()
        if n >= scaled(17_000, 100_000):
            listed = run_cli("ls", ns.name, "--limit", min(n, 500_000), "--json", "--master", cluster.master_address,
                             "--deadline", "120s", timeout_s=300)  # fmt: skip
            assert len(json.loads(listed.stdout)["blocks"]) == min(n, 500_000), listed.stderr
            assert cluster.master is not None
            cluster.master.stop()
            cluster.start_master()
            fresh = cluster.connect(mirror=False).namespace(ns.name, TINY, hash="external")
            wait_until(lambda: fresh.match(hashes, **deadline) == n, timeout_s=scaled(20, 60), what="all are registered again")
        assert ns.remove(hashes, **deadline).count(RemoveOutcome.REMOVED) == n
        assert ns.match(hashes, **deadline) == 0
    long = client.namespace("b43-long", opaque(64, block_tokens=16), create=True)
    hashes = long.hash(np.arange(1_000_000, dtype=np.uint32))
    assert len(hashes) == 62_500
    assert long.match(hashes, **deadline) == 0
    assert long.put(hashes[:5], [b"x"] * 5).n_there == 5
    assert long.match(hashes, **deadline) == 5


def test_B43_one_message_past_the_limit_names_it(pool: Cluster, connect: Connect) -> None:
    ns = keyed(connect(), "b43-raw", 64)
    uid = ns._spec.uid
    n = MAX_BATCH_KEYS + 1
    with open_channel(pool.master_address) as channel:
        stub = master_pb2_grpc.MasterStub(channel)
        for call in (
            lambda: stub.Match(pb.MatchRequest(namespace=uid, hashes=bytes(32 * n), shards=[0]), timeout=5),
            lambda: stub.Locate(pb.LocateRequest(namespace=uid, keys=bytes(KEY_BYTES * n)), timeout=5),
            lambda: stub.Remove(pb.RemoveRequest(namespace=uid, keys=bytes(KEY_BYTES * n)), timeout=5),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(MAX_BATCH_KEYS) in refused.value.details()
        for size in (4 * MIB - 20, 4 * MIB, 4 * MIB + 1, 16 * MIB):  # past gRPC's own limit: still the master's own answer
            with pytest.raises(grpc.RpcError) as refused:
                stub.Match(pb.MatchRequest(namespace=uid, hashes=bytes(size // 32 * 32), shards=[0]), timeout=5)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value


def forged(uid: NamespaceUid, chance: random.Random) -> list[tuple[Op, bytes, Flag]]:
    """Requests that are well-formed and name what the worker never gave out."""
    batch = KeyBatch(uid, chance.randbytes(KEY_BYTES))
    stranger = KeyBatch(NamespaceUid(chance.randbytes(16)), chance.randbytes(KEY_BYTES))
    number = struct.pack("<Q", chance.getrandbits(64))
    return [
        (Op.READ, ReadRequest(stranger).encode(), Flag.NONE),
        (Op.READ, ReadRequest(batch, 1 << 40, 1 << 40).encode(), Flag.NONE),
        (Op.READ, ReadRequest(batch, hold_id=HoldId(chance.getrandbits(63))).encode(), Flag.NONE),
        (Op.READ, ReadRequest(batch).encode(), Flag.SHARED),
        (Op.TOUCH, KeysRequest(stranger).encode(), Flag.NONE),
        (Op.DROP, KeysRequest(stranger).encode(), Flag.NONE),
        (Op.COMMIT, number, Flag.NONE),
        (Op.ABORT, number, Flag.NONE),
        (Op.ATTACH, uid, Flag.NONE),
        (Op.RING, b"", Flag.NONE),
        (Op.WRITE, write_meta(batch, [b"x" * 10], chunk_bytes=262144, sums=np.zeros(1, np.uint64)), Flag.RING),
    ]


def test_B49_every_call_is_answered_whatever_goes_wrong_inside(make_cluster: MakeCluster) -> None:
    """No GPU tier in this version: a device is refused at the command line. One finished item: a key that was removed between two
    calls on the same hold."""
    rounds = scaled(20, 100)
    cluster = make_cluster(dram="8MiB", ssd="64MiB")
    worker, client = cluster.worker(), cluster.connect()
    ns = keyed(client, "b49", MIB)
    for name in range(16):
        assert store(ns, name, deadline_ms=5_000).n_there == 1
    slabs = wait_until(lambda: sorted(cluster.ssd_dir(0).glob("slab-*")))
    uid, chance, slowest = ns._spec.uid, random.Random(49), 0.0

    def timed(call: Callable[[], Any]) -> Any:
        nonlocal slowest
        began = time.monotonic()
        try:
            return call()
        finally:
            slowest = max(slowest, time.monotonic() - began)

    before = usage(worker)
    own = psutil.Process()
    with RawClient(worker.address) as raw, open_channel(cluster.master_address) as channel:
        stub = master_pb2_grpc.MasterStub(channel)
        strange = chance.randbytes(16)
        to_master = [
            lambda: stub.Match(pb.MatchRequest(namespace=strange, hashes=bytes(32), shards=[0]), timeout=5),
            lambda: stub.Match(pb.MatchRequest(namespace=uid, hashes=bytes(33), shards=[0]), timeout=5),
            lambda: stub.Locate(pb.LocateRequest(namespace=b"", keys=bytes(KEY_BYTES)), timeout=5),
            lambda: stub.Remove(pb.RemoveRequest(namespace=uid, keys=b"x"), timeout=5),
            lambda: stub.Place(pb.PlaceRequest(namespace=strange, n_workers=2**31), timeout=5),
            lambda: stub.OpenNamespace(pb.OpenNamespaceRequest(name="b49", fingerprint=b"other"), timeout=5),
            lambda: stub.CreateNamespace(pb.CreateNamespaceRequest(namespace=pb.Namespace(name="x", layout="{")), timeout=5),
        ]
        rss = own.memory_info().rss
        for turn in range(rounds):
            for op, meta, flags in forged(uid, chance):
                try:
                    answer = timed(lambda op=op, meta=meta, flags=flags: raw.call(op, meta, flags=flags))
                except ConnectionError:  # answered by closing: the next call has a new connection
                    raw.close()
                    raw.__init__(worker.address)  # type: ignore[misc]
                    continue
                assert answer.status is Status.OK or answer.meta, op
            for number, call in enumerate(to_master):
                with pytest.raises(grpc.RpcError) as error:
                    pytest.fail(f"call {number} was taken: {timed(call)}")
                assert error.value.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN), error.value
                assert error.value.details()
            stranger = timed(lambda: next(iter(stub.Session(iter([pb.WorkerMessage()]), timeout=5))))
            assert stranger.refused.code == "invalid_argument"
            for wrong in (lambda: ns.get(b"x", [bytearray(1)]), lambda: ns.put(key(ns, 1), [3]), lambda: ns.match("a"),
                          lambda: ns.get(key(ns, 1), [bytearray(MIB)], hold=b"forged"), lambda: ns.remove([1])):  # fmt: skip
                with pytest.raises(InvalidArgument):
                    timed(wrong)
            assert read(ns, 15), "others are not affected"
        assert own.memory_info().rss < rss + 20 * MIB
    assert slowest < 1.0 + scaled(1.0, 0.0), slowest
    hold = ns.hold(key(ns, 14, 15), ttl_ms=20_000)
    assert hold.n_blocks == 2
    assert ns.remove(key(ns, 15)).count(RemoveOutcome.REMOVED) == 1
    out = np.zeros((2, MIB), np.uint8)
    got = ns.get(key(ns, 14, 15), out, hold=hold)
    assert (got.n_blocks, got.miss) == (1, MissCause.REMOVED)
    check(14, out[0])
    hold.release()
    for slab in slabs:
        slab.unlink()
        slab.mkdir()
    for name in range(14):  # a file is a directory now: what lay there only is a miss
        timed(lambda name=name: read(ns, name))
    for name in range(100, 108):
        assert store(ns, name, deadline_ms=10_000).n_there == 1, "puts go on"
        assert read(ns, name)
    wait_until(lambda: settled(worker))
    after = usage(worker)
    assert after.fds <= before.fds + 2 and after.threads <= before.threads + 6 and after.rss < before.rss + 64 * MIB
    assert "Traceback" not in worker.log_text()
    assert run_cli("worker", "--device", "cuda:99:1GiB").returncode == 2


@contextlib.contextmanager
def at_work(ns: kvpool.Namespace, took: list[float]) -> Iterator[None]:
    """A normal client beside it: put, get, CHECK."""

    def one(turn: int) -> None:
        began, name = time.monotonic(), f"{id(took)}/{turn}"
        done = store(ns, name, deadline_ms=5_000)
        assert done.outcomes == [Outcome.STORED] or (FULL and done.outcomes == [Outcome.UNLISTED]), done
        assert read(ns, name, deadline_ms=5_000)
        took.append(time.monotonic() - began)

    with meanwhile(one):
        yield


def dial(address: str) -> socket.socket:
    if address.startswith("@"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect("\0" + address[1:])
        return sock
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def closed_by_peer(sock: socket.socket, *, timeout_s: float = 10.0) -> bool:
    sock.settimeout(timeout_s)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"


def test_B56_scans_and_garbage_on_every_port(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram="64MiB")
    worker, master = cluster.worker(), cluster.master
    assert master is not None
    ns = keyed(cluster.connect(), "b56", 64 * KIB)
    doors = [(role, address) for role in (worker, master) for address in listening(role)]
    assert len(doors) == 5, doors  # data (TCP, unix), gRPC, two of HTTP
    chance = random.Random(56)
    half = Header(Op.HELLO, request_id=1, deadline_ms=1000, meta_bytes=100).encode() + b"{" * 50
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500)
    offers = [chance.randbytes(MIB), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", hello, half, half[:20],
              PREFACE + SETTINGS + b"\0\xff\xff", PREFACE + SETTINGS + b"\0\0\x10\x01\x04\0\0\0\x01" + bytes(7)]  # fmt: skip
    took: list[float] = []
    with at_work(ns, took):
        wait_until(lambda: len(took) > 5)
        before = {role.pid: usage(role) for role in (worker, master)}
        for _, address in doors:
            for _ in range(scaled(50, 500)):
                dial(address).close()
            for _ in range(scaled(20, 200)):
                with dial(address) as sock:
                    sock.sendall(chance.randbytes(1))
            for data in offers:
                for reset in (False, True):
                    with dial(address) as sock:
                        with contextlib.suppress(OSError):
                            sock.sendall(data)
                        if reset and sock.family != socket.AF_UNIX:
                            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if not address.startswith("@"):
                plain = ssl.create_default_context()
                plain.check_hostname = False
                with dial(address) as sock, contextlib.suppress(OSError):
                    sock.settimeout(0.3)
                    plain.wrap_socket(sock)
    for role in (worker, master):
        was = before[role.pid]
        wait_until(lambda role=role, was=was: usage(role).fds <= was.fds and not half_closed(role), timeout_s=BACK_S)
        assert usage(role).threads <= was.threads + 6
        assert usage(role).rss < was.rss + 96 * MIB
        assert role.log.stat().st_size < scaled(1, 10) * MIB
        assert "Traceback" not in role.log_text()
        assert http_get(role, "/readyz")[0] == 200


def test_B57_long_calls_leave_room_for_short_ones(make_cluster: MakeCluster, make_proxy: Callable[..., Any]) -> None:
    n_long, seconds, bulk = scaled(14, 20), scaled(2.0, 60.0), scaled(32, 512)
    cluster = make_cluster(dram=f"{2 * bulk + 64}MiB", worker_args=RELAYED)
    worker, master = cluster.worker(), cluster.master
    assert master is not None
    slow_client = cluster.connect(transport="tcp")
    proxy = relayed(make_proxy, worker)
    slow, ns = keyed(slow_client, "slow", MIB), keyed(cluster.connect(transport="shm"), "short", 64 * KIB)
    big = keyed(cluster.connect(transport="shm"), "bulk", bulk * MIB)
    assert store(ns, "k").n_there == 1 and read(ns, "k")
    bytes_ = payload("bulk", 1, bulk * MIB)
    took: dict[str, list[float]] = {what: [] for what in ("health", "metrics", "exists", "get")}
    incarnation = ns.stats() and cluster.connect().describe()["workers"][0]["incarnation"]
    proxy.pass_on(bytes_per_s=64 * KIB)
    stop = threading.Event()

    def long_put(i: int) -> Callable[[], None]:
        def call() -> None:
            with contextlib.suppress(KVPoolError):
                store(slow, f"long-{i}", deadline_ms=seconds * 1000)

        return call

    def waiter(i: int) -> Callable[[], None]:
        other = cluster.connect(mirror=i % 2 == 0).namespace("short", opaque(64 * KIB), hash="external")
        return lambda: other.wait(key(other, "never"), deadline_ms=seconds * 1000) and None

    def bulk_put(turn: int) -> None:
        if not stop.is_set():
            hashes = key(big, f"bulk-{turn % 3}")
            big.put(hashes, [bytes_], deadline_ms=20_000)
            out = bytearray(bulk * MIB)
            got = big.get(hashes, [out], deadline_ms=20_000)
            assert not got.n_blocks or out == bytes_
            big.remove(hashes, deadline_ms=5_000)
        stop.wait(scaled(0.5, 1.0))

    def short(_: int) -> None:
        for what, call in (
            ("health", lambda: [http_get(role, "/healthz") for role in (worker, master)]),
            ("metrics", lambda: [metrics(role) for role in (worker, master)]),
            ("exists", lambda: ns.match(key(ns, "k"))),
            ("get", lambda: read(ns, "k")),
        ):
            began = time.monotonic()
            assert call()
            took[what].append(time.monotonic() - began)
        stop.wait(0.01)

    threads = [threading.Thread(target=call) for call in [*map(long_put, range(n_long)), *map(waiter, range(scaled(4, 20)))]]
    for thread in threads:
        thread.start()
    with meanwhile(short, bulk_put) as counts:
        wait_until(lambda: counts[0] > 20 and counts[1] > 1 and not any(thread.is_alive() for thread in threads),
                   timeout_s=seconds + 20)  # fmt: skip
        stop.set()
    for thread in threads:
        thread.join()
    for what, times in took.items():
        times.sort()
        assert times[len(times) // 2] < 0.2 and times[len(times) * 99 // 100 - 1] < scaled(1.0, 0.2), (what, times[-5:])
    observer = cluster.connect()

    def states() -> list[tuple[int, str]]:
        return [(one["incarnation"], one["state"]) for one in observer.describe()["workers"]]

    # Clients whose calls ran out of time report the worker, which makes it suspect until its next heartbeat; it is never lost.
    wait_until(lambda: states() == [(incarnation, "up")], timeout_s=5)
    assert cluster.master is not None and "event=worker_lost" not in cluster.master.log_text()
    proxy.pass_on()
    wait_until(lambda: settled(worker))


def test_B57_calls_that_nobody_waits_for_any_more_are_dropped(make_cluster: MakeCluster) -> None:
    n = scaled(1_000, 10_000)
    cluster = make_cluster(dram="64MiB")
    assert cluster.master is not None
    ns = keyed(cluster.connect(), "b57", 64 * KIB)
    hashes = ns.hashes([i.to_bytes(8, "little") for i in range(2_000)])
    assert ns.match(hashes) == 0
    worker = cluster.worker()
    with open_channel(cluster.master_address) as channel:
        stub = master_pb2_grpc.MasterStub(channel)
        request = pb.MatchRequest(namespace=ns._spec.uid, hashes=bytes(hashes), shards=[0])
        assert stub.Match(request, timeout=5).n_blocks == 0
        cluster.master.pause()
        calls = [stub.Match.future(request, timeout=1.0) for _ in range(n)]
        codes = {call.exception().code() for call in calls}
        # (UNAVAILABLE: at full size the master stands still for so long that the channel gives the connection up)
        assert grpc.StatusCode.DEADLINE_EXCEEDED in codes, codes
        assert codes <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}, codes
        cluster.master.resume()
        began = time.monotonic()
        assert stub.Match(request, timeout=5).n_blocks == 0
        assert time.monotonic() - began < 5.0
    with RawClient(worker.address) as raw:
        batch = ns.hashes([b"x" * 8]).key_batch(ns._spec.uid)
        worker.pause()
        for _ in range(200):  # one after the other on a connection: the worker finds all of them late
            raw.send(Op.TOUCH, KeysRequest(batch).encode(), deadline_ms=100)
        pause(0.3)
        worker.resume()
        began = time.monotonic()
        for _ in range(200):
            assert raw.receive().status in (Status.OK, Status.DEADLINE)
        assert time.monotonic() - began < 2.0
    assert store(ns, "after", deadline_ms=5_000).n_there == 1 and read(ns, "after")


IDLE_CLIENT = """
import sys, time, kvpool
with kvpool.connect(sys.argv[1], transport="tcp", deadline_ms=60_000) as client:
    ns = client.namespace("idle", kvpool.KVLayout.opaque(block_bytes=64), create=True)
    hashes = ns.hash([1])
    assert ns.put(hashes, [b"x"]).n_there == 1
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.monotonic()
        assert ns.get(hashes, [bytearray(64)]).n_blocks == ns.match(hashes) == 1
        print(time.monotonic() - began, flush=True)
"""


def test_B78_pings_of_idle_connections_are_no_flood(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Workers do not talk to each other in this version. Scaled: the pings of six idle minutes are sent in seconds, by a client
    that pings much more often than the pool's own."""
    loud = {"GRPC_VERBOSITY": "info"}
    cluster = make_cluster(dram="16MiB", env=loud)
    log = tmp_path / "client.log"
    with log.open("wb") as stderr:
        client = python(IDLE_CLIENT, cluster.master_address, env=loud, stderr=stderr)
    options = [("grpc.keepalive_time_ms", 50), ("grpc.keepalive_permit_without_calls", 1),
               ("grpc.http2.max_pings_without_data", 0), ("grpc.use_local_subchannel_pool", 1)]  # fmt: skip
    states: list[grpc.ChannelConnectivity] = []
    with ended(client), grpc.insecure_channel(cluster.master_address, options=options) as pinging:
        assert client.stdout is not None and client.stdin is not None
        assert client.stdout.readline() == "ready\n"
        grpc.channel_ready_future(pinging).result(timeout=10)
        pinging.subscribe(states.append)
        for _ in range(scaled(1, 4)):
            pause(scaled(1.5, 90.0))
            client.stdin.write("\n")
            client.stdin.flush()
            assert float(client.stdout.readline()) < 0.1 + scaled(0.4, 0.1)
        assert set(states) <= {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE}, states
        master_pb2_grpc.MasterStub(pinging).Describe(pb.DescribeRequest(), timeout=5)
        client.communicate(timeout=20)
        assert client.returncode == 0
    assert cluster.master is not None
    for text in (log.read_text(), cluster.master.log_text(), cluster.worker().log_text()):
        assert "too_many_pings" not in text and "ENHANCE_YOUR_CALM" not in text and "GOAWAY" not in text, text[-2000:]


def test_B78_an_idle_connection_that_died_silently_costs_one_deadline(make_cluster: MakeCluster,
                                                                      make_proxy: Callable[..., Any]) -> None:  # fmt: skip
    cluster = make_cluster(dram="16MiB", worker_args=RELAYED)
    data, index = relayed(make_proxy, cluster.worker()), make_proxy(cluster.master_address)
    ns = keyed(cluster.connect(index.address, transport="tcp", deadline_ms=10_000), "b78", 64 * KIB)
    assert store(ns, "k").n_there == 1 and read(ns, "k")

    def within(deadline_ms: int, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        result = call()
        assert time.monotonic() - began < deadline_ms / 1e3 + SLACK_S
        return result

    data.blackhole()
    index.blackhole()
    pause(scaled(0.2, 60.0))
    assert within(1000, lambda: read(ns, "k", deadline_ms=1000)) is False, "a miss, in time"
    assert within(1000, lambda: ns.match(key(ns, "k"), deadline_ms=1000)) == 1, "the mirror still knows"
    data.cut()
    index.cut()
    data.pass_on()
    index.pass_on()
    assert wait_until(lambda: within(1000, lambda: read(ns, "k", deadline_ms=1000)), timeout_s=15)
    assert wait_until(lambda: store(ns, "other", deadline_ms=2000).outcomes == [Outcome.STORED], timeout_s=15)


def test_B84_slow_senders_on_every_port_starve_nobody(make_cluster: MakeCluster) -> None:
    """Workers' ports are at work as well in `test_dataplane_garbage`; here those of the master count too, and HTTP/2 streams."""
    n, seconds = scaled(300, 1000), scaled(6.0, 120.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    cluster = make_cluster(dram=f"{scaled(64, 160)}MiB", env={"KVPOOL_WORKER__BODY_TIMEOUT_MS": "2000"})
    worker, master = cluster.worker(), cluster.master
    assert master is not None
    ns = keyed(cluster.connect(transport="tcp"), "b84", 64 * KIB)
    large = keyed(cluster.connect(), "b84-large", MIB)
    assert store(large, 0).n_there == 1
    quiet: list[float] = []
    with at_work(ns, quiet):
        wait_until(lambda: len(quiet) >= 40)
    before = {role.pid: usage(role) for role in (worker, master)}
    slow: list[tuple[socket.socket, bytes]] = []
    half: list[RawClient] = []
    loaded: list[float] = []
    http_text = b"GET /healthz HTTP/1.1\r\nX-Slow: " + b"a" * 1000
    frame = Header(Op.HELLO, request_id=1, deadline_ms=60_000, meta_bytes=100).encode()
    try:
        for role in (worker, master):
            for address in listening(role):
                sent = http_text if address == role.http else PREFACE if address == master.address else frame
                slow += [(dial(address), sent) for _ in range(n)]
        streams = [dial(master.address) for _ in range(scaled(10, 1000))]
        for sock in streams:  # 100 open streams each that never send their data
            headers = b"\x83\x86\x84\x41\x01x\x5f\x10application/grpc"
            begin = struct.pack(">I", len(headers))[1:] + b"\x01\x04"
            sock.sendall(PREFACE + SETTINGS + b"".join(begin + struct.pack(">I", 2 * i + 1) + headers for i in range(100)))
            slow.append((sock, b""))
        for i in range(scaled(16, 64)):
            raw = RawClient(worker.address)
            half.append(raw)
            meta = write_meta(key(large, f"half-{i}").key_batch(large._spec.uid), [bytes(MIB)], chunk_bytes=262144)
            raw.send(Op.WRITE, meta, payload=b"x", payload_bytes=MIB, deadline_ms=600_000)
        with at_work(ns, loaded):
            end, turn = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                for sock, sent in slow:
                    with contextlib.suppress(OSError):
                        sock.send(sent[turn : turn + 1], socket.MSG_DONTWAIT)
                turn += 1
                assert http_get(worker, "/healthz")[0] == 200
                pause(scaled(0.5, 5.0))
            for role in (worker, master):
                status, text = http_get(role, "/healthz")
                assert status == 200, f"{role.args[0]}: {status} {text}: its connections are all taken by slow senders"
        for role in (worker, master):
            assert usage(role).rss < before[role.pid].rss + 500 * MIB
            assert usage(role).threads <= before[role.pid].threads + 8
        for sock, sent in slow:
            if sent not in (PREFACE, b""):  # (gRPC keeps quiet connections by its own pings)
                assert closed_by_peer(sock), f"{sock.getpeername()}: still waits for the rest of {sent[:20]!r}"
        quiet.sort()
        loaded.sort()
        assert loaded[len(loaded) // 2] < 5 * quiet[len(quiet) // 2] + 0.05
        wait_until(lambda: now(worker, "reserved") == 0, timeout_s=10, what="half-sent puts give their slots back")
    finally:
        for sock, _ in slow:
            sock.close()
        for raw in half:
            raw.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for role in (worker, master):
        wait_until(lambda role=role: usage(role).fds <= before[role.pid].fds + 4, timeout_s=BACK_S)
