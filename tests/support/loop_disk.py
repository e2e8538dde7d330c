"""A small disk of a test's own: a loop device with ext4 that can be made to answer EIO, and be well again. Needs root."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GET_STATUS, SET_STATUS = 0x4C05, 0x4C04  # linux/loop.h
STATUS_BYTES, LIMIT_AT = 232, 32  # struct loop_info64, its lo_sizelimit
KEPT_BYTES = 1 << 20  # the file system's own beginning stays readable
COMMAND_S = 60


class NoLoopDisk(Exception):
    """This machine lends no loop devices."""


class LoopDisk:
    """Mounted at `path`. `fail`: every read and write behind the first MiB gives EIO. `heal`: all is as it was before."""

    def __init__(self, device: str, path: Path) -> None:
        self.device, self.path = device, path

    def fail(self) -> None:
        self._limit(KEPT_BYTES)

    def heal(self) -> None:
        self._limit(0)

    def _limit(self, n_bytes: int) -> None:
        fd = os.open(self.device, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = bytearray(STATUS_BYTES)
            fcntl.ioctl(fd, GET_STATUS, status)
            struct.pack_into("<Q", status, LIMIT_AT, n_bytes)
            fcntl.ioctl(fd, SET_STATUS, bytes(status))
        finally:
            os.close(fd)


@contextmanager
def loop_disk(path: Path, *, size: int) -> Iterator[LoopDisk]:
    """A disk of `size` bytes at `path` (made), unmounted at the end. Raises NoLoopDisk where none can be had."""
    path.mkdir(parents=True, exist_ok=True)
    image = path.with_name(f"{path.name}.img")
    with image.open("wb") as file:
        file.truncate(size)
    try:
        device = _run("losetup", "--find", "--show", str(image))
        try:
            _run("mkfs.ext4", "-q", "-O", "^has_journal", device)  # (a journal would make the whole of it read-only)
            _run("mount", "-o", "errors=continue", device, str(path))
        except NoLoopDisk:
            _run("losetup", "--detach", device)
            raise
        disk = LoopDisk(device, path)
        try:
            yield disk
        finally:
            disk.heal()
            _run("umount", "--lazy", str(path))
            _run("losetup", "--detach", device)
    finally:
        image.unlink()


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoLoopDisk(f"{command[0]}: {getattr(error, 'stderr', '') or error}") from error
    return done.stdout.strip()
