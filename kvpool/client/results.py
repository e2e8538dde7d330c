"""What the calls of a namespace answer: values, one class a verb. Nothing here talks to anybody."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.core.pins import PinOutcome
from kvpool.core.types import MissCause, Outcome, RemoveOutcome, Tier


@dataclass(frozen=True, slots=True)
class Source:
    """Where one block of a get came from: worker id, tier, transport ("shm" | "tcp" | "nixl")."""

    worker: str
    tier: Tier
    transport: str


@dataclass(frozen=True, slots=True)
class PutResult:
    """Per block of a put, in the order of the hashes.

    `outcomes`: what became of it. `reasons`: why, for FULL and REJECTED, else "". `copies`: workers that confirmed to have it.
    """

    outcomes: list[Outcome]
    copies: list[int]
    reasons: list[str]

    def count(self, outcome: Outcome) -> int:
        """Blocks with this outcome."""
        return self.outcomes.count(outcome)

    @property
    def n_there(self) -> int:
        """Leading blocks that the pool has now: stored, already there, or unlisted."""
        for index, outcome in enumerate(self.outcomes):
            if outcome is Outcome.FULL or outcome is Outcome.REJECTED:
                return index
        return len(self.outcomes)


@dataclass(frozen=True, slots=True)
class GetResult:
    """What a get served. Buffers 0..n_blocks-1 hold verified bytes; what later buffers hold is undefined.

    `miss`: None when every asked block was served, else why block n_blocks was not; `miss_worker`: the worker behind that
    cause, where one is ("": none); `reason`: the same in words, where there are some. `sources` and `sizes` (bytes stored, or of
    the range): [n_blocks]. `complete`: False when the master was away or rebuilding its index, so that a miss may be one of
    knowledge only.
    """

    n_blocks: int
    miss: MissCause | None = None
    sources: list[Source] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    complete: bool = True
    miss_worker: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PinResult:
    """Per block of a pin or unpin. Of a pin: PINNED (it is there), ABSENT (pinned when it comes while the pin lives), REFUSED
    (there, but hard pins have their share of the tier: it is evicted last instead). Of an unpin: UNPINNED or NOT_PINNED.
    `pending_workers`: ids of connected workers that have not confirmed yet."""

    outcomes: list[PinOutcome]
    pending_workers: list[str] = field(default_factory=list)

    def count(self, outcome: PinOutcome) -> int:
        """Blocks with this outcome."""
        return self.outcomes.count(outcome)


@dataclass(frozen=True, slots=True)
class RemoveResult:
    """Per block of a remove. `pending_workers`: ids of those that may still have a PENDING block and have not confirmed."""

    outcomes: list[RemoveOutcome]
    pending_workers: list[str] = field(default_factory=list)

    def count(self, outcome: RemoveOutcome) -> int:
        """Blocks with this outcome."""
        return self.outcomes.count(outcome)
