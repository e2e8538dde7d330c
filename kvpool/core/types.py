"""Words of the pool as types: ids, tiers, outcomes, miss causes, limits. No behaviour beyond conversions."""

from __future__ import annotations

from enum import Enum, IntEnum, IntFlag
from typing import Final, NewType

NamespaceUid = NewType("NamespaceUid", bytes)  # 16 random bytes, made once by the master when the namespace is created
WorkerId = NewType("WorkerId", str)  # lives in the worker's data directory
Incarnation = NewType("Incarnation", int)  # random u64 of one worker start, never 0
Epoch = NewType("Epoch", int)  # one master's term, grows
Holder = NewType("Holder", int)  # the master's u32 for one (worker, incarnation, inventory); unique within an epoch
HoldId = NewType("HoldId", int)  # u64, unique within a worker incarnation, never 0
Key = bytes  # 34 bytes: 32 of prefix hash, u16 little-endian of shard

UID_BYTES: Final = 16
HASH_BYTES: Final = 32
SHARD_BYTES: Final = 2
KEY_BYTES: Final = HASH_BYTES + SHARD_BYTES
NO_PARENT: Final = bytes(HASH_BYTES)

MAX_BATCH_KEYS: Final = 16_384  # hashes in one message, gRPC or frame: bounds every answer's memory
MAX_BLOCK_BYTES: Final = 1 << 30  # one block; staging for it must fit every tier's I/O path
MAX_SHARD: Final = (1 << 16) - 1
PAGE_BYTES: Final = 4096


class Tiers(IntFlag):
    """Set of tiers that one worker has a block in, as it travels in reports (u8)."""

    NONE = 0
    DRAM = 1
    SSD = 2
    DEVICE = 4


class Tier(Enum):
    DEVICE = "device"
    DRAM = "dram"
    SSD = "ssd"


class Outcome(Enum):
    """What became of one block of a put."""

    STORED = "stored"
    ALREADY = "already"
    UNLISTED = "unlisted"  # on a worker; the master was away and will learn of it
    FULL = "full"
    REJECTED = "rejected"  # the reason is beside it


class MissCause(Enum):
    """Why a block was not served."""

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    EXPIRED = "expired"
    REMOVED = "removed"
    WORKER_LOST = "worker_lost"
    TIMEOUT = "timeout"
    CORRUPT = "corrupt"
    STALE_INDEX = "stale_index"
    UNKNOWN = "unknown"  # no longer remembered


class RemoveOutcome(Enum):
    REMOVED = "removed"
    PENDING = "pending"
    ABSENT = "absent"


class BlockCode(IntEnum):
    """One block's status in an answer on the data plane (u8). Misses are MISS_BASE + a cause's code."""

    HIT_INLINE = 0  # bytes are in the payload
    HIT_SHARED = 1  # bytes are in the arena, entry has where
    RESERVED = 2
    STORED = 3
    ALREADY = 4
    FULL = 5
    REJECTED = 6
    UNLISTED = 7
    FULL_QUOTA = 9  # a link's word for a FULL that the namespace's quota causes; on the wire it is FULL, and counted beside
    LATER = 8  # not looked at: past the first miss, or past what one answer may carry; ask again from here


MISS_BASE: Final = 32
CAUSE_CODES: Final[dict[MissCause, int]] = {cause: i for i, cause in enumerate(MissCause)}
CAUSES: Final[tuple[MissCause, ...]] = tuple(MissCause)


def miss_code(cause: MissCause) -> int:
    """u8 of a miss on the data plane."""
    return MISS_BASE + CAUSE_CODES[cause]


def miss_cause(code: int) -> MissCause | None:
    """The cause behind a block's code; None when the code is no miss. An unknown miss code is UNKNOWN."""
    if code < MISS_BASE:
        return None
    index = code - MISS_BASE
    return CAUSES[index] if index < len(CAUSES) else MissCause.UNKNOWN
