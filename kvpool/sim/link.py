"""A link to a simulated worker (`transport.base.WorkerLink`), for code under `threads.blocking`: over the network as
`transport.tcp`, from the host's shared memory as `transport.shm`.

Blocks are their few bytes here (`values`), whatever their size; sizes travel beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvpool.core.keys import KeyBatch
from kvpool.core.types import BlockCode, HoldId, Key, MissCause, NamespaceUid, miss_code
from kvpool.sim.clock import Process
from kvpool.sim.disk import sleep
from kvpool.sim.memory import SimDram
from kvpool.sim.network import Endpoint, Network, Pool, Refused
from kvpool.sim.threads import VIEW_TTL_MS, Lock, wait
from kvpool.sim.values import HALF, sums_of
from kvpool.sim.wire import BODY_PIECES, Answer, Ask, Body
from kvpool.transport.base import Held, LinkCause, LinkCounters, LinkError, Range, ReadResult, Touched, Viewed

_INLINE, _SHARED, _LATER = int(BlockCode.HIT_INLINE), int(BlockCode.HIT_SHARED), int(BlockCode.LATER)
_HITS: Final = (_INLINE, _SHARED)
_CORRUPT, _STALE = miss_code(MissCause.CORRUPT), miss_code(MissCause.STALE_INDEX)
ABORT_S: Final = 0.2


@dataclass(slots=True)
class Wire:
    """What a process' links have in common. `memories`: what it can look into, by (worker, incarnation). `arrives(data)`: what
    comes of bytes that are sent; `stumble()`: in the middle of a copy out of shared memory. `size_of`: of a block."""

    network: Network
    process: Process
    size_of: Callable[[Key], int]
    memories: Mapping[tuple[str, int], SimDram] = field(default_factory=dict)
    arrives: Callable[[bytes], bytes] = lambda data: data
    stumble: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Reservation:
    """`transport.base.ReservationHandle`: it has its connection until its end."""

    codes: bytes
    number: int
    end: Endpoint
    over: bool = False


class Sight:
    """A block's memory, as a view shows it."""

    def __init__(self, memory: SimDram, uid: NamespaceUid, offset: int) -> None:
        self._memory, self._uid, self._offset = memory, uid, offset

    def now(self) -> bytes:
        """What lies there."""
        return self._memory.read(self._uid, self._offset)

    def release(self) -> None:
        """Nothing to do."""


@dataclass(slots=True)
class _Views:
    """The views' own connection: their holds end with it."""

    lock: Lock = field(default_factory=Lock)
    end: Endpoint | None = None
    of: dict[int, Endpoint] = field(default_factory=dict)


class SimLink:
    """To one worker incarnation."""

    def __init__(self, wire: Wire, worker: Any) -> None:
        self._wire, self._process, self._loop = wire, wire.process, wire.process.loop
        self.worker_id, self.incarnation = worker.worker_id, worker.incarnation
        local = worker.host_id == wire.process.host
        self._memory = wire.memories.get((worker.worker_id, worker.incarnation)) if local else None
        self.transport = "tcp" if self._memory is None else "shm"
        self.counters = LinkCounters()
        self._pool = Pool(wire.network, wire.process, worker.address)
        self._busy: dict[Endpoint, None] = {}
        self._views = _Views()
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._pool.close()
        for end in [*self._busy, *([self._views.end] if self._views.end is not None else ())]:
            end.close()

    # --- requests -------------------------------------------------------------------------------------------------------

    async def _exchange(self, end: Endpoint, ask: Ask, until: float, bodies: Sequence[Body] = ()) -> Answer:
        """One request on this connection, which is closed when it fails. Raises LinkError."""
        self._busy[end] = None
        try:
            end.send(ask)
            for body in bodies:
                await sleep(self._loop, 0.0003 * self._process.random.random())
                end.send(body)
            answer: Answer = await end.recv(until)
        except (TimeoutError, ConnectionError) as error:
            end.close()
            raise _link_error(error) from error
        except BaseException:
            end.close()
            raise
        finally:
            self._busy.pop(end, None)
        if answer.refusal is not None:
            raise LinkError(answer.refusal, "refused")
        return answer

    async def _take(self, until: float) -> Endpoint:
        if self._closed:
            raise LinkError(LinkCause.CLOSED, "the link is closed")
        try:
            return await self._pool.take(until)
        except (TimeoutError, ConnectionError) as error:
            raise _link_error(error) from error

    async def _send(self, ask: Ask, until: float, bodies: Sequence[Body] = ()) -> Answer:
        """One request on a connection of the pool."""
        end = await self._take(until)
        try:
            return await self._exchange(end, ask, until, bodies)
        finally:
            if not end.over:
                self._pool.give(end)

    def _ask(self, op: str, deadline: float, **fields: Any) -> Ask:
        return Ask(op, self.incarnation, deadline - self._process.now_s(), **fields)

    def _until(self, deadline: float) -> float:
        return self._loop.time() + deadline - self._process.now_s()

    def _call(self, ask: Ask, deadline: float, bodies: Sequence[Body] = ()) -> Answer:
        return wait(self._send(ask, self._until(deadline), bodies))

    def stat(self, *, deadline: float) -> dict[str, Any]:
        self._call(self._ask("stat", deadline), deadline)
        return {}

    connect = stat

    # --- read -----------------------------------------------------------------------------------------------------------

    def read(self, batch: KeyBatch, outs: Sequence[memoryview], *, deadline: float, hold_id: int = 0, **_: Any) -> ReadResult:
        ask = self._ask("read", deadline, batch=batch, shared=self._memory is not None, hold_id=hold_id)
        return wait(self._read(ask, batch, outs, self._until(deadline)))

    async def _read(self, ask: Ask, batch: KeyBatch, outs: Sequence[memoryview], until: float) -> ReadResult:
        answer = await self._send(ask, until)
        codes = bytearray(answer.codes)
        for i, code in enumerate(codes):
            if code == _INLINE:
                sent = answer.payload[i]
                assert sent is not None
                data = self._wire.arrives(sent)
                if sums_of(data) != answer.sums[i]:
                    codes[i] = _CORRUPT
                outs[i][:] = data
        shared = [i for i, code in enumerate(codes) if code == _SHARED]
        if shared:
            await self._copy_shared(batch.namespace, shared, codes, answer, outs)
        if answer.hold_id:
            self._pool.post(self._ask("release", self._process.now_s() + 1.0, hold_ids=(answer.hold_id,)))
        n_leading = next((i for i, code in enumerate(codes) if code not in _HITS), len(codes))
        return ReadResult(bytes(codes), answer.tiers, answer.sizes, n_leading)

    async def _copy_shared(
        self, uid: NamespaceUid, shared: Sequence[int], codes: bytearray, answer: Answer, outs: Sequence[memoryview]
    ) -> None:
        """In two steps; the generations are looked at after."""
        memory = self._memory
        assert memory is not None
        places = {i: place for i in shared if (place := answer.places[i]) is not None}
        for i, (offset, _, _) in places.items():
            outs[i][:HALF] = memory.read(uid, offset)[:HALF]
        self._wire.stumble()
        await sleep(self._loop, 0.00005)
        for i, (offset, gen_index, generation) in places.items():
            outs[i][HALF:] = memory.read(uid, offset)[HALF:]
            if memory.generation(uid, gen_index) != generation:
                codes[i] = _STALE

    # --- write ----------------------------------------------------------------------------------------------------------

    def write(self, batch: KeyBatch, blocks: Sequence[Any], *, deadline: float, wait_listed: bool, **_: Any) -> bytes:
        """`blocks`: `values.Value`s."""
        data = [block.data for block in blocks]
        ask = self._ask("write", deadline, batch=batch, sizes=[block.nbytes for block in blocks],
                        sums=[sums_of(one) for one in data], wait_listed=wait_listed)  # fmt: skip
        sent = [self._wire.arrives(one) for one in data]
        return self._call(ask, deadline, [Body(stop, sent) for stop in BODY_PIECES]).codes

    def touch(self, batch: KeyBatch, *, wait_listed: bool, deadline: float, hint: int | None = None) -> Touched:
        """Simulated puts have no hints."""
        del hint
        answer = self._call(self._ask("touch", deadline, batch=batch, wait_listed=wait_listed), deadline)
        return Touched(answer.tiers, answer.listed)

    def reserve(
        self, batch: KeyBatch, sizes: Sequence[int], *, deadline: float, fence: int | None = None, hints: Sequence[int] = ()
    ) -> Reservation:
        """Of blocks whole; `sizes` are of the few bytes that stand for them."""
        del sizes, hints
        real = [self._wire.size_of(key) for key in batch.split()]
        ask = self._ask("reserve", deadline, batch=batch, sizes=real, fence=fence)
        until = self._until(deadline)
        end = wait(self._take(until))
        try:
            answer = wait(self._exchange(end, ask, until))
        except LinkError:
            self._pool.give(end)
            raise
        return Reservation(answer.codes, answer.hold_id, end)

    def fill(self, reservation: Reservation, ranges: Sequence[Range], *, deadline: float) -> None:
        parts = [(one.block, one.offset, bytes(one.data)) for one in ranges]
        ask = self._ask("fill", deadline, hold_id=reservation.number, sums=[sums_of(data) for _, _, data in parts])
        body = [(block, offset, self._wire.arrives(data)) for block, offset, data in parts]
        self._use(reservation, ask, deadline, [Body(0, body)])

    def _use(self, reservation: Reservation, ask: Ask, deadline: float, bodies: Sequence[Body] = ()) -> Answer:
        """A failure ends the reservation."""
        if reservation.over:
            raise LinkError(LinkCause.NOT_FOUND, "the reservation has ended")
        try:
            return wait(self._exchange(reservation.end, ask, self._until(deadline), bodies))
        except BaseException:
            reservation.over = True
            reservation.end.close()
            raise

    def commit(self, reservation: Reservation, *, wait_listed: bool, deadline: float) -> bytes:
        ask = self._ask("commit", deadline, hold_id=reservation.number, wait_listed=wait_listed)
        answer = self._use(reservation, ask, deadline)
        reservation.over = True
        self._pool.give(reservation.end)
        return answer.codes

    def abort(self, reservation: Reservation) -> None:
        if reservation.over or reservation.end.over:
            return
        reservation.over = True
        ask = self._ask("abort", self._process.now_s() + ABORT_S, hold_id=reservation.number)
        try:
            wait(self._exchange(reservation.end, ask, self._loop.time() + ABORT_S))
        except LinkError:
            return
        self._pool.give(reservation.end)

    # --- holds and views ------------------------------------------------------------------------------------------------

    def hold(self, batch: KeyBatch, ttl_ms: int, *, deadline: float, first_miss: bool = True) -> Held:
        del first_miss
        answer = self._call(self._ask("hold", deadline, batch=batch, ttl_ms=ttl_ms), deadline)
        return Held(HoldId(answer.hold_id), answer.count, answer.codes)

    def renew(self, hold_ids: Sequence[int], ttl_ms: int, *, deadline: float) -> bytes:
        """Of views: on their own connection."""
        until = self._until(deadline)
        with self._views.lock:
            ends = {self._views.of.get(hold_id) for hold_id in hold_ids}
            end = self._views.end
            if ends != {end} or end is None or end.over:
                return bytes(len(hold_ids))
            ask = self._ask("renew", deadline, hold_ids=hold_ids, ttl_ms=ttl_ms)
            return wait(self._exchange(end, ask, until)).codes

    def release(self, hold_ids: Sequence[int]) -> None:
        ask = self._ask("release", self._process.now_s() + 1.0, hold_ids=hold_ids)
        for hold_id in hold_ids:
            self._views.of.pop(hold_id, None)
        if self._closed:
            return
        end = self._views.end
        if end is not None and not end.over:
            end.send(ask)
        else:
            self._pool.post(ask)

    def view(self, batch: KeyBatch, *, deadline: float, ttl_ms: int = VIEW_TTL_MS) -> Viewed:
        assert self._memory is not None, "a view is of this host's memory"
        with self._views.lock:
            return wait(self._view(batch, ttl_ms, self._until(deadline), deadline, self._memory))

    async def _view(self, batch: KeyBatch, ttl_ms: int, until: float, deadline: float, memory: SimDram) -> Viewed:
        """Where the blocks lie, held; then the view's own hold, and the first one is given back."""
        end = self._views.end
        if end is None or end.over:
            end = self._views.end = await self._take(until)
        answer = await self._exchange(end, self._ask("read", deadline, batch=batch, shared=True), until)
        n = next((i for i, code in enumerate(answer.codes) if code != _SHARED), len(answer.codes))
        codes, views, hold_id = answer.codes, [], 0
        if n:
            ask = self._ask("hold", deadline, batch=batch.slice(0, n), ttl_ms=ttl_ms, view=True)
            held = await self._exchange(end, ask, until)
            n = held.count if held.hold_id else 0
            codes = codes[:n] + held.codes[n:] + codes[len(held.codes) :]
            places = [place for place in answer.places[:n] if place is not None]
            views = [Sight(memory, batch.namespace, offset) for offset, _, _ in places]
            hold_id = held.hold_id
            if hold_id:
                self._views.of[hold_id] = end
        if answer.hold_id:
            end.send(self._ask("release", deadline, hold_ids=(answer.hold_id,)))
        seen: Any = views
        return Viewed(HoldId(hold_id), seen, codes, answer.tiers[:n] + bytes(len(codes) - n))


def _link_error(error: Exception) -> LinkError:
    """As the caller of a link sees it."""
    if isinstance(error, TimeoutError):
        return LinkError(LinkCause.TIMEOUT, str(error))
    return LinkError(LinkCause.REFUSED if isinstance(error, Refused) else LinkCause.CLOSED, str(error))


