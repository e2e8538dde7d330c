"""One master and n workers as real processes, with restarts on the same directories."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.processes import Role
from tests.support.proxy import free_port


class Cluster:
    """A pool of a test. Sizes as the command line takes them; `ssd` is each worker's, in `worker-<i>/ssd` under `directory`."""

    def __init__(
        self,
        directory: Path,
        *,
        n_workers: int = 1,
        dram: str = "64MiB",
        ssd: str | None = None,
        master_args: tuple[str, ...] = (),
        worker_args: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        worker_prefix: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self.n_workers, self.dram, self.ssd = n_workers, dram, ssd
        self.master_args, self.worker_args, self.env = master_args, worker_args, dict(env or {})
        self.worker_prefix = worker_prefix
        self.master: Role | None = None
        self.workers: list[Role | None] = [None] * n_workers
        self.master_address = ""
        self.worker_master: list[str] = [""] * n_workers  # where worker i is told the master is (a relay); empty: the master
        self._clients: list[Any] = []

    def start(self) -> Cluster:
        """Start the master, then all workers at once; returns when each has printed its ready line."""
        self.start_master()
        for i in range(self.n_workers):
            self.workers[i] = self._spawn_worker(i)
        for worker in self.workers:
            assert worker is not None
            worker.wait_ready()
        return self

    def start_master(self) -> Role:
        """Start (again) the master: same directory, same port."""
        port = self.master_address.rpartition(":")[2] or str(free_port())
        data_dir = self.directory / "master"
        args = ["master", "--port", port, "--http-port", "0", "--data-dir", str(data_dir), *self.master_args]
        self.master = Role([*args, "--parent-pid", str(os.getpid())], log=self.directory / "master.log", env=self.env)
        self.master.wait_ready()
        self.master_address = self.master.address
        return self.master

    def start_worker(self, i: int, *, extra: tuple[str, ...] = ()) -> Role:
        """Start (again) worker i on its directories; returns when it is ready."""
        self.workers[i] = worker = self._spawn_worker(i, extra=extra)
        return worker.wait_ready()

    def _spawn_worker(self, i: int, *, extra: tuple[str, ...] = ()) -> Role:
        master = self.worker_master[i] or self.master_address
        args = ["worker", "--master", master, "--port", str(free_port()), "--http-port", "0", "--dram", self.dram]
        args += ["--data-dir", str(self.worker_dir(i))]
        if self.ssd is not None:
            args += ["--ssd", f"{self.ssd_dir(i)}:{self.ssd}"]
        args += [*self.worker_args, *extra, "--parent-pid", str(os.getpid())]
        return Role(args, log=self.directory / f"worker-{i}.log", env=self.env, prefix=self.worker_prefix)

    def worker_dir(self, i: int) -> Path:
        """Data directory of worker i."""
        return self.directory / f"worker-{i}"

    def ssd_dir(self, i: int) -> Path:
        """SSD directory of worker i."""
        return self.directory / f"worker-{i}" / "ssd"

    def worker(self, i: int = 0) -> Role:
        """Worker i, which must have been started."""
        worker = self.workers[i]
        assert worker is not None
        return worker

    def connect(self, address: str | None = None, **settings: Any) -> Any:
        """A client of this pool (closed when the cluster stops)."""
        import kvpool

        client = kvpool.connect(address or self.master_address, **settings)
        self._clients.append(client)
        return client

    def stop(self) -> None:
        """Close the clients, end all processes. Workers first, so that the master is there for their leave, and all of them at
        once, so that none moves its blocks to the next one."""
        for client in self._clients:
            with contextlib.suppress(Exception):
                client.close()
        self._clients.clear()
        failures = []
        for group in (self.workers, [self.master]):
            roles = [role for role in group if role is not None]
            running = [role for role in roles if role.process.poll() is None]
            for role in running:
                role.tell_stop()
            for role in roles:
                if role not in running:
                    role.kill()
                    continue
                try:
                    role.wait_stopped()
                except AssertionError as error:
                    failures.append(str(error))
        assert not failures, failures
