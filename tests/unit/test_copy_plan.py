"""Copy planning of the transports: which bytes are one run, frames, lanes; buffers in a row; answers' checksums."""

from __future__ import annotations

import time

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvpool.transport.base import LinkCause, LinkError, Range, Strided
from kvpool.transport.connection import answer_margin, parse_address
from kvpool.transport.copy_plan import address_of, addresses_of, copy_runs, cut_lanes, merge_runs, split_by_bytes
from kvpool.transport.link import cut_ranges
from kvpool.transport.receive import matches

FAR = float("inf")


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=0, max_size=12),
    target_gaps=st.lists(st.sampled_from([0, 0, 0, 5]), min_size=12, max_size=12),
    source_order=st.permutations(range(12)),
)
def test_merged_runs_copy_the_same_bytes(lengths, target_gaps, source_order):
    n = len(lengths)
    source = np.arange(12 * 9, dtype=np.uint8)
    starts = [source_order[i] * 9 for i in range(n)]
    targets, at = [], 0
    for length, gap in zip(lengths, target_gaps):
        targets.append(at)
        at += length + gap
    plain, merged = np.zeros(400, dtype=np.uint8), np.zeros(400, dtype=np.uint8)
    for t, s, length in zip(targets, starts, lengths):
        plain[t : t + length] = source[s : s + length]
    base_t, base_s = address_of(merged.data), address_of(source.data)
    runs = merge_runs(u64(*targets) + np.uint64(base_t), u64(*starts) + np.uint64(base_s), u64(*lengths))
    copy_runs(*runs, deadline=FAR)
    assert (plain == merged).all()


def test_neighbours_at_both_ends_become_one_run():
    targets, sources, lengths = merge_runs(u64(0, 10, 20, 40), u64(100, 110, 130, 140), u64(10, 10, 10, 10))
    assert targets.tolist() == [0, 20, 40]
    assert sources.tolist() == [100, 130, 140]
    assert lengths.tolist() == [20, 10, 10]


def test_copying_stops_at_the_deadline():
    target = np.zeros(8, dtype=np.uint8)
    with pytest.raises(LinkError) as caught:
        copy_runs(u64(address_of(target.data)), u64(address_of(target.data)), u64(8), deadline=time.monotonic() - 1)
    assert caught.value.cause is LinkCause.TIMEOUT


def test_addresses_of_a_row_are_those_of_its_buffers():
    whole = memoryview(bytearray(60))
    row = Strided(whole, 20)
    assert addresses_of(row).tolist() == addresses_of(list(row)).tolist() == [address_of(whole) + 20 * i for i in range(3)]
    fixed = memoryview(bytes(60))
    assert addresses_of([fixed[20:40], fixed[40:40]]).tolist() == [address_of(fixed) + 20, 0]


def test_a_row_is_a_sequence_of_buffers():
    whole = memoryview(bytearray(range(12)))
    row = Strided(whole, 4)
    assert len(row) == 3
    assert bytes(row[1]) == bytes([4, 5, 6, 7])
    assert bytes(row[-1]) == bytes([8, 9, 10, 11])
    assert [bytes(b) for b in row[1:]] == [bytes(row[1]), bytes(row[2])]
    assert isinstance(row[1:], Strided)
    assert len(row[2:1]) == 0
    assert [bytes(b) for b in row[::2]] == [bytes(row[0]), bytes(row[2])]
    with pytest.raises(IndexError):
        row[3]
    with pytest.raises(ValueError, match="13"):
        Strided(memoryview(bytearray(13)), 4)


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 40), st.integers(1, 8))
def test_frames_hold_every_block_once_within_limits(sizes, limit, n_max):
    groups = list(split_by_bytes(sizes, limit, n_max=n_max))
    assert [i for a, b in groups for i in range(a, b)] == list(range(len(sizes)))
    assert all(b - a <= n_max and (b - a == 1 or sum(sizes[a:b]) <= limit) for a, b in groups)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 30))
def test_lanes_hold_every_block_once(sizes, n_lanes, least):
    lanes = cut_lanes(sizes, n_lanes, lane_bytes_min=least)
    assert [i for a, b in lanes for i in range(a, b)] == list(range(len(sizes)))
    assert len(lanes) <= n_lanes
    assert all(a < b for a, b in lanes)


def test_lanes_are_about_equal_and_little_stays_whole():
    assert cut_lanes([10] * 8, 2, lane_bytes_min=20) == [(0, 4), (4, 8)]
    assert cut_lanes([10] * 8, 2, lane_bytes_min=41) == [(0, 8)]


@given(st.lists(st.integers(1, 50), max_size=6), st.integers(1, 20))
def test_parts_of_ranges_cover_the_same_bytes(sizes, limit):
    whole = [Range(i, 3 * i, memoryview(bytes(range(size)))) for i, size in enumerate(sizes)]
    parts = cut_ranges(whole, limit)
    assert all(1 <= part.data.nbytes <= limit for part in parts)
    for i, size in enumerate(sizes):
        mine = [part for part in parts if part.block == i]
        assert b"".join(part.data for part in mine) == bytes(range(size))
        at = 3 * i
        for part in mine:
            assert part.offset == at
            at += part.data.nbytes


def test_checksums_are_of_each_piece():
    data = memoryview(bytes(range(200)))
    sums = [xxhash.xxh3_64_intdigest(data[at : at + 64]) for at in range(0, 200, 64)]
    assert matches(data, sums, 64)
    assert not matches(data, [*sums[:3], sums[3] ^ 1], 64)
    assert matches(data, [xxhash.xxh3_64_intdigest(data)], 256)
    assert not matches(data, [sums[0]], 256)


def test_the_worker_is_told_less_than_the_whole_deadline():
    assert answer_margin(10.0) == 0.05
    assert answer_margin(0.1) == pytest.approx(0.01)


def test_addresses():
    assert parse_address("10.0.0.1:7400") == ("10.0.0.1", 7400)
    assert parse_address("[::1]:80") == ("::1", 80)
    for bad in ("nowhere", ":1", "a:", "a:x", "a:0", "a:70000"):
        with pytest.raises(Exception, match="address"):
            parse_address(bad)
