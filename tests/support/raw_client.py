"""A client of the data plane that knows frames and nothing else: for tests of what the worker itself does."""

from __future__ import annotations

import array
import json
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.core.frames import (
    HEADER_BYTES,
    CodesAnswer,
    Flag,
    Header,
    KeysRequest,
    Op,
    ReadAnswer,
    ReadRequest,
    Status,
    WriteRequest,
    decode_header,
)
from kvpool.core.hashing import chunk_sums
from kvpool.core.keys import KeyBatch
from kvpool.core.types import HoldId


@dataclass
class RawAnswer:
    status: Status
    meta: bytes
    payload: bytes
    fds: list[int]


class RawClient:
    """One greeted connection over TCP ("host:port") or an abstract unix socket ("@name")."""

    def __init__(self, address: str, *, token: str = "", greet: bool = True, timeout_s: float = 10.0) -> None:
        if address.startswith("@"):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(timeout_s)
            self.sock.connect("\0" + address[1:])
        else:
            host, _, port = address.rpartition(":")
            self.sock = socket.create_connection((host, int(port)), timeout=timeout_s)
        self.next_id = 1
        self.greeting: dict[str, Any] = {}
        if greet:
            answer = self.hello(token=token)
            assert answer.status is Status.OK, answer
            self.greeting = json.loads(answer.meta)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def hello(self, *, token: str = "", versions: tuple[int, ...] = (1,)) -> RawAnswer:
        said = {"token": token, "client": "raw", "host_id": "", "versions": list(versions)}
        return self.call(Op.HELLO, json.dumps(said).encode())

    def send(self, op: Op, meta: bytes = b"", *, payload: bytes = b"", flags: Flag = Flag.NONE, deadline_ms: int = 5000,
             payload_bytes: int | None = None) -> int:  # fmt: skip
        n = len(payload) if payload_bytes is None else payload_bytes
        header = Header(op, flags, request_id=self.next_id, deadline_ms=deadline_ms, meta_bytes=len(meta), payload_bytes=n)
        self.sock.sendall(header.encode() + meta + payload)
        self.next_id += 1
        return self.next_id - 1

    def receive(self) -> RawAnswer:
        """The next answer. Raises ConnectionError when the worker closed."""
        fds = array.array("i")
        raw, ancillary, _, _ = self.sock.recvmsg(HEADER_BYTES, socket.CMSG_SPACE(16 * fds.itemsize))
        for _, _, data in ancillary:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        raw += self._exactly(HEADER_BYTES - len(raw)) if raw else self._exactly(HEADER_BYTES)
        header = decode_header(raw)
        assert header.flags & Flag.ANSWER
        meta = self._exactly(header.meta_bytes)
        return RawAnswer(header.status, meta, self._exactly(header.payload_bytes), list(fds))

    def call(self, op: Op, meta: bytes = b"", **more: Any) -> RawAnswer:
        self.send(op, meta, **more)
        return self.receive()

    def _exactly(self, n: int) -> bytes:
        got = bytearray()
        while len(got) < n:
            piece = self.sock.recv(min(n - len(got), 1 << 20))
            if not piece:
                raise ConnectionError("closed by the worker")
            got += piece
        return bytes(got)

    # --- the common ops -----------------------------------------------------------------------------------------------------

    def write(self, batch: KeyBatch, blocks: list[bytes], *, chunk_bytes: int, flags: Flag = Flag.NONE, deadline_ms: int = 5000,
              sums: np.ndarray | None = None) -> bytes:  # fmt: skip
        """Codes of a WRITE over the socket."""
        meta = write_meta(batch, blocks, chunk_bytes=chunk_bytes, sums=sums)
        answer = self.call(Op.WRITE, meta, payload=b"".join(blocks), flags=flags, deadline_ms=deadline_ms)
        assert answer.status is Status.OK, answer
        return CodesAnswer.decode(answer.meta).codes

    def read(self, batch: KeyBatch, *, offset: int = 0, length: int = 0, hold_id: int = 0, flags: Flag = Flag.NONE,
             deadline_ms: int = 5000) -> tuple[ReadAnswer, bytes]:  # fmt: skip
        meta = ReadRequest(batch, offset, length, HoldId(hold_id)).encode()
        answer = self.call(Op.READ, meta, flags=flags, deadline_ms=deadline_ms)
        assert answer.status is Status.OK, answer
        return ReadAnswer.decode(answer.meta), answer.payload

    def touch(self, batch: KeyBatch, *, flags: Flag = Flag.NONE) -> CodesAnswer:
        answer = self.call(Op.TOUCH, KeysRequest(batch).encode(), flags=flags)
        assert answer.status is Status.OK, answer
        return CodesAnswer.decode(answer.meta)


def write_meta(batch: KeyBatch, blocks: list[bytes], *, chunk_bytes: int, sums: np.ndarray | None = None) -> bytes:
    if sums is None:
        sums = np.concatenate([chunk_sums(block, chunk_bytes) for block in blocks]) if blocks else np.empty(0, dtype=np.uint64)
    return WriteRequest(batch, np.array([len(block) for block in blocks], dtype=np.uint64), sums).encode()
