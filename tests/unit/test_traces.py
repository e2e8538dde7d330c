"""Traces: what is read, what is refused and how it is named, and that the generated workload is one of shared prefixes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool.sim.traces import MAX_LINE_BYTES, Request, TraceError, load_mooncake, multi_turn, read_mooncake

GOOD = {"timestamp": 0, "input_length": 10, "output_length": 3, "hash_ids": [0, 1, 2**64 - 1]}


def write(path: Path, *lines: object) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def test_reads_requests_in_order_skipping_blank_lines_and_unknown_fields(tmp_path: Path) -> None:
    later = {**GOOD, "timestamp": 12.5, "hash_ids": [], "session": "x"}
    trace = write(tmp_path / "t.jsonl", GOOD, "", "  ", later)
    assert load_mooncake(trace) == [Request(0.0, 10, 3, (0, 1, 2**64 - 1)), Request(12.5, 10, 3, ())]
    assert len(load_mooncake(trace, limit=1)) == 1


def test_the_limit_keeps_later_lines_unread(tmp_path: Path) -> None:
    assert len(load_mooncake(write(tmp_path / "t.jsonl", GOOD, "garbage"), limit=1)) == 1
    assert list(read_mooncake(tmp_path / "t.jsonl", limit=0)) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{nope", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ('{"a": 1', "not JSON (Expecting ',' delimiter, column 8)"),
        ("[1]", "not a JSON object but a list"),
        ("null", "not a JSON object but null"),
        *[({k: v for k, v in GOOD.items() if k != name}, f'field "{name}" is missing') for name in GOOD],
        ({**GOOD, "timestamp": -1}, '"timestamp" is negative (-1)'),
        ({**GOOD, "timestamp": "3"}, '"timestamp" must be a number of ms, not a string'),
        ({**GOOD, "timestamp": True}, '"timestamp" must be a number of ms, not true'),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}', "NaN is no number"),
        ('{"timestamp": 1e999, "input_length": 1, "output_length": 1, "hash_ids": []}', '"timestamp" is out of range'),
        ({**GOOD, "input_length": -5}, '"input_length" is negative (-5)'),
        ({**GOOD, "output_length": 1.5}, '"output_length" must be a whole number, not the number 1.5'),
        ({**GOOD, "output_length": None}, '"output_length" must be a whole number, not null'),
        ({**GOOD, "hash_ids": "abc"}, '"hash_ids" must be a list of numbers, not a string'),
        ({**GOOD, "hash_ids": [1, "2"]}, '"hash_ids"[1] must be a whole number, not a string'),
        ({**GOOD, "hash_ids": [1, True]}, '"hash_ids"[1] must be a whole number, not true'),
        ({**GOOD, "hash_ids": [-1]}, '"hash_ids"[0] is negative (-1)'),
        ({**GOOD, "hash_ids": [2**64]}, '"hash_ids"[0] is above 2**64 - 1'),
    ],
)
def test_a_malformed_line_is_named_with_its_number(tmp_path: Path, line: object, words: str) -> None:
    trace = write(tmp_path / "bad.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(TraceError) as caught:
        load_mooncake(trace)
    assert str(caught.value).startswith(f"{trace}, line 3: ")
    assert words in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\x00{\n")
    with pytest.raises(TraceError, match="line 2: not"):
        load_mooncake(tmp_path / "b.jsonl")


def test_an_endless_line_is_refused_without_being_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "z.jsonl").open("wb") as sparse:
        sparse.truncate(4 * MAX_LINE_BYTES)
    with pytest.raises(TraceError, match="line 1: longer than"):
        load_mooncake(tmp_path / "z.jsonl")


def test_empty_and_absent_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no requests"):
        load_mooncake(write(tmp_path / "e.jsonl", ""))
    with pytest.raises(FileNotFoundError):
        load_mooncake(tmp_path / "absent.jsonl")


def test_zstd_by_its_first_bytes_and_cut_short(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    plain = write(tmp_path / "t.jsonl", *[{**GOOD, "hash_ids": [i, i * 7919]} for i in range(2000)])
    packed = zstandard.ZstdCompressor().compress(plain.read_bytes())
    (tmp_path / "whole.any").write_bytes(packed)
    assert load_mooncake(tmp_path / "whole.any") == load_mooncake(plain)
    (tmp_path / "broken.zst").write_bytes(packed[:40] + bytes(40) + packed[80:])
    with pytest.raises(TraceError, match=r"broken\.zst, line"):
        load_mooncake(tmp_path / "broken.zst")


def test_zstd_cut_anywhere_is_said_to_be_cut_short(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    plain = write(tmp_path / "t.jsonl", *[{**GOOD, "hash_ids": [i, i * 7919]} for i in range(40)])
    first, second = (zstandard.ZstdCompressor(write_checksum=check).compress(plain.read_bytes()) for check in (True, False))
    skipped = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"  # a frame that holds nothing
    packed = first + skipped + second
    trace = tmp_path / "t.zst"
    trace.write_bytes(packed)
    assert load_mooncake(trace) == 2 * load_mooncake(plain)
    whole = {len(first), len(first + skipped), len(packed)}
    for size in range(len(packed)):
        trace.write_bytes(packed[:size])
        if size in whole:
            assert load_mooncake(trace) == load_mooncake(plain)
            continue
        with pytest.raises(TraceError) as caught:
            load_mooncake(trace)
        assert str(caught.value).startswith(f"{trace}: cut short"), (size, str(caught.value))


def test_the_generated_workload_is_the_same_for_a_seed_and_grows_prefixes() -> None:
    make = {"n_conversations": 5, "n_turns": 4, "system_blocks": 3, "turn_blocks": (1, 4)}
    requests = multi_turn(seed=1, **make)
    assert requests == multi_turn(seed=1, **make) != multi_turn(seed=2, **make)
    assert len(requests) == 20
    owner: dict[int, tuple[int, ...]] = {}  # equal ids mean equal whole prefixes
    for request in requests:
        assert request.ids[:3] == (0, 1, 2)
        for depth, block in enumerate(request.ids):
            assert owner.setdefault(block, request.ids[:depth]) == request.ids[:depth]
    tails = [request.ids for request in requests]
    assert sum(any(a[: len(b)] == b for b in tails[:i] if len(b) > 3) for i, a in enumerate(tails)) == 15
