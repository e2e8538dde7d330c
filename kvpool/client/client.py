"""`connect` and the client: what belongs to the whole pool rather than to one namespace."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from kvpool.client.context import Context, deadline_of
from kvpool.client.master import MasterLink
from kvpool.client.mirror import Mirror
from kvpool.client.namespace import Namespace
from kvpool.client.peers import Peers
from kvpool.client.spreading import Spreading
from kvpool.client.views import Keeper
from kvpool.core.fetch import CALL_MS
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import NamespaceSpec, check_name
from kvpool.errors import ConfigError, InvalidArgument
from kvpool.master.wire import spec_from_proto, spec_to_proto
from kvpool.transport.base import LinkOptions
from kvpool.transport.host import host_id
from kvpool.v1 import master_pb2 as pb

if TYPE_CHECKING:
    from kvpool.config import ClientSettings

STATES = ("joining", "up", "suspect", "down", "draining", "drained")
CONNECT_MS = 5_000


def connect(master: str | None = None, *, token: str | None = None, token_file: str | os.PathLike[str] | None = None,
            transport: Literal["auto", "shm", "tcp", "nixl"] | None = None, verify: Literal["transit", "always"] | None = None,
            mirror: bool | None = None, mirror_bytes_max: int | None = None, lanes: int | None = None,
            deadline_ms: float | None = None) -> Client:  # fmt: skip
    """A client of the pool whose master is at `master` ("host:port", several with commas; default KVPOOL_MASTER, else
    127.0.0.1:7400). What is not given comes from KVPOOL_CLIENT__<FIELD> or the default. `verify="always"`: what is read from
    shared memory is checked too. The master must answer within `deadline_ms` (default 5 s), else MasterUnavailable; later it may
    come and go. ConfigError for a bad setting, Unauthenticated for a bad token. Close it, or use it as a context manager."""
    from kvpool.config import load

    flags = {"master": master, "token": token, "token_file": None if token_file is None else str(token_file),
             "transport": transport, "verify": verify, "mirror": mirror, "mirror_bytes_max": mirror_bytes_max,
             "lanes": lanes}  # fmt: skip
    settings = load("client", flags=flags)
    client = Client(settings)
    try:
        client.describe(deadline_ms=CONNECT_MS if deadline_ms is None else deadline_ms)
    except BaseException:
        client.close()
        raise
    return client


class Client:
    """A connection to one pool; `connect` makes it. Thread-safe; not usable in a forked child (spawn, and connect there). It
    survives restarts of the master and of workers."""

    def __init__(self, settings: ClientSettings) -> None:
        if settings.transport == "nixl":
            raise InvalidArgument("transport: 'nixl' is not in this version; allowed are auto, shm and tcp")
        token = settings.token or _read_token(settings.token_file)
        own_host = host_id()
        options = LinkOptions(transport=settings.transport, token=token, client=f"{socket.gethostname()}:{os.getpid()}",
                              host_id=own_host, lanes=settings.lanes)  # fmt: skip
        master, peers = MasterLink(settings.master, token=token), Peers(host_id=own_host, options=options,
                                                                           seed=secrets.randbits(32))  # fmt: skip
        peers.on_unusable = lambda peer: master.tell(
            "ReportPeer", pb.ReportPeerRequest(worker_id=peer.worker_id, incarnation=peer.incarnation)
        )
        mirror = Mirror(master, peers, bytes_max=settings.mirror_bytes_max) if settings.mirror else None
        self._context = Context(master=master, peers=peers, mirror=mirror, host_id=own_host,
                                verify=settings.verify == "always", transport=settings.transport)  # fmt: skip
        self._context.spreading = Spreading(self._context, copy_after=settings.copy_after)
        self._keeper = Keeper(self._context)
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, Namespace] = {}

    def namespace(self, name: str, layout: KVLayout, *, create: bool = False, replicas: int = 1, hash: str = "sha256",  # noqa: A002
                  salt: bytes = b"", quota_bytes: int | None = None, ttl_s: float | None = None,
                  write_policy: str = "back", read_policy: str = "wait", read_timeout_ms: int | None = None,
                  deadline_ms: float | None = None) -> Namespace:  # fmt: skip
        """The namespace `name`, opened with the layout that the caller has. `create`: made when there is none, with `replicas`,
        `hash` (sha256 | xxh3_128 | external), `salt`, `quota_bytes` (bytes that all copies may take in all tiers of the pool;
        more than the pool has is no error, it may grow) `ttl_s` (blocks expire so long after their last put), `write_policy`
        (when blocks go down to SSD: "back", when DRAM needs the room; "through", soon after the put; "selective", as "back" but
        only those that were used again) and `read_policy` (how long a get waits for blocks on SSD: "wait", to its deadline;
        "best_effort", not at all; "timeout", `read_timeout_ms`; what it did not wait for is a miss with cause `timeout` and comes
        up to DRAM meanwhile); an existing one keeps its own. Raises LayoutMismatch (another layout; with `create` another hash or
        salt too), NamespaceNotFound, InvalidArgument, MasterUnavailable."""
        self._context.check()
        deadline = deadline_of(deadline_ms, CALL_MS)
        wanted = NamespaceSpec.of(check_name(name), layout, hash=hash, salt=salt, replicas=replicas, quota_bytes=quota_bytes,
                                  ttl_s=ttl_s, write_policy=write_policy, read_policy=read_policy,
                                  read_timeout_ms=read_timeout_ms)  # fmt: skip
        if create:
            request: Any = pb.CreateNamespaceRequest(namespace=spec_to_proto(wanted))
            reply = self._context.master.call("CreateNamespace", request, deadline=deadline)
        else:
            request = pb.OpenNamespaceRequest(name=name, fingerprint=wanted.fingerprint)
            reply = self._context.master.call("OpenNamespace", request, deadline=deadline)
        spec = spec_from_proto(reply.namespace)
        with self._lock:
            namespace = self._namespaces.get(spec.uid)
            if namespace is None:
                namespace = self._namespaces[spec.uid] = Namespace(self._context, self._keeper, spec, layout)
        if self._context.mirror is not None:
            self._context.mirror.follow(spec.uid)
            self._context.mirror.index.wait_synced(spec.uid, deadline=deadline)
        return namespace

    def layouts(self, *, deadline_ms: float | None = None) -> dict[str, KVLayout]:
        """The layout of every namespace, by name. MasterUnavailable when the master does not answer."""
        self._context.check()
        deadline = deadline_of(deadline_ms, CALL_MS)
        reply = self._context.master.call("ListNamespaces", pb.ListNamespacesRequest(), deadline=deadline)
        return {namespace.name: KVLayout.from_json(namespace.layout) for namespace in reply.namespaces}

    def describe(self, *, deadline_ms: float | None = None) -> dict[str, Any]:
        """The cluster as the master sees it: epoch, workers with their tiers, namespaces, index (as `kvpool status --json`)."""
        self._context.check()
        reply = self._context.master.call("Describe", pb.DescribeRequest(), deadline=deadline_of(deadline_ms, CALL_MS))
        self._context.learn(worker.info for worker in reply.workers if worker.info.address)
        return describe_reply(reply)

    def close(self) -> None:
        """Ends everything that the client has: threads, connections. Calls under way in other threads end with an error or a
        miss. Views must have been left. Idempotent."""
        self._keeper.close()
        self._context.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def keeping_of(status: pb.NamespaceStatus) -> dict[str, Any]:
    """Quota, use, time and pins of a namespace as plain values. `used_bytes`: of all copies; None without a quota."""
    quota, ttl_ms = status.namespace.quota_bytes, status.namespace.ttl_ms
    used = {"dram": status.dram_bytes, "ssd": status.ssd_bytes} if quota else None
    return {"quota_bytes": quota or None, "used_bytes": used, "ttl_s": ttl_ms / 1000 if ttl_ms else None,
            "pins": {"soft": status.pins_soft, "hard": status.pins_hard}}  # fmt: skip


def describe_reply(reply: pb.DescribeReply) -> dict[str, Any]:
    """The master's description as plain values."""
    workers = [
        {
            "id": worker.info.worker_id,
            "incarnation": worker.info.incarnation,
            "state": STATES[worker.info.state] if worker.info.state < len(STATES) else "unknown",
            "host": worker.info.address,
            "tiers": {
                tier.tier: {"capacity_bytes": tier.capacity_bytes, "used_bytes": tier.used_bytes, "blocks": tier.blocks,
                            "state": tier.state}
                for tier in worker.tiers
            },
        }
        for worker in reply.workers
    ]  # fmt: skip
    namespaces = [
        {"name": one.namespace.name, "tenant": "", "block_bytes": one.namespace.block_bytes, "blocks": one.blocks,
         "bytes": one.bytes, **keeping_of(one)}
        for one in reply.namespaces
    ]  # fmt: skip
    return {"epoch": reply.epoch, "leader": reply.leader, "workers": workers, "namespaces": namespaces,
            "index": {"replicas": reply.replicas, "bytes": reply.index_bytes}, "complete": reply.complete}  # fmt: skip


def _read_token(path: str) -> str:
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file: {path}: {error}") from None
    if not token:
        raise ConfigError(f"token_file: {path}: it is empty")
    return token
