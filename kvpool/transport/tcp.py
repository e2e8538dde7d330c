"""A worker over TCP: blocks go straight between sockets and the caller's buffers, checked by their checksums.

Owns TcpLink and the loops of inline reads and writes that `shm` also falls back on. Only bulk reads use several lanes. A put is
one reservation, however many frames it takes: its later frames must never evict its earlier blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

import numpy as np

from kvpool.core.frames import Flag, Op, WriteRequest
from kvpool.core.hashing import chunk_sums
from kvpool.core.keys import KeyBatch
from kvpool.core.types import MAX_BATCH_KEYS, MISS_BASE, BlockCode
from kvpool.errors import InvalidArgument
from kvpool.transport.base import Buffers, LinkError, LinkOptions, Range, ReadResult
from kvpool.transport.connection import Connection, open_tcp
from kvpool.transport.copy_plan import cut_lanes
from kvpool.transport.link import FRAME_BYTES_MAX, Reservation, SocketLink, decode_codes, hints_for, no_progress
from kvpool.transport.receive import ReadState, decode_read, receive_inline, take_entries

LANE_BYTES_MIN: Final = 4 << 20  # a read below twice this is one request: a second lane would not pay for itself
LANES_MAX: Final = 16


class Lanes:
    """A few threads for the parts of bulk calls, started at first use. Thread-safe; `close` waits for what is running."""

    def __init__(self, n: int) -> None:
        self.n = max(1, min(n, LANES_MAX))
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    def run(self, calls: Sequence[Callable[[], None]]) -> LinkError | None:
        """Runs all calls, the first on this thread, and those that no lane has begun by then too: a call never waits behind
        other callers' work. Returns when none runs any more. The first LinkError is returned, other exceptions are raised."""
        others = [self._submit(call) for call in calls[1:]]
        failure: LinkError | None = None
        try:
            for call, future in zip(calls, [None, *others], strict=True):
                try:
                    if future is None or future.cancel():
                        call()
                    else:
                        future.result()  # bounded: every call has a deadline
                except LinkError as error:
                    failure = failure or error
        finally:
            for future in others:
                future.cancel()
            wait([future for future in others if not future.cancelled()])
        return failure

    def _submit(self, call: Callable[[], None]) -> Future[None]:
        with self._lock:
            if self._closed:
                return Future()  # never begun
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.n * 2, thread_name_prefix="kvpool-lane")
            return self._executor.submit(call)

    def close(self) -> None:
        with self._lock:
            executor, self._executor, self._closed = self._executor, None, True
        if executor is not None:
            executor.shutdown(wait=True)


class InlineLink(SocketLink):
    """Reads and writes over the socket itself."""

    def __init__(self, peer: str, options: LinkOptions, open_connection: Callable[[float], Connection], *, incarnation: int,
                 worker_id: str) -> None:  # fmt: skip
        super().__init__(peer, options, open_connection, incarnation=incarnation, worker_id=worker_id)
        self._lanes = Lanes(options.lanes)

    def close(self) -> None:
        super().close()
        self._lanes.close()

    # --- read -----------------------------------------------------------------------------------------------------------------

    def read(self, batch: KeyBatch, outs: Buffers, *, chunk_bytes: int, deadline: float, byte_range: tuple[int, int] = (0, 0),
             hold_id: int = 0, verify: bool = False, first_miss: bool = False) -> ReadResult:  # fmt: skip
        self._check_use()
        if len(outs) != len(batch):
            raise InvalidArgument(f"outs: {len(outs)} buffers for {len(batch)} keys")
        state = ReadState.start(batch, outs, chunk_bytes=chunk_bytes, byte_range=byte_range, hold_id=hold_id, verify=verify,
                                first_miss=first_miss, deadline=deadline)  # fmt: skip
        if not len(batch):
            return state.finish(None)[0]
        wanted = state.wanted_bytes()
        step = state.frame_keys(wanted)
        lanes = cut_lanes(wanted, self._lanes.n, lane_bytes_min=LANE_BYTES_MIN)
        error = self._lanes.run([lambda a=a, b=b: self._read_part(state, a, b, step) for a, b in lanes])  # type: ignore[misc]
        result, n_blocks, n_bytes = state.finish(error)
        self._count(read_bytes=n_bytes, read_blocks=n_blocks)
        return result

    def _read_part(self, state: ReadState, start: int, stop: int, step: int) -> None:
        """Blocks start..stop-1, one request after the other, until all are answered or the first miss."""
        with self._call(state.deadline) as connection:
            at = start
            while at < stop:
                n = self._read_once(connection, state, at, min(stop, at + step))
                looked_at = state.codes[at : at + n]
                at += n
                if state.first_miss and ((looked_at >= MISS_BASE) | (looked_at == BlockCode.REJECTED)).any():
                    state.codes[at:stop] = BlockCode.LATER
                    return
                if n == 0:
                    no_progress(connection)

    def _read_flags(self, state: ReadState) -> Flag:
        return (Flag.FIRST_MISS if state.first_miss else Flag.NONE) | (Flag.VERIFY if state.verify else Flag.NONE)

    def _read_once(self, connection: Connection, state: ReadState, at: int, stop: int) -> int:
        """One READ; returns how many blocks it answered."""
        request = connection.send(Op.READ, state.request(at, stop), deadline=state.deadline, flags=self._read_flags(state))
        received = connection.receive(request, Op.READ, deadline=state.deadline)
        answer = decode_read(connection, received.meta, n=stop - at)
        n = take_entries(connection, state, answer, at)
        if (answer.entries["code"] == BlockCode.HIT_SHARED).any():
            raise connection.protocol_error("READ: a place in shared memory that was not asked for")
        n_corrupt = receive_inline(connection, state, answer, at, received.header.payload_bytes)
        if n_corrupt:
            self._count(corrupt_blocks=n_corrupt)
        return n

    # --- write ----------------------------------------------------------------------------------------------------------------

    def write(self, batch: KeyBatch, blocks: Sequence[memoryview], *, chunk_bytes: int, wait_listed: bool,
              deadline: float, hint: int = 0) -> bytes:  # fmt: skip
        self._check_use()
        if len(blocks) != len(batch):
            raise InvalidArgument(f"blocks: {len(blocks)} buffers for {len(batch)} keys")
        codes = b""
        for at in range(0, len(batch), MAX_BATCH_KEYS):
            part, data = batch.slice(at, at + MAX_BATCH_KEYS), blocks[at : at + MAX_BATCH_KEYS]
            if BlockCode.FULL in codes or BlockCode.FULL_QUOTA in codes:  # the rest would only evict the head of its own chain
                return codes + codes[-1:] * (len(batch) - at)
            codes += self._write_part(part, data, chunk_bytes=chunk_bytes, wait_listed=wait_listed, deadline=deadline, hint=hint)
        return codes

    def _write_part(self, batch: KeyBatch, blocks: Sequence[memoryview], *, chunk_bytes: int, wait_listed: bool,
                    deadline: float, hint: int) -> bytes:  # fmt: skip
        sizes = [block.nbytes for block in blocks]
        n_sums = sum(-(-size // chunk_bytes) for size in sizes)
        if sum(sizes) > FRAME_BYTES_MAX or 8 * n_sums > FRAME_BYTES_MAX // 16:
            return self._write_reserved(batch, blocks, sizes, wait_listed=wait_listed, deadline=deadline, hint=hint)
        sums = np.concatenate([chunk_sums(block, chunk_bytes) for block in blocks])
        flags = Flag.WAIT_LISTED if wait_listed else Flag.NONE
        with self._call(deadline) as connection:
            hints = hints_for(connection, [hint] * len(sizes) if hint else ())
            meta = WriteRequest(batch, np.array(sizes, dtype=np.uint64), sums, hints=hints).encode()
            request = connection.send(Op.WRITE, meta, deadline=deadline, flags=flags, payload=blocks, payload_bytes=sum(sizes))
            answer = connection.receive(request, Op.WRITE, deadline=deadline)
            codes = decode_codes(connection, Op.WRITE, answer.meta, n=len(batch)).codes
        self._count_written(codes, sizes)
        return codes

    def _write_reserved(self, batch: KeyBatch, blocks: Sequence[memoryview], sizes: Sequence[int], *, wait_listed: bool,
                        deadline: float, hint: int) -> bytes:  # fmt: skip
        """A put of many frames: room for all of it first, then the bytes of what got room."""
        held: Reservation = self.reserve(batch, sizes, deadline=deadline, hints=[hint] * len(sizes))
        try:
            wanted = [Range(i, 0, blocks[i]) for i, code in enumerate(held.codes) if code == BlockCode.RESERVED]
            if not wanted and not wait_listed:
                return held.codes
            self.fill(held, wanted, deadline=deadline)
            return self.commit(held, wait_listed=wait_listed, deadline=deadline)
        finally:
            self.abort(held)  # nothing, when it was committed


class TcpLink(InlineLink):
    """See `base.WorkerLink`."""

    transport = "tcp"

    def __init__(self, address: str, options: LinkOptions, *, incarnation: int = 0, worker_id: str = "") -> None:
        """`incarnation` 0: whoever answers first. Connects at the first call, or by `connect`."""
        super().__init__(address, options, lambda deadline: open_tcp(address, options, deadline=deadline),
                         incarnation=incarnation, worker_id=worker_id)  # fmt: skip
