"""What all calls of one client share: master, mirror, peers, lanes, counters; and the checks that come before every call."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from kvpool.client.master import CLOSED, MasterLink
from kvpool.client.mirror import Mirror
from kvpool.client.peers import Peers
from kvpool.client.spreading import Spreading
from kvpool.core.fetch import Candidates
from kvpool.core.keys import KeyBatch
from kvpool.core.types import KEY_BYTES, NamespaceUid
from kvpool.errors import InvalidArgument
from kvpool.v1 import master_pb2 as pb

T = TypeVar("T")

FAN_OUT_MAX: Final = 8  # workers that one client asks at the same time, over all its calls
DEADLINE_MS_MAX: Final = 24 * 3600 * 1000


@dataclass(slots=True)
class Counters:
    """Of one namespace in one client. Plain ints that only grow."""

    gets: int = 0
    puts: int = 0
    blocks_asked: int = 0
    bytes_got: int = 0
    bytes_put: int = 0
    hits: dict[str, int] = field(default_factory=dict)  # by tier
    misses: dict[str, int] = field(default_factory=dict)  # blocks, by cause
    outcomes: dict[str, int] = field(default_factory=dict)  # of put blocks
    lock: threading.Lock = field(default_factory=threading.Lock)

    def as_dict(self) -> dict[str, Any]:
        with self.lock:
            return {"gets": self.gets, "puts": self.puts, "blocks_asked": self.blocks_asked, "bytes_got": self.bytes_got,
                    "bytes_put": self.bytes_put, "hits": dict(self.hits), "misses": dict(self.misses),
                    "outcomes": dict(self.outcomes)}  # fmt: skip


class Abortable(Protocol):
    """A put session that has not ended: it has connections of its own."""

    def abort(self) -> None: ...


class Context:
    """Shared by the client and its namespaces. Thread-safe. `mirror` None: every lookup asks the master."""

    def __init__(self, *, master: MasterLink, peers: Peers, mirror: Mirror | None, host_id: str, verify: bool,
                 transport: str) -> None:  # fmt: skip
        self.master, self.peers, self.mirror = master, peers, mirror
        self.host_id, self.verify, self.transport = host_id, verify, transport
        self.spreading: Spreading | None = None
        self.closing = threading.Event()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lanes: ThreadPoolExecutor | None = None
        self._sessions: set[Abortable] = set()

    def check(self) -> None:
        """Every call begins here. Raises InvalidArgument for a closed or forked client."""
        if os.getpid() != self._pid:
            raise InvalidArgument(f"client: it belongs to process {self._pid}; a forked child must connect for itself")
        if self.closing.is_set():
            raise InvalidArgument(CLOSED)

    # --- who has what ---------------------------------------------------------------------------------------------------

    def learn(self, infos: Iterable[pb.HolderInfo]) -> dict[int, int]:
        """The master's holders as this client's peers: holder -> peer number."""
        learn = self.peers.learn
        return {i.holder: learn(i, state=i.state, free_bytes=i.free_bytes, capacity_bytes=i.capacity_bytes, up_ms=i.up_ms).number
                for i in infos}  # fmt: skip

    def places(self, reply: pb.LocateReply) -> list[Candidates]:
        """Who has each of the located keys, () for nobody. [n_keys]"""
        peer_of = self.learn(reply.holder_infos)
        holders = np.frombuffer(reply.holders, dtype="<u4").tolist()
        tiers, at = reply.tiers, 0
        found: list[Candidates] = []
        shared: dict[tuple[tuple[int, int], ...], Candidates] = {}
        for n in reply.n_replicas:
            one = tuple((peer_of[holders[i]], tiers[i]) for i in range(at, at + n) if holders[i] in peer_of)
            found.append(shared.setdefault(one, one))
            at += n
        return found

    def known(self, uid: NamespaceUid, keys: Sequence[bytes]) -> list[Candidates] | None:
        """What the mirror knows; None when it does not answer for this namespace."""
        return None if self.mirror is None else self.mirror.index.locate(uid, keys)

    # --- several workers at once ----------------------------------------------------------------------------------------

    def run_all(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """All jobs' results in order, the first job on the caller's thread. Every job has ended when this returns or raises: each
        keeps its own deadline. A single job costs no thread."""
        if len(jobs) == 1:
            return [jobs[0]()]
        with self._lock:
            if self._lanes is None:
                self.check()
                self._lanes = ThreadPoolExecutor(FAN_OUT_MAX, thread_name_prefix="kvpool-lane")
            futures: list[Future[T]] = [self._lanes.submit(job) for job in jobs[1:]]
        try:
            first = jobs[0]()
        finally:
            wait(futures)
        return [first, *(future.result() for future in futures)]

    def began(self, session: Abortable) -> None:
        """A put session that `close` must abort unless it `ended` before. Raises InvalidArgument for a closed client."""
        with self._lock:
            self.check()
            self._sessions.add(session)

    def ended(self, session: Abortable) -> None:
        with self._lock:
            self._sessions.discard(session)

    def close(self) -> None:
        """Ends the lanes, the mirror, the links, put sessions and the channel, in this order of who uses whom. Idempotent."""
        self.closing.set()
        if self.mirror is not None:
            self.mirror.close()
        self.peers.close()
        if self.spreading is not None:
            self.spreading.close()
        with self._lock:
            lanes, self._lanes = self._lanes, None
            sessions = list(self._sessions)
        for session in sessions:
            session.abort()
        if lanes is not None:
            lanes.shutdown(wait=True)
        self.master.close()


def deadline_of(deadline_ms: float | None, default_ms: float) -> float:
    """A call's `deadline_ms` as a point of time.monotonic(). InvalidArgument when it is no positive number."""
    if deadline_ms is None:
        return time.monotonic() + default_ms / 1e3
    if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, int | float) or not 0 < deadline_ms <= DEADLINE_MS_MAX:
        raise InvalidArgument(f"deadline_ms: {deadline_ms!r} is not in 1..{DEADLINE_MS_MAX}")
    return time.monotonic() + deadline_ms / 1e3


def pick(batch: KeyBatch, blocks: Sequence[int]) -> KeyBatch:
    """The keys of these blocks (indices, ascending); what is no run is no chain any more."""
    n = len(blocks)
    if n == len(batch):
        return batch
    if n and blocks[-1] - blocks[0] + 1 == n:
        return batch.slice(blocks[0], blocks[-1] + 1)
    keys = batch.keys
    return KeyBatch(batch.namespace, b"".join(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in blocks), chained=False)


def pick_views(views: Sequence[memoryview], blocks: Sequence[int]) -> Sequence[memoryview]:
    """The buffers of these blocks."""
    n = len(blocks)
    if n == len(views):
        return views
    return views[blocks[0] : blocks[-1] + 1] if n and blocks[-1] - blocks[0] + 1 == n else [views[i] for i in blocks]
