"""The page of a replay: well nested HTML that needs nothing else, with the run's numbers and no path; its file, whole or not."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli import report
from kvpool.cli.drive import Tally, merge
from kvpool.cli.report import Run, check_target, over_time, page, write_page
from kvpool.cli.report_svg import binary, compact, time_unit
from kvpool.core.types import Tier
from kvpool.errors import ConfigError
from kvpool.sim.replay import CoreReplay
from kvpool.sim.reuse import reuse_distances
from kvpool.sim.traces import Request, Served, multi_turn
from tests.support.html import Page, number

BLOCK = 4096


def workload() -> list[Request]:
    return multi_turn(seed=11, n_conversations=12, n_turns=8, system_blocks=3, turn_blocks=(1, 5))


def run_of(requests: list[Request], **changed: Any) -> Run:
    """A run of the simulator's core with two tiers that are too small."""
    replaying = CoreReplay(policy="lru", block_bytes=BLOCK, dram_bytes=40 * BLOCK, ssd_bytes=60 * BLOCK)
    for request in requests:
        replaying.serve(request)
    outcome = replaying.outcome
    facts = {
        "requests": outcome.n_requests, "blocks": outcome.n_blocks, "hit_blocks": outcome.hits, "of_optimum": 0.9876,
        "hits_by_tier": {"device": 0, "dram": outcome.hits_dram, "ssd": outcome.hits_ssd}, "miss_causes": outcome.missed,
        "stored_blocks": outcome.stored, "ssd_blocks_written": outcome.ssd_written, "corrupt_blocks": 0, "errors": 0,
        "seconds": 1.25,
    }  # fmt: skip
    run = Run(
        trace=Path("/some/where/t.jsonl"), engine="sim", policy="lru", block_bytes=BLOCK, n_workers=1, dram_bytes=40 * BLOCK,
        ssd_bytes=60 * BLOCK, facts=facts, rows=outcome.rows, reuse=reuse_distances(request.ids for request in requests),
    )  # fmt: skip
    return dataclasses.replace(run, **changed)


def test_the_summary_has_the_runs_numbers() -> None:
    run = run_of(workload())
    facts, read = run.facts, Page(page(run)).facts
    assert read["trace"] == "t.jsonl" and read["policy"] == "lru" and read["engine"].startswith("sim")
    assert number(read["requests"]) == facts["requests"] and number(read["blocks asked for"]) == facts["blocks"]
    for name, n in (
        ("hit rate", facts["hit_blocks"]),
        ("from DRAM", facts["hits_by_tier"]["dram"]),
        ("from SSD", facts["hits_by_tier"]["ssd"]),
    ):
        share, _, blocks = read[name].partition("(")
        assert n > 0 and number(blocks) == n and share.strip() == f"{100 * n / facts['blocks']:.2f} %"
    assert "from device" not in read and read["of the optimum"].startswith("98.76 %")
    assert read["DRAM"] == "160 KiB, room for 40 blocks" and read["SSD"] == "240 KiB, room for 60 blocks"
    assert number(read["stored"]) == facts["stored_blocks"] and number(read["written to SSD"]) == facts["ssd_blocks_written"] > 0
    assert read["errors"] == "0" and read["corrupt"] == "0 blocks" and read["took"] == "1.2 s"
    failed = Page(page(run_of(workload(), facts={**facts, "errors": 3, "corrupt_blocks": 2}))).facts
    assert (failed["errors"], failed["corrupt"]) == ("3", "2 blocks")


def test_the_tables_add_up_to_the_run() -> None:
    run = run_of(workload())
    _, over, reuse = Page(page(run)).tables
    assert over[0] == ["from (s)", "requests", "blocks", "DRAM", "SSD", "hit rate"] and len(over) == 1 + report.TIME_BINS
    sums = [sum(number(row[i]) for row in over[1:]) for i in range(1, 5)]
    tiers = run.facts["hits_by_tier"]
    assert sums == [run.facts["requests"], run.facts["blocks"], tiers["dram"], tiers["ssd"]]
    assert sum(number(row[2]) for row in reuse[1:]) == run.reuse.n_reuses
    assert [number(row[0]) for row in reuse[1:]] == [0, *(1 << k for k in range(len(reuse) - 2))]


def test_bars_are_as_high_as_the_numbers() -> None:
    rows = [Served(0.0, 10, dram=5, ssd=2), Served(1000.0, 0), Served(10_000.0, 4, device=4)]
    facts = {**run_of(workload()).facts, "hits_by_tier": {"device": 4, "dram": 5, "ssd": 2}}
    read = Page(page(run_of(workload(), rows=rows, facts=facts)))
    bars = {
        kind: [float(a["height"] or 0) for t, a in read.tags if t == "rect" and a["class"] == kind][1:]
        for kind in ("dram", "ssd", "device")
    }
    assert bars == {"dram": [90.0], "ssd": [36.0], "device": [180.0]}  # of 180; the first of each is the legend's
    assert read.tables[1][0] == ["from (s)", "requests", "blocks", "device", "DRAM", "SSD", "hit rate"]
    assert read.tables[1][1:] == [
        ["0.00", "2", "10", "0", "5", "2", "70.00 %"],
        ["3.33", "0", "0", "0", "0", "0", "none"],
        ["6.67", "1", "4", "4", "0", "0", "100.00 %"],
    ]


def test_time_is_cut_into_equal_spans() -> None:
    rows = [Served(50.0 + i % 300, 2, dram=1) for i in range(900)]
    bins = over_time(rows)
    assert len(bins) == 60 and bins[0].start_ms == 0 and bins[1].start_ms == pytest.approx(299 / 60)
    assert sum(b.n_blocks for b in bins) == 1800 and all(b.hits == b.n_requests > 0 for b in bins)
    assert [b.n_requests for b in over_time([Served(7.0, 1)] * 5)] == [5] and over_time([]) == []


def test_capacities_are_marked_and_what_was_used_once_is_told() -> None:
    run = run_of(workload())
    read = Page(page(run))
    assert {"DRAM: 40", "DRAM + SSD: 100"} <= set(read.texts["text"])
    marks = [float(a["x1"] or 0) for tag, a in read.tags if tag == "line" and a["class"] == "mark"]
    edges = {
        a: float(b["x"] or 0) for (_, b), a in zip([t for t in read.tags if t[0] == "text"], read.texts["text"], strict=True)
    }
    assert edges["32"] < marks[0] < edges["64"] < marks[1] < edges["128"]
    words = " ".join(read.texts["p"])
    assert f"{run.reuse.n_once:,} of {run.reuse.n_blocks:,} blocks" in words and "Exact: every block was followed." in words
    for n in (40, 100):
        assert f"{n} blocks, {100 * run.reuse.lru_hits(n) / run.reuse.n_uses:.2f} %" in words
    sampled = reuse_distances((request.ids for request in workload()), ids_max=80)
    words = " ".join(Page(page(run_of(workload(), reuse=sampled))).texts["p"])
    assert sampled.step == 4 and "one block in 4 (25 %)" in words and "Exact" not in words


def test_miss_causes_are_counted() -> None:
    run = run_of(workload())
    read = Page(page(run))
    assert len(run.facts["miss_causes"]) > 1
    shown = read.texts["text"]
    for cause, n in run.facts["miss_causes"].items():
        assert shown[shown.index(cause) + 1] == f"{n:,}"
    assert f"{sum(run.facts['miss_causes'].values()):,} requests were not served whole" in " ".join(read.texts["p"])


def test_one_tier_has_one_tiers_rows() -> None:
    requests = workload()
    replaying = CoreReplay(policy="arc", block_bytes=4096, dram_bytes=40 * 4096)
    for request in requests:
        replaying.serve(request)
    outcome = replaying.outcome
    facts = {
        **run_of(requests).facts, "hit_blocks": outcome.hits, "hits_by_tier": {"device": 0, "dram": outcome.hits, "ssd": 0},
        "miss_causes": {}, "stored_blocks": outcome.stored,
    }  # fmt: skip
    read = Page(page(run_of(requests, policy="arc", rows=outcome.rows, facts=facts, ssd_bytes=0)))
    assert read.facts["policy"] == "arc" and read.facts["stored"] == f"{outcome.stored:,} blocks"
    assert read.facts["SSD"] == "none" and "from SSD" not in read.facts and "DRAM + SSD: 40" not in read.texts["text"]
    assert sum(number(row[3]) for row in read.tables[1][1:]) == outcome.hits
    whole = {**facts, "hit_blocks": facts["blocks"]}
    assert "None: every request was served whole." in Page(page(run_of(requests, facts=whole))).texts["p"]


def test_what_comes_from_outside_is_text() -> None:
    evil = '<script>alert("1")</script>&amp;\udcff\n.jsonl'
    facts = {**run_of(workload()).facts, "miss_causes": {"<b>&": 3}}
    words = page(run_of(workload(), trace=Path("/dir") / evil.replace("/", "\u2215"), policy="<i>", facts=facts))
    read = Page(words.encode().decode())
    shown = '<script>alert("1")<\u2215script>&amp;\ufffd\ufffd.jsonl'
    assert read.facts["trace"] == shown and read.facts["policy"] == "<i>" and f"kvpool replay of {shown}" in read.texts["title"]
    assert "<b>&" in read.texts["text"]


def test_no_path_nothing_from_elsewhere_and_both_colour_schemes() -> None:
    words = page(run_of(workload()))
    assert "/some" not in words and "://" not in words and "url(" not in words and "@import" not in words
    assert "prefers-color-scheme:dark" in words and "@media print" in words
    used = set(re.findall(r"var\(--(\w+)\)", words))
    for scheme in re.findall(r":root\{[^}]*?(--[^}]*)\}", words):
        assert used <= set(re.findall(r"--(\w+):", scheme))


@pytest.mark.parametrize(
    "requests", [[Request(5.0, 1, 1, ())], [Request(5.0, 1, 1, (1,))], [Request(5.0, 1, 1, (1, 2)), Request(5.0, 1, 1, (1, 2))]]
)
def test_the_smallest_traces_have_a_page(requests: list[Request]) -> None:
    run = run_of(requests)
    read = Page(page(run))
    assert number(read.facts["requests"]) == len(requests) and len(read.tables[1]) == 2


def test_the_real_engines_rows_add_up_over_clients() -> None:
    """Its own numbers are checked by the integration test; here, that a page has what its tally says."""
    a, b = Tally(n_requests=1, n_blocks=4), Tally(n_requests=1, n_blocks=3)
    a.hits.update({Tier.DRAM: 2, Tier.DEVICE: 1})
    a.rows.append(Served(0.0, 4, 1, 2, 0))
    b.rows.append(Served(9.0, 3))
    tally = merge([a, b])
    assert tally.rows == [*a.rows, *b.rows]
    run = run_of(workload(), engine="real", n_workers=3, facts=tally.to_json(block_bytes=BLOCK), rows=tally.rows)
    read = Page(page(run))
    assert read.facts["engine"] == "real: 3 worker(s)" and read.facts["from device"] == "14.29 % (1 blocks)"
    assert read.facts["DRAM"] == "480 KiB, room for 120 blocks" and "get" in read.facts and "of the optimum" not in read.facts


# --- the file -----------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    out.write_text("before")
    check_target(out, trace=tmp_path / "t")
    assert out.read_text() == "before" and names_in(tmp_path) == ["out.html"]
    write_page(out, "after \u00e9")
    assert out.read_bytes() == "after \u00e9".encode() and names_in(tmp_path) == ["out.html"]
    assert out.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    out.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_page(out, "half \udcff")
    assert out.read_text() == "before" and names_in(tmp_path) == ["out.html"]
    with pytest.raises(FileNotFoundError):
        write_page(tmp_path / "gone" / "out.html", "x")


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "out.html"
    link.symlink_to(tmp_path / "real" / "page.html")
    check_target(link, trace=tmp_path / "t")
    write_page(link, "x")
    assert link.is_symlink() and (tmp_path / "real" / "page.html").read_text() == "x"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("absent/out.html", "No such file"),
        ("t.jsonl/out.html", "Not a directory"),
        (".", "not a regular file"),
        ("n" * 300, "name too long"),
        ("t.jsonl", "is the trace"),
        ("/dev/null", "not a regular file"),
        ("/proc/out.html", ""),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_by_the_options_name(tmp_path: Path, path: str, words: str) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("a trace")
    with pytest.raises(ConfigError, match=f"^--report: .*{words}"):
        check_target(tmp_path / path, trace=trace)
    assert trace.read_text() == "a trace" and names_in(tmp_path) == ["t.jsonl"]


def test_numbers_for_axes() -> None:
    assert [compact(n) for n in (0, 999, 1234, 1_640_000, 3 * 10**9)] == ["0", "999", "1.23k", "1.64M", "3G"]
    assert [binary(1 << k) for k in (0, 9, 10, 16, 31)] == ["1", "512", "1Ki", "64Ki", "2Gi"]
    assert [time_unit(ms)[0] for ms in (0, 1999, 2000, 120_000, 7_200_000, 2 * 86_400_000)] == ["ms", "ms", "s", "min", "h", "d"]
