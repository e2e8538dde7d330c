"""Layer-wise access: get sessions, whose values stay readable until the end, and put sessions, visible at their end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from kvpool.client.keyed import KeyedHold
from kvpool.client.put_session import PutSession
from kvpool.connectors.mooncake.codes import INVALID_PARAMS, OBJECT_ALREADY_EXISTS, OBJECT_NOT_FOUND, OK, RPC_FAIL, code_of
from kvpool.connectors.mooncake.memory import view_of
from kvpool.connectors.mooncake.names import digest_of
from kvpool.connectors.mooncake.pool import VALUE_BYTES_MAX, Pool, hashes_of, is_name
from kvpool.errors import KVPoolError

SESSIONS_MAX: Final = 65_536  # keys in sessions of one store
HOLD_TTL_MS: Final = 60_000  # of a get session's values; past it they are served as long as they are there

Parts = Sequence[tuple[int, int, int]]  # (pointer, bytes, offset in the value)


class Sessions:
    """Of one open store. Thread-safe; calls for one key come one at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._gets: dict[str, KeyedHold] = {}
        self._puts: dict[str, PutSession] = {}

    # --- gets -----------------------------------------------------------------------------------------------------------

    def get_start(self, keys: Sequence[str]) -> list[int]:
        """OK or OBJECT_NOT_FOUND each."""
        with self._lock:
            if len(self._gets) + len(keys) > SESSIONS_MAX:
                return [INVALID_PARAMS] * len(keys)
        digests = [digest_of(key) for key in keys]
        hold = self._pool.hold(digests, HOLD_TTL_MS)
        with self._lock:
            self._gets.update((key, hold) for key, there in zip(keys, hold.there, strict=True) if there)
        return [OK if there else OBJECT_NOT_FOUND for there in hold.there]

    def is_open(self, key: str) -> bool:
        return key in self._gets

    def get_end(self, keys: Sequence[str]) -> int:
        """OK, whether they were in a session or not."""
        with self._lock:
            ended = [self._gets.pop(key) for key in keys if key in self._gets]
            left = set(map(id, self._gets.values()))
        for hold in {id(one): one for one in ended if id(one) not in left}.values():
            hold.release()
        return OK

    # --- puts -----------------------------------------------------------------------------------------------------------

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[int]:
        """OK: room is reserved; OBJECT_ALREADY_EXISTS; INVALID_PARAMS, also for a key that is in a session."""
        places = self._pool.places(keys)
        self._pool.names.note(keys, [digest_of(key) for key in keys])
        return [self._put_start(key, size, bool(there)) for key, size, there in zip(keys, sizes, places, strict=True)]

    def _put_start(self, key: str, size: int, there: bool) -> int:
        if not is_name(key) or not 0 < size <= VALUE_BYTES_MAX or key in self._puts or len(self._puts) >= SESSIONS_MAX:
            return INVALID_PARAMS
        if there:
            return OBJECT_ALREADY_EXISTS
        session = self._pool.namespace.put_session(hashes_of([digest_of(key)]), size=size)
        with self._lock:
            if self._puts.setdefault(key, session) is session:
                return OK
        session.abort()
        return INVALID_PARAMS

    def put_parts(self, key: str, parts: Parts) -> int:
        """Bytes written, or a code below 0: then nothing more can be written to this session."""
        session = self._puts.get(key)
        if session is None:
            return INVALID_PARAMS
        for pointer, size, offset in parts:
            if pointer <= 0 or size <= 0 or offset < 0:
                return INVALID_PARAMS
            session.write(0, offset, view_of(pointer, size, writable=False))
        return sum(size for _, size, _ in parts)

    def put_end(self, keys: Sequence[str]) -> list[int]:
        """OK: visible. INVALID_PARAMS: no session. RPC_FAIL: not every byte was written, or the worker is gone."""
        return [self._put_end(key) for key in keys]

    def _put_end(self, key: str) -> int:
        with self._lock:
            session = self._puts.pop(key, None)
        if session is None:
            return INVALID_PARAMS
        with session:
            try:
                code = code_of(session.commit().outcomes[0])
            except KVPoolError:
                return RPC_FAIL
        if code == OK:
            self._pool.gone.drop([digest_of(key)])
        return code

    def put_revoke(self, keys: Sequence[str]) -> list[int]:
        """OK: nothing of it is left. INVALID_PARAMS: no session."""
        codes = []
        for key in keys:
            with self._lock:
                session = self._puts.pop(key, None)
            if session is not None:
                session.abort()
            codes.append(INVALID_PARAMS if session is None else OK)
        return codes
