"""`kvpool drain`: empty a worker before it goes, end that, or forget one that will not come back."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli.ask import WORKER_STATES, master_at
from kvpool.cli.common import (
    EXIT_FAILED,
    DeadlineOption,
    JsonOption,
    MasterOption,
    TokenFileOption,
    format_bytes,
    parse_size,
    print_json,
)
from kvpool.errors import ConfigError, KVPoolError

if TYPE_CHECKING:
    from kvpool.v1 import master_pb2 as pb

PHASES = ("looking", "moving", "done", "stuck")
FOLLOW_S = 0.25
STUCK_S = 3.0  # so long without anybody who has room, and it is said and left to itself


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its id, as `kvpool status` shows it.")],
    rate: Annotated[str | None, typer.Option("--rate", metavar="BYTES", help="Move at most so much a second [no limit].")] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="End the drain: the worker takes part again.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="It is away for good: removals wait for it no longer.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Only start it; `kvpool status` shows how far it is.")] = False,
    master: MasterOption = None,
    token_file: TokenFileOption = None,
    deadline: DeadlineOption = "5s",
    json: JsonOption = False,
) -> None:
    """Empty a worker: what no other worker has is moved to those with room, hot chains first.

    It is not written to any more, and goes on serving reads. The wish is kept by the master: it survives restarts of master and
    worker, and Ctrl-C here. Exit status 0 when the worker is `drained` and may be stopped, 1 when nobody has room. A drained
    worker that was stopped takes part again when it is started.
    """
    from kvpool.v1 import master_pb2 as pb

    if cancel + forget + (rate is not None) > 1:
        raise ConfigError("say one of --rate, --cancel and --forget")
    rate_bytes = 0 if rate is None else parse_size(rate, option="--rate")
    request = pb.DrainRequest(worker_id=worker, rate_bytes=rate_bytes, cancel=cancel, forget=forget)
    with master_at(master, token_file=token_file, deadline=deadline) as asked:
        facts = facts_of(asked.call("Drain", request).worker)
        if forget:
            facts["state"] = "forgotten"
        elif not cancel and not no_wait:
            facts = _follow(asked, worker, quiet=json)
    if json:
        print_json(facts)
    elif forget or cancel or no_wait:
        print(f"{worker}: {facts['state']}")
    else:
        print(f"{worker}: {words_of(facts)}")
    if facts["drain"] is not None and facts["drain"]["phase"] == "stuck":
        raise typer.Exit(EXIT_FAILED)


def facts_of(status: pb.WorkerStatus) -> dict[str, Any]:
    """One worker's state and drain, as JSON."""
    state = status.info.state
    return {
        "id": status.info.worker_id,
        "state": WORKER_STATES[state] if state < len(WORKER_STATES) else "unknown",
        "drain": drain_json(status),
    }


def drain_json(status: pb.WorkerStatus) -> dict[str, Any] | None:
    """Of a worker that is draining or drained, else None."""
    if not status.HasField("drain"):
        return None
    told = status.drain
    return {
        "phase": PHASES[told.phase] if told.phase < len(PHASES) else "unknown",
        "leaving": told.leaving,
        "blocks_left": told.blocks_left,
        "bytes_left": told.bytes_left,
        "blocks_moved": told.blocks_moved,
        "bytes_moved": told.bytes_moved,
        "rate_bytes": told.rate_bytes,
        "eta_ms": told.eta_ms,
        "reason": told.reason,
    }


def words_of(facts: dict[str, Any]) -> str:
    """State and progress in one line."""
    told = facts["drain"]
    if told is None:
        return str(facts["state"])
    words = f"{facts['state']}, {told['blocks_moved']} blocks ({format_bytes(told['bytes_moved'])}) moved"
    if told["blocks_left"]:
        words += f", {told['blocks_left']} ({format_bytes(told['bytes_left'])}) left"
    if told["eta_ms"]:
        words += f", {told['eta_ms'] / 1000:.1f} s to go"
    return words + (f": {told['reason']}" if told["reason"] else "")


def _follow(asked: Any, worker: str, *, quiet: bool) -> dict[str, Any]:
    """Until it is drained, stuck for STUCK_S, or no longer wanted. Says how far it is."""
    from kvpool.v1 import master_pb2 as pb

    stuck_since: float | None = None
    said = ""
    while True:
        found = [s for s in asked.call("Describe", pb.DescribeRequest()).workers if s.info.worker_id == worker]
        if not found:
            raise KVPoolError(f"worker {worker} has left before it was drained")
        facts = facts_of(found[0])
        told = facts["drain"]
        if facts["state"] == "drained" or told is None:
            return facts
        if facts["state"] == "down":
            raise KVPoolError(f"worker {worker} is down; it goes on when it is back")
        stuck_since = (stuck_since or time.monotonic()) if told["phase"] == "stuck" else None
        if stuck_since is not None and time.monotonic() - stuck_since >= STUCK_S:
            return facts
        words = words_of(facts)
        if not quiet and words != said:
            print(f"kvpool: {worker}: {words}", file=sys.stderr)
            said = words
        time.sleep(FOLLOW_S)
