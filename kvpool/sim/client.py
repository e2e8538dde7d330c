"""A simulated client process: the real mirror index, peers, read plan, breakers and placement; calls wait on the simulated loop.

`SimClient` stands for `client.reading.Getter`, `client.writing.Putter`, `client.holds` and `client.mirror`, `Masters` for
`client.master.MasterLink`: the same steps in the same order. Links to workers are here too: over the network as `transport.tcp`,
from the host's shared memory as `transport.shm`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from kvpool.client.mirror_index import MirrorIndex
from kvpool.client.peers import NOT_YET, RETRY_MS, Peer, Peers, miss_of
from kvpool.client.placing import TARGETS_MAX, key_above
from kvpool.client.reading import PATIENCE_S, leading, with_held
from kvpool.client.writing import PATIENCE_S as PUT_PATIENCE_S
from kvpool.core.fetch import CALL_MS, PROBE_MS, ROUNDS_MAX, Breaker, Candidates, Fetch, Read, attempt_ms
from kvpool.core.keys import KeyBatch
from kvpool.core.leaders import LeaderSearch
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.placement import place
from kvpool.core.types import (
    CAUSES,
    KEY_BYTES,
    BlockCode,
    MissCause,
    NamespaceUid,
    Outcome,
    Tiers,
    WorkerId,
    miss_cause,
    miss_code,
)
from kvpool.errors import InvalidArgument, KVPoolError, MasterUnavailable, NamespaceNotFound
from kvpool.sim.clock import Process
from kvpool.sim.disk import sleep
from kvpool.sim.memory import SimDram
from kvpool.sim.network import Network, Pool, Refused, Reset
from kvpool.sim.values import PART_BYTES, PARTS, sums_of, value_of
from kvpool.sim.worker import BODY_PIECES, Answer, Ask, Body
from kvpool.transport.base import LinkCause, LinkError
from kvpool.v1 import master_pb2 as pb

T = TypeVar("T")

_OUTCOMES: Final = {int(BlockCode.STORED): Outcome.STORED, int(BlockCode.ALREADY): Outcome.ALREADY,
                    int(BlockCode.UNLISTED): Outcome.UNLISTED, int(BlockCode.FULL): Outcome.FULL}  # fmt: skip
_RANK: Final = {Outcome.STORED: 0, Outcome.ALREADY: 1, Outcome.UNLISTED: 2, Outcome.FULL: 3, Outcome.REJECTED: 4}
_INLINE, _SHARED = int(BlockCode.HIT_INLINE), int(BlockCode.HIT_SHARED)
_CORRUPT, _STALE = miss_code(MissCause.CORRUPT), miss_code(MissCause.STALE_INDEX)
MIRROR_BYTES: Final = 1 << 30
AWAY_MS: Final = (200, 1000)


@dataclass(slots=True)
class Got:
    """Of a get. `values`: of the leading blocks; `paths`: "tcp" or "shm", with the worker's process."""

    values: list[bytes]
    paths: list[str]
    cause: MissCause | None
    complete: bool
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One worker's promise for blocks start..start+count-1 of the asked batch."""

    peer: int
    hold_id: int
    start: int
    count: int


@dataclass(slots=True)
class _Block:
    """`client.writing._Block`."""

    outcome: Outcome = Outcome.REJECTED
    known: bool = False  # the outcome is somebody's answer
    on: set[int] = field(default_factory=set)
    tried: set[int] = field(default_factory=set)

    def there(self, peer: int, outcome: Outcome) -> None:
        if not self.on or _RANK[outcome] < _RANK[self.outcome]:
            self.outcome = outcome
        self.on.add(peer)

    def refused(self, peer: int, outcome: Outcome) -> None:
        self.tried.add(peer)
        if not self.on and (not self.known or _RANK[outcome] <= _RANK[self.outcome]):
            self.outcome, self.known = outcome, True


class Masters:
    """Calls to the master that leads."""

    def __init__(self, network: Network, process: Process, addresses: Sequence[str]) -> None:
        self._network, self._process = network, process
        self._search = LeaderSearch(addresses)
        self._breaker = Breaker(failures_max=1, open_ms_min=AWAY_MS[0], open_ms_max=AWAY_MS[1])
        self._pools: dict[str, Pool] = {}

    @property
    def address(self) -> str:
        return self._search.current

    def _now_ms(self) -> float:
        return self._process.now_s() * 1e3

    async def _once(self, method: str, request: Any, until: float) -> Any:
        """The answer of the current one; KVPoolError for what it says; MasterUnavailable when it says nothing."""
        address = self.address
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = Pool(self._network, self._process, address)
        try:
            answer = await pool.call((method, request, until - self._process.loop.time()), until)
        except (ConnectionError, TimeoutError) as error:
            raise MasterUnavailable(str(error)) from error
        if isinstance(answer, KVPoolError):
            raise answer
        if not self._search.accepts(answer.epoch, now_s=self._process.now_s()):
            raise MasterUnavailable("a leader of the past")
        return answer

    def heard(self) -> None:
        self._breaker.succeeded()

    def failed(self) -> bool:
        """True: the last of a round."""
        whole_round = self._search.failed()
        if whole_round:
            self._breaker.failed(self._now_ms(), MissCause.UNKNOWN)
        return whole_round

    async def call(self, method: str, request: Any, until: float) -> Any:
        """Tries until the deadline. MasterUnavailable then."""
        loop = self._process.loop
        while True:
            left = until - loop.time()
            if left <= 0:
                raise MasterUnavailable("no answer from the master within the deadline")
            try:
                once_until = min(until, loop.time() + CALL_MS / 1e3) if self._search.several else until
                answer = await self._once(method, request, once_until)
            except MasterUnavailable:
                if self.failed():
                    await sleep(loop, min(0.1, max(0.0, until - loop.time())))
                continue
            self.heard()
            return answer

    async def ask(self, method: str, request: Any, until: float) -> Any:
        """The answer, or None when the master is away."""
        loop = self._process.loop
        while self._breaker.usable(self._now_ms()):
            probing = self._breaker.begin(self._now_ms())
            left = min(until - loop.time(), (PROBE_MS if probing else CALL_MS) / 1e3)
            if left <= 0:
                return None
            try:
                answer = await self._once(method, request, loop.time() + left)
            except (NamespaceNotFound, InvalidArgument):
                raise
            except KVPoolError:
                if left >= 0.1 and self.failed():
                    return None
                continue
            self.heard()
            return answer
        return None


class SimClient:
    """One client. `memories`: what a local client can look into, by (worker, incarnation). `wire_flips`: share of blocks of which
    a bit turns over on the way. `stumbles`: share of copies out of shared memory in the middle of which it stands still."""

    def __init__(
        self, process: Process, network: Network, *, masters: Sequence[str], memories: Mapping[tuple[str, int], SimDram],
        mirrored: bool, wire_flips: float, on_flip: Callable[[], None], stumbles: float, on_stumble: Callable[[], None],
    ) -> None:  # fmt: skip
        self.process, self.network, self.loop = process, network, process.loop
        self.memories, self.wire_flips, self.on_flip = memories, wire_flips, on_flip
        self._stumbles, self._on_stumble = stumbles, on_stumble
        self.masters = Masters(network, process, masters)
        options: Any = None
        self.peers = Peers(host_id=process.host, options=options, now_s=process.now_s)
        self.index = MirrorIndex(self.peers, bytes_max=MIRROR_BYTES, now_s=process.now_s) if mirrored else None
        self.connected = False
        self._pools: dict[int, Pool] = {}
        if mirrored:
            process.spawn(self._watch(), name=f"{process.name} mirror")

    def wire(self, data: bytes) -> bytes:
        """What arrives of it."""
        if not self.wire_flips or self.process.random.random() >= self.wire_flips:
            return data
        self.on_flip()
        raw = bytearray(data)
        raw[self.process.random.randrange(len(raw))] ^= 1
        return bytes(raw)

    def stumble(self) -> None:
        """In the middle of a copy."""
        if self._stumbles and self.process.random.random() < self._stumbles:
            self._on_stumble()

    def follow(self, uid: NamespaceUid) -> None:
        """Before the mirror's stream begins."""
        if self.index is not None:
            self.index.want(uid)

    # --- the mirror, as in `client.mirror` ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        assert self.index is not None
        links = Masters(self.network, self.process, self.masters._search.addresses)
        while True:
            uids, epoch, seq = self.index.begin_stream()
            try:
                end = await self.network.connect(self.process, links.address, self.loop.time() + 1.0)
                try:
                    end.send(("Watch", pb.WatchRequest(namespaces=uids, epoch=epoch, after_seq=seq), None))
                    while True:
                        event = await end.recv(self.loop.time() + 15.0)
                        if isinstance(event, KVPoolError):
                            break
                        if not self.connected and not links._search.accepts(event.epoch, now_s=self.process.now_s()):
                            break
                        self.connected = True
                        self.index.apply(event, frozenset(uids))
                finally:
                    end.close()
            except (ConnectionError, TimeoutError):
                pass
            self.connected = False
            links._search.failed()
            await sleep(self.loop, self.process.random.uniform(0.1, 0.5))

    # --- workers ----------------------------------------------------------------------------------------------------------

    async def _send(self, peer: Peer, ask: Ask, until: float, bodies: Sequence[Body] = ()) -> Answer:
        """One request on a link. Raises LinkError."""
        pool = self._pools.get(peer.number)
        if pool is None:
            pool = self._pools[peer.number] = Pool(self.network, self.process, peer.address)
        try:
            end = await pool.take(until)
            try:
                end.send(ask)
                for body in bodies:
                    await sleep(self.loop, 0.0003 * self.process.random.random())
                    end.send(body)
                answer: Answer = await end.recv(until)
            except BaseException:
                end.close()
                raise
            pool.give(end)
        except TimeoutError as error:
            raise LinkError(LinkCause.TIMEOUT, str(error)) from error
        except Refused as error:
            raise LinkError(LinkCause.REFUSED, str(error)) from error
        except Reset as error:
            raise LinkError(LinkCause.CLOSED, str(error)) from error
        if answer.refusal is not None:
            raise LinkError(answer.refusal, "refused")
        return answer

    async def _call(
        self, number: int, ask: Callable[[Peer, float], Awaitable[T]], *, until: float, alternatives: bool, patience_s: float
    ) -> T:
        """`Peers.call`."""
        peer = self.peers.get(number)
        if peer is None:
            raise LinkError(LinkCause.CLOSED, "the worker is not known any more")
        patient_until = self.loop.time() + patience_s
        attempt = 0
        while True:
            now = self.loop.time()
            probing = peer.breaker.begin(self.process.now_s() * 1e3)
            left_ms = attempt_ms((until - now) * 1e3, alternatives=alternatives, probing=probing)
            try:
                if left_ms <= 0:
                    raise LinkError(LinkCause.TIMEOUT, "no time left")
                if probing:
                    probe = Ask("stat", peer.incarnation, left_ms / 1e3)
                    await self._send(peer, probe, now + left_ms / 1e3)
                    left_ms = attempt_ms((until - self.loop.time()) * 1e3, alternatives=alternatives, probing=False)
                return_value = await ask(peer, self.loop.time() + left_ms / 1e3)
            except LinkError as error:
                self.peers.note(peer, error, patience_ms=left_ms)
                pause = RETRY_MS[min(attempt, len(RETRY_MS) - 1)] / 1e3
                attempt += 1
                if error.cause not in NOT_YET or self.loop.time() + pause >= min(patient_until, until):
                    raise
                await sleep(self.loop, pause)
                continue
            peer.breaker.succeeded()
            return return_value

    def places(self, reply: pb.LocateReply) -> list[Candidates]:
        """`Context.places`."""
        peer_of = {i.holder: self._learn(i) for i in reply.holder_infos}
        holders = np.frombuffer(reply.holders, dtype="<u4").tolist()
        found: list[Candidates] = []
        at = 0
        for n in reply.n_replicas:
            found.append(tuple((peer_of[holders[i]], reply.tiers[i]) for i in range(at, at + n) if holders[i] in peer_of))
            at += n
        return found

    def _learn(self, info: pb.HolderInfo) -> int:
        return self.peers.learn(
            info, state=info.state, free_bytes=info.free_bytes, capacity_bytes=info.capacity_bytes
        ).number

    def _known(self, uid: NamespaceUid, keys: Sequence[bytes]) -> list[Candidates] | None:
        return None if self.index is None else self.index.locate(uid, keys)

    # --- get, as in `client.reading` ---------------------------------------------------------------------------------------

    async def get(self, batch: KeyBatch, *, until: float, held: Sequence[Part] = ()) -> Got:
        return await _Get(self, batch, until, held).run()

    # --- put, as in `client.writing` ---------------------------------------------------------------------------------------

    async def put(self, spec: NamespaceSpec, batch: KeyBatch, *, until: float) -> list[Outcome]:
        keys = batch.split()
        states = [_Block() for _ in keys]
        above = key_above(batch)
        asked = [*([above] if above else ()), *keys]
        known = self._known(spec.uid, asked)
        if known is None:
            request = pb.LocateRequest(namespace=spec.uid, keys=b"".join(asked), prefix=False)
            reply = await self.masters.ask("Locate", request, until)
            known = self.places(reply) if reply is not None else [()] * len(asked)
        places, parents = (known[1:], known[0]) if above else (known, ())
        await self._confirm(spec, batch, states, places, until)
        if any(len(state.on) < spec.replicas for state in states):
            await self._write(spec, batch, states, parents, until)
        return [state.outcome for state in states]

    async def _confirm(
        self, spec: NamespaceSpec, batch: KeyBatch, states: list[_Block], places: Sequence[Candidates], until: float
    ) -> None:
        asked: dict[int, list[int]] = {}
        for index, candidates in enumerate(places):
            usable = [peer for peer, _ in candidates if isinstance(self.peers.cost(peer), int)]
            for peer in usable[: spec.replicas]:
                asked.setdefault(peer, []).append(index)

        async def touch(number: int, indices: list[int]) -> Answer | LinkError:
            part = pick(batch, indices)

            async def ask(peer: Peer, until: float) -> Answer:
                left_s = until - self.loop.time()
                return await self._send(peer, Ask("touch", peer.incarnation, left_s, part, wait_listed=True), until)

            try:
                return await self._call(number, ask, until=until, alternatives=True, patience_s=PUT_PATIENCE_S)
            except LinkError as error:
                return error

        answers = await self._all([touch(peer, indices) for peer, indices in asked.items()])
        for (peer, indices), answer in zip(asked.items(), answers, strict=True):
            if isinstance(answer, LinkError):
                continue
            found = Outcome.ALREADY if answer.listed else Outcome.UNLISTED
            gone = []
            for index, there in zip(indices, answer.tiers, strict=True):
                if there:
                    states[index].there(peer, found)
                else:
                    gone.append(index)
            if gone and self.index is not None:
                self.index.stale(spec.uid, peer, pick(batch, gone).keys)

    async def _write(
        self, spec: NamespaceSpec, batch: KeyBatch, states: list[_Block], parents: Candidates, until: float
    ) -> None:
        wanted = spec.replicas
        missing = [i for i, state in enumerate(states) if len(state.on) < wanted]
        first = missing[0]
        near = sorted(states[first - 1].on) if first else [peer for peer, _ in parents]
        targets = await self._targets(spec, batch.slice(first, first + 1), near, until)
        for _ in targets:
            work: dict[int, list[int]] = {}
            for index in missing:
                state = states[index]
                fresh = [t for t in targets if t not in state.on and t not in state.tried]
                for target in fresh[: wanted - len(state.on)]:
                    work.setdefault(target, []).append(index)
            if not work or self.loop.time() >= until:
                break
            spare = len(targets) > len(work)
            answers = await self._all([self._write_to(t, pick(batch, i), until, spare) for t, i in work.items()])
            for (target, indices), answer in zip(work.items(), answers, strict=True):
                there = []
                for position, index in enumerate(indices):
                    if isinstance(answer, LinkError):
                        states[index].refused(target, Outcome.REJECTED)
                        continue
                    outcome = _OUTCOMES.get(answer.codes[position], Outcome.REJECTED)
                    if _RANK[outcome] <= _RANK[Outcome.UNLISTED]:
                        states[index].there(target, outcome)
                        there.append(index)
                    else:
                        states[index].refused(target, outcome)
                if there and self.index is not None:
                    self.index.wrote(spec.uid, target, pick(batch, there).keys)
            missing = [i for i in missing if len(states[i].on) < wanted]

    async def _write_to(self, number: int, batch: KeyBatch, until: float, alternatives: bool) -> Answer | LinkError:
        blocks = [value_of(key) for key in batch.split()]

        async def ask(peer: Peer, until: float) -> Answer:
            left_s = until - self.loop.time()
            head = Ask("write", peer.incarnation, left_s, batch, sums=[sums_of(b) for b in blocks], wait_listed=True)
            sent = [self.wire(block) for block in blocks]
            return await self._send(peer, head, until, [Body(stop, sent) for stop in BODY_PIECES])

        try:
            return await self._call(number, ask, until=until, alternatives=alternatives, patience_s=PUT_PATIENCE_S)
        except LinkError as error:
            return error

    async def _targets(self, spec: NamespaceSpec, first: KeyBatch, near: Sequence[int], until: float) -> list[int]:
        """`client.placing.targets`."""
        if self.index is None or not self.connected:
            request = pb.PlaceRequest(namespace=spec.uid, keys=(key_above(first) or b"") + first.keys, host_id=self.process.host,
                                      bytes=spec.block_bytes, n_workers=TARGETS_MAX)  # fmt: skip
            reply = await self.masters.ask("Place", request, until)
            if reply is not None and reply.workers:
                placed = [self._learn(info) for info in reply.workers]
                usable = [number for number in placed if isinstance(self.peers.cost(number), int)]
                if usable:
                    return usable
        found = self.peers.candidates()
        names = {WorkerId(self.peers.worker_id(peer)) for peer in near}
        chosen = place([candidate for _, candidate in found.values()], key=first.keys, parent_workers=names,
                       host_id=self.process.host, n_workers=TARGETS_MAX)  # fmt: skip
        return [found[candidate.worker_id][0].number for candidate in chosen]

    async def _all(self, jobs: Sequence[Awaitable[T]]) -> list[T]:
        return [await jobs[0]] if len(jobs) == 1 else list(await asyncio.gather(*jobs))

    # --- holds, as in `client.holds` ---------------------------------------------------------------------------------------

    async def hold(self, uid: NamespaceUid, batch: KeyBatch, *, ttl_ms: int, until: float) -> list[Part]:
        known = leading(self._known(uid, batch.split()) or [])
        if len(known) < len(batch):
            request = pb.LocateRequest(namespace=uid, keys=batch.keys[len(known) * KEY_BYTES :], prefix=False)
            reply = await self.masters.ask("Locate", request, until)
            known += leading(self.places(reply)) if reply is not None else []
        fetch = Fetch(len(batch))
        fetch.locate(0, known)
        parts: list[Part] = []
        while fetch.n_leading < len(batch):
            reads = fetch.plan(self.peers.cost)
            if not reads or self.loop.time() >= until:
                break
            run = reads[0].run()
            part = batch.slice(run.blocks[0], run.blocks[-1] + 1)

            async def ask(peer: Peer, until: float, part: KeyBatch = part) -> Answer:
                left_s = until - self.loop.time()
                return await self._send(peer, Ask("hold", peer.incarnation, left_s, part, ttl_ms=ttl_ms), until)

            try:
                held = await self._call(run.peer, ask, until=until, alternatives=run.alternatives, patience_s=0.0)
            except LinkError as error:
                fetch.failed(run, miss_of(error))
                continue
            if held.hold_id and held.count:
                parts.append(Part(run.peer, held.hold_id, run.blocks[0], held.count))
            if held.count < len(part) and miss_cause(held.codes[held.count]) is None:
                break
            codes = bytes([_SHARED]) * held.count + held.codes[held.count :]
            fetch.answered(run, codes, bytes([Tiers.DRAM]) * len(codes), [0] * len(codes))
        return parts

    def release(self, parts: Sequence[Part]) -> None:
        for part in parts:
            pool, peer = self._pools.get(part.peer), self.peers.get(part.peer)
            if pool is not None and peer is not None:
                pool.post(Ask("release", peer.incarnation, 1.0, hold_ids=(part.hold_id,)))

    async def remove(self, uid: NamespaceUid, batch: KeyBatch, *, until: float) -> bytes:
        """Outcomes [n]: 0 removed, 1 pending, 2 absent. Raises KVPoolError."""
        reply = await self.masters.call("Remove", pb.RemoveRequest(namespace=uid, keys=batch.keys), until)
        if self.index is not None:
            self.index.forget(uid, batch.split())
        outcomes: bytes = reply.outcomes
        return outcomes


class _Get:
    """`client.reading.Getter`."""

    def __init__(self, client: SimClient, batch: KeyBatch, until: float, held: Sequence[Part]) -> None:
        self.client, self.batch, self.until, self.held = client, batch, until, held
        n = len(batch)
        self.fetch = Fetch(n)
        self.values: list[bytes] = [b""] * n
        self.paths: list[str] = [""] * n
        self.complete = True
        self.master_cause: MissCause | None = None
        self._tail: asyncio.Task[Any] | None = None
        self._tail_at = 0
        self._asked_master = False

    async def run(self) -> Got:
        fetch, n, loop = self.fetch, len(self.batch), self.client.loop
        try:
            promised: list[Candidates] = [()] * max((p.start + p.count for p in self.held), default=0)
            for part in self.held:
                promised[part.start : part.start + part.count] = [((part.peer, int(Tiers.DRAM)),)] * part.count
            known = self.client._known(self.batch.namespace, self.batch.split()) or []
            known = leading(with_held(promised, leading(known)))
            fetch.locate(0, known)
            self._tail_at = len(known)
            if self._tail_at < n:
                self._tail = self.client.process.spawn(self._locate(self._tail_at))
            for _ in range(ROUNDS_MAX):
                reads = fetch.plan(self.client.peers.cost)
                if reads:
                    await self._read(reads)
                elif fetch.n_leading == n or not await self._ask_more():
                    break
                if fetch.n_leading == n or loop.time() >= self.until:
                    break
        finally:
            if self._tail is not None:
                self._tail.cancel()
        return self._result()

    async def _locate(self, start: int) -> Any:
        request = pb.LocateRequest(namespace=self.batch.namespace, keys=self.batch.keys[start * KEY_BYTES :], prefix=True)
        return await self.client.masters.ask("Locate", request, self.until)

    async def _ask_more(self) -> bool:
        start = self.fetch.n_leading
        if self._tail is not None and start == self._tail_at:
            task, self._tail = self._tail, None
            reply = await task
        elif start < self._tail_at and not self._asked_master:
            self._asked_master = True
            reply = await self._locate(start)
        else:
            return False
        if reply is None:
            self.complete = False
            return False
        self.complete = self.complete and reply.complete
        if reply.miss_cause:
            self.master_cause = CAUSES[reply.miss_cause - 1]
        places = leading(self.client.places(reply))
        self.fetch.locate(start, places)
        self._tail_at = max(self._tail_at, start + len(places))
        return bool(places)

    async def _read(self, reads: Sequence[Read]) -> None:
        answers = await self.client._all([self._read_one(read) for read in reads])
        for read, answer in zip(reads, answers, strict=True):
            if isinstance(answer, LinkError):
                self.fetch.failed(read, miss_of(answer))
                continue
            sizes = [1] * len(answer.codes)
            stale = self.fetch.answered(read, answer.codes, answer.tiers, sizes)
            if stale and self.client.index is not None:
                self.client.index.stale(self.batch.namespace, read.peer, pick(self.batch, stale).keys)

    async def _read_one(self, read: Read) -> Answer | LinkError:
        client = self.client
        batch = pick(self.batch, read.blocks)
        hold_id = next((p.hold_id for p in self.held if p.peer == read.peer and p.start <= read.blocks[0] < p.start + p.count), 0)

        async def ask(peer: Peer, until: float) -> Answer:
            memory = client.memories.get((peer.worker_id, peer.incarnation)) if peer.local else None
            request = Ask("read", peer.incarnation, until - client.loop.time(), batch, shared=memory is not None, hold_id=hold_id)
            answer = await client._send(peer, request, until)
            await self._take(read, batch, answer, memory, peer)
            return answer

        patience_s = 0.0 if read.alternatives else PATIENCE_S
        try:
            return await client._call(
                read.peer, ask, until=self.until, alternatives=read.alternatives, patience_s=patience_s
            )
        except LinkError as error:
            return error

    async def _take(self, read: Read, batch: KeyBatch, answer: Answer, memory: SimDram | None, peer: Peer) -> None:
        """Inline bytes are checked against their sums, shared ones copied in two steps, and their generation looked at after."""
        codes = bytearray(answer.codes)
        shared = [i for i, code in enumerate(codes) if code == _SHARED]
        half = PARTS // 2 * PART_BYTES
        uid = batch.namespace
        for i, code in enumerate(codes):
            if code == _INLINE:
                data = answer.payload[i]
                assert data is not None
                data = self.client.wire(data)
                if sums_of(data) != answer.sums[i]:
                    codes[i] = _CORRUPT
                self._keep(read.blocks[i], data, f"tcp {peer.worker_id}")
        if shared and memory is not None:
            firsts = {}
            for i in shared:
                place = answer.places[i]
                assert place is not None
                firsts[i] = memory.read(uid, place[0])[:half]
            self.client.stumble()
            await sleep(self.client.loop, 0.00005)
            for i in shared:
                place = answer.places[i]
                assert place is not None
                offset, gen_index, generation = place
                data = firsts[i] + memory.read(uid, offset)[half:]
                if memory.generation(uid, gen_index) != generation:
                    codes[i] = _STALE
                self._keep(read.blocks[i], data, f"shm {peer.worker_id}")
        answer.codes = bytes(codes)
        if answer.hold_id:
            pool = self.client._pools.get(peer.number)
            if pool is not None:
                pool.post(Ask("release", peer.incarnation, 1.0, hold_ids=(answer.hold_id,)))

    def _keep(self, index: int, data: bytes, path: str) -> None:
        self.values[index], self.paths[index] = data, path

    def _result(self) -> Got:
        fetch, n = self.fetch, self.fetch.n_leading
        values, paths = self.values[:n], self.paths[:n]
        if n == len(self.batch):
            return Got(values, paths, None, True)
        found = fetch.why()
        if found is None:
            late = self.client.loop.time() >= self.until
            cause = MissCause.TIMEOUT if late else self.master_cause or MissCause.UNKNOWN
            return Got(values, paths, cause, self.complete)
        cause, peer = found
        if cause is MissCause.STALE_INDEX and self.master_cause not in (None, MissCause.NEVER_STORED, MissCause.UNKNOWN):
            cause = self.master_cause or cause
        return Got(values, paths, cause, self.complete, self.client.peers.worker_id(peer))


def pick(batch: KeyBatch, blocks: Sequence[int]) -> KeyBatch:
    """`context.pick`."""
    n = len(blocks)
    if n and blocks[-1] - blocks[0] + 1 == n:
        return batch.slice(blocks[0], blocks[-1] + 1)
    keys = batch.keys
    return KeyBatch(batch.namespace, b"".join(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in blocks), chained=False)
