"""SSD tier on real directories: re-adoption, damage of every kind, the cap, the lock, full and failing disks, crashes."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool.core.hashing import block_sum, chunk_sums
from kvpool.core.types import KEY_BYTES, NamespaceUid
from kvpool.errors import ConfigError
from kvpool.worker import collector
from kvpool.worker.tiers import slab_file
from kvpool.worker.tiers.base import STATE_OK, BlockMeta, TierError, Trouble
from kvpool.worker.tiers.slab_file import Geometry
from kvpool.worker.tiers.ssd import AdoptedExtent, SsdTier, SsdWrite
from kvpool.worker.tiers.staging import StagingPool
from tests.support.payload import check, payload
from tests.support.waiting import wait_until

UID = NamespaceUid(b"n" * 16)
MIB = 1 << 20
CHUNK = 8192
BLOCK = 16_384
GEOMETRY = Geometry(BLOCK, 8)
IS_ROOT = os.geteuid() == 0
Opener = Callable[..., SsdTier]


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def key_of(i: int) -> bytes:
    return i.to_bytes(KEY_BYTES, "little")


def item(i: int, slot: int, *, size: int = BLOCK, version: int = 1) -> SsdWrite:
    data = payload(i, version, size)
    total = block_sum(chunk_sums(data, CHUNK).tobytes())
    return SsdWrite(slot, BlockMeta(UID, key_of(i), size, total, depth=i, parent=bytes([i % 256]) * 32), memoryview(data))


def slot_of(number: int, index: int) -> int:
    return number << 32 | index


def read(tier: SsdTier, i: int, slot: int, *, size: int = BLOCK, version: int = 1) -> bytes:
    wanted = item(i, slot, size=size, version=version).meta.block_sum
    with tier.read_block(slot, size=size, chunk_bytes=CHUNK, block_sum=wanted, deadline=soon()) as block:
        assert block.sums == chunk_sums(payload(i, version, size), CHUNK).tobytes()
        return bytes(block.view)


def trouble_of(call: Callable[[], object]) -> Trouble:
    with pytest.raises(TierError) as caught:
        call()
    return caught.value.trouble


@pytest.fixture
def ssd_dir(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def opener(ssd_dir: Path) -> Iterator[Opener]:
    """opener(...) closes the tier opened before and opens the directory again, as a restart would."""
    opened: list[SsdTier] = []

    def open_again(directory: Path = ssd_dir, **settings: object) -> SsdTier:
        for tier in opened:
            tier.close()
        arguments = {"capacity_bytes": 64 * MIB, "staging": StagingPool(4 * MIB)} | settings
        tier = SsdTier(directory, **arguments)  # type: ignore[arg-type]
        opened.append(tier)
        return tier

    yield open_again
    for tier in opened:
        tier.close()


def fill(tier: SsdTier, n_extents: int = 2) -> dict[int, int]:
    """Full extents 1.. of eight blocks each; {i: slot}."""
    slots = {}
    for number in range(1, n_extents + 1):
        tier.create_extent(number, namespace=UID, slot_bytes=BLOCK, n_slots=8)
        for index in range(8):
            slots[len(slots)] = slot_of(number, index)
    tier.write([item(i, slot) for i, slot in slots.items()], deadline=soon())
    return slots


def adopted(found: list[AdoptedExtent]) -> dict[int, int]:
    """{i: slot} of all blocks found, whose record says what was written."""
    slots = {}
    for extent in found:
        for block in extent.blocks:
            i = int.from_bytes(block.meta.key, "little")
            assert block.meta == item(i, 0, size=block.meta.size).meta
            slots[i] = block.slot
    return slots


# -- re-adoption -------------------------------------------------------------------------------------------------------


def test_all_blocks_are_found_again_and_read_right(opener: Opener) -> None:
    tier = opener()
    assert tier.scan() == []
    slots = fill(tier)
    tier = opener()
    assert adopted(tier.scan()) == slots
    for i, slot in slots.items():
        check(i, read(tier, i, slot), size=BLOCK)
    tier.write([item(99, slots[3])], deadline=soon())  # writing goes on where the earlier process stopped
    tier = opener()
    assert adopted(tier.scan()) == {i: s for i, s in slots.items() if i != 3} | {99: slots[3]}


@pytest.mark.parametrize("sizes", [[1, 4096, 5000, BLOCK], [BLOCK - 1] * 4, [100, 200, 300, 400]])
def test_sizes_are_kept(opener: Opener, sizes: list[int]) -> None:
    tier = opener()
    tier.create_extent(1, namespace=UID, slot_bytes=BLOCK, n_slots=8)
    tier.write([item(i, slot_of(1, i), size=size) for i, size in enumerate(sizes)], deadline=soon())
    tier = opener()
    tier.scan()
    for i, size in enumerate(sizes):
        check(i, read(tier, i, slot_of(1, i), size=size), size=size)


def test_erased_blocks_and_dropped_extents_do_not_come_back(opener: Opener, ssd_dir: Path) -> None:
    tier = opener()
    slots = fill(tier)
    tier.erase([slots[0], slots[1], slots[7], slot_of(77, 0)])
    tier.drop_extent(2)
    tier.drop_extent(2)
    tier.sync()
    assert trouble_of(lambda: read(tier, 9, slots[9])) is Trouble.DAMAGED
    assert sorted(p.name for p in ssd_dir.iterdir()) == ["LOCK", "slab-00000001.kv"]
    tier = opener()
    assert set(adopted(tier.scan())) == {2, 3, 4, 5, 6}


def test_of_two_records_for_one_key_the_newer_wins_for_good(opener: Opener) -> None:
    tier = opener()
    tier.create_extent(1, namespace=UID, slot_bytes=BLOCK, n_slots=8)
    tier.write([item(5, slot_of(1, 6))], deadline=soon())
    tier.write([item(5, slot_of(1, 2))], deadline=soon())
    for _ in range(2):
        tier = opener()
        assert adopted(tier.scan()) == {5: slot_of(1, 2)}
        tier.erase([])
    assert tier.counters()["scan_superseded_records"] == 0


def test_scan_of_50_000_records_takes_well_under_a_second(opener: Opener, ssd_dir: Path) -> None:
    opener().close()
    for number in range(1, 8):
        header = slab_file.Header(UID, Geometry(512, 8192), number)
        records = (BlockMeta(UID, key_of(number * 8192 + i), 512, i) for i in range(8192))
        with (ssd_dir / slab_file.file_name(number)).open("wb") as file:
            file.write(header.encode())
            for index, meta in enumerate(records):
                file.write(slab_file.encode_record(meta, number=number, index=index, seq=index + 1))
            file.truncate(header.geometry.file_bytes)
    took = []
    for _ in range(3):
        tier = opener(capacity_bytes=1 << 30)
        started = time.process_time()  # of this process: what else the machine does is not counted
        with collector.paused():  # as in a worker's start
            found = tier.scan()
        took.append(time.process_time() - started)
        assert sum(len(extent.blocks) for extent in found) == 7 * 8192
        tier.close()
    assert min(took) < 1.0, took  # 0.3 s on a laptop core; one that shares its core with others may take three times as long


# -- damage ------------------------------------------------------------------------------------------------------------


def _truncate(to: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, to(path.stat().st_size))


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hosts")


def _replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def _flip(offset: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))

    return flip


FIRST = set(range(8))  # blocks of the file that is damaged; 8..15 lie in another
DAMAGE: dict[str, tuple[Callable[[Path], None], set[int], set[int]]] = {
    # name: (what is done to the file, blocks that are misses at run time, blocks that are misses after a restart)
    "truncated to 0": (_truncate(lambda size: 0), FIRST, FIRST),
    "truncated to half": (_truncate(lambda size: GEOMETRY.slot_offset(4)), {4, 5, 6, 7}, {4, 5, 6, 7}),
    "truncated to its header": (_truncate(lambda size: 4096), FIRST, FIRST),
    "truncated in the table": (_truncate(lambda size: 4096 + 300), FIRST, FIRST),
    "truncated by 1 byte": (_truncate(lambda size: size - 1), {7}, {7}),
    "appended": (_append, set(), set()),
    "deleted": (Path.unlink, FIRST, FIRST),
    "directory": (_replace_by_directory, FIRST, FIRST),
    "symlink": (_replace_by_symlink, FIRST, FIRST),
    "fifo": (_replace_by_fifo, FIRST, FIRST),
    "payload bit": (_flip(GEOMETRY.slot_offset(3) + 9000), {3}, {3}),
    "header bit": (_flip(9), set(), FIRST),
    "record bit": (_flip(GEOMETRY.record_offset(5) + 20), set(), {5}),
    "table padding bit": (_flip(GEOMETRY.data_offset - 1), set(), set()),
}
if not IS_ROOT:
    DAMAGE["chmod 000"] = (lambda path: path.chmod(0), FIRST, FIRST)


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("how", DAMAGE)
def test_damage_costs_exactly_the_damaged_blocks(opener: Opener, ssd_dir: Path, how: str, buffered: bool) -> None:
    damage, misses_now, misses_later = DAMAGE[how]
    tier = opener(buffered=buffered)
    slots = fill(tier)
    damage(ssd_dir / "slab-00000001.kv")
    for _ in range(2):
        for i, slot in slots.items():
            if i in misses_now:
                assert trouble_of(lambda i=i, slot=slot: read(tier, i, slot)) is Trouble.DAMAGED  # type: ignore[misc]
            else:
                check(i, read(tier, i, slot), size=BLOCK)
    assert tier.state == STATE_OK
    tier = opener(buffered=buffered)
    found = adopted(tier.scan())
    for i, slot in found.items():
        if i in misses_later:
            assert trouble_of(lambda i=i, slot=slot: read(tier, i, slot)) is Trouble.DAMAGED  # type: ignore[misc]
        else:
            check(i, read(tier, i, slot), size=BLOCK)
    assert set(found) | misses_later == set(slots)
    # new blocks can be written in the place of the lost ones, and are there after one more start
    if slots[0] >> 32 not in {slot >> 32 for slot in found.values()}:
        tier.create_extent(1, namespace=UID, slot_bytes=BLOCK, n_slots=8)
    tier.write([item(i, slots[i], version=2) for i in misses_later], deadline=soon())
    for i in misses_later:
        check(i, read(tier, i, slots[i], version=2), versions=(2,), size=BLOCK)
    tier = opener(buffered=buffered)
    n_found = sum(len(extent.blocks) for extent in tier.scan())
    assert n_found == len(slots)
    assert Path("/etc/hosts").exists()


@pytest.mark.parametrize("how", [name for name, (_, now, _later) in DAMAGE.items() if now and "bit" not in name])
def test_new_blocks_can_be_written_after_damage_without_a_restart(opener: Opener, ssd_dir: Path, how: str) -> None:
    tier = opener()
    slots = fill(tier)
    DAMAGE[how][0](ssd_dir / "slab-00000001.kv")
    lost = DAMAGE[how][1]
    tier.erase([slots[i] for i in lost])
    tier.write([item(i, slots[i], version=2) for i in lost], deadline=soon())
    for i in lost:
        check(i, read(tier, i, slots[i], version=2), versions=(2,), size=BLOCK)
    if lost != FIRST:
        check(0, read(tier, 0, slots[0]), size=BLOCK)
    tier = opener()
    assert len({block.meta.key for extent in tier.scan() for block in extent.blocks}) == len(slots)
    assert "scan_bad_records" not in tier.counters()


def test_a_file_under_another_ones_name_is_not_believed(opener: Opener, ssd_dir: Path) -> None:
    tier = opener()
    slots = fill(tier)
    shutil.copy(ssd_dir / "slab-00000002.kv", ssd_dir / "slab-00000001.kv.new")
    (ssd_dir / "slab-00000001.kv.new").replace(ssd_dir / "slab-00000001.kv")
    assert trouble_of(lambda: read(tier, 0, slots[0])) is Trouble.DAMAGED
    tier = opener()
    assert set(adopted(tier.scan())) == set(range(8, 16))
    assert tier.counters()["scan_bad_files"] == 1


def test_a_payload_swapped_for_another_blocks_is_a_miss(opener: Opener, ssd_dir: Path) -> None:
    tier = opener()
    slots = fill(tier)
    with (ssd_dir / "slab-00000001.kv").open("r+b") as file:
        file.seek(GEOMETRY.slot_offset(4))
        other = file.read(BLOCK)
        file.seek(GEOMETRY.slot_offset(2))
        file.write(other)
        file.flush()
        os.fsync(file.fileno())
    assert trouble_of(lambda: read(tier, 2, slots[2])) is Trouble.DAMAGED
    check(4, read(tier, 4, slots[4]), size=BLOCK)
    assert tier.counters()["read_corrupt"] == 1


def test_random_damage_is_never_fatal_and_never_a_wrong_block(opener: Opener, ssd_dir: Path) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    for round_number in range(25):
        tier = opener()
        for extent in tier.scan():
            tier.drop_extent(extent.number)
        fill(tier)
        path = ssd_dir / f"slab-0000000{chance.choice((1, 2))}.kv"
        raw = bytearray(path.read_bytes())
        for _ in range(chance.choice((1, 10, 1000))):
            raw[chance.randrange(chance.choice((200, GEOMETRY.data_offset, len(raw))))] = chance.randrange(256)
        path.write_bytes(raw[: chance.choice((len(raw), chance.randrange(len(raw))))])
        tier = opener()
        try:
            found = adopted(tier.scan())
        except Exception as error:
            raise AssertionError(f"seed {seed}, round {round_number}") from error
        for i, slot in found.items():
            try:
                check(i, read(tier, i, slot), size=BLOCK)
            except TierError as error:
                assert error.trouble is Trouble.DAMAGED, (seed, round_number, error)


def test_foreign_files_are_left_alone(opener: Opener, ssd_dir: Path) -> None:
    ssd_dir.mkdir()
    names = ["slab-1.kv", "slab-00000001.kv.bak", "slab-000000001.kv", "notes.txt", "slab-0000000a.kv"]
    for name in names:
        (ssd_dir / name).write_text("mine")
    (ssd_dir / "slab-00000009.kv").symlink_to(ssd_dir / "notes.txt")
    tier = opener()
    assert tier.scan() == []
    fill(tier)
    assert all((ssd_dir / name).read_text() == "mine" for name in [*names, "slab-00000009.kv"])
    assert tier.counters()["scan_foreign_files"] == len(names) and tier.counters()["scan_bad_files"] == 1


# -- the cap -----------------------------------------------------------------------------------------------------------


def on_disk(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in directory.iterdir())


def test_the_cap_counts_all_files_and_holds_over_restarts_also_a_smaller_one(opener: Opener, ssd_dir: Path) -> None:
    capacity = 3 * GEOMETRY.file_bytes + 4096
    tier = opener(capacity_bytes=capacity)
    fill(tier, 3)
    assert trouble_of(lambda: tier.create_extent(4, namespace=UID, slot_bytes=512, n_slots=1)) is Trouble.FULL
    assert tier.disk_bytes == capacity and on_disk(ssd_dir) <= capacity
    tier = opener(capacity_bytes=capacity)
    assert len(tier.scan()) == 3
    assert trouble_of(lambda: tier.create_extent(4, namespace=UID, slot_bytes=512, n_slots=1)) is Trouble.FULL
    tier.write([item(0, slot_of(1, 0))], deadline=soon())  # file 1 is now the youngest, 2 the oldest
    smaller = capacity - 1
    tier = opener(capacity_bytes=smaller)
    found = adopted(tier.scan())
    assert set(found) == set(range(8)) | set(range(16, 24))
    assert on_disk(ssd_dir) <= smaller
    assert tier.counters()["scan_dropped_over_cap"] == 1
    check(0, read(tier, 0, found[0]), size=BLOCK)
    tier.drop_extent(3)
    tier.create_extent(4, namespace=UID, slot_bytes=BLOCK, n_slots=8)


def test_an_appended_file_does_not_go_over_the_cap(opener: Opener, ssd_dir: Path) -> None:
    tier = opener()
    fill(tier, 1)
    with (ssd_dir / "slab-00000001.kv").open("ab") as file:
        file.write(bytes(10 * MIB))
    tier = opener()
    assert len(adopted(tier.scan())) == 8
    assert on_disk(ssd_dir) <= tier.disk_bytes


# -- lock and directory ------------------------------------------------------------------------------------------------


def test_a_directory_in_use_is_refused_naming_the_holder(opener: Opener, ssd_dir: Path, tmp_path: Path) -> None:
    tier = opener()
    slots = fill(tier)
    (tmp_path / "alias").symlink_to(ssd_dir)
    for way in (ssd_dir, tmp_path / "alias", Path(os.path.relpath(ssd_dir))):
        with pytest.raises(ConfigError, match=rf"in use.*{os.getpid()}"):
            SsdTier(way, capacity_bytes=MIB, staging=StagingPool(MIB))
    check(3, read(tier, 3, slots[3]), size=BLOCK)


HOLD = """
import sys, time, os
from pathlib import Path
from kvpool.worker.tiers.ssd import SsdTier, SsdWrite
from kvpool.worker.tiers.staging import StagingPool
from tests.integration.test_ssd import UID, BLOCK, item, slot_of
tier = SsdTier(Path(sys.argv[1]), capacity_bytes=64 << 20, staging=StagingPool(4 << 20))
tier.scan()
tier.create_extent(1, namespace=UID, slot_bytes=BLOCK, n_slots=256)
print("ready", flush=True)
version = 0
while True:
    version += 1
    for start in range(0, 64, 8):
        tier.write([item(i, slot_of(1, i)) for i in range(start, start + 8)], deadline=time.monotonic() + 10)
    print(version, flush=True)
"""


def test_a_process_killed_in_mid_write_leaves_only_right_blocks_and_no_lock(opener: Opener, ssd_dir: Path) -> None:
    root = Path(__file__).parents[2]
    for n_lines in (1, 2, 3):
        with subprocess.Popen([sys.executable, "-c", HOLD, str(ssd_dir)], stdout=subprocess.PIPE, cwd=root) as child:
            assert child.stdout is not None
            for _ in range(n_lines):
                assert child.stdout.readline()
            with pytest.raises(ConfigError, match=f"pid {child.pid}"):
                SsdTier(ssd_dir, capacity_bytes=64 * MIB, staging=StagingPool(MIB))
            child.send_signal(signal.SIGKILL)
        tier = opener()
        found = adopted(tier.scan())
        assert len(found) >= (0 if n_lines == 1 else 56)  # at most the batch that was being written is missing
        for i, slot in found.items():
            check(i, read(tier, i, slot), size=BLOCK)
        tier.close()


def test_unusable_directories_are_config_errors_that_name_them(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "LOCK").symlink_to(file)
    bad = [file, file / "below", linked]
    if not IS_ROOT:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        bad.append(closed)
    for directory in bad:
        with pytest.raises(ConfigError, match=str(directory)):
            SsdTier(directory, capacity_bytes=MIB, staging=StagingPool(MIB))
    assert file.read_text() == "x"


# -- disks that are full, failing or slow ------------------------------------------------------------------------------


@contextmanager
def mounted(path: Path, *arguments: str) -> Iterator[Path]:
    """A small file system of its own; the test is skipped where mounting is not allowed."""
    path.mkdir()
    done = subprocess.run(["mount", *arguments, str(path)], capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=30)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={2 * MIB}", "kvpool-test") as path:
        yield path


def test_a_full_disk_is_found_when_the_extent_is_made_and_nothing_stays_behind(opener: Opener, small_disk: Path) -> None:
    tier = opener(small_disk)
    slots = fill(tier)
    assert trouble_of(lambda: tier.create_extent(3, namespace=UID, slot_bytes=BLOCK, n_slots=400)) is Trouble.FULL
    assert not (small_disk / "slab-00000003.kv").exists()
    tier.create_extent(3, namespace=UID, slot_bytes=BLOCK, n_slots=8)  # what fits still goes
    tier.write([item(50, slot_of(3, 0))], deadline=soon())
    (small_disk / "hog").write_bytes(bytes(small_disk_free(small_disk)))
    tier.write([item(50 + i, slot_of(3, i)) for i in range(1, 8)], deadline=soon())  # room for these was taken before
    for i, slot in slots.items():
        check(i, read(tier, i, slot), size=BLOCK)
    tier = opener(small_disk)  # a start on a full disk serves what is there
    assert len(adopted(tier.scan())) == 24


def small_disk_free(path: Path) -> int:
    return shutil.disk_usage(path).free


def test_a_write_that_fails_half_way_is_no_hit_now_or_later(opener: Opener, ssd_dir: Path) -> None:
    tier = opener(buffered=True)
    slots = fill(tier, 1)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (GEOMETRY.slot_offset(3), old[1]))  # writes past slot 2 fail from here on
    try:
        with pytest.raises(TierError) as caught:
            tier.write([item(20 + i, slots[i]) for i in range(8)], deadline=soon())
        tier.erase(list(slots.values()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert caught.value.trouble is Trouble.FULL and caught.value.is_out
    assert tier.counters()["write_errors"] == 1
    tier.write([item(20, slots[0])], deadline=soon())  # and the tier goes on afterwards
    check(20, read(tier, 20, slots[0]), size=BLOCK)
    tier = opener()
    assert adopted(tier.scan()) == {20: slots[0]}


def test_a_crash_between_payload_and_record_leaves_a_miss(opener: Opener) -> None:
    tier = opener(buffered=True)
    slots = fill(tier, 1)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (GEOMETRY.slot_offset(3), old[1]))
    try:
        with pytest.raises(TierError):
            tier.write([item(20 + i, slots[i]) for i in range(8)], deadline=soon())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    tier = opener()  # nobody erased: old records were zeroed before the payload, new ones never written
    assert adopted(tier.scan()) == {}


@pytest.mark.skipif(not IS_ROOT, reason="needs a loop device")
def test_a_hanging_device_is_noticed_and_others_are_refused_at_once(opener: Opener, tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 * MIB)
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, timeout=60) if shutil.which("mkfs.ext4") else None
    if made is None or made.returncode or not shutil.which("fsfreeze"):
        pytest.skip("no mkfs.ext4 or fsfreeze")
    with mounted(tmp_path / "loop", "-o", "loop", str(image)) as disk:
        tier = opener(disk, stall_s=0.2)
        assert tier.direct
        slots = fill(tier, 1)
        subprocess.run(["fsfreeze", "-f", str(disk)], check=True, timeout=30)
        writer = threading.Thread(target=lambda: tier.write([item(30, slots[0])], deadline=soon()))
        try:
            writer.start()
            wait_until(lambda: tier.state.startswith("stalled"), what="the stall is noticed")
            started = time.monotonic()
            assert trouble_of(lambda: read(tier, 4, slots[4])) is Trouble.STALLED
            assert trouble_of(lambda: tier.write([item(31, slots[5])], deadline=soon())) is Trouble.STALLED
            assert time.monotonic() - started < 1
        finally:
            subprocess.run(["fsfreeze", "-u", str(disk)], check=True, timeout=30)
        writer.join()
        assert tier.state == STATE_OK
        check(30, read(tier, 30, slots[0]), size=BLOCK)
        check(4, read(tier, 4, slots[4]), size=BLOCK)
        tier.close()


# -- running -----------------------------------------------------------------------------------------------------------


def test_a_dropped_extent_is_not_made_again_by_a_late_write(opener: Opener, ssd_dir: Path) -> None:
    tier = opener()
    slots = fill(tier, 1)
    tier.drop_extent(1)
    assert trouble_of(lambda: tier.write([item(0, slots[0])], deadline=soon())) is Trouble.DAMAGED
    assert not list(ssd_dir.glob("*.kv"))


def test_no_staging_memory_before_the_deadline_is_busy_and_starts_nothing(opener: Opener) -> None:
    pool = StagingPool(BLOCK)
    tier = opener(staging=pool)
    slots = fill(tier, 1)
    with pool.take(BLOCK, deadline=soon()):
        wanted = item(0, 0).meta.block_sum
        assert trouble_of(
            lambda: tier.read_block(slots[0], size=BLOCK, chunk_bytes=CHUNK, block_sum=wanted, deadline=soon(0.02))
        ) is Trouble.BUSY  # fmt: skip
    check(0, read(tier, 0, slots[0]), size=BLOCK)
    assert pool.used_bytes == 0


def test_failed_reads_give_their_staging_back(opener: Opener, ssd_dir: Path) -> None:
    pool = StagingPool(BLOCK)
    tier = opener(staging=pool)
    slots = fill(tier, 1)
    (ssd_dir / "slab-00000001.kv").unlink()
    for _ in range(3):
        assert trouble_of(lambda: read(tier, 0, slots[0])) is Trouble.DAMAGED
    assert pool.used_bytes == 0


def test_misuse_is_refused(opener: Opener) -> None:
    tier = opener()
    fill(tier, 1)
    with pytest.raises(ValueError):
        tier.write([item(1, slot_of(1, 8))], deadline=soon())
    with pytest.raises(ValueError):
        tier.write([item(1, slot_of(1, 0), size=BLOCK + 1)], deadline=soon())
    with pytest.raises(ValueError):
        tier.read_into(slot_of(1, 0), BLOCK, memoryview(bytearray(10)))
    with pytest.raises(ValueError):
        tier.create_extent(1 << 32, namespace=UID, slot_bytes=BLOCK, n_slots=1)


def test_slots_are_written_while_others_are_erased_and_read(opener: Opener) -> None:
    tier = opener()
    slots = fill(tier)
    stop = threading.Event()
    wrong: list[BaseException] = []

    def churn(mine: range) -> None:
        try:
            while not stop.is_set():
                tier.erase([slots[i] for i in mine])
                tier.write([item(i, slots[i]) for i in mine], deadline=soon())
                for i in mine:
                    check(i, read(tier, i, slots[i]), size=BLOCK)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=churn, args=(mine,)) for mine in (range(4), range(4, 8), range(8, 16))]
    for thread in threads:
        thread.start()
    wait_until(lambda: tier.counters().get("blocks_written", 0) > 1000 or wrong, timeout_s=20)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    tier = opener()
    assert adopted(tier.scan()) == slots
