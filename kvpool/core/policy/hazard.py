"""The learned policy: which blocks are worth least, learned online from how long runs of blocks wait to be used again.

A request's blocks live and die together, so what is accounted is a run: a stretch of one request's chain whose blocks have been
used equally often. Runs belong to classes (`classes`); of each class it is learned, also from runs that left ("ghosts",
`history`), when its runs are used again (`lifetable`); what leaves next is the deepest block of the run worth least (`queues`).

Owns runs of cached blocks, the events, both tiers' order (one index for both). Does not own whether a block may leave (the
caller asks and parks), nor copies (`core.copies`). One a worker: `tier()` makes each tier's policy.

    chain of a request    b0 b1 b2 b3 b4 b5 b6 b7 b8        a later one        b0 b1 b2 b3 c4 c5
    its runs             [b0 b1][b2 .. b7][b8 tail]         takes b0 .. b3     [b0 b1][b2 b3][c4][c5 tail]; [b4 .. b7][b8] stay
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
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
from kvpool.core.policy.history import History
from kvpool.core.policy.lifetable import LifeTable
from kvpool.core.policy.rival import Mode, Rival
from kvpool.core.policy.runs import (
    DRAM,
    FAR,
    IN,
    IN_ANY,
    IN_DRAM,
    IN_SSD,
    PARKED_DRAM,
    PARKED_SSD,
    TWICE,
    Request,
    Run,
    alike,
    common,
    descends,
    fingerprint,
    fingerprints,
    link,
    mark_twice,
    once,
    unlink,
)

if TYPE_CHECKING:
    from kvpool.core.block import Block
    from kvpool.core.policy.hazard_tier import HazardTier
    from kvpool.core.policy.queues import RunGroup

STEP_S: Final = FIRST_EDGE_S / 16  # from one request to the next, at least: where time is too coarse, ages go by requests
REFRESH_REQUESTS: Final = 64  # from one look at what was counted to the next,
SETTLED_REQUESTS: Final = 8 * REFRESH_REQUESTS  # and, after so many, twice as many for the life table
HISTORY_RATIO: Final = 4  # ghosts for each block that was ever cached at once
HISTORY_MIN: Final = 8192  # some hundred KB: with few ghosts of long chains nothing is learned of when they come back
SLACK_BLOCKS: Final = 2  # a request that shares all but so many last blocks of an earlier one continues it
UNRELATED_MAX: Final = 64  # blocks of a run whose places in it do not follow from their ranks
REQUESTS_MAX: Final = 512  # remembered as under way
WAITING_MAX: Final = 8192  # refused blocks of these that wait until those above them are stored


class Hazard:
    """The learned policy of one worker, all tiers. Not thread-safe: under the owner's lock."""

    def __init__(self, *, clock: Callable[[], float] | None = None, lean: bool = True) -> None:
        """clock: the time in ms that ages go by, instead of what `at` is told (of a trace that is replayed). lean: it may give up
        second copies, which are written again one day."""
        self._clock = clock
        self._may_be_lean = lean
        self.table = LifeTable()
        self.history = History()
        self.rival = Rival()
        self.now_s = 0.0
        self.n_cached = 0  # blocks in any tier
        self.n_cached_max = 0
        self.n_copies = 0  # in all tiers
        self._runs: list[Run | None] = [None]  # with cached blocks, by number
        self._n_runs = 0  # of these
        self._requests: OrderedDict[int, Request] = OrderedDict()
        self._n_requests = 0
        self._began_s = self._began_before_s = -STEP_S  # when the latest request began, and the one before it
        self._n_waiting = 0  # refused blocks that wait for those above them
        self._has_begun = False  # it has just: runs of earlier ones are not told so yet
        self._adopting: list[Block] = []
        self.tiers: list[HazardTier] = []

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
            if known and blocks[known - 1].rank + 1 + SLACK_BLOCKS < history.end[no]:
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
            behind = history.end[no] - (blocks[len(uses) - 1].rank + 1)
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
        if end >= 0 and history.end[no] - end > SLACK_BLOCKS:
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

    # --- runs -----------------------------------------------------------------------------------------------------------

    def _build(self, blocks: list[Block | None], uses: bytearray, request: Request, *, tail: bool = False) -> None:
        """Runs of these blocks, which are contiguous in their chain, the deepest first."""
        if not blocks:
            return
        first = blocks[0]
        assert first is not None
        if first.up is not None and first.up.run is not None:
            self._put_together(first.up.run, request)
        end = len(blocks)
        base = first.rank
        if base + end > request.end:
            self._reaches(base + end, request)
        variable = first.space.spec.variable and not alike(blocks)
        buckets = bytes(uses.translate(USE_BUCKETS))
        of_request = first_key(0, int(tail), new_bucket(request.new), request.gap)
        reached, history, now_s = self.table.reached, self.history, self.now_s
        above = history.latest if request.number == self._n_requests else 0
        if above:
            now_s = history.time_s[above]
        is_tail, one_tier = tail, len(self.tiers) == 1
        while end:
            start = end - 1 if is_tail else len(buckets[:end].rstrip(buckets[end - 1 : end]))
            if variable:
                group, first_alike = blocks[end - 1].group, end - 1  # type: ignore[union-attr]
                while first_alike > start and blocks[first_alike - 1].group is group:  # type: ignore[union-attr]
                    first_alike -= 1
                start = first_alike
            key = of_request + buckets[end - 1] * USE_STEP
            no = history.add(now_s, end - start, key, request.end, above)
            reached[key] += 1.0
            members = blocks[start:end]
            run = Run(no, request.tick, now_s, base + start, members, uses[start:end])
            self._enlist(run, request)
            if is_tail:
                request.tail = run
            if one_tier:
                for block in members:
                    if block is not None:
                        block.run = run
                run.n_dram = end - start
                deepest = members[-1]
                assert deepest is not None
                if not deepest.n_dram_kids and not deepest.where & PARKED_DRAM:
                    run.waits_dram = cast("RunGroup", deepest.group).push(run, key)
            else:
                n_dram = n_ssd = 0
                for block in members:
                    if block is not None:
                        block.run, where = run, block.where
                        if where & (IN_ANY | TWICE) == IN_ANY:
                            mark_twice(block)
                        n_dram += where & IN_DRAM
                        n_ssd += where & IN_SSD
                run.n_dram, run.n_ssd = n_dram, n_ssd >> 1
                self.consider(run)
            if is_tail:
                of_request, is_tail = of_request - TAIL_STEP, False
            end = start

    def _enlist(self, run: Run, request: Request | None) -> None:
        self._add_numbers(run.no)
        self._runs[run.no] = run
        self._n_runs += 1
        if request is not None:
            run.request = request
            request.runs.append(run)

    def _add_numbers(self, no: int) -> None:
        runs = self._runs
        while len(runs) <= no:
            runs.append(None)

    def _unlist(self, run: Run) -> None:
        """It has no cached blocks any more."""
        self._runs[run.no] = run.request = None
        self._n_runs -= 1

    def _put_together(self, run: Run, request: Request) -> None:
        """A request that comes in parts has the runs that it would have as a whole: this one becomes part of the one above it
        where both are its own and of one class, and so on. Each block is moved a few times at most."""
        history, reached = self.history, self.table.reached
        while run.tick == request.tick:
            first = run.members[0]
            assert first is not None
            above = None if first.up is None else first.up.run
            if above is None or above is run or above.tick != run.tick or above.members[-1] is not first.up:
                return
            key: int = history.key[run.no]
            if history.key[above.no] != key or first.up.group is not first.group or not history.is_whole(run.no):  # type: ignore[union-attr]
                return
            for age in range(key % N_BINS + 1):
                reached[key - key % N_BINS + age] -= 1.0
            history.absorb(above.no, run.no)
            run.leave_queues()
            above.n_dram += run.n_dram
            above.n_ssd += run.n_ssd
            above.end_dram = above.end_ssd = FAR
            self._unlist(run)
            for block in run.members:
                if block is not None:
                    block.run = above
            above.members += run.members
            above.uses += run.uses
            run.members, run.tick = [], 0
            request.drop(run)
            self.consider(above)
            run = above

    def _reaches(self, end: int, request: Request) -> None:
        """The request has blocks up to this rank."""
        if end > request.end:
            request.end, ends = end, self.history.end
            for run in request.runs:
                if run.request is request:
                    ends[run.no] = end

    def _take_from(self, run: Run, at: int, k: int) -> None:
        """k of its members from `at` on go to another run."""
        members = run.members
        self.history.lessen(run.no, k)
        if k == len(members):
            self._empty(run)
            return
        if len(self.tiers) == 1:
            run.n_dram -= k
        else:
            for block in members[at : at + k]:
                if block is not None:
                    run.n_dram -= block.where & IN_DRAM
                    run.n_ssd -= (block.where & IN_SSD) >> 1
        if at + k == len(members):
            del members[at:], run.uses[at:]
        elif at:
            members[at : at + k] = [None] * k
            if len(self.tiers) > 1:  # (its deepest in one tier may be among these)
                self.consider(run)
            return
        else:
            del members[:k], run.uses[:k]
            run.base += k
        self._trim(run)

    def _trim(self, run: Run) -> None:
        """Ends of the members that are None go; a run without any is forgotten but for its ghosts."""
        members = run.members
        while members and members[-1] is None:
            members.pop()
            run.uses.pop()
        if members:
            if members[0] is None:
                start = next(i for i, block in enumerate(members) if block is not None)
                del members[:start], run.uses[:start]
                run.base += start
            self.consider(run)
        else:
            self._empty(run)

    def _empty(self, run: Run) -> None:
        """None of its blocks is cached and its own any more: it is forgotten but for its ghosts."""
        run.leave_queues()
        if run.request is not None and run.request.tail is run:
            run.request.tail = None
        run.members.clear()
        run.uses.clear()
        run.n_dram = run.n_ssd = 0
        self._unlist(run)
        run.tick = 0
        if not self.history.left[run.no]:
            self.history.drop(run.no)

    def adopt(self, block: Block) -> None:
        """A block that an earlier process left, of which nothing else is known; it is in a run after `adopted`."""
        self._adopting.append(block)

    def adopted(self) -> None:
        """No more blocks are adopted: chains are put together, nothing is counted of them."""
        blocks, self._adopting = self._adopting, []
        blocks.sort(key=lambda block: block.depth)  # parents first
        self.n_cached += len(blocks)
        self.n_cached_max = max(self.n_cached_max, self.n_cached)
        key = first_key(0, 0, 0, 0)
        for block in blocks:
            link(block, None)
            run = block.up.run if block.up is not None else None
            if run is not None and run.members[-1] is block.up and block.up is not None and block.up.size == block.size:
                self.history.grow(run.no)
                run.members.append(block)
                run.uses.append(1)
            else:
                no = self.history.add_uncounted(self.now_s, key)
                run = Run(no, 1, self.now_s, block.rank, [block], bytearray(b"\x01"))
                self._enlist(run, None)
            run.n_ssd += 1
            block.run = run
        for run in self.runs():
            self.consider(run)

    def leave(self, block: Block) -> None:
        """The block is in no tier any more."""
        run = block.run
        assert run is not None
        members, history = run.members, self.history
        block.run = None
        unlink(block)
        if members[-1] is block:
            members.pop()
            history.become_ghosts(run.no, fingerprints((block,)), (run.uses.pop(),))
            self._trim(run)
            self._forget()
        else:
            members[run.index(block)] = None
            history.lessen(run.no, 1)
            self._trim(run)

    def retire(self, blocks: Sequence[Block], tier: int) -> None:
        """The deepest of one run, the deepest first, are in no tier any more; they were in this one alone."""
        run = blocks[0].run
        assert run is not None
        n = len(blocks)
        members, uses = run.members, run.uses
        up = blocks[-1].up
        self.history.become_ghosts(run.no, fingerprints(reversed(blocks)), uses[-n:])
        unlink(blocks[-1])
        for block in blocks:  # (none of them but the last has siblings)
            block.run = block.up = block.kid = None
            block.where = 0
        if up is not None:
            up.n_dram_kids -= tier == DRAM
            if up.run is not None and up.run is not run:
                self.consider(up.run)
        if n == len(members):
            self._empty(run)
        else:
            del members[-n:], uses[-n:]
            self._trim(run)
        if self.history.n_ghosts > HISTORY_MIN:
            self._forget()

    def worth(self, run: Run) -> float:
        """Hits to come for each block and second that it is kept."""
        key: int = self.history.key[run.no]
        return self.table.index[key]

    def _forget(self) -> None:
        history, limit = self.history, max(HISTORY_RATIO * self.n_cached_max, HISTORY_MIN)
        while history.n_ghosts > limit:
            no = history.forget_oldest()
            if not history.left[no]:
                history.drop(no)

    def consider(self, run: Run) -> None:
        """Queues the run in each tier where its deepest block may leave, and takes it out elsewhere: in DRAM it may when no child
        is there, on SSD when none is anywhere, or the block itself is in DRAM too."""
        if run.n_dram or run.waits_dram is not None:
            self.consider_dram(run)
        if run.n_ssd or run.waits_ssd is not None:
            self.consider_ssd(run)

    def consider_dram(self, run: Run) -> None:
        waits = run.waits_dram
        if run.n_dram:
            block = run.deepest_in_dram()
            if not block.n_dram_kids and not block.where & PARKED_DRAM:
                if waits is None:
                    run.waits_dram = cast("RunGroup", block.group).push(run, self.history.key[run.no])
                return
        if waits is not None:
            waits.leave()
            run.waits_dram = None

    def consider_ssd(self, run: Run) -> None:
        waits = run.waits_ssd
        if run.n_ssd:
            block = run.deepest_on_ssd()
            where = block.where
            if not where & PARKED_SSD and (block.kid is None or where & IN_DRAM):
                if waits is None:
                    group = cast("RunGroup", block.ssd_copy.group)  # type: ignore[union-attr]
                    run.waits_ssd = group.push(run, self.history.key[run.no])
                return
        if waits is not None:
            waits.leave()
            run.waits_ssd = None

    # --- for measurement ------------------------------------------------------------------------------------------------

    def runs(self) -> Iterator[Run]:
        """All that have cached blocks."""
        return (run for run in self._runs if run is not None)

    def history_bytes_per_id(self) -> float:
        """Of the packed history, for each block that it knows, cached or not."""
        return self.history.n_bytes() / max(1, self.history.n_ghosts + self.n_cached)

    def check(self) -> None:
        """Asserts the invariants. O(everything)."""
        self.history.check()
        groups = [cast("RunGroup", group) for tier in self.tiers for group in tier.groups()]
        assert self.n_copies == sum(group.n_entries for group in groups), "copies are miscounted"
        assert self._n_runs == len(list(self.runs())), "runs are miscounted"
        for run in self.runs():
            assert self._runs[run.no] is run and run.members and run.members[-1] is not None and len(run.uses) == len(run.members)
            members = [block for block in run.members if block is not None]
            assert all(block.run is run and block.where & IN_ANY for block in members)
            assert all(a.depth <= b.depth and a.group is b.group for a, b in pairwise(members)), "order or classes"
            assert [run.n_dram, run.n_ssd] == [sum(bool(b.where & bit) for b in members) for bit in IN], "copies are miscounted"
            waits = run.waits_dram, run.waits_ssd
            self.consider(run)
            assert waits == (run.waits_dram, run.waits_ssd), "queued, or not, without reason"
            assert all(turn is None or (turn.run is run and turn.queue is not None) for turn in waits), "in no queue"
