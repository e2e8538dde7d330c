"""kvpool for vLLM: kv_connector="KVPoolConnector", kv_connector_module_path="kvpool.connectors.vllm".

`settings`, `identity`, `link` and `plan` know nothing of vLLM; `facts` reads its configuration, `blocks` moves paged tensors,
`scheduler` and `worker` are the two halves, `connector` is the class that vLLM makes (once in each half).
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVPoolConnector"]


def __getattr__(name: str) -> Any:
    """The connector is loaded when vLLM asks for it: the other modules here are of use without vLLM."""
    if name == "KVPoolConnector":
        from kvpool.connectors.vllm.connector import KVPoolConnector

        return KVPoolConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
