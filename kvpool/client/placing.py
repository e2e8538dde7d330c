"""Which workers a client writes to: `core.placement` over the workers that the mirror keeps current, or the master's answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from kvpool.client.context import Context
from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.placement import place
from kvpool.core.types import HASH_BYTES, KEY_BYTES, Key, WorkerId
from kvpool.v1 import master_pb2 as pb

TARGETS_MAX: Final = 16  # workers that one put tries


def key_above(batch: KeyBatch) -> Key | None:
    """The key of the block above the batch's first one; None at a chain's root."""
    if not batch.chained or not batch.depth or not batch.keys:
        return None
    return batch.parent + batch.keys[HASH_BYTES:KEY_BYTES]


def targets(context: Context, spec: NamespaceSpec, *, key: Key, above: Key | None, parents: Collection[int], n_bytes: int,
            deadline: float) -> list[int]:  # fmt: skip
    """Peers to write a run to whose first key is `key`, best first. `above`: the key before it, `parents`: who has that."""
    if context.mirror is None or not context.mirror.connected:
        placed = _ask(context, spec, key=key, above=above, n_bytes=n_bytes, deadline=deadline)
        if placed:
            return placed
    found = context.peers.candidates()
    names = {WorkerId(context.peers.worker_id(peer)) for peer in parents}
    chosen = place([candidate for _, candidate in found.values()], key=key, parent_workers=names, host_id=context.host_id,
                   n_workers=TARGETS_MAX)  # fmt: skip
    return [found[candidate.worker_id][0].number for candidate in chosen]


def _ask(context: Context, spec: NamespaceSpec, *, key: Key, above: Key | None, n_bytes: int, deadline: float) -> list[int]:
    request = pb.PlaceRequest(namespace=spec.uid, keys=(above or b"") + key, host_id=context.host_id, bytes=n_bytes,
                              n_workers=TARGETS_MAX)  # fmt: skip
    reply = context.master.ask("Place", request, deadline=deadline)
    if reply is None:
        return []
    learn = context.peers.learn
    learned = [learn(i, state=i.state, free_bytes=i.free_bytes, capacity_bytes=i.capacity_bytes, up_ms=i.up_ms).number
               for i in reply.workers]  # fmt: skip
    return [number for number in learned if isinstance(context.peers.cost(number), int)]
