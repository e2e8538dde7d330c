"""Which releases of kvpool work together: the same major, minors at most one apart. So a pool is upgraded one process at a time.

Pure. Protocols have version numbers of their own (`frames.VERSIONS`, `session.SESSION_PROTOCOL`); those say what the bytes mean,
this says what was tested together. Who asks: the master (its workers' hello, its clients' user agent), workers and clients
(HELLO).
"""

from __future__ import annotations

import re
from typing import Final

from kvpool.errors import VersionMismatch

TEXT_MAX: Final = 64  # of a version that a peer tells
_FORM: Final = re.compile(r"(\d{1,9})\.(\d{1,9})(?:[.+-]?[0-9A-Za-z.+-]{0,40})?", re.ASCII)
_AGENT: Final = re.compile(r"(?:^|\s)kvpool/(\S{1,64})(?:\s|$)")


def parse(version: str) -> tuple[int, int] | None:
    """ "1.4.2rc1" -> (1, 4); None when it is no version."""
    match = _FORM.fullmatch(version) if len(version) <= TEXT_MAX else None
    return None if match is None else (int(match[1]), int(match[2]))


def work_together(one: str, other: str) -> bool:
    """Whether two releases may be in one pool."""
    a, b = parse(one), parse(other)
    return a is not None and b is not None and a[0] == b[0] and abs(a[1] - b[1]) <= 1


def check(peer: str, *, peer_name: str, own: str, own_name: str) -> None:
    """Raises VersionMismatch with both versions when a peer is too far from this build."""
    if not work_together(peer, own):
        shown = peer[:TEXT_MAX] if peer.isprintable() else repr(peer[:TEXT_MAX])
        raise VersionMismatch(
            f"version: the {peer_name} is kvpool {shown or 'of no version'}, this {own_name} is kvpool {own}; "
            "they work together when major is the same and minor at most one apart"
        )


def of_user_agent(agent: str) -> str | None:
    """The release in a user agent like "kvpool/0.1.0 grpc-python/1.62"; None: no kvpool client."""
    match = _AGENT.search(agent)
    return None if match is None else match[1]
