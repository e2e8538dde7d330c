"""What tests of reports share: the set-up S0, its unit of size, numbers out of metrics, jobs in threads.

One `UNIT` stands for 1 MiB of a report; `make reports` runs them at full size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

import kvpool
from kvpool.core.types import Outcome
from tests.support.cluster import Cluster
from tests.support.keyed import hash_of
from tests.support.observe import metrics
from tests.support.payload import payload
from tests.support.processes import Role
from tests.support.scale import scaled

MIB = 1 << 20
UNIT = scaled(64 << 10, MIB)
CALL_S = scaled(1.0, 5.0)  # the scenarios' client deadline
NO_SCRUB = {"KVPOOL_WORKER__SCRUB_BYTES_PER_S": "0"}  # where reads of the disk are counted
STORED_OR_NOT = {Outcome.STORED, Outcome.ALREADY, Outcome.FULL}

MakeCluster = Callable[..., Cluster]


def s0(make_cluster: MakeCluster, **settings: Any) -> Cluster:
    """The default set-up: two workers, DRAM 64 units, SSD 256 units each."""
    given: dict[str, Any] = {"n_workers": 2, "dram": str(64 * UNIT), "ssd": str(256 * UNIT)} | settings
    return make_cluster(**given)


def event(role: Role, name: str) -> float:
    return metrics(role)[f'kvpool_block_events_total{{event="{name}"}}']


def tier_event(role: Role, tier: str, name: str) -> float:
    return metrics(role).get(f'kvpool_tier_events_total{{event="{name}",tier="{tier}"}}', 0.0)


def used(role: Role) -> list[float]:
    """Bytes in slots that are taken, by tier."""
    return [value for name, value in metrics(role).items() if name.startswith("kvpool_tier_used_bytes")]


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@contextmanager
def running(*jobs: Callable[[threading.Event], None]) -> Iterator[threading.Event]:
    """Each job in a thread of its own; at the end they are told to stop, and what went wrong in one is raised."""
    stop, errors = threading.Event(), []

    def guarded(job: Callable[[threading.Event], None]) -> None:
        try:
            job(stop)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def push_out(ns: kvpool.Namespace, tag: str, n: int, *, size: int = UNIT) -> None:
    """Other keys, so that what was in DRAM goes down."""
    for start in range(0, n, 16):
        keys = [f"{tag}-{i}" for i in range(start, min(n, start + 16))]
        assert set(ns.put(hash_of(ns, *keys), [payload(key, 1, size) for key in keys]).outcomes) <= STORED_OR_NOT


def cpu_s(role: Role) -> float:
    times = psutil.Process(role.pid).cpu_times()
    return times.user + times.system
