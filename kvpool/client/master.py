"""The client's side of the masters' service: a channel to the one that leads, deadlines, and not waiting for one that is away.

Two kinds of calls. `call` is for what only the master can do (namespaces, remove): it waits for a connection until the deadline
and raises. `begin` is for the hot path (locate, place): it goes out at once, is not made at all while the master is known to be
away, and its answer may be collected later.

With several masters a call that meets one that does not answer, or does not lead, goes on to the next at once (`core.leaders`);
after a round of all of them there is a pause. Answers of a leader of the past are not used.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any, Final

import grpc

from kvpool.client.peers import COUNTED_TIMEOUT_MS
from kvpool.core.fetch import CALL_MS, PROBE_MS, Breaker
from kvpool.core.leaders import LeaderSearch
from kvpool.core.types import MissCause
from kvpool.errors import (
    InvalidArgument,
    KVPoolError,
    MasterUnavailable,
    NamespaceNotFound,
    PermissionDenied,
    StoreUnavailable,
    Unauthenticated,
    VersionMismatch,
)
from kvpool.transport.rpc import error_of, open_channel
from kvpool.v1 import master_pb2_grpc as service

ADDRESSES_MAX: Final = 16
TO_BE_TOLD: Final = (NamespaceNotFound, Unauthenticated, PermissionDenied, InvalidArgument, VersionMismatch)
AWAY_MS: Final = (200, 1000)  # for how long a master that did not answer is not asked by those who do not need it
ROUND_PAUSE_S: Final = (0.1, 0.2)  # drawn from this range, after all masters failed
HEARD_S: Final = 1.0  # one of several that said nothing for longer is asked whether it lives, before it gets a call's whole time
LIVES_S: Final = 0.5  # in which it must say so
CLOSED: Final = "client: it is closed"


class Pending:
    """An answer of the master that is on its way. Used by one thread. `moved`: none came, and there is another master to ask."""

    __slots__ = ("_counts", "_future", "_master", "_stub", "_until", "moved")

    def __init__(self, master: MasterLink, stub: Any, future: Any, until: float, *, counts: bool) -> None:
        self._master, self._stub, self._future, self._until, self._counts = master, stub, future, until, counts
        self.moved = False

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
                self.moved = not self._master.failed(self._stub, hint=_leader(found), gone=is_gone(error))
            return None
        if not self._master.heard(self._stub, answer.epoch):
            self.moved = not self._master.failed(self._stub)
            return None
        return answer

    def cancel(self) -> None:
        self._future.cancel()


class MasterLink:
    """Calls to the master that leads. Thread-safe."""

    def __init__(self, addresses: str, *, token: str) -> None:
        self.addresses = [part.strip() for part in addresses.split(",") if part.strip()]
        if not 1 <= len(self.addresses) <= ADDRESSES_MAX:
            raise InvalidArgument(f"master: {len(self.addresses)} addresses in {addresses!r}; allowed are 1..{ADDRESSES_MAX}")
        self._token = token
        self._lock = threading.Lock()
        self._breaker = Breaker(failures_max=1, open_ms_min=AWAY_MS[0], open_ms_max=AWAY_MS[1])
        self._search = LeaderSearch(self.addresses)
        self._address = ""  # of the channel
        self._channel: Any = None
        self._stub: Any = None
        self._heard_at = 0.0
        self._closed = False

    @property
    def stub(self) -> Any:
        """The service's stub on the current channel."""
        with self._lock:
            if self._closed:
                raise InvalidArgument(CLOSED)
            if self._stub is None:
                self._address = self._search.current
                self._channel = open_channel(self._address, self._token)
                self._stub = service.MasterStub(self._channel)  # type: ignore[no-untyped-call]
                self._heard_at = 0.0
            return self._stub

    @property
    def address(self) -> str:
        """Of the master that is asked at present."""
        return self._search.current

    def call(self, method: str, request: Any, *, deadline: float) -> Any:
        """The answer to `method`. MasterUnavailable when there is none by the deadline (a point of time.monotonic()); what the
        master says otherwise as its kvpool error, StoreUnavailable among them."""
        where = ", ".join(self.addresses)
        reason = ""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise MasterUnavailable(f"no answer from the master at {where} within the deadline{reason}")
            stub = self.stub
            try:
                answer = self._call_once(stub, method, request, deadline)
            except grpc.RpcError as error:
                self._raise_closed(error)
                if self._stub is not stub and _code(error) is grpc.StatusCode.CANCELLED:
                    continue  # another thread went on to the next master
                found = error_of(error, address=self._address or where)
                if not isinstance(found, MasterUnavailable) or isinstance(found, StoreUnavailable):
                    raise found from error
                if not reason or _code(error) is not grpc.StatusCode.DEADLINE_EXCEEDED:  # (what was said, not that time ran out)
                    reason = f"; at last: {found}"
                whole_round = self.failed(stub, hint=found.leader, gone=is_gone(error))
                if not self._search.several and time.monotonic() >= deadline - 0.01:
                    raise found from error
                if whole_round and _code(error) is not grpc.StatusCode.DEADLINE_EXCEEDED:  # that one used its time
                    self._pause(deadline)
            except ValueError as error:  # the channel was closed under the call
                self._raise_closed(error)
                if self._stub is stub:
                    raise
            else:
                if self.heard(stub, answer.epoch):
                    return answer
                reason = f"; at last: an answer of a leader that is over, epoch {answer.epoch}"
                if self.failed(stub):
                    self._pause(deadline)

    def _call_once(self, stub: Any, method: str, request: Any, deadline: float) -> Any:
        if not self._search.several:
            left = max(0.0, deadline - time.monotonic())
            return getattr(stub, method)(request, timeout=left, wait_for_ready=True)
        now = time.monotonic()
        if now - self._heard_at > HEARD_S:
            self._check_lives(stub, min(LIVES_S, (deadline - now) / 2))
        return getattr(stub, method)(request, timeout=max(0.0, deadline - time.monotonic()))

    def _check_lives(self, stub: Any, timeout: float) -> None:
        """Raises the RpcError when the process behind `stub` does not even answer this."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        with self._lock:
            if self._stub is not stub or self._closed:
                raise ValueError("the channel was closed")
            make: Any = health_pb2_grpc.HealthStub
            health = make(self._channel)
        health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)

    @staticmethod
    def _pause(deadline: float) -> None:
        time.sleep(max(0.0, min(random.uniform(*ROUND_PAUSE_S), deadline - time.monotonic())))

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
        stub = self.stub
        try:
            future = getattr(stub, method).future(request, timeout=left)
        except (grpc.RpcError, ValueError) as error:
            self._raise_closed(error)
            return None
        return Pending(self, stub, future, now + left, counts=left * 1e3 >= COUNTED_TIMEOUT_MS)

    def ask(self, method: str, request: Any, *, deadline: float) -> Any:
        """`begin` and its result: the answer, or None when the masters are away. Each of them is asked once at most."""
        for _ in range(len(self.addresses) + 1):
            pending = self.begin(method, request, deadline=deadline)
            answer = None if pending is None else pending.result()
            if answer is not None or pending is None or not pending.moved:
                return answer
        return None

    def tell(self, method: str, request: Any) -> None:
        """Sends what nobody waits for; lost when the master is away."""
        if self._breaker.usable(time.monotonic() * 1e3):
            with contextlib.suppress(grpc.RpcError, ValueError, InvalidArgument):
                future = getattr(self.stub, method).future(request, timeout=CALL_MS / 1e3)
                future.add_done_callback(lambda _: None)  # keeps the call alive until it has ended

    def heard(self, stub: Any, epoch: int) -> bool:
        """The master behind `stub` has just said something. False: it is a leader of the past, which must not be listened to."""
        now = time.monotonic()
        with self._lock:
            if not self._search.accepts(epoch, now_s=now):
                return False
            if self._breaker.failures:
                self._breaker.succeeded()
            if self._stub is stub:
                self._heard_at = now
        return True

    def failed(self, stub: Any, *, hint: str = "", counted: bool = True, gone: bool = False) -> bool:
        """The master behind `stub` did not answer, or does not lead and names `hint`: leaves it for the next one, where there are
        several. True: all have failed by now; with `counted` they are held to be away for a while. `gone`: it cannot even be
        reached. Then the next attempt begins with a channel of its own, which connects at once where an old one would wait."""
        with self._lock:
            if self._stub is not stub or self._closed:
                return False
            whole_round = self._search.failed(hint)
            if whole_round and counted:
                self._breaker.failed(time.monotonic() * 1e3, MissCause.UNKNOWN)
            elif not whole_round:
                self._breaker.retry_at_ms = 0.0  # the next one may be probed at once
            if self._search.current == self._address and not gone:
                return whole_round
            channel, self._channel, self._stub = self._channel, None, None
        channel.close()
        return whole_round

    def close(self) -> None:
        """Ends the channel and all calls on it."""
        with self._lock:
            self._closed = True
            channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()


def is_gone(error: BaseException) -> bool:
    """Whether a call failed because nobody could be reached, or the connection broke under it."""
    return isinstance(error, grpc.RpcError) and _code(error) is grpc.StatusCode.UNAVAILABLE


def _leader(error: KVPoolError) -> str:
    return error.leader if isinstance(error, MasterUnavailable) else ""


def _code(error: grpc.RpcError) -> Any:
    return error.code() if hasattr(error, "code") else None
