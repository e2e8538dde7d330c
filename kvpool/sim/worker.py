"""A simulated worker process: the data plane's operations on a `SimNode`, and the real agent over a simulated stream.

`Plane` stands for `worker.dataplane` with `read_path`, `write_path`, `placing` and `ops`: one request at a time on a connection,
what a connection had is given back when it ends. `SimAgent` is `worker.agent.Agent` itself; simulated are its stream, and what
its thread does, which waits for the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from kvpool.core.block import Block
from kvpool.core.frames import Status
from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import BlockCode, MissCause, NamespaceUid, Tiers, miss_code
from kvpool.errors import KVPoolError, MasterUnavailable, NamespaceNotFound
from kvpool.master.wire import spec_from_proto
from kvpool.sim.clock import Process
from kvpool.sim.disk import sleep
from kvpool.sim.network import Endpoint, Network, Reset
from kvpool.sim.node import SimNode
from kvpool.sim.values import PART_BYTES, PARTS, sums_of
from kvpool.transport.base import LinkCause
from kvpool.v1 import master_pb2 as pb
from kvpool.worker import placing
from kvpool.worker.agent import Agent
from kvpool.worker.listed import Ticket
from kvpool.worker.placing import LISTED_MARGIN_S, LISTED_WAIT_S, PARK_SHARE, Slots
from kvpool.worker.read_path import HOLD_GRACE_MS
from kvpool.worker.tiers.base import TierError, Trouble

_INLINE, _SHARED, _LATER = int(BlockCode.HIT_INLINE), int(BlockCode.HIT_SHARED), int(BlockCode.LATER)
_STORED, _UNLISTED, _ALREADY = int(BlockCode.STORED), int(BlockCode.UNLISTED), int(BlockCode.ALREADY)
_CAUSES: Final = {Trouble.DAMAGED: MissCause.CORRUPT, Trouble.BUSY: MissCause.TIMEOUT, Trouble.STALLED: MissCause.TIMEOUT}
_REFUSALS: Final = {Status.UNKNOWN_NAMESPACE: LinkCause.UNKNOWN_NAMESPACE, Status.NOT_READY: LinkCause.NOT_READY}
BODY_PIECES: Final = (1, PARTS)  # parts of every block that have come after each piece of a put's body


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `left_s`: of the caller's deadline. `incarnation`: whom it is meant for."""

    op: str  # read, write, touch, hold, release, renew, stat
    incarnation: int
    left_s: float
    batch: KeyBatch | None = None
    sums: Sequence[bytes] = ()
    shared: bool = False
    wait_listed: bool = False
    hold_id: int = 0
    hold_ids: Sequence[int] = ()
    ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class Body:
    """A piece of a put's body: parts up to `stop` of every block."""

    stop: int
    blocks: Sequence[bytes]


@dataclass(slots=True)
class Answer:
    """`refusal`: nothing was done, and why. `payload`, `sums` [n]: of inline hits. `places` [n]: offset, gen_index, generation of
    shared ones."""

    codes: bytes = b""
    tiers: bytes = b""
    payload: list[bytes | None] = field(default_factory=list)
    sums: list[bytes | None] = field(default_factory=list)
    places: list[tuple[int, int, int] | None] = field(default_factory=list)
    hold_id: int = 0
    count: int = 0
    listed: bool = False
    refusal: LinkCause | None = None


class Plane:
    """All connections of one worker. `on_commit(key)`: a put's block became visible."""

    def __init__(self, node: SimNode, network: Network, address: str, *, on_commit: Callable[[bytes], None]) -> None:
        self.node, self.loop, self.on_commit = node, node.process.loop, on_commit
        self._network = network
        self._stopping = False
        self._owners = 0
        self._busy: dict[int, None] = {}
        self._tasks: dict[int, tuple[Endpoint, asyncio.Task[None]]] = {}
        network.listen(node.process, address, self._accept)
        node.on_drop_owners(self._drop)

    def _accept(self, end: Endpoint) -> None:
        self._owners += 1
        owner = self._owners
        task = self.node.process.spawn(self._serve(end, owner), name=f"{self.node.worker_id} connection")
        end.on_end.append(lambda: _cancel(task))
        self._tasks[owner] = end, task

    async def drain(self, timeout_s: float) -> None:
        """`DataPlane.drain`: no new connections, those at rest are closed, running requests finish."""
        self._stopping = True
        self._network.unlisten(self.node.process)
        for owner, (end, task) in list(self._tasks.items()):
            if owner not in self._busy:
                end.close()
                task.cancel()
        until = self.loop.time() + timeout_s
        while self._tasks and self.loop.time() < until:
            await sleep(self.loop, 0.01)

    def _drop(self, owners: list[int]) -> None:
        for owner in owners:
            found = self._tasks.get(owner)
            if found is not None:
                found[0].close()
                found[1].cancel()

    async def _serve(self, end: Endpoint, owner: int) -> None:
        node = self.node
        try:
            while True:
                ask: Ask = await end.recv()
                self._busy[owner] = None
                answer = await self._handle(ask, end, owner)
                if answer is not None:
                    end.send(answer)
                del self._busy[owner]
                if self._stopping:
                    end.close()
                    return
        except (Reset, asyncio.CancelledError):
            return  # cancelled by the end of the connection
        finally:
            self._tasks.pop(owner, None)
            self._busy.pop(owner, None)
            node.table.release_owner(owner)
            node.after_decision()

    async def _handle(self, ask: Ask, end: Endpoint, owner: int) -> Answer | None:
        node = self.node
        if ask.op == "release":
            node.table.release(ask.hold_ids)
            node.after_decision()
            return None
        if ask.incarnation != node.incarnation:
            return await self._refuse(ask, end, LinkCause.RESTARTED)
        if ask.op == "stat":
            return Answer()
        if ask.op == "renew":
            return Answer(codes=bytes(node.table.renew(ask.hold_ids, ask.ttl_ms, node.now_ms())))
        assert ask.batch is not None
        spec = node.served(ask.batch.namespace)
        if isinstance(spec, tuple):
            return await self._refuse(ask, end, _REFUSALS[spec[0]])
        until = self.loop.time() + ask.left_s
        try:
            if ask.op == "read":
                return await self._read(ask, ask.batch, spec, owner, until)
            if ask.op == "write":
                return await Write(self, ask, ask.batch, spec, end, until).run()
            if ask.op == "touch":
                return await self._touch(ask, ask.batch, until)
            return self._hold(ask, ask.batch)
        except NamespaceNotFound:
            return await self._refuse(ask, end, LinkCause.UNKNOWN_NAMESPACE)

    async def _refuse(self, ask: Ask, end: Endpoint, cause: LinkCause) -> Answer:
        for _ in BODY_PIECES if ask.op == "write" else ():
            await end.recv()
        return Answer(refusal=cause)

    # --- READ -----------------------------------------------------------------------------------------------------------

    async def _read(self, ask: Ask, batch: KeyBatch, spec: NamespaceSpec, owner: int, until: float) -> Answer:
        node, n = self.node, len(batch)
        pinned = node.table.pin(batch, now_ms=node.now_ms(), hold_id=ask.hold_id)
        blocks = pinned.blocks
        try:
            offsets = [-1 if b is None or b.dram is None else node.offset(b) for b in blocks]
            codes, tiers = bytearray([_LATER]) * n, bytearray(n)
            staged: dict[int, bytes] = {}
            for i, (block, cause) in enumerate(zip(blocks, pinned.causes, strict=True)):
                if block is not None:
                    codes[i] = _INLINE
                    tiers[i] = Tiers.DRAM if offsets[i] >= 0 else Tiers.SSD
                elif cause is not None:
                    codes[i] = miss_code(cause)
            for i in [i for i in range(n) if codes[i] == _INLINE and offsets[i] < 0]:
                block = blocks[i]
                assert block is not None
                try:
                    loaded = await node.load(block, until=until)
                    if isinstance(loaded, int):
                        offsets[i] = loaded
                    else:
                        staged[i] = loaded
                except TierError as error:
                    codes[i] = miss_code(block.gone or _CAUSES.get(error.trouble, MissCause.UNKNOWN))
                    node.count_read_trouble(spec.uid, error)
            first_miss = next((i for i, code in enumerate(codes) if code != _INLINE), n)
            codes[first_miss + 1 :] = bytes([_LATER]) * (n - first_miss - 1) if first_miss < n else b""
            answer = Answer(b"", bytes(tiers), [None] * n, [None] * n, [None] * n)
            if ask.shared:
                self._hold_shared(answer, codes, blocks, staged, owner, until)
            answer.codes = bytes(codes)
            await self._send_inline(answer, spec.uid, blocks, offsets, staged)
            return answer
        finally:
            node.unpin([block for block in blocks if block is not None])

    def _hold_shared(
        self, answer: Answer, codes: bytearray, blocks: list[Block | None], staged: dict[int, bytes], owner: int, until: float
    ) -> None:
        indexes = [i for i, code in enumerate(codes) if code == _INLINE and i not in staged]
        if not indexes:
            return
        table = self.node.table
        ttl_ms = max(0, int((until - self.loop.time()) * 1000)) + HOLD_GRACE_MS
        held: Any = [blocks[i] for i in indexes]
        hold_id, n_held = table.hold_blocks(held, ttl_ms=ttl_ms, now_ms=self.node.now_ms(), owner=owner)
        answer.hold_id = hold_id
        for i in indexes[:n_held]:
            block = blocks[i]
            assert block is not None
            codes[i] = _SHARED
            answer.places[i] = table.place(block)

    async def _send_inline(
        self, answer: Answer, uid: NamespaceUid, blocks: list[Block | None], offsets: list[int], staged: dict[int, bytes]
    ) -> None:
        """Bytes leave their slots in two steps, as a socket takes them; the blocks are pinned until the last one is out."""
        inline = [i for i, code in enumerate(answer.codes) if code == _INLINE]
        half = PARTS // 2 * PART_BYTES
        firsts = {i: staged[i] if i in staged else self.node.memory.read(uid, offsets[i])[:half] for i in inline}
        if inline:
            await sleep(self.loop, 0.0001)
        for i in inline:
            block = blocks[i]
            assert block is not None
            if i in staged:
                answer.payload[i], answer.sums[i] = staged[i], sums_of(staged[i])
            else:
                answer.payload[i] = firsts[i] + self.node.memory.read(uid, offsets[i])[half:]
                answer.sums[i] = block.sums

    # --- the others -----------------------------------------------------------------------------------------------------

    async def _touch(self, ask: Ask, batch: KeyBatch, until: float) -> Answer:
        node = self.node
        tiers = bytes(node.table.tiers_of(batch, now_ms=node.now_ms(), touch=True))
        mark = node.reporter.mark()
        listed = not any(tiers) or not ask.wait_listed or await self.wait_listed(mark, until)
        return Answer(tiers=tiers, listed=listed and ask.wait_listed)

    def _hold(self, ask: Ask, batch: KeyBatch) -> Answer:
        node = self.node
        held = node.table.hold(batch, ttl_ms=ask.ttl_ms, now_ms=node.now_ms(), owner=0, view=False, first_miss=True)
        node.after_decision()
        return Answer(codes=bytes(held.codes), hold_id=held.hold_id, count=held.count)

    async def wait_listed(self, mark: int, until: float) -> bool:
        """`placing.answer_listed`."""
        listed, now = self.node.listed, self.loop.time()
        future: asyncio.Future[bool] = self.loop.create_future()

        def settle(there: bool) -> None:
            if not future.done():
                future.set_result(there)

        ticket = listed.wait(mark, settle)
        if not isinstance(ticket, Ticket):
            return ticket
        timer = self.loop.call_at(min(now + LISTED_WAIT_S, max(now, until - LISTED_MARGIN_S)), settle, False)
        try:
            return await future
        finally:
            timer.cancel()
            listed.give_up(ticket)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


class SimSlots(Slots):
    """Places of one put in simulated memory."""

    def make_sums(self, node: Any, first: int, last: int) -> None:
        for i in range(first, last):
            if self.offsets[i] >= 0:
                self.sums[i] = sums_of(node.memory.read(self.spec.uid, self.offsets[i]))


class Write:
    """One WRITE over the socket: reserve (parked while the tier makes room), receive, compare, commit, answer when listed."""

    def __init__(self, plane: Plane, ask: Ask, batch: KeyBatch, spec: NamespaceSpec, end: Endpoint, until: float) -> None:
        self.plane, self.node, self.ask, self.batch, self.spec = plane, plane.node, ask, batch, spec
        self.end, self.until = end, until

    async def run(self) -> Answer:
        node = self.node
        slots = await self._reserve()
        try:
            await self._receive(slots)
            slots.make_sums(node, 0, len(slots.sizes))
            for i, sent in enumerate(self.ask.sums):
                if slots.sums[i] != sent:
                    slots.sums[i] = None
            mark = self._commit(slots)
        except BaseException:
            placing.give_back(node, slots)
            raise
        codes = bytes(slots.codes)
        needed = self.ask.wait_listed and (_STORED in codes or _ALREADY in codes)
        if needed and not await self.plane.wait_listed(mark, self.until):
            codes = codes.replace(bytes([_STORED]), bytes([_UNLISTED]))
        return Answer(codes=codes)

    def _commit(self, slots: SimSlots) -> int:
        mark = placing.commit(self.node, slots)
        for key, code in zip(self.batch.split(), slots.codes, strict=True):
            if code == _STORED:
                self.plane.on_commit(key)
        return mark

    async def _reserve(self) -> SimSlots:
        node, loop = self.node, self.plane.loop
        sizes = [self.spec.block_bytes] * len(self.batch)
        give_up_at = loop.time() + (self.until - loop.time()) * PARK_SHARE
        try:
            while True:
                reserved = node.table.reserve(self.batch, sizes, now_ms=node.now_ms())
                if not reserved.must_wait or loop.time() >= give_up_at:
                    slots = SimSlots(node, self.spec, sizes, reserved.codes, reserved.blocks)
                    node.after_decision()
                    return slots
                node.table.abort([block for block in reserved.blocks if block is not None])
                node.kick_mover()
                room: asyncio.Future[None] = loop.create_future()
                node.wait_for_room(self, lambda room=room: room.done() or room.set_result(None))  # type: ignore[misc]
                node.after_decision()
                timer = loop.call_at(give_up_at, lambda room=room: room.done() or room.set_result(None))
                try:
                    await room
                finally:
                    timer.cancel()
        finally:
            node.forget_waiting(self)

    async def _receive(self, slots: SimSlots) -> None:
        """Straight into the slots, piece by piece."""
        memory, uid = self.node.memory, self.spec.uid
        for _ in BODY_PIECES:
            body: Body = await self.end.recv()
            at = body.stop * PART_BYTES
            for offset, data in zip(slots.offsets, body.blocks, strict=True):
                if offset >= 0:
                    memory.write(uid, offset, data[:at] + memory.read(uid, offset)[at:])


# --- the session --------------------------------------------------------------------------------------------------------


class SessionCall:
    """A gRPC stream to the master, as the agent uses it."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network, self._process, self._address = network, process, address
        self._end: Endpoint | None = None

    async def write(self, message: pb.WorkerMessage) -> None:
        if self._end is None:
            self._end = await self._connect()
            self._end.send("session")
        try:
            self._end.send(message)
        except Reset:
            raise MasterUnavailable("the session's connection is over") from None

    async def _connect(self) -> Endpoint:
        try:
            return await self._network.connect(self._process, self._address)
        except ConnectionError as error:
            raise MasterUnavailable(str(error)) from error

    async def read(self) -> pb.MasterMessage:
        assert self._end is not None
        try:
            message = await self._end.recv()
        except Reset:
            raise MasterUnavailable("the session's connection is over") from None
        if isinstance(message, KVPoolError):
            raise message
        assert isinstance(message, pb.MasterMessage)
        return message

    async def done_writing(self) -> None:
        """What was sent is on its way."""

    async def close(self) -> None:
        if self._end is not None:
            self._end.close()


class SimAgent(Agent):
    """The real agent."""

    def __init__(self, node: SimNode, network: Network, *, masters: str, address: str) -> None:
        settings: Any = SimpleNamespace(master=masters)
        super().__init__(
            node, settings, token="", address=address, unix_name="", http="", now_s=node.process.now_s, chance=node.process.random
        )
        self.sim, self._network = node, network
        self._info.host_id = node.process.host

    def _open(self, address: str) -> tuple[Any, Callable[[], Awaitable[None]]]:
        call = SessionCall(self._network, self.sim.process, address)
        return call, call.close

    async def _apply_welcome(self, welcome: pb.Welcome) -> None:  # type: ignore[override]
        named = {bytes(update.namespace.uid) for update in welcome.namespaces}
        for uid in [uid for uid in self.sim.known_namespaces() if uid not in named]:
            self.sim.delete_namespace(uid)
        for update in welcome.namespaces:
            await self._apply_namespace(update)

    async def _apply_namespace(self, update: pb.NamespaceUpdate) -> None:  # type: ignore[override]
        if update.deleted:
            self.sim.delete_namespace(NamespaceUid(update.namespace.uid))
            return
        self._unapplied.pop(update.namespace.uid, None)
        missed = [update.missed_keys] if update.missed_keys else []
        try:
            await self.sim.catch_up_slowly(
                spec_from_proto(update.namespace), drop_all=update.drop_blocks or update.missed_all, missed=missed
            )
        except TierError as error:
            self.sim.note("cannot catch up", error.reason)
            self._apply_later(update)

    async def _remove(self, task: pb.RemoveTask) -> None:  # type: ignore[override]
        done = pb.TaskDone(task_id=task.task_id)
        try:
            done.codes, done.n_removed = await self.sim.remove_noted(
                NamespaceUid(task.namespace), None if task.all else task.keys, removal_seq=task.removal_seq
            )
        except (KVPoolError, TierError) as error:
            done.error = str(error)
        self._say(pb.WorkerMessage(task_done=done))
