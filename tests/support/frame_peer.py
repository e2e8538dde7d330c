"""A peer that speaks data-plane frames as it is told to: late, wrong, half, or not at all. For tests of links to bad workers."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable

from kvpool.core.frames import HEADER_BYTES, Flag, Header, Op, Status, decode_header

Script = Callable[["FramePeer", socket.socket, Header, bytes, bytes], None]


class FramePeer:
    """Listens on 127.0.0.1 (`address`), or on an abstract unix socket (`unix_name`); greets, then hands every request to
    `script(peer, socket, header, meta, payload)`."""

    def __init__(self, script: Script, *, hello: Script | None = None, unix: bool = False) -> None:
        self.incarnation = 77
        self.released = threading.Event()  # scripts that stall wait for it
        self.n_connections = 0
        self._script, self._hello = script, hello or FramePeer.greet
        self.address = self.unix_name = ""
        if unix:
            self.unix_name = f"kvpool-test-{os.getpid()}-{id(self):x}"
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind("\0" + self.unix_name)
            self._listener.listen()
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def greet(self, sock: socket.socket, header: Header, meta: bytes, payload: bytes) -> None:
        facts = {"worker": "w", "incarnation": self.incarnation, "host_id": "h", "version": 1, "unix": "", "transports": ["tcp"]}
        self.answer(sock, header, json.dumps(facts).encode())

    @staticmethod
    def answer(sock: socket.socket, header: Header, meta: bytes = b"", payload: bytes = b"", *, status: Status = Status.OK,
               request_id: int | None = None, fds: tuple[int, ...] = ()) -> None:  # fmt: skip
        request_id = header.request_id if request_id is None else request_id
        head = Header(header.op, Flag.ANSWER, status, request_id, 0, len(meta), len(payload)).encode()
        if fds:
            sent = sock.sendmsg([head + meta], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            assert sent == len(head + meta)
        else:
            sock.sendall(head + meta + payload)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.n_connections += 1
            self._sockets.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                while raw := _exactly(sock, HEADER_BYTES):
                    header = decode_header(raw)
                    meta, payload = _exactly(sock, header.meta_bytes), _exactly(sock, header.payload_bytes)
                    (self._hello if header.op is Op.HELLO else self._script)(self, sock, header, meta, payload)
        except OSError:
            pass

    def close(self) -> None:
        self.released.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()

    def __enter__(self) -> FramePeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _exactly(sock: socket.socket, n: int) -> bytes:
    raw = b""
    while len(raw) < n:
        piece = sock.recv(n - len(raw))
        if not piece:
            return b""
        raw += piece
    return raw
