"""Packed memory of the learned policy: what it keeps of every run of blocks, and of blocks that left ("ghosts").

Owns the arrays. Does not own what they mean for eviction (`hazard`), nor cached blocks (a run's members are there).

    run (number 1..)    time, length, class and age, blocks left, end of its request, recent? .... 23 bytes
                        places in the queue by age, the queue of ghosts, the table of heads ....... 24 bytes
    ghost               58 bits of the key's hash and its use count, the next deeper one .......... 12 bytes

A run is a stretch of one chain. Blocks leave it at its head (a later request takes them over) and become ghosts from its end,
so its ghosts are the stretch below its cached blocks, and whoever comes down the chain meets their first one first: only that
one (the head) can be looked up. Ghosts are forgotten run by run, in the order in which runs got their first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

from librt.vecs import extend, vec
from mypy_extensions import i16, i32, i64, u8

from kvpool.core.policy.classes import EDGES_S, N_BINS

USE_BITS: Final = 4
PRINT_BITS: Final = 58  # with a use count less than 63: no big number where this is compiled
USE_MASK: Final = (1 << USE_BITS) - 1
PRINT_MASK: Final = (1 << PRINT_BITS) - 1
HEADS_MIN: Final = 1024
NEVER: Final = float("inf")
ROUNDING: Final = 1e-9
UNCOUNTED: Final = (1 << 31) - 1
GROWTH_PART: Final = 32  # of the memory, that it grows by
END_MAX: Final = UNCOUNTED  # (blocks may be deeper; what is told apart by it is not worth four bytes more a run)
RUNS_MIN: Final = 64  # that it grows by, at least


def _zeros(n: int) -> vec[i32]:
    return vec[i32](array("i", bytes(4 * n)))


def _longer(column: vec[i32], n: int) -> vec[i32]:
    """The same, and n zeros behind. (Grown by what `append` takes, it would have half of it in reserve.)"""
    return extend(extend(vec[i32](capacity=len(column) + n), column), array("i", bytes(4 * n)))


class _Queue:
    """First in, first out queue of run numbers, with removal from the middle, in two arrays."""

    def __init__(self) -> None:
        self.first = self.last = 0
        self.after: vec[i32] = _zeros(1)
        self.before: vec[i32] = _zeros(1)

    def grow(self, n: int) -> None:
        """So many more numbers may come."""
        self.after, self.before = _longer(self.after, n), _longer(self.before, n)

    def push(self, no: int) -> None:
        last = self.last
        self.before[no], self.after[no] = last, 0
        if last:
            self.after[last] = no
        else:
            self.first = no
        self.last = no

    def push_before(self, no: int, other: int) -> None:
        before: int = self.before[other]
        self.before[no], self.after[no], self.before[other] = before, other, no
        if before:
            self.after[before] = no
        else:
            self.first = no

    def remove(self, no: int) -> None:
        before: int = self.before[no]
        after: int = self.after[no]
        if before:
            self.after[before] = after
        else:
            self.first = after
        if after:
            self.before[after] = before
        else:
            self.last = before


class History:
    """Runs and ghosts. All calls O(1), or O(blocks named)."""

    def __init__(self) -> None:
        self.time_s: vec[float] = vec[float]([0.0])  # of the run's last use
        self.length: vec[i32] = _zeros(1)  # blocks when it was made: what the tables' events are parts of
        self.left: vec[i32] = _zeros(1)  # of these, cached or ghosts
        self.end: vec[i32] = _zeros(1)  # rank behind the last block of the request that made it
        self.key: vec[i16] = vec[i16]([0])  # class and age
        self._in_time = _Queue()  # all runs, by time
        self._oldest: vec[i32] = _zeros(N_BINS - 1)  # by age bin: the first in time of those in this bin or a younger one
        # What LRU would have, were it in this one's place: the last of `_in_time`, of the first of these some blocks perhaps.
        self._recent: vec[u8] = vec[u8]([0])  # by run: 1 for these
        self._oldest_recent = 0  # the first of these
        self._n_recent = 0  # blocks of all these
        self._n_lru = 0  # how many LRU has
        self.latest = 0  # the first in time of those of the latest request, 0: it has none yet
        self.soonest_s = NEVER  # when the next one of these gets to another bin, or earlier
        self._fading = _Queue()
        self._head: vec[i32] = _zeros(1)  # its first ghost, 0: none
        self._next_in_slot: vec[i32] = _zeros(1)
        self._slots: vec[i32] = _zeros(HEADS_MIN)
        self._n_heads = 0
        self._free = 0  # the first number that is free, the next one is in `_next_in_slot`
        self._ghost_print: vec[i64] = vec[i64]([0])
        self._ghost_next: vec[i32] = _zeros(1)
        self._ghost_free = 0
        self.n_ghosts = 0
        self.n_runs = 0

    # --- runs -----------------------------------------------------------------------------------------------------------

    def add(self, now_s: float, length: int, key: int, end: int, before: int = 0) -> int:
        """A new run of age bin 0. before: 0, or what is `latest`: the run is of its request, of its time, and older for LRU, as
        what is deeper in a chain. -> its number."""
        self.n_runs += 1
        if before:
            now_s = self.time_s[before]
        if not self._free:
            self._add_numbers()
        no = self._free
        self._free = self._next_in_slot[no]
        self.time_s[no] = now_s
        self.length[no] = length
        self.left[no] = length
        self.end[no] = min(end, END_MAX)
        self.key[no] = key
        self._recent[no] = 1
        if before:
            self._in_time.push_before(no, before)
        else:
            self._in_time.push(no)
        self._n_recent += length
        oldest = self._oldest
        if oldest[0] == before:
            for age in range(N_BINS - 1):
                if oldest[age] != before:
                    break
                oldest[age] = no
        if self.latest == before:
            self.latest = no
        if self._oldest_recent == before:
            self._oldest_recent = no
        return no

    def _add_numbers(self) -> None:
        """More free ones."""
        first: int = len(self.length)
        n = max(RUNS_MIN, first // GROWTH_PART)
        self.time_s = extend(extend(vec[float](capacity=first + n), self.time_s), array("d", bytes(8 * n)))
        self.key = extend(extend(vec[i16](capacity=first + n), self.key), array("h", bytes(2 * n)))
        self._recent = extend(extend(vec[u8](capacity=first + n), self._recent), bytes(n))
        self.length, self.left, self.end = _longer(self.length, n), _longer(self.left, n), _longer(self.end, n)
        self._head, self._next_in_slot = _longer(self._head, n), _longer(self._next_in_slot, n)
        self._in_time.grow(n)
        self._fading.grow(n)
        following = self._next_in_slot
        for no in range(first, first + n - 1):
            following[no] = no + 1
        self._free = first

    def next_request(self, n_lru: int) -> None:
        """Runs that are added from now on are another request's. n_lru: blocks that LRU would have by now."""
        self._n_lru = n_lru
        self.latest = 0
        no, left, after = self._oldest_recent, self.left, self._in_time.after
        while no and self._n_recent - left[no] >= n_lru:
            self._n_recent -= left[no]
            self._recent[no] = 0
            no = after[no]
        self._oldest_recent = no

    def lru_hits(self, no: int, n: int) -> int:
        """How many of the run's first n blocks LRU would have now."""
        if not self._recent[no]:
            return 0
        if no != self._oldest_recent:
            return n
        return max(0, min(n, self._n_lru - (self._n_recent - self.left[no])))

    def reaches(self, no: int, end: int) -> None:
        """The request that made the run goes on up to this rank."""
        self.end[no] = min(end, END_MAX)

    def end_of(self, no: int) -> int:
        """Rank behind the last block of that request, END_MAX: or further."""
        end: int = self.end[no]  # (no i32: what it is compared with may be more)
        return end

    def lessen(self, no: int, n: int) -> None:
        """n blocks of the run are none of its any more."""
        self.left[no] -= n
        if self._recent[no]:
            self._n_recent -= n

    def add_uncounted(self, now_s: float, key: int) -> int:
        """A run of one block and those that `grow` adds; nothing is counted of its life: each event is next to no part of it."""
        no = self.add(now_s, 1, key, 0)
        self.length[no] = UNCOUNTED
        return no

    def part(self, no: int) -> float:
        """What is left of the run, of all its blocks when it was made."""
        left: int = self.left[no]
        length: int = self.length[no]
        return left / length

    def grow(self, no: int) -> None:
        """The run, one of `add_uncounted`, has one block more."""
        self.lessen(no, -1)

    def is_whole(self, no: int) -> bool:
        """Nothing of the run was used again or left."""
        return self.left[no] == self.length[no] and not self._head[no]

    def absorb(self, no: int, other: int) -> None:
        """The blocks of the other run, a whole one, are this one's; the other is no more."""
        self.length[no] += self.length[other]
        n = self.left[other]
        self.lessen(other, n)
        self.lessen(no, -n)
        self.drop(other)

    def drop(self, no: int) -> None:
        """A run of which nothing is left."""
        assert not self._head[no]
        oldest = self._oldest
        key: int = self.key[no]
        for age in range(key % N_BINS, N_BINS - 1):
            if oldest[age] != no:
                break
            oldest[age] = self._in_time.after[no]
        if self.latest == no:
            self.latest = self._in_time.after[no]
        if self._oldest_recent == no:
            self._oldest_recent = self._in_time.after[no]
        self._in_time.remove(no)
        self.n_runs -= 1
        self._next_in_slot[no], self._free = self._free, no

    def pass_by(self, now_s: float, reached: vec[float], watched: list[Any]) -> list[int]:
        """The latest request used what it found: all runs of earlier ones are out of the first age bin. As `age`."""
        moved: list[int] = []
        after, times, keys, oldest = self._in_time.after, self.time_s, self.key, self._oldest
        no: int = oldest[0]
        end = self.latest
        while no != end:
            time_s, age = times[no], 1
            key: int = keys[no]
            following: int = after[no]
            part = self.part(no)
            reached[key + 1] += part
            while age < N_BINS - 1 and now_s - time_s >= EDGES_S[age]:
                if oldest[age] == no:
                    oldest[age] = following
                age += 1
                reached[key + age] += part
            keys[no] = key + age
            if time_s + EDGES_S[age] < self.soonest_s:
                self.soonest_s = (time_s + EDGES_S[age]) * (1 - ROUNDING)
            if watched[no] is not None:
                moved.append(no)
            no = following
        oldest[0] = end
        return moved

    def age(self, now_s: float, reached: vec[float], watched: list[Any]) -> list[int]:
        """Moves runs to the age bin that they have reached, and counts in `reached`, by key, what there is of each, once a bin.
        -> those that moved and for which `watched`, by number, has something, in order; one that moved twice is named twice."""
        moved: list[int] = []
        soonest_s = NEVER
        after, times, keys, oldest = self._in_time.after, self.time_s, self.key, self._oldest
        end: int = oldest[0]
        for age in range(1, N_BINS - 1):
            no: int = oldest[age]
            if no == end:
                continue
            edge_s = EDGES_S[age]
            due = now_s - edge_s
            time_s = times[no]
            while time_s <= due:
                key: int = keys[no] + 1
                keys[no] = key
                reached[key] += self.part(no)
                if watched[no] is not None:
                    moved.append(no)
                no = after[no]
                if no == end:
                    break
                time_s = times[no]
            else:
                if time_s + edge_s < soonest_s:
                    soonest_s = time_s + edge_s
            oldest[age] = no
        self.soonest_s = soonest_s * (1 - ROUNDING)
        return moved

    # --- ghosts ---------------------------------------------------------------------------------------------------------

    def become_ghosts(self, no: int, prints: list[int], uses: Sequence[int]) -> None:
        """The run's deepest cached blocks left, in chain order; they are above the run's other ghosts."""
        head: int = self._head[no]
        if head:
            self._unlist(no, head)
        else:
            self._fading.push(no)
        self.n_ghosts += len(prints)
        short = self.n_ghosts + 1 - len(self._ghost_print)
        if short > 0:
            self._add_nodes(short)
        column, following = self._ghost_print, self._ghost_next
        first = last = node = self._ghost_free  # (free ones are linked already)
        for i, print58 in enumerate(prints):
            column[node] = print58 << USE_BITS | uses[i]
            last, node = node, following[node]
        self._ghost_free, following[last], self._head[no] = node, head, first
        self._list(no, prints[0])

    def _add_nodes(self, n: int) -> None:
        """So many more free ones, at least."""
        first: int = len(self._ghost_print)
        n = max(n, first // GROWTH_PART)
        self._ghost_print = extend(extend(vec[i64](capacity=first + n), self._ghost_print), array("q", bytes(8 * n)))
        self._ghost_next = following = _longer(self._ghost_next, n)
        for node in range(first, first + n - 1):
            following[node] = node + 1
        following[first + n - 1], self._ghost_free = self._ghost_free, first

    def find(self, print58: int) -> int:
        """Number of the run whose first ghost this is, 0: none."""
        slots = self._slots
        no: int = slots[print58 & (len(slots) - 1)]
        prints, head = self._ghost_print, self._head
        while no:
            first: int = head[no]
            if prints[first] >> USE_BITS == print58:
                break
            no = self._next_in_slot[no]
        return no

    def look(self, no: int, prints: Iterable[int]) -> bytes:
        """Use counts of the ghosts that `take` would take."""
        node: int = self._head[no]
        column, following = self._ghost_print, self._ghost_next
        uses = bytearray()
        for print58 in prints:
            ghost: int = column[node] if node else 0
            if not node or ghost >> USE_BITS != print58:
                break
            uses.append(ghost & USE_MASK)
            node = following[node]
        return bytes(uses)

    def take(self, no: int, prints: Iterable[int]) -> bytes:
        """Ghosts of the run, from its first, that are equal to these, are ghosts no more. -> their use counts. `left` is
        lowered; a run with nothing left is the caller's to drop."""
        node: int = self._head[no]
        self._unlist(no, node)
        first = last = node
        uses = bytearray()
        column, following = self._ghost_print, self._ghost_next
        for print58 in prints:
            ghost: int = column[node] if node else 0
            if not node or ghost >> USE_BITS != print58:
                break
            uses.append(ghost & USE_MASK)
            last, node = node, following[node]
        if uses:
            self._release(first, last, len(uses))
        self.lessen(no, len(uses))
        self._head[no] = node
        if node:
            self._list(no, self._ghost_print[node] >> USE_BITS)
        else:
            self._fading.remove(no)
        return bytes(uses)

    def forget_oldest(self) -> int:
        """Forgets the ghosts of the run that has some for longest. -> its number (0: there is none)."""
        no = self._fading.first
        if no:
            node: int = self._head[no]
            self._unlist(no, node)
            following = self._ghost_next
            n, last = 1, node
            after: int = following[last]
            while after:
                n, last = n + 1, after
                after = following[last]
            self._release(node, last, n)
            self.lessen(no, n)
            self._head[no] = 0
            self._fading.remove(no)
        return no

    def _release(self, first: int, last: int, n: int) -> None:
        """n nodes, from this to that one, are free."""
        self._ghost_next[last], self._ghost_free = self._ghost_free, first
        self.n_ghosts -= n

    def _list(self, no: int, print58: int) -> None:
        if self._n_heads > len(self._slots):
            self._grow()
        slot: int = print58 & (len(self._slots) - 1)
        self._next_in_slot[no] = self._slots[slot]
        self._slots[slot] = no
        self._n_heads += 1

    def _unlist(self, no: int, head: int) -> None:
        slots, following = self._slots, self._next_in_slot
        slot = (self._ghost_print[head] >> USE_BITS) & (len(slots) - 1)
        at: int = slots[slot]
        if at == no:
            slots[slot] = following[no]
        else:
            while following[at] != no:
                at = following[at]
            following[at] = following[no]
        self._n_heads -= 1

    def _grow(self) -> None:
        listed: list[int] = []
        for first in self._slots:
            no: int = first
            while no:
                listed.append(no)
                no = self._next_in_slot[no]
        self._slots = _zeros(2 * len(self._slots))
        for no in listed:
            head: int = self._head[no]
            slot = (self._ghost_print[head] >> USE_BITS) & (len(self._slots) - 1)
            self._next_in_slot[no] = self._slots[slot]
            self._slots[slot] = no

    def n_bytes(self) -> int:
        """Of all arrays, with what they have in reserve."""
        columns: list[Any] = [
            self.time_s, self.length, self.left, self.end, self.key, self._recent, self._head, self._next_in_slot, self._slots,
            self._in_time.after, self._in_time.before, self._fading.after, self._fading.before, self._oldest,
            self._ghost_print, self._ghost_next,
        ]  # fmt: skip
        return sum(memoryview(column).nbytes for column in columns)

    def check(self) -> None:
        """Asserts the invariants. O(everything)."""
        n, heads, no = 0, 0, self._fading.first
        while no:
            heads += 1
            node: int = self._head[no]
            of_run = 0
            assert node and self.find(self._ghost_print[node] >> USE_BITS), "a ghost that cannot be found"
            while node:
                n, of_run = n + 1, of_run + 1
                node = self._ghost_next[node]
            assert of_run <= self.left[no] <= self.length[no], "more ghosts than blocks"
            no = self._fading.after[no]
        recent, no = 0, self._oldest_recent
        while no:
            assert self._recent[no], "an older one is recent"
            recent, no = recent + self.left[no], self._in_time.after[no]
        assert recent == self._n_recent, "recent blocks are miscounted"
        assert n == self.n_ghosts and heads == self._n_heads, "ghosts are miscounted"
