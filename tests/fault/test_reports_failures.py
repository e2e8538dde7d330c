"""What other pools were reported to get wrong, asserted right here, against real processes: failure, capacity, SSD, concurrency,
security and operability. Test names carry the report's id. Sizes: one `UNIT` stands for 1 MiB of the report; `make reports`
runs all of it at full size.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.core.frames import CodesAnswer, Op, Status, WriteRequest
from kvpool.core.types import BlockCode, MissCause, Outcome, RemoveOutcome
from kvpool.errors import InvalidArgument, MasterUnavailable
from tests.support.cluster import Cluster
from tests.support.confine import control_group, in_group, private_mounts, throttle
from tests.support.keyed import SLACK_S, THERE, Child, churn, hash_of, have, keyspace, put, read
from tests.support.observe import metrics, usage
from tests.support.payload import check, payload
from tests.support.processes import Role, run_cli
from tests.support.proxy import free_port
from tests.support.raw_client import RawClient
from tests.support.s0 import CALL_S, MIB, NO_SCRUB, STORED_OR_NOT, UNIT, cpu_s, event, push_out, running, s0, tier_event, used
from tests.support.scale import FULL, scaled
from tests.support.scripted_worker import batch, scripted
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.reports, pytest.mark.timeout(1500)] if FULL else [pytest.mark.timeout(120)]

MakeCluster = Callable[..., Cluster]


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


@pytest.mark.parametrize("transport", scaled(["shm"], ["shm", "tcp"]))
def test_B60_many_readers_of_one_cold_chain_read_the_disk_about_once(
    make_cluster: MakeCluster, tmp_path: Path, transport: str
) -> None:
    n, n_processes, n_threads = 64, scaled(3, 32), scaled(12, 32)
    cluster = s0(make_cluster, n_workers=1, dram=str(96 * UNIT), ssd=str(512 * UNIT), env=NO_SCRUB)
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
    assert n_ops > scaled(500, 30_000), n_ops  # (on two cores, with as many threads that take turns every 10 us)
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
    make_cluster: MakeCluster, make_proxy: Callable[..., Any], tmp_path: Path, where: str
) -> None:
    """The relay of the data port listens on 127.0.0.2, which the worker advertises, at the worker's own port number."""
    config = tmp_path / "master.toml"
    config.write_text(f"[master]\nsuspect_after_ms = 800\ndead_after_ms = {scaled(1500, 4000)}\n")
    cluster = make_cluster(n_workers=2, dram=str(256 * UNIT), master_args=("--config", str(config)))
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
        end = time.monotonic() + scaled(1.8, 60.0)
        while time.monotonic() < end and not stop.is_set():
            loaded.append(took())
        # by now the master knows (its death timeout has passed), unless only clients are cut off
        fresh = keyspace(cluster.connect(transport="tcp"), "n", UNIT)
        n_there = sum(put(fresh, f"late-{i}", UNIT, deadline_ms=2 * deadline_ms) in THERE for i in range(10))
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
    assert [read(ns, key) for key in here[1]] == [1] * len(here[1])


@pytest.mark.parametrize("in_flight", [0, 4])
def test_B18_the_old_client_works_again_after_restarts_and_never_lies(make_cluster: MakeCluster, in_flight: int) -> None:
    by_recency = {"KVPOOL_WORKER__POLICY": "lru"}  # what was used last is there
    cluster = make_cluster(n_workers=1, dram=str(256 * UNIT), env=by_recency)
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


# --- capacity -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["no ssd", "small ssd", "held", "put sessions"])
def test_B21_a_full_pool_says_full_and_lives(make_cluster: MakeCluster, how: str) -> None:
    """There is no connector to put in the engine's place yet: put sessions are what one would use."""
    n_threads, n_keys = scaled(4, 16), scaled(300, 2000)
    cluster = make_cluster(dram=str(16 * UNIT), ssd=str(16 * UNIT) if how == "small ssd" else None)
    client = cluster.connect()
    ns = keyspace(client, "n", UNIT)
    end = time.monotonic() + scaled(20.0, 60.0)
    told: Counter[Any] = Counter()
    lock = threading.Lock()

    def put_any(key: int) -> Outcome:
        if how != "put sessions":
            return put(ns, key, UNIT)
        with ns.put_session(hash_of(ns, key), deadline_ms=5000) as session:
            session.write(0, UNIT // 2, payload(key, 1, UNIT)[UNIT // 2 :])
            session.write(0, 0, payload(key, 1, UNIT)[: UNIT // 2])
            return session.commit().outcomes[0]

    def using(index: int) -> Callable[[threading.Event], None]:
        def use(stop: threading.Event) -> None:
            chance = random.Random(index)
            for key in range(index, n_keys, n_threads):
                if stop.is_set() or time.monotonic() > end:
                    break
                outcome = put_any(key)
                found = read(ns, chance.randrange(key + 1))
                with lock:
                    told[outcome] += 1
                    told[found] += 1

        return use

    with ExitStack() as stack:
        if how == "held":
            for i in range(16):
                put(ns, f"held{i}", UNIT)
                stack.enter_context(ns.hold(hash_of(ns, f"held{i}"), ttl_ms=120_000))
        jobs = [using(index) for index in range(n_threads)]
        threads_done: list[int] = []

        def counted(job: Callable[[threading.Event], None]) -> Callable[[threading.Event], None]:
            def run(stop: threading.Event) -> None:
                try:
                    job(stop)
                finally:
                    threads_done.append(1)

            return run

        with running(*map(counted, jobs)):
            wait_until(lambda: len(threads_done) == n_threads, timeout_s=scaled(60.0, 120.0))
        outcomes = {outcome for outcome in told if isinstance(outcome, Outcome)}
        assert outcomes <= STORED_OR_NOT, told
        assert told[Outcome.STORED] and told[1], told
    assert cluster.worker().process.poll() is None
    for i in range(10):
        assert put(ns, f"after-{i}", UNIT) is Outcome.STORED
        assert read(ns, f"after-{i}") == 1
    assert "Traceback" not in cluster.worker().log_text()


def test_B23_a_small_dev_shm_is_no_limit_and_kills_nobody(make_cluster: MakeCluster) -> None:
    """Memory is memfds, which no mount's size limits: pools larger than /dev/shm, and a full one, must just work."""
    fill = f"head -c {32 * UNIT} /dev/zero > /dev/shm/hog || :"
    prefix = private_mounts(f"mount -t tmpfs -o size={16 * UNIT} tmpfs /dev/shm; {fill}")
    cluster = make_cluster(n_workers=2, dram=str(48 * UNIT), worker_prefix=prefix)
    shm = subprocess.run(["nsenter", "-m", "-t", str(cluster.worker().pid), "df", "--output=avail,size", "-B1", "/dev/shm"],
                         capture_output=True, text=True, check=True, timeout=20)  # fmt: skip
    assert [int(word) for word in shm.stdout.split()[-2:]] == [0, 16 * UNIT]
    ns = keyspace(cluster.connect(), "n", UNIT)
    keys = range(100)
    for key in keys:
        assert put(ns, key, UNIT) is Outcome.STORED
    assert have(ns, keys) >= 80
    for worker in range(2):
        assert cluster.worker(worker).process.poll() is None


def test_B23_more_memory_than_the_container_has_stops_the_start_and_says_so(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(dram="1MiB")
    with control_group("memory") as group:
        (group / "memory.limit_in_bytes").write_text(str(160 * MIB))
        args = ["worker", "--master", cluster.master_address, "--port", "0", "--data-dir", str(tmp_path / "w")]
        big = Role([*args, "--dram", "256MiB"], log=tmp_path / "big.log", prefix=in_group(group))
        try:
            assert big.process.wait(timeout=20) in (1, 2)
        finally:
            big.kill()
        said = big.log_text()
        assert "dram" in said and str(256 * MIB) in said and str(160 * MIB) in said and "Traceback" not in said, said
        fits = Role([*args, "--dram", "32MiB"], log=tmp_path / "fits.log", prefix=in_group(group))
        try:
            fits.wait_ready()
        finally:
            assert fits.stop() == 0


@pytest.mark.parametrize("ssd", [False, True])
def test_B34_puts_end_when_nothing_can_be_evicted_and_work_after_the_release(make_cluster: MakeCluster, ssd: bool) -> None:
    """At most half of a tier may be held, so the other half is in open put sessions."""
    cluster = make_cluster(dram=str(16 * UNIT), ssd=str(64 * UNIT) if ssd else None)
    ns = keyspace(cluster.connect(), "n", UNIT)
    below = [f"below{i}" for i in range(8)]
    if ssd:
        for key in below:
            put(ns, key, UNIT)
        push_out(ns, "other", 48)
    sessions = [ns.put_session(hash_of(ns, f"open{i}"), deadline_ms=60_000) for i in range(8)]
    held = [f"held{i}" for i in range(8)]
    for key in held:
        assert put(ns, key, UNIT) is Outcome.STORED
    holds = [ns.hold(hash_of(ns, key), ttl_ms=60_000) for key in held]
    assert [hold.n_blocks for hold in holds] == [1] * 8
    told: list[Outcome] = []

    def putting(index: int) -> Callable[[threading.Event], None]:
        return lambda stop: told.append(put(ns, f"more{index}", UNIT, deadline_ms=2000))

    assert cluster.master is not None
    roles = (cluster.master, cluster.worker())
    began, before = time.monotonic(), [cpu_s(role) for role in roles]
    with running(*map(putting, range(8))):
        if ssd:
            assert have(ns, below, deadline_ms=2000) >= 1  # from staging
        wait_until(lambda: len(told) == 8, timeout_s=2 + SLACK_S)
    if not ssd or Outcome.STORED not in told:  # held blocks with a copy below may give up their place in DRAM
        assert set(told) == {Outcome.FULL}
    calm = scaled(1.0, 10.0)
    wait_until(lambda: time.monotonic() - began > calm, timeout_s=calm + 1)
    for role, was in zip(roles, before, strict=True):
        assert cpu_s(role) - was < 0.5 * (time.monotonic() - began), role.args
    assert have(ns, held) == 8
    for hold in holds:
        hold.release()
    for session in sessions:
        session.abort()
    wait_until(lambda: put(ns, "after", UNIT, deadline_ms=1000) in THERE, timeout_s=1 + SLACK_S)


def test_B34_a_dram_tier_that_is_too_small_for_a_block_ends_puts(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram="4096", ssd=str(64 * UNIT))
    ns = keyspace(cluster.connect(), "n", UNIT)
    assert put(ns, "large", UNIT, deadline_ms=2000) in (Outcome.FULL, Outcome.REJECTED)
    assert put(ns, "small", 4096, deadline_ms=2000) in STORED_OR_NOT


def rss(role: Role) -> int:
    return usage(role).rss


def test_B37_the_masters_memory_is_bounded_by_what_is_stored(make_cluster: MakeCluster, tmp_path: Path) -> None:
    config = tmp_path / "master.toml"
    config.write_text(f"[master]\ngone_memory_keys = {scaled(5_000, 200_000)}\n")
    cluster = make_cluster(dram="4MiB", master_args=("--config", str(config)))
    block, batch, n_batches = 4096, 500, scaled(80, 2000)
    assert cluster.master is not None
    ns = keyspace(cluster.connect(mirror=False), "n", block)
    data = np.zeros((batch, block), np.uint8)
    samples = []
    for number in range(n_batches):
        keys = [number.to_bytes(16, "big") + i.to_bytes(16, "big") for i in range(batch)]
        assert set(ns.put(ns.hashes(keys), data, visibility="eventual").outcomes) <= STORED_OR_NOT
        ns.match(ns.hashes([b"\xff" * 16 + key for key in keys]))
        if number % (n_batches // 20) == 0:
            samples.append(rss(cluster.master))
    half = samples[len(samples) // 2]
    assert samples[-1] - half < min(50 * MIB, half // 10), samples
    replicas = lambda: kvpool_index(cluster)  # noqa: E731
    wait_until(lambda: replicas() <= 1200, timeout_s=10, what="the index has what the pool has")


def kvpool_index(cluster: Cluster) -> float:
    assert cluster.master is not None
    return metrics(cluster.master)["kvpool_index_replicas"]


def test_B37_what_dead_workers_and_tenants_had_goes_from_the_index(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Workers that died stay listed as down (removals must reach them), bounded in number; what they had does not."""
    config = tmp_path / "master.toml"
    config.write_text("[master]\nheartbeat_ms = 100\nsuspect_after_ms = 300\ndead_after_ms = 600\n")
    cluster = make_cluster(n_workers=0, master_args=("--config", str(config)))
    client = cluster.connect(mirror=False)
    ns = keyspace(client, "n", 4096)
    uid, n_workers = ns._spec.uid, scaled(8, 50)
    for number in range(n_workers):
        with scripted(cluster.master_address, f"w{number}") as worker:
            worker.join()
            keys = [bytes([number]) * 30 + i.to_bytes(4, "big") for i in range(1000)]
            worker.inventory([batch(uid, keys)])
    wait_until(lambda: kvpool_index(cluster) == 0, timeout_s=10, what="dead owners' blocks are gone")
    wait_until(lambda: {w["state"] for w in client.describe()["workers"]} == {"down"}, timeout_s=10)
    assert ns.match(hash_of(ns, 1)) == 0
    assert cluster.master is not None
    sizes = []
    for number in range(scaled(200, 1000)):
        keyspace(client, f"tenant-{number}", 4096)
        sizes.append(rss(cluster.master))
    assert sizes[-1] - sizes[0] < 50 * MIB


def test_B50_sizes_beyond_the_tiers_are_refused_and_harm_nobody(make_cluster: MakeCluster) -> None:
    cluster = s0(make_cluster)
    ns = keyspace(cluster.connect(), "n", 300 * UNIT)
    small = [f"small{i}" for i in range(8)]
    for key in small:
        assert put(ns, key, UNIT) is Outcome.STORED
    for size in (64 * UNIT + UNIT, 100 * UNIT, 300 * UNIT):
        before = [event(cluster.worker(i), "evicted") for i in range(2)]
        assert put(ns, f"big{size}", size, deadline_ms=10_000) in (Outcome.FULL, Outcome.REJECTED)
        assert [event(cluster.worker(i), "evicted") for i in range(2)] == before
        assert have(ns, small) == 8, "a put that cannot be served evicts nothing"
    told = {}
    for size in (1, 4 * UNIT - 1, 4 * UNIT + 1, 16 * UNIT, 63 * UNIT, 64 * UNIT, 64 * UNIT + 1):
        told[size] = put(ns, size, size, deadline_ms=10_000)
        assert told[size] in (Outcome.STORED, Outcome.FULL, Outcome.REJECTED)
        if told[size] is Outcome.STORED:
            assert read(ns, size, size=size) == 1
    assert [told[size] for size in (1, 4 * UNIT - 1, 4 * UNIT + 1, 16 * UNIT)] == [Outcome.STORED] * 4, told
    assert told[64 * UNIT + 1] is not Outcome.STORED
    push_out(ns, "other", 2 * 128)
    tiers = set()
    for size, outcome in told.items():
        got = ns.get(hash_of(ns, size), [bytearray(300 * UNIT)], deadline_ms=10_000)
        if outcome is Outcome.STORED and got.n_blocks:
            tiers.add(got.sources[0].tier.value)
            assert read(ns, size, size=size) == 1
    assert "ssd" in tiers
    for worker in range(2):
        assert cluster.worker(worker).process.poll() is None


def test_B50_declared_sizes_of_any_kind_are_no_trouble(make_cluster: MakeCluster) -> None:
    """A block of 4 GiB is refused when the layout is made."""
    for n_bytes in ((4 << 30) + MIB, 1 << 63, -1, 0):
        with pytest.raises(InvalidArgument, match="block_bytes"):
            kvpool.KVLayout.opaque(block_bytes=n_bytes)
    cluster = make_cluster(dram=str(64 * UNIT))
    client = cluster.connect()
    ns = keyspace(client, "n", UNIT)
    assert put(ns, "neighbour", UNIT) is Outcome.STORED
    for size in (2**31 - 1, 2**31, 2**32 - 1, 2**32 + 1, 2**63, 2**64 - 1):
        for payload_bytes in (100, min(size, 2**63)):
            with suppress(OSError), RawClient(cluster.worker().address, timeout_s=5) as raw:
                batch_ = hash_of(ns, f"raw{size}").key_batch(ns._spec.uid)
                meta = WriteRequest(batch_, np.array([size], np.uint64), np.zeros(1, np.uint64)).encode()
                raw.send(Op.WRITE, meta, payload=bytes(100), payload_bytes=payload_bytes)
                if payload_bytes == 100:
                    answer = raw.receive()
                    assert answer.status is not Status.OK or BlockCode.STORED not in CodesAnswer.decode(answer.meta).codes
    assert read(ns, "neighbour", size=UNIT) == 1
    assert put(ns, "neighbour2", UNIT) is Outcome.STORED
    assert used(cluster.worker())[0] <= 3 * UNIT
    assert "Traceback" not in cluster.worker().log_text()


@pytest.mark.parametrize("slow", [False, True])
def test_B75_every_block_goes_down_or_is_counted(make_cluster: MakeCluster, slow: bool, tmp_path: Path) -> None:
    with ExitStack() as stack:
        prefix: tuple[str, ...] = ()
        if slow:
            group = stack.enter_context(control_group("blkio"))
            throttle(group, tmp_path, write=100 * UNIT // 2)
            prefix = in_group(group)
        cluster = make_cluster(dram=str(16 * UNIT), ssd=str(256 * UNIT), worker_prefix=prefix)
        stack.callback(cluster.stop)
        ns = keyspace(cluster.connect(), "n", UNIT)
        n = 100
        hashes = hash_of(ns, *range(n))
        told: list[Outcome] = []
        for i in range(0, n, 10):
            told += ns.put(hashes[i : i + 10], [payload(k, 1, UNIT) for k in range(i, i + 10)], deadline_ms=20_000).outcomes
        stored = [key for key, outcome in enumerate(told) if outcome is Outcome.STORED]
        wait_until(lambda: metrics(cluster.worker())['kvpool_blocks_now{what="demoting"}'] == 0, timeout_s=20)
        out = [bytearray(UNIT) for _ in range(n)]
        dropped = event(cluster.worker(), "dropped_dirty") + event(cluster.worker(), "demote_failed")
        there = ns.get(hashes, out, deadline_ms=20_000).n_blocks
        assert there == len(stored) == n or (dropped and there + dropped >= len(stored)), (there, len(stored), dropped)
        if not slow:
            assert there == n and not dropped
        for key in range(there):
            check(key, out[key])
        if slow:
            cluster.worker().stop()
            cluster.start_worker(0)
            found = [read(ns, key) for key in range(n)]
            assert found.count(1) >= n - 16 - dropped, "only what was in DRAM alone is lost"
            assert set(found) <= {1, MissCause.WORKER_LOST}
