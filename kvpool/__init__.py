"""kvpool: a tiered pool for LLM KV cache. The public names, nothing else; each is loaded at its first use (PEP 562).

    import kvpool
    client = kvpool.connect("127.0.0.1:7400")

`import kvpool` loads neither torch, lmdb, redis, grpc nor pydantic. What the names do is in the modules that they come from.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool import aio as aio
    from kvpool import errors as errors
    from kvpool.client.client import Client, connect
    from kvpool.client.holds import Hold
    from kvpool.client.namespace import Namespace
    from kvpool.client.put_session import PutSession
    from kvpool.client.results import GetResult, PutResult, RemoveResult, Source
    from kvpool.client.views import View
    from kvpool.core.hashing import PrefixHashes
    from kvpool.core.layout import KVLayout
    from kvpool.core.types import MissCause, Outcome, RemoveOutcome, Tier
    from kvpool.errors import KVPoolError

__version__ = "0.1.0"

__all__ = [
    "Client",
    "GetResult",
    "Hold",
    "KVLayout",
    "KVPoolError",
    "MissCause",
    "Namespace",
    "Outcome",
    "PrefixHashes",
    "PutResult",
    "PutSession",
    "RemoveOutcome",
    "RemoveResult",
    "Source",
    "Tier",
    "View",
    "aio",
    "connect",
    "errors",
]

_HOME = {
    "Client": "kvpool.client.client",
    "connect": "kvpool.client.client",
    "GetResult": "kvpool.client.results",
    "PutResult": "kvpool.client.results",
    "RemoveResult": "kvpool.client.results",
    "Source": "kvpool.client.results",
    "Hold": "kvpool.client.holds",
    "Namespace": "kvpool.client.namespace",
    "PutSession": "kvpool.client.put_session",
    "View": "kvpool.client.views",
    "KVLayout": "kvpool.core.layout",
    "PrefixHashes": "kvpool.core.hashing",
    "MissCause": "kvpool.core.types",
    "Outcome": "kvpool.core.types",
    "RemoveOutcome": "kvpool.core.types",
    "Tier": "kvpool.core.types",
    "KVPoolError": "kvpool.errors",
}
_MODULES = frozenset(("aio", "errors"))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kvpool.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kvpool' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
