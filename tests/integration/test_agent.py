"""The worker role as processes: its session with the master, what it says while that is away, removals, start and stop."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool.core.frames import CodesAnswer, Flag, Op, Status
from kvpool.core.keys import KeyBatch
from kvpool.core.types import BlockCode, MissCause, miss_code
from tests.support.cluster import Cluster
from tests.support.payload import payloads
from tests.support.processes import Role, run_cli
from tests.support.proxy import free_port
from tests.support.raw_client import RawClient, write_meta
from tests.support.waiting import wait_until

SIZE = 16384
MakeCluster = Callable[..., Cluster]


def opened(cluster: Cluster, name: str = "n", **more: Any) -> Any:
    """A namespace handle; its uid is `uid_of`."""
    layout = kvpool.KVLayout.opaque(block_bytes=SIZE, block_tokens=16)
    ns = cluster.connect(**more).namespace(name, layout, create=True)
    with raw(cluster) as client:
        wait_until(lambda: json.loads(client.call(Op.STAT).meta)["namespaces"] > 0)
    return ns


def batch_of(ns: Any, name: str, n: int) -> tuple[Any, KeyBatch, list[bytes]]:
    """hashes for the client, the same as keys, and blocks."""
    tokens = [hash_of(name) + i for i in range(16 * n)]
    hashes = ns.hash(tokens)
    rows = payloads([f"{name}/{i}" for i in range(n)], size=SIZE)
    return hashes, hashes.key_batch(ns._spec.uid), [bytes(row) for row in rows]


def hash_of(name: str) -> int:
    return sum(ord(c) * 131**i for i, c in enumerate(name)) % (1 << 30)


def write(client: RawClient, batch: KeyBatch, blocks: list[bytes], *, deadline_ms: int = 5000) -> bytes:
    return client.write(batch, blocks, chunk_bytes=262144, flags=Flag.WAIT_LISTED, deadline_ms=deadline_ms)


def raw(cluster: Cluster, i: int = 0) -> RawClient:
    return RawClient(cluster.worker(i).address)


def get_json(address: str, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


# --- the session ------------------------------------------------------------------------------------------------------------


def test_a_new_namespace_is_served_and_a_put_is_listed_when_it_is_answered(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    ns = opened(cluster)
    hashes, batch, blocks = batch_of(ns, "a", 4)
    with raw(cluster) as client:
        for k in range(20):
            hashes, batch, blocks = batch_of(ns, f"a{k}", 4)
            assert write(client, batch, blocks) == bytes([BlockCode.STORED] * 4)
            assert ns.match(hashes, freshness="cluster") == 4


def test_puts_are_unlisted_while_the_master_is_dead_and_known_to_the_next_one(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    ns = opened(cluster)
    with raw(cluster) as client:
        _, before, blocks = batch_of(ns, "before", 2)
        write(client, before, blocks)
        assert cluster.master is not None
        cluster.master.kill()
        wait_until(lambda: not json.loads(client.call(Op.STAT).meta)["session"])
        hashes, batch, blocks = batch_of(ns, "away", 4)
        started = time.monotonic()
        assert write(client, batch, blocks) == bytes([BlockCode.UNLISTED] * 4)
        assert time.monotonic() - started < 0.2
        assert client.read(batch)[1] == b"".join(blocks)
        cluster.start_master()
        wait_until(lambda: client.touch(batch, flags=Flag.WAIT_LISTED).number == 1)
        assert ns.match(hashes, freshness="cluster") == 4


def test_a_stopped_master_costs_a_put_a_second_at_most_and_then_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    ns = opened(cluster)
    assert cluster.master is not None
    with raw(cluster) as client:
        cluster.master.pause()
        try:
            _, batch, blocks = batch_of(ns, "one", 1)
            started = time.monotonic()
            assert write(client, batch, blocks, deadline_ms=10_000) == bytes([BlockCode.UNLISTED])
            assert time.monotonic() - started < 1.5
            wait_until(lambda: not json.loads(client.call(Op.STAT).meta)["session"])
            _, batch, blocks = batch_of(ns, "two", 1)
            started = time.monotonic()
            assert write(client, batch, blocks, deadline_ms=10_000) == bytes([BlockCode.UNLISTED])
            assert time.monotonic() - started < 0.2
        finally:
            cluster.master.resume()
        wait_until(lambda: client.touch(batch, flags=Flag.WAIT_LISTED).number == 1)


def test_the_index_is_whole_again_after_a_hundred_thousand_blocks_and_a_new_master(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram="256MiB")
    layout = kvpool.KVLayout.opaque(block_bytes=512, block_tokens=1)
    ns = cluster.connect().namespace("many", layout, create=True)
    n, step = 40_000, 4000
    hashes = ns.hash(range(n))
    blocks = payloads(["x"], size=512)[0].tobytes()
    with raw(cluster) as client:
        for at in range(0, n, step):
            got = client.write(hashes[at : at + step].key_batch(ns._spec.uid), [blocks] * step, chunk_bytes=262144)
            assert got == bytes([BlockCode.STORED] * step)
        assert cluster.master is not None
        cluster.master.kill()
        started = time.monotonic()
        cluster.start_master()
        last = hashes[n - 1 :].key_batch(ns._spec.uid)
        wait_until(lambda: client.touch(last, flags=Flag.WAIT_LISTED).number == 1)
        fresh = cluster.connect(mirror=False).namespace("many", layout)
        wait_until(lambda: fresh.match(hashes[:16_000], freshness="cluster") == 16_000, timeout_s=3.0)
        assert time.monotonic() - started < 6.0


# --- removals -----------------------------------------------------------------------------------------------------------------


def test_removed_is_final_also_after_a_kill(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram="1MiB", ssd="64MiB")
    ns = opened(cluster)
    hashes, batch, blocks = batch_of(ns, "gone", 8)
    with raw(cluster) as client:
        write(client, batch, blocks)
        kept = push_down(cluster, client, ns, batch)
    assert {outcome.value for outcome in ns.remove(hashes).outcomes} == {"removed"}
    with raw(cluster) as client:
        answer, _ = client.read(batch)
        assert set(answer.entries["code"].tolist()) == {miss_code(MissCause.REMOVED)}
    cluster.worker().kill()
    cluster.start_worker(0)
    with raw(cluster) as client:
        wait_until(lambda: client.call(Op.READ, read_meta(batch)).status is Status.OK)
        assert client.touch(batch).codes == bytes(8)
        served = sum(bool(tier) for b in kept for tier in client.touch(b).codes)
        assert served > 0, "nothing came back from disk: the test shows nothing"


def test_a_worker_that_was_away_applies_what_it_missed_before_it_serves(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram="1MiB", ssd="64MiB")
    ns = opened(cluster)
    hashes, batch, blocks = batch_of(ns, "gone", 8)
    with raw(cluster) as client:
        write(client, batch, blocks)
        kept = push_down(cluster, client, ns, batch)
    cluster.worker().kill()
    assert {outcome.value for outcome in ns.remove(hashes).outcomes} == {"pending"}
    assert cluster.master is not None
    cluster.master.pause()
    try:
        worker = cluster._spawn_worker(0)
        cluster.workers[0] = worker
        worker.wait_ready()
        with RawClient(worker.address) as client:  # no master yet: what it has on disk may have been removed
            assert client.call(Op.READ, read_meta(batch)).status is Status.NOT_READY
    finally:
        cluster.master.resume()
    with raw(cluster) as client:
        wait_until(lambda: client.call(Op.READ, read_meta(batch)).status is Status.OK)
        assert client.touch(batch).codes == bytes(8)
        assert sum(bool(tier) for b in kept for tier in client.touch(b).codes) > 0


def read_meta(batch: KeyBatch) -> bytes:
    from kvpool.core.frames import ReadRequest

    return ReadRequest(batch).encode()


def push_down(cluster: Cluster, client: RawClient, ns: Any, batch: KeyBatch) -> list[KeyBatch]:
    """Others are put, five times the DRAM, so that these lie on SSD alone; returns what was put."""
    others: list[KeyBatch] = []
    for k in range(10):
        _, more, blocks = batch_of(ns, f"flood{k}", 32)
        assert set(write(client, more, blocks)) == {BlockCode.STORED}
        others.append(more)
    assert set(client.touch(batch).codes) == {2}
    return others


# --- start and stop -------------------------------------------------------------------------------------------------------------


def test_ready_means_that_a_read_has_just_succeeded(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    status, body = get_json(cluster.worker().http, "/readyz")
    assert status == 200 and body["ready"] is True and body["master"] is True
    with urllib.request.urlopen(f"http://{cluster.worker().http}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert "kvpool_tier_capacity_bytes" in text and 'event="op_read"' in text


def test_a_worker_without_a_master_says_so_and_serves_when_one_comes(tmp_path: Path, make_cluster: MakeCluster) -> None:
    port = free_port()
    args = ["worker", "--master", f"127.0.0.1:{port}", "--dram", "16MiB", "--data-dir", str(tmp_path / "w")]
    worker = Role(args, log=tmp_path / "w.log")
    master = None
    try:
        worker.wait_ready(timeout_s=15)
        assert "no master yet" in worker.log_text()
        master = Role(
            ["master", "--port", str(port), "--http-port", "0", "--data-dir", str(tmp_path / "m")], log=tmp_path / "m.log"
        ).wait_ready()
        with RawClient(worker.address) as client:
            wait_until(lambda: json.loads(client.call(Op.STAT).meta)["session"])
    finally:
        assert worker.stop() == 0
        if master is not None:
            master.stop()


@pytest.mark.parametrize("state", ["idle", "in a put", "master stopped", "master dead"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_with_0_in_time(make_cluster: MakeCluster, state: str, number: int) -> None:
    cluster = make_cluster()
    ns = opened(cluster)
    worker = cluster.worker()
    _, batch, blocks = batch_of(ns, "a", 4)
    codes: list[bytes] = []
    client = raw(cluster)
    sender: threading.Thread | None = None
    assert cluster.master is not None
    if state == "in a put":
        client.send(Op.WRITE, write_meta(batch, blocks, chunk_bytes=262144), payload=blocks[0], payload_bytes=4 * SIZE)
        wait_until(lambda: used_blocks(cluster) == 4)

        def finish() -> None:
            client.sock.sendall(b"".join(blocks[1:]))
            codes.append(CodesAnswer.decode(client.receive().meta).codes)

        sender = threading.Thread(target=finish)
    elif state == "master stopped":
        cluster.master.pause()
    elif state == "master dead":
        cluster.master.kill()
    try:
        started = time.monotonic()
        worker.signal(number)
        if sender is not None:
            sender.start()
        assert worker.process.wait(timeout=12) == 0
        assert time.monotonic() - started < 10
        if sender is not None:
            sender.join()
            assert codes == [bytes([BlockCode.STORED] * 4)]
        assert "Traceback" not in worker.log_text()
    finally:
        client.close()
        cluster.master.resume()


def used_blocks(cluster: Cluster) -> int:
    with raw(cluster) as client:
        return int(json.loads(client.call(Op.STAT).meta)["tiers"]["dram"]["blocks"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--dram", "900TiB"], ["dram", "MemAvailable"]),
        (["--port", "{port}"], ["port", "{port}"]),
        (["--http-port", "{port}"], ["http_port", "{port}"]),
        (["--ssd", "{ssd}:64MiB"], ["ssd", "{pid}"]),
        (["--data-dir", "{data}"], ["data_dir", "{pid}"]),
        (["--host", "0.0.0.0"], ["host", "token_file"]),
        (["--token-file", "/nowhere/token"], ["token_file", "/nowhere/token"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_start_says_which_setting(
    make_cluster: MakeCluster, tmp_path: Path, flags: list[str], named: list[str]
) -> None:
    cluster = make_cluster(ssd="64MiB")
    facts = {
        "port": str(cluster.worker().port), "ssd": str(cluster.ssd_dir(0)), "pid": str(cluster.worker().pid),
        "data": str(cluster.worker_dir(0)),
    }  # fmt: skip
    args = [flag.format(**facts) for flag in flags]
    if "--data-dir" not in args:
        args += ["--data-dir", str(tmp_path / "other")]
    done = run_cli("worker", "--master", cluster.master_address, "--dram", "16MiB", *args)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    for word in named:
        assert word.format(**facts) in done.stderr, done.stderr
