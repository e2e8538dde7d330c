"""The learned policy: what it keeps and forgets, in what order blocks leave, and that a chain is lost from its end."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from librt.vecs import vec

from kvpool.core.block import Block, Limits
from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import WritePolicy
from kvpool.core.pins import PinLevel
from kvpool.core.policy import runs
from kvpool.core.policy.admission import DAY_S, WriteBudget
from kvpool.core.policy.classes import EDGES_S, N_BINS, first_key, gap_bucket, new_bucket
from kvpool.core.policy.hazard import REQUESTS_MAX, WAITING_MAX, Hazard
from kvpool.core.policy.hazard_runs import HISTORY_MIN
from kvpool.core.policy.history import History
from kvpool.core.policy.lifetable import LifeTable, gittins
from kvpool.core.policy.make import POLICIES, policy_of
from kvpool.core.retention import pack_hint
from kvpool.core.types import BlockCode
from kvpool.errors import InvalidArgument
from kvpool.sim.optimum import optimum_hits
from kvpool.sim.replay import CoreReplay
from kvpool.sim.traces import Request
from tests.support.tables import BOTH, DRAM, SSD, SUMS, Rig, batch_of, chain, spec_of
from tests.support.textbook import TEXTBOOK, access

BLOCK = 4096
FULL, RESERVED = BlockCode.FULL, BlockCode.RESERVED


def learned(n_dram: int, n_ssd: int | None = None, **limits: object) -> tuple[Rig, Hazard]:
    rig = Rig(n_dram, n_ssd, policy="hazard", limits=Limits(**limits))  # type: ignore[arg-type]
    return rig, rig.table._dram_policy._brain  # type: ignore[attr-defined]


# --- tables -------------------------------------------------------------------------------------------------------------


def test_a_constant_chance_of_use_is_worth_less_the_older() -> None:
    index = gittins(np.full((1, N_BINS), 0.2), 0.25)[0]
    assert index[0] > index[1] and (np.diff(index[2:]) < 0).all(), "the bins grow: the order of LRU"


def test_a_class_that_comes_back_late_is_worth_waiting_for() -> None:
    chance = np.full((2, N_BINS), 0.01)
    chance[0, 7] = 0.9  # used again after 16 to 32 s
    late, never = gittins(chance, 0.25)
    assert late[6] > 10 * never[6] and late[9] == pytest.approx(never[9])


def test_buckets() -> None:
    assert [new_bucket(n) for n in (0, 2, 3, 11, 12, 48)] == [0, 0, 1, 2, 3, 5]
    assert [gap_bucket(s) for s in (0, 4, 63, 256)] == [0, 1, 2, 4]
    assert len({first_key(u, t, n, g) for u in range(5) for t in range(2) for n in range(6) for g in range(5)}) == 300


def test_tables_survive_and_what_is_damaged_is_refused() -> None:
    table = LifeTable()
    key = first_key(1, 0, 2, 0)
    table.reached[key], table.reached[key + 1] = 100.0, 90.0
    table.used[key], table.used[key + 1] = 10.0, 80.0
    table.refresh()
    saved = table.to_bytes()
    other = LifeTable()
    other.from_bytes(saved)
    assert other.index[key] == pytest.approx(table.index[key], rel=0.1) and list(other.index) != list(LifeTable().index)
    for broken in (b"", saved[:-1], saved[:-4] + b"\xff\xff\xff\xff", b"x" + saved[1:]):
        with pytest.raises(ValueError, match=r"life table|counts"):
            LifeTable().from_bytes(broken)


# --- history ------------------------------------------------------------------------------------------------------------


def test_history_against_plain_lists() -> None:
    chance, history = random.Random(5), History()
    runs: dict[int, list[int]] = {}  # ghosts, the first (shallowest) last
    serial = 0
    for _ in range(3000):
        dice = chance.random()
        if dice < 0.5:
            no = history.add(0.0, 10, first_key(0, 0, 0, 0), 10)
            prints = [serial + i for i in range(chance.randint(1, 6))]
            serial += 10
            history.become_ghosts(no, prints[::-1], [1 + p % 9 for p in prints[::-1]])
            runs[no] = prints
        elif dice < 0.9 and runs:
            no = chance.choice(list(runs))
            wanted = list(reversed(runs[no]))[: chance.randint(1, 6)]
            assert history.find(wanted[0]) == no and not (len(wanted) > 1 and history.find(wanted[1]))
            assert history.take(no, [*wanted, 1 << 50]) == bytes(1 + p % 9 for p in wanted)
            del runs[no][-len(wanted) :]
            if not runs[no]:
                del runs[no]
        elif runs:
            assert history.forget_oldest() == next(iter(runs))
            del runs[next(iter(runs))]
        assert history.n_ghosts == sum(map(len, runs.values()))
    history.check()
    assert history.n_bytes() / serial < 48


def test_runs_grow_older_through_every_bin() -> None:
    history, reached = History(), vec[float]([0.0] * N_BINS)

    def watched(*numbers: int) -> list[object]:
        return [no if no in numbers else None for no in range(8)]

    no = history.add(0.0, 4, 0, 4)
    assert history.age(100.0, reached, watched(no)) == [] and history.key[no] == 0, "no other request came"
    history.next_request(1 << 20)
    other = history.add(EDGES_S[1] - 0.01, 4, 0, 4)
    assert history.pass_by(EDGES_S[1] - 0.01, reached, watched(no, other)) == [no] and history.soonest_s <= EDGES_S[1]
    assert history.age(EDGES_S[3], reached, watched(no)) == [no] * 3 and history.key[no] == 4 and history.soonest_s <= EDGES_S[4]
    assert history.age(1e9, reached, watched()) == [] and history.key[no] == N_BINS - 1
    assert history.age(1e12, reached, watched(no)) == [] and list(reached) == [0.0] + [1.0] * (N_BINS - 1)
    assert history.key[other] == 0
    history.drop(other)
    last = history.add(1e12, 4, 0, 4)
    assert history.age(2e12, reached, watched(last)) == [] and history.key[last] == 0, "also when its others are gone"
    history.next_request(1 << 20)
    before = history.add(1e12 + 3, 4, 0, 4)
    history.next_request(1 << 20)
    assert history.pass_by(1e12 + 5, reached, watched(last, before)) == [last, before]
    assert [history.key[last], history.key[before]] == [5, 4] and history.soonest_s <= 1e12 + 3 + EDGES_S[4]
    assert history.age(1e12 + 3 + EDGES_S[4], reached, watched(before)) == [before]
    history.next_request(1 << 20)
    assert history.pass_by(1e15, reached, watched()) == [] and history.age(1e15, reached, watched()) == []
    assert history.key[last] == history.key[before] == N_BINS - 1


# --- one tier -----------------------------------------------------------------------------------------------------------


def test_a_chain_is_lost_from_its_end() -> None:
    rig, _ = learned(10)
    rig.put(chain("a", 8))
    rig.now = 1000
    rig.put(chain("b", 5))
    assert rig.has(chain("a", 8)) == [DRAM] * 5 + [0] * 3 and rig.has(chain("b", 5)) == [DRAM] * 5
    rig.check()


def test_no_parent_leaves_before_a_child_of_another_branch() -> None:
    rig, _ = learned(12)
    rig.put(chain("a", 4))
    branch = chain("a", 4).slice(0, 4)
    rig.now = 600_000
    from tests.support.tables import batch_of

    rig.put(batch_of([f"x{i}" for i in range(6)], parent="a3", depth=4))  # hangs below a, used much later
    rig.now += 1000
    rig.put(chain("c", 8))
    tiers = rig.has(branch)
    below = rig.has(batch_of([f"x{i}" for i in range(6)], parent="a3", depth=4))
    assert all(tiers) or not any(below), "a hole above what stays"
    rig.check()


def test_what_is_held_stays_and_leaves_when_released() -> None:
    rig, _ = learned(10)
    rig.put(chain("a", 4))
    hold = rig.hold(chain("a", 4), ttl_ms=10_000)
    for i in range(5):
        rig.now += 100
        rig.put(chain(f"b{i}-", 6))
        rig.check()
    assert rig.has(chain("a", 4)) == [DRAM] * 4
    rig.table.release([hold.hold_id])
    rig.now += 100_000
    rig.put(chain("z", 10))
    assert not all(rig.has(chain("a", 4)))


def test_what_somebody_wants_in_dram_comes_up_where_no_extent_of_another_namespace_is_clean() -> None:
    rig = Rig(64, 512, policy="hazard", specs=[spec_of(1), spec_of(2)])
    rig.put(chain("a", 8))
    rig.write_all_down()
    others = [chain(f"b{i}-", 8, ns=2) for i in range(8)]
    for other in others:
        rig.now += 100
        assert set(rig.put_waiting(other)) == {BlockCode.RESERVED}
    for other in others[::2]:  # each extent has a chain that stays and one that leaves
        rig.now += 1000
        rig.get(other)
    rig.write_down()
    assert rig.has(chain("a", 8)) == [SSD] * 8
    for _ in range(10):
        rig.promote(chain("a", 8), wanted=True)
        rig.write_down()
    assert rig.has(chain("a", 8)) == [BOTH] * 8
    rig.check()


def test_a_chain_whose_end_was_put_first_is_used_as_a_whole() -> None:
    rig, brain = learned(20)
    whole = chain("a", 8)
    rig.put(whole.slice(4, 8))
    rig.put(whole.slice(0, 4))
    assert rig.get(whole) == 8 and brain._n_runs == 1
    rig.check()


@pytest.mark.parametrize("part", [1, 3])
def test_a_chain_that_comes_in_parts_has_the_runs_of_one_that_comes_whole(part: int) -> None:
    rig, brain = learned(600)
    whole = chain("a", 480)
    for at in range(0, 480, part):
        rig.put(whole.slice(at, at + part))
        assert brain._n_runs <= 3
        if at % 60 == 0:
            rig.check()
    rig.now = 5000
    assert rig.get(whole) == 480 and brain._n_runs == 1
    rig.check()


def test_a_block_that_is_named_twice_in_a_batch_is_used_once() -> None:
    rig, _ = learned(20)
    rig.put(chain("a", 4))
    rig.now = 1000
    keys = chain("a", 4).split()
    twice = KeyBatch(chain("a", 1).namespace, b"".join([*keys[:2], *keys[:1], *keys[1:3], *keys[1:2]]), chained=False)
    assert rig.get(twice) == 6
    blocks = rig.table.spaces[twice.namespace].blocks
    assert [run.uses[run.index(block)] for block in map(blocks.__getitem__, keys) if (run := block.run)] == [2, 2, 2, 1]
    rig.check()


def test_blocks_used_in_another_order_than_their_chains_can_still_leave() -> None:
    rig, _ = learned(10)
    rig.put(chain("a", 10))
    rig.get(batch_of([f"a{i}" for i in reversed(range(10))], chained=False))
    rig.check()
    assert set(rig.put(chain("b", 10))) == {BlockCode.STORED} and rig.get(chain("b", 10)) == 10
    rig.check()


def test_blocks_of_no_chain_are_found_among_few_in_whatever_order_they_are_used() -> None:
    rig, brain = learned(1000)
    names: list[object] = [f"x{i}" for i in range(1000)]
    rig.put(batch_of(names, chained=False))
    for seed in range(4):
        rig.get(batch_of(names, chained=False))
        assert max(len(run.members) for run in brain.runs()) <= (64 if seed else 1000)
        rig.now += 61_000
        random.Random(seed).shuffle(names)
    rig.check()


def test_a_run_has_blocks_of_one_size() -> None:
    rig, _ = learned(100)
    sizes = [BLOCK, 1000, BLOCK, BLOCK, 1000, BLOCK]
    rig.put(chain("a", 6), sizes)
    rig.check()
    rig.get(chain("a", 6))
    rig.check()


def test_the_put_that_follows_a_get_is_no_use_of_its_own() -> None:
    rig, brain = learned(100)
    rig.put(chain("a", 4))
    rig.now = 5_000
    rig.get(chain("a", 6))
    rig.table.tiers_of(chain("a", 4), now_ms=rig.now + 50, touch=True)  # the client says what it found
    rig.now = 5_100
    rig.put(chain("a", 6))
    root = rig.table.spaces[chain("a", 1).namespace].blocks[chain("a", 1).split()[0]]
    assert root.run is not None and root.run.uses[0] == 2
    assert len({run.tick for run in brain.runs()}) == 1, "all of one request"


def test_a_ghost_counts_as_known_when_it_comes_back() -> None:
    rig, brain = learned(8)
    rig.put(chain("a", 6))
    rig.now = 10_000
    rig.put(chain("b", 8))
    assert brain.history.n_ghosts and not all(rig.has(chain("a", 6)))
    rig.now = 20_000
    n_ghosts = brain.history.n_ghosts
    gone = rig.has(chain("a", 6)).index(0)
    rig.put(chain("a", 6))
    block = rig.table.spaces[chain("a", 1).namespace].blocks[chain("a", 6).split()[gone]]
    assert block.run is not None and block.run.uses[block.run.index(block)] == 2
    assert brain.history.n_ghosts >= n_ghosts - 6
    rig.check()


def test_it_learns_who_comes_back_and_lru_does_not() -> None:
    """A loop over a set larger than the cache, between one-time requests: LRU keeps nothing of it."""
    chance = random.Random(1)
    requests, serial = [], 10_000
    for i in range(1500):
        if i % 2:
            serial += 100
            ids = tuple(range(serial, serial + chance.randint(4, 12)))
        else:
            ids = tuple(range(100 * (i // 2 % 12), 100 * (i // 2 % 12) + 8))
        requests.append(Request(500.0 * i, 1, 1, ids))
    hits = {}
    for policy in ("hazard", "lru"):
        replaying = CoreReplay(policy=policy, block_bytes=BLOCK, dram_bytes=70 * BLOCK)
        for request in requests:
            replaying.serve(request)
        replaying.table.check()
        assert replaying.table.dram.used_bytes <= 70 * BLOCK
        hits[policy] = replaying.outcome.hits
    best = optimum_hits((r.ids for r in requests), 70)
    assert hits["hazard"] > 0.7 * best > 2 * hits["lru"]


def test_sessions_one_after_the_other_longer_than_the_cache_are_served_as_by_recency() -> None:
    """Turns of one session on a document that fits in no cache, then the next session's: nothing is kept of the one before."""
    chance, requests, at_ms = random.Random(3), [], 0.0
    for which in range(400):
        n_blocks = chance.randint(60, 300)
        for turn in range(chance.randint(1, 3)):
            at_ms += chance.expovariate(1 / 5000)
            own = 1_000_000 + 100 * len(requests)
            ids = (*range(1000 * which, 1000 * which + n_blocks), *range(own, own + 1 + turn % 4))
            requests.append(Request(at_ms, len(ids), 1, ids))
    hits = {}
    for policy in ("hazard", "lru"):
        replaying = CoreReplay(policy=policy, block_bytes=BLOCK, dram_bytes=60 * BLOCK)
        for request in requests:
            replaying.serve(request)
        replaying.table.check()
        hits[policy] = replaying.outcome.hits
    assert hits["hazard"] >= 0.99 * hits["lru"]


def test_where_all_requests_have_one_time_ages_go_by_requests() -> None:
    """Sessions that grow, between long prompts that come once, and a clock that stands still."""
    chance, requests, live, serial = random.Random(1), [], list[list[int]](), 1000
    for _ in range(2000):
        serial += 100
        if chance.random() < 0.5:
            requests.append((*range(20), *range(serial, serial + 50)))
            continue
        if len(live) < 6:
            live.append([*range(20), *range(serial, serial + 30)])
        chain = chance.choice(live)
        requests.append((*chain,))
        chain += range(serial + 50, serial + 56)
        if len(chain) > 70:
            live.remove(chain)
    replaying = CoreReplay(policy="hazard", block_bytes=BLOCK, dram_bytes=330 * BLOCK)
    for ids in requests:
        replaying.serve(Request(0.0, len(ids), 1, ids))
    assert replaying.outcome.hits > 0.92 * optimum_hits(requests, 330)


def worthless(new: int) -> tuple[Rig, Hazard]:
    """A full pool of what is often used again; of requests with so many new blocks it is learned that they never are."""
    rig, brain = learned(8)
    rig.put(chain("hot", 8))
    for _ in range(9):
        rig.now += 1000
        rig.get(chain("hot", 8))
    table = brain.table
    for gap in range(5):
        for tail in (0, 1):
            table.reached[first_key(0, tail, new_bucket(new), gap)] = 5000.0
            hot = first_key(4, tail, 0, gap)
            table.reached[hot], table.used[hot] = 5000.0, 4900.0
    table.refresh()
    return rig, brain


def test_what_is_worth_less_than_all_that_is_there_is_refused_and_known_when_it_comes_again() -> None:
    rig, brain = worthless(4)
    assert list(rig.put(chain("new", 4))) == [FULL] * 4 and rig.table.counters["refused"] == 4
    assert rig.has(chain("hot", 8)) == [DRAM] * 8
    rig.check()
    known = brain.history.n_ghosts
    assert known == 4
    rig.now += 100_000
    rig.put(chain("new", 4))
    assert brain.history.n_ghosts <= known, "it came again: no new blocks"
    rig.check()


def test_what_is_remembered_of_refused_puts_is_bounded() -> None:
    rig, brain = worthless(50)
    for i in range(300):
        rig.now += 100
        rig.get(chain("hot", 8))
        rig.put(chain(f"new{i}-", 200))
    assert rig.table.counters["refused"] > 40_000
    assert sum(len(request.refused or ()) for request in brain._requests.values()) <= HISTORY_MIN


def test_what_is_refused_behind_blocks_under_way_is_accounted_when_they_are_there() -> None:
    """Batch by batch: the first was stored in part, the next ones were refused before that was done."""
    rig, brain = learned(64)
    blocks = [block for block in rig.reserve(chain("a", 16)).blocks if block is not None]
    tick = blocks[0].tick
    brain.refused(blocks[4:8], tick)
    brain.refused(blocks[8:16], tick)
    assert brain.history.n_ghosts == 0
    brain.tiers[0].add(blocks[:4], tick, range(4))
    assert brain.history.n_ghosts == 12 and brain._n_waiting == 0
    found = 4
    while found < 16:
        no = brain.history.find(runs.fingerprint(blocks[found]))
        found += len(brain.history.take(no, map(runs.fingerprint, blocks[found:])))
    assert not brain.history.n_ghosts


def test_what_is_refused_behind_blocks_that_never_come_is_bounded() -> None:
    rig, brain = learned(WAITING_MAX + 200)
    blocks = [block for block in rig.reserve(chain("a", WAITING_MAX + 100)).blocks if block is not None]
    brain.refused(blocks[50:], blocks[0].tick)
    assert brain._n_waiting == 0, "more than may wait"
    brain.refused(blocks[10:50], blocks[0].tick + 1)
    assert brain._n_waiting == 40
    for i in range(REQUESTS_MAX + 1):
        brain.worth_new(blocks[:1], blocks[0].tick + 2 + i)
    assert brain._n_waiting == 0


def test_nothing_is_kept_for_a_put_that_gave_up() -> None:
    rig = Rig(16, 1, limits=Limits(low_watermark=1.0), specs=[spec_of(1), spec_of(2)], policy="hazard")
    rig.put(chain("a", 20, 16))
    reserved = rig.reserve(chain("a", 27))
    assert reserved.must_wait
    rig.table.abort(reserved.blocks)
    rig.write_down()
    other = [batch_of([name], ns=2, chained=False) for name in "xyz"]
    assert [list(rig.put_waiting(batch)) for batch in other] == [[BlockCode.FULL]] * 3
    rig.table.gave_up(reserved.use)
    assert [list(rig.put_waiting(batch)) for batch in other] == [[BlockCode.RESERVED]] * 3
    rig.check()


@pytest.mark.parametrize("why", ["priority", "pin"])
def test_what_somebody_wants_kept_is_never_refused(why: str) -> None:
    rig, _ = worthless(4)
    batch = chain("new", 4)
    if why == "pin":
        rig.table.pin_keys(batch.namespace, batch.split(), [PinLevel.SOFT] * 4, [rig.now + 10_000] * 4)
    reserved = rig.table.reserve(batch, [BLOCK] * 4, now_ms=rig.now, hints=[pack_hint(0, 60 if why == "priority" else None)] * 4)
    assert list(reserved.codes) == [RESERVED] * 4 and rig.table.counters["refused"] == 0
    rig.fill(reserved)
    rig.commit(reserved)
    rig.check()


def test_runs_grow_older_while_nobody_asks() -> None:
    rig, brain = learned(100)
    rig.put(chain("a", 10))
    rig.now += 100_000
    rig.table.expire(rig.now)
    assert brain.now_s == rig.now / 1000


def test_the_order_is_bounded_where_nothing_has_to_leave() -> None:
    rig, _ = learned(100)
    batch = chain("a", 10)
    rig.put(batch)
    for _ in range(1000):
        rig.now += 61_000
        rig.table.tiers_of(batch, now_ms=rig.now, touch=True)
    assert max(len(group._heap) for group in rig.table._dram_policy.groups()) < 2000  # type: ignore[attr-defined]


def test_history_is_small_and_bounded() -> None:
    rig, brain = learned(300)
    for i in range(400):
        rig.now += 300
        rig.put(chain(f"{i}-", 4 + i % 9))
    assert brain.history.n_ghosts <= 4 * 1024
    assert brain.history_bytes_per_id() <= 48
    rig.check()


# --- two tiers ----------------------------------------------------------------------------------------------------------


def test_a_promoted_block_keeps_its_ssd_copy_so_that_it_leaves_for_nothing() -> None:
    rig, _ = learned(8, 100, low_watermark=0.0)
    rig.put(chain("a", 6))
    rig.write_down()
    rig.now = 1000
    rig.put_waiting(chain("b", 8))
    rig.write_down()
    assert SSD in rig.has(chain("a", 6))
    rig.now = 2000
    rig.promote(chain("a", 6))
    assert rig.table.counters["promoted"] and rig.table.counters["demoted"] == 14
    rig.now = 3000
    rig.put_waiting(chain("c", 8))
    rig.write_down()
    assert rig.table.counters["demoted"] <= 22, "what was there already was written again"
    rig.check()


def test_room_for_the_promotions_of_a_get_is_made_at_once_and_no_more_than_they_need() -> None:
    rig, _ = learned(12, 100, low_watermark=0.0)
    for tag in "ab":
        rig.now += 1000
        rig.put_waiting(chain(tag, 12))
        rig.write_all_down()
    assert rig.has(chain("a", 12)) == [SSD] * 12
    rig.now += 1000
    pinned = rig.pin(chain("a", 12).slice(0, 5))
    left = []
    slots = []
    for i, block in enumerate(pinned.blocks):
        slots.append(rig.table.promote_reserve(block, n_more=4 - i))  # type: ignore[arg-type]
        left.append(rig.table.counters["evicted_dram"] - 12)
    assert None not in slots and left == [1, 5, 5, 5, 5], "its last block, which is a run of its own, then four of the one above"
    assert rig.has(chain("b", 12)) == [BOTH] * 7 + [SSD] * 5, "the deepest of the other one left"
    for block, slot in zip(pinned.blocks, slots, strict=True):
        rig.table.promote_done(block, slot, None, ok=False)  # type: ignore[arg-type]
    rig.table.unpin(pinned.blocks)
    rig.check()


def heads_alone(n_chains: int) -> tuple[Rig, list[KeyBatch]]:
    """Chains of two blocks, dirty heads in DRAM, the others on SSD alone; the other half of DRAM has as many dirty blocks."""
    rig, _ = learned(2 * n_chains, 4 * n_chains, low_watermark=0.999)
    for i in range(n_chains):
        rig.now += 1000
        rig.put(chain(f"{i}", 2))
    rig.table._urgent.update(dict.fromkeys(block for block in list(rig.table._dirty) if block.depth == 1))
    rig.write_down(max_bytes=n_chains * BLOCK, rounds=1)
    for i in range(n_chains):
        rig.now += 1000
        rig.put(chain(f"x {i}", 1))
    heads = [chain(f"{i}", 2) for i in range(n_chains)]
    assert all(rig.has(head) == [DRAM, SSD] for head in heads)
    return rig, heads


def test_puts_that_take_turns_do_not_ask_for_a_refused_head_for_ever() -> None:
    rig, heads = heads_alone(10)
    table = rig.table
    head = rig.pin(heads[0]).blocks[0]
    assert head is not None

    def asks(ticks: range) -> int:
        n = 0
        for tick in ticks:
            head.refused = True
            table._dirty.pop(head, None)
            table._soon.pop(head, None)
            if table._ssd_wants(head, tick):
                table._write_first([head], tick)
                n += 1
        return n

    assert asks(range(1000, 1010)) == 2
    rig.get(heads[0])
    assert asks(range(2000, 2010)) == 2, "used again it is worth another try"


def test_a_put_behind_heads_waits_for_what_is_written_and_takes_it_from_nobody_else() -> None:
    rig, heads = heads_alone(10)
    for batch in heads:
        head = rig.pin(batch).blocks[0]
        assert head is not None
        rig.table.unpin([head])
        head.refused, head.n_asks = True, 2
        rig.table._dirty.pop(head, None)
    rest = [rig.pin(chain(f"x {i}", 1)).blocks[0] for i in range(10)]
    rig.table._write_first(rest[:1], 0)  # type: ignore[arg-type]
    written = rig.table.clean_candidates(1, now_ms=rig.now)
    assert written == rest[:1]
    reserved = rig.reserve(chain("new", 1))
    assert reserved.must_wait and all(rig.has(head) == [DRAM, SSD] for head in heads)
    rig.table.ssd_done(written[0], None, ok=False)
    rig.table.gave_up(reserved.use)
    assert list(rig.put_waiting(chain("new", 1))) == [RESERVED] and sum(rig.has(head) == [DRAM, SSD] for head in heads) == 9


def test_heads_whose_tails_are_on_ssd_leave_dram_when_ssd_takes_nothing_any_more() -> None:
    """They fill half of DRAM, then writing fails: a put neither waits nor is refused for them."""
    n_chains = 100
    rig, heads = heads_alone(n_chains)
    rig.table._urgent[next(iter(rig.table._dirty))] = None  # (somebody waited for it when that began)
    rig.table.ssd_writable = False
    rig.now += 1000
    assert rig.put_waiting(chain("new", n_chains + 10)).count(RESERVED) == n_chains + 10
    assert sum(rig.has(head) == [DRAM, SSD] for head in heads) == n_chains - 10, "what others are lost with goes last, but goes"
    rig.check()


def test_a_run_whose_deepest_block_in_dram_is_used_alone_loses_none_above_it() -> None:
    rig, _ = learned(4, 16)
    for start in (0, 4):
        rig.put_waiting(chain("a", 8).slice(start, start + 4))
    rig.write_all_down()
    rig.get(chain("a", 8))
    rig.promote(chain("a", 2))
    rig.write_all_down()
    assert rig.has(chain("a", 8)) == [BOTH] * 2 + [SSD] * 2 + [BOTH] * 2 + [SSD] * 2
    rig.get(batch_of(["a5"], chained=False))
    rig.check()


def test_a_long_chain_that_comes_up_block_by_block_is_not_searched_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _ = learned(1000, 3000)
    for name in "ab":
        rig.put_waiting(chain(name, 1000))
    rig.write_all_down()
    assert set(rig.has(chain("a", 1000))) == {SSD}
    looked: list[int] = []
    search = runs._deepest

    def count(members: list[Block | None], n: int, bit: int) -> tuple[Block, int]:
        found = search(members, n, bit)
        looked.append(n - found[1])
        return found

    monkeypatch.setattr(runs, "_deepest", count)
    pinned = rig.pin(chain("a", 1000))
    for block in pinned.blocks:
        assert block is not None
        slot = rig.table.promote_reserve(block, wanted=True)
        assert slot is not None
        rig.table.promote_done(block, slot, SUMS, ok=True)
    rig.table.unpin(pinned.blocks)
    rig.check()
    assert sum(looked) < 10_000


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_left_of_a_namespace_that_was_closed(policy: str) -> None:
    rig = Rig(20, 40, specs=[spec_of(1), spec_of(2)], policy=policy)
    for ns in (1, 2):
        rig.put_waiting(chain("a", 6, ns=ns), sizes=[BLOCK, 100, 1000] * 2)
        rig.write_all_down()
    rig.table.close_namespace(spec_of(2).uid)
    rig.apply()
    tiers = rig.table._dram_policy, rig.table._ssd_policy
    assert {group.key[0] for tier in tiers if tier is not None for group in tier.groups()} == {spec_of(1).uid}
    rig.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_written_through_is_written_once_where_ssd_is_smaller_than_dram(policy: str) -> None:
    through = dataclasses.replace(spec_of(1), write_policy=WritePolicy.THROUGH)
    rig = Rig(100, 24, specs=[through], policy=policy)
    for i in range(8):
        rig.put(chain(f"{i}-", 12))
        rig.write_down(max_bytes=4 * BLOCK, rounds=50)
    rig.check()
    assert rig.table.counters["demoted"] == 96 and not rig.table.has_actions, "it rests when all was written"


def test_second_use_writes_only_what_was_used_again() -> None:
    rig, _ = learned(16, 100, low_watermark=0.0, second_use=True)
    rig.put(chain("a", 4))
    rig.now = 1000
    rig.put(chain("b", 4))
    rig.now = 2000
    rig.get(chain("a", 4))
    rig.now = 3000
    rig.put_waiting(chain("c", 12))
    rig.write_down()
    assert all(tiers & SSD or tiers & DRAM for tiers in rig.has(chain("a", 4)))
    shared = rig.has(chain("b", 4)) + rig.has(chain("c", 12))
    assert not any(tiers & SSD for tiers in shared), shared
    rig.check()


def test_a_write_budget_that_is_spent_drops_instead() -> None:
    rig, _ = learned(16, 1000, low_watermark=0.0, ssd_bytes_per_day=int(8 * 4 * BLOCK))
    for i in range(12):
        rig.now += 1000
        rig.put_waiting(chain(f"{i}-", 8))
        rig.write_down()
        rig.check()
    assert 7 <= rig.table.counters["demoted"] <= 9


def test_budget() -> None:
    budget = WriteBudget(bytes_per_s=100, bytes_per_day=0)
    budget.at(0)
    assert budget.allows()
    budget.spend(6001)
    assert not budget.allows()
    budget.at(1000)
    assert budget.allows()
    day = WriteBudget(bytes_per_day=1000)
    day.spend(250)
    day.at(0)
    assert not day.allows()
    day.at(int(DAY_S * 1000 / 500))
    assert day.allows()
    assert WriteBudget().allows()


def test_adopted_blocks_are_chains_again() -> None:
    rig, brain = learned(8, 100)
    slots = rig.table.ssd
    assert slots is not None
    batch = chain("a", 6)
    assert slots.adopt_extent(1, batch.namespace, slot_bytes=BLOCK, n_slots=16)
    keys = batch.split()
    for seq, i in enumerate(reversed(range(6))):  # the deepest was written first
        parent = keys[i - 1][:32] if i else bytes(32)
        assert rig.table.adopt(batch.namespace, keys[i], BLOCK, 0, i, parent, (1 << 32) + i, seq)  # type: ignore[arg-type]
        rig.disk[(1 << 32) + i] = keys[i]  # type: ignore[index]
    rig.table.adopted()
    rig.check()
    assert brain._n_runs == 1
    rig.now += 10**9
    assert rig.get(batch.slice(3, 6)) == 3
    assert min(run.tick for run in brain.runs()) > 1, "it is a use, not a part of what an earlier process did"
    rig.check()
    brain.table.refresh()
    assert brain.table._counts[:, :, 1:].sum() < 1e-6, "when they were used before is not known"


# --- choice, and the textbook ------------------------------------------------------------------------------------------


def test_policies_by_name() -> None:
    with pytest.raises(InvalidArgument, match="'magic' is not one of"):
        policy_of("magic")


@pytest.mark.parametrize("name", sorted(TEXTBOOK))
def test_textbook_policies_keep_to_their_bytes_and_under_the_optimum(name: str) -> None:
    chance = random.Random(7)
    requests = [tuple(range(100 * (c := int(chance.expovariate(0.1))), 100 * c + chance.randint(1, 20))) for _ in range(400)]
    policy = TEXTBOOK[name](60)
    hits = sum(access(policy, ids) for ids in requests)
    assert sum(block in policy for block in {b for ids in requests for b in ids}) <= 60
    assert 0.3 * optimum_hits(requests, 60) < hits <= optimum_hits(requests, 60)


def test_a_run_that_an_earlier_process_left_may_be_long() -> None:
    history = History()
    no = history.add_uncounted(0.0, first_key(0, 0, 0, 0))
    for _ in range(1000):
        history.grow(no)
    history.check()
    assert history.lru_hits(no, 1001) == 0
    history.next_request(1001)
    assert history.lru_hits(no, 1001) == 1001 and history.end_of(no) == 0


def test_blocks_as_deep_as_a_chain_may_be() -> None:
    rig, brain = learned(64)
    for depth in (2**31 - 4, 2**32 - 9):
        for number in range(20):
            batch = batch_of([f"{depth} {number} {i}" for i in range(8)], parent=f"{depth} {number}", depth=depth)
            assert set(rig.put(batch)) == {BlockCode.STORED}
            assert all(rig.has(batch)) and rig.get(batch) == 8
    assert brain.history.n_ghosts
    rig.check()
