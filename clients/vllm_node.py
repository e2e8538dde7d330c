"""What `prefill_node` and `decode_node` share: vLLM's OpenAI server with kvpool's connector, as this process.

All of vLLM's own options pass through; only what makes it a node of the pool is set here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kvpool.quantities import as_addresses


def command(name: str, words: Sequence[str], *, port: int) -> list[str]:
    """The server's command line for a node's. SystemExit(2) when the node's is wrong."""
    parser = argparse.ArgumentParser(
        prog=name,
        description="vLLM's OpenAI server with its KV cache in a kvpool. All other options are vLLM's own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="as vLLM takes it; the same on every node of the pool")
    parser.add_argument(
        "--pool", type=_pool, default=os.environ.get("KVPOOL_MASTER", "127.0.0.1:7400"), help="the pool's master, host:port"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; the port has no password unless --api-key")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument(
        "--kv-role",
        choices=("kv_both", "kv_producer", "kv_consumer"),
        default="kv_both",
        help="kv_both saves what it computes and loads what others did",
    )
    parser.add_argument("--connector", type=_object, default={}, metavar="JSON", help="more settings of kvpool's connector")
    own, others = parser.parse_known_args(words)
    if any(word.partition("=")[0].replace("_", "-") == "--kv-transfer-config" for word in others):
        parser.error("--kv-transfer-config is made here: use --kv-role, --pool and --connector")
    config = {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool.connectors.vllm",
        "kv_role": own.kv_role,
        "kv_load_failure_policy": "recompute",  # a block that does not come costs its computation, not the request
        "kv_connector_extra_config": {"master": own.pool, **own.connector},
    }
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    own_words = ["--model", own.model, "--host", own.host, "--port", str(own.port), "--kv-transfer-config", json.dumps(config)]
    return [*server, *own_words, *others]


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _pool(text: str) -> str:
    try:
        return as_addresses(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(name: str, *, port: int) -> NoReturn:
    """Becomes the server."""
    words = command(name, sys.argv[1:], port=port)
    if importlib.util.find_spec("vllm") is None:
        sys.exit(f"{name}: error: {sys.executable} has no vLLM; `make setup-engines` makes an environment that has")
    os.execv(words[0], words)
