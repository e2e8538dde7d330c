"""`Namespace.clear`: all blocks of one namespace, of every shard and worker, and of no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kvpool
from kvpool.errors import MasterUnavailable
from tests.support.cluster import Cluster
from tests.support.payload import payloads

BLOCK = 4096


def test_clear_empties_one_namespace(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(n_workers=2)
    client = cluster.connect()
    layout = kvpool.KVLayout.opaque(block_bytes=BLOCK, block_tokens=4)
    ns, other = client.namespace("a", layout, create=True, replicas=2), client.namespace("b", layout, create=True)
    hashes, data = ns.hash(range(32)), payloads(range(8), size=BLOCK)
    for shard in (0, 3):
        assert ns.put(hashes, data, shard=shard).n_there == 8
    assert other.put(other.hash(range(32)), data).n_there == 8
    assert ns.clear(deadline_ms=10_000) == 16
    for shard in (0, 3):
        assert ns.get(hashes, payloads(range(8), size=BLOCK), shard=shard).n_blocks == 0
        assert ns.match(hashes, shard=shard) == 0
    assert other.match(other.hash(range(32))) == 8
    assert ns.clear() == 0
    assert ns.put(hashes, data).n_there == 8
    assert cluster.master is not None
    cluster.master.kill()
    with pytest.raises(MasterUnavailable):
        ns.clear(deadline_ms=300)
