"""The class that vLLM makes: once in the scheduler (EngineCore), once in each worker. Hands on to the half that it is.

When the configuration is one that cannot be shared, or the pool is away, every method still does what vLLM expects, with no hits.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpool.connectors.vllm.facts import facts_of
from kvpool.connectors.vllm.link import PoolLink, log
from kvpool.connectors.vllm.plan import StepPlan, StepReport
from kvpool.connectors.vllm.scheduler import SchedulerHalf
from kvpool.connectors.vllm.settings import parse
from kvpool.connectors.vllm.stats import KVPoolPromMetrics, KVPoolStats
from kvpool.connectors.vllm.worker import WorkerHalf
from kvpool.core.types import Tier
from kvpool.errors import KVPoolError

# vLLM takes its AMX attention kernel when the CPU has AMX, but the kernel may be the first to use it, and then the process has
# not asked the operating system for the permission: "Illegal instruction". A full hit leaves one token to compute, which is
# that case.
if hasattr(torch.cpu, "_init_amx"):
    torch.cpu._init_amx()


# MultiConnector looks its children's figures up by the name alone, which vLLM knows only of registered connectors.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector("KVPoolConnector", "kvpool.connectors.vllm", "KVPoolConnector")

_SOURCES = {Tier.DEVICE: CacheHitSource.DEVICE, Tier.DRAM: CacheHitSource.HOST, Tier.SSD: CacheHitSource.DISK}


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    plan: StepPlan


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        self.report.add(other.report)
        return self


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """`kv_role`: kv_producer saves, kv_consumer loads, kv_both does both. Settings: `ConnectorSettings`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = self._kv_transfer_config
        self._settings = parse(transfer.kv_connector_extra_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._link: PoolLink | None = None
        self._closed = threading.Lock()
        who = "scheduler" if role == KVConnectorRole.SCHEDULER else f"worker-{vllm_config.parallel_config.rank}"
        try:
            facts = facts_of(vllm_config, kv_cache_config, self._settings)
        except KVPoolError as error:
            log.error("event=kvpool_refused who=%s reason=%s the engine works without the pool", who, error)
            return
        log.info("event=kvpool_identity who=%s namespace=%s identity=%s", who, facts.identity.namespace, facts.identity.as_text())
        self._link = link = PoolLink(self._settings, facts.identity, who=who)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                self._settings, facts, link, loads=transfer.is_kv_consumer, saves=transfer.is_kv_producer,
                n_blocks=kv_cache_config.num_blocks,
            )  # fmt: skip
        else:
            self._worker = WorkerHalf(self._settings, facts, link, rank=vllm_config.parallel_config.rank)
        link.wait_ready(self._settings.connect_wait_ms)
        _close_at_exit(self)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, nothing worse."""
        return False

    def shutdown(self) -> None:
        if not self._closed.acquire(blocking=False):
            return
        if self._worker is not None:
            self._worker.close()
        if self._link is not None:
            self._link.close()

    # --- scheduler ------------------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        n = self._scheduler.matched_tokens(request, num_computed_tokens)
        return n, bool(n) and self._settings.load_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
            self._scheduler.allocated(request, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if self._scheduler is None:
            return {}
        return {_SOURCES[tier]: n for tier, n in self._scheduler.sources(request, num_external_tokens).items()}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepMetadata(StepPlan() if self._scheduler is None else self._scheduler.plan_step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(meta, WorkerReport):
            self._scheduler.reported(meta.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks that wait for their save are referenced one by one, so the request itself need not be kept."""
        return False, None if self._scheduler is None else self._scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pins

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.frees_soon

    # --- worker ---------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is None:
            return
        try:
            self._worker.register(kv_caches, self._kv_cache_config.num_blocks)
        except KVPoolError as error:
            log.error("event=kvpool_refused who=worker reason=%s this rank neither loads nor saves", error)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self._worker is not None:
            self._worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Whole blocks: they are there before the forward begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks: they are saved after the forward."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.submit_saves(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        return None, None if self._worker is None else self._worker.take_received()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = None if self._worker is None else self._worker.take_report()
        return None if report is None else WorkerReport(report)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        half = self._worker or self._scheduler
        return None if half is None else half.take_stats()

    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.plan

    # --- figures --------------------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVPoolStats(data)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, metric_types: dict[type[Any], type[Any]], labelnames: list[str],
                           per_engine_labelvalues: dict[int, list[object]]) -> KVConnectorPromMetrics:  # fmt: skip
        return KVPoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _close_at_exit(connector: KVPoolConnector) -> None:
    """An in-process engine may never be shut down: what is queued is saved when the interpreter ends."""
    alive = weakref.ref(connector)

    def close() -> None:
        if (found := alive()) is not None:
            found.shutdown()

    atexit.register(close)
