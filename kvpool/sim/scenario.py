"""What a run is made of: its shape, drawn from the seed, and its workers, masters and clients through all their starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpool.core.block import Block
from kvpool.sim.client import SimClient
from kvpool.sim.clock import Process
from kvpool.sim.disk import Disk
from kvpool.sim.drain import SimDrainer
from kvpool.sim.master import SimMaster
from kvpool.sim.network import Quality
from kvpool.sim.node import SimNode
from kvpool.sim.plane import Plane
from kvpool.sim.session import SimAgent

if TYPE_CHECKING:
    from kvpool.sim.cluster import Cluster

ECHO_S: Final = 0.5  # a fault that is over is felt this long: retries, new connections


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is drawn from the seed before the run begins."""

    n_masters: int
    n_workers: int
    n_clients: int
    n_namespaces: int
    n_names: int  # of namespaces that come and go
    dram_blocks: int
    ssd_blocks: int  # 0: no such tier
    replicas: int
    n_chains: int
    chain_blocks: int
    shared_blocks: int
    small_values: bool  # half of the values are smaller than a block
    wire_flips: float  # share of blocks with a flipped bit
    store_replica: bool
    stumbles: float  # share of copies in the middle of which the reader stands still
    faults: tuple[str, ...]
    fault_every_s: float
    quality: Quality
    policy: str = "hazard"  # of the workers
    all_local: bool = False  # every client shares a host with a worker
    favours: str = ""  # a kind of call that is every second one (`load`)
    active_s: float = 5.0
    calm_s: float = 6.5

    @property
    def shared_store(self) -> bool:
        return self.n_masters > 1


class Worker:
    """One worker through all its starts. `node` is of the present one; None: down."""

    def __init__(self, name: str, disk: Disk) -> None:
        self.name, self.host, self.disk = name, name, disk
        self.process: Process | None = None
        self.node: SimNode | None = None
        self.plane: Plane | None = None
        self.agent: SimAgent | None = None
        self.drainer: SimDrainer | None = None
        self.starts = 0


class Master:
    """One master through all its starts."""

    def __init__(self, name: str) -> None:
        self.name, self.host, self.address = name, name, f"{name}:7400"
        self.process: Process | None = None
        self.master: SimMaster | None = None
        self.starts = 0


@dataclass(slots=True)
class Client:
    """The present one of this name."""

    name: str
    host: str
    mirrored: bool
    starts: int
    process: Process
    client: SimClient


@dataclass(slots=True)
class Sighted:
    """See `checker.Copy`."""

    cluster: Cluster
    worker: str
    node: SimNode
    block: Block
    epoch: int

    def readable_since(self, client: str, begun_s: float) -> bool:
        cluster, worker = self.cluster, self.cluster.workers[self.worker]
        leader = cluster.leader()
        if worker.node is not self.node or not self.block.live or leader is None or leader.state is None:
            return False
        if leader.state.epoch != self.epoch or not cluster.is_indexed(self.block.ns, self.block.key, worker):
            return False
        near = cluster.host_of(client)
        touched = ((near,), (worker.host,), (near, worker.host), (leader.process.host,), (near, leader.process.host))
        return not any(cluster.touched(begun_s - ECHO_S, *who) for who in touched)
