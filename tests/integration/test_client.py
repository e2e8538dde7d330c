"""The client against a real master and real workers, while all is well. What fails and comes back: `fault`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.core.types import MissCause, Outcome, RemoveOutcome, Tier
from kvpool.errors import (
    ConfigError,
    InvalidArgument,
    LayoutMismatch,
    MasterUnavailable,
    NamespaceNotFound,
)
from tests.support.cluster import Cluster
from tests.support.payload import check, payloads
from tests.support.processes import cli_env

BLOCK = 16_384
LAYOUT = kvpool.KVLayout(model="m", revision="r", dtype="float16", n_layers=4, n_kv_heads=2, head_dim=32, block_tokens=16,
                         format="NHD/1")  # fmt: skip
OPAQUE = kvpool.KVLayout.opaque(block_bytes=BLOCK, block_tokens=4)

assert LAYOUT.block_bytes == 2 * 4 * 2 * 32 * 16 * 2


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers that all tests of this module share; each test has its own namespaces."""
    cluster = Cluster(tmp_path_factory.mktemp("pool"), n_workers=2, dram="64MiB").start()
    yield cluster
    cluster.stop()


@pytest.fixture
def connect(pool: Cluster) -> Iterator[Callable[..., kvpool.Client]]:
    clients: list[kvpool.Client] = []

    def make(**settings: Any) -> kvpool.Client:
        clients.append(kvpool.connect(pool.master_address, **settings))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def chain(namespace: kvpool.Namespace, n: int, *, first: int = 0) -> kvpool.PrefixHashes:
    tokens = namespace.layout.block_tokens
    return namespace.hash(range(first, first + n * tokens))


def empty(n: int, size: int = BLOCK) -> np.ndarray[Any, Any]:
    return np.zeros((n, size), np.uint8)


def stored(namespace: kvpool.Namespace, n: int, *, first: int = 0) -> tuple[kvpool.PrefixHashes, np.ndarray[Any, Any]]:
    hashes, data = chain(namespace, n, first=first), payloads(range(first, first + n), size=namespace.block_bytes)
    put = namespace.put(hashes, data)
    assert put.outcomes == [Outcome.STORED] * n, put
    return hashes, data


READER = """
import sys, numpy as np, kvpool
from tests.support.payload import check
client = kvpool.connect(sys.argv[1], transport=sys.argv[2], mirror=sys.argv[3] == "mirror")
layout = kvpool.KVLayout.opaque(block_bytes=16384, block_tokens=4)
ns = client.namespace("between", layout)
out = np.zeros((20, 16384), np.uint8)
got = ns.get(ns.hash(range(80)), out)
assert got.n_blocks == 20 and got.miss is None, got
for i, row in enumerate(out):
    check(i, row)
print({source.transport for source in got.sources})
client.close()
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("mirror", ["mirror", "asked"])
def test_put_here_got_in_another_process(pool: Cluster, connect: Callable[..., Any], transport: str, mirror: str) -> None:
    ns = connect(transport=transport).namespace("between", OPAQUE, create=True)
    hashes, data = chain(ns, 20), payloads(range(20), size=BLOCK)
    assert ns.put(hashes, data).n_there == 20
    done = subprocess.run([sys.executable, "-c", READER, pool.master_address, transport, mirror], text=True, timeout=60,
                          capture_output=True, env=cli_env(), cwd=Path(__file__).parents[2], check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str({transport})


@pytest.mark.parametrize("mirror", [True, False])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_was_put_is_got_by_itself_and_by_others(connect: Callable[..., Any], transport: str, mirror: bool) -> None:
    one, two = connect(transport=transport, mirror=mirror), connect(mirror=mirror)
    name = f"others-{transport}-{mirror}"
    ns, other = one.namespace(name, LAYOUT, create=True), two.namespace(name, LAYOUT)
    hashes, data = stored(ns, 70)
    for reader in (ns, other):
        out = empty(70)
        got = reader.get(hashes, out)
        assert (got.n_blocks, got.miss, got.complete, got.sizes) == (70, None, True, [BLOCK] * 70)
        assert (out == data).all()
        assert {source.tier for source in got.sources} == {Tier.DRAM}
    assert {source.transport for source in ns.get(hashes, empty(70)).sources} == {transport}
    assert ns.match(hashes) == other.match(hashes) == 70
    assert other.touch(hashes) == 70


def test_the_longest_prefix_is_got_and_why_it_ends_is_told(connect: Callable[..., Any]) -> None:
    ns = connect().namespace("prefix", OPAQUE, create=True)
    hashes, data = stored(ns, 5)
    longer = chain(ns, 9)
    assert longer[:5] == hashes
    out = empty(9)
    got = ns.get(longer, out)
    assert (got.n_blocks, got.miss, len(got.sources), len(got.sizes)) == (5, MissCause.NEVER_STORED, 5, 5)
    assert (out[:5] == data).all()
    assert ns.get(chain(ns, 4, first=1000), empty(4)).n_blocks == 0
    assert ns.get(hashes, out[:2]).n_blocks == 2, "fewer buffers: the leading blocks"
    assert ns.get(hashes[:0], []).n_blocks == 0
    stats = ns.stats()
    assert stats["hits"] == {"dram": 7}
    assert stats["misses"] == {"never_stored": 4 + 4}
    assert stats["outcomes"] == {"stored": 5}


def test_a_second_put_finds_them_there(connect: Callable[..., Any]) -> None:
    one, two = connect(), connect(mirror=False)
    ns, other = one.namespace("again", OPAQUE, create=True), two.namespace("again", OPAQUE)
    hashes, data = stored(ns, 6)
    longer, more = chain(ns, 8), payloads(range(8), size=BLOCK)
    for writer in (ns, other):
        put = writer.put(hashes, data)
        assert put.outcomes == [Outcome.ALREADY] * 6
        assert put.copies == [1] * 6, "no second copy was made"
    assert other.put(longer, more).outcomes == [Outcome.ALREADY] * 6 + [Outcome.STORED] * 2
    out = empty(8)
    got = ns.get(longer, out)
    assert got.n_blocks == 8
    assert len({source.worker for source in got.sources}) == 1, "a chain stays together"
    for index, row in enumerate(out):
        check(index, row)


def test_of_duplicates_the_first_wins(connect: Callable[..., Any]) -> None:
    ns = connect().namespace("twice", OPAQUE, create=True, hash="external")
    hashes = ns.hashes([b"a" * 8, b"b" * 8, b"a" * 8])
    put = ns.put(hashes, [b"1", b"2", b"3"])
    assert put.outcomes == [Outcome.STORED, Outcome.STORED, Outcome.ALREADY]
    out = [bytearray(1) for _ in range(3)]
    assert ns.get(hashes, out).n_blocks == 3
    assert b"".join(map(bytes, out)) == b"121"


def test_a_namespace_is_usable_right_after_it_was_made(connect: Callable[..., Any]) -> None:
    client = connect()
    for round_ in range(10):
        stored(client.namespace(f"fresh-{round_}", OPAQUE, create=True), 2)


def test_variable_values_keep_their_size_and_never_spill(connect: Callable[..., Any]) -> None:
    ns = connect().namespace("sizes", OPAQUE, create=True)
    hashes = chain(ns, 4)
    values = [b"a", b"b" * 5000, b"c" * BLOCK, b"d" * 3]
    assert ns.put(hashes, values).n_there == 4
    out = [bytearray(BLOCK) for _ in range(4)]
    got = ns.get(hashes, out)
    assert got.sizes == [1, 5000, BLOCK, 3]
    assert [bytes(o[:n]) for o, n in zip(out, got.sizes, strict=True)] == values
    assert not any(out[3][3:]), "nothing written past the value"
    guard = bytearray(b"\xee" * 4999)
    got = ns.get(hashes, [out[0], guard, out[2], out[3]])
    assert (got.n_blocks, got.miss is not None) == (1, True)
    assert "out[1]" in got.reason
    assert guard == b"\xee" * 4999


def test_byte_ranges(connect: Callable[..., Any]) -> None:
    ns = connect().namespace("ranges", LAYOUT, create=True)
    hashes, data = stored(ns, 12)
    layer = BLOCK // 8
    out = empty(12, layer)
    for at in (0, layer, BLOCK - layer):
        got = ns.get(hashes, out, byte_range=(at, layer))
        assert (got.n_blocks, got.sizes) == (12, [layer] * 12)
        assert (out == data[:, at : at + layer]).all()


def test_replicas_lie_on_different_workers(connect: Callable[..., Any]) -> None:
    ns = connect().namespace("copies", OPAQUE, create=True, replicas=2)
    hashes, data = chain(ns, 5), payloads(range(5), size=BLOCK)
    put = ns.put(hashes, data)
    assert (put.outcomes, put.copies) == ([Outcome.STORED] * 5, [2] * 5)
    again = ns.put(hashes, data)
    assert (again.outcomes, again.copies) == ([Outcome.ALREADY] * 5, [2] * 5)
    assert ns.put(chain(ns, 3, first=500), payloads(range(3), size=BLOCK), visibility="eventual").copies == [2] * 3


def test_what_one_worker_has_no_room_for_goes_to_the_next(connect: Callable[..., Any]) -> None:
    big = kvpool.KVLayout.opaque(block_bytes=4 << 20)
    ns = connect().namespace("spill", big, create=True)
    data = payloads(range(20), size=4 << 20)  # 80 MiB; each worker has 64
    hashes = chain(ns, 20)
    put = ns.put(hashes, data)
    assert put.n_there == 20, (put.outcomes, put.reasons)
    out = np.zeros_like(data)
    got = ns.get(hashes, out)
    assert got.n_blocks == 20
    assert (out == data).all()
    assert len({source.worker for source in got.sources}) == 2
    more = ns.put(chain(ns, 40, first=100), [data[0]] * 40)  # more than both have
    assert Outcome.FULL in more.outcomes
    assert more.outcomes.index(Outcome.FULL) == more.n_there > 20
    assert "no room" in more.reasons[-1]
    assert ns.remove(chain(ns, 40, first=100)).count(RemoveOutcome.PENDING) == 0


# --- holds, views, sessions ----------------------------------------------------------------------------------------------


def test_a_hold_may_be_used_by_another_process(connect: Callable[..., Any]) -> None:
    one, two = connect(), connect(transport="tcp")
    ns, other = one.namespace("held", OPAQUE, create=True), two.namespace("held", OPAQUE)
    hashes, data = stored(ns, 8)
    with ns.hold(chain(ns, 12), ttl_ms=20_000) as hold:
        assert hold.n_blocks == 8
        out = empty(8)
        got = other.get(hashes[2:], out[2:], hold=hold.token)
        assert got.n_blocks == 6
        assert (out[2:] == data[2:]).all()
        assert ns.get(hashes, out, hold=hold).n_blocks == 8
    assert ns.get(hashes, out, hold=hold).n_blocks == 8, "the hold is over, the blocks are still there"


@pytest.mark.parametrize("token", [b"", b"KVH1", b"x" * 26, b"KVH1" + b"\0" * 22 + b"tail", 7])
def test_a_token_that_is_none(connect: Callable[..., Any], token: Any) -> None:
    ns = connect().namespace("tokens", OPAQUE, create=True)
    with pytest.raises(InvalidArgument, match="hold"):
        ns.get(chain(ns, 1), empty(1), hold=token)


def test_a_hold_is_of_its_namespace(connect: Callable[..., Any]) -> None:
    client = connect()
    ns, other = client.namespace("mine", OPAQUE, create=True), client.namespace("yours", OPAQUE, create=True)
    hashes, _ = stored(ns, 1)
    with ns.hold(hashes) as hold, pytest.raises(InvalidArgument, match="another namespace"):
        other.get(chain(other, 1), empty(1), hold=hold)


def test_shards(connect: Callable[..., Any]) -> None:
    ns = connect().namespace("shards", OPAQUE, create=True)
    hashes, data = chain(ns, 6), payloads(range(6), size=BLOCK)
    for shard, n in ((0, 6), (1, 4), (2, 5)):
        assert ns.put(hashes[:n], data[:n], shard=shard).n_there == n
    assert ns.match(hashes, shards=range(3)) == 4
    assert ns.match(hashes, shards=range(3), freshness="mirror") == 4
    assert ns.match(hashes, shards=[0, 2]) == 5
    assert ns.match(hashes, shard=3) == 0
    with ns.hold(hashes, shards=range(3)) as hold:
        assert hold.n_blocks == 4
        for shard in range(3):
            out = empty(4)
            assert ns.get(hashes[:4], out, shard=shard, hold=hold).n_blocks == 4
            assert (out == data[:4]).all()
    with pytest.raises(InvalidArgument, match="shard"):
        ns.match(hashes, shards=[])
    with pytest.raises(InvalidArgument, match="shard"):
        ns.get(hashes, empty(6), shard=-1)


def test_a_view_is_the_pools_own_memory(connect: Callable[..., Any]) -> None:
    ns = connect().namespace("views", OPAQUE, create=True)
    _, data = stored(ns, 6)
    with ns.view(chain(ns, 9)) as view:
        assert (view.n_blocks, len(view)) == (6, 6)
        assert view[0].readonly
        assert all(view[i] == data[i] for i in range(6))
        with pytest.raises(TypeError):
            view[0][0] = 1
        assert "kvpool-views" in {thread.name for thread in threading.enumerate()}
        array = np.frombuffer(view[1], np.uint8)
        assert (array == data[1]).all()
    assert "kvpool-views" not in {thread.name for thread in threading.enumerate()}
    with ns.view(chain(ns, 2, first=9000)) as view:
        assert view.n_blocks == 0


def test_a_view_needs_shared_memory(connect: Callable[..., Any]) -> None:
    ns = connect(transport="tcp").namespace("views", OPAQUE, create=True)
    with pytest.raises(InvalidArgument, match="shared memory"):
        ns.view(chain(ns, 1))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_session_is_visible_after_its_commit_and_not_before(connect: Callable[..., Any], transport: str) -> None:
    one, two = connect(transport=transport), connect()
    name = f"session-{transport}"
    ns, other = one.namespace(name, LAYOUT, create=True), two.namespace(name, LAYOUT)
    hashes, data = chain(ns, 4), payloads(range(4), size=BLOCK)
    layer = BLOCK // 8
    with ns.put_session(hashes) as session:
        for at in range(0, BLOCK, layer):  # layer by layer
            for block in range(4):
                session.write(block, at, data[block, at : at + layer])
        assert other.match(hashes) == 0
        assert other.get(hashes, empty(4)).n_blocks == 0
        put = session.commit()
    assert (put.outcomes, put.copies) == ([Outcome.STORED] * 4, [1] * 4)
    out = empty(4)
    assert other.get(hashes, out).n_blocks == 4
    assert (out == data).all()
    with ns.put_session(hashes) as session:
        session.write(0, 0, data[0])
        assert session.commit().outcomes == [Outcome.ALREADY] * 4
    with pytest.raises(InvalidArgument, match="ended"):
        session.write(0, 0, data[0])


def test_a_session_that_is_left_without_commit_leaves_nothing(connect: Callable[..., Any]) -> None:
    ns = connect().namespace("aborted", OPAQUE, create=True)
    hashes, data = chain(ns, 2), payloads(range(2), size=BLOCK)
    with pytest.raises(RuntimeError, match="half way"), ns.put_session(hashes) as session:
        session.write(0, 0, data[0])
        raise RuntimeError("half way")
    assert ns.match(hashes) == 0
    assert ns.put(hashes, data).outcomes == [Outcome.STORED] * 2
    with ns.put_session(chain(ns, 2, first=70)) as session:
        for block, offset, part, words in ((2, 0, b"x", "block"), (0, BLOCK, b"x", "data"), (0, -1, b"x", "data"),
                                           (0, 0, b"", "data")):  # fmt: skip
            with pytest.raises(InvalidArgument, match=words):
                session.write(block, offset, part)


# --- waiting, taking, removing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mirror", [True, False])
def test_a_waiter_is_woken_by_another_clients_put(connect: Callable[..., Any], mirror: bool) -> None:
    one, two = connect(), connect(mirror=mirror)
    name = f"wait-{mirror}"
    ns, other = one.namespace(name, OPAQUE, create=True), two.namespace(name, OPAQUE)
    stored(ns, 3)
    longer, more = chain(ns, 5), payloads(range(5), size=BLOCK)
    assert other.wait(longer, deadline_ms=60) == 3, "the time is up: no error"
    found: list[int] = []
    waiter = threading.Thread(target=lambda: found.append(other.wait(longer, deadline_ms=30_000)))
    began = time.monotonic()
    waiter.start()
    assert ns.put(longer, more).n_there == 5
    waiter.join(20)
    assert found == [5]
    assert time.monotonic() - began < 10
    assert other.get(longer, empty(5)).n_blocks == 5, "what wait says is there can be got"


def test_take_leaves_nothing(connect: Callable[..., Any]) -> None:
    one, two = connect(), connect()
    ns, other = one.namespace("take", OPAQUE, create=True, replicas=2), two.namespace("take", OPAQUE)
    hashes, data = chain(ns, 3), payloads(range(3), size=BLOCK)
    assert ns.put(hashes, data).copies == [2, 2, 2]
    out = empty(3)
    assert other.take(hashes, out).n_blocks == 3
    assert (out == data).all()
    for reader in (other, ns):
        assert reader.get(hashes, out).n_blocks == 0


@pytest.mark.parametrize("mirror", [True, False])
def test_removed_is_removed_for_everybody(connect: Callable[..., Any], mirror: bool) -> None:
    one, two = connect(mirror=mirror), connect()
    name = f"remove-{mirror}"
    ns, other = one.namespace(name, OPAQUE, create=True), two.namespace(name, OPAQUE)
    hashes, _ = stored(ns, 4)
    assert other.get(hashes, empty(4)).n_blocks == 4
    gone = ns.remove(chain(ns, 6)[2:])
    assert gone.outcomes == [RemoveOutcome.REMOVED] * 2 + [RemoveOutcome.ABSENT] * 2
    assert gone.pending_workers == []
    for reader in (other, ns):
        got = reader.get(hashes, empty(4))
        assert (got.n_blocks, got.miss) == (2, MissCause.REMOVED)
        assert reader.match(hashes) == 2
    assert ns.put(hashes, payloads(range(4), size=BLOCK)).outcomes == [Outcome.ALREADY] * 2 + [Outcome.STORED] * 2
    assert other.get(hashes, empty(4)).n_blocks == 4


# --- namespaces and misuse -----------------------------------------------------------------------------------------------


def test_namespaces_are_apart_and_layouts_are_checked(connect: Callable[..., Any]) -> None:
    client = connect()
    ns, other = client.namespace("left", OPAQUE, create=True), client.namespace("right", OPAQUE, create=True)
    hashes, _ = stored(ns, 2)
    assert other.get(hashes, empty(2)).n_blocks == 0
    with pytest.raises(NamespaceNotFound, match="nowhere"):
        client.namespace("nowhere", OPAQUE)
    with pytest.raises(LayoutMismatch):
        client.namespace("left", LAYOUT)
    with pytest.raises(LayoutMismatch):
        client.namespace("left", OPAQUE, create=True, salt=b"other")
    with pytest.raises(InvalidArgument, match="replicas"):
        client.namespace("new", OPAQUE, create=True, replicas=0)
    with pytest.raises(InvalidArgument, match="namespace"):
        client.namespace("a/b", OPAQUE, create=True)


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda ns, h: ns.get(h, empty(2, BLOCK - 1)), r"out\[0\]"),
        (lambda ns, h: ns.get(h, [bytes(BLOCK)] * 2), "read-only"),
        (lambda ns, h: ns.get(h, empty(3)), "out: 3 buffers for 2 hashes"),
        (lambda ns, h: ns.put(h, empty(3)), "blocks: 3 buffers for 2 hashes"),
        (lambda ns, h: ns.put(h, empty(2, BLOCK + 1)), r"blocks\[0\]"),
        (lambda ns, h: ns.put(h, empty(2), visibility="soon"), "visibility"),
        (lambda ns, h: ns.put(bytes(h), empty(2)), "hashes: bytes"),
        (lambda ns, h: ns.get(h, empty(2), deadline_ms=0), "deadline_ms"),
        (lambda ns, h: ns.get(h, empty(2), deadline_ms="5"), "deadline_ms"),
        (lambda ns, h: ns.get(h, empty(2, 10), byte_range=(BLOCK, 10)), "byte_range"),
        (lambda ns, h: ns.get(h, empty(2), byte_range=3), "byte_range"),
        (lambda ns, h: ns.match(h, freshness="now"), "freshness"),
        (lambda ns, h: ns.hold(h, ttl_ms=0), "ttl_ms"),
        (lambda ns, h: ns.hashes([b"x" * 8]), "digests"),
        (lambda ns, h: ns.put_session(h, size=5), "size"),
        (lambda ns, h: ns.match(None), "hashes"),
    ],
)
def test_misuse_names_the_argument(connect: Callable[..., Any], misuse: Callable[..., Any], words: str) -> None:
    ns = connect().namespace("misuse", LAYOUT, create=True)
    with pytest.raises(InvalidArgument, match=words):
        misuse(ns, chain(ns, 2))


def test_a_closed_client_says_so(connect: Callable[..., Any]) -> None:
    client = connect()
    ns = client.namespace("closed", OPAQUE, create=True)
    hashes, data = stored(ns, 1)
    client.close()
    client.close()
    calls: list[Callable[[], Any]] = [
        lambda: ns.get(hashes, empty(1)), lambda: ns.put(hashes, data), lambda: ns.match(hashes), lambda: ns.wait(hashes),
        lambda: ns.hold(hashes), lambda: ns.view(hashes), lambda: ns.remove(hashes), lambda: client.describe(),
        lambda: ns.put_session(hashes), lambda: client.namespace("closed", OPAQUE), lambda: ns.stats(),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidArgument, match="closed"):
            call()


def test_closing_wakes_who_waits(connect: Callable[..., Any]) -> None:
    client = connect()
    ns = client.namespace("waking", OPAQUE, create=True)
    errors: list[BaseException] = []
    started = threading.Event()

    def wait() -> None:
        started.set()
        try:
            ns.wait(chain(ns, 1), deadline_ms=60_000)
        except InvalidArgument as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    started.wait(10)
    client.close()
    waiter.join(10)
    assert not waiter.is_alive()
    assert "closed" in str(errors[0])


def test_a_forked_child_is_refused(connect: Callable[..., Any]) -> None:
    ns = connect().namespace("forked", OPAQUE, create=True)
    hashes, _ = stored(ns, 1)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ns.get(hashes, empty(1))
            os.write(writer, b"no error")
        except InvalidArgument as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    assert said.startswith("client: it belongs to process")
    assert ns.get(hashes, empty(1)).n_blocks == 1


def test_bad_addresses_and_settings(pool: Cluster) -> None:
    began = time.monotonic()
    with pytest.raises(MasterUnavailable, match=r"127\.0\.0\.1:9"):
        kvpool.connect("127.0.0.1:9", deadline_ms=400)
    assert time.monotonic() - began < 2.5
    with pytest.raises(ConfigError, match="verify"):
        kvpool.connect(pool.master_address, verify="never")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="nixl"):
        kvpool.connect(pool.master_address, transport="nixl")
    with pytest.raises(ConfigError, match="token_file"):
        kvpool.connect(pool.master_address, token_file="/nonexistent/token")


def test_a_master_that_is_second_in_the_list_is_found(pool: Cluster) -> None:
    with kvpool.connect(f"127.0.0.1:9,{pool.master_address}", deadline_ms=20_000) as client:
        stored(client.namespace("second", OPAQUE, create=True), 2)


def test_describe_names_the_workers(connect: Callable[..., Any], pool: Cluster) -> None:
    found = connect().describe()
    assert {worker["id"] for worker in found["workers"]} == {pool.worker(i).ready["id"] for i in range(2)}
    assert {worker["state"] for worker in found["workers"]} == {"up"}
    assert set(found) >= {"epoch", "leader", "workers", "namespaces", "index"}


def test_many_threads_share_a_client(connect: Callable[..., Any]) -> None:
    ns = connect().namespace("threads", OPAQUE, create=True)
    failures: list[str] = []

    def work(number: int) -> None:
        out = empty(10)
        for round_ in range(8):
            first = number * 1000 + round_ * 40
            hashes, data = chain(ns, 10, first=first), payloads(range(first, first + 10), size=BLOCK)
            put, got = ns.put(hashes, data), ns.get(hashes, out)
            if put.n_there != 10 or got.n_blocks != 10 or not (out == data).all():
                failures.append(f"{number}/{round_}: {put} {got}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


FORGETFUL = """
import sys, kvpool
client = kvpool.connect(sys.argv[1])
ns = client.namespace("forgetful", kvpool.KVLayout.opaque(block_bytes=64), create=True)
hashes = ns.hash(range(8))
assert ns.put(hashes, [b"x"] * 8).n_there == 8
view = ns.view(hashes)
print(ns.get(hashes, [bytearray(1) for _ in range(8)]).n_blocks)
"""


def test_a_program_that_does_not_close_ends_all_the_same(pool: Cluster) -> None:
    done = subprocess.run([sys.executable, "-c", FORGETFUL, pool.master_address], text=True, timeout=30, capture_output=True,
                          env=cli_env(), cwd=Path(__file__).parents[2], check=False)  # fmt: skip
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "8", "")


def test_more_blocks_than_one_message_carries(connect: Callable[..., Any]) -> None:
    client, n = connect(), 17_000
    ns = client.namespace("many", kvpool.KVLayout.opaque(block_bytes=64), create=True)
    hashes = ns.hash(range(n))
    data = np.arange(n * 64, dtype=np.uint32).astype(np.uint8).reshape(n, 64)
    put = ns.put(hashes, data, deadline_ms=30_000)
    assert (put.n_there, len(put.copies)) == (n, n)
    out = np.zeros_like(data)
    got = ns.get(hashes, out, deadline_ms=30_000)
    assert (got.n_blocks, len(got.sources), got.miss) == (n, n, None)
    assert (out == data).all()
    assert ns.match(hashes) == n
    assert ns.remove(hashes, deadline_ms=30_000).count(RemoveOutcome.REMOVED) == n


# --- the async face ------------------------------------------------------------------------------------------------------


def test_the_async_face(pool: Cluster) -> None:
    async def main() -> None:
        async with await kvpool.aio.connect(pool.master_address) as client:
            ns = await client.namespace("async", OPAQUE, create=True)
            hashes, data = await ns.hash(range(4 * 6)), payloads(range(6), size=BLOCK)
            assert (await ns.put(hashes, data)).n_there == 6
            out = empty(6)
            async with ns.hold(hashes) as hold:
                got = await ns.get(hashes, out, hold=hold)
            assert got.n_blocks == 6
            assert (out == data).all()
            async with ns.view(hashes) as view:
                assert view[5] == data[5]
            async with ns.put_session(await ns.hash(range(100, 104))) as session:
                await session.write(0, 0, data[0])
                assert (await session.commit()).outcomes == [Outcome.STORED]
            assert await ns.match(hashes) == await ns.wait(hashes) == await ns.touch(hashes) == 6
            assert (await ns.take(hashes[:1], empty(1))).n_blocks == 1
            assert (await ns.remove(hashes[1:])).count(RemoveOutcome.REMOVED) == 5
            assert (await ns.stats())["gets"] == 2
            assert (await client.describe())["workers"]
            results = await asyncio.gather(*(ns.get(hashes, empty(6)) for _ in range(40)))
            assert {got.n_blocks for got in results} == {0}
            waiting = asyncio.create_task(ns.wait(hashes, deadline_ms=1_500))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(main())


def test_the_async_face_has_every_name_of_the_blocking_one() -> None:
    def public(cls: type) -> set[str]:
        return {name for name in dir(cls) if not name.startswith("_")}

    assert public(kvpool.Namespace) - {"block_bytes", "replicas", "keyed"} <= public(kvpool.aio.AsyncNamespace)
    assert public(kvpool.Client) <= public(kvpool.aio.AsyncClient)
    assert public(kvpool.PutSession) - {"n_blocks"} <= public(kvpool.aio.AsyncPutSession)
