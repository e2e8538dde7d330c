"""What other pools were reported to get wrong when they are started, stopped and set up, asserted right here, against real
processes. Test names carry the report's id; sizes as in `test_reports_failures`.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvpool
from kvpool.core.types import MissCause, Outcome
from kvpool.errors import KVPoolError, MasterUnavailable
from tests.support.cluster import Cluster
from tests.support.confine import Clock, private_mounts
from tests.support.keyed import SLACK_S, THERE, Child, hash_of, have, keyspace, put, read
from tests.support.leaks import children_of
from tests.support.observe import listening, metrics
from tests.support.payload import payload
from tests.support.processes import Role, cli_env, run_cli
from tests.support.proxy import free_port
from tests.support.s0 import STORED_OR_NOT, UNIT, alive, cpu_s, event, push_out, running
from tests.support.scale import FULL, scaled
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.reports, pytest.mark.timeout(1500)] if FULL else [pytest.mark.timeout(120)]

MakeCluster = Callable[..., Cluster]
ROOT = Path(__file__).parents[2]


def left_behind() -> set[str]:
    """What a killed process could leave outside of its directories."""
    found = set()
    for place in ("/dev/shm", "/dev/hugepages", "/tmp", "/var/tmp", "/run"):
        if Path(place).is_dir():
            found |= {str(path) for path in Path(place).iterdir() if not path.name.startswith("pytest-")}
    return found


def unix_sockets() -> set[str]:
    """Names of abstract sockets of workers, of all pools on this machine."""
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@kvpool-" in line}


def test_B09_nothing_is_left_behind_by_kills(make_cluster: MakeCluster, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    cluster = make_cluster(dram=str(64 * UNIT), ssd=str(64 * UNIT), env={"TMPDIR": str(home), "HOME": str(home)})
    other = make_cluster(dram=str(16 * UNIT))
    kept = keyspace(other.connect(), "n", UNIT)
    assert put(kept, "kept", UNIT) is Outcome.STORED
    before, sockets, files = left_behind(), set(), set()
    for number, how in enumerate(["kill"] * scaled(2, 10) + ["term"] * scaled(1, 5) + ["mapped"] * scaled(1, 5)):
        client = kvpool.connect(cluster.master_address)
        ns = keyspace(client, "n", UNIT)
        keys = [f"{number}-{i}" for i in range(10)]
        for key in keys:
            assert put(ns, key, UNIT) in THERE
        view = ns.view(hash_of(ns, keys[0])) if how == "mapped" else None
        sockets |= {name for name in listening(cluster.worker()) if name.startswith("@kvpool")}
        if how == "term":
            assert cluster.worker().stop() == 0
        else:
            cluster.worker().kill()
        if view is not None:
            assert bytes(view[0]) == payload(keys[0], 1, UNIT)
            with contextlib.suppress(KVPoolError):
                view.close()
        client.close()
        cluster.start_worker(0)
        there = (path for path in cluster.directory.rglob("*") if not path.name.startswith("slab"))
        now = {str(path.relative_to(cluster.directory)) for path in there}
        assert not files or now <= files, now - files
        files = now
    assert read(kept, "kept") == 1, "another pool's memory is its own"
    assert sockets
    wait_until(lambda: not sockets & unix_sockets(), timeout_s=10, what="sockets of dead workers are gone")
    shm = lambda: {path for path in left_behind() - before if path.startswith(("/dev/", "/run/")) and "kvpool" in path}  # noqa: E731
    wait_until(lambda: not shm(), timeout_s=10, what="nothing new outside")
    assert not list(home.rglob("*")), "nothing in TMPDIR either"
    held = sum(value for name, value in metrics(cluster.worker()).items() if name.startswith("kvpool_tier_used_bytes"))
    assert held <= 2 * 64 * UNIT


@contextlib.contextmanager
def up(directory: Path, *args: str) -> Iterator[Role]:
    """`kvpool up` with two workers."""
    words = ["up", "--json", "--data-dir", str(directory), "--workers", "2", "--dram", "16MiB", "--ssd", f"{directory}/ssd:16MiB"]
    role = Role([*words, *args], log=directory.with_suffix(".log"))
    try:
        yield role.wait_ready(timeout_s=60)
    finally:
        if role.process.poll() is None:
            role.stop()
        else:
            role.kill()


def test_B27_the_whole_tree_goes_and_the_same_start_works_at_once(tmp_path: Path) -> None:
    """That each dead child is started again is in tests/integration/test_cli.py."""
    ports = ("--port", str(free_port()), "--http-port", str(free_port()))
    for _ in range(scaled(2, 5)):
        with up(tmp_path / "pool", *ports) as role:
            pids = children_of(role.pid)
            assert len(pids) == 3
            role.kill()
            wait_until(lambda: not any(alive(pid) for pid in pids), timeout_s=5, what="the tree's end")
    with up(tmp_path / "pool", *ports) as role, kvpool.connect(role.ready["master"]) as client:
        ns = keyspace(client, "n", 4096)
        assert put(ns, 1, 4096) is Outcome.STORED and read(ns, 1) == 1
        assert [worker["state"] for worker in client.describe()["workers"]] == ["up", "up"]


WRONG = [  # (how, what must be in the message)
    (["--dram", "100TiB"], ["dram"]),
    (["--dram", "64 GiB of it"], ["dram"]),
    (["--dram", "-1"], ["dram"]),
    (["--dram", ""], ["dram"]),
    (["--ssd", "{tmp}/ssd:900TiB"], ["ssd: 989560464998400"]),
    (["--ssd", "{tmp}/ssd:0"], ["ssd"]),
    (["--ssd", "{tmp}/ssd"], ["ssd"]),
]


@pytest.mark.parametrize(("args", "words"), WRONG, ids=[" ".join(args) for args, _ in WRONG])
def test_B61_settings_that_this_machine_cannot_have_stop_the_start(args: list[str], words: list[str], tmp_path: Path) -> None:
    """Spelling, sections, types and sources are in tests/unit/test_config.py."""
    args = [word.replace("{tmp}", str(tmp_path)) for word in args]
    done = run_cli("worker", "--master", f"127.0.0.1:{free_port()}", "--data-dir", tmp_path / "w", *args, timeout_s=15)
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_B61_a_pool_runs_with_what_was_set_and_shows_it(make_cluster: MakeCluster, tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text('[worker]\ndram = "2MiB"\nlow_watermark = 0.5\n')
    cluster = make_cluster(dram="3MiB", worker_args=("--config", str(file)), env={"KVPOOL_WORKER__IO_THREADS": "3"})
    assert metrics(cluster.worker())['kvpool_tier_capacity_bytes{tier="dram"}'] == 3 << 20, "a flag goes before a file"
    for env in ({"KVPOOL_WORKR__DRAM": "1MiB"}, {"KVPOOL_DRAM": "1MiB"}):
        done = run_cli("worker", "--master", cluster.master_address, "--data-dir", tmp_path / "w", env=env, timeout_s=15)
        assert done.returncode == 2 and next(iter(env)) in done.stderr and "Traceback" not in done.stderr, done.stderr
    bad = {
        '[worker]\ndram="1MiB"\ndram="2MiB"\n': "TOML",
        "": "empty",
        '[master]\ndram="1MiB"\n': "dram",
        "[worker]\nlow_watermark=0.95\n": "low_watermark",
    }
    for text, word in bad.items():
        file.write_text(text)
        done = run_cli("worker", "--config", file, "--data-dir", tmp_path / "w", timeout_s=15)
        assert done.returncode == 2 and word in done.stderr and str(file) in done.stderr, done.stderr
    done = run_cli("worker", "--config", tmp_path / "missing.toml", timeout_s=15)
    assert done.returncode == 2 and "missing.toml" in done.stderr


PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "grpc_proxy"), "http://127.0.0.1:9")


@pytest.mark.parametrize("no_proxy", scaled(["localhost"], ["", "localhost"]))
def test_B62_proxies_of_the_environment_are_not_for_the_pool(make_cluster: MakeCluster, tmp_path: Path, no_proxy: str) -> None:
    env = PROXIES | ({"no_proxy": no_proxy} if no_proxy else {})
    cluster = make_cluster(dram="4MiB", env=env)
    for transport in ("shm", "tcp"):
        arguments = {"master": cluster.master_address, "namespace": "n", "block_bytes": 4096, "size": 4096}
        with Child("once", tmp_path / "log", env=env, **arguments, client={"transport": transport}) as child:
            assert child.hear() == ["stored", "1"]
    assert run_cli("status", "--master", cluster.master_address, env=env).returncode == 0
    assert run_cli("ns", "list", "--master", cluster.master_address, env=env).returncode == 0


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


HOSTS = [(["--host", "0.0.0.0", "--insecure", "--advertise", "127.0.0.1"], "127.0.0.1"), (["--host", "localhost"], "")]
if has_ipv6():
    HOSTS += [(["--host", "::1"], "[::1]"), (["--host", "::", "--insecure", "--advertise", "::1"], "[::1]")]


@pytest.mark.parametrize(("args", "told"), HOSTS, ids=[args[1] for args, _ in HOSTS])
def test_B62_what_is_advertised_can_be_connected_to(make_cluster: MakeCluster, args: list[str], told: str) -> None:
    v6 = ":" in args[1]
    cluster = make_cluster(dram="4MiB", worker_args=tuple(args), master_args=("--host", "::1") if v6 else ())
    client = cluster.connect(transport="tcp")
    host, _, port = client.describe()["workers"][0]["host"].rpartition(":")
    assert (host == told or not told) and host not in ("0.0.0.0", "[::]", "::") and int(port) > 0
    ns = keyspace(client, "n", 4096)
    assert put(ns, 1, 4096) is Outcome.STORED and read(ns, 1) == 1
    assert run_cli("status", "--master", cluster.master_address).returncode == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_B62_a_wildcard_is_not_advertised(host: str, tmp_path: Path) -> None:
    done = run_cli("worker", "--host", host, "--insecure", "--data-dir", tmp_path / "w", timeout_s=15)
    assert done.returncode == 2 and "advertise" in done.stderr


def test_B62_unknown_names_are_errors_in_time_and_second_addresses_are_tried(make_cluster: MakeCluster, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(MasterUnavailable, match=r"no-such-host\.invalid"):
        kvpool.connect("no-such-host.invalid:7400", deadline_ms=2000)
    done = run_cli("worker", "--host", "no-such-host.invalid", "--insecure", "--data-dir", tmp_path / "w", timeout_s=20)
    assert done.returncode in (1, 2) and "no-such-host.invalid" in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - began < 2 + 5 + 2 * SLACK_S
    cluster = make_cluster(dram="4MiB")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n::1 twofold\n127.0.0.77 twofold\n127.0.0.1 twofold\n127.0.1.1 debian-like\n")
    prefix = private_mounts(f"mount --bind {hosts} /etc/hosts")
    port = cluster.master_address.rpartition(":")[2]
    arguments = {"namespace": "n", "block_bytes": 4096, "size": 4096}
    with Child("once", tmp_path / "log", prefix=prefix, master=f"twofold:{port}", **arguments) as child:
        assert child.hear() == ["stored", "1"]
    worker = Role(["worker", "--master", f"twofold:{port}", "--host", "debian-like", "--insecure", "--dram", "4MiB", "--data-dir",
                   str(tmp_path / "w2"), "--advertise", "127.0.1.1"], log=tmp_path / "w2.log", prefix=prefix)  # fmt: skip
    try:
        worker.wait_ready()
        told = [w["host"] for w in cluster.connect().describe()["workers"] if w["id"] == worker.ready["id"]]
        assert told == [f"127.0.1.1:{worker.port}"]
    finally:
        worker.stop()


def test_B62_a_client_in_another_network_reads(make_cluster: MakeCluster, tmp_path: Path) -> None:
    name, near, far = f"kvt{os.getpid()}", "10.211.7.1", "10.211.7.2"

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True, timeout=20, check=False).returncode == 0

    if not ip("netns", "add", name):
        pytest.skip("no network namespaces here")
    try:
        own = f"v{os.getpid()}"
        ends = ip("link", "add", own, "type", "veth", "peer", "name", "far", "netns", name)
        if not ends or not ip("addr", "add", f"{near}/24", "dev", own) or not ip("link", "set", own, "up"):
            pytest.skip("no veth here")
        for words in (["addr", "add", f"{far}/24", "dev", "far"], ["link", "set", "far", "up"], ["link", "set", "lo", "up"]):
            assert ip("-n", name, *words)
        everywhere = ("--host", "0.0.0.0", "--insecure", "--advertise", near)
        cluster = make_cluster(dram="4MiB", worker_args=everywhere, master_args=everywhere)
        port = cluster.master_address.rpartition(":")[2]
        cluster.worker()
        with Child("once", tmp_path / "log", prefix=("ip", "netns", "exec", name), master=f"{near}:{port}", namespace="n",
                   block_bytes=4096, size=4096) as child:  # fmt: skip
            assert child.hear() == ["stored", "1"]
    finally:
        ip("netns", "del", name)
        ip("link", "del", f"v{os.getpid()}")  # (gone with its peer, as a rule)


# --- stopping -------------------------------------------------------------------------------------------------------------

STOP_S = 10.0


def stops(role: Role, *signals: int, may_die: bool = False) -> None:
    """The role ends by these signals, in time, with status 0 and without a word of trouble."""
    began = time.monotonic()
    for number in signals:
        role.signal(number)
    try:
        status = role.process.wait(timeout=STOP_S + SLACK_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still there after {STOP_S + SLACK_S} s; log:\n{role.log_text()[-3000:]}") from None
    finally:
        role.kill()
    assert status == 0 or (may_die and status in (-signals[0], 128 + signals[0], 1)), (status, role.log_text()[-2000:])
    assert time.monotonic() - began < STOP_S + SLACK_S
    for word in ("Traceback", "Fatal Python error", "never awaited", "leaked"):
        assert word not in role.log_text(), role.log_text()[-3000:]


INTERPRETER_S = 0.1  # of CPU, before anything of ours runs: Python has a traceback for Ctrl-C then
WAYS = [(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGTERM, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM)]


@pytest.mark.parametrize("state", ["idle", "busy", "demoting", "master frozen", "master dead", "starting"])
def test_B80_a_worker_stops_in_every_state(make_cluster: MakeCluster, state: str) -> None:
    cluster = make_cluster(dram=str(16 * UNIT), ssd=str(256 * UNIT))
    ns = keyspace(cluster.connect(), "n", UNIT)
    chance = random.Random()
    assert cluster.master is not None
    for number in range(scaled(1, 20)):
        ways = WAYS if FULL else [chance.choice(WAYS)]
        way = ways[number % len(ways)]
        worker = cluster.worker()

        def using(stop: threading.Event, number: int = number) -> None:
            while not stop.is_set():
                key = f"{number}-{chance.randrange(200)}"
                assert put(ns, key, UNIT, deadline_ms=1000) in {*STORED_OR_NOT, Outcome.REJECTED, Outcome.UNLISTED}
                found = read(ns, key, deadline_ms=1000)
                assert found == 1 or isinstance(found, MissCause)

        if state == "starting":
            worker.stop()
            cluster.workers[0] = worker = cluster._spawn_worker(0)
            began = cpu_s(worker)
            wanted = INTERPRETER_S + chance.uniform(0.0, 1.0)
            wait_until(
                lambda: not alive(worker.pid) or cpu_s(worker) - began > wanted or worker.has_spoken(),  # type: ignore[misc]
                timeout_s=20, what="ended, ready or far enough with its start",
            )  # fmt: skip
            stops(worker, *way, may_die=True)
        elif state == "busy":
            stored = event(worker, "stored")
            with running(*[using] * 8):
                wait_until(lambda: event(worker, "stored") > stored + 8, timeout_s=10)  # type: ignore[misc]
                stops(worker, *way)
        elif state == "demoting":
            demoted = event(worker, "demoted")
            push_out(ns, f"push{number}", 64)
            assert event(worker, "demoted") > demoted
            stops(worker, *way)
        else:
            if state == "master frozen":
                cluster.master.pause()
            elif state == "master dead":
                cluster.master.kill()
            stops(worker, *way)
            cluster.master.resume()
        if number + 1 < scaled(1, 20):
            if state == "master dead":
                cluster.start_master()
            cluster.start_worker(0)
    assert not [path for path in cluster.directory.rglob("*") if path.suffix in (".new", ".tmp")]
    cluster.start_worker(0) if state != "master dead" else cluster.start_master()
    if state == "master dead":
        cluster.start_worker(0)
    wait_until(lambda: put(ns, "after", UNIT, deadline_ms=1000) in THERE, timeout_s=10)


@pytest.mark.parametrize("way", WAYS[: scaled(2, 4)])
def test_B80_a_master_stops_with_workers_and_clients_there(make_cluster: MakeCluster, way: tuple[int, ...]) -> None:
    cluster = make_cluster(dram="4MiB")
    ns = keyspace(cluster.connect(), "n", 4096)
    assert put(ns, 1, 4096) is Outcome.STORED
    assert cluster.master is not None
    stops(cluster.master, *way)
    assert read(ns, 1) == 1
    cluster.start_master()
    fresh = iter(range(2, 1 << 30))
    wait_until(lambda: put(ns, next(fresh), 4096, deadline_ms=1000) is Outcome.STORED, timeout_s=10)


ENDS = [(how, pool) for how in ("close", "exit", "error") for pool in ("there", "dead", "frozen")]


@pytest.mark.parametrize(("how", "pool"), ENDS if FULL else [ENDS[0], ENDS[2], ENDS[4], ENDS[6]])
def test_B80_a_client_ends_with_promises_open(make_cluster: MakeCluster, tmp_path: Path, how: str, pool: str) -> None:
    cluster = make_cluster(dram=str(16 * UNIT))
    ns = keyspace(cluster.connect(), "n", UNIT)
    assert put(ns, 0, UNIT) is Outcome.STORED
    log = tmp_path / "client.log"
    assert cluster.master is not None
    with Child("leave", log, master=cluster.master_address, namespace="n", block_bytes=UNIT, how=how) as child:
        assert child.hear() == "ready"
        roles = (cluster.worker(), cluster.master)
        for role in roles if pool != "there" else ():
            role.kill() if pool == "dead" else role.pause()
        began = time.monotonic()
        child.say("go")
        status = child.end(timeout_s=STOP_S + SLACK_S)
        took = time.monotonic() - began
        for role in roles:
            role.resume()
    assert took < STOP_S, took
    assert status == (1 if how == "error" else 0), log.read_text()
    text = log.read_text()
    assert "Fatal Python error" not in text and "Exception ignored" not in text, text
    assert text.count("Traceback") == (how == "error"), text
    if pool != "dead":
        gone = lambda: metrics(cluster.worker())['kvpool_blocks_now{what="reserved"}'] == 0  # noqa: E731
        wait_until(gone, timeout_s=10, what="its reservation is given back")


# --- clocks ---------------------------------------------------------------------------------------------------------------


def test_B86_durations_do_not_use_the_wall_clock() -> None:
    """Of the source: `time.time` and dates may only make texts and metrics for people."""
    # scrub: when its last pass ended; state, mover: ends of pins and of blocks on SSD, which outlive the process
    allowed = {"kvpool/obs/logs.py", "kvpool/worker/scrub.py", "kvpool/master/state.py", "kvpool/worker/mover.py"}
    wrong = []
    for path in sorted((ROOT / "kvpool").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node)
                if name in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now",
                            "time.CLOCK_REALTIME"):  # fmt: skip
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not [one for one in wrong if one.split(":")[0] not in allowed], wrong


def test_B86_jumping_clocks_are_not_noticed(make_cluster: MakeCluster, tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    env, of_worker = clock.env("master"), clock.env("worker")
    clock.jump("master", "+10m")
    clock.jump("worker", "-10m")
    prefix = ("env", *(f"{name}={value}" for name, value in of_worker.items()))
    cluster = make_cluster(dram=str(16 * UNIT), ssd=str(64 * UNIT), env=env, worker_prefix=prefix)
    client = cluster.connect()  # in this process: the real time
    ns = keyspace(client, "n", UNIT)
    keys = [f"k{i}" for i in range(8)]
    for key in keys[:4]:
        assert put(ns, key, UNIT) is Outcome.STORED
    assert cluster.master is not None
    incarnation = client.describe()["workers"][0]["incarnation"]
    step_s, this_year = scaled(0.7, 5.0), time.localtime().tm_year

    with ns.hold(hash_of(ns, keys[0]), ttl_ms=600_000) as long, ns.view(hash_of(ns, keys[1])) as view:
        for to in ("+1h", "-1h", "+10y", "+0"):
            for name in ("master", "worker"):
                clock.jump(name, to)
            year = subprocess.run(["date", "+%Y"], env=cli_env(of_worker), capture_output=True, text=True, check=True).stdout
            assert (int(year) >= this_year + 9) == (to == "+10y")
            short = ns.hold(hash_of(ns, keys[2]), ttl_ms=int(step_s * 600))
            assert short.n_blocks == 1
            end = time.monotonic() + step_s
            while time.monotonic() < end:
                assert [read(ns, key) for key in keys[:4]] == [1] * 4
                assert put(ns, keys[4], UNIT) in (Outcome.STORED, Outcome.ALREADY)
                assert [w["state"] for w in client.describe()["workers"]] == ["up"]
                out = bytearray(UNIT)
                assert ns.get(hash_of(ns, keys[0]), [out], hold=long).n_blocks == 1
            wait_until(lambda: metrics(cluster.worker())['kvpool_blocks_now{what="holds"}'] <= 2, timeout_s=5,
                       what="a hold ends by its time, whatever the clock says")  # fmt: skip
        assert bytes(view[0]) == payload(keys[1], 1, UNIT)
    described = client.describe()["workers"][0]
    assert described["incarnation"] == incarnation
    assert metrics(cluster.master)["kvpool_workers_lost_total"] == 0
    push_out(ns, "fill", 96)
    assert have(ns, [f"fill-{i}" for i in range(80, 96)]) == 16
    for role in (cluster.master, cluster.worker()):
        assert "Traceback" not in role.log_text()
    for role in (cluster.master, cluster.worker()):  # a suspend of all
        role.pause()
    end = time.monotonic() + scaled(1.0, 30.0)
    wait_until(lambda: time.monotonic() > end, timeout_s=60)
    for role in (cluster.master, cluster.worker()):
        role.resume()
    wait_until(lambda: [w["state"] for w in client.describe()["workers"]] == ["up"], timeout_s=10)
    wait_until(lambda: have(ns, [f"fill-{i}" for i in range(80, 96)]) == 16, timeout_s=10)
