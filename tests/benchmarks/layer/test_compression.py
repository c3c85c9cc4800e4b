"""Bytes under way are counted; what is measured is all there."""

from __future__ import annotations

import json

import pytest

from benchmarks.layer.compression import CompressionCase, CompressionResult, measure_compression
from benchmarks.layer.measure import Band

SHAPES = ((6, 8), (3, 12))


def test_bytes_under_way_are_counted() -> None:
    found = measure_compression(shapes=SHAPES, rounds=3)
    wire = {(case.compression, case.rows): (case.raw_bytes, case.wire_bytes) for case in found.cases}
    assert wire == {
        ("bfloat16", 6): (6 * 8 * 4, 6 * 8 * 2),
        ("int8", 6): (6 * 8 * 4, 6 * (8 + 4)),  # and a float32 scale for each row
        ("bfloat16", 3): (3 * 12 * 4, 3 * 12 * 2),
        ("int8", 3): (3 * 12 * 4, 3 * (12 + 4)),
    }
    for case in found.cases:
        for band in (case.encode_s, case.decode_s, case.both_s, case.copy_byte_per_s, case.of_copy):
            assert 0 < band.low <= band.median <= band.high


def test_json_and_back() -> None:
    found = measure_compression(shapes=SHAPES, rounds=3)
    plain = json.loads(json.dumps(found.to_dict()))
    assert CompressionResult.from_dict(plain) == found
    assert {"moved_byte_per_s", "pays_below_bit_per_s"} <= plain["cases"][0].keys()


def test_it_pays_where_the_link_takes_longer_than_the_processor() -> None:
    band = Band(median=0.5, low=0.5, high=0.5)
    case = CompressionCase(
        compression="int8",
        rows=1,
        hidden_size=1000,
        raw_bytes=4000,
        wire_bytes=1000,
        encode_s=band,
        decode_s=band,
        both_s=Band(median=1.0, low=1.0, high=1.0),
        copy_byte_per_s=band,
        of_copy=band,
    )
    assert case.pays_below_bit_per_s == pytest.approx(24_000)  # 3000 bytes fewer for one second
    assert case.moved_byte_per_s == pytest.approx(10_000)  # 4000 read, 1000 written, and back
