"""One engine in a process of its own: reads a JSON command a line, answers each with a JSON line. See `engines.Engine`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

REPLIES = os.dup(1)  # standard output is for the answers alone; what vLLM prints goes to standard error
os.dup2(2, 1)


def reply(**fields: Any) -> None:
    os.write(REPLIES, json.dumps(fields).encode() + b"\n")


def read() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)  # the test is gone
    return dict(json.loads(line))


class Child:
    """The engine and what the commands do with it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        arguments = dict(settings["arguments"])
        if settings["transfer"] is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**settings["transfer"])
        self.in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        self.llm = LLM(settings["model"], enforce_eager=True, disable_log_stats=False, seed=0, **arguments)

    def generate(self, command: dict[str, Any]) -> None:
        """Prompts one after the other, or `together`; a result for each."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
        extra = {"kv_transfer_params": command["params"]} if command.get("params") else None
        sampling = SamplingParams(temperature=0, max_tokens=command["max_tokens"], logprobs=1, ignore_eos=True, extra_args=extra)
        results: list[dict[str, Any]] = []
        for group in [prompts] if command["together"] else [[prompt] for prompt in prompts]:
            before, began, cpu_began = self.external(), time.monotonic(), time.process_time()
            outputs = self.llm.generate(group, sampling, use_tqdm=False)
            seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
            for output in outputs:
                one = output.outputs[0]
                logprobs = [found[token].logprob for token, found in zip(one.token_ids, one.logprobs, strict=True)]
                results.append({
                    "tokens": list(one.token_ids), "logprobs": logprobs, "cached": output.num_cached_tokens,
                    "reason": one.finish_reason, "params": output.kv_transfer_params,
                    "external": self.external() - before, "seconds": seconds, "cpu_seconds": cpu_seconds,
                })  # fmt: skip
        reply(results=results)

    def external(self) -> int:
        """Tokens that the engine counted as hits of the connector so far (of all requests)."""
        return int(self.figures().get("vllm:external_prefix_cache_hits", 0))

    def figures(self) -> dict[str, float]:
        """The engine's Prometheus counters of the connector, by name and label."""
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            if family.name.startswith(("kvpool:", "vllm:external_prefix", "vllm:num_preemptions")):
                for sample in family.samples:
                    if not sample.name.endswith(("_bucket", "_created")):
                        label = sample.labels.get("tier") or sample.labels.get("cause") or sample.labels.get("source")
                        name = sample.name.removesuffix("_total") + (f"/{label}" if label else "")
                        found[name] = found.get(name, 0) + sample.value
        return found

    def reset(self, _: dict[str, Any]) -> None:
        """The engine forgets its own prefix cache."""
        done = self.llm.reset_prefix_cache()
        end = time.monotonic() + 20
        while not done and self.in_process and time.monotonic() < end:
            self.llm.llm_engine.step()  # nothing else steps an in-process engine that has no request: saved blocks are given back
            done = self.llm.reset_prefix_cache()
        reply(ok=done)

    def metrics(self, _: dict[str, Any]) -> None:
        reply(**self.figures())

    # --- in-process engines only: the connector's halves can be looked at -----------------------------------------------

    def halves(self) -> tuple[Any, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        core = self.llm.llm_engine.engine_core.engine_core
        scheduler, worker = core.scheduler.connector, get_kv_transfer_group()
        if hasattr(scheduler, "_connectors"):  # under MultiConnector
            scheduler, worker = scheduler._connectors[0], worker._connectors[0]
        return scheduler, worker

    def flush(self, _: dict[str, Any]) -> None:
        """All saves have ended."""
        reply(ok=self.halves()[1]._worker.flush(30_000))

    def knows(self, command: dict[str, Any]) -> None:
        """Waits until the scheduler's mirror has at least so many replicas (`at_least`), and the pool is there."""
        link = self.halves()[0]._scheduler.link
        end = time.monotonic() + command["timeout_s"]
        while time.monotonic() < end:
            namespace = link.namespace
            if namespace is not None and namespace.stats()["mirror"]["replicas"] >= command["at_least"]:
                reply(ok=True)
                return
            threading.Event().wait(0.01)
        reply(ok=False)

    def gate(self, _: dict[str, Any]) -> None:
        """The next load says that it is there, and goes on when it is told to."""
        worker = self.halves()[1]._worker
        fetch = worker._fetch

        def gated(job: Any, began: float) -> Any:
            worker._fetch = fetch
            reply(loading=job.request_id)
            assert read()["op"] == "go"
            return fetch(job, time.monotonic())

        worker._fetch = gated
        reply(ok=True)


def main() -> None:
    child = Child(json.loads(sys.argv[1]))
    reply(ready=True)
    while True:
        command = read()
        if command["op"] == "quit":
            break
        getattr(child, command["op"])(command)
    del child.llm  # its shutdown saves what is queued


if __name__ == "__main__":
    main()
