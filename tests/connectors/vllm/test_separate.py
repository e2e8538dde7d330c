"""Engines whose blocks mean other things, or whose hashes name other tokens, never see each other's; a log line says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.connectors.vllm.engines import PROMPTS, Engine, stored

pytestmark = pytest.mark.timeout(1800)

OTHERS = (  # settings of an engine, and what it must say that differs from one with the defaults
    ({}, ""),
    ({"dtype": "float32"}, "dtype float32, theirs bfloat16"),
    ({"revision": "v2"}, "model revision v2, theirs "),
    ({"block_size": 64}, "block size 64, theirs 32"),
    ({"env": {"PYTHONHASHSEED": "7"}}, "hash seed (PYTHONHASHSEED) set/"),
)


def test_engines_that_differ_share_nothing_and_say_why(make_cluster: Callable[..., Any],
                                                       start_engine: Callable[..., Engine]) -> None:  # fmt: skip
    cluster = make_cluster()
    before = 0
    for settings, words in OTHERS:
        engine = start_engine(cluster.master_address, **settings)
        found = engine.generate(PROMPTS[:1])
        assert found[0].external == 0 and found[0].reason == "length"
        engine.stop()
        after = stored(cluster)
        assert after - before == (193 + 7) // settings.get("block_size", 32), "all its blocks are new ones"
        before = after
        lines = [line for line in engine.log_text().splitlines() if "event=kvpool_separate" in line]
        assert bool(lines) == bool(words)
        assert words in "\n".join(lines), lines
    names = cluster.connect().layouts()
    assert len(names) == len(OTHERS)
