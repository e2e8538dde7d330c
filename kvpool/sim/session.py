"""A simulated worker's session with the master: the real agent over a simulated stream, whose thread may wait for the disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from kvpool.core.types import NamespaceUid
from kvpool.errors import KVPoolError, MasterUnavailable
from kvpool.master.wire import spec_from_proto
from kvpool.sim.clock import Process
from kvpool.sim.network import Endpoint, Network, Reset
from kvpool.sim.node import SimNode
from kvpool.v1 import master_pb2 as pb
from kvpool.worker.agent import Agent
from kvpool.worker.tiers.base import TierError


class SessionCall:
    """A gRPC stream to the master, as the agent uses it."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network, self._process, self._address = network, process, address
        self._end: Endpoint | None = None

    async def write(self, message: pb.WorkerMessage) -> None:
        if self._end is None:
            self._end = await self._connect()
            self._end.send("session")
        try:
            self._end.send(message)
        except Reset:
            raise MasterUnavailable("the session's connection is over") from None

    async def _connect(self) -> Endpoint:
        try:
            return await self._network.connect(self._process, self._address)
        except ConnectionError as error:
            raise MasterUnavailable(str(error)) from error

    async def read(self) -> pb.MasterMessage:
        assert self._end is not None
        try:
            message = await self._end.recv()
        except Reset:
            raise MasterUnavailable("the session's connection is over") from None
        if isinstance(message, KVPoolError):
            raise message
        assert isinstance(message, pb.MasterMessage)
        return message

    async def done_writing(self) -> None:
        """What was sent is on its way."""

    async def close(self) -> None:
        if self._end is not None:
            self._end.close()


class SimAgent(Agent):
    """The real agent."""

    def __init__(self, node: SimNode, network: Network, *, masters: str, address: str) -> None:
        settings: Any = SimpleNamespace(master=masters)
        super().__init__(
            node, settings, token="", address=address, unix_name="", http="", now_s=node.process.now_s, chance=node.process.random
        )
        self.sim, self._network = node, network
        self._info.host_id = node.process.host

    def _open(self, address: str) -> tuple[Any, Callable[[], Awaitable[None]]]:
        call = SessionCall(self._network, self.sim.process, address)
        return call, call.close

    async def _apply_welcome(self, welcome: pb.Welcome) -> None:  # type: ignore[override]
        named = {bytes(update.namespace.uid) for update in welcome.namespaces}
        for uid in [uid for uid in self.sim.known_namespaces() if uid not in named]:
            self.sim.delete_namespace(uid)
        for update in welcome.namespaces:
            await self._apply_namespace(update)

    async def _apply_namespace(self, update: pb.NamespaceUpdate) -> None:  # type: ignore[override]
        if update.deleted:
            self.sim.delete_namespace(NamespaceUid(update.namespace.uid))
            return
        self._unapplied.pop(update.namespace.uid, None)
        missed = [update.missed_keys] if update.missed_keys else []
        try:
            await self.sim.catch_up_slowly(
                spec_from_proto(update.namespace), drop_all=update.drop_blocks or update.missed_all, missed=missed
            )
        except TierError as error:
            self.sim.note("cannot catch up", error.reason)
            self._apply_later(update)

    async def _remove(self, task: pb.RemoveTask) -> None:  # type: ignore[override]
        done = pb.TaskDone(task_id=task.task_id)
        try:
            done.codes, done.n_removed = await self.sim.remove_noted(
                NamespaceUid(task.namespace), None if task.all else task.keys, removal_seq=task.removal_seq
            )
        except (KVPoolError, TierError) as error:
            done.error = str(error)
        self._say(pb.WorkerMessage(task_done=done))
