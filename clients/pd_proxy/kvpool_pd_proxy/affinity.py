"""Which node has seen which prefix, pure: chained digests of a prompt's pieces, and a bounded table of who computed them.

It is a guess about nodes' own caches: what is wrong in it costs a read from the pool or a computation, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

PIECE_BYTES: Final = 1024  # about two blocks of 128 tokens
PIECES_MAX: Final = 4096  # of one prompt; what lies behind does not tell sessions apart any more
DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Chain:
    """`digests[i]` stands for the prompt's first `ends[i]` bytes; `n_bytes` is all of the prompt."""

    digests: tuple[bytes, ...]
    ends: tuple[int, ...]
    n_bytes: int


def chain(root: bytes, segments: Iterable[bytes]) -> Chain:
    """`root`: what separates prompts altogether (model, salt, tools). Each segment (a message) ends a piece, so that the same
    segments give the same digests whatever follows them."""
    digest = blake2b(root, digest_size=DIGEST_BYTES).digest()
    digests: list[bytes] = []
    ends: list[int] = []
    at = 0
    for segment in segments:
        for i in range(0, len(segment), PIECE_BYTES):
            piece = segment[i : i + PIECE_BYTES]
            at += len(piece)
            if len(digests) < PIECES_MAX:
                digest = blake2b(piece, digest_size=DIGEST_BYTES, key=digest).digest()
                digests.append(digest)
                ends.append(at)
    return Chain(tuple(digests), tuple(ends), at)


class Affinity:
    """Least recently used prefixes go first. At most 64 nodes, by number."""

    def __init__(self, *, entries_max: int) -> None:
        self._max = entries_max
        self._nodes: OrderedDict[bytes, int] = OrderedDict()  # digest -> bits of the nodes that have it

    def __len__(self) -> int:
        return len(self._nodes)

    def matched(self, of: Chain, n_nodes: int) -> list[int]:
        """Bytes of the prompt that each node has seen from its start."""
        found, alive = [0] * n_nodes, (1 << n_nodes) - 1
        for digest, end in zip(of.digests, of.ends, strict=True):
            alive &= self._nodes.get(digest, 0)
            if not alive:
                break
            for node in range(n_nodes):
                if alive >> node & 1:
                    found[node] = end
        return found

    def record(self, of: Chain, node: int) -> None:
        """The node has computed this prompt."""
        for digest in reversed(of.digests):  # a chain's start is used last, so that its end goes first
            self._nodes[digest] = self._nodes.get(digest, 0) | 1 << node
            self._nodes.move_to_end(digest)
        while len(self._nodes) > self._max:
            self._nodes.popitem(last=False)

    def forget(self, node: int) -> None:
        """The node has lost its cache (it went away)."""
        keep = ~(1 << node)
        for digest, nodes in list(self._nodes.items()):
            if nodes & keep:
                self._nodes[digest] = nodes & keep
            else:
                del self._nodes[digest]
