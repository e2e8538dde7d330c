"""One run of the simulation: a scenario drawn from the seed, time for trouble, time to recover, the verdict."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from kvpool.sim.checker import Violation
from kvpool.sim.clock import where
from kvpool.sim.cluster import Cluster
from kvpool.sim.disk import sleep
from kvpool.sim.faults import DISK_FAULTS, FAULTS, STORE_FAULTS, Faults
from kvpool.sim.load import Load
from kvpool.sim.network import Quality
from kvpool.sim.scenario import Client, Scenario
from kvpool.sim.threads import stand_ins


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. `digest`: of its whole story; equal for equal seeds."""

    seed: int
    violations: list[Violation]
    digest: str
    counts: dict[str, int]
    faults: dict[str, int]
    steps: int
    simulated_s: float
    cluster: Cluster

    @property
    def failed(self) -> bool:
        return bool(self.violations)

    def words(self) -> list[str]:
        """What was broken, how to see it again, and the story of the first block that it happened to."""
        lines = []
        for violation in self.violations[:5]:
            block = f" (block {self.cluster.story.name_of(violation.key)})" if violation.key is not None else ""
            lines.append(f"seed {self.seed}: {violation.promise} broken at {violation.at_s:.4f} s: {violation.text}{block}")
        if len(self.violations) > 5:
            lines.append(f"... and {len(self.violations) - 5} more")
        lines.append(f"again: python -m kvpool.sim --seed {self.seed}    (or make sim SEED={self.seed})")
        first = self.violations[0]
        lines += self.cluster.story.tell(first.key, until_s=first.at_s)
        return lines


def draw_scenario(seed: int) -> Scenario:
    """The run's shape: some runs have no faults at all, most have a few kinds."""
    draw = random.Random(f"{seed}/scenario")
    n_masters = draw.choice((1, 1, 2))
    ssd_blocks = draw.choice((0, 20, 40, 60))
    kinds = [name for name in FAULTS if (n_masters > 1 or name not in STORE_FAULTS) and (ssd_blocks or name not in DISK_FAULTS)]
    faults = tuple(draw.sample(kinds, k=draw.choice((0, 1, 2, 3, 4, 6))))
    return Scenario(
        n_masters=n_masters,
        n_workers=draw.choice((1, 2, 2, 3)),
        n_clients=draw.choice((2, 3)),
        n_namespaces=draw.choice((1, 1, 2)),
        n_names=draw.choice((0, 0, 1, 2)),
        dram_blocks=draw.choice((6, 10, 16, 24)),
        ssd_blocks=ssd_blocks,
        replicas=draw.choice((1, 1, 2)),
        n_chains=draw.choice((2, 4, 6)),
        chain_blocks=draw.choice((3, 6, 8)),
        shared_blocks=2,
        small_values=draw.random() < 0.3,
        wire_flips=draw.choice((0.0, 0.0, 0.002)),
        stumbles=draw.choice((0.0, 0.0, 0.02)),
        store_replica=draw.random() < 0.7,
        faults=faults,
        fault_every_s=draw.choice((0.3, 0.7, 1.5)),
        quality=Quality(delay_s=draw.choice((0.0001, 0.0005, 0.002)), slow_share=draw.choice((0.0, 0.01, 0.05)),
                        loss=draw.choice((0.0, 0.0, 0.002))),
        policy=draw.choice(("hazard", "hazard", "hazard", "lru", "lru", "s3fifo", "arc", "lru2")),
    )  # fmt: skip


def run(seed: int, *, scenario: Scenario | None = None, alter: Callable[[Cluster], None] | None = None) -> Outcome:
    """The whole run. `alter(cluster)`: before it begins (tests break something)."""
    with quiet() as errors, ExitStack() as stack:
        cluster = Cluster(seed, scenario or draw_scenario(seed))
        stack.enter_context(stand_ins(link=cluster.link, channel=cluster.channel))
        if alter is not None:
            alter(cluster)
        faults, loop = Faults(cluster), cluster.loop
        try:
            _play(cluster, faults)
        except Exception as error:
            cluster.checker.fail("bug", f"{error!r}{where(error)}", None)
        digest, steps, now = cluster.story.digest(), loop.steps, loop.time()
        logged = list(errors)
        cluster.network.down = True
        for trouble in [*loop.end(), *logged]:
            cluster.checker.fail("bug", trouble, None)
    return Outcome(seed, cluster.checker.violations, digest, cluster.checker.counts, faults.counts, steps, now, cluster)


def _play(cluster: Cluster, faults: Faults) -> None:
    loop, shape = cluster.loop, cluster.scenario
    loads = _begin(cluster)
    faults.start()
    loop.run_until(shape.active_s)
    faults.mend_all()
    for load in loads:
        load.over = True
    loop.run_until(shape.active_s + shape.calm_s)
    _check_end(cluster)


def _begin(cluster: Cluster) -> list[Load]:
    shape = cluster.scenario
    for spec in cluster.specs:
        cluster.name_keys(spec)
    cluster.start()
    loads: list[Load] = []

    def begin(client: Client, delay_s: float = 0.0) -> None:
        loads.append(Load(cluster, client))
        client.process.spawn(_after(cluster, delay_s, loads[-1]), name=client.name)

    cluster.begin_load = begin
    for i in range(shape.n_clients):
        host = cluster.random.choice([*cluster.workers, *(() if shape.all_local else (f"c{i}",))])
        begin(cluster.add_client(f"c{i}", host, mirrored=cluster.random.random() < 0.7), 0.3)
    return loads


async def _after(cluster: Cluster, delay_s: float, load: Load) -> None:
    await sleep(cluster.loop, delay_s)
    await load.run()


# --- the end ----------------------------------------------------------------------------------------------------------------


def _check_end(cluster: Cluster) -> None:
    """Everything was well for a while: calls have ended, index, mirrors and workers agree, removed blocks are gone."""
    checker = cluster.checker
    checker.finish()
    leader = cluster.leader()
    if leader is None or leader.state is None:
        checker.fail("C6", "no master serves, long after everything was mended", None)
        return
    state = leader.state
    if not state.complete():
        checker.fail("C3", "the index is not complete, long after everything was mended", None)
    for worker in cluster.workers.values():
        node = worker.node
        if node is None:
            checker.fail("C6", f"worker {worker.name} is not up", None)
            continue
        node.table.check()
        if node.table.gauges()["reserved"]:
            checker.fail("C10", f"{worker.name} has reserved slots, and nobody puts", None)
        for uid in [uid for uid in node.table.spaces if checker.names.is_gone(uid)]:
            checker.fail("C8", f"{worker.name} still has the namespace {uid.hex()[:8]}, which was deleted", None)
        for spec in [*cluster.specs, *(s for s in cluster.known.values() if not checker.names.may_be_gone(s.uid))]:
            if isinstance(node.served(spec.uid), tuple):
                checker.fail("C3", f"{worker.name} does not serve {spec.name}, long after everything was mended", None)
                continue
            blocks = node.table.spaces[spec.uid].blocks
            for key in [key for key in cluster.all_keys(spec) if (key in blocks) != cluster.is_indexed(spec.uid, key, worker)]:
                where = "has the block and is not in the index" if key in blocks else "is in the index and lacks the block"
                checker.fail("C3", f"{worker.name} {where}, long after everything was mended", key)
            for key in blocks:
                if checker.still_removed(key):
                    checker.fail("C8", f"{worker.name} has a block that was removed for good", key)
    for uid in cluster.known:
        if uid in state.namespaces and checker.names.is_gone(uid):
            checker.fail("C8", f"the namespace {uid.hex()[:8]} was deleted, and is there", None)
        if uid not in state.namespaces and not checker.names.may_be_gone(uid):
            checker.fail("C3", f"the namespace {uid.hex()[:8]} is not there, and nobody deleted it", None)
    for client in cluster.clients.values():
        index = client.client.index
        if index is None:
            continue
        for spec in cluster.specs:
            keys = cluster.all_keys(spec)
            known = index.locate(spec.uid, keys)
            if known is None:
                checker.fail("C3", f"{client.name} has no mirror, long after everything was mended", None)
                continue
            for seen, there in zip(known, state.catalog.locate(spec.uid, keys), strict=True):
                mine = {client.client.peers.worker_id(peer) for peer, _ in seen}
                members = [state.members.of_holder(holder) for holder, _ in there]
                theirs = {member.info.worker_id for member in members if member is not None}
                checker.count("mirror knows more", len(mine - theirs))  # costs a read that fails
                checker.count("mirror knows less", len(theirs - mine))  # costs a question to the master
    _check_epochs(cluster)


def _check_epochs(cluster: Cluster) -> None:
    """Each epoch has one writer, and none writes after a later one."""
    owners: dict[int, str] = {}
    newest = 0
    for write in cluster.accepted:
        if write.what == "fail-over":
            newest = write.epoch
            continue
        says = f"{write.owner} wrote {write.what} at {write.at_s:.4f} s in epoch {write.epoch}"
        owner = owners.setdefault(write.epoch, write.owner)
        if owner != write.owner and write.epoch not in cluster.lost_epochs:
            cluster.checker.fail("epoch", f"{says} of {owner}", None)
        if write.epoch < newest:
            cluster.checker.fail("epoch", f"{says}, after epoch {newest}", None)
        newest = max(newest, write.epoch)


# --- around -----------------------------------------------------------------------------------------------------------------


class _Errors(logging.Handler):
    """Exceptions that the product logged and went on after."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            self.lines.append(f"{record.name} logged: {record.getMessage()}: {error!r}")


@contextmanager
def quiet() -> Iterator[list[str]]:
    """No logs but what an error of ours would be; no garbage collection in the middle of a run."""
    logger = logging.getLogger("kvpool")
    handler = _Errors()
    before = logger.propagate, logger.level, gc.isenabled()
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    logger.addHandler(handler)
    gc.disable()
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = before[0]
        logger.setLevel(before[1])
        if before[2]:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Told:
    """What one run comes to, for `main`. `words`: of a failure."""

    seed: int
    words: list[str]
    digest: str
    counts: dict[str, int]
    steps: int
    simulated_s: float
    busy_s: float


def tell(seed: int) -> Told:
    """Runs one seed."""
    began = time.process_time()
    outcome = run(seed)
    counts = {**outcome.counts, **{f"fault: {name}": n for name, n in outcome.faults.items()}}
    words = outcome.words() if outcome.failed else []
    told = Told(seed, words, outcome.digest, counts, outcome.steps, outcome.simulated_s, time.process_time() - began)
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    return told


def main(seeds: range, *, say: Callable[[str], None], jobs: int = 1) -> int:
    """Runs them all, in so many processes; 1 when a promise was broken. Stops after a few failures."""
    counts: dict[str, int] = {}
    failures = steps = 0
    busy_s = 0.0
    with ExitStack() as stack:
        if jobs > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs))
            runs: Iterator[Told] = pool.imap(tell, seeds)
        else:
            runs = map(tell, seeds)
        for told in runs:
            steps += told.steps
            busy_s += told.busy_s
            for name, n in told.counts.items():
                counts[name] = counts.get(name, 0) + n
            if told.words:
                failures += 1
                say("\n".join(told.words))
                if failures >= FAILURES_MAX:
                    break
            elif len(seeds) == 1:
                simulated = f"{told.simulated_s:.1f} s simulated, {steps} steps"
                say(f"seed {told.seed}: no promise broken; {simulated}, digest {told.digest}")
    say(" ".join(f"{name}={n}" for name, n in sorted(counts.items())))
    say(f"{len(seeds)} seeds, {failures} with a broken promise, {steps} steps in {busy_s:.1f} s of one core")
    return 1 if failures else 0


def jobs_for(seeds: range) -> int:
    """Processes that are worth it: one a core, and some seeds for each."""
    return max(1, min(len(os.sched_getaffinity(0)), len(seeds) // SEEDS_A_JOB))


SEEDS_A_JOB: Final = 20  # fewer are run sooner than another process starts
COLLECT_EVERY: Final = 16  # seeds, between two rounds of garbage collection
FAILURES_MAX: Final = 3


def print_out(line: str) -> None:
    """To standard output at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
