"""Which master is asked next: rounds, hints, circles, epochs of the past."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.leaders import EPOCH_MEMORY_S, HINTS_MAX, LeaderSearch


def test_all_are_tried_before_a_round_ends_and_the_next_begins_elsewhere() -> None:
    search = LeaderSearch(["a:1", "b:1", "c:1", "a:1"])
    tried = []
    for last in (False, False, True):
        tried.append(search.current)
        assert search.failed() is last
    assert tried == ["a:1", "b:1", "c:1"] and search.current == "a:1"


def test_a_hint_is_followed_at_once_and_those_left_out_come_after_it() -> None:
    search = LeaderSearch(["a:1", "b:1", "c:1"])
    assert not search.failed("c:1") and search.current == "c:1"
    assert not search.failed() and search.current == "b:1"
    assert search.failed()


def test_two_that_name_each_other_lead_nobody_in_a_circle() -> None:
    search = LeaderSearch(["a:1", "b:1"])
    assert not search.failed("b:1") and search.current == "b:1"
    assert search.failed("a:1")


def test_a_hint_beyond_the_configured_is_followed() -> None:
    search = LeaderSearch(["a:1"])
    assert not search.several
    assert not search.failed("z:1") and search.current == "z:1" and search.several
    assert search.failed("a:1") and search.current == "a:1"


@given(st.permutations("abc"), st.lists(st.text("abcxyz", max_size=2), max_size=60))
def test_every_round_ends_and_has_tried_all_that_are_configured(names: list[str], hints: list[str]) -> None:
    search = LeaderSearch(names)
    tried: list[str] = []
    for hint in hints:
        tried.append(search.current)
        if search.failed(hint):
            assert set(names) <= set(tried) and len(tried) == len(set(tried)) <= len(names) * 2 + HINTS_MAX
            tried = []


def test_a_leader_of_the_past_is_refused() -> None:
    search = LeaderSearch(["a:1", "b:1"])
    assert search.accepts(7, now_s=0.0)
    assert not search.accepts(6, now_s=1.0)
    assert search.accepts(7, now_s=2.0) and search.accepts(9, now_s=3.0)
    assert not search.accepts(8, now_s=4.0)


def test_a_store_that_was_emptied_does_not_shut_out_for_ever() -> None:
    search = LeaderSearch(["a:1", "b:1"])
    assert search.accepts(7, now_s=0.0)
    assert search.accepts(1, now_s=EPOCH_MEMORY_S) and search.accepts(2, now_s=EPOCH_MEMORY_S)


def test_one_master_alone_is_believed() -> None:
    search = LeaderSearch(["a:1"])
    assert search.accepts(7, now_s=0.0) and search.accepts(1, now_s=0.0)
