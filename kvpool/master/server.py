"""The master process: starts store, gRPC and HTTP on one loop, says when it is ready, ends on a signal.

Order of a start: the data directory's lock and state, then the ports, then serving. Of an end: no new calls, streams told, ports
closed, store closed. What is served is `service`; what is known is `state`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

import kvpool
from kvpool.config import MasterSettings
from kvpool.core import version
from kvpool.errors import ConfigError, KVPoolError, Unauthenticated, VersionMismatch
from kvpool.master.http import HttpServer, application
from kvpool.master.lmdb_store import LmdbStore
from kvpool.master.service import MasterService
from kvpool.master.session import Sessions
from kvpool.master.state import Limits, MasterState
from kvpool.master.store import Store
from kvpool.obs import logs
from kvpool.obs.process import die_with_parent
from kvpool.transport.rpc import AUTHORIZATION, SERVER_OPTIONS, status_of
from kvpool.v1 import master_pb2 as pb
from kvpool.v1 import master_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

STOP_GRACE_S: Final = 2.0  # for calls that are under way; streams are told to end at once
STOP_MAX_S: Final = 8.0  # then the process ends whatever is left
TOKEN_BYTES_MAX: Final = 4096
AGENTS_MAX: Final = 256  # user agents remembered
_OPEN_TO_ALL: Final = "/grpc.health.v1.Health/"


def run(settings: MasterSettings, *, parent_pid: int | None = None) -> int:
    """Runs one master until SIGINT or SIGTERM: 0. A start that fails is said on standard error: 1. Raises ConfigError when the
    token file cannot be used, KVPoolError when `parent_pid` is not the parent."""
    import uvloop

    logs.set_up("master")
    if parent_pid is not None:
        die_with_parent(parent_pid)
    token = read_token(settings.token_file)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_main(settings, token))
    except KVPoolError as error:
        print(f"kvpool master: {error}", file=sys.stderr)  # noqa: T201
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
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
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
        await stop.wait()
        log.info("event=stopping")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_MAX_S):
                await master.stop()
    log.info("event=stopped")
    return 0


def _store(settings: MasterSettings) -> Store:
    if settings.store:
        raise ConfigError(f"store: {settings.store!r} is not supported by this version; leave it empty for LMDB in data_dir")
    return LmdbStore(Path(settings.data_dir))


def now_ms() -> int:
    """The master's clock: monotonic, so that a step of the wall clock expires nothing."""
    return time.monotonic_ns() // 1_000_000


class Master:
    """All parts of one master on the running loop."""

    def __init__(self, settings: MasterSettings, token: str, store: Store) -> None:
        self.store = store
        self.address = self.http_address = ""
        self._settings = settings
        self._token = token
        self._server: Any = None
        self._http: HttpServer | None = None
        self._http_socket: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sessions: Sessions | None = None
        self._state: MasterState | None = None
        self._stopped = False

    async def start(self) -> None:
        """Serving when it returns. Raises ConfigError or KVPoolError naming what is in the way."""
        s = self._settings
        epoch = await self.store.open()
        limits = Limits(**{name: getattr(s, name) for name in Limits.__slots__})
        state = self._state = MasterState(self.store, epoch, settings=limits, now_ms=now_ms)
        await state.load()
        sessions = self._sessions = Sessions(state)
        self._http_socket = _bind(s.http_host, s.http_port, "http_port")
        guards = [_Release(), *([_Bearer(self._token)] if self._token else [])]
        self._server = grpc.aio.server(interceptors=guards, options=SERVER_OPTIONS)
        await _register(self._server, MasterService(state, sessions))
        port = _add_port(self._server, s.host, s.port)
        self.address = state.leader = _join(s.advertise or _reachable(s.host), port)
        self.http_address = _join(_reachable(s.http_host), self._http_socket.getsockname()[1])
        await self._server.start()
        self._http = HttpServer(application(state, sessions), self._http_socket)
        self._http.start()
        self._tasks = [
            asyncio.ensure_future(_forever("tick", lambda: _tick(sessions, limits.heartbeat_ms))),
            asyncio.ensure_future(_forever("purge", lambda: _purge(state))),
        ]
        log.info("event=started epoch=%d address=%s http=%s namespaces=%d known_workers=%d", epoch, self.address,
                 self.http_address, len(state.namespaces), len(state.records))  # fmt: skip

    async def stop(self) -> None:
        """Ends everything that `start` began, in any state of it. A second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        if self._sessions is not None:
            self._sessions.close_all("the master is stopping")
        if self._state is not None:
            self._state.events.close()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.stop()
        elif self._http_socket is not None:
            self._http_socket.close()
        await self.store.close()


async def _forever(name: str, step: Callable[[], Awaitable[None]]) -> None:
    """Repeats a step; an error in one is logged and does not end the others."""
    while True:
        try:
            await step()
        except Exception:
            log.exception("event=step_failed step=%s", name)
            await asyncio.sleep(0.1)


async def _tick(sessions: Sessions, heartbeat_ms: int) -> None:
    await sessions.tick()
    await asyncio.sleep(heartbeat_ms / 1000)


async def _purge(state: MasterState) -> None:
    await state.purge_wanted.wait()
    state.purge_wanted.clear()
    while state.purge_step():
        await asyncio.sleep(0)


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


async def _register(server: Any, service: MasterService) -> None:
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection

    generated: Any = pb_grpc
    generated.add_MasterServicer_to_server(service, server)
    health_servicer: Any = getattr(health, "aio").HealthServicer()  # noqa: B009
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    name = pb.DESCRIPTOR.services_by_name["Master"].full_name
    for service_name in ("", name):
        await health_servicer.set(service_name, health_pb2.HealthCheckResponse.SERVING)
    names = (name, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
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
