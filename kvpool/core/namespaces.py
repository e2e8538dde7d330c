"""What a namespace is: one tenant's keyspace with one layout. A value: `master.store` keeps it, `master.wire` sends it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from kvpool.core.hashing import MAX_SALT_BYTES, HashKind
from kvpool.core.layout import KVLayout
from kvpool.core.retention import TTL_S_MAX, check_seconds
from kvpool.core.types import HASH_BYTES, UID_BYTES, NamespaceUid
from kvpool.errors import InvalidArgument, LayoutMismatch

MAX_NAME_CHARS: Final = 128
MAX_REPLICAS: Final = 16
READ_TIMEOUT_MS_MAX: Final = 3_600_000
NO_UID: Final = NamespaceUid(b"")  # of a spec that the master has not made yet


def check_name(name: object) -> str:
    """The name itself when it is allowed: 1..128 printable characters, no '/', not '.' or '..'. Raises InvalidArgument."""
    if not isinstance(name, str):
        raise InvalidArgument(f"namespace: the name must be a string, not {type(name).__name__}")
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise InvalidArgument(f"namespace: the name has {len(name)} characters; allowed are 1..{MAX_NAME_CHARS}")
    if not name.isprintable() or "/" in name or name in (".", ".."):
        raise InvalidArgument(f"namespace: {name!r} has control characters or '/', or is '.' or '..'")
    return name


class WritePolicy(StrEnum):
    """When a block goes down to SSD."""

    BACK = "back"  # when DRAM needs its room
    THROUGH = "through"  # soon after its put: a worker that dies has lost little
    SELECTIVE = "selective"  # when DRAM needs its room, and only if it was used again: saves the disk


class ReadPolicy(StrEnum):
    """How long a get waits for blocks on SSD. What it does not wait for is a miss (`timeout`), and comes up to DRAM meanwhile."""

    WAIT = "wait"  # until the get's deadline
    BEST_EFFORT = "best_effort"  # not at all
    TIMEOUT = "timeout"  # `read_timeout_ms`


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSpec:
    """All facts of a namespace. `block_bytes` and `chunk_bytes` are of one shard's block; `variable`: values of 1..block_bytes
    bytes (opaque layouts). `quota_bytes`, `ttl_ms` 0: none. `removal_seq`: removals so far. Made by `of`; checked whole by
    `check`."""

    uid: NamespaceUid = NO_UID
    name: str
    layout_json: str
    fingerprint: bytes
    block_bytes: int
    chunk_bytes: int
    variable: bool = False
    hash: HashKind = HashKind.SHA256
    salt: bytes = b""
    replicas: int = 1
    block_tokens: int = 1
    quota_bytes: int = 0
    removal_seq: int = 0
    ttl_ms: int = 0  # blocks expire so long after their last put
    write_policy: WritePolicy = WritePolicy.BACK
    read_policy: ReadPolicy = ReadPolicy.WAIT
    read_timeout_ms: int = 0  # of ReadPolicy.TIMEOUT

    @classmethod
    def of(
        cls,
        name: str,
        layout: KVLayout,
        *,
        uid: NamespaceUid = NO_UID,
        hash: HashKind | str = HashKind.SHA256,  # noqa: A002
        salt: bytes = b"",
        replicas: int = 1,
        quota_bytes: int | None = None,
        ttl_s: float | None = None,
        write_policy: WritePolicy | str = WritePolicy.BACK,
        read_policy: ReadPolicy | str = ReadPolicy.WAIT,
        read_timeout_ms: int | None = None,
    ) -> NamespaceSpec:
        """The spec of a namespace with this layout, checked. Raises InvalidArgument naming the argument."""
        if not isinstance(layout, KVLayout):
            raise InvalidArgument(f"layout: must be a KVLayout, not {type(layout).__name__}")
        if not isinstance(salt, (bytes, bytearray, memoryview)):
            raise InvalidArgument(f"salt: must be bytes, not {type(salt).__name__}")
        spec = cls(
            uid=uid,
            name=name,
            layout_json=layout.to_json(),
            fingerprint=layout.fingerprint,
            block_bytes=layout.block_bytes,
            chunk_bytes=layout.chunk_bytes,
            variable=layout.is_opaque,
            hash=check_hash(hash),
            salt=bytes(salt),
            replicas=replicas,
            block_tokens=layout.block_tokens,
            quota_bytes=0 if quota_bytes is None else quota_bytes,
            ttl_ms=check_seconds("ttl_s", ttl_s),
            write_policy=_choice("write_policy", WritePolicy, write_policy),
            read_policy=_choice("read_policy", ReadPolicy, read_policy),
            read_timeout_ms=0 if read_timeout_ms is None else read_timeout_ms,
        )
        return spec.check()

    @property
    def layout(self) -> KVLayout:
        """The layout, read from its JSON."""
        return KVLayout.from_json(self.layout_json)

    def check(self) -> NamespaceSpec:
        """Itself when every field is in range and the sizes are those of the layout. Raises InvalidArgument naming the field."""
        check_name(self.name)
        layout = self.layout
        if self.fingerprint != layout.fingerprint:
            raise LayoutMismatch(f"fingerprint: {self.fingerprint.hex()} is not that of the layout, {layout.fingerprint.hex()}")
        if self.layout_json != layout.to_json():
            raise InvalidArgument("layout: the JSON is not in its canonical form")
        for field, value in (
            ("block_bytes", layout.block_bytes),
            ("chunk_bytes", layout.chunk_bytes),
            ("variable", layout.is_opaque),
            ("block_tokens", layout.block_tokens),
        ):
            if getattr(self, field) != value:
                raise InvalidArgument(f"{field}: {getattr(self, field)} is not the layout's {value}")
        if len(self.uid) not in (0, UID_BYTES) or len(self.fingerprint) != HASH_BYTES:
            raise InvalidArgument(f"uid: {len(self.uid)} bytes; {UID_BYTES} are needed")
        if len(self.salt) > MAX_SALT_BYTES:
            raise InvalidArgument(f"salt: {len(self.salt)} bytes; the limit is {MAX_SALT_BYTES}")
        _check_int("replicas", self.replicas, 1, MAX_REPLICAS)
        _check_int("quota_bytes", self.quota_bytes, 0, 2**63)
        if 0 < self.quota_bytes < self.block_bytes:
            raise InvalidArgument(f"quota_bytes: {self.quota_bytes} is less than one block, which has {self.block_bytes} bytes")
        _check_int("ttl_ms", self.ttl_ms, 0, TTL_S_MAX * 1000)
        _check_int("removal_seq", self.removal_seq, 0, 2**63)
        _check_int("read_timeout_ms", self.read_timeout_ms, 0, READ_TIMEOUT_MS_MAX)
        if (self.read_policy is ReadPolicy.TIMEOUT) != (self.read_timeout_ms > 0):
            raise InvalidArgument(
                f"read_timeout_ms: {self.read_timeout_ms} with read_policy={self.read_policy.value!r}; 'timeout' needs one of at "
                "least 1, the others have none"
            )
        return self


def check_hash(name: object) -> HashKind:
    """'sha256', 'xxh3_128' or 'external' as its HashKind. Raises InvalidArgument."""
    try:
        return HashKind(str(name))
    except ValueError:
        raise InvalidArgument(f"hash: {name!r} is not one of {', '.join(HashKind)}") from None


_Choice = TypeVar("_Choice", bound=StrEnum)


def _choice(field: str, kind: type[_Choice], value: object) -> _Choice:
    try:
        return kind(str(value))
    except ValueError:
        raise InvalidArgument(f"{field}: {value!r} is not one of {', '.join(kind)}") from None


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(f"{field}: {value!r} is not an integer in {low}..{high}")
