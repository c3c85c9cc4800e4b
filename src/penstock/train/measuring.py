"""Makes the record of a step that has ended, and the loss on held-out text.

Shapes: P ranks, Y MoE layers, E experts.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import stdtrit

from penstock.config import UNSET, ConfigError
from penstock.device import device_of
from penstock.mesh import Group
from penstock.runtime import PipelinedStack
from penstock.trace import TaskRecord, occupation
from penstock.train.batches import Batch
from penstock.train.load_figures import LoadFigures, RowsOfReplicas
from penstock.train.metrics import StepMetrics
from penstock.train.pilot import Pilot

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

    loss: what was minimised; records: of this rank; accepted: whether the step has changed parameters.
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
    found = LoadFigures.of(
        loads_PYE,
        [part.moe.placement for part in stack.parts.parts if part.moe is not None],
        layout.mesh,
        layout.node_size,
        replica_rows=replica_rows,
        before_PYE=stack.loads[-2] if len(stack.loads) > 1 else None,
    )
    return vars(found)


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

    loss: mean cross entropy per token, nats, the same on all ranks, without balance terms. noise: the loss of
    all held-out text is below `loss + noise` with 95 % confidence, judged by how batches differ (Student's
    t); None for a single batch.
    """

    loss: float
    noise: float | None


def evaluate(stack: PipelinedStack, batches: Iterable[Batch]) -> Evaluation:
    """Return the loss on some batches, without training on them. Raises ConfigError if none has a label."""
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
