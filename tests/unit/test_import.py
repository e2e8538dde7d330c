"""`import kvpool` is light, in a fresh process, and every public name is there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("lmdb", "redis", "torch", "grpc", "pydantic", "pydantic_settings", "google.protobuf", "numpy", "uvloop", "starlette")
PROGRAM = """
import sys, time, json
before = time.perf_counter()
import kvpool
took_ms = (time.perf_counter() - before) * 1e3
print(json.dumps({"took_ms": took_ms, "loaded": sorted(sys.modules)}))
"""


def fresh(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout


def test_import_is_fast_and_loads_nothing_heavy() -> None:
    runs = [json.loads(fresh(PROGRAM)) for _ in range(3)]
    assert min(run["took_ms"] for run in runs) < 150
    assert not [name for name in HEAVY if name in runs[0]["loaded"]]


def test_layouts_and_words_need_neither_grpc_nor_settings() -> None:
    loaded = fresh("import kvpool, sys; kvpool.KVLayout.opaque(4096); kvpool.Outcome.STORED; print(*sys.modules)").split()
    assert not {"grpc", "pydantic", "lmdb", "redis", "torch"} & set(loaded)


def test_a_client_needs_neither_stores_nor_torch() -> None:
    loaded = fresh("import kvpool, sys; kvpool.connect, kvpool.aio.connect; print(*sys.modules)").split()
    assert not {"lmdb", "redis", "torch", "starlette", "uvicorn"} & set(loaded)


def test_every_public_name_is_there() -> None:
    import kvpool

    for name in kvpool.__all__:
        assert getattr(kvpool, name) is not None
        assert name in dir(kvpool)
    with pytest.raises(AttributeError, match="no_such_name"):
        kvpool.no_such_name


def test_aio_is_importable_as_a_module() -> None:
    assert fresh("import kvpool.aio, kvpool; print(kvpool.aio.connect is not None)").strip() == "True"
