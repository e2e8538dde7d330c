"""`kvpool replay`: a trace through real processes, its figures against a small model, and that wrong bytes are found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.cli.drive import drive
from kvpool.sim.traces import Request, load_mooncake, multi_turn
from tests.support.cluster import Cluster
from tests.support.html import Page, number
from tests.support.leaks import children_of
from tests.support.processes import Role, cli_env, run_cli
from tests.support.waiting import wait_until

SHARED = Path(os.environ.get("KVPOOL_SHARED", Path(__file__).resolve().parents[3] / "shared"))
JSON_KEYS = {
    "requests", "blocks", "hit_blocks", "hit_rate", "hits_by_tier", "miss_causes", "stored_blocks", "ssd_blocks_written",
    "corrupt_blocks", "errors", "bytes_put", "bytes_get", "seconds", "get_ms", "put_ms",
}  # fmt: skip
BLOCK = 16 << 10


def write_trace(path: Path, requests: Sequence[Request]) -> Path:
    rows = (
        {"timestamp": r.timestamp_ms, "input_length": r.input_length, "output_length": r.output_length, "hash_ids": list(r.ids)}
        for r in requests
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def replay(trace: Path, *args: str, timeout_s: float = 110, **settings: Any) -> dict[str, Any]:
    done = run_cli("replay", trace, "--json", *args, timeout_s=timeout_s, **settings)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert set(facts) == JSON_KEYS and facts["corrupt_blocks"] == 0 and facts["errors"] == 0
    assert sum(facts["hits_by_tier"].values()) == facts["hit_blocks"]
    return dict(facts)


def lru_hits(requests: Sequence[Request], capacity: int) -> int:
    """Blocks of cached prefixes with LRU of `capacity` blocks, each chain touched and inserted tail first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in request.ids:
            if block not in cache:
                break
            hits += 1
        for block in reversed(request.ids):
            if block not in cache and len(cache) >= capacity:
                cache.popitem(last=False)
            cache[block] = None
            cache.move_to_end(block)
    return hits


def workload(n_conversations: int = 8, n_turns: int = 6) -> list[Request]:
    return multi_turn(seed=3, n_conversations=n_conversations, n_turns=n_turns, system_blocks=4, turn_blocks=(1, 5))


@pytest.mark.parametrize("policy", ["hazard", "lru", "s3fifo", "lru2"])
def test_the_simulated_and_the_real_engine_come_to_the_same_hit_rate(tmp_path: Path, policy: str) -> None:
    requests = multi_turn(seed=5, n_conversations=40, n_turns=6, system_blocks=4, turn_blocks=(1, 9))
    capacity = len({block for request in requests for block in request.ids}) // 3
    trace = write_trace(tmp_path / "t.jsonl", requests)
    sizes = ("--block-bytes", "16KiB", "--dram", str(capacity * BLOCK), "--policy", policy)
    real = replay(trace, "--clients", "1", *sizes)["hit_rate"]
    sim = json.loads(run_cli("replay", trace, "--engine", "sim", "--json", *sizes).stdout)["hit_rate"]
    assert real == pytest.approx(sim, abs=0.01)
    assert 0.05 < sim < 0.95 * lru_hits(requests, 10**9) / sum(len(r.ids) for r in requests), "the size matters here"


def test_a_pool_that_holds_all_hits_all_that_was_seen(tmp_path: Path) -> None:
    requests = workload()
    trace = write_trace(tmp_path / "t.jsonl", requests)
    facts = replay(trace, "--workers", "2", "--clients", "2", "--block-bytes", "16KiB", "--dram", "64MiB")
    distinct = len({block for request in requests for block in request.ids})
    assert facts["requests"] == len(requests) and facts["blocks"] == sum(len(r.ids) for r in requests)
    assert facts["hit_blocks"] == lru_hits(requests, 10**9)
    assert facts["stored_blocks"] == distinct and facts["ssd_blocks_written"] == 0
    assert facts["bytes_get"] == facts["hit_blocks"] * BLOCK and facts["bytes_put"] == distinct * BLOCK
    assert facts["hits_by_tier"] == {"device": 0, "dram": facts["hit_blocks"], "ssd": 0}
    assert set(facts["miss_causes"]) == {"never_stored"} or set(facts["miss_causes"]) <= {"never_stored", "unknown"}
    assert facts["get_ms"]["p99"] >= facts["get_ms"]["p50"] > 0


def test_a_small_dram_is_lru_with_chains_from_the_tail(tmp_path: Path) -> None:
    requests = workload(n_conversations=10)
    capacity = 60
    want = lru_hits(requests, capacity) / sum(len(r.ids) for r in requests)
    assert want < 0.9 * lru_hits(requests, 10**9) / sum(len(r.ids) for r in requests)  # the size matters here
    trace = write_trace(tmp_path / "t.jsonl", requests)
    size = ("--block-bytes", "16KiB", "--dram", str(capacity * BLOCK))
    facts = replay(trace, "--workers", "1", "--clients", "1", *size, "--policy", "lru")
    assert facts["hit_rate"] == pytest.approx(want, abs=0.03)
    assert facts["miss_causes"].get("evicted", 0) > 0


def test_small_dram_and_large_ssd_serve_from_both(tmp_path: Path) -> None:
    requests = workload(n_conversations=16)
    trace = write_trace(tmp_path / "t.jsonl", requests)
    facts = replay(trace, "--clients", "2", "--block-bytes", "64KiB", "--dram", "4MiB", "--ssd", "128MiB", "--workers", "2")
    assert facts["hits_by_tier"]["dram"] > 0 and facts["hits_by_tier"]["ssd"] > 0
    assert facts["ssd_blocks_written"] > 0
    assert facts["hit_blocks"] >= 0.95 * lru_hits(requests, 10**9)


class Liar:
    """A real client whose get flips one bit of what it delivers."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.close = client.close

    def namespace(self, *args: Any, **settings: Any) -> Any:
        space = self._client.namespace(*args, **settings)
        honest = space.get

        class Space:
            hashes, put = space.hashes, space.put

            def get(self, hashes: Any, out: np.ndarray) -> Any:
                got = honest(hashes, out)
                if got.n_blocks:
                    out[got.n_blocks - 1, -1] ^= 1
                return got

        return Space()


def test_one_wrong_bit_is_a_corrupt_block(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, n_workers=1, dram="16MiB").start()
    try:
        requests = [Request(0, 1, 1, (1, 2, 3)), Request(1, 1, 1, (1, 2, 3, 4))]
        honest = drive(requests, connect=cluster.connect, block_bytes=BLOCK, n_clients=1)
        assert (honest.n_corrupt, honest.n_hits, honest.failed) == (0, 3, False)
        lied = drive(requests[1:], connect=lambda: Liar(cluster.connect()), block_bytes=BLOCK, n_clients=1)  # type: ignore[arg-type, return-value]
        assert (lied.n_corrupt, lied.n_hits, lied.failed) == (1, 4, True)
    finally:
        cluster.stop()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{nope", "not JSON"),
        ('{"timestamp": 1, "input_length": 3, "output_length": 1}', 'field "hash_ids" is missing'),
        ('{"timestamp": 1, "input_length": -3, "output_length": 1, "hash_ids": []}', '"input_length" is negative'),
    ],
)
def test_a_malformed_line_is_named_before_anything_starts(tmp_path: Path, line: str, words: str) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [Request(0, 1, 1, (1,))])
    trace.write_text(trace.read_text() + line + "\n")
    done = run_cli("replay", trace, "--json", timeout_s=20)
    assert done.returncode == 1 and done.stderr.startswith(f"kvpool: error: {trace}, line 2: {words}")
    assert done.stderr.count("\n") == 1 and json.loads(done.stdout)["error"]["code"] == "invalid_argument"


@pytest.mark.parametrize(
    ("name", "words"), [("absent.jsonl", "No such file"), (".", "directory"), ("empty.jsonl", "no requests")]
)
def test_a_file_that_is_no_trace(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    done = run_cli("replay", tmp_path / name, "--json")
    assert json.loads(done.stdout)["error"]["code"] == "invalid_argument"
    assert done.returncode == 1 and name.strip(".") in done.stderr and words in done.stderr and "Traceback" not in done.stderr


def test_dram_larger_than_memory_is_refused_with_the_reason(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [Request(0, 1, 1, (1,))])
    done = run_cli("replay", trace, "--dram", "500TiB", env={"TMPDIR": str(tmp_path)})
    assert done.returncode in (1, 2) and "dram" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("kvpool-*"))


@pytest.mark.parametrize("speed", ["-1", "0.000999", "1e9", "nan"])
def test_a_speed_out_of_bounds_is_refused_before_anything_starts(tmp_path: Path, speed: str) -> None:
    done = run_cli("replay", tmp_path / "not even read", "--json", f"--speed={speed}", timeout_s=20)
    assert done.returncode == 2 and done.stderr.startswith("kvpool: error: --speed: ") and done.stderr.count("\n") == 1
    assert "at least 0.001 and below 1e9" in done.stderr and json.loads(done.stdout)["error"]["code"] == "config"


@pytest.mark.parametrize("speed", ["0.001", "999999999"])
def test_a_speed_at_its_bounds_is_taken(tmp_path: Path, speed: str) -> None:
    done = run_cli("replay", tmp_path / "absent.jsonl", "--speed", speed, timeout_s=20)
    assert done.returncode == 1 and "--speed" not in done.stderr and "No such file" in done.stderr


def test_ctrl_c_in_the_middle_ends_cleanly(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [Request(100_000.0 * i, 1, 1, (1, i + 2)) for i in range(50)])
    role = Role(["replay", str(trace), "--json", "--speed", "1"], log=tmp_path / "log", env={"TMPDIR": str(tmp_path)})
    try:
        wait_until(lambda: len(children_of(role.pid)) == 2, timeout_s=30, what="a master and a worker")
        pids = children_of(role.pid)
        wait_until(lambda: len(list(Path(f"/proc/{role.pid}/task").iterdir())) > 3, timeout_s=30, what="clients")
        told = [b"KVPOOL_WORKER__POLICY_CLOCK=" in Path(f"/proc/{pid}/environ").read_bytes() for pid in pids]
        assert sorted(told) == [False, True], "the trace's time is for the worker alone"
        role.signal(signal.SIGINT)
        assert role.process.wait(timeout=30) == 1
    finally:
        role.kill()
    assert "interrupted" in role.log_text() and "Traceback" not in role.log_text()
    assert not list(tmp_path.glob("kvpool-*")) and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def check_page(words: str, facts: dict[str, Any], *, engine: str) -> Page:
    """The page's numbers are those that the same run printed; it names no path. -> the page."""
    read, tiers = Page(words), facts["hits_by_tier"]
    assert read.facts["trace"] == "t.jsonl" and read.facts["engine"].startswith(engine) and "://" not in words
    assert number(read.facts["hit rate"].partition("(")[2]) == facts["hit_blocks"] > 0
    assert number(read.facts["stored"]) == facts["stored_blocks"] and read.facts["errors"] == str(facts["errors"])
    over = read.tables[1]
    sums = [sum(number(row[over[0].index(name)]) for row in over[1:]) for name in ("requests", "blocks", "DRAM", "SSD")]
    assert sums == [facts["requests"], facts["blocks"], tiers["dram"], tiers["ssd"]] and tiers["ssd"] > 0
    for cause, n in facts["miss_causes"].items():
        assert read.texts["text"][read.texts["text"].index(cause) + 1] == str(n)
    return read


def test_both_engines_write_their_report(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", workload(n_conversations=12, n_turns=5))
    size = ("--block-bytes", "64KiB", "--dram", "2MiB", "--ssd", "24MiB")
    facts = replay(trace, "--clients", "2", *size, "--report", str(tmp_path / "real.html"))
    words = (tmp_path / "real.html").read_text()
    read = check_page(words, facts, engine="real: 1 worker(s)")
    assert str(tmp_path) not in words and "of the optimum" not in read.facts and "get" in read.facts
    facts = simulated(trace, *size, "--report", str(tmp_path / "sim.html"))
    read = check_page((tmp_path / "sim.html").read_text(), facts, engine="sim")
    assert read.facts["of the optimum"].startswith(f"{100 * facts['of_optimum']:.2f} %")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["real.html", "sim.html", "t.jsonl"]


@pytest.mark.parametrize("engine", ["real", "sim"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path, engine: str) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("not even read")
    done = run_cli("replay", trace, "--engine", engine, "--json", "--report", tmp_path / "absent" / "out.html", timeout_s=20)
    assert done.returncode == 2 and "--report: " in done.stderr and "No such file" in done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "config" and "--report" in json.loads(done.stdout)["error"]["message"]


def test_a_report_that_fails_at_the_end_costs_the_page_alone(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", workload())
    (tmp_path / "out.html").write_text("before")
    command = [
        sys.executable,
        "-m",
        "kvpool.cli",
        "replay",
        str(trace),
        "--engine",
        "sim",
        "--json",
        "--report",
        str(tmp_path / "out.html"),
    ]
    small_files = ["bash", "-c", 'ulimit -f 8; exec "$@"', "-"]  # KiB: the page is larger, as on a disk that has just become full
    done = subprocess.run([*small_files, *command], capture_output=True, text=True, timeout=60, env=cli_env(None), check=False)
    assert done.returncode == 1 and done.stderr == f"kvpool: error: --report: {tmp_path / 'out.html'}: File too large\n"
    assert json.loads(done.stdout)["requests"] == 48
    assert (tmp_path / "out.html").read_text() == "before" and len(list(tmp_path.iterdir())) == 2


# --- real traces --------------------------------------------------------------------------------------------------------


def shared_trace(name: str, tmp_path: Path, *, limit: int | None = None) -> Path:
    """A handed-out trace in Mooncake's format; the test is skipped where there is none."""
    script = SHARED / "traces" / "to_mooncake.py"
    if not script.exists():
        pytest.skip(f"no traces at {SHARED}; set KVPOOL_SHARED")
    pytest.importorskip("zstandard")
    out = tmp_path / f"{name}.jsonl"
    subprocess.run([sys.executable, str(script), name, str(out)], check=True, timeout=100)
    if limit is not None:
        out.write_text("".join(out.read_text().splitlines(keepends=True)[:limit]))
    return out


def test_smoke_trace_with_room_for_all(tmp_path: Path) -> None:
    trace = shared_trace("smoke", tmp_path)
    facts = replay(trace, "--workers", "2", "--clients", "2", "--block-bytes", "16KiB", "--dram", "1GiB")
    assert facts["hit_rate"] == pytest.approx(0.899, abs=0.005)


def simulated(trace: Path, *args: str) -> dict[str, Any]:
    """`kvpool replay --engine sim`'s facts."""
    done = run_cli("replay", trace, "--json", "--engine", "sim", *args, timeout_s=100)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_smoke_trace_in_300_blocks(tmp_path: Path) -> None:
    trace = shared_trace("smoke", tmp_path)
    size = ("--block-bytes", "16KiB", "--dram", str(300 * BLOCK))
    facts = replay(trace, "--workers", "1", "--clients", "1", *size, "--policy", "lru")
    assert facts["hit_rate"] >= 0.82
    requests = load_mooncake(trace)
    assert facts["hit_rate"] == pytest.approx(lru_hits(requests, 300) / facts["blocks"], abs=0.01)
    assert simulated(trace, *size, "--policy", "lru")["hit_rate"] == pytest.approx(facts["hit_rate"], abs=0.01)


def test_the_learned_policy_in_the_simulator_reaches_the_optimum_on_the_smoke_trace(tmp_path: Path) -> None:
    trace = shared_trace("smoke", tmp_path)
    sim = simulated(trace, "--block-bytes", "16KiB", "--dram", str(300 * BLOCK), "--policy", "hazard")
    assert sim["of_optimum"] >= 0.99


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_both_engines_agree_where_two_tiers_are_too_small(tmp_path: Path, policy: str) -> None:
    trace = write_trace(tmp_path / "t.jsonl", workload(n_conversations=12, n_turns=5))
    args = ("--block-bytes", "64KiB", "--dram", "2MiB", "--ssd", "24MiB", "--policy", policy)
    real, sim = replay(trace, "--clients", "1", *args), simulated(trace, *args)
    assert real["hit_rate"] == pytest.approx(sim["hit_rate"], abs=0.01)
    assert real["hits_by_tier"]["ssd"] > 0 and sim["hits_by_tier"]["ssd"] > 0


def test_conversation_trace_from_both_tiers(tmp_path: Path) -> None:
    trace = shared_trace("conversation", tmp_path, limit=300)
    facts = replay(trace, "--workers", "2", "--clients", "2", "--block-bytes", "16KiB", "--dram", "32MiB", "--ssd", "2GiB")
    assert facts["hits_by_tier"]["dram"] > 0 and facts["hits_by_tier"]["ssd"] > 0


@pytest.mark.reports
@pytest.mark.timeout(600)
def test_conversation_trace_whole(tmp_path: Path) -> None:
    trace = shared_trace("conversation", tmp_path, limit=2000)
    facts = replay(
        trace, "--workers", "2", "--clients", "2", "--block-bytes", "64KiB", "--dram", "256MiB", "--ssd", "8GiB", timeout_s=580
    )
    assert facts["hits_by_tier"]["dram"] > 0 and facts["hits_by_tier"]["ssd"] > 0
