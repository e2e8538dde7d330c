"""Logs of all roles: one event a line on standard error, `key=value`."""

from __future__ import annotations

import logging
import sys


def set_up(role: str, *, level: int = logging.INFO) -> None:
    """Sends everything of `level` and above to standard error, as from `role`. What was set up before ends."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"ts=%(asctime)s.%(msecs)03d level=%(levelname)s role={role} at=%(name)s %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start and end are the role's own
