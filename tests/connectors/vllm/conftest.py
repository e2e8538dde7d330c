"""These tests run real engines: with vLLM in the environment (`make test-engines`), else they are not collected at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("vllm") is not None else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, made once a session."""
    from tests.connectors.vllm.engines import make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine without a connector, run once a session: what others are compared to."""
    from tests.connectors.vllm.engines import make_reference

    return make_reference(model, tmp_path_factory.mktemp("reference") / "engine.log")


@pytest.fixture
def start_engine(model: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """start_engine(pool=None or "host:port", **settings): an engine process, stopped after the test."""
    from tests.connectors.vllm.engines import Engine

    engines: list[Engine] = []

    def start(pool: str | None = None, **settings: Any) -> Engine:
        engines.append(Engine(settings.pop("model", model), tmp_path / f"engine-{len(engines)}.log", pool=pool, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()
