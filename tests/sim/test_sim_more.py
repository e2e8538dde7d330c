"""The simulation finds what is broken on purpose in views, puts in parts, namespaces that come and go, sizes and drains."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.client.views import Keeper
from kvpool.core.holding import Holding
from kvpool.core.holds import Holds
from kvpool.core.types import NamespaceUid
from kvpool.master.redis_store import RedisStore
from kvpool.master.session import Sessions
from kvpool.master.state import MasterState
from kvpool.sim.puts import Held, Layers
from kvpool.sim.run import run
from kvpool.sim.scenario import Scenario
from kvpool.worker.elsewhere import Elsewhere
from kvpool.worker.node import Node
from tests.sim.finding import found, rough

HEADROOM = {"dram_blocks": 64, "ssd_blocks": 0, "replicas": 1, "n_chains": 6, "chain_blocks": 8}


def test_the_runs_meet_these_too() -> None:
    counts: dict[str, int] = {}
    for seed in range(400, 425):
        for name, n in run(seed).counts.items():
            counts[name] = counts.get(name, 0) + n
    wanted = ("viewed", "create", "namespace deleted", "get of no namespace", "put in parts", "moved", "drained")
    assert not [name for name in wanted if counts.get(name, 0) < 3], counts


# --- views ----------------------------------------------------------------------------------------------------------------------


def viewers(seed: int) -> Scenario:
    """Small memory, clients beside the workers, which stand still for longer than a view is promised."""
    return rough(seed, "client blink", dram_blocks=16, ssd_blocks=0, n_clients=3, n_workers=1, replicas=1, n_chains=4,
                 chain_blocks=6, all_local=True, favours="view")  # fmt: skip


def test_views_are_lost_and_noticed() -> None:
    counts: dict[str, int] = {}
    for seed in range(12):
        outcome = run(seed, scenario=viewers(seed))
        assert not outcome.failed, "\n".join(outcome.words())
        for name, n in outcome.counts.items():
            counts[name] = counts.get(name, 0) + n
    assert counts["viewed"] > 100 and counts["view lost"] >= 1, counts


def test_it_finds_a_view_that_is_left_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """C4: what was seen may have been another block's."""
    end = Keeper.end

    def trusting(self: Keeper, view: Any, parts: Any) -> list[str]:
        end(self, view, parts)
        return []

    monkeypatch.setattr(Keeper, "end", trusting)
    found("C4", viewers)


def test_it_finds_views_that_end_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """C4: no quarantine: an overdue view's slots are given away, and its renewal is answered as if it lived."""
    due = Holds.due

    def ended(self: Holds, now_ms: int) -> Any:
        for hold in self._by_id.values():
            hold.view = False
        return due(self, now_ms)

    monkeypatch.setattr(Holds, "due", ended)
    monkeypatch.setattr(Holding, "renew", lambda self, ids, ttl_ms, now_ms: bytes([1]) * len(ids))
    found("C4", viewers)


# --- puts in parts --------------------------------------------------------------------------------------------------------------


def test_it_finds_blocks_that_are_committed_with_a_part_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """C2."""
    monkeypatch.setattr(Layers, "is_whole", lambda self, block: True)
    found("C2", lambda seed: rough(seed, n_clients=3, n_chains=2, favours="session"))


def test_it_finds_slots_that_stay_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """C10: a writer that was killed in the middle keeps its slots."""
    monkeypatch.setattr(Held, "give_back", lambda self, node: None)
    found("C10", lambda seed: rough(seed, "client kill", n_clients=3, favours="session"))


# --- namespaces -----------------------------------------------------------------------------------------------------------------


def namers(seed: int, *faults: str) -> Scenario:
    return rough(seed, *faults, n_names=2, n_clients=3, favours="create")


def test_it_finds_a_uid_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: by the next namespace of that name."""
    create = MasterState.create

    async def same(self: MasterState, wanted: Any) -> Any:
        self._unsure[wanted.name] = NamespaceUid(wanted.name.encode().ljust(16, b"x"))
        return await create(self, wanted)

    monkeypatch.setattr(MasterState, "create", same)
    found("C8", namers)


def test_it_finds_a_name_that_is_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: two clients make it at once, and no turn is kept."""
    create = MasterState.create

    async def forgetful(self: MasterState, wanted: Any) -> Any:
        self.by_name.pop(wanted.name, None)
        return await create(self, wanted)

    monkeypatch.setattr(MasterState, "create", forgetful)
    found("C8", namers)


def test_it_finds_a_deletion_that_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: the workers keep the namespace."""
    monkeypatch.setattr(Sessions, "tell_deleted", lambda self, uid: None)
    monkeypatch.setattr(MasterState, "apply", lambda self, holder, batch: True)
    found("C8", namers)


def test_it_finds_a_namespace_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """C3: made, and not written down."""

    async def forget(self: Any, record: Any) -> None:
        return None

    monkeypatch.setattr("kvpool.sim.store.LocalStore.put_namespace", forget)
    found("C3", lambda seed: rough(seed, "master kill", n_names=2, n_masters=1))


# --- sizes ----------------------------------------------------------------------------------------------------------------------


def test_it_finds_a_size_that_changes_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: a block that comes back from SSD with the size of its slot."""
    from kvpool.core.blocks import BlockTable

    adopt = BlockTable.adopt

    def whole(self: BlockTable, uid: Any, key: Any, size: int, *more: Any) -> bool:
        return adopt(self, uid, key, 4096, *more)

    monkeypatch.setattr(BlockTable, "adopt", whole)
    found("C1", lambda seed: rough(seed, "worker kill", small_values=True, ssd_blocks=60, dram_blocks=10))


# --- drains ---------------------------------------------------------------------------------------------------------------------


def drained(seed: int, *faults: str) -> Scenario:
    return rough(seed, "drain", *faults, n_workers=3, **HEADROOM)


def test_it_finds_a_drain_that_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: done, and the only copies are still here."""
    monkeypatch.setattr(Elsewhere, "homes", lambda self, uid, keys: ["somebody"] * len(keys))
    found("C7", drained)


def test_it_finds_a_move_that_brings_back_what_was_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: blocks that were removed while they were under way to another worker."""
    monkeypatch.setattr(Node, "removals_begun", lambda self, uid: 0)
    found("C8", lambda seed: drained(seed), n_seeds=120)


# --- the redis, and what its replica lacks --------------------------------------------------------------------------------------


def failing_over(seed: int) -> Scenario:
    return rough(seed, "replica lag", "store failover", n_masters=2, n_names=2, store_replica=True, favours="create", n_clients=3)


def test_it_finds_a_leader_that_does_not_write_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The redis was set back, and the leader goes on as if it had everything."""

    async def nothing(self: MasterState) -> None:
        return None

    monkeypatch.setattr(MasterState, "rewrite", nothing)
    found("C8", failing_over)


def test_it_finds_writes_that_do_not_wait_for_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RedisStore, "_wait", lambda self: [])
    found("C8", failing_over)
