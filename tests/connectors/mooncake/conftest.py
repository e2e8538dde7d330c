"""Engine tests run where there is vLLM (`make test-engines`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = ["traced/*"]
if find_spec("vllm") is None:
    collect_ignore_glob.append("test_vllm.py")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, made once a session."""
    from tests.connectors.vllm.engines import make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start_engine(model: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """start_engine("host:port", role, ...): an engine with vLLM's own MooncakeStoreConnector, stopped after the test."""
    from tests.connectors.mooncake.engines import mooncake_engine

    engines: list[Any] = []

    def start(master: str, role: str, **settings: Any) -> Any:
        engines.append(mooncake_engine(model, tmp_path, len(engines), master, role, **settings))
        return engines[-1].wait_ready()

    yield start
    for engine in engines:
        engine.stop()
    for socket in Path(tempfile.gettempdir()).glob(f"lookup_rpc_port_{os.getpid()}-{tmp_path.name}-*"):
        socket.unlink()  # the connector leaves it behind
