"""The value types of Mooncake's Python API. What of a ReplicateConfig the pool has no counterpart for is said once in the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal

from kvpool.core.pins import PIN_TTL_S_MAX

log = logging.getLogger("kvpool.mooncake")


class SoftPinAction(IntEnum):
    """What a put does to an object's soft pin."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(IntEnum):
    """What an object holds; a hint."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicateConfig:
    """How objects of a put are kept. Takes all of Mooncake's fields and no others; a wrong type raises TypeError."""

    __slots__ = ("data_type", "dfs_replica_num", "group_ids", "nof_replica_num", "prefer_alloc_in_same_node",
                 "preferred_nof_segments", "preferred_segment", "preferred_segments", "replica_num", "soft_pin_action",
                 "soft_pin_ttl_ms", "with_hard_pin")  # fmt: skip

    replica_num: int
    nof_replica_num: int
    dfs_replica_num: int
    soft_pin_action: SoftPinAction
    soft_pin_ttl_ms: int | None
    with_hard_pin: bool
    preferred_segment: str
    preferred_segments: Sequence[str]
    preferred_nof_segments: Sequence[str]
    prefer_alloc_in_same_node: bool
    data_type: ObjectDataType
    group_ids: Sequence[str] | None

    def __init__(self) -> None:
        for name, (_, value) in _FIELDS.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = _FIELDS.get(name)
        if kind is not None:
            _check(name, kind[0], value)
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"ReplicateConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in _FIELDS)})"


_FIELDS: Final[dict[str, tuple[str, Any]]] = {
    "replica_num": ("int", 1),
    "nof_replica_num": ("int", 0),
    "dfs_replica_num": ("int", 0),
    "soft_pin_action": ("SoftPinAction", SoftPinAction.PRESERVE),
    "soft_pin_ttl_ms": ("int or None", None),
    "with_hard_pin": ("bool", False),
    "preferred_segment": ("str", ""),
    "preferred_segments": ("list[str]", []),
    "preferred_nof_segments": ("list[str]", []),
    "prefer_alloc_in_same_node": ("bool", False),
    "data_type": ("ObjectDataType", ObjectDataType.UNKNOWN),
    "group_ids": ("list[str] or None", None),
}

# Fields that the pool does not act on, and what it does instead.
_WITHOUT_COUNTERPART: Final = {
    "replica_num": "copies are set for the whole namespace (kvpool ns create --replicas), not for an object",
    "nof_replica_num": "there is no NVMe-oF tier",
    "dfs_replica_num": "there is no DFS tier",
    "preferred_segment": "workers own the memory: a put goes to the worker of this host where it has room",
    "preferred_segments": "workers own the memory: a put goes to the worker of this host where it has room",
    "preferred_nof_segments": "there is no NVMe-oF tier",
    "group_ids": "objects of a group are evicted one by one",
}

SOFT_PIN_TTL_MS: Final = 30 * 60 * 1000  # Mooncake's default and its limit
SOFT_PIN_TTL_MS_MAX: Final = 24 * 3600 * 1000

_said: set[str] = set()
_said_lock = threading.Lock()


def say_once(name: str, text: str, *arguments: Any) -> None:
    """A warning that this process gives once."""
    with _said_lock:
        if name in _said:
            return
        _said.add(name)
    log.warning(text, *arguments)


@dataclass(frozen=True, slots=True)
class PinWish:
    """What a put does to its keys' pins. `level` "": ends them."""

    level: Literal["", "soft", "hard"]
    ttl_s: float = 0.0


def pin_wish(config: ReplicateConfig | None) -> PinWish | None:
    """None: pins stay as they are. A hard pin has no end in Mooncake; here it has the latest one that there is."""
    if config is None:
        return None
    if config.with_hard_pin:
        return PinWish("hard", PIN_TTL_S_MAX)
    if config.soft_pin_action is SoftPinAction.ENABLE:
        ttl_ms = SOFT_PIN_TTL_MS if config.soft_pin_ttl_ms is None else config.soft_pin_ttl_ms
        return PinWish("soft", max(1, min(ttl_ms, SOFT_PIN_TTL_MS_MAX)) / 1000)
    return PinWish("") if config.soft_pin_action is SoftPinAction.DISABLE else None


def check_config(config: object, n_keys: int) -> bool:
    """Whether `config` may go with a put of n keys; says once what of it has no counterpart here."""
    if config is None:
        return True
    if isinstance(config, ReplicateConfig):
        if config.replica_num < 1 or (config.group_ids is not None and len(config.group_ids) != n_keys):
            return False
        for name, instead in _WITHOUT_COUNTERPART.items():
            if getattr(config, name) != _FIELDS[name][1]:
                say_once(f"field {name}", "ReplicateConfig.%s has no counterpart in kvpool: %s", name, instead)
        return True
    raise TypeError(f"config: must be a ReplicateConfig, not {type(config).__name__}")


def _check(name: str, kind: str, value: Any) -> None:
    good = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "int or None": value is None or (isinstance(value, int) and not isinstance(value, bool)),
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
        "SoftPinAction": isinstance(value, SoftPinAction),
        "ObjectDataType": isinstance(value, ObjectDataType),
        "list[str]": isinstance(value, list | tuple) and all(isinstance(one, str) for one in value),
        "list[str] or None": value is None or (isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)),
    }[kind]
    if not good:
        raise TypeError(f"ReplicateConfig.{name}: must be {kind}, not {type(value).__name__}")
