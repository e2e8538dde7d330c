"""Metrics in Prometheus' text format, from plain ints. Counters live where things happen; a role lists them here once a scrape.

Names are `kvpool_<noun>_<unit>`; label values come from closed sets or are cut at `LABELS_MAX`, so that a scrape stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

LABELS_MAX: Final = 1_000  # label sets of one metric; the rest is summed up as "other"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """`values`: label values, in the order of `labels` -> number. () -> number for one without labels."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[tuple[str, ...], float] = field(default_factory=dict)


def counter(name: str, text: str, value: float) -> Metric:
    return Metric(name, Kind.COUNTER, text, (), {(): value})


def gauge(name: str, text: str, value: float) -> Metric:
    return Metric(name, Kind.GAUGE, text, (), {(): value})


def expose(metrics: Iterable[Metric]) -> bytes:
    """The text of one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected([_family(metric) for metric in metrics]))
    return generate_latest(registry)


class _Collected:
    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families

    def describe(self) -> list[Any]:
        return []


def _family(metric: Metric) -> Any:
    make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family: Any = make(metric.name, metric.help, labels=metric.labels)
    rest = 0.0
    for i, (labels, value) in enumerate(sorted(metric.values.items())):
        if i < LABELS_MAX:
            family.add_metric(labels, value)
        else:
            rest += value
    if len(metric.values) > LABELS_MAX:
        family.add_metric(("other",) * len(metric.labels), rest)
    return family
