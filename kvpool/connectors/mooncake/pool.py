"""What an open store has: the client, its namespace, the names, staging, and the keys whose get has failed.

Speaks in names of keys and views of memory and answers in Mooncake's codes; Mooncake's argument lists are in `store`.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from typing import Final

from kvpool.client.client import Client, connect
from kvpool.client.keyed import KeyedHold
from kvpool.connectors.mooncake.codes import INVALID_PARAMS, OBJECT_NOT_FOUND, OK, RPC_FAIL, code_of
from kvpool.connectors.mooncake.config import PinWish, log, say_once
from kvpool.connectors.mooncake.memory import STAGING_BYTES_MAX, BufferHandle, Staging, gather, joined, scatter, view_of
from kvpool.connectors.mooncake.names import NAME_BYTES_MAX, Names, digest_of, is_value
from kvpool.core.fetch import CALL_MS, Candidates, transfer_ms
from kvpool.core.hashing import PrefixHashes
from kvpool.core.layout import KVLayout
from kvpool.core.types import MAX_BLOCK_BYTES, MissCause, RemoveOutcome
from kvpool.errors import InvalidArgument, KVPoolError
from kvpool.transport.base import LinkError
from kvpool.transport.copy_plan import split_by_bytes

VALUE_BYTES_MAX: Final = MAX_BLOCK_BYTES  # 1 GiB, as one block: never visible in part
LIST_MS: Final = 30_000  # of what looks at every key
PUT_MS: Final = 8_000  # more than the default of a put: saves run beside the engine, which does not wait for them
COPY_MS: Final = 60_000  # of copies within this process, which end by themselves
GONE_S: Final = 5.0  # how long a key whose get failed does not exist for this store
GONE_MAX: Final = 1 << 16
UPSERT_TRIES: Final = 4  # another writer may put its value between our remove and our put
NAMESPACE: Final = "mooncake"
LAYOUT: Final = KVLayout.opaque(VALUE_BYTES_MAX, name="mooncake/1")

Pieces = tuple[Sequence[int], Sequence[int]]  # pointers and sizes of one value's parts, in order
_UNREACHABLE: Final = (MissCause.WORKER_LOST, MissCause.TIMEOUT)


class Gone:
    """Keys whose get has failed: they do not exist for this store, until a put or get of them succeeds or some seconds have
    passed. Else a lookup would promise them again at once, and the caller would try for ever. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[bytes, float] = {}

    def __contains__(self, digest: bytes) -> bool:
        until = self._until.get(digest)
        return until is not None and time.monotonic() < until

    def add(self, digests: Sequence[bytes]) -> None:
        now = time.monotonic()
        with self._lock:
            for digest in digests:
                self._until.pop(digest, None)
                self._until[digest] = now + GONE_S
            for digest in list(self._until) if len(self._until) > GONE_MAX else ():
                if len(self._until) > GONE_MAX or self._until[digest] <= now:
                    del self._until[digest]

    def drop(self, digests: Sequence[bytes]) -> None:
        if self._until:
            with self._lock:
                for digest in digests:
                    self._until.pop(digest, None)


class Pool:
    """An open store. Thread-safe. Calls raise KVPoolError and LinkError; `store` makes codes of them."""

    def __init__(self, master: str | None, *, tenant: str, connect_ms: float) -> None:
        self.client: Client = connect(master, deadline_ms=connect_ms)
        try:
            self.namespace = self.client.namespace(namespace_name(tenant), LAYOUT, create=True, hash="external",
                                                   deadline_ms=connect_ms)  # fmt: skip
        except BaseException:
            self.client.close()
            raise
        self.keyed = self.namespace.keyed()
        self.names = Names(self.namespace, self.keyed)
        self.gone = Gone()
        self.staging = Staging()

    def close(self) -> None:
        self.client.close()

    # --- lookups --------------------------------------------------------------------------------------------------------

    def exists(self, keys: Sequence[str]) -> list[int]:
        """1 or 0 each; 0 also when nobody can say."""
        digests = [digest_of(key) for key in keys]
        present = self.keyed.present(b"".join(digests), deadline=_until(CALL_MS))
        return [int(there and digest not in self.gone) for digest, there in zip(digests, present, strict=True)]

    def places(self, keys: Sequence[str]) -> list[Candidates]:
        return self.keyed.locate(b"".join(map(digest_of, keys)), deadline=_until(CALL_MS))

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Bytes of each value, -1 where there is none."""
        return self.keyed.sizes(b"".join(map(digest_of, keys)), deadline=_until(CALL_MS))

    def hold(self, digests: Sequence[bytes], ttl_ms: int) -> KeyedHold:
        """What is there stays readable for a while."""
        return self.keyed.hold(b"".join(digests), ttl_ms=ttl_ms, deadline=_until(CALL_MS))

    # --- puts -----------------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[str], values: Sequence[Sequence[memoryview] | Pieces], *, replace: bool = False,
            pins: PinWish | None = None) -> list[int]:  # fmt: skip
        """A code each. A value: views of its parts, or pointers and sizes of them. `pins`: of the keys that are there then."""
        codes = [OK] * len(keys)
        good: list[int] = []
        sizes: list[int] = []
        for index, (key, value) in enumerate(zip(keys, values, strict=True)):
            size = sum(value[1]) if isinstance(value, tuple) else sum(part.nbytes for part in value)
            if is_name(key) and 0 < size <= VALUE_BYTES_MAX:
                good.append(index)
                sizes.append(size)
            else:
                codes[index] = INVALID_PARAMS
        for start, stop in split_by_bytes(sizes, STAGING_BYTES_MAX, n_max=PART_KEYS):
            part = good[start:stop]
            try:
                done = self._put_part([keys[i] for i in part], [values[i] for i in part], sizes[start:stop], replace=replace)
                if pins is not None:
                    self._pin([keys[i] for i, code in zip(part, done, strict=True) if code == OK], pins)
            except (KVPoolError, LinkError) as error:
                log.warning("put: %s", error)
                done = [RPC_FAIL] * len(part)
            for index, code in zip(part, done, strict=True):
                codes[index] = code
        return codes

    def _pin(self, keys: Sequence[str], pins: PinWish) -> None:
        """A pin that cannot be made does not undo the put: the object is there, and may be evicted."""
        if not keys:
            return
        hashes = hashes_of([digest_of(key) for key in keys])
        try:
            if not pins.level:
                self.namespace.unpin(hashes)
                return
            done = self.namespace.pin(hashes, level=pins.level, ttl_s=pins.ttl_s)
            if any(outcome.value == "refused" for outcome in done.outcomes):
                say_once("pin refused", "hard pins have a quarter of a tier at most: further ones are evicted last")
        except (KVPoolError, LinkError) as error:
            say_once("pin", "objects could not be pinned (said once): %s", error)

    def _put_part(self, keys: list[str], values: list[Sequence[memoryview] | Pieces], sizes: list[int], *,
                  replace: bool) -> list[int]:  # fmt: skip
        digests = [digest_of(key) for key in keys]
        self.names.note(keys, digests)
        direct = [_direct(value, size) for value, size in zip(values, sizes, strict=True)]
        staged = sum(size for view, size in zip(direct, sizes, strict=True) if view is None)
        buffer = self.staging.take(staged) if staged else None
        try:
            blocks = direct if buffer is None else _staged(buffer.data, direct, values, sizes)
            put = self._replace if replace else self._put_blocks
            codes = put(digests, blocks)  # type: ignore[arg-type]
        finally:
            if buffer is not None:
                self.staging.give(buffer)
        self.gone.drop([digest for digest, code in zip(digests, codes, strict=True) if code == OK])
        return codes

    def _put_blocks(self, digests: Sequence[bytes], blocks: Sequence[memoryview]) -> list[int]:
        put = self.namespace.put(hashes_of(digests), list(blocks), deadline_ms=_put_ms(blocks))
        for code, reason in zip(map(code_of, put.outcomes), put.reasons, strict=True):
            if code == RPC_FAIL:
                say_once("put", "a put was not taken (its code is %s; said once): %s", code, reason)
        return [code_of(outcome) for outcome in put.outcomes]

    def _replace(self, digests: Sequence[bytes], blocks: Sequence[memoryview]) -> list[int]:
        """Removes what is there, then puts: a reader finds the old value, nothing, or the new one. RPC_FAIL when a worker that
        may have the old value did not confirm its removal: nothing new is put then."""
        codes = [RPC_FAIL] * len(digests)
        last = {digest: index for index, digest in enumerate(digests)}  # of several values of one key the last one stays
        todo = sorted(last.values())
        for _ in range(UPSERT_TRIES):
            removed = self.namespace.remove(hashes_of([digests[i] for i in todo]))
            todo = [i for i, outcome in zip(todo, removed.outcomes, strict=True) if outcome is not RemoveOutcome.PENDING]
            if not todo:
                break
            part = [blocks[i] for i in todo]
            put = self.namespace.put(hashes_of([digests[i] for i in todo]), part, deadline_ms=_put_ms(part))
            again = []
            for index, outcome in zip(todo, put.outcomes, strict=True):
                codes[index] = code_of(outcome)
                if outcome.value == "already":
                    again.append(index)
            todo = again
            if not todo:
                break
        return [codes[last[digest]] for digest in digests]

    # --- gets -----------------------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[str], targets: Sequence[memoryview | Pieces], *, exact: bool) -> list[int]:
        """Bytes got of each key, or a code below 0. A target: a writable view, or pointers and sizes of parts that together must
        have the value's size. `exact`: views must have it too."""
        codes = [INVALID_PARAMS] * len(keys)
        sizes = [sum(t[1]) if isinstance(t, tuple) else t.nbytes for t in targets]
        good = [i for i, size in enumerate(sizes) if size > 0 and is_name(keys[i])]
        for start, stop in split_by_bytes([sizes[i] for i in good], STAGING_BYTES_MAX, n_max=PART_KEYS):
            part = good[start:stop]
            try:
                done = self._get_part([keys[i] for i in part], [targets[i] for i in part], [sizes[i] for i in part], exact=exact)
            except (KVPoolError, LinkError) as error:
                log.warning("get: %s", error)
                done = [RPC_FAIL] * len(part)
                self.gone.add([digest_of(keys[i]) for i in part])  # whoever has them
            for index, code in zip(part, done, strict=True):
                codes[index] = code
        return codes

    def _get_part(self, keys: list[str], targets: list[memoryview | Pieces], sizes: list[int], *, exact: bool) -> list[int]:
        deadline = _until(transfer_ms(sum(sizes)))
        digests = [digest_of(key) for key in keys]
        outs = [_direct_target(target) for target in targets]
        scattered = [i for i, out in enumerate(outs) if out is None]
        buffer = self.staging.take(sum(sizes[i] for i in scattered)) if scattered else None
        try:
            at = 0
            for i in scattered:
                assert buffer is not None
                outs[i] = buffer.data[at : at + sizes[i]]
                at += sizes[i]
            got = self.keyed.get(b"".join(digests), outs, deadline=deadline)
            loose = set() if exact else set(range(len(keys))) - set(scattered)
            codes = [self._code(got.sizes[i], got.got[i], got.misses[i], 0 if i in loose else sizes[i]) for i in range(len(keys))]
            for i in scattered:
                out, target = outs[i], targets[i]
                if codes[i] > 0 and out is not None and isinstance(target, tuple):
                    scatter(out, [target], deadline=_until(COPY_MS))
        finally:
            if buffer is not None:
                self.staging.give(buffer)
        self._book(digests, codes)
        return codes

    def get_range(self, keys: Sequence[str], targets: Sequence[memoryview], offset: int) -> list[int]:
        """The same byte range of every key (all views of one size), or a code below 0."""
        size = targets[0].nbytes
        if offset < 0 or offset + size > VALUE_BYTES_MAX:
            return [INVALID_PARAMS] * len(keys)
        digests = [digest_of(key) for key in keys]
        got = self.keyed.get(b"".join(digests), list(targets), deadline=_until(transfer_ms(size * len(keys))),
                             byte_range=(offset, size))  # fmt: skip
        codes = [size if got.got[i] else self._code(got.sizes[i], got.got[i], got.misses[i], 0) for i in range(len(keys))]
        self._book(digests, codes)
        return codes

    def fetch(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """Whole values in memory of their own; None for a miss."""
        sizes = self.sizes(keys)
        values = [BufferHandle(max(0, size)) for size in sizes]
        codes = self.get(keys, [memoryview(value) for value in values], exact=True)
        unread = [digest_of(key) for key, size in zip(keys, sizes, strict=True) if size < 0]
        self._book(unread, [OBJECT_NOT_FOUND] * len(unread))
        return [value if code == len(value) and code > 0 else None for value, code in zip(values, codes, strict=True)]

    def _book(self, digests: Sequence[bytes], codes: Sequence[int]) -> None:
        """Keys whose get failed though they are said to be there do not exist from now on. (What is a plain miss may be put by
        somebody else the next moment.)"""
        self.gone.drop([digest for digest, code in zip(digests, codes, strict=True) if code >= 0])
        failed = [digest for digest, code in zip(digests, codes, strict=True) if code < 0]
        if failed:
            places = self.keyed.locate(b"".join(failed), deadline=_until(CALL_MS))
            self.gone.add([digest for digest, there in zip(failed, places, strict=True) if there])

    @staticmethod
    def _code(size: int, got: bool, miss: MissCause | None, wanted: int) -> int:
        if got:
            return size if not wanted or size == wanted else INVALID_PARAMS
        if size >= 0:
            return INVALID_PARAMS
        return RPC_FAIL if miss in _UNREACHABLE else OBJECT_NOT_FOUND

    # --- removal and names ----------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[str]) -> list[int]:
        """0, -704 for what was not there, RPC_FAIL where a worker that may have it has not confirmed yet."""
        return self.remove_digests([digest_of(key) for key in keys])

    def remove_digests(self, digests: Sequence[bytes]) -> list[int]:
        if not digests:
            return []
        code = {RemoveOutcome.REMOVED: OK, RemoveOutcome.ABSENT: OBJECT_NOT_FOUND, RemoveOutcome.PENDING: RPC_FAIL}
        return [code[outcome] for outcome in self.namespace.remove(hashes_of(digests), deadline_ms=LIST_MS).outcomes]

    def remove_all(self) -> int:
        """How many values there were."""
        return sum(map(is_value, self.keyed.remove_all(deadline=_until(LIST_MS))))

    def listing(self) -> dict[str, bytes]:
        """Names and digests of all values that have a name."""
        return self.names.listing(deadline=_until(LIST_MS))


PART_KEYS: Final = 4096  # keys of one part of a batch


def namespace_name(tenant: str) -> str:
    """Each tenant has a namespace of its own."""
    if tenant in ("", "default"):
        return NAMESPACE
    plain = len(tenant) <= 100 and all(char.isalnum() or char in "-_.@" for char in tenant)
    return f"{NAMESPACE}@{tenant}" if plain else f"{NAMESPACE}#{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"


def is_name(key: str) -> bool:
    """Whether a key may be this string."""
    return 0 < len(key) <= NAME_BYTES_MAX


def _put_ms(blocks: Sequence[memoryview]) -> float:
    return PUT_MS + transfer_ms(sum(block.nbytes for block in blocks))


def _until(ms: float) -> float:
    return time.monotonic() + ms / 1e3


def hashes_of(digests: Sequence[bytes]) -> PrefixHashes:
    """Keys that are no chain."""
    return PrefixHashes(b"".join(digests), chained=False)


def _direct(value: Sequence[memoryview] | Pieces, size: int) -> memoryview | None:
    """The value as one view of the caller's memory, None when its parts are scattered."""
    if isinstance(value, tuple):
        pointer = joined(*value)
        return view_of(pointer, size, writable=False) if pointer else None
    parts = [part for part in value if part.nbytes]
    return parts[0] if len(parts) == 1 else None


def _direct_target(target: memoryview | Pieces) -> memoryview | None:
    if isinstance(target, tuple):
        pointer = joined(*target)
        return view_of(pointer, sum(target[1]), writable=True) if pointer else None
    return target


def _staged(buffer: memoryview, direct: list[memoryview | None], values: list[Sequence[memoryview] | Pieces],
            sizes: list[int]) -> list[memoryview]:  # fmt: skip
    """Every value as one view: scattered ones are gathered in `buffer`."""
    at, blocks = 0, []
    for view, value, size in zip(direct, values, sizes, strict=True):
        if view is None:
            view = buffer[at : at + size]
            at += size
            if isinstance(value, tuple):
                gather(view, [value], deadline=_until(COPY_MS))
            else:
                end = 0
                for part in value:
                    view[end : end + part.nbytes] = part
                    end += part.nbytes
        blocks.append(view)
    return blocks


def check_pieces(pointers: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether these can be one value's parts. Raises TypeError for what are no numbers."""
    if len(pointers) != len(sizes) or not pointers:
        return False
    for pointer, size in zip(pointers, sizes, strict=True):
        if not isinstance(pointer, int) or not isinstance(size, int):
            raise TypeError("pointers and sizes must be integers")
    return all(pointer > 0 and size >= 0 for pointer, size in zip(pointers, sizes, strict=True))


def flat(value: object, name: str) -> memoryview:
    """Any contiguous buffer as bytes."""
    try:
        view = memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: must have the buffer protocol, not be {type(value).__name__}") from None
    if not view.nbytes:
        return memoryview(b"")
    if not view.c_contiguous:
        raise InvalidArgument(f"{name}: must be contiguous")
    return view.cast("B")
