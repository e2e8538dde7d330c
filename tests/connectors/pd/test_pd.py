"""Two vLLM servers, a pool and the proxy between them: the same texts as one server alone, whatever becomes of the prefill node.

The yardstick is a server alone: the same requests sent to the decode node itself under another cache salt, so that no block of it
is shared with what goes through the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.connectors.pd.nodes import VllmNode, make_model
from tests.connectors.vllm.engines import corrupt, stored
from tests.support.cluster import Cluster
from tests.support.pd_proxy import Answer, Proxy, running, until
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(1500)  # the servers' start is the first test's

BLOCK_TOKENS = 32
MIN_TOKENS = 128
PROXY = ("--bytes-per-token", "1", "--prefill-min-tokens", str(MIN_TOKENS), "--prefill-timeout", "60s", "--idle-timeout", "120s")
N_REQUESTS = 32
WORDS = [
    "a",
    "quiet",
    "river",
    "carries",
    "old",
    "letters",
    "past",
    "seven",
    "bright",
    "towers",
    "while",
    "nobody",
    "counts",
    "the",
    "winter",
    "birds",
]


@dataclass
class Site:
    pool: Cluster
    prefill: VllmNode
    decode: VllmNode

    @contextlib.contextmanager
    def pool_clients(self) -> Iterator[Any]:
        """The pool for helpers that make clients of it; they are closed afterwards."""
        clients = Cluster(self.pool.directory, n_workers=0)
        clients.master_address = self.pool.master_address
        try:
            yield clients
        finally:
            clients.stop()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory: Path = tmp_path_factory.mktemp("pd")
    model = make_model(directory / "model")
    (directory / "pool").mkdir()
    pool = Cluster(directory / "pool", dram="256MiB")
    nodes: list[VllmNode] = []
    try:
        pool.start()
        for role in ("prefill", "decode"):
            nodes.append(VllmNode(role, model, pool.master_address, log=directory / f"{role}.log"))
        for node in nodes:
            node.wait_healthy()
        yield Site(pool, nodes[0], nodes[1])
    finally:
        for node in nodes:
            node.kill()
        pool.stop()


@pytest.fixture(scope="module")
def alone(site: Site) -> dict[int, str]:
    """Texts of `ask_all` from one server."""
    return asyncio.run(_alone(site.decode))


def prompt(i: int) -> str:
    """Of 20 to about 900 tokens, every one with a start of its own."""
    chance = random.Random(i)
    return f"{i}: " + " ".join(chance.choice(WORDS) for _ in range(3 + 5 * i))


def asked(i: int, salt: str, *, stream: bool = True) -> tuple[str, dict[str, Any]]:
    """Every second one is a chat. (path, body)"""
    body: dict[str, Any] = {"model": "model", "temperature": 0, "max_tokens": 8 + i % 24, "stream": stream, "cache_salt": salt}
    if i % 2:
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": prompt(i)}]
        return "/v1/chat/completions", {**body, "messages": messages}
    return "/v1/completions", {**body, "prompt": prompt(i)}


async def ask_all(proxy: Proxy, salt: str, which: range = range(N_REQUESTS)) -> dict[int, Answer]:
    answers = await asyncio.gather(*(proxy.ask(*asked(i, salt)) for i in which))
    return dict(zip(which, answers, strict=True))


async def _alone(node: VllmNode) -> dict[int, str]:
    client = Proxy.__new__(Proxy)
    client.client = httpx.AsyncClient(base_url=node.url, trust_env=False, timeout=300)
    async with client.client:
        answers = await ask_all(client, "alone")
    wrong = {i: answer for i, answer in answers.items() if answer.status != 200 or not answer.text or not answer.done}
    assert not wrong, wrong
    return {i: answer.text for i, answer in answers.items()}


def n_full_blocks() -> int:
    """Of the prompts that go to prefill, those blocks that decode can take from the pool, at the least."""
    lengths = [len(prompt(i)) for i in range(N_REQUESTS)]
    return sum((n - 1) // BLOCK_TOKENS for n in lengths if n >= MIN_TOKENS)


def check(answers: dict[int, Answer], alone: dict[int, str]) -> None:
    wrong = {i: (answer.status, answer.error, answer.text, alone[i]) for i, answer in answers.items() if answer.text != alone[i]}
    assert not wrong
    assert all(answer.status == 200 and answer.error is None and answer.done for answer in answers.values())


def test_with_wrong_bytes_in_the_pool_the_texts_are_wrong(site: Site, request: pytest.FixtureRequest) -> None:
    """So the blocks do come from the pool: equal texts alone would prove nothing, computing gives them too."""
    chosen = range(28, N_REQUESTS)

    async def run() -> dict[int, Answer]:
        async with httpx.AsyncClient(base_url=site.prefill.url, trust_env=False, timeout=120) as client:
            for i in chosen:
                path, body = asked(i, "wrong bytes", stream=False)
                assert (await client.post(path, json={**body, "max_tokens": 1})).status_code == 200
        await asyncio.to_thread(spoil)
        async with running(*PROXY, prefill=[site.prefill.url], decode=[site.decode.url]) as proxy:
            return {i: await proxy.ask(*asked(i, "wrong bytes")) for i in chosen}

    def spoil() -> None:
        n_blocks = sum(len(prompt(i)) // BLOCK_TOKENS for i in chosen)
        with site.pool_clients() as pool:
            wait_until(lambda: stored(pool) >= n_blocks, timeout_s=120, what="saves have arrived")
            assert corrupt(pool) >= n_blocks

    answers = asyncio.run(run())
    alone = request.getfixturevalue("alone")  # now, so that few blocks had to be spoiled
    for i, answer in answers.items():
        assert (answer.status, answer.route) == (200, "prefill")
        assert answer.text != alone[i]


def test_32_streams_of_mixed_lengths_are_as_from_one_server(site: Site, alone: dict[int, str]) -> None:
    async def run() -> None:
        before = site.decode.metric("vllm:external_prefix_cache_hits_total")
        async with running(*PROXY, prefill=[site.prefill.url], decode=[site.decode.url]) as proxy:
            answers = await ask_all(proxy, "two servers")
            check(answers, alone)
            n_long = sum(answer.route == "prefill" for answer in answers.values())
            assert n_long >= 20 and sum(answer.route == "short" for answer in answers.values()) == N_REQUESTS - n_long
            await proxy.until_metric("kvpool_pd_prompts_tokenised_once_total", n_long)
            await proxy.until_metric("kvpool_pd_ttft_seconds_count", n_long, route="prefill")
            await proxy.until_metric("kvpool_pd_slo_requests_total", N_REQUESTS, slo="both")
        hits = site.decode.metric("vllm:external_prefix_cache_hits_total") - before
        assert hits >= BLOCK_TOKENS * n_full_blocks() * 0.9, (hits, BLOCK_TOKENS * n_full_blocks())

    asyncio.run(run())


def test_whole_answers_and_log_probabilities_are_the_engines_own(site: Site, alone: dict[int, str]) -> None:
    async def run() -> None:
        async with running(*PROXY, prefill=[site.prefill.url], decode=[site.decode.url]) as proxy:
            for i in (20, 21):
                path, body = asked(i, "logprobs", stream=False)
                body |= {"logprobs": True, "top_logprobs": 3} if "messages" in body else {"logprobs": 3}
                through = await proxy.ask(path, body)
                async with httpx.AsyncClient(base_url=site.decode.url, trust_env=False, timeout=120) as client:
                    direct = (await client.post(path, json={**body, "cache_salt": "direct"})).json()
                assert through.route == "prefill" and through.text == alone[i]
                assert set(through.body) == set(direct)
                assert through.body["choices"] == direct["choices"]
                assert through.body["usage"] == direct["usage"]

    asyncio.run(run())


def test_a_session_comes_back_to_the_node_with_its_blocks(site: Site) -> None:
    """Both servers decode here: four conversations of three turns, each at home on one of them."""

    async def run() -> None:
        urls = [site.prefill.url, site.decode.url]
        async with running(*PROXY, decode=urls) as proxy:
            texts = await asyncio.gather(*(conversation(proxy, i, "sessions") for i in range(4)))
            await proxy.until_metric("kvpool_pd_choices_total", 4 * 2, role="decode", why="blocks")
            await proxy.until_metric("kvpool_pd_choices_total", 4, role="decode", why="new")
        async with running(*PROXY, decode=urls[1:]) as alone:
            assert texts == [await conversation(alone, i, "one server") for i in range(4)]

    async def conversation(proxy: Proxy, i: int, salt: str) -> list[str]:
        history, texts = [], []
        for turn in range(3):
            history.append({"role": "user", "content": prompt(10 + 4 * i + turn)})
            body = {"messages": history, "temperature": 0, "max_tokens": 12, "stream": True, "cache_salt": salt}
            answer = await proxy.ask("/v1/chat/completions", body)
            assert answer.status == 200 and answer.error is None
            history.append({"role": "assistant", "content": answer.text})
            texts.append(answer.text)
        return texts

    asyncio.run(run())


def test_a_client_that_leaves_frees_the_engine(site: Site) -> None:
    async def run() -> None:
        async with running(*PROXY, prefill=[site.prefill.url], decode=[site.decode.url]) as proxy:
            path, body = asked(30, "leaves")
            body |= {"max_tokens": 3000, "ignore_eos": True}

            async def ask(got: asyncio.Event) -> None:
                async with proxy.client.stream("POST", path, json=body) as response:
                    assert response.status_code == 200, await response.aread()
                    async for _ in response.aiter_lines():
                        got.set()

            made = "vllm:generation_tokens_total"
            before = site.decode.metric(made)
            got, loop = asyncio.Event(), asyncio.get_running_loop()
            client = asyncio.ensure_future(ask(got))
            await asyncio.wait_for(got.wait(), 120)
            client.cancel()
            await asyncio.gather(client, return_exceptions=True)
            seen, since = before, loop.time()

            async def idle() -> bool:
                nonlocal seen, since
                if (now := site.decode.metric(made)) != seen:
                    seen, since = now, loop.time()
                return loop.time() - since > 1.0 and site.decode.metric("vllm:num_requests_running") == 0

            await until(idle, timeout_s=60, what="the engine is free")
            assert seen - before < 2000
            await proxy.until_metric("kvpool_pd_requests_total", 1, outcome="cancelled")

    asyncio.run(run())


def test_prefill_killed_half_way_changes_no_text(site: Site, alone: dict[int, str]) -> None:
    async def run() -> None:
        async with running(*PROXY, prefill=[site.prefill.url], decode=[site.decode.url]) as proxy:
            half = N_REQUESTS // 2
            answers = await ask_all(proxy, "killed", range(half))
            site.prefill.pause()  # (what comes to it now is under way when it is killed, however fast it is)
            others = asyncio.ensure_future(ask_all(proxy, "killed", range(half, N_REQUESTS)))
            await asyncio.to_thread(site.prefill.kill)
            answers |= await others
            check(answers, alone)
            routes = [answer.route for answer in answers.values()]
            assert routes.count("prefill") >= 5 and routes.count("prefill_failed") + routes.count("no_prefill") >= 1, routes
            await proxy.until_metric("kvpool_pd_requests_total", N_REQUESTS, outcome="ok")
            assert await proxy.metric("kvpool_pd_node_state", role="prefill") > 0

    asyncio.run(run())
