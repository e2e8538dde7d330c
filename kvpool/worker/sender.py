"""Copies of this worker's blocks to another worker: the links, the bytes, and what may not travel.

Owns the links to other workers. Does not own: which blocks go where, and when (`drain`, `spread`).

A copy stays here too. Nothing that is removed meanwhile comes back: what is sent carries the removals that were applied here when
its blocks were taken, and a worker that is further refuses it. Bytes are checked before they leave: a block that went bad in
memory is dropped, not spread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvpool.core.drain import batch_of
from kvpool.core.hashing import chunk_sums
from kvpool.core.retention import hint_of
from kvpool.core.types import BlockCode, Tiers
from kvpool.errors import KVPoolError
from kvpool.transport.base import LinkCause, LinkError, LinkOptions, Range, WorkerLink
from kvpool.transport.choose import link as make_link
from kvpool.transport.host import host_id
from kvpool.v1 import master_pb2 as pb
from kvpool.worker.tiers.base import TierError, Trouble

if TYPE_CHECKING:
    from kvpool.core.blocks import Block
    from kvpool.worker.node import Node

log = logging.getLogger(__name__)

CALL_S: Final = 2.0  # for a question
SLOWEST_BYTES: Final = 100_000_000
AGAIN_S: Final = 0.25  # a worker that could not take a batch yet is left alone for so long
AVOID_S: Final = 2.0  # a worker that failed, for so long
_THERE: Final = (int(BlockCode.STORED), int(BlockCode.ALREADY), int(BlockCode.UNLISTED))


class Sender:
    """For one thread, `close` for any. `purpose` is told to the other workers. `patience_s`: for one batch, beside its bytes at
    SLOWEST_BYTES a second. `trouble`: the last failure in words."""

    def __init__(self, node: Node, *, token: str, purpose: str, patience_s: float) -> None:
        self._patience_s = patience_s
        self._node = node
        self.host_id = host_id()
        self._options = LinkOptions(token=token, client=f"{purpose} of {node.worker_id}", host_id=self.host_id)
        self._links: dict[str, WorkerLink] = {}
        self._avoided: dict[str, float] = {}
        self._closed = False
        self.trouble = ""

    def usable(self, name: str) -> bool:
        """Whether this worker did not just fail."""
        return self._avoided.get(name, 0.0) <= time.monotonic()

    def send(self, target: pb.HolderInfo, part: Sequence[Block]) -> tuple[list[Block], list[Block]] | None:
        """Leading blocks of a part of one chain to this worker, as far as they are still here. -> (taken, of these the ones that
        the target has now); nothing taken: the first one is gone. None: the target cannot be used now."""
        deadline = time.monotonic() + self._patience_s + sum(block.size for block in part) / SLOWEST_BYTES
        with self._taken(part, deadline) as (blocks, views, fence):
            if not blocks:
                return [], []
            try:
                codes = self._write(target, blocks, views, fence, deadline)
            except KVPoolError as error:  # a LinkError; or its token, its version
                self._failed(target.worker_id, error)
                return None
        return blocks, [block for block, code in zip(blocks, codes, strict=True) if code in _THERE]

    def bytes_out(self, target: pb.HolderInfo) -> int:
        """What that worker has sent to others since its start. Raises KVPoolError when it does not say."""
        deadline = time.monotonic() + CALL_S
        try:
            return int(self._link(target, deadline).stat(deadline=deadline).get("bytes_out", 0))
        except KVPoolError as error:
            self._failed(target.worker_id, error)
            raise

    def close(self) -> None:
        """Cuts calls under way. Idempotent."""
        self._closed = True
        for link in list(self._links.values()):
            link.close()

    def _link(self, target: pb.HolderInfo, deadline: float) -> WorkerLink:
        name = target.worker_id
        link = self._links.get(name)
        if link is None or link.incarnation != target.incarnation:
            if link is not None:
                link.close()
            self._links[name] = link = make_link(target, self._options, deadline=deadline)
            if self._closed:
                link.close()
                raise LinkError(LinkCause.CLOSED, "this worker stops")
        return link

    def _write(
        self, target: pb.HolderInfo, blocks: Sequence[Block], views: Sequence[memoryview], fence: int, deadline: float
    ) -> bytes:
        link = self._link(target, deadline)
        now_ms = self._node.now_ms()
        hints = [hint_of(block.keep, now_ms) for block in blocks]
        sizes = [view.nbytes for view in views]
        held = link.reserve(batch_of(blocks), sizes, deadline=deadline, fence=fence, hints=hints)
        try:
            ranges = [Range(i, 0, views[i]) for i, code in enumerate(held.codes) if code == BlockCode.RESERVED]
            if ranges:
                link.fill(held, ranges, deadline=deadline)
            return link.commit(held, wait_listed=True, deadline=deadline)
        finally:
            link.abort(held)  # nothing, when it was committed

    @contextlib.contextmanager
    def _taken(self, part: Sequence[Block], deadline: float) -> Iterator[tuple[list[Block], list[memoryview], int]]:
        """Leading blocks of these that are still here, their checked bytes, and the removals that they are as of."""
        node = self._node
        with node.lock:
            n = next((i for i, block in enumerate(part) if not block.live), len(part))
            pinned = list(part[:n])
            for block in pinned:
                block.pins += 1
            fence = node.removals_applied(part[0].ns)
        views: list[memoryview] = []
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: node.unpin(pinned) if pinned else None)
            for block in pinned:
                try:
                    views.append(self._bytes_of(block, deadline, stack))
                except TierError as error:
                    node.count_read_trouble(block.ns, error)
                    self.trouble = error.reason
                    break
            yield pinned[: len(views)], views, fence

    def _bytes_of(self, block: Block, deadline: float, stack: contextlib.ExitStack) -> memoryview:
        """Of a pinned block. Raises TierError; a copy that is damaged has been dropped then."""
        node = self._node
        with node.lock:
            offset = -1 if block.dram is None else node.offset(block)
            slot = block.ssd
        chunk_bytes = block.chunk_bytes
        tier = Tiers.DRAM
        try:
            if offset >= 0:
                view = node.dram.view(block.ns, offset, block.size)
                if block.sums is not None and chunk_sums(view, chunk_bytes).tobytes() != block.sums:
                    raise TierError(Trouble.DAMAGED, "a block in DRAM differs from its checksum")
                return view
            tier = Tiers.SSD
            if node.ssd is None or slot is None:
                raise TierError(Trouble.BUSY, "the block's copy is gone")
            staged = node.ssd.read_block(
                slot, size=block.size, chunk_bytes=chunk_bytes, block_sum=block.sum, deadline=deadline
            )
            return stack.enter_context(staged).view
        except TierError as error:
            if error.trouble is Trouble.DAMAGED:
                with node.lock:
                    node.table.corrupt(block, tier)
                    node.after_decision()
            raise

    def _failed(self, name: str, error: KVPoolError) -> None:
        self.trouble = f"worker {name}: {error}"
        cause = error.cause if isinstance(error, LinkError) else None
        log.warning("event=copy_failed worker=%s cause=%s reason=%r", name, cause, str(error))
        if cause in (LinkCause.NOT_READY, LinkCause.UNKNOWN_NAMESPACE):
            self._avoided[name] = time.monotonic() + AGAIN_S
            return
        self._avoided[name] = time.monotonic() + AVOID_S
        link = self._links.pop(name, None)
        if link is not None:
            link.close()
