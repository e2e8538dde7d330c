"""vLLM without a server, on a pool: run it twice, and the second run takes the prompt's blocks from the pool.

    kvpool up --dram 1GiB &
    python clients/examples/vllm_offline.py meta-llama/Llama-3.1-8B 127.0.0.1:7400
"""

from __future__ import annotations

import sys

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main(model: str, master: str) -> None:
    transfer = KVTransferConfig(
        kv_connector="KVPoolConnector",
        kv_connector_module_path="kvpool.connectors.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"master": master},
    )
    llm = LLM(model, kv_transfer_config=transfer)
    prompt = "A pool of KV blocks lets an engine skip what another engine has computed before. " * 50
    for output in llm.generate([prompt + question for question in ("Why?", "How?")], SamplingParams(max_tokens=32)):
        n_tokens = len(output.prompt_token_ids or ())
        print(f"{output.num_cached_tokens} of {n_tokens} prompt tokens were there: {output.outputs[0].text!r}")  # noqa: T201


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
