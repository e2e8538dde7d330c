"""Content of simulated blocks: few bytes that stand for many, different for each key, in parts that can be there one by one.

The only right value of a key is `value_of(key)`: what a reader got says by itself whether it is right, another's, or partial.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

from kvpool.core.hashing import block_sum
from kvpool.core.keys import KeyBatch, pack_keys
from kvpool.core.types import HASH_BYTES, NO_PARENT, Key, NamespaceUid

PARTS: Final = 4  # a block is written and read in so many steps
PART_BYTES: Final = 8
NOTHING: Final = bytes(PARTS * PART_BYTES)


def value_of(key: Key) -> bytes:
    return b"".join(xxhash.xxh3_64_digest(key, seed=1 + part) for part in range(PARTS))


def sums_of(data: bytes) -> bytes:
    """Packed chunk sums, as a put makes them: of one chunk."""
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


def sum_of(data: bytes) -> int:
    return block_sum(sums_of(data))


def parts_right(key: Key, data: bytes) -> int:
    """How many parts of the data are the key's own."""
    value = value_of(key)
    return sum(value[at : at + PART_BYTES] == data[at : at + PART_BYTES] for at in range(0, len(value), PART_BYTES))


def bits_wrong(key: Key, data: bytes) -> int:
    """In how many bits the data differ from the key's value."""
    return (int.from_bytes(value_of(key), "little") ^ int.from_bytes(data, "little")).bit_count()


class Chains:
    """Prefix hashes by name: chain number c, block i. Two chains may share their first blocks."""

    def __init__(self, *, shared_blocks: int) -> None:
        self._shared = shared_blocks
        self._hashes: dict[tuple[int, int], bytes] = {}

    def hash(self, chain: int, index: int) -> bytes:
        name = (chain // 2 * 2 if index < self._shared else chain, index)
        found = self._hashes.get(name)
        if found is None:
            found = self._hashes[name] = b"".join(
                xxhash.xxh3_64_digest(f"chain {name[0]} block {index}".encode(), seed=1 + part) for part in range(HASH_BYTES // 8)
            )
        return found

    def batch(self, uid: NamespaceUid, chain: int, start: int, stop: int) -> KeyBatch:
        hashes = b"".join(self.hash(chain, i) for i in range(start, stop))
        parent = self.hash(chain, start - 1) if start else NO_PARENT
        return KeyBatch(uid, pack_keys(hashes, shard=0), parent, start)
