"""What every store engine must do. Engines are listed in KINDS."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.pins import PinLevel
from kvpool.core.removals import Removal
from kvpool.core.types import NamespaceUid, WorkerId
from kvpool.errors import ConfigError
from kvpool.master.lmdb_store import LmdbStore
from kvpool.master.redis_store import RedisStore
from kvpool.master.store import NamespaceRecord, PinRecord, Store, WorkerRecord
from tests.support.redis import RedisServer

T = TypeVar("T")
KINDS = ("lmdb", "redis")
UID, NEXT = NamespaceUid(b"u" * 16), NamespaceUid(b"u" * 15 + b"v")
RECORD = NamespaceRecord(
    NamespaceSpec.of("näme", KVLayout.opaque(block_bytes=4096), uid=UID, hash="external", salt=b"\0\xff", replicas=2), 3
)
WORKER = WorkerRecord(WorkerId("w1"), 2**64 - 1, "host", "h:1", "h:2", 5, True)


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """make() gives a store that is not open, always on the same place."""
    if request.param == "lmdb":
        yield lambda: LmdbStore(tmp_path / "data")
        return
    server = RedisServer(tmp_path / "redis").start()
    yield lambda: RedisStore(server.url(), master_id="m-1")
    server.stop()


def run(store: Store, work: Callable[[Store], Awaitable[T]]) -> T:
    """Opens the store, does the work, closes it."""

    async def main() -> T:
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()
            await store.close()

    return asyncio.run(main())


def test_the_epoch_grows_with_every_open_and_the_id_stays(make: Callable[[], Store]) -> None:
    async def opened() -> tuple[int, str]:
        store = make()
        epoch = await store.open()
        await store.close()
        return epoch, store.master_id

    seen = [asyncio.run(opened()) for _ in range(3)]
    assert [epoch for epoch, _ in seen] == [1, 2, 3] and len({name for _, name in seen}) == 1 and seen[0][1]


def test_namespaces_and_workers_come_back_as_they_were_written(make: Callable[[], Store]) -> None:
    other = NamespaceRecord(replace(RECORD.spec, uid=NEXT, name="other"), 4)
    away = replace(WORKER, worker_id=WorkerId("w2"), connected=False)

    async def write(store: Store) -> None:
        await store.put_namespace(RECORD)
        await store.put_namespace(other)
        await store.put_worker(WORKER)
        await store.put_worker(replace(away, address="old"))
        await store.put_worker(away)
        await store.ping()

    async def read(store: Store) -> tuple[list[NamespaceRecord], list[WorkerRecord]]:
        return await store.namespaces(), await store.workers()

    async def delete(store: Store) -> None:
        await store.delete_namespace(UID)
        await store.delete_worker(WORKER.worker_id)
        await store.delete_worker(WorkerId("never"))

    run(make(), write)
    namespaces, workers = run(make(), read)
    assert sorted(namespaces, key=lambda r: r.ordinal) == [RECORD, other]
    assert sorted(workers, key=lambda r: r.worker_id) == [WORKER, away]
    run(make(), delete)
    assert run(make(), read) == ([other], [away])


def test_removals_come_back_in_order_and_trimmed(make: Callable[[], Store]) -> None:
    neighbour = NamespaceRecord(replace(RECORD.spec, uid=NEXT, name="other"), 4)
    entries = [Removal(i, i.to_bytes(34, "big") * 3) for i in range(1, 300)]

    async def write(store: Store) -> None:
        await store.put_namespace(RECORD)
        await store.put_namespace(neighbour)
        await store.log_removal(NEXT, Removal(1, b"n" * 34), first_seq=1)
        for entry in entries:
            await store.log_removal(UID, entry, first_seq=max(1, entry.seq - 270))
        await store.log_removal(UID, Removal(300, b"", everything=True), first_seq=290)

    async def read(store: Store) -> tuple[list[Removal], list[Removal], dict[str, int]]:
        seqs = {record.spec.name: record.spec.removal_seq for record in await store.namespaces()}
        return list(await store.removals(UID)), list(await store.removals(NEXT)), seqs

    run(make(), write)
    own, others, seqs = run(make(), read)
    assert own == [*entries[289:], Removal(300, b"", everything=True)] and others == [Removal(1, b"n" * 34)]
    assert seqs == {"näme": 300, "other": 1}

    async def delete(store: Store) -> None:
        await store.delete_namespace(UID)
        await store.log_removal(UID, Removal(301, b"x" * 34), first_seq=1)  # of a namespace that is gone: nothing stays

    run(make(), delete)
    assert run(make(), read) == ([], [Removal(1, b"n" * 34)], {"other": 1})


def test_pins_come_back_replaced_and_ended_as_they_were_written(make: Callable[[], Store]) -> None:
    neighbour = NamespaceRecord(replace(RECORD.spec, uid=NEXT, name="other"), 4)
    keys = [i.to_bytes(34, "big") for i in range(5_000)]
    pins = [PinRecord(key, PinLevel.SOFT, 1_000 + i) for i, key in enumerate(keys)]
    theirs = PinRecord(keys[7], PinLevel.HARD, 2**62)

    async def write(store: Store) -> None:
        await store.put_namespace(RECORD)
        await store.put_namespace(neighbour)
        await store.put_pins(UID, pins)
        await store.put_pins(UID, [replace(pins[3], level=PinLevel.HARD)])
        await store.put_pins(NEXT, [theirs])
        await store.delete_pins(UID, [keys[4], b"x" * 34])
        await store.put_pins(NamespaceUid(b"?" * 16), pins[:1])  # of a namespace that is not there: nothing stays

    async def read(store: Store) -> set[tuple[NamespaceUid, PinRecord]]:
        return set(await store.pins())

    async def delete(store: Store) -> None:
        await store.delete_namespace(UID)

    run(make(), write)
    expected = [replace(pins[3], level=PinLevel.HARD), *(pin for i, pin in enumerate(pins) if i not in (3, 4))]
    assert run(make(), read) == {*((UID, pin) for pin in expected), (NEXT, theirs)}
    run(make(), delete)
    assert run(make(), read) == {(NEXT, theirs)}


def test_a_full_sized_removal_is_kept(make: Callable[[], Store]) -> None:
    big = Removal(1, os.urandom(34 * 16_384))

    async def write(store: Store) -> None:
        await store.put_namespace(RECORD)
        await store.log_removal(UID, big, first_seq=1)

    async def read(store: Store) -> list[Removal]:
        return list(await store.removals(UID))

    run(make(), write)
    assert run(make(), read) == [big]


def test_a_place_in_use_is_refused_and_free_again_after_close(make: Callable[[], Store]) -> None:
    async def main() -> None:
        first, second = make(), make()
        await first.open()
        with pytest.raises(ConfigError, match=str(os.getpid())):
            await second.open()
        await second.close()
        await first.put_namespace(RECORD)
        await first.close()
        assert await second.open() == 2
        assert await second.namespaces() == [RECORD]
        await second.close()

    asyncio.run(main())


def test_lmdb_refuses_what_is_damaged_and_reads_what_is_whole(tmp_path: Path) -> None:
    async def write(store: Store) -> None:
        await store.put_namespace(RECORD)
        for i in range(1, 100):  # grows, shrinks and reuses pages
            await store.log_removal(UID, Removal(i, os.urandom(34 * 200)), first_seq=max(1, i - 5))

    async def read(store: Store) -> list[NamespaceRecord]:
        return await store.namespaces()

    place = tmp_path / "data"
    run(LmdbStore(place), write)
    assert len(run(LmdbStore(place), read)) == 1
    file = place / "state" / "data.mdb"
    whole = file.read_bytes()
    for damaged in (whole[:-4096], whole[:4096], whole[:10], b"x" * len(whole)):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"data\.mdb"):
            run(LmdbStore(place), read)
        assert file.read_bytes() == damaged
    file.write_bytes(whole)
    assert len(run(LmdbStore(place), read)) == 1


def test_lmdb_in_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def nothing(store: Store) -> None:
        raise AssertionError("open must fail")

    with pytest.raises(ConfigError, match="data_dir"):
        run(LmdbStore(tmp_path / "file" / "data"), nothing)
