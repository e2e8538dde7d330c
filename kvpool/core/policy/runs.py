"""Runs of blocks and families of blocks, as the learned policy (`hazard`) keeps them: no decisions.

A family: a block knows its parent and its children that are in a tier of this worker, so that no parent leaves before a child.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, cast

from kvpool.core.namespaces import WritePolicy
from kvpool.core.policy.history import PRINT_MASK
from kvpool.core.types import HASH_BYTES, Key

if TYPE_CHECKING:
    from kvpool.core.block import Block
    from kvpool.core.policy.eviction import Entry
    from kvpool.core.policy.queues import RunGroup, Turn

DRAM: Final = 0
SSD: Final = 1
IN_DRAM: Final = 1  # of Block.where
IN_SSD: Final = 2
PARKED_DRAM: Final = 4
PARKED_SSD: Final = 8
TWICE: Final = 16  # it came to DRAM while it was on SSD, or was used while in both, and is in both
FAR: Final = 1 << 60
IN_ANY: Final = IN_DRAM | IN_SSD
IN: Final[tuple[int, ...]] = (IN_DRAM, IN_SSD)
_DRAM_AND_PARKED: Final = IN_DRAM | PARKED_DRAM
PARKED: Final[tuple[int, ...]] = (PARKED_DRAM, PARKED_SSD)


class Request:
    """What is known of a request under way: its batches have one tick."""

    __slots__ = ("classed", "end", "gap", "here", "new", "number", "refused", "runs", "tail", "tick", "waiting")

    def __init__(self, tick: int) -> None:
        self.tick = tick
        self.number = 0  # of all requests
        self.gap = 0  # bucket
        self.classed = (0, 0)  # bucket of new blocks and gap that its runs' classes were made of
        self.new = 0  # blocks that were not known
        self.end = 0  # rank behind its last block
        self.runs: list[Run] = []  # those of its blocks, perhaps some that are not any more
        self.tail: Run | None = None  # the one that is classed as its end
        self.here = 0  # rank behind the last that was used, stored or refused
        self.waiting: list[tuple[list[Block], bool]] = []  # refused, to be accounted behind those above them; whether its end
        self.refused = (0, 0)  # ranks of its blocks that were not stored, from and to: asked again they are no use

    def drop(self, run: Run) -> None:
        """One of `runs`, most often one of the last."""
        runs = self.runs
        for i in range(len(runs) - 1, -1, -1):
            if runs[i] is run:
                del runs[i]
                return


class Run:
    """Cached blocks of a run: `members[i]` has rank `base + i`, None: no more of this run; the last is one. `uses[i]`: how often
    it was used. Of each tier: how many have a copy there, a rank at which and behind which none has, and where the run is queued,
    None: it may not lose one there now. (Made for every request: few objects.)"""

    __slots__ = ("base", "end_dram", "end_ssd", "members", "n_dram", "n_ssd", "no", "request", "tick", "time_s", "uses",
                 "waits_dram", "waits_ssd")  # fmt: skip

    def __init__(self, no: int, tick: int, time_s: float, base: int, members: list[Block | None], uses: bytearray) -> None:
        self.no, self.tick, self.time_s, self.base, self.members, self.uses = no, tick, time_s, base, members, uses
        self.n_dram = self.n_ssd = 0
        self.end_dram = self.end_ssd = FAR
        self.request: Request | None = None  # whose run it is, None: an earlier process', or no run any more
        self.waits_dram: Turn | None = None
        self.waits_ssd: Turn | None = None

    def end_of(self, n: int, deepest: Block) -> list[Block]:
        """Its deepest in DRAM and those above it, one after the other: at most n, and none above a gap, one that is parked, or
        one that has other children in DRAM."""
        found = [deepest]
        block, last = deepest.up, self.members[0]
        if deepest is last:
            return found
        for _ in range(n - 1):
            if block is None or block.run is not self or block.n_dram_kids > 1 or block.where & _DRAM_AND_PARKED != IN_DRAM:
                break
            found.append(block)
            if block is last:
                break
            block = block.up
        return found

    def grow_older(self, key: int) -> None:
        """It is of this age now, an older one."""
        if self.waits_dram is not None:
            self.waits_dram.group.grow_older(self.waits_dram, key)
        if self.waits_ssd is not None:
            self.waits_ssd.group.grow_older(self.waits_ssd, key)

    def requeue(self, key: int) -> None:
        """It is of this class and age now."""
        waits = self.waits_dram
        if waits is not None:
            waits.leave()
            waits.group.queue(waits, key)
        waits = self.waits_ssd
        if waits is not None:
            waits.leave()
            waits.group.queue(waits, key)

    def leave_queues(self) -> None:
        if self.waits_dram is not None:
            self.waits_dram.leave()
            self.waits_dram = None
        if self.waits_ssd is not None:
            self.waits_ssd.leave()
            self.waits_ssd = None

    def ssd_end_of(self, n: int, deepest: Block) -> list[Block]:
        """The same of the SSD tier: they all are in DRAM too, or none, and then none has other children."""
        found = [deepest]
        where = IN_SSD | deepest.where & IN_DRAM
        while len(found) < n:
            block = found[-1]
            above = block.up
            if above is None or above.run is not self or above.where & (IN_ANY | PARKED_SSD) != where:
                break
            if where == IN_SSD and (above.kid is not block or block.next_kid is not None):
                break
            found.append(above)
        return found

    def deepest_in_dram(self) -> Block:
        members = self.members
        if self.end_dram == FAR:
            i = len(members)
        else:
            i = min(self.end_dram - self.base, len(members))
        block = members[i - 1]
        if block is None or not block.where & IN_DRAM:
            block, i = _deepest(members, i - 1, IN_DRAM)
            self.end_dram = self.base + i
        return block

    def deepest_on_ssd(self) -> Block:
        members = self.members
        i = self.end_ssd - self.base
        if i > len(members):
            i = len(members)
        block = members[i - 1]
        if block is None or not block.where & IN_SSD:
            block, i = _deepest(members, i - 1, IN_SSD)
            self.end_ssd = self.base + i
        return block

    def joined_dram(self, block: Block) -> None:
        """A member has a copy there now."""
        self.n_dram += 1
        if not self.is_at(block, block.rank - self.base):
            self.end_dram = FAR
        elif block.rank >= self.end_dram:
            self.end_dram = block.rank + 1

    def joined_ssd(self, block: Block) -> None:
        self.n_ssd += 1
        if not self.is_at(block, block.rank - self.base):
            self.end_ssd = FAR
        elif block.rank >= self.end_ssd:
            self.end_ssd = block.rank + 1

    def ends_in(self, blocks: Sequence[Block]) -> bool:
        """Whether these are its last members, the deepest first."""
        return self.members[: -len(blocks) - 1 : -1] == blocks

    def is_at(self, block: Block, at: int) -> bool:
        return 0 <= at < len(self.members) and self.members[at] is block

    def index(self, block: Block) -> int:
        """Where it is in `members`."""
        at = block.rank - self.base
        return at if self.is_at(block, at) else self.members.index(block)  # (not of one chain)


def fingerprint(block: Block) -> int:
    """58 bits of the key. Two keys with the same ones would share a use count, no more."""
    return hash(block.key) & PRINT_MASK


def fingerprints(blocks: Iterable[Block]) -> list[int]:
    """Of each."""
    return [hash(block.key) & PRINT_MASK for block in blocks]


def _deepest(members: list[Block | None], n: int, bit: int) -> tuple[Block, int]:
    """The last of the first n with a copy in this tier. -> (it, how many to it)."""
    for i in range(n, 0, -1):
        block = members[i - 1]
        if block is not None and block.where & bit:
            return block, i
    raise AssertionError("it has none in this tier")


def common(members: list[Block | None], at: int, blocks: Sequence[Block | None], i: int) -> int:
    """How many of `members` from `at` on are `blocks` from i on, up to a gap."""
    k = min(len(members) - at, len(blocks) - i)
    if k > 1 and members[at + 1] is not blocks[i + 1]:
        return 1
    part = members[at : at + k]
    if part == blocks[i : i + k]:
        return part.index(None) if None in part else k
    n = 0
    while n < k and part[n] is not None and part[n] is blocks[i + n]:
        n += 1
    return n


def descends(blocks: Sequence[Block | None]) -> bool:
    """Whether each is deeper in its chain than the one before it, so that none comes again."""
    rank = -1
    for block in blocks:
        if block is not None:
            if block.rank <= rank:
                return False
            rank = block.rank
    return True


def alike(blocks: Sequence[Block | None]) -> bool:
    """Whether they can replace each other."""
    first = blocks[0]
    return first is None or all(block is not None and block.group is first.group for block in blocks)


def once(blocks: Sequence[Block | None]) -> list[Block | None]:
    """The same with gaps where a block comes again."""
    seen: set[Block] = set()
    found: list[Block | None] = []
    for block in blocks:
        found.append(None if block is None or block in seen else block)
        if block is not None:
            seen.add(block)
    return found


def ssd_group(block: Block) -> RunGroup:
    """Of its copy there."""
    return cast("RunGroup", cast("Entry", block.ssd_copy).group)


def mark_twice(block: Block) -> None:
    """It is in both tiers, and will not leave DRAM soon: its copy on SSD is no use for now. (Unless it was asked for.)"""
    if block.space.spec.write_policy is not WritePolicy.THROUGH:
        block.where |= TWICE
        if not block.where & PARKED_SSD:
            ssd_group(block).twice[block] = None


def is_parent(above: Block, block: Block) -> bool:
    """Whether this is what the block hangs on."""
    return above.key[:HASH_BYTES] == block.parent and above.space is block.space and above.depth < block.depth


def link(block: Block, above: Block | None) -> None:
    """Makes it a child of its parent, when that is in a tier."""
    if not block.depth:
        return
    if above is None or not is_parent(above, block):
        above = block.space.blocks.get(Key(block.parent + block.key[HASH_BYTES:]))
        if above is None or not is_parent(above, block):
            return
    block.up, kid = above, above.kid
    block.next_kid, block.last_kid = kid, None
    if kid is not None:
        kid.last_kid = block
    above.kid = block
    if block.where & IN_DRAM:
        above.n_dram_kids += 1


def unlink(block: Block) -> None:
    """Gone: no child of its parent any more, no parent of its children."""
    up = block.up
    if up is not None:
        after, before = block.next_kid, block.last_kid
        if before is None:
            up.kid = after
        else:
            before.next_kid = after
        if after is not None:
            after.last_kid = before
        block.up = block.next_kid = block.last_kid = None
    kid = block.kid
    while kid is not None:
        after = kid.next_kid
        kid.up = kid.next_kid = kid.last_kid = None
        kid = after
    block.kid = None
    block.n_dram_kids = 0
