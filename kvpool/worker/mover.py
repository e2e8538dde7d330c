"""Mover: the thread that carries out what the block table decides about tiers.

Writes the coldest dirty DRAM blocks down to SSD, so that room can be made by dropping clean ones; applies the table's
actions (populate, punch, make, erase and delete files); takes the SSD tier out of use when it fails and tries it again
later. Copying up is the read path's, which has the bytes at hand. Does not decide which block goes where
(`core.blocks`), does not know files or memfds (`tiers`).

Locks, taken in this order: `applying` (actions are applied one after the other, in the table's order), then the
node's lock (the table). No I/O under the node's lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

from kvpool.core.block import Action, Block, SsdErase, SsdExtentCreated, SsdExtentDropped
from kvpool.core.blocks import BlockTable
from kvpool.core.retention import pack_hint
from kvpool.core.slots import CloseArena, PopulateExtent, PunchExtent, Slot
from kvpool.worker.tiers.base import BlockMeta, TierError, Trouble
from kvpool.worker.tiers.dram import DramTier
from kvpool.worker.tiers.ssd import SsdTier, SsdWrite

log = logging.getLogger("kvpool.worker.mover")

BATCH_BYTES: Final = 8 << 20  # one round: long enough writes for any disk, short enough that waiters see room soon
STAGING_WAIT_S: Final = 10.0
ACTIONS_WAIT_S: Final = 10.0
WATCH_S: Final = 0.25  # how often a write under way is looked at
RETRY_S_MIN: Final = 0.5
RETRY_S_MAX: Final = 30.0


class Mover:
    """One per worker. `kick` may be called by any thread, `apply_actions` and `ssd_failed` by one that holds neither lock."""

    def __init__(
        self,
        table: BlockTable,
        *,
        lock: AbstractContextManager[object],
        dram: DramTier,
        ssd: SsdTier | None,
        on_room: Callable[[], None],
        now_ms: Callable[[], int],
        retry_s_min: float = RETRY_S_MIN,
        retry_s_max: float = RETRY_S_MAX,
    ) -> None:
        """`lock`: the node's, which guards `table`. `on_room`: called without the node's lock, by any
        thread, when a put that had to wait may find room now."""
        self._table, self._node_lock, self._dram, self._ssd = table, lock, dram, ssd
        self._on_room, self._now_ms = on_room, now_ms
        self._applying = threading.Lock()
        self._unmade: dict[int, SsdExtentCreated] = {}  # extents whose file could not be made yet
        self._unerased: set[Slot] = set()  # records that could not be zeroed yet
        self._wake = threading.Condition()
        self._kicked = False
        self._stopping = False
        self._retry_s_min, self._retry_s_max = retry_s_min, retry_s_max
        self._retry_s = retry_s_min
        self._retry_at: float | None = None  # the SSD tier is out until then
        self._writing = False
        self._counters: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="kvpool-mover", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="kvpool-mover-watch", daemon=True)

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def start(self) -> None:
        self._thread.start()
        if self._ssd is not None:
            self._watcher.start()

    def stop(self, *, timeout_s: float) -> bool:
        """Ends the thread after the write that it is in. False when that one hangs (the thread is then left behind)."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        for thread in (self._thread, self._watcher):
            if thread.ident is not None:
                thread.join(timeout_s)
        return not self._thread.is_alive()

    def kick(self) -> None:
        """Something may be to be done: a commit, a put that must wait, an eviction, a removal. Cheap when it was
        kicked already."""
        if not self._kicked:
            with self._wake:
                self._kicked = True
                self._wake.notify_all()

    # -- actions -------------------------------------------------------------------------------------------------------

    def apply_actions(self) -> bool:
        """Applies all that the table has asked for until now. False: a record could not be zeroed (it is tried again
        later), or another thread's action hangs: a removal must not be confirmed yet."""
        if not self._applying.acquire(timeout=ACTIONS_WAIT_S):
            return False
        try:
            return self._apply_all()
        finally:
            self._applying.release()

    def _apply_all(self) -> bool:
        if self._retry_at is None and (self._unerased or self._unmade):
            self._retry_undone()
        while True:
            with self._node_lock:
                actions = self._table.drain_actions()
            if not actions:
                break
            erases: list[Slot] = []
            for action in actions:
                if isinstance(action, SsdErase):
                    erases.append(action.slot)
                    continue
                self._erase(erases)  # in the table's order: an erase of a file's slot comes before the file goes
                erases = []
                self._apply(action)
            self._erase(erases)
        return not self._unerased

    def _apply(self, action: Action) -> None:
        try:
            match action:
                case PopulateExtent():
                    self._populate(action)
                case PunchExtent():
                    self._dram.punch(action.arena, action.offset_bytes, action.length_bytes)
                case CloseArena():
                    self._dram.close_arena(action.arena)
                case SsdExtentCreated():
                    self._unmade[action.number] = action
                    self._make(action)
                case SsdExtentDropped():
                    self._unmade.pop(action.number, None)
                    self._unerased = {slot for slot in self._unerased if slot >> 32 != action.number}
                    self._tier.drop_extent(action.number)
        except TierError as error:
            self._failed(error, "apply")

    def _populate(self, extent: PopulateExtent) -> None:
        """Only makes the first copy faster: without it the pages come when they are touched."""
        try:
            self._dram.populate(extent.arena, extent.offset_bytes, extent.length_bytes)
        except TierError as error:
            self._failed(error, "populate")

    def _make(self, extent: SsdExtentCreated) -> None:
        namespace, n_slots = extent.arena, extent.n_slots
        self._tier.create_extent(extent.number, namespace=namespace, slot_bytes=extent.slot_bytes, n_slots=n_slots)
        self._unmade.pop(extent.number, None)

    def _erase(self, slots: Sequence[Slot]) -> None:
        if not slots:
            return
        try:
            self._tier.erase(slots)
        except TierError as error:
            self._unerased.update(slots)
            self._failed(error, "erase")

    def _retry_undone(self) -> None:
        """What could not be done before, with `applying` held."""
        if self._unerased:
            slots, self._unerased = self._unerased, set()
            self._erase(sorted(slots))
        for extent in list(self._unmade.values()):
            try:
                self._make(extent)
            except TierError as error:
                self._failed(error, "make")
                return

    # -- down ----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait():
            try:
                self._round()
            except Exception:  # a bug must not end the thread silently: puts would wait for ever
                self._counters["bugs"] += 1
                log.exception("event=mover_bug")

    def _wait(self) -> bool:
        """Until kicked, or until the SSD tier is to be tried again. False: stop."""
        with self._wake:
            while not (self._kicked or self._stopping):
                left = None if self._retry_at is None else self._retry_at - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._wake.wait(left)
            self._kicked = False
            return not self._stopping

    def _round(self) -> None:
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            self._try_again()
        self.apply_actions()
        while not self._stopping and self._retry_at is None:
            with self._node_lock:
                blocks = self._table.clean_candidates(BATCH_BYTES, now_ms=self._now_ms())
            if not blocks:
                break
            self._set_writing(writing=True)
            try:
                self._write_down(blocks)
            finally:
                self._set_writing(writing=False)
            self._on_room()

    def _write_down(self, blocks: Sequence[Block]) -> None:
        """Each block ends in `ssd_done`, whatever happens."""
        assert self._ssd is not None
        reserved: list[tuple[Block, Slot]] = []
        writes: list[SsdWrite] = []
        with self._node_lock:
            for block in blocks:
                slot = self._table.ssd_reserve(block)
                if slot is None:
                    self._counters["demote_refused"] += 1
                    self._table.ssd_done(block, None, ok=False)
                    continue
                reserved.append((block, slot))
                writes.append(SsdWrite(slot, _meta(block, now_ms=self._now_ms()), self._bytes_of(block)))
        if not reserved:
            return
        written: set[Slot] = set()
        try:
            with self._applying:
                self._apply_all()
                self._unerased -= {slot for _, slot in reserved}  # the write zeroes their records itself
            written = self._write(writes)
        finally:
            for write in writes:
                write.data.release()
            with self._node_lock:
                self._table.ssd_done_all([(block, slot, slot in written) for block, slot in reserved])
            self._counters["demoted"] += len(written)
            self._counters["demote_failed"] += len(reserved) - len(written)

    def _write(self, writes: list[SsdWrite]) -> set[Slot]:
        """Slots that were written. All at once; when that fails though the tier works, one by one."""
        assert self._ssd is not None
        deadline = time.monotonic() + STAGING_WAIT_S
        try:
            self._ssd.write(writes, deadline=deadline)
        except TierError as error:
            if error.is_out or error.trouble is Trouble.CLOSED or len(writes) == 1:
                self._failed(error, "write")
                return set()
        else:
            self._retry_s = self._retry_s_min
            return {Slot(write.slot) for write in writes}
        written: set[Slot] = set()
        for write in writes:
            if self._retry_at is None:
                written |= self._write([write])
        return written

    def _bytes_of(self, block: Block) -> memoryview:
        assert block.dram is not None
        arena, offset, _ = self._table.dram.place(block.dram)
        return self._dram.view(arena, offset, block.size)

    # -- trouble -------------------------------------------------------------------------------------------------------

    @property
    def _tier(self) -> SsdTier:
        assert self._ssd is not None, "an SSD action without an SSD tier"
        return self._ssd

    def ssd_failed(self, error: TierError) -> None:
        """A read of the SSD tier failed. Without locks."""
        self._failed(error, "read")

    def _failed(self, error: TierError, doing: str) -> None:
        """Counts it; takes the SSD tier out of use when more calls would fail alike."""
        self._counters[f"{doing}_failed"] += 1
        log.warning("event=mover_failed doing=%s trouble=%s reason=%r", doing, error.trouble.value, error.reason)
        if error.is_out and doing != "populate" and self._retry_at is None:
            self._take_out(error.reason)

    def _take_out(self, reason: str) -> None:
        """From now on DRAM goes on alone; the tier is tried again after a while, each time later."""
        self._tier.set_out(reason)
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, self._retry_s_max)
        self._set_writable(writable=False)
        self._on_room()  # who waited for blocks to be written down need not any more
        self.kick()

    def _set_writing(self, *, writing: bool) -> None:
        with self._wake:
            self._writing = writing
            self._wake.notify_all()

    def _watch(self) -> None:
        """A write that hangs keeps the mover's thread; this one takes the tier out meanwhile, so that puts do not wait."""
        assert self._ssd is not None
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._writing or self._stopping)
                if self._wake.wait_for(lambda: not self._writing or self._stopping, WATCH_S):
                    if self._stopping:
                        return
                    continue
            if self._ssd.is_stalled and self._retry_at is None:
                self._failed(TierError(Trouble.STALLED, f"{self._ssd.directory}: the device does not answer"), "write")

    def _try_again(self) -> None:
        self._counters["retries"] += 1
        self._retry_at = None
        try:
            self._tier.probe()
        except TierError as error:
            self._failed(error, "probe")
            return
        self.apply_actions()
        if self._retry_at is None:
            self._tier.set_out(None)
            self._set_writable(writable=True)

    def _set_writable(self, *, writable: bool) -> None:
        with self._node_lock:
            self._table.ssd_writable = writable


def _meta(block: Block, *, now_ms: int) -> BlockMeta:
    keep, kept = block.keep, 0
    if keep is not None:
        kept = pack_hint(keep.expires_ms - now_ms + wall_ms() if keep.expires_ms else 0, keep.priority)
    return BlockMeta(block.ns, block.key, block.size, block.sum, block.depth, block.parent, kept)


def wall_ms() -> int:
    """Time that outlives this process."""
    return time.time_ns() // 1_000_000
