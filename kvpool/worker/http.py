"""The worker's HTTP face: /metrics, /healthz (the process lives), /readyz (a read has just succeeded).

Owns the web application, the listening socket's limits and the names of the worker's metrics. Numbers come from the node and the
data plane, where they are plain ints. Runs on the main thread's loop; the probe runs in a thread, one at a time, shared by
all who ask meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpool.errors import ConfigError
from kvpool.worker.probe import probe

if TYPE_CHECKING:
    from kvpool.worker.agent import Agent
    from kvpool.worker.dataplane import DataPlane
    from kvpool.worker.node import Node

REQUEST_TIMEOUT_S: Final = 5.0  # a connection that has sent no whole request by then is closed
KEEP_ALIVE_S: Final = 5
CONNECTIONS_MAX: Final = 2048  # beyond, 503
HEADER_BYTES_MAX: Final = 16 << 10


class WorkerCollector(Collector):
    """All metrics of one worker."""

    def __init__(self, node: Node, plane: DataPlane, agent: Agent | None) -> None:
        self.node, self.plane, self.agent = node, plane, agent

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        yield from self._tiers()
        yield from self._blocks()
        yield from self._plane()
        up = GaugeMetricFamily("kvpool_session_up", "1 while the master has this worker's session")
        up.add_metric([], float(self.node.listed.up))
        yield up
        if self.agent is not None:
            yield _counters("kvpool_session_events", "Sessions with the master", self.agent.counters)

    def _tiers(self) -> Iterator[Metric]:
        capacity = GaugeMetricFamily("kvpool_tier_capacity_bytes", "Size of the tier", labels=["tier"])
        used = GaugeMetricFamily("kvpool_tier_used_bytes", "Bytes in slots that are taken", labels=["tier"])
        blocks = GaugeMetricFamily("kvpool_tier_blocks", "Blocks in the tier", labels=["tier"])
        state = GaugeMetricFamily("kvpool_tier_ok", "1 while the tier is used", labels=["tier"])
        for told in self.node.tier_status():
            capacity.add_metric([told.tier], told.capacity_bytes)
            used.add_metric([told.tier], told.used_bytes)
            blocks.add_metric([told.tier], told.blocks)
            state.add_metric([told.tier], float(told.state == "ok"))
        yield from (capacity, used, blocks, state)
        tiers: list[tuple[str, Any]] = [("dram", self.node.dram), ("ssd", self.node.ssd)]
        events = CounterMetricFamily("kvpool_tier_events", "What the tiers did", labels=["tier", "event"])
        for name, tier in tiers:
            for event, n in tier.counters().items() if tier is not None else ():
                events.add_metric([name, event], n)
        yield events

    def _blocks(self) -> Iterator[Metric]:
        with self.node.lock:
            counters = dict(self.node.table.counters)
            gauges = self.node.table.gauges()
            misses = self.node.table.misses()
            pending = self.node.reporter.n_pending
        yield _counters("kvpool_block_events", "What became of blocks", counters)
        present = GaugeMetricFamily("kvpool_blocks_now", "Present values of the block table", labels=["what"])
        for what, n in gauges.items():
            present.add_metric([what], n)
        yield present
        names = {spec.uid: spec.name for spec in self.node.specs()}
        family = CounterMetricFamily("kvpool_misses", "Blocks asked for and not served", labels=["namespace", "cause"])
        for uid, causes in misses.items():
            for cause, n in causes.items():
                family.add_metric([names.get(uid, "deleted"), cause.value], n)
        yield family
        gauge = GaugeMetricFamily("kvpool_reports_pending", "Changed blocks that the master has not been told of")
        gauge.add_metric([], pending)
        yield gauge

    def _plane(self) -> Iterator[Metric]:
        yield _counters("kvpool_data_plane_events", "Requests, bytes and troubles of the data plane", self.plane.counters())
        for name, text, value in (
            ("kvpool_connections", "Connections to the data plane", self.plane.n_connections),
            ("kvpool_ring_bytes", "Memory in rings of local connections", self.plane.rings.used_bytes),
            ("kvpool_staging_bytes", "Memory in use for SSD reads and writes", self.node.staging.used_bytes),
            ("kvpool_listed_waiting", "Answers that wait for the master", self.node.listed.n_waiting),
        ):
            gauge = GaugeMetricFamily(name, text)
            gauge.add_metric([], value)
            yield gauge


def _counters(name: str, text: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=["event"])
    for event, n in sorted(values.items()):
        family.add_metric([event], n)
    return family


def make_app(node: Node, plane: DataPlane, agent: Agent | None, *, token: str) -> Starlette:
    """The application; `/readyz` is 503 while stopping, or when the probe failed (its body says why)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerCollector(node, plane, agent))
    probing: asyncio.Future[str] | None = None

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        nonlocal probing
        if plane.stopping:
            return JSONResponse({"ready": False, "reason": "stopping"}, status_code=503)
        if probing is None or probing.done():
            probing = asyncio.ensure_future(asyncio.to_thread(probe, plane.unix_name, token=token))
        reason = await asyncio.shield(probing)
        body = {"ready": not reason, "master": node.listed.up}
        return JSONResponse(body | ({"reason": reason} if reason else {}), status_code=503 if reason else 200)

    async def metrics(_: Request) -> Response:
        return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)])


class _Protocol(H11Protocol):
    """Closes connections that do not get a request together."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._kvpool_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._too_slow)

    def _too_slow(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._kvpool_timer.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the role's own."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """The listening socket. Raises ConfigError naming `http_port`."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise ConfigError(
            f"http_port: cannot listen on {host}:{port} ({error.strerror}); another process has it, or the address is not "
            "of this machine; 0 takes a free one"
        ) from error


async def serve(app: Starlette, sock: socket.socket) -> Callable[[], Awaitable[None]]:
    """Serves on the running loop; the answer stops it."""
    config = uvicorn.Config(
        app, http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=CONNECTIONS_MAX, h11_max_incomplete_event_size=HEADER_BYTES_MAX, timeout_graceful_shutdown=1,
        server_header=False,
    )  # fmt: skip
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))

    async def stop() -> None:
        server.should_exit = True
        with contextlib.suppress(Exception):
            await asyncio.wait_for(task, 3)
        sock.close()

    return stop
