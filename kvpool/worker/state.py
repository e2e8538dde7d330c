"""What a worker remembers beside its blocks: its id, the namespaces that it has seen, how far it applied each one's
removals.

Owns DIR/id (text) and DIR/index (LMDB). The index is rebuildable: when it cannot be trusted it is set aside and an
empty one begun; the namespaces come again from the master, and blocks of a namespace whose removals are not known any
more must be dropped by the caller. Not owned: the removals themselves (`kvpool.core.removals`, master), blocks (slab
files).

LMDB maps its file: reading a page that is not there, or following a flipped bit, kills the process. So the file's
size is checked against its own meta pages first, and a child process reads everything once, before this one opens it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb
import xxhash

from kvpool.core.hashing import HashKind
from kvpool.core.namespaces import NamespaceSpec, ReadPolicy, WritePolicy
from kvpool.core.types import PAGE_BYTES, UID_BYTES, NamespaceUid, WorkerId
from kvpool.errors import ConfigError, KVPoolError
from kvpool.worker.tiers.base import TierError, Trouble
from kvpool.worker.tiers.disk import open_directory, take_lock

log = logging.getLogger("kvpool.worker.state")

T = TypeVar("T")

LOCK_NAME: Final = "state.lock"
MAP_BYTES: Final = 4 << 20  # a thousand namespaces; grows by itself
MAP_BYTES_MAX: Final = 1 << 30
CHECK_TIMEOUT_S: Final = 20.0
_ID: Final = re.compile(r"[0-9a-f]{32}")
_SUM: Final = struct.Struct("<Q")
_SEQ: Final = struct.Struct("<Q")
_META: Final = struct.Struct("<16x II 8x 8x I 44x 48x QQ")  # magic, version, page size, last page, transaction
_META_MAGIC: Final = 0xBEEFC0DE
_CHECK_PROGRAM: Final = """
import sys, lmdb
with lmdb.open(sys.argv[1], readonly=False, lock=False, max_dbs=4, create=False) as env:
    for name in (b"namespaces", b"applied"):
        db = env.open_db(name, create=True)
        with env.begin(db=db, write=True) as txn:
            for key, value in txn.cursor():
                bytes(key), bytes(value)
            txn.put(b"check", bytes(3000))
            txn.abort()
"""


class WorkerState:
    """Small durable facts of one worker. Methods may be called by any thread; only in the process that opened it."""

    def __init__(self, directory: Path, *, map_bytes: int = MAP_BYTES, map_bytes_max: int = MAP_BYTES_MAX) -> None:
        """Takes the directory (made if it is not there). Raises ConfigError when another worker, or this process, has
        it open, or when it cannot be written. Anything odd inside is set aside, counted and logged."""
        self.directory = directory
        self.counters: Counter[str] = Counter()
        self._map_bytes_max = map_bytes_max
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        with contextlib.ExitStack() as undo:
            dir_fd = open_directory(directory, setting="data_dir")
            undo.callback(os.close, dir_fd)
            self._lock_fd = take_lock(dir_fd, directory, setting="data_dir", name=LOCK_NAME)
            undo.callback(os.close, self._lock_fd)
            self.worker_id = self._read_id(directory / "id")
            self._open_index(directory / "index", map_bytes)
            undo.pop_all()
            os.close(dir_fd)

    # -- namespaces and removals ---------------------------------------------------------------------------------------

    def namespaces(self) -> list[NamespaceSpec]:
        """All namespaces seen and not forgotten."""
        return self._read(lambda txn: [_spec_from(bytes(uid), bytes(raw)) for uid, raw in txn.cursor(db=self._namespaces)])

    def put_namespace(self, spec: NamespaceSpec) -> None:
        """Remembers a namespace, or its changed spec. Raises TierError FULL when the disk is."""
        raw = _spec_bytes(spec)
        self._write(lambda txn: txn.put(spec.uid, raw, db=self._namespaces))

    def forget_namespace(self, uid: NamespaceUid) -> None:
        """The namespace was deleted: its spec and its place in the removals go."""

        def forget(txn: Any) -> None:
            txn.delete(uid, db=self._namespaces)
            txn.delete(uid, db=self._applied)

        # a full map must be able to shrink, and LMDB copies pages before it frees them
        self._write(forget, map_bytes_max=2 * self._map_bytes_max)

    def applied_seq(self, uid: NamespaceUid) -> int | None:
        """Up to which removal of a namespace has been applied; None: not known (nothing found at start may be
        served)."""
        raw = self._read(lambda txn: txn.get(uid, db=self._applied))
        return None if raw is None else _seq_from(uid, bytes(raw))

    def set_applied_seq(self, uid: NamespaceUid, seq: int) -> None:
        """Notes that removals up to `seq` are applied, durably. Call it after `SsdTier.sync`: to be behind is safe,
        ahead is not."""
        self._write(lambda txn: txn.put(uid, _seq_bytes(uid, seq), db=self._applied))

    def close(self) -> None:
        """Lets the directory go. In a forked child it does nothing."""
        with self._lock:
            if not self._closed and os.getpid() == self._pid:
                self._closed = True
                self._env.close()
                os.close(self._lock_fd)

    # -- below ---------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise KVPoolError(f"worker state {self.directory} was opened by process {self._pid}, not by this one (forked?)")
        if self._closed:
            raise KVPoolError(f"worker state {self.directory} is closed")

    def _read(self, what: Callable[[Any], T]) -> T:
        with self._lock:
            self._check_usable()
            with self._env.begin() as txn:
                return what(txn)

    def _write(self, what: Callable[[Any], object], *, map_bytes_max: int | None = None) -> None:
        """One write transaction; a full map is doubled and the transaction repeated."""
        most = map_bytes_max or self._map_bytes_max
        with self._lock:
            self._check_usable()
            while True:
                try:
                    with self._env.begin(write=True) as txn:
                        what(txn)
                    return
                except lmdb.MapFullError as error:
                    self._grow(error, most)
                except (lmdb.Error, OSError) as error:
                    self.counters["write_failed"] += 1
                    raise TierError(Trouble.FULL, f"worker state {self.directory}: {error}") from error

    def _grow(self, error: Exception, map_bytes_max: int) -> None:
        size = 2 * int(self._env.info()["map_size"])
        if size > map_bytes_max:
            self.counters["write_failed"] += 1
            raise TierError(Trouble.FULL, f"worker state {self.directory} is full at {size // 2} bytes") from error
        try:
            self._env.set_mapsize(size)
        except lmdb.Error as failed:
            self.counters["write_failed"] += 1
            raise TierError(Trouble.FULL, f"worker state {self.directory} cannot grow to {size} bytes: {failed}") from failed
        self.counters["grown"] += 1
        log.info("event=state_grown dir=%s bytes=%d", self.directory, size)

    def _read_id(self, path: Path) -> WorkerId:
        """The worker's id; made at the first start, or when the file is damaged."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = path.read_text("ascii").strip()
            if _ID.fullmatch(text):
                return WorkerId(text)
            self.counters["bad_id"] += 1
            log.warning("event=state_id_unusable file=%s", path)
        made = uuid.uuid4().hex
        fresh = path.with_name("id.new")
        try:
            fresh.write_text(made + "\n", "ascii")
            fresh.replace(path)
        except OSError as error:
            raise ConfigError(f"data_dir: {path} cannot be written: {error.strerror}") from error
        return WorkerId(made)

    def _open_index(self, path: Path, map_bytes: int) -> None:
        """Opens the index, or a new one when it has anything that we did not write."""
        reason = _why_not(path)
        if not reason:
            try:
                self._env, self._namespaces, self._applied = _open(path, map_bytes)
                reason = _content_trouble(self._env, self._namespaces, self._applied)
                if not reason:
                    return
                self._env.close()
            except (lmdb.Error, OSError) as error:
                reason = str(error)
        self._set_aside(path, reason)
        try:
            self._env, self._namespaces, self._applied = _open(path, map_bytes)
        except (lmdb.Error, OSError) as error:
            raise ConfigError(f"data_dir: {path} cannot be used: {error}") from error

    def _set_aside(self, path: Path, reason: str) -> None:
        """Only the latest bad one is kept, for whoever wants to look: bounded."""
        self.counters["set_aside"] += 1
        log.error("event=state_set_aside dir=%s reason=%r", path, reason)
        bad = path.with_name(path.name + ".bad")
        if bad.is_dir() and not bad.is_symlink():
            shutil.rmtree(bad, ignore_errors=True)
        else:
            bad.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.rename(bad)


def _open(path: Path, map_bytes: int) -> tuple[Any, Any, Any]:
    size = max(map_bytes, (path / "data.mdb").stat().st_size if (path / "data.mdb").exists() else 0)
    path.mkdir(mode=0o700, exist_ok=True)
    env = lmdb.open(str(path), map_size=size, max_dbs=4, max_readers=64, mode=0o600)
    try:
        return env, env.open_db(b"namespaces"), env.open_db(b"applied")
    except BaseException:
        env.close()
        raise


def _why_not(path: Path) -> str:
    """Why the index must not be opened; empty when it may be (or is not there)."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        return "not a directory"
    data = path / "data.mdb"
    if not path.exists() or not (data.exists() or data.is_symlink()):
        return ""
    if data.is_symlink() or not data.is_file():
        return "data.mdb is not a regular file"
    lock = path / "lock.mdb"
    if lock.is_symlink() or (lock.exists() and not lock.is_file()):
        return "lock.mdb is not a regular file"
    try:
        with contextlib.suppress(FileNotFoundError):
            lock.unlink()  # ours alone (we hold the directory): its readers are dead, its bytes not checked
        return _size_trouble(data) or _child_trouble(path)
    except OSError as error:
        return str(error)


def _size_trouble(data: Path) -> str:
    """Compares the file's size with what its newer meta page says is in use."""
    n_bytes = data.stat().st_size
    with data.open("rb") as file:
        head = file.read(2 * PAGE_BYTES)
    if len(head) < PAGE_BYTES:
        return f"data.mdb has only {n_bytes} bytes"
    page_bytes = _META.unpack_from(head)[2]
    if not 512 <= page_bytes <= 65536 or len(head) < page_bytes + _META.size:
        return "data.mdb has a damaged head"
    last_page = 0
    for offset in (0, page_bytes):
        magic, _, _, last, _ = _META.unpack_from(head, offset)
        if magic != _META_MAGIC:
            return "data.mdb has a damaged head"
        last_page = max(last_page, last)
    needed = (last_page + 1) * page_bytes
    return f"data.mdb has {n_bytes} bytes, {needed} are in use" if n_bytes < needed else ""


def _child_trouble(path: Path) -> str:
    """Reads all entries, and tries a write, in a process that may die of it."""
    command = [sys.executable, "-I", "-c", _CHECK_PROGRAM, str(path)]
    try:
        done = subprocess.run(command, timeout=CHECK_TIMEOUT_S, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"check failed: {error}"
    return "" if done.returncode == 0 else f"check ended with {done.returncode}: {done.stderr[-200:].decode('utf-8', 'replace')}"


def _content_trouble(env: Any, namespaces: Any, applied: Any) -> str:
    """Reads every entry, and looks each up. A damaged one means that the file is not to be trusted at all; one that is there and
    cannot be looked up, that the tree above it is damaged: what is written next would lie in a second place."""
    readers: tuple[tuple[Any, Callable[[bytes, bytes], object]], ...] = ((namespaces, _spec_from), (applied, _seq_from))
    try:
        with env.begin() as txn:
            for db, read in readers:
                for uid, raw in txn.cursor(db=db):
                    read(bytes(uid), bytes(raw))
                    if txn.get(bytes(uid), db=db) != raw:
                        raise _BadEntry(f"entry {uid.hex()} is not where it is looked for")
    except (lmdb.Error, _BadEntry) as error:
        return f"damaged entry: {error}"
    return ""


class _BadEntry(ValueError):
    """Not what this module writes under that key."""


def _signed(uid: bytes, body: bytes) -> bytes:
    return _SUM.pack(xxhash.xxh3_64_intdigest(uid + body)) + body


def _checked(uid: bytes, raw: bytes) -> bytes:
    """The body of an entry. Raises _BadEntry."""
    body = raw[_SUM.size :]
    if len(uid) != UID_BYTES or _signed(uid, body) != raw:
        raise _BadEntry(f"checksum of entry {uid.hex()}")
    return body


def _seq_bytes(uid: bytes, seq: int) -> bytes:
    return _signed(uid, _SEQ.pack(seq))


def _seq_from(uid: bytes, raw: bytes) -> int:
    body = _checked(uid, raw)
    if len(body) != _SEQ.size:
        raise _BadEntry(f"length of entry {uid.hex()}")
    return int(_SEQ.unpack(body)[0])


def _spec_bytes(spec: NamespaceSpec) -> bytes:
    fields = dataclasses.asdict(spec)
    fields["hash"] = spec.hash.value
    for name, default in (
        ("ttl_ms", 0), ("write_policy", WritePolicy.BACK), ("read_policy", ReadPolicy.WAIT), ("read_timeout_ms", 0),
    ):  # fmt: skip
        if fields[name] == default:
            del fields[name]  # an earlier release takes a field that it does not know for damage
    for name in ("uid", "fingerprint", "salt"):
        fields[name] = fields[name].hex()
    return _signed(spec.uid, json.dumps(fields, sort_keys=True).encode())


def _spec_from(uid: bytes, raw: bytes) -> NamespaceSpec:
    """Raises _BadEntry."""
    try:
        fields = json.loads(_checked(uid, raw))
        for name in ("uid", "fingerprint", "salt"):
            fields[name] = bytes.fromhex(fields[name])
        for name, kind in (("hash", HashKind), ("write_policy", WritePolicy), ("read_policy", ReadPolicy)):
            if name in fields:
                fields[name] = kind(fields[name])
        known = {field.name for field in dataclasses.fields(NamespaceSpec)}
        spec = NamespaceSpec(**{name: value for name, value in fields.items() if name in known}).check()
    except (ValueError, TypeError, KeyError, KVPoolError) as error:
        raise _BadEntry(str(error)) from error
    if spec.uid != uid:
        raise _BadEntry(f"entry {uid.hex()} is of another namespace")
    return spec
