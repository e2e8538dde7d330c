"""The caller's buffers: forms that are taken, and clear refusals of the others."""

from __future__ import annotations

import array
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kvpool.client.buffers import flat_source, sources, targets, total_bytes
from kvpool.errors import InvalidArgument

N, SIZE = 3, 64


def put(blocks: Any, *, n: int = N, variable: bool = False) -> list[bytes]:
    return [bytes(view) for view in sources(blocks, n_hashes=n, block_bytes=SIZE, variable=variable)]


def get(out: Any, *, n: int = N, variable: bool = False, range_bytes: int = 0) -> Any:
    return targets(out, n_hashes=n, block_bytes=SIZE, variable=variable, range_bytes=range_bytes)


def rows() -> np.ndarray[Any, Any]:
    return np.arange(N * SIZE, dtype=np.uint8).reshape(N, SIZE)


@pytest.mark.parametrize(
    "form",
    [
        rows(),
        rows().view(np.float16),
        rows().reshape(N, 4, 16),
        memoryview(rows()),
        [bytes(row) for row in rows()],
        [bytearray(row) for row in rows()],
        [memoryview(row) for row in rows()],
        tuple(rows()),
        [row.view(np.float32).reshape(4, 4) for row in rows()],
        [array.array("B", bytes(row)) for row in rows()],
    ],
    ids=lambda form: type(form).__name__,
)
def test_every_form_gives_the_same_bytes(form: Any) -> None:
    assert put(form) == [bytes(row) for row in rows()]


def test_what_is_not_contiguous_is_copied_for_a_put() -> None:
    wide = np.zeros((N, 2 * SIZE), dtype=np.uint8)
    wide[:, ::2] = rows()
    assert put(wide[:, ::2]) == [bytes(row) for row in rows()]
    assert put([memoryview(wide[i])[::2] for i in range(N)]) == [bytes(row) for row in rows()]
    assert put(rows()[::-1]) == [bytes(row) for row in rows()[::-1]]


def test_a_put_of_an_array_makes_no_copy_and_no_object_a_block() -> None:
    blocks = rows()
    views = sources(blocks, n_hashes=N, block_bytes=SIZE, variable=False)
    blocks[1, 0] = 77
    assert views[1][0] == 77
    assert not isinstance(views, list)
    assert total_bytes(views) == total_bytes(list(views)) == N * SIZE


def test_a_get_writes_into_the_callers_memory() -> None:
    for out in (np.zeros((N, SIZE), np.uint8), np.zeros((N, SIZE // 4), np.float32)):
        for index, view in enumerate(get(out)):
            view[:] = bytes([index + 1]) * SIZE
        assert [row.tobytes() for row in out] == [bytes([index + 1]) * SIZE for index in range(N)]
    buffers = [bytearray(SIZE), np.zeros(SIZE, np.uint8), memoryview(bytearray(SIZE))]
    for view in get(buffers):
        view[:] = b"x" * SIZE
    assert [bytes(one) for one in buffers] == [b"x" * SIZE] * N


def test_rows_of_a_wider_array_are_filled_in_place() -> None:
    wide = np.zeros((N, 2 * SIZE), dtype=np.uint8)
    for view in get(wide[:, :SIZE]):
        view[:] = b"y" * SIZE
    assert wide[:, :SIZE].tobytes() == b"y" * N * SIZE
    assert not wide[:, SIZE:].any()


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([b"x" * SIZE, b"x" * (SIZE - 1)], r"blocks\[1\]: 63 bytes.*64"),
        (np.zeros((2, SIZE + 1), np.uint8), r"blocks\[0\]: 65 bytes"),
        ([b""], r"blocks\[0\]: 0 bytes"),
        ([b"x" * SIZE] * 4, "blocks: 4 buffers for 3 hashes"),
        (np.zeros((4, SIZE), np.uint8), "blocks: 4 buffers for 3 hashes"),
        (b"x" * SIZE, "blocks: one flat buffer"),
        (np.zeros(SIZE, np.uint8), "blocks: one flat buffer"),
        (np.array([[object()]]), "blocks: an array of Python objects"),
        ([object()], r"blocks\[0\]: object is no buffer"),
        (7, "blocks: int is no buffer"),
        (["text"], r"blocks\[0\]: str is no buffer"),
    ],
)
def test_a_put_refuses_and_names_the_argument(blocks: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        put(blocks)


def frozen() -> np.ndarray[Any, Any]:
    out = np.zeros((N, SIZE), np.uint8)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ([bytes(SIZE)], r"out\[0\]: read-only"),
        (frozen(), "out: read-only"),
        ([frozen()[0]], r"out\[0\]: read-only"),
        (np.zeros((N, 2 * SIZE), np.uint8)[:, ::2], r"out\[0\]: not contiguous"),
        ([memoryview(bytearray(2 * SIZE))[::2]], r"out\[0\]: not contiguous"),
        (np.zeros((N, SIZE - 1), np.uint8), r"out\[0\]: 63 bytes.*64"),
        ([bytearray(SIZE), bytearray(SIZE + 1)], r"out\[1\]: 65 bytes"),
        ([bytearray(SIZE)] * 4, "out: 4 buffers for 3 hashes"),
        (bytearray(SIZE), "out: one flat buffer"),
    ],
)
def test_a_get_refuses_and_names_the_argument(out: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        get(out)


def test_variable_values() -> None:
    assert put([b"a", b"b" * SIZE], variable=True) == [b"a", b"b" * SIZE]
    with pytest.raises(InvalidArgument, match=r"blocks\[0\]: 65 bytes.*1\.\.64"):
        put([b"a" * (SIZE + 1)], variable=True)
    with pytest.raises(InvalidArgument, match=r"blocks\[0\]: 0 bytes"):
        put([b""], variable=True)
    assert [len(view) for view in get([bytearray(1), bytearray(1000)], variable=True)] == [1, 1000]
    with pytest.raises(InvalidArgument, match=r"out\[0\]: an empty buffer"):
        get([bytearray()], variable=True)


def test_byte_ranges_want_buffers_of_their_length() -> None:
    assert len(get([bytearray(10)] * 2, range_bytes=10)) == 2
    with pytest.raises(InvalidArgument, match=r"out\[1\]: 11 bytes; the byte range has 10"):
        get([bytearray(10), bytearray(11)], range_bytes=10)


def test_nothing_at_all() -> None:
    assert put([], n=0) == []
    assert put(np.zeros((0, SIZE), np.uint8)) == []
    assert len(get([])) == 0


def test_one_buffer_for_a_session() -> None:
    assert bytes(flat_source(np.arange(4, dtype=np.uint16)[::2], "data")) == np.array([0, 2], np.uint16).tobytes()


def test_tensors_are_taken_without_importing_torch_for_those_who_have_none() -> None:
    program = (
        "import sys\n"
        "from kvpool.client.buffers import sources\n"
        "class Tensor: pass\n"
        "try: sources(Tensor(), n_hashes=1, block_bytes=1, variable=False)\n"
        "except Exception as error: print(type(error).__name__, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["InvalidArgument", "False"]


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    blocks = torch.arange(N * SIZE, dtype=torch.uint8).reshape(N, SIZE)
    assert put(blocks) == [bytes(row.numpy()) for row in blocks]
    half = torch.zeros((N, SIZE // 2), dtype=torch.bfloat16)
    for view in get(half):
        view[:] = b"\x80\x3f" * (SIZE // 2)
    assert bool((half == 1).all())
    assert put(list(blocks)) == put(blocks)
    with pytest.raises(InvalidArgument, match="meta"):
        put(torch.zeros((N, SIZE), dtype=torch.uint8, device="meta"))
