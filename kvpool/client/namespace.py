"""A namespace as its user sees it: hash, match, put, get, hold, view and the rest. Checks arguments, then hands on.

Shapes: `hashes` [n]; `blocks` and `out` uint8 [n, block_bytes], or one buffer a block. All calls are blocking, may come from any
thread, and end by their deadline: by default 2 s + the bytes at 100 MB/s for transfers, 1 s for the rest. A call that timed out
may have done its work all the same (a put's blocks may be stored); what it did is whole blocks only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeVar

from kvpool.client import buffers
from kvpool.client.ahead import fetch_ahead
from kvpool.client.context import Context, Counters, deadline_of, pick
from kvpool.client.holds import Hold, held_places, parse_hold, take_hold
from kvpool.client.keyed import Keyed
from kvpool.client.peers import Peer
from kvpool.client.put_session import PutSession
from kvpool.client.reading import Getter, count_get, locate_all, locate_everywhere, no_hold
from kvpool.client.results import GetResult, PinResult, PutResult, RemoveResult
from kvpool.client.views import Keeper, View, take_view
from kvpool.client.writing import Putter, count_put
from kvpool.core.fetch import CALL_MS, Candidates, transfer_ms
from kvpool.core.hashing import Extra, HashKind, PrefixHashes, chain_root, external_hashes, hash_tokens
from kvpool.core.keys import KeyBatch
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.pins import PinOutcome, check_ttl_s, level_of
from kvpool.core.retention import check_priority, check_seconds, pack_hint
from kvpool.core.types import MAX_BATCH_KEYS, MAX_SHARD, RemoveOutcome
from kvpool.errors import InvalidArgument, MasterUnavailable
from kvpool.transport.base import LinkError, Touched, WorkerLink
from kvpool.v1 import master_pb2 as pb

T = TypeVar("T")

POLL_S: Final = 0.05  # `wait` without a mirror
HOLD_TTL_MS: Final = 30_000
HOLD_TTL_MS_MAX: Final = 24 * 3600 * 1000  # workers have their own, lower limit
MATCH_PART: Final = MAX_BATCH_KEYS
_PIN_OUTCOMES: Final = (PinOutcome.ABSENT, PinOutcome.PINNED, PinOutcome.REFUSED, PinOutcome.UNPINNED, PinOutcome.NOT_PINNED)
_REMOVED: Final = (RemoveOutcome.REMOVED, RemoveOutcome.PENDING, RemoveOutcome.ABSENT)


class Namespace:
    """Made by `Client.namespace`. Thread-safe."""

    def __init__(self, context: Context, keeper: Keeper, spec: NamespaceSpec, layout: KVLayout) -> None:
        self._context, self._keeper, self._spec = context, keeper, spec
        self._root = chain_root(spec.hash, fingerprint=spec.fingerprint, salt=spec.salt)
        self._counters = Counters()
        self.layout = layout
        self.name = spec.name

    @property
    def block_bytes(self) -> int:
        """Bytes of a block (of one shard); opaque layouts: the most that a value may have."""
        return self._spec.block_bytes

    @property
    def replicas(self) -> int:
        return self._spec.replicas

    def __repr__(self) -> str:
        return f"Namespace({self.name!r}, block_bytes={self.block_bytes}, hash={self._spec.hash.value!r})"

    # --- names of blocks ------------------------------------------------------------------------------------------------

    def hash(self, tokens: Any, *, parent: PrefixHashes | bytes | None = None, extra: Extra = b"") -> PrefixHashes:
        """Prefix hashes of the full blocks in `tokens` (ints in 0..2**32-1, any sequence or integer array). `parent`: the chain
        goes on there. `extra`: bytes that are mixed into all blocks (LoRA), or [(start, end, id), ...] by token positions of this
        call (images). Pure computation: no deadline, works on a closed client. InvalidArgument names what is wrong."""
        if self._spec.hash is HashKind.EXTERNAL:
            raise InvalidArgument("hash: the namespace has hash='external'; give the engine's own digests to hashes()")
        return hash_tokens(self._spec.hash, tokens, block_tokens=self._spec.block_tokens, root=self._root, parent=parent,
                           extra=extra)  # fmt: skip

    def hashes(self, digests: Sequence[bytes], *, parent: PrefixHashes | bytes | None = None) -> PrefixHashes:
        """The engine's own chain, 8 to 64 bytes each, in order (namespaces with hash="external")."""
        if self._spec.hash is not HashKind.EXTERNAL:
            raise InvalidArgument(f"digests: the namespace has hash={self._spec.hash.value!r}; only 'external' takes digests")
        return external_hashes(digests, parent=parent)

    def _batch(self, hashes: PrefixHashes, shard: int) -> KeyBatch:
        self._context.check()
        if not isinstance(hashes, PrefixHashes):
            raise InvalidArgument(f"hashes: {type(hashes).__name__} is no PrefixHashes; hash() and hashes() make them")
        return hashes.key_batch(self._spec.uid, shard=shard)

    # --- lookups --------------------------------------------------------------------------------------------------------

    def match(self, hashes: PrefixHashes, *, freshness: Literal["cluster", "mirror"] = "cluster", shard: int = 0,
              shards: Sequence[int] | None = None, deadline_ms: float | None = None) -> int:  # fmt: skip
        """Leading blocks that the pool has (every shard of `shards`). "cluster" asks the master, and the mirror when there is no
        answer; MasterUnavailable when there is no mirror either. "mirror" never asks: what is known here, 0 without a mirror."""
        wanted = _shards(shard, shards)
        self._batch(hashes, wanted[0])
        if freshness not in ("cluster", "mirror"):
            raise InvalidArgument(f"freshness: {freshness!r} is neither 'cluster' nor 'mirror'")
        deadline = deadline_of(deadline_ms, CALL_MS)
        if freshness == "cluster":
            found = self._match_master(hashes, wanted, deadline)
            if found is not None:
                return found
        known = self._match_mirror(hashes, wanted)
        if known is None and freshness == "cluster":
            raise MasterUnavailable(f"no answer from the master at {', '.join(self._context.master.addresses)}, and no mirror")
        return known or 0

    def _match_master(self, hashes: PrefixHashes, shards: Sequence[int], deadline: float) -> int | None:
        n = 0
        while n < len(hashes):
            part = hashes.hashes[n * 32 : (n + MATCH_PART) * 32]
            request = pb.MatchRequest(namespace=self._spec.uid, hashes=part, shards=shards)
            reply = self._context.master.ask("Match", request, deadline=deadline)
            if reply is None:
                return None
            n += reply.n_blocks
            if reply.n_blocks * 32 < len(part):
                break
        return n

    def _match_mirror(self, hashes: PrefixHashes, shards: Sequence[int]) -> int | None:
        mirror, n = self._context.mirror, len(hashes)
        for shard in shards:
            keys = hashes[:n].key_batch(self._spec.uid, shard=shard).split()
            found = None if mirror is None else mirror.index.match(self._spec.uid, keys)
            if found is None:
                return None
            n = found
        return n

    def wait(self, hashes: PrefixHashes, *, shard: int = 0, deadline_ms: float | None = None) -> int:
        """Blocks until the pool has all of them or the time is up (then no error); leading blocks there now. Default 1 s."""
        batch = self._batch(hashes, shard)
        deadline = deadline_of(deadline_ms, CALL_MS)
        keys, known = batch.split(), 0
        while True:
            mirror = self._context.mirror
            if mirror is not None:
                n = mirror.index.wait_match(self._spec.uid, keys, deadline=deadline)
                if n is not None:
                    return n
                self._context.check()
            found = self._match_master(hashes, [shard], deadline)
            known = known if found is None else found
            left = deadline - time.monotonic()
            if known == len(hashes) or left <= 0:
                return known
            self._context.closing.wait(min(POLL_S, left))
            self._context.check()

    # --- transfers ------------------------------------------------------------------------------------------------------

    def put(self, hashes: PrefixHashes, blocks: Any, *, visibility: Literal["cluster", "eventual"] = "cluster", shard: int = 0,
            retain_s: float | None = None, priority: int | None = None,
            deadline_ms: float | None = None) -> PutResult:  # fmt: skip
        """Stores the blocks; per block what became of it, [len(blocks)]. With fewer blocks than hashes the leading ones are put.
        "cluster": answered when every client's next get would find them; "eventual": as soon as they are on a worker. `blocks`
        may be reused when this returns or raises. `retain_s`: the blocks expire after this time (the namespace's `ttl_s` where
        that is shorter); those that are there already live on at least as long. `priority` 0..100, default 35: lower ones are
        evicted first, higher ones last. Raises InvalidArgument, Unauthenticated, NamespaceNotFound."""
        batch = self._batch(hashes, shard)
        if visibility not in ("cluster", "eventual"):
            raise InvalidArgument(f"visibility: {visibility!r} is neither 'cluster' nor 'eventual'")
        hint = _hint(retain_s, priority)
        views = buffers.sources(blocks, n_hashes=len(hashes), block_bytes=self.block_bytes, variable=self._spec.variable)
        n_bytes = buffers.total_bytes(views)
        deadline = deadline_of(deadline_ms, transfer_ms(n_bytes * self.replicas))
        wait_listed = visibility == "cluster"
        result = PutResult([], [], [])
        for start in range(0, len(views), MAX_BATCH_KEYS):
            part, buffer = (batch, views) if len(views) <= MAX_BATCH_KEYS else (
                batch.slice(start, start + MAX_BATCH_KEYS), views[start : start + MAX_BATCH_KEYS])  # fmt: skip
            done = Putter(self._context, self._spec, part, buffer, deadline=deadline, wait_listed=wait_listed, hint=hint).run()
            result = done if not start else PutResult(result.outcomes + done.outcomes, result.copies + done.copies,
                                                      result.reasons + done.reasons)  # fmt: skip
        count_put(self._counters, result, n_bytes)
        return result

    def get(self, hashes: PrefixHashes, out: Any, *, hold: Hold | bytes | None = None, byte_range: tuple[int, int] | None = None,
            shard: int = 0, deadline_ms: float | None = None) -> GetResult:  # fmt: skip
        """Fills `out` with the longest verified prefix. Buffers past `n_blocks` may have been written to. With fewer buffers than
        hashes the leading blocks are got. `byte_range` (offset, length): these bytes of every block; the buffers have `length`.
        `hold`: a Hold or its token; the workers that promised are asked. A full or dead pool is a miss, never an error; raises
        InvalidArgument and Unauthenticated."""
        batch = self._batch(hashes, shard)
        span = self._range(byte_range)
        views = buffers.targets(out, n_hashes=len(hashes), block_bytes=self.block_bytes, variable=self._spec.variable,
                                range_bytes=span[1])  # fmt: skip
        deadline = deadline_of(deadline_ms, transfer_ms(buffers.total_bytes(views)))
        token = parse_hold(hold, self._spec)
        result = GetResult(0)
        for start in range(0, len(views), MAX_BATCH_KEYS):
            part, outs = (batch, views) if len(views) <= MAX_BATCH_KEYS else (
                batch.slice(start, start + MAX_BATCH_KEYS), views[start : start + MAX_BATCH_KEYS])  # fmt: skip
            done = self._get_part(part, outs, token, shard, span, deadline)
            result = done if not start else GetResult(
                result.n_blocks + done.n_blocks, done.miss, result.sources + done.sources, result.sizes + done.sizes,
                done.complete, done.miss_worker, done.reason)  # fmt: skip
            if done.n_blocks < len(outs):
                break
        count_get(self._counters, result, len(views))
        return result

    def _get_part(self, batch: KeyBatch, outs: Sequence[memoryview], token: Any, shard: int, span: tuple[int, int],
                  deadline: float) -> GetResult:  # fmt: skip
        if token is None:
            return Getter(self._context, self._spec, batch, outs, deadline=deadline, byte_range=span, hold_of=no_hold).run()
        places, ranges = held_places(self._context, token, batch, shard, deadline=deadline)

        def hold_of(peer: Peer, block: int) -> int:
            return next((number for start, stop, number in ranges.get(peer.number, ()) if start <= block < stop), 0)

        getter = Getter(self._context, self._spec, batch, outs, deadline=deadline, byte_range=span, hold_of=hold_of)
        return getter.run(places)

    def _range(self, byte_range: tuple[int, int] | None) -> tuple[int, int]:
        if byte_range is None:
            return 0, 0
        try:
            offset, length = (int(number) for number in byte_range)
        except (TypeError, ValueError):
            raise InvalidArgument(f"byte_range: {byte_range!r} is no (offset, length)") from None
        if offset < 0 or length < 1 or offset + length > self.block_bytes:
            raise InvalidArgument(f"byte_range: {length} bytes from {offset} on; a block has {self.block_bytes}")
        return offset, length

    def put_session(self, hashes: PrefixHashes, *, visibility: Literal["cluster", "eventual"] = "cluster",
                    size: int | None = None, shard: int = 0, retain_s: float | None = None, priority: int | None = None,
                    deadline_ms: float | None = None) -> PutSession:  # fmt: skip
        """A put in parts (layer by layer), of at most 16,384 blocks; nothing is visible before its `commit`. `size`: bytes of
        each block, for opaque layouts (default `block_bytes`). `retain_s`, `priority`: as of `put`. The deadline is the whole
        session's: default 2 s + the bytes at 100 MB/s + 30 s."""
        batch = self._batch(hashes, shard)
        if visibility not in ("cluster", "eventual"):
            raise InvalidArgument(f"visibility: {visibility!r} is neither 'cluster' nor 'eventual'")
        if len(hashes) > MAX_BATCH_KEYS:
            raise InvalidArgument(f"hashes: {len(hashes)} blocks in one session; the limit is {MAX_BATCH_KEYS}")
        size = self.block_bytes if size is None else size
        if size != self.block_bytes and not (self._spec.variable and 0 < size <= self.block_bytes):
            raise InvalidArgument(f"size: {size} bytes; the namespace's blocks have {self.block_bytes}")
        deadline = deadline_of(deadline_ms, 30_000 + transfer_ms(size * len(hashes) * self.replicas))
        return PutSession(self._context, self._spec, batch, size=size, deadline=deadline, wait_listed=visibility == "cluster",
                          hint=_hint(retain_s, priority))  # fmt: skip

    def take(self, hashes: PrefixHashes, out: Any, *, shard: int = 0, deadline_ms: float | None = None) -> GetResult:
        """A get, then the blocks that were got are dropped from all workers that are known to have them (best effort: a worker
        that cannot be reached keeps its copies; see `remove` for the promise)."""
        result = self.get(hashes, out, shard=shard, deadline_ms=deadline_ms)
        batch = self._batch(hashes[: result.n_blocks], shard)
        deadline = deadline_of(None, CALL_MS)

        def drop(link: WorkerLink, part: KeyBatch, until: float) -> bytes:
            return link.drop(part, deadline=until)

        places = locate_everywhere(self._context, self._spec, batch.keys, deadline=deadline)
        for number, part, had in self._at_holders(batch, places, drop, deadline):
            if self._context.mirror is not None and not isinstance(had, LinkError):
                self._context.mirror.index.stale(self._spec.uid, number, part.keys)
        return result

    # --- promises -------------------------------------------------------------------------------------------------------

    def hold(self, hashes: PrefixHashes, *, ttl_ms: int = HOLD_TTL_MS, shard: int = 0, shards: Sequence[int] | None = None,
             deadline_ms: float | None = None) -> Hold:  # fmt: skip
        """The workers' own promise that the leading blocks (of every shard of `shards`) stay readable for `ttl_ms`. A call that
        times out may leave holds behind, which end by their time."""
        wanted = _shards(shard, shards)
        if isinstance(ttl_ms, bool) or not isinstance(ttl_ms, int) or not 1 <= ttl_ms <= HOLD_TTL_MS_MAX:
            raise InvalidArgument(f"ttl_ms: {ttl_ms!r} is not in 1..{HOLD_TTL_MS_MAX}")
        batches = [(one, self._batch(hashes, one)) for one in wanted]
        if len(hashes) * len(wanted) > MAX_BATCH_KEYS:
            raise InvalidArgument(f"hashes: {len(hashes)} blocks x {len(wanted)} shards; the limit of a hold is {MAX_BATCH_KEYS}")
        return take_hold(self._context, self._spec, batches, ttl_ms=ttl_ms, deadline=deadline_of(deadline_ms, CALL_MS))

    def view(self, hashes: PrefixHashes, *, shard: int = 0, deadline_ms: float | None = None) -> View:
        """Read-only memory of the leading blocks that workers of this host have, without a copy. InvalidArgument when the client
        is told to use another transport than shared memory."""
        batch = self._batch(hashes, shard)
        if self._context.transport not in ("auto", "shm"):
            raise InvalidArgument(f"view: needs shared memory; this client has transport={self._context.transport!r}")
        return take_view(self._context, self._keeper, self._spec, batch, deadline=deadline_of(deadline_ms, CALL_MS))

    def touch(self, hashes: PrefixHashes, *, shard: int = 0, deadline_ms: float | None = None) -> int:
        """Marks the leading blocks as used just now, at the workers that have them; how many leading blocks there are."""
        batch = self._batch(hashes, shard)

        def touch(link: WorkerLink, part: KeyBatch, until: float) -> Touched:
            return link.touch(part, wait_listed=False, deadline=until)

        there: set[bytes] = set()
        deadline = deadline_of(deadline_ms, CALL_MS)
        places = locate_all(self._context, self._spec, batch, deadline=deadline)
        for _, part, touched in self._at_holders(batch, places, touch, deadline):
            if not isinstance(touched, LinkError):
                there.update(key for key, tiers in zip(part.split(), touched.tiers, strict=True) if tiers)
        keys = batch.split()
        return next((index for index, key in enumerate(keys) if key not in there), len(keys))

    def prefetch(self, hashes: PrefixHashes, *, shard: int = 0, deadline_ms: float | None = None) -> int:
        """Has the leading blocks brought near ahead of a get: what is on SSD alone comes up to DRAM, and what only workers of
        other hosts have is copied to one of this host, where there is one. -> leading blocks there are; what was asked for
        happens afterwards, as far as there is room, and the call does not wait for it. Default 1 s, for the asking."""
        batch = self._batch(hashes, shard)
        deadline = deadline_of(deadline_ms, CALL_MS)
        places = locate_all(self._context, self._spec, batch, deadline=deadline)
        return fetch_ahead(self._context, batch, places, deadline=deadline)

    def _at_holders(self, batch: KeyBatch, places: Sequence[Candidates], ask: Callable[[WorkerLink, KeyBatch, float], T],
                    deadline: float) -> list[tuple[int, KeyBatch, T | LinkError]]:  # fmt: skip
        """`ask` of every worker in `places`, with its blocks."""
        by_peer: dict[int, list[int]] = {}
        for index, candidates in enumerate(places):
            for number, _ in candidates:
                by_peer.setdefault(number, []).append(index)
        answers: list[tuple[int, KeyBatch, T | LinkError]] = []
        for number, indices in by_peer.items():
            peer = self._context.peers.get(number)
            if peer is None or not isinstance(self._context.peers.cost(number), int):
                continue
            part = pick(batch, indices)
            try:
                answer: T | LinkError = self._context.peers.call(
                    peer, lambda link, until, part=part: ask(link, part, until), deadline=deadline)  # type: ignore[misc]
            except LinkError as error:
                answer = error
            answers.append((number, part, answer))
        return answers

    # --- the rest -------------------------------------------------------------------------------------------------------

    def remove(self, hashes: PrefixHashes, *, shard: int = 0, deadline_ms: float | None = None) -> RemoveResult:
        """Removes the blocks for good, at every worker: REMOVED, PENDING (`pending_workers` have not confirmed yet) or ABSENT, a
        block each. Goes through the master: MasterUnavailable when it does not answer (the removal may have been made)."""
        batch = self._batch(hashes, shard)
        deadline = deadline_of(deadline_ms, CALL_MS)
        outcomes: list[RemoveOutcome] = []
        pending: dict[str, None] = {}
        for start in range(0, len(batch), MAX_BATCH_KEYS):
            part = batch.slice(start, start + MAX_BATCH_KEYS)
            request = pb.RemoveRequest(namespace=self._spec.uid, keys=part.keys)
            reply = self._context.master.call("Remove", request, deadline=deadline)
            if self._context.mirror is not None:
                self._context.mirror.index.forget(self._spec.uid, part.split())
            outcomes += [_REMOVED[code] for code in reply.outcomes]
            pending.update(dict.fromkeys(reply.pending_workers))
        return RemoveResult(outcomes, list(pending))

    def pin(self, hashes: PrefixHashes, *, level: Literal["soft", "hard"] = "soft", ttl_s: float = 3600, shard: int = 0,
            deadline_ms: float | None = None) -> PinResult:  # fmt: skip
        """Wishes that the blocks stay for `ttl_s` (an earlier pin of a block is replaced). "soft": evicted last in their tier;
        "hard": never evicted, as far as a quarter of a tier goes. Counts for those that come later too; remove, expiry and a
        worker's loss take pinned blocks all the same. Kept by the master, over restarts. Raises QuotaExceeded (65,536 pins in a
        pool), MasterUnavailable (the pin may have been made), InvalidArgument."""
        batch = self._batch(hashes, shard)
        wish, ttl_ms = level_of(level), check_ttl_s(ttl_s)
        deadline = deadline_of(deadline_ms, CALL_MS)

        def ask(keys: bytes) -> pb.PinReply:
            request = pb.PinRequest(namespace=self._spec.uid, keys=keys, level=wish, ttl_ms=ttl_ms)
            reply: pb.PinReply = self._context.master.call("Pin", request, deadline=deadline)
            return reply

        return _pinned(batch, ask)

    def unpin(self, hashes: PrefixHashes, *, shard: int = 0, deadline_ms: float | None = None) -> PinResult:
        """Ends pins of these blocks."""
        batch = self._batch(hashes, shard)
        deadline = deadline_of(deadline_ms, CALL_MS)

        def ask(keys: bytes) -> pb.PinReply:
            reply: pb.PinReply = self._context.master.call(
                "Unpin", pb.UnpinRequest(namespace=self._spec.uid, keys=keys), deadline=deadline)  # fmt: skip
            return reply

        return _pinned(batch, ask)

    def keyed(self) -> Keyed:
        """Lookups and gets in which each key stands for itself, for engines whose keys are no chains."""
        return Keyed(self._context, self._spec, self._counters)

    def clear(self, *, deadline_ms: float | None = None) -> int:
        """Removes every block of the namespace, all shards, for good; how many. Goes through the master, as `remove` does."""
        self._context.check()
        request = pb.RemoveRequest(namespace=self._spec.uid, all=True)
        reply = self._context.master.call("Remove", request, deadline=deadline_of(deadline_ms, CALL_MS))
        return int(reply.n_removed)

    def stats(self) -> dict[str, Any]:
        """This client's counters of the namespace (gets, puts, hits by tier, misses by cause, outcomes, bytes) and its mirror's.
        Asks nobody."""
        self._context.check()
        mirror = self._context.mirror
        return {"namespace": self.name, **self._counters.as_dict(), "mirror": None if mirror is None else mirror.stats()}


def _hint(retain_s: float | None, priority: int | None) -> int:
    return pack_hint(check_seconds("retain_s", retain_s), check_priority(priority))


def _pinned(batch: KeyBatch, ask: Callable[[bytes], pb.PinReply]) -> PinResult:
    outcomes: list[PinOutcome] = []
    pending: dict[str, None] = {}
    for start in range(0, len(batch), MAX_BATCH_KEYS):
        reply = ask(batch.slice(start, start + MAX_BATCH_KEYS).keys)
        outcomes += [_PIN_OUTCOMES[code] for code in reply.outcomes]
        pending.update(dict.fromkeys(reply.pending_workers))
    return PinResult(outcomes, list(pending))


def _shards(shard: int, shards: Sequence[int] | None) -> list[int]:
    if shards is None:
        wanted = [shard]
    else:
        wanted = list(shards)
        if not wanted:
            raise InvalidArgument("shards: none given")
    for one in wanted:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= MAX_SHARD:
            raise InvalidArgument(f"shard: {one!r} is not an integer in 0..{MAX_SHARD}")
    return wanted
