"""A directory on a disk as the SSD tier uses it: lock, probe for direct I/O, whole reads and writes. No format, no policy."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from kvpool.core.types import PAGE_BYTES
from kvpool.errors import ConfigError

LOCK_NAME: Final = "LOCK"
IOV_MAX: Final = 1000  # the kernel takes 1024 pieces a call
OPEN_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # never through a symlink, never waiting on a pipe put there


def open_directory(directory: Path, *, setting: str) -> int:
    """Fd of a directory, made if it is not there. Raises ConfigError naming `setting`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{setting}: directory {directory} cannot be used: {error.strerror}") from error


def take_lock(dir_fd: int, directory: Path, *, setting: str, name: str = LOCK_NAME) -> int:
    """Exclusive for as long as the fd is open; a lock of a dead process does not block. Raises ConfigError naming the holder."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600, dir_fd=dir_fd)
    except OSError as error:
        raise ConfigError(f"{setting}: directory {directory} cannot be written: {name}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        if error.errno != errno.EWOULDBLOCK:
            raise ConfigError(f"{setting}: directory {directory} cannot be locked: {error.strerror}") from error
        raise ConfigError(f"{setting}: directory {directory} is in use by another worker (pid {holder})") from error
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def probe_direct(dir_fd: int) -> bool:
    """Whether an aligned page can be written and read back with direct I/O in this directory."""
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwrite(fd, page, 0)
            os.preadv(fd, [page], 0)
        return True
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        os.close(fd)


def set_direct(fd: int) -> None:
    """Turns direct I/O on for an open regular file. Raises OSError where the file system has none."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def aligned_bytes(data: memoryview) -> int:
    """How many leading bytes of a buffer direct I/O can take as they lie."""
    address = int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
    return 0 if address % PAGE_BYTES else len(data) // PAGE_BYTES * PAGE_BYTES


def write_all(fd: int, pieces: Sequence[memoryview | bytes], offset: int) -> None:
    """Writes all pieces back to back. Raises OSError; how much was written by then is unknown."""
    left = [memoryview(piece) for piece in pieces]
    while left:
        wrote = os.pwritev(fd, left[:IOV_MAX], offset)
        if wrote <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        offset += wrote
        while left and wrote >= len(left[0]):
            wrote -= len(left.pop(0))
        if wrote:
            left[0] = left[0][wrote:]


def read_all(fd: int, out: memoryview, offset: int) -> int:
    """Bytes read: fewer than asked only where the file ends. With direct I/O a read that stops within a page has met the end."""
    done = 0
    while done < len(out):
        got = os.preadv(fd, [out[done:]], offset + done)
        done += got
        if not got or got % PAGE_BYTES:
            break
    return done
