"""Index events for watchers: a ring with numbers, bounded in keys, and how a stream of them is written.

There is no queue per watcher: a watcher is a place in the ring, and the stream's own flow control is its pace. Who fell out of
the ring, comes from another epoch, or is new gets a snapshot, announced by `resync`: nothing is skipped in silence. Events are
gathered for some ms, and by each watcher for as long as its stream is busy, so that cost grows with watchers x batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvpool.core.catalog import Catalog
from kvpool.core.types import KEY_BYTES, MAX_BATCH_KEYS, Epoch, Holder, NamespaceUid
from kvpool.errors import MasterUnavailable
from kvpool.v1 import master_pb2 as pb

RING_KEYS: Final = 262_144  # some 10 MB: seconds of changes at full rate
EVENT_KEYS: Final = 8  # what an event costs beside its keys, as keys: one of a single key takes some 300 bytes
ROUND_KEYS: Final = 65_536  # that one watcher takes out of the ring at once
SNAPSHOT_KEYS: Final = 8_192  # of one snapshot message: a few ms of the loop
WATCHERS_MAX: Final = 4_096
WATCHED_NAMESPACES_MAX: Final = 4_096  # of one watcher


@dataclass(frozen=True, slots=True)
class Changed:
    """The holder has these keys [n * 34] in these tiers (u8 [n], 0: not any more)."""

    namespace: NamespaceUid
    holder: Holder
    keys: bytes
    tiers: bytes


@dataclass(frozen=True, slots=True)
class Emptied:
    namespace: NamespaceUid


@dataclass(frozen=True, slots=True)
class HolderSeen:
    info: pb.HolderInfo


@dataclass(frozen=True, slots=True)
class HolderRetired:
    holder: Holder


Event = Changed | Emptied | HolderSeen | HolderRetired


def _weight(event: Event) -> int:
    return EVENT_KEYS + len(event.tiers) if isinstance(event, Changed) else EVENT_KEYS


class EventLog:
    """The ring. `seq` counts from 1 within an epoch; on the loop only."""

    def __init__(self, *, coalesce_ms: int, ring_keys: int = RING_KEYS) -> None:
        self._coalesce_s = coalesce_ms / 1000
        self._ring_keys = ring_keys
        self._events: dict[int, Event] = {}
        self._weight = 0
        self._first_seq = 1
        self._waiters: dict[asyncio.Future[None], None] = {}  # in order: who waited first is told first
        self._timer: asyncio.TimerHandle | None = None
        self.seq = 0
        self.published = 0  # what watchers may see by now
        self.closed = False

    def append(self, event: Event) -> None:
        self.seq += 1
        self._events[self.seq] = event
        self._weight += _weight(event)
        while self._weight > self._ring_keys and self._first_seq < self.seq:
            self._weight -= _weight(self._events.pop(self._first_seq))
            self._first_seq += 1
        if self._timer is None and not self.closed:
            self._timer = asyncio.get_running_loop().call_later(self._coalesce_s, self._publish)

    def _publish(self) -> None:
        self._timer = None
        self.published = self.seq
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def remembers(self, after_seq: int) -> bool:
        """Whether every event after this one is still there (and it was ever given)."""
        return self._first_seq - 1 <= after_seq <= self.seq

    def take(self, after_seq: int) -> tuple[list[Event], int]:
        """Published events after `after_seq`, of some ROUND_KEYS keys, and the number of the last of them."""
        taken: list[Event] = []
        weight = 0
        seq = after_seq
        while seq < self.published and weight < ROUND_KEYS:
            seq += 1
            event = self._events[seq]
            taken.append(event)
            weight += _weight(event)
        return taken, seq

    async def wait(self, after_seq: int, *, timeout_s: float) -> bool:
        """Until something after `after_seq` is published (True), or the time is up."""
        if self.published > after_seq:
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return self.published > after_seq
        finally:
            self._waiters.pop(waiter, None)
        return True

    def close(self) -> None:
        """No more events: every watch ends."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._publish()

    @property
    def n_waiters(self) -> int:
        return len(self._waiters)


def merge(events: Sequence[Event], namespaces: frozenset[NamespaceUid]) -> Iterator[pb.WatchEvent]:
    """The events that concern these namespaces, as few messages: changes of one holder in one namespace are put together, in
    order, up to a batch. Numbers are set by the caller."""
    groups: dict[tuple[NamespaceUid, Holder], list[Changed]] = {}
    for event in events:
        if isinstance(event, Changed):
            if event.namespace in namespaces:
                groups.setdefault((event.namespace, event.holder), []).append(event)
            continue
        if isinstance(event, Emptied) and event.namespace not in namespaces:
            continue
        yield from _flush(groups)
        if isinstance(event, Emptied):
            yield pb.WatchEvent(change=pb.IndexChange(namespace=event.namespace, all=True))
        elif isinstance(event, HolderSeen):
            yield pb.WatchEvent(holder=event.info)
        else:
            yield pb.WatchEvent(retired=event.holder)
    yield from _flush(groups)


def _flush(groups: dict[tuple[NamespaceUid, Holder], list[Changed]]) -> Iterator[pb.WatchEvent]:
    for (namespace, holder), changes in groups.items():
        keys = b"".join(change.keys for change in changes)
        tiers = b"".join(change.tiers for change in changes)
        for start in range(0, len(tiers), MAX_BATCH_KEYS):
            stop = start + MAX_BATCH_KEYS
            part = pb.IndexChange(
                namespace=namespace, holder=holder, keys=keys[start * KEY_BYTES : stop * KEY_BYTES], tiers=tiers[start:stop]
            )
            yield pb.WatchEvent(change=part)
    groups.clear()


class Watched(Protocol):
    """What a watch reads; `state` is one."""

    epoch: Epoch
    catalog: Catalog
    events: EventLog

    def holder_infos(self) -> list[pb.HolderInfo]: ...

    def complete(self) -> bool: ...

    def has_namespace(self, uid: NamespaceUid) -> bool: ...


class Counters:
    """Plain ints of all watchers."""

    __slots__ = ("events_sent", "resyncs", "watchers")

    def __init__(self) -> None:
        self.watchers = 0
        self.resyncs = 0
        self.events_sent = 0


async def watch(
    state: Watched,
    namespaces: frozenset[NamespaceUid],
    *,
    epoch: int,
    after_seq: int,
    heartbeat_s: float,
    counters: Counters,
) -> AsyncGenerator[pb.WatchEvent, None]:
    """The stream of one watcher, until the log is closed (MasterUnavailable). The reader's pace is the stream's; the ring bounds
    what waits for it."""
    log = state.events
    cursor = after_seq if epoch == state.epoch else -1
    while not log.closed:
        if cursor < 0 or not log.remembers(cursor):
            counters.resyncs += 1
            yield pb.WatchEvent(epoch=state.epoch, resync=True)
            while not (state.complete() or log.closed):  # an index that is being rebuilt would empty the mirrors that follow it
                yield pb.WatchEvent(epoch=state.epoch, heartbeat=True)
                await asyncio.sleep(min(heartbeat_s, 0.05))
            cursor = log.seq
            async for event in _snapshot(state, namespaces):
                yield event
            yield pb.WatchEvent(epoch=state.epoch, seq=cursor, snapshot_end=True)
            continue
        events, seq = log.take(cursor)
        if events:
            messages = list(merge(events, namespaces))
            for i, message in enumerate(messages):
                # The parts of a round are not in the ring's order: only the last one says that all of it was told.
                message.epoch, message.seq = state.epoch, seq if i == len(messages) - 1 else cursor
                counters.events_sent += 1
                yield message
            cursor = seq
            continue
        if not await log.wait(cursor, timeout_s=heartbeat_s):
            yield pb.WatchEvent(epoch=state.epoch, seq=cursor, heartbeat=True)
    raise MasterUnavailable("the master is stopping")


async def _snapshot(state: Watched, namespaces: frozenset[NamespaceUid]) -> AsyncIterator[pb.WatchEvent]:
    """Holders, then entries. What changes meanwhile is told by the events after the snapshot's number."""
    for info in state.holder_infos():
        yield pb.WatchEvent(epoch=state.epoch, holder=info)
    for uid in sorted(namespaces):
        if not state.has_namespace(uid):
            yield pb.WatchEvent(epoch=state.epoch, change=pb.IndexChange(namespace=uid, all=True))
            continue
        for chunk in state.catalog.snapshot(uid, SNAPSHOT_KEYS):
            change = pb.IndexChange(namespace=uid, holder=chunk.holder, keys=chunk.keys, tiers=chunk.tiers)
            yield pb.WatchEvent(epoch=state.epoch, change=change)
            await asyncio.sleep(0)
