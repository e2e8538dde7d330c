"""Reports between worker and master: order, acknowledgement, resync."""

from __future__ import annotations

import pytest

from kvpool.core.session import Accept, Inbox, Report, Reporter, pack_state, unpack_cause
from kvpool.core.types import MissCause, NamespaceUid, Tiers

UID, OTHER = NamespaceUid(b"u" * 16), NamespaceUid(b"v" * 16)
DRAM = int(Tiers.DRAM)


def key(i: int) -> bytes:
    return i.to_bytes(34, "big")


def started(**options: int) -> Reporter:
    """A reporter whose (empty) inventory is through."""
    reporter = Reporter(**options)
    reporter.on_ack(reporter.begin_inventory() - 1)
    return reporter


def record(reporter: Reporter, *keys: int, tiers: int = DRAM, cause: MissCause | None = None) -> None:
    for i in keys:
        reporter.record(UID, key(i), tiers, cause, 10 + i)


def states(report: Report | None) -> dict[bytes, int]:
    assert report is not None
    return {
        batch.keys[34 * i : 34 * i + 34]: state for batch in report.batches for i, state in enumerate(batch.tiers)
    }


def test_states_carry_tiers_or_the_cause_of_the_going() -> None:
    for cause in MissCause:
        assert unpack_cause(pack_state(0, cause)) is cause and pack_state(0, cause) & 0x0F == 0
    assert pack_state(3, MissCause.EVICTED) == 3 and unpack_cause(3) is None and unpack_cause(0) is None
    assert unpack_cause(0xF0) is MissCause.UNKNOWN  # a newer worker's cause


def test_changes_merge_by_key_and_keep_their_order() -> None:
    reporter = started()
    record(reporter, 3, 1, 2)
    record(reporter, 1, tiers=0, cause=MissCause.EVICTED)
    reporter.record(OTHER, key(9), 2, None, 99)
    report = reporter.take()
    assert report is not None and [b.namespace for b in report.batches] == [UID, OTHER]
    assert list(states(report)) == [key(3), key(1), key(2), key(9)]
    assert states(report)[key(1)] == pack_state(0, MissCause.EVICTED)
    assert report.batches[1].sizes == (99).to_bytes(4, "little")
    assert reporter.take() is None


def test_a_mark_is_reached_by_the_report_that_has_what_was_recorded_before_it() -> None:
    reporter = started(report_keys=4)
    record(reporter, *range(10))
    mark = reporter.mark()
    covered: set[bytes] = set()
    while (report := reporter.take()) is not None:
        assert not reporter.acked >= mark
        covered |= set(states(report))
        reporter.on_ack(report.seq)
        if reporter.acked >= mark:
            break
        record(reporter, *range(100, 104))  # what comes later does not move it
    assert covered >= {key(i) for i in range(10)} and reporter.acked == mark


def test_a_mark_with_nothing_pending_waits_for_what_is_in_flight() -> None:
    reporter = started()
    assert reporter.acked >= reporter.mark()
    record(reporter, 1)
    report = reporter.take()
    assert report is not None
    mark = reporter.mark()
    assert mark == report.seq and reporter.acked < mark
    reporter.on_ack(report.seq)
    assert reporter.acked >= mark


def test_a_new_stream_gets_the_same_reports_again_unmerged() -> None:
    reporter = started()
    record(reporter, 1)
    first = reporter.take()
    record(reporter, 2)
    second = reporter.take()
    record(reporter, 1, tiers=0)
    assert first is not None and second is not None and reporter.next_seq == first.seq
    reporter.rewind()
    assert [reporter.take(), reporter.take()] == [first, second]
    third = reporter.take()
    assert third is not None and third.seq == second.seq + 1 and states(third) == {key(1): 0}
    reporter.on_ack(second.seq)
    reporter.rewind()
    assert reporter.take() == third and reporter.take() is None


def test_an_ack_that_comes_between_rewind_and_take_spares_the_report() -> None:
    reporter = started()
    record(reporter, 1)
    first = reporter.take()
    assert first is not None
    reporter.rewind()
    reporter.on_ack(first.seq)
    assert reporter.take() is None


def test_the_window_bounds_what_is_in_flight() -> None:
    reporter = started(report_keys=1, window_reports=2)
    record(reporter, *range(5))
    taken = [reporter.take(), reporter.take()]
    assert reporter.take() is None and reporter.n_pending == 3
    assert taken[0] is not None
    reporter.on_ack(taken[0].seq)
    assert reporter.take() is not None and reporter.take() is None


def test_more_changes_than_are_kept_end_in_an_inventory_that_covers_all_marks() -> None:
    reporter = started(pending_keys_max=5, report_keys=2)
    record(reporter, 0)
    in_flight = reporter.take()
    record(reporter, *range(5))
    early = reporter.mark()
    record(reporter, 4)  # known already: no overflow
    assert not reporter.needs_inventory
    record(reporter, 5)
    late = reporter.mark()
    assert reporter.needs_inventory and reporter.take() is None and reporter.next_seq == 0 and reporter.overflows == 1
    assert in_flight is not None
    reporter.on_ack(in_flight.seq)
    assert reporter.acked < early <= late
    next_seq = reporter.begin_inventory()
    record(reporter, 6)
    after = reporter.mark()
    assert reporter.acked < early
    reporter.on_ack(next_seq - 1)
    assert early <= reporter.acked and late <= reporter.acked < after
    report = reporter.take()
    assert report is not None and report.seq == next_seq == after


def test_marks_before_the_first_inventory_are_reached_by_it() -> None:
    reporter = Reporter()
    record(reporter, 1)
    marks = [reporter.mark(), reporter.mark()]
    assert marks[0] == marks[1]
    next_seq = reporter.begin_inventory()
    assert reporter.acked < marks[0]
    reporter.on_ack(next_seq - 1)
    assert reporter.acked >= marks[0]


def test_marks_that_a_lost_report_was_to_reach_are_reached_by_the_next_inventory() -> None:
    reporter = started(report_keys=2)
    record(reporter, *range(7))
    mark = reporter.mark()
    reporter.take()
    reporter.reset()  # the master has a new epoch
    next_seq = reporter.begin_inventory()
    assert next_seq - 1 > mark or next_seq - 1 == mark + 1
    assert reporter.take() is None
    reporter.on_ack(next_seq - 1)
    assert reporter.acked >= mark


def test_an_ack_of_the_future_is_no_ack() -> None:
    reporter = started()
    record(reporter, 1)
    mark = reporter.mark()
    reporter.on_ack(10**9)
    assert reporter.acked < mark


def test_taking_less_than_marks_count_on_is_refused() -> None:
    with pytest.raises(ValueError, match="max_keys"):
        started().take(1)


# --- the master's side --------------------------------------------------------------------------------------------------


def test_an_inbox_wants_an_inventory_first() -> None:
    inbox = Inbox()
    assert inbox.awaiting_inventory and inbox.accept(1) is Accept.IGNORED
    assert not inbox.resume(1)
    assert not inbox.inventory_part(10, first=False, last=True)  # the end of one that never began
    assert inbox.inventory_part(10, first=True, last=False) and inbox.accept(10) is Accept.IGNORED
    assert inbox.inventory_part(10, first=False, last=True)
    assert [inbox.accept(seq) for seq in (10, 11, 11, 10, 12)] == [
        Accept.OK, Accept.OK, Accept.DUPLICATE, Accept.DUPLICATE, Accept.OK,
    ]  # fmt: skip


def test_a_gap_is_told_once_and_ends_with_an_inventory() -> None:
    inbox = Inbox()
    inbox.inventory_part(5, first=True, last=True)
    assert inbox.accept(7) is Accept.GAP and inbox.accept(8) is Accept.IGNORED and inbox.accept(5) is Accept.IGNORED
    assert not inbox.resume(5)
    inbox.inventory_part(9, first=True, last=True)
    assert inbox.accept(9) is Accept.OK


def test_a_stream_resumes_at_what_is_expected_or_before_it() -> None:
    inbox = Inbox()
    inbox.inventory_part(5, first=True, last=True)
    inbox.accept(5)
    assert inbox.resume(6) and inbox.resume(5) and inbox.accept(5) is Accept.DUPLICATE
    assert not inbox.resume(7)
    assert not inbox.resume(6)  # an inventory is wanted until it came


def test_a_new_stream_forgets_half_an_inventory() -> None:
    inbox = Inbox()
    inbox.inventory_part(5, first=True, last=False)
    assert not inbox.resume(5)
    assert not inbox.inventory_part(5, first=False, last=True)
    assert inbox.awaiting_inventory
