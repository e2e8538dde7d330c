"""The get: places from the mirror at once, the tail's from the master meanwhile, reads from workers, replicas after a failure.

Carries out what `core.fetch` decides. A master that does not answer only costs knowledge: what is known is read, the rest is a
miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from kvpool.client.context import Context, Counters, pick, pick_views
from kvpool.client.master import Pending
from kvpool.client.peers import Peer, miss_of
from kvpool.client.results import GetResult, Source
from kvpool.core.fetch import ROUNDS_MAX, Candidates, Fetch, Read
from kvpool.core.keys import KeyBatch, split_keys
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import CAUSES, KEY_BYTES, MAX_BATCH_KEYS, MissCause, Tier, Tiers
from kvpool.transport.base import LinkCause, LinkError, ReadResult, WorkerLink
from kvpool.v1 import master_pb2 as pb

PATIENCE_S: Final = 0.2  # for a worker that is not ready yet (catching up), where it is the only one
HoldOf = Callable[[Peer, int], int]  # (peer, block) -> hold id of the caller's, 0: none


def no_hold(_peer: Peer, _block: int) -> int:
    return 0


class Getter:
    """One get. Used by one thread; its parallel reads only touch their own buffers."""

    def __init__(self, context: Context, spec: NamespaceSpec, batch: KeyBatch, outs: Sequence[memoryview], *,
                 deadline: float, byte_range: tuple[int, int] = (0, 0), hold_of: HoldOf = no_hold) -> None:  # fmt: skip
        self.context, self.spec = context, spec
        self.batch = batch if len(outs) == len(batch) else batch.slice(0, len(outs))
        self.outs, self.deadline, self.byte_range, self.hold_of = outs, deadline, byte_range, hold_of
        self.fetch = Fetch(len(outs))
        self.complete = True
        self.master_cause: MissCause | None = None
        self.transports: dict[int, str] = {}
        self.failure = ""  # in words, of the worker that could not be used
        self._tail: Pending | None = None
        self._tail_at = 0
        self._asked_master = False
        self._cost = context.peers.costs()

    def run(self, held: Sequence[Candidates] = ()) -> GetResult:
        """Fills the buffers. `held`: who promised the leading blocks."""
        fetch, n = self.fetch, len(self.outs)
        if n == 0:
            return GetResult(0)
        try:
            self._locate(held)
            for _ in range(ROUNDS_MAX):
                reads = fetch.plan(self._cost)
                if reads:
                    self._read(reads)
                elif fetch.n_leading == n or fetch.refused == fetch.n_leading or not self._ask_more():
                    break
                if fetch.n_leading == n or time.monotonic() >= self.deadline:
                    break
        finally:
            if self._tail is not None:
                self._tail.cancel()
        result = self._result()
        if self.context.spreading is not None and not self.byte_range[0]:
            self.context.spreading.got(self.batch, result, fetch.peer_of)
        return result

    # --- where the blocks are -------------------------------------------------------------------------------------------

    def _locate(self, held: Sequence[Candidates]) -> None:
        """Leading blocks that are known here; the question for the others goes to the master, answered while those are read."""
        known = leading(with_held(held, leading(self.context.known(self.spec.uid, self.batch.split()) or [])))
        self.fetch.locate(0, known)
        self._tail_at = len(known)
        if self._tail_at < len(self.outs):
            self._tail = self._begin_locate(self._tail_at)

    def _begin_locate(self, start: int) -> Pending | None:
        keys = self.batch.keys[start * KEY_BYTES :]
        request = pb.LocateRequest(namespace=self.spec.uid, keys=keys, prefix=True)
        pending = self.context.master.begin("Locate", request, deadline=self.deadline)
        if pending is None:
            self.complete = False
        return pending

    def _ask_more(self) -> bool:
        """Takes the master's answer for the tail, or asks it once more about what turned out to be elsewhere. False: no news."""
        start = self.fetch.n_leading
        pending: Pending | None
        if self._tail is not None and start == self._tail_at:
            pending, self._tail = self._tail, None
        elif start < self._tail_at and not self._asked_master:
            self._asked_master = True
            pending = self._begin_locate(start)
        else:
            return False
        reply = None if pending is None else pending.result()
        if reply is None:
            self.complete = False
            return False
        self.complete = self.complete and reply.complete
        if reply.miss_cause:
            self.master_cause = CAUSES[reply.miss_cause - 1] if reply.miss_cause <= len(CAUSES) else MissCause.UNKNOWN
        places = leading(self.context.places(reply))
        self.fetch.locate(start, places)
        self._tail_at = max(self._tail_at, start + len(places))
        return bool(places)

    # --- reading --------------------------------------------------------------------------------------------------------

    def _read(self, reads: Sequence[Read]) -> None:
        answers = self.context.run_all([partial(self._read_one, read) for read in reads])
        for read, answer in zip(reads, answers, strict=True):
            if isinstance(answer, LinkError):
                self.failure = str(answer)
                self.fetch.failed(read, miss_of(answer))
                continue
            if answer.error is not None:
                self.failure = str(answer.error)
            stale = self.fetch.answered(read, answer.codes, answer.tiers, answer.sizes)
            if stale and self.context.mirror is not None:
                self.context.mirror.index.stale(self.spec.uid, read.peer, pick(self.batch, stale).keys)

    def _read_one(self, read: Read) -> ReadResult | LinkError:
        peers = self.context.peers
        peer = peers.get(read.peer)
        if peer is None:
            return LinkError(LinkCause.CLOSED, "the worker is not known any more")
        batch, outs = pick(self.batch, read.blocks), pick_views(self.outs, read.blocks)
        hold_id = self.hold_of(peer, read.blocks[0])

        def ask(link: WorkerLink, until: float) -> ReadResult:
            self.transports[read.peer] = link.transport
            return link.read(batch, outs, chunk_bytes=self.spec.chunk_bytes, deadline=until, byte_range=self.byte_range,
                             hold_id=hold_id, verify=self.context.verify, first_miss=True)  # fmt: skip

        patient_until = 0.0 if read.alternatives else time.monotonic() + PATIENCE_S
        started = time.monotonic()
        for _ in range(2):
            try:
                answer = peers.call(peer, ask, deadline=self.deadline, alternatives=read.alternatives,
                                    patient_until=patient_until)  # fmt: skip
            except LinkError as error:
                if error.cause is LinkCause.NOT_FOUND and hold_id:
                    hold_id = 0  # the hold is over; the blocks may still be there
                    continue
                return error
            break
        if answer.error is not None:
            peers.note(peer, answer.error, patience_ms=(time.monotonic() - started) * 1e3)
        return answer

    # --- the answer -----------------------------------------------------------------------------------------------------

    def _result(self) -> GetResult:
        fetch, n = self.fetch, self.fetch.n_leading
        sources = self._sources(n)
        sizes = fetch.sizes[:n] if self.byte_range[1] == 0 else [self.byte_range[1]] * n
        if n == len(self.outs):
            return GetResult(n, None, sources, sizes, True)
        if fetch.refused == n:
            return GetResult(n, MissCause.UNKNOWN, sources, sizes, self.complete, reason=self._refusal(n))
        found = fetch.why()
        if found is None:
            cause = MissCause.TIMEOUT if time.monotonic() >= self.deadline else self.master_cause or MissCause.UNKNOWN
            return GetResult(n, cause, sources, sizes, self.complete)
        cause, peer = found
        if cause is MissCause.STALE_INDEX and self.master_cause not in (None, MissCause.NEVER_STORED, MissCause.UNKNOWN):
            cause = self.master_cause or cause  # the master knows why
        worker = self.context.peers.worker_id(peer)
        return GetResult(n, cause, sources, sizes, self.complete, miss_worker=worker, reason=self.failure)

    def _refusal(self, index: int) -> str:
        if self.byte_range[1]:
            return f"byte_range: {self.byte_range} goes past the value stored for block {index}"
        return f"out[{index}]: {self.outs[index].nbytes} bytes; the stored value is larger"

    def _sources(self, n: int) -> list[Source]:
        fetch = self.fetch
        peers, tiers = fetch.peer_of[:n], fetch.tiers[:n]
        if n and peers.count(peers[0]) == n and tiers.count(tiers[0]) == n:
            return [self._source(peers[0], tiers[0])] * n
        shared: dict[tuple[int, int], Source] = {}
        found = []
        for place in zip(peers, tiers, strict=True):
            source = shared.get(place)
            if source is None:
                source = shared[place] = self._source(*place)
            found.append(source)
        return found

    def _source(self, peer: int, tiers: int) -> Source:
        return Source(self.context.peers.worker_id(peer), tier_of(tiers), self.transports.get(peer, ""))


def with_held(held: Sequence[Candidates], known: list[Candidates]) -> list[Candidates]:
    """Places of the leading blocks: who promised them, and who else is known to have them."""
    merged = list(known)
    for index, promised in enumerate(held):
        if index >= len(merged):
            merged.append(promised)
        elif promised:
            merged[index] = (*promised, *(place for place in merged[index] if place[0] != promised[0][0]))
    return merged


def tier_of(tiers: int) -> Tier:
    """The tier that a read used, of the set that the worker told."""
    if tiers & Tiers.DEVICE:
        return Tier.DEVICE
    return Tier.SSD if tiers == Tiers.SSD else Tier.DRAM


def count_get(counters: Counters, result: GetResult, n_asked: int) -> None:
    """Adds one get to the namespace's counters."""
    with counters.lock:
        counters.gets += 1
        counters.blocks_asked += n_asked
        counters.bytes_got += sum(result.sizes)
        _count_tiers(counters.hits, result.sources)
        if result.miss is not None:
            name = result.miss.value
            counters.misses[name] = counters.misses.get(name, 0) + n_asked - result.n_blocks


def _count_tiers(hits: dict[str, int], sources: Sequence[Source]) -> None:
    if sources and sources[0] is sources[-1] and sources.count(sources[0]) == len(sources):
        name = sources[0].tier.value
        hits[name] = hits.get(name, 0) + len(sources)
        return
    for source in sources:
        hits[source.tier.value] = hits.get(source.tier.value, 0) + 1


def locate_all(context: Context, spec: NamespaceSpec, batch: KeyBatch, *, deadline: float) -> list[Candidates]:
    """Who has the leading keys of the batch: from the mirror, the tail that it does not know from the master. [<= n], no gap."""
    known = leading(context.known(spec.uid, batch.split()) or [])
    while len(known) < len(batch):
        asked = ask_locate(context, spec, batch.keys[len(known) * KEY_BYTES :][: MAX_BATCH_KEYS * KEY_BYTES], deadline=deadline)
        more = leading(asked or [])
        known += more
        if asked is None or len(more) < MAX_BATCH_KEYS:
            break
    return known


def locate_everywhere(context: Context, spec: NamespaceSpec, keys: bytes, *, deadline: float) -> list[Candidates]:
    """All replicas of each key (packed) that the master or the mirror knows of. [n]"""
    known = context.known(spec.uid, split_keys(keys)) or [()] * (len(keys) // KEY_BYTES)
    for start in range(0, len(known), MAX_BATCH_KEYS):
        part = keys[start * KEY_BYTES : (start + MAX_BATCH_KEYS) * KEY_BYTES]
        for index, there in enumerate(ask_locate(context, spec, part, deadline=deadline) or ()):
            known[start + index] = tuple({**dict(known[start + index]), **dict(there)}.items())
    return known


def ask_locate(context: Context, spec: NamespaceSpec, keys: bytes, *, deadline: float) -> list[Candidates] | None:
    """The master's places of up to MAX_BATCH_KEYS keys (packed); None when it is away."""
    request: Any = pb.LocateRequest(namespace=spec.uid, keys=keys, prefix=False)
    reply = context.master.ask("Locate", request, deadline=deadline)
    return None if reply is None else context.places(reply)


def leading(places: list[Candidates]) -> list[Candidates]:
    """Up to the first key that nobody has."""
    return places[: places.index(())] if () in places else places
