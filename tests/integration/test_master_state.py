"""What a master knows while its store is away, or lost the answer: on LMDB, behind a gate that the tests close."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.core.layout import KVLayout
from kvpool.core.membership import WorkerInfo
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import Incarnation, WorkerId
from kvpool.errors import StoreUnavailable
from kvpool.master.lmdb_store import LmdbStore
from kvpool.master.state import Extra, Limits, MasterState

LIMITS = Limits(suspect_after_ms=1500, dead_after_ms=4000, rebuild_grace_ms=0, heartbeat_ms=500, watch_coalesce_ms=5,
                removal_log_max=100, gone_memory_keys=100)  # fmt: skip
KEY = b"k" * 34


def spec_of(name: str, *, block_bytes: int = 4096) -> NamespaceSpec:
    return NamespaceSpec.of(name, KVLayout.opaque(block_bytes=block_bytes), hash="external")


class Gate:
    """A store whose writes fail at will: before they are done (`away`), or after (`mute`)."""

    def __init__(self, store: LmdbStore) -> None:
        self._store, self.away, self.mute = store, False, False

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if not name.startswith(("put_", "delete_", "log_")):
            return real

        async def write(*args: Any, **kwargs: Any) -> None:
            if self.away:
                raise StoreUnavailable("store: away")
            await real(*args, **kwargs)
            if self.mute:
                raise StoreUnavailable("store: no answer")

        return write


def run(directory: Path, check: Callable[[MasterState, Gate], Awaitable[None]]) -> None:
    async def main() -> None:
        store = LmdbStore(directory)
        epoch = await store.open()
        try:
            gate: Any = Gate(store)
            state = MasterState(gate, epoch, settings=LIMITS, now_ms=lambda: 0)
            await state.load()
            await check(state, gate)
        finally:
            await store.close()

    asyncio.run(main())


def test_workers_are_written_down_when_the_store_is_back(tmp_path: Path) -> None:
    async def check(state: MasterState, gate: Gate) -> None:
        gate.away = True
        for name in ("w1", "w2", "w3"):
            info = WorkerInfo(WorkerId(name), Incarnation(1), "host", "h:1", "")
            member, _ = state.members.hello(info, now_ms=0)
            await state.remember(member, Extra(), connected=True)  # a session does not fail for it
        await state.forget_worker(WorkerId("w2"))
        await state.remember_away(WorkerId("w3"))
        assert not await state.write_workers() and state.write_wanted.is_set()
        assert await gate.workers() == []
        gate.away = False
        assert await state.write_workers()
        assert {w.worker_id: w.connected for w in await gate.workers()} == {"w1": True, "w3": False}

    run(tmp_path, check)


def test_a_namespace_whose_creation_was_not_confirmed_is_there_once(tmp_path: Path) -> None:
    async def check(state: MasterState, gate: Gate) -> None:
        gate.mute = True
        with pytest.raises(StoreUnavailable):
            await state.create(spec_of("n"))
        assert not state.namespaces
        gate.mute = False
        spec, created = await state.create(spec_of("n", block_bytes=8192))  # the caller has thought better of it
        assert created and [r.spec for r in await gate.namespaces()] == [spec]

    run(tmp_path, check)


def test_a_removal_that_was_not_confirmed_takes_no_number(tmp_path: Path) -> None:
    async def check(state: MasterState, gate: Gate) -> None:
        spec, _ = await state.create(spec_of("n"))
        namespace = state.namespace(spec.uid)
        gate.away = True
        with pytest.raises(StoreUnavailable):
            await state.log_removal(namespace, KEY, everything=False)
        with pytest.raises(StoreUnavailable):
            await state.delete(namespace)
        assert namespace.log.seq == 0 and state.has_namespace(spec.uid)
        gate.away = False
        assert (await state.log_removal(namespace, KEY, everything=False)).seq == 1

    run(tmp_path, check)


def test_a_store_that_was_set_back_gets_all_of_it_again(tmp_path: Path) -> None:
    async def check(state: MasterState, gate: Gate) -> None:
        kept, _ = await state.create(spec_of("kept"))
        gone, _ = await state.create(spec_of("gone"))
        namespace = state.namespace(kept.uid)
        for i in range(4):
            await state.log_removal(namespace, bytes([i]) * 34, everything=False)
        info = WorkerInfo(WorkerId("w1"), Incarnation(1), "host", "h:1", "")
        await state.remember(state.members.hello(info, now_ms=0)[0], Extra(), connected=True)
        old = (await gate.namespaces(), list(await gate.removals(kept.uid))[:2])
        await state.delete(state.namespace(gone.uid))
        # as it was after two removals, without the worker, with the namespace that was deleted since
        await gate._store.delete_namespace(kept.uid)
        await gate._store.delete_worker(WorkerId("w1"))
        for record in old[0]:
            await gate._store.put_namespace(record)
        for removal in old[1]:
            await gate._store.log_removal(kept.uid, removal, first_seq=1)
        for _ in range(2):
            await state.rewrite()
            assert [r.spec for r in await gate.namespaces()] == [namespace.spec] and namespace.spec.removal_seq == 4
            assert tuple(await gate.removals(kept.uid)) == namespace.log.entries
            assert [w.worker_id for w in await gate.workers()] == ["w1"]

    run(tmp_path, check)
