"""Memory of the gone: why a key that was here is not here any more. Bounded; what it forgot it says it does not know.

Owns: causes by key, a ring that bounds them, a filter of what fell out of the ring. Does not own: blocks (`blocks`).
"""

from __future__ import annotations

from collections import deque
from typing import Final

import xxhash

from kvpool.core.types import Key, MissCause, Tiers

FILTER_BITS: Final = 23  # 1 MiB: a million forgotten keys make 2 % of the never stored ones `unknown`
FILTER_HASHES: Final = 4

Why = tuple[MissCause, Tiers | None]  # the cause, and the tier that had the last copy
Causes = dict[Key, Why]

NEVER: Final[Why] = (MissCause.NEVER_STORED, None)
UNKNOWN: Final[Why] = (MissCause.UNKNOWN, None)


class Gone:
    """`keys_max` keys of all namespaces together, the oldest forgotten first. A namespace has its own `Causes`."""

    def __init__(self, *, keys_max: int) -> None:
        self.keys_max = keys_max
        self._ring: deque[tuple[Causes, Key]] = deque()  # may name keys that came back: then they are forgotten early
        self._forgotten = bytearray()  # Bloom filter (CACM 1970), made when first needed

    def remember(self, causes: Causes, key: Key, why: Why) -> None:
        """The key is gone for this reason."""
        if key not in causes:
            self._ring.append((causes, key))
        causes[key] = why
        while len(self._ring) > self.keys_max:
            old_causes, old_key = self._ring.popleft()
            if old_causes.pop(old_key, None) is not None:
                self._forget(old_key)

    def why(self, causes: Causes, key: Key) -> Why:
        """Why this key is not here: its reason, NEVER, or UNKNOWN when that is no longer remembered."""
        why = causes.get(key)
        if why is not None:
            return why
        return UNKNOWN if self._forgotten and self._may_be_forgotten(key) else NEVER

    def _forget(self, key: Key) -> None:
        if not self._forgotten:
            self._forgotten = bytearray(1 << (FILTER_BITS - 3))
        for bit in _bits(key):
            self._forgotten[bit >> 3] |= 1 << (bit & 7)

    def _may_be_forgotten(self, key: Key) -> bool:
        return all(self._forgotten[bit >> 3] >> (bit & 7) & 1 for bit in _bits(key))

    def __len__(self) -> int:
        return len(self._ring)


def _bits(key: Key) -> list[int]:
    digest: int = xxhash.xxh3_128_intdigest(key)
    return [digest >> (FILTER_BITS * i) & ((1 << FILTER_BITS) - 1) for i in range(FILTER_HASHES)]
