"""The worker's middle: the block table under its lock, and all that data plane, agent and mover share.

Owns the one lock, the clock, the thread pool, who waits for room or for the master, and which namespaces are served. Decisions
are `core.blocks`', bytes are the tiers', moving between tiers is `mover`.

    with node.lock: decide on `table`; note what must be done; `after_decision()`        ── outside of it: do it

A namespace is served when its removals are known to be applied (`catch_up`); before, requests get NOT_READY.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvpool.core.frames import Status
from kvpool.core.keys import KeyBatch
from kvpool.core.session import Reporter
from kvpool.core.types import Incarnation, MissCause, NamespaceUid
from kvpool.v1 import master_pb2 as pb
from kvpool.worker.listed import Listed
from kvpool.worker.tiers.base import TierError, Trouble

if TYPE_CHECKING:
    from kvpool.core.blocks import Block, BlockTable
    from kvpool.core.namespaces import NamespaceSpec
    from kvpool.core.quota import Share
    from kvpool.core.spread import LinkLoad
    from kvpool.worker.learned import Learned
    from kvpool.worker.mover import Mover
    from kvpool.worker.scrub import Scrubber
    from kvpool.worker.state import WorkerState
    from kvpool.worker.tiers.dram import DramTier
    from kvpool.worker.tiers.ssd import SsdTier
    from kvpool.worker.tiers.staging import StagingPool

log = logging.getLogger(__name__)

SETTLE_S: Final = 10.0  # the disk may take this long to forget removed blocks; then the removal is reported as failed
CLOSE_S: Final = 1.0  # for jobs and the mover's write to end at a stop: with the drain and the master's part under ten seconds
COPY_THREADS: Final = 2  # memory bandwidth is used up by then
PREFETCHES_MAX: Final = 4  # batches at a time that are brought up ahead of a get: they keep threads and blocks from others
EXPIRE_S: Final = 0.2  # how often holds whose time is up are looked for


def new_incarnation() -> Incarnation:
    """Random, never 0."""
    return Incarnation(secrets.randbits(64) or 1)


class Node:
    """Made by `build.build_node`. Any thread may call anything, except where said."""

    def __init__(
        self, *, worker_id: str, incarnation: Incarnation, table: BlockTable, reporter: Reporter, dram: DramTier,
        ssd: SsdTier | None, staging: StagingPool, state: WorkerState, lock: threading.Lock, io_threads: int,
    ) -> None:  # fmt: skip
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.lock = lock
        self.table = table
        self.reporter = reporter
        self.dram = dram
        self.ssd = ssd
        self.staging = staging
        self.state = state
        self.listed = Listed()
        self.loading: dict[Block, threading.Event] = {}  # SSD reads under way, under the lock
        self.io_threads = io_threads
        self.mover: Mover | None = None
        self.scrubber: Scrubber | None = None
        self.link_load: LinkLoad | None = None
        self.prefetches = threading.BoundedSemaphore(PREFETCHES_MAX)
        self.read_troubles: Counter[tuple[NamespaceUid, str]] = Counter()
        self._specs: dict[NamespaceUid, NamespaceSpec] = {}
        self._blocked: set[NamespaceUid] = set()
        self._applied: dict[NamespaceUid, int] = {}
        self._begun: dict[NamespaceUid, int] = {}  # removals that are applied or being applied; under the lock
        self._waiting_for_room: dict[Hashable, Callable[[], None]] = {}
        self._io_pool = ThreadPoolExecutor(io_threads, thread_name_prefix="kvpool-io")
        self._copy_pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="kvpool-copy")
        self._jobs: set[Future[None]] = set()
        self._record_calls: list[Callable[[], None]] = []
        self._drop_calls: list[Callable[[list[int]], None]] = []
        self._closed = threading.Event()
        self.learned: Learned | None = None
        self._expirer = threading.Thread(target=self._expire_holds, name="kvpool-holds", daemon=True)

    # --- small things that everybody needs ------------------------------------------------------------------------------

    @staticmethod
    def now_ms() -> int:
        """The clock of the core: monotonic milliseconds."""
        return time.monotonic_ns() // 1_000_000

    def offset(self, block: Block) -> int:
        """Where a pinned or reserved block lies in its namespace's arena."""
        slot = block.dram
        assert slot is not None
        return self.table.dram.place(slot)[1]

    def submit(self, call: Callable[..., None], *args: object) -> None:
        """Runs a long copy or hashing in a thread; a failure is logged. After `close` it does not run."""
        self._submit(self._copy_pool, call, args)

    def submit_io(self, call: Callable[..., None], *args: object) -> None:
        """The same for what waits for the disk: a slow disk must not hold up puts."""
        self._submit(self._io_pool, call, args)

    def _submit(self, pool: ThreadPoolExecutor, call: Callable[..., None], args: tuple[object, ...]) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            future = pool.submit(call, *args)
            self._jobs.add(future)
            future.add_done_callback(self._job_done)

    def _job_done(self, future: Future[None]) -> None:
        self._jobs.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            log.error("event=pool_job_failed", exc_info=error)

    def served(self, uid: NamespaceUid) -> NamespaceSpec | tuple[Status, str]:
        """The namespace's spec, or why a request for it is refused."""
        spec = self._specs.get(uid)
        if spec is None:
            return Status.UNKNOWN_NAMESPACE, f"this worker does not know namespace {uid.hex()} (yet)"
        if uid in self._blocked:
            return Status.NOT_READY, f"namespace {spec.name!r}: removals are being caught up with"
        return spec

    def after_decision(self) -> None:
        """At the end of every hold of the lock that may have changed something: wakes who has to carry it out."""
        if self.table.has_actions:
            self.kick_mover()
        if self.reporter.n_pending:
            for call in self._record_calls:
                call()

    def kick_mover(self) -> None:
        """It has something to do. With or without the lock."""
        if self.mover is not None:
            self.mover.kick()

    def on_record(self, call: Callable[[], None]) -> None:
        """`call` when there is something to report; under the lock, must not block."""
        self._record_calls.append(call)

    def on_drop_owners(self, call: Callable[[list[int]], None]) -> None:
        """`call(owners)` when connections must be dropped for their overdue views."""
        self._drop_calls.append(call)

    def wait_for_room(self, who: Hashable, call: Callable[[], None]) -> None:
        """Under the lock: `call` once when slots may have become free, or never; under the lock too, it must not block."""
        self._waiting_for_room[who] = call

    def forget_waiting(self, who: Hashable) -> None:
        self._waiting_for_room.pop(who, None)

    def room_made(self) -> None:
        """By the mover, without the lock."""
        with self.lock:
            self._room_freed()

    def _room_freed(self) -> None:
        waiting, self._waiting_for_room = self._waiting_for_room, {}
        for call in waiting.values():
            call()

    def unpin(self, blocks: list[Block]) -> None:
        """Ends transfers of pinned blocks. Without the lock."""
        with self.lock:
            self.table.unpin(blocks)
            self._room_freed()
            self.after_decision()

    def abort(self, blocks: list[Block]) -> None:
        """Gives reserved blocks back. Without the lock."""
        with self.lock:
            self.table.abort(blocks)
            self._room_freed()
            self.after_decision()

    def on_ack(self, seq: int) -> None:
        """The master has all reports up to `seq`."""
        with self.lock:
            self.reporter.on_ack(seq)
            acked = self.reporter.acked
        self.listed.on_ack(acked)

    def count_read_trouble(self, uid: NamespaceUid, error: TierError) -> None:
        with self.lock:
            self.read_troubles[uid, error.trouble.value] += 1
        if error.is_out and self.mover is not None:
            self.mover.ssd_failed(error)

    # --- namespaces and removals; one thread at a time (the agent's), besides start ---------------------------------------

    def known_namespaces(self) -> set[NamespaceUid]:
        return set(self._specs)

    def specs(self) -> list[NamespaceSpec]:
        return list(self._specs.values())

    def applied_seqs(self) -> list[tuple[NamespaceUid, int]]:
        """Of each namespace, the removals that are applied for good."""
        return list(self._applied.items())

    def removals_applied(self, uid: NamespaceUid) -> int:
        """No block that one of this many removals took out is here. Under the lock."""
        return self._applied.get(uid, 0)

    def removals_begun(self, uid: NamespaceUid) -> int:
        """At most this many removals have taken out anything here. Under the lock."""
        return max(self._begun.get(uid, 0), self._applied.get(uid, 0))

    def open_namespace(self, spec: NamespaceSpec, *, applied_seq: int, blocked: bool) -> None:
        """Makes its arena and takes it into the table. Raises TierError (no memory, no descriptors)."""
        self.dram.open_arena(spec.uid)
        with self.lock:
            self._blocked.add(spec.uid)
            if not blocked:
                self._blocked.discard(spec.uid)
            self.table.open_namespace(spec)
            self._applied[spec.uid] = applied_seq
            self._specs[spec.uid] = spec

    def catch_up(self, spec: NamespaceSpec, *, drop_all: bool, missed: Sequence[bytes]) -> None:
        """The namespace as the master has it, with what was removed while we were away; it is served afterwards.

        Raises TierError when the disk does not forget: it is not served then, until the next session."""
        uid = spec.uid
        known = self._specs.get(uid)
        if known is None:  # nothing of it can be here: nothing to wait for
            self.open_namespace(spec, applied_seq=spec.removal_seq, blocked=False)
        for keys in (None,) if drop_all else ():
            self._remove_for_good(uid, keys, removal_seq=spec.removal_seq)
        for keys in missed:
            self._remove_for_good(uid, keys, removal_seq=spec.removal_seq)
        noted = self.state.applied_seq(uid)
        if noted is None or known is None or replace(known, removal_seq=0) != replace(spec, removal_seq=0):
            self.state.put_namespace(spec)
        if noted != spec.removal_seq:
            self.state.set_applied_seq(uid, spec.removal_seq)
        with self.lock:
            self._specs[uid] = spec
            self._applied[uid] = spec.removal_seq
            self._blocked.discard(uid)

    def remove(self, uid: NamespaceUid, keys: bytes | None, *, removal_seq: int) -> tuple[bytes, int]:
        """Removes these keys (None: all) for good. -> (1 had it, per key; blocks removed). Raises TierError: not for good."""
        if uid not in self._specs:
            return bytes(len(KeyBatch(uid, keys or b"", chained=False))), 0
        codes, n_removed = self._remove_for_good(uid, keys, removal_seq=removal_seq)
        applied = self._applied.get(uid, 0)
        if removal_seq == applied + 1:  # one that follows a removal that failed is not noted: the master tells us again
            self.state.set_applied_seq(uid, removal_seq)
            with self.lock:
                self._applied[uid] = removal_seq
        return codes, n_removed

    def delete_namespace(self, uid: NamespaceUid) -> None:
        """The namespace is gone, with all its blocks. An unknown one is fine."""
        with self.lock:
            if self._specs.pop(uid, None) is None:
                return
            self._blocked.discard(uid)
            self._applied.pop(uid, None)
            self._begun.pop(uid, None)
            self.table.close_namespace(uid)
            self._room_freed()
            self.after_decision()
        self.state.forget_namespace(uid)  # what is left of it on disk is of an unknown namespace, and dropped at start

    def drop(self, batch: KeyBatch) -> bytes:
        """Drops what is here of these keys, best effort: [n] 1 had it."""
        with self.lock:
            had = self.table.remove(batch, cause=MissCause.REMOVED)
            self._room_freed()
            self.after_decision()
        return had

    def _remove_for_good(self, uid: NamespaceUid, keys: bytes | None, *, removal_seq: int) -> tuple[bytes, int]:
        """Invisible at once; returns when their SSD records are zeroed on the device. Slots that are read or held stay until the
        last reader goes, but not their records: a worker that is killed now must not find them at its next start."""
        codes, n_removed = b"", 0
        with self.lock:
            self._begun[uid] = max(removal_seq, self._begun.get(uid, 0))
            kept = self.table.with_records(uid, keys)  # dropped ones that are still read or held too
            for block in kept:
                block.pins += 1  # so that nobody gets the slot before its record is zeroed
            slots = [slot for block in kept for slot in block.ssd_slots]
            if keys is None:
                n_removed = self.table.remove_all(uid)
            else:
                codes = bytes(self.table.remove(KeyBatch(uid, keys, chained=False), cause=MissCause.REMOVED))
                n_removed = sum(codes)
            self._room_freed()
            self.after_decision()
        try:
            if self.ssd is not None and self.mover is not None:  # also without `kept`: an evicted copy's erasure may still be due
                deadline = time.monotonic() + SETTLE_S
                while any(block.demoting for block in kept):  # its record is written last: let it come, then zero it
                    if time.monotonic() > deadline:
                        raise TierError(Trouble.STALLED, f"the disk did not end its writes within {SETTLE_S} s")
                    time.sleep(0.001)
                if slots:
                    self.ssd.erase(slots)
                if not self.mover.apply_actions():
                    raise TierError(Trouble.IO, "the disk does not zero the records of removed blocks")
                self.ssd.sync()
        finally:
            if kept:
                with self.lock:
                    self.table.unpin(kept)
                    self.after_decision()
        return codes, n_removed

    # --- pins and quotas; from the master ---------------------------------------------------------------------------------

    def pin(self, uid: NamespaceUid, keys: Sequence[bytes], levels: Sequence[int], ttls_ms: Sequence[int]) -> bytes:
        """See `Keeping.pin_keys`; times are from now on."""
        now_ms = self.now_ms()
        with self.lock:
            codes = self.table.pin_keys(uid, keys, levels, [now_ms + ttl for ttl in ttls_ms])
            self._room_freed()
            self.after_decision()
        return codes

    def keep_only_pins(self, named: Mapping[NamespaceUid, set[bytes]]) -> None:
        """All pins but these are over: they were ended while we were away."""
        for uid in list(self._specs):
            with self.lock:
                space = self.table.spaces.get(uid)
                kept = named.get(uid, set())
                over = [key for key, _, _ in space.pins.items() if key not in kept] if space is not None else []
                self.table.pin_keys(uid, over, bytes(len(over)), [0] * len(over))

    def set_shares(self, shares: Mapping[NamespaceUid, Share]) -> None:
        """What namespaces with a quota may take here."""
        with self.lock:
            for uid, share in shares.items():
                self.table.set_share(uid, share)
            self._room_freed()

    def quota_uses(self) -> list[tuple[NamespaceUid, int, int, Share]]:
        """Of each namespace with a quota: bytes in DRAM, on SSD, and what it may have."""
        with self.lock:
            spaces = [space for space in self.table.spaces.values() if space.share is not None]
            return [(s.uid, *self.table.used_bytes_of(s.uid), s.share) for s in spaces if s.share is not None]

    # --- what it tells ----------------------------------------------------------------------------------------------------

    def tier_status(self) -> list[pb.TierStatus]:
        """DRAM first, then SSD where there is one."""
        with self.lock:
            dram, ssd = self.table.dram, self.table.ssd
            told = [("dram", dram.capacity_bytes, dram.used_bytes, dram.n_blocks, self.dram.state)]
            if ssd is not None and self.ssd is not None:
                told.append(("ssd", ssd.capacity_bytes, ssd.used_bytes, ssd.n_blocks, self.ssd.state))
        return [pb.TierStatus(tier=t, capacity_bytes=c, used_bytes=u, blocks=n, state=s) for t, c, u, n, s in told]

    def stat(self) -> dict[str, Any]:
        """For STAT."""
        with self.lock:
            counters, gauges = dict(self.table.counters), self.table.gauges()
            held = {"reports_pending": self.reporter.n_pending, "reports_overflowed": self.reporter.overflows}
        return {
            "worker": self.worker_id,
            "incarnation": self.incarnation,
            "session": self.listed.up,
            "bytes_out": 0 if self.link_load is None else self.link_load.total_bytes,
            "namespaces": len(self._specs),
            "tiers": {
                t.tier: {"capacity_bytes": t.capacity_bytes, "used_bytes": t.used_bytes, "blocks": t.blocks, "state": t.state}
                for t in self.tier_status()
            },
            "counters": counters | held,
            "now": gauges,
            "scrub": {} if self.scrubber is None else self.scrubber.facts(),
        }

    # --- start and end ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._expirer.start()
        if self.scrubber is not None:
            self.scrubber.start()

    def close(self) -> bool:
        """After the data plane has stopped: ends threads, gives back memory and directories. Idempotent. False: a disk hangs, and
        threads that wait for it keep what they use; the process must be ended from outside of them."""
        if self._closed.is_set():
            return True
        self._closed.set()
        pools = (self._copy_pool, self._io_pool)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        stuck = bool(wait(list(self._jobs), timeout=CLOSE_S).not_done)
        for thread in (self.scrubber, self.mover):
            if thread is not None and not thread.stop(timeout_s=CLOSE_S):
                stuck = True
        if stuck:
            log.error("event=disk_hangs_at_stop")
            return False
        for pool in pools:
            pool.shutdown(wait=True)
        if self._expirer.is_alive():
            self._expirer.join(5)
        if self.learned is not None:
            self.learned.save(self.lock)
        self.dram.close()
        if self.ssd is not None:
            self.ssd.close()
        self.staging.close()
        self.state.close()
        return True

    def _expire_holds(self) -> None:
        while not self._closed.wait(EXPIRE_S):
            try:
                with self.lock:
                    owners = list(self.table.expire(self.now_ms()))
                    self._room_freed()
                    self.after_decision()
                for call in self._drop_calls if owners else ():
                    call(owners)
                if self.learned is not None:
                    self.learned.save_if_due(self.lock)
            except Exception:  # the thread must live: holds that never end would fill the tier
                log.exception("event=expiry_failed")
