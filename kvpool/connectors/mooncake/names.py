"""The names of keys. The pool knows digests only; what lists keys by name needs the names themselves.

Before a store puts keys that it has not named yet, it puts a record of their names into the same namespace, under shard 1:

    record   (u32 length, UTF-8 name) of each key ... ; its own key is sha256 of the record
    value    under shard 0, its key is sha256 of the name

So every process sees the names of every other's keys: list the namespace's keys, read the records, keep the names whose values
are there. Records are evicted like values, oldest first; a value that outlives its record is served as before and has no name
for listings (`unnamed` counts them).
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvpool.client.keyed import Keyed
from kvpool.client.namespace import Namespace
from kvpool.connectors.mooncake.config import log, say_once
from kvpool.core.fetch import CALL_MS
from kvpool.core.hashing import PrefixHashes
from kvpool.core.types import HASH_BYTES, Key
from kvpool.errors import KVPoolError

SHARD_VALUES: Final = 0
SHARD_NAMES: Final = 1
NAME_BYTES_MAX: Final = 64 << 10  # of one key
RECORD_BYTES_MAX: Final = 1 << 20
KNOWN_MAX: Final = 1 << 18  # digests of which this process remembers that they are named
READ_BYTES_MAX: Final = 32 << 20  # of records at once
_LENGTH: Final = struct.Struct("<I")


def digest_of(name: str) -> bytes:
    """The 32 bytes that stand for a key."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()


def is_value(key: Key) -> bool:
    """Whether a key of the namespace is a value's, not that of a record of names."""
    return int.from_bytes(key[HASH_BYTES:], "little") == SHARD_VALUES


class Names:
    """Of one open namespace. Thread-safe."""

    def __init__(self, namespace: Namespace, keyed: Keyed) -> None:
        self._namespace, self._keyed = namespace, keyed
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, bytes] = OrderedDict()  # digest of a key -> of the record that names it
        self.unnamed = 0  # values of the last listing that no record names

    def note(self, names: Sequence[str], digests: Sequence[bytes]) -> None:
        """Records the names that this process has not recorded yet. A record that is not stored costs listings, not the put."""
        try:
            fresh = self._not_recorded(names, digests)
            for record, part in _records(fresh):
                own = hashlib.sha256(record).digest()
                put = self._namespace.put(PrefixHashes(own, chained=False), [record], visibility="eventual", shard=SHARD_NAMES)
                if put.n_there:
                    self._remember(part, own)
                else:
                    say_once("names", "names of keys could not be recorded (%s): listings will lack them", put.reasons[0])
        except KVPoolError as error:
            log.warning("names could not be recorded: %s", error)

    def _not_recorded(self, names: Sequence[str], digests: Sequence[bytes]) -> list[tuple[str, bytes]]:
        """Those that no record of this process names; a record may have been evicted, or removed by somebody else."""
        with self._lock:
            record_of = {digest: self._known.get(digest, b"") for digest in digests}
        records = sorted({record for record in record_of.values() if record})
        deadline = time.monotonic() + CALL_MS / 1e3
        places = self._keyed.locate(b"".join(records), deadline=deadline, shard=SHARD_NAMES) if records else []
        there = {record for record, found in zip(records, places, strict=True) if found}
        return [(name, digest) for name, digest in zip(names, digests, strict=True) if record_of[digest] not in there]

    def _remember(self, digests: Iterable[bytes], record: bytes) -> None:
        with self._lock:
            for digest in digests:
                self._known[digest] = record
            while len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)

    def listing(self, *, deadline: float) -> dict[str, bytes]:
        """Names of all values, with their digests. MasterUnavailable when the master does not answer."""
        there, records = set[bytes](), []
        for key in self._keyed.keys(deadline=deadline):
            if is_value(key):
                there.add(key[:HASH_BYTES])
            else:
                records.append(key[:HASH_BYTES])
        found = {}
        for name in self._read(records, deadline=deadline):
            digest = digest_of(name)
            if digest in there:
                found[name] = digest
        self.unnamed = len(there) - len(found)
        return found

    def _read(self, records: Sequence[bytes], *, deadline: float) -> Iterator[str]:
        sizes = self._keyed.sizes(b"".join(records), deadline=deadline, shard=SHARD_NAMES)
        part: list[tuple[bytes, int]] = []
        for record, size in [*zip(records, sizes, strict=True), (b"", -1)]:
            if part and (not record or sum(n for _, n in part) + size > READ_BYTES_MAX):
                outs = [memoryview(bytearray(n)) for _, n in part]
                keys = b"".join(key for key, _ in part)
                result = self._keyed.get(keys, outs, deadline=deadline, shard=SHARD_NAMES)
                for out, got in zip(outs, result.got, strict=True):
                    if got:
                        yield from _names_in(out)
                part = []
            if size > 0:
                part.append((record, size))
        if time.monotonic() >= deadline:
            log.warning("the deadline passed while names were read: the listing may lack some")


def _records(named: Sequence[tuple[str, bytes]]) -> Iterator[tuple[bytes, list[bytes]]]:
    """Records of these (name, digest), each with the digests that it names."""
    pieces: list[bytes] = []
    digests: list[bytes] = []
    size = 0
    for name, digest in named:
        raw = name.encode("utf-8", "surrogatepass")
        if pieces and size + len(raw) + _LENGTH.size > RECORD_BYTES_MAX:
            yield b"".join(pieces), digests
            pieces, digests, size = [], [], 0
        pieces += (_LENGTH.pack(len(raw)), raw)
        digests.append(digest)
        size += len(raw) + _LENGTH.size
    if pieces:
        yield b"".join(pieces), digests


def _names_in(record: memoryview) -> Iterator[str]:
    at = 0
    while at + _LENGTH.size <= record.nbytes:
        (length,) = _LENGTH.unpack_from(record, at)
        at += _LENGTH.size
        yield bytes(record[at : at + length]).decode("utf-8", "surrogatepass")
        at += length
