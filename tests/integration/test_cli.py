"""The command line as a user meets it: real processes, exit statuses, one JSON object, one-line errors, nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from tests.support.cluster import Cluster
from tests.support.leaks import children_of
from tests.support.payload import payload
from tests.support.processes import Role, cli_env, run_cli
from tests.support.proxy import free_port
from tests.support.waiting import wait_until

UP_SMALL = ("--dram", "16MiB", "--port", "0", "--http-port", "0")
SIGINT_IGNORED = ("bash", "-c", 'trap "" INT; exec "$@"', "bash")  # as a shell starts the background jobs of a script


def ok_json(*args: str | Path, **settings: Any) -> dict[str, Any]:
    """The one JSON object of a command that must succeed."""
    done = run_cli(*args, "--json", **settings)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    return dict(json.loads(lines[0]))


def alive(pid: int) -> bool:
    """Whether this process still runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[Callable[..., Role]]:
    """start_up("--workers", "2", ...) starts `kvpool up --json` in a directory of its own; ended after the test."""
    roles: list[Role] = []

    def start(*args: str, wait: bool = True, **settings: Any) -> Role:
        data_dir = tmp_path / f"up-{len(roles)}"
        role = Role(["up", "--json", "--data-dir", str(data_dir), *args], log=tmp_path / f"up-{len(roles)}.log", **settings)
        roles.append(role)
        return role.wait_ready(timeout_s=60) if wait else role

    yield start
    for role in roles:
        if role.process.poll() is None:
            role.stop()
        else:
            role.kill()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One small pool that the questions below share."""
    cluster = Cluster(tmp_path_factory.mktemp("pool"), n_workers=1, dram="16MiB").start()
    yield cluster
    cluster.stop()


# --- help and usage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["", "up", "master", "worker", "demo", "replay", "status", "ls", "rm", "ns", "ns create", "config"]
)
def test_every_command_has_help(command: str) -> None:
    done = run_cli(*command.split(), "--help")
    assert done.returncode == 0 and done.stdout.startswith("Usage: ") and not done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nope"], "nope"),
        (["status", "--nope"], "--nope"),
        (["replay"], "TRACE"),
        (["replay", "t", "--workers", "0"], "workers"),
        (["replay", "t", "--dram", "five"], "--dram: "),
        (["replay", "t", "--block-bytes", "0"], "--block-bytes: "),
        (["replay", "t", "--block-bytes", "1MiB", "--dram", "1MiB", "--workers", "2"], "--dram: "),
        (["replay", "t", "--speed", "-1"], "--speed: "),
        (["replay", "t", "--policy", "magic"], "--policy: "),
        (["replay", "t", "--engine", "sim", "--speed", "2"], "--speed: "),
        (["replay", "t", "--engine", "sim", "--data-dir", "d"], "--data-dir: "),
        (["replay", "t", "--engine", "sim", "--clients", "2"], "--clients: "),
        (["worker", "--dram", "12 apples"], "dram"),
        (["worker", "--ssd", "nowhere"], "ssd"),
        (["master", "--port", "70000"], "port"),
        (["up", "--workers", "0"], "workers"),
        (["up", "--host", "0.0.0.0"], "host"),
        (["ns", "create", "a"], "--block-bytes"),
        (["ns", "create", "a", "--block-bytes", "5TiB"], "--block-bytes: "),
        (["ns", "create", "a", "--block-bytes", "4KiB", "--quota", "1KiB"], "--quota: "),
        (["ns", "create", "a", "--block-bytes", "4KiB", "--quota", "-5"], "--quota: '-5'"),
        (["ns", "create", "a", "--block-bytes", "4KiB", "--ttl", "soon"], "--ttl: 'soon'"),
        (["ns", "create", "a", "--block-bytes", "4KiB", "--hash", "md5"], "--hash: "),
        (["ns", "create", "a", "--block-bytes", "4KiB", "--replicas", "99"], "--replicas: "),
        (["ns", "create", "a", "--block-bytes", "4KiB", "--write-policy", "never"], "--write-policy: "),
        (["ns", "create", "a", "--block-bytes", "4KiB", "--read-policy", "timeout"], "--read-timeout: needed with"),
        (["ns", "create", "a", "--block-bytes", "4KiB", "--read-timeout", "5ms"], "--read-timeout: only with --"),
        (["ns", "create", "a", "--layout", "/nonexistent/layout.json"], "--layout: /nonexistent/layout.json: "),
        (["ns", "create", "a", "--layout", __file__], f"--layout: {__file__}: "),
        (["pin", "set", "a", "--all", "--level", "weak"], "--level: "),
        (["pin", "set", "a", "--all", "--ttl", "5y"], "--ttl: '5y'"),
        (["rm", "a"], "--all"),
        (["rm", "a", "beef"], "beef"),
        (["config", "show", "mater"], "mater"),
        (["config", "check", "/nonexistent/file.toml"], "/nonexistent/file.toml"),
    ],
)
def test_wrong_usage_is_status_2_and_names_what_is_wrong(args: list[str], words: str) -> None:
    done = run_cli(*args)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert words in done.stderr and "Traceback" not in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [(["--frob"], "--frob"), (["nope"], "nope"), (["status", "-x"], "-x"), (["ls"], "NAMESPACE"), (["ns", "show"], "NAME")],
)
def test_wrong_usage_is_one_json_object_too(args: list[str], words: str) -> None:
    done = run_cli(*args, "--json")
    (line,) = done.stdout.splitlines()
    error = json.loads(line)["error"]
    assert done.returncode == 2 and error["code"] == "invalid_argument" and words in error["message"]
    assert error["message"] in done.stderr and "Usage: " in done.stderr


@pytest.mark.parametrize("role", ["master", "worker"])
def test_a_role_that_cannot_start_says_so_in_json_too(role: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        args = (role, "--port", port, "--http-port", "0", "--data-dir", tmp_path)
        done, plain = run_cli(*args, "--json"), run_cli(*args)
    assert done.returncode == plain.returncode == 1 and f"kvpool {role}: port: " in plain.stderr and not plain.stdout
    (line,) = done.stdout.splitlines()
    error = json.loads(line)["error"]
    assert error["code"] == "config" and port in error["message"] and error["message"] in done.stderr


def test_a_token_file_of_a_flag_is_named_as_the_flag(tmp_path: Path) -> None:
    (tmp_path / "two").write_text("two\nlines\n")
    for name in ("absent", "two"):
        done = run_cli("status", "--token-file", tmp_path / name, "--json")
        assert done.returncode == 2 and done.stderr.startswith(f"kvpool: error: --token-file: {tmp_path / name}"), done.stderr
        assert json.loads(done.stdout)["error"]["code"] == "config"
    done = run_cli("status", env={"KVPOOL_CLIENT__TOKEN_FILE": str(tmp_path / "absent")})
    assert done.returncode == 2 and done.stderr.startswith(f"kvpool: error: token_file: {tmp_path / 'absent'}"), done.stderr


def test_an_unknown_setting_stops_the_start_and_names_the_nearest(tmp_path: Path) -> None:
    done = run_cli("worker", env={"KVPOOL_WORKER__DRAMM": "1GiB"})
    assert done.returncode == 2 and "KVPOOL_WORKER__DRAMM" in done.stderr and "KVPOOL_WORKER__DRAM?" in done.stderr
    file = tmp_path / "pool.toml"
    file.write_text('[worker]\ndramm = "1GiB"\n')
    done = run_cli("worker", "--config", file)
    assert done.returncode == 2 and str(file) in done.stderr and "dramm" in done.stderr and "dram?" in done.stderr
    assert run_cli("config", "check", file).returncode == 2


def test_a_role_has_no_threads_of_numpy() -> None:
    """It would have one for each core, with memory."""
    program = "from kvpool.cli.roles import os, start_with; start_with(None); import numpy; print(os.listdir('/proc/self/task'))"
    env = {name: value for name, value in cli_env().items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=env, check=True)
    assert done.stdout.count(",") == 0, done.stdout


def test_settings_come_from_defaults_file_environment_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text('[worker]\ndram = "2MiB"\nio_threads = 3\n')
    shown = ok_json("config", "show", "worker", "--config", file, env={"KVPOOL_WORKER__IO_THREADS": "5"})
    assert shown["settings"]["dram"] == 2 << 20 and shown["settings"]["io_threads"] == 5
    assert "pool.toml" in shown["sources"]["dram"] and "KVPOOL_WORKER__IO_THREADS" in shown["sources"]["io_threads"]
    assert ok_json("config", "check", file)["ok"] is True
    assert run_cli("config", "show", "client", env={"KVPOOL_CLIENT__TOKEN": "geheim"}).stdout.count("geheim") == 0


@pytest.mark.parametrize("command", [["status"], ["ns", "list"], ["ls", "a"], ["rm", "a", "--all", "--yes"]])
def test_a_master_that_does_not_answer_is_one_line_within_the_deadline(command: list[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    done = run_cli(*command, "--master", address, "--deadline", "1s", "--json", timeout_s=20)
    assert done.returncode == 1
    assert done.stderr.startswith("kvpool: error: ") and address in done.stderr and done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["error"]["code"] == "master_unavailable"


def test_a_silent_master_costs_the_deadline_and_not_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never says a word
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = run_cli("status", "--master", address, "--deadline", "500ms", timeout_s=10)
    assert done.returncode == 1 and done.stderr.startswith("kvpool: error: ")


# --- questions to a pool ------------------------------------------------------------------------------------------------


def test_namespaces_blocks_and_status(pool: Cluster) -> None:
    at = ("--master", pool.master_address)
    made = ok_json("ns", "create", "cli-a", "--block-bytes", "4KiB", "--hash", "external", *at)
    assert made["created"] is True and made["block_bytes"] == 4096
    assert ok_json("ns", "create", "cli-a", "--block-bytes", "4KiB", "--hash", "external", *at)["created"] is False
    again = run_cli("ns", "create", "cli-a", "--block-bytes", "4KiB", "--hash", "external", "--quota", "1MiB", *at)
    assert again.stdout == "cli-a: exists already, with this layout; it keeps its quota_bytes none\n"
    clash = run_cli("ns", "create", "cli-a", "--block-bytes", "8KiB", "--hash", "external", *at)
    assert clash.returncode == 1 and "fingerprint" in clash.stderr + clash.stdout
    assert "cli-a" in [n["name"] for n in ok_json("ns", "list", *at)["namespaces"]]

    client = kvpool.connect(pool.master_address)
    try:
        ns = client.namespace("cli-a", kvpool.KVLayout.opaque(block_bytes=4096))
        hashes = ns.hashes([bytes([i]) * 32 for i in range(3)])
        ns.put(hashes, [np.frombuffer(payload(i, 1, 4096), dtype=np.uint8) for i in range(3)])
        found = ok_json("ls", "cli-a", *at)
        assert {row["hash"] for row in found["blocks"]} == {(bytes([i]) * 32).hex() for i in range(3)}
        assert all(row["tiers"] == ["dram"] and row["copies"] == 1 and row["shard"] == 0 for row in found["blocks"])
        assert ok_json("ls", "cli-a", "--limit", "2", *at)["more"] is True
        shown = ok_json("ns", "show", "cli-a", *at)
        assert shown["blocks"] == 3 and shown["layout"]["opaque_bytes"] == 4096

        status = ok_json("status", *at)
        (worker,) = status["workers"]
        assert worker["state"] == "up" and worker["id"] == pool.worker().ready["id"]
        assert worker["tiers"]["dram"]["capacity_bytes"] == 16 << 20 and status["index"]["replicas"] >= 3
        assert {"epoch", "leader", "workers", "namespaces", "index"} <= set(status)
        (entry,) = [n for n in status["namespaces"] if n["name"] == "cli-a"]
        assert {"name", "tenant", "block_bytes", "blocks", "bytes"} <= set(entry) and entry["blocks"] == 3
        text = run_cli("status", *at).stdout
        assert "cli-a" in text and worker["id"] in text

        removed = ok_json("rm", "cli-a", (bytes([1]) * 32).hex(), (b"\xaa" * 32).hex(), *at)
        assert (removed["removed"], removed["absent"], removed["pending"]) == (1, 1, 0)
        out = np.zeros((3, 4096), dtype=np.uint8)
        assert ns.get(hashes, out).n_blocks == 1
        assert run_cli("rm", "cli-a", "--all", *at).returncode == 1  # no terminal to ask on, and no --yes
        assert ok_json("rm", "cli-a", "--all", "--yes", *at)["removed"] == 2
    finally:
        client.close()
    assert ok_json("ns", "delete", "cli-a", "--yes", *at)["deleted"] == "cli-a"
    assert "cli-a" not in [n["name"] for n in ok_json("ns", "list", *at)["namespaces"]]


def test_a_layout_is_taken_as_ns_show_prints_it(pool: Cluster, tmp_path: Path) -> None:
    at = ("--master", pool.master_address)
    file = tmp_path / "layout.json"
    ok_json("ns", "create", "cli-shown", "--block-bytes", "4KiB", *at)
    shown = ok_json("ns", "show", "cli-shown", *at)
    for given in (shown["layout"], shown):
        file.write_text(json.dumps(given))
        made = ok_json("ns", "create", "cli-shown", "--layout", file, *at)
        assert made["created"] is False and made["fingerprint"] == shown["fingerprint"]
    shown["layout"]["dtyp"] = "x"
    file.write_text(json.dumps(shown))
    done = run_cli("ns", "create", "cli-shown", "--layout", file, *at)
    assert done.returncode == 2 and done.stderr.startswith(f"kvpool: error: --layout: {file}: unknown field 'dtyp'"), done.stderr


@pytest.mark.parametrize(
    "command", [("rm", "cli-kept", "--all"), ("pin", "unset", "cli-kept", "--all"), ("ns", "delete", "cli-kept")]
)
def test_an_answer_of_no_changes_nothing_and_is_said(pool: Cluster, command: tuple[str, ...]) -> None:
    ok_json("ns", "create", "cli-kept", "--block-bytes", "4KiB", "--master", pool.master_address)
    for json_too in ([], ["--json"]):
        ours, its = pty.openpty()
        try:
            os.write(ours, b"n\n")
            arguments = [sys.executable, "-m", "kvpool.cli", *command, "--master", pool.master_address, *json_too]
            done = subprocess.run(arguments, stdin=its, capture_output=True, text=True, timeout=30, env=cli_env(), check=False)
        finally:
            os.close(ours)
            os.close(its)
        assert done.returncode == 1 and done.stderr.endswith("kvpool: nothing was changed\n"), done.stderr
        assert not done.stdout if not json_too else json.loads(done.stdout)["error"]["message"] == "nothing was changed"
    assert "cli-kept" in [n["name"] for n in ok_json("ns", "list", "--master", pool.master_address)["namespaces"]]


def test_namespaces_are_in_order_and_an_unknown_one_names_the_nearest(pool: Cluster) -> None:
    at = ("--master", pool.master_address)
    ok_json("ns", "create", "cli-near", "--block-bytes", "4KiB", *at)
    ok_json("ns", "create", "cli-last", "--block-bytes", "4KiB", *at)
    ok_json("ns", "create", "cli-early", "--block-bytes", "4KiB", *at)
    names = [entry["name"] for entry in ok_json("status", *at)["namespaces"]]
    assert names == sorted(names)
    for command in (["ls"], ["ns", "show"], ["rm", "--all", "--yes"], ["ns", "delete", "--yes"]):
        done = run_cli(*command, "cli-neat", *at)
        assert done.returncode == 1 and "cli-neat" in done.stderr and "cli-near" in done.stderr, done.stderr


def test_output_to_a_closed_pipe_is_no_traceback(pool: Cluster) -> None:
    command = f"{sys.executable} -m kvpool.cli config show worker | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, env=cli_env(), check=False)
    assert "Traceback" not in done.stderr


def test_the_examples_of_the_readme_run(pool: Cluster) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text().replace("127.0.0.1:7400", pool.master_address)
    first, coroutines, within = [part.split("```")[0] for part in readme.split("```python\n")[1:]]
    program = first + textwrap.indent(within, "    ") + coroutines
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=cli_env(), check=False)
    assert done.returncode == 0, done.stderr
    stored, got, matched = done.stdout.splitlines()
    assert stored == str(["stored"] * 4) and got.startswith("4 None Source(") and matched == "4"


# --- up -----------------------------------------------------------------------------------------------------------------


def test_up_serves_says_so_and_ends_with_all_that_it_started(start_up: Callable[..., Role], tmp_path: Path) -> None:
    up = start_up("--workers", "2", "--ssd", f"{tmp_path / 'ssd'}:16MiB", *UP_SMALL)
    ready = up.ready
    assert [p["role"] for p in ready["processes"]] == ["master", "worker", "worker"] and ready["master"] and ready["http"]
    assert sorted(p.name for p in (tmp_path / "ssd").iterdir()) == ["worker-0", "worker-1"]
    status = ok_json("status", "--master", ready["master"])
    assert [w["state"] for w in status["workers"]] == ["up", "up"]
    assert status["namespaces"] == []  # the probe's own is gone
    pids = [p["pid"] for p in ready["processes"]]
    assert children_of(up.pid) == set(pids)
    assert up.stop() == 0
    assert not any(alive(pid) for pid in pids)
    assert "Traceback" not in up.log_text()


def test_an_unknown_variable_is_said_once_as_a_log_line(start_up: Callable[..., Role]) -> None:
    up = start_up("--workers", "2", *UP_SMALL, env={"KVPOOL_SOMETHING_ELSE": "1"})
    (line,) = [line for line in up.log_text().splitlines() if "KVPOOL_SOMETHING_ELSE" in line]
    told = "level=WARNING role={} at=kvpool.config event=unknown_variable name=KVPOOL_SOMETHING_ELSE"
    assert line.startswith("ts=") and line.endswith(told.format("up"))
    done = run_cli("status", "--master", up.ready["master"], env={"KVPOOL_SOMETHING_ELSE": "1"})
    assert done.returncode == 0 and done.stderr.startswith("ts=") and done.stderr.endswith(told.format("status") + "\n")


AT_IMPORT = """
import os, signal, sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "typer.core":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, CtrlC())
"""


def test_ctrl_c_while_a_command_is_loaded_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    path = os.pathsep.join(filter(None, (str(tmp_path), cli_env().get("PYTHONPATH"))))
    done = run_cli("status", env={"PYTHONPATH": path})
    assert done.returncode == -signal.SIGINT and not done.stderr and not done.stdout


def test_ctrl_c_ends_up_cleanly(start_up: Callable[..., Role]) -> None:
    up = start_up(*UP_SMALL)
    up.signal(signal.SIGINT)
    assert up.process.wait(timeout=20) == 0
    assert not any(alive(p["pid"]) for p in up.ready["processes"])


def test_sigint_ends_what_was_started_with_it_ignored(start_up: Callable[..., Role], tmp_path: Path) -> None:
    """As background jobs of a script are."""
    up = start_up(*UP_SMALL, prefix=SIGINT_IGNORED)
    up.signal(signal.SIGINT)
    assert up.process.wait(timeout=20) == 0
    demo = Role(["demo"], log=tmp_path / "demo.log", env={"TMPDIR": str(tmp_path)}, prefix=SIGINT_IGNORED)
    try:
        wait_until(lambda: len(children_of(demo.pid)) == 3, timeout_s=30, what="a master and two workers")
        demo.signal(signal.SIGINT)
        assert demo.process.wait(timeout=30) == 1
    finally:
        demo.kill()
    assert "interrupted" in demo.log_text()


def test_kill_9_of_up_takes_the_whole_tree(start_up: Callable[..., Role]) -> None:
    up = start_up("--workers", "2", *UP_SMALL)
    up.kill()
    wait_until(lambda: not any(alive(p["pid"]) for p in up.ready["processes"]), timeout_s=5, what="the roles' end")


@pytest.mark.parametrize("index", [0, 1])
def test_a_role_that_dies_is_started_again_and_said_so(start_up: Callable[..., Role], index: int) -> None:
    up = start_up(*UP_SMALL)
    dead = up.ready["processes"][index]
    os.kill(dead["pid"], signal.SIGKILL)
    wait_until(lambda: "is ready again" in up.log_text(), timeout_s=30, what="ready again")
    assert f"(pid {dead['pid']}) was ended by SIGKILL; starting it again" in up.log_text()
    assert len(children_of(up.pid)) == 2 and dead["pid"] not in children_of(up.pid)

    def served() -> bool:
        with kvpool.connect(up.ready["master"]) as client:
            ns = client.namespace("again", kvpool.KVLayout.opaque(block_bytes=4096), create=True, hash="external")
            hashes, out = ns.hashes([os.urandom(32)]), np.zeros((1, 4096), dtype=np.uint8)
            ns.put(hashes, out + 7)
            return ns.get(hashes, out).n_blocks == 1 and bool((out == 7).all())

    wait_until(served, timeout_s=20, what="a put and a get after the restart")


def test_up_gives_up_at_once_when_a_role_cannot_start(start_up: Callable[..., Role]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = start_up("--port", str(port), "--http-port", "0", "--dram", "16MiB", wait=False)
        assert up.process.wait(timeout=30) == 1
    assert str(port) in up.log_text() and "kvpool: error: master" in up.log_text() and "Traceback" not in up.log_text()
    assert json.loads(up.read_line(timeout_s=5))["error"]


def test_up_on_another_address_needs_a_token_and_serves_with_it(start_up: Callable[..., Role], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("two\nlines\n")
    assert run_cli("up", "--token-file", token, "--data-dir", tmp_path / "x", *UP_SMALL, timeout_s=30).returncode == 1
    token.write_text("sesame\n")
    up = start_up("--host", "0.0.0.0", "--advertise", "127.0.0.1", "--token-file", str(token), *UP_SMALL)
    assert run_cli("status", "--master", up.ready["master"]).returncode == 1
    assert len(ok_json("status", "--master", up.ready["master"], "--token-file", token)["workers"]) == 1


# --- demo ---------------------------------------------------------------------------------------------------------------


def test_demo_serves_from_both_tiers_without_a_wrong_byte(tmp_path: Path) -> None:
    done = run_cli("demo", timeout_s=110, env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    for words in ("hit rate", "from dram", "from ssd", "0 corrupt blocks, 0 errors", "GB/s"):
        assert words in done.stdout, done.stdout
    rate = re.search(r"hit rate +([0-9.]+)% \(([0-9]+) of ([0-9]+) blocks\)", done.stdout)
    assert rate and float(rate[1]) == pytest.approx(100 * int(rate[2]) / int(rate[3]), abs=0.06), done.stdout
    assert len(done.stdout.splitlines()) <= 24
    assert not list(tmp_path.glob("kvpool-*"))  # its directory is gone


def test_demo_interrupted_leaves_nothing(tmp_path: Path) -> None:
    demo = Role(["demo"], log=tmp_path / "demo.log", env={"TMPDIR": str(tmp_path)})
    try:
        wait_until(lambda: len(children_of(demo.pid)) == 3, timeout_s=30, what="a master and two workers")
        pids = children_of(demo.pid)
        demo.signal(signal.SIGINT)
        assert demo.process.wait(timeout=30) == 1
    finally:
        demo.kill()
    assert "interrupted" in demo.log_text() and "Traceback" not in demo.log_text()
    assert not any(alive(pid) for pid in pids) and not list(tmp_path.glob("kvpool-*"))
