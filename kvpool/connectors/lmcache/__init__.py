"""LMCache on the pool: a remote storage plug-in (`KVPoolConnectorAdapter`, `KVPoolConnector`) and, for its multi-process mode, an
L2 adapter plug-in (`KVPoolL2Adapter`). Each is named by this module's path and its class. The L2 part loads at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.connectors.lmcache.remote import KVPoolConnector, KVPoolConnectorAdapter

if TYPE_CHECKING:
    from kvpool.connectors.lmcache.l2 import KVPoolL2Adapter

__all__ = ["KVPoolConnector", "KVPoolConnectorAdapter", "KVPoolL2Adapter"]


def __getattr__(name: str) -> Any:
    if name == "KVPoolL2Adapter":
        from kvpool.connectors.lmcache.l2 import KVPoolL2Adapter

        return KVPoolL2Adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
