"""A small network of namespaces, one a host: what runs there has another host id, and a link that can be limited. Needs root."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = itertools.count()
COMMAND_S = 20
SUBNETS = 200


class NoLan(Exception):
    """This machine lends no network namespaces."""


class Lan:
    """`near`: this process's address. `prefix(i)` starts a command on host i, `address(i)` is its address."""

    def __init__(self, n_hosts: int) -> None:
        number = next(NAMES)
        self._tag = f"kv{os.getpid() % 100_000}{number}"
        self._net = f"10.{os.getpid() % SUBNETS + 20}.{number % 250 + 1}"
        self.near = f"{self._net}.254"
        self.n_hosts = n_hosts

    def address(self, i: int) -> str:
        return f"{self._net}.{i + 1}"

    def prefix(self, i: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", f"{self._tag}h{i}")

    def make(self) -> None:
        bridge = f"{self._tag}b"
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{self.near}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for i in range(self.n_hosts):
            host, near = f"{self._tag}h{i}", f"{self._tag}v{i}"
            ip("netns", "add", host)
            ip("link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", host)
            ip("link", "set", near, "master", bridge)
            ip("link", "set", near, "up")
            ip("-n", host, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "link", "set", "lo", "up")

    def limit(self, i: int, *, megabits: int) -> None:
        """What host i sends goes at this speed."""
        run(*self.prefix(i), "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{megabits}mbit", "burst", "256kb",
            "latency", "50ms")  # fmt: skip

    def end(self) -> None:
        for i in range(self.n_hosts):
            with contextlib.suppress(NoLan):
                ip("netns", "del", f"{self._tag}h{i}")
            with contextlib.suppress(NoLan):
                ip("link", "del", f"{self._tag}v{i}")
        with contextlib.suppress(NoLan):
            ip("link", "del", f"{self._tag}b")


@contextmanager
def lan(n_hosts: int) -> Iterator[Lan]:
    """Raises NoLan where none can be made. What was started in it must have ended before it does."""
    network = Lan(n_hosts)
    try:
        network.make()
        yield network
    finally:
        network.end()


def ip(*words: str) -> None:
    run("ip", *words)


def run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoLan(f"{' '.join(command)}: {getattr(error, 'stderr', '') or error}") from error
