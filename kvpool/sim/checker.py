"""Judges the history of a run against the promises C1-C8 of the design, one leader an epoch, and the prefix rule.

Owns the history of operations (when begun, when answered, what) and the verdicts. What the world is at a moment is asked of
`World`; where a fault was in the way, and a promise did not apply or nobody can tell, nothing is said: a verdict is a bug.

    C1  a hit has the exact bytes of its key, and the key was put    C5  a get under a hold gives what was promised
    C2  no hit has a part of them                                    C6  a call ends by its deadline
    C3  what was answered `stored` is in the index, and found        C7  what a living worker, or its SSD, has is not lost
    C4  a held copy is not given up                                  C8  what was removed is not found any more
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvpool.core.types import Key, NamespaceUid, Outcome
from kvpool.sim.client import Got
from kvpool.sim.names import Names
from kvpool.sim.values import PARTS, bits_wrong, parts_right, value_of

SLACK_S: Final = 0.3  # that a call may end after its deadline: what its process still had to do
FLIPS_MAX: Final = 4  # bits of a block that rot in one run; more differ when a part is missing
SETTLE_S: Final = 0.05  # after a put is answered its worker may drop it at once: what is told takes this long to be seen


@dataclass(frozen=True, slots=True)
class Violation:
    promise: str
    text: str
    at_s: float
    key: Key | None


@dataclass(slots=True)
class Op:
    """One call of one client. `until_s`: its deadline. `holders`: per key, who could serve it when the call began."""

    client: str
    kind: str
    uid: NamespaceUid
    keys: Sequence[Key]
    begun_s: float
    until_s: float
    paused_before_s: float
    holders: dict[Key, list[Copy]] = field(default_factory=dict)
    ended: bool = False


class Copy(Protocol):
    """A block on a worker, as it was when the call began."""

    worker: str

    def readable_since(self, client: str, begun_s: float) -> bool:
        """It was there, its worker well and within reach of the client, and in the leader's index, all the time since."""
        ...


class World(Protocol):
    """What the checker asks."""

    def now_s(self) -> float: ...

    def size_of(self, key: Key) -> int:
        """Bytes of this block's value."""
        ...

    def workers_names(self) -> Sequence[str]:
        """Their names."""
        ...

    def paused_s(self, client: str) -> float:
        """How long this client stood still so far."""
        ...

    def copies(self, client: str, uid: NamespaceUid, key: Key) -> list[Copy]:
        """Copies that the leader's index names, on workers that serve the namespace and that this client thinks well of."""
        ...

    def trouble_since(self, since_s: float, *who: str) -> bool:
        """Whether a fault touched one of these (or the index as a whole) since then."""
        ...

    def expelled_since(self, key: Key, since_s: float) -> bool:
        """Whether a worker gave the block up (evicted, damaged) since then."""
        ...


class Checker:
    """`violations`: in the order found. `counts`: of operations by kind, and of checks that applied by promise."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[Violation] = []
        self.counts: dict[str, int] = {}
        self.open: dict[int, Op] = {}
        self._n = 0
        self._put_begun: dict[Key, float] = {}  # first time
        self._committed: dict[Key, float] = {}  # last time, anywhere
        self._removed: dict[Key, tuple[float, float]] = {}  # begun, answered; of the last that was confirmed by all
        self._remove_begun: dict[Key, float] = {}  # last time
        self.names = Names(lambda text: self.fail("C8", text, None))

    def fail(self, promise: str, text: str, key: Key | None) -> None:
        self.violations.append(Violation(promise, text, self._world.now_s(), key))

    def count(self, what: str, n: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + n

    # --- begin and end ----------------------------------------------------------------------------------------------------

    def begin(self, client: str, kind: str, uid: NamespaceUid, keys: Sequence[Key], *, until_s: float) -> Op:
        now = self._world.now_s()
        op = Op(client, kind, uid, keys, now, until_s, self._world.paused_s(client))
        self._n += 1
        self.open[self._n] = op
        if kind == "put":
            for key in keys:
                self._put_begun.setdefault(key, now)
        elif kind == "remove":
            for key in keys:
                self._remove_begun[key] = now
        elif kind in ("get", "get held"):
            op.holders = {key: self._world.copies(client, uid, key) for key in keys}
        self.count(kind)
        return op

    def ended(self, op: Op) -> None:
        """A call whose answer says nothing more."""
        self._end(op)

    def _end(self, op: Op) -> None:
        """C6."""
        op.ended = True
        self.open = {number: one for number, one in self.open.items() if one is not op}
        late_s = self._late_s(op)
        self.count("C6")
        if late_s > SLACK_S:
            self.fail("C6", f"{op.kind} of {op.client} ended {late_s:.3f} s after its deadline", op.keys[0] if op.keys else None)

    def _late_s(self, op: Op) -> float:
        paused = self._world.paused_s(op.client) - op.paused_before_s
        return self._world.now_s() - op.until_s - paused

    def abandon(self, client: str) -> None:
        """The client is gone, with its calls."""
        self.open = {number: op for number, op in self.open.items() if op.client != client}

    def finish(self) -> None:
        """Nothing will be answered any more."""
        for op in self.open.values():
            late_s = self._late_s(op)
            if late_s > SLACK_S:
                text = f"{op.kind} of {op.client}, begun at {op.begun_s:.3f} s, hangs {late_s:.3f} s after its deadline"
                self.fail("C6", text, op.keys[0] if op.keys else None)

    # --- what happened ----------------------------------------------------------------------------------------------------

    def committed(self, key: Key) -> None:
        """A worker made the block visible for a put."""
        self._committed[key] = self._world.now_s()

    def committed_since(self, key: Key, since_s: float) -> bool:
        return self._committed.get(key, -1.0) >= since_s

    def put_ended(self, op: Op, outcomes: Sequence[Outcome]) -> None:
        """C3: what is `stored` (or `already`) is in the index when the client hears it."""
        self._end(op)
        for key, outcome in zip(op.keys, outcomes, strict=True):
            self.count(f"put {outcome.value}")
            if outcome not in (Outcome.STORED, Outcome.ALREADY) or self.names.may_be_gone(op.uid):
                continue
            since = op.begun_s - SETTLE_S
            if self._remove_begun.get(key, -1.0) >= since or self._world.expelled_since(key, since):
                continue
            if self._world.trouble_since(since):
                continue
            self.count("C3 put")
            if not self._world.copies("", op.uid, key):
                self.fail("C3", f"put was answered {outcome.value}, and no worker that has the block is in the index", key)

    def get_ended(self, op: Op, got: Got, *, promised: int = 0) -> None:
        """C1, C2, C8 of every hit; C3, C5, C7 of the first miss. `promised`: leading blocks held for this get."""
        self._end(op)
        for key, value, size, path in zip(op.keys, got.values, got.sizes, got.paths, strict=False):
            self._check_hit(op, key, value, path)
            if size != self._world.size_of(key):
                self.fail("C1", f"get by {path} gave {size} bytes; the value has {self._world.size_of(key)}", key)
        n = len(got.values)
        self.count("C3 get", sum(1 for key in op.keys[:n] if op.holders[key]))
        self.count("C5", promised > 0)
        if n < len(op.keys):
            self.count(f"miss {got.cause.value if got.cause is not None else '?'}")
            self._check_miss(op, op.keys[n], got)
            if n < promised:
                self._check_promise(op, op.keys[n], got, n, promised)

    def _check_hit(self, op: Op, key: Key, value: bytes, path: str) -> None:
        self.count(f"hit {path[:3]}")
        if value != value_of(key):
            right = parts_right(key, value)
            if 0 < right < PARTS and bits_wrong(key, value) > FLIPS_MAX:
                self.fail("C2", f"get by {path} gave {right} of {PARTS} parts of the block", key)
            else:
                self.fail("C1", f"get by {path} gave other bytes than were put", key)
        if key not in self._put_begun:
            self.fail("C1", f"get by {path} gave a block that nobody put", key)
        elif key not in self._committed:
            self.fail("C2", f"get by {path} gave a block that was never committed", key)
        removed = self._removed.get(key)
        if removed is not None and op.begun_s >= removed[1]:
            self.count("C8")
            if self._committed.get(key, -1.0) < removed[0]:
                text = f"get by {path}, begun at {op.begun_s:.4f} s, gave a block that was removed for good at {removed[1]:.4f} s"
                self.fail("C8", text, key)

    def _check_miss(self, op: Op, key: Key, got: Got) -> None:
        if not got.complete or self.names.may_be_gone(op.uid) or self._world.now_s() >= op.until_s - SETTLE_S:
            return
        if self._remove_begun.get(key, -1.0) >= op.begun_s - SETTLE_S:
            return
        copies = op.holders.get(key, [])
        lost = [copy for copy in copies if not copy.readable_since(op.client, op.begun_s)]
        served = [copy.worker for copy in copies if copy not in lost]
        if served:
            cause = got.cause.value if got.cause is not None else "?"
            text = f"get missed ({cause}) a block that {', '.join(served)} had all the time"
            self.fail("C7" if lost else "C3", text, key)

    def _check_promise(self, op: Op, key: Key, got: Got, n: int, promised: int) -> None:
        if self._remove_begun.get(key, -1.0) >= 0 or self.names.may_be_gone(op.uid):
            return
        if self._world.now_s() >= op.until_s - SETTLE_S:
            return
        if not got.worker or not self._world.trouble_since(op.begun_s - 60.0, got.worker, op.client):
            cause = got.cause.value if got.cause is not None else "?"
            where = f"worker {got.worker!r}, which was well" if got.worker else "no worker named"
            self.fail("C5", f"{promised} blocks were promised, the get under the hold gave {n} ({cause}; {where})", key)

    def remove_ended(self, op: Op, outcomes: bytes | None) -> None:
        """`outcomes` None: it failed, and may have happened."""
        self._end(op)
        for key, outcome in zip(op.keys, outcomes or b"", strict=False):
            if outcome != 1:  # removed, or absent: every worker has confirmed
                self._removed[key] = op.begun_s, self._world.now_s()
                self.count("removed")

    # --- views ----------------------------------------------------------------------------------------------------------

    def view_left(self, op: Op, seen: Sequence[Sequence[bytes]], lost: str, *, taken: Op) -> None:
        """C4: `seen` [times][blocks]: what lay in the viewed memory. `lost`: what leaving the view said of it, "" when all was
        well: then all that was seen was right. `taken`: the call that took the view."""
        self._end(op)
        self.count("view lost" if lost else "view")
        if lost:
            stood_still = self._world.paused_s(op.client) > taken.paused_before_s
            if not stood_still and not self._world.trouble_since(taken.begun_s, op.client, *self._world.workers_names()):
                self.fail("C4", f"a view was lost though all was well: {lost}", op.keys[0])
            return
        for values in seen:
            for key, value in zip(op.keys, values, strict=False):
                self.count("viewed")
                if value != value_of(key):
                    self.fail("C4", "a view showed other bytes than were put, and was left as if all was well", key)

    # --- namespaces -----------------------------------------------------------------------------------------------------

    def deleted(self, op: Op, name: str, keys_of: Callable[[NamespaceUid], Sequence[Key]]) -> None:
        """Every worker has confirmed: what was in it is gone as if it was removed."""
        now = self._world.now_s()
        for uid in self.names.deleted(name, begun_s=op.begun_s, now_s=now):
            self.count("namespace deleted")
            for key in keys_of(uid):
                self._remove_begun[key] = max(op.begun_s, self._remove_begun.get(key, -1.0))
                self._removed[key] = op.begun_s, now

    def unknown_namespace(self, op: Op, error: str) -> None:
        """C3: a namespace that nobody deleted is there."""
        self._end(op)
        self.count(f"{op.kind} of no namespace")
        if not self.names.may_be_gone(op.uid):
            self.fail("C3", f"a {op.kind} was told that its namespace does not exist, and nobody deleted it: {error}", op.keys[0])

    def still_removed(self, key: Key) -> bool:
        """Removed for good, and not put since."""
        removed = self._removed.get(key)
        return removed is not None and self._committed.get(key, -1.0) < removed[0]
