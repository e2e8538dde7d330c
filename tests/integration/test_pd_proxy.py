"""The prefill/decode proxy as a process, between real HTTP connections and stand-in engines that speak OpenAI's protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.openai_engine import Engine, generate, template, tokenise
from tests.support.pd_proxy import Answer, Proxy, running, until

LONG = "a long prompt of many words, " * 20  # 580 tokens of the stand-in's
SHORT = "hello"
ONE_TOKEN_A_BYTE = ("--bytes-per-token", "1", "--prefill-min-tokens", "100", "--probe-interval", "100ms")


def expected(prompt: str, n_tokens: int = 8) -> str:
    return "".join(generate(tokenise(prompt), n_tokens))


def messages(*contents: str) -> list[dict[str, str]]:
    """User and assistant in turn."""
    return [{"role": "assistant" if i % 2 else "user", "content": content} for i, content in enumerate(contents)]


def scenario(test: Callable[..., Coroutine[Any, Any, None]], *args: str, n_prefill: int = 1, n_decode: int = 1) -> None:
    """Run a test with (proxy, prefill engines, decode engines)."""

    async def run() -> None:
        async with asyncio.timeout(90):
            engines = [await Engine().__aenter__() for _ in range(n_prefill + n_decode)]
            prefill, decode = engines[:n_prefill], engines[n_prefill:]
            try:
                words = (*ONE_TOKEN_A_BYTE, *args)
                async with running(*words, prefill=[e.url for e in prefill], decode=[e.url for e in decode]) as proxy:
                    await test(proxy, prefill, decode)
            finally:
                await asyncio.gather(*(engine.kill() for engine in engines))

    asyncio.run(run())


def test_short_prompts_go_to_decode_and_long_ones_are_tokenised_once() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        for stream in (False, True):
            short = await proxy.complete(SHORT, stream=stream)
            assert (short.status, short.text, short.route) == (200, expected(SHORT), "short")
        assert not prefill[0].asked
        for stream in (False, True):
            prefill[0].asked.clear()
            decode[0].asked.clear()
            prompt = f"{stream} {LONG}"
            long = await proxy.complete(prompt, stream=stream, seed=7)
            assert (long.status, long.text, long.route) == (200, expected(prompt), "prefill")
            first, then = prefill[0].asked[0], decode[0].asked[0]
            assert first.body["max_tokens"] == 1 and not first.body["stream"] and first.body["return_token_ids"]
            assert not first.as_ids and then.as_ids and then.ids == tokenise(prompt)
            assert then.body["max_tokens"] == 8 and then.body["seed"] == 7 and "return_token_ids" not in then.body
            assert first.headers["x-request-id"] == then.headers["x-request-id"] == long.headers["x-request-id"]
        await proxy.until_metric("kvpool_pd_prompts_tokenised_once_total", 2)
        await proxy.until_metric("kvpool_pd_routes_total", 2, route="prefill")

    scenario(test)


def test_a_chat_stays_a_chat_at_decode_with_its_token_ids_beside_it() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        for stream in (False, True):
            asked = messages(f"{stream} {LONG}")
            chat = await proxy.chat(asked, stream=stream, stop=["stop"], tools=tools, logprobs=True)
            assert (chat.status, chat.text, chat.route) == (200, expected(template(asked)), "prefill")
            first, then = prefill[0].asked[-1], decode[0].asked[-1]
            assert first.path == then.path == "/v1/chat/completions"
            assert first.body["max_tokens"] == first.body["max_completion_tokens"] == 1
            assert "stop" not in first.body and "logprobs" not in first.body and first.body["tools"] == tools
            assert then.as_ids and then.ids == tokenise(template(asked))
            assert then.body["messages"] == asked and then.body["stop"] == ["stop"] and then.body["tools"] == tools
        pictures = [
            {"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "x"}}]}
        ]
        await proxy.chat(pictures)
        assert prefill[0].asked[-1].body["messages"] == pictures
        assert not decode[0].asked[-1].as_ids  # the pictures would be lost

    scenario(test)


@pytest.mark.parametrize("more", [{"echo": True}, {"prompt_logprobs": 1}, {"truncate_prompt_tokens": 50}, {"max_tokens": 1}])
def test_what_reads_its_own_prompt_goes_to_decode_untouched(more: dict[str, Any]) -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        body = {"model": "model", "prompt": LONG, "max_tokens": 4, **more}
        answer = await proxy.ask("/v1/completions", body)
        assert (answer.status, answer.route) == (200, "whole")
        assert not prefill[0].asked and decode[0].asked[0].body == body

    scenario(test)


def test_prompts_of_token_ids_and_lists() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        ids = tokenise(LONG)
        answer = await proxy.complete(ids)
        assert (answer.text, answer.route) == (expected(LONG), "prefill")
        assert (await proxy.complete(ids[:99])).route == "short"

    scenario(test)


@pytest.mark.parametrize("trouble", ["dead", "status", "slow", "no_ids", "ids_refused", "garbage"])
def test_prefill_in_trouble_costs_a_local_prefill_and_no_error(trouble: str) -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        behaviour = prefill[0].behaviour
        if trouble == "dead":
            await prefill[0].kill()
        elif trouble == "status":
            behaviour.status = 500
        elif trouble == "slow":
            behaviour.before_first = 60
        elif trouble == "no_ids":
            behaviour.no_ids = True
        elif trouble == "ids_refused":
            decode[0].behaviour.refuses_ids = True
        else:
            behaviour.status = 200  # an answer without choices
        answers = await asyncio.gather(*(proxy.complete(f"{i} {LONG}", stream=True) for i in range(6)))
        for i, answer in enumerate(answers):
            assert (answer.status, answer.text, answer.error) == (200, expected(f"{i} {LONG}"), None)
        if trouble in ("no_ids", "ids_refused"):
            assert not decode[0].asked[-1].as_ids
        else:
            await proxy.until_metric("kvpool_pd_routes_total", 0, route="prefill")
        await proxy.until_metric("kvpool_pd_requests_total", 6, outcome="ok")
        if trouble == "slow":  # three failures in a row, and nobody waits for it any more
            await until(lambda: _left(prefill[0]), what="the slow node's requests end")
            assert (await proxy.complete(f"more {LONG}")).route == "no_prefill"

    async def _left(engine: Engine) -> bool:
        return engine.running == 0

    scenario(test, "--prefill-timeout", "300ms")


def test_a_prefill_node_that_comes_back_is_tried_with_one_request_and_used_again() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        await prefill[0].kill()
        await proxy.until_metric("kvpool_pd_node_state", 2, role="prefill")
        assert (await proxy.complete(LONG + "1")).route == "no_prefill"
        await prefill[0].start()
        await proxy.until_metric("kvpool_pd_node_state", 1, role="prefill")
        prefill[0].behaviour.holds = True
        trial = asyncio.ensure_future(proxy.complete(LONG + "2"))
        await until(lambda: _asked(prefill[0]), what="the trial comes")
        assert (await proxy.complete("x" + LONG)).route == "no_prefill"  # one at a time
        prefill[0].behaviour.hold.set()
        assert (await trial).route == "prefill"
        await proxy.until_metric("kvpool_pd_node_state", 0, role="prefill")
        assert (await proxy.complete("y" + LONG)).route == "prefill"

    async def _asked(engine: Engine) -> bool:
        return bool(engine.asked)

    scenario(test)


@pytest.mark.parametrize("trouble", ["dead", "status", "cut", "error"])
@pytest.mark.parametrize("stream", [True, False])
def test_decode_that_fails_before_its_first_token_is_replaced_by_another(trouble: str, stream: bool) -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        bad = decode[0]
        if trouble == "dead":
            await bad.kill()
        elif trouble == "status" or not stream:
            bad.behaviour.status = 503
        elif trouble == "cut":
            bad.behaviour.cut_after = 0
        else:
            bad.behaviour.error_after = 0
        prompts = [f"{i} {LONG if i % 2 else SHORT}" for i in range(8)]
        chats = [messages(prompt) for prompt in prompts]  # whose opening event must be held back
        asked = [proxy.chat(chat, stream=stream) for chat in chats] + [
            proxy.complete(prompt, stream=stream) for prompt in prompts
        ]
        texts = [expected(template(chat)) for chat in chats] + [expected(prompt) for prompt in prompts]
        for text, answer in zip(texts, await asyncio.gather(*asked), strict=True):
            assert (answer.status, answer.text, answer.error) == (200, text, None)
        await proxy.until_metric("kvpool_pd_requests_total", 16, outcome="ok")

    scenario(test, n_decode=2)


@pytest.mark.parametrize("trouble", ["cut", "error"])
def test_decode_that_fails_after_its_first_token_is_told_in_the_stream(trouble: str) -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        if trouble == "cut":
            decode[0].behaviour.cut_after = 3
        else:
            decode[0].behaviour.error_after = 3
        answer = await proxy.complete(SHORT, stream=True)
        assert answer.status == 200 and answer.text == expected(SHORT)[:3] and answer.done
        assert answer.error is not None and answer.error["code"] in (502, 500) and answer.error["message"]
        await proxy.until_metric("kvpool_pd_requests_total", 1, outcome="failed")
        await proxy.until_metric("kvpool_pd_slo_requests_total", 1, slo="both", met="no")

    scenario(test)


def test_no_decode_node_is_an_error_with_a_status_and_readiness_says_so() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        assert (await proxy.client.get("/readyz")).status_code == 200
        decode[0].behaviour.status = 500
        answer = await proxy.complete(SHORT, stream=True)
        assert answer.status == 502 and answer.error is not None and answer.error["type"] == "server_error"
        await decode[0].kill()
        await proxy.until_metric("kvpool_pd_node_state", 2, role="decode")
        answer = await proxy.complete(LONG)
        assert answer.status == 503 and answer.headers["retry-after"] == "1"
        assert not prefill[0].asked
        ready = await proxy.client.get("/readyz")
        assert ready.status_code == 503 and ready.json()["decode"][0]["state"] == "open"
        assert (await proxy.client.get("/healthz")).status_code == 200
        assert (await proxy.client.get("/v1/models")).status_code == 503
        decode[0].behaviour.status = 0
        await decode[0].start()
        await proxy.until_metric("kvpool_pd_node_state", 1, role="decode")
        assert (await proxy.complete(SHORT)).text == expected(SHORT)
        models = (await proxy.client.get("/v1/models", headers={"authorization": "Bearer x"})).json()
        assert models["data"] == [{"id": "model", "object": "model", "auth": "Bearer x"}]

    scenario(test)


def test_the_only_decode_node_is_used_however_ill_it_seems() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        decode[0].behaviour.health = prefill[0].behaviour.health = 503
        await proxy.until_metric("kvpool_pd_node_state", 2, role="decode")
        await proxy.until_metric("kvpool_pd_node_state", 2, role="prefill")
        answers = await asyncio.gather(*(proxy.complete(f"{i}{LONG}", stream=True) for i in range(4)))
        assert [answer.text for answer in answers] == [expected(f"{i}{LONG}") for i in range(4)]
        assert not prefill[0].asked  # that one can be done without
        assert (await proxy.client.get("/readyz")).status_code == 200

    scenario(test)


def test_idle_nodes_take_turns() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        for i in range(6):
            await proxy.complete(f"{i} {LONG}")
        assert [len(engine.asked) for engine in (*prefill, *decode)] == [3, 3, 3, 3]

    scenario(test, n_prefill=2, n_decode=2)


def test_the_engines_own_refusal_is_passed_on() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        for engine in (*prefill, *decode):
            engine.behaviour.status = 422
        for prompt in (SHORT, LONG):
            answer = await proxy.complete(prompt, stream=True)
            assert answer.status == 422 and answer.error is not None and answer.error["message"] == "so told"
        decode[0].behaviour.status = 0
        decode[0].behaviour.error_after, decode[0].behaviour.error_code = 0, 404
        assert (await proxy.complete(SHORT, stream=True)).status == 404
        await proxy.until_metric("kvpool_pd_node_state", 0, role="decode")
        await proxy.until_metric("kvpool_pd_requests_total", 3, outcome="rejected")

    scenario(test)


@pytest.mark.parametrize("where", ["prefill", "decode", "middle", "whole"])
def test_a_client_that_leaves_frees_the_engine(where: str) -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        engine = prefill[0] if where == "prefill" else decode[0]
        if where == "middle":
            engine.behaviour.between = 0.2
        else:
            engine.behaviour.holds = True
        prompt = LONG if where == "prefill" else SHORT
        body = {"prompt": prompt, "max_tokens": 200, "stream": where != "whole"}
        got: list[str] = []

        async def ask() -> None:
            async with proxy.client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    got.append(line)

        client = asyncio.ensure_future(ask())
        await until(lambda: _busy(engine, 1, got if where == "middle" else ["-"]), what="the engine works")
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        await until(lambda: _busy(engine, 0, ["-"]), what="the engine is free")
        assert not engine.asked[0].finished
        await proxy.until_metric("kvpool_pd_requests_total", 1, outcome="cancelled")
        await proxy.until_metric("kvpool_pd_node_requests", 0)
        await proxy.until_metric("kvpool_pd_requests_running", 0)
        assert await proxy.metric("kvpool_pd_node_state") == 0  # nobody's fault

    async def _busy(engine: Engine, n: int, got: list[str]) -> bool:
        return engine.running == n and bool(got)

    scenario(test)


def test_a_sessions_next_turn_goes_to_the_node_with_its_blocks() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        n_sessions, n_turns = 6, 4
        histories = [messages(f"session {i} {LONG}") for i in range(n_sessions)]
        homes: list[set[int]] = [set() for _ in histories]
        for turn in range(n_turns):
            for i, history in enumerate(histories):
                before = [len(engine.asked) for engine in decode]
                answer = await proxy.chat(history, stream=True)
                assert answer.text == expected(template(history))
                assert answer.route == ("prefill" if turn == 0 else "known")  # what is new is short
                homes[i] |= {j for j, engine in enumerate(decode) if len(engine.asked) > before[j]}
                histories[i] = [
                    *history,
                    {"role": "assistant", "content": answer.text},
                    {"role": "user", "content": f"turn {turn}"},
                ]
        assert all(len(home) == 1 for home in homes)
        assert {min(home) for home in homes} == {0, 1, 2}  # the idlest in turn
        n_known = n_sessions * (n_turns - 1)
        await proxy.until_metric("kvpool_pd_choices_total", n_known, role="decode", why="blocks")
        await proxy.until_metric("kvpool_pd_choices_total", n_sessions, role="decode", why="new")

    scenario(test, n_decode=3)


def test_a_busy_node_is_not_waited_for_because_of_its_blocks() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        await proxy.complete(LONG)
        home = next(engine for engine in decode if engine.asked)
        home.behaviour.holds = True
        held = [asyncio.ensure_future(proxy.complete(LONG)) for _ in range(3)]
        await until(lambda: _running(home, 3), what="it has three")
        assert (await proxy.complete(LONG)).text == expected(LONG)
        await proxy.until_metric("kvpool_pd_choices_total", 1, role="decode", why="busy")
        home.behaviour.hold.set()
        assert {answer.text for answer in await asyncio.gather(*held)} == {expected(LONG)}

    async def _running(engine: Engine, n: int) -> bool:
        return engine.running == n

    scenario(test, "--affinity-slack", "2", n_decode=2)


BAD_BODIES = [
    (b"{", "", "JSON"),
    (b"[1]", "", "object"),
    (b"\xff", "", "JSON"),
    (b'{"prompt": "x", "temperature": NaN}', "", "NaN"),
    (b'{"prompt": "x", "temperature": 1e999}', "", "1e999"),
    (b"[" * 9_000, "", "JSON"),
    (b"{}", "prompt", "prompt"),
    (b'{"prompt": ""}', "prompt", "prompt"),
    (b'{"prompt": [1, "x"]}', "prompt[0]", "prompt[0]"),
    (b'{"prompt": ["x", 5]}', "prompt[1]", "prompt[1]"),
    (b'{"prompt": [[1], [-1]]}', "prompt[1]", "prompt[1]"),
    (b'{"prompt": "x", "stream": "yes"}', "stream", "stream"),
    (b'{"prompt": "x", "stream_options": {}}', "stream_options", "stream_options"),
    (b'{"prompt": "x", "n": 0}', "n", "n must be"),
    (b'{"prompt": "x", "max_tokens": 1.5}', "max_tokens", "max_tokens"),
    (b'{"prompt": "x", "model": 5}', "model", "model"),
    (b'{"prompt": "x", "kv_transfer_params": {"remote_host": "evil"}}', "kv_transfer_params", "kv_transfer_params"),
]
BAD_CHATS = [
    (b"{}", "messages", "messages"),
    (b'{"messages": []}', "messages", "messages"),
    (b'{"messages": ["x"]}', "messages[0]", "messages[0]"),
    (b'{"messages": [{"role": "user", "content": "x"}, {"content": "x"}]}', "messages[1].role", "messages[1].role"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content", "messages[0].content"),
]


def test_bad_requests_are_answered_with_the_field_that_is_wrong() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        for path, bodies in (("/v1/completions", BAD_BODIES), ("/v1/chat/completions", BAD_CHATS)):
            for body, param, words in bodies:
                answer = await proxy.ask(path, body)
                assert answer.status == 400 and answer.error is not None, (body[:80], answer)
                assert (answer.error["param"] or "") == param, (body[:80], answer.error)
                assert words in answer.error["message"] and answer.error["type"] == "invalid_request_error"
        too_long = await proxy.complete("x" * 20_000)
        assert too_long.status == 413 and too_long.error is not None and "10000" in too_long.error["message"]

        async def pieces() -> Any:
            for _ in range(30):
                yield b"x" * 1_000

        assert (
            await proxy.client.post("/v1/completions", content=pieces(), headers={"content-type": "application/json"})
        ).status_code == 413
        for other in ("text/plain", "application/x-www-form-urlencoded", ""):
            assert (await proxy.ask("/v1/completions", {"prompt": "x"}, headers={"content-type": other})).status == 415
        for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404)):
            answer = await proxy.client.request(method, path)
            assert answer.status_code == status and answer.json()["error"]["code"] == status
        lone = await proxy.ask("/v1/completions", b'{"prompt": "\\ud800", "max_tokens": 2}')
        assert lone.status == 200 or lone.status == 502  # the engine's business, not a crash here
        assert not prefill[0].asked

    scenario(test, "--max-body", "10000")


def test_bounds_on_requests_and_on_every_wait() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        slow_reader, slow_writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        slow_writer.write(b"POST /v1/completions HTTP/1.1\r\nhost:")  # and no more of its header
        decode[0].behaviour.holds = True
        held = [asyncio.ensure_future(proxy.complete(f"{SHORT} {i}", stream=True)) for i in range(2)]
        await until(lambda: _running(decode[0], 2), what="two run")
        refused = await proxy.complete(SHORT)
        assert refused.status == 429 and refused.headers["retry-after"] == "1"
        for late in await asyncio.gather(*held):
            assert late.status == 504 and "first token" in late.body["error"]["message"]
        await until(lambda: _running(decode[0], 0), what="they are given up")

        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 20)  # half a request
        writer.close()
        await writer.wait_closed()

        decode[0].behaviour.holds = False
        decode[0].behaviour.between = 60
        stalled = await proxy.complete(SHORT, stream=True)
        assert stalled.status == 200 and stalled.error is not None and "timeout" in stalled.error["message"]
        whole = await proxy.complete(SHORT)
        assert whole.status == 504 and "longer than" in whole.body["error"]["message"]
        assert await asyncio.wait_for(slow_reader.read(), 20) == b""  # its connection was closed
        slow_writer.close()

    async def _running(engine: Engine, n: int) -> bool:
        return engine.running == n

    words = ("--first-token-timeout", "1s", "--client-timeout", "500ms", "--idle-timeout", "400ms", "--request-timeout", "2s")
    scenario(test, "--max-requests", "2", *words)


def test_a_client_that_does_not_take_its_answer_is_given_up() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        decode[0].behaviour.padding = 100_000
        body = json.dumps({"prompt": SHORT, "max_tokens": 3000, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]), limit=1000)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        try:
            assert b" 200 " in await reader.readline()  # and no more
            await proxy.until_metric("kvpool_pd_requests_total", 1, outcome="cancelled")
            assert not decode[0].asked[0].finished  # 300 MB: more than all buffers on the way hold
        finally:
            writer.transport.abort()

    scenario(test, "--client-timeout", "500ms")


def test_ttft_itl_and_goodput_are_measured_apart() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        decode[0].behaviour.before_first = 0.6
        await proxy.complete(SHORT, stream=True)
        decode[0].behaviour.before_first, decode[0].behaviour.between = 0, 0.2
        await proxy.complete(SHORT, stream=True, n_tokens=3)
        decode[0].behaviour.between = 0
        await proxy.complete(SHORT, stream=True)
        await proxy.complete(SHORT)  # not streamed: no times of tokens
        await proxy.until_metric("kvpool_pd_requests_total", 4)
        met = {
            slo: [await proxy.metric("kvpool_pd_slo_requests_total", slo=slo, met=word) for word in ("yes", "no")]
            for slo in ("ttft", "itl", "both")
        }
        assert met == {"ttft": [2, 1], "itl": [2, 1], "both": [1, 2]}
        assert abs(await proxy.metric("kvpool_pd_goodput_ratio") - 1 / 3) < 1e-9
        await proxy.until_metric("kvpool_pd_ttft_seconds_count", 3, route="short")
        assert 0.6 <= await proxy.metric("kvpool_pd_ttft_seconds_sum") < 3
        assert await proxy.metric("kvpool_pd_itl_seconds_count") == 7 + 2 + 7
        assert 0.3 <= await proxy.metric("kvpool_pd_itl_seconds_sum") < 3  # (of 0.4 some is not seen: a token may be read late)

    scenario(test, "--slo-ttft", "500ms", "--slo-itl", "100ms")


def test_credentials_go_to_the_engines_and_nothing_else_does() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        headers = {"authorization": "Bearer secret", "x-request-id": "mine", "cookie": "a=b", "x-other": "1"}
        await proxy.ask("/v1/completions", {"prompt": LONG, "max_tokens": 3}, headers=headers)
        for asked in (prefill[0].asked[0], decode[0].asked[0]):
            assert asked.headers["authorization"] == "Bearer secret"
            assert "cookie" not in asked.headers and "x-other" not in asked.headers and asked.headers["x-request-id"] != "mine"

    scenario(test)


def test_many_streams_at_once_are_each_their_own() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        async def one(i: int) -> tuple[str, Answer]:
            prompt = f"{i} " + "word " * (i * 7)
            return prompt, await proxy.complete(prompt, stream=True, n_tokens=20)

        async def break_prefill() -> None:
            await until(lambda: _some(prefill[0]), what="prefill works")
            await prefill[0].kill()

        found = await asyncio.gather(*(one(i) for i in range(64)), break_prefill())
        for prompt, answer in found[:64]:
            assert (answer.status, answer.text, answer.error, answer.done) == (200, expected(prompt, 20), None, True)

    async def _some(engine: Engine) -> bool:
        return len(engine.asked) > 5

    scenario(test, n_prefill=2, n_decode=2)


def test_a_stop_ends_what_runs_and_the_exit_status_is_0() -> None:
    async def test(proxy: Proxy, prefill: list[Engine], decode: list[Engine]) -> None:
        decode[0].behaviour.holds = True
        client = asyncio.ensure_future(proxy.complete(SHORT, stream=True))
        await until(lambda: _running(decode[0], 1), what="it runs")
        proxy.process.terminate()
        assert await asyncio.wait_for(proxy.process.wait(), 20) == 0
        await asyncio.gather(client, return_exceptions=True)
        await until(lambda: _running(decode[0], 0), what="the engine is free")

    async def _running(engine: Engine, n: int) -> bool:
        return engine.running == n

    scenario(test)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--decode"),
        (["--decode", "ftp://x"], "http://host:port"),
        (["--decode", "http://x:1/path"], "http://host:port"),
        (["--decode", "http://x:1", "--decode", "http://x:1"], "each once"),
        (["--decode", "http://x:1", "--slo-ttft", "soon"], "500ms"),
        (["--decode", "http://x:1", "--port", "70000"], "port"),
        (["--decode", "http://x:1", "--max-requests", "0"], "at least 1"),
    ],
)
def test_wrong_flags_are_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    from kvpool_pd_proxy.cli import main

    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and told in capsys.readouterr().err
