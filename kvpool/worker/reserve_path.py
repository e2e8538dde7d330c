"""Puts layer by layer: RESERVE, FILL, COMMIT, ABORT. A reservation belongs to its connection and ends with it.

    RESERVE  CodesAnswer: RESERVED, ALREADY, FULL or REJECTED per block, `number` is the reservation
    FILL     parts into reserved blocks, over the socket or (RING) from the ring; an empty CodesAnswer. A part whose checksum is
             wrong spoils its block and the answer is BAD_REQUEST. RING: `sum` 0 means that none was made
    COMMIT   every byte of a block was filled: STORED or ALREADY (UNLISTED as for WRITE), else REJECTED
    ABORT    always OK

Owns which parts are there, and the order of each op; slots, sums and commit are `placing`. All methods run on the connection's
loop except those named `_in_pool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from kvpool.core.frames import CodesAnswer, FillRequest, Flag, FrameError, NumberRequest, Status, WriteRequest
from kvpool.worker.placing import INLINE_BYTES, Reserving, Slots, StaleMove, answer_codes, commit, give_back

if TYPE_CHECKING:
    from kvpool.core.namespaces import NamespaceSpec
    from kvpool.worker.connection import Connection, Request
    from kvpool.worker.dataplane import DataPlane
    from kvpool.worker.ring import Ring

MAX_RESERVATIONS: Final = 64  # of one connection
MAX_PARTS: Final = 4096  # separate filled ranges of one block; layers in order are always one


class Reservation:
    """Blocks of a put_session: `parts[i]` are the filled ranges of block i, sorted, apart from each other."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.parts: list[list[list[int]]] = [[] for _ in slots.sizes]
        self.spoilt: set[int] = set()

    def fill(self, block: int, start: int, stop: int) -> None:
        """Marks bytes start..stop-1 as there."""
        parts = self.parts[block]
        if parts and parts[-1][0] <= start <= parts[-1][1]:  # in order, as layers come
            parts[-1][1] = max(parts[-1][1], stop)
            return
        merged: list[list[int]] = []
        for low, high in sorted([*parts, [start, stop]]):
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        self.parts[block] = merged

    def is_whole(self, block: int) -> bool:
        return block not in self.spoilt and self.parts[block] == [[0, self.slots.sizes[block]]]


def reserve(plane: DataPlane, connection: Connection, request: Request, spec: NamespaceSpec, message: WriteRequest) -> None:
    """RESERVE."""
    if len(connection.reservations) >= MAX_RESERVATIONS:
        connection.refuse(request, Status.BUSY, f"this connection has {MAX_RESERVATIONS} reservations, the limit")
        return

    def reserved(slots: Slots) -> None:
        number = connection.next_reservation
        connection.next_reservation += 1
        connection.reservations[number] = Reservation(slots)
        connection.answer(request, CodesAnswer(bytes(slots.codes), number, int(slots.over_quota)).encode())

    work = Reserving(plane, connection, request, spec, message, reserved)
    connection.work = work
    work.start()


class Fill:
    """One FILL: parts straight into their slots, then their checksums."""

    def __init__(
        self, plane: DataPlane, connection: Connection, request: Request, message: FillRequest, reservation: Reservation
    ) -> None:
        self.node = plane.node
        self.connection = connection
        self.request = request
        self.message = message
        self.reservation = reservation
        self.offsets: list[int] = []
        self.wrong: int | None = None
        self._busy = False
        self._gone = False

    def start(self) -> None:
        slots = self.reservation.slots
        ranges = self.message.ranges
        blocks, lengths = ranges["block"].tolist(), ranges["length"].tolist()
        for block, offset, length in zip(blocks, ranges["offset"].tolist(), lengths, strict=True):
            if block >= len(slots.sizes) or slots.offsets[block] < 0 or length < 1 or offset + length > slots.sizes[block]:
                self.connection.refuse(
                    self.request, Status.BAD_REQUEST, f"range {offset}+{length} of block {block} lies outside of what is reserved"
                )
                return
            self.offsets.append(slots.offsets[block] + offset)
        if self.request.header.flags & Flag.RING:
            ring = self.connection.ring
            if ring is None or self.message.ring_offset + sum(lengths) > ring.n_bytes:
                raise FrameError("FILL from outside of the ring")
            self._run(sum(lengths), ring)
        else:
            uid = slots.spec.uid
            views = [self.node.dram.view(uid, at, n) for at, n in zip(self.offsets, lengths, strict=True)]
            self.connection.receive(self.request, views, lambda: self._run(sum(lengths), None))

    def on_close(self) -> None:
        """The connection gives the reservation back, but not while the pool writes into it."""
        self._gone = True
        if self._busy:
            self.connection.reservations = {k: r for k, r in self.connection.reservations.items() if r is not self.reservation}

    def _run(self, n_bytes: int, ring: Ring | None) -> None:
        self._busy = True
        if n_bytes <= INLINE_BYTES:
            self._copy_and_check(ring)
            self._done()
        else:
            self.node.submit(self._in_pool, ring)

    def _in_pool(self, ring: Ring | None) -> None:
        try:
            self._copy_and_check(ring)
        finally:
            self.connection.loop.post(self._done)

    def _copy_and_check(self, ring: Ring | None) -> None:
        uid = self.reservation.slots.spec.uid
        arena = self.node.dram.array(uid)
        at = self.message.ring_offset
        ranges = self.message.ranges
        parts = zip(self.offsets, ranges["length"].tolist(), ranges["sum"].tolist(), strict=True)
        for i, (offset, length, wanted) in enumerate(parts):
            if ring is not None:
                np.copyto(arena[offset : offset + length], ring.array[at : at + length])
                at += length
                if wanted == 0:
                    continue
            if xxhash.xxh3_64_intdigest(self.node.dram.view(uid, offset, length)) != wanted and self.wrong is None:
                self.wrong = i

    def _done(self) -> None:
        self._busy = False
        if self._gone:
            give_back(self.node, self.reservation.slots)
            return
        ranges = self.message.ranges
        blocks = ranges["block"].tolist()
        if self.wrong is not None:
            self.reservation.spoilt.add(blocks[self.wrong])
            self.connection.loop.count("put_checksum_mismatch")
            self.connection.answer(self.request, f"checksum of range {self.wrong} is wrong".encode(), status=Status.BAD_REQUEST)
            return
        for block, offset, length in zip(blocks, ranges["offset"].tolist(), ranges["length"].tolist(), strict=True):
            self.reservation.fill(block, offset, offset + length)
            if len(self.reservation.parts[block]) > MAX_PARTS:
                self.reservation.spoilt.add(block)
        self.connection.answer(self.request, CodesAnswer().encode())


class Commit:
    """One COMMIT: hashes what was filled, then as the end of a WRITE."""

    def __init__(self, plane: DataPlane, connection: Connection, request: Request, reservation: Reservation) -> None:
        self.plane = plane
        self.connection = connection
        self.request = request
        self.slots = reservation.slots
        self.whole = [i for i, block in enumerate(self.slots.blocks) if block is not None and reservation.is_whole(i)]
        self._gone = False
        self._committed = False

    def start(self) -> None:
        if sum(self.slots.sizes[i] for i in self.whole) <= INLINE_BYTES:
            self._hash()
            self._commit()
        else:
            self.plane.node.submit(self._in_pool)

    def on_close(self) -> None:
        self._gone = True
        if not self._committed:
            give_back(self.plane.node, self.slots)

    def _hash(self) -> None:
        for first, last in spans(self.whole):
            self.slots.make_sums(self.plane.node, first, last)

    def _in_pool(self) -> None:
        try:
            self._hash()
        finally:
            self.connection.loop.post(self._commit)

    def _commit(self) -> None:
        if self._gone:
            return
        self._committed = True
        mark = commit(self.plane.node, self.slots)
        answer_codes(self.plane, self.connection, self.request, self.slots, mark)


def spans(indexes: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted indexes as (first, last + 1) runs."""
    found: list[tuple[int, int]] = []
    for i in indexes:
        if found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return found


# --- what `ops` calls ---------------------------------------------------------------------------------------------------


def reserve_op(plane: DataPlane, connection: Connection, request: Request) -> None:
    """RESERVE."""
    message = WriteRequest.decode(request.meta)
    if request.header.flags & Flag.FENCED and len(message.sums) != 1:
        raise FrameError("a fenced RESERVE without its one number")
    spec = plane.node.served(message.batch.namespace)
    if isinstance(spec, tuple):
        connection.refuse(request, *spec)
        return
    try:
        reserve(plane, connection, request, spec, message)
    except StaleMove as error:
        connection.refuse(request, Status.NOT_READY, str(error))


def fill(plane: DataPlane, connection: Connection, request: Request) -> None:
    """FILL."""
    message = FillRequest.decode(request.meta)
    flags, payload = request.header.flags, request.header.payload_bytes
    total = int(message.ranges["length"].sum())
    if payload != (0 if flags & Flag.RING else total):
        raise FrameError(f"payload of {payload} bytes for parts of {total}")
    reservation = connection.reservations.get(message.reservation)
    if reservation is None:
        connection.refuse(request, Status.NOT_FOUND, f"this connection has no reservation {message.reservation}")
        return
    work = Fill(plane, connection, request, message, reservation)
    connection.work = work
    work.start()


def commit_op(plane: DataPlane, connection: Connection, request: Request) -> None:
    """COMMIT."""
    number = NumberRequest.decode(request.meta).number
    reservation = connection.reservations.pop(number, None)
    if reservation is None:
        connection.refuse(request, Status.NOT_FOUND, f"this connection has no reservation {number}")
        return
    work = Commit(plane, connection, request, reservation)
    connection.work = work
    work.start()


def abort(plane: DataPlane, connection: Connection, request: Request) -> None:
    """ABORT: also of what is not there."""
    reservation = connection.reservations.pop(NumberRequest.decode(request.meta).number, None)
    if reservation is not None:
        give_back(plane.node, reservation.slots)
    connection.answer(request, CodesAnswer().encode())
