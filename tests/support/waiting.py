"""Waiting for a condition, with a deadline. The only place under tests/ that may sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.005


def wait_until(condition: Callable[[], T], *, timeout_s: float = 10.0, what: str = "") -> T:
    """Call `condition` until it is truthy and return what it gave; AssertionError naming `what` when the time is up."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= end:
            raise AssertionError(f"not within {timeout_s} s: {what or getattr(condition, '__name__', condition)}")
        time.sleep(POLL_S)


def pause(seconds: float) -> None:
    """Let real time pass where time itself is what is tested (a delayed relay, a lease that runs out)."""
    time.sleep(seconds)
