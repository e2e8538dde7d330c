"""The scrubber on real memory and real files: what rots is found, counted and dropped, and nothing else is touched."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.core.scrub import Sweep
from kvpool.core.types import BlockCode, MissCause, Tiers, miss_code
from kvpool.worker.scrub import Scrubber
from kvpool.worker.tiers.slab_file import decode_header, file_number
from tests.support.payload import payload
from tests.support.waiting import wait_until
from tests.support.worker_node import WorkerNode, blocks_of, chain

MIB = 1 << 20
Make = Callable[..., WorkerNode]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[WorkerNode] = []

    def worker(**settings: Any) -> WorkerNode:
        made.append(WorkerNode(tmp_path / f"w{len(made)}", **({"scrub_bytes_per_s": 0} | settings)))
        return made[-1]

    yield worker
    for one in made:
        one.close()


@pytest.fixture
def scrub() -> Iterator[Callable[[WorkerNode], Scrubber]]:
    """A scrubber at full speed beside the node's own, which is off."""
    made: list[Scrubber] = []

    def start(worker: WorkerNode, *, bytes_per_s: int = 1 << 40) -> Scrubber:
        made.append(Scrubber(worker.node, bytes_per_s=bytes_per_s, pass_s_min=0.0, cpu_share=0.9))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        assert one.stop(timeout_s=5)


def passed(scrubber: Scrubber, *tiers: str, n: int = 2) -> dict[str, Any]:
    """What it says after n more passes over each tier (the first of them may have begun before)."""
    before = scrubber.facts()
    wait_until(lambda: all(scrubber.facts()[t]["passes"] >= before[t]["passes"] + n for t in tiers), timeout_s=30)
    return scrubber.facts()


def test_a_flipped_bit_in_memory_is_found_and_the_block_is_a_miss(make: Make, scrub: Callable[..., Scrubber]) -> None:
    worker = make()
    spec = worker.fixed_namespace()
    batch, blocks = chain(spec, "a", 50), blocks_of(spec, "a", 50)
    with worker.unix() as client:
        assert set(client.write(batch, blocks, chunk_bytes=spec.chunk_bytes)) == {BlockCode.STORED}
        block = worker.node.table.spaces[spec.uid].blocks[batch.split()[17]]
        view = worker.node.dram.view(spec.uid, worker.node.offset(block), block.size)
        view[block.size - 1] ^= 4
        view.release()
        facts = passed(scrub(worker), "dram")["dram"]
        assert facts["corrupt"] == 1 and facts["blocks"] >= 50 and facts["bytes"] >= 50 * spec.block_bytes
        assert facts["last_pass_ended"] == pytest.approx(time.time(), abs=60)
        answer, got = client.read(batch)
        codes = answer.entries["code"].tolist()
        assert codes[17] == miss_code(MissCause.CORRUPT) and codes.count(BlockCode.HIT_INLINE) == 49
        assert got == b"".join(data for i, data in enumerate(blocks) if i != 17)
        assert worker.node.stat()["counters"]["corrupt_dram"] == 1


def test_bits_flipped_on_disk_cost_exactly_the_blocks_that_they_hit(make: Make, scrub: Callable[..., Scrubber],
                                                                    tmp_path: Path) -> None:  # fmt: skip
    directory = tmp_path / "ssd"
    worker = make(dram=2 * MIB, ssd=f"{directory}:64MiB")
    spec, n = worker.fixed_namespace(), 500
    with worker.unix() as client:
        for at in range(0, n, 50):
            batch = chain(spec, "a", 50, start=at)
            codes = client.write(batch, blocks_of(spec, "a", 50, start=at), chunk_bytes=spec.chunk_bytes)
            assert set(codes) == {BlockCode.STORED}
        scrubber = scrub(worker)
        assert passed(scrubber, "dram", "ssd")["ssd"]["corrupt"] == 0
        scrubber.stop(timeout_s=5)
        hit = flip_slots(worker, directory, random.Random(1), n_bits=300)
        assert len(hit) > 100
        facts = passed(scrub(worker), "ssd")["ssd"]
        assert facts["corrupt"] == worker.node.table.counters["corrupt_ssd"] == len(hit)
        whole = chain(spec, "a", n)
        alone = {key for key in hit if key not in keys_in(worker, Tiers.DRAM)}
        tiers = dict(zip(whole.split(), client.touch(whole).codes, strict=True))
        assert {key for key, tier in tiers.items() if not tier} == alone
        for at in range(0, n, 50):
            batch = chain(spec, "a", 50, start=at)
            answer, got = client.read(batch)
            kept = [i for i, code in enumerate(answer.entries["code"].tolist()) if code == BlockCode.HIT_INLINE]
            assert got == b"".join(payload(f"a/{at + i}", 1, spec.block_bytes) for i in kept)
    worker.node.table.check()


def flip_slots(worker: WorkerNode, directory: Path, chance: random.Random, *, n_bits: int) -> set[bytes]:
    """Flips bits in random slots that have blocks; the keys of those."""
    table = worker.node.table
    assert table.ssd is not None
    with worker.node.lock:
        copies = []
        sweep = Sweep(Tiers.SSD)
        while not sweep.passes:
            copies += sweep.take(table, MIB)
    files = {file_number(path.name): path for path in directory.glob("slab-*.kv")}
    chosen = {copy.slot: copy for copy in chance.choices(copies, k=n_bits)}
    for slot, copy in chosen.items():
        path = files[slot >> 32]
        with path.open("r+b") as file:
            geometry = decode_header(file.read(4096), number=slot >> 32).geometry
            at = geometry.slot_offset(slot & 0xFFFFFFFF) + chance.randrange(copy.size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return {copy.block.key for copy in chosen.values()}


def keys_in(worker: WorkerNode, tier: Tiers) -> set[bytes]:
    with worker.node.lock:
        return {key for space in worker.node.table.spaces.values() for key, b in space.blocks.items() if b.tiers & tier}


def test_it_goes_no_faster_than_it_is_told(make: Make, scrub: Callable[..., Scrubber]) -> None:
    worker = make()
    spec = worker.namespace(block_bytes=MIB)
    with worker.unix() as client:
        client.write(chain(spec, "a", 16), blocks_of(spec, "a", 16), chunk_bytes=spec.chunk_bytes)
    began = time.monotonic()
    scrubber = scrub(worker, bytes_per_s=16 * MIB)
    facts = wait_until(lambda: (f := scrubber.facts()["dram"])["passes"] and f, timeout_s=10)
    took = time.monotonic() - began
    assert took > 0.8
    assert 16 * MIB <= facts["bytes"] <= (took + 0.1) * 16 * MIB, "a pass that ended has read all, and no more than it may"
    slow = scrub(worker, bytes_per_s=1)
    wait_until(lambda: slow.facts()["dram"]["blocks"])
    began = time.monotonic()
    assert slow.stop(timeout_s=5)
    assert time.monotonic() - began < 1.0, "a pause ends when it is stopped"


def test_it_works_while_blocks_come_and_go_and_calls_nothing_corrupt(make: Make, scrub: Callable[..., Scrubber],
                                                                     tmp_path: Path) -> None:  # fmt: skip
    worker = make(dram=2 * MIB, ssd=f"{tmp_path / 'ssd'}:8MiB")
    spec = worker.fixed_namespace()
    scrubbers = [scrub(worker) for _ in range(3)]
    with worker.unix() as client:
        for i in range(60):
            batch, blocks = chain(spec, f"n{i}", 40), blocks_of(spec, f"n{i}", 40)
            client.write(batch, blocks, chunk_bytes=spec.chunk_bytes)
            answer, _ = client.read(chain(spec, f"n{i // 2}", 40))
            assert miss_code(MissCause.CORRUPT) not in answer.entries["code"].tolist()
            if i % 5 == 0:
                worker.node.drop(batch)
    assert worker.node.table.counters["evicted"] > 0 and all(one.facts()["ssd"]["blocks"] for one in scrubbers)
    facts = [told for one in scrubbers for told in one.facts().values()]
    assert sum(told["corrupt"] for told in facts) == 0
    with worker.node.lock:
        worker.node.table.check()


def test_the_nodes_own_scrubber_runs_by_default_and_is_told_of(make: Make) -> None:
    worker = make(scrub_bytes_per_s=64 * MIB)
    assert wait_until(lambda: worker.node.stat()["scrub"]["dram"]["passes"]) == 1
    off = make()
    assert off.node.stat()["scrub"]["dram"]["passes"] == 0
