"""Prints the figures of the pool on this machine, one JSON object a line: `python -m tests.bench.figures [NAME ...]`.

growth   put and get of 64 blocks with few and with many blocks in the pool, alternating between two pools (ratio of medians)
restart  seconds from a master's start until it finds every one of 100,000 blocks that a worker kept
import   `import kvpool` in a fresh process
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
from tests.support.cluster import Cluster

BLOCK_BYTES = 4096
BATCH = 64


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    a = np.ones(64 << 20, dtype=np.uint8)
    b = np.empty_like(a)
    np.copyto(b, a)
    began = time.perf_counter()
    np.copyto(b, a)
    gbps = a.nbytes / (time.perf_counter() - began) / 1e9
    return {"cores": os.cpu_count(), "python": platform.python_version(), "memcpy_gbps": round(gbps, 1)}


def chain(namespace: Any, name: int, n: int) -> Any:
    """n hashes that nobody else has."""
    return namespace.hashes([name.to_bytes(16, "little") + i.to_bytes(16, "little") for i in range(n)])


def fill(namespace: Any, n_blocks: int, *, first: int) -> None:
    """Put n blocks in chains of 1,024."""
    blocks = np.zeros((1024, BLOCK_BYTES), dtype=np.uint8)
    for start in range(0, n_blocks, 1024):
        n = min(1024, n_blocks - start)
        put = namespace.put(chain(namespace, first + start, n), blocks[:n], deadline_ms=30_000)
        assert all(outcome is kvpool.Outcome.STORED for outcome in put.outcomes), set(put.outcomes)


def growth(small: int = 1_000, large: int = 200_000, rounds: int = 400) -> dict[str, Any]:
    """A B A B between a pool of `small` and one of `large` blocks; ratio of medians of a put and of a get of 64 blocks."""
    with tempfile.TemporaryDirectory() as directory:
        pools = []
        for name, n in (("small", small), ("large", large)):
            path = Path(directory) / name
            path.mkdir()
            cluster = Cluster(path, n_workers=1, dram="1200MiB").start()
            client = cluster.connect()
            ns = client.namespace("growth", kvpool.KVLayout.opaque(block_bytes=BLOCK_BYTES), create=True, hash="external")
            fill(ns, n, first=1 << 40)
            pools.append((cluster, ns, {"put": [], "get": []}))
        try:
            data = np.ones((BATCH, BLOCK_BYTES), dtype=np.uint8)
            out = np.empty_like(data)
            for i in range(rounds):
                for _, ns, times in pools:
                    hashes = chain(ns, i, BATCH)
                    began = time.perf_counter()
                    ns.put(hashes, data)
                    put_done = time.perf_counter()
                    assert ns.get(hashes, out).n_blocks == BATCH
                    times["get"].append(time.perf_counter() - put_done)
                    times["put"].append(put_done - began)
                    ns.remove(hashes)
        finally:
            for cluster, _, _ in pools:
                cluster.stop()
    result: dict[str, Any] = {"blocks": [small, large], "batch": BATCH}
    for op in ("put", "get"):
        few, many = (statistics.median(times[op]) * 1e6 for _, _, times in pools)
        result |= {f"{op}_us_{small}": round(few), f"{op}_us_{large}": round(many), f"{op}_ratio": round(many / few, 3)}
    return result


def restart(n_blocks: int = 100_000) -> dict[str, Any]:
    """SIGKILL the master, start it again, ask it (not a mirror) until every block is found."""
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(Path(directory), n_workers=1, dram="600MiB").start()
        try:
            client = cluster.connect(mirror=False)
            ns = client.namespace("restart", kvpool.KVLayout.opaque(block_bytes=BLOCK_BYTES), create=True, hash="external")
            chains = [chain(ns, 1 << 50 | start, min(1024, n_blocks - start)) for start in range(0, n_blocks, 1024)]
            blocks = np.zeros((1024, BLOCK_BYTES), dtype=np.uint8)
            for hashes in chains:
                ns.put(hashes, blocks[: len(hashes)], deadline_ms=30_000)
            assert cluster.master is not None
            cluster.master.kill()
            began = time.perf_counter()
            cluster.start_master()
            ready = time.perf_counter() - began
            while sum(ns.match(hashes, freshness="cluster") for hashes in chains) < n_blocks:
                if time.perf_counter() - began > 60:
                    raise AssertionError("not all blocks were found within 60 s")
            found = time.perf_counter() - began
            return {"blocks": n_blocks, "master_ready_s": round(ready, 2), "all_found_s": round(found, 2), "limit_s": 3.0}
        finally:
            cluster.stop()


def import_time() -> dict[str, Any]:
    """Median of 9 fresh processes; and that nothing heavy came along."""
    code = (
        "import time,sys; t=time.perf_counter(); import kvpool; d=time.perf_counter()-t;"
        "print(d, [m for m in ('torch','lmdb','redis','grpc','pydantic') if m in sys.modules])"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(9)]
    times = [float(run.split(" ", 1)[0]) for run in runs]
    return {"import_ms": round(statistics.median(times) * 1e3, 1), "limit_ms": 150, "heavy": runs[0].split(" ", 1)[1].strip()}


FIGURES: dict[str, Callable[[], dict[str, Any]]] = {"import": import_time, "growth": growth, "restart": restart}


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in FIGURES]:
        sys.exit(f"{unknown[0]}: not one of {', '.join(FIGURES)}")
    print(json.dumps({"machine": machine()}), flush=True)
    for name in names or list(FIGURES):
        print(json.dumps({"figure": name} | FIGURES[name]()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
