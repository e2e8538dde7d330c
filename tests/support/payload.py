"""Payloads that name themselves: P(key, version, size) and CHECK.

Bytes 0-31 are sha256("key|version|size"), the rest is SHAKE-128("key|version") to length; so a mixture of two versions, another
key's bytes, a wrong length or zero fill are all told apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np


def payload(key: object, version: int, size: int) -> bytes:
    """P(key, version, size): `size` bytes (1 or more) that only this key and version have."""
    head = hashlib.sha256(f"{key}|{version}|{size}".encode()).digest()[:size]
    if size <= len(head):
        return head
    return head + hashlib.shake_128(f"{key}|{version}".encode()).digest(size - len(head))


def payloads(keys: Iterable[object], *, version: int = 1, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One row a key: uint8 [n, size]."""
    rows = [np.frombuffer(payload(key, version, size), dtype=np.uint8) for key in keys]
    return np.stack(rows) if rows else np.empty((0, size), dtype=np.uint8)


def check(key: object, data: Any, *, versions: Iterable[int] = (1,), size: int | None = None) -> int:
    """CHECK: the version whose payload `data` is, byte by byte. AssertionError when it is none of `versions`."""
    got = bytes(memoryview(data).cast("B"))
    want_size = len(got) if size is None else size
    assert len(got) == want_size, f"key {key}: {len(got)} bytes, expected {want_size}"
    for version in versions:
        if got == payload(key, version, want_size):
            return version
    kind = "zero fill" if not any(got) else f"starts {got[:8].hex()}"
    raise AssertionError(f"key {key}: bytes are no version of {list(versions)} ({kind})")
