"""The table: whole, and not too wide."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.layer.contenders import EAGER, GROUPED, LOOP, PENSTOCK, LayerSize
from benchmarks.layer.layers import ContenderResult, LayerCase, LayerResult
from benchmarks.layer.measure import Band
from benchmarks.layer.render import WIDTH, render_layers
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


def cells(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_layers_beside_one_another() -> None:
    head, _, row = cells(render_layers(layers()))
    assert head == ["E", "T", "M", "H", "Penstock ms", "Mixtral eager", "Mixtral grouped", "loop"]
    sizes = ["64", "4096", "512", "1024", "200.0"]
    assert row == [*sizes, "12.3x 11.1-13.6", "0.95x 0.85-1.04", "1.25x 1.12-1.38"]


def test_nothing_is_too_wide() -> None:
    assert [line for line in render_layers(layers()).splitlines() if len(line) > WIDTH] == []


def test_another_process_renders_the_same_from_json() -> None:
    plain = json.loads(json.dumps(layers().to_dict()))
    assert LayerResult.from_dict(plain) == layers()
    assert text_of(plain) == render_layers(layers())


def test_threads_are_counted() -> None:
    assert "1 thread\n" in render_layers(layers())
    assert "2 threads\n" in render_layers(replace(layers(), threads=2))
