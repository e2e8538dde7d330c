"""Roles in tight places: control groups that limit memory or a disk, private mounts, a jumping clock. Most of it needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvpool
from tests.support.waiting import wait_until

CGROUPS = Path("/sys/fs/cgroup")
INSTALL_S = 180
FAKETIME = ("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1", "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1")


def private_mounts(script: str) -> tuple[str, ...]:
    """Prefix for a role: `script` (mounts) runs in a mount namespace of its own, then the role does. Skips without root."""
    tried = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespaces here: {tried.stderr.strip()}")
    return ("unshare", "-m", "--propagation", "private", "sh", "-ec", f'{script}; exec "$@"', "sh")


def in_group(group: Path) -> tuple[str, ...]:
    """Prefix for a role that shall live in this control group."""
    return ("sh", "-ec", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")


@contextmanager
def control_group(controller: str) -> Iterator[Path]:
    """An empty group of this controller (cgroup v1), removed at the end. Skips where none can be made."""
    group = CGROUPS / controller / f"kvpool-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no {controller} control group here: {error}")

    def gone() -> bool:
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()

    try:
        yield group
    finally:
        wait_until(gone, timeout_s=10, what=f"{group} can be removed")


def throttle(group: Path, directory: Path, *, read: int = 0, write: int = 0) -> None:
    """Bytes a second that the group may move to and from the disk below `directory`; 0: no limit. Skips where unknown."""
    device = os.stat(directory).st_dev  # noqa: PTH116
    for name, limit in (("read", read), ("write", write)):
        try:
            (group / f"blkio.throttle.{name}_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} {limit}")
        except OSError as error:
            pytest.skip(f"no throttling of {directory}: {error}")


def forget_modules() -> None:
    """What Python imports next comes from the disk: the compiled modules of the library, of all packages and of kvpool leave the
    page cache."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    for root in roots | {Path(kvpool.__file__).parent}:
        for path in root.rglob("*.pyc"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Clock:
    """Wall clocks of roles, moved by libfaketime. The monotonic clock stays the machine's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._library = _faketime()

    def env(self, name: str) -> Mapping[str, str]:
        """Environment of roles whose clock is `name`'s; it starts at the real time."""
        self.jump(name, "+0")
        return {
            "LD_PRELOAD": self._library,
            "FAKETIME_TIMESTAMP_FILE": str(self._directory / name),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, name: str, to: str) -> None:
        """From now on `name`'s clock shows the real time and `to`, like "+1h" or "-10y"."""
        fresh = self._directory / f"{name}.new"
        fresh.write_text(to + "\n")
        fresh.replace(self._directory / name)


def _faketime() -> str:
    def there() -> str | None:
        return next((path for path in FAKETIME if Path(path).exists()), None)

    if there() is None and shutil.which("apt-get") and os.geteuid() == 0:
        print("tests: libfaketime is missing; installing Debian's package libfaketime", file=sys.stderr, flush=True)
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "libfaketime"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, env=env, check=False, timeout=INSTALL_S, capture_output=True, stdin=subprocess.DEVNULL)
    return there() or pytest.skip("libfaketime cannot be installed here (apt-get install libfaketime)")
