"""Single keys over the public API: put P(key, version, size), read with CHECK. And clients as processes of their own (`Child`).

`python -m tests.support.keyed VERB JSON` is such a process; verbs are the functions of `VERBS`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kvpool
from kvpool.core.types import MissCause, Outcome, RemoveOutcome
from kvpool.errors import KVPoolError, MasterUnavailable
from tests.support.payload import check, payload
from tests.support.processes import cli_env
from tests.support.scale import scaled

ROOT = Path(__file__).resolve().parents[2]
SLACK_S = 2.0  # what a call may take past its deadline
DEADLINE_MS = 5_000
HEAR_S = scaled(30.0, 180.0)  # many processes that start at once have few cores
THERE = (Outcome.STORED, Outcome.ALREADY, Outcome.UNLISTED)


def keyspace(client: Any, name: str, block_bytes: int, *, create: bool = True, **settings: Any) -> kvpool.Namespace:
    """A namespace whose keys are anything and whose values have 1..block_bytes bytes."""
    layout = kvpool.KVLayout.opaque(block_bytes=block_bytes, block_tokens=1)
    namespace: kvpool.Namespace = client.namespace(name, layout, create=create, hash="external", **settings)
    return namespace


def hash_of(ns: kvpool.Namespace, *keys: object) -> kvpool.PrefixHashes:
    """The keys as a chain (one key: a chain of one)."""
    return ns.hashes([hashlib.sha256(str(key).encode()).digest() for key in keys])


def put(ns: kvpool.Namespace, key: object, size: int, version: int = 1, *, deadline_ms: int = DEADLINE_MS) -> Outcome:
    """Puts P(key, version, size); AssertionError when the call outlives its deadline."""
    began = time.monotonic()
    done = ns.put(hash_of(ns, key), [payload(key, version, size)], deadline_ms=deadline_ms)
    took = time.monotonic() - began
    assert took < deadline_ms / 1e3 + SLACK_S, f"put of {key} took {took:.2f} s"
    return done.outcomes[0]


def read(ns: kvpool.Namespace, key: object, *, versions: Iterable[int] = (1,), deadline_ms: int = DEADLINE_MS,
         size: int | None = None) -> int | MissCause:  # fmt: skip
    """The version that the pool has, after CHECK, or why there is none."""
    out = bytearray(ns.block_bytes)
    began = time.monotonic()
    got = ns.get(hash_of(ns, key), [out], deadline_ms=deadline_ms)
    took = time.monotonic() - began
    assert took < deadline_ms / 1e3 + SLACK_S, f"get of {key} took {took:.2f} s"
    if not got.n_blocks:
        assert got.miss is not None
        return got.miss
    return check(key, memoryview(out)[: got.sizes[0]], versions=versions, size=size)


def have(ns: kvpool.Namespace, keys: Iterable[object], **settings: Any) -> int:
    """How many of the keys are served, each after CHECK."""
    return sum(isinstance(read(ns, key, **settings), int) for key in keys)


class Child:
    """A client process. Lines of JSON both ways; standard error goes to a file."""

    def __init__(self, verb: str, log: Path, *, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None,
                 **arguments: Any) -> None:  # fmt: skip
        self.log = log
        command = [*prefix, sys.executable, "-m", "tests.support.keyed", verb, json.dumps(arguments)]
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT,
                                            env=cli_env(env))  # fmt: skip
        self._tail = b""

    def say(self, value: Any) -> None:
        """One line to its standard input; nothing when it is dead."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(value).encode() + b"\n")
            self.process.stdin.flush()

    def hear(self, *, timeout_s: float = HEAR_S) -> Any:
        """Its next line; None at its end."""
        assert self.process.stdout is not None
        end = time.monotonic() + timeout_s
        while b"\n" not in self._tail:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise AssertionError(f"no line within {timeout_s} s; log:\n{self.log.read_text()[-3000:]}")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                return None
            self._tail += data
        line, _, self._tail = self._tail.partition(b"\n")
        return json.loads(line)

    def end(self, *, timeout_s: float = 20.0) -> int:
        """Closes its input and waits; its exit status."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL, if it still runs, and the end of its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


# --- what the processes do ------------------------------------------------------------------------------------------------


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def _write(ns: kvpool.Namespace, *, version: int, size: int) -> None:
    """For each line [first, end]: puts these keys one by one, says [key, outcome] of each, then "done"."""
    _say("ready")
    for line in sys.stdin:
        first, end = json.loads(line)
        for key in range(first, end):
            _say([key, put(ns, key, size, version).value])
        _say("done")


def _load(ns: kvpool.Namespace, *, n: int, size: int, deadline_ms: int) -> None:
    """For each line: loads the chain of n blocks, says [leading blocks, seconds]."""
    hashes = hash_of(ns, *range(n))
    out = [bytearray(size) for _ in range(n)]
    _say("ready")
    for _ in sys.stdin:
        began = time.monotonic()
        got = ns.get(hashes, out, deadline_ms=deadline_ms)
        took = time.monotonic() - began
        for key in range(got.n_blocks):
            check(key, out[key], size=size)
        _say([got.n_blocks, took])


def churn(ns: kvpool.Namespace, *, n_threads: int, n_keys: int, sizes: Sequence[int], seconds: float, seed: int) -> int:
    """put/get/remove/match+hold at random from many threads over the same keys; ops made. Any wrong byte is an error; calls that
    the master did not answer in time, with many more threads than cores, are one in a thousand at most."""
    end = time.monotonic() + seconds
    counts, late, errors = [0] * n_threads, [0] * n_threads, []

    def work(index: int) -> None:
        chance = random.Random(seed * 1000 + index)
        while time.monotonic() < end and not errors:
            key, what = chance.randrange(n_keys), chance.random()
            try:
                if what < 0.4:
                    put(ns, key, sizes[key % len(sizes)])
                elif what < 0.8:
                    read(ns, key, size=sizes[key % len(sizes)])
                elif what < 0.9:
                    assert set(ns.remove(hash_of(ns, key), deadline_ms=DEADLINE_MS).outcomes) <= set(RemoveOutcome)
                else:
                    hashes = hash_of(ns, key)
                    if ns.match(hashes):
                        with ns.hold(hashes, ttl_ms=1000) as hold:
                            out = bytearray(ns.block_bytes)
                            got = ns.get(hashes, [out], hold=hold)
                            if got.n_blocks:
                                check(key, memoryview(out)[: got.sizes[0]], size=sizes[key % len(sizes)])
            except MasterUnavailable:
                late[index] += 1
            except BaseException as error:
                errors.append(error)
            counts[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert sum(late) <= 1 + sum(counts) // 1000, f"{sum(late)} of {sum(counts)} calls had no answer"
    return sum(counts)


def _churn(ns: kvpool.Namespace, **settings: Any) -> None:
    sys.setswitchinterval(1e-5)
    _say("ready")
    for line in sys.stdin:
        _say(churn(ns, **(settings | json.loads(line))))


def _fork(ns: kvpool.Namespace, *, n: int, size: int) -> None:
    """Forks with a live client: the child reads (says what it was told), the parent goes on."""
    assert read(ns, 0) == 1
    pid = os.fork()
    if not pid:
        try:
            text = f"served {read(ns, 1)}"
        except KVPoolError as error:
            text = f"{type(error).__name__}: {error}"
        _say(["child", text])
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    _say(["parent", have(ns, range(n)), [put(ns, f"more{i}", size).value for i in range(10)]])


def _leave(ns: kvpool.Namespace, *, how: str) -> None:
    """Ends with a hold, a view and a put session open: by close(), by an exception, or just so."""
    hashes = hash_of(ns, 0)
    hold = ns.hold(hashes, ttl_ms=60_000)
    view = ns.view(hashes)
    session = ns.put_session(hash_of(ns, "open"))
    assert hold.n_blocks == view.n_blocks == 1 and session.n_blocks == 1
    _say("ready")
    sys.stdin.readline()
    if how == "error":
        raise RuntimeError("wanted")


def _once(ns: kvpool.Namespace, *, size: int) -> None:
    """One put and one get."""
    key = f"once-{os.getpid()}"
    outcome = put(ns, key, size)
    _say([outcome.value, str(read(ns, key))])


VERBS: dict[str, Callable[..., None]] = {
    "write": _write, "load": _load, "churn": _churn, "fork": _fork, "leave": _leave, "once": _once,
}  # fmt: skip


def main(verb: str, arguments: dict[str, Any]) -> None:
    master, name, block = (arguments.pop(key) for key in ("master", "namespace", "block_bytes"))
    settings = arguments.pop("client", {})
    client = kvpool.connect(master, **({"deadline_ms": HEAR_S * 1e3} | settings))
    try:
        VERBS[verb](keyspace(client, name, block, deadline_ms=HEAR_S * 1e3), **arguments)
    finally:
        if arguments.get("how") != "exit":
            client.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
