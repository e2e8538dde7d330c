"""Pins: an operator's or application's wish that blocks stay, each with an expiry. Pure; the master has one book a namespace (its
times are wall-clock), each worker another (its own clock).

Owns which keys are pinned, how and until when, and the bound. What a pin does to a block is `keeping`; that they survive is the
store's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from enum import Enum, IntEnum
from typing import Final

from kvpool.core.types import Key
from kvpool.errors import InvalidArgument

PINS_MAX: Final = 65_536  # keys of all namespaces together: about 15 MB at the master and at each worker
PIN_TTL_S_MAX: Final = 365 * 24 * 3600  # a wish without an end is forgotten by whoever had it, and stays


class PinLevel(IntEnum):
    """As it travels (u8)."""

    NONE = 0
    SOFT = 1  # evicted last: after everything unpinned in its tier
    HARD = 2  # never evicted, as far as the tier's share for that goes


class PinOutcome(Enum):
    """What became of the wish for one block."""

    PINNED = "pinned"
    ABSENT = "absent"  # nobody has it; it is pinned when it comes while the pin lives
    REFUSED = "refused"  # there, but hard pins have their share of the tier: it is evicted last instead
    UNPINNED = "unpinned"
    NOT_PINNED = "not_pinned"  # there was no such pin to end


def level_of(name: object) -> PinLevel:
    """'soft' or 'hard' as its level. Raises InvalidArgument."""
    if name == "soft":
        return PinLevel.SOFT
    if name == "hard":
        return PinLevel.HARD
    raise InvalidArgument(f"level: {name!r} is neither 'soft' nor 'hard'")


def check_ttl_s(ttl_s: object) -> int:
    """Milliseconds of a pin's time. Raises InvalidArgument."""
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s <= PIN_TTL_S_MAX:
        raise InvalidArgument(f"ttl_s: {ttl_s!r} is not in 0..{PIN_TTL_S_MAX} seconds (more than 0)")
    return max(1, int(ttl_s * 1000))


class PinBook:
    """Keys with their level and end (ms of the owner's clock). The bound is the owner's: `len`."""

    __slots__ = ("_ends", "_pins")

    def __init__(self) -> None:
        self._pins: dict[Key, tuple[PinLevel, int]] = {}
        self._ends: list[tuple[int, Key]] = []  # a heap; may name what was ended or renewed since

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, key: Key) -> bool:
        return key in self._pins

    def get(self, key: Key) -> tuple[PinLevel, int] | None:
        """(level, end) of a pin that was not dropped yet."""
        return self._pins.get(key)

    def items(self) -> Iterator[tuple[Key, PinLevel, int]]:
        for key, (level, until_ms) in self._pins.items():
            yield key, level, until_ms

    def set(self, key: Key, level: PinLevel, until_ms: int) -> None:
        """Pinned from now on like this; an earlier pin of the key is replaced."""
        self._pins[key] = (level, until_ms)
        heapq.heappush(self._ends, (until_ms, key))
        if len(self._ends) > 2 * len(self._pins) + 1024:
            self._ends = [(until_ms, key) for key, (_, until_ms) in self._pins.items()]
            heapq.heapify(self._ends)

    def drop(self, key: Key) -> bool:
        """Not pinned any more; False: it was not."""
        return self._pins.pop(key, None) is not None

    def clear(self) -> list[Key]:
        """Ends all; which they were."""
        keys = list(self._pins)
        self._pins.clear()
        self._ends.clear()
        return keys

    def expire(self, now_ms: int, *, n_max: int) -> list[Key]:
        """Drops pins whose time is up, at most n_max; which they were."""
        gone: list[Key] = []
        while self._ends and self._ends[0][0] <= now_ms and len(gone) < n_max:
            until_ms, key = heapq.heappop(self._ends)
            pin = self._pins.get(key)
            if pin is not None and pin[1] == until_ms:
                del self._pins[key]
                gone.append(key)
        return gone

    def counts(self) -> dict[PinLevel, int]:
        """How many of each level."""
        found = {PinLevel.SOFT: 0, PinLevel.HARD: 0}
        for level, _ in self._pins.values():
            found[level] += 1
        return found

    def fresh(self, keys: Iterable[Key]) -> int:
        """How many of these (each once) are not in it."""
        return len({key for key in keys if key not in self._pins})
