"""Mooncake's API in child processes: on kvpool by the shim, on the real thing in a network namespace of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import cli_env

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "clients" / "mooncake_shim" / "src"
CALLS = ROOT / "tests" / "connectors" / "mooncake" / "contract_calls.py"
REAL_RUNNER = CALLS.with_name("real_mooncake.py")
REAL_VENV = ROOT / ".venv-mooncake"
SECTIONS = ("single", "pointers", "multi", "remove", "upsert", "ranges", "query", "config", "threads", "host_memory")
HOST = "127.0.0.1"
CHILD_S = 100.0


def shim_env(**more: str) -> dict[str, str]:
    """This environment with `mooncake.store` on kvpool."""
    return cli_env({"PYTHONPATH": os.pathsep.join((str(SHIM), str(ROOT))), **more})


def contract_on_kvpool(master: str, words: Sequence[str]) -> dict[str, Any]:
    """The answers of these sections."""
    return _answers([sys.executable, str(CALLS), HOST, master, *words], shim_env())


def contract_on_mooncake(words: Sequence[str]) -> dict[str, Any]:
    """The answers of these sections; {} when the process ended by SIGSEGV."""
    python = str(REAL_VENV / "bin" / "python")
    libraries = {str(path.parent) for path in (REAL_VENV / "system").rglob("*.so.*")}
    env = cli_env({"LD_LIBRARY_PATH": os.pathsep.join(sorted(libraries))})
    isolate = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    return _answers([*isolate, python, str(REAL_RUNNER), python, str(CALLS), "HOST", "MASTER", *words], env)


def _answers(command: Sequence[str], env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=CHILD_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("CONTRACT ")]
    if not lines and done.returncode in (-11, 139, 245):
        return {}
    assert lines, f"{command}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    answers: dict[str, Any] = json.loads(lines[-1].removeprefix("CONTRACT "))
    return answers
