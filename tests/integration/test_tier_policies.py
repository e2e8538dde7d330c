"""What a namespace says of its blocks' way to SSD and back: write and read policies, with real processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.core.types import MissCause, Outcome, Tier
from kvpool.errors import InvalidArgument
from tests.support.cluster import Cluster
from tests.support.confine import control_group, in_group, throttle
from tests.support.observe import metrics
from tests.support.processes import run_cli
from tests.support.waiting import wait_until

MakeCluster = Callable[..., Cluster]
SIZE = 16_384
N = 8
CHAINS = 8  # fit into DRAM
DRAM, SSD = str(N * CHAINS * SIZE), "16MiB"


def space(client: Any, name: str = "n", **settings: Any) -> kvpool.Namespace:
    layout = kvpool.KVLayout.opaque(block_bytes=SIZE, block_tokens=1)
    namespace: kvpool.Namespace = client.namespace(name, layout, create=True, **settings)
    return namespace


def chain(ns: kvpool.Namespace, number: int) -> kvpool.PrefixHashes:
    return ns.hash([number * 1000 + i for i in range(N)])


def values(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 256, (N, SIZE), dtype=np.uint8)


def put(ns: kvpool.Namespace, *numbers: int) -> None:
    for number in numbers:
        assert set(ns.put(chain(ns, number), values(number)).outcomes) <= {Outcome.STORED, Outcome.ALREADY}


def get(ns: kvpool.Namespace, number: int, **settings: Any) -> Any:
    out = np.empty((N, SIZE), np.uint8)
    got = ns.get(chain(ns, number), out, **settings)
    assert np.array_equal(out[: got.n_blocks], values(number)[: got.n_blocks])
    return got


def on_ssd(cluster: Cluster) -> float:
    return metrics(cluster.worker())['kvpool_tier_blocks{tier="ssd"}']


def test_through_blocks_are_on_ssd_soon_and_outlive_the_worker(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram=DRAM, ssd=SSD)
    back, through = space(cluster.connect(), "back"), space(cluster.connect(), "through", write_policy="through")
    put(back, 1)
    put(through, 2, 3)
    wait_until(lambda: on_ssd(cluster) >= 2 * N, what="written down without any need for room")
    assert on_ssd(cluster) == 2 * N
    cluster.worker().kill()
    cluster.start_worker(0)
    for number in (2, 3):
        wait_until(lambda number=number: get(through, number).n_blocks == N, what="there after the kill")  # type: ignore[misc]
    assert get(back, 1).n_blocks == 0


def test_selective_blocks_go_down_only_when_they_were_used_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram=DRAM, ssd=SSD)
    ns, other = space(cluster.connect(), write_policy="selective"), space(cluster.connect(), "other")
    put(ns, *range(4))
    for number in (1, 3):
        assert get(ns, number).n_blocks == N
    put(other, *range(100, 100 + 4 * CHAINS))
    assert [get(ns, number).n_blocks for number in range(4)] == [0, N, 0, N]


def test_a_best_effort_get_does_not_wait_for_ssd_and_finds_it_in_dram_later(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram=DRAM, ssd=SSD)
    ns, other = space(cluster.connect(), read_policy="best_effort"), space(cluster.connect(), "other")
    put(ns, 1)
    put(other, *range(100, 100 + 2 * CHAINS))
    wait_until(lambda: on_ssd(cluster) >= N)
    first = get(ns, 1)
    assert first.n_blocks < N and first.miss is MissCause.TIMEOUT
    wait_until(lambda: get(ns, 1).n_blocks == N, what="it came up meanwhile")
    assert {source.tier for source in get(ns, 1).sources} == {Tier.DRAM}


def test_a_get_with_a_read_timeout_waits_so_long_for_a_slow_disk(make_cluster: MakeCluster, tmp_path: Path) -> None:
    with control_group("blkio") as group, ExitStack() as stack:
        cluster = make_cluster(dram=DRAM, ssd=SSD, worker_prefix=in_group(group))
        stack.callback(cluster.stop)
        client = cluster.connect()
        ns, other = space(client, read_policy="timeout", read_timeout_ms=100), space(client, "other")
        put(ns, 1, 2)
        put(other, *range(100, 100 + 2 * CHAINS))
        wait_until(lambda: on_ssd(cluster) >= 2 * N)
        assert get(ns, 1, deadline_ms=30_000).n_blocks == N  # a disk that answers is in time
        throttle(group, tmp_path, read=1, write=1)
        try:
            late = get(ns, 2, deadline_ms=30_000)  # (the test's own time limit is shorter)
            assert late.n_blocks < N and late.miss is MissCause.TIMEOUT
        finally:
            throttle(group, tmp_path)


def tiers_of(cluster: Cluster, ns: kvpool.Namespace) -> list[list[str]]:
    listed = run_cli("ls", ns.name, "--master", cluster.master_address, "--json")
    return [row["tiers"] for row in json.loads(listed.stdout)["blocks"]]


def test_prefetch_brings_blocks_up_from_ssd(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram=DRAM, ssd=SSD)
    ns, other = space(cluster.connect()), space(cluster.connect(), "other")
    put(ns, 1)
    put(other, *range(100, 100 + 2 * CHAINS))
    wait_until(lambda: ["ssd"] in tiers_of(cluster, ns), what="some left DRAM")  # (not always all: a chain leaves from its end)

    def came_up() -> bool:  # (asked again: there may be no room before something was written down)
        assert ns.prefetch(chain(ns, 1)) == N
        return ["ssd"] not in tiers_of(cluster, ns)

    wait_until(came_up, what="all came up")
    assert {source.tier for source in get(ns, 1).sources} == {Tier.DRAM}


@pytest.mark.parametrize(("settings", "words"), [
    ({"write_policy": "write_back"}, "write_policy: 'write_back' is not one of back, through, selective"),
    ({"read_policy": "now"}, "read_policy: 'now' is not one of wait, best_effort, timeout"),
    ({"read_policy": "timeout"}, "read_timeout_ms: 0 with read_policy='timeout'"),
    ({"read_timeout_ms": 5}, "read_timeout_ms: 5 with read_policy='wait'"),
    ({"read_policy": "timeout", "read_timeout_ms": -1}, "read_timeout_ms: -1"),
])  # fmt: skip
def test_what_cannot_be_says_which_argument(settings: dict[str, Any], words: str) -> None:
    layout = kvpool.KVLayout.opaque(block_bytes=SIZE, block_tokens=1)
    with pytest.raises(InvalidArgument, match=words.replace("(", r"\(")):
        kvpool.core.namespaces.NamespaceSpec.of("n", layout, **settings)


def test_the_command_line_makes_and_shows_them(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(dram=DRAM)
    where = ("--master", cluster.master_address, "--json")
    made = run_cli("ns", "create", "n", "--block-bytes", "4KiB", "--write-policy", "through", "--read-policy", "timeout",
                   "--read-timeout", "50ms", *where)  # fmt: skip
    shown = run_cli("ns", "show", "n", *where)
    for answer in (made, shown):
        assert answer.returncode == 0, answer.stderr
        assert '"write_policy": "through"' in answer.stdout and '"read_timeout_ms": 50' in answer.stdout
