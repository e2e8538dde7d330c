"""Namespaces between their proto and their spec. Imports core and the generated code only: clients and workers use it too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from kvpool.core.hashing import HashKind
from kvpool.core.namespaces import NamespaceSpec, ReadPolicy, WritePolicy, check_hash
from kvpool.core.types import NamespaceUid
from kvpool.errors import InvalidArgument
from kvpool.v1 import master_pb2 as pb

_T = TypeVar("_T")
WRITE_POLICIES: Final = (WritePolicy.BACK, WritePolicy.THROUGH, WritePolicy.SELECTIVE)
READ_POLICIES: Final = (ReadPolicy.WAIT, ReadPolicy.BEST_EFFORT, ReadPolicy.TIMEOUT)


def spec_to_proto(spec: NamespaceSpec) -> pb.Namespace:
    """Every field, as it travels."""
    return pb.Namespace(
        uid=spec.uid,
        name=spec.name,
        layout=spec.layout_json,
        fingerprint=spec.fingerprint,
        block_bytes=spec.block_bytes,
        chunk_bytes=spec.chunk_bytes,
        variable=spec.variable,
        hash=HashKind(spec.hash).value,
        salt=spec.salt,
        replicas=spec.replicas,
        block_tokens=spec.block_tokens,
        quota_bytes=spec.quota_bytes,
        removal_seq=spec.removal_seq,
        ttl_ms=spec.ttl_ms,
        write_policy=WRITE_POLICIES.index(spec.write_policy),
        read_policy=READ_POLICIES.index(spec.read_policy),
        read_timeout_ms=spec.read_timeout_ms,
    )


def _one_of(field: str, choices: Sequence[_T], index: int) -> _T:
    if index >= len(choices):
        raise InvalidArgument(f"{field}: {index} is not known to this release")
    return choices[index]


def spec_from_proto(message: pb.Namespace) -> NamespaceSpec:
    """The checked spec. Raises InvalidArgument (or LayoutMismatch) naming the field that is wrong or does not fit the layout."""
    return NamespaceSpec(
        uid=NamespaceUid(message.uid),
        name=message.name,
        layout_json=message.layout,
        fingerprint=message.fingerprint,
        block_bytes=message.block_bytes,
        chunk_bytes=message.chunk_bytes,
        variable=message.variable,
        hash=check_hash(message.hash),
        salt=message.salt,
        replicas=message.replicas,
        block_tokens=message.block_tokens,
        quota_bytes=message.quota_bytes,
        removal_seq=message.removal_seq,
        ttl_ms=message.ttl_ms,
        write_policy=_one_of("write_policy", WRITE_POLICIES, message.write_policy),
        read_policy=_one_of("read_policy", READ_POLICIES, message.read_policy),
        read_timeout_ms=message.read_timeout_ms,
    ).check()
