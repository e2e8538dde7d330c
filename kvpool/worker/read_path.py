"""Gets: READ, answered from DRAM as it lies, or from SSD after a checked read, inline or as places in shared memory.

    pin ─▶ [pool: SSD read + checksum + promotion · VERIFY · sums of ranges] ─▶ answer ─▶ (last byte is out) unpin
                                                          SHARED: hold for the connection, unpin ─▶ answer ─▶ client RELEASEs

Entries come in request order. Codes: HIT_INLINE, HIT_SHARED (SHARED was asked, the block is in DRAM and could be held), a miss,
REJECTED (the byte range ends past the stored block; `size` says what is stored), LATER (with FIRST_MISS: past the first block
that was not served; or past ANSWER_BYTES_MAX of inline or SSD bytes: ask again from there). One answer has at least one block.
Sums of an inline whole block are those made at its put; of a byte range, one xxh3-64 made now (VERIFY: after the chunks that
it touches were checked). SHARED hits carry sums only with VERIFY. A miss with cause `timeout`: the deadline passed, or there
was no staging memory, or the disk does not answer; `corrupt`: found now, and the copy is dropped; `unknown`: the SSD failed.

A disk that hangs keeps threads, never an answer: shortly before the deadline what is not ready is a miss, and its memory is given
back when the disk lets go of it; while the tier is known to hang nothing is asked of it.

Several readers of one SSD block cost one read: the followers wait for the leader's and find the block promoted (or read it
themselves when there was no room). Owns what one get does in which order; which copy is served is `core.blocks`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from kvpool.core.frames import READ_ENTRY, Flag, FrameError, ReadAnswer, ReadRequest, Status
from kvpool.core.hashing import chunk_sums
from kvpool.core.namespaces import ReadPolicy
from kvpool.core.types import BlockCode, HoldId, MissCause, NamespaceUid, Tiers, miss_code
from kvpool.worker.placing import INLINE_BYTES
from kvpool.worker.ssd_load import MARGIN, MARGIN_S_MAX, load, prefetch
from kvpool.worker.tiers.base import TierError, Trouble

if TYPE_CHECKING:
    from kvpool.core.blocks import Block
    from kvpool.core.namespaces import NamespaceSpec
    from kvpool.worker.connection import Connection, Request
    from kvpool.worker.dataplane import DataPlane, Timer
    from kvpool.worker.tiers.ssd import StagedBlock

ANSWER_BYTES_MAX: Final = 64 << 20  # inline or SSD bytes of one answer, unless its first block is larger
HOLD_GRACE_MS: Final = 1000  # places of a shared answer are held this long past the caller's deadline
STRIPES_MAX: Final = 4  # parts of one READ that read SSD side by side
PROBE_UID: Final = NamespaceUid(bytes(16))  # no namespace has it: its one block serves `/readyz` and lies outside of all tiers
PROBE_BLOCK: Final = bytes(range(256)) * 16
_INLINE: Final = int(BlockCode.HIT_INLINE)
_SHARED: Final = int(BlockCode.HIT_SHARED)
_LATER: Final = int(BlockCode.LATER)
_REJECTED: Final = int(BlockCode.REJECTED)
_EMPTY: Final = np.empty(0, dtype=np.uint64)
_CAUSES: Final = {Trouble.DAMAGED: MissCause.CORRUPT, Trouble.BUSY: MissCause.TIMEOUT, Trouble.STALLED: MissCause.TIMEOUT}


def read(plane: DataPlane, connection: Connection, request: Request) -> None:
    """READ."""
    message = ReadRequest.decode(request.meta)
    if request.header.payload_bytes:
        raise FrameError("READ with payload")
    if message.batch.namespace == PROBE_UID:
        _answer_probe(connection, request)
        return
    spec = plane.node.served(message.batch.namespace)
    if isinstance(spec, tuple):
        connection.refuse(request, *spec)
        return
    if message.offset and not message.length:
        connection.refuse(request, Status.BAD_REQUEST, "byte range with an offset and no length")
        return
    if message.offset + message.length > spec.block_bytes:
        connection.refuse(request, Status.BAD_REQUEST, f"byte range ends past the namespace's {spec.block_bytes} bytes a block")
        return
    work = Read(plane, connection, request, spec, message)
    connection.work = work
    work.start()


def _answer_probe(connection: Connection, request: Request) -> None:
    entries = np.zeros(1, dtype=READ_ENTRY)
    entries["code"], entries["tier"], entries["n_sums"], entries["size"] = _INLINE, Tiers.DRAM, 1, len(PROBE_BLOCK)
    sums = np.array([xxhash.xxh3_64_intdigest(PROBE_BLOCK)], dtype="<u8")
    meta = ReadAnswer(entries, sums).encode()
    connection.answer(request, meta, payload=[memoryview(PROBE_BLOCK)], payload_bytes=len(PROBE_BLOCK))


class Read:
    """One READ. Blocks stay pinned until the answer's last byte is out, or the connection is gone."""

    def __init__(
        self, plane: DataPlane, connection: Connection, request: Request, spec: NamespaceSpec, message: ReadRequest
    ) -> None:
        self.node = plane.node
        self.connection = connection
        self.request = request
        self.spec = spec
        self.message = message
        flags = request.header.flags
        self.shared = bool(flags & Flag.SHARED) and connection.local
        self.verify = bool(flags & Flag.VERIFY)
        self.first_miss = bool(flags & Flag.FIRST_MISS)
        self.blocks: list[Block | None] = []
        self.codes = bytearray()
        self.tiers = bytearray()
        self.offsets: list[int] = []  # in the arena, taken under the lock: a block that is removed meanwhile forgets its own
        self.staged: dict[int, StagedBlock] = {}
        self.range_sums: dict[int, bytes] = {}
        self._jobs = 0
        self._unready: set[int] = set()  # blocks that jobs have still to prepare; they only take away
        self._late = False  # the answer was made without them
        self._sent = False
        self._gone = False
        self._timer: Timer | None = None

    def start(self) -> None:
        batch = self.message.batch
        n = len(batch)
        looked_at = n
        if not self.shared and not self.spec.variable:
            looked_at = min(n, max(1, ANSWER_BYTES_MAX // (self.message.length or self.spec.block_bytes)))
        node = self.node
        with node.lock:
            pinned = node.table.pin(
                batch if looked_at == n else batch.slice(0, looked_at), now_ms=node.now_ms(),
                hold_id=self.message.hold_id, touch=True, first_miss=self.first_miss,
            )  # fmt: skip
            self.blocks = pinned.blocks
            self.offsets = [-1 if b is None or b.dram is None else node.offset(b) for b in pinned.blocks]
        in_dram = [offset >= 0 for offset in self.offsets]
        self.codes = bytearray([_LATER]) * n
        self.tiers = bytearray(n)
        later_from = self._cut(in_dram)
        hangs = node.ssd is not None and not all(in_dram) and node.ssd.is_stalled
        for i, (block, cause) in enumerate(zip(pinned.blocks[:later_from], pinned.causes, strict=False)):
            if block is not None:
                self.tiers[i] = Tiers.DRAM if in_dram[i] else Tiers.SSD
                self.codes[i] = _INLINE
                if self.message.offset + self.message.length > block.size:
                    self.codes[i] = _REJECTED
                elif hangs and not in_dram[i]:
                    self.codes[i] = miss_code(MissCause.TIMEOUT)
                    node.count_read_trouble(self.spec.uid, TierError(Trouble.STALLED, "the device does not answer"))
            elif cause is not None:
                self.codes[i] = miss_code(cause)
        always = self.verify or self._needs_range_sum
        todo = [i for i in range(later_from) if self.codes[i] == _INLINE and (always or not in_dram[i])]
        if self.spec.read_policy is ReadPolicy.BEST_EFFORT and not all(in_dram[i] for i in todo):
            for i in todo:
                if not in_dram[i]:
                    self.codes[i] = miss_code(MissCause.TIMEOUT)
            prefetch(node, self.spec, batch, self.tiers)
            todo = [i for i in todo if in_dram[i]]
        if not todo:
            self._answer()
            return
        if all(in_dram[i] for i in todo) and sum(self._part_bytes(i) for i in todo) <= INLINE_BYTES:
            for i in todo:
                self._prepare(i)
            self._answer()
            return
        n_stripes = min(STRIPES_MAX, len(todo), node.io_threads)
        self._jobs = n_stripes
        each = -(-len(todo) // n_stripes)
        stripes = [todo[at : at + each] for at in range(0, len(todo), each)]
        self._jobs = len(stripes)
        self._unready = set(todo)
        loop, left = self.connection.loop, self.request.deadline - time.monotonic()
        until = self.request.deadline - min(MARGIN * max(0.0, left), MARGIN_S_MAX)
        if self.spec.read_policy is ReadPolicy.TIMEOUT:
            until = min(until, time.monotonic() + self.spec.read_timeout_ms / 1e3)
        self._timer = loop.at(until, self._time_up)
        submit = node.submit if all(in_dram[i] for i in todo) else node.submit_io
        for stripe in stripes:
            submit(self._prepare_in_pool, stripe)

    def on_close(self) -> None:
        self._gone = True
        if self._timer is not None:
            self._timer.cancel()
        if not self._jobs:
            self._release()

    @property
    def _needs_range_sum(self) -> bool:
        return bool(self.message.length) and (not self.shared or self.verify)

    def _part_bytes(self, i: int) -> int:
        """What of block i must be looked at on the way: all of it when it is verified."""
        block = self.blocks[i]
        assert block is not None
        return block.size if self.verify or not self.message.length else self.message.length

    def _cut(self, in_dram: list[bool]) -> int:
        """How many leading blocks fit this answer; the others are unpinned and come LATER."""
        left = ANSWER_BYTES_MAX
        for i, block in enumerate(self.blocks):
            if block is None or (self.shared and in_dram[i]):
                continue
            n_bytes = self.message.length if self.message.length and in_dram[i] else block.size
            if n_bytes > left and left < ANSWER_BYTES_MAX:
                self._unpin(range(i, len(self.blocks)))
                return i
            left -= n_bytes
        return len(self.blocks)

    # --- in the pool, or on the loop when it is little ------------------------------------------------------------------

    def _prepare_in_pool(self, stripe: list[int]) -> None:
        n_more = sum(self.tiers[i] == Tiers.SSD for i in stripe)
        try:
            for i in stripe:
                if self._gone or self._late:
                    break
                n_more -= self.tiers[i] == Tiers.SSD
                self._prepare(i, n_more)
                self._unready.discard(i)
        finally:
            self.connection.loop.post(self._stripe_done)

    def _prepare(self, i: int, n_more: int = 0) -> None:
        """Block i from SSD into memory, checked as asked, its range's sum made. A failure becomes its code. n_more: from SSD that
        come next."""
        block = self.blocks[i]
        assert block is not None
        try:
            if self.request.deadline <= time.monotonic():
                raise TierError(Trouble.BUSY, "deadline")
            if self.tiers[i] == Tiers.SSD:
                loaded = load(self.node, block, self.spec, deadline=self.request.deadline, n_more=n_more)
                if isinstance(loaded, int):
                    self.offsets[i] = loaded
                else:
                    self.staged[i] = loaded
            if self.verify and i not in self.staged and chunk_sums(self._view(i), self.spec.chunk_bytes).tobytes() != block.sums:
                with self.node.lock:
                    self.node.table.corrupt(block, Tiers.DRAM)
                    self.node.after_decision()
                raise TierError(Trouble.DAMAGED, "a block in DRAM differs from its checksum")
            if self._needs_range_sum or (self.message.length and i in self.staged):
                self.range_sums[i] = self._range_sum(i)
        except TierError as error:
            self.codes[i] = miss_code(block.gone or _CAUSES.get(error.trouble, MissCause.UNKNOWN))
            self.node.count_read_trouble(self.spec.uid, error)
        except Exception:
            self.codes[i] = miss_code(MissCause.UNKNOWN)
            raise

    def _stripe_done(self) -> None:
        self._jobs -= 1
        if self._jobs:
            return
        if self._late:
            if self._sent:
                self._release()
        elif self._gone:
            self._release()
        else:
            self._answer_or_close()

    def _time_up(self) -> None:
        """What is ready goes out now."""
        if not self._jobs or self._gone:
            return
        self._late = True
        for i in list(self._unready):
            self.codes[i] = miss_code(MissCause.TIMEOUT)
        self._answer_or_close()

    def _answer_or_close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._answer()
        except Exception:
            self.connection.close("internal")  # nobody shall wait for an answer that cannot be made
            raise

    def _range_sum(self, i: int) -> bytes:
        start, stop = self.message.offset, self.message.offset + self.message.length
        return xxhash.xxh3_64_intdigest(self._view(i)[start:stop]).to_bytes(8, "little")

    # --- the answer -----------------------------------------------------------------------------------------------------

    def _view(self, i: int) -> memoryview:
        staged = self.staged.get(i)
        if staged is not None:
            return staged.view
        block = self.blocks[i]
        assert block is not None
        return self.node.dram.view(self.spec.uid, self.offsets[i], block.size)

    def _answer(self) -> None:
        n = len(self.codes)
        if self.first_miss:
            self._stop_at_first_miss()
        entries = np.zeros(n, dtype=READ_ENTRY)
        entries["size"][: len(self.blocks)] = [0 if block is None else block.size for block in self.blocks]
        hold_id = self._hold(entries) if self.shared else HoldId(0)
        sums: list[bytes] = []
        n_sums = [0] * n
        payload: list[memoryview] = []
        uid, start, length = self.spec.uid, self.message.offset, self.message.length
        run_at = run_bytes = 0
        total = 0
        for i, code in enumerate(self.codes):
            if code != _INLINE and not (code == _SHARED and self.verify):
                continue
            block = self.blocks[i]
            assert block is not None
            staged = self.staged.get(i)
            made = staged.sums if staged is not None else block.sums
            if length:  # (of SHARED ones that could not be held none was made yet)
                made = self.range_sums.get(i) or self._range_sum(i)
            assert made is not None
            sums.append(made)
            n_sums[i] = len(made) // 8
            if code == _SHARED:
                continue
            n_bytes = length or block.size
            total += n_bytes
            if staged is not None:
                if run_bytes:
                    payload.append(self.node.dram.view(uid, run_at, run_bytes))
                    run_bytes = 0
                payload.append(staged.view[start : start + n_bytes])
                continue
            offset = self.offsets[i] + start
            if run_bytes and offset == run_at + run_bytes:
                run_bytes += n_bytes
                continue
            if run_bytes:
                payload.append(self.node.dram.view(uid, run_at, run_bytes))
            run_at, run_bytes = offset, n_bytes
        if run_bytes:
            payload.append(self.node.dram.view(uid, run_at, run_bytes))
        entries["code"] = np.frombuffer(self.codes, dtype=np.uint8)
        entries["tier"] = np.frombuffer(self.tiers, dtype=np.uint8)
        entries["n_sums"] = n_sums
        meta = ReadAnswer(entries, np.frombuffer(b"".join(sums), dtype="<u8") if sums else _EMPTY, hold_id).encode()
        self.connection.loop.count("bytes_read_inline", total)
        if total and not self.connection.local and self.node.link_load is not None:
            self.node.link_load.served(self.message.batch, total, now_ms=self.node.now_ms())
        if not total:
            self._on_sent()
            self.connection.answer(self.request, meta)
        else:
            self.connection.answer(self.request, meta, payload=payload, payload_bytes=total, sent=self._on_sent)

    def _stop_at_first_miss(self) -> None:
        for i, code in enumerate(self.codes):
            if code != _INLINE:
                self.codes[i + 1 :] = bytes([_LATER]) * (len(self.codes) - i - 1)
                return

    def _hold(self, entries: np.ndarray) -> HoldId:
        """Holds what is in DRAM for this connection and says where it lies. What cannot be held stays an inline hit."""
        indexes = [i for i, code in enumerate(self.codes) if code == _INLINE and i not in self.staged]
        if not indexes:
            return HoldId(0)
        node = self.node
        ttl_ms = max(0, int((self.request.deadline - time.monotonic()) * 1000)) + HOLD_GRACE_MS
        with node.lock:
            hold_id, n_held = node.table.hold_blocks(
                [self.blocks[i] for i in indexes], ttl_ms=ttl_ms, now_ms=node.now_ms(), owner=self.connection.owner  # type: ignore[misc]
            )
            places = [(i, *node.table.place(self.blocks[i])) for i in indexes[:n_held]]  # type: ignore[arg-type]
        self.connection.has_holds = True
        if places:
            at = np.array(places, dtype=np.uint64)
            rows = at[:, 0].astype(np.intp)
            entries["offset"][rows], entries["gen_index"][rows], entries["generation"][rows] = at[:, 1], at[:, 2], at[:, 3]
            for i in rows.tolist():
                self.codes[i] = _SHARED
        return hold_id

    # --- giving back ----------------------------------------------------------------------------------------------------

    def _on_sent(self) -> None:
        """The answer's last byte is out, or its connection is gone. Jobs that are late keep what they use until they end."""
        self._sent = True
        if not self._jobs:
            self._release()

    def _release(self) -> None:
        for staged in self.staged.values():
            staged.release()
        self.staged = {}
        self._unpin(range(len(self.blocks)))

    def _unpin(self, which: range) -> None:
        pinned = [block for i in which if (block := self.blocks[i]) is not None]
        if not pinned:
            return
        for i in which:
            self.blocks[i] = None
        self.node.unpin(pinned)
