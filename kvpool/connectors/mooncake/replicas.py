"""Where a value is, in Mooncake's words: one descriptor for each worker and tier that has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from kvpool.core.fetch import Candidates
from kvpool.core.types import Tiers


class ReplicaStatus(IntEnum):
    """Only complete ones are ever seen."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class Descriptor:
    """`size` bytes at a worker ("host:port"). `buffer_address` is 0: the memory is the worker's own."""

    size: int
    transport_endpoint: str
    buffer_address: int = 0


@dataclass(frozen=True, slots=True)
class MemoryDescriptor:
    """Of a copy in a worker's memory."""

    buffer_descriptor: Descriptor


@dataclass(frozen=True, slots=True)
class DiskDescriptor:
    """Of a copy on a worker's SSD."""

    file_path: str
    object_size: int


@dataclass(frozen=True, slots=True)
class ReplicaDescriptor:
    """One copy."""

    tier: Tiers
    worker: str
    size: int
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        return self.tier is not Tiers.SSD

    def is_disk_replica(self) -> bool:
        return False  # that is a file which all clients share

    def is_local_disk_replica(self) -> bool:
        return self.tier is Tiers.SSD

    def get_memory_descriptor(self) -> MemoryDescriptor:
        return MemoryDescriptor(Descriptor(self.size, self.worker))

    def get_disk_descriptor(self) -> DiskDescriptor:
        return DiskDescriptor("", self.size)


def descriptors_of(places: Candidates, size: int, address: Callable[[int], str]) -> list[ReplicaDescriptor]:
    """Copies in memory first."""
    found = [ReplicaDescriptor(tier, address(peer), size)
             for peer, tiers in places for tier in (Tiers.DEVICE, Tiers.DRAM, Tiers.SSD) if tiers & tier]  # fmt: skip
    return sorted(found, key=lambda one: not one.is_memory_replica())
