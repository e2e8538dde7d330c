"""Quotas at the master: each worker's part of each namespace's quota, told when it changes. How they are split: `core.quota`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.core.quota import Share, shares
from kvpool.core.types import NamespaceUid, Tier, WorkerId
from kvpool.v1 import master_pb2 as pb

if TYPE_CHECKING:
    from kvpool.master.state import MasterState

Shares = dict[NamespaceUid, Share]


class Quotas:
    """On the loop only."""

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self._seen: object = None
        self._shares: dict[WorkerId, Shares] = {}

    def current(self) -> dict[WorkerId, Shares]:
        """By worker; computed anew when workers, their sizes or the namespaces with a quota have changed."""
        state = self._state
        limited = {uid: ns.spec for uid, ns in state.namespaces.items() if ns.spec.quota_bytes}
        capacities = {m.info.worker_id: self._capacity(m.info.worker_id, m.capacity_bytes) for m in state.members}
        seen = (frozenset(limited), tuple(sorted(capacities.items())))
        if seen != self._seen:
            self._seen = seen
            self._shares = {worker: {} for worker in capacities}
            for uid, spec in limited.items():
                unit, largest = 1 if spec.variable else spec.block_bytes, spec.block_bytes
                parts = shares(spec.quota_bytes, unit=unit, largest=largest, capacities=capacities)
                for worker, share in parts.items():
                    self._shares[worker][uid] = share
        return self._shares

    def _capacity(self, worker_id: WorkerId, dram_bytes: int) -> tuple[int, int]:
        extra = self._state.extras.get(worker_id)
        ssd = sum(tier.capacity_bytes for tier in extra.tiers if tier.tier == Tier.SSD.value) if extra is not None else 0
        return dram_bytes, ssd

    def used(self, uid: NamespaceUid) -> tuple[int, int]:
        """Bytes in (DRAM, SSD) of all workers, as their last heartbeats said."""
        found = [use for extra in self._state.extras.values() for use in extra.uses if use.namespace == uid]
        return sum(use.dram_bytes for use in found), sum(use.ssd_bytes for use in found)


def changed(told: Shares, now: Shares) -> pb.QuotaUpdate | None:
    """What a worker that was told `told` must hear; None: nothing."""
    new = [(uid, share) for uid, share in now.items() if told.get(uid) != share]
    if not new:
        return None
    return pb.QuotaUpdate(
        shares=[pb.NamespaceUse(namespace=uid, dram_bytes=share.dram, ssd_bytes=share.ssd) for uid, share in new]
    )
