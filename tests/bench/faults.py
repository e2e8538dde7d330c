"""Prints the figures of faults on this machine, one JSON object a line: `python -m tests.bench.faults [NAME ...]`.

Each says what was measured beside its goal, and `ok`. Names: the functions of `FIGURES`. Real processes, one pool a figure.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
from kvpool.core.frames import HEADER_BYTES, Header, Op
from kvpool.core.types import Outcome, Tier
from kvpool.errors import KVPoolError
from tests.bench.figures import machine, restart
from tests.support.cluster import Cluster
from tests.support.confine import control_group, in_group, throttle
from tests.support.loop_disk import NoLoopDisk, loop_disk
from tests.support.observe import metrics, now, usage
from tests.support.payload import check, payload, payloads
from tests.support.probe import Probe
from tests.support.rough_pool import RoughPool
from tests.support.waiting import pause, wait_until

BLOCK = 16_384
N = 4  # blocks of a chain
Row = dict[str, Any]


@contextmanager
def pool(**settings: Any) -> Iterator[Cluster]:
    """A pool of its own, ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvpool-faults-") as directory:
        cluster = Cluster(Path(directory), worker_args=("--drain-timeout", "1s"), **settings).start()
        try:
            yield cluster
        finally:
            cluster.stop()


@contextmanager
def rough_pool(**settings: Any) -> Iterator[RoughPool]:
    with tempfile.TemporaryDirectory(prefix="kvpool-faults-") as directory:
        rough = RoughPool(Path(directory), **settings)
        try:
            yield rough.start()
        finally:
            rough.stop()


def space(client: Any, *, block_bytes: int = BLOCK, replicas: int = 1, name: str = "faults") -> kvpool.Namespace:
    layout = kvpool.KVLayout.opaque(block_bytes=block_bytes, block_tokens=1)
    namespace: kvpool.Namespace = client.namespace(name, layout, create=True, replicas=replicas)
    return namespace


def chain(ns: kvpool.Namespace, number: int, n: int = N) -> kvpool.PrefixHashes:
    return ns.hash(range(number * 1000, number * 1000 + n))


def values(number: int, n: int = N, size: int = BLOCK) -> np.ndarray[Any, Any]:
    return payloads([f"{number}/{i}" for i in range(n)], size=size)


def fill(ns: kvpool.Namespace, n_chains: int) -> None:
    for number in range(n_chains):
        done = ns.put(chain(ns, number), values(number, size=ns.block_bytes), deadline_ms=30_000)
        assert done.n_there == N, done


class Getters:
    """Threads with a client each that get chains at random, every byte checked; each call: (start, took, blocks, cause)."""

    def __init__(self, address: str, n: int, n_chains: int, *, deadline_ms: int = 2000, **settings: Any) -> None:
        self.calls: list[tuple[float, float, int, str]] = []
        self.wrong: list[str] = []
        self.deadline_ms = deadline_ms
        self._stop = threading.Event()
        self._clients = [kvpool.connect(address, **settings) for _ in range(n)]
        self._threads = [threading.Thread(target=self._run, args=(c, i, n_chains)) for i, c in enumerate(self._clients)]

    def _run(self, client: Any, index: int, n_chains: int) -> None:
        chance, ns, out = random.Random(index), space(client), np.empty((N, BLOCK), np.uint8)
        while not self._stop.is_set():
            number = chance.randrange(n_chains)
            hashes = chain(ns, number)
            began = time.monotonic()
            got = ns.get(hashes, out, deadline_ms=self.deadline_ms)
            took = time.monotonic() - began
            self.calls.append((began, took, got.n_blocks, got.miss.value if got.miss else ""))
            try:
                for i in range(got.n_blocks):
                    check(f"{number}/{i}", out[i])
            except AssertionError as error:
                self.wrong.append(str(error))

    def __enter__(self) -> Getters:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: len(self.calls) > 50 * len(self._threads), timeout_s=30, what="getters at work")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for client in self._clients:
            client.close()

    def since(self, at: float) -> list[tuple[float, float, int, str]]:
        """Calls that ended later."""
        return [call for call in self.calls if call[0] + call[1] >= at]


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def worker_killed() -> Row:
    """SIGKILL of one of two workers while 8 clients get blocks of which each has a copy."""
    with pool(n_workers=2, dram="128MiB") as cluster:
        fill(space(cluster.connect(), replicas=2), 200)
        with Getters(cluster.master_address, 8, 200) as getters:
            quiet = max(took for _, took, _, _ in getters.calls[200:])
            killed = time.monotonic()
            cluster.worker(0).kill()
            pause(4.0)
        after = getters.since(killed)
        slowest, missed = max(call[1] for call in after), sum(call[2] < N for call in after)
    row = {"clients": 8, "gets_after": len(after), "slowest_ms": ms(slowest), "slowest_before_ms": ms(quiet), "missed": missed}
    return row | {"wrong": len(getters.wrong), "goal_ms": 250, "ok": slowest < 0.25 and not missed and not getters.wrong}


def lost_blocks() -> Row:
    """SIGKILL of the only worker that had them: how long until a get of them says so at once."""
    with pool(n_workers=2, dram="128MiB") as cluster:
        client = cluster.connect()
        ns, out = space(client), np.empty((N, BLOCK), np.uint8)
        fill(ns, 100)
        ids = [cluster.worker(i).ready["id"] for i in range(2)]
        lost = [number for number in range(100) if ns.get(chain(ns, number), out).sources[0].worker == ids[0]]
        killed = time.monotonic()
        cluster.worker(0).kill()
        causes: Counter[str] = Counter()
        slow = 0.0
        for number in lost:
            began = time.monotonic()
            got = ns.get(chain(ns, number), out, deadline_ms=2000)
            causes[got.miss.value if got.miss else "hit"] += 1
            slow = max(slow, time.monotonic() - began)
        known_after = time.monotonic() - killed
    row = {"blocks": N * len(lost), "slowest_ms": ms(slow), "all_missed_after_s": round(known_after, 3), "causes": dict(causes)}
    return row | {"goal_s": 2.0, "ok": known_after < 2.0 and not causes["hit"]}


def restart_with_ssd(n_blocks: int = 50_000) -> Row:
    """SIGKILL of a worker with 50,000 blocks on SSD; from its next ready line until they are served."""
    size = 4096
    with pool(dram="16MiB", ssd="400MiB") as cluster:
        client = cluster.connect()
        ns = space(client, block_bytes=size)
        per = 500
        data = values(0, per, size)
        numbers = range((n_blocks + 5000) // per)
        for number in numbers:
            assert ns.put(chain(ns, number, per), data, deadline_ms=30_000).n_there == per
        wait_until(lambda: blocks_on_ssd(cluster) >= n_blocks, timeout_s=30, what="blocks on SSD")
        n_ssd = blocks_on_ssd(cluster)
        cluster.worker().kill()
        began = time.monotonic()
        cluster.start_worker(0)
        ready = time.monotonic()
        out = np.empty((per, size), np.uint8)
        chance = random.Random(1)
        first = wait_until(lambda: ns.get(chain(ns, 1, per), out).n_blocks and time.monotonic() - ready, timeout_s=20)
        wait_until(lambda: blocks_listed(client) >= n_ssd, timeout_s=20, what="all listed")
        listed = time.monotonic() - ready
        served = 0
        for _ in range(20):
            got = ns.get(chain(ns, chance.randrange(n_blocks // per - 10), per), out, deadline_ms=20_000)
            assert all(bytes(out[i]) == bytes(data[i]) for i in range(got.n_blocks))
            served += got.n_blocks
    row = {"blocks_on_ssd": n_ssd, "ready_s": round(ready - began, 2), "first_served_s": round(first, 3)}
    row |= {"all_listed_s": round(listed, 3), "sampled": 20 * per, "served": served}
    return row | {"goal_s": 2.0, "ok": max(first, listed) < 2.0 and served >= 0.95 * 20 * per}


def blocks_on_ssd(cluster: Cluster) -> int:
    return int(metrics(cluster.worker())['kvpool_tier_blocks{tier="ssd"}'])


def blocks_listed(client: Any) -> int:
    return int(client.describe()["namespaces"][0]["blocks"])


def worker_frozen() -> Row:
    """SIGSTOP of the only worker: calls that wait before the breaker opens, the time of those after it; SIGCONT: used again."""
    with pool(dram="64MiB") as cluster:
        ns, out = space(cluster.connect()), np.empty((N, BLOCK), np.uint8)
        fill(ns, 10)
        cluster.worker().pause()
        took = []
        end = time.monotonic() + 5.0
        while time.monotonic() < end:
            began = time.monotonic()
            ns.get(chain(ns, 3), out, deadline_ms=400)
            took.append(time.monotonic() - began)
        cluster.worker().resume()
        resumed = time.monotonic()
        wait_until(lambda: ns.get(chain(ns, 3), out, deadline_ms=400).n_blocks == N, timeout_s=20)
        again = time.monotonic() - resumed
    waited = next((i for i, one in enumerate(took) if one < 0.2), len(took))
    row = {"waiting_calls_before_open": waited, "calls": len(took), "slowest_ms": ms(max(took)), "deadline_ms": 400}
    row |= {"median_ms": ms(statistics.median(took)), "used_again_s": round(again, 3)}
    return row | {"goal": "3 failures, 3 s", "ok": waited <= 3 and again < 3.0 and max(took) < 0.65}


def master_killed() -> Row:
    """SIGKILL of the only master: mirrored gets before and while it is away. The index after its restart: `restart`."""
    with pool(dram="64MiB") as cluster:
        fill(space(cluster.connect()), 100)
        with Getters(cluster.master_address, 2, 100) as getters:
            pause(1.0)
            assert cluster.master is not None
            cluster.master.kill()
            killed = time.monotonic()
            pause(3.0)
        before, after = [c for c in getters.calls[100:] if c[0] + c[1] < killed], getters.since(killed)
        cluster.start_master()
    median = [ms(statistics.median(call[1] for call in calls)) for calls in (before, after)]
    row: Row = {"gets": len(after), "missed": sum(c[2] < N for c in after), "wrong": len(getters.wrong)}
    row["median_ms_before_after"] = median
    row["slowest_ms_before_after"] = [ms(max(call[1] for call in calls)) for calls in (before, after)]
    found = restart()
    row["restart"] = found
    good = not row["missed"] and median[1] < 1.5 * median[0] and found["all_found_s"] < 3.0
    return row | {"goal": "unaffected; 3 s", "ok": good}


def leader_killed() -> Row:
    """SIGKILL of the leader of two masters on Redis: until a removal works again, and what the index has lost."""
    with rough_pool(n_workers=2, dram="64MiB") as rough:
        client = kvpool.connect(rough.addresses, mirror=False)
        try:
            ns = space(client)
            fill(ns, 250)
            probe = Probe(rough.addresses, "probe", worker_id=None, seed=1)
            probe.start()
            wait_until(lambda: probe.recovered(0.0), what="a removal")
            leader = next(i for i, one in enumerate(rough.masters) if metrics(one).get("kvpool_leading_state"))
            rough.masters[leader].kill()
            killed = time.monotonic()
            after = wait_until(lambda: probe.recovered(killed), timeout_s=30)
            wait_until(lambda: client.describe()["complete"], timeout_s=20)
            complete = time.monotonic() - killed
            lost = sum(N - ns.match(chain(ns, number)) for number in range(250))
            probe.stop.set()
            probe.join()
            rough.restart_master(leader)
        finally:
            client.close()
    row = {"serves_after_s": round(after, 2), "complete_after_s": round(complete, 2), "blocks": 250 * N, "lost": lost}
    return row | {"goal_s": 3.0, "ok": after < 3.0 and not lost}


HALF_A_PUT = """
import sys, numpy as np, kvpool
from kvpool.core.frames import Op
from tests.support.raw_client import RawClient, write_meta
client = kvpool.connect(sys.argv[1])
ns = client.namespace("faults", kvpool.KVLayout.opaque(block_bytes=1 << 20, block_tokens=1), create=True)
raw = RawClient(sys.argv[2])
blocks = [bytes(1 << 20)] * 8
raw.send(Op.WRITE, write_meta(ns.hash(range(8)).key_batch(ns._spec.uid), blocks, chunk_bytes=262144), payload=bytes(3 << 20),
         payload_bytes=8 << 20, deadline_ms=60_000)
print("half", flush=True)
sys.stdin.read()
"""


def writer_killed() -> Row:
    """SIGKILL of a process in the middle of a put."""
    with pool(dram="64MiB") as cluster:
        ns, worker = space(cluster.connect(), block_bytes=1 << 20), cluster.worker()
        data = values(0, 8, 1 << 20)
        command = [sys.executable, "-c", HALF_A_PUT, cluster.master_address, worker.address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == "half\n"
            wait_until(lambda: now(worker, "reserved") == 8)
            writer.kill()
            killed = time.monotonic()
            wait_until(lambda: not now(worker, "reserved"), timeout_s=10)
            free = time.monotonic() - killed
            began = time.monotonic()
            done = ns.put(ns.hash(range(8)), data, deadline_ms=5000)
            put = time.monotonic() - began
    row = {"slots_free_s": round(free, 3), "put_by_another_ms": ms(put), "stored": done.count(Outcome.STORED)}
    return row | {"goal_s": 1.0, "ok": free < 1.0 and done.count(Outcome.STORED) == 8}


def flipped_bits(n_bits: int = 10_000) -> Row:
    """Bits flipped at random in the slab files of a worker of which half of the blocks are on SSD alone."""
    size, n_chains = 4096, 400
    per = 40
    with pool(dram="32MiB", ssd="128MiB") as cluster:
        ns = space(cluster.connect(), block_bytes=size)
        for number in range(n_chains):
            assert ns.put(chain(ns, number, per), values(number, per, size), deadline_ms=30_000).n_there == per
        wait_until(lambda: not now(cluster.worker(), "demoting"))
        chance, flipped = random.Random(7), 0
        files = sorted(cluster.ssd_dir(0).glob("slab-*.kv"))
        for _ in range(n_bits):
            with chance.choice(files).open("r+b", buffering=0) as file:
                at = chance.randrange(file.seek(0, 2))
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                flipped += file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))
        wrong, hits, causes, tiers = 0, 0, Counter[str](), Counter[str]()
        out = bytearray(size)
        for number in range(n_chains):
            whole = chain(ns, number, per)
            for i in range(per):
                got = ns.get(whole[i : i + 1], [out])
                if not got.n_blocks:
                    causes[got.miss.value if got.miss else "?"] += 1
                    continue
                hits += 1
                tiers[got.sources[0].tier.value] += 1
                wrong += bytes(out) != payload(f"{number}/{i}", 1, size)
        counted = metrics(cluster.worker())
        corrupt = counted['kvpool_block_events_total{event="corrupt_ssd"}'], counted['kvpool_scrub_corrupt_total{tier="ssd"}']
    row = {"bits": flipped, "blocks": n_chains * per, "hits": hits, "from": dict(tiers), "misses": dict(causes), "wrong": wrong}
    row |= {"corrupt": int(corrupt[0]), "of_those_by_scrubber": int(corrupt[1])}
    return row | {"goal": "0 wrong", "ok": not wrong and corrupt[0] > 0 and tiers[Tier.SSD.value] > 0}


def garbage(n: int = 1000) -> Row:
    """1,000 connections that send garbage, half of them kept open, while a client works."""
    with pool(dram="64MiB") as cluster:
        fill(space(cluster.connect()), 50)
        worker = cluster.worker()
        host, _, port = worker.address.rpartition(":")
        chance = random.Random(3)
        with Getters(cluster.master_address, 2, 50, transport="tcp") as getters:
            pause(1.0)
            began, before = time.monotonic(), usage(worker)
            kept = []
            for i in range(n):
                sock = socket.create_connection((host, int(port)), timeout=5)
                half = Header(Op.HELLO, request_id=1, deadline_ms=60_000, meta_bytes=100).encode()[: 1 + i % HEADER_BYTES]
                with contextlib.suppress(OSError):
                    sock.sendall(chance.randbytes(chance.randrange(1, 2000)) if i % 2 else half)
                if i % 2:
                    sock.close()
                else:
                    kept.append(sock)
            pause(1.0)
            during = usage(worker)
            for sock in kept:
                sock.close()
            wait_until(lambda: usage(worker).fds <= before.fds + 2, timeout_s=30, what="descriptors given back")
            ended = time.monotonic()
        quiet, loud = [c for c in getters.calls[100:] if c[0] + c[1] < began], [c for c in getters.calls if began <= c[0] < ended]
    row: Row = {"connections": n, "gets": len(loud), "missed": sum(c[2] < N for c in loud), "wrong": len(getters.wrong)}
    row["median_ms_before_during"] = [ms(statistics.median(call[1] for call in calls)) for calls in (quiet, loud)]
    row["slowest_ms_before_during"] = [ms(max(call[1] for call in calls)) for calls in (quiet, loud)]
    row |= {"fds": [before.fds, during.fds], "rss_mib": [before.rss >> 20, during.rss >> 20]}
    return row | {"goal": "unaffected", "ok": not row["missed"] and not row["wrong"] and during.rss < before.rss + (64 << 20)}


def disk_full() -> Row:
    """The SSD tier's disk has no room (a tmpfs): DRAM goes on, status says why, it is used again when there is room."""
    with rough_pool(n_workers=1, n_masters=1, dram="8MiB") as rough:
        if rough.disk is None:
            return {"ok": None, "reason": "no tmpfs can be mounted here"}
        rough.fill_disk()
        client = kvpool.connect(rough.addresses)
        try:
            ns, slow, not_there = space(client), 0.0, 0
            for number in range(400):
                began = time.monotonic()
                not_there += ns.put(chain(ns, number), values(number)).n_there < N
                slow = max(slow, time.monotonic() - began)
            state = client.describe()["workers"][0]["tiers"]["ssd"]["state"]
            rough.free_disk()
            freed = time.monotonic()
            wait_until(lambda: metrics(rough.workers[0])['kvpool_tier_ok{tier="ssd"}'] == 1.0, timeout_s=60)
            back = time.monotonic() - freed
        finally:
            client.close()
    row = {"puts": 400, "not_stored": not_there, "slowest_put_ms": ms(slow), "state": state, "back_s": round(back, 2)}
    return row | {"ok": not not_there and state != "ok"}


SICK = 'kvpool_tier_ok{tier="ssd"}'


def disk_eio() -> Row:
    """Every access to the SSD tier's disk gives EIO (a loop device): DRAM goes on, and the tier is back when it is well."""
    with tempfile.TemporaryDirectory(prefix="kvpool-faults-") as directory:
        cluster = Cluster(Path(directory), dram="8MiB", ssd="64MiB", worker_args=("--drain-timeout", "1s"))
        try:
            with loop_disk(cluster.ssd_dir(0), size=256 << 20) as disk:
                try:
                    return _disk_trouble(cluster.start(), disk.fail, disk.heal, seconds=5.0)
                finally:
                    cluster.stop()
        except NoLoopDisk as error:
            return {"ok": None, "reason": f"no loop device here: {error}"}


def disk_stalled(seconds: float = 30.0) -> Row:
    """The SSD tier's disk moves one byte a second (the worker's control group is throttled) for half a minute."""
    with control_group("blkio") as group, tempfile.TemporaryDirectory(prefix="kvpool-faults-", dir=".") as directory:
        where = Path(directory)
        cluster = Cluster(where, dram="8MiB", ssd="64MiB", worker_args=("--drain-timeout", "1s"), worker_prefix=in_group(group))
        try:
            return _disk_trouble(
                cluster.start(), lambda: throttle(group, where, read=1, write=1), lambda: throttle(group, where), seconds=seconds
            )
        finally:
            throttle(group, where)
            cluster.stop()


def _disk_trouble(cluster: Cluster, fail: Callable[[], None], heal: Callable[[], None], *, seconds: float) -> Row:
    """Gets of blocks in DRAM, gets of blocks on the disk and puts (more than DRAM has), while the disk is ill and afterwards."""
    deadline_ms = 1000
    client = cluster.connect()
    ns, out = space(client), np.empty((N, BLOCK), np.uint8)
    fill(ns, 400)  # 25 MiB: three times the DRAM
    worker = cluster.worker()
    wait_until(lambda: blocks_on_ssd(cluster) > 1000, timeout_s=30, what="blocks on the disk")
    fail()
    began, number = time.monotonic(), 1000
    outcomes, found, slow, slow_dram, out_after, state = Counter[str](), Counter[str](), 0.0, 0.0, 0.0, "ok"
    try:
        while (at := time.monotonic()) < began + seconds:
            outcomes.update(one.value for one in ns.put(chain(ns, number), values(number), deadline_ms=deadline_ms).outcomes)
            put_at = time.monotonic()
            fresh = ns.get(chain(ns, number), out, deadline_ms=deadline_ms)
            slow_dram = max(slow_dram, time.monotonic() - put_at)
            found["dram" if fresh.n_blocks == N else "dram missed"] += 1
            got = ns.get(chain(ns, number % 400), out, deadline_ms=deadline_ms)
            wrong = got.n_blocks and not np.array_equal(out[: got.n_blocks], values(number % 400)[: got.n_blocks])
            found["wrong" if wrong else "hit" if got.n_blocks == N else str(got.miss and got.miss.value)] += 1
            slow = max(slow, time.monotonic() - at)
            if not out_after and metrics(worker)[SICK] == 0:
                out_after = time.monotonic() - began
            if out_after and state == "ok":  # (the master hears of it with the next heartbeat)
                state = client.describe()["workers"][0]["tiers"]["ssd"]["state"]
            number += 1
    finally:
        heal()
    healed = time.monotonic()
    wait_until(lambda: metrics(worker)[SICK] == 1, timeout_s=60, what="the tier is back")
    back = time.monotonic() - healed
    row = {"seconds": seconds, "rounds": number - 1000, "out_after_s": round(out_after, 2), "state": state, "gets": dict(found)}
    row |= {"puts": dict(outcomes), "slowest_round_ms": ms(slow), "slowest_dram_get_ms": ms(slow_dram), "back_s": round(back, 2)}
    late = slow > 3 * deadline_ms / 1e3 + 0.5
    well = bool(out_after) and state != "ok" and not found["wrong"] and not late
    return row | {"goal": "taken out, DRAM goes on, status says why, back when well", "ok": well and not found["dram missed"]}


def redis_down(seconds: float = 30.0) -> Row:
    """Redis is away: gets and puts of open namespaces go on, changes of namespaces and removals say clearly that they cannot."""
    with rough_pool(n_workers=2, dram="64MiB") as rough:
        client = kvpool.connect(rough.addresses)
        try:
            ns, out = space(client), np.empty((N, BLOCK), np.uint8)
            fill(ns, 50)
            assert rough.redis is not None
            rough.redis.kill()
            end, number = time.monotonic() + seconds, 1000
            missed, outcomes, slow = 0, Counter[str](), 0.0
            while time.monotonic() < end:
                began = time.monotonic()
                missed += ns.get(chain(ns, number % 50), out).n_blocks < N
                outcomes.update(one.value for one in ns.put(chain(ns, number), values(number)).outcomes)
                slow = max(slow, time.monotonic() - began)
                number += 1
            said = []
            for change in (lambda: space(client, name="new"), lambda: ns.remove(chain(ns, 1))):
                began = time.monotonic()
                try:
                    change()
                    said.append("done")
                except KVPoolError as error:
                    said.append(f"{type(error).__name__} after {time.monotonic() - began:.2f} s")
            rough.redis.start()
            back = time.monotonic()
            wait_until(lambda: _works(lambda: ns.remove(chain(ns, 1))), timeout_s=30)
            again = time.monotonic() - back
        finally:
            client.close()
    row = {"seconds": seconds, "gets_missed": missed, "put_blocks": dict(outcomes), "slowest_ms": ms(slow), "said": said}
    there = set(outcomes) <= {"stored", "already", "unlisted"}
    return row | {"works_again_s": round(again, 2), "ok": not missed and there and "done" not in said}


def _works(call: Callable[[], object]) -> bool:
    with contextlib.suppress(KVPoolError):
        call()
        return True
    return False


FIGURES: dict[str, Callable[[], Row]] = {
    figure.__name__: figure
    for figure in (worker_killed, lost_blocks, restart_with_ssd, worker_frozen, master_killed, leader_killed, writer_killed,
                   redis_down, disk_full, disk_eio, disk_stalled, flipped_bits, garbage)
}  # fmt: skip


def main(names: list[str]) -> int:
    print(json.dumps({"machine": machine()}), flush=True)
    failed = False
    for name in names or list(FIGURES):
        row = FIGURES[name]()
        failed = failed or row["ok"] is False
        print(json.dumps({"figure": name} | row), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
