"""One connection to a worker: a blocking socket that carries one call at a time, every step under the call's deadline.

Owns sockets, the greeting, request ids, the meaning of an answer's status, and descriptors that come over a unix socket. Which
connection a call gets is in `pool`; what it says is in `link`, `tcp` and `shm`; the bytes are `core.frames`.

Deadlines are kept by the kernel (SO_RCVTIMEO, SO_SNDTIMEO) and MSG_WAITALL: one system call waits for a whole batch
without the GIL. A connection on which anything went wrong, or that still owes an answer, is closed and never used again.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import kvpool
from kvpool.core.frames import (
    HEADER_BYTES,
    MAGIC,
    MAX_HELLO_BYTES,
    MAX_META_BYTES,
    VERSIONS,
    Flag,
    FrameError,
    Header,
    Op,
    Status,
    decode_header,
)
from kvpool.core.version import check as check_release
from kvpool.errors import InvalidArgument, Unauthenticated, VersionMismatch
from kvpool.transport.base import LinkCause, LinkError, LinkOptions

if TYPE_CHECKING:
    from kvpool.transport.ring import Ring

CONNECT_SECONDS_MAX: Final = 1.0  # a host that is away must not eat the whole deadline of a call that has other replicas
IOV_MAX: Final = 1024  # Linux: buffers in one sendmsg or recvmsg
SEND_BYTES: Final = 4 << 20  # of one sendmsg: the deadline is looked at between them
FDS_MAX: Final = 2
_TIMEVAL: Final = struct.Struct("@ll")
_FD_BYTES: Final = array.array("i").itemsize

_CAUSES: Final = {
    Status.BAD_REQUEST: LinkCause.BAD_REQUEST,
    Status.UNKNOWN_NAMESPACE: LinkCause.UNKNOWN_NAMESPACE,
    Status.DEADLINE: LinkCause.TIMEOUT,
    Status.BUSY: LinkCause.BUSY,
    Status.NOT_READY: LinkCause.NOT_READY,
    Status.NOT_FOUND: LinkCause.NOT_FOUND,
    Status.INTERNAL: LinkCause.INTERNAL,
}


def answer_margin(remaining: float) -> float:
    """Seconds of a deadline that are kept for the answer's way back: what the worker is told is so much less."""
    return min(0.05, remaining / 10)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer whose payload, if any, is still to be received (`header.payload_bytes`)."""

    header: Header
    meta: bytes
    fds: tuple[int, ...] = ()


class Connection:
    """One greeted socket. Not thread-safe except `shutdown`; `clean` says whether another call may use it."""

    __slots__ = ("_next_id", "_owed_answers", "_owed_bytes", "_sock", "closed", "greeting", "peer", "ring", "ring_refused")

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        self._sock = sock
        self._next_id = 1
        self._owed_answers = 0
        self._owed_bytes = 0
        self.peer = peer
        self.closed = False
        self.greeting: dict[str, Any] = {}
        self.ring: Ring | None = None
        self.ring_refused = False

    @property
    def clean(self) -> bool:
        return not self.closed and self._owed_answers == 0 and self._owed_bytes == 0

    def still_quiet(self) -> bool:
        """False when the peer closed meanwhile, or sent what nobody asked for. No wait."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.ring = None
            self._sock.close()

    def shutdown(self) -> None:
        """From any thread: the call that is using this connection fails at once."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    # --- one call -----------------------------------------------------------------------------------------------------------

    def call(self, op: Op, meta: bytes, *, deadline: float, flags: Flag = Flag.NONE, n_fds: int = 0) -> Answer:
        """Sends a request without payload and receives its answer, which has none either."""
        request_id = self.send(op, meta, deadline=deadline, flags=flags)
        answer = self.receive(request_id, op, deadline=deadline, n_fds=n_fds)
        if answer.header.payload_bytes:
            raise self._broken(f"payload in an answer to {op.name}")
        return answer

    def hello(self, meta: bytes, *, deadline: float) -> Answer:
        """As `call`, for the first frame: a server that is full says so and closes without reading, and is still heard."""
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._owed_answers += 1
        remaining = max(0.0, deadline - time.monotonic())
        header = Header(Op.HELLO, Flag.NONE, Status.OK, request_id, int(remaining * 1000), len(meta), 0)
        self._arm(socket.SO_SNDTIMEO, deadline)
        with contextlib.suppress(OSError):  # what went wrong is told by the receive that follows
            self._sock.send(header.encode() + meta, socket.MSG_NOSIGNAL)
        return self.receive(request_id, Op.HELLO, deadline=deadline)

    def send(self, op: Op, meta: bytes, *, deadline: float, flags: Flag = Flag.NONE, payload: Sequence[memoryview] = (),
             payload_bytes: int = 0) -> int:  # fmt: skip
        """Sends one request; returns its id. With NO_REPLY no answer is owed."""
        request_id = self._next_id
        self._next_id += 1
        remaining = deadline - time.monotonic()
        deadline_ms = int((remaining - answer_margin(remaining)) * 1000)
        if deadline_ms <= 0:
            raise self._timed_out(op.name)
        header = Header(op, flags, Status.OK, request_id, deadline_ms, len(meta), payload_bytes)
        if not flags & Flag.NO_REPLY:
            self._owed_answers += 1
        self._send_all([memoryview(header.encode() + meta), *payload], deadline)
        return request_id

    def receive(self, request_id: int, op: Op, *, deadline: float, n_fds: int = 0) -> Answer:
        """The answer to exactly that request. Raises what its status says; then the connection stays usable."""
        raw = bytearray(HEADER_BYTES)
        fds = self._receive_with_fds(raw, deadline) if n_fds else ()
        if not n_fds:
            self.receive_into([memoryview(raw)], deadline)
        try:
            header = self._check_header(raw, request_id, op)
            meta = bytearray(header.meta_bytes)
            if header.meta_bytes:
                self.receive_into([memoryview(meta)], deadline)
            self._owed_answers -= 1
            self._owed_bytes = header.payload_bytes
            if header.status is not Status.OK:
                self._raise_status(header, bytes(meta))
            if len(fds) != n_fds:
                raise self._broken(f"{len(fds)} descriptors in an answer to {op.name}, {n_fds} expected")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return Answer(header, bytes(meta), fds)

    def receive_payload(self, buffers: Sequence[memoryview], n_bytes: int, deadline: float) -> None:
        """The next `n_bytes` of the answer's payload into non-empty `buffers` of that size together."""
        if n_bytes > self._owed_bytes:
            raise self._broken("payload is shorter than the entries say")
        self.receive_into(buffers, deadline)
        self._owed_bytes -= n_bytes

    def discard_payload(self, n_bytes: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(n_bytes, 256 << 10)))
        while n_bytes:
            piece = scratch[: min(n_bytes, len(scratch))]
            self.receive_payload([piece], len(piece), deadline)
            n_bytes -= len(piece)

    # --- bytes ---------------------------------------------------------------------------------------------------------------

    def receive_into(self, buffers: Sequence[memoryview], deadline: float) -> None:
        """Fills all buffers, in order."""
        views = [view for view in buffers if view.nbytes]
        at = 0
        while at < len(views):
            self._arm(socket.SO_RCVTIMEO, deadline)
            group = views[at : at + IOV_MAX]
            try:
                n = self._sock.recvmsg_into(group, 0, socket.MSG_WAITALL)[0]
            except OSError as error:
                raise self._failed(error) from error
            if n == 0:
                raise self._lost("closed the connection")
            while at < len(views) and n >= views[at].nbytes:
                n -= views[at].nbytes
                at += 1
            if n:
                views[at] = views[at][n:]

    def _send_all(self, buffers: list[memoryview], deadline: float) -> None:
        at, n_buffers = 0, len(buffers)
        while at < n_buffers:
            self._arm(socket.SO_SNDTIMEO, deadline)
            group, room = [], SEND_BYTES
            for view in buffers[at : at + IOV_MAX]:
                group.append(view[:room] if view.nbytes > room else view)
                room -= group[-1].nbytes
                if room <= 0:
                    break
            try:
                n = self._sock.sendmsg(group, (), socket.MSG_NOSIGNAL)
            except OSError as error:
                raise self._failed(error) from error
            while at < n_buffers and n >= buffers[at].nbytes:
                n -= buffers[at].nbytes
                at += 1
            if n:
                buffers[at] = buffers[at][n:]

    def _receive_with_fds(self, raw: bytearray, deadline: float) -> tuple[int, ...]:
        self._arm(socket.SO_RCVTIMEO, deadline)
        space = socket.CMSG_SPACE(FDS_MAX * _FD_BYTES)
        try:
            n, ancillary, flags, _ = self._sock.recvmsg_into([raw], space, socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise self._failed(error) from error
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
        try:
            if n == 0:
                raise self._lost("closed the connection")
            if flags & socket.MSG_CTRUNC:
                raise self._broken("more descriptors than asked for")
            self.receive_into([memoryview(raw)[n:]], deadline)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return tuple(fds)

    def _arm(self, option: int, deadline: float) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise self._timed_out("a call")
        micros = max(1000, int(remaining * 1e6))  # 0 would mean for ever
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000))
        except OSError as error:
            raise self._failed(error) from error

    # --- what went wrong -----------------------------------------------------------------------------------------------------

    def _check_header(self, raw: bytearray, request_id: int, op: Op) -> Header:
        if op is Op.HELLO and raw[:4] == MAGIC and raw[4] not in VERSIONS:
            self.close()
            raise VersionMismatch(f"worker at {self.peer} answers in frame version {raw[4]}; this side speaks {_versions()}")
        try:
            header = decode_header(raw)
        except FrameError as error:
            raise self._broken(str(error)) from error
        early = op is Op.HELLO and header.status is not Status.OK and header.request_id == 0  # refused unread
        if not header.flags & Flag.ANSWER or header.op is not op or (header.request_id != request_id and not early):
            raise self._broken(f"answer to {header.op.name} {header.request_id} where {op.name} {request_id} was due")
        if header.status is not Status.OK and header.payload_bytes:
            raise self._broken("payload in a refusal")
        if header.meta_bytes > MAX_META_BYTES:
            raise self._broken("meta too long")
        return header

    def _raise_status(self, header: Header, meta: bytes) -> None:
        reason = meta.decode("utf-8", "replace") or header.status.name.lower()
        if header.status is Status.UNAUTHENTICATED:
            raise Unauthenticated(f"worker at {self.peer}: {reason}")
        if header.status is Status.VERSION:
            raise VersionMismatch(f"worker at {self.peer}: {reason}; this side speaks frame version {_versions()}")
        raise LinkError(_CAUSES[header.status], f"worker at {self.peer}: {reason}")

    def _failed(self, error: OSError) -> LinkError:
        if isinstance(error, BlockingIOError):
            return self._timed_out("a call")
        return self._lost(os.strerror(error.errno) if error.errno else str(error))

    def _timed_out(self, what: str) -> LinkError:
        self.close()
        return LinkError(LinkCause.TIMEOUT, f"worker at {self.peer}: deadline passed in {what}")

    def _lost(self, what: str) -> LinkError:
        self.close()
        return LinkError(LinkCause.CLOSED, f"worker at {self.peer}: {what}")

    def _broken(self, what: str) -> LinkError:
        self.close()
        return LinkError(LinkCause.PROTOCOL, f"worker at {self.peer}: {what}")

    def protocol_error(self, what: str) -> LinkError:
        """Closes the connection; returns the error to raise. For callers that find nonsense in an answer's meta."""
        return self._broken(what)


def _versions() -> str:
    return ", ".join(map(str, VERSIONS))


def parse_address(address: str) -> tuple[str, int]:
    """'host:port' or '[v6]:port'. Raises InvalidArgument."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgument(f"address: {address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def open_tcp(address: str, options: LinkOptions, *, deadline: float) -> Connection:
    """Connects and greets. Raises LinkError, Unauthenticated, VersionMismatch; leaves nothing open then."""
    host, port = parse_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LinkError(LinkCause.REFUSED, f"worker at {address}: {error}") from error
    failure: LinkError | None = None
    for family, kind, proto, _, target in found:
        try:
            sock = _connect(family, kind, proto, target, peer=address, deadline=deadline)
        except LinkError as error:
            failure = error
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return greet(Connection(sock, peer=address), options, deadline=deadline)
    raise failure or LinkError(LinkCause.REFUSED, f"worker at {address}: no such address")


def open_unix(name: str, options: LinkOptions, *, deadline: float) -> Connection:
    """Connects to the abstract unix socket `name` (with or without its leading NUL) and greets. Errors as `open_tcp`."""
    name = name.lstrip("\0@")
    sock = _connect(socket.AF_UNIX, socket.SOCK_STREAM, 0, "\0" + name, peer=f"unix:@{name}", deadline=deadline)
    return greet(Connection(sock, peer=f"unix:@{name}"), options, deadline=deadline)


def _connect(family: int, kind: int, proto: int, target: Any, *, peer: str, deadline: float) -> socket.socket:
    seconds = min(CONNECT_SECONDS_MAX, deadline - time.monotonic())
    if seconds <= 0:
        raise LinkError(LinkCause.TIMEOUT, f"worker at {peer}: deadline passed before connecting")
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
    try:
        sock.settimeout(seconds)
        sock.connect(target)
        sock.settimeout(None)
    except (TimeoutError, BlockingIOError) as error:
        sock.close()
        raise LinkError(LinkCause.TIMEOUT, f"worker at {peer}: no connection within {seconds:.2f} s") from error
    except OSError as error:
        sock.close()
        raise LinkError(LinkCause.REFUSED, f"worker at {peer}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def greet(connection: Connection, options: LinkOptions, *, deadline: float) -> Connection:
    """HELLO. Closes the connection when it is not accepted."""
    hello = {"token": options.token, "client": options.client, "host_id": options.host_id, "versions": list(VERSIONS),
             "release": kvpool.__version__}  # fmt: skip
    meta = json.dumps(hello).encode()
    try:
        if len(meta) > MAX_HELLO_BYTES:
            raise InvalidArgument(f"token: with it a greeting has {len(meta)} bytes; the limit is {MAX_HELLO_BYTES}")
        answer = connection.hello(meta, deadline=deadline)
        try:
            greeting = json.loads(answer.meta)
            greeting["incarnation"] = int(greeting["incarnation"])
        except (ValueError, KeyError, TypeError) as error:
            raise connection.protocol_error(f"greeting makes no sense: {error}") from error
        if greeting.get("version", VERSIONS[-1]) not in VERSIONS:
            raise VersionMismatch(
                f"worker at {connection.peer} chose frame version {greeting['version']}; this side speaks {_versions()}"
            )
        if "release" in greeting:
            peer_name = f"worker at {connection.peer}"
            check_release(str(greeting["release"]), peer_name=peer_name, own=kvpool.__version__, own_name="side")
    except BaseException:
        connection.close()
        raise
    connection.greeting = greeting
    return connection
