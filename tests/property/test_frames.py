"""The frame codec under random input: what was encoded comes back; any other bytes give a FrameError and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core import frames
from kvpool.core.frames import Flag, FrameError, Header, Op, Status, decode_header
from kvpool.core.keys import KeyBatch
from kvpool.core.types import KEY_BYTES, MAX_BLOCK_BYTES, HoldId, NamespaceUid

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
FLAGS = [flag for flag in Flag if flag]
HEADERS = st.builds(
    Header,
    st.sampled_from(Op),
    st.integers(0, 2 ** len(FLAGS) - 1).map(lambda bits: Flag(sum(flag for i, flag in enumerate(FLAGS) if bits >> i & 1))),
    st.sampled_from(Status),
    U64,
    U32,
    st.integers(0, frames.MAX_META_BYTES),
    st.integers(0, frames.MAX_PAYLOAD_BYTES),
)
UIDS = st.binary(min_size=16, max_size=16).map(NamespaceUid)


@st.composite
def batches(draw: st.DrawFn, *, n: int | None = None) -> KeyBatch:
    count = draw(st.integers(0, 5)) if n is None else n
    keys = draw(st.binary(min_size=count * KEY_BYTES, max_size=count * KEY_BYTES))
    parent = draw(st.binary(min_size=32, max_size=32))
    return KeyBatch(draw(UIDS), keys, parent, draw(st.integers(0, 2**32 - 6)), draw(st.booleans()))


def arrays(items: st.SearchStrategy[int], n: int | None = None) -> st.SearchStrategy[Any]:
    lists = st.lists(items, max_size=6) if n is None else st.lists(items, min_size=n, max_size=n)
    return lists.map(lambda values: np.array(values, dtype=np.uint64))


@st.composite
def writes(draw: st.DrawFn) -> frames.WriteRequest:
    batch = draw(batches())
    return frames.WriteRequest(batch, draw(arrays(st.integers(1, MAX_BLOCK_BYTES), len(batch))), draw(arrays(U64)), draw(U64))


@st.composite
def fills(draw: st.DrawFn) -> frames.FillRequest:
    size = st.integers(0, MAX_BLOCK_BYTES)
    rows = draw(st.lists(st.tuples(U32, st.just(0), size, size, U64), max_size=5))
    return frames.FillRequest(draw(U64), np.array(rows, dtype=frames.FILL_RANGE), draw(U64))


@st.composite
def read_answers(draw: st.DrawFn) -> frames.ReadAnswer:
    byte = st.integers(0, 255)
    rows = draw(st.lists(st.tuples(byte, byte, st.just(0), st.integers(0, 4), U64, U64, U64, U64), max_size=5))
    entries = np.array(rows, dtype=frames.READ_ENTRY)
    return frames.ReadAnswer(entries, draw(arrays(U64, int(entries["n_sums"].sum()))), draw(U64.map(HoldId)))


@st.composite
def reads(draw: st.DrawFn) -> frames.ReadRequest:
    offset = draw(st.integers(0, MAX_BLOCK_BYTES))
    return frames.ReadRequest(draw(batches()), offset, draw(st.integers(0, MAX_BLOCK_BYTES - offset)), draw(U64.map(HoldId)))


METAS: st.SearchStrategy[Any] = st.one_of(
    st.builds(frames.KeysRequest, batches()),
    reads(),
    st.builds(frames.HoldRequest, batches(), U32),
    st.builds(frames.HoldsRequest, st.lists(U64, max_size=6).map(tuple), U32),
    writes(),
    fills(),
    st.builds(frames.NumberRequest, U64),
    st.builds(frames.AttachRequest, UIDS),
    read_answers(),
    st.builds(frames.CodesAnswer, st.binary(max_size=20), U64, U32),
)
DECODERS = [
    frames.KeysRequest, frames.ReadRequest, frames.HoldRequest, frames.HoldsRequest, frames.WriteRequest, frames.FillRequest,
    frames.NumberRequest, frames.AttachRequest, frames.ReadAnswer, frames.CodesAnswer,
]  # fmt: skip


def same(first: Any, second: Any) -> bool:
    """Field by field; arrays by value."""
    if type(first) is not type(second):
        return False
    pairs = [(getattr(first, field), getattr(second, field)) for field in type(first).__dataclass_fields__]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def decode_or_refuse(kind: Any, raw: bytes) -> None:
    """Only a FrameError, or a value that travels again unchanged."""
    try:
        value = kind.decode(raw)
    except FrameError:
        return
    assert same(kind.decode(value.encode()), value)


@given(HEADERS)
def test_headers_come_back(header: Header) -> None:
    raw = header.encode()
    assert len(raw) == frames.HEADER_BYTES and decode_header(raw) == header


@given(METAS)
def test_metas_come_back(meta: Any) -> None:
    raw = meta.encode()
    assert same(type(meta).decode(raw), meta) and same(type(meta).decode(memoryview(raw)), meta)


@given(st.binary(max_size=100))
def test_random_bytes_are_no_header(raw: bytes) -> None:
    try:
        header = decode_header(raw)
    except FrameError:
        return
    assert header.encode() == raw


@given(HEADERS, st.integers(0, frames.HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_in_a_header_is_refused_or_means_something(header: Header, bit: int) -> None:
    """What is accepted is a frame that this build would have sent: it encodes to the very same bytes."""
    raw = bytearray(header.encode())
    raw[bit // 8] ^= 1 << bit % 8
    try:
        other = decode_header(raw)
    except FrameError:
        return
    assert other.encode() == raw and other != header


@given(st.sampled_from(DECODERS), st.binary(max_size=400))
def test_random_bytes_give_only_frame_errors(kind: Any, raw: bytes) -> None:
    decode_or_refuse(kind, raw)


@settings(max_examples=600)
@given(METAS, st.data())
def test_mutated_metas_give_only_frame_errors(meta: Any, data: st.DataObject) -> None:
    raw = bytearray(meta.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        how = data.draw(st.sampled_from(["flip", "byte", "ones", "cut", "insert", "double"]))
        if how == "flip" and raw:
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "byte" and raw:
            raw[at] = data.draw(st.integers(0, 255))
        elif how == "ones":
            raw[at : at + 4] = b"\xff" * min(4, len(raw) - at)
        elif how == "cut":
            del raw[at:]
        elif how == "insert":
            raw[at:at] = data.draw(st.binary(max_size=40))
        else:
            raw += raw[at:]
    decode_or_refuse(type(meta), bytes(raw))


@given(METAS, st.sampled_from(DECODERS))
def test_a_meta_read_as_another_kind_gives_only_frame_errors(meta: Any, kind: Any) -> None:
    decode_or_refuse(kind, meta.encode())


@given(batches(n=5), st.integers(0, 5), st.integers(0, 5))
def test_slices_travel(batch: KeyBatch, start: int, stop: int) -> None:
    part = batch.slice(start, stop)
    assert frames.KeysRequest.decode(frames.KeysRequest(part).encode()).batch == part
