"""Pins at the master: into the store first, then into memory, then to the workers. What a pin is: `core.pins`.

A pin is told to every worker, whoever has the block: it counts for blocks that come later too. A worker that was away gets all
live pins after its Welcome. On the loop only; writes of pins reach the store one after the other. """

from __future__ import annotations

import asyncio
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvpool.core.pins import PIN_TTL_S_MAX, PINS_MAX, PinLevel
from kvpool.core.types import KEY_BYTES, MAX_BATCH_KEYS, Key
from kvpool.errors import InvalidArgument, MasterUnavailable, QuotaExceeded
from kvpool.master.state import MasterState, Namespace
from kvpool.master.store import PinRecord
from kvpool.v1 import master_pb2 as pb

if TYPE_CHECKING:
    from kvpool.master.session import Sessions

END_MAX: Final = 4_096  # pins whose time is up that are dropped of one namespace at once
ABSENT, PINNED, REFUSED, UNPINNED, NOT_PINNED = range(5)  # of PinReply


def n_pins(state: MasterState) -> int:
    """Keys that are pinned, of all namespaces."""
    return sum(len(namespace.pins) for namespace in state.namespaces.values())


async def pin(
    state: MasterState, sessions: Sessions, namespace: Namespace, keys: Sequence[Key], *, level: int, ttl_ms: int, wait_s: float
) -> pb.PinReply:
    """Raises InvalidArgument, QuotaExceeded (PINS_MAX)."""
    if level not in (PinLevel.SOFT, PinLevel.HARD):
        raise InvalidArgument(f"level: {level} is neither 1 (soft) nor 2 (hard)")
    if not 1 <= ttl_ms <= PIN_TTL_S_MAX * 1000:
        raise InvalidArgument(f"ttl_ms: {ttl_ms} is not in 1..{PIN_TTL_S_MAX * 1000}")
    uid, wish = namespace.spec.uid, PinLevel(level)
    async with state.pinning:
        left = PINS_MAX - n_pins(state)
        more = namespace.pins.fresh(keys)
        if more > left:
            raise QuotaExceeded(f"pins: {more} blocks more; {PINS_MAX} may be pinned in a pool, {left} are left")
        until_ms = state.wall_ms() + ttl_ms
        await state.store.put_pins(uid, [PinRecord(key, wish, until_ms) for key in keys])
        state.namespace(uid)  # deleted meanwhile: NamespaceNotFound
        for key in keys:
            namespace.pins.set(key, wish, until_ms)
    codes, pending = await _tell(sessions, namespace, keys, level=wish, ttl_ms=ttl_ms, wait_s=wait_s)
    if pending:  # what they have the index knows; whether they could pin it they have not said
        there = state.catalog.locate(uid, keys)
        codes = bytearray(code or (PINNED if replicas else ABSENT) for code, replicas in zip(codes, there, strict=True))
    return pb.PinReply(epoch=state.epoch, outcomes=bytes(codes), pending_workers=pending, n_pins=len(namespace.pins))


async def unpin(
    state: MasterState, sessions: Sessions, namespace: Namespace, keys: Sequence[Key] | None, *, wait_s: float
) -> pb.PinReply:
    """`keys` None: all of the namespace."""
    async with state.pinning:
        named = [key for key, _, _ in namespace.pins.items()] if keys is None else list(keys)
        await state.store.delete_pins(namespace.spec.uid, [key for key in named if key in namespace.pins])
        outcomes = bytes(UNPINNED if namespace.pins.drop(key) else NOT_PINNED for key in named)
    _, pending = await _tell(sessions, namespace, named, level=PinLevel.NONE, ttl_ms=0, wait_s=wait_s)
    return pb.PinReply(epoch=state.epoch, outcomes=outcomes, pending_workers=pending, n_pins=len(namespace.pins))


async def end_pins(state: MasterState) -> None:
    """Drops pins whose time is up. Workers know their end themselves. A store that is away keeps them: the next master that reads
    it ends them."""
    async with state.pinning:
        for uid, namespace in list(state.namespaces.items()):
            gone = namespace.pins.expire(state.wall_ms(), n_max=END_MAX) if len(namespace.pins) else []
            if gone:
                try:
                    await state.store.delete_pins(uid, gone)
                except MasterUnavailable:
                    continue


async def _tell(
    sessions: Sessions, namespace: Namespace, keys: Sequence[Key], *, level: PinLevel, ttl_ms: int, wait_s: float
) -> tuple[bytearray, list[str]]:
    """-> (per key ABSENT, PINNED or, where a worker has it and cannot protect it, REFUSED; workers that did not answer)."""
    codes = bytearray(len(keys))
    pending: set[str] = set()
    for start in range(0, len(keys), MAX_BATCH_KEYS):
        part = keys[start : start + MAX_BATCH_KEYS]
        batch = _batch(namespace, part, [level] * len(part), [ttl_ms] * len(part))
        tasks = sessions.send_pins(batch)
        try:
            if tasks:
                await asyncio.wait([task.done for task in tasks], timeout=wait_s)
            for task in tasks:
                result = task.done.result() if task.done.done() else None
                if result is None:
                    pending.add(task.worker_id)
                    continue
                for i, code in enumerate(result[0]):
                    codes[start + i] = max(codes[start + i], min(code, REFUSED))
        finally:
            sessions.give_up(tasks)
    return codes, sorted(pending)


def _batch(namespace: Namespace, keys: Sequence[Key], levels: Sequence[int], ttls_ms: Sequence[int]) -> pb.PinBatch:
    packed = struct.pack(f"<{len(ttls_ms)}Q", *ttls_ms)
    return pb.PinBatch(namespace=namespace.spec.uid, keys=b"".join(keys), levels=bytes(levels), ttls_ms=packed)


def all_pins(state: MasterState) -> Iterator[pb.PinTask]:
    """Every live pin, for a worker that has just been welcomed; the last task says that it is the last."""
    task, n = pb.PinTask(), 0
    now_ms = state.wall_ms()
    for namespace in state.namespaces.values():
        pins = ((key, level, until_ms - now_ms) for key, level, until_ms in namespace.pins.items() if until_ms > now_ms)
        while part := list(islice(pins, MAX_BATCH_KEYS - n)):
            task.batches.append(_batch(namespace, [p[0] for p in part], [p[1] for p in part], [p[2] for p in part]))
            n += len(part)
            if n == MAX_BATCH_KEYS:
                yield task
                task, n = pb.PinTask(), 0
    task.last = True
    yield task


def list_pins(state: MasterState, namespace: Namespace, *, after: bytes, limit: int) -> pb.ListPinsReply:
    """A page of the namespace's pins, in order of their keys."""
    if len(after) not in (0, KEY_BYTES):
        raise InvalidArgument(f"after: {len(after)} bytes; a cursor of an earlier reply is needed, or none")
    now_ms = state.wall_ms()
    names = sorted(key for key, _, until_ms in namespace.pins.items() if until_ms > now_ms)
    start = bisect_right(names, after)
    page = names[start : start + limit]
    pins = [namespace.pins.get(key) or (PinLevel.NONE, now_ms) for key in page]
    return pb.ListPinsReply(
        epoch=state.epoch,
        keys=b"".join(page),
        levels=bytes(level for level, _ in pins),
        left_ms=struct.pack(f"<{len(pins)}Q", *(until_ms - now_ms for _, until_ms in pins)),
        there=bytes(min(255, len(replicas)) for replicas in state.catalog.locate(namespace.spec.uid, page)),
        cursor=page[-1] if start + limit < len(names) else b"",
    )


def levels_of(namespace: Namespace, keys: Sequence[Key]) -> bytes:
    """u8 [n]: the level of each key's pin, 0: none."""
    found = (namespace.pins.get(key) for key in keys)
    return bytes(0 if entry is None else entry[0] for entry in found)
