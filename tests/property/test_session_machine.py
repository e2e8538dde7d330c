"""A worker's Reporter and a master's Inbox over a stream that breaks, with masters that forget: the master ends up with what the
worker has, and a mark that was reached means that the master knew everything recorded before it (C3)."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.core.session import Accept, Inbox, Report, Reporter
from kvpool.core.types import NamespaceUid

UID = NamespaceUid(b"u" * 16)
KEYS = [i.to_bytes(34, "big") for i in range(8)]


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.reporter = Reporter(report_keys=2, window_reports=3, pending_keys_max=5)
        self.truth: dict[bytes, int] = {}
        self.versions: dict[bytes, int] = {}  # how often each key was recorded
        self.marks: list[tuple[int, dict[bytes, int]]] = []
        self.epoch = 0
        self.up: deque[tuple[str, Any]] = deque()  # worker to master
        self.down: deque[int] = deque()  # acks back
        self.new_master()
        self.connect()

    def new_master(self) -> None:
        self.inbox = Inbox()
        self.index: dict[bytes, tuple[int, int]] = {}  # key -> (version, tiers)
        self.epoch += 1

    def connect(self) -> None:
        """A new stream: what was on the old one is lost."""
        self.up.clear()
        self.down.clear()
        if self.inbox.resume(self.reporter.next_seq):
            self.reporter.rewind()
            self.down.append(self.inbox.expected - 1)  # as the master does beside its Welcome
        else:
            self.inventory()

    def inventory(self) -> None:
        self.reporter.reset()
        next_seq = self.reporter.begin_inventory()
        whole = {key: (self.versions[key], tiers) for key, tiers in self.truth.items() if tiers}
        items = list(whole.items())
        half = len(items) // 2
        self.up.append(("part", (next_seq, True, False, dict(items[:half]))))
        self.up.append(("part", (next_seq, False, True, dict(items[half:]))))

    @rule(key=st.sampled_from(KEYS), tiers=st.integers(0, 3))
    def record(self, key: bytes, tiers: int) -> None:
        self.truth[key] = tiers
        self.versions[key] = self.versions.get(key, 0) + 1
        self.reporter.record(UID, key, tiers, None, self.versions[key])  # the size carries the version

    @rule()
    def mark(self) -> None:
        self.marks.append((self.reporter.mark(), dict(self.versions)))

    @rule(n=st.integers(1, 4))
    def send(self, n: int) -> None:
        for _ in range(n):
            if self.reporter.needs_inventory:
                self.inventory()
            report = self.reporter.take()
            if report is not None:
                self.up.append(("report", report))

    @precondition(lambda self: self.up)
    @rule(n=st.integers(1, 6))
    def receive(self, n: int) -> None:
        for _ in range(min(n, len(self.up))):
            kind, message = self.up.popleft()
            if kind == "report":
                self.receive_report(message)
                continue
            next_seq, first, last, entries = message
            if self.inbox.inventory_part(next_seq, first=first, last=last):
                self.index = ({} if first else self.index) | entries
                if last:
                    self.down.append(next_seq - 1)

    def receive_report(self, report: Report) -> None:
        accept = self.inbox.accept(report.seq)
        assert accept is not Accept.GAP  # a stream is ordered: only between two something is lost, and the hello tells
        if accept is Accept.OK:
            for batch in report.batches:
                for i, state in enumerate(batch.tiers):
                    version = int.from_bytes(batch.sizes[4 * i : 4 * i + 4], "little")
                    self.index[batch.keys[34 * i : 34 * i + 34]] = (version, state & 0x0F)
        if accept in (Accept.OK, Accept.DUPLICATE):
            self.down.append(self.inbox.expected - 1)

    @precondition(lambda self: self.down)
    @rule()
    def acknowledge(self) -> None:
        self.reporter.on_ack(self.down.popleft())

    @rule()
    def stream_breaks(self) -> None:
        self.connect()

    @rule()
    def master_restarts(self) -> None:
        self.new_master()
        self.marks = [mark for mark in self.marks if mark[0] > self.reporter.acked]  # those were kept by the master that is gone
        self.connect()

    @invariant()
    def reached_marks_are_known(self) -> None:
        for mark, versions in self.marks:
            if self.reporter.acked < mark or self.inbox.awaiting_inventory:
                continue
            for key, version in versions.items():
                known = self.index.get(key, (0, 0))
                # a later inventory leaves out what is gone by then
                assert known[0] >= version or (known == (0, 0) and not self.seen_gone(key, version))
        assert self.reporter.n_pending <= 5

    def seen_gone(self, key: bytes, version: int) -> bool:
        """Whether the key's newest state, at this version, is 'there': then the master must have it."""
        return self.versions[key] == version and bool(self.truth[key])

    def teardown(self) -> None:
        for _ in range(50):
            self.send(4)
            while self.up:
                self.receive(6)
            while self.down:
                self.acknowledge()
        assert self.reporter.next_seq > 0 and self.reporter.n_pending == 0
        there = {key: tiers for key, (_, tiers) in self.index.items() if tiers}
        assert there == {key: tiers for key, tiers in self.truth.items() if tiers}
        assert all(self.reporter.acked >= mark for mark, _ in self.marks)


SessionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSession = SessionMachine.TestCase
