"""Fixtures for all tests: a pool of real processes, a relay, and the leak check around every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.leaks import assert_no_leaks, snapshot
from tests.support.proxy import TcpProxy


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Each test gives back its descriptors, threads and children."""
    before = snapshot()
    yield
    assert_no_leaks(before)


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """make_cluster(n_workers=1, dram="64MiB", ssd=None, ...) starts a pool; stopped after the test."""
    clusters: list[Cluster] = []

    def make(**settings: Any) -> Cluster:
        directory = tmp_path / f"pool-{len(clusters)}"
        directory.mkdir()
        cluster = Cluster(directory, **settings)
        clusters.append(cluster)
        return cluster.start()

    yield make
    failures = []
    for cluster in clusters:
        try:
            cluster.stop()
        except AssertionError as error:
            failures.append(error)
    assert not failures, failures


@pytest.fixture
def make_proxy() -> Iterator[Callable[..., TcpProxy]]:
    """make_proxy("host:port", listen="127.0.0.1:0") starts a relay to there; closed after the test."""
    proxies: list[TcpProxy] = []

    def make(target: str, **settings: Any) -> TcpProxy:
        proxies.append(TcpProxy(target, **settings))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()
