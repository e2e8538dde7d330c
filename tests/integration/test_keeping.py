"""Pins, expiry, priorities and quotas with real processes: what stays, what goes, and that it survives restarts."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpool
import kvpool.aio
from kvpool.core.pins import PinOutcome
from kvpool.core.types import MissCause, Outcome
from kvpool.errors import InvalidArgument
from tests.support.cluster import Cluster
from tests.support.payload import payload
from tests.support.processes import run_cli
from tests.support.waiting import wait_until

BLOCK = 64 << 10
LAYOUT = kvpool.KVLayout.opaque(block_bytes=BLOCK, block_tokens=1)
RETAIN_S = 25  # long enough for blocks to get to SSD on a busy machine
N = 32  # blocks that the DRAM of a worker here holds


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One worker that evicts by recency: what is put last pushes out what is older, and not what is kept."""
    made = Cluster(tmp_path, dram=str(N * BLOCK), env={"KVPOOL_WORKER__POLICY": "lru"}).start()
    yield made
    made.stop()


@pytest.fixture
def two_tiers(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, dram=str(N * BLOCK), ssd="16MiB").start()
    yield made
    made.stop()


def put(ns: Any, chain: int, n: int, **hints: Any) -> Any:
    """A chain of n blocks of its own -> (hashes, result)."""
    hashes = ns.hash([chain * 1_000 + i for i in range(n)])
    return hashes, ns.put(hashes, [payload(chain * 1_000 + i, 1, BLOCK) for i in range(n)], **hints)


def get(ns: Any, hashes: Any) -> Any:
    return ns.get(hashes, [bytearray(BLOCK) for _ in range(len(hashes))])


def flood(ns: Any, first: int, n_chains: int, each: int = 4) -> None:
    for chain in range(first, first + n_chains):
        put(ns, chain, each)


# --- pins ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["soft", "hard"])
def test_a_pinned_prefix_outlives_a_flood_and_an_unpinned_one_does_not(cluster: Cluster, level: Any) -> None:
    ns = cluster.connect().namespace("pins", LAYOUT, create=True)
    kept, _ = put(ns, 1, 4)
    plain, _ = put(ns, 2, 4)
    assert ns.pin(kept, level=level, ttl_s=600).outcomes == [PinOutcome.PINNED] * 4
    flood(ns, 100, 30)
    assert get(ns, kept).n_blocks == 4
    assert get(ns, plain).miss is MissCause.EVICTED
    assert ns.unpin(kept).outcomes == [PinOutcome.UNPINNED] * 4
    assert ns.unpin(kept).outcomes == [PinOutcome.NOT_PINNED] * 4
    flood(ns, 200, 30)
    assert get(ns, kept).n_blocks == 0


def test_hard_pins_have_a_share_of_a_tier_and_the_answer_says_what_is_past_it(cluster: Cluster) -> None:
    ns = cluster.connect().namespace("pins", LAYOUT, create=True)
    chain, _ = put(ns, 1, 12)
    result = ns.pin(chain, level="hard")
    assert result.count(PinOutcome.PINNED) == N // 4 and result.count(PinOutcome.REFUSED) == 12 - N // 4
    flood(ns, 100, 30)
    assert get(ns, chain[: N // 4]).n_blocks == N // 4  # and what was refused is evicted last
    assert get(ns, chain).n_blocks == 12


def test_soft_pins_go_when_there_is_nothing_else_and_a_put_never_fails_for_them(cluster: Cluster) -> None:
    ns = cluster.connect().namespace("pins", LAYOUT, create=True)
    for chain in range(1, N // 4 + 1):
        assert ns.pin(put(ns, chain, 4)[0], level="soft").count(PinOutcome.PINNED) == 4
    _, result = put(ns, 99, 4)
    assert result.outcomes == [Outcome.STORED] * 4
    assert get(ns, ns.hash([1_000])).n_blocks == 1 or get(ns, ns.hash([2_000])).n_blocks == 1


def test_a_pin_counts_for_blocks_that_come_later_and_ends_with_its_time(cluster: Cluster) -> None:
    ns = cluster.connect().namespace("pins", LAYOUT, create=True)
    hashes = ns.hash([1_000, 1_001])
    assert ns.pin(hashes, level="hard", ttl_s=3).outcomes == [PinOutcome.ABSENT] * 2
    put(ns, 1, 2)
    flood(ns, 100, 20)
    assert get(ns, hashes).n_blocks == 2
    wait_until(lambda: not pins_of(cluster, "pins"), what="the pin is over")
    wait_until(lambda: flood(ns, 200, 20) or get(ns, hashes).n_blocks == 0, what="it can be evicted")


def test_removal_takes_a_pinned_block_and_the_pin_waits_for_the_next(cluster: Cluster) -> None:
    ns = cluster.connect().namespace("pins", LAYOUT, create=True)
    hashes, _ = put(ns, 1, 2)
    ns.pin(hashes, level="hard")
    ns.remove(hashes)
    assert get(ns, hashes).miss is MissCause.REMOVED
    put(ns, 1, 2)
    flood(ns, 100, 20)
    assert get(ns, hashes).n_blocks == 2


def pins_of(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    listed = run_cli("pin", "list", name, "--master", cluster.master_address, "--json")
    assert listed.returncode == 0, listed.stderr
    return list(json.loads(listed.stdout)["pins"])


def test_pins_survive_the_master_and_the_worker(two_tiers: Cluster) -> None:
    cluster = two_tiers
    ns = cluster.connect().namespace("pins", LAYOUT, create=True)
    kept, _ = put(ns, 1, 4)
    ns.pin(kept, level="hard", ttl_s=600)
    assert cluster.master is not None
    cluster.master.kill()
    cluster.start_master()
    assert [pin["level"] for pin in wait_until(lambda: pins_of(cluster, "pins"))] == ["hard"] * 4
    wait_until(lambda: put(ns, 2, 1)[1].outcomes == [Outcome.ALREADY] or get(ns, kept).complete, what="the worker is back")
    flood(ns, 100, 100)  # more than both tiers have
    assert get(ns, kept).n_blocks == 4

    ns.pin(ns.hash([5_000]), level="soft")  # the worker is told of both after its restart
    cluster.worker(0).kill()
    ns.unpin(ns.hash([5_000]))
    cluster.start_worker(0)
    client = cluster.connect()
    again = client.namespace("pins", LAYOUT)
    put(again, 1, 4)  # (what was in DRAM alone is lost with the worker)
    flood(again, 300, 100)
    assert get(again, kept).n_blocks == 4
    assert len(pins_of(cluster, "pins")) == 4


def test_pins_are_seen_where_blocks_and_namespaces_are_listed(cluster: Cluster) -> None:
    client = cluster.connect()
    ns = client.namespace("pins", LAYOUT, create=True)
    hashes, _ = put(ns, 1, 3)
    ns.pin(hashes[:1], level="hard")
    ns.pin(hashes[1:2], level="soft")
    master = ("--master", cluster.master_address)
    blocks = json.loads(run_cli("ls", "pins", *master, "--json").stdout)["blocks"]
    assert sorted(str(block["pin"]) for block in blocks) == ["None", "hard", "soft"]
    shown = json.loads(run_cli("ns", "show", "pins", *master, "--json").stdout)
    assert shown["pins"] == {"soft": 1, "hard": 1}
    assert client.describe()["namespaces"][0]["pins"] == {"soft": 1, "hard": 1}
    name = blocks[0]["hash"]
    done = run_cli("pin", "set", "pins", name, "--level", "hard", "--ttl", "10min", *master, "--json")
    assert json.loads(done.stdout) == {"namespace": "pins", "absent": 0, "pinned": 1, "refused": 0, "pending_workers": []}
    done = run_cli("pin", "unset", "pins", "--all", "--yes", *master, "--json")
    assert json.loads(done.stdout)["unpinned"] == len({name, *(h["hash"] for h in blocks if h["pin"])})
    assert run_cli("pin", "set", "pins", "xyz", *master).returncode == 2
    assert "no pins" in run_cli("pin", "list", "pins", *master).stdout


def test_the_async_face_pins_too(cluster: Cluster) -> None:
    async def main() -> None:
        async with await kvpool.aio.connect(cluster.master_address) as client:
            ns = await client.namespace("pins", LAYOUT, create=True)
            hashes = await ns.hash([1, 2])
            assert (await ns.pin(hashes, level="hard", ttl_s=60)).outcomes == [PinOutcome.ABSENT] * 2
            assert (await ns.unpin(hashes)).outcomes == [PinOutcome.UNPINNED] * 2

    asyncio.run(main())


# --- expiry and priority --------------------------------------------------------------------------------------------------


def test_a_block_expires_in_dram_with_its_cause_and_its_slot_is_freed(cluster: Cluster) -> None:
    client = cluster.connect()
    ns = client.namespace("short", LAYOUT, create=True, ttl_s=1.5)
    hashes, _ = put(ns, 1, 3)
    assert get(ns, hashes).n_blocks == 3
    wait_until(lambda: get(ns, hashes).miss is MissCause.EXPIRED, what="it expires")
    wait_until(lambda: client.describe()["workers"][0]["tiers"]["dram"]["used_bytes"] == 0, what="its slots are free")
    _, again = put(ns, 1, 3)
    assert again.outcomes == [Outcome.STORED] * 3


def test_a_hint_is_shorter_than_the_namespace_and_a_later_put_makes_it_live_on(cluster: Cluster) -> None:
    ns = cluster.connect().namespace("plain", LAYOUT, create=True)
    short, _ = put(ns, 1, 1, retain_s=1)
    longer, _ = put(ns, 2, 1, retain_s=1)
    _, again = put(ns, 2, 1)
    assert again.outcomes == [Outcome.ALREADY]
    with ns.put_session(ns.hash([7]), retain_s=1) as session:
        session.write(0, 0, payload(7, 1, BLOCK))
        session.commit()
    wait_until(lambda: get(ns, short).miss is MissCause.EXPIRED, what="the hint counts")
    wait_until(lambda: get(ns, ns.hash([7])).miss is MissCause.EXPIRED, what="of a session too")
    assert get(ns, longer).n_blocks == 1


def on_ssd(cluster: Cluster, name: str, hashes: Any) -> bool:
    listed = json.loads(run_cli("ls", name, "--master", cluster.master_address, "--json").stdout)["blocks"]
    tiers = {block["hash"]: block["tiers"] for block in listed}
    return all("ssd" in tiers.get(hashes.hashes[at : at + 32].hex(), ()) for at in range(0, len(hashes.hashes), 32))


def test_a_block_that_expired_on_ssd_while_the_worker_was_away_is_not_served_afterwards(two_tiers: Cluster) -> None:
    cluster = two_tiers
    ns = cluster.connect().namespace("short", LAYOUT, create=True)
    kept, _ = put(ns, 1, 4, retain_s=600)
    short, _ = put(ns, 2, 4, retain_s=RETAIN_S)
    until = time.monotonic() + RETAIN_S
    chains = itertools.count(100, 4)
    wait_until(lambda: (on_ssd(cluster, "short", kept) and on_ssd(cluster, "short", short)) or flood(ns, next(chains), 4),
               timeout_s=20, what="both are on SSD")  # fmt: skip
    cluster.worker(0).kill()
    assert time.monotonic() < until, "a machine too busy for this test"
    wait_until(lambda: time.monotonic() >= until, timeout_s=RETAIN_S + 1, what="the time passes")
    cluster.start_worker(0)
    ns = cluster.connect().namespace("short", LAYOUT)
    assert get(ns, short).miss is MissCause.EXPIRED
    assert get(ns, kept).n_blocks == 4


def test_a_block_expires_on_ssd(two_tiers: Cluster) -> None:
    ns = two_tiers.connect().namespace("short", LAYOUT, create=True)
    short, _ = put(ns, 2, 4, retain_s=RETAIN_S)
    chains = itertools.count(100, 4)
    wait_until(lambda: on_ssd(two_tiers, "short", short) or flood(ns, next(chains), 4), timeout_s=20, what="it is on SSD")
    wait_until(lambda: get(ns, short).miss is MissCause.EXPIRED, timeout_s=RETAIN_S + 5, what="it expires")


def test_low_priorities_go_first_and_high_ones_last(cluster: Cluster) -> None:
    ns = cluster.connect().namespace("plain", LAYOUT, create=True)
    high, _ = put(ns, 1, 4, priority=90)
    plain, _ = put(ns, 2, 4)
    low, _ = put(ns, 3, 4, priority=1)
    flood(ns, 100, (N - 12) // 4)  # full now
    put(ns, 50, 4)
    assert get(ns, low).n_blocks == 0 and get(ns, plain).n_blocks == 4
    flood(ns, 200, 12)
    assert get(ns, plain).n_blocks == 0 and get(ns, high).n_blocks == 4


# --- quotas -----------------------------------------------------------------------------------------------------------------


def test_a_namespace_at_its_quota_evicts_its_own_and_never_others(cluster: Cluster) -> None:
    client = cluster.connect()
    other = client.namespace("other", LAYOUT, create=True)
    small = client.namespace("small", LAYOUT, create=True, quota_bytes=8 * BLOCK)
    theirs, _ = put(other, 1, 8)
    first, _ = put(small, 2, 4)
    for chain in range(10, 30):
        _, result = put(small, chain, 4)
        assert result.outcomes == [Outcome.STORED] * 4
    assert get(other, theirs).n_blocks == 8
    assert get(small, first).miss is MissCause.EVICTED

    def described() -> dict[str, Any]:
        return next(dict(n) for n in client.describe()["namespaces"] if n["name"] == "small")

    assert described()["quota_bytes"] == 8 * BLOCK
    wait_until(lambda: described()["used_bytes"] == {"dram": 8 * BLOCK, "ssd": 0}, what="the use is told")
    status = json.loads(run_cli("status", "--master", cluster.master_address, "--json").stdout)
    assert {n["name"]: n["quota_bytes"] for n in status["namespaces"]} == {"other": None, "small": 8 * BLOCK}
    assert "512 KiB of 512 KiB" in run_cli("ns", "list", "--master", cluster.master_address).stdout


def test_what_does_not_fit_a_quota_is_full_with_that_reason(cluster: Cluster) -> None:
    ns = cluster.connect().namespace("small", LAYOUT, create=True, quota_bytes=4 * BLOCK)
    _, result = put(ns, 1, 10)
    assert result.outcomes == [Outcome.STORED] * 4 + [Outcome.FULL] * 6
    assert all(reason.startswith("quota: ") for reason in result.reasons[4:])


def test_a_quota_is_split_over_workers_and_again_when_one_goes(tmp_path: Path) -> None:
    with_two = Cluster(tmp_path, n_workers=2, dram=str(N * BLOCK)).start()
    try:
        client = with_two.connect()
        ns = client.namespace("small", LAYOUT, create=True, quota_bytes=8 * BLOCK)
        for chain in range(24):
            put(ns, chain, 2)

        def used() -> int:
            return int(next(n for n in client.describe()["namespaces"] if n["name"] == "small")["used_bytes"]["dram"])

        wait_until(lambda: 0 < used() <= 8 * BLOCK, what="the use is told")
        with_two.worker(1).stop()
        wait_until(lambda: put(ns, 200, 8)[1].count(Outcome.FULL) == 0, what="the other one has all of it")
        assert used() <= 8 * BLOCK
    finally:
        with_two.stop()


def test_a_quota_holds_on_both_tiers(two_tiers: Cluster) -> None:
    client = two_tiers.connect()
    quota = 24 * BLOCK
    ns = client.namespace("small", LAYOUT, create=True, quota_bytes=quota)
    for chain in range(30):
        put(ns, chain, 4)

    def used() -> dict[str, int]:
        return dict(next(n for n in client.describe()["namespaces"] if n["name"] == "small")["used_bytes"])

    wait_until(lambda: used()["ssd"] > 0, what="some went to SSD")
    assert sum(used().values()) <= quota


def test_a_quota_of_one_block_stores_one_where_most_of_the_pool_is_ssd(two_tiers: Cluster) -> None:
    ns = two_tiers.connect().namespace("small", LAYOUT, create=True, quota_bytes=BLOCK)
    for chain in (1, 2):
        hashes, result = put(ns, chain, 1)
        assert result.outcomes == [Outcome.STORED]
        assert get(ns, hashes).n_blocks == 1


# --- wrong arguments --------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named(cluster: Cluster) -> None:
    client = cluster.connect()
    ns = client.namespace("plain", LAYOUT, create=True)
    hashes, data = ns.hash([1]), [payload(1, 1, BLOCK)]
    wrong: list[tuple[str, Any]] = [
        ("level", lambda: ns.pin(hashes, level="firm")),
        ("ttl_s", lambda: ns.pin(hashes, ttl_s=0)),
        ("ttl_s", lambda: ns.pin(hashes, ttl_s=True)),
        ("hashes", lambda: ns.pin([b"x" * 32])),
        ("hashes", lambda: ns.unpin(None)),
        ("priority", lambda: ns.put(hashes, data, priority=101)),
        ("priority", lambda: ns.put(hashes, data, priority=-1)),
        ("priority", lambda: ns.put(hashes, data, priority="high")),
        ("retain_s", lambda: ns.put(hashes, data, retain_s=0)),
        ("retain_s", lambda: ns.put_session(hashes, retain_s=-5)),
        ("ttl_s", lambda: client.namespace("new", LAYOUT, create=True, ttl_s=-1)),
        ("quota_bytes", lambda: client.namespace("new", LAYOUT, create=True, quota_bytes=BLOCK - 1)),
    ]
    for name, call in wrong:
        with pytest.raises(InvalidArgument, match=f"^{name}"):
            call()
