"""Makes the record of a step that has ended, with figures of its loads, and the loss on held-out text.

Loads are also written to `routing.jsonl`, for virtual devices and planners to replay.
Shapes: B samples, P ranks, Y MoE layers, E experts, H ranks of an expert group. Loads [P, Y, E]: rows that
every rank has for every expert.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import stdtrit

from penstock.apportion import Counts
from penstock.config import UNSET, ConfigError
from penstock.device import device_of
from penstock.features.expert_replicas.planners import overlap
from penstock.features.expert_replicas.problem import LayerLoad
from penstock.mesh import Group, Mesh, node_of
from penstock.placement import ExpertPlacement, Replication
from penstock.routing.sizes import Floats
from penstock.runtime import PipelinedStack
from penstock.topology import Control, Layout
from penstock.trace import TaskRecord, occupation
from penstock.train.batches import Batch
from penstock.train.config import RunConfig
from penstock.train.metrics import StepMetrics
from penstock.train.output import written
from penstock.train.pilot import Pilot
from penstock.workloads import RecordedModel, RoutingRecorder
from penstock.writing import LineFile

PLAN_DIGITS = 8
KIBIBYTE = 1024


def measured(
    stack: PipelinedStack,
    pilot: Pilot,
    records: Sequence[TaskRecord],
    *,
    step: int,
    loss: float,
    rate: float,
    norm: float,
    iteration_s: float,
    accepted: bool,
) -> StepMetrics:
    """Return the record of a stack's last step, whose statistics are on the host; all ranks call it.

    Args:
        records: This rank's records of the step.
        loss: The loss that was minimised, balance terms included.
        rate: The learning rate.
        norm: The norm of the gradients before clipping.
        accepted: Whether the step has changed parameters.
    """
    statistics, device = stack.statistics, stack.machinery.device
    assert statistics is not None, "a step has ended"
    used = occupation(records, stack.machinery.layout.mesh.silent)
    tokens_per_s = float(statistics.tokens) / iteration_s
    chosen_YE = statistics.chosen_YE
    layers, held_bytes = len(chosen_YE), device_of(device).peak_memory_bytes(device)
    rows_dropped = None
    if stack.moe.capacity_factor is not None and stack.moe.kind == "token":  # else routing drops none
        rows_dropped = tuple((statistics.dropped_Y / chosen_YE.sum(1).clamp(min=1)).tolist())
    # The loss has sums over MoE layers, metrics have means.
    balance: dict[str, Any] = {f"aux_loss_{stack.balance.group}": float(statistics.aux) / layers}
    return StepMetrics(
        step=step,
        loss=float(statistics.cross_entropy),
        total_loss=loss,
        learning_rate=rate,
        grad_norm=norm,
        iteration_s=iteration_s,
        tokens_per_s=tokens_per_s,
        exposed_communication_s=used.exposed_s,
        communication_s=used.communication_s,
        compute_s=used.compute_s,
        tokens_per_expert_max_over_mean=float(
            (chosen_YE.amax(1) / chosen_YE.mean(1).clamp(min=1e-9)).mean()  # 0 where nothing was routed
        ),
        plan=stack.plan.schedule.digest[:PLAN_DIGITS],
        all_reduce_chunk_bytes=pilot.all_reduce_chunk_bytes,
        skipped=None if accepted else True,
        z_loss=float(statistics.z) / layers,
        aux_loss_by_layer=tuple(statistics.aux_Y.tolist()),
        rows_dropped=rows_dropped,
        repeated_steps=stack.bounds.repeats if stack.bounds.repeats_steps else None,
        model_flops_per_s=pilot.flops.per_token * tokens_per_s,
        model_flops_utilisation=pilot.flops.utilisation(tokens_per_s),
        peak_memory_bytes=held_bytes or KIBIBYTE * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        **balance,
        **load_figures(stack),
    )


def load_figures(stack: PipelinedStack) -> dict[str, Any]:
    """Return how even the step's loads were, by names of metrics; {} where they were not gathered.

    All ranks call it: each expert group's replicas are known only to its own ranks.
    """
    loads_PYE, layout = stack.loads.last, stack.machinery.layout
    if loads_PYE is None:
        return {}
    replica_rows, replicas = None, stack.loads.replications
    if replicas:
        replica_rows = RowsOfReplicas.of_group(
            loads_PYE, replicas, layout.mesh, layout.node_size, layout.rank
        )
        if len(layout.mesh.groups(Group.EXPERT_SHARDS)) > 1:
            share = replica_rows.share(layout.mesh, layout.rank)
            everyone = stack.machinery.control.gather(share, "adding up what replicas compute")
            replica_rows = RowsOfReplicas.joined(everyone)
    return figures_of(
        loads_PYE,
        [part.moe.placement for part in stack.parts.parts if part.moe is not None],
        layout.mesh,
        layout.node_size,
        replica_rows=replica_rows,
        before_PYE=stack.loads[-2] if len(stack.loads) > 1 else None,
        fixed_slots=not stack.moe.exchanges_counts and stack.moe.bound_factor is None,
    )


CONFIDENCE = 0.95


def batch_loss(stack: PipelinedStack, batch: Batch) -> torch.Tensor:
    """Run one batch of this rank, on its device, through the stack and return its loss."""
    loss: torch.Tensor = stack(
        batch.tokens_BL,
        batch.labels_BL,
        batch.sample_ids_B,
        largest_batch=batch.largest_batch,
        documents_BL=batch.documents_BL,
    )
    return loss


class Evaluation(NamedTuple):
    """The loss on held-out text.

    Attributes:
        loss: Mean cross entropy per token, nats, the same on all ranks, without balance terms.
        noise: The loss of all held-out text is below `loss + noise` with 95 % confidence, judged by how
            batches differ (Student's t); None for a single batch.
    """

    loss: float
    noise: float | None


def evaluate(stack: PipelinedStack, batches: Iterable[Batch]) -> Evaluation:
    """Return the loss on some batches, without training on them.

    Raises:
        ConfigError: If none has a label.
    """
    stack.eval()
    totals, counts = [], []
    with torch.no_grad():
        for batch in batches:
            batch_loss(stack, batch.on(stack.machinery.device))
            assert stack.statistics is not None
            statistics, _ = stack.statistics.on_host()
            totals.append(float(statistics.cross_entropy * statistics.valid))
            counts.append(float(statistics.labels))
    stack.train()
    if not sum(counts):
        why = f"no token is to be predicted in {len(counts)} batches of held-out text: no label counts"
        raise ConfigError("data.held_out_fraction", UNSET, why, "Give more text, or longer documents.")
    losses = [total / count for total, count in zip(totals, counts, strict=True) if count]
    noise = None
    if len(losses) > 1:
        reach = float(stdtrit(len(losses) - 1, CONFIDENCE))
        noise = reach * float(np.std(losses, ddof=1)) / math.sqrt(len(losses))
    return Evaluation(sum(totals) / sum(counts), noise)


class RowsOfReplicas(NamedTuple):
    """How rows are spread where experts have replicas.

    Attributes:
        rows_PY: Rows that every rank computes, by MoE layer, those of its replicas included.
        away_Y: Rows that another node computes, by MoE layer.
    """

    rows_PY: Floats
    away_Y: Floats

    @staticmethod
    def of_group(
        loads_PYE: npt.NDArray[np.int32],
        replications: Sequence[Replication],
        mesh: Mesh,
        node_size: int,
        rank: int,
    ) -> RowsOfReplicas:
        """Return the rows of ranks that share experts with `rank`; zeros for others, whose replicas differ.

        Args:
            loads_PYE: The step's loads on all ranks.
            replications: Replicas of the ranks that share experts, by MoE layer.
            node_size: Consecutive ranks in one node; 0 = unknown.
        """
        node_P, holders = np.array(_nodes(mesh, node_size)), mesh.size(Group.EXPERT)
        rows_PY, away_Y = np.zeros(loads_PYE.shape[:2]), np.zeros(loads_PYE.shape[1])
        ranks_HS = np.array(mesh.members(rank, Group.EXPERT_SHARDS)).reshape(holders, -1)
        loads_HYE, node_H = loads_PYE[ranks_HS].sum(axis=1, dtype=np.int64), node_P[ranks_HS[:, 0]]
        for layer, replication in enumerate(replications):
            traffic_HH = LayerLoad.of(loads_HYE[:, layer], replication, node_H.tolist()).traffic
            rows_PY[ranks_HS, layer] = traffic_HH.sum(axis=0)[:, None]
            away_Y[layer] = traffic_HH[node_H[:, None] != node_H].sum()
        return RowsOfReplicas(rows_PY, away_Y)

    def share(self, mesh: Mesh, rank: int) -> tuple[Floats, Floats]:
        """Return what `rank` tells all others.

        Returns:
            Its own rows, [Y], and, if it is the first of its group, the group's rows that cross nodes, [Y];
                else zeros.
        """
        first = mesh.members(rank, Group.EXPERT_SHARDS)[0] == rank
        return self.rows_PY[rank], self.away_Y * first

    @staticmethod
    def joined(shares: Sequence[tuple[Floats, Floats]]) -> RowsOfReplicas:
        """Return the rows of all groups.

        Args:
            shares: What `share` returns on every rank, by rank.
        """
        rows, away = zip(*shares, strict=True)
        return RowsOfReplicas(np.stack(rows), np.sum(away, axis=0))


def figures_of(
    loads_PYE: npt.NDArray[np.int32],
    placements: Sequence[ExpertPlacement],
    mesh: Mesh,
    node_size: int,
    *,
    replica_rows: RowsOfReplicas | None = None,
    before_PYE: npt.NDArray[np.int32] | None = None,
    fixed_slots: bool = False,
) -> dict[str, tuple[float, ...] | None]:
    """Return figures of one step, each by MoE layer, named as in `StepMetrics`.

    Args:
        loads_PYE: Loads of the step.
        placements: Owners of the experts, by MoE layer.
        mesh: The mesh of all ranks.
        node_size: Consecutive ranks in one node; 0 = unknown.
        replica_rows: Rows of all expert groups; None = no replicas.
        before_PYE: Loads of the step before, if there was one.
        fixed_slots: Whether a rank sends every expert as many rows, used or not.

    Returns:
        expert_load_max_over_mean, rank_load_max_over_mean: The busiest expert's or rank's rows over the mean;
            1 = balance.
        expert_load_entropy: The entropy of the experts' shares over that of equal ones; 1 = balance, 0 = one
            expert has all.
        rank_rows_max_over_mean: The busiest rank's rows over the mean where rows of replicas are included.
        rows_crossing_nodes: The share of rows that another node computes; None with one node.
        loads_in_common: What loads have in common with the step before, as `overlap` defines it; None without
            such a step.
    """
    loads, nodes = loads_PYE.astype(np.int64), _nodes(mesh, node_size)
    owned_PY = rank_loads(loads, placements, mesh)
    rows_PYE = np.ones_like(loads) if fixed_slots else loads
    if replica_rows is None:  # owners compute all rows: away are those of a rank on another node
        node_P, owners_YE = np.array(nodes), np.array([placement.owners for placement in placements])
        ranks_PH = np.array([mesh.members(rank, Group.EXPERT) for rank in range(len(nodes))])
        abroad_PYE = node_P[ranks_PH][:, owners_YE] != node_P[:, None, None]
        away_Y = (rows_PYE * abroad_PYE).sum(axis=(0, 2), dtype=np.float64)
        replica_rows = RowsOfReplicas(rank_loads(rows_PYE, placements, mesh).astype(np.float64), away_Y)
    rows_PY, away_Y = replica_rows
    in_common = None
    if before_PYE is not None:
        pairs = zip(before_PYE.astype(np.int64).swapaxes(0, 1), loads.swapaxes(0, 1), strict=True)
        in_common = tuple(overlap(before_PE, now_PE) for before_PE, now_PE in pairs)
    crossing = _floats(away_Y / np.maximum(rows_PYE.sum(axis=(0, 2)), 1)) if len(set(nodes)) > 1 else None
    return {
        "expert_load_max_over_mean": _floats(max_over_mean(loads.sum(axis=0))),
        "rank_load_max_over_mean": _floats(max_over_mean(owned_PY.T)),
        "expert_load_entropy": _floats(relative_entropy(loads.sum(axis=0))),
        "rank_rows_max_over_mean": _floats(max_over_mean(rows_PY.T)),
        "rows_crossing_nodes": crossing,
        "loads_in_common": in_common,
    }


def max_over_mean(loads: Counts | Floats) -> Floats:
    """Return the largest load over the mean along the last axis; 0 without loads."""
    ratio: Floats = loads.max(axis=-1) / np.maximum(loads.mean(axis=-1), 1e-9)
    return ratio


def relative_entropy(loads: Counts) -> Floats:
    """Return the entropy of shares along the last axis, over its largest value; 1 for a single share."""
    share = loads / np.maximum(loads.sum(axis=-1, keepdims=True), 1)
    nats = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=-1)
    most = np.log(loads.shape[-1])
    relative: Floats = nats / most if most else np.ones_like(nats)
    return relative


def rank_loads(loads_PYE: Counts, placements: Sequence[ExpertPlacement], mesh: Mesh) -> Counts:
    """Return the rows that the experts of every rank get, [P, Y]: all shards of an expert get its rows."""
    loads_PY, holders = np.zeros(loads_PYE.shape[:2], dtype=np.int64), mesh.size(Group.EXPERT)
    for members in mesh.groups(Group.EXPERT_SHARDS):
        together_YE = loads_PYE[list(members)].sum(axis=0)
        places = [mesh.place(rank, Group.EXPERT) for rank in members]
        for layer, placement in enumerate(placements):
            by_place = np.bincount(placement.owners, together_YE[layer], minlength=holders)
            loads_PY[list(members), layer] = by_place[places].astype(np.int64)
    return loads_PY


def _nodes(mesh: Mesh, node_size: int) -> list[int]:
    """Return the node of every rank; all the same where nodes are not known."""
    return [node_of(rank, node_size) if node_size else 0 for rank in range(mesh.world_size)]


def _floats(numbers: Floats) -> tuple[float, ...]:
    return tuple(map(float, numbers))


ROUTING_FILE = "routing.jsonl"
Known = tuple[Counts, Counts]
"""Numbers of samples, and their loads [B, E]."""


class RoutingFile:
    """Writes, on rank 0, the loads of each step; with `routing_samples` also those of every sample.

    Samples' loads are gathered outside the step.

    Args:
        done: Number of steps done before; records of later steps are dropped.
    """

    def __init__(self, config: RunConfig, control: Control, layout: Layout, done: int) -> None:
        self._control = control
        self._samples = config.output.routing_samples
        self._recorder: RoutingRecorder | None = None
        self.records: list[LineFile] = []
        if layout.rank == 0:
            model = RecordedModel(
                moe_layers=sum(config.model.has_experts),
                num_experts=config.moe.num_experts,
                top_k=config.moe.top_k,
                experts_choose=config.moe.kind == "expert",
            )
            path = config.output.dir / ROUTING_FILE
            try:
                self._recorder = RoutingRecorder(path, model, resume_step=done)
            except ConfigError as error:
                why = f"{path} cannot be continued: it {error.why}"
                raise ConfigError(
                    "output.routing", True, why, "Mend the line, or move the file away."
                ) from error
            self.records.append(self._recorder.file)

    def record(self, step: int, stack: PipelinedStack) -> None:
        """Record the step; with samples this costs an exchange of all their loads."""
        listed = None
        if self._samples:
            own = [
                (
                    np.concatenate([each.ids_B.cpu().numpy() for each in layer]),
                    np.concatenate([each.chosen_BE.cpu().numpy() for each in layer]),
                )
                for layer in stack.loads.of_samples
            ]
            everyone = self._control.gather(own, "collecting how samples were routed")
            listed = [sample.tolist() for sample in _joined(everyone)]
        if self._recorder is not None:
            assert stack.statistics is not None, "a step has ended"
            with written(self._recorder.file.path):
                self._recorder.write(step, stack.statistics.chosen_YE.tolist(), listed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._recorder is not None:
            self._recorder.close()


def _joined(everyone: Sequence[Sequence[Known]]) -> Counts:
    """Return the loads of all samples, [B, Y, E], in the order in which ranks first hold them."""
    layers = [tuple(map(np.concatenate, zip(*ranks, strict=True))) for ranks in zip(*everyone, strict=True)]
    place = {number: i for i, number in enumerate(dict.fromkeys(layers[0][0].tolist()))}
    loads_BYE = np.zeros((len(place), len(layers), layers[0][1].shape[1]), dtype=np.int64)
    for layer, (ids_B, chosen_BE) in enumerate(layers):
        np.add.at(loads_BYE[:, layer], [place[number] for number in ids_B.tolist()], chosen_BE)
    return loads_BYE
