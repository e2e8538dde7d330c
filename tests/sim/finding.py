"""Finds a seed that shows that a promise is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvpool.sim.run import draw_scenario, run
from kvpool.sim.scenario import Scenario

SEEDS_TO_FIND = 40  # a broken promise must show in one of so many


def rough(seed: int, *faults: str, **changes: Any) -> Scenario:
    """The seed's scenario with these faults, in quick succession."""
    return replace(draw_scenario(seed), faults=faults, fault_every_s=0.25, **changes)


def found(promise: str, scenario: Callable[[int], Scenario] = draw_scenario, n_seeds: int = SEEDS_TO_FIND) -> int:
    """A seed that shows that the promise is broken; asserts that there is one."""
    other: set[str] = set()
    for seed in range(n_seeds):
        outcome = run(seed, scenario=scenario(seed))
        promises = {violation.promise for violation in outcome.violations}
        if promise in promises:
            return seed
        other |= promises
    raise AssertionError(f"{n_seeds} seeds do not find that {promise} is broken (they found {sorted(other) or 'nothing'})")
