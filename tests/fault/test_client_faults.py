"""The client while workers and the master die, freeze and come back: no call hangs, no byte is wrong, misses say why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.core.types import MissCause, Outcome, RemoveOutcome
from kvpool.errors import InvalidArgument, KVPoolError, MasterUnavailable
from tests.support.cluster import Cluster
from tests.support.payload import payloads
from tests.support.waiting import wait_until

BLOCK = 16_384
OPAQUE = kvpool.KVLayout.opaque(block_bytes=BLOCK, block_tokens=4)
DEADLINE_MS = 1_000
SLACK_S = 2.0  # what a call may take past its deadline on a busy machine

MakeCluster = Callable[..., Cluster]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.2f} s"


def chain(ns: kvpool.Namespace, n: int, *, first: int = 0) -> kvpool.PrefixHashes:
    return ns.hash(range(first, first + 4 * n))


def empty(n: int) -> np.ndarray[Any, Any]:
    return np.zeros((n, BLOCK), np.uint8)


def stored(ns: kvpool.Namespace, n: int, *, first: int = 0) -> tuple[kvpool.PrefixHashes, np.ndarray[Any, Any]]:
    hashes, data = chain(ns, n, first=first), payloads(range(first, first + n), size=BLOCK)
    put = ns.put(hashes, data)
    assert put.n_there == n, put
    return hashes, data


def served(ns: kvpool.Namespace, hashes: kvpool.PrefixHashes, data: np.ndarray[Any, Any], *,
           deadline_ms: int = DEADLINE_MS) -> bool:  # fmt: skip
    out = np.zeros_like(data)
    got = ns.get(hashes, out, deadline_ms=deadline_ms)
    assert (out[: got.n_blocks] == data[: got.n_blocks]).all()
    return got.n_blocks == len(data)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("mirror", [True, False])
def test_a_killed_worker_is_a_miss_that_says_so(make_cluster: MakeCluster, transport: str, mirror: bool) -> None:
    cluster = make_cluster()
    client = cluster.connect(transport=transport, mirror=mirror)
    ns = client.namespace("n", OPAQUE, create=True)
    hashes, data = stored(ns, 4)
    assert served(ns, hashes, data)
    cluster.worker().kill()
    for _ in range(8):
        with within(DEADLINE_MS / 1e3 + SLACK_S):
            got = ns.get(hashes, empty(4), deadline_ms=DEADLINE_MS)
        assert (got.n_blocks, got.miss) == (0, MissCause.WORKER_LOST)
    with within(DEADLINE_MS / 1e3 + SLACK_S):
        put = ns.put(chain(ns, 1, first=99), empty(1), deadline_ms=DEADLINE_MS)
    assert put.outcomes == [Outcome.REJECTED]
    assert put.reasons[0]
    cluster.start_worker(0)
    fresh = chain(ns, 4, first=500)
    wait_until(lambda: ns.put(fresh, data, deadline_ms=DEADLINE_MS).n_there == 4, timeout_s=15)
    assert served(ns, fresh, data)
    got = ns.get(hashes, empty(4))
    assert (got.n_blocks, got.miss) == (0, MissCause.WORKER_LOST)


def test_the_other_copy_serves_within_the_call(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2)
    client = cluster.connect()
    ns = client.namespace("n", OPAQUE, create=True, replicas=2)
    hashes, data = stored(ns, 6)
    out = empty(6)
    first = ns.get(hashes, out).sources[0].worker
    victim = next(i for i in range(2) if cluster.worker(i).ready["id"] == first)
    cluster.worker(victim).kill()
    got = ns.get(hashes, out, deadline_ms=DEADLINE_MS)
    assert got.n_blocks == 6, got
    assert (out == data).all()
    assert {source.worker for source in got.sources} == {cluster.worker(1 - victim).ready["id"]}
    put = ns.put(chain(ns, 2, first=700), data[:2], deadline_ms=3_000)
    assert (put.outcomes, put.copies) == ([Outcome.STORED] * 2, [1] * 2), "one copy is what can be had"


def test_a_frozen_worker_costs_a_deadline_and_then_nothing(make_cluster: MakeCluster, tmp_path: Path) -> None:
    config = tmp_path / "master.toml"
    config.write_text("[master]\nsuspect_after_ms = 50_000\ndead_after_ms = 60_000\n")  # the master does not help here
    cluster = make_cluster(master_args=("--config", str(config)))
    client = cluster.connect()
    ns = client.namespace("n", OPAQUE, create=True)
    hashes, data = stored(ns, 4)
    cluster.worker().pause()
    causes = []
    for _ in range(3):
        with within(0.4 + SLACK_S):
            causes.append(ns.get(hashes, empty(4), deadline_ms=400).miss)
    assert causes == [MissCause.TIMEOUT] * 3
    took = []
    for _ in range(5):
        began = time.monotonic()
        assert ns.get(hashes, empty(4), deadline_ms=5_000).miss is MissCause.TIMEOUT
        took.append(time.monotonic() - began)
    assert min(took) < 0.1, "the breaker is open: most calls do not wait"
    assert max(took) < 2.0, "a probe waits shortly, whatever the deadline"
    cluster.worker().resume()
    wait_until(lambda: served(ns, hashes, data), timeout_s=20)


def test_a_frozen_replica_leaves_time_for_the_other(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2)
    ns = cluster.connect().namespace("n", OPAQUE, create=True, replicas=2)
    hashes, data = stored(ns, 3)
    first = ns.get(hashes, empty(3)).sources[0].worker
    victim = next(i for i in range(2) if cluster.worker(i).ready["id"] == first)
    cluster.worker(victim).pause()
    with within(1.0 + SLACK_S):
        assert served(ns, hashes, data)
    cluster.worker(victim).resume()


def test_reads_go_on_and_puts_are_unlisted_while_the_master_is_away(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2)
    client, reader = cluster.connect(), cluster.connect()
    ns, other = client.namespace("n", OPAQUE, create=True), reader.namespace("n", OPAQUE)
    hashes, data = stored(ns, 8)
    assert other.wait(hashes) == 8
    assert cluster.master is not None
    cluster.master.kill()
    for namespace in (ns, other):
        with within(DEADLINE_MS / 1e3):
            assert served(namespace, hashes, data)
    longer = chain(ns, 12)
    for _ in range(3):
        with within(0.9):
            got = other.get(longer, empty(12), deadline_ms=10_000)
        assert (got.n_blocks, got.complete) == (8, False), "the tail is not known to anybody here, and nobody is waited for"
    more = payloads(range(12), size=BLOCK)
    with within(3.0):
        put = ns.put(longer, more)
    assert put.n_there == 12
    assert set(put.outcomes[8:]) == {Outcome.UNLISTED}
    assert served(ns, longer, more), "own writes are seen at once"
    assert ns.match(longer, deadline_ms=300) == 12, "the mirror answers for the master"
    with within(0.5 + SLACK_S), pytest.raises(MasterUnavailable):
        ns.remove(longer, deadline_ms=500)
    stop = threading.Event()
    failures: list[Any] = []

    def read_on() -> None:
        while not stop.is_set():
            try:
                if not served(ns, longer, more):
                    failures.append("a miss while the master came back")
            except (AssertionError, KVPoolError) as error:
                failures.append(error)

    thread = threading.Thread(target=read_on)
    thread.start()
    cluster.start_master()
    wait_until(lambda: other.match(longer, freshness="mirror") == 12, timeout_s=15)
    stop.set()
    thread.join()
    assert not failures, failures[:3]
    assert served(other, longer, more)
    wait_until(lambda: set(ns.put(longer, more).outcomes) == {Outcome.ALREADY}, timeout_s=10)
    assert set(ns.remove(longer, deadline_ms=5_000).outcomes) == {RemoveOutcome.REMOVED}
    assert other.get(longer, empty(12)).n_blocks == 0


def test_without_a_mirror_a_dead_master_is_a_miss_at_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    ns = cluster.connect(mirror=False).namespace("n", OPAQUE, create=True)
    hashes, data = stored(ns, 2)
    assert cluster.master is not None
    cluster.master.kill()
    with within(1.5):
        got = ns.get(hashes, empty(2), deadline_ms=20_000)
    assert (got.n_blocks, got.miss, got.complete) == (0, MissCause.UNKNOWN, False)
    with pytest.raises(MasterUnavailable):
        ns.match(hashes, deadline_ms=300)
    assert ns.put(chain(ns, 1, first=50), data[:1]).outcomes == [Outcome.UNLISTED]
    cluster.start_master()
    wait_until(lambda: served(ns, hashes, data), timeout_s=15)


def test_a_frozen_master_is_not_waited_for(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    ns = cluster.connect().namespace("n", OPAQUE, create=True)
    hashes, data = stored(ns, 4)
    assert cluster.master is not None
    cluster.master.pause()
    with within(0.5):
        assert served(ns, hashes, data)
    took = []
    for _ in range(6):
        began = time.monotonic()
        got = ns.get(chain(ns, 6), empty(6), deadline_ms=10_000)
        took.append(time.monotonic() - began)
        assert (got.n_blocks, got.complete) == (4, False)
    assert max(took) < 2.0
    assert sorted(took)[2] < 0.1, "most calls know that it is away"
    cluster.master.resume()
    wait_until(lambda: ns.get(chain(ns, 6), empty(6)).complete, timeout_s=10)


def test_a_hold_says_which_worker_died(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2)
    one, two = cluster.connect(), cluster.connect()
    ns, other = one.namespace("n", OPAQUE, create=True), two.namespace("n", OPAQUE)
    hashes, _ = stored(ns, 4)
    with ns.hold(hashes, ttl_ms=60_000) as hold:
        assert hold.n_blocks == 4
        owner = ns.get(hashes, empty(4)).sources[0].worker
        victim = next(i for i in range(2) if cluster.worker(i).ready["id"] == owner)
        cluster.worker(victim).kill()
        for namespace in (ns, other):
            got = namespace.get(hashes, empty(4), hold=hold.token, deadline_ms=DEADLINE_MS)
            assert (got.n_blocks, got.miss, got.miss_worker) == (0, MissCause.WORKER_LOST, owner)
        cluster.start_worker(victim)
        wait_until(lambda: len([w for w in two.describe()["workers"] if w["state"] == "up"]) == 2, timeout_s=15)
        got = other.get(hashes, empty(4), hold=hold.token, deadline_ms=DEADLINE_MS)
        assert (got.n_blocks, got.miss, got.miss_worker) == (0, MissCause.WORKER_LOST, owner)


def test_a_session_whose_worker_dies_is_not_stored(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    ns = cluster.connect().namespace("n", OPAQUE, create=True)
    hashes, data = chain(ns, 2), payloads(range(2), size=BLOCK)
    with ns.put_session(hashes, deadline_ms=3_000) as session:
        session.write(0, 0, data[0])
        cluster.worker().kill()
        session.write(1, 0, data[1])
        put = session.commit()
    assert put.outcomes == [Outcome.REJECTED] * 2
    assert put.reasons[0]


def test_a_view_that_was_lost_says_so_when_it_is_left(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    ns = cluster.connect().namespace("n", OPAQUE, create=True)
    hashes, data = stored(ns, 2)
    view = ns.view(hashes)
    assert view.n_blocks == 2
    cluster.worker().kill()
    assert bytes(view[1]) == data[1].tobytes(), "the memory stays readable"
    with pytest.raises(KVPoolError, match="view"):
        view.close()


def test_a_lagging_mirror_costs_time_and_no_block(make_cluster: MakeCluster, make_proxy: Callable[[str], Any]) -> None:
    """C3 for a client whose events come late: what others put, and where it is now, is found all the same."""
    cluster = make_cluster(n_workers=2)
    ns = cluster.connect().namespace("n", OPAQUE, create=True, replicas=2)
    cluster.worker(1).kill()
    hashes, data = stored(ns, 3)
    proxy = make_proxy(cluster.master_address)
    other = cluster.connect(proxy.address).namespace("n", OPAQUE)
    assert other.wait(hashes) == 3
    cluster.start_worker(1)
    proxy.pass_on(delay_s=0.15)
    wait_until(lambda: ns.put(hashes, data).copies == [2] * 3, timeout_s=10)
    cluster.worker(0).kill()
    assert other.stats()["mirror"]["replicas"] == 3, "the news are still on their way"
    assert served(other, hashes, data, deadline_ms=10_000), "from where it is now"
    wait_until(lambda: ns.put(hashes, data).n_there == 3, timeout_s=10)
    longer, more = stored(ns, 5)
    assert other.match(longer, freshness="mirror") == 3
    assert served(other, longer, more, deadline_ms=10_000), "the tail is asked for"


def test_a_client_whose_master_cannot_be_reached_any_more_ends(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    client = cluster.connect()
    ns = client.namespace("n", OPAQUE, create=True)
    cluster.worker().kill()
    assert cluster.master is not None
    cluster.master.kill()
    with within(1.0 + SLACK_S):
        client.close()
    with pytest.raises(InvalidArgument, match="closed"):
        ns.match(chain(ns, 1))
