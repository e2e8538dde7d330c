"""`kvpool config`: what a role's settings come to, and whether a file is right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli.common import JsonOption, PoolGroup, print_json, table
from kvpool.errors import ConfigError

app = typer.Typer(cls=PoolGroup, no_args_is_help=True, rich_markup_mode=None, help="Settings: what counts, and from where.")


@app.command("show")
def show(
    role: Annotated[str, typer.Argument(metavar="ROLE", help="master, worker, client or up.")],
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file with a table for each role.")] = None,
    json: JsonOption = False,
) -> None:
    """Every setting of a role as it counts, with where it came from: default, file or environment variable."""
    from kvpool import config as configuration

    settings = _load(role, config)
    values, sources = configuration.effective(settings), configuration.sources(settings)
    if json:
        print_json({"role": role, "settings": values, "sources": sources})
        return
    fields = type(settings).model_fields
    rows = [
        (name, value if value != "" else '""', sources[name], fields[name].description or "") for name, value in values.items()
    ]
    table(("SETTING", "VALUE", "FROM", "MEANING"), rows, empty="")


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML file with a table for each role.")],
    json: JsonOption = False,
) -> None:
    """Check a file (and this environment) for every role; exit status 2 naming what is wrong."""
    from kvpool import config as configuration

    for role in configuration.Role:
        _load(role.value, file)
    if json:
        print_json({"file": str(file), "ok": True})
    else:
        print(f"{file}: good")


def _load(role: str, config: Path | None) -> Any:
    from kvpool import config as configuration

    try:
        known = configuration.Role(role)
    except ValueError:
        raise ConfigError(f"role: {role!r} is not one of {', '.join(configuration.Role)}") from None
    return configuration.load(known, file=config)
