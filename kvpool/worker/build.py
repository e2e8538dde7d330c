"""Puts a worker's parts together from its settings: directories, tiers, table, mover, what was on disk.

Owns the order of that and what is undone when a part fails. What each part does is in its own module. The order matters: the
directories are locked before anything is read, and blocks are adopted before anybody is served.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import threading
from typing import TYPE_CHECKING

from kvpool.config import check_disk
from kvpool.core.blocks import BlockTable, Limits
from kvpool.core.policy.make import policy_of
from kvpool.core.retention import Keep, unpack_hint
from kvpool.core.session import Reporter
from kvpool.core.slots import SlabAllocator
from kvpool.core.types import PAGE_BYTES
from kvpool.worker.learned import Learned, clear_unfinished
from kvpool.worker.mover import Mover, wall_ms
from kvpool.worker.node import Node, new_incarnation
from kvpool.worker.scrub import Scrubber
from kvpool.worker.state import WorkerState
from kvpool.worker.tiers.base import TierError
from kvpool.worker.tiers.dram import DramTier
from kvpool.worker.tiers.slab_file import Geometry
from kvpool.worker.tiers.ssd import LOCK_BYTES, SsdTier
from kvpool.worker.tiers.staging import StagingPool

if TYPE_CHECKING:
    from kvpool.config import WorkerSettings
    from kvpool.core.namespaces import NamespaceSpec

log = logging.getLogger(__name__)


def build_node(settings: WorkerSettings) -> Node:
    """The node, with what an earlier process left on SSD, not yet served (`Node.catch_up` does that). Raises ConfigError: a
    directory is in use by another worker, or cannot be used."""
    lock = threading.Lock()
    with contextlib.ExitStack() as undo:
        state = WorkerState(settings.data_dir)
        undo.callback(state.close)
        staging = StagingPool(settings.staging_bytes)
        undo.callback(staging.close)
        ssd = None
        place = settings.ssd_place
        if place is not None:
            ssd = SsdTier(place.directory, capacity_bytes=place.size_bytes, staging=staging, buffered=settings.buffered_ssd)
            undo.callback(ssd.close)
            check_disk(place.size_bytes, total_bytes=shutil.disk_usage(place.directory).total)
        slots = SlabAllocator(capacity_bytes=settings.dram)
        dram = DramTier(capacity_bytes=settings.dram, arena_bytes=slots.arena_bytes, gen_words=slots.gen_words)
        undo.callback(dram.close)
        reporter = Reporter()
        clear_unfinished(settings.data_dir)
        worn = bool(settings.ssd_admission == "second_use" or settings.ssd_write_bytes_per_s or settings.ssd_write_bytes_per_day)
        learned = Learned(settings.data_dir, clock=settings.policy_clock, lean=not worn) if settings.policy == "hazard" else None
        table = BlockTable(
            dram=slots,
            ssd=None if place is None else _ssd_slots(place.size_bytes),
            policy=policy_of(settings.policy, learned=None if learned is None else learned.policy),
            reporter=reporter.record,
            limits=Limits(
                hold_ttl_ms_max=settings.hold_ttl_ms_max,
                low_watermark=settings.low_watermark,
                second_use=settings.ssd_admission == "second_use",
                ssd_bytes_per_s=settings.ssd_write_bytes_per_s,
                ssd_bytes_per_day=settings.ssd_write_bytes_per_day,
                seed=secrets.randbits(64),
            ),
            bump=dram.bump,
            generation=dram.generation,
        )
        node = Node(
            worker_id=state.worker_id, incarnation=new_incarnation(), table=table, reporter=reporter, dram=dram, ssd=ssd,
            staging=staging, state=state, lock=lock, io_threads=settings.io_threads,
        )  # fmt: skip
        node.learned = learned
        undo.callback(node.close)
        for spec in state.namespaces():
            _open_known(node, spec)
        if ssd is not None:
            _adopt(node, ssd)
        node.mover = Mover(table, lock=lock, dram=dram, ssd=ssd, on_room=node.room_made, now_ms=node.now_ms)
        node.mover.start()
        node.mover.kick()
        node.scrubber = Scrubber(node, bytes_per_s=settings.scrub_bytes_per_s)
        undo.pop_all()
    return node


def _ssd_slots(size_bytes: int) -> SlabAllocator:
    """Slots of the SSD tier: whole pages, files whose record tables count, and the lock file taken off."""
    return SlabAllocator(
        capacity_bytes=max(0, size_bytes - LOCK_BYTES),
        align=PAGE_BYTES,
        overhead_bytes=lambda n_slots: Geometry(PAGE_BYTES, n_slots).file_bytes - n_slots * PAGE_BYTES,
        grow=False,
    )


def _open_known(node: Node, spec: NamespaceSpec) -> None:
    """A namespace that an earlier process knew: blocked until the master says what was removed meanwhile."""
    applied = node.state.applied_seq(spec.uid)
    try:
        node.open_namespace(spec, applied_seq=0 if applied is None else applied, blocked=True)
    except TierError as error:
        log.error("event=namespace_not_opened name=%r reason=%r", spec.name, error.reason)


def _keep(kept: int, to_own_ms: int) -> Keep | None:
    """What a record says of its block's time; a time that is over makes it expire at once."""
    until_ms, priority = unpack_hint(kept)
    return Keep(max(1, until_ms + to_own_ms) if until_ms else 0, priority) if kept else None


def _adopt(node: Node, ssd: SsdTier) -> None:
    """Blocks of earlier processes, where their removals are known up to a number; all else on disk is dropped. Before any thread
    runs."""
    table, refused = node.table, []
    assert table.ssd is not None
    known = {spec.uid for spec in node.specs() if node.state.applied_seq(spec.uid) is not None}
    blocks = []
    for extent in ssd.scan():
        number, uid = extent.number, extent.namespace
        if uid not in known or not table.ssd.adopt_extent(
            number, uid, slot_bytes=extent.slot_bytes, n_slots=extent.n_slots
        ):
            log.warning("event=extent_dropped number=%d namespace=%s blocks=%d", number, uid.hex(), len(extent.blocks))
            ssd.drop_extent(number)
            continue
        blocks += extent.blocks
    blocks.sort(key=lambda found: found.seq)
    to_own_ms = node.now_ms() - wall_ms()
    for found in blocks:
        meta = found.meta
        if not table.adopt(
            meta.namespace, meta.key, meta.size, meta.block_sum, meta.depth, meta.parent, found.slot, found.seq,  # type: ignore[arg-type]
            keep=_keep(meta.kept, to_own_ms),
        ):
            refused.append(found.slot)
    table.adopted(now_ms=node.now_ms())
    if refused:
        with contextlib.suppress(TierError):
            ssd.erase(refused)
    log.info("event=adopted blocks=%d refused=%d", len(blocks) - len(refused), len(refused))
