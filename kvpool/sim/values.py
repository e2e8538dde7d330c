"""Content of simulated blocks: few bytes that stand for many, different for each key, in parts that can be there one by one.

The only right value of a key is `value_of(key)`: what a reader got says by itself whether it is right, another's, or partial.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from kvpool.core.hashing import block_sum
from kvpool.core.keys import KeyBatch, pack_keys
from kvpool.core.types import HASH_BYTES, NO_PARENT, Key, NamespaceUid

PARTS: Final = 4  # a block is written and read in so many steps
PART_BYTES: Final = 8
NOTHING: Final = bytes(PARTS * PART_BYTES)
HALF: Final = PARTS // 2 * PART_BYTES


@dataclass(frozen=True, slots=True)
class Value:
    """A block to be put: the few bytes, and how many they stand for."""

    data: bytes
    nbytes: int


def value_of(key: Key) -> bytes:
    return b"".join(xxhash.xxh3_64_digest(key, seed=1 + part) for part in range(PARTS))


def size_of(key: Key, block_bytes: int) -> int:
    """Of a block whose values may be smaller: half of them are."""
    chance = xxhash.xxh3_64_intdigest(key, seed=99)
    return block_bytes if chance & 1 else 1 + (chance >> 1) % block_bytes


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
        self._hashes: dict[tuple[NamespaceUid, int, int], bytes] = {}

    def hash(self, uid: NamespaceUid, chain: int, index: int) -> bytes:
        """Another one in each namespace: a value says by itself whose it is."""
        name = (uid, chain // 2 * 2 if index < self._shared else chain, index)
        found = self._hashes.get(name)
        if found is None:
            words = b"%s chain %d block %d" % name
            found = self._hashes[name] = b"".join(
                xxhash.xxh3_64_digest(words, seed=1 + part) for part in range(HASH_BYTES // 8)
            )
        return found

    def batch(self, uid: NamespaceUid, chain: int, start: int, stop: int) -> KeyBatch:
        hashes = b"".join(self.hash(uid, chain, i) for i in range(start, stop))
        parent = self.hash(uid, chain, start - 1) if start else NO_PARENT
        return KeyBatch(uid, pack_keys(hashes, shard=0), parent, start)
