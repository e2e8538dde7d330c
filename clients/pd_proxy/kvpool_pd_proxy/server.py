"""The proxy's socket: patience with slow senders, one ready line, an end on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpool_pd_proxy.app import application
from kvpool_pd_proxy.settings import Settings

SPARE_CONNECTIONS: Final = 64  # for metrics, health and the refusals beyond --max-requests
HEADER_TIMEOUT_S: Final = 10.0  # from the connection, or the answer before, to the whole header of a request
GRACE_S: Final = 5


class _Protocol(H11Protocol):
    """Closes connections that do not get a request's header together: each would keep a socket for ever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self._stop()
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._too_slow)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()


async def serve(settings: Settings, bound: socket.socket) -> None:
    """Until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        application(settings),
        http=_Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        limit_concurrency=settings.requests_max + SPARE_CONNECTIONS,
        timeout_keep_alive=int(HEADER_TIMEOUT_S),
        timeout_graceful_shutdown=GRACE_S,
    )
    await _Server(config, bound).serve(sockets=[bound])


class _Server(uvicorn.Server):
    """Says when it is ready; a signal ends it with exit status 0."""

    def __init__(self, config: uvicorn.Config, bound: socket.socket) -> None:
        super().__init__(config)
        self._bound = bound

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self._bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        line = json.dumps({"ready": True, "role": "pd_proxy", "url": f"http://{shown}:{port}"})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield
