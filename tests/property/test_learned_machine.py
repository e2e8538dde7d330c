"""The state machines of the worker's table with the learned policy, and what they found once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.property import test_blocks_machine, test_keeping_machine

ALL = 1 << 30


class LearnedBlocksMachine(test_blocks_machine.BlocksMachine):
    policy = "hazard"


class LearnedChainsMachine(test_blocks_machine.ChainsMachine):
    policy = "hazard"


class LearnedKeepingMachine(test_keeping_machine.KeepingMachine):
    policy = "hazard"


TestLearnedBlocks, TestLearnedChains = LearnedBlocksMachine.TestCase, LearnedChainsMachine.TestCase
TestLearnedKeeping = LearnedKeepingMachine.TestCase
TestLearnedBlocks.settings = test_blocks_machine.TestBlocks.settings
TestLearnedChains.settings = test_blocks_machine.TestChains.settings
TestLearnedKeeping.settings = test_keeping_machine.TestKeeping.settings


# (blocks of DRAM, of SSD, low watermark, namespaces) and what was done: ("put", chain, blocks or 0: as before, blocks a batch,
# bytes that are written down at a time), ("get", chain), ("time", ms), ("demote", bytes)
FOUND: dict[str, tuple[tuple[int, int, float, int], list[tuple[Any, ...]]]] = {
    "a put that waits for what the SSD tier refuses": (
        (100, 24, 1.0, 1), [("put", 7, 103, 3, 16384), ("put", 9, 38, 1, 16384), ("put", 7, 0, 400, ALL)],
    ),
    "a put that gets a slot each hundred rounds": (
        (100, 8, 0.5, 1), [("put", 0, 96, 1, ALL), ("get", 0), ("put", 1, 195, 400, 16384)],
    ),
    "a chain that goes while its next block waits": (
        (40, 80, 0.0, 3),
        [("put", 1, 131, 3, 16384), ("demote", 62434), ("put", 3, 11, 8, ALL), ("get", 1), ("time", 100),
         ("put", 5, 122, 400, 1), ("put", 1, 0, 1, ALL)],
    ),
    "the same below blocks of another use": (
        (40, 80, 0.5, 3),
        [("put", 0, 149, 400, 1), ("time", 60000), ("put", 0, 0, 400, ALL), ("time", 100), ("put", 0, 0, 1, ALL),
         ("put", 2, 41, 400, 16384), ("put", 0, 0, 1, ALL)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found_once(name: str) -> None:
    (n_dram, n_ssd, low, n_spaces), steps = FOUND[name]
    machine = LearnedChainsMachine()
    machine.start(n_dram=n_dram, n_ssd=n_ssd, low=low, n_spaces=n_spaces)
    for what, *rest in steps:
        if what == "put":
            chain, n, part, max_bytes = rest
            machine.chains[chain] = min(n, n_dram + n_ssd) or machine.chains[chain]
            machine.put(chain, part, max_bytes)
        elif what == "get":
            machine.rig.get(machine.whole(rest[0]))
        elif what == "time":
            machine.rig.now += rest[0]
        else:
            machine.demote(n_bytes=rest[0])
        machine.each_is_a_prefix()
