"""A pool for chaos: masters on one Redis (or one on LMDB), workers with SSD tiers, a relay before every port, one small disk.

Roles listen on 127.0.0.1 and advertise 127.0.0.2, where a relay listens at the same port: so every client and every worker comes
by way of it, also after a redirect to the leader, and a role keeps its addresses over restarts.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

from tests.support.observe import metrics
from tests.support.processes import Role
from tests.support.proxy import TcpProxy, free_port
from tests.support.redis import RedisServer

MIB = 1 << 20
HERE, THERE = "127.0.0.1", "127.0.0.2"
STOP_S = 20.0


class RoughPool:
    """`n_masters` 1: no Redis. `disk`: a worker whose SSD directory is a tmpfs of its own, None where none can be mounted."""

    def __init__(self, directory: Path, *, n_workers: int = 3, n_masters: int = 2, dram: str = "8MiB", ssd_bytes: int = 32 * MIB,
                 worker_env: dict[str, str] | None = None) -> None:  # fmt: skip
        self.directory, self.dram, self.ssd_bytes, self.worker_env = directory, dram, ssd_bytes, worker_env or {}
        self.redis = RedisServer(directory / "redis") if n_masters > 1 else None
        self.master_ports = [free_port() for _ in range(n_masters)]
        self.worker_ports = [free_port() for _ in range(n_workers)]
        self.masters: list[Role] = []
        self.workers: list[Role] = []
        self.master_links: list[TcpProxy] = []
        self.data_links: list[TcpProxy] = []
        self.disk: int | None = None
        self.corrupt: dict[int, float] = {}  # by process: copies that were found bad

    @property
    def addresses(self) -> str:
        """Of the masters, as clients and workers are told."""
        return ",".join(f"{THERE}:{port}" for port in self.master_ports)

    def start(self) -> RoughPool:
        if self.redis is not None:
            self.redis.start()
        self.master_links = [_relay(port) for port in self.master_ports]
        self.data_links = [_relay(port) for port in self.worker_ports]
        self._mount()
        self.masters = [self._master(i) for i in range(len(self.master_ports))]
        for master in self.masters:
            master.wait_ready()
        self.workers = [self._worker(i) for i in range(len(self.worker_ports))]
        for worker in self.workers:
            worker.wait_ready()
        return self

    def _master(self, i: int) -> Role:
        args = ["master", "--port", str(self.master_ports[i]), "--http-port", "0", "--advertise", THERE]
        args += ["--data-dir", str(self.directory / f"master-{i}"), "--parent-pid", str(os.getpid())]
        if self.redis is not None:
            args += ["--store", self.redis.url()]
        return Role(args, log=self.directory / f"master-{i}.log")

    def _worker(self, i: int) -> Role:
        args = ["worker", "--master", self.addresses, "--port", str(self.worker_ports[i]), "--http-port", "0"]
        args += ["--advertise", THERE, "--dram", self.dram, "--ssd", f"{self.ssd_dir(i)}:{self.ssd_bytes}"]
        args += ["--drain-timeout", "1s", "--data-dir", str(self.directory / f"worker-{i}"), "--parent-pid", str(os.getpid())]
        return Role(args, log=self.directory / f"worker-{i}.log", env=self.worker_env)

    def restart_master(self, i: int) -> Role:
        self.masters[i] = self._master(i)
        return self.masters[i].wait_ready()

    def restart_worker(self, i: int) -> Role:
        self.workers[i] = self._worker(i)
        return self.workers[i].wait_ready()

    def ssd_dir(self, i: int) -> Path:
        return self.directory / f"ssd-{i}"

    # --- disks

    def _mount(self) -> None:
        """Worker 0's SSD directory gets a file system that its tier can just fill."""
        where = self.ssd_dir(0)
        where.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={self.ssd_bytes}", "kvpool-chaos", str(where)]
        with contextlib.suppress(OSError):
            if subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0:
                self.disk = 0

    def fill_disk(self) -> None:
        """Nothing more fits on the small disk."""
        with (self.ssd_dir(0) / "hog").open("wb") as hog:
            free = shutil.disk_usage(self.ssd_dir(0)).free
            with contextlib.suppress(OSError):
                os.posix_fallocate(hog.fileno(), 0, max(1, free))

    def free_disk(self) -> None:
        (self.ssd_dir(0) / "hog").unlink(missing_ok=True)

    def flip_bits(self, i: int, n: int, chance: random.Random) -> int:
        """Flips bits at random places of a worker's slab files, headers and tables among them. -> how many."""
        files = sorted(self.ssd_dir(i).glob("slab-*.kv"))
        flipped = 0
        for _ in range(n if files else 0):
            with contextlib.suppress(OSError), chance.choice(files).open("r+b", buffering=0) as file:
                at = chance.randrange(os.fstat(file.fileno()).st_size)
                byte = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << chance.randrange(8)]), at)
                flipped += 1
        return flipped

    # --- what they say

    def note_corrupt(self, i: int) -> None:
        """Keeps what a worker has counted, before it is gone."""
        with contextlib.suppress(OSError, AssertionError):
            told = metrics(self.workers[i])
            self.corrupt[self.workers[i].pid] = sum(
                told[f'kvpool_block_events_total{{event="corrupt_{tier}"}}'] for tier in ("dram", "ssd")
            )

    def troubles(self) -> list[str]:
        """Tracebacks in any role's log, and roles that are not there any more."""
        found = []
        for role in [*self.masters, *self.workers]:
            if "Traceback" in role.log_text():
                at = role.log_text().index("Traceback")
                found.append(f"{role.log.name}: {role.log_text()[max(0, at - 200) : at + 1500]}")
            if role.process.poll() is not None:
                found.append(f"{role.log.name}: ended with {role.process.returncode}")
        return found

    # --- end

    def stop(self) -> list[str]:
        """Ends everything, workers first. -> what did not end as it should."""
        found = []
        for roles in (self.workers, self.masters):
            for role in roles:
                role.resume()
                role.signal(signal.SIGTERM)
            for role in roles:
                try:
                    status = role.process.wait(STOP_S)
                    if status:
                        found.append(f"{role.log.name}: ended with {status}")
                except subprocess.TimeoutExpired:
                    found.append(f"{role.log.name}: still there {STOP_S} s after SIGTERM")
                role.kill()
        for link in [*self.master_links, *self.data_links]:
            link.close()
        if self.redis is not None:
            self.redis.stop()
        if self.disk is not None:
            subprocess.run(["umount", str(self.ssd_dir(0))], capture_output=True, timeout=30, check=False)
        return found


def _relay(port: int) -> TcpProxy:
    return TcpProxy(f"{HERE}:{port}", listen=f"{THERE}:{port}")
