"""Which blocks are worth another copy: how often a client reads them from other hosts, and which chains make a worker's link hot.
Pure.

Owns these two judgements. Does not own: the copying (`worker.spread`), where a copy goes (`placement`), how long it stays (the
target's eviction: a copy that is not used any more is as cold as any other block).

`Frequency` is a count-min sketch (Cormode & Muthukrishnan, "An improved data stream summary", 2005) whose counts are halved as it
fills, so that it forgets (as in TinyLFU, Einziger, Friedman & Manes, 2017).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.core.keys import KeyBatch
from kvpool.core.types import KEY_BYTES, Key, NamespaceUid

ROWS: Final = 4
COLUMN_BITS: Final = 15  # 256 KiB a sketch
COLUMNS: Final = 1 << COLUMN_BITS
HALVE_AFTER: Final = 4 * COLUMNS  # keys noted: at this fill a cell has 4 on average
ASKED_MAX: Final = 65_536  # keys whose copy was asked for lately
ASKED_FOR_MS: Final = 10_000  # then it may be asked for again: the copy failed, or was evicted since
READS_MAX: Final = 512  # latest reads that say what makes a link hot
HOT_PART: Final = 0.5  # of what was read lately is copied elsewhere at a time
WINDOW_MS: Final = 2000  # lately


class Frequency:
    """How often keys were noted, lately. Estimates are never too low, but for what was halved."""

    def __init__(self) -> None:
        self._table = np.zeros((ROWS, COLUMNS), dtype=np.uint16)
        self._noted = 0

    def note(self, keys: bytes) -> npt.NDArray[np.uint16]:
        """Each of these packed keys (all different) was used once more; [n] how often by now."""
        n = len(keys) // KEY_BYTES
        raw = np.frombuffer(keys, dtype=np.uint8).reshape(n, KEY_BYTES)
        words = np.ascontiguousarray(raw[:, :8]).view("<u8")[:, 0] ^ (raw[:, 32].astype(np.uint64) << np.uint64(3))
        columns = [(words >> np.uint64(COLUMN_BITS * row)).astype(np.intp) & (COLUMNS - 1) for row in range(ROWS)]
        counts: npt.NDArray[np.uint16] = self._table[0][columns[0]]
        for row in range(1, ROWS):
            counts = np.minimum(counts, self._table[row][columns[row]])
        counts += np.uint16(1)
        for row in range(ROWS):  # (conservative: a cell never grows past the estimate)
            np.maximum.at(self._table[row], columns[row], counts)
        self._noted += n
        if self._noted >= HALVE_AFTER:
            self._noted //= 2
            self._table >>= 1
        return counts


class Asked:
    """What was asked for lately, so that it is not asked for again while it is under way. At most ASKED_MAX keys."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[NamespaceUid, Key], int] = OrderedDict()

    def fresh(self, uid: NamespaceUid, keys: Iterable[Key], *, now_ms: int) -> list[bool]:
        """Per key whether it was not asked for; it is from now on."""
        until, answers = self._until, []
        for key in keys:
            name = (uid, key)
            new = until.get(name, 0) <= now_ms
            if new:
                until[name] = now_ms + ASKED_FOR_MS
                until.move_to_end(name)
            answers.append(new)
        while len(until) > ASKED_MAX:
            until.popitem(last=False)
        return answers


class RemoteReads:
    """A client's reads from other hosts, and what of them its own host's worker should have."""

    def __init__(self, *, copy_after: int) -> None:
        """`copy_after`: reads from other hosts after which a block is worth a copy here: each later one costs the network again,
        the copy costs it once."""
        self._copy_after = copy_after
        self._counts = Frequency()
        self._asked = Asked()

    def read(self, batch: KeyBatch, *, now_ms: int) -> list[KeyBatch]:
        """These blocks came from another host. -> runs of them that are worth a copy now, each told once."""
        worth = np.flatnonzero(self._counts.note(batch.keys) >= self._copy_after).tolist()
        if not worth:
            return []
        keys = batch.split()
        new = self._asked.fresh(batch.namespace, [keys[i] for i in worth], now_ms=now_ms)
        return [batch.slice(start, stop) for start, stop in runs([i for i, is_new in zip(worth, new, strict=True) if is_new])]


def runs(indexes: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indexes as (start, stop) without gaps."""
    found: list[tuple[int, int]] = []
    for index in indexes:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


@dataclass(frozen=True, slots=True)
class _Served:
    at_ms: int
    batch: KeyBatch
    n_bytes: int


class LinkLoad:
    """What a worker has sent over the network lately. `link_bytes_per_s`: what its link can carry; `hot_at`: part of it above
    which the link is a bottleneck. Reads may be told by several threads meanwhile: `hottest` looks at a copy."""

    def __init__(self, *, link_bytes_per_s: int, hot_at: float) -> None:
        self._hot_bytes = link_bytes_per_s * hot_at * WINDOW_MS / 1000
        self._reads: deque[_Served] = deque(maxlen=READS_MAX)
        self.total_bytes = 0

    def served(self, batch: KeyBatch, n_bytes: int, *, now_ms: int) -> None:
        """A read from elsewhere was answered with so many bytes of these blocks."""
        self.total_bytes += n_bytes
        self._reads.append(_Served(now_ms, batch, n_bytes))

    def hottest(self, *, now_ms: int) -> list[KeyBatch]:
        """The batches that make up half of the link's load, the heaviest first; empty while the link is not a bottleneck."""
        lately = [read for read in self._reads.copy() if read.at_ms > now_ms - WINDOW_MS]
        if not lately:
            return []
        total = sum(read.n_bytes for read in lately)
        if len(lately) == READS_MAX:  # the window holds more reads than are remembered
            total = int(total * WINDOW_MS / max(1, now_ms - lately[0].at_ms))
        if total < self._hot_bytes:
            return []
        weights: Counter[tuple[NamespaceUid, bytes]] = Counter()
        batches: dict[tuple[NamespaceUid, bytes], KeyBatch] = {}
        for read in lately:
            name = (read.batch.namespace, read.batch.keys)
            weights[name] += read.n_bytes
            batches[name] = read.batch
        wanted, found = HOT_PART * sum(weights.values()), []
        for name, weight in weights.most_common():
            if wanted <= 0:
                break
            found.append(batches[name])
            wanted -= weight
        return found


def missing_copies(me: str, holders: Sequence[str], *, replicas: int) -> int:
    """Copies of a block that this worker has to make: what is missing, if of all who have it (`holders`, with this one) its
    name is the first, else none."""
    there = {*holders, me}
    return max(0, replicas - len(there)) if min(there) == me else 0
