"""How many rows cross nodes and devices if a sample lives on a device: the costs of NetMoE's assignment.

A row is a token that one of its experts works on. Rows of the combine start where their experts are now; rows
of the next dispatch go from the new home to wherever the next layer's hosting sends that device's rows, so a
row whose expert is hosted on the device costs nothing, a row to a guest or replica in the node no more than
one inside the node.

Shapes: I samples, P devices (ranks of the expert group), N nodes, E experts, S slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.placement import SPLIT, Hosting
from penstock.placing.integers import Floats, Ints, exact_product
from penstock.placing.samples import SampleProblem


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """How much of an expert's rows stays on a device, and in its node, under one hosting.

    device, node: [P, E], parts of SPLIT of the rows that start on device p and go to expert e. float64
    holding integers, so that products with counts are exact and quick.
    """

    device: Floats
    node: Floats

    @staticmethod
    def of(hosting: Hosting, node_of_device: Ints) -> Nearness:
        """From a layer's hosting. node_of_device: [P]."""
        ranks, experts = hosting.placement.ranks, hosting.placement.num_experts
        rank_of_position = np.repeat(np.arange(ranks), hosting.slots)
        rows = [
            (rank, expert, rank_of_position[position], parts)
            for rank, splits in enumerate(hosting.splits)
            for expert, shares in enumerate(splits)
            for position, parts in shares
        ]
        start, expert, target, parts = np.array(rows, np.int64).reshape(-1, 4).T
        device, node = np.zeros((ranks, experts)), np.zeros((ranks, experts))
        here = start == target
        near = node_of_device[start] == node_of_device[target]
        np.add.at(device, (start[here], expert[here]), parts[here])
        np.add.at(node, (start[near], expert[near]), parts[near])
        return Nearness(device=device, node=node)


def sample_problem(
    *,
    counts: Ints,
    homes: Ints,
    moved_rows: Ints,
    node_of_device: Ints,
    predictions: Ints | None = None,
    following: Nearness | None = None,
) -> SampleProblem:
    """The assignment problem of one layer and microbatch, or of one chunk of it.

    counts: [I, positions], rows of every sample by the position that computes them in this layer. homes: [I],
    the device of every sample now; each device keeps as many. moved_rows: [I], rows as wide as a token that
    move with a sample beside those of its experts (the residual; shared experts' output). node_of_device:
    [P]. predictions: [I, E], expected rows by expert of the next MoE layer, and `following`, where they go
    from every device; both None where no MoE layer follows.
    """
    samples, devices = len(homes), len(node_of_device)
    slots = counts.shape[1] // devices
    rows_IP = counts.reshape(samples, devices, slots).sum(axis=2)
    inter_IP, intra_IP = _combine_rows(rows_IP, node_of_device)
    if predictions is not None and following is not None:
        inter_next_IP, intra_next_IP = _dispatch_rows(predictions, following)
        inter_IP, intra_IP = inter_IP + inter_next_IP, intra_IP + intra_next_IP
    away_IP = node_of_device[homes][:, None] != node_of_device
    moved_IP = homes[:, None] != np.arange(devices)
    return SampleProblem(
        node_of_device=node_of_device,
        capacity=np.bincount(homes, minlength=devices),
        homes=homes,
        inter_rows=inter_IP + moved_rows[:, None] * away_IP,
        intra_rows=intra_IP + moved_rows[:, None] * (moved_IP & ~away_IP),
    )


def _combine_rows(rows_IP: Ints, node_of_device: Ints) -> tuple[Ints, Ints]:
    """Rows across and inside nodes on their way from experts to every possible home. rows: by device of the
    experts."""
    same_node_PP = (node_of_device[:, None] == node_of_device).astype(np.float64)
    in_node_IP = exact_product(rows_IP, same_node_PP)
    return rows_IP.sum(axis=1, keepdims=True) - in_node_IP, in_node_IP - rows_IP


def _dispatch_rows(predicted_IE: Ints, following: Nearness) -> tuple[Ints, Ints]:
    """Rows across and inside nodes on their way to the next layer's experts, from every possible home."""
    in_node_IP = exact_product(predicted_IE, following.node.T) // SPLIT
    in_device_IP = exact_product(predicted_IE, following.device.T) // SPLIT
    return predicted_IE.sum(axis=1, keepdims=True) - in_node_IP, in_node_IP - in_device_IP
