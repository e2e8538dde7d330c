"""The state machines of the worker's table with the learned policy."""

from __future__ import annotations

from tests.property import test_blocks_machine, test_keeping_machine


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
