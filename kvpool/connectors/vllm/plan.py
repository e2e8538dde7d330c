"""What travels from the scheduler's half to the workers' in every step, and back. Plain values: pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.core.hashing import PrefixHashes


@dataclass(slots=True)
class LoadJob:
    """Blocks that were promised to a request: `hashes` [n] go to the paged blocks `block_ids` [n]. `token`: of the hold that
    promised them. `budget_ms`: what is left of the request's deadline; the time of the bytes themselves comes on top."""

    request_id: str
    hashes: PrefixHashes
    block_ids: list[int]
    token: bytes
    budget_ms: float
    is_async: bool


@dataclass(slots=True)
class SaveJob:
    """Blocks that are full after this step: the paged blocks `block_ids` [n] are to be put as `hashes` [n]. They stay untouched
    until every rank said that the job is done."""

    job_id: int
    hashes: PrefixHashes
    block_ids: list[int]


@dataclass(slots=True)
class StepPlan:
    """All of one step. `idle`: no token is computed in it, so that the workers may wait a moment for transfers under way."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    idle: bool = False


@dataclass(slots=True)
class StepReport:
    """What a rank has done since its last report. `released`: save jobs whose paged blocks it needs no more, `loaded`: requests
    whose load it has ended (with how many ranks say so), `failed`: those that did not get all blocks, with the cause."""

    released: dict[int, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.released or self.loaded or self.failed)

    def add(self, other: StepReport) -> None:
        """What another rank has done, or the same one later."""
        for job_id, n in other.released.items():
            self.released[job_id] = self.released.get(job_id, 0) + n
        for request_id, n in other.loaded.items():
            self.loaded[request_id] = self.loaded.get(request_id, 0) + n
        self.failed.update(other.failed)
