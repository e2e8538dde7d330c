"""A master's election as a process of its own, to be killed and frozen: it writes all the time, whatever it thinks that it is.

Prints one JSON line a standing (`role`, `epoch`, `leader`) and one a write (`write`: "ok" or the error's name, `epoch`).
"""

from __future__ import annotations

import asyncio
import json
import sys

from kvpool.core.types import WorkerId
from kvpool.errors import KVPoolError
from kvpool.master.election import Elector
from kvpool.master.redis_store import RedisStore
from kvpool.master.store import WorkerRecord


async def main(url: str, name: str) -> None:
    store = RedisStore(url, master_id=name)
    elector = Elector(store, address=f"{name}:1")
    run = asyncio.create_task(elector.run())
    seen = None
    while not run.done():
        standing = elector.standing()
        if standing != seen:
            seen = standing
            print(json.dumps({"role": standing.role.value, "epoch": standing.epoch, "leader": standing.leader}), flush=True)
        if standing.role.value == "follower":
            await elector.changed(standing)
            continue
        try:
            await store.put_worker(WorkerRecord(WorkerId("w"), standing.epoch, name, "", "", 0, True))
            answer = "ok"
        except KVPoolError as error:
            answer = type(error).__name__
        print(json.dumps({"write": answer, "epoch": standing.epoch}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
