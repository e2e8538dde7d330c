"""Mooncake Store's Python API on kvpool: programs written for `mooncake.store` run unchanged.

`clients/mooncake_shim` installs these names as `mooncake.store`. What each return code means is in `codes`; what works across
processes and what has no counterpart is in the shim's README.
"""

from kvpool.connectors.mooncake.config import ObjectDataType, ReplicateConfig, SoftPinAction
from kvpool.connectors.mooncake.memory import BufferHandle, MooncakeHostMemAllocator, bind_to_numa_node
from kvpool.connectors.mooncake.replicas import ReplicaDescriptor, ReplicaStatus
from kvpool.connectors.mooncake.store import MooncakeDistributedStore

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
