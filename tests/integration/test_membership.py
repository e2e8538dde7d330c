"""Who may be in a pool, and how far it is trusted: releases on every path, suspicion, slow start, wishes to drain."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import kvpool
from kvpool.core.frames import CodesAnswer, Flag, NumberRequest, Op, Status, WriteRequest
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import BlockCode, MissCause
from kvpool.errors import VersionMismatch
from kvpool.master.wire import spec_to_proto
from kvpool.transport.base import LinkCause, LinkError, LinkOptions, Range
from kvpool.transport.rpc import error_of, open_channel
from kvpool.transport.tcp import TcpLink
from kvpool.v1 import master_pb2 as pb
from kvpool.v1.master_pb2_grpc import MasterStub
from tests.support.cluster import Cluster
from tests.support.frame_peer import FramePeer
from tests.support.payload import payloads
from tests.support.processes import Role
from tests.support.proxy import free_port
from tests.support.raw_client import RawClient
from tests.support.scripted_worker import ScriptedWorker, scripted
from tests.support.waiting import wait_until
from tests.support.worker_node import WorkerNode, blocks_of, chain

OWN = kvpool.__version__
FAR = "0.9.3"
NEXT = "0.2.0"
QUICK = {"KVPOOL_MASTER__HEARTBEAT_MS": "100", "KVPOOL_MASTER__SUSPECT_AFTER_MS": "2000", "KVPOOL_MASTER__DEAD_AFTER_MS": "8000"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Role]]:
    """Starts (again) the one master of the test, on its port and directory."""
    masters: list[Role] = []

    def run() -> Role:
        port = masters[-1].port if masters else free_port()
        args = ["master", "--port", str(port), "--http-port", "0", "--data-dir", str(tmp_path / "data"),
                "--parent-pid", str(os.getpid())]  # fmt: skip
        masters.append(Role(args, log=tmp_path / f"master-{len(masters)}.log", env=QUICK))
        return masters[-1].wait_ready()

    yield run
    for master in masters:
        if master.process.poll() is None:
            assert master.stop() == 0
        else:
            master.kill()


@contextlib.contextmanager
def stub_of(master: Role, *, agent: str = "") -> Iterator[Any]:
    """The service's stub; `agent`: calls say this user agent."""
    if agent:
        channel = grpc.insecure_channel(master.address, options=[("grpc.primary_user_agent", agent)])
    else:
        channel = open_channel(master.address)
    try:
        yield MasterStub(channel)  # type: ignore[no-untyped-call]
    finally:
        channel.close()


def joined(worker: ScriptedWorker, **fields: Any) -> ScriptedWorker:
    worker.join(**fields)
    worker.inventory()
    return worker


def states(stub: Any) -> dict[str, int]:
    return {w.info.worker_id: w.info.state for w in stub.Describe(pb.DescribeRequest(), timeout=5).workers}


def namespace_uid(stub: Any) -> bytes:
    spec = spec_to_proto(NamespaceSpec.of("n", kvpool.KVLayout.opaque(block_bytes=4096)))
    return bytes(stub.CreateNamespace(pb.CreateNamespaceRequest(namespace=spec), timeout=5).namespace.uid)


def placed(stub: Any, uid: bytes, key: int, *, n_workers: int = 1) -> list[str]:
    request = pb.PlaceRequest(namespace=uid, keys=key.to_bytes(34, "little"), n_workers=n_workers)
    return [worker.worker_id for worker in stub.Place(request, timeout=5).workers]


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


# --- releases -----------------------------------------------------------------------------------------------------------


def test_a_worker_of_a_far_release_is_refused_with_both_versions(start: Callable[[], Role]) -> None:
    master = start()
    for release in (FAR, "1.1.0", "", "test"):
        with scripted(master.address) as worker:
            worker.send(hello=worker.hello(version=release))
            refused = worker.expect("refused").refused
            assert refused.code == "version_mismatch"
            assert (release or "no version") in refused.reason and OWN in refused.reason
    with scripted(master.address) as worker:
        joined(worker, version=NEXT)
        with stub_of(master) as stub:
            assert states(stub) == {"w1": 1}


def test_a_client_of_a_far_release_is_refused_with_both_versions(start: Callable[[], Role]) -> None:
    master = start()
    for agent, refused in ((f"kvpool/{FAR}", True), (f"kvpool/{NEXT}", False), (f"kvpool/{OWN}", False), ("grpcurl/1.9", False)):
        with stub_of(master, agent=agent) as stub:
            calls = [lambda: stub.ListNamespaces(pb.ListNamespacesRequest(), timeout=5),
                     lambda: next(iter(stub.Watch(pb.WatchRequest(), timeout=5)))]  # fmt: skip
            for call in calls:
                if not refused:
                    call()
                    continue
                with pytest.raises(grpc.RpcError) as caught:
                    call()
                error = error_of(caught.value)
                assert isinstance(error, VersionMismatch) and FAR in str(error) and OWN in str(error)
    with stub_of(master) as stub:  # as every part of the pool asks
        assert stub.ListNamespaces(pb.ListNamespacesRequest(), timeout=5).epoch


def test_a_data_connection_of_a_far_release_is_refused_by_both_sides(tmp_path: Path) -> None:
    worker = WorkerNode(tmp_path)
    try:
        for release, status in ((FAR, Status.VERSION), (NEXT, Status.OK), (OWN, Status.OK)):
            with RawClient(worker.plane.address, greet=False) as client:
                said = {"token": "", "client": "raw", "host_id": "", "versions": [1], "release": release}
                answer = client.call(Op.HELLO, json.dumps(said).encode())
                assert answer.status is status
                if status is Status.VERSION:
                    assert FAR in answer.meta.decode() and OWN in answer.meta.decode()
                    with pytest.raises((ConnectionError, OSError)):
                        client.call(Op.PING)
    finally:
        worker.close()

    def greet(peer: FramePeer, sock: Any, header: Any, meta: bytes, payload: bytes) -> None:
        assert json.loads(meta)["release"] == OWN
        facts = {"worker": "w", "incarnation": 77, "host_id": "h", "version": 1, "release": FAR, "unix": ""}
        peer.answer(sock, header, json.dumps(facts).encode())

    with FramePeer(lambda *_: None, hello=greet) as peer:
        link = TcpLink(peer.address, LinkOptions())
        with pytest.raises(VersionMismatch, match=f"{FAR}.*{OWN}"):
            link.connect(deadline=soon())
        link.close()


# --- moves are fenced ---------------------------------------------------------------------------------------------------


def test_a_move_that_may_bring_back_what_was_removed_is_refused(tmp_path: Path) -> None:
    worker = WorkerNode(tmp_path)
    try:
        spec = worker.fixed_namespace()
        batch, blocks = chain(spec, "c", 3), blocks_of(spec, "c", 3)
        link = TcpLink(worker.plane.address, LinkOptions())
        sizes = [spec.block_bytes] * 3
        held = link.reserve(batch, sizes, deadline=soon(), fence=0)  # as of no removal: so is the worker
        link.fill(held, [Range(i, 0, memoryview(block)) for i, block in enumerate(blocks)], deadline=soon())
        worker.node.remove(spec.uid, batch.slice(1, 2).keys, removal_seq=1)  # between reservation and commit
        codes = link.commit(held, wait_listed=False, deadline=soon())
        assert list(codes) == [BlockCode.STORED, BlockCode.FULL, BlockCode.STORED]
        with pytest.raises(LinkError) as caught:  # the sender has not seen that removal
            link.reserve(batch, sizes, deadline=soon(), fence=0)
        assert caught.value.cause is LinkCause.NOT_READY
        again = link.reserve(batch, sizes, deadline=soon(), fence=1)  # it was put anew, and the sender knows of the removal
        assert list(again.codes) == [BlockCode.ALREADY, BlockCode.RESERVED, BlockCode.ALREADY]
        link.abort(again)
        plain = link.reserve(batch, sizes, deadline=soon())  # a put is no move
        assert plain.codes[1] == BlockCode.RESERVED
        link.abort(plain)
        link.close()
        with RawClient(worker.plane.address) as raw:  # a fence that is none
            meta = WriteRequest(batch, np.array(sizes, dtype=np.uint64)).encode()
            with pytest.raises((ConnectionError, OSError)):
                raw.call(Op.RESERVE, meta, flags=Flag.FENCED)
        with RawClient(worker.plane.address) as raw:
            number = CodesAnswer.decode(raw.call(Op.RESERVE, meta).meta).number
            assert raw.call(Op.ABORT, NumberRequest(number).encode()).status is Status.OK
    finally:
        worker.close()


# --- suspicion and slow start -------------------------------------------------------------------------------------------


def test_a_worker_that_a_client_cannot_use_is_suspected_until_it_is_heard(start: Callable[[], Role]) -> None:
    master = start()
    with scripted(master.address, heartbeat_s=0) as worker, stub_of(master) as stub:
        joined(worker)
        stub.ReportPeer(pb.ReportPeerRequest(worker_id="w1", incarnation=worker.incarnation ^ 1), timeout=5)
        stub.ReportPeer(pb.ReportPeerRequest(worker_id="nobody", incarnation=1), timeout=5)
        assert states(stub) == {"w1": 1}
        stub.ReportPeer(pb.ReportPeerRequest(worker_id="w1", incarnation=worker.incarnation), timeout=5)
        assert states(stub) == {"w1": 2}
        worker.send(heartbeat=pb.Heartbeat())
        wait_until(lambda: states(stub) == {"w1": 1}, what="healed")


def test_clients_report_a_frozen_worker_before_its_silence_is_noticed(make_cluster: Callable[..., Cluster]) -> None:
    slow = {"KVPOOL_MASTER__SUSPECT_AFTER_MS": "30000", "KVPOOL_MASTER__DEAD_AFTER_MS": "60000"}
    cluster = make_cluster(n_workers=1, env=slow)
    client = cluster.connect(transport="tcp")
    layout = kvpool.KVLayout.opaque(block_bytes=4096, block_tokens=4)
    ns = client.namespace("frozen", layout, create=True)
    hashes = ns.hash(range(4))
    assert ns.put(hashes, payloads([1], size=4096)).n_there == 1
    cluster.worker().pause()
    try:
        out = np.zeros((1, 4096), np.uint8)
        for _ in range(4):
            assert ns.get(hashes, out, deadline_ms=300).miss in (MissCause.TIMEOUT, MissCause.WORKER_LOST)
        wait_until(lambda: [w["state"] for w in client.describe()["workers"]] == ["suspect"], timeout_s=5, what="suspected")
    finally:
        cluster.worker().resume()
    wait_until(lambda: [w["state"] for w in client.describe()["workers"]] == ["up"], timeout_s=5, what="up again")
    wait_until(lambda: ns.get(hashes, out).n_blocks == 1, timeout_s=5, what="served again")


def test_a_new_worker_starts_slowly_and_one_that_the_master_forgot_does_not(start: Callable[[], Role]) -> None:
    master = start()

    def up_ms(stub: Any) -> dict[str, int]:
        return {w.info.worker_id: w.info.up_ms for w in stub.Describe(pb.DescribeRequest(), timeout=5).workers}

    with scripted(master.address, "old") as old, stub_of(master) as stub:
        joined(old)
        assert up_ms(stub)["old"] < 5_000
        master.kill()
        old.close()
        master = start()
        with (
            scripted(master.address, "old", incarnation=old.incarnation) as back,
            scripted(master.address, "new", host_id="host-a") as new,
            stub_of(master) as again,
        ):
            joined(back)
            joined(new)
            told = up_ms(again)
            assert told["old"] >= 10_000 and told["new"] < 5_000
            uid = namespace_uid(again)
            wait_until(lambda: len(placed(again, uid, 0, n_workers=2)) == 2, what="both are placed on")
            first = [placed(again, uid, i)[0] for i in range(200)]
            assert 1 <= first.count("new") < 80, first.count("new")


# --- drains as the master keeps them ------------------------------------------------------------------------------------


def test_the_wish_to_drain_outlives_master_and_session(start: Callable[[], Role]) -> None:
    master = start()
    with scripted(master.address) as worker, stub_of(master) as stub:
        joined(worker)
        reply = stub.Drain(pb.DrainRequest(worker_id="w1", rate_bytes=77), timeout=5)
        assert reply.worker.info.state == 4 and reply.worker.drain.rate_bytes == 77
        task = worker.expect("drain").drain
        assert task.active and task.rate_bytes == 77
        worker.send(heartbeat=pb.Heartbeat(drain=pb.DrainStatus(phase=2, blocks_moved=5)))
        wait_until(lambda: states(stub) == {"w1": 5}, what="drained")
        master.kill()
    master = start()
    with scripted(master.address) as worker, stub_of(master) as stub:
        welcome = worker.join()
        worker.inventory()
        assert welcome.drain.active and welcome.drain.rate_bytes == 77
        assert states(stub) == {"w1": 4}
        stub.Drain(pb.DrainRequest(worker_id="w1", cancel=True), timeout=5)
        assert not worker.expect("drain").drain.active
        worker.send(heartbeat=pb.Heartbeat(drain=pb.DrainStatus(phase=1)))  # older than that word
        worker.report()
        assert states(stub) == {"w1": 1}
        worker.send(heartbeat=pb.Heartbeat(drain=pb.DrainStatus(phase=1, leaving=True)))  # its own wish
        wait_until(lambda: states(stub) == {"w1": 4}, what="leaving")


def test_who_drains_is_no_place_for_a_put(start: Callable[[], Role]) -> None:
    master = start()
    with scripted(master.address, "a") as a, scripted(master.address, "b") as b, stub_of(master) as stub:
        joined(a)
        joined(b)
        uid = namespace_uid(stub)
        assert sorted(placed(stub, uid, 0, n_workers=2)) == ["a", "b"]
        stub.Drain(pb.DrainRequest(worker_id="a"), timeout=5)
        assert placed(stub, uid, 0, n_workers=2) == ["b"]
        stub.Drain(pb.DrainRequest(worker_id="a", cancel=True), timeout=5)
        assert sorted(placed(stub, uid, 0, n_workers=2)) == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"worker_id": "nobody"}, "not known; known are w1"), ({"worker_id": ""}, "not known"),
     ({"worker_id": "w1", "forget": True}, "connected"), ({"worker_id": "w1", "forget": True, "cancel": True}, "cancel")],
)  # fmt: skip
def test_what_cannot_be_drained(start: Callable[[], Role], fields: dict[str, Any], words: str) -> None:
    master = start()
    with scripted(master.address) as worker, stub_of(master) as stub:
        joined(worker)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Drain(pb.DrainRequest(**fields), timeout=5)
        assert words in str(error_of(caught.value))
        assert states(stub) == {"w1": 1}
