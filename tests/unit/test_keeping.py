"""Hints, pins and quotas: their values, and what the table does with them."""

from __future__ import annotations

import pytest

from kvpool.core.block import Limits
from kvpool.core.frames import FrameError, KeysRequest, WriteRequest
from kvpool.core.keys import KeyBatch
from kvpool.core.pins import PINS_MAX, PinBook, PinLevel, check_ttl_s, level_of
from kvpool.core.policy.make import POLICIES
from kvpool.core.quota import Share, shares
from kvpool.core.retention import (
    PRIORITY_DEFAULT,
    Keep,
    check_priority,
    check_seconds,
    hint_of,
    life_ms,
    pack_hint,
    unpack_hint,
)
from kvpool.core.types import BlockCode, MissCause, NamespaceUid, WorkerId
from kvpool.errors import InvalidArgument
from kvpool.worker.tiers import slab_file
from kvpool.worker.tiers.base import BlockMeta
from kvpool.worker.tiers.slab_file import Geometry, Header
from tests.support.tables import BLOCK, DRAM, Rig, batch_of, chain, spec_of, uid_of

STORED, ALREADY, FULL = BlockCode.STORED, BlockCode.ALREADY, BlockCode.FULL


def put(rig: Rig, batch: KeyBatch, *, retain_ms: int = 0, priority: int | None = None) -> list[int]:
    reserved = rig.table.reserve(
        batch, [rig.block] * len(batch), now_ms=rig.now, hints=[pack_hint(retain_ms, priority)] * len(batch)
    )
    rig.fill(reserved)
    made = iter(rig.commit(reserved))
    codes = [next(made) if block is not None else code for code, block in zip(reserved.codes, reserved.blocks, strict=True)]
    rig.check()
    return codes


def put_waiting(rig: Rig, batch: KeyBatch, *, priority: int, rounds: int = 16) -> None:
    """As a worker does it; what is written down for the put must be what leaves."""
    use = 0
    for _ in range(rounds):
        hints = [pack_hint(0, priority)] * len(batch)
        reserved = rig.table.reserve(batch, [rig.block] * len(batch), now_ms=rig.now, hints=hints, use=use)
        if not reserved.must_wait:
            break
        use = reserved.use
        rig.table.abort(reserved.blocks)
        rig.write_down(max_bytes=4 * BLOCK, rounds=1)
        rig.table.shelves.refresh()
    assert not reserved.must_wait, "it waits for ever"
    rig.fill(reserved)
    rig.commit(reserved)
    rig.check()


def pin(rig: Rig, batch: KeyBatch, level: PinLevel, *, ttl: int = 10_000) -> list[int]:
    n = len(batch)
    codes = rig.table.pin_keys(batch.namespace, batch.split(), [level] * n, [rig.now + ttl] * n)
    rig.check()
    return list(codes)


def singles(names: str, ns: int = 1) -> KeyBatch:
    return batch_of(list(names), ns=ns, chained=False)


# --- values -----------------------------------------------------------------------------------------------------------------


def test_hints_are_packed_into_one_number_and_nothing_is_zero() -> None:
    assert pack_hint(0) == 0 and unpack_hint(0) == (0, PRIORITY_DEFAULT)
    for priority in (0, 1, 34, 35, 100):
        assert unpack_hint(pack_hint(123_456_789_012, priority)) == (123_456_789_012, priority)
    assert unpack_hint(pack_hint(2**60))[0] == 2**56 - 1 and unpack_hint(2**64 - 1)[1] == 100
    assert hint_of(None, 5) == 0 and unpack_hint(hint_of(Keep(1_000, 7), 400)) == (600, 7)
    assert unpack_hint(hint_of(Keep(1_000, 7), 4_000))[0] == 1  # over, and not for ever
    assert (life_ms(0, 0), life_ms(5, 0), life_ms(0, 7), life_ms(5, 7), life_ms(9, 7)) == (0, 5, 7, 5, 7)


def test_wrong_values_are_named() -> None:
    assert check_seconds("retain_s", None) == 0 and check_seconds("retain_s", 1.5) == 1500 and check_ttl_s(0.0001) == 1
    for bad in (0, -1, True, "1", float("nan"), float("inf"), 1e12):
        with pytest.raises(InvalidArgument, match=r"^retain_s: "):
            check_seconds("retain_s", bad)
        with pytest.raises(InvalidArgument, match=r"^ttl_s: "):
            check_ttl_s(bad)
    for bad in (-1, 101, True, 1.0, "35"):
        with pytest.raises(InvalidArgument, match=r"^priority: "):
            check_priority(bad)
    with pytest.raises(InvalidArgument, match=r"^level: "):
        level_of("firm")


def test_a_book_of_pins_forgets_them_in_time_and_is_bounded_in_what_it_remembers() -> None:
    book = PinBook()
    for i in range(5_000):
        book.set(b"k", PinLevel.SOFT, 10 + i)
    assert len(book) == 1 and len(book._ends) <= 2 * 1 + 1024
    assert book.expire(5_008, n_max=9) == [] and book.get(b"k") == (PinLevel.SOFT, 5_009)
    book.set(b"l", PinLevel.HARD, 7)
    assert book.expire(6_000, n_max=1) == [b"l"] and book.expire(6_000, n_max=9) == [b"k"] and not len(book)


def test_shares_of_a_quota_are_whole_blocks_and_never_more_than_it() -> None:
    def of(quota: int, *sizes: tuple[int, int], unit: int = 10, largest: int = 0) -> list[Share]:
        made = shares(quota, unit=unit, largest=largest, capacities={WorkerId(f"w{i}"): size for i, size in enumerate(sizes)})
        assert sum(share.dram + share.ssd for share in made.values()) <= quota
        return [made[WorkerId(f"w{i}")] for i in range(len(sizes))]

    assert of(100, (1_000, 0)) == [Share(100, 0)]
    assert of(100, (1_000, 0), (1_000, 0)) == [Share(50, 0), Share(50, 0)]
    assert of(105, (1_000, 0), (3_000, 0)) == [Share(30, 0), Share(70, 0)]
    assert of(100, (1_000, 9_000)) == [Share(10, 90)]
    assert of(10, (1_000, 99_000)) == [Share(10, 0)]  # puts go to DRAM
    assert of(10, (1_000, 0), (1_000, 0)) == [Share(10, 0), Share(0, 0)]
    assert of(7, (1_000, 1_000), unit=1) == [Share(3, 4)]
    assert of(40, (1_000, 9_000), unit=1, largest=10) == [Share(10, 30)]  # the largest block finds room in DRAM
    assert of(25, (1_000, 9_000), (1_000, 9_000), unit=1, largest=10) == [Share(10, 5), Share(10, 0)]
    assert of(19, (1_000, 9_000), (1_000, 9_000), unit=1, largest=10) == [Share(10, 9), Share(0, 0)]
    assert of(2_000, (1_000, 0), (1_000, 9_000), unit=1, largest=10) == [Share(180, 0), Share(182, 1_638)]
    assert of(100, (0, 0)) == [Share(0, 0)] and of(100) == []


def test_hints_travel_behind_the_rest_and_frames_of_others_have_none() -> None:
    import numpy as np

    batch, sizes = chain("a", 3), np.array([1, 2, 3], dtype=np.uint64)
    plain = WriteRequest(batch, sizes)
    hinted = WriteRequest(batch, sizes, hints=np.array([1, 0, pack_hint(5, 100)], dtype=np.uint64))
    assert hinted.encode().startswith(plain.encode())
    assert not len(WriteRequest.decode(plain.encode()).hints)
    assert WriteRequest.decode(hinted.encode()).hints.tolist() == [1, 0, pack_hint(5, 100)]
    assert KeysRequest.decode(KeysRequest(batch, hinted.hints).encode()).hints.tolist() == hinted.hints.tolist()
    assert not len(KeysRequest.decode(KeysRequest(batch).encode()).hints)
    for tail in (b"x", bytes(8), bytes(32)):
        with pytest.raises(FrameError):
            WriteRequest.decode(plain.encode() + tail)
        with pytest.raises(FrameError):
            KeysRequest.decode(KeysRequest(batch).encode() + tail)


def test_a_record_on_disk_has_the_expiry_and_records_of_before_have_none() -> None:
    uid = NamespaceUid(b"n" * 16)
    header = Header(uid, Geometry(4096, 2), 5)
    raw = b"".join(
        slab_file.encode_record(BlockMeta(uid, bytes(34), 100, 7, kept=kept), number=5, index=i, seq=9)
        for i, kept in enumerate((0, pack_hint(1_700_000_000_000, 80)))
    )
    table = slab_file.decode_table(raw, header=header, file_bytes=1 << 20)
    assert [unpack_hint(record.kept) for record in table.records] == [(0, PRIORITY_DEFAULT), (1_700_000_000_000, 80)]
    assert raw[112:120] == bytes(8)  # where a release without expiry wrote zeros


# --- the table --------------------------------------------------------------------------------------------------------------


def test_an_expired_block_is_a_miss_at_once_and_the_timer_frees_its_slot() -> None:
    rig = Rig(4)
    assert put(rig, chain("a", 2), retain_ms=100) == [STORED, STORED] and put(rig, chain("b", 1)) == [STORED]
    rig.now += 99
    assert rig.get(chain("a", 2)) == 2
    rig.now += 1
    assert rig.get(chain("a", 2)) == 0 and rig.cause(chain("a", 1)) is MissCause.EXPIRED
    rig.table.expire(rig.now)
    assert rig.table.dram.n_blocks == 1 and rig.table.counters["expired"] == 2
    assert rig.causes[uid_of(1), chain("a", 2).split()[1]] is MissCause.EXPIRED


def test_a_hold_keeps_an_expired_block_for_its_reader_alone() -> None:
    rig = Rig(4)
    put(rig, chain("a", 1), retain_ms=100)
    held = rig.hold(chain("a", 1), ttl_ms=500)
    rig.now += 200
    assert rig.cause(chain("a", 1)) is MissCause.EXPIRED and rig.has(chain("a", 1)) == [0]
    rig.table.expire(rig.now)
    pinned = rig.pin(chain("a", 1), hold_id=held.hold_id)
    assert pinned.blocks[0] is not None
    rig.table.unpin(pinned.blocks)
    assert rig.hold(chain("a", 1)).count == 0
    rig.now += 400
    rig.table.expire(rig.now)
    rig.table.expire(rig.now)
    assert rig.table.dram.n_blocks == 0


def test_what_is_put_again_lives_on_as_long_as_the_later_put_wants() -> None:
    rig = Rig(4)
    put(rig, singles("abc"), retain_ms=100)
    rig.now += 50
    put(rig, singles("a"), retain_ms=100)
    put(rig, singles("b"))
    rig.table.tiers_of(singles("c"), now_ms=rig.now, touch=True, hints=[pack_hint(10)])  # shorter: nothing changes
    rig.now += 60
    assert rig.has(singles("abc")) == [1, 1, 0]
    rig.now += 10_000
    assert rig.has(singles("abc")) == [0, 1, 0]


def test_priorities_and_pins_leave_in_their_order() -> None:
    rig = Rig(5)
    for name, priority in (("h", 90), ("s", None), ("p", None), ("l", 10), ("k", 20)):
        put(rig, singles(name), priority=priority)
    pin(rig, singles("s"), PinLevel.SOFT)
    gone = []
    for name in "12345678":
        put(rig, singles(name), priority=100)
        gone += [old for old in "hsplk" if old not in gone and not rig.has(singles(old))[0]]
    assert gone == ["l", "k", "p", "h"]  # the soft pin is above all priorities


def test_a_soft_pin_goes_for_a_put_when_nothing_else_may() -> None:
    rig = Rig(2)
    put(rig, singles("ab"))
    pin(rig, singles("ab"), PinLevel.SOFT)
    rig.get(singles("a"))
    assert put(rig, singles("c")) == [STORED] and rig.has(singles("ab")) == [1, 0]


def test_hard_pins_stay_within_their_share_and_more_are_taken_when_there_is_room() -> None:
    rig = Rig(4, limits=Limits(pinned_fraction=0.5))
    put(rig, singles("abcd"))
    assert pin(rig, singles("abc"), PinLevel.HARD) == [1, 1, 2]
    for name in "123456":
        put(rig, singles(name))
    assert rig.has(singles("abc")) == [1, 1, 1]
    pin(rig, singles("a"), PinLevel.NONE)
    rig.table.expire(rig.now)  # c has a's place
    assert rig.table.pinned_bytes[1] == 2 * BLOCK and pin(rig, singles("c"), PinLevel.HARD) == [1]
    assert put(rig, singles("xyz"))[:2] == [STORED, STORED] and rig.has(singles("bc")) == [1, 1]


def test_removal_takes_a_hard_pin_and_its_bytes_are_free_again() -> None:
    rig = Rig(4)
    put(rig, singles("a"))
    pin(rig, singles("a"), PinLevel.HARD)
    assert rig.table.remove(singles("a")) == b"\x01" and rig.table.pinned_bytes[1] == 0
    rig.check()
    put(rig, singles("a"))
    assert rig.table.pinned_bytes[1] == BLOCK  # the pin was for the key
    rig.now += 10_001
    rig.table.expire(rig.now)
    rig.check()
    assert rig.table.pinned_bytes[1] == 0 and rig.table.gauges()["pins"] == 0


def test_pins_of_a_worker_are_bounded() -> None:
    assert PINS_MAX == 65_536
    rig = Rig(4)
    put(rig, singles("abc"))
    n = PINS_MAX - 2
    rig.table.pin_keys(uid_of(1), [i.to_bytes(34, "little") for i in range(n)], [PinLevel.SOFT] * n, [rig.now + 10_000] * n)
    assert pin(rig, singles("abc"), PinLevel.SOFT) == [1, 1, 0]


def test_a_quota_makes_room_among_its_own_and_says_what_does_not_fit() -> None:
    rig = Rig(256, specs=[spec_of(1), spec_of(2)])
    put(rig, singles("abcd", ns=2))
    rig.table.set_share(uid_of(1), Share(2 * BLOCK, 0))
    for name in "12345":
        assert put(rig, singles(name)) == [STORED]
    assert rig.has(singles("12345")) == [0, 0, 0, 1, 1] and rig.has(singles("abcd", ns=2)) == [1] * 4
    reserved = rig.reserve(chain("c", 4))
    assert list(reserved.codes) == [BlockCode.RESERVED] * 2 + [FULL] * 2 and reserved.over_quota
    rig.table.abort(reserved.blocks)
    rig.table.set_share(uid_of(1), Share(0, 0))
    rig.table.expire(rig.now)
    assert rig.table.used_bytes_of(uid_of(1)) == (0, 0) and put(rig, singles("x")) == [FULL]


def test_a_quota_on_ssd_is_kept_by_demotions() -> None:
    rig = Rig(2, 16)
    rig.table.set_share(uid_of(1), Share(2 * BLOCK, 3 * BLOCK))
    for i in range(12):
        rig.put_waiting(singles(chr(97 + i)))
        assert rig.table.used_bytes_of(uid_of(1))[1] <= 3 * BLOCK
    assert rig.table.used_bytes_of(uid_of(1)) == (2 * BLOCK, 3 * BLOCK)


def test_a_soft_pin_on_ssd_does_not_go_for_a_demotion_of_what_is_not_pinned() -> None:
    rig = Rig(2, 4)
    for name in "abcdefgh":
        rig.put_waiting(singles(name))
    there = [name for name in "abcdefgh" if rig.has(singles(name)) == [2]]
    assert there
    pin(rig, singles("".join(there)), PinLevel.SOFT)
    for name in "ijklmnopqr":
        rig.put_waiting(singles(name))
    assert rig.has(singles("".join(there))) == [2] * len(there)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("priority", [0, 80])
def test_a_put_waits_for_few_writes_where_all_have_a_priority_and_ssd_is_small(policy: str, priority: int) -> None:
    rig = Rig(16, 4, policy=policy)
    for i in range(40):
        put_waiting(rig, batch_of([f"{i}.{j}" for j in range(3)], chained=False), priority=priority)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_extent_is_emptied_where_its_namespace_has_less_of_ssd_than_that(policy: str) -> None:
    rig = Rig(16, 8, specs=[spec_of(1), spec_of(2)], policy=policy)
    rig.table.set_share(uid_of(1), Share(13 * BLOCK, 7 * BLOCK))
    for i in range(20):
        put_waiting(rig, batch_of([i], chained=False), priority=0)
    put_waiting(rig, batch_of(["other"], ns=2, chained=False), priority=36)
    assert rig.has(batch_of(["other"], ns=2, chained=False)) == [int(DRAM)]


def test_a_kept_block_of_another_class_gives_way_last() -> None:
    rig = Rig(0, specs=[spec_of(1), spec_of(2, 2 * BLOCK)], dram_bytes=64 * BLOCK)
    put(rig, chain("a", 64))
    pin(rig, chain("a", 64), PinLevel.SOFT)
    reserved = rig.table.reserve(chain("b", 2, ns=2), [2 * BLOCK] * 2, now_ms=rig.now)
    assert list(reserved.codes) == [BlockCode.RESERVED] * 2
    rig.table.abort(reserved.blocks)
