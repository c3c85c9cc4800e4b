"""Rows that cross nodes and devices if a sample lives on a device: the costs of NetMoE's assignment.

A row is a token that one of its experts processes. Rows of the combine start where their experts are now;
rows of the next dispatch go from the new home to wherever the next layer's replication sends that device's
rows, so a row whose expert is on the device costs nothing, and a row to a replica in the
node no more than one inside the node.

Shapes: I samples, P devices, N nodes, E experts; S some samples, D the devices of one node. A device is a
rank of the expert group, or the ranks that share its tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final, cast

import numpy as np

from penstock.placement import SPLIT, Replication
from penstock.routing.sizes import Floats, Ints, exact_product


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """How much of an expert's rows stays on a device, and in its node, under one replication.

    Attributes:
        device, node: Parts of SPLIT of the rows that start on device p and go to expert e, [P, E]. They are
            integers in float64, so that products with counts are exact and fast.
    """

    device: Floats
    node: Floats

    @staticmethod
    def of(replication: Replication, node_of_device: Ints) -> Nearness:
        """Return the nearness under a layer's replication.

        Args:
            node_of_device: The node of every device, [P].
        """
        ranks, experts = replication.placement.ranks, replication.placement.num_experts
        rank_of_position = np.repeat(np.arange(ranks), replication.slots)
        start, expert, position, _, _ = replication.pairs
        target, parts = rank_of_position[position], replication.pairs.parts
        device, node = np.zeros((ranks, experts)), np.zeros((ranks, experts))
        here = start == target
        near = node_of_device[start] == node_of_device[target]
        np.add.at(device, (start[here], expert[here]), parts[here])
        np.add.at(node, (start[near], expert[near]), parts[near])
        return Nearness(device=device, node=node)

    @staticmethod
    def of_devices(replication: Replication, device_of_rank: Ints, node_of_device: Ints) -> Nearness:
        """Return the nearness of devices that may have several of the ranks [P] which hold experts.

        Such ranks have equal parts of the rows of their device.

        Args:
            device_of_rank: The device of every rank, [P].
            node_of_device: The node of every device.
        """
        by_rank = (
            Nearness.of(replication, each).node for each in (device_of_rank, node_of_device[device_of_rank])
        )
        device, node = (
            np.stack(
                [parts[device_of_rank == each].mean(axis=0) for each in range(len(node_of_device))]
            ).round()
            for parts in by_rank
        )
        return Nearness(device=device, node=node)


@dataclass(frozen=True, kw_only=True)
class SampleProblem:
    """The assignment problem of one layer and microbatch, or of one chunk of a microbatch.

    Attributes:
        node_of_device: The node of every device, [P].
        homes: The device of every sample now, [I]; each device keeps its number of samples.
        combine_rows: The rows of every sample by the device that computes them in this layer, [I, P].
        moved_rows: The rows as wide as a token that move with a sample besides those of its experts (shared
            experts' output, and the residual where rows do not bring it), [I].
        predictions: The expected rows by expert of the next MoE layer, [I, E]; None where no MoE layer
            follows.
        following: Where those rows go from every device; None where no MoE layer follows.

    Raises:
        ValueError: Where sizes contradict each other.
    """

    node_of_device: Ints
    homes: Ints
    combine_rows: Ints
    moved_rows: Ints
    predictions: Ints | None = None
    following: Nearness | None = None

    def __post_init__(self) -> None:
        samples, devices = len(self.homes), len(self.node_of_device)
        if self.combine_rows.shape != (samples, devices) or self.moved_rows.shape != (samples,):
            raise ValueError(
                f"rows {self.combine_rows.shape} and moved rows {self.moved_rows.shape}: "
                f"there are {samples} samples and {devices} devices"
            )
        if (self.predictions is None) != (self.following is None):
            raise ValueError(
                "predictions of the next layer and `following`, where its rows go, need each other"
            )
        if self.predictions is not None and self.following is not None:
            there, experts = self.following.node.shape, self.predictions.shape[1]
            if self.predictions.shape[0] != samples or there != (devices, experts):
                raise ValueError(
                    f"predictions {self.predictions.shape} for devices and experts {there}: "
                    f"there are {samples} samples and {devices} devices"
                )

    @cached_property
    def capacity(self) -> Ints:
        """Samples that every device takes, [P]: as many as it has."""
        return np.bincount(self.homes, minlength=len(self.node_of_device))

    @cached_property
    def devices_of_node(self) -> tuple[Ints, ...]:
        """The devices of every node that has some, ascending."""
        nodes = sorted(set(self.node_of_device.tolist()))
        return tuple(np.flatnonzero(self.node_of_device == node) for node in nodes)

    def kept_in_nodes(self) -> Ints:
        """Return the rows that stay in a node if a sample lives on an average device of the node, [I, N],
        less the rows that moving to another node sends."""
        order = np.concatenate(self.devices_of_node)
        sizes = np.array([len(devices) for devices in self.devices_of_node])
        firsts = np.cumsum(sizes) - sizes
        kept_IN: Ints = np.add.reduceat(self.combine_rows[:, order], firsts, axis=1)
        if self.predictions is not None and self.following is not None:
            parts_NE = np.add.reduceat(self.following.node[order], firsts, axis=0)
            near_IN = exact_product(self.predictions, parts_NE.T) / (SPLIT * sizes)
            kept_IN += near_IN.astype(np.int64)
        away_IN = self.node_of_device[self.homes][:, None] != self.node_of_device[order[firsts]]
        kept_IN -= self.moved_rows[:, None] * away_IN
        return kept_IN

    def kept_on_devices(self, samples: Ints, devices: Ints) -> tuple[Ints, Ints]:
        """Return the rows that stay in the node, and on the device, if samples [S] live on devices [D] of one
        node; both [S, D].

        Moving subtracts rows: out of the node from both, inside the node from those of the device alone.
        """
        combine_SD = self.combine_rows[samples[:, None], devices]
        moved_SD = self.moved_rows[samples][:, None] * (self.homes[samples][:, None] != devices)
        away_S = self.node_of_device[self.homes[samples]] != self.node_of_device[devices[0]]
        node_SD = (combine_SD.sum(axis=1) - self.moved_rows[samples] * away_S)[:, None]
        device_SD = combine_SD - moved_SD
        if self.predictions is not None and self.following is not None:
            next_SE = self.predictions[samples]
            node_SD = node_SD + exact_product(next_SE, self.following.node[devices].T) // SPLIT
            device_SD += exact_product(next_SE, self.following.device[devices].T) // SPLIT
        return node_SD, device_SD

    def rows(self, homes: Ints) -> tuple[int, int]:
        """Return the rows across nodes, and inside nodes, with samples on `homes` [I], moves included."""
        in_node = in_device = 0
        for devices in self.devices_of_node:
            samples = np.flatnonzero(np.isin(homes, devices))
            column_S1 = np.searchsorted(devices, homes[samples])[:, None]
            node_SD, device_SD = np.broadcast_arrays(*self.kept_on_devices(samples, devices))
            in_node += int(np.take_along_axis(node_SD, column_S1, axis=1).sum())
            in_device += int(np.take_along_axis(device_SD, column_S1, axis=1).sum())
        total = int(self.combine_rows.sum()) + (
            0 if self.predictions is None else int(self.predictions.sum())
        )
        return total - in_node, in_node - in_device


def sample_problem(
    *,
    counts: Ints,
    homes: Ints,
    moved_rows: Ints,
    node_of_device: Ints,
    predictions: Ints | None = None,
    following: Nearness | None = None,
) -> SampleProblem:
    """Return the problem with rows given by position.

    All other arguments are those of `SampleProblem`.

    Args:
        counts: The rows of every sample by position, those of a device together, [I, positions].
    """
    samples, devices = len(homes), len(node_of_device)
    slots = counts.shape[1] // devices
    return SampleProblem(
        node_of_device=node_of_device,
        homes=homes,
        combine_rows=counts.reshape(samples, devices, slots).sum(axis=2),
        moved_rows=moved_rows,
        predictions=predictions,
        following=following,
    )


# ---- assignment at the least total cost to places of limited room: two exact solvers by name --------------
#
# `network_simplex` solves the transportation problem, I x C numbers for I goers and C places (POT's solver).
# `kuhn_munkres` repeats every place once for each goer that it takes and solves the I x I assignment (NetMoE,
# Eq 10), which is what the paper does and takes far longer. Both have integral optima and no randomness.
# Costs are integers small enough to be exact in float64, so the same input gives the same places in every
# process.


Solver = Callable[[Floats, Ints], Ints]
"""Places [I] from costs [I, C] and room [C], which sums to I."""

MOST_PIVOTS: Final = 10**9
"""More than any problem takes; POT's own limit stops at 100,000, before thousands of samples are optimal."""
OPTIMAL: Final = 1
"""POT's code of a plan that cannot be improved."""
BACKENDS: Final = {
    "torch": "POT_BACKEND_DISABLE_PYTORCH",
    "jax": "POT_BACKEND_DISABLE_JAX",
    "cupy": "POT_BACKEND_DISABLE_CUPY",
    "tensorflow": "POT_BACKEND_DISABLE_TENSORFLOW",
}
"""Libraries that POT loads where it finds them, and the variable that prevents it."""


MANY: Final = 1 << 16
"""The number of costs from which guessing prices saves more time than it takes."""


def network_simplex(costs_IC: Floats, room_C: Ints) -> Ints:
    """Return places by POT's network simplex; with many costs, started from guessed prices of places."""
    prices_C = guessed_prices(costs_IC, room_C) if costs_IC.size >= MANY else None
    start = None if prices_C is None else ((costs_IC + prices_C).min(axis=1), -prices_C)
    alpha_I, beta_C = (None, None) if start is None else start
    room = np.ascontiguousarray(room_C, np.float64)
    plan_IC, *_, code = _emd()(
        np.ones(len(costs_IC)), room, np.ascontiguousarray(costs_IC), MOST_PIVOTS, 1, alpha_I, beta_C
    )
    assert code == OPTIMAL, f"POT's network simplex ends with code {code}"
    places_I: Ints = plan_IC.argmax(axis=1)
    return places_I


def guessed_prices(costs_IC: Floats, room_C: Ints, rounds: int = 20) -> Floats:
    """Return prices of places [C] at which about as many goers find a place the cheapest as it has room for.

    Places that too many choose become dearer, in ever smaller steps. Prices are integers, as the costs are.

    Args:
        costs_IC: The cost of every place for every goer.
        room_C: How many goers every place takes.
        rounds: How many times prices are corrected.
    """
    prices_C = np.zeros(len(room_C), np.int64)
    step = int(np.ptp(costs_IC, axis=1).sum()) // (2 * len(costs_IC))
    for _ in range(rounds):
        chosen_I = (costs_IC + prices_C).argmin(axis=1)
        above_C = np.bincount(chosen_I, minlength=len(room_C)) - room_C
        prices_C += step * above_C // np.maximum(room_C, 1)
        step = step * 4 // 5
    return prices_C.astype(np.float64)


def kuhn_munkres(costs_IC: Floats, room_C: Ints) -> Ints:
    """Return places by SciPy's assignment solver, with one column for every goer that a place takes."""
    from scipy.optimize import linear_sum_assignment

    place_of_column: Ints = np.repeat(np.arange(len(room_C)), room_C)
    _, columns = linear_sum_assignment(costs_IC[:, place_of_column])
    places_I: Ints = place_of_column[columns]
    return places_I


SOLVERS: Final[dict[str, Solver]] = {"network_simplex": network_simplex, "kuhn_munkres": kuhn_munkres}


@cache
def prepare(name: str) -> None:
    """Load what a solver needs, which takes a second, so that the first step does not wait for it."""
    SOLVERS[name](np.zeros((1, 1)), np.ones(1, np.int64))


@cache
def _emd() -> Callable[..., Any]:
    """Return the function below `ot.emd`, without checks that take three times as long as a small problem."""
    with _without_backends():
        from ot.lp.emd_wrap import emd_c
    return cast(Callable[..., Any], emd_c)


@contextmanager
def _without_backends() -> Iterator[None]:
    """Keep POT from importing tensor libraries that are not loaded yet: it gets numpy arrays alone."""
    added = [key for module, key in BACKENDS.items() if module not in sys.modules and key not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


# ---- the device on which every sample lives from the next combine on: NetMoE's assignment, in two stages --
#
# A combine can deliver a sample's rows to any device at no extra cost, so each MoE layer may choose new
# homes, at which fewer rows of this combine and of the next dispatch leave the node, then the device. Stage 1
# chooses the node of every sample (a transportation problem, samples x nodes), stage 2, for each node
# separately, the device (NetMoE, Eq 6 to 10). Every device keeps its number of samples, so none gets more
# memory or work. What moves with a sample besides its rows (shared experts' output, the residual where rows
# do not bring it) counts as rows: a sample moves where that saves more than it costs, and stays where it
# saves nothing.
#
# Shapes: I samples, S those of a node, C places for them.


INTER_WEIGHT = 16
"""Rows inside a node that cost about as much as one across nodes, where stage 2 must weigh them.

Stage 2 must do so only where experts have replicas: otherwise all devices of a node have the same
rows across nodes.
"""


def assign(problem: SampleProblem, solver: str = "network_simplex") -> Ints:
    """Return the device of every sample, [I]: every device gets as many samples as it takes.

    Ties keep a sample on its node, then on its device.
    """
    solve = SOLVERS[solver]
    homes = problem.homes.copy()
    if not len(homes):
        return homes
    # Stage 1: the node of every sample, numbered as the problem lists nodes.
    groups, node_I = problem.devices_of_node, np.zeros_like(homes)
    if len(groups) > 1:
        node_of_device = np.empty_like(problem.node_of_device)
        for node, devices in enumerate(groups):
            node_of_device[devices] = node
        room = np.array([problem.capacity[devices].sum() for devices in groups])
        present = node_of_device[problem.homes]
        node_I = solve(_costs(problem.kept_in_nodes(), present, np.arange(len(groups))), room)
    for node, devices in enumerate(groups):  # stage 2
        samples = np.flatnonzero(node_I == node)
        if len(devices) == 1 or not len(samples):
            homes[samples] = np.broadcast_to(devices[:1], samples.shape)
            continue
        # Rows that leave the device but not the node: node - device.
        node_SD, device_SD = problem.kept_on_devices(samples, devices)
        kept_SD = (INTER_WEIGHT - 1) * node_SD + device_SD
        costs = _costs(kept_SD, problem.homes[samples], devices)
        homes[samples] = devices[solve(costs, problem.capacity[devices])]
    return homes


def _costs(kept_SC: Ints, present_S: Ints, places_C: Ints) -> Floats:
    """Return the rows kept at places less the most of any sample, and below one row in all for moving."""
    lost_SC: Ints = (kept_SC.max(axis=0) - kept_SC) * (len(kept_SC) + 1)
    lost_SC += present_S[:, None] != places_C
    return lost_SC.astype(np.float64)


# ---- a sample's rows in the next MoE layer, predicted from its rows in this one: NetMoE's conditional
# table
#
# A prediction that is the same for all samples is useless: it adds a constant to a node's costs, and every
# assignment puts equally many samples there (SYSTEMS 5.4). Therefore the table is conditional: for the rows
# of expert e in this layer, the share that expert f of the next one has of the same samples, counted over
# past steps. All numbers are integers, so all ranks predict alike. The engine's other prediction, the next
# gate on this layer's input, needs no table.
#
# Shapes: I samples, E experts of this layer, F of the next.


FORGETTING = 8
"""The table keeps 1 - 1 / FORGETTING of itself whenever it learns."""
PARTS = 1 << 16
"""Parts into which an expert's rows are divided, so that shares are integers."""


class ConditionalTable:
    """Shares of the next layer's experts in the rows of samples, by expert of this layer."""

    def __init__(self, num_experts: int) -> None:
        self._seen_EF = np.zeros((num_experts, num_experts), np.int64)

    @property
    def seen(self) -> Ints:
        """The learned counts; writing into them replaces what the table knows."""
        return self._seen_EF

    def learn(self, counts_IE: Ints, following_IF: Ints) -> None:
        """Add the rows of the same samples in this and the next layer, forgetting old ones slowly."""
        together_EF = exact_product(counts_IE.T, following_IF)
        self._seen_EF = self._seen_EF - self._seen_EF // FORGETTING + together_EF

    def predict(self, counts_IE: Ints) -> Ints:
        """Return the rows of every sample by expert of the next layer, [I, F]; experts of this layer that
        were never seen add none."""
        totals_E = self._seen_EF.sum(axis=1, keepdims=True)
        parts_EF = self._seen_EF * PARTS // np.maximum(totals_E, 1)
        rows_IF: Ints = exact_product(counts_IE, parts_EF) // PARTS
        return rows_IF
