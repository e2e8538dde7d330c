"""The master process: starts store, gRPC and HTTP on one loop, says when it is ready, ends on a signal.

Order of a start: the data directory's lock and state, then the ports, then serving; among several masters the ports, then the
election (`leading`). Of an end: no new calls, streams told, ports closed, lease given back, store closed. What is served is
`service`; what is known is `state`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

import kvpool
from kvpool.config import MasterSettings
from kvpool.core import version
from kvpool.errors import ConfigError, KVPoolError, Unauthenticated, VersionMismatch
from kvpool.master.election import Elector, end_task
from kvpool.master.http import HttpServer, application
from kvpool.master.leading import Front, Leadership, Term
from kvpool.master.lmdb_store import LmdbStore, take_lock
from kvpool.master.redis_store import RedisStore
from kvpool.master.state import Limits
from kvpool.obs import logs
from kvpool.obs.metrics import Metric, counter
from kvpool.obs.process import die_with_parent, ignore_stops, on_stops
from kvpool.transport.rpc import AUTHORIZATION, SERVER_OPTIONS, status_of
from kvpool.v1 import master_pb2 as pb
from kvpool.v1 import master_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

STOP_GRACE_S: Final = 2.0  # for calls that are under way; streams are told to end at once
STOP_MAX_S: Final = 8.0  # then the process ends whatever is left
TOKEN_BYTES_MAX: Final = 4096
ID_CHARS_MAX: Final = 64
AGENTS_MAX: Final = 256  # user agents remembered
SERVICE: Final = pb.DESCRIPTOR.services_by_name["Master"].full_name
_OPEN_TO_ALL: Final = "/grpc.health.v1.Health/"


def run(settings: MasterSettings, *, say: Callable[[KVPoolError], object], parent_pid: int | None = None) -> int:
    """Runs one master until SIGINT or SIGTERM: 0. Why a start fails goes to `say`: 1. Raises ConfigError when the token file
    cannot be used, KVPoolError when `parent_pid` is not the parent."""
    import uvloop

    logs.set_up("master")
    if parent_pid is not None:
        die_with_parent(parent_pid)
    token = read_token(settings.token_file)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                return runner.run(_main(settings, token))
            finally:
                ignore_stops()  # one more must not spoil the exit status
    except KVPoolError as error:
        say(error)
        return 1


def read_token(path: str) -> str:
    """The shared token in the file; "" for no file. Raises ConfigError naming `token_file`."""
    if not path:
        return ""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(TOKEN_BYTES_MAX + 1)
        token = raw.decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file: {path} cannot be read as text: {error}") from error
    if not token or len(raw) > TOKEN_BYTES_MAX or not token.isprintable():
        raise ConfigError(f"token_file: {path} must hold 1..{TOKEN_BYTES_MAX} printable characters")
    return token


async def _main(settings: MasterSettings, token: str) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    on_stops(loop, lambda _number: stop.set())
    async with contextlib.AsyncExitStack() as stack:
        master = Master(settings, token, _store(settings))
        stack.push_async_callback(master.stop)
        await master.start()
        ready = {
            "ready": True,
            "role": "master",
            "id": master.store.master_id,
            "pid": os.getpid(),
            "address": master.address,
            "http": master.http_address,
        }
        print(json.dumps(ready), flush=True)  # noqa: T201
        asked = asyncio.ensure_future(stop.wait())
        await asyncio.wait([asked, *master.vital], return_when=asyncio.FIRST_COMPLETED)
        failed = not asked.done()
        asked.cancel()
        log.log(logging.ERROR if failed else logging.INFO, "event=stopping reason=%s", "election_ended" if failed else "signal")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_MAX_S):
                await master.stop()
    log.info("event=stopped")
    return int(failed)


def _store(settings: MasterSettings) -> LmdbStore | RedisStore:
    if settings.store:
        return RedisStore(settings.store, master_id=_master_id(Path(settings.data_dir)))
    return LmdbStore(Path(settings.data_dir))


def _master_id(data_dir: Path) -> str:
    """The id of the master whose directory this is, made at its first start."""
    path = data_dir / "master_id"
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        known = path.read_text(encoding="ascii").strip() if path.exists() else ""
        if not known or len(known) > ID_CHARS_MAX or not known.isprintable():
            known = f"m-{uuid.uuid4().hex[:12]}"
            path.write_text(known + "\n", encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data_dir: {path} cannot be used: {error}") from error
    return known


def now_ms() -> int:
    """The master's clock: monotonic, so that a step of the wall clock expires nothing."""
    return time.monotonic_ns() // 1_000_000


class Master:
    """All parts of one master on the running loop."""

    def __init__(self, settings: MasterSettings, token: str, store: LmdbStore | RedisStore) -> None:
        self.store = store
        self.vital: list[asyncio.Task[None]] = []  # none of them may end while this master runs
        self.address = self.http_address = ""
        self._settings = settings
        self._token = token
        self._server: Any = None
        self._http: HttpServer | None = None
        self._http_socket: socket.socket | None = None
        self._term: Term | None = None  # of a master on its own
        self._leadership: Leadership | None = None  # of one among several
        self._lock: int | None = None
        self._stopped = False

    def _leading(self) -> Term | None:
        return self._term if self._leadership is None else self._leadership.term

    def _leader(self) -> str:
        return self.address if self._leadership is None else self._leadership.leader()

    async def start(self) -> None:
        """Serving when it returns. Raises ConfigError or KVPoolError naming what is in the way."""
        s, store = self._settings, self.store
        limits = Limits(**{name: getattr(s, name) for name in Limits.__slots__})
        if isinstance(store, RedisStore):
            self._lock = take_lock(Path(s.data_dir))
        else:
            epoch = await store.open()
            self._term = Term(store, epoch, settings=limits, leader="", now_ms=now_ms)
            await self._term.begin()
        self._http_socket = _bind(s.http_host, s.http_port, "http_port")
        guards = [_Release(), *([_Bearer(self._token)] if self._token else [])]
        self._server = grpc.aio.server(interceptors=guards, options=SERVER_OPTIONS)
        port = _add_port(self._server, s.host, s.port)
        self.address = _join(s.advertise or _reachable(s.host), port)
        self.http_address = _join(_reachable(s.http_host), self._http_socket.getsockname()[1])
        if isinstance(store, RedisStore):
            elector = Elector(store, address=self.address, terms=store.terms)
            health = await _register_health(self._server, serves=False)
            self._leadership = Leadership(store, elector, settings=limits, address=self.address, now_ms=now_ms, tell=health)
            _register(self._server, Front(self._leadership))
        else:
            assert self._term is not None
            self._term.state.leader = self.address
            await _register_health(self._server, serves=True)
            _register(self._server, self._term.service)
        await self._server.start()
        self._http = HttpServer(application(self._leading, leader=self._leader, store=self._store_metrics), self._http_socket)
        self._http.start()
        if self._leadership is not None:
            self.vital = [asyncio.create_task(self._leadership.elector.run()), asyncio.create_task(self._leadership.run())]
        log.info("event=started address=%s http=%s store=%s", self.address, self.http_address,
                 getattr(store, "place", "data_dir"))  # fmt: skip

    def _store_metrics(self) -> Iterator[Metric]:
        if not isinstance(self.store, RedisStore) or self._leadership is None:
            return
        counts, link, elector = self.store.counts, self.store.link_counts, self._leadership.elector
        yield counter("kvpool_store_writes_total", "Writes to the shared store", counts.writes)
        yield counter("kvpool_store_fenced_total", "Writes refused because another master leads", counts.fenced)
        yield counter("kvpool_store_unreplicated_total", "Writes that no replica had in time", counts.unreplicated)
        yield counter("kvpool_store_set_backs_total", "Times that the store lost confirmed writes", counts.rolled_back)
        yield counter("kvpool_store_timeouts_total", "Requests to the store without an answer in time", link.timeouts)
        yield counter("kvpool_store_unavailable_total", "Requests that the store could not serve", link.unavailable)
        yield counter("kvpool_lease_failures_total", "Requests about the lease without an answer", elector.failures)

    async def stop(self) -> None:
        """Ends everything that `start` began, in any state of it. A second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        term = self._leading()
        if term is not None:
            term.close("the master is stopping")
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        for task in self.vital:
            await end_task(task)
        for failure in await asyncio.gather(*(task for task in self.vital if task.done()), return_exceptions=True):
            if isinstance(failure, Exception):
                log.error("event=election_failed error=%r", failure)
        if term is not None:
            await term.end()
        if self._http is not None:
            await self._http.stop()
        elif self._http_socket is not None:
            self._http_socket.close()
        await self.store.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


# --- ports and calls ----------------------------------------------------------------------------------------------------


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reachable(host: str) -> str:
    """A wildcard is no address that anybody can go to: what this machine's own processes use stands for it."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _bind(host: str, port: int, field: str) -> socket.socket:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"http_host: {host!r} is no address of this machine: {error}") from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
        bound.listen(128)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{field}: port {port} on {host} is in use by another process") from error
        raise ConfigError(f"{field}: {host} port {port} cannot be listened on: {error.strerror}") from error
    return bound


def _add_port(server: Any, host: str, port: int) -> int:
    if port:  # gRPC's own message says nothing; ask the kernel first
        _bind(host, port, "port").close()
    try:
        bound: int = server.add_insecure_port(_join(host, port))
    except RuntimeError as error:
        raise ConfigError(f"port: {host} port {port} cannot be listened on: {error}") from error
    if not bound:
        raise ConfigError(f"port: {host} port {port} cannot be listened on")
    return bound


async def _register_health(server: Any, *, serves: bool) -> Callable[[bool], Awaitable[None]]:
    """The health service: the process is well; of the Master service it says whether this master leads. What it returns changes
    that."""
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    servicer: Any = getattr(health, "aio").HealthServicer()  # noqa: B009
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    states = health_pb2.HealthCheckResponse

    async def tell(leads: bool) -> None:
        await servicer.set(SERVICE, states.SERVING if leads else states.NOT_SERVING)

    await servicer.set("", states.SERVING)
    await tell(serves)
    return tell


def _register(server: Any, service: pb_grpc.MasterServicer) -> None:
    from grpc_health.v1 import health_pb2
    from grpc_reflection.v1alpha import reflection

    generated: Any = pb_grpc
    generated.add_MasterServicer_to_server(service, server)
    names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


class _Bearer(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the shared token; the health service answers everybody."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN_TO_ALL):
            return handler
        given = next((value for key, value in details.invocation_metadata or () if key == AUTHORIZATION), "")
        raw = given if isinstance(given, bytes) else given.encode()
        if hmac.compare_digest(raw, self._wanted):
            return handler
        return _refusal(handler, Unauthenticated("token: none was given, or not the one of this pool"))


class _Release(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls of kvpool releases that are too far from this one. Workers say theirs in their hello; who names no kvpool in
    its user agent (grpcurl, a health check) is let through."""

    def __init__(self) -> None:
        self._judged: dict[str, VersionMismatch | None] = {}  # by user agent: a handful in practice

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        agent = next((value for key, value in details.invocation_metadata or () if key == "user-agent"), "")
        if handler is None or not isinstance(agent, str) or details.method.startswith(_OPEN_TO_ALL):
            return handler
        if agent not in self._judged:
            if len(self._judged) >= AGENTS_MAX:
                self._judged.clear()
            self._judged[agent] = _judge(agent)
        error = self._judged[agent]
        return handler if error is None else _refusal(handler, error)


def _judge(agent: str) -> VersionMismatch | None:
    release = version.of_user_agent(agent)
    if release is None:
        return None
    try:
        version.check(release, peer_name="caller", own=kvpool.__version__, own_name="master")
    except VersionMismatch as error:
        return error
    return None


def _refusal(handler: Any, error: KVPoolError) -> Any:
    """A handler of the same shape that refuses."""
    status, message, metadata = status_of(error)

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(status, message, metadata)

    async def refuse_stream(_: Any, context: Any) -> Any:
        await context.abort(status, message, metadata)
        yield  # a generator, like what it stands for

    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
    refusing = refuse_stream if handler.response_streaming else refuse
    return make(refusing, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer)
