"""The mover with the real block table and the real tiers, on a temporary directory (a scratch disk where one may be mounted)."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.core.blocks import Block, BlockTable, Limits
from kvpool.core.hashing import chunk_sums
from kvpool.core.keys import KeyBatch
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.slots import SlabAllocator
from kvpool.core.types import KEY_BYTES, NO_PARENT, BlockCode, NamespaceUid
from kvpool.worker.mover import Mover
from kvpool.worker.tiers.base import STATE_OK, TierError, Trouble
from kvpool.worker.tiers.dram import DramTier
from kvpool.worker.tiers.slab_file import overhead_bytes
from kvpool.worker.tiers.ssd import SsdTier
from kvpool.worker.tiers.staging import StagingPool
from tests.support.payload import check, payload
from tests.support.waiting import pause, wait_until

BLOCK = 16_384
UID = NamespaceUid(b"m" * 16)
SPEC = NamespaceSpec.of("chat", KVLayout.opaque(block_bytes=BLOCK), uid=UID)
N_DRAM = 32
MIB = 1 << 20


def keys_of(numbers: range) -> KeyBatch:
    return KeyBatch(UID, b"".join(i.to_bytes(KEY_BYTES, "little") for i in numbers), NO_PARENT, 0, chained=False)


class Pool:
    """One worker's tiers, table and mover, without sockets."""

    def __init__(self, directory: Path | None, *, ssd_bytes: int = 16 * MIB, **ssd_settings: object) -> None:
        self.lock = threading.Lock()
        self.room = threading.Condition()
        self.n_rooms = 0
        slots = SlabAllocator(capacity_bytes=N_DRAM * BLOCK)
        self.dram = DramTier(capacity_bytes=N_DRAM * BLOCK, arena_bytes=slots.arena_bytes, gen_words=slots.gen_words)
        self.dram.open_arena(UID)
        self.ssd: SsdTier | None = None
        ssd_slots = None
        if directory is not None:
            settings = {"capacity_bytes": ssd_bytes, "staging": StagingPool(4 * MIB)} | ssd_settings
            self.ssd = SsdTier(directory, **settings)  # type: ignore[arg-type]
            self.ssd.scan()
            capacity = self.ssd.slab_capacity_bytes
            ssd_slots = SlabAllocator(capacity_bytes=capacity, align=4096, overhead_bytes=overhead_bytes, grow=False)
        self.table = BlockTable(
            dram=slots, ssd=ssd_slots, limits=Limits(low_watermark=0.5), bump=self.dram.bump, generation=self.dram.generation
        )
        self.table.open_namespace(SPEC)
        self.mover = Mover(
            self.table, lock=self.lock, dram=self.dram, ssd=self.ssd, on_room=self._on_room, now_ms=self.now_ms,
            retry_s_min=0.02, retry_s_max=0.1,
        )  # fmt: skip
        self.mover.start()

    @staticmethod
    def now_ms() -> int:
        return time.monotonic_ns() // 1_000_000

    def _on_room(self) -> None:
        with self.room:
            self.n_rooms += 1
            self.room.notify_all()

    def put(self, numbers: range, *, timeout_s: float = 10.0) -> list[int]:
        """Codes; waits for room as the data plane does: until the deadline."""
        deadline = time.monotonic() + timeout_s
        codes = []
        for i in numbers:
            while True:
                with self.room:
                    seen = self.n_rooms
                with self.lock:
                    reserved = self.table.reserve(keys_of(range(i, i + 1)), [BLOCK], now_ms=self.now_ms())
                self.mover.kick()
                if reserved.codes[0] != BlockCode.FULL or not reserved.must_wait:
                    break
                with self.room:
                    if not self.room.wait_for(lambda seen=seen: self.n_rooms > seen, deadline - time.monotonic()):  # type: ignore[misc]
                        break
            block = reserved.blocks[0]
            if block is not None:
                with self.lock:
                    arena, offset, _ = self.table.dram.place(block.dram)
                data = payload(i, 1, BLOCK)
                with self.dram.view(arena, offset, BLOCK) as view:
                    view[:] = data
                with self.lock:
                    sums = [chunk_sums(data, SPEC.chunk_bytes).tobytes()]
                    codes.append(self.table.commit([block], sums, now_ms=self.now_ms())[0])
                self.mover.kick()
            else:
                codes.append(reserved.codes[0])
        return codes

    def get(self, i: int) -> str | None:
        """Reads and checks one block: the tier it came from, or None for a miss."""
        with self.lock:
            block = self.table.pin(keys_of(range(i, i + 1)), now_ms=self.now_ms()).blocks[0]
        if block is None:
            return None
        try:
            return self._read(i, block)
        finally:
            with self.lock:
                self.table.unpin([block])

    def _read(self, i: int, block: Block) -> str:
        if block.dram is not None:
            arena, offset, _ = self.table.dram.place(block.dram)
            with self.dram.view(arena, offset, block.size) as view:
                check(i, bytes(view), size=BLOCK)
            return "dram"
        assert self.ssd is not None and block.ssd is not None
        deadline = time.monotonic() + 5
        with self.ssd.read_block(
            block.ssd, size=BLOCK, chunk_bytes=SPEC.chunk_bytes, block_sum=block.sum, deadline=deadline
        ) as staged:  # fmt: skip
            check(i, bytes(staged.view), size=BLOCK)
        return "ssd"

    def dirty(self) -> int:
        with self.lock:
            return self.table.dirty_bytes // BLOCK

    def idle(self) -> bool:
        """Nothing is being written, and nothing needs to be."""
        self.mover.apply_actions()
        with self.lock:
            wanted = self.table.dirty_bytes - int(0.5 * self.table.dram.capacity_bytes)
            return self.table.n_demoting == 0 and (wanted <= 0 or not self.table.ssd_writable)

    def count(self, name: str) -> int:
        with self.lock:
            return self.table.counters[name]

    def check(self) -> None:
        with self.lock:
            self.table.check()

    def close(self) -> None:
        assert self.mover.stop(timeout_s=10)
        self.dram.close()
        if self.ssd is not None:
            self.ssd.close()
            self.ssd.staging.close()


Maker = Callable[..., Pool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Maker]:
    made: list[Pool] = []

    def make(directory: Path | None = tmp_path / "ssd", **settings: object) -> Pool:
        made.append(Pool(directory, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pool in made:
        pool.close()


STORED = int(BlockCode.STORED)


# -- down --------------------------------------------------------------------------------------------------------------


def test_below_the_watermark_nothing_is_written(make_pool: Maker) -> None:
    pool = make_pool()
    assert pool.put(range(N_DRAM // 2)) == [STORED] * (N_DRAM // 2)
    wait_until(pool.idle)
    assert pool.ssd is not None and pool.ssd.counters().get("blocks_written", 0) == 0


def test_above_the_watermark_the_coldest_are_kept_clean(make_pool: Maker) -> None:
    pool = make_pool()
    pool.put(range(N_DRAM))
    wait_until(lambda: pool.dirty() <= N_DRAM // 2)
    with pool.lock:
        pinned = [b for b in pool.table.pin(keys_of(range(N_DRAM)), now_ms=pool.now_ms(), touch=False).blocks if b is not None]
        clean = [not block.dirty for block in pinned]
        pool.table.unpin(pinned)
    assert clean == [True] * (N_DRAM // 2) + [False] * (N_DRAM // 2)
    assert [pool.get(i) for i in range(N_DRAM)] == ["dram"] * N_DRAM
    pool.check()


def test_a_put_of_many_times_the_dram_loses_nothing(make_pool: Maker) -> None:
    pool = make_pool()
    n = 10 * N_DRAM
    assert pool.put(range(n)) == [STORED] * n  # slower, not lossy: each put that finds no clean victim waits for the mover
    tiers = [pool.get(i) for i in range(n)]
    assert tiers.count("ssd") >= n - N_DRAM and tiers.count(None) == 0
    assert pool.count("dropped_dirty") == 0
    wait_until(pool.idle)
    pool.check()


def test_what_was_written_down_is_adopted_by_the_next_process(make_pool: Maker, tmp_path: Path) -> None:
    pool = make_pool()
    pool.put(range(4 * N_DRAM))
    wait_until(pool.idle)
    on_ssd = {i for i in range(4 * N_DRAM) if pool.get(i) == "ssd"}
    pool.close()
    with_tier = SsdTier(tmp_path / "ssd", capacity_bytes=16 * MIB, staging=StagingPool(MIB))
    found = {int.from_bytes(b.meta.key, "little"): b for extent in with_tier.scan() for b in extent.blocks}
    assert on_ssd <= set(found)
    for i, block in found.items():
        deadline = time.monotonic() + 5
        with with_tier.read_block(
            block.slot, size=BLOCK, chunk_bytes=SPEC.chunk_bytes, block_sum=block.meta.block_sum, deadline=deadline
        ) as staged:  # fmt: skip
            check(i, bytes(staged.view), size=BLOCK)
    with_tier.close()


def test_a_full_ssd_evicts_its_coldest_and_goes_on_and_keeps_its_cap(make_pool: Maker, tmp_path: Path) -> None:
    pool = make_pool(ssd_bytes=2 * MIB)
    n = 16 * N_DRAM
    assert pool.put(range(n)) == [STORED] * n
    wait_until(pool.idle)
    tiers = [pool.get(i) for i in range(n)]
    assert tiers[-1] == "dram" and tiers.count("ssd") > N_DRAM and tiers[0] is None
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "ssd").iterdir()) <= 2 * MIB
    pool.check()


def test_removed_blocks_are_erased_before_apply_actions_returns(make_pool: Maker, tmp_path: Path) -> None:
    pool = make_pool()
    pool.put(range(2 * N_DRAM))
    wait_until(pool.idle)
    with pool.lock:
        pool.table.remove(keys_of(range(0, 2 * N_DRAM, 1)))
    assert pool.mover.apply_actions()
    assert pool.get(0) is None
    pool.close()
    tier = SsdTier(tmp_path / "ssd", capacity_bytes=16 * MIB, staging=StagingPool(MIB))
    assert [block for extent in tier.scan() for block in extent.blocks] == []
    tier.close()


def test_without_ssd_memory_is_populated_and_given_back(make_pool: Maker) -> None:
    pool = make_pool(None)
    pool.put(range(N_DRAM))
    wait_until(lambda: pool.dram.resident_bytes() >= N_DRAM * BLOCK)
    with pool.lock:
        pool.table.close_namespace(UID)
    assert pool.mover.apply_actions()
    assert pool.dram.resident_bytes() == 0
    with pytest.raises(TierError):
        pool.dram.fds(UID)


def test_an_idle_mover_sleeps(make_pool: Maker) -> None:
    pool = make_pool()
    pool.put(range(2 * N_DRAM))
    wait_until(pool.idle)
    thread = next(thread for thread in threading.enumerate() if thread.name == "kvpool-mover")
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def switches() -> int:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["voluntary_ctxt_switches"]) + int(lines["nonvoluntary_ctxt_switches"])

    before = switches()
    pause(0.2)
    assert switches() - before <= 2


def test_stopping_in_the_middle_leaves_a_sound_table(make_pool: Maker) -> None:
    pool = make_pool()
    putter = threading.Thread(target=lambda: pool.put(range(8 * N_DRAM), timeout_s=1))
    putter.start()
    wait_until(lambda: pool.count("demoted") > 8)
    assert pool.mover.stop(timeout_s=10)
    putter.join()
    with pool.lock:
        assert pool.table.n_demoting == 0
    pool.check()


# -- trouble -----------------------------------------------------------------------------------------------------------


class FileLimit:
    """Writes past `n_bytes` of any file fail while this lasts: a disk that is full, without one."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes

    def __enter__(self) -> None:
        self.old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.n_bytes, self.old[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.old)


@pytest.mark.parametrize("allowed", [0, 100_000])
def test_a_failing_tier_is_out_with_a_reason_dram_goes_on_and_it_comes_back(make_pool: Maker, allowed: int) -> None:
    pool = make_pool()
    assert pool.ssd is not None
    with FileLimit(allowed):
        n = 4 * N_DRAM
        assert pool.put(range(n)) == [STORED] * n  # cold dirty blocks are dropped, and counted
        wait_until(lambda: pool.ssd.state != STATE_OK)  # type: ignore[union-attr]
        assert "File too large" in pool.ssd.state
        assert {pool.get(i) for i in range(n)} == {"dram", None}  # what could not be written is nowhere taken for written
        assert pool.get(n - 1) == "dram"
        assert pool.count("dropped_dirty") > 0
        wait_until(lambda: pool.mover.counters().get("retries", 0) > 2)
    wait_until(lambda: pool.ssd.state == STATE_OK)  # type: ignore[union-attr]
    before = pool.count("dropped_dirty")
    assert pool.put(range(1000, 1000 + n)) == [STORED] * n
    wait_until(pool.idle)
    got = [pool.get(i) for i in range(1000, 1000 + n)]
    assert None not in got and "ssd" in got
    assert pool.count("dropped_dirty") <= before + N_DRAM  # those that failed twice while the tier was out
    pool.check()


def test_a_file_deleted_under_us_costs_its_blocks_and_later_ones_go_down_again(make_pool: Maker, tmp_path: Path) -> None:
    pool = make_pool()
    pool.put(range(4 * N_DRAM))
    wait_until(pool.idle)
    for path in (tmp_path / "ssd").glob("*.kv"):
        path.unlink()
    lost = 0
    for i in range(4 * N_DRAM):
        try:
            pool.get(i)
        except TierError as error:
            assert error.trouble is Trouble.DAMAGED
            lost += 1
    assert lost
    assert pool.ssd is not None and pool.ssd.state == STATE_OK
    assert pool.put(range(1000, 1000 + 4 * N_DRAM)) == [STORED] * 4 * N_DRAM
    got = [pool.get(i) for i in range(1000, 1000 + 4 * N_DRAM)]
    assert None not in got and "ssd" in got


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "kvpool-test", str(path)], capture_output=True, timeout=30)
    if done.returncode:
        pytest.skip("mount is not allowed here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True, timeout=30)


def test_a_full_disk_is_no_loss_of_what_is_there_and_is_used_again_when_it_has_room(make_pool: Maker, small_disk: Path) -> None:
    pool = make_pool(small_disk)
    assert pool.ssd is not None
    hog = small_disk / "hog"
    n = N_DRAM
    pool.put(range(n))
    wait_until(pool.idle)
    hog.write_bytes(bytes(shutil.disk_usage(small_disk).free))
    assert pool.put(range(n, 8 * n)) == [STORED] * 7 * n
    wait_until(lambda: "No space left" in pool.ssd.state)  # type: ignore[union-attr]
    assert any(pool.get(i) == "ssd" for i in range(n))
    hog.unlink()
    wait_until(lambda: pool.ssd.state == STATE_OK)  # type: ignore[union-attr]
    assert pool.put(range(5000, 5000 + 3 * n)) == [STORED] * 3 * n
    assert {pool.get(i) for i in range(5000, 5000 + n)} == {"ssd"}
    pool.check()


def test_a_read_that_says_the_device_is_gone_takes_the_tier_out_and_wakes_waiters(make_pool: Maker) -> None:
    pool = make_pool()
    assert pool.ssd is not None
    rooms = pool.n_rooms
    with FileLimit(0):
        pool.mover.ssd_failed(TierError(Trouble.DAMAGED, "one block"))
        assert pool.ssd.state == STATE_OK
        pool.mover.ssd_failed(TierError(Trouble.IO, "the device is gone"))
        assert pool.ssd.state != STATE_OK
        wait_until(lambda: pool.n_rooms > rooms)
    wait_until(lambda: pool.ssd.state == STATE_OK)  # type: ignore[union-attr]


HAS_LOOP = os.geteuid() == 0 and shutil.which("fsfreeze") and shutil.which("mkfs.ext4")


@pytest.mark.skipif(not HAS_LOOP, reason="needs a loop device")
def test_a_hanging_device_stops_neither_puts_nor_reads_of_dram(make_pool: Maker, tmp_path: Path) -> None:
    image, disk = tmp_path / "image", tmp_path / "loop"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=60)
    disk.mkdir()
    if subprocess.run(["mount", "-o", "loop", str(image), str(disk)], capture_output=True, timeout=30).returncode:
        pytest.skip("mount is not allowed here")
    try:
        pool = make_pool(disk, stall_s=0.1)
        assert pool.ssd is not None
        pool.put(range(2 * N_DRAM))
        wait_until(pool.idle)
        subprocess.run(["fsfreeze", "-f", str(disk)], check=True, timeout=30)
        try:
            started = time.monotonic()
            assert pool.put(range(100, 100 + 4 * N_DRAM)) == [STORED] * 4 * N_DRAM
            assert pool.get(100 + 4 * N_DRAM - 1) == "dram"
            assert time.monotonic() - started < 5
        finally:
            subprocess.run(["fsfreeze", "-u", str(disk)], check=True, timeout=30)
        wait_until(lambda: pool.ssd.state == STATE_OK)  # type: ignore[union-attr]
        wait_until(pool.idle)
        pool.put(range(500, 500 + 4 * N_DRAM))
        assert pool.get(500) == "ssd"
        pool.check()
        pool.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=30)
