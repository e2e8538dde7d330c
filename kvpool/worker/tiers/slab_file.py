"""Format of a slab file, and nothing else: geometry, header, records. No I/O; `ssd` reads and writes.

    0        4096                      data_offset (4096-aligned)
    | header | record table            | slot 0 | slot 1 | ...          stride = slot_bytes rounded up to 4096
               128 bytes a slot

A record says whose block lies in its slot. Its checksum is seeded with file number and slot index, so that a record is valid only
where it was written. All zeros: the slot is free. Its last number (`kept`: expiry and priority) was always 0 in files of releases
that had neither; they read records of this one, and do not expire them. The payload's own checksum (the block sum) is checked by
whoever reads it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.core.types import HASH_BYTES, KEY_BYTES, MAX_BLOCK_BYTES, PAGE_BYTES, UID_BYTES, Key, NamespaceUid
from kvpool.worker.tiers.base import BlockMeta, round_up

MAGIC: Final = b"KVPSLAB\0"
VERSION: Final = 1
RECORD_BYTES: Final = 128
NO_RECORD: Final = bytes(RECORD_BYTES)
MAX_SLOTS: Final = 1 << 20  # of one file: bounds what a scan reads because a header says so
_HEADER: Final = struct.Struct(f"<8sI4x{UID_BYTES}sQQQ")
_CHECK: Final = struct.Struct("<Q")
_RECORD: Final = struct.Struct(f"<{UID_BYTES}s{KEY_BYTES}s2xI{HASH_BYTES}sQQQQ")
_CHECKED_BYTES: Final = RECORD_BYTES - _CHECK.size
_DTYPE: Final = np.dtype(
    [("uid", f"V{UID_BYTES}"), ("key", f"V{KEY_BYTES}"), ("pad", "V2"), ("depth", "<u4"), ("parent", f"V{HASH_BYTES}"),
     ("size", "<u8"), ("sum", "<u8"), ("seq", "<u8"), ("kept", "<u8"), ("check", "<u8")]
)  # fmt: skip
assert _RECORD.size == _CHECKED_BYTES and _DTYPE.itemsize == RECORD_BYTES

_NAME: Final = re.compile(r"slab-(\d{8,18})\.kv")


def overhead_bytes(n_slots: int) -> int:
    """What a file costs beside its slots: header and record table."""
    return PAGE_BYTES + round_up(n_slots * RECORD_BYTES)


def file_name(number: int) -> str:
    return f"slab-{number:08d}.kv"


def file_number(name: str) -> int | None:
    """The number in a slab file's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and file_name(int(match[1])) == name else None


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where things lie in a file of `n_slots` slots for blocks of up to `slot_bytes`."""

    slot_bytes: int
    n_slots: int

    @property
    def stride(self) -> int:
        return round_up(self.slot_bytes)

    @property
    def data_offset(self) -> int:
        return overhead_bytes(self.n_slots)

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.n_slots * self.stride

    def slot_offset(self, index: int) -> int:
        return self.data_offset + index * self.stride

    def record_offset(self, index: int) -> int:
        return PAGE_BYTES + index * RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    namespace: NamespaceUid
    geometry: Geometry
    number: int

    def encode(self) -> bytes:
        """One page."""
        body = _HEADER.pack(MAGIC, VERSION, self.namespace, self.geometry.slot_bytes, self.geometry.n_slots, self.number)
        return (body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))).ljust(PAGE_BYTES, b"\0")


class BadHeader(ValueError):
    """These bytes are not the header of the slab file that they should be; says why."""


def decode_header(raw: bytes, *, number: int) -> Header:
    """First page of a file named after `number` -> header. Raises BadHeader."""
    if len(raw) < _HEADER.size + _CHECK.size:
        raise BadHeader(f"only {len(raw)} bytes")
    magic, version, uid, slot_bytes, n_slots, own_number = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise BadHeader("no slab file")
    if _CHECK.unpack_from(raw, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(raw[: _HEADER.size]):
        raise BadHeader("damaged header")
    if version != VERSION:
        raise BadHeader(f"format version {version}; this build has {VERSION}")
    if own_number != number:
        raise BadHeader(f"it is slab file {own_number} under another's name")
    if not 1 <= slot_bytes <= MAX_BLOCK_BYTES or not 1 <= n_slots <= MAX_SLOTS:
        raise BadHeader(f"{n_slots} slots of {slot_bytes} bytes are out of range")
    return Header(NamespaceUid(uid), Geometry(slot_bytes, n_slots), number)


def encode_record(meta: BlockMeta, *, number: int, index: int, seq: int) -> bytes:
    """128 bytes, valid only as record `index` of file `number`."""
    body = _RECORD.pack(meta.namespace, meta.key, meta.depth, meta.parent, meta.size, meta.block_sum, seq, meta.kept)
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body, seed=_seed(number, index)))


@dataclass(frozen=True, slots=True)
class Record:
    index: int
    seq: int
    key: Key
    size: int
    block_sum: int
    depth: int
    parent: bytes
    kept: int


@dataclass(frozen=True, slots=True)
class Table:
    """The checked records of one file. `records` are valid; `bad` are indexes of those that are neither valid nor free."""

    records: list[Record]
    bad: list[int]


def decode_table(raw: bytes, *, header: Header, file_bytes: int) -> Table:
    """Record table as read (short when the file is) -> what of it can be trusted. `file_bytes`: payload past it is lost."""
    geometry = header.geometry
    n = min(len(raw) // RECORD_BYTES, geometry.n_slots)
    table: npt.NDArray[np.void] = np.frombuffer(raw, dtype=_DTYPE, count=n)
    used = np.frombuffer(raw, dtype=np.uint64, count=n * RECORD_BYTES // 8).reshape(n, RECORD_BYTES // 8).any(axis=1)
    ends = geometry.data_offset + np.arange(n, dtype=np.uint64) * np.uint64(geometry.stride) + table["size"]
    plausible = (
        used
        & (table["uid"] == np.void(header.namespace))
        & (table["size"] > 0)
        & (table["size"] <= geometry.slot_bytes)
        & (ends <= file_bytes)
    )
    checks: list[int] = table["check"].tolist()
    good = np.zeros(n, dtype=bool)
    for index in np.flatnonzero(plausible).tolist():
        body = raw[index * RECORD_BYTES : index * RECORD_BYTES + _CHECKED_BYTES]
        good[index] = xxhash.xxh3_64_intdigest(body, seed=_seed(header.number, index)) == checks[index]
    return Table(list(_records(table, good)), np.flatnonzero(used & ~good).tolist())


def _records(table: npt.NDArray[np.void], good: npt.NDArray[np.bool_]) -> Iterator[Record]:
    chosen = table[good]
    columns = (chosen[name].tolist() for name in ("seq", "key", "size", "sum", "depth", "parent", "kept"))
    for index, seq, key, size, block_sum, depth, parent, kept in zip(np.flatnonzero(good).tolist(), *columns, strict=True):
        yield Record(index, seq, key, size, block_sum, depth, parent, kept)


def _seed(number: int, index: int) -> int:
    return (number << 32 | index) & (2**64 - 1)
