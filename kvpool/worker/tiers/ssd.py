"""SSD tier: slab files in one directory, written and read with direct I/O where the file system has it.

Owns the directory (exclusively, by a lock), which files are in it, their cap, and the watch for a device that hangs.
Which slot a block gets, and which block leaves, is `kvpool.core.blocks`'; one file is `ssd_extent`'s; when blocks are
written down is `kvpool.worker.mover`'s.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
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
from kvpool.worker.tiers.base import STATE_OK, BlockMeta, TierError, Trouble, tier_error
from kvpool.worker.tiers.disk import open_directory, probe_direct, take_lock, write_all
from kvpool.worker.tiers.slab_file import Geometry, Header
from kvpool.worker.tiers.slab_scan import FoundSlab, find_slabs, newest_of_each_key
from kvpool.worker.tiers.ssd_extent import INDEX_MASK, SsdDisk, SsdExtent, SsdWrite
from kvpool.worker.tiers.staging import Staging, StagingPool

__all__ = ["Adopted", "AdoptedExtent", "SsdTier", "SsdWrite", "StagedBlock"]

log = logging.getLogger("kvpool.worker.ssd")

LOCK_BYTES: Final = PAGE_BYTES  # what the lock file counts in the cap
STALL_S: Final = 5.0  # a call to the device that is out for longer, and longer than its bytes need, means: the device hangs
SLOW_BYTES_PER_S: Final = 4_000_000  # the slowest device that is not taken for hanging


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
        self._extents: dict[int, SsdExtent] = {}
        self._lock = threading.Lock()  # extents, bytes on disk, sequence
        self._disk_bytes = LOCK_BYTES
        self._next_seq = 1
        self._inflight: dict[object, float] = {}  # calls to the device -> when each should have ended (time.monotonic())
        self._out_reason: str | None = None
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._dir_fd = open_directory(directory, setting="ssd")
            undo.callback(os.close, self._dir_fd)
            self._lock_fd = take_lock(self._dir_fd, directory, setting="ssd")
            undo.callback(os.close, self._lock_fd)
            self.direct = not buffered and probe_direct(self._dir_fd)
            undo.pop_all()
        self._disk = SsdDisk(self._dir_fd, self.direct, staging, self._counters)
        log.info("event=ssd_open dir=%s capacity_bytes=%d direct=%d", directory, capacity_bytes, self.direct)

    # -- what it tells -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self._closed:
            return "closed"
        if self.is_stalled:
            return "stalled: the device does not answer"
        return self._out_reason or STATE_OK

    @property
    def is_stalled(self) -> bool:
        """Whether a call to the device is out for much longer than it may take."""
        due = min(list(self._inflight.values()), default=None)
        return due is not None and time.monotonic() > due

    def set_out(self, reason: str | None) -> None:
        """Marks the tier as not to be used, with the reason, or (None) as fine again. Decided by the mover; does not
        stop calls."""
        if reason != self._out_reason:
            if reason is None:
                log.warning("event=ssd_back dir=%s", self.directory)
            else:
                log.error("event=ssd_out dir=%s reason=%r", self.directory, reason)
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
                log.warning("event=ssd_drop file=%s blocks=%d reason=over_cap", slab_file.file_name(number), len(slab.records))
                SsdExtent(number, slab.header, self._disk).delete()
                continue
            extent = SsdExtent(number, slab.header, self._disk)
            extent.adopt(slab.status, slab.records)
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
            meta = BlockMeta(uid, record.key, record.size, record.block_sum, record.depth, record.parent, record.kept)
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
            with self._io("make_errors", geometry.file_bytes):
                extent = SsdExtent(number, Header(namespace, geometry, number), self._disk)
                extent.create()
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
        extent.delete()
        with self._lock:
            self._disk_bytes -= extent.geometry.file_bytes

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
            for item in group:
                _check_fits(extent, item.slot & INDEX_MASK, item.meta.size)
            with self._lock:
                first_seq = self._next_seq
                self._next_seq += len(group)
            with self._io("write_errors", sum(item.meta.size for item in group)):
                extent.write(sorted(group, key=lambda item: item.slot), first_seq=first_seq, deadline=deadline)
        self._counters["blocks_written"] += len(items)
        self._counters["bytes_written"] += sum(item.meta.size for item in items)

    def read_into(self, slot: int, size: int, out: memoryview) -> None:
        """Reads the first `size` bytes of a slot into `out`, unverified. Direct when `out` is page-aligned and has
        room for whole pages (then the bytes past `size` up to a page are overwritten too). Raises TierError,
        DAMAGED when file or bytes are gone."""
        extent = self._extent(slot >> 32)
        _check_fits(extent, slot & INDEX_MASK, min(size, len(out) + 1))
        if size > len(out):
            raise ValueError(f"{size} bytes do not fit a buffer of {len(out)}")
        with self._io("read_errors", size):
            extent.read_into(slot & INDEX_MASK, size, out)
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
            by_extent.setdefault(slot >> 32, []).append(slot & INDEX_MASK)
        for number, indexes in by_extent.items():
            extent = self._extents.get(number)
            if extent is not None:
                with self._io("erase_errors"):
                    extent.erase(indexes)

    def sync(self) -> None:
        """Brings all erased records to the device: before a removal is noted as applied for good. Raises
        TierError."""
        with self._io("sync_errors"):
            try:
                for extent in list(self._extents.values()):
                    extent.sync()
                os.fsync(self._dir_fd)
            except OSError as error:
                raise tier_error(error, f"{self.directory}: sync") from error

    def probe(self) -> None:
        """Tries a write of one page in a file without a name. Raises TierError when the device does not work."""
        with self._io("probe_errors"):
            try:
                fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._dir_fd)
                try:
                    write_all(fd, [bytes(PAGE_BYTES)], 0)
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise tier_error(error, f"{self.directory}: probe") from error

    def close(self) -> None:
        """Lets the directory go. Files stay."""
        if not self._closed:
            self._closed = True
            os.close(self._lock_fd)
            os.close(self._dir_fd)

    # -- below ---------------------------------------------------------------------------------------------------------

    def _extent(self, number: int) -> SsdExtent:
        extent = self._extents.get(number)
        if extent is None:
            raise TierError(Trouble.DAMAGED, f"no slab file for extent {number}")
        return extent

    @contextlib.contextmanager
    def _io(self, errors: str, n_bytes: int = 0) -> Iterator[None]:
        """Around every call to the device: refuses at once while an earlier one hangs, so that not all threads end up
        waiting."""
        if self._closed:
            raise TierError(Trouble.CLOSED, "the SSD tier is closed")
        if self.is_stalled:
            self._counters["stalled_refused"] += 1
            raise TierError(Trouble.STALLED, f"{self.directory}: the device does not answer")
        token = object()
        self._inflight[token] = time.monotonic() + self._stall_s + n_bytes / SLOW_BYTES_PER_S
        try:
            yield
        except TierError:
            self._counters[errors] += 1
            raise
        finally:
            del self._inflight[token]


def _check_fits(extent: SsdExtent, index: int, size: int) -> None:
    if not 0 < size <= extent.geometry.slot_bytes or index >= extent.geometry.n_slots:
        raise ValueError(f"{size} bytes do not fit slot {index} of extent {extent.number}")
