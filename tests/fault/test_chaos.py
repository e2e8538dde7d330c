"""Chaos as a test: some seconds of it here, minutes of it in `make reports` and `make chaos`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import cli_env
from tests.support.scale import FULL

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("masters", "minutes", "seed"),
    [
        (2, 0.3, 5),
        pytest.param(2, 5.0, None, marks=[pytest.mark.reports, pytest.mark.timeout(900)]),
        pytest.param(1, 5.0, None, marks=[pytest.mark.reports, pytest.mark.timeout(900)]),
    ],
)
def test_chaos_ends_with_nothing_wrong_and_nothing_hanging(masters: int, minutes: float, seed: int | None) -> None:
    command = [sys.executable, "-m", "tests.fault.chaos", "--masters", str(masters), "--minutes", str(minutes), "--json"]
    command += [] if seed is None else ["--seed", str(seed)]
    timeout_s = minutes * 60 + 90
    done = subprocess.run(command, cwd=ROOT, env=cli_env(), capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert not (told["wrong"] or told["hung"] or told["errors"] or told["problems"])
    assert told["hits"] > 300 and len(told["faults"]) >= (8 if FULL else 2), "little was done: it shows nothing"
