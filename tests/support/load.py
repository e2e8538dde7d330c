"""A client process under load: seeded work from some threads, every byte CHECKed, every call timed against its deadline.

`python -m tests.support.load JSON` (fields of `Work`) prints what it has done as one JSON line (`Told`) some times a second, and
ends with the last one on {"stop": true} or the end of its input; {"pace": x} sets calls a second of all threads, null: no limit.

    chains   put, get (a miss is put), hold + get, view, byte ranges, match: one value a key for ever, shared by all clients
    own keys put v, get, remove, put v + 1: after `removed` nobody may see v again, and only this thread writes the key
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import kvpool
from kvpool.core.types import Outcome, RemoveOutcome
from kvpool.errors import DeadlineExceeded, KVPoolError, MasterUnavailable
from tests.support.payload import check, payload
from tests.support.processes import cli_env

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
HUNG_S = 2.0  # past its deadline on a busy machine: it did not keep it
STUCK_S = 15.0  # past its deadline and not back: it never returns
TELL_S = 0.25
EXPECTED = (MasterUnavailable, DeadlineExceeded)  # what a call may raise while masters are away
THERE = (Outcome.STORED, Outcome.ALREADY, Outcome.UNLISTED)


@dataclass(frozen=True)
class Work:
    """What a client process does. `sizes`: block bytes, one namespace each."""

    master: str
    name: str
    seed: int
    transport: str = "auto"
    mirror: bool = True
    sizes: tuple[int, ...] = (4096, 16384, 49152)
    n_threads: int = 2
    n_chains: int = 200  # a namespace
    n_blocks: int = 12  # of a chain, at most
    deadline_ms: int = 1500
    replicas: int = 1


@dataclass
class Told:
    """Totals of one client process."""

    ops: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)  # of put blocks
    hits: int = 0  # blocks, each CHECKed
    misses: Counter[str] = field(default_factory=Counter)  # gets by cause
    refused: Counter[str] = field(default_factory=Counter)  # errors that are to be expected while masters are away
    errors: list[str] = field(default_factory=list)  # others
    wrong: list[str] = field(default_factory=list)  # bytes of another block or version
    hung: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    longest: str = ""
    over_s: float = 0.0  # longest past a deadline
    over: str = ""

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Told:
        counters = {name: Counter(raw[name]) for name in ("ops", "outcomes", "misses", "refused")}
        return cls(**(raw | counters))

    def took(self, what: str, seconds: float, deadline_s: float, *, who: str) -> None:
        """One call that is back."""
        named = f"{what}, deadline {deadline_s:.1f} s"
        self.ops[what] += 1
        if seconds - deadline_s > self.over_s:
            self.over_s, self.over = seconds - deadline_s, named
        if seconds > self.longest_s:
            self.longest_s, self.longest = seconds, named
        if seconds > deadline_s + HUNG_S:
            self.hung.append(f"{who}: {named}, took {seconds:.2f} s")

    def add(self, other: Told) -> None:
        for mine, more in ((self.ops, other.ops), (self.outcomes, other.outcomes), (self.misses, other.misses),
                           (self.refused, other.refused)):  # fmt: skip
            mine.update(dict(more))
        self.hits += other.hits
        self.errors += other.errors
        self.wrong += other.wrong
        self.hung += other.hung
        if other.over_s > self.over_s:
            self.over_s, self.over = other.over_s, other.over
        if other.longest_s > self.longest_s:
            self.longest_s, self.longest = other.longest_s, other.longest


class Worker(threading.Thread):
    """One thread's work. Others may read `told` at any time."""

    def __init__(self, work: Work, spaces: list[kvpool.Namespace], index: int, stop: threading.Event, pace: list[float | None]):
        super().__init__(daemon=True)
        self.work, self.spaces, self.stop, self.pace = work, spaces, stop, pace
        self.tag = f"{work.name}.{index}"
        self.chance = random.Random(f"{work.seed}/{self.tag}")
        self.told = Told()
        self.under_way: tuple[str, float] | None = None  # call, when it should be back
        self.own: dict[tuple[str, int], tuple[str, int, bool]] = {}  # namespace and place -> (key, version, is it there)
        self.n_own = 0

    def run(self) -> None:
        steps: list[tuple[float, Callable[[kvpool.Namespace], None]]] = [
            (0.25, self.put_chain), (0.75, self.get_chain), (0.82, self.get_held), (0.87, self.look), (0.92, self.get_range),
            (0.95, self.match), (1.0, self.cycle),
        ]  # fmt: skip
        began, n = time.monotonic(), 0
        while not self.stop.is_set():
            ns, which = self.chance.choice(self.spaces), self.chance.random()
            step = next(step for limit, step in steps if which < limit)
            try:
                step(ns)
            except EXPECTED as error:
                self.told.refused[type(error).__name__] += 1
                self.stop.wait(0.02)
            except AssertionError as error:
                self.told.wrong.append(f"{self.tag}: {error}")
            except Exception as error:
                self.told.errors.append(f"{self.tag} {step.__name__}: {type(error).__name__}: {error}")
                self.stop.wait(0.1)
            rate = self.pace[0]
            if rate is None:
                began, n = time.monotonic(), 0
            else:
                n += 1
                self.stop.wait(max(0.0, began + n * self.work.n_threads / rate - time.monotonic()))

    @contextlib.contextmanager
    def timed(self, what: str, deadline_ms: float) -> Iterator[None]:
        began = time.monotonic()
        self.under_way = what, began + deadline_ms / 1e3
        try:
            yield
        finally:
            self.under_way = None
            took = time.monotonic() - began
            self.told.took(what, took, deadline_ms / 1e3, who=self.tag)

    # --- chains

    def chain(self, ns: kvpool.Namespace) -> tuple[int, int, kvpool.PrefixHashes]:
        """(number, blocks, hashes): some are used much more than others."""
        number = int(self.work.n_chains * self.chance.random() ** 2)
        n = self.chance.randint(1, self.work.n_blocks)
        return number, n, ns.hash(range(number * 1000, number * 1000 + n))

    def values(self, ns: kvpool.Namespace, number: int, start: int, n: int) -> list[bytes]:
        return [payload(f"{ns.name}/{number}/{i}", 1, ns.block_bytes) for i in range(start, n)]

    def put_chain(self, ns: kvpool.Namespace) -> None:
        number, n, hashes = self.chain(ns)
        self.put(ns, number, n, hashes)

    def put(self, ns: kvpool.Namespace, number: int, n: int, hashes: kvpool.PrefixHashes) -> None:
        values = self.values(ns, number, 0, n)
        with self.timed("put", self.work.deadline_ms):
            done = ns.put(hashes, values, deadline_ms=self.work.deadline_ms)
        self.told.outcomes.update(outcome.value for outcome in done.outcomes)

    def get_chain(self, ns: kvpool.Namespace) -> None:
        number, n, hashes = self.chain(ns)
        if self.get(ns, number, n, hashes) < n:
            self.put(ns, number, n, hashes)

    def get(self, ns: kvpool.Namespace, number: int, n: int, hashes: kvpool.PrefixHashes, **more: Any) -> int:
        out = np.empty((n, ns.block_bytes), np.uint8)
        with self.timed("get", self.work.deadline_ms):
            got = ns.get(hashes, out, deadline_ms=self.work.deadline_ms, **more)
        for i in range(got.n_blocks):
            check(f"{ns.name}/{number}/{i}", out[i])
        self.told.hits += got.n_blocks
        if got.miss is not None:
            self.told.misses[got.miss.value] += 1
        return got.n_blocks

    def get_held(self, ns: kvpool.Namespace) -> None:
        number, _, hashes = self.chain(ns)
        with self.timed("hold", self.work.deadline_ms):
            hold = ns.hold(hashes, ttl_ms=3000, deadline_ms=self.work.deadline_ms)
        try:
            if hold.n_blocks:
                self.get(ns, number, hold.n_blocks, hashes[: hold.n_blocks], hold=hold)
        finally:
            with self.timed("release", 1000):
                hold.__exit__(None, None, None)

    def look(self, ns: kvpool.Namespace) -> None:
        """A view, where there is shared memory."""
        number, n, hashes = self.chain(ns)
        if self.work.transport == "tcp":
            self.get(ns, number, n, hashes)
            return
        with self.timed("view", self.work.deadline_ms):
            view = ns.view(hashes, deadline_ms=self.work.deadline_ms)
        held: list[bytes] = []
        try:
            with view:
                held = [bytes(view[i]) for i in range(view.n_blocks)]
        except KVPoolError:  # the promise was broken (its worker is gone): what was seen counts for nothing
            self.told.refused["view lost"] += 1
            return
        for i, data in enumerate(held):
            check(f"{ns.name}/{number}/{i}", data)
        self.told.hits += len(held)

    def get_range(self, ns: kvpool.Namespace) -> None:
        number, n, hashes = self.chain(ns)
        offset = self.chance.randrange(ns.block_bytes)
        length = self.chance.randint(1, ns.block_bytes - offset)
        out = np.empty((n, length), np.uint8)
        with self.timed("get range", self.work.deadline_ms):
            got = ns.get(hashes, out, byte_range=(offset, length), deadline_ms=self.work.deadline_ms)
        for i, value in enumerate(self.values(ns, number, 0, got.n_blocks)):
            assert bytes(out[i]) == value[offset : offset + length], f"{ns.name}/{number}/{i}: wrong bytes in a range"
        self.told.hits += got.n_blocks

    def match(self, ns: kvpool.Namespace) -> None:
        _, _, hashes = self.chain(ns)
        with self.timed("match", self.work.deadline_ms):
            ns.match(hashes, deadline_ms=self.work.deadline_ms)

    # --- own keys

    def cycle(self, ns: kvpool.Namespace) -> None:
        """The next step of one of this thread's own keys. What became of a call without a clear answer is not known: then the key
        is given up for a new one."""
        place = ns.name, self.chance.randrange(6)
        key, version, there = self.own.pop(place, ("", 0, False))
        if not key:
            self.n_own += 1
            key, version = f"{self.tag}/own{self.n_own}", 1
        hashes = ns.hash([0], extra=key.encode())
        if not there:
            with self.timed("put", self.work.deadline_ms):
                done = ns.put(hashes, [payload(f"{ns.name}/{key}", version, ns.block_bytes)], deadline_ms=self.work.deadline_ms)
            if done.outcomes[0] in THERE:  # ALREADY: an answer was lost on the way, and the client asked again
                self.own[place] = key, version, True
            self.check_own(ns, key, version, hashes)
            return
        self.check_own(ns, key, version, hashes)
        with self.timed("remove", self.work.deadline_ms):
            outcome = ns.remove(hashes, deadline_ms=self.work.deadline_ms).outcomes[0]
        if outcome is not RemoveOutcome.PENDING:
            self.own[place] = key, version + 1, False
            self.check_own(ns, key, None, hashes)

    def check_own(self, ns: kvpool.Namespace, key: str, version: int | None, hashes: kvpool.PrefixHashes) -> None:
        """The only version that may be seen; None: nothing."""
        out = np.empty((1, ns.block_bytes), np.uint8)
        with self.timed("get", self.work.deadline_ms):
            got = ns.get(hashes, out, deadline_ms=self.work.deadline_ms)
        if got.n_blocks:
            assert version is not None, f"{key}: removed, and served from {got.sources[0]}"
            check(f"{ns.name}/{key}", out[0], versions=[version])
            self.told.hits += 1
        elif got.miss is not None:
            self.told.misses["of a removed key" if version is None else got.miss.value] += 1


def until_it_works(ask: Callable[[], T], stop: threading.Event) -> T | None:
    """Again and again while masters are away; None: stopped."""
    while not stop.is_set():
        try:
            return ask()
        except EXPECTED:
            stop.wait(0.05)
    return None


def main(raw: str) -> int:
    fields = json.loads(raw)
    work = Work(**(fields | {"sizes": tuple(fields.get("sizes", Work.sizes))}))
    stop = threading.Event()
    pace: list[float | None] = [None]
    threading.Thread(target=_listen, args=(stop, pace), daemon=True).start()
    client = until_it_works(lambda: kvpool.connect(work.master, transport=work.transport, mirror=work.mirror), stop)
    threads: list[Worker] = []
    if client is not None:
        spaces = [until_it_works(lambda size=size: space(client, size, work.replicas), stop) for size in work.sizes]  # type: ignore[misc]
        opened = [ns for ns in spaces if ns is not None]
        threads = [Worker(work, opened, i, stop, pace) for i in range(work.n_threads if len(opened) == len(work.sizes) else 0)]
    for thread in threads:
        thread.start()
    while not stop.wait(TELL_S):
        _tell(threads)
    for thread in threads:
        thread.join(STUCK_S)
    _tell(threads)
    if client is not None and not any(thread.is_alive() for thread in threads):
        client.close()
    return 0


def space(client: Any, size: int, replicas: int = 1) -> kvpool.Namespace:
    """The namespace of blocks of this size; made by whoever comes first."""
    layout = kvpool.KVLayout.opaque(block_bytes=size, block_tokens=1)
    namespace: kvpool.Namespace = client.namespace(f"load-{size}", layout, create=True, replicas=replicas)
    return namespace


def _tell(threads: list[Worker]) -> None:
    total = Told()
    for thread in threads:
        total.add(thread.told)
        call = thread.under_way
        if call is not None and time.monotonic() > call[1] + STUCK_S:
            total.hung.append(f"{thread.tag}: {call[0]} is not back {STUCK_S} s after its deadline")
    print(json.dumps(vars(total)), flush=True)


def _listen(stop: threading.Event, pace: list[float | None]) -> None:
    for line in sys.stdin:
        told = json.loads(line)
        if told.get("stop"):
            break
        pace[0] = told["pace"]
    stop.set()


class Loader:
    """Such a process, seen from the one that started it. Not thread-safe."""

    def __init__(self, work: Work, log: Path) -> None:
        self.work = work
        self.log = log
        self.told = Told()
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.load", json.dumps(asdict(work))], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT, env=cli_env(),
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # half a line of a process that was killed
                self.told = Told.of(json.loads(line))

    @property
    def n_ops(self) -> int:
        return sum(self.told.ops.values())

    def say(self, **words: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            self.process.stdin.flush()

    def stop(self, *, timeout_s: float = 30.0) -> Told:
        """Its last word. A process that does not end is killed, and that is a hung call."""
        self.say(stop=True)
        try:
            status = self.process.wait(timeout_s)
            if status:
                self.told.errors.append(f"{self.work.name}: ended with {status}: {self.log.read_text()[-500:]}")
        except subprocess.TimeoutExpired:
            self.told.hung.append(f"{self.work.name}: does not end")
        self.kill()
        return self.told

    def kill(self) -> None:
        """SIGKILL, if it still runs, and the end of its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
