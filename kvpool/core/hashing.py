"""Hash making: tokens (or an engine's own digests) -> prefix hashes, and the checksums of a block's bytes.

The same bytes come out in every process and on every host: nothing depends on Python's `hash`, on byte order or on word size.
What a batch of keys is lives in `keys`; what goes into a layout's fingerprint in `layout`.

    root  = sha256( "kvpool/root/1\\0\\0\\0" | kind, 16 bytes, zero padded | fingerprint 32 | salt bytes u32 | salt )
    block = digest( "kvpool/block/1\\0\\0" | root 32 | n tokens u32 | parent 32 | tokens, u32 each | extras )
    extras = n u32, then each: tag u8 (0: of all blocks, 1: a range) | start i64 | end i64 | id bytes u32 | id

All little-endian. `parent` is the hash of the block before, NO_PARENT at the root. Root and parent are in every block: neither
layout, salt, earlier tokens nor earlier images can be exchanged. `digest` is sha256, or xxh3-128 brought to 32 bytes as every
digest that is not 32 bytes long: sha256(length u8, digest).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.core.keys import KeyBatch, pack_keys
from kvpool.core.types import HASH_BYTES, MAX_SHARD, NO_PARENT, NamespaceUid
from kvpool.errors import InvalidArgument

U64 = npt.NDArray[np.uint64]
Extra = bytes | Sequence[tuple[int, int, bytes]] | None

ROOT_TAG: Final = b"kvpool/root/1\0\0\0"
BLOCK_TAG: Final = b"kvpool/block/1\0\0"
MAX_SALT_BYTES: Final = 1024
MAX_EXTRA_BYTES: Final = 4096  # of one id: a digest or a short name, never the image itself
MAX_EXTRA_RANGES: Final = 65_536  # in one call: bounds the work that a list of ids can make
MAX_DEPTH: Final = (1 << 32) - 1  # a chain's position travels as u32
DIGEST_BYTES_MIN: Final = 8
DIGEST_BYTES_MAX: Final = 64
_POSITION_MAX: Final = 1 << 48  # of a token in a chain, far beyond any context
_EXTRA: Final = struct.Struct("<BqqI")
_NO_EXTRAS: Final = struct.pack("<I", 0)


class HashKind(StrEnum):
    """How a namespace makes its prefix hashes. XXH3_128 is fast and not collision proof: for one trusted tenant only."""

    SHA256 = "sha256"
    XXH3_128 = "xxh3_128"
    EXTERNAL = "external"


class PrefixHashes:
    """A run of prefix hashes in chain order, 32 bytes each. Immutable; slices know their own parent and depth.

    `parent`: the hash above the first one (NO_PARENT at a chain's root); `depth`: the first one's position in its chain.
    """

    __slots__ = ("chained", "depth", "hashes", "parent")
    hashes: bytes
    parent: bytes
    depth: int
    chained: bool

    def __init__(self, hashes: bytes, *, parent: bytes = NO_PARENT, depth: int = 0, chained: bool = True) -> None:
        if len(hashes) % HASH_BYTES:
            raise InvalidArgument(f"hashes: {len(hashes)} bytes are no whole number of {HASH_BYTES}-byte hashes")
        if len(parent) != HASH_BYTES:
            raise InvalidArgument(f"parent: {len(parent)} bytes; a prefix hash has {HASH_BYTES}")
        if not 0 <= depth <= MAX_DEPTH - len(hashes) // HASH_BYTES:
            raise InvalidArgument(f"depth: {depth} with {len(hashes) // HASH_BYTES} hashes is not in 0..{MAX_DEPTH}")
        for name, value in (("hashes", bytes(hashes)), ("parent", bytes(parent)), ("depth", depth), ("chained", chained)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"PrefixHashes is immutable; {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"PrefixHashes is immutable; {name} cannot be deleted")

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def __bytes__(self) -> bytes:
        return self.hashes

    def __iter__(self) -> Iterator[bytes]:
        return (self.hashes[i : i + HASH_BYTES] for i in range(0, len(self.hashes), HASH_BYTES))

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> PrefixHashes: ...
    def __getitem__(self, index: int | slice) -> bytes | PrefixHashes:
        if not isinstance(index, slice):
            at = range(len(self))[index] * HASH_BYTES
            return self.hashes[at : at + HASH_BYTES]
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise InvalidArgument(f"hashes: a slice with step {step} is no run of a chain")
        part = self.hashes[start * HASH_BYTES : max(start, stop) * HASH_BYTES]
        if start == 0 or not self.chained:
            return PrefixHashes(part, parent=self.parent, depth=self.depth, chained=self.chained)
        return PrefixHashes(part, parent=self[start - 1], depth=self.depth + start)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrefixHashes):
            return NotImplemented
        return self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self._facts())

    def __repr__(self) -> str:
        first = self.hashes[:6].hex() + ".." if self.hashes else ""
        return f"PrefixHashes({len(self)} from depth {self.depth}{': ' * bool(first)}{first})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._facts()

    def _facts(self) -> tuple[bytes, bytes, int, bool]:
        return self.hashes, self.parent, self.depth, self.chained

    def end(self) -> tuple[bytes, int]:
        """Where the chain goes on: (parent, depth) of the block after the last one."""
        return (self[-1], self.depth + len(self)) if self.hashes else (self.parent, self.depth)

    def key_batch(self, uid: NamespaceUid, *, shard: int = 0) -> KeyBatch:
        """The keys of these hashes in namespace `uid`, all of one shard (0..65535)."""
        if isinstance(shard, bool) or not isinstance(shard, int) or not 0 <= shard <= MAX_SHARD:
            raise InvalidArgument(f"shard: {shard!r} is not an integer in 0..{MAX_SHARD}")
        return KeyBatch(uid, pack_keys(self.hashes, shard=shard), self.parent, self.depth, self.chained)


def _rebuild(hashes: bytes, parent: bytes, depth: int, chained: bool) -> PrefixHashes:
    return PrefixHashes(hashes, parent=parent, depth=depth, chained=chained)


# --- hashes of tokens ---------------------------------------------------------------------------------------------------


def chain_root(kind: HashKind, *, fingerprint: bytes, salt: bytes) -> bytes:
    """32 bytes that go into every hash of a namespace: its kind of hash, layout fingerprint and salt."""
    if len(fingerprint) != HASH_BYTES:
        raise InvalidArgument(f"fingerprint: {len(fingerprint)} bytes; {HASH_BYTES} are needed")
    if not isinstance(salt, (bytes, bytearray, memoryview)) or len(salt) > MAX_SALT_BYTES:
        raise InvalidArgument(f"salt: must be at most {MAX_SALT_BYTES} bytes (a bytes object)")
    kind_name = HashKind(kind).value.encode().ljust(16, b"\0")
    return hashlib.sha256(b"".join((ROOT_TAG, kind_name, fingerprint, struct.pack("<I", len(salt)), salt))).digest()


def hash_tokens(
    kind: HashKind,
    tokens: Sequence[int] | npt.NDArray[Any],
    *,
    block_tokens: int,
    root: bytes,
    parent: PrefixHashes | bytes | None = None,
    extra: Extra = b"",
) -> PrefixHashes:
    """Prefix hashes of the full blocks of `tokens` (any sequence or array of integers, each 0 <= id < 2**32).

    `parent`: the chain goes on after it (a PrefixHashes, or bytes of n hashes back to back; the depth then counts from those).
    `extra`: bytes that are mixed into every block (an adapter's name), or ranges (start, end, id) in token positions relative
    to the first token of this call: each is mixed, with its whole id and its place, into every block that it overlaps, and so
    changes all later blocks too. A range that began in an earlier call has a negative start. None, b"" and [] are the same;
    the order of ranges does not count. Raises InvalidArgument naming the argument. Any thread.
    """
    kind = HashKind(kind)  # text of it, too: comparing by `is` below must never take one kind for another
    if kind is HashKind.EXTERNAL:
        raise InvalidArgument("hash: this namespace takes external hashes (hash='external'); it does not hash tokens")
    if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or block_tokens < 1:
        raise InvalidArgument(f"block_tokens: {block_tokens!r} is not a positive integer")
    if len(root) != HASH_BYTES:
        raise InvalidArgument(f"root: {len(root)} bytes; {HASH_BYTES} are needed")
    packed = _pack_tokens(tokens)
    above, depth = _parent(parent)
    step = 4 * block_tokens
    n = len(packed) // step
    tails = _extra_tails(extra, block_tokens, n)
    head = b"".join((BLOCK_TAG, root, struct.pack("<I", block_tokens)))
    sha256, join, out, last = hashlib.sha256, b"".join, [], above
    if kind is HashKind.SHA256:
        for i in range(n):
            last = sha256(join((head, last, packed[i * step : (i + 1) * step], tails[i]))).digest()
            out.append(last)
    else:
        fast = xxhash.xxh3_128_digest
        for i in range(n):
            last = sha256(b"\x10" + fast(join((head, last, packed[i * step : (i + 1) * step], tails[i])))).digest()
            out.append(last)
    return PrefixHashes(join(out), parent=above, depth=depth)


def external_hashes(digests: Sequence[bytes], *, parent: PrefixHashes | bytes | None = None) -> PrefixHashes:
    """An engine's own digests, 8..64 bytes each, in chain order. 32 bytes are taken as they are, else sha256(length, digest).

    `parent`: a PrefixHashes, or one digest as the engine made it. Raises InvalidArgument naming the index of a wrong one.
    """
    if isinstance(digests, (bytes, bytearray, memoryview, str)):
        raise InvalidArgument("digests: must be a sequence of bytes, one digest a block, not one bytes object")
    try:
        hashes = b"".join([_widen(digest, f"digests[{i}]") for i, digest in enumerate(digests)])
    except TypeError:
        raise InvalidArgument(f"digests: must be a sequence of bytes, not {type(digests).__name__}") from None
    if isinstance(parent, PrefixHashes) or parent is None:
        above, depth = _parent(parent)
    else:
        above, depth = _widen(parent, "parent"), 1
    return PrefixHashes(hashes, parent=above, depth=depth)


def _widen(digest: bytes, name: str) -> bytes:
    if not isinstance(digest, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"{name}: must be bytes, not {type(digest).__name__}")
    raw = bytes(digest)
    if not DIGEST_BYTES_MIN <= len(raw) <= DIGEST_BYTES_MAX:
        raise InvalidArgument(f"{name}: {len(raw)} bytes; allowed are {DIGEST_BYTES_MIN}..{DIGEST_BYTES_MAX}")
    return raw if len(raw) == HASH_BYTES else hashlib.sha256(bytes((len(raw),)) + raw).digest()


def _parent(parent: PrefixHashes | bytes | None) -> tuple[bytes, int]:
    if parent is None:
        return NO_PARENT, 0
    if isinstance(parent, PrefixHashes):
        return parent.end()
    if not isinstance(parent, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"parent: must be PrefixHashes or bytes, not {type(parent).__name__}")
    raw = bytes(parent)
    if not raw or len(raw) % HASH_BYTES:
        raise InvalidArgument(f"parent: {len(raw)} bytes are no whole number of {HASH_BYTES}-byte hashes")
    return (NO_PARENT, 0) if raw == NO_PARENT else (raw[-HASH_BYTES:], len(raw) // HASH_BYTES)


def _pack_tokens(tokens: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Any integers -> u32 little-endian, checked; one pass each in numpy."""
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidArgument(f"tokens: cannot be read as integers: {error}") from None
    if array.size == 0 and array.ndim == 1:
        return b""
    if array.ndim != 1:
        raise InvalidArgument(f"tokens: must be one-dimensional, not of shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise InvalidArgument(f"tokens: must be integers in 0..{2**32 - 1}, not {_bad_kind(array)}")
    if array.dtype.itemsize > 4 or array.dtype.kind == "i":
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= 1 << 32:
            raise InvalidArgument(f"tokens: {low if low < 0 else high} is not in 0..{2**32 - 1}")
    return array.astype("<u4", copy=False).tobytes()


def _bad_kind(array: npt.NDArray[Any]) -> str:
    if array.dtype.kind != "O":
        return str(array.dtype)
    kinds = {type(item).__name__ for item in array[:1000].tolist()}
    return "too large integers" if kinds == {"int"} else "/".join(sorted(kinds))


def _extra_tails(extra: Extra, block_tokens: int, n_blocks: int) -> list[bytes]:
    """What each of the blocks has after its tokens."""
    if extra is None:
        return [_NO_EXTRAS] * n_blocks
    if isinstance(extra, (bytes, bytearray, memoryview)):
        raw = bytes(extra)
        if len(raw) > MAX_EXTRA_BYTES:
            raise InvalidArgument(f"extra: {len(raw)} bytes; the limit is {MAX_EXTRA_BYTES}")
        tail = b"".join((struct.pack("<I", 1), _EXTRA.pack(0, 0, 0, len(raw)), raw)) if raw else _NO_EXTRAS
        return [tail] * n_blocks
    parts: dict[int, list[bytes]] = {}
    for start, end, raw in sorted(set(_check_ranges(extra))):
        for block in range(max(0, start // block_tokens), min(n_blocks, -(-end // block_tokens))):
            first = block * block_tokens
            parts.setdefault(block, []).append(_EXTRA.pack(1, start - first, end - first, len(raw)) + raw)
    tails = [_NO_EXTRAS] * n_blocks
    for block, pieces in parts.items():
        tails[block] = struct.pack("<I", len(pieces)) + b"".join(pieces)
    return tails


def _check_ranges(extra: Sequence[tuple[int, int, bytes]]) -> Iterator[tuple[int, int, bytes]]:
    if isinstance(extra, str) or not hasattr(extra, "__len__"):
        raise InvalidArgument(f"extra: must be bytes or a list of (start, end, id), not {type(extra).__name__}")
    if len(extra) > MAX_EXTRA_RANGES:
        raise InvalidArgument(f"extra: {len(extra)} ranges; the limit is {MAX_EXTRA_RANGES}")
    for i, item in enumerate(extra):
        try:
            start, end, raw = item
        except (TypeError, ValueError):
            raise InvalidArgument(f"extra[{i}]: must be (start, end, id), not {item!r:.80}") from None
        if not isinstance(raw, (bytes, bytearray, memoryview)) or not 1 <= len(raw) <= MAX_EXTRA_BYTES:
            raise InvalidArgument(f"extra[{i}]: id must be 1..{MAX_EXTRA_BYTES} bytes (a bytes object)")
        try:
            start, end = range(start, end).start, range(start, end).stop  # integers of any kind, nothing else
        except TypeError:
            raise InvalidArgument(f"extra[{i}]: start and end must be integers, not {start!r:.40}, {end!r:.40}") from None
        if not -_POSITION_MAX <= start < end <= _POSITION_MAX:
            raise InvalidArgument(f"extra[{i}]: start {start} must be below end {end}")
        yield start, end, bytes(raw)


# --- checksums of bytes -------------------------------------------------------------------------------------------------


def n_chunks(size: int, chunk_bytes: int) -> int:
    """How many checksums a block of `size` bytes has."""
    return -(-size // chunk_bytes)


def chunk_sums(data: bytes | bytearray | memoryview, chunk_bytes: int) -> U64:
    """xxh3-64 of each `chunk_bytes` piece of `data` (bytes-like, contiguous; the last piece may be shorter): u64 [n_chunks]."""
    view = memoryview(data)
    view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
    digest = xxhash.xxh3_64_intdigest
    sums = [digest(view[at : at + chunk_bytes]) for at in range(0, len(view), chunk_bytes)]
    return np.array(sums, dtype="<u8")


def block_sum(sums: bytes) -> int:
    """One sum of a whole block from its packed chunk sums (u64 little-endian): the sum itself when there is one, else
    xxh3-64 of them all."""
    if not sums or len(sums) % 8:
        raise InvalidArgument(f"sums: {len(sums)} bytes are no whole number of checksums (8 bytes each, at least one)")
    if len(sums) == 8:
        return int.from_bytes(sums, "little")
    return int(xxhash.xxh3_64_intdigest(sums))
