"""What the learned policy keeps over a restart of its worker, and what the worker says of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.core.policy.classes import first_key
from kvpool.core.policy.hazard import Hazard
from kvpool.errors import ConfigError
from kvpool.worker.learned import FILE_NAME, ClockFile, Learned
from tests.support.cluster import Cluster
from tests.support.keyed import keyspace, put, read
from tests.support.observe import metrics
from tests.support.s0 import UNIT

MakeCluster = Callable[..., Cluster]


def taught(directory: Path) -> Learned:
    learned = Learned(directory)
    key = first_key(2, 0, 1, 1)
    learned.policy.table.reached[key] = 500.0
    learned.policy.table.used[key] = 400.0
    learned.policy.table.refresh()
    learned.save(threading.Lock())
    return learned


def test_what_was_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    before, after = taught(tmp_path), Learned(tmp_path)
    key = first_key(2, 0, 1, 1)
    assert after.policy.table.index[key] == pytest.approx(before.policy.table.index[key], rel=0.1)
    assert after.policy.table.index[key] > 1.2 * Learned(tmp_path / "elsewhere").policy.table.index[key]
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_replay_gives_the_policy_the_time_of_its_trace(tmp_path: Path) -> None:
    clock = ClockFile(tmp_path / "clock")
    policy: Hazard = Learned(tmp_path, clock=str(tmp_path / "clock")).policy
    clock.set(90_000.5)
    policy.at(5.0)
    assert policy.now_s == 90.0, "not the worker's own time"
    clock.set(60_000)
    policy.at(6.0)
    assert policy.now_s == 90.0, "and it never goes back"
    (tmp_path / "notes").write_text("precious words")
    for wrong in ("nowhere/clock", "notes", "."):
        with pytest.raises(ConfigError, match=r"policy_clock: .*" + wrong):
            Learned(tmp_path, clock=str(tmp_path / wrong) if wrong != "." else str(tmp_path))
    assert (tmp_path / "notes").read_text() == "precious words"


def test_a_worker_says_what_its_policy_hit_and_lru_would_have(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram=str(64 * UNIT))
    ns = keyspace(cluster.connect(), "n", UNIT)
    for key in "abcd":
        put(ns, key, UNIT)
    for _ in range(3):
        assert read(ns, "a") == read(ns, "b") == 1
    found = metrics(cluster.worker())
    assert found['kvpool_policy_hits_total{policy="hazard"}'] == found['kvpool_policy_hits_total{policy="lru"}'] == 6
    assert found['kvpool_policy_mode{mode="learned"}'] == 1 and found['kvpool_policy_mode{mode="recent"}'] == 0


def test_nothing_new_is_not_written_again(tmp_path: Path) -> None:
    learned = taught(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    learned.save(threading.Lock())
    assert not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("damage", [lambda saved: saved[:100], lambda saved: saved[:-1] + b"\x7f", lambda _: b""])
def test_a_damaged_file_is_set_aside(tmp_path: Path, damage: object) -> None:
    taught(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    fresh = Learned(tmp_path)
    assert not path.exists() and path.with_suffix(".damaged").exists()
    assert list(fresh.policy.table.index) == list(Learned(tmp_path / "elsewhere").policy.table.index)
    taught(tmp_path)
    assert path.exists()
    path.write_bytes(b"later")
    Learned(tmp_path)
    assert path.with_suffix(".damaged").read_bytes() == b"later", "of all damaged ones the latest"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_refuses_does_not_matter(tmp_path: Path) -> None:
    learned = taught(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).with_suffix(".new").mkdir()
    learned.policy.table.refresh()
    learned.save(threading.Lock())
    assert not (tmp_path / FILE_NAME).exists()
