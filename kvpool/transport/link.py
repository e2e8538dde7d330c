"""What the links of all transports have in common: the calls that move no blocks, and the frame around those that do.

Owns splitting of batches into frames, holds and their connections, reservations, the check for forks, the counters. How blocks
move is in `tcp` and `shm`, the receiving of inline blocks in `receive`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

import numpy as np
import xxhash

from kvpool.core.frames import (
    FILL_RANGE,
    U64,
    CodesAnswer,
    CopyRequest,
    FillRequest,
    Flag,
    FrameError,
    HoldRequest,
    HoldsRequest,
    KeysRequest,
    NumberRequest,
    Op,
    WriteRequest,
)
from kvpool.core.keys import KeyBatch
from kvpool.core.types import MAX_BATCH_KEYS, BlockCode, HoldId
from kvpool.errors import InvalidArgument
from kvpool.transport.base import (
    VIEW_TTL_MS,
    Held,
    LinkCause,
    LinkCounters,
    LinkError,
    LinkOptions,
    Range,
    ReservationHandle,
    Touched,
    Viewed,
)
from kvpool.transport.connection import Connection
from kvpool.transport.copy_plan import split_by_bytes
from kvpool.transport.pool import Pool

FRAME_BYTES_MAX: Final = 64 << 20  # payload of one frame that we send: bounds what an answer has to wait for
FILLS_AHEAD: Final = 2  # FILLs sent before the first one's answer came
_PUTS: Final = (Op.WRITE, Op.RESERVE, Op.COMMIT)
_FULL, _FULL_QUOTA = bytes([BlockCode.FULL]), bytes([BlockCode.FULL_QUOTA])
FORGET_SECONDS: Final = 1.0  # a release or an abort that nobody waits for gets this long to leave


@dataclass(slots=True)
class Reservation:
    """See `base.ReservationHandle`. `number`: the worker's; `connection` is this reservation's alone."""

    connection: Connection
    number: int
    codes: bytes
    sizes: Sequence[int]
    ended: bool = False


@dataclass(slots=True)
class _Views:
    """Holds of views live on one connection of their own, since they die with it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    connection: Connection | None = None
    of: dict[int, Connection] = field(default_factory=dict)


class SocketLink:
    """Base of TcpLink and ShmLink; see `base.WorkerLink` for the calls. `open_connection(deadline)` connects and greets."""

    transport = ""

    def __init__(self, peer: str, options: LinkOptions, open_connection: Callable[[float], Connection], *, incarnation: int,
                 worker_id: str) -> None:  # fmt: skip
        self.peer = peer
        self.incarnation = incarnation
        self.worker_id = worker_id
        self.options = options
        self.counters = LinkCounters()
        self._open_greeted = open_connection
        self._pool = Pool(self._open, peer=peer)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of the counters
        self._views = _Views()

    def connect(self, *, deadline: float) -> None:
        """One connection now, so that a worker which cannot be reached is known at once."""
        self._pool.give(self._pool.take(deadline))

    def close(self) -> None:
        if os.getpid() != self._pid:
            self._pool.abandon()
            return
        self._pool.close()
        current = self._views.connection
        if current is not None:
            current.shutdown()  # a call on it ends now and gives the lock
        with self._views.lock:
            if self._views.connection is not None:
                self._views.connection.close()
            self._views.of.clear()

    # --- calls without blocks -------------------------------------------------------------------------------------------------

    def touch(self, batch: KeyBatch, *, wait_listed: bool, deadline: float, hint: int | None = None) -> Touched:
        answers = self._keys_call(Op.TOUCH, batch, Flag.WAIT_LISTED if wait_listed else Flag.NONE, deadline, hint=hint)
        return Touched(b"".join(a.codes for a in answers), wait_listed and all(a.number for a in answers))

    def drop(self, batch: KeyBatch, *, deadline: float) -> bytes:
        return b"".join(a.codes for a in self._keys_call(Op.DROP, batch, Flag.NONE, deadline))

    def hold(self, batch: KeyBatch, ttl_ms: int, *, deadline: float, first_miss: bool = True) -> Held:
        flags = Flag.FIRST_MISS if first_miss else Flag.NONE
        with self._call(deadline) as connection:
            return self._hold_on(connection, batch, ttl_ms, flags, deadline)

    def renew(self, hold_ids: Sequence[int], ttl_ms: int, *, deadline: float) -> bytes:
        alive: dict[int, int] = {}
        with self._views.lock:
            views = {i: self._views.of[i] for i in hold_ids if i in self._views.of}
            lost = [i for i, connection in views.items() if connection.closed or connection is not self._views.connection]
            ids = [i for i in views if i not in lost]
            if ids:
                self._check_use()
                assert self._views.connection is not None
                with contextlib.suppress(LinkError):
                    alive |= self._renew_on(self._views.connection, ids, ttl_ms, deadline)
        others = [i for i in hold_ids if i not in views]
        if others:
            with self._call(deadline) as connection:
                for at in range(0, len(others), MAX_BATCH_KEYS):
                    alive |= self._renew_on(connection, others[at : at + MAX_BATCH_KEYS], ttl_ms, deadline)
        return bytes(alive.get(i, 0) for i in hold_ids)

    def release(self, hold_ids: Sequence[int]) -> None:
        deadline = time.monotonic() + FORGET_SECONDS
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(LinkError):
            others = self._release_views([i for i in hold_ids if i], deadline)
            if others:
                with self._call(deadline) as connection:
                    self._release_on(connection, others, deadline)

    def view(self, batch: KeyBatch, *, deadline: float, ttl_ms: int = VIEW_TTL_MS) -> Viewed:  # noqa: ARG002
        raise InvalidArgument(f"view: worker at {self.peer} is reached by {self.transport}; views need shared memory (shm)")

    def stat(self, *, deadline: float) -> dict[str, Any]:
        with self._call(deadline) as connection:
            answer = connection.call(Op.STAT, b"", deadline=deadline)
            try:
                facts = json.loads(answer.meta)
            except ValueError as error:
                raise connection.protocol_error(f"STAT: {error}") from error
            if not isinstance(facts, dict):
                raise connection.protocol_error("STAT: no object")
            return facts

    def prefetch(self, batch: KeyBatch, *, deadline: float) -> bytes:
        answers = []
        with self._call(deadline) as connection:
            if "prefetch" not in connection.greeting.get("features", ()):
                return b""
            for at in range(0, len(batch), MAX_BATCH_KEYS):
                part = batch.slice(at, at + MAX_BATCH_KEYS)
                answers.append(self._codes(connection, Op.PREFETCH, KeysRequest(part).encode(), n=len(part), deadline=deadline))
        return b"".join(answer.codes for answer in answers)

    def copy_to(self, batch: KeyBatch, target: str, *, deadline: float) -> bool:
        with self._call(deadline) as connection:
            if "copy" not in connection.greeting.get("features", ()):
                return False
            part = batch.slice(0, MAX_BATCH_KEYS)
            answer = self._codes(connection, Op.COPY, CopyRequest(part, target).encode(), n=len(part), deadline=deadline)
            return bool(answer.number)

    # --- reservations ---------------------------------------------------------------------------------------------------------

    def reserve(self, batch: KeyBatch, sizes: Sequence[int], *, deadline: float, fence: int | None = None,
                hints: Sequence[int] = ()) -> Reservation:  # fmt: skip
        if len(batch) != len(sizes):
            raise InvalidArgument(f"sizes: {len(sizes)} for {len(batch)} keys")
        if len(batch) > MAX_BATCH_KEYS:
            raise InvalidArgument(f"batch: {len(batch)} keys; one reservation has at most {MAX_BATCH_KEYS}")
        self._check_use()
        connection = self._pool.take(deadline, with_ring=self.transport == "shm")
        try:
            fences = np.array([] if fence is None else [fence], dtype=np.uint64)
            some = hints_for(connection, hints if any(hints) else ())
            meta = WriteRequest(batch, np.asarray(sizes, dtype=np.uint64), fences, hints=some).encode()
            answer = self._codes(connection, Op.RESERVE, meta, n=len(batch), deadline=deadline,
                                 flags=Flag.NONE if fence is None else Flag.FENCED)  # fmt: skip
        except BaseException:
            self._count(errors=1)
            self._pool.give(connection)
            raise
        return Reservation(connection, answer.number, answer.codes, sizes)

    def fill(self, reservation: ReservationHandle, ranges: Sequence[Range], *, deadline: float) -> None:
        held = self._use(reservation)
        for part in ranges:
            if not 0 <= part.block < len(held.codes) or held.codes[part.block] != BlockCode.RESERVED:
                raise InvalidArgument(f"range: block {part.block} is not reserved")
            if part.offset < 0 or part.data.nbytes < 1 or part.offset + part.data.nbytes > held.sizes[part.block]:
                raise InvalidArgument(
                    f"range: bytes {part.offset}..{part.offset + part.data.nbytes} of block {part.block}, "
                    f"which has {held.sizes[part.block]}"
                )
        try:
            self._fill_on(held, ranges, deadline)
        except BaseException:
            self._end(held, broken=True)
            raise

    def commit(self, reservation: ReservationHandle, *, wait_listed: bool, deadline: float) -> bytes:
        held = self._use(reservation)
        flags = Flag.WAIT_LISTED if wait_listed else Flag.NONE
        try:
            answer = self._codes(held.connection, Op.COMMIT, NumberRequest(held.number).encode(), n=len(held.codes),
                                 deadline=deadline, flags=flags)  # fmt: skip
        except BaseException:
            self._end(held, broken=True)
            raise
        self._end(held)
        self._count_written(answer.codes, held.sizes)
        return answer.codes

    def abort(self, reservation: ReservationHandle) -> None:
        assert isinstance(reservation, Reservation)
        if reservation.ended or os.getpid() != self._pid:
            return
        deadline = time.monotonic() + FORGET_SECONDS
        with contextlib.suppress(LinkError):
            reservation.connection.call(Op.ABORT, NumberRequest(reservation.number).encode(), deadline=deadline)
        self._end(reservation)

    def _use(self, reservation: ReservationHandle) -> Reservation:
        self._check_use()
        assert isinstance(reservation, Reservation)
        if reservation.ended:
            raise InvalidArgument("reservation: it was committed, aborted, or ended by an error")
        return reservation

    def _end(self, reservation: Reservation, *, broken: bool = False) -> None:
        reservation.ended = True
        if broken:
            self._count(errors=1)
            reservation.connection.close()  # the worker then aborts it
        self._pool.give(reservation.connection)

    def _fill_on(self, held: Reservation, ranges: Sequence[Range], deadline: float) -> None:
        """Over the socket: a frame is sent while the worker takes in the one before."""
        pieces = cut_ranges(ranges, FRAME_BYTES_MAX // 4)
        sent: list[int] = []
        for start, stop in split_by_bytes([p.data.nbytes for p in pieces], FRAME_BYTES_MAX // 4, n_max=MAX_BATCH_KEYS // 2):
            group = pieces[start:stop]
            while len(sent) >= FILLS_AHEAD:
                self._filled(held.connection, sent.pop(0), deadline)
            meta = fill_meta(held.number, group)
            n_bytes = sum(p.data.nbytes for p in group)
            sent.append(held.connection.send(Op.FILL, meta, deadline=deadline, payload=[p.data for p in group],
                                             payload_bytes=n_bytes))  # fmt: skip
        for request_id in sent:
            self._filled(held.connection, request_id, deadline)

    @staticmethod
    def _filled(connection: Connection, request_id: int, deadline: float) -> None:
        if connection.receive(request_id, Op.FILL, deadline=deadline).header.payload_bytes:
            raise connection.protocol_error("payload in an answer to FILL")

    # --- pieces for the transports --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _call(self, deadline: float, *, with_ring: bool = False) -> Iterator[Connection]:
        self._check_use()
        try:
            with self._pool.lease(deadline, with_ring=with_ring) as connection:
                yield connection
        except BaseException:
            self._count(errors=1)
            raise
        self._count(calls=1)

    def _codes(self, connection: Connection, op: Op, meta: bytes, *, n: int, deadline: float,
               flags: Flag = Flag.NONE) -> CodesAnswer:  # fmt: skip
        """A call that is answered by one code a key."""
        answer = connection.call(op, meta, deadline=deadline, flags=flags)
        return decode_codes(connection, op, answer.meta, n=n)

    def _keys_call(self, op: Op, batch: KeyBatch, flags: Flag, deadline: float, *, hint: int | None = None) -> list[CodesAnswer]:
        answers = []
        with self._call(deadline) as connection:
            for at in range(0, len(batch), MAX_BATCH_KEYS):
                part = batch.slice(at, at + MAX_BATCH_KEYS)
                meta = KeysRequest(part, hints_for(connection, () if hint is None else [hint] * len(part))).encode()
                answers.append(self._codes(connection, op, meta, n=len(part), deadline=deadline, flags=flags))
        return answers

    def _hold_on(self, connection: Connection, batch: KeyBatch, ttl_ms: int, flags: Flag, deadline: float) -> Held:
        """The first 16,384 keys; the rest is LATER."""
        part = batch.slice(0, MAX_BATCH_KEYS)
        answer = self._codes(connection, Op.HOLD, HoldRequest(part, ttl_ms).encode(), n=len(part), deadline=deadline, flags=flags)
        later = bytes([BlockCode.LATER]) * (len(batch) - len(part))
        return Held(HoldId(answer.number), answer.count, answer.codes + later)

    def _renew_on(self, connection: Connection, ids: list[int], ttl_ms: int, deadline: float) -> dict[int, int]:
        codes = self._codes(connection, Op.RENEW, HoldsRequest(tuple(ids), ttl_ms).encode(), n=len(ids), deadline=deadline).codes
        return dict(zip(ids, codes, strict=True))

    def _release_on(self, connection: Connection, ids: Sequence[int], deadline: float) -> None:
        for at in range(0, len(ids), MAX_BATCH_KEYS):
            meta = HoldsRequest(tuple(ids[at : at + MAX_BATCH_KEYS])).encode()
            connection.send(Op.RELEASE, meta, deadline=deadline, flags=Flag.NO_REPLY)

    def _release_views(self, hold_ids: Sequence[int], deadline: float) -> list[int]:
        """Releases those that are views; returns the others."""
        with self._views.lock:
            views = {i: self._views.of.pop(i) for i in hold_ids if i in self._views.of}
            current = self._views.connection
            mine = [i for i, connection in views.items() if connection is current]  # others went with their connection
            if mine and current is not None and not current.closed:
                self._release_on(current, mine, deadline)
        return [i for i in hold_ids if i not in views]

    def _open(self, deadline: float) -> Connection:
        connection = self._open_greeted(deadline)
        found = connection.greeting["incarnation"]
        if self.incarnation and found != self.incarnation:
            connection.close()
            raise LinkError(
                LinkCause.RESTARTED,
                f"worker at {self.peer} was started again: it is incarnation {found:016x}, not {self.incarnation:016x}",
            )
        self.incarnation = found
        self._count(connects=1)
        return connection

    def _check_use(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidArgument(f"link: made in process {self._pid}, used in {os.getpid()}: connections do not survive a fork")

    def _count_written(self, codes: bytes, sizes: Sequence[int]) -> None:
        stored = [size for code, size in zip(codes, sizes, strict=True) if code in (BlockCode.STORED, BlockCode.UNLISTED)]
        self._count(written_blocks=len(stored), written_bytes=sum(stored))

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, n in more.items():
                setattr(self.counters, name, getattr(self.counters, name) + n)


def decode_codes(connection: Connection, op: Op, meta: bytes, *, n: int) -> CodesAnswer:
    try:
        answer = CodesAnswer.decode(meta)
    except FrameError as error:
        raise connection.protocol_error(f"{op.name}: {error}") from error
    if len(answer.codes) != n:
        raise connection.protocol_error(f"{op.name}: {len(answer.codes)} codes for {n} keys")
    if answer.count and op in _PUTS:
        return replace(answer, codes=answer.codes.replace(_FULL, _FULL_QUOTA))
    return answer


def hints_for(connection: Connection, hints: Sequence[int]) -> U64:
    """What of them this worker understands: all, or none."""
    return np.array(hints if "hints" in connection.greeting.get("features", ()) else (), dtype=np.uint64)


def cut_ranges(ranges: Sequence[Range], limit: int) -> list[Range]:
    """The same bytes in parts of at most `limit`."""
    parts: list[Range] = []
    for whole in ranges:
        if whole.data.nbytes <= limit:
            parts.append(whole)
        else:
            parts += [Range(whole.block, whole.offset + at, whole.data[at : at + limit])
                      for at in range(0, whole.data.nbytes, limit)]  # fmt: skip
    return parts


def fill_meta(number: int, parts: Sequence[Range], *, ring_offset: int = 0, with_sums: bool = True) -> bytes:
    ranges = np.zeros(len(parts), dtype=FILL_RANGE)
    ranges["block"] = [part.block for part in parts]
    ranges["offset"] = [part.offset for part in parts]
    ranges["length"] = [part.data.nbytes for part in parts]
    if with_sums:  # not in a ring: its memory is no wire, the worker makes them
        ranges["sum"] = [xxhash.xxh3_64_intdigest(part.data) for part in parts]
    return FillRequest(number, ranges, ring_offset).encode()


def no_progress(connection: Connection) -> NoReturn:
    raise LinkError(LinkCause.BUSY, f"worker at {connection.peer} answers no block of a batch")
