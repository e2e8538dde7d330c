"""Bits that flip on disk while a worker runs: none of them is ever served, each that hit a block is counted (real processes)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvpool.core.types import MissCause, Outcome, Tier
from tests.support.cluster import Cluster
from tests.support.keyed import hash_of, keyspace
from tests.support.observe import metrics, now
from tests.support.payload import check, payload
from tests.support.waiting import wait_until

MIB = 1 << 20
BLOCK = 4096
CHAIN = 50


@pytest.mark.parametrize(("n_blocks", "n_bits"), [(2_000, 1_250), pytest.param(16_000, 10_000, marks=pytest.mark.reports)])
def test_flipped_bits_in_slab_files_are_found_and_never_served(make_cluster: Callable[..., Cluster], n_blocks: int,
                                                              n_bits: int) -> None:  # fmt: skip
    """Half of the blocks are in DRAM too, half are cold."""
    cluster = make_cluster(dram=str(n_blocks * BLOCK // 2), ssd=str(2 * n_blocks * BLOCK))
    worker = cluster.worker()
    ns = keyspace(cluster.connect(), "n", BLOCK)
    for first in range(0, n_blocks, CHAIN):
        keys = range(first, first + CHAIN)
        done = ns.put(hash_of(ns, *keys), [payload(key, 1, BLOCK) for key in keys], deadline_ms=10_000)
        assert done.n_there == CHAIN, done
    wait_until(lambda: not now(worker, "demoting"))
    chance, files = random.Random(n_bits), sorted(cluster.ssd_dir(0).glob("slab-*.kv"))
    for _ in range(n_bits):
        with chance.choice(files).open("r+b", buffering=0) as file:
            at = chance.randrange(file.seek(0, 2))
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    out, misses, tiers = bytearray(BLOCK), [], []
    for first in range(0, n_blocks, CHAIN):
        whole = hash_of(ns, *range(first, first + CHAIN))
        for i in range(CHAIN):
            got = ns.get(whole[i : i + 1], [out], deadline_ms=5000)
            if got.n_blocks:
                check(first + i, out)
                tiers.append(got.sources[0].tier)
            else:
                misses.append((first + i, got.miss))
    assert {cause for _, cause in misses} == {MissCause.CORRUPT}
    assert tiers.count(Tier.SSD) > n_blocks // 16 and tiers.count(Tier.DRAM) > n_blocks // 4
    told = metrics(worker)
    assert told['kvpool_block_events_total{event="corrupt_ssd"}'] >= len(misses) > n_blocks // 16
    for key, _ in misses[:20]:  # it is gone, not in the way
        assert ns.put(hash_of(ns, key), [payload(key, 1, BLOCK)], deadline_ms=5000).outcomes == [Outcome.STORED]
        assert ns.get(hash_of(ns, key), [out], deadline_ms=5000).n_blocks == 1
        check(key, out)
