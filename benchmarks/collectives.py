"""How near each collective comes to the wire: Penstock's transport beside Gloo as shipped.

The limit counts payload only: bytes that tensors hold, over the rate of the link. TCP and IP headers take
their part of the same rate: a wire that is never idle has an efficiency of 0.993 with packets of 9000 bytes
(8948 bytes of payload travel in 9014) and of 0.956 with packets of 1500 (1448 in 1514).

Small exchanges are repeated back to back and their mean is taken: one alone would mostly measure how evenly
the ranks started. Some go before the clock: a link that has rested lets a burst pass faster than its rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final

import torch

from benchmarks.command import run_on_ranks
from benchmarks.peers.shipped import ShippedTransport
from benchmarks.progress import in_rows
from benchmarks.uplinks import Uplinks, cluster_text, size_text
from penstock.config import ConfigError
from penstock.lab.bench import BenchConfig
from penstock.lab.bench.compare import busiest_uplink_bytes
from penstock.lab.bench.result import Spread
from penstock.lab.emulate import EmulateConfig
from penstock.mesh import Group
from penstock.runtime.transport import Transport
from penstock.topology import Control, Layout, lane_groups
from penstock.train.assemble import build_machinery
from penstock.words import markdown_table

SIZES_BYTES: Final = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
ROW_BYTES: Final = 1024
FLOAT_BYTES: Final = 4
COUNTS_PER_PEER: Final = 16
LEAST_BYTES: Final = 4 << 20
"""One timing repeats a collective until this much of every rank's buffer has been exchanged."""

REST_BYTES: Final = 1 << 20
"""As much of it, and one call at least, goes before the clock."""

COUNTS_REPEATS: Final = 16
ROUNDS: Final = 7
WARMUP: Final = 1
PENSTOCK, GLOO = "penstock", "gloo"
COUNTS: Final = "counts"


@dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """One collective at one size, as it was measured; the same on every rank.

    Attributes:
        size_bytes: The buffer of one rank, what it keeps included.
        repeats: Calls in one timing.
        times_s: Seconds of one call by transport, of the slowest rank in each round.
        traffic: Payload bytes of one call, by sending and by receiving rank.
    """

    collective: str
    size_bytes: int
    repeats: int
    times_s: Mapping[str, tuple[float, ...]]
    traffic: tuple[Mapping[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class CollectiveResult:
    """One row.

    Attributes:
        wire_bytes: Payload over the busiest uplink in its busier direction.
        limit_s: See `Uplinks`; None if the rate is not known, nothing crosses a link, or the exchange is so
            small that only its latency counts.
    """

    collective: str
    size_bytes: int
    wire_bytes: int
    limit_s: float | None
    times_s: Mapping[str, Spread]

    def efficiency(self, transport: str) -> float | None:
        """Return limit / median time; None without a limit."""
        return None if self.limit_s is None else self.limit_s / self.times_s[transport].median

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"efficiency": {name: self.efficiency(name) for name in self.times_s}}


@dataclass(frozen=True, kw_only=True)
class CollectivesResult:
    """All collectives at all sizes on one cluster."""

    ranks: int
    nodes: int
    inter_rate_bit_per_s: float | None
    rows: tuple[CollectiveResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the key `collectives` tells it from the result of a comparison."""
        plain = {"ranks": self.ranks, "nodes": self.nodes, "inter_rate_bit_per_s": self.inter_rate_bit_per_s}
        return plain | {"collectives": [row.to_dict() for row in self.rows]}


# ---- measuring ---------------------------------------------------------------------------------------------


def measure_collectives(
    transport: Transport,
    control: Control,
    layout: Layout,
    shipped: Transport,
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    rounds: int = ROUNDS,
    result: Callable[[tuple[CollectiveTimes, ...]], object] = tuple,
) -> tuple[CollectiveTimes, ...]:
    """Measure every collective at every size, transports in turns. All ranks must call it at the same point.

    Args:
        shipped: The same groups on connections of its own, with Gloo's collectives as torch ships them.
        sizes_bytes: Sizes of one rank's buffer, multiples of `ROW_BYTES`.
        rounds: How often each is timed.
        result: Makes of some collectives what a stop leaves.

    Raises:
        ConfigError: If a rank is alone, since it has nobody to exchange with.
    """
    if layout.ep_size == 1:
        hint = "Use 2 or more, for example with --emulate 2x1."
        raise ConfigError("processes", layout.world_size, "an exchange needs two ranks in a group", hint)
    ways = {PENSTOCK: transport, GLOO: shipped}
    measure = partial(_measure, transport=transport, control=control, rounds=rounds)
    rows = [(COUNTS, partial(measure, COUNTS, layout.ep_size * COUNTS_PER_PEER * 8, _counts(ways, layout)))]
    for size_bytes in sizes_bytes:
        for name, moves in _moves(ways, layout, size_bytes):
            rows.append((f"{name}, {size_text(size_bytes)}", partial(measure, name, size_bytes, moves)))
    return in_rows(rows, result)


def _counts(ways: Mapping[str, Transport], layout: Layout) -> dict[str, Callable[[], object]]:
    """Return the exchange of tokens per expert that goes before a dropless dispatch."""
    counts = torch.zeros(layout.ep_size, COUNTS_PER_PEER, dtype=torch.int64)
    ones = [1] * layout.ep_size
    return {way: partial(each.all_to_all, counts, ones, ones) for way, each in ways.items()}


def _moves(
    ways: Mapping[str, Transport], layout: Layout, size_bytes: int
) -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Yield what to time at this size: name of the collective, one call by transport."""
    peers = layout.ep_size
    rows = torch.zeros(size_bytes // ROW_BYTES, ROW_BYTES // FLOAT_BYTES)
    for name, weights in (("even", [1] * peers), ("uneven", [peers - t for t in range(peers)])):
        splits = shares(len(rows), weights)
        arguments = (rows, splits, [splits[layout.ep_rank]] * peers)
        yield f"all-to-all, {name}", {way: partial(each.all_to_all, *arguments) for way, each in ways.items()}
    # A sum in place: zeros stay zeros, whatever the number of rounds.
    flat = rows.flatten()
    yield "all-reduce", {way: partial(each.all_reduce, flat, Group.WORLD) for way, each in ways.items()}


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """Return `total` rows in proportion to the weights, as whole numbers."""
    bounds = [0, *(round(total * part / sum(weights)) for part in accumulate(weights))]
    return [after - before for before, after in pairwise(bounds)]


def _measure(
    name: str,
    size_bytes: int,
    moves: Mapping[str, Callable[[], object]],
    transport: Transport,
    control: Control,
    rounds: int,
) -> CollectiveTimes:
    """Measure in turns, so that noise falls on all transports alike."""
    repeats = COUNTS_REPEATS if name == COUNTS else max(1, LEAST_BYTES // size_bytes)
    untimed = 1 if name == COUNTS else max(1, REST_BYTES // size_bytes)
    before = transport.traffic.copy()
    moves[PENSTOCK]()
    sent = control.gather(dict(transport.traffic - before), "collecting what was sent")
    times: dict[str, list[float]] = {way: [] for way in moves}
    for turn in range(WARMUP + rounds):
        for way, move in moves.items():
            time_s = _timed(move, control, repeats, untimed)
            if turn >= WARMUP:
                times[way].append(time_s)
    everyone = control.gather(times, "collecting measurements")
    slowest = {
        way: tuple(max(turn) for turn in zip(*(rank[way] for rank in everyone), strict=True)) for way in moves
    }
    return CollectiveTimes(
        collective=name, size_bytes=size_bytes, repeats=repeats, times_s=slowest, traffic=tuple(sent)
    )


def _timed(move: Callable[[], object], control: Control, repeats: int, untimed: int) -> float:
    """Return seconds of one call on this rank, the mean of `repeats` calls in a row behind `untimed` ones."""
    control.barrier("measuring a collective")
    for _ in range(untimed):
        move()
    start_s = time.perf_counter()
    for _ in range(repeats):
        move()
    return (time.perf_counter() - start_s) / repeats


# ---- what it means -----------------------------------------------------------------------------------------


def summarise_collectives(found: Sequence[CollectiveTimes], uplinks: Uplinks) -> CollectivesResult:
    """Return the result of measured times; the same input gives the same result."""
    return CollectivesResult(
        ranks=uplinks.nodes * uplinks.devices,
        nodes=uplinks.nodes,
        inter_rate_bit_per_s=uplinks.inter_rate_bit_per_s,
        rows=tuple(_row(times, uplinks) for times in found),
    )


def _row(times: CollectiveTimes, uplinks: Uplinks) -> CollectiveResult:
    wire_bytes = busiest_uplink_bytes(times.traffic, uplinks.nodes, uplinks.devices)
    return CollectiveResult(
        collective=times.collective,
        size_bytes=times.size_bytes,
        wire_bytes=wire_bytes,
        limit_s=None if times.collective == COUNTS else uplinks.limit_s(wire_bytes),
        times_s={way: Spread.of(values) for way, values in times.times_s.items()},
    )


HEAD: Final = (
    "collective",
    "per rank",
    "over the uplink",
    "limit ms",
    "penstock ms [95 %]",
    "efficiency",
    "Gloo as shipped ms [95 %]",
    "efficiency",
)


def render_collectives(result: CollectivesResult) -> str:
    """Return what was measured and one row for each collective and size, in Markdown."""
    head = [cluster_text(result.ranks, result.nodes, result.inter_rate_bit_per_s), LIMIT_NOTE, ""]
    return "\n".join([*head, *markdown_table([HEAD, *(_cells(row) for row in result.rows)])])


LIMIT_NOTE: Final = "limit: payload over the busiest uplink at its full rate, headers not counted"


def _cells(row: CollectiveResult) -> tuple[str, ...]:
    return (
        row.collective,
        size_text(row.size_bytes),
        size_text(row.wire_bytes),
        "-" if row.limit_s is None else f"{1e3 * row.limit_s:.2f}",
        *_timing(row, PENSTOCK),
        *_timing(row, GLOO),
    )


def _timing(row: CollectiveResult, way: str) -> tuple[str, str]:
    """Return time and efficiency."""
    spread, efficiency = row.times_s[way], row.efficiency(way)
    times = f"{1e3 * spread.median:.2f} [{1e3 * spread.low:.2f}, {1e3 * spread.high:.2f}]"
    return times, "-" if efficiency is None else f"{efficiency:.2f}"


# ---- the command -------------------------------------------------------------------------------------------


def measure(config: BenchConfig, layout: Layout, emulate: EmulateConfig | None) -> CollectivesResult:
    """Measure as one of the ranks; without an emulated cluster all count as one node."""
    machinery = build_machinery(layout, torch.device("cpu"), config.parallel, "float32")
    shipped = ShippedTransport(partial(lane_groups, layout, config.parallel.timeout_s))
    if emulate is None:
        uplinks = Uplinks(nodes=1, devices=layout.world_size, inter_rate_bit_per_s=None)
    else:
        rate = emulate.inter_rate_bit_per_s
        uplinks = Uplinks(nodes=emulate.nodes, devices=emulate.devices, inter_rate_bit_per_s=rate)
    result = partial(summarise_collectives, uplinks=uplinks)
    return result(
        measure_collectives(machinery.transports.inter, machinery.control, layout, shipped, result=result)
    )


if __name__ == "__main__":
    run_on_ranks(
        "collectives",
        "Measures the transport alone: how near each collective comes to the wire.",
        "--emulate 4x1 --inter-rate 400mbit moe.num_experts=4",
        measure,
        render_collectives,
    )
