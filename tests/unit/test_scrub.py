"""The scrubber's way through a table that changes under it, and its verdicts."""

from __future__ import annotations

import random

from kvpool.core.scrub import COPIES_MAX, Copy, Sweep, condemn
from kvpool.core.types import MissCause, Tiers
from tests.support.tables import BLOCK, SSD, Rig, chain

MIB = 1 << 20


def one_pass(rig: Rig, sweep: Sweep, *, max_bytes: int = MIB) -> list[Copy]:
    """All that a pass gives."""
    began, found = sweep.passes, []
    while sweep.passes == began:
        found += sweep.take(rig.table, max_bytes)
    return found


def keys(copies: list[Copy]) -> list[bytes]:
    return [copy.block.key for copy in copies]


def test_a_pass_meets_every_copy_of_its_tier_once() -> None:
    rig = Rig(40, 200)
    batch = chain("a", 40)
    rig.put(batch)
    rig.write_all_down()
    rig.put(chain("b", 20))  # 20 of the first are on SSD alone now
    dram, ssd = Sweep(Tiers.DRAM), Sweep(Tiers.SSD)
    for _ in range(2):
        found = one_pass(rig, dram)
        assert len(found) == len(set(keys(found))) == 40
        assert all(copy.size == BLOCK and len(copy.sums) == 8 for copy in found)
        assert sorted(keys(one_pass(rig, ssd))) == sorted(batch.split())
    assert (dram.passes, ssd.passes) == (2, 2)


def test_a_step_is_bounded_and_makes_progress() -> None:
    rig = Rig(300)
    rig.put(chain("a", 300))
    sweep = Sweep(Tiers.DRAM)
    assert [len(sweep.take(rig.table, BLOCK)) for _ in range(300)] == [1] * 300
    assert sweep.passes == 1
    assert len(sweep.take(rig.table, 1 << 40)) == COPIES_MAX
    assert len(sweep.take(rig.table, 1)) == 1, "one block at least, however large"


def test_an_empty_table_and_a_missing_tier_are_passed_at_once() -> None:
    rig = Rig(4)
    dram, ssd = Sweep(Tiers.DRAM), Sweep(Tiers.SSD)
    assert dram.take(rig.table, MIB) == [] and dram.passes == 1
    assert ssd.take(rig.table, MIB) == [] and ssd.passes == 0


def test_reserved_and_removed_blocks_are_not_looked_at() -> None:
    rig = Rig(8)
    reserved = rig.reserve(chain("r", 2))
    rig.put(chain("a", 4))
    rig.table.remove(chain("a", 1))
    assert len(one_pass(rig, Sweep(Tiers.DRAM))) == 3
    rig.fill(reserved)
    rig.commit(reserved)
    assert len(one_pass(rig, Sweep(Tiers.DRAM))) == 5


def test_a_table_that_changes_during_a_pass_ends_it_and_what_stays_is_met() -> None:
    chance = random.Random(5)
    rig = Rig(64, 512)
    stay = chain("stay", 16)
    rig.put(stay)
    rig.write_all_down()
    for sweep in (Sweep(Tiers.DRAM), Sweep(Tiers.SSD)):
        met: set[bytes] = set()
        for i in range(200):
            copies = sweep.take(rig.table, 4 * BLOCK)
            met |= {copy.block.key for copy in copies}
            assert not any(condemn(rig.table, copy) for copy in copies if not copy.block.live)
            name = f"{sweep.tier}{i}"
            rig.put(chain(name, chance.randrange(1, 6)))
            rig.write_all_down()
            if chance.random() < 0.5:
                rig.table.remove(chain(name, 6))
            assert rig.get(stay) == 16
            rig.promote(stay)
            rig.check()
        assert sweep.passes >= 1 and set(stay.split()) <= met


def test_a_bad_copy_is_dropped_and_the_other_tier_serves() -> None:
    rig = Rig(8, 64)
    batch = chain("a", 4)
    rig.put(batch)
    rig.write_all_down()
    bad = one_pass(rig, Sweep(Tiers.DRAM))[0]
    assert condemn(rig.table, bad)
    assert rig.has(batch).count(SSD) == 1 and rig.table.counters["corrupt_dram"] == 1
    assert not condemn(rig.table, bad), "once"
    alone = next(copy for copy in one_pass(rig, Sweep(Tiers.SSD)) if copy.block is bad.block)
    assert condemn(rig.table, alone)
    assert rig.table.counters["corrupt_ssd"] == 1 and rig.has(batch).count(0) == 1
    assert rig.causes[batch.namespace, bad.block.key] is MissCause.CORRUPT
    rig.apply()
    rig.check()


def test_a_ssd_copy_that_is_bad_is_written_down_again_from_dram() -> None:
    rig = Rig(8, 64)
    batch = chain("a", 1)
    rig.put(batch)
    rig.write_all_down()
    assert condemn(rig.table, one_pass(rig, Sweep(Tiers.SSD))[0])
    assert rig.has(batch) == [int(Tiers.DRAM)]
    assert rig.write_all_down() == 1
    rig.check()


def test_the_verdict_on_a_slot_that_was_used_anew_counts_for_nothing() -> None:
    rig = Rig(1, 8)  # one DRAM slot
    first = chain("a", 1)
    rig.put(first)
    rig.write_all_down()
    (in_dram,), (on_ssd,) = one_pass(rig, Sweep(Tiers.DRAM)), one_pass(rig, Sweep(Tiers.SSD))
    rig.put(chain("b", 1))
    assert in_dram.block.dram is None and not condemn(rig.table, in_dram)
    rig.write_all_down()
    assert rig.promote(first) == [True] and in_dram.block.dram == in_dram.slot, "the same block in the same slot"
    assert not condemn(rig.table, in_dram)
    rig.table.corrupt(on_ssd.block, Tiers.SSD)  # the SSD copy goes and comes back
    rig.write_all_down()
    assert rig.has(first) == [3] and not condemn(rig.table, on_ssd)
    assert rig.has(first) == [3]
