"""A prober: uses one worker of a pool, or its leader, all the time, so that it sees the end of a fault when users would."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import kvpool
from tests.support.load import EXPECTED, Told, space
from tests.support.payload import check, payload

PROBE_MS = 500
PROBE_EVERY_S = 0.02
BLOCK = 4096


class Probe(threading.Thread):
    """Puts and gets at one worker by TCP; without a worker id: removals, which need leader and store. Every byte CHECKed."""

    def __init__(self, addresses: str, name: str, *, worker_id: str | None, seed: int) -> None:
        super().__init__(daemon=True)
        self.name, self.worker_id = name, worker_id
        self.told = Told()
        self.stop = threading.Event()
        self._addresses = addresses
        self._chance = random.Random(f"{seed}/{name}")
        self._good: deque[tuple[float, float]] = deque(maxlen=10_000)  # (start, end) of calls that did what they should
        self._last: str | None = None  # a key that the worker has
        self._n = 0

    def run(self) -> None:
        client = None
        while not self.stop.is_set():
            try:
                if client is None:
                    client = kvpool.connect(self._addresses, transport="tcp")
                    ns = space(client, BLOCK)
                self._leader(ns) if self.worker_id is None else self._worker(ns)
            except EXPECTED as error:
                self.told.refused[type(error).__name__] += 1
            except AssertionError as error:
                self.told.wrong.append(f"{self.name}: {error}")
            except Exception as error:
                self.told.errors.append(f"{self.name}: {type(error).__name__}: {error}")
            self.stop.wait(PROBE_EVERY_S)
        if client is not None:
            client.close()

    def _timed(self, what: str, call: Callable[[], Any]) -> tuple[Any, float]:
        began = time.monotonic()
        try:
            return call(), began
        finally:
            self.told.took(f"probe {what}", time.monotonic() - began, PROBE_MS / 1e3, who=self.name)

    def _leader(self, ns: kvpool.Namespace) -> None:
        self._n += 1
        hashes = ns.hash([0], extra=f"{self.name}/{self._n}".encode())
        _, began = self._timed("remove", lambda: ns.remove(hashes, deadline_ms=PROBE_MS))
        self._good.append((began, time.monotonic()))

    def _worker(self, ns: kvpool.Namespace) -> None:
        if self._last is None or self._chance.random() < 0.2:
            self._n += 1
            key = f"{self.name}/{self._n}/{self._chance.random()}"
            hashes = ns.hash([0], extra=key.encode())
            self._timed("put", lambda: ns.put(hashes, [payload(key, 1, BLOCK)], deadline_ms=PROBE_MS))
        else:
            key = self._last
            hashes = ns.hash([0], extra=key.encode())
        out = bytearray(BLOCK)
        got, began = self._timed("get", lambda: ns.get(hashes, [out], deadline_ms=PROBE_MS))
        if got.n_blocks:
            check(key, out)
            if got.sources[0].worker == self.worker_id:
                self._last = key
                self._good.append((began, time.monotonic()))
        elif key == self._last and got.miss is not None and got.miss.value != "timeout":
            self._last = None

    def recovered(self, since: float) -> float | None:
        """Seconds from `since` to the end of the first good call that began later; None: none yet."""
        return next((end - since for start, end in list(self._good) if start >= since), None)
