"""The page of `kvpool replay --report`: one HTML file that needs nothing else, of what a replay came to.

Owns what is on the page and that the file is written whole or not at all. The shapes are drawn in `report_svg`, the reuse
distances computed in `sim.reuse`. Numbers come from the run's own facts; text goes through `text`, and no path is on the page.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from kvpool import __version__
from kvpool.cli.common import format_bytes
from kvpool.cli.report_svg import STYLE, cause_bars, reuse_chart, time_chart, time_unit
from kvpool.core.types import PAGE_BYTES
from kvpool.errors import ConfigError
from kvpool.sim.reuse import Reuse
from kvpool.sim.traces import Served

TIME_BINS = 60
TIERS = {"device": "device", "dram": "DRAM", "ssd": "SSD"}  # as facts name them, as people read them
HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One replay. `trace`: the file, whose name alone is shown. Bytes are each worker's; `facts` as --json prints them."""

    trace: Path
    engine: str
    policy: str
    block_bytes: int
    n_workers: int
    dram_bytes: int
    ssd_bytes: int
    facts: Mapping[str, Any]
    rows: Sequence[Served]
    reuse: Reuse

    @property
    def dram_blocks(self) -> int:
        """Blocks that DRAM has room for, of all workers."""
        return self.n_workers * (self.dram_bytes // self.block_bytes)

    @property
    def ssd_blocks(self) -> int:
        """Blocks that SSD has room for, of all workers; on it they take whole pages."""
        return self.n_workers * (self.ssd_bytes // (-(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES))


@dataclass(slots=True)
class Bin:
    """The requests of a span of the trace's time. `start_ms`: since the first request."""

    start_ms: float
    n_requests: int = 0
    n_blocks: int = 0
    device: int = 0
    dram: int = 0
    ssd: int = 0

    @property
    def hits(self) -> int:
        return self.device + self.dram + self.ssd


def over_time(rows: Sequence[Served], *, n_bins_max: int = TIME_BINS) -> list[Bin]:
    """Rows, in any order, by time: as many equal spans from the first time stamp to the last; a single one without a span."""
    if not rows:
        return []
    first = min(row.timestamp_ms for row in rows)
    span = max(row.timestamp_ms for row in rows) - first
    n_bins = min(n_bins_max, len(rows)) if span > 0 else 1
    bins = [Bin(span * i / n_bins) for i in range(n_bins)]
    for row in rows:
        found = bins[min(n_bins - 1, int((row.timestamp_ms - first) / span * n_bins)) if span > 0 else 0]
        found.n_requests += 1
        found.n_blocks += row.n_blocks
        found.device += row.device
        found.dram += row.dram
        found.ssd += row.ssd
    return bins


def page(run: Run) -> str:
    """The whole page."""
    name = text(run.trace.name)
    return (
        f"{HEAD}<title>kvpool replay of {name}</title>\n<style>{STYLE}</style></head>\n<body><main>\n"
        f"<h1>kvpool replay of {name}</h1>\n"
        f"<section>\n<h2>Summary</h2>\n{_facts_table(_summary(run))}</section>\n"
        f"<section>\n<h2>Hit rate over time, by tier</h2>\n{_time_section(run)}</section>\n"
        f"<section>\n<h2>Reuse distances</h2>\n{_reuse_section(run)}</section>\n"
        f"<section>\n<h2>Miss causes</h2>\n{_causes_section(run)}</section>\n"
        f"<footer>kvpool {text(__version__)}</footer>\n</main></body></html>\n"
    )


def text(words: str) -> str:
    """Words as HTML; what cannot be printed (or is no Unicode, as in some file names) is shown as U+FFFD."""
    return escape("".join(char if char.isprintable() else "\ufffd" for char in words))


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "none"


def _summary(run: Run) -> list[tuple[str, str]]:
    facts, n_blocks = run.facts, run.facts["blocks"]
    rows = [
        ("trace", run.trace.name),
        ("requests", f"{facts['requests']:,}"),
        ("blocks asked for", f"{n_blocks:,} of {format_bytes(run.block_bytes)}, {run.reuse.n_blocks:,} distinct"),
        ("engine", {"real": f"real: {run.n_workers} worker(s)", "sim": "sim: the core alone, no bytes"}[run.engine]),
        ("policy", run.policy),
        ("DRAM", _room(run.n_workers * run.dram_bytes, run.dram_blocks)),
        ("SSD", _room(run.n_workers * run.ssd_bytes, run.ssd_blocks) if run.ssd_bytes else "none"),
        ("hit rate", f"{percent(facts['hit_blocks'], n_blocks)} ({facts['hit_blocks']:,} blocks)"),
    ]
    for tier, words in TIERS.items():
        n = facts["hits_by_tier"][tier]
        if n or tier == "dram" or (tier == "ssd" and run.ssd_bytes):
            rows.append((f"from {words}", f"{percent(n, n_blocks)} ({n:,} blocks)"))
    if "of_optimum" in facts:
        rows.append(("of the optimum", f"{100 * facts['of_optimum']:.2f} % of its hits in as many blocks"))
    rows += [
        ("stored", f"{facts['stored_blocks']:,} blocks"),
        ("written to SSD", f"{facts['ssd_blocks_written']:,} blocks"),
        ("errors", f"{facts['errors']:,}"),
        ("corrupt", f"{facts['corrupt_blocks']:,} blocks"),
        ("took", f"{facts['seconds']:.1f} s"),
    ]
    for name in ("get", "put"):
        if f"{name}_ms" in facts:
            p = facts[f"{name}_ms"]
            rows.append((name, f"p50 {p['p50']:.2f} ms, p99 {p['p99']:.2f} ms a request"))
    return rows


def _room(n_bytes: int, n_blocks: int) -> str:
    return f"{format_bytes(n_bytes)}, room for {n_blocks:,} blocks"


def _time_section(run: Run) -> str:
    bins = over_time(run.rows)
    shown = {tier: words for tier, words in TIERS.items() if tier == "dram" or run.facts["hits_by_tier"][tier]}
    unit, unit_ms = time_unit(bins[-1].start_ms)
    head = [f"from ({unit})", "requests", "blocks", *shown.values(), "hit rate"]
    hits = [{tier: getattr(b, tier) for tier in shown} for b in bins]
    cells = (
        [f"{b.start_ms / unit_ms:.2f}", f"{b.n_requests:,}", f"{b.n_blocks:,}", *(f"{n:,}" for n in by_tier.values()), share]
        for b, by_tier in zip(bins, hits, strict=True)
        for share in [percent(b.hits, b.n_blocks)]
    )
    chart = time_chart([(b.start_ms, b.n_blocks, by_tier) for b, by_tier in zip(bins, hits, strict=True)], shown)
    span = "one span of time" if len(bins) == 1 else f"{len(bins)} equal spans of time"
    return (
        f"<p>Blocks served of those asked for, in {span} since the trace's first request; "
        f"an empty span had no blocks. Below: blocks asked for.</p>\n{chart}{_details('The numbers', head, cells)}"
    )


def _reuse_section(run: Run) -> str:
    reuse, n_all = run.reuse, run.dram_blocks + run.ssd_blocks
    lines = {"DRAM": run.dram_blocks} | ({"DRAM + SSD": n_all} if run.ssd_blocks else {})
    if reuse.step == 1:
        how = "Exact: every block was followed."
    else:
        how = (
            f"Estimated from one block in {reuse.step} ({100 / reuse.step:.4g} %), chosen by a hash of its id "
            "(SHARDS, Waldspurger and others, FAST 2015), and from all uses of the most used ones."
        )
    once = f"{reuse.n_once:,} of {reuse.n_blocks:,} blocks ({percent(reuse.n_once, reuse.n_blocks)}) were used only once."
    would = "; ".join(f"one of {words}, {n:,} blocks, {percent(reuse.lru_hits(n), reuse.n_uses)}" for words, n in lines.items())
    bins = reuse.bins()
    edges = [0, *(reuse.step << k for k in range(len(bins)))]
    cells = ([f"{edges[k]:,}", f"{edges[k + 1]:,}", f"{n:,}", percent(n, reuse.n_uses)] for k, n in enumerate(bins))
    table = _details("The numbers", ["distance from", "to below", "uses", "of all uses"], cells)
    return (
        "<p>How many distinct blocks were used since the last use of the same block, when a request uses it again: what lies "
        f"left of a line an LRU of that capacity would hit. {how}</p>\n{reuse_chart(bins, reuse.step, lines)}"
        f"<p>{once} Of all uses an LRU would hit: {would}.</p>\n{table}"
    )


def _causes_section(run: Run) -> str:
    causes = run.facts["miss_causes"]
    if causes:
        words = f"{sum(causes.values()):,} requests were not served whole, by the cause of their first block that was not there."
        return f"<p>{words}</p>\n{cause_bars({text(cause): n for cause, n in causes.items()})}"
    return "<p>None: every request was served whole.</p>\n"


def _facts_table(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>\n' for name, value in rows)
    return f'<table class="facts">\n{body}</table>\n'


def _details(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<details><summary>{text(title)}</summary>\n<table>\n<tr>{top}</tr>\n{body}</table></details>\n"


# --- the file -----------------------------------------------------------------------------------------------------------


def check_target(path: Path, *, trace: Path) -> None:
    """ConfigError naming --report when the page could not be written there, as a file made beside it and removed tells."""
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            raise ConfigError(f"--report: {path}: not a regular file")
        if target.exists() and not os.access(target, os.W_OK):
            raise ConfigError(f"--report: {path}: Permission denied")
        if target.exists() and trace.exists() and target.samefile(trace):
            raise ConfigError(f"--report: {path} is the trace")
        _write(target, "", keep=None)
    except OSError as error:
        raise ConfigError(f"--report: {path}: {error.strerror or error}") from None


def write_page(path: Path, words: str) -> None:
    """The file `path`, whole or not at all: written beside it and moved there. OSError; then what was there is there still."""
    target = Path(os.path.realpath(path))
    _write(target, words, keep=target)


def _write(target: Path, words: str, *, keep: Path | None) -> None:
    """A file in `target`'s directory, moved to `keep` when it is whole; nothing of it stays without one, or after an error."""
    made = target.parent / f".kvpool-report-{secrets.token_hex(8)}.tmp"
    try:
        with made.open("x", encoding="utf-8") as file:
            file.write(words)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None:
            made.replace(keep)
    finally:
        with contextlib.suppress(OSError):
            made.unlink()
