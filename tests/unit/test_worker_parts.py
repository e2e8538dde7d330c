"""Small parts of the worker: what the kernel says of memory, and who waits to be listed."""

from __future__ import annotations

from pathlib import Path

from kvpool.worker.host_memory import available_bytes, cgroup_limit_bytes
from kvpool.worker.listed import Listed, Ticket


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_available_memory(tmp_path: Path) -> None:
    proc = tree(tmp_path, {"meminfo": "MemTotal: 100 kB\nMemAvailable:    42 kB\n"})
    assert available_bytes(proc) == 42 * 1024
    assert available_bytes(tmp_path / "nowhere") is None
    assert available_bytes(tree(tmp_path / "old", {"meminfo": "MemFree: 1 kB\n"})) is None


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/pod/box\n"})
    root = tree(tmp_path / "cg", {"pod/box/memory.max": "max\n", "pod/memory.max": "5000\n", "memory.max": "9000\n"})
    assert cgroup_limit_bytes(proc, root) == 5000


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/somewhere/not/mounted\n"})
    assert cgroup_limit_bytes(proc, tree(tmp_path / "cg", {"memory.max": "7000\n"})) == 7000


def test_version_1_and_no_limit(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"self/cgroup": "4:memory:/box\n1:cpu:/box\n0::/\n"})
    none = f"{2**63 - 4096}\n"
    root = tree(tmp_path / "cg", {"memory/box/memory.limit_in_bytes": "6000\n", "memory/memory.limit_in_bytes": none})
    assert cgroup_limit_bytes(proc, root) == 6000
    assert cgroup_limit_bytes(proc, tmp_path / "empty") is None


def test_waiters_are_settled_in_order_once_and_all_when_the_session_goes() -> None:
    listed, told = Listed(), []
    assert listed.wait(1, lambda ok: told.append(("early", ok))) is False  # no session: nobody waits
    listed.set_session(up=True)
    tickets = [listed.wait(mark, lambda ok, mark=mark: told.append((mark, ok))) for mark in (5, 3, 9, 4)]
    assert all(isinstance(ticket, Ticket) for ticket in tickets)
    listed.on_ack(4)
    assert told == [(3, True), (4, True)]
    listed.on_ack(2)  # an older one changes nothing
    assert listed.wait(4, told.append) is True
    assert isinstance(tickets[0], Ticket) and listed.give_up(tickets[0]) and not listed.give_up(tickets[0])
    listed.set_session(up=False)
    assert told == [(3, True), (4, True), (9, False)] and listed.n_waiting == 0
