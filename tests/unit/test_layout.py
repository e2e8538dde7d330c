"""Layouts: sizes, and a fingerprint that no two different ones share."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pickle
from typing import Any

import numpy as np
import pytest

from kvpool.core.layout import CHUNK_BYTES, CHUNK_BYTES_MIN, DTYPE_BYTES, MAX_COUNT, MAX_TEXT_CHARS, KVLayout
from kvpool.core.types import MAX_BLOCK_BYTES
from kvpool.errors import InvalidArgument

LLAMA: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-70B",
    "revision": "main",
    "dtype": "float16",
    "n_layers": 80,
    "n_kv_heads": 8,
    "head_dim": 128,
    "block_tokens": 256,
    "tp_size": 1,
    "pp_size": 1,
    "format": "NHD/1",
}


def llama(**changes: Any) -> KVLayout:
    return KVLayout(**{**LLAMA, **changes})


def test_known_fingerprint() -> None:
    """The canonical JSON, spelled out: a change here makes every stored namespace refuse its clients."""
    text = (
        '{"block_tokens":256,"dtype":"float16","format":"NHD/1","head_dim":128,"model":"meta-llama/Llama-3.1-70B","n_kv_heads":8,'
        '"n_layers":80,"opaque_bytes":0,"planes":2,"pp_size":1,"revision":"main","tp_size":1}'
    )
    assert llama().to_json() == text
    assert llama().fingerprint == hashlib.sha256(text.encode()).digest()


# another right value for every field; the test below fails when a field is added and not listed here
OTHERS: dict[str, list[Any]] = {
    "model": ["meta-llama/Llama-3.1-70b", "m", "meta-llama/Llama-3.1-70B "],
    "revision": ["", "Main"],
    "dtype": [d for d in DTYPE_BYTES if d != "float16"],
    "n_layers": [40, 2],
    "n_kv_heads": [1, 16],
    "head_dim": [64, 256],
    "block_tokens": [16, 255],
    "format": ["HND/1", "NHD/2"],
    "tp_size": [2, 8],
    "pp_size": [2, 80],
    "planes": [1],
    "opaque_bytes": [],  # has its own constructor
}


def test_layouts_that_differ_in_any_field_never_share_a_fingerprint() -> None:
    assert set(OTHERS) == {field.name for field in dataclasses.fields(KVLayout)}
    layouts = [llama(), KVLayout.opaque(llama().block_bytes, 256, "meta-llama/Llama-3.1-70B")]
    layouts += [llama(**{name: value}) for name, values in OTHERS.items() for value in values]
    for first, second in itertools.combinations(OTHERS, 2):
        if OTHERS[first] and OTHERS[second]:
            layouts.append(llama(**{first: OTHERS[first][0], second: OTHERS[second][0]}))
    assert len({layout.fingerprint for layout in layouts}) == len(layouts) == len(set(layouts))


def test_text_cannot_slip_from_one_field_into_another() -> None:
    pairs = [("a", "b"), ("ab", ""), ('a","revision":"b', "x"), ("a", 'b","model":"c'), ("café", "e"), ("cafe\u0301", "e")]
    assert len({llama(model=model, revision=revision).fingerprint for model, revision in pairs}) == len(pairs)


def test_opaque_layouts_that_differ_in_any_argument_differ() -> None:
    layouts = [
        KVLayout.opaque(1 << 20),
        KVLayout.opaque(1 << 19),
        KVLayout.opaque(1 << 20, 256),
        KVLayout.opaque(1 << 20, name="b"),
    ]
    assert len({layout.fingerprint for layout in layouts}) == 4


@pytest.mark.parametrize(
    ("changes", "block_bytes", "chunk_bytes"),
    [
        ({}, 2 * 80 * 8 * 128 * 256 * 2, 2 * 8 * 128 * 256 * 2),
        ({"tp_size": 4}, 2 * 80 * 2 * 128 * 256 * 2, 2 * 2 * 128 * 256 * 2),
        ({"tp_size": 16}, 2 * 80 * 1 * 128 * 256 * 2, 2 * 128 * 256 * 2),  # more ranks than heads: each has one
        ({"pp_size": 4}, 2 * 20 * 8 * 128 * 256 * 2, 2 * 8 * 128 * 256 * 2),
        ({"tp_size": 8, "pp_size": 8}, 2 * 10 * 1 * 128 * 256 * 2, 2 * 128 * 256 * 2),
        (
            {"planes": 1, "n_kv_heads": 1, "head_dim": 576, "n_layers": 61, "dtype": "bfloat16", "block_tokens": 64},
            61 * 576 * 64 * 2,
            576 * 64 * 2,
        ),  # MLA
        ({"dtype": "float8_e4m3fn"}, 2 * 80 * 8 * 128 * 256, 2 * 8 * 128 * 256),
        ({"dtype": "float32"}, 2 * 80 * 8 * 128 * 256 * 4, 2 * 8 * 128 * 256 * 4),
        ({"n_kv_heads": 1, "head_dim": 64, "block_tokens": 16}, 2 * 80 * 64 * 16 * 2, CHUNK_BYTES_MIN),
        ({"n_kv_heads": 1, "head_dim": 64, "block_tokens": 15}, 2 * 80 * 64 * 15 * 2, CHUNK_BYTES),  # a layer below 4096 bytes
    ],
)
def test_sizes(changes: dict[str, Any], block_bytes: int, chunk_bytes: int) -> None:
    layout = llama(**changes)
    assert (layout.block_bytes, layout.chunk_bytes, layout.is_opaque) == (block_bytes, chunk_bytes, False)


def test_opaque_sizes() -> None:
    layout = KVLayout.opaque(block_bytes=1 << 20, block_tokens=256)
    assert (layout.block_bytes, layout.block_tokens, layout.chunk_bytes, layout.is_opaque) == (1 << 20, 256, CHUNK_BYTES, True)
    assert KVLayout.opaque(1).block_bytes == 1 and KVLayout.opaque(MAX_BLOCK_BYTES).block_bytes == MAX_BLOCK_BYTES


@pytest.mark.parametrize("layout", [llama(), llama(model="模型 ✓", revision="", planes=1), KVLayout.opaque(77, 3, "ö")])
def test_json_round_trip(layout: KVLayout) -> None:
    again = KVLayout.from_json(layout.to_json())
    assert again == layout and again.fingerprint == layout.fingerprint and hash(again) == hash(layout)
    assert pickle.loads(pickle.dumps(layout)).fingerprint == layout.fingerprint
    shuffled = json.dumps(dict(reversed(json.loads(layout.to_json()).items())), indent=2)
    assert KVLayout.from_json(shuffled).fingerprint == layout.fingerprint


def test_frozen_and_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        llama().dtype = "int8"  # type: ignore[misc]
    with pytest.raises(TypeError):
        KVLayout("m", "main")  # type: ignore[call-arg, misc]
    assert llama(n_layers=np.int64(80)).to_json() == llama().to_json()  # a config's numpy numbers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (name, bad)
            for name in ("n_layers", "n_kv_heads", "head_dim", "block_tokens", "tp_size", "pp_size", "planes")
            for bad in (0, -1, 1.0, "1", None, True, MAX_COUNT + 1, [1])
        ],
        *[
            (name, bad)
            for name in ("model", "revision", "dtype", "format")
            for bad in (None, 5, b"m", "a\0b", "a\nb", "\ud800", "x" * (MAX_TEXT_CHARS + 1))
        ],
        ("model", ""),
        ("dtype", ""),
        ("format", ""),
        ("dtype", "fp16"),
        ("dtype", "Float16"),
        ("dtype", "torch.float16"),
        ("planes", 3),
        ("pp_size", 3),
        ("tp_size", 3),
        ("tp_size", 12),
        ("n_kv_heads", 3),
        ("opaque_bytes", -1),
        ("opaque_bytes", 5),
        ("opaque_bytes", 1.5),
        ("opaque_bytes", MAX_BLOCK_BYTES + 1),
    ],
)
def test_bad_fields_are_named(field: str, value: Any) -> None:
    names = {"n_kv_heads": "n_kv_heads|tp_size", "opaque_bytes": "block_bytes|revision|dtype|format"}.get(field, field)
    with pytest.raises(InvalidArgument, match=rf"^({names}): "):
        llama(**{**({"tp_size": 2} if (field, value) == ("n_kv_heads", 3) else {}), field: value})


def test_dtype_error_has_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'bfloat16'"):
        llama(dtype="bfloat-16")


def test_a_block_past_the_limit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"block_bytes: 2684354560 in this layout; the limit is 1073741824"):
        llama(block_tokens=8192)


@pytest.mark.parametrize("kwargs", [{"block_bytes": b} for b in (0, -1, MAX_BLOCK_BYTES + 1, 1.5, "1MiB", None, True)])
def test_bad_opaque_bytes_are_named(kwargs: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"^block_bytes: "):
        KVLayout.opaque(**kwargs)


@pytest.mark.parametrize(("argument", "value"), [("block_tokens", 0), ("block_tokens", None), ("name", ""), ("name", 3)])
def test_bad_opaque_arguments_are_named(argument: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{argument}: "):
        KVLayout.opaque(1024, **{argument: value})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "layout"),
        ("{", "layout"),
        ("[]", "layout"),
        ("5", "layout"),
        ("null", "layout"),
        ("[" * 5000, "layout"),
        ("9" * 9000, "layout"),
        ("x" * 20_000, "layout"),
        ("{}", "missing field 'block_tokens'"),
        (llama().to_json()[:-1] + ',"n_layers":80}', "twice"),
        (llama().to_json()[:-1] + ',"extra":1}', "unknown field 'extra'"),
        (llama().to_json().replace("80", "80.0"), "n_layers"),
        (llama().to_json().replace("80", "NaN"), "n_layers"),
        (llama().to_json().replace('"main"', "null"), "revision"),
        (llama().to_json().replace("80", "1e400"), "n_layers"),
    ],
)
def test_bad_json_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        KVLayout.from_json(text)
