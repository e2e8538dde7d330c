"""Copies that this worker makes on others while it stays: what a client asked for, what makes its link hot, what a loss left with
too few copies.

    COPY of a client ──▶ queue ──┐
    the link is a bottleneck ────┼─▶ thread: where the master says there is room ─▶ sender ─▶ another worker
    a worker has gone ───────────┘

Owns the thread and its queue. Does not own: what is worth a copy (`core.spread`), how blocks travel (`sender`), who has which and
who has room (`elsewhere`, the master). A copy that cannot be made is dropped and counted: it would only have been faster, or is
made at the next look. Copies are evicted where they are like any other block, so those that are cold go by themselves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvpool.core.drain import Pace, batched, chains
from kvpool.core.keys import KeyBatch
from kvpool.core.placement import Candidate, place
from kvpool.core.spread import LinkLoad, missing_copies
from kvpool.core.types import WorkerId
from kvpool.errors import KVPoolError
from kvpool.worker.elsewhere import Elsewhere
from kvpool.worker.sender import Sender

if TYPE_CHECKING:
    from kvpool.core.blocks import Block
    from kvpool.worker.node import Node

log = logging.getLogger(__name__)

ASKED_MAX: Final = 256  # batches that wait; more are dropped
LOOK_S: Final = 1.0  # how often the link is looked at, and whether somebody has gone
ROOMS_S: Final = 1.0  # then the others are asked for anew
LOOK_KEYS: Final = 8192  # of one question to the master: some ms of its loop
SETTLE_S: Final = 5.0  # after a change of workers the master's index is waited for: one that is back reports what it has
PART_BYTES: Final = 2 << 20  # sent at a time: over a link that is full, a part must come through in PART_S
PART_S: Final = 20.0
CLOSE_S: Final = 2.0
HOT_AT: Final = 0.6  # of what the link carries: above it readers begin to wait for each other


class Spreader:
    """`master()`: address of the master whose session is up, "" without. `rate_bytes`: of all copies together, a second; 0: none
    are made. `ask` and `close` may be called from any thread."""

    def __init__(self, node: Node, *, token: str, master: Callable[[], str], load: LinkLoad, rate_bytes: int) -> None:
        self._node, self._master, self._load = node, master, load
        self._pace, self._on = Pace(rate_bytes), rate_bytes > 0
        self._elsewhere = Elsewhere(node.worker_id, token=token, master=master)
        self._sender = Sender(node, token=token, purpose="copies", patience_s=PART_S)
        self._wake = threading.Condition()
        self._asked: deque[tuple[KeyBatch, str]] = deque()
        self._closed = False
        self._others: set[tuple[str, int]] = set()
        self._repair_at = 0.0  # monotonic s; 0: nothing to repair is known
        self.counts: Counter[str] = Counter()  # blocks_copied, bytes_copied, by why; dropped
        self._thread = threading.Thread(target=self._run, name="kvpool-spread", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, batch: KeyBatch, target: str) -> bool:
        """A client would like these blocks on that worker. False: not now."""
        with self._wake:
            if not self._on or self._closed or len(self._asked) >= ASKED_MAX:
                self.counts["dropped"] += 1
                return False
            self._asked.append((batch, target))
            self._wake.notify_all()
        return True

    def close(self) -> None:
        """Ends it, calls under way too. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._sender.close()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    # --- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or bool(self._asked), LOOK_S)
                    if self._closed:
                        return
                    asked = self._asked.popleft() if self._asked else None
                try:
                    if not self._on or not self._master():
                        continue
                    if asked is not None:
                        self._copy_asked(*asked)
                    else:
                        self._cool_link()
                        self._repair()
                except KVPoolError as error:
                    log.info("event=copies_later reason=%r", str(error))
                except Exception:  # the thread must live
                    log.exception("event=spread_failed")
        finally:
            self._sender.close()
            self._elsewhere.close()

    def _look_around(self) -> None:
        if time.monotonic() - self._elsewhere.looked_at > ROOMS_S:
            self._elsewhere.look_around()

    def _copy_asked(self, batch: KeyBatch, target: str) -> None:
        self._look_around()
        if target not in self._elsewhere.others:
            self.counts["dropped"] += 1
            return
        self._send_all(self._live(batch), target, "asked")

    def _cool_link(self) -> None:
        """While our link is the bottleneck: the hottest chains to the worker whose link has least to do."""
        hottest = self._load.hottest(now_ms=self._node.now_ms())
        if not hottest:
            return
        self._elsewhere.look_around()
        for batch in hottest:
            blocks = self._live(batch)
            if not blocks:
                continue
            holders = self._holders(blocks)
            lonely = [block for block, there in zip(blocks, holders, strict=True) if not there]
            if lonely and (name := self._idlest(lonely)) is not None:
                self._send_all(lonely, name, "hot")

    def _idlest(self, blocks: Sequence[Block]) -> str | None:
        """The worker with room whose link has sent least since the last look."""
        need = sum(block.size for block in blocks)
        sent: dict[str, int] = {}
        for candidate in self._candidates(exclude=()):
            if candidate.free_bytes < need and candidate.capacity_bytes < 2 * need:
                continue
            try:
                sent[candidate.worker_id] = self._sender.bytes_out(self._elsewhere.others[candidate.worker_id])
            except KVPoolError:
                continue
        return min(sent, key=lambda name: sent[name], default=None)

    def _repair(self) -> None:
        """Copies that namespaces with `replicas` lack, some time after a worker has gone (or this one came)."""
        node = self._node
        with node.lock:
            replicated = [spec for spec in node.specs() if spec.replicas > 1]
        if not replicated:
            self._others, self._repair_at = set(), 0.0
            return
        self._elsewhere.look_around()
        others = {(name, info.incarnation) for name, info in self._elsewhere.others.items()}
        now = time.monotonic()
        if others != self._others:
            self._others, self._repair_at = others, now + SETTLE_S
        if not self._repair_at or now < self._repair_at or not others:
            return
        left = sum(self._repair_namespace(spec.uid, spec.replicas) for spec in replicated)
        self._repair_at = time.monotonic() + SETTLE_S if left else 0.0

    def _repair_namespace(self, uid: bytes, replicas: int) -> int:
        """-> blocks that still lack a copy, though there is another worker."""
        node, left = self._node, 0
        with node.lock:
            space = node.table.spaces.get(uid)  # type: ignore[call-overload]
            blocks = [] if space is None else list(space.blocks.values())
        lacking: dict[tuple[str, ...], list[Block]] = {}
        for at in range(0, len(blocks), LOOK_KEYS):
            part = [block for block in blocks[at : at + LOOK_KEYS] if block.live]
            if self._closed or not part:
                continue
            for block, holders in zip(part, self._holders(part), strict=True):
                if missing_copies(node.worker_id, holders, replicas=replicas):
                    lacking.setdefault(tuple(sorted(holders)), []).append(block)
        for there, lonely in lacking.items():
            with node.lock:
                used = {block: node.table.used_at(block) for block in lonely}
            for run in batched(chains(lonely, used.__getitem__), bytes_max=self._pace.batch_bytes):
                self._look_around()
                hosts = {self._elsewhere.others[name].host_id for name in there if name in self._elsewhere.others}
                hosts.add(self._sender.host_id)
                candidates = self._candidates(exclude=there)
                apart = [one for one in candidates if one.host_id not in hosts] or candidates
                need = sum(block.size for block in run)
                chosen = place(apart, key=run[0].key, need_bytes=need)
                left += len(run) if not chosen else len(run) - self._send_all(run, chosen[0].worker_id, "repaired")
        return left

    # --- what both need -------------------------------------------------------------------------------------------------

    def _live(self, batch: KeyBatch) -> list[Block]:
        """Leading blocks of the batch that are here."""
        with self._node.lock:
            space = self._node.table.spaces.get(batch.namespace)
            found: list[Block] = []
            for key in batch.split() if space is not None else ():
                block = space.blocks.get(key)  # type: ignore[union-attr]
                if block is None:
                    break
                found.append(block)
        return found

    def _holders(self, blocks: Sequence[Block]) -> list[list[str]]:
        """Per block the other workers that have it; one that is being deleted has all."""
        holders: list[list[str]] = []
        for at in range(0, len(blocks), LOOK_KEYS):
            part = blocks[at : at + LOOK_KEYS]
            found = self._elsewhere.holders(part[0].ns, [block.key for block in part])
            holders += found if found is not None else [["?"]] * len(part)
        return holders

    def _candidates(self, *, exclude: Sequence[str]) -> list[Candidate]:
        rooms, others = self._elsewhere.rooms, self._elsewhere.others
        return [
            Candidate(WorkerId(name), info.host_id, rooms.of(name), info.capacity_bytes)
            for name, info in others.items()
            if name not in exclude and self._sender.usable(name)
        ]

    def _send_all(self, blocks: Sequence[Block], target: str, why: str) -> int:
        """In parts, at the pace. -> how many are there now."""
        n_there = 0
        for part in self._parts(blocks):
            while not self._closed and part:
                wait_s = self._pace.wait_ms(time.monotonic() * 1e3) / 1e3
                with self._wake:
                    if self._wake.wait_for(lambda: self._closed, wait_s) or target not in self._elsewhere.others:
                        return n_there
                sent = self._sender.send(self._elsewhere.others[target], part)
                if sent is None:
                    self.counts["dropped"] += len(part)
                    return n_there
                taken, there = sent
                n_bytes = sum(block.size for block in there)
                self._pace.sent(n_bytes, time.monotonic() * 1e3)
                self.counts[f"{why}_blocks"] += len(there)
                self.counts[f"{why}_bytes"] += n_bytes
                n_there += len(there)
                if len(there) < len(taken):  # it is full
                    return n_there
                part = part[max(1, len(taken)) :]
        return n_there

    def _parts(self, blocks: Sequence[Block]) -> Iterator[list[Block]]:
        part: list[Block] = []
        n_bytes = 0
        for block in blocks:
            if part and n_bytes + block.size > min(PART_BYTES, self._pace.batch_bytes):
                yield part
                part, n_bytes = [], 0
            part.append(block)
            n_bytes += block.size
        if part:
            yield part
