"""Where each dispatch wins: round trips of rows, measured and as the fitted links predict them.

A round trip is a dispatch and its combine, all legs one behind the other, with even routing. The same rows
travel at once (few large messages) or in chunks, one behind the other (many small ones). What is chosen is
what `moe.dispatch = "auto"` would choose if a step were nothing but these trips: the least prediction.

Small trips are repeated back to back, and as many go before the clock: see `benchmarks.collectives`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.collectives import FLOAT_BYTES
from benchmarks.dispatches.result import DispatchesResult, LegModels, TripResult
from benchmarks.progress import BOARD, in_rows
from benchmarks.uplinks import Uplinks, size_text
from penstock.autopilot.profiling import measure_links
from penstock.bench.result import Spread
from penstock.bench.summarise import busiest_uplink_bytes
from penstock.config import ConfigError
from penstock.cost import AlphaBeta, ClusterConfig, ClusterFile, ProfiledCluster, Span
from penstock.dispatch import DISPATCHES, Leg, Place
from penstock.ops.transfers import HOME
from penstock.runtime import Machinery
from penstock.runtime.transport import Transport, Transports
from penstock.runtime.transport.legs import send_home, send_out
from penstock.topology import Control, Layout
from penstock.words import counted

SIZES_BYTES: Final = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
ROW_BYTES: Final = 128
"""Small, so that the least size in many chunks still has a row for each of 16 ranks."""

FEW_LARGE, MANY_SMALL = 1, 8
"""Chunks that the rows of a rank travel in."""

LEAST_BYTES: Final = 1 << 20
MOST_REPEATS: Final = 16
"""One timing repeats a trip until this much of every rank's rows has travelled, or this many chunks."""

LINKS_S: Final = 10.0
ROUNDS: Final = 5
WARMUP: Final = 1
WHAT: Final = "measuring a dispatch"


@dataclass(frozen=True, kw_only=True)
class TripTimes:
    """One size in so many chunks, as it was measured; the same on every rank.

    size_bytes: of the rows that each rank has for all experts, its own share included. repeats: trips in one
    timing. By dispatch: times_s of one trip, the slowest rank of each round; traffic of one trip, by sending
    rank, payload bytes by receiving rank.
    """

    size_bytes: int
    chunks: int
    repeats: int
    times_s: Mapping[str, tuple[float, ...]]
    traffic: Mapping[str, tuple[Mapping[int, int], ...]]


@dataclass(frozen=True, kw_only=True)
class DispatchTimes:
    """Every size, in few and in many chunks. devices: ranks of a node."""

    ranks: int
    devices: int
    models: LegModels
    trips: tuple[TripTimes, ...]


# ---- measuring ---------------------------------------------------------------------------------------------


def measure_dispatches(
    machinery: Machinery,
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    rounds: int = ROUNDS,
    links_s: float = LINKS_S,
    result: Callable[[DispatchTimes], object] = lambda found: found,
) -> DispatchTimes:
    """Fit the links, then time every dispatch that the layout can run. All ranks call it at the same point.

    sizes_bytes: one or more, of the rows that each rank has; see `even_sizes`. links_s: to fit links for.
    Raises `ConfigError`, on all ranks alike, if a rank is alone.
    """
    transports, layout, control = machinery.transports, machinery.layout, machinery.control
    _check(layout, rounds)
    names = runnable(layout)
    hierarchical = [name for name in names if DISPATCHES[name].needs_table]
    BOARD.say("measuring links")
    links = measure_links(machinery, hierarchical, links_s, used_only=True)
    nodes = layout.nodes
    file = ClusterFile(name="links", nodes=nodes, ranks_per_node=layout.world_size // nodes, links=links)
    cluster = ProfiledCluster.build(file)
    bench = _Bench(names, transports, layout, control, rounds)
    sizes = even_sizes(sizes_bytes, layout.ep_size)
    whole = partial(
        DispatchTimes,
        ranks=layout.world_size,
        devices=layout.node_size or layout.world_size,
        models={name: leg_models(name, cluster, layout) for name in names},
    )
    rows = [
        (f"{size_text(size)} in {counted(chunks, 'chunk')}", partial(bench.measure, size, chunks))
        for chunks in (FEW_LARGE, MANY_SMALL)
        for size in sizes
    ]
    return whole(trips=in_rows(rows, lambda trips: result(whole(trips=trips))))


def _check(layout: Layout, rounds: int) -> None:
    if layout.ep_size == 1:
        hint = "Use 2 or more, for example with --emulate 2x2."
        raise ConfigError("processes", layout.world_size, "a dispatch needs two ranks in a group", hint)
    if rounds < 1:
        raise ConfigError("rounds", rounds, "must be at least 1", "Use 1 or more.")


def runnable(layout: Layout) -> tuple[str, ...]:
    """Dispatches of rows for one rank that these ranks can run: hierarchical ones need nodes."""
    fitting = (name for name, each in DISPATCHES.items() if layout.ep_nodes > 1 or not each.needs_table)
    return tuple(name for name in fitting if not DISPATCHES[name].joins_rows)


def even_sizes(sizes_bytes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Sizes of which every rank gets whole rows in every chunk, each once: rounded down, but never to 0."""
    unit = ROW_BYTES * ranks * MANY_SMALL
    return tuple(dict.fromkeys(max(unit, size // unit * unit) for size in sizes_bytes))


def leg_models(name: str, cluster: ClusterConfig, layout: Layout) -> dict[str, AlphaBeta]:
    """The legs of a dispatch, out and home, by op."""
    out = [hop.op for hop in DISPATCHES[name].hops]
    ops = (*out, *(HOME[op] for op in reversed(out)))
    span = Span.regular(layout.ep_nodes, layout.ep_node_size)
    return {op: cluster.leg(name, op, span) for op in ops}


def predict(models: Mapping[str, AlphaBeta], size_bytes: int, chunks: int) -> float:
    """Seconds of a round trip: every leg of every chunk, one behind the other."""
    return chunks * sum(model.seconds(size_bytes / chunks) for model in models.values())


@dataclass(frozen=True)
class Trip:
    """A round trip on this rank. rows_RM: of one chunk. legs: on the way out, each with its transport."""

    rows_RM: Tensor
    legs: tuple[tuple[Leg, Transport], ...]
    chunks: int

    @staticmethod
    def build(name: str, size_bytes: int, chunks: int, transports: Transports, layout: Layout) -> Trip:
        """size_bytes: as `even_sizes` gives it."""
        ranks = layout.ep_size
        each = size_bytes // (ROW_BYTES * ranks * chunks)
        table = np.full((ranks, ranks), each)
        legs = DISPATCHES[name].legs(table, Place(layout.ep_rank, ranks, layout.ep_node_size))
        ways = [transports.of(hop.lane) for hop in DISPATCHES[name].hops]
        rows_RM = torch.zeros(each * ranks, ROW_BYTES // FLOAT_BYTES)
        return Trip(rows_RM, tuple(zip(legs, ways, strict=True)), chunks)

    def run(self) -> Tensor:
        """The rows of the last chunk, home again."""
        for _ in range(self.chunks):
            rows_RM = self.rows_RM
            for leg, transport in self.legs:
                rows_RM = send_out(rows_RM, leg, transport)
            for leg, transport in reversed(self.legs):
                rows_RM = send_home(rows_RM, leg, transport)
        return rows_RM


@dataclass(frozen=True)
class _Bench:
    """What all trips share on this rank. names: of dispatches."""

    names: Sequence[str]
    transports: Transports
    layout: Layout
    control: Control
    rounds: int

    def measure(self, size_bytes: int, chunks: int) -> TripTimes:
        repeats = max(1, min(LEAST_BYTES // size_bytes, MOST_REPEATS // chunks))
        build = partial(Trip.build, transports=self.transports, layout=self.layout)
        trips = {name: build(name, size_bytes, chunks) for name in self.names}
        sent = {name: self._sent(trip) for name, trip in trips.items()}
        everyone = self.control.gather(sent, "collecting what was sent")
        return TripTimes(
            size_bytes=size_bytes,
            chunks=chunks,
            repeats=repeats,
            times_s=self._times_s(trips, repeats),
            traffic={name: tuple(rank[name] for rank in everyone) for name in trips},
        )

    def _sent(self, trip: Trip) -> dict[int, int]:
        """Payload bytes of one trip from this rank, by receiving rank."""
        before = self.transports.traffic.copy()
        with self.control.naming(WHAT):
            trip.run()
        return dict(self.transports.traffic - before)

    def _times_s(self, trips: Mapping[str, Trip], repeats: int) -> dict[str, tuple[float, ...]]:
        """Rounds in turns, so that noise falls on all dispatches alike."""
        mine: dict[str, list[float]] = {name: [] for name in trips}
        for turn in range(WARMUP + self.rounds):
            for name, trip in trips.items():
                time_s = _timed(trip, self.control, repeats)
                if turn >= WARMUP:
                    mine[name].append(time_s)
        everyone = self.control.gather(mine, "collecting measurements")
        by_round = {name: zip(*(rank[name] for rank in everyone), strict=True) for name in trips}
        return {name: tuple(map(max, turns)) for name, turns in by_round.items()}


def _timed(trip: Trip, control: Control, repeats: int) -> float:
    """Seconds of one trip on this rank, the mean of `repeats` in a row behind as many untimed ones."""
    control.barrier(WHAT)
    with control.naming(WHAT):
        for _ in range(2):  # only the second time counts
            start_s = time.perf_counter()
            for _ in range(repeats):
                trip.run()
    return (time.perf_counter() - start_s) / repeats


# ---- what it means -----------------------------------------------------------------------------------------


def summarise_dispatches(found: DispatchTimes, inter_rate_bit_per_s: float | None) -> DispatchesResult:
    """Nothing is measured here; the same input gives the same result."""
    nodes = found.ranks // found.devices
    uplinks = Uplinks(nodes=nodes, devices=found.devices, inter_rate_bit_per_s=inter_rate_bit_per_s)
    return DispatchesResult(
        ranks=found.ranks,
        nodes=nodes,
        inter_rate_bit_per_s=inter_rate_bit_per_s,
        models=found.models,
        rows=tuple(_row(trip, found.models, uplinks) for trip in found.trips),
    )


def _row(trip: TripTimes, models: LegModels, uplinks: Uplinks) -> TripResult:
    crossing = [busiest_uplink_bytes(sent, uplinks.nodes, uplinks.devices) for sent in trip.traffic.values()]
    return TripResult(
        size_bytes=trip.size_bytes,
        chunks=trip.chunks,
        wire_bytes=min(crossing),
        limit_s=uplinks.limit_s(min(crossing)),
        times_s={name: Spread.of(times) for name, times in trip.times_s.items()},
        predicted_s={name: predict(models[name], trip.size_bytes, trip.chunks) for name in trip.times_s},
    )
