"""What every transport to a worker offers (`WorkerLink`), its values and its one error.

Owns the contract only. Sockets are in `connection`, the paths in `tcp` and `shm`, the choice between them in `choose`; the bytes
on the wire in `core.frames`.

Times: `deadline` is a point of `time.monotonic()` in seconds. Every call returns or raises by then (plus scheduling).
Threads: every method of a link may be called from any thread. After a fork the child's calls raise InvalidArgument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, overload, runtime_checkable

from kvpool.core.keys import KeyBatch
from kvpool.core.types import HoldId
from kvpool.errors import KVPoolError

VIEW_TTL_MS = 10_000  # of a view's hold; whoever keeps views renews them three times in this


class LinkCause(StrEnum):
    """Why a worker could not be used."""

    REFUSED = "refused"  # nobody listens there, or no such host
    TIMEOUT = "timeout"  # the deadline passed
    CLOSED = "closed"  # the peer closed, died, or the link was closed
    PROTOCOL = "protocol"  # the peer's bytes make no sense; the connection was dropped
    RESTARTED = "restarted"  # another incarnation answers at this address: make a new link
    UNKNOWN_NAMESPACE = "unknown_namespace"  # the worker has not heard of it (yet)
    BUSY = "busy"  # a limit of the worker was reached; nothing was done
    NOT_READY = "not_ready"  # catching up removals, draining or stopping
    NOT_FOUND = "not_found"  # unknown hold, reservation or arena
    BAD_REQUEST = "bad_request"  # the worker refused the request as malformed: a bug on one side
    INTERNAL = "internal"  # the worker failed


class LinkError(KVPoolError):
    """The worker cannot be used for this call; another replica may. `cause` says why."""

    code = "link"
    retryable = True

    def __init__(self, cause: LinkCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Strided(Sequence[memoryview]):
    """n buffers of `each` bytes back to back in one contiguous buffer; a slice of step 1 is a Strided again.

    Callers that have one [n, block_bytes] array pass this instead of a list: no per-block object is made. `whole` is a
    one-dimensional memoryview of bytes whose length is a multiple of `each`.
    """

    __slots__ = ("each", "whole")

    def __init__(self, whole: memoryview, each: int) -> None:
        if each < 1 or whole.itemsize != 1 or whole.ndim != 1 or whole.nbytes % each:
            raise ValueError(f"whole: {whole.nbytes} bytes are no whole number of buffers of {each} bytes")
        self.whole = whole
        self.each = each

    def __len__(self) -> int:
        return self.whole.nbytes // self.each

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            return Strided(self.whole[start * self.each : max(start, stop) * self.each], self.each)
        n = len(self)
        if not -n <= index < n:
            raise IndexError(index)
        at = (index % n) * self.each
        return self.whole[at : at + self.each]

    def __iter__(self) -> Iterator[memoryview]:
        for at in range(0, self.whole.nbytes, self.each):
            yield self.whole[at : at + self.each]


Buffers = Sequence[memoryview] | Sequence[memoryview | None]


@dataclass(slots=True)
class ReadResult:
    """Of a READ. `codes` [n]: HIT_INLINE or HIT_SHARED: the bytes are verified and in `outs`; a miss (`miss_cause`); REJECTED:
    the buffer is smaller than the value, or the byte range ends past it, nothing was written; LATER: past the first miss
    (only with `first_miss`). `tiers` [n]: Tiers (u8) it was read from. `sizes` [n]: bytes stored under the key, 0 for a miss.
    `n_leading`: hits before the first block that is none. `error`: what cut the call short after some blocks had been
    served; the others then are misses with cause TIMEOUT or WORKER_LOST. Out buffers of blocks that are no hits may have been
    written to, except those of REJECTED."""

    codes: bytes
    tiers: bytes
    sizes: list[int]
    n_leading: int
    error: LinkError | None = None


@dataclass(slots=True)
class Touched:
    """Of a TOUCH. `tiers` [n]: Tiers (u8) of each key now, 0: not there. `listed`: the master is known to have the reports of all
    that are there (only where that was asked)."""

    tiers: bytes
    listed: bool


@dataclass(slots=True)
class Held:
    """Of a HOLD: `count` leading blocks (all blocks without `first_miss`: see codes) that the worker promised. `codes` [n]:
    HIT_SHARED or a miss, LATER past the first miss. `hold_id` 0: nothing is held."""

    hold_id: HoldId
    count: int
    codes: bytes


@dataclass(slots=True)
class Viewed:
    """Of a VIEW: read-only memoryviews of the leading blocks, valid while the hold lives. `renew` and `release` take its id."""

    hold_id: HoldId
    views: list[memoryview]
    codes: bytes
    tiers: bytes


@dataclass(slots=True)
class Range:
    """One part of a reserved block for `fill`: bytes `offset`.. of block `block` (index in the reservation's batch)."""

    block: int
    offset: int
    data: memoryview


class ReservationHandle(Protocol):
    """A reservation; it owns a connection until `commit` or `abort`. `codes` [n]: RESERVED, ALREADY, FULL or REJECTED."""

    codes: bytes


@dataclass(slots=True)
class LinkCounters:
    """Plain ints that only grow; written under the link's lock, read without."""

    calls: int = 0
    errors: int = 0
    connects: int = 0
    read_bytes: int = 0
    read_blocks: int = 0
    written_bytes: int = 0
    written_blocks: int = 0
    stale_blocks: int = 0  # a slot's generation changed while it was copied
    corrupt_blocks: int = 0


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How a client wants its links. `transport`: auto, shm or tcp. `lanes`: connections of one bulk read."""

    transport: str = "auto"
    token: str = ""
    client: str = ""
    host_id: str = ""
    lanes: int = 2


class WorkerAddress(Protocol):
    """What of the master's HolderInfo a link needs (the protobuf message is one)."""

    @property
    def worker_id(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def host_id(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def unix_name(self) -> str: ...


@runtime_checkable
class WorkerLink(Protocol):
    """One worker incarnation, reached by one transport. Pools connections and reconnects; a call that ends in an exception or
    past its deadline has given up its connections, so that no late answer is taken for another's.

    All calls raise LinkError when the worker cannot be used, Unauthenticated and VersionMismatch from the first contact.
    Batches may have any number of keys: a link splits them into frames.
    """

    transport: str  # "shm" or "tcp"
    incarnation: int
    worker_id: str
    counters: LinkCounters

    def read(self, batch: KeyBatch, outs: Buffers, *, chunk_bytes: int, deadline: float, byte_range: tuple[int, int] = (0, 0),
             hold_id: int = 0, verify: bool = False, first_miss: bool = False) -> ReadResult:  # fmt: skip
        """Blocks into `outs` [n] (writable, contiguous bytes; None: not wanted, discarded). `byte_range` (offset, length),
        length 0: whole blocks, of the size that is stored; else exactly `length` bytes of each. `chunk_bytes`: the namespace's.
        `verify`: check sums of shared memory too. When it returns or raises, nobody writes to `outs` any more."""
        ...

    def write(self, batch: KeyBatch, blocks: Sequence[memoryview], *, chunk_bytes: int, wait_listed: bool,
              deadline: float, hint: int = 0) -> bytes:  # fmt: skip
        """Blocks [n] to the worker; codes [n]: STORED, ALREADY, FULL, FULL_QUOTA, REJECTED, or UNLISTED (only with `wait_listed`:
        on the worker, and the master has not confirmed). `hint`: `retention.pack_hint`, of all of them. Raised LinkError: any
        of them may have been stored."""
        ...

    def touch(self, batch: KeyBatch, *, wait_listed: bool, deadline: float, hint: int | None = None) -> Touched:
        """Which blocks are there now; marks them as used. `hint`: they are being put, and live on as `write` would have it."""
        ...

    def drop(self, batch: KeyBatch, *, deadline: float) -> bytes:
        """Drops the worker's copies; [n]: 1 when it had one."""
        ...

    def hold(self, batch: KeyBatch, ttl_ms: int, *, deadline: float, first_miss: bool = True) -> Held:
        """A promise by time: it outlives the connection and may be used by other processes."""
        ...

    def renew(self, hold_ids: Sequence[int], ttl_ms: int, *, deadline: float) -> bytes:
        """[n]: 1 alive and renewed, 0 gone."""
        ...

    def release(self, hold_ids: Sequence[int]) -> None:
        """Fire and forget; never raises for an unreachable worker (its holds end by time)."""
        ...

    def view(self, batch: KeyBatch, *, deadline: float, ttl_ms: int = VIEW_TTL_MS) -> Viewed:
        """shm only (else InvalidArgument). Ask `renew` before trusting a view at its end: 0 means that it was lost."""
        ...

    def reserve(self, batch: KeyBatch, sizes: Sequence[int], *, deadline: float,
                fence: int | None = None, hints: Sequence[int] = ()) -> ReservationHandle:  # fmt: skip
        """`hints` [n] or none. `fence`: the blocks are as of this removal of the namespace; a worker that is further raises
        NOT_READY."""
        ...

    def fill(self, reservation: ReservationHandle, ranges: Sequence[Range], *, deadline: float) -> None:
        """Parts of RESERVED blocks; of other blocks: InvalidArgument. A LinkError ends the reservation."""
        ...

    def commit(self, reservation: ReservationHandle, *, wait_listed: bool, deadline: float) -> bytes:
        """Codes [n] as of `write`. Ends the reservation, whatever happens."""
        ...

    def abort(self, reservation: ReservationHandle) -> None:
        """Ends the reservation; never raises for an unreachable worker."""
        ...

    def stat(self, *, deadline: float) -> dict[str, Any]: ...

    def prefetch(self, batch: KeyBatch, *, deadline: float) -> bytes:
        """Asks that what is on SSD be brought to DRAM, and does not wait for it. Tiers [n] as they are now; empty: this worker's
        release cannot."""
        ...

    def copy_to(self, batch: KeyBatch, target: str, *, deadline: float) -> bool:
        """Asks that the leading blocks be copied to the worker with this id, and does not wait for it. False: not now."""
        ...

    def close(self) -> None:
        """Calls in other threads end with LinkError at once; views that are left stay readable memory. Idempotent."""
        ...
