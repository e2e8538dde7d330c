"""The client's end of one request: reads and writes with limits and deadlines, and notices when the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from starlette.types import Receive, Scope, Send

from kvpool_pd_proxy.protocol import BadRequest, error_body
from kvpool_pd_proxy.sse import DONE, encode

log = logging.getLogger("kvpool_pd_proxy")


class ClientGone(Exception):
    """The client left, or does not take its answer."""


class ClientSide:
    """Used by one task at a time, `gone` beside it once the body is read."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, request_id: str, timeout_s: float) -> None:
        self._receive, self._send, self._timeout_s = receive, send, timeout_s
        self.request_id = request_id
        self.headers = {bytes(name).lower(): bytes(value) for name, value in scope["headers"]}
        self.started = False
        self._finished = False
        self.route = ""

    async def body(self, *, bytes_max: int) -> bytes:
        """All of it. BadRequest (415, 413, 408) or ClientGone."""
        kind = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # a page in a browser may send other types to this machine without being asked first
            raise BadRequest("content-type must be application/json", status=415)
        said = self.headers.get(b"content-length", b"0")
        too_long = BadRequest(f"the request is longer than {bytes_max} bytes", status=413)
        if said.isdigit() and int(said) > bytes_max:
            raise too_long
        got = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone("before its request was whole")
                    got += message.get("body", b"")
                    if len(got) > bytes_max:
                        raise too_long
                    if not message.get("more_body", False):
                        return bytes(got)
        except TimeoutError:
            raise BadRequest(f"the request was not whole within {self._timeout_s:g} s", status=408) from None

    async def gone(self) -> None:
        """Returns when the client has left before its answer was whole; else never: cancel it."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._finished:  # ASGI says the same when all is sent
            await asyncio.get_running_loop().create_future()

    async def answer(self, status: int, data: bytes, *, content_type: str = "application/json", retry_after_s: int = 0) -> None:
        """The whole answer."""
        extra = [(b"retry-after", str(retry_after_s).encode())] if retry_after_s else []
        extra.append((b"content-length", str(len(data)).encode()))
        await self._start(status, content_type, extra)
        await self._write(data, more=False)

    async def error(self, status: int, message: str, *, param: str = "", retry_after_s: int = 0) -> None:
        """The whole answer is an error."""
        body = json.dumps(error_body(message, status=status, param=param)).encode()
        await self.answer(status, body, retry_after_s=retry_after_s)

    async def start_stream(self) -> None:
        await self._start(200, "text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")])

    async def piece(self, data: bytes) -> None:
        await self._write(data, more=True)

    async def end(self) -> None:
        await self._write(b"", more=False)

    async def break_off(self, status: int, message: str) -> None:
        """A stream that has begun ends with an error event, then `[DONE]`."""
        await self._write(encode(error_body(message, status=status)) + DONE, more=False)

    async def _start(self, status: int, content_type: str, extra: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        headers = [(b"content-type", content_type.encode()), (b"x-request-id", self.request_id.encode()), *extra]
        if self.route:
            headers.append((b"x-kvpool-route", self.route.encode()))
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes, *, more: bool) -> None:
        self._finished = not more
        await self._put({"type": "http.response.body", "body": data, "more_body": more})

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientGone("it does not take its answer") from None
