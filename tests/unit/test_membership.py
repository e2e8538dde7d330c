"""Workers' states, holder numbers, and when an index is complete; and what a worker that was away has missed."""

from __future__ import annotations

import pytest

from kvpool.core.membership import Change, Membership, WorkerInfo, WorkerState
from kvpool.core.removals import Missed, Removal, RemovalLog
from kvpool.core.types import Incarnation, WorkerId

A, B = WorkerId("a"), WorkerId("b")


def info(name: WorkerId = A, incarnation: int = 1, address: str = "h:1") -> WorkerInfo:
    return WorkerInfo(name, Incarnation(incarnation), "host", address)


def members(*known: WorkerId, now_ms: int = 0) -> Membership:
    return Membership(suspect_after_ms=1500, dead_after_ms=4000, rebuild_grace_ms=3000, known=known, now_ms=now_ms)


def joined(pool: Membership, who: WorkerInfo, *, now_ms: int) -> None:
    pool.hello(who, now_ms=now_ms)
    pool.begin_inventory(who.worker_id, now_ms=now_ms)
    pool.end_inventory(who.worker_id)


def state(pool: Membership, name: WorkerId = A) -> WorkerState | None:
    member = pool.get(name)
    return None if member is None else member.state


def test_a_worker_is_up_after_its_inventory() -> None:
    pool = members()
    member, change = pool.hello(info(), now_ms=0)
    assert member.state is WorkerState.JOINING and change == Change((), (A,))
    first = member.holder
    holder, _ = pool.begin_inventory(A, now_ms=1)
    assert holder != first and pool.of_holder(holder) is member and state(pool) is WorkerState.JOINING
    assert pool.end_inventory(A) == Change((first,), (A,))
    assert state(pool) is WorkerState.UP and member.holder == holder and pool.of_holder(first) is None


def test_silence_makes_suspect_then_down_and_a_word_brings_back() -> None:
    pool = members()
    joined(pool, info(), now_ms=0)
    member = pool.get(A)
    assert member is not None
    assert pool.tick(now_ms=1500) == Change() and pool.tick(now_ms=1501) == Change((), (A,))
    assert state(pool) is WorkerState.SUSPECT and pool.tick(now_ms=1600) == Change()
    assert pool.heard(A, now_ms=1700) == Change((), (A,)) and state(pool) is WorkerState.UP
    pool.tick(now_ms=3300)
    assert pool.tick(now_ms=5700) == Change()
    assert pool.tick(now_ms=5701) == Change((member.holder,), (A,))
    assert state(pool) is None and pool.of_holder(member.holder) is None
    assert pool.heard(A, now_ms=5800) == Change()


def test_a_lost_stream_is_suspected_at_once_and_keeps_its_holder() -> None:
    pool = members()
    joined(pool, info(), now_ms=0)
    before = pool.get(A)
    assert before is not None
    assert pool.disconnected(A) == Change((), (A,)) and state(pool) is WorkerState.SUSPECT
    assert pool.heard(A, now_ms=10) == Change()  # a late word on the lost stream proves nothing
    assert state(pool) is WorkerState.SUSPECT
    member, change = pool.hello(info(address="h:2"), now_ms=20)
    assert member is before and change == Change((), (A,)) and state(pool) is WorkerState.UP and member.info.address == "h:2"


def test_a_new_incarnation_retires_the_old_one_at_once() -> None:
    pool = members()
    joined(pool, info(incarnation=1), now_ms=0)
    old = pool.get(A)
    assert old is not None
    new, change = pool.hello(info(incarnation=2), now_ms=5)
    assert change.retired == (old.holder,) and new is not old and new.holder != old.holder
    assert state(pool) is WorkerState.JOINING


def test_an_unfinished_inventory_is_retired_when_another_begins_or_the_worker_goes() -> None:
    pool = members()
    joined(pool, info(), now_ms=0)
    member = pool.get(A)
    assert member is not None
    first, _ = pool.begin_inventory(A, now_ms=1)
    second, change = pool.begin_inventory(A, now_ms=2)
    assert change.retired == (first,) and second != first
    assert pool.want_inventory(A, now_ms=3).retired == (second,)
    third, _ = pool.begin_inventory(A, now_ms=4)
    assert set(pool.leave(A).retired) == {member.holder, third}
    assert pool.leave(A) == Change()


def test_holder_numbers_are_never_used_twice() -> None:
    pool = members()
    seen: set[int] = set()
    for incarnation in range(1, 20):
        member, _ = pool.hello(info(incarnation=incarnation), now_ms=incarnation)
        holder, _ = pool.begin_inventory(A, now_ms=incarnation)
        assert not {member.holder, holder} & seen
        seen |= {member.holder, holder}
        pool.end_inventory(A)


def test_room_is_told_on_when_it_changed_by_a_part() -> None:
    pool = members()
    joined(pool, info(), now_ms=0)
    assert pool.room(A, free_bytes=1600, capacity_bytes=1600) == Change((), (A,))
    assert pool.room(A, free_bytes=1501, capacity_bytes=1600) == Change()
    assert pool.room(A, free_bytes=1500, capacity_bytes=1600) == Change((), (A,))


def test_complete_waits_for_the_known_and_no_longer_than_the_grace() -> None:
    assert members().complete(now_ms=0)
    pool = members(A, B, now_ms=100)
    assert not pool.complete(now_ms=100)
    joined(pool, info(A), now_ms=200)
    assert not pool.complete(now_ms=3099) and pool.complete(now_ms=3100)
    pool.hello(info(B), now_ms=3200)
    assert not pool.complete(now_ms=3200)  # its inventory is under way
    pool.begin_inventory(B, now_ms=3300)
    pool.inventory_part(B, now_ms=6000)
    assert not pool.complete(now_ms=8999) and pool.complete(now_ms=9000)
    pool.end_inventory(B)
    assert pool.complete(now_ms=6001)


def test_all_known_back_is_complete_before_the_grace() -> None:
    pool = members(A, B)
    joined(pool, info(A), now_ms=1)
    assert not pool.complete(now_ms=2)
    pool.leave(B)  # it was known, and has said goodbye
    assert pool.complete(now_ms=2)


# --- removals -----------------------------------------------------------------------------------------------------------


def k(*numbers: int) -> bytes:
    return b"".join(i.to_bytes(34, "big") for i in numbers)


def log_of(*removals: Removal, keys_max: int = 100) -> RemovalLog:
    log = RemovalLog(keys_max=keys_max)
    for removal in removals:
        log.append(removal)
    return log


def test_missed_is_what_came_after() -> None:
    log = log_of(Removal(1, k(1)), Removal(2, k(2, 3)), Removal(3, k(4)))
    assert log.missed(3) is None
    assert log.missed(2) == Missed(k(4)) and log.missed(0) == Missed(k(1, 2, 3, 4))
    assert log.missed(99) == Missed(drop_blocks=True)  # numbers of another life of the store
    with pytest.raises(ValueError, match="cannot follow"):
        log.append(Removal(5, k(1)))


def test_past_the_bound_the_oldest_go_and_who_needs_them_drops_all() -> None:
    log = log_of(*(Removal(i, k(i, i)) for i in range(1, 6)), keys_max=5)
    assert log.first_seq == 4 and log.missed(3) == Missed(k(4, 4, 5, 5)) and log.missed(2) == Missed(drop_blocks=True)
    big = log_of(Removal(1, k(*range(50))), keys_max=5)
    assert big.missed(0) == Missed(k(*range(50)))  # the newest is kept whatever its size


def test_a_removal_of_everything_begins_the_log_anew() -> None:
    log = log_of(Removal(1, k(1)), Removal(2, b"", everything=True), Removal(3, k(3)))
    assert log.first_seq == 2
    assert log.missed(0) == log.missed(1) == Missed(k(3), everything=True)
    assert log.missed(2) == Missed(k(3)) and log.missed(3) is None


def test_an_empty_log_with_a_number_knows_who_is_behind() -> None:
    log = RemovalLog(keys_max=5, seq=7)
    assert log.missed(7) is None and log.missed(6) == Missed(drop_blocks=True)


def test_who_drains_is_told_so_where_it_would_be_told_up() -> None:
    pool = members()
    joined(pool, info(), now_ms=0)
    member = pool.get(A)
    assert member is not None and member.told_state is WorkerState.UP
    assert pool.drain(A, draining=True) == Change((), (A,)) and member.told_state is WorkerState.DRAINING
    assert pool.drain(A, draining=True) == Change() and pool.drain(B, draining=True) == Change()
    assert pool.drain(A, draining=True, drained=True) == Change((), (A,)) and member.told_state is WorkerState.DRAINED
    pool.tick(now_ms=1501)
    assert member.told_state is WorkerState.SUSPECT  # whoever is silent is suspected, draining or not
    pool.heard(A, now_ms=1600)
    assert member.told_state is WorkerState.DRAINED
    assert pool.drain(A, draining=False, drained=True) == Change((), (A,)) and member.told_state is WorkerState.UP


def test_a_suspicion_from_outside_lasts_until_the_worker_is_heard() -> None:
    pool = members()
    joined(pool, info(), now_ms=0)
    assert pool.suspect(A, 2) == Change() and pool.suspect(B, 1) == Change()  # another incarnation, nobody
    assert pool.suspect(A, 1) == Change((), (A,)) and state(pool) is WorkerState.SUSPECT
    assert pool.suspect(A, 1) == Change()
    assert pool.heard(A, now_ms=100) == Change((), (A,)) and state(pool) is WorkerState.UP


def test_how_long_a_worker_has_been_up() -> None:
    pool = members()
    pool.hello(info(), now_ms=100)
    member = pool.get(A)
    assert member is not None and member.up_ms(5000) == 0
    pool.begin_inventory(A, now_ms=200)
    pool.heard(A, now_ms=300)
    pool.end_inventory(A)
    assert member.up_ms(1300) == 1000
    pool.begin_inventory(A, now_ms=2000)
    pool.end_inventory(A)
    assert member.up_ms(2300) == 2000, "another inventory makes nobody new"
    again, _ = pool.hello(info(incarnation=2), now_ms=3000)
    assert again.up_ms(4000) == 0, "a new incarnation is new"
    known, _ = pool.hello(info(B), now_ms=3000, seasoned=True)
    assert known.up_ms(3000) >= 10_000, "new to this master alone"
