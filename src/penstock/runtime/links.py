"""Measure a transport alone: alpha-beta models of its collectives, for the simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

import numpy as np
import torch

from penstock.cost import AlphaBeta, ClusterConfig, FittedCluster
from penstock.cost.fit import fit_line
from penstock.dispatch import DISPATCHES, Dispatch, Place
from penstock.mesh import Group
from penstock.ops.transfers import Hop
from penstock.runtime.transport import Transport, Transports
from penstock.runtime.transport.legs import send_out
from penstock.topology import Control, Layout

SIZES_BYTES = (1 << 14, 1 << 18, 1 << 20, 1 << 22)
REPEATS = 3
UNTIMED, IN_A_ROW = 2, 4
FLOAT_BYTES = 4
SLOW_S = 0.1


def fit_links(
    transports: Transports,
    layout: Layout,
    control: Control,
    devices: ClusterConfig,
    names: Iterable[str] = (),
) -> FittedCluster:
    """Links as measured, between devices that compute as `devices` says. All ranks take part.

    names: hierarchical dispatches whose legs are measured, too.
    """
    legs: dict[tuple[str, str], AlphaBeta] = {}
    for name in names:
        legs |= fit_legs(DISPATCHES[name], transports, layout, control)
    return FittedCluster.build(
        devices,
        dispatch=fit_all_to_all(transports.inter, control),
        reduce=fit_all_reduce(transports.inter, control),
        legs=legs,
    )


def fit_all_to_all(transport: Transport, control: Control) -> AlphaBeta:
    """Argument: bytes of the buffer each rank sends, its own share included."""
    ranks = transport.size(Group.EXPERT)

    def move(elements: int) -> None:
        rows = torch.zeros(elements // ranks * ranks)
        transport.all_to_all(rows, [elements // ranks] * ranks, [elements // ranks] * ranks)

    return _fit(move, control)


def fit_all_reduce(transport: Transport, control: Control) -> AlphaBeta:
    """Argument: bytes of the tensor."""
    return _fit(lambda elements: transport.all_reduce(torch.zeros(elements), Group.WORLD), control)


def fit_legs(
    dispatch: Dispatch, transports: Transports, layout: Layout, control: Control
) -> dict[tuple[str, str], AlphaBeta]:
    """Every leg of a dispatch by itself, with even routing. Argument: bytes of the rows each rank has."""
    place, ranks = Place(layout.ep_rank, layout.ep_size, layout.ep_node_size), layout.ep_size
    found = {}
    for number, hop in enumerate(dispatch.hops):

        def move(elements: int, number: int = number, hop: Hop = hop) -> None:
            leg = dispatch.legs(np.full((ranks, ranks), elements // ranks), place)[number]
            send_out(torch.zeros(sum(leg.sizes)), leg, transports.of(hop.lane))

        found[dispatch.name, hop.op] = _fit(move, control)
    return found


def _fit(move: Callable[[int], None], control: Control) -> AlphaBeta:
    """The line through typical timings of a few sizes."""
    times: list[float] = []
    for size in SIZES_BYTES:
        times.append(_typical(move, size // FLOAT_BYTES, control))
        if len(times) > 1 and times[-1] > SLOW_S:  # a slow link has told enough, and larger ones take long
            break
    line = fit_line(list(zip(SIZES_BYTES, times, strict=False)))
    return AlphaBeta(alpha_s=line.alpha_s, beta_s_per_byte=line.beta)


def _typical(move: Callable[[int], None], elements: int, control: Control) -> float:
    """Median of several timings; of slow exchanges one, whose noise is small beside it."""
    first_s = _timed(move, elements, control)
    if first_s > SLOW_S:
        return first_s
    return median([first_s, *(_timed(move, elements, control) for _ in range(REPEATS - 1))])


def _timed(move: Callable[[int], None], elements: int, control: Control) -> float:
    """Seconds per exchange of the slowest rank, all starting together, one exchange behind the other.

    A link that has rested lets a burst pass faster than its rate, so some exchanges come before the clock.
    """
    control.barrier("measuring a link")
    for _ in range(UNTIMED):
        move(elements)
    start_s = time.perf_counter()
    for _ in range(IN_A_ROW):
        move(elements)
    return max(control.gather((time.perf_counter() - start_s) / IN_A_ROW, "measuring a link"))
