"""Which device every sample lives on from the next combine on: NetMoE's assignment, in two stages.

A combine can deliver a sample's rows to any device at no extra cost, so each MoE layer may choose new homes,
at which fewer rows of this combine and of the next dispatch leave the node, then the device. Stage 1 chooses
the node of every sample (a transportation problem, samples x nodes), stage 2, for each node by itself, the
device (NetMoE, Eq 6 to 10). Every device keeps as many samples as it has, so none gets more memory or work.
What moves with a sample (its residual) is part of the rows: a sample moves where that saves more than it
costs, and stays where it saves nothing.

Shapes: I samples, P devices, N nodes. A device is a rank of the expert group, or the ranks that share its
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.placing.integers import Floats, Ints
from penstock.placing.transport import Solver, find_solver

INTER_WEIGHT = 16
"""Rows inside a node that cost about as much as one across nodes, where stage 2 must weigh them.

Only where experts have replicas or guests: without them all devices of a node have the same rows across
nodes."""


@dataclass(frozen=True, kw_only=True)
class SampleProblem:
    """The rows that a sample costs on every device, and how many samples a device takes.

    node_of_device: [P], from 0. capacity: [P], samples that a device takes; they sum to I. homes: [I], the
    device of every sample now. inter_rows, intra_rows: [I, P], rows that cross nodes, and that cross devices
    inside the node, if sample i lives on device p, its own move included. Samples that must stay together,
    such as those of a chunk, are a problem by themselves. Raises ValueError where these contradict each
    other.
    """

    node_of_device: Ints
    capacity: Ints
    homes: Ints
    inter_rows: Ints
    intra_rows: Ints

    def __post_init__(self) -> None:
        shape = (len(self.homes), len(self.node_of_device))
        if self.inter_rows.shape != shape or self.intra_rows.shape != shape:
            found = f"inter_rows {self.inter_rows.shape}, intra_rows {self.intra_rows.shape}"
            raise ValueError(
                f"{found}: both need a row for each of {shape[0]} samples "
                f"and a column for each of {shape[1]} devices"
            )
        if len(self.capacity) != shape[1] or self.capacity.sum() != shape[0]:
            raise ValueError(
                f"capacities {self.capacity.tolist()} must be one for each of {shape[1]} devices, "
                f"with room for {shape[0]} samples in all"
            )

    @cached_property
    def devices_of_node(self) -> tuple[Ints, ...]:
        """By node, its devices, ascending."""
        nodes = int(self.node_of_device.max(initial=-1)) + 1
        return tuple(np.flatnonzero(self.node_of_device == node) for node in range(nodes))

    def rows(self, homes: Ints) -> tuple[int, int]:
        """Rows across nodes, and inside nodes, with samples on `homes` [I]."""
        samples = np.arange(len(homes))
        return int(self.inter_rows[samples, homes].sum()), int(self.intra_rows[samples, homes].sum())


def assign(problem: SampleProblem, solver: str = "network_simplex") -> Ints:
    """The device of every sample, [I]: every device gets as many samples as it takes.

    Ties keep a sample on its node, then on its device. Raises ValueError for an unknown solver.
    """
    solve = find_solver(solver)
    if not len(problem.homes):
        return problem.homes.copy()
    node_of_sample = _nodes(problem, solve)
    homes = np.empty_like(problem.homes)
    for node, devices in enumerate(problem.devices_of_node):
        samples = np.flatnonzero(node_of_sample == node)
        homes[samples] = _devices(problem, solve, samples, devices)
    return homes


def _nodes(problem: SampleProblem, solve: Solver) -> Ints:
    """Stage 1: the node of every sample, [I]."""
    groups, nodes = problem.devices_of_node, len(problem.devices_of_node)
    if nodes == 1:
        return np.zeros_like(problem.homes)
    room_N = np.array([problem.capacity[devices].sum() for devices in groups])
    costs_IN = np.stack([_mean_inter_rows(problem, devices) for devices in groups], axis=1)
    return solve(_keeping(costs_IN, problem.node_of_device[problem.homes], np.arange(nodes)), room_N)


def _mean_inter_rows(problem: SampleProblem, devices: Ints) -> Ints:
    """Rows across nodes of every sample on an average place of a node, rounded down, [I]."""
    capacity = problem.capacity[devices]
    mean: Ints = problem.inter_rows[:, devices] @ capacity // max(1, int(capacity.sum()))
    return mean


def _devices(problem: SampleProblem, solve: Solver, samples: Ints, devices: Ints) -> Ints:
    """Stage 2: the device of every one of a node's samples."""
    if len(devices) == 1 or not len(samples):
        return np.broadcast_to(devices[:1], samples.shape)
    cells = np.ix_(samples, devices)
    costs = INTER_WEIGHT * problem.inter_rows[cells] + problem.intra_rows[cells]
    found = solve(_keeping(costs, problem.homes[samples], devices), problem.capacity[devices])
    return devices[found]


def _keeping(costs_IC: Ints, present_I: Ints, places_C: Ints) -> Floats:
    """The costs, scaled so that all moves together weigh less than one row, and a move more than none.

    What all samples cost alike in one place is taken away: it changes no optimum, and so not which one is
    found.
    """
    moved_IC = present_I[:, None] != places_C
    costs_IC = costs_IC - costs_IC.min(axis=0)
    scaled_IC: Ints = costs_IC * (len(costs_IC) + 1) + moved_IC
    return scaled_IC.astype(np.float64)
