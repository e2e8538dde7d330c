"""Scaled or whole: `make test` runs tests at a size for two busy cores, `make reports` (KVPOOL_TEST_FULL=1) at full size."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("KVPOOL_TEST_FULL") == "1"


def scaled(small: T, full: T) -> T:
    """`small` in `make test`, `full` in `make reports`."""
    return full if FULL else small
