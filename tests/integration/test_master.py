"""The real master process over real gRPC, with scripted workers at the other end of its session streams."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.core.keys import pack_keys
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import CAUSES, MissCause
from kvpool.errors import InvalidArgument, LayoutMismatch, MasterUnavailable, NamespaceNotFound, Unauthenticated
from kvpool.master.wire import spec_to_proto
from kvpool.transport.rpc import error_of, open_channel
from kvpool.v1 import master_pb2 as pb
from kvpool.v1.master_pb2_grpc import MasterStub
from tests.support.processes import Role, run_cli
from tests.support.proxy import free_port
from tests.support.scripted_worker import DRAM, ScriptedWorker, batch, scripted
from tests.support.waiting import wait_until

SHAPE = {"dtype": "float16", "n_layers": 2, "head_dim": 8, "block_tokens": 4, "format": "NHD/1"}
LAYOUT = KVLayout(model="m", revision="main", n_kv_heads=2, **SHAPE)
REMOVED, PENDING, ABSENT = 0, 1, 2
FAST = {
    "KVPOOL_MASTER__HEARTBEAT_MS": "50",
    "KVPOOL_MASTER__SUSPECT_AFTER_MS": "300",
    "KVPOOL_MASTER__DEAD_AFTER_MS": "900",
    "KVPOOL_MASTER__REBUILD_GRACE_MS": "1500",
}
CALL_S = 15.0


def keys_of(n: int, *, salt: int = 0) -> list[bytes]:
    """n different keys, the same ones every time."""
    return [(salt * 1_000_000 + i).to_bytes(32, "big") + bytes(2) for i in range(n)]


def cause_of(number: int) -> MissCause | None:
    return None if number == 0 else CAUSES[number - 1]


class Client:
    """Typed calls to one master; errors are kvpool's own."""

    def __init__(self, address: str, token: str = "") -> None:
        self.channel = open_channel(address, token)
        self.stub = MasterStub(self.channel)
        self.address = address

    def call(self, method: str, request: Any, *, timeout_s: float = CALL_S) -> Any:
        try:
            return getattr(self.stub, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, address=self.address) from error

    def create(self, name: str = "ns", layout: KVLayout = LAYOUT, **options: Any) -> pb.NamespaceReply:
        spec = NamespaceSpec.of(name, layout, **options)
        return self.call("CreateNamespace", pb.CreateNamespaceRequest(namespace=spec_to_proto(spec)))

    def uid(self, name: str = "ns") -> bytes:
        return self.create(name).namespace.uid

    def match(self, uid: bytes, keys: list[bytes]) -> pb.MatchReply:
        return self.call("Match", pb.MatchRequest(namespace=uid, hashes=b"".join(key[:32] for key in keys)))

    def locate(self, uid: bytes, keys: list[bytes], *, prefix: bool = False) -> pb.LocateReply:
        return self.call("Locate", pb.LocateRequest(namespace=uid, keys=b"".join(keys), prefix=prefix))

    def remove(self, uid: bytes, keys: list[bytes], *, timeout_s: float = CALL_S) -> pb.RemoveReply:
        return self.call("Remove", pb.RemoveRequest(namespace=uid, keys=b"".join(keys)), timeout_s=timeout_s)

    def describe(self) -> pb.DescribeReply:
        return self.call("Describe", pb.DescribeRequest())

    def state_of(self, worker_id: str) -> int | None:
        return next((w.info.state for w in self.describe().workers if w.info.worker_id == worker_id), None)

    def close(self) -> None:
        self.channel.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Role]]:
    """start(*flags, env=...) runs a master on any port, in the test's one data directory; it must end with 0."""
    masters: list[Role] = []

    def run(*flags: str, env: dict[str, str] | None = None, port: int = 0) -> Role:
        args = ["master", "--port", str(port or free_port()), "--http-port", "0", "--data-dir", str(tmp_path / "data"), *flags]
        masters.append(Role(args, log=tmp_path / f"master-{len(masters)}.log", env=FAST | (env or {})))
        return masters[-1].wait_ready()

    yield run
    for master in masters:
        alive = master.process.poll() is None
        status = master.stop(timeout_s=10.0)
        assert status == 0 or not alive, master.log_text()
        assert "Traceback" not in master.log_text(), master.log_text()


@pytest.fixture
def master(start: Callable[..., Role]) -> Role:
    return start()


@pytest.fixture(scope="module")
def strict_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Role]:
    """A master for all the tests in which everything is refused."""
    directory: Path = tmp_path_factory.mktemp("strict")
    args = ["master", "--port", "0", "--http-port", "0", "--data-dir", str(directory / "data")]
    master = Role(args, log=directory / "master.log", env=FAST)
    try:
        yield master.wait_ready()
        assert master.stop(timeout_s=10.0) == 0 and "Traceback" not in master.log_text(), master.log_text()
    finally:
        master.kill()


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(address: str, token: str = "") -> Client:
        clients.append(Client(address, token))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(master: Role, connect: Callable[..., Client]) -> Client:
    return connect(master.address)


@pytest.fixture
def strict(strict_master: Role, connect: Callable[..., Client]) -> Client:
    return connect(strict_master.address)


def get(master: Role, path: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{master.http}{path}", timeout=CALL_S) as answer:
        return answer.status, answer.read().decode()


def metric(master: Role, name: str) -> float:
    lines = [line for line in get(master, "/metrics")[1].splitlines() if line.startswith(name + " ")]
    return float(lines[0].split()[1])


class Watcher:
    """A watch whose events are taken one by one; `mirror` is what a client would have by then."""

    def __init__(self, client: Client, uids: list[bytes], *, epoch: int = 0, after_seq: int = 0) -> None:
        request = pb.WatchRequest(namespaces=uids, epoch=epoch, after_seq=after_seq)
        self.call = client.stub.Watch(request, timeout=30.0)
        self.mirror: dict[tuple[int, bytes], int] = {}
        self.resyncs = 0
        self.seq = 0
        self.holders: dict[int, pb.HolderInfo] = {}
        self.synced = False

    def step(self) -> pb.WatchEvent:
        event = next(self.call)
        self.seq = max(self.seq, event.seq)
        kind = event.WhichOneof("event")
        if kind == "resync":
            self.resyncs += 1
            self.mirror.clear()
            self.synced = False
        elif kind == "snapshot_end":
            self.synced = True
        elif kind == "holder":
            self.holders[event.holder.holder] = event.holder
        elif kind == "retired":
            self.mirror = {name: t for name, t in self.mirror.items() if name[0] != event.retired}
        elif kind == "change" and event.change.all:
            self.mirror.clear()
        elif kind == "change":
            for i, tiers in enumerate(event.change.tiers):
                key = event.change.keys[34 * i : 34 * i + 34]
                self.mirror[event.change.holder, key] = tiers
                if not tiers:
                    del self.mirror[event.change.holder, key]
        return event

    def until(self, condition: Callable[[Watcher], Any], *, timeout_s: float = CALL_S) -> Watcher:
        end = time.monotonic() + timeout_s
        while not condition(self):
            assert time.monotonic() < end, (len(self.mirror), self.resyncs, self.seq)
            self.step()
        return self

    def keys(self) -> set[bytes]:
        return {key for _, key in self.mirror}

    def close(self) -> None:
        self.call.cancel()


# --- namespaces ---------------------------------------------------------------------------------------------------------


def test_create_opens_what_is_the_same_and_refuses_what_differs_naming_it(client: Client) -> None:
    first = client.create()
    assert first.created and len(first.namespace.uid) == 16 and first.epoch == 1
    again = client.create()
    assert not again.created and again.namespace == first.namespace
    other = KVLayout(model="m", revision="main", n_kv_heads=4, **SHAPE)
    with pytest.raises(LayoutMismatch) as error:
        client.create(layout=other)
    text = str(error.value)
    assert LAYOUT.fingerprint.hex() in text and other.fingerprint.hex() in text
    assert "n_kv_heads is 2, not 4" in text and "head_dim" not in text
    with pytest.raises(LayoutMismatch, match="hash is 'sha256', not 'external'"):
        client.create(hash="external")
    with pytest.raises(LayoutMismatch, match="salt"):
        client.create(salt=b"other")
    opened = client.call("OpenNamespace", pb.OpenNamespaceRequest(name="ns", fingerprint=LAYOUT.fingerprint))
    assert opened.namespace == first.namespace
    with pytest.raises(LayoutMismatch, match=other.fingerprint.hex()):
        client.call("OpenNamespace", pb.OpenNamespaceRequest(name="ns", fingerprint=other.fingerprint))
    with pytest.raises(NamespaceNotFound, match="nope"):
        client.call("OpenNamespace", pb.OpenNamespaceRequest(name="nope"))


def test_a_quota_under_one_block_is_refused(strict: Client) -> None:
    with pytest.raises(InvalidArgument, match=r"^quota_bytes: 1 is less"):
        strict.create("quota", quota_bytes=1)


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("Locate", {"namespace": b"x" * 15, "keys": b""}, "namespace"),
        ("Locate", {"namespace": b"", "keys": b"x" * 33}, "namespace"),
        ("Locate", {"keys": b"x" * 33}, "keys"),
        ("Locate", {"keys": b"x" * 34 * 16_385}, "keys"),
        ("Match", {"hashes": b"x" * 31}, "hashes"),
        ("Match", {"hashes": b"x" * 32 * 16_385}, "hashes"),
        ("Match", {"hashes": b"x" * 32, "shards": [70_000]}, "shards"),
        ("Place", {"keys": b""}, "keys"),
        ("Place", {"keys": b"x" * 34 * 3}, "keys"),
        ("Place", {"keys": b"x" * 34, "n_workers": 1_000_000}, "n_workers"),
        ("Remove", {"keys": b"x" * 35}, "keys"),
        ("Remove", {"keys": b"x" * 34, "all": True}, "keys"),
        ("ListBlocks", {"after": b"x"}, "after"),
    ],
)
def test_wrong_lengths_are_refused_naming_the_field(strict: Client, method: str, request_: dict[str, Any], field: str) -> None:
    fields = {"namespace": strict.uid()} | request_
    with pytest.raises(InvalidArgument, match=rf"^{field}: "):
        strict.call(method, getattr(pb, f"{method}Request")(**fields))
    assert strict.describe().epoch == 1


def test_bad_specs_and_names_are_refused(strict: Client) -> None:
    good = spec_to_proto(NamespaceSpec.of("bad", LAYOUT))
    wrong = {"name": "a/b", "layout": "{", "block_bytes": 1, "hash": "md5", "salt": b"x" * 9999, "replicas": 99}
    for field, value in [*wrong.items(), ("name", "x" * 129), ("name", "")]:
        bad = pb.Namespace()
        bad.CopyFrom(good)
        setattr(bad, field, value)
        with pytest.raises(InvalidArgument):
            strict.call("CreateNamespace", pb.CreateNamespaceRequest(namespace=bad))
    with pytest.raises(NamespaceNotFound, match="ab" * 16):
        strict.locate(bytes.fromhex("ab" * 16), [])


# --- sessions -----------------------------------------------------------------------------------------------------------


def test_an_acknowledged_report_is_in_the_index(master: Role, client: Client) -> None:
    """C3: what is acknowledged is found by a lookup that starts then. 200 rounds, so that a late apply would show."""
    uid = client.uid()
    with scripted(master.address) as worker:
        assert worker.join().inventory_wanted
        worker.inventory()
        for i, key in enumerate(keys_of(200)):
            worker.report(batch(uid, [key]))
            assert client.match(uid, [key]).n_blocks == 1, i
        found = client.locate(uid, keys_of(200))
        assert found.n_replicas == b"\1" * 200 and set(found.tiers) == {DRAM} and found.complete
        [info] = found.holder_infos
        assert (info.worker_id, info.incarnation, info.address) == ("w1", worker.incarnation, "127.0.0.1:1")


def test_locate_with_prefix_stops_at_the_first_key_that_nobody_has(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(10)
    with scripted(master.address) as worker:
        worker.join()
        worker.inventory([batch(uid, keys[:4] + keys[5:])])
        lead = client.locate(uid, keys, prefix=True)
        assert lead.n_keys == 4 and cause_of(lead.miss_cause) is MissCause.NEVER_STORED
        whole = client.locate(uid, keys)
        assert whole.n_replicas == b"\1\1\1\1\0\1\1\1\1\1"
        worker.report(batch(uid, keys[:1], tiers=0, cause=MissCause.EVICTED))
        assert cause_of(client.match(uid, keys).miss_cause) is MissCause.EVICTED
        assert client.match(uid, keys[1:4]).miss_cause == 0


def test_match_counts_blocks_that_all_shards_have(master: Role, client: Client) -> None:
    uid = client.uid()
    hashes = b"".join(key[:32] for key in keys_of(6))
    packed = [pack_keys(hashes, shard=shard) for shard in (0, 1)]
    with scripted(master.address) as worker:
        worker.join()
        worker.inventory([batch(uid, [packed[0][i : i + 34] for i in range(0, 34 * 6, 34)]),
                          batch(uid, [packed[1][i : i + 34] for i in range(0, 34 * 3, 34)])])  # fmt: skip
        both = client.call("Match", pb.MatchRequest(namespace=uid, hashes=hashes, shards=[0, 1]))
        one = client.call("Match", pb.MatchRequest(namespace=uid, hashes=hashes))
        assert (both.n_blocks, one.n_blocks) == (3, 6)


def test_a_gap_is_answered_by_asking_for_an_inventory(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(4)
    with scripted(master.address) as worker:
        worker.join()
        worker.inventory([batch(uid, keys[:2])], next_seq=10)
        worker.report(batch(uid, keys[2:3]), seq=12, acked=False)
        assert "12" in worker.expect("inventory_wanted").inventory_wanted.reason
        worker.report(batch(uid, keys[2:3]), seq=13, acked=False)  # worth nothing before the inventory
        worker.inventory([batch(uid, keys[1:2]), batch(uid, keys[3:])], next_seq=20)
        assert client.locate(uid, keys).n_replicas == b"\0\1\0\1"
        worker.report(batch(uid, keys[:1]), seq=20)
        assert client.locate(uid, keys).n_replicas == b"\1\1\0\1"


def test_a_report_that_comes_again_is_applied_once_and_acknowledged(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(2)
    with scripted(master.address) as worker:
        worker.join()
        worker.inventory(next_seq=10)
        worker.report(batch(uid, keys), seq=10)
        worker.report(batch(uid, keys, tiers=0), seq=11)
        worker.report(batch(uid, keys), seq=10)  # an old one: must not bring them back
        assert client.match(uid, keys).n_blocks == 0


def test_the_same_incarnation_goes_on_without_an_inventory(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(3)
    first = ScriptedWorker(master.address)
    first.join()
    first.inventory([batch(uid, keys[:2])], next_seq=10)
    first.report(batch(uid, keys[2:]), seq=10)
    first.cut()
    wait_until(lambda: client.state_of("w1") == 2, what="suspect after the stream was cut")
    assert client.match(uid, keys).n_blocks == 3  # suspected is not lost
    with scripted(master.address, incarnation=first.incarnation) as again:
        again.epoch, again.next_seq = first.epoch, 11
        assert not again.join().inventory_wanted
        assert again.expect("ack").ack.seq == 10  # the one that the cut may have swallowed
        assert client.state_of("w1") == 1 and client.match(uid, keys).n_blocks == 3
        again.report(batch(uid, keys[:1], tiers=0), seq=11)
        assert client.match(uid, keys).n_blocks == 0


def test_a_worker_that_lost_count_or_epoch_is_asked_for_an_inventory(master: Role, client: Client) -> None:
    first = ScriptedWorker(master.address)
    first.join()
    first.inventory(next_seq=10)
    first.cut()
    for fields in ({"next_seq": 12}, {"next_seq": 0}, {"last_epoch": 7}):
        with scripted(master.address, incarnation=first.incarnation) as again:
            again.epoch, again.next_seq = first.epoch, 10
            assert again.join(**fields).inventory_wanted, fields
            again.inventory(next_seq=10)


def test_a_new_incarnation_replaces_the_old_one_and_its_blocks(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(4)
    with scripted(master.address) as old:
        old.join()
        old.inventory([batch(uid, keys)])
        holder = client.locate(uid, keys).holder_infos[0].holder
        with scripted(master.address) as new:
            new.join()
            assert old.expect("refused").refused.code == "replaced"
            assert old.ended.wait(CALL_S)
            new.inventory([batch(uid, keys[:1], tiers=2)])
            found = client.locate(uid, keys)
            assert found.n_replicas == b"\1\0\0\0" and found.tiers == b"\2"
            assert found.holder_infos[0].holder != holder and found.holder_infos[0].incarnation == new.incarnation
            assert cause_of(found.miss_cause) is MissCause.WORKER_LOST


def test_half_an_inventory_counts_for_nothing_once_its_stream_is_cut(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(6)
    first = ScriptedWorker(master.address)
    first.join()
    first.inventory([batch(uid, keys[:2])], next_seq=10)
    first.send(inventory=pb.InventoryPart(next_seq=20, batches=[batch(uid, keys[2:4])], first=True))
    wait_until(lambda: client.match(uid, keys).n_blocks == 4, what="the part is in the index")
    first.cut()
    with scripted(master.address, incarnation=first.incarnation) as again:
        again.epoch, again.next_seq = first.epoch, 10
        assert again.join().inventory_wanted
        wait_until(lambda: client.match(uid, keys).n_blocks == 2)
        again.inventory([batch(uid, keys[3:])], next_seq=30)
        assert client.locate(uid, keys).n_replicas == b"\0\0\0\1\1\1"


def test_a_second_stream_of_the_same_incarnation_replaces_the_first_and_keeps_the_blocks(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(4)
    with scripted(master.address) as old:
        old.join()
        old.inventory([batch(uid, keys)], next_seq=10)
        with scripted(master.address, incarnation=old.incarnation) as new:
            new.epoch, new.next_seq = old.epoch, 10
            assert not new.join().inventory_wanted
            old.expect("refused")
            assert old.ended.wait(CALL_S)
            assert client.match(uid, keys).n_blocks == 4 and client.state_of("w1") == 1
            new.report(batch(uid, keys[3:], tiers=0), seq=10)
            assert client.match(uid, keys).n_blocks == 3


def test_a_worker_that_stays_away_is_lost_and_its_misses_say_so(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(50)
    with scripted(master.address, "w2") as other:
        other.join()
        other.inventory([batch(uid, keys[:1])])
        worker = ScriptedWorker(master.address)
        worker.join()
        worker.inventory([batch(uid, keys)])
        assert client.locate(uid, keys).n_replicas == b"\2" + b"\1" * 49
        worker.cut()
        wait_until(lambda: client.state_of("w1") == 3, what="down")
        found = client.locate(uid, keys)
        assert found.n_replicas == b"\1" + b"\0" * 49  # C7: only what it alone had
        assert cause_of(found.miss_cause) is MissCause.WORKER_LOST
        wait_until(lambda: client.describe().namespaces[0].blocks == 1, what="the lost entries are purged")
        assert cause_of(client.match(uid, keys[1:]).miss_cause) is MissCause.WORKER_LOST
        assert metric(master, "kvpool_workers_lost_total") == 1


def test_a_silent_worker_is_lost_although_its_stream_is_open_and_can_come_back(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(5)
    with scripted(master.address, heartbeat_s=0) as silent:
        silent.join()
        silent.inventory([batch(uid, keys)])
        assert silent.expect("refused").refused.code == "dead"
        assert client.match(uid, keys).n_blocks == 0
        with scripted(master.address, incarnation=silent.incarnation) as back:
            back.epoch, back.next_seq = silent.epoch, silent.next_seq
            assert back.join().inventory_wanted
            back.inventory([batch(uid, keys)])
            assert client.match(uid, keys).n_blocks == 5


def test_a_worker_that_leaves_takes_its_blocks_out_at_once(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(5)
    worker = ScriptedWorker(master.address)
    worker.join()
    worker.inventory([batch(uid, keys)])
    worker.send(heartbeat=pb.Heartbeat(tiers=[pb.TierStatus(tier="dram", capacity_bytes=1, state="ok")]))
    worker.leave()
    assert client.match(uid, keys).n_blocks == 0
    wait_until(lambda: client.state_of("w1") is None, what="a worker without disk is forgotten")
    assert client.remove(uid, keys[:1]).outcomes == bytes([ABSENT])  # nobody is left who could have it


def test_what_is_no_hello_or_of_another_version_is_refused(master: Role, client: Client) -> None:
    with scripted(master.address) as worker:
        worker.send(hello=worker.hello(protocol=99))
        refused = worker.expect("refused").refused
        assert refused.code == "version_mismatch" and "99" in refused.reason and "master 1" in refused.reason
        assert worker.ended.wait(CALL_S)
    with scripted(master.address) as worker:
        worker.send(report=pb.Report(seq=1))
        assert worker.expect("refused").refused.code == "invalid_argument"
    for info in (
        pb.HolderInfo(worker_id="", incarnation=1, address="a:1"),
        pb.HolderInfo(worker_id="w", incarnation=0, address="a:1"),
        pb.HolderInfo(worker_id="w" * 300, incarnation=1, address="a:1"),
    ):
        with scripted(master.address) as worker:
            worker.send(hello=worker.hello(info=info))
            assert worker.expect("refused").refused.reason.startswith("info.")
    wait_until(lambda: metric(master, "kvpool_sessions_open") == 0)


@pytest.mark.parametrize(
    "bad",
    [
        pb.ReportBatch(namespace=b"x", keys=b"", tiers=b""),
        pb.ReportBatch(namespace=b"x" * 16, keys=b"k" * 33, tiers=b"\1"),
        pb.ReportBatch(namespace=b"x" * 16, keys=b"k" * 34, tiers=b"\1\1"),
        pb.ReportBatch(namespace=b"x" * 16, keys=b"k" * 34, tiers=b"\1", sizes=b"1"),
        pb.ReportBatch(namespace=b"x" * 16, keys=b"k" * 34 * 16_385, tiers=b"\1" * 16_385),
    ],
)
def test_malformed_reports_close_the_session(strict_master: Role, strict: Client, bad: pb.ReportBatch) -> None:
    with scripted(strict_master.address) as worker:
        worker.join()
        worker.inventory()
        worker.report(bad, acked=False)
        assert worker.expect("refused").refused.reason.startswith("batches")
    assert strict.describe().replicas == 0


def test_entries_of_a_namespace_that_does_not_exist_are_told_to_be_dropped(master: Role, client: Client) -> None:
    gone = b"g" * 16
    with scripted(master.address) as worker:
        worker.applied[gone] = 3
        updates = worker.join().namespaces
        assert [(u.namespace.uid, u.deleted) for u in updates] == [(gone, True)]
        worker.inventory([batch(gone, keys_of(2))])
        with scripted(master.address, "w2") as other:
            other.join()
            other.send(inventory=pb.InventoryPart(next_seq=5, batches=[batch(gone, keys_of(2))], first=True, last=True))
            update = other.expect("namespace").namespace
            assert update.deleted and update.namespace.uid == gone
        assert client.describe().replicas == 0


def test_workers_hear_of_namespaces_in_the_welcome_and_later(master: Role, client: Client) -> None:
    first = client.uid("first")
    with scripted(master.address) as worker:
        assert [u.namespace.uid for u in worker.join().namespaces] == [first]
        second = client.uid("second")
        assert worker.expect("namespace").namespace.namespace.uid == second


def test_place_follows_parent_then_host_and_spreads_copies(master: Role, client: Client) -> None:
    uid, [parent, first] = client.uid(), keys_of(2)
    with (
        scripted(master.address, "a1", host_id="a") as a1,
        scripted(master.address, "a2", host_id="a") as a2,
        scripted(master.address, "b1", host_id="b") as b1,
    ):
        for worker in (a1, a2, b1):
            worker.join()
            worker.inventory([batch(uid, [parent])] if worker is b1 else [])
        wait_until(lambda: all(w.tiers for w in client.describe().workers), what="heartbeats")

        def place(keys: bytes, **fields: Any) -> list[str]:
            request = pb.PlaceRequest(namespace=uid, keys=keys, bytes=1000, **fields)
            return [info.worker_id for info in client.call("Place", request).workers]

        assert place(parent + first, host_id="a") == ["b1"]  # where the parent lives
        assert place(first, host_id="b") == ["b1"]
        assert place(first, host_id="a")[0] in ("a1", "a2")
        two = place(first, host_id="a", n_workers=2)
        assert two[0] in ("a1", "a2") and two[1] == "b1"  # the second copy on another host
        assert sorted(place(first, n_workers=9)) == ["a1", "a2", "b1"]
        a1.cut()
        wait_until(lambda: client.state_of("a1") != 1)
        assert place(first, host_id="a", n_workers=1) == ["a2"]


# --- removals -----------------------------------------------------------------------------------------------------------


def test_remove_asks_every_worker_and_says_what_was_there(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(4)
    with scripted(master.address, "w1") as one, scripted(master.address, "w2") as two, ThreadPoolExecutor(1) as pool:
        one.join(), two.join()
        one.inventory([batch(uid, keys[:2])]), two.inventory()
        answer = pool.submit(client.remove, uid, keys[:3])
        task = one.expect("remove").remove
        assert task.keys == b"".join(keys[:3]) and task.removal_seq == 1 and not answer.done()
        assert client.match(uid, keys[:1]).n_blocks == 0  # out of the index before anybody confirmed
        one.send(task_done=pb.TaskDone(task_id=task.task_id, codes=b"\1\1\0", n_removed=2))
        two.confirm(had=0)
        reply = answer.result(CALL_S)
        assert reply.outcomes == bytes([REMOVED, REMOVED, ABSENT]) and not reply.pending_workers and reply.n_removed == 2
        assert cause_of(client.match(uid, keys[:1]).miss_cause) is MissCause.REMOVED
        again = pool.submit(client.remove, uid, keys[:3])
        one.confirm(had=0), two.confirm(had=0)
        assert again.result(CALL_S).outcomes == bytes([ABSENT] * 3)


def test_remove_names_the_workers_that_did_not_confirm(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(2)
    away = ScriptedWorker(master.address, "away", ssd=True)
    away.join()
    away.inventory([batch(uid, keys)])
    away.cut()
    with scripted(master.address, "mute") as mute, scripted(master.address, "fine") as fine, ThreadPoolExecutor(1) as pool:
        mute.join(), fine.join()
        mute.inventory(), fine.inventory()
        started = time.monotonic()
        answer = pool.submit(client.remove, uid, keys, timeout_s=1.0)
        fine.confirm(had=0)
        reply = answer.result(CALL_S)
        assert time.monotonic() - started < 1.0  # an answer, not a missed deadline
        assert reply.outcomes == bytes([PENDING] * 2) and list(reply.pending_workers) == ["away", "mute"]
        # a worker whose stream breaks while it is asked is not waited for
        answer = pool.submit(client.remove, uid, keys)
        mute.expect("remove")
        fine.confirm(had=0)
        mute.cut()
        assert list(answer.result(CALL_S).pending_workers) == ["away", "mute"]
        # a namespace that is younger than its absence cannot be on the one that is away
        wait_until(lambda: client.state_of("away") == 3 and client.state_of("mute") == 3)
        young = client.uid("young")
        answer = pool.submit(client.remove, young, keys)
        fine.confirm(had=0)
        assert answer.result(CALL_S).outcomes == bytes([ABSENT] * 2)


def test_a_worker_that_was_away_is_told_what_it_missed(master: Role, client: Client) -> None:
    """C8: what was removed meanwhile comes with the Welcome, before anything else."""
    uid, keys = client.uid(), keys_of(6)
    away = ScriptedWorker(master.address, ssd=True)
    away.join()
    away.inventory([batch(uid, keys)])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.remove, uid, keys[:1])
        away.confirm()
        assert answer.result(CALL_S).outcomes == bytes([REMOVED])
    away.cut()
    assert client.remove(uid, keys[1:3]).outcomes == bytes([PENDING] * 2)
    assert client.remove(uid, keys[3:4]).outcomes == bytes([PENDING])
    with scripted(master.address, ssd=True) as back:
        back.applied = dict(away.applied)
        [update] = back.join().namespaces
        assert update.missed_keys == b"".join(keys[1:4]) and not update.missed_all and not update.drop_blocks
        assert update.namespace.removal_seq == 3
    with scripted(master.address, ssd=True) as back:  # one that knows nothing of the namespace's removals gets all of them
        [update] = back.join().namespaces
        assert update.missed_keys == b"".join(keys[:4])


def test_removals_outlive_the_master(start: Callable[..., Role], connect: Callable[..., Client]) -> None:
    first = start()
    client = connect(first.address)
    uid, keys = client.uid(), keys_of(3)
    away = ScriptedWorker(first.address, ssd=True)
    away.join()
    away.inventory([batch(uid, keys)])
    away.cut()
    assert client.remove(uid, keys[:2]).outcomes == bytes([PENDING] * 2)
    first.kill()
    second = start()
    client = connect(second.address)
    assert client.uid() == uid and client.describe().epoch == 2
    assert list(client.remove(uid, keys[2:]).pending_workers) == ["w1"]  # still known, still away
    with scripted(second.address, ssd=True) as back:
        back.applied = {uid: 0}
        [update] = back.join().namespaces
        assert update.missed_keys == b"".join(keys) and update.namespace.removal_seq == 2


def test_a_worker_further_behind_than_the_log_drops_the_blocks(
    start: Callable[..., Role], connect: Callable[..., Client]
) -> None:
    master = start(env={"KVPOOL_MASTER__REMOVAL_LOG_MAX": "3"})
    client = connect(master.address)
    uid, keys = client.uid(), keys_of(9)
    for key in keys:
        client.remove(uid, [key])
    for applied, expected in ((5, True), (6, False), (9, False), (77, True)):
        with scripted(master.address) as worker:
            worker.applied = {uid: applied}
            [update] = worker.join().namespaces
            assert update.drop_blocks is expected, applied
            assert update.missed_keys == (b"".join(keys[6:]) if applied == 6 else b"")


def test_remove_all_and_what_comes_after_it(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(5)
    client.remove(uid, keys[:1])
    with scripted(master.address) as worker, ThreadPoolExecutor(1) as pool:
        worker.join()
        worker.inventory([batch(uid, keys)])
        answer = pool.submit(client.call, "Remove", pb.RemoveRequest(namespace=uid, all=True))
        task = worker.expect("remove").remove
        assert task.all and not task.keys and task.removal_seq == 2
        worker.send(task_done=pb.TaskDone(task_id=task.task_id, n_removed=5))
        reply = answer.result(CALL_S)
        assert reply.n_removed == 5 and not reply.pending_workers
        assert client.match(uid, keys).n_blocks == 0 and client.describe().namespaces[0].blocks == 0
    client.remove(uid, keys[3:4])
    with scripted(master.address) as back:
        back.applied = {uid: 1}
        [update] = back.join().namespaces
        assert update.missed_all and update.missed_keys == keys[3] and not update.drop_blocks


def test_a_removal_beside_a_hello_is_in_the_welcome_or_comes_as_a_task(master: Role, client: Client) -> None:
    """C8: removals run while a worker joins over and over; none may reach it by neither way."""
    uid = client.uid()
    stop = threading.Event()
    removed: list[bytes] = []

    def remove() -> None:
        for key in keys_of(100_000):
            if stop.is_set():
                return
            client.remove(uid, [key], timeout_s=0.15)
            removed.append(key)

    told: set[bytes] = set()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(remove)
        applied = 0
        try:
            for _ in range(25):
                with scripted(master.address) as worker:
                    worker.applied = {uid: applied}
                    [update] = worker.join().namespaces
                    told.update(update.missed_keys[i : i + 34] for i in range(0, len(update.missed_keys), 34))
                    applied = update.namespace.removal_seq
                    for _ in range(2):
                        task = worker.confirm()
                        told.add(task.keys)
                        assert task.removal_seq == applied + 1
                        applied = task.removal_seq
        finally:
            stop.set()
        running.result(CALL_S)
    assert len(removed) > 40
    assert not set(removed[:applied]) - told


def test_deleting_a_namespace_removes_its_blocks_and_its_name(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(3)
    with scripted(master.address) as worker, ThreadPoolExecutor(1) as pool:
        worker.join()
        worker.inventory([batch(uid, keys)])
        answer = pool.submit(client.call, "DeleteNamespace", pb.DeleteNamespaceRequest(name="ns"))
        task = worker.expect("remove").remove
        worker.send(task_done=pb.TaskDone(task_id=task.task_id, n_removed=3))
        assert answer.result(CALL_S).n_removed == 3
        update = worker.expect("namespace").namespace
        assert update.deleted and update.namespace.uid == uid
        with pytest.raises(NamespaceNotFound):
            client.match(uid, keys)
        with pytest.raises(NamespaceNotFound):
            client.call("DeleteNamespace", pb.DeleteNamespaceRequest(name="ns"))
        assert client.uid() != uid


# --- watch --------------------------------------------------------------------------------------------------------------


def test_a_watch_begins_with_a_snapshot_and_follows_changes(master: Role, client: Client) -> None:
    uid, other, keys = client.uid(), client.uid("other"), keys_of(6)
    with scripted(master.address) as worker:
        worker.join()
        worker.inventory([batch(uid, keys[:3]), batch(other, keys[:1])])
        watcher = Watcher(client, [uid]).until(lambda w: w.synced)
        assert watcher.resyncs == 1 and watcher.keys() == set(keys[:3])
        assert [info.worker_id for info in watcher.holders.values()] == ["w1"]
        worker.report(batch(uid, keys[3:]), batch(other, keys[1:]))
        worker.report(batch(uid, keys[:1], tiers=0))
        watcher.until(lambda w: w.keys() == set(keys[1:]))
        worker.report(batch(uid, keys[1:2], tiers=2))
        watcher.until(lambda w: 2 in w.mirror.values())
        assert watcher.resyncs == 1
        watcher.close()


def test_a_watch_goes_on_from_a_number_and_resyncs_where_that_is_forgotten_or_foreign(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(20)
    with scripted(master.address) as worker:
        worker.join()
        worker.inventory([batch(uid, keys[:1])])
        watcher = Watcher(client, [uid]).until(lambda w: w.synced)
        watcher.close()
        for key in keys[1:]:
            worker.report(batch(uid, [key]))
        follower = Watcher(client, [uid], epoch=worker.epoch, after_seq=watcher.seq)
        follower.until(lambda w: len(w.keys()) == 19)
        assert follower.resyncs == 0 and follower.keys() == set(keys[1:])
        follower.close()
        for epoch, after_seq in ((worker.epoch + 1, follower.seq), (worker.epoch, follower.seq + 1000)):
            foreign = Watcher(client, [uid], epoch=epoch, after_seq=after_seq).until(lambda w: w.synced)
            assert foreign.resyncs == 1 and foreign.keys() == set(keys)
            foreign.close()


def test_retired_holders_and_emptied_namespaces_reach_watchers(master: Role, client: Client) -> None:
    uid, keys = client.uid(), keys_of(5)
    with scripted(master.address, "w2") as stays:
        stays.join()
        stays.inventory([batch(uid, keys[:1])])
        goes = ScriptedWorker(master.address, "w1")
        goes.join()
        goes.inventory([batch(uid, keys)])
        watcher = Watcher(client, [uid]).until(lambda w: w.synced)
        assert watcher.keys() == set(keys)
        goes.cut()
        watcher.until(lambda w: w.keys() == set(keys[:1]))
        assert watcher.resyncs == 1
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.call, "Remove", pb.RemoveRequest(namespace=uid, all=True))
            task = stays.expect("remove").remove
            stays.send(task_done=pb.TaskDone(task_id=task.task_id, n_removed=1))
            answer.result(CALL_S)
        watcher.until(lambda w: not w.mirror)
        watcher.close()


def test_a_watcher_that_reads_too_slowly_is_resynced_and_ends_up_right(master: Role, client: Client) -> None:
    """The ring (262,144 keys) goes round while the watcher reads nothing; it must be told, and have the truth afterwards."""
    uid = client.uid()
    with scripted(master.address) as worker:
        worker.join()
        worker.inventory()
        watcher = Watcher(client, [uid]).until(lambda w: w.synced)
        parts = [keys_of(16_000, salt=0), keys_of(16_000, salt=1)]
        for i in range(70):  # 39 MB: far more than the connection's buffers and the ring together
            worker.report(batch(uid, parts[i % 2], tiers=DRAM if i < 68 else 2))
        last = {*parts[0], *parts[1]}
        watcher.until(lambda w: w.synced and set(w.mirror.values()) == {2} and w.keys() == last, timeout_s=60)
        assert watcher.resyncs >= 2
        watcher.close()


def test_watchers_that_connect_and_die_leave_nothing(master: Role, client: Client, connect: Callable[..., Client]) -> None:
    uid = client.uid()
    fds = len(os.listdir(f"/proc/{master.pid}/fd"))  # noqa: PTH208
    for _ in range(10):
        some = [connect(master.address) for _ in range(20)]
        watchers = [Watcher(one, [uid]) for one in some]
        for watcher in watchers:
            watcher.step()
        assert metric(master, "kvpool_watchers") == 20
        for i, (one, watcher) in enumerate(zip(some, watchers, strict=True)):
            if i % 2:
                watcher.close()
            one.close()  # with the call still open for every second one
        wait_until(lambda: metric(master, "kvpool_watchers") == 0, what="watchers are gone")
    wait_until(lambda: len(os.listdir(f"/proc/{master.pid}/fd")) <= fds + 4, what="connections are closed")  # noqa: PTH208
    assert client.describe().epoch == 1


# --- restart ------------------------------------------------------------------------------------------------------------


def test_a_new_master_finds_100_000_blocks_again(start: Callable[..., Role], connect: Callable[..., Client]) -> None:
    first = start()
    client = connect(first.address)
    uid = client.uid()
    keys = keys_of(100_000)
    parts = [batch(uid, keys[i : i + 16_000]) for i in range(0, len(keys), 16_000)]
    worker = ScriptedWorker(first.address)
    worker.join()
    worker.inventory(parts)
    assert client.describe().namespaces[0].blocks == 100_000
    port = first.port
    first.kill()
    worker.cut()
    second = start(port=port)
    client = connect(second.address)
    reply = client.match(uid, keys[:10])
    assert reply.n_blocks == 0 and not reply.complete  # a miss that may be none
    assert client.locate(uid, keys[:1]).complete is False
    started = time.monotonic()
    worst = [0.0]
    stop = threading.Event()

    def probe() -> None:
        while not stop.is_set():
            before = time.monotonic()
            client.call("OpenNamespace", pb.OpenNamespaceRequest(name="ns"))
            worst[0] = max(worst[0], time.monotonic() - before)

    with scripted(second.address, incarnation=worker.incarnation) as back, ThreadPoolExecutor(1) as pool:
        probing = pool.submit(probe)
        back.epoch, back.next_seq = worker.epoch, worker.next_seq
        assert back.join().inventory_wanted
        back.inventory(parts)
        took = time.monotonic() - started
        stop.set()
        probing.result(CALL_S)
        assert took < 3.0
        assert worst[0] < 0.25, "the loop was held"  # 20 ms of the loop a part, on a busy machine
        for i in range(0, len(keys), 16_000):
            reply = client.match(uid, keys[i : i + 16_000])
            assert reply.n_blocks == len(keys[i : i + 16_000]) and reply.complete
        assert client.describe().epoch == 2


def test_an_index_is_complete_after_the_grace_although_a_worker_stays_away(
    start: Callable[..., Role], connect: Callable[..., Client]
) -> None:
    first = start()
    client = connect(first.address)
    uid = client.uid()
    worker = ScriptedWorker(first.address)
    worker.join()
    worker.inventory()
    first.kill()
    worker.cut()
    second = start()
    client = connect(second.address)
    assert not client.match(uid, keys_of(1)).complete
    watcher = Watcher(client, [uid], epoch=1, after_seq=5)
    assert watcher.step().WhichOneof("event") == "resync"
    assert not watcher.synced
    watcher.until(lambda w: w.synced)  # only now: an empty snapshot would have emptied the mirror
    assert client.match(uid, keys_of(1)).complete
    assert cause_of(client.match(uid, keys_of(1)).miss_cause) is MissCause.UNKNOWN  # the memory of the gone went with the master
    watcher.close()


def test_a_first_start_is_complete_at_once(client: Client) -> None:
    assert client.match(client.uid(), keys_of(1)).complete


# --- the process --------------------------------------------------------------------------------------------------------


def test_ready_line_health_metrics_and_a_quick_end(master: Role, client: Client) -> None:
    assert set(master.ready) == {"ready", "role", "id", "pid", "address", "http"}
    assert master.ready["role"] == "master" and master.ready["pid"] == master.pid
    assert json.loads(get(master, "/healthz")[1])["ok"] and json.loads(get(master, "/readyz")[1])["ready"]
    client.uid()
    assert metric(master, "kvpool_namespaces") == 1
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub = health_pb2_grpc.HealthStub(client.channel)
    assert stub.Check(health_pb2.HealthCheckRequest(service="kvpool.v1.Master"), timeout=CALL_S).status == 1
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    [answer] = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo(iter([ask]), timeout=CALL_S)
    assert "kvpool.v1.Master" in {service.name for service in answer.list_services_response.service}
    worker = ScriptedWorker(master.address)
    worker.join()
    watcher = Watcher(client, [])
    watcher.step()
    started = time.monotonic()
    assert master.stop(timeout_s=10.0) == 0
    assert time.monotonic() - started < 5.0  # with a session and a watch open
    assert worker.expect("refused").refused.code == "master_unavailable"
    worker.cut()
    watcher.close()


def test_sigint_ends_it_too(master: Role) -> None:
    master.signal(signal.SIGINT)
    assert master.process.wait(timeout=10.0) == 0


def test_a_master_that_is_away_is_named_within_the_deadline(connect: Callable[..., Client]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(MasterUnavailable, match=address):
            connect(address).call("Describe", pb.DescribeRequest(), timeout_s=1.0)
        taken.listen(1)  # accepts and says nothing
        with pytest.raises(MasterUnavailable, match=address):
            connect(address).call("Describe", pb.DescribeRequest(), timeout_s=1.0)
        assert time.monotonic() - started < 3.0


def test_a_port_or_directory_in_use_is_named(master: Role, tmp_path: Path) -> None:
    port = str(master.port)
    taken = run_cli("master", "--port", port, "--http-port", "0", "--data-dir", tmp_path / "other")
    assert taken.returncode == 1 and f"port: port {port} on 127.0.0.1 is in use" in taken.stderr and not taken.stdout
    http_port = master.http.rpartition(":")[2]
    taken = run_cli("master", "--port", "0", "--http-port", http_port, "--data-dir", tmp_path / "other")
    assert taken.returncode == 1 and f"http_port: port {http_port}" in taken.stderr
    locked = run_cli("master", "--port", "0", "--http-port", "0", "--data-dir", tmp_path / "data")
    assert locked.returncode == 1 and f"pid {master.pid}" in locked.stderr and "data_dir" in locked.stderr


def test_a_damaged_state_is_refused_and_left_as_it_is(
    start: Callable[..., Role], connect: Callable[..., Client], tmp_path: Path
) -> None:
    first = start()
    connect(first.address).uid()
    assert first.stop() == 0
    file = tmp_path / "data" / "state" / "data.mdb"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"\0" * len(whole), whole[:100]):
        file.write_bytes(damaged)
        refused = run_cli("master", "--port", "0", "--http-port", "0", "--data-dir", tmp_path / "data")
        assert refused.returncode == 1 and "data.mdb" in refused.stderr, (refused.returncode, refused.stderr)
        assert file.read_bytes() == damaged
    file.write_bytes(whole)
    assert connect(start().address).create().created is False


def test_a_token_is_needed_where_there_is_one(start: Callable[..., Role], connect: Callable[..., Client], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    master = start("--token-file", str(tmp_path / "token"))
    for wrong in ("", "S3cret", "s3cret "):
        with pytest.raises(Unauthenticated):
            connect(master.address, wrong).describe()
        watcher = Watcher(connect(master.address, wrong), [])
        with pytest.raises(grpc.RpcError) as error:
            watcher.step()
        assert isinstance(error_of(error.value), Unauthenticated)
        worker = ScriptedWorker(master.address, token=wrong)
        worker.send(hello=worker.hello())
        assert worker.ended.wait(CALL_S)
        assert worker.error is not None and isinstance(error_of(worker.error), Unauthenticated)
        worker.cut()
    assert connect(master.address, "s3cret").describe().epoch == 1
    with scripted(master.address, token="s3cret") as worker:
        worker.join()
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub = health_pb2_grpc.HealthStub(connect(master.address).channel)
    assert stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S).status == 1


def test_another_address_needs_a_token_or_insecure(start: Callable[..., Role], tmp_path: Path) -> None:
    refused = run_cli("master", "--host", "0.0.0.0", "--port", "0", "--http-port", "0", "--data-dir", tmp_path / "data")
    assert refused.returncode in (1, 2) and "host" in refused.stderr and "insecure" in refused.stderr
    assert start("--host", "0.0.0.0", "--insecure").address.startswith("127.0.0.1:")


def test_proxy_variables_do_not_reach_the_pools_channels(
    client: Client, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert connect(client.address).describe().epoch == 1


def test_calls_are_answered_while_the_loop_serves_big_ones(master: Role, client: Client) -> None:
    """16,384 keys located: well under 10 ms of the loop, and the answer is whole."""
    uid, keys = client.uid(), keys_of(16_384)
    with scripted(master.address) as worker:
        worker.join()
        worker.inventory([batch(uid, keys)])
        found = client.locate(uid, keys)
        assert len(found.n_replicas) == 16_384 and len(found.holders) == 4 * 16_384 and found.n_keys == 16_384
        listed, cursor = [], b""
        while True:
            page = client.call("ListBlocks", pb.ListBlocksRequest(namespace=uid, limit=5000, after=cursor))
            listed += [page.keys[i : i + 34] for i in range(0, len(page.keys), 34)]
            cursor = page.cursor
            if not cursor:
                break
        assert listed == sorted(keys)
        described = client.describe()
        assert described.namespaces[0].bytes == 16_384 * LAYOUT.block_bytes
        assert 60 < described.index_bytes / described.replicas < 400


def test_variable_sizes_are_counted_as_they_are(master: Role, client: Client) -> None:
    uid = client.create("opaque", KVLayout.opaque(block_bytes=4096)).namespace.uid
    keys = keys_of(3)
    with scripted(master.address) as worker:
        worker.join()
        worker.inventory([batch(uid, keys[:2], size=100), batch(uid, keys[2:], size=7)])
        assert client.describe().namespaces[0].bytes == 207
        worker.report(batch(uid, keys[:1], tiers=0))
        assert client.describe().namespaces[0].bytes == 107


def test_a_stopped_master_is_waited_for_no_longer_than_the_deadline(master: Role, client: Client) -> None:
    client.uid()
    master.pause()
    started = time.monotonic()
    with pytest.raises(MasterUnavailable):
        client.call("Describe", pb.DescribeRequest(), timeout_s=0.5)
    assert time.monotonic() - started < 2.0
    master.resume()
    assert wait_until(lambda: client.describe().epoch) == 1
