"""From SSD into memory: one block, checked, read once however many ask for it; and whole batches before they are viewed.

Owns the sharing of loads under way. What a READ does with the block is `read_path`; files and staging memory are `tiers.ssd`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from kvpool.core.types import Tiers
from kvpool.errors import NamespaceNotFound
from kvpool.worker.tiers.base import TierError, Trouble

MARGIN: Final = 0.1  # of the time that a request has, kept for its answer when the disk is late
MARGIN_S_MAX: Final = 0.25
PREFETCH_S: Final = 10.0  # for one batch that is brought up ahead of a get

if TYPE_CHECKING:
    from kvpool.core.blocks import Block
    from kvpool.core.keys import KeyBatch
    from kvpool.core.namespaces import NamespaceSpec
    from kvpool.worker.connection import Connection, Request
    from kvpool.worker.dataplane import DataPlane, Timer
    from kvpool.worker.node import Node
    from kvpool.worker.tiers.ssd import StagedBlock


def load(
    node: Node, block: Block, spec: NamespaceSpec, *, deadline: float, wanted: bool = False, n_more: int = 0
) -> StagedBlock | int:
    """A pinned block from SSD into memory, verified: its offset in the arena when it is in DRAM now, else (no room there, or not
    worth it: `wanted`, it always is) in staging memory, to be released by the caller. n_more: blocks of its chain that are
    loaded next. In the pool only. Raises TierError; a damaged copy has been dropped then."""
    mine = threading.Event()
    with node.lock:
        if block.dram is not None:
            return node.offset(block)
        theirs = node.loading.setdefault(block, mine)
    if theirs is not mine:  # when the leader failed or found no room, it is read here, beside others
        if not theirs.wait(max(0.0, deadline - time.monotonic())):
            raise TierError(Trouble.BUSY, "another reader's load of the block was not over before the deadline")
        with node.lock:
            if block.dram is not None:
                return node.offset(block)
    try:
        return _load_alone(node, block, spec, deadline=deadline, wanted=wanted, n_more=n_more)
    finally:
        if theirs is mine:
            with node.lock:
                node.loading.pop(block, None)
            mine.set()


def _load_alone(
    node: Node, block: Block, spec: NamespaceSpec, *, deadline: float, wanted: bool, n_more: int
) -> StagedBlock | int:
    ssd, slot = node.ssd, block.ssd
    if ssd is None or slot is None:
        raise TierError(Trouble.DAMAGED, "the block's copy is gone")
    try:
        staged = ssd.read_block(slot, size=block.size, chunk_bytes=spec.chunk_bytes, block_sum=block.sum, deadline=deadline)
    except TierError as error:
        if error.trouble is Trouble.DAMAGED:
            with node.lock:
                node.table.corrupt(block, Tiers.SSD)
                node.after_decision()
        raise
    with node.lock:
        target = None if block.dram is not None else node.table.promote_reserve(block, wanted=wanted, n_more=n_more)
        offset = -1 if target is None else node.table.dram.place(target)[1]
        node.after_decision()
    if target is None:
        return staged
    copied = False
    try:
        arena = node.dram.array(spec.uid)
        np.copyto(arena[offset : offset + block.size], np.frombuffer(staged.view, dtype=np.uint8))
        copied = True
    finally:
        with node.lock:
            node.table.promote_done(block, target, staged.sums, ok=copied)
            is_there = block.dram == target  # it may have been removed meanwhile: then the slot is free again
            node.after_decision()
    if not is_there:
        return staged
    staged.release()
    return offset


def prefetch(node: Node, spec: NamespaceSpec, batch: KeyBatch, tiers: bytes | bytearray) -> None:
    """Begins to bring what is on SSD alone (`tiers`: as the table said) up to DRAM, in a thread; dropped while as many as
    `node.prefetches` are under way, when the disk does not answer, or where there is no room."""
    ssd = node.ssd
    if ssd is None or ssd.is_stalled or int(Tiers.SSD) not in bytes(tiers) or not node.prefetches.acquire(blocking=False):
        return

    def bring_up() -> None:
        deadline = time.monotonic() + PREFETCH_S
        pinned: list[Block] = []
        try:
            with node.lock:
                found = node.table.pin(batch, now_ms=node.now_ms(), touch=False, first_miss=False).blocks
                pinned = [block for block in found if block is not None]
                cold = [block for block in pinned if block.dram is None]
            for i, block in enumerate(cold):
                loaded = load(node, block, spec, deadline=deadline, wanted=True, n_more=len(cold) - i - 1)
                if not isinstance(loaded, int):
                    loaded.release()
                    break  # no room
        except NamespaceNotFound:
            pass  # deleted meanwhile
        except TierError as error:
            node.count_read_trouble(spec.uid, error)
        finally:
            node.prefetches.release()
            if pinned:
                node.unpin(pinned)

    node.submit_io(bring_up)


class BringUp:
    """Copies the SSD blocks of a batch to DRAM, as far as there is room, then calls `then()`: a view needs its blocks there."""

    def __init__(
        self, plane: DataPlane, connection: Connection, request: Request, spec: NamespaceSpec, batch: KeyBatch,
        then: Callable[[], None],
    ) -> None:  # fmt: skip
        self.node = plane.node
        self.connection = connection
        self.request = request
        self.spec = spec
        self.batch = batch
        self.then = then
        self.pinned: list[Block] = []
        self._gone = False
        self._working = False
        self._answered = False
        self._timer: Timer | None = None

    def start(self) -> None:
        with self.node.lock:
            if Tiers.SSD not in self.node.table.tiers_of(self.batch, now_ms=self.node.now_ms(), touch=False):
                cold = []
            else:
                found = self.node.table.pin(self.batch, now_ms=self.node.now_ms(), touch=False).blocks
                self.pinned = [block for block in found if block is not None]
                cold = [block for block in self.pinned if block.dram is None]
        if cold and self.node.ssd is not None and not self.node.ssd.is_stalled:
            self._working = True
            loop, left = self.connection.loop, self.request.deadline - time.monotonic()
            self._timer = loop.at(self.request.deadline - min(MARGIN * max(0.0, left), MARGIN_S_MAX), self._answer)
            self.node.submit_io(self._in_pool, cold)
        else:
            self._answer()

    def on_close(self) -> None:
        self._gone = True

    def _in_pool(self, cold: list[Block]) -> None:
        try:
            for i, block in enumerate(cold):
                if self._gone or self._answered or time.monotonic() >= self.request.deadline:
                    break
                n_more = len(cold) - i - 1
                loaded = load(self.node, block, self.spec, deadline=self.request.deadline, wanted=True, n_more=n_more)
                if not isinstance(loaded, int):
                    loaded.release()
                    break  # no room: what follows could not be viewed anyway
        except TierError as error:
            self.node.count_read_trouble(self.spec.uid, error)
        finally:
            self.connection.loop.post(self._done)

    def _done(self) -> None:
        self._working = False
        if self._answered:
            self._unpin()
        else:
            self._answer()

    def _answer(self) -> None:
        """On the loop: when all is up, or shortly before the deadline, with what is there (the disk may hang)."""
        if self._answered:
            return
        self._answered = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            if not self._gone:
                self.then()  # pinned until it has held them
        except Exception:
            self.connection.close("internal")
            raise
        finally:
            if not self._working:
                self._unpin()

    def _unpin(self) -> None:
        pinned, self.pinned = self.pinned, []
        if pinned:
            self.node.unpin(pinned)
