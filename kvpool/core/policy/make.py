"""The eviction policies that a worker can have, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvpool.core.policy.eviction import EvictionPolicy, Lru
from kvpool.core.policy.hazard import Hazard
from kvpool.core.policy.queued import QUEUED
from kvpool.core.policy.queued_tier import Queued
from kvpool.errors import InvalidArgument

POLICIES: Final = ("hazard", "lru", *sorted(QUEUED))


def policy_of(name: str, *, learned: Hazard | None = None) -> Callable[[], EvictionPolicy]:
    """What `BlockTable` takes as `policy`: each call makes the next tier's, all of one worker. InvalidArgument: no such name.

    learned: the worker's, for "hazard"; without it a new one is made."""
    if name == "lru":
        return Lru
    if name == "hazard":
        return (learned or Hazard()).tier
    if name in QUEUED:
        return Queued(QUEUED[name]).tier
    raise InvalidArgument(f"policy: {name!r} is not one of {', '.join(POLICIES)}")
