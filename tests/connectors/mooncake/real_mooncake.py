"""Runs a command against a real Mooncake master and holder: `python real_mooncake.py COMMAND...`.

In a network namespace of its own, for Mooncake listens on all interfaces. In COMMAND, MASTER and HOST stand for where they are.
Exit status as the command's. Needs only the standard library and Mooncake.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import mooncake.store

HOST, PORT, WAIT_S = "127.0.0.1", 50051, 30.0


def wait_for_port(port: int) -> None:
    end = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return
        assert time.monotonic() < end, f"nothing listens on {port}"
        threading.Event().wait(0.05)


def hold(size: int) -> None:
    """A process that lends memory, until its standard input ends."""
    store = mooncake.store.MooncakeDistributedStore()
    assert store.setup(HOST, "P2PHANDSHAKE", size, 32 << 20, "tcp", "", f"{HOST}:{PORT}") == 0
    sys.stdout.write("holding\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


def main(command: list[str]) -> int:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    master_program = Path(mooncake.store.__file__).with_name("mooncake_master")
    master = subprocess.Popen([str(master_program), f"--rpc_address={HOST}", f"--rpc_port={PORT}", f"--metrics_host={HOST}"],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        wait_for_port(PORT)
        holder = subprocess.Popen([sys.executable, __file__, "--hold", str(256 << 20)], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            assert holder.stdout is not None
            assert any(b"holding" in line for line in holder.stdout)
            filled = [word.replace("MASTER", f"{HOST}:{PORT}").replace("HOST", HOST) for word in command]
            return subprocess.run(filled, check=False).returncode
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
    finally:
        master.send_signal(signal.SIGKILL)
        master.wait()


if __name__ == "__main__":
    if sys.argv[1] == "--hold":
        hold(int(sys.argv[2]))
    sys.exit(main(sys.argv[1:]))
