"""Who has which block: the index of the master, and of a client's mirror. Pure.

Owns: key -> replicas, per namespace, and the memory of keys that are gone (`Gone`). Not here: workers and their states
(`membership`), the order of reports (`session`), events to watchers (`master.watch`).

    namespaces: uid ─▶ {key: replicas}     replicas: ((holder, tiers), ...), one shared tuple for all keys that lie alike

A replica costs a dict entry and a key, since equal tuples are shared. Retiring a holder is one step: lookups mask it from then
on, `purge` sweeps its entries later, some at a time.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvpool.core.keys import split_keys
from kvpool.core.types import KEY_BYTES, Holder, Key, MissCause, NamespaceUid

Replicas = tuple[tuple[Holder, int], ...]  # ((holder, Tiers as int), ...), never a holder twice, never tiers 0

TIERS_MASK: Final = 0x0F
_KEY_COST: Final = -(-sys.getsizeof(bytes(KEY_BYTES)) // 16) * 16  # as the allocator rounds it
_NOBODY: Final[Replicas] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a snapshot: one holder's keys [n * 34] and tiers u8 [n]."""

    holder: Holder
    keys: bytes
    tiers: bytes


class _Table:
    """One namespace's keys."""

    __slots__ = ("blocks", "n_bytes", "per_holder", "sizes")

    def __init__(self, *, sized: bool) -> None:
        self.blocks: dict[Key, Replicas] = {}
        self.per_holder: dict[Holder, int] = {}
        self.sizes: dict[Key, int] | None = {} if sized else None
        self.n_bytes = 0  # of distinct keys; kept for sized tables only


class Catalog:
    """Not thread-safe: the master's loop, or a mirror's lock, guards it."""

    __slots__ = ("_dropped", "_interned", "_retired", "_sweep", "_tables")

    def __init__(self) -> None:
        self._tables: dict[NamespaceUid, _Table] = {}
        self._interned: dict[Replicas, Replicas] = {}
        self._retired: set[Holder] = set()
        self._sweep: _Sweep | None = None
        self._dropped: list[dict[Key, Replicas]] = []  # emptied by `purge`: giving a million keys back at once takes long

    # --- changes --------------------------------------------------------------------------------------------------------

    def open_namespace(self, uid: NamespaceUid, *, sized: bool = False) -> None:
        """`sized`: values differ in size, and `apply` is told each one's (else bytes are not counted here)."""
        if uid not in self._tables:
            self._tables[uid] = _Table(sized=sized)

    def apply(self, uid: NamespaceUid, holder: Holder, keys: bytes, tiers: bytes, *, sizes: bytes = b"") -> list[int]:
        """The holder has key i in `tiers[i]` (low 4 bits; 0: not any more). keys: n * 34 bytes; tiers: u8 [n]; sizes: u32
        little-endian [n] or empty. Returns which of them (their positions) nobody has any more. A namespace that was not opened
        is made."""
        table = self._tables.get(uid)
        if table is None:
            table = self._tables[uid] = _Table(sized=False)
        blocks = table.blocks
        gone: list[int] = []
        added = removed = 0
        memo: dict[int, Replicas] = {}  # by identity: equal tuples are one object, kept alive by `_interned`
        sized = table.sizes is not None and len(sizes) == 4 * len(tiers)
        size_of = np.frombuffer(sizes, dtype="<u4").tolist() if sized else []
        for i, (key, state) in enumerate(zip(split_keys(keys), tiers, strict=True)):
            tier = state & TIERS_MASK
            before = blocks.get(key, _NOBODY)
            change = id(before) << 4 | tier
            after = memo.get(change)
            if after is None:
                after = memo[change] = self._with(before, holder, tier)
            if after is before:
                continue
            if len(after) > len(before):
                added += 1
            elif len(after) < len(before):
                removed += 1
                if after and self._retired and not self._alive(after):  # who is left is masked: nobody has it
                    gone.append(i)
            if after:
                blocks[key] = after
                if sized and table.sizes is not None:
                    table.n_bytes += size_of[i] - table.sizes.get(key, 0)
                    table.sizes[key] = size_of[i]
            else:
                del blocks[key]
                gone.append(i)
                if table.sizes is not None:
                    table.n_bytes -= table.sizes.pop(key, 0)
        if added or removed:
            table.per_holder[holder] = table.per_holder.get(holder, 0) + added - removed
        return gone

    def _with(self, before: Replicas, holder: Holder, tier: int) -> Replicas:
        others = tuple(replica for replica in before if replica[0] != holder)
        after = (*others, (holder, tier)) if tier else others
        if set(after) == set(before):
            return before
        return self._interned.setdefault(after, after)

    def forget(self, uid: NamespaceUid, keys: Iterable[Key]) -> int:
        """Drops every replica of these keys; returns how many of the keys were there."""
        table = self._tables.get(uid)
        n = 0
        for key in keys if table is not None else ():
            assert table is not None
            before = table.blocks.pop(key, None)
            if before is None:
                continue
            n += self._alive(before) is not _NOBODY
            for holder, _ in before:
                table.per_holder[holder] -= 1
            if table.sizes is not None:
                table.n_bytes -= table.sizes.pop(key, 0)
        return n

    def drop_all(self, uid: NamespaceUid) -> int:
        """Every entry of the namespace is gone; it stays open. Returns how many keys there were."""
        table = self._tables.get(uid)
        if table is None:
            return 0
        n = self.count(uid)
        if table.blocks:
            self._dropped.append(table.blocks)
        self._tables[uid] = _Table(sized=table.sizes is not None)
        return n

    def drop_namespace(self, uid: NamespaceUid) -> int:
        n = self.drop_all(uid)
        self._tables.pop(uid, None)
        return n

    def retire(self, holder: Holder) -> None:
        """All entries of this holder are gone at once for every lookup; `purge` takes them out."""
        self._retired.add(holder)

    def purge(self, max_keys: int) -> tuple[bool, list[tuple[NamespaceUid, Key]]]:
        """Looks at up to `max_keys` keys for entries of retired holders, after it gave back as many that were dropped. Returns
        whether there is more to do, and the keys that nobody has any more."""
        if self._dropped:
            dropped = self._dropped[-1]
            for _ in range(min(max_keys, len(dropped))):
                dropped.popitem()
            if not dropped:
                self._dropped.pop()
            return self.retiring, []
        if self._sweep is None:
            if not self._retired:
                return False, []
            named = [uid for uid, table in self._tables.items() if any(table.per_holder.get(h) for h in self._retired)]
            self._sweep = _Sweep(frozenset(self._retired), named)
        sweep = self._sweep
        lost: list[tuple[NamespaceUid, Key]] = []
        memo: dict[Replicas, Replicas] = {}
        left = max_keys
        while left > 0:
            uid, keys = sweep.next(left, self._list_keys)
            if uid is None:
                self._finish(sweep)
                break
            table = self._tables.get(uid)
            left -= len(keys)
            for key in keys if table is not None else ():
                assert table is not None
                before = table.blocks.get(key, _NOBODY)
                after = memo.get(before)
                if after is None:
                    kept = tuple(replica for replica in before if replica[0] not in sweep.holders)
                    after = memo[before] = before if len(kept) == len(before) else self._interned.setdefault(kept, kept)
                if after is before:
                    continue
                if after:
                    table.blocks[key] = after
                else:
                    del table.blocks[key]
                    lost.append((uid, key))
                    if table.sizes is not None:
                        table.n_bytes -= table.sizes.pop(key, 0)
        return self._sweep is not None or bool(self._retired), lost

    def _list_keys(self, uid: NamespaceUid) -> list[Key]:
        table = self._tables.get(uid)
        return list(table.blocks) if table is not None else []

    def _finish(self, sweep: _Sweep) -> None:
        self._sweep = None
        self._retired -= sweep.holders
        for table in self._tables.values():
            for holder in sweep.holders:
                table.per_holder.pop(holder, None)
        self._interned = {r: r for r in self._interned if not any(h in sweep.holders for h, _ in r)}

    # --- lookups --------------------------------------------------------------------------------------------------------

    def _alive(self, replicas: Replicas) -> Replicas:
        if not self._retired:
            return replicas
        alive = tuple(replica for replica in replicas if replica[0] not in self._retired)
        return alive or _NOBODY

    def locate(self, uid: NamespaceUid, keys: Sequence[Key]) -> list[Replicas]:
        """Per key: its replicas, () where nobody has it. [n_keys]"""
        table = self._tables.get(uid)
        if table is None:
            return [_NOBODY] * len(keys)
        get = table.blocks.get
        found = [get(key, _NOBODY) for key in keys]
        if not self._retired:
            return found
        memo: dict[Replicas, Replicas] = {}
        for i, replicas in enumerate(found):
            if replicas:
                alive = memo.get(replicas)
                if alive is None:
                    alive = memo[replicas] = self._alive(replicas)
                found[i] = alive
        return found

    def match(self, uid: NamespaceUid, keys: Sequence[Key]) -> int:
        """How many leading keys somebody has."""
        table = self._tables.get(uid)
        if table is None:
            return 0
        blocks = table.blocks
        if not self._retired:
            for i, key in enumerate(keys):
                if key not in blocks:
                    return i
            return len(keys)
        memo: dict[int, bool] = {id(_NOBODY): False}
        for i, key in enumerate(keys):
            replicas = blocks.get(key, _NOBODY)
            alive = memo.get(id(replicas))
            if alive is None:
                alive = memo[id(replicas)] = bool(self._alive(replicas))
            if not alive:
                return i
        return len(keys)

    def lost(self, uid: NamespaceUid, key: Key) -> bool:
        """True when only retired holders had it and `purge` has not come by yet."""
        table = self._tables.get(uid)
        before = table.blocks.get(key, _NOBODY) if table is not None else _NOBODY
        return bool(before) and not self._alive(before)

    def count(self, uid: NamespaceUid) -> int:
        """Distinct keys of the namespace; those of holders that retired count until `purge` is through."""
        table = self._tables.get(uid)
        return len(table.blocks) if table is not None else 0

    def value_bytes(self, uid: NamespaceUid, *, block_bytes: int) -> int:
        """Bytes of the namespace's distinct blocks (one replica each)."""
        table = self._tables.get(uid)
        if table is None:
            return 0
        return len(table.blocks) * block_bytes if table.sizes is None else table.n_bytes

    def count_of(self, holder: Holder) -> int:
        if holder in self._retired:
            return 0
        return sum(table.per_holder.get(holder, 0) for table in self._tables.values())

    @property
    def retiring(self) -> bool:
        """True while `purge` has something to do."""
        return bool(self._retired or self._dropped)

    @property
    def replicas(self) -> int:
        return sum(n for table in self._tables.values() for holder, n in table.per_holder.items() if holder not in self._retired)

    @property
    def index_bytes(self) -> int:
        """Memory of the index: its dicts as the interpreter reports them, its keys as the allocator rounds them, the
        shared replica tuples."""
        total = sys.getsizeof(self._interned)
        total += sum(sys.getsizeof(r) + len(r) * (sys.getsizeof((0, 0)) + sys.getsizeof(1 << 20)) for r in self._interned)
        for table in self._tables.values():
            total += sys.getsizeof(table.blocks) + len(table.blocks) * _KEY_COST
            if table.sizes is not None:
                total += sys.getsizeof(table.sizes) + len(table.sizes) * sys.getsizeof(1 << 20)
        return total

    def namespaces(self) -> list[NamespaceUid]:
        return list(self._tables)

    def snapshot(self, uid: NamespaceUid, max_keys: int) -> Iterator[Chunk]:
        """All entries, as chunks of at most `max_keys` keys. The namespace may change between two chunks: each tells the state
        at the moment when it is made, for the keys that were there at the first one."""
        keys = self._list_keys(uid)
        for start in range(0, len(keys), max_keys):
            part = keys[start : start + max_keys]
            by_holder: dict[Holder, tuple[list[Key], bytearray]] = {}
            for key, replicas in zip(part, self.locate(uid, part), strict=True):
                for holder, tier in replicas:
                    names, tiers = by_holder.setdefault(holder, ([], bytearray()))
                    names.append(key)
                    tiers.append(tier)
            for holder, (names, tiers) in by_holder.items():
                yield Chunk(holder, b"".join(names), bytes(tiers))

    def keys(self, uid: NamespaceUid) -> list[Key]:
        """All keys of the namespace, in no order; some may have just lost their last holder."""
        return self._list_keys(uid)


def page_of(keys: Iterable[Key], *, after: Key, limit: int) -> list[Key]:
    """The `limit` smallest keys above `after`, in order. Looks at all of them: for operators, and off the loop."""
    return heapq.nsmallest(limit, (key for key in keys if key > after))


class _Sweep:
    """Where a purge stands: holders it takes out, namespaces and keys still to be looked at."""

    __slots__ = ("_keys", "_uid", "_uids", "holders")

    def __init__(self, holders: frozenset[Holder], uids: list[NamespaceUid]) -> None:
        self.holders = holders
        self._uids = uids
        self._uid: NamespaceUid | None = None
        self._keys: list[Key] = []

    def next(self, n: int, list_keys: Callable[[NamespaceUid], list[Key]]) -> tuple[NamespaceUid | None, list[Key]]:
        """Up to n keys of one namespace; (None, []) at the end. They leave the list, which would else free all at once."""
        while not self._keys:
            if not self._uids:
                return None, []
            self._uid = self._uids.pop()
            self._keys = list_keys(self._uid)
        part = self._keys[-n:]
        del self._keys[-n:]
        return self._uid, part


class Gone:
    """Why keys are not there: a bounded memory, in two generations; the older one is dropped when the younger is full."""

    __slots__ = ("_half", "_old", "_young", "forgot")

    def __init__(self, keys_max: int) -> None:
        self._half = max(1, keys_max // 2)
        self._young: dict[bytes, MissCause] = {}
        self._old: dict[bytes, MissCause] = {}
        self.forgot = False  # True once anything was dropped: from then on "never stored" cannot be told

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, uid: NamespaceUid, keys: Iterable[Key], cause: MissCause) -> None:
        for key in keys:
            if len(self._young) >= self._half:
                self.forgot = self.forgot or bool(self._old)
                self._old, self._young = self._young, {}
            self._young[uid + key] = cause

    def cause(self, uid: NamespaceUid, key: Key) -> MissCause | None:
        name = uid + key
        return self._young.get(name) or self._old.get(name)
