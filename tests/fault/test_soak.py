"""The soak as a test of `make reports`. There is no short one: memory needs minutes to settle, and to show that it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.soak import soak


@pytest.mark.reports
@pytest.mark.timeout(1800)
def test_memory_and_descriptors_stay_flat_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = soak(tmp_path, seconds=20 * 60, seed=1)
    assert flat, capsys.readouterr().out
