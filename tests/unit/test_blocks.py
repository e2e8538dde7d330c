"""The worker's table: puts, gets, recency, pins, holds, removal, tiers. No I/O, no clock."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from kvpool.core.block import Limits
from kvpool.core.keys import KeyBatch
from kvpool.core.policy.eviction import Entry, Lru
from kvpool.core.policy.make import POLICIES
from kvpool.core.types import BlockCode, MissCause, Tiers, miss_code
from kvpool.errors import NamespaceNotFound
from tests.support.tables import BLOCK, BOTH, DRAM, SSD, SUMS, Rig, batch_of, chain, spec_of, uid_of

RESERVED, STORED, ALREADY = BlockCode.RESERVED, BlockCode.STORED, BlockCode.ALREADY
FULL, REJECTED, HELD, LATER = BlockCode.FULL, BlockCode.REJECTED, BlockCode.HIT_SHARED, BlockCode.LATER


@pytest.fixture
def rig() -> Rig:
    return Rig(8)


# --- puts ---------------------------------------------------------------------------------------------------------------


def test_a_block_is_visible_only_after_commit(rig: Rig) -> None:
    a = chain("a", 3)
    reserved = rig.reserve(a)
    assert list(reserved.codes) == [RESERVED] * 3
    assert rig.has(a) == [0, 0, 0] and rig.get(a) == 0 and rig.reports == 0
    rig.fill(reserved)
    assert rig.commit(reserved) == bytes([STORED] * 3)
    assert rig.has(a) == [DRAM] * 3 and rig.get(a) == 3 and rig.reports == 3
    block = rig.pin(a).blocks[2]
    assert block is not None and block.depth == 2 and block.parent == a.keys[34:66] and block.sums == SUMS
    assert rig.put(a) == bytes([ALREADY] * 3)


@pytest.mark.parametrize(("n", "block"), [(300, 16384), (7, 12345), (1, 1 << 20)])
def test_a_tier_of_n_blocks_holds_n(n: int, block: int) -> None:
    rig = Rig(n, block=block)
    assert rig.put(chain("a", n)) == bytes([STORED] * n)
    assert rig.get(chain("a", n)) == n
    rig.check()


def test_a_put_longer_than_the_tier_stores_the_head(rig: Rig) -> None:
    assert rig.put(chain("a", 12)) == bytes([STORED] * 8 + [FULL] * 4)
    assert rig.get(chain("a", 12)) == 8
    rig.check()


def test_a_long_put_gives_up_its_own_tail_for_its_head() -> None:
    rig = Rig(4)
    rig.put(batch_of(["a0", "a1", "a2", "a3", "a4", "a5"]).slice(4, 6))
    rig.put(batch_of(["x", "y"], chained=False))
    codes = rig.put(chain("a", 6))
    assert codes == bytes([STORED] * 4 + [FULL] * 2), "a tail that nobody can reach is worth nothing"
    assert rig.get(chain("a", 6)) == 4
    rig.check()


def test_what_follows_a_gap_in_a_chain_is_not_stored() -> None:
    for chained, last in ((True, FULL), (False, STORED)):
        rig = Rig(0, dram_bytes=5 * 65536 + 4096, specs=[spec_of(1, 65536)])
        names: list[object] = [f"a{i}" for i in range(7)]
        codes = rig.put(batch_of(names, chained=chained), [65536] * 6 + [100])
        assert codes == bytes([STORED] * 5 + [FULL, last])
        rig.check()


def test_equal_keys_in_one_put(rig: Rig) -> None:
    assert rig.put(batch_of(["a", "b", "a", "a"], chained=False)) == bytes([STORED, STORED, ALREADY, ALREADY])
    rig = Rig(1)
    assert rig.put(batch_of(["a", "b", "b"], chained=False)) == bytes([STORED, FULL, FULL])
    rig.check()


def test_two_writers_of_one_key(rig: Rig) -> None:
    a = chain("a", 2)
    one, two = rig.reserve(a), rig.reserve(a)
    assert list(one.codes) == list(two.codes) == [RESERVED] * 2
    assert rig.table.dram.n_blocks == 4
    rig.fill(two)
    assert rig.commit(two) == bytes([STORED] * 2)
    rig.fill(one)
    assert rig.commit(one) == bytes([ALREADY] * 2)
    assert rig.table.dram.n_blocks == 2 and rig.get(a) == 2 and rig.reports == 2
    rig.check()


def test_sizes() -> None:
    names = batch_of(["a", "b", "c", "d"], chained=False)
    rig = Rig(100)
    assert rig.put(names, [BLOCK, 0, BLOCK + 1, 5]) == bytes([STORED, REJECTED, REJECTED, STORED])
    fixed = Rig(8, specs=[spec_of(1, variable=False)])
    assert fixed.put(names, [BLOCK, BLOCK - 1, BLOCK + 1, BLOCK]) == bytes([STORED, REJECTED, REJECTED, STORED])
    with pytest.raises(ValueError, match="3 sizes for 4 keys"):
        rig.reserve(names, [1, 2, 3])


def test_a_block_that_never_fits_evicts_nobody() -> None:
    rig = Rig(0, dram_bytes=10_000, specs=[spec_of(1, 4096), spec_of(2, 20_000)])
    rig.put(chain("a", 2))
    assert rig.put(chain("b", 1, ns=2), [20_000]) == bytes([FULL])
    assert rig.get(chain("a", 2)) == 2
    rig.check()


def test_abort_gives_the_slots_back(rig: Rig) -> None:
    reserved = rig.reserve(chain("a", 8))
    assert rig.put(chain("b", 1)) == bytes([FULL]), "reserved slots are nobody's victims"
    rig.table.abort(reserved.blocks)
    rig.table.abort(reserved.blocks)
    assert rig.put(chain("b", 1)) == bytes([STORED])
    assert rig.cause(chain("a", 1)) is MissCause.NEVER_STORED
    rig.check()


def test_unknown_and_blocked_namespaces_are_not_served(rig: Rig) -> None:
    rig.put(chain("a", 2))
    rig.table.set_blocked(uid_of(1), True)
    for call in (rig.reserve, rig.pin, rig.hold, rig.has):
        with pytest.raises(NamespaceNotFound):
            call(chain("a", 2))
        with pytest.raises(NamespaceNotFound):
            call(chain("a", 2, ns=9))
    assert rig.table.remove(chain("a", 1)) == b"\x01", "removals are caught up with while it is blocked"
    rig.table.set_blocked(uid_of(1), False)
    assert rig.has(chain("a", 2)) == [0, DRAM]


# --- recency ------------------------------------------------------------------------------------------------------------


def lru(requests: list[list[int]], capacity: int) -> int:
    """As the offline study does it: leading hits, then every block touched or inserted, tail first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in requests:
        for block in ids:
            if block not in cache:
                break
            hits += 1
        for block in reversed(ids):
            if block in cache:
                cache.move_to_end(block)
            else:
                if len(cache) >= capacity:
                    cache.popitem(last=False)
                cache[block] = None
    return hits


def prefix_chains(seed: int, n: int, longest: int) -> list[list[int]]:
    """Requests that share prefixes: turns of conversations below some system prompts."""
    chance = random.Random(seed)
    next_id = iter(range(1, 1 << 30))
    chains = [[next(next_id) for _ in range(chance.randrange(1, longest // 3))] for _ in range(4)]
    requests = []
    for _ in range(n):
        base = chance.choice(chains[-30:])
        ids = base[: chance.randrange(1, len(base) + 1)] if chance.random() < 0.2 else list(base)
        ids += [next(next_id) for _ in range(chance.randrange(0, longest - len(ids) + 1) // 2)]
        chains.append(ids)
        requests.append(ids)
    return requests


@pytest.mark.parametrize("capacity", [1, 5, 37, 120, 300])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hits_are_exactly_those_of_lru_tail_first(seed: int, capacity: int) -> None:
    requests = prefix_chains(seed, 250, 60)
    rig, hits = Rig(capacity), 0
    for ids in requests:
        hits += rig.get(batch_of(list(ids)))
        rig.put(batch_of(list(ids)))
    assert hits == lru(requests, capacity)
    rig.check()


@pytest.mark.parametrize("parts", [1, 3, 7])
@pytest.mark.parametrize("touch_first", [True, False])
def test_a_chain_cut_into_batches_still_goes_tail_first(parts: int, touch_first: bool) -> None:
    """Clients confirm the head by a touch and write the rest, frames are split, lanes overtake each other."""
    requests = prefix_chains(7, 250, 60)
    rig, hits = Rig(100), 0
    for ids in requests:
        hits += rig.get(batch_of(list(ids)))
        whole = batch_of(list(ids))
        there = next((i for i, tiers in enumerate(rig.has(whole)) if not tiers), len(ids))
        if touch_first:
            rig.table.tiers_of(whole.slice(0, there), now_ms=0, touch=True)
        for start in range(there, len(ids), parts):
            rig.put(whole.slice(start, start + parts))
        if not touch_first:
            rig.table.tiers_of(whole.slice(0, there), now_ms=0, touch=True)
    assert hits == pytest.approx(lru(requests, 100), rel=0.01)
    rig.check()


def test_going_on_with_a_chain_costs_the_same_at_any_depth() -> None:
    import sys

    rig = Rig(4000)
    costs = []
    for start in range(0, 2000, 50):
        part = chain("a", start + 50, start)
        count = 0

        def trace(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(trace)
        try:
            rig.put(part)
        finally:
            sys.setprofile(None)
        costs.append(count)
    assert max(costs[2:]) < 1.3 * min(costs[2:])


def test_a_use_never_makes_a_block_colder() -> None:
    from kvpool.core.policy.eviction import Entry, Lru

    policy = Lru()
    group = policy.group((uid_of(1), 4096))
    one, two = Entry(group), Entry(group)
    policy.add([one], 5, [0])
    policy.add([two], 6, [0])
    policy.touch([two], 4, 0)  # a late part of an older batch
    assert policy.tick_of(two) == 6 and policy.victim(group) is one
    policy.touch([one], 6, 3)
    assert policy.victim(group) is one, "the same batch, but deeper"
    policy.add([Entry(group) for _ in range(100)], 7, range(100))
    late = Entry(group)
    policy.add([late], 8, [0])
    policy.touch([late], 5, 0)  # of another bucket
    assert policy.tick_of(late) == 8
    policy.check()


def test_using_only_the_deep_end_keeps_the_prefix() -> None:
    """An engine that has the head itself asks for the tail alone; evicting the head first would leave a useless tail."""
    rig = Rig(20)
    rig.put(chain("a", 10))
    for i in range(400):
        rig.put(batch_of([f"x{i}"]))
        rig.get(chain("a", 10, 7))
    assert rig.get(chain("a", 10)) == 10


def test_eviction_takes_the_coldest_and_says_so(rig: Rig) -> None:
    rig.put(chain("a", 4))
    rig.put(chain("b", 4))
    rig.get(chain("a", 4))
    rig.put(chain("c", 2))
    assert rig.get(chain("b", 4)) == 2 and rig.get(chain("a", 4)) == 4
    assert rig.cause(chain("b", 4, 2)) is MissCause.EVICTED
    assert rig.cause(chain("z", 1)) is MissCause.NEVER_STORED
    rig.check()


def test_a_touch_is_a_use_and_a_look_is_not(rig: Rig) -> None:
    rig.put(chain("a", 4))
    rig.put(chain("b", 4))
    rig.table.tiers_of(chain("a", 4), now_ms=0, touch=False)
    rig.put(chain("c", 2))
    assert rig.has(chain("a", 4)) == [DRAM, DRAM, 0, 0]
    rig.table.tiers_of(chain("a", 2), now_ms=0, touch=True)
    rig.put(chain("d", 2))
    assert rig.has(chain("a", 2)) == [DRAM, DRAM] and rig.has(chain("b", 4)) == [DRAM, DRAM, 0, 0]


@pytest.mark.parametrize("n_blocks", [2000, 40_000])
def test_cost_does_not_grow_with_the_table(n_blocks: int) -> None:
    """Counted in Python function calls and dict steps, not in time: both tables must do the same work for 64 blocks."""
    import sys

    rig = Rig(n_blocks)
    for i in range(n_blocks // 50 - 2):
        rig.put(chain(f"c{i}-", 50))
    hot = chain("hot", 64)
    rig.put(hot)

    def calls_of(action: str) -> int:
        count = 0

        def trace(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(trace)
        try:
            if action == "get":
                rig.table.unpin(rig.table.pin(hot, now_ms=0).blocks)
            else:
                rig.put(chain("new", 64))
        finally:
            sys.setprofile(None)
        return count

    assert calls_of("get") < 64 * 8
    assert calls_of("put") < 64 * 60


def test_pinned_cold_blocks_are_not_looked_at_again_and_again() -> None:
    rig = Rig(1000)
    rig.put(chain("a", 500))
    pinned = rig.pin(chain("a", 500))
    rig.put(chain("b", 500))
    rig.put(chain("c", 1))  # parks the pinned ones
    parked = sum(group.n_parked for group in rig.table._dram_policy.groups())
    assert parked == 500
    rig.table.unpin(pinned.blocks)
    rig.put(chain("d", 10))
    assert rig.has(chain("a", 500))[490:] == [0] * 10, "unpinned they are the coldest again, tail first"
    rig.check()


# --- pins ---------------------------------------------------------------------------------------------------------------


def test_pinned_blocks_stay(rig: Rig) -> None:
    rig.put(chain("a", 8))
    pinned = rig.pin(chain("a", 6))
    assert rig.put(chain("b", 4)) == bytes([STORED, STORED, FULL, FULL])
    rig.table.unpin(pinned.blocks)
    assert rig.put(chain("c", 4)) == bytes([STORED] * 4)
    rig.check()


def test_removal_of_a_pinned_block_frees_its_slot_at_the_last_unpin(rig: Rig) -> None:
    a = chain("a", 8)
    rig.put(a)
    first, second = rig.pin(a), rig.pin(a)
    assert rig.table.remove(a) == bytes([1] * 8)
    assert rig.get(a) == 0 and rig.cause(a) is MissCause.REMOVED and not rig.index
    rig.table.unpin(first.blocks)
    assert rig.put(chain("b", 1)) == bytes([FULL])
    assert all(b is not None and rig.bytes_of(b) == b.key for b in second.blocks)
    words = dict(rig.words)
    rig.table.unpin(second.blocks)
    assert rig.put(chain("b", 8)) == bytes([STORED] * 8) and rig.words != words
    rig.check()


def test_unpinning_more_than_pinned_is_a_bug(rig: Rig) -> None:
    rig.put(chain("a", 1))
    pinned = rig.pin(chain("a", 1))
    rig.table.unpin(pinned.blocks)
    with pytest.raises(AssertionError):
        rig.table.unpin(pinned.blocks)


def test_pin_stops_at_the_first_miss_or_goes_on(rig: Rig) -> None:
    rig.put(batch_of(["a", "c"], chained=False))
    names = batch_of(["a", "b", "c"], chained=False)
    stopped = rig.pin(names)
    assert [b is not None for b in stopped.blocks] == [True, False, False]
    assert stopped.causes == [None, MissCause.NEVER_STORED, None]
    whole = rig.pin(names, first_miss=False)
    assert [b is not None for b in whole.blocks] == [True, False, True]
    assert rig.table.misses() == {uid_of(1): {MissCause.NEVER_STORED: 2}}


# --- removal ------------------------------------------------------------------------------------------------------------


def test_removal_reaches_puts_that_are_under_way(rig: Rig) -> None:
    a = chain("a", 3)
    reserved = rig.reserve(a)
    assert rig.table.remove(a.slice(1, 2)) == b"\x00"
    rig.fill(reserved)
    assert rig.commit(reserved) == bytes([STORED, FULL, STORED])
    assert rig.has(a) == [DRAM, 0, DRAM] and rig.table.dram.n_blocks == 2
    rig.check()


def test_commit_after_remove_all(rig: Rig) -> None:
    rig.put(chain("b", 2))
    reserved = rig.reserve(chain("a", 3))
    assert rig.table.remove_all(uid_of(1)) == 2
    assert rig.commit(reserved) == bytes([FULL] * 3)
    assert rig.table.dram.n_blocks == 0 and not rig.index
    assert rig.put(chain("a", 3)) == bytes([STORED] * 3), "a later put counts again"
    rig.check()


def test_a_key_that_comes_back_has_no_cause(rig: Rig) -> None:
    rig.put(chain("a", 1))
    rig.table.remove(chain("a", 1), cause=MissCause.REMOVED)
    rig.put(chain("a", 1))
    rig.table.remove(chain("a", 1), cause=MissCause.EXPIRED)
    assert rig.cause(chain("a", 1)) is MissCause.EXPIRED
    rig.check()


def test_memory_of_the_gone_is_bounded_and_honest() -> None:
    rig = Rig(1, limits=Limits(gone_keys_max=10))
    for i in range(50):
        rig.put(chain(f"a{i}-", 1))
    assert rig.table.gauges()["gone_keys"] == 10
    assert rig.cause(chain("a48-", 1)) is MissCause.EVICTED
    assert rig.cause(chain("a0-", 1)) is MissCause.UNKNOWN
    assert rig.cause(chain("never", 1)) is MissCause.NEVER_STORED
    rig.check()


def test_close_namespace_waits_for_its_last_reader() -> None:
    from kvpool.core.slots import CloseArena

    rig = Rig(8)
    rig.put(chain("a", 4))
    pinned, reserved = rig.pin(chain("a", 1)), rig.reserve(chain("b", 1))
    held = rig.hold(chain("a", 2, 1))
    assert rig.table.close_namespace(uid_of(1)) == 4 and rig.table.close_namespace(uid_of(1)) == 0
    with pytest.raises(NamespaceNotFound):
        rig.get(chain("a", 4))
    rig.table.unpin(pinned.blocks)
    assert rig.commit(reserved) == bytes([FULL])
    assert CloseArena(uid_of(1)) not in rig.table.drain_actions()
    rig.check()
    rig.table.release([held.hold_id])
    assert CloseArena(uid_of(1)) in rig.table.drain_actions()
    assert rig.table.dram.n_blocks == 0 and not rig.table._closing
    rig.check()


# --- holds --------------------------------------------------------------------------------------------------------------


def test_held_blocks_are_neither_evicted_nor_reused(rig: Rig) -> None:
    a = chain("a", 4)
    rig.put(a)
    held = rig.hold(a, ttl_ms=1000)
    assert held.hold_id and held.count == 4 and list(held.codes) == [HELD] * 4
    rig.put(chain("b", 8))
    assert rig.get(a) == 4
    rig.table.remove(a.slice(3, 4))
    rig.put(chain("c", 8))
    assert rig.table.dram.n_blocks == 8, "a removed block that is held keeps its slot"
    rig.now = 1000
    assert rig.table.expire(999) == [] and rig.get(a) == 3
    assert rig.table.expire(1000) == []
    rig.put(chain("d", 8))
    assert rig.get(a) == 0 and rig.cause(a, hold_id=held.hold_id) is MissCause.EXPIRED
    assert rig.table.held_bytes[Tiers.DRAM] == 0 and rig.table.gauges()["holds"] == 0
    rig.check()


def test_a_hold_ends_at_the_first_miss(rig: Rig) -> None:
    rig.put(chain("a", 2))
    held = rig.hold(chain("a", 4))
    assert held.count == 2 and list(held.codes) == [HELD, HELD, miss_code(MissCause.NEVER_STORED), LATER]
    nothing = rig.hold(chain("z", 2))
    assert nothing.hold_id == 0 and nothing.count == 0


def test_at_most_half_of_a_tier_is_held(rig: Rig) -> None:
    rig.put(chain("a", 8))
    held = rig.hold(chain("a", 8))
    assert held.count == 4 and list(held.codes) == [HELD] * 4 + [FULL] + [LATER] * 3
    again = rig.hold(chain("a", 4))
    assert again.count == 4, "what is held already costs nothing"
    assert rig.hold(chain("a", 8, 4)).hold_id == 0
    rig.table.release([held.hold_id])
    assert rig.table.held_bytes[Tiers.DRAM] == 4 * BLOCK
    rig.table.release([again.hold_id, again.hold_id, 12345])
    assert rig.table.held_bytes[Tiers.DRAM] == 0
    rig.check()


def test_holds_are_renewed_and_bounded() -> None:
    rig = Rig(8, limits=Limits(holds_max=2, hold_ttl_ms_max=5000))
    rig.put(chain("a", 2))
    one, two = rig.hold(chain("a", 1), ttl_ms=100), rig.hold(chain("a", 2), ttl_ms=10**9)
    assert rig.hold(chain("a", 1)).hold_id == 0
    assert rig.table.renew([one.hold_id, 99, two.hold_id], 1000, 50) == b"\x01\x00\x01"
    rig.table.expire(1049)
    assert rig.table.renew([one.hold_id], 10**9, 1049) == b"\x01"
    rig.table.expire(5001)
    assert rig.table.renew([one.hold_id, two.hold_id], 10, 5001) == b"\x01\x00", "no ttl is longer than the limit"
    rig.table.expire(6049)
    assert rig.table.n_holds == 0
    kept = rig.hold(chain("a", 1), ttl_ms=0)
    for i in range(5000):  # outdated ends in the queue do not pile up
        assert rig.table.renew([kept.hold_id], i, 0) == b"\x01"
    rig.check()


def test_holds_of_a_connection_end_with_it(rig: Rig) -> None:
    rig.put(chain("a", 4))
    rig.hold(chain("a", 2), owner=5, view=True)
    rig.hold(chain("a", 1), owner=5)
    exported = rig.hold(chain("a", 3))
    rig.table.release_owner(5)
    rig.table.release_owner(5)
    assert rig.table.n_holds == 1 and rig.table.held_bytes[Tiers.DRAM] == 3 * BLOCK
    rig.table.release([exported.hold_id])
    rig.check()


def test_overdue_views_are_quarantined_within_a_cap() -> None:
    rig = Rig(16, limits=Limits(quarantine_fraction=0.25))
    rig.put(chain("a", 8))
    rig.hold(chain("a", 3), owner=1, view=True, ttl_ms=10)
    late = rig.hold(chain("a", 6, 3), owner=2, view=True, ttl_ms=20)
    assert rig.table.expire(15) == [] and rig.table.gauges()["quarantined_bytes"] == 3 * BLOCK
    rig.put(chain("b", 16))
    assert rig.has(chain("a", 6)) == [DRAM] * 6, "its reader may still look"
    assert rig.table.expire(25) == [1], "past the cap the longest overdue goes"
    assert rig.table.renew([late.hold_id], 100, 25) == b"\x01"
    assert rig.table.expire(26) == [], "a renewed view is overdue no more"
    rig.table.release_owner(1)
    rig.put(chain("c", 16))
    assert rig.has(chain("a", 6)) == [0, 0, 0, DRAM, DRAM, DRAM]
    assert rig.table.gauges()["quarantined_bytes"] == 0
    rig.check()


def test_pinned_blocks_are_held_without_a_look_up(rig: Rig) -> None:
    rig.put(chain("a", 8))
    pinned = rig.pin(chain("a", 8))
    blocks = [b for b in pinned.blocks if b is not None]
    rig.table.remove(chain("a", 4, 3))
    hold_id, n = rig.table.hold_blocks(blocks, ttl_ms=100, now_ms=0, owner=7)
    assert hold_id and n == 3, "up to the one that was removed"
    rig.table.unpin(pinned.blocks)
    rig.put(chain("b", 8))
    assert rig.has(chain("a", 8))[:4] == [DRAM, DRAM, DRAM, 0]
    rig.table.release_owner(7)
    rig.check()


def test_a_reader_paused_past_its_hold_notices_by_the_generation(rig: Rig) -> None:
    rig.put(chain("a", 1))
    rig.hold(chain("a", 1), ttl_ms=10)
    block = rig.table.spaces[uid_of(1)].blocks[chain("a", 1).keys]
    offset, gen_index, generation = rig.table.place(block)
    assert generation == block.generation == rig.words[uid_of(1), gen_index]
    rig.put(chain("b", 8))
    assert rig.words[uid_of(1), gen_index] == generation
    rig.table.expire(10)
    rig.put(chain("c", 8))
    assert rig.words[uid_of(1), gen_index] == generation + 1 and rig.memory[uid_of(1), offset] != chain("a", 1).keys


def test_hold_ids_are_not_guessable_and_repeatable_from_the_seed() -> None:
    def ids(seed: int) -> list[int]:
        rig = Rig(8, limits=Limits(seed=seed))
        rig.put(chain("a", 1))
        return [rig.hold(chain("a", 1)).hold_id for _ in range(3)]

    assert ids(1) == ids(1) != ids(2) and min(ids(1)) > 1 << 32


# --- two tiers ----------------------------------------------------------------------------------------------------------


def test_a_dirty_block_is_not_dropped_while_the_ssd_takes_it() -> None:
    rig = Rig(8, 100)
    rig.put(chain("a", 8))
    reserved = rig.reserve(chain("b", 3))
    assert list(reserved.codes) == [FULL] * 3 and reserved.must_wait
    assert rig.table.has_actions, "the mover is wanted"
    assert rig.write_down(max_bytes=1) >= 3
    reserved = rig.reserve(chain("b", 3))
    assert list(reserved.codes) == [RESERVED] * 3 and not reserved.must_wait
    rig.fill(reserved)
    rig.commit(reserved)
    assert rig.has(chain("a", 8)) == [BOTH if tiers == BOTH else tiers for tiers in rig.has(chain("a", 8))]
    assert rig.has(chain("a", 8))[5:] == [SSD] * 3, "tail first, and the SSD copies stay"
    assert rig.get(chain("a", 8)) == 8
    rig.check()


def test_waiting_ends_while_blocks_are_written() -> None:
    rig = Rig(4, 100)
    rig.put(chain("a", 4))
    rig.reserve(chain("b", 4))
    blocks = rig.table.clean_candidates(1 << 30, now_ms=0)
    assert len(blocks) == 4 and rig.table.clean_candidates(1 << 30, now_ms=0) == []
    assert rig.reserve(chain("b", 4)).must_wait, "they are being written: room will come"
    for block in blocks:
        slot = rig.table.ssd_reserve(block)
        rig.apply()
        assert slot is not None
        rig.disk[slot] = block.key
        rig.table.ssd_done(block, slot, ok=True)
    assert rig.put(chain("b", 4)) == bytes([STORED] * 4)
    rig.check()


def test_dirty_blocks_are_dropped_while_the_ssd_is_out() -> None:
    rig = Rig(4, 100)
    rig.put(chain("a", 4))
    rig.table.ssd_writable = False
    assert rig.put(chain("b", 2)) == bytes([STORED, STORED])
    assert rig.table.counters["dropped_dirty"] == 2 and rig.has(chain("a", 4)) == [DRAM, DRAM, 0, 0]
    assert rig.table.clean_candidates(1 << 30, now_ms=0) == []
    rig.check()


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "lru"])
def test_a_put_whose_own_blocks_the_ssd_refuses_does_not_wait_for_ever(policy: str) -> None:
    """Its last block needs the extent of its first, which can be neither written down (all of SSD is held) nor given up. Each
    try uses the chain, and what is used is worth another try: not for the put that waits for it."""
    rig = Rig(24, 1, policy=policy, limits=Limits(held_fraction=1.0))
    rig.put_waiting(chain("x", 4))
    rig.write_all_down()
    rig.hold(chain("x", 4))
    rig.now += 1000
    sizes = [4096, 2307, 1134, 673, 1134]
    rig.put_waiting(chain("a", 4), sizes=sizes[:4])
    rig.now += 1000
    assert list(rig.put_waiting(chain("a", 5), sizes=sizes)) == [ALREADY] * 4 + [FULL]
    rig.check()


def test_a_block_that_cannot_be_written_is_dropped_at_last() -> None:
    rig = Rig(4, 100)
    rig.put(chain("a", 4))
    assert rig.reserve(chain("b", 4)).must_wait
    assert rig.write_down(ok=False) == 0
    reserved = rig.reserve(chain("b", 4))
    assert list(reserved.codes) == [RESERVED] * 4 and rig.table.counters["dropped_dirty"] == 4
    assert rig.table.ssd is not None and rig.table.ssd.n_blocks == 0
    rig.check()


def test_writing_ahead_keeps_dirty_bytes_under_the_watermark() -> None:
    rig = Rig(100, 1000, limits=Limits(low_watermark=0.75))
    rig.put(chain("a", 75))
    assert rig.write_down() == 0
    rig.put(chain("b", 20))
    assert rig.write_down() == 20
    assert rig.has(chain("a", 75))[55:] == [BOTH] * 20, "the coldest"
    assert rig.table.dirty_bytes == 75 * BLOCK
    rig.check()


def test_writing_ahead_to_a_small_ssd_comes_to_an_end() -> None:
    rig = Rig(100, 10, limits=Limits(low_watermark=0.1))
    rig.put(chain("a", 100))
    assert rig.write_down(max_bytes=BLOCK, rounds=1000) < 50
    for i in range(30):
        rig.put(chain(f"b{i}-", 3))
        assert rig.write_down(max_bytes=BLOCK, rounds=1000) < 50
    rig.check()


def test_ssd_eviction_is_reported_as_a_change_of_tiers() -> None:
    rig = Rig(4, 4)
    rig.put(chain("a", 4))
    rig.write_all_down()
    rig.put(chain("b", 2))
    assert rig.has(chain("a", 4)) == [BOTH, BOTH, SSD, SSD]
    rig.write_all_down()
    assert rig.has(chain("b", 2)) == [BOTH, BOTH] and rig.has(chain("a", 4)) == [BOTH, BOTH, 0, 0]
    assert rig.cause(chain("a", 4, 2)) is MissCause.EVICTED
    rig.table.pin(chain("b", 2), now_ms=0)
    rig.put(chain("c", 2))
    rig.write_all_down()
    rig.check()


def test_a_block_whose_ssd_copy_was_evicted_is_dirty_again() -> None:
    rig = Rig(4, 2)
    rig.put(chain("a", 2))
    rig.write_all_down()
    rig.put(chain("b", 2))
    assert rig.write_all_down() == 2
    assert rig.has(chain("a", 2)) == [DRAM] * 2 and rig.has(chain("b", 2)) == [BOTH] * 2
    assert rig.index[uid_of(1), chain("a", 1).keys] == DRAM and rig.table.counters["evicted_ssd"] == 2
    assert rig.table.dirty_bytes == 2 * BLOCK
    assert rig.put(chain("c", 1)) == bytes([STORED]), "a clean one in reach goes"
    assert rig.has(chain("a", 2)) == [DRAM] * 2, "not one that would have to be written down again"
    rig.check()


def test_writing_ahead_does_not_displace_itself_for_ever() -> None:
    """The SSD tier is full of blocks that are used more than the coldest of DRAM: each write would push out the one before."""
    rig = Rig(100, 40, limits=Limits(low_watermark=0.1))
    rig.put(chain("a", 100))
    for i in range(2):
        assert rig.write_down() == 20
        rig.put(chain(f"b{i}-", 20))
    cold = chain("a", 100)
    on_ssd = [i for i, tiers in enumerate(rig.has(cold)) if tiers == SSD]
    assert len(on_ssd) == 40
    rig.table.tiers_of(cold.slice(on_ssd[0], on_ssd[-1] + 1), now_ms=0, touch=True)
    rig.get(chain("b0-", 20))
    assert rig.write_down(max_bytes=BLOCK, rounds=1000) < 30
    rig.check()


def test_promotion() -> None:
    rig = Rig(4, 100)
    rig.put(chain("a", 4))
    rig.write_all_down()
    rig.put(chain("b", 4))
    assert rig.has(chain("a", 4)) == [SSD] * 4
    assert rig.promote(chain("a", 1)) == [False], "dirty blocks are no room for a promotion"
    rig.write_all_down()
    assert rig.promote(chain("a", 3)) == [True] * 3
    assert rig.has(chain("a", 4)) == [BOTH, BOTH, BOTH, SSD] and rig.has(chain("b", 4)) == [BOTH, SSD, SSD, SSD]
    assert rig.table.counters["promoted"] == 3
    rig.check()


def test_one_promotion_of_a_block_at_a_time() -> None:
    rig = Rig(4, 100)
    rig.put(chain("a", 1))
    rig.write_all_down()
    rig.put(chain("b", 4))
    rig.write_all_down()
    (block,) = rig.pin(chain("a", 1)).blocks
    assert block is not None
    slot = rig.table.promote_reserve(block)
    assert slot is not None and rig.table.promote_reserve(block) is None
    rig.table.promote_done(block, slot, None, ok=False)
    assert block.dram is None and rig.table.promote_reserve(block) is not None
    rig.check()


def test_promotion_races_eviction_of_the_ssd_copy() -> None:
    rig = Rig(2, 2)
    rig.put(chain("a", 1))
    rig.put(chain("p", 1))
    rig.write_all_down()
    rig.put(chain("q", 1))
    assert rig.has(chain("a", 1)) == [SSD] and rig.has(chain("p", 1)) == [BOTH]
    (block,) = rig.table.pin(chain("a", 1), now_ms=0, touch=False).blocks  # the coldest of the SSD tier
    assert block is not None
    slot = rig.table.promote_reserve(block)
    assert slot is not None
    rig.table.unpin([block])  # the promotion has its own pin
    assert rig.write_all_down() == 1 and rig.has(chain("p", 1)) == [0]
    assert block.ssd is not None and rig.disk[block.ssd] == block.key, "its SSD copy is being read"
    arena, offset, _ = rig.table.dram.place(slot)
    rig.memory[arena, offset] = block.key
    rig.table.promote_done(block, slot, SUMS, ok=True)
    assert rig.get(chain("a", 1)) == 1
    rig.check()


def test_removal_during_promotion() -> None:
    rig = Rig(2, 4)
    rig.put(chain("a", 2))
    rig.write_all_down()
    rig.put(chain("b", 2))
    rig.write_all_down()
    (block,) = rig.pin(chain("a", 1)).blocks
    assert block is not None
    slot = rig.table.promote_reserve(block)
    assert slot is not None
    rig.table.remove(chain("a", 1))
    rig.table.promote_done(block, slot, SUMS, ok=True)
    rig.check()
    rig.table.unpin([block])
    rig.apply()
    assert chain("a", 1).keys not in rig.disk.values(), "the record is erased"
    assert rig.get(chain("a", 1)) == 0
    rig.check()


def test_removal_during_demotion() -> None:
    rig = Rig(2, 4)
    rig.put(chain("a", 2))
    rig.reserve(chain("b", 2))
    blocks = rig.table.clean_candidates(1 << 30, now_ms=0)
    slots = [rig.table.ssd_reserve(block) for block in blocks]
    rig.apply()
    rig.table.remove_all(uid_of(1))
    assert rig.table.dram.n_blocks == 2, "being read by the mover"
    for block, slot in zip(blocks, slots, strict=True):
        assert slot is not None
        rig.disk[slot] = block.key
        rig.table.ssd_done(block, slot, ok=True)
    rig.apply()
    assert not rig.disk and rig.table.dram.n_blocks == 0 and not rig.index
    rig.check()


def test_removal_between_candidates_and_reserve() -> None:
    rig = Rig(2, 4)
    rig.put(chain("a", 2))
    rig.reserve(chain("b", 2))
    one, two = rig.table.clean_candidates(1 << 30, now_ms=0)
    rig.table.remove_all(uid_of(1))
    assert rig.table.ssd_reserve(one) is None
    rig.table.ssd_done(one, None, ok=False)
    rig.table.ssd_done(two, None, ok=False)
    assert rig.table.dram.n_blocks == 0
    rig.check()


def test_what_has_a_record_on_disk_is_known_until_it_is_erased() -> None:
    """A removal may be confirmed only when no record is left, also of a block that was dropped before and is still read."""
    rig = Rig(4, 100)
    rig.put(chain("a", 3))
    assert rig.table.with_records(uid_of(1)) == []
    for block in list(rig.table._dirty)[:1]:
        rig.table._urgent[block] = None
    (writing,) = rig.table.clean_candidates(1 << 30, now_ms=0)
    assert rig.table.with_records(uid_of(1)) == [writing], "a record may come at any moment"
    slot = rig.table.ssd_reserve(writing)
    rig.table.ssd_done(writing, slot, ok=True)
    rig.write_all_down()
    pinned = rig.pin(chain("a", 3))
    held = rig.hold(chain("a", 2))
    bad = pinned.blocks[2]
    assert bad is not None
    rig.table.corrupt(bad, Tiers.SSD)
    rig.table.remove(chain("a", 3))
    keys = chain("a", 3).keys
    assert len(rig.table.with_records(uid_of(1), keys)) == len(rig.table.with_records(uid_of(1))) == 3
    assert rig.table.with_records(uid_of(1), keys[:34])[0].ssd_slots
    rig.table.unpin(pinned.blocks)
    rig.table.release([held.hold_id])
    assert rig.table.with_records(uid_of(1)) == []
    rig.apply()
    assert not rig.disk
    rig.check()


def test_a_held_ssd_block_stays_readable_without_dram() -> None:
    rig = Rig(4, 8)
    rig.put(chain("a", 4))
    rig.write_all_down()
    rig.put(chain("b", 4))
    rig.write_all_down()
    held = rig.hold(chain("a", 4))
    assert held.count == 4 and rig.table.held_bytes == {Tiers.DRAM: 0, Tiers.SSD: 4 * BLOCK}
    for i in range(10):
        rig.put(chain(f"c{i}-", 4))
        rig.write_all_down()
    assert rig.get(chain("a", 4)) == 4 and rig.has(chain("a", 4)) == [SSD] * 4
    assert rig.hold(chain("a", 1), view=True, owner=1).count == 0, "a view needs it in DRAM"
    rig.table.release([held.hold_id])
    rig.check()


def test_a_hold_falls_back_to_the_ssd_copy() -> None:
    rig = Rig(4, 100)
    rig.put(chain("a", 4))
    rig.write_all_down()
    assert rig.hold(chain("a", 4)).count == 4
    assert rig.table.held_bytes == {Tiers.DRAM: 2 * BLOCK, Tiers.SSD: 2 * BLOCK}
    rig.put(chain("b", 2))
    assert rig.has(chain("a", 4)) == [BOTH, BOTH, SSD, SSD] and rig.get(chain("a", 4)) == 4
    rig.check()


def test_corrupt_copies() -> None:
    rig = Rig(4, 100)
    rig.put(chain("a", 4))
    rig.write_all_down()
    pinned = rig.pin(chain("a", 4))
    a, b, c, _ = pinned.blocks
    assert a is not None and b is not None and c is not None
    rig.table.corrupt(a, Tiers.DRAM)
    rig.table.corrupt(b, Tiers.SSD)
    rig.table.corrupt(c, Tiers.DRAM)
    rig.table.corrupt(c, Tiers.SSD)
    rig.table.corrupt(c, Tiers.SSD)
    assert rig.has(chain("a", 4)) == [SSD, DRAM, 0, BOTH] and rig.cause(chain("a", 4)) is MissCause.CORRUPT
    assert rig.table.dram.n_blocks == 4, "others may be reading the slots"
    rig.table.unpin(pinned.blocks)
    assert rig.table.dram.n_blocks == 2
    assert rig.write_all_down() == 1, "b is dirty again"
    rig.check()


def test_losing_the_ssd_tier() -> None:
    rig = Rig(4, 100)
    rig.put(chain("a", 4))
    rig.write_all_down()
    rig.put(chain("b", 2))
    rig.table.ssd_writable = False
    assert rig.table.drop_tier(Tiers.SSD) == 4
    assert rig.has(chain("a", 4)) == [DRAM, DRAM, 0, 0] and rig.cause(chain("a", 4)) is MissCause.WORKER_LOST
    assert rig.put(chain("c", 4)) == bytes([STORED] * 4)
    rig.check()


def test_adoption_at_start() -> None:
    rig = Rig(4, 100)
    ssd = rig.table.ssd
    assert ssd is not None and ssd.adopt_extent(3, uid_of(1), slot_bytes=BLOCK, n_slots=8)
    from kvpool.core.slots import Slot

    keys = chain("a", 3).split()
    slots = [Slot(3 << 32 | i) for i in range(3)]
    for i, (key, slot) in enumerate(zip(keys, slots, strict=True)):
        rig.disk[slot] = key
        assert rig.table.adopt(uid_of(1), key, BLOCK, 77, i, bytes(32), slot, i)
    assert not rig.table.adopt(uid_of(1), keys[0], BLOCK, 77, 0, bytes(32), Slot(3 << 32 | 4), 9), "there already"
    assert not rig.table.adopt(uid_of(2), keys[0], BLOCK, 77, 0, bytes(32), Slot(3 << 32 | 4), 9), "unknown namespace"
    assert not rig.table.adopt(uid_of(1), chain("z", 1).keys, BLOCK + 1, 7, 0, bytes(32), Slot(3 << 32 | 4), 9), "size"
    assert not rig.table.adopt(uid_of(1), chain("z", 1).keys, BLOCK, 7, 0, bytes(32), Slot(4 << 32), 9), "no such extent"
    assert rig.get(chain("a", 3)) == 3 and rig.promote(chain("a", 3)) == [True] * 3
    rig.check()


# --- classes and namespaces that share a tier -----------------------------------------------------------------------------


@pytest.mark.parametrize("n_ssd", [None, 10_000])
def test_a_full_pool_of_one_size_makes_room_for_another(n_ssd: int | None) -> None:
    specs = [spec_of(1, 4096), spec_of(2, 100_000), spec_of(3, 4096)]
    rig = Rig(1024, n_ssd, specs=specs)
    for i in range(64):
        rig.put(chain(f"a{i}-", 16))

    def put(batch: object, size: int, n: int) -> int:
        for _ in range(20):
            codes = rig.put(batch, [size] * n)  # type: ignore[arg-type]
            if set(codes) <= {STORED, ALREADY}:
                return len(codes)
            rig.write_down()
        return 0

    assert put(chain("b", 10, ns=2), 100_000, 10) == 10
    rig.check()
    assert put(chain("c", 300, ns=3), 4096, 300) == 300
    rig.check()
    assert rig.get(chain("c", 300, ns=3)) == 300
    for i in range(80):
        assert put(chain(f"d{i}-", 1, ns=2), 100_000, 1) == 1
        rig.apply()
    rig.check()


def test_a_busy_block_in_every_extent_means_full_not_a_crash() -> None:
    rig = Rig(1024, specs=[spec_of(1, 4096), spec_of(2, 100_000)])
    rig.put(chain("a", 1024))
    pinned = rig.pin(batch_of([f"a{i}" for i in range(0, 1024, 8)], chained=False))
    assert rig.put(chain("b", 1, ns=2), [100_000]) == bytes([FULL])
    assert rig.get(chain("a", 1024)) == 1024, "nothing was given up in vain"
    rig.table.unpin(pinned.blocks)
    assert rig.put(chain("b", 1, ns=2), [100_000]) == bytes([STORED])
    rig.check()


def test_bytes_follow_use_between_namespaces() -> None:
    """A namespace that is not used any more gives its bytes to one that is, though that one has victims of its own."""
    rig = Rig(1024, specs=[spec_of(1, 4096), spec_of(2, 4096)])
    rig.put(chain("old", 900))
    for turn in range(400):
        for i in range(10):
            rig.put(chain(f"n{i}-", 64, ns=2))
        if turn % 50 == 0:
            rig.apply()
    assert sum(rig.get(chain(f"n{i}-", 64, ns=2)) for i in range(10)) == 640
    rig.check()


def test_many_sizes_in_one_namespace() -> None:
    chance = random.Random(4)
    rig = Rig(0, dram_bytes=1 << 20, specs=[spec_of(1, 65536)])
    for i in range(300):
        n = chance.randrange(1, 6)
        sizes = [chance.randrange(1, 65537) for _ in range(n)]
        rig.put(chain(f"a{i}-", n), sizes)
        if i % 50 == 0:
            rig.apply()
            rig.check()
    assert rig.table.dram.used_bytes > 600_000
    rig.check()


# --- inventory ----------------------------------------------------------------------------------------------------------


def test_snapshot_in_parts_shows_what_is_there() -> None:
    rig = Rig(20_000, specs=[spec_of(1), spec_of(2)])
    for i in range(100):
        rig.put(chain(f"a{i}-", 100))
    rig.put(chain("b", 5, ns=2))
    parts = rig.table.snapshot()
    rig.table.remove(chain("a0-", 100))  # reported by itself
    rig.put(chain("later", 5, ns=2))
    seen = {}
    for uid, keys, tiers, sizes in parts:
        assert len(tiers) * 34 == len(keys) and len(sizes) == 4 * len(tiers) and len(tiers) <= 8192
        seen.update({(uid, keys[i * 34 : i * 34 + 34]): t for i, t in enumerate(tiers)})
    later = {(uid_of(2), key) for key in chain("later", 5).split()}
    assert seen == {name: tiers for name, tiers in rig.index.items() if name not in later}


def test_a_chain_that_comes_in_parts_moves_its_own_earlier_parts_down() -> None:
    rig = Rig(4, 20)
    for start in range(0, 12, 3):
        part = chain("c", start + 3, start)
        for _ in range(8):
            reserved = rig.reserve(part)
            if not reserved.must_wait:
                break
            rig.table.abort([block for block in reserved.blocks if block is not None])
            rig.write_down()
        assert FULL not in reserved.codes, f"part from {start}: the SSD tier has room"
        rig.fill(reserved)
        rig.commit(reserved)
        rig.apply()
        rig.check()
    assert rig.get(chain("c", 12)) == 12


def test_a_chain_that_is_longer_than_both_tiers_keeps_its_head() -> None:
    rig = Rig(4, 9)
    for start in range(0, 24, 3):
        part = chain("c", start + 3, start)
        for _ in range(8):
            reserved = rig.reserve(part)
            if not reserved.must_wait:
                break
            rig.table.abort([block for block in reserved.blocks if block is not None])
            rig.write_down()
        rig.fill(reserved)
        rig.commit(reserved)
        rig.apply()
        rig.check()
        if FULL in reserved.codes:
            break
    else:
        raise AssertionError("24 blocks in two tiers of 13")
    assert rig.get(chain("c", 24)) == start + reserved.codes.index(FULL) >= 9
    assert rig.table.counters["evicted"] == 0


def kept(rig: Rig, whole: KeyBatch) -> int:
    """Leading blocks there, and nothing behind them."""
    tiers = bytes(rig.has(whole))
    n = (tiers + b"\0").index(0)
    assert not any(tiers[n:]), f"a hole: {''.join('.DSB'[i] for i in tiers)}"
    return n


@pytest.mark.parametrize(("n_dram", "n_ssd", "n"), [(64, 208, 128), (52, 16, 32), (16, 52, 32), (40, 80, 113)])
@pytest.mark.parametrize("others", [1, 2], ids=["one namespace", "two"])
def test_both_tiers_lose_a_chain_from_its_tail(n_dram: int, n_ssd: int, n: int, others: int) -> None:
    rig = Rig(n_dram, n_ssd, specs=[spec_of(1), spec_of(2)])
    whole = chain("a", n)
    for at in range(0, n, 4):
        assert FULL not in rig.put_waiting(whole.slice(at, min(n, at + 4)))
    for _ in range(3):
        assert kept(rig, whole) == n == rig.get(whole)
        rig.promote(whole)
        rig.write_down()
    for i in range(0, 4 * (n_dram + n_ssd), 4):
        rig.put_waiting(chain(f"b{i}-", 4, ns=others))
        if kept(rig, whole) < n // 2:
            break
        rig.check()
    else:
        raise AssertionError("it never goes")


def test_a_cold_block_does_not_go_to_the_ssd_for_hotter_ones() -> None:
    rig = Rig(4, 4)
    rig.put(chain("a", 4))
    rig.write_all_down()
    rig.put(chain("b", 4))
    assert rig.get(chain("a", 4)) == 4 and rig.has(chain("a", 4)) == [SSD] * 4
    assert rig.put_waiting(chain("c", 2)) == bytes([RESERVED] * 2)
    assert rig.has(chain("a", 4)) == [SSD] * 4 and kept(rig, chain("b", 4)) == 2
    rig.table.remove(chain("a", 4, 2))
    rig.put_waiting(chain("d", 2))
    assert rig.has(chain("b", 2)) == [SSD] * 2, "it was not for good: now there is room"
    rig.check()


def test_order_of_eviction_is_exact_however_old_what_comes_is() -> None:
    """Of entries that come with old ticks, or after they were parked."""
    for seed in range(20):
        chance, lru, spot = random.Random(seed), Lru(), {}
        group = lru.group((uid_of(1), 1))
        for _ in range(3000):
            tick, rank, entry = chance.randint(1, 300), chance.randint(0, 5), Entry(group)
            lru.add([entry], tick, [rank])
            spot[entry] = (tick, -rank)
            for some in chance.sample(sorted(spot, key=id), min(len(spot), 2)):
                what = chance.random()
                if what < 0.3:
                    lru.remove(some)
                    del spot[some]
                elif what < 0.6:
                    lru.park(some)
                    lru.unpark(some)
                elif what < 0.8:
                    new = (spot[some][0] + chance.randint(0, 100), -chance.randint(0, 5))
                    lru.touch([some], new[0], -new[1])
                    spot[some] = max(spot[some], new)
        lru.check()
        coldest = lru.coldest(group, len(spot))
        assert [spot[entry] for entry in coldest] == sorted(spot.values())
        behind = [at for at in spot.values() if at[0] == spot[coldest[100]][0] and at < spot[coldest[100]]]
        assert sorted(spot[entry] for entry in lru.behind(group, *lru.place_of(coldest[100]))) == sorted(behind)
