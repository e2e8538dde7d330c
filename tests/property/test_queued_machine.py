"""The state machines of the worker's table with the textbook's policies that count uses."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvpool.core.policy.queued import QUEUED
from tests.property import test_blocks_machine, test_keeping_machine

MACHINES = (test_blocks_machine.BlocksMachine, test_blocks_machine.ChainsMachine, test_keeping_machine.KeepingMachine)
SETTINGS = settings(max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("policy", sorted(QUEUED))
def test_machine(policy: str, machine: type[test_blocks_machine.BlocksMachine]) -> None:
    run_state_machine_as_test(type(machine.__name__, (machine,), {"policy": policy}), settings=SETTINGS)
