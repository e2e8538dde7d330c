"""Mooncake's API, call for call with its return codes, on real Mooncake and on kvpool. The table is in `contract_table`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.connectors.mooncake.contract_table import CRASH, DIFFERENT, NOT_OPEN, SAME
from tests.support.cluster import Cluster
from tests.support.mooncake import REAL_VENV, SECTIONS, contract_on_kvpool, contract_on_mooncake

Ask = Callable[[Sequence[str]], dict[str, Any]]


# Real Mooncake takes part where it was set up (`make setup-mooncake`).
SIDES = ["kvpool", "mooncake"] if (REAL_VENV / "bin" / "python").exists() else ["kvpool"]


@pytest.fixture(params=SIDES)
def side(request: pytest.FixtureRequest, make_cluster: Callable[..., Cluster]) -> tuple[int, Ask]:
    """Column of the table, and who answers the calls of a child process."""
    if request.param == "mooncake":
        return 0, contract_on_mooncake
    address = make_cluster(dram="256MiB").master_address
    return 1, lambda words: contract_on_kvpool(address, words)


def test_each_call_answers_as_in_the_table(side: tuple[int, Ask]) -> None:
    column, ask = side
    expected = SAME | {name: row[column] for name, row in DIFFERENT.items()}
    answers = ask(SECTIONS)
    wrong = {name: (answers.get(name), expected.get(name)) for name in answers.keys() | expected.keys()
             if name not in answers or answers[name] != expected.get(name)}  # fmt: skip
    assert not wrong, f"call: (answer, table)\n{wrong}"


def test_every_difference_is_one_and_has_a_reason() -> None:
    assert not SAME.keys() & DIFFERENT.keys()
    assert all(real != ours and reason for real, ours, reason in DIFFERENT.values())


@pytest.mark.parametrize("when", ["before", "after"])
def test_calls_without_an_open_store(side: tuple[int, Ask], when: str) -> None:
    """Real Mooncake crashes in most of them; kvpool answers."""
    column, ask = side
    if column:
        assert ask([when, *NOT_OPEN]) == {f"{when} the store is open: {name}": row[1] for name, row in NOT_OPEN.items()}
        return
    for name in ("batch_is_exist", "put_from", "close"):  # a whole Mooncake is started for each
        expected = NOT_OPEN[name][0]
        assert ask([when, name]) == ({} if expected == CRASH else {f"{when} the store is open: {name}": expected})
