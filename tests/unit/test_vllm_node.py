"""The command line that the prefill and the decode node become."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "clients" / "vllm_node.py"


@pytest.fixture(scope="module")
def node() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_node", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_vllms_server_with_the_connector_and_its_own_options(node: ModuleType) -> None:
    words = node.command("prefill_node", ["--model", "m", "--pool", "h:1", "--max-model-len", "9"], port=8100)
    assert words[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--host") + 1] == "127.0.0.1" and words[words.index("--port") + 1] == "8100"
    assert words[-2:] == ["--max-model-len", "9"]
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config == {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"master": "h:1"},
    }


def test_its_settings_are_ones_that_the_connector_takes(node: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpool.connectors.vllm.settings import parse

    monkeypatch.setenv("KVPOOL_MASTER", "there:7")
    words = node.command(
        "decode_node", ["--model", "m", "--connector", '{"deadline_ms": 500}', "--kv-role", "kv_consumer"], port=1
    )
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    settings = parse(config["kv_connector_extra_config"])
    assert (settings.master, settings.deadline_ms, config["kv_role"]) == ("there:7", 500, "kv_consumer")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--model"),
        (["--model", "m", "--kv-transfer-config", "{}"], "--kv-role"),
        (["--model", "m", "--kv_transfer_config={}"], "--kv-role"),
        (["--model", "m", "--pool", "nowhere"], "--pool: 'nowhere' is no address"),
        (["--model", "m", "--connector", "{"], "not JSON"),
        (["--model", "m", "--connector", "[]"], "not a JSON object"),
        (["--model", "m", "--kv-role", "boss"], "kv_both"),
    ],
)
def test_what_is_wrong_is_told(node: ModuleType, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        node.command("prefill_node", words, port=8100)
    assert ended.value.code == 2 and told in capsys.readouterr().err


def test_a_python_without_vllm_is_named(node: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["decode_node", "--model", "m"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match=r"decode_node: error: .* has no vLLM"):
        node.run("decode_node", port=1)
