"""The read plan, what comes after a failure, and the breaker: pure decisions."""

from __future__ import annotations

import random

import pytest

from kvpool.core.fetch import (
    FAILURES_MAX,
    OPEN_MS_MAX,
    OPEN_MS_MIN,
    PROBE_MS,
    REMOTE_COST,
    SUSPECT_COST,
    Breaker,
    BreakerState,
    Candidates,
    Fetch,
    Read,
    attempt_ms,
    transfer_ms,
)
from kvpool.core.types import BlockCode, MissCause, Tiers, miss_code

DRAM, SSD = int(Tiers.DRAM), int(Tiers.SSD)
HIT = int(BlockCode.HIT_SHARED)
LOST = MissCause.WORKER_LOST


def free(_peer: int) -> int:
    return 0


def located(*places: dict[int, int]) -> Fetch:
    fetch = Fetch(len(places))
    fetch.locate(0, [tuple(place.items()) for place in places])
    return fetch


def hits(fetch: Fetch, read: Read, tiers: int = DRAM) -> list[int]:
    n = len(read.blocks)
    return fetch.answered(read, bytes([HIT]) * n, bytes([tiers]) * n, [7] * n)


def blocks(reads: list[Read]) -> dict[int, list[int]]:
    return {read.peer: list(read.blocks) for read in reads}


def test_one_peer_with_everything_is_one_read() -> None:
    fetch = located(*[{5: DRAM}] * 64)
    (read,) = fetch.plan(free)
    assert (read.peer, read.blocks, read.alternatives) == (5, range(64), False)
    assert hits(fetch, read) == []
    assert fetch.n_leading == 64
    assert fetch.peer_of == [5] * 64
    assert fetch.sizes == [7] * 64
    assert fetch.plan(free) == []
    assert fetch.why() is None


def test_one_read_a_peer_and_runs_stay_together() -> None:
    fetch = located({1: DRAM}, {1: DRAM, 2: DRAM}, {2: DRAM}, {2: DRAM, 1: DRAM}, {1: DRAM})
    assert blocks(fetch.plan(free)) == {1: [0, 1, 4], 2: [2, 3]}


def test_the_own_host_first_then_memory_then_others_and_suspects_last() -> None:
    prices = {1: REMOTE_COST, 2: 0, 3: SUSPECT_COST}
    assert blocks(located({1: DRAM, 2: DRAM, 3: DRAM}).plan(prices.__getitem__)) == {2: [0]}
    assert blocks(located({1: DRAM, 2: SSD}).plan(prices.__getitem__)) == {2: [0]}  # SSD here before memory elsewhere
    assert blocks(located({1: SSD, 4: DRAM}).plan(lambda peer: REMOTE_COST)) == {4: [0]}
    assert blocks(located({3: DRAM, 1: SSD}).plan(prices.__getitem__)) == {1: [0]}


def test_nothing_past_a_block_that_nobody_can_serve_is_asked_for() -> None:
    fetch = located({1: DRAM}, {}, {1: DRAM})
    assert blocks(fetch.plan(free)) == {1: [0]}


def test_a_peer_that_cannot_be_used_is_not_asked_and_says_why() -> None:
    fetch = located({1: DRAM}, {2: DRAM})

    def cost(peer: int) -> int | MissCause:
        return MissCause.TIMEOUT if peer == 2 else 0

    (read,) = fetch.plan(cost)
    hits(fetch, read)
    assert fetch.plan(cost) == []
    assert (fetch.n_leading, fetch.why()) == (1, (MissCause.TIMEOUT, 2))


def test_all_the_same_but_the_peer_cannot_be_used() -> None:
    fetch = located({1: DRAM}, {1: DRAM})
    assert fetch.plan(lambda peer: LOST) == []
    assert fetch.why() == (LOST, 1)


def test_a_dead_peer_sends_its_blocks_to_another_replica() -> None:
    fetch = located(*[{1: DRAM, 2: DRAM}] * 4)
    (read,) = fetch.plan(free)
    assert (read.peer, read.alternatives) == (1, True)
    fetch.failed(read, LOST)
    (again,) = fetch.plan(free)
    assert (again.peer, list(again.blocks), again.alternatives) == (2, [0, 1, 2, 3], False)
    hits(fetch, again)
    assert fetch.n_leading == 4


def test_a_stale_block_is_tried_elsewhere_and_what_followed_it_is_asked_again() -> None:
    fetch = located({1: DRAM}, {1: DRAM, 2: DRAM}, {1: DRAM})
    (read,) = fetch.plan(free)
    codes = bytes([HIT, miss_code(MissCause.EVICTED), BlockCode.LATER])
    assert fetch.answered(read, codes, bytes([DRAM, 0, 0]), [7, 0, 0]) == [1]
    assert fetch.n_leading == 1
    assert blocks(fetch.plan(free)) == {2: [1], 1: [2]}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (MissCause.EVICTED, MissCause.EVICTED),
        (MissCause.REMOVED, MissCause.REMOVED),
        (MissCause.CORRUPT, MissCause.CORRUPT),
        (MissCause.NEVER_STORED, MissCause.STALE_INDEX),
        (MissCause.UNKNOWN, MissCause.STALE_INDEX),
        (MissCause.TIMEOUT, MissCause.TIMEOUT),
    ],
)
def test_what_the_only_peer_said_is_the_cause(said: MissCause, told: MissCause) -> None:
    fetch = located({1: DRAM})
    (read,) = fetch.plan(free)
    fetch.answered(read, bytes([miss_code(said)]), b"\0", [0])
    assert fetch.plan(free) == []
    assert fetch.why() == (told, 1)


def test_of_several_causes_the_most_telling_one_is_told() -> None:
    fetch = located({1: DRAM, 2: DRAM, 3: DRAM})
    for peer, cause in ((1, MissCause.EVICTED), (2, LOST), (3, MissCause.STALE_INDEX)):
        fetch.failed(Read(peer, range(1)), cause)
    assert fetch.plan(free) == []
    assert fetch.why() == (LOST, 2)


def test_a_buffer_that_does_not_fit_ends_the_prefix_without_another_try() -> None:
    fetch = located(*[{1: DRAM, 2: DRAM}] * 3)
    (read,) = fetch.plan(free)
    fetch.answered(read, bytes([HIT, BlockCode.REJECTED, HIT]), bytes([DRAM] * 3), [7, 9, 7])
    assert (fetch.n_leading, fetch.refused) == (1, 1)
    assert fetch.plan(free) == []


def test_the_tail_comes_later() -> None:
    fetch = Fetch(4)
    fetch.locate(0, [((1, DRAM),)] * 2)
    (head,) = fetch.plan(free)
    hits(fetch, head)
    assert fetch.plan(free) == []
    fetch.locate(2, [((2, SSD),)] * 2)
    (tail,) = fetch.plan(free)
    assert (tail.peer, list(tail.blocks)) == (2, [2, 3])
    hits(fetch, tail, SSD)
    assert fetch.n_leading == 4
    assert fetch.tiers == bytes([DRAM, DRAM, SSD, SSD])


def test_new_places_do_not_bring_back_a_peer_that_failed() -> None:
    fetch = located({1: DRAM})
    (read,) = fetch.plan(free)
    fetch.failed(read, LOST)
    fetch.locate(0, [((1, DRAM),)])
    assert fetch.plan(free) == []
    fetch.locate(0, [((1, DRAM), (9, DRAM))])
    assert blocks(fetch.plan(free)) == {9: [0]}


def test_an_answer_that_only_says_later_makes_progress_all_the_same() -> None:
    fetch = located({1: DRAM}, {1: DRAM})
    for _ in range(2):
        reads = fetch.plan(free)
        if reads:
            fetch.answered(reads[0], bytes([BlockCode.LATER] * 2), bytes(2), [0, 0])
    assert fetch.plan(free) == []


def test_against_a_model_any_failures_give_the_longest_prefix_that_anyone_could_serve() -> None:
    """Each peer really has some of what the index says; dead peers never answer. All of the prefix must be found."""
    for seed in range(300):
        chance = random.Random(seed)
        n, peers = chance.randint(1, 12), range(1, chance.randint(2, 5))
        dead = {peer for peer in peers if chance.random() < 0.3}
        index: list[Candidates] = []
        truth: list[set[int]] = []
        for _ in range(n):
            named = [peer for peer in peers if chance.random() < 0.7]
            index.append(tuple((peer, chance.choice((DRAM, SSD, DRAM | SSD))) for peer in named))
            truth.append({peer for peer in named if peer not in dead and chance.random() < 0.8})
        fetch = Fetch(n)
        fetch.locate(0, index)
        for _ in range(n * len(peers) + n + 1):
            reads = fetch.plan(lambda peer: peer)
            if not reads:
                break
            for read in reads:
                if read.peer in dead:
                    fetch.failed(read, LOST)
                    continue
                codes, missed = bytearray(), False
                for index_of in read.blocks:
                    there = read.peer in truth[index_of]
                    codes.append(BlockCode.LATER if missed else HIT if there else miss_code(MissCause.EVICTED))
                    missed = missed or not there
                fetch.answered(read, bytes(codes), bytes([DRAM]) * len(codes), [1] * len(codes))
        want = next((i for i in range(n) if not truth[i]), n)
        assert fetch.n_leading == want, f"seed {seed}"
        assert all(fetch.peer_of[i] in truth[i] for i in range(want)), f"seed {seed}"
        if want < n and index[want]:
            assert fetch.why() is not None, f"seed {seed}"


# --- time and breaker ----------------------------------------------------------------------------------------------------


def test_default_deadline_grows_with_the_bytes() -> None:
    assert transfer_ms(0) == 2000
    assert transfer_ms(100_000_000) == 3000


def test_a_peer_gets_half_of_the_time_when_another_could_serve() -> None:
    assert attempt_ms(1000, alternatives=False, probing=False) == 1000
    assert attempt_ms(1000, alternatives=True, probing=False) == 500
    assert attempt_ms(10_000, alternatives=False, probing=True) == PROBE_MS
    assert attempt_ms(10, alternatives=False, probing=True) == 10


def test_the_breaker_opens_after_failures_in_a_row_and_closes_with_a_probe() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_MAX - 1):
        assert not breaker.begin(0)
        breaker.failed(0, MissCause.TIMEOUT)
    breaker.succeeded()
    for _ in range(FAILURES_MAX):
        assert breaker.usable(0)
        breaker.failed(0, MissCause.TIMEOUT)
    assert (breaker.state, breaker.cause) == (BreakerState.OPEN, MissCause.TIMEOUT)
    assert not breaker.usable(OPEN_MS_MIN - 1)
    assert breaker.usable(OPEN_MS_MIN)
    assert breaker.begin(OPEN_MS_MIN)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.usable(OPEN_MS_MIN + 1), "one probe at a time"
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.usable(0)


def test_failed_probes_make_the_pause_longer_up_to_a_limit() -> None:
    breaker, now = Breaker(), 0.0
    for _ in range(FAILURES_MAX):
        breaker.failed(now, LOST)
    pauses = []
    for _ in range(8):
        pauses.append(breaker.retry_at_ms - now)
        now = breaker.retry_at_ms
        assert breaker.begin(now)
        breaker.failed(now, LOST)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (OPEN_MS_MIN, OPEN_MS_MAX)


def test_a_probe_that_never_ended_does_not_lock_the_peer_out() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_MAX):
        breaker.failed(0, LOST)
    assert breaker.begin(OPEN_MS_MIN)
    assert breaker.usable(3 * OPEN_MS_MIN)


def test_a_peer_that_lost_its_part_of_a_chain_is_found_out_in_one_round() -> None:
    """The index is behind: peer 1 has evicted all of a chain that peer 2 has too, and says so block by block."""
    n, miss = 24, bytes([miss_code(MissCause.EVICTED)])
    fetch = Fetch(n)
    fetch.locate(0, [((1, DRAM), (2, DRAM))] * n)
    rounds = 0
    while reads := fetch.plan(lambda peer: 0):
        rounds += 1
        for read in reads:
            k = len(read.blocks)
            if read.peer == 1:
                fetch.answered(read, miss + bytes([BlockCode.LATER]) * (k - 1), bytes(k), [0] * k)
            else:
                fetch.answered(read, bytes([BlockCode.HIT_INLINE]) * k, bytes([DRAM]) * k, [1] * k)
    assert fetch.n_leading == n and rounds == 2
