"""Reads the slab files of a directory at start: what earlier processes left and what of it can be trusted.

Changes files only to mend them: bad records are zeroed, files of a wrong length get the right one, regular files with
a slab's name that are none are deleted (they count in the tier's size). Nothing found on disk is fatal. Whether
blocks are wanted is `ssd`'s caller's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvpool.core.types import PAGE_BYTES
from kvpool.worker.tiers import slab_file
from kvpool.worker.tiers.disk import LOCK_NAME, OPEN_FLAGS
from kvpool.worker.tiers.slab_file import NO_RECORD, RECORD_BYTES, BadHeader, Header, Record

log = logging.getLogger("kvpool.worker.ssd")

_NUMBER_END: Final = 1 << 32  # extent numbers are the upper half of a slot


@dataclass(frozen=True, slots=True)
class FoundSlab:
    """A file whose header and `records` were checked. `last_seq` is 0 when it has none."""

    header: Header
    status: os.stat_result
    records: list[Record]
    last_seq: int


def find_slabs(dir_fd: int, *, counters: Counter[str]) -> list[FoundSlab]:
    """All usable slab files. Names of other forms are not touched; subdirectories are not entered."""
    found = []
    for name in sorted(os.listdir(dir_fd)):
        number = slab_file.file_number(name)
        if number is None or number >= _NUMBER_END:
            counters["scan_foreign_files"] += name != LOCK_NAME
            continue
        try:
            found.append(_read_slab(dir_fd, name, number=number, counters=counters))
        except (BadHeader, OSError) as error:
            counters["scan_bad_files"] += 1
            set_aside(dir_fd, name, str(error))
    return found


def newest_of_each_key(slabs: Iterable[FoundSlab]) -> dict[bytes, int]:
    """(namespace uid + key) -> highest sequence of its records."""
    newest: dict[bytes, int] = {}
    for slab in slabs:
        uid = slab.header.namespace
        for record in slab.records:
            key = uid + record.key
            if record.seq > newest.get(key, -1):
                newest[key] = record.seq
    return newest


def set_aside(dir_fd: int, name: str, reason: str) -> None:
    """Deletes what lies under a slab's name if it is a regular file; a directory, a link or a device is let be."""
    log.warning("event=ssd_file_unusable file=%s reason=%r", name, reason)
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=dir_fd)


def _read_slab(dir_fd: int, name: str, *, number: int, counters: Counter[str]) -> FoundSlab:
    fd = os.open(name, os.O_RDWR | OPEN_FLAGS, dir_fd=dir_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadHeader("not a regular file")
        header = slab_file.decode_header(os.pread(fd, PAGE_BYTES, 0), number=number)
        geometry = header.geometry
        raw = os.pread(fd, geometry.n_slots * RECORD_BYTES, PAGE_BYTES)
        table = slab_file.decode_table(raw, header=header, file_bytes=status.st_size)
        if table.bad:
            counters["scan_bad_records"] += len(table.bad)
            log.warning("event=ssd_scan file=%s bad_records=%d", name, len(table.bad))
            for index in table.bad:
                os.pwrite(fd, NO_RECORD, geometry.record_offset(index))
        if status.st_size != geometry.file_bytes:
            counters["scan_resized_files"] += 1
            log.warning("event=ssd_scan file=%s bytes=%d expected=%d", name, status.st_size, geometry.file_bytes)
            os.ftruncate(fd, min(status.st_size, geometry.file_bytes))
            os.posix_fallocate(fd, 0, geometry.file_bytes)
        return FoundSlab(header, status, table.records, max((record.seq for record in table.records), default=0))
    finally:
        os.close(fd)
