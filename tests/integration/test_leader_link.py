"""The client's calls among several masters: answers of a past epoch, hints, switches under the feet of other threads.

The masters here are servers of the real protocol that say what a test wants; those of the product are in `fault/test_ha.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvpool.client.master import MasterLink
from kvpool.errors import MasterUnavailable, StoreUnavailable
from kvpool.transport.rpc import SERVER_OPTIONS, status_of
from kvpool.v1 import master_pb2 as pb
from kvpool.v1 import master_pb2_grpc as pb_grpc
from tests.support.proxy import free_port

DESCRIBE = pb.DescribeRequest()


class Scripted(pb_grpc.MasterServicer):
    """One master. `epoch` 0: a standby that names `leader`; else the leader of this epoch."""

    def __init__(self) -> None:
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc

        self.epoch, self.leader, self.n_calls = 0, "", 0
        self.error: Exception | None = None
        self._threads = ThreadPoolExecutor(16)
        self._server = grpc.server(self._threads, options=SERVER_OPTIONS)
        pb_grpc.add_MasterServicer_to_server(self, self._server)
        servicer = health.HealthServicer()
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Describe(self, request: Any, context: Any) -> pb.DescribeReply:
        self.n_calls += 1
        error = self.error
        if error is None and not self.epoch:
            error = MasterUnavailable("a standby")
            error.leader = self.leader
        if error is not None:
            status, text, metadata = status_of(error)  # type: ignore[arg-type]
            context.set_trailing_metadata(metadata)
            context.abort(status, text)
        return pb.DescribeReply(epoch=self.epoch, leader=self.address)

    def stop(self) -> None:
        self._server.stop(0).wait()
        self._threads.shutdown()


@pytest.fixture
def make() -> Iterator[Callable[[], Scripted]]:
    made: list[Scripted] = []

    def one() -> Scripted:
        made.append(Scripted())
        return made[-1]

    yield one
    for master in made:
        master.stop()


@pytest.fixture
def linked() -> Iterator[Callable[..., MasterLink]]:
    links: list[MasterLink] = []

    def one(*addresses: str) -> MasterLink:
        links.append(MasterLink(",".join(addresses), token=""))
        return links[-1]

    yield one
    for link in links:
        link.close()


def call(link: MasterLink, *, seconds: float = 3.0) -> Any:
    return link.call("Describe", DESCRIBE, deadline=time.monotonic() + seconds)


def test_an_answer_of_a_past_epoch_is_not_used(make: Callable[[], Scripted], linked: Callable[..., MasterLink]) -> None:
    a, b = make(), make()
    a.epoch = 5
    link = linked(a.address, b.address)
    assert call(link).epoch == 5
    a.epoch, b.epoch = 0, 4
    with pytest.raises(MasterUnavailable, match=r"epoch 4|no answer"):  # (which of the two was asked last is chance)
        call(link, seconds=2.0)
    assert b.n_calls > 0 and link.ask("Describe", DESCRIBE, deadline=time.monotonic() + 1) is None
    b.epoch = 6
    assert call(link).leader == b.address


def test_a_standby_s_word_is_followed_beyond_what_was_configured(
    make: Callable[[], Scripted], linked: Callable[..., MasterLink]
) -> None:
    standby, leader = make(), make()
    standby.leader, leader.epoch = leader.address, 1
    assert call(linked(standby.address)).leader == leader.address
    assert linked(standby.address).ask("Describe", DESCRIBE, deadline=time.monotonic() + 1).leader == leader.address


def test_two_standbys_that_name_each_other_end_with_the_deadline_and_few_calls(
    make: Callable[[], Scripted], linked: Callable[..., MasterLink]
) -> None:
    a, b = make(), make()
    a.leader, b.leader = b.address, a.address
    began = time.monotonic()
    with pytest.raises(MasterUnavailable, match="a standby"):
        call(linked(a.address, b.address), seconds=1.0)
    assert 0.9 < time.monotonic() - began < 1.6
    assert 4 <= a.n_calls + b.n_calls < 40


def test_one_that_nobody_listens_at_costs_no_time(make: Callable[[], Scripted], linked: Callable[..., MasterLink]) -> None:
    leader = make()
    leader.epoch = 1
    began = time.monotonic()
    assert call(linked(f"127.0.0.1:{free_port()}", leader.address)).epoch == 1
    assert time.monotonic() - began < 0.5


def test_a_store_that_is_away_is_said_at_once(make: Callable[[], Scripted], linked: Callable[..., MasterLink]) -> None:
    a, b = make(), make()
    a.error = StoreUnavailable("store: away")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="away"):
        call(linked(a.address, b.address))
    assert time.monotonic() - began < 1.0 and b.n_calls == 0


def test_calls_of_other_threads_survive_the_switch(make: Callable[[], Scripted], linked: Callable[..., MasterLink]) -> None:
    masters = [make(), make()]
    masters[0].epoch = 1
    link = linked(masters[0].address, masters[1].address)
    stop, errors, n_done = threading.Event(), [], [0] * 8

    def work(index: int) -> None:
        while not stop.is_set():
            try:
                call(link, seconds=5.0)
                n_done[index] += 1
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(n_done))]
    for thread in threads:
        thread.start()
    for epoch in range(2, 12):
        before = sum(n_done)
        leader, other = masters[epoch % 2], masters[1 - epoch % 2]
        other.leader, other.epoch = leader.address, 0
        leader.epoch = epoch
        while sum(n_done) < before + 50 and not errors:
            stop.wait(0.005)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
