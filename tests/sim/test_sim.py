"""The simulation: it finds nothing in what we have, finds each promise that is broken on purpose, and repeats itself exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.holding import Holding
from kvpool.core.session import Accept, Inbox, Reporter
from kvpool.core.types import BlockCode, Tiers
from kvpool.sim import node as sim_node
from kvpool.sim import run as sim_run
from kvpool.sim.cluster import Cluster
from kvpool.sim.disk import SimSsd
from kvpool.sim.faults import FAULTS
from kvpool.sim.link import SimLink
from kvpool.sim.memory import SimDram
from kvpool.sim.network import Pool, Quality
from kvpool.sim.plane import Plane
from kvpool.sim.puts import Write
from kvpool.sim.redis import RedisData
from kvpool.sim.run import quiet, run
from kvpool.sim.scenario import Scenario
from kvpool.sim.session import SimAgent
from kvpool.sim.threads import stand_ins
from kvpool.worker.tiers.base import TierError, Trouble
from tests.sim.finding import SEEDS_TO_FIND, found, rough

SEEDS = 50
ALIKE = (11, 101, 104, 106, 120)  # several mirrors, one of the two stores each


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_no_promise_is_broken(first: int) -> None:
    for seed in range(first, first + 10):
        outcome = run(seed)
        assert not outcome.failed, "\n".join(outcome.words())


def test_the_runs_meet_what_they_are_for() -> None:
    """Hits by both ways, every kind of answer, most kinds of faults: else the seeds above prove little."""
    counts: dict[str, int] = {}
    faults: set[str] = set()
    for seed in range(SEEDS, SEEDS + 20):
        outcome = run(seed)
        faults |= set(outcome.faults)
        for name, n in outcome.counts.items():
            counts[name] = counts.get(name, 0) + n
    wanted = ("hit tcp", "hit shm", "put stored", "put already", "put unlisted", "put full", "miss evicted", "miss removed",
              "miss worker_lost", "removed", "C3 put", "C3 get", "C5", "C8")  # fmt: skip
    assert not [name for name in wanted if counts.get(name, 0) < 5], counts
    assert len(faults) >= len(FAULTS) * 2 // 3, faults


def test_a_run_is_the_same_again() -> None:
    assert run(7).digest == run(7).digest != run(8).digest


def test_a_run_is_the_same_in_other_processes() -> None:
    """Whatever the process' hash seed and the addresses of its objects."""
    program = f"from kvpool.sim.run import run; print(*(run(seed).digest for seed in {ALIKE!r}))"
    said = set()
    for hash_seed in ("0", "4711"):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True,
                              env={**os.environ, "PYTHONHASHSEED": hash_seed})  # fmt: skip
        said.add(done.stdout.strip())
    assert said == {" ".join(run(seed).digest for seed in ALIKE)}


def test_a_failure_tells_its_seed_the_command_and_the_story(monkeypatch: pytest.MonkeyPatch) -> None:
    break_listing(monkeypatch)
    outcome = next(outcome for outcome in map(run, range(SEEDS_TO_FIND)) if outcome.failed)
    words = outcome.words()
    assert words[0].startswith(f"seed {outcome.seed}: C3 broken at ")
    assert any(f"python -m kvpool.sim --seed {outcome.seed}" in line for line in words)
    key = outcome.violations[0].key
    name = outcome.cluster.story.name_of(key)  # type: ignore[arg-type]
    assert name in words[0]
    assert any("commits it" in line for line in words) and any(" puts " in line for line in words)
    again = run(outcome.seed)
    assert again.words() == words


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert sim_run.main(range(3, 4), say=said.append) == 0
    assert said[-1].startswith("1 seeds, 0 with a broken promise")
    break_listing(monkeypatch)
    assert sim_run.main(range(SEEDS_TO_FIND), say=said.append) == 1
    assert any("again: python -m kvpool.sim --seed" in line for line in said)


# --- each promise, broken on purpose ------------------------------------------------------------------------------------------


def flips(seed: int) -> Scenario:
    return rough(seed, "bit flip", ssd_blocks=60, dram_blocks=10)


def test_it_finds_bytes_that_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: SSD reads that go by the record alone."""

    async def read_block(self: SimSsd, slot: Any, *, block_sum: int) -> bytes:
        await self._io(writes=False)
        return self._file(slot).payload[slot & 0xFFFFFFFF]

    monkeypatch.setattr(SimSsd, "read_block", read_block)
    found("C1", flips)


def test_it_finds_a_commit_before_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: blocks that are visible while they are received."""
    receive = Write._receive

    async def commit_then_receive(self: Write, slots: Any) -> None:
        kept = [block for block in slots.blocks if block is not None]
        self.node.table.commit(kept, [bytes(8)] * len(kept), now_ms=self.node.now_ms())
        for i, block in enumerate(slots.blocks):
            if block is not None:
                slots.codes[i] = int(BlockCode.STORED)
        slots.blocks = [None] * len(slots.blocks)
        await receive(self, slots)

    monkeypatch.setattr(Write, "_receive", commit_then_receive)
    found("C2", lambda seed: rough(seed, n_clients=3, n_chains=2, dram_blocks=6, quality=Quality(slow_share=0.2)))


def break_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(self: Plane, mark: int, until: float) -> bool:
        return True

    monkeypatch.setattr(Plane, "wait_listed", at_once)


def test_it_finds_an_answer_before_the_index_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """C3: puts answered `stored` without waiting for the master."""
    break_listing(monkeypatch)
    found("C3")


def test_it_finds_reports_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """C3: a new stream that does not send again what was under way, and a master that does not look at the numbers."""

    def take_any(self: Inbox, seq: int) -> Accept:
        self._expected = seq + 1
        return Accept.IGNORED if self._awaiting else Accept.OK

    monkeypatch.setattr(Reporter, "rewind", lambda self: self._flight.clear())
    monkeypatch.setattr(Inbox, "accept", take_any)
    found("C3", lambda seed: rough(seed, "reset", "partition", quality=Quality(loss=0.01)))


def test_it_finds_a_slot_whose_generation_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """C4: a reader that stood still past its hold takes other bytes for its own."""
    monkeypatch.setattr(SimDram, "bump", lambda self, uid, gen_index: None)

    def still_readers(seed: int) -> Scenario:
        return rough(seed, dram_blocks=6, ssd_blocks=0, n_clients=3, n_workers=1, replicas=1, stumbles=0.05)

    promises: set[str] = set()
    for seed in range(SEEDS_TO_FIND):
        promises |= {violation.promise for violation in run(seed, scenario=still_readers(seed)).violations}
        if promises & {"C1", "C2"}:
            return
    raise AssertionError(f"readers that stood still got no other block's bytes ({promises})")


def test_it_finds_a_held_copy_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """C4: holds that do not protect."""
    monkeypatch.setattr(Holding, "_protect", lambda self, block, *, view: Tiers.DRAM if block.dram is not None else None)
    monkeypatch.setattr(Holding, "_let_go", lambda self, hold: None)
    found("C4", lambda seed: rough(seed, dram_blocks=10, ssd_blocks=0, chain_blocks=8))


def test_it_finds_a_hold_that_is_over_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """C5: the hold is given, and ends at once."""
    add = Holding._add_hold

    def shorter(self: Holding, protects: Any, ttl_ms: int, now_ms: int, **more: Any) -> Any:
        return add(self, protects, 0, now_ms, **more)

    monkeypatch.setattr(Holding, "_add_hold", shorter)
    found("C5", lambda seed: rough(seed, n_workers=1, dram_blocks=10, ssd_blocks=0, chain_blocks=6, n_chains=6))


def test_it_finds_a_call_without_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: a client that waits for a frozen worker for as long as it takes."""
    send = SimLink._send

    async def patient(self: SimLink, ask: Any, until: float, bodies: Any = ()) -> Any:
        return await send(self, ask, until + 1e6, bodies)

    monkeypatch.setattr(SimLink, "_send", patient)
    found("C6", lambda seed: rough(seed, "worker pause", n_workers=2))


def test_it_finds_a_master_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: the same towards the master."""
    call = Pool.call

    async def patient(self: Pool, request: Any, until: float) -> Any:
        return await call(self, request, until + 1e6)

    monkeypatch.setattr(Pool, "call", patient)
    found("C6", lambda seed: rough(seed, "master pause", "partition", n_masters=1))


def test_it_finds_an_ssd_that_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: a worker that starts empty."""
    monkeypatch.setattr(sim_node, "adopt", lambda node, device: device.disk.files.clear())
    found("C7", lambda seed: rough(seed, "worker kill", ssd_blocks=60, dram_blocks=10))


def test_it_finds_records_that_outlive_a_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: removed from memory, and back after a restart."""

    async def erase(self: SimSsd, slots: Any) -> None:
        return None

    monkeypatch.setattr(SimSsd, "erase", erase)
    found("C8", lambda seed: rough(seed, "worker kill", ssd_blocks=60, dram_blocks=10, n_chains=4))


def test_it_finds_an_erasure_that_was_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: a removal confirmed before it is on the device, then a power cut."""

    async def sync(self: SimSsd) -> None:
        return None

    monkeypatch.setattr(SimSsd, "sync", sync)
    write = SimSsd.write

    async def write_through(self: SimSsd, *args: Any) -> None:
        await write(self, *args)
        self.disk.sync()

    monkeypatch.setattr(SimSsd, "write", write_through)
    found("C8", lambda seed: rough(seed, "worker power", ssd_blocks=60, dram_blocks=10, n_chains=4))


def test_it_finds_a_worker_that_does_not_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: what was removed while a worker was away is not told to it."""
    catch_up = sim_node.SimNode.catch_up_slowly

    async def forgetful(self: sim_node.SimNode, spec: Any, *, drop_all: bool, missed: Any) -> None:
        await catch_up(self, spec, drop_all=False, missed=[])

    monkeypatch.setattr(sim_node.SimNode, "catch_up_slowly", forgetful)
    monkeypatch.setattr("kvpool.master.state.MasterState.known_away", lambda self, namespace, connected: [])
    found("C8", lambda seed: rough(seed, "worker kill", "partition", ssd_blocks=60, dram_blocks=10))


def test_it_finds_two_writers_of_one_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fencing: a store that takes what an old leader writes."""
    monkeypatch.setattr(RedisData, "may_write", lambda self, owner, epoch: True)
    found("epoch", lambda seed: rough(seed, "master pause", "store pause", "worker kill", n_masters=2))


# --- what it has found ----------------------------------------------------------------------------------------------------------


def test_a_worker_whose_disk_was_ill_when_it_came_back_serves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not catch up with removals, and waited for another session, which never came."""
    ill_until = 2.0
    io = SimSsd._io

    async def ill(self: SimSsd, *, writes: bool) -> None:
        if self.disk.loop.time() < ill_until:
            raise TierError(Trouble.IO, "input/output error")
        await io(self, writes=writes)

    monkeypatch.setattr(SimSsd, "_io", ill)
    catch_up = sim_node.SimNode.catch_up_slowly

    async def behind(self: sim_node.SimNode, spec: Any, *, drop_all: bool, missed: Any) -> None:
        self._blocked.add(spec.uid)
        await catch_up(self, spec, drop_all=True, missed=missed)

    monkeypatch.setattr(sim_node.SimNode, "catch_up_slowly", behind)
    outcome = run(1, scenario=rough(1, ssd_blocks=40, n_masters=1))
    assert not outcome.failed, "\n".join(outcome.words())
    assert any(event.what.startswith("cannot catch up") for event in outcome.cluster.story.events)


def test_a_late_answer_to_one_master_is_none_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was slow to remove answered its next master's first removals with that."""
    seen: list[tuple[str, int, int]] = []
    remove = SimAgent._remove

    async def noted(self: SimAgent, task: Any) -> None:
        seen.append((self.sim.worker_id, self.sim.incarnation, task.task_id))
        await remove(self, task)

    monkeypatch.setattr(SimAgent, "_remove", noted)
    for seed in range(6):
        seen.clear()
        outcome = run(seed, scenario=replace(rough(seed, "master kill", n_masters=1), fault_every_s=1.0))
        assert not outcome.failed, "\n".join(outcome.words())
        assert outcome.cluster.masters["m0"].starts > 1 and seen
        assert len(set(seen)) == len(seen)


def test_a_replica_that_lost_a_chain_costs_one_more_round() -> None:
    """Each round found one block out, and a long chain was a miss though another worker had all of it."""
    outcome = run(104)
    assert not outcome.failed, "\n".join(outcome.words())


def test_a_put_into_a_namespace_that_was_deleted_ends_in_time() -> None:
    """It asked the master about the namespace for a second, whatever its deadline was."""
    cluster = Cluster(1, rough(1, n_masters=1, n_workers=1, n_names=1, replicas=1))
    loop, took, made = cluster.loop, [], []

    async def make() -> None:
        made.append(await cluster.clients["c0"].client.create(cluster.wanted("name0"), until=loop.time() + 1.0))

    async def play() -> None:
        client, spec = cluster.clients["c0"].client, made[0]
        node, master = cluster.workers["w0"].node, cluster.masters["m0"].process
        assert node is not None and master is not None
        node.delete_namespace(spec.uid)
        master.pause()
        began = loop.time()
        outcomes = await client.put(spec, cluster.batch(spec, 0, 0, 2), until=began + 0.4)
        assert not any(outcome.value == "stored" for outcome in outcomes)
        took.append(loop.time() - began)

    with quiet(), stand_ins(link=cluster.link, channel=cluster.channel):
        cluster.start()
        loop.run_until(0.5)
        process = cluster.add_client("c0", "c0", mirrored=True).process
        process.spawn(make())
        loop.run_until(1.5)
        process.spawn(play())
        loop.run_until(5.0)
        cluster.network.down = True
        assert loop.end() == []
    assert 0.2 < took[0] < 0.45
