"""The worker's data plane as a client sees it that knows only frames: real sockets, real memory, a node in this process."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvpool.core.frames import (
    FILL_RANGE,
    AttachRequest,
    CodesAnswer,
    FillRequest,
    Flag,
    HoldRequest,
    HoldsRequest,
    KeysRequest,
    NumberRequest,
    Op,
    ReadRequest,
    Status,
    WriteRequest,
)
from kvpool.core.hashing import chunk_sums
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import BlockCode, HoldId, MissCause, NamespaceUid, Tiers, miss_code
from kvpool.worker.http import metrics_of
from kvpool.worker.probe import probe
from tests.support.raw_client import RawClient, write_meta
from tests.support.waiting import wait_until
from tests.support.worker_node import WorkerNode, blocks_of, chain

STORED, ALREADY, FULL = bytes([BlockCode.STORED]), bytes([BlockCode.ALREADY]), bytes([BlockCode.FULL])
REJECTED, UNLISTED, LATER = bytes([BlockCode.REJECTED]), bytes([BlockCode.UNLISTED]), bytes([BlockCode.LATER])
INLINE, SHARED = int(BlockCode.HIT_INLINE), int(BlockCode.HIT_SHARED)


@pytest.fixture
def make_worker(tmp_path: Path) -> Iterator[Callable[..., WorkerNode]]:
    made: list[WorkerNode] = []

    def make(**settings: Any) -> WorkerNode:
        made.append(WorkerNode(tmp_path / f"w{len(made)}", **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def worker(make_worker: Callable[..., WorkerNode]) -> WorkerNode:
    return make_worker()


def put(client: RawClient, spec: NamespaceSpec, name: str, n: int, *, size: int | None = None, **more: Any) -> bytes:
    return client.write(chain(spec, name, n), blocks_of(spec, name, n, size=size), chunk_bytes=spec.chunk_bytes, **more)


def codes(answer: Any) -> bytes:
    return bytes(answer.entries["code"].tolist())


# --- put and get --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["tcp", "unix"])
@pytest.mark.parametrize(("n", "size"), [(1, 16384), (64, 16384), (12, 1 << 20)], ids=["one", "small", "hashed beside receiving"])
def test_what_is_put_is_got(worker: WorkerNode, path: str, n: int, size: int) -> None:
    spec = worker.namespace(block_bytes=size)
    with getattr(worker, path)() as client:
        assert put(client, spec, "a", n) == STORED * n
        answer, payload = client.read(chain(spec, "a", n))
        assert codes(answer) == bytes([INLINE]) * n
        assert payload == b"".join(blocks_of(spec, "a", n))
        expected = np.concatenate([chunk_sums(block, spec.chunk_bytes) for block in blocks_of(spec, "a", n)])
        assert (answer.sums == expected).all()
        assert set(answer.entries["tier"].tolist()) == {Tiers.DRAM}


def test_sizes_differ_in_one_put_and_come_back_as_they_were(worker: WorkerNode) -> None:
    spec = worker.namespace(block_bytes=300_000)
    sizes = [1, 300_000, 511, 512, 513, 262_144, 262_145, 7]
    blocks = [blocks_of(spec, f"v{i}", 1, size=size)[0] for i, size in enumerate(sizes)]
    with worker.tcp() as client:
        assert client.write(chain(spec, "v", len(sizes)), blocks, chunk_bytes=spec.chunk_bytes) == STORED * len(sizes)
        answer, payload = client.read(chain(spec, "v", len(sizes)))
        assert answer.entries["size"].tolist() == sizes
        assert payload == b"".join(blocks)


def test_a_block_whose_checksum_is_wrong_is_rejected_alone_and_never_seen(worker: WorkerNode) -> None:
    spec = worker.namespace(block_bytes=1 << 20)
    batch, blocks = chain(spec, "a", 5), blocks_of(spec, "a", 5)
    sums = np.concatenate([chunk_sums(block, spec.chunk_bytes) for block in blocks])
    sums[2 * 4 + 1] ^= np.uint64(1)
    with worker.tcp() as client:
        assert client.write(batch, blocks, chunk_bytes=spec.chunk_bytes, sums=sums) == STORED * 2 + REJECTED + STORED * 2
        assert client.touch(batch).codes == bytes([1, 1, 0, 1, 1])
        used = client.call(Op.STAT).meta
        assert b'"blocks": 4' in used
        answer, _ = client.read(batch)
        assert codes(answer)[2] == miss_code(MissCause.NEVER_STORED)


def test_put_again_is_already_and_twice_in_one_put_too(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    with worker.tcp() as client:
        assert put(client, spec, "a", 4) == STORED * 4
        other = [bytes(16384)] * 4
        assert client.write(chain(spec, "a", 4), other, chunk_bytes=spec.chunk_bytes) == ALREADY * 4
        assert client.read(chain(spec, "a", 4))[1] == b"".join(blocks_of(spec, "a", 4))
        one = chain(spec, "b", 1)
        twice = type(one)(one.namespace, one.keys * 2, chained=False)
        assert client.write(twice, blocks_of(spec, "b", 1) * 2, chunk_bytes=spec.chunk_bytes) == STORED + ALREADY


def test_wrong_size_is_rejected_and_wrong_number_of_sums_refused_without_losing_the_connection(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    with worker.tcp() as client:
        short = [blocks_of(spec, "a", 1)[0], b"x" * 100]
        assert client.write(chain(spec, "a", 2), short, chunk_bytes=spec.chunk_bytes) == STORED + REJECTED
        few = np.zeros(1, dtype=np.uint64)
        meta = write_meta(chain(spec, "b", 1), blocks_of(spec, "b", 1), chunk_bytes=spec.chunk_bytes, sums=few)
        answer = client.call(Op.WRITE, meta, payload=blocks_of(spec, "b", 1)[0])
        assert answer.status is Status.BAD_REQUEST and b"2 are needed" in answer.meta
        assert put(client, spec, "c", 2) == STORED * 2


def test_a_put_longer_than_the_tier_stores_its_head(make_worker: Callable[..., WorkerNode]) -> None:
    worker = make_worker(dram=64 * 16384)
    spec = worker.fixed_namespace()
    with worker.tcp() as client:
        assert put(client, spec, "long", 80) == STORED * 64 + FULL * 16
        assert client.read(chain(spec, "long", 64))[1] == b"".join(blocks_of(spec, "long", 64))
        assert put(client, spec, "next", 64) == STORED * 64
        answer, _ = client.read(chain(spec, "long", 1))
        assert codes(answer) == bytes([miss_code(MissCause.EVICTED)])


def test_first_miss_ends_a_read_and_without_it_all_are_looked_at(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    with worker.tcp() as client:
        put(client, spec, "a", 2)
        mixed = chain(spec, "a", 2).keys + chain(spec, "z", 1).keys + chain(spec, "a", 1).keys
        batch = type(chain(spec, "a", 1))(spec.uid, mixed, chained=False)
        miss = bytes([miss_code(MissCause.NEVER_STORED)])
        answer, payload = client.read(batch, flags=Flag.FIRST_MISS)
        assert codes(answer) == bytes([INLINE]) * 2 + miss + LATER and len(payload) == 2 * 16384
        answer, payload = client.read(batch)
        assert codes(answer) == bytes([INLINE]) * 2 + miss + bytes([INLINE]) and len(payload) == 3 * 16384


def test_one_answer_is_bounded_and_says_from_where_to_ask_again(make_worker: Callable[..., WorkerNode]) -> None:
    worker = make_worker(dram=160 << 20)
    spec = worker.namespace(block_bytes=20 << 20)
    with worker.tcp() as client:
        for i in range(5):
            batch = chain(spec, "a", 1, start=i)
            assert client.write(batch, blocks_of(spec, "a", 1, start=i), chunk_bytes=spec.chunk_bytes) == STORED
        answer, payload = client.read(chain(spec, "a", 5))
        assert codes(answer) == bytes([INLINE]) * 3 + LATER * 2 and len(payload) == 60 << 20
        assert client.call(Op.PING).status is Status.OK


# --- byte ranges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [Flag.NONE, Flag.VERIFY])
def test_a_byte_range_of_every_block(worker: WorkerNode, flags: Flag) -> None:
    spec = worker.fixed_namespace()
    with worker.tcp() as client:
        put(client, spec, "a", 8)
        answer, payload = client.read(chain(spec, "a", 8), offset=8000, length=400, flags=flags)
        parts = [block[8000:8400] for block in blocks_of(spec, "a", 8)]
        assert payload == b"".join(parts)
        assert answer.sums.tolist() == [xxhash.xxh3_64_intdigest(part) for part in parts]


def test_byte_ranges_of_ssd_blocks_that_find_no_room_in_dram(make_worker: Callable[..., WorkerNode], tmp_path: Path) -> None:
    """A SHARED answer has inline parts then, each with its sum."""
    worker = make_worker(dram=4 * 16384, ssd=f"{tmp_path / 'ssd'}:64MiB")
    spec = worker.fixed_namespace()
    with worker.unix() as client:
        for start in range(0, 16, 2):
            batch, blocks = chain(spec, "a", 2, start=start), blocks_of(spec, "a", 2, start=start)
            assert client.write(batch, blocks, chunk_bytes=spec.chunk_bytes) == STORED * 2
        answer, payload = client.read(chain(spec, "a", 16), offset=8000, length=400, flags=Flag.SHARED)
        inline = [i for i, code in enumerate(codes(answer)) if code == INLINE]
        parts = [block[8000:8400] for i, block in enumerate(blocks_of(spec, "a", 16)) if i in inline]
        assert len(inline) >= 12 and payload == b"".join(parts)
        assert answer.sums.tolist() == [xxhash.xxh3_64_intdigest(part) for part in parts]


def test_a_range_past_a_block_is_rejected_and_past_the_namespace_refused(worker: WorkerNode) -> None:
    spec = worker.namespace(block_bytes=1000)
    with worker.tcp() as client:
        blocks = [bytes(1000), bytes(10)]
        client.write(chain(spec, "a", 2), blocks, chunk_bytes=spec.chunk_bytes)
        answer, payload = client.read(chain(spec, "a", 2), offset=5, length=100)
        assert codes(answer) == bytes([INLINE]) + REJECTED and len(payload) == 100
        assert answer.entries["size"].tolist() == [1000, 10]
        meta = ReadRequest(chain(spec, "a", 1), 900, 101).encode()
        assert client.call(Op.READ, meta).status is Status.BAD_REQUEST


def test_memory_that_changed_by_itself_is_found_by_verify_and_served_no_more(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    with worker.tcp() as client:
        put(client, spec, "a", 3)
        with worker.node.lock:
            block = worker.node.table.spaces[spec.uid].blocks[chain(spec, "a", 3).split()[1]]
            worker.node.dram.view(spec.uid, worker.node.offset(block) + 9000, 1)[0] ^= 1
        answer, payload = client.read(chain(spec, "a", 3), flags=Flag.VERIFY)
        assert codes(answer) == bytes([INLINE, miss_code(MissCause.CORRUPT), INLINE])
        assert payload == blocks_of(spec, "a", 1)[0] + blocks_of(spec, "a", 1, start=2)[0]
        assert client.touch(chain(spec, "a", 3)).codes == bytes([1, 0, 1])


# --- who is told when -------------------------------------------------------------------------------------------------------


def test_without_a_master_a_put_is_unlisted_at_once(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    with worker.tcp() as client:
        started = time.monotonic()
        assert put(client, spec, "a", 4, flags=Flag.WAIT_LISTED) == UNLISTED * 4
        assert time.monotonic() - started < 0.2
        touched = client.touch(chain(spec, "a", 4), flags=Flag.WAIT_LISTED)
        assert touched.codes == bytes([1] * 4) and touched.number == 0


def in_session(worker: WorkerNode) -> None:
    """The part of a master that gives marks and acknowledges nothing yet."""
    with worker.node.lock:
        worker.node.reporter.begin_inventory()
    worker.node.listed.set_session(up=True)


def acknowledge(worker: WorkerNode) -> None:
    while True:
        with worker.node.lock:
            report = worker.node.reporter.take()
        if report is None:
            return
        worker.node.on_ack(report.seq)


def test_a_put_is_answered_when_the_master_has_the_report_and_not_before(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    in_session(worker)
    with worker.tcp() as client:
        blocks = blocks_of(spec, "a", 4)
        client.send(Op.WRITE, write_meta(chain(spec, "a", 4), blocks, chunk_bytes=spec.chunk_bytes), payload=b"".join(blocks),
                    flags=Flag.WAIT_LISTED)  # fmt: skip
        wait_until(lambda: worker.node.listed.n_waiting == 1)
        client.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.sock.recv(1)
        client.sock.settimeout(5)
        acknowledge(worker)
        assert CodesAnswer.decode(client.receive().meta).codes == STORED * 4
        assert client.touch(chain(spec, "a", 4), flags=Flag.WAIT_LISTED).number == 1


def test_a_lost_session_ends_the_waiting_of_all_puts(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    in_session(worker)
    with worker.tcp() as client:
        blocks = blocks_of(spec, "a", 1)
        client.send(Op.WRITE, write_meta(chain(spec, "a", 1), blocks, chunk_bytes=spec.chunk_bytes), payload=blocks[0],
                    flags=Flag.WAIT_LISTED)  # fmt: skip
        wait_until(lambda: worker.node.listed.n_waiting == 1)
        worker.node.listed.set_session(up=False)
        assert CodesAnswer.decode(client.receive().meta).codes == UNLISTED


def test_a_master_that_never_acknowledges_costs_the_deadline_at_most(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    in_session(worker)
    with worker.tcp() as client:
        started = time.monotonic()
        assert put(client, spec, "a", 1, flags=Flag.WAIT_LISTED, deadline_ms=300) == UNLISTED
        assert 0.2 < time.monotonic() - started < 0.35
        started = time.monotonic()
        assert put(client, spec, "b", 1, flags=Flag.WAIT_LISTED, deadline_ms=60_000) == UNLISTED
        assert time.monotonic() - started < 1.5


# --- shared memory ------------------------------------------------------------------------------------------------------------


def attach(client: RawClient, uid: NamespaceUid) -> tuple[mmap.mmap, mmap.mmap]:
    answer = client.call(Op.ATTACH, AttachRequest(uid).encode())
    assert answer.status is Status.OK and len(answer.fds) == 2
    told = CodesAnswer.decode(answer.meta)
    try:
        data = mmap.mmap(answer.fds[0], told.number, prot=mmap.PROT_READ)
        generations = mmap.mmap(answer.fds[1], told.count * 1024 * 8, prot=mmap.PROT_READ)
        with pytest.raises(PermissionError):
            mmap.mmap(answer.fds[0], told.number)
    finally:
        for fd in answer.fds:
            os.close(fd)
    return data, generations


def test_places_of_a_shared_read_lie_in_the_attached_memory_until_released(make_worker: Callable[..., WorkerNode]) -> None:
    worker = make_worker(dram=32 * 16384)
    spec = worker.fixed_namespace()
    with worker.unix() as client, worker.tcp() as other:
        put(client, spec, "a", 8)
        data, generations = attach(client, spec.uid)
        words = np.frombuffer(generations, dtype=np.uint64)
        answer, payload = client.read(chain(spec, "a", 8), flags=Flag.SHARED)
        assert codes(answer) == bytes([SHARED]) * 8 and payload == b"" and answer.hold_id
        for k in range(6):  # far more than fits: all that may be evicted is
            put(other, spec, f"flood{k}", 24)
        for entry, block in zip(answer.entries, blocks_of(spec, "a", 8), strict=True):
            at = int(entry["offset"])
            assert data[at : at + 16384] == block
            assert words[int(entry["gen_index"])] == entry["generation"]
        client.send(Op.RELEASE, HoldsRequest((answer.hold_id,)).encode(), flags=Flag.NO_REPLY)
        assert client.call(Op.PING).status is Status.OK
        for k in range(6):
            put(other, spec, f"flood2{k}", 32)
        stale = [words[int(entry["gen_index"])] != entry["generation"] for entry in answer.entries]
        assert all(stale)
        del words
        data.close()
        generations.close()


def test_memory_is_not_passed_over_tcp(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    with worker.tcp() as client:
        put(client, spec, "a", 2)
        assert client.call(Op.ATTACH, AttachRequest(spec.uid).encode()).status is Status.BAD_REQUEST
        assert client.call(Op.RING, NumberRequest(1 << 20).encode()).status is Status.BAD_REQUEST
        answer, _ = client.read(chain(spec, "a", 2), flags=Flag.SHARED)
        assert codes(answer) == bytes([INLINE]) * 2


@pytest.mark.parametrize(("n", "size"), [(8, 16384), (24, 1 << 20)], ids=["on the loop", "in the pool"])
def test_a_put_through_the_ring(worker: WorkerNode, n: int, size: int) -> None:
    spec = worker.namespace(block_bytes=size)
    with worker.unix() as client:
        answer = client.call(Op.RING, NumberRequest(32 << 20).encode())
        n_bytes = CodesAnswer.decode(answer.meta).number
        assert n_bytes == 32 << 20
        ring = mmap.mmap(answer.fds[0], n_bytes)
        with pytest.raises(OSError):
            os.ftruncate(answer.fds[0], 4096)  # a shrunk ring would kill the worker that reads it
        os.close(answer.fds[0])
        blocks = blocks_of(spec, "a", n)
        ring[4096 : 4096 + n * size] = b"".join(blocks)
        meta = WriteRequest(chain(spec, "a", n), np.full(n, size, dtype=np.uint64), ring_offset=4096).encode()
        got = CodesAnswer.decode(client.call(Op.WRITE, meta, flags=Flag.RING).meta).codes
        ring[:] = bytes(n_bytes)
        ring.close()
        assert got == STORED * n
        read, payload = client.read(chain(spec, "a", n))
        assert payload == b"".join(blocks)
        assert (read.sums == np.concatenate([chunk_sums(block, spec.chunk_bytes) for block in blocks])).all()
    wait_until(lambda: worker.plane.rings.used_bytes == 0)


# --- reservations -----------------------------------------------------------------------------------------------------------


def reserve(client: RawClient, spec: NamespaceSpec, name: str, n: int) -> tuple[int, bytes]:
    meta = WriteRequest(chain(spec, name, n), np.full(n, spec.block_bytes, dtype=np.uint64)).encode()
    answer = client.call(Op.RESERVE, meta)
    assert answer.status is Status.OK, answer
    told = CodesAnswer.decode(answer.meta)
    return told.number, told.codes


def fill(client: RawClient, number: int, parts: list[tuple[int, int, bytes]], *, spoil: bool = False) -> Any:
    ranges = np.zeros(len(parts), dtype=FILL_RANGE)
    for i, (block, offset, data) in enumerate(parts):
        ranges[i] = (block, 0, offset, len(data), xxhash.xxh3_64_intdigest(data) ^ spoil)
    return client.call(Op.FILL, FillRequest(number, ranges).encode(), payload=b"".join(data for _, _, data in parts))


def test_layer_by_layer_in_any_order_and_visible_after_commit(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    blocks = blocks_of(spec, "s", 3)
    with worker.tcp() as client:
        number, got = reserve(client, spec, "s", 3)
        assert got == bytes([BlockCode.RESERVED]) * 3
        for offset in (8192, 0):
            assert fill(client, number, [(i, offset, blocks[i][offset : offset + 8192]) for i in range(3)]).status is Status.OK
            assert client.touch(chain(spec, "s", 3)).codes == bytes(3)
        answer = client.call(Op.COMMIT, NumberRequest(number).encode())
        assert CodesAnswer.decode(answer.meta).codes == STORED * 3
        assert client.read(chain(spec, "s", 3))[1] == b"".join(blocks)
        assert client.call(Op.COMMIT, NumberRequest(number).encode()).status is Status.NOT_FOUND


def test_a_block_with_a_gap_or_a_wrong_part_is_rejected_at_commit(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    blocks = blocks_of(spec, "s", 3)
    with worker.tcp() as client:
        number, _ = reserve(client, spec, "s", 3)
        assert fill(client, number, [(0, 0, blocks[0]), (1, 0, blocks[1][:16383])]).status is Status.OK
        assert fill(client, number, [(2, 0, blocks[2])], spoil=True).status is Status.BAD_REQUEST
        assert fill(client, number, [(2, 8192, blocks[2])]).status is Status.BAD_REQUEST  # past the block's end
        answer = client.call(Op.COMMIT, NumberRequest(number).encode())
        assert CodesAnswer.decode(answer.meta).codes == STORED + REJECTED * 2
    wait_until(lambda: worker.node.table.dram.n_blocks == 1)


@pytest.mark.parametrize("how", ["abort", "close", "half a body"])
def test_what_was_reserved_is_free_again(worker: WorkerNode, how: str) -> None:
    spec = worker.fixed_namespace()
    client = worker.tcp()
    if how == "half a body":
        blocks = blocks_of(spec, "s", 8)
        client.send(Op.WRITE, write_meta(chain(spec, "s", 8), blocks, chunk_bytes=spec.chunk_bytes),
                    payload=b"".join(blocks)[:70_000], payload_bytes=8 * 16384)  # fmt: skip
    else:
        number, _ = reserve(client, spec, "s", 8)
    wait_until(lambda: worker.node.table.dram.n_blocks == 8)
    if how == "abort":
        assert client.call(Op.ABORT, NumberRequest(number).encode()).status is Status.OK
    client.close()
    wait_until(lambda: worker.node.table.dram.n_blocks == 0)


# --- holds ------------------------------------------------------------------------------------------------------------------


def hold(client: RawClient, spec: NamespaceSpec, name: str, n: int, *, flags: Flag, ttl_ms: int = 60_000) -> CodesAnswer:
    return CodesAnswer.decode(client.call(Op.HOLD, HoldRequest(chain(spec, name, n), ttl_ms).encode(), flags=flags).meta)


def test_a_hold_outlives_its_connection_and_a_view_does_not(make_worker: Callable[..., WorkerNode]) -> None:
    worker = make_worker(dram=32 * 16384, policy="lru")  # (what is put last stays)
    spec = worker.fixed_namespace()
    with worker.tcp() as other:
        put(other, spec, "held", 4)
        put(other, spec, "viewed", 4)
        with worker.unix() as client:
            held = hold(client, spec, "held", 5, flags=Flag.FIRST_MISS)
            assert held.count == 4 and held.number and held.codes[4] == miss_code(MissCause.NEVER_STORED)
            viewed = hold(client, spec, "viewed", 4, flags=Flag.VIEW | Flag.FIRST_MISS)
            assert viewed.count == 4
            renewed = client.call(Op.RENEW, HoldsRequest((held.number, viewed.number, 1), 60_000).encode())
            assert CodesAnswer.decode(renewed.meta).codes == bytes([1, 1, 0])
        wait_until(lambda: worker.node.table.n_holds == 1)
        for k in range(8):
            put(other, spec, f"flood{k}", 24)
        assert other.touch(chain(spec, "held", 4)).codes == bytes([1] * 4)
        assert other.touch(chain(spec, "viewed", 4)).codes == bytes(4)
        answer, payload = other.read(chain(spec, "held", 4), hold_id=HoldId(held.number))
        assert codes(answer) == bytes([INLINE]) * 4 and payload == b"".join(blocks_of(spec, "held", 4))


def test_a_hold_ends_by_its_time(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    with worker.tcp() as client:
        put(client, spec, "a", 1)
        assert hold(client, spec, "a", 1, flags=Flag.NONE, ttl_ms=1).count == 1
        wait_until(lambda: worker.node.table.n_holds == 0)


def test_a_view_of_blocks_on_ssd_brings_them_up_first(make_worker: Callable[..., WorkerNode], tmp_path: Path) -> None:
    worker = make_worker(dram=32 * 16384, ssd=f"{tmp_path / 'ssd'}:64MiB")
    spec = worker.fixed_namespace()
    with worker.unix() as client:
        put(client, spec, "cold", 4)
        push_down(worker, client, spec, "cold", 4)
        # (for a moment all of DRAM may be dirty: then there is no room to bring them up to)
        view = Flag.VIEW | Flag.FIRST_MISS
        viewed = wait_until(lambda: (held := hold(client, spec, "cold", 4, flags=view)).count == 4 and held)
        answer, _ = client.read(chain(spec, "cold", 4), hold_id=HoldId(viewed.number), flags=Flag.SHARED)
        assert codes(answer) == bytes([SHARED]) * 4


# --- greeting, refusing, limits -------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused_and_the_right_one_taken(make_worker: Callable[..., WorkerNode]) -> None:
    worker = make_worker(token="secret")
    with worker.tcp(token="guess", greet=False) as client:
        assert client.hello(token="guess").status is Status.UNAUTHENTICATED
        with pytest.raises(ConnectionError):
            client.call(Op.PING)
    assert worker.plane.counters()["unauthenticated"] == 1
    with worker.tcp() as client:
        assert client.call(Op.PING).status is Status.OK


def test_no_common_version_names_both(worker: WorkerNode) -> None:
    with worker.tcp(greet=False) as client:
        answer = client.hello(versions=(7, 9))
        assert answer.status is Status.VERSION and b"[7, 9]" in answer.meta and b"[1]" in answer.meta


@pytest.mark.parametrize("op", [Op.PING, Op.READ, Op.WRITE, Op.STAT])
def test_nothing_comes_before_hello(worker: WorkerNode, op: Op) -> None:
    with worker.tcp(greet=False) as client, pytest.raises(ConnectionError):
        client.call(op)
    assert worker.plane.counters()["malformed"] == 1


def test_one_connection_too_many_is_told_so(make_worker: Callable[..., WorkerNode]) -> None:
    worker = make_worker(connections_max=2)
    with worker.tcp(), worker.unix(), worker.tcp(greet=False) as third:
        answer = third.hello()
        assert answer.status is Status.BUSY and b"2 connections" in answer.meta
    wait_until(lambda: worker.plane.n_connections == 0)
    with worker.tcp() as client:
        assert client.call(Op.PING).status is Status.OK


def test_unknown_and_blocked_namespaces(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    blocked = worker.namespace(name="blocked", blocked=True)
    with worker.tcp() as client:
        unknown = type(chain(spec, "a", 1))(NamespaceUid(b"u" * 16), chain(spec, "a", 1).keys)
        assert client.call(Op.READ, ReadRequest(unknown).encode()).status is Status.UNKNOWN_NAMESPACE
        assert client.call(Op.READ, ReadRequest(chain(blocked, "a", 1)).encode()).status is Status.NOT_READY
        blocks = blocks_of(blocked, "a", 1)
        meta = write_meta(chain(blocked, "a", 1), blocks, chunk_bytes=blocked.chunk_bytes)
        assert client.call(Op.WRITE, meta, payload=blocks[0]).status is Status.NOT_READY
        worker.node.catch_up(blocked, drop_all=False, missed=[])
        assert client.call(Op.WRITE, meta, payload=blocks[0]).status is Status.OK


def test_a_request_whose_time_is_up_is_dropped_with_its_body(worker: WorkerNode) -> None:
    spec = worker.namespace(block_bytes=4 << 20)
    with worker.tcp() as client:
        blocks = blocks_of(spec, "a", 1)
        meta = write_meta(chain(spec, "a", 1), blocks, chunk_bytes=spec.chunk_bytes)
        assert client.call(Op.WRITE, meta, payload=blocks[0], deadline_ms=0).status is Status.DEADLINE
        assert client.touch(chain(spec, "a", 1)).codes == bytes(1)


def test_drop_and_touch(worker: WorkerNode) -> None:
    spec = worker.fixed_namespace()
    with worker.tcp() as client:
        put(client, spec, "a", 2)
        answer = client.call(Op.DROP, KeysRequest(chain(spec, "a", 3)).encode())
        assert CodesAnswer.decode(answer.meta).codes == bytes([1, 1, 0])
        read, _ = client.read(chain(spec, "a", 2))
        assert codes(read) == bytes([miss_code(MissCause.REMOVED)]) * 2


@pytest.mark.parametrize("state", ["idle", "header", "body"])
def test_who_says_nothing_more_is_closed_in_time(make_worker: Callable[..., WorkerNode], state: str) -> None:
    worker = make_worker(idle_timeout_ms=300, body_timeout_ms=300)
    spec = worker.fixed_namespace()
    with worker.tcp() as client:
        if state == "header":
            client.sock.sendall(b"KVP1")
        elif state == "body":
            blocks = blocks_of(spec, "a", 1)
            meta = write_meta(chain(spec, "a", 1), blocks, chunk_bytes=spec.chunk_bytes)
            client.send(Op.WRITE, meta, payload=b"x", payload_bytes=16384, deadline_ms=60_000)
        started = time.monotonic()
        assert client.sock.recv(1) == b""
        assert 0.2 < time.monotonic() - started < 1.5
    wait_until(lambda: worker.node.table.dram.n_blocks == 0)


def test_the_probe_reads_over_the_data_plane_and_fails_when_that_has_stopped(worker: WorkerNode) -> None:
    assert probe(worker.plane.unix_name, token="") == ""
    worker.plane.drain(1.0)
    worker.plane.stop()
    assert probe(worker.plane.unix_name, token="") != ""


def test_a_drain_lets_the_running_request_finish(make_worker: Callable[..., WorkerNode]) -> None:
    worker = make_worker()
    spec = worker.namespace(block_bytes=1 << 20)
    with worker.tcp() as idle, worker.tcp() as client:
        blocks = blocks_of(spec, "a", 2)
        meta = write_meta(chain(spec, "a", 2), blocks, chunk_bytes=spec.chunk_bytes)
        client.send(Op.WRITE, meta, payload=blocks[0], payload_bytes=2 << 20)
        wait_until(lambda: worker.node.table.dram.n_blocks == 2)
        drain = threading.Thread(target=worker.plane.drain, args=(5.0,))
        drain.start()
        assert idle.sock.recv(1) == b""
        client.sock.sendall(blocks[1])
        assert CodesAnswer.decode(client.receive().meta).codes == STORED * 2
        drain.join(2.0)
        assert not drain.is_alive()


# --- SSD ----------------------------------------------------------------------------------------------------------------------


def push_down(worker: WorkerNode, client: RawClient, spec: NamespaceSpec, name: str, n: int) -> None:
    """Others are put until these lie on SSD alone."""
    k = 0

    def gone_down() -> bool:
        nonlocal k
        k += 1
        put(client, spec, f"flood-{name}-{k}", 16)
        with worker.node.lock:
            blocks = [worker.node.table.spaces[spec.uid].blocks.get(key) for key in chain(spec, name, n).split()]
        return all(block is not None and block.tiers == Tiers.SSD for block in blocks)

    wait_until(gone_down)


@pytest.fixture
def small(make_worker: Callable[..., WorkerNode], tmp_path: Path) -> WorkerNode:
    return make_worker(dram=32 * 16384, ssd=f"{tmp_path / 'ssd'}:64MiB")


def test_cold_blocks_are_read_from_ssd_and_come_up(small: WorkerNode) -> None:
    spec = small.fixed_namespace()
    with small.tcp() as client:
        put(client, spec, "cold", 8)
        push_down(small, client, spec, "cold", 8)
        answer, payload = client.read(chain(spec, "cold", 8))
        assert codes(answer) == bytes([INLINE]) * 8 and set(answer.entries["tier"].tolist()) == {Tiers.SSD}
        assert payload == b"".join(blocks_of(spec, "cold", 8))
        part, some = client.read(chain(spec, "cold", 8), offset=100, length=50)
        assert some == b"".join(block[100:150] for block in blocks_of(spec, "cold", 8))
        assert set(part.entries["tier"].tolist()) & {Tiers.DRAM}


def test_no_put_is_refused_while_the_disk_takes_what_is_cold(small: WorkerNode) -> None:
    spec = small.fixed_namespace()
    with small.tcp() as client:
        for k in range(20):
            assert put(client, spec, f"p{k}", 24) == STORED * 24
        for k in range(20):
            assert client.read(chain(spec, f"p{k}", 24))[1] == b"".join(blocks_of(spec, f"p{k}", 24))


@pytest.mark.parametrize("way", ["tcp", "unix", "ring", "reservation"])
def test_what_is_kept_for_a_waiting_put_goes_with_its_client(
    make_worker: Callable[..., WorkerNode], tmp_path: Path, way: str
) -> None:
    worker = make_worker(dram=16 * 16384, ssd=f"{tmp_path / 'ssd'}:1MiB", low_watermark=0.98, high_watermark=0.99)
    node, spec, other = worker.node, worker.fixed_namespace(), worker.fixed_namespace(name="other")
    assert node.mover is not None
    with worker.tcp() as client:
        for start in range(0, 64, 8):  # as much as fits, but for a few slots on SSD
            parts = chain(spec, "a", 8, start=start), blocks_of(spec, "a", 8, start=start)
            assert client.write(*parts, chunk_bytes=spec.chunk_bytes) == STORED * 8
        before = worker.plane.counters()["parked"]
        with node.mover._applying, worker.tcp() if way == "tcp" else worker.unix() as dying:  # (nothing is written down)
            longer, blocks = chain(spec, "a", 88), blocks_of(spec, "a", 88)
            if way == "ring":
                for fd in dying.call(Op.RING, NumberRequest(4 << 20).encode()).fds:
                    os.close(fd)
            if way in ("tcp", "unix"):  # its body is still to come
                meta = write_meta(longer, blocks, chunk_bytes=spec.chunk_bytes)
                dying.send(Op.WRITE, meta, payload_bytes=88 * 16384, deadline_ms=60_000)
            else:
                meta = WriteRequest(longer, np.full(88, 16384, dtype=np.uint64)).encode()
                op, flags = (Op.WRITE, Flag.RING) if way == "ring" else (Op.RESERVE, Flag.NONE)
                dying.send(op, meta, flags=flags, deadline_ms=60_000)
            wait_until(lambda: worker.plane.counters()["parked"] == before + 1, what="it waits for room")
            dying.close()
            wait_until(lambda: worker.plane.n_connections == 1, what="the worker sees that it is gone")
        for start in range(0, 48, 8):
            parts = chain(other, "x", 8, start=start), blocks_of(other, "x", 8, start=start)
            assert client.write(*parts, chunk_bytes=other.chunk_bytes) == STORED * 8
        assert client.read(chain(other, "x", 48))[1] == b"".join(blocks_of(other, "x", 48))
    metrics = {metric.name: metric.values for metric in metrics_of(node, worker.plane, None)}
    assert metrics["kvpool_blocks_now"]["reserved",] == 0
    wait_until(lambda: worker.plane.rings.used_bytes == node.staging.used_bytes == 0)
    with node.lock:
        node.table.check()


def test_a_flipped_bit_on_disk_is_a_miss_with_its_cause(small: WorkerNode, tmp_path: Path) -> None:
    spec = small.fixed_namespace()
    with small.tcp() as client:
        put(client, spec, "cold", 2)
        push_down(small, client, spec, "cold", 2)
        head = blocks_of(spec, "cold", 2)[0][:4096]
        for file in (tmp_path / "ssd").glob("*.kv"):
            raw = bytearray(file.read_bytes())
            at = raw.find(head)
            if at >= 0:
                with file.open("r+b") as out:
                    out.seek(at + 7)
                    out.write(bytes([raw[at + 7] ^ 4]))
        answer, payload = client.read(chain(spec, "cold", 2))
        assert codes(answer) == bytes([miss_code(MissCause.CORRUPT), INLINE])
        assert payload == blocks_of(spec, "cold", 2)[1]
        again, _ = client.read(chain(spec, "cold", 1))
        assert codes(again) == bytes([miss_code(MissCause.CORRUPT)])


def test_many_readers_of_a_cold_chain_cost_one_read_of_the_disk(small: WorkerNode) -> None:
    spec = small.fixed_namespace()
    with small.tcp() as client:
        put(client, spec, "cold", 8)
        push_down(small, client, spec, "cold", 8)
    assert small.node.ssd is not None
    before = small.node.ssd.counters().get("blocks_read", 0)
    together = threading.Barrier(12)
    wrong: list[int] = []

    def reader(i: int) -> None:
        with small.tcp() as mine:
            together.wait(10)
            if mine.read(chain(spec, "cold", 8))[1] != b"".join(blocks_of(spec, "cold", 8)):
                wrong.append(i)

    threads = [threading.Thread(target=reader, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert small.node.ssd.counters()["blocks_read"] - before == 8


def test_removed_for_good_also_from_disk_and_while_it_is_held(make_worker: Callable[..., WorkerNode], tmp_path: Path) -> None:
    worker = make_worker(dram=32 * 16384, ssd=f"{tmp_path / 'ssd'}:64MiB")
    spec = worker.fixed_namespace()
    worker.node.catch_up(spec, drop_all=False, missed=[])
    with worker.tcp() as client:
        put(client, spec, "a", 4)
        push_down(worker, client, spec, "a", 4)
        assert hold(client, spec, "a", 2, flags=Flag.NONE).count == 2
        had, n = worker.node.remove(spec.uid, chain(spec, "a", 5).keys, removal_seq=1)
        assert had == bytes([1, 1, 1, 1, 0]) and n == 4
        read, _ = client.read(chain(spec, "a", 4))
        assert codes(read) == bytes([miss_code(MissCause.REMOVED)]) * 4
    assert worker.node.ssd is not None
    records = [bytes(a.meta.key) for extent in _scan_copy(tmp_path) for a in extent.blocks]  # what a killed worker would find
    assert records and not set(records) & set(chain(spec, "a", 4).split())
    assert dict(worker.node.applied_seqs())[spec.uid] == 1


def test_removed_for_good_also_what_was_dropped_before_and_is_still_held(
    make_worker: Callable[..., WorkerNode], tmp_path: Path
) -> None:
    """C8: a drop hides a held block but leaves its record; a removal must not be confirmed over it."""
    worker = make_worker(dram=32 * 16384, ssd=f"{tmp_path / 'ssd'}:64MiB")
    spec = worker.fixed_namespace()
    worker.node.catch_up(spec, drop_all=False, missed=[])
    with worker.tcp() as client:
        put(client, spec, "a", 4)
        push_down(worker, client, spec, "a", 4)
        assert hold(client, spec, "a", 4, flags=Flag.NONE).count == 4
        assert worker.node.drop(chain(spec, "a", 4)) == b"\1" * 4
        had, _ = worker.node.remove(spec.uid, chain(spec, "a", 4).keys, removal_seq=1)
        assert had == bytes(4)
    records = [bytes(a.meta.key) for extent in _scan_copy(tmp_path) for a in extent.blocks]
    assert records and not set(records) & set(chain(spec, "a", 4).split())


def _scan_copy(tmp_path: Path) -> Any:
    import shutil

    from kvpool.worker.tiers.ssd import SsdTier
    from kvpool.worker.tiers.staging import StagingPool

    shutil.copytree(tmp_path / "ssd", tmp_path / "copy")
    pool = StagingPool(1 << 20)
    tier = SsdTier(tmp_path / "copy", capacity_bytes=64 << 20, staging=pool)
    try:
        return tier.scan()
    finally:
        tier.close()
        pool.close()
