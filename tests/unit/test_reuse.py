"""Reuse distances against a brute-force count and against an LRU that is run; what a sample of the ids comes to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from kvpool.sim.reuse import Reuse, mix, reuse_distances
from kvpool.sim.traces import multi_turn
from tests.support.textbook import LruCache, access


def chains_of(seed: int, *, n_conversations: int = 12, n_turns: int = 8) -> list[tuple[int, ...]]:
    workload = multi_turn(seed=seed, n_conversations=n_conversations, n_turns=n_turns, system_blocks=3, turn_blocks=(1, 6))
    return [request.ids for request in workload]


def brute_force(requests: Sequence[Sequence[int]], *, only: int | None = None) -> list[int]:
    """Distances, ascending, of all blocks or one: distinct blocks since the last use, counted one by one."""
    used: list[int] = []
    found = []
    for ids in requests:
        for block in ids:
            if block in used and only in (None, block):
                last = len(used) - 1 - used[::-1].index(block)
                found.append(len(set(used[last + 1 :])))
        used += reversed(ids)
    return sorted(found)


def spread(reuse: Reuse) -> list[int]:
    """The counts of exact distances as a list of these."""
    return [distance for distance, n in enumerate(reuse.counts) for _ in range(int(n))]


@pytest.mark.parametrize("seed", range(4))
def test_exact_distances_are_those_of_a_brute_force_count(seed: int) -> None:
    requests = chains_of(seed)
    reuse = reuse_distances(requests)
    blocks = [block for ids in requests for block in ids]
    assert reuse.step == 1 and spread(reuse) == brute_force(requests)
    assert (reuse.n_uses, reuse.n_blocks) == (len(blocks), len(set(blocks)))
    assert reuse.n_once == sum(blocks.count(block) == 1 for block in set(blocks)) > 0


def test_ids_that_are_no_chains_count_too() -> None:
    chance = random.Random(5)
    requests = [tuple(chance.sample(range(40), chance.randint(0, 9))) for _ in range(120)]
    assert spread(reuse_distances(requests)) == brute_force(requests)


@pytest.mark.parametrize("capacity", [1, 7, 30, 100, 10_000])
def test_uses_at_a_distance_below_a_capacity_are_what_an_lru_of_it_hits(capacity: int) -> None:
    requests = chains_of(9)
    cache = LruCache(capacity)
    assert reuse_distances(requests).lru_hits(capacity) == sum(access(cache, ids) for ids in requests)


def test_bins_are_powers_of_two_and_hold_all_reuses() -> None:
    reuse = Reuse(step=1, n_uses=30, n_blocks=20, n_once=0, counts=(1, 2, 0, 3, 4))
    assert reuse.bins() == [1, 2, 3, 4]  # 0; 1; 2 and 3; 4 to 7
    for requests in (chains_of(1), chains_of(2)):
        exact, sampled = reuse_distances(requests), reuse_distances(requests, ids_max=60)
        assert sum(exact.bins()) == exact.n_reuses == sampled.n_reuses == sum(sampled.bins())


def test_above_the_limit_a_hash_of_the_id_samples_and_counts_of_blocks_stay_exact() -> None:
    requests = chains_of(3, n_conversations=400, n_turns=8)
    exact, sampled = reuse_distances(requests), reuse_distances(requests, ids_max=3000)
    assert (exact.step, sampled.step) == (1, 4)
    assert (sampled.n_uses, sampled.n_blocks, sampled.n_once) == (exact.n_uses, exact.n_blocks, exact.n_once)
    assert sum(sampled.counts) == pytest.approx(exact.n_reuses)
    for capacity in (64, 512, 2048, 8192):
        assert sampled.lru_hits(capacity) / exact.n_uses == pytest.approx(exact.lru_hits(capacity) / exact.n_uses, abs=0.03)
    assert sampled == reuse_distances(requests, ids_max=3000)


def test_a_sample_has_the_distances_of_the_trace_of_its_ids_alone_and_hot_ids_are_all_counted() -> None:
    requests = chains_of(4)
    sampled = reuse_distances(requests, ids_max=100)
    uses = Counter(block for chain in requests for block in chain)
    ids = np.array(sorted(uses), dtype=np.uint64)
    chosen = set(ids[mix(ids) % np.uint64(4) == 0].tolist())
    hot = {block for block, _ in uses.most_common(3)}  # the shared system prompt: nothing else is used as often
    assert sampled.step == 4 and 50 < len(chosen) <= 100 and hot == {0, 1, 2} and hot - chosen

    def distances(counted: int) -> Counter[int]:
        """Of one block, in the trace of the chosen ones and it."""
        kept = [tuple(block for block in chain if block in chosen or block == counted) for chain in requests]
        return Counter(brute_force(kept, only=counted))

    known = sum((distances(block) for block in hot), Counter[int]())
    sample = sum((distances(block) for block in chosen - hot), Counter[int]())
    weight = (sampled.n_reuses - known.total()) / sample.total()
    assert sampled.counts == pytest.approx([known[k] + weight * sample[k] for k in range(len(sampled.counts))])
    assert max(known | sample) == len(sampled.counts) - 1


def test_ids_that_all_are_multiples_are_sampled_alike() -> None:
    ids = [tuple(range(64 * k, 64 * k + 1280, 64)) for k in range(0, 4000, 20)]
    sampled = reuse_distances([*ids, *ids], ids_max=1100)
    assert sampled.step == 4 and sum(sampled.bins()) == 4000


def test_twice_in_one_request_is_once_and_nothing_is_nothing() -> None:
    twice, once = reuse_distances([(1, 2, 1), (1,)]), reuse_distances([(1, 2), (1,)])
    assert twice == once and (once.n_uses, once.n_once, once.counts) == (3, 1, (1,))
    empty = reuse_distances([(), ()])
    assert (empty.n_uses, empty.bins(), empty.lru_hits(10)) == (0, [], 0)
    assert reuse_distances([]).n_blocks == 0
    assert reuse_distances([((1 << 64) - 1,), (0,), ((1 << 64) - 1,)]).counts == (0, 1)
