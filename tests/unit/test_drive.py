"""What a replay puts, in which order it asks, and when a dead role may be started again. No pool here."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvpool.cli.common import format_bytes, parse_size, parse_time_ms
from kvpool.cli.drive import Contents, Order, Tally, layout_of, merge
from kvpool.cli.pool import PoolPlan, words_of
from kvpool.cli.up import Restarts
from kvpool.core.types import Outcome, Tier
from kvpool.errors import ConfigError, InvalidArgument
from kvpool.sim.traces import Request


def filled(contents: Contents, *ids: int) -> np.ndarray:
    out = np.zeros((len(ids), contents.block_bytes), dtype=np.uint8)
    contents.fill(np.array(ids, dtype=np.uint64), out)
    return out


@pytest.mark.parametrize("block_bytes", [1, 7, 8, 4096, 5003])
def test_contents_are_the_ids_own_in_every_word(block_bytes: int) -> None:
    contents = Contents(block_bytes)
    rows = filled(contents, 0, 1, 2, 2**64 - 1)
    assert np.array_equal(rows, filled(Contents(block_bytes), 0, 1, 2, 2**64 - 1))
    assert np.array_equal(rows[2], filled(contents, 2)[0])  # a block's bytes do not depend on its neighbours
    if block_bytes >= 8:
        words = rows[:, : block_bytes // 8 * 8].copy().view(np.uint64)
        for i in range(4):
            assert not (words[i] == 0).any()
            assert all((words[i] != words[j]).all() for j in range(i))  # no word is another id's word in that place
        assert len(np.unique(words)) == words.size  # nor, here, any word anywhere: moved bytes are noticed


def test_two_ids_never_share_a_seed() -> None:
    ids = [0, 1, 2**63, 2**64 - 1, *range(1000, 3000)]
    assert len({row.tobytes() for row in filled(Contents(8), *ids)}) == len(ids)


@pytest.mark.parametrize("block_bytes", [1, 4097, 16384, 1 << 20, 4 << 20])
def test_the_layout_has_blocks_of_exactly_that_size(block_bytes: int) -> None:
    assert layout_of(block_bytes).block_bytes == block_bytes
    assert not layout_of(block_bytes).is_opaque


def test_a_size_without_a_layout_is_refused_by_its_option() -> None:
    with pytest.raises(InvalidArgument, match="--block-bytes"):
        layout_of((1 << 20) + 1)


def request(*ids: int, at_ms: float = 0.0) -> Request:
    return Request(at_ms, 1, 1, ids)


def test_a_request_waits_for_one_in_flight_with_its_first_id_and_keeps_its_place() -> None:
    trace = [request(1, 2), request(5), request(1, 3), request(6)]
    order = Order(trace, speed=None)
    assert [order.take(), order.take()] == trace[:2]
    taken: list[Request | None] = []
    other = threading.Thread(target=lambda: taken.extend([order.take(), order.take()]))
    other.start()
    order.done(trace[1])  # not the one that is waited for
    other.join(timeout=0.05)
    assert other.is_alive() and taken == []  # the last one could start, but it comes after the one that waits
    order.done(trace[0])
    other.join(timeout=10)
    assert taken == trace[2:]
    assert order.take() is None


def test_requests_without_blocks_wait_for_nobody_and_stop_ends_all() -> None:
    order = Order([request(), request(), request(1), request(1)], speed=None)
    assert order.take() is not None and order.take() is not None and order.take() is not None
    ended: list[object] = []
    waiting = threading.Thread(target=lambda: ended.append(order.take()))
    waiting.start()
    order.stop()
    waiting.join(timeout=10)
    assert ended == [None]


def test_with_a_speed_a_request_does_not_start_before_its_time() -> None:
    order = Order([request(1, at_ms=100), request(2, at_ms=160_100)], speed=1000)  # 160 ms apart at that speed
    order.take()
    ended: list[object] = []
    waiting = threading.Thread(target=lambda: ended.append(order.take()))
    waiting.start()
    waiting.join(timeout=0.1)
    assert waiting.is_alive()
    waiting.join(timeout=10)
    assert len(ended) == 1


def test_tallies_add_up() -> None:
    a, b = Tally(n_requests=1, n_blocks=4), Tally(n_requests=2, n_blocks=6, get_ms=[1.0, 3.0])
    a.hits[Tier.DRAM], b.hits[Tier.SSD], b.outcomes[Outcome.STORED], a.outcomes[Outcome.ALREADY] = 2, 1, 5, 2
    a.error("same words")
    a.error("same words")
    facts = merge([a, b]).to_json(block_bytes=10)
    assert (facts["requests"], facts["blocks"], facts["hit_blocks"], facts["hit_rate"]) == (3, 10, 3, 0.3)
    assert facts["hits_by_tier"] == {"device": 0, "dram": 2, "ssd": 1}
    assert (facts["stored_blocks"], facts["bytes_put"], facts["bytes_get"], facts["errors"]) == (5, 50, 30, 2)
    assert facts["get_ms"]["p50"] == 2.0
    assert a.error_words == ["same words"]
    assert merge([a]).failed and not merge([b]).failed


def test_a_role_is_started_again_five_times_a_minute_at_most() -> None:
    budget = Restarts(5)
    for second in range(5):
        assert budget.wait_s(float(second)) == 0
        budget.note(float(second))
    assert budget.wait_s(10.0) == 50.0
    assert budget.wait_s(59.9) == pytest.approx(0.1)
    assert budget.wait_s(60.0) == 0  # the first one is a minute ago
    budget.note(60.0)
    assert budget.wait_s(60.5) == pytest.approx(0.5)
    assert Restarts(0).wait_s(0.0) is None


def test_sizes_and_times_name_their_option() -> None:
    assert parse_size("1.5KiB", option="--dram") == 1536
    assert parse_time_ms("2s", option="--deadline") == 2000
    for text in ("", "x", "-5", "0", "5 apples"):
        with pytest.raises(ConfigError, match=r"^--dram: "):
            parse_size(text, option="--dram")
    assert [format_bytes(n) for n in (512, 1536, 1 << 20, 3 << 40)] == ["512 B", "1.5 KiB", "1 MiB", "3.0 TiB"]


def test_the_plan_of_a_pool_gives_each_worker_directories_of_its_own(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = PoolPlan(n_workers=2, dram_bytes=1 << 20, data_dir=tmp_path, ssd_dir=tmp_path / "ssd", ssd_bytes=7)
    places = [plan.worker_args(i, master="m:1") for i in range(2)]
    assert [args[args.index("--ssd") + 1] for args in places] == [f"{tmp_path}/ssd/worker-{i}:7" for i in range(2)]
    assert places[0][places[0].index("--data-dir") + 1] != places[1][places[1].index("--data-dir") + 1]
    assert words_of(-9) == "was ended by SIGKILL"
