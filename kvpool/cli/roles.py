"""`kvpool master` and `kvpool worker`: flags to settings, then the role's own `run`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kvpool.cli.common import JsonOption, print_error
from kvpool.errors import KVPoolError

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file with a table for each role.")]
Host = Annotated[str | None, typer.Option("--host", metavar="HOST", help="Address to bind [127.0.0.1].")]
Advertise = Annotated[str | None, typer.Option("--advertise", metavar="HOST", help="Address that others reach it by.")]
Port = Annotated[int | None, typer.Option("--port", metavar="P", help="Port; 0: any free one.")]
HttpPort = Annotated[int | None, typer.Option("--http-port", metavar="P", help="Port of metrics and health; 0: any free one.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", metavar="FILE", help="File with the shared token.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow another address than 127.0.0.1 without a token.")]
DrainTimeout = Annotated[str | None, typer.Option("--drain-timeout", metavar="TIME", help="How long a stop may take [10s].")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", metavar="D", help="Directory of what outlives the process.")]
MasterAddress = Annotated[str | None, typer.Option("--master", metavar="HOST:PORT", help="The master [KVPOOL_MASTER].")]
Store = Annotated[str | None, typer.Option("--store", metavar="URL", help="Its state's home [LMDB in the data directory].")]
EvictionPolicy = Annotated[
    str | None, typer.Option("--policy", metavar="P", help="What leaves next: hazard (learned), lru, arc, lru2 or s3fifo.")
]
ParentPid = Annotated[int | None, typer.Option("--parent-pid", hidden=True, help="End when this process, the parent, does.")]


def given(**flags: Any) -> dict[str, Any]:
    """The flags that were given; paths as text."""
    words = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    return {name: value for name, value in words.items() if value is not None and value is not False}


def start_with(parent_pid: int | None) -> None:
    """Tie this process to its parent's life, before anything heavy is loaded. numpy makes no threads: it would make one for each
    core of the machine, with memory of its own, for algebra that no role does. What is odd in the environment, which it has from
    its parent, the parent has said."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if parent_pid is not None:
        from kvpool.obs.process import die_with_parent

        logging.getLogger("kvpool.config").setLevel(logging.ERROR)
        die_with_parent(parent_pid)


def end_with(status: int) -> NoReturn:
    """The end of a role that has given everything back, and said all that it had to say. Not the interpreter's own: that frees
    module by module, for a fifth of a second."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # (nobody listens any more)
            stream.flush()
    os._exit(status)


def failed_start(role: str, *, as_json: bool) -> Callable[[KVPoolError], None]:
    """What says why a role cannot start: on standard error, with --json as an object as well."""

    def say(error: KVPoolError) -> None:
        print(f"kvpool {role}: {error}", file=sys.stderr)
        if as_json:
            print_error(error)

    return say


def master(
    config: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    http_port: HttpPort = None,
    data_dir: DataDir = None,
    store: Store = None,
    advertise: Advertise = None,
    token_file: TokenFile = None,
    insecure: Insecure = False,
    drain_timeout: DrainTimeout = None,
    json: JsonOption = False,
    parent_pid: ParentPid = None,
) -> None:
    """Run one master until SIGINT or SIGTERM. Prints one line of JSON when it is ready, with or without --json."""
    start_with(parent_pid)
    from kvpool import config as configuration

    flags = given(
        host=host,
        port=port,
        http_port=http_port,
        data_dir=data_dir,
        store=store,
        advertise=advertise,
        token_file=token_file,
        insecure=insecure,
        drain_timeout_ms=drain_timeout,
    )
    settings = configuration.load("master", file=config, flags=flags)
    from kvpool.master import server

    end_with(server.run(settings, parent_pid=parent_pid, say=failed_start("master", as_json=json)))


def worker(
    master: MasterAddress = None,
    dram: Annotated[str | None, typer.Option("--dram", metavar="SIZE", help="Memory lent to the pool, e.g. 8GiB.")] = None,
    ssd: Annotated[str | None, typer.Option("--ssd", metavar="DIR:SIZE", help="Directory and bytes lent to the pool.")] = None,
    policy: EvictionPolicy = None,
    config: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    http_port: HttpPort = None,
    data_dir: DataDir = None,
    advertise: Advertise = None,
    token_file: TokenFile = None,
    insecure: Insecure = False,
    drain_timeout: DrainTimeout = None,
    json: JsonOption = False,
    parent_pid: ParentPid = None,
) -> None:
    """Run one worker until SIGINT or SIGTERM. Prints one line of JSON when it is ready, with or without --json."""
    start_with(parent_pid)
    from kvpool import config as configuration

    flags = given(
        master=master,
        dram=dram,
        ssd=ssd,
        policy=policy,
        host=host,
        port=port,
        http_port=http_port,
        data_dir=data_dir,
        advertise=advertise,
        token_file=token_file,
        insecure=insecure,
        drain_timeout_ms=drain_timeout,
    )
    settings = configuration.load("worker", file=config, flags=flags)
    from kvpool.worker import server

    end_with(server.run(settings, parent_pid=parent_pid, say=failed_start("worker", as_json=json)))
