"""The block as a worker knows it, and the values that go in and out of `blocks.BlockTable`.

Owns: fields and their meaning. Does not own: any decision (`blocks`, `copies`).

    reserved ──commit──▶ live ──evict / remove / corrupt──▶ gone (slots freed when the last pin or hold goes)
        └──abort, or removed meanwhile──▶ gone
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvpool.core.gone import Causes, Why
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.pins import PinBook
from kvpool.core.policy.eviction import Entry, Group
from kvpool.core.quota import Share
from kvpool.core.retention import Keep
from kvpool.core.slots import CloseArena, PopulateExtent, PunchExtent, SlabAllocator, Slot
from kvpool.core.types import HoldId, Key, MissCause, NamespaceUid, Tiers

if TYPE_CHECKING:
    from kvpool.core.policy.runs import Run

GenerationOf = Callable[[NamespaceUid, int], int]
Bump = Callable[[NamespaceUid, int], None]
Report = Callable[[NamespaceUid, Key, int, MissCause | None, int], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one worker's table."""

    hold_ttl_ms_max: int = 600_000
    holds_max: int = 65_536  # each costs about 200 bytes and 16 a block
    held_fraction: float = 0.5  # of a tier's bytes: the rest can always be evicted for puts
    pinned_fraction: float = 0.25  # of a tier's bytes that hard pins may protect, beside what is held
    quarantine_fraction: float = 0.125  # of DRAM: overdue views beyond it lose their connection
    gone_keys_max: int = 100_000  # about 150 bytes each
    low_watermark: float = 0.75  # of DRAM: more dirty bytes than this are written down
    second_use: bool = False  # the SSD tier takes only what was used again
    ssd_bytes_per_s: int = 0  # written to the SSD tier at most, in the mean of a minute; 0: no limit
    ssd_bytes_per_day: int = 0
    seed: int = 0  # of hold ids; a worker passes system randomness

    def __post_init__(self) -> None:
        for name in ("held_fraction", "pinned_fraction", "quarantine_fraction", "low_watermark"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: {getattr(self, name)} is not in 0..1")


_NO_BLOCK: Block | None = None


class Space:
    """One namespace's blocks on this worker."""

    __slots__ = ("blocked", "blocks", "causes", "dram", "exact_group", "exact_ssd_group", "generation", "lingering", "misses",
                 "pins", "reserved", "share", "spec", "uid")  # fmt: skip

    def __init__(self, spec: NamespaceSpec, dram: SlabAllocator, generation: GenerationOf, exact_group: Group) -> None:
        self.uid, self.spec, self.dram, self.generation = spec.uid, spec, dram, generation
        self.exact_group = exact_group  # of blocks of exactly block_bytes
        self.exact_ssd_group: Group | None = None  # the same of the SSD tier, once it is known
        self.blocks: dict[Key, Block] = {}  # live ones
        self.reserved: set[Block] = set()
        self.lingering: set[Block] = set()  # gone, but with a record on disk: somebody reads it, or it is being written
        self.causes: Causes = {}
        self.misses: dict[Why, int] = {}
        self.pins = PinBook()  # times of this worker's clock
        self.share: Share | None = None  # of the quota that is this worker's; None: no bound
        self.blocked = False


class Block(Entry):
    """One key's value on this worker. All fields are the table's, under its lock. A caller that has it pinned may read them and
    the bytes in its slots; `dram` and `ssd` of a pinned block are freed by nobody, though they may become None.

    As an `Entry` it stands for its DRAM copy; the SSD copy's entry is `ssd_copy`.
    """

    __slots__ = ("demoting", "depth", "dirty", "doomed", "dram", "failures", "flight", "gone", "held_dram", "held_ssd", "keep",
                 "key", "kid", "last_kid", "live", "n_asks", "n_dram_kids", "next_kid", "on_idle", "parent", "pins", "promoting",
                 "rank", "refused", "run", "size", "space", "spare_tick", "ssd", "ssd_copy", "sum", "sums", "tick", "up",
                 "where")  # fmt: skip

    def __init__(self, space: Space, key: Key, size: int, group: Group, depth: int, parent: bytes, rank: int, tick: int) -> None:
        self.bucket = None
        self.parked = 1
        self.reused = False
        self.group = group
        # (Compiled, this is their order in memory: what is used together is together.)
        self.run: Run | None = None  # these are a policy's: what it is part of,
        self.where = 0  # the tiers that the policy knows it in, and in which it is parked,
        self.up = self.kid = _NO_BLOCK  # its parent, its first child,
        self.n_dram_kids = 0  # how many children have a copy in DRAM, and
        self.rank = rank
        self.key = key
        self.next_kid = self.last_kid = _NO_BLOCK  # its siblings
        self.ssd_copy: SsdCopy | None = None
        self.dram: Slot | None = None
        self.ssd: Slot | None = None
        self.pins = 0  # transfers under way: both copies stay
        self.live = False
        self.dirty = False  # there is an SSD tier and no copy in it: may not just be dropped
        self.refused = False  # the SSD tier will not have it: may be dropped
        self.demoting = self.promoting = False
        self.on_idle = False  # something is to be done when the last pin or hold goes
        self.held_dram = self.held_ssd = 0  # holds on the copy in that tier
        self.keep: Keep | None = None  # expiry, priority, pin, where it has any
        self.space, self.size, self.depth, self.parent = space, size, depth, parent
        self.tick = tick  # of its reservation
        self.spare_tick = 0  # when it is written down no last copies of this tick go for it: of the put that waits for its slot
        self.flight: Slot | None = None  # where a demotion or promotion under way writes to
        self.sums: bytes | None = None  # packed u64 chunk sums, None until read once (adopted blocks)
        self.sum = 0  # of the whole block
        self.gone: MissCause | None = None
        self.failures = 0  # of writing it down
        self.n_asks = 0  # how often it was written down once more though it was refused
        self.doomed: list[tuple[Tiers, Slot]] | None = None  # copies to free then

    @property
    def ns(self) -> NamespaceUid:
        return self.space.uid

    @property
    def chunk_bytes(self) -> int:
        return self.space.spec.chunk_bytes

    @property
    def tiers(self) -> int:
        """Tiers that it is in, as reported (u8)."""
        return (1 if self.dram is not None else 0) | (2 if self.ssd is not None else 0)

    @property
    def ssd_slots(self) -> list[Slot]:
        """SSD slots whose records name it, those of copies that went bad too."""
        bad = [slot for tier, slot in self.doomed or () if tier is SSD]
        return bad if self.ssd is None else [self.ssd, *bad]

    @property
    def generation(self) -> int:
        """Of its DRAM slot now; stays while the block is pinned or held there."""
        assert self.dram is not None
        arena, _, gen_index = self.space.dram.place(self.dram)
        return self.space.generation(arena, gen_index)

    def __repr__(self) -> str:
        state = self.gone.value if self.gone else "live" if self.live else "reserved"
        held = f"held={self.held_dram},{self.held_ssd}"
        return f"<Block {self.key[:4].hex()} {state} dram={self.dram} ssd={self.ssd} pins={self.pins} {held}>"


class SsdCopy(Entry):
    """The entry of a block's SSD copy in that tier's policy."""

    __slots__ = ("block",)

    def __init__(self, group: Group, block: Block) -> None:
        super().__init__(group)
        self.block = block


@dataclass(frozen=True, slots=True)
class Reserved:
    """`codes`: BlockCode [n] (RESERVED, ALREADY, FULL, REJECTED). `blocks`: those RESERVED, else None. `must_wait`: room for
    those FULL may come when the mover has written blocks down (`clean_candidates` .. `ssd_done`). `over_quota`: those FULL are so
    because the namespace has its quota here. `use`: for `reserve` when this put is tried again,
    for `gave_up` when it is not."""

    codes: bytearray
    blocks: list[Block | None]
    must_wait: bool = False
    over_quota: bool = False
    use: int = 0


@dataclass(frozen=True, slots=True)
class Pinned:
    """Both [n]. A block (pinned; `unpin` it), or the cause of its miss; neither: not looked at (past the first miss)."""

    blocks: list[Block | None]
    causes: list[MissCause | None]


@dataclass(frozen=True, slots=True)
class Held:
    """`codes` [n]: HIT_SHARED (held), a miss code, FULL (too much is held already, or a view of a block not in DRAM), LATER.
    `count`: leading blocks held. `hold_id` 0: nothing is held."""

    hold_id: HoldId
    count: int
    codes: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class SsdExtentCreated:
    """A slab file `number` of `n_slots` slots must be made before its slots are written."""

    number: int
    arena: NamespaceUid
    slot_bytes: int
    n_slots: int


@dataclass(frozen=True, slots=True)
class SsdExtentDropped:
    """The slab file must be deleted before later files are made: its bytes are counted no more."""

    number: int


@dataclass(frozen=True, slots=True)
class SsdErase:
    """The slot's record must be zeroed: before the slot is written again, and before a removal that caused it is confirmed."""

    slot: Slot


Action = PopulateExtent | PunchExtent | CloseArena | SsdExtentCreated | SsdExtentDropped | SsdErase
DRAM: Final = Tiers.DRAM
SSD: Final = Tiers.SSD
