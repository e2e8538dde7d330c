"""OpenAI's requests, pure: what is wrong with one, its length, its prefix, and what to send to prefill and decode.

Only what the proxy itself needs is checked; the rest of a request is the engine's business, and its answer is passed on.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from kvpool_pd_proxy.affinity import Chain, chain

MESSAGES_MAX: Final = 10_000
PROMPTS_MAX: Final = 1_024  # in one completion request
CHOICES_MAX: Final = 128
MESSAGE_TOKENS: Final = 4  # a chat template's own, a message


class Kind(Enum):
    COMPLETION = "completions"
    CHAT = "chat/completions"

    @property
    def path(self) -> str:
        return f"/v1/{self.value}"


class BadRequest(ValueError):
    """What the client sent cannot be served. `param`: the field, "" when it is the body as a whole."""

    def __init__(self, message: str, *, param: str = "", status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


def error_body(message: str, *, status: int, param: str = "") -> dict[str, Any]:
    """An error as OpenAI and vLLM write it."""
    kinds = {404: "not_found_error", 405: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param or None, "code": status}}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `n_tokens`: of its prompt, exact when it came as token ids, else estimated.

    `whole`: why it must go to decode as it is, "" when it may be prefilled elsewhere. `reuse_ids`: whether decode may be given
    the token ids in place of the prompt.
    """

    kind: Kind
    body: dict[str, Any]
    n_bytes: int
    n_tokens: int
    chain: Chain
    whole: str
    reuse_ids: bool

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


def parse(kind: Kind, raw: bytes, *, bytes_per_token: float) -> Ask:
    """BadRequest that names the field."""
    body = _object(raw)
    _check_common(body)
    if kind is Kind.CHAT:
        segments, n_tokens, media = _chat(body, bytes_per_token)
    else:
        segments, n_tokens, media = *_completion(body, bytes_per_token), False
    names = ("model", "cache_salt", "tools", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort")
    root = _canonical([kind.value, *(body.get(name) for name in names)])
    return Ask(kind, body, sum(map(len, segments)), n_tokens, chain(root, segments), _whole(kind, body), not media)


def _object(raw: bytes) -> dict[str, Any]:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def finite(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else refuse(text[:40])

    try:
        body = json.loads(raw, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request's body is not JSON: {error or type(error).__name__}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the request's body must be a JSON object, not {_name(body)}")
    return body


def _check_common(body: dict[str, Any]) -> None:
    for field, kinds in (("model", str), ("stream", bool), ("stream_options", dict), ("cache_salt", str), ("tools", list)):
        if body.get(field) is not None and not isinstance(body[field], kinds):
            raise BadRequest(f"{field} must be {_NAMES[kinds]}, not {_name(body[field])}", param=field)
    if body.get("stream_options") is not None and not body.get("stream"):
        raise BadRequest("stream_options goes with stream=true only", param="stream_options")
    _integer(body, "n", 1, CHOICES_MAX)
    _integer(body, "max_tokens", 0, 1 << 31)
    _integer(body, "max_completion_tokens", 0, 1 << 31)
    if body.get("kv_transfer_params") is not None:
        raise BadRequest("kv_transfer_params is between the proxy and its nodes; leave it out", param="kv_transfer_params")


def _integer(body: dict[str, Any], field: str, least: int, most: int) -> None:
    value = body.get(field)
    if value is None:
        return
    if type(value) is not int or not least <= value <= most:
        raise BadRequest(f"{field} must be an integer from {least} to {most}, not {str(value)[:40]}", param=field)


def _chat(body: dict[str, Any], bytes_per_token: float) -> tuple[list[bytes], int, bool]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    if len(messages) > MESSAGES_MAX:
        raise BadRequest(f"messages has {len(messages)} messages; {MESSAGES_MAX} is the most", param="messages")
    n_text, media = 0, False
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequest(f"messages[{i}] must be an object, not {_name(message)}", param=f"messages[{i}]")
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{i}].role must be a string", param=f"messages[{i}].role")
        content = message.get("content")
        if not isinstance(content, (str, list, type(None))):
            raise BadRequest(
                f"messages[{i}].content must be a string or a list of parts, not {_name(content)}", param=f"messages[{i}].content"
            )
        for part in content if isinstance(content, list) else [content or ""]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                n_text += _n_bytes(text)
            else:
                media = True
        if message.get("tool_calls"):
            n_text += len(_canonical(message["tool_calls"]))
    if body.get("tools"):
        n_text += len(_canonical(body["tools"]))
    n_tokens = math.ceil(n_text / bytes_per_token) + MESSAGE_TOKENS * len(messages)
    return [_canonical(message) for message in messages], n_tokens, media


def _completion(body: dict[str, Any], bytes_per_token: float) -> tuple[list[bytes], int]:
    prompt = body.get("prompt")
    if prompt is None and body.get("prompt_embeds") is not None:
        return [b""], 0
    if isinstance(prompt, str) and prompt:
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        prompts = [prompt]
    elif isinstance(prompt, list) and prompt:
        prompts = prompt
    else:
        raise BadRequest("prompt must be a string, a list of token ids, or a list of those, and not empty", param="prompt")
    if len(prompts) > PROMPTS_MAX:
        raise BadRequest(f"prompt has {len(prompts)} prompts; {PROMPTS_MAX} is the most", param="prompt")
    segments, n_tokens = [], 0
    for i, one in enumerate(prompts):
        if isinstance(one, str):
            segments.append(one.encode("utf-8", "surrogatepass"))
            n_tokens += math.ceil(len(segments[-1]) / bytes_per_token)
        elif isinstance(one, list) and one and all(type(token) is int and 0 <= token < 1 << 31 for token in one):
            segments.append(b"ids:" + struct.pack(f"<{len(one)}i", *one))
            n_tokens += len(one)
        else:
            raise BadRequest(f"prompt[{i}] must be a string or a list of token ids, all of them >= 0", param=f"prompt[{i}]")
    return segments, n_tokens


def _whole(kind: Kind, body: dict[str, Any]) -> str:
    """These read the prompt's own text or scores, or cut it in their own way; or make one token only: nothing is gained."""
    for field in ("prompt_embeds", "echo", "suffix", "use_beam_search", "truncate_prompt_tokens", "prompt_logprobs"):
        if body.get(field) not in (None, False):
            return field
    limit = body.get("max_completion_tokens") if kind is Kind.CHAT else None
    limit = body.get("max_tokens") if limit is None else limit
    return "max_tokens" if isinstance(limit, int) and limit <= 1 else ""


# What makes no sense, or an error, with one token of one choice that nobody reads.
_NOT_FOR_PREFILL: Final = (
    "stream", "stream_options", "stream_interval", "n", "best_of", "min_tokens", "stop", "logprobs", "top_logprobs",
    "logprob_token_ids", "return_prompt_text",
)  # fmt: skip


def prefill_body(ask: Ask) -> bytes:
    """The same request for one token, with the prompt's token ids in its answer."""
    body = {name: value for name, value in ask.body.items() if name not in _NOT_FOR_PREFILL}
    body |= {"max_tokens": 1, "stream": False, "return_token_ids": True}
    if ask.kind is Kind.CHAT:
        body["max_completion_tokens"] = 1
    return _canonical(body)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What prefill said. `ids`: for each prompt its tokens, empty when it told none; `kv_params`: for decode's connector."""

    ids: list[list[int]]
    kv_params: dict[str, Any]

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.ids))


def prefilled(ask: Ask, answer: bytes) -> Prefilled:
    """From a prefill node's answer. ValueError when it is none."""
    value = json.loads(answer)
    if not isinstance(value, dict) or not isinstance(value.get("choices"), list):
        raise ValueError("no choices in the answer")
    params = value.get("kv_transfer_params")
    of = [value] if ask.kind is Kind.CHAT else [one for one in value["choices"] if isinstance(one, dict)]
    found = [one.get("prompt_token_ids") for one in sorted(of, key=lambda one: one.get("index") or 0)]
    ids = [one for one in found if isinstance(one, list) and one and all(type(token) is int and token >= 0 for token in one)]
    prompt = ask.body.get("prompt")
    wanted = len(prompt) if isinstance(prompt, list) and type(prompt[0]) is not int else 1
    complete = len(ids) == wanted == len(found)
    return Prefilled(ids if complete else [], params if isinstance(params, dict) else {})


def decode_body(ask: Ask, done: Prefilled | None) -> bytes:
    """The request for a decode node. With token ids (`prompt` for completions; vLLM's `kv_transfer_params.prompt_token_ids` for
    chat) it does not tokenise again. A chat stays a chat: template, tools, parsers and stop words are the engine's own."""
    if done is None:
        return _canonical(ask.body)
    body, params = dict(ask.body), dict(done.kv_params)
    if done.ids and ask.reuse_ids:
        if ask.kind is Kind.CHAT:
            params["prompt_token_ids"] = done.ids[0]
        else:
            many = isinstance(body["prompt"], list) and type(body["prompt"][0]) is not int
            body["prompt"] = done.ids if many else done.ids[0]
    if params:
        body["kv_transfer_params"] = params
    return _canonical(body)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _n_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


_NAMES: Final = {
    str: "a string", bool: "true or false", dict: "an object", list: "a list", int: "a number", float: "a number",
    type(None): "null",
}  # fmt: skip


def _name(value: Any) -> str:
    return _NAMES.get(type(value), type(value).__name__)
