"""What a master must not forget, as a seam: namespaces, removals, pins, known workers, the epoch. Engines: `lmdb_store`
(one master), `redis_store` (several).

A store is used by one master at a time and refuses a second one. Every write has reached the disk when its coroutine ends;
reads at start give back exactly what was written, in any order of keys. What is in memory of it is `state`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kvpool.core.hashing import HashKind
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.pins import PinLevel
from kvpool.core.removals import Removal
from kvpool.core.types import KEY_BYTES, UID_BYTES, Epoch, Key, NamespaceUid, WorkerId


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """`ordinal` counts creations: a worker that was last seen at a smaller one cannot have blocks of this namespace."""

    spec: NamespaceSpec  # removal_seq: that of the newest removal in the log, kept when the log is trimmed
    ordinal: int


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker that may have blocks. `connected`: it was when this was written. `draining`: an operator wants it empty."""

    worker_id: WorkerId
    incarnation: int
    host_id: str
    address: str
    http: str
    seen_ordinal: int
    connected: bool
    draining: bool = False
    drain_rate_bytes: int = 0  # a second, 0: no limit


@dataclass(frozen=True, slots=True)
class PinRecord:
    """One key's pin; `until_ms` is of the wall clock."""

    key: Key
    level: PinLevel
    until_ms: int


class Store(Protocol):
    """Called from the master's loop only. Raises ConfigError where the place is in use or damaged, QuotaExceeded when full."""

    master_id: str

    async def open(self) -> Epoch:
        """Takes the place for this process; the epoch is one more than at the last open."""
        ...

    async def namespaces(self) -> list[NamespaceRecord]: ...

    async def put_namespace(self, record: NamespaceRecord) -> None: ...

    async def delete_namespace(self, uid: NamespaceUid) -> None:
        """With all its removals and pins."""
        ...

    async def log_removal(self, uid: NamespaceUid, removal: Removal, *, first_seq: int) -> None:
        """Adds a removal; those before `first_seq` may be forgotten, and their numbers stay used."""
        ...

    async def removals(self, uid: NamespaceUid) -> Sequence[Removal]:
        """In order of their numbers."""
        ...

    async def put_pins(self, uid: NamespaceUid, pins: Sequence[PinRecord]) -> None:
        """Adds pins, in the place of earlier ones of their keys. Nothing happens when there is no such namespace."""
        ...

    async def delete_pins(self, uid: NamespaceUid, keys: Sequence[Key]) -> None:
        """Unknown ones are skipped."""
        ...

    async def pins(self) -> list[tuple[NamespaceUid, PinRecord]]:
        """Of all namespaces."""
        ...

    async def workers(self) -> list[WorkerRecord]: ...

    async def put_worker(self, record: WorkerRecord) -> None: ...

    async def delete_worker(self, worker_id: WorkerId) -> None: ...

    async def ping(self) -> None:
        """A read; raises when the store cannot be read."""
        ...

    async def close(self) -> None:
        """Gives the place back. A second call does nothing."""
        ...


# --- records as bytes, for all engines ----------------------------------------------------------------------------------


def namespace_to_bytes(record: NamespaceRecord) -> bytes:
    spec = record.spec
    fields = {
        "uid": spec.uid.hex(),
        "name": spec.name,
        "layout": spec.layout_json,
        "fingerprint": spec.fingerprint.hex(),
        "block_bytes": spec.block_bytes,
        "chunk_bytes": spec.chunk_bytes,
        "variable": spec.variable,
        "hash": HashKind(spec.hash).value,
        "salt": spec.salt.hex(),
        "replicas": spec.replicas,
        "block_tokens": spec.block_tokens,
        "quota_bytes": spec.quota_bytes,
        "removal_seq": spec.removal_seq,
        "ttl_ms": spec.ttl_ms,
        "ordinal": record.ordinal,
    }
    return json.dumps(fields).encode()


def namespace_from_bytes(raw: bytes) -> NamespaceRecord:
    fields = json.loads(raw)
    spec = NamespaceSpec(
        uid=NamespaceUid(bytes.fromhex(fields["uid"])),
        name=fields["name"],
        layout_json=fields["layout"],
        fingerprint=bytes.fromhex(fields["fingerprint"]),
        block_bytes=fields["block_bytes"],
        chunk_bytes=fields["chunk_bytes"],
        variable=fields["variable"],
        hash=HashKind(fields["hash"]),
        salt=bytes.fromhex(fields["salt"]),
        replicas=fields["replicas"],
        block_tokens=fields["block_tokens"],
        quota_bytes=fields["quota_bytes"],
        removal_seq=fields["removal_seq"],
        ttl_ms=fields.get("ttl_ms", 0),  # (records of an earlier release have none)
    )
    return NamespaceRecord(spec, fields["ordinal"])


def worker_to_bytes(record: WorkerRecord) -> bytes:
    return json.dumps({name: getattr(record, name) for name in WorkerRecord.__slots__}).encode()


def worker_from_bytes(raw: bytes) -> WorkerRecord:
    """Fields of a newer release are left out: while a pool is upgraded both write."""
    fields = json.loads(raw)
    return WorkerRecord(**{name: value for name, value in fields.items() if name in WorkerRecord.__slots__})


_PIN: Final = struct.Struct("<BQ")
PIN_BYTES: Final = _PIN.size


def pin_to_bytes(record: PinRecord) -> bytes:
    """Without its key."""
    return _PIN.pack(record.level, record.until_ms)


def pin_from_bytes(name: bytes, raw: bytes) -> tuple[NamespaceUid, PinRecord]:
    """`name`: the namespace's uid and the key. Raises ValueError when that is no pin."""
    if len(raw) != PIN_BYTES or len(name) != UID_BYTES + KEY_BYTES:
        raise ValueError(f"{len(raw)} bytes under a name of {len(name)} bytes are no pin")
    level, until_ms = _PIN.unpack(raw)
    return NamespaceUid(name[:UID_BYTES]), PinRecord(name[UID_BYTES:], PinLevel(level), until_ms)


def with_removal_seq(record: NamespaceRecord, seq: int) -> NamespaceRecord:
    return replace(record, spec=replace(record.spec, removal_seq=seq))
