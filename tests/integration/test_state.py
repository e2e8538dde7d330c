"""Worker state: survives restarts and kills, is set aside when damaged, grows, is used by one process only."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.core.hashing import HashKind
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import NamespaceUid
from kvpool.errors import ConfigError, KVPoolError
from kvpool.worker.state import WorkerState
from kvpool.worker.tiers.base import TierError, Trouble
from tests.support.scale import scaled

Opener = Callable[..., WorkerState]


def spec(i: int, *, name: str | None = None) -> NamespaceSpec:
    uid = NamespaceUid(i.to_bytes(16, "big"))
    layout = KVLayout.opaque(block_bytes=4096 + i)
    return NamespaceSpec.of(name or f"ns-{i}", layout, uid=uid, salt=bytes([i % 256, 0, 255]), hash=HashKind.EXTERNAL, replicas=2)


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """opener(...) closes the state opened before and opens the directory again, as a restart would."""
    opened: list[WorkerState] = []

    def open_again(**settings: int) -> WorkerState:
        for state in opened:
            state.close()
        opened.append(WorkerState(tmp_path / "data", **settings))
        return opened[-1]

    yield open_again
    for state in opened:
        state.close()


def data_file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "index" / "data.mdb"


def fill(state: WorkerState, n: int = 50) -> None:
    for i in range(n):
        state.put_namespace(spec(i))
        state.set_applied_seq(spec(i).uid, i * 7)


def holds_all(state: WorkerState, n: int = 50) -> bool:
    return state.namespaces() == [spec(i) for i in range(n)] and all(state.applied_seq(spec(i).uid) == i * 7 for i in range(n))


def test_everything_is_there_after_a_restart(opener: Opener) -> None:
    state = opener()
    fill(state)
    state.forget_namespace(spec(3).uid)
    state.put_namespace(spec(4, name="renamed"))
    worker_id = state.worker_id
    state = opener()
    assert state.worker_id == worker_id and len(worker_id) == 32
    assert state.namespaces() == [spec(i, name="renamed" if i == 4 else None) for i in range(50) if i != 3]
    assert state.applied_seq(spec(5).uid) == 35 and state.applied_seq(spec(0).uid) == 0
    assert state.applied_seq(spec(3).uid) is None and state.applied_seq(spec(99).uid) is None
    assert not state.counters


def test_two_directories_have_two_ids(tmp_path: Path) -> None:
    first, second = WorkerState(tmp_path / "a"), WorkerState(tmp_path / "b")
    assert first.worker_id != second.worker_id
    first.close()
    second.close()


def test_what_was_written_survives_kill_9(opener: Opener, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom kvpool.worker.state import WorkerState\n"
        "from tests.integration.test_state import fill\n"
        "state = WorkerState(Path(sys.argv[1]))\nfill(state)\nprint(state.worker_id, flush=True)\nsys.stdin.read()"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as child:
        assert child.stdout is not None
        worker_id = child.stdout.readline().decode().strip()
        with pytest.raises(ConfigError, match=rf"in use.*{child.pid}"):
            opener()
        child.send_signal(signal.SIGKILL)
    state = opener()
    assert state.worker_id == worker_id and holds_all(state)


# -- damage ------------------------------------------------------------------------------------------------------------


def _write(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def _to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _to_symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hosts")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: os.truncate(path, 0),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one page short": lambda path: os.truncate(path, path.stat().st_size - 4096),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "half a meta page": lambda path: os.truncate(path, 2048),
    "one meta page": lambda path: os.truncate(path, 4096),
    "text": _write(b"this is no database\n" * 1000),
    "pickle": _write(b"cposix\nsystem\n(S'touch pwned'\ntR."),
    "directory": _to_directory,
    "symlink": _to_symlink,
    "noise": lambda path: path.write_bytes(random.Random(1).randbytes(path.stat().st_size)) and None,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_index_is_set_aside_and_the_worker_keeps_its_id(opener: Opener, tmp_path: Path, how: str) -> None:
    state = opener()
    fill(state)
    worker_id = state.worker_id
    state.close()
    DAMAGE[how](data_file(tmp_path))
    state = opener()
    assert state.worker_id == worker_id
    assert state.counters["set_aside"] == 1 and (tmp_path / "data" / "index.bad").is_dir()
    assert state.namespaces() == [] and state.applied_seq(spec(1).uid) is None
    fill(state)
    state = opener()
    assert holds_all(state) and not state.counters
    assert not (tmp_path / "pwned").exists() and not Path("pwned").exists()


# (in the run of the first seed a flip in the tree's inner page left every entry readable, and the next ones in two places)
@pytest.mark.parametrize(
    ("seed", "rounds"), [(1281244254, 25), (random.randrange(1 << 32), scaled(10, 25))], ids=["known", "new"]
)
def test_flipped_bits_never_kill_the_worker_and_never_change_a_spec(
    opener: Opener, tmp_path: Path, seed: int, rounds: int
) -> None:
    chance = random.Random(seed)
    fill(opener())
    opener().close()
    good = data_file(tmp_path).read_bytes()
    lost = 0
    for _ in range(rounds):
        raw = bytearray(good)
        for _ in range(chance.choice((1, 20))):
            raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        data_file(tmp_path).write_bytes(raw)
        state = opener()
        found = state.namespaces()
        assert found in ([], [spec(i) for i in range(50)]), seed
        assert all(state.applied_seq(spec(i).uid) in ((None, i * 7) if found else (None,)) for i in range(50)), seed
        lost += not found
        fill(state)
        assert holds_all(state), seed
        state.close()
    assert lost, "no flip did any harm: the test is blind"


def test_a_deleted_index_or_lock_file_starts_empty(opener: Opener, tmp_path: Path) -> None:
    fill(opener())
    opener().close()
    data_file(tmp_path).unlink()
    assert opener().namespaces() == []
    opener().close()
    data_file(tmp_path).with_name("lock.mdb").write_bytes(b"garbage" * 1000)
    assert opener().namespaces() == []


@pytest.mark.parametrize("text", [b"", b"../../etc", b"\xff\xfe", b"x" * 32])
def test_a_damaged_id_is_made_anew(opener: Opener, tmp_path: Path, text: bytes) -> None:
    worker_id = opener().worker_id
    (tmp_path / "data" / "id").write_bytes(text)
    state = opener()
    assert state.worker_id != worker_id and len(state.worker_id) == 32 and state.counters["bad_id"] <= 1
    assert opener().worker_id == state.worker_id


# -- growth ------------------------------------------------------------------------------------------------------------


def test_a_full_map_grows(opener: Opener) -> None:
    state = opener(map_bytes=64 << 10)
    fill(state, 600)
    assert state.counters["grown"] >= 2
    assert holds_all(opener(map_bytes=64 << 10), 600)  # a map smaller than the file is no problem either


def test_a_map_that_may_not_grow_is_a_typed_error_and_reads_go_on(opener: Opener) -> None:
    state = opener(map_bytes=64 << 10, map_bytes_max=64 << 10)
    with pytest.raises(TierError) as caught:
        fill(state, 600)
    assert caught.value.trouble is Trouble.FULL
    kept = state.namespaces()
    assert kept and kept == [spec(i) for i in range(len(kept))]
    for known in kept[1:]:
        state.forget_namespace(known.uid)
    state.put_namespace(spec(1000))  # freed pages are used again
    assert state.namespaces() == [spec(0), spec(1000)]


# -- one process, once -------------------------------------------------------------------------------------------------


def test_a_second_open_in_this_process_is_refused_and_the_first_goes_on(opener: Opener, tmp_path: Path) -> None:
    state = opener()
    fill(state)
    with pytest.raises(ConfigError, match=rf"data_dir.*in use.*{os.getpid()}"):
        WorkerState(tmp_path / "data")
    assert holds_all(state)


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(opener: Opener) -> None:
    state = opener()
    fill(state)
    child = os.fork()
    if child == 0:
        try:
            state.namespaces()
        except KVPoolError:
            state.close()
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert holds_all(state)
    state.put_namespace(spec(77))
    assert len(opener().namespaces()) == 51


def test_use_after_close_is_an_error(opener: Opener) -> None:
    state = opener()
    state.close()
    state.close()
    with pytest.raises(KVPoolError, match="closed"):
        state.namespaces()


def test_threads_may_write_and_read_at_once(opener: Opener) -> None:
    state = opener(map_bytes=64 << 10)
    wrong: list[BaseException] = []

    def work(lane: int) -> None:
        try:
            for i in range(lane, 200, 4):
                state.put_namespace(spec(i))
                state.set_applied_seq(spec(i).uid, i * 7)
                assert spec(i) in state.namespaces()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and holds_all(state, 200)


def test_unusable_directories_are_config_errors_that_name_them(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for directory in (file, file / "below"):
        with pytest.raises(ConfigError, match=f"data_dir.*{directory}"):
            WorkerState(directory)


def test_opening_takes_no_long_time(opener: Opener) -> None:
    fill(opener())
    started = time.perf_counter()
    opener()
    assert time.perf_counter() - started < 2  # 0.03 s: most of it is the checking child
