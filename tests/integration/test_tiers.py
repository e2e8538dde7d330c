"""Contract over all kinds of tier, and what is particular to DRAM (sealed memfds, populate, punch, generations); staging."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from kvpool.core.hashing import block_sum, chunk_sums
from kvpool.core.types import KEY_BYTES, NamespaceUid
from kvpool.worker.tiers.base import STATE_OK, BlockMeta, TierError, TierShell, Trouble
from kvpool.worker.tiers.dram import DramTier
from kvpool.worker.tiers.ssd import SsdTier, SsdWrite
from kvpool.worker.tiers.staging import StagingPool
from tests.support.payload import check, payload

UID = NamespaceUid(bytes(range(16)))
OTHER = NamespaceUid(bytes(range(16, 32)))
MIB = 1 << 20
SLOT_BYTES = 20_000  # no whole number of pages: the hard case
N_SLOTS = 40


def soon() -> float:
    return time.monotonic() + 10


class Slots(Protocol):
    """One tier, seen as an array of slots of SLOT_BYTES."""

    shell: TierShell

    def write(self, index: int, data: bytes) -> None: ...

    def read(self, index: int, size: int) -> bytes: ...


class DramSlots:
    def __init__(self) -> None:
        self.shell = self.tier = DramTier(capacity_bytes=N_SLOTS * SLOT_BYTES, arena_bytes=8 * MIB, gen_words=N_SLOTS)
        self.tier.open_arena(UID)
        self.tier.populate(UID, 0, N_SLOTS * SLOT_BYTES)

    def write(self, index: int, data: bytes) -> None:
        with self.tier.view(UID, index * SLOT_BYTES, len(data)) as view:
            view[:] = data

    def read(self, index: int, size: int) -> bytes:
        with self.tier.view(UID, index * SLOT_BYTES, size) as view:
            return bytes(view)


class SsdSlots:
    def __init__(self, directory: Path, *, buffered: bool) -> None:
        self.staging = StagingPool(2 * MIB)
        self.shell = self.tier = SsdTier(directory, capacity_bytes=8 * MIB, staging=self.staging, buffered=buffered)
        self.tier.scan()
        self.tier.create_extent(0, namespace=UID, slot_bytes=SLOT_BYTES, n_slots=N_SLOTS)
        self.sums: dict[int, int] = {}

    def write(self, index: int, data: bytes) -> None:
        total = block_sum(chunk_sums(data, 4096).tobytes())
        meta = BlockMeta(UID, os.urandom(KEY_BYTES), len(data), total)
        self.sums[index] = total
        self.tier.write([SsdWrite(index, meta, memoryview(data))], deadline=soon())

    def read(self, index: int, size: int) -> bytes:
        with self.tier.read_block(index, size=size, chunk_bytes=4096, block_sum=self.sums[index], deadline=soon()) as block:
            return bytes(block.view)


@pytest.fixture(params=["dram", "ssd", "ssd-buffered"])
def slots(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slots]:
    made: DramSlots | SsdSlots
    made = DramSlots() if request.param == "dram" else SsdSlots(tmp_path, buffered=request.param == "ssd-buffered")
    yield made
    made.shell.close()


def test_every_size_comes_back_as_it_went_in(slots: Slots) -> None:
    sizes = [1, 511, 512, 4095, 4096, 4097, 8192, SLOT_BYTES - 1, SLOT_BYTES]
    for index, size in enumerate(sizes):
        slots.write(index, payload(index, 1, size))
    for index, size in enumerate(sizes):
        check(index, slots.read(index, size), size=size)


def test_a_full_tier_keeps_every_block_and_its_neighbours(slots: Slots) -> None:
    for index in range(N_SLOTS):
        slots.write(index, payload(index, 1, SLOT_BYTES))
    for index in range(0, N_SLOTS, 3):
        slots.write(index, payload(index, 2, SLOT_BYTES - 77))
    for index in range(N_SLOTS):
        size, version = (SLOT_BYTES - 77, 2) if index % 3 == 0 else (SLOT_BYTES, 1)
        check(index, slots.read(index, size), versions=(version,), size=size)


def test_threads_on_different_slots_do_not_disturb_each_other(slots: Slots) -> None:
    wrong: list[BaseException] = []

    def work(lane: int) -> None:
        try:
            for version in range(1, 9):
                for index in range(lane, N_SLOTS, 4):
                    slots.write(index, payload(index, version, 9000 + index))
                    check(index, slots.read(index, 9000 + index), versions=(version,), size=9000 + index)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_state_and_use_after_close(slots: Slots) -> None:
    assert slots.shell.state == STATE_OK
    assert all(isinstance(count, int) for count in slots.shell.counters().values())
    slots.write(0, b"x" * 5000)
    slots.shell.close()
    assert slots.shell.state == "closed"
    with pytest.raises(TierError) as caught:
        slots.read(0, 5000)
    assert caught.value.trouble is Trouble.CLOSED
    slots.shell.close()


# -- DRAM --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dram() -> Iterator[DramTier]:
    tier = DramTier(capacity_bytes=4 * MIB, arena_bytes=1 << 40, gen_words=1 << 20)
    tier.open_arena(UID)
    yield tier
    tier.close()


def test_a_huge_arena_costs_nothing_until_it_is_populated(dram: DramTier) -> None:
    assert dram.resident_bytes() == 0
    dram.populate(UID, 1 << 30, MIB)
    assert dram.resident_bytes() == MIB
    dram.punch(UID, 1 << 30, MIB)
    assert dram.resident_bytes() == 0


def test_populate_keeps_contents_and_punch_takes_only_whole_pages_inside(dram: DramTier) -> None:
    dram.view(UID, 0, 3 * 4096)[:] = b"a" * (3 * 4096)
    dram.populate(UID, 0, 3 * 4096)
    assert bytes(dram.view(UID, 0, 3 * 4096)) == b"a" * (3 * 4096)
    dram.punch(UID, 100, 2 * 4096)
    assert bytes(dram.view(UID, 0, 3 * 4096)) == b"a" * 4096 + bytes(4096) + b"a" * 4096


def test_a_client_sees_blocks_and_generations_through_its_own_mapping(dram: DramTier) -> None:
    fds = dram.fds(UID)
    with mmap.mmap(fds.data_fd, 8192, prot=mmap.PROT_READ) as data, mmap.mmap(fds.gen_fd, 4096, prot=mmap.PROT_READ) as words:
        dram.view(UID, 4096, 5)[:] = b"hello"
        assert data[4096:4101] == b"hello"
        assert np.frombuffer(words, dtype=np.uint64)[7] == dram.generation(UID, 7) == 0
        dram.bump(UID, 7)
        assert np.frombuffer(words, dtype=np.uint64)[7] == dram.generation(UID, 7) == 1
        assert dram.generation(UID, 6) == dram.generation(UID, 8) == 0


@pytest.mark.parametrize("which", ["data_fd", "gen_fd"])
def test_the_fds_of_clients_cannot_be_written_mapped_or_resized(dram: DramTier, which: str) -> None:
    fd = getattr(dram.fds(UID), which)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    for call in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 0)):
        with pytest.raises(OSError):
            call()
    # and nobody who opens the memfd again, root included, can make a mapping fault by cutting it
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR) if os.geteuid() == 0 else fd
    try:
        for size in (0, 1 << 41):
            with pytest.raises(OSError):
                os.ftruncate(again, size)
    finally:
        if again != fd:
            os.close(again)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_a_passed_fd_for_writing(dram: DramTier) -> None:
    fd = dram.fds(UID).data_fd
    program = (
        f"import os\nos.setuid(65534)\ntry: os.open('/proc/self/fd/{fd}', os.O_RDWR)\nexcept PermissionError: print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", program], pass_fds=[fd], capture_output=True, text=True, timeout=30)
    assert done.stdout == "refused\n", done.stderr


def test_arenas_are_apart_and_a_closed_one_gives_its_memory_back_under_a_living_view(dram: DramTier) -> None:
    dram.open_arena(OTHER)
    dram.open_arena(OTHER)
    dram.view(UID, 0, 4)[:] = b"mine"
    held = dram.view(OTHER, 0, 4)
    held[:] = b"your"
    assert bytes(dram.view(UID, 0, 4)) == b"mine"
    dram.close_arena(OTHER)
    assert bytes(held) == bytes(4)  # readable, not a fault
    with pytest.raises(TierError):
        dram.fds(OTHER)
    dram.punch(OTHER, 0, 4096)
    dram.bump(OTHER, 0)
    held.release()


def test_views_outside_of_the_arena_are_refused(dram: DramTier) -> None:
    for offset, size in ((-1, 1), (1 << 40, 1), ((1 << 40) - 1, 2), (0, -1)):
        with pytest.raises(ValueError):
            dram.view(UID, offset, size)


def test_nothing_is_left_after_kill_9_and_dev_shm_is_not_used() -> None:
    program = (
        "import sys\nfrom kvpool.worker.tiers.dram import DramTier\n"
        "tier = DramTier(capacity_bytes=1 << 20, arena_bytes=1 << 30, gen_words=512)\ntier.open_arena(bytes(16))\n"
        "tier.populate(bytes(16), 0, 1 << 20)\nprint('ready', flush=True)\nsys.stdin.read()"
    )
    before = set(Path("/dev/shm").iterdir())
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert set(Path("/dev/shm").iterdir()) == before
        child.send_signal(signal.SIGKILL)
    assert set(Path("/dev/shm").iterdir()) == before


def test_no_fds_left_means_a_tier_error_and_no_leak(dram: DramTier) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    for spare in range(4):
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_open - 1 + spare, hard))
        try:
            with pytest.raises(TierError):
                dram.open_arena(OTHER)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(Path("/proc/self/fd").iterdir())) == n_open


# -- staging -----------------------------------------------------------------------------------------------------------


def test_staging_is_aligned_and_used_again() -> None:
    pool = StagingPool(MIB)
    with pool.take(5000, deadline=soon()) as first:
        address = np.frombuffer(first.view, dtype=np.uint8).ctypes.data
        assert len(first.view) == 8192 and address % 4096 == 0
    with pool.take(6000, deadline=soon()) as second:
        assert np.frombuffer(second.view, dtype=np.uint8).ctypes.data == address
    pool.close()


def test_staging_blocks_when_empty_until_the_deadline_and_wakes_on_release() -> None:
    pool = StagingPool(8192)
    first = pool.take(8192, deadline=soon())
    with pytest.raises(TierError) as caught:
        pool.take(1, deadline=time.monotonic() + 0.02)
    assert caught.value.trouble is Trouble.BUSY and not caught.value.is_out
    got = threading.Event()

    def wait() -> None:
        with pool.take(8192, deadline=soon()):
            got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not got.is_set()
    first.release()
    assert got.wait(5)
    thread.join()
    assert pool.used_bytes == 0
    pool.close()


def test_staging_serves_in_order_of_arrival_and_an_oversized_one_alone() -> None:
    pool = StagingPool(16384)
    first = pool.take(8192, deadline=soon())
    order: list[str] = []
    queued = threading.Event()

    def big() -> None:
        queued.set()
        with pool.take(1 * MIB, deadline=soon()):
            order.append("big")

    def small() -> None:
        with pool.take(4096, deadline=soon()):
            order.append("small")

    threads = [threading.Thread(target=big), threading.Thread(target=small)]
    threads[0].start()
    queued.wait(5)
    while pool.waiting < 1:
        os.sched_yield()
    threads[1].start()
    while pool.waiting < 2:
        os.sched_yield()
    assert order == []  # the small one would fit, but came later
    first.release()
    for thread in threads:
        thread.join()
    assert order == ["big", "small"] and pool.used_bytes == 0
    pool.close()


def test_staging_memory_stays_within_the_budget_over_many_sizes() -> None:
    pool = StagingPool(64 * 4096)
    for n_pages in [*range(1, 65), *range(64, 0, -1)]:
        with pool.take(n_pages * 4096, deadline=soon()):
            assert pool.used_bytes + pool.kept_bytes <= pool.capacity_bytes
    assert pool.used_bytes == 0
    pool.close()
    with pytest.raises(TierError):
        pool.take(1, deadline=soon())


def test_staging_that_is_still_looked_at_is_not_given_to_the_next() -> None:
    pool = StagingPool(MIB)
    first = pool.take(4096, deadline=soon())
    kept = first.view[:10]
    first.release()
    with pool.take(4096, deadline=soon()) as second:
        second.view[:10] = b"b" * 10
        assert bytes(kept) == bytes(10)
    kept.release()
    pool.close()
