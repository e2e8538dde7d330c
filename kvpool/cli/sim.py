"""`kvpool sim`: the whole pool in one process, from seeds, judged against its promises."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.errors import ConfigError


def sim(
    seeds: Annotated[int | None, typer.Option("--seeds", metavar="N", min=1, help="Seeds 0..N-1.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="S", min=0, help="This one, exactly as it was.")] = None,
) -> None:
    """Simulate pools under faults and judge every answer.

    Masters, workers, clients, network and disks in one process, from one seed each. Exit status 1 when a promise was broken; the
    seed, the command that replays it and the story of the block are printed.
    """
    try:
        from kvpool.sim.run import jobs_for, main, print_out
    except ImportError as error:
        if error.name != "greenlet":
            raise
        raise ConfigError("the simulation needs greenlet: pip install 'kvpool[sim]'") from None
    if (seeds is None) == (seed is None):
        raise ConfigError("give either --seeds N or --seed S")
    which = range(seeds) if seeds is not None else range(seed or 0, (seed or 0) + 1)
    raise typer.Exit(main(which, say=print_out, jobs=jobs_for(which)))
