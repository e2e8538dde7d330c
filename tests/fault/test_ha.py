"""Several masters on a real redis: killed, frozen and cut-off leaders, a redis that is away or was set back, as real processes.

Figures are printed (`pytest -rP`): from the fault to the first put that is listed and the first get, through the same client.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvpool
from kvpool.core.types import MissCause, Outcome, RemoveOutcome
from kvpool.errors import KVPoolError, MasterUnavailable, StoreUnavailable
from kvpool.transport.rpc import error_of, open_channel
from kvpool.v1 import master_pb2 as pb
from kvpool.v1.master_pb2_grpc import MasterStub
from tests.support.keyed import DEADLINE_MS, THERE, hash_of, have, keyspace, put, read
from tests.support.masters import Masters, http_json
from tests.support.proxy import TcpProxy
from tests.support.redis import RedisServer
from tests.support.scale import scaled
from tests.support.waiting import pause, wait_until

SIZE = 64 << 10
N_KEYS = 40
TAKE_OVER_S = 3.0  # the goal; 10 s is the report's
BACK_S = 5.0  # for what has no figure of its own
PASSWORD = "sehr-secret"

pytestmark = pytest.mark.timeout(scaled(120, 900))

Make = Callable[..., Masters]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A running redis whose password must not be seen anywhere."""
    server = RedisServer(tmp_path / "redis", "--user", "kvpool", "on", f">{PASSWORD}", "~*", "+@all").start()
    yield server
    server.stop()


@pytest.fixture
def make(tmp_path: Path, redis: RedisServer) -> Iterator[Make]:
    pools: list[Masters] = []

    def start(**settings: Any) -> Masters:
        settings = {"store": f"redis://kvpool:{PASSWORD}@{redis.address}/0"} | settings
        pools.append(Masters(tmp_path / "pool", redis, **settings))
        return pools[-1].start()

    yield start
    if redis_is_down(redis):
        redis.start()
    for pool in pools:
        pool.stop()
        assert PASSWORD not in pool.logs()


def redis_is_down(redis: RedisServer) -> bool:
    assert redis._process is not None
    return redis._process.poll() is not None


def fill(ns: kvpool.Namespace) -> None:
    for key in range(N_KEYS):
        assert put(ns, key, SIZE) is Outcome.STORED


def back_again(ns: kvpool.Namespace, tag: str, since: float, *, within_s: float) -> float:
    """Puts new keys, each of which must be on a worker at once, until one is in the index again. Seconds since the fault."""
    for i in range(10_000):
        key = f"{tag}-{i}"
        outcome = put(ns, key, SIZE)
        assert outcome in THERE, outcome
        assert read(ns, key) == 1
        took = time.monotonic() - since
        if outcome is Outcome.STORED:
            assert took < within_s, f"{took:.2f} s"
            return took
        assert took < within_s, f"not listed after {took:.2f} s"
        pause(0.02)
    raise AssertionError


def wait_listed(pool: Masters, ns: kvpool.Namespace, client: Any, n_min: int, *, within_s: float) -> None:
    """Until the index is whole again and has at least this many blocks."""

    def whole() -> bool:
        told = client.describe(deadline_ms=DEADLINE_MS)
        return bool(told["complete"]) and sum(one["blocks"] for one in told["namespaces"] if one["name"] == ns.name) >= n_min

    wait_until(whole, timeout_s=within_s, what=f"{n_min} blocks in the index\n{pool.logs()}")


class Direct:
    """Calls to one master alone."""

    def __init__(self, address: str) -> None:
        self.channel = open_channel(address)
        self.stub = MasterStub(self.channel)

    def __enter__(self) -> Direct:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def refusal(self, method: str, request: Any) -> MasterUnavailable:
        """Why it does not answer; AssertionError when it answers."""
        try:
            answer = getattr(self.stub, method)(request, timeout=5.0)
        except grpc.RpcError as error:
            found = error_of(error)
            assert isinstance(found, MasterUnavailable), found
            return found
        raise AssertionError(f"{method} was answered with epoch {answer.epoch}")


# --- leaders that die -----------------------------------------------------------------------------------------------------


def test_B19_a_killed_leader_is_replaced_and_nothing_is_lost_from_the_index(make: Make) -> None:
    pool = make()
    client = pool.connect()
    ns = keyspace(client, "n", SIZE)
    fill(ns)
    n_blocks = N_KEYS
    first = pool.leader()
    for round_, victim in enumerate((first, 1 - first)):
        assert pool.leads(victim)
        killed = time.monotonic()
        pool.master(victim).kill()
        took = back_again(ns, f"r{round_}", killed, within_s=TAKE_OVER_S)
        n_blocks += 1
        wait_listed(pool, ns, client, n_blocks, within_s=BACK_S)
        whole = time.monotonic() - killed
        assert have(ns, range(N_KEYS)) == N_KEYS
        other = pool.connect(mirror=False)  # a stranger finds all of it through the index
        assert keyspace(other, "n", SIZE, create=False).match(hash_of(ns, *range(N_KEYS))) == N_KEYS
        print(f"leader killed: listed put and get after {took:.2f} s, index whole after {whole:.2f} s")
        pool.start_master(victim)


def test_B19_kills_at_random_moments_never_leave_the_pool_without_a_leader(make: Make) -> None:
    """Also while a master starts: what it had taken of the lease is over in time."""
    pool = make()
    ns = keyspace(pool.connect(), "n", SIZE)
    fill(ns)
    chance = random.Random(19)
    worst = 0.0
    for round_ in range(scaled(4, 20)):
        victim = pool.leader() if round_ % 2 == 0 else 1 - pool.leader()
        killed = time.monotonic()
        pool.master(victim).kill()
        role = pool.spawn_master(victim)
        if chance.random() < 0.5:
            pause(chance.uniform(0.0, 1.5))
            role.kill()
            killed = time.monotonic()
            role = pool.spawn_master(victim)
        worst = max(worst, back_again(ns, f"k{round_}", killed, within_s=10.0))
        role.wait_ready()
    assert have(ns, range(N_KEYS)) == N_KEYS
    print(f"worst of {scaled(4, 20)} kills: {worst:.2f} s")


def test_a_leader_that_stops_hands_over_at_once(make: Make) -> None:
    pool = make()
    ns = keyspace(pool.connect(), "n", SIZE)
    leader = pool.leader()
    stopped = time.monotonic()
    assert pool.master(leader).stop() == 0
    assert pool.leader() == 1 - leader
    print(f"leader stopped: the other leads after {time.monotonic() - stopped:.2f} s, "
          f"listed put after {back_again(ns, 'x', stopped, within_s=2 * TAKE_OVER_S):.2f} s")  # fmt: skip


# --- standbys ---------------------------------------------------------------------------------------------------------------


def test_a_standby_is_healthy_not_ready_and_says_who_leads(make: Make) -> None:
    pool = make(n_workers=1)
    leader = pool.leader()
    status, body = http_json(pool.master(1 - leader), "/healthz")
    assert status == 200 and body["ok"] and body["standby"] and body["leader"] == pool.master(leader).address
    status, body = http_json(pool.master(1 - leader), "/readyz")
    assert status == 503 and body["standby"] and "standby" in body["reason"]
    assert http_json(pool.master(leader), "/readyz")[0] == 200
    with Direct(pool.master(1 - leader).address) as standby:
        for method, request in (("Describe", pb.DescribeRequest()), ("OpenNamespace", pb.OpenNamespaceRequest(name="n"))):
            refusal = standby.refusal(method, request)
            assert refusal.leader == pool.master(leader).address and "standby" in str(refusal)
    # a client that was told of the standby alone finds the leader through it
    ns = keyspace(pool.connect(pool.master(1 - leader).address), "n", SIZE)
    assert put(ns, 1, SIZE) is Outcome.STORED


# --- leaders that stand still -------------------------------------------------------------------------------------------------


def test_a_paused_leader_is_replaced_and_answers_nothing_when_it_goes_on(make: Make, redis: RedisServer) -> None:
    """Its way to the redis is slow: when it goes on, clients' calls are there long before the redis can tell it."""
    proxy = TcpProxy(redis.address)
    try:
        pool = make(first_store=f"redis://kvpool:{PASSWORD}@{proxy.address}/0")
        let_lead(pool, 0)
        proxy.pass_on(delay_s=0.08)
        check_paused(pool, 0)
    finally:
        proxy.close()


def check_paused(pool: Masters, old: int) -> None:
    client = pool.connect()
    ns = keyspace(client, "n", SIZE, deadline_ms=DEADLINE_MS)
    fill(ns)
    wait_until(lambda: up(client) == 2, what="both workers are there")
    old_epoch = client.describe()["epoch"]
    describe = pb.DescribeRequest()
    with Direct(pool.master(old).address) as direct:
        assert direct.stub.Describe(describe, timeout=5.0).epoch == old_epoch
        paused = time.monotonic()
        pool.master(old).pause()
        try:
            new = pool.leader(among=(1 - old,))
            took = back_again(ns, "p", paused, within_s=BACK_S)
            wait_listed(pool, ns, client, N_KEYS + 1, within_s=BACK_S)
            told = client.describe(deadline_ms=DEADLINE_MS)
            assert told["epoch"] > old_epoch and told["leader"] == pool.master(new).address
            done = ns.remove(hash_of(ns, 7), deadline_ms=DEADLINE_MS)
            assert done.outcomes == [RemoveOutcome.REMOVED], done
            waiting = [direct.stub.Describe.future(describe, timeout=5.0) for _ in range(5)]  # what it finds when it wakes up
        finally:
            pool.master(old).resume()
        for future in waiting:
            with pytest.raises(grpc.RpcError) as raised:
                future.result(timeout=5.0)
            assert isinstance(error_of(raised.value), MasterUnavailable)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            direct.refusal("Describe", describe)
            wanted = pb.CreateNamespaceRequest(namespace=pb.Namespace(name="x", layout=ns_layout(), hash="external", replicas=1))
            direct.refusal("CreateNamespace", wanted)
        assert direct.refusal("Describe", describe).leader == pool.master(new).address
    print(f"leader paused: listed put and get after {took:.2f} s")
    assert pool.leader() == new
    assert isinstance(read(ns, 7), MissCause)
    assert have(ns, range(N_KEYS)) == N_KEYS - 1
    stranger = keyspace(pool.connect(mirror=False), "n", SIZE, create=False)
    assert isinstance(read(stranger, 7), MissCause)


def ns_layout() -> str:
    return kvpool.KVLayout.opaque(block_bytes=SIZE, block_tokens=1).to_json()


def test_all_leave_a_leader_that_is_cut_off_from_the_store_for_the_elected_one(make: Make, redis: RedisServer) -> None:
    """It cannot know that it is deposed: it says that its lease is over, and workers and clients look for another."""
    proxy = TcpProxy(redis.address)
    try:
        pool = make(first_store=f"redis://kvpool:{PASSWORD}@{proxy.address}/0")
        let_lead(pool, 0)
        client = pool.connect()
        ns = keyspace(client, "n", SIZE)
        fill(ns)
        epoch = client.describe()["epoch"]
        cut = time.monotonic()
        proxy.blackhole()
        wait_until(lambda: pool.leads(1), what=f"the other one leads\n{pool.logs()}")
        wait_until(lambda: moved(client, epoch), timeout_s=15.0, what=f"the client has found the new leader\n{pool.logs()}")
        print(f"leader cut off: the client is at the new one after {time.monotonic() - cut:.2f} s")
        back_again(ns, "c", time.monotonic(), within_s=BACK_S)
        wait_listed(pool, ns, client, N_KEYS + 1, within_s=BACK_S)
        done = ns.remove(hash_of(ns, 3), deadline_ms=DEADLINE_MS)
        assert done.outcomes == [RemoveOutcome.REMOVED], done
        proxy.pass_on()
        wait_until(lambda: not pool.leads(0), what="the old one hears of it")
        assert isinstance(read(ns, 3), MissCause) and have(ns, range(N_KEYS)) == N_KEYS - 1
    finally:
        proxy.close()


def let_lead(pool: Masters, wanted: int) -> None:
    if pool.leader() != wanted:
        pool.master(1 - wanted).kill()
        pool.leader(among=(wanted,))
        pool.start_master(1 - wanted)


def moved(client: Any, epoch: int) -> bool:
    try:
        told = client.describe(deadline_ms=1000)
        return bool(told["epoch"] > epoch and sum(w["state"] == "up" for w in told["workers"]) == 2)
    except MasterUnavailable:
        return False


# --- the store ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_redis_away_for_a_while_costs_only_what_must_be_written_down(make: Make, redis: RedisServer, how: str) -> None:
    pool = make(ssd="64MiB")
    client = pool.connect()
    ns = keyspace(client, "n", SIZE)
    fill(ns)
    spare = keyspace(client, "spare", SIZE)
    assert put(spare, 1, SIZE) is Outcome.STORED
    before = client.describe()["epoch"]
    redis.kill() if how == "killed" else redis.freeze()
    began = time.monotonic()
    slowest, n_calls = 0.0, 0
    try:
        while (now := time.monotonic()) < began + scaled(5.0, 30.0):
            key = f"d{n_calls}"
            assert put(ns, key, SIZE) is Outcome.STORED  # the leader goes on with its index
            assert read(ns, key) == 1 and read(ns, n_calls % N_KEYS) == 1
            slowest = max(slowest, time.monotonic() - now)
            n_calls += 1
            if n_calls % 20 == 0:
                stranger = keyspace(pool.connect(mirror=False), "n", SIZE, create=False)
                assert read(stranger, key) == 1
        for call in (lambda: keyspace(client, "new", SIZE, deadline_ms=DEADLINE_MS),
                     lambda: ns.remove(hash_of(ns, 5), deadline_ms=DEADLINE_MS)):  # fmt: skip
            asked = time.monotonic()
            with pytest.raises(StoreUnavailable, match="store"):
                call()
            assert time.monotonic() - asked < 2.0
        assert read(ns, 5) == 1  # what was not removed is there
        status, body = http_json(pool.master(pool.leader()), "/readyz")
        assert status == 503 and "store" in body["reason"]
        pool.worker(1).stop()  # and one goes and comes back while nothing can be written down
        pool.workers[1] = pool.spawn_worker(1).wait_ready()
        wait_until(lambda: up(client) == 2, what="the worker has joined")
    finally:
        redis.start() if how == "killed" else redis.thaw()
    back = time.monotonic()

    def works() -> bool:
        try:
            keyspace(client, "new", SIZE, deadline_ms=1000)
        except MasterUnavailable:
            return False
        return True

    wait_until(works, timeout_s=BACK_S, what=f"namespaces again\n{pool.logs()}")
    print(f"redis {how}: slowest put and two gets {slowest * 1e3:.0f} ms in {n_calls}; creates again "
          f"{time.monotonic() - back:.2f} s after it is back; epoch {before} -> {client.describe()['epoch']}")  # fmt: skip
    assert ns.remove(hash_of(ns, 5), deadline_ms=DEADLINE_MS).outcomes == [RemoveOutcome.REMOVED]
    assert isinstance(read(ns, 5), MissCause)
    # what waited has been written: a worker that is away is waited for, also by the next leader
    pool.worker(1).kill()
    pool.master(pool.leader()).kill()
    wait_until(lambda: works() and up(client) == 1, timeout_s=BACK_S, what=f"the other leads, with a worker\n{pool.logs()}")
    done = ns.remove(hash_of(ns, 6), deadline_ms=DEADLINE_MS)
    assert done.outcomes == [RemoveOutcome.PENDING] and len(done.pending_workers) == 1, done


def up(client: Any) -> int:
    try:
        return sum(worker["state"] == "up" for worker in client.describe(deadline_ms=1000)["workers"])
    except MasterUnavailable:
        return 0


def test_a_removal_outlives_a_redis_that_was_set_back_and_the_leader_that_made_it(make: Make, redis: RedisServer) -> None:
    """The worker that has the block is away all the while, and must hear of the removal from the next leader."""
    pool = make(n_workers=1, dram="1MiB", ssd="64MiB")
    client = pool.connect()
    ns = keyspace(client, "n", SIZE)
    hashes = hash_of(ns, "gone")
    for key in ("gone", "kept", *range(N_KEYS)):  # the first ones end up on disk
        assert put(ns, key, SIZE) is Outcome.STORED
    assert pool.worker(0).stop() == 0
    old = {key: dump(redis, key) for key in all_keys(redis) if not key.endswith(":lease")}
    done = ns.remove(hashes, deadline_ms=DEADLINE_MS)
    assert done.outcomes == [RemoveOutcome.PENDING], done
    with_removal = redis.command("EXISTS", *(key for key in all_keys(redis) if ":removals:" in key))
    assert with_removal == b":1\r\n"
    for key in set(all_keys(redis)) - set(old):
        if not key.endswith(":lease"):
            redis.command("DEL", key)
    for key, value in old.items():
        assert redis.command("RESTORE", key, "0", value, "REPLACE") == b"+OK\r\n"
    leader = pool.leader()
    wait_until(lambda: "event=store_mended" in pool.log_of(leader), what=f"the leader mends the store\n{pool.logs()}")
    pool.master(leader).kill()
    assert pool.leader(among=(1 - leader,)) == 1 - leader
    pool.workers[0] = pool.spawn_worker(0).wait_ready()
    wait_until(lambda: up(client) == 1, what="the worker is back")
    assert isinstance(read(ns, "gone"), MissCause)
    assert read(ns, "kept") == 1


def all_keys(redis: RedisServer) -> list[str]:
    return [line.decode() for line in redis.command("KEYS", "{kvpool:default}*").split(b"\r\n") if line.startswith(b"{")]


def dump(redis: RedisServer, key: str) -> bytes:
    head, _, rest = redis.command("DUMP", key).partition(b"\r\n")
    return rest[: int(head[1:])]


# --- cancelled commands ---------------------------------------------------------------------------------------------------------


def test_B36_an_answer_of_redis_never_meets_another_call(make: Make, redis: RedisServer) -> None:
    proxy = TcpProxy(redis.address)
    proxy.pass_on(delay_s=0.05)  # each way
    n_calls, n_threads = scaled(300, 2000), 50
    try:
        pool = make(store=f"redis://kvpool:{PASSWORD}@{proxy.address}/0", n_masters=1, n_workers=1)
        clients = [pool.connect(mirror=False), pool.connect(mirror=False)]
        counts: dict[str, int] = {}
        lock = threading.Lock()

        def one(number: int) -> None:
            """A namespace of its own name and block size, then a removal in it."""
            chance, said = random.Random(number), "not created"
            client = clients[0] if number < n_calls // 2 else clients[-1]
            name, block_bytes = f"stamp-{number}", 4096 + 512 * number
            try:
                limit_ms = max(1, chance.uniform(0, 150)) if number % 3 else 5000  # some have the time
                ns = keyspace(client, name, block_bytes, deadline_ms=limit_ms)
                assert (ns.name, ns.block_bytes) == (name, block_bytes)
                said = "created"
                done = ns.remove(hash_of(ns, number), deadline_ms=limit_ms)
                assert done.outcomes in ([RemoveOutcome.ABSENT], [RemoveOutcome.PENDING]), done
                said = "removed"
            except KVPoolError as error:
                said = f"{said} {type(error).__name__}"
            with lock:
                counts[said] = counts.get(said, 0) + 1
            if number == n_calls // 4:
                old, clients[0] = clients[0], pool.connect(mirror=False)
                old.close()  # half-way, with others' calls under way

        with ThreadPoolExecutor(n_threads) as threads:
            list(threads.map(one, range(n_calls)))
        print(f"{n_calls} calls: {counts}")
        assert counts.pop("removed", 0) > n_calls // 20, counts
        clean = ("MasterUnavailable", "StoreUnavailable", "DeadlineExceeded", "InvalidArgument")  # the last: of the closed client
        assert all(said.split()[-1] in clean for said in counts), counts
        client = pool.connect(mirror=False)
        told = client.describe(deadline_ms=DEADLINE_MS)["namespaces"]
        for one_of in told:
            assert one_of["block_bytes"] == 4096 + 512 * int(one_of["name"].removeprefix("stamp-")), one_of
        # and the next leader reads the same: one namespace a name, none of them another's
        pool.master(0).kill()
        pool.start_master(0)
        wait_until(lambda: up(client) == 1, timeout_s=BACK_S, what="a leader again")
        again = client.describe(deadline_ms=DEADLINE_MS)["namespaces"]
        names = [one_of["name"] for one_of in again]
        assert len(names) == len(set(names)) and set(names) >= {one_of["name"] for one_of in told}
        for one_of in again:
            assert one_of["block_bytes"] == 4096 + 512 * int(one_of["name"].removeprefix("stamp-")), one_of
    finally:
        proxy.close()
