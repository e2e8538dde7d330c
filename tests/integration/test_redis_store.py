"""The store on a real redis: fences, take-overs, late and repeated writes, outages, alien values, replicas, Sentinel, Cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.core.election import LeaseTerms, Renew, Role, Standing, Take
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.removals import Removal
from kvpool.core.types import Epoch, NamespaceUid, WorkerId
from kvpool.errors import ConfigError, Fenced, KVPoolError, StoreUnavailable
from kvpool.master import redis_scripts as scripts
from kvpool.master.election import Elector
from kvpool.master.redis_link import CONNECTIONS_MAX, StoreDamaged
from kvpool.master.redis_store import RedisStore
from kvpool.master.store import NamespaceRecord, WorkerRecord
from tests.support.lease_model import TERMS, ModelStore
from tests.support.proxy import TcpProxy, free_port
from tests.support.redis import RedisServer, cluster_of_one, replica_of, sentinel_for
from tests.support.waiting import wait_until

UID = NamespaceUid(b"u" * 16)
RECORD = NamespaceRecord(NamespaceSpec.of("n", KVLayout.opaque(block_bytes=4096), uid=UID, hash="external"), 1)
WORKER = WorkerRecord(WorkerId("w1"), 2**64 - 1, "host", "h:1", "h:2", 5, True)
KEY = b"k" * 34
TAG = "{kvpool:default}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
def redis(shared: RedisServer) -> RedisServer:
    """A running, empty redis that is not to be harmed."""
    shared.command("FLUSHALL")
    return shared


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """A running redis of this test's own, to be frozen and killed."""
    server = RedisServer(tmp_path / "own").start()
    yield server
    server.stop()


@contextlib.asynccontextmanager
async def leading(url: str, **settings: Any) -> AsyncIterator[RedisStore]:
    """A store that leads for one term, without anybody who renews."""
    store = RedisStore(url, **settings)
    try:
        reply = await store.take(floor=Epoch(0), address="")
        assert reply.granted, reply
        store.adopt(reply.epoch)
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def electing(url: str, name: str, *, terms: LeaseTerms | None = None) -> AsyncIterator[tuple[Elector, RedisStore]]:
    store = RedisStore(url, master_id=name, terms=terms)
    elector = Elector(store, address=f"{name}:1", terms=terms)
    task = asyncio.create_task(elector.run())
    try:
        yield elector, store
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()


async def until(elector: Elector, role: Role, *, timeout_s: float = 10.0) -> Standing:
    async with asyncio.timeout(timeout_s):
        standing = elector.standing()
        while standing.role is not role:
            standing = await elector.changed(standing)
        return standing


async def eventually(call: Callable[[], Awaitable[None]], *, timeout_s: float) -> None:
    """Until the store is available. Ends with what it said last."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return await call()
        except StoreUnavailable:
            if time.monotonic() > end:
                raise


def all_writes(store: RedisStore) -> list[Callable[[], Awaitable[None]]]:
    return [
        lambda: store.put_namespace(RECORD),
        lambda: store.log_removal(UID, Removal(1, KEY), first_seq=1),
        lambda: store.put_worker(WORKER),
        lambda: store.delete_worker(WORKER.worker_id),
        lambda: store.delete_namespace(UID),
    ]


def dump(server: RedisServer) -> dict[str, bytes]:
    """Everything but the lease's time."""
    names = [f"{TAG}:{name}" for name in ("meta", "namespaces", "removal_seqs", "workers", f"removals:{UID.hex()}")]
    return {name: server.command("DUMP", name) for name in names}


# --- fencing ------------------------------------------------------------------------------------------------------------


def test_no_write_of_an_old_epoch_is_done(redis: RedisServer) -> None:
    async def main() -> None:
        async with leading(redis.url()) as old:
            await old.put_namespace(RECORD)
            redis.command("DEL", f"{TAG}:lease")  # its time is over
            async with leading(redis.url()) as new:
                before = dump(redis)
                for write in all_writes(old):
                    with pytest.raises(Fenced, match="epoch 1 is over, the store has epoch 2"):
                        await write()
                assert dump(redis) == before and old.counts.fenced == 5
                await new.put_worker(WORKER)
                assert await new.namespaces() == [RECORD] and await new.workers() == [WORKER]
                lost = await old.renew(Epoch(1), address="")
                assert not lost.granted and lost.epoch == 2

    asyncio.run(main())


def test_the_same_epoch_of_another_owner_is_fenced(redis: RedisServer) -> None:
    """A fail-over may forget a take-over: then an epoch is given out twice, and only one of the two may write."""

    async def main() -> None:
        async with leading(redis.url()) as first:
            redis.command("FLUSHALL")
            async with leading(redis.url()) as second:
                with pytest.raises(Fenced):
                    await first.put_worker(WORKER)
                assert not (await first.renew(Epoch(1), address="")).granted
                await second.put_worker(WORKER)

    asyncio.run(main())


def test_without_an_epoch_nothing_is_written(redis: RedisServer) -> None:
    async def main() -> None:
        async with leading(redis.url()) as store:
            store.adopt(None)
            for write in all_writes(store):
                with pytest.raises(Fenced):
                    await write()

    asyncio.run(main())


def test_a_late_write_is_refused_and_a_repeated_one_is_done_once(redis: RedisServer) -> None:
    async def main() -> None:
        async with leading(redis.url()) as store:
            await store.put_namespace(RECORD)
            keys = store._namespace_keys(UID)

            async def send(number: int, seq: int) -> Any:
                entry = seq.to_bytes(8, "little") + b"\0" + bytes([number]) * 34
                return await store._link.call(
                    "EVAL", scripts.LOG_REMOVAL, 4, *keys, store.owner, 1, number, UID.hex(), seq, 1, entry
                )

            assert [await send(5, 1), await send(5, 1)] == [5, 5]
            with pytest.raises(StoreUnavailable, match="write 4 comes after 5"):
                await send(4, 1)
            assert await store.removals(UID) == [Removal(1, b"\5" * 34)]
            assert await send(6, 1) == 6  # removal 1 was never confirmed to the leader: it has another one of this number
            assert await store.removals(UID) == [Removal(1, b"\6" * 34)]

    asyncio.run(main())


def test_the_scripts_of_the_lease_do_what_the_model_does(redis: RedisServer) -> None:
    async def main() -> None:
        rng = random.Random(1)
        stores = [RedisStore(redis.url(), master_id=f"m{i}", terms=replace(TERMS, ttl_ms=600_000)) for i in range(3)]
        model, now_ms, known = ModelStore(), 0, [Epoch(0)] * 3
        for number in range(400):
            i = rng.randrange(3)
            floor = Epoch(max(0, known[i] - rng.randrange(2)))
            store, ask = stores[i], rng.choice((Take(number, floor), Renew(number, known[i])))
            if rng.random() < 0.15:  # time passes
                redis.command("DEL", f"{TAG}:lease")
                now_ms += 10**9
            if rng.random() < 0.03:  # a fail-over forgets take-overs
                model.epoch = max(0, model.epoch - 2)
                redis.command("HSET", f"{TAG}:meta", "epoch", str(model.epoch))
            expected = model.ask(store.owner, ask, now_ms)
            if isinstance(ask, Take):
                reply = await store.take(floor=ask.floor, address=f"{store.owner}:1")
            else:
                reply = await store.renew(ask.epoch, address=f"{store.owner}:1")
            assert (type(expected).__name__ == "Granted", expected.epoch) == (reply.granted, reply.epoch), (number, ask)
            if reply.granted:
                known[i] = reply.epoch
            else:
                assert reply.owner == expected.owner  # type: ignore[union-attr]
        assert model.epoch > 20
        for store in stores:
            await store.close()

    asyncio.run(main())


# --- election -----------------------------------------------------------------------------------------------------------


class Process:
    """`tests.support.candidate`, line by line."""

    def __init__(self, url: str, name: str) -> None:
        command = [sys.executable, "-m", "tests.support.candidate", url, name]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, bufsize=0)
        self._tail = b""

    def line(self, wanted: Callable[[dict[str, Any]], bool], *, timeout_s: float = 10.0) -> dict[str, Any]:
        """The next line that is wanted."""
        assert self.popen.stdout is not None
        end = time.monotonic() + timeout_s
        while True:
            while b"\n" in self._tail:
                line, _, self._tail = self._tail.partition(b"\n")
                found: dict[str, Any] = json.loads(line)
                if wanted(found):
                    return found
            assert select.select([self.popen.stdout], [], [], max(0.0, end - time.monotonic()))[0], "no such line in time"
            data = os.read(self.popen.stdout.fileno(), 65536)
            assert data, "the process has ended"
            self._tail += data

    def close(self) -> None:
        assert self.popen.stdout is not None
        self.popen.kill()
        self.popen.wait(timeout=10)
        self.popen.stdout.close()


@pytest.fixture
def make_process(redis: RedisServer) -> Iterator[Callable[[str], Process]]:
    processes: list[Process] = []

    def make(name: str) -> Process:
        processes.append(Process(redis.url(), name))
        return processes[-1]

    yield make
    for process in processes:
        process.close()


def test_a_killed_leader_is_followed_within_three_seconds(redis: RedisServer, make_process: Callable[[str], Process]) -> None:
    a, b = make_process("a"), None
    assert a.line(lambda line: line.get("role") == "leader")["epoch"] == 1
    b = make_process("b")
    b.line(lambda line: line == {"role": "follower", "epoch": 1, "leader": "a:1"})
    a.line(lambda line: line.get("write") == "ok")
    a.popen.kill()
    killed = time.monotonic()
    assert b.line(lambda line: line.get("role") == "leader") == {"role": "leader", "epoch": 2, "leader": "b:1"}
    assert b.line(lambda line: "write" in line) == {"write": "ok", "epoch": 2}
    assert time.monotonic() - killed < 3.0


def test_a_paused_leader_writes_nothing_when_it_goes_on(redis: RedisServer, make_process: Callable[[str], Process]) -> None:
    a = make_process("a")
    a.line(lambda line: line.get("write") == "ok")
    b = make_process("b")
    b.line(lambda line: line.get("role") == "follower")
    a.popen.send_signal(19)
    b.line(lambda line: line.get("write") == "ok")
    b.popen.send_signal(19)  # so that nothing of b's hides what a does
    held = redis.command("HGET", f"{TAG}:workers", "w")
    assert b'"incarnation": 2' in held
    a.popen.send_signal(18)
    a.line(lambda line: line == {"role": "follower", "epoch": 2, "leader": "b:1"})
    assert redis.command("HGET", f"{TAG}:workers", "w") == held


def test_a_leader_that_ends_leaves_the_place_at_once(redis: RedisServer) -> None:
    async def main() -> None:
        async with electing(redis.url(), "b") as (standby, _):
            async with electing(redis.url(), "a") as (first, _):
                pair = (first, standby)
                leader, other = pair if (await _any_leader(pair)) is first else pair[::-1]
                assert (await until(other, Role.FOLLOWER)).epoch <= 1
                started = time.monotonic()
                if leader is standby:
                    return
            assert (await until(standby, Role.LEADER)).epoch == 2
            assert time.monotonic() - started < 1.0

    asyncio.run(main())


async def _any_leader(electors: tuple[Elector, ...]) -> Elector:
    waits = {asyncio.create_task(until(elector, Role.LEADER)): elector for elector in electors}
    done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    return waits[done.pop()]


def test_an_outage_of_redis_makes_a_lapsed_leader_that_leads_again(own: RedisServer) -> None:
    async def main() -> None:
        async with electing(own.url(), "a") as (elector, store):
            await until(elector, Role.LEADER)
            await store.put_namespace(RECORD)
            own.kill()
            killed = time.monotonic()
            assert await until(elector, Role.LAPSED) == Standing(Role.LAPSED, Epoch(1), "a:1")
            assert time.monotonic() - killed < 2.0
            for write in all_writes(store):
                started = time.monotonic()
                with pytest.raises(StoreUnavailable):
                    await write()
                assert time.monotonic() - started < 1.0
            own.start()
            assert (await until(elector, Role.LEADER, timeout_s=3)).epoch == 1
            await store.put_worker(WORKER)
            assert await store.namespaces() == [RECORD]

    asyncio.run(main())


def test_a_leader_that_was_cut_off_steps_down_when_another_took_over(
    redis: RedisServer, make_proxy: Callable[[str], TcpProxy]
) -> None:
    proxy = make_proxy(redis.address)

    async def main() -> None:
        async with electing(f"redis://{proxy.address}/0", "a") as (cut, store):
            await until(cut, Role.LEADER)
            proxy.blackhole()
            async with electing(redis.url(), "b") as (other, _):
                assert (await until(other, Role.LEADER)).epoch == 2
                assert cut.standing().role is Role.LAPSED  # before the other one led
                proxy.pass_on()
                assert await until(cut, Role.FOLLOWER) == Standing(Role.FOLLOWER, Epoch(2), "b:1")
                with pytest.raises(Fenced):
                    await store.put_worker(WORKER)

    asyncio.run(main())


def test_a_store_that_was_set_back_is_noticed(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with leading(redis.url()) as store:
            for _ in range(3):
                await store.put_worker(WORKER)
            assert (await store.renew(Epoch(1), address="")).granted and store.counts.rolled_back == 0
            redis.command("HSET", f"{TAG}:meta", "writes", "1")
            assert (await store.renew(Epoch(1), address="")).granted and store.counts.rolled_back == 1
            assert "store_rolled_back" in caplog.text and "lost_writes=2" in caplog.text
            await store.put_worker(WORKER)
            assert (await store.renew(Epoch(1), address="")).granted and store.counts.rolled_back == 1

    asyncio.run(main())


def test_a_lease_without_an_end_is_given_one(redis: RedisServer) -> None:
    redis.command("SET", f"{TAG}:lease", "a stranger")

    async def main() -> None:
        async with electing(redis.url(), "a") as (elector, _):
            await until(elector, Role.LEADER, timeout_s=4)

    asyncio.run(main())


# --- outages and cancelled calls ----------------------------------------------------------------------------------------


def test_a_frozen_redis_fails_calls_in_time_and_its_late_writes_change_nothing(own: RedisServer) -> None:
    async def main() -> None:
        async with leading(own.url()) as store:
            await store.put_namespace(RECORD)
            own.freeze()
            calls = [store.ping, lambda: store.removals(UID), lambda: store.log_removal(UID, Removal(1, b"a" * 34), first_seq=1)]
            for call in calls:
                started = time.monotonic()
                with pytest.raises(StoreUnavailable):
                    await call()
                assert time.monotonic() - started < 2.0
            started = time.monotonic()
            writes = [store.put_worker(replace(WORKER, worker_id=WorkerId(f"w{i}"))) for i in range(50)]
            results = await asyncio.gather(*writes, return_exceptions=True)
            assert all(isinstance(result, StoreUnavailable) for result in results) and time.monotonic() - started < 3.0
            own.thaw()
            await store.log_removal(UID, Removal(1, b"b" * 34), first_seq=1)
            await store.ping()
            assert await store.removals(UID) == [Removal(1, b"b" * 34)]

    asyncio.run(main())


@pytest.mark.parametrize("n_calls", [400, pytest.param(2_000, marks=pytest.mark.reports)])
def test_b36_cancelled_calls_shift_no_reply(redis: RedisServer, make_proxy: Callable[[str], TcpProxy], n_calls: int) -> None:
    proxy = make_proxy(redis.address)
    uids = [NamespaceUid(bytes([i]) * 16) for i in range(50)]

    async def one(store: RedisStore, i: int, limit_s: float) -> str:
        try:
            async with asyncio.timeout(limit_s):
                if i % 5 == 0:
                    await store.put_worker(replace(WORKER, worker_id=WorkerId(f"w{i}")))
                else:
                    assert await store.removals(uids[i]) == [Removal(i + 1, bytes([i]) * 34)], i
                return "right"
        except TimeoutError:
            return "cancelled"
        except StoreUnavailable:
            return "unavailable"

    async def main() -> None:
        rng = random.Random(36)
        async with leading(f"redis://{proxy.address}/0") as store:
            for i, uid in enumerate(uids):
                await store.put_namespace(NamespaceRecord(replace(RECORD.spec, uid=uid, name=f"n{i}"), i))
                await store.log_removal(uid, Removal(i + 1, bytes([i]) * 34), first_seq=1)
            proxy.pass_on(delay_s=0.015)
            outcomes: list[str] = []
            for _ in range(n_calls // 50):
                outcomes += await asyncio.gather(*(one(store, i, rng.uniform(0, 0.3)) for i in range(50)))
            assert outcomes.count("right") > n_calls / 10 and outcomes.count("cancelled") > n_calls / 10, outcomes
            proxy.pass_on()
            for i in range(50):
                assert await one(store, i, 5.0) == "right"

    asyncio.run(main())


def test_closing_ends_the_calls_that_are_under_way(redis: RedisServer, make_proxy: Callable[[str], TcpProxy]) -> None:
    proxy = make_proxy(redis.address)

    async def main() -> None:
        async with leading(f"redis://{proxy.address}/0") as store:
            proxy.blackhole()
            calls = [asyncio.create_task(store.ping()) for _ in range(20)]
            await asyncio.sleep(0)
            started = time.monotonic()
            await store.close()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert time.monotonic() - started < 2.5 and all(isinstance(r, StoreUnavailable) for r in results), results
            with pytest.raises(StoreUnavailable, match="closed"):
                await store.ping()

    asyncio.run(main())


def test_connections_are_bounded(redis: RedisServer) -> None:
    async def main() -> None:
        async with leading(redis.url()) as store:
            await asyncio.gather(*(store.ping() for _ in range(300)), *(store.put_worker(WORKER) for _ in range(50)))
            clients = redis.command("CLIENT", "LIST").count(b"id=") - 1
            assert 1 < clients <= CONNECTIONS_MAX

    asyncio.run(main())


def test_nobody_there_is_said_at_once() -> None:
    async def main() -> None:
        store = RedisStore("redis://:hush@127.0.0.1:1/0")
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1") as caught:
            await store.open()
        assert time.monotonic() - started < 1.0 and "hush" not in str(caught.value)
        await store.close()

    asyncio.run(main())


# --- alien values -------------------------------------------------------------------------------------------------------


def pickled(marker: Path) -> bytes:
    return b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."


@pytest.mark.parametrize("kind", ["pickle", "json", "null", "deep"])
def test_b39_an_alien_value_is_refused_naming_its_key_and_left_alone(redis: RedisServer, tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    value = {"pickle": pickled(marker), "json": b'{"uid": 1, "worker_id": []}', "null": b"null", "deep": b"[" * 100_000}[kind]
    places: list[tuple[tuple[str | bytes, ...], str]] = [
        (("HSET", f"{TAG}:namespaces", UID.hex(), value), "namespaces"),
        (("HSET", f"{TAG}:namespaces", value[:100], value), "namespaces"),
        (("HSET", f"{TAG}:removal_seqs", UID.hex(), value), "removal_seqs"),
        (("HSET", f"{TAG}:workers", "w1", value), "workers"),
        (("RPUSH", f"{TAG}:removals:{UID.hex()}", value), f"removals:{UID.hex()}"),
        (("HSET", f"{TAG}:meta", "epoch", value), "meta"),
        (("HSET", f"{TAG}:meta", "writes", value), "meta"),
    ]
    for name in ("meta", "namespaces", "removal_seqs", "workers", f"removals:{UID.hex()}"):
        places.append((("SET", f"{TAG}:{name}", value), name))
    places.append((("RPUSH", f"{TAG}:lease", value), "lease"))

    async def every_verb() -> list[str]:
        said = []
        async with leading(redis.url()) as store:
            key = command[1]
            if command[0] == "RPUSH":
                redis.command("DEL", key)
            redis.command(*command)
            assert isinstance(key, str)
            before = redis.command("DUMP", key)
            verbs: list[Callable[[], Awaitable[Any]]] = [store.namespaces, store.workers, lambda: store.removals(UID)]
            verbs += [lambda: store.renew(Epoch(1), address=""), lambda: store.take(floor=Epoch(0), address="")]
            for verb in verbs:
                try:
                    await verb()
                except StoreDamaged as error:
                    said.append(str(error))
            if "meta" not in key:
                redis.command("PEXPIRE", f"{TAG}:lease", "600000")
            assert redis.command("DUMP", key) == before or "lease" in key or "meta" in key
        return said

    for command, name in places:
        redis.command("FLUSHALL")
        said = asyncio.run(every_verb())
        assert said and all(f"{TAG}:{name}" in text for text in said), (command, said)
    assert not marker.exists()


def test_b39_writes_refuse_a_key_of_another_type(redis: RedisServer) -> None:
    async def main() -> None:
        for name in ("meta", "namespaces", "removal_seqs", "workers", f"removals:{UID.hex()}"):
            redis.command("FLUSHALL")
            async with leading(redis.url()) as store:
                if name.startswith("removals"):
                    await store.put_namespace(RECORD)
                redis.command("DEL", f"{TAG}:{name}")
                redis.command("SET", f"{TAG}:{name}", "alien")
                before, said = dump(redis), []
                for write in all_writes(store)[1 if name.startswith("removals") else 0 : 3]:
                    try:
                        await write()
                    except StoreDamaged as error:
                        said.append(str(error))
                assert said and all(f"{TAG}:{name}" in text for text in said), (name, said)
                assert dump(redis)[f"{TAG}:{name}"] == before[f"{TAG}:{name}"]

    asyncio.run(main())


# --- passwords, replicas, Sentinel, Cluster -----------------------------------------------------------------------------


def test_a_password_is_used_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = RedisServer(tmp_path / "locked", "--requirepass", "hush-hush").start()

    async def main() -> None:
        store = RedisStore(server.url(password="hush-hush"))
        assert await store.open() == 1
        await store.put_worker(WORKER)
        shown = [repr(store.place), repr(store)]
        await store.close()
        for url in (server.url(password="wrong-hush"), server.url()):
            store = RedisStore(url)
            with pytest.raises(ConfigError, match=server.address) as caught:
                await store.open()
            await store.close()
            shown += [str(caught.value), repr(caught.value.__cause__)]
        assert "hush" not in " ".join(shown) + caplog.text

    try:
        asyncio.run(main())
    finally:
        server.stop()


def test_a_write_waits_for_a_replica_but_not_for_long(own: RedisServer, tmp_path: Path) -> None:
    replica = replica_of(own, tmp_path / "replica")

    async def main() -> None:
        async with leading(own.url()) as store:
            await store.put_namespace(RECORD)
            n_replicated = 0
            for i in range(1, 21):
                late = store.counts.unreplicated
                await store.log_removal(UID, Removal(i, KEY), first_seq=1)
                if store.counts.unreplicated == late:  # (else a replica later than a write waits)
                    n_replicated += 1
                    assert replica.command("HGET", f"{TAG}:removal_seqs", UID.hex()).endswith(b"\r\n%d\r\n" % i)
            assert n_replicated >= 10
            replica.freeze()
            late = store.counts.unreplicated
            started = time.monotonic()
            await store.put_worker(WORKER)
            assert 0.09 < time.monotonic() - started < 2 and store.counts.unreplicated == late + 1
            replica.thaw()
            with pytest.raises(StoreUnavailable, match="replica"):
                direct = RedisStore(replica.url())
                try:
                    await direct.open()
                finally:
                    await direct.close()

    try:
        asyncio.run(main())
    finally:
        replica.stop()


def test_sentinel_names_the_next_primary(own: RedisServer, tmp_path: Path) -> None:
    replica = replica_of(own, tmp_path / "replica")
    sentinel = sentinel_for(own, replica, tmp_path / "sentinel")

    async def main() -> None:
        async with electing(f"redis+sentinel://{sentinel.address}/pool", "a") as (elector, store):
            await until(elector, Role.LEADER)
            await store.put_namespace(RECORD)
            n_keys = own.command("DBSIZE")
            await asyncio.to_thread(wait_until, lambda: replica.command("DBSIZE") == n_keys, what="the replica has it too")
            own.kill()
            await eventually(lambda: store.put_worker(WORKER), timeout_s=15)
            assert await until(elector, Role.LEADER) == Standing(Role.LEADER, Epoch(1), "a:1")
            assert await store.namespaces() == [RECORD] and await store.workers() == [WORKER]
            assert b"role:master" in replica.command("INFO", "replication")

    try:
        asyncio.run(main())
    finally:
        sentinel.stop()
        replica.stop()


# (redis-py's cluster client leaves sockets to the garbage collector when a call that looks for the nodes is given up)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_cluster_keeps_all_keys_of_a_pool_together(tmp_path: Path) -> None:
    server = cluster_of_one(tmp_path / "cluster")

    async def main() -> None:
        store = RedisStore(f"redis+cluster://127.0.0.1:1,{server.address}")
        assert await store.open() == 1
        await store.put_namespace(RECORD)
        await store.log_removal(UID, Removal(1, KEY), first_seq=1)
        assert await store.removals(UID) == [Removal(1, KEY)]
        server.kill()
        with pytest.raises(StoreUnavailable):
            await store.put_worker(WORKER)
        server.start()
        await eventually(lambda: store.put_worker(WORKER), timeout_s=10)
        assert await store.workers() == [WORKER]
        await store.close()

    try:
        asyncio.run(main())
    finally:
        server.stop()


def test_tls_checks_who_answers(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(make, check=True, timeout=60, capture_output=True)
    server = RedisServer(tmp_path / "tls")
    tls_port = free_port()
    server.options += ["--tls-port", str(tls_port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    server.options += ["--tls-auth-clients", "no", "--tls-ca-cert-file", str(cert)]
    server.start()

    async def main() -> None:
        async with leading(f"rediss://127.0.0.1:{tls_port}/0?ca={cert}") as store:
            await store.put_worker(WORKER)
            assert await store.workers() == [WORKER]
        stranger = RedisStore(f"rediss://127.0.0.1:{tls_port}/0")
        with pytest.raises(StoreUnavailable, match="certificate"):
            await stranger.open()
        await stranger.close()

    try:
        asyncio.run(main())
    finally:
        server.stop()


def test_pools_of_one_redis_do_not_see_each_other(redis: RedisServer) -> None:
    async def main() -> None:
        async with leading(redis.url(options="?pool=a")) as a, leading(redis.url(options="?pool=b")) as b:
            await a.put_worker(WORKER)
            assert await b.workers() == [] and await a.workers() == [WORKER]

    asyncio.run(main())


def test_a_full_redis_refuses_a_write_whole(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "small", "--maxmemory", "4mb").start()

    async def main() -> None:
        async with leading(server.url()) as store:
            await store.put_namespace(RECORD)
            with pytest.raises(KVPoolError, match="full"):
                for i in range(1, 100):
                    await store.log_removal(UID, Removal(i, os.urandom(34 * 10_000)), first_seq=1)
            log = await store.removals(UID)
            (record,) = await store.namespaces()
            assert log and record.spec.removal_seq == log[-1].seq == len(log)

    try:
        asyncio.run(main())
    finally:
        server.stop()
