"""What LMCache's keys and memory objects are in the pool: 32-byte digests and flat bytes. No I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def engine_key_digest(key: Any) -> bytes:
    """32 bytes of a CacheEngineKey or LayerCacheEngineKey: all of its fields, so that no two keys that differ share a value."""
    tags = None if key.tags is None else [[str(name), str(value)] for name, value in key.tags]
    return _digest("engine", key.model_name, key.world_size, key.worker_id, key.chunk_hash_hex, str(key.dtype), tags,
                   getattr(key, "layer_id", None))  # fmt: skip


def object_key_digest(key: Any) -> bytes:
    """32 bytes of an ObjectKey of the multi-process mode: all of its fields."""
    return _digest("object", key.model_name, key.chunk_hash.hex(), key.kv_rank, key.object_group_id, key.cache_salt)


def _digest(*fields: object) -> bytes:
    return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).digest()


def packed(digests: Iterable[bytes]) -> bytes:
    """Digests back to back, as the pool takes them."""
    return b"".join(digests)


def bytes_of(memory_obj: Any) -> Bytes:
    """A memory object's bytes in place, flat."""
    return np.frombuffer(memory_obj.byte_array, dtype=np.uint8)
