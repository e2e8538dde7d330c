"""The client's copy of the index, kept by the master's event stream (Watch) on one thread.

Owns which peer has which block, as far as known here; peers themselves are in `peers`, lookups that the mirror cannot answer go
to the master (`reading`). Catalog entries name holders of the mirror's own numbering; the master's numbers end with its epoch:

    master's holder 7 of epoch 3 ──┐
                                   ├─▶ own holder 12 ─▶ peer 4 (worker w1, incarnation i)
    (own writes not listed yet) ───┘

A resync makes all own holders "old": they still answer, and end when the new snapshot is complete and their worker is up in it. A
worker that a new master has not heard of yet keeps its old entries for a grace time.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import grpc

from kvpool.client.master import MasterLink
from kvpool.client.peers import STATE_DOWN, STATE_UP, Peers
from kvpool.core.catalog import Catalog, Replicas
from kvpool.core.fetch import Candidates
from kvpool.core.types import KEY_BYTES, Holder, Key, NamespaceUid, Tiers
from kvpool.errors import InvalidArgument
from kvpool.transport.rpc import error_of
from kvpool.v1 import master_pb2 as pb

log = logging.getLogger(__name__)

RECONNECT_S: Final = (0.1, 0.5)  # a pause is drawn from this range
OLD_GRACE_S: Final = 15.0  # a worker that a new master does not know after this has no entries any more
APPLY_KEYS: Final = 1024  # applied under one hold of the lock: lookups wait for no more
PURGE_KEYS: Final = 4096
MEMO_MAX: Final = 4096
BUDGET_KEYS: Final = 8192  # applied between two looks at the memory used
_NOBODY: Final[Candidates] = ()


class Mirror:
    """Thread-safe. `start` begins when the first namespace is followed; `close` ends the thread."""

    def __init__(self, master: MasterLink, peers: Peers, *, bytes_max: int) -> None:
        self._master, self._peers, self._bytes_max = master, peers, bytes_max
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._catalog = Catalog()
        self._version = 0  # grows with every change that a waiter might wait for
        self._waiters = 0
        self._wanted: set[NamespaceUid] = set()
        self._synced: set[NamespaceUid] = set()  # answered from here
        self._too_large: set[NamespaceUid] = set()
        self._epoch = self._seq = 0
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
        self._stream: Any = None
        self._restart = False
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self.connected = False
        self.counters = {"events": 0, "resyncs": 0, "reconnects": 0, "too_large": 0}

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
        """Waits until all keys are there or the deadline; leading keys there then. None: not mirrored (any more)."""
        with self._changed:
            self._waiters += 1
            try:
                while uid in self._synced and not self._closed:
                    n = self._catalog.match(uid, keys)
                    left = deadline - time.monotonic()
                    if n == len(keys) or left <= 0:
                        return n
                    self._changed.wait(left)
            finally:
                self._waiters -= 1
        if self._closed:
            raise InvalidArgument("client: it was closed while a call waited")
        return None

    # --- what this client itself learns ---------------------------------------------------------------------------------

    def wrote(self, uid: NamespaceUid, peer: int, keys: bytes) -> None:
        """This client's put left these keys (packed) with the peer: seen at once, also while the master is away."""
        with self._lock:
            if uid not in self._synced:
                return
            n = len(keys) // KEY_BYTES
            self._catalog.apply(uid, self._holder_for(peer), keys, bytes((Tiers.DRAM,)) * n)
            self._note_change(n)

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
            self._old_until = max(self._old_until, time.monotonic() + OLD_GRACE_S)
        return holder

    def _new_holder(self, peer: int) -> Holder:
        self._holders += 1
        holder = Holder(self._holders)
        self._peer_of[holder] = peer
        self._holder_of[peer] = holder
        return holder

    # --- which namespaces -----------------------------------------------------------------------------------------------

    def follow(self, uid: NamespaceUid) -> None:
        """From now on this namespace is mirrored, within the budget."""
        with self._lock:
            if uid in self._wanted or uid in self._too_large or self._closed:
                return
            self._wanted.add(uid)
            self._epoch = self._seq = 0  # the next stream begins with a snapshot of all
            self._restart_stream()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvpool-mirror", daemon=True)
                self._thread.start()

    def unfollow(self, uid: NamespaceUid) -> None:
        """The namespace is not looked at any more (or is gone)."""
        with self._lock:
            if uid in self._wanted:
                self._wanted.discard(uid)
                self._drop(uid)
                self._restart_stream()

    def wait_synced(self, uid: NamespaceUid, *, deadline: float) -> bool:
        """Waits until the namespace is answered from here (or never will be); whether it is."""
        with self._changed:
            self._waiters += 1
            try:
                while uid in self._wanted and uid not in self._synced and not self._closed:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
            finally:
                self._waiters -= 1
            return uid in self._synced

    def _drop(self, uid: NamespaceUid) -> None:
        self._synced.discard(uid)
        self._catalog.drop_namespace(uid)
        self._note_change(0)

    def _restart_stream(self) -> None:
        self._restart = True
        self._wake.set()
        if self._stream is not None:
            self._stream.cancel()

    def stats(self) -> dict[str, Any]:
        """Counters and size of the mirror."""
        with self._lock:
            return {**self.counters, "connected": self.connected, "namespaces": len(self._synced),
                    "replicas": self._catalog.replicas, "bytes": self._catalog.index_bytes}  # fmt: skip

    def close(self) -> None:
        """Ends the thread; waiters are woken. Idempotent."""
        with self._changed:
            self._closed = True
            self._wake.set()
            if self._stream is not None:
                self._stream.cancel()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # --- the stream -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                self._restart = False
                self._wake.clear()
                uids = sorted(self._wanted)
                request = pb.WatchRequest(namespaces=uids, epoch=self._epoch, after_seq=self._seq)
            if uids:
                self._watch(request, frozenset(uids))
            self.connected = False
            with self._lock:
                restart = self._restart
            if not restart:
                self.counters["reconnects"] += bool(uids)
                self._wake.wait(random.uniform(*RECONNECT_S) if uids else None)

    def _watch(self, request: pb.WatchRequest, uids: frozenset[NamespaceUid]) -> None:
        stub = None
        try:
            stub = self._master.stub
            stream = stub.Watch(request)
            with self._lock:
                self._stream = stream
                if self._restart or self._closed:
                    stream.cancel()
            for event in stream:
                self.connected = True
                self._master.is_there()
                self._apply(event, uids)
        except grpc.RpcError as error:
            if not self._restart and not self._closed:
                found = error_of(error)
                log.debug("event=watch_ended code=%s reason=%s", found.code, found)
                if stub is not None:
                    self._master.next_address(stub)
        except (InvalidArgument, ValueError):  # the channel was closed
            if not self._closed:
                raise
        finally:
            with self._lock:
                stream, self._stream = self._stream, None
            if stream is not None:
                stream.cancel()

    def _apply(self, event: pb.WatchEvent, uids: frozenset[NamespaceUid]) -> None:
        self.counters["events"] += 1
        kind = event.WhichOneof("event")
        if kind == "change":
            self._apply_change(event.change)
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
            whole = not self._restart and not self._snapshotting
            self._epoch, self._seq = (event.epoch, event.seq) if whole else (0, 0)
            self._expire_old()
        self._purge()

    def _begin_snapshot(self) -> None:
        self.counters["resyncs"] += 1
        self._snapshotting = True
        self._old.update(self._peer_of)
        self._own.clear()
        self._holder_of.clear()
        self._up.clear()

    def _learn(self, info: pb.HolderInfo) -> None:
        peer = self._peers.learn(info, state=info.state, free_bytes=info.free_bytes, capacity_bytes=info.capacity_bytes)
        own = self._own.get(info.holder)
        if own is None and info.holder and info.state != STATE_DOWN:
            self._own[info.holder] = self._new_holder(peer.number)
        if info.state == STATE_UP:
            self._up.add(info.worker_id)
            if not self._snapshotting:
                self._retire_old_of(info.worker_id)

    def _retire_own(self, number: int) -> None:
        holder = self._own.pop(number, None)
        if holder is not None:
            self._retire(holder)
            self._note_change(1)

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
        self._old_until = time.monotonic() + OLD_GRACE_S
        self._synced |= uids & self._wanted
        for uid in uids:
            self._catalog.open_namespace(uid)
        self._note_change(1)

    def _expire_old(self) -> None:
        if self._old and not self._snapshotting and time.monotonic() > self._old_until:
            for holder in list(self._old):
                self._retire(holder)

    def _apply_change(self, change: pb.IndexChange) -> None:
        uid = NamespaceUid(change.namespace)
        if change.all:
            with self._lock:
                self._catalog.drop_all(uid)
                self._note_change(1)
            return
        keys, tiers = change.keys, change.tiers
        for start in range(0, len(tiers), APPLY_KEYS):
            with self._lock:
                holder = self._own.get(change.holder)
                if holder is None or uid not in self._wanted:
                    return  # of a holder that retired, or a namespace that is not followed any more
                part = tiers[start : start + APPLY_KEYS]
                self._catalog.apply(uid, holder, keys[start * KEY_BYTES : (start + len(part)) * KEY_BYTES], part)
                self._note_change(len(part))
        self._since_budget += len(tiers)
        if self._since_budget >= BUDGET_KEYS:
            self._since_budget = 0
            self._keep_budget()

    def _keep_budget(self) -> None:
        with self._lock:
            while self._wanted and self._catalog.index_bytes > self._bytes_max:
                largest = max(self._wanted, key=self._catalog.count)
                self._wanted.discard(largest)
                self._too_large.add(largest)
                self.counters["too_large"] += 1
                log.warning("event=mirror_too_large namespace=%s bytes_max=%d", largest.hex(), self._bytes_max)
                self._drop(largest)
                self._restart_stream()

    def _note_change(self, n: int) -> None:
        self._version += n
        if self._waiters:
            self._changed.notify_all()

    def _purge(self) -> None:
        more = self._catalog.retiring
        while more and not self._closed:
            with self._lock:
                more, _ = self._catalog.purge(PURGE_KEYS)
