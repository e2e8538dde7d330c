"""One namespace of a pool that may come and go: what a connector needs so that its engine never waits longer than a deadline.

Owns: opening (in the background, again and again), which namespace a configuration gets, and failures as values. Does not own
what is stored: keys and bytes are each connector's.

    absent ──keeper: connect, open──▶ open ──the namespace was deleted, or another pool is there──▶ opened again
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import kvpool
from kvpool.errors import InvalidArgument, KVPoolError, LayoutMismatch, NamespaceNotFound

T = TypeVar("T")

DEADLINE_MS: Final = 200.0  # what an engine's call may wait, before the bytes
BYTES_PER_S: Final = 1e9  # how fast bytes must come at least: what a transfer may take beyond that
ATTEMPT_MS: Final = 2_000.0  # for one attempt to connect
PAUSE_S: Final = (0.1, 0.2, 0.5, 1.0)  # between attempts; the last one is repeated
CHECK_S: Final = 5.0  # how often the keeper looks whether the namespace is still the same
LOG_EVERY_S: Final = 10.0  # a failure that goes on is said again after this
NAME_CHARS_MAX: Final = 96  # of a namespace, before what tells configurations apart
IDENTITY_CHARS_MAX: Final = 512  # a layout's name has no more


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How to reach the pool. `master` None: KVPOOL_MASTER or the default. `start_wait_ms`: how long a start waits for it."""

    master: str | None = None
    token_file: str | None = None
    transport: str | None = None
    deadline_ms: float = DEADLINE_MS
    start_wait_ms: float = 3_000.0
    replicas: int = 1
    quota_bytes: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], *, where: str) -> LinkSettings:
        """From an engine's configuration. InvalidArgument naming `where` and the key for a value of the wrong kind."""
        kinds: dict[str, tuple[type, ...]] = {
            "master": (str,), "token_file": (str,), "transport": (str,), "deadline_ms": (int, float),
            "start_wait_ms": (int, float), "replicas": (int,), "quota_bytes": (int,),
        }  # fmt: skip
        found: dict[str, Any] = {}
        for key, kind in kinds.items():
            value = given.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kind):
                raise InvalidArgument(f"{where}: {key}: {value!r} is no {' or '.join(k.__name__ for k in kind)}")
            found[key] = value
        settings = cls(**found)
        if settings.deadline_ms <= 0 or settings.start_wait_ms < 0:
            raise InvalidArgument(f"{where}: deadline_ms must be above 0 and start_wait_ms at least 0")
        return settings


def identity_text(facts: Mapping[str, object]) -> str:
    """A configuration in words, for a layout's name: equal exactly when all facts are. At most 512 printable characters."""
    text = " ".join(f"{key}={facts[key]}" for key in facts)
    if len(text) <= IDENTITY_CHARS_MAX and text.isprintable():
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    shown = "".join(c if c.isprintable() else "?" for c in text[: IDENTITY_CHARS_MAX - 80])
    return f"{shown} sha256={digest}"


def namespace_name(*parts: str) -> str:
    """A namespace's name from these parts: allowed characters only, not too long."""
    name = ".".join("".join(c if c.isprintable() and c not in "/ " else "-" for c in part) for part in parts if part)
    if len(name) <= NAME_CHARS_MAX:
        return name
    return f"{name[: NAME_CHARS_MAX - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


class PoolLink:
    """Thread-safe. Close it: it has a thread and a client."""

    def __init__(self, settings: LinkSettings, *, name: str, identity: str, block_bytes: int, block_tokens: int,
                 log: logging.Logger) -> None:  # fmt: skip
        """`name`: the namespace that the first configuration gets; another `identity` gets one of its own beside it, and the log
        says what differs. `block_bytes`: the most that a value may have. Waits `start_wait_ms` for the pool, then goes on
        without."""
        self.settings, self.name, self.identity, self.log = settings, name, identity, log
        self._layout = kvpool.KVLayout.opaque(block_bytes=block_bytes, block_tokens=block_tokens, name=identity)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._look = threading.Event()  # the keeper should look at once
        self._opened = threading.Event()
        self._client: kvpool.Client | None = None
        self._namespace: kvpool.Namespace | None = None
        self._is_beside = False  # another configuration has the name that was wanted
        self._said: dict[str, float] = {}
        self.failures = 0  # calls that ended with their default
        self._keeper = threading.Thread(target=self._keep, name="kvpool-keeper", daemon=True)
        self._keeper.start()
        if settings.start_wait_ms and not self._opened.wait(settings.start_wait_ms / 1e3):
            self.warn("absent", "event=pool_absent namespace=%r: nothing is loaded or saved until it is there", name)

    # --- opening --------------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """The keeper's thread: opens the namespace, and then looks now and then whether it is still there and still the same."""
        failed = 0
        while not self._closing.is_set():
            try:
                self._use(self._attempt(renewed=failed > 1))
                failed = 0
            except KVPoolError as error:
                failed += 1
                if not self._closing.is_set():
                    self.warn("open", "event=pool_not_open namespace=%r reason=%s", self.name, error)
            except Exception:
                failed += 1
                self.log.exception("event=pool_not_open namespace=%r", self.name)
            self._look.wait(PAUSE_S[min(failed, len(PAUSE_S)) - 1] if failed else CHECK_S)
            self._look.clear()

    def _attempt(self, *, renewed: bool) -> tuple[kvpool.Client, kvpool.Namespace]:
        """The namespace, of the client that there is; `renewed`: of a new one, since another pool may be at the address by now,
        and a client does not listen to a master that began later than the one it knew."""
        client = None if renewed else self._client
        if client is not None:
            return client, self._namespace_of(client)
        settings = self.settings
        client = kvpool.connect(settings.master, token_file=settings.token_file, transport=settings.transport,  # type: ignore[arg-type]
                                deadline_ms=ATTEMPT_MS)  # fmt: skip
        try:
            return client, self._namespace_of(client)
        except BaseException:
            client.close()
            raise

    def _use(self, found: tuple[kvpool.Client, kvpool.Namespace]) -> None:
        client, namespace = found
        with self._lock:
            closing = self._closing.is_set()
            before, news = self._client, self._namespace is not namespace
            if not closing:
                self._client, self._namespace = client, namespace
                self._opened.set()
        if closing and client is not before:
            client.close()
        if closing or not news:
            return
        self.log.info("event=pool_open namespace=%r block_bytes=%d identity=%r", namespace.name, namespace.block_bytes,
                      self.identity)  # fmt: skip
        if before is not None and before is not client:
            before.close()

    def _namespace_of(self, client: kvpool.Client) -> kvpool.Namespace:
        try:
            return self._open(client, self.name)
        except LayoutMismatch as error:
            if self._is_beside:
                raise
            beside = f"{self.name}~{self._layout.fingerprint.hex()[:12]}"
            namespace = self._open(client, beside)
            self.log.warning("event=pool_separated namespace=%r: another configuration has %r, nothing is shared with it: %s",
                             beside, self.name, error)  # fmt: skip
            self.name, self._is_beside = beside, True
            return namespace

    def _open(self, client: kvpool.Client, name: str) -> kvpool.Namespace:
        settings = self.settings
        try:
            return client.namespace(name, self._layout, hash="external", deadline_ms=ATTEMPT_MS)
        except (NamespaceNotFound, LayoutMismatch):  # asked to create it, the master says all that differs
            return client.namespace(name, self._layout, create=True, hash="external", replicas=settings.replicas,
                                    quota_bytes=settings.quota_bytes, deadline_ms=ATTEMPT_MS)  # fmt: skip

    # --- calls ----------------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._namespace is not None

    @property
    def namespace(self) -> kvpool.Namespace | None:
        """The namespace when the pool is there. Never waits."""
        return self._namespace

    def wait_open(self, timeout_s: float) -> bool:
        """Whether the pool is there, at the latest after `timeout_s`."""
        return self._opened.wait(timeout_s)

    def deadline_ms(self, n_bytes: int = 0) -> float:
        """For a call that moves so many bytes."""
        return self.settings.deadline_ms + n_bytes / BYTES_PER_S * 1e3

    def ask(self, what: str, call: Callable[[kvpool.Namespace], T], default: T) -> T:
        """`call` with the namespace; `default` when the pool is away or the call fails, which the log says. Never raises."""
        namespace = self._namespace
        if namespace is None:
            self.failures += 1
            return default
        try:
            return call(namespace)
        except NamespaceNotFound as error:
            self.warn("gone", "event=namespace_gone namespace=%r reason=%s: it is opened again", namespace.name, error)
            self._look.set()
        except KVPoolError as error:
            if not self._closing.is_set():
                self.warn(what, "event=pool_call_failed call=%s namespace=%r reason=%s", what, namespace.name, error)
        except Exception:
            self.log.exception("event=pool_call_failed call=%s namespace=%r", what, namespace.name)
        self.failures += 1
        return default

    def warn(self, kind: str, message: str, *args: object) -> None:
        """A warning, of each kind one in `LOG_EVERY_S`."""
        now = time.monotonic()
        with self._lock:
            if now - self._said.get(kind, -LOG_EVERY_S) < LOG_EVERY_S:
                return
            self._said[kind] = now
        self.log.warning(message, *(str(one) if isinstance(one, BaseException) else one for one in args))  # (no frames are kept)

    def close(self) -> None:
        """Ends the client and its threads. Calls under way end with their default. Idempotent."""
        self._closing.set()
        self._look.set()
        with self._lock:
            client = self._client
            self._client = self._namespace = None
        if client is not None:
            client.close()
        if self._keeper is not threading.current_thread():
            self._keeper.join(timeout=ATTEMPT_MS / 1e3 + 1.0)
