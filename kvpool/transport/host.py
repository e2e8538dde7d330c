"""Which processes can share memory: the host id. Owns nothing else; who compares host ids is `choose`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK_NAMESPACE = Path("/proc/self/ns/net")


@cache
def host_id() -> str:
    """Equal in two processes exactly when they run on the same booted kernel and in the same network namespace.

    Abstract unix sockets, over which memory is passed, live in a network namespace: two containers of one machine that do
    not share it have different host ids and talk TCP. Any thread may call it; the answer is kept. Raises OSError where /proc
    is not there.
    """
    boot = BOOT_ID.read_text(encoding="ascii").strip()
    return f"{boot}-{NETWORK_NAMESPACE.stat().st_ino}"
