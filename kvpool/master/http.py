"""The master's HTTP port: /metrics, /healthz (the process answers), /readyz (a lookup and a read of the store just succeeded).

A standby is healthy and not ready: it says who leads.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvpool.core.membership import WorkerState
from kvpool.core.pins import PinLevel
from kvpool.master.session import Sessions
from kvpool.master.state import MasterState
from kvpool.obs.http import ImpatientProtocol
from kvpool.obs.metrics import CONTENT_TYPE, Kind, Metric, counter, expose, gauge

READ_TIMEOUT_S: Final = 2.0  # of the store, for /readyz
CONNECTIONS_MAX: Final = 2048  # beyond, 503; slow senders, which are closed after some seconds, leave room for others
KEEP_ALIVE_S: Final = 5


class Leading(Protocol):
    """What a leader has (`leading.Term`)."""

    state: MasterState
    sessions: Sessions


def application(
    leading: Callable[[], Leading | None], *, leader: Callable[[], str], store: Callable[[], Iterable[Metric]]
) -> Starlette:
    """`leading`: None on a standby. `leader`: the leader's address, "" unknown. `store`: metrics of the store."""

    async def metrics(_: Request) -> Response:
        term = leading()
        own = () if term is None else _metrics(term.state, term.sessions)
        role = gauge("kvpool_leading_state", "1: this master leads", int(term is not None))
        return Response(expose([role, *store(), *own]), media_type=CONTENT_TYPE)

    async def healthz(_: Request) -> Response:
        term = leading()
        if term is None:
            return JSONResponse({"ok": True, "role": "master", "standby": True, "leader": leader()})
        return JSONResponse({"ok": True, "role": "master", "epoch": term.state.epoch})

    async def readyz(_: Request) -> Response:
        term = leading()
        if term is None:
            body = {"ready": False, "standby": True, "leader": leader(), "reason": "standby: another master leads, or none yet"}
            return JSONResponse(body, status_code=503)
        state = term.state
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                await state.store.ping()
        except Exception as error:
            return JSONResponse({"ready": False, "reason": f"store: {type(error).__name__}: {error}"}, status_code=503)
        for uid in state.catalog.namespaces()[:1]:
            state.catalog.locate(uid, [bytes(34)])
        return JSONResponse({"ready": True, "epoch": state.epoch, "complete": state.complete()})

    return Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthz), Route("/readyz", readyz)])


class _Server(uvicorn.Server):
    """Signals are the master's own business."""

    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        from contextlib import nullcontext

        return nullcontext()  # type: ignore[return-value]


class HttpServer:
    """Serves an application on a socket that is bound already, on the running loop."""

    def __init__(self, application: Starlette, bound: socket.socket) -> None:
        config = uvicorn.Config(
            application,
            http=ImpatientProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._socket = bound
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        """Ends it within some seconds; the socket is closed."""
        if self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=3.0)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()


def _metrics(state: MasterState, sessions: Sessions) -> Iterator[Metric]:
    counts, watching = state.counts, state.watch_counters
    yield gauge("kvpool_epoch_number", "Term of this master", state.epoch)
    yield gauge("kvpool_index_complete_state", "1: the index has what the workers have", int(state.complete()))
    yield gauge("kvpool_index_replicas", "Replicas in the index", state.catalog.replicas)
    yield gauge("kvpool_index_bytes", "Memory of the index", state.catalog.index_bytes)
    yield gauge("kvpool_gone_keys", "Keys whose miss cause is remembered", len(state.gone))
    yield gauge("kvpool_namespaces", "Namespaces", len(state.namespaces))
    limited = [namespace for namespace in state.namespaces.values() if namespace.spec.quota_bytes]
    quotas: dict[tuple[str, ...], float] = {(ns.spec.name,): float(ns.spec.quota_bytes) for ns in limited}
    yield Metric("kvpool_namespace_quota_bytes", Kind.GAUGE, "Quota of a namespace", ("namespace",), quotas)
    used: dict[tuple[str, ...], float] = {
        (ns.spec.name, tier): float(n)
        for ns in limited
        for tier, n in zip(("dram", "ssd"), sessions.quotas.used(ns.spec.uid), strict=True)
    }
    yield Metric("kvpool_namespace_used_bytes", Kind.GAUGE, "Bytes that all its copies take", ("namespace", "tier"), used)
    pins = [namespace.pins.counts() for namespace in state.namespaces.values() if len(namespace.pins)]
    by_level: dict[tuple[str, ...], float] = {
        (level.name.lower(),): float(sum(one[level] for one in pins)) for level in (PinLevel.SOFT, PinLevel.HARD)
    }
    yield Metric("kvpool_pins", Kind.GAUGE, "Keys that are pinned", ("level",), by_level)
    states: dict[tuple[str, ...], float] = {(s.name.lower(),): 0.0 for s in WorkerState}
    for member in state.members:
        states[(member.told_state.name.lower(),)] += 1
    known_away = sum(1 for worker_id in state.records if state.members.get(worker_id) is None)
    states[("down",)] += known_away
    yield Metric("kvpool_workers", Kind.GAUGE, "Workers by state", ("state",), states)
    yield gauge("kvpool_sessions_open", "Open streams of workers", sessions.open_streams)
    yield counter("kvpool_sessions_total", "Sessions of workers that began", counts.sessions)
    yield counter("kvpool_sessions_refused_total", "Sessions that were refused or cut", counts.sessions_refused)
    yield counter("kvpool_workers_lost_total", "Workers taken for dead", counts.workers_lost)
    yield counter("kvpool_reports_total", "Reports applied", counts.reports)
    yield counter("kvpool_report_keys_total", "Keys in applied reports", counts.report_keys)
    yield counter("kvpool_report_duplicates_total", "Reports that came again", counts.reports_duplicate)
    yield counter("kvpool_report_gaps_total", "Gaps in reports, each answered by asking for an inventory", counts.reports_gap)
    yield counter("kvpool_inventories_total", "Inventories that were completed", counts.inventories)
    yield counter("kvpool_inventory_keys_total", "Keys in inventories", counts.inventory_keys)
    yield counter("kvpool_lookups_total", "Locate and Match calls", counts.lookups)
    yield counter("kvpool_lookup_keys_total", "Keys in them", counts.lookup_keys)
    yield counter("kvpool_removals_total", "Removals logged", counts.removals)
    yield counter("kvpool_removals_pending_total", "Removals that a worker did not confirm in time", counts.removals_pending)
    yield counter("kvpool_peers_reported_total", "Workers that a client said it could not use", counts.peers_reported)
    yield gauge("kvpool_watchers", "Open watches", watching.watchers)
    yield counter("kvpool_watch_resyncs_total", "Snapshots sent to watchers", watching.resyncs)
    yield counter("kvpool_watch_events_total", "Messages sent to watchers", watching.events_sent)
    errors: dict[tuple[str, ...], float] = {(code,): float(n) for code, n in counts.rpc_errors.items()}
    yield Metric("kvpool_rpc_errors_total", Kind.COUNTER, "Failed calls by error code", ("code",), errors)
    misses: dict[tuple[str, ...], float] = {
        (namespace.spec.name, cause.value): float(n)
        for namespace in state.namespaces.values()
        for cause, n in namespace.misses.items()
    }
    yield Metric("kvpool_lookup_misses_total", Kind.COUNTER, "First misses of lookups by cause", ("namespace", "cause"), misses)
