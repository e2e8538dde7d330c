"""Leak checks of the test process: descriptors (memfds among them), threads and children, before against after."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import wait_until

# gRPC's core keeps its pollers for the life of the process; terminals and random devices are opened once by libraries.
KEPT_PREFIXES = ("anon_inode:", "/dev/")
SETTLE_S = 5.0  # closing channels and pools ends in the background


@dataclass(frozen=True)
class Snapshot:
    fds: frozenset[tuple[int, str]]
    threads: frozenset[int]
    children: frozenset[int]


def children_of(pid: int) -> set[int]:
    """Pids of the direct children of `pid` that have not ended (zombies are a leak, so they count)."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found |= {int(word) for word in (task / "children").read_text().split()}
    return found


def _fds() -> frozenset[tuple[int, str]]:
    fds = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if not target.startswith(KEPT_PREFIXES):
                fds.add((int(entry.name), target))
    return frozenset(fds)


def snapshot() -> Snapshot:
    """What this process has open and running now."""
    threads = frozenset(thread.ident or 0 for thread in threading.enumerate())
    return Snapshot(_fds(), threads, frozenset(children_of(os.getpid())))


def leaked(before: Snapshot) -> list[str]:
    """What is there now and was not at `before`, in words."""
    now = snapshot()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [f"fd {fd} -> {target}" for fd, target in sorted(now.fds - before.fds)]
    found += [f"thread {names.get(ident, ident)}" for ident in now.threads - before.threads]
    return found + [f"child {pid}" for pid in now.children - before.children]


def assert_no_leaks(before: Snapshot, *, settle_s: float = SETTLE_S) -> None:
    """AssertionError with the list when something is still there after `settle_s`."""
    if not leaked(before):
        return
    gc.collect()
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not leaked(before), timeout_s=settle_s)
    left = leaked(before)
    assert not left, "left behind by the test: " + "; ".join(left)
