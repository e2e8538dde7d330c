"""SSD tier: slab files in one directory, written and read with direct I/O where the file system has it.

Owns the directory (exclusively, by a lock), its files, their cap and the staging buffers. Which slot a block gets,
and which block leaves, is `kvpool.core.blocks`'; the layout of a file is `slab_file`'s; when blocks are written down
is `kvpool.worker.mover`'s.

A write is ordered so that a crash at any point leaves a miss or the right bytes: the slot's record is zeroed, the
payload written, then the new record. Nothing is synced on the way: what a power cut tears fails its checksum. Files
are opened for each call (microseconds beside the I/O): no bound on open fds is needed, and a file that was replaced
behind our back is noticed by its inode.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvpool.core.hashing import block_sum as sum_of_chunks
from kvpool.core.hashing import chunk_sums
from kvpool.core.types import PAGE_BYTES, NamespaceUid, Tier
from kvpool.worker.tiers import slab_file
from kvpool.worker.tiers.base import STATE_OK, BlockMeta, TierError, Trouble, round_up, tier_error
from kvpool.worker.tiers.disk import (
    IOV_MAX,
    OPEN_FLAGS,
    aligned_bytes,
    open_directory,
    probe_direct,
    read_all,
    set_direct,
    take_lock,
    write_all,
)
from kvpool.worker.tiers.slab_file import NO_RECORD, Geometry, Header
from kvpool.worker.tiers.slab_scan import FoundSlab, find_slabs, newest_of_each_key, set_aside
from kvpool.worker.tiers.staging import Staging, StagingPool

log = logging.getLogger("kvpool.worker.ssd")

LOCK_BYTES: Final = PAGE_BYTES  # what the lock file counts in the cap
RUN_BYTES_MAX: Final = 64 << 20  # one pwritev: bounds how long a run keeps a thread and its staging
STALL_S: Final = 5.0  # a call to the device that is out for longer means: the device hangs
_FREE, _USED = 0, 1


@dataclass(frozen=True, slots=True)
class SsdWrite:
    """One block to be written: into `slot` (extent number << 32 | index), described by `meta`, `data` of `meta.size`
    bytes."""

    slot: int
    meta: BlockMeta
    data: memoryview


@dataclass(frozen=True, slots=True)
class Adopted:
    """A block found at start. Its record was checked, its payload was not: that is done when it is read."""

    slot: int
    meta: BlockMeta
    seq: int


@dataclass(frozen=True, slots=True)
class AdoptedExtent:
    number: int
    namespace: NamespaceUid
    slot_bytes: int
    n_slots: int
    file_bytes: int
    blocks: list[Adopted]


@dataclass(slots=True)
class StagedBlock:
    """A verified block in staging memory: `view` has its bytes, `sums` its packed u64 chunk sums. Release it (or use
    `with`)."""

    staging: Staging
    view: memoryview
    sums: bytes

    def release(self) -> None:
        self.view.release()
        self.staging.release()

    def __enter__(self) -> StagedBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Extent:
    """A slab file as this process knows it. `used` has a byte a slot: whether the file may have a record for it."""

    __slots__ = ("changing", "device", "file_number", "geometry", "inode", "namespace", "number", "used")

    def __init__(self, number: int, header: Header, status: os.stat_result) -> None:
        self.number, self.namespace, self.geometry = number, header.namespace, header.geometry
        self.file_number = header.number  # differs from the extent's when something lay under that name
        self.device, self.inode = status.st_dev, status.st_ino
        self.used = bytearray(self.geometry.n_slots)
        self.changing = threading.Lock()  # held by whoever writes: an erase must not come between payload and record


class SsdTier:
    """Slab files under `directory`, `capacity_bytes` in all. Call `scan` once before anything else; then any thread
    may call anything.

    One slot is written, erased or read by whoever owns it in the block table; the tier does not guard slots against
    each other's use.
    """

    tier = Tier.SSD

    def __init__(self, directory: Path, *, capacity_bytes: int, staging: StagingPool, buffered: bool = False,
                 stall_s: float = STALL_S) -> None:  # fmt: skip
        """Takes the directory (made if it is not there). Raises ConfigError: in use (names the holder's pid), not a
        directory, not writable. `buffered` keeps direct I/O off."""
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self.staging = staging
        self._stall_s = stall_s
        self._counters: Counter[str] = Counter()
        self._extents: dict[int, _Extent] = {}
        self._lock = threading.Lock()  # extents, bytes on disk, sequence
        self._disk_bytes = LOCK_BYTES
        self._next_seq = 1
        self._inflight: dict[object, float] = {}
        self._out_reason: str | None = None
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._dir_fd = open_directory(directory, setting="ssd")
            undo.callback(os.close, self._dir_fd)
            self._lock_fd = take_lock(self._dir_fd, directory, setting="ssd")
            undo.callback(os.close, self._lock_fd)
            self.direct = not buffered and probe_direct(self._dir_fd)
            undo.pop_all()
        log.info("ssd_open dir=%s capacity_bytes=%d direct=%d", directory, capacity_bytes, self.direct)

    # -- what it tells -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self._closed:
            return "closed"
        if self._stalled():
            return "stalled: the device does not answer"
        return self._out_reason or STATE_OK

    def set_out(self, reason: str | None) -> None:
        """Marks the tier as not to be used, with the reason, or (None) as fine again. Decided by the mover; does not
        stop calls."""
        if reason != self._out_reason:
            if reason is None:
                log.warning("ssd_back dir=%s", self.directory)
            else:
                log.error("ssd_out dir=%s reason=%r", self.directory, reason)
        self._out_reason = reason

    @property
    def slab_capacity_bytes(self) -> int:
        """What of the cap is for slab files, headers and tables included (`slab_file.overhead_bytes`)."""
        return max(0, self.capacity_bytes - LOCK_BYTES)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files, as allocated."""
        return self._disk_bytes

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    # -- start ---------------------------------------------------------------------------------------------------------

    def scan(self) -> list[AdoptedExtent]:
        """What earlier processes left, read once at start. Never fatal: what cannot be trusted is counted, logged and
        left out. When the files are more than the cap (it was made smaller) those written longest ago are deleted.
        The caller gives each block to its table, erases those that the table refuses and drops the extents of
        namespaces that it does not know."""
        kept: list[FoundSlab] = []
        for slab in sorted(find_slabs(self._dir_fd, counters=self._counters), key=lambda slab: slab.last_seq, reverse=True):
            geometry, number = slab.header.geometry, slab.header.number
            if self._disk_bytes + geometry.file_bytes > self.capacity_bytes:
                self._counters["scan_dropped_over_cap"] += 1
                log.warning("ssd_drop file=%s blocks=%d reason=over_cap", slab_file.file_name(number), len(slab.records))
                self._unlink(number)
                continue
            extent = _Extent(number, slab.header, slab.status)
            for record in slab.records:
                extent.used[record.index] = _USED
            self._disk_bytes += geometry.file_bytes
            self._extents[number] = extent
            self._next_seq = max(self._next_seq, slab.last_seq + 1)
            kept.append(slab)
        newest = newest_of_each_key(kept)
        return [self._adopt(slab, newest) for slab in kept]

    def _adopt(self, slab: FoundSlab, newest: dict[bytes, int]) -> AdoptedExtent:
        """Of two records for one key (a crash came between write and erase) the newer one counts; the other is
        erased."""
        uid, number, geometry = slab.header.namespace, slab.header.number, slab.header.geometry
        blocks: list[Adopted] = []
        superseded: list[int] = []
        for record in slab.records:
            slot = number << 32 | record.index
            if newest.get(uid + record.key) != record.seq:
                superseded.append(slot)
                continue
            newest[uid + record.key] = -1
            meta = BlockMeta(uid, record.key, record.size, record.block_sum, record.depth, record.parent)
            blocks.append(Adopted(slot, meta, record.seq))
        self._counters["scan_adopted_blocks"] += len(blocks)
        self._counters["scan_superseded_records"] += len(superseded)
        with contextlib.suppress(TierError):
            self.erase(superseded)
        return AdoptedExtent(number, uid, geometry.slot_bytes, geometry.n_slots, geometry.file_bytes, blocks)

    # -- extents -------------------------------------------------------------------------------------------------------

    def create_extent(self, number: int, *, namespace: NamespaceUid, slot_bytes: int, n_slots: int) -> None:
        """Makes the file of extent `number`, all its bytes allocated, so that a full disk is found here and not in a
        write. Raises TierError FULL (cap or disk; nothing stays behind) or IO. Making an extent again that is
        there does nothing."""
        geometry = Geometry(slot_bytes, n_slots)
        if not 1 <= n_slots <= slab_file.MAX_SLOTS or not 0 <= number < 1 << 32:
            raise ValueError(f"extent {number} of {n_slots} slots is out of range")
        with self._lock:
            if number in self._extents:
                return
            if self._disk_bytes + geometry.file_bytes > self.capacity_bytes:
                raise TierError(Trouble.FULL, f"a slab file of {geometry.file_bytes} bytes would go over the cap of "
                                              f"{self.capacity_bytes} bytes ({self._disk_bytes} in use)")  # fmt: skip
            self._disk_bytes += geometry.file_bytes
        try:
            with self._io():
                extent = self._make_file(number, namespace, geometry, wanted=number)
        except TierError:
            with self._lock:
                self._disk_bytes -= geometry.file_bytes
            raise
        self._extents[number] = extent

    def drop_extent(self, number: int) -> None:
        """Deletes the file with all that is in it. Reads under way end as they would have. Unknown numbers are
        ignored."""
        extent = self._extents.pop(number, None)
        if extent is None:
            return
        with extent.changing:
            self._unlink(extent.file_number)
        with self._lock:
            self._disk_bytes -= extent.geometry.file_bytes

    def _make_file(self, number: int, namespace: NamespaceUid, geometry: Geometry, *, wanted: int) -> _Extent:
        """New file, named after `wanted` or, when something lies there, the next free number."""
        file_number, fd = self._create_free_name(wanted)
        try:
            os.posix_fallocate(fd, 0, geometry.file_bytes)
            header = Header(namespace, geometry, file_number)
            write_all(fd, [header.encode()], 0)
            return _Extent(number, header, os.fstat(fd))
        except OSError as error:
            self._unlink(file_number)
            raise tier_error(error, f"{self.directory}: new slab file of {geometry.file_bytes} bytes") from error
        finally:
            os.close(fd)

    def _create_free_name(self, wanted: int) -> tuple[int, int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS
        try:
            while True:
                with contextlib.suppress(FileExistsError):
                    return wanted, os.open(slab_file.file_name(wanted), flags, 0o600, dir_fd=self._dir_fd)
                wanted += 1
        except OSError as error:
            raise tier_error(error, f"{self.directory}: new slab file") from error

    def _unlink(self, number: int) -> None:
        try:
            os.unlink(slab_file.file_name(number), dir_fd=self._dir_fd)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._counters["unlink_failed"] += 1
                log.warning("ssd_unlink file=%s reason=%r", slab_file.file_name(number), error.strerror)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def write(self, items: Sequence[SsdWrite], *, deadline: float) -> None:
        """Writes blocks of one extent or of several; neighbouring slots go in one call. `deadline` (time.monotonic()
        seconds) is for staging memory. Raises TierError: then none of `items` counts as written, and the caller
        erases their slots before it frees them. A file that vanished is made anew (its other blocks are lost:
        their reads fail)."""
        by_extent: dict[int, list[SsdWrite]] = {}
        for item in items:
            assert len(item.data) == item.meta.size > 0
            by_extent.setdefault(item.slot >> 32, []).append(item)
        for number, group in by_extent.items():
            extent = self._extent(number)
            if any(not _fits(extent.geometry, item.slot & 0xFFFFFFFF, item.meta.size) for item in group):
                raise ValueError(f"a block does not fit slot or extent {number}")
            with self._io(), extent.changing:
                self._extent(number)  # it may have been dropped while we waited
                self._write_extent(extent, sorted(group, key=lambda item: item.slot), deadline)
        self._counters["blocks_written"] += len(items)
        self._counters["bytes_written"] += sum(item.meta.size for item in items)

    def _write_extent(self, extent: _Extent, items: list[SsdWrite], deadline: float) -> None:
        with self._lock:
            first_seq = self._next_seq
            self._next_seq += len(items)
        geometry, doing = extent.geometry, f"writing {slab_file.file_name(extent.file_number)}"
        with self._opened_for_write(extent) as (fd, direct_fd):
            try:
                self._erase_records(extent, fd, [item.slot & 0xFFFFFFFF for item in items])
                for run in _runs(items, geometry):
                    offset = geometry.slot_offset(run[0].slot & 0xFFFFFFFF)
                    if self.direct:
                        self._write_direct(direct_fd, run, offset, deadline)
                    else:
                        write_all(fd, [piece for item in run for piece in _padded(item.data, run[-1] is item)], offset)
                records: list[tuple[int, bytes]] = []
                for seq, item in enumerate(items, first_seq):
                    index = item.slot & 0xFFFFFFFF
                    extent.used[index] = _USED
                    number = extent.file_number
                    records.append((index, slab_file.encode_record(item.meta, number=number, index=index, seq=seq)))
                for index, raw in _joined(records):
                    write_all(fd, [raw], geometry.record_offset(index))
            except OSError as error:
                self._counters["write_errors"] += 1
                raise tier_error(error, doing) from error

    def _write_direct(self, fd: int, run: list[SsdWrite], offset: int, deadline: float) -> None:
        """Aligned data goes straight from where it lies; the rest (and a block's part past its last whole page)
        through staging."""
        straight = [aligned_bytes(item.data) for item in run]
        staged = sum(round_up(len(item.data) - whole) for item, whole in zip(run, straight, strict=True))
        if not staged:
            write_all(fd, [item.data for item in run], offset)
            return
        with self.staging.take(staged, deadline=deadline) as staging:
            pieces: list[memoryview] = []
            at = 0
            with contextlib.ExitStack() as views:
                for item, whole in zip(run, straight, strict=True):
                    rest = len(item.data) - whole
                    if whole:
                        pieces.append(views.enter_context(item.data[:whole]))
                    if rest:
                        piece = views.enter_context(staging.view[at : at + round_up(rest)])
                        target = np.frombuffer(piece, dtype=np.uint8)
                        np.copyto(target[:rest], np.frombuffer(item.data, dtype=np.uint8)[whole:])
                        target[rest:] = 0
                        del target
                        pieces.append(piece)
                        at += round_up(rest)
                write_all(fd, pieces, offset)

    def read_into(self, slot: int, size: int, out: memoryview) -> None:
        """Reads the first `size` bytes of a slot into `out`, unverified. Direct when `out` is page-aligned and has
        room for whole pages (then the bytes past `size` up to a page are overwritten too). Raises TierError,
        DAMAGED when file or bytes are gone."""
        extent = self._extent(slot >> 32)
        geometry, index = extent.geometry, slot & 0xFFFFFFFF
        if size > len(out) or not _fits(geometry, index, size):
            raise ValueError(f"{size} bytes of slot {index} do not fit slot or buffer")
        name = slab_file.file_name(extent.file_number)
        padded = round_up(size)
        direct = self.direct and len(out) >= padded and aligned_bytes(out[:PAGE_BYTES]) > 0
        with self._io():
            try:
                fd = os.open(name, os.O_RDONLY | OPEN_FLAGS, dir_fd=self._dir_fd)
                try:
                    _check_inode(fd, extent, name)
                    if direct:  # only now: what else may lie there would refuse it
                        set_direct(fd)
                    got = read_all(fd, out[: padded if direct else size], geometry.slot_offset(index))
                finally:
                    os.close(fd)
            except OSError as error:
                self._counters["read_errors"] += 1
                raise tier_error(error, f"reading {name}") from error
        if got < size:
            self._counters["read_errors"] += 1
            raise TierError(Trouble.DAMAGED, f"reading {name}: the file ends {size - got} bytes early")
        self._counters["blocks_read"] += 1
        self._counters["bytes_read"] += size

    def read_block(self, slot: int, *, size: int, chunk_bytes: int, block_sum: int, deadline: float) -> StagedBlock:
        """Reads a block into staging memory and verifies it. The answer's `sums` are what promotion needs. Raises
        TierError: DAMAGED when the bytes are not those of `block_sum`, BUSY when no staging memory was free before
        `deadline`."""
        staging = self.staging.take(size, deadline=deadline)
        try:
            self.read_into(slot, size, staging.view)
            view = staging.view[:size]
            try:
                sums = np.asarray(chunk_sums(view, chunk_bytes), dtype="<u8").tobytes()
                if sum_of_chunks(sums) != block_sum:
                    self._counters["read_corrupt"] += 1
                    raise TierError(Trouble.DAMAGED, f"slot {slot:#x}: checksum differs")
            except BaseException:
                view.release()
                raise
            return StagedBlock(staging, view, sums)
        except BaseException:
            staging.release()
            raise

    def erase(self, slots: Sequence[int]) -> None:
        """Zeroes the records of slots, so that no later start adopts them. Extents or files that are gone are fine.
        Raises TierError."""
        by_extent: dict[int, list[int]] = {}
        for slot in slots:
            by_extent.setdefault(slot >> 32, []).append(slot & 0xFFFFFFFF)
        for number, indexes in by_extent.items():
            extent = self._extents.get(number)
            if extent is None:
                continue
            name = slab_file.file_name(extent.file_number)
            with self._io(), extent.changing:
                try:
                    fd = os.open(name, os.O_RDWR | OPEN_FLAGS, dir_fd=self._dir_fd)
                    try:
                        _check_inode(fd, extent, name)
                        self._erase_records(extent, fd, sorted(indexes))
                    finally:
                        os.close(fd)
                except TierError:
                    continue
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
                        raise tier_error(error, f"erasing in {name}") from error

    def sync(self) -> None:
        """Brings all erased and written records to the device: before a removal is noted as applied for good. Raises
        TierError."""
        try:
            os.fsync(self._dir_fd)
            for extent in list(self._extents.values()):
                with contextlib.suppress(TierError), self._opened_for_write(extent, heal=False) as (fd, _):
                    os.fdatasync(fd)
        except OSError as error:
            raise tier_error(error, f"{self.directory}: sync") from error

    def close(self) -> None:
        """Lets the directory go. Files stay."""
        if not self._closed:
            self._closed = True
            os.close(self._lock_fd)
            os.close(self._dir_fd)

    # -- below ---------------------------------------------------------------------------------------------------------

    def _extent(self, number: int) -> _Extent:
        extent = self._extents.get(number)
        if extent is None:
            raise TierError(Trouble.DAMAGED, f"no slab file for extent {number}")
        return extent

    def _erase_records(self, extent: _Extent, fd: int, indexes: list[int]) -> None:
        used = [(index, NO_RECORD) for index in indexes if extent.used[index] == _USED]
        for index, raw in _joined(used):
            write_all(fd, [raw], extent.geometry.record_offset(index))
        for index, _ in used:
            extent.used[index] = _FREE

    @contextlib.contextmanager
    def _opened_for_write(self, extent: _Extent, *, heal: bool = True) -> Iterator[tuple[int, int]]:
        """(buffered fd for records, fd for payload) of the extent's own file; made anew when it is gone or was
        replaced."""
        flags = os.O_RDWR | OPEN_FLAGS
        with contextlib.ExitStack() as closing:
            name = slab_file.file_name(extent.file_number)
            try:
                fd = os.open(name, flags, dir_fd=self._dir_fd)
                closing.callback(os.close, fd)
                if _check_inode(fd, extent, name) < extent.geometry.file_bytes and heal:
                    self._mend(extent, fd, name)
            except (OSError, TierError) as error:
                trouble = error if isinstance(error, TierError) else tier_error(error, f"opening {name}")
                if trouble.trouble is not Trouble.DAMAGED or not heal:
                    raise trouble from error
                closing.close()
                self._heal(extent, str(trouble))
                name = slab_file.file_name(extent.file_number)
                fd = os.open(name, flags, dir_fd=self._dir_fd)
                closing.callback(os.close, fd)
            direct_fd = fd
            if self.direct:
                direct_fd = os.open(name, flags, dir_fd=self._dir_fd)
                closing.callback(os.close, direct_fd)
                set_direct(direct_fd)
            yield fd, direct_fd

    def _heal(self, extent: _Extent, reason: str) -> None:
        """Gives the extent a new, empty file in the place of one that is gone or was replaced."""
        self._counters["replaced_files"] += 1
        set_aside(self._dir_fd, slab_file.file_name(extent.file_number), reason)
        made = self._make_file(extent.number, extent.namespace, extent.geometry, wanted=extent.file_number)
        extent.file_number, extent.device, extent.inode = made.file_number, made.device, made.inode
        extent.used[:] = made.used

    def _mend(self, extent: _Extent, fd: int, name: str) -> None:
        """The file was cut: its length and its header come back; what lay past the cut is lost."""
        self._counters["mended_files"] += 1
        log.warning("ssd_mend file=%s", name)
        os.posix_fallocate(fd, 0, extent.geometry.file_bytes)
        write_all(fd, [Header(extent.namespace, extent.geometry, extent.file_number).encode()], 0)

    def _stalled(self) -> bool:
        started = min(list(self._inflight.values()), default=None)
        return started is not None and time.monotonic() - started > self._stall_s

    @contextlib.contextmanager
    def _io(self) -> Iterator[None]:
        """Around every call to the device: refuses at once while an earlier one hangs, so that not all threads end up
        waiting."""
        if self._closed:
            raise TierError(Trouble.CLOSED, "the SSD tier is closed")
        if self._stalled():
            self._counters["stalled_refused"] += 1
            raise TierError(Trouble.STALLED, f"{self.directory}: the device does not answer")
        token = object()
        self._inflight[token] = time.monotonic()
        try:
            yield
        finally:
            del self._inflight[token]


def _fits(geometry: Geometry, index: int, size: int) -> bool:
    return 0 < size <= geometry.slot_bytes and index < geometry.n_slots


def _check_inode(fd: int, extent: _Extent, name: str) -> int:
    """Bytes of the file, when it is the extent's own. Inode numbers are given out again soon, so the kind is looked at too."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != (extent.device, extent.inode):
        raise TierError(Trouble.DAMAGED, f"{name} was replaced by something else")
    return status.st_size


def _padded(data: memoryview, last: bool) -> list[memoryview | bytes]:
    """A block as it lies in a run: up to the next page, except at the end, where nothing needs to follow."""
    rest = round_up(len(data)) - len(data)
    return [data] if last or not rest else [data, bytes(rest)]


def _runs(items: list[SsdWrite], geometry: Geometry) -> Iterator[list[SsdWrite]]:
    """Splits blocks in slot order into runs that lie back to back on disk, each within what one call may carry."""
    run: list[SsdWrite] = []
    n_bytes = 0
    for item in items:
        padded = round_up(item.meta.size)
        follows = run and item.slot == run[-1].slot + 1 and round_up(run[-1].meta.size) == geometry.stride
        if run and (not follows or n_bytes + padded > RUN_BYTES_MAX or 2 * len(run) + 2 > IOV_MAX):
            yield run
            run, n_bytes = [], 0
        run.append(item)
        n_bytes += padded
    if run:
        yield run


def _joined(records: list[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Records in index order -> (first index, bytes of a run of neighbours)."""
    start = 0
    for at in range(1, len(records) + 1):
        if at == len(records) or records[at][0] != records[at - 1][0] + 1:
            yield records[start][0], b"".join(raw for _, raw in records[start:at])
            start = at
