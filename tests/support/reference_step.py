"""What the reference is told of a case, and the step of its optimiser."""

from __future__ import annotations

from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING

from penstock.routing.sizes import split_sizes
from penstock.schedule import SCHEDULES
from penstock.train.optimizer import OptimizerConfig
from tests.support.reference import Settings
from tests.support.reference_moe import Weights

if TYPE_CHECKING:
    from tests.support.parity import Case


def settings_of(case: Case) -> Settings:
    """What the mathematics of the case depends on, its layout among it where slots are counted by rank."""
    cuts, expert_slots = _microbatches(case)
    layers = range(case.model.num_layers)
    groups, limit, valid = case.moe.num_groups, case.moe.group_top_k, case.valid
    return Settings(
        num_layers=case.model.num_layers,
        num_heads=case.model.num_heads,
        key_value_heads=case.model.key_value_heads,
        head_size=case.model.head_size,
        theta=case.model.rope_theta,
        eps=case.model.rms_norm_eps,
        moe_layers=frozenset(layer for layer in layers if case.model.has_experts[layer]),
        num_experts=case.moe.num_experts,
        top_k=case.moe.top_k,
        swiglu=case.moe.expert == "swiglu",
        renormalise=case.moe.top_k > 1 if case.moe.norm_topk_prob is None else case.moe.norm_topk_prob,
        gate=case.moe.gate,
        scale=case.moe.routed_scaling_factor,
        groups=None if groups is None or limit is None else (groups, limit),
        slots_per_expert=case.moe.slots_per_expert,
        modules=case.module_experts,
        seed=case.seed,
        padding=None if valid is None else ~valid,
        capacity_factor=case.moe.capacity_factor,
        min_capacity=case.moe.min_capacity,
        aux_coeff=case.moe.aux_loss_coeff,
        aux_group=case.moe.aux_loss_group,
        z_coeff=case.moe.z_loss_coeff,
        pieces=cuts,
        expert_slots=expert_slots,
        shares=_shares(case),
        documents=_documents(case),
    )


def _documents(case: Case) -> list[list[range]] | None:
    """The places of every document of every sample, from where the case says that each token's begins."""
    if case.documents is None:
        return None
    found = []
    for begins in case.documents.tolist():
        starts = sorted(set(begins))
        found.append([range(a, b) for a, b in zip(starts, [*starts[1:], len(begins)], strict=True)])
    return found


def _microbatches(case: Case) -> tuple[list[list[int]], list[int]]:
    """Numbers of the samples of every microbatch of every data-parallel rank, and what slots are made for."""
    pieces = case.schedule.microbatches if cuts_batches(case) else 1
    cuts: list[list[int]] = []
    expert_slots: list[int] = []
    starts = accumulate(case.samples, initial=0)
    for start, batch in zip(starts, case.samples, strict=False):
        sizes = split_sizes(max(case.samples) if case.fixed_slots else batch, pieces)
        samples = iter(range(start, start + batch))
        cuts += [list(islice(samples, size)) for size in sizes]
        expert_slots += sizes
    return cuts, expert_slots


def cuts_batches(case: Case) -> bool:
    """Whether the case's schedule cuts batches into microbatches."""
    return "microbatches" in SCHEDULES[case.schedule.name].reads


def _shares(case: Case) -> list[range]:
    """The positions of a sample that each rank of an tp group sees at its gate."""
    ends = [0, *accumulate(split_sizes(case.model.seq_len, case.gate_shares))]
    return [range(*ends_of_one) for ends_of_one in pairwise(ends)]


def adamw_step(weights: Weights, gradients: Weights, scale: float, *, config: OptimizerConfig) -> Weights:
    """The first AdamW step written out: both moments are bias-corrected back to g and g^2."""
    after: Weights = {}
    for name, weight in weights.items():
        g = gradients[name] * scale
        decays = weight.dim() >= 2 and "embed" not in name
        decayed = weight * (1 - config.lr * config.weight_decay) if decays else weight
        after[name] = (decayed - config.lr * g / (g.abs() + config.eps)).detach()
    return after
