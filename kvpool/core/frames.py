"""Codec of the data plane, version 1: frame header and the meta of every op. Sockets are in `transport` and `worker.dataplane`.

    header (40 bytes, little-endian)                                meta (packed)      payload
    magic  version op flags status reserved request deadline meta   ┌───────────────┐  ┌──────────────────────┐
    4s     u8      u8 u16   u16    u16      u64     u32 ms   u32 ·· │ prefix, arrays│  │ blocks back to back  │
    payload u64, pad u32                                            └───────────────┘  └──────────────────────┘

`deadline` is the milliseconds that the caller still waits. Every count is checked against a limit before anything is allocated;
`FrameError` means the connection must be closed. Requests and answers have the same header; an answer repeats op and request id.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.core.keys import KeyBatch
from kvpool.core.types import (
    HASH_BYTES,
    KEY_BYTES,
    MAX_BATCH_KEYS,
    MAX_BLOCK_BYTES,
    UID_BYTES,
    HoldId,
    NamespaceUid,
)

MAGIC: Final = b"KVP1"
VERSIONS: Final = (1,)  # what this build speaks; a HELLO without a common one is refused with both lists
MAX_META_BYTES: Final = 8 << 20  # 16,384 keys with sizes and checksums of 80 layers each would not fit: senders split
MAX_HELLO_BYTES: Final = 4096  # all that an unauthenticated connection may make the server keep
MAX_PAYLOAD_BYTES: Final = MAX_BLOCK_BYTES  # one block of the largest size; senders split batches far below
MAX_RANGES: Final = MAX_BATCH_KEYS
MAX_WORKER_ID_BYTES: Final = 256
MAX_DEPTH: Final = (1 << 32) - 1  # a block's position in its chain, u32
NO_HOLD: Final = HoldId(0)

_HEADER: Final = struct.Struct("<4sBBHHHQIIQI")
HEADER_BYTES: Final = _HEADER.size
_KEYS: Final = struct.Struct(f"<{UID_BYTES}s{HASH_BYTES}sIIB3x")
U64 = npt.NDArray[np.uint64]


class FrameError(ValueError):
    """Bytes that are no frame of this protocol. The connection they came from cannot be used any more."""


class Op(IntEnum):
    HELLO = 1
    PING = 2
    HOLD = 3
    RENEW = 4
    RELEASE = 5
    READ = 6
    WRITE = 7
    RESERVE = 8
    FILL = 9
    COMMIT = 10
    ABORT = 11
    DROP = 12
    TOUCH = 13
    STAT = 14
    ATTACH = 15  # unix socket only: the answer passes the arena's memfds
    RING = 16  # unix socket only: the answer passes the memfd of the connection's ring
    PREFETCH = 17  # blocks on SSD come up to DRAM, in the background
    COPY = 18  # blocks are copied to another worker, in the background


class Flag(IntFlag):
    NONE = 0
    WAIT_LISTED = 1  # WRITE, COMMIT, TOUCH: answer when the master has the report
    RING = 2  # WRITE, FILL: the payload lies in the connection's ring at `ring_offset`, payload length is 0
    SHARED = 4  # READ: answer with places in the arena where possible
    VERIFY = 8  # READ: re-check DRAM too (verify="always")
    NO_REPLY = 16  # RELEASE: fire and forget
    VIEW = 32  # HOLD: lives as long as its connection renews it
    FIRST_MISS = 64  # READ, HOLD: stop at the first miss; what follows is LATER
    FENCED = 128  # RESERVE: a worker moves blocks; `sums` is one number, see `WriteRequest`
    ANSWER = 1 << 15  # set in every answer


class Status(IntEnum):
    """Of a whole answer. Anything but OK has a UTF-8 reason as meta and no payload."""

    OK = 0
    BAD_REQUEST = 1
    UNAUTHENTICATED = 2
    VERSION = 3
    UNKNOWN_NAMESPACE = 4  # the worker has not heard of it (yet)
    DEADLINE = 5
    BUSY = 6  # a limit of the server was reached; nothing was done
    NOT_READY = 7  # catching up removals, draining, or stopping
    NOT_FOUND = 8  # unknown hold, reservation or arena
    INTERNAL = 9


@dataclass(frozen=True, slots=True)
class Header:
    op: Op
    flags: Flag = Flag.NONE
    status: Status = Status.OK
    request_id: int = 0
    deadline_ms: int = 0
    meta_bytes: int = 0
    payload_bytes: int = 0

    def encode(self) -> bytes:
        return _HEADER.pack(MAGIC, VERSIONS[-1], self.op, self.flags, self.status, 0, self.request_id & (2**64 - 1),
                            min(max(self.deadline_ms, 0), 2**32 - 1), self.meta_bytes, self.payload_bytes, 0)  # fmt: skip


_OPS: Final = {int(op): op for op in Op}
_FLAGS: Final = sum(Flag)
_STATUSES: Final = {int(status): status for status in Status}


def decode_header(raw: bytes | bytearray | memoryview, *, meta_bytes_max: int = MAX_META_BYTES) -> Header:
    """40 bytes -> header. Raises FrameError on anything that this build would not have sent."""
    if len(raw) != HEADER_BYTES:
        raise FrameError(f"header of {len(raw)} bytes; it has {HEADER_BYTES}")
    magic, version, op, flags, status, reserved, request_id, deadline, meta, payload, pad = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise FrameError(f"magic is {magic!r}, not {MAGIC!r}")
    if version not in VERSIONS:
        raise FrameError(f"frame version {version}; this side speaks {', '.join(map(str, VERSIONS))}")
    if op not in _OPS:
        raise FrameError(f"unknown op {op}")
    if status not in _STATUSES or flags & ~_FLAGS or reserved or pad:
        raise FrameError("unknown status or flag, or reserved bits set")
    if meta > meta_bytes_max:
        raise FrameError(f"meta of {meta} bytes; the limit is {meta_bytes_max}")
    if payload > MAX_PAYLOAD_BYTES:
        raise FrameError(f"payload of {payload} bytes; the limit is {MAX_PAYLOAD_BYTES}")
    return Header(_OPS[op], Flag(flags), _STATUSES[status], request_id, deadline, meta, payload)


class _Reader:
    """Takes packed fields off the front of a meta; every take is bounds-checked, `done` refuses a tail."""

    __slots__ = ("_at", "_raw")

    def __init__(self, raw: bytes | bytearray | memoryview) -> None:
        self._raw, self._at = bytes(raw), 0

    def take(self, n: int) -> bytes:
        end = self._at + n
        if n < 0 or end > len(self._raw):
            raise FrameError(f"meta too short: {len(self._raw)} bytes, {end} needed")
        piece, self._at = self._raw[self._at : end], end
        return piece

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size))

    def u64s(self, n: int) -> U64:
        return np.frombuffer(self.take(8 * n), dtype="<u8")

    def keys(self) -> KeyBatch:
        uid, parent, depth, n, chained = _KEYS.unpack(self.take(_KEYS.size))
        if n > MAX_BATCH_KEYS:
            raise FrameError(f"{n} keys in one frame; the limit is {MAX_BATCH_KEYS}")
        if depth + n > MAX_DEPTH:
            raise FrameError(f"a chain that ends at depth {depth + n}; the limit is {MAX_DEPTH}")
        if chained > 1:
            raise FrameError("chained is neither 0 nor 1")
        return KeyBatch(NamespaceUid(uid), self.take(n * KEY_BYTES), parent, depth, bool(chained))

    @property
    def left(self) -> int:
        """Bytes not taken yet."""
        return len(self._raw) - self._at

    def done(self) -> None:
        if self._at != len(self._raw):
            raise FrameError(f"{len(self._raw) - self._at} bytes too many in meta")


def _encode_keys(batch: KeyBatch) -> bytes:
    return _KEYS.pack(batch.namespace, batch.parent, batch.depth, len(batch), batch.chained) + batch.keys


def _count(n: int, what: str, limit: int = MAX_BATCH_KEYS) -> int:
    if n > limit:
        raise FrameError(f"{n} {what}; the limit is {limit}")
    return n


# --- requests -----------------------------------------------------------------------------------------------------------

_READ: Final = struct.Struct("<QQQ")
_NAME: Final = struct.Struct("<H")
_HOLD: Final = struct.Struct("<I4x")
_WRITE: Final = struct.Struct("<QI4x")
_RESERVATION: Final = struct.Struct("<Q")
_FILL: Final = struct.Struct("<QQI4x")
FILL_RANGE: Final = np.dtype([("block", "<u4"), ("pad", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("sum", "<u8")])


@dataclass(frozen=True, slots=True)
class KeysRequest:
    """Meta of TOUCH, DROP and PREFETCH: keys. `hints` [n] or empty, of a TOUCH that a put makes: see `WriteRequest`."""

    batch: KeyBatch
    hints: U64 = field(default_factory=lambda: np.empty(0, dtype=np.uint64))

    def encode(self) -> bytes:
        return _encode_keys(self.batch) + self.hints.astype("<u8").tobytes()

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> KeysRequest:
        reader = _Reader(raw)
        batch = reader.keys()
        request = cls(batch, reader.u64s(len(batch) if reader.left else 0))
        reader.done()
        return request


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """Meta of COPY. `target`: id of the worker that shall have the blocks too, 1..MAX_WORKER_ID_BYTES as UTF-8. Where it is the
    master says, not the one who asks."""

    batch: KeyBatch
    target: str

    def encode(self) -> bytes:
        name = self.target.encode()
        return _NAME.pack(len(name)) + name + _encode_keys(self.batch)

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> CopyRequest:
        reader = _Reader(raw)
        (n,) = reader.unpack(_NAME)
        if not 1 <= n <= MAX_WORKER_ID_BYTES:
            raise FrameError(f"a worker id of {n} bytes; allowed are 1..{MAX_WORKER_ID_BYTES}")
        try:
            target = reader.take(n).decode()
        except UnicodeDecodeError as error:
            raise FrameError(f"a worker id that is no UTF-8: {error}") from error
        request = cls(reader.keys(), target)
        reader.done()
        return request


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Meta of READ. `length` 0: whole blocks; else bytes offset..offset+length of each. `hold_id` 0: none."""

    batch: KeyBatch
    offset: int = 0
    length: int = 0
    hold_id: HoldId = NO_HOLD

    def encode(self) -> bytes:
        return _READ.pack(self.offset, self.length, self.hold_id) + _encode_keys(self.batch)

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> ReadRequest:
        reader = _Reader(raw)
        offset, length, hold_id = reader.unpack(_READ)
        request = cls(reader.keys(), offset, length, HoldId(hold_id))
        reader.done()
        if offset + length > MAX_BLOCK_BYTES:
            raise FrameError(f"byte range ends at {offset + length}; the limit is {MAX_BLOCK_BYTES}")
        return request


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """Meta of HOLD."""

    batch: KeyBatch
    ttl_ms: int

    def encode(self) -> bytes:
        return _HOLD.pack(self.ttl_ms) + _encode_keys(self.batch)

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> HoldRequest:
        reader = _Reader(raw)
        (ttl_ms,) = reader.unpack(_HOLD)
        request = cls(reader.keys(), ttl_ms)
        reader.done()
        return request


@dataclass(frozen=True, slots=True)
class HoldsRequest:
    """Meta of RENEW (ttl counts) and RELEASE (ttl 0): holds by id."""

    hold_ids: tuple[int, ...]
    ttl_ms: int = 0

    def encode(self) -> bytes:
        return struct.pack(f"<II{len(self.hold_ids)}Q", self.ttl_ms, len(self.hold_ids), *self.hold_ids)

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> HoldsRequest:
        reader = _Reader(raw)
        ttl_ms, n = reader.unpack(struct.Struct("<II"))
        ids = reader.u64s(_count(n, "holds"))
        reader.done()
        return cls(tuple(int(i) for i in ids), ttl_ms)


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Meta of WRITE and RESERVE. `sizes`: u64 [n] bytes of each block. `sums`: u64, the chunk sums of all blocks one after
    the other (WRITE over a socket), or empty (ring: the worker makes them; RESERVE). Payload: the blocks back to back.

    `hints`: u64 [n], `retention.pack_hint` of each block with the time that it is to be kept in ms; or empty. Only to a worker
    whose greeting has the feature "hints": an earlier release takes what follows `sums` for an error.

    RESERVE with FENCED has the removals of the namespace that its sender had applied when it took the blocks as its one sum: a
    worker that has begun a later removal answers NOT_READY, or the move could bring back what that one removed."""

    batch: KeyBatch
    sizes: U64
    sums: U64 = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    ring_offset: int = 0
    hints: U64 = field(default_factory=lambda: np.empty(0, dtype=np.uint64))

    def encode(self) -> bytes:
        head = _WRITE.pack(self.ring_offset, len(self.sums)) + _encode_keys(self.batch)
        return head + b"".join(part.astype("<u8").tobytes() for part in (self.sizes, self.sums, self.hints))

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> WriteRequest:
        reader = _Reader(raw)
        ring_offset, n_sums = reader.unpack(_WRITE)
        batch = reader.keys()
        sizes = reader.u64s(len(batch))
        sums = reader.u64s(_count(n_sums, "checksums", MAX_META_BYTES // 8))
        hints = reader.u64s(len(batch) if reader.left else 0)
        reader.done()
        if len(sizes) and (int(sizes.min()) < 1 or int(sizes.max()) > MAX_BLOCK_BYTES):
            raise FrameError(f"a block of {int(sizes.min())} or {int(sizes.max())} bytes; allowed are 1..{MAX_BLOCK_BYTES}")
        return cls(batch, sizes, sums, ring_offset, hints)


@dataclass(frozen=True, slots=True)
class FillRequest:
    """Meta of FILL: parts of reserved blocks. `ranges`: FILL_RANGE [m]; block indexes the reservation, sum is xxh3-64 of the
    part. Payload: the parts back to back."""

    reservation: int
    ranges: npt.NDArray[np.void]
    ring_offset: int = 0

    def encode(self) -> bytes:
        return _FILL.pack(self.reservation, self.ring_offset, len(self.ranges)) + self.ranges.tobytes()

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> FillRequest:
        reader = _Reader(raw)
        reservation, ring_offset, n = reader.unpack(_FILL)
        ranges = np.frombuffer(reader.take(_count(n, "ranges", MAX_RANGES) * FILL_RANGE.itemsize), dtype=FILL_RANGE)
        reader.done()
        if len(ranges) and (int(ranges["offset"].max()) > MAX_BLOCK_BYTES or int(ranges["length"].max()) > MAX_BLOCK_BYTES):
            raise FrameError(f"a range past {MAX_BLOCK_BYTES} bytes")
        return cls(reservation, ranges, ring_offset)


@dataclass(frozen=True, slots=True)
class NumberRequest:
    """Meta of COMMIT, ABORT (a reservation) and RING (wanted bytes): one u64."""

    number: int

    def encode(self) -> bytes:
        return _RESERVATION.pack(self.number)

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> NumberRequest:
        reader = _Reader(raw)
        (number,) = reader.unpack(_RESERVATION)
        reader.done()
        return cls(number)


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """Meta of ATTACH: the namespace whose arena is wanted."""

    namespace: NamespaceUid

    def encode(self) -> bytes:
        return bytes(self.namespace)

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> AttachRequest:
        reader = _Reader(raw)
        request = cls(NamespaceUid(reader.take(UID_BYTES)))
        reader.done()
        return request


# --- answers ------------------------------------------------------------------------------------------------------------

READ_ENTRY: Final = np.dtype([
    ("code", "u1"),  # BlockCode, or a miss
    ("tier", "u1"),  # Tiers: where it was read from
    ("pad", "<u2"),
    ("n_sums", "<u4"),  # how many of the answer's sums are this block's
    ("size", "<u8"),  # bytes stored under the key
    ("offset", "<u8"),  # HIT_SHARED: where in the arena
    ("gen_index", "<u8"),  # HIT_SHARED: which generation word guards it
    ("generation", "<u8"),  # HIT_SHARED: what that word must still be after the copy
])  # fmt: skip
_ANSWER: Final = struct.Struct("<QII")


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """Meta of a READ's answer. `entries`: READ_ENTRY [n] in request order. `sums`: of the inline (and, with VERIFY, shared)
    hits in order: a whole block's chunk sums, or for a byte range one xxh3-64 of those bytes. `hold_id`: guards the
    HIT_SHARED places until RELEASE or its time (0 when there are none). Payload: the inline hits' bytes back to back."""

    entries: npt.NDArray[np.void]
    sums: U64
    hold_id: HoldId = NO_HOLD

    def encode(self) -> bytes:
        head = _ANSWER.pack(self.hold_id, len(self.entries), len(self.sums))
        return head + self.entries.tobytes() + self.sums.astype("<u8").tobytes()

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> ReadAnswer:
        reader = _Reader(raw)
        hold_id, n, n_sums = reader.unpack(_ANSWER)
        entries = np.frombuffer(reader.take(_count(n, "entries") * READ_ENTRY.itemsize), dtype=READ_ENTRY)
        sums = reader.u64s(_count(n_sums, "checksums", MAX_META_BYTES // 8))
        reader.done()
        if int(entries["n_sums"].sum()) != len(sums):
            raise FrameError("entries and checksums disagree")
        return cls(entries, sums, HoldId(hold_id))


@dataclass(frozen=True, slots=True)
class CodesAnswer:
    """Meta of the answers to WRITE, RESERVE, COMMIT (`codes`: BlockCode [n]), HOLD (HIT_SHARED or a miss; `number` is the hold,
    `count` the leading blocks held), RENEW (1 alive, 0 gone), TOUCH and PREFETCH (Tiers [n]), DROP (1 had it), COPY (1 is here
    and will be copied). RESERVE: `number` is the reservation. WRITE, RESERVE, COMMIT: `count` 1: those FULL are so by the
    namespace's quota. ATTACH: `number` is the arena's bytes, `count` the generation words / 1024. RING: `number` is its bytes."""

    codes: bytes = b""
    number: int = 0
    count: int = 0

    def encode(self) -> bytes:
        return _ANSWER.pack(self.number, self.count, len(self.codes)) + self.codes

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> CodesAnswer:
        reader = _Reader(raw)
        number, count, n = reader.unpack(_ANSWER)
        codes = reader.take(_count(n, "codes"))
        reader.done()
        return cls(codes, number, count)
