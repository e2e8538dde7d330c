"""A worker of this host over shared memory: reads are copies out of its arena, puts go through the connection's ring.

    read    READ|SHARED ─▶ places, held for this connection ─▶ copy merged runs ─▶ generations unchanged? ─▶ RELEASE (no answer)
    write   small: copy to the ring ─▶ WRITE|RING; large: RESERVE ─▶ copy part k+1 while the worker takes part k ─▶ COMMIT
    view    READ|SHARED on the views' own connection ─▶ HOLD|VIEW while that guards the places ─▶ RELEASE the guard

Owns ShmLink and its arena maps: one a namespace, kept until the link closes (a link is for one incarnation). What comes over the
socket instead (from SSD, or when the worker has no ring to give) goes the way of `tcp`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvpool.core.frames import Flag, Op, ReadAnswer, ReadRequest, WriteRequest
from kvpool.core.hashing import n_chunks
from kvpool.core.keys import KeyBatch
from kvpool.core.types import MAX_BATCH_KEYS, BlockCode, HoldId, NamespaceUid
from kvpool.transport.arena_map import ArenaMap, attach
from kvpool.transport.base import VIEW_TTL_MS, LinkOptions, Range, Viewed
from kvpool.transport.connection import Connection, open_unix
from kvpool.transport.copy_plan import U64, addresses_of, copy_runs, merge_runs, split_by_bytes
from kvpool.transport.link import FORGET_SECONDS, Reservation, cut_ranges, decode_codes, fill_meta, hints_for
from kvpool.transport.receive import (
    CORRUPT,
    NOT_WANTED,
    STALE,
    Indexes,
    ReadState,
    decode_read,
    matches,
    receive_inline,
    take_entries,
)
from kvpool.transport.ring import N_PARTS, Ring, ring_of
from kvpool.transport.tcp import InlineLink

SMALL_WRITE_PARTS: Final = 2  # a put that fits in so many parts of the ring is one WRITE


class ShmLink(InlineLink):
    """See `base.WorkerLink`."""

    transport = "shm"

    def __init__(self, unix_name: str, options: LinkOptions, *, incarnation: int = 0, worker_id: str = "") -> None:
        """`unix_name`: of the worker's abstract socket. `incarnation` 0: whoever answers first."""
        super().__init__(f"unix:@{unix_name}", options, lambda deadline: open_unix(unix_name, options, deadline=deadline),
                         incarnation=incarnation, worker_id=worker_id)  # fmt: skip
        self._arenas: dict[NamespaceUid, ArenaMap] = {}
        self._arenas_lock = threading.Lock()

    def close(self) -> None:
        super().close()
        with self._arenas_lock:
            self._arenas.clear()  # a mapping goes with its last view

    def _arena(self, connection: Connection, namespace: NamespaceUid, deadline: float) -> ArenaMap:
        found = self._arenas.get(namespace)
        if found is None:
            made = attach(connection, namespace, deadline=deadline)
            with self._arenas_lock:
                found = self._arenas.setdefault(namespace, made)
        return found

    # --- read -----------------------------------------------------------------------------------------------------------------

    def _read_flags(self, state: ReadState) -> Flag:
        return super()._read_flags(state) | Flag.SHARED

    def _read_once(self, connection: Connection, state: ReadState, at: int, stop: int) -> int:
        arena = self._arena(connection, state.batch.namespace, state.deadline)
        request = connection.send(Op.READ, state.request(at, stop), deadline=state.deadline, flags=self._read_flags(state))
        received = connection.receive(request, Op.READ, deadline=state.deadline)
        answer = decode_read(connection, received.meta, n=stop - at)
        n = take_entries(connection, state, answer, at)
        n_corrupt = receive_inline(connection, state, answer, at, received.header.payload_bytes)
        n_stale = 0
        try:
            shared = np.flatnonzero(answer.entries["code"][:n] == BlockCode.HIT_SHARED)
            if len(shared):
                n_stale, n_bad = self._copy_shared(connection, arena, state, answer, at, shared)
                n_corrupt += n_bad
        finally:
            if answer.hold_id and not connection.closed:
                self._release_on(connection, [answer.hold_id], state.deadline)
        if n_corrupt or n_stale:
            self._count(corrupt_blocks=n_corrupt, stale_blocks=n_stale)
        return n

    def _copy_shared(self, connection: Connection, arena: ArenaMap, state: ReadState, answer: ReadAnswer, at: int,
                     shared: Indexes) -> tuple[int, int]:  # fmt: skip
        """Blocks at index `at` + `shared` out of the arena; returns how many were stale and how many corrupt."""
        check_places(connection, arena, answer, shared)
        fit = state.take_unset(at, shared)
        wanted = fit[state.room[at + fit] != NOT_WANTED]
        lengths = np.full(len(wanted), state.length, dtype=np.uint64) if state.length else answer.entries["size"][wanted]
        sources = answer.entries["offset"][wanted] + np.uint64(arena.address + state.offset)
        copy_runs(*merge_runs(self._targets(state, at + wanted), sources, lengths), deadline=state.deadline)
        same = arena.generations(answer.entries["gen_index"][fit]) == answer.entries["generation"][fit]
        state.codes[at + fit] = np.where(same, BlockCode.HIT_SHARED, STALE)
        n_stale = len(same) - int(np.count_nonzero(same))
        return n_stale, self._check_sums(state, answer, at, wanted.tolist()) if state.verify else 0

    @staticmethod
    def _targets(state: ReadState, indexes: Indexes) -> U64:
        if not len(indexes):
            return np.empty(0, dtype=np.uint64)
        first, last = int(indexes[0]), int(indexes[-1])
        if last - first == len(indexes) - 1:  # a run, as nearly always
            return addresses_of(state.outs[first : last + 1])  # type: ignore[arg-type]
        return addresses_of([state.outs[i] for i in indexes.tolist()])

    @staticmethod
    def _check_sums(state: ReadState, answer: ReadAnswer, at: int, wanted: list[int]) -> int:
        """verify="always": the copies against the sums of when they were put."""
        ends = np.cumsum(answer.entries["n_sums"]).tolist()
        counts, sums = answer.entries["n_sums"].tolist(), answer.sums.tolist()
        n_bad = 0
        for i in wanted:
            out = state.outs[at + i]
            if state.codes[at + i] != BlockCode.HIT_SHARED or out is None:
                continue
            length = state.length or int(state.sizes[at + i])
            expected = sums[ends[i] - counts[i] : ends[i]]
            n_expected = 1 if state.length else n_chunks(length, state.chunk_bytes)
            if len(expected) != n_expected or not matches(out[:length], expected, state.length or state.chunk_bytes):
                state.codes[at + i] = CORRUPT
                n_bad += 1
        return n_bad

    # --- view -----------------------------------------------------------------------------------------------------------------

    def view(self, batch: KeyBatch, *, deadline: float, ttl_ms: int = VIEW_TTL_MS) -> Viewed:
        self._check_use()
        with self._views.lock:
            connection = self._view_connection(deadline)
            guards: list[int] = []  # holds of the places until the view's own one is there: it protects what is in DRAM then
            try:
                viewed = self._find_places(connection, batch, guards, deadline)
                if viewed.views:
                    self._hold_view(connection, viewed, batch.slice(0, len(viewed.views)), ttl_ms, deadline)
            except BaseException:
                if not connection.clean:
                    connection.close()  # all holds on it end with it
                raise
            finally:
                if guards and connection.clean:
                    self._release_on(connection, guards, time.monotonic() + FORGET_SECONDS)
        return viewed

    def _hold_view(self, connection: Connection, viewed: Viewed, batch: KeyBatch, ttl_ms: int, deadline: float) -> None:
        held = self._hold_on(connection, batch, ttl_ms, Flag.VIEW | Flag.FIRST_MISS, deadline)
        viewed.hold_id = held.hold_id
        n = held.count if held.hold_id else 0
        del viewed.views[n:]
        viewed.codes = viewed.codes[:n] + held.codes[n:] + viewed.codes[len(batch) :]
        viewed.tiers = viewed.tiers[:n] + bytes(len(viewed.tiers) - n)
        if held.hold_id:
            self._views.of[held.hold_id] = connection

    def _view_connection(self, deadline: float) -> Connection:
        current = self._views.connection
        if current is None or not current.clean or not current.still_quiet():
            if current is not None:
                current.close()
            self._views.connection = current = self._open(deadline)
        return current

    def _find_places(self, connection: Connection, batch: KeyBatch, guards: list[int], deadline: float) -> Viewed:
        """Views of the leading blocks that are, or come, into DRAM; holds that keep them there are added to `guards`."""
        arena = self._arena(connection, batch.namespace, deadline)
        codes, tiers = bytearray([BlockCode.LATER]) * len(batch), bytearray(len(batch))
        views: list[memoryview] = []
        while len(views) < len(batch):
            at = len(views)
            part = batch.slice(at, at + MAX_BATCH_KEYS)
            flags = Flag.SHARED | Flag.FIRST_MISS
            request = connection.send(Op.READ, ReadRequest(part).encode(), deadline=deadline, flags=flags)
            received = connection.receive(request, Op.READ, deadline=deadline)
            answer = decode_read(connection, received.meta, n=len(part))
            connection.discard_payload(received.header.payload_bytes, deadline)
            if answer.hold_id:
                guards.append(answer.hold_id)
            found = answer.entries["code"]
            others = np.flatnonzero(found != BlockCode.HIT_SHARED)
            n = int(others[0]) if len(others) else len(found)
            check_places(connection, arena, answer, np.arange(n))
            offsets, sizes = answer.entries["offset"][:n].tolist(), answer.entries["size"][:n].tolist()
            views += [arena.view(offset, size) for offset, size in zip(offsets, sizes, strict=True)]
            codes[at : at + len(part)] = found.tobytes()
            tiers[at : at + n] = answer.entries["tier"][:n].tobytes()
            if n == 0 or (n < len(found) and found[n] != BlockCode.LATER):
                break
        return Viewed(HoldId(0), views, bytes(codes), bytes(tiers))

    # --- write ----------------------------------------------------------------------------------------------------------------

    def _write_part(self, batch: KeyBatch, blocks: Sequence[memoryview], *, chunk_bytes: int, wait_listed: bool,
                    deadline: float, hint: int) -> bytes:  # fmt: skip
        sizes = [block.nbytes for block in blocks]
        with self._call(deadline, with_ring=True) as connection:
            ring = ring_of(connection, deadline=deadline)
            if ring is not None and sum(sizes) <= SMALL_WRITE_PARTS * ring.part_bytes:
                copy_to_ring(ring, 0, blocks, sizes, deadline=deadline)
                hints = hints_for(connection, [hint] * len(sizes) if hint else ())
                meta = WriteRequest(batch, np.array(sizes, dtype=np.uint64), hints=hints).encode()
                flags = Flag.RING | (Flag.WAIT_LISTED if wait_listed else Flag.NONE)
                answer = connection.call(Op.WRITE, meta, deadline=deadline, flags=flags)
                codes = decode_codes(connection, Op.WRITE, answer.meta, n=len(batch)).codes
                self._count_written(codes, sizes)
                return codes
        if ring is None:
            return super()._write_part(batch, blocks, chunk_bytes=chunk_bytes, wait_listed=wait_listed, deadline=deadline,
                                       hint=hint)  # fmt: skip
        return self._write_reserved(batch, blocks, sizes, wait_listed=wait_listed, deadline=deadline, hint=hint)

    def _fill_on(self, held: Reservation, ranges: Sequence[Range], deadline: float) -> None:
        """Through the ring, a part is copied while the worker takes in those before."""
        connection = held.connection
        ring = ring_of(connection, deadline=deadline)
        if ring is None:
            super()._fill_on(held, ranges, deadline)
            return
        pieces = cut_ranges(ranges, ring.part_bytes)
        sent: list[int] = []
        groups = split_by_bytes([p.data.nbytes for p in pieces], ring.part_bytes, n_max=MAX_BATCH_KEYS)
        for k, (start, stop) in enumerate(groups):
            group = pieces[start:stop]
            if len(sent) == N_PARTS:
                self._filled(connection, sent.pop(0), deadline)
            at = k % N_PARTS * ring.part_bytes
            copy_to_ring(ring, at, [p.data for p in group], [p.data.nbytes for p in group], deadline=deadline)
            meta = fill_meta(held.number, group, ring_offset=at, with_sums=False)
            sent.append(connection.send(Op.FILL, meta, deadline=deadline, flags=Flag.RING))
        for request_id in sent:
            self._filled(connection, request_id, deadline)


def check_places(connection: Connection, arena: ArenaMap, answer: ReadAnswer, shared: Indexes) -> None:
    """Raises LinkError when a block's place lies outside of the arena."""
    entries = answer.entries[shared]
    ends = entries["offset"] + entries["size"]
    outside = (ends > arena.n_bytes) | (ends < entries["offset"]) | (entries["gen_index"] >= arena.n_generations)
    if outside.any():
        raise connection.protocol_error("READ: a place outside of the arena")


def copy_to_ring(ring: Ring, at: int, blocks: Sequence[memoryview], sizes: Sequence[int], *, deadline: float) -> None:
    """Blocks back to back into the ring from `at` on."""
    lengths = np.array(sizes, dtype=np.uint64)
    targets = np.uint64(ring.address + at) + np.cumsum(lengths) - lengths
    copy_runs(*merge_runs(targets, addresses_of(blocks), lengths), deadline=deadline)
