"""`kvpool demo`: the main job on one screen. A pool of two workers, a multi-turn workload, every byte checked."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli.common import JsonOption, format_bytes, print_json, raise_on_stops

if TYPE_CHECKING:
    from kvpool.cli.drive import Tally

N_WORKERS = 2
N_CLIENTS = 2
BLOCK_BYTES = 256 << 10
DRAM_BYTES = 32 << 20  # of each worker; both together hold a third of what the workload makes, so that both tiers serve
SSD_BYTES = 256 << 20  # of each worker: all of it fits
N_CONVERSATIONS = 16
N_TURNS = 10
SYSTEM_BLOCKS = 8
TURN_BLOCKS = (2, 6)


def demo(
    seed: Annotated[int, typer.Option("--seed", help="Another workload.")] = 1,
    json: JsonOption = False,
) -> None:
    """Start a pool, replay a multi-turn workload, check every byte, show hit rates and speeds, stop.

    Takes some seconds, 0.5 GiB of temporary files and less of memory. Exit status 1 when a byte was wrong or a call failed.
    """
    from kvpool.cli.drive import drive
    from kvpool.cli.pool import PoolPlan
    from kvpool.cli.replay import DRAIN_TIMEOUT_MS, connect, directory, progress, running, ssd_blocks_written
    from kvpool.sim.traces import multi_turn

    start_s = time.monotonic()
    requests = multi_turn(
        seed=seed, n_conversations=N_CONVERSATIONS, n_turns=N_TURNS, system_blocks=SYSTEM_BLOCKS, turn_blocks=TURN_BLOCKS
    )
    raise_on_stops()
    with directory(None) as home:
        plan = PoolPlan(
            n_workers=N_WORKERS,
            dram_bytes=DRAM_BYTES,
            data_dir=home,
            ssd_dir=home / "ssd",
            ssd_bytes=SSD_BYTES,
            drain_timeout_ms=DRAIN_TIMEOUT_MS,
        )
        print(f"kvpool: starting a master and {N_WORKERS} workers", file=sys.stderr)
        with running(plan) as pool, progress(len(requests), words="serving") as on_done:
            tally = drive(requests, connect=lambda: connect(pool), block_bytes=BLOCK_BYTES, n_clients=N_CLIENTS, on_done=on_done)
            tally.ssd_blocks_written = ssd_blocks_written(pool)
    facts = tally.to_json(block_bytes=BLOCK_BYTES)
    facts |= {"get_gb_per_s": speed(facts["bytes_get"], tally.get_ms), "put_gb_per_s": speed(facts["bytes_put"], tally.put_ms)}
    facts["total_seconds"] = round(time.monotonic() - start_s, 3)
    for words in tally.error_words:
        print(f"kvpool: {words}", file=sys.stderr)
    if json:
        print_json(facts)
    else:
        show(facts, tally)
    if tally.failed:
        raise typer.Exit(1)


def speed(n_bytes: int, calls_ms: list[float]) -> float:
    """GB/s of one client while it is in these calls."""
    spent_s = sum(calls_ms) / 1000
    return round(n_bytes / spent_s / 1e9, 3) if spent_s else 0.0


def show(facts: dict[str, Any], tally: Tally) -> None:
    """One screen."""
    from rich.console import Console
    from rich.table import Table

    unique = facts["stored_blocks"]
    grid = Table(title="kvpool demo", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    grid.add_column(style="bold")
    grid.add_column()
    dram, ssd = (format_bytes(N_WORKERS * n) for n in (DRAM_BYTES, SSD_BYTES))
    grid.add_row("pool", f"{N_WORKERS} workers, {dram} DRAM and {ssd} SSD together, blocks of {format_bytes(BLOCK_BYTES)}")
    grid.add_row("workload", f"{N_CONVERSATIONS} conversations of {N_TURNS} turns on one system prompt, {N_CLIENTS} clients")
    grid.add_row(
        "requests",
        f"{facts['requests']} with {facts['blocks']} blocks; {unique} blocks stored ({format_bytes(facts['bytes_put'])})",
    )
    grid.add_row("hit rate", f"[green]{facts['hit_rate']:.1%}[/] ({facts['hit_blocks']} of {facts['blocks']} blocks)")
    hits = max(1, facts["hit_blocks"])
    for tier, n in facts["hits_by_tier"].items():
        if n:
            grid.add_row(f"  from {tier}", f"{n / hits:6.1%}  {'█' * round(40 * n / hits)} {n}")
    for verb in ("get", "put"):
        p = facts[f"{verb}_ms"]
        grid.add_row(
            verb, f"{facts[f'{verb}_gb_per_s']:.2f} GB/s a client; p50 {p['p50']:.1f} ms, p99 {p['p99']:.1f} ms a request"
        )
    grid.add_row("transport", ", ".join(sorted(tally.transports)) or "none")
    grid.add_row("written to SSD", f"{facts['ssd_blocks_written']} blocks")
    colour = "red" if tally.failed else "green"
    compared = format_bytes(facts["bytes_get"])
    checked = f"{facts['corrupt_blocks']} corrupt blocks, {facts['errors']} errors; {compared} compared byte by byte"
    grid.add_row("checked", f"[{colour}]{checked}[/]")
    grid.add_row("time", f"{facts['seconds']:.1f} s of serving, {facts['total_seconds']:.1f} s in all")
    Console().print(grid)
