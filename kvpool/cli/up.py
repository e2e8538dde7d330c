"""`kvpool up`: a whole pool on this machine, supervised. A role that dies is started again, at most so often a minute.

Owns the decision when to start again; the processes themselves are in `pool`.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli.common import JsonOption, print_json, raise_on_stops
from kvpool.cli.roles import (
    Advertise,
    ConfigFile,
    DataDir,
    DrainTimeout,
    EvictionPolicy,
    Host,
    HttpPort,
    Insecure,
    Port,
    TokenFile,
    given,
)

if TYPE_CHECKING:
    from kvpool.cli.pool import Pool, RoleProcess

WATCH_S = 0.1
MINUTE_S = 60.0


def up(
    workers: Annotated[int | None, typer.Option("--workers", metavar="N", help="Workers [1].")] = None,
    dram: Annotated[str | None, typer.Option("--dram", metavar="SIZE", help="Memory of each worker [1GiB].")] = None,
    ssd: Annotated[str | None, typer.Option("--ssd", metavar="DIR:SIZE", help="SSD of each worker, in DIR/worker-i.")] = None,
    policy: EvictionPolicy = None,
    port: Port = None,
    http_port: HttpPort = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    host: Host = None,
    advertise: Advertise = None,
    token_file: TokenFile = None,
    insecure: Insecure = False,
    drain_timeout: DrainTimeout = None,
    json: JsonOption = False,
) -> None:
    """Run a master and N workers on this machine until SIGINT or SIGTERM.

    Prints `ready` and the endpoints when a put and a get have just succeeded.
    """
    from kvpool.cli.pool import Pool, probe

    flags = given(
        workers=workers,
        dram=dram,
        ssd=ssd,
        policy=policy,
        port=port,
        http_port=http_port,
        data_dir=data_dir,
        host=host,
        advertise=advertise,
        token_file=token_file,
        insecure=insecure,
        drain_timeout_ms=drain_timeout,
    )
    settings = load_settings(config, flags)
    raise_on_stops()
    try:
        with Pool(plan_of(settings, config)) as pool:
            pool.start()
            probe(pool.address, n_workers=settings.workers, token_file=settings.token_file)
            say_ready(pool, as_json=json)
            supervise(pool, restarts_per_minute=settings.restarts_per_minute)
    except KeyboardInterrupt:
        print("kvpool: stopped", file=sys.stderr)


def load_settings(config: Path | None, flags: dict[str, Any]) -> Any:
    """UpSettings of file, environment and flags."""
    from kvpool import config as configuration

    return configuration.load("up", file=config, flags=flags)


def plan_of(settings: Any, config: Path | None) -> Any:
    """UpSettings as the plan of a pool."""
    from kvpool.cli.pool import PoolPlan

    place = settings.ssd_place
    return PoolPlan(
        n_workers=settings.workers,
        dram_bytes=settings.dram,
        data_dir=settings.data_dir.absolute(),
        ssd_dir=None if place is None else Path(place.directory).absolute(),
        ssd_bytes=0 if place is None else place.size_bytes,
        policy=settings.policy,
        port=settings.port,
        http_port=settings.http_port,
        host=settings.host,
        http_host=settings.http_host,
        advertise=settings.advertise,
        token_file=settings.token_file,
        insecure=settings.insecure,
        config=config,
        drain_timeout_ms=settings.drain_timeout_ms,
    )


def say_ready(pool: Pool, *, as_json: bool) -> None:
    """The one ready message on standard output."""
    processes = pool.processes()
    if as_json:
        print_json({"ready": True, "master": pool.address, "http": processes[0]["http"], "processes": processes})
        return
    print(f"ready: master {pool.address}, http {processes[0]['http']}")
    for process in processes:
        print(f"  {process['role']:<7} {process['id']}  pid {process['pid']}  {process['address']}  http {process['http']}")
    sys.stdout.flush()


@dataclass
class Restarts:
    """When one role may be started again: at most `per_minute` times in any 60 s."""

    per_minute: int
    started_s: deque[float] = field(default_factory=deque)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next start is allowed (0: now); None: never."""
        if self.per_minute <= 0:
            return None
        while self.started_s and now_s - self.started_s[0] >= MINUTE_S:
            self.started_s.popleft()
        return 0.0 if len(self.started_s) < self.per_minute else MINUTE_S - (now_s - self.started_s[0])

    def note(self, now_s: float) -> None:
        """It was started again at `now_s`."""
        self.started_s.append(now_s)


def supervise(pool: Pool, *, restarts_per_minute: int) -> None:
    """Start again what dies, for ever; ends by KeyboardInterrupt."""
    budgets = {role.name: Restarts(restarts_per_minute) for role in pool.roles}
    down: set[str] = set()
    starting: set[str] = set()
    while True:
        time.sleep(WATCH_S)
        for role in pool.roles:
            if role.name in starting and role.exit_status() is None and _is_ready(role):
                starting.discard(role.name)
                print(f"kvpool: {role.name} is ready again (pid {role.pid}, {role.ready['address']})", file=sys.stderr)
            if role.exit_status() is not None:
                starting.discard(role.name)
                _start_again(role, budgets[role.name], down, starting)


def _start_again(role: RoleProcess, budget: Restarts, down: set[str], starting: set[str]) -> None:
    from kvpool.cli.pool import words_of

    wait_s = budget.wait_s(time.monotonic())
    if role.name not in down:
        down.add(role.name)
        status = role.exit_status()
        then = "not started again" if wait_s is None else "starting it again" + (f" in {wait_s:.0f} s" if wait_s else "")
        print(f"kvpool: {role.name} (pid {role.pid}) {words_of(status or 0)}; {then}", file=sys.stderr)
    if wait_s == 0:
        down.discard(role.name)
        budget.note(time.monotonic())
        role.spawn()
        starting.add(role.name)


def _is_ready(role: RoleProcess) -> bool:
    from kvpool.errors import KVPoolError

    try:
        return role.read_ready(timeout_s=0)
    except KVPoolError as error:
        print(f"kvpool: {error}", file=sys.stderr)
        role.signal(9)
        return False
