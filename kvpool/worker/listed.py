"""Who waits until the master has a report: marks, acknowledgements, and a master that is away.

Owns the waiters alone. Marks and acknowledgements come from `core.session.Reporter`; who waits are answers of the data plane.
While the session is known to be down nobody waits: the blocks are stored and the answer says `unlisted` at once.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class Ticket:
    """One waiter. `call(listed)` is called at most once, by the thread that settles it; not at all after `give_up`."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[bool], None]) -> None:
        self.call: Callable[[bool], None] | None = call


class Listed:
    """Thread-safe; callbacks are called outside of its lock and must not block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[int, int, Ticket]] = []
        self._ids = itertools.count()
        self._acked = 0
        self._up = False

    @property
    def up(self) -> bool:
        """The session with a master is there and alive."""
        return self._up

    @property
    def n_waiting(self) -> int:
        return len(self._heap)

    def wait(self, mark: int, call: Callable[[bool], None]) -> Ticket | bool:
        """True: listed already; False: the master is away; else a ticket, and `call` will be called."""
        with self._lock:
            if mark <= self._acked:
                return True
            if not self._up:
                return False
            ticket = Ticket(call)
            heapq.heappush(self._heap, (mark, next(self._ids), ticket))
            return ticket

    def give_up(self, ticket: Ticket) -> bool:
        """The waiter's own time is up. False: it has been settled already and its call is on the way."""
        with self._lock:
            waiting, ticket.call = ticket.call is not None, None
            return waiting

    def on_ack(self, acked: int) -> None:
        """Everything up to this mark is in the master's index."""
        with self._lock:
            self._acked = max(self._acked, acked)
            settled = []
            while self._heap and (self._heap[0][0] <= self._acked or self._heap[0][2].call is None):
                ticket = heapq.heappop(self._heap)[2]
                if ticket.call is not None:
                    settled.append(ticket.call)
                    ticket.call = None
        for call in settled:
            call(True)

    def set_session(self, *, up: bool) -> None:
        """The session came, or went (or the master fell silent): those who wait are told at once."""
        with self._lock:
            self._up = up
            if up:
                return
            settled = [ticket.call for _, _, ticket in self._heap if ticket.call is not None]
            for _, _, ticket in self._heap:
                ticket.call = None
            self._heap = []
        for call in settled:
            call(False)
