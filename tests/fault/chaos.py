"""Chaos with real processes: workers, masters, Redis and clients under load, one fault after the other, chosen by a seed.

`python -m tests.fault.chaos --minutes M --seed S` (`make chaos MINUTES=5`) prints a table. It ends with 1 when a byte was wrong,
a removed value was seen again, a call did not return in time or raised what it should not, or something did not recover.

The faults and the clients' work follow from the seed; how they meet in time does not, so a run cannot be replayed exactly: what
fails here is looked for in the simulation.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.load import Loader, Told, Work
from tests.support.observe import metrics
from tests.support.probe import Probe
from tests.support.rough_pool import RoughPool
from tests.support.waiting import wait_until

RECOVER_S = 30.0  # longer after a fault has ended means: it did not recover
N_CLIENTS = 4
BITS = 500
Step = Generator[Callable[[float], float | None], None, None]  # yields, when the fault has ended, how its recovery is seen


@dataclass
class Outcome:
    """Of all faults of a kind."""

    lasted: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)
    lost: int = 0  # did not recover


class Chaos:
    """One run."""

    def __init__(self, directory: Path, *, seed: int, n_masters: int, n_threads: int) -> None:
        self.seed, self.n_threads = seed, n_threads
        self.chance = random.Random(seed)
        self.directory = directory
        self.pool = RoughPool(directory, n_masters=n_masters)
        self.clients: list[Loader] = []
        self.probes: list[Probe] = []
        self.total = Told()
        self.by_kind: dict[str, Outcome] = {}
        self.problems: list[str] = []
        self.bits = 0
        self._n_clients = 0

    # --- faults: each ends by yielding how its recovery is seen; what follows the yield is put right after that

    def worker_killed(self, lasts_s: float) -> Step:
        i = self._worker()
        self.pool.note_corrupt(i)
        self.pool.workers[i].kill()
        self._pass(lasts_s)
        self.pool.restart_worker(i)
        yield self.probes[i].recovered

    def worker_stopped(self, lasts_s: float) -> Step:
        i = self._worker()
        self.pool.note_corrupt(i)
        status = self.pool.workers[i].stop()
        if status:
            self.problems.append(f"worker {i} ended with {status} on SIGTERM")
        self._pass(lasts_s)
        self.pool.restart_worker(i)
        yield self.probes[i].recovered

    def worker_frozen(self, lasts_s: float) -> Step:
        i = self._worker()
        self.pool.workers[i].pause()
        self._pass(2 * lasts_s)
        self.pool.workers[i].resume()
        yield self.probes[i].recovered

    def leader_killed(self, lasts_s: float) -> Step:
        i = self._leader()
        self.pool.masters[i].kill()
        if len(self.pool.masters) > 1:
            yield self.probes[-1].recovered
            self._pass(lasts_s)
            self.pool.restart_master(i)
        else:
            self._pass(lasts_s)
            self.pool.restart_master(i)
            yield self.probes[-1].recovered

    def leader_frozen(self, lasts_s: float) -> Step:
        i = self._leader()
        self.pool.masters[i].pause()
        self._pass(2 * lasts_s)
        self.pool.masters[i].resume()
        yield self.probes[-1].recovered

    def redis_frozen(self, lasts_s: float) -> Step:
        assert self.pool.redis is not None
        self.pool.redis.freeze()
        self._pass(lasts_s)
        self.pool.redis.thaw()
        yield self.probes[-1].recovered

    def data_cut(self, lasts_s: float) -> Step:
        i = self._worker()
        self.pool.data_links[i].cut()
        self._pass(lasts_s)
        self.pool.data_links[i].pass_on()
        yield self.probes[i].recovered

    def data_stalled(self, lasts_s: float) -> Step:
        i = self._worker()
        self.pool.data_links[i].blackhole()
        self._pass(lasts_s)
        self.pool.data_links[i].pass_on()
        yield self.probes[i].recovered

    def masters_cut(self, lasts_s: float) -> Step:
        for link in self.pool.master_links:
            link.cut()
        self._pass(lasts_s)
        for link in self.pool.master_links:
            link.pass_on()
        yield self.probes[-1].recovered

    def masters_stalled(self, lasts_s: float) -> Step:
        for link in self.pool.master_links:
            link.blackhole()
        self._pass(lasts_s)
        for link in self.pool.master_links:
            link.pass_on()
        yield self.probes[-1].recovered

    def disk_filled(self, lasts_s: float) -> Step:
        assert self.pool.disk is not None
        self.pool.fill_disk()
        self._pass(lasts_s)
        self.pool.free_disk()
        worker = self.pool.workers[self.pool.disk]

        def in_use(since: float) -> float | None:
            return time.monotonic() - since if metrics(worker)['kvpool_tier_ok{tier="ssd"}'] else None

        yield in_use

    def bits_flipped(self, lasts_s: float) -> Step:
        i = self._worker()
        self.bits += self.pool.flip_bits(i, BITS, self.chance)
        yield self.probes[i].recovered

    def client_killed(self, lasts_s: float) -> Step:
        i = self.chance.randrange(N_CLIENTS)
        self.clients[i].kill()
        self.total.add(self.clients[i].told)
        self.clients[i] = client = self._client(i)
        yield lambda since: time.monotonic() - since if client.n_ops else None

    def kinds(self) -> list[str]:
        names = ["worker_killed", "worker_stopped", "worker_frozen", "leader_killed", "leader_frozen", "data_cut", "data_stalled",
                 "masters_cut", "masters_stalled", "bits_flipped", "client_killed"]  # fmt: skip
        names += ["redis_frozen"] if self.pool.redis is not None else []
        return names + (["disk_filled"] if self.pool.disk is not None else [])

    def _worker(self) -> int:
        return self.chance.randrange(len(self.pool.workers))

    def _leader(self) -> int:
        """The master that leads, as a client is told; a random one while nobody knows."""
        if len(self.pool.masters) == 1:
            return 0
        for i, master in enumerate(self.pool.masters):
            if metrics(master).get("kvpool_leading_state", 0.0):
                return i
        return self.chance.randrange(len(self.pool.masters))

    @staticmethod
    def _pass(seconds: float) -> None:
        threading.Event().wait(seconds)

    # --- the run

    def run(self, seconds: float) -> None:
        """Starts everything, makes faults for `seconds`, ends everything."""
        self.pool.start()
        try:
            ids = [str(worker.ready["id"]) for worker in self.pool.workers]
            names: list[tuple[str, str | None]] = [*((f"probe-{i}", one) for i, one in enumerate(ids)), ("probe-leader", None)]
            self.probes = [Probe(self.pool.addresses, name, worker_id=one, seed=self.seed) for name, one in names]
            self.clients = [self._client(i) for i in range(N_CLIENTS)]
            for probe in self.probes:
                probe.start()
            self._wait("the pool does not get to work", lambda: all(probe.recovered(0.0) for probe in self.probes))
            self._wait("a client does not get to work", lambda: all(client.n_ops for client in self.clients))
            end = time.monotonic() + seconds
            round_: list[str] = []
            while time.monotonic() < end and not self.problems:
                round_ = round_ or self.chance.sample(self.kinds(), len(self.kinds()))
                self._one(round_.pop())
                self._pass(self.chance.uniform(0.1, 0.5))
            for i in range(len(self.pool.workers)):
                self.pool.note_corrupt(i)
            self._end_of_work()
        finally:
            for client in self.clients:
                client.kill()
            for probe in self.probes:
                probe.stop.set()
            self.problems += self.pool.stop()

    def _end_of_work(self) -> None:
        for client in self.clients:
            client.say(stop=True)
        for client in self.clients:
            self.total.add(client.stop())
        for probe in self.probes:
            probe.stop.set()
            probe.join(10)
            if probe.is_alive():
                self.total.hung.append(f"{probe.name}: does not end")
            self.total.add(probe.told)
        for worker in self.pool.workers:
            what = f"{worker.log.name}: reservations and holds of clients that are gone stay"
            self._wait(what, lambda worker=worker: not _left(metrics(worker)))  # type: ignore[misc]
        self.problems += self.pool.troubles()
        for log in sorted(self.directory.glob("client-*.log")):
            if "Traceback" in (text := log.read_text(errors="replace")):
                self.problems.append(f"{log.name}: {text[text.index('Traceback') :][:3000]}")

    def _one(self, kind: str) -> None:
        began = time.monotonic()
        outcome = self.by_kind.setdefault(kind, Outcome())
        step = getattr(self, kind)(self.chance.uniform(0.2, 2.0))
        seen = next(step)
        ended = time.monotonic()
        outcome.lasted.append(ended - began)
        try:
            outcome.recovered.append(wait_until(lambda: seen(ended), timeout_s=RECOVER_S))
        except AssertionError:
            outcome.lost += 1
            self.problems.append(f"{kind}: not recovered {RECOVER_S:.0f} s after its end")
        next(step, None)
        print(f"  {kind}: {outcome.lasted[-1]:.2f} s, recovered after {(outcome.recovered or [-1.0])[-1]:.2f} s", file=sys.stderr)

    def _client(self, i: int) -> Loader:
        self._n_clients += 1
        work = Work(self.pool.addresses, f"client-{self._n_clients}", self.seed, transport=("auto", "tcp")[i % 2], mirror=i < 3,
                    n_threads=self.n_threads)  # fmt: skip
        return Loader(work, self.directory / f"client-{i}.log")

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        try:
            wait_until(condition, timeout_s=RECOVER_S)
        except AssertionError:
            self.problems.append(what)

    # --- the table

    @property
    def failed(self) -> bool:
        return bool(self.total.wrong or self.total.hung or self.total.errors or self.problems)

    def table(self) -> str:
        total = self.total
        lines = [
            f"seed {self.seed}; {len(self.pool.masters)} masters, {len(self.pool.workers)} workers, {N_CLIENTS} clients",
            f"operations      {sum(total.ops.values())}: {_listed(total.ops)}",
            f"blocks          {total.hits} got and checked; put: {_listed(total.outcomes)}",
            f"misses          {_listed(total.misses)}",
            f"refused         {_listed(total.refused)}",
            f"corrupt copies  {sum(self.pool.corrupt.values()):.0f} found and dropped, of {self.bits} bits flipped",
            f"wrong bytes     {len(total.wrong)}",
            f"hung calls      {len(total.hung)}",
            f"other errors    {len(total.errors)}",
            f"longest call    {total.longest_s:.2f} s ({total.longest})",
            f"past a deadline {total.over_s:.2f} s ({total.over or 'none'})",
            "",
            f"{'fault':<16} {'n':>3} {'lasted':>8} {'recovered: median':>18} {'longest':>8}",
        ]
        for kind, one in sorted(self.by_kind.items()):
            middle = f"{statistics.median(one.recovered):.2f} s" if one.recovered else "-"
            worst = f"{max(one.recovered):.2f} s" if one.recovered and not one.lost else "never"
            lines.append(f"{kind:<16} {len(one.lasted):>3} {max(one.lasted):>6.2f} s {middle:>18} {worst:>8}")
        for title, found in (("WRONG", total.wrong), ("HUNG", total.hung), ("ERROR", total.errors), ("PROBLEM", self.problems)):
            lines += [f"{title}: {one}" for one in found[:10]]
        return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {what}" for what, n in sorted(counts.items())) or "0"


def _left(told: dict[str, float]) -> float:
    return told['kvpool_blocks_now{what="reserved"}'] + told['kvpool_blocks_now{what="holds"}']


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults are made")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument("--masters", type=int, choices=(1, 2), default=2, help="2: on a redis-server of their own")
    parser.add_argument("--threads", type=int, default=2, help="of each of the clients")
    parser.add_argument("--json", action="store_true", help="the figures as one line, too")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"chaos: seed {seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="kvpool-chaos-"))
    chaos = Chaos(directory, seed=seed, n_masters=given.masters, n_threads=given.threads)
    threading.excepthook = lambda told: chaos.problems.append(f"thread {told.thread and told.thread.name}: {told.exc_value!r}")
    try:
        chaos.run(given.minutes * 60)
    finally:
        print(chaos.table(), flush=True)
    if given.json:
        faults = {kind: {"n": len(one.lasted), "recovered_s": one.recovered} for kind, one in chaos.by_kind.items()}
        told = {"corrupt": sum(chaos.pool.corrupt.values()), "bits": chaos.bits, **vars(chaos.total)}
        print(json.dumps({"seed": seed, "faults": faults, "problems": chaos.problems, **told}))
    if chaos.failed:
        print(f"chaos: FAILED with seed {seed}; logs in {directory}")
        return 1
    shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
