"""Real vLLM engines on the CPU as child processes, the pool that they share, and what their outputs are compared by."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.cli.ask import master_at
from kvpool.core.hashing import PrefixHashes
from tests.support.processes import cli_env
from tests.support.waiting import wait_until

BLOCK = 32  # the smallest that vLLM's CPU attention takes
START_S = 600.0
ANSWER_S = 300.0
CORRUPT_MS = 30_000  # for one block, on a machine with other work
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONFAULTHANDLER": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
ROOT = Path(__file__).parents[3]


def make_model(directory: Path, **shape: int) -> Path:
    """The tiny model, made in a process of its own: this one stays free of torch."""
    command = [sys.executable, "-m", "tests.support.tiny_model", str(directory), *(f"{k}={v}" for k, v in shape.items())]
    subprocess.run(command, check=True, capture_output=True, timeout=600, env=cli_env(ENV), cwd=ROOT)
    return directory


@dataclass(frozen=True)
class Result:
    """One request. `cached`: prompt tokens that were not computed; `external`: tokens of the engine's hits on the connector.
    `cpu_seconds`: of the engine's process, all threads."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    reason: str
    params: dict[str, Any] | None
    external: int
    seconds: float
    cpu_seconds: float


def transfer_to(pool: str, *, role: str = "kv_both", policy: str = "fail", **extra: Any) -> dict[str, Any]:
    """vLLM's KVTransferConfig with our connector. The deadline is long: a busy machine is no reason for a miss, where misses
    are not what is tested."""
    return {"kv_connector": "KVPoolConnector", "kv_connector_module_path": "kvpool.connectors.vllm", "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"master": pool, "deadline_ms": 20_000, **extra}}  # fmt: skip


class Engine:
    """An engine process. `pool`: address of the pool that its connector uses; None: no connector."""

    def __init__(self, model: Path, log: Path, *, pool: str | None = None, role: str = "kv_both", policy: str = "fail",
                 extra: dict[str, Any] | None = None, env: dict[str, str] | None = None, transfer: dict[str, Any] | None = None,
                 wait: bool = True, **arguments: Any) -> None:  # fmt: skip
        arguments = {"block_size": BLOCK, "max_model_len": 4096, **arguments}
        own = transfer_to(pool, role=role, policy=policy, **(extra or {})) if pool else None
        settings = {"model": str(model), "arguments": arguments, "transfer": transfer or own}
        environment = cli_env({**ENV, **(env or {})})
        if "PYTHONHASHSEED" not in (env or {}):
            environment.pop("PYTHONHASHSEED", None)
        self.log = log
        self._stderr = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.connectors.vllm.engine_child", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, env=environment, cwd=ROOT,
        )  # fmt: skip
        self._tail = b""
        self._waits = True
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.process.kill()
                self.stop()
                raise

    def wait_ready(self) -> Engine:
        if self._waits:
            assert self.read(START_S) == {"ready": True}
            self._waits = False
        return self

    def read(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The next answer; AssertionError with the log's end when there is none."""
        stdout, end = self.process.stdout, time.monotonic() + timeout_s
        assert stdout is not None
        while b"\n" not in self._tail:
            left = end - time.monotonic()
            data = os.read(stdout.fileno(), 65536) if left > 0 and select.select([stdout], [], [], left)[0] else b""
            if not data:
                status = self.process.poll()
                raise AssertionError(f"no answer within {timeout_s} s (exit status {status}); log:\n{self.log_text()[-2500:]}")
            self._tail += data
        line, _, self._tail = self._tail.partition(b"\n")
        return dict(json.loads(line))

    def tell(self, op: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        self.tell(op, **fields)
        return self.read()

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8, together: bool = False,
                 params: dict[str, Any] | None = None) -> list[Result]:  # fmt: skip
        """Greedy; one request after the other, or all together."""
        self.begin(prompts, max_tokens=max_tokens, together=together, params=params)
        return self.results()

    def begin(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8, together: bool = False,
              params: dict[str, Any] | None = None) -> None:  # fmt: skip
        self.tell("generate", prompts=[list(p) for p in prompts], max_tokens=max_tokens, together=together, params=params)

    def results(self) -> list[Result]:
        return [Result(**fields) for fields in self.read()["results"]]

    def reset(self) -> None:
        """The engine's own prefix cache is empty afterwards."""
        assert self.ask("reset")["ok"]

    def flush(self) -> None:
        assert self.ask("flush")["ok"]

    def knows(self, at_least: int, *, timeout_s: float = 30.0) -> None:
        assert self.ask("knows", at_least=at_least, timeout_s=timeout_s)["ok"], self.log_text()[-3000:]

    def metrics(self) -> dict[str, float]:
        return self.ask("metrics")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        """Ends it in good order (queued saves are saved); its exit status."""
        if self.process.poll() is None:
            try:
                self.tell("quit")
                self.process.wait(timeout=60)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._stderr.close()
        return self.process.returncode


def prompt(n_tokens: int, *, seed: int) -> list[int]:
    """Random tokens, the same for the same seed; a longer one begins with the shorter."""
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(n_tokens)]


def full_blocks(n_tokens: int) -> int:
    """Blocks that can be had for a prompt: at least one token is left to be computed."""
    return (n_tokens - 1) // BLOCK


LENGTHS = (193, 300, 200)  # 193: six blocks and one token, the case where vLLM's AMX kernel used to die
PROMPTS = [prompt(n, seed=n) for n in LENGTHS]
HITS = [full_blocks(n) * BLOCK for n in LENGTHS]


SYSTEM = prompt(100, seed=5)
TURNS = 8


@dataclass(frozen=True)
class Reference:
    cold: list[Result]
    warm: list[Result]
    turns: list[Result]


def last_prompt(turns: Sequence[Result]) -> list[int]:
    """Of a conversation that had these turns."""
    context = list(SYSTEM)
    for turn, one in enumerate(turns):
        context += prompt(40 + 9 * turn, seed=100 + turn)
        if turn + 1 < len(turns):
            context += one.tokens
    return context


def converse(engines: Sequence[Engine], between: Callable[[int], None] = lambda turn: None) -> list[Result]:
    """A conversation of TURNS turns, on the engines in turn. `between`: called before each."""
    context, found = list(SYSTEM), []
    for turn in range(TURNS):
        between(turn)
        context += prompt(40 + 9 * turn, seed=100 + turn)
        found += engines[turn % len(engines)].generate([context], max_tokens=24)
        context += found[-1].tokens
    return found


def make_reference(model: Path, log: Path) -> Reference:
    """What an engine without a connector makes of all of this."""
    engine = Engine(model, log)
    cold = engine.generate(PROMPTS)
    warm = engine.generate(PROMPTS)
    turns = converse([engine])
    engine.stop()
    assert [one.cached for one in warm] == HITS
    return Reference(cold, warm, turns)


def assert_equal(found: Sequence[Result], wanted: Sequence[Result]) -> None:
    """Tokens and log-probabilities are exactly the same."""
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    apart = max((abs(a - b) for x, y in zip(found, wanted, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True)))
    assert apart == 0.0, f"log-probabilities are up to {apart} apart"


def differs(found: Sequence[Result], wanted: Sequence[Result]) -> bool:
    """Whether every one of the outputs is another."""
    return all(x.tokens != y.tokens or x.logprobs != y.logprobs for x, y in zip(found, wanted, strict=True))


def corrupt(cluster: Any, engine: Engine | None = None) -> int:
    """Puts other bytes under every key of the pool: the halves of each block change places, so a layer has another layer's KV.
    Checksums match, contents are wrong. How many. (Whole blocks of one prompt may change places without harm: their positions are
    in the keys, and attention does not mind the order.)
    engine: waited for until its mirror has heard of all of it (its namespace is the only one)."""
    client = cluster.connect(mirror=False)
    n = 0
    with master_at(cluster.master_address, token_file=None, deadline="5s") as asked:
        spaces = asked.namespaces()
        keys = {space.name: [bytes(key) for key, *_ in asked.blocks(space.uid)] for space in spaces}
    for name, layout in client.layouts().items():
        namespace = client.namespace(name, layout, hash="external")
        by_shard: dict[int, list[bytes]] = {}
        for key in keys[name]:
            by_shard.setdefault(int.from_bytes(key[32:], "little"), []).append(key[:32])
        for shard, hashes in by_shard.items():
            blocks = []
            for one in hashes:
                out = bytearray(layout.block_bytes)
                got = namespace.get(PrefixHashes(one, chained=False), [out], shard=shard, deadline_ms=CORRUPT_MS)
                assert got.n_blocks == 1, got
                blocks.append(bytes(out[: got.sizes[0]]))
            for one, right in zip(hashes, blocks, strict=True):
                key, half = PrefixHashes(one, chained=False), len(right) // 2
                namespace.remove(key, shard=shard, deadline_ms=CORRUPT_MS)
                assert namespace.put(key, [right[half:] + right[:half]], shard=shard, deadline_ms=CORRUPT_MS).n_there == 1
                n += 1
    if engine is not None:  # what happens on a worker is told in order: who knows of this block knows of all before it
        last = PrefixHashes(bytes(32), chained=False)
        assert namespace.put(last, [blocks[-1]], shard=shard, deadline_ms=CORRUPT_MS).n_there == 1
        engine.knows(n + 1)
    return n


def wait_stored(cluster: Any, n_blocks: int) -> None:
    """Saves are listed by the master a moment after they are on a worker."""
    client = cluster.connect(mirror=False)
    wait_until(lambda: client.describe()["index"]["replicas"] == n_blocks, timeout_s=60, what=f"{n_blocks} blocks in the pool")


def stored(cluster: Any) -> int:
    """Blocks that the master knows of, over all namespaces and shards."""
    return int(cluster.connect(mirror=False).describe()["index"]["replicas"])
