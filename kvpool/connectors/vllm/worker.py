"""A rank's half: loads what was promised into paged blocks, saves full blocks in the background.

Sync loads run on the engine's thread, before the forward; async ones on a few threads. One thread saves: it copies a job's
blocks to host memory, tells the scheduler that they may go, and puts. No call here waits longer than its job's deadline.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from kvpool.connectors.vllm.blocks import PagedBlocks
from kvpool.connectors.vllm.facts import EngineFacts
from kvpool.connectors.vllm.link import PoolLink, log
from kvpool.connectors.vllm.plan import LoadJob, SaveJob, StepPlan, StepReport
from kvpool.connectors.vllm.settings import ConnectorSettings
from kvpool.connectors.vllm.stats import KVPoolStats
from kvpool.core.types import Outcome
from kvpool.errors import KVPoolError

SAVES_MAX: Final = 1024  # jobs that wait; more are not saved
IDLE_S: Final = 0.002  # a step without tokens waits so long for a transfer to end


class WorkerHalf:
    """One a rank. `start_loads`, `submit_saves`, `take_report`... are called by the engine's thread."""

    def __init__(self, settings: ConnectorSettings, facts: EngineFacts, link: PoolLink, *, rank: int) -> None:
        self.settings, self.facts, self.link = settings, facts, link
        self._shard, self._saves = facts.shard_of(rank), facts.saves(rank)
        self._counts_hits = rank == 0
        self._paged: PagedBlocks | None = None
        self._lock = threading.Condition()
        self._report = StepReport()
        self._received: set[str] = set()  # async loads that have ended, for vLLM
        self._bad_blocks: set[int] = set()
        self._stats = KVPoolStats()
        self._n_loading = self._n_saving = 0
        self._jobs: queue.SimpleQueue[tuple[SaveJob, Any] | None] = queue.SimpleQueue()
        self._loaders = ThreadPoolExecutor(settings.load_threads, thread_name_prefix="kvpool-load")
        self._saver = threading.Thread(target=self._save_all, name="kvpool-save", daemon=True)
        self._saver.start()
        self._closed = False

    def register(self, kv_caches: dict[str, torch.Tensor], n_blocks: int) -> None:
        """The rank's paged tensors. KVPoolError when their bytes are not what the engine's identity says."""
        paged = PagedBlocks(kv_caches, n_blocks)
        identity = self.facts.identity
        if paged.block_bytes > identity.block_bytes:
            from kvpool.errors import LayoutMismatch

            raise LayoutMismatch(f"a block has {paged.block_bytes} bytes here; by the configuration it is {identity.block_bytes}")
        self._paged = paged

    # --- loads ----------------------------------------------------------------------------------------------------------

    def start_loads(self, plan: StepPlan) -> None:
        """Sync loads are done when this returns; async ones are on their way."""
        for job in plan.loads:
            if job.is_async:
                with self._lock:
                    self._n_loading += 1
                self._loaders.submit(self._load_async, job, time.monotonic())
            else:
                self._load(job, time.monotonic())

    def _load_async(self, job: LoadJob, began: float) -> None:
        try:
            self._load(job, began)
        finally:
            with self._lock:
                self._n_loading -= 1
                self._received.add(job.request_id)
                self._lock.notify_all()

    def _load(self, job: LoadJob, began: float) -> None:
        """Never raises: what was not loaded is told as bad blocks, and is computed."""
        n, cause = 0, "internal"
        try:
            n, cause = self._fetch(job, began)
        except KVPoolError as error:
            cause = error.code
            if error.code == "namespace_not_found":
                self.link.lost(error)
        except Exception:
            log.exception("event=kvpool_load_error request=%s", job.request_id)
        seconds = time.monotonic() - began
        with self._lock:
            self._report.loaded[job.request_id] = self._report.loaded.get(job.request_id, 0) + 1
            self._stats.time("load_s", seconds)
            if n < len(job.block_ids):
                self._bad_blocks.update(job.block_ids[n:])
                self._report.failed[job.request_id] = cause
                self._stats.count("load_failures")
                self._stats.count_of("causes", cause)

    def _fetch(self, job: LoadJob, began: float) -> tuple[int, str]:
        """Leading blocks of the job that are in the paged tensors now, and why not the next one."""
        if self.link.namespace is None:  # the scheduler's half has found the pool a moment earlier
            self.link.wait_ready(job.budget_ms / 2)
        namespace, paged, n = self.link.namespace, self._paged, len(job.block_ids)
        if namespace is None or paged is None:
            return 0, "not_connected"
        host = paged.host(n)
        n_bytes = n * paged.block_bytes
        bulk_ms = self.settings.load_deadline_ms(n_bytes) - self.settings.deadline_ms
        left_ms = job.budget_ms + bulk_ms - (time.monotonic() - began) * 1e3
        if left_ms <= 0:
            return 0, "timeout"
        got = namespace.get(job.hashes, host, hold=job.token, shard=self._shard, deadline_ms=left_ms)
        good = got.n_blocks
        for index, size in enumerate(got.sizes):
            if size != paged.block_bytes:
                good = min(good, index)
                break
        if good:
            paged.scatter(host[:good], job.block_ids[:good])
        with self._lock:
            self._stats.count("load_bytes", good * paged.block_bytes)
            if self._counts_hits:
                for source in got.sources[:good]:
                    self._stats.count_of("hit_tokens", source.tier.value, self.facts.block_tokens)
        if good < got.n_blocks:
            return good, "wrong_size"
        return good, got.miss.value if got.miss is not None else "unknown"

    # --- saves ----------------------------------------------------------------------------------------------------------

    def submit_saves(self, plan: StepPlan) -> None:
        """After the forward: the step's full blocks go to the saver's queue. Waits only in a step without tokens, and shortly."""
        if plan.saves:
            after = self._paged.ready() if self._paged is not None else None
            with self._lock:
                for job in plan.saves:
                    if not self._saves or self._paged is None or self._n_saving >= SAVES_MAX or self._closed:
                        self._release(job)
                        self._stats.count("skipped_blocks", len(job.block_ids) if self._saves else 0)
                        continue
                    self._n_saving += 1
                    self._jobs.put((job, after))
        if plan.idle:
            with self._lock:
                if not (self._received or self._report) and (self._n_loading or self._n_saving):
                    self._lock.wait(IDLE_S)

    def _release(self, job: SaveJob) -> None:
        self._report.released[job.job_id] = self._report.released.get(job.job_id, 0) + 1

    def _save_all(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, after = entry
            released = [False]
            try:
                self._save(job, after, released)
            except KVPoolError as error:
                log.debug("event=kvpool_save_failed blocks=%d reason=%s", len(job.block_ids), error)
                if error.code == "namespace_not_found":
                    self.link.lost(error)
                self._count_save(unsaved=len(job.block_ids), failed=1)
            except Exception:
                log.exception("event=kvpool_save_error blocks=%d", len(job.block_ids))
                self._count_save(unsaved=len(job.block_ids), failed=1)
            with self._lock:
                if not released[0]:
                    self._release(job)
                self._n_saving -= 1
                self._lock.notify_all()

    def _save(self, job: SaveJob, after: Any, released: list[bool]) -> None:
        """In parts that fit the staging memory; the paged blocks are released after the last copy, before its put."""
        paged, n = self._paged, len(job.block_ids)
        assert paged is not None
        step = max(1, self.settings.save_staging_bytes // paged.block_bytes)
        for start in range(0, n, step):
            ids = job.block_ids[start : start + step]
            namespace = self.link.namespace
            if namespace is None:
                self._count_save(unsaved=n - start, failed=1)
                return
            host = paged.host(len(ids))
            paged.gather(ids, host, after=after)
            if start + step >= n:
                with self._lock:
                    self._release(job)
                    released[0] = True
                    self._lock.notify_all()
            began = time.monotonic()
            n_bytes = len(ids) * paged.block_bytes
            put = namespace.put(job.hashes[start : start + len(ids)], host, visibility="eventual", shard=self._shard,
                                deadline_ms=self.settings.load_deadline_ms(n_bytes))  # fmt: skip
            there = put.n_there
            already = put.count(Outcome.ALREADY)
            self._count_save(seconds=time.monotonic() - began, n_bytes=n_bytes, saved=there - min(already, there),
                             unsaved=len(ids) - there, failed=int(there < len(ids)))  # fmt: skip
            if there < len(ids):  # what hangs on a block that is not there is of no use
                self._count_save(unsaved=n - start - len(ids))
                return

    def _count_save(self, *, seconds: float = -1.0, n_bytes: int = 0, saved: int = 0, unsaved: int = 0, failed: int = 0) -> None:
        with self._lock:
            if seconds >= 0:
                self._stats.time("save_s", seconds)
            self._stats.count("save_bytes", n_bytes)
            self._stats.count("saved_blocks", saved)
            self._stats.count("unsaved_blocks", unsaved)
            self._stats.count("save_failures", failed)

    # --- what vLLM takes away after each step -----------------------------------------------------------------------------

    def take_received(self) -> set[str]:
        """Requests whose async load has ended since the last call, well or not."""
        with self._lock:
            received, self._received = self._received, set()
            return received

    def take_bad_blocks(self) -> set[int]:
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
            return bad

    def take_report(self) -> StepReport | None:
        with self._lock:
            if not self._report:
                return None
            report, self._report = self._report, StepReport()
            return report

    def take_stats(self) -> KVPoolStats | None:
        with self._lock:
            if self._stats.is_empty():
                return None
            stats, self._stats = self._stats, KVPoolStats()
            return stats

    def flush(self, timeout_ms: int) -> bool:
        """Waits until all submitted saves have ended; whether they have."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._n_saving, timeout_ms / 1e3)

    def close(self) -> None:
        """Gives the saves under way `flush_ms`, then ends the threads. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if not self.flush(self.settings.flush_ms):
            log.warning("event=kvpool_unsaved jobs=%d the engine ends before they are saved", self._n_saving)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._jobs.get_nowait()
        self._jobs.put(None)
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._saver.join()
