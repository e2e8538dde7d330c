"""A simulated redis with a replica: what `master.redis_store` keeps there, its scripts, and a fail-over to what the replica has.

`RedisData` is the keys and the scripts of `master.redis_scripts`, in the same order of checks; `RedisServer` the primary, which
sends each write on to a replica that may lag, and answers WAIT; `SimRedisLink` stands for
`master.redis_link.RedisLink`. A fail-over loses what the replica had not got.
"""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import NamespaceUid
from kvpool.errors import Fenced, KVPoolError, StoreUnavailable
from kvpool.master import redis_scripts as scripts
from kvpool.master.redis_link import CALL_S, LinkCounts
from kvpool.master.store import NamespaceRecord, namespace_to_bytes
from kvpool.sim.clock import Process
from kvpool.sim.disk import sleep
from kvpool.sim.network import Endpoint, Network, Pool, Reset

ADDRESS: Final = "store:6379"
LAG_S: Final = (0.0002, 0.002)  # of a replica that is well
HASHES: Final = ("namespaces", "removal_seqs", "workers", "pins")
SEQ: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Accepted:
    """A write that was done. `what`: of whom or what it says something, for the story; `uid`: of a namespace's."""

    at_s: float
    epoch: int
    owner: str
    what: str
    uid: NamespaceUid | None = None


@dataclass(slots=True)
class RedisData:
    """The keys of one pool."""

    epoch: int = 0
    owner: str = ""
    address: str = ""
    writes: int = 0
    lease: str = ""
    lease_until_s: float = 0.0
    hashes: dict[str, dict[bytes, bytes]] = field(default_factory=lambda: {name: {} for name in HASHES})
    removals: dict[str, list[bytes]] = field(default_factory=dict)

    def put(self, spec: NamespaceSpec) -> None:
        """Before the run begins."""
        name = spec.uid.hex().encode()
        self.hashes["namespaces"][name], self.hashes["removal_seqs"][name] = namespace_to_bytes(NamespaceRecord(spec, 1)), b"0"

    # --- scripts ----------------------------------------------------------------------------------------------------------

    def run(self, script: str, args: Sequence[Any], now_s: float) -> tuple[Any, Accepted | None]:
        """The answer, and what was changed. Raises KVPoolError."""
        if script == scripts.TAKE:
            return self._take(now_s, *args)
        if script == scripts.RENEW:
            return self._renew(now_s, *args)
        if script == scripts.RELEASE:
            return self._release(now_s, *args)
        owner, epoch, number, *rest = args
        if not self.may_write(owner, epoch):
            raise Fenced(f"store: epoch {epoch} is over, the store has epoch {self.epoch}")
        if number < self.writes:
            raise StoreUnavailable(f"store: write {number} comes after {self.writes}")
        if number == self.writes:
            return number, None
        what = self._write(script, rest)
        if what is None:
            return number, None
        self.writes = number
        return number, Accepted(now_s, epoch, owner, *what)

    def may_write(self, owner: str, epoch: int) -> bool:
        return (self.epoch, self.owner) == (epoch, owner)

    def _lease_reply(self, word: bytes, owner: str, address: str, left_s: float) -> list[Any]:
        return [word, self.epoch, owner.encode(), address.encode(), max(0, int(left_s * 1000)), self.writes]

    def _take(self, now_s: float, owner: str, address: str, ttl_ms: int, floor: int) -> tuple[Any, Accepted | None]:
        holder = self.lease if now_s < self.lease_until_s else ""
        if holder not in ("", owner) and self.epoch >= floor:
            return self._lease_reply(b"held", holder, self.address, self.lease_until_s - now_s), None
        self.epoch, self.owner, self.address = max(self.epoch, floor) + 1, owner, address
        self.lease, self.lease_until_s = owner, now_s + ttl_ms / 1000
        return self._lease_reply(b"taken", owner, address, ttl_ms / 1000), Accepted(now_s, self.epoch, owner, "lease")

    def _renew(self, now_s: float, owner: str, epoch: int, ttl_ms: int, address: str) -> tuple[Any, Accepted | None]:
        if not self.may_write(owner, epoch):
            holder = self.lease if now_s < self.lease_until_s else ""
            return self._lease_reply(b"lost", holder, self.address, self.lease_until_s - now_s), None
        self.lease, self.lease_until_s, self.address = owner, now_s + ttl_ms / 1000, address
        return self._lease_reply(b"renewed", owner, address, ttl_ms / 1000), None

    def _release(self, now_s: float, owner: str, epoch: int) -> tuple[Any, Accepted | None]:
        if not self.may_write(owner, epoch):
            return 0, None
        self.owner = self.address = ""
        if self.lease == owner:
            self.lease, self.lease_until_s = "", now_s
        return 1, None

    def _write(self, script: str, rest: Sequence[Any]) -> tuple[str, NamespaceUid | None] | None:
        """Does it; None: there is nothing to be done."""
        name, namespaces, seqs = str(rest[0]), self.hashes["namespaces"], self.hashes["removal_seqs"]
        field_name = name.encode()
        if script == scripts.PUT_NAMESPACE:
            namespaces[field_name], seqs[field_name] = rest[1], str(rest[2]).encode()
            return "namespace", NamespaceUid(bytes.fromhex(name))
        if script == scripts.DELETE_NAMESPACE:
            namespaces.pop(field_name, None)
            seqs.pop(field_name, None)
            self.removals.pop(name, None)
            pins = self.hashes["pins"]
            self.hashes["pins"] = {pin: value for pin, value in pins.items() if not pin.startswith(rest[1])}
            return "delete", NamespaceUid(bytes.fromhex(name))
        if script == scripts.LOG_REMOVAL:
            if field_name not in namespaces:
                return None
            seq, first_seq, entry = rest[1:]
            seqs[field_name] = str(seq).encode()
            kept = [one for one in self.removals.get(name, ()) if first_seq <= SEQ.unpack_from(one)[0] < seq]
            self.removals[name] = [*kept, entry]
            return f"removal {seq}", NamespaceUid(bytes.fromhex(name))
        if script == scripts.PUT_PINS:
            if field_name not in namespaces:
                return None
            _, name_bytes, value_bytes, packed = rest
            for at in range(0, len(packed), name_bytes + value_bytes):
                one = packed[at : at + name_bytes + value_bytes]
                self.hashes["pins"][one[:name_bytes]] = one[name_bytes:]
            return "pins", NamespaceUid(bytes.fromhex(name))
        if script == scripts.DELETE_PINS:
            for at in range(0, len(rest[1]), rest[0]):
                self.hashes["pins"].pop(rest[1][at : at + rest[0]], None)
            return "no pins", None
        if script == scripts.PUT_WORKER:
            self.hashes["workers"][field_name] = rest[1]
            return f"worker {name}", None
        assert script == scripts.DELETE_WORKER
        self.hashes["workers"].pop(field_name, None)
        return f"no worker {name}", None

    # --- reads ------------------------------------------------------------------------------------------------------------

    def read(self, command: Sequence[Any]) -> Any:
        name, *args = command
        if name == "HSCAN":
            return [b"0", dict(self.hashes[str(args[0]).rpartition(":")[2]])]
        if name == "LRANGE":
            return self.removals.get(str(args[0]).rpartition(":")[2], [])[args[1] : args[2] + 1]
        assert name in ("HGET", "PING"), name
        return str(self.epoch).encode()


class RedisServer:
    """The primary's process. `has_replica`: writes go on to one, after a delay; `lags`: they wait until it does so no more."""

    def __init__(
        self, data: RedisData, process: Process, network: Network, chance: random.Random, *, has_replica: bool,
        on_write: Callable[[Accepted], None],
    ) -> None:  # fmt: skip
        self.data, self.process, self.has_replica, self._on_write = data, process, has_replica, on_write
        self._random = chance
        self.replica = copy.deepcopy(data)
        self.under_way: list[tuple[str, Sequence[Any], float, Accepted | None]] = []  # to the replica, in order
        self._sent = self._arrived = 0
        self._arrives_at = 0.0
        self.lags = False
        self.unasked: dict[int, None] = {}  # writes that were answered, and nobody asked whether the replica has them
        network.listen(process, ADDRESS, self._accept)

    def _accept(self, end: Endpoint) -> None:
        self.process.spawn(self._serve(end), name="store call")

    async def _serve(self, end: Endpoint) -> None:
        while True:
            try:
                answers = []
                commands = await end.recv()
                first = self._sent
                for command in commands:
                    try:
                        answers.append(await self._do(command))
                    except KVPoolError as error:
                        answers.append(error)
                if commands[-1][0] != "WAIT":
                    self.unasked.update(dict.fromkeys(range(first, self._sent)))
                end.send(answers)
            except Reset:
                return

    async def _do(self, command: Sequence[Any]) -> Any:
        if command[0] == "WAIT":
            return await self._wait(command[2] / 1000)
        if command[0] == "INFO":
            replicas = {"slave0": {"state": "online"}} if self.has_replica else {}
            return {"role": "master", "aof_enabled": 1, **replicas}
        if command[0] != "EVAL":
            return self.data.read(command)
        script, args, now_s = command[1], command[3 + command[2] :], self.process.loop.time()
        answer, accepted = self.data.run(script, args, now_s)
        if accepted is not None:
            self._on_write(accepted)
        if self.has_replica:
            self._send(script, args, now_s, accepted)
        return answer

    def lost(self) -> list[tuple[Accepted, bool]]:
        """What the replica has not got, and whether it was confirmed without a look at the replica."""
        numbered = enumerate(self.under_way, start=self._arrived)
        return [(accepted, number in self.unasked) for number, (*_, accepted) in numbered if accepted is not None]

    # --- the replica ------------------------------------------------------------------------------------------------------

    def _send(self, script: str, args: Sequence[Any], now_s: float, accepted: Accepted | None) -> None:
        self.under_way.append((script, args, now_s, accepted))
        self._sent += 1
        low, high = LAG_S
        self._arrives_at = max(self._arrives_at, now_s + low + (high - low) * self._random.random())
        self.process.loop.in_world(self._arrives_at - now_s, self.arrive)

    def arrive(self) -> None:
        """What is due gets to the replica, which does the same."""
        while self.under_way and not self.lags and self.process.alive:
            if self.under_way[0][2] > self.process.loop.time():
                return
            script, args, now_s, _ = self.under_way.pop(0)
            self.replica.run(script, args, now_s)
            self._arrived += 1

    async def _wait(self, patience_s: float) -> int:
        loop, wanted = self.process.loop, self._sent
        until = loop.time() + patience_s
        while self._arrived < wanted and loop.time() < until:
            await sleep(loop, 0.001)
        return int(self._arrived >= wanted)


class SimRedisLink:
    """Commands to the primary, of one master."""

    def __init__(self, network: Network, process: Process) -> None:
        self.counts = LinkCounts()
        self._process = process
        self._pool = Pool(network, process, ADDRESS)
        self.closed = False

    async def call(self, *command: Any, lane: str = "data", deadline_s: float = CALL_S) -> Any:
        return (await self.calls([command], lane=lane, deadline_s=deadline_s))[0]

    async def calls(self, commands: Sequence[Sequence[Any]], *, lane: str = "data", deadline_s: float = CALL_S) -> list[Any]:
        del lane
        until = self._process.loop.time() + deadline_s
        if self.closed:
            raise StoreUnavailable("store: the connection was closed")
        for last in (False, True):
            try:
                answers: list[Any] = await self._pool.call(commands, until)
                break
            except TimeoutError as error:
                raise StoreUnavailable("store: no answer in time") from error
            except ConnectionError as error:
                if last:
                    raise StoreUnavailable(f"store: it cannot be reached: {error}") from error
        for answer in answers:
            if isinstance(answer, KVPoolError):
                raise answer
        return answers

    async def close(self) -> None:
        self.closed = True
        self._pool.close()
