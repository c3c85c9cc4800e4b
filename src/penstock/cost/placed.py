"""Places of samples and experts in one step, layer by layer, once they move. No torch.

Shapes: D groups of ranks with the same samples, B samples of such a group, I samples of an expert group, V
its devices (groups of ranks with the same samples), Y MoE layers, E experts, P ranks of the world, R
microbatches, C slices, H positions of an expert group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from penstock.apportion import Counts
from penstock.config import ConfigError
from penstock.cost.moves import links_of, nodes_of
from penstock.cost.step import StepCost
from penstock.cost.workload import Workload
from penstock.decision import Decision, PlacementConfig
from penstock.features.expert_replicas.feature import why_not_exact
from penstock.features.expert_replicas.planners import find_planner, pays, planning_s
from penstock.features.expert_replicas.problem import ExpertCosts, ExpertProblem
from penstock.features.sample_placement.assign import assign
from penstock.features.sample_placement.rows import Nearness, sample_problem
from penstock.graph import Phase, RefusalError
from penstock.mesh import Group
from penstock.ops import Op
from penstock.placement import SPLIT, ExpertPlacement, Replication
from penstock.routing.replicas import rows_by_position
from penstock.routing.rows import by_source_and_target
from penstock.routing.samples import Plane, exchange_group_of
from penstock.routing.sizes import split_sizes
from penstock.step import StepShape

FLOAT32_BYTES = 4

LATE: Final = "not in the time there is; --budget 10 gives more"
"""Why moves are not weighed on a busy machine, or with very many ranks."""


@dataclass(frozen=True)
class Placed:
    """Places of samples and experts in one step.

    held_YDB: [Y + 1, D, B], which sample is at every place before each MoE layer, and after the last one;
    samples are numbered group by group, as the batch has them. replications: by MoE layer, the same in all
    expert groups; () = experts stay. planning_s: seconds in which a rank plans its share of the next step's
    replicas.
    """

    held_YDB: Counts
    replications: tuple[Replication, ...] = ()
    planning_s: float = 0.0

    def leaving(self, counts_DBYE: Counts) -> Counts:
        """Return counts of the samples that are at every place when rows leave for the experts of a layer."""
        return _seen(counts_DBYE, self.held_YDB[:-1])

    def arriving(self, counts_DBYE: Counts) -> Counts:
        """Return counts of the samples that are at every place when a layer's rows have come home."""
        return _seen(counts_DBYE, self.held_YDB[1:])

    def moved(self, moe_layer: int, first: int, last: int) -> Counts:
        """Return how many samples of places `first` to `last` go from group to group in a layer, [D, D]."""
        before_DB, after_DB = self.held_YDB[moe_layer : moe_layer + 2, :, first:last]
        groups, samples = after_DB.shape
        origin = np.empty(self.held_YDB[0].size, np.int64)
        origin[before_DB] = np.arange(groups)[:, None]
        found = np.zeros((groups, groups), np.int64)
        np.add.at(found, (origin[after_DB].ravel(), np.repeat(np.arange(groups), samples)), 1)
        return found

    @staticmethod
    def still(counts_DBYE: Counts, replications: tuple[Replication, ...] = ()) -> Placed:
        """Return the places of a step where every sample stays where the batch has it."""
        groups, samples, layers, _ = counts_DBYE.shape
        places_DB = np.arange(groups * samples).reshape(groups, samples)
        return Placed(np.broadcast_to(places_DB, (layers + 1, groups, samples)), replications)


def _seen(counts_DBYE: Counts, held_YDB: Counts) -> Counts:
    groups, samples, layers, experts = counts_DBYE.shape
    by_sample = counts_DBYE.reshape(groups * samples, layers, experts)
    return np.stack([by_sample[held_DB, y] for y, held_DB in enumerate(held_YDB)], axis=2)


@dataclass(frozen=True, eq=False)
class Evidence:
    """Routing of two consecutive steps: token copies [D, B, Y, E] of samples for experts.

    A sample of a large step has fewer layers, and fewer groups of ranks: whole expert groups and nodes that
    stand for all others.

    Attributes:
        before_DBYE: Of the step from whose loads replicas are planned.
        now_DBYE: Of the step that is priced.
        columns: By MoE layer of the step, the layer of the arrays that stands for it; () = each has its own.
    """

    before_DBYE: Counts
    now_DBYE: Counts
    columns: tuple[int, ...] = ()

    @property
    def groups(self) -> int:
        """Groups of ranks with the same samples that are known."""
        return len(self.now_DBYE)

    @property
    def known_layers(self) -> int:
        """MoE layers that are known."""
        return int(self.now_DBYE.shape[2])

    def by_layer(self, by_column: Counts) -> Counts:
        """Return what is known of some layers for every MoE layer of the step, along the first axis."""
        return by_column[list(self.columns)] if self.columns else by_column

    def of_layers(self, moe_layers: Sequence[int]) -> Evidence:
        """Return the evidence of some of the MoE layers."""
        kept = [self.columns[layer] for layer in moe_layers] if self.columns else list(moe_layers)
        return Evidence(self.before_DBYE[:, :, kept], self.now_DBYE[:, :, kept])

    def part_of(self, work: Workload) -> Workload:
        """Return the workload with the ranks alone that are known."""
        return work.part(self.groups)


# ---- samples -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SampleMover:
    """Assigns samples to homes, as NetMoE's tasks do. predicts: whether the next layer counts."""

    work: Workload
    shape: StepShape
    solver: str = "network_simplex"
    predicts: bool = True

    @staticmethod
    def of(how: PlacementConfig, work: Workload, shape: StepShape) -> SampleMover:
        """Return the mover that section [placement] describes."""
        return SampleMover(work=work, shape=shape, solver=how.solver, predicts=how.prediction != "none")

    def placed(self, counts_DBYE: Counts, replications: tuple[Replication, ...] = ()) -> Placed:
        """Return the places of samples with these counts before and after every layer.

        The next layer's gate is assumed to predict exactly what samples will ask of it.
        """
        groups, samples, layers, experts = counts_DBYE.shape
        by_sample = counts_DBYE.reshape(groups * samples, layers, experts)
        held = [np.arange(groups * samples).reshape(groups, samples)]
        for layer in range(layers):
            now_DB = held[-1].copy()
            replication, following = (
                replications[y] if y < len(replications) else Replication.none(self.work.placement, 0)
                for y in (layer, layer + 1)
            )
            for group in device_groups(self.work):
                for places in self._chunks():
                    cells = np.ix_(np.array(group.devices), np.arange(places.start, places.stop))
                    here_I = now_DB[cells].reshape(-1)
                    ahead = by_sample[here_I, layer + 1] if self.predicts and layer + 1 < layers else None
                    homes_I = self._homes(by_sample[here_I, layer], ahead, group, replication, following)
                    order = np.argsort(homes_I, kind="stable")
                    now_DB[cells] = here_I[order].reshape(len(group.devices), -1)
            held.append(now_DB)
        return Placed(np.stack(held), replications)

    def _homes(
        self,
        counts_IE: Counts,
        ahead_IE: Counts | None,
        group: Plane,
        replication: Replication,
        following: Replication,
    ) -> Counts:
        mesh, devices = self.work.mesh, len(group.devices)
        ranks = [mesh.groups(Group.TENSOR)[device][0] for device in group.devices]
        places_V = np.array([mesh.place(rank, Group.EXPERT) for rank in ranks])
        node_V = nodes_of(self.work, ranks)
        homes_I = np.repeat(np.arange(devices), len(counts_IE) // devices)
        near = None if ahead_IE is None else Nearness.of_devices(following, np.array(group.device_P), node_V)
        problem = sample_problem(
            counts=_by_position(counts_IE, places_V[homes_I], replication),
            homes=homes_I,
            moved_rows=np.full(len(homes_I), round(self.work.seq_len * row_weight(self.work, self.shape))),
            node_of_device=node_V,
            predictions=ahead_IE,
            following=near,
        )
        return assign(problem, self.solver)

    def _chunks(self) -> Iterator[range]:
        """Yield the places of a group's samples that stay together: those of a slice of a microbatch."""
        start = 0
        for microbatch in split_sizes(self.work.batch, self.shape.microbatches):
            for size in split_sizes(microbatch, self.shape.slices):
                yield range(start, start + size)
                start += size


def row_weight(work: Workload, shape: StepShape) -> float:
    """Return the number of rows in transit that weigh as much as what follows one token of a moved sample."""
    residual_bytes = 0 if shape.packed_residual else FLOAT32_BYTES * work.hidden_size
    shared_bytes = work.hidden_bytes(1) if work.shared_ffn_hidden_size else 0
    return (residual_bytes + shared_bytes) / work.wire_bytes(1)


def device_groups(work: Workload) -> list[Plane]:
    """Return the groups of devices that exchange rows, by their numbers in the world: samples move inside."""
    mesh, found = work.mesh, list[Plane]()
    for ranks in mesh.groups(mesh.all_experts):
        world = list(dict.fromkeys(mesh.group(rank, Group.TENSOR) for rank in ranks))
        for plane in exchange_group_of(mesh, ranks[0], work.known_per_node).planes:
            found.append(replace(plane, devices=tuple(world[device] for device in plane.devices)))
    return found


def _by_position(counts_IE: Counts, places_I: Counts, replication: Replication) -> Counts:
    """Return rows of every sample by the position that computes them, [I, H]. places: in the expert group."""
    found, pairs = np.zeros((len(counts_IE), replication.positions), np.int64), replication.pairs
    by_expert, parts = (pairs.expert, pairs.position), pairs.parts
    for place in np.unique(places_I):
        here, own = np.flatnonzero(places_I == place), pairs.of(place)
        expert, position = (each[own] for each in by_expert)
        np.add.at(found, (here[:, None], position), counts_IE[here][:, expert] * parts[own])
    return found // SPLIT


# ---- experts -----------------------------------------------------------------------------------------------


def expert_costs(even: StepCost) -> ExpertCosts:
    """Return a step's sizes and cluster for a planner of replicas; slack as in Eq 8.

    Where replicas were seen to travel longer than their bytes by the links, these are more bytes.
    """
    work, cluster = even.workload, even.cluster
    tokens = work.tokens(0, 1)
    forward = partial(cluster.compute_s, phase=Phase.FORWARD, moved_bytes=0.0)
    rows_s = [forward(Op.EXPERTS, flops=work.expert_flops(n)) for n in (0, tokens)]
    return ExpertCosts(
        links=links_of(work, cluster, work.mesh.groups(Group.EXPERT)[0]),
        row_s=(rows_s[1] - rows_s[0]) / tokens,
        row_bytes=work.wire_bytes(1),
        parameter_bytes=work.expert_bytes * cluster.prolonged(Op.REPLICA_PARAMETERS),
        gradient_bytes=work.expert_bytes * cluster.prolonged(Op.REPLICA_GRADIENTS),
        other_s=forward(Op.ATTENTION, flops=work.attention_flops(tokens)),
    )


def splits_exactly(choice: Decision, work: Workload) -> bool:
    """Return whether rows are split among the homes of their expert by the loads of their own step.

    Raises ConfigError where that was asked for and is impossible.
    """
    joined = "moe.one_copy_per_rank=true sends one row for several experts" if work.one_copy_per_rank else ""
    why = why_not_exact(choice) or joined
    if why and choice.num_replica_slots and choice.split == "exact":
        hint = "Leave it out, or set placement.split=last_step."
        raise ConfigError(
            "placement.split", choice.split, f"{why}, so loads of a step come too late for it", hint
        )
    return choice.split != "last_step" and not why


def planned_replications(
    loads_YPE: Counts,
    planner: str,
    replica_slots: int,
    placement: ExpertPlacement,
    costs: Sequence[ExpertCosts],
    exact: bool = True,
    ends: Callable[[], bool] = lambda: False,
) -> tuple[Replication, ...]:
    """Return the replication of every layer by a planner's name, from the loads of the step before.

    A layer homes nothing where replication would not have paid. costs: by layer. ends: tells, before every
    layer, whether the time is over. Raises RefusalError if it is.
    """
    plan, replications = find_planner(planner), list[Replication]()
    common = partial(ExpertProblem, placement=placement, replica_slots=replica_slots, exact=exact)
    for loads_PE, cost in zip(loads_YPE, costs, strict=True):
        if ends():
            raise RefusalError(LATE)
        problem = common(loads=loads_PE, costs=cost)
        replication = plan(problem)
        replications.append(
            replication if pays(problem, replication) else Replication.none(placement, replica_slots)
        )
    return tuple(replications)


def planning_share(work: Workload, layers: int) -> float:
    """Return the part of planning all layers' replicas on the busiest rank: each rank plans some layers."""
    return -(-layers // work.mesh.size(work.mesh.all_experts)) / max(1, layers)


def replica_planning_s(work: Workload, planner: str, layers: int) -> float:
    """Return the seconds in which the busiest rank plans its share of the layers, on a thread of the host."""
    return planning_share(work, layers) * layers * planning_s(planner, work.ep_size, work.num_experts)


def rank_loads(counts_DBYE: Counts, shape: StepShape, work: Workload) -> Counts:
    """Return rows by place in an expert group, over all such groups, [Y, ranks of an expert group, E]."""
    rows_PYE = work.cut(shape).rows_in_all(counts_DBYE)
    places = [work.mesh.place(rank, Group.EXPERT) for rank in range(work.world_size)]
    found = np.zeros((work.ep_size, *rows_PYE.shape[1:]), np.int64)
    np.add.at(found, places, rows_PYE)
    return found.transpose(1, 0, 2)


def received_rows(counts_DBYE: Counts, placed: Placed | None, shape: StepShape, work: Workload) -> Counts:
    """Return the rows that every rank's experts and replicas receive in a step, by MoE layer, [Y, P].

    placed: where samples and replicas are; None = nothing moves.
    """
    leaving = counts_DBYE if placed is None else placed.leaving(counts_DBYE)
    replications = () if placed is None else placed.replications
    if not replications:  # pieces need not be told apart
        rows_PYE = work.cut(shape).rows_in_all(leaving)
        return np.stack([_received(rows_PYE[:, None, None, y], (), y, work) for y in range(leaving.shape[2])])
    rows_PRCYE = work.cut(shape).rows(leaving)
    return np.stack(
        [_received(rows_PRCYE[..., y, :], replications, y, work) for y in range(leaving.shape[2])]
    )


def _received(rows_PRCE: Counts, replications: tuple[Replication, ...], layer: int, work: Workload) -> Counts:
    """Return the rows that every rank receives in one layer, [P]; homes share each slice by itself."""
    if replications:
        replication, pieces = replications[layer], rows_PRCE.reshape(len(rows_PRCE), -1, work.num_experts)
        expert_slots = [
            rows_by_position(pieces[:, n], replication, work.mesh) for n in range(pieces.shape[1])
        ]
        by_rank = np.sum(expert_slots, axis=0).reshape(
            -1, work.ep_size * work.etp_size, work.ep_size, replication.slots
        )
    else:
        by_rank = by_source_and_target(rows_PRCE.sum(axis=(1, 2)), work.placement, work.etp_size)
        by_rank = by_rank.reshape(-1, work.ep_size * work.etp_size, *by_rank.shape[3:])
    received: Counts = np.repeat(by_rank.sum(axis=(1, 3)).reshape(-1), work.etp_size)
    return received
