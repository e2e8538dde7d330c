"""A pool that is not there at the start, comes, loses its worker while the engine loads, hangs, loses its master: one engine
lives through all of it. The text is always exact, no request loses more than the deadline, and hits return when the pool
does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.connectors.vllm.engines import (
    BLOCK,
    HITS,
    PROMPTS,
    Engine,
    Reference,
    Result,
    assert_equal,
    full_blocks,
    prompt,
    stored,
)
from tests.support.cluster import Cluster
from tests.support.proxy import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(1800)
DEADLINE_S = 0.2
SLACK_S = 0.2  # a wait may end that much too late on a busy machine


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Not started; its address is known."""
    directory = tmp_path / "pool"
    directory.mkdir()
    found = Cluster(directory)
    found.master_address = f"127.0.0.1:{free_port()}"
    yield found
    found.stop()


def generate(engine: Engine, prompts: Sequence[list[int]]) -> list[Result]:
    """The engine's own cache is empty before. None of the requests may have waited for the pool for longer than the deadline."""
    engine.reset()
    found = []
    for one in prompts:
        before = waited(engine)
        found += engine.generate([one])
        assert waited(engine) - before <= DEADLINE_S + SLACK_S
    return found


def waited(engine: Engine) -> float:
    """Seconds that all requests so far have waited for the pool: lookups and loads."""
    metrics = engine.metrics()
    return metrics.get("kvpool:lookup_seconds_sum", 0) + metrics.get("kvpool:load_seconds_sum", 0)


def failures(engine: Engine) -> float:
    return engine.metrics().get("kvpool:load_failures", 0)


def refill(engine: Engine, cluster: Cluster, reference: Reference) -> None:
    """The engine computes the prompts again, and the pool has them."""
    generate(engine, PROMPTS)
    engine.flush()
    engine.knows(max(1, stored(cluster)))
    hits(engine, reference)


def hits(engine: Engine, reference: Reference) -> None:
    """All blocks come from the pool. A busy machine may miss the deadline, and then all is computed: tried until it does not."""

    def all_from_the_pool() -> bool:
        before = failures(engine)
        found = generate(engine, PROMPTS)
        if [one.external for one in found] != HITS or failures(engine) != before:
            return False
        assert_equal(found, reference.warm)
        return True

    wait_until(all_from_the_pool, timeout_s=60, what="hits for all full blocks")


def interrupted(engine: Engine, what: Callable[[], object]) -> tuple[list[Result], float]:
    """The first prompt, with `what` done while its load is under way: its blocks were promised. And how long the load took."""
    engine.reset()
    before = engine.metrics()
    engine.ask("gate")
    engine.begin(PROMPTS[:1])
    assert "loading" in engine.read(), "the worker's half has begun to load"
    what()
    engine.tell("go")
    found = engine.results()
    after = engine.metrics()
    assert after["kvpool:load_failures"] - before.get("kvpool:load_failures", 0) == 1
    assert after["kvpool:load_seconds_count"] - before["kvpool:load_seconds_count"] == 1, "it was not tried again and again"
    return found, found[0].seconds


def test_the_pool_comes_and_goes(cluster: Cluster, start_engine: Callable[..., Engine], reference: Reference) -> None:
    engine = start_engine(cluster.master_address, policy="recompute", extra={"deadline_ms": int(DEADLINE_S * 1e3)})
    assert_equal(generate(engine, PROMPTS), reference.cold)
    assert "event=kvpool_unavailable who=scheduler" in engine.log_text()

    cluster.start()
    engine.knows(0)
    assert_equal(generate(engine, PROMPTS), reference.cold)
    engine.flush()
    engine.knows(stored(cluster))
    hits(engine, reference)

    found, seconds = interrupted(engine, cluster.worker().kill)
    assert_equal(found, reference.cold[:1])
    print(f"worker killed during a load: {seconds * 1e3:.0f} ms, without the pool {reference.cold[0].seconds * 1e3:.0f} ms")
    assert_equal(generate(engine, PROMPTS), reference.cold)

    cluster.start_worker(0)
    refill(engine, cluster, reference)

    found, seconds = interrupted(engine, cluster.worker().pause)
    assert_equal(found, reference.cold[:1])
    print(f"worker hangs during a load: {seconds * 1e3:.0f} ms, without the pool {reference.cold[0].seconds * 1e3:.0f} ms")
    assert_equal(generate(engine, PROMPTS), reference.cold)
    cluster.worker().resume()
    hits(engine, reference)

    # the master dies: what the engine knows, it still gets; what it saves meanwhile is found when there is a master again
    assert cluster.master is not None
    cluster.master.kill()
    hits(engine, reference)
    new = [prompt(150, seed=9)]
    first = generate(engine, new)
    engine.flush()
    cluster.start_master()
    wait_until(lambda: stored(cluster) > 0, timeout_s=30, what="the new master has the inventory")
    engine.knows(stored(cluster))
    again = generate(engine, new)
    assert again[0].external == full_blocks(150) * BLOCK and again[0].tokens == first[0].tokens
    hits(engine, reference)
