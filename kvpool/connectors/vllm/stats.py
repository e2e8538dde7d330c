"""The connector's figures in vLLM's own stats: its log line "KV Transfer metrics", and Prometheus under `kvpool:...`.

A stats value is one interval's: plain numbers and lists of seconds, from the workers and from the scheduler, added up by vLLM.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

TIERS: Final = ("device", "dram", "ssd")
TIMES: Final = ("load_s", "save_s", "lookup_s")
COUNTS: Final = (
    "load_bytes", "save_bytes", "saved_blocks", "skipped_blocks", "unsaved_blocks", "load_failures", "save_failures",
)  # fmt: skip
SAMPLES_MAX: Final = 10_000  # of one time in one interval
_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_HELP: Final = {
    "load_s": "Seconds of one request's load from the pool.", "save_s": "Seconds of one save to the pool.",
    "lookup_s": "Seconds of one request's lookup, the hold included.", "load_bytes": "Bytes loaded from the pool.",
    "save_bytes": "Bytes given to the pool.", "saved_blocks": "Blocks that the pool has after a save.",
    "skipped_blocks": "Blocks not saved because too many waited.", "unsaved_blocks": "Blocks that the pool did not take.",
    "load_failures": "Requests whose load failed: they were computed.", "save_failures": "Saves that failed.",
}  # fmt: skip


class KVPoolStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: counts by name, "hit_tokens" by tier, "causes" of failed loads, and times as lists of seconds."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data={} if data is None else data)
        self.data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def count(self, name: str, n: int = 1) -> None:
        if n:
            self.data[name] = self.data.get(name, 0) + n

    def count_of(self, name: str, label: str, n: int = 1) -> None:
        """One of a family: "hit_tokens" of a tier, "causes" of failed loads."""
        if n:
            by = self.data.setdefault(name, {})
            by[label] = by.get(label, 0) + n

    def time(self, name: str, seconds: float) -> None:
        times = self.data.setdefault(name, [])
        if len(times) < SAMPLES_MAX:
            times.append(seconds)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if isinstance(value, list):
                own = self.data.setdefault(name, [])
                own.extend(value[: SAMPLES_MAX - len(own)])
            elif isinstance(value, dict):
                for label, n in value.items():
                    self.count_of(name, label, n)
            else:
                self.count(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        figures: dict[str, int | float] = {}
        for tier, n in sorted(self.data.get("hit_tokens", {}).items()):
            figures[f"hit_tokens_{tier}"] = n
        for name in COUNTS:
            if name in self.data:
                figures[name] = self.data[name]
        for name in TIMES:
            if times := self.data.get(name):
                ordered = sorted(times)
                figures[f"{name[:-2]}_mean_ms"] = round(fmean(times) * 1e3, 3)
                figures[f"{name[:-2]}_p99_ms"] = round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e3, 3)
        for cause, n in sorted(self.data.get("causes", {}).items()):
            figures[f"load_failures_{cause}"] = n
        return figures


class KVPoolPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same figures for Prometheus, one series an engine (and a tier, or a cause)."""

    def __init__(self, vllm_config: VllmConfig, metric_types: dict[type[Any], type[Any]], labelnames: list[str],
                 per_engine_labelvalues: dict[int, list[object]]) -> None:  # fmt: skip
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._times = {
            name: self._histogram_cls(name=f"kvpool:{name[:-2]}_seconds", documentation=_HELP[name], buckets=_BUCKETS,
                                      labelnames=labelnames)
            for name in TIMES
        }  # fmt: skip
        self._counts = {
            name: self._counter_cls(name=f"kvpool:{name}", documentation=_HELP[name], labelnames=labelnames) for name in COUNTS
        }
        self._hits = self._counter_cls(name="kvpool:hit_tokens", documentation="Prompt tokens whose KV came from the pool.",
                                       labelnames=[*labelnames, "tier"])  # fmt: skip
        self._causes = self._counter_cls(name="kvpool:load_failure_causes", documentation="Failed loads by their cause.",
                                         labelnames=[*labelnames, "cause"])  # fmt: skip

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in (transfer_stats_data or {}).items():
            if name in self._times:
                histogram = self._times[name].labels(*labels)
                for seconds in value:
                    histogram.observe(seconds)
            elif name in self._counts:
                self._counts[name].labels(*labels).inc(value)
            elif name in ("hit_tokens", "causes"):
                family = self._hits if name == "hit_tokens" else self._causes
                for label, n in value.items():
                    family.labels(*labels, label).inc(n)
