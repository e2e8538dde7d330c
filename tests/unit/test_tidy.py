"""Reads the source: imports point down, core is pure, nothing unpickles, no test sleeps, generated code has the protos' names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvpool"

# Higher may import lower, never its own rank's neighbours. What is right under kvpool/ (errors, config) is below all.
RANKS = {
    "cli": 5,
    "sim": 4,  # a whole pool in one process: it runs what masters and workers run
    "master": 3,
    "worker": 3,
    "connectors": 3,
    "client": 2,
    "transport": 1,
    "obs": 1,
    "core": 0,
    "v1": -1,
}
FACES = {"kvpool/__init__.py", "kvpool/aio.py"}  # the public names: they name what is above them
SHARED_MODULES = {"kvpool.master.wire"}  # namespaces between proto and spec: core and v1 only, for master, workers and clients
CORE_MAY_IMPORT = {"numpy", "xxhash", "librt.vecs", "mypy_extensions", "kvpool.core", "kvpool.errors"}
IMPURE = {
    "time", "datetime", "socket", "select", "selectors", "threading", "_thread", "queue", "asyncio", "concurrent",
    "multiprocessing",
    "os", "pathlib", "io", "tempfile", "shutil", "subprocess", "signal", "logging", "secrets", "uuid", "mmap", "sched",
}  # fmt: skip
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "torch.load", "os.fork", "os.system"}


def sources(*directories: Path) -> list[Path]:
    return sorted(
        path
        for directory in directories
        for path in directory.rglob("*.py")
        if "__pycache__" not in path.parts and not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    )


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports (`from a import b` as a.b), with their lines."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def calls_of(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Dotted names that a file calls."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def room_of(name: str) -> str:
    """kvpool.core.keys -> core; "" for what is right under kvpool."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in RANKS else ""


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_log_line_of_a_role_names_its_event() -> None:
    """Not the connectors': their lines stand in the logs of the engines that they serve."""
    wrong = []
    for path in sources(*(PACKAGE / room for room in ("cli", "sim", "master", "worker", "client", "transport", "obs"))):
        for name, call in calls_of(path):
            if re.fullmatch(r"(\w+\.)?log\.(debug|info|warning|error|exception|critical|log)", name):
                text = call.args[name.endswith(".log")]
                if not (isinstance(text, ast.Constant) and str(text.value).startswith("event=")):
                    wrong.append(f"{where(path, call.lineno)}: {ast.unparse(text)}")
    assert not wrong, "\n".join(wrong)


def test_imports_point_down() -> None:
    wrong = []
    for path in sources(PACKAGE):
        relative = path.relative_to(ROOT)
        if str(relative) in FACES:
            continue
        own = relative.parts[1] if len(relative.parts) > 2 else ""
        for name, line in imports_of(path):
            room = room_of(name)
            if not name.startswith("kvpool.") or not room or room == own or any(name.startswith(m) for m in SHARED_MODULES):
                continue
            if RANKS[room] >= RANKS.get(own, -1):
                wrong.append(f"{where(path, line)}: {own or 'kvpool'} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_core_imports_the_standard_library_and_little_else() -> None:
    wrong = [
        f"{where(path, line)}: {name}"
        for path in sources(PACKAGE / "core")
        for name, line in imports_of(path)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == m or name.startswith(m + ".") for m in CORE_MAY_IMPORT)
    ]
    assert not wrong, "\n".join(wrong)


def test_core_is_pure() -> None:
    wrong = []
    for path in sources(PACKAGE / "core"):
        for name, line in imports_of(path):
            if name.split(".")[0] in IMPURE:
                wrong.append(f"{where(path, line)}: imports {name}")
        for name, call in calls_of(path):
            seeded = name == "random.Random" and call.args
            if name in ("open", "print", "input") or (name.startswith(("random.", "np.random.", "numpy.random.")) and not seeded):
                wrong.append(f"{where(path, call.lineno)}: calls {name}")
    assert not wrong, "\n".join(wrong)


def test_nothing_can_run_what_it_reads() -> None:
    wrong = []
    for path in sources(PACKAGE, ROOT / "clients"):
        wrong += [f"{where(path, n)}: imports {name}" for name, n in imports_of(path) if name.split(".")[0] in UNSAFE_MODULES]
        for name, call in calls_of(path):
            keywords = {k.arg: ast.unparse(k.value) for k in call.keywords}
            if name in UNSAFE_CALLS or keywords.get("allow_pickle") == "True" or keywords.get("shell") == "True":
                wrong.append(f"{where(path, call.lineno)}: calls {name}")
    assert not wrong, "\n".join(wrong)


def test_tests_do_not_sleep() -> None:
    wrong = []
    for path in sources(ROOT / "tests"):
        if path == ROOT / "tests" / "support" / "waiting.py":
            continue
        for name, call in calls_of(path):
            yields = name == "asyncio.sleep" and len(call.args) == 1 and ast.unparse(call.args[0]) == "0"
            if name.rpartition(".")[2] == "sleep" and not yields:
                wrong.append(f"{where(path, call.lineno)}: {name}")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sources(PACKAGE, ROOT / "tests", ROOT / "clients")
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree_of(path))
    ]
    assert not silent, silent


def test_product_text_names_no_place_of_a_build_machine() -> None:
    files = [*sources(PACKAGE, ROOT / "clients"), ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    place = re.compile(r"(?<![\w.])(/work/|/root/|\.\./shared|/home/\w)")
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]}" for path in files if (found := place.search(path.read_text(encoding="utf-8")))
    ]
    assert not wrong, wrong


def test_generated_code_has_what_the_protos_say() -> None:
    """Names, numbers and calls; `make check` compares the whole text with what the generators make."""
    from kvpool.v1 import master_pb2

    text = re.sub(r"//.*", "", (ROOT / "protos/kvpool/v1/master.proto").read_text(encoding="utf-8"))
    blocks = re.findall(r"^(message|service) (\w+) \{(\}|.*?^\})", text, re.MULTILINE | re.DOTALL)
    messages = {name: body for kind, name, body in blocks if kind == "message"}
    described = master_pb2.DESCRIPTOR.message_types_by_name
    assert set(messages) == set(described)
    for name, body in messages.items():
        declared = {(field, int(number)) for field, number in re.findall(r"(\w+) = (\d+);", body)}
        assert declared == {(field.name, field.number) for field in described[name].fields}, name
    calls = {call for kind, _, body in blocks if kind == "service" for call in re.findall(r"rpc (\w+)\(", body)}
    assert calls == set(master_pb2.DESCRIPTOR.services_by_name["Master"].methods_by_name)


def test_no_compiled_module_is_older_than_its_source() -> None:
    """Python takes the compiled one, so an edit would change nothing: build again with KVPOOL_COMPILE=1, or delete it."""
    compiled = [(path, path.with_name(path.name.split(".")[0] + ".py")) for path in PACKAGE.rglob("*.so")]
    assert not [path.name for path, source in compiled if not source.exists() or path.stat().st_mtime < source.stat().st_mtime]


def test_each_dependency_is_named_in_the_readme() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [re.split(r"[<>=\[;~! ]", wanted)[0] for wanted in project["dependencies"]]
    assert names
    assert not [name for name in names if f"`{name}`" not in readme]


@pytest.mark.parametrize("heavy", ["torch", "lmdb", "redis", "grpc", "pydantic", "typer", "rich"])
def test_importing_kvpool_is_light(heavy: str) -> None:
    code = f"import kvpool, sys; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_importing_kvpool_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import kvpool; print(time.perf_counter() - t)"
    spent_s = [
        float(subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    assert min(spent_s) < 0.150
