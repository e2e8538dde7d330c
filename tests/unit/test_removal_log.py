"""A log of removals that a store gave back: whole, trimmed, with a gap, or behind its own numbers."""

from __future__ import annotations

from kvpool.core.removals import Missed, Removal, RemovalLog

KEYS = [bytes([i]) * 34 for i in range(10)]


def log_of(*seqs: int, seq: int) -> RemovalLog:
    return RemovalLog.of([Removal(s, KEYS[s]) for s in seqs], keys_max=100, seq=seq)


def test_a_whole_log_says_what_was_missed() -> None:
    log = log_of(3, 4, 5, seq=5)
    assert log.seq == 5 and [entry.seq for entry in log.entries] == [3, 4, 5]
    assert log.missed(5) is None and log.missed(3) == Missed(KEYS[4] + KEYS[5])
    assert log.missed(1) == Missed(drop_blocks=True)


def test_none_at_all() -> None:
    log = log_of(seq=0)
    assert log.seq == 0 and log.missed(0) is None
    log.append(Removal(1, KEYS[1]))
    assert log.missed(0) == Missed(KEYS[1])


def test_after_a_gap_nobody_is_told_less_than_was_removed() -> None:
    log = log_of(1, 2, 5, 6, seq=6)
    assert log.seq == 6
    for applied in (0, 1, 2, 3):
        assert log.missed(applied) == Missed(drop_blocks=True), applied
    assert log.missed(4) == Missed(KEYS[5] + KEYS[6]) and log.missed(6) is None


def test_a_log_that_ends_before_the_newest_number_gives_that_number_out_no_more() -> None:
    log = log_of(1, 2, seq=4)
    assert log.seq == 4 and log.missed(4) is None
    for applied in range(4):
        assert log.missed(applied) == Missed(drop_blocks=True), applied
    log.append(Removal(5, KEYS[5]))
    assert log.missed(4) == Missed(KEYS[5])
