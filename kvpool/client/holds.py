"""Holds: what workers promised to keep for a while, and the token that hands such a promise to another process.

    token   "KVH1" | namespace uid 16 | n_blocks u32 | n_parts u16 | parts
    part    worker id (u8 length, bytes) | incarnation u64 | hold id u64 | shard u16 | depth u32 | count u32

A part is one worker's promise for a run of the chain: blocks depth..depth+count-1 of one shard. It lives by its time, there.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from kvpool.client.context import Context
from kvpool.client.peers import miss_of
from kvpool.client.reading import locate_all, tier_of
from kvpool.core.fetch import Candidates, Fetch
from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import BlockCode, NamespaceUid, Tier, Tiers, miss_cause
from kvpool.errors import InvalidArgument
from kvpool.transport.base import Held, LinkError, WorkerLink
from kvpool.v1 import master_pb2 as pb

MAGIC: Final = b"KVH1"
PARTS_MAX: Final = 4096  # of one token: runs of a chain on different workers, times shards
_HEAD: Final = struct.Struct("<4s16sIH")
_PART: Final = struct.Struct("<QQHII")


@dataclass(frozen=True, slots=True)
class HoldPart:
    """One worker's promise."""

    worker_id: str
    incarnation: int
    hold_id: int
    shard: int
    depth: int
    count: int


@dataclass(frozen=True, slots=True)
class HoldToken:
    """What a token says."""

    namespace: NamespaceUid
    n_blocks: int
    parts: tuple[HoldPart, ...]

    def encode(self) -> bytes:
        """As bytes, for another process."""
        pieces = [_HEAD.pack(MAGIC, self.namespace, self.n_blocks, len(self.parts))]
        for part in self.parts:
            name = part.worker_id.encode()
            pieces += (bytes((len(name),)), name,
                       _PART.pack(part.incarnation, part.hold_id, part.shard, part.depth, part.count))  # fmt: skip
        return b"".join(pieces)

    @classmethod
    def decode(cls, raw: bytes) -> HoldToken:
        """InvalidArgument for what is no token."""
        try:
            magic, uid, n_blocks, n_parts = _HEAD.unpack_from(raw)
            if magic != MAGIC or n_parts > PARTS_MAX:
                raise InvalidArgument("hold: these bytes are no hold token")
            at, parts = _HEAD.size, []
            for _ in range(n_parts):
                end = at + 1 + raw[at]
                name = raw[at + 1 : end].decode()
                parts.append(HoldPart(name, *_PART.unpack_from(raw, end)))
                at = end + _PART.size
        except (struct.error, IndexError, UnicodeDecodeError):
            raise InvalidArgument("hold: these bytes are no hold token") from None
        if at != len(raw):
            raise InvalidArgument("hold: bytes left over behind the token")
        return cls(NamespaceUid(uid), n_blocks, tuple(parts))

    def of(self, batch: KeyBatch, shard: int) -> list[tuple[HoldPart, int, int]]:
        """The parts that cover blocks of this batch, each with the batch's block range (start, stop)."""
        found = []
        for part in self.parts:
            start, stop = max(part.depth - batch.depth, 0), min(part.depth + part.count - batch.depth, len(batch))
            if part.shard == shard and start < stop:
                found.append((part, start, stop))
        return found


class Hold:
    """Blocks that stay readable until `release`, the end of the with block, or `ttl_ms`. Any thread may use and release it.

    `n_blocks`: leading blocks that are held (of every asked shard); `tiers` [n_blocks]: where each (of the first shard) is by
    what was known when the hold was made; `token`: bytes that another process gives to `get(hold=)`.
    """

    def __init__(self, context: Context, token: HoldToken, tiers: list[Tier]) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._released = False
        self.content = token
        self.n_blocks = token.n_blocks
        self.tiers = tiers[: token.n_blocks]

    @property
    def token(self) -> bytes:
        return self.content.encode()

    def release(self) -> None:
        """Tells the workers that the promise is not needed any more; never raises for a worker that is gone. Idempotent."""
        with self._lock:
            if self._released:
                return
            self._released = True
        release_parts(self._context, self.content.parts)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def release_parts(context: Context, parts: Sequence[HoldPart]) -> None:
    """Releases each part at its worker, where there is a link to it."""
    for part in parts:
        peer = context.peers.find(part.worker_id, part.incarnation)
        if peer is not None and peer.link is not None:
            peer.link.release([part.hold_id])


def take_hold(context: Context, spec: NamespaceSpec, batches: Sequence[tuple[int, KeyBatch]], *, ttl_ms: int,
              deadline: float) -> Hold:  # fmt: skip
    """Holds the leading blocks of each batch ((shard, keys), all of the same hashes). Parts past what every shard has are
    released again."""
    per_shard = [_hold_one(context, spec, shard, batch, ttl_ms=ttl_ms, deadline=deadline) for shard, batch in batches]
    n_blocks = min(len(tiers) for tiers, _ in per_shard)
    depth = batches[0][1].depth
    kept: list[HoldPart] = []
    extra: list[HoldPart] = []
    for _, parts in per_shard:
        for part in parts:
            (kept if part.depth < depth + n_blocks else extra).append(part)
    release_parts(context, extra)
    return Hold(context, HoldToken(spec.uid, n_blocks, tuple(kept)), per_shard[0][0])


def _hold_one(context: Context, spec: NamespaceSpec, shard: int, batch: KeyBatch, *, ttl_ms: int,
              deadline: float) -> tuple[list[Tier], list[HoldPart]]:  # fmt: skip
    """Run after run of one chain, each at the worker that has it; ends at the first block that nobody promises. The tier of each
    held block, and the promises."""
    fetch = Fetch(len(batch))
    places = locate_all(context, spec, batch, deadline=deadline)
    fetch.locate(0, places)
    parts: list[HoldPart] = []
    tiers: list[Tier] = []
    while fetch.n_leading < len(batch) and len(parts) < PARTS_MAX:
        reads = fetch.plan(context.peers.cost)
        if not reads:
            break
        run = reads[0].run()
        part = batch.slice(run.blocks[0], run.blocks[-1] + 1)
        peer = context.peers.get(run.peer)
        if peer is None:
            break

        def ask(link: WorkerLink, until: float, part: KeyBatch = part) -> Held:
            return link.hold(part, ttl_ms, deadline=until)

        try:
            held = context.peers.call(peer, ask, deadline=deadline, alternatives=run.alternatives)
        except LinkError as error:
            fetch.failed(run, miss_of(error))
            continue
        if held.hold_id and held.count:
            parts.append(HoldPart(peer.worker_id, peer.incarnation, held.hold_id, shard, part.depth, held.count))
            tiers += [tier_of(dict(places[block])[run.peer]) for block in run.blocks[: held.count]]
        if held.count < len(part) and miss_cause(held.codes[held.count]) is None:
            break  # the worker promises no more (held bytes are limited), though it may have the block
        codes = bytes([BlockCode.HIT_SHARED]) * held.count + held.codes[held.count :]
        fetch.answered(run, codes, bytes([Tiers.DRAM]) * len(codes), [0] * len(codes))
    return tiers, parts


def parse_hold(hold: Hold | bytes | None, spec: NamespaceSpec) -> HoldToken | None:
    """The `hold` argument of a get. InvalidArgument for other things, and for a hold of another namespace."""
    if hold is None:
        return None
    if isinstance(hold, Hold):
        token = hold.content
    elif isinstance(hold, bytes | bytearray | memoryview):
        token = HoldToken.decode(bytes(hold))
    else:
        raise InvalidArgument(f"hold: {type(hold).__name__} is neither a Hold nor a token (bytes)")
    if token.namespace != spec.uid:
        raise InvalidArgument(f"hold: it is of another namespace than {spec.name!r}")
    return token


def held_places(context: Context, token: HoldToken, batch: KeyBatch, shard: int, *, deadline: float) -> tuple[
        list[Candidates], dict[int, list[tuple[int, int, int]]]]:  # fmt: skip
    """For a get under a hold: who promised each block, and by peer the ranges (start, stop, hold id) of its promises.

    A worker that this client has not met is looked up at the master; one that is not there any more stays in the places, so that
    the get can say which worker died.
    """
    parts = token.of(batch, shard)
    if any(context.peers.find(part.worker_id, part.incarnation) is None for part, _, _ in parts):
        reply = context.master.ask("Describe", pb.DescribeRequest(), deadline=deadline)
        if reply is not None:
            context.learn(worker.info for worker in reply.workers)
    places: list[Candidates] = [()] * max((stop for _, _, stop in parts), default=0)
    ranges: dict[int, list[tuple[int, int, int]]] = {}
    for part, start, stop in parts:
        peer = context.peers.find(part.worker_id, part.incarnation) or context.peers.lost(part.worker_id, part.incarnation)
        places[start:stop] = [((peer.number, int(Tiers.DRAM)),)] * (stop - start)
        ranges.setdefault(peer.number, []).append((start, stop, part.hold_id))
    return places, ranges
