"""Real redis servers for tests: one, with replicas, under Sentinel, or as a Cluster of one. Ports from the OS, ended by pid.

`redis-server` is Debian's; where it is missing it is installed with apt-get, which is said on standard error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.proxy import free_port
from tests.support.waiting import wait_until

INSTALL_S = 180
READY_S = 10.0
STOP_S = 10.0


def redis_server() -> str:
    """The program's path, installed when it is missing. RuntimeError saying how to get it when that fails."""
    found = shutil.which("redis-server")
    if found:
        return found
    print("tests: redis-server is missing; installing Debian's package redis-server", file=sys.stderr, flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "redis-server"]
    for command in (install, ["apt-get", "update", "-qq"], install):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, env=env, check=False, timeout=INSTALL_S, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        found = shutil.which("redis-server")
        if found:
            return found
    raise RuntimeError("redis-server cannot be installed here: run `apt-get install redis-server` as root, then the tests again")


class RedisServer:
    """One redis-server (or Sentinel) on 127.0.0.1. Started again it has its port and data; writes are synced before the reply."""

    def __init__(self, directory: Path, *options: str, config: str = "", sentinel: bool = False) -> None:
        self.directory = directory
        self.port = free_port()
        self.options = list(options)
        self._config = config
        self._sentinel = sentinel
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def url(self, *, password: str = "", db: int = 0, options: str = "") -> str:
        secret = f":{password}@" if password else ""
        return f"redis://{secret}{self.address}/{db}{options}"

    def start(self) -> RedisServer:
        """Listening when it returns."""
        command = [redis_server()]
        if self._config:
            file = self.directory / "redis.conf"
            if not file.exists():
                file.write_text(self._config)
            command.append(str(file))
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        if self._sentinel:
            command.append("--sentinel")
        else:
            command += ["--save", "", "--appendonly", "yes", "--appendfsync", "always", "--repl-diskless-sync-delay", "0"]
        command += self.options
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._answers, timeout_s=READY_S, what=f"redis on {self.address}; log: {self.directory / 'log'}")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "log").read_text(errors="replace")[-2000:]
        with contextlib.suppress(OSError):
            return not self.command("PING").startswith(b"-LOADING")
        return False

    def command(self, *words: str | bytes, timeout_s: float = 2.0) -> bytes:
        """One command on a connection of its own; the raw reply, as far as one read brings it."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as sock:
            raw = [word if isinstance(word, bytes) else word.encode() for word in words]
            sock.sendall(b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in raw))
            return sock.recv(1 << 20)

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=STOP_S)

    def stop(self) -> None:
        """To the end, whatever state it is in."""
        if self._process is None or self._process.poll() is not None:
            return
        self.thaw()
        self._process.terminate()
        try:
            self._process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()


def replica_of(primary: RedisServer, directory: Path) -> RedisServer:
    """A started replica that is in step with `primary`."""
    replica = RedisServer(directory, "--replicaof", f"127.0.0.1 {primary.port}").start()
    up = b"master_link_status:up"  # "online" at the primary is said while the replica still loads
    wait_until(lambda: up in replica.command("INFO", "replication"), timeout_s=READY_S, what="replica in step")
    wait_until(lambda: b"state=online" in primary.command("INFO", "replication"), timeout_s=READY_S, what="replica online")
    return replica


def sentinel_for(primary: RedisServer, replica: RedisServer, directory: Path, *, service: str = "pool") -> RedisServer:
    """A started Sentinel that watches `primary` alone (quorum 1) and has a link to its replica."""
    down_after_ms = 500
    config = (
        f"sentinel monitor {service} 127.0.0.1 {primary.port} 1\n"
        f"sentinel known-replica {service} 127.0.0.1 {replica.port}\n"
        f"sentinel down-after-milliseconds {service} {down_after_ms}\n"
        f"sentinel failover-timeout {service} 5000\n"
    )
    sentinel = RedisServer(directory, config=config, sentinel=True).start()
    ok = b"master-link-status\r\n$2\r\nok"
    wait_until(lambda: ok in sentinel.command("SENTINEL", "REPLICAS", service), what="Sentinel has asked the replica")
    return sentinel


def cluster_of_one(directory: Path) -> RedisServer:
    """A started Cluster whose one node has all slots."""
    server = RedisServer(directory, "--cluster-enabled", "yes").start()
    server.command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
    wait_until(lambda: b"cluster_state:ok" in server.command("CLUSTER", "INFO"), timeout_s=READY_S, what="cluster ok")
    return server
