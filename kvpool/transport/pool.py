"""Connections of one link: which a call gets, how many there may be, what becomes of them afterwards.

Owns no bytes and no calls (`connection`, `link`). Thread-safe.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from kvpool.transport.base import LinkCause, LinkError
from kvpool.transport.connection import Connection

CONNECTIONS_MAX: Final = 64  # of one link: callers beyond wait for one, within their deadline


class Pool:
    """`open_connection(deadline)` makes a greeted connection, or raises."""

    def __init__(self, open_connection: Callable[[float], Connection], *, peer: str) -> None:
        self._open = open_connection
        self._peer = peer
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._n_opening = 0
        self._closed = False
        self._changed = threading.Condition()
        self.connects = 0

    @contextlib.contextmanager
    def lease(self, deadline: float, *, with_ring: bool = False) -> Iterator[Connection]:
        """A connection for one call. Afterwards it is kept when it owes nothing, else closed."""
        connection = self.take(deadline, with_ring=with_ring)
        try:
            yield connection
        except BaseException:
            self.give(connection)
            raise
        self.give(connection)

    def take(self, deadline: float, *, with_ring: bool = False) -> Connection:
        """An idle connection that its peer has not closed (`with_ring`: one that has a ring, where there is one), or a new
        one. Must be given back. Raises LinkError."""
        while True:
            with self._changed:
                connection = self._pick(deadline, with_ring)
                if connection is None:
                    self._n_opening += 1
            if connection is None:
                return self._open_new(deadline)
            if connection.still_quiet():
                return connection
            connection.close()
            self.give(connection)

    def give(self, connection: Connection) -> None:
        with self._changed:
            self._busy.discard(connection)
            keep = connection.clean and not self._closed
            if keep:
                self._idle.append(connection)
            self._changed.notify()
        if not keep:
            connection.close()

    def add(self, connection: Connection) -> None:
        """Takes over one that was opened elsewhere, as idle."""
        with self._changed:
            self.connects += 1
            self._idle.append(connection)

    def close(self) -> None:
        """Idle connections are closed, calls under way fail at once. Idempotent."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.shutdown()
            self._changed.notify_all()
        for connection in idle:
            connection.close()

    def abandon(self) -> None:
        """In a forked child: closes this process' copies of the sockets and says nothing to the peer."""
        for connection in [*self._idle, *self._busy]:
            connection.close()

    def _pick(self, deadline: float, with_ring: bool) -> Connection | None:
        """Under the lock. None: there is room for a new one."""
        while not self._closed:
            if self._idle:
                at = len(self._idle) - 1
                if with_ring:
                    at = next((i for i in range(at, -1, -1) if self._idle[i].ring is not None), at)
                connection = self._idle.pop(at)
                self._busy.add(connection)
                return connection
            if len(self._busy) + self._n_opening < CONNECTIONS_MAX:
                return None
            if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                raise LinkError(
                    LinkCause.TIMEOUT, f"worker at {self._peer}: {CONNECTIONS_MAX} connections, all in use until the deadline"
                )
        raise LinkError(LinkCause.CLOSED, f"worker at {self._peer}: the link is closed")

    def _open_new(self, deadline: float) -> Connection:
        try:
            connection = self._open(deadline)
        except BaseException:
            with self._changed:
                self._n_opening -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._n_opening -= 1
            self.connects += 1
            closed = self._closed
            if not closed:
                self._busy.add(connection)
        if closed:
            connection.close()
            raise LinkError(LinkCause.CLOSED, f"worker at {self._peer}: the link is closed")
        return connection
