"""The client's side of the master's service: one channel an address, deadlines, and not waiting for a master that is away.

Two kinds of calls. `call` is for what only the master can do (namespaces, remove): it waits for a connection until the deadline
and raises. `begin` is for the hot path (locate, place): it goes out at once, is not made at all while the master is known to be
away, and its answer may be collected later.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Final

import grpc

from kvpool.client.peers import COUNTED_TIMEOUT_MS
from kvpool.core.fetch import CALL_MS, PROBE_MS, Breaker
from kvpool.core.types import MissCause
from kvpool.errors import (
    InvalidArgument,
    MasterUnavailable,
    NamespaceNotFound,
    PermissionDenied,
    Unauthenticated,
    VersionMismatch,
)
from kvpool.transport.rpc import error_of, open_channel
from kvpool.v1 import master_pb2_grpc as service

ADDRESSES_MAX: Final = 16
TO_BE_TOLD: Final = (NamespaceNotFound, Unauthenticated, PermissionDenied, InvalidArgument, VersionMismatch)
AWAY_MS: Final = (200, 1000)  # for how long a master that did not answer is not asked by those who do not need it
CLOSED: Final = "client: it is closed"


class Pending:
    """An answer of the master that is on its way. Used by one thread."""

    __slots__ = ("_counts", "_future", "_master", "_until")

    def __init__(self, master: MasterLink, future: Any, until: float, *, counts: bool) -> None:
        self._master, self._future, self._until, self._counts = master, future, until, counts

    def result(self) -> Any:
        """The answer, or None when the master did not give one in time, or could not (it is then held to be away for a while).
        Raises what the caller must know: a namespace that is gone, a token that is not good (any more), a bad argument."""
        try:
            # the call has its own timeout; this one is for a gRPC that does not keep it
            answer = self._future.result(timeout=max(self._until - time.monotonic(), 0) + 0.05)
        except (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError) as error:
            self._future.cancel()
            found = error_of(error) if isinstance(error, grpc.RpcError) else MasterUnavailable("no answer from the master")
            if isinstance(found, TO_BE_TOLD):
                raise found from error
            if self._counts:
                self._master.went_away()
            return None
        self._master.is_there()
        return answer

    def cancel(self) -> None:
        self._future.cancel()


class MasterLink:
    """Calls to the master. Thread-safe. With several addresses the next one is taken when one cannot be reached."""

    def __init__(self, addresses: str, *, token: str) -> None:
        self.addresses = [part.strip() for part in addresses.split(",") if part.strip()]
        if not 1 <= len(self.addresses) <= ADDRESSES_MAX:
            raise InvalidArgument(f"master: {len(self.addresses)} addresses in {addresses!r}; allowed are 1..{ADDRESSES_MAX}")
        self._token = token
        self._lock = threading.Lock()
        self._breaker = Breaker(failures_max=1, open_ms_min=AWAY_MS[0], open_ms_max=AWAY_MS[1])
        self._turn = 0
        self._channel: Any = None
        self._stub: Any = None
        self._closed = False

    @property
    def stub(self) -> Any:
        """The service's stub on the current channel."""
        with self._lock:
            if self._closed:
                raise InvalidArgument(CLOSED)
            if self._stub is None:
                self._channel = open_channel(self.addresses[self._turn % len(self.addresses)], self._token)
                self._stub = service.MasterStub(self._channel)  # type: ignore[no-untyped-call]
            return self._stub

    def call(self, method: str, request: Any, *, deadline: float) -> Any:
        """The answer to `method`. MasterUnavailable when there is none by the deadline (a point of time.monotonic()); what the
        master says otherwise as its kvpool error."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise MasterUnavailable(f"no answer from the master at {', '.join(self.addresses)} within the deadline")
            timeout = left if len(self.addresses) == 1 else min(left, CALL_MS / 1e3)
            stub = self.stub
            try:
                answer = getattr(stub, method)(request, timeout=timeout, wait_for_ready=True)
            except grpc.RpcError as error:
                found = error_of(error, address=", ".join(self.addresses))
                if not isinstance(found, MasterUnavailable):
                    self._raise_closed(error)
                    raise found from error
                self.went_away()
                self.next_address(stub)
                if len(self.addresses) == 1 and time.monotonic() >= deadline - 0.01:
                    raise found from error
                if not _was_waiting(error):
                    time.sleep(min(0.02, max(deadline - time.monotonic(), 0)))
            except ValueError as error:  # the channel was closed under the call
                self._raise_closed(error)
                raise
            else:
                self.is_there()
                return answer

    def _raise_closed(self, error: Exception) -> None:
        if self._closed:
            raise InvalidArgument(CLOSED) from error

    def begin(self, method: str, request: Any, *, deadline: float) -> Pending | None:
        """Sends `method` and does not wait; None while the master is known to be away."""
        now = time.monotonic()
        with self._lock:
            if not self._breaker.usable(now * 1e3):
                return None
            probing = self._breaker.begin(now * 1e3)
        left = min(deadline - now, (PROBE_MS if probing else CALL_MS) / 1e3)
        if left <= 0:
            return None
        try:
            future = getattr(self.stub, method).future(request, timeout=left)
        except (grpc.RpcError, ValueError) as error:
            self._raise_closed(error)
            return None
        return Pending(self, future, now + left, counts=left * 1e3 >= COUNTED_TIMEOUT_MS)

    def ask(self, method: str, request: Any, *, deadline: float) -> Any:
        """`begin` and its result: the answer, or None when the master is away."""
        pending = self.begin(method, request, deadline=deadline)
        return None if pending is None else pending.result()

    def is_there(self) -> None:
        """The master has just been heard."""
        if self._breaker.failures:
            with self._lock:
                self._breaker.succeeded()

    def went_away(self) -> None:
        """The master did not answer."""
        with self._lock:
            self._breaker.failed(time.monotonic() * 1e3, MissCause.UNKNOWN)

    def next_address(self, stub: Any) -> None:
        """Leaves the address behind `stub` for the next one, where there are several."""
        if len(self.addresses) == 1:
            return
        with self._lock:
            if self._stub is not stub or self._closed:
                return
            channel, self._channel, self._stub = self._channel, None, None
            self._turn += 1
        channel.close()

    def close(self) -> None:
        """Ends the channel and all calls on it."""
        with self._lock:
            self._closed = True
            channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()


def _was_waiting(error: grpc.RpcError) -> bool:
    """True when the failed call used its time (so that trying again at once is no busy loop)."""
    code = error.code() if hasattr(error, "code") else None
    return code is grpc.StatusCode.DEADLINE_EXCEEDED
