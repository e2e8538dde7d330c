"""Receiving a READ's answer: which blocks came, their bytes straight into the caller's buffers, checked while they are warm.

Owns the state of one read over many answers (`ReadState`). Frames and sockets are in `connection`; places in shared memory in
`shm`. The checksum is made after each piece of about a megabyte: it is read from the caches, while the kernel goes on receiving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.core.frames import FrameError, ReadAnswer, ReadRequest
from kvpool.core.hashing import n_chunks
from kvpool.core.keys import KeyBatch
from kvpool.core.types import MAX_BATCH_KEYS, MISS_BASE, BlockCode, HoldId, MissCause, miss_code
from kvpool.transport.base import Buffers, LinkCause, LinkError, ReadResult, Strided
from kvpool.transport.connection import Connection

PIECE_BYTES: Final = 1 << 20  # received, then hashed
SUMS_BYTES_MAX: Final = 4 << 20  # of an answer's meta, which may have 8 MiB
_UNSET: Final = 255
CORRUPT: Final = miss_code(MissCause.CORRUPT)
STALE: Final = miss_code(MissCause.STALE_INDEX)
NOT_WANTED: Final = (1 << 64) - 1  # `room` of a block without a buffer
Words = npt.NDArray[np.uint64]
Codes = npt.NDArray[np.uint8]
Indexes = npt.NDArray[np.intp]


@dataclass(slots=True)
class ReadState:
    """One read of n blocks. Lanes share it: each writes only to indexes of its own. `room` [n]: bytes of each buffer."""

    batch: KeyBatch
    outs: Buffers
    chunk_bytes: int
    offset: int
    length: int
    hold_id: int
    verify: bool
    first_miss: bool
    deadline: float
    room: Words
    codes: Codes
    tiers: Codes
    sizes: Words

    @classmethod
    def start(cls, batch: KeyBatch, outs: Buffers, *, chunk_bytes: int, byte_range: tuple[int, int], hold_id: int, verify: bool,
              first_miss: bool, deadline: float) -> ReadState:  # fmt: skip
        n = len(batch)
        if isinstance(outs, Strided):
            room = np.full(n, outs.each, dtype=np.uint64)
        else:
            room = np.array([NOT_WANTED if out is None else out.nbytes for out in outs], dtype=np.uint64)
        return cls(batch, outs, chunk_bytes, *byte_range, hold_id, verify, first_miss, deadline, room,
                   np.full(n, _UNSET, dtype=np.uint8), np.zeros(n, dtype=np.uint8), np.zeros(n, dtype=np.uint64))  # fmt: skip

    def wanted_bytes(self) -> list[int]:
        """Of each block, as far as the caller's buffers say."""
        if self.length:
            return [self.length] * len(self.room)
        wanted: list[int] = np.where(self.room == NOT_WANTED, 0, self.room).tolist()
        return wanted

    def take_unset(self, at: int, indexes: Indexes) -> Indexes:
        """Those of `at` + `indexes` whose bytes are still to come."""
        unset: Indexes = indexes[self.codes[at + indexes] == _UNSET]
        return unset

    def frame_keys(self, wanted: Sequence[int]) -> int:
        """Keys of one request, so that the checksums of the answer fit its meta."""
        most = 1 if self.length else n_chunks(max([*wanted, 1]), self.chunk_bytes)
        return max(1, min(MAX_BATCH_KEYS, SUMS_BYTES_MAX // (40 + 8 * most)))

    def request(self, start: int, stop: int) -> bytes:
        return ReadRequest(self.batch.slice(start, stop), self.offset, self.length, HoldId(self.hold_id)).encode()

    def finish(self, error: LinkError | None) -> tuple[ReadResult, int, int]:
        """The result, how many blocks it got and how many bytes. Raises `error` when it came before any block was served."""
        hits = self.codes <= BlockCode.HIT_SHARED
        n_hits = int(np.count_nonzero(hits))
        if error is not None and not n_hits:
            raise error
        fill = int(BlockCode.LATER)
        if error is not None:
            fill = miss_code(MissCause.TIMEOUT if error.cause is LinkCause.TIMEOUT else MissCause.WORKER_LOST)
        self.codes[self.codes == _UNSET] = fill
        self.sizes[self.codes >= MISS_BASE] = 0
        n_leading = n_hits if n_hits == len(hits) else int(np.argmin(hits))
        n_bytes = self.length * n_hits if self.length else int(self.sizes[hits].sum())
        result = ReadResult(self.codes.tobytes(), self.tiers.tobytes(), self.sizes.tolist(), n_leading, error)
        return result, n_hits, n_bytes


def decode_read(connection: Connection, meta: bytes, *, n: int) -> ReadAnswer:
    try:
        answer = ReadAnswer.decode(meta)
    except FrameError as error:
        raise connection.protocol_error(f"READ: {error}") from error
    if len(answer.entries) != n:
        raise connection.protocol_error(f"READ: {len(answer.entries)} entries for {n} keys")
    return answer


def take_entries(connection: Connection, state: ReadState, answer: ReadAnswer, at: int) -> int:
    """Notes codes, tiers and sizes of the blocks that were looked at; returns how many these are (before the first LATER).
    Hits get their code when their bytes are there; those without the byte range, or without room for them, are REJECTED."""
    codes = answer.entries["code"]
    later = np.flatnonzero(codes == BlockCode.LATER)
    n = int(later[0]) if len(later) else len(codes)
    if len(later) != len(codes) - n:
        raise connection.protocol_error("READ: a block after one that is for later")
    codes, sizes = codes[:n], answer.entries["size"][:n]
    hits = codes <= BlockCode.HIT_SHARED
    if not (hits | (codes == BlockCode.REJECTED) | (codes >= MISS_BASE)).all():
        raise connection.protocol_error("READ: a code that is no answer to it")
    past_end = sizes < (state.offset + state.length if state.length else 0)
    no_room = state.room[at : at + n] < (np.uint64(state.length) if state.length else sizes)
    state.codes[at : at + n] = np.where(hits, np.where(past_end | no_room, BlockCode.REJECTED, _UNSET), codes)
    state.tiers[at : at + n] = answer.entries["tier"][:n]
    state.sizes[at : at + n] = sizes
    return n


def receive_inline(connection: Connection, state: ReadState, answer: ReadAnswer, at: int, payload_bytes: int) -> int:
    """The payload of the inline hits into their buffers; sets their codes to HIT_INLINE, CORRUPT or REJECTED. Returns how
    many were corrupt."""
    codes, sizes = answer.entries["code"].tolist(), answer.entries["size"].tolist()
    counts, sums = answer.entries["n_sums"].tolist(), answer.sums.tolist()
    awaited = (state.codes[at : at + len(codes)] == _UNSET).tolist()
    group: list[tuple[int, memoryview, list[int]]] = []
    group_bytes, sum_at, left, n_corrupt = 0, 0, payload_bytes, 0

    def flush() -> int:
        nonlocal group, group_bytes
        n_bad = 0
        if group:
            connection.receive_payload([target for _, target, _ in group], group_bytes, state.deadline)
            for index, target, expected in group:
                good = matches(target, expected, state.length or state.chunk_bytes)
                state.codes[index] = BlockCode.HIT_INLINE if good else CORRUPT
                n_bad += not good
            group, group_bytes = [], 0
        return n_bad

    for i, code in enumerate(codes):
        expected = sums[sum_at : sum_at + counts[i]]
        sum_at += counts[i]
        if code != BlockCode.HIT_INLINE:
            continue
        index, length = at + i, state.length or sizes[i]
        left -= length
        if left < 0 or length < 1 or len(expected) != (1 if state.length else n_chunks(length, state.chunk_bytes)):
            raise connection.protocol_error("READ: entries, checksums and payload disagree")
        out = state.outs[index] if awaited[i] else None
        if out is None:
            n_corrupt += flush()
            connection.discard_payload(length, state.deadline)
            if awaited[i]:
                state.codes[index] = BlockCode.HIT_INLINE
        elif length > PIECE_BYTES:
            n_corrupt += flush()
            good = _receive_large(connection, state, out[:length], expected)
            state.codes[index] = BlockCode.HIT_INLINE if good else CORRUPT
            n_corrupt += not good
        else:
            if group_bytes + length > PIECE_BYTES:
                n_corrupt += flush()
            group.append((index, out if out.nbytes == length else out[:length], expected))
            group_bytes += length
    n_corrupt += flush()
    if left:
        raise connection.protocol_error("READ: more payload than the entries say")
    return n_corrupt


def matches(data: memoryview, expected: Sequence[int], piece_bytes: int) -> bool:
    """Whether the xxh3-64 of each `piece_bytes` of `data` are the expected ones."""
    digest = xxhash.xxh3_64_intdigest
    if len(expected) == 1:
        return bool(digest(data) == expected[0])
    starts = range(0, data.nbytes, piece_bytes)
    return all(digest(data[a : a + piece_bytes]) == e for a, e in zip(starts, expected, strict=True))


def _receive_large(connection: Connection, state: ReadState, target: memoryview, expected: list[int]) -> bool:
    """A block or byte range that is received and checked in pieces."""
    whole_range = xxhash.xxh3_64() if state.length else None
    step = PIECE_BYTES if state.length else max(1, PIECE_BYTES // state.chunk_bytes) * state.chunk_bytes
    good = True
    for start in range(0, target.nbytes, step):
        piece = target[start : start + step]
        connection.receive_payload([piece], piece.nbytes, state.deadline)
        if whole_range is not None:
            whole_range.update(piece)
        else:
            first = start // state.chunk_bytes
            good = good and matches(piece, expected[first : first + n_chunks(piece.nbytes, state.chunk_bytes)], state.chunk_bytes)
    return good if whole_range is None else bool(whole_range.intdigest() == expected[0])
