"""Namespaces: names, specs, and their way over the wire."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvpool.core.hashing import MAX_SALT_BYTES, HashKind
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import MAX_NAME_CHARS, MAX_REPLICAS, NamespaceSpec, check_name
from kvpool.core.types import NamespaceUid
from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.master.wire import spec_from_proto, spec_to_proto
from kvpool.v1 import master_pb2 as pb

LAYOUT = KVLayout(
    model="m", revision="r", dtype="bfloat16", n_layers=4, n_kv_heads=2, head_dim=64, block_tokens=32, format="NHD/1", tp_size=2
)
UID = NamespaceUid(bytes(range(16)))


def spec(**changes: Any) -> NamespaceSpec:
    made = NamespaceSpec.of("chat", LAYOUT, uid=UID, hash="xxh3_128", salt=b"s", replicas=2, quota_bytes=1 << 40, ttl_s=60,
                             write_policy="through", read_policy="timeout", read_timeout_ms=5)  # fmt: skip
    return dataclasses.replace(made, removal_seq=7, **changes)


@pytest.mark.parametrize("name", ["a", "chat-70b", "Ünïcode ✓", "x" * MAX_NAME_CHARS, "...", "a.b", "-", "a b", "a:b\\c"])
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "x" * (MAX_NAME_CHARS + 1), "a/b", "/", "a\0b", "\n", "a\tb", ".", "..", "\ud800", None, 5, b"chat", "\u200b"]
)
def test_bad_names(name: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^namespace: "):
        check_name(name)
    with pytest.raises(InvalidArgument, match=r"^namespace: "):
        NamespaceSpec.of(name, LAYOUT)


def test_spec_has_the_sizes_of_its_layout() -> None:
    made = spec()
    assert (made.block_bytes, made.chunk_bytes, made.block_tokens, made.variable) == (4 * 2 * 64 * 32 * 2, 8192, 32, False)
    assert (made.layout, made.fingerprint, made.hash) == (LAYOUT, LAYOUT.fingerprint, HashKind.XXH3_128)
    opaque = NamespaceSpec.of("o", KVLayout.opaque(1000))
    assert (opaque.block_bytes, opaque.variable, opaque.uid, opaque.quota_bytes, opaque.salt) == (1000, True, b"", 0, b"")


def test_every_field_survives_the_wire() -> None:
    made = spec()
    assert all(getattr(made, field.name) not in (0, b"", "") for field in dataclasses.fields(made) if field.name != "variable")
    again = spec_from_proto(pb.Namespace.FromString(spec_to_proto(made).SerializeToString()))
    assert again == made
    assert {f.name.replace("layout_json", "layout") for f in dataclasses.fields(made)} == set(
        pb.Namespace.DESCRIPTOR.fields_by_name
    )
    opaque = NamespaceSpec.of("o", KVLayout.opaque(1000), hash=HashKind.EXTERNAL)
    assert spec_from_proto(spec_to_proto(opaque)) == opaque


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("uid", b"short", "uid"),
        ("name", "", "namespace"),
        ("name", "a/b", "namespace"),
        ("layout", "", "layout"),
        ("layout", "{}", "layout"),
        ("layout", LAYOUT.to_json() + " ", "canonical"),
        ("block_bytes", 1, "block_bytes"),
        ("chunk_bytes", 4096, "chunk_bytes"),
        ("variable", True, "variable"),
        ("hash", "", "hash"),
        ("hash", "md5", "hash: 'md5' is not one of sha256, xxh3_128, external"),
        ("salt", bytes(MAX_SALT_BYTES + 1), "salt"),
        ("replicas", 0, "replicas"),
        ("replicas", MAX_REPLICAS + 1, "replicas"),
        ("block_tokens", 31, "block_tokens"),
        ("quota_bytes", 2**64 - 1, "quota_bytes"),
        ("quota_bytes", 1, "quota_bytes: 1 is less than one block"),
        ("removal_seq", 2**64 - 1, "removal_seq"),
        ("ttl_ms", 2**64 - 1, "ttl_ms"),
    ],
)
def test_what_does_not_fit_is_refused(field: str, value: Any, words: str) -> None:
    message = spec_to_proto(spec())
    setattr(message, field, value)
    with pytest.raises(InvalidArgument, match=words):
        spec_from_proto(message)


def test_another_fingerprint_is_a_layout_mismatch() -> None:
    message = spec_to_proto(spec())
    message.fingerprint = KVLayout.opaque(8).fingerprint
    with pytest.raises(LayoutMismatch, match=LAYOUT.fingerprint.hex()):
        spec_from_proto(message)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"hash": "sha-256"}, "hash"),
        ({"hash": None}, "hash"),
        ({"salt": "text"}, "salt"),
        ({"salt": None}, "salt"),
        ({"salt": bytes(2000)}, "salt"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 1.0}, "replicas"),
        ({"replicas": True}, "replicas"),
        ({"quota_bytes": -1}, "quota_bytes"),
        ({"quota_bytes": "1GiB"}, "quota_bytes"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": "1h"}, "ttl_s"),
        ({"uid": b"x"}, "uid"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{words}: "):
        NamespaceSpec.of("chat", LAYOUT, **kwargs)


def test_layout_must_be_one() -> None:
    with pytest.raises(InvalidArgument, match=r"^layout: "):
        NamespaceSpec.of("chat", {"model": "m"})  # type: ignore[arg-type]
