"""Blocks as keys of their own: what is there, how large it is, and a get in which one miss does not end the others.

`Getter` serves the longest prefix of a chain; here each key stands for itself, as engines with free keys want it. Replicas are
tried one after the other; places come from the mirror, for what it does not know from the master.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from kvpool.client.context import Context, Counters
from kvpool.client.peers import STATES_THERE, miss_of
from kvpool.client.reading import ask_locate, tier_of
from kvpool.core.fetch import PROBE_MS, ROUNDS_MAX, SSD_COST, Candidates
from kvpool.core.keys import KeyBatch, pack_keys, split_keys
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import HASH_BYTES, MAX_BATCH_KEYS, BlockCode, HoldId, Key, MissCause, Tiers, miss_cause
from kvpool.transport.base import Buffers, Held, LinkError, ReadResult, Strided, Touched, WorkerLink
from kvpool.v1 import master_pb2 as pb

PATIENCE_S: Final = 0.2  # for a worker that is not ready yet (catching up)
_HITS: Final = (BlockCode.HIT_INLINE, BlockCode.HIT_SHARED)


@dataclass(slots=True)
class KeyedResult:
    """Per key of a keyed get. `sizes`: bytes stored, -1 for a miss. `got`: whether they are in its buffer. `misses`: why not;
    None for what was got, and what is there but larger than its buffer (or ends before the byte range)."""

    sizes: list[int]
    got: list[bool]
    misses: list[MissCause | None]


@dataclass(slots=True)
class KeyedHold:
    """`there`: which keys are held. [n]"""

    there: list[bool]
    promises: list[tuple[WorkerLink, HoldId]]

    def release(self) -> None:
        """Tells the workers; never raises for one that is gone. Idempotent."""
        promises, self.promises = self.promises, []
        for link, hold_id in promises:
            link.release([hold_id])


class Keyed:
    """The keys of one namespace, one by one. Made by `Namespace.keyed`; thread-safe. `hashes`: n 32-byte hashes back to back."""

    def __init__(self, context: Context, spec: NamespaceSpec, counters: Counters) -> None:
        self._context, self._spec, self._counters = context, spec, counters

    def locate(self, hashes: bytes, *, deadline: float, shard: int = 0) -> list[Candidates]:
        """Who is said to have each key, as (peer, Tiers) of workers that can be asked; () when nobody has it. [n]"""
        self._context.check()
        return self._locate(split_keys(pack_keys(hashes, shard=shard)), deadline=deadline)

    def present(self, hashes: bytes, *, deadline: float) -> list[bool]:
        """Whether each key is there. A worker that is only suspected to be gone is asked itself, for a moment. [n]"""
        places = self.locate(hashes, deadline=deadline)
        peers = self._context.peers
        there = [any(self._is_up(number) for number, _ in candidates) for candidates in places]
        doubtful: dict[int, list[int]] = {}
        for index, candidates in enumerate(places):
            if candidates and not there[index]:
                doubtful.setdefault(candidates[0][0], []).append(index)
        for number, indices in doubtful.items():
            peer = peers.get(number)
            if peer is None:
                continue
            batch = KeyBatch(self._spec.uid, b"".join(pack_keys(hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES], shard=0)
                                                      for i in indices), chained=False)  # fmt: skip

            def touch(link: WorkerLink, until: float, batch: KeyBatch = batch) -> Touched:
                return link.touch(batch, wait_listed=False, deadline=until)

            try:
                touched = peers.call(peer, touch, deadline=min(deadline, time.monotonic() + PROBE_MS / 1e3))
            except LinkError:
                continue
            for index, tiers in zip(indices, touched.tiers, strict=True):
                there[index] = bool(tiers)
        return there

    def _is_up(self, number: int) -> bool:
        peer = self._context.peers.get(number)
        return peer is not None and peer.state in STATES_THERE

    def sizes(self, hashes: bytes, *, deadline: float, shard: int = 0) -> list[int]:
        """Bytes stored under each key, -1 where it is not there. Moves no block bytes. [n]"""
        end = self._spec.block_bytes - 1  # only a value of the largest size has this byte; all others answer their size alone
        n = len(hashes) // HASH_BYTES
        outs = Strided(memoryview(bytearray(n)), 1) if n else []
        return self.get(hashes, outs, deadline=deadline, byte_range=(end, 1), shard=shard).sizes

    def get(self, hashes: bytes, outs: Buffers, *, deadline: float, byte_range: tuple[int, int] = (0, 0),
            shard: int = 0) -> KeyedResult:  # fmt: skip
        """Each key into its buffer (writable, uint8; what is larger than its buffer is not served). Nobody writes to the buffers
        any more when it returns or raises. A dead pool is a miss, never an error."""
        self._context.check()
        keys = split_keys(pack_keys(hashes, shard=shard))
        reading = _Reading(self._context, self._spec, keys, outs, byte_range=byte_range, deadline=deadline)
        for _ in range(ROUNDS_MAX):
            if not reading.round(self._locate) or time.monotonic() >= deadline:
                break
        self._count(reading)
        return reading.result()

    def hold(self, hashes: bytes, *, ttl_ms: int, deadline: float) -> KeyedHold:
        """The workers' promise that the blocks that are there stay readable for `ttl_ms`, or until it is released."""
        keys = split_keys(pack_keys(hashes, shard=0))
        there = [False] * len(keys)
        promises: list[tuple[WorkerLink, HoldId]] = []
        by_peer: dict[int, list[int]] = {}
        for index, places in enumerate(self.locate(hashes, deadline=deadline)):
            if places:
                by_peer.setdefault(places[0][0], []).append(index)
        for number, indices in by_peer.items():
            peer = self._context.peers.get(number)
            batch = KeyBatch(self._spec.uid, b"".join(keys[i] for i in indices), chained=False)
            if peer is None:
                continue

            def ask(link: WorkerLink, until: float, batch: KeyBatch = batch) -> tuple[WorkerLink, Held]:
                return link, link.hold(batch, ttl_ms, deadline=until, first_miss=False)

            try:
                link, held = self._context.peers.call(peer, ask, deadline=deadline)
            except LinkError:
                continue
            if held.hold_id:
                promises.append((link, held.hold_id))
            for index, code in zip(indices, held.codes, strict=True):
                there[index] = code == BlockCode.HIT_SHARED
        return KeyedHold(there, promises)

    def address(self, peer: int) -> str:
        """Where a peer of `locate` is: "host:port", "" when it is not known any more."""
        found = self._context.peers.get(peer)
        return "" if found is None else found.address

    def keys(self, *, deadline: float) -> Iterator[Key]:
        """All keys of the namespace, of every shard, as the master knows them while this goes on. MasterUnavailable when it does
        not answer by the deadline (a point of time.monotonic())."""
        self._context.check()
        cursor = b""
        while True:
            request = pb.ListBlocksRequest(namespace=self._spec.uid, limit=MAX_BATCH_KEYS, after=cursor)
            reply = self._context.master.call("ListBlocks", request, deadline=deadline)
            yield from split_keys(reply.keys)
            cursor = reply.cursor
            if not cursor:
                return

    def remove_all(self, *, deadline: float) -> list[Key]:
        """Removes every block of the namespace for good; the keys that there were. MasterUnavailable as `keys`."""
        found = list(self.keys(deadline=deadline))
        self._context.master.call("Remove", pb.RemoveRequest(namespace=self._spec.uid, all=True), deadline=deadline)
        if self._context.mirror is not None:
            self._context.mirror.index.forget(self._spec.uid, found)
        return found

    def _locate(self, keys: Sequence[Key], *, deadline: float) -> list[Candidates]:
        known = self._context.known(self._spec.uid, keys) or [()] * len(keys)
        found = [self._usable(places) for places in known]
        open_ = [index for index, places in enumerate(found) if not places]
        for start in range(0, len(open_), MAX_BATCH_KEYS):
            part = open_[start : start + MAX_BATCH_KEYS]
            asked = ask_locate(self._context, self._spec, b"".join(keys[i] for i in part), deadline=deadline)
            if asked is None:
                break
            for index, places in zip(part, asked, strict=True):
                found[index] = self._usable(places)
        return found

    def _usable(self, places: Candidates) -> Candidates:
        cost = self._context.peers.cost
        return tuple(place for place in places if isinstance(cost(place[0]), int))

    def _count(self, reading: _Reading) -> None:
        counters = self._counters
        with counters.lock:
            counters.gets += 1
            counters.blocks_asked += len(reading.keys)
            for index, got in enumerate(reading.got):
                if got:
                    counters.bytes_got += reading.byte_range[1] or reading.sizes[index]
                    name = tier_of(reading.tiers[index]).value
                    counters.hits[name] = counters.hits.get(name, 0) + 1
                elif reading.sizes[index] < 0:
                    name = (reading.misses[index] or MissCause.UNKNOWN).value
                    counters.misses[name] = counters.misses.get(name, 0) + 1


class _Locate(Protocol):
    def __call__(self, keys: Sequence[Key], *, deadline: float) -> list[Candidates]: ...


class _Reading:
    """One keyed get. Used by one thread; its parallel reads touch only their own buffers."""

    def __init__(self, context: Context, spec: NamespaceSpec, keys: list[Key], outs: Buffers, *, byte_range: tuple[int, int],
                 deadline: float) -> None:  # fmt: skip
        n = len(keys)
        self.context, self.spec, self.keys, self.outs = context, spec, keys, outs
        self.byte_range, self.deadline = byte_range, deadline
        self.sizes, self.tiers, self.got = [-1] * n, [0] * n, [False] * n
        self.misses: list[MissCause | None] = [None] * n
        self._tried: dict[int, set[int]] = {}
        self._open = list(range(n))

    def result(self) -> KeyedResult:
        for index in self._open:
            if self.misses[index] is None:
                late = time.monotonic() >= self.deadline
                self.misses[index] = MissCause.TIMEOUT if late else MissCause.UNKNOWN
        return KeyedResult(self.sizes, self.got, self.misses)

    def round(self, locate: _Locate) -> bool:
        """Asks the best worker of each open key that was not asked yet. False: nothing more to do."""
        places = locate([self.keys[i] for i in self._open], deadline=self.deadline)
        work: dict[int, list[int]] = {}
        others = False  # could still serve some of it
        for index, candidates in zip(self._open, places, strict=True):
            tried = self._tried.get(index, ())
            peer = self._best(candidates, tried)
            if peer >= 0:
                work.setdefault(peer, []).append(index)
                others = others or len(candidates) > len(tried) + 1
        if not work:
            return False
        answers = self.context.run_all([partial(self._read, peer, indices, others) for peer, indices in work.items()])
        for (peer, indices), answer in zip(work.items(), answers, strict=True):
            self._take(peer, indices, answer)
        self._open = [i for i in self._open if self.sizes[i] < 0]
        return bool(self._open)

    def _best(self, candidates: Candidates, tried: Collection[int]) -> int:
        best, best_price = -1, 0
        for peer, tiers in candidates:
            price = self.context.peers.cost(peer)
            if isinstance(price, MissCause) or peer in tried:
                continue
            price += 0 if tiers & (Tiers.DRAM | Tiers.DEVICE) else SSD_COST
            if best < 0 or price < best_price:
                best, best_price = peer, price
        return best

    def _read(self, number: int, indices: list[int], alternatives: bool) -> ReadResult | LinkError:
        peers = self.context.peers
        peer = peers.get(number)
        assert peer is not None  # its cost was asked
        batch = KeyBatch(self.spec.uid, b"".join(self.keys[i] for i in indices), chained=False)
        outs = self.outs if len(indices) == len(self.outs) else [self.outs[i] for i in indices]

        def ask(link: WorkerLink, until: float) -> ReadResult:
            return link.read(batch, outs, chunk_bytes=self.spec.chunk_bytes, deadline=until, byte_range=self.byte_range,
                             verify=self.context.verify)  # fmt: skip

        started = time.monotonic()
        try:
            answer = peers.call(peer, ask, deadline=self.deadline, alternatives=alternatives,
                                patient_until=started + PATIENCE_S)  # fmt: skip
        except LinkError as error:
            return error
        if answer.error is not None:
            peers.note(peer, answer.error, patience_ms=(time.monotonic() - started) * 1e3)
        return answer

    def _take(self, peer: int, indices: list[int], answer: ReadResult | LinkError) -> None:
        stale = []
        for position, index in enumerate(indices):
            if isinstance(answer, LinkError):
                self._missed(index, peer, miss_of(answer))
                continue
            code = answer.codes[position]
            if code in _HITS or code == BlockCode.REJECTED:
                self.sizes[index], self.tiers[index] = answer.sizes[position], answer.tiers[position]
                self.got[index] = code in _HITS
                self.misses[index] = None
                continue
            cause = miss_cause(code) or MissCause.UNKNOWN
            self._missed(index, peer, cause)
            if cause not in (MissCause.TIMEOUT, MissCause.WORKER_LOST):
                stale.append(self.keys[index])
        if stale and self.context.mirror is not None:
            self.context.mirror.index.stale(self.spec.uid, peer, b"".join(stale))

    def _missed(self, index: int, peer: int, cause: MissCause) -> None:
        self._tried.setdefault(index, set()).add(peer)
        self.misses[index] = cause
