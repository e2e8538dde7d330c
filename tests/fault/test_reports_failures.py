"""What other pools were reported to get wrong, asserted right here, against real processes: failure, capacity, SSD, concurrency,
security and operability. Test names carry the report's id. Sizes: one `UNIT` stands for 1 MiB of the report; `make reports`
runs all of it at full size.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import kvpool
from kvpool.core.types import MissCause, Outcome, RemoveOutcome
from kvpool.errors import ConfigError, InvalidArgument, KVPoolError, MasterUnavailable
from tests.support.cluster import Cluster
from tests.support.confine import Clock, control_group, in_group, private_mounts, throttle
from tests.support.keyed import SLACK_S, THERE, Child, churn, hash_of, have, keyspace, put, read
from tests.support.observe import metrics, usage
from tests.support.payload import check, payload
from tests.support.processes import Role, run_cli
from tests.support.proxy import free_port
from tests.support.scale import FULL, scaled
from tests.support.waiting import wait_until

MIB = 1 << 20
UNIT = scaled(64 << 10, MIB)
CALL_S = scaled(1.0, 5.0)  # the scenarios' client deadline
STORED_OR_NOT = {Outcome.STORED, Outcome.ALREADY, Outcome.FULL}

pytestmark = [pytest.mark.reports, pytest.mark.timeout(scaled(120, 1500))]

MakeCluster = Callable[..., Cluster]


def s0(make_cluster: MakeCluster, **settings: Any) -> Cluster:
    """The default set-up: two workers, DRAM 64 units, SSD 256 units each."""
    given: dict[str, Any] = {"n_workers": 2, "dram": str(64 * UNIT), "ssd": str(256 * UNIT)} | settings
    return make_cluster(**given)


def event(role: Role, name: str) -> float:
    return metrics(role)[f'kvpool_block_events_total{{event="{name}"}}']


def tier_event(role: Role, tier: str, name: str) -> float:
    return metrics(role).get(f'kvpool_tier_events_total{{event="{name}",tier="{tier}"}}', 0.0)


def used(role: Role) -> list[float]:
    """Bytes in slots that are taken, by tier."""
    return [value for name, value in metrics(role).items() if name.startswith("kvpool_tier_used_bytes")]


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@contextmanager
def running(*jobs: Callable[[threading.Event], None]) -> Iterator[threading.Event]:
    """Each job in a thread of its own; at the end they are told to stop, and what went wrong in one is raised."""
    stop, errors = threading.Event(), []

    def guarded(job: Callable[[threading.Event], None]) -> None:
        try:
            job(stop)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def push_out(ns: kvpool.Namespace, tag: str, n: int, *, size: int = UNIT) -> None:
    """Other keys, so that what was in DRAM goes down."""
    for start in range(0, n, 16):
        keys = [f"{tag}-{i}" for i in range(start, min(n, start + 16))]
        assert set(ns.put(hash_of(ns, *keys), [payload(key, 1, size) for key in keys]).outcomes) <= STORED_OR_NOT


# --- concurrency ----------------------------------------------------------------------------------------------------------


def test_B07_two_writers_of_one_key_leave_one_whole_value(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = s0(make_cluster)
    n_writers, n_groups, each = scaled(3, 8), scaled(2, 50), 10
    ns = keyspace(cluster.connect(), "n", 4 * UNIT)
    versions = range(1, n_writers + 1)

    def size_of(writer: int) -> int:
        return UNIT * (1, 2, 4)[writer % 3]

    def start(writer: int) -> Child:
        return Child("write", tmp_path / f"writer-{writer}.log", master=cluster.master_address, namespace="n",
                     block_bytes=4 * UNIT, version=writer, size=size_of(writer))  # fmt: skip

    group = [0]
    chance = random.Random(7)

    def reading(stop: threading.Event) -> None:
        while not stop.is_set():
            key = group[0] * each + chance.randrange(each)
            found = read(ns, key, versions=versions)
            assert found in versions or isinstance(found, MissCause)

    writers = {writer: start(writer) for writer in versions}
    try:
        for child in writers.values():
            assert child.hear() == "ready"
        with running(reading):
            for number in range(n_groups):
                group[0] = number
                for child in writers.values():
                    child.say([number * each, (number + 1) * each])
                victim = chance.choice(list(versions))
                told: dict[int, dict[int, str]] = {}
                writers[victim].hear()  # it is in the middle of its keys now
                writers[victim].kill()
                for writer, child in writers.items():
                    while writer != victim and (said := child.hear()) != "done":
                        told.setdefault(said[0], {})[writer] = said[1]
                for key in range(number * each, (number + 1) * each):
                    found = read(ns, key, versions=versions)
                    codes = told[key]
                    assert isinstance(found, int), (key, found, codes)
                    out = ns.get(hash_of(ns, key), [bytearray(4 * UNIT)])
                    assert out.sizes == [size_of(found)]
                    assert set(codes.values()) <= {"stored", "already"}, codes
                    assert found == victim or codes[found] == "stored", (key, found, codes)
                    assert ns.match(hash_of(ns, key)) == 1
                if number + 1 < n_groups:
                    writers[victim] = start(victim)
                    assert writers[victim].hear() == "ready"
    finally:
        for child in writers.values():
            child.kill()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_B60_many_readers_of_one_cold_chain_read_the_disk_about_once(
    make_cluster: MakeCluster, tmp_path: Path, transport: str
) -> None:
    n, n_processes, n_threads = 64, scaled(3, 32), scaled(12, 32)
    cluster = s0(make_cluster, n_workers=1, dram=str(96 * UNIT), ssd=str(512 * UNIT))
    client = cluster.connect(transport=transport)
    ns = keyspace(client, "n", UNIT)
    hashes, data = hash_of(ns, *range(n)), [payload(i, 1, UNIT) for i in range(n)]

    assert ns.put(hashes, data).n_there == n
    push_out(ns, "other", 2 * 96)

    def make_cold() -> None:
        cluster.worker().stop()
        cluster.start_worker(0)
        wait_until(lambda: ns.match(hashes) == n, timeout_s=15, what="adopted")
        assert tier_event(cluster.worker(), "ssd", "blocks_read") == 0

    def load(_: object = None) -> float:
        out = [bytearray(UNIT) for _ in range(n)]
        began = time.monotonic()
        got = ns.get(hashes, out, deadline_ms=30_000)
        took = time.monotonic() - began
        assert got.n_blocks == n, got
        assert out == data
        return took

    make_cold()
    alone = load()
    make_cold()
    barrier, took = threading.Barrier(n_threads), []

    def follow(_: threading.Event) -> None:
        barrier.wait()
        took.append(load())

    with running(*[follow] * n_threads):
        wait_until(lambda: len(took) == n_threads, timeout_s=40)
    assert tier_event(cluster.worker(), "ssd", "blocks_read") <= 2 * n
    assert max(took) < 3 * n_threads * alone + SLACK_S, (alone, sorted(took))

    make_cold()
    arguments = {"master": cluster.master_address, "namespace": "n", "block_bytes": UNIT, "n": n, "size": UNIT,
                 "deadline_ms": 30_000, "client": {"transport": transport}}  # fmt: skip
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child("load", tmp_path / f"{i}.log", **arguments)) for i in range(n_processes)
        ]
        for child in children:
            assert child.hear() == "ready"
        for child in children:
            child.say("go")
        wait_until(lambda: tier_event(cluster.worker(), "ssd", "blocks_read") > 0, timeout_s=10)
        children[0].kill()  # the first one, half-way
        for child in children[1:]:
            assert child.hear()[0] == n
    assert tier_event(cluster.worker(), "ssd", "blocks_read") <= 3 * n


def test_B71_random_verbs_from_many_threads_leave_nothing_and_nothing_wrong(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = s0(make_cluster)
    n_keys, sizes = scaled(100, 500), [4096, 3 * UNIT // 4, UNIT, 5000, 2 * UNIT]
    n_processes, rounds, seconds = scaled(2, 8), scaled(2, 10), scaled(1.5, 30.0)
    client = cluster.connect()
    ns = keyspace(client, "n", 2 * UNIT)
    interval = sys.getswitchinterval()
    arguments = {"master": cluster.master_address, "namespace": "n", "block_bytes": 2 * UNIT}
    n_ops = 0
    with ExitStack() as stack:
        stack.callback(sys.setswitchinterval, interval)
        sys.setswitchinterval(1e-5)
        children = [
            stack.enter_context(Child("churn", tmp_path / f"{i}.log", **arguments, n_threads=4, n_keys=n_keys, sizes=sizes))
            for i in range(n_processes)
        ]
        for child in children:
            assert child.hear() == "ready"
        for number in range(rounds):
            for i, child in enumerate(children):
                child.say({"seconds": seconds, "seed": 100 * number + i})
            n_ops += churn(ns, n_threads=scaled(8, 32), n_keys=n_keys, sizes=sizes, seconds=seconds, seed=number)
            n_ops += sum(child.hear(timeout_s=60) for child in children)
            assert set(ns.remove(hash_of(ns, *range(n_keys)), deadline_ms=20_000).outcomes) <= {
                RemoveOutcome.REMOVED, RemoveOutcome.ABSENT,
            }  # fmt: skip
            for worker in range(2):
                wait_until(lambda i=worker: used(cluster.worker(i)) == [0, 0], timeout_s=10, what="used bytes 0")  # type: ignore[misc]
    assert n_ops > scaled(500, 300_000), n_ops
    assert client.describe()["index"]["replicas"] == 0
    for worker in range(2):
        assert "Traceback" not in cluster.worker(worker).log_text()


# --- failure --------------------------------------------------------------------------------------------------------------


def owner_of(ns: kvpool.Namespace, key: object) -> str:
    """Id of the worker that serves the key."""
    return ns.get(hash_of(ns, key), [bytearray(ns.block_bytes)]).sources[0].worker


def number_of(cluster: Cluster, worker_id: str) -> int:
    return next(i for i in range(cluster.n_workers) if cluster.worker(i).ready["id"] == worker_id)


def by_worker(cluster: Cluster, ns: kvpool.Namespace, keys: Sequence[object]) -> dict[int, list[object]]:
    """The keys by number of the worker that has them; both have some."""
    found: dict[int, list[object]] = {i: [] for i in range(cluster.n_workers)}
    for key in keys:
        found[number_of(cluster, owner_of(ns, key))].append(key)
    return found


@pytest.mark.parametrize("how", ["same port", "port reused"])
def test_B16_a_worker_that_comes_back_empty_is_not_believed_to_have_its_blocks(make_cluster: MakeCluster, how: str) -> None:
    cluster = s0(make_cluster, ssd=None, n_workers=3)
    ns = keyspace(cluster.connect(transport="tcp"), "n", UNIT)
    cluster.worker(2).stop()
    keys = list(range(40))
    for key in keys:
        assert put(ns, key, UNIT) is Outcome.STORED
    here = by_worker(cluster, ns, keys)
    lost, kept = here[0], here[1]
    assert lost and kept
    port = str(cluster.worker(0).port)

    def reading(stop: threading.Event) -> None:
        other = keyspace(cluster.connect(transport="tcp"), "n", UNIT)
        chance = random.Random()
        while not stop.is_set():
            key = chance.choice(keys)
            found = read(other, key, deadline_ms=int(CALL_S * 1e3))
            assert found == 1 if key in kept else found in (1, MissCause.WORKER_LOST, MissCause.TIMEOUT), (key, found)

    with running(*[reading] * scaled(2, 8)) as stop:
        cluster.worker(0).kill()
        if how == "port reused":
            cluster.start_worker(2, extra=("--port", port))
            assert cluster.worker(2).port == int(port)
            cluster.start_worker(0)
            assert cluster.worker(0).port != int(port)
        else:
            cluster.start_worker(0, extra=("--port", port))
            assert cluster.worker(0).port == int(port)
        fresh = keyspace(cluster.connect(transport="tcp"), "n", UNIT)
        for key in lost:  # at once: the ready line says that the master knows
            assert ns.match(hash_of(ns, key)) == fresh.match(hash_of(ns, key)) == 0
            assert read(ns, key) in (MissCause.WORKER_LOST, MissCause.STALE_INDEX)
            assert read(fresh, key) is MissCause.WORKER_LOST
        for i in range(20):
            assert put(ns, f"new-{i}", UNIT) in THERE
        assert have(fresh, [f"new-{i}" for i in range(20)]) == 20
        stop.wait(scaled(0.5, 15.0))
    for key in lost:
        assert put(ns, key, UNIT, 2) is Outcome.STORED
        assert read(fresh, key, versions=(2,)) == 2
    assert have(fresh, kept) == len(kept)


def test_B16_a_port_that_is_taken_stops_the_start_and_is_not_registered(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(dram="1MiB")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flag in ("--port", "--http-port"):
            args = ["worker", "--master", cluster.master_address, "--dram", "1MiB", "--data-dir", tmp_path / "w", flag, port]
            done = run_cli(*args, timeout_s=20)
            assert done.returncode in (1, 2)
            assert port in done.stderr and "Traceback" not in done.stderr, done.stderr
    described = cluster.connect().describe()["workers"]
    assert [worker["host"] for worker in described if worker["state"] == "up"] == [cluster.worker().address]


@pytest.mark.parametrize("where", ["process", "data port", "control port"])
def test_B17_a_frozen_worker_costs_others_nothing(
    make_cluster: MakeCluster, make_proxy: Callable[..., Any], where: str
) -> None:
    """The relay of the data port listens on 127.0.0.2, which the worker advertises, at the worker's own port number."""
    cluster = make_cluster(n_workers=2, dram=str(64 * UNIT))
    proxy = None
    cluster.worker(0).stop()
    if where == "data port":
        port = free_port()
        proxy = make_proxy(f"127.0.0.1:{port}", listen=f"127.0.0.2:{port}")
        cluster.start_worker(0, extra=("--port", str(port), "--advertise", "127.0.0.2"))
    else:
        if where == "control port":
            proxy = make_proxy(cluster.master_address)
            cluster.worker_master[0] = proxy.address
        cluster.start_worker(0)
    client = cluster.connect(transport="tcp")
    ns = keyspace(client, "n", UNIT)
    deadline_ms = int(CALL_S * 1e3)
    keys = list(range(24))
    for key in keys:
        assert put(ns, key, UNIT) is Outcome.STORED
    here = by_worker(cluster, ns, keys)
    assert here[0] and here[1]

    def took() -> float:
        began = time.monotonic()
        assert have(ns, here[1]) == len(here[1])
        return (time.monotonic() - began) / len(here[1])

    quiet = sorted(took() for _ in range(5))[2]
    threads = usage(cluster.worker(1)).threads
    loaded: list[float] = []

    def using(stop: threading.Event) -> None:
        chance = random.Random()
        while not stop.is_set():
            found = read(ns, chance.choice(keys), deadline_ms=deadline_ms)
            assert found == 1 or isinstance(found, MissCause)
            put(ns, f"new-{chance.randrange(100)}", UNIT, deadline_ms=deadline_ms)

    with running(*[using] * 4) as stop:
        if where == "process":
            cluster.worker(0).pause()
        else:
            assert proxy is not None
            proxy.blackhole()
        end = time.monotonic() + scaled(5.0, 60.0)
        while time.monotonic() < end and not stop.is_set():
            loaded.append(took())
        # by now the master knows (death timeout 4 s), unless only clients are cut off
        fresh = keyspace(cluster.connect(transport="tcp"), "n", UNIT)
        n_there = sum(put(fresh, f"late-{i}", UNIT, deadline_ms=3 * deadline_ms) in THERE for i in range(10))
        assert n_there == 10, "new puts avoid it"
    loaded.sort()
    assert loaded[len(loaded) // 2] < 3 * quiet + 0.05, (quiet, loaded)
    assert usage(cluster.worker(1)).threads <= threads + 4
    if where == "process":
        cluster.worker(0).resume()
    else:
        assert proxy is not None
        proxy.pass_on()
    states = lambda: [w["state"] for w in client.describe()["workers"]]  # noqa: E731
    wait_until(lambda: states() == ["up", "up"], timeout_s=20, what="both up again")
    wait_until(lambda: have(ns, here[0]) == len(here[0]), timeout_s=20, what="its blocks are served again")
    assert have(ns, here[1]) == len(here[1])


@pytest.mark.parametrize("in_flight", [0, 4])
def test_B18_the_old_client_works_again_after_restarts_and_never_lies(make_cluster: MakeCluster, in_flight: int) -> None:
    cluster = make_cluster(n_workers=1, dram=str(256 * UNIT))
    ns = keyspace(cluster.connect(), "n", UNIT)
    lock, numbers = threading.Lock(), iter(range(1 << 30))
    stored: list[str] = []  # since the worker's start

    def use(_: threading.Event | None = None) -> bool:
        with lock:
            key = f"k{next(numbers)}"
        try:
            outcome = put(ns, key, UNIT, deadline_ms=1000)
        except MasterUnavailable:
            return False
        if outcome not in THERE:
            return False
        with lock:
            stored.append(key)
        return read(ns, key, deadline_ms=1000) == 1

    def using(stop: threading.Event) -> None:
        while not stop.is_set():
            use()

    def works_within_10_s() -> None:
        wait_until(use, timeout_s=10, what="the old client works again")
        assert [use() for _ in range(5)] == [True] * 5

    def as_a_fresh_client_sees_it() -> None:
        with lock:
            last = stored[-150:]
        fresh = kvpool.connect(cluster.master_address)
        try:
            wait_until(lambda: fresh.describe()["complete"], timeout_s=10)
            assert have(keyspace(fresh, "n", UNIT), last) == len(last)
        finally:
            fresh.close()

    assert all(use() for _ in range(10))
    for role in ("worker", "master"):
        with running(*[using] * in_flight):
            if role == "worker":
                cluster.worker().kill()
                with lock:
                    stored.clear()
                cluster.start_worker(0)
                works_within_10_s()
            else:
                assert cluster.master is not None
                cluster.master.kill()
                use()  # a call while it is away
                cluster.start_master()
                works_within_10_s()
        with lock:
            del stored[: -200 if role == "master" else 0]
        as_a_fresh_client_sees_it()
