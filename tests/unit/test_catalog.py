"""The index: replicas, retiring, snapshots, memory, speed; the memory of the gone."""

from __future__ import annotations

import time
import tracemalloc

from kvpool.core.catalog import Catalog, Gone, page_of
from kvpool.core.types import Holder, MissCause, NamespaceUid

UID, OTHER = NamespaceUid(b"u" * 16), NamespaceUid(b"v" * 16)
H1, H2, H3 = Holder(1), Holder(2), Holder(3)


def key(i: int) -> bytes:
    return i.to_bytes(34, "big")


def keys(*numbers: int) -> bytes:
    return b"".join(key(i) for i in numbers)


def put(catalog: Catalog, holder: Holder, *numbers: int, tiers: int = 1, uid: NamespaceUid = UID) -> list[int]:
    return catalog.apply(uid, holder, keys(*numbers), bytes([tiers]) * len(numbers))


def test_replicas_of_several_holders_and_their_tiers() -> None:
    catalog = Catalog()
    put(catalog, H1, 1, 2)
    put(catalog, H2, 2, tiers=3)
    put(catalog, H1, 1, tiers=2)
    assert catalog.locate(UID, [key(1), key(2), key(3)]) == [((H1, 2),), ((H1, 1), (H2, 3)), ()]
    assert catalog.locate(OTHER, [key(1)]) == [()]
    assert catalog.match(UID, [key(1), key(2), key(3), key(1)]) == 2 and catalog.match(OTHER, [key(1)]) == 0
    assert (catalog.count(UID), catalog.replicas, catalog.count_of(H1)) == (2, 3, 2)


def test_apply_says_which_keys_nobody_has_any_more() -> None:
    catalog = Catalog()
    put(catalog, H1, 1, 2, 3)
    put(catalog, H2, 2)
    assert put(catalog, H1, 3, 2, 1, 7, tiers=0) == [0, 2]  # 2 has another holder, 7 was never there
    assert catalog.locate(UID, [key(i) for i in (1, 2, 3)]) == [(), ((H2, 1),), ()]
    assert (catalog.count(UID), catalog.replicas) == (1, 1)


def test_the_same_key_twice_in_one_batch_ends_as_the_last_one_says() -> None:
    catalog = Catalog()
    catalog.apply(UID, H1, keys(1, 1, 1), b"\1\0\2")
    assert catalog.locate(UID, [key(1)]) == [((H1, 2),)] and catalog.replicas == 1


def test_high_bits_of_a_state_are_no_tiers() -> None:
    catalog = Catalog()
    catalog.apply(UID, H1, keys(1, 2), b"\xf1\xf0")
    assert catalog.locate(UID, [key(1), key(2)]) == [((H1, 1),), ()]


def test_a_retired_holder_is_masked_at_once_and_purged_later() -> None:
    catalog = Catalog()
    put(catalog, H1, *range(10))
    put(catalog, H2, 5)
    put(catalog, H1, 1, uid=OTHER)
    catalog.retire(H1)
    assert [len(r) for r in catalog.locate(UID, [key(i) for i in range(10)])] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert catalog.match(UID, [key(5), key(1)]) == 1 and catalog.match(UID, [key(0)]) == 0
    assert catalog.lost(UID, key(1)) and not catalog.lost(UID, key(5)) and not catalog.lost(UID, key(99))
    assert (catalog.replicas, catalog.count_of(H1)) == (1, 0)
    lost = []
    steps = 0
    more = True
    while more:
        more, some = catalog.purge(3)
        lost += some
        steps += 1
    assert steps >= 4 and sorted(lost) == sorted([(UID, key(i)) for i in range(10) if i != 5] + [(OTHER, key(1))])
    assert catalog.count(UID) == 1 and catalog.count(OTHER) == 0 and not catalog.retiring
    assert catalog.purge(100) == (False, [])


def test_changes_amid_a_purge_are_kept() -> None:
    catalog = Catalog()
    put(catalog, H1, *range(6))
    catalog.retire(H1)
    catalog.purge(2)
    put(catalog, H2, 0, 5, 6)
    catalog.retire(H3)  # another one, amid the sweep
    put(catalog, H3, 1)
    while catalog.purge(2)[0]:
        pass
    assert catalog.locate(UID, [key(i) for i in (0, 5, 6, 1)]) == [((H2, 1),)] * 3 + [()]
    assert (catalog.count(UID), catalog.replicas) == (3, 3)


def test_forget_drops_all_replicas_and_counts_what_was_there() -> None:
    catalog = Catalog()
    put(catalog, H1, 1, 2, 3)
    put(catalog, H2, 2)
    catalog.retire(H1)
    assert catalog.forget(UID, [key(1), key(2), key(9)]) == 1  # of 1 only a retired holder was left
    assert catalog.count(UID) == 1 and catalog.replicas == 0
    assert catalog.forget(OTHER, [key(1)]) == 0


def test_drop_all_keeps_the_namespace_and_its_kind() -> None:
    catalog = Catalog()
    catalog.open_namespace(UID, sized=True)
    catalog.apply(UID, H1, keys(1, 2), b"\1\1", sizes=(7).to_bytes(4, "little") + (9).to_bytes(4, "little"))
    assert catalog.value_bytes(UID, block_bytes=100) == 16
    catalog.apply(UID, H2, keys(1), b"\1", sizes=(7).to_bytes(4, "little"))
    assert catalog.value_bytes(UID, block_bytes=100) == 16  # a second replica is the same value
    assert catalog.drop_all(UID) == 2 and catalog.count(UID) == 0
    catalog.apply(UID, H1, keys(3), b"\1", sizes=(5).to_bytes(4, "little"))
    assert catalog.value_bytes(UID, block_bytes=100) == 5
    catalog.drop_namespace(UID)
    assert catalog.namespaces() == []
    put(catalog, H1, 1, uid=OTHER)
    assert catalog.value_bytes(OTHER, block_bytes=100) == 100


def test_what_was_dropped_is_given_back_in_steps() -> None:
    catalog = Catalog()
    put(catalog, H1, *range(100))
    catalog.drop_all(UID)
    put(catalog, H1, 1)
    assert catalog.replicas == 1 and catalog.match(UID, [key(1), key(2)]) == 1
    steps = 0
    while catalog.retiring:
        assert catalog.purge(30)[1] == []
        steps += 1
    assert steps == 4 and catalog.match(UID, [key(1)]) == 1


def test_a_snapshot_has_everything_in_bounded_chunks() -> None:
    catalog = Catalog()
    put(catalog, H1, *range(10))
    put(catalog, H2, 3, 4, tiers=2)
    got: dict[tuple[int, bytes], int] = {}
    for chunk in catalog.snapshot(UID, 4):
        assert len(chunk.tiers) <= 4 and len(chunk.keys) == 34 * len(chunk.tiers)
        for i, tiers in enumerate(chunk.tiers):
            got[chunk.holder, chunk.keys[34 * i : 34 * i + 34]] = tiers
    assert got == {(H1, key(i)): 1 for i in range(10)} | {(H2, key(i)): 2 for i in (3, 4)}


def test_a_snapshot_amid_changes_tells_the_state_of_its_moment() -> None:
    catalog = Catalog()
    put(catalog, H1, *range(6))
    chunks = catalog.snapshot(UID, 3)
    next(chunks)
    put(catalog, H1, 4, tiers=0)
    put(catalog, H1, 9)
    assert [chunk.keys for chunk in chunks] == [keys(3, 5)]


def test_pages_in_key_order() -> None:
    names = [key(i) for i in (5, 1, 4, 2, 3)]
    assert page_of(names, after=b"", limit=2) == [key(1), key(2)]
    assert page_of(names, after=key(2), limit=9) == [key(3), key(4), key(5)]


def test_the_bytes_told_are_those_that_the_interpreter_took() -> None:
    n = 20_000
    packed = [keys(*range(i, i + 1000)) for i in range(0, n, 1000)]
    tracemalloc.start()
    try:
        catalog = Catalog()
        before = tracemalloc.get_traced_memory()[0]
        for part in packed:
            catalog.apply(UID, H1, part, b"\1" * 1000)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert abs(catalog.index_bytes - taken) < 0.2 * taken, (catalog.index_bytes, taken)
    assert catalog.index_bytes / n < 300


def test_a_batch_is_looked_up_in_less_than_10_ms_however_full_the_index_is() -> None:
    catalog = Catalog()
    names = [key(i) for i in range(16_384)]
    for start in range(0, 200_000, 10_000):
        put(catalog, H1, *range(start, start + 10_000))
    best = {"locate": 1.0, "match": 1.0, "masked": 1.0}
    for name in best:
        if name == "masked":
            catalog.retire(H2)
        for _ in range(5):  # CPU time, the best of five: the machine is shared
            started = time.thread_time()
            found = catalog.match(UID, names) if name == "match" else len(catalog.locate(UID, names))
            best[name] = min(best[name], time.thread_time() - started)
            assert found == 16_384
    assert max(best.values()) < 0.010, best


# --- what is gone -------------------------------------------------------------------------------------------------------


def test_gone_is_bounded_and_remembers_the_newest() -> None:
    gone = Gone(100)
    for i in range(1000):
        gone.add(UID, [key(i)], MissCause.EVICTED)
        assert len(gone) <= 100
    assert gone.cause(UID, key(999)) is MissCause.EVICTED and gone.cause(UID, key(950)) is MissCause.EVICTED
    assert gone.cause(UID, key(1)) is None and gone.cause(OTHER, key(999)) is None
    assert gone.forgot


def test_gone_knows_whether_it_ever_forgot() -> None:
    gone = Gone(100)
    gone.add(UID, [key(i) for i in range(100)], MissCause.EVICTED)
    assert not gone.forgot and gone.cause(UID, key(0)) is MissCause.EVICTED
    gone.add(UID, [key(0)], MissCause.REMOVED)
    assert gone.forgot and gone.cause(UID, key(0)) is MissCause.REMOVED


def test_gone_of_no_size_keeps_next_to_nothing() -> None:
    gone = Gone(0)
    gone.add(UID, [key(i) for i in range(10)], MissCause.EVICTED)
    assert len(gone) <= 2 and gone.forgot
