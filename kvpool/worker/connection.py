"""One client's connection to the data plane: bytes in, bytes out, one request at a time, nothing that blocks.

Owns: the socket, where the frame under way is, the answer under way, the time by which something must have happened
(`due`). Does not own: what a request means (`ops` and the paths), which sockets are ready (`dataplane`).

    HELLO_ONLY ──header──▶ meta ──▶ handler ──▶ body (straight into slots) ──▶ answer ──▶ next header
                                       └─ WORKING: parked, in the pool, or waiting to be listed; the socket is not read

Everything here runs on the connection's loop thread. A handler that works elsewhere comes back with `loop.post`.
"""

from __future__ import annotations

import array
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

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

if TYPE_CHECKING:
    from kvpool.worker.dataplane import Loop
    from kvpool.worker.reserve_path import Reservation
    from kvpool.worker.ring import Ring

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 5.0  # a connection that has not said who it is by then is closed
SEND_GRACE_S: Final = 2.0  # an answer may be on its way this long past the caller's deadline
RESERVATION_IDLE_S: Final = 60.0  # one with unfinished reservations that sends nothing for so long is closed: they hold slots
IOV_MAX: Final = 1024  # the kernel's limit of buffers in one call
TURN_BYTES_MAX: Final = 16 << 20  # what one connection may move before the others of its loop get their turn
NEVER: Final = float("inf")
_VERSION_AT: Final = 4  # of the version byte in the header
_UNTIMED: Final = frozenset({Op.HELLO, Op.PING, Op.RELEASE, Op.ABORT})  # must run however late they are


class State(Enum):
    HEADER = "header"
    META = "meta"
    BODY = "body"
    WORKING = "working"
    SENDING = "sending"
    CLOSED = "closed"


@dataclass(slots=True)
class Request:
    """A request whose meta has arrived. `deadline` is on the monotonic clock."""

    header: Header
    meta: memoryview
    deadline: float


class Work(Protocol):
    """What a handler keeps while its request is under way."""

    def on_close(self) -> None:
        """The connection is gone: give back everything. Called at most once, on the loop thread."""
        ...


class Connection:
    """See the module. `owner` is this connection's number in the hold table; unique in the process."""

    def __init__(self, loop: Loop, sock: socket.socket, *, owner: int, local: bool, over_limit: bool, now: float) -> None:
        self.loop = loop
        self.sock = sock
        self.fd = sock.fileno()
        self.owner = owner
        self.local = local
        self.greeted = False
        self.state = State.HEADER
        self.due = now + HELLO_TIMEOUT_S
        self.ring: Ring | None = None
        self.reservations: dict[int, Reservation] = {}
        self.next_reservation = 1
        self.over_limit = over_limit
        self.work: Work | None = None
        self.has_holds = False
        self.close_after_answer = False
        self._header = bytearray(HEADER_BYTES)
        self._header_view = memoryview(self._header)
        self._got = 0
        self._request: Request | None = None
        self._in: list[memoryview] = []
        self._in_at = 0
        self._in_done: Callable[[], None] | None = None
        self._in_progress: Callable[[int], None] | None = None
        self._body_left = 0
        self._out: list[bytes | memoryview] = []
        self._out_at = 0
        self._out_fds: list[int] | None = None
        self._sent: Callable[[], None] | None = None

    # --- events of the loop ---------------------------------------------------------------------------------------------

    def on_readable(self) -> None:
        """The socket has bytes, or its end."""
        if self.state is State.WORKING or self.state is State.SENDING:
            self.loop.pause_reading(self)  # a client that sends ahead of its answer waits; its hang-up is still seen
            return
        try:
            if self.state is State.HEADER and not self._receive_header():
                return
            if self.state is State.META and not self._receive_meta():
                return
            if self.state is State.BODY:
                self._receive_body()
        except BlockingIOError:
            return
        except FrameError as error:
            self.loop.count("malformed")
            log.debug("event=malformed_frame error=%r", str(error))
            self.close("malformed")
        except OSError:
            self.close("reset")
        except Exception:
            self.loop.count("internal_errors")
            log.exception("event=request_failed then=connection_closed")
            self.close("internal")

    def on_writable(self) -> None:
        if self.state is State.SENDING:
            try:
                self._flush()
            except OSError:
                self.close("reset")

    def on_hangup(self) -> None:
        """The peer is gone (both directions, or it stopped sending)."""
        if self.state in (State.HEADER, State.META, State.BODY):
            self.on_readable()  # what it sent before it went still counts; the end of the stream closes
        else:
            self.close("hangup")

    def close(self, cause: str) -> None:
        """Idempotent. Gives back the running request, unfinished reservations, the ring, and the holds of this connection."""
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        self.loop.forget(self, cause)
        self.sock.close()
        self._out = []
        self._in = []
        if self._out_fds is not None:
            self._out_fds = None
        sent, self._sent = self._sent, None
        if sent is not None:
            sent()
        work, self.work = self.work, None
        if work is not None:
            work.on_close()
        self.loop.plane.connection_closed(self)

    # --- receiving ------------------------------------------------------------------------------------------------------

    def _receive_header(self) -> bool:
        n = self.sock.recv_into(self._header_view[self._got :])
        if n == 0:
            if self._got:
                self.loop.count("truncated")
            self.close("eof")
            return False
        if self._got == 0 and self.greeted:
            self.due = self.loop.now() + self.loop.plane.body_timeout_s
        self._got += n
        if self._got < HEADER_BYTES:
            return False
        self._got = 0
        if self._header[_VERSION_AT] not in VERSIONS and self._header[:4] == MAGIC:
            self._refuse_version(self._header[_VERSION_AT])
            return False
        header = decode_header(self._header, meta_bytes_max=MAX_META_BYTES if self.greeted else MAX_HELLO_BYTES)
        if header.flags & Flag.ANSWER or header.status is not Status.OK:
            raise FrameError("an answer where a request is due")
        if not self.greeted and (header.op is not Op.HELLO or header.payload_bytes):
            raise FrameError(f"{header.op.name} before HELLO")
        now = self.loop.now()
        self._request = Request(header, memoryview(bytearray(header.meta_bytes)), now + header.deadline_ms / 1000)
        self.state = State.META
        return True

    def _receive_meta(self) -> bool:
        request = self._request
        assert request is not None
        want = request.header.meta_bytes
        if self._got < want:
            n = self.sock.recv_into(request.meta[self._got :])
            if n == 0:
                self.loop.count("truncated")
                self.close("eof")
                return False
            self._got += n
            if self._got < want:
                return False
        self._got = 0
        self._body_left = request.header.payload_bytes
        self.state = State.WORKING
        self.due = NEVER
        self._dispatch(request)
        return self.state is State.BODY

    def _dispatch(self, request: Request) -> None:
        header = request.header
        self.loop.count_op(header.op)
        if request.deadline <= self.loop.now() and header.op not in _UNTIMED:
            self.loop.count("expired")
            self.refuse(request, Status.DEADLINE, "the deadline had passed when the request was read")
            return
        self.loop.plane.handle(self, request)

    def receive(
        self,
        request: Request,
        views: list[memoryview],
        done: Callable[[], None],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Fill `views` with the request's payload, then `done()`. `progress(total)` after each piece. Must be given all of it."""
        self._in, self._in_at = views, 0
        self._in_done, self._in_progress = done, progress
        if self._body_left == 0:
            done()
            return
        self.state = State.BODY
        self.due = min(request.deadline + SEND_GRACE_S, self.loop.now() + self.loop.plane.body_timeout_s)
        self.loop.resume_reading(self)

    def _receive_body(self) -> None:
        turn = 0
        request = self._request
        assert request is not None
        total = request.header.payload_bytes
        while self._body_left:
            views, at = self._in, self._in_at
            if at + 1 == len(views):
                n = self.sock.recv_into(views[at])
            else:
                n = self.sock.recvmsg_into(views[at : at + IOV_MAX])[0]
            if n == 0:
                self.loop.count("truncated")
                self.close("eof")
                return
            self._body_left -= n
            turn += n
            self._in_at = _advance(views, at, n)
            if self._in_progress is not None:
                self._in_progress(total - self._body_left)
            if turn >= TURN_BYTES_MAX and self._body_left:
                return
        self.state = State.WORKING
        self.due = NEVER
        done, self._in_done, self._in, self._in_progress = self._in_done, None, [], None
        assert done is not None
        done()

    # --- sending --------------------------------------------------------------------------------------------------------

    def answer(
        self,
        request: Request,
        meta: bytes = b"",
        *,
        status: Status = Status.OK,
        payload: Sequence[memoryview] = (),
        payload_bytes: int = 0,
        fds: list[int] | None = None,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Send the answer; then (or when the connection is lost meanwhile) `sent()`, once, and the next request is read."""
        assert self.state is State.WORKING, self.state
        header = request.header
        head = Header(header.op, Flag.ANSWER, status, header.request_id, 0, len(meta), payload_bytes).encode()
        self._out = [head + meta, *payload]
        self._out_at = 0
        self._out_fds = fds
        self._sent = sent
        self.work = None
        self.state = State.SENDING
        self.due = self.loop.now() + self.loop.plane.body_timeout_s
        if header.op not in _UNTIMED:
            self.due = min(self.due, max(request.deadline, self.loop.now()) + SEND_GRACE_S)
        try:
            self._flush()
        except OSError:
            self.close("reset")

    def no_answer(self) -> None:
        """The request asked for none; the next one is read."""
        self._next()

    def refuse(self, request: Request, status: Status, reason: str) -> None:
        """Answer with an error after the rest of the payload was thrown away."""
        self.discard(request, lambda: self.answer(request, reason.encode()[:MAX_HELLO_BYTES], status=status))

    def discard(self, request: Request, done: Callable[[], None]) -> None:
        """Throw away what is left of the payload, then `done()`."""
        self.receive(request, self.loop.waste(self._body_left), done)

    def _refuse_version(self, version: int) -> None:
        self.loop.count("version_refused")
        reason = f"frame version {version} is not spoken here; this side speaks {', '.join(map(str, VERSIONS))}".encode()
        head = Header(Op.HELLO, Flag.ANSWER, Status.VERSION, 0, 0, len(reason)).encode()
        try:
            self.sock.send(head + reason)
        finally:
            self.close("version")

    def _flush(self) -> None:
        turn = 0
        while self._out_at < len(self._out):
            whole = not self._out_at and len(self._out) <= IOV_MAX
            pieces = self._out if whole else self._out[self._out_at : self._out_at + IOV_MAX]
            try:
                if self._out_fds is not None:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._out_fds))]
                    n = self.sock.sendmsg(pieces, rights)
                    self._out_fds = None
                else:
                    n = self.sock.sendmsg(pieces)
            except BlockingIOError:
                self.loop.count("bytes_out", turn)
                self.loop.want_write(self)
                return
            turn += n
            self._out_at = _advance(self._out, self._out_at, n)
            if turn >= TURN_BYTES_MAX and self._out_at < len(self._out):
                self.loop.count("bytes_out", turn)
                self.loop.want_write(self)
                return
        self._out = []
        pieces = []  # the memory behind them is given back now
        sent, self._sent = self._sent, None
        self.loop.count("bytes_out", turn)
        if sent is not None:
            sent()
        if self.close_after_answer:
            self.close("refused")
        else:
            self._next()

    def _next(self) -> None:
        if self.state is State.CLOSED:
            return
        self.state = State.HEADER
        self.work = None
        self._request = None
        idle_s = self.loop.plane.idle_timeout_s if self.greeted else HELLO_TIMEOUT_S
        self.due = self.loop.now() + (min(idle_s, RESERVATION_IDLE_S) if self.reservations else idle_s)
        if self.loop.plane.stopping:
            self.close("stopping")
            return
        self.loop.resume_reading(self)


def _advance(pieces: list[Any], at: int, n: int) -> int:
    """n bytes of pieces[at:] are done: cuts the piece that is half done, returns the index of the first that is not."""
    while n:
        size = len(pieces[at])
        if n < size:
            pieces[at] = memoryview(pieces[at])[n:]
            break
        n -= size
        at += 1
    return at
