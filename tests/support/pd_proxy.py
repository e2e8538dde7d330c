"""The proxy as a real process, run as its README says, and an HTTP client for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes import cli_env

PROGRAM = Path(__file__).resolve().parents[2] / "clients" / "pd_proxy"
READY_S = 30.0
STOP_S = 20.0
PATIENCE_S = 60.0


@dataclass
class Answer:
    """One whole answer. `text`: of its first choice; `events`: of a stream, without its end; `error`: its error object."""

    status: int
    headers: httpx.Headers
    text: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    error: dict[str, Any] | None = None
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def route(self) -> str:
        return self.headers.get("x-kvpool-route", "")


class Proxy:
    """`process` is the running proxy; `client` talks to it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process, self.url = process, url
        self.client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S)

    async def complete(self, prompt: Any, *, n_tokens: int = 8, **more: Any) -> Answer:
        return await self.ask("/v1/completions", {"model": "model", "prompt": prompt, "max_tokens": n_tokens, **more})

    async def chat(self, messages: Sequence[dict[str, Any]], *, n_tokens: int = 8, **more: Any) -> Answer:
        return await self.ask(
            "/v1/chat/completions", {"model": "model", "messages": list(messages), "max_tokens": n_tokens, **more}
        )

    async def ask(self, path: str, body: Any, *, headers: dict[str, str] | None = None) -> Answer:
        """Send it and read the answer to its end."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.stream(
            "POST", path, content=content, headers={"content-type": "application/json", **(headers or {})}
        ) as response:
            answer = Answer(response.status_code, response.headers)
            if not response.headers["content-type"].startswith("text/event-stream"):
                answer.body = json.loads(await response.aread())
                answer.error = answer.body.get("error")
                answer.text = "".join(map(text_of, answer.body.get("choices", [])[:1]))
                return answer
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    answer.done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    answer.error = event.get("error", answer.error)
                    answer.events.append(event)
                    answer.text += "".join(map(text_of, event.get("choices", [])))
            return answer

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric whose labels these are; 0 when there is none."""
        from prometheus_client.parser import text_string_to_metric_families

        text = (await self.client.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def until_metric(self, name: str, value: float, **labels: str) -> None:
        """Wait until it has this value."""
        await until(lambda: self._has(name, value, labels), what=f"{name} {labels} {value}")

    async def _has(self, name: str, value: float, labels: dict[str, str]) -> bool:
        return await self.metric(name, **labels) == value


def text_of(choice: dict[str, Any]) -> str:
    """A choice's text, of any endpoint, streamed or not."""
    return choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""


async def until(condition: Any, *, timeout_s: float = 20.0, what: str = "") -> None:
    """Wait until an async condition holds, while the loop goes on."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not await condition():
        assert loop.time() < end, f"not within {timeout_s} s: {what}"
        await asyncio.wait({loop.create_future()}, timeout=0.01)


@contextlib.asynccontextmanager
async def running(
    *args: str, prefill: Sequence[str] = (), decode: Sequence[str] = (), python: str = sys.executable
) -> AsyncIterator[Proxy]:
    """Start the proxy on a free port; stop it with SIGTERM at the end: its exit status must be 0."""
    nodes = [word for url in prefill for word in ("--prefill", url)] + [word for url in decode for word in ("--decode", url)]
    process = await asyncio.create_subprocess_exec(
        python, str(PROGRAM), "--port", "0", *nodes, *args, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL,
        env=cli_env({"PYTHONDONTWRITEBYTECODE": "1"}), cwd=os.path.sep,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), READY_S)
        proxy = Proxy(process, json.loads(line)["url"])
        async with proxy.client:
            yield proxy
        if process.returncode is None:
            process.terminate()
        assert await asyncio.wait_for(process.wait(), STOP_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # asyncio closes it with the loop only
