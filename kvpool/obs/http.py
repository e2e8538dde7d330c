"""Patience with HTTP clients: connections that do not get a whole request together are closed, on the ports of every role.

Owns the time limit only; the applications and their sockets are the roles' own.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT_S: Final = 5.0  # from the connection, or the answer before, to the whole header of a request


class ImpatientProtocol(H11Protocol):
    """For uvicorn's `http=`: a slow sender costs a socket for `REQUEST_TIMEOUT_S`, not for ever."""

    _kvpool_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._kvpool_arm()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._kvpool_arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._kvpool_disarm()
        super().connection_lost(exc)

    def _kvpool_arm(self) -> None:
        self._kvpool_disarm()
        self._kvpool_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._kvpool_too_slow)

    def _kvpool_disarm(self) -> None:
        if self._kvpool_timer is not None:
            self._kvpool_timer.cancel()
            self._kvpool_timer = None

    def _kvpool_too_slow(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and not self.transport.is_closing():
            self.transport.close()
