"""The tables of `python -m benchmarks.layer`, in Markdown, 100 columns wide at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.layer.benchmark import LayerBenchmark
from benchmarks.layer.compression import CompressionCase, CompressionResult
from benchmarks.layer.contenders import EAGER, GROUPED, PENSTOCK
from benchmarks.layer.layers import FEW, HOPELESS, LayerCase, LayerResult
from benchmarks.layer.measure import Band
from benchmarks.layer.orders import TOGETHER, OrderCase, OrderResult, Stage
from penstock.bench.table import markdown_table

WIDTH: Final = 100
TITLES: Final = {EAGER: "Mixtral eager", GROUPED: "Mixtral grouped"}


def render_layer(result: LayerBenchmark) -> str:
    """All tables, each after what is to be known before reading it, one sentence a line."""
    parts = [render_layers(result.layers)]
    if result.orders.cases:
        parts.append(render_orders(result.orders))
    if result.compression.cases:
        parts.append(render_compression(result.compression))
    return "\n\n".join(parts)


# ---- whole layers ------------------------------------------------------------------------------------------


def render_layers(result: LayerResult) -> str:
    """One row for each size: Penstock's time, and that of the others over it."""
    names = [each.name for each in result.cases[0].contenders if each.name != PENSTOCK]
    head = [
        f"whole layer, forward and backward, float32, {_threads(result.threads)}",
        "E experts, T tokens of M numbers, experts H wide",
        f"Mixtral: MixtralSparseMoeBlock of transformers {result.transformers}, with two ways to run experts",
        "the others: their time over Penstock's, above 1x they are slower; median, 10 % to 90 % of rounds",
        f"{result.rounds} rounds in turns; {FEW} for what takes {HOPELESS:g} times as long as the fastest",
    ]
    titles = ["E", "T", "M", "H", "Penstock ms", *(TITLES.get(name, name) for name in names)]
    return _text(head, titles, [_layer_row(case, names) for case in result.cases])


def _layer_row(case: LayerCase, names: Sequence[str]) -> list[str]:
    size = case.size
    sizes = [str(n) for n in (size.experts, size.tokens, size.hidden_size, size.ffn_hidden_size)]
    others = [_ratio(case.contender(name).to_penstock) for name in names]
    return [*sizes, f"{1e3 * case.contender(PENSTOCK).step_s.median:.1f}", *others]


# ---- orders ------------------------------------------------------------------------------------------------


def render_orders(result: OrderResult) -> str:
    """One row for each order and size: GB/s of the bytes that must move."""
    head = [
        f"order and un-order, float32, {_threads(result.threads)}; E experts, T tokens of M numbers",
        "order, un-order: bytes that must be read and written in GB/s, forward / backward",
        "copy: the machine's in GB/s, read plus written, a buffer of like size in the same rounds",
        "plan: sorting the choices, in ms; all: plan, order, un-order and both backward passes, in ms",
        f"GB/s, of copy: of all that; median of {result.rounds} rounds",
        f"index and einsum: capacity factor {result.capacity_factor:g}; "
        f"einsum only where its mask is under {result.most_mask_bytes / 1e6:.0f} MB",
    ]
    titles = [
        "order",
        "E",
        "T",
        "M",
        "plan",
        "order",
        "un-order",
        "all",
        "GB/s",
        "copy",
        "of copy",
    ]
    return _text(head, titles, [_order_row(case) for case in result.cases])


def _order_row(case: OrderCase) -> list[str]:
    together = case.stage(TOGETHER)
    share = "-" if together.of_copy is None else f"{together.of_copy.median:.2f}x"
    return [
        case.order,
        *(str(n) for n in (case.experts, case.tokens, case.hidden_size)),
        f"{1e3 * case.stage('plan').time_s.median:.2f}",
        _both_ways(case, "order", "order backward"),
        _both_ways(case, "un-order", "un-order backward"),
        f"{1e3 * together.time_s.median:.2f}",
        _giga(together.byte_per_s),
        _giga(case.copy_byte_per_s.median),
        share,
    ]


def _both_ways(case: OrderCase, forward: Stage, backward: Stage) -> str:
    return " / ".join(_giga(case.stage(stage).byte_per_s) for stage in (forward, backward))


# ---- compression -------------------------------------------------------------------------------------------


def render_compression(result: CompressionResult) -> str:
    """One row for each compression and size: GB/s of the bytes that must move."""
    head = [
        f"compression of rows in transit, from and to float32, {_threads(result.threads)}",
        "encode, decode, both: bytes read plus written in GB/s; copy: the machine's, counted alike",
        f"median of {result.rounds} rounds",
        "pays below: rate of a link on which encoding and decoding take as long as what they save",
    ]
    titles = ["rows are", "rows", "M", "bytes", "encode", "decode", "both", "copy", "of copy", "pays below"]
    return _text(head, titles, [_compression_row(case) for case in result.cases])


def _compression_row(case: CompressionCase) -> list[str]:
    moved = case.raw_bytes + case.wire_bytes
    return [
        case.compression,
        *(str(n) for n in (case.rows, case.hidden_size)),
        f"{case.wire_bytes / case.raw_bytes:.2f}x",
        _giga(moved / case.encode_s.median),
        _giga(moved / case.decode_s.median),
        _giga(case.moved_byte_per_s),
        _giga(case.copy_byte_per_s.median),
        f"{case.of_copy.median:.2f}x",
        f"{case.pays_below_bit_per_s / 1e9:.1f} Gbit/s",
    ]


# ---- cells -------------------------------------------------------------------------------------------------


def _ratio(band: Band) -> str:
    """Such as `1.86x 1.80-1.93`."""
    return f"{_short(band.median)}x {_short(band.low)}-{_short(band.high)}"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _giga(byte_per_s: float) -> str:
    return f"{byte_per_s / 1e9:.1f}"


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def _text(head: Sequence[str], titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([*head, "", *markdown_table([titles, *rows])])
