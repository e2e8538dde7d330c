"""The way to a redis: addresses, one bounded pool of connections to the primary, deadlines, and redis' errors as kvpool's.

    redis://[user:password@]host[:port][/db]                          one server (rediss:// with TLS)
    redis+sentinel://[user:password@]host:port,host:port/service[/db]  the primary that Sentinel names
    redis+cluster://[user:password@]host:port,host:port               the primary of the pool's slot

`?pool=NAME` keeps several pools apart in one redis, `?ca=FILE` names the certificate authority for TLS, and
`?sentinel_password=` is that of the Sentinels. All keys of a pool share one hash tag, so all are on one node of a
Cluster, whose client is used to find that node. A password is in no message, log line or repr.

A command whose caller went away (cancelled, timed out) takes its connection with it: a reply that nobody read never meets the
next command. What is stored under which key is `redis_store`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from kvpool.errors import ConfigError, Fenced, KVPoolError, QuotaExceeded, StoreUnavailable
from kvpool.quantities import without_password

SOCKET_TIMEOUT_S: Final = 0.5  # connecting, sending, each read
CALL_S: Final = 1.0  # a whole call, with the wait for a connection and one more attempt
CONNECTIONS_MAX: Final = 8
LEASE_CONNECTIONS: Final = 2  # of their own: a renewal does not queue behind slow reads
CLOSE_S: Final = 1.0
NODES_MAX: Final = 64  # of an address
DEFAULT_PORT: Final = 6379
SENTINEL_PORT: Final = 26379

_SCHEMES: Final = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_LATER: Final = frozenset(  # first words of redis' errors that pass by themselves, or by an operator
    ("MISCONF", "NOREPLICAS", "BUSY", "LOADING", "MASTERDOWN")
)
_POOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class StoreDamaged(ConfigError):
    """Under one of the pool's keys is a value that the pool did not write; the message names the key. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class RedisPlace:
    """A parsed address. `str` and `repr` have no password."""

    kind: str  # single, sentinel, cluster
    nodes: tuple[tuple[str, int], ...]
    tls: bool = False
    db: int = 0
    service: str = ""
    pool: str = "default"
    ca: str = ""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        scheme = next(name for name, what in _SCHEMES.items() if what == (self.kind, self.tls))
        nodes = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.nodes)
        path = {"single": f"/{self.db}", "sentinel": f"/{self.service}/{self.db}", "cluster": ""}[self.kind]
        return f"{scheme}://{nodes}{path}"


def parse(url: str) -> RedisPlace:
    """Raises ConfigError naming what is wrong, without the password."""

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"store: {without_password(url)!r}: {what}")

    try:
        parts = urlsplit(url)
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), max_num_fields=8)
    except ValueError:
        raise wrong("is no address") from None
    if parts.scheme not in _SCHEMES:
        raise wrong(f"the scheme must be one of {', '.join(_SCHEMES)}")
    kind, tls = _SCHEMES[parts.scheme]
    given, _, places = parts.netloc.rpartition("@")
    username, colon, password = given.partition(":")
    nodes = tuple(_node(place, SENTINEL_PORT if kind == "sentinel" else DEFAULT_PORT, wrong) for place in places.split(","))
    if len(nodes) > NODES_MAX or (kind == "single" and len(nodes) > 1):
        raise wrong(f"has {len(nodes)} servers; allowed are {1 if kind == 'single' else NODES_MAX}")
    path = [unquote(part) for part in parts.path.split("/")[1:]] if parts.path not in ("", "/") else []
    service = ""
    if kind == "sentinel":
        service, path = (path[0], path[1:]) if path else ("", [])
        if not service:
            raise wrong("the name of Sentinel's service is missing, as in redis+sentinel://host:26379/mymaster")
    if len(path) > 1 or (path and not re.fullmatch(r"\d{1,5}", path[0])) or (path and kind == "cluster" and path[0] != "0"):
        raise wrong("the database must be a number" if kind != "cluster" else "a Cluster has no databases but 0")
    known: dict[str, str] = {}
    for name, value in options:
        if name not in ("pool", "ca", "sentinel_password") or name in known:
            raise wrong(f"the option {name!r} is unknown or given twice; allowed are pool, ca, sentinel_password")
        known[name] = value
    pool = known.get("pool", "default")
    if not _POOL_NAME.fullmatch(pool):
        raise wrong("pool: allowed are 1..64 letters, digits, '_', '.' and '-'")
    return RedisPlace(
        kind=kind,
        nodes=nodes,
        tls=tls,
        db=int(path[0]) if path else 0,
        service=service,
        pool=pool,
        ca=known.get("ca", ""),
        username=unquote(username) or None,
        password=unquote(password) if colon else None,
        sentinel_password=known.get("sentinel_password"),
    )


def _node(place: str, default_port: int, wrong: Any) -> tuple[str, int]:
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:\[\]]+))(?::(\d{1,5}))?", place)
    if found is None or not 0 < int(found[3] or default_port) < 65536:
        raise wrong("a server must be host or host:port (an IPv6 address in brackets)")
    return found[1] or found[2], int(found[3] or default_port)


def _moved(problem: Any) -> tuple[type[Exception], ...]:
    """redis' ways to say that this server is not the primary, or not now."""
    return (problem.AskError, problem.ReadOnlyError, problem.ClusterDownError, problem.TryAgainError)


@dataclass(slots=True)
class LinkCounts:
    """Plain ints; shells export them."""

    calls: int = 0
    timeouts: int = 0
    unavailable: int = 0
    primaries_found: int = 0


class RedisLink:
    """Commands to the primary, from one loop. Every call ends within its deadline with an answer or an error of kvpool."""

    def __init__(self, place: RedisPlace, *, slot_key: str) -> None:
        self.place = place
        self.counts = LinkCounts()
        self._slot_key = slot_key
        self._clients: dict[str, Any] = {}  # lane -> client: commands that are cancelled cost the other lane no connection
        self._sentinel: Any = None
        self._finding = asyncio.Lock()
        self._slots = {
            "data": asyncio.Semaphore(CONNECTIONS_MAX - LEASE_CONNECTIONS),
            "lease": asyncio.Semaphore(LEASE_CONNECTIONS),
        }
        self.closed = False

    async def call(self, *command: Any, lane: str = "data", deadline_s: float = CALL_S) -> Any:
        """One command. Raises StoreUnavailable, StoreDamaged (a key of another type), Fenced, QuotaExceeded, ConfigError (refused
        credentials), KVPoolError. Cancelled: its connection is dropped; the command may or may not have been done."""
        return (await self.calls([command], lane=lane, deadline_s=deadline_s))[0]

    async def calls(self, commands: Sequence[Sequence[Any]], *, lane: str = "data", deadline_s: float = CALL_S) -> list[Any]:
        """Several commands in order on one connection; the first error among their answers is raised. Else like `call`."""
        import redis.exceptions as problem

        self.counts.calls += 1
        async with self._errors(), asyncio.timeout(deadline_s), self._slots[lane]:
            elsewhere: Any = (problem.ConnectionError, *_moved(problem))
            for last in (False, True):
                client = await self._primary(lane)
                try:
                    if len(commands) == 1:
                        return [await client.execute_command(*commands[0])]
                    pipeline = client.pipeline(transaction=False)
                    for command in commands:
                        pipeline.execute_command(*command)
                    answers: list[Any] = await pipeline.execute(raise_on_error=False)
                    for answer in answers:
                        if isinstance(answer, Exception):
                            raise answer
                    return answers
                except problem.TimeoutError:  # no time for another attempt; the next call looks whether there is another primary
                    await self._forget(client)
                    raise
                except elsewhere:
                    await self._forget(client)
                    if last:
                        raise
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """redis' errors as kvpool's."""
        import redis.exceptions as problem

        if self.closed:
            raise StoreUnavailable(f"store: the connection to {self.place} was closed")
        unreachable: Any = (problem.ConnectionError, problem.RedisClusterException, *_moved(problem), OSError)
        try:
            yield
        except KVPoolError:
            raise
        except (TimeoutError, problem.TimeoutError) as error:
            self.counts.timeouts += 1
            self.counts.unavailable += 1
            raise StoreUnavailable(f"store: no answer from {self.place} in time") from error
        except (problem.AuthenticationError, problem.NoPermissionError, problem.AuthorizationError) as error:
            raise ConfigError(f"store: {self.place} refuses the credentials: {self._clean(error)}") from None
        except unreachable as error:
            self.counts.unavailable += 1
            raise StoreUnavailable(f"store: {self.place} cannot be reached: {self._clean(error)}") from error
        except problem.OutOfMemoryError as error:
            raise QuotaExceeded(f"store: {self.place} is full (its maxmemory)") from error
        except problem.ResponseError as error:
            raise self._refusal(str(error)) from error
        except (problem.RedisError, ValueError, AttributeError) as error:  # the last: of a connection that was closed under it
            self.counts.unavailable += 1
            raise StoreUnavailable(f"store: {self.place} does not speak as redis does: {self._clean(error)}") from error

    def _refusal(self, text: str) -> KVPoolError:
        word, _, rest = text.partition(" ")
        if word == "NOAUTH":
            return ConfigError(f"store: {self.place} wants a password")
        if word == "KVFENCED":
            return Fenced(f"store: this master is not the leader any more: {rest}")
        if word == "KVALIEN":
            return StoreDamaged(f"store: {self._clean(rest)} in {self.place}; this pool did not write it")
        if word == "KVSTALE":
            return StoreUnavailable(f"store: a write came too late: {rest}")
        if word in _LATER:
            self.counts.unavailable += 1
            return StoreUnavailable(f"store: {self.place} takes no writes now: {self._clean(text)}")
        if word == "OOM":
            return QuotaExceeded(f"store: {self.place} is full (its maxmemory)")
        return KVPoolError(f"store: {self.place} answered: {self._clean(text)}")

    def _clean(self, error: object) -> str:
        text = str(error)[:500]
        for secret in (self.place.password, self.place.sentinel_password):
            if secret:
                text = text.replace(secret, "***")
        return text

    # --- the primary ----------------------------------------------------------------------------------------------------

    async def _primary(self, lane: str) -> Any:
        if lane in self._clients:
            return self._clients[lane]
        async with self._finding:
            if lane not in self._clients:
                client = await self._find()
                if self.closed:  # while it was looked for
                    await client.aclose()
                    raise StoreUnavailable(f"store: the connection to {self.place} was closed")
                self._clients[lane] = client
                self.counts.primaries_found += 1
            return self._clients[lane]

    def _settings(self) -> dict[str, Any]:
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        place = self.place
        settings: dict[str, Any] = {
            "username": place.username,
            "password": place.password,
            "socket_timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": SOCKET_TIMEOUT_S,
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if place.tls:
            settings |= {"ssl": True, "ssl_ca_certs": place.ca or None}
        return settings

    async def _find(self) -> Any:
        from redis.asyncio import Redis

        place = self.place
        settings = self._settings()
        settings["max_connections"] = CONNECTIONS_MAX
        if place.kind == "single":
            host, port = place.nodes[0]
            return Redis(host=host, port=port, db=place.db, **settings)
        if place.kind == "sentinel":
            from redis.asyncio.sentinel import Sentinel

            asking = {**settings, "username": None, "password": place.sentinel_password}
            if self._sentinel is None:
                make: Any = Sentinel
                self._sentinel = make(list(place.nodes), sentinel_kwargs=asking)
            try:
                host, port = await self._sentinel.discover_master(place.service)
            except BaseException:  # one that hangs does not stay in front of those that answer
                self._sentinel.sentinels.append(self._sentinel.sentinels.pop(0))
                raise
            return Redis(host=host, port=port, db=place.db, **settings)
        from redis.asyncio.cluster import ClusterNode, RedisCluster

        first = self.counts.calls % len(place.nodes)  # one that hangs is not asked first each time
        nodes = [ClusterNode(host, port) for host, port in place.nodes[first:] + place.nodes[:first]]
        cluster = RedisCluster(startup_nodes=nodes, require_full_coverage=False, **settings)
        try:
            await cluster.initialize()
            node = cluster.get_node_from_key(self._slot_key)
            assert node is not None
            return Redis(host=node.host, port=int(node.port), **settings)
        finally:
            await cluster.aclose()

    async def _forget(self, client: Any) -> None:
        """The primary is looked for anew by the next attempt; other calls that are under way there end by themselves."""
        lane = next((lane for lane, one in self._clients.items() if one is client), None)
        if lane is not None:
            del self._clients[lane]
            with contextlib.suppress(Exception):
                await client.aclose()

    async def close(self) -> None:
        """Ends all connections; bounded, raises nothing. Calls that are under way end with StoreUnavailable."""
        self.closed = True
        clients, self._clients = self._clients, {}
        sentinel, self._sentinel = self._sentinel, None
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                for client in clients.values():
                    await client.aclose()
                for node in sentinel.sentinels if sentinel is not None else ():
                    await node.aclose()
