"""Keys and batches of keys: how a chain of blocks is named on the wire and in every table.

A key is 34 bytes: the block's 32-byte prefix hash, then its shard as u16 little-endian. A `KeyBatch` is a run of keys of one
namespace in chain order, packed; it carries the parent of its first block and its depth, and so do its slices.
Hash making is in `hashing`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpool.core.types import HASH_BYTES, KEY_BYTES, MAX_SHARD, NO_PARENT, UID_BYTES, Key, NamespaceUid


def pack_keys(hashes: bytes, *, shard: int) -> bytes:
    """n 32-byte hashes back to back -> n keys back to back (n * 34 bytes), all with the same shard (0..65535)."""
    if len(hashes) % HASH_BYTES:
        raise ValueError(f"hashes: {len(hashes)} bytes are no whole number of {HASH_BYTES}-byte hashes")
    if not 0 <= shard <= MAX_SHARD:
        raise ValueError(f"shard: {shard} is not in 0..{MAX_SHARD}")
    n = len(hashes) // HASH_BYTES
    packed = np.empty((n, KEY_BYTES), dtype=np.uint8)
    packed[:, :HASH_BYTES] = np.frombuffer(hashes, dtype=np.uint8).reshape(n, HASH_BYTES)
    packed[:, HASH_BYTES] = shard & 0xFF
    packed[:, HASH_BYTES + 1] = shard >> 8
    return packed.tobytes()


def split_keys(packed: bytes | memoryview) -> list[Key]:
    """Keys back to back -> list of 34-byte keys."""
    raw = bytes(packed)
    return [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """Keys of one namespace in chain order.

    `chained`: key i+1 is the child of key i, `parent` is the prefix hash above key 0 (NO_PARENT at a chain's root) and
    `depth` the position of key 0 in its chain. Not chained (external hashes without parents): every key is a chain of one.
    """

    namespace: NamespaceUid
    keys: bytes
    parent: bytes = NO_PARENT
    depth: int = 0
    chained: bool = True

    def __post_init__(self) -> None:
        if len(self.namespace) != UID_BYTES or len(self.parent) != HASH_BYTES or len(self.keys) % KEY_BYTES:
            raise ValueError("KeyBatch: namespace, parent or keys have a wrong length")

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    def split(self) -> list[Key]:
        """The keys one by one."""
        return split_keys(self.keys)

    def slice(self, start: int, stop: int) -> KeyBatch:
        """Keys start..stop-1 with their own parent and depth."""
        start, stop = min(max(0, start), len(self)), min(stop, len(self))
        keys = self.keys[start * KEY_BYTES : max(start, stop) * KEY_BYTES]
        if start == 0 or not self.chained:
            return KeyBatch(self.namespace, keys, self.parent, self.depth, self.chained)
        above = (start - 1) * KEY_BYTES
        return KeyBatch(self.namespace, keys, self.keys[above : above + HASH_BYTES], self.depth + start, True)
