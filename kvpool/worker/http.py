"""The worker's HTTP face: /metrics, /healthz (the process lives), /readyz (a read has just succeeded).

Owns the web application, the listening socket's limits and the names of the worker's metrics. Numbers come from the node and the
data plane, where they are plain ints. Runs on the main thread's loop; the probe runs in a thread, one at a time, shared by
all who ask meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvpool.core.policy.rival import Mode
from kvpool.errors import ConfigError
from kvpool.obs.http import ImpatientProtocol
from kvpool.obs.metrics import CONTENT_TYPE, Kind, Metric, expose, gauge
from kvpool.worker.probe import probe

if TYPE_CHECKING:
    from kvpool.worker.agent import Agent
    from kvpool.worker.dataplane import DataPlane
    from kvpool.worker.node import Node

KEEP_ALIVE_S: Final = 5
CONNECTIONS_MAX: Final = 2048  # beyond, 503
HEADER_BYTES_MAX: Final = 16 << 10


def metrics_of(node: Node, plane: DataPlane, agent: Agent | None) -> list[Metric]:
    """All metrics of one worker, now. Any thread."""
    return [*_tiers(node), *_blocks(node), *_policy(node), *_scrub(node), *_plane(node, plane), *_session(node, agent)]


def _tiers(node: Node) -> Iterator[Metric]:
    told = node.tier_status()
    for name, text, field in (
        ("kvpool_tier_capacity_bytes", "size of the tier", "capacity_bytes"),
        ("kvpool_tier_used_bytes", "bytes in slots that are taken", "used_bytes"),
        ("kvpool_tier_blocks", "blocks in the tier", "blocks"),
    ):
        yield Metric(name, Kind.GAUGE, text, ("tier",), {(t.tier,): getattr(t, field) for t in told})
    in_use: dict[tuple[str, ...], float] = {(t.tier,): float(t.state == "ok") for t in told}
    yield Metric("kvpool_tier_ok", Kind.GAUGE, "1 while the tier is in use", ("tier",), in_use)
    events: dict[tuple[str, ...], float] = {("dram", event): n for event, n in node.dram.counters().items()}
    if node.ssd is not None:
        events |= {("ssd", event): n for event, n in node.ssd.counters().items()}
    if node.mover is not None:
        events |= {("mover", event): n for event, n in node.mover.counters().items()}
    yield Metric("kvpool_tier_events", Kind.COUNTER, "what the tiers did", ("tier", "event"), events)


def _blocks(node: Node) -> Iterator[Metric]:
    with node.lock:
        counters, gauges, misses = dict(node.table.counters), node.table.gauges(), node.table.misses_by_tier()
        pending, troubles = node.reporter.n_pending, dict(node.read_troubles)
    names = {spec.uid: spec.name for spec in node.specs()}
    yield _events("kvpool_block_events", "what became of blocks", counters)
    present: dict[tuple[str, ...], float] = {(name,): float(n) for name, n in gauges.items()}
    yield Metric("kvpool_blocks_now", Kind.GAUGE, "present values of the block table", ("what",), present)
    by_cause: dict[tuple[str, ...], float] = {
        (names.get(uid, "?"), tier, cause.value): n for uid, tier, cause, n in misses
    }
    yield Metric("kvpool_misses", Kind.COUNTER, "blocks asked for and not here", ("namespace", "tier", "cause"), by_cause)
    by_trouble: dict[tuple[str, ...], float] = {
        (names.get(uid, "?"), "ssd", trouble): n for (uid, trouble), n in troubles.items()
    }
    text = "blocks that were here and could not be served"
    yield Metric("kvpool_read_troubles", Kind.COUNTER, text, ("namespace", "tier", "trouble"), by_trouble)
    used: dict[tuple[str, ...], float] = {}
    quota: dict[tuple[str, ...], float] = {}
    for uid, dram, ssd, share in node.quota_uses():
        name = names.get(uid, "?")
        used |= {(name, "dram"): float(dram), (name, "ssd"): float(ssd)}
        quota |= {(name, "dram"): float(share.dram), (name, "ssd"): float(share.ssd)}
    labels = ("namespace", "tier")
    yield Metric("kvpool_namespace_used_bytes", Kind.GAUGE, "bytes that a namespace with a quota takes", labels, used)
    yield Metric("kvpool_namespace_quota_bytes", Kind.GAUGE, "this worker's part of its quota", labels, quota)
    yield gauge("kvpool_reports_pending", "changed blocks that the master has not been told of", pending)


def _policy(node: Node) -> Iterator[Metric]:
    if node.learned is None:
        return
    with node.lock:
        rival = node.learned.policy.rival
        hits, lru_hits, mode = rival.all_hits + rival.hits, rival.all_lru_hits + rival.lru_hits, rival.mode
    text = "blocks that were here when they were used, and those that would have been had the policy been lru"
    by_policy: dict[tuple[str, ...], float] = {("hazard",): hits, ("lru",): lru_hits}
    yield Metric("kvpool_policy_hits", Kind.COUNTER, text, ("policy",), by_policy)
    modes: dict[tuple[str, ...], float] = {(one.name.lower(),): float(one is mode) for one in Mode}
    yield Metric("kvpool_policy_mode", Kind.GAUGE, "1 for how the learned policy orders blocks now", ("mode",), modes)


def _scrub(node: Node) -> Iterator[Metric]:
    facts = {} if node.scrubber is None else node.scrubber.facts()
    for name, kind, text, key in (
        ("kvpool_scrubbed_blocks", Kind.COUNTER, "copies read again and checked", "blocks"),
        ("kvpool_scrubbed_bytes", Kind.COUNTER, "bytes of them", "bytes"),
        ("kvpool_scrub_corrupt", Kind.COUNTER, "copies that were not what was put, and were dropped", "corrupt"),
        ("kvpool_scrub_skipped", Kind.COUNTER, "copies not read: no staging memory to spare", "skipped"),
        ("kvpool_scrub_failed", Kind.COUNTER, "copies not read: the device failed", "failed"),
        ("kvpool_scrub_passes", Kind.COUNTER, "times that all of the tier was read again", "passes"),
        ("kvpool_scrub_last_pass_seconds", Kind.GAUGE, "how long the last of them took", "last_pass_s"),
        ("kvpool_scrub_last_pass_timestamp_seconds", Kind.GAUGE, "when it ended (unix time), 0: never", "last_pass_ended"),
    ):
        yield Metric(name, kind, text, ("tier",), {(tier,): float(told[key] or 0) for tier, told in facts.items()})


def _plane(node: Node, plane: DataPlane) -> Iterator[Metric]:
    yield _events("kvpool_data_plane_events", "requests, bytes and troubles of the data plane", plane.counters())
    yield gauge("kvpool_connections", "connections to the data plane", plane.n_connections)
    yield gauge("kvpool_ring_bytes", "memory in rings of local connections", plane.rings.used_bytes)
    yield gauge("kvpool_staging_bytes", "memory in use for SSD reads and writes", node.staging.used_bytes)
    if plane.spreader is not None:
        yield _events("kvpool_copy_events", "copies made on other workers: blocks, bytes, by reason", dict(plane.spreader.counts))
    yield gauge("kvpool_listed_waiting", "answers that wait for the master", node.listed.n_waiting)


def _session(node: Node, agent: Agent | None) -> Iterator[Metric]:
    yield gauge("kvpool_session_up", "1 while the master has this worker's session", node.listed.up)
    if agent is not None:
        yield _events("kvpool_session_events", "sessions with the master", agent.counters)


def _events(name: str, text: str, values: Mapping[str, int]) -> Metric:
    return Metric(name, Kind.COUNTER, text, ("event",), {(event,): n for event, n in values.items()})


def make_app(node: Node, plane: DataPlane, agent: Agent | None, *, token: str) -> Starlette:
    """The application; `/readyz` is 503 while stopping, or when the probe failed (its body says why)."""
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
        return Response(await asyncio.to_thread(lambda: expose(metrics_of(node, plane, agent))), media_type=CONTENT_TYPE)

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)])


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
        app, http=ImpatientProtocol, ws="none", lifespan="off", log_config=None, access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S, limit_concurrency=CONNECTIONS_MAX,
        h11_max_incomplete_event_size=HEADER_BYTES_MAX, timeout_graceful_shutdown=1,
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
