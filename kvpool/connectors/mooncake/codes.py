"""Mooncake's return codes, as far as this store gives them, and what of the pool's outcomes each one tells."""

from __future__ import annotations

from typing import Final

from kvpool.core.types import Outcome

OK: Final = 0
NO_AVAILABLE_HANDLE: Final = -200  # no room
INVALID_PARAMS: Final = -600  # an argument, a size that does not fit; also: before setup, after close
OBJECT_NOT_FOUND: Final = -704  # a miss, whatever its cause
OBJECT_ALREADY_EXISTS: Final = -705  # only of put sessions: other puts keep the old value and return 0
RPC_FAIL: Final = -900  # no master, no worker, no answer in time

_OF_OUTCOME: Final = {
    Outcome.STORED: OK,
    Outcome.ALREADY: OK,
    Outcome.UNLISTED: OK,
    Outcome.FULL: NO_AVAILABLE_HANDLE,
    Outcome.REJECTED: RPC_FAIL,
}


def code_of(outcome: Outcome) -> int:
    """What a put of this outcome returns: exactly 0 when the pool has the value."""
    return _OF_OUTCOME[outcome]
