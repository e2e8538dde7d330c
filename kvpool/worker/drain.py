"""Empties this worker: blocks of which nobody else has a copy go to workers with room, while reads of them go on here.

    look: ask the master which blocks have no other copy ─▶ move them, hot chains first ─▶ look again ─▶ none: DONE
                                  ▲                                                         └▶ none moved: STUCK ─┐
                                  └────────────────── after a while, or when something was stored here ◀──────────┘

Owns the thread that does it. Does not own: order, speed and room (`core.drain`), what is asked of the master (`elsewhere`), how
blocks travel (`sender`), who drains (the master keeps the operator's wish; a signal is `server`'s).

A copy stays here too: a drain that is cut short or cancelled has cost nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvpool.core.drain import Pace, Phase, Progress, batched, chains, parent_key
from kvpool.core.placement import Candidate, place
from kvpool.core.types import WorkerId
from kvpool.errors import KVPoolError
from kvpool.v1 import master_pb2 as pb
from kvpool.worker.elsewhere import Elsewhere
from kvpool.worker.sender import Sender

if TYPE_CHECKING:
    from kvpool.core.blocks import Block
    from kvpool.worker.node import Node

log = logging.getLogger(__name__)

LOOK_KEYS: Final = 8192  # of one question: some ms of the master's loop
MOVE_S: Final = 2.0  # for one batch, beside its bytes
ROOMS_S: Final = 0.5  # then the others' room is asked anew: as often as they tell it
RETRY_S: Final = 1.0  # after a look that failed, or found nobody with room
RESCAN_S: Final = 5.0  # an empty worker looks again: another's copy may have been evicted
STORED_S: Final = 0.25  # how often it is seen whether something was stored meanwhile
SETTLE_S: Final = 0.1  # a worker that leaves waits so long for others to say that they do too
CLOSE_S: Final = 2.0  # for the thread to end: calls under way are cut


class _Stopped(Exception):
    """The wish is another one now."""


class Drainer:
    """`master()`: address of the master whose session is up, "" without; `beat()`: sends a heartbeat soon. All methods may be
    called from any thread; `status` and `follow` do not wait."""

    def __init__(self, node: Node, *, token: str, master: Callable[[], str], beat: Callable[[], None]) -> None:
        self._node = node
        self._master = master
        self._beat = beat
        self._wake = threading.Condition()
        self._wish = 0  # counts changes: a pass for an older one stops
        self._wanted = False
        self._leaving = False
        self._closed = False
        self._left = threading.Event()  # what can be done before leaving is done
        self._thread: threading.Thread | None = None
        self._pace = Pace()
        self._progress = Progress()
        # of the thread alone:
        self._elsewhere = Elsewhere(node.worker_id, token=token, master=master)
        self._sender = Sender(node, token=token, purpose="drain", patience_s=MOVE_S)
        self._anybody = False  # had room, when last asked for

    # --- wishes ---------------------------------------------------------------------------------------------------------

    def follow(self, task: pb.DrainTask) -> None:
        """What the master wants, from now on."""
        with self._wake:
            if (self._wanted, self._pace.rate_bytes) == (task.active, task.rate_bytes) or self._closed:
                return
            if task.active and not self._wanted:
                self._progress = Progress()
            self._wanted, self._pace = task.active, Pace(task.rate_bytes)
            self._change()
        log.info("event=drain_wanted active=%s rate_bytes=%d", task.active, task.rate_bytes)

    def leave(self, *, until: float, hurry: threading.Event) -> None:
        """Moves what would be lost, until `until` (monotonic s) or `hurry`; at once when nobody could take it. SSD blocks are not
        lost by a stop: they go only when an operator drains. Blocks; nothing of it runs any more afterwards."""
        with self._wake:
            going = bool(self._master()) and not self._closed and time.monotonic() < until
            if going:
                if not self._wanted:
                    self._progress, self._pace = Progress(), Pace()
                self._leaving = True
                self._change()
        if going:
            self._beat()
            while not self._left.wait(0.02) and self._master() and not hurry.is_set() and time.monotonic() < until:
                pass
            moved, left = self._progress.blocks_moved, self._progress.blocks_left
            log.info("event=left_drained blocks_moved=%d blocks_left=%d reason=%r", moved, left, self._progress.reason)
        self.close()

    def status(self) -> pb.DrainStatus | None:
        """None: this worker takes part."""
        with self._wake:
            if not (self._wanted or self._leaving):
                return None
            p = self._progress
            return pb.DrainStatus(
                phase=p.phase, leaving=self._leaving, blocks_left=p.blocks_left, bytes_left=p.bytes_left,
                blocks_moved=p.blocks_moved, bytes_moved=p.bytes_moved, rate_bytes=self._pace.rate_bytes,
                eta_ms=p.eta_ms(rate_bytes=self._pace.rate_bytes, now_ms=_now_ms()), reason=p.reason[:500],
            )  # fmt: skip

    def close(self) -> None:
        """Ends it, calls under way too. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            thread = self._thread
        self._sender.close()
        if thread is not None:
            thread.join(CLOSE_S)

    def _change(self) -> None:
        """Under the lock: the thread looks at the wish anew."""
        self._wish += 1
        self._wake.notify_all()
        if self._thread is None and (self._wanted or self._leaving):
            self._thread = threading.Thread(target=self._run, name="kvpool-drain", daemon=True)
            self._thread.start()

    # --- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self._wanted or self._leaving)
                    if self._closed:
                        return
                    wish = self._wish
                with contextlib.suppress(_Stopped):
                    self._pause(self._guarded_pass(wish), wish)
        finally:
            self._sender.close()
            self._elsewhere.close()

    def _guarded_pass(self, wish: int) -> float:
        """One pass; how long to wait after it."""
        try:
            return self._pass(wish)
        except _Stopped:
            raise
        except KVPoolError as error:
            self._anybody = True  # not known
            self._end(Phase.STUCK, str(error))
        except Exception as error:
            log.exception("event=drain_failed")
            self._end(Phase.STUCK, f"internal error: {type(error).__name__}")
        return RETRY_S

    def _pass(self, wish: int) -> float:
        """Looks, and moves what it finds."""
        self._elsewhere.look_around()
        if self._leaving and self._elsewhere.others:
            self._pause(SETTLE_S, wish)
            self._elsewhere.look_around()
        blocks, used_at = self._only_here(wish)
        n_bytes = sum(block.size for block in blocks)
        with self._wake:
            self._progress.blocks_left, self._progress.bytes_left = len(blocks), n_bytes
        if not blocks:
            self._end(Phase.DONE)
            self._wait_for_stores(wish)
            return 0.0
        self._sender.trouble = ""
        if self._target(blocks, smallest=True) is None:
            self._end(Phase.STUCK, self._why_stuck(len(blocks), n_bytes))
            return RETRY_S
        with self._wake:
            self._progress.begin(len(blocks), n_bytes, now_ms=_now_ms())
        self._beat()
        before = self._progress.blocks_moved
        for part in batched(chains(blocks, used_at.__getitem__), bytes_max=self._pace.batch_bytes):
            self._move(part, wish)
        if self._progress.blocks_moved > before:
            return 0.0  # what was stored meanwhile, and what the others have really: the next look says
        self._end(Phase.STUCK, self._why_stuck(self._progress.blocks_left, self._progress.bytes_left))
        return RETRY_S

    def _why_stuck(self, n: int, n_bytes: int) -> str:
        what = f"{n} blocks ({n_bytes} bytes)"
        if not self._elsewhere.others:
            return f"no other worker is up to take {what}"
        if self._anybody:
            return f"{what} could not be moved: {self._sender.trouble or 'they went away meanwhile'}"
        return f"no other worker has room for {what}"

    def _end(self, phase: Phase, reason: str = "") -> None:
        with self._wake:
            changed = self._progress.phase is not phase
            self._progress.end(phase, reason, now_ms=_now_ms())
        if changed:
            log.info("event=drain_phase phase=%s blocks_moved=%d bytes_moved=%d reason=%r", phase.name.lower(),
                     self._progress.blocks_moved, self._progress.bytes_moved, reason)  # fmt: skip
            self._beat()
        if self._leaving and (phase is Phase.DONE or not self._anybody):
            self._left.set()  # else it is tried again while there is time

    def _pause(self, seconds: float, wish: int) -> None:
        """Raises _Stopped when the wish changes."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or self._wish != wish, seconds)
            if self._closed or self._wish != wish:
                raise _Stopped

    def _wait_for_stores(self, wish: int) -> None:
        stored = self._node.table.counters["stored"]
        until = time.monotonic() + RESCAN_S
        while time.monotonic() < until and self._node.table.counters["stored"] == stored:
            self._pause(STORED_S, wish)

    # --- what is to be moved ----------------------------------------------------------------------------------------------

    def _only_here(self, wish: int) -> tuple[list[Block], dict[Block, int]]:
        """Blocks of which no other worker that stays has a copy, and when each was used."""
        node = self._node
        keeps_ssd = self._leaving and not self._wanted
        with node.lock:
            everything = [list(space.blocks.values()) for space in node.table.spaces.values() if space.blocks]
            waiting = [uid for uid, space in node.table.spaces.items() if space.blocks and isinstance(node.served(uid), tuple)]
        if waiting:  # right after a start: what is there may have been removed
            raise KVPoolError(f"removals of {len(waiting)} namespaces are being caught up with")
        found: list[Block] = []
        used_at: dict[Block, int] = {}
        for blocks in everything:
            for at in range(0, len(blocks), LOOK_KEYS):
                self._pause(0, wish)
                with node.lock:
                    part = [b for b in blocks[at : at + LOOK_KEYS] if b.live and not (keeps_ssd and b.ssd is not None)]
                    ticks = [node.table.used_at(block) for block in part]
                if not part:
                    continue
                homes = self._elsewhere.homes(part[0].ns, [block.key for block in part])
                if homes is None:
                    break  # the namespace is being deleted
                for block, tick, home in zip(part, ticks, homes, strict=True):
                    if not home:
                        found.append(block)
                        used_at[block] = tick
        return found, used_at

    # --- moving ---------------------------------------------------------------------------------------------------------

    def _move(self, part: list[Block], wish: int) -> None:
        """One batch, to one worker or, where that gets full, several."""
        home = ""
        while part:
            self._pause(self._pace.wait_ms(_now_ms()) / 1e3, wish)
            if time.monotonic() - self._elsewhere.looked_at > ROOMS_S:
                self._elsewhere.look_around()
            name = self._target(part, home=home)
            if name is None:
                return
            room, n = self._elsewhere.rooms.of(name), 0
            while n < len(part) and part[n].size <= room:
                room -= part[n].size
                n += 1
            n_done = self._send(name, part[:n])
            home, part = name, part[n_done:]

    def _target(self, part: Sequence[Block], *, home: str = "", smallest: bool = False) -> str | None:
        """Where the first of these blocks belongs: beside its parent when there is room, else spread. `smallest`: whether any
        worker could take any of them."""
        first = min(part, key=lambda block: block.size) if smallest else part[0]
        roomy = [name for name in self._elsewhere.rooms.names() if self._elsewhere.rooms.of(name) >= first.size]
        usable = [name for name in roomy if self._sender.usable(name)]
        self._anybody = bool(roomy)
        if not usable:
            return None
        if smallest:
            return usable[0]
        above = parent_key(first)
        if not home and above is not None:
            home = next(iter(self._elsewhere.homes(first.ns, [above]) or ()), "")
        rooms, others = self._elsewhere.rooms, self._elsewhere.others
        candidates = [
            Candidate(WorkerId(name), others[name].host_id, rooms.of(name), others[name].capacity_bytes) for name in usable
        ]
        need = sum(block.size for block in part)
        chosen = place(candidates, key=first.key, parent_workers=[WorkerId(home)], need_bytes=need)
        return chosen[0].worker_id

    def _send(self, name: str, part: list[Block]) -> int:
        """To this worker. How many leading blocks are through with this pass: moved, gone, or not to be moved."""
        sent = self._sender.send(self._elsewhere.others[name], part)
        if sent is None:
            return 0
        blocks, there = sent
        if not blocks:
            self._count(part[:1], moved=0)
            return 1
        n_bytes = sum(block.size for block in blocks)
        self._pace.sent(n_bytes, _now_ms())
        self._elsewhere.rooms.sent(name, n_bytes, now_ms=_now_ms())
        if len(there) < len(blocks):
            self._elsewhere.rooms.full(name)
        self._count(there, moved=len(there))
        return len(blocks)

    def _count(self, blocks: Sequence[Block], *, moved: int) -> None:
        n_bytes = sum(block.size for block in blocks)
        with self._wake:
            if moved:
                self._progress.moved(moved, n_bytes)
            else:
                self._progress.left(len(blocks), n_bytes)


def _now_ms() -> float:
    return time.monotonic() * 1e3
