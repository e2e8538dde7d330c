"""The frame codec: its bytes spelled out, and every limit checked before anything is allocated."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.core import frames
from kvpool.core.frames import Flag, FrameError, Header, Op, Status, decode_header
from kvpool.core.keys import KeyBatch
from kvpool.core.types import KEY_BYTES, MAX_BATCH_KEYS, MAX_BLOCK_BYTES, HoldId, NamespaceUid

UID = NamespaceUid(bytes(range(16)))
PARENT = bytes(range(100, 132))
KEYS = [bytes([i]) * 34 for i in (1, 2, 3)]
BATCH = KeyBatch(UID, b"".join(KEYS), PARENT, 7, True)
RAW_BATCH = bytes(range(16)) + bytes(range(100, 132)) + struct.pack("<IIB3x", 7, 3, 1) + b"".join(KEYS)
U64_MAX, U32_MAX = 2**64 - 1, 2**32 - 1


def u64(*values: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


# --- header ---------------------------------------------------------------------------------------------------------------


def raw_header(**changes: int | bytes) -> bytes:
    fields: dict[str, Any] = {
        "magic": b"KVP1", "version": 1, "op": 7, "flags": 1, "status": 0, "reserved": 0, "request": 0x1122334455667788,
        "deadline": 2000, "meta": 5, "payload": 6, "pad": 0, **changes,
    }  # fmt: skip
    return struct.pack("<4sBBHHHQIIQI", *fields.values())


def test_header_bytes() -> None:
    header = Header(Op.WRITE, Flag.WAIT_LISTED, Status.OK, 0x1122334455667788, 2000, 5, 6)
    assert header.encode() == raw_header() and len(raw_header()) == frames.HEADER_BYTES == 40
    assert decode_header(raw_header()) == decode_header(memoryview(bytearray(raw_header()))) == header


def test_every_op_flag_and_status_travels() -> None:
    for op in Op:
        for status in Status:
            header = Header(op, Flag(sum(Flag)), status, U64_MAX, U32_MAX, frames.MAX_META_BYTES, frames.MAX_PAYLOAD_BYTES)
            assert decode_header(header.encode()) == header


def test_a_deadline_that_has_passed_or_is_endless_is_clamped() -> None:
    assert decode_header(Header(Op.PING, deadline_ms=-5).encode()).deadline_ms == 0
    assert decode_header(Header(Op.PING, deadline_ms=2**40).encode()).deadline_ms == U32_MAX


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"magic": b"KVP2"}, "magic"), ({"magic": b"GET "}, "magic"), ({"version": 0}, "version 0"),
        ({"version": 2}, "version 2; this side speaks 1"),
        ({"op": 0}, "op 0"), ({"op": max(Op) + 1}, "op"), ({"op": 255}, "op 255"), ({"status": max(Status) + 1}, "status"),
        ({"status": 0xFFFF}, "status"), ({"reserved": 1}, "reserved"), ({"pad": 1}, "reserved"), ({"flags": 1 << 8}, "flag"),
        ({"flags": 1 << 14}, "flag"), ({"flags": 0xFFFF}, "flag"),
        ({"meta": frames.MAX_META_BYTES + 1}, "meta of"), ({"meta": U32_MAX}, "meta of"),
        ({"payload": frames.MAX_PAYLOAD_BYTES + 1}, "payload of"), ({"payload": U64_MAX}, "payload of"),
    ],
)  # fmt: skip
def test_a_header_that_nobody_sends_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FrameError, match=words):
        decode_header(raw_header(**changes))


@pytest.mark.parametrize("size", [0, 1, 39, 41, 80])
def test_a_header_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(FrameError, match="40"):
        decode_header((raw_header() * 2)[:size])


def test_an_unknown_connection_may_send_little() -> None:
    limit = frames.MAX_HELLO_BYTES
    assert decode_header(raw_header(op=1, meta=limit), meta_bytes_max=limit).meta_bytes == limit
    with pytest.raises(FrameError, match=str(limit)):
        decode_header(raw_header(op=1, meta=limit + 1), meta_bytes_max=limit)


# --- metas, spelled out ---------------------------------------------------------------------------------------------------

RANGES = np.array([(0, 0, 5, 6, 7), (2, 0, MAX_BLOCK_BYTES, 1, U64_MAX)], dtype=frames.FILL_RANGE)
ENTRIES = np.array([(0, 1, 0, 2, 100, 0, 0, 0), (1, 1, 0, 0, 7, 4096, 3, 9), (37, 0, 0, 0, 0, 0, 0, 0)], dtype=frames.READ_ENTRY)
METAS: list[tuple[Any, bytes]] = [
    (frames.KeysRequest(BATCH), RAW_BATCH),
    (frames.ReadRequest(BATCH, 16, 32, HoldId(9)), struct.pack("<QQQ", 16, 32, 9) + RAW_BATCH),
    (frames.HoldRequest(BATCH, 30_000), struct.pack("<I4x", 30_000) + RAW_BATCH),
    (frames.HoldsRequest((1, U64_MAX), 5), struct.pack("<II2Q", 5, 2, 1, U64_MAX)),
    (frames.HoldsRequest(()), bytes(8)),
    (
        frames.WriteRequest(BATCH, u64(1, 2, MAX_BLOCK_BYTES), u64(8, U64_MAX), 64),
        struct.pack("<QI4x", 64, 2) + RAW_BATCH + struct.pack("<3Q", 1, 2, MAX_BLOCK_BYTES) + struct.pack("<2Q", 8, U64_MAX),
    ),
    (frames.WriteRequest(BATCH, u64(1, 1, 1)), struct.pack("<QI4x", 0, 0) + RAW_BATCH + struct.pack("<3Q", 1, 1, 1)),
    (
        frames.FillRequest(3, RANGES, 128),
        struct.pack("<QQI4x", 3, 128, 2)
        + struct.pack("<IIQQQ", 0, 0, 5, 6, 7)
        + struct.pack("<IIQQQ", 2, 0, 1 << 30, 1, U64_MAX),
    ),
    (frames.NumberRequest(U64_MAX), b"\xff" * 8),
    (frames.AttachRequest(UID), bytes(range(16))),
    (
        frames.ReadAnswer(ENTRIES, u64(11, 12), HoldId(77)),
        struct.pack("<QII", 77, 3, 2)
        + b"".join(struct.pack("<BBHIQQQQ", *entry) for entry in ENTRIES.tolist())
        + struct.pack("<2Q", 11, 12),
    ),
    (frames.CodesAnswer(b"\x03\x04\x05", 99, 2), struct.pack("<QII", 99, 2, 3) + b"\x03\x04\x05"),
    (frames.CodesAnswer(), bytes(16)),
]


def name(value: object) -> str:
    return type(value).__name__ if not isinstance(value, bytes) else ""


@pytest.mark.parametrize(("meta", "raw"), METAS, ids=name)
def test_meta_bytes(meta: Any, raw: bytes) -> None:
    assert meta.encode() == raw
    assert type(meta).decode(raw).encode() == type(meta).decode(memoryview(raw)).encode() == raw


@pytest.mark.parametrize(("meta", "raw"), METAS, ids=name)
def test_a_meta_cut_short_or_too_long_is_refused(meta: Any, raw: bytes) -> None:
    for size in range(len(raw)):
        with pytest.raises(FrameError):
            type(meta).decode(raw[:size])
    for tail in (b"\0", bytes(8), bytes(34)):
        with pytest.raises(FrameError):
            type(meta).decode(raw + tail)


def test_decoded_keys_are_a_chain_again() -> None:
    batch = frames.KeysRequest.decode(RAW_BATCH).batch
    assert batch == BATCH and batch.split() == KEYS
    loose = KeyBatch(UID, b"", PARENT, 0, False)
    assert frames.KeysRequest.decode(frames.KeysRequest(loose).encode()).batch == loose


def test_decoded_arrays_own_their_bytes() -> None:
    """The receive buffer is used again for the next frame."""
    buffer = bytearray(METAS[5][1])
    request = frames.WriteRequest.decode(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert request.sizes.tolist() == [1, 2, MAX_BLOCK_BYTES] and request.batch == BATCH


# --- limits ---------------------------------------------------------------------------------------------------------------


def keys_head(*, n: int, depth: int = 0, chained: int = 1) -> bytes:
    return bytes(48) + struct.pack("<IIB3x", depth, n, chained)


@pytest.mark.parametrize("n", [MAX_BATCH_KEYS + 1, 1 << 20, U32_MAX])
@pytest.mark.parametrize(
    ("decode", "head", "what"),
    [
        (frames.KeysRequest.decode, lambda n: keys_head(n=n), "keys"),
        (frames.ReadRequest.decode, lambda n: bytes(24) + keys_head(n=n), "keys"),
        (frames.HoldRequest.decode, lambda n: bytes(8) + keys_head(n=n), "keys"),
        (frames.HoldsRequest.decode, lambda n: struct.pack("<II", 0, n), "holds"),
        (frames.WriteRequest.decode, lambda n: bytes(16) + keys_head(n=n), "keys"),
        (frames.WriteRequest.decode, lambda n: struct.pack("<QI4x", 0, n | 1 << 31) + keys_head(n=0), "checksums"),
        (frames.FillRequest.decode, lambda n: struct.pack("<QQI4x", 0, 0, n), "ranges"),
        (frames.ReadAnswer.decode, lambda n: struct.pack("<QII", 0, n, 0), "entries"),
        (frames.ReadAnswer.decode, lambda n: struct.pack("<QII", 0, 0, n | 1 << 31), "checksums"),
        (frames.CodesAnswer.decode, lambda n: struct.pack("<QII", 0, 0, n), "codes"),
    ],
)  # fmt: skip
def test_an_oversized_count_is_refused_without_allocating(
    decode: Callable[[bytes], Any], head: Callable[[int], bytes], what: str, n: int
) -> None:
    raw = head(n)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match=f"{what}.*; the limit is"):
            decode(raw)
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


def test_a_right_count_without_its_bytes_does_not_allocate() -> None:
    for decode, raw in (
        (frames.KeysRequest.decode, keys_head(n=MAX_BATCH_KEYS)),
        (frames.FillRequest.decode, struct.pack("<QQI4x", 0, 0, frames.MAX_RANGES)),
        (frames.WriteRequest.decode, struct.pack("<QI4x", 0, frames.MAX_META_BYTES // 8) + keys_head(n=0)),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(FrameError, match="too short"):
                decode(raw)
            assert tracemalloc.get_traced_memory()[1] < 64 << 10
        finally:
            tracemalloc.stop()


def test_the_largest_batch_is_taken() -> None:
    batch = KeyBatch(UID, bytes(MAX_BATCH_KEYS * KEY_BYTES))
    assert len(frames.KeysRequest.decode(frames.KeysRequest(batch).encode()).batch) == MAX_BATCH_KEYS
    sizes = np.full(MAX_BATCH_KEYS, 4096, dtype=np.uint64)
    sums = np.zeros(MAX_BATCH_KEYS * 16, dtype=np.uint64)
    raw = frames.WriteRequest(batch, sizes, sums).encode()
    assert len(raw) <= frames.MAX_META_BYTES and len(frames.WriteRequest.decode(raw).sums) == len(sums)
    holds = tuple(range(MAX_BATCH_KEYS))
    assert frames.HoldsRequest.decode(frames.HoldsRequest(holds).encode()).hold_ids == holds


@pytest.mark.parametrize("chained", [2, 255])
def test_chained_is_a_bool(chained: int) -> None:
    with pytest.raises(FrameError, match="chained"):
        frames.KeysRequest.decode(keys_head(n=0, chained=chained))


def test_a_chain_cannot_leave_u32() -> None:
    """Else a slice of the batch could not be sent on."""
    with pytest.raises(FrameError, match="depth"):
        frames.KeysRequest.decode(keys_head(n=1, depth=U32_MAX) + bytes(KEY_BYTES))
    batch = frames.KeysRequest.decode(keys_head(n=1, depth=U32_MAX - 1) + bytes(KEY_BYTES)).batch
    assert frames.KeysRequest(batch.slice(1, 1)).encode()


@pytest.mark.parametrize("size", [0, MAX_BLOCK_BYTES + 1, U64_MAX])
def test_block_sizes_are_checked(size: int) -> None:
    batch = KeyBatch(UID, bytes(2 * KEY_BYTES))
    with pytest.raises(FrameError, match=f"block of .*{size}"):
        frames.WriteRequest.decode(frames.WriteRequest(batch, u64(4096, size)).encode())


@pytest.mark.parametrize(
    ("offset", "length"), [(0, MAX_BLOCK_BYTES + 1), (MAX_BLOCK_BYTES, 1), (U64_MAX, 1), (1, U64_MAX), (U64_MAX, U64_MAX)]
)
def test_byte_ranges_are_checked(offset: int, length: int) -> None:
    with pytest.raises(FrameError, match="byte range"):
        frames.ReadRequest.decode(frames.ReadRequest(BATCH, offset, length).encode())
    assert frames.ReadRequest.decode(frames.ReadRequest(BATCH, MAX_BLOCK_BYTES - 1, 1).encode()).length == 1


@pytest.mark.parametrize("field", ["offset", "length"])
@pytest.mark.parametrize("value", [MAX_BLOCK_BYTES + 1, U64_MAX])
def test_fill_ranges_are_checked(field: str, value: int) -> None:
    ranges = RANGES.copy()
    ranges[field][1] = value
    with pytest.raises(FrameError, match="range"):
        frames.FillRequest.decode(frames.FillRequest(3, ranges).encode())


def test_entries_and_sums_must_agree() -> None:
    for sums in ((), (1,), (1, 2, 3)):
        with pytest.raises(FrameError, match="disagree"):
            frames.ReadAnswer.decode(frames.ReadAnswer(ENTRIES, u64(*sums)).encode())
    huge = ENTRIES.copy()
    huge["n_sums"] = (U32_MAX, 3, 0)  # 2 modulo 2**32
    with pytest.raises(FrameError, match="disagree"):
        frames.ReadAnswer.decode(frames.ReadAnswer(huge, u64(1, 2)).encode())
