"""The client's copy of the index: which peer has which block, as far as the master's events and this client's own puts say.

Owns the entries and what a resync does to them; the stream that brings the events is in `mirror`, peers themselves in `peers`.
Entries name holders of the index's own numbering, since the master's numbers end with its epoch:

    master's holder 7 of epoch 3 ──┐
                                   ├─▶ own holder 12 ─▶ peer 4 (worker w1, incarnation i)
    (own writes not listed yet) ───┘

A resync makes all own holders "old": they still answer, and end when the new snapshot is complete and their worker is up in it. A
worker that a new master has not heard of yet keeps its old entries for a grace time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.client.peers import STATE_DOWN, STATES_THERE, Peers
from kvpool.core.catalog import Catalog, Replicas
from kvpool.core.fetch import Candidates
from kvpool.core.types import KEY_BYTES, Holder, Key, NamespaceUid, Tiers
from kvpool.v1 import master_pb2 as pb

OLD_GRACE_S: Final = 15.0  # a worker that a new master does not know after this has no entries any more
APPLY_KEYS: Final = 1024  # applied under one hold of the lock: lookups wait for no more
PURGE_KEYS: Final = 4096
MEMO_MAX: Final = 4096
BUDGET_KEYS: Final = 8192  # applied between two looks at the memory used


class MirrorIndex:
    """Lookups and own writes from any thread; `apply` from the stream's thread alone. `now_s`: a monotonic clock."""

    def __init__(self, peers: Peers, *, bytes_max: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._peers, self._bytes_max, self._now_s = peers, bytes_max, now_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._catalog = Catalog()
        self._waiters = 0
        self._wanted: set[NamespaceUid] = set()
        self._synced: set[NamespaceUid] = set()  # answered from here
        self._too_large: set[NamespaceUid] = set()
        self._epoch = self._seq = 0
        self._restarted = False  # events of the stream before do not count for the position any more
        self._snapshotting = False
        self._holders = 0
        self._own: dict[int, Holder] = {}  # master's holder of this epoch -> own
        self._peer_of: dict[Holder, int] = {}
        self._holder_of: dict[int, Holder] = {}  # peer -> own holder that its new entries go to
        self._old: set[Holder] = set()
        self._old_until = 0.0
        self._up: set[str] = set()  # workers announced as up since the last resync
        self._memo: dict[Replicas, Candidates] = {}
        self._since_budget = 0
        self._closed = False
        self.resyncs = 0

    # --- lookups --------------------------------------------------------------------------------------------------------

    def locate(self, uid: NamespaceUid, keys: Sequence[Key]) -> list[Candidates] | None:
        """Per key who has it, () where nobody is known; None: this namespace is not mirrored (yet), ask the master."""
        with self._lock:
            if uid not in self._synced:
                return None
            found = self._catalog.locate(uid, keys)
            memo = self._memo
            try:
                return [memo[replicas] for replicas in found]
            except KeyError:
                return [self._candidates(replicas) for replicas in found]

    def _candidates(self, replicas: Replicas) -> Candidates:
        known = self._memo.get(replicas)
        if known is not None:
            return known
        tiers_of: dict[int, int] = {}
        for holder, tiers in replicas:
            peer = self._peer_of.get(holder)
            if peer is not None:
                tiers_of[peer] = tiers_of.get(peer, 0) | tiers
        candidates = tuple(tiers_of.items())
        if len(self._memo) >= MEMO_MAX:
            self._memo.clear()
        self._memo[replicas] = candidates
        return candidates

    def match(self, uid: NamespaceUid, keys: Sequence[Key]) -> int | None:
        """Leading keys that somebody has; None: not mirrored."""
        with self._lock:
            return self._catalog.match(uid, keys) if uid in self._synced else None

    def wait_match(self, uid: NamespaceUid, keys: Sequence[Key], *, deadline: float) -> int | None:
        """Waits until all keys are there or the deadline; leading keys there then. None: not mirrored (any more), or closed."""
        with self._changed:
            self._waiters += 1
            try:
                while uid in self._synced and not self._closed:
                    n = self._catalog.match(uid, keys)
                    left = deadline - self._now_s()
                    if n == len(keys) or left <= 0:
                        return n
                    self._changed.wait(left)
            finally:
                self._waiters -= 1
        return None

    # --- what this client itself learns ---------------------------------------------------------------------------------

    def wrote(self, uid: NamespaceUid, peer: int, keys: bytes) -> None:
        """This client's put left these keys (packed) with the peer: seen at once, also while the master is away."""
        with self._lock:
            if uid not in self._synced:
                return
            n = len(keys) // KEY_BYTES
            self._catalog.apply(uid, self._holder_for(peer), keys, bytes((Tiers.DRAM,)) * n)
            self._notify()

    def stale(self, uid: NamespaceUid, peer: int, keys: bytes) -> None:
        """The peer says that it does not have these keys (packed)."""
        with self._lock:
            if uid not in self._synced:
                return
            nothing = bytes(len(keys) // KEY_BYTES)
            for holder, number in self._peer_of.items():
                if number == peer:
                    self._catalog.apply(uid, holder, keys, nothing)

    def forget(self, uid: NamespaceUid, keys: Sequence[Key]) -> None:
        """These keys were removed by this client."""
        with self._lock:
            self._catalog.forget(uid, keys)

    def _holder_for(self, peer: int) -> Holder:
        holder = self._holder_of.get(peer)
        if holder is None:
            holder = self._new_holder(peer)
            self._old.add(holder)  # the master has not announced it: ends as all old ones
            self._old_until = max(self._old_until, self._now_s() + OLD_GRACE_S)
        return holder

    def _new_holder(self, peer: int) -> Holder:
        self._holders += 1
        holder = Holder(self._holders)
        self._peer_of[holder] = peer
        self._holder_of[peer] = holder
        return holder

    # --- which namespaces -----------------------------------------------------------------------------------------------

    def want(self, uid: NamespaceUid) -> bool:
        """The namespace is to be mirrored. True: a new stream is needed, which begins with a snapshot of all."""
        with self._lock:
            if uid in self._wanted or uid in self._too_large or self._closed:
                return False
            self._wanted.add(uid)
            self._epoch = self._seq = 0
            self._restarted = True
            return True

    def begin_stream(self) -> tuple[list[NamespaceUid], int, int]:
        """What the next stream is to be asked for: namespaces, epoch and the number of the last event that was applied."""
        with self._lock:
            self._restarted = False
            return sorted(self._wanted), self._epoch, self._seq

    def wait_synced(self, uid: NamespaceUid, *, deadline: float) -> bool:
        """Waits until the namespace is answered from here (or never will be); whether it is."""
        with self._changed:
            self._waiters += 1
            try:
                while uid in self._wanted and uid not in self._synced and not self._closed:
                    left = deadline - self._now_s()
                    if left <= 0:
                        break
                    self._changed.wait(left)
            finally:
                self._waiters -= 1
            return uid in self._synced

    def sizes(self) -> dict[str, int]:
        """Of what is kept."""
        with self._lock:
            return {"namespaces": len(self._synced), "too_large": len(self._too_large), "replicas": self._catalog.replicas,
                    "bytes": self._catalog.index_bytes}  # fmt: skip

    def close(self) -> None:
        """Wakes who waits; nothing is waited for any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- events ---------------------------------------------------------------------------------------------------------

    def apply(self, event: pb.WatchEvent, uids: frozenset[NamespaceUid]) -> list[NamespaceUid]:
        """One event of a stream that follows `uids`. Returns namespaces that went over the budget and are not mirrored any more:
        the stream is to be begun again without them."""
        kind = event.WhichOneof("event")
        over: list[NamespaceUid] = []
        if kind == "change":
            over = self._apply_change(event.change)
        with self._lock:
            if kind == "resync":
                self._begin_snapshot()
            elif kind == "holder":
                self._learn(event.holder)
            elif kind == "retired":
                self._retire_own(event.retired)
            elif kind == "snapshot_end":
                self._end_snapshot(uids)
            # a stream that is cut in the middle of a snapshot begins with a new one
            whole = not self._restarted and not self._snapshotting
            self._epoch, self._seq = (event.epoch, event.seq) if whole else (0, 0)
            self._expire_old()
            more = self._catalog.retiring
        while more:
            with self._lock:
                more, _ = self._catalog.purge(PURGE_KEYS)
        return over

    def _begin_snapshot(self) -> None:
        self.resyncs += 1
        self._snapshotting = True
        self._old.update(self._peer_of)
        self._own.clear()
        self._holder_of.clear()
        self._up.clear()

    def _learn(self, info: pb.HolderInfo) -> None:
        peer = self._peers.learn(info, state=info.state, free_bytes=info.free_bytes, capacity_bytes=info.capacity_bytes,
                                 up_ms=info.up_ms)  # fmt: skip
        if info.holder and info.holder not in self._own and info.state != STATE_DOWN:
            self._own[info.holder] = self._new_holder(peer.number)
        if info.state in STATES_THERE:
            self._up.add(info.worker_id)
            if not self._snapshotting:
                self._retire_old_of(info.worker_id)

    def _retire_own(self, number: int) -> None:
        holder = self._own.pop(number, None)
        if holder is not None:
            self._retire(holder)
            self._notify()

    def _retire(self, holder: Holder) -> None:
        self._catalog.retire(holder)
        peer = self._peer_of.pop(holder, None)
        if peer is not None and self._holder_of.get(peer) == holder:
            del self._holder_of[peer]
        self._old.discard(holder)
        self._memo.clear()

    def _retire_old_of(self, worker_id: str) -> None:
        for holder in [h for h in self._old if self._peers.worker_id(self._peer_of[h]) == worker_id]:
            self._retire(holder)

    def _end_snapshot(self, uids: frozenset[NamespaceUid]) -> None:
        self._snapshotting = False
        for worker_id in self._up:
            self._retire_old_of(worker_id)
        self._old_until = self._now_s() + OLD_GRACE_S
        for uid in uids & self._wanted:
            self._catalog.open_namespace(uid)
            self._synced.add(uid)
        self._notify()

    def _expire_old(self) -> None:
        if self._old and not self._snapshotting and self._now_s() > self._old_until:
            for holder in list(self._old):
                self._retire(holder)

    def _apply_change(self, change: pb.IndexChange) -> list[NamespaceUid]:
        uid = NamespaceUid(change.namespace)
        if change.all:
            with self._lock:
                self._catalog.drop_all(uid)
                self._notify()
            return []
        keys, tiers = change.keys, change.tiers
        for start in range(0, len(tiers), APPLY_KEYS):
            with self._lock:
                holder = self._own.get(change.holder)
                if holder is None or uid not in self._wanted:
                    return []  # of a holder that retired, or a namespace that is not followed any more
                part = tiers[start : start + APPLY_KEYS]
                self._catalog.apply(uid, holder, keys[start * KEY_BYTES : (start + len(part)) * KEY_BYTES], part)
                self._notify()
        self._since_budget += len(tiers)
        if self._since_budget < BUDGET_KEYS:
            return []
        self._since_budget = 0
        return self._keep_budget()

    def _keep_budget(self) -> list[NamespaceUid]:
        over: list[NamespaceUid] = []
        with self._lock:
            while self._wanted and self._catalog.index_bytes > self._bytes_max:
                largest = max(self._wanted, key=self._catalog.count)
                self._wanted.discard(largest)
                self._synced.discard(largest)
                self._too_large.add(largest)
                self._catalog.drop_namespace(largest)
                over.append(largest)
            self._notify()
        return over

    def _notify(self) -> None:
        if self._waiters:
            self._changed.notify_all()
