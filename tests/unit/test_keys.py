"""Keys and batches of keys: packing, slices, and that keys one bit apart are two keys."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.keys import KeyBatch, pack_keys, split_keys
from kvpool.core.types import KEY_BYTES, MAX_SHARD, NO_PARENT, NamespaceUid

UID = NamespaceUid(bytes(16))
HASHES = [hashlib.sha256(bytes([i])).digest() for i in range(20)]


@pytest.mark.parametrize("shard", [0, 1, 255, 256, 0x1234, MAX_SHARD])
def test_a_key_is_its_hash_and_its_shard(shard: int) -> None:
    packed = pack_keys(b"".join(HASHES), shard=shard)
    want = [h + bytes([shard % 256, shard // 256]) for h in HASHES]
    assert packed == b"".join(want) and split_keys(packed) == want == KeyBatch(UID, packed).split()
    assert split_keys(memoryview(packed)) == want and all(type(key) is bytes for key in split_keys(memoryview(packed)))


def test_no_keys() -> None:
    assert pack_keys(b"", shard=3) == b"" and split_keys(b"") == [] and len(KeyBatch(UID, b"")) == 0


def test_keys_one_bit_apart_are_two_keys() -> None:
    """B64: any bit of the 34 bytes, equal beginnings, equal ends."""
    rng = random.Random(1)
    base = rng.randbytes(KEY_BYTES)
    raw = [base] + [
        bytes(b ^ (1 << bit) if i == at else b for i, b in enumerate(base)) for at in range(KEY_BYTES) for bit in range(8)
    ]
    raw += [base[:8] + rng.randbytes(KEY_BYTES - 8) for _ in range(1000)] + [
        rng.randbytes(KEY_BYTES - 8) + base[-8:] for _ in range(1000)
    ]
    assert len(set(KeyBatch(UID, b"".join(raw)).split())) == len(raw)
    assert len({pack_keys(HASHES[0], shard=shard) for shard in range(0, MAX_SHARD + 1, 5)}) == MAX_SHARD // 5 + 1


@pytest.mark.parametrize(
    ("hashes", "shard", "name"),
    [(b"x" * 31, 0, "hashes"), (b"x" * 33, 0, "hashes"), (b"x" * 32, -1, "shard"), (b"x" * 32, MAX_SHARD + 1, "shard")],
)
def test_bad_input_is_named(hashes: bytes, shard: int, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        pack_keys(hashes, shard=shard)


@pytest.mark.parametrize("batch", [(b"u" * 15, b""), (UID, b"x" * 33), (UID, b"", b"p" * 31), (b"", b"")])
def test_wrong_lengths_make_no_batch(batch: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError, match="wrong length"):
        KeyBatch(*batch)  # type: ignore[arg-type]


@given(start=st.integers(-5, 25), stop=st.integers(-5, 25), depth=st.integers(0, 1000), chained=st.booleans())
def test_slices_are_those_of_a_list(start: int, stop: int, depth: int, chained: bool) -> None:
    """Against the ten-line model: a list of (parent, key, depth)."""
    parent = HASHES[19]
    batch = KeyBatch(UID, pack_keys(b"".join(HASHES[:19]), shard=5), parent, depth, chained)
    part = batch.slice(start, stop)
    keys = batch.split()
    assert part.split() == keys[max(start, 0) : max(stop, 0)]
    assert part.namespace == UID and part.chained == chained
    if not chained or start <= 0:
        assert (part.parent, part.depth) == (parent, depth)
    elif len(part):
        assert (part.parent, part.depth) == (keys[start - 1][:32], depth + start)


def test_a_root_has_no_parent() -> None:
    batch = KeyBatch(UID, pack_keys(b"".join(HASHES), shard=0))
    assert batch.parent == NO_PARENT == batch.slice(0, 5).parent
    assert batch.slice(3, 9).slice(2, 4).parent == HASHES[4] and batch.slice(3, 9).slice(2, 4).depth == 5
