"""How much memory this process may use: what the kernel says is available, and the limits of its control groups.

Reads /proc and /sys; decides nothing (`config.check_memory` does).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60  # cgroup v1 writes a huge number where there is no limit


def available_bytes(proc: Path = PROC) -> int | None:
    """MemAvailable; None where the kernel does not say."""
    try:
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def cgroup_limit_bytes(proc: Path = PROC, root: Path = CGROUP_ROOT) -> int | None:
    """The smallest memory limit of this process's control groups and those above them, v2 and v1; None: there is none."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            found += _limits(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits(root / "memory", path, "memory.limit_in_bytes")
    return min(found, default=None)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """Limits along `path` from its end up to the root (a container sees its own group at the root)."""
    found = []
    at = root / path.lstrip("/")
    while True:
        try:
            limit = int((at / name).read_text(encoding="ascii"))
            if limit < _UNLIMITED:
                found.append(limit)
        except (OSError, ValueError):  # not there, or "max"
            pass
        if at == root or root not in at.parents:
            return found
        at = at.parent
