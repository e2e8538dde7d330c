"""The engines behind the proxy: each with its connections, its breaker and its load; and the choice among those of one role."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final

import httpx

from kvpool_pd_proxy.affinity import Affinity, Chain
from kvpool_pd_proxy.breaker import Breaker, State
from kvpool_pd_proxy.settings import Settings

log = logging.getLogger("kvpool_pd_proxy")

PROBE_TIMEOUT_S: Final = 2.0
SPARE_CONNECTIONS: Final = 8  # probes and /v1/models beside the requests


class Blame(Enum):
    """What a failure says about the node."""

    NONE = "none"  # it answers, if only with an error: the request may be what is wrong, and its health check decides
    SOME = "some"
    CERTAIN = "certain"  # nobody listens there


class NodeFailed(Exception):
    """A node did not do its part. `reason`: a word for metrics."""

    def __init__(self, message: str, *, reason: str, blame: Blame = Blame.SOME) -> None:
        super().__init__(message)
        self.reason, self.blame = reason, blame


class Why(Enum):
    """Why this node was chosen."""

    BLOCKS = "blocks"  # it has seen the prompt's start
    BUSY = "busy"  # one that has seen it is too busy: the idlest
    NEW = "new"  # nobody has seen it: the idlest


@dataclass(slots=True)
class Node:
    """One engine. `number`: its place in its role, as the affinity table counts."""

    role: str
    number: int
    url: str
    client: httpx.AsyncClient
    breaker: Breaker
    in_flight: int = 0

    @property
    def name(self) -> str:
        return self.url.partition("://")[2]


class Choice:
    def __init__(self, node: Node, seen_bytes: int, why: Why) -> None:
        self.node, self.seen_bytes, self.why = node, seen_bytes, why


class Role:
    """All nodes of one role."""

    def __init__(self, name: str, urls: tuple[str, ...], settings: Settings, *, indispensable: bool) -> None:
        self.name, self._settings, self._indispensable = name, settings, indispensable
        self.affinity = Affinity(entries_max=settings.affinity_entries_max)
        self._turn = 0
        self.nodes = [self._node(i, url) for i, url in enumerate(urls)]

    def _node(self, number: int, url: str) -> Node:
        settings = self._settings
        n_connections = settings.requests_max + SPARE_CONNECTIONS
        client = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(settings.request_timeout_s, connect=settings.connect_timeout_s, pool=1.0),
            # A kept connection may be a dead one, and a request on it then fails without the node being at fault.
            limits=httpx.Limits(max_connections=n_connections, max_keepalive_connections=0),
            trust_env=False,
            follow_redirects=False,
        )
        breaker = Breaker(
            failures_max=settings.breaker_failures_max, open_s=settings.breaker_open_s, open_max_s=settings.breaker_open_max_s
        )
        return Node(self.name, number, url, client, breaker)

    def choose(self, chain: Chain, *, without: set[int]) -> Choice | None:
        """The node that has seen most of the prompt, if not much busier than the idlest; else the idlest. None: all are out.

        Where a role is indispensable, one that only fails is better than none.
        """
        left = [node for node in self.nodes if node.number not in without]
        open_to = [node for node in left if node.breaker.admits()]
        if not open_to and self._indispensable:
            open_to = [node for node in left if not node.breaker.gone]
        if not open_to:
            return None
        seen = self.affinity.matched(chain, len(self.nodes))
        idlest = min(open_to, key=lambda node: (node.in_flight, (node.number - self._turn) % len(self.nodes)))
        knowing = min(open_to, key=lambda node: (-seen[node.number], node.in_flight, node.number))
        if not seen[knowing.number]:
            return Choice(idlest, 0, Why.NEW)
        if knowing.in_flight > idlest.in_flight + self._settings.affinity_slack:
            return Choice(idlest, seen[idlest.number], Why.BUSY)
        return Choice(knowing, seen[knowing.number], Why.BLOCKS)

    @contextmanager
    def using(self, node: Node) -> Iterator[None]:
        """Around one request to the node: counts it, and tells the breaker how it went. NodeFailed passes through."""
        self._turn += 1
        node.in_flight += 1
        node.breaker.begin()
        try:
            yield
        except NodeFailed as error:
            self.failed(node, error)
            raise
        except BaseException:
            node.breaker.abandoned()
            raise
        else:
            node.breaker.succeeded()
        finally:
            node.in_flight -= 1

    def failed(self, node: Node, error: NodeFailed) -> None:
        """One failure of a node; what it had seen is forgotten when that puts it out."""
        level = logging.DEBUG if node.breaker.state is State.OPEN else logging.WARNING
        log.log(level, "node_failed role=%s node=%s reason=%s message=%r", self.name, node.name, error.reason, str(error)[:200])
        if error.blame is Blame.NONE:
            node.breaker.abandoned()
        elif node.breaker.failed(time.monotonic(), beyond_doubt=error.blame is Blame.CERTAIN):
            log.warning("node_out role=%s node=%s", self.name, node.name)
            self.affinity.forget(node.number)

    async def probe(self) -> None:
        """Ask each node for its health once."""
        await asyncio.gather(*(self._probe(node) for node in self.nodes))

    async def _probe(self, node: Node) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                answer = await node.client.get("/health")
            if answer.status_code != httpx.codes.OK:
                raise NodeFailed(f"/health answers {answer.status_code}", reason="status")
        except NodeFailed as error:
            self.failed(node, error)
        except (httpx.HTTPError, OSError) as error:
            self.failed(node, failure_of(error))
        else:
            before = node.breaker.state
            node.breaker.probed(time.monotonic())
            if node.breaker.state is not before:
                log.warning("node_on_trial role=%s node=%s", self.name, node.name)

    def ready(self) -> bool:
        """Whether one node would be given a request."""
        return any(node.breaker.state is not State.OPEN or not node.breaker.gone for node in self.nodes)

    async def close(self) -> None:
        await asyncio.gather(*(node.client.aclose() for node in self.nodes))


def failure_of(error: httpx.HTTPError | OSError) -> NodeFailed:
    """What an HTTP client's error says about the node."""
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, httpx.ConnectError):
        return NodeFailed(words, reason="refused", blame=Blame.CERTAIN)
    if isinstance(error, (httpx.TimeoutException, TimeoutError)):
        return NodeFailed(words, reason="timeout")
    return NodeFailed(words, reason="broken")
