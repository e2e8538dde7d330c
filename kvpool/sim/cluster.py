"""A whole pool in one process and one thread, from one seed: masters, store, workers, clients, network, disks.

Owns the parts and their starts and ends, and answers the checker's questions about what is where. What goes wrong when is
`faults`, what the clients do is `load`, what is judged is `checker`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from kvpool.core.keys import KeyBatch
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import Incarnation, Key, MissCause, NamespaceUid, Tiers
from kvpool.master.store import NamespaceRecord
from kvpool.sim.checker import Checker, Copy
from kvpool.sim.client import SimClient
from kvpool.sim.clock import Process, SimLoop, here
from kvpool.sim.disk import Disk
from kvpool.sim.drain import SimDrainer
from kvpool.sim.link import SimLink, Wire
from kvpool.sim.master import SimMaster
from kvpool.sim.memory import SimDram
from kvpool.sim.network import Network
from kvpool.sim.node import SimNode, build
from kvpool.sim.plane import Plane
from kvpool.sim.redis import Accepted, RedisData, RedisServer
from kvpool.sim.rpc import Channel
from kvpool.sim.scenario import ECHO_S, Client, Master, Scenario, Sighted, Worker
from kvpool.sim.session import SimAgent
from kvpool.sim.store import LocalStore, StoreData
from kvpool.sim.story import Story
from kvpool.sim.values import Chains, size_of, sum_of

BLOCK_BYTES: Final = 4096
LAYOUT: Final = KVLayout.opaque(BLOCK_BYTES, 16)
STORE_HOST: Final = "store"
MENDED_S: Final = 3.0  # after a fail-over the leader has noticed and has written again what was lost


class Cluster:
    """`seed` decides everything."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.seed, self.scenario = seed, scenario
        self.loop = SimLoop()  # type: ignore[abstract]
        self.random = random.Random(f"{seed}/cluster")
        self.network = Network(self.loop, random.Random(f"{seed}/network"), scenario.quality)
        self.network.on_reset = lambda a, b: self.touch(a.process.host, b.process.host)
        self.story = Story()
        self.checker = Checker(self)
        self.store = StoreData()
        self.redis: RedisServer | None = None
        self.accepted: list[Accepted] = []  # writes to the redis
        self.lost_epochs: set[int] = set()  # granted, and unknown to the redis after a fail-over
        self.memories: dict[tuple[str, int], SimDram] = {}
        self.masters = {name: Master(name) for name in (f"m{i}" for i in range(scenario.n_masters))}
        self.addresses = [master.address for master in self.masters.values()]
        self.workers = {name: Worker(name, Disk(self.loop, random.Random(f"{seed}/disk {name}")))
                        for name in (f"w{i}" for i in range(scenario.n_workers))}  # fmt: skip
        self.clients: dict[str, Client] = {}
        self.begin_load: Callable[[Client], None] = lambda _client: None  # what a client does from its start on
        self.chains = Chains(shared_blocks=scenario.shared_blocks)
        self.specs = [self._spec(i) for i in range(scenario.n_namespaces)]
        self.names = [f"name{i}" for i in range(scenario.n_names)]
        self.known: dict[NamespaceUid, NamespaceSpec] = {}  # those of these names that clients have had
        self.starts_of_redis = 0
        self._touched: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        self._expelled: dict[Key, float] = {}
        self._moved: dict[Key, float] = {}
        for spec in self.specs:
            self.store.namespaces[spec.uid] = NamespaceRecord(spec, 1)

    def _spec(self, i: int) -> NamespaceSpec:
        uid = NamespaceUid(self.random.randbytes(16))
        return NamespaceSpec.of(f"ns{i}", LAYOUT, uid=uid, replicas=self.scenario.replicas)

    def batch(self, spec: NamespaceSpec, chain: int, start: int, stop: int) -> KeyBatch:
        """Blocks of a chain of this namespace, as far as it goes."""
        return self.chains.batch(spec.uid, chain, start, min(stop, self.scenario.chain_blocks))

    # --- namespaces that come and go

    def wanted(self, name: str) -> NamespaceSpec:
        """What a client asks for that makes it."""
        return NamespaceSpec.of(name, LAYOUT, replicas=self.scenario.replicas)

    def opened(self, spec: NamespaceSpec) -> None:
        """A client has it."""
        if spec.uid not in self.known:
            self.known[spec.uid] = spec
            self.name_keys(spec)

    def name_keys(self, spec: NamespaceSpec) -> None:
        """For the story."""
        for chain in range(self.scenario.n_chains):
            for index, key in enumerate(self.batch(spec, chain, 0, self.scenario.chain_blocks).split()):
                self.story.name(key, f"{spec.name}/c{chain}/{index}")

    def keys_of(self, uid: NamespaceUid) -> list[Key]:
        return self.all_keys(self.known[uid])

    def size_of(self, key: Key) -> int:
        """Bytes of the block's value."""
        return size_of(key, BLOCK_BYTES) if self.scenario.small_values else BLOCK_BYTES

    def all_keys(self, spec: NamespaceSpec) -> list[Key]:
        """Every key that a client may name, once."""
        shape = self.scenario
        found = [key for c in range(shape.n_chains) for key in self.batch(spec, c, 0, shape.chain_blocks).split()]
        return list(dict.fromkeys(found))

    # --- starts and ends --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.scenario.shared_store:
            data = RedisData()
            for spec in self.specs:
                data.put(spec)
            self.start_redis(data)
        for name in self.masters:
            self.start_master(name)
        for name in self.workers:
            self.start_worker(name)

    def start_redis(self, data: RedisData) -> None:
        """A primary with this, and a replica that has the same."""
        process = self._process(f"store.{self.starts_of_redis}", STORE_HOST)
        self.starts_of_redis += 1
        chance = random.Random(f"{self.seed}/{process.name} replica")
        self.redis = RedisServer(data, process, self.network, chance, has_replica=self.scenario.store_replica,
                                 on_write=self.accepted.append)  # fmt: skip

    def fail_over(self) -> None:
        """The primary is gone; its replica is the primary from soon on, with what it had got."""
        old = self.redis
        assert old is not None
        lost = [write for write, _ in old.lost()]
        for write in [write for write, careless in old.lost() if careless]:
            self.checker.fail("C8", f"{write.owner} wrote {write.what}, and did not wait for the replica; it is lost", None)
        old.process.kill()
        self.note("store", f"fails over, and loses {', '.join(write.what for write in lost) or 'nothing'}")
        self.checker.count("writes lost", len(lost))
        self.lost_epochs |= {write.epoch for write in lost if write.what == "lease"}
        self.accepted.append(Accepted(self.loop.time(), old.replica.epoch, "", "fail-over"))
        self.start_redis(old.replica)
        for write in lost:
            if write.uid is not None:
                self.loop.in_world(MENDED_S, self._look_after, write)

    def _look_after(self, write: Accepted) -> None:
        """A lost write is written again by the leader that made it, unless that ended soon, which the documentation allows."""
        assert self.redis is not None and write.uid is not None
        namespaces = self.redis.data.hashes["namespaces"]
        there = write.uid.hex().encode() in namespaces
        if (write.what == "namespace" and not there) or (write.what == "delete" and there):
            leads = self.redis.data.may_write(write.owner, write.epoch)
            if leads and not self.trouble_since(write.at_s - ECHO_S, *self.masters, STORE_HOST):
                self.checker.fail("C8", f"the redis was set back, and {write.owner} did not write its {write.what} again", None)
            self.checker.names.lost(write.uid)

    def _process(self, name: str, host: str) -> Process:
        return Process(self.loop, name, host=host, seed=str(self.seed))

    def start_master(self, name: str) -> None:
        one = self.masters[name]
        one.starts += 1
        process = one.process = self._process(f"{name}.{one.starts}", one.host)
        self.note(name, f"starts as {process.name}")
        local = None if self.scenario.shared_store else LocalStore(self.store, process)
        one.master = SimMaster(
            process, self.network, one.address, local=local, note=lambda what, more: self.note(name, f"{what} {more}")
        )

    def start_worker(self, name: str) -> None:
        one, scenario = self.workers[name], self.scenario
        one.starts += 1
        process = one.process = self._process(f"{name}.{one.starts}", one.host)
        incarnation = Incarnation(process.random.getrandbits(64) | 1)
        self.note(name, f"starts as {process.name}")
        expected = self._adoptable(one) if scenario.ssd_blocks else []
        node = one.node = build(
            process, one.disk, worker_id=name, incarnation=incarnation, dram_bytes=scenario.dram_blocks * BLOCK_BYTES,
            ssd_bytes=scenario.ssd_blocks * BLOCK_BYTES, policy=scenario.policy,
            on_report=lambda _uid, key, tiers, cause: self._on_report(name, key, tiers, cause),
            on_bump=lambda _uid, _index: self._on_bump(name),
            note=lambda what, more: self.note(name, f"{what} {more}".strip()),
        )  # fmt: skip
        for uid, key in expected:
            if key not in node.table.spaces[uid].blocks:
                self.checker.fail("C7", f"a good record of the block on {name}'s SSD was not taken over at its start", key)
        self.memories[name, incarnation] = node.memory
        one.plane = Plane(node, self.network, f"{name}:data", on_commit=lambda key, moved: self._on_commit(name, key, moved))
        process.spawn(node.movement.run(), name=f"{name} mover")
        process.spawn(node.expire(), name=f"{name} holds")
        node.kick_mover()
        process.call(self._start_agent, one, node)

    def _start_agent(self, one: Worker, node: SimNode) -> None:
        agent = one.agent = SimAgent(node, self.network, masters=",".join(self.addresses), address=f"{one.name}:data")
        one.drainer = SimDrainer(node, agent, on_done=lambda began_s, leaving: self._on_drained(one, node, began_s, leaving))
        node.process.spawn(agent.run(), name=f"{one.name} agent")

    def _adoptable(self, one: Worker) -> list[tuple[NamespaceUid, Key]]:
        """What a start must take over: whole newest records of namespaces whose removals are known, payload intact."""
        newest: dict[tuple[NamespaceUid, Key], tuple[int, bool]] = {}
        for file in one.disk.files.values():
            for index, record in file.records.items():
                if record.whole:
                    intact = sum_of(file.payload.get(index, b"")) == record.meta.block_sum
                    name = file.namespace, record.meta.key
                    newest[name] = max(newest.get(name, (0, False)), (record.seq, intact))
        return [(uid, key) for (uid, key), (_, intact) in newest.items() if intact and uid in one.disk.applied]

    def kill(self, one: Worker | Master) -> None:
        """SIGKILL."""
        if one.process is not None and one.process.alive:
            self.note(one.name, "is killed")
            one.process.kill()
            if isinstance(one, Worker):
                one.node = one.agent = None
            else:
                one.master = None

    def freeze(self, name: str, host: str, process: Process, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        self.touch(host, for_s=for_s)
        self.note(name, f"is paused for {for_s:.3f} s")
        process.pause()
        self.loop.in_world(for_s, self._thaw, name, host, process)

    def _thaw(self, name: str, host: str, process: Process) -> None:
        if process.alive and process.paused:
            self.touch(host)
            self.note(name, "goes on")
            process.resume()

    def kill_client(self, client: Client) -> None:
        """SIGKILL, in the middle of whatever it does."""
        self.note(client.name, "is killed")
        self.checker.abandon(client.name)
        client.process.kill()

    def add_client(self, name: str, host: str, *, mirrored: bool, starts: int = 1) -> Client:
        process = self._process(f"{name}.{starts}", host)
        client = SimClient(
            process, self.network, masters=self.addresses, memories=self.memories, size_of=self.size_of, mirrored=mirrored,
            wire_flips=self.scenario.wire_flips, on_flip=lambda: self.touch(host), stumbles=self.scenario.stumbles,
            on_stumble=lambda: self.freeze(name, host, process, self.random.uniform(0.5, 5.0)),
        )  # fmt: skip
        found = self.clients[name] = Client(name, host, mirrored, starts, process, client)
        return found

    def link(self, worker: Any, options: Any, *, deadline: float) -> SimLink:
        """`transport.choose.link`: a connected one. `options`: a client's Wire; a worker that is drained has another worker's."""
        wire = options if isinstance(options, Wire) else Wire(self.network, here(), self.size_of)
        link = SimLink(wire, worker)
        link.connect(deadline=deadline)
        return link

    def channel(self, address: str, _token: str = "") -> Channel:
        """A blocking process' channel to a master."""
        return Channel(self.network, here(), address)

    # --- what happened ----------------------------------------------------------------------------------------------------

    def note(self, who: str, what: str, *keys: Key) -> None:
        self.story.add(self.loop.time(), who, what, keys)

    def _on_report(self, name: str, key: Key, tiers: int, cause: MissCause | None) -> None:
        if tiers:
            where = "+".join(tier.name or "" for tier in Tiers if tier & tiers and tier)
            self.note(name, f"has it in {where}", key)
        else:
            self._expelled[key] = self.loop.time()
            self.note(name, f"gives it up: {cause.value if cause is not None else '?'}", key)

    def _on_commit(self, name: str, key: Key, moved: bool) -> None:
        self.note(name, "takes it over" if moved else "commits it", key)
        if moved:
            self._moved[key] = self.loop.time()
            self.checker.count("moved")
        else:
            self.checker.committed(key)

    def _on_drained(self, one: Worker, node: SimNode, began_s: float, leaving: bool) -> None:
        """C7: a drain that says that it is done has left nothing here alone (a stop does not lose what is on SSD)."""
        self.note(one.name, "is drained" if not leaving else "may leave")
        self.checker.count("drained")
        since_s = began_s - ECHO_S
        if self.trouble_since(since_s):
            return
        for uid, space in node.table.spaces.items():
            others = [w.node.table.spaces[uid].blocks for w in self.workers.values()
                      if w is not one and w.node is not None and uid in w.node.table.spaces]  # fmt: skip
            for key, block in space.blocks.items():
                if any(key in blocks for blocks in others) or (leaving and block.ssd is not None):
                    continue
                fresh = self.checker.committed_since(key, since_s) or self._moved.get(key, -1.0) >= since_s
                if not fresh and not self.expelled_since(key, since_s):
                    self.checker.fail("C7", f"{one.name} said that it is drained, and nobody else has the block", key)

    def _on_bump(self, name: str) -> None:
        """C4: a slot was freed; no copy that a live hold protects may have gone."""
        node = self.workers[name].node
        if node is None:
            return
        now_ms = node.now_ms()
        for hold in node.table._holds._by_id.values():
            if hold.overdue or hold.deadline_ms <= now_ms:
                continue
            for block, tier in hold.protects:
                there = block.dram if tier is Tiers.DRAM else block.ssd
                if there is None and not any(doomed is tier for doomed, _ in block.doomed or ()):
                    text = f"{name} gave up a held copy ({tier.name}), {hold.deadline_ms - now_ms} ms before the hold's end"
                    self.checker.fail("C4", text, block.key)

    def touch(self, *who: str, for_s: float = 0.0) -> None:
        """A fault touches this host, or the way between these two, from now on."""
        now = self.loop.time()
        self._touched.setdefault(tuple(sorted(who)), []).append((now, now + for_s))

    def touched(self, since_s: float, *who: str) -> bool:
        return any(end + ECHO_S >= since_s for _, end in self._touched.get(tuple(sorted(who)), ()))

    # --- what the checker asks --------------------------------------------------------------------------------------------

    def now_s(self) -> float:
        return self.loop.time()

    def workers_names(self) -> list[str]:
        return list(self.workers)

    def host_of(self, name: str) -> str:
        return self.clients[name].host if name in self.clients else name

    def paused_s(self, client: str) -> float:
        process = self.clients[client].process
        return process.paused_s + (self.loop.time() - process.paused_at if process.paused else 0.0)

    def leader(self) -> SimMaster | None:
        """The one that answers; of several that think so, the newest."""
        serving = [one.master for one in self.masters.values() if one.master is not None and one.master.serves]
        return max(serving, key=lambda master: master.state.epoch if master.state is not None else 0, default=None)

    def is_indexed(self, uid: NamespaceUid, key: Key, worker: Worker) -> bool:
        leader = self.leader()
        state = leader.state if leader is not None else None
        if state is None or worker.node is None:
            return False
        member = state.members.get(worker.node.worker_id)  # type: ignore[arg-type]
        if member is None or member.info.incarnation != worker.node.incarnation:
            return False
        return any(holder in member.holders for holder, _ in state.catalog.locate(uid, [key])[0])

    def copies(self, client: str, uid: NamespaceUid, key: Key) -> list[Copy]:
        leader = self.leader()
        if leader is None or leader.state is None:
            return []
        found: list[Copy] = []
        for worker in self.workers.values():
            node = worker.node
            if node is None or isinstance(node.served(uid), tuple):
                continue
            block = node.table.spaces[uid].blocks.get(key)
            if block is None or not self.is_indexed(uid, key, worker) or not self._thinks_well(client, node):
                continue
            found.append(Sighted(self, worker.name, node, block, leader.state.epoch))
        return found

    def _thinks_well(self, client: str, node: SimNode) -> bool:
        if client not in self.clients:
            return True
        peer = self.clients[client].client.peers.find(node.worker_id, node.incarnation)
        return peer is None or not peer.breaker.failures

    def trouble_since(self, since_s: float, *who: str) -> bool:
        if not who:
            return any(end + 5.0 >= since_s for spans in self._touched.values() for _, end in spans)
        hosts = {self.host_of(name) for name in who}
        return any(
            hosts & set(name) and any(end + ECHO_S >= since_s for _, end in spans) for name, spans in self._touched.items()
        )

    def expelled_since(self, key: Key, since_s: float) -> bool:
        return self._expelled.get(key, -1.0) >= since_s
