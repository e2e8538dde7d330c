"""An engine with an empty pool saves all that it computes, and is about as fast as one without a connector."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.connectors.vllm.throughput import N_PROMPTS, PROMPT_TOKENS, measure

pytestmark = pytest.mark.timeout(1800)
# Tests run beside others, then times differ by more than is to be shown: CPU seconds count as well, and the limit is below the
# goal, 0.95, which is for an engine that has the machine to itself (`make bench-vllm`).
OF_NONE_MIN = 0.85


def test_an_empty_pool_costs_little(tmp_path: Path) -> None:
    found = measure(tmp_path, rounds=7)
    print(found)
    assert found["saved_blocks"] == 8 * N_PROMPTS * (PROMPT_TOKENS // 32)
    assert max(found["of_none"], found["of_none_cpu"]) >= OF_NONE_MIN, found
