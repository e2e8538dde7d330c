"""The store of a single master: LMDB in its data directory.

    data_dir/LOCK             flock of the master that runs, with its pid
    data_dir/state/data.mdb   meta, namespaces, removals (uid + number, big-endian), workers, pins (uid + key)

Writes are synced and run on one thread, so that a slow disk does not hold the loop. A damaged file is refused and left as it is:
nothing here can be made again from elsewhere.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from kvpool.core.removals import Removal
from kvpool.core.types import UID_BYTES, Epoch, Key, NamespaceUid, WorkerId
from kvpool.errors import ConfigError, KVPoolError, QuotaExceeded
from kvpool.master.store import (
    NamespaceRecord,
    PinRecord,
    WorkerRecord,
    namespace_from_bytes,
    namespace_to_bytes,
    pin_from_bytes,
    pin_to_bytes,
    with_removal_seq,
    worker_from_bytes,
    worker_to_bytes,
)

MAP_BYTES: Final = 4 << 30  # virtual; some thousand namespaces with a full removal log each
_SEQ: Final = struct.Struct(">Q")
_EVERYTHING: Final = b"\1"
_KEYS: Final = b"\0"
_META_MAGIC: Final = 0xBEEFC0DE
_META_AT: Final = 16  # a page header before it
_LAST_PAGE_AT: Final = _META_AT + 24 + 2 * 48

T = TypeVar("T")


class LmdbStore:
    """See `store.Store`."""

    def __init__(self, data_dir: Path) -> None:
        self._dir = data_dir
        self._env: Any = None
        self._lock: int | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.master_id = ""

    async def open(self) -> Epoch:
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"data_dir: {self._dir} cannot be made: {error.strerror}") from error
        self._lock = take_lock(self._dir)
        try:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpool-store")
            return await self._run(self._open)
        except BaseException:
            await self.close()
            raise

    def _open(self) -> Epoch:
        import lmdb

        place = self._dir / "state"
        _check_file(place / "data.mdb")
        try:
            self._env = lmdb.open(str(place), map_size=MAP_BYTES, max_dbs=8, metasync=True, sync=True, create=True)
            self._dbs = {name: self._env.open_db(name.encode()) for name in ("meta", "namespaces", "removals", "workers", "pins")}
            with self._env.begin(write=True) as txn:
                meta = self._dbs["meta"]
                epoch = int(txn.get(b"epoch", b"0", db=meta)) + 1
                txn.put(b"epoch", str(epoch).encode(), db=meta)
                self.master_id = txn.get(b"master_id", b"", db=meta).decode() or f"m-{uuid.uuid4().hex[:12]}"
                txn.put(b"master_id", self.master_id.encode(), db=meta)
            self._fill_up()
        except (lmdb.Error, OSError, ValueError) as error:
            raise ConfigError(f"data_dir: the state in {place} cannot be opened: {error}") from error
        return Epoch(epoch)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise KVPoolError("the store is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _write(self, work: Callable[[Any], None]) -> None:
        import lmdb

        def run() -> None:
            try:
                with self._env.begin(write=True) as txn:
                    work(txn)
                self._fill_up()
            except lmdb.MapFullError as error:
                raise QuotaExceeded(f"the store in {self._dir} is full: its limit is {MAP_BYTES} bytes") from error
            except lmdb.Error as error:
                raise KVPoolError(f"the store in {self._dir} cannot be written: {error}") from error

        await self._run(run)

    def _fill_up(self) -> None:
        """A page that was taken and given back within one transaction is never written: the file may end before it. It is made as
        long as its header says, so that a file that is shorter is a damaged one."""
        path = self._dir / "state" / "data.mdb"
        whole = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if path.stat().st_size < whole:
            os.truncate(path, whole)

    async def _values(self, db: str) -> list[bytes]:
        def run() -> list[bytes]:
            with self._env.begin(db=self._dbs[db]) as txn:
                return [bytes(value) for _, value in txn.cursor()]

        return await self._run(run)

    async def namespaces(self) -> list[NamespaceRecord]:
        return [namespace_from_bytes(raw) for raw in await self._values("namespaces")]

    async def put_namespace(self, record: NamespaceRecord) -> None:
        raw = namespace_to_bytes(record)
        await self._write(lambda txn: txn.put(record.spec.uid, raw, db=self._dbs["namespaces"]))

    async def delete_namespace(self, uid: NamespaceUid) -> None:
        def work(txn: Any) -> None:
            txn.delete(uid, db=self._dbs["namespaces"])
            self._trim(txn, uid, before_seq=2**64 - 1)
            cursor = txn.cursor(db=self._dbs["pins"])
            found = cursor.set_range(uid)
            while found and bytes(cursor.key()[:UID_BYTES]) == uid:
                found = cursor.delete()

        await self._write(work)

    async def log_removal(self, uid: NamespaceUid, removal: Removal, *, first_seq: int) -> None:
        def work(txn: Any) -> None:
            raw = txn.get(uid, db=self._dbs["namespaces"])
            if raw is None:
                return
            record = with_removal_seq(namespace_from_bytes(raw), removal.seq)
            txn.put(uid, namespace_to_bytes(record), db=self._dbs["namespaces"])
            value = (_EVERYTHING if removal.everything else _KEYS) + removal.keys
            txn.put(uid + _SEQ.pack(removal.seq), value, db=self._dbs["removals"])
            self._trim(txn, uid, before_seq=first_seq)

        await self._write(work)

    def _trim(self, txn: Any, uid: NamespaceUid, *, before_seq: int) -> None:
        cursor = txn.cursor(db=self._dbs["removals"])
        found = cursor.set_range(uid)
        while found:
            key = bytes(cursor.key())
            if key[:UID_BYTES] != uid or _SEQ.unpack(key[UID_BYTES:])[0] >= before_seq:
                break
            found = cursor.delete()

    async def removals(self, uid: NamespaceUid) -> Sequence[Removal]:
        def run() -> list[Removal]:
            found = []
            with self._env.begin(db=self._dbs["removals"]) as txn:
                cursor = txn.cursor()
                if cursor.set_range(uid):
                    for key, value in cursor:
                        if bytes(key[:UID_BYTES]) != uid:
                            break
                        seq = _SEQ.unpack(bytes(key[UID_BYTES:]))[0]
                        found.append(Removal(seq, bytes(value[1:]), bytes(value[:1]) == _EVERYTHING))
            return found

        return await self._run(run)

    async def put_pins(self, uid: NamespaceUid, pins: Sequence[PinRecord]) -> None:
        def work(txn: Any) -> None:
            if txn.get(uid, db=self._dbs["namespaces"]) is not None:
                for pin in pins:
                    txn.put(uid + pin.key, pin_to_bytes(pin), db=self._dbs["pins"])

        await self._write(work)

    async def delete_pins(self, uid: NamespaceUid, keys: Sequence[Key]) -> None:
        def work(txn: Any) -> None:
            for key in keys:
                txn.delete(uid + key, db=self._dbs["pins"])

        await self._write(work)

    async def pins(self) -> list[tuple[NamespaceUid, PinRecord]]:
        def run() -> list[tuple[NamespaceUid, PinRecord]]:
            with self._env.begin(db=self._dbs["pins"]) as txn:
                return [pin_from_bytes(bytes(name), bytes(value)) for name, value in txn.cursor()]

        return await self._run(run)

    async def workers(self) -> list[WorkerRecord]:
        return [worker_from_bytes(raw) for raw in await self._values("workers")]

    async def put_worker(self, record: WorkerRecord) -> None:
        raw = worker_to_bytes(record)
        await self._write(lambda txn: txn.put(record.worker_id.encode(), raw, db=self._dbs["workers"]))

    async def delete_worker(self, worker_id: WorkerId) -> None:
        await self._write(lambda txn: txn.delete(worker_id.encode(), db=self._dbs["workers"]))

    async def ping(self) -> None:
        def run() -> None:
            with self._env.begin(db=self._dbs["meta"]) as txn:
                if txn.get(b"epoch") is None:
                    raise KVPoolError("the store has lost its epoch")

        await self._run(run)

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, self._close_env)
            thread.shutdown(wait=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _close_env(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def take_lock(data_dir: Path) -> int:
    """A descriptor that keeps other masters out of the directory while it is open. ConfigError naming the one that is in it."""
    path = data_dir / "LOCK"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"data_dir: {path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(f"data_dir: {data_dir} is in use by another master (pid {holder})") from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _check_file(path: Path) -> None:
    """Reading a map past the end of its file kills the process: the file must have all pages that it speaks of."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"data_dir: {path} cannot be read: {error.strerror}") from error
    if size == 0:
        return
    if len(head) < 4096 or struct.unpack_from("<I", head, _META_AT)[0] != _META_MAGIC:
        raise ConfigError(f"data_dir: {path} is no LMDB file, or is damaged; restore it, or move it away to begin anew")
    page_bytes = struct.unpack_from("<I", head, _META_AT + 24)[0]  # md_pad of the first table has the page size
    if not 512 <= page_bytes <= 65536:
        raise ConfigError(f"data_dir: {path} is damaged (page size {page_bytes}); restore it, or move it away to begin anew")
    with path.open("rb") as file:
        file.seek(page_bytes)
        second = file.read(_LAST_PAGE_AT + 8)
    last_pages = [struct.unpack_from("<Q", page, _LAST_PAGE_AT)[0] for page in (head, second) if len(page) >= _LAST_PAGE_AT + 8]
    if len(last_pages) < 2 or size < (max(last_pages) + 1) * page_bytes:
        raise ConfigError(
            f"data_dir: {path} is truncated: {size} bytes of {(max(last_pages) + 1) * page_bytes}; "
            "restore it, or move it away to begin anew"
        )
