"""A worker's node and data plane inside the test process: real sockets, real tiers, no master."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from kvpool.config import WorkerSettings
from kvpool.core.hashing import HashKind
from kvpool.core.keys import KeyBatch, pack_keys
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import NamespaceUid
from kvpool.worker.build import build_node
from kvpool.worker.dataplane import DataPlane
from tests.support.payload import payload
from tests.support.raw_client import RawClient


class WorkerNode:
    """Started by the constructor; `close` drains and gives everything back."""

    def __init__(self, directory: Path, *, token: str = "", **settings: Any) -> None:
        given: dict[str, Any] = {"dram": 64 << 20, "data_dir": directory / "worker", "staging_bytes": 64 << 20} | settings
        self.settings = WorkerSettings(**given)
        self.token = token
        self.node = build_node(self.settings)
        self.plane = DataPlane(self.node, self.settings, token=token.encode())
        self.plane.start()
        self.node.start()
        self._closed = False

    def namespace(self, *, block_bytes: int = 16384, name: str = "n", blocked: bool = False) -> NamespaceSpec:
        """A fixed-size namespace of opaque blocks is variable; sizes up to `block_bytes` are taken."""
        layout = KVLayout.opaque(block_bytes=block_bytes)
        spec = NamespaceSpec.of(name, layout, uid=NamespaceUid(secrets.token_bytes(16)), hash=HashKind.EXTERNAL)
        self.node.open_namespace(spec, applied_seq=0, blocked=blocked)
        return spec

    def fixed_namespace(self, *, name: str = "f") -> NamespaceSpec:
        """2 layers of 4096 bytes a plane: blocks of 16 KiB, chunks of one layer (8 KiB)."""
        layout = KVLayout(
            model="m", revision="r", dtype="float16", n_layers=2, n_kv_heads=8, head_dim=64, block_tokens=4, format="NHD/1"
        )
        spec = NamespaceSpec.of(name, layout, uid=NamespaceUid(secrets.token_bytes(16)))
        self.node.open_namespace(spec, applied_seq=0, blocked=False)
        return spec

    def tcp(self, **more: Any) -> RawClient:
        return RawClient(self.plane.address, **({"token": self.token} | more))

    def unix(self, **more: Any) -> RawClient:
        return RawClient("@" + self.plane.unix_name, **({"token": self.token} | more))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.plane.drain(2.0)
            self.plane.stop()
            self.node.close()


def chain(spec: NamespaceSpec, name: str, n: int, *, start: int = 0) -> KeyBatch:
    """n keys of a chain with this name, from depth `start` on."""
    hashes = b"".join(_hash(name, i) for i in range(start, start + n))
    parent = _hash(name, start - 1) if start else bytes(32)
    return KeyBatch(spec.uid, pack_keys(hashes, shard=0), parent, start, True)


def blocks_of(spec: NamespaceSpec, name: str, n: int, *, start: int = 0, size: int | None = None) -> list[bytes]:
    """Payloads that name themselves, of the namespace's block size or `size`."""
    return [payload(f"{name}/{i}", 1, size or spec.block_bytes) for i in range(start, start + n)]


def _hash(name: str, i: int) -> bytes:
    return payload(f"hash/{name}/{i}", 1, 32)



