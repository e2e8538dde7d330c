"""DRAM tier: one arena a namespace, each two memfds that local clients may map read-only.

    data memfd (arena_bytes, sparse)                     generations memfd (u64 words, sparse)
    | position 0 | position 1 | ...                |     | g0 | g1 | ...
      extents, populated before use, punched after         word of a slot grows whenever the slot is freed

Owns the memory and the fds. Which slot lies where is `kvpool.core.slots`; who holds a slot is `kvpool.core.blocks`.

Clients get fds re-opened read-only: mapping them writable is refused by the kernel whoever asks. The memfds are sealed against
growing, shrinking and more seals, so that nobody can make a mapping fault, and have mode 0, so that another user who was given
an fd cannot open it again for writing. F_SEAL_FUTURE_WRITE would forbid that to root too, but it also forbids punching holes
(EPERM since Linux 5.1), without which memory could not go from one namespace to another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.core.types import PAGE_BYTES, NamespaceUid, Tier
from kvpool.worker.tiers.base import STATE_OK, TierError, Trouble, populate_write, punch_hole, round_up, tier_error

_GEN_WORD_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class ArenaFds:
    """What a local client needs to map an arena. The fds are read-only and stay the tier's: pass them on, do not close them."""

    data_fd: int
    gen_fd: int
    arena_bytes: int
    gen_words: int


class _Arena:
    """One namespace's memfds and mappings."""

    def __init__(self, uid: NamespaceUid, *, arena_bytes: int, gen_words: int) -> None:
        self.uid = uid
        self.arena_bytes = round_up(arena_bytes)
        self.gen_words = gen_words
        with contextlib.ExitStack() as undo:
            self.fd, self.read_fd = _sealed_memfd(f"kvpool-{uid.hex()[:8]}", self.arena_bytes, undo)
            self.gen_fd, self.gen_read_fd = _sealed_memfd(f"kvpool-{uid.hex()[:8]}-gen", gen_words * _GEN_WORD_BYTES, undo)
            self.map = mmap.mmap(self.fd, self.arena_bytes)
            undo.callback(self.map.close)
            self.gen_map = mmap.mmap(self.gen_fd, round_up(gen_words * _GEN_WORD_BYTES))
            undo.pop_all()
        self.view = memoryview(self.map)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.map, dtype=np.uint8)
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(self.gen_map, dtype=np.uint64)

    def close_fds(self) -> None:
        for fd in (self.fd, self.read_fd, self.gen_fd, self.gen_read_fd):
            os.close(fd)

    def try_unmap(self) -> bool:
        """False while somebody still has a view of a slot."""
        self.bytes, self.generations = np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint64)
        try:
            self.view.release()
            self.map.close()
            self.gen_map.close()
        except BufferError:
            return False
        return True


class DramTier:
    """Memory of one worker. All methods may be called by any thread; `bump` of one word only by one thread at a time."""

    tier = Tier.DRAM

    def __init__(self, *, capacity_bytes: int, arena_bytes: int, gen_words: int) -> None:
        """`arena_bytes`: virtual size of every arena (not memory); `gen_words`: slots that an arena may ever number."""
        self.capacity_bytes = capacity_bytes
        self._arena_bytes = round_up(arena_bytes)
        self._gen_words = round_up(gen_words, PAGE_BYTES // _GEN_WORD_BYTES)
        self._arenas: dict[NamespaceUid, _Arena] = {}
        self._leaving: list[_Arena] = []
        self._closed = False
        self._lock = threading.Lock()  # opening, closing and punching: a closed fd's number is soon another file's
        self._counters = {"populated_bytes": 0, "punched_bytes": 0, "populate_failed": 0}

    @property
    def state(self) -> str:
        return "closed" if self._closed else STATE_OK

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def open_arena(self, uid: NamespaceUid) -> None:
        """Makes the arena of a namespace; opening it again does nothing. Raises TierError (no fds, no memory)."""
        if self._closed:
            raise TierError(Trouble.CLOSED, "the DRAM tier is closed")
        with self._lock:
            self._unmap_leaving()
            if uid in self._arenas:
                return
            try:
                self._arenas[uid] = _Arena(uid, arena_bytes=self._arena_bytes, gen_words=self._gen_words)
            except OSError as error:
                raise tier_error(error, f"DRAM arena of namespace {uid.hex()}") from error

    def close_arena(self, uid: NamespaceUid) -> None:
        """Gives a namespace's memory back at once. Views and mappings handed out before read zeros from then on."""
        with self._lock:
            arena = self._arenas.pop(uid, None)
            if arena is not None:
                with contextlib.suppress(OSError):
                    punch_hole(arena.fd, 0, arena.arena_bytes)
                arena.close_fds()
                self._leaving.append(arena)
            self._unmap_leaving()

    def view(self, uid: NamespaceUid, offset: int, size: int) -> memoryview:
        """Writable bytes [size] of the arena at `offset`. The caller must own the slot (a reservation or a pin)."""
        arena = self._arena(uid)
        if not 0 <= offset <= offset + size <= arena.arena_bytes:
            raise ValueError(f"DRAM view {offset}+{size} lies outside of the arena of {arena.arena_bytes} bytes")
        return arena.view[offset : offset + size]

    def array(self, uid: NamespaceUid) -> npt.NDArray[np.uint8]:
        """The whole arena, uint8 [arena_bytes], writable: for copies with `np.copyto`, which leave the GIL."""
        return self._arena(uid).bytes

    def populate(self, uid: NamespaceUid, offset: int, n_bytes: int) -> None:
        """Makes the pages of a range be there (first touch in a copy runs at a third of the speed). Contents are kept.

        Raises TierError FULL when the machine has no memory left; the range may then be partly populated.
        """
        arena = self._arena(uid)
        start = offset // PAGE_BYTES * PAGE_BYTES
        length = min(round_up(offset + n_bytes), arena.arena_bytes) - start
        mapped = arena.bytes  # keeps the mapping until we are done, should the arena be closed meanwhile
        try:
            try:
                populate_write(int(mapped.ctypes.data) + start, length)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS):
                    raise
                os.posix_fallocate(arena.fd, start, length)
        except OSError as error:
            self._counters["populate_failed"] += 1
            reason = f"DRAM populate of {length} bytes: {error.strerror}"
            raise TierError(Trouble.FULL, reason) from error
        self._counters["populated_bytes"] += length

    def punch(self, uid: NamespaceUid, offset: int, n_bytes: int) -> None:
        """Gives the whole pages inside a range back to the machine; they read as zeros. A closed arena is left alone."""
        start, stop = round_up(offset), (offset + n_bytes) // PAGE_BYTES * PAGE_BYTES
        with self._lock:
            arena = self._arenas.get(uid)
            if arena is None or stop <= start:
                return
            try:
                punch_hole(arena.fd, start, stop - start)
            except OSError as error:
                raise tier_error(error, "DRAM punch") from error
            self._counters["punched_bytes"] += stop - start

    def fds(self, uid: NamespaceUid) -> ArenaFds:
        """Read-only fds for a client that attaches."""
        arena = self._arena(uid)
        return ArenaFds(arena.read_fd, arena.gen_read_fd, arena.arena_bytes, arena.gen_words)

    def bump(self, uid: NamespaceUid, gen_index: int) -> None:
        """Marks all that was read from a slot as stale. Before the slot is filled again; under the node's lock."""
        arena = self._arenas.get(uid)
        if arena is not None:
            arena.generations[gen_index] += np.uint64(1)

    def generation(self, uid: NamespaceUid, gen_index: int) -> int:
        return int(self._arena(uid).generations[gen_index])

    def resident_bytes(self) -> int:
        """Memory behind all arenas, as the kernel counts it."""
        return sum(os.fstat(arena.fd).st_blocks * 512 for arena in list(self._arenas.values()))

    def close(self) -> None:
        self._closed = True
        for uid in list(self._arenas):
            self.close_arena(uid)

    def _arena(self, uid: NamespaceUid) -> _Arena:
        arena = self._arenas.get(uid)
        if arena is None:
            raise TierError(Trouble.CLOSED, f"namespace {uid.hex()} has no DRAM arena")
        return arena

    def _unmap_leaving(self) -> None:
        self._leaving = [arena for arena in self._leaving if not arena.try_unmap()]


def _sealed_memfd(name: str, n_bytes: int, undo: contextlib.ExitStack) -> tuple[int, int]:
    """(read-write fd, read-only fd) of a new memfd of fixed size. `undo` closes both unless it is emptied."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    undo.callback(os.close, fd)
    os.ftruncate(fd, round_up(n_bytes))
    read_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    undo.callback(os.close, read_fd)
    os.fchmod(fd, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd, read_fd
