"""Puts at a simulated worker: WRITE in one go, RESERVE, FILL, COMMIT and ABORT layer by layer.

The same steps as `worker.write_path`, `reserve_path` and `placing`, with waits on the simulated loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import BlockCode
from kvpool.sim.network import Endpoint
from kvpool.sim.node import SimNode
from kvpool.sim.values import NOTHING, PART_BYTES, sums_of
from kvpool.sim.wire import BODY_PIECES, Answer, Ask, Body
from kvpool.transport.base import LinkCause
from kvpool.worker import placing
from kvpool.worker.placing import PARK_SHARE, Slots
from kvpool.worker.reserve_path import Reservation

if TYPE_CHECKING:
    from kvpool.sim.plane import Plane

_STORED, _UNLISTED, _ALREADY = int(BlockCode.STORED), int(BlockCode.UNLISTED), int(BlockCode.ALREADY)
WHOLE: Final = [[0, len(NOTHING)]]


class StaleMove(Exception):
    """`placing.StaleMove`."""


class SimSlots(Slots):
    """Places of one put in simulated memory."""

    def make_sums(self, node: Any, first: int, last: int) -> None:
        for i in range(first, last):
            if self.offsets[i] >= 0:
                self.sums[i] = sums_of(node.memory.read(self.spec.uid, self.offsets[i]))


async def places(plane: Plane, ask: Ask, batch: KeyBatch, spec: NamespaceSpec, until: float) -> SimSlots:
    """`placing.Reserving`: slots, parked while the tier makes room. Raises StaleMove."""
    node, loop, who = plane.node, plane.loop, object()
    sizes = list(ask.sizes)
    give_up_at = loop.time() + (until - loop.time()) * PARK_SHARE
    use = 0
    try:
        while True:
            if ask.fence is not None and node.removals_begun(spec.uid) > ask.fence:
                raise StaleMove
            reserved = node.table.reserve(batch, sizes, now_ms=node.now_ms(), use=use)
            use = reserved.use
            if not reserved.must_wait or loop.time() >= give_up_at:
                slots = SimSlots(node, spec, sizes, reserved.codes, reserved.blocks)
                node.after_decision()
                return slots
            node.table.abort([block for block in reserved.blocks if block is not None])
            node.kick_mover()
            room: asyncio.Future[None] = loop.create_future()
            node.wait_for_room(who, lambda room=room: room.done() or room.set_result(None))  # type: ignore[misc]
            node.after_decision()
            timer = loop.call_at(give_up_at, lambda room=room: room.done() or room.set_result(None))
            try:
                await room
            finally:
                timer.cancel()
    finally:
        node.forget_waiting(who)
        node.table.gave_up(use)


async def make_visible(
    plane: Plane, slots: SimSlots, batch: KeyBatch, ask: Ask, until: float, *, moved: bool = False
) -> Answer:
    """The end of a put: `placing.commit` and `answer_codes`. `moved`: it is another worker's block."""
    mark = placing.commit(plane.node, slots)
    for key, code in zip(batch.split(), slots.codes, strict=True):
        if code == _STORED:
            plane.on_commit(key, moved)
    codes = bytes(slots.codes)
    needed = ask.wait_listed and (_STORED in codes or _ALREADY in codes)
    if needed and not await plane.wait_listed(mark, until):
        codes = codes.replace(bytes([_STORED]), bytes([_UNLISTED]))
    return Answer(codes=codes)


class Write:
    """One WRITE over the socket: reserve, receive, compare, commit, answer when listed."""

    def __init__(self, plane: Plane, ask: Ask, batch: KeyBatch, spec: NamespaceSpec, end: Endpoint, until: float) -> None:
        self.plane, self.node, self.ask, self.batch, self.spec = plane, plane.node, ask, batch, spec
        self.end, self.until = end, until

    async def run(self) -> Answer:
        node = self.node
        slots = await places(self.plane, self.ask, self.batch, self.spec, self.until)
        try:
            await self._receive(slots)
            slots.make_sums(node, 0, len(slots.sizes))
            for i, sent in enumerate(self.ask.sums):
                if slots.sums[i] != sent:
                    slots.sums[i] = None
            return await make_visible(self.plane, slots, self.batch, self.ask, self.until)
        except BaseException:
            placing.give_back(node, slots)
            raise

    async def _receive(self, slots: SimSlots) -> None:
        """Straight into the slots, piece by piece."""
        memory, uid = self.node.memory, self.spec.uid
        for _ in BODY_PIECES:
            body: Body = await self.end.recv()
            at = body.stop * PART_BYTES
            for offset, data in zip(slots.offsets, body.blocks, strict=True):
                if offset >= 0:
                    memory.write(uid, offset, data[:at] + memory.read(uid, offset)[at:])


# --- layer by layer -----------------------------------------------------------------------------------------------------


class Layers(Reservation):
    """The real reservation, whose blocks are whole when the few bytes are."""

    def __init__(self, slots: SimSlots, batch: KeyBatch, *, moved: bool) -> None:
        super().__init__(slots)
        self.places, self.batch, self.moved = slots, batch, moved

    def is_whole(self, block: int) -> bool:
        return block not in self.spoilt and self.parts[block] == WHOLE


class Held(dict[int, Layers]):
    """One connection's reservations, by number. `number`: of the latest."""

    number = 0

    def give_back(self, node: SimNode) -> None:
        for layers in self.values():
            give_back(node, layers)
        self.clear()


def give_back(node: SimNode, layers: Layers | None) -> None:
    if layers is not None:
        placing.give_back(node, layers.places)


async def reserve(plane: Plane, held: Held, ask: Ask, batch: KeyBatch, spec: NamespaceSpec, until: float) -> Answer:
    """RESERVE."""
    try:
        slots = await places(plane, ask, batch, spec, until)
    except StaleMove:
        return Answer(refusal=LinkCause.NOT_READY)
    held.number += 1
    held[held.number] = Layers(slots, batch, moved=ask.fence is not None)
    return Answer(codes=bytes(slots.codes), hold_id=held.number)


async def fill(node: SimNode, held: Held, ask: Ask, end: Endpoint) -> Answer:
    """FILL: parts straight into their slots, then their checksums."""
    body: Body = await end.recv()
    layers = held.get(ask.hold_id)
    if layers is None:
        return Answer(refusal=LinkCause.NOT_FOUND)
    uid = layers.places.spec.uid
    for (block, at, data), wanted in zip(body.blocks, ask.sums, strict=True):
        offset = layers.places.offsets[block]
        before = node.memory.read(uid, offset)
        node.memory.write(uid, offset, before[:at] + data + before[at + len(data) :])
        if sums_of(data) != wanted:
            layers.spoilt.add(block)
            return Answer(refusal=LinkCause.BAD_REQUEST)
        layers.fill(block, at, at + len(data))
    return Answer()


async def commit(plane: Plane, held: Held, ask: Ask, until: float) -> Answer:
    """COMMIT."""
    layers = held.pop(ask.hold_id, None)
    if layers is None:
        return Answer(refusal=LinkCause.NOT_FOUND)
    slots = layers.places
    for i, block in enumerate(slots.blocks):
        if block is not None and layers.is_whole(i):
            slots.make_sums(plane.node, i, i + 1)
    try:
        return await make_visible(plane, slots, layers.batch, ask, until, moved=layers.moved)
    finally:
        give_back(plane.node, layers)
