"""Who is written to the SSD tier, beyond what the order of eviction says: for a disk that wears.

Owns the write budget. Does not own whether a block is worth its place there (`copies`: it is when it is worth more than what
would leave for it).
"""

from __future__ import annotations

from typing import Final

BURST_S: Final = 60.0  # a rate is kept in the mean of so long
DAY_S: Final = 86_400.0


class WriteBudget:
    """Token buckets: bytes a second and bytes a day, 0: no limit. A day's bytes come evenly, a quarter of them may be spent at
    once."""

    def __init__(self, *, bytes_per_s: int = 0, bytes_per_day: int = 0) -> None:
        self._buckets: list[tuple[float, float]] = []  # (rate in bytes a second, most that is saved up)
        if bytes_per_s:
            self._buckets.append((float(bytes_per_s), bytes_per_s * BURST_S))
        if bytes_per_day:
            self._buckets.append((bytes_per_day / DAY_S, bytes_per_day / 4))
        self._left = [most for _, most in self._buckets]
        self._at_ms: int | None = None

    def at(self, now_ms: int) -> None:
        """It is this time now."""
        if self._at_ms is not None and now_ms > self._at_ms:
            passed_s = (now_ms - self._at_ms) / 1000
            self._left = [min(most, left + rate * passed_s) for (rate, most), left in zip(self._buckets, self._left, strict=True)]
        self._at_ms = max(now_ms, self._at_ms or now_ms)

    def allows(self) -> bool:
        """Whether something may be written now; what is spent may exceed what is left by one block."""
        return all(left > 0 for left in self._left)

    def spend(self, n_bytes: int) -> None:
        """So many bytes are written."""
        self._left = [left - n_bytes for left in self._left]
