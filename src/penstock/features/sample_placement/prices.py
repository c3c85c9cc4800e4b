"""Prices of samples that move: where NetMoE's assignment takes them, and what follows them. No torch.

Shapes: D groups of ranks with the same samples, B samples of such a group, I samples of an expert group, V
its devices (groups of ranks with the same samples), Y MoE layers, E experts, H positions of an expert group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from penstock.apportion import Counts
from penstock.features.routed import Batch, Move, Routed, RoutedStep, exchanged, gathered, nodes_of
from penstock.features.sample_placement.assign import Nearness, assign, sample_problem
from penstock.graph.task import Task
from penstock.mesh import Group
from penstock.ops import Op
from penstock.ops.work import DIGEST_BYTES, FLOAT32_BYTES
from penstock.placement import SPLIT, Replication
from penstock.routing.rows import Placed
from penstock.routing.samples import Plane, exchange_group_of
from penstock.routing.sizes import Floats, split_sizes
from penstock.step.shape import StepShape

INTEGER_BYTES: Final = 8
COUNT_BYTES: Final = 4
SOLVING_S, SOLVING_S_PER_CELL = 1e-3, 3e-7
"""Seconds to find new homes, fixed and per cell (see `_solving_s`): twice what a 2 GHz core needs."""


@dataclass(frozen=True, kw_only=True)
class SampleMover:
    """Assigns samples to homes, as NetMoE's tasks do.

    Attributes:
        solver: The name of the solver, see `SOLVERS`.
        predicts: Whether the rows of the next layer count.
    """

    work: Batch
    shape: StepShape
    solver: str = "network_simplex"
    predicts: bool = True

    def placed(self, counts_DBYE: Counts, replications: tuple[Replication, ...] = ()) -> Placed:
        """Return the places of samples with these counts before and after every layer.

        The next layer's gate is assumed to predict exactly what samples will ask of it.
        """
        groups, samples, layers, experts = counts_DBYE.shape
        by_sample, mesh = counts_DBYE.reshape(groups * samples, layers, experts), self.work.mesh
        moved_rows = round(self.work.seq_len * row_weight(self.work, self.shape))
        held = [np.arange(groups * samples).reshape(groups, samples)]
        for layer in range(layers):
            now_DB, predicts = held[-1].copy(), self.predicts and layer + 1 < layers
            replication, following = (
                replications[y] if y < len(replications) else Replication.none(self.work.placement, 0)
                for y in (layer, layer + 1)
            )
            for group in device_groups(self.work):
                devices = len(group.devices)
                ranks = [mesh.groups(Group.TENSOR)[device][0] for device in group.devices]
                places_V = np.array([mesh.place(rank, Group.EXPERT) for rank in ranks])
                node_V = nodes_of(self.work, ranks)
                near = Nearness.of_devices(following, np.array(group.device_P), node_V) if predicts else None
                for places in self._chunks():
                    cells = np.ix_(np.array(group.devices), np.arange(places.start, places.stop))
                    here_I = now_DB[cells].reshape(-1)
                    homes_I = np.repeat(np.arange(devices), len(here_I) // devices)
                    problem = sample_problem(
                        counts=_by_position(by_sample[here_I, layer], places_V[homes_I], replication),
                        homes=homes_I,
                        moved_rows=np.full(len(homes_I), moved_rows),
                        node_of_device=node_V,
                        predictions=by_sample[here_I, layer + 1] if predicts else None,
                        following=near,
                    )
                    order = np.argsort(assign(problem, self.solver), kind="stable")
                    now_DB[cells] = here_I[order].reshape(devices, -1)
            held.append(now_DB)
        return Placed(np.stack(held), replications)

    def _chunks(self) -> Iterator[range]:
        """Yield the places of a group's samples that stay together: those of a slice of a microbatch."""
        start = 0
        for microbatch in split_sizes(self.work.batch, self.shape.microbatches):
            for size in split_sizes(microbatch, self.shape.slices):
                yield range(start, start + size)
                start += size


def row_weight(work: Batch, shape: StepShape) -> float:
    """Return the number of rows in transit that weigh as much as what follows one token of a moved sample."""
    residual_bytes = 0 if shape.packed_residual else FLOAT32_BYTES * work.hidden_size
    shared_bytes = work.hidden_bytes(1) if work.shared_ffn_hidden_size else 0
    return (residual_bytes + shared_bytes) / work.wire_bytes(1)


def device_groups(work: Batch) -> list[Plane]:
    """Return the groups of devices that exchange rows, by their numbers in the world: samples move inside."""
    mesh, planes = work.mesh, list[Plane]()
    for ranks in mesh.groups(mesh.all_experts):
        world = list(dict.fromkeys(mesh.group(rank, Group.TENSOR) for rank in ranks))
        for plane in exchange_group_of(mesh, ranks[0], work.known_per_node).planes:
            planes.append(replace(plane, devices=tuple(world[device] for device in plane.devices)))
    return planes


def _by_position(counts_IE: Counts, places_I: Counts, replication: Replication) -> Counts:
    """Return rows of every sample by the position that computes them, [I, H]. places: in the expert group."""
    rows_IH, pairs = np.zeros((len(counts_IE), replication.positions), np.int64), replication.pairs
    by_expert, parts = (pairs.expert, pairs.position), pairs.parts
    for place in np.unique(places_I):
        here, own = np.flatnonzero(places_I == place), pairs.of(place)
        expert, position = (each[own] for each in by_expert)
        np.add.at(rows_IH, (here[:, None], position), counts_IE[here][:, expert] * parts[own])
    return rows_IH // SPLIT


# ---- what is moved -----------------------------------------------------------------------------------------


def _samples(step: RoutedStep, task: Task) -> range:
    """Return the places in a group's batch of a task's microbatch."""
    assert task.microbatch is not None, task
    sizes = split_sizes(step.sizes.batch, task.cut.microbatches)
    first = sum(sizes[: task.microbatch])
    return range(first, first + sizes[task.microbatch])


def _loads(step: RoutedStep, task: Task, rank: int) -> Move:
    """Return the move of every sample's rows by position, and those expected in the next layer."""
    del rank
    experts, replications = step.sizes.num_experts, step.placed.replications
    here = replications[step.column(task)].positions if replications else experts
    last = step.moe_layer(task) + 1 == sum(step.shape.moe_layers)
    row_bytes = COUNT_BYTES * (here + (0 if last else experts))
    return gathered(step, task, len(_samples(step, task)), row_bytes)


def _solving_s(step: RoutedStep, task: Task, seconds: float) -> float:
    """Return the seconds until the new homes of a microbatch are found, by all ranks alike."""
    del seconds
    mesh, groups = step.sizes.mesh, device_groups(step.sizes)
    solved = len(groups) // len(mesh.groups(mesh.all_experts))  # of those that a rank knows of
    samples = len(_samples(step, task))
    return SOLVING_S + SOLVING_S_PER_CELL * samples * solved * len(groups[0].devices) ** 2


def _moved(step: RoutedStep, task: Task) -> Floats:
    """Return samples from rank to rank, [P, P]; ranks that share them each move a part of the tokens."""
    mesh, places = step.sizes.mesh, _samples(step, task)
    moved_DD = step.placed.moved(step.column(task), places.start, places.stop)
    moved_PP = np.zeros((mesh.world_size, mesh.world_size))
    for ranks in zip(*mesh.groups(Group.TENSOR), strict=True):
        moved_PP[np.ix_(ranks, ranks)] = moved_DD if task.forward else moved_DD.T
    return moved_PP


def _sample_bytes(step: RoutedStep, task: Task, rank: int) -> int:
    """Return bytes that follow a sample from this rank, which may have a part of its tokens, with all labels.

    The residual stream and weights are float32, outputs of shared experts are as other products.
    """
    work = step.sizes
    tokens = split_sizes(work.seq_len, work.tp_size)[work.mesh.place(rank, Group.TENSOR)]
    apart, shares = not step.shape.packed_residual, work.shared_ffn_hidden_size > 0
    shared_bytes = round(work.hidden_bytes(1)) * shares
    values_bytes = apart * (work.hidden_size + work.top_k) * FLOAT32_BYTES + shared_bytes
    if not task.forward:
        return tokens * values_bytes
    return tokens * (values_bytes + work.top_k * INTEGER_BYTES) + (work.seq_len + 1) * INTEGER_BYTES


def _move(step: RoutedStep, task: Task, rank: int) -> Move:
    """Return the move of what follows a sample beside its rows: labels and so on; gradients back."""
    members = step.sizes.mesh.members(rank, task.axes)
    sent_WW = _moved(step, task)[np.ix_(members, members)].astype(np.int64)
    return exchanged(step, task, rank, sent_WW, _sample_bytes(step, task, rank))


def _load(step: RoutedStep, task: Task) -> Floats:
    """Return the load of what follows samples: the task's work assumes that all of them leave."""
    assumed_bytes, sample_bytes = step.work(task).sent_bytes, _sample_bytes(step, task, 0)
    load: Floats = step.argument(_moved(step, task)) * sample_bytes / max(assumed_bytes, 1)
    return load


def _crossing(step: RoutedStep, task: Task) -> Floats:
    """Return rows in transit that weigh as much as what follows samples from rank to rank."""
    work = step.sizes
    return _moved(step, task) * (work.seq_len * row_weight(work, step.shape) / work.tp_size)


ROUTED = {
    Op.SAMPLE_LOADS: Routed(move=_loads),
    Op.SAMPLE_PLACES: Routed(seconds=_solving_s),
    Op.SAMPLE_HOMES: Routed(move=lambda step, task, rank: gathered(step, task, 1, DIGEST_BYTES)),
    Op.SAMPLE_MOVE: Routed(move=_move, load=_load, crossing=_crossing),
}
