"""LMCache's remote storage on the pool.

Owns: LMCache's interface (RemoteConnector: exists, get, put, batches), the identity that keeps other models and settings apart,
and the lifetime of memory objects under calls that were given up. Interface: lmcache 0.5.6.

    plain     the value is the chunk's bytes: shape and type follow from its size and the engine's own (identity)
    described the value is LMCache's RemoteMetadata, then the bytes: layer-wise chunks, compressed ones
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import numpy as np
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

import kvpool
from kvpool.connectors.lmcache.jobs import Jobs
from kvpool.connectors.lmcache.values import Bytes, bytes_of, engine_key_digest, packed
from kvpool.connectors.pool_link import LinkSettings, PoolLink, identity_text, namespace_name
from kvpool.core.types import Outcome
from kvpool.errors import InvalidArgument

T = TypeVar("T")

log = logging.getLogger("kvpool.lmcache")

FORMAT: Final = "lmcache-remote/1"
PLUGIN: Final = "kvpool"  # type of the plug-in's name: "kvpool", "kvpool.second"
SCHEME: Final = "kvpool://"
THREADS: Final = 8
PUTS_MAX: Final = 64  # puts that wait: each keeps its chunks in LMCache's memory; more are dropped, which is a miss later
CALLS_MAX: Final = 256  # lookups and gets that wait
DESCRIBED_BYTES_MAX: Final = 4096  # of RemoteMetadata
SLACK_FACTOR: Final = 2  # a compressed chunk may be larger than the plain one
THERE: Final = frozenset((Outcome.STORED, Outcome.ALREADY, Outcome.UNLISTED))


class KVPoolConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes the connector for a plug-in named `kvpool` (or `kvpool.<instance>`), and for `remote_url: kvpool://host:port`."""

    def __init__(self) -> None:
        super().__init__(SCHEME)

    def can_parse(self, url: str) -> bool:
        name = url.removeprefix("plugin://")
        return url.startswith(SCHEME) or (name != url and name.split(".", 1)[0] == PLUGIN)

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        master = context.url.removeprefix(SCHEME).rstrip("/") if context.url.startswith(SCHEME) else None
        return KVPoolConnector(context.loop, context.local_cpu_backend, context.config, metadata=context.metadata,
                               plugin_name=context.plugin_name, master=master)  # fmt: skip


class KVPoolConnector(RemoteConnector):  # type: ignore[misc]
    """One worker's (or the scheduler's) connection. Coroutines run on LMCache's loop, the pool's calls on threads of their own.
    Every call ends by its deadline; a pool that is away or slow is a miss, a put that is not stored is said in the log."""

    def __init__(self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any, metadata: Any = None,
                 plugin_name: str | None = None, master: str | None = None) -> None:  # fmt: skip
        """`metadata`: LMCache's, default the backend's. Settings: `remote_storage_plugin.<name>.<key>` in extra_config."""
        self._metadata = metadata if metadata is not None else local_cpu_backend.metadata
        super().__init__(config, self._metadata)
        self.loop, self.local_cpu_backend = loop, local_cpu_backend
        name, given = _given(config, plugin_name)
        if master:
            given.setdefault("master", master)
        settings = LinkSettings.of(given, where=f"remote_storage_plugin.{name}")
        self._plain = config.remote_serde in (None, "naive") and not config.use_layerwise
        chunk_bytes = self.full_chunk_size_bytes
        block_bytes = chunk_bytes if self._plain else SLACK_FACTOR * chunk_bytes + DESCRIBED_BYTES_MAX
        self._chunk_tokens = int(self._metadata.chunk_size)
        model = str(self._metadata.model_name).rstrip("/").rpartition("/")[2]
        self._link = PoolLink(settings, name=namespace_name(str(given.get("namespace", "lmcache")), model),
                              identity=self._identity(config, given), block_bytes=block_bytes, block_tokens=self._chunk_tokens,
                              log=log)  # fmt: skip
        self._calls = Jobs("kvpool-lmcache", n_threads=THREADS, waiting_max=CALLS_MAX)
        self._puts = Jobs("kvpool-lmcache-put", n_threads=2, waiting_max=PUTS_MAX)
        self.puts_dropped = 0

    def _identity(self, config: Any, given: Mapping[str, Any]) -> str:
        """All that must be equal for a chunk's bytes to mean the same."""
        return identity_text({
            "format": FORMAT,
            "model": self._metadata.model_name,
            "revision": given.get("revision", ""),
            "dtype": "+".join(str(dtype) for dtype in self.meta_dtypes),
            "chunk_tokens": self._chunk_tokens,
            "shapes": "+".join("x".join(map(str, shape)) for shape in self.meta_shapes),
            "fmt": self.meta_fmt.name,
            "world_size": self._metadata.world_size,
            "serde": config.remote_serde or "naive",
            "layerwise": bool(config.use_layerwise),
            "hash": config.pre_caching_hash_algorithm,
            "hash_seed": os.environ.get("PYTHONHASHSEED", "unset"),
        })  # fmt: skip

    # --- lookups --------------------------------------------------------------------------------------------------------

    async def exists(self, key: CacheEngineKey) -> bool:
        """Whether the pool has the chunk."""
        return await self._on_thread(self.exists_sync, key, default=False)

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """The same, on the caller's thread."""
        return self._present([key], self._until())[0]

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """Leading chunks that the pool has: one question to the master."""
        hashes = kvpool.PrefixHashes(packed(map(engine_key_digest, keys)))
        if not keys:
            return 0
        return self._link.ask("match", lambda ns: ns.match(hashes, deadline_ms=self._link.deadline_ms()), 0)

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Leading chunks that the pool has. `pin` has no counterpart: what is evicted before the get is a miss."""
        del lookup_id, pin
        return await self._on_thread(self.batched_contains, keys, default=0)

    def _until(self, n_chunks: int = 0) -> float:
        """When a call that begins now and moves so many chunks must have ended."""
        return time.monotonic() + self._link.deadline_ms(n_chunks * self.full_chunk_size_bytes) / 1e3

    def _present(self, keys: Sequence[CacheEngineKey], until: float) -> list[bool]:
        digests = packed(map(engine_key_digest, keys))
        found = self._link.ask("exists", lambda ns: ns.keyed().locate(digests, deadline=until), None)
        return [False] * len(keys) if found is None else [bool(places) for places in found]

    # --- gets -----------------------------------------------------------------------------------------------------------

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """The chunk in a new memory object (the caller's, one reference), or None."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Each chunk in a new memory object, None for what the pool does not have. [n]"""
        nothing: list[MemoryObj | None] = [None] * len(keys)
        return await self._on_thread(self._get, list(keys), default=nothing, undo=_release)

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[CacheEngineKey]) -> list[MemoryObj]:
        """The leading chunks."""
        del lookup_id
        found = await self.batched_get(keys)
        n = found.index(None) if None in found else len(found)
        _release(found[n:])
        return [obj for obj in found[:n] if obj is not None]

    def _get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        found: list[MemoryObj | None] = [None] * len(keys)
        until = self._until(len(keys))
        there = [index for index, present in enumerate(self._present(keys, until)) if present]
        if there:
            digests = [engine_key_digest(keys[index]) for index in there]
            read = self._get_plain if self._plain else self._get_described
            for index, obj in zip(there, read(digests, until), strict=True):
                found[index] = obj
        return found

    def _get_plain(self, digests: Sequence[bytes], until: float) -> list[MemoryObj | None]:
        objs: list[MemoryObj] = []
        for _ in digests:
            obj = self._allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
            if obj is None:
                break
            objs.append(obj)
        outs = [bytes_of(obj).data for obj in objs]
        hashes = packed(digests[: len(objs)])
        got = self._link.ask("get", lambda ns: ns.keyed().get(hashes, outs, deadline=until), None)
        found: list[MemoryObj | None] = [None] * len(digests)
        for index, obj in enumerate(objs):
            found[index] = None if got is None or not got.got[index] else self._shaped(obj, got.sizes[index])
            if found[index] is not obj:
                obj.ref_count_down()
        return found

    def _shaped(self, obj: MemoryObj, size: int) -> MemoryObj | None:
        """The object itself when the chunk is a full one, a smaller copy when it has fewer tokens, None when it is neither."""
        if size == self.full_chunk_size_bytes:
            return obj
        tokens, rest = divmod(size, self.single_token_size)
        if rest or not 0 < tokens < self._chunk_tokens:
            self._link.warn("size", "event=wrong_size: a value of %d bytes is no chunk; it is not used", size)
            return None
        part = self._allocate(self._metadata.get_shapes(tokens), self.meta_dtypes, self.meta_fmt)
        if part is not None:
            np.copyto(bytes_of(part), bytes_of(obj)[:size])
        return part

    def _get_described(self, digests: Sequence[bytes], until: float) -> list[MemoryObj | None]:
        """Values that say themselves what they are: the head of all, then each one's bytes straight into its object."""
        n_head = self.remote_metadata_bytes
        heads = [bytearray(n_head) for _ in digests]
        outs = [memoryview(head) for head in heads]
        got = self._link.ask(
            "get", lambda ns: ns.keyed().get(packed(digests), outs, deadline=until, byte_range=(0, n_head)), None)  # fmt: skip
        found: list[MemoryObj | None] = [None] * len(digests)
        for index in range(len(digests)):
            if got is not None and got.got[index]:
                found[index] = self._get_body(digests[index], bytes(heads[index]), until)
        return found

    def _get_body(self, digest: bytes, head: bytes, until: float) -> MemoryObj | None:
        described = RemoteMetadata.deserialize(head)
        obj = self._allocate(described.shapes, described.dtypes, described.fmt)
        if obj is None:
            return None
        out, at = bytes_of(obj), len(head)
        if out.nbytes == described.length:
            got = self._link.ask("get", lambda ns: ns.keyed().get(digest, [out.data], deadline=until,
                                                                  byte_range=(at, out.nbytes)), None)  # fmt: skip
            if got is not None and got.got[0]:
                return obj
        obj.ref_count_down()
        return None

    def _allocate(self, shapes: Any, dtypes: Any, fmt: Any) -> MemoryObj | None:
        """A memory object; None when LMCache's memory is full. Never waits for room."""
        try:
            obj = self.local_cpu_backend.allocate(shapes, dtypes, fmt, busy_loop=False)
        except Exception as error:
            self._link.warn("allocate", "event=no_memory reason=%s", error)
            return None
        if obj is None:
            self._link.warn("allocate", "event=no_memory: LMCache's memory is full; the chunk counts as a miss")
        return obj

    # --- puts -----------------------------------------------------------------------------------------------------------

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Stores the chunk."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """Stores the chunks: one call to the pool. The objects are read until it has ended, also when nobody waits any more."""
        objs = list(memory_objs)
        for obj in objs:
            obj.ref_count_up()
        future = self._puts.submit(self._put, list(keys), objs)
        if future is None:
            _release(objs)
            self.puts_dropped += len(objs)
            self._link.warn("dropped", "event=puts_dropped n=%d: too many puts wait already", self.puts_dropped)
            return
        future.add_done_callback(functools.partial(_release_when_done, objs))
        await asyncio.wrap_future(future)

    def _put(self, keys: Sequence[CacheEngineKey], objs: Sequence[MemoryObj]) -> None:
        digests: list[bytes] = []
        blocks: list[Bytes] = []
        for key, obj in zip(keys, objs, strict=True):
            value = self._value(obj)
            if value is not None:
                digests.append(engine_key_digest(key))
                blocks.append(value)
        if not blocks:
            return
        hashes, n_bytes = kvpool.PrefixHashes(packed(digests)), sum(block.nbytes for block in blocks)
        put = self._link.ask("put", lambda ns: ns.put(hashes, blocks, deadline_ms=self._link.deadline_ms(n_bytes)), None)
        lost = [] if put is None else [i for i, outcome in enumerate(put.outcomes) if outcome not in THERE]
        if put is not None and lost:
            self._link.warn("put", "event=not_stored n=%d: %s (%s)", len(lost), put.outcomes[lost[0]].value, put.reasons[lost[0]])

    def _value(self, obj: MemoryObj) -> Bytes | None:
        """What is stored for the object; None for what could not be told apart when it is read."""
        data = bytes_of(obj)
        if not self._plain:
            head = RemoteMetadata(data.nbytes, obj.get_shapes(), obj.get_dtypes(), obj.get_memory_format()).serialize()
            return np.concatenate([np.frombuffer(head, np.uint8), data])
        tokens, rest = divmod(data.nbytes, self.single_token_size)
        if not rest and 0 < tokens <= self._chunk_tokens and obj.get_memory_format() == self.meta_fmt:
            shapes = obj.get_shapes() if obj.metadata.shapes is not None else [obj.get_shape()]
            if list(shapes) == list(self._metadata.get_shapes(tokens)):
                return data
        self._link.warn("shape", "event=not_stored: a chunk of shape %s and format %s is not one of this engine's",
                        obj.get_shape(), obj.get_memory_format())  # fmt: skip
        return None

    # --- the rest -------------------------------------------------------------------------------------------------------

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Removes the chunk from the pool for good; whether it was there."""
        hashes = kvpool.PrefixHashes(engine_key_digest(key))
        removed = self._link.ask("remove", lambda ns: ns.remove(hashes, deadline_ms=self._link.deadline_ms()), None)
        return removed is not None and removed.outcomes[0] is not kvpool.RemoveOutcome.ABSENT

    async def list(self) -> list[str]:
        """Always empty: the pool keeps digests of keys, not their text."""
        self._link.warn("list", "event=no_list: the pool keeps digests of keys, not their text")
        return []

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """0 when the pool's master answers, else 1."""
        return await self._on_thread(self._ping, default=1)

    def _ping(self) -> int:
        nobody = kvpool.PrefixHashes(bytes(31) + b"\x01")
        deadline_ms = self._link.deadline_ms()
        return self._link.ask("ping", lambda ns: min(0, ns.match(nobody, deadline_ms=deadline_ms)), 1)

    async def close(self) -> None:
        """Ends calls and connections. Later calls find nothing. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self.close_sync)

    def close_sync(self) -> None:
        """The same, on the caller's thread."""
        self._link.close()
        self._calls.close()
        self._puts.close()

    async def _on_thread(self, call: Callable[..., T], *args: Any, default: T, undo: Callable[[T], object] | None = None) -> T:
        """`call` on one of the threads. When the coroutine is cancelled, `undo` gets what the call gives after all."""
        future = self._calls.submit(call, *args)
        if future is None:
            return default
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                future.add_done_callback(functools.partial(_undo, undo))
            raise
        except Exception:
            log.exception("event=call_failed call=%s", getattr(call, "__name__", call))
            return default

    def __repr__(self) -> str:
        return f"KVPoolConnector({self._link.name!r})"


def _given(config: Any, plugin_name: str | None) -> tuple[str, dict[str, Any]]:
    """The plug-in's name and its settings: `remote_storage_plugin.<name>.<key>` without the name."""
    extra = dict(config.extra_config or {})
    names = (
        [plugin_name] if plugin_name else [name for name in (config.remote_storage_plugins or []) if name.split(".")[0] == PLUGIN]
    )
    name = names[0] if names else PLUGIN
    prefix = f"remote_storage_plugin.{name}."
    given = {key.removeprefix(prefix): value for key, value in extra.items() if key.startswith(prefix)}
    known = {*LinkSettings.__dataclass_fields__, "namespace", "revision", "module_path", "class_name"}
    if unknown := sorted(given.keys() - known):
        raise InvalidArgument(f"{prefix}{unknown[0]}: unknown; allowed are {', '.join(sorted(known))}")
    return name, given


def _release(objs: Sequence[MemoryObj | None]) -> None:
    for obj in objs:
        if obj is not None:
            obj.ref_count_down()


def _release_when_done(objs: Sequence[MemoryObj], _future: Future[Any]) -> None:
    _release(objs)


def _undo(undo: Callable[[T], object], future: Future[T]) -> None:
    if not future.cancelled() and future.exception() is None:
        undo(future.result())
