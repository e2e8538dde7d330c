"""One slab file while the worker runs: made, written, read, erased, deleted; mended when somebody damaged it.

Owns the file under its name and the order of what is written to it. Not owned: which extents exist and the cap
(`ssd`), the layout (`slab_file`), reading at start (`slab_scan`).

A write is ordered so that a crash at any point leaves a miss or the right bytes: the slot's record is zeroed, the
payload written, then the new record. Nothing is synced on the way: what a power cut tears fails its checksum. The
file is opened for each call (microseconds beside the I/O): no bound on open fds is needed, and one that was replaced
behind our back is noticed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvpool.core.types import PAGE_BYTES
from kvpool.worker.tiers import slab_file
from kvpool.worker.tiers.base import BlockMeta, TierError, Trouble, round_up, tier_error
from kvpool.worker.tiers.disk import IOV_MAX, OPEN_FLAGS, aligned_bytes, read_all, set_direct, write_all
from kvpool.worker.tiers.slab_file import NO_RECORD, Geometry, Header, Record
from kvpool.worker.tiers.slab_scan import set_aside
from kvpool.worker.tiers.staging import StagingPool

log = logging.getLogger("kvpool.worker.ssd")

INDEX_MASK: Final = (1 << 32) - 1  # a slot is extent number << 32 | index
RUN_BYTES_MAX: Final = 64 << 20  # one pwritev: bounds how long a run keeps a thread and its staging
_FREE, _USED = 0, 1


@dataclass(frozen=True, slots=True)
class SsdWrite:
    """One block to be written into `slot`: described by `meta`, `data` has `meta.size` bytes."""

    slot: int
    meta: BlockMeta
    data: memoryview


@dataclass(frozen=True, slots=True)
class SsdDisk:
    """What all files of a tier share."""

    dir_fd: int
    direct: bool
    staging: StagingPool
    counters: Counter[str]


class SsdExtent:
    """Thread-safe; who owns a slot in the block table is alone in writing, erasing or reading it."""

    def __init__(self, number: int, header: Header, disk: SsdDisk) -> None:
        """Nothing is on disk yet: `create` or `adopt` follows."""
        self.number, self.namespace, self.geometry = number, header.namespace, header.geometry
        self.file_number = header.number  # another than `number` when something lay under that name
        self._disk = disk
        self._device = self._inode = 0
        self._used = bytearray(header.geometry.n_slots)  # a byte a slot: the file may have a record for it
        self._changing = threading.Lock()  # an erase must not come between payload and record
        self._deleted = False
        self._erased_unsynced = False

    @property
    def name(self) -> str:
        return slab_file.file_name(self.file_number)

    def adopt(self, status: os.stat_result, records: Sequence[Record]) -> None:
        """The file was found at start."""
        self._device, self._inode = status.st_dev, status.st_ino
        for record in records:
            self._used[record.index] = _USED

    def create(self) -> None:
        """Makes the file, all bytes allocated, under its number or, when something lies there, the next free one.
        Raises TierError (FULL, IO); nothing stays behind."""
        n_bytes = self.geometry.file_bytes
        try:
            fd = self._open_free_name()
            try:
                os.posix_fallocate(fd, 0, n_bytes)
                write_all(fd, [self._header().encode()], 0)
                status = os.fstat(fd)
            except OSError:
                self._unlink()
                raise
            finally:
                os.close(fd)
        except OSError as error:
            trouble = tier_error(error, f"new slab file of {n_bytes} bytes")
            if trouble.trouble is Trouble.DAMAGED:  # it is the directory that is gone or closed to us
                trouble = TierError(Trouble.IO, trouble.reason)
            raise trouble from error
        self._device, self._inode = status.st_dev, status.st_ino
        self._used[:] = bytes(len(self._used))

    def delete(self) -> None:
        with self._changing:
            self._deleted = True
            self._unlink()

    def write(self, items: Sequence[SsdWrite], *, first_seq: int, deadline: float) -> None:
        """See `SsdTier.write`; items are of this extent, in slot order."""
        with self._changing, self._opened_to_mend() as fd, contextlib.ExitStack() as closing:
            try:
                self._erase_records(fd, [item.slot & INDEX_MASK for item in items])
                payload_fd = fd
                if self._disk.direct:
                    payload_fd = os.open(self.name, os.O_RDWR | OPEN_FLAGS, dir_fd=self._disk.dir_fd)
                    closing.callback(os.close, payload_fd)
                    set_direct(payload_fd)
                for run in _runs(items, self.geometry):
                    offset = self.geometry.slot_offset(run[0].slot & INDEX_MASK)
                    if self._disk.direct:
                        self._write_direct(payload_fd, run, offset, deadline)
                    else:
                        write_all(fd, [piece for item in run for piece in _padded(item.data, run[-1] is item)], offset)
                self._write_records(fd, items, first_seq)
            except OSError as error:
                raise tier_error(error, f"writing {self.name}") from error

    def _write_records(self, fd: int, items: Sequence[SsdWrite], first_seq: int) -> None:
        records = []
        for seq, item in enumerate(items, first_seq):
            index = item.slot & INDEX_MASK
            self._used[index] = _USED
            records.append((index, slab_file.encode_record(item.meta, number=self.file_number, index=index, seq=seq)))
        for index, raw in _joined(records):
            write_all(fd, [raw], self.geometry.record_offset(index))

    def _write_direct(self, fd: int, run: list[SsdWrite], offset: int, deadline: float) -> None:
        """Aligned data goes straight from where it lies; the rest (and a block's part past its last whole page)
        through staging."""
        straight = [aligned_bytes(item.data) for item in run]
        staged = sum(round_up(len(item.data) - whole) for item, whole in zip(run, straight, strict=True))
        if not staged:
            write_all(fd, [item.data for item in run], offset)
            return
        with self._disk.staging.take(staged, deadline=deadline) as staging, contextlib.ExitStack() as views:
            pieces: list[memoryview | bytes] = []
            at = 0
            for item, whole in zip(run, straight, strict=True):
                rest = len(item.data) - whole
                if whole:
                    pieces.append(views.enter_context(item.data[:whole]))
                if rest:
                    piece = views.enter_context(staging.view[at : at + round_up(rest)])
                    _copy_padded(piece, item.data, whole)
                    pieces.append(piece)
                    at += round_up(rest)
            write_all(fd, pieces, offset)

    def read_into(self, index: int, size: int, out: memoryview) -> None:
        """See `SsdTier.read_into`."""
        padded = round_up(size)
        direct = self._disk.direct and len(out) >= padded and aligned_bytes(out[:PAGE_BYTES]) > 0
        name = self.name
        try:
            fd = os.open(name, os.O_RDONLY | OPEN_FLAGS, dir_fd=self._disk.dir_fd)
            try:
                self._check_own(fd)
                if direct:  # only now: what else may lie there would refuse it
                    set_direct(fd)
                with out[: padded if direct else size] as target:
                    got = read_all(fd, target, self.geometry.slot_offset(index))
            finally:
                os.close(fd)
        except OSError as error:
            raise tier_error(error, f"reading {name}") from error
        if got < size:
            raise TierError(Trouble.DAMAGED, f"reading {name}: the file ends {size - got} bytes early")

    def erase(self, indexes: Sequence[int]) -> None:
        """Zeroes records. A file that is gone or was replaced needs no erasing. Raises TierError."""
        with self._changing, contextlib.suppress(_NotOurs):
            try:
                fd = os.open(self.name, os.O_RDWR | OPEN_FLAGS, dir_fd=self._disk.dir_fd)
                try:
                    self._check_own(fd)
                    self._erase_records(fd, sorted(set(indexes)))
                finally:
                    os.close(fd)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
                    raise tier_error(error, f"erasing in {self.name}") from error

    def sync(self) -> None:
        """Brings what was erased to the device; does nothing when nothing was. Raises OSError."""
        if not self._erased_unsynced:
            return
        self._erased_unsynced = False
        try:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(self.name, os.O_RDONLY | OPEN_FLAGS, dir_fd=self._disk.dir_fd)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
        except OSError:
            self._erased_unsynced = True
            raise

    # -- below ---------------------------------------------------------------------------------------------------------

    def _header(self) -> Header:
        return Header(self.namespace, self.geometry, self.file_number)

    def _open_free_name(self) -> int:
        while True:
            with contextlib.suppress(FileExistsError):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS
                return os.open(self.name, flags, 0o600, dir_fd=self._disk.dir_fd)
            self.file_number += 1

    def _unlink(self) -> None:
        try:
            os.unlink(self.name, dir_fd=self._disk.dir_fd)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._disk.counters["unlink_failed"] += 1
                log.warning("event=ssd_unlink file=%s reason=%r", self.name, error.strerror)

    def _check_own(self, fd: int) -> os.stat_result:
        """Inode numbers are given out again soon, so the kind is looked at too."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != (self._device, self._inode):
            raise _NotOurs(Trouble.DAMAGED, f"{self.name} was replaced by something else")
        return status

    def _erase_records(self, fd: int, indexes: Sequence[int]) -> None:
        used = [(index, NO_RECORD) for index in indexes if self._used[index] == _USED]
        for index, raw in _joined(used):
            write_all(fd, [raw], self.geometry.record_offset(index))
            self._erased_unsynced = True
        for index, _ in used:
            self._used[index] = _FREE

    @contextlib.contextmanager
    def _opened_to_mend(self) -> Iterator[int]:
        """The file, open for writing; made anew when it is gone or was replaced (its blocks are lost: their reads
        fail)."""
        if self._deleted:
            raise TierError(Trouble.DAMAGED, f"{self.name} was deleted")
        try:
            fd = self._open_own()
        except TierError as error:
            if error.trouble is not Trouble.DAMAGED:
                raise
            self._disk.counters["replaced_files"] += 1
            set_aside(self._disk.dir_fd, self.name, error.reason)
            self.create()
            fd = self._open_own()
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_own(self) -> int:
        with contextlib.ExitStack() as undo:
            try:
                fd = os.open(self.name, os.O_RDWR | OPEN_FLAGS, dir_fd=self._disk.dir_fd)
                undo.callback(os.close, fd)
                if self._check_own(fd).st_size < self.geometry.file_bytes:  # it was cut: what lay past the cut is lost
                    self._disk.counters["mended_files"] += 1
                    log.warning("event=ssd_mend file=%s", self.name)
                    os.posix_fallocate(fd, 0, self.geometry.file_bytes)
                    write_all(fd, [self._header().encode()], 0)
            except OSError as error:
                raise tier_error(error, f"opening {self.name}") from error
            undo.pop_all()
        return fd


class _NotOurs(TierError):
    """What lies under the file's name is not the file that we made."""


def _copy_padded(piece: memoryview, data: memoryview, start: int) -> None:
    """`data` from `start` on into `piece`, zeros behind it."""
    target = np.frombuffer(piece, dtype=np.uint8)
    rest = len(data) - start
    np.copyto(target[:rest], np.frombuffer(data, dtype=np.uint8)[start:])
    target[rest:] = 0


def _padded(data: memoryview, last: bool) -> list[memoryview | bytes]:
    """A block as it lies in a run: up to the next page, except at the end, where nothing needs to follow."""
    rest = round_up(len(data)) - len(data)
    return [data] if last or not rest else [data, bytes(rest)]


def _runs(items: Sequence[SsdWrite], geometry: Geometry) -> Iterator[list[SsdWrite]]:
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
