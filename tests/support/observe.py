"""What a running role says about itself and what the system says about it: metrics, descriptors, threads, memory, ports."""

from __future__ import annotations

import contextlib
import http.client
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.processes import Role


def http_get(role: Role, path: str, *, timeout_s: float = 5.0) -> tuple[int, str]:
    """Status and body of a GET on the role's HTTP port."""
    host, _, port = role.http.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def metrics(role: Role) -> dict[str, float]:
    """All metrics by name with labels, as exposed: 'kvpool_blocks_now{what="holds"}'."""
    status, text = http_get(role, "/metrics")
    assert status == 200, text
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def now(role: Role, what: str) -> float:
    """A present value of a worker's block table: holds, held_dram_bytes, reserved, ..."""
    return metrics(role)[f'kvpool_blocks_now{{what="{what}"}}']


@dataclass(frozen=True)
class Usage:
    fds: int
    threads: int
    rss: int
    memfd_bytes: int  # pages that are there of the memfds that it has open


def usage(role: Role) -> Usage:
    """Of the process, now."""
    process = psutil.Process(role.pid)
    return Usage(process.num_fds(), process.num_threads(), process.memory_info().rss, _memfd_bytes(role.pid))


def _memfd_bytes(pid: int) -> int:
    seen: dict[int, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("/memfd:"):
                stat = os.stat(entry)  # noqa: PTH116
                seen[stat.st_ino] = stat.st_blocks * 512
    return sum(seen.values())


def half_closed(role: Role) -> int:
    """TCP sockets whose peer has closed and that the role keeps."""
    return sum(c.status == psutil.CONN_CLOSE_WAIT for c in psutil.Process(role.pid).net_connections(kind="tcp"))


def listening(role: Role) -> list[str]:
    """Every address that the process listens on: "host:port", and "@name" of abstract unix sockets."""
    process = psutil.Process(role.pid)
    found = [f"{c.laddr.ip}:{c.laddr.port}" for c in process.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN]
    inodes = set()
    for entry in Path(f"/proc/{role.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) == 8 and int(words[3], 16) & 0x10000 and f"socket:[{words[6]}]" in inodes:
            found.append(words[7])
    return found
