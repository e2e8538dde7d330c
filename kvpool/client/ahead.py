"""Has blocks brought near ahead of a get: asks the workers that have them. What comes of it is theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from kvpool.client.context import Context, pick
from kvpool.client.peers import STATE_DOWN
from kvpool.core.fetch import Candidates
from kvpool.core.keys import KeyBatch
from kvpool.core.spread import runs
from kvpool.core.types import Tiers
from kvpool.transport.base import LinkError

_FAST: Final = Tiers.DRAM | Tiers.DEVICE


def fetch_ahead(context: Context, batch: KeyBatch, places: Sequence[Candidates], *, deadline: float) -> int:
    """See `Namespace.prefetch`. `places`: of the leading blocks of the batch. -> how many of them some worker has."""
    spreading = context.spreading
    home = None if spreading is None else spreading.home()
    to_wake: dict[int, list[int]] = {}  # it is on SSD alone, here or (where no worker is of this host) elsewhere
    to_keep: dict[int, list[int]] = {}  # it has it in memory: asked for too, so that no room is made there at its cost
    to_copy: dict[int, list[int]] = {}
    for index, candidates in enumerate(places):
        peers = [(context.peers.get(number), tiers) for number, tiers in candidates]
        near = [(peer, tiers) for peer, tiers in peers if peer is not None and peer.local]
        far = [(peer, tiers) for peer, tiers in peers if peer is not None and not peer.local and peer.state != STATE_DOWN]
        if far and not near and home is not None:
            to_copy.setdefault(far[0][0].number, []).append(index)
        elif near or far:
            fast = next((peer for peer, tiers in near or far if tiers & _FAST), None)
            if fast is None:
                to_wake.setdefault((near or far)[0][0].number, []).append(index)
            else:
                to_keep.setdefault(fast.number, []).append(index)
    for number, indexes in to_wake.items():
        peer = context.peers.get(number)
        if peer is not None:
            part = pick(batch, sorted(indexes + to_keep.get(number, [])))
            with contextlib.suppress(LinkError):
                context.peers.call(peer, lambda link, until, part=part: link.prefetch(part, deadline=until), deadline=deadline)  # type: ignore[misc]
    for number, indexes in to_copy.items():
        peer = context.peers.get(number)
        for start, stop in runs(indexes) if peer is not None else ():
            assert spreading is not None and home is not None and peer is not None
            spreading.ask_copy(peer, batch.slice(start, stop), home.worker_id)
    return len(places)
