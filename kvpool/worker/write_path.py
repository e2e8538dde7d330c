"""Puts in one frame: WRITE. (Layer by layer: `reserve_path`.)

    over the socket   reserve ─▶ receive straight into the slots, hashing what has come ─▶ compare ─▶ commit ─▶ listed?
    RING              reserve ─▶ copy ring to slots, hashing what was just copied ─▶ commit ─▶ listed? ─▶ answer

Answer: CodesAnswer with STORED, ALREADY, FULL or REJECTED (wrong size or checksum) per block; UNLISTED in the place of STORED
when WAIT_LISTED was asked and the master has not confirmed. A put that must wait for room is parked, its body unread, for at
most PARK_SHARE of its time; then it takes what there is. A body that does not come, a lost connection: its slots are freed.

Owns what one WRITE does in which order; slots, sums and commit are `placing`. All methods run on the connection's loop
except those named `_in_pool`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvpool.core.frames import Flag, FrameError, Status, WriteRequest
from kvpool.core.hashing import n_chunks
from kvpool.worker.placing import INLINE_BYTES, Reserving, Slots, answer_codes, commit, copy_from_ring, give_back

if TYPE_CHECKING:
    from kvpool.core.namespaces import NamespaceSpec
    from kvpool.worker.connection import Connection, Request
    from kvpool.worker.dataplane import DataPlane
    from kvpool.worker.ring import Ring

HASH_SPAN_BYTES: Final = 2 << 20  # how much is received before its hashing starts beside the rest


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
