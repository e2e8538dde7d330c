"""The worker's data plane: listeners and a few epoll loops that move bytes between sockets and slots.

Owns: listening sockets (TCP, and an abstract unix socket for processes of this host), the loops, the limits on connections and
time. Does not own: framing of one connection (`connection`), what requests do (`ops`, `read_path`, `write_path`), blocks
(`node`). Nothing here waits for a disk, a lock held during I/O, or a peer: a slow peer costs a socket and its buffers.

Limits, all in force before anything is allocated: `connections_max` (one more is told BUSY and closed), HELLO within 5 s, a
header and a body within `body_timeout`, an idle connection `idle_timeout`, an answer within the caller's deadline and 2 s.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvpool.core.frames import Op
from kvpool.errors import ConfigError
from kvpool.quantities import join_address
from kvpool.worker import ops
from kvpool.worker.connection import NEVER, Connection, Request, State
from kvpool.worker.ring import RingBudget

if TYPE_CHECKING:
    from kvpool.config import WorkerSettings
    from kvpool.worker.node import Node
    from kvpool.worker.spread import Spreader

log = logging.getLogger(__name__)

WASTE_BYTES: Final = 1 << 20  # one buffer a loop, into which unwanted payload goes
SOCKET_BUFFER_BYTES: Final = 4 << 20
TOLD_BUSY_MAX: Final = 64  # connections past the limit that are told so at once; more are closed without a word
BACKLOG: Final = 1024
SWEEP_S: Final = 0.25  # how often overdue connections are looked for
_READ: Final = select.EPOLLIN | select.EPOLLRDHUP
_QUIET: Final = select.EPOLLRDHUP
_WRITE: Final = select.EPOLLOUT | select.EPOLLRDHUP
_GONE: Final = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
_ACCEPTS_A_TURN: Final = 64


class Timer:
    """A call that is due later; `cancel` may be called any number of times, on its loop's thread."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Loop(threading.Thread):
    """One epoll loop. `post` may be called from any thread, the rest from its own."""

    def __init__(self, plane: DataPlane, *, index: int) -> None:
        super().__init__(name=f"kvpool-loop-{index}", daemon=True)
        self.plane = plane
        self.connections: dict[int, Connection] = {}
        self.counters: Counter[str] = Counter()
        self._epoll = select.epoll()
        self._masks: dict[int, int] = {}
        self._listeners: dict[int, tuple[socket.socket, bool]] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._posted: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_ids = itertools.count()
        self._waste = memoryview(bytearray(WASTE_BYTES))
        self._ended = False
        self._epoll.register(self._wake, select.EPOLLIN)

    now = staticmethod(time.monotonic)

    # --- from any thread ------------------------------------------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on this loop soon."""
        self._posted.append(call)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(OSError):  # the loop has ended and its eventfd is closed
                os.eventfd_write(self._wake, 1)

    # --- from its own thread --------------------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (when, next(self._timer_ids), timer))
        return timer

    def count(self, what: str, n: int = 1) -> None:
        self.counters[what] += n

    def count_op(self, op: Op) -> None:
        self.counters[f"op_{op.name.lower()}"] += 1

    def waste(self, n_bytes: int) -> list[memoryview]:
        """Views to receive n unwanted bytes into."""
        whole, rest = divmod(n_bytes, WASTE_BYTES)
        return [self._waste] * whole + ([self._waste[:rest]] if rest else [])

    def listen(self, sock: socket.socket, *, local: bool) -> None:
        self._listeners[sock.fileno()] = (sock, local)
        self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLEXCLUSIVE)

    def unlisten(self) -> None:
        for fd in self._listeners:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
        self._listeners = {}

    def pause_reading(self, connection: Connection) -> None:
        self._set_mask(connection, _QUIET | (self._masks[connection.fd] & select.EPOLLOUT))

    def resume_reading(self, connection: Connection) -> None:
        self._set_mask(connection, _READ)

    def want_write(self, connection: Connection) -> None:
        self._set_mask(connection, _WRITE)

    def forget(self, connection: Connection, cause: str) -> None:
        if self.connections.pop(connection.fd, None) is not None:
            self.count(f"closed_{cause}")
            self._masks.pop(connection.fd, None)
            with contextlib.suppress(OSError):
                self._epoll.unregister(connection.fd)

    def run(self) -> None:
        sweep_at = self.now() + SWEEP_S
        while not self._ended:
            until = min(sweep_at, self._timers[0][0] if self._timers else NEVER)
            events = self._epoll.poll(max(0.0, until - self.now()), 256)
            for fd, event in events:
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                    self._woken = False  # after the read, or it would eat a later wake; before the queue is emptied
                elif (connection := self.connections.get(fd)) is not None:
                    self._serve(connection, event)
                elif fd in self._listeners:
                    self._accept(*self._listeners[fd])
            for _ in range(len(self._posted)):
                self._guard(self._posted.popleft())
            now = self.now()
            while self._timers and self._timers[0][0] <= now:
                timer = heapq.heappop(self._timers)[2]
                if timer.call is not None:
                    self._guard(timer.call)
            if now >= sweep_at:
                sweep_at = now + SWEEP_S
                self._sweep(now)
        for connection in list(self.connections.values()):
            connection.close("stopping")
        while self._posted:
            self._guard(self._posted.popleft())
        self._epoll.close()
        os.close(self._wake)

    def end(self) -> None:
        self._ended = True

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self.count("internal_errors")
            log.exception("event=plane_step_failed")

    def _serve(self, connection: Connection, event: int) -> None:
        if event & select.EPOLLIN and not event & (select.EPOLLHUP | select.EPOLLERR):
            connection.on_readable()
        if event & select.EPOLLOUT:
            connection.on_writable()
        if event & _GONE and connection.state is not State.CLOSED:
            connection.on_hangup()

    def _sweep(self, now: float) -> None:
        for connection in [c for c in self.connections.values() if c.due <= now]:
            what = "idle" if connection.state is State.HEADER and connection.greeted else f"slow_{connection.state.value}"
            connection.close(what)

    def _accept(self, listener: socket.socket, local: bool) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors, or the peer left in between
                self.count("accept_failed")
                log.warning("event=accept_failed error=%r", str(error))
                return
            sock.setblocking(False)
            admitted = self.plane.admit()
            if admitted is None:
                self.count("refused_busy")
                sock.close()
                continue
            _tune(sock, local=local)
            self.count("accepted")
            owner = self.plane.next_owner()
            connection = Connection(self, sock, owner=owner, local=local, over_limit=not admitted, now=self.now())
            self.connections[connection.fd] = connection
            self._masks[connection.fd] = _READ
            self._epoll.register(connection.fd, _READ)

    def _set_mask(self, connection: Connection, mask: int) -> None:
        fd = connection.fd
        if self._masks.get(fd, mask) != mask:
            self._masks[fd] = mask
            self._epoll.modify(fd, mask)


class DataPlane:
    """Listeners and loops of one worker. Created and stopped on the main thread.

    `start` binds (ConfigError naming `port` when it is taken) and serves; `address` and `unix_name` are known then.
    `drain` stops accepting, lets running requests finish, and returns when all are gone or the time is up; `stop` ends the loops.
    """

    def __init__(self, node: Node, settings: WorkerSettings, *, token: bytes, n_loops: int = 2) -> None:
        self.node = node
        self.token = token
        self.connections_max = settings.connections_max
        self.idle_timeout_s = settings.idle_timeout_ms / 1000
        self.body_timeout_s = settings.body_timeout_ms / 1000
        self.ring_bytes_max = settings.ring_bytes
        self.hold_ttl_ms_max = settings.hold_ttl_ms_max
        self.stopping = False
        self.spreader: Spreader | None = None  # makes the copies that COPY asks for
        self.rings = RingBudget(settings.ring_total_bytes)
        self.address = ""
        self.unix_name = ""
        self._settings = settings
        self._loops = [Loop(self, index=i) for i in range(n_loops)]
        self._listeners: list[socket.socket] = []
        self._owners = itertools.count(1)
        self._by_owner: dict[int, Connection] = {}
        self._n_open = 0
        self._lock = threading.Lock()  # of `_n_open` and `_by_owner` alone

    def start(self) -> None:
        settings = self._settings
        try:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            tcp = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG, reuse_port=False)
        except OSError as error:
            raise ConfigError(
                f"port: cannot listen on {settings.host}:{settings.port} ({error.strerror}); "
                "another process has it, or the address is not of this machine; 0 takes a free one"
            ) from error
        port = tcp.getsockname()[1]
        self.address = join_address(settings.advertise or settings.host, port)
        self.unix_name = f"kvpool-{self.node.incarnation:016x}"
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind("\0" + self.unix_name)
        unix.listen(BACKLOG)
        for sock, local in ((tcp, False), (unix, True)):
            sock.setblocking(False)
            self._listeners.append(sock)
            for loop in self._loops:
                loop.listen(sock, local=local)
        for loop in self._loops:
            loop.start()
        self.node.on_drop_owners(self.drop_owners)

    def drain(self, timeout_s: float, *, cut: threading.Event | None = None) -> int:
        """No new connections; those at rest are closed, running requests finish. Returns how many were left when the time was up,
        or `cut` was set. Blocks."""
        self.stopping = True
        until = time.monotonic() + timeout_s
        for loop in self._loops:
            loop.post(loop.unlisten)
            loop.post(lambda loop=loop: self._close_resting(loop))  # type: ignore[misc]
        while (left := self.n_connections) and time.monotonic() < until and not (cut is not None and cut.is_set()):
            time.sleep(0.01)
        return left

    def stop(self) -> None:
        """Close all that is left and end the loops. Idempotent."""
        self.stopping = True
        for loop in self._loops:
            loop.post(loop.end)
        for loop in self._loops:
            if loop.is_alive():
                loop.join(5)
        for sock in self._listeners:
            sock.close()
        self._listeners = []

    def handle(self, connection: Connection, request: Request) -> None:
        """One request with its meta; on the connection's loop."""
        ops.handle(self, connection, request)

    # --- counts and limits; any thread ----------------------------------------------------------------------------------

    @property
    def n_connections(self) -> int:
        return self._n_open

    def counters(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for loop in self._loops:
            total.update(dict(loop.counters))
        return total

    def admit(self) -> bool | None:
        """May one more connection come in? False: only to be told that it may not; None: not even that."""
        with self._lock:
            if self._n_open >= self.connections_max + TOLD_BUSY_MAX or self.stopping:
                return None
            self._n_open += 1
            return self._n_open <= self.connections_max

    def next_owner(self) -> int:
        return next(self._owners)

    def connection_greeted(self, connection: Connection) -> None:
        with self._lock:
            self._by_owner[connection.owner] = connection

    def connection_closed(self, connection: Connection) -> None:
        """Called once by every connection that ends, on its loop."""
        with self._lock:
            self._n_open -= 1
            self._by_owner.pop(connection.owner, None)
        ops.give_back(self, connection)

    def drop_owners(self, owners: list[int]) -> None:
        """Connections whose overdue views are past the quarantine cap. Any thread."""
        with self._lock:
            found = [c for owner in owners if (c := self._by_owner.get(owner)) is not None]
        for connection in found:
            connection.loop.post(lambda c=connection: c.close("overdue_view"))  # type: ignore[misc]

    def _close_resting(self, loop: Loop) -> None:
        for connection in list(loop.connections.values()):
            if connection.state is State.HEADER:
                connection.close("stopping")


def _tune(sock: socket.socket, *, local: bool) -> None:
    if not local:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return  # the kernel sizes TCP buffers itself, and larger than a fixed wish may be
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
