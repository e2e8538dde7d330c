"""A small TCP relay between any two parties that delays, throttles, swallows or cuts on order."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from enum import Enum

CHUNK_BYTES = 65536
TICK_S = 0.02


class Mode(Enum):
    PASS = "pass"
    BLACKHOLE = "blackhole"  # accepts, passes nothing
    CUT = "cut"  # resets what is there and what comes


class TcpProxy:
    """Relays `address` to `target` ("host:port"). Modes may change at any time, from any thread; close() ends it."""

    def __init__(self, target: str, *, listen: str = "127.0.0.1:0") -> None:
        self.target = target
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.n_accepted = 0
        self.n_bytes = 0
        self._mode = Mode.PASS
        self._n_cuts = 0
        self._closed = threading.Event()
        self._wake = threading.Condition()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        host, _, port = listen.rpartition(":")
        self._listener = socket.create_server((host, int(port)))
        self._listener.settimeout(TICK_S)
        self._start(self._accept)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def pass_on(self, *, delay_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        """PROXY(pass), or with a delay a chunk, or throttled, in each direction."""
        self.delay_s, self.bytes_per_s = delay_s, bytes_per_s
        self._set(Mode.PASS)

    def blackhole(self) -> None:
        """PROXY(blackhole): connections stay and are accepted, nothing passes."""
        self._set(Mode.BLACKHOLE)

    def cut(self) -> None:
        """PROXY(cut): reset every connection now, and new ones at once."""
        self._n_cuts += 1
        self._set(Mode.CUT)

    def close(self) -> None:
        """End the relay and its threads."""
        self._closed.set()
        with self._wake:
            self._wake.notify_all()
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(timeout=10)
        self._listener.close()

    def _set(self, mode: Mode) -> None:
        with self._wake:
            self._mode = mode
            self._wake.notify_all()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self.n_accepted += 1
            if self._mode is Mode.CUT:
                _reset(near)
                continue
            self._start(self._serve, near)

    def _serve(self, near: socket.socket) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            far = socket.create_connection((host, int(port)), timeout=10)
        except OSError:
            _reset(near)
            return
        n_cuts = self._n_cuts
        pair = (near, far)
        with self._wake:
            self._sockets.update(pair)
        back = threading.Thread(target=self._pump, args=(far, near, n_cuts), name="proxy", daemon=True)
        back.start()
        self._pump(near, far, n_cuts)
        back.join()
        with self._wake:
            self._sockets.difference_update(pair)
        for sock in pair:
            if self._n_cuts != n_cuts:
                _reset(sock)
            sock.close()

    def _over(self, n_cuts: int) -> bool:
        return self._closed.is_set() or self._n_cuts != n_cuts

    def _pump(self, source: socket.socket, sink: socket.socket, n_cuts: int) -> None:
        try:
            while not self._over(n_cuts):
                if not select.select([source], [], [], TICK_S)[0]:
                    continue
                with self._wake:
                    self._wake.wait_for(lambda: self._mode is not Mode.BLACKHOLE or self._over(n_cuts))
                if self._over(n_cuts):
                    return
                data = source.recv(CHUNK_BYTES)
                if not data:
                    break
                if self.delay_s:
                    self._closed.wait(self.delay_s)
                if self.bytes_per_s:
                    self._closed.wait(len(data) / self.bytes_per_s)
                self.n_bytes += len(data)
                self._send(sink, data, n_cuts)
        except (OSError, ValueError):
            pass
        if self._over(n_cuts):
            return
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _send(self, sink: socket.socket, data: bytes, n_cuts: int) -> None:
        view = memoryview(data)
        while view and not self._over(n_cuts):
            if select.select([], [sink], [], TICK_S)[1]:
                view = view[sink.send(view, socket.MSG_DONTWAIT) :]


def _reset(sock: socket.socket) -> None:
    """Close with RST instead of FIN."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now, none that the system gives away, none that a test beside this one has: who
    has it may end and come again. (Nor is the one 10,000 above it, where a Redis of a cluster listens too.)"""
    for port in itertools.islice(_PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("100 ports are taken")


def _ports_of_this_process() -> Iterator[int]:
    """In no order and each once in a round: those of this one among the processes that run tests at the same time."""
    n_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list(range(10_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), 20_000, n_processes))
    random.SystemRandom().shuffle(ports)
    return itertools.cycle(ports)


_PORTS = _ports_of_this_process()
