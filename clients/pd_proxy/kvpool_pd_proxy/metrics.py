"""What the proxy counts, in Prometheus' form, in a registry of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvpool_pd_proxy.nodes import Role

GOODPUT_OVER: Final = 1_000  # latest requests in the gauge
_TTFT: Final = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 8, 13, 20, 40, 80)
_ITL: Final = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.35, 0.5, 1, 2, 5, 10)
_ALL: Final = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)


class _Nodes(Collector):
    def __init__(self, roles: Iterable[Role]) -> None:
        self._roles = list(roles)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        state = GaugeMetricFamily("kvpool_pd_node_state", "0: in use, 1: on trial, 2: out", labels=["role", "node"])
        load = GaugeMetricFamily("kvpool_pd_node_requests", "requests at the node now", labels=["role", "node"])
        known = GaugeMetricFamily("kvpool_pd_affinity_entries", "prefixes in the table", labels=["role"])
        for role in self._roles:
            known.add_metric([role.name], len(role.affinity))
            for node in role.nodes:
                state.add_metric([role.name, node.name], node.breaker.state.value)
                load.add_metric([role.name, node.name], node.in_flight)
        return [state, load, known]


class Metrics:
    """Label values come from closed sets in the code, and from the nodes of the command line."""

    def __init__(self, roles: Iterable[Role], *, slo_ttft_s: float, slo_itl_s: float) -> None:
        self._slo_ttft_s, self._slo_itl_s = slo_ttft_s, slo_itl_s
        self._latest: deque[bool] = deque(maxlen=GOODPUT_OVER)
        self.registry = registry = CollectorRegistry()
        registry.register(_Nodes(roles))
        name = "kvpool_pd_"
        self.requests = Counter(
            name + "requests",
            "requests by how they ended: ok, rejected (4xx), failed, cancelled",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.running = Gauge(name + "requests_running", "requests in the proxy now", registry=registry)
        self.routes = Counter(
            name + "routes",
            "where a request's prompt is computed: at prefill, or at decode and why",
            ["route"],
            registry=registry,
        )
        self.prefills = Counter(name + "prefills", "prefill steps by how they ended", ["outcome"], registry=registry)
        self.choices = Counter(
            name + "choices",
            "why a node was chosen: blocks (it has seen the prompt's start), busy, new",
            ["role", "why"],
            registry=registry,
        )
        self.retries = Counter(
            name + "decode_retries", "decode nodes left for another before the first token", ["reason"], registry=registry
        )
        self.prompt_bytes = Counter(name + "tokenised_bytes", "text that prefill nodes tokenised", registry=registry)
        self.prompt_tokens = Counter(name + "tokenised_tokens", "tokens that it came to", registry=registry)
        self.reused = Counter(name + "prompts_tokenised_once", "prompts that decode got as token ids", registry=registry)
        self.ttft = Histogram(
            name + "ttft_seconds", "request to first token, streams only", ["route"], buckets=_TTFT, registry=registry
        )
        self.itl = Histogram(name + "itl_seconds", "between two pieces of a stream", buckets=_ITL, registry=registry)
        self.prefill_seconds = Histogram(name + "prefill_seconds", "prefill steps", buckets=_TTFT, registry=registry)
        self.seconds = Histogram(name + "request_seconds", "whole requests", ["endpoint"], buckets=_ALL, registry=registry)
        self.slo = Counter(
            name + "slo_requests", "streams within and beyond --slo-ttft, --slo-itl, both", ["slo", "met"], registry=registry
        )
        goodput = Gauge(name + "goodput_ratio", f"share of the latest {GOODPUT_OVER} streams within both", registry=registry)
        goodput.set_function(lambda: sum(self._latest) / len(self._latest) if self._latest else 1.0)

    def judge(self, *, ttft_s: float | None, itl_s: float) -> None:
        """One stream that the client did not leave. `ttft_s` None: it failed. `itl_s`: mean between its pieces, 0 for one."""
        met = {
            "ttft": ttft_s is not None and ttft_s <= self._slo_ttft_s,
            "itl": ttft_s is not None and itl_s <= self._slo_itl_s,
        }
        met["both"] = met["ttft"] and met["itl"]
        for slo, value in met.items():
            self.slo.labels(slo, "yes" if value else "no").inc()
        self._latest.append(met["both"])
