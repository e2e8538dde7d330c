"""Questions to a master that the client has no verb for: describe, list and delete namespaces, list and remove blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.cli.common import client_settings, parse_time_ms, token_of
from kvpool.errors import NamespaceNotFound

if TYPE_CHECKING:
    from kvpool.v1 import master_pb2 as pb

WORKER_STATES = ("joining", "up", "suspect", "down")
LIST_PAGE_KEYS = 4096


@dataclass(frozen=True)
class Master:
    """The stub of one master, its address and the deadline of each question."""

    stub: Any
    address: str
    deadline_s: float

    def call(self, method: str, request: Any) -> Any:
        """One unary call; a gRPC failure is raised as kvpool's own error."""
        import grpc

        from kvpool.transport.rpc import raise_for

        try:
            return getattr(self.stub, method)(request, timeout=self.deadline_s)
        except grpc.RpcError as error:
            raise_for(error, address=self.address)

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

    def blocks(self, uid: bytes) -> Iterator[tuple[bytes, int, int]]:
        """(key, tiers, replicas) of every block, in the master's order, page by page."""
        from kvpool.core.types import KEY_BYTES
        from kvpool.v1 import master_pb2 as pb

        cursor = b""
        while True:
            reply = self.call("ListBlocks", pb.ListBlocksRequest(namespace=uid, limit=LIST_PAGE_KEYS, after=cursor))
            for i in range(len(reply.keys) // KEY_BYTES):
                yield reply.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], reply.tiers[i], reply.n_replicas[i]
            cursor = reply.cursor
            if not cursor:
                return


def _nearest(name: str, names: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, names, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


@contextmanager
def master_at(address: str | None, *, token_file: Path | None = None, deadline: str = "5s") -> Iterator[Master]:
    """A channel to the master (flag, else environment, else the default), closed at the end. Nothing is asked yet."""
    from kvpool.transport.rpc import open_channel
    from kvpool.v1 import master_pb2_grpc

    make_stub: Any = master_pb2_grpc.MasterStub
    deadline_ms = parse_time_ms(deadline, option="--deadline")
    settings = client_settings(address, token_file)
    target = settings.master.split(",")[0].strip()
    channel = open_channel(target, token_of(settings))
    try:
        yield Master(make_stub(channel), target, deadline_ms / 1000)
    finally:
        channel.close()
