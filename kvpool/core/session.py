"""A worker's reports to the master: order, acknowledgement, resync. Both ends, pure.

The worker's `Reporter` turns changes of blocks into numbered reports; the master's `Inbox` accepts them in order, once. Applying
a report to the index is `catalog`; the stream itself is `worker.agent` and `master.session`.

    record record record ─▶ pending (one entry a key, latest state) ─▶ take ─▶ in flight (numbered, kept as sent) ─▶ on_ack
                                                                    ▲ rewind: a new stream sends the same reports again

What was sent is sent again byte for byte, never merged with newer changes: the master may have applied it already. What cannot be
told as a list of changes (a gap, a new master, more changes than are kept) is told as a whole inventory, after which numbers go
on above everything that was promised before.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvpool.core.types import CAUSE_CODES, CAUSES, Key, MissCause, NamespaceUid

SESSION_PROTOCOL: Final = 1  # of WorkerHello; a master refuses another one
REPORT_KEYS: Final = 4096  # keys in one report: bounds what one report can cost the master's loop (a few ms)
WINDOW_REPORTS: Final = 64  # reports in flight: beyond, changes wait and merge
PENDING_KEYS_MAX: Final = 262_144  # changed keys kept while the master is away: beyond, an inventory is cheaper to keep

_TIER_BITS: Final = 0x0F


def pack_state(tiers: int, cause: MissCause | None = None) -> int:
    """One block's state in a report, u8: its tiers, or 0 with the cause of its going in the high 4 bits."""
    if tiers:
        return tiers & _TIER_BITS
    return 0 if cause is None else (1 + CAUSE_CODES[cause]) << 4


def unpack_cause(state: int) -> MissCause | None:
    """The cause in a report's u8 (None: the block is there, or nothing was said)."""
    index = (state >> 4) - 1
    if state & _TIER_BITS or index < 0:
        return None
    return CAUSES[index] if index < len(CAUSES) else MissCause.UNKNOWN


@dataclass(frozen=True, slots=True)
class ReportBatch:
    """Changes within one namespace, packed: keys [n * 34], states u8 [n] (`pack_state`), sizes u32 little-endian [n]."""

    namespace: NamespaceUid
    keys: bytes
    tiers: bytes
    sizes: bytes


@dataclass(frozen=True, slots=True)
class Report:
    seq: int
    batches: tuple[ReportBatch, ...]


class Reporter:
    """Worker side. Called under the node's lock; does no I/O and keeps no clock.

    A put may be answered "listed" when `acked >= mark()`, the mark taken after its blocks were recorded.
    """

    __slots__ = (
        "_acked",
        "_flight",
        "_marked",
        "_next_seq",
        "_pending",
        "_pending_keys_max",
        "_report_keys",
        "_unsent",
        "_window",
        "needs_inventory",
        "overflows",
    )

    def __init__(
        self,
        *,
        report_keys: int = REPORT_KEYS,
        window_reports: int = WINDOW_REPORTS,
        pending_keys_max: int = PENDING_KEYS_MAX,
    ) -> None:
        self._report_keys = report_keys
        self._window = window_reports
        self._pending_keys_max = pending_keys_max
        self._pending: dict[tuple[NamespaceUid, Key], tuple[int, int]] = {}
        self._flight: deque[Report] = deque()  # taken, not acknowledged
        self._unsent: deque[Report] = deque()  # of these, to be sent again on a new stream
        self._next_seq = 1
        self._acked = 0
        self._marked = 0
        self.needs_inventory = True  # set: nothing is taken until an inventory was begun
        self.overflows = 0

    @property
    def acked(self) -> int:
        """All reports up to this one are in the master's index."""
        return self._acked

    @property
    def n_pending(self) -> int:
        return len(self._pending)

    @property
    def next_seq(self) -> int:
        """For WorkerHello: the report that a new stream would begin with; 0 says that only an inventory will do."""
        if self.needs_inventory:
            return 0
        return self._flight[0].seq if self._flight else self._next_seq

    def record(self, uid: NamespaceUid, key: Key, tiers: int, cause: MissCause | None, size: int) -> None:
        """The block's tiers are now these (0: gone, by `cause`). A later call for the same key replaces an unsent one."""
        if self.needs_inventory:
            return  # the inventory will have it
        if len(self._pending) >= self._pending_keys_max and (uid, key) not in self._pending:
            self.mark()  # nothing that was promised is lost: the inventory's number lies above every mark
            self._pending.clear()
            self.needs_inventory = True
            self.overflows += 1
            return
        self._pending[uid, key] = (pack_state(tiers, cause), size)

    def mark(self) -> int:
        """The number that will cover everything recorded so far, once acknowledged."""
        if self.needs_inventory:
            return max(self._marked, self._next_seq - 1) + 1  # the inventory's own
        seq = self._next_seq - 1 + -(-len(self._pending) // self._report_keys)
        self._marked = max(self._marked, seq)
        return seq

    def take(self, max_keys: int = REPORT_KEYS) -> Report | None:
        """The next report to send; None when there is none, or too many are in flight, or an inventory must come first.
        `max_keys` below the reporter's own size would break marks that were given, and is refused."""
        if max_keys < self._report_keys:
            raise ValueError(f"max_keys: {max_keys} is less than the {self._report_keys} that marks count on")
        if self._unsent:
            return self._unsent.popleft()
        if self.needs_inventory or not self._pending or len(self._flight) >= self._window:
            return None
        groups: dict[NamespaceUid, tuple[list[Key], bytearray, list[int]]] = {}
        pending = self._pending
        taken = list(pending)[: self._report_keys] if len(pending) <= 2 * self._report_keys else _head(pending, self._report_keys)
        for uid, key in taken:
            state, size = pending.pop((uid, key))
            keys, states, sizes = groups.setdefault(uid, ([], bytearray(), []))
            keys.append(key)
            states.append(state)
            sizes.append(size)
        batches = tuple(
            ReportBatch(uid, b"".join(keys), bytes(states), struct.pack(f"<{len(sizes)}I", *sizes))
            for uid, (keys, states, sizes) in groups.items()
        )
        report = Report(self._next_seq, batches)
        self._next_seq += 1
        self._flight.append(report)
        return report

    def on_ack(self, seq: int) -> None:
        """The master has all reports up to `seq` in its index. An older or repeated one changes nothing."""
        self._acked = max(self._acked, min(seq, self._next_seq - 1))
        while self._flight and self._flight[0].seq <= seq:
            self._flight.popleft()
        while self._unsent and self._unsent[0].seq <= seq:
            self._unsent.popleft()

    def rewind(self) -> None:
        """A new stream to a master that goes on where it was: what is in flight is taken again, as it was sent."""
        self._unsent = deque(self._flight)

    def begin_inventory(self) -> int:
        """An inventory is being made from now on: returns the `next_seq` of its parts. Call it in the same hold of the lock in
        which the snapshot is made (or begun: changes made while it is read are recorded and reported after it). Everything
        pending is covered by it; its completion is acknowledged as `next_seq - 1`."""
        self._marked = max(self._marked, self._next_seq - 1)
        self._next_seq = self._marked + 2  # the number between is the inventory's own
        self._pending.clear()
        self._flight.clear()
        self._unsent.clear()
        self.needs_inventory = False
        return self._next_seq

    def reset(self) -> None:
        """The master asked for an inventory: nothing is taken until `begin_inventory`."""
        self.needs_inventory = True


def _head(pending: dict[tuple[NamespaceUid, Key], tuple[int, int]], n: int) -> list[tuple[NamespaceUid, Key]]:
    """First n keys without listing all."""
    head = []
    for name in pending:
        head.append(name)
        if len(head) == n:
            break
    return head


class Accept(Enum):
    OK = "ok"  # apply it
    DUPLICATE = "duplicate"  # applied before: acknowledge again
    GAP = "gap"  # something is missing: ask for an inventory
    IGNORED = "ignored"  # an inventory is awaited or under way: this tells nothing new


class Inbox:
    """Master side: accepts one worker incarnation's reports in order, each once."""

    __slots__ = ("_awaiting", "_expected", "_in_inventory")

    def __init__(self) -> None:
        self._expected = 0
        self._awaiting = True
        self._in_inventory = False

    @property
    def expected(self) -> int:
        return self._expected

    @property
    def awaiting_inventory(self) -> bool:
        return self._awaiting

    def resume(self, next_seq: int) -> bool:
        """A new stream of the same incarnation begins with report `next_seq`. True: goes on; False: an inventory is wanted."""
        self._in_inventory = False
        if self._awaiting or next_seq == 0 or next_seq > self._expected:
            self._awaiting = True
            return False
        return True

    def accept(self, seq: int) -> Accept:
        if self._awaiting:
            return Accept.IGNORED
        if seq < self._expected:
            return Accept.DUPLICATE
        if seq > self._expected:
            self._awaiting = True
            return Accept.GAP
        self._expected += 1
        return Accept.OK

    def inventory_part(self, next_seq: int, *, first: bool, last: bool) -> bool:
        """False: the part belongs to no inventory that was begun on this stream, and must be left aside."""
        if first:
            self._awaiting = self._in_inventory = True
        elif not self._in_inventory:
            return False
        if last:
            self._awaiting = self._in_inventory = False
            self._expected = next_seq
        return True
