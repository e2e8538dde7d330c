"""Nothing is left after a stop or a kill of any role: no process, socket, memfd, lock or temporary file."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import kvpool
from tests.support.cluster import Cluster
from tests.support.keyed import Child
from tests.support.observe import listening
from tests.support.processes import READY_S, Role
from tests.support.rough_pool import RoughPool
from tests.support.waiting import wait_until

MakeCluster = Callable[..., Cluster]
BLOCK = 16_384
LAYOUT = kvpool.KVLayout.opaque(block_bytes=BLOCK, block_tokens=1)
KEPT = ("id", "master_id", "LOCK", "state.lock", "data.mdb", "lock.mdb", "slab-*.kv", "policy-tables")  # for a role's next start


def files_of(directory: Path) -> set[str]:
    """Files below, logs left out."""
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir() and p.suffix != ".log"}


def strange(directory: Path) -> list[str]:
    """Files that no role keeps: temporary ones, set aside ones."""
    return sorted(name for name in files_of(directory) if not any(Path(name).match(pattern) for pattern in KEPT))


def addresses(role: Role) -> set[str]:
    return set(listening(role))


def bound(names: set[str]) -> set[str]:
    """Which of these anybody listens on."""
    found = {f"{c.laddr.ip}:{c.laddr.port}" for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    found |= {words[7] for line in Path("/proc/net/unix").read_text().splitlines() if len(words := line.split()) == 8}
    return names & found


def locked_below(directory: Path) -> list[int]:
    """Pids of other processes that hold a file lock on a file below."""
    inodes = {(os.stat(p).st_dev, os.stat(p).st_ino) for p in directory.rglob("*") if p.is_file()}  # noqa: PTH116
    pids = []
    for line in Path("/proc/locks").read_text().splitlines():
        words = [word for word in line.split() if word != "->"]
        major, minor, inode = words[5].split(":")
        if (os.makedev(int(major, 16), int(minor, 16)), int(inode)) in inodes:
            pids.append(int(words[4]))
    return pids


def shared() -> set[str]:
    """What the machine's shared memory has of kvpool."""
    return {path.name for path in Path("/dev/shm").glob("*kvpool*")}


def fill(cluster: Cluster, n: int = 200) -> None:
    ns = cluster.connect().namespace("n", LAYOUT, create=True)
    for number in range(n):
        assert ns.put(ns.hash([number]), np.full((1, BLOCK), number % 251, np.uint8), deadline_ms=5000).n_there == 1


@pytest.mark.parametrize("role", ["master", "worker"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_role_that_ends_leaves_nothing_and_starts_again_at_once(make_cluster: MakeCluster, tmp_path: Path, role: str,
                                                                  number: int) -> None:  # fmt: skip
    before, temporary = shared(), tmp_path / "tmp"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary)}
    options = ("--drain-timeout", "1s", "--policy", "hazard")  # the policy that has a file
    cluster = make_cluster(dram="1MiB", ssd="8MiB", worker_args=options, env=env)
    fill(cluster)
    assert cluster.master is not None
    ended = cluster.master if role == "master" else cluster.worker()
    where = cluster.directory / ("master" if role == "master" else "worker-0")
    names, children = addresses(ended), psutil.Process(ended.pid).children(recursive=True)
    assert names and locked_below(where) and files_of(where), "the test sees nothing"
    ended.signal(number)
    assert ended.process.wait(15) == (0 if number != signal.SIGKILL else -signal.SIGKILL)
    wait_until(lambda: not bound(names), what=f"{names} free again")
    assert not locked_below(where)
    assert not [child for child in children if child.is_running()]
    assert strange(where) == [] and shared() <= before and not list(temporary.iterdir())
    ended.kill()  # (its pipes)
    if role == "master":
        cluster.start_master()
    else:
        cluster.start_worker(0)
    assert strange(where) == []


def test_what_a_killed_worker_left_of_the_learned_policy_is_cleared(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram="1MiB")
    where = cluster.worker_dir(0)
    cluster.worker().kill()
    (where / "policy-tables").write_bytes(b"damaged")
    (where / "policy-tables.damaged").write_bytes(b"damaged before")
    for policy in ("hazard", "lru"):
        (where / "policy-tables.new").write_bytes(b"half of it: killed while it saved")
        cluster.start_worker(0, extra=("--policy", policy))
        assert strange(where) == ["policy-tables.damaged"], "the latest of them, to be looked at"
        assert (where / "policy-tables.damaged").read_bytes() == b"damaged"
        cluster.worker().kill()


def test_more_signals_during_the_stop_are_no_kill(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(n_workers=2, dram="8MiB", ssd="16MiB")
    fill(cluster, 20)
    assert cluster.master is not None
    for role in (cluster.worker(0), cluster.worker(1), cluster.master):
        while role.process.poll() is None:
            role.signal(signal.SIGTERM)
        assert role.process.returncode == 0, role.log_text()[-2000:]


@contextlib.contextmanager
def up(directory: Path) -> Iterator[Role]:
    args = ["up", "--json", "--workers", "2", "--dram", "8MiB", "--port", "0", "--http-port", "0"]
    args += ["--data-dir", str(directory / "data"), "--ssd", f"{directory / 'ssd'}:8MiB"]
    role = Role(args, log=directory / "up.log")
    try:
        yield role.wait_ready(timeout_s=2 * READY_S)
    finally:
        role.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_roles_of_up_end_with_it(tmp_path: Path, number: int) -> None:
    with up(tmp_path) as role:
        children = psutil.Process(role.pid).children(recursive=True)
        assert len(children) >= 3
        role.signal(number)
        role.process.wait(20)
        wait_until(lambda: not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE], timeout_s=10)
    wait_until(lambda: not locked_below(tmp_path))  # (a process is a zombie before the last of its threads has ended)
    assert strange(tmp_path / "data") == [] and strange(tmp_path / "ssd") == []
    with up(tmp_path) as role:  # the same directories, at once
        role.signal(signal.SIGTERM)
        assert role.process.wait(20) == 0


@pytest.mark.parametrize("how", ["close", "error", "kill"])
def test_a_client_that_ends_leaves_nothing_here_or_at_the_worker(make_cluster: MakeCluster, tmp_path: Path, how: str) -> None:
    before = shared()
    cluster = make_cluster(dram="16MiB")
    worker = psutil.Process(cluster.worker().pid)
    client = cluster.connect(transport="shm")
    ns = client.namespace("n", LAYOUT, create=True, hash="external")
    from tests.support.keyed import put

    put(ns, 0, 100)
    fds, maps = worker.num_fds(), len(worker.memory_maps(grouped=False))
    arguments = {"master": cluster.master_address, "namespace": "n", "block_bytes": BLOCK, "how": how}
    with Child("leave", tmp_path / "child.log", **arguments) as child:
        assert child.hear() == "ready"
        assert worker.num_fds() > fds
        if how == "kill":
            child.kill()
        else:
            child.say("go")
            child.process.wait(20)
    wait_until(lambda: worker.num_fds() <= fds and len(worker.memory_maps(grouped=False)) <= maps, what="its ring is given back")
    assert shared() <= before


def test_a_standby_and_a_leader_on_redis_leave_nothing(tmp_path: Path) -> None:
    rough = RoughPool(tmp_path, n_workers=1)
    try:
        rough.start()
        names = {name for master in rough.masters for name in addresses(master)}
        rough.masters[0].kill()
        rough.masters[1].signal(signal.SIGTERM)
        assert rough.masters[1].process.wait(15) == 0
        rough.masters[1].kill()  # (its pipes)
        wait_until(lambda: not bound(names))
        for i in range(2):
            where = tmp_path / f"master-{i}"
            assert not where.exists() or (strange(where) == [] and not locked_below(where))
            rough.restart_master(i)
    finally:
        assert rough.stop() == []
