"""How much this machine's network can carry, as the kernel says it."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path
from typing import Final

UNKNOWN_BYTES_PER_S: Final = 1_250_000_000  # 10 Gbit/s, where the kernel does not say (loopback, many virtual interfaces)
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR
_NETWORK: Final = Path("/sys/class/net")


def link_bytes_per_s(host: str) -> int:
    """Speed of the interface that has this IPv4 address, or of the fastest for a wildcard, in bytes a second; a guess where the
    kernel does not know it."""
    speeds = []
    for _, name in socket.if_nameindex():
        if name == "lo" or (host not in ("0.0.0.0", "::") and _address(name) != host):
            continue
        with contextlib.suppress(OSError, ValueError):
            megabits = int((_NETWORK / name / "speed").read_text())
            if megabits > 0:
                speeds.append(megabits * 125_000)
    return max(speeds, default=UNKNOWN_BYTES_PER_S)


def _address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        answer = fcntl.ioctl(sock, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""
