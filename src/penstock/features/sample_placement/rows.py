"""Rows that cross nodes and devices if a sample lives on a device: the costs of NetMoE's assignment.

A row is a token that one of its experts processes. Rows of the combine start where their experts are now;
rows of the next dispatch go from the new home to wherever the next layer's replication sends that device's
rows, so a row whose expert is on the device costs nothing, and a row to a replica in the
node no more than one inside the node.

Shapes: I samples, P devices, N nodes, E experts; S some samples, D the devices of one node. A device is a
rank of the expert group, or the ranks that share its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.placement import SPLIT, Replication
from penstock.routing.integers import Floats, Ints, exact_product


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """How much of an expert's rows stays on a device, and in its node, under one replication.

    device, node: [P, E], parts of SPLIT of the rows that start on device p and go to expert e. They are
    integers in float64, so that products with counts are exact and fast.
    """

    device: Floats
    node: Floats

    @staticmethod
    def of(replication: Replication, node_of_device: Ints) -> Nearness:
        """Return the nearness under a layer's replication. node_of_device: [P]."""
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

    node_of_device: [P]. homes: [I], the device of every sample now; each device keeps its number of samples.
    combine_rows: [I, P], rows of every sample by the device that computes them in this layer. moved_rows:
    [I], rows as wide as a token that move with a sample besides those of its experts (shared experts' output,
    and the residual where rows do not bring it). predictions: [I, E], expected rows by expert of the next MoE
    layer, and `following`, where they go from every device; both None where no MoE layer follows. Raises
    ValueError where sizes contradict each other.
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
    """Return the problem with rows given by position. counts: [I, positions], those of a device together."""
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
