"""What clients and simulated workers say to each other, as objects where `core.frames` has bytes: requests, bodies, answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvpool.core.keys import KeyBatch
from kvpool.sim.values import PARTS
from kvpool.transport.base import LinkCause

BODY_PIECES: Final = (1, PARTS)  # parts of every block that have come after each piece of a put's body


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `left_s`: of the caller's deadline. `incarnation`: whom it is meant for. `hold_id`: of a fill, commit or abort
    the reservation."""

    op: str  # read, write, touch, hold, release, renew, reserve, fill, commit, abort, stat
    incarnation: int
    left_s: float
    batch: KeyBatch | None = None
    sizes: Sequence[int] = ()
    sums: Sequence[bytes] = ()
    shared: bool = False
    wait_listed: bool = False
    hold_id: int = 0
    hold_ids: Sequence[int] = ()
    ttl_ms: int = 0
    view: bool = False
    fence: int | None = None

    @property
    def n_bodies(self) -> int:
        return {"write": len(BODY_PIECES), "fill": 1}.get(self.op, 0)


@dataclass(frozen=True, slots=True)
class Body:
    """A piece of a put's body: parts up to `stop` of every block; of a fill: (block, offset, data)."""

    stop: int
    blocks: Sequence[Any]


@dataclass(slots=True)
class Answer:
    """`refusal`: nothing was done, and why. `payload`, `sums` [n]: of inline hits. `places` [n]: offset, gen_index, generation of
    shared ones. `hold_id`: of a reserve the reservation."""

    codes: bytes = b""
    tiers: bytes = b""
    sizes: list[int] = field(default_factory=list)
    payload: list[bytes | None] = field(default_factory=list)
    sums: list[bytes | None] = field(default_factory=list)
    places: list[tuple[int, int, int] | None] = field(default_factory=list)
    hold_id: int = 0
    count: int = 0
    listed: bool = False
    refusal: LinkCause | None = None
