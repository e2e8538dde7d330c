"""The `kvpool` command, also as `python -m kvpool.cli`."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while everything is loaded ends it without a traceback

from kvpool.cli.main import app


def run() -> None:
    """Parses the command line, does what it says and exits."""
    app(prog_name="kvpool")


if __name__ == "__main__":
    run()
