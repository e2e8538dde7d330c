"""The layout of a block: what its bytes mean, how many they are, and the fingerprint that keeps different meanings apart.

Owns sizes (`block_bytes`, `chunk_bytes`) and the canonical JSON that the fingerprint digests. What a namespace adds to a layout
(salt, replicas, quota) is in `namespaces`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from kvpool.core.types import MAX_BLOCK_BYTES
from kvpool.errors import InvalidArgument

DTYPE_BYTES: Final[dict[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
CHUNK_BYTES: Final = 256 << 10  # what one checksum covers where no layer boundary serves
CHUNK_BYTES_MIN: Final = 4096  # a smaller layer would make more sums than bytes are worth
MAX_LAYOUT_JSON_BYTES: Final = 16 << 10
MAX_COUNT: Final = 1 << 20  # of layers, heads, tokens, ranks: far above any model
MAX_TEXT_CHARS: Final = 512

_TEXTS: Final = ("model", "revision", "dtype", "format")
_COUNTS: Final = ("n_layers", "n_kv_heads", "head_dim", "block_tokens", "tp_size", "pp_size", "planes")
_OPAQUE: Final[dict[str, Any]] = {  # what the fields without meaning are in an opaque layout
    "revision": "", "dtype": "uint8", "format": "opaque/1", "n_layers": 1, "n_kv_heads": 1, "head_dim": 1,
    "tp_size": 1, "pp_size": 1, "planes": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """What a block's bytes are. Two layouts that differ in any field have different fingerprints and share nothing.

    `format` names the order and version of the engine's arrangement ("NHD/1"); `planes` is 2 for K and V, 1 where they are one
    (MLA). Each rank of `tp_size` x `pp_size` stores its own share under its own shard: `block_bytes` is that of one rank.
    Raises InvalidArgument naming the field that is out of range or does not divide.
    """

    model: str
    revision: str
    dtype: str
    n_layers: int
    n_kv_heads: int
    head_dim: int
    block_tokens: int
    format: str
    tp_size: int = 1
    pp_size: int = 1
    planes: int = 2
    opaque_bytes: int = 0  # above 0: bytes whose meaning is the caller's own, made by `opaque`

    def __post_init__(self) -> None:
        for name in _TEXTS:
            _check_text(name, getattr(self, name), empty=name == "revision")
        for name in _COUNTS:
            object.__setattr__(self, name, _check_int(name, getattr(self, name), 1, MAX_COUNT))
        opaque_bytes = _check_int("block_bytes", self.opaque_bytes, 0, MAX_BLOCK_BYTES)
        object.__setattr__(self, "opaque_bytes", opaque_bytes)
        if opaque_bytes:
            if wrong := [name for name, value in _OPAQUE.items() if getattr(self, name) != value]:
                raise InvalidArgument(f"{wrong[0]}: has no meaning in an opaque layout; make one with KVLayout.opaque()")
            return
        if self.dtype not in DTYPE_BYTES:
            near = difflib.get_close_matches(self.dtype, DTYPE_BYTES, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise InvalidArgument(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}{hint}")
        if self.planes > 2:
            raise InvalidArgument(f"planes: {self.planes} is neither 2 (K and V) nor 1 (one plane, MLA)")
        if self.n_layers % self.pp_size:
            raise InvalidArgument(f"pp_size: {self.n_layers} layers do not divide by {self.pp_size}")
        many, few = max(self.n_kv_heads, self.tp_size), min(self.n_kv_heads, self.tp_size)
        if many % few:
            raise InvalidArgument(f"tp_size: {self.n_kv_heads} kv heads and tensor parallel size {self.tp_size} do not divide")
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise InvalidArgument(f"block_bytes: {self.block_bytes} in this layout; the limit is {MAX_BLOCK_BYTES}")

    @classmethod
    def opaque(cls, block_bytes: int, block_tokens: int = 1, name: str = "opaque") -> KVLayout:
        """Values of 1..`block_bytes` bytes whose meaning is the caller's own; `name` keeps different meanings apart."""
        _check_text("name", name, empty=False)
        block_bytes = _check_int("block_bytes", block_bytes, 1, MAX_BLOCK_BYTES)
        return cls(model=name, block_tokens=block_tokens, opaque_bytes=block_bytes, **_OPAQUE)

    @property
    def is_opaque(self) -> bool:
        """Values may be shorter than `block_bytes`."""
        return self.opaque_bytes > 0

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one rank's block."""
        heads = max(1, self.n_kv_heads // self.tp_size)
        return self.planes * heads * self.head_dim * self.block_tokens * DTYPE_BYTES[self.dtype]

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one rank's block (opaque: of the largest)."""
        return self.opaque_bytes or self.n_layers // self.pp_size * self.layer_bytes

    @property
    def chunk_bytes(self) -> int:
        """What one checksum covers: a layer, or 256 KiB where a layer is too small or has no meaning."""
        return self.layer_bytes if not self.is_opaque and self.layer_bytes >= CHUNK_BYTES_MIN else CHUNK_BYTES

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes: sha256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).digest()

    def to_json(self) -> str:
        """Canonical: sorted keys, no spaces, ASCII; every field in it."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in (*_TEXTS, *_COUNTS)}
        fields["opaque_bytes"] = self.opaque_bytes
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> KVLayout:
        """The layout that `to_json` wrote. Raises InvalidArgument naming `layout` or the field."""
        if len(text) > MAX_LAYOUT_JSON_BYTES:
            raise InvalidArgument(f"layout: {len(text)} characters of JSON; the limit is {MAX_LAYOUT_JSON_BYTES}")
        try:
            fields = json.loads(text, object_pairs_hook=_pairs)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"layout: no valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise InvalidArgument("layout: JSON must be an object")
        names = {*_TEXTS, *_COUNTS, "opaque_bytes"}
        if wrong := sorted(names ^ fields.keys()):
            word = "unknown" if wrong[0] in fields else "missing"
            raise InvalidArgument(f"layout: {word} field {wrong[0]!r:.100}; a layout has {', '.join(sorted(names))}")
        return cls(**fields)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field is there twice")
    return fields


def _check_text(name: str, value: object, *, empty: bool) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name}: must be a string, not {type(value).__name__}")
    if not value.isprintable() or len(value) > MAX_TEXT_CHARS or (not value and not empty):
        low = 0 if empty else 1
        raise InvalidArgument(f"{name}: must be {low}..{MAX_TEXT_CHARS} printable characters, not {value!r:.80}")


def _check_int(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidArgument(f"{name}: must be an integer in {low}..{high}, not {value!r:.80}")
    number = operator.index(value)
    if not low <= number <= high:
        raise InvalidArgument(f"{name}: {number} is not in {low}..{high}")
    return number
