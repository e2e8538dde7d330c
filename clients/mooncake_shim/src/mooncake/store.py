"""`mooncake.store`, on kvpool."""

import sys

from kvpool.connectors.mooncake import (
    BufferHandle,
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    bind_to_numa_node,
)

__all__ = [
    "BufferHandle",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "bind_to_numa_node",
]

# vLLM's CPU attention uses AMX without asking the kernel for it. A worker whose first forward pass has few tokens, as after a hit
# on all blocks but the last token, then dies by SIGILL. This module is loaded in every such worker, and torch can ask.
if (_torch := sys.modules.get("torch")) is not None and hasattr(_torch.cpu, "_init_amx"):
    _torch.cpu._init_amx()
