"""A request's way: its route, the prefill step, decode with another node for one that fails before the first token, the relay."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import httpx

from kvpool_pd_proxy.clientside import ClientSide
from kvpool_pd_proxy.metrics import Metrics
from kvpool_pd_proxy.nodes import Blame, Node, NodeFailed, Role, failure_of
from kvpool_pd_proxy.protocol import Ask, Kind, Prefilled, decode_body, prefill_body, prefilled
from kvpool_pd_proxy.settings import Settings
from kvpool_pd_proxy.sse import Splitter

PREFILL_ATTEMPTS_MAX: Final = 2
HELD_EVENTS_MAX: Final = 1_024  # before the first token: a chat opens each of its choices
FORWARDED: Final = (b"authorization", b"traceparent", b"tracestate")


class Outcome(Enum):
    OK = "ok"
    REJECTED = "rejected"  # the client's mistake
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Clock:
    """When a stream's pieces came. Seconds, monotonic."""

    began_s: float
    first_s: float | None = None
    last_s: float = 0.0
    n_pieces: int = 0
    itl_sum_s: float = field(default=0.0)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.began_s

    @property
    def itl_mean_s(self) -> float:
        return self.itl_sum_s / (self.n_pieces - 1) if self.n_pieces > 1 else 0.0


class _Refused(Exception):
    """Decode refuses (4xx) what prefill's answer was put into: the request as it came is to be tried."""


class Exchange:
    """One request with its client. `run` once."""

    def __init__(
        self, ask: Ask, client: ClientSide, *, prefill: Role, decode: Role, metrics: Metrics, settings: Settings, began_s: float
    ) -> None:
        self._ask, self._client = ask, client
        self._prefill_role, self._decode_role = prefill, decode
        self._metrics, self._settings = metrics, settings
        self.clock = Clock(began_s)
        headers = {name.decode(): client.headers[name].decode("latin-1") for name in FORWARDED if name in client.headers}
        self._headers = {
            **headers,
            "content-type": "application/json",
            "accept-encoding": "identity",
            "x-request-id": client.request_id,
        }

    async def run(self) -> Outcome:
        """Answers the client. ClientGone passes through."""
        route = self._route()
        done = None
        if route == "prefill":
            began_s = time.monotonic()
            done = await self._prefill()
            self._metrics.prefill_seconds.observe(time.monotonic() - began_s)
            if done is None:
                route = "prefill_failed"
        self._metrics.routes.labels(route).inc()
        self._client.route = route
        return await self._decode(done)

    def _route(self) -> str:
        """ "prefill", or why the prompt is computed at decode."""
        ask = self._ask
        if ask.n_tokens < self._settings.prefill_min_tokens:
            return "short"
        if ask.whole:
            return "whole"
        choice = self._decode_role.choose(ask.chain, without=set())
        if choice is None:
            return "no_decode"
        seen = choice.seen_bytes / ask.n_bytes if ask.n_bytes else 0.0
        if math.ceil(ask.n_tokens * (1 - seen)) < self._settings.prefill_min_tokens:
            return "known"
        if self._prefill_role.choose(ask.chain, without=set()) is None:
            return "no_prefill"
        return "prefill"

    # prefill

    async def _prefill(self) -> Prefilled | None:
        """The prompt computed by a prefill node; None after `prefill_timeout_s` at most, whatever went wrong."""
        ask, role = self._ask, self._prefill_role
        body = prefill_body(ask)
        end_s = time.monotonic() + self._settings.prefill_timeout_s
        tried: set[int] = set()
        for _ in range(PREFILL_ATTEMPTS_MAX):
            choice = role.choose(ask.chain, without=tried)
            left_s = end_s - time.monotonic()
            if choice is None or left_s <= 0:
                break
            node = choice.node
            tried.add(node.number)
            self._metrics.choices.labels(role.name, choice.why.value).inc()
            try:
                with role.using(node):
                    done = await self._prefill_at(node, body, left_s)
            except NodeFailed as error:
                self._metrics.prefills.labels(error.reason).inc()
                continue
            if done is None:
                self._metrics.prefills.labels("rejected").inc()
                return None
            role.affinity.record(ask.chain, node.number)
            self._metrics.prefills.labels("ok").inc()
            if done.ids and ask.reuse_ids:
                self._metrics.prompt_bytes.inc(ask.n_bytes)
                self._metrics.prompt_tokens.inc(done.n_tokens)
            return done
        return None

    async def _prefill_at(self, node: Node, body: bytes, timeout_s: float) -> Prefilled | None:
        """None: the node finds the request wrong; decode will say so to the client."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                node.client.stream("POST", self._ask.kind.path, content=body, headers=self._headers) as response,
            ):
                answer = await self._read(response)
            if _is_failure(response.status_code):
                raise _status(response.status_code, answer)
            return prefilled(self._ask, answer) if response.is_success else None
        except (httpx.HTTPError, OSError) as error:
            raise failure_of(error) from error
        except ValueError as error:
            raise NodeFailed(f"its answer makes no sense: {error}", reason="garbled") from error

    # decode

    async def _decode(self, done: Prefilled | None) -> Outcome:
        ask, role = self._ask, self._decode_role
        body = decode_body(ask, done)
        again = decode_body(ask, None) if done is not None else b""  # once, if decode refuses what prefill's answer made of it
        tried: set[int] = set()
        last: NodeFailed | None = None
        while len(tried) < self._settings.decode_attempts_max:
            choice = role.choose(ask.chain, without=tried)
            if choice is None:
                break
            node = choice.node
            tried.add(node.number)
            self._metrics.choices.labels(role.name, choice.why.value).inc()
            try:
                with role.using(node):
                    outcome = await self._decode_at(node, body, may_refuse=bool(again) and body is not again)
                if done is not None and done.ids and ask.reuse_ids and body is not again:
                    self._metrics.reused.inc()
                return outcome
            except _Refused:
                self._metrics.retries.labels("ids_refused").inc()
                body = again
                tried.discard(node.number)
            except NodeFailed as error:
                if self._client.started:
                    await self._client.break_off(502, f"the decode node failed in the middle of the answer ({error.reason})")
                    return Outcome.FAILED
                self._metrics.retries.labels(error.reason).inc()
                last = error
        if last is None:
            await self._client.error(503, "no decode node is available now", retry_after_s=1)
        else:
            words = f"{len(tried)} decode node(s) failed before the first token, the last one: {last.reason}"
            await self._client.error(504 if last.reason == "timeout" else 502, words)
        return Outcome.FAILED

    async def _decode_at(self, node: Node, body: bytes, *, may_refuse: bool) -> Outcome:
        """NodeFailed: before the first token nothing was sent to the client (`started` is still False)."""
        ask = self._ask
        try:
            async with (
                asyncio.timeout(self._settings.first_token_timeout_s if ask.stream else None) as limit,
                node.client.stream("POST", ask.kind.path, content=body, headers=self._headers) as response,
            ):
                if response.is_success and response.headers.get("content-type", "").startswith("text/event-stream"):
                    return await self._relay(node, response, limit, may_refuse)
                answer = await self._read(response)
                if _is_failure(response.status_code):
                    raise _status(response.status_code, answer)
                limit.reschedule(None)
                return await self._whole_answer(node, response, answer, may_refuse)
        except (httpx.HTTPError, OSError) as error:
            raise failure_of(error) from error
        except ValueError as error:
            raise NodeFailed(f"its answer makes no sense: {error}", reason="garbled") from error

    async def _whole_answer(self, node: Node, response: httpx.Response, answer: bytes, may_refuse: bool) -> Outcome:
        if not response.is_success and may_refuse:
            raise _Refused
        if response.is_success:
            self._decode_role.affinity.record(self._ask.chain, node.number)
        content_type = response.headers.get("content-type", "application/json")
        await self._client.answer(response.status_code, answer, content_type=content_type)
        return Outcome.OK if response.is_success else Outcome.REJECTED

    async def _relay(self, node: Node, response: httpx.Response, limit: asyncio.Timeout, may_refuse: bool) -> Outcome:
        """Events as they come. Those before the first token are held back, so that until then another node can do it all."""
        splitter = Splitter(event_bytes_max=self._settings.event_bytes_max)
        held: list[bytes] = []
        outcome: Outcome | None = None
        async for data in response.aiter_raw():
            out = []
            for event in splitter.feed(data):
                if error := event.error():
                    if self.clock.first_s is None:
                        return await self._told_error(error, may_refuse)
                    outcome = Outcome.FAILED
                elif event.has_token():
                    self._count(node)
                if event.done:
                    outcome = outcome or Outcome.OK
                out.append(event.raw)
            if self.clock.first_s is None and outcome is None:
                held += out
                if len(held) > HELD_EVENTS_MAX:
                    raise NodeFailed(f"{len(held)} events without a token", reason="garbled")
                continue
            limit.reschedule(None)  # the client's time is not the node's
            if not self._client.started:
                await self._client.start_stream()
                out = held + out
            if out:
                await self._client.piece(b"".join(out))
            limit.reschedule(asyncio.get_running_loop().time() + self._settings.idle_timeout_s)
        if outcome is None:
            raise NodeFailed("the stream ended without its end", reason="cut")
        await self._client.end()
        return outcome

    async def _told_error(self, error: dict[str, object], may_refuse: bool) -> Outcome:
        """An engine's own error before a stream's first token: the client gets it as an answer with a status."""
        code, message, param = error.get("code"), str(error.get("message", "")), error.get("param")
        if not isinstance(code, int) or _is_failure(code) or not 400 <= code < 500:
            raise NodeFailed(f"error in the stream: {message}", reason="status", blame=Blame.NONE)
        if may_refuse:
            raise _Refused
        await self._client.error(code, message, param=param if isinstance(param, str) else "")
        return Outcome.REJECTED

    def _count(self, node: Node) -> None:
        now_s, clock = time.monotonic(), self.clock
        if clock.first_s is None:
            clock.first_s = now_s
            self._metrics.ttft.labels(self._client.route).observe(now_s - clock.began_s)
            self._decode_role.affinity.record(self._ask.chain, node.number)
            node.breaker.succeeded()
        else:
            self._metrics.itl.observe(now_s - clock.last_s)
            clock.itl_sum_s += now_s - clock.last_s
        clock.last_s = now_s
        clock.n_pieces += 1

    async def _read(self, response: httpx.Response) -> bytes:
        got = bytearray()
        async for data in response.aiter_raw():
            got += data
            if len(got) > self._settings.answer_bytes_max:
                raise NodeFailed(f"its answer is longer than {self._settings.answer_bytes_max} bytes", reason="garbled")
        return bytes(got)


def _is_failure(status: int) -> bool:
    """Statuses with which another node may do better."""
    return status >= 500 or status in (408, 425, 429)


def _status(status: int, answer: bytes) -> NodeFailed:
    return NodeFailed(f"status {status}: {answer[:200]!r}", reason="status", blame=Blame.NONE)


def endpoint(kind: Kind) -> str:
    """The label of a kind."""
    return "chat" if kind is Kind.CHAT else "completions"
