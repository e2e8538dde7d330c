"""The read behind `/readyz`: a tiny block that lies outside of all tiers, asked for over the worker's own data plane.

Owns one short-lived connection per probe. That a probe succeeds means that the listener accepts, a loop runs, the block lock is
not stuck, and bytes come out right.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Final

from kvpool.core.frames import HEADER_BYTES, VERSIONS, Header, Op, ReadAnswer, ReadRequest, Status, decode_header
from kvpool.core.keys import KeyBatch
from kvpool.core.types import KEY_BYTES, BlockCode
from kvpool.worker.read_path import PROBE_BLOCK, PROBE_UID

PROBE_TIMEOUT_S: Final = 1.0


def probe(unix_name: str, *, token: str, timeout_s: float = PROBE_TIMEOUT_S) -> str:
    """Empty when a read has just succeeded, else why not. Blocks for at most `timeout_s`; any thread."""
    deadline = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect("\0" + unix_name)
            hello = json.dumps({"token": token, "client": "probe", "host_id": "", "versions": list(VERSIONS)}).encode()
            _call(sock, Op.HELLO, hello, deadline)
            request = ReadRequest(KeyBatch(PROBE_UID, bytes(KEY_BYTES))).encode()
            meta, payload = _call(sock, Op.READ, request, deadline)
            answer = ReadAnswer.decode(meta)
            if int(answer.entries["code"][0]) != BlockCode.HIT_INLINE or payload != PROBE_BLOCK:
                return "the probe block came back wrong"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _call(sock: socket.socket, op: Op, meta: bytes, deadline: float) -> tuple[bytes, bytes]:
    left_ms = int((deadline - time.monotonic()) * 1000)
    sock.sendall(Header(op, request_id=1, deadline_ms=max(1, left_ms), meta_bytes=len(meta)).encode() + meta)
    header = decode_header(_exactly(sock, HEADER_BYTES, deadline))
    answer = _exactly(sock, header.meta_bytes, deadline)
    if header.status is not Status.OK:
        raise ValueError(f"{op.name} answered {header.status.name}: {answer[:200]!r}")
    return answer, _exactly(sock, header.payload_bytes, deadline)


def _exactly(sock: socket.socket, n: int, deadline: float) -> bytes:
    got = bytearray()
    while len(got) < n:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        piece = sock.recv(n - len(got))
        if not piece:
            raise ConnectionError("the data plane closed the connection")
        got += piece
    return bytes(got)
