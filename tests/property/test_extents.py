"""Two sizes of blocks press on each other's extents, in both tiers, while chains are put, got and written down.

An extent is emptied block by block, and one block that goes takes what hangs on it along: which may lie in the same extent."""

from __future__ import annotations

import random

import pytest

from tests.support.tables import Rig, chain, spec_of

SIZES = {1: 4096, 2: 20_000}  # block bytes of namespaces 1 and 2
TRIES_MAX = 30  # of one put
STEPS = 80


@pytest.mark.parametrize("seed", range(12))
def test_extents_are_emptied_whatever_hangs_on_their_blocks(seed: int) -> None:
    draw = random.Random(seed)
    rig = Rig(draw.choice((10, 15, 20, 30)), draw.choice((10, 20, 30, 40, 60)), specs=[spec_of(i, b) for i, b in SIZES.items()])
    for _ in range(STEPS):
        kind = draw.choice(("put", "put", "put", "put in a hurry", "get", "write down"))
        ns, start, n = draw.choice(list(SIZES)), draw.choice((0, 0, 0, 1, 3)), draw.randrange(1, 9)
        batch = chain(draw.choice("abcd"), start + n, start, ns=ns)
        if kind == "get":
            rig.get(batch)
        elif kind == "write down":
            rig.write_down(max_bytes=n * SIZES[1], rounds=n)
        for _ in range(TRIES_MAX if kind.startswith("put") else 0):
            reserved = rig.reserve(batch, [SIZES[ns]] * len(batch))
            if not reserved.must_wait or kind == "put in a hurry":
                rig.fill(reserved)
                rig.commit(reserved)
                break
            rig.table.abort([block for block in reserved.blocks if block is not None])
            rig.write_down(max_bytes=2 * SIZES[1], rounds=1)
        rig.check()
