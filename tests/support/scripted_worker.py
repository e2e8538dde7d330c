"""A protocol peer of the master: a worker's session stream whose every message the test decides. No blocks, no data plane."""

from __future__ import annotations

import contextlib
import os
import queue
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

import kvpool
from kvpool.core.session import SESSION_PROTOCOL, pack_state
from kvpool.core.types import MissCause, Tiers
from kvpool.transport.rpc import open_channel
from kvpool.v1 import master_pb2 as pb
from kvpool.v1.master_pb2_grpc import MasterStub

WAIT_S = 5.0
DRAM = int(Tiers.DRAM)


def batch(
    uid: bytes, keys: Sequence[bytes], *, tiers: int = DRAM, cause: MissCause | None = None, size: int = 100
) -> pb.ReportBatch:
    """All keys in the same tiers (0: gone, by `cause`)."""
    n = len(keys)
    state = pack_state(tiers, cause)
    return pb.ReportBatch(
        namespace=uid, keys=b"".join(keys), tiers=bytes([state]) * n, sizes=struct.pack("<I", size) * n
    )


class ScriptedWorker:
    """One session. Received messages are taken in order by `expect`; heartbeats are answered by themselves."""

    def __init__(
        self,
        address: str,
        worker_id: str = "w1",
        *,
        incarnation: int = 0,
        token: str = "",
        host_id: str = "host-a",
        heartbeat_s: float = 0.05,
        ssd: bool = False,
        free_bytes: int = 1 << 30,
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation or int.from_bytes(os.urandom(8), "little") | 1
        self.host_id = host_id
        self.epoch = 0
        self.next_seq = 0
        self.applied: dict[bytes, int] = {}
        self.heartbeat_s = heartbeat_s
        self._tiers = [pb.TierStatus(tier="dram", capacity_bytes=1 << 30, used_bytes=(1 << 30) - free_bytes, state="ok")]
        if ssd:
            self._tiers.append(pb.TierStatus(tier="ssd", capacity_bytes=1 << 30, state="ok"))
        self._out: queue.SimpleQueue[pb.WorkerMessage | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[pb.MasterMessage | None] = queue.SimpleQueue()
        self._channel = open_channel(address, token)
        self._call: Any = MasterStub(self._channel).Session(iter(self._out.get, None))
        self.ended = threading.Event()
        self.error: grpc.RpcError | None = None
        self._threads = [threading.Thread(target=self._receive, name="scripted-receive")]
        self._threads[0].start()

    def _receive(self) -> None:
        try:
            for message in self._call:
                if message.WhichOneof("message") != "heartbeat":
                    self._in.put(message)
        except grpc.RpcError as error:
            self.error = error
        self.ended.set()
        self._in.put(None)

    def _beat(self) -> None:
        while not self.ended.wait(self.heartbeat_s):
            self.send(heartbeat=pb.Heartbeat(tiers=self._tiers))

    def send(self, **message: Any) -> None:
        self._out.put(pb.WorkerMessage(**message))

    def hello(self, **fields: Any) -> pb.WorkerHello:
        """The hello that `join` sends, with fields replaced."""
        info = pb.HolderInfo(
            worker_id=self.worker_id, incarnation=self.incarnation, host_id=self.host_id, address="127.0.0.1:1"
        )
        removals = [pb.AppliedRemovals(namespace=uid, removal_seq=seq) for uid, seq in self.applied.items()]
        values: dict[str, Any] = {
            "protocol": SESSION_PROTOCOL,
            "version": kvpool.__version__,
            "info": info,
            "last_epoch": self.epoch,
            "next_seq": self.next_seq,
            "removals": removals,
        }
        return pb.WorkerHello(**(values | fields))

    def join(self, **fields: Any) -> pb.Welcome:
        """Says hello, waits for the Welcome, and sends heartbeats from then on."""
        self.send(hello=self.hello(**fields))
        message = self.expect("welcome")
        self.epoch = message.epoch
        for update in message.welcome.namespaces:
            self.applied[update.namespace.uid] = update.namespace.removal_seq
        if self.heartbeat_s:
            beat = threading.Thread(target=self._beat, name="scripted-beat")
            self._threads.append(beat)
            beat.start()
        return message.welcome

    def expect(self, kind: str, *, timeout_s: float = WAIT_S) -> pb.MasterMessage:
        """The next message of this kind; others that come before it are dropped."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                message = self._in.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {kind} within {timeout_s} s") from None
            if message is None:
                raise AssertionError(f"the session ended before a {kind}: {self.error}")
            if message.WhichOneof("message") == kind:
                return message

    def inventory(self, batches: Sequence[pb.ReportBatch] = (), *, next_seq: int = 100) -> None:
        """A whole inventory in one part a batch, and its acknowledgement."""
        parts = [[b] for b in batches] or [[]]
        for i, part in enumerate(parts):
            self.send(
                inventory=pb.InventoryPart(next_seq=next_seq, batches=part, first=i == 0, last=i == len(parts) - 1)
            )
        self.next_seq = next_seq
        while self.expect("ack").ack.seq < next_seq - 1:
            pass

    def report(self, *batches: pb.ReportBatch, seq: int = 0, acked: bool = True) -> None:
        """The next report (or number `seq`), and its acknowledgement."""
        seq = seq or self.next_seq
        self.next_seq = seq + 1
        self.send(report=pb.Report(seq=seq, batches=batches))
        while acked and self.expect("ack").ack.seq < seq:
            pass

    def confirm(self, *, had: int = 1) -> pb.RemoveTask:
        """Takes the next RemoveTask and confirms it: all of its keys were there (had=1) or none."""
        task = self.expect("remove").remove
        n = len(task.keys) // 34
        self.applied[task.namespace] = task.removal_seq
        self.send(task_done=pb.TaskDone(task_id=task.task_id, codes=bytes([had]) * n, n_removed=n * had))
        return task

    def cut(self) -> None:
        """The stream breaks without a word."""
        self._call.cancel()
        self._end()

    def leave(self) -> None:
        """Goodbye, and the end of the stream."""
        self.send(leave=pb.Leave(reason="test"))
        assert self.ended.wait(WAIT_S)
        self._end()

    def _end(self) -> None:
        self.ended.wait(WAIT_S)
        self._out.put(None)
        for thread in self._threads:
            thread.join(WAIT_S)
        self._channel.close()

    close = cut


@contextlib.contextmanager
def scripted(address: str, worker_id: str = "w1", **options: Any) -> Iterator[ScriptedWorker]:
    """A worker that has said nothing yet; its stream is cut at the end."""
    worker = ScriptedWorker(address, worker_id, **options)
    try:
        yield worker
    finally:
        worker.cut()
