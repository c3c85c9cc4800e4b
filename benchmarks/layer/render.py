"""The table of `python -m benchmarks.layer`, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.layer.contenders import EAGER, GROUPED, PENSTOCK
from benchmarks.layer.layers import FEW, HOPELESS, LayerCase, LayerResult
from benchmarks.layer.measure import Band
from penstock.words import counted, markdown_table

TITLES: Final = {EAGER: "Mixtral eager", GROUPED: "Mixtral grouped"}


def render_layers(result: LayerResult) -> str:
    """Return one row for each size: Penstock's time, and that of the others over it."""
    names = [each.name for each in result.cases[0].contenders if each.name != PENSTOCK]
    head = [
        f"whole layer, forward and backward, float32, {counted(result.threads, 'thread')}",
        "E experts, T tokens of M numbers, experts H wide",
        f"Mixtral: MixtralSparseMoeBlock of transformers {result.transformers}, with two ways to run experts",
        "the others: their time over Penstock's, above 1x they are slower; median, 10 % to 90 % of rounds",
        f"{result.rounds} rounds in turns; {FEW} for what takes {HOPELESS:g} times as long as the fastest",
    ]
    titles = ["E", "T", "M", "H", "Penstock ms", *(TITLES.get(name, name) for name in names)]
    rows = [_layer_row(case, names) for case in result.cases]
    return "\n".join([*head, "", *markdown_table([titles, *rows])])


def _layer_row(case: LayerCase, names: Sequence[str]) -> list[str]:
    size = case.size
    sizes = [str(n) for n in (size.experts, size.tokens, size.hidden_size, size.ffn_hidden_size)]
    others = [_ratio(case.contender(name).to_penstock) for name in names]
    return [*sizes, f"{1e3 * case.contender(PENSTOCK).step_s.median:.1f}", *others]


def _ratio(band: Band) -> str:
    """Return a text such as `1.86x 1.80-1.93`."""
    return f"{_short(band.median)}x {_short(band.low)}-{_short(band.high)}"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
