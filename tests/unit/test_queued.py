"""S3-FIFO, ARC and LRU-2 in a worker: as in their papers where blocks are of no chain, and chains are lost from their end."""

from __future__ import annotations

import dataclasses
import random
from operator import attrgetter

import pytest

from kvpool.core.block import Block, Limits
from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import WritePolicy
from kvpool.core.policy.eviction import RANK_MAX, Entry
from kvpool.core.policy.lines import GOES, HAS_CHILD, HEAP_SLACK, PARKED, Line, LinedGroup, Place, rank_of, tick_of, turn_of
from kvpool.core.policy.queued import QUEUED, S3Fifo
from kvpool.core.types import BlockCode
from kvpool.sim.optimum import optimum_hits
from kvpool.sim.replay import CoreReplay
from kvpool.sim.traces import Request, multi_turn
from tests.support.tables import BOTH, DRAM, SSD, Rig, batch_of, chain, spec_of
from tests.support.textbook import TEXTBOOK, access

BLOCK = 4096
FULL, STORED = BlockCode.FULL, BlockCode.STORED
every_policy = pytest.mark.parametrize("policy", sorted(QUEUED))


def hits_of(policy: str, requests: list[Request], capacity: int) -> tuple[int, int]:
    """-> hits of a worker's, of the paper's."""
    replaying = CoreReplay(policy=policy, block_bytes=BLOCK, dram_bytes=capacity * BLOCK)
    cache = TEXTBOOK[policy](capacity)
    theirs = 0
    for request in requests:
        replaying.serve(request)
        theirs += access(cache, request.ids)
    replaying.table.check()
    return replaying.outcome.hits, theirs


def place_of(rig: Rig, name: object) -> Place:
    """Of a block's copy in DRAM."""
    batch = batch_of([name])
    block = rig.table.spaces[batch.namespace].blocks[batch.split()[0]]
    group = block.group
    assert isinstance(group, LinedGroup)
    return group.places[block]


def line_of(rig: Rig, name: object) -> int:
    place = place_of(rig, name)
    group = place.entry.group
    assert isinstance(group, LinedGroup) and place.line is not None
    return group.lines.index(place.line)


# --- lines --------------------------------------------------------------------------------------------------------------


def test_turns() -> None:
    turns = [turn_of(tick, rank) for tick, rank in ((3, RANK_MAX + 9), (3, 7), (3, 0), (4, 2), (4, 0))]
    assert turns == sorted(turns), "the deeper of one tick first"
    assert [tick_of(turn) for turn in turns] == [3, 3, 3, 4, 4]
    assert [rank_of(turn) for turn in turns] == [RANK_MAX, 7, 0, 2, 0]


def group_of(n: int) -> tuple[S3Fifo, list[Place]]:
    group = S3Fifo((spec_of(1).uid, BLOCK))
    entries = [Entry(group) for _ in range(n)]
    for i, entry in enumerate(entries):
        group.arrive(entry, i, turn_of(i + 1, 0), None)
    return group, [group.places[entry] for entry in entries]


def test_a_line_is_by_turn_and_who_was_passed_over_comes_back_at_its_place() -> None:
    group, places = group_of(4)
    small, _ = group.lines
    assert small.head() is places[0]
    small.pass_over(places[0])
    assert small.head() is places[1] and small.n == 4
    assert list(group.in_order()) == [place.entry for place in (*places[1:], places[0])]
    group.wake(places[0].entry)
    assert small.head() is places[0]
    group.put(places[0], small, turn_of(9, 0))  # a later turn, found when the earlier one is reached
    assert [place.entry for place in (*places[1:], places[0])] == list(group.in_order())
    assert small.head() is places[1]
    group.leave(places[1].entry, 1)
    assert small.head() is places[2]
    group.check(lambda entry: GOES)


def test_a_line_too_long_to_be_sorted_is_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    group, places = group_of(200)
    small, _ = group.lines
    for place in places[::7]:
        group.leave(place.entry, 0)
    for place in places[1::7]:
        group.put(place, small, place.turn + turn_of(1000, 0))
    monkeypatch.setattr("kvpool.core.policy.lines.SORT_MAX", 0)
    walked = list(small.in_turn())
    monkeypatch.undo()
    assert walked == list(small.in_turn()) == sorted((p for p in places if p.line), key=attrgetter("turn"))


def test_what_left_takes_no_room_in_a_line_for_long() -> None:
    line, stays = Line(), Place(Entry(S3Fifo((spec_of(1).uid, BLOCK))), 1)
    for i in range(10 * HEAP_SLACK):
        place = Place(stays.entry, i)
        place.line, place.turn = line, i
        line.n = 1
        line.push(place)
        place.line = None
        assert len(line._heap) <= HEAP_SLACK + 2


# --- as in the papers ---------------------------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("capacity", [30, 100])
def test_blocks_of_no_chain_are_hit_as_often_as_by_the_papers_cache(policy: str, capacity: int) -> None:
    chance = random.Random(2)
    requests = []
    for i in range(6000):
        popular = int(chance.paretovariate(0.7))
        block = 10_000 + i if chance.random() < 0.3 else (popular + i // 1000 * 7) % 400
        requests.append(Request(100.0 * i, 1, 1, (block,)))
    ours, theirs = hits_of(policy, requests, capacity)
    assert 1000 < theirs < 4000 and abs(ours - theirs) <= 0.01 * theirs


@every_policy
@pytest.mark.parametrize("capacity", [60, 150])
def test_conversations_are_hit_at_least_about_as_often(policy: str, capacity: int) -> None:
    requests = multi_turn(seed=5, n_conversations=60, n_turns=8, system_blocks=4, turn_blocks=(1, 9))
    ours, theirs = hits_of(policy, requests, capacity)
    best = optimum_hits((request.ids for request in requests), capacity)
    assert best >= ours >= theirs - 0.02 * best


@every_policy
def test_a_loop_larger_than_the_cache_between_requests_that_come_once(policy: str) -> None:
    """Long chains, each longer than what is kept for the new: S3-FIFO and ARC learn from ghosts, LRU-2 from past uses."""
    chance = random.Random(1)
    requests, serial = [], 10_000
    for i in range(1500):
        serial += 100
        ids = range(serial, serial + chance.randint(4, 12)) if i % 2 else range(100 * (i // 2 % 12), 100 * (i // 2 % 12) + 8)
        requests.append(Request(500.0 * i, 1, 1, tuple(ids)))
    ours, theirs = hits_of(policy, requests, 70)
    best = optimum_hits((request.ids for request in requests), 70)
    assert ours >= theirs - 0.02 * best


# --- what is used ---------------------------------------------------------------------------------------------------------


@every_policy
def test_the_put_that_follows_a_get_is_no_use_of_its_own(policy: str) -> None:
    rig = Rig(100, policy=policy)
    rig.put(chain("a", 4))
    rig.now = 5_000
    rig.get(chain("a", 6))
    before = place_of(rig, "a0").before
    assert before and tick_of(before) < tick_of(place_of(rig, "a0").used)
    rig.table.tiers_of(chain("a", 4), now_ms=rig.now + 50, touch=True)  # the client says what it found
    rig.now = 5_100
    rig.put(chain("a", 6))
    assert place_of(rig, "a0").before == before
    assert {tick_of(place_of(rig, f"a{i}").used) for i in range(6)} == {tick_of(place_of(rig, "a0").used)}
    rig.now += 61_000
    rig.put(chain("a", 6))
    assert place_of(rig, "a0").before > before, "a minute later it is one"


@every_policy
def test_a_block_that_is_named_twice_in_a_batch_is_used_once(policy: str) -> None:
    rig = Rig(20, policy=policy)
    rig.put(chain("a", 4))
    keys = chain("a", 4).split()
    twice = KeyBatch(chain("a", 1).namespace, b"".join([*keys[:2], *keys[:1], *keys[1:3]]), chained=False)
    assert rig.get(twice) == 5
    assert [place_of(rig, f"a{i}").uses for i in range(4)] == ([1, 1, 1, 0] if policy == "s3fifo" else [0] * 4)
    assert [tick_of(place_of(rig, f"a{i}").before) for i in range(4)] == [1, 1, 1, 0]


def test_s3_fifo_moves_what_was_used_twice_and_knows_what_it_lost() -> None:
    rig = Rig(20, policy="s3fifo")
    rig.put(chain("hot", 2))
    for _ in range(2):
        rig.get(chain("hot", 2))
    for name in "abcdefghij":
        rig.put(chain(name, 2))
    assert line_of(rig, "hot0") == line_of(rig, "hot1") == 1
    assert rig.has(chain("a", 2)) == [0, 0]
    rig.put(chain("a", 2))
    assert line_of(rig, "a0") == 1 and line_of(rig, "j0") == 0, "it was a ghost"
    rig.check()


def test_s3_fifo_gives_what_is_used_another_round() -> None:
    group, places = group_of(10)
    _, main = group.lines
    for place in places[:2]:
        for tick in (11, 12):
            group.use(place.entry, turn_of(tick, 0))
    group.use(places[3].entry, turn_of(12, 4))
    group.use(places[3].entry, turn_of(12, 0))
    assert (places[3].uses, places[3].used, places[3].before) == (1, turn_of(12, 0), turn_of(4, 0)), "one batch is one use"
    assert group.first(lambda entry: GOES, 13) is places[2], "the others were used twice"
    assert [place.line is main for place in places[:3]] == [True, True, False]
    for i, place in enumerate(places[2:]):
        group.leave(place.entry, 2 + i)
    group.use(places[0].entry, turn_of(14, 0))
    assert group.first(lambda entry: GOES, 15) is places[1]
    assert group.first(lambda entry: PARKED if entry is places[1].entry else GOES, 15) is places[0], "but one round for each use"


def test_s3_fifo_keeps_what_others_hang_on_and_passes_over_what_is_parked() -> None:
    group, places = group_of(10)
    small, main = group.lines
    why = {places[0].entry: HAS_CHILD, places[1].entry: PARKED}
    assert group.first(lambda entry: why.get(entry, GOES), 11) is places[2]
    assert places[0].line is main and places[1].line is small and places[1].aside
    for i, place in enumerate(places[2:]):
        group.leave(place.entry, 2 + i)
    assert group.first(lambda entry: why.get(entry, GOES), 12) is None and places[0].aside
    group.use(places[0].entry, turn_of(13, 0))
    assert not places[0].aside, "used again: it comes to its turn as the others do"
    group.wake(places[1].entry)
    assert group.first(lambda entry: HAS_CHILD if entry is places[0].entry else GOES, 14) is places[1]


def test_the_capacity_follows_what_is_there() -> None:
    group, places = group_of(3000)
    assert group.capacity == 3000
    for i, place in enumerate(places[:-10]):
        group.leave(place.entry, i)
    for i in range(3000):
        group.arrive(entry := Entry(group), i, turn_of(4000 + i, 0), None)
        group.leave(entry, i)
    assert group.capacity < 300 and len(group._ghosts) <= 300


def test_arc_gives_room_to_the_side_whose_ghosts_come_back() -> None:
    rig = Rig(20, policy="arc")
    for name in "abcde":
        rig.put(chain(name, 4))
    for name in "abc":
        rig.get(chain(name, 4))
    group = place_of(rig, "a0").entry.group
    rig.put(chain("f", 4))  # what was used once goes
    assert rig.has(chain("d", 4)) == [0] * 4 and all(rig.has(chain("a", 4)))
    assert group._target == 0  # type: ignore[attr-defined]
    rig.put(chain("d", 4))
    assert group._target >= 4  # type: ignore[attr-defined]
    assert {line_of(rig, f"d{i}") for i in range(4)} == {1}
    rig.check()


def test_lru_2_goes_by_the_last_use_but_one_also_of_what_left() -> None:
    rig = Rig(8, policy="lru2")
    rig.put(chain("a", 2))
    rig.put(chain("b", 2))
    rig.put(chain("c", 2))
    rig.get(chain("a", 2))
    rig.get(chain("b", 2))
    rig.get(chain("a", 2))
    rig.put(chain("d", 4))
    assert rig.has(chain("c", 2)) == [0, 0], "used later than a and b were at first, but once"
    rig.put(chain("c", 2))
    assert line_of(rig, "c0") == 1 and place_of(rig, "c0").before, "its use is remembered"
    rig.put(chain("e", 2))
    assert rig.has(chain("d", 4)) == [DRAM] * 2 + [0] * 2 or rig.has(chain("d", 4)) == [0] * 4
    assert all(rig.has(chain("a", 2))) and all(rig.has(chain("b", 2)))
    rig.check()


def test_only_what_was_used_again_is_written_where_that_is_asked_for() -> None:
    for policy in QUEUED:
        rig = Rig(16, 100, limits=Limits(low_watermark=0.0, second_use=True), policy=policy)
        rig.put(chain("a", 4))
        rig.now = 1000
        rig.put(chain("b", 4))
        rig.get(chain("b", 4))
        rig.put_waiting(chain("c", 12))
        assert not any(tier & SSD for tier in rig.has(chain("a", 4)))
        rig.write_all_down()
        assert all(rig.has(chain("b", 4)))


# --- chains -------------------------------------------------------------------------------------------------------------


@every_policy
def test_no_parent_leaves_before_a_child_of_another_branch(policy: str) -> None:
    rig = Rig(12, policy=policy)
    rig.put(chain("a", 4))
    below = batch_of([f"x{i}" for i in range(6)], parent="a3", depth=4)  # hangs below a, used much later
    rig.now = 600_000
    rig.put(below)
    rig.now += 1000
    rig.put(chain("c", 8))
    assert all(rig.has(chain("a", 4))) or not any(rig.has(below)), "a hole above what stays"
    rig.check()


@every_policy
def test_of_a_chain_longer_than_all_the_head_is_stored_and_nothing_of_what_is_used_goes_for_it(policy: str) -> None:
    rig = Rig(40, policy=policy)
    rig.put(chain("hot", 36))
    for _ in range(3):
        rig.now += 1000
        rig.get(chain("hot", 36))
    for name in "abcdef":
        rig.now += 1000
        rig.put(chain(name, 2))
    codes = list(rig.put(chain("long", 60)))
    n = codes.count(STORED)
    assert codes == [STORED] * n + [FULL] * (60 - n) and n <= 6
    assert sum(map(bool, rig.has(chain("hot", 36)))) >= 34
    rig.check()
    at = 0
    while FULL not in rig.put(chain("parts", at + 2, at)):
        at += 2
    assert at <= 6, "a chain that comes in parts is one chain"
    assert sum(map(bool, rig.has(chain("hot", 36)))) >= 34
    rig.check()


@every_policy
def test_what_is_held_stays_and_leaves_when_released(policy: str) -> None:
    rig = Rig(10, policy=policy)
    rig.put(chain("a", 4))
    hold = rig.hold(chain("a", 4), ttl_ms=10_000)
    for i in range(5):
        rig.now += 100
        rig.put(chain(f"b{i}-", 6))
        rig.check()
    assert rig.has(chain("a", 4)) == [DRAM] * 4
    rig.table.release([hold.hold_id])
    for i in range(20):
        rig.now += 100_000
        rig.put(chain(f"z{i // 2}-", 10))
        rig.get(chain(f"z{i // 2}-", 10))
    assert not all(rig.has(chain("a", 4)))
    rig.check()


@every_policy
def test_a_long_chain_costs_no_search(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its root's turn comes first of all: each of its blocks is looked at a few times, not for each that leaves."""
    rig = Rig(2000, policy=policy)
    for at in range(0, 2000, 10):  # each part later than the one above
        rig.put(chain("a", at + 10, at))
        rig.table._tick += 300
    looked = 0
    tier = rig.table._dram_policy
    inner = tier._stays  # type: ignore[attr-defined]

    def counting(entry: Entry) -> int:
        nonlocal looked
        looked += 1
        return int(inner(entry))

    monkeypatch.setattr(tier, "_stays", counting)
    for i in range(200):
        rig.put(chain(f"b{i}-", 10))
    assert looked < 12_000
    rig.check()


@every_policy
def test_adopted_blocks_are_chains_again(policy: str) -> None:
    rig = Rig(8, 6, policy=policy)
    slots = rig.table.ssd
    assert slots is not None
    batch = chain("a", 6)
    assert slots.adopt_extent(1, batch.namespace, slot_bytes=BLOCK, n_slots=6)
    keys = batch.split()
    for seq, i in enumerate([0, 1, 3, 2, 5, 4]):
        rig.table._tick += 1
        parent = keys[i - 1][:32] if i else bytes(32)
        assert rig.table.adopt(batch.namespace, keys[i], BLOCK, 0, i, parent, (1 << 32) + i, seq)  # type: ignore[arg-type]
        rig.disk[(1 << 32) + i] = keys[i]  # type: ignore[index]
    rig.table.adopted()
    rig.check()
    rig.put_waiting(chain("b", 8))
    rig.put_waiting(chain("c", 3))
    rig.check()
    tiers = rig.has(batch)
    n = [*tiers, 0].index(0)
    assert 0 < n < 6 and not any(tiers[n:]), "lost from its end"
    rig.now += 10**9
    assert rig.get(batch) == n


# --- two tiers ----------------------------------------------------------------------------------------------------------


@every_policy
def test_what_comes_up_from_ssd_brings_its_uses_along(policy: str) -> None:
    rig = Rig(8, 40, policy=policy)
    rig.put(chain("a", 6))
    rig.now += 1000
    rig.get(chain("a", 6))
    rig.write_all_down()
    for name in "bcd":
        rig.now += 1000
        rig.put_waiting(chain(name, 8))
        rig.write_down()
    assert rig.has(chain("a", 6))[-1] == SSD
    block: Block = rig.table.spaces[chain("a", 1).namespace].blocks[chain("a", 6).split()[5]]
    assert block.ssd_copy is not None and isinstance(block.ssd_copy.group, LinedGroup)
    assert block.ssd_copy.group.places[block.ssd_copy].before
    rig.now += 1000
    for _ in range(10):
        rig.promote(chain("a", 6), wanted=True)
        rig.write_down()
    assert rig.has(chain("a", 6))[-1] == BOTH and place_of(rig, "a5").before
    rig.check()


def test_the_tiers_orders_can_be_compared() -> None:
    for policy in QUEUED:
        rig = Rig(4, 40, policy=policy)
        for name in "abc":
            rig.put_waiting(chain(name, 4))
            rig.write_down()
        old, new = (rig.table.spaces[chain("a", 1).namespace].blocks[chain(name, 1).split()[0]] for name in "ac")
        dram, ssd = rig.table._dram_policy, rig.table._ssd_policy
        assert ssd is not None and old.ssd_copy is not None and new.dram is not None and new.ssd_copy is None
        assert 0 > ssd.order_of(old.ssd_copy) > dram.order_of(new)
        assert ssd.place_of(old.ssd_copy)[1] == 0 and dram.tick_of(new) > ssd.tick_of(old.ssd_copy)


def test_selective_namespaces_write_only_what_was_used_again() -> None:
    spec = dataclasses.replace(spec_of(1), write_policy=WritePolicy.SELECTIVE)
    for policy in QUEUED:
        rig = Rig(8, 40, specs=[spec], policy=policy)
        rig.put(chain("a", 4))
        rig.get(chain("a", 2))
        for name in "bcdef":
            rig.put_waiting(chain(name, 8))
            rig.write_down()
        assert rig.has(chain("a", 4)) in ([SSD] * 2 + [0] * 2, [DRAM] * 2 + [0] * 2, [BOTH] * 2 + [0] * 2), policy
