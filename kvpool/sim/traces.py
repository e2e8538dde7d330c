"""Traces of LLM serving: the reader of Mooncake's JSONL format, and a seeded multi-turn workload of the same shape.

Owns what a request is, what a replay notes of each, and the errors of a malformed file, each with file and line. What is
done with requests is in `kvpool.cli.drive` (a real pool) and `replay` (the core alone).

A line: {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block ids]}; equal ids mean equal whole
prefixes. Blank lines are skipped, further fields are allowed.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from kvpool.errors import InvalidArgument, KVPoolError

MAX_LINE_BYTES = 64 << 20  # a request of a million blocks is a tenth of this: longer means that the file is something else
MAX_ID = (1 << 64) - 1
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_PIECE_BYTES = 4096  # compressed bytes at once: even of nothing but zeros they make no more than 128 MiB
COUNTS = ("input_length", "output_length")


class TraceError(InvalidArgument):
    """A trace file is malformed; the message starts with file and line number."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: arrival (ms from the trace's own zero), lengths in tokens, ids of its chain of blocks from the root."""

    timestamp_ms: float
    input_length: int
    output_length: int
    ids: tuple[int, ...]


class Served(NamedTuple):
    """What a replay notes of one request: its time stamp, its blocks, and how many of them each tier served."""

    timestamp_ms: float
    n_blocks: int
    device: int = 0
    dram: int = 0
    ssd: int = 0


def read_mooncake(path: Path, *, limit: int | None = None) -> Iterator[Request]:
    """Requests of a Mooncake JSONL file in its order, at most `limit`; zstd-compressed files are recognised by their first bytes.

    Raises TraceError naming file and line for what is malformed, OSError for a file that cannot be read.
    """
    if limit == 0:
        return
    n_read = 0
    with _open(path) as lines:
        number = 0
        while True:
            number += 1
            line = _line(lines, path, number)
            if not line:
                return
            if not line.strip():
                continue
            yield parse_request(line, path=path, number=number)
            n_read += 1
            if n_read == limit:
                return


def load_mooncake(path: Path, *, limit: int | None = None) -> list[Request]:
    """All of `read_mooncake`, checked before anything is done with it; a file without requests is a TraceError."""
    requests = list(read_mooncake(path, limit=limit))
    if not requests:
        raise TraceError(f"{path}: no requests in it")
    return requests


def parse_request(line: bytes, *, path: Path, number: int) -> Request:
    """One line to a request; TraceError naming file, line and field."""

    def refuse(words: str) -> NoReturn:
        raise TraceError(f"{path}, line {number}: {words}")

    try:
        row = json.loads(line.rstrip(), parse_constant=lambda word: refuse(f"{word} is no number"))
    except UnicodeDecodeError:
        refuse("not UTF-8 text")
    except json.JSONDecodeError as error:
        refuse(f"not JSON ({error.msg}, column {error.colno})")
    except (ValueError, RecursionError) as error:
        refuse(f"not JSON ({_short(error)})")
    if not isinstance(row, dict):
        refuse(f"not a JSON object but {_kind(row)}")
    for name in ("timestamp", *COUNTS, "hash_ids"):
        if name not in row:
            refuse(f'field "{name}" is missing')
    timestamp = row["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, (int, float)):
        refuse(f'"timestamp" must be a number of ms, not {_kind(timestamp)}')
    if timestamp < 0:
        refuse(f'"timestamp" is negative ({timestamp})')
    if timestamp > MAX_ID or not math.isfinite(timestamp):
        refuse('"timestamp" is out of range')
    for name in COUNTS:
        _check_count(row[name], f'"{name}"', refuse)
    ids = row["hash_ids"]
    if not isinstance(ids, list):
        refuse(f'"hash_ids" must be a list of numbers, not {_kind(ids)}')
    for index, value in enumerate(ids):
        if type(value) is not int or not 0 <= value <= MAX_ID:  # the fast way out for the many good ones
            _check_count(value, f'"hash_ids"[{index}]', refuse)
    return Request(float(timestamp), row["input_length"], row["output_length"], tuple(ids))


def _check_count(value: object, name: str, refuse: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(f"{name} must be a whole number, not {_kind(value)}")
    elif value < 0:
        refuse(f"{name} is negative ({value})")
    elif value > MAX_ID:
        refuse(f"{name} is above 2**64 - 1")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"the number {value}"
    return "a string" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"


def _short(error: Exception) -> str:
    return str(error).split("\n")[0][:80]


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as raw:
        head = raw.read(len(ZSTD_MAGIC))
        raw.seek(0)
        if len(head) < len(ZSTD_MAGIC) and ZSTD_MAGIC.startswith(head) and (head or path.suffix == ".zst"):
            _refuse_cut(path)
        if head != ZSTD_MAGIC:
            yield raw
            return
        try:
            import zstandard
        except ImportError:
            raise KVPoolError(f"{path}: compressed with zstd; `pip install zstandard` or decompress it first") from None
        yield io.BufferedReader(_Plain(raw, path, zstandard.ZstdDecompressor()))


def _refuse_cut(path: Path) -> NoReturn:
    raise TraceError(f"{path}: cut short: the zstd data in it does not end")


class _Plain(io.RawIOBase):
    """The contents of a zstd file, frame by frame. Not zstandard's own reader: that takes a file cut short for its end."""

    def __init__(self, packed: IO[bytes], path: Path, zstd: Any) -> None:
        self._packed, self._path, self._zstd = packed, path, zstd
        self._frame: Any = None  # the one that is being decompressed
        self._rest = b""  # of what was read, behind the last frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        """As many bytes as there are, 0 at the end. Raises TraceError where the file ends within a frame, zstandard's own error
        for what is no zstd."""
        while not self._ready:
            piece = self._rest or self._packed.read(ZSTD_PIECE_BYTES)
            self._rest = b""
            if not piece:
                if self._frame is not None:
                    _refuse_cut(self._path)
                return 0
            if self._frame is None:
                self._frame = self._zstd.decompressobj()
            self._ready = memoryview(self._frame.decompress(piece))
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        n = min(len(out), len(self._ready))
        out[:n] = self._ready[:n]
        self._ready = self._ready[n:]
        return n


def _line(lines: IO[bytes], path: Path, number: int) -> bytes:
    """The next line, b"" at the end."""
    try:
        line = lines.readline(MAX_LINE_BYTES + 1)
    except (OSError, TraceError):
        raise
    except Exception as error:  # zstandard has its own classes, which exist only where it is installed
        raise TraceError(f"{path}, line {number}: cannot be decompressed ({_short(error)})") from None
    if len(line) > MAX_LINE_BYTES:
        raise TraceError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
    return line


def multi_turn(
    *, seed: int, n_conversations: int, n_turns: int, system_blocks: int, turn_blocks: tuple[int, int], block_tokens: int = 256
) -> list[Request]:
    """Interleaved conversations that share one system prompt; each turn's chain is the last one's, grown by a few blocks.

    Turns come in an order drawn from `seed`: a conversation that was just served is likely to go on, as in real traces.
    `turn_blocks`: least and most blocks that a turn adds. n_conversations * n_turns requests.
    """
    chance = random.Random(seed)
    system = tuple(range(system_blocks))
    next_id = system_blocks
    chains: dict[int, tuple[int, ...]] = {}
    left = dict.fromkeys(range(n_conversations), n_turns)
    waiting = list(left)
    requests: list[Request] = []
    while left:
        # The front of the line is favoured: recent conversations are moved there with an even chance, else to the back.
        place = min(int(chance.expovariate(0.5)), len(waiting) - 1)
        conversation = waiting.pop(place)
        n_new = chance.randint(*turn_blocks)
        chain = chains.get(conversation, system) + tuple(range(next_id, next_id + n_new))
        next_id += n_new
        chains[conversation] = chain
        requests.append(Request(1000.0 * len(requests), len(chain) * block_tokens, n_new * block_tokens // 2, chain))
        left[conversation] -= 1
        if not left[conversation]:
            del left[conversation]
        elif chance.random() < 0.5:
            waiting.insert(0, conversation)
        else:
            waiting.append(conversation)
    return requests
