"""Contract of links (`transport.base.WorkerLink`), over TCP and over shared memory, against a real worker node in this process.
The master is a thread that acknowledges every report."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.config import load
from kvpool.core.keys import KeyBatch, pack_keys
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import MISS_BASE, BlockCode, MissCause, NamespaceUid, Tiers, miss_cause
from kvpool.errors import InvalidArgument, Unauthenticated
from kvpool.transport.base import LinkCause, LinkError, LinkOptions, Range, Strided, WorkerLink
from kvpool.transport.choose import link as choose_link
from kvpool.transport.host import host_id
from kvpool.transport.shm import ShmLink
from kvpool.transport.tcp import TcpLink
from kvpool.worker.build import build_node
from kvpool.worker.dataplane import DataPlane
from tests.support.waiting import wait_until

TOKEN = "open sesame"
BLOCK = 64 << 10
CHUNK = 16 << 10  # n_layers=4
DRAM = 512 * BLOCK
STORED, ALREADY, FULL, REJECTED, UNLISTED = (
    int(c) for c in (BlockCode.STORED, BlockCode.ALREADY, BlockCode.FULL, BlockCode.REJECTED, BlockCode.UNLISTED)
)
HITS = (BlockCode.HIT_INLINE, BlockCode.HIT_SHARED)


class Worker:
    """A node and its data plane, with a namespace of fixed blocks and one of opaque values, and a master that says yes."""

    def __init__(self, directory, **flags) -> None:
        layout = KVLayout(model="m", revision="r", dtype="uint8", n_layers=4, n_kv_heads=1, head_dim=128, block_tokens=64,
                          format="f")  # fmt: skip
        self.fixed = NamespaceSpec.of("fixed", layout, uid=NamespaceUid(b"f" * 16))
        self.opaque = NamespaceSpec.of("opaque", KVLayout.opaque(block_bytes=80 << 20), uid=NamespaceUid(b"o" * 16))
        assert (self.fixed.block_bytes, self.fixed.chunk_bytes) == (BLOCK, CHUNK)
        self.settings = load("worker", flags={"dram": DRAM, "data_dir": str(directory), **flags})
        self.node = build_node(self.settings)
        self.plane = DataPlane(self.node, self.settings, token=TOKEN.encode())
        self.node.start()
        self.plane.start()
        for spec in (self.fixed, self.opaque):
            self.node.open_namespace(spec, applied_seq=0, blocked=False)
        with self.node.lock:
            self.node.reporter.begin_inventory()
        self._recorded, self._ended = threading.Event(), False
        self.node.on_record(self._recorded.set)
        self.node.listed.set_session(up=True)
        self._master = threading.Thread(target=self._acknowledge)
        self._master.start()

    def _acknowledge(self) -> None:
        while not self._ended:
            self._recorded.wait()
            self._recorded.clear()
            while True:
                with self.node.lock:
                    report = self.node.reporter.take()
                if report is None:
                    break
                self.node.on_ack(report.seq)

    # what the master's HolderInfo says
    worker_id = "w"

    @property
    def incarnation(self) -> int:
        return int(self.node.incarnation)

    @property
    def host_id(self) -> str:
        return host_id()

    @property
    def address(self) -> str:
        return self.plane.address

    @property
    def unix_name(self) -> str:
        return self.plane.unix_name

    def link(self, transport: str, **more) -> WorkerLink:
        options = LinkOptions(transport=transport, token=TOKEN, host_id=host_id(), **more)
        return choose_link(self, options, deadline=soon())

    def close(self) -> None:
        self._ended = True
        self._recorded.set()
        self._master.join()
        self.plane.stop()
        self.node.close()


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def batch(spec: NamespaceSpec, n: int, *, first: int = 0, seed: int = 1) -> KeyBatch:
    hashes = b"".join(seed.to_bytes(8, "big") + i.to_bytes(24, "big") for i in range(first, first + n))
    return KeyBatch(spec.uid, pack_keys(hashes, shard=0), depth=first)


def values(n: int, size: int = BLOCK, *, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, size), dtype=np.uint8)


def row(array: np.ndarray) -> Strided:
    return Strided(array.reshape(-1).data, array.shape[1])


def put(link: WorkerLink, spec: NamespaceSpec, data: np.ndarray, *, first=0, seed=1, wait_listed=True) -> bytes:
    return link.write(batch(spec, len(data), first=first, seed=seed), row(data), chunk_bytes=spec.chunk_bytes,
                      wait_listed=wait_listed, deadline=soon())  # fmt: skip


def get(link: WorkerLink, spec: NamespaceSpec, n: int, *, out: np.ndarray | None = None, first: int = 0, seed: int = 1, **more):
    out = np.zeros((n, spec.block_bytes), dtype=np.uint8) if out is None else out
    got = link.read(batch(spec, n, first=first, seed=seed), row(out), chunk_bytes=spec.chunk_bytes, deadline=soon(), **more)
    return got, out


@pytest.fixture
def worker(tmp_path) -> Iterator[Worker]:
    worker = Worker(tmp_path / "worker")
    yield worker
    worker.close()


@pytest.fixture(params=["tcp", "shm"])
def link(worker, request) -> Iterator[WorkerLink]:
    link = worker.link(request.param)
    assert link.transport == request.param
    yield link
    link.close()


def test_what_was_put_is_got(worker, link):
    data = values(40)
    assert put(link, worker.fixed, data) == bytes([STORED]) * 40
    got, out = get(link, worker.fixed, 40)
    assert got.n_leading == 40
    assert got.tiers == bytes([Tiers.DRAM]) * 40
    assert got.sizes == [BLOCK] * 40
    assert (out == data).all()
    assert put(link, worker.fixed, data[:3]) == bytes([ALREADY]) * 3
    assert link.counters.written_blocks == 40
    assert link.counters.read_bytes == 40 * BLOCK
    assert isinstance(link, WorkerLink)


@pytest.mark.parametrize("n", [1, 300, 500])
def test_puts_and_gets_of_any_length(worker, link, n):
    """500 blocks are 31 MiB: more than half a ring, several lanes."""
    data = values(n)
    assert put(link, worker.fixed, data) == bytes([STORED]) * n
    got, out = get(link, worker.fixed, n)
    assert got.n_leading == n
    assert (out == data).all()


def test_scattered_buffers(worker, link):
    data = values(20)
    codes = link.write(batch(worker.fixed, 20), [block.tobytes() and memoryview(block.tobytes()) for block in data],
                       chunk_bytes=CHUNK, wait_listed=False, deadline=soon())  # fmt: skip
    assert codes == bytes([STORED]) * 20
    outs: list[memoryview | None] = [memoryview(bytearray(BLOCK)) for _ in range(20)]
    outs[7] = None
    got = link.read(batch(worker.fixed, 20), outs, chunk_bytes=CHUNK, deadline=soon())
    assert got.n_leading == 20
    assert all(out is None or bytes(out) == data[i].tobytes() for i, out in enumerate(outs))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("offset", "length"), [(0, CHUNK), (CHUNK, CHUNK), (5, 1), (BLOCK - 3, 3), (100, 40_000)])
def test_byte_ranges(worker, link, offset, length, verify):
    data = values(6)
    put(link, worker.fixed, data)
    out = np.zeros((6, length), dtype=np.uint8)
    got, _ = get(link, worker.fixed, 6, out=out, byte_range=(offset, length), verify=verify)
    assert got.n_leading == 6
    assert (out == data[:, offset : offset + length]).all()


def test_missing_blocks(worker, link):
    put(link, worker.fixed, values(5))
    put(link, worker.fixed, values(3, seed=2), first=6)
    got, out = get(link, worker.fixed, 9)
    assert got.n_leading == 5
    assert [code in HITS for code in got.codes] == [True] * 5 + [False] + [True] * 3
    assert miss_cause(got.codes[5]) is MissCause.NEVER_STORED
    assert (out[6:] == values(3, seed=2)).all()
    got, _ = get(link, worker.fixed, 9, first_miss=True)
    assert got.n_leading == 5
    assert got.codes[6:] == bytes([BlockCode.LATER]) * 3
    assert link.drop(batch(worker.fixed, 2, first=4), deadline=soon()) == bytes([1, 0])
    got, _ = get(link, worker.fixed, 5)
    assert miss_cause(got.codes[4]) is MissCause.REMOVED


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_values_of_any_size(tmp_path, transport):
    """One is larger than a frame, and than a ring."""
    worker = Worker(tmp_path / "large", dram=256 << 20)
    try:
        link = worker.link(transport)
        check_values_of_any_size(worker, link)
        link.close()
    finally:
        worker.close()


def check_values_of_any_size(worker, link):
    sizes = [1, 513, 70_000, 3 << 20, 70 << 20, 262_144]
    blocks = [memoryview(values(1, size, seed=size)[0].tobytes()) for size in sizes]
    codes = link.write(batch(worker.opaque, 6), blocks, chunk_bytes=worker.opaque.chunk_bytes, wait_listed=True, deadline=soon())
    assert codes == bytes([STORED]) * 6
    outs = [memoryview(bytearray(size + 10)) for size in sizes]
    outs[2] = outs[2][: sizes[2] - 1]
    got = link.read(batch(worker.opaque, 6), outs, chunk_bytes=worker.opaque.chunk_bytes, deadline=soon())
    assert got.sizes == sizes
    assert got.codes[2] == REJECTED
    assert not any(outs[2])
    assert all(outs[i][:size] == blocks[i] and not any(outs[i][size:]) for i, size in enumerate(sizes) if i != 2)
    got = link.read(batch(worker.opaque, 6), outs, chunk_bytes=worker.opaque.chunk_bytes, deadline=soon(), byte_range=(500, 13))
    assert [code in HITS for code in got.codes] == [False, True, True, True, True, True]
    assert got.codes[0] == REJECTED
    assert outs[1][:13] == blocks[1][500:513]


def test_a_put_longer_than_the_tier_stores_the_head(worker, link):
    data = values(600, seed=5)
    codes = put(link, worker.fixed, data)
    assert codes == bytes([STORED]) * 512 + bytes([FULL]) * 88
    got, out = get(link, worker.fixed, 600)
    assert got.n_leading == 512
    assert (out[:512] == data[:512]).all()


def test_a_wrong_size_is_rejected(worker, link):
    data = [memoryview(bytes(BLOCK)), memoryview(bytes(BLOCK - 1))]
    codes = link.write(batch(worker.fixed, 2), data, chunk_bytes=CHUNK, wait_listed=False, deadline=soon())
    assert codes == bytes([STORED, REJECTED])


def test_while_the_master_is_away_blocks_are_unlisted(worker, link):
    worker.node.listed.set_session(up=False)
    worker.node.on_ack = lambda seq: None
    assert put(link, worker.fixed, values(2)) == bytes([UNLISTED]) * 2
    assert put(link, worker.fixed, values(2, seed=2), seed=2, wait_listed=False) == bytes([STORED]) * 2
    assert get(link, worker.fixed, 2)[0].n_leading == 2
    touched = link.touch(batch(worker.fixed, 2), wait_listed=True, deadline=soon())
    assert (touched.tiers, touched.listed) == (bytes([Tiers.DRAM]) * 2, False)


def test_touch(worker, link):
    put(link, worker.fixed, values(3))
    touched = link.touch(batch(worker.fixed, 5), wait_listed=True, deadline=soon())
    assert touched.tiers == bytes([Tiers.DRAM] * 3 + [0] * 2)
    assert touched.listed


def test_holds(worker, link):
    put(link, worker.fixed, values(4))
    held = link.hold(batch(worker.fixed, 6), 30_000, deadline=soon())
    assert held.count == 4
    assert held.hold_id
    assert link.renew([held.hold_id, 12345], 30_000, deadline=soon()) == bytes([1, 0])
    link.drop(batch(worker.fixed, 4), deadline=soon())
    link.release([held.hold_id, 0])
    wait_until(lambda: link.renew([held.hold_id], 30_000, deadline=soon()) == bytes([0]), what="the hold is over")


def test_a_hold_outlives_its_connection(worker, link):
    put(link, worker.fixed, values(4))
    other = worker.link(link.transport)
    held = other.hold(batch(worker.fixed, 4), 30_000, deadline=soon())
    other.close()
    wait_until(lambda: worker.plane.n_connections <= 1)
    assert link.renew([held.hold_id], 30_000, deadline=soon()) == bytes([1])
    link.release([held.hold_id])


def test_layer_by_layer(worker, link):
    data = values(3)
    put(link, worker.fixed, data[1:2], first=1)
    keys = batch(worker.fixed, 3)
    held = link.reserve(keys, [BLOCK] * 3, deadline=soon())
    assert held.codes == bytes([BlockCode.RESERVED, ALREADY, BlockCode.RESERVED])
    for layer in range(4):
        part = slice(layer * CHUNK, (layer + 1) * CHUNK)
        link.fill(held, [Range(i, layer * CHUNK, data[i, part].data) for i in (0, 2)], deadline=soon())
        assert get(link, worker.fixed, 1)[0].n_leading == 0
    assert link.commit(held, wait_listed=True, deadline=soon()) == bytes([STORED, ALREADY, STORED])
    got, out = get(link, worker.fixed, 3)
    assert got.n_leading == 3
    assert (out == data).all()
    with pytest.raises(InvalidArgument, match="reservation"):
        link.commit(held, wait_listed=False, deadline=soon())


def test_a_block_with_a_hole_is_not_stored(worker, link):
    held = link.reserve(batch(worker.fixed, 1), [BLOCK], deadline=soon())
    link.fill(held, [Range(0, 0, memoryview(bytes(CHUNK))), Range(0, 2 * CHUNK, memoryview(bytes(2 * CHUNK)))], deadline=soon())
    assert link.commit(held, wait_listed=False, deadline=soon()) == bytes([REJECTED])
    assert get(link, worker.fixed, 1)[0].n_leading == 0


def test_an_aborted_reservation_leaves_nothing(worker, link):
    for _ in range(3):
        held = link.reserve(batch(worker.fixed, 512), [BLOCK] * 512, deadline=soon())
        assert held.codes == bytes([BlockCode.RESERVED]) * 512
        link.abort(held)
        link.abort(held)
    with pytest.raises(InvalidArgument, match="ended"):
        link.fill(held, [Range(0, 0, memoryview(bytes(4)))], deadline=soon())
    held = link.reserve(batch(worker.fixed, 1), [BLOCK], deadline=soon())
    for bad in (Range(1, 0, memoryview(bytes(4))), Range(0, BLOCK - 3, memoryview(bytes(4))), Range(0, 0, memoryview(b""))):
        with pytest.raises(InvalidArgument, match="range"):
            link.fill(held, [bad], deadline=soon())
    link.abort(held)


def test_unknown_namespaces_and_tokens(worker, link):
    strange = KeyBatch(NamespaceUid(b"?" * 16), bytes(34))
    outs = [memoryview(bytearray(4))]
    for call in (
        lambda: link.read(strange, outs, chunk_bytes=4096, deadline=soon()),
        lambda: link.write(strange, outs, chunk_bytes=4096, wait_listed=True, deadline=soon()),
        lambda: link.touch(strange, wait_listed=True, deadline=soon()),
        lambda: link.reserve(strange, [4], deadline=soon()),
    ):
        with pytest.raises(LinkError) as caught:
            call()
        assert caught.value.cause is LinkCause.UNKNOWN_NAMESPACE
    assert put(link, worker.fixed, values(1)) == bytes([STORED])
    with pytest.raises(Unauthenticated):
        choose_link(worker, LinkOptions(transport=link.transport, token="wrong", host_id=host_id()), deadline=soon())


def test_many_threads_on_one_link(worker, link):
    wrong: list[str] = []

    def work(seed: int) -> None:
        data = values(8, seed=seed)
        for round_ in range(6):
            codes = put(link, worker.fixed, data, seed=seed)
            got, out = get(link, worker.fixed, 8, seed=seed)
            if set(codes) - {STORED, ALREADY} or got.n_leading != 8 or not (out == data).all():
                wrong.append(f"thread {seed} round {round_}: {codes!r} {got}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_stat(worker, link):
    put(link, worker.fixed, values(3))
    facts = link.stat(deadline=soon())
    assert facts["incarnation"] == worker.incarnation == link.incarnation
    assert facts["tiers"]["dram"]["blocks"] == 3


def test_a_worker_that_stops_is_noticed_at_once(worker, link):
    put(link, worker.fixed, values(1))
    worker.plane.stop()
    start = time.monotonic()
    with pytest.raises(LinkError) as caught:
        get(link, worker.fixed, 1)
    assert caught.value.cause in (LinkCause.CLOSED, LinkCause.REFUSED)
    assert time.monotonic() - start < 5


# --- shared memory alone --------------------------------------------------------------------------------------------------


@pytest.fixture
def shm(worker) -> Iterator[WorkerLink]:
    link = worker.link("shm")
    yield link
    link.close()


def test_views_are_the_pools_own_memory(worker, shm):
    data = values(5)
    put(shm, worker.fixed, data)
    viewed = shm.view(batch(worker.fixed, 7), deadline=soon())
    assert len(viewed.views) == 5
    assert all(view.readonly and bytes(view) == data[i].tobytes() for i, view in enumerate(viewed.views))
    assert miss_cause(viewed.codes[5]) is not None
    shm.drop(batch(worker.fixed, 5), deadline=soon())
    put(shm, worker.fixed, values(507, seed=9), seed=9)
    assert all(bytes(view) == data[i].tobytes() for i, view in enumerate(viewed.views)), "held blocks were used anew"
    assert shm.renew([viewed.hold_id], 10_000, deadline=soon()) == bytes([1])
    shm.release([viewed.hold_id])  # (nobody waits for it)
    wait_until(lambda: shm.renew([viewed.hold_id], 10_000, deadline=soon()) == bytes([0]), what="the hold is over")
    assert not shm.view(batch(worker.fixed, 1, seed=3), deadline=soon()).views


def test_a_view_is_lost_with_its_connection(worker, shm):
    put(shm, worker.fixed, values(1))
    viewed = shm.view(batch(worker.fixed, 1), deadline=soon())
    shm._views.connection.shutdown()
    assert shm.renew([viewed.hold_id], 10_000, deadline=soon()) == bytes([0])
    assert len(shm.view(batch(worker.fixed, 1), deadline=soon()).views) == 1


def test_a_closed_link_leaves_views_readable(worker, shm):
    data = values(1)
    put(shm, worker.fixed, data)
    other = worker.link("shm")
    view = other.view(batch(worker.fixed, 1), deadline=soon()).views[0]
    other.close()
    assert bytes(view) == data[0].tobytes()


def test_reads_do_not_cross_the_socket(worker, shm):
    put(shm, worker.fixed, values(9))
    got, _ = get(shm, worker.fixed, 9)
    assert got.codes == bytes([BlockCode.HIT_SHARED]) * 9
    counters = worker.plane.counters()
    assert counters["bytes_read_inline"] == 0
    assert counters["bytes_out"] < BLOCK


def test_the_arena_cannot_be_written(worker, shm):
    put(shm, worker.fixed, values(1))
    viewed = shm.view(batch(worker.fixed, 1), deadline=soon())
    with pytest.raises(TypeError):
        viewed.views[0][0] = 1
    with pytest.raises(ValueError, match=r"WRITEABLE"):
        np.frombuffer(viewed.views[0], dtype=np.uint8).setflags(write=True)
    shm.release([viewed.hold_id])


def test_which_transport(worker):
    here, away = LinkOptions(token=TOKEN, host_id=host_id()), LinkOptions(token=TOKEN, host_id="elsewhere")
    for options, cls in ((here, ShmLink), (away, TcpLink)):
        link = choose_link(worker, options, deadline=soon())
        assert type(link) is cls
        link.close()
    with pytest.raises(LinkError, match="not on this host"):
        choose_link(worker, LinkOptions(transport="shm", token=TOKEN, host_id="elsewhere"), deadline=soon())
    with pytest.raises(InvalidArgument, match="transport"):
        choose_link(worker, LinkOptions(transport="pigeon"), deadline=soon())


def test_an_ssd_block_comes_back_checked(tmp_path):
    """Filled four times over, with a SSD tier: early blocks are on SSD, and every one is right, whichever way it takes."""
    worker = Worker(tmp_path / "worker", dram=64 * BLOCK, ssd=f"{tmp_path / 'ssd'}:{1024 * BLOCK}")
    try:
        links = [worker.link("shm"), worker.link("tcp")]
        for seed in range(8):
            assert put(links[0], worker.fixed, values(32, seed=seed), seed=seed) == bytes([STORED]) * 32
        tiers = set()
        for seed in range(8):
            got, out = get(links[seed % 2], worker.fixed, 32, seed=seed)
            assert got.n_leading == 32, [miss_cause(code) for code in got.codes if code >= MISS_BASE]
            assert (out == values(32, seed=seed)).all()
            tiers |= set(got.tiers)
        assert Tiers.SSD in tiers
        viewed = links[0].view(batch(worker.fixed, 8, seed=0), deadline=soon())
        assert [bytes(view) for view in viewed.views] == [block.tobytes() for block in values(32, seed=0)[:8]]
        for link in links:
            link.close()
    finally:
        worker.close()
