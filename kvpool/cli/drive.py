"""Requests driven through a real pool by N clients, every byte of every hit checked. Used by `replay` and `demo`.

Owns what the blocks hold, the order of requests, the checks and the tally. A request gets its whole chain, then puts its whole
chain: the pool touches a chain tail first, so that its head is the most recent. Starting the pool is in `pool`.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpool.core.types import MAX_BATCH_KEYS, Outcome, Tier
from kvpool.errors import InvalidArgument, KVPoolError
from kvpool.sim.reuse import mix
from kvpool.sim.traces import Served

if TYPE_CHECKING:
    from kvpool.client.client import Client
    from kvpool.client.namespace import Namespace
    from kvpool.core.layout import KVLayout
    from kvpool.sim.traces import Request

NAMESPACE = "replay"
POISON = 0xA5  # lies in the buffers before each get: a block that is said to be a hit and was not written does not pass
LAYER_BYTES = 256 << 10
HEAD_DIM_MAX = 1 << 20
ERROR_WORDS_MAX = 5  # messages kept of a run's errors


class Contents:
    """What block `id` holds: a fixed random row, xor a 64-bit number that only this id has. About as fast as memory is written.

    Every 8-byte word depends on the id and its place: another block's bytes, moved bytes and zero fill are all noticed.
    """

    def __init__(self, block_bytes: int, *, seed: int = 0) -> None:
        self.block_bytes = block_bytes
        n_words = -(-block_bytes // 8)
        self._base = np.random.default_rng(seed).integers(0, 1 << 64, size=n_words, dtype=np.uint64)

    def fill(self, ids: npt.NDArray[np.uint64], out: npt.NDArray[np.uint8]) -> None:
        """Write the blocks of `ids` [n] into `out`: uint8 [n, block_bytes], C-contiguous."""
        seeds = mix(ids)[:, None]  # a permutation: no two ids share a seed
        if self.block_bytes % 8 == 0:
            np.bitwise_xor(self._base[None, :], seeds, out=out.view(np.uint64))
        else:
            out[:] = np.bitwise_xor(self._base[None, :], seeds).view(np.uint8)[:, : self.block_bytes]


def digest(block_id: int) -> bytes:
    """The engine's own hash of a block (32 bytes), for a namespace with hash="external"."""
    return hashlib.sha256(b"kvpool-replay" + block_id.to_bytes(8, "little")).digest()


def layout_of(block_bytes: int, *, block_tokens: int = 512) -> KVLayout:
    """A layout whose blocks have exactly this size, so that a tier of N of them holds N. InvalidArgument where there is none."""
    from kvpool.core.layout import KVLayout

    n_layers, row_bytes = 1, block_bytes
    if block_bytes > HEAD_DIM_MAX:
        n_layers, row_bytes = block_bytes // LAYER_BYTES, LAYER_BYTES
        if n_layers * row_bytes != block_bytes:
            raise InvalidArgument(f"--block-bytes: {block_bytes} is above {HEAD_DIM_MAX} and no multiple of {LAYER_BYTES}")
    fields: dict[str, Any] = {"dtype": "uint8", "n_layers": n_layers, "n_kv_heads": 1, "head_dim": row_bytes, "block_tokens": 1}
    return KVLayout(model=f"replay/{block_tokens}", revision="", format="replay/1", planes=1, **fields)


@dataclass
class Tally:
    """What a run came to. `missed`: requests that were not served whole, by the cause of their first missing block."""

    n_requests: int = 0
    n_blocks: int = 0
    hits: Counter[Tier] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    transports: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    n_corrupt: int = 0
    n_errors: int = 0
    error_words: list[str] = field(default_factory=list)
    get_ms: list[float] = field(default_factory=list)
    put_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    ssd_blocks_written: int = 0
    rows: list[Served] = field(default_factory=list)  # of requests, as they were begun by each client

    @property
    def n_hits(self) -> int:
        return self.hits.total()

    @property
    def n_stored(self) -> int:
        return self.outcomes[Outcome.STORED] + self.outcomes[Outcome.UNLISTED]

    @property
    def failed(self) -> bool:
        return self.n_corrupt > 0 or self.n_errors > 0

    def error(self, words: str) -> None:
        """Count an error and keep its words, if there are few yet."""
        self.n_errors += 1
        if len(self.error_words) < ERROR_WORDS_MAX and words not in self.error_words:
            self.error_words.append(words)

    def to_json(self, *, block_bytes: int) -> dict[str, Any]:
        """As `kvpool replay --json` prints it."""
        return {
            "requests": self.n_requests,
            "blocks": self.n_blocks,
            "hit_blocks": self.n_hits,
            "hit_rate": round(self.n_hits / self.n_blocks, 6) if self.n_blocks else 0.0,
            "hits_by_tier": {tier.value: self.hits[tier] for tier in Tier},
            "miss_causes": dict(sorted(self.missed.items())),
            "stored_blocks": self.n_stored,
            "ssd_blocks_written": self.ssd_blocks_written,
            "corrupt_blocks": self.n_corrupt,
            "errors": self.n_errors,
            "bytes_put": self.n_stored * block_bytes,
            "bytes_get": self.n_hits * block_bytes,
            "seconds": round(self.seconds, 3),
            "get_ms": _percentiles(self.get_ms),
            "put_ms": _percentiles(self.put_ms),
        }


def _percentiles(values_ms: Sequence[float]) -> dict[str, float]:
    if not values_ms:
        return {"p50": 0.0, "p99": 0.0}
    p50, p99 = np.percentile(np.asarray(values_ms), (50, 99))
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


class Order:
    """Hands out requests in trace order: one that shares its first id with one in flight waits for it, and all after it too."""

    def __init__(
        self, requests: Sequence[Request], *, speed: float | None, on_time: Callable[[float], None] = lambda _ms: None
    ) -> None:
        self._on_time = on_time
        self._requests = requests
        self._speed = speed
        self._next = 0
        self._in_flight: set[int] = set()
        self._stopped = False
        self._changed = threading.Condition()
        self._start_s = time.monotonic()

    def take(self) -> Request | None:
        """The next request, when its turn has come; None at the end, or after `stop`. Any thread."""
        with self._changed:
            while not self._stopped and self._next < len(self._requests):
                request = self._requests[self._next]
                wait_s = self._due_s(request)
                if wait_s <= 0 and not (request.ids and request.ids[0] in self._in_flight):
                    self._next += 1
                    self._on_time(request.timestamp_ms)
                    self._in_flight.update(request.ids[:1])
                    self._changed.notify_all()
                    return request
                self._changed.wait(min(wait_s, threading.TIMEOUT_MAX) if wait_s > 0 else None)
            return None

    def done(self, request: Request) -> None:
        """A request that was taken has ended."""
        with self._changed:
            self._in_flight.difference_update(request.ids[:1])
            self._changed.notify_all()

    def stop(self) -> None:
        """No more requests are handed out."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _due_s(self, request: Request) -> float:
        """Seconds until its time stamp's turn; 0 without a speed."""
        if self._speed is None:
            return 0.0
        after_ms = request.timestamp_ms - self._requests[0].timestamp_ms
        return self._start_s + after_ms / 1000 / self._speed - time.monotonic()


class Lane:
    """One client's thread: its buffers, and its share of the tally."""

    def __init__(self, space: Namespace, contents: Contents, *, n_blocks_max: int) -> None:
        self.tally = Tally()
        self._space = space
        self._contents = contents
        shape = (n_blocks_max, contents.block_bytes)
        self._want = np.empty(shape, dtype=np.uint8)
        self._got = np.empty(shape, dtype=np.uint8)
        self._digests: dict[int, bytes] = {}

    def serve(self, request: Request) -> None:
        """Get the chain, check what came, put the chain."""
        tally, n = self.tally, len(request.ids)
        tally.n_requests += 1
        tally.n_blocks += n
        tally.rows.append(Served(request.timestamp_ms, n))  # what stays of a request whose get fails
        if not n:
            return
        hashes = self._space.hashes([self._digest(block_id) for block_id in request.ids])
        want, out = self._want[:n], self._got[:n]
        self._contents.fill(np.array(request.ids, dtype=np.uint64), want)
        out.fill(POISON)
        start_s = time.perf_counter()
        got = self._space.get(hashes, out)
        tally.get_ms.append((time.perf_counter() - start_s) * 1000)
        n_hits = got.n_blocks
        hits = Counter(source.tier for source in got.sources[:n_hits])
        tally.hits += hits
        tally.rows[-1] = Served(request.timestamp_ms, n, hits[Tier.DEVICE], hits[Tier.DRAM], hits[Tier.SSD])
        tally.transports.update(source.transport for source in got.sources[:n_hits])
        if got.miss is not None:
            tally.missed[got.miss.value] += 1
        if not np.array_equal(out[:n_hits], want[:n_hits]):
            wrong = np.flatnonzero((out[:n_hits] != want[:n_hits]).any(axis=1))
            tally.n_corrupt += len(wrong)
            tally.error_words.append(f"block id {request.ids[wrong[0]]}: other bytes than were put")
        start_s = time.perf_counter()
        put = self._space.put(hashes, want)
        tally.put_ms.append((time.perf_counter() - start_s) * 1000)
        tally.outcomes.update(put.outcomes)
        for outcome, reason in zip(put.outcomes, put.reasons, strict=True):
            if outcome is Outcome.REJECTED:
                tally.error(f"put rejected: {reason}")

    def _digest(self, block_id: int) -> bytes:
        found = self._digests.get(block_id)
        if found is None:
            found = self._digests[block_id] = digest(block_id)
        return found


def drive(
    requests: Sequence[Request],
    *,
    connect: Callable[[], Client],
    block_bytes: int,
    n_clients: int,
    speed: float | None = None,
    on_time: Callable[[float], None] = lambda _ms: None,
    on_done: Callable[[Tally], None] = lambda _tally: None,
    memory_bytes: int | None = None,
) -> Tally:
    """Replay `requests` with `n_clients` threads, each with a client of its own made by `connect`.

    `on_time` is told each request's time stamp (ms) before it starts. `on_done` is called after each request, from its thread,
    with that thread's tally. A call that fails is counted as an error, and the run goes on. Interrupted (KeyboardInterrupt), it
    ends what is under way and raises. `memory_bytes`: what the buffers may take; InvalidArgument when they would need more.
    """
    longest = max(len(request.ids) for request in requests)
    if longest > MAX_BATCH_KEYS:
        raise InvalidArgument(f"a request has {longest} blocks; the limit is {MAX_BATCH_KEYS}")
    buffer_bytes = 2 * longest * block_bytes * n_clients
    if memory_bytes is not None and buffer_bytes > memory_bytes:
        raise InvalidArgument(
            f"--block-bytes: the longest request has {longest} blocks, whose buffers take {buffer_bytes} bytes "
            f"for {n_clients} clients; {memory_bytes} are available"
        )
    contents = Contents(block_bytes)
    clients: list[Client] = []
    try:
        for _ in range(n_clients):
            clients.append(connect())
        layout = layout_of(block_bytes)
        lanes = [
            Lane(client.namespace(NAMESPACE, layout, create=True, hash="external"), contents, n_blocks_max=longest)
            for client in clients
        ]
        start_s = time.monotonic()
        _run(lanes, Order(requests, speed=speed, on_time=on_time), on_done)
        tally = merge(lane.tally for lane in lanes)
        tally.seconds = time.monotonic() - start_s
        return tally
    finally:
        for client in clients:
            client.close()


def _run(lanes: Sequence[Lane], order: Order, on_done: Callable[[Tally], None]) -> None:
    broken: list[BaseException] = []

    def work(lane: Lane) -> None:
        try:
            while (request := order.take()) is not None:
                try:
                    lane.serve(request)
                except KVPoolError as error:
                    lane.tally.error(f"{type(error).__name__}: {error}")
                finally:
                    order.done(request)
                on_done(lane.tally)
        except BaseException as error:
            broken.append(error)
            order.stop()

    threads = [threading.Thread(target=work, args=(lane,), name=f"replay-{i}") for i, lane in enumerate(lanes)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        order.stop()
        for thread in threads:
            thread.join()
    if broken:
        raise broken[0]


def merge(tallies: Iterable[Tally]) -> Tally:
    """The sum of several tallies."""
    total = Tally()
    for tally in tallies:
        total.n_requests += tally.n_requests
        total.n_blocks += tally.n_blocks
        total.hits += tally.hits
        total.missed += tally.missed
        total.transports += tally.transports
        total.outcomes += tally.outcomes
        total.n_corrupt += tally.n_corrupt
        total.n_errors += tally.n_errors
        total.error_words += tally.error_words
        total.get_ms += tally.get_ms
        total.put_ms += tally.put_ms
        total.rows += tally.rows
    return total
