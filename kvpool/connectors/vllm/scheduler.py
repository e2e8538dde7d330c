"""The scheduler's half: what of a prompt the pool has (and promises), what is to be loaded and saved in each step, which blocks
wait.

Lives in the engine's process, called from its one loop. The only thing that it waits for is the hold, at most half the deadline.
Blocks that are to be saved are referenced in the engine's block pool until every rank has copied them, so they outlive the end
or the preemption of their request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from kvpool.client.holds import Hold
from kvpool.client.namespace import Namespace
from kvpool.connectors.vllm.facts import EngineFacts
from kvpool.connectors.vllm.link import PoolLink, log
from kvpool.connectors.vllm.plan import LoadJob, SaveJob, StepPlan, StepReport
from kvpool.connectors.vllm.settings import ConnectorSettings
from kvpool.connectors.vllm.stats import KVPoolStats
from kvpool.core.hashing import PrefixHashes, external_hashes
from kvpool.core.types import MAX_BATCH_KEYS, Tier
from kvpool.errors import KVPoolError

EXPECTED_KEY: Final = "kvpool_blocks"  # in kv_transfer_params: leading blocks that the prefill node has saved, or is just saving
IDLE_S: Final = 0.001  # a step without tokens waits so long for what is expected, instead of turning the loop at full speed
NULL_BLOCK: Final = 0


_ENDED_WELL: Final = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


@dataclass(slots=True)
class _Tracked:
    """One request, from its arrival to its end."""

    request: Any
    chain: PrefixHashes = field(default_factory=lambda: PrefixHashes(b""))
    saved: int = -1  # leading blocks that are saved or need not be; -1: not looked at
    gave_up: bool = False  # a load failed: the pool is not asked again for this request
    first_asked: float = 0.0
    spent_ms: float = 0.0  # of the deadline
    waited: bool = False
    hold: Hold | None = None  # promised and not yet on its way to the workers
    hold_first: int = 0  # depth of its first block
    hold_ends: float = 0.0
    tiers: list[Tier] = field(default_factory=list)  # of the blocks that were last promised


@dataclass(slots=True)
class _Pin:
    """The paged blocks of a save job. `left`: ranks that have not released them. `since`: time.monotonic()."""

    block_ids: list[int]
    left: int
    since: float


class SchedulerHalf:
    """One an engine. Used by the scheduler's thread only."""

    def __init__(self, settings: ConnectorSettings, facts: EngineFacts, link: PoolLink, *, loads: bool, saves: bool,
                 n_blocks: int) -> None:  # fmt: skip
        self.settings, self.facts, self.link = settings, facts, link
        self._does_load, self._does_save = loads, saves
        self._shards = range(facts.n_shards)
        self._pinned_max = int(n_blocks * settings.save_pinned_part)
        self._pool: Any = None  # vLLM's BlockPool
        self._tracked: dict[str, _Tracked] = {}
        self._planned: list[LoadJob] = []
        self._loading: dict[str, tuple[Hold, int]] = {}  # request -> its hold, ranks that have not ended the load
        self._pins: dict[int, _Pin] = {}  # by save job
        self._n_pinned = 0
        self._job_id = 0
        self._late: list[SaveJob] = []  # of requests that have ended
        self._waiting = False  # a lookup waits for blocks that a prefill node has announced
        self.stats = KVPoolStats()

    def bind(self, block_pool: Any) -> None:
        self._pool = block_pool

    def arrived(self, request: Any) -> None:
        self._tracked[request.request_id] = _Tracked(request)

    # --- lookup ---------------------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, n_computed: int) -> int | None:
        """Tokens past `n_computed` that the pool has promised; None: ask again in the next step."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request)
        namespace = self.link.namespace
        if not self._does_load or tracked.gave_up or namespace is None or request.skip_reading_prefix_cache:
            return 0
        first = n_computed // self.facts.block_tokens
        wanted = self._chain(tracked)[: (request.num_tokens - 1) // self.facts.block_tokens]  # a token must be left to compute
        if len(wanted) <= first:
            return 0
        now = time.monotonic()
        tracked.first_asked = tracked.first_asked or now
        if tracked.hold is not None:
            if tracked.hold_first == first and now < tracked.hold_ends:
                return tracked.hold.n_blocks * self.facts.block_tokens
            self._drop_hold(tracked)
        try:
            n = self._match(namespace, wanted, tracked)
            if n is None:
                return None
            if n > first and self._take_hold(namespace, wanted[first:n], tracked, first):
                assert tracked.hold is not None
                return tracked.hold.n_blocks * self.facts.block_tokens
        except KVPoolError as error:
            log.debug("event=kvpool_lookup_failed request=%s reason=%s", request.request_id, error)
            self._failed_lookup(error)
        except Exception:  # whatever it is, the engine can do without the pool
            log.exception("event=kvpool_lookup_error request=%s", request.request_id)
            self.stats.count_of("causes", "lookup_internal")
            tracked.gave_up = True
        return 0

    def _match(self, namespace: Namespace, wanted: PrefixHashes, tracked: _Tracked) -> int | None:
        most = MAX_BATCH_KEYS // self.facts.n_shards
        if self.settings.lookup == "cluster":
            n = namespace.match(wanted, shards=self._shards, deadline_ms=self.settings.deadline_ms / 4)
        else:
            n = namespace.match(wanted, shards=self._shards, freshness="mirror")
        expected = min(_expected(tracked.request), len(wanted))
        waited_ms = (time.monotonic() - tracked.first_asked) * 1e3
        if n < expected and waited_ms < self.settings.deadline_ms / 2:
            self._waiting = tracked.waited = True
            return None
        if tracked.waited:
            tracked.spent_ms, tracked.waited = waited_ms, False
        return min(n, most)

    def _take_hold(self, namespace: Namespace, hashes: PrefixHashes, tracked: _Tracked, first: int) -> bool:
        began = time.monotonic()
        budget = self.settings.deadline_ms / 2
        hold = namespace.hold(hashes, shards=self._shards, ttl_ms=self.settings.hold_ttl_ms, deadline_ms=budget)
        spent = time.monotonic() - began
        tracked.spent_ms += spent * 1e3
        self.stats.time("lookup_s", spent)
        if not hold.n_blocks:
            if spent * 1e3 >= budget:
                tracked.gave_up = True  # it has cost enough
            return False
        tracked.hold, tracked.hold_first = hold, first
        tracked.hold_ends = began + self.settings.hold_ttl_ms / 2e3
        return True

    def _failed_lookup(self, error: KVPoolError) -> None:
        self.stats.count_of("causes", f"lookup_{error.code}")
        if error.code == "namespace_not_found":
            self.link.lost(error)

    def _drop_hold(self, tracked: _Tracked) -> None:
        hold, tracked.hold = tracked.hold, None
        if hold is not None:
            self.link.later(hold.release)

    def _chain(self, tracked: _Tracked) -> PrefixHashes:
        """The request's full blocks so far; grows with its tokens."""
        step = self.facts.hashes_per_block
        digests: Sequence[bytes] = tracked.request.block_hashes
        have, there = len(tracked.chain), len(digests) // step
        if there > have:
            new = external_hashes([bytes(digest) for digest in digests[(have + 1) * step - 1 : there * step : step]])
            tracked.chain = PrefixHashes(tracked.chain.hashes + new.hashes)
        return tracked.chain

    def sources(self, request: Any, n_external: int) -> dict[Tier, int]:
        """Tokens of the load that has just been planned, by tier."""
        tracked = self._tracked.get(request.request_id)
        n_blocks = n_external // self.facts.block_tokens
        tiers = [] if tracked is None else tracked.tiers[:n_blocks]
        return {tier: tiers.count(tier) * self.facts.block_tokens for tier in Tier if tier in tiers}

    # --- loads ----------------------------------------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: Sequence[int], n_external: int) -> None:
        """The engine took `n_external` of the promised tokens and has these paged blocks for the request (from its start on)."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.hold is None:
            return
        if n_external == 0:  # another connector loads, or nobody
            self._drop_hold(tracked)
            return
        hold, first = tracked.hold, tracked.hold_first
        tracked.hold, tracked.tiers = None, hold.tiers
        stop = first + n_external // self.facts.block_tokens
        self._planned.append(LoadJob(
            request.request_id, tracked.chain[first:stop], list(block_ids[first:stop]), hold.token,
            budget_ms=max(1.0, self.settings.deadline_ms - tracked.spent_ms), is_async=self.settings.load_async,
        ))  # fmt: skip
        tracked.saved = max(tracked.saved, stop)
        self._loading[request.request_id] = hold, self.facts.world

    # --- the step -------------------------------------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepPlan:
        """What the workers are to do in and after the step that vLLM's scheduler has just decided (its SchedulerOutput)."""
        plan = StepPlan(loads=self._planned, idle=output.total_num_scheduled_tokens == 0)
        self._planned = []
        plan.saves, self._late = self._late, []
        if self._does_save and self.link.namespace is not None and (self.settings.load_async or not self._loading):
            # What is computed beside or after a load within the step may be wrong until every rank said that the load was good.
            plan.saves += self._plan_saves(self.link.namespace, output)
        if plan.idle and self._waiting and not plan.loads:
            time.sleep(IDLE_S)
        self._waiting = False
        return plan

    def _plan_saves(self, namespace: Namespace, output: Any) -> Iterable[SaveJob]:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        tables = output.kv_connector_block_state
        for request_id, n_tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or tables is None or request_id not in computed:
                continue
            job = self._plan_save(namespace, tracked, partial(tables.get_block_ids, request_id), computed[request_id] + n_tokens)
            if job is not None:
                yield job

    def _plan_save(self, namespace: Namespace, tracked: _Tracked, tables: Callable[[], Sequence[Sequence[int]] | None],
                   n_tokens: int) -> SaveJob | None:  # fmt: skip
        """The blocks of a request that are full after `n_tokens` and that nobody has saved. `tables`: its paged blocks, one
        list a group; only asked when there is something to save."""
        chain = self._chain(tracked)
        full = min(n_tokens // self.facts.block_tokens, len(chain))
        if not self.settings.save_decode:
            full = min(full, tracked.request.num_prompt_tokens // self.facts.block_tokens)
        if full <= max(tracked.saved, 0):
            return None
        if tracked.saved < 0:
            try:
                tracked.saved = namespace.match(chain[:full], shards=self._shards, freshness="mirror")
            except KVPoolError as error:  # the client is being closed
                log.debug("event=kvpool_lookup_failed request=%s reason=%s", tracked.request.request_id, error)
                return None
        first = tracked.saved
        groups = tables()
        ids = list(groups[0][first:full]) if groups else []
        full = first + len(ids)
        if not ids or NULL_BLOCK in ids:  # blocks that have left a sliding window are gone
            tracked.saved = full
            return None
        if self._n_pinned + len(ids) > self._pinned_max:
            self.stats.count("skipped_blocks", len(ids))
            return None
        tracked.saved = full
        self._job_id += 1
        self._pool.touch([self._pool.blocks[i] for i in ids])
        self._pins[self._job_id] = _Pin(ids, self.facts.world, time.monotonic())
        self._n_pinned += len(ids)
        return SaveJob(self._job_id, chain[first:full], ids)

    def reported(self, report: StepReport) -> None:
        """What the ranks have done: their blocks are given back, holds are released, who failed is computed without the pool."""
        for job_id, n in report.released.items():
            pin = self._pins.get(job_id)
            if pin is None:
                continue
            pin.left -= n
            if pin.left <= 0:
                del self._pins[job_id]
                self._n_pinned -= len(pin.block_ids)
                self._pool.free_blocks(self._pool.blocks[i] for i in reversed(pin.block_ids))
        for request_id, cause in report.failed.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and not tracked.gave_up:
                tracked.gave_up = True
                tracked.saved = -1
            log.info("event=kvpool_load_failed request=%s cause=%s", request_id, cause)
        for request_id, n in report.loaded.items():
            if request_id in self._loading:
                hold, left = self._loading.pop(request_id)
                if left > n:
                    self._loading[request_id] = hold, left - n
                else:
                    self.link.later(hold.release)

    # --- the end --------------------------------------------------------------------------------------------------------

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """What the client of the request is told, for whom it hands the prompt on to. `block_ids`: its paged blocks, by group."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        self._drop_hold(tracked)
        if self._does_save and self.link.namespace is not None and request.status.name in _ENDED_WELL:
            late = self._plan_save(self.link.namespace, tracked, lambda: block_ids, request.num_computed_tokens)
            if late is not None:
                self._late.append(late)
        n = min(tracked.saved, request.num_prompt_tokens // self.facts.block_tokens)
        return {EXPECTED_KEY: n} if self._does_save and n > 0 else None

    @property
    def has_pins(self) -> bool:
        """Blocks wait for being copied: the engine must go on stepping, or they would wait for ever."""
        return bool(self._pins)

    @property
    def frees_soon(self) -> bool:
        """Blocks are being copied and will be free in a moment, so that no request need be preempted for room."""
        oldest = next(iter(self._pins.values()), None)
        return oldest is not None and (time.monotonic() - oldest.since) * 1e3 < self.settings.deadline_ms / 4

    def take_stats(self) -> KVPoolStats | None:
        if self.stats.is_empty():
            return None
        stats, self.stats = self.stats, KVPoolStats()
        return stats


def _expected(request: Any) -> int:
    """Leading blocks that a prefill node says it has saved for this request."""
    params = request.kv_transfer_params
    n = params.get(EXPECTED_KEY, 0) if isinstance(params, dict) else 0
    return n if isinstance(n, int) and n > 0 else 0
