"""Several masters on one redis, with workers, as real processes: any of them can be killed, frozen and started again."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from kvpool.quantities import without_password
from tests.support.processes import Role
from tests.support.proxy import free_port
from tests.support.redis import RedisServer
from tests.support.waiting import wait_until


def http_json(role: Role, path: str) -> tuple[int, dict[str, Any]]:
    """Status and body of a role's HTTP port."""
    try:
        with urllib.request.urlopen(f"http://{role.http}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


class Masters:
    """`store`: the address of the redis as the masters are told it (a relay's, say), `first_store` as the first one is; default:
    the redis itself."""

    def __init__(self, directory: Path, redis: RedisServer, *, n_masters: int = 2, n_workers: int = 2, dram: str = "64MiB",
                 ssd: str | None = None, store: str = "", first_store: str = "") -> None:  # fmt: skip
        self.directory, self.redis, self.n_workers, self.dram, self.ssd = directory, redis, n_workers, dram, ssd
        self.store = [store or redis.url()] * n_masters
        self.store[0] = first_store or self.store[0]
        self.ports = [free_port() for _ in range(n_masters)]
        self.masters: list[Role | None] = [None] * n_masters
        self.workers: list[Role | None] = [None] * n_workers
        self.clients: list[Any] = []
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self) -> Masters:
        for i in range(len(self.masters)):
            self.start_master(i)
        self.leader()
        for i in range(self.n_workers):
            self.workers[i] = self.spawn_worker(i)
        for worker in self.workers:
            assert worker is not None
            worker.wait_ready()
        return self

    def spawn_master(self, i: int) -> Role:
        """Begin to start master i; its ready line is not waited for."""
        args = ["master", "--port", str(self.ports[i]), "--http-port", "0", "--data-dir", str(self.directory / f"master-{i}"),
                "--parent-pid", str(os.getpid())]  # fmt: skip
        env = {"KVPOOL_MASTER__STORE": self.store[i]}
        self.masters[i] = role = Role(args, log=self.directory / f"master-{i}.log", env=env)
        return role

    def start_master(self, i: int) -> Role:
        return self.spawn_master(i).wait_ready()

    def spawn_worker(self, i: int) -> Role:
        args = ["worker", "--master", self.addresses, "--port", "0", "--http-port", "0", "--dram", self.dram, "--data-dir",
                str(self.directory / f"worker-{i}"), "--parent-pid", str(os.getpid())]  # fmt: skip
        if self.ssd is not None:
            args += ["--ssd", f"{self.directory / f'ssd-{i}'}:{self.ssd}"]
        return Role(args, log=self.directory / f"worker-{i}.log")

    def master(self, i: int) -> Role:
        role = self.masters[i]
        assert role is not None
        return role

    def worker(self, i: int) -> Role:
        role = self.workers[i]
        assert role is not None
        return role

    def leads(self, i: int) -> bool:
        """Whether master i serves; False for one that is dead."""
        with contextlib.suppress(OSError):
            status, body = http_json(self.master(i), "/healthz")
            return status == 200 and "epoch" in body
        return False

    def leader(self, *, among: tuple[int, ...] = (), timeout_s: float = 10.0) -> int:
        """The number of the master that leads, waited for."""
        running = among or tuple(range(len(self.masters)))
        found = wait_until(lambda: [i for i in running if self.leads(i)], timeout_s=timeout_s, what=f"a leader\n{self.logs()}")
        assert len(found) == 1, f"{found} lead"
        return found[0]

    def connect(self, addresses: str = "", **settings: Any) -> Any:
        import kvpool

        client = kvpool.connect(addresses or self.addresses, **settings)
        self.clients.append(client)
        return client

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.directory.glob("*.log"))

    def log_of(self, i: int) -> str:
        return (self.directory / f"master-{i}.log").read_text(errors="replace")

    def stop(self) -> None:
        """Clients, workers, masters."""
        for client in self.clients:
            with contextlib.suppress(Exception):
                client.close()
        failures = []
        for role in [*self.workers, *self.masters]:
            if role is None:
                continue
            if role.process.poll() is None:
                try:
                    role.stop()
                except AssertionError as error:
                    failures.append(str(error))
            else:
                role.kill()
        assert not failures, failures
        assert without_password(self.store[0]) == self.store[0] or "secret" not in self.logs()
