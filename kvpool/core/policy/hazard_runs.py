"""The runs of cached blocks that the learned policy (`hazard`) has: how they are built, lose blocks, and wait in their queues.

Owns which blocks are of which run, what of a run has become ghosts, and where a run is queued. Does not own what is a request and
when something is counted as a use (`hazard`, which is built on this class).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, cast

from kvpool.core.policy.classes import N_BINS, TAIL_STEP, USE_BUCKETS, USE_STEP, first_key, new_bucket
from kvpool.core.policy.history import History
from kvpool.core.policy.lifetable import LifeTable
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
    fingerprints,
    link,
    mark_twice,
    unlink,
)

if TYPE_CHECKING:
    from kvpool.core.block import Block
    from kvpool.core.policy.hazard_tier import HazardTier
    from kvpool.core.policy.queues import RunGroup

HISTORY_RATIO: Final = 4  # ghosts for each block that was ever cached at once
HISTORY_MIN: Final = 8192  # some hundred KB: with few ghosts of long chains nothing is learned of when they come back


class CachedRuns:
    """All runs with cached blocks in any tier, and the ghosts of those that left."""

    def __init__(self) -> None:
        self.table = LifeTable()
        self.history = History()
        self.now_s = 0.0
        self.n_cached = 0  # blocks in any tier
        self.n_cached_max = 0
        self.n_copies = 0  # in all tiers
        self.tiers: list[HazardTier] = []
        self._runs: list[Run | None] = [None]  # with cached blocks, by number
        self._n_runs = 0  # of these
        self._n_requests = 0
        self._adopting: list[Block] = []

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
            request.end = end
            for run in request.runs:
                if run.request is request:
                    self.history.reaches(run.no, end)

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
