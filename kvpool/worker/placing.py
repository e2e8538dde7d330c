"""What all puts have in common: getting slots, making checksums, commit, and answering when the master knows.

Owns the places of one put (`Slots`), the waiting for room (parked, nothing reserved meanwhile) and for the report to be listed.
The order of a WRITE is in `write_path`, that of reservations in `reserve_path`; which slots, and their fate: `core.blocks`.
All runs on the connection's loop except where it says "any thread".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from kvpool.core.frames import CodesAnswer, Flag, Status, WriteRequest
from kvpool.core.hashing import chunk_sums
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
COPY_SPAN_BYTES: Final = 256 << 10  # copied, then hashed while it is in the cache
PARK_SHARE: Final = 0.6  # of a put's time that it may wait for room; the rest is for its bytes
LISTED_WAIT_S: Final = 1.0  # a master that has not confirmed by then is treated as away
LISTED_MARGIN_S: Final = 0.02  # of the deadline, kept for the answer
_REJECTED: Final = int(BlockCode.REJECTED)
_STORED: Final = int(BlockCode.STORED)
_UNLISTED: Final = int(BlockCode.UNLISTED)


class Slots:
    """The blocks of one reservation with their places: `offsets[i]` in the namespace's arena, -1 where nothing is reserved.

    Made under the lock. The places stay ours until `commit` or `give_back`, even when a block is removed meanwhile."""

    __slots__ = ("blocks", "codes", "offsets", "over_quota", "sizes", "spec", "sums")

    def __init__(self, node: Node, spec: NamespaceSpec, sizes: list[int], codes: bytearray, blocks: list[Block | None]) -> None:
        self.spec = spec
        self.sizes = sizes
        self.codes = codes
        self.blocks = blocks
        self.offsets = [-1 if block is None else node.offset(block) for block in blocks]
        self.sums: list[bytes | None] = [None] * len(blocks)
        self.over_quota = False

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


class StaleMove(Exception):
    """Blocks of another worker that may have been removed since it took them."""


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
        self._hints: list[int] = message.hints.tolist()
        self.then: Callable[[Slots], None] | None = then
        self._fence = int(message.sums[0]) if request.header.flags & Flag.FENCED else None
        now = connection.loop.now()
        self._until = now + (request.deadline - now) * PARK_SHARE
        self._timer: Timer | None = None
        self._use = 0  # of the attempt that waits

    def start(self) -> None:
        self._try(last=False)

    def on_close(self) -> None:
        """While parked nothing is reserved."""
        self.then = None
        self.node.forget_waiting(self)
        if self._use:
            with self.node.lock:
                self.node.table.gave_up(self._use)
        if self._timer is not None:
            self._timer.cancel()

    def _try(self, *, last: bool) -> None:
        if self.then is None:
            return
        node, loop = self.node, self.connection.loop
        last = last or loop.now() >= self._until
        with node.lock:
            if self._fence is not None and node.removals_begun(self.spec.uid) > self._fence:
                raise StaleMove("removals have been applied here that the sender of these blocks had not")
            reserved = node.table.reserve(self.batch, self.sizes, now_ms=node.now_ms(), hints=self._hints, use=self._use)
            slots: Slots | None
            if reserved.must_wait and not last:
                self._use = reserved.use
                node.table.abort([block for block in reserved.blocks if block is not None])
                node.kick_mover()
                node.wait_for_room(self, lambda: loop.post(self._again))  # under the lock: the mover's next wake is not missed
                slots = None
            else:
                if reserved.must_wait:
                    node.table.gave_up(reserved.use)
                slots = Slots(node, self.spec, self.sizes, reserved.codes, reserved.blocks)
                slots.over_quota = reserved.over_quota
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
        except (NamespaceNotFound, StaleMove) as error:
            self.on_close()
            status = Status.NOT_READY if isinstance(error, StaleMove) else Status.UNKNOWN_NAMESPACE
            self.connection.refuse(self.request, status, str(error))


def answer_codes(plane: DataPlane, connection: Connection, request: Request, slots: Slots, mark: int) -> None:
    """Answers WRITE or COMMIT when the report is listed, where that was asked."""
    codes = bytes(slots.codes)
    needed = _STORED in codes or int(BlockCode.ALREADY) in codes

    def answer(listed: bool) -> None:
        final = codes if listed else codes.replace(bytes([_STORED]), bytes([_UNLISTED]))
        connection.loop.count("blocks_stored", codes.count(_STORED))
        connection.answer(request, CodesAnswer(final, count=int(slots.over_quota)).encode())

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
