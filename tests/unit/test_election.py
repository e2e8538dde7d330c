"""The lease as one candidate sees it, and many candidates against a model of the store: pauses, losses, late requests, drifting
clocks, outages, a store that is set back. Never do two owners write under one epoch."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvpool.core.election import Ask, Election, Granted, LeaseTerms, Refused, Renew, Role, Standing, Take
from kvpool.core.types import Epoch
from tests.support.lease_model import TERMS, ModelStore


def elected(*, at_ms: int = 1_000, epoch: int = 7) -> Election:
    election = Election(address="me:1", terms=TERMS)
    ask = election.ask(at_ms)
    assert isinstance(ask, Take) and ask.floor == 0
    election.answer(ask.number, Granted(Epoch(epoch)), at_ms)
    return election


def renewal(election: Election, now_ms: int) -> Renew:
    ask = election.ask(now_ms)
    assert isinstance(ask, Renew)
    return ask


# --- one candidate ------------------------------------------------------------------------------------------------------


def test_a_lease_counts_from_before_the_request_was_sent() -> None:
    election = Election(address="me:1", terms=TERMS)
    ask = election.ask(1_000)
    assert ask is not None
    election.answer(ask.number, Granted(Epoch(1)), 1_490)
    assert election.standing(2_699) == Standing(Role.LEADER, Epoch(1), "me:1")
    assert election.standing(2_700).role is Role.LAPSED


def test_an_answer_that_comes_after_the_lease_makes_no_leader() -> None:
    """The process stood still between sending and reading: the answer is true and too old."""
    election = Election(terms=TERMS)
    ask = election.ask(0)
    assert ask is not None
    election.answer(ask.number, Granted(Epoch(1)), 60_000)
    assert election.standing(60_000).role is Role.LAPSED
    assert isinstance(election.ask(60_000), Renew)


def test_a_leader_renews_in_time_and_survives_failures_within_the_lease() -> None:
    election = elected(at_ms=0)
    assert election.ask(599) is None and election.wait_ms(100) == 500
    first = renewal(election, 600)
    election.failed(first.number, 1_100)
    assert election.standing(1_100).role is Role.LEADER and election.ask(1_349) is None
    second = renewal(election, 1_350)
    assert second.number != first.number and second.epoch == 7
    election.answer(second.number, Granted(Epoch(7)), 1_360)
    assert election.standing(1_350 + 1_699).role is Role.LEADER
    assert election.standing(1_350 + 1_700).role is Role.LAPSED


def test_a_lapsed_leader_goes_on_asking_and_leads_again_with_its_epoch() -> None:
    election = elected(at_ms=0)
    now = 600
    for _ in range(60):  # the store is away for long
        ask = renewal(election, now)
        election.failed(ask.number, now + 500)
        now += 500 + TERMS.poll_ms
    assert election.standing(now) == Standing(Role.LAPSED, Epoch(7), "me:1")
    ask = renewal(election, now)
    election.answer(ask.number, Granted(Epoch(7)), now + 1)
    assert election.standing(now + 1) == Standing(Role.LEADER, Epoch(7), "me:1")


@pytest.mark.parametrize("now_ms", [700, 30_000])
def test_a_leader_steps_down_when_another_took_over(now_ms: int) -> None:
    election = elected(at_ms=0)
    ask = renewal(election, now_ms)
    election.answer(ask.number, Refused(Epoch(8), "other", "other:1", 1_500), now_ms)
    assert election.standing(now_ms) == Standing(Role.FOLLOWER, Epoch(8), "other:1")
    follow = election.ask(now_ms + TERMS.poll_ms)
    assert isinstance(follow, Take) and follow.floor == 8


def test_a_store_that_forgot_everything_gets_no_used_epoch() -> None:
    election = elected(at_ms=0, epoch=41)
    ask = renewal(election, 600)
    election.answer(ask.number, Refused(Epoch(0)), 601)
    assert election.standing(601) == Standing(Role.FOLLOWER, Epoch(41), "")
    again = election.ask(601 + TERMS.poll_ms)
    assert isinstance(again, Take) and again.floor == 41


def test_a_follower_asks_when_the_lease_ends_and_knows_the_leader() -> None:
    election = Election(address="me:1", terms=TERMS)
    ask = election.ask(0)
    assert ask is not None
    election.answer(ask.number, Refused(Epoch(3), "other", "other:1", 40), 10)
    assert election.standing(10) == Standing(Role.FOLLOWER, Epoch(3), "other:1")
    assert election.ask(50) is None and election.wait_ms(10) == 41
    assert isinstance(election.ask(51), Take)


def test_one_request_at_a_time_and_late_answers_change_nothing() -> None:
    election = Election(terms=TERMS)
    first = election.ask(0)
    assert first is not None
    assert election.ask(499) is None and election.wait_ms(100) == 400
    assert election.ask(500) is None  # given up; the next one after a pause
    election.answer(first.number, Granted(Epoch(1)), 501)
    assert election.standing(501).role is Role.FOLLOWER
    second = election.ask(500 + TERMS.poll_ms)
    assert second is not None and second.number > first.number
    election.answer(first.number, Granted(Epoch(1)), 800)
    election.failed(first.number, 800)
    assert election.standing(800).role is Role.FOLLOWER
    election.answer(second.number, Granted(Epoch(2)), 801)
    assert election.standing(801) == Standing(Role.LEADER, Epoch(2), "")


def test_who_resigns_lets_others_come_first() -> None:
    election = elected(at_ms=0)
    election.resign(100)
    assert election.standing(100) == Standing(Role.FOLLOWER, Epoch(7), "")
    assert election.ask(100 + TERMS.ttl_ms - 1) is None
    assert isinstance(election.ask(100 + TERMS.ttl_ms), Take)


def test_a_renewal_under_another_epoch_is_no_answer() -> None:
    election = elected(at_ms=0)
    ask = renewal(election, 600)
    with pytest.raises(ValueError, match="epoch 7"):
        election.answer(ask.number, Granted(Epoch(9)), 601)


@pytest.mark.parametrize("wrong", [{"ttl_ms": 0}, {"poll_ms": -1}, {"renew_ms": 1_200}, {"margin_ms": 900}])
def test_terms_in_which_one_late_renewal_ends_the_lease_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="LeaseTerms"):
        LeaseTerms(**wrong)


# --- many candidates ----------------------------------------------------------------------------------------------------


class Candidate:
    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self.core = Election(address=f"{name}:1", terms=TERMS)
        self.offset_ms = rng.randrange(10**9)
        self.rate = rng.uniform(0.95, 1.05)
        self.paused_until_ms = 0

    def clock(self, now_ms: int) -> int:
        return self.offset_ms + int(now_ms * self.rate)


class World:
    """Candidates, one store and the way between them, from one seed."""

    END_MS = 42_000
    HEALED_MS = 30_000  # from here on nothing fails

    def __init__(self, seed: int, *, set_back: bool) -> None:
        self.rng = random.Random(seed)
        self.store = ModelStore()
        self.candidates = [Candidate(f"c{i}", self.rng) for i in range(self.rng.randint(2, 4))]
        self.now_ms = 0
        self.terms_led: set[tuple[int, str]] = set()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._n = 0
        self._one_leader = not set_back
        for candidate in self.candidates:
            self._at(self.rng.randrange(500), self._awake(candidate, lambda c=candidate: self._step(c)))
            self._at(self.rng.randrange(500), self._awake(candidate, lambda c=candidate: self._act(c)))
        for at in self._times(8):
            self._at(at, self._pause)
        for at in self._times(3):
            self._at(at, self._outage)
        for at in self._times(3) if set_back else ():
            self._at(at, self._set_back)

    def _times(self, n_max: int) -> Iterator[int]:
        return (self.rng.randrange(self.HEALED_MS - 12_000) for _ in range(self.rng.randint(0, n_max)))

    def _at(self, at_ms: int, what: Callable[[], None]) -> None:
        self._n += 1
        heapq.heappush(self._events, (max(at_ms, self.now_ms), self._n, what))

    def _awake(self, candidate: Candidate, what: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if self.now_ms < candidate.paused_until_ms:
                self._at(candidate.paused_until_ms + self.rng.randrange(3), run)
            else:
                what()

        return run

    def _delay(self) -> int | None:
        """None: lost. Some requests come very late."""
        if self.now_ms >= self.HEALED_MS:
            return self.rng.randrange(20)
        kind = self.rng.random()
        if kind < 0.08:
            return None
        return self.rng.randrange(6_000) if kind < 0.16 else self.rng.randrange(60)

    def _step(self, candidate: Candidate) -> None:
        clock = candidate.clock(self.now_ms)
        ask = candidate.core.ask(clock)
        if ask is not None:
            self._send(candidate, ask)
        wait = max(1, int(candidate.core.wait_ms(clock) / candidate.rate) + 1)
        self._at(self.now_ms + min(wait, 300), self._awake(candidate, lambda: self._step(candidate)))

    def _send(self, candidate: Candidate, ask: Ask) -> None:
        there = self._delay()

        def arrive() -> None:
            if not self.store.up:
                return
            reply = self.store.ask(candidate.name, ask, self.now_ms)
            back = self._delay()
            if back is not None:
                self._at(self.now_ms + back, self._awake(candidate, lambda: answered(reply)))

        def answered(reply: Granted | Refused) -> None:
            candidate.core.answer(ask.number, reply, candidate.clock(self.now_ms))

        if there is not None:
            self._at(self.now_ms + there, arrive)

    def _act(self, candidate: Candidate) -> None:
        """Looks whether it leads, then writes: between the two anything may happen."""
        standing = candidate.core.standing(candidate.clock(self.now_ms))
        if standing.role is Role.LEADER:
            self.terms_led.add((standing.epoch, candidate.name))
        if standing.role is not Role.FOLLOWER:  # LAPSED too: the fence alone must hold
            there = self._delay()
            if there is not None:
                self._at(self.now_ms + there, lambda: self.store.up and self.store.write(candidate.name, standing.epoch))
        self._at(self.now_ms + self.rng.randrange(1, 200), self._awake(candidate, lambda: self._act(candidate)))

    def _pause(self) -> None:
        candidate = self.rng.choice(self.candidates)
        candidate.paused_until_ms = self.now_ms + self.rng.randrange(10_000)

    def _outage(self) -> None:
        self.store.up = False

        def back() -> None:
            self.store.up = True

        self._at(self.now_ms + self.rng.randrange(10_000), back)

    def _set_back(self) -> None:
        self._at(self.now_ms + self.rng.randrange(5_000), self.store.snapshot())

    def leaders(self) -> list[Candidate]:
        return [c for c in self.candidates if c.core.standing(c.clock(self.now_ms)).role is Role.LEADER]

    def run(self) -> None:
        while self._events and self._events[0][0] <= self.END_MS:
            self.now_ms, _, what = heapq.heappop(self._events)
            what()
            if self._one_leader:
                names = [c.name for c in self.leaders()]
                assert len(names) <= 1, f"{names} lead at {self.now_ms} ms"


def judge(world: World) -> None:
    by_epoch: dict[int, set[str]] = {}
    for epoch, owner in world.store.accepted:
        by_epoch.setdefault(epoch, set()).add(owner)
    assert all(len(owners) == 1 for owners in by_epoch.values()), by_epoch
    epochs = [epoch for epoch, _ in world.store.accepted]
    assert epochs == sorted(epochs), "a write of an old epoch came after one of a newer epoch"
    (leader,) = world.leaders()
    for candidate in world.candidates:
        standing = candidate.core.standing(candidate.clock(world.now_ms))
        assert standing.leader == f"{leader.name}:1" and standing.epoch == world.store.epoch, candidate.name
    assert epochs[-1] == world.store.epoch


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=0)
def test_never_two_leaders_write_in_one_epoch_nor_lead_at_one_time(seed: int) -> None:
    world = World(seed, set_back=False)
    world.run()
    judge(world)
    epochs = [epoch for epoch, _ in world.terms_led]
    assert len(epochs) == len(set(epochs)), "one epoch was led by two"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1))
def test_a_store_that_is_set_back_keeps_the_writes_of_one_owner_an_epoch(seed: int) -> None:
    world = World(seed, set_back=True)
    world.run()
    judge(world)


def test_the_random_worlds_have_take_overs() -> None:
    """So that the two tests above mean something."""
    n_epochs = []
    for seed in range(30):
        world = World(seed, set_back=False)
        world.run()
        n_epochs.append(len(world.terms_led))
    assert sum(n_epochs) > 60 and max(n_epochs) >= 4, n_epochs


def test_a_dead_leader_is_followed_within_three_seconds() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        store, standby = ModelStore(), Election(address="b:1", terms=TERMS)
        died_ms = rng.randrange(5_000)
        granted = store.ask("a", Take(1, Epoch(0)), died_ms)
        assert isinstance(granted, Granted)
        now = died_ms - rng.randrange(TERMS.poll_ms) if died_ms > TERMS.poll_ms else died_ms
        while True:
            ask = standby.ask(now)
            if ask is not None:
                standby.answer(ask.number, store.ask("b", ask, now), now + 5)
            if standby.standing(now).role is Role.LEADER:
                break
            now += max(1, standby.wait_ms(now))
        assert now - died_ms < 3_000 - TERMS.reply_ms
