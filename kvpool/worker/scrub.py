"""Scrubber: the thread that reads DRAM and SSD again at a low rate and drops what does not match its checksums.

Owns the pace: at most `bytes_per_s` over both tiers, CPU_SHARE of one core and WALL_SHARE of the time; a pass over a tier at most
every `pass_s_min`. What is read next and what happens to a bad copy is `core.scrub`'s. Reads and hashing are done without the
node's lock and without pins, so no put or get waits for it; staging memory is taken only where nobody waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from kvpool.core.hashing import chunk_sums
from kvpool.core.scrub import Copy, Sweep, condemn
from kvpool.core.types import Tiers
from kvpool.worker.tiers.base import STATE_OK, TierError, Trouble

if TYPE_CHECKING:
    from kvpool.worker.node import Node

log = logging.getLogger("kvpool.worker.scrub")

STEP_BYTES: Final = 1 << 20  # of a tier at a time, or one block
HASH_BYTES: Final = 1 << 20  # hashed in one go; between, a stop is noticed
CPU_SHARE: Final = 0.05  # of one core: small blocks are read slower than `bytes_per_s`
WALL_SHARE: Final = 0.25  # on a busy machine, or a slow disk, it goes slower still
PASS_S_MIN: Final = 10.0  # a small pool is not read over and over
COUNTS: Final = ("blocks", "bytes", "corrupt", "skipped", "failed")
RETRY_S: Final = 1.0  # after a disk that is out, or a bug


class _Pass:
    """One tier's sweep and when it may go on."""

    def __init__(self, tier: Tiers, name: str) -> None:
        self.sweep = Sweep(tier)
        self.name = name
        self.began = 0.0
        self.rest_until = 0.0
        self.passes = 0  # ended: all that was taken was looked at too (the sweep counts when the last was taken)
        self.last_ended: float | None = None  # wall clock, seconds
        self.last_took_s = 0.0


class Scrubber:
    """One per worker, made with the node and started with it. `stop` may be called without `start`."""

    def __init__(self, node: Node, *, bytes_per_s: int, pass_s_min: float = PASS_S_MIN, cpu_share: float = CPU_SHARE) -> None:
        """`bytes_per_s` 0: there is no scrubbing."""
        self._node = node
        self._bytes_per_s, self._pass_s_min, self._cpu_share = bytes_per_s, pass_s_min, cpu_share
        self._passes = [_Pass(Tiers.DRAM, "dram")] + ([_Pass(Tiers.SSD, "ssd")] if node.ssd is not None else [])
        self._counters: dict[str, Counter[str]] = {one.name: Counter() for one in self._passes}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-scrub", daemon=True)

    def start(self) -> None:
        if self._bytes_per_s:
            self._thread.start()

    def stop(self, *, timeout_s: float) -> bool:
        """Ends the thread. False when a read hangs (the thread is then left behind)."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def facts(self) -> dict[str, dict[str, Any]]:
        """By tier: passes ended, when the last one did (wall clock, seconds; None: never) and how long it took, blocks and bytes
        read, copies found corrupt, skipped (no staging memory to spare), failed for another reason. Any thread."""
        return {
            one.name: {
                "passes": one.passes, "last_pass_ended": one.last_ended, "last_pass_s": round(one.last_took_s, 3),
                **{name: self._counters[one.name][name] for name in COUNTS},
            }
            for one in self._passes
        }  # fmt: skip

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            began, worked = time.monotonic(), time.thread_time()
            n_bytes = 0
            try:
                for one in self._passes:
                    n_bytes += self._step(one)
                took, worked = time.monotonic() - began, time.thread_time() - worked
                pause = max(n_bytes / self._bytes_per_s, took / WALL_SHARE, worked / self._cpu_share) - took
                pause = max(pause, self._rest_s())
            except Exception:  # the thread must live: rot would go unnoticed
                log.exception("event=scrub_failed")
                pause = RETRY_S

    def _rest_s(self) -> float:
        return max(0.0, min(one.rest_until for one in self._passes) - time.monotonic())

    def _step(self, one: _Pass) -> int:
        """The next copies of one tier. -> bytes read."""
        now = time.monotonic()
        if now < one.rest_until:
            return 0
        node = self._node
        if one.sweep.tier is Tiers.SSD and node.ssd is not None and node.ssd.state != STATE_OK:
            one.rest_until = now + RETRY_S
            return 0
        one.began = one.began or now
        before = one.sweep.passes
        with node.lock:
            copies = one.sweep.take(node.table, STEP_BYTES)
        n_bytes = 0
        counters = self._counters[one.name]
        corrupt = counters["corrupt"]
        for copy in copies:
            if self._stopping.is_set():
                return n_bytes
            n_bytes += self._look_at(copy, counters)
        if counters["corrupt"] > corrupt:
            log.error("event=scrub_corrupt tier=%s copies=%d", one.name, counters["corrupt"] - corrupt)
        if one.sweep.passes > before:
            ended = time.monotonic()
            one.last_took_s, one.last_ended = ended - one.began, time.time()
            one.rest_until, one.began = max(ended, one.began + self._pass_s_min), 0.0
            one.passes += 1
        return n_bytes

    def _look_at(self, copy: Copy, counters: Counter[str]) -> int:
        """Reads one copy, and drops it when it is bad. -> its bytes."""
        node = self._node
        try:
            good = self._dram_matches(copy) if copy.tier is Tiers.DRAM else self._ssd_matches(copy)
        except TierError as error:
            if error.is_out and node.mover is not None:
                node.mover.ssd_failed(error)
            counters["skipped" if error.trouble is Trouble.BUSY else "failed"] += error.trouble is not Trouble.CLOSED
            return 0
        counters["blocks"] += 1
        counters["bytes"] += copy.size
        if not good:
            with node.lock:
                dropped = condemn(node.table, copy)
                node.after_decision()
            counters["corrupt"] += dropped
        return copy.size

    def _dram_matches(self, copy: Copy) -> bool:
        each = max(1, HASH_BYTES // copy.chunk_bytes)  # chunks
        with self._node.dram.view(copy.uid, copy.offset, copy.size) as view:
            for at in range(0, len(copy.sums) // 8, each):
                with view[at * copy.chunk_bytes : (at + each) * copy.chunk_bytes] as part:
                    sums = chunk_sums(part, copy.chunk_bytes).tobytes()
                if sums != copy.sums[at * 8 : (at + each) * 8]:
                    return False
                if self._stopping.is_set():
                    break
        return True

    def _ssd_matches(self, copy: Copy) -> bool:
        ssd = self._node.ssd
        assert ssd is not None
        try:
            with ssd.read_block(
                copy.slot, size=copy.size, chunk_bytes=copy.chunk_bytes, block_sum=copy.block_sum, deadline=time.monotonic()
            ):
                return True
        except TierError as error:
            if error.trouble is not Trouble.DAMAGED:
                raise
            return False
