"""SGLang's HiCache on the pool: a storage backend for `--hicache-storage-backend dynamic`.

Owns: SGLang's interface (what each call answers when the pool is slow, away or dead: False, None, 0, never an exception) and the
identity that keeps other models' and layouts' pages apart. Pages and their bytes are in `pages`, the pool in `pool_link`.
Interface: sglang 0.5.23, `HiCacheStorage`.
"""

from __future__ import annotations

import difflib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvpool.connectors.pool_link import LinkSettings, PoolLink, identity_text, namespace_name
from kvpool.connectors.sglang_hicache.pages import HostPages, PageStore
from kvpool.errors import InvalidArgument

log = logging.getLogger("kvpool.sglang")

FORMAT: Final = "sglang-hicache/1"  # of keys and values; another one shares nothing
KV: Final = str(PoolName.KV)
OWN_KEYS: Final = frozenset((
    "master", "token_file", "transport", "deadline_ms", "start_wait_ms", "replicas", "quota_bytes", "namespace", "revision",
))  # fmt: skip
ENGINE_KEYS: Final = frozenset(("backend_name", "module_path", "class_name", "interface_v1"))  # and what SGLang takes for itself
SHAPE_FACTS: Final = ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "start_layer",
                      "end_layer", "storage_format_tag")  # fmt: skip # of a host pool, as far as it has them
CLEAR_MS: Final = 2_000.0  # a removal is confirmed by all workers


class KVPoolHiCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """One rank's storage backend. Thread-safe: SGLang's prefetch, I/O and backup threads call it at the same time."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        """`storage_config.extra_config`: see `clients/sglang/README.md`. InvalidArgument names a key that is wrong."""
        del kwargs
        self.config = storage_config
        extra = dict(storage_config.extra_config or {})
        where = "hicache-storage-backend-extra-config"
        for key in extra.keys() - OWN_KEYS - ENGINE_KEYS:
            near = difflib.get_close_matches(key, OWN_KEYS, 1)
            if near:
                raise InvalidArgument(f"{where}: {key}: unknown; did you mean {near[0]!r}?")
            log.info("event=unknown_key key=%r: not kvpool's, left to the engine", key)
        self._settings = LinkSettings.of(extra, where=where)
        self._prefix, self._revision = str(extra.get("namespace", "sglang")), str(extra.get("revision", ""))
        self._lock = threading.Lock()
        self._stores: dict[str, PageStore] = {}
        self._logical: set[str] = set()  # pools without memory of their own
        self.registered_pools: dict[Any, Any] = {}
        self._closed = False
        self._metrics = _Metrics()

    # --- host pools -----------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The engine's KV pages. Opens the namespace; a pool that is away is waited for `start_wait_ms`, then done without."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A further pool of a hybrid model (Mamba, SWA, ...). KV itself comes by `register_mem_pool_host`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, host_pool: Any) -> None:
        if getattr(host_pool, "kv_buffer", True) is None:
            self._logical.add(name)
            return
        pages = HostPages(host_pool)
        replicated = self._is_replicated(name, host_pool)
        link = PoolLink(self._settings, name=self._name_of(name), identity=self._identity(name, pages, replicated=replicated),
                        block_bytes=max(pages.sizes), block_tokens=pages.page_tokens, log=log)  # fmt: skip
        with self._lock:
            before = self._stores.get(name)
            self._stores[name] = PageStore(pages, link, shard=self._shard(replicated=replicated))
        log.info("event=host_pool pool=%s pages=%s page_bytes=%d parts=%d", name, "in_place" if pages.in_place else "copied",
                 pages.page_bytes, pages.n_parts)  # fmt: skip
        if before is not None:
            before.link.close()

    def _name_of(self, pool_name: str) -> str:
        config = self.config
        stage = f"pp{config.pp_rank}of{config.pp_size}" if config.pp_size > 1 else ""
        model = str(config.model_name or "model").rstrip("/").rpartition("/")[2]
        return namespace_name(self._prefix, model, stage, "" if pool_name == KV else pool_name)

    def _identity(self, pool_name: str, pages: HostPages, *, replicated: bool) -> str:
        """All that must be equal for a page's bytes to mean the same. Two that differ get different namespaces."""
        config, pool = self.config, pages.pool
        facts: dict[str, object] = {
            "format": FORMAT,
            "model": config.model_name or "",
            "revision": self._revision,
            "pool": pool_name,
            "dtype": str(pages.dtype),
            "page_tokens": pages.page_tokens,
            "layout": getattr(pool, "layout", ""),
            "values": "+".join(map(str, pages.sizes)),
            "mla": config.is_mla_model,
            "tp_size": 1 if replicated else config.tp_size,
            "pp": f"{config.pp_rank}/{config.pp_size}",
            "cp_size": config.attn_cp_size,
            "dcp_size": config.dcp_size,
        }
        for name in SHAPE_FACTS:
            value = getattr(pool, name, None)
            if value is not None:
                facts[name] = value
        return identity_text(facts)

    def _is_replicated(self, name: str, host_pool: Any) -> bool:
        """Whether all tensor-parallel ranks have the same bytes, so that one writes for all."""
        if not self.config.is_mla_model or name == PoolName.MAMBA.value:
            return False
        if name in (PoolName.DRAFT.value, PoolName.DRAFT_SWA.value):  # the draft model's own kind
            return any(kind.__name__ in ("MLATokenToKVPoolHost", "DeepSeekV4PagedHostPool") for kind in type(host_pool).__mro__)
        return True

    def _shard(self, *, replicated: bool) -> int:
        config = self.config
        if replicated:
            return config.attn_cp_rank * config.dcp_size + config.dcp_rank  # type: ignore[no-any-return]
        return config.attn_cp_rank * config.tp_size + config.tp_rank  # type: ignore[no-any-return]

    def _store(self, name: str = KV) -> PageStore | None:
        return self._stores.get(name)

    # --- pages in place -------------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Leading pages that the pool has; 0 while it is away."""
        if KV in self._logical:
            return len(keys)
        store = self._store()
        return 0 if store is None or not keys else store.count(keys, _prefix(extra_info))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        """Reads pages into the host pool at `host_indices`; True for the leading ones that are there and verified."""
        return self._load(KV, keys, host_indices, _prefix(extra_info))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        """Stores pages from the host pool; True for each that the pool has now."""
        return self._save(KV, keys, host_indices, _prefix(extra_info))

    def _load(self, name: str, keys: Sequence[str], host_indices: Any, prefix_keys: Sequence[str] | None) -> list[bool]:
        return self._moved(PageStore.load, self._metrics.loaded, name, keys, host_indices, prefix_keys)

    def _save(self, name: str, keys: Sequence[str], host_indices: Any, prefix_keys: Sequence[str] | None) -> list[bool]:
        return self._moved(PageStore.save, self._metrics.saved, name, keys, host_indices, prefix_keys)

    def _moved(self, move: Any, count: Any, name: str, keys: Sequence[str], host_indices: Any,
               prefix_keys: Sequence[str] | None) -> list[bool]:  # fmt: skip
        if name in self._logical:
            return [True] * len(keys)
        store = self._store(name)
        if store is None or not keys:
            return [False] * len(keys)
        began = time.perf_counter()
        try:
            done: list[bool] = move(store, keys, host_indices, prefix_keys)
        except Exception:
            log.exception("event=page_move_failed pool=%s pages=%d", name, len(keys))
            return [False] * len(keys)
        if self.config.enable_storage_metrics:
            count(sum(done), store.pages.page_bytes, time.perf_counter() - began)
        return done

    # --- pages as tensors -----------------------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any | None = None, target_sizes: Any | None = None) -> Any:
        """One flat page as a tensor (`target_location` itself when it has a page's size), or None."""
        del target_sizes
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None) -> list[Any]:
        """Flat pages as tensors, None from the first one on that the pool does not have."""
        del target_sizes
        store = self._store()
        if store is None or not keys:
            return [None] * len(keys)
        targets = target_locations if isinstance(target_locations, list | tuple) and len(target_locations) == len(keys) else None
        return store.get_pages(keys, targets)

    def set(
        self, key: str, value: Any | None = None, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> bool:
        """Stores one flat page; True when the pool has it now."""
        del target_sizes
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(self, keys: list[str], values: Any | None = None, target_locations: Any | None = None,
                  target_sizes: Any | None = None) -> bool:  # fmt: skip
        """Stores flat pages; True when the pool has all of them now."""
        del target_sizes
        store, given = self._store(), values if values is not None else target_locations
        if store is None or given is None or len(given) != len(keys):
            return False
        return not keys or all(store.set_pages(keys, given))

    def exists(self, key: str) -> bool:
        """Whether the pool has the page; False while it is away."""
        return self.batch_exists([key]) == 1

    # --- hybrid models --------------------------------------------------------------------------------------------------

    def batch_exists_v2(self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None,
                        extra_info: HiCacheStorageExtraInfo | None = None) -> PoolTransferResult:  # fmt: skip
        """The longest prefix that every pool can serve, each pool's own, and all lengths at which a prefix can end."""
        n_kv = self.batch_exists(keys, extra_info)
        hits: dict[Any, int] = {PoolName.KV: n_kv} if n_kv else {}
        ends = set(range(1, n_kv + 1))
        for transfer in pool_transfers or ():
            if not ends:
                break
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # a second form of the pages, which does not decide; without a verdict the engine asks for none
            own = self._ends(transfer, keys[:n_kv])
            if own:
                hits[transfer.name] = max(own)
            ends &= own
        return PoolTransferResult(max(ends, default=0), hits, sorted(ends))

    def _ends(self, transfer: PoolTransfer, keys: Sequence[str]) -> AbstractSet[int]:
        """Prefix lengths that this pool can serve."""
        name = str(transfer.name)
        store = self._store(name)
        if name in self._logical:
            return set(range(1, len(keys) + 1))
        there = [False] * len(keys) if store is None else store.present(keys)
        window = len(keys) if transfer.hit_policy == PoolHitPolicy.ALL_PAGES else max(1, len(transfer.keys or ()))
        return {end for end in range(1, len(keys) + 1) if all(there[max(0, end - window) : end])}

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Reads each transfer's pages into its host pool."""
        prefix_keys = _prefix(extra_info)
        return {t.name: self._load(str(t.name), t.keys or [], t.host_indices, prefix_keys) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Stores each transfer's pages from its host pool."""
        prefix_keys = _prefix(extra_info)
        return {t.name: self._save(str(t.name), t.keys or [], t.host_indices, prefix_keys) for t in transfers}

    # --- the rest -------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Removes all pages of this configuration from the pool, those of other ranks and engines too."""
        for store in list(self._stores.values()):
            n = store.link.ask("clear", lambda ns: ns.clear(deadline_ms=CLEAR_MS), -1)
            log.info("event=cleared namespace=%r blocks=%d", store.link.name, n)

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call, with its storage metrics enabled; else None."""
        if not self.config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        return self._metrics.take(StorageMetrics())

    def close(self) -> None:
        """Ends the connections to the pool. Later calls find nothing. Idempotent."""
        with self._lock:
            stores, self._stores = list(self._stores.values()), {}
        for store in stores:
            store.link.close()


class _Metrics:
    """Pages and speeds (GB/s) of transfers since the last `take`. Bounded: what nobody takes is dropped."""

    KEPT_MAX: Final = 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: list[tuple[int, float]] = []
        self._saves: list[tuple[int, float]] = []

    def loaded(self, n_pages: int, page_bytes: int, seconds: float) -> None:
        self._count(self._loads, n_pages, page_bytes, seconds)

    def saved(self, n_pages: int, page_bytes: int, seconds: float) -> None:
        self._count(self._saves, n_pages, page_bytes, seconds)

    def _count(self, kept: list[tuple[int, float]], n_pages: int, page_bytes: int, seconds: float) -> None:
        with self._lock:
            if len(kept) < self.KEPT_MAX:
                kept.append((n_pages, n_pages * page_bytes / max(seconds, 1e-9) / (1 << 30)))

    def take(self, metrics: Any) -> Any:
        with self._lock:
            loads, saves = self._loads[:], self._saves[:]
            self._loads.clear()
            self._saves.clear()
        metrics.prefetch_pgs.extend(n for n, _ in loads)
        metrics.prefetch_bandwidth.extend(speed for _, speed in loads)
        metrics.backup_pgs.extend(n for n, _ in saves)
        metrics.backup_bandwidth.extend(speed for _, speed in saves)
        return metrics


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str] | None:
    """The keys of the pages before a call's own, when the engine passes them (hicache_storage_pass_prefix_keys)."""
    return None if extra_info is None else extra_info.prefix_keys
