"""What the master says of the other workers, for a worker that is to be emptied: who takes blocks and has room, who has which.

Owns the channel for these questions. What follows from the answers is `core.drain`; the moving itself is `worker.drain`. For
one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
import numpy as np

from kvpool.core.drain import Rooms
from kvpool.core.types import Key, NamespaceUid
from kvpool.errors import KVPoolError, NamespaceNotFound
from kvpool.transport.rpc import open_channel, raise_for
from kvpool.v1 import master_pb2 as pb
from kvpool.v1 import master_pb2_grpc

ASK_S: Final = 3.0  # for the master to answer one question
JOINING, UP, SUSPECT = 0, 1, 2  # HolderInfo.state


class Elsewhere:
    """`me`: this worker's id. `master()`: address of the master to ask, "" while it is away. Every question raises KVPoolError
    when there is no answer."""

    def __init__(self, me: str, *, token: str, master: Callable[[], str]) -> None:
        self._me = me
        self._token = token
        self._master = master
        self._channel: tuple[str, Any] | None = None
        self.others: dict[str, pb.HolderInfo] = {}  # those that may be written to
        self.rooms = Rooms()
        self.looked_at = 0.0  # monotonic s

    def look_around(self) -> None:
        """Who may be written to, and has how much room: in DRAM, and on SSD where that works."""
        reply = self._ask("Describe", pb.DescribeRequest())
        others, rooms = {}, {}
        for worker in reply.workers:
            name = worker.info.worker_id
            if worker.info.state != UP or name == self._me:
                continue
            tiers = [tier for tier in worker.tiers if tier.state == "ok"]
            others[name] = worker.info
            free_bytes = sum(max(0, tier.capacity_bytes - tier.used_bytes) for tier in tiers)
            rooms[name] = (free_bytes, sum(tier.capacity_bytes for tier in tiers))
        self.others, self.looked_at = others, time.monotonic()
        self.rooms.told(rooms, now_ms=self.looked_at * 1e3)

    def homes(self, uid: NamespaceUid, keys: Sequence[Key]) -> list[str] | None:
        """Per key a worker that has it and stays, or ""; None: the master does not know the namespace."""
        try:
            reply = self._ask("Locate", pb.LocateRequest(namespace=uid, keys=b"".join(keys)))
        except NamespaceNotFound:
            return None
        stay = {i.holder: i.worker_id for i in reply.holder_infos if i.state in (UP, JOINING) and i.worker_id != self._me}
        homes = [""] * len(keys)
        if stay:
            of_key = np.repeat(np.arange(len(keys)), np.frombuffer(reply.n_replicas, dtype=np.uint8))
            holders = np.frombuffer(reply.holders, dtype="<u4")
            for index in np.flatnonzero(np.isin(holders, list(stay))).tolist():
                homes[of_key[index]] = stay[int(holders[index])]
        return homes

    def holders(self, uid: NamespaceUid, keys: Sequence[Key]) -> list[list[str]] | None:
        """Per key the other workers that have it and stay; None: the master does not know the namespace. Raises KVPoolError also
        while the index is being rebuilt."""
        try:
            reply = self._ask("Locate", pb.LocateRequest(namespace=uid, keys=b"".join(keys)))
        except NamespaceNotFound:
            return None
        if not reply.complete:
            raise KVPoolError("the master is rebuilding its index")
        stay = [i for i in reply.holder_infos if i.state in (JOINING, UP, SUSPECT) and i.worker_id != self._me]
        names = {i.holder: i.worker_id for i in stay}
        found: list[list[str]] = []
        holders, at = np.frombuffer(reply.holders, dtype="<u4").tolist(), 0
        for n in reply.n_replicas:
            found.append([names[holder] for holder in holders[at : at + n] if holder in names])
            at += n
        return found

    def _ask(self, method: str, request: Any) -> Any:
        address = self._master()
        if not address:
            raise KVPoolError("the master is away")
        if self._channel is None or self._channel[0] != address:
            self.close()
            self._channel = (address, open_channel(address, self._token))
        stub = master_pb2_grpc.MasterStub(self._channel[1])  # type: ignore[no-untyped-call]
        try:
            return getattr(stub, method)(request, timeout=ASK_S)
        except grpc.RpcError as error:
            raise_for(error, address=address)

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel[1].close()
