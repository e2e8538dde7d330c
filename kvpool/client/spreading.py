"""Asks for copies of what this client reads from other hosts, on its own host's worker: later reads are shared memory then.

Owns the thread that asks, at most one a client, and what is remembered. What is worth a copy is `core.spread`; the copy is made
by the worker that has the blocks, straight to the other one. Nothing waits for this: what cannot be asked now is dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from kvpool.client.peers import STATE_UP, Peer
from kvpool.core.keys import KeyBatch
from kvpool.core.spread import RemoteReads, runs
from kvpool.errors import KVPoolError

if TYPE_CHECKING:
    from kvpool.client.context import Context
    from kvpool.client.results import GetResult

WAITING_MAX: Final = 64  # batches; more are dropped
ASK_S: Final = 1.0
CLOSE_S: Final = 2.0


class Spreading:
    """`copy_after`: reads of a block from other hosts after which a copy is asked for; 0: never. Thread-safe; `got` and
    `ask_copy` do not wait."""

    def __init__(self, context: Context, *, copy_after: int) -> None:
        self._context, self._copy_after = context, copy_after
        self._reads = RemoteReads(copy_after=copy_after)
        self._wake = threading.Condition()
        self._waiting: deque[tuple[Peer, KeyBatch, str]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.asked = self.dropped = 0  # batches

    def got(self, batch: KeyBatch, result: GetResult, peers: list[int]) -> None:
        """A get was served: block i came from peer number `peers[i]`."""
        if not self._copy_after or not result.n_blocks:
            return
        context = self._context
        n = result.n_blocks
        of_peer = {number: context.peers.get(number) for number in set(peers[:n])}
        far = {number for number, peer in of_peer.items() if peer is not None and not peer.local}
        if not far or (home := self.home()) is None:
            return
        for number in far:
            peer = of_peer[number]
            assert peer is not None
            for start, stop in runs([i for i in range(n) if peers[i] == number]):
                with self._wake:
                    wanted = self._reads.read(batch.slice(start, stop), now_ms=int(time.monotonic() * 1e3))
                for part in wanted:
                    self.ask_copy(peer, part, home.worker_id)

    def home(self) -> Peer | None:
        """A worker of this host that can be written to."""
        here = (peer for peer, _ in self._context.peers.candidates().values() if peer.local and peer.state == STATE_UP)
        return next(here, None)

    def ask_copy(self, peer: Peer, batch: KeyBatch, target: str) -> bool:
        """Soon: `peer` is asked to copy these blocks to the worker `target`. False: too many wait."""
        with self._wake:
            if self._closed or len(self._waiting) >= WAITING_MAX:
                self.dropped += 1
                return False
            self._waiting.append((peer, batch, target))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvpool-spreading", daemon=True)
                self._thread.start()
            self._wake.notify()
        return True

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or bool(self._waiting))
                if self._closed:
                    return
                peer, batch, target = self._waiting.popleft()
            try:
                deadline = time.monotonic() + ASK_S
                done = self._context.peers.call(
                    peer, lambda link, until, batch=batch, target=target: link.copy_to(batch, target, deadline=until),  # type: ignore[misc]
                    deadline=deadline)  # fmt: skip
            except KVPoolError:
                done = False
            if done:
                self.asked += 1
            else:
                self.dropped += 1

    def close(self) -> None:
        """Idempotent."""
        with self._wake:
            self._closed = True
            self._waiting.clear()
            self._wake.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_S)
