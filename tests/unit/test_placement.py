"""Where puts go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvpool.core.placement import Candidate, place, share
from kvpool.core.types import WorkerId


def worker(name: str, *, host: str = "", free: int = 100, capacity: int = 100) -> Candidate:
    return Candidate(WorkerId(name), host or name, free, capacity)


def names(chosen: list[Candidate]) -> list[str]:
    return [candidate.worker_id for candidate in chosen]


KEY = b"k" * 34
KEYS = [i.to_bytes(34, "big") for i in range(4000)]


def test_parent_first_then_the_own_host_then_a_draw() -> None:
    pool = [worker("a", host="h1"), worker("b", host="h2"), worker("c", host="h3")]
    for key in KEYS[:50]:
        assert names(place(pool, key=key, parent_workers={WorkerId("c")}, host_id="h1")) == ["c"]
        assert names(place(pool, key=key, host_id="h2")) == ["b"]
    assert {names(place(pool, key=key))[0] for key in KEYS[:50]} == {"a", "b", "c"}
    assert {names(place(pool, key=key, host_id="elsewhere"))[0] for key in KEYS[:50]} == {"a", "b", "c"}


def test_who_would_have_to_evict_comes_last_and_is_still_taken() -> None:
    pool = [worker("full", host="here", free=5), worker("free", free=50)]
    assert names(place(pool, key=KEY, host_id="here", need_bytes=10, n_workers=2)) == ["free", "full"]
    assert names(place(pool, key=KEY, host_id="here", need_bytes=5)) == ["full"]
    assert names(place(pool[:1], key=KEY, need_bytes=10)) == ["full"]
    everybody_full = [replace(c, free_bytes=0) for c in pool]
    assert names(place(everybody_full, key=KEY, parent_workers={WorkerId("full")}, need_bytes=10)) == ["full"]


def test_copies_go_to_different_workers_and_other_hosts_first() -> None:
    pool = [worker("a1", host="a"), worker("a2", host="a"), worker("b1", host="b")]
    for key in KEYS[:50]:
        two = place(pool, key=key, host_id="a", n_workers=2)
        assert two[0].host_id == "a" and two[1].host_id == "b"
        assert sorted(names(place(pool, key=key, n_workers=5))) == ["a1", "a2", "b1"]
    assert place([], key=KEY, n_workers=2) == []


def test_shares_follow_capacity_and_a_worker_that_goes_moves_only_its_own() -> None:
    pool = [worker("small", capacity=100), worker("big", capacity=300), worker("mid", capacity=200)]
    before = {key: names(place(pool, key=key))[0] for key in KEYS}
    shares = Counter(before.values())
    for name, expected in (("small", 1 / 6), ("mid", 2 / 6), ("big", 3 / 6)):
        assert abs(shares[name] / len(KEYS) - expected) < 0.04, shares
    after = {key: names(place(pool[1:], key=key))[0] for key in KEYS}
    assert all(after[key] == before[key] for key in KEYS if before[key] != "small")


def test_the_order_of_the_candidates_does_not_matter() -> None:
    pool = [worker(f"w{i}") for i in range(5)]
    for key in KEYS[:20]:
        assert names(place(pool, key=key, n_workers=3)) == names(place(pool[::-1], key=key, n_workers=3))


def test_a_new_workers_share_grows() -> None:
    assert (share(0), share(5_000), share(10_000), share(1e9)) == (0.1, 0.5, 1.0, 1.0)
    keys = [bytes([i % 256, i // 256]) * 17 for i in range(3_000)]

    def part_of_new(up_ms: float) -> float:
        workers = [Candidate(WorkerId("old"), "h", 100, 100), Candidate(WorkerId("new"), "h", 100, 100, share(up_ms))]
        return sum(place(workers, key=key)[0].worker_id == "new" for key in keys) / len(keys)

    assert part_of_new(0) == pytest.approx(0.1 / 1.1, abs=0.03)
    assert part_of_new(5_000) == pytest.approx(0.5 / 1.5, abs=0.03)
    assert part_of_new(10_000) == pytest.approx(0.5, abs=0.03)
