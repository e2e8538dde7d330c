"""The rules of a drain: order, batches, speed, room, time to go."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from kvpool.core.drain import BATCH_BLOCKS, BATCH_BYTES, Pace, Phase, Progress, Rooms, batch_of, batched, chains, parent_key
from kvpool.core.types import NO_PARENT, NamespaceUid

NS, OTHER = NamespaceUid(b"n" * 16), NamespaceUid(b"o" * 16)


@dataclass(frozen=True, eq=False)
class Item:
    ns: NamespaceUid
    key: bytes
    parent: bytes
    depth: int
    size: int
    used: int


def hash_of(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def chain(name: str, n: int, *, used: int, size: int = 10, start: int = 0, ns: NamespaceUid = NS, shard: int = 0,
          above: bytes = NO_PARENT) -> list[Item]:  # fmt: skip
    items: list[Item] = []
    for i in range(start, start + n):
        parent = items[-1].key[:32] if items else above
        items.append(Item(ns, hash_of(f"{name}{i}") + shard.to_bytes(2, "little"), parent, i, size, used))
    return items


def order(items: list[Item]) -> list[list[Item]]:
    return list(chains(items, lambda item: item.used))


def test_the_hottest_chain_goes_first_and_whole_with_its_head_first() -> None:
    cold, hot, warm = chain("c", 5, used=1), chain("h", 4, used=9), chain("w", 3, used=5)
    mixed = [*cold, *hot, *warm]
    random.Random(1).shuffle(mixed)
    assert order(mixed) == [hot, warm, cold]


def test_a_hot_tail_takes_its_cold_head_along() -> None:
    head, tail = chain("x", 3, used=1), chain("x", 3, used=9, start=3, above=hash_of("x2"))
    other = chain("o", 2, used=5)
    assert order([*other, *tail, *head]) == [[*head, *tail], other]


def test_at_a_fork_the_hotter_branch_stays_with_the_head() -> None:
    trunk = chain("t", 2, used=9)
    left = chain("l", 2, used=3, start=2, above=hash_of("t1"))
    right = chain("r", 2, used=9, start=2, above=hash_of("t1"))
    assert order([*left, *trunk, *right]) == [[*trunk, *right], left]


def test_shards_and_namespaces_are_chains_of_their_own_and_a_gap_cuts_one() -> None:
    zero, one = chain("s", 3, used=4, shard=0), chain("s", 3, used=3, shard=1)
    elsewhere = chain("s", 3, used=2, ns=OTHER)
    assert order([*elsewhere, *one, *zero]) == [zero, one, elsewhere]
    gapped = chain("g", 5, used=1)
    del gapped[2]
    assert order(gapped) == [gapped[:2], gapped[2:]]


@pytest.mark.parametrize("seed", range(20))
def test_every_block_once_and_never_before_a_parent_that_is_there(seed: int) -> None:
    rng = random.Random(seed)
    items: list[Item] = []
    for i in range(200):
        above = rng.choice(items) if items and rng.random() < 0.8 else None
        parent, depth = (above.key[:32], above.depth + 1) if above else (NO_PARENT, 0)
        items.append(Item(NS, hash_of(f"i{i}") + b"\0\0", parent, depth, 10, rng.randrange(50)))
    rng.shuffle(items)
    runs = order(items)
    flat = [item for run in runs for item in run]
    assert sorted(map(id, flat)) == sorted(map(id, items))
    at = {item.key: i for i, item in enumerate(flat)}
    for item in items:
        above_key = parent_key(item)
        if above_key is not None:
            assert at[above_key] < at[item.key]
    for run in runs:
        assert all(parent_key(b) == a.key and b.depth == a.depth + 1 for a, b in itertools.pairwise(run))
    for run in batched(runs, bytes_max=35):
        batch = batch_of(run)
        assert batch.split() == [item.key for item in run] and (sum(item.size for item in run) <= 35)
        if batch.chained:
            assert (batch.parent, batch.depth) == (run[0].parent, run[0].depth)
        else:
            assert all(item.depth == 0 and item.parent == NO_PARENT for item in run)


def test_batches_have_bounds_and_put_lone_blocks_together() -> None:
    long = chain("l", 7, used=1, size=40)
    assert [len(part) for part in batched([long], bytes_max=100)] == [2, 2, 2, 1]
    assert [len(part) for part in batched([long], bytes_max=10)] == [1] * 7  # a block goes, however large
    lone = [chain(f"a{i}-", 1, used=i)[0] for i in range(6)]
    apart = [[block] for block in lone]
    assert list(batched([*apart, long[:2]], bytes_max=1000)) == [lone, long[:2]]
    assert batch_of(lone).chained is False and batch_of(long[:2]).chained is True
    other = chain("z", 1, used=0, ns=OTHER)
    assert list(batched([*apart, other], bytes_max=1000)) == [lone, other]
    many = [chain(f"m{i}-", 1, used=0, size=1) for i in range(BATCH_BLOCKS + 1)]
    assert [len(part) for part in batched(many)] == [BATCH_BLOCKS, 1]
    below = chain("b", 2, used=0, start=3, above=hash_of("gone"))
    assert batch_of(below).parent == hash_of("gone") and batch_of(below[:1]).depth == 3 and batch_of(below[:1]).chained


def test_pace_keeps_the_rate_and_does_not_save_up() -> None:
    free = Pace()
    free.sent(1 << 40, 0.0)
    assert free.wait_ms(0.0) == 0 and free.batch_bytes == BATCH_BYTES
    pace = Pace(1000)
    assert pace.wait_ms(0.0) == 0 and pace.batch_bytes == 125
    now = 0.0
    for _ in range(20):
        now += pace.wait_ms(now)
        pace.sent(125, now)
    assert now == pytest.approx(19 * 125)
    now += 60_000
    assert pace.wait_ms(now) == 0
    pace.sent(125, now)
    assert pace.wait_ms(now) == pytest.approx(125)
    assert Pace(3).batch_bytes == 1


def test_room_is_what_was_told_less_what_went_there_since() -> None:
    rooms = Rooms()
    rooms.told({"a": (1000, 6400), "b": (50, 6400)}, now_ms=0)
    assert (rooms.of("a"), rooms.of("b"), rooms.of("nobody")) == (900, 0, 0)  # a 64th is left to them
    rooms.sent("a", 300, now_ms=100)
    assert rooms.of("a") == 600
    rooms.told({"a": (1000, 6400)}, now_ms=600)  # told before it had those
    assert rooms.of("a") == 600 and rooms.names() == ["a"]
    rooms.told({"a": (700, 6400)}, now_ms=2000)
    assert rooms.of("a") == 600
    rooms.full("a")
    assert rooms.of("a") == 0


def test_progress_and_time_to_go() -> None:
    progress = Progress()
    assert progress.eta_ms(rate_bytes=0, now_ms=0) == 0
    progress.begin(100, 1000, now_ms=1000)
    assert progress.phase is Phase.MOVING and progress.eta_ms(rate_bytes=0, now_ms=1000) == 0  # not known yet
    assert progress.eta_ms(rate_bytes=100, now_ms=1000) == 10_001
    progress.moved(20, 200)
    assert (progress.blocks_left, progress.bytes_left) == (80, 800)
    assert progress.eta_ms(rate_bytes=0, now_ms=2000) == 4001  # 200 bytes a second
    assert progress.eta_ms(rate_bytes=100, now_ms=2000) == 8001
    progress.left(10, 100)
    assert (progress.blocks_moved, progress.blocks_left) == (20, 70)
    progress.end(Phase.STUCK, "no room", now_ms=2000)
    assert progress.reason == "no room" and progress.eta_ms(rate_bytes=0, now_ms=9000) == 0
    progress.begin(70, 700, now_ms=10_000)  # the time without moving does not count
    assert progress.eta_ms(rate_bytes=0, now_ms=10_000) == 3501 and progress.reason == ""
    progress.end(Phase.DONE, now_ms=11_000)
    assert (progress.blocks_left, progress.bytes_left, progress.eta_ms(rate_bytes=0, now_ms=11_000)) == (0, 0, 0)
