"""LMCache's multi-process mode: the pool as its second tier behind LMCache's own memory.

Owns: LMCache's interface of tasks and event descriptors (L2AdapterInterface), and the locks that a lookup takes, which are the
pool's holds. Each submit returns at once; the pool's calls run on threads, a bounded number of them waits, what is over that has
failed at once. Interface: lmcache 0.5.6.

A value is an object's bytes. Its key is made of all fields of LMCache's key and of the object's shape and type, so that engines
whose chunks differ in these share nothing. Objects of plain bytes (LMCache's serde) have no type: there `identity` must tell.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

import kvpool
from kvpool.connectors.lmcache.jobs import Jobs
from kvpool.connectors.lmcache.values import bytes_of, object_key_digest, packed
from kvpool.connectors.pool_link import LinkSettings, PoolLink, identity_text, namespace_name
from kvpool.core.types import MAX_BLOCK_BYTES, Outcome
from kvpool.errors import InvalidArgument

log = logging.getLogger("kvpool.lmcache")

FORMAT: Final = "lmcache-l2/1"
THREADS: Final = 4
TASKS_MAX: Final = 512  # that wait; a store keeps its objects in LMCache's memory meanwhile
BLOCK_BYTES: Final = 64 << 20  # the largest object, unless `max_object_bytes` says otherwise
HOLD_TTL_MS: Final = 30_000  # a lock that nobody gives back ends by its time
HOLD_RUNS_MAX: Final = 16  # of one lookup: what lies in more pieces is found, not locked
LOCKS_MAX: Final = 65_536  # keys with a lock; about 200 bytes each
LAYOUTS_MAX: Final = 64  # remembered, for `delete`
PLAIN_BYTES: Final = "bytes"  # layout of objects without a type
STORED: Final = frozenset((Outcome.STORED, Outcome.UNLISTED))
THERE: Final = STORED | {Outcome.ALREADY}
OWN_KEYS: Final = frozenset((*LinkSettings.__dataclass_fields__, "namespace", "identity", "max_object_bytes"))


class KVPoolL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Thread-safe: LMCache's store and prefetch controllers call it at the same time."""

    def __init__(self, params: Mapping[str, Any] | None = None, l1_memory_desc: Any = None) -> None:
        """`params`: `adapter_params` of the plug-in's configuration, see `clients/lmcache/README.md`."""
        super().__init__(max_capacity_bytes=0)  # the pool evicts by itself
        del l1_memory_desc
        given = dict(params or {})
        if unknown := sorted(given.keys() - OWN_KEYS):
            raise InvalidArgument(f"adapter_params: {unknown[0]}: unknown; allowed are {', '.join(sorted(OWN_KEYS))}")
        size = given.get("max_object_bytes", BLOCK_BYTES)
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= MAX_BLOCK_BYTES:
            raise InvalidArgument(f"adapter_params: max_object_bytes: {size!r} is not in 1..{MAX_BLOCK_BYTES}")
        settings = LinkSettings.of(given, where="adapter_params")
        identity = identity_text({"format": FORMAT, "identity": given.get("identity", ""), "max_object_bytes": size})
        self._link = PoolLink(settings, name=namespace_name(str(given.get("namespace", "lmcache-l2"))), identity=identity,
                              block_bytes=size, block_tokens=1, log=log)  # fmt: skip
        self._max_object_bytes = size
        self._store_done, self._lookup_done, self._load_done = (create_event_notifier() for _ in range(3))
        self._jobs = Jobs("kvpool-l2", n_threads=THREADS, waiting_max=TASKS_MAX)
        self._lock = threading.Lock()
        self._next_task = 0
        self._stores: dict[int, L2StoreResult] = {}
        self._lookups: dict[int, Bitmap] = {}
        self._loads: dict[int, Bitmap] = {}
        self._locks: dict[Any, list[_Held]] = {}
        self._layouts: dict[str, None] = {PLAIN_BYTES: None}
        self._closed = False
        self.refused = 0  # tasks that failed because too many waited

    # --- descriptors ----------------------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return int(self._store_done.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_done.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._load_done.fileno())

    def _submit(self, results: dict[int, Any], notifier: Any, failed: Any, job: Callable[[], Any]) -> int:
        """A task's id. Its result is in `results` and the descriptor readable when `job` has ended, however it ended."""
        with self._lock:
            task_id = self._next_task
            self._next_task += 1

        def end(result: Any) -> None:
            with self._lock:
                if self._closed:
                    return
                results[task_id] = result
                notifier.notify()

        def run() -> None:
            result = failed
            try:
                result = job()
            except Exception:
                log.exception("event=task_failed task=%d", task_id)
            finally:
                end(result)

        if self._jobs.submit(run) is None:
            self.refused += 1
            self._link.warn("refused", "event=tasks_refused n=%d: too many wait already", self.refused)
            end(failed)
        return task_id

    # --- stores ---------------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Stores the objects' bytes. The task succeeds when the pool has all of them."""
        failed = L2StoreResult(False, 0)
        return self._submit(self._stores, self._store_done, failed, lambda: self._store(list(keys), list(objects)))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done = dict(self._stores)
            self._stores.clear()
        return done

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> L2StoreResult:
        blocks = [bytes_of(obj) for _, obj in zip(keys, objects, strict=True)]
        too_large = [block.nbytes for block in blocks if block.nbytes > self._max_object_bytes]
        if too_large:
            self._link.warn("large", "event=not_stored: an object of %d bytes; max_object_bytes is %d", too_large[0],
                            self._max_object_bytes)  # fmt: skip
            return L2StoreResult(False, 0)
        if not blocks:
            return L2StoreResult(True, 0)
        hashes = kvpool.PrefixHashes(packed(self._digest(key, layout_of(obj)) for key, obj in zip(keys, objects, strict=True)))
        ms = self._link.deadline_ms(sum(block.nbytes for block in blocks))
        put = self._link.ask("put", lambda ns: ns.put(hashes, blocks, deadline_ms=ms), None)
        if put is None:
            return L2StoreResult(False, 0)
        new = [index for index, outcome in enumerate(put.outcomes) if outcome in STORED]
        if new:
            self._notify_keys_stored([keys[i] for i in new], [blocks[i].nbytes for i in new])
        lost = [index for index, outcome in enumerate(put.outcomes) if outcome not in THERE]
        if lost:
            self._link.warn("put", "event=not_stored n=%d: %s (%s)", len(lost), put.outcomes[lost[0]].value, put.reasons[lost[0]])
        return L2StoreResult(not lost, sum(blocks[i].nbytes for i in new))

    # --- lookups --------------------------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Which of the keys the pool has. What it has is held for a while, as far as workers hold that much."""
        layouts = {group: layout_text(desc.shapes, desc.dtypes) for group, desc in (group_layout_descs or {}).items()}
        return self._submit(self._lookups, self._lookup_done, Bitmap(len(keys)), lambda: self._lookup(list(keys), layouts))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._lookups.pop(task_id, None)

    def _lookup(self, keys: Sequence[Any], layouts: Mapping[int, str]) -> Bitmap:
        typed = [self._digest(key, layouts.get(key.object_group_id, PLAIN_BYTES)) for key in keys]
        plain = [self._digest(key, PLAIN_BYTES) for key in keys]
        until = time.monotonic() + self._link.deadline_ms() / 1e3
        found = self._link.ask("lookup", lambda ns: ns.keyed().locate(packed(typed + plain), deadline=until), None)
        bitmap = Bitmap(len(keys))
        if found is None:
            return bitmap
        n = len(keys)
        there = [index for index in range(n) if found[index] or found[n + index]]
        bitmap.batched_set(there)
        self._hold([(keys[i], typed[i] if found[i] else plain[i]) for i in there], until)
        if there:
            self._notify_keys_accessed([keys[i] for i in there])
        return bitmap

    def _hold(self, there: Sequence[tuple[Any, bytes]], until: float) -> None:
        """Holds the keys, run after run: a hold ends at the first block that its worker does not promise."""
        at = 0
        for _ in range(HOLD_RUNS_MAX):
            ms = (until - time.monotonic()) * 1e3
            if at >= len(there) or len(self._locks) > LOCKS_MAX or ms <= 0:
                return
            hashes = kvpool.PrefixHashes(packed(digest for _, digest in there[at:]))
            hold = self._link.ask("hold", lambda ns, h=hashes, ms=ms: ns.hold(h, ttl_ms=HOLD_TTL_MS, deadline_ms=ms), None)  # type: ignore[misc]
            if hold is None:
                return
            if hold.n_blocks == 0:
                hold.release()
                at += 1
                continue
            held = _Held(hold, hold.n_blocks, time.monotonic() + HOLD_TTL_MS / 1e3)
            with self._lock:
                for key, _ in there[at : at + hold.n_blocks]:
                    self._locks.setdefault(key, []).append(held)
            at += hold.n_blocks

    def submit_unlock(self, keys: list[Any]) -> None:
        """Gives the locks of these keys back. A lock that cannot be given back (its worker is away) ends by its time."""
        free: list[_Held] = []
        with self._lock:
            for key in keys:
                helds = self._locks.get(key)
                if not helds:
                    continue
                held = helds.pop(0)
                held.left -= 1
                if held.left == 0:
                    free.append(held)
                if not helds:
                    del self._locks[key]
            self._drop_overdue()
        for held in free:
            self._jobs.submit(held.hold.release)

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for key in [key for key, helds in self._locks.items() if all(held.until < now for held in helds)]:
            del self._locks[key]

    # --- loads ----------------------------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Reads the values into the objects; the bit is set where all of an object's bytes came and were verified."""
        return self._submit(self._loads, self._load_done, Bitmap(len(keys)), lambda: self._load(list(keys), list(objects)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._loads.pop(task_id, None)

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Bitmap:
        bitmap = Bitmap(len(keys))
        outs = [bytes_of(obj).data for _, obj in zip(keys, objects, strict=True)]
        if not outs:
            return bitmap
        hashes = packed(self._digest(key, layout_of(obj)) for key, obj in zip(keys, objects, strict=True))
        until = time.monotonic() + self._link.deadline_ms(sum(out.nbytes for out in outs)) / 1e3
        got = self._link.ask("load", lambda ns: ns.keyed().get(hashes, outs, deadline=until), None)
        if got is not None:
            bitmap.batched_set([i for i, out in enumerate(outs) if got.got[i] and got.sizes[i] == out.nbytes])
        return bitmap

    # --- the rest -------------------------------------------------------------------------------------------------------

    def delete(self, keys: list[Any]) -> None:
        """Removes the objects from the pool for good, at the latest after a second."""
        with self._lock:
            layouts = list(self._layouts)
        digests = [self._digest(key, layout) for key in keys for layout in layouts]
        hashes = kvpool.PrefixHashes(packed(digests))
        removed = self._link.ask("delete", lambda ns: ns.remove(hashes) if keys else None, None)
        if removed is None:
            return
        n = len(layouts)
        gone = [key for i, key in enumerate(keys)
                if any(one is not kvpool.RemoveOutcome.ABSENT for one in removed.outcomes[i * n : (i + 1) * n])]  # fmt: skip
        if gone:
            self._notify_keys_deleted(gone, [0] * len(gone))

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            return {"is_healthy": self._link.is_open, "type": type(self).__name__, "namespace": self._link.name,
                    "locked_key_count": len(self._locks), "refused_tasks": self.refused,
                    "failed_calls": self._link.failures}  # fmt: skip

    def close(self) -> None:
        """Ends tasks (those that run by their deadline, those that wait at once), connections and descriptors. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            held = {id(one): one for helds in self._locks.values() for one in helds}
            self._locks.clear()
        for one in held.values():
            one.hold.release()
        self._link.close()
        self._jobs.close()
        for notifier in (self._store_done, self._lookup_done, self._load_done):
            notifier.close()

    def _digest(self, key: Any, layout: str) -> bytes:
        if layout not in self._layouts and len(self._layouts) < LAYOUTS_MAX:
            self._layouts[layout] = None
        return hashlib.sha256(object_key_digest(key) + layout.encode()).digest()


class _Held:
    """One hold, for `left` keys that are still locked."""

    __slots__ = ("hold", "left", "until")

    def __init__(self, hold: kvpool.Hold, left: int, until: float) -> None:
        self.hold, self.left, self.until = hold, left, until


def layout_of(obj: Any) -> str:
    """An object's shape and type in words."""
    meta = obj.metadata
    if meta.shapes is not None and meta.dtypes is not None:
        return layout_text(meta.shapes, meta.dtypes)
    return PLAIN_BYTES if meta.dtype is None else layout_text([meta.shape], [meta.dtype])


def layout_text(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    """Shapes and types in words; plain bytes have none."""
    if all(dtype is None or dtype == torch.uint8 for dtype in dtypes):
        return PLAIN_BYTES
    return json.dumps([[list(shape), str(dtype)] for shape, dtype in zip(shapes, dtypes, strict=True)], separators=(",", ":"))
