"""A circuit breaker, pure: times come in as seconds of any monotonic clock.

CLOSED lets all through. Failures in a row, or one that is beyond doubt, open it. OPEN lets none through; after its time a good
probe makes it HALF_OPEN, which lets one request at a time through: its success closes it, its failure opens it for twice as long.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    def __init__(self, *, failures_max: int, open_s: float, open_max_s: float) -> None:
        self._failures_max, self._open_s, self._open_max_s = failures_max, open_s, open_max_s
        self.state = State.CLOSED
        self._failures = 0
        self._next_open_s = open_s
        self._open_until_s = 0.0
        self._trial = False
        self.gone = False  # when it failed last, nobody listened there

    def admits(self) -> bool:
        """Whether a request may go now. Changes nothing: `begin` claims."""
        return self.state is State.CLOSED or (self.state is State.HALF_OPEN and not self._trial)

    def begin(self) -> None:
        """A request goes; it ends with exactly one of `succeeded`, `failed`, `abandoned`."""
        if self.state is State.HALF_OPEN:
            self._trial = True

    def succeeded(self) -> None:
        """A request was answered. One that began before the breaker opened does not close it."""
        self._failures, self.gone = 0, False
        if self.state is State.HALF_OPEN:
            self.state, self._trial, self._next_open_s = State.CLOSED, False, self._open_s

    def abandoned(self) -> None:
        """It ended without saying anything about the node: the client left, or the request itself was wrong."""
        self._trial = False

    def failed(self, now_s: float, *, beyond_doubt: bool) -> bool:
        """`beyond_doubt`: nobody listens there. Returns whether this opened it."""
        self._failures += 1
        self.gone = beyond_doubt
        if self.state is State.OPEN:
            return False
        if self.state is State.CLOSED and not beyond_doubt and self._failures < self._failures_max:
            return False
        self.state, self._trial = State.OPEN, False
        self._open_until_s = now_s + self._next_open_s
        self._next_open_s = min(self._next_open_s * 2, self._open_max_s)
        return True

    def probed(self, now_s: float) -> None:
        """The node's health check just succeeded."""
        self.gone = False
        if self.state is State.OPEN and now_s >= self._open_until_s:
            self.state, self._trial, self._failures = State.HALF_OPEN, False, 0
