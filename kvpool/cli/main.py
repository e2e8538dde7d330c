"""The `kvpool` command: its groups put together. What each command does is in the group's own module.

Command modules import the weight (grpc, numpy, rich) inside their functions, so that `kvpool --help` is quick.
"""

from __future__ import annotations

import logging
import signal
from typing import Annotated

import typer

from kvpool.cli import blocks, config_cmd, demo, drain, ns, pins, replay, roles, sim, status, up
from kvpool.cli.common import PoolGroup
from kvpool.obs import logs

app = typer.Typer(
    name="kvpool",
    cls=PoolGroup,
    help="A tiered pool for LLM KV cache: blocks put by one inference node are got by any other, from DRAM and SSD.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"kvpool {version('kvpool')}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    del version
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # (until here: see `__main__`)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    logs.set_up(context.invoked_subcommand or "cli", level=logging.WARNING)  # a role sets up its own


app.command("up")(up.up)
app.command("master")(roles.master)
app.command("worker")(roles.worker)
app.command("demo")(demo.demo)
app.command("replay")(replay.replay)
app.command("sim")(sim.sim)
app.command("status")(status.status)
app.add_typer(ns.app, name="ns")
app.command("ls")(blocks.ls)
app.command("rm")(blocks.rm)
app.add_typer(pins.app, name="pin")
app.command("drain")(drain.drain)
app.add_typer(config_cmd.app, name="config")
