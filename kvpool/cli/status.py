"""`kvpool status`: the cluster at a glance, as the master sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.cli.ask import WORKER_STATES, master_at
from kvpool.cli.common import (
    DeadlineOption,
    JsonOption,
    MasterOption,
    TokenFileOption,
    format_bytes,
    print_json,
    table,
)
from kvpool.cli.drain import drain_json, words_of
from kvpool.cli.ns import pin_words, quota_words

if TYPE_CHECKING:
    from kvpool.v1 import master_pb2 as pb


def status(
    master: MasterOption = None,
    token_file: TokenFileOption = None,
    deadline: DeadlineOption = "5s",
    json: JsonOption = False,
) -> None:
    """Workers, their tiers, namespaces and the size of the index."""
    from kvpool.v1 import master_pb2 as pb

    with master_at(master, token_file=token_file, deadline=deadline) as asked:
        facts = status_json(asked.call("Describe", pb.DescribeRequest()))
    if json:
        print_json(facts)
        return
    rebuilding = "" if facts["complete"] else "; the index is being rebuilt"
    leader, n_replicas = facts["leader"] or asked.address, facts["index"]["replicas"]
    print(f"master {leader}, epoch {facts['epoch']}, {n_replicas} replicas indexed{rebuilding}\n")
    table(("WORKER", "STATE", "ADDRESS", "TIER", "USED", "OF", "BLOCKS", "TIER STATE"), _worker_rows(facts), empty="no workers")
    for worker in facts["workers"]:
        if worker["drain"] is not None:
            print(f"{worker['id']}: {words_of(worker)}")
    print()
    rows = [
        (n["name"], format_bytes(n["block_bytes"]), n["blocks"], format_bytes(n["bytes"]), quota_words(n), pin_words(n))
        for n in facts["namespaces"]
    ]
    table(("NAMESPACE", "BLOCK", "BLOCKS", "BYTES", "QUOTA USED", "PINS"), rows, empty="no namespaces")


def status_json(reply: pb.DescribeReply) -> dict[str, Any]:
    """The answer of Describe as `kvpool status --json` prints it; always in the same order."""
    from kvpool.client.client import keeping_of

    workers = []
    for worker in sorted(reply.workers, key=lambda worker: worker.info.worker_id):
        info = worker.info
        tiers = {
            tier.tier: {
                "capacity_bytes": tier.capacity_bytes,
                "used_bytes": tier.used_bytes,
                "blocks": tier.blocks,
                "state": tier.state,
            }
            for tier in worker.tiers
        }
        state = WORKER_STATES[info.state] if info.state < len(WORKER_STATES) else "unknown"
        workers.append(
            {
                "id": info.worker_id,
                "incarnation": f"{info.incarnation:016x}",
                "state": state,
                "host": info.host_id,
                "address": info.address,
                "http": worker.http,
                "pid": worker.pid,
                "version": worker.version,
                "tiers": tiers,
                "drain": drain_json(worker),
            }
        )
    namespaces = [
        {
            "name": entry.namespace.name,
            "tenant": "",  # tenants come with their own issue of the protocol
            "block_bytes": entry.namespace.block_bytes,
            "blocks": entry.blocks,
            "bytes": entry.bytes,
            **keeping_of(entry),
        }
        for entry in sorted(reply.namespaces, key=lambda entry: entry.namespace.name)
    ]
    return {
        "epoch": reply.epoch,
        "leader": reply.leader,
        "complete": reply.complete,
        "workers": workers,
        "namespaces": namespaces,
        "index": {"replicas": reply.replicas, "bytes": reply.index_bytes},
    }


def _worker_rows(facts: dict[str, Any]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for worker in facts["workers"]:
        name: tuple[object, ...] = (worker["id"], worker["state"], worker["address"])
        for tier, n in worker["tiers"].items() or [("-", None)]:
            if n is None:
                rows.append((*name, "-", "-", "-", "-", "-"))
                continue
            rows.append((*name, tier, format_bytes(n["used_bytes"]), format_bytes(n["capacity_bytes"]), n["blocks"], n["state"]))
            name = ("", "", "")
    return rows
