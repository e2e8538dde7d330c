"""`kvpool replay`: a trace through a real pool of its own, every byte of every hit checked."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli.common import EXIT_FAILED, JsonOption, format_bytes, os_words, parse_size, print_json, raise_on_stops
from kvpool.errors import ConfigError, InvalidArgument, KVPoolError

if TYPE_CHECKING:
    from kvpool.cli.drive import Tally
    from kvpool.cli.pool import Pool
    from kvpool.sim.traces import Served

POLICIES = ("hazard", "lru", "arc", "lru2", "s3fifo")
ENGINES = ("real", "sim")
N_CLIENTS = 2
DRAIN_TIMEOUT_MS = 2_000  # nobody else is served by this pool

DataDir = Annotated[Path | None, typer.Option("--data-dir", metavar="D", help="Keep the pool here [a directory removed after].")]


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Requests in Mooncake's JSONL format, plain or zstd.")],
    block_bytes: Annotated[str, typer.Option("--block-bytes", metavar="SIZE", help="Bytes of a block.")] = "64KiB",
    dram: Annotated[str, typer.Option("--dram", metavar="SIZE", help="DRAM of all workers together.")] = "1GiB",
    ssd: Annotated[str | None, typer.Option("--ssd", metavar="SIZE", help="SSD of all workers together [none].")] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Worker processes.")] = 1,
    clients: Annotated[int | None, typer.Option("--clients", min=1, max=256, help="Requests under way at once [2].")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first requests.")] = None,
    speed: Annotated[float | None, typer.Option("--speed", help="Keep the time stamps, this many times faster.")] = None,
    policy: Annotated[str, typer.Option("--policy", metavar="P", help="hazard (learned), lru, arc, lru2 or s3fifo.")] = "hazard",
    engine: Annotated[str, typer.Option("--engine", metavar="E", help="real: processes; sim: the core alone.")] = "real",
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Also write an HTML page of it.")] = None,
    data_dir: DataDir = None,
    json: JsonOption = False,
) -> None:
    """Replay a trace through a pool started for it and stopped after it; with `--engine sim` through the core of one worker, in
    this process, by the trace's time stamps.

    Contents are derived from the block ids and every byte of every hit is checked. A request waits for earlier ones in flight
    that share its first id. A miss cause is counted once a request, for its first block that was not served. Exit status 1 when
    a block was corrupt or a call failed.
    """
    from kvpool.cli.drive import drive, layout_of
    from kvpool.cli.pool import PoolPlan
    from kvpool.sim.traces import load_mooncake
    from kvpool.worker.learned import ClockFile

    if speed is not None and not 1e-3 <= speed < 1e9:
        raise ConfigError(f"--speed: {speed} must be at least 0.001 and below 1e9")
    if engine not in ENGINES:
        raise ConfigError(f"--engine: {engine!r} is not one of {', '.join(ENGINES)}")
    if policy not in POLICIES:
        raise ConfigError(f"--policy: {policy!r} is not one of {', '.join(POLICIES)}")
    n_bytes = parse_size(block_bytes, option="--block-bytes")
    layout_of(n_bytes)
    dram_bytes = _share(parse_size(dram, option="--dram"), workers, n_bytes, option="--dram")
    ssd_bytes = 0 if ssd is None else _share(parse_size(ssd, option="--ssd"), workers, n_bytes, option="--ssd")
    if engine == "sim" and workers != 1:
        raise ConfigError(f"--workers: --engine sim has one, not {workers}")
    for option, given in (("--speed", speed), ("--clients", clients), ("--data-dir", data_dir)):
        if engine == "sim" and given is not None:
            raise ConfigError(f"{option}: not with --engine sim, which has no processes and waits for nothing")
    if report is not None:
        from kvpool.cli.report import check_target

        check_target(report, trace=trace)
    try:
        requests = load_mooncake(trace, limit=limit)
    except OSError as error:
        raise InvalidArgument(os_words(error)) from None
    raise_on_stops()

    def write_report(facts: dict[str, Any], rows: Sequence[Served]) -> None:
        """The page, where one is asked for. Exit status 1 when it cannot be written after all; the facts are printed by then."""
        if report is None:
            return
        from kvpool.cli.report import Run, page, write_page
        from kvpool.sim.reuse import reuse_distances

        run = Run(
            trace=trace, engine=engine, policy=policy, block_bytes=n_bytes, n_workers=workers, dram_bytes=dram_bytes,
            ssd_bytes=ssd_bytes, facts=facts, rows=rows, reuse=reuse_distances(request.ids for request in requests),
        )  # fmt: skip
        try:
            write_page(report, page(run))
        except OSError as error:
            print(f"kvpool: error: --report: {report}: {error.strerror or error}", file=sys.stderr)
            raise typer.Exit(EXIT_FAILED) from None

    if engine == "sim":
        from kvpool.cli.replay_sim import replay_sim

        sizes = {"block_bytes": n_bytes, "dram_bytes": dram_bytes, "ssd_bytes": ssd_bytes}
        write_report(*replay_sim(requests, policy=policy, **sizes, as_json=json))
        return
    with directory(data_dir) as home:
        plan = PoolPlan(
            n_workers=workers,
            dram_bytes=dram_bytes,
            data_dir=home,
            ssd_dir=home / "ssd" if ssd_bytes else None,
            ssd_bytes=ssd_bytes,
            drain_timeout_ms=DRAIN_TIMEOUT_MS,
            policy=policy,
            policy_clock=home / "clock",
        )
        clock = ClockFile(home / "clock")
        with running(plan) as pool, progress(len(requests), words="replaying") as on_done:
            tally = drive(
                requests,
                connect=lambda: connect(pool),
                block_bytes=n_bytes,
                n_clients=clients or N_CLIENTS,
                speed=speed,
                on_time=clock.set,
                on_done=on_done,
                memory_bytes=available_memory(),
            )
            tally.ssd_blocks_written = ssd_blocks_written(pool)
    for words in tally.error_words:
        print(f"kvpool: {words}", file=sys.stderr)
    facts = tally.to_json(block_bytes=n_bytes)
    if json:
        print_json(facts)
    else:
        say(facts, tally)
    write_report(facts, tally.rows)
    if tally.failed:
        raise typer.Exit(EXIT_FAILED)


def _share(total_bytes: int, n_workers: int, block_bytes: int, *, option: str) -> int:
    """Each worker's bytes; ConfigError when that is not even one block."""
    share = total_bytes // n_workers
    if share < block_bytes:
        raise ConfigError(
            f"{option}: {total_bytes} bytes for {n_workers} workers is less than a block ({block_bytes} bytes) each"
        )
    return share


@contextmanager
def directory(kept: Path | None) -> Iterator[Path]:
    """`kept`, made where it does not exist; without one a temporary directory that is removed at the end."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.absolute()
        return
    made = Path(tempfile.mkdtemp(prefix="kvpool-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def running(plan: Any) -> Iterator[Pool]:
    """A pool that has just served a put and a get; its roles' logs lie in the plan's directory, and are shown on failure."""
    from kvpool.cli.pool import Pool, probe

    with Pool(plan, logs=plan.data_dir) as pool:
        pool.start()
        probe(pool.address, n_workers=plan.n_workers)
        yield pool
        for role in pool.roles:
            if (status := role.exit_status()) is not None:
                from kvpool.cli.pool import words_of

                raise KVPoolError(f"{role.name} {words_of(status)} during the run: {role.log_tail()}")


def connect(pool: Pool) -> Any:
    """A client of this pool."""
    import kvpool

    return kvpool.connect(pool.address)


@contextmanager
def progress(n_requests: int, *, words: str) -> Iterator[Callable[[Tally], None]]:
    """A progress bar on a terminal, nothing elsewhere; what is yielded counts one request, from any thread."""
    if not sys.stderr.isatty():
        yield lambda _tally: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(words), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(words, total=n_requests)
        yield lambda _tally: bar.advance(task)


def ssd_blocks_written(pool: Pool) -> int:
    """Blocks that the workers wrote to SSD, from their metrics; 0 for one that cannot be asked."""
    import urllib.request

    total = 0.0
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for worker in pool.workers:
        url = str(worker.ready["http"])
        url = url if url.startswith("http") else f"http://{url}"
        with contextlib.suppress(OSError), opener.open(f"{url}/metrics", timeout=5) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("kvpool_tier_events_total") and 'tier="ssd"' in line and 'event="blocks_written"' in line:
                    total += float(line.rpartition(" ")[2])
    return int(total)


def available_memory() -> int | None:
    """MemAvailable in bytes; None where /proc does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def say(facts: dict[str, Any], tally: Tally) -> None:
    """The result for people."""
    tiers = ", ".join(f"{name} {n}" for name, n in facts["hits_by_tier"].items() if n) or "none"
    causes = ", ".join(f"{name} {n}" for name, n in facts["miss_causes"].items()) or "none"
    transports = ", ".join(sorted(tally.transports)) or "none"
    print(f"requests       {facts['requests']} with {facts['blocks']} blocks in {facts['seconds']:.1f} s")
    print(f"hit rate       {facts['hit_rate']:.4f} ({facts['hit_blocks']} blocks; by tier: {tiers}; over {transports})")
    print(f"miss causes    {causes} (of the first missing block of a request)")
    stored = f"{facts['stored_blocks']} blocks, {format_bytes(facts['bytes_put'])}"
    print(f"stored         {stored}; {facts['ssd_blocks_written']} written to SSD")
    for name in ("get", "put"):
        p = facts[f"{name}_ms"]
        print(f"{name}            p50 {p['p50']:.2f} ms, p99 {p['p99']:.2f} ms")
    print(f"corrupt        {facts['corrupt_blocks']} blocks; {facts['errors']} errors")
