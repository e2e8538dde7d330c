"""Soak: clients at about 70 % of what the pool can do, memory and descriptors of every process sampled: they must be flat.

`python -m tests.fault.soak --minutes M` (`make soak MINUTES=20`). The first part (WARM_SHARE) is warm-up: tiers and bounded
memories (of what is gone, of events) fill, pools of threads and connections grow. After it the mean of each process's last third
must be within RSS_SHARE of its first third, its descriptors within FDS_SLACK. Ends with 1 when they are not, or when there was
any error or wrong byte. A run that is too short to fill the master's memories gets smaller ones.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.cluster import Cluster
from tests.support.load import Loader, Told, Work
from tests.support.waiting import wait_until

WARM_SHARE = 0.4
RSS_SHARE = 0.03
RSS_SLACK = 2 << 20  # of a small process 3 % is less than one arena of malloc
FDS_SLACK = 4
LOAD = 0.7
N_CLIENTS = 3
MEASURE_S = 3.0
WHOLE_S = 600.0


@dataclass
class Process:
    """One process's samples after the warm-up."""

    name: str
    process: psutil.Process
    rss: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def sample(self) -> None:
        self.rss.append(self.process.memory_info().rss)
        self.fds.append(self.process.num_fds())

    @staticmethod
    def _ends(samples: list[int]) -> tuple[float, float]:
        third = max(1, len(samples) // 3)
        return statistics.mean(samples[:third]), statistics.mean(samples[-third:])

    def verdict(self) -> tuple[str, bool]:
        """Its row, and whether it is flat."""
        (rss, rss_end), (fds, fds_end) = self._ends(self.rss), self._ends(self.fds)
        flat = abs(rss_end - rss) <= max(RSS_SHARE * rss, RSS_SLACK) and abs(fds_end - fds) <= FDS_SLACK
        row = f"{self.name:<10} {rss / 2**20:>8.1f} {rss_end / 2**20:>8.1f} {100 * (rss_end / rss - 1):>+7.2f} %"
        return f"{row} {fds:>8.1f} {fds_end:>8.1f}   {'flat' if flat else 'NOT FLAT'}", flat


def soak(directory: Path, *, seconds: float, seed: int, dram: str = "32MiB", ssd: str = "96MiB") -> bool:
    """Prints the table. Whether all is flat and without errors."""
    env = {} if seconds >= WHOLE_S else {"KVPOOL_MASTER__GONE_MEMORY_KEYS": "2000", "KVPOOL_MASTER__REMOVAL_LOG_MAX": "50"}
    cluster = Cluster(directory, n_workers=2, dram=dram, ssd=ssd, worker_args=("--drain-timeout", "1s"), env=env).start()
    clients: list[Loader] = []
    total = Told()
    try:
        for i in range(N_CLIENTS):
            work = Work(cluster.master_address, f"client-{i}", seed, transport=("auto", "tcp")[i % 2], deadline_ms=5000)
            clients.append(Loader(work, directory / f"client-{i}.log"))
        wait_until(lambda: all(client.n_ops > 50 for client in clients), timeout_s=60, what="clients at work")
        limits = _rates(clients)
        for client, limit in zip(clients, limits, strict=True):
            client.say(pace=LOAD * limit)
        assert cluster.master is not None
        roles = {"master": cluster.master.pid, **{f"worker-{i}": cluster.worker(i).pid for i in range(2)}}
        roles |= {client.work.name: client.process.pid for client in clients}
        processes = [Process(name, psutil.Process(pid)) for name, pid in roles.items()]
        _pass(seconds * WARM_SHARE)
        began = sum(client.n_ops for client in clients)
        end = time.monotonic() + seconds * (1 - WARM_SHARE)
        every = max(0.2, seconds * (1 - WARM_SHARE) / 200)
        while time.monotonic() < end:
            for process in processes:
                process.sample()
            _pass(every)
        rate = (sum(client.n_ops for client in clients) - began) / (seconds * (1 - WARM_SHARE))
    finally:
        for client in clients:
            total.add(client.stop())
        cluster.stop()
    rows = [process.verdict() for process in processes]
    n_ops = sum(total.ops.values())
    print(f"{rate:.0f} calls a second, of {sum(limits):.0f} without a limit; {n_ops} calls, {total.hits} blocks checked")
    print(f"{'process':<10} {'MiB':>8} {'at end':>8} {'change':>9} {'fds':>8} {'at end':>8}")
    print("\n".join(row for row, _ in rows))
    faults = [*total.wrong, *total.hung, *total.errors, *(f"{n} {what}" for what, n in total.refused.items())]
    logs = sorted(directory.glob("*.log"))
    faults += [f"{log.name}: Traceback" for log in logs if "Traceback" in log.read_text(errors="replace")]
    print(f"errors {len(faults)}, wrong bytes {len(total.wrong)}, longest call {total.longest_s:.2f} s ({total.longest})")
    for fault in faults[:10]:
        print(f"ERROR: {fault}")
    return not faults and all(flat for _, flat in rows)


def _rates(clients: list[Loader]) -> list[float]:
    """Calls a second of each client without a limit."""
    before = [client.n_ops for client in clients]
    began = time.monotonic()
    _pass(MEASURE_S)
    return [(client.n_ops - was) / (time.monotonic() - began) for client, was in zip(clients, before, strict=True)]


def _pass(seconds: float) -> None:
    threading.Event().wait(seconds)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"soak: seed {seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="kvpool-soak-"))
    if not soak(directory, seconds=given.minutes * 60, seed=seed):
        print(f"soak: FAILED; logs in {directory}")
        return 1
    shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
