"""Shared-memory links to workers whose memory is not what they say: stale slots, places outside, missing descriptors, no ring.
Good workers are in test_transport."""

from __future__ import annotations

import mmap
import os
import socket
import time

import numpy as np
import pytest
import xxhash

from kvpool.core.frames import (
    READ_ENTRY,
    CodesAnswer,
    FillRequest,
    Flag,
    Header,
    HoldsRequest,
    NumberRequest,
    Op,
    ReadAnswer,
    ReadRequest,
    Status,
    WriteRequest,
)
from kvpool.core.keys import KeyBatch
from kvpool.core.types import BlockCode, HoldId, MissCause, NamespaceUid, Tiers, miss_code
from kvpool.transport.base import LinkCause, LinkError, LinkOptions, Strided
from kvpool.transport.shm import ShmLink
from tests.support.frame_peer import FramePeer
from tests.support.waiting import pause

UID = NamespaceUid(b"s" * 16)
SIZE = 4096
SLOTS = 1024
HOLD = 9
STALE = miss_code(MissCause.STALE_INDEX)


def batch(n: int) -> KeyBatch:
    return KeyBatch(UID, b"".join(i.to_bytes(34, "little") for i in range(n)))


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


class Memory:
    """An arena of SLOTS blocks, block i full of byte i, and a ring; speaks ATTACH, RING, READ|SHARED and ring puts."""

    def __init__(self) -> None:
        self.data_fd, self.gen_fd, self.ring_fd = (os.memfd_create(f"test-{what}") for what in ("data", "gen", "ring"))
        self.ring_bytes = 1 << 20
        for fd, n_bytes in ((self.data_fd, SLOTS * SIZE), (self.gen_fd, 8 * SLOTS), (self.ring_fd, self.ring_bytes)):
            os.ftruncate(fd, n_bytes)
        self.data, self.gens = mmap.mmap(self.data_fd, SLOTS * SIZE), mmap.mmap(self.gen_fd, 8 * SLOTS)
        self.ring = mmap.mmap(self.ring_fd, self.ring_bytes)
        for i in range(8):
            self.data[i * SIZE : (i + 1) * SIZE] = bytes([i + 1]) * SIZE
        self.attach_fds = (self.data_fd, self.gen_fd)
        self.slot_of = lambda i: i
        self.claimed = 0  # the generation that answers say; the words are 0
        self.spoilt_sum = 0
        self.ring_refused = self.slow = False
        self.released: list[int] = []
        self.puts: dict[int, bytearray] = {}
        self.ops: list[Op] = []

    def script(self, peer: FramePeer, sock: socket.socket, header: Header, meta: bytes, payload: bytes) -> None:
        self.ops.append(header.op)
        getattr(self, "on_" + header.op.name.lower())(peer, sock, header, meta, payload)

    def on_attach(self, peer, sock, header, meta, payload):
        peer.answer(sock, header, CodesAnswer(number=SLOTS * SIZE, count=SLOTS // 1024).encode(), fds=self.attach_fds)

    def on_ring(self, peer, sock, header, meta, payload):
        if self.ring_refused:
            peer.answer(sock, header, b"no room", status=Status.BUSY)
        else:
            peer.answer(sock, header, CodesAnswer(number=self.ring_bytes).encode(), fds=(self.ring_fd,))

    def on_release(self, peer, sock, header, meta, payload):
        self.released += HoldsRequest.decode(meta).hold_ids

    def on_read(self, peer, sock, header, meta, payload):
        request = ReadRequest.decode(meta)
        keys = request.batch.split()
        entries = np.zeros(len(keys), dtype=READ_ENTRY)
        entries["code"], entries["tier"], entries["size"] = BlockCode.HIT_SHARED, Tiers.DRAM, SIZE
        entries["generation"] = self.claimed
        slots = np.array([self.slot_of(int.from_bytes(key[:2], "little")) for key in keys])
        entries["gen_index"], entries["offset"] = slots, slots * SIZE
        sums = []
        if header.flags & Flag.VERIFY:
            entries["n_sums"] = 1
            start, stop = request.offset, request.offset + (request.length or SIZE)
            parts = [self.data[s * SIZE + start : s * SIZE + stop] for s in slots.tolist()]
            sums = [xxhash.xxh3_64_intdigest(part) ^ self.spoilt_sum for part in parts]
        peer.answer(sock, header, ReadAnswer(entries, np.array(sums, dtype=np.uint64), HoldId(HOLD)).encode())

    def on_write(self, peer, sock, header, meta, payload):
        request = WriteRequest.decode(meta)
        at = request.ring_offset
        data = self.ring[:] if header.flags & Flag.RING else payload
        for i, size in enumerate(request.sizes.tolist()):
            self.puts[i] = bytearray(data[at : at + size])
            at += size
        peer.answer(sock, header, CodesAnswer(bytes([BlockCode.STORED]) * len(request.sizes)).encode())

    def on_reserve(self, peer, sock, header, meta, payload):
        self.sizes = WriteRequest.decode(meta).sizes.tolist()
        codes = [BlockCode.RESERVED] * len(self.sizes)
        codes[1] = BlockCode.ALREADY
        self.puts = {i: bytearray(size) for i, size in enumerate(self.sizes) if i != 1}
        peer.answer(sock, header, CodesAnswer(bytes(codes), number=5).encode())

    def on_fill(self, peer, sock, header, meta, payload):
        if self.slow:
            pause(0.02)  # the link runs ahead as far as it dares
        request = FillRequest.decode(meta)
        at = request.ring_offset
        data = self.ring[:] if header.flags & Flag.RING else payload
        for r in request.ranges:
            start, length = int(r["offset"]), int(r["length"])
            self.puts[int(r["block"])][start : start + length] = data[at : at + length]
            at += length
        peer.answer(sock, header, CodesAnswer().encode())

    def on_commit(self, peer, sock, header, meta, payload):
        assert NumberRequest.decode(meta).number == 5
        codes = [BlockCode.ALREADY if i == 1 else BlockCode.STORED for i in range(len(self.sizes))]
        peer.answer(sock, header, CodesAnswer(bytes(codes)).encode())

    def close(self) -> None:
        for mapping in (self.data, self.gens, self.ring):
            mapping.close()
        for fd in (self.data_fd, self.gen_fd, self.ring_fd):
            os.close(fd)


@pytest.fixture
def memory():
    memory = Memory()
    yield memory
    memory.close()


@pytest.fixture
def link(memory):
    with FramePeer(memory.script, unix=True) as peer:
        link = ShmLink(peer.unix_name, LinkOptions())
        yield link
        link.close()


def read(link: ShmLink, n: int, out: memoryview | None = None, **more):
    out = out if out is not None else memoryview(bytearray(n * SIZE))
    return link.read(batch(n), Strided(out, len(out) // n), chunk_bytes=SIZE, deadline=soon(), **more)


def test_blocks_come_out_of_the_arena_and_the_hold_is_released(memory, link):
    memory.slot_of = lambda i: [0, 1, 5, 3][i]
    out = memoryview(bytearray(4 * SIZE))
    got = read(link, 4, out)
    assert got.n_leading == 4
    assert got.codes == bytes([BlockCode.HIT_SHARED]) * 4
    assert bytes(out) == b"".join(bytes([s + 1]) * SIZE for s in (0, 1, 5, 3))
    assert read(link, 4).n_leading == 4
    assert memory.ops.count(Op.ATTACH) == 1
    assert memory.released[:1] == [HOLD]


def test_a_byte_range_of_every_block(memory, link):
    memory.data[SIZE + 100 : SIZE + 105] = b"range"
    out = memoryview(bytearray(10))
    assert read(link, 2, out, byte_range=(100, 5), verify=True).n_leading == 2
    assert bytes(out) == bytes([1]) * 5 + b"range"


def test_a_slot_that_was_used_anew_meanwhile_is_a_miss(memory, link):
    memory.gens[8 * 1 : 8 * 2] = (1).to_bytes(8, "little")
    got = read(link, 3)
    assert got.codes == bytes([BlockCode.HIT_SHARED, STALE, BlockCode.HIT_SHARED])
    assert got.n_leading == 1
    assert link.counters.stale_blocks == 1


def test_verify_finds_a_flipped_bit_in_memory(memory, link):
    assert read(link, 2, verify=True).n_leading == 2
    memory.spoilt_sum = 1
    got = read(link, 2, verify=True)
    assert got.codes == bytes([miss_code(MissCause.CORRUPT)]) * 2
    assert link.counters.corrupt_blocks == 2
    assert read(link, 2).n_leading == 2


@pytest.mark.parametrize("slot", [SLOTS, 1 << 50, -(1 << 40)])
def test_a_place_outside_of_the_arena_is_not_touched(memory, link, slot):
    memory.slot_of = lambda i: slot
    with pytest.raises(LinkError) as caught:
        read(link, 1)
    assert caught.value.cause is LinkCause.PROTOCOL


def test_a_buffer_that_is_too_small_is_refused(memory, link):
    outs = [memoryview(bytearray(SIZE)), memoryview(bytearray(SIZE - 1)), None]
    got = link.read(batch(3), outs, chunk_bytes=SIZE, deadline=soon())
    assert got.codes == bytes([BlockCode.HIT_SHARED, BlockCode.REJECTED, BlockCode.HIT_SHARED])
    assert bytes(outs[1]) == bytes(SIZE - 1)


@pytest.mark.parametrize("fds", ["one", "three", "none", "no memory"])
def test_wrong_descriptors_are_refused_and_closed(memory, link, fds):
    reader, writer = os.pipe()
    memory.attach_fds = {
        "one": (memory.data_fd,),
        "three": (memory.data_fd, memory.gen_fd, memory.ring_fd),
        "none": (),
        "no memory": (reader, writer),
    }[fds]
    with pytest.raises(LinkError) as caught:
        read(link, 1)
    assert caught.value.cause is LinkCause.PROTOCOL
    os.close(reader)
    os.close(writer)


def test_an_arena_shorter_than_it_says_is_not_mapped(memory, link):
    os.ftruncate(memory.gen_fd, 8)
    with pytest.raises(LinkError) as caught:
        read(link, 1)
    assert caught.value.cause is LinkCause.PROTOCOL
    os.ftruncate(memory.gen_fd, 8 * SLOTS)


def blocks_of(sizes):
    return [memoryview(np.random.default_rng(i).bytes(size)) for i, size in enumerate(sizes)]


def put(link, sizes):
    blocks = blocks_of(sizes)
    return link.write(batch(len(sizes)), blocks, chunk_bytes=SIZE, wait_listed=False, deadline=soon()), blocks


def test_a_small_put_is_one_write_through_the_ring(memory, link):
    codes, blocks = put(link, [SIZE, 1, 777])
    assert codes == bytes([BlockCode.STORED]) * 3
    assert [bytes(memory.puts[i]) for i in range(3)] == [bytes(b) for b in blocks]
    assert memory.ops == [Op.RING, Op.WRITE]


def test_a_large_put_goes_through_the_ring_in_parts(memory, link):
    codes, blocks = put(link, [300_000, 50, 900_000, 5, 262_144, 1_000_000])
    assert codes == bytes([BlockCode.ALREADY if i == 1 else BlockCode.STORED for i in range(6)])
    assert all(bytes(memory.puts[i]) == bytes(blocks[i]) for i in range(6) if i != 1)
    assert memory.ops[:2] == [Op.RING, Op.RESERVE]
    assert memory.ops.count(Op.FILL) >= 9
    assert memory.ops[-1] is Op.COMMIT
    assert link.counters.written_blocks == 5


def test_a_part_of_the_ring_is_not_written_again_before_the_worker_has_it(memory, link):
    memory.slow = True
    _, blocks = put(link, [1_500_000, 50, 1_500_000])
    assert all(bytes(memory.puts[i]) == bytes(blocks[i]) for i in (0, 2))


def test_without_a_ring_the_bytes_go_over_the_socket(memory, link):
    memory.ring_refused = True
    for _ in range(2):
        codes, blocks = put(link, [SIZE, 1, 777])
        assert codes == bytes([BlockCode.STORED]) * 3
        assert [bytes(memory.puts[i]) for i in range(3)] == [bytes(b) for b in blocks]
    assert memory.ops == [Op.RING, Op.WRITE, Op.WRITE]
