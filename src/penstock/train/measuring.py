"""Makes the record of a step that has ended."""

from __future__ import annotations

import resource
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.cost.model_flops import ModelFlops
from penstock.device import device_of
from penstock.moe.config import BalanceGroup, MoEConfig
from penstock.runtime import PipelinedStack
from penstock.runtime.statistics import StepStatistics
from penstock.trace import TaskRecord, occupation
from penstock.train.metrics import StepMetrics

PLAN_DIGITS = 8
KIBIBYTE = 1024


def measured(
    stack: PipelinedStack,
    flops: ModelFlops,
    records: Sequence[TaskRecord],
    *,
    step: int,
    loss: float,
    rate: float,
    norm: float,
    iteration_s: float,
    all_reduce_chunk_bytes: int | None,
) -> StepMetrics:
    """Return the record of a stack's last step. loss: what was minimised; records: of this rank."""
    assert stack.statistics is not None, "a step has ended"
    statistics, _ = stack.statistics.on_host()
    used = occupation(records, stack.machinery.layout.mesh.silent)
    losses = router_losses(statistics, stack.balance.group)
    tokens_per_s = float(statistics.tokens) / iteration_s
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
        tokens_per_expert_max_over_mean=_imbalance(statistics.chosen_YE),
        plan=stack.plan.schedule.digest[:PLAN_DIGITS],
        all_reduce_chunk_bytes=all_reduce_chunk_bytes,
        skipped=None,
        z_loss=losses["z_loss"],
        aux_loss_global=losses.get("aux_loss_global"),
        aux_loss_sequence=losses.get("aux_loss_sequence"),
        aux_loss_microbatch=losses.get("aux_loss_microbatch"),
        aux_loss_by_layer=tuple(statistics.aux_Y.tolist()),
        rows_dropped=_dropped(statistics, stack.moe),
        steps_run_again=stack.bounds.repeats if stack.bounds.repeats_steps else None,
        model_flops_per_s=flops.per_token * tokens_per_s,
        model_flops_utilisation=flops.utilisation(tokens_per_s),
        peak_memory_bytes=peak_memory_bytes(stack.machinery.device),
    )


def router_losses(statistics: StepStatistics, group: BalanceGroup) -> dict[str, float]:
    """Return balance and z-loss by their metrics' names: means over MoE layers. The loss has their sums."""
    layers = len(statistics.chosen_YE)
    return {f"aux_loss_{group}": float(statistics.aux) / layers, "z_loss": float(statistics.z) / layers}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has held so far: on a GPU in tensors, else resident."""
    held_bytes = device_of(device).peak_memory_bytes(device)
    if held_bytes is not None:
        return held_bytes
    return KIBIBYTE * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _dropped(statistics: StepStatistics, moe: MoEConfig) -> tuple[float, ...] | None:
    """Return the share of choices without room, by layer; None where routing drops none."""
    if moe.capacity_factor is None or moe.kind != "token":
        return None
    chosen_Y = statistics.chosen_YE.sum(1).clamp(min=1)
    return tuple((statistics.dropped_Y / chosen_Y).tolist())


def _imbalance(chosen_YE: Tensor) -> float:
    """Return the busiest expert's load over the mean, averaged over layers; 0 where nothing was routed."""
    return float((chosen_YE.amax(1) / chosen_YE.mean(1).clamp(min=1e-9)).mean())
