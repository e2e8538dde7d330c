"""Engines whose connector is vLLM's own MooncakeStoreConnector, unmodified, with `mooncake.store` from the shim."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.connectors.vllm.engines import Engine
from tests.support.mooncake import SHIM

TRACED = Path(__file__).with_name("traced")


def mooncake_engine(model: Path, directory: Path, number: int, master: str, role: str, *, policy: str = "fail",
                    env: dict[str, str] | None = None, extra: dict[str, Any] | None = None, traced: bool = False,
                    config: dict[str, Any] | None = None, **arguments: Any) -> Engine:  # fmt: skip
    """Engine `number` of a test (each has its own lookup socket). `traced`: its gets are in `directory`/gets-<number>."""
    settings = {"metadata_server": "P2PHANDSHAKE", "master_server_address": master, "protocol": "tcp", "device_name": "",
                "mode": "standalone-store", "global_segment_size": 0, "local_buffer_size": "128MB", **(config or {})}  # fmt: skip
    path = directory / f"mooncake-{number}.json"
    path.write_text(json.dumps(settings))
    environment = {"MOONCAKE_CONFIG_PATH": str(path), "PYTHONPATH": str(TRACED if traced else SHIM),
                   "MOONCAKE_TRACE": str(directory / f"gets-{number}"), **(env or {})}  # fmt: skip
    own_socket = {"lookup_rpc_port": f"{os.getpid()}-{directory.name}-{number}"}
    transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": role, "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {**own_socket, **(extra or {})}}  # fmt: skip
    return Engine(model, directory / f"engine-{number}.log", transfer=transfer, env=environment, wait=False, **arguments)


def gets(directory: Path, number: int) -> list[list[int]]:
    """The codes of every get call of engine `number`."""
    path = directory / f"gets-{number}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
