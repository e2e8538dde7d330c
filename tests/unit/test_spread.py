"""Which blocks are worth another copy."""

from __future__ import annotations

import random
import threading

import pytest

from kvpool.core.keys import KeyBatch
from kvpool.core.spread import (
    ASKED_FOR_MS,
    HALVE_AFTER,
    WINDOW_MS,
    Asked,
    Frequency,
    LinkLoad,
    RemoteReads,
    missing_copies,
    runs,
)
from kvpool.core.types import KEY_BYTES, NamespaceUid

UID = NamespaceUid(bytes(16))
MB = 1_000_000


def keys(n: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(n * KEY_BYTES)


def batch(n: int, seed: int = 0) -> KeyBatch:
    return KeyBatch(UID, keys(n, seed))


def test_counts_are_never_too_low_and_seldom_too_high() -> None:
    counts, hot = Frequency(), keys(100, 1)
    for _ in range(5):
        last = counts.note(hot)
    assert (last == 5).all()
    noise = [int(counts.note(keys(500, seed)).max()) for seed in range(2, 42)]
    assert max(noise) <= 2
    assert (counts.note(hot) >= 6).all()


def test_what_is_not_used_any_more_is_forgotten() -> None:
    counts, hot = Frequency(), keys(10, 1)
    for _ in range(8):
        counts.note(hot)
    for seed in range(2, 2 + 4 * HALVE_AFTER // 10_000):
        counts.note(keys(10_000, seed))
    assert int(counts.note(hot).min()) < 8


def test_a_block_is_asked_for_once_after_enough_reads() -> None:
    reads, one = RemoteReads(copy_after=3), batch(8)
    assert reads.read(one, now_ms=0) == [] == reads.read(one, now_ms=1)
    assert [part.keys for part in reads.read(one, now_ms=2)] == [one.keys]
    assert reads.read(one, now_ms=3) == []
    assert [part.keys for part in reads.read(one, now_ms=2 + ASKED_FOR_MS)] == [one.keys]  # it did not come, or has gone again


def test_only_the_shared_head_of_a_chain_is_worth_a_copy() -> None:
    reads, head = RemoteReads(copy_after=3), batch(4)
    wanted = []
    for turn in range(3):
        whole = KeyBatch(UID, head.keys + keys(6, 10 + turn))
        wanted += reads.read(whole, now_ms=turn)
    assert [(part.keys, part.depth) for part in wanted] == [(head.keys, 0)]


def test_runs() -> None:
    assert runs([]) == [] and runs([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 6), (7, 9)]


def test_what_was_asked_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.core.spread.ASKED_MAX", 10)
    asked = Asked()
    first = batch(1, 1).split()
    assert asked.fresh(UID, first, now_ms=0) == [True]
    assert asked.fresh(UID, batch(10, 2).split(), now_ms=0) == [True] * 10
    assert asked.fresh(UID, first, now_ms=0) == [True]  # pushed out
    assert asked.fresh(UID, first, now_ms=0) == [False]


def test_a_link_is_hot_above_its_part_and_says_what_makes_it_so() -> None:
    load = LinkLoad(link_bytes_per_s=100 * MB, hot_at=0.6)
    hot, other = batch(4, 1), batch(4, 2)
    for at in range(0, 1000, 10):
        load.served(hot, MB, now_ms=at)
    assert load.hottest(now_ms=1000) == []  # 100 MB of 120 in two seconds
    for at in range(1000, 2000, 10):
        load.served(hot if at % 20 else other, MB, now_ms=at)
    found = load.hottest(now_ms=2000)
    assert [part.keys for part in found] == [hot.keys]
    assert load.total_bytes == 200 * MB
    assert load.hottest(now_ms=2000 + WINDOW_MS) == []


def test_more_reads_than_are_remembered_still_show_a_hot_link() -> None:
    load, hot = LinkLoad(link_bytes_per_s=100 * MB, hot_at=0.6), batch(4, 1)
    for at in range(2000):
        load.served(hot, MB // 10, now_ms=at)
    assert [part.keys for part in load.hottest(now_ms=2000)] == [hot.keys]


@pytest.mark.parametrize(("me", "holders", "replicas", "n"), [
    ("a", [], 2, 1), ("a", ["b"], 2, 0), ("a", ["b"], 3, 1), ("b", ["a"], 3, 0), ("a", [], 3, 2), ("a", [], 1, 0),
])  # fmt: skip
def test_one_of_those_who_have_a_block_makes_the_missing_copies(me: str, holders: list[str], replicas: int, n: int) -> None:
    assert missing_copies(me, holders, replicas=replicas) == n


def test_reads_are_told_by_several_threads_while_the_hottest_are_asked_for() -> None:
    load, over = LinkLoad(link_bytes_per_s=100 * MB, hot_at=0.6), threading.Event()
    told = [0, 0]

    def serve(who: int) -> None:
        one = batch(1, who)
        while not over.is_set():
            load.served(one, MB, now_ms=1000)
            told[who] += 1

    threads = [threading.Thread(target=serve, args=(who,)) for who in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2000):
            assert len(load.hottest(now_ms=1000)) <= 2
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert load.total_bytes == sum(told) * MB
