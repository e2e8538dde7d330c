"""One namespace of a pool that may come and go: what a connector needs so that its engine never waits longer than a deadline.

Owns: opening (in the background, again and again), which namespace a configuration gets, and failures as values. Does not own
what is stored: keys and bytes are each connector's.

    absent ──thread: connect, open──▶ open ──the namespace was deleted, or is another one──▶ absent
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
    """Thread-safe. Close it: it has a thread while the pool is away, and a client."""

    def __init__(self, settings: LinkSettings, *, name: str, identity: str, block_bytes: int, block_tokens: int,
                 log: logging.Logger) -> None:  # fmt: skip
        """`name`: the namespace that the first configuration gets; another `identity` gets one of its own beside it, and the log
        says what differs. `block_bytes`: the most that a value may have. Waits `start_wait_ms` for the pool, then goes on
        without."""
        self.settings, self.name, self.identity, self.log = settings, name, identity, log
        self._layout = kvpool.KVLayout.opaque(block_bytes=block_bytes, block_tokens=block_tokens, name=identity)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._opened = threading.Event()
        self._client: kvpool.Client | None = None
        self._namespace: kvpool.Namespace | None = None
        self._opener: threading.Thread | None = None
        self._said: dict[str, float] = {}
        self.failures = 0  # calls that ended with their default
        self._open_again(None)
        if settings.start_wait_ms and not self._opened.wait(settings.start_wait_ms / 1e3):
            self.warn("absent", "event=pool_absent namespace=%r: nothing is loaded or saved until it is there", name)

    # --- opening --------------------------------------------------------------------------------------------------------

    def _open_again(self, lost: kvpool.Namespace | None) -> None:
        with self._lock:
            if self._closing.is_set() or self._opener is not None or (lost is not None and self._namespace is not lost):
                return
            self._namespace = None
            self._opened.clear()
            self._opener = threading.Thread(target=self._open, name="kvpool-open", daemon=True)
            self._opener.start()

    def _open(self) -> None:
        attempt = 0
        while not self._closing.is_set():
            try:
                namespace = self._attempt()
            except KVPoolError as error:
                self.warn("open", "event=pool_not_open namespace=%r reason=%s", self.name, error)
            except Exception:
                self.log.exception("event=pool_not_open namespace=%r", self.name)
            else:
                with self._lock:
                    self._opener = None
                    if not self._closing.is_set():
                        self._namespace = namespace
                        self._opened.set()
                return
            self._closing.wait(PAUSE_S[min(attempt, len(PAUSE_S) - 1)])
            attempt += 1

    def _attempt(self) -> kvpool.Namespace:
        client = self._client
        if client is None:
            settings = self.settings
            client = kvpool.connect(settings.master, token_file=settings.token_file, transport=settings.transport,  # type: ignore[arg-type]
                                    deadline_ms=ATTEMPT_MS)  # fmt: skip
            with self._lock:
                if not self._closing.is_set():
                    self._client = client
            if self._client is not client:
                client.close()
                raise InvalidArgument("client: the connector was closed")
        try:
            namespace = self._namespace_of(client, self.name)
        except LayoutMismatch as error:
            beside = f"{self.name}~{hashlib.sha256(self.identity.encode()).hexdigest()[:12]}"
            self.log.warning("event=pool_separated namespace=%r: another configuration has %r, nothing is shared with it: %s",
                             beside, self.name, error)  # fmt: skip
            namespace = self._namespace_of(client, beside)
        self.log.info("event=pool_open namespace=%r block_bytes=%d identity=%r", namespace.name, namespace.block_bytes,
                      self.identity)  # fmt: skip
        return namespace

    def _namespace_of(self, client: kvpool.Client, name: str) -> kvpool.Namespace:
        return client.namespace(name, self._layout, create=True, hash="external", replicas=self.settings.replicas,
                                quota_bytes=self.settings.quota_bytes, deadline_ms=ATTEMPT_MS)  # fmt: skip

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
            self._open_again(namespace)
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
        self.log.warning(message, *args)

    def close(self) -> None:
        """Ends the client and its threads. Calls under way end with their default. Idempotent."""
        self._closing.set()
        with self._lock:
            client, opener = self._client, self._opener
            self._client = self._namespace = None
        if client is not None:
            client.close()
        if opener is not None and opener is not threading.current_thread():
            opener.join(timeout=ATTEMPT_MS / 1e3 + 1.0)
