"""Questions to a master that the client has no verb for: describe, list and delete namespaces, list and remove blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.cli.common import client_settings, parse_time_ms, token_of
from kvpool.core.leaders import LeaderSearch
from kvpool.errors import MasterUnavailable, NamespaceNotFound, StoreUnavailable

if TYPE_CHECKING:
    from kvpool.v1 import master_pb2 as pb

WORKER_STATES = ("joining", "up", "suspect", "down", "draining", "drained")
LIST_PAGE_KEYS = 4096


class Master:
    """The master that leads, among those at `addresses`. `deadline_s`: of each question to one of them."""

    def __init__(self, addresses: str, *, token: str, deadline_s: float) -> None:
        self._search = LeaderSearch([part.strip() for part in addresses.split(",")])
        self._token, self._deadline_s = token, deadline_s
        self._channel: Any = None

    def call(self, method: str, request: Any) -> Any:
        """One unary call; a failure is raised as kvpool's own error, once all masters were asked where none is the leader."""
        import grpc

        from kvpool.transport.rpc import error_of, open_channel
        from kvpool.v1 import master_pb2_grpc

        make_stub: Any = master_pb2_grpc.MasterStub
        while True:
            if self._channel is None:
                self._channel = open_channel(self._search.current, self._token)
            try:
                return getattr(make_stub(self._channel), method)(request, timeout=self._deadline_s)
            except grpc.RpcError as error:
                found = error_of(error, address=self._search.current)
                elsewhere = isinstance(found, MasterUnavailable) and not isinstance(found, StoreUnavailable)
                if not elsewhere or self._search.failed(found.leader if isinstance(found, MasterUnavailable) else ""):
                    raise found from error
                self.close()

    @property
    def address(self) -> str:
        """Of the master that is asked at present."""
        return self._search.current

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def namespaces(self) -> list[pb.Namespace]:
        """All namespaces, by name."""
        from kvpool.v1 import master_pb2 as pb

        reply = self.call("ListNamespaces", pb.ListNamespacesRequest())
        return sorted(reply.namespaces, key=lambda namespace: str(namespace.name))

    def namespace(self, name: str) -> pb.Namespace:
        """The namespace of this name; NamespaceNotFound (with those there are) otherwise."""
        namespaces = self.namespaces()
        for namespace in namespaces:
            if namespace.name == name:
                return namespace
        raise NamespaceNotFound(f"namespace: {name!r} does not exist{_nearest(name, [n.name for n in namespaces])}")

    def blocks(self, uid: bytes) -> Iterator[tuple[bytes, int, int, int]]:
        """(key, tiers, replicas, level of its pin) of every block, in the master's order, page by page."""
        from kvpool.core.types import KEY_BYTES
        from kvpool.v1 import master_pb2 as pb

        cursor = b""
        while True:
            reply = self.call("ListBlocks", pb.ListBlocksRequest(namespace=uid, limit=LIST_PAGE_KEYS, after=cursor))
            for i in range(len(reply.keys) // KEY_BYTES):
                yield reply.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], reply.tiers[i], reply.n_replicas[i], (
                    reply.pins[i] if reply.pins else 0)  # fmt: skip
            cursor = reply.cursor
            if not cursor:
                return

    def pins(self, uid: bytes) -> Iterator[tuple[bytes, int, int, int]]:
        """(key, level, ms left, copies) of every pin, in order of the keys."""
        import struct

        from kvpool.core.types import KEY_BYTES
        from kvpool.v1 import master_pb2 as pb

        cursor = b""
        while True:
            reply = self.call("ListPins", pb.ListPinsRequest(namespace=uid, limit=LIST_PAGE_KEYS, after=cursor))
            left_ms = struct.unpack(f"<{len(reply.levels)}Q", reply.left_ms)
            for i in range(len(reply.levels)):
                yield reply.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], reply.levels[i], left_ms[i], reply.there[i]
            cursor = reply.cursor
            if not cursor:
                return


def _nearest(name: str, names: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, names, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


@contextmanager
def master_at(address: str | None, *, token_file: Path | None = None, deadline: str = "5s") -> Iterator[Master]:
    """The masters (flag, else environment, else the default), left at the end. Nothing is asked yet."""
    deadline_ms = parse_time_ms(deadline, option="--deadline")
    settings = client_settings(address, token_file)
    master = Master(settings.master, token=token_of(settings), deadline_s=deadline_ms / 1000)
    try:
        yield master
    finally:
        master.close()
