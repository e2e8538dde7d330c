"""The Master service: what clients ask and what they get. Checks every field that comes in, then calls `state` and `sessions`.

Whatever goes wrong in a handler becomes a typed error with its code in the trailing metadata: a caller never waits for an answer
that will not come. Who may call is decided before, by `server`.
"""
# ruff: noqa: ARG002  (handlers have gRPC's signature)

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Final, NoReturn, TypeVar

import grpc
import numpy as np

from kvpool.core.catalog import Replicas, page_of
from kvpool.core.keys import pack_keys, split_keys
from kvpool.core.membership import WorkerState
from kvpool.core.pins import PinLevel
from kvpool.core.placement import Candidate, place, share
from kvpool.core.types import (
    CAUSE_CODES,
    HASH_BYTES,
    KEY_BYTES,
    MAX_BATCH_KEYS,
    MAX_SHARD,
    UID_BYTES,
    Holder,
    Key,
    NamespaceUid,
    WorkerId,
)
from kvpool.errors import InvalidArgument, KVPoolError, QuotaExceeded
from kvpool.master import pinning
from kvpool.master.session import Sessions
from kvpool.master.state import MasterState, Namespace
from kvpool.master.watch import WATCHED_NAMESPACES_MAX, WATCHERS_MAX, watch
from kvpool.master.wire import spec_from_proto, spec_to_proto
from kvpool.transport.rpc import status_of
from kvpool.v1 import master_pb2 as pb
from kvpool.v1 import master_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

REMOVE_WAIT_S: Final = 5.0  # for workers to confirm, when the caller names no deadline or a later one
REMOVE_MARGIN_S: Final = 0.1  # of the caller's deadline that is kept for the answer's way back
NAME_CHARS_MAX: Final = 128
HOST_ID_CHARS_MAX: Final = 256
SHARDS_MAX: Final = 1_024  # of one Match
PLACE_WORKERS_MAX: Final = 16
LIST_LIMIT_MAX: Final = MAX_BATCH_KEYS
REPLICAS_ANSWERED_MAX: Final = 16  # of one key: a reader tries a few; keeps an answer bounded
SESSIONS_MAX: Final = 4_096
WORKERS_NAMED_MAX: Final = 16  # in an error

_REMOVED, _PENDING, _ABSENT = 0, 1, 2
_F = TypeVar("_F", bound=Callable[..., Any])
T = TypeVar("T")


def _typed(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    """A handler whose exceptions become kvpool errors at the caller."""

    @wraps(method)
    async def handler(self: MasterService, request: Any, context: Any) -> T:
        try:
            return await method(self, request, context)
        except (KVPoolError, Exception) as error:
            if isinstance(error, grpc.RpcError | grpc.aio.AbortError):
                raise
            await self.fail(method.__name__, error, context)

    return handler


class MasterService(pb_grpc.MasterServicer):
    """On the master's loop."""

    def __init__(self, state: MasterState, sessions: Sessions) -> None:
        self._state = state
        self._sessions = sessions
        self._removing = asyncio.Lock()
        self._listing = asyncio.Semaphore(1)

    async def fail(self, method: str, error: Exception, context: Any) -> NoReturn:
        """Ends the call with the error's status."""
        if not isinstance(error, KVPoolError):
            log.exception("event=internal_error method=%s", method)
            error = KVPoolError(f"{method} failed inside the master: {type(error).__name__}")
        errors = self._state.counts.rpc_errors
        errors[error.code] = errors.get(error.code, 0) + 1
        status, message, metadata = status_of(error)
        await context.abort(status, message, metadata)
        raise AssertionError("abort returned")

    def _namespace(self, uid: bytes) -> Namespace:
        if len(uid) != UID_BYTES:
            raise InvalidArgument(f"namespace: {len(uid)} bytes; a uid of {UID_BYTES} is needed")
        return self._state.namespace(NamespaceUid(uid))

    # --- namespaces -----------------------------------------------------------------------------------------------------

    @_typed
    async def CreateNamespace(self, request: pb.CreateNamespaceRequest, context: Any) -> pb.NamespaceReply:
        wanted = spec_from_proto(request.namespace)
        spec, created = await self._state.create(wanted)
        if created:
            self._sessions.tell_namespace(self._state.namespace(spec.uid))
        return pb.NamespaceReply(epoch=self._state.epoch, namespace=spec_to_proto(spec), created=created)

    @_typed
    async def OpenNamespace(self, request: pb.OpenNamespaceRequest, context: Any) -> pb.NamespaceReply:
        if not 0 < len(request.name) <= NAME_CHARS_MAX:
            raise InvalidArgument(f"name: must have 1..{NAME_CHARS_MAX} characters")
        if len(request.fingerprint) not in (0, HASH_BYTES):
            raise InvalidArgument(f"fingerprint: {len(request.fingerprint)} bytes; {HASH_BYTES} are needed, or none")
        spec = self._state.open(request.name, fingerprint=request.fingerprint)
        return pb.NamespaceReply(epoch=self._state.epoch, namespace=spec_to_proto(spec))

    @_typed
    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: Any) -> pb.ListNamespacesReply:
        specs = [spec_to_proto(namespace.spec) for namespace in self._state.namespaces.values()]
        return pb.ListNamespacesReply(epoch=self._state.epoch, namespaces=specs)

    @_typed
    async def DeleteNamespace(self, request: pb.DeleteNamespaceRequest, context: Any) -> pb.RemoveReply:
        state = self._state
        uid = state.open(request.name, fingerprint=b"").uid
        namespace = state.namespace(uid)
        reply = await self._remove(namespace, b"", everything=True, wait_s=_wait_s(context))
        async with self._removing:
            await state.delete(namespace)
            self._sessions.tell_deleted(uid)
        return reply

    # --- lookups --------------------------------------------------------------------------------------------------------

    @_typed
    async def Locate(self, request: pb.LocateRequest, context: Any) -> pb.LocateReply:
        """With prefix: the leading keys that somebody has, and why the next is not there. Else: all keys."""
        state = self._state
        namespace = self._namespace(request.namespace)
        keys = _keys(request.keys)
        complete = state.complete()
        found = state.locate(namespace, keys)
        n_lead = next((i for i, replicas in enumerate(found) if not replicas), len(found))
        cause = 1 + CAUSE_CODES[state.miss_cause(namespace, keys[n_lead])] if n_lead < len(keys) else 0
        if request.prefix:
            found = found[:n_lead]
        n_replicas, holders, tiers, seen = _pack_replicas(found)
        infos = (state.holder_info(holder) for holder in seen)
        return pb.LocateReply(
            epoch=state.epoch,
            n_keys=len(found),
            n_replicas=n_replicas,
            holders=holders,
            tiers=tiers,
            holder_infos=[info for info in infos if info is not None],
            miss_cause=cause,
            complete=complete,
        )

    @_typed
    async def Match(self, request: pb.MatchRequest, context: Any) -> pb.MatchReply:
        state = self._state
        namespace = self._namespace(request.namespace)
        n_hashes = _count(request.hashes, HASH_BYTES, "hashes")
        shards = sorted(set(request.shards)) or [0]
        if len(shards) > SHARDS_MAX or shards[-1] > MAX_SHARD:
            raise InvalidArgument(f"shards: at most {SHARDS_MAX} of 0..{MAX_SHARD}")
        complete = state.complete()
        n, missing = n_hashes, None
        for shard in shards:
            keys = split_keys(pack_keys(request.hashes[: n * HASH_BYTES], shard=shard))
            found = state.catalog.match(namespace.spec.uid, keys)
            if found < n:
                n, missing = found, keys[found]
            if len(shards) > 1:
                await asyncio.sleep(0)
        state.counts.lookups += 1
        state.counts.lookup_keys += n_hashes
        cause = 0 if missing is None else 1 + CAUSE_CODES[state.miss_cause(namespace, missing)]
        return pb.MatchReply(epoch=state.epoch, n_blocks=n, miss_cause=cause, complete=complete)

    @_typed
    async def Place(self, request: pb.PlaceRequest, context: Any) -> pb.PlaceReply:
        state = self._state
        namespace = self._namespace(request.namespace)
        keys = _keys(request.keys)
        if not 1 <= len(keys) <= 2:
            raise InvalidArgument(f"keys: {len(keys)} keys; the first to be written is needed, its parent before it if any")
        if len(request.host_id) > HOST_ID_CHARS_MAX:
            raise InvalidArgument(f"host_id: at most {HOST_ID_CHARS_MAX} characters")
        if request.n_workers > PLACE_WORKERS_MAX:
            raise InvalidArgument(f"n_workers: {request.n_workers}; the limit is {PLACE_WORKERS_MAX}")
        up = {m.info.worker_id: m for m in state.members if m.told_state is WorkerState.UP and m.connected}
        now_ms = state.now_ms()
        parents = set()
        if len(keys) == 2:
            members = (state.members.of_holder(holder) for holder, _ in state.locate(namespace, keys[:1])[0])
            parents = {member.info.worker_id for member in members if member is not None}
        chosen = place(
            [Candidate(w, m.info.host_id, m.free_bytes, m.capacity_bytes, share(m.up_ms(now_ms))) for w, m in up.items()],
            key=keys[-1],
            parent_workers=parents,
            host_id=request.host_id,
            need_bytes=request.bytes,
            n_workers=request.n_workers or 1,
        )
        infos = (state.holder_info(up[candidate.worker_id].holder) for candidate in chosen)
        return pb.PlaceReply(epoch=state.epoch, workers=[info for info in infos if info is not None])

    # --- pins -----------------------------------------------------------------------------------------------------------

    @_typed
    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinReply:
        namespace = self._namespace(request.namespace)
        return await pinning.pin(self._state, self._sessions, namespace, _keys(request.keys), level=request.level,
                                 ttl_ms=request.ttl_ms, wait_s=_wait_s(context))  # fmt: skip

    @_typed
    async def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.PinReply:
        namespace = self._namespace(request.namespace)
        if request.all and request.keys:
            raise InvalidArgument("keys: must be empty when all pins are ended")
        keys = None if request.all else _keys(request.keys)
        return await pinning.unpin(self._state, self._sessions, namespace, keys, wait_s=_wait_s(context))

    @_typed
    async def ListPins(self, request: pb.ListPinsRequest, context: Any) -> pb.ListPinsReply:
        limit = min(request.limit or LIST_LIMIT_MAX, LIST_LIMIT_MAX)
        return pinning.list_pins(self._state, self._namespace(request.namespace), after=request.after, limit=limit)

    # --- what there is --------------------------------------------------------------------------------------------------

    @_typed
    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Any) -> pb.ListBlocksReply:
        state = self._state
        namespace = self._namespace(request.namespace)
        if len(request.after) not in (0, KEY_BYTES):
            raise InvalidArgument(f"after: {len(request.after)} bytes; a cursor of an earlier reply is needed, or none")
        limit = min(request.limit or LIST_LIMIT_MAX, LIST_LIMIT_MAX)
        async with self._listing:  # one at a time, and off the loop: it looks at every key
            names = state.catalog.keys(namespace.spec.uid)
            page = await asyncio.to_thread(page_of, names, after=request.after, limit=limit)
        found = state.catalog.locate(namespace.spec.uid, page)
        there = [(key, replicas) for key, replicas in zip(page, found, strict=True) if replicas]
        return pb.ListBlocksReply(
            epoch=state.epoch,
            keys=b"".join(key for key, _ in there),
            tiers=bytes(_union(replicas) for _, replicas in there),
            n_replicas=bytes(min(255, len(replicas)) for _, replicas in there),
            cursor=page[-1] if len(page) == limit else b"",
            pins=pinning.levels_of(namespace, [key for key, _ in there]),
        )

    @_typed
    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        state = self._state
        namespaces = []
        for uid, namespace in state.namespaces.items():
            pins = namespace.pins.counts() if len(namespace.pins) else {}
            dram_bytes, ssd_bytes = self._sessions.quotas.used(uid) if namespace.spec.quota_bytes else (0, 0)
            namespaces.append(
                pb.NamespaceStatus(
                    namespace=spec_to_proto(namespace.spec),
                    blocks=state.catalog.count(uid),
                    bytes=state.catalog.value_bytes(uid, block_bytes=namespace.spec.block_bytes),
                    pins_soft=pins.get(PinLevel.SOFT, 0),
                    pins_hard=pins.get(PinLevel.HARD, 0),
                    dram_bytes=dram_bytes,
                    ssd_bytes=ssd_bytes,
                )
            )
        return pb.DescribeReply(
            epoch=state.epoch,
            leader=state.leader,
            workers=state.worker_statuses(),
            namespaces=namespaces,
            replicas=state.catalog.replicas,
            index_bytes=state.catalog.index_bytes,
            complete=state.complete(),
        )

    # --- workers --------------------------------------------------------------------------------------------------------

    @_typed
    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        """The wish is in the store when this answers; how far the worker is, its status says."""
        state = self._state
        worker_id = WorkerId(request.worker_id)
        if request.cancel and request.forget:
            raise InvalidArgument("cancel: of a worker that is to be forgotten there is nothing to cancel")
        status = _status_of(state, worker_id)
        member = state.members.get(worker_id)
        if request.forget:
            if member is not None and member.connected:
                raise InvalidArgument(f"worker: {worker_id!r} is connected; drain it, and stop it, before it is forgotten")
            await state.forget(worker_id)
            return pb.DrainReply(epoch=state.epoch, worker=status)
        if member is None:
            raise InvalidArgument(f"worker: {worker_id!r} is down: nothing can be moved from it (--forget when it stays away)")
        task = await state.set_drain(member, draining=not request.cancel, rate_bytes=request.rate_bytes)
        self._sessions.tell_drain(worker_id, task)
        return pb.DrainReply(epoch=state.epoch, worker=_status_of(state, worker_id))

    @_typed
    async def ReportPeer(self, request: pb.ReportPeerRequest, context: Any) -> pb.ReportPeerReply:
        state = self._state
        state.counts.peers_reported += 1
        state.settle(state.members.suspect(WorkerId(request.worker_id), request.incarnation))
        return pb.ReportPeerReply(epoch=state.epoch)

    # --- removals -------------------------------------------------------------------------------------------------------

    @_typed
    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveReply:
        """Logged first, then told to all workers. `removed` when all that may have it confirmed; else `pending`, with names."""
        namespace = self._namespace(request.namespace)
        if request.all and request.keys:
            raise InvalidArgument("keys: must be empty when all blocks are removed")
        n_keys = len(_keys(request.keys))
        if not request.all and not n_keys:
            return pb.RemoveReply(epoch=self._state.epoch)
        return await self._remove(namespace, request.keys, everything=request.all, wait_s=_wait_s(context))

    async def _remove(self, namespace: Namespace, keys: bytes, *, everything: bool, wait_s: float) -> pb.RemoveReply:
        state = self._state
        async with self._removing:
            removal = await state.log_removal(namespace, keys, everything=everything)
            # No wait from here until the tasks are queued.
            had, n_index = state.take_out(namespace, removal)
            tasks = self._sessions.send_removal(namespace, removal)
            pending = set(state.known_away(namespace, {task.worker_id for task in tasks}))
        n_most = 0
        try:
            if tasks:
                await asyncio.wait([task.done for task in tasks], timeout=wait_s)
            for task in tasks:
                result = task.done.result() if task.done.done() else None
                if result is None:
                    pending.add(task.worker_id)
                    continue
                codes, n_removed = result
                n_most = max(n_most, n_removed)
                if not everything:
                    had = bytearray(np.bitwise_or(np.frombuffer(had, np.uint8), np.frombuffer(codes, np.uint8) != 0).tobytes())
        finally:
            self._sessions.give_up(tasks)
        if pending:
            state.counts.removals_pending += 1
        outcomes = bytes(_PENDING if pending else _REMOVED if was else _ABSENT for was in had)
        n_removed = max(n_index, n_most) if everything else sum(1 for was in had if was)
        return pb.RemoveReply(
            epoch=state.epoch, outcomes=outcomes, pending_workers=sorted(pending), n_removed=n_removed
        )

    # --- streams --------------------------------------------------------------------------------------------------------

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchEvent]:
        state = self._state
        counters = state.watch_counters
        try:
            if len(request.namespaces) > WATCHED_NAMESPACES_MAX:
                raise InvalidArgument(f"namespaces: {len(request.namespaces)}; the limit is {WATCHED_NAMESPACES_MAX}")
            for uid in request.namespaces:
                if len(uid) != UID_BYTES:
                    raise InvalidArgument(f"namespaces: {len(uid)} bytes; a uid of {UID_BYTES} is needed")
            if counters.watchers >= WATCHERS_MAX:
                raise QuotaExceeded(f"{WATCHERS_MAX} watchers are connected, which is the limit")
        except KVPoolError as error:
            await self.fail("Watch", error, context)
        counters.watchers += 1
        events = watch(
            state,
            frozenset(NamespaceUid(uid) for uid in request.namespaces),
            epoch=request.epoch,
            after_seq=request.after_seq,
            heartbeat_s=state.settings.heartbeat_ms / 1000,
            counters=counters,
        )
        try:
            async for event in events:
                yield event
        except Exception as error:
            await self.fail("Watch", error, context)
        finally:
            counters.watchers -= 1
            await events.aclose()

    async def Session(self, request_iterator: Any, context: Any) -> None:
        if self._sessions.open_streams >= SESSIONS_MAX:
            await self.fail("Session", QuotaExceeded(f"{SESSIONS_MAX} sessions are open, which is the limit"), context)
        try:
            await self._sessions.serve(context)
        except Exception as error:
            await self.fail("Session", error, context)


# --- what comes from the wire, and goes there ---------------------------------------------------------------------------


def _count(packed: bytes, item_bytes: int, field: str) -> int:
    n, rest = divmod(len(packed), item_bytes)
    if rest:
        raise InvalidArgument(f"{field}: {len(packed)} bytes are no whole number of {item_bytes}-byte {field}")
    if n > MAX_BATCH_KEYS:
        raise InvalidArgument(f"{field}: {n} in one message; the limit is {MAX_BATCH_KEYS}")
    return n


def _keys(packed: bytes) -> list[Key]:
    _count(packed, KEY_BYTES, "keys")
    return split_keys(packed)


def _status_of(state: MasterState, worker_id: WorkerId) -> pb.WorkerStatus:
    statuses = {status.info.worker_id: status for status in state.worker_statuses()}
    if worker_id not in statuses:
        names = sorted(statuses)[:WORKERS_NAMED_MAX]
        raise InvalidArgument(f"worker: {worker_id!r} is not known; known are {', '.join(names) or 'none'}")
    return statuses[worker_id]


def _wait_s(context: Any) -> float:
    left = context.time_remaining()
    return REMOVE_WAIT_S if left is None else max(0.0, min(REMOVE_WAIT_S, left - REMOVE_MARGIN_S))


def _union(replicas: Replicas) -> int:
    tiers = 0
    for _, tier in replicas:
        tiers |= tier
    return tiers


def _pack_replicas(found: Sequence[Replicas]) -> tuple[bytes, bytes, bytes, list[Holder]]:
    """n_replicas u8 [n_keys], holders u32 and tiers u8 of all, and the holders that occur."""
    counts = bytearray()
    holders: list[bytes] = []
    tiers: list[bytes] = []
    seen: dict[Holder, None] = {}
    packed: dict[int, tuple[int, bytes, bytes]] = {}  # by identity: keys that lie alike share their tuple
    for replicas in found:
        entry = packed.get(id(replicas))
        if entry is None:
            some = replicas[:REPLICAS_ANSWERED_MAX]
            names = np.array([holder for holder, _ in some], dtype="<u4").tobytes()
            entry = packed[id(replicas)] = (len(some), names, bytes(tier for _, tier in some))
            seen.update(dict.fromkeys(holder for holder, _ in some))
        counts.append(entry[0])
        holders.append(entry[1])
        tiers.append(entry[2])
    return bytes(counts), b"".join(holders), b"".join(tiers), list(seen)
