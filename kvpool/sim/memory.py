"""Simulated DRAM of one worker process: its arenas and generation words. Stands for `worker.tiers.dram.DramTier`.

Local readers look into it without asking, as into the real one's shared memory: what they see is what lies there at that moment.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpool.core.types import NamespaceUid
from kvpool.sim.values import NOTHING


class SimDram:
    """`on_bump(uid, gen_index)`: a slot was freed."""

    state = "ok"

    def __init__(self, *, on_bump: Callable[[NamespaceUid, int], None]) -> None:
        self.slots: dict[NamespaceUid, dict[int, bytes]] = {}
        self._words: dict[tuple[NamespaceUid, int], int] = {}
        self._on_bump = on_bump

    def open_arena(self, uid: NamespaceUid) -> None:
        self.slots.setdefault(uid, {})

    def close_arena(self, uid: NamespaceUid) -> None:
        self.slots.pop(uid, None)

    def read(self, uid: NamespaceUid, offset: int) -> bytes:
        return self.slots.get(uid, {}).get(offset, NOTHING)

    def view(self, uid: NamespaceUid, offset: int, n_bytes: int) -> memoryview:
        """As `read`, for the real drain."""
        del n_bytes
        return memoryview(self.read(uid, offset))

    def write(self, uid: NamespaceUid, offset: int, data: bytes) -> None:
        self.slots[uid][offset] = data

    def punch(self, uid: NamespaceUid, offset: int, n_bytes: int) -> None:
        arena = self.slots.get(uid, {})
        for at in [at for at in arena if offset <= at < offset + n_bytes]:
            del arena[at]

    def bump(self, uid: NamespaceUid, gen_index: int) -> None:
        self._words[uid, gen_index] = self.generation(uid, gen_index) + 1
        self._on_bump(uid, gen_index)

    def generation(self, uid: NamespaceUid, gen_index: int) -> int:
        return self._words.get((uid, gen_index), 0)

    def close(self) -> None:
        self.slots.clear()
