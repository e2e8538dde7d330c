"""A put in parts: blocks are reserved first, their bytes come in any order (layer by layer), all become visible with `commit`."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

from kvpool.client.buffers import flat_source
from kvpool.client.context import Context
from kvpool.client.peers import Peer
from kvpool.client.placing import key_above, targets
from kvpool.client.results import PutResult
from kvpool.client.writing import quota_reason, settle
from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import KEY_BYTES, BlockCode
from kvpool.errors import InvalidArgument
from kvpool.transport.base import LinkError, Range, ReservationHandle, WorkerLink


class _Copy:
    """One worker's reservation."""

    def __init__(self, peer: Peer, link: WorkerLink, handle: ReservationHandle) -> None:
        self.peer, self.link, self.handle = peer, link, handle
        self.failure = ""  # why the worker is not written to any more


class PutSession:
    """Blocks being written. Use as a context manager: leaving it without `commit` aborts, nothing becomes visible.

    Calls may come from any thread, one at a time. A worker that fails during the session drops out; when it was the last one, the
    blocks' outcome is REJECTED.
    """

    def __init__(self, context: Context, spec: NamespaceSpec, batch: KeyBatch, *, size: int, deadline: float,
                 wait_listed: bool, hint: int = 0) -> None:  # fmt: skip
        self._hint = hint
        self._context, self._spec, self._batch = context, spec, batch
        self._size, self._deadline, self._wait_listed = size, deadline, wait_listed
        self._lock = threading.Lock()
        self._ended = False
        self._copies: list[_Copy] = []
        self._refusals: list[str] = []
        context.began(self)
        try:
            with self._lock:
                self._reserve()
        except BaseException:
            self.abort()
            raise

    def _reserve(self) -> None:
        """A reservation at as many different workers as the namespace wants copies."""
        n = len(self._batch)
        if not n:
            return
        above = key_above(self._batch)
        places = self._context.known(self._spec.uid, [above]) if above else None
        parents = [peer for peer, _ in places[0]] if places else []
        for number in targets(self._context, self._spec, key=self._batch.keys[:KEY_BYTES], above=above, parents=parents,
                              n_bytes=n * self._size, deadline=self._deadline):  # fmt: skip
            if len(self._copies) == self._spec.replicas:
                return
            peer = self._context.peers.get(number)
            if peer is None:
                continue

            def ask(link: WorkerLink, until: float) -> tuple[WorkerLink, ReservationHandle]:
                return link, link.reserve(self._batch, [self._size] * n, deadline=until, hints=[self._hint] * n)

            try:
                link, handle = self._context.peers.call(peer, ask, deadline=self._deadline, alternatives=True,
                                                        patient_until=self._deadline)  # fmt: skip
            except LinkError as error:
                self._refusals.append(f"worker {peer.worker_id}: {error}")
                continue
            if handle.codes and handle.codes[0] in (BlockCode.FULL, BlockCode.FULL_QUOTA):
                over = handle.codes[0] == BlockCode.FULL_QUOTA
                self._refusals.append(quota_reason(peer.worker_id) if over else f"worker {peer.worker_id} has no room")
                link.abort(handle)
                continue
            self._copies.append(_Copy(peer, link, handle))

    @property
    def n_blocks(self) -> int:
        """Blocks of the session."""
        return len(self._batch)

    def write(self, block: int, offset: int, data: Any) -> None:
        """Bytes `offset`.. of block `block` (index into the session's hashes). Parts may come in any order and must cover every
        block before `commit`. What is there already, or has no room, is skipped silently: `commit` says so. `data`: any buffer or
        CPU tensor; it may be reused when this returns. InvalidArgument for what does not fit."""
        self._context.check()
        if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < len(self._batch):
            raise InvalidArgument(f"block: {block!r} is not in 0..{len(self._batch) - 1}")
        view = flat_source(data, "data")
        if not isinstance(offset, int) or offset < 0 or view.nbytes < 1 or offset + view.nbytes > self._size:
            raise InvalidArgument(f"data: bytes {offset!r}..+{view.nbytes} are outside of a block of {self._size} bytes")
        with self._lock:
            self._check_open()
            for copy in self._copies:
                if copy.failure or copy.handle.codes[block] != BlockCode.RESERVED:
                    continue
                try:
                    copy.link.fill(copy.handle, [Range(block, offset, view)], deadline=self._deadline)
                except LinkError as error:
                    copy.failure = f"worker {copy.peer.worker_id}: {error}"
                    self._context.peers.note(copy.peer, error, patience_ms=(self._deadline - time.monotonic()) * 1e3)

    def commit(self) -> PutResult:
        """Makes the blocks visible; outcomes as of `put`. Ends the session, whatever happens."""
        self._context.check()
        with self._lock:
            self._check_open()
            self._end()
            answers: list[tuple[int, bytes]] = []
            for copy in self._copies:
                if not copy.failure:
                    try:
                        codes = copy.link.commit(copy.handle, wait_listed=self._wait_listed, deadline=self._deadline)
                        answers.append((copy.peer.number, codes))
                        continue
                    except LinkError as error:
                        copy.failure = f"worker {copy.peer.worker_id}: {error}"
                self._refusals.append(copy.failure)
            return settle(self._context, self._spec, self._batch, answers, self._refusals)

    def abort(self) -> None:
        """Nothing of the session becomes visible. Never raises; idempotent."""
        with self._lock:
            if self._ended:
                return
            self._end()
            for copy in self._copies:
                copy.link.abort(copy.handle)

    def _end(self) -> None:
        self._ended = True
        self._context.ended(self)

    def _check_open(self) -> None:
        if self._ended:
            raise InvalidArgument("session: it has ended; a put session is for one commit")

    def __enter__(self) -> PutSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()
