"""Prefix hashes: known answers, the same in every process, and nothing that differs shares one."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import xxhash

from kvpool.core.hashing import (
    MAX_DEPTH,
    MAX_EXTRA_BYTES,
    MAX_EXTRA_RANGES,
    MAX_SALT_BYTES,
    HashKind,
    PrefixHashes,
    block_sum,
    chain_root,
    chunk_sums,
    external_hashes,
    hash_tokens,
    n_chunks,
)
from kvpool.core.types import NO_PARENT, NamespaceUid
from kvpool.errors import InvalidArgument

FINGERPRINT = bytes(range(32))
UID = NamespaceUid(bytes(16))
ROOT = chain_root(HashKind.SHA256, fingerprint=FINGERPRINT, salt=b"")
TOKENS = list(range(1024))


def sha(tokens: Any, *, block_tokens: int = 16, root: bytes = ROOT, **kwargs: Any) -> PrefixHashes:
    return hash_tokens(HashKind.SHA256, tokens, block_tokens=block_tokens, root=root, **kwargs)


# --- known answers: the same bytes for ever, on every host ---------------------------------------------------------------


def reference(kind: str, tokens: list[int], *, block_tokens: int, salt: bytes, extras: list[list[bytes]]) -> list[bytes]:
    """The definition, spelled out without any of the code under test."""
    root = hashlib.sha256(
        b"kvpool/root/1\0\0\0" + kind.encode() + b"\0" * (16 - len(kind)) + FINGERPRINT + struct.pack("<I", len(salt)) + salt
    ).digest()
    hashes, last = [], bytes(32)
    for block in range(len(tokens) // block_tokens):
        text = b"kvpool/block/1\0\0" + root + struct.pack("<I", block_tokens) + last
        for token in tokens[block * block_tokens : (block + 1) * block_tokens]:
            text += struct.pack("<I", token)
        text += struct.pack("<I", len(extras[block])) + b"".join(extras[block])
        if kind == "sha256":
            last = hashlib.sha256(text).digest()
        else:
            last = hashlib.sha256(b"\x10" + xxhash.xxh3_128(text).digest()).digest()
        hashes.append(last)
    return hashes


@pytest.mark.parametrize("kind", [HashKind.SHA256, HashKind.XXH3_128])
def test_hashes_follow_the_definition(kind: HashKind) -> None:
    tokens = [0, 1, 2**32 - 1, 65536, 5, 6, 7, 8, 9, 10, 11, 12, 13]  # three blocks of four, one token left over
    salt, image, adapter = b"pepper", b"image-1", b"lora-7"
    root = chain_root(kind, fingerprint=FINGERPRINT, salt=salt)

    plain = hash_tokens(kind, tokens, block_tokens=4, root=root)
    assert list(plain) == reference(kind.value, tokens, block_tokens=4, salt=salt, extras=[[], [], []])

    with_adapter = hash_tokens(kind, tokens, block_tokens=4, root=root, extra=adapter)
    tail = struct.pack("<BqqI", 0, 0, 0, 6) + adapter
    assert list(with_adapter) == reference(kind.value, tokens, block_tokens=4, salt=salt, extras=[[tail]] * 3)

    with_image = hash_tokens(kind, tokens, block_tokens=4, root=root, extra=[(2, 7, image)])
    first, second = struct.pack("<BqqI", 1, 2, 7, 7) + image, struct.pack("<BqqI", 1, -2, 3, 7) + image
    assert list(with_image) == reference(kind.value, tokens, block_tokens=4, salt=salt, extras=[[first], [second], []])


def test_known_bytes() -> None:
    """Written down once: a change here makes every stored block unreachable."""
    assert ROOT.hex() == "1450bd8de3e3b63e5065c290db05382bb6dd14fb22398e22340d5e6589f77363"
    assert sha(TOKENS)[63].hex() == "853232582f1c92c194b4c4e97a9589636bdd48afe8b60bb9e12f7ecb5a180d36"
    fast_root = chain_root(HashKind.XXH3_128, fingerprint=FINGERPRINT, salt=b"s")
    fast = hash_tokens(HashKind.XXH3_128, TOKENS, block_tokens=256, root=fast_root)
    assert fast[3].hex() == "26d9b0cdefe3db69f696d38fcd88410a768bde38bc8735cddcf3f1b36c1cdfb2"
    assert external_hashes([b"12345678"])[0].hex() == "d4584a35b40c8d077ec0bdbd532a5487b4b1f2762808f0b24c852693d5130a01"


_CHILD = """
import json, sys
from kvpool.core.hashing import HashKind, chain_root, external_hashes, hash_tokens
keys = []
for kind in (HashKind.SHA256, HashKind.XXH3_128):
    root = chain_root(kind, fingerprint=bytes(range(32)), salt=b"")
    for kwargs in ({}, {"extra": None}, {"extra": b""}, {"extra": []}, {"parent": None}):
        keys.append(bytes(hash_tokens(kind, range(1024), block_tokens=16, root=root, **kwargs)).hex())
    keys.append(bytes(hash_tokens(kind, range(1024), block_tokens=16, root=root, extra=[(5, 99, b"im"), (5, 99, b"in")])).hex())
keys.append(bytes(external_hashes([b"abcdefgh", b"x" * 64])).hex())
json.dump(keys, sys.stdout)
"""


def test_every_process_makes_the_same_keys() -> None:
    """B08: fresh processes, PYTHONHASHSEED 0, 1 and unset, spawned and forked; absent, None and empty are the same."""
    answers = []
    for seed in ("0", "1", None):
        env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            env["PYTHONHASHSEED"] = seed
        for how in ("spawn", "fork"):
            program = _CHILD
            if how == "fork":
                program = "import os\npid = os.fork()\nif pid:\n    raise SystemExit(os.waitpid(pid, 0)[1])\n" + _CHILD
            done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, timeout=60, check=True)
            answers.append(json.loads(done.stdout))
    assert all(answer == answers[0] for answer in answers[1:])
    for first in (0, 6):
        absent, *others, with_images = answers[0][first : first + 6]
        assert len(absent) == 64 * 64 and set(others) == {absent} and with_images != absent
    assert bytes.fromhex(answers[0][0]) == bytes(sha(TOKENS))


# --- what differs never shares a hash -------------------------------------------------------------------------------------


def test_root_is_in_every_hash() -> None:
    roots = [
        chain_root(kind, fingerprint=fingerprint, salt=salt)
        for kind in (HashKind.SHA256, HashKind.XXH3_128)
        for fingerprint in (FINGERPRINT, bytes(32))
        for salt in (b"", b"a", b"\0", b"a\0")
    ]
    seen = [h for root in roots for h in sha(TOKENS[:64], root=root)]
    assert len(set(seen)) == len(seen) == len(roots) * 4
    parent = sha(TOKENS[:16])
    continued = {sha(TOKENS[16:32], root=root, parent=parent)[0] for root in roots}
    assert len(continued) == len(roots)  # also when somebody passes another namespace's parent


def test_any_changed_token_changes_this_and_all_later_hashes() -> None:
    before = list(sha(TOKENS))
    for at in (0, 15, 16, 500, 1023):
        changed = list(TOKENS)
        changed[at] += 1
        after = list(sha(changed))
        assert after[: at // 16] == before[: at // 16]
        assert not set(after[at // 16 :]) & set(before)


def test_block_boundaries_count() -> None:
    assert not set(sha(TOKENS, block_tokens=16)) & set(sha(TOKENS, block_tokens=32))


def image_tokens() -> list[int]:
    return [*range(64), *[32_000] * 576, *range(64)]


def test_two_images_never_share_a_block() -> None:
    """B30: 2,000 prompts, identical ids, each with its own image; pairs of ids that agree in the first or last 16 hex digits."""
    ids = [hashlib.sha256(str(i).encode()).digest() for i in range(1600)]
    ids += [base[:8] + hashlib.sha256(base).digest()[8:] for base in ids[:200]]  # same first 16 hex digits
    ids += [hashlib.sha256(base).digest()[:24] + base[-8:] for base in ids[:200]]  # same last 16
    assert len(set(ids)) == 2000
    tokens = np.array(image_tokens(), dtype=np.int64)
    chains = [list(sha(tokens, extra=[(64, 640, image)])) for image in ids]
    assert len({tuple(chain[:4]) for chain in chains}) == 1  # the text before the image is shared
    for block in range(4, 44):
        assert len({chain[block] for chain in chains}) == 2000


def test_an_image_at_another_place_is_another_prompt() -> None:
    tokens, image = image_tokens(), b"i" * 32
    places = ((64, 640), (65, 640), (64, 639), (70, 600))
    chains = {place: list(sha(tokens, extra=[(*place, image)])) for place in places}
    for block in range(4, 44):
        assert len({chain[block] for chain in chains.values()}) == 4


def test_two_images_and_one_that_looks_like_both() -> None:
    tokens = image_tokens()
    pairs = [
        [(64, 100, b"ab"), (100, 200, b"c")],
        [(64, 100, b"a"), (100, 200, b"bc")],
        [(64, 200, b"abc")],
        [(64, 100, b"c"), (100, 200, b"ab")],
        [(64, 100, b"ab")],
    ]
    assert len({sha(tokens, extra=extra)[-1] for extra in pairs}) == len(pairs)
    assert sha(tokens, extra=pairs[0]) == sha(tokens, extra=pairs[0][::-1]) == sha(tokens, extra=pairs[0] * 2)


def test_adapter_name_is_no_image() -> None:
    tokens = TOKENS[:16]
    extras: list[Any] = [b"", b"id", [(0, 16, b"id")], b"id\0", b"i"]
    ways = [sha(tokens, extra=extra) for extra in extras]
    assert len({bytes(way) for way in ways}) == len(ways)


def test_random_blocks_do_not_collide() -> None:
    """B64, the token API: distinct blocks, distinct keys."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 50_000, size=16 * 200_000, dtype=np.uint32)
    for kind in (HashKind.SHA256, HashKind.XXH3_128):
        hashes = [bytes(hash_tokens(kind, tokens[i : i + 16], block_tokens=16, root=ROOT)) for i in range(0, len(tokens), 16)]
        assert len(set(hashes)) == len(tokens) // 16


# --- a chain may be made in parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [HashKind.SHA256, HashKind.XXH3_128])
def test_parts_make_the_same_chain(kind: HashKind) -> None:
    extra = [(30, 70, b"one"), (60, 1000, b"two"), (500, 501, b"three"), (1020, 5000, b"past the end")]
    whole = hash_tokens(kind, TOKENS, block_tokens=16, root=ROOT, extra=extra)
    for cut in (16, 48, 64, 512, 1008):
        moved = [(start - cut, end - cut, name) for start, end, name in extra]
        head = hash_tokens(kind, TOKENS[:cut], block_tokens=16, root=ROOT, extra=extra)
        tail = hash_tokens(kind, TOKENS[cut:], block_tokens=16, root=ROOT, parent=head, extra=moved)
        assert bytes(head) + bytes(tail) == bytes(whole)
        assert tail == whole[cut // 16 :]
        assert (tail.parent, tail.depth) == (head[-1], cut // 16)
        by_bytes = hash_tokens(kind, TOKENS[cut:], block_tokens=16, root=ROOT, parent=bytes(head), extra=moved)
        assert by_bytes == tail
        by_last = hash_tokens(kind, TOKENS[cut:], block_tokens=16, root=ROOT, parent=head[-1], extra=moved)
        assert bytes(by_last) == bytes(tail) and by_last.depth == 1


def test_an_empty_part_hands_on_its_place() -> None:
    head = sha(TOKENS[:64])
    empty = sha(TOKENS[:7], parent=head)
    assert (len(empty), empty.parent, empty.depth) == (0, head[-1], 4)
    assert sha(TOKENS[64:], parent=empty) == sha(TOKENS)[4:]
    assert sha([], parent=None).parent == NO_PARENT
    assert sha(TOKENS[:16], parent=sha([])) == sha(TOKENS[:16]) == sha(TOKENS[:16], parent=NO_PARENT)


def test_all_forms_of_tokens_are_the_same() -> None:
    want = sha(TOKENS)
    forms: list[Any] = [tuple(TOKENS), range(1024), np.arange(1024), np.arange(1024, dtype=">i4"), np.arange(1024, dtype="u2")]
    forms += [np.arange(2048, dtype="i8")[::2] // 2, np.arange(1024, dtype="u8"), memoryview(np.arange(1024, dtype="u4"))]
    for form in forms:
        assert sha(form) == want
    assert sha([*TOKENS, 1, 2, 3]) == want  # full blocks only


def test_hashing_does_not_change_its_input() -> None:
    tokens = np.arange(1024, dtype="u4")
    sha(tokens)
    assert (tokens == np.arange(1024)).all()


def test_a_long_prompt_takes_milliseconds() -> None:
    """32K tokens: no Python per token. Measured 1.8 ms (list, blocks of 16); the bound leaves room for a loaded machine."""
    tokens = [random.Random(3).randrange(150_000) for _ in range(32_768)]
    best = min(_seconds(tokens) for _ in range(5))
    assert best < 0.03


def _seconds(tokens: list[int]) -> float:
    start = time.perf_counter()
    assert len(sha(tokens)) == 2048
    return time.perf_counter() - start


# --- external digests -----------------------------------------------------------------------------------------------------


def test_external_digests_of_32_bytes_stay_what_they_are() -> None:
    digests = [hashlib.sha256(bytes([i])).digest() for i in range(5)]
    hashes = external_hashes(digests)
    assert list(hashes) == digests
    assert (hashes.parent, hashes.depth, hashes.chained) == (NO_PARENT, 0, True)
    assert (hashes[3:].parent, hashes[3:].depth) == (digests[2], 3)


@pytest.mark.parametrize("size", [8, 16, 20, 31, 33, 63, 64])
def test_external_digests_of_other_lengths_are_widened(size: int) -> None:
    digest = bytes(range(size))
    assert external_hashes([digest])[0] == hashlib.sha256(bytes([size]) + digest).digest()


def test_digests_that_agree_in_part_stay_apart() -> None:
    """B64: equal first 8 or last 8 bytes, or one bit apart; and one digest that is another's beginning."""
    rng = random.Random(5)
    for size in (8, 16, 32, 64):
        base = rng.randbytes(size)
        others = [bytes(b ^ (1 << bit) if i == at else b for i, b in enumerate(base)) for at in range(size) for bit in range(8)]
        if size > 8:
            others += [base[:8] + rng.randbytes(size - 8) for _ in range(1000)]
            others += [rng.randbytes(size - 8) + base[-8:] for _ in range(1000)]
        assert len(set(external_hashes([base, *others]))) == len(others) + 1
    text = bytes(64)
    assert len(set(external_hashes([text[:n] for n in range(8, 65)]))) == 57


def test_external_chain_goes_on() -> None:
    first = external_hashes([b"a" * 16, b"b" * 16])
    assert external_hashes([b"c" * 16], parent=first) == external_hashes([b"a" * 16, b"b" * 16, b"c" * 16])[2:]
    assert external_hashes([b"c" * 16], parent=b"b" * 16).parent == first[1]


@pytest.mark.parametrize("bad", [b"", b"1234567", b"x" * 65, "12345678", 12345678, None])
def test_wrong_digest_is_named_by_its_index(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"digests\[2\]"):
        external_hashes([b"12345678", b"12345678", bad])


@pytest.mark.parametrize("bad", [b"12345678" * 4, "text", 7, None])
def test_digests_must_be_a_sequence(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="digests"):
        external_hashes(bad)


# --- the value itself -----------------------------------------------------------------------------------------------------


def test_slices_know_their_place() -> None:
    hashes = sha(TOKENS)
    assert hashes[:] == hashes and len(hashes[10:20]) == 10
    part = hashes[10:20][3:5]
    assert (bytes(part), part.parent, part.depth) == (bytes(hashes)[13 * 32 : 15 * 32], hashes[12], 13)
    assert hashes[-1] == bytes(hashes)[-32:] and hashes[np.int64(2)] == hashes[2]
    assert hashes[-2:].depth == 62 and hashes[60:9999] == hashes[60:]
    assert (len(hashes[5:2]), hashes[5:2].parent, hashes[5:2].depth) == (0, hashes[4], 5)
    assert list(hashes)[7] == hashes[7]
    for index in (64, -65):
        with pytest.raises(IndexError):
            hashes[index]
    with pytest.raises(InvalidArgument, match="step"):
        hashes[::2]


def test_prefix_hashes_are_immutable_values() -> None:
    hashes = sha(TOKENS)
    with pytest.raises(AttributeError):
        hashes.depth = 5
    with pytest.raises(AttributeError):
        del hashes.parent
    assert hash(hashes) == hash(sha(TOKENS)) and hashes != sha(TOKENS[:-16]) and hashes != bytes(hashes)
    assert pickle.loads(pickle.dumps(hashes)) == hashes
    assert "64 from depth 0" in repr(hashes)


def test_a_loose_batch_has_no_chain_in_its_slices() -> None:
    loose = PrefixHashes(bytes(sha(TOKENS)), chained=False)
    assert (loose[3:5].parent, loose[3:5].depth, loose[3:5].chained) == (NO_PARENT, 0, False)


def test_key_batch_carries_the_place() -> None:
    batch = sha(TOKENS)[5:9].key_batch(UID, shard=0x0201)
    assert (len(batch), batch.parent, batch.depth, batch.chained, batch.namespace) == (4, sha(TOKENS)[4], 5, True, UID)
    assert batch.split()[0] == sha(TOKENS)[5] + b"\x01\x02"
    for shard in (-1, 65536, 1.0, None, True):
        with pytest.raises(InvalidArgument, match="shard"):
            sha(TOKENS).key_batch(UID, shard=shard)  # type: ignore[arg-type]


# --- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        [1, -1],
        [2**32],
        [2**64],
        [2**70],
        [-(2**70)],
        [1.0, 2.0],
        [1, 2.5],
        ["1"],
        "text",
        b"bytes",
        None,
        5,
        [None, 1],
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        [True, False],
        np.array([-1]),
        np.array([2**32], dtype="u8"),
        np.zeros((2, 2), dtype="i4"),
        np.array(3),
        {1: 2},
        [1j],
        float("nan"),
        (i for i in range(3)),
        object(),
    ],
)
def test_bad_tokens_are_named(tokens: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^tokens: "):
        sha(tokens, block_tokens=1)


def test_whole_token_range_is_taken_and_kept_apart() -> None:
    """B64: k and k + 2**32 are never the same; the highest id is fine."""
    assert len({sha([k], block_tokens=1)[0] for k in (0, 1, 2**16, 2**31, 2**32 - 1)}) == 5


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"parent": b""}, "parent"),
        ({"parent": b"x" * 31}, "parent"),
        ({"parent": "p"}, "parent"),
        ({"parent": 7}, "parent"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": -16}, "block_tokens"),
        ({"block_tokens": 1.5}, "block_tokens"),
        ({"block_tokens": True}, "block_tokens"),
        ({"root": b"short"}, "root"),
        ({"extra": "lora"}, "extra"),
        ({"extra": 5}, "extra"),
        ({"extra": b"x" * (MAX_EXTRA_BYTES + 1)}, "extra"),
        ({"extra": [(0, 5, b"a"), None]}, r"extra\[1\]"),
        ({"extra": [(0, 1, b"a")] * (MAX_EXTRA_RANGES + 1)}, "extra"),
        *[
            ({"extra": [wrong]}, r"extra\[0\]")
            for wrong in (
                (0, 5),
                (0, 5, b""),
                (0, 5, "id"),
                (0, 5, None),
                (5, 5, b"a"),
                (6, 5, b"a"),
                (0.0, 5, b"a"),
                (0, 2**63, b"a"),
                (0, 5, b"a" * (MAX_EXTRA_BYTES + 1)),
                ("0", 5, b"a"),
                (None, 5, b"a"),
                5,
                "abc",
            )
        ],
        ({"parent": PrefixHashes(bytes(32), depth=MAX_DEPTH - 1)}, "depth"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        sha(TOKENS[:64], **kwargs)


def test_a_kind_by_its_name_is_that_kind() -> None:
    for kind in (HashKind.SHA256, HashKind.XXH3_128):
        by_name = hash_tokens(kind.value, TOKENS, block_tokens=16, root=ROOT)  # type: ignore[arg-type]
        assert by_name == hash_tokens(kind, TOKENS, block_tokens=16, root=ROOT)
    assert bytes(sha(TOKENS)) != bytes(hash_tokens(HashKind.XXH3_128, TOKENS, block_tokens=16, root=ROOT))


def test_external_namespaces_do_not_hash_tokens() -> None:
    with pytest.raises(InvalidArgument, match="external"):
        hash_tokens(HashKind.EXTERNAL, TOKENS, block_tokens=16, root=ROOT)


def test_bad_roots_are_named() -> None:
    with pytest.raises(InvalidArgument, match="fingerprint"):
        chain_root(HashKind.SHA256, fingerprint=b"", salt=b"")
    for salt in ("text", None, b"x" * (MAX_SALT_BYTES + 1)):
        with pytest.raises(InvalidArgument, match="salt"):
            chain_root(HashKind.SHA256, fingerprint=FINGERPRINT, salt=salt)  # type: ignore[arg-type]
    for kwargs in ({"parent": b"x"}, {"depth": -1}, {"depth": MAX_DEPTH}):
        with pytest.raises(InvalidArgument, match=next(iter(kwargs))):
            PrefixHashes(bytes(32), **kwargs)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="hashes"):
        PrefixHashes(bytes(33))


# --- checksums ------------------------------------------------------------------------------------------------------------


def test_chunk_sums_are_xxh3_of_each_chunk() -> None:
    data = random.Random(9).randbytes(10_000)
    sums = chunk_sums(memoryview(data), 4096)
    want = [xxhash.xxh3_64(data[at : at + 4096]).intdigest() for at in (0, 4096, 8192)]
    assert sums.dtype == np.dtype("<u8") and sums.tolist() == want and n_chunks(10_000, 4096) == 3
    assert chunk_sums(np.frombuffer(data, dtype="u2").data, 4096).tolist() == want  # any contiguous buffer
    assert block_sum(sums.tobytes()) == xxhash.xxh3_64(struct.pack("<3Q", *want)).intdigest()


def test_sum_of_one_chunk_is_the_blocks() -> None:
    sums = chunk_sums(b"hello", 4096)
    assert block_sum(sums.tobytes()) == xxhash.xxh3_64(b"hello").intdigest() == 0x9555E8555C62DCFD


def test_any_flipped_bit_changes_the_block_sum() -> None:
    data = bytearray(random.Random(11).randbytes(300))
    before = block_sum(chunk_sums(data, 64).tobytes())
    for bit in range(0, 2400, 7):
        data[bit // 8] ^= 1 << bit % 8
        assert block_sum(chunk_sums(data, 64).tobytes()) != before
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(("size", "chunk", "want"), [(0, 4096, 0), (1, 4096, 1), (4096, 4096, 1), (4097, 4096, 2)])
def test_number_of_chunks(size: int, chunk: int, want: int) -> None:
    assert n_chunks(size, chunk) == want == len(chunk_sums(bytes(size), chunk))


def test_block_sum_needs_whole_sums() -> None:
    for sums in (b"", b"1234567", b"123456789"):
        with pytest.raises(InvalidArgument, match="sums"):
            block_sum(sums)
