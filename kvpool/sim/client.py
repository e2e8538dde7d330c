"""A simulated client process: the real client's parts (mirror, master link, peers, getter, putter, sessions, holds, views) on
simulated ways to masters and workers.

Each call is a thread of the process (`threads`); its answer is put into the few values that the checker looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvpool.client.context import Context
from kvpool.client.holds import HoldToken, held_places, release_parts, take_hold
from kvpool.client.master import MasterLink
from kvpool.client.mirror import Mirror
from kvpool.client.mirror_index import MirrorIndex
from kvpool.client.peers import Peer, Peers
from kvpool.client.put_session import PutSession
from kvpool.client.reading import Getter, no_hold
from kvpool.client.results import GetResult
from kvpool.client.views import Keeper, View, take_view
from kvpool.client.writing import Putter
from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import Key, MissCause, Outcome
from kvpool.master.wire import spec_from_proto, spec_to_proto
from kvpool.sim.clock import Process
from kvpool.sim.link import Wire
from kvpool.sim.memory import SimDram
from kvpool.sim.network import Network
from kvpool.sim.threads import blocking
from kvpool.sim.values import NOTHING, Value, value_of
from kvpool.v1 import master_pb2 as pb

T = TypeVar("T")

MIRROR_BYTES: Final = 1 << 30


@dataclass(slots=True)
class Got:
    """Of a get. `values`, `sizes`: of the leading blocks; `paths`: "tcp" or "shm", with the worker's name."""

    values: list[bytes]
    sizes: list[int]
    paths: list[str]
    cause: MissCause | None
    complete: bool
    worker: str = ""


def got_of(result: GetResult, outs: Sequence[bytearray]) -> Got:
    n = result.n_blocks
    paths = [f"{source.transport} {source.worker}" for source in result.sources]
    return Got([bytes(out) for out in outs[:n]], list(result.sizes[:n]), paths, result.miss, result.complete, result.miss_worker)


class SimClient:
    """`memories`: what a local client can look into, by (worker, incarnation). `wire_flips`: share of blocks of which a bit turns
    over on the way. `stumbles`: share of copies out of shared memory in the middle of which it stands still."""

    def __init__(
        self, process: Process, network: Network, *, masters: Sequence[str], memories: Mapping[tuple[str, int], SimDram],
        size_of: Callable[[Key], int], mirrored: bool, wire_flips: float, on_flip: Callable[[], None], stumbles: float,
        on_stumble: Callable[[], None],
    ) -> None:  # fmt: skip
        self.process, self.loop = process, process.loop
        self.size_of = size_of
        self._wire_flips, self._on_flip, self._stumbles, self._on_stumble = wire_flips, on_flip, stumbles, on_stumble
        wire: Any = Wire(network, process, size_of, memories, self._arrives, self._stumble)
        self.master = MasterLink(",".join(masters), token="")
        self.peers = Peers(host_id=process.host, options=wire, now_s=process.now_s)
        self.peers.on_unusable = self._tell_unusable
        mirror = Mirror(self.master, self.peers, bytes_max=MIRROR_BYTES) if mirrored else None
        if mirror is not None:
            mirror.index = MirrorIndex(self.peers, bytes_max=MIRROR_BYTES, now_s=process.now_s)
        self.index = None if mirror is None else mirror.index
        self.context = Context(master=self.master, peers=self.peers, mirror=mirror, host_id=process.host, verify=False,
                               transport="auto")  # fmt: skip
        self.keeper = Keeper(self.context)

    def _arrives(self, data: bytes) -> bytes:
        if not self._wire_flips or self.process.random.random() >= self._wire_flips:
            return data
        self._on_flip()
        raw = bytearray(data)
        raw[self.process.random.randrange(len(raw))] ^= 1
        return bytes(raw)

    def _stumble(self) -> None:
        if self._stumbles and self.process.random.random() < self._stumbles:
            self._on_stumble()

    def _tell_unusable(self, peer: Peer) -> None:
        request = pb.ReportPeerRequest(worker_id=peer.worker_id, incarnation=peer.incarnation)
        self.master.tell("ReportPeer", request)

    def deadline(self, until: float) -> float:
        """A point of the loop's time as the process' own clock has it."""
        return self.process.now_s() + until - self.loop.time()

    # --- calls; `until`: a point of the loop's time -----------------------------------------------------------------------

    async def follow(self, spec: NamespaceSpec) -> None:
        """It is mirrored from now on, where there is a mirror."""
        if self.context.mirror is not None:
            await blocking(self.context.mirror.follow, spec.uid)

    async def get(self, spec: NamespaceSpec, batch: KeyBatch, *, until: float, held: HoldToken | None = None) -> Got:
        outs = [bytearray(NOTHING) for _ in range(len(batch))]

        def get() -> GetResult:
            deadline, views = self.deadline(until), [memoryview(out) for out in outs]
            if held is None:
                return Getter(self.context, spec, batch, views, deadline=deadline, hold_of=no_hold).run()
            places, ranges = held_places(self.context, held, batch, 0, deadline=deadline)

            def hold_of(peer: Peer, block: int) -> int:
                return next((number for start, stop, number in ranges.get(peer.number, ()) if start <= block < stop), 0)

            return Getter(self.context, spec, batch, views, deadline=deadline, hold_of=hold_of).run(places)

        return got_of(await blocking(get), outs)

    async def put(self, spec: NamespaceSpec, batch: KeyBatch, *, until: float) -> list[Outcome]:
        blocks: Any = [Value(value_of(key), self.size_of(key)) for key in batch.split()]

        def put() -> list[Outcome]:
            deadline = self.deadline(until)
            return Putter(self.context, spec, batch, blocks, deadline=deadline, wait_listed=True).run().outcomes

        return await blocking(put)

    async def session(self, spec: NamespaceSpec, batch: KeyBatch, *, until: float) -> PutSession:
        def begin() -> PutSession:
            return PutSession(self.context, spec, batch, size=len(NOTHING), deadline=self.deadline(until), wait_listed=True)

        return await blocking(begin)

    async def hold(self, spec: NamespaceSpec, batch: KeyBatch, *, ttl_ms: int, until: float) -> HoldToken:
        def hold() -> HoldToken:
            return take_hold(self.context, spec, [(0, batch)], ttl_ms=ttl_ms, deadline=self.deadline(until)).content

        return await blocking(hold)

    async def release(self, token: HoldToken) -> None:
        await blocking(release_parts, self.context, token.parts)

    async def view(self, spec: NamespaceSpec, batch: KeyBatch, *, until: float) -> View:
        return await blocking(
            lambda: take_view(self.context, self.keeper, spec, batch, deadline=self.deadline(until))
        )

    async def remove(self, spec: NamespaceSpec, batch: KeyBatch, *, until: float) -> bytes:
        """Outcomes [n]: 0 removed, 1 pending, 2 absent. Raises KVPoolError."""
        reply = await self._master("Remove", pb.RemoveRequest(namespace=spec.uid, keys=batch.keys), until)
        if self.index is not None:
            self.index.forget(spec.uid, batch.split())
        outcomes: bytes = reply.outcomes
        return outcomes

    async def create(self, wanted: NamespaceSpec, *, until: float) -> NamespaceSpec:
        """As `Client.namespace(create=True)`. Raises KVPoolError."""
        reply = await self._master("CreateNamespace", pb.CreateNamespaceRequest(namespace=spec_to_proto(wanted)), until)
        spec = spec_from_proto(reply.namespace)
        await self.follow(spec)
        return spec

    async def delete(self, name: str, *, until: float) -> list[str]:
        """Names of workers that have not confirmed. Raises KVPoolError."""
        reply = await self._master("DeleteNamespace", pb.DeleteNamespaceRequest(name=name), until)
        return list(reply.pending_workers)

    async def drain(self, worker: str, *, cancel: bool, rate_bytes: int, until: float) -> None:
        """As an operator. Raises KVPoolError."""
        request = pb.DrainRequest(worker_id=worker, cancel=cancel, rate_bytes=rate_bytes)
        await self._master("Drain", request, until)

    async def _master(self, method: str, request: Any, until: float) -> Any:
        return await blocking(lambda: self.master.call(method, request, deadline=self.deadline(until)))
