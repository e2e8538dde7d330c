"""Whether LRU would have had more hits of late: the learned policy's insurance.

No order is best everywhere; one learned from how long runs waited is wrong where that changes faster than it learns. What LRU
would have had is known for each run without a second cache (`history.lru_hits`), so hits are compared all the time, and where LRU
is ahead the policy goes its way. It is an LRU of blocks that knows no pins, sizes and second copies; namespaces with a quota are
not compared. Owns the comparison and the mode; what a mode means is up to `hazard`, `hazard_tier` and `lifetable`.

What that promises: a lead of LRU that lasts is followed. Not that there is none. Whoever has n hits in a scan longer than the
cache, where LRU has none, kept n blocks that LRU had given up by then, and lacks n that it has: if those are asked for instead,
LRU is n hits ahead. So a policy is better than LRU somewhere or never below it, not both; what is lost before it is noticed is
some part of what is cached, at each change.

    LEARNED ──LRU is ahead──▶ LEAN (two tiers) ──still──▶ RECENT      when LRU is ahead again soon after a step back,
       ▲────────after a while─────┘   ▲──after a while──────┘         the next while is twice as long
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

DECAY: Final = 0.97  # of what was compared, at a refresh
MARGINS: Final[tuple[float, ...]] = (0.01, 0.02)  # of LRU's hits that it must be ahead by, with one tier and with two
SURE: Final = 2.0  # times what chance makes of nothing it must be ahead by,
PLAIN: Final = 5.0  # or once that and so many times the margin
STAY_MIN: Final = 32  # refreshes in a mode before it is given up,
STAY_MAX: Final = 1024  # and at most
BIAS_DECAY: Final = 0.999  # a refresh
TURNS: Final = 4  # times what is cached must have been used or stored then; half of it goes by without judgement


class Mode(IntEnum):
    LEARNED = 0
    LEAN = 1  # of what is in both tiers the SSD copy goes first: no block is worth less than a second copy
    RECENT = 2  # and what was used longest ago goes first, nothing is refused


class Rival:
    """`hits`, `lru_hits`, `blocks`: counted since the last time `judge` was asked: hits, what LRU would have had of the same
    requests, and blocks used or stored."""

    __slots__ = ("_ahead", "_bias", "_deaf", "_left", "_lru", "_squares", "_stay", "_was_back", "all_hits", "all_lru_hits",
                 "blocks", "hits", "lru_hits", "mode")  # fmt: skip

    def __init__(self) -> None:
        self.hits = self.lru_hits = self.blocks = 0
        self.all_hits = self.all_lru_hits = 0  # of all times, up to the latest refresh
        self.mode = Mode.LEARNED
        self._stay = STAY_MIN
        self._left = self._deaf = (0, 0)  # refreshes and blocks: until a step back, until LRU's lead counts
        self._was_back = False  # the mode before this one was a further one
        self._bias = 0.0  # LRU's lead over itself, a part of its hits: what is not known of it (its second copies, say)
        self._ahead = self._squares = self._lru = 0.0  # LRU's lead, the sum of its squares (how far chance goes), LRU's hits

    def judge(self, n_cached: int, *, two_tiers: bool, lean: bool) -> Mode:
        """Once a refresh. n_cached: copies in all tiers. lean: there is that mode."""
        ahead, lru, blocks = self.lru_hits - self.hits, self.lru_hits, self.blocks
        self.all_hits += self.hits
        self.all_lru_hits += lru
        self.hits = self.lru_hits = self.blocks = 0
        self._left = self._left[0] - 1, self._left[1] - blocks
        self._deaf = self._deaf[0] - 1, self._deaf[1] - blocks
        if max(self._deaf) > 0:
            return self.mode
        self._ahead = self._ahead * DECAY + ahead
        self._squares = self._squares * DECAY * DECAY + ahead * ahead
        self._lru = self._lru * DECAY + lru
        self._bias *= BIAS_DECAY
        ahead_by = self._ahead - self._bias * self._lru
        least, chance = MARGINS[two_tiers] * self._lru, self._squares**0.5
        is_sure = ahead_by > SURE * chance or (ahead_by > chance and ahead_by > PLAIN * least)
        if self.mode < Mode.RECENT and ahead_by > least and is_sure:
            if self._was_back and max(self._left) > 0:
                self._stay = min(2 * self._stay, STAY_MAX)
            self._was_back = False
            self._enter(Mode.LEAN if lean and self.mode is Mode.LEARNED else Mode.RECENT, n_cached)
        elif max(self._left) <= 0:
            if self.mode is Mode.LEARNED:
                self._stay, self._was_back = STAY_MIN, False
                return self.mode
            if self.mode is Mode.RECENT:
                self._bias = max(0.0, self._ahead / self._lru) if self._lru else 0.0
            self._was_back = True
            self._enter(Mode.LEAN if lean and self.mode is Mode.RECENT else Mode.LEARNED, n_cached)
        return self.mode

    def _enter(self, mode: Mode, n_cached: int) -> None:
        self.mode = mode
        self._left = self._stay, TURNS * n_cached * self._stay // STAY_MIN
        self._deaf = STAY_MIN // 8, TURNS * n_cached // 2
        self._ahead = self._squares = self._lru = 0.0
