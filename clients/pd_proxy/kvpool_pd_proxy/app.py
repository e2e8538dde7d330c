"""The application: OpenAI's endpoints, /v1/models, /metrics, /healthz, /readyz; admission and the end of each request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Final

import httpx
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvpool_pd_proxy.clientside import ClientGone, ClientSide
from kvpool_pd_proxy.exchange import Exchange, Outcome, endpoint
from kvpool_pd_proxy.metrics import Metrics
from kvpool_pd_proxy.nodes import Role
from kvpool_pd_proxy.protocol import BadRequest, Kind, error_body, parse
from kvpool_pd_proxy.settings import Settings

log = logging.getLogger("kvpool_pd_proxy")

MODELS_TIMEOUT_S: Final = 5.0


class Proxy:
    """State of the whole proxy. On one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.prefill = Role("prefill", settings.prefill, settings, indispensable=False)
        self.decode = Role("decode", settings.decode, settings, indispensable=True)
        self.metrics = Metrics((self.prefill, self.decode), slo_ttft_s=settings.slo_ttft_s, slo_itl_s=settings.slo_itl_s)
        self.running = 0

    async def handle(self, kind: Kind, client: ClientSide) -> None:
        """One request from its first byte to its last."""
        began_s = time.monotonic()
        if self.running >= self.settings.requests_max:
            self.metrics.requests.labels(endpoint(kind), "rejected").inc()
            with contextlib.suppress(ClientGone):
                await client.error(429, f"{self.running} requests are running, which is the most", retry_after_s=1)
            return
        self.running += 1
        self.metrics.running.set(self.running)
        outcome = Outcome.FAILED
        try:
            outcome = await self._handle(kind, client, began_s)
        except ClientGone:
            outcome = Outcome.CANCELLED
        finally:
            self.running -= 1
            self.metrics.running.set(self.running)
            self.metrics.requests.labels(endpoint(kind), outcome.value).inc()
            self.metrics.seconds.labels(endpoint(kind)).observe(time.monotonic() - began_s)

    async def _handle(self, kind: Kind, client: ClientSide, began_s: float) -> Outcome:
        settings = self.settings
        try:
            raw = await client.body(bytes_max=settings.body_bytes_max)
            ask = parse(kind, raw, bytes_per_token=settings.bytes_per_token)
        except BadRequest as error:
            await client.error(error.status, str(error), param=error.param)
            return Outcome.REJECTED
        exchange = Exchange(
            ask, client, prefill=self.prefill, decode=self.decode, metrics=self.metrics, settings=settings, began_s=began_s
        )
        work, gone = asyncio.ensure_future(exchange.run()), asyncio.ensure_future(client.gone())
        outcome = Outcome.FAILED
        try:
            await asyncio.wait({work, gone}, timeout=settings.request_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                outcome = work.result()
            elif gone.done():
                raise ClientGone("while its request was running")
            else:
                await _ended(work)
                words = f"the request took longer than {settings.request_timeout_s:g} s"
                await (client.break_off(504, words) if client.started else client.error(504, words))
        except ClientGone:
            outcome = Outcome.CANCELLED
            raise
        except Exception as error:
            log.exception("request_failed request_id=%s", client.request_id)
            words = f"the proxy failed: {type(error).__name__}"
            await _ended(work)
            await (client.break_off(500, words) if client.started else client.error(500, words))
        finally:
            await _ended(work, gone)
            if ask.stream and outcome in (Outcome.OK, Outcome.FAILED):
                failed = outcome is Outcome.FAILED
                self.metrics.judge(ttft_s=None if failed else exchange.clock.ttft_s, itl_s=exchange.clock.itl_mean_s)
        return outcome

    async def keep_probing(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self.settings.probe_interval_s)
            await asyncio.gather(self.prefill.probe(), self.decode.probe())


async def _ended(*tasks: asyncio.Task[object] | asyncio.Future[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Endpoint:
    """ASGI: it reads and writes by itself, since it must see the client leave while an engine computes."""

    def __init__(self, proxy: Proxy, kind: Kind) -> None:
        self._proxy, self._kind = proxy, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        timeout_s = self._proxy.settings.client_timeout_s
        client = ClientSide(scope, receive, send, request_id=f"pd-{uuid.uuid4().hex}", timeout_s=timeout_s)
        await self._proxy.handle(self._kind, client)


def application(settings: Settings) -> Starlette:
    """The proxy as an ASGI application."""
    proxy = Proxy(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await asyncio.gather(proxy.prefill.probe(), proxy.decode.probe())
        probing = asyncio.ensure_future(proxy.keep_probing())
        try:
            yield
        finally:
            await _ended(probing)
            await asyncio.gather(proxy.prefill.close(), proxy.decode.close())

    async def models(request: Request) -> Response:
        headers = {"authorization": request.headers["authorization"]} if "authorization" in request.headers else {}
        for node in proxy.decode.nodes:
            if not node.breaker.admits():
                continue
            try:
                async with asyncio.timeout(MODELS_TIMEOUT_S):
                    answer = await node.client.get("/v1/models", headers=headers)
            except (httpx.HTTPError, OSError):
                continue
            if answer.status_code < 500:
                return Response(answer.content, answer.status_code, media_type="application/json")
        return _error(503, "no decode node is available now")

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(proxy.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def healthz(_: Request) -> Response:
        return JSONResponse({"ok": True, "role": "pd_proxy"})

    async def readyz(_: Request) -> Response:
        nodes = {
            role.name: [{"node": node.name, "state": node.breaker.state.name.lower()} for node in role.nodes]
            for role in (proxy.prefill, proxy.decode)
        }
        ready = proxy.decode.ready()
        return JSONResponse({"ready": ready, **nodes}, status_code=200 if ready else 503)

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error(error.status_code, str(error.detail))

    routes = [Route(kind.path, _Endpoint(proxy, kind), methods=["POST"]) for kind in Kind]
    routes += [
        Route("/v1/models", models),
        Route("/metrics", metrics),
        Route("/healthz", healthz),
        Route("/health", healthz),
        Route("/readyz", readyz),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: http_error})


def _error(status: int, message: str) -> Response:
    return Response(json.dumps(error_body(message, status=status)), status, media_type="application/json")
