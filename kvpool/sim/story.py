"""What happened in a run, as lines: the proof that two runs are the same, and the story of a block whose promise was broken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from kvpool.core.types import Key

LINES_MAX: Final = 80  # of one story


@dataclass(frozen=True, slots=True)
class Event:
    """`keys` (): it concerns all blocks (a fault, a new leader)."""

    at_s: float
    who: str
    what: str
    keys: tuple[Key, ...]


class Story:
    """`name_of`: keys as people read them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._digest = xxhash.xxh3_128()
        self._names: dict[Key, str] = {}

    def name(self, key: Key, name: str) -> None:
        self._names[key] = name

    def name_of(self, key: Key) -> str:
        return self._names.get(key) or key[:4].hex()

    def names(self, keys: Sequence[Key]) -> str:
        """A run of blocks, shortened."""
        named = [self.name_of(key) for key in keys]
        return " ".join(named) if len(named) <= 2 else f"{named[0]}..{named[-1]}"

    def add(self, at_s: float, who: str, what: str, keys: Iterable[Key] = ()) -> None:
        event = Event(at_s, who, what, tuple(keys))
        self.events.append(event)
        self._digest.update(f"{at_s:.9f} {who} {what}".encode())
        for key in event.keys:
            self._digest.update(key)

    def digest(self) -> str:
        """Of all events: equal for equal runs."""
        return self._digest.hexdigest()

    def tell(self, key: Key | None, *, until_s: float) -> list[str]:
        """The events up to then that touched the block, with what touched all; the latest ones when they are many."""
        lines = [
            f"{event.at_s:9.4f} s  {event.who:<10} {event.what}"
            for event in self.events
            if event.at_s <= until_s and (not event.keys or key in event.keys)
        ]
        left_out = len(lines) - LINES_MAX
        return lines if left_out <= 0 else [f"            ... {left_out} earlier events", *lines[-LINES_MAX:]]
