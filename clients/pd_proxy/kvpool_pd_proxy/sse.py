"""Server-sent events, pure: bytes in, whole events out, each with its own bytes (to be passed on) and its data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_END = re.compile(rb"\r?\n\r?\n")


class EventTooLong(ValueError):
    """An event is longer than the limit."""


@dataclass(frozen=True, slots=True)
class Event:
    """`raw` ends with the empty line. `done`: `[DONE]`. `value`: its JSON object, None when it has none (a comment)."""

    raw: bytes
    done: bool
    value: dict[str, Any] | None

    def error(self) -> dict[str, Any] | None:
        """The error that an engine told in the stream."""
        found = None if self.value is None or self.value.get("choices") else self.value.get("error")
        return found if isinstance(found, dict) else None

    def has_token(self) -> bool:
        """Whether it carries a token: not so a chat's opening (role, no content), usage alone, or a comment."""
        choices = None if self.value is None else self.value.get("choices")
        return isinstance(choices, list) and any(_has_token(choice) for choice in choices if isinstance(choice, dict))


def _has_token(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
        return True
    opening = delta.get("role") is not None and not delta.get("content")
    return not opening or any(delta.get(name) for name in ("reasoning", "reasoning_content", "tool_calls"))


class Splitter:
    """Cuts a stream into events. `event_bytes_max` bounds what it keeps."""

    def __init__(self, *, event_bytes_max: int) -> None:
        self._max = event_bytes_max
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """Events that are whole now. EventTooLong; ValueError for data that is not JSON."""
        self._rest += data
        while found := _END.search(self._rest):
            raw, self._rest = self._rest[: found.end()], self._rest[found.end() :]
            yield _event(raw)
        if len(self._rest) > self._max:
            raise EventTooLong(f"an event of the stream is longer than {self._max} bytes")


def _event(raw: bytes) -> Event:
    lines = [line[5:].strip() for line in raw.splitlines() if line.startswith(b"data:")]
    data = b"\n".join(lines)
    if not data:
        return Event(raw, False, None)
    if data == b"[DONE]":
        return Event(raw, True, None)
    value = json.loads(data)
    return Event(raw, False, value if isinstance(value, dict) else None)


def encode(value: dict[str, Any]) -> bytes:
    """One event with this JSON object as its data."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
