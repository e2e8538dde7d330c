"""A long prompt that is computed in pieces, as the scheduler's half plans it: the report of other connectors that left holes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.cluster import Cluster

N_TOKENS, BLOCK, SIZE = 20_000, 16, 64
N_BLOCKS = N_TOKENS // BLOCK


@dataclass
class Request:
    """The fields of vLLM's Request that the connector reads."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int = N_TOKENS
    num_prompt_tokens: int = N_TOKENS
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: Any = None
    status: Any = field(default_factory=lambda: SimpleNamespace(name="FINISHED_STOPPED"))


class Blocks:
    """The engine's paged blocks, as far as a reference is counted."""

    def __init__(self) -> None:
        self.blocks = list(range(N_BLOCKS + 1))
        self.references = 0

    def touch(self, blocks: list[int]) -> None:
        self.references += len(blocks)

    def free_blocks(self, blocks: Iterator[int]) -> None:
        self.references -= len(list(blocks))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, dram="16MiB").start()
    yield cluster
    cluster.stop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # of what vLLM imports
@pytest.mark.parametrize("step", [2048, 1000, 7])
def test_B74_a_prompt_in_pieces_is_saved_whole_and_lookups_change_nothing(pool: Cluster, step: int) -> None:
    from kvpool.connectors.vllm.facts import EngineFacts
    from kvpool.connectors.vllm.identity import FIELDS, Identity
    from kvpool.connectors.vllm.link import PoolLink
    from kvpool.connectors.vllm.plan import SaveJob, StepReport
    from kvpool.connectors.vllm.scheduler import SchedulerHalf, _Tracked
    from kvpool.connectors.vllm.settings import ConnectorSettings

    identity = Identity.of({**dict.fromkeys(FIELDS, "x"), "model": f"m{step}"}, block_bytes=SIZE, block_tokens=BLOCK)
    facts = EngineFacts(identity, BLOCK, 1, 1, 1, 1)
    settings = ConnectorSettings(master=pool.master_address, deadline_ms=10_000)
    link = PoolLink(settings, identity, who="test")
    try:
        assert link.wait_ready(20_000) and link.namespace is not None
        namespace, engine_blocks = link.namespace, Blocks()
        half = SchedulerHalf(settings, facts, link, loads=True, saves=True, n_blocks=10 * N_BLOCKS)
        half.bind(engine_blocks)
        hashes = [sha256(b"%d of %d" % (i, step)).digest() for i in range(N_BLOCKS)]

        def save(jobs: list[SaveJob]) -> None:
            for job in jobs:
                values = np.zeros((len(job.block_ids), SIZE), np.uint8)
                assert namespace.put(job.hashes, values, deadline_ms=10_000).n_there == len(job.block_ids)
                half.reported(StepReport(released={job.job_id: 1}))

        def run(request: Request, *, start: int, end: int) -> None:
            """Computes these tokens step by step."""
            tables = SimpleNamespace(get_block_ids=lambda _name: [list(range(1, N_BLOCKS + 1))])
            at, new = start, True
            while at < end:
                n = min(step, end - at)
                output = SimpleNamespace(
                    total_num_scheduled_tokens=n, num_scheduled_tokens={request.request_id: n},
                    scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id, num_computed_tokens=at)] if new else [],
                    scheduled_cached_reqs=SimpleNamespace(req_ids=[] if new else [request.request_id],
                                                          num_computed_tokens=[] if new else [at]),
                    kv_connector_block_state=tables,
                )  # fmt: skip
                save(half.plan_step(output).saves)
                at, new = at + n, False
                request.num_computed_tokens = at

        head = Request("head", hashes[: 512 // BLOCK], num_tokens=512, num_prompt_tokens=512)
        half.arrived(head)
        assert [half.matched_tokens(head, 0) for _ in range(5)] == [0] * 5
        run(head, start=0, end=512)
        half.finished(head, [[]])
        assert namespace.wait(half._chain(_Tracked(head)), deadline_ms=10_000) == 512 // BLOCK

        whole = Request("whole", hashes)
        half.arrived(whole)
        assert [half.matched_tokens(whole, 0) for _ in range(5)] == [512] * 5
        half.allocated(whole, list(range(1, N_BLOCKS + 1)), 512)
        half.reported(StepReport(loaded={"whole": 1}))
        run(whole, start=512, end=N_TOKENS)
        half.finished(whole, [list(range(1, N_BLOCKS + 1))])
        chain = half._chain(_Tracked(whole))
        assert len(chain) == N_BLOCKS == namespace.wait(chain, deadline_ms=20_000)
        assert engine_blocks.references == 0, "blocks are still kept for saves that are done"
        again = Request("again", hashes)
        assert half.matched_tokens(again, 0) == (N_TOKENS - 1) // BLOCK * BLOCK
    finally:
        link.close()
