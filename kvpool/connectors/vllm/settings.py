"""`kv_connector_extra_config`: every key with its unit and default, checked. A key that is unknown stops the start."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvpool.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """What the connector may be told. Times in ms, sizes in bytes.

    `master`: "host:port", several with commas; empty: KVPOOL_MASTER, else 127.0.0.1:7400. `transport`, `token_file`,
    `mirror_bytes_max`: as `kvpool.connect` takes them. `deadline_ms`: what a request may lose by the pool, on top of the time
    that its bytes take at `load_mbps_min` (MB/s; 0: no such time). `load_async`: vLLM goes on with other requests while one
    loads. `save_decode`: blocks that fill up while tokens are generated are saved too. `model`: name that stands for the
    weights, where the engines' paths differ; engines that give the same name vouch that the weights are the same. `lookup`:
    "mirror" asks nobody, "cluster" asks the master (for namespaces that are larger than the mirror).
    """

    master: str = ""
    token_file: str = ""
    transport: str = ""
    mirror_bytes_max: int = 0
    deadline_ms: int = 200
    load_mbps_min: int = 1000
    load_async: bool = True
    load_threads: int = 4
    save_decode: bool = True
    save_staging_bytes: int = 256 << 20
    save_pinned_part: float = 0.25
    hold_ttl_ms: int = 10_000
    connect_wait_ms: int = 2_000
    flush_ms: int = 5_000
    replicas: int = 1
    model: str = ""
    lookup: str = "mirror"

    def load_deadline_ms(self, n_bytes: int) -> float:
        """For a transfer of `n_bytes`."""
        return self.deadline_ms + (n_bytes / (self.load_mbps_min * 1e3) if self.load_mbps_min else 0.0)


_RANGES: dict[str, tuple[float, float]] = {
    "mirror_bytes_max": (0, 1 << 50), "deadline_ms": (1, 600_000), "load_mbps_min": (0, 1 << 30), "load_threads": (1, 64),
    "save_staging_bytes": (1, 1 << 50), "save_pinned_part": (0.0, 1.0), "hold_ttl_ms": (100, 24 * 3600 * 1000),
    "connect_wait_ms": (0, 600_000), "flush_ms": (0, 600_000), "replicas": (1, 16),
}  # fmt: skip
_CHOICES = {"lookup": ("mirror", "cluster"), "transport": ("", "auto", "shm", "tcp", "nixl")}


def parse(extra: Mapping[str, Any]) -> ConnectorSettings:
    """The settings of this `kv_connector_extra_config`. ConfigError names the key, and the nearest right one."""
    known = {field.name: field for field in fields(ConnectorSettings)}
    found: dict[str, Any] = {}
    for key, value in extra.items():
        field = known.get(key)
        if field is None:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}{hint}; there are {', '.join(sorted(known))}")
        found[key] = _checked(key, value, type(field.default))
    return ConnectorSettings(**found)


def _checked(key: str, value: Any, kind: type[object]) -> Any:
    where = f"kv_connector_extra_config: {key}"
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where}: {value!r} is no {kind.__name__}")
    number: Any = value
    if key in _RANGES and not _RANGES[key][0] <= number <= _RANGES[key][1]:
        raise ConfigError(f"{where}: {value!r} is not in {_RANGES[key][0]}..{_RANGES[key][1]}")
    if key in _CHOICES and value not in _CHOICES[key]:
        raise ConfigError(f"{where}: {value!r} is not one of {', '.join(map(repr, _CHOICES[key]))}")
    return value
