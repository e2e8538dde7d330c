"""The learned policy: which blocks are worth least, learned online from how long runs of blocks wait to be used again.

A request's blocks live and die together, so what is accounted is a run: a stretch of one request's chain whose blocks have been
used equally often. Runs belong to classes (`classes`); of each class it is learned, also from runs that left ("ghosts",
`history`), when its runs are used again (`lifetable`); what leaves next is the deepest block of the run worth least (`queues`).

Owns the events and both tiers' order (one index for both); runs of cached blocks are `hazard_runs`. Does not own whether a block
may leave (the caller asks and parks), nor copies (`core.copies`). One a worker: `tier()` makes each tier's policy.

    chain of a request    b0 b1 b2 b3 b4 b5 b6 b7 b8        a later one        b0 b1 b2 b3 c4 c5
    its runs             [b0 b1][b2 .. b7][b8 tail]         takes b0 .. b3     [b0 b1][b2 b3][c4][c5 tail]; [b4 .. b7][b8] stay
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, cast

from kvpool.core.policy.classes import (
    FIRST_EDGE_S,
    N_BINS,
    ONE_MORE,
    TAIL_STEP,
    USE_BUCKETS,
    USE_STEP,
    first_key,
    gap_bucket,
    new_bucket,
)
from kvpool.core.policy.eviction import EvictionPolicy
from kvpool.core.policy.hazard_runs import CachedRuns
from kvpool.core.policy.rival import Mode, Rival
from kvpool.core.policy.runs import (
    FAR,
    Request,
    Run,
    common,
    descends,
    fingerprint,
    fingerprints,
    link,
    once,
)

if TYPE_CHECKING:
    from kvpool.core.block import Block

STEP_S: Final = FIRST_EDGE_S / 16  # from one request to the next, at least: where time is too coarse, ages go by requests
REFRESH_REQUESTS: Final = 64  # from one look at what was counted to the next,
SETTLED_REQUESTS: Final = 8 * REFRESH_REQUESTS  # and, after so many, twice as many for the life table
SLACK_BLOCKS: Final = 2  # a request that shares all but so many last blocks of an earlier one continues it
UNRELATED_MAX: Final = 64  # blocks of a run whose places in it do not follow from their ranks
REQUESTS_MAX: Final = 512  # remembered as under way
WAITING_MAX: Final = 8192  # refused blocks of these that wait until those above them are stored


class Hazard(CachedRuns):
    """The learned policy of one worker, all tiers. Not thread-safe: under the owner's lock."""

    def __init__(self, *, clock: Callable[[], float] | None = None, lean: bool = True) -> None:
        """clock: the time in ms that ages go by, instead of what `at` is told (of a trace that is replayed). lean: it may give up
        second copies, which are written again one day."""
        super().__init__()
        self._clock = clock
        self._may_be_lean = lean
        self.rival = Rival()
        self._requests: OrderedDict[int, Request] = OrderedDict()
        self._began_s = self._began_before_s = -STEP_S  # when the latest request began, and the one before it
        self._n_waiting = 0  # refused blocks that wait for those above them
        self._has_begun = False  # it has just: runs of earlier ones are not told so yet

    def tier(self) -> EvictionPolicy:
        """The policy of the next tier: DRAM first, then SSD."""
        from kvpool.core.policy.hazard_tier import HazardTier

        made = HazardTier(self, len(self.tiers))
        self.tiers.append(made)
        return made

    def at(self, now_ms: float) -> None:
        """It is this time now (never earlier than before): runs grow older."""
        self._advance((now_ms if self._clock is None else self._clock()) / 1000)

    def _advance(self, now_s: float) -> None:
        if now_s > self.now_s:
            self.now_s = now_s
            if now_s >= self.history.soonest_s:
                moved = self.history.age(now_s, self.table.reached, self._runs)
                if len(moved) > self._n_runs:  # (after a long time: queued once, in the last one's order)
                    moved = [*dict.fromkeys(reversed(moved))][::-1]
                self._grow_older(moved)

    def _pass_by(self) -> None:
        """The latest request used what it found: another request passed by all the rest."""
        self._has_begun = False
        self._grow_older(self.history.pass_by(self.now_s, self.table.reached, self._runs))

    def _grow_older(self, moved: list[int]) -> None:
        runs, keys = self._runs, self.history.key
        for no in moved:
            run = runs[no]
            if run is not None and (run.waits_dram is not None or run.waits_ssd is not None):
                run.grow_older(keys[no])

    # --- requests -------------------------------------------------------------------------------------------------------

    def _request(self, tick: int) -> Request:
        request = self._requests.get(tick)
        if request is None:
            request = self._requests[tick] = Request(tick)
            if len(self._requests) > REQUESTS_MAX:
                _, oldest = self._requests.popitem(last=False)
                self._has_up_to(FAR, oldest)
                oldest.runs.clear()
            self._n_requests += 1
            request.number = self._n_requests
            self._advance(self._began_s + STEP_S)
            self._has_begun = True
            self.history.next_request(self.n_copies)
            self.table.next_request(self.now_s - self._began_s)
            self._began_before_s, self._began_s = self._began_s, self.now_s
            if self._n_requests % REFRESH_REQUESTS == 0:
                self._refresh()
        return request

    def _refresh(self) -> None:
        two_tiers = len(self.tiers) > 1
        lean = two_tiers and self._may_be_lean
        mode = self.rival.judge(self.n_copies, two_tiers=two_tiers, lean=lean)
        by_time = mode is Mode.RECENT
        n_due = 1 if self._n_requests <= SETTLED_REQUESTS else 2
        if self._n_requests // REFRESH_REQUESTS % n_due == 0 or by_time is not self.table.by_time:
            self.table.refresh(by_time=by_time, n_due=n_due)
        for tier in self.tiers:
            tier.lean = lean and mode > Mode.LEARNED

    def used(self, blocks: Sequence[Block | None], tick: int) -> None:
        """Blocks of one batch, in chain order (None: a gap), were used by the request of this tick."""
        request, rival = self._request(tick), self.rival
        if not descends(blocks):
            blocks = once(blocks)
        part: list[Block | None] = []
        uses = bytearray()
        gap: int | None = None
        i, n = 0, len(blocks)
        while n and blocks[n - 1] is None:  # (the end of most requests is not here)
            n -= 1
        while i < n:
            block = blocks[i]
            run = block.run if block is not None else None
            if block is None or run is None:
                i += 1
            else:
                if not block.up and i:
                    link(block, blocks[i - 1])
                    if block.up is not None and block.up.run is not None:
                        self.consider(block.up.run)  # (it has a child now)
                at, members = block.rank - run.base, run.members
                if not 0 <= at < len(members) or members[at] is not block:
                    at = run.index(block)
                k = common(members, at, blocks, i)
                if run.tick != tick:
                    last = part[-1] if part else None
                    if last is not None and last is blocks[i - 1] and self._may_follow(part, last, block, k):
                        part += blocks[i : i + k]
                    else:
                        self._build(part, uses.translate(ONE_MORE), request)
                        part, uses = list(blocks[i : i + k]), bytearray()
                    uses += run.uses[at : at + k]
                    gap = self._gap(run.no, part[-1].rank + 1)  # type: ignore[union-attr]
                    self._count_use(run.no, k)
                    rival.blocks += k
                    if block.space.share is None:
                        rival.hits += k
                        rival.lru_hits += self.history.lru_hits(run.no, k)
                    self._take_from(run, at, k)
                i += k
        if self._has_begun:
            self._pass_by()
        if gap is not None:
            request.gap = gap
            self._reclass(request)
        self._build(part, uses.translate(ONE_MORE), request)
        if n:
            self._has_up_to(cast("Block", blocks[n - 1]).rank + 1, request)

    @staticmethod
    def _may_follow(part: Sequence[Block | None], last: Block, block: Block, k: int) -> bool:
        """Whether a block, and k - 1 more, may be of one run with those of `part`, which ends with `last`: no parent comes after
        its child (they would wait for each other), and each is found by its rank, or among few."""
        first = part[0]
        assert first is not None
        return last.depth <= block.depth and (block.rank - first.rank == len(part) or len(part) + k <= UNRELATED_MAX)

    def stored(self, blocks: list[Block], tick: int) -> None:
        """New blocks of one batch in chain order, of the request of this tick."""
        request = self._request(tick)
        if self._has_begun:
            self._pass_by()
        goes_on = blocks[-1].rank >= request.end
        self._reaches(blocks[-1].rank + 1, request)
        start, n = 0, len(blocks)
        for i in range(1, n + 1):
            if i == n or blocks[i].up is not blocks[i - 1]:
                self._stored_chain(blocks[start:i], request, tail=goes_on and i == n)
                start = i
        self._has_up_to(blocks[-1].rank + 1, request)

    def _stored_chain(self, blocks: list[Block], request: Request, *, tail: bool) -> None:
        uses = self._arrive(blocks, request)
        self._build(cast("list[Block | None]", blocks), uses, request, tail=tail)

    def _arrive(self, blocks: Sequence[Block], request: Request) -> bytearray:
        """New blocks of one chain are of this request now; ghosts among them are none any more. -> uses of each, this one too."""
        history = self.history
        known = 0
        uses = bytearray()
        while known < len(blocks) and (no := history.find(fingerprint(blocks[known]))):
            request.gap = self._gap(no, -1)
            n_lru = history.lru_hits(no, len(blocks) - known)
            taken = history.take(no, map(fingerprint, blocks[known:]))
            if blocks[0].space.share is None:  # (what LRU would have in a quota is not known)
                self.rival.lru_hits += min(n_lru, len(taken))
            self._count_use(no, len(taken))
            uses += taken
            known += len(taken)
            if known and blocks[known - 1].rank + 1 + SLACK_BLOCKS < history.end_of(no):
                request.gap = 0
            if not history.left[no]:
                history.drop(no)
        self.rival.blocks += len(blocks)
        request.new += len(blocks) - known
        self._reclass(request)
        return uses.translate(ONE_MORE) + b"\x01" * (len(blocks) - known)

    def worth_new(self, blocks: Sequence[Block], tick: int) -> list[tuple[int, float]]:
        """What new blocks of the request of this tick, a stretch of one chain, would be worth if they were stored now: (how many,
        index of each) in chain order."""
        request = self._request(tick)
        if self._has_begun:
            self._pass_by()
        history, index = self.history, self.table.index
        new, gap, end = request.new, request.gap, request.end
        uses = b""
        while len(uses) < len(blocks) and (no := history.find(fingerprint(blocks[len(uses)]))):
            more = history.look(no, map(fingerprint, blocks[len(uses) :]))
            uses += more
            behind = history.end_of(no) - (blocks[len(uses) - 1].rank + 1)
            gap = gap_bucket(self.now_s - history.time_s[no]) if behind <= SLACK_BLOCKS else 0
        base = first_key(0, 0, new_bucket(new + len(blocks) - len(uses)), gap)
        buckets = (uses.translate(ONE_MORE) + b"\x01" * (len(blocks) - len(uses))).translate(USE_BUCKETS)
        tails = int(blocks[-1].rank >= end)
        parts = [(tails, index[base + buckets[-1] * USE_STEP + TAIL_STEP])] if tails else []
        at = len(blocks) - tails
        while at:
            start = len(buckets[:at].rstrip(buckets[at - 1 : at]))
            parts.append((at - start, index[base + buckets[at - 1] * USE_STEP]))
            at = start
        parts.reverse()
        return parts

    def refused(self, blocks: list[Block], tick: int) -> None:
        """New blocks of a chain were not stored: ghosts at once, so that it is learned whether that was right."""
        request = self._request(tick)
        if self._has_begun:
            self._pass_by()
        start, end = request.refused
        if start <= blocks[0].rank < end:  # asked again
            return
        request.refused = (blocks[0].rank, blocks[-1].rank + 1)
        is_tail = blocks[-1].rank >= request.end
        self._reaches(blocks[-1].rank + 1, request)
        if request.here < blocks[0].rank and self._n_waiting + len(blocks) <= WAITING_MAX:
            request.waiting.append((blocks, is_tail))
            self._n_waiting += len(blocks)
        else:
            self._refuse(blocks, request, is_tail=is_tail)

    def _has_up_to(self, end: int, request: Request) -> None:
        """Of its blocks those before this rank were used, stored or refused: what was refused behind them is accounted. (Ghosts
        are found from their first, so not before those above them.)"""
        request.here = max(request.here, end)
        while request.waiting and request.waiting[0][0][0].rank <= request.here:
            blocks, is_tail = request.waiting.pop(0)
            self._n_waiting -= len(blocks)
            self._refuse(blocks, request, is_tail=is_tail)

    def _refuse(self, blocks: list[Block], request: Request, *, is_tail: bool) -> None:
        history, prints = self.history, fingerprints(blocks)
        request.here = max(request.here, blocks[-1].rank + 1)
        uses = self._arrive(blocks, request)
        buckets, reached = bytes(uses.translate(USE_BUCKETS)), self.table.reached
        base = first_key(0, int(is_tail), new_bucket(request.new), request.gap)
        end = len(blocks)
        above = history.latest if request.number == self._n_requests else 0
        while end:
            start = end - 1 if is_tail else len(buckets[:end].rstrip(buckets[end - 1 : end]))
            key = base + buckets[end - 1] * USE_STEP
            no = history.add(self.now_s, end - start, key, request.end, above)
            reached[key] += 1.0
            history.become_ghosts(no, prints[start:end], uses[start:end])
            self._add_numbers(no)
            if is_tail:
                base, is_tail = base - TAIL_STEP, False
            end = start
        self._forget()

    def _gap(self, no: int, end: int) -> int:
        """Bucket of the time since the request that made this run, when this one continues it."""
        history = self.history
        if end >= 0 and history.end_of(no) - end > SLACK_BLOCKS:
            return 0
        return gap_bucket(self.now_s - history.time_s[no])

    def _count_use(self, no: int, n_blocks: int) -> None:
        history, table = self.history, self.table
        key: int = history.key[no]
        length: int = history.length[no]
        part = n_blocks / length
        age = key % N_BINS
        if age and history.time_s[no] >= self._began_before_s:  # of the request before this one, which came to it late
            for passed in range(key - age + 1, key + 1):
                table.reached[passed] -= part
            key -= age
        table.used[key] += part

    def _reclass(self, request: Request) -> None:
        """A request went on: its runs' classes are what they would be had it come as a whole."""
        classed = new, _ = new_bucket(request.new), request.gap
        runs = request.runs
        if classed == request.classed:
            runs = [] if request.tail is None else [request.tail]
        request.classed, request.tail = classed, None
        history = self.history
        for run in runs:
            if run.request is not request:
                continue
            key = history.key[run.no]
            base = first_key(key // USE_STEP, 0, new, request.gap)
            if base != key - key % N_BINS:
                self._change(run, base, key)

    def _change(self, run: Run, base: int, key: int) -> None:
        """Another class, from the beginning of its life."""
        history, reached = self.history, self.table.reached
        part = history.part(run.no)
        for age in range(key % N_BINS + 1):
            weight = part if age else 1.0
            reached[key - key % N_BINS + age] -= weight
            reached[base + age] += weight
        key = history.key[run.no] = base + key % N_BINS
        run.requeue(key)
