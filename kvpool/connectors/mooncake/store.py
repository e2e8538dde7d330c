"""`MooncakeDistributedStore`: Mooncake's argument lists and return codes over a kvpool namespace.

Rules that all its users can live with: put returns exactly 0 when the pool has the value; get the full number of bytes or a code
below 0, never fewer bytes; exist 0 or 1; a key whose get failed does not exist for some seconds; buffers are the caller's again
when the call returns. No call raises for what the pool does; before `setup` and after `close` each returns its error answer.
TypeError for arguments of a wrong type, as the original.
"""

# ruff: noqa: ARG002 (the argument lists are Mooncake's)

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kvpool.connectors.mooncake.codes import INVALID_PARAMS, OBJECT_NOT_FOUND, OK, RPC_FAIL
from kvpool.connectors.mooncake.config import PinWish, ReplicateConfig, check_config, log, pin_wish, say_once
from kvpool.connectors.mooncake.memory import BufferHandle, view_of
from kvpool.connectors.mooncake.pool import Pieces, Pool, check_pieces, flat
from kvpool.connectors.mooncake.replicas import ReplicaDescriptor, descriptors_of
from kvpool.connectors.mooncake.sessions import Sessions
from kvpool.errors import KVPoolError
from kvpool.transport.base import LinkError

T = TypeVar("T")

SETUP_MS: Final = 5_000  # until there is no master
CLOSE_S: Final = 30.0  # until calls under way have ended; each has a deadline of its own


class MooncakeDistributedStore:
    """Thread-safe; blocking calls."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._pool: Pool | None = None
        self._sessions: Sessions | None = None
        self._under_way = 0
        self._hostname = ""
        self._registered: dict[int, int] = {}

    # --- life cycle -----------------------------------------------------------------------------------------------------

    def setup(self, local_hostname: str | dict[str, Any], metadata_server: str = "", global_segment_size: int = 16 << 20,
              local_buffer_size: int = 16 << 20, protocol: str = "tcp", rdma_devices: str = "", master_server_addr: str = "",
              engine: object = None, enable_ssd_offload: bool = False, ssd_offload_path: str = "", tenant_id: str = "default",
              enable_client_http_server: bool = False, client_http_port: int = 9300) -> int:  # fmt: skip
        """Connects to the kvpool master at `master_server_addr` ("host:port", several with commas; empty: KVPOOL_MASTER). 0;
        RPC_FAIL when no master answers within 5 s; INVALID_PARAMS for a wrong setting or a store that is set up already.
        A dict as the only argument has the same names as keys, and Mooncake's spellings of them."""
        if isinstance(local_hostname, dict):
            return self._setup_dict(local_hostname)
        if global_segment_size:
            say_once("segment", "global_segment_size=%s: kvpool's workers own the memory, this process lends none",
                     global_segment_size)  # fmt: skip
        if protocol not in ("tcp", "shm", ""):
            say_once("protocol", "protocol=%r: kvpool chooses the transport by itself", protocol)
        if enable_ssd_offload:
            say_once("ssd", "enable_ssd_offload: kvpool's workers own the SSD tier (kvpool worker --ssd)")
        if enable_client_http_server:
            say_once("http", "enable_client_http_server: kvpool's workers and master serve metrics, clients do not")
        with self._lock:
            if self._pool is not None:
                return INVALID_PARAMS
            try:
                pool = Pool(master_server_addr or None, tenant=tenant_id, connect_ms=SETUP_MS)
            except KVPoolError as error:
                log.error("setup: %s", error)
                return RPC_FAIL if error.retryable else INVALID_PARAMS
            self._pool, self._sessions, self._hostname = pool, Sessions(pool), local_hostname
        return OK

    def _setup_dict(self, config: dict[str, Any]) -> int:
        def text(*names: str, default: str = "") -> str:
            return next((str(config[name]) for name in names if config.get(name) is not None), default)

        if not text("local_hostname"):
            log.error("setup: local_hostname is missing")
            return INVALID_PARAMS
        return self.setup(
            text("local_hostname"), text("metadata_server"), _n_bytes(config.get("global_segment_size", 0)),
            _n_bytes(config.get("local_buffer_size", 0)), text("protocol", default="tcp"), text("rdma_devices", "device_name"),
            text("master_server_addr", "master_server_address"),
            enable_ssd_offload=text("enable_ssd_offload").lower() in ("true", "1"),
            ssd_offload_path=text("ssd_offload_path"), tenant_id=text("tenant_id", default="default"),
        )  # fmt: skip

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """As `setup` with the master at `server_address`: every kvpool client is one that owns no memory."""
        return self.setup("", "", 0, local_buffer_size, "tcp", "", server_address)

    def init_all(self, protocol: str, device: str, mount_size: int = 16 << 20) -> int:
        """As `setup` with the master of KVPOOL_MASTER."""
        return self.setup("", "", mount_size, 0, protocol, device, "")

    def close(self) -> int:
        """0. Calls under way in other threads end with an error code first: afterwards nothing touches a caller's buffer."""
        with self._lock:
            pool, self._pool, self._sessions = self._pool, None, None
            self._registered.clear()
        if pool is not None:
            pool.close()
            with self._lock:
                if not self._lock.wait_for(lambda: not self._under_way, timeout=CLOSE_S):
                    log.error("close: calls are still under way after %s s", CLOSE_S)
                    return RPC_FAIL
        return OK

    def health_check(self) -> int:
        """0 when the master answers; 1 before setup and after close; RPC_FAIL else."""

        def ask(pool: Pool) -> int:
            pool.client.describe()
            return OK

        return self._run(ask, RPC_FAIL, closed=1)

    def get_hostname(self) -> str:
        """As given to `setup`."""
        return self._hostname

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """0; INVALID_PARAMS for a range that overlaps a registered one. Only kept in mind: any memory works, here as over TCP."""
        _check_ints(buffer_ptr, size)
        with self._lock:
            if self._pool is None or buffer_ptr <= 0 or size <= 0:
                return INVALID_PARAMS
            if any(buffer_ptr < at + n and at < buffer_ptr + size for at, n in self._registered.items()):
                return INVALID_PARAMS
            self._registered[buffer_ptr] = size
        return OK

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """0; INVALID_PARAMS for what is not registered. Calls that use it must have returned, as everywhere."""
        _check_ints(buffer_ptr)
        with self._lock:
            return INVALID_PARAMS if self._registered.pop(buffer_ptr, None) is None else OK

    def _run(self, work: Callable[[Pool], T], failed: T, *, closed: T | None = None) -> T:
        """`work` on the open pool; `failed` for what the pool cannot do now, `closed` (default: `failed`) when there is none."""
        with self._lock:
            pool = self._pool
            if pool is None:
                return failed if closed is None else closed
            self._under_way += 1
        try:
            return work(pool)
        except (KVPoolError, LinkError) as error:
            if self._pool is pool:
                log.warning("%s", error)
            return failed
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._lock.notify_all()

    # --- lookups --------------------------------------------------------------------------------------------------------

    def is_exist(self, key: str) -> int:
        """1 or 0."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1 or 0 each; 0 also when it cannot be told."""
        keys = _names(keys)
        return self._run(lambda pool: pool.exists(keys), [0] * len(keys))

    def get_size(self, key: str) -> int:
        """Bytes of the value; OBJECT_NOT_FOUND."""
        keys = _names([key])
        size = self._run(lambda pool: pool.sizes(keys)[0], RPC_FAIL, closed=INVALID_PARAMS)
        return OBJECT_NOT_FOUND if size == -1 else size

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Where the value is: one per worker and tier. [] when it is not there."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Of those keys that are there."""
        keys = _names(keys)

        def ask(pool: Pool) -> dict[str, list[ReplicaDescriptor]]:
            places, sizes = pool.places(keys), pool.sizes(keys)
            return {key: descriptors_of(there, size, pool.keyed.address)
                    for key, there, size in zip(keys, places, sizes, strict=True) if there and size > 0}  # fmt: skip

        return self._run(ask, {})

    # --- puts -----------------------------------------------------------------------------------------------------------

    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Stores the bytes of any buffer; 0 also when the key has a value, which then stays."""
        return self._put([key], [[flat(value, "value")]], config)[0]

    def put_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """The parts one after the other as one value."""
        return self._put([key], [[flat(part, "part") for part in parts]], config)[0]

    def put_batch(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None) -> int:
        """0 when all were stored, else the first other code."""
        if len(keys) != len(values):
            return INVALID_PARAMS
        return _first_bad(self._put(keys, [[flat(value, "value")] for value in values], config))

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """`size` bytes at `buffer_ptr`."""
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def put_from_with_metadata(self, key: str, buffer_ptr: int, metadata_buffer_ptr: int, size: int, metadata_size: int,
                               config: ReplicateConfig | None = None) -> int:  # fmt: skip
        """The metadata and then the data as one value."""
        pointers, sizes = [metadata_buffer_ptr, buffer_ptr], [metadata_size, size]
        return self.batch_put_from_multi_buffers([key], [pointers], [sizes], config)[0]

    def batch_put_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int],
                       config: ReplicateConfig | None = None) -> list[int]:  # fmt: skip
        """A code each."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._put_pieces(keys, [[p] for p in buffer_ptrs], [[n] for n in sizes], config)

    def batch_put_from_multi_buffers(self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]],
                                     all_sizes: Sequence[Sequence[int]],
                                     config: ReplicateConfig | None = None) -> list[int]:  # fmt: skip
        """Each value is made of its parts, in order. A code each."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._put_pieces(keys, all_buffer_ptrs, all_sizes, config)

    # --- upserts --------------------------------------------------------------------------------------------------------

    def upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Puts the value in the place of the one that may be there. Readers see the old value, for a moment none, or the new one;
        never a mixture. RPC_FAIL: a worker with the old value could not confirm its removal, nothing new was put."""
        return self._put([key], [[flat(value, "value")]], config, replace=True)[0]

    def upsert_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """As `upsert`, of parts."""
        return self._put([key], [[flat(part, "part") for part in parts]], config, replace=True)[0]

    def upsert_batch(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None) -> int:
        """0 when all were stored, else the first other code."""
        if len(keys) != len(values):
            return INVALID_PARAMS
        return _first_bad(self._put(keys, [[flat(value, "value")] for value in values], config, replace=True))

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """As `upsert`, from memory."""
        return self.batch_upsert_from([key], [buffer_ptr], [size], config)[0]

    def batch_upsert_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int],
                          config: ReplicateConfig | None = None) -> list[int]:  # fmt: skip
        """A code each."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._put_pieces(keys, [[p] for p in buffer_ptrs], [[n] for n in sizes], config, replace=True)

    def _put_pieces(self, keys: Sequence[str], pointers: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]],
                    config: ReplicateConfig | None, *, replace: bool = False) -> list[int]:  # fmt: skip
        good = [check_pieces(p, n) for p, n in zip(pointers, sizes, strict=True)]
        codes = [INVALID_PARAMS] * len(keys)
        picked = [i for i, one in enumerate(good) if one]
        values: list[Pieces] = [(pointers[i], sizes[i]) for i in picked]
        if not check_config(config, len(keys)):
            return codes
        done = self._put([keys[i] for i in picked], values, None, replace=replace, pins=pin_wish(config))
        for i, code in zip(picked, done, strict=True):
            codes[i] = code
        return codes

    def _put(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None, *,
             replace: bool = False, pins: PinWish | None = None) -> list[int]:  # fmt: skip
        keys = _names(keys)
        pins = pins or pin_wish(config)
        if not check_config(config, len(keys)):
            return [INVALID_PARAMS] * len(keys)
        closed = [INVALID_PARAMS] * len(keys)
        return self._run(lambda pool: pool.put(keys, values, replace=replace, pins=pins), [RPC_FAIL] * len(keys), closed=closed)

    # --- gets -----------------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        """The value; b"" when it is not there or cannot be got."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """The values; b"" for what is not there."""
        return [b"" if value is None else bytes(value) for value in self._fetch(keys)]

    def get_buffer(self, key: str) -> BufferHandle | None:
        """The value as a buffer; None when it is not there."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """The values as buffers; None for what is not there."""
        return self._fetch(keys)

    def _fetch(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        keys = _names(keys)
        return self._run(lambda pool: pool.fetch(keys), [None] * len(keys))

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """The value into memory of at least its size; its bytes, or a code below 0."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """As `get_into`, each."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._get([*keys], [([p], [n]) for p, n in zip(buffer_ptrs, sizes, strict=True)], exact=False)

    def batch_get_into_multi_buffers(self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]],
                                     all_sizes: Sequence[Sequence[int]],
                                     prefer_alloc_in_same_node: bool = False) -> list[int]:  # fmt: skip
        """Each value over its parts, which together must have its size; its bytes, or a code below 0."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._get([*keys], list(zip(all_buffer_ptrs, all_sizes, strict=True)), exact=True)

    def _get(self, keys: Sequence[str], targets: Sequence[Pieces], *, exact: bool) -> list[int]:
        keys = _names(keys)
        good = [i for i, (pointers, sizes) in enumerate(targets) if check_pieces(pointers, sizes)]
        codes = [INVALID_PARAMS] * len(keys)
        picked, into = [keys[i] for i in good], [targets[i] for i in good]
        done = self._run(lambda pool: pool.get(picked, into, exact=exact), [RPC_FAIL] * len(good),
                         closed=[INVALID_PARAMS] * len(good))  # fmt: skip
        for i, code in zip(good, done, strict=True):
            codes[i] = code
        return codes

    def get_into_ranges(self, buffer_ptrs: Sequence[int], all_keys: Sequence[Sequence[str]],
                        all_dst_offsets: Sequence[Sequence[Sequence[int]]], all_src_offsets: Sequence[Sequence[Sequence[int]]],
                        all_sizes: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:  # fmt: skip
        """For each buffer and key: byte ranges of the value to offsets in the buffer. Bytes of each range, or a code below 0."""
        answers = []
        for pointer, keys, targets, sources, sizes in zip(
            buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, strict=True
        ):
            _check_ints(pointer)
            ranges = [(i, j, pointer + at, source, size)
                      for i, (ats, froms, lengths) in enumerate(zip(targets, sources, sizes, strict=True))
                      for j, (at, source, size) in enumerate(zip(ats, froms, lengths, strict=True))]  # fmt: skip
            found = [[INVALID_PARAMS] * len(lengths) for lengths in sizes]
            codes = self._get_ranges([(keys[i], to, source, size) for i, _, to, source, size in ranges])
            for (i, j, *_), code in zip(ranges, codes, strict=True):
                found[i][j] = code
            answers.append(found)
        return answers

    def _get_ranges(self, ranges: Sequence[tuple[str, int, int, int]]) -> list[int]:
        """(key, pointer, offset in the value, bytes) each: equal ranges of several keys are one question."""
        codes = [INVALID_PARAMS] * len(ranges)
        groups: dict[tuple[int, int], list[int]] = {}
        for index, (_, pointer, source, size) in enumerate(ranges):
            _check_ints(pointer, source, size)
            if pointer > 0 and source >= 0 and size > 0:
                groups.setdefault((source, size), []).append(index)
        for (source, size), indices in groups.items():
            keys = _names([ranges[i][0] for i in indices])
            views = [view_of(ranges[i][1], size, writable=True) for i in indices]

            def ask(pool: Pool, keys: list[str] = keys, views: list[memoryview] = views, source: int = source) -> list[int]:
                return pool.get_range(keys, views, source)

            done = self._run(ask, [RPC_FAIL] * len(keys), closed=[INVALID_PARAMS] * len(keys))
            for i, code in zip(indices, done, strict=True):
                codes[i] = code
        return codes

    # --- sessions -------------------------------------------------------------------------------------------------------

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """0, or OBJECT_NOT_FOUND, each. What is there stays readable until the session's end, or a minute has passed."""
        keys = _names(keys)
        return self._in_sessions(lambda sessions: sessions.get_start(keys), [RPC_FAIL] * len(keys))

    def batch_get_into_multi_buffer_ranges(self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]],
                                           all_sizes: Sequence[Sequence[int]],
                                           all_src_offsets: Sequence[Sequence[int]]) -> list[int]:  # fmt: skip
        """For each key of a session: `sizes[i]` bytes from `src_offsets[i]` on into `buffer_ptrs[i]`. The sum of the sizes, or a
        code below 0."""
        keys, codes = _names(keys), [INVALID_PARAMS] * len(keys)
        sessions = self._sessions
        if sessions is None or not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_src_offsets):
            return codes
        ranges, owners = [], []
        for i, key in enumerate(keys):
            if sessions.is_open(key) and len(all_buffer_ptrs[i]) == len(all_sizes[i]) == len(all_src_offsets[i]) > 0:
                codes[i] = 0
                for pointer, size, source in zip(all_buffer_ptrs[i], all_sizes[i], all_src_offsets[i], strict=True):
                    ranges.append((key, pointer, source, size))
                    owners.append(i)
        for i, code in zip(owners, self._get_ranges(ranges), strict=True):
            codes[i] = min(code, codes[i]) if min(code, codes[i]) < 0 else codes[i] + code
        return codes

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """0."""
        keys = _names(keys)
        return self._in_sessions(lambda sessions: sessions.get_end(keys), RPC_FAIL)

    def batch_put_session_start(self, keys: Sequence[str], sizes: Sequence[int],
                                config: ReplicateConfig | None = None) -> list[int]:  # fmt: skip
        """Room for each value: 0, OBJECT_ALREADY_EXISTS, or another code below 0."""
        keys = _names(keys)
        if len(keys) != len(sizes) or not check_config(config, len(keys)):
            return [INVALID_PARAMS] * len(keys)
        return self._in_sessions(lambda sessions: sessions.put_start(keys, sizes), [RPC_FAIL] * len(keys))

    def batch_put_from_multi_buffer_ranges(self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]],
                                           all_sizes: Sequence[Sequence[int]],
                                           all_dst_offsets: Sequence[Sequence[int]]) -> list[int]:  # fmt: skip
        """For each key of a session: `sizes[i]` bytes at `buffer_ptrs[i]` to `dst_offsets[i]`. The sum of the sizes, or a code
        below 0."""
        keys = _names(keys)
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_dst_offsets):
            return [INVALID_PARAMS] * len(keys)
        codes = []
        for key, pointers, sizes, offsets in zip(keys, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True):
            _check_ints(*pointers, *sizes, *offsets)
            if not len(pointers) == len(sizes) == len(offsets) > 0:
                codes.append(INVALID_PARAMS)
                continue
            parts = list(zip(pointers, sizes, offsets, strict=True))

            def write(sessions: Sessions, key: str = key, parts: list[tuple[int, int, int]] = parts) -> int:
                return sessions.put_parts(key, parts)

            codes.append(self._in_sessions(write, INVALID_PARAMS))
        return codes

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """0: visible; else a code below 0."""
        keys = _names(keys)
        return self._in_sessions(lambda sessions: sessions.put_end(keys), [RPC_FAIL] * len(keys))

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """0: nothing of the value is left; INVALID_PARAMS: no session."""
        keys = _names(keys)
        return self._in_sessions(lambda sessions: sessions.put_revoke(keys), [RPC_FAIL] * len(keys))

    def _in_sessions(self, work: Callable[[Sessions], T], failed: T) -> T:
        sessions = self._sessions
        return failed if sessions is None else self._run(lambda _: work(sessions), failed)

    # --- removal --------------------------------------------------------------------------------------------------------

    def remove(self, key: str, force: bool = False) -> int:
        """0; OBJECT_NOT_FOUND; RPC_FAIL when a worker that may have it has not confirmed. There are no leases to force."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """As `remove`, each."""
        keys = _names(keys)
        return self._run(lambda pool: pool.remove(keys), [RPC_FAIL] * len(keys), closed=[INVALID_PARAMS] * len(keys))

    def remove_all(self, force: bool = False) -> int:
        """Removes everything of the tenant; how many values there were."""
        return self._run(lambda pool: pool.remove_all(), RPC_FAIL, closed=INVALID_PARAMS)

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Removes the values in whose key the pattern (Python's) is found; how many. INVALID_PARAMS for no pattern. A value whose
        name was evicted is not seen (see the README)."""
        try:
            pattern = re.compile(regex_pattern)
        except re.error:
            return INVALID_PARAMS

        def remove(pool: Pool) -> int:
            codes = pool.remove_digests([digest for name, digest in pool.listing().items() if pattern.search(name)])
            return codes.count(OK)

        return self._run(remove, RPC_FAIL, closed=INVALID_PARAMS)

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """The keys that were removed. With a segment name: none, since copies on one worker are the pool's own affair."""
        keys = _names(keys)
        if segment_name:
            say_once("clear", "batch_replica_clear: segment_name has no counterpart in kvpool; nothing is cleared")
            return []
        codes = self.batch_remove(keys)
        return [key for key, code in zip(keys, codes, strict=True) if code == OK]

    def get_all_keys(self) -> list[str]:
        """Names of all values (not in Mooncake's Python API; there the master's HTTP port has it)."""
        return self._run(lambda pool: sorted(pool.listing()), [])


def _names(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str):
        raise TypeError("keys: must be a list of strings, not one string")
    names = list(keys)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"key: must be a string, not {type(name).__name__}")
    return names


def _check_ints(*numbers: object) -> None:
    for number in numbers:
        if not isinstance(number, int):
            raise TypeError(f"pointers and sizes must be integers, not {type(number).__name__}")


def _first_bad(codes: Sequence[int]) -> int:
    return next((code for code in codes if code != OK), OK)


def _n_bytes(value: Any) -> int:
    """A number, or text like "16MB"; 0 for what is none."""
    found = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)i?b?\s*", str(value).lower())
    return int(float(found[1]) * 1024 ** " kmgt".index(found[2] or " ")) if found else 0
