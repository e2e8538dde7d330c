"""A simulated worker's drain: the real `worker.drain.Drainer`, its thread on the simulated loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from kvpool.core.drain import Phase
from kvpool.core.slots import Slot
from kvpool.sim.node import SimNode
from kvpool.sim.session import SimAgent
from kvpool.sim.threads import wait
from kvpool.worker.drain import Drainer


class _Disk:
    """The SSD tier for code that blocks."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def read_block(self, slot: Slot, *, block_sum: int, **_: Any) -> Any:
        device = self._node.device
        assert device is not None
        return _staged(wait(device.read_block(slot, block_sum=block_sum)))


@contextmanager
def _staged(data: bytes) -> Iterator[Any]:
    yield SimpleNamespace(view=memoryview(data))


class _Node:
    """The node as the drain uses it."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self.ssd = None if node.device is None else _Disk(node)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


class SimDrainer(Drainer):
    """`on_done(began_s, leaving)`: it says that nothing is here alone; `began_s`: when it began to look (the loop's time)."""

    def __init__(self, node: SimNode, agent: SimAgent, *, on_done: Callable[[float, bool], None]) -> None:
        seen: Any = _Node(node)
        super().__init__(seen, token="", master=lambda: agent.master, beat=agent.beat)
        agent.on_drain, agent.drain_status = self.follow, self.status
        self._on_done, self._clock, self._began_s = on_done, node.process.loop.time, 0.0

    def _pass(self, wish: int) -> float:
        self._began_s = self._clock()
        return super()._pass(wish)

    def _end(self, phase: Phase, reason: str = "") -> None:
        if phase is Phase.DONE:
            self._on_done(self._began_s, self._leaving and not self._wanted)
        super()._end(phase, reason)
