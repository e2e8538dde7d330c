"""A pool on this machine as child processes: one master and N workers. Used by `up`, `replay` and `demo`.

Owns starting, readiness, stopping and the probe. When a role that died is started again is decided in `up`.
Children get SIGKILL from the kernel when this process dies, and live in sessions of their own, so that Ctrl-C on the terminal
reaches this process alone and it ends them in order: workers first, while the master is there for their leave.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvpool.cli.common import client_settings, token_of
from kvpool.errors import KVPoolError

DEFAULT_HOST = "127.0.0.1"
READY_TIMEOUT_S = 60.0  # adopting a large SSD tier takes a while
PROBE_TIMEOUT_S = 20.0
PROBE_BYTES = 512
KILL_AFTER_S = 5.0  # past a role's own drain timeout
READY_LINE_BYTES_MAX = 65_536
TAIL_BYTES = 2_000


@dataclass(frozen=True)
class PoolPlan:
    """What to start. `ssd_bytes` and `dram_bytes` are each worker's; ports 0: any free one."""

    n_workers: int
    dram_bytes: int
    data_dir: Path
    ssd_dir: Path | None = None
    ssd_bytes: int = 0
    policy: str = ""
    policy_clock: Path | None = None
    port: int = 0
    http_port: int = 0
    host: str = DEFAULT_HOST
    http_host: str = DEFAULT_HOST
    advertise: str = ""
    token_file: str = ""
    insecure: bool = False
    config: Path | None = None
    drain_timeout_ms: int = 10_000

    def master_args(self) -> list[str]:
        """Command line of the master."""
        ports = ["--port", str(self.port), "--http-port", str(self.http_port)]
        return ["master", *ports, "--data-dir", str(self.data_dir / "master"), *self._common()]

    def worker_args(self, index: int, *, master: str) -> list[str]:
        """Command line of worker `index`."""
        args = ["worker", "--master", master, "--dram", str(self.dram_bytes), "--port", "0", "--http-port", "0"]
        args += ["--data-dir", str(self.data_dir / f"worker-{index}"), *self._common()]
        args += ["--policy", self.policy] if self.policy else []
        if self.ssd_dir is not None:
            args += ["--ssd", f"{self.ssd_dir / f'worker-{index}'}:{self.ssd_bytes}"]
        return args

    def _common(self) -> list[str]:
        args = ["--host", self.host, "--drain-timeout", f"{self.drain_timeout_ms}ms"]
        args += ["--advertise", self.advertise] if self.advertise else []
        args += ["--token-file", self.token_file] if self.token_file else []
        args += ["--insecure"] if self.insecure else []
        return args + (["--config", str(self.config)] if self.config else [])


class RoleProcess:
    """One role as a child: spawn, ready line, end. Not thread-safe; the spawning thread must outlive the child (PDEATHSIG)."""

    def __init__(self, name: str, args: list[str], *, env: dict[str, str] | None = None, log: Path | None = None) -> None:
        self.name = name
        self.args = args
        self.ready: dict[str, Any] = {}
        self._env = env
        self._log = log
        self._popen: subprocess.Popen[bytes] | None = None
        self._line = b""

    def spawn(self) -> None:
        """Start it (again); the ready line of before is forgotten. Standard error goes to the log file, else is inherited."""
        self.close()
        self.ready, self._line = {}, b""
        command = [sys.executable, "-m", "kvpool.cli", *self.args, "--parent-pid", str(os.getpid())]
        with contextlib.ExitStack() as stack:
            stderr: IO[bytes] | None = None if self._log is None else stack.enter_context(self._log.open("ab"))
            stack.enter_context(_uninterrupted())  # else a process that has just begun would be known to nobody
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **(self._env or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return 0 if self._popen is None else self._popen.pid

    def exit_status(self) -> int | None:
        """None while it runs (or was never started); a negative number is a signal's."""
        return None if self._popen is None else self._popen.poll()

    def read_ready(self, *, timeout_s: float) -> bool:
        """True when the ready line has come, waiting at most `timeout_s` for more of it."""
        if self.ready:
            return True
        stdout = None if self._popen is None else self._popen.stdout
        if stdout is None or not select.select([stdout], [], [], timeout_s)[0]:
            return False
        data = os.read(stdout.fileno(), READY_LINE_BYTES_MAX)
        if not data:  # it is ending
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._wait(timeout_s)
            return False
        self._line += data
        line, newline, _ = self._line.partition(b"\n")
        if newline:
            try:
                ready = json.loads(line)
            except ValueError:
                ready = {}
            if not isinstance(ready, dict) or ready.get("ready") is not True:
                raise KVPoolError(f"{self.name}: printed {line[:200]!r} and not that it is ready")
            self.ready = ready
        return bool(self.ready)

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.send_signal(number)

    def end(self, *, deadline: float) -> int:
        """Wait for its end until `deadline` (monotonic s), then kill it. Its exit status."""
        if self._popen is None:
            return 0
        try:
            self._wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._wait(None)
        self.close()
        return int(self._popen.returncode)

    def close(self) -> None:
        """Give back the pipe."""
        if self._popen is not None and self._popen.stdout is not None:
            self._popen.stdout.close()

    def log_tail(self) -> str:
        """The last lines of its log, where it has one of its own."""
        if self._log is None or not self._log.exists():
            return ""
        return self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()

    def _wait(self, timeout_s: float | None) -> None:
        assert self._popen is not None
        self._popen.wait(timeout_s)


class Pool:
    """The processes of one plan. `logs`: directory for their standard error; None: they share this process's."""

    def __init__(self, plan: PoolPlan, *, logs: Path | None = None) -> None:
        self.plan = plan
        self._logs = logs
        self.master = self._role("master", plan.master_args())
        self.workers: list[RoleProcess] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def roles(self) -> list[RoleProcess]:
        return [self.master, *self.workers]

    @property
    def address(self) -> str:
        """host:port of the master, as reached from this machine."""
        host, _, port = str(self.master.ready["address"]).rpartition(":")
        return f"{'127.0.0.1' if host in ('0.0.0.0', '[::]', '::') else host}:{port}"

    def processes(self) -> list[dict[str, Any]]:
        """Role, id, pid, address and http of each, as `kvpool up --json` prints them."""
        return [{key: role.ready.get(key) for key in ("role", "id", "pid", "address", "http")} for role in self.roles]

    def start(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start the master, then all workers at once; KVPoolError naming the role that ended or was not ready in time."""
        deadline = time.monotonic() + timeout_s
        self.plan.data_dir.mkdir(parents=True, exist_ok=True)
        self.master.spawn()
        wait_ready(self.master, deadline=deadline)
        self.master.args = _with_port(self.master.args, self.master.ready)  # started again, it is found where it was
        for index in range(self.plan.n_workers):
            worker = self._role(f"worker-{index}", self.plan.worker_args(index, master=self.address))
            self.workers.append(worker)
            worker.spawn()
        for worker in self.workers:
            wait_ready(worker, deadline=deadline)

    def stop(self) -> None:
        """End all: workers first. A role that does not end in its drain timeout is killed."""
        grace_s = self.plan.drain_timeout_ms / 1000 + KILL_AFTER_S
        for group in (self.workers, [self.master]):
            for role in group:
                role.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            for role in group:
                role.end(deadline=deadline)

    def _role(self, name: str, args: list[str]) -> RoleProcess:
        env = {}  # no flag for this one; the default leaves a config file its say
        if self.plan.policy_clock is not None and name != "master":
            env["KVPOOL_WORKER__POLICY_CLOCK"] = str(self.plan.policy_clock)
        if self.plan.http_host != DEFAULT_HOST:
            env[f"KVPOOL_{name.partition('-')[0].upper()}__HTTP_HOST"] = self.plan.http_host
        log = None if self._logs is None else self._logs / f"{name}.log"
        return RoleProcess(name, args, env=env, log=log)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM that would raise in the main thread do so afterwards."""
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)
    for one in came:
        signal.raise_signal(one)


def wait_ready(role: RoleProcess, *, deadline: float) -> None:
    """Returns when `role` is ready; KVPoolError when it ended or the time is up."""
    while not role.read_ready(timeout_s=0.2):
        status = role.exit_status()
        if status is not None:
            tail = role.log_tail()
            raise KVPoolError(f"{role.name} {words_of(status)} before it was ready" + (f": {_reason(tail)}" if tail else ""))
        if time.monotonic() > deadline:
            raise KVPoolError(f"{role.name} (pid {role.pid}) was not ready in time")


def words_of(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


def _reason(log_tail: str) -> str:
    """The role's own error line, or the last line that it wrote."""
    lines = log_tail.splitlines()
    errors = [line.removeprefix("kvpool: error: ") for line in lines if line.startswith("kvpool")]
    return (errors or lines)[-1]


def _with_port(args: list[str], ready: dict[str, Any]) -> list[str]:
    """Arguments with the ports that the first start got."""
    args = list(args)
    for option, key in (("--port", "address"), ("--http-port", "http")):
        port = str(ready.get(key) or "").rpartition(":")[2].strip("/")
        if port.isdigit() and option in args:
            args[args.index(option) + 1] = port
    return args


def probe(address: str, *, n_workers: int, token_file: str = "", timeout_s: float = PROBE_TIMEOUT_S) -> None:
    """Returns when every worker is known to the master and a put and a get through a real client have just succeeded.

    Leaves nothing: its namespace is deleted. KVPoolError with the last failure when the time is up.
    """
    import numpy as np

    import kvpool
    from kvpool.cli.ask import master_at
    from kvpool.v1 import master_pb2 as pb

    deadline = time.monotonic() + timeout_s
    path = Path(token_file) if token_file else None
    token = token_of(client_settings(address, path))
    name = f"kvpool-probe-{secrets.token_hex(8)}"
    want = np.frombuffer(secrets.token_bytes(PROBE_BYTES), dtype=np.uint8).reshape(1, -1)
    failure = "no try was made"
    with master_at(address, token_file=path) as asked, kvpool.connect(address, token=token or None) as client:
        while time.monotonic() < deadline:
            try:
                up = [w for w in asked.call("Describe", pb.DescribeRequest()).workers if w.info.state == 1]
                if len(up) < n_workers:
                    failure = f"{len(up)} of {n_workers} workers are up"
                    time.sleep(0.05)
                    continue
                layout = kvpool.KVLayout.opaque(block_bytes=PROBE_BYTES, name="kvpool-probe")
                space = client.namespace(name, layout, create=True, hash="external")
                try:
                    hashes = space.hashes([secrets.token_bytes(32)])
                    put = space.put(hashes, want)
                    got_bytes = np.zeros_like(want)
                    got = space.get(hashes, got_bytes)
                finally:
                    asked.call("DeleteNamespace", pb.DeleteNamespaceRequest(name=name))
                if got.n_blocks == 1 and np.array_equal(got_bytes, want):
                    return
                reason = f" ({put.reasons[0]})" if put.reasons[0] else ""
                failure = f"put said {put.outcomes[0].value}{reason}, get said {got.miss.value if got.miss else 'other bytes'}"
            except KVPoolError as error:
                failure = str(error)
            time.sleep(0.05)
    raise KVPoolError(f"the pool did not serve a put and a get within {timeout_s:.0f} s: {failure}")
