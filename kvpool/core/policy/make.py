"""The eviction policies of `BlockTable`, by name: workers have lru, the simulator both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvpool.core.policy.eviction import EvictionPolicy, Lru
from kvpool.core.policy.hazard import Hazard
from kvpool.errors import InvalidArgument

POLICIES: Final = ("hazard", "lru")


def policy_of(name: str) -> Callable[[], EvictionPolicy]:
    """What `BlockTable` takes as `policy`: each call makes the next tier's, all of one worker. InvalidArgument: no such name."""
    if name == "lru":
        return Lru
    if name == "hazard":
        return Hazard().tier
    raise InvalidArgument(f"policy: {name!r} is not one of {', '.join(POLICIES)}")
