"""`python -m kvpool.cli` is the `kvpool` command."""

from kvpool.cli.main import app

if __name__ == "__main__":
    app(prog_name="kvpool")
