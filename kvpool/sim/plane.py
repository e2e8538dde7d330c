"""A simulated worker's data plane: its operations on a `SimNode`. Puts are `puts`, the session with the master is `session`.

`Plane` stands for `worker.dataplane` with `read_path` and `ops`: one request at a time on a connection, what a connection had is
given back when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from kvpool.core.block import Block
from kvpool.core.frames import Status
from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import BlockCode, MissCause, NamespaceUid, Tiers, miss_code
from kvpool.errors import NamespaceNotFound
from kvpool.sim.disk import sleep
from kvpool.sim.network import Endpoint, Network, Reset
from kvpool.sim.node import SimNode
from kvpool.sim.puts import Held, Write, commit, fill, give_back, reserve
from kvpool.sim.values import HALF, sums_of
from kvpool.sim.wire import Answer, Ask
from kvpool.transport.base import LinkCause
from kvpool.worker.listed import Ticket
from kvpool.worker.placing import LISTED_MARGIN_S, LISTED_WAIT_S
from kvpool.worker.read_path import HOLD_GRACE_MS
from kvpool.worker.tiers.base import TierError, Trouble

_INLINE, _SHARED, _LATER = int(BlockCode.HIT_INLINE), int(BlockCode.HIT_SHARED), int(BlockCode.LATER)
_CAUSES: Final = {Trouble.DAMAGED: MissCause.CORRUPT, Trouble.BUSY: MissCause.TIMEOUT, Trouble.STALLED: MissCause.TIMEOUT}
_REFUSALS: Final = {Status.UNKNOWN_NAMESPACE: LinkCause.UNKNOWN_NAMESPACE, Status.NOT_READY: LinkCause.NOT_READY}


class Plane:
    """All connections of one worker. `on_commit(key, moved)`: a put's block became visible, or another worker's did here."""

    def __init__(self, node: SimNode, network: Network, address: str, *, on_commit: Callable[[bytes, bool], None]) -> None:
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
        held = Held()
        try:
            while True:
                ask: Ask = await end.recv()
                self._busy[owner] = None
                answer = await self._handle(ask, end, owner, held)
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
            held.give_back(node)
            node.table.release_owner(owner)
            node.after_decision()

    async def _handle(self, ask: Ask, end: Endpoint, owner: int, held: Held) -> Answer | None:
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
        if ask.op == "fill":
            return await fill(node, held, ask, end)
        until = self.loop.time() + ask.left_s
        if ask.op == "commit":
            return await commit(self, held, ask, until)
        if ask.op == "abort":
            give_back(node, held.pop(ask.hold_id, None))
            return Answer()
        assert ask.batch is not None
        spec = node.served(ask.batch.namespace)
        if isinstance(spec, tuple):
            return await self._refuse(ask, end, _REFUSALS[spec[0]])
        try:
            if ask.op == "read":
                return await self._read(ask, ask.batch, spec, owner, until)
            if ask.op == "write":
                return await Write(self, ask, ask.batch, spec, end, until).run()
            if ask.op == "touch":
                return await self._touch(ask, ask.batch, until)
            if ask.op == "reserve":
                return await reserve(self, held, ask, ask.batch, spec, until)
            if ask.view:
                await self._bring_up(ask.batch, until)
            return self._hold(ask, ask.batch, owner)
        except NamespaceNotFound:
            return await self._refuse(ask, end, LinkCause.UNKNOWN_NAMESPACE)

    async def _refuse(self, ask: Ask, end: Endpoint, cause: LinkCause) -> Answer:
        for _ in range(ask.n_bodies):
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
            cold = [i for i in range(n) if codes[i] == _INLINE and offsets[i] < 0]
            for n_before, i in enumerate(cold):
                block = blocks[i]
                assert block is not None
                try:
                    loaded = await node.load(block, until=until, n_more=len(cold) - n_before - 1)
                    if isinstance(loaded, int):
                        offsets[i] = loaded
                    else:
                        staged[i] = loaded
                except TierError as error:
                    codes[i] = miss_code(block.gone or _CAUSES.get(error.trouble, MissCause.UNKNOWN))
                    node.count_read_trouble(spec.uid, error)
            first_miss = next((i for i, code in enumerate(codes) if code != _INLINE), n)
            codes[first_miss + 1 :] = bytes([_LATER]) * (n - first_miss - 1) if first_miss < n else b""
            sizes = [0 if block is None else block.size for block in blocks]
            answer = Answer(b"", bytes(tiers), sizes, [None] * n, [None] * n, [None] * n)
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
        firsts = {i: staged[i] if i in staged else self.node.memory.read(uid, offsets[i])[:HALF] for i in inline}
        if inline:
            await sleep(self.loop, 0.0001)
        for i in inline:
            block = blocks[i]
            assert block is not None
            if i in staged:
                answer.payload[i], answer.sums[i] = staged[i], sums_of(staged[i])
            else:
                answer.payload[i] = firsts[i] + self.node.memory.read(uid, offsets[i])[HALF:]
                answer.sums[i] = block.sums

    # --- the others -----------------------------------------------------------------------------------------------------

    async def _touch(self, ask: Ask, batch: KeyBatch, until: float) -> Answer:
        node = self.node
        tiers = bytes(node.table.tiers_of(batch, now_ms=node.now_ms(), touch=True))
        mark = node.reporter.mark()
        listed = not any(tiers) or not ask.wait_listed or await self.wait_listed(mark, until)
        return Answer(tiers=tiers, listed=listed and ask.wait_listed)

    async def _bring_up(self, batch: KeyBatch, until: float) -> None:
        """`ssd_load.BringUp`: a view's blocks come to DRAM, as far as there is room."""
        node = self.node
        pinned = [block for block in node.table.pin(batch, now_ms=node.now_ms(), touch=False).blocks if block is not None]
        try:
            cold = [block for block in pinned if block.dram is None]
            for n_before, block in enumerate(cold):
                if self.loop.time() < until:
                    try:
                        await node.load(block, until=until, wanted=True, n_more=len(cold) - n_before - 1)
                    except TierError as error:
                        node.count_read_trouble(batch.namespace, error)
        finally:
            node.unpin(pinned)

    def _hold(self, ask: Ask, batch: KeyBatch, owner: int) -> Answer:
        node = self.node
        held = node.table.hold(batch, ttl_ms=ask.ttl_ms, now_ms=node.now_ms(), owner=owner if ask.view else 0, view=ask.view,
                               first_miss=True)  # fmt: skip
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
