"""The device on which every sample lives from the next combine on: NetMoE's assignment, in two stages.

A combine can deliver a sample's rows to any device at no extra cost, so each MoE layer may choose new homes,
at which fewer rows of this combine and of the next dispatch leave the node, then the device. Stage 1 chooses
the node of every sample (a transportation problem, samples x nodes), stage 2, for each node separately, the
device (NetMoE, Eq 6 to 10). Every device keeps its number of samples, so none gets more memory or work. What
moves with a sample besides its rows (shared experts' output, the residual where rows do not bring it) counts
as rows: a sample moves where that saves more than it costs, and stays where it saves nothing.

Shapes: I samples, S those of a node, C places for them.
"""

from __future__ import annotations

import numpy as np

from penstock.features.sample_placement.rows import SampleProblem
from penstock.features.sample_placement.solvers import find_solver
from penstock.routing.integers import Floats, Ints

INTER_WEIGHT = 16
"""Rows inside a node that cost about as much as one across nodes, where stage 2 must weigh them.

Stage 2 must do so only where experts have replicas: otherwise all devices of a node have the same
rows across nodes.
"""


def assign(problem: SampleProblem, solver: str = "network_simplex") -> Ints:
    """Return the device of every sample, [I]: every device gets as many samples as it takes.

    Ties keep a sample on its node, then on its device. Raises ValueError for an unknown solver.
    """
    solve = find_solver(solver)
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
    """Return the costs of places: the rows kept there less than the most that any sample keeps, and a cost of
    moving that is below one row in all.

    What all samples keep alike in one place drops out: it changes no optimum, and so not which one is found.
    """
    lost_SC: Ints = (kept_SC.max(axis=0) - kept_SC) * (len(kept_SC) + 1)
    lost_SC += present_S[:, None] != places_C
    return lost_SC.astype(np.float64)
