"""What must be equal in two engines for one to use the other's blocks, as one value; its digest names the namespace.

An engine with another model, revision, dtype, block size, cache layout, parallel sizes or hashes gets another namespace, so it
can never read a block that means something else; `differences` says in words why two engines do not share.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.core.layout import MAX_TEXT_CHARS, KVLayout
from kvpool.errors import InvalidArgument

PREFIX: Final = "vllm:"
DIGEST_CHARS: Final = 16
VALUE_CHARS_MAX: Final = 48  # of one field, so that all of them fit into the layout's name
SAMPLES_PER_FILE: Final = 16
SAMPLE_BYTES: Final = 4096
WEIGHT_FILES_MAX: Final = 1024

# Field -> what a difference in it means, in the words of the log line.
FIELDS: Final = {
    "engine": "engine version", "model": "model", "revision": "model revision", "config": "model configuration",
    "weights": "model weights", "dtype": "dtype", "kv": "KV cache dtype", "block": "block size", "cache": "cache layout",
    "device": "device", "bytes": "bytes of a block", "tp": "tensor parallel size", "pp": "pipeline parallel size",
    "cp": "context parallel sizes", "rep": "ranks with the same KV", "algo": "hash algorithm",
    "seed": "hash seed (PYTHONHASHSEED)", "hash": "hash of a known block",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Identity:
    """`values`: one text for each of FIELDS. `block_bytes`: the most that one rank's block has; `block_tokens`."""

    values: tuple[str, ...]
    block_bytes: int
    block_tokens: int

    @classmethod
    def of(cls, values: Mapping[str, object], *, block_bytes: int, block_tokens: int) -> Identity:
        """InvalidArgument when a field is missing or unknown. A long text is cut, and its digest takes the place of the rest."""
        if wrong := sorted(FIELDS.keys() ^ values.keys()):
            raise InvalidArgument(f"identity: field {wrong[0]!r} is missing or unknown")
        return cls(tuple(_short(str(values[name])) for name in FIELDS), block_bytes, block_tokens)

    def as_text(self) -> str:
        """Canonical, printable, at most 512 characters."""
        return json.dumps(self.values, separators=(",", ":"), ensure_ascii=True)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.as_text().encode()).hexdigest()[:DIGEST_CHARS]

    @property
    def family(self) -> str:
        """Start of the names of all namespaces of models of this name."""
        return f"{PREFIX}{re.sub(r'[^A-Za-z0-9._-]', '_', self.values[list(FIELDS).index('model')])}:"

    @property
    def namespace(self) -> str:
        """Name of the namespace that all engines of this identity share."""
        return f"{self.family}{self.digest}"

    @property
    def layout(self) -> KVLayout:
        """Opaque bytes whose meaning this identity is. The whole identity is in the layout, so in its fingerprint."""
        text = self.as_text()
        if len(text) > MAX_TEXT_CHARS:  # 18 fields of 48 characters could be; then the digest stands for the text
            text = hashlib.sha256(text.encode()).hexdigest()
        return KVLayout.opaque(self.block_bytes, self.block_tokens, name=text)


def values_of(layout: KVLayout) -> tuple[str, ...] | None:
    """The values that are in a layout which `Identity.layout` made; None when it is another one's."""
    try:
        values = json.loads(layout.model)
    except ValueError:
        return None
    if not isinstance(values, list) or len(values) != len(FIELDS) or not all(isinstance(value, str) for value in values):
        return None
    return tuple(values)


def differences(ours: tuple[str, ...], theirs: tuple[str, ...]) -> list[str]:
    """What keeps two engines apart, e.g. "dtype bfloat16, theirs float16"."""
    return [f"{words} {own}, theirs {other}"
            for words, own, other in zip(FIELDS.values(), ours, theirs, strict=True) if own != other]  # fmt: skip


def weights_digest(directory: Path) -> str:
    """A few pages of each weights file of a model, so that two fine-tunings of the same size and name differ; the same on each
    host.

    16 hex characters, "" when the directory has no weights files. Reads at most SAMPLES_PER_FILE x 4 KiB of each.
    """
    files = sorted(path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".gguf"))
    if not files:
        return ""
    digest = hashlib.sha256()
    for path in files[:WEIGHT_FILES_MAX]:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            digest.update(f"{path.name} {size}\n".encode())
            for sample in range(SAMPLES_PER_FILE):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // max(1, SAMPLES_PER_FILE - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:DIGEST_CHARS]


def text_digest(value: object) -> str:
    """16 hex characters of any JSON value; what JSON does not know goes in as its repr."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


def _short(text: str) -> str:
    printable = "".join(char if char.isascii() and char.isprintable() and char not in '"\\' else "_" for char in text)
    if len(printable) <= VALUE_CHARS_MAX and printable == text:
        return printable
    return f"{printable[: VALUE_CHARS_MAX - 9]}~{hashlib.sha256(text.encode()).hexdigest()[:8]}"
