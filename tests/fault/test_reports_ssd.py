"""What other pools were reported to get wrong with SSD tiers and hostile input, asserted right here, against real processes. Test
names carry the report's id; sizes as in `test_reports_failures`.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import socket
import threading
import time
import unicodedata
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import lmdb
import pytest

import kvpool
from kvpool.core.types import MissCause, Outcome, RemoveOutcome
from kvpool.errors import ConfigError, InvalidArgument, KVPoolError
from tests.support.cluster import Cluster
from tests.support.confine import control_group, forget_modules, in_group, throttle
from tests.support.keyed import SLACK_S, THERE, Child, hash_of, have, keyspace, put, read
from tests.support.loop_disk import NoLoopDisk, loop_disk
from tests.support.observe import http_get, listening, metrics
from tests.support.payload import check, payload
from tests.support.processes import Role, run_cli
from tests.support.s0 import CALL_S, MIB, NO_SCRUB, STORED_OR_NOT, UNIT, event, push_out, running, s0, tier_event, used
from tests.support.scale import FULL, scaled
from tests.support.waiting import wait_until
from tests.support.worker_node import WorkerNode

pytestmark = [pytest.mark.reports, pytest.mark.timeout(1500)] if FULL else [pytest.mark.timeout(120)]

MakeCluster = Callable[..., Cluster]

# --- the SSD tier ---------------------------------------------------------------------------------------------------------


def _truncate(to: Callable[[int], int]) -> Callable[[Path, Path], None]:
    return lambda path, other: os.truncate(path, to(path.stat().st_size))


def _append(path: Path, other: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def _directory(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def _symlink(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hosts")


def _other_key(path: Path, other: Path) -> None:
    fresh = path.with_name("fresh")
    shutil.copy(other, fresh)
    fresh.replace(path)


DAMAGE: dict[str, tuple[Callable[[Path, Path], None], bool]] = {  # what is done to one file; whether all in it is lost
    "to 0": (_truncate(lambda size: 0), True),
    "to half": (_truncate(lambda size: size // 2), False),
    "by 1 byte": (_truncate(lambda size: size - 1), False),
    "append": (_append, False),
    "delete": (lambda path, other: path.unlink(), True),
    "directory": (_directory, True),
    "symlink": (_symlink, True),
    "another key's file": (_other_key, True),
}
if os.geteuid() != 0:
    DAMAGE["chmod 000"] = (lambda path, other: path.chmod(0), True)


def files_of(directory: Path, ns: kvpool.Namespace) -> list[Path]:
    """Slab files with blocks of the namespace: its uid is in their first page."""
    found = []
    for path in sorted(directory.glob("slab-*.kv")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if ns._spec.uid in file.read(4096):
                    found.append(path)
    return found


def test_B24_files_damaged_behind_its_back_cost_the_blocks_in_them(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram=str(16 * UNIT), ssd=str(1024 * UNIT), env=NO_SCRUB)
    client = cluster.connect()
    n, hosts = 20, Path("/etc/hosts").read_bytes()
    spaces = {how: keyspace(client, f"damage {how}", UNIT) for how in [*DAMAGE, "other"]}
    chains = {how: hash_of(ns, *[f"{how}/{i}" for i in range(n)]) for how, ns in spaces.items()}
    data = {how: [payload(f"{how}/{i}", 1, UNIT) for i in range(n)] for how in spaces}
    for how, ns in spaces.items():
        for i in range(0, n, 10):
            assert set(ns.put(chains[how][i : i + 10], data[how][i : i + 10]).outcomes) <= {Outcome.STORED}
    push_out(spaces["other"], "push", 48)
    lost_in_all = 0
    for how, (damage, whole) in DAMAGE.items():
        ns, hashes = spaces[how], chains[how]
        places = files_of(cluster.ssd_dir(0), ns)
        assert places, how
        damage(places[-1], files_of(cluster.ssd_dir(0), spaces["other"])[0])
        seen = []
        for _ in range(2):
            found = [read(ns, f"{how}/{i}") for i in range(n)]
            assert set(found) <= {1, MissCause.CORRUPT, MissCause.EVICTED, MissCause.STALE_INDEX}, (how, found)
            seen.append([one == 1 for one in found])
            first = found.index(next((one for one in found if one != 1), 1)) if set(found) != {1} else n
            out = [bytearray(UNIT) for _ in range(n)]
            got = ns.get(hashes, out)
            assert (got.n_blocks, out[:first]) == (first, data[how][:first]), how
            wait_until(lambda: ns.match(hashes) == first, timeout_s=5, what=f"{how}: the prefix ends at {first}")  # type: ignore[misc]
        assert seen[0] == seen[1], how
        lost = n - sum(seen[0])
        lost_in_all += lost
        if how == "append":
            assert not lost
        elif whole:
            assert lost, how
        again = [outcome for i in range(0, n, 10) for outcome in ns.put(hashes[i : i + 10], data[how][i : i + 10]).outcomes]
        assert [outcome is Outcome.STORED for outcome in again] == [not there for there in seen[0]], (how, again)
        assert ns.get(hashes, [bytearray(UNIT) for _ in range(n)]).n_blocks == n
    troubles = sum(value for name, value in metrics(cluster.worker()).items() if name.startswith("kvpool_read_troubles"))
    assert troubles >= lost_in_all > 0
    assert cluster.worker().process.poll() is None
    cluster.worker().stop()
    cluster.start_worker(0)  # after a start too: right bytes or a miss, whatever the files are now
    for how, ns in spaces.items():
        for i in range(n):
            found_now = read(ns, f"{how}/{i}") if how != "other" else 1
            assert found_now == 1 or isinstance(found_now, MissCause)
    assert Path("/etc/hosts").read_bytes() == hosts


def test_B25_many_small_blocks_and_a_process_that_cannot_grow(make_cluster: MakeCluster) -> None:
    """Blocks are not in LMDB (slab files have their own tables); what grows is memory: it is cut off by RLIMIT_AS."""
    cluster = make_cluster(dram="1MiB", ssd=scaled("8MiB", "512MiB"))
    ns = keyspace(cluster.connect(), "n", 1024)
    n, each = scaled(6_000, 200_000), 500

    def put_all(version: int) -> None:
        for i in range(0, n, each):
            keys = range(i, i + each)
            hashes = hash_of(ns, *[f"{version}/{key}" for key in keys])
            blocks = [payload(f"{version}/{key}", 1, 1024) for key in keys]
            assert set(ns.put(hashes, blocks, deadline_ms=20_000).outcomes) <= STORED_OR_NOT

    def reading(stop: threading.Event) -> None:
        chance = random.Random()
        while not stop.is_set():
            key = f"1/{chance.randrange(n)}"
            read(ns, key, size=1024)

    with running(*[reading] * scaled(2, 8)):
        put_all(1)
        dropped = [f"1/{key}" for key in range(n) if key % 10]
        for i in range(0, len(dropped), 5000):
            assert set(ns.remove(hash_of(ns, *dropped[i : i + 5000]), deadline_ms=20_000).outcomes) <= {
                RemoveOutcome.REMOVED, RemoveOutcome.ABSENT,
            }  # fmt: skip
        put_all(2)
    pid = cluster.worker().pid
    status = Path(f"/proc/{pid}/status").read_text()
    size = int(status.split("VmSize:")[1].split()[0]) << 10
    resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    kept = next(key for key in (f"2/{i}" for i in reversed(range(n))) if read(ns, key) == 1)  # (both tiers are full: not all are)
    client = cluster.connect(mirror=False)
    for number in range(3):  # namespaces: their arenas are what grows
        with suppress(KVPoolError):
            put(keyspace(client, f"n{number}", 4096), 1, 4096, deadline_ms=300)
    for key in range(50):
        assert put(ns, f"late-{key}", 1024) in {*STORED_OR_NOT, Outcome.REJECTED}
        assert read(ns, f"late-{key}") in (1, *MissCause)
    assert read(ns, kept) in (1, *MissCause)
    assert cluster.worker().process.poll() is None
    resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    wait_until(lambda: put(ns, "after", 1024) in THERE, timeout_s=10)


def test_B38_a_second_worker_on_the_same_directory_is_refused(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(dram=str(16 * UNIT), ssd=str(256 * UNIT))
    ns = keyspace(cluster.connect(), "n", UNIT)
    n = scaled(50, 100)
    for key in range(n):
        assert put(ns, key, UNIT) is Outcome.STORED
    (tmp_path / "alias").symlink_to(cluster.ssd_dir(0))

    def refused() -> None:
        for way in (cluster.ssd_dir(0), tmp_path / "alias", Path(os.path.relpath(cluster.ssd_dir(0)))):
            args = ["worker", "--master", cluster.master_address, "--port", "0", "--dram", "1MiB", "--data-dir", tmp_path / "w2"]
            done = run_cli(*args, "--ssd", f"{way}:{256 * UNIT}", timeout_s=20)
            assert done.returncode in (1, 2)
            assert "ssd" in done.stderr and str(cluster.worker().pid) in done.stderr, done.stderr
            assert "Traceback" not in done.stderr

    refused()
    assert have(ns, range(n)) == n
    cluster.worker().kill()
    cluster.start_worker(0)  # the dead one's lock does not block
    wait_until(lambda: have(ns, range(n)) >= n - 16, timeout_s=10)
    for key in range(n, n + 50):
        assert put(ns, key, UNIT) is Outcome.STORED
    assert have(ns, range(n + 50)) >= n + 50 - 16


FORK_STATE = """
import os, sys
from pathlib import Path
from kvpool.worker.state import WorkerState
state = WorkerState(Path(sys.argv[1]))
state.namespaces()
if not (pid := os.fork()):
    try:
        state.namespaces()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        state.close()
        os._exit(0)
    os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
for _ in range(100):
    state.namespaces()
state.close()
print("parent works")
"""


def test_B53_forks_and_second_opens_are_told(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """A program forks with a client; the worker's own LMDB (which no user can reach) is tried with the class."""
    cluster = make_cluster(dram=str(16 * UNIT), ssd=str(256 * UNIT))
    ns = keyspace(cluster.connect(), "n", UNIT)
    n = 100
    for key in range(n):
        assert put(ns, key, UNIT) is Outcome.STORED
    arguments = {"master": cluster.master_address, "namespace": "n", "block_bytes": UNIT}
    with Child("fork", tmp_path / "fork.log", **arguments, n=n, size=UNIT) as child:
        who, text = child.hear()
        assert who == "child" and text.startswith("InvalidArgument") and "fork" in text, text
        assert child.hear() == ["parent", n, ["stored"] * 10]
        assert child.end() == 0
    children = [Child("load", tmp_path / f"{i}.log", **arguments, n=1, size=UNIT, deadline_ms=5000) for i in range(scaled(2, 8))]
    try:
        for child in children:
            assert child.hear() == "ready"
            child.say("go")
            assert child.hear()[0] == 1
    finally:
        for child in children:
            child.kill()
    node = WorkerNode(tmp_path / "node", ssd=f"{tmp_path / 'node' / 'ssd'}:8MiB")
    try:
        with pytest.raises(ConfigError, match=str(os.getpid())):
            WorkerNode(tmp_path / "node", ssd=f"{tmp_path / 'other'}:8MiB")
        with pytest.raises(ConfigError, match=str(os.getpid())):
            WorkerNode(tmp_path / "second", ssd=f"{tmp_path / 'node' / 'ssd'}:8MiB")
        spec = node.namespace()
        assert node.node.served(spec.uid) == spec and node.node.state.namespaces() == []
    finally:
        node.close()


def test_B53_a_forked_childs_worker_state_is_refused_and_the_parents_goes_on(tmp_path: Path) -> None:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", FORK_STATE, str(tmp_path / "state")], capture_output=True, text=True, timeout=60,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "KVPoolError" in done.stdout and "fork" in done.stdout and "parent works" in done.stdout


def test_B59_what_went_down_is_read_back_by_every_path(make_cluster: MakeCluster) -> None:
    """There are no connectors and no GPU get yet; another worker does not read this one's disk, so a second one stands by."""
    cluster = make_cluster(n_workers=2, dram=str(16 * UNIT), ssd=str(256 * UNIT))
    cluster.worker(1).stop()
    clients = {how: cluster.connect(transport=how) for how in ("shm", "tcp")}
    ns = keyspace(clients["shm"], "n", UNIT)
    n = 100
    hashes, data = hash_of(ns, *range(n)), [payload(key, 1, UNIT) for key in range(n)]
    for i in range(0, n, 10):
        assert set(ns.put(hashes[i : i + 10], data[i : i + 10]).outcomes) == {Outcome.STORED}
    push_out(ns, "other", 48)
    cluster.start_worker(1)
    assert ns.match(hashes) == n
    before = event(cluster.worker(0), "hits_ssd")
    assert have(ns, range(n)) == n
    assert event(cluster.worker(0), "hits_ssd") - before == n
    for how, client in clients.items():
        space = keyspace(client, "n", UNIT)
        assert space.wait(hashes) == space.match(hashes, freshness="mirror") == space.touch(hashes) == n
        out = [bytearray(UNIT) for _ in range(n)]
        got = space.get(hashes, out, deadline_ms=20_000)
        assert got.n_blocks == n and out == data
        assert {source.transport for source in got.sources} == {how}
        parts = [bytearray(100) for _ in range(n)]
        assert space.get(hashes, parts, byte_range=(UNIT - 100, 100), deadline_ms=20_000).n_blocks == n
        assert parts == [block[-100:] for block in data]
        with space.hold(hashes[:40], ttl_ms=20_000) as hold:
            assert hold.n_blocks == 40
            assert space.get(hashes[:40], out[:40], hold=hold, deadline_ms=20_000).n_blocks == 40
    with ns.view(hashes[:4]) as view:
        assert [bytes(view[i]) for i in range(view.n_blocks)] == data[: view.n_blocks] and view.n_blocks
    assert event(cluster.worker(0), "promoted") > 0
    cluster.worker(0).stop()
    cluster.start_worker(0)
    wait_until(lambda: have(ns, range(n)) == n, timeout_s=10, what="all of it after a restart")


ODD_NAMES = ["a_b", "a-SEP-b", "a:b", "a|b", "a\\b", "A_b", "a%2Fb", "a.", "a ", " a", "a", "con", "CON", "é"]


def test_B69_names_that_look_alike_are_different_places(make_cluster: MakeCluster) -> None:
    """Keys are digests (raw ones of 8 bytes here), names are those of namespaces; 'a/b' is refused."""
    cluster = make_cluster(dram=str(scaled(1, 8) * MIB), ssd=str(scaled(64, 512) * MIB))
    client = cluster.connect()
    with pytest.raises(InvalidArgument, match="namespace"):
        keyspace(client, "a/b", 4096)
    names = [*ODD_NAMES, unicodedata.normalize("NFD", "é")]
    assert len(set(names)) == len(names) == 15
    spaces = {name: keyspace(client, name, 4096) for name in names}
    letters = "/\\:*?\"<>|_."[: scaled(4, 10)]
    words = [a + b + c + d for a in letters for b in letters for c in letters for d in letters]
    keys = spaces["a_b"].hashes([(word * 2).encode() for word in words])
    first = {name: spaces[name].hashes([b"same key"]) for name in names}
    for name in names:
        assert spaces[name].put(first[name], [payload(name, 1, 4096)]).outcomes == [Outcome.STORED]
    for i in range(0, len(words), 200):
        blocks = [payload(word, 1, 4096) for word in words[i : i + 200]]
        assert set(spaces["a_b"].put(keys[i : i + 200], blocks, deadline_ms=20_000).outcomes) == {Outcome.STORED}
    push_out(spaces["a"], "push", scaled(600, 6000), size=4096)

    def served(name: str) -> bool:
        out = bytearray(4096)
        there = spaces[name].get(first[name], [out]).n_blocks == 1
        assert not there or check(name, out, size=4096)
        return there

    assert [served(name) for name in names] == [True] * len(names)
    out = [bytearray(4096) for _ in words]
    assert spaces["a_b"].get(keys, out, deadline_ms=30_000).n_blocks == len(words)
    for word, block in zip(words, out, strict=True):
        check(word, block, size=4096)
    for name in names[::2]:
        assert spaces[name].remove(first[name], deadline_ms=5000).outcomes == [RemoveOutcome.REMOVED]
    assert [served(name) for name in names] == [bool(i % 2) for i in range(len(names))]
    for start in (0, 1):
        gone = words[start::2][:200]
        one = spaces["a_b"].hashes([(word * 2).encode() for word in gone])
        assert set(spaces["a_b"].remove(one, deadline_ms=10_000).outcomes) == {RemoveOutcome.REMOVED}
        if start == 0:
            other = spaces["a_b"].hashes([(word * 2).encode() for word in words[1::2][:200]])
            assert spaces["a_b"].get(other, out[: len(other)]).n_blocks == len(other) >= 100


def test_B82_a_disk_that_hangs_stops_nothing_but_itself(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """The disk is held by throttling the worker's control group to one byte a second."""
    with control_group("blkio") as group, ExitStack() as stack:
        cluster = make_cluster(dram=str(64 * UNIT), ssd=str(512 * UNIT), worker_prefix=in_group(group))
        stack.callback(cluster.stop)
        ns = keyspace(cluster.connect(), "n", UNIT)
        cold, warm = [f"cold{i}" for i in range(40)], [f"warm{i}" for i in range(10)]
        for key in cold:
            assert put(ns, key, UNIT) is Outcome.STORED
        push_out(ns, "other", 128)
        for key in warm:
            assert put(ns, key, UNIT) is Outcome.STORED
        worker = cluster.worker()
        deadline_ms = int(CALL_S * 1e3)

        def took(n: int) -> float:
            began = time.monotonic()
            for i in range(n):
                assert read(ns, warm[i % 10], deadline_ms=deadline_ms) == 1
            return (time.monotonic() - began) / n

        quiet = took(100)
        forget_modules()
        throttle(group, tmp_path, read=1, write=1)
        slow: list[object] = []

        def reading(index: int) -> Callable[[threading.Event], None]:
            return lambda stop: slow.append(read(ns, cold[index % 40], deadline_ms=deadline_ms))

        try:
            with running(*map(reading, range(scaled(16, 64)))):
                loaded = took(scaled(200, 1000))
                assert http_get(worker, "/metrics", timeout_s=2)[0] == 200
                wait_until(lambda: len(slow) == scaled(16, 64), timeout_s=CALL_S + 2 * SLACK_S)
            assert MissCause.TIMEOUT in slow and set(slow) <= {1, MissCause.TIMEOUT}, slow
            outcomes = {put(ns, f"new{i}", UNIT, deadline_ms=deadline_ms) for i in range(scaled(10, 50))}
            assert outcomes <= STORED_OR_NOT, outcomes
            sick = 'kvpool_tier_ok{tier="ssd"}'
            wait_until(lambda: metrics(worker)[sick] == 0, timeout_s=15, what="the tier is marked sick")
            after = took(50)
            assert put(ns, "while out", UNIT, deadline_ms=deadline_ms) is Outcome.STORED
        finally:
            throttle(group, tmp_path)
        assert max(loaded, after) < 5 * quiet + 0.02, (quiet, loaded, after)
        wait_until(lambda: metrics(worker)[sick] == 1, timeout_s=10, what="the tier is back")
        wait_until(lambda: have(ns, cold) >= 30, timeout_s=10, what="cold blocks again")
        found = [read(ns, key) for key in cold]
        assert set(found) <= {1, MissCause.EVICTED, MissCause.CORRUPT}
        assert metrics(worker)["kvpool_staging_bytes"] == 0


def test_B82_a_worker_whose_disk_hangs_stops_in_time(make_cluster: MakeCluster, tmp_path: Path) -> None:
    with control_group("blkio") as group, ExitStack() as stack:
        cluster = make_cluster(dram=str(16 * UNIT), ssd=str(256 * UNIT), worker_prefix=in_group(group))
        stack.callback(cluster.stop)
        ns = keyspace(cluster.connect(), "n", UNIT)
        push_out(ns, "other", 64)
        throttle(group, tmp_path, read=1, write=1)
        try:
            for i in range(4):
                put(ns, f"new{i}", UNIT, deadline_ms=300)
            began = time.monotonic()
            worker = cluster.worker()
            worker.signal(15)
            wait_until(lambda: _ends(worker), timeout_s=12, what="the end; a process in a disk call ends with that call")
            assert time.monotonic() - began < 10 + SLACK_S
        finally:
            throttle(group, tmp_path)
        assert worker.process.wait(timeout=20) == 0
        worker.kill()
        cluster.start_worker(0)
        assert have(ns, [f"other-{i}" for i in range(64)]) >= 30


def _ends(role: Role) -> bool:
    """It has ended, or is being taken down by the kernel (its threads wait for the disk, its memory is gone)."""
    if role.process.poll() is not None:
        return True
    with suppress(OSError):
        return not Path(f"/proc/{role.pid}/maps").read_text()
    return True


# --- hostile input --------------------------------------------------------------------------------------------------------


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_B39_a_pickle_is_never_loaded_whatever_way_it_comes_in(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """The source is searched by tests/unit/test_tidy.py."""
    marker = tmp_path / "pwned"
    bombs = [pickle.dumps(_Bomb(marker), protocol=protocol) for protocol in (0, 2, 5)]
    bombs.append(f"!!python/object/apply:os.system ['touch {marker}']".encode())
    cluster = s0(make_cluster, n_workers=1, dram=str(16 * UNIT))
    client = cluster.connect()
    assert cluster.master is not None
    for role in (cluster.master, cluster.worker()):
        for where in listening(role):
            for bomb in bombs:
                unix = where.startswith("@")
                with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as sock, suppress(OSError):
                    sock.settimeout(0.3)
                    host, _, port = where.rpartition(":")
                    sock.connect("\0" + where[1:] if unix else (host, int(port)))
                    sock.sendall(bomb)
                    sock.shutdown(socket.SHUT_WR)
                    sock.recv(4096)
    text = bombs[0].decode("latin-1")
    layout = kvpool.KVLayout.opaque(block_bytes=UNIT, name=text[:40].replace("\n", " "))
    ns = client.namespace("pickled", layout, create=True, salt=bombs[1])
    hashes = ns.hash([1, 2, 3, 4], extra=bombs[1])
    values = [bombs[i % 4].ljust(100, b".") for i in range(4)]
    assert set(ns.put(hashes, values).outcomes) == {Outcome.STORED}
    with suppress(InvalidArgument):
        client.namespace(text[:100], layout, create=True)
    with pytest.raises(KVPoolError):
        ns.get(hashes, [bytearray(UNIT)], hold=bombs[1])
    push_out(keyspace(client, "other", UNIT), "push", 48)

    def every_verb() -> None:
        out = [bytearray(UNIT) for _ in range(4)]
        got = ns.get(hashes, out)
        assert [bytes(block[: len(value)]) for block, value in zip(out[: got.n_blocks], values, strict=False)] == (
            values[: got.n_blocks]
        )
        ns.match(hashes), ns.touch(hashes), client.describe(), ns.stats()
        with ns.hold(hashes, ttl_ms=1000):
            pass
        for verb in (["status"], ["ns", "list"], ["ls", "pickled"]):
            assert run_cli(*verb, "--master", cluster.master_address).returncode == 0

    every_verb()
    config = tmp_path / "evil.toml"
    config.write_bytes(bombs[3])
    assert run_cli("config", "check", config).returncode == 2
    cluster.worker().stop()
    cluster.master.stop()
    for path in [p for p in tmp_path.rglob("*") if p.is_file() and p.name in ("id", "LOCK", "state.lock")]:
        path.write_bytes(bombs[1])
    (cluster.ssd_dir(0) / "slab-99999999.kv").write_bytes(bombs[2])
    (cluster.ssd_dir(0) / "snapshot.pkl").write_bytes(bombs[2])
    (cluster.worker_dir(0) / "index.pkl").write_bytes(bombs[2])
    with lmdb.open(str(cluster.worker_dir(0) / "index"), max_dbs=4, map_size=4 << 20) as env:
        for name in (b"namespaces", b"applied"):
            with env.begin(db=env.open_db(name), write=True) as txn:
                for key, _ in list(txn.cursor()):
                    txn.put(key, bombs[1])
    cluster.start_master()
    cluster.start_worker(0)
    wait_until(lambda: client.describe()["complete"], timeout_s=10)
    every_verb()
    assert put(keyspace(client, "after", UNIT), 1, UNIT) is Outcome.STORED
    assert not marker.exists()


PWN = "/tmp/kvpool-pwn"
ODD = [f"../../../..{PWN}", PWN, "..", ".", "a/../../b", "a\x00b", "~/x", f"$(touch {PWN})", "link"]


def test_B73_odd_names_reach_no_file_outside(make_cluster: MakeCluster, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    cluster = make_cluster(dram=str(16 * UNIT), ssd=str(2048 * UNIT))
    for directory in (cluster.worker_dir(0), cluster.ssd_dir(0), cluster.directory / "master"):
        (directory / "link").symlink_to(outside)
        (directory / "b").symlink_to(outside / "kept")

    def listing() -> set[tuple[str, int, int]]:
        found = [p for p in tmp_path.rglob("*") if not p.is_relative_to(cluster.directory)]
        found += [p for p in Path("/tmp").iterdir() if p.name.startswith("kvpool-pwn")]
        found += [p for p in Path.cwd().iterdir() if not p.name.startswith(".")]
        return {(str(p), p.lstat().st_size, p.lstat().st_ino) for p in found}

    before = listing()
    client = cluster.connect()
    spaces: list[kvpool.Namespace] = []
    for odd in ODD:
        at = len(spaces)
        for name, layout_name, salt in ((odd, "m", b""), (f"model{at}", odd, b""), (f"salt{at}", "m", odd.encode())):
            try:
                layout = kvpool.KVLayout.opaque(block_bytes=UNIT, name=layout_name)
                spaces.append(client.namespace(name, layout, create=True, salt=salt, hash="external"))
            except InvalidArgument as error:
                assert "namespace" in str(error) or "name" in str(error), error
            with suppress(InvalidArgument):
                kvpool.KVLayout(model=odd, revision=odd, dtype="float16", n_layers=1, n_kv_heads=1, head_dim=64, block_tokens=16,
                                format=odd)  # fmt: skip
    assert len(spaces) >= 2 * len(ODD) - 4
    digests = [odd.encode().ljust(8, b"/")[:64] for odd in ODD]
    for number, ns in enumerate(spaces):
        hashes = ns.hashes(digests)
        assert ns.put(hashes, [payload(f"{number}/{i}", 1, 4096) for i in range(len(ODD))]).n_there == len(ODD)
    push_out(spaces[0], "push", 48)

    def served(number: int) -> int:
        ns = spaces[number]
        out = [bytearray(UNIT) for _ in ODD]
        got = ns.get(ns.hashes(digests), out)
        for i in range(got.n_blocks):
            check(f"{number}/{i}", out[i][:4096], size=4096)
        return got.n_blocks

    there = [served(number) for number in range(len(spaces))]  # a tier this small has 16 extents: some namespaces left it
    assert set(there) <= {0, len(ODD)} and there.count(len(ODD)) >= 12, there
    gone = there.index(len(ODD))
    assert spaces[gone].remove(spaces[gone].hashes(digests), deadline_ms=5000).count(RemoveOutcome.REMOVED) == len(ODD)
    cluster.worker().stop()
    (cluster.worker_dir(0) / "id").write_text("../../../../tmp/kvpool-pwn\n")
    cluster.start_worker(0)
    assert "/" not in cluster.worker().ready["id"]
    assert run_cli("ns", "list", "--json", "--master", cluster.master_address).returncode == 0
    assert served(gone) == 0
    client.describe()
    assert listing() == before
    assert (outside / "kept").read_text() == "kept"
    assert used(cluster.worker()) and tier_event(cluster.worker(), "ssd", "scan_adopted_blocks") > 0


def test_a_disk_that_gives_errors_is_taken_out_and_comes_back(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, dram=str(16 * UNIT), ssd=str(512 * UNIT))
    try:
        with ExitStack() as stack:
            try:
                disk = stack.enter_context(loop_disk(cluster.ssd_dir(0), size=max(64 << 20, 1024 * UNIT)))
            except NoLoopDisk as error:
                pytest.skip(f"no loop devices here: {error}")
            stack.callback(cluster.stop)
            ns = keyspace(cluster.start().connect(), "n", UNIT)
            cold = [f"cold{i}" for i in range(40)]
            for key in cold:
                assert put(ns, key, UNIT) is Outcome.STORED
            push_out(ns, "other", 32)
            worker, sick = cluster.worker(), 'kvpool_tier_ok{tier="ssd"}'
            wait_until(lambda: metrics(worker)['kvpool_tier_blocks{tier="ssd"}'] >= 40, timeout_s=20)
            disk.fail()
            for i in range(64):  # more than DRAM has
                assert put(ns, f"new{i}", UNIT) is Outcome.STORED
                assert read(ns, f"new{i}") == 1
                assert isinstance(read(ns, cold[i % 40]), MissCause)
            wait_until(lambda: metrics(worker)[sick] == 0, timeout_s=20, what="the tier is out")

            def state() -> str:
                tier: dict[str, str] = cluster.connect().describe()["workers"][0]["tiers"]["ssd"]
                return tier["state"]

            wait_until(lambda: "Input/output error" in state(), timeout_s=10, what="status says why")
            disk.heal()
            wait_until(lambda: metrics(worker)[sick] == 1, timeout_s=60, what="the tier is back")
            for i in range(64):
                assert put(ns, f"again{i}", UNIT) is Outcome.STORED
            wait_until(lambda: metrics(worker)['kvpool_tier_blocks{tier="ssd"}'] >= 40, timeout_s=20, what="it is used again")
            found = [read(ns, f"again{i}") for i in range(64)]
            assert found == [1] * 64, found
    finally:
        cluster.stop()
