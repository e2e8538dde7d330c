"""A pool that is not there at the start, comes, loses its worker while the engine loads, hangs, loses its master: one engine
lives through all of it. The text is always exact, no request loses more than the deadline, and hits return when the pool
does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.connectors.vllm.engines import (
    HITS,
    PROMPTS,
    Engine,
    Reference,
    Result,
    assert_equal,
    prompt,
    stored,
)
from tests.support.cluster import Cluster
from tests.support.proxy import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(1800)
DEADLINE_S = 0.2
SLACK_S = 0.3  # two runs of one request are that far apart on a busy machine, beside a factor
FACTOR = 2.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Not started; its address is known."""
    directory = tmp_path / "pool"
    directory.mkdir()
    found = Cluster(directory)
    found.master_address = f"127.0.0.1:{free_port()}"
    yield found
    found.stop()


def slower(found: Sequence[Result], alone: Sequence[Result]) -> float:
    """How much longer the slowest of these requests took than without the pool (and its usual spread)."""
    return max(x.seconds - FACTOR * y.seconds - SLACK_S for x, y in zip(found, alone, strict=True))


def refill(engine: Engine, cluster: Cluster, reference: Reference) -> None:
    """The engine computes the prompts again, and the pool has them."""
    engine.reset()
    engine.generate(PROMPTS)
    engine.flush()
    engine.knows(max(1, stored(cluster)))
    hits(engine, reference)


def hits(engine: Engine, reference: Reference) -> None:
    engine.reset()
    found = engine.generate(PROMPTS)
    assert [one.external for one in found] == HITS
    assert_equal(found, reference.warm)


def test_the_pool_comes_and_goes(cluster: Cluster, start_engine: Callable[..., Engine], reference: Reference) -> None:
    engine = start_engine(cluster.master_address, policy="recompute")
    alone = engine.generate(PROMPTS)
    assert_equal(alone, reference.cold)
    assert "event=kvpool_unavailable who=scheduler" in engine.log_text()

    cluster.start()
    engine.knows(0)
    engine.reset()
    assert_equal(engine.generate(PROMPTS), reference.cold)
    engine.flush()
    engine.knows(stored(cluster))
    hits(engine, reference)

    # the worker dies while the engine loads: the load has begun, its blocks were promised
    engine.reset()
    before = engine.metrics()
    engine.ask("gate")
    engine.begin(PROMPTS[:1])
    assert "loading" in engine.read()
    cluster.worker().kill()
    engine.tell("go")
    found = engine.results()
    assert_equal(found, reference.cold[:1])
    assert slower(found, alone[:1]) <= DEADLINE_S
    after = engine.metrics()
    assert after["kvpool:load_failures"] - before.get("kvpool:load_failures", 0) == 1
    assert after["kvpool:load_seconds_count"] - before["kvpool:load_seconds_count"] == 1, "it was not tried again and again"
    engine.reset()
    assert_equal(engine.generate(PROMPTS), reference.cold)

    cluster.start_worker(0)
    refill(engine, cluster, reference)

    # the worker hangs: first while a load is under way, then from the start
    engine.reset()
    engine.ask("gate")
    engine.begin(PROMPTS[:1])
    assert "loading" in engine.read()
    cluster.worker().pause()
    engine.tell("go")
    found = engine.results()
    assert_equal(found, reference.cold[:1])
    assert slower(found, alone[:1]) <= DEADLINE_S
    engine.reset()
    found = engine.generate(PROMPTS)
    assert_equal(found, reference.cold)
    assert slower(found, alone) <= DEADLINE_S
    cluster.worker().resume()

    def hits_again() -> bool:
        engine.reset()
        return [one.external for one in engine.generate(PROMPTS)] == HITS

    wait_until(hits_again, timeout_s=30, what="hits after the worker went on")

    # the master dies: what the engine knows, it still gets; what it saves meanwhile is found when there is a master again
    assert cluster.master is not None
    cluster.master.kill()
    hits(engine, reference)
    new = [prompt(150, seed=9)]
    first = engine.generate(new)
    engine.flush()
    cluster.start_master()
    wait_until(lambda: stored(cluster) > 0, timeout_s=30, what="the new master has the inventory")
    engine.knows(stored(cluster))
    engine.reset()
    again = engine.generate(new)
    assert again[0].external == 4 * 32 and again[0].tokens == first[0].tokens
    hits(engine, reference)
