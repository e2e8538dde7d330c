"""Workers that leave: drained by an operator or by a signal, with real processes. Nothing that only they have may be lost."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.cli.ask import master_at
from kvpool.cli.status import status_json
from kvpool.core.types import MissCause, Outcome, RemoveOutcome
from kvpool.v1 import master_pb2 as pb
from tests.support.cluster import Cluster
from tests.support.observe import metrics
from tests.support.payload import payloads
from tests.support.processes import run_cli
from tests.support.waiting import pause, wait_until

BLOCK = 16_384
LAYOUT = kvpool.KVLayout(model="m", revision="r", dtype="float16", n_layers=4, n_kv_heads=2, head_dim=32, block_tokens=16,
                         format="NHD/1")  # fmt: skip
N = 40  # blocks of a chain

MakeCluster = Callable[..., Cluster]


def status(cluster: Cluster) -> dict[str, Any]:
    """What `kvpool status --json` prints, without a process for each look."""
    with master_at(cluster.master_address) as asked:
        return status_json(asked.call("Describe", pb.DescribeRequest()))


def state_of(cluster: Cluster, worker: str) -> str:
    return next((str(w["state"]) for w in status(cluster)["workers"] if w["id"] == worker), "gone")


def blocks_of(cluster: Cluster) -> dict[str, int]:
    """DRAM blocks by worker, as of their last heartbeats."""
    return {w["id"]: w["tiers"]["dram"]["blocks"] for w in status(cluster)["workers"]}


def drain_of(cluster: Cluster, worker: str) -> dict[str, Any] | None:
    return next((w["drain"] for w in status(cluster)["workers"] if w["id"] == worker), None)


def drain(cluster: Cluster, worker: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run_cli("drain", worker, "--json", "--master", cluster.master_address, *options)


def drained_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout.count("\n") == 1, done
    return dict(json.loads(done.stdout))


def chain(ns: kvpool.Namespace, number: int, n: int = N) -> kvpool.PrefixHashes:
    return ns.hash(range(number * 1_000_000, number * 1_000_000 + n * LAYOUT.block_tokens))


def data_of(number: int, n: int = N) -> np.ndarray[Any, Any]:
    return payloads([f"{number}/{i}" for i in range(n)], size=BLOCK)


def put_chains(ns: kvpool.Namespace, numbers: range, n: int = N) -> None:
    for number in numbers:
        put = ns.put(chain(ns, number, n), data_of(number, n))
        assert put.outcomes == [Outcome.STORED] * n, put


def assert_all_there(client: kvpool.Client, numbers: range, *, n: int = N, workers: set[str] | None = None) -> None:
    """Every block of every chain, byte by byte; from these workers only, where that is said."""
    ns = client.namespace("drain", LAYOUT)
    for number in numbers:
        out = np.zeros((n, BLOCK), np.uint8)
        got = ns.get(chain(ns, number, n), out)
        assert (got.n_blocks, got.miss) == (n, None), (number, got)
        assert (out == data_of(number, n)).all()
        assert workers is None or {source.worker for source in got.sources} <= workers, got.sources


def holders(cluster: Cluster, ns: kvpool.Namespace, numbers: range) -> set[str]:
    client = cluster.connect()
    found: set[str] = set()
    space = client.namespace("drain", LAYOUT)
    for number in numbers:
        found |= {source.worker for source in space.get(chain(ns, number), np.zeros((N, BLOCK), np.uint8)).sources}
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_drained_worker_leaves_nothing_behind(make_cluster: MakeCluster, transport: str) -> None:
    cluster = make_cluster(n_workers=2)
    ns = cluster.connect(transport=transport).namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(12))
    one, two = (str(cluster.worker(i).ready["id"]) for i in (0, 1))
    assert holders(cluster, ns, range(12)) == {one, two}, "the chains should be on both workers"
    done = drain(cluster, one)
    assert done.returncode == 0, done.stderr
    facts = drained_json(done)
    assert facts["state"] == "drained" and facts["drain"]["blocks_left"] == 0 and facts["drain"]["blocks_moved"] >= N
    assert facts["drain"]["bytes_moved"] == facts["drain"]["blocks_moved"] * BLOCK
    shown = json.loads(run_cli("status", "--json", "--master", cluster.master_address).stdout)
    assert {w["id"]: w["state"] for w in shown["workers"]} == {one: "drained", two: "up"}
    assert f"{one}: drained" in run_cli("status", "--master", cluster.master_address).stdout
    assert_all_there(cluster.connect(transport=transport), range(12))  # reads go on, from either
    put_chains(ns, range(100, 106))  # none of them goes to the drained worker
    cluster.worker(0).kill()
    assert_all_there(cluster.connect(transport=transport), range(12), workers={two})
    assert_all_there(cluster.connect(transport=transport), range(100, 106), workers={two})


def test_a_drain_survives_a_restart_of_the_master_and_keeps_its_rate(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2)
    ns = cluster.connect().namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(12))
    one = str(cluster.worker(0).ready["id"])
    wait_until(lambda: sum(blocks_of(cluster).values()) == 12 * N, what="all counted")
    n_here = blocks_of(cluster)[one]
    assert n_here >= N
    rate = n_here * BLOCK // 3  # about three seconds
    began = time.monotonic()
    assert drained_json(drain(cluster, one, "--no-wait", "--rate", str(rate)))["state"] == "draining"
    told = wait_until(lambda: (d := drain_of(cluster, one)) and d["bytes_moved"] and d, what="progress")
    assert told["rate_bytes"] == rate and 0 < told["eta_ms"] < 10_000 and told["phase"] == "moving"
    assert cluster.master is not None
    cluster.master.kill()
    cluster.start_master()
    wait_until(lambda: state_of(cluster, one) == "drained", timeout_s=20, what="drained")
    assert time.monotonic() - began > 2.0, "the rate was not kept"
    cluster.worker(0).kill()
    assert_all_there(cluster.connect(), range(12))


def test_a_cancelled_drain_makes_a_worker_take_part_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2)
    ns = cluster.connect().namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(12))
    one, two = (str(cluster.worker(i).ready["id"]) for i in (0, 1))
    drain(cluster, two, "--no-wait", "--rate", str(BLOCK))  # a block a second: it would take minutes
    wait_until(lambda: state_of(cluster, two) == "draining", what="draining")
    facts = drained_json(drain(cluster, two, "--cancel"))
    assert (facts["state"], facts["drain"]) == ("up", None)
    assert drain(cluster, one).returncode == 0
    assert state_of(cluster, two) == "up"
    put_chains(ns, range(200, 203))
    assert_all_there(cluster.connect(), range(200, 203), workers={two})


def test_with_no_room_elsewhere_a_drain_says_so_and_loses_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2, dram="4MiB")
    ns = cluster.connect().namespace("drain", LAYOUT, create=True)
    for number in range(40):  # more than both have
        ns.put(chain(ns, number), data_of(number))
    one, two = (str(cluster.worker(i).ready["id"]) for i in (0, 1))
    wait_until(lambda: min(blocks_of(cluster).values()) > 250, what="both are full")
    blocks = blocks_of(cluster)
    done = drain(cluster, one)
    assert done.returncode == 1
    facts = drained_json(done)
    assert facts["state"] == "draining" and facts["drain"]["phase"] == "stuck"
    assert "no other worker has room" in facts["drain"]["reason"] and facts["drain"]["blocks_left"] > 200
    after = blocks_of(cluster)
    assert after[one] == blocks[one] and after[two] >= blocks[two], "nobody else's blocks were evicted for it"
    alone = drain(cluster, two)
    assert alone.returncode == 1 and "no other worker is up" in drained_json(alone)["drain"]["reason"]


def test_room_that_comes_later_ends_a_drain_that_was_stuck(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=1)
    ns = cluster.connect().namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(3))
    one = str(cluster.worker(0).ready["id"])
    assert drain(cluster, one).returncode == 1
    cluster.workers.append(None)
    cluster.worker_master.append("")
    other = cluster.start_worker(1)
    wait_until(lambda: state_of(cluster, one) == "drained", timeout_s=15, what="drained")
    cluster.worker(0).kill()
    assert_all_there(cluster.connect(), range(3), workers={str(other.ready["id"])})


def test_sigterm_moves_what_would_be_lost(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2)
    ns = cluster.connect().namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(12))
    two = str(cluster.worker(1).ready["id"])
    began = time.monotonic()
    assert cluster.worker(0).stop(timeout_s=15) == 0
    assert time.monotonic() - began < 10
    assert_all_there(cluster.connect(), range(12), workers={two})


def test_sigterm_without_a_drain_timeout_moves_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2, worker_args=("--drain-timeout", "0"))
    client = cluster.connect()
    ns = client.namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(12))
    one = str(cluster.worker(0).ready["id"])
    gone = [number for number in range(12) if one in holders(cluster, ns, range(number, number + 1))]
    began = time.monotonic()
    assert cluster.worker(0).stop() == 0
    assert time.monotonic() - began < 4
    fresh = cluster.connect().namespace("drain", LAYOUT)
    for number in gone:
        assert fresh.get(chain(ns, number), np.zeros((N, BLOCK), np.uint8)).miss is MissCause.WORKER_LOST


def test_a_second_signal_stops_a_drain_at_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2, worker_args=("--drain-timeout", "60s"))
    ns = cluster.connect().namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(12))
    one = str(cluster.worker(0).ready["id"])
    drain(cluster, one, "--no-wait", "--rate", str(BLOCK))
    wait_until(lambda: state_of(cluster, one) == "draining", what="draining")
    worker = cluster.worker(0)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: any(w["drain"] and w["drain"]["leaving"] for w in status(cluster)["workers"]), what="leaving")
    assert worker.process.poll() is None
    began = time.monotonic()
    worker.signal(signal.SIGINT)
    assert worker.process.wait(10) == 0
    assert time.monotonic() - began < 5


def test_the_last_worker_and_a_whole_pool_stop_without_moving(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=3)
    ns = cluster.connect().namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(12))
    began = time.monotonic()
    for i in range(3):
        cluster.worker(i).signal(signal.SIGTERM)
    for i in range(3):
        assert cluster.worker(i).process.wait(10) == 0
    assert time.monotonic() - began < 5
    moved = [line for i in range(3) for line in cluster.worker(i).log_text().splitlines() if "event=left_drained" in line]
    assert len(moved) == 3 and sum("blocks_moved=0" in line for line in moved) >= 2, moved


def test_a_worker_that_is_forgotten_leaves_no_removal_pending(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2, ssd="64MiB")
    ns = cluster.connect().namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(4))
    one = str(cluster.worker(0).ready["id"])
    assert drain(cluster, one, "--forget").returncode == 1  # it is connected
    assert drain(cluster, "nobody", "--forget").returncode == 1
    cluster.worker(0).kill()
    wait_until(lambda: state_of(cluster, one) == "down", what="down")
    before = ns.remove(chain(ns, 0))
    assert RemoveOutcome.PENDING in before.outcomes and before.pending_workers == [one]
    facts = drained_json(drain(cluster, one, "--forget"))
    assert facts["state"] == "forgotten"
    assert state_of(cluster, one) == "gone"
    after = ns.remove(chain(ns, 1))
    assert RemoveOutcome.PENDING not in after.outcomes, after


def test_what_is_removed_during_a_drain_does_not_come_back(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2)
    client = cluster.connect()
    ns = client.namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(30))
    one = str(cluster.worker(0).ready["id"])
    drain(cluster, one, "--no-wait", "--rate", "8MiB")
    for number in range(0, 30, 2):
        removed = ns.remove(chain(ns, number))
        assert set(removed.outcomes) == {RemoveOutcome.REMOVED}, removed
    wait_until(lambda: state_of(cluster, one) == "drained", timeout_s=20, what="drained")
    cluster.worker(0).kill()
    fresh = cluster.connect().namespace("drain", LAYOUT)
    for number in range(0, 30, 2):
        assert fresh.match(chain(ns, number)) == 0, number
    assert_all_there(cluster.connect(), range(1, 30, 2))


def test_blocks_on_ssd_go_too_and_into_anothers_ssd(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2, dram="2MiB", ssd="64MiB")
    ns = cluster.connect().namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(16))  # 10 MiB: most of it is on SSD alone
    fuller = max((0, 1), key=lambda i: metrics(cluster.worker(i))['kvpool_tier_blocks{tier="ssd"}'])  # (chance places chains)
    one, two = (str(cluster.worker(i).ready["id"]) for i in (fuller, 1 - fuller))
    assert holders(cluster, ns, range(16)) == {one, two}
    done = drain(cluster, one)
    assert done.returncode == 0, done
    assert drained_json(done)["drain"]["blocks_moved"] > 128  # more than DRAM has
    cluster.worker(fuller).kill()
    assert_all_there(cluster.connect(), range(16), workers={two})


def test_a_signal_leaves_blocks_on_ssd_where_they_are(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2, dram="2MiB", ssd="64MiB")
    ns = cluster.connect().namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(16))
    assert cluster.worker(0).stop() == 0
    moved = next(line for line in cluster.worker(0).log_text().splitlines() if "event=left_drained" in line)
    assert int(moved.partition("blocks_moved=")[2].split()[0]) <= 128, moved  # what was in DRAM alone at most
    cluster.start_worker(0)
    fresh = cluster.connect()
    space = fresh.namespace("drain", LAYOUT)
    wait_until(lambda: all(space.match(chain(ns, number)) == N for number in range(16)), what="adopted")
    assert_all_there(fresh, range(16))


def test_a_worker_that_is_killed_while_it_drains_goes_on_when_it_is_back(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2, dram="2MiB", ssd="64MiB")
    ns = cluster.connect().namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(16))
    one, two = (str(cluster.worker(i).ready["id"]) for i in (0, 1))
    drain(cluster, one, "--no-wait", "--rate", str(4 * BLOCK))
    wait_until(lambda: (told := drain_of(cluster, one)) and told["blocks_moved"], what="moving")
    cluster.worker(0).kill()
    cluster.start_worker(0)
    wait_until(lambda: (told := drain_of(cluster, one)) and told["phase"] == "moving", what="moving again")
    assert state_of(cluster, one) == "draining"
    space = cluster.connect().namespace("drain", LAYOUT)
    there = [space.match(chain(ns, number)) for number in range(16)]
    assert drain(cluster, one).returncode == 0  # without a limit now
    cluster.worker(0).kill()
    fresh = cluster.connect().namespace("drain", LAYOUT)
    for number, n in enumerate(there):
        out = np.zeros((N, BLOCK), np.uint8)
        got = fresh.get(chain(ns, number), out)
        assert got.n_blocks >= n and {source.worker for source in got.sources[: got.n_blocks]} <= {two}, (number, n, got)
        assert (out[: got.n_blocks] == data_of(number)[: got.n_blocks]).all()


def test_a_drained_worker_that_comes_back_takes_part_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2, ssd="64MiB")
    ns = cluster.connect().namespace("drain", LAYOUT, create=True)
    put_chains(ns, range(8))
    one = str(cluster.worker(0).ready["id"])
    assert drain(cluster, one).returncode == 0
    assert cluster.worker(0).stop() == 0
    assert_all_there(cluster.connect(), range(8))
    cluster.start_worker(0)
    wait_until(lambda: state_of(cluster, one) == "up", what="up")
    pause(0.6)  # a heartbeat later it still is
    assert state_of(cluster, one) == "up"
