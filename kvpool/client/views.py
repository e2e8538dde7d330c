"""Views: read-only memory of a local worker's blocks, without a copy, kept valid by renewing their hold.

The keeper thread exists only while views do. What a view's memory is, and its ending, are in `transport.shm`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, overload

from kvpool.client.context import Context
from kvpool.client.peers import Peer, miss_of
from kvpool.client.reading import locate_all
from kvpool.core.fetch import Fetch
from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import BlockCode, MissCause, miss_cause
from kvpool.errors import KVPoolError
from kvpool.transport.base import VIEW_TTL_MS, LinkError, Viewed, WorkerLink

RENEW_S: Final = VIEW_TTL_MS / 1e3 / 3
RENEW_CALL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Part:
    peer: Peer
    link: WorkerLink
    hold_id: int


class View(Sequence[memoryview]):
    """Read-only memory of the leading blocks that workers of this host have in memory. Use it as a context manager.

    `n_blocks`: how many; `view[i]`: uint8 of block i, valid until the end of the with block (what still refers to it afterwards,
    say an array made of it, may see other blocks' bytes). `miss`: why block n_blocks is not in it. Leaving the with block raises
    KVPoolError when the promise was lost meanwhile, so that what was read must not be trusted.
    """

    def __init__(self, keeper: Keeper, parts: list[_Part], views: list[memoryview], miss: MissCause | None) -> None:
        self._keeper, self._parts, self._views = keeper, parts, views
        self._ended = False
        self.n_blocks = len(views)
        self.miss = miss

    def __len__(self) -> int:
        return self.n_blocks

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        return self._views[index]

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._views)

    def close(self) -> None:
        """Ends the view; see the class for when it raises. Idempotent, any thread."""
        if self._ended:
            return
        self._ended = True
        views, self._views = self._views, []
        self.n_blocks = 0
        for view in views:
            with contextlib.suppress(BufferError):  # an array of the caller's still refers to it
                view.release()
        lost = self._keeper.end(self, self._parts)
        if lost:
            raise KVPoolError(f"view: worker {', '.join(lost)} gave blocks up while it was open; what was read may be wrong")

    def __enter__(self) -> View:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(KVPoolError):  # the caller's own error matters more
            self.close()


class Keeper:
    """Renews the holds of all open views of one client, three times in their life. Thread-safe."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._open: dict[int, list[_Part]] = {}  # by the view's identity
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, view: View, parts: list[_Part]) -> None:
        with self._lock:
            self._open[id(view)] = parts
            if self._thread is None and not self._closed:
                self._wake.clear()
                self._thread = threading.Thread(target=self._run, name="kvpool-views", daemon=True)
                self._thread.start()

    def end(self, view: View, parts: list[_Part]) -> list[str]:
        """Releases the view's holds; workers that had lost them."""
        with self._lock:
            self._open.pop(id(view), None)
            thread = None
            if not self._open and self._thread is not None:
                thread, self._thread = self._thread, None
                self._wake.set()
        lost = []
        for part in parts:
            alive = bytes(1)
            with contextlib.suppress(LinkError):
                alive = part.link.renew([part.hold_id], VIEW_TTL_MS, deadline=time.monotonic() + RENEW_CALL_S)
            if alive[:1] != bytes(1):
                part.link.release([part.hold_id])
            else:
                lost.append(part.peer.worker_id)
        if thread is not None:
            thread.join()
        return lost

    def _run(self) -> None:
        mine = threading.current_thread()
        while not self._wake.wait(RENEW_S):
            with self._lock:
                if self._thread is not mine:
                    return
                by_link: dict[int, tuple[WorkerLink, list[int]]] = {}
                for parts in self._open.values():
                    for part in parts:
                        by_link.setdefault(id(part.link), (part.link, []))[1].append(part.hold_id)
            for link, ids in by_link.values():
                with contextlib.suppress(LinkError):  # who leaves the view asks once more, and is told
                    link.renew(ids, VIEW_TTL_MS, deadline=time.monotonic() + RENEW_CALL_S)

    def close(self) -> None:
        """Ends the thread; open views end with their links."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            self._wake.set()
        if thread is not None:
            thread.join()


def take_view(context: Context, keeper: Keeper, spec: NamespaceSpec, batch: KeyBatch, *, deadline: float) -> View:
    """Views the leading blocks, run after run, at workers of this host that are reached by shared memory."""
    fetch = Fetch(len(batch))
    fetch.locate(0, locate_all(context, spec, batch, deadline=deadline))
    parts: list[_Part] = []
    views: list[memoryview] = []

    def cost(number: int) -> int | MissCause:
        peer = context.peers.get(number)
        return context.peers.cost(number) if peer is not None and peer.local else MissCause.UNKNOWN

    while fetch.n_leading < len(batch):
        reads = fetch.plan(cost)
        if not reads:
            break
        run = reads[0].run()
        peer = context.peers.get(run.peer)
        if peer is None:
            break
        part = batch.slice(run.blocks[0], run.blocks[-1] + 1)

        def ask(link: WorkerLink, until: float, part: KeyBatch = part) -> tuple[WorkerLink, Viewed]:
            return link, link.view(part, deadline=until)

        try:
            link, viewed = context.peers.call(peer, ask, deadline=deadline, alternatives=run.alternatives)
        except LinkError as error:
            fetch.failed(run, miss_of(error))
            continue
        n = len(viewed.views)
        if viewed.hold_id:
            parts.append(_Part(peer, link, viewed.hold_id))
        views += viewed.views
        if n < len(part) and miss_cause(viewed.codes[n]) is None:
            break  # there, but not to be had as memory: on SSD, or past what may be held
        codes = bytes([BlockCode.HIT_SHARED]) * n + viewed.codes[n:]
        fetch.answered(run, codes, viewed.tiers, [0] * len(codes))
    why = fetch.why()
    miss = None if len(views) == len(batch) else why[0] if why else MissCause.UNKNOWN
    view = View(keeper, parts, views, miss)
    if parts:
        keeper.begin(view, parts)
    return view
