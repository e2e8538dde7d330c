"""vLLM servers as the clients' launchers start them, on the tiny model and a CPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx

from tests.support.processes import cli_env
from tests.support.waiting import wait_until

CLIENTS = Path(__file__).resolve().parents[3] / "clients"
HEALTHY_S = 600.0
STOP_S = 30.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip

# Nothing is given up for time here: what is tested is what comes from where, also on a machine with other work.
PATIENT = json.dumps({"deadline_ms": 30_000, "connect_wait_ms": 30_000})


def make_model(directory: Path) -> Path:
    """The tiny model, made in a process of its own: this one stays free of torch."""
    command = [sys.executable, "-m", "tests.support.tiny_model", str(directory)]
    subprocess.run(command, check=True, capture_output=True, timeout=240, env=cli_env(ENVIRONMENT), cwd=CLIENTS.parent)
    return directory


class VllmNode:
    """`python clients/<role>_node` as a process group of its own."""

    def __init__(self, role: str, model: Path, pool: str, *words: str, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = log
        self._output = log.open("wb")
        environment = cli_env(ENVIRONMENT)
        environment.pop("PYTHONHASHSEED", None)
        self.process = subprocess.Popen(
            [
                sys.executable, str(CLIENTS / f"{role}_node"), "--model", str(model), "--pool", pool, "--port", str(self.port),
                "--served-model-name", "model", "--block-size", "32", "--max-model-len", "4096", "--max-num-seqs", "32",
                "--generation-config", "vllm",
                "--enforce-eager", "--connector", PATIENT, *words,
            ],
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            cwd=log.parent,
        )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_healthy(self) -> VllmNode:
        """AssertionError with the log's end when it does not come up."""

        def healthy() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log_end()}"
            try:
                return httpx.get(self.url + "/health", timeout=2, trust_env=False).status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(healthy, timeout_s=HEALTHY_S, what=f"{self.url} is healthy; log:\n{self.log_end()}")
        return self

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        from prometheus_client.parser import text_string_to_metric_families

        text = httpx.get(self.url + "/metrics", timeout=20, trust_env=False).text
        return sum(s.value for family in text_string_to_metric_families(text) for s in family.samples if s.name == name)

    def pause(self) -> None:
        """SIGSTOP, its engine's processes too."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL, its engine's processes too."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=STOP_S)
        self._output.close()
