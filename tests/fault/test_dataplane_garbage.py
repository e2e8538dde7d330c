"""Port scans, garbage, half messages and slow senders on every port of a worker (scenarios B56 and B84), beside a client at work.

The scaled runs are in `make test`; the whole ones are marked `reports`.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import pytest

import kvpool
from kvpool.core.frames import HEADER_BYTES, Header, Op
from kvpool.core.types import NamespaceUid
from tests.support.cluster import Cluster
from tests.support.payload import check, payloads
from tests.support.raw_client import RawClient, write_meta
from tests.support.waiting import pause, wait_until

MakeCluster = Callable[..., Cluster]
BLOCK = 65536


@dataclass
class Worker:
    """Where a worker listens, and what it uses."""

    process: psutil.Process
    tcp: str
    unix: str
    http: str
    log: Any

    @classmethod
    def of(cls, cluster: Cluster) -> Worker:
        role = cluster.worker()
        with RawClient(role.address) as client:
            unix = client.greeting["unix"]
        return cls(psutil.Process(role.pid), role.address, unix, role.http, role.log)

    def connect(self, where: str) -> socket.socket:
        if where == "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(10)
            sock.connect("\0" + self.unix)
            return sock
        host, _, port = (self.tcp if where == "tcp" else self.http).rpartition(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def usage(self) -> tuple[int, int]:
        return self.process.num_fds(), self.process.num_threads()

    def half_closed(self) -> int:
        return sum(c.status == psutil.CONN_CLOSE_WAIT for c in self.process.net_connections(kind="tcp"))


@dataclass
class Normal:
    """A client that puts and gets, and checks every byte, until told to stop."""

    ns: Any
    n: int = 0
    took: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stop.is_set():
            self.n += 1
            k = self.n
            started = time.monotonic()
            try:
                names = [f"{k}/{i}" for i in range(4)]
                hashes = self.ns.hash(range(k * 1000, k * 1000 + 64))
                put = self.ns.put(hashes, payloads(names, size=BLOCK))
                if {outcome.value for outcome in put.outcomes} != {"stored"}:
                    self.errors.append(f"put {k}: {put.outcomes}")
                out = np.zeros((4, BLOCK), dtype=np.uint8)
                got = self.ns.get(hashes, out)
                if got.n_blocks != 4:
                    self.errors.append(f"get {k}: {got}")
                for name, row in zip(names, out, strict=True):
                    check(name, row)
            except Exception as error:
                self.errors.append(f"{k}: {type(error).__name__} {error}")
            self.took.append(time.monotonic() - started)

    @contextlib.contextmanager
    def working(self) -> Iterator[Normal]:
        self._stop.clear()
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()


def normal(cluster: Cluster) -> Normal:
    layout = kvpool.KVLayout.opaque(block_bytes=BLOCK, block_tokens=16)
    return Normal(cluster.connect(transport="tcp").namespace("n", layout, create=True))


def attack(worker: Worker, where: str, *, scale: float, seed: int) -> None:
    """Everything that B56 names, on one port."""
    chance = random.Random(seed)
    for _ in range(int(500 * scale)):
        worker.connect(where).close()
    for _ in range(int(200 * scale)):
        with worker.connect(where) as sock:
            sock.sendall(bytes([chance.randrange(256)]))
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" if where != "http" else b"\x16\x03 nonsense / HTTP\r\n\r\n"
    half = Header(Op.HELLO, request_id=1, deadline_ms=1000, meta_bytes=100).encode() + b"{" * 50
    for data in (chance.randbytes(1 << 20), request, half, half[:HEADER_BYTES], Header(Op.READ, meta_bytes=8).encode()):
        with worker.connect(where) as sock, contextlib.suppress(OSError):  # the worker may close while we still send
            sock.sendall(data)
        with worker.connect(where) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(data)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST
    if where != "unix":
        context = ssl.create_default_context()
        with worker.connect(where) as sock:
            sock.settimeout(1)
            with contextlib.suppress(OSError):
                context.wrap_socket(sock, server_hostname="x")


def greeted_garbage(worker: Worker, uid: NamespaceUid, *, seed: int) -> None:
    """What a client past HELLO can send wrong: each costs its own connection and nothing else."""
    chance = random.Random(seed)
    for op in Op:
        for meta in (b"", chance.randbytes(7), uid + chance.randbytes(200), b"\xff" * 4000):
            with RawClient(worker.tcp) as client, contextlib.suppress(OSError):
                client.send(op, meta, deadline_ms=1000)
                client.receive()
    for raw in (
        Header(Op.WRITE, deadline_ms=1000, meta_bytes=(8 << 20) + 1).encode(),
        Header(Op.WRITE, deadline_ms=1000, payload_bytes=(1 << 30) + 1).encode(),
        b"KVP1\x02" + bytes(35),
        b"KVP1\x01\xee" + bytes(34),
    ):
        with RawClient(worker.tcp) as client, contextlib.suppress(OSError):
            client.sock.sendall(raw)
            client.sock.recv(4096)
            assert client.sock.recv(1) == b"" or True
    count = struct.pack("<16s32sIIB3x", uid, bytes(32), 0, 0xFFFFFFFF, 1)  # four billion keys
    with RawClient(worker.tcp) as client, pytest.raises(OSError):
        client.call(Op.TOUCH, count)


@pytest.mark.parametrize("scale", [0.1, pytest.param(1.0, marks=pytest.mark.reports)])
def test_scans_and_garbage_harm_nobody(make_cluster: MakeCluster, scale: float) -> None:
    cluster = make_cluster(dram="64MiB")
    client = normal(cluster)
    worker = Worker.of(cluster)
    with client.working():
        wait_until(lambda: len(client.took) > 5)
        before, rss = worker.usage(), worker.process.memory_info().rss
        for seed, where in enumerate(("tcp", "unix", "http")):
            attack(worker, where, scale=scale, seed=seed)
        greeted_garbage(worker, client.ns._spec.uid, seed=9)
    assert not client.errors, client.errors[:5]
    wait_until(lambda: worker.usage()[0] <= before[0] and worker.half_closed() == 0, timeout_s=30)
    assert worker.usage()[1] <= before[1] + 4  # HTTP keeps a few threads for scrapes
    assert worker.process.memory_info().rss < rss + (96 << 20)
    assert os.path.getsize(worker.log) < 10 << 20  # noqa: PTH202
    assert "Traceback" not in cluster.worker().log_text()
    with RawClient(worker.tcp) as raw:
        assert raw.call(Op.PING).status == 0


@pytest.mark.parametrize(
    ("n_slow", "n_half", "seconds"),
    [(150, 16, 8), pytest.param(1000, 64, 120, marks=[pytest.mark.reports, pytest.mark.timeout(400)])],
    ids=["scaled", "whole"],
)
def test_slow_senders_and_half_sent_puts_starve_nobody(
    make_cluster: MakeCluster, n_slow: int, n_half: int, seconds: int
) -> None:
    cluster = make_cluster(dram="128MiB", env={"KVPOOL_WORKER__BODY_TIMEOUT_MS": "3000"})
    client = normal(cluster)
    worker = Worker.of(cluster)
    with client.working():
        wait_until(lambda: len(client.took) >= 40)
    quiet, client.took = sorted(client.took[5:]), []
    rss = worker.process.memory_info().rss
    slow: list[socket.socket] = []
    half: list[RawClient] = []
    try:
        for where in ("tcp", "unix", "http"):
            slow += [worker.connect(where) for _ in range(n_slow // 3)]
        preface = Header(Op.HELLO, request_id=1, deadline_ms=60_000, meta_bytes=100).encode()
        big = kvpool.KVLayout.opaque(block_bytes=1 << 20, block_tokens=16)
        ns = cluster.connect().namespace("big", big, create=True)
        wait_until(lambda: b'"namespaces": 2' in stat(worker))
        block = bytes(1 << 20)
        for i in range(n_half):
            raw = RawClient(worker.tcp)
            half.append(raw)
            batch = ns.hash(range(i * 16, i * 16 + 16)).key_batch(ns._spec.uid)
            meta = write_meta(batch, [block], chunk_bytes=262144)
            raw.send(Op.WRITE, meta, payload=b"x", payload_bytes=1 << 20, deadline_ms=600_000)
        with client.working():
            end = time.monotonic() + seconds
            at = 0
            while time.monotonic() < end:
                for sock in [*slow, *(raw.sock for raw in half)]:
                    with contextlib.suppress(OSError):
                        sock.send(preface[at % 40 : at % 40 + 1])
                at += 1
                pause(1.0)
        assert not client.errors, client.errors[:5]
        loaded = sorted(client.took)
        assert loaded[len(loaded) // 2] < 5 * quiet[len(quiet) // 2] + 0.05
        assert worker.process.memory_info().rss < rss + (500 << 20)
        for sock in [*slow, *(raw.sock for raw in half)]:  # each was closed by the worker's own limits
            sock.settimeout(10)
            with contextlib.suppress(ConnectionError):
                while sock.recv(65536):
                    pass
    finally:
        for sock in slow:
            sock.close()
        for raw in half:
            raw.close()
    wait_until(lambda: b'"reserved": 0' in stat(worker))
    with RawClient(worker.tcp) as raw:
        assert raw.call(Op.PING).status == 0


def stat(worker: Worker) -> bytes:
    with RawClient(worker.tcp) as client:
        return client.call(Op.STAT).meta
