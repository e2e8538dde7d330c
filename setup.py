"""Builds kvpool: what is to be said of it is in pyproject.toml. Here the worker's table of blocks and its eviction policies are
compiled with mypyc where that is possible. Uncompiled the table does the same in twice the time,
the policies in four times.

KVPOOL_COMPILE in the environment: 0: they are not compiled; 1: it is an error if they cannot be. Unset: where mypyc, a C compiler
and Python's headers are, but not for an editable install, where a compiled module would go on as it was when its source changes.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LEARNED = "classes hazard hazard_runs hazard_tier history lifetable queues rival runs"
POLICIES = f"admission eviction lines queued queued_tier {LEARNED}"
TABLE = "block blocks copies gone holding holds keeping keys movement pins quota retention room slots"
COMPILED = [f"kvpool/core/{name}.py" for name in TABLE.split()] + [f"kvpool/core/policy/{name}.py" for name in POLICIES.split()]
# No configuration of mypy's: its plugins are not where pip builds, nor are kvpool's dependencies. What is not there is Any.
OPTIONS = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
WANTED = os.environ.get("KVPOOL_COMPILE", "")
BUILDS = {"bdist_wheel", "build", "build_ext", "install"} | ({"develop", "editable_wheel"} if WANTED == "1" else set())


def left_out(error: BaseException) -> None:
    """Says so; raises the error when they must be compiled."""
    if WANTED == "1":
        raise error
    sys.stderr.write(f"kvpool: the worker's table and its policies are not compiled, so they are slower: {error}\n")


def extensions() -> list[Extension]:
    """Empty: they stay Python. (The same when setup.py is only asked for metadata: mypyc takes a minute.)"""
    if WANTED == "0" or not BUILDS & set(sys.argv):
        return []
    try:
        from mypyc.build import mypycify

        if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
            raise OSError("Python.h is missing")
        made: list[Extension] = mypycify([*OPTIONS, *COMPILED], group_name="kvpool")
        return made
    except SystemExit:  # (it has said why)
        left_out(RuntimeError("mypyc found errors"))
    except Exception as error:  # (whatever it is, they work without)
        left_out(error)
    return []


class AllOrNone(build_ext):
    """A module that is compiled is nothing without the library that they all share."""

    def run(self) -> None:
        for path in Path(self.build_lib).rglob("*.so"):  # (of an earlier build, of which a module may be compiled no more)
            path.unlink()
        try:
            super().run()
        except Exception as error:  # (what compilers raise has no common class)
            left_out(error)
            for path in self.get_outputs():
                Path(path).unlink(missing_ok=True)
            self.extensions = []


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": AllOrNone},
    setup_requires=[] if WANTED == "0" else ["mypy>=2.4,<2.5"],  # (its mypyc; pip fetches it where it builds)
)
