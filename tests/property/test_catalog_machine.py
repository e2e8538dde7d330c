"""The catalog against a dict of dicts, with retiring, purging, removing and snapshots in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.core.catalog import Catalog
from kvpool.core.types import Holder, NamespaceUid

UIDS = [NamespaceUid(bytes([i]) * 16) for i in range(2)]
KEYS = [i.to_bytes(34, "big") for i in range(12)]

uids = st.sampled_from(UIDS)
batches = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 7)), max_size=8)


class CatalogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog()
        self.catalog.open_namespace(UIDS[1], sized=True)
        self.model: dict[NamespaceUid, dict[bytes, dict[int, int]]] = {uid: {} for uid in UIDS}
        self.holders = [1, 2, 3]
        self.lost: set[tuple[NamespaceUid, bytes]] = set()

    @rule(uid=uids, which=st.integers(0, 2), batch=batches)
    def apply(self, uid: NamespaceUid, which: int, batch: list[tuple[bytes, int]]) -> None:
        holder = self.holders[which]
        had = {key for key, replicas in self.model[uid].items() if replicas}
        gone = self.catalog.apply(
            uid,
            Holder(holder),
            b"".join(key for key, _ in batch),
            bytes(tiers for _, tiers in batch),
            sizes=b"".join((key[-1] + 1).to_bytes(4, "little") for key, _ in batch),
        )
        for key, tiers in batch:
            replicas = self.model[uid].setdefault(key, {})
            replicas.pop(holder, None)
            if tiers:
                replicas[holder] = tiers
        named = {batch[i][0] for i in gone}
        for key in {key for key, _ in batch}:
            if key in had and not self.model[uid][key]:
                assert key in named
        self.lost -= {(uid, key) for key in KEYS if self.model[uid].get(key)}

    @rule(which=st.integers(0, 2))
    def retire(self, which: int) -> None:
        holder = self.holders[which]
        self.catalog.retire(Holder(holder))
        self.holders[which] = max(self.holders) + 1  # numbers are never used twice
        for uid in UIDS:
            for key, replicas in self.model[uid].items():
                if replicas.pop(holder, None) and not replicas:
                    self.lost.add((uid, key))

    @rule(n=st.integers(1, 5))
    def purge(self, n: int) -> None:
        _, lost = self.catalog.purge(n)
        for uid, key in lost:
            assert not self.model[uid].get(key)

    @rule(uid=uids, keys=st.lists(st.sampled_from(KEYS), max_size=5, unique=True))
    def forget(self, uid: NamespaceUid, keys: list[bytes]) -> None:
        there = sum(1 for key in keys if self.model[uid].get(key))
        assert self.catalog.forget(uid, keys) == there
        for key in keys:
            self.model[uid].pop(key, None)

    @rule(uid=uids)
    def drop_all(self, uid: NamespaceUid) -> None:
        self.catalog.drop_all(uid)
        self.model[uid].clear()

    @rule(uid=uids, n=st.integers(1, 5))
    def snapshot(self, uid: NamespaceUid, n: int) -> None:
        seen: dict[bytes, dict[int, int]] = {}
        for chunk in self.catalog.snapshot(uid, n):
            for i, tiers in enumerate(chunk.tiers):
                replicas = seen.setdefault(chunk.keys[34 * i : 34 * i + 34], {})
                assert chunk.holder not in replicas
                replicas[chunk.holder] = tiers
        assert seen == {key: replicas for key, replicas in self.model[uid].items() if replicas}

    @invariant()
    def lookups_agree(self) -> None:
        total = 0
        for uid in UIDS:
            expected = [self.model[uid].get(key, {}) for key in KEYS]
            assert [dict(found) for found in self.catalog.locate(uid, KEYS)] == expected
            lead = next((i for i, replicas in enumerate(expected) if not replicas), len(KEYS))
            assert self.catalog.match(uid, KEYS) == lead
            total += sum(len(replicas) for replicas in expected)
        assert self.catalog.replicas == total

    @invariant()
    def counts_are_exact_once_purged(self) -> None:
        if self.catalog.retiring:
            return
        for uid in UIDS:
            there = [key for key, replicas in self.model[uid].items() if replicas]
            assert self.catalog.count(uid) == len(there)
            if uid == UIDS[1]:
                assert self.catalog.value_bytes(uid, block_bytes=0) == sum(key[-1] + 1 for key in there)

    def teardown(self) -> None:
        while self.catalog.purge(3)[0]:
            pass
        self.counts_are_exact_once_purged()


CatalogMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCatalog = CatalogMachine.TestCase
