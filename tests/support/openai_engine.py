"""A stand-in engine: speaks OpenAI's protocol as vLLM does, with a model that is a hash and a tokenizer that is the alphabet.

It runs on the test's own loop, records what it was asked, and can be slow, wrong, or gone. Its tokens depend on its prompt's
tokens only, so that answers of several engines can be compared.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

VOCABULARY = "abcdefghijklmnopqrstuvwxyz ,.!?"


def tokenise(text: str) -> list[int]:
    """One token a byte."""
    return list(text.encode())


def template(messages: list[dict[str, Any]]) -> str:
    """The chat template."""
    return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>"


def generate(ids: list[int], n_tokens: int) -> list[str]:
    """The tokens that follow a prompt."""
    tokens = []
    for i in range(n_tokens):
        digest = hashlib.sha256(repr((ids, i)).encode()).digest()
        tokens.append(VOCABULARY[digest[0] % len(VOCABULARY)])
    return tokens


@dataclass
class Asked:
    """One request that came. `as_ids`: its prompt came as token ids."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    ids: list[int]
    as_ids: bool
    finished: bool = False  # its last token was given; stays False when the other side left before


@dataclass
class Behaviour:
    """What is wrong with the engine. Times in seconds."""

    before_first: float = 0.0
    between: float = 0.0
    status: int = 0  # answer this to all
    error_after: int | None = None  # tokens, then an error event
    error_code: int = 500
    cut_after: int | None = None  # tokens, then the connection breaks
    no_ids: bool = False  # keeps no token ids in its answers, as other engines
    refuses_ids: bool = False  # 400 for token ids
    health: int = 200
    padding: int = 0  # bytes beside each token
    hold: asyncio.Event = field(default_factory=asyncio.Event)  # generation waits for it when `holds`
    holds: bool = False


class Engine:
    """`async with Engine() as engine`."""

    def __init__(self, name: str = "model") -> None:
        self.name = name
        self.asked: list[Asked] = []
        self.behaviour = Behaviour()
        self.running = 0
        self.port = 0
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Listen; again on the same port once it had one."""
        bound = socket.create_server(("127.0.0.1", self.port))
        self.port = bound.getsockname()[1]
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), http="h11", ws="none", log_config=None, lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = _Server(config)
        self._task = asyncio.ensure_future(self._server.serve(sockets=[bound]))
        while not self._server.started:
            await asyncio.sleep(0)
        self._bound = bound

    async def kill(self) -> None:
        """Gone at once: connections are reset, and nobody listens any more."""
        if self._server is None or self._task is None:
            return
        for server in self._server.servers:
            server.close()
        self._bound.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._server.should_exit = self._server.force_exit = True
        await self._task
        self._server = None

    async def _health(self, _: Request) -> Response:
        return Response(status_code=self.behaviour.health)

    async def _models(self, request: Request) -> Response:
        data = [{"id": self.name, "object": "model", "auth": request.headers.get("authorization")}]
        return JSONResponse({"object": "list", "data": data})

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        as_ids = isinstance(prompt, list)
        return await self._answer(request, body, prompt if as_ids else tokenise(prompt), as_ids)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        return await self._answer(request, body, ids or tokenise(template(body["messages"])), ids is not None)

    async def _answer(self, request: Request, body: dict[str, Any], ids: list[int], as_ids: bool) -> Response:
        asked = Asked(request.url.path, body, dict(request.headers), ids, as_ids)
        self.asked.append(asked)
        behaviour = self.behaviour
        if behaviour.status:
            return JSONResponse({"error": {"message": "so told", "code": behaviour.status}}, status_code=behaviour.status)
        if as_ids and behaviour.refuses_ids:
            return JSONResponse({"error": {"message": "no token ids here", "code": 400}}, status_code=400)
        n_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        chat = request.url.path.endswith("chat/completions")
        if body.get("stream"):
            return StreamingResponse(self._stream(asked, chat, n_tokens), media_type="text/event-stream")
        work = asyncio.ensure_future(self._tokens(asked, n_tokens))
        gone = asyncio.ensure_future(_gone(request))
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not work.done():
            work.cancel()
            return Response(status_code=499)
        text = "".join(work.result())
        told = {} if behaviour.no_ids or not body.get("return_token_ids") else {"prompt_token_ids": ids}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text, **told}
        usage = {"prompt_tokens": len(ids), "completion_tokens": n_tokens}
        return JSONResponse({"id": "x", "choices": [choice], "usage": usage, **(told if chat else {})})

    async def _tokens(self, asked: Asked, n_tokens: int) -> list[str]:
        return [token async for token in self._generate(asked, n_tokens)]

    async def _generate(self, asked: Asked, n_tokens: int) -> AsyncIterator[str]:
        self.running += 1
        try:
            if self.behaviour.holds:
                await self.behaviour.hold.wait()
            for i, token in enumerate(generate(asked.ids, n_tokens)):
                await asyncio.sleep(0)  # so that it can be cancelled
                await _rest(self.behaviour.between if i else self.behaviour.before_first)
                yield token
            asked.finished = True
        finally:
            self.running -= 1

    async def _stream(self, asked: Asked, chat: bool, n_tokens: int) -> AsyncIterator[bytes]:
        behaviour = self.behaviour
        if chat:
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        i = 0
        async for token in self._generate(asked, n_tokens):
            if behaviour.error_after == i:
                yield _event({"error": {"message": "so told", "code": behaviour.error_code}}) + b"data: [DONE]\n\n"
                return
            if behaviour.cut_after == i:
                raise ConnectionError("so told")
            i += 1
            reason = "length" if i == n_tokens else None
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
            choice |= {"delta": {"content": token}} if chat else {"text": token}
            yield _event({"choices": [choice], "padding": "x" * behaviour.padding})
        yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _rest(seconds: float) -> None:
    """Time passes: what is tested is the patience of the other side."""
    if seconds:
        await asyncio.wait({asyncio.get_running_loop().create_future()}, timeout=seconds)


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()
