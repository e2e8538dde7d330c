"""Waiting for a condition, with a deadline. The only place under tests/ that may sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.005
POLL_S_MAX = 0.1
REST = 2.0  # times as long as the question took: who is waited for needs the cores


def wait_until(condition: Callable[[], T], *, timeout_s: float = 10.0, what: str = "") -> T:
    """Call `condition` until it is truthy and return what it gave; AssertionError naming `what` when the time is up."""
    end = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        value = condition()
        if value:
            return value
        now = time.monotonic()
        if now >= end:
            raise AssertionError(f"not within {timeout_s} s: {what or getattr(condition, '__name__', condition)}")
        time.sleep(min(POLL_S_MAX, max(POLL_S, REST * (now - asked))))


def pause(seconds: float) -> None:
    """Let real time pass where time itself is what is tested (a delayed relay, a lease that runs out)."""
    time.sleep(seconds)
