"""What goes wrong in a run: each fault begins, lasts and ends as its seed says; at the end everything is mended.

A run has only some kinds of faults (swarm testing: Groce et al., ISSTA 2012), since each hides others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from kvpool.errors import KVPoolError
from kvpool.sim.clock import Process
from kvpool.sim.cluster import STORE_HOST, Cluster
from kvpool.sim.redis import RedisServer
from kvpool.sim.scenario import Client, Master, Worker
from kvpool.sim.threads import Event, blocking

LEAVE_S: Final = 1.5  # then it is killed, wherever it stands


class Faults:
    """Of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.random = random.Random(f"{cluster.seed}/faults")
        self.counts: dict[str, int] = {}
        self._over = False

    def start(self) -> None:
        if self.cluster.scenario.faults:
            self._later(self._pause(), self._next)

    def _pause(self) -> float:
        return self.random.expovariate(1.0 / self.cluster.scenario.fault_every_s)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.cluster.loop.in_world(delay_s, call)

    def _next(self) -> None:
        if self._over:
            return
        name = self.random.choice(self.cluster.scenario.faults)
        if FAULTS[name](self):
            self.counts[name] = self.counts.get(name, 0) + 1
        self._later(self._pause(), self._next)

    def _some_s(self, low: float, high: float) -> float:
        """Mostly short."""
        return low + (high - low) * self.random.random() ** 2

    def _worker(self) -> Worker:
        return self.random.choice(list(self.cluster.workers.values()))

    def _master(self) -> Master:
        return self.random.choice(list(self.cluster.masters.values()))

    # --- processes --------------------------------------------------------------------------------------------------------

    def worker_kill(self) -> bool:
        worker = self._worker()
        if worker.node is None:
            return False
        down_s = self._some_s(0.1, 3.0)
        self.cluster.touch(worker.host, for_s=down_s)
        self.cluster.kill(worker)
        self._later(down_s, lambda: self._restart_worker(worker))
        return True

    def _restart_worker(self, worker: Worker) -> None:
        if worker.node is None and worker.host not in self.cluster.network.gone_hosts:
            self.cluster.touch(worker.host)
            self.cluster.start_worker(worker.name)

    def worker_power(self) -> bool:
        """The host goes dark: nobody hears of it, its disk forgets some of what was not synced."""
        worker = self._worker()
        if worker.node is None:
            return False
        down_s = self._some_s(0.3, 3.0)
        self.cluster.touch(worker.host, for_s=down_s)
        self.cluster.network.vanish(worker.host)
        self.cluster.kill(worker)
        worker.disk.power_cut()
        self._later(down_s, lambda: self._power_on(worker))
        return True

    def _power_on(self, worker: Worker) -> None:
        self.cluster.network.appear(worker.host)
        self._restart_worker(worker)

    def worker_leave(self) -> bool:
        """SIGTERM: it says good-bye, and comes back."""
        worker = self._worker()
        plane, agent, process = worker.plane, worker.agent, worker.process
        if plane is None or agent is None or process is None or worker.node is None or process.paused:
            return False
        down_s = self._some_s(0.2, 2.0)
        self.cluster.touch(worker.host, for_s=down_s + LEAVE_S)
        self.cluster.note(worker.name, "leaves")

        drainer = worker.drainer
        assert drainer is not None

        async def leave() -> None:
            hurry: Any = Event()
            until = process.now_s() + LEAVE_S / 3
            await blocking(lambda: drainer.leave(until=until, hurry=hurry))
            await plane.drain(LEAVE_S / 3)
            await agent.leave("stopping")
            self._later(0.0, stop)

        def stop() -> None:
            if worker.process is process and process.alive:
                self.cluster.kill(worker)
                self._later(down_s, lambda: self._restart_worker(worker))

        process.spawn(leave(), name=f"{worker.name} leave")
        self._later(LEAVE_S, stop)
        return True

    def drain(self) -> bool:
        """An operator empties a worker, and takes that back after a while."""
        worker, client = self._worker(), self.random.choice(list(self.cluster.clients.values()))
        rate_bytes = self.random.choice((0, 0, 200_000))
        self._ask_drain(client, worker, cancel=False, rate_bytes=rate_bytes)
        self._later(self._some_s(0.5, 3.0), lambda: self._ask_drain(client, worker, cancel=True, rate_bytes=0))
        return True

    def _ask_drain(self, client: Client, worker: Worker, *, cancel: bool, rate_bytes: int) -> None:
        process = client.process

        async def ask() -> None:
            said = "the drain ends" if cancel else "is to be drained"
            try:
                until = process.loop.time() + 3.0
                await client.client.drain(worker.name, cancel=cancel, rate_bytes=rate_bytes, until=until)
            except KVPoolError as error:
                said += f", which failed: {error}"
            self.cluster.note(worker.name, said)

        if process.alive:
            process.spawn(ask(), name="operator")

    def _freeze(self, name: str, host: str, process: Process | None, for_s: float) -> bool:
        if process is None or not process.alive or process.paused:
            return False
        self.cluster.freeze(name, host, process, for_s)
        return True

    def worker_pause(self) -> bool:
        worker = self._worker()
        return self._freeze(worker.name, worker.host, worker.process, self._some_s(0.05, 6.0))

    def master_pause(self) -> bool:
        master = self._master()
        return self._freeze(master.name, master.host, master.process, self._some_s(0.05, 6.0))

    def client_pause(self) -> bool:
        client = self.random.choice(list(self.cluster.clients.values()))
        return self._freeze(client.name, client.name, client.process, self._some_s(0.01, 4.0))

    def client_kill(self) -> bool:
        """Another process goes on in its place after a while."""
        client = self.random.choice(list(self.cluster.clients.values()))
        if not client.process.alive:
            return False
        self.cluster.kill_client(client)
        self._later(self._some_s(0.05, 1.0), lambda: self._restart_client(client))
        return True

    def _restart_client(self, client: Client) -> None:
        if self.cluster.clients[client.name] is client and not client.process.alive:
            new = self.cluster.add_client(client.name, client.host, mirrored=client.mirrored, starts=client.starts + 1)
            self.cluster.begin_load(new)

    def client_blink(self) -> bool:
        """Clients stand still for a moment, often: in the middle of a read."""
        for client in self.cluster.clients.values():
            self._freeze(client.name, client.name, client.process, self._some_s(0.5, 3.0))
        return True

    def store_pause(self) -> bool:
        redis = self.cluster.redis
        return redis is not None and self._freeze("store", STORE_HOST, redis.process, self._some_s(0.05, 5.0))

    def replica_lag(self) -> bool:
        """The redis' replica gets nothing for a while, as when its link is slow."""
        redis = self.cluster.redis
        if redis is None or redis.lags or not redis.has_replica:
            return False
        redis.lags = True
        self.cluster.note("store", "its replica lags")

        def catch_up() -> None:
            redis.lags = False
            redis.arrive()

        self._later(self._some_s(0.2, 2.0), catch_up)
        return True

    def store_failover(self) -> bool:
        """The primary dies; what its replica had got goes on."""
        redis = self.cluster.redis
        if redis is None or not redis.has_replica or not redis.process.alive:
            return False
        if self.random.random() < 0.5:
            self.replica_lag()
        self._later(self._some_s(0.0, 0.5), lambda: self._end_primary(redis))
        return True

    def _end_primary(self, redis: RedisServer) -> None:
        if not redis.process.alive:
            return
        down_s = self._some_s(0.1, 1.5)
        self.cluster.touch(STORE_HOST, for_s=down_s)
        self.cluster.network.unlisten(redis.process)
        redis.process.pause()
        self._later(down_s, lambda: self._fail_over(redis))

    def _fail_over(self, redis: RedisServer) -> None:
        if self.cluster.redis is redis:
            self.cluster.touch(STORE_HOST)
            self.cluster.fail_over()

    def master_kill(self) -> bool:
        master = self._master()
        if master.master is None:
            return False
        down_s = self._some_s(0.1, 3.0)
        self.cluster.touch(master.host, for_s=down_s)
        self.cluster.kill(master)
        self._later(down_s, lambda: self._restart_master(master))
        return True

    def _restart_master(self, master: Master) -> None:
        if master.master is None:
            self.cluster.touch(master.host)
            self.cluster.start_master(master.name)

    def clock_jump(self) -> bool:
        """A monotonic clock is set forward, as after a suspended virtual machine."""
        anybody: list[Worker | Master] = [*self.cluster.workers.values(), *self.cluster.masters.values()]
        one = self.random.choice(anybody)
        if one.process is None or not one.process.alive:
            return False
        jump_s = self._some_s(0.2, 20.0)
        self.cluster.touch(one.host)
        self.cluster.note(one.name, f"its clock jumps by {jump_s:.3f} s")
        one.process.jumped_s += jump_s
        return True

    # --- network ----------------------------------------------------------------------------------------------------------

    def _pair(self) -> tuple[str, str]:
        cluster = self.cluster
        workers, masters = list(cluster.workers), list(cluster.masters)
        clients = sorted({client.host for client in cluster.clients.values()})
        kinds = [(workers, masters), (clients, workers), (clients, masters)]
        if cluster.scenario.shared_store:
            kinds.append((masters, [STORE_HOST]))
        near, far = self.random.choice(kinds)
        return self.random.choice(near), self.random.choice(far)

    def partition(self) -> bool:
        near, far = self._pair()
        if near == far:
            return False
        for_s = self._some_s(0.1, 6.0)
        ways = self.random.choice([((near, far),), ((far, near),), ((near, far), (far, near))])
        self.cluster.touch(near, far, for_s=for_s)
        self.cluster.note("network", f"nothing goes {' nor '.join(f'from {a} to {b}' for a, b in ways)} for {for_s:.3f} s")
        for way in ways:
            self.cluster.network.block(*way)

        def mend() -> None:
            self.cluster.touch(near, far)
            for way in ways:
                self.cluster.network.unblock(*way)

        self._later(for_s, mend)
        return True

    def reset(self) -> bool:
        near, far = self._pair()
        if near == far:
            return False
        self.cluster.touch(near, far)
        self.cluster.note("network", f"connections between {near} and {far} are reset")
        self.cluster.network.reset_between(near, far)
        return True

    # --- disks ------------------------------------------------------------------------------------------------------------

    def _ill_disk(self, what: str, longest_s: float) -> bool:
        worker = self._worker()
        if getattr(worker.disk, what):
            return False
        for_s = self._some_s(0.1, longest_s)
        self.cluster.touch(worker.host, for_s=for_s)
        self.cluster.note(worker.name, f"its disk is {what} for {for_s:.3f} s")
        setattr(worker.disk, what, True)

        def mend() -> None:
            self.cluster.touch(worker.host)
            setattr(worker.disk, what, False)

        self._later(for_s, mend)
        return True

    def disk_full(self) -> bool:
        return self._ill_disk("full", 3.0)

    def disk_error(self) -> bool:
        return self._ill_disk("failing", 3.0)

    def disk_stall(self) -> bool:
        return self._ill_disk("stalled", 7.0)

    def torn_write(self) -> bool:
        worker = self._worker()
        worker.disk.tear_next = True
        self.cluster.touch(worker.host)
        self.cluster.note(worker.name, "its disk will tear the next write")
        return True

    def bit_flip(self) -> bool:
        worker = self._worker()
        place = worker.disk.flip()
        if place:
            self.cluster.touch(worker.host)
            self.cluster.note(worker.name, f"a bit of its disk flips: {place}")
        return bool(place)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def mend_all(self) -> None:
        """Everything works from now on."""
        cluster = self.cluster
        self._over = True
        cluster.note("world", "everything is mended")
        for host in list(cluster.network.gone_hosts):
            cluster.network.appear(host)
        cluster.network.quality.loss = 0.0
        cluster.network.unblock_all()
        for worker in cluster.workers.values():
            disk = worker.disk
            disk.full = disk.failing = disk.stalled = disk.tear_next = False
            if worker.process is not None:
                worker.process.resume()
            self._restart_worker(worker)
        for master in cluster.masters.values():
            if master.process is not None:
                master.process.resume()
            self._restart_master(master)
        for client in list(cluster.clients.values()):
            client.process.resume()
            self._restart_client(client)
        if cluster.redis is not None:
            cluster.redis.lags = False
            cluster.redis.arrive()
            cluster.redis.process.resume()


FAULTS: Final[dict[str, Callable[[Faults], bool]]] = {
    "worker kill": Faults.worker_kill,
    "worker power": Faults.worker_power,
    "worker leave": Faults.worker_leave,
    "drain": Faults.drain,
    "worker pause": Faults.worker_pause,
    "master kill": Faults.master_kill,
    "master pause": Faults.master_pause,
    "client kill": Faults.client_kill,
    "client pause": Faults.client_pause,
    "client blink": Faults.client_blink,
    "clock jump": Faults.clock_jump,
    "partition": Faults.partition,
    "reset": Faults.reset,
    "disk full": Faults.disk_full,
    "disk error": Faults.disk_error,
    "disk stall": Faults.disk_stall,
    "torn write": Faults.torn_write,
    "bit flip": Faults.bit_flip,
    "store pause": Faults.store_pause,
    "replica lag": Faults.replica_lag,
    "store failover": Faults.store_failover,
}
DISK_FAULTS: Final = frozenset(("disk full", "disk error", "disk stall", "torn write", "bit flip"))
STORE_FAULTS: Final = frozenset(("store pause", "replica lag", "store failover"))
