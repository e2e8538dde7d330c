"""Roles as real processes: start, wait for the ready line, signal by pid, stop."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

READY_S = 60.0
STOP_S = 20.0


def cli_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without any KVPOOL_ setting and proxies, plus `extra`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL_") and not k.lower().endswith("_proxy")}
    env["PYTHONUNBUFFERED"] = "1"
    env.update(extra or {})
    return env


def run_cli(
    *args: str | Path, timeout_s: float = 60.0, env: Mapping[str, str] | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """`kvpool args...` to its end; standard output and error as text."""
    command = [sys.executable, "-m", "kvpool.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=cli_env(env), check=False, input=stdin)


class Role:
    """One `kvpool master|worker|up ...` process of a test. `ready` is its ready line."""

    def __init__(
        self, args: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        """`prefix`: words before the command, of a program that sets something up and then becomes it (exec)."""
        self.args = list(args)
        self.log = log
        self._stderr = log.open("ab")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "kvpool.cli", *self.args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=cli_env(env),
        )
        self.ready: dict[str, Any] = {}
        self._tail = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def http(self) -> str:
        return str(self.ready["http"])

    def log_text(self) -> str:
        """Its standard error so far."""
        return self.log.read_text(errors="replace")

    def read_line(self, *, timeout_s: float) -> bytes:
        """The next line of its standard output; b"" at the end of it."""
        end = time.monotonic() + timeout_s
        stdout = self.process.stdout
        assert stdout is not None
        while b"\n" not in self._tail:
            left = end - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise AssertionError(f"{self.args}: no line within {timeout_s} s; log:\n{self.log_text()[-4000:]}")
            data = os.read(stdout.fileno(), 65536)
            if not data:
                break
            self._tail += data
        line, newline, self._tail = self._tail.partition(b"\n")
        return line + newline

    def wait_ready(self, *, timeout_s: float = READY_S) -> Role:
        """Read the ready line; AssertionError with the log's end when it does not come."""
        line = self.read_line(timeout_s=timeout_s)
        if not line:
            self.process.wait(timeout=timeout_s)
            raise AssertionError(f"{self.args}: ended with {self.process.returncode}; log:\n{self.log_text()[-4000:]}")
        self.ready = json.loads(line)
        assert self.ready.get("ready") is True, self.ready
        return self

    def has_spoken(self) -> bool:
        """Whether output waits to be read (at first: the ready line). Never waits."""
        stdout = self.process.stdout
        return bool(self._tail) or (stdout is not None and bool(select.select([stdout], [], [], 0)[0]))

    def signal(self, number: int) -> None:
        """Send a signal by pid; nothing when the process has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP: alive, and answers nothing. Returns when the last of its threads has stopped."""
        self.signal(signal.SIGSTOP)
        end = time.monotonic() + STOP_S
        while self.process.poll() is None and not all(state == "T" for state in self._thread_states()):
            assert time.monotonic() < end, f"{self.args}: SIGSTOP did not stop it"
            os.sched_yield()

    def _thread_states(self) -> list[str]:
        states = []
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                states.append(stat.read_text().rpartition(")")[2].split()[0])
        return states

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.signal(signal.SIGKILL)
        self.process.wait(timeout=STOP_S)
        self._close()

    def stop(self, *, timeout_s: float = STOP_S) -> int:
        """SIGTERM and wait; the exit status. Past the deadline it is killed and the test fails."""
        self.tell_stop()
        return self.wait_stopped(timeout_s=timeout_s)

    def tell_stop(self) -> None:
        """SIGTERM, also to one that was paused."""
        self.resume()
        self.signal(signal.SIGTERM)

    def wait_stopped(self, *, timeout_s: float = STOP_S) -> int:
        """The exit status of one that was told to stop. Past the deadline it is killed and the test fails."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            log = self.log_text()[-4000:]
            raise AssertionError(f"{self.args}: still there {timeout_s} s after SIGTERM; log:\n{log}") from None
        finally:
            self._close()

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._stderr.close()
