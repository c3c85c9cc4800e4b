"""The tables: whole, and not too wide."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.layer.benchmark import LayerBenchmark
from benchmarks.layer.compression import CompressionCase, CompressionResult
from benchmarks.layer.contenders import EAGER, GROUPED, LOOP, PENSTOCK, LayerSize
from benchmarks.layer.layers import ContenderResult, LayerCase, LayerResult
from benchmarks.layer.measure import Band
from benchmarks.layer.orders import STAGES, TOGETHER, OrderCase, OrderResult, RowCounts, StageResult
from benchmarks.layer.render import (
    WIDTH,
    render_compression,
    render_layer,
    render_layers,
    render_orders,
)
from benchmarks.text import text_of


def band(value: float) -> Band:
    return Band(median=value, low=0.9 * value, high=1.1 * value)


def layers() -> LayerResult:
    """Numbers as wide as they come."""
    size = LayerSize(tokens=4096, hidden_size=512, ffn_hidden_size=1024, experts=64)
    step_s = {PENSTOCK: 0.2, EAGER: 2.468, GROUPED: 0.19, LOOP: 0.25}
    contenders = tuple(
        ContenderResult(name=name, rounds=9, step_s=band(each), to_penstock=band(each / 0.2))
        for name, each in step_s.items()
    )
    return LayerResult(
        threads=1, rounds=9, transformers="5.23.0", cases=(LayerCase(size=size, contenders=contenders),)
    )


def orders() -> OrderResult:
    counts = RowCounts(tokens=8192, used=8000, rows=20480, kept=16000)
    stages = tuple(
        StageResult(
            stage=stage,
            moved_bytes=counts.bytes_of(stage, 4096),
            time_s=band(0.005),
            of_copy=None if stage == "plan" else band(0.5),
        )
        for stage in (*STAGES, TOGETHER)
    )
    case = OrderCase(
        experts=64,
        tokens=8192,
        hidden_size=1024,
        top_k=2,
        order="einsum",
        counts=counts,
        copy_byte_per_s=band(123.4e9),
        stages=stages,
    )
    return OrderResult(threads=1, rounds=11, capacity_factor=1.25, most_mask_bytes=1e8, cases=(case,))


def compression() -> CompressionResult:
    case = CompressionCase(
        compression="bfloat16",
        rows=16384,
        hidden_size=1024,
        raw_bytes=64 << 20,
        wire_bytes=32 << 20,
        encode_s=band(0.001),
        decode_s=band(0.001),
        both_s=band(0.002),
        copy_byte_per_s=band(123.4e9),
        of_copy=band(0.8),
    )
    return CompressionResult(threads=1, rounds=15, cases=(case,))


def cells(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_layers_beside_one_another() -> None:
    head, _, row = cells(render_layers(layers()))
    assert head == ["E", "T", "M", "H", "Penstock ms", "Mixtral eager", "Mixtral grouped", "loop"]
    sizes = ["64", "4096", "512", "1024", "200.0"]
    assert row == [*sizes, "12.3x 11.1-13.6", "0.95x 0.85-1.04", "1.25x 1.12-1.38"]


def test_orders_beside_the_copy() -> None:
    head, _, row = cells(render_orders(orders()))
    assert head[4:] == ["plan", "order", "un-order", "all", "GB/s", "copy", "of copy"]
    mega = 4096 / 5000  # bytes of a row, over 5 ms, in MB/s
    forward, back = (f"{mega * n / 1000:.1f}" for n in (8000 + 20480, 16000 + 8192))
    spread = f"{mega * (8000 + 16000 + 20480) / 1000:.1f}"
    assert row[:7] == ["einsum", "64", "8192", "1024", "5.00", f"{forward} / {back}", f"{back} / {spread}"]
    assert row[7] == "5.00" and row[9:] == ["123.4", "0.50x"]


def test_compression_beside_the_copy() -> None:
    head, _, row = cells(render_compression(compression()))
    assert len(head) == len(row)
    assert row == [
        *("bfloat16", "16384", "1024", "0.50x", "100.7", "100.7", "100.7", "123.4", "0.80x"),
        "134.2 Gbit/s",
    ]


def test_nothing_is_too_wide_and_every_table_is_markdown() -> None:
    text = render_layer(LayerBenchmark(layers=layers(), orders=orders(), compression=compression()))
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    for part in text.split("\n\n")[1::2]:
        lines = part.splitlines()
        assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1
        assert set(lines[1]) == set("|- ")


def test_another_process_renders_the_same_from_json() -> None:
    benchmark = LayerBenchmark(layers=layers(), orders=orders(), compression=compression())
    plain = json.loads(json.dumps(benchmark.to_dict()))
    assert LayerBenchmark.from_dict(plain) == benchmark
    assert text_of(plain) == render_layer(benchmark)


def test_threads_are_counted() -> None:
    assert "1 thread\n" in render_layers(layers())
    assert "2 threads\n" in render_layers(replace(layers(), threads=2))
