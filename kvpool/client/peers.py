"""The workers that a client knows: identity, reachability (breaker), and the link to each. Learned from the master's answers.

A peer is one incarnation of one worker and has a number of the client's own, which outlives epochs of the master. Which transport
a link takes is decided in `transport.choose`; which peer to ask in `core.fetch` and `core.placement`.
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from kvpool.core.fetch import REMOTE_COST, SSD_COST, SUSPECT_COST, Breaker, BreakerState, CostOf, attempt_ms
from kvpool.core.placement import RAMP_MS, Candidate, share
from kvpool.core.types import MissCause, WorkerId
from kvpool.transport.base import LinkCause, LinkError, LinkOptions, WorkerAddress, WorkerLink
from kvpool.transport.choose import link as make_link

T = TypeVar("T")

STATE_JOINING, STATE_UP, STATE_SUSPECT, STATE_DOWN, STATE_DRAINING, STATE_DRAINED = range(6)  # as HolderInfo.state
STATES_THERE: Final = frozenset((STATE_UP, STATE_DRAINING, STATE_DRAINED))  # the index has what the worker has
COUNTED_TIMEOUT_MS: Final = 100  # a caller that gave less than this cannot conclude that the worker is ill
RETRY_MS: Final = (10, 20, 40, 80, 160)  # pauses before asking again what a worker cannot do yet
PEERS_MAX: Final = 4096  # incarnations remembered; the longest gone are forgotten first

# The worker answered, but not with what was wanted, and may a moment later.
NOT_YET: Final = frozenset((LinkCause.UNKNOWN_NAMESPACE, LinkCause.BUSY, LinkCause.NOT_READY))
_UNREACHABLE: Final = frozenset((LinkCause.REFUSED, LinkCause.CLOSED, LinkCause.RESTARTED, LinkCause.PROTOCOL))


def miss_of(error: LinkError) -> MissCause:
    """Why a block was not served when its worker failed like this."""
    if error.cause in _UNREACHABLE:
        return MissCause.WORKER_LOST
    if error.cause in (LinkCause.TIMEOUT, LinkCause.BUSY, LinkCause.NOT_READY):
        return MissCause.TIMEOUT
    return MissCause.STALE_INDEX if error.cause is LinkCause.UNKNOWN_NAMESPACE else MissCause.UNKNOWN


@dataclass(frozen=True, slots=True)
class _Nowhere:
    """Address of a worker that is gone."""

    worker_id: str
    incarnation: int
    host_id: str = ""
    address: str = ""
    unix_name: str = ""


class Peer:
    """One incarnation of a worker. `address` parts may be read from any thread; the rest is guarded by `lock`."""

    __slots__ = ("address", "breaker", "capacity_bytes", "free_bytes", "host_id", "incarnation", "link", "local", "lock",
                 "number", "state", "unix_name", "up_since_ms", "worker_id")  # fmt: skip

    def __init__(self, number: int, info: WorkerAddress, *, local: bool) -> None:
        self.number = number
        self.worker_id, self.incarnation, self.host_id = info.worker_id, info.incarnation, info.host_id
        self.address, self.unix_name = info.address, info.unix_name
        self.local = local
        self.state = STATE_UP
        self.free_bytes = self.capacity_bytes = 0
        self.up_since_ms = 0.0
        self.breaker = Breaker()
        self.link: WorkerLink | None = None
        self.lock = threading.Lock()


class Peers:
    """All peers of a client, and every call to one: deadlines, probes, breaker and links in one place. Thread-safe."""

    def __init__(self, *, host_id: str, options: LinkOptions, now_s: Callable[[], float] = time.monotonic,
                 seed: int = 0) -> None:  # fmt: skip
        """`seed`: of the choice among replicas that cost the same; clients have different ones."""
        self._host_id, self._options, self._now_s = host_id, options, now_s
        self._lock = threading.Lock()
        self._numbers = 0
        self._by_name: dict[tuple[str, int], Peer] = {}
        self._by_number: dict[int, Peer] = {}
        self._newest: dict[str, Peer] = {}  # worker id -> its latest incarnation
        self._closed = False
        self._turns = itertools.count(seed)
        self.on_unusable: Callable[[Peer], None] | None = None  # when a breaker opens; must not wait

    # --- who there is ---------------------------------------------------------------------------------------------------

    def learn(self, info: WorkerAddress, *, state: int, free_bytes: int = 0, capacity_bytes: int = 0,
              up_ms: int = RAMP_MS) -> Peer:  # fmt: skip
        """What the master says of a worker (`up_ms`: how long it has been up by now). An incarnation that is new ends the
        worker's earlier ones."""
        name = (info.worker_id, info.incarnation)
        ended: Peer | None = None
        with self._lock:
            peer = self._by_name.get(name)
            if peer is None:
                self._numbers += 1
                peer = Peer(self._numbers, info, local=info.host_id == self._host_id)
                self._by_name[name] = self._by_number[peer.number] = peer
                ended = self._newest.get(info.worker_id)
                self._newest[info.worker_id] = peer
                self._forget_oldest()
            if self._newest.get(info.worker_id) is peer:
                peer.state = state
            peer.free_bytes, peer.capacity_bytes = free_bytes, capacity_bytes
            peer.up_since_ms = self._now_s() * 1e3 - up_ms
        if ended is not None:
            self._end(ended)
        return peer

    def lost(self, worker_id: str, incarnation: int) -> Peer:
        """A stand-in for an incarnation that nobody knows any more: it can be named and not be asked."""
        with self._lock:
            peer = self._by_name.get((worker_id, incarnation))
            if peer is None:
                self._numbers += 1
                peer = Peer(self._numbers, _Nowhere(worker_id, incarnation), local=False)
                peer.state = STATE_DOWN
                self._by_name[worker_id, incarnation] = self._by_number[peer.number] = peer
                self._forget_oldest()
            return peer

    def _forget_oldest(self) -> None:
        if len(self._by_number) <= PEERS_MAX:
            return
        for number, peer in list(self._by_number.items()):
            if peer.state == STATE_DOWN:
                del self._by_number[number]
                del self._by_name[peer.worker_id, peer.incarnation]
                return

    def _end(self, peer: Peer) -> None:
        with peer.lock:
            peer.state = STATE_DOWN
            link, peer.link = peer.link, None
        if link is not None:
            link.close()

    def get(self, number: int) -> Peer | None:
        return self._by_number.get(number)

    def find(self, worker_id: str, incarnation: int) -> Peer | None:
        return self._by_name.get((worker_id, incarnation))

    def worker_id(self, number: int) -> str:
        """Of a peer; "" when it is not known (any more)."""
        peer = self._by_number.get(number)
        return peer.worker_id if peer is not None else ""

    def candidates(self) -> dict[WorkerId, tuple[Peer, Candidate]]:
        """Peers that can be written to now, for `core.placement`."""
        now_ms = self._now_s() * 1e3
        found: dict[WorkerId, tuple[Peer, Candidate]] = {}
        with self._lock:
            for peer in self._newest.values():
                if peer.state in (STATE_UP, STATE_JOINING) and peer.breaker.usable(now_ms):
                    name = WorkerId(peer.worker_id)
                    part = share(now_ms - peer.up_since_ms)
                    found[name] = peer, Candidate(name, peer.host_id, peer.free_bytes, peer.capacity_bytes, part)
        return found

    def cost(self, number: int) -> int | MissCause:
        """For `core.fetch`: what reading from this peer costs, or why it cannot be asked."""
        peer = self._by_number.get(number)
        if peer is None or peer.state == STATE_DOWN:
            return MissCause.WORKER_LOST
        breaker = peer.breaker
        if not breaker.failures:
            return (0 if peer.local else REMOTE_COST) + (SUSPECT_COST if peer.state == STATE_SUSPECT else 0)
        if not breaker.usable(self._now_s() * 1e3):
            return breaker.cause
        return REMOTE_COST + SUSPECT_COST

    def costs(self) -> CostOf:
        """`cost` for one get. Among workers of other hosts chance decides where the rest is equal (the same for all its blocks),
        so that the reads of many clients spread over the replicas of what is hot."""
        turn = next(self._turns)

        def cost(number: int) -> int | MissCause:
            price = self.cost(number)
            if isinstance(price, MissCause) or price < REMOTE_COST:
                return price
            return price + zlib.crc32(b"%d.%d" % (number, turn)) % SSD_COST

        return cost

    # --- asking them ----------------------------------------------------------------------------------------------------

    def link_of(self, peer: Peer, *, deadline: float) -> WorkerLink:
        """The link to the peer, made at first use. LinkError when it cannot be made."""
        link = peer.link
        if link is not None:
            return link
        with peer.lock:
            if self._closed:
                raise LinkError(LinkCause.CLOSED, f"worker {peer.worker_id}: the client is closed")
            if peer.link is None:
                peer.link = make_link(peer, self._options, deadline=deadline)
            return peer.link

    def call(self, peer: Peer, ask: Callable[[WorkerLink, float], T], *, deadline: float, alternatives: bool = False,
             patient_until: float = 0.0) -> T:  # fmt: skip
        """`ask(link, deadline of this attempt)` with the breaker's book kept. What the worker cannot do yet (NOT_YET) is asked
        again after short pauses until `patient_until`. Raises LinkError, and what the first contact says (Unauthenticated...)."""
        attempt = 0
        while True:
            now = self._now_s()
            with peer.lock:
                probing = peer.breaker.begin(now * 1e3)
            left_ms = attempt_ms((deadline - now) * 1e3, alternatives=alternatives, probing=probing)
            try:
                if left_ms <= 0:
                    raise LinkError(LinkCause.TIMEOUT, f"worker {peer.worker_id}: no time left to ask it")
                if probing:  # a small question first: the call itself may be large, and then gets the whole time
                    probe_until = now + left_ms / 1e3
                    self.link_of(peer, deadline=probe_until).stat(deadline=probe_until)
                    now = self._now_s()
                    left_ms = attempt_ms((deadline - now) * 1e3, alternatives=alternatives, probing=False)
                until = now + left_ms / 1e3
                answer = ask(self.link_of(peer, deadline=until), until)
            except LinkError as error:
                self.note(peer, error, patience_ms=left_ms)
                pause = RETRY_MS[min(attempt, len(RETRY_MS) - 1)] / 1e3
                attempt += 1
                if error.cause not in NOT_YET or self._now_s() + pause >= min(patient_until, deadline):
                    raise
                time.sleep(pause)
                continue
            if peer.breaker.failures:
                with peer.lock:
                    peer.breaker.succeeded()
            return answer

    def note(self, peer: Peer, error: LinkError, *, patience_ms: float) -> None:
        """A failure in the breaker's book. `patience_ms`: how long the worker was waited for."""
        opened = False
        with peer.lock:
            if error.cause is LinkCause.RESTARTED:
                peer.state = STATE_DOWN  # this incarnation does not come back
            if error.cause is LinkCause.TIMEOUT and patience_ms < COUNTED_TIMEOUT_MS:
                return
            if error.cause in _UNREACHABLE or error.cause is LinkCause.TIMEOUT:
                before = peer.breaker.state
                peer.breaker.failed(self._now_s() * 1e3, miss_of(error))
                opened = before is BreakerState.CLOSED and peer.breaker.state is BreakerState.OPEN
            else:
                peer.breaker.succeeded()
        if opened and self.on_unusable is not None and not self._closed:
            self.on_unusable(peer)

    def all(self) -> Iterable[Peer]:
        with self._lock:
            return list(self._by_number.values())

    def close(self) -> None:
        """Ends every link; calls under way in other threads end with LinkError."""
        self._closed = True
        for peer in self.all():
            with peer.lock:
                link, peer.link = peer.link, None
            if link is not None:
                link.close()
