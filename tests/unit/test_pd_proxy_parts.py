"""The proxy's pure parts: breaker, affinity, events, and what is made of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_pd_proxy.affinity import PIECE_BYTES, Affinity, chain
from kvpool_pd_proxy.breaker import Breaker, State
from kvpool_pd_proxy.protocol import Kind, decode_body, parse, prefill_body, prefilled
from kvpool_pd_proxy.sse import EventTooLong, Splitter, encode


def breaker() -> Breaker:
    return Breaker(failures_max=3, open_s=2, open_max_s=6)


def test_three_failures_in_a_row_open_it_and_a_success_starts_the_count_anew() -> None:
    b = breaker()
    assert not b.failed(0, beyond_doubt=False) and not b.failed(0, beyond_doubt=False)
    b.succeeded()
    assert not b.failed(0, beyond_doubt=False) and not b.failed(0, beyond_doubt=False)
    assert b.failed(0, beyond_doubt=False)
    assert b.state is State.OPEN and not b.admits()


def test_open_ends_with_its_time_and_a_good_probe_and_then_one_request_is_on_trial() -> None:
    b = breaker()
    assert b.failed(10, beyond_doubt=True)
    b.probed(11.9)
    assert b.state is State.OPEN
    b.probed(12)
    assert b.state is State.HALF_OPEN and b.admits()
    b.begin()
    assert not b.admits()
    b.abandoned()  # the client left: another may try
    assert b.admits()
    b.begin()
    b.succeeded()
    assert b.state is State.CLOSED


def test_each_failed_trial_doubles_the_time_up_to_the_most() -> None:
    b, now = breaker(), 0.0
    for open_s in (2, 4, 6, 6):
        assert b.failed(now, beyond_doubt=True)
        b.probed(now + open_s - 0.1)
        assert b.state is State.OPEN
        now += open_s
        b.probed(now)
        assert b.state is State.HALF_OPEN
        b.begin()
    b.succeeded()
    b.failed(now, beyond_doubt=True)
    b.probed(now + 2)
    assert b.state is State.HALF_OPEN  # short again after a success


def test_late_answers_do_not_close_an_open_one() -> None:
    b = breaker()
    b.failed(0, beyond_doubt=True)
    b.succeeded()
    assert b.state is State.OPEN


@given(st.lists(st.binary(min_size=1, max_size=3 * PIECE_BYTES), min_size=1, max_size=6), st.integers(1, 6))
def test_a_conversations_start_has_the_same_digests_whatever_follows(segments: list[bytes], n: int) -> None:
    whole, start = chain(b"root", segments), chain(b"root", segments[:n])
    assert whole.digests[: len(start.digests)] == start.digests
    assert start.ends[-1] == start.n_bytes == sum(map(len, segments[:n]))
    other = chain(b"other", segments)
    assert not set(other.digests) & set(whole.digests)


def test_the_table_knows_each_nodes_part_and_forgets_what_was_not_used() -> None:
    table = Affinity(entries_max=6)
    turns = [bytes([i]) * 10 for i in range(6)]
    table.record(chain(b"", turns[:2]), 0)
    table.record(chain(b"", turns[:4]), 1)
    assert table.matched(chain(b"", turns), 3) == [20, 40, 0]
    assert table.matched(chain(b"", [b"else", *turns]), 3) == [0, 0, 0]
    table.record(chain(b"x", turns[:4]), 2)
    assert len(table) == 6
    assert table.matched(chain(b"x", turns), 3) == [0, 0, 40]
    assert table.matched(chain(b"", turns), 3) == [20, 20, 0]  # the ends of the older ones went first
    table.forget(2)
    assert table.matched(chain(b"x", turns), 3) == [0, 0, 0] and len(table) == 2


def test_a_node_without_the_start_does_not_have_the_rest() -> None:
    table = Affinity(entries_max=100)
    table.record(chain(b"", [b"a", b"b"]), 0)
    long = chain(b"", [b"a", b"b", b"c"])
    table._nodes[long.digests[2]] = 0b11
    assert table.matched(long, 2) == [3, 0]


EVENTS = [
    encode({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
    encode({"choices": [{"index": 0, "delta": {"content": "x\n\ny"}}]}),
    b": keep-alive\r\n\r\n",
    encode({"choices": [], "usage": {}}),
    encode({"error": {"message": "m", "code": 500}}),
    b"data: [DONE]\n\n",
]


@given(st.lists(st.integers(1, 40)))
def test_events_come_whole_however_the_stream_is_cut(cuts: list[int]) -> None:
    stream, splitter, events = b"".join(EVENTS), Splitter(event_bytes_max=1000), []
    for cut in [*cuts, len(stream)]:
        events += splitter.feed(stream[:cut])
        stream = stream[cut:]
    assert [event.raw for event in events] == EVENTS
    assert [event.has_token() for event in events] == [False, True, False, False, False, False]
    assert [event.done for event in events] == [False] * 5 + [True]
    assert [event.error() is not None for event in events] == [False] * 4 + [True, False]


@pytest.mark.parametrize(
    ("choice", "token"),
    [
        ({"text": ""}, True),  # half a letter
        ({"delta": {"content": ""}}, True),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"role": "assistant"}}, False),
        ({"delta": {"role": "assistant", "content": "x"}}, True),
        ({"delta": {"role": "assistant", "reasoning": "x"}}, True),
        ({"delta": {"role": "assistant", "content": None, "tool_calls": [{}]}}, True),
        ({"delta": {"role": "assistant"}, "finish_reason": "stop"}, True),
    ],
)
def test_what_is_a_token(choice: dict[str, Any], token: bool) -> None:
    (event,) = Splitter(event_bytes_max=1000).feed(encode({"choices": [choice]}))
    assert event.has_token() is token


def test_an_endless_event_is_refused() -> None:
    splitter = Splitter(event_bytes_max=100)
    with pytest.raises(EventTooLong):
        list(splitter.feed(b"data: " + b"x" * 200))


def ask(kind: Kind, body: dict[str, Any]) -> Any:
    return parse(kind, json.dumps(body).encode(), bytes_per_token=4)


def test_lengths_are_counted_for_ids_and_guessed_for_text() -> None:
    assert ask(Kind.COMPLETION, {"prompt": [1] * 77}).n_tokens == 77
    assert ask(Kind.COMPLETION, {"prompt": [[1] * 7, [2] * 8]}).n_tokens == 15
    assert ask(Kind.COMPLETION, {"prompt": "x" * 401}).n_tokens == 101
    assert ask(Kind.COMPLETION, {"prompt": "日" * 4}).n_tokens == 3
    text = {"role": "user", "content": "x" * 400}
    parts = {"role": "user", "content": [{"type": "text", "text": "x" * 400}]}
    assert ask(Kind.CHAT, {"messages": [text]}).n_tokens == ask(Kind.CHAT, {"messages": [parts]}).n_tokens == 104
    assert ask(Kind.CHAT, {"messages": [text], "tools": [{"x": "y" * 400}]}).n_tokens > 200


def test_what_separates_prompts_separates_their_digests() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "model": "m"}
    same = ask(Kind.CHAT, {**body, "temperature": 0.3, "max_tokens": 9})
    assert same.chain == ask(Kind.CHAT, body).chain
    for other in ({"model": "n"}, {"cache_salt": "s"}, {"tools": [{}]}, {"chat_template_kwargs": {"a": 1}}):
        assert not set(ask(Kind.CHAT, {**body, **other}).chain.digests) & set(same.chain.digests)


def test_several_prompts_are_tokenised_once_too() -> None:
    many = ask(Kind.COMPLETION, {"prompt": ["a", "b"], "n": 3, "max_tokens": 5, "stream": True, "min_tokens": 4, "stop": ["x"]})
    sent = json.loads(prefill_body(many))
    assert sent == {"prompt": ["a", "b"], "max_tokens": 1, "stream": False, "return_token_ids": True}
    choices = [{"index": 1, "prompt_token_ids": [2]}, {"index": 0, "prompt_token_ids": [1]}]
    done = prefilled(many, json.dumps({"choices": choices, "kv_transfer_params": {"kvpool_blocks": 3}}).encode())
    assert json.loads(decode_body(many, done)) == {**many.body, "prompt": [[1], [2]], "kv_transfer_params": {"kvpool_blocks": 3}}
    part = prefilled(many, json.dumps({"choices": choices[:1]}).encode())
    assert json.loads(decode_body(many, part)) == many.body  # not all told their ids


@pytest.mark.parametrize("ids", [None, [], "x", [1, "x"], [-1], [True], [1.5]])
def test_token_ids_that_are_none_are_not_passed_on(ids: Any) -> None:
    one = ask(Kind.CHAT, {"messages": [{"role": "user", "content": "x"}]})
    done = prefilled(one, json.dumps({"choices": [{}], "prompt_token_ids": ids}).encode())
    assert not done.ids and json.loads(decode_body(one, done)) == one.body
