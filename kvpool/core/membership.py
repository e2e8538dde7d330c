"""Which workers there are and whether they live: states from heartbeats. Pure; time comes in as `now_ms` (monotonic).

    hello ─▶ JOINING ─inventory complete─▶ UP ─silent or stream lost─▶ SUSPECT ─silent longer─▶ DOWN (taken out)
                                           ▲────────── heard ───────────┘           leave ─▶ DOWN at once

Owns: members, their holder numbers, and whether the index is complete after a start (`complete`). A worker's entries in the index
are taken out (`Change.retired`) when it is DOWN, or at once when a new incarnation of it says hello: what the old one had in
memory is lost, what it had on disk is in the new inventory. A holder number is never used twice within an epoch.

Draining is beside these states: whoever drains is read from and not written to, and others are told DRAINING or DRAINED where
they would be told UP (`Member.told_state`). A suspicion from outside (`suspect`) lasts until the worker is heard again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvpool.core.placement import RAMP_MS
from kvpool.core.types import Holder, Incarnation, WorkerId

ROOM_PARTS: Final = 16  # watchers hear of a worker's free bytes when they changed by this part of its capacity


class WorkerState(IntEnum):
    """As it travels in HolderInfo.state."""

    JOINING = 0
    UP = 1
    SUSPECT = 2
    DOWN = 3
    DRAINING = 4  # told for UP, never a member's own state
    DRAINED = 5


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself in its hello."""

    worker_id: WorkerId
    incarnation: Incarnation
    host_id: str
    address: str
    unix_name: str = ""


@dataclass(slots=True)
class Member:
    info: WorkerInfo
    holder: Holder
    state: WorkerState
    heard_ms: int
    connected: bool
    inventory_since_ms: int | None  # an inventory is awaited or under way since (its last part)
    next_holder: Holder | None = None  # of the inventory under way
    free_bytes: int = 0
    capacity_bytes: int = 0
    told_free_bytes: int = 0
    up_since_ms: int | None = None  # None: this incarnation has not been UP yet
    draining: bool = False
    drained: bool = False

    @property
    def told_state(self) -> WorkerState:
        """What others are told."""
        if self.state is not WorkerState.UP or not self.draining:
            return self.state
        return WorkerState.DRAINED if self.drained else WorkerState.DRAINING

    def up_ms(self, now_ms: int) -> int:
        """How long it has been up since its first inventory; 0 before."""
        return 0 if self.up_since_ms is None else max(0, now_ms - self.up_since_ms)

    @property
    def holders(self) -> tuple[Holder, ...]:
        return (self.holder,) if self.next_holder is None else (self.holder, self.next_holder)


@dataclass(frozen=True, slots=True)
class Change:
    """What a step did: holders whose entries are gone, workers whose state is another one now."""

    retired: tuple[Holder, ...] = ()
    changed: tuple[WorkerId, ...] = ()

    def __add__(self, other: Change) -> Change:
        return Change(self.retired + other.retired, self.changed + other.changed)


NOTHING = Change()


class Membership:
    """`known`: workers that a store remembers as lately connected; the index is not complete before they are back, or
    `rebuild_grace_ms` has passed since the start (or since the last part of an inventory that is under way)."""

    def __init__(
        self, *, suspect_after_ms: int, dead_after_ms: int, rebuild_grace_ms: int, known: Collection[WorkerId], now_ms: int
    ) -> None:
        self._suspect_after_ms = suspect_after_ms
        self._dead_after_ms = dead_after_ms
        self._grace_ms = rebuild_grace_ms
        self._started_ms = now_ms
        self._awaited = set(known)
        self._members: dict[WorkerId, Member] = {}
        self._by_holder: dict[Holder, WorkerId] = {}
        self._last_holder = 0

    # --- steps ----------------------------------------------------------------------------------------------------------

    def hello(self, info: WorkerInfo, *, now_ms: int, seasoned: bool = False) -> tuple[Member, Change]:
        """A worker's stream begins. The same incarnation keeps its holder and state (SUSPECT becomes UP). `seasoned`: it is not
        new to the pool, though it is to this master."""
        change = NOTHING
        member = self._members.get(info.worker_id)
        if member is not None and member.info.incarnation != info.incarnation:
            change = self._drop(member)
            member = None
        if member is None:
            member = Member(info, self._new_holder(info.worker_id), WorkerState.JOINING, now_ms, True, now_ms)
            member.up_since_ms = now_ms - RAMP_MS if seasoned else None
            self._members[info.worker_id] = member
            return member, change + Change(changed=(info.worker_id,))
        member.connected, member.heard_ms = True, now_ms
        new_address = member.info != info
        member.info = info
        if member.state is WorkerState.SUSPECT:
            member.state = WorkerState.UP if member.inventory_since_ms is None else WorkerState.JOINING
            new_address = True
        return member, Change(changed=(info.worker_id,)) if new_address else NOTHING

    def want_inventory(self, worker_id: WorkerId, *, now_ms: int) -> Change:
        """The worker was asked for an inventory; what an unfinished one brought is gone."""
        member = self._members[worker_id]
        member.inventory_since_ms = now_ms
        return self._drop_next(member)

    def begin_inventory(self, worker_id: WorkerId, *, now_ms: int) -> tuple[Holder, Change]:
        """First part of an inventory: the number under which its entries go into the index."""
        member = self._members[worker_id]
        change = self._drop_next(member)
        member.next_holder = self._new_holder(worker_id)
        member.inventory_since_ms = now_ms
        return member.next_holder, change + Change(changed=(worker_id,))

    def inventory_part(self, worker_id: WorkerId, *, now_ms: int) -> None:
        self._members[worker_id].inventory_since_ms = now_ms

    def end_inventory(self, worker_id: WorkerId) -> Change:
        """The inventory is complete: its number is the worker's, the number before is retired, the worker is UP."""
        member = self._members[worker_id]
        assert member.next_holder is not None
        retired = member.holder
        self._by_holder.pop(retired, None)
        member.holder, member.next_holder = member.next_holder, None
        member.inventory_since_ms = None
        member.state = WorkerState.UP
        if member.up_since_ms is None:
            member.up_since_ms = member.heard_ms
        self._awaited.discard(worker_id)
        return Change((retired,), (worker_id,))

    def drain(self, worker_id: WorkerId, *, draining: bool, drained: bool = False) -> Change:
        """The worker is being emptied (`drained`: it is empty), or takes part again."""
        member = self._members.get(worker_id)
        if member is None or (member.draining, member.drained) == (draining, draining and drained):
            return NOTHING
        member.draining, member.drained = draining, draining and drained
        return Change(changed=(worker_id,))

    def suspect(self, worker_id: WorkerId, incarnation: int) -> Change:
        """Somebody could not use its data plane. The next word from it heals that."""
        member = self._members.get(worker_id)
        if member is None or member.info.incarnation != incarnation or member.state is not WorkerState.UP:
            return NOTHING
        member.state = WorkerState.SUSPECT
        return Change(changed=(worker_id,))

    def heard(self, worker_id: WorkerId, *, now_ms: int) -> Change:
        """Anything came from the worker."""
        member = self._members.get(worker_id)
        if member is None:
            return NOTHING
        member.heard_ms = now_ms
        if member.state is WorkerState.SUSPECT and member.connected:
            member.state = WorkerState.UP if member.inventory_since_ms is None else WorkerState.JOINING
            return Change(changed=(worker_id,))
        return NOTHING

    def room(self, worker_id: WorkerId, *, free_bytes: int, capacity_bytes: int) -> Change:
        """The worker said how full its DRAM is. Told on when it changed by more than a part of the capacity."""
        member = self._members.get(worker_id)
        if member is None:
            return NOTHING
        member.free_bytes, member.capacity_bytes = free_bytes, capacity_bytes
        if abs(free_bytes - member.told_free_bytes) * ROOM_PARTS < capacity_bytes:
            return NOTHING
        member.told_free_bytes = free_bytes
        return Change(changed=(worker_id,))

    def disconnected(self, worker_id: WorkerId) -> Change:
        """Its stream ended without a word: suspected at once, down when it stays away."""
        member = self._members.get(worker_id)
        if member is None:
            return NOTHING
        member.connected = False
        if member.state is WorkerState.SUSPECT:
            return NOTHING
        member.state = WorkerState.SUSPECT
        return Change(changed=(worker_id,))

    def leave(self, worker_id: WorkerId) -> Change:
        """The worker said that it goes, or somebody who knows said that it will not come back: its entries are gone now."""
        member = self._members.get(worker_id)
        self._awaited.discard(worker_id)
        return NOTHING if member is None else self._drop(member)

    def tick(self, *, now_ms: int) -> Change:
        """Time passed: who is silent becomes SUSPECT, then DOWN and is taken out."""
        change = NOTHING
        for worker_id, member in list(self._members.items()):
            silent_ms = now_ms - member.heard_ms
            if silent_ms > self._dead_after_ms:
                change += self._drop(member)
            elif silent_ms > self._suspect_after_ms and member.state is not WorkerState.SUSPECT:
                member.state = WorkerState.SUSPECT
                change += Change(changed=(worker_id,))
        return change

    def _drop(self, member: Member) -> Change:
        member.state = WorkerState.DOWN
        worker_id = member.info.worker_id
        del self._members[worker_id]
        for holder in member.holders:
            self._by_holder.pop(holder, None)
        return Change(member.holders, (worker_id,))

    def _drop_next(self, member: Member) -> Change:
        unfinished, member.next_holder = member.next_holder, None
        if unfinished is None:
            return NOTHING
        self._by_holder.pop(unfinished, None)
        return Change(retired=(unfinished,))

    def _new_holder(self, worker_id: WorkerId) -> Holder:
        self._last_holder += 1
        assert self._last_holder < 1 << 32
        holder = Holder(self._last_holder)
        self._by_holder[holder] = worker_id
        return holder

    # --- questions ------------------------------------------------------------------------------------------------------

    def get(self, worker_id: WorkerId) -> Member | None:
        return self._members.get(worker_id)

    def of_holder(self, holder: Holder) -> Member | None:
        """The member behind a holder number; None when it was retired."""
        worker_id = self._by_holder.get(holder)
        return None if worker_id is None else self._members.get(worker_id)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def complete(self, *, now_ms: int) -> bool:
        """Whether the index has what the workers have: a miss is then a miss."""
        if self._awaited and now_ms - self._started_ms < self._grace_ms:
            return False
        return not any(
            member.connected and member.inventory_since_ms is not None and now_ms - member.inventory_since_ms < self._grace_ms
            for member in self._members.values()
        )
