"""The pool as an engine's half sees it: there or not. Connects in the background, again and again, and never makes the engine
wait.

Owns the client, the namespace that the engine's identity names, and the log lines that say why two engines do not share blocks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import kvpool
from kvpool.client.client import Client
from kvpool.client.namespace import Namespace
from kvpool.connectors.vllm.identity import Identity, differences, values_of
from kvpool.connectors.vllm.settings import ConnectorSettings
from kvpool.errors import KVPoolError, MasterUnavailable

log = logging.getLogger("vllm.kvpool")  # below vLLM's own logger, so that its settings and format hold for these lines

RETRY_S: Final = (0.1, 1.0)  # first and longest pause between attempts to reach a pool that is away
ATTEMPT_MS: Final = 2_000
CHORES_MAX: Final = 256  # releases of holds under way; more are left to their time


class PoolLink:
    """`namespace` is None while the pool cannot be used. Thread-safe. `close` ends the thread and the client."""

    def __init__(self, settings: ConnectorSettings, identity: Identity, *, who: str) -> None:
        self.settings, self.identity, self._who = settings, identity, who
        self.namespace: Namespace | None = None
        self._client: Client | None = None
        self._closing = threading.Event()
        self._wanted = threading.Event()
        self._wanted.set()
        self._ready = threading.Event()
        self._lock = threading.Lock()
        self._chores = ThreadPoolExecutor(1, thread_name_prefix="kvpool-chores")
        self._n_chores = 0
        self._thread = threading.Thread(target=self._run, name="kvpool-link", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_ms: float) -> bool:
        """Waits until there is a namespace, at most so long; it may come later just as well."""
        return self._ready.wait(timeout_ms / 1e3)

    def lost(self, error: KVPoolError) -> None:
        """The namespace is not there any more (its pool was made anew): it is opened, or made, again."""
        if self.namespace is not None:
            log.warning("event=kvpool_namespace_lost who=%s reason=%s", self._who, error)
            self.namespace = None
            self._ready.clear()
            self._wanted.set()

    def later(self, chore: Callable[[], object]) -> None:
        """Carried out on another thread, soon; dropped when too much waits or the link is closed."""
        with self._lock:
            if self._closing.is_set() or self._n_chores >= CHORES_MAX:
                return
            self._n_chores += 1
            self._chores.submit(self._chore, chore)

    def _chore(self, chore: Callable[[], object]) -> None:
        try:
            with contextlib.suppress(KVPoolError):
                chore()
        finally:
            with self._lock:
                self._n_chores -= 1

    def close(self) -> None:
        """Idempotent. Calls under way in other threads end with an error or a miss."""
        with self._lock:
            self._closing.set()
            self._wanted.set()
        self._chores.shutdown(wait=True, cancel_futures=True)
        self._thread.join()
        self.namespace = None
        if self._client is not None:
            self._client.close()

    # --- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause, told = RETRY_S[0], ""
        while True:
            self._wanted.wait()
            if self._closing.is_set():
                return
            try:
                self._open()
            except KVPoolError as error:
                if not isinstance(error, MasterUnavailable) or not told:
                    reason = f"{error.code}: {error}"
                    if reason != told:
                        log.warning("event=kvpool_unavailable who=%s reason=%s the engine computes everything itself meanwhile",
                                    self._who, reason)  # fmt: skip
                    told = reason
                self._closing.wait(pause)
                pause = min(2 * pause, RETRY_S[1])
                continue
            pause, told = RETRY_S[0], ""
            self._wanted.clear()
            self._ready.set()

    def _open(self) -> None:
        if self._client is None:
            self._client = self._connect()
        identity = self.identity
        began = time.monotonic()
        layouts = self._client.layouts(deadline_ms=ATTEMPT_MS)
        namespace = self._client.namespace(identity.namespace, identity.layout, create=True, hash="external",
                                           replicas=self.settings.replicas, deadline_ms=ATTEMPT_MS)  # fmt: skip
        self._tell(layouts, ms=(time.monotonic() - began) * 1e3)
        self.namespace = namespace

    def _connect(self) -> Client:
        settings = self.settings
        given: dict[str, Any] = {"master": settings.master, "token_file": settings.token_file, "transport": settings.transport,
                                 "mirror_bytes_max": settings.mirror_bytes_max}  # fmt: skip
        return kvpool.connect(deadline_ms=ATTEMPT_MS, **{key: value for key, value in given.items() if value})

    def _tell(self, layouts: dict[str, Any], *, ms: float) -> None:
        """The one line about where this engine's blocks go, and one for each other kind of engine of that model."""
        own = self.identity
        log.info("event=kvpool_ready who=%s namespace=%s block_bytes=%d found=%s connect_ms=%.0f", self._who, own.namespace,
                 own.block_bytes, own.namespace in layouts, ms)  # fmt: skip
        for name, layout in sorted(layouts.items()):
            values = values_of(layout) if name.startswith(own.family) and name != own.namespace else None
            if values is not None:
                log.warning("event=kvpool_separate who=%s namespace=%s other=%s no blocks are shared, for these differ: %s",
                            self._who, own.namespace, name, "; ".join(differences(own.values, values)))  # fmt: skip


