"""What all commands share: one-line errors and exit statuses, JSON output, the options that name a pool.

Exit status: 0, 1 (failed), 2 (usage: a wrong option or setting). With --json a failure is one JSON object too: {"error": {...}}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from kvpool import quantities
from kvpool.errors import ConfigError, InvalidArgument, KVPoolError

EXIT_FAILED = 1
EXIT_USAGE = 2
_UsageError: Any = typer.BadParameter.__base__  # of a missing argument too; typer itself exports only this child

JsonOption = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on standard output.")]
MasterOption = Annotated[
    str | None, typer.Option("--master", metavar="HOST:PORT", help="The pool's master [KVPOOL_MASTER, else 127.0.0.1:7400].")
]
TokenFileOption = Annotated[Path | None, typer.Option("--token-file", metavar="FILE", help="File with the pool's shared token.")]
DeadlineOption = Annotated[str, typer.Option("--deadline", metavar="TIME", help="Give up after this time, e.g. 5s or 500ms.")]


class PoolGroup(TyperGroup):
    """Turns what a user can cause into one line on standard error (usage: a few) and an exit status; never a traceback."""

    def make_context(self, *args: Any, **settings: Any) -> Any:
        with _usage_said():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _usage_said():
                return super().invoke(ctx)
        except KVPoolError as error:
            fail(error, as_json=_asked_for_json())
        except BrokenPipeError:
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  the reader has gone: nothing more to say, and nothing to flush
            raise typer.Exit(EXIT_FAILED) from None
        except OSError as error:
            fail(KVPoolError(os_words(error)), as_json=_asked_for_json())
        except KeyboardInterrupt:
            print("kvpool: interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_FAILED) from None


@contextmanager
def _usage_said() -> Iterator[None]:
    """An unknown option, a missing argument and the like: said, with --json as an object as well, and status 2."""
    try:
        yield
    except _UsageError as error:
        error.show()
        if _asked_for_json():
            print_error(InvalidArgument(error.format_message()))
        raise typer.Exit(error.exit_code) from None


def _asked_for_json() -> bool:
    return "--json" in sys.argv[1:]


def os_words(error: OSError) -> str:
    """The file, where one is known, and what is wrong with it."""
    words = error.strerror or str(error)
    return f"{error.filename}: {words}" if error.filename else words


def fail(error: KVPoolError, *, as_json: bool) -> NoReturn:
    """Print the error (one line; with --json an object as well) and end with status 1, or 2 for a wrong setting."""
    print(f"kvpool: error: {_line_of(error)}", file=sys.stderr)
    if as_json:
        print_error(error)
    raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED)


def print_error(error: KVPoolError) -> None:
    """The object of a failure with --json."""
    print_json({"error": {"code": error.code, "message": _line_of(error)}})


def _line_of(error: KVPoolError) -> str:
    return " ".join(str(error).split())


def print_json(value: dict[str, Any]) -> None:
    """One JSON object, one line."""
    print(json.dumps(value), flush=True)


def table(title: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Columns for people: as wide as what is in them."""
    lines = [[str(cell) for cell in row] for row in rows]
    if not lines:
        print(empty)
        return
    widths = [max(len(line[i]) for line in [list(title), *lines]) for i in range(len(title))]
    for line in [list(title), *lines]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def parse_size(text: str, *, option: str) -> int:
    """ "512MiB" or plain bytes -> bytes, 1 or more. Raises ConfigError naming the option."""
    return _positive(quantities.parse_size, text, option)


def parse_time_ms(text: str, *, option: str) -> int:
    """ "30s", "500ms" -> ms, 1 or more. Raises ConfigError naming the option."""
    return _positive(quantities.parse_time_ms, text, option)


def _positive(parse: Callable[[object], int], text: str, option: str) -> int:
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {text!r}: {error}") from None
    if value < 1:
        raise ConfigError(f"{option}: {text!r} must be above 0")
    return value


@contextmanager
def usage(**options: str) -> Iterator[None]:
    """What the library finds wrong in the argument of this name is wrong in this option of the command."""
    try:
        yield
    except InvalidArgument as error:
        name, colon, rest = str(error).partition(":")
        raise ConfigError(f"{options.get(name, name)}{colon}{rest}") from None


def format_bytes(n: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" or n == int(n) else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def client_settings(master: str | None, token_file: Path | None) -> Any:
    """ClientSettings of environment and flags."""
    from kvpool import config

    return config.load("client", flags={"master": master, "token_file": None if token_file is None else str(token_file)})


def token_of(settings: Any) -> str:
    """The token that the settings name; "" without one. Raises ConfigError naming the setting, or the option, and the file."""
    from kvpool import config

    if not settings.token_file:
        return str(settings.token)
    name = "--token-file" if config.sources(settings)["token_file"].startswith("argument") else "token_file"
    try:
        token = Path(settings.token_file).read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        token = ""
    except OSError as error:
        raise ConfigError(f"{name}: {os_words(error)}") from None
    if not token or not token.isprintable():
        raise ConfigError(f"{name}: {settings.token_file} must hold one line of printable characters")
    return token


def raise_on_stops() -> None:
    """SIGTERM and SIGINT end long commands as Ctrl-C does, so that what they started is stopped; SIGINT also where it was ignored
    at the start, as in the background jobs of a script. Main thread only."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
