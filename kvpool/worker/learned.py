"""What a worker's learned policy has learned, kept over restarts: one small file in the data directory.

Owns reading it at start and writing it every minute and at the stop, whole or not at all. One that is damaged, or of another
release, is set aside as `policy-tables.damaged`, and learning begins anew. Only the latest of those is kept, as with the index:
it is the one that the log just spoke of, and none is worth getting back. What is in it is `core.policy.lifetable`'s.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import stat
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from kvpool.core.policy.hazard import Hazard
from kvpool.errors import ConfigError

log = logging.getLogger(__name__)

FILE_NAME: Final = "policy-tables"
NEW: Final = ".new"
SAVE_S: Final = 60.0


class ClockFile:
    """The time of a trace that is replayed, for workers on the same machine: 8 bytes, milliseconds. Made where it is missing.
    ConfigError where it cannot be, or where another file is: that is left as it is."""

    def __init__(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise ConfigError(f"policy_clock: {path}: {error.strerror}") from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size not in (0, 8):
                raise ConfigError(f"policy_clock: {path} is another file, not a clock of 8 bytes")
            os.ftruncate(fd, 8)
            self._map = mmap.mmap(fd, 8)
        finally:
            os.close(fd)

    def set(self, ms: float) -> None:
        """It is this time now."""
        self._map[:8] = int(ms).to_bytes(8, "little")

    def now_ms(self) -> int:
        return int.from_bytes(self._map[:8], "little")


def clear_unfinished(directory: Path) -> None:
    """Removes what a worker left that was killed while it saved. For any policy: it may have been another one then."""
    with contextlib.suppress(OSError):
        (directory / FILE_NAME).with_suffix(NEW).unlink(missing_ok=True)


class Learned:
    """The policy and its file. One thread at a time."""

    def __init__(self, directory: Path, *, clock: str = "", lean: bool = True) -> None:
        """Reads what an earlier process saved. clock: a `ClockFile` to go by; empty: the time. lean: `Hazard`'s. ConfigError: not
        a clock."""
        self.policy = Hazard(clock=ClockFile(Path(clock)).now_ms if clock else None, lean=lean)
        self._path = directory / FILE_NAME
        self._due_s = time.monotonic() + SAVE_S
        self._version = 0
        try:
            self.policy.table.from_bytes(self._path.read_bytes())
            self._version = self.policy.table.version
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("event=policy_tables_set_aside path=%s reason=%r", self._path, str(error))
            with contextlib.suppress(OSError):
                self._path.replace(self._path.with_suffix(".damaged"))

    def save_if_due(self, lock: AbstractContextManager[object]) -> None:
        """Once a minute. `lock`: the node's."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + SAVE_S
            self.save(lock)

    def save(self, lock: AbstractContextManager[object]) -> None:
        """When anything was learned since the last time. A disk that refuses is logged, no more."""
        with lock:
            version = self.policy.table.version
            saved = self.policy.table.to_bytes() if version != self._version else b""
        if not saved:
            return
        new = self._path.with_suffix(NEW)
        try:
            with new.open("wb") as out:
                out.write(saved)
                out.flush()
                os.fsync(out.fileno())
            new.replace(self._path)
            self._version = version
        except OSError as error:
            log.warning("event=policy_tables_not_saved path=%s reason=%r", self._path, str(error))
