"""The worker role: start-up checks, the processes' threads, ready line, signals, graceful stop.

    main thread: asyncio (uvloop) with agent and HTTP      threads: data plane loops, pool, mover, holds

Owns order of start and stop. Start: settings checked against this machine, directories locked, SSD blocks adopted, ports bound,
then the master is looked for. Stop (SIGTERM, SIGINT): blocks that would be lost go to other workers with room, then no new
connections, running requests finish or are cut, all within `drain_timeout_ms` (0: neither); the master is told, everything is
given back. A second signal cuts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvloop

from kvpool.config import WorkerSettings, check_memory
from kvpool.core.spread import LinkLoad
from kvpool.errors import ConfigError, KVPoolError
from kvpool.obs import logs
from kvpool.obs.process import die_with_parent, ignore_stops, on_stops
from kvpool.quantities import join_address
from kvpool.worker import collector, http
from kvpool.worker.agent import Agent
from kvpool.worker.build import build_node
from kvpool.worker.dataplane import DataPlane
from kvpool.worker.drain import Drainer
from kvpool.worker.host_memory import available_bytes, cgroup_limit_bytes
from kvpool.worker.link_speed import link_bytes_per_s
from kvpool.worker.spread import HOT_AT, Spreader

if TYPE_CHECKING:
    from kvpool.worker.node import Node

log = logging.getLogger(__name__)

READY_WITHOUT_MASTER_S: Final = 5.0  # then the ready line is printed all the same: the data plane serves
LEAVE_S: Final = 2.0  # of a long drain timeout that are kept for the master and the disk
FINISH_S_MAX: Final = 8.0  # for running requests: of the ten seconds that a stop may usually take
MOVE_PART: Final = 0.75  # of the drain timeout is for moving blocks, the rest for running requests
TOKEN_BYTES_MAX: Final = 4096
GC_THRESHOLDS: Final = (50_000, 20, 100)  # blocks are long-lived: full collections would walk all of them for nothing
SWITCH_INTERVAL_S: Final = 0.001  # a loop that becomes ready waits at most this long for a thread that computes


def run(settings: WorkerSettings, *, say: Callable[[KVPoolError], object], parent_pid: int | None = None) -> int:
    """One worker until SIGTERM or SIGINT; prints the ready line. Returns the exit status: 1 when it cannot start, and why goes to
    `say`. Call it on the main thread."""
    logs.set_up("worker")
    try:
        if parent_pid is not None:
            die_with_parent(parent_pid)
        return _run(settings)
    except KVPoolError as error:
        say(error)
        return 1


def _run(settings: WorkerSettings) -> int:
    check_memory(settings.dram, memavailable=available_bytes(), cgroup_limit=cgroup_limit_bytes())
    token = read_token(settings.token_file)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with collector.paused():
        node = build_node(settings)
    try:
        gc.collect()
        gc.freeze()  # modules and adopted blocks: no collection walks them again
        gc.set_threshold(*GC_THRESHOLDS)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                return runner.run(_serve(node, settings, token))
            finally:
                ignore_stops()  # one more must not kill us while things are given back
    finally:
        if not node.close():
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0)  # an orderly end would wait for the disk for ever


def read_token(path: str) -> str:
    """The shared token; empty without a file. Raises ConfigError naming `token_file`."""
    if not path:
        return ""
    try:
        raw = Path(path).read_bytes()
        token = raw.decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file: {path} cannot be read: {error}") from error
    if not 1 <= len(token) <= TOKEN_BYTES_MAX // 2 or not token.isprintable():
        raise ConfigError(f"token_file: {path} must have one line of 1..{TOKEN_BYTES_MAX // 2} printable characters")
    return token


async def _serve(node: Node, settings: WorkerSettings, token: str) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    hurry = threading.Event()

    def on_signal(number: int) -> None:
        log.info("event=signal number=%d", number)
        if stopping.is_set():
            hurry.set()
        stopping.set()

    on_stops(loop, on_signal)
    plane = DataPlane(node, settings, token=token.encode())
    tasks: list[asyncio.Task[Any]] = []
    stop_http = None
    agent: Agent | None = None
    drainer: Drainer | None = None
    spreader: Spreader | None = None
    link_load = LinkLoad(link_bytes_per_s=settings.link_bytes_per_s or link_bytes_per_s(settings.host), hot_at=HOT_AT)
    node.link_load = link_load
    http_sock = http.listen(settings.http_host, settings.http_port)
    try:
        plane.start()
        node.start()
        host, port = http_sock.getsockname()[:2]
        if host in ("0.0.0.0", "::"):  # all addresses: the one that others know; else where it listens, and nowhere else
            host = settings.advertise or host
        http_address = join_address(host, port)
        agent = Agent(
            node, settings, token=token, address=plane.address, unix_name=plane.unix_name, http=http_address
        )
        drainer = Drainer(node, token=token, master=lambda: agent.master, beat=agent.beat)
        spreader = Spreader(
            node, token=token, master=lambda: agent.master, load=link_load, rate_bytes=settings.copy_bytes_per_s
        )
        plane.spreader = spreader
        spreader.start()
        agent.on_drain, agent.drain_status = drainer.follow, drainer.status
        stop_http = await http.serve(http.make_app(node, plane, agent, token=token), http_sock)
        tasks.append(asyncio.create_task(agent.run()))
        tasks.append(asyncio.create_task(_say_ready(node, plane, agent, http_address)))
        await stopping.wait()
        return 0
    finally:
        stop_s = stop_seconds(settings.drain_timeout_ms)
        until = time.monotonic() + stop_s
        if spreader is not None:
            with contextlib.suppress(Exception):
                await asyncio.to_thread(spreader.close)
        if drainer is not None:
            with contextlib.suppress(Exception):
                await asyncio.to_thread(drainer.leave, until=until - (1 - MOVE_PART) * stop_s, hurry=hurry)
        with contextlib.suppress(Exception):
            await asyncio.to_thread(_finish, plane, until, hurry)
        if agent is not None:
            with contextlib.suppress(Exception):
                await agent.leave("stopping")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if stop_http is not None:
            await stop_http()
        http_sock.close()
        await asyncio.to_thread(plane.stop)
        log.info("event=stopped")


def stop_seconds(drain_timeout_ms: int) -> float:
    """How long a stop may wait for moves and requests, so that all of it takes about the drain timeout."""
    timeout_s = drain_timeout_ms / 1000
    return min(timeout_s, max(FINISH_S_MAX, timeout_s - LEAVE_S))


def _finish(plane: DataPlane, until: float, hurry: threading.Event) -> None:
    left = plane.drain(min(FINISH_S_MAX, max(0.0, until - time.monotonic())), cut=hurry)
    if left:
        log.warning("event=drain_cut connections=%d", left)


async def _say_ready(node: Node, plane: DataPlane, agent: Agent, http_address: str) -> None:
    try:
        await asyncio.wait_for(agent.first.wait(), READY_WITHOUT_MASTER_S)
    except TimeoutError:
        reason = agent.last_error or "no answer"
        print(f"kvpool worker: no master yet ({reason}); serving without, and trying on", file=sys.stderr)  # noqa: T201
    line = {
        "ready": True, "role": "worker", "id": node.worker_id, "pid": os.getpid(), "address": plane.address, "http": http_address,
    }  # fmt: skip
    print(json.dumps(line), flush=True)  # noqa: T201
