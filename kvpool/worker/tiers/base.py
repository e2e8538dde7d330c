"""What all tiers share: how they fail, what they tell of themselves, and direct calls into the C library.

Owns no bytes; `dram` and `ssd` do.
"""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from kvpool.core.types import NO_PARENT, PAGE_BYTES, Key, NamespaceUid, Tier

STATE_OK: Final = "ok"


class Trouble(Enum):
    """What a tier's failure means for the caller."""

    DAMAGED = "damaged"  # these blocks are lost, the tier is fine: drop them, they are misses
    IO = "io"  # the device failed: the tier should be marked out
    FULL = "full"  # no room where room was expected (disk, memory, cap)
    STALLED = "stalled"  # the device does not answer; nothing was started
    BUSY = "busy"  # staging memory was not to be had within the deadline; nothing was started
    CLOSED = "closed"


class TierError(Exception):
    """A tier could not do it. Nothing that was asked for may be taken as done."""

    def __init__(self, trouble: Trouble, reason: str) -> None:
        super().__init__(reason)
        self.trouble = trouble
        self.reason = reason

    @property
    def is_out(self) -> bool:
        """True when more calls would fail alike: the tier should be left alone for a while."""
        return self.trouble in (Trouble.IO, Trouble.FULL, Trouble.STALLED)


_FULL_ERRNOS: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}
_DAMAGE_ERRNOS: Final = {errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EACCES, errno.EPERM}


def tier_error(error: OSError, doing: str) -> TierError:
    """OSError -> TierError; a missing, replaced or unreadable file is damage, out-of-space is FULL, all else is IO."""
    if error.errno in _FULL_ERRNOS:
        trouble = Trouble.FULL
    elif error.errno in _DAMAGE_ERRNOS:
        trouble = Trouble.DAMAGED
    else:
        trouble = Trouble.IO
    return TierError(trouble, f"{doing}: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What a tier that outlives the process keeps beside a block's bytes. `block_sum` is the u64 made of its chunk sums. `kept`:
    `retention.pack_hint` with the end of its time (ms of the wall clock, 0: none)."""

    namespace: NamespaceUid
    key: Key
    size: int
    block_sum: int
    depth: int = 0
    parent: bytes = NO_PARENT
    kept: int = 0


class TierShell(Protocol):
    """What health, metrics and shutdown need of any tier."""

    tier: Tier
    capacity_bytes: int

    @property
    def state(self) -> str:
        """`ok`, or why the tier is not used at present."""

    def counters(self) -> dict[str, int]:
        """Plain counts by name. Any thread."""

    def close(self) -> None:
        """Gives back fds and mappings. Calls that come later raise TierError CLOSED."""


def round_up(n_bytes: int, unit: int = PAGE_BYTES) -> int:
    return -(-n_bytes // unit) * unit


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_FALLOC_PUNCH_HOLE_KEEP_SIZE: Final = 0x3
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14


def punch_hole(fd: int, offset: int, n_bytes: int) -> None:
    """Frees the pages behind a range; it reads as zeros from then on. Leaves the GIL (ctypes). Raises OSError."""
    if _libc.fallocate(fd, _FALLOC_PUNCH_HOLE_KEEP_SIZE, offset, n_bytes):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def populate_write(address: int, n_bytes: int) -> None:
    """Faults pages of a writable mapping in, contents kept. Leaves the GIL. Raises OSError (EINVAL: kernel too old)."""
    if _libc.madvise(address, n_bytes, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
