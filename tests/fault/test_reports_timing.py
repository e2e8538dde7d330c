"""Whether time tells what others have in the pool, as was reported of other caches (CVE-2025-46570)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import kvpool
from kvpool.core.types import Outcome
from tests.support.cluster import Cluster
from tests.support.payload import payload
from tests.support.scale import FULL, scaled

pytestmark = [pytest.mark.reports, pytest.mark.timeout(600)] if FULL else [pytest.mark.timeout(120)]

MakeCluster = Callable[..., Cluster]
SIZE = 4096
TOKENS = 16
N_CHAINS = 32
AUC_MAX = 0.6 if FULL else 0.62  # chance has .5; of the scaled run's 320 against 320 samples three standard errors are .07


def auc(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Chance that a sample of the first kind took longer than one of the second."""
    times = np.array([*slow, *fast])
    ranks = times.argsort().argsort() + 1
    return float((ranks[: len(slow)].sum() - len(slow) * (len(slow) + 1) / 2) / (len(slow) * len(fast)))


@pytest.mark.parametrize("salt", [b"attacker", b"victim"])
def test_B85_time_does_not_tell_what_another_namespace_has(make_cluster: MakeCluster, salt: bytes) -> None:
    """Same layout, same model, same prompts; the attacker's own namespace, once even with the victim's salt."""
    cluster = make_cluster(n_workers=2)
    layout = kvpool.KVLayout.opaque(block_bytes=SIZE, block_tokens=TOKENS)
    victim = cluster.connect().namespace("victim", layout, create=True, salt=b"victim")
    attacker = cluster.connect().namespace("attacker", layout, create=True, salt=salt)
    prompts = [[chain * 100 + token for token in range(TOKENS)] for chain in range(2 * N_CHAINS)]
    for chain in range(N_CHAINS):
        assert victim.put(victim.hash(prompts[chain]), [payload(chain, 1, SIZE)]).outcomes == [Outcome.STORED]
    out = [bytearray(SIZE)]
    ways: dict[str, Callable[[int], object]] = {
        "match": lambda chain: attacker.match(attacker.hash(prompts[chain])),
        "get": lambda chain: attacker.get(attacker.hash(prompts[chain]), out).n_blocks,
    }
    order = [chain for chain in range(2 * N_CHAINS) for _ in range(scaled(10, 200))]
    for name, way in ways.items():
        random.shuffle(order)
        for chain in order[:100]:
            way(chain)
        took: tuple[list[float], list[float]] = ([], [])
        for chain in order:
            began = time.perf_counter()
            found = way(chain)
            took[chain < N_CHAINS].append(time.perf_counter() - began)
            assert found == 0
        assert abs(auc(*took) - 0.5) < AUC_MAX - 0.5, name
    took = ([], [])
    random.shuffle(order)
    there: set[int] = set()
    for chain in order[: scaled(200, 2000)]:  # each is new to the attacker once: the victim's copy is neither told nor used
        if chain in there:
            assert attacker.remove(attacker.hash(prompts[chain])).outcomes[0].value == "removed"
        there.add(chain)
        began = time.perf_counter()
        done = attacker.put(attacker.hash(prompts[chain]), [payload(chain, 2, SIZE)])
        took[chain < N_CHAINS].append(time.perf_counter() - began)
        assert done.outcomes == [Outcome.STORED]
    assert abs(auc(*took) - 0.5) < 0.15
    for chain in range(N_CHAINS):
        assert victim.get(victim.hash(prompts[chain]), out).n_blocks == 1 and bytes(out[0]) == bytes(payload(chain, 1, SIZE))


def test_B85_within_one_namespace_time_tells(make_cluster: MakeCluster) -> None:
    """The control: what shares a namespace is told apart at once, so the measure above can see a difference."""
    n_blocks, size = 16, 1 << 20
    ns = make_cluster().connect().namespace("n", kvpool.KVLayout.opaque(block_bytes=size, block_tokens=1), create=True)
    absent, there = ns.hash(range(1, n_blocks + 1)), ns.hash(range(n_blocks))
    blocks = np.zeros((n_blocks, size), np.uint8)
    assert set(ns.put(there, blocks).outcomes) == {Outcome.STORED}
    took: tuple[list[float], list[float]] = ([], [])
    for i in range(100):
        began = time.perf_counter()
        found = ns.get((absent, there)[i % 2], blocks).n_blocks
        took[i % 2].append(time.perf_counter() - began)
        assert found == (i % 2) * n_blocks
    hits, misses = ([min(times[i : i + 5]) for i in range(0, len(times), 5)] for times in (took[1], took[0]))
    assert auc(hits, misses) > 0.7  # (the fastest of five: the machine may be busy)
