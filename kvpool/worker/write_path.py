"""Puts: WRITE in one frame, or RESERVE, FILL layer by layer, COMMIT or ABORT.

    WRITE (socket)   reserve ─▶ receive straight into the slots, hashing what has come ─▶ compare ─▶ commit ─▶ listed?
    WRITE (RING)     reserve ─▶ copy ring to slots, hashing what was just copied ─▶ commit ─▶ listed? ─▶ answer
    RESERVE          reserve ─▶ answer with codes and the reservation's number (of this connection only)
    FILL             parts into reserved blocks; the answer is an empty CodesAnswer; a part whose checksum is wrong spoils its
                     block and the answer is BAD_REQUEST. RING: `sum` 0 means that none was made.
    COMMIT           every byte of a block was filled: STORED or ALREADY, else REJECTED
    ABORT            always OK

Codes: STORED, ALREADY, FULL, REJECTED (wrong size or checksum, or parts missing); UNLISTED in the place of STORED when
WAIT_LISTED was asked and the master has not confirmed. A put that must wait for room is parked, its body unread, for at most
PARK_SHARE of its time; then it takes what there is. A body that does not come, a lost connection: its slots are freed.

Owns what one put does in which order. Which slots and what becomes of them: `core.blocks`. All methods run on the connection's
loop except those named `_in_pool`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from kvpool.core.frames import CodesAnswer, FillRequest, Flag, FrameError, NumberRequest, Status, WriteRequest
from kvpool.core.hashing import chunk_sums, n_chunks
from kvpool.core.keys import KeyBatch
from kvpool.core.types import BlockCode
from kvpool.errors import NamespaceNotFound
from kvpool.worker.listed import Ticket

if TYPE_CHECKING:
    from kvpool.core.blocks import Block
    from kvpool.core.namespaces import NamespaceSpec
    from kvpool.worker.connection import Connection, Request
    from kvpool.worker.dataplane import DataPlane, Timer
    from kvpool.worker.node import Node
    from kvpool.worker.ring import Ring

INLINE_BYTES: Final = 1 << 20  # up to this much is hashed or copied on the loop: a hop to the pool costs as much
HASH_SPAN_BYTES: Final = 2 << 20  # how much is received before its hashing starts beside the rest
COPY_SPAN_BYTES: Final = 256 << 10  # copied, then hashed while it is in the cache
PARK_SHARE: Final = 0.6  # of a put's time that it may wait for room; the rest is for its bytes
LISTED_WAIT_S: Final = 1.0  # a master that has not confirmed by then is treated as away
LISTED_MARGIN_S: Final = 0.02  # of the deadline, kept for the answer
MAX_RESERVATIONS: Final = 64  # of one connection
MAX_PARTS: Final = 4096  # separate filled ranges of one block; layers in order are always one
_REJECTED: Final = int(BlockCode.REJECTED)
_STORED: Final = int(BlockCode.STORED)
_UNLISTED: Final = int(BlockCode.UNLISTED)


class Slots:
    """The blocks of one reservation with their places: `offsets[i]` in the namespace's arena, -1 where nothing is reserved.

    Made under the lock. The places stay ours until `commit` or `give_back`, even when a block is removed meanwhile."""

    __slots__ = ("blocks", "codes", "offsets", "sizes", "spec", "sums")

    def __init__(self, node: Node, spec: NamespaceSpec, sizes: list[int], codes: bytearray, blocks: list[Block | None]) -> None:
        self.spec = spec
        self.sizes = sizes
        self.codes = codes
        self.blocks = blocks
        self.offsets = [-1 if block is None else node.offset(block) for block in blocks]
        self.sums: list[bytes | None] = [None] * len(blocks)

    def runs(self, first: int, last: int) -> list[tuple[int, int, int, int]]:
        """Blocks first..last-1 as runs of adjacent memory: (first block, last block + 1, offset in the arena or -1, bytes)."""
        found = []
        start, at, n_bytes = first, self.offsets[first] if first < last else -1, 0
        offsets, sizes = self.offsets, self.sizes
        for i in range(first, last):
            offset = offsets[i]
            if (offset < 0) is not (at < 0) or (at >= 0 and offset != at + n_bytes):
                found.append((start, i, at, n_bytes))
                start, at, n_bytes = i, offset, 0
            n_bytes += sizes[i]
        if first < last:
            found.append((start, last, at, n_bytes))
        return found

    def make_sums(self, node: Node, first: int, last: int) -> None:
        """Chunk sums of the reserved blocks among first..last-1, from what lies in their slots. Any thread."""
        chunk = self.spec.chunk_bytes
        for start, stop, offset, n_bytes in self.runs(first, last):
            if offset < 0:
                continue
            view = node.dram.view(self.spec.uid, offset, n_bytes)
            if not self.spec.variable and self.spec.block_bytes % chunk == 0:
                raw = chunk_sums(view, chunk).tobytes()
                each = len(raw) // (stop - start)
                for i in range(start, stop):
                    self.sums[i] = raw[(i - start) * each : (i - start + 1) * each]
            else:
                at = 0
                for i in range(start, stop):
                    self.sums[i] = chunk_sums(view[at : at + self.sizes[i]], chunk).tobytes()
                    at += self.sizes[i]


def commit(node: Node, slots: Slots) -> int:
    """Reserved blocks with sums become visible, the others are given back as REJECTED; returns the mark of their report."""
    kept = [i for i, block in enumerate(slots.blocks) if block is not None and slots.sums[i] is not None]
    spoilt = [i for i, block in enumerate(slots.blocks) if block is not None and slots.sums[i] is None]
    with node.lock:
        codes = node.table.commit(
            [slots.blocks[i] for i in kept], [slots.sums[i] for i in kept], now_ms=node.now_ms()  # type: ignore[misc]
        )
        if spoilt:
            node.table.abort([slots.blocks[i] for i in spoilt])
        mark = node.reporter.mark()
        node.after_decision()
    for i, code in zip(kept, codes, strict=True):
        slots.codes[i] = code
    for i in spoilt:
        slots.codes[i] = _REJECTED
    slots.blocks = [None] * len(slots.blocks)
    return mark


def give_back(node: Node, slots: Slots) -> None:
    """Frees what was reserved and never committed. Nothing may write to its slots any more."""
    left = [block for block in slots.blocks if block is not None]
    slots.blocks = [None] * len(slots.blocks)
    if left:
        node.abort(left)


def answer_listed(
    plane: DataPlane, connection: Connection, request: Request, mark: int, answer: Callable[[bool], None], *, needed: bool = True
) -> None:
    """Calls `answer(listed)` once, on the loop: at once when nothing need be awaited, or when the report is confirmed, the
    session is lost, or the time is up."""
    if not needed or not request.header.flags & Flag.WAIT_LISTED:
        answer(True)
        return
    loop, listed = connection.loop, plane.node.listed
    timer: Timer | None = None

    def settle(is_listed: bool) -> None:
        if timer is not None:
            timer.cancel()
        if not _closed(connection):
            answer(is_listed)

    ticket = listed.wait(mark, lambda is_listed: loop.post(lambda: settle(is_listed)))
    if not isinstance(ticket, Ticket):
        answer(ticket)
        return

    def give_up() -> None:
        if listed.give_up(ticket):
            loop.count("listed_timeouts")
            settle(False)

    now = loop.now()
    timer = loop.at(min(now + LISTED_WAIT_S, max(now, request.deadline - LISTED_MARGIN_S)), give_up)


def _closed(connection: Connection) -> bool:
    return connection.loop.connections.get(connection.fd) is not connection


class Reserving:
    """Gets slots for a put, waiting parked while the tier makes room; then `then(slots)`."""

    def __init__(
        self, plane: DataPlane, connection: Connection, request: Request, spec: NamespaceSpec, message: WriteRequest,
        then: Callable[[Slots], None],
    ) -> None:  # fmt: skip
        self.node = plane.node
        self.connection = connection
        self.request = request
        self.batch: KeyBatch = message.batch
        self.spec = spec
        self.sizes: list[int] = message.sizes.tolist()
        self.then: Callable[[Slots], None] | None = then
        now = connection.loop.now()
        self._until = now + (request.deadline - now) * PARK_SHARE
        self._timer: Timer | None = None

    def start(self) -> None:
        self._try(last=False)

    def on_close(self) -> None:
        """While parked nothing is reserved."""
        self.then = None
        self.node.forget_waiting(self)
        if self._timer is not None:
            self._timer.cancel()

    def _try(self, *, last: bool) -> None:
        if self.then is None:
            return
        node, loop = self.node, self.connection.loop
        last = last or loop.now() >= self._until
        with node.lock:
            reserved = node.table.reserve(self.batch, self.sizes, now_ms=node.now_ms())
            slots: Slots | None
            if reserved.must_wait and not last:
                node.table.abort([block for block in reserved.blocks if block is not None])
                node.kick_mover()
                node.wait_for_room(self, lambda: loop.post(self._again))  # under the lock: the mover's next wake is not missed
                slots = None
            else:
                slots = Slots(node, self.spec, self.sizes, reserved.codes, reserved.blocks)
            node.after_decision()
        if slots is None:
            if self._timer is None:
                loop.count("parked")
                self._timer = loop.at(self._until, self._time_up)
            return
        if self._timer is not None:
            self._timer.cancel()
            node.forget_waiting(self)
        then, self.then = self.then, None
        then(slots)

    def _again(self) -> None:
        self._retry(last=False)

    def _time_up(self) -> None:
        self._retry(last=True)

    def _retry(self, *, last: bool) -> None:
        try:
            self._try(last=last)
        except NamespaceNotFound as error:
            self.on_close()
            self.connection.refuse(self.request, Status.UNKNOWN_NAMESPACE, str(error))


class Write:
    """One WRITE."""

    def __init__(
        self, plane: DataPlane, connection: Connection, request: Request, spec: NamespaceSpec, message: WriteRequest
    ) -> None:
        self.plane = plane
        self.node = plane.node
        self.connection = connection
        self.request = request
        self.spec = spec
        self.message = message
        self.slots: Slots | None = None
        self._reserving = Reserving(plane, connection, request, spec, message, self._reserved)
        self._in_pool = 0  # jobs in the pool that use the slots
        self._writes_in_pool = False
        self._gone = False
        self._received = False
        self._ends: list[int] = []  # where each block ends in the payload
        self._hashed_to = 0  # blocks whose hashing was started

    def start(self) -> None:
        self._reserving.start()

    def on_close(self) -> None:
        self._gone = True
        self._reserving.on_close()
        if self.slots is not None and not self._writes_in_pool:
            give_back(self.node, self.slots)  # hash jobs only read; a slot used anew meanwhile harms nobody

    def _reserved(self, slots: Slots) -> None:
        self.slots = slots
        if self.request.header.flags & Flag.RING:
            self._copy_ring()
        else:
            self._receive()

    # --- over the socket ------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        slots = self.slots
        assert slots is not None
        n = len(slots.sizes)
        views: list[memoryview] = []
        for _, _, offset, n_bytes in slots.runs(0, n):
            if offset < 0:
                views += self.connection.loop.waste(n_bytes)
            else:
                views.append(self.node.dram.view(self.spec.uid, offset, n_bytes))
        if self.request.header.payload_bytes <= INLINE_BYTES:
            self.connection.receive(self.request, views, self._received_small)
        else:
            self._ends = np.cumsum(slots.sizes).tolist()
            self.connection.receive(self.request, views, self._received_all, self._progress)

    def _received_small(self) -> None:
        slots = self.slots
        assert slots is not None
        slots.make_sums(self.node, 0, len(slots.sizes))
        self._compare()

    def _progress(self, received: int) -> None:
        """Starts the hashing of the blocks that have come in whole, some megabytes at a time."""
        ends, first = self._ends, self._hashed_to
        before = ends[first - 1] if first else 0
        if received - before < HASH_SPAN_BYTES:
            return
        last = int(np.searchsorted(ends, received, side="right"))
        if last > first:
            self._hash(first, last)

    def _received_all(self) -> None:
        self._received = True
        if self._hashed_to < len(self._ends):
            self._hash(self._hashed_to, len(self._ends))

    def _hash(self, first: int, last: int) -> None:
        self._hashed_to = last
        self._in_pool += 1
        self.node.submit(self._hash_in_pool, first, last)

    def _hash_in_pool(self, first: int, last: int) -> None:
        try:
            assert self.slots is not None
            self.slots.make_sums(self.node, first, last)
        finally:
            self.connection.loop.post(self._hashed)

    def _hashed(self) -> None:
        self._in_pool -= 1
        if self._in_pool == 0 and self._received and not self._gone:
            self._compare()

    def _compare(self) -> None:
        """What was received against the sums that were sent."""
        slots = self.slots
        assert slots is not None
        sent = self.message.sums.tobytes()
        at = 0
        for i, size in enumerate(slots.sizes):
            n_bytes = 8 * n_chunks(size, self.spec.chunk_bytes)
            if slots.sums[i] is not None and slots.sums[i] != sent[at : at + n_bytes]:
                slots.sums[i] = None
                self.connection.loop.count("put_checksum_mismatch")
            at += n_bytes
        self._commit()

    # --- from the ring --------------------------------------------------------------------------------------------------

    def _copy_ring(self) -> None:
        slots, ring = self.slots, self.connection.ring
        assert slots is not None and ring is not None
        total = sum(slots.sizes)
        if total <= INLINE_BYTES:
            copy_from_ring(self.node, slots, ring, self.message.ring_offset)
            self._commit()
        else:
            self._writes_in_pool = True
            self.node.submit(self._copy_in_pool, ring)

    def _copy_in_pool(self, ring: Ring) -> None:
        try:
            assert self.slots is not None
            copy_from_ring(self.node, self.slots, ring, self.message.ring_offset)
        finally:
            self.connection.loop.post(self._copied)

    def _copied(self) -> None:
        self._writes_in_pool = False
        if not self._gone:
            self._commit()
        elif self.slots is not None:
            give_back(self.node, self.slots)

    # --- the end --------------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        slots = self.slots
        assert slots is not None
        mark = commit(self.node, slots)
        answer_codes(self.plane, self.connection, self.request, slots, mark)


def answer_codes(plane: DataPlane, connection: Connection, request: Request, slots: Slots, mark: int) -> None:
    """Answers WRITE or COMMIT when the report is listed, where that was asked."""
    codes = bytes(slots.codes)
    needed = _STORED in codes or int(BlockCode.ALREADY) in codes

    def answer(listed: bool) -> None:
        final = codes if listed else codes.replace(bytes([_STORED]), bytes([_UNLISTED]))
        connection.loop.count("blocks_stored", codes.count(_STORED))
        connection.answer(request, CodesAnswer(final).encode())

    answer_listed(plane, connection, request, mark, answer, needed=needed)


def copy_from_ring(node: Node, slots: Slots, ring: Ring, at: int) -> None:
    """Ring bytes from `at` on into the slots, hashed from the slots span by span: what was checked is what was stored,
    whatever the client does to its ring meanwhile. Any thread."""
    arena, source = node.dram.array(slots.spec.uid), ring.array
    sizes = slots.sizes
    for start, stop, offset, n_bytes in slots.runs(0, len(sizes)):
        if offset < 0:
            at += n_bytes
            continue
        i = start
        while i < stop:
            j, span = i, 0
            while j < stop and (span == 0 or span + sizes[j] <= COPY_SPAN_BYTES):
                span += sizes[j]
                j += 1
            np.copyto(arena[offset : offset + span], source[at : at + span])
            slots.make_sums(node, i, j)
            offset, at, i = offset + span, at + span, j


# --- reservations -------------------------------------------------------------------------------------------------------


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
        connection.answer(request, CodesAnswer(bytes(slots.codes), number=number).encode())

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


def write(plane: DataPlane, connection: Connection, request: Request) -> None:
    """WRITE."""
    message = WriteRequest.decode(request.meta)
    total = int(message.sizes.sum())
    flags, payload = request.header.flags, request.header.payload_bytes
    if flags & Flag.RING:
        if payload or connection.ring is None or message.ring_offset + total > connection.ring.n_bytes:
            raise FrameError("WRITE from outside of the ring")
    elif payload != total:
        raise FrameError(f"payload of {payload} bytes for blocks of {total}")
    spec = plane.node.served(message.batch.namespace)
    if isinstance(spec, tuple):
        connection.refuse(request, *spec)
        return
    if not flags & Flag.RING:
        chunk = spec.chunk_bytes
        wanted = int((-(-message.sizes.astype(np.int64) // chunk)).sum())
        if wanted != len(message.sums):
            reason = f"{len(message.sums)} checksums; {wanted} are needed, one for each {chunk} bytes of a block"
            connection.refuse(request, Status.BAD_REQUEST, reason)
            return
    work = Write(plane, connection, request, spec, message)
    connection.work = work
    work.start()


def reserve_op(plane: DataPlane, connection: Connection, request: Request) -> None:
    """RESERVE."""
    message = WriteRequest.decode(request.meta)
    spec = plane.node.served(message.batch.namespace)
    if isinstance(spec, tuple):
        connection.refuse(request, *spec)
        return
    reserve(plane, connection, request, spec, message)


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
