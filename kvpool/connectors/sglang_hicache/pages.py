"""One host pool of SGLang as values in the pool: which bytes a page is, under which keys they lie, and moving them.

    page_first layouts     page i = [K: one run of memory][V: one run]      two values a page, moved in place, no copy
    MLA, page_first        page i = [one run]                               one value a page, moved in place
    layer_first and others page i = many short runs                         one value a page, through a copy

Values of a page in order are exactly its flat data page, so the calls with tensors and those with host indices see one another's
pages. Keys are SGLang's page hashes (a sha256 chain); where a page has several values each one's key is made from hash and index.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import kvpool
from kvpool.connectors.pool_link import PoolLink
from kvpool.core.hashing import MAX_DEPTH
from kvpool.core.types import NO_PARENT, Outcome

Bytes = npt.NDArray[np.uint8]

PARTS_MAX: Final = 2  # runs of memory a page that get a key each (K and V); more are copied together, in the order of a flat page
STAGING_BYTES: Final = 64 << 20  # of one call, where pages are copied
THERE: Final = frozenset((Outcome.STORED, Outcome.ALREADY, Outcome.UNLISTED))


class HostPages:
    """The pages of one registered host pool. Holds no bytes of its own; thread-safe as far as the host pool is."""

    def __init__(self, host_pool: Any) -> None:
        import torch

        self._torch = torch
        self.pool = host_pool
        self.page_tokens = max(1, int(getattr(host_pool, "page_size", 1) or 1))
        self.dtype = getattr(host_pool, "dtype", None)
        self._array_of: dict[int, Any] = {}
        sizes = self._run_sizes()
        flat_bytes = self._flat_bytes()
        self.in_place = 1 <= len(sizes) <= PARTS_MAX and (flat_bytes is None or sum(sizes) == flat_bytes)
        if not self.in_place and flat_bytes is None:
            raise TypeError(f"{type(host_pool).__name__} tells neither where its pages lie nor gives them as tensors")
        self.sizes: tuple[int, ...] = tuple(sizes) if self.in_place else (int(flat_bytes or 0),)

    @property
    def n_parts(self) -> int:
        """Values a page."""
        return len(self.sizes)

    @property
    def page_bytes(self) -> int:
        return sum(self.sizes)

    def _run_sizes(self) -> list[int]:
        try:
            meta = self.pool.get_page_buffer_meta(self._torch.arange(self.page_tokens))
        except (AttributeError, NotImplementedError, AssertionError, TypeError, ValueError):
            return []
        return [int(size) for size in meta[1]] if meta else []

    def _flat_bytes(self) -> int | None:
        try:
            page = self.pool.get_dummy_flat_data_page()
        except (AttributeError, NotImplementedError, AssertionError, TypeError, ValueError, RuntimeError):
            return None
        return int(page.numel() * page.element_size()) if isinstance(page, self._torch.Tensor) else None

    # --- memory ---------------------------------------------------------------------------------------------------------

    def runs(self, host_indices: Any, n_pages: int) -> list[Bytes]:
        """The memory of `n_pages` pages in place, all parts of a page after one another. [n_pages * n_parts]"""
        pointers, sizes = self.pool.get_page_buffer_meta(host_indices[: n_pages * self.page_tokens])
        if len(pointers) != n_pages * self.n_parts or tuple(sizes[: self.n_parts]) != self.sizes:
            raise ValueError(f"the host pool gives {len(pointers)} runs for {n_pages} pages of {self.n_parts}")
        return [self._memory(int(pointer), int(size)) for pointer, size in zip(pointers, sizes, strict=True)]

    def _memory(self, pointer: int, size: int) -> Bytes:
        kind = self._array_of.get(size)
        if kind is None:
            kind = self._array_of[size] = ctypes.c_uint8 * size
        return np.frombuffer(memoryview(kind.from_address(pointer)), dtype=np.uint8)

    def page(self, host_indices: Any, index: int) -> Bytes:
        """A copy of page `index`'s bytes."""
        return self.bytes_of(self.pool.get_data_page(int(host_indices[index * self.page_tokens]), flat=True))

    def fill(self, host_indices: Any, index: int, data: Bytes) -> None:
        """Writes page `index`."""
        self.pool.set_from_flat_data_page(int(host_indices[index * self.page_tokens]), self.tensor_of(data))

    def bytes_of(self, tensor: Any) -> Bytes:
        """A tensor's bytes, flat; in place when it is contiguous."""
        flat: Bytes = tensor.detach().contiguous().reshape(-1).view(self._torch.uint8).numpy()
        return flat

    def tensor_of(self, data: Bytes) -> Any:
        """Bytes as a flat tensor of the pool's type, in place."""
        tensor = self._torch.from_numpy(data)
        return tensor if self.dtype is None else tensor.view(self.dtype)

    def split(self, flat: Bytes) -> list[Bytes]:
        """A flat page's values. [n_parts]"""
        ends = np.cumsum(self.sizes).tolist()
        return [flat[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]

    # --- keys -----------------------------------------------------------------------------------------------------------

    def hashes(self, keys: Sequence[str], prefix_keys: Sequence[str] | None = None) -> kvpool.PrefixHashes:
        """The values' keys, all parts of a page after one another. `prefix_keys`: the pages before, when the engine tells."""
        digests = b"".join([self._parts_of(page_digest(key)) for key in keys])
        if not prefix_keys:
            return kvpool.PrefixHashes(digests)
        depth = min(len(prefix_keys) * self.n_parts, MAX_DEPTH - len(digests) // 32)
        parent = self._parts_of(page_digest(prefix_keys[-1]))[-32:] if depth > 0 else NO_PARENT
        return kvpool.PrefixHashes(digests, parent=parent, depth=max(depth, 0))

    def _parts_of(self, digest: bytes) -> bytes:
        n = self.n_parts
        return digest if n == 1 else b"".join([hashlib.sha256(digest + bytes((n, part))).digest() for part in range(n)])


def page_digest(key: str) -> bytes:
    """32 bytes of a page's key: SGLang's own hash, or one made of any other string."""
    if len(key) == 64:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    return hashlib.sha256(b"key:" + key.encode("utf-8", "surrogatepass")).digest()


class PageStore:
    """Pages of one host pool in one namespace, under one shard. Thread-safe; every call ends by its deadline and never raises."""

    def __init__(self, pages: HostPages, link: PoolLink, *, shard: int) -> None:
        self.pages, self.link, self.shard = pages, link, shard

    def count(self, keys: Sequence[str], prefix_keys: Sequence[str] | None) -> int:
        """Leading pages that the pool has whole."""
        hashes = self.pages.hashes(keys, prefix_keys)
        n = self.link.ask("exists", lambda ns: ns.match(hashes, shard=self.shard, deadline_ms=self.link.deadline_ms()), 0)
        return n // self.pages.n_parts

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Of each page by itself whether the pool has it whole. [n]"""
        packed, n = self.pages.hashes(keys).hashes, self.pages.n_parts
        until = time.monotonic() + self.link.deadline_ms() / 1e3
        found = self.link.ask("exists", lambda ns: ns.keyed().locate(packed, deadline=until, shard=self.shard), None)
        if found is None:
            return [False] * len(keys)
        return [all(found[i * n : (i + 1) * n]) for i in range(len(keys))]

    def load(self, keys: Sequence[str], host_indices: Any, prefix_keys: Sequence[str] | None) -> list[bool]:
        """Fills the pages at `host_indices` [n * page_tokens]; the leading pages that are verified are True. [n]"""
        return self._moved("get", self._load_run, keys, host_indices, prefix_keys)

    def save(self, keys: Sequence[str], host_indices: Any, prefix_keys: Sequence[str] | None) -> list[bool]:
        """Stores the pages at `host_indices` [n * page_tokens]; those that the pool has now are True. [n]"""
        return self._moved("set", self._save_run, keys, host_indices, prefix_keys)

    def _moved(
        self, what: str, run: Any, keys: Sequence[str], host_indices: Any, prefix_keys: Sequence[str] | None
    ) -> list[bool]:
        n = len(keys)
        tokens = 0 if host_indices is None else int(host_indices.numel())
        if tokens != n * self.pages.page_tokens:
            self.link.warn(what, "event=bad_indices call=%s: %d host indices for %d pages of %d tokens", what, tokens, n,
                           self.pages.page_tokens)  # fmt: skip
            return [False] * n
        until = time.monotonic() + self.link.deadline_ms(n * self.pages.page_bytes) / 1e3
        step = n if self.pages.in_place else max(1, STAGING_BYTES // self.pages.page_bytes)
        done: list[bool] = []
        for start in range(0, n, max(step, 1)):
            part = keys[start : start + step]
            before = [*(prefix_keys or ()), *keys[:start]] if start else prefix_keys
            indices = host_indices[start * self.pages.page_tokens : (start + len(part)) * self.pages.page_tokens]
            hashes = self.pages.hashes(part, before)
            left_ms = (until - time.monotonic()) * 1e3
            job = functools.partial(run, hashes=hashes, n=len(part), indices=indices, deadline_ms=left_ms)
            done += self.link.ask(what, job, [False] * len(part)) if left_ms > 0 else [False] * len(part)
            if not done[-1] and what == "get":
                break  # the engine uses leading pages only
        return done + [False] * (n - len(done))

    def _load_run(
        self, ns: kvpool.Namespace, hashes: kvpool.PrefixHashes, n: int, indices: Any, deadline_ms: float
    ) -> list[bool]:
        pages = self.pages
        out: Any = pages.runs(indices, n) if pages.in_place else np.empty((n, pages.page_bytes), np.uint8)
        got = ns.get(hashes, out, shard=self.shard, deadline_ms=deadline_ms)
        whole = self._whole(got.sizes)
        if not pages.in_place:
            for index in range(whole):
                pages.fill(indices, index, out[index])
        return [index < whole for index in range(n)]

    def _whole(self, sizes: Sequence[int]) -> int:
        """Leading pages all of whose values have the right size."""
        n = self.pages.n_parts
        for index, size in enumerate(sizes):
            if size != self.pages.sizes[index % n]:
                self.link.warn("size", "event=wrong_size namespace=%r: a value of %d bytes where a page has %d; it is not used",
                               self.link.name, size, self.pages.sizes[index % n])  # fmt: skip
                return index // n
        return len(sizes) // n

    def _save_run(
        self, ns: kvpool.Namespace, hashes: kvpool.PrefixHashes, n: int, indices: Any, deadline_ms: float
    ) -> list[bool]:
        pages = self.pages
        blocks = pages.runs(indices, n) if pages.in_place else [pages.page(indices, index) for index in range(n)]
        return self._put(ns, hashes, blocks, deadline_ms)

    def _put(self, ns: kvpool.Namespace, hashes: kvpool.PrefixHashes, blocks: list[Bytes], deadline_ms: float) -> list[bool]:
        put = ns.put(hashes, blocks, shard=self.shard, deadline_ms=deadline_ms)
        n = self.pages.n_parts
        there = [outcome in THERE for outcome in put.outcomes]
        if not all(there):
            at = there.index(False)
            self.link.warn("put", "event=not_stored namespace=%r: %s (%s)", ns.name, put.outcomes[at].value, put.reasons[at])
        return [all(there[i : i + n]) for i in range(0, len(there), n)]

    # --- pages as tensors -----------------------------------------------------------------------------------------------

    def set_pages(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        """Stores flat pages given as tensors or buffers of exactly `page_bytes`. [n]"""
        blocks: list[Bytes] = []
        for value in values:
            flat = self._flat(value)
            if flat is None or flat.nbytes != self.pages.page_bytes:
                self.link.warn("set", "event=bad_value: a page has %d bytes, not %s", self.pages.page_bytes,
                               "none" if flat is None else flat.nbytes)  # fmt: skip
                return [False] * len(keys)
            blocks += self.pages.split(flat)
        hashes, ms = self.pages.hashes(keys), self.link.deadline_ms(len(keys) * self.pages.page_bytes)
        return self.link.ask("set", lambda ns: self._put(ns, hashes, blocks, ms), [False] * len(keys))

    def get_pages(self, keys: Sequence[str], targets: Sequence[Any] | None) -> list[Any]:
        """The leading pages as flat tensors, in `targets` where these fit, None for the others. [n]"""
        pages = self.pages
        outs: list[Bytes] = []
        for index in range(len(keys)):
            target = None if targets is None else self._flat(targets[index], writable=True)
            outs.append(
                target if target is not None and target.nbytes == pages.page_bytes else np.empty(pages.page_bytes, np.uint8)
            )
        parts = [part for out in outs for part in pages.split(out)]
        hashes, ms = pages.hashes(keys), self.link.deadline_ms(len(keys) * pages.page_bytes)
        nothing: list[int] = []
        sizes = self.link.ask("get", lambda ns: ns.get(hashes, parts, shard=self.shard, deadline_ms=ms).sizes, nothing)
        whole = self._whole(sizes)
        return [pages.tensor_of(out) if index < whole else None for index, out in enumerate(outs)]

    def _flat(self, value: Any, *, writable: bool = False) -> Bytes | None:
        if value is None:
            return None
        if isinstance(value, self.pages._torch.Tensor):
            return None if writable and not value.is_contiguous() else self.pages.bytes_of(value)
        try:
            flat = np.frombuffer(value, dtype=np.uint8)
        except (TypeError, ValueError, BufferError):
            return None
        return None if writable and not flat.flags.writeable else flat
