"""The ops of the data plane, and those among them that touch no block's bytes.

Every answer repeats op and request id. A status other than OK has a reason as meta. What each op answers:

    HELLO    JSON {"token", "client", "host_id", "versions", "release"} -> JSON {"worker", "incarnation", "host_id", "version",
             "release", "unix", "transports", "features", "limits"}; UNAUTHENTICATED, VERSION (names both) and BUSY (connection
             limit) close afterwards
    PING     empty
    HOLD     CodesAnswer: HIT_SHARED, a miss or LATER per key; `number` the hold (0: none), `count` leading blocks held. With VIEW
             blocks on SSD are brought to DRAM first, and it ends with the connection; without it lives by its time. The time is
             cut to the worker's limit
    RENEW    CodesAnswer: 1 alive and renewed, 0 gone
    RELEASE  empty CodesAnswer; with NO_REPLY nothing
    READ     `read_path`
    WRITE    `write_path`
    RESERVE, FILL, COMMIT, ABORT  `reserve_path`
    TOUCH    CodesAnswer: Tiers per key; `number` 1 when the master has the report of all of them (asked with WAIT_LISTED), else 0
    DROP     CodesAnswer: 1 had it
    PREFETCH CodesAnswer: Tiers per key as they are now, at once; those on SSD are brought to DRAM afterwards, if there is room
    COPY     CodesAnswer: 1 is here, per leading key; `number` 1: they are copied to the target worker afterwards, 0: not now
    STAT     JSON of `Node.stat`
    ATTACH   unix only. CodesAnswer: `number` the arena's bytes, `count` generation words / 1024; two read-only fds with it: data,
             generations
    RING     unix only, once a connection. CodesAnswer: `number` the ring's bytes (at most what was asked, at least 64 KiB); its
             fd with it. BUSY: no room for another ring, use WRITE over the socket

Owns decoding, limits and dispatch. Runs on the loop that owns the connection.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import kvpool
from kvpool.core.frames import (
    MAX_META_BYTES,
    VERSIONS,
    AttachRequest,
    CodesAnswer,
    CopyRequest,
    Flag,
    FrameError,
    HoldRequest,
    HoldsRequest,
    KeysRequest,
    NumberRequest,
    Op,
    Status,
)
from kvpool.core.types import MAX_BATCH_KEYS
from kvpool.core.version import work_together
from kvpool.errors import NamespaceNotFound
from kvpool.transport.host import host_id
from kvpool.worker import placing, read_path, reserve_path, write_path
from kvpool.worker.ssd_load import BringUp, prefetch

if TYPE_CHECKING:
    from kvpool.worker.connection import Connection, Request
    from kvpool.worker.dataplane import DataPlane

GEN_WORDS_UNIT: Final = 1024  # of `count` in ATTACH's answer
_WITH_PAYLOAD: Final = frozenset({Op.WRITE, Op.FILL})
Handler = Callable[["DataPlane", "Connection", "Request"], None]


def handle(plane: DataPlane, connection: Connection, request: Request) -> None:
    """Carries out one request whose meta has arrived. Raises FrameError: the connection must be closed."""
    op = request.header.op
    if request.header.payload_bytes and op not in _WITH_PAYLOAD:
        raise FrameError(f"{op.name} with payload")
    try:
        _HANDLERS[op](plane, connection, request)
    except NamespaceNotFound as error:  # deleted in this moment
        connection.refuse(request, Status.UNKNOWN_NAMESPACE, str(error))


def give_back(plane: DataPlane, connection: Connection) -> None:
    """All that a connection had and that does not outlive it: reservations, holds, its ring."""
    reservations, connection.reservations = connection.reservations, {}
    for reservation in reservations.values():
        placing.give_back(plane.node, reservation.slots)
    if connection.ring is not None:
        plane.rings.give_back(connection.ring)
        connection.ring = None
    if connection.has_holds:
        with plane.node.lock:
            plane.node.table.release_owner(connection.owner)
            plane.node.after_decision()


def _hello(plane: DataPlane, connection: Connection, request: Request) -> None:
    try:
        said = json.loads(bytes(request.meta))
        token, versions, release = said.get("token", ""), said.get("versions", []), said.get("release", kvpool.__version__)
        if not isinstance(token, str) or not isinstance(release, str) or not all(isinstance(v, int) for v in versions):
            raise ValueError("token, release or versions have a wrong type")
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise FrameError(f"HELLO: {error}") from error
    common = set(VERSIONS) & set(versions)
    if connection.over_limit:
        _turn_away(connection, request, Status.BUSY, f"this worker serves {plane.connections_max} connections and has them all")
    elif plane.token and not hmac.compare_digest(token.encode("utf-8", "surrogatepass"), plane.token):
        connection.loop.count("unauthenticated")
        _turn_away(connection, request, Status.UNAUTHENTICATED, "the token is not the one of this pool")
    elif not common:
        connection.loop.count("version_refused")
        reason = f"no common frame version: the client speaks {versions[:8]}, this worker {list(VERSIONS)}"
        _turn_away(connection, request, Status.VERSION, reason)
    elif not work_together(release, kvpool.__version__):
        connection.loop.count("version_refused")
        reason = f"the client is kvpool {release[:64]!r}, this worker kvpool {kvpool.__version__}: too far apart"
        _turn_away(connection, request, Status.VERSION, reason)
    else:
        connection.greeted = True
        plane.connection_greeted(connection)
        greeting = {
            "worker": plane.node.worker_id,
            "incarnation": plane.node.incarnation,
            "host_id": host_id(),
            "version": max(common),
            "release": kvpool.__version__,
            "unix": plane.unix_name,
            "transports": ["tcp", "shm"],
            "features": ["copy", "prefetch", "hints"],
            "limits": {
                "keys": MAX_BATCH_KEYS,
                "meta_bytes": MAX_META_BYTES,
                "answer_bytes": read_path.ANSWER_BYTES_MAX,
                "ring_bytes": plane.ring_bytes_max,
                "hold_ttl_ms": plane.hold_ttl_ms_max,
            },
        }
        connection.answer(request, json.dumps(greeting).encode())


def _turn_away(connection: Connection, request: Request, status: Status, reason: str) -> None:
    connection.close_after_answer = True
    connection.answer(request, reason.encode(), status=status)


def _ping(_: DataPlane, connection: Connection, request: Request) -> None:
    connection.answer(request)


def _hold(plane: DataPlane, connection: Connection, request: Request) -> None:
    message = HoldRequest.decode(request.meta)
    flags, node = request.header.flags, plane.node
    spec = node.served(message.batch.namespace)
    if isinstance(spec, tuple):
        connection.refuse(request, *spec)
        return
    is_view = bool(flags & Flag.VIEW)

    def hold() -> None:
        with node.lock:
            held = node.table.hold(
                message.batch, ttl_ms=min(max(message.ttl_ms, 1), plane.hold_ttl_ms_max), now_ms=node.now_ms(),
                owner=connection.owner if is_view else 0, view=is_view, first_miss=bool(flags & Flag.FIRST_MISS),
            )  # fmt: skip
            node.after_decision()
        connection.has_holds = connection.has_holds or is_view
        connection.answer(request, CodesAnswer(bytes(held.codes), number=held.hold_id, count=held.count).encode())

    if not is_view or node.ssd is None:
        hold()
        return
    connection.work = BringUp(plane, connection, request, spec, message.batch, hold)
    connection.work.start()


def _renew(plane: DataPlane, connection: Connection, request: Request) -> None:
    message = HoldsRequest.decode(request.meta)
    node = plane.node
    with node.lock:
        alive = node.table.renew(message.hold_ids, min(max(message.ttl_ms, 1), plane.hold_ttl_ms_max), node.now_ms())
    connection.answer(request, CodesAnswer(bytes(alive)).encode())


def _release(plane: DataPlane, connection: Connection, request: Request) -> None:
    message = HoldsRequest.decode(request.meta)
    node = plane.node
    with node.lock:
        node.table.release(message.hold_ids)
        node.after_decision()
    if request.header.flags & Flag.NO_REPLY:
        connection.no_answer()
    else:
        connection.answer(request, CodesAnswer().encode())


def _touch(plane: DataPlane, connection: Connection, request: Request) -> None:
    message = KeysRequest.decode(request.meta)
    batch, node = message.batch, plane.node
    spec = node.served(batch.namespace)
    if isinstance(spec, tuple):
        connection.refuse(request, *spec)
        return
    with node.lock:
        tiers = node.table.tiers_of(batch, now_ms=node.now_ms(), touch=True, hints=message.hints.tolist())
        mark = node.reporter.mark()

    def answer(listed: bool) -> None:
        asked = bool(request.header.flags & Flag.WAIT_LISTED)
        connection.answer(request, CodesAnswer(bytes(tiers), number=int(listed and asked)).encode())

    placing.answer_listed(plane, connection, request, mark, answer, needed=any(tiers))


def _drop(plane: DataPlane, connection: Connection, request: Request) -> None:
    batch = KeysRequest.decode(request.meta).batch
    node = plane.node
    spec = node.served(batch.namespace)
    if isinstance(spec, tuple):
        connection.refuse(request, *spec)
        return
    connection.answer(request, CodesAnswer(node.drop(batch)).encode())


def _prefetch(plane: DataPlane, connection: Connection, request: Request) -> None:
    batch = KeysRequest.decode(request.meta).batch
    node = plane.node
    spec = node.served(batch.namespace)
    if isinstance(spec, tuple):
        connection.refuse(request, *spec)
        return
    with node.lock:
        tiers = node.table.tiers_of(batch, now_ms=node.now_ms(), touch=False)
    prefetch(node, spec, batch, tiers)
    connection.answer(request, CodesAnswer(bytes(tiers)).encode())


def _copy(plane: DataPlane, connection: Connection, request: Request) -> None:
    message = CopyRequest.decode(request.meta)
    node = plane.node
    spec = node.served(message.batch.namespace)
    if isinstance(spec, tuple):
        connection.refuse(request, *spec)
        return
    with node.lock:
        tiers = node.table.tiers_of(message.batch, now_ms=node.now_ms(), touch=False)
    there = bytes(1 if tier else 0 for tier in tiers)
    accepted = there[:1] == b"\1" and plane.spreader is not None and plane.spreader.ask(message.batch, message.target)
    connection.answer(request, CodesAnswer(there, number=int(accepted)).encode())


def _stat(plane: DataPlane, connection: Connection, request: Request) -> None:
    connection.answer(request, json.dumps(plane.node.stat()).encode())


def _attach(plane: DataPlane, connection: Connection, request: Request) -> None:
    uid = AttachRequest.decode(request.meta).namespace
    if not connection.local:
        connection.refuse(request, Status.BAD_REQUEST, "memory is passed over the unix socket only")
        return
    spec = plane.node.served(uid)
    if isinstance(spec, tuple):
        connection.refuse(request, *spec)
        return
    fds = plane.node.dram.fds(uid)
    answer = CodesAnswer(number=fds.arena_bytes, count=fds.gen_words // GEN_WORDS_UNIT)
    connection.answer(request, answer.encode(), fds=[fds.data_fd, fds.gen_fd])


def _ring(plane: DataPlane, connection: Connection, request: Request) -> None:
    wanted = NumberRequest.decode(request.meta).number
    if not connection.local or connection.ring is not None:
        connection.refuse(request, Status.BAD_REQUEST, "one ring for each connection over the unix socket")
        return
    ring = plane.rings.open(wanted, limit_bytes=plane.ring_bytes_max)
    if ring is None:
        connection.refuse(request, Status.BUSY, f"all rings together have {plane.rings.total_bytes} bytes, the limit")
        return
    connection.ring = ring
    connection.answer(request, CodesAnswer(number=ring.n_bytes).encode(), fds=[ring.fd], sent=ring.close_fd)


_HANDLERS: Final[dict[Op, Handler]] = {
    Op.HELLO: _hello,
    Op.PING: _ping,
    Op.HOLD: _hold,
    Op.RENEW: _renew,
    Op.RELEASE: _release,
    Op.READ: read_path.read,
    Op.WRITE: write_path.write,
    Op.RESERVE: reserve_path.reserve_op,
    Op.FILL: reserve_path.fill,
    Op.COMMIT: reserve_path.commit_op,
    Op.ABORT: reserve_path.abort,
    Op.DROP: _drop,
    Op.TOUCH: _touch,
    Op.STAT: _stat,
    Op.ATTACH: _attach,
    Op.RING: _ring,
    Op.PREFETCH: _prefetch,
    Op.COPY: _copy,
}
