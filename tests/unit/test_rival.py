"""The learned policy beside LRU: what LRU would have hit is known, and where it is ahead the policy goes its way."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import pytest

from kvpool.core.block import Limits
from kvpool.core.namespaces import WritePolicy
from kvpool.core.policy.hazard import Hazard
from kvpool.core.policy.rival import STAY_MAX, STAY_MIN, Mode, Rival
from kvpool.core.quota import Share
from kvpool.sim.replay import CoreReplay
from kvpool.sim.traces import Request
from tests.support.tables import Rig, chain, spec_of, uid_of
from tests.unit.test_policy import BLOCK, learned


def brain_of(replaying: CoreReplay) -> Hazard:
    return replaying.policy.__self__  # type: ignore[attr-defined, no-any-return]


def replayed(requests: Iterable[Sequence[int]], *, policy: str = "hazard", dram: int, ssd: int = 0) -> CoreReplay:
    """A request a second."""
    replaying = CoreReplay(policy=policy, block_bytes=BLOCK, dram_bytes=dram * BLOCK, ssd_bytes=ssd * BLOCK)
    for i, ids in enumerate(requests):
        replaying.serve(Request(1000.0 * i, len(ids), 1, tuple(ids)))
    replaying.table.check()
    return replaying


def lru_hits(requests: Iterable[Sequence[int]], n_blocks: int) -> int:
    """Of chains: what is used together leaves from its deepest."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in requests:
        hits += next((n for n, block in enumerate(ids) if block not in cached), len(ids))
        for block in reversed(ids):
            cached.pop(block, None)
            cached[block] = None
        while len(cached) > n_blocks:
            cached.popitem(last=False)
    return hits


def to_and_fro(n_requests: int, *, n_chains: int = 107) -> list[Sequence[int]]:
    """A scan that turns at both ends (what was used last is used first), and a few that are asked for all the time."""
    chance = random.Random(3)
    chains = [range(100 * i, 100 * i + chance.randint(1, 40)) for i in range(n_chains)]
    hot = [range(50_000 + 100 * i, 50_000 + 100 * i + chance.randint(1, 40)) for i in range(5)]
    turn, at, found = [*chains, *chains[-2:0:-1]], 0, list[Sequence[int]]()
    for i in range(n_requests):
        if chance.random() < 0.3:
            found.append([*chance.choice(hot), 1_000_000 + i])
        else:
            found.append(turn[at % len(turn)])
            at += 1
    return found


def moving(n_requests: int, *, n_live: int = 200) -> list[range]:
    """Chains of which a tenth is replaced by new ones again and again."""
    chance = random.Random(7)
    live, serial, found = [range(100 * i, 100 * i + chance.randint(10, 40)) for i in range(n_live)], n_live, []
    for i in range(n_requests):
        if i % 100 == 99:
            for _ in range(n_live // 10):
                live[chance.randrange(n_live)] = range(100 * serial, 100 * serial + chance.randint(10, 40))
                serial += 1
        found.append(chance.choice(live))
    return found


def sessions(n_requests: int) -> list[list[int]]:
    chance, live, serial, found = random.Random(4), list[list[int]](), 1000, []
    for _ in range(n_requests):
        serial += 100
        if len(live) < 12:
            live.append([*range(8), *range(serial, serial + chance.randint(1, 9))])
        ids = chance.choice(live)
        found.append([*ids])
        ids += range(serial + 50, serial + 50 + chance.randint(1, 5))
        if len(ids) > 60:
            live.remove(ids)
    return found


@pytest.mark.parametrize(
    ("requests", "n_blocks"),
    [(to_and_fro(2000), 150), (to_and_fro(2000), 500), (moving(2000), 80), (moving(2000), 3000), (sessions(2000), 80)],
)
def test_what_lru_would_have_hit_is_known(requests: list[Sequence[int]], n_blocks: int) -> None:
    replaying = replayed(requests, dram=n_blocks)
    rival = brain_of(replaying).rival
    assert rival.all_hits + rival.hits == replaying.outcome.hits
    assert rival.all_lru_hits + rival.lru_hits == pytest.approx(lru_hits(requests, n_blocks), rel=0.02)


def test_two_tiers_hold_no_block_twice_where_that_costs_more_hits_than_lru_would_have() -> None:
    requests = moving(3000)
    by_lru = replayed(requests, policy="lru", dram=900, ssd=3600)
    replaying = replayed(requests, dram=900, ssd=3600)
    assert brain_of(replaying).tiers[1].lean
    assert replaying.outcome.hits > 0.98 * by_lru.outcome.hits


def full_ssd(rig: Rig) -> None:
    """Chains a, b and c on SSD, all of it, and a in DRAM too."""
    for tag in "abc":
        rig.put_waiting(chain(tag, 8))
        rig.write_down()
        rig.now += 1000
    rig.promote(chain("a", 8))


def test_lean_the_second_copy_goes_and_nothing_else() -> None:
    rig, brain = learned(8, 24, low_watermark=0.0)
    full_ssd(rig)
    n_blocks, n_twice = brain.n_cached, brain.n_copies - brain.n_cached
    assert n_blocks == 24 and n_twice == 8, "the SSD tier is full, with copies of all that is in DRAM"
    brain.tiers[1].lean = True
    rig.put_waiting(chain("d", 4))
    rig.write_down()
    assert all(rig.has(chain(tag, 8)) for tag in "abc") and brain.n_cached == 28
    rig.check()


@pytest.mark.parametrize("why", ["through", "may not"])
def test_what_must_be_on_ssd_is_not_given_up_for_being_in_dram_too(why: str) -> None:
    spec = dataclasses.replace(spec_of(1), write_policy=WritePolicy.THROUGH if why == "through" else WritePolicy.BACK)
    rig = Rig(8, 24, policy="hazard", limits=Limits(low_watermark=0.0), specs=[spec])
    brain = rig.table._dram_policy._brain  # type: ignore[attr-defined]
    full_ssd(rig)
    brain._may_be_lean = why == "through"
    brain.rival.mode = Mode.LEAN
    brain._refresh()
    rig.put_waiting(chain("d", 4))
    rig.write_down()
    assert all(tier & 2 for tier in rig.has(chain("a", 8))), "on SSD still"
    rig.check()


def test_a_second_copy_goes_before_an_extent_of_another_namespace() -> None:
    rig = Rig(1024, 2048, policy="hazard", specs=[spec_of(1), spec_of(2)], limits=Limits(low_watermark=0.0))
    for i in range(100):
        for ns in (1, 2):
            rig.now += 1000
            rig.put_waiting(chain(f"{ns} {i}", 10, ns=ns))
            rig.write_all_down()
    on_ssd_alone = [i for i in range(100) if set(rig.has(chain(f"1 {i}", 10))) == {2}]
    for i in on_ssd_alone[-24:]:
        rig.now += 1000
        rig.get(chain(f"1 {i}", 10))
        rig.promote(chain(f"1 {i}", 10), wanted=True)
    brain = rig.table._dram_policy._brain  # type: ignore[attr-defined]
    brain.tiers[1].lean = True
    for i in range(5):
        rig.now += 1000
        rig.put_waiting(chain(f"new {i}", 10))
        rig.write_all_down()
    assert rig.table.counters["evicted"] == 0 < rig.table.counters["evicted_ssd"]
    rig.check()


def test_a_copy_written_ahead_is_no_spare_one_also_when_it_was_passed_over() -> None:
    rig, brain = learned(64, 16)
    rig.put_waiting(chain("a", 8))
    rig.write_all_down()
    policy, pinned = brain.tiers[1], rig.table.pin(chain("a", 8), now_ms=rig.now, touch=False)
    policy.lean = True
    for block in pinned.blocks:
        rig.table._park_ssd(block.ssd_copy)  # type: ignore[arg-type, union-attr]
    rig.table.unpin(pinned.blocks)  # type: ignore[arg-type]
    assert not any(policy.is_parked(block.ssd_copy) for block in pinned.blocks)  # type: ignore[arg-type, union-attr]
    assert not policy.spares(policy.groups()[0], 1)
    rig.get(chain("a", 4))
    spare = policy.spares(policy.groups()[0], 8)
    assert [copy.block.depth for copy in spare] == [3, 2, 1, 0], "used again: they will not leave DRAM soon"
    rig.check()


@pytest.mark.parametrize("first", [100, 200])
def test_a_head_that_leaves_a_small_dram_takes_nothing_along(first: int) -> None:
    """One session longer than both tiers, three short ones between: what hangs on SSD below a head is not lost for it."""
    requests: list[Request] = []
    now_ms = 0.0
    for turn in range(60):
        small = [range(10**6 * (1 + k % 3), 10**6 * (1 + k % 3) + 4 + turn // 8) for k in range(6)]
        for ids in (range(first + 40 * (turn // 2)), *small):
            requests.append(Request(now_ms, len(ids), 1, tuple(ids)))
            now_ms += 250 if len(ids) < first else 1000
    hits = {}
    for policy in ("lru", "hazard"):
        replaying = CoreReplay(policy=policy, block_bytes=BLOCK, dram_bytes=20 * BLOCK, ssd_bytes=180 * BLOCK)
        for request in requests:
            replaying.serve(request)
        replaying.table.check()
        hits[policy] = replaying.outcome.hits
    assert hits["hazard"] >= 0.98 * hits["lru"]


def test_a_namespace_at_its_quota_says_nothing_of_lru() -> None:
    """A loop over twice its quota: LRU has no hits in it, though all of it would fit the worker."""
    rig = Rig(1100, policy="hazard", specs=[spec_of(1), spec_of(2)])
    rig.table.set_share(uid_of(1), Share(dram=100 * BLOCK, ssd=0))
    hits = 0
    for i in range(3000):
        rig.now += 1000
        batch = chain(f"{i % 40}", 5)
        here = rig.get(batch)
        hits += here
        if here < 5:
            rest = batch.slice(here, 5)
            rig.put(rest, [BLOCK] * len(rest))
    brain = rig.table._dram_policy._brain  # type: ignore[attr-defined]
    assert brain.rival.mode is Mode.LEARNED and hits > 0.35 * 3000 * 5


def judged(rival: Rival, *, ahead: int, times: int = 1, two_tiers: bool = True) -> list[Mode]:
    modes = []
    for _ in range(times):
        rival.hits, rival.lru_hits, rival.blocks = 1000 - ahead, 1000, 2000
        modes.append(rival.judge(1000, two_tiers=two_tiers, lean=two_tiers))
    return modes


def test_modes() -> None:
    rival = Rival()
    assert set(judged(rival, ahead=15, times=100)) == {Mode.LEARNED}, "two tiers: LRU may be ahead a little, DRAM has more hits"
    assert set(judged(rival, ahead=-300, times=100)) == {Mode.LEARNED}
    assert set(judged(rival, ahead=0, times=STAY_MIN)) == {Mode.LEARNED}
    modes = judged(rival, ahead=100, times=60)
    assert modes.index(Mode.LEAN) < modes.index(Mode.RECENT) < 40 and modes[-1] is Mode.RECENT
    modes = judged(rival, ahead=0, times=400)
    assert modes[-1] is Mode.LEARNED and Mode.LEAN in modes
    assert Mode.LEAN not in judged(rival, ahead=100, times=60, two_tiers=False)


def test_a_trial_that_fails_is_not_repeated_for_twice_as_long() -> None:
    rival, stays = Rival(), []
    for _ in range(12):
        n = 0
        while rival.mode is Mode.LEARNED:
            judged(rival, ahead=100, two_tiers=False)
        while rival.mode is Mode.RECENT:
            judged(rival, ahead=0, two_tiers=False)
            n += 1
        stays.append(n)
    assert stays[0] in range(STAY_MIN - 8, STAY_MIN + 8) and 1.8 < stays[2] / stays[1] < 2.2
    assert max(stays) <= STAY_MAX + 8 and stays[-1] == stays[-2]
    judged(rival, ahead=-100, times=2 * STAY_MAX, two_tiers=False)
    while rival.mode is Mode.LEARNED:
        judged(rival, ahead=100, two_tiers=False)
    assert len([mode for mode in judged(rival, ahead=0, times=100, two_tiers=False) if mode is Mode.RECENT]) < 2 * STAY_MIN


@pytest.mark.parametrize("n_other", [0, 40])
def test_where_the_learned_order_is_better_it_stays(n_other: int) -> None:
    chance, serial, requests = random.Random(2), 10_000, []
    for i in range(3000):
        serial += 100
        loop = range(100 * (i // 2 % 12), 100 * (i // 2 % 12) + 8)
        requests.append(loop if i % 2 else range(serial, serial + chance.randint(4, 12 + n_other)))
    replaying = replayed(requests, dram=70)
    assert brain_of(replaying).rival.mode is Mode.LEARNED
    assert replaying.outcome.hits > 2 * lru_hits(requests, 70)
