"""What a gate decided. There are three kinds of choice, by who chooses: tokens, experts, or nobody (SoftMoE).

Shapes: T tokens, B samples of L tokens, E experts (total), k choices per token, S slots per expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.device import on_device
from penstock.moe.tokens import Tokens
from penstock.placement import ExpertPlacement
from penstock.routing.sizes import split_sizes


@dataclass(frozen=True)
class GateSums:
    """The sums from which balance and z-losses are computed, for one microbatch in one layer.

    chosen_BE: how often each sample chose each expert, before any drop, int64.
    probability_BE: gate probabilities summed over a sample's tokens, differentiable; zeros where a gate
        balances experts by construction. z: sum over tokens of the squared log-partition, differentiable.
    judged_BE: the choices that balance is judged by, where those are not this rank's alone: ranks may share
        the tokens of a sample. None = chosen_BE. ids_B: the numbers of the samples; None = not known.
    slots: how many choices of an expert fit, where that is limited; None = all. wanted_N: choices of every
    position on this rank, [N] int64, where rows are bounded by those of earlier steps. logits_TE: of the
    router, differentiable, where a step hands them out.
    """

    chosen_BE: Tensor
    probability_BE: Tensor
    z: Tensor
    judged_BE: Tensor | None = None
    ids_B: Tensor | None = None
    slots: int | None = None
    wanted_N: Tensor | None = None
    logits_TE: Tensor | None = None

    @property
    def dropped(self) -> Tensor:
        """Number of choices that did not fit into their expert's slots, scalar."""
        if self.slots is None:
            return self.chosen_BE.new_zeros(())
        return (self.chosen_E - self.slots).clamp(min=0).sum()

    @property
    def chosen_E(self) -> Tensor:  # noqa: N802  # the suffix is its shape
        return self.chosen_BE.sum(dim=0)


@dataclass(frozen=True)
class TokenChoice:
    """The choice of a gate where every token names its k experts.

    experts_Tk: int64, best first; -1 throughout for padding. weights: [T, k], gate precision, differentiable.
    masked: whether any -1 can occur. most: tokens that a fixed number of slots is made for; None = T.
    inseparable: length of the runs of consecutive tokens that no chunk splits.
    """

    experts_Tk: Tensor
    weights: Tensor
    sums: GateSums
    masked: bool = False
    most: int | None = None
    inseparable: int = 1

    @property
    def counted(self) -> int:
        """Number of tokens that a fixed number of slots is made for."""
        return len(self.experts_Tk) if self.most is None else self.most


@dataclass(frozen=True)
class ExpertChoice:
    """The choice of a gate where every expert names its S tokens (Zhou et al. 2022).

    tokens_ES: int64. weights: [E, S], differentiable; 0 where an expert had to name padding. tokens: T.
    """

    tokens_ES: Tensor
    weights: Tensor
    sums: GateSums
    tokens: int


@dataclass(frozen=True)
class SoftChoice:
    """Every slot is a mix of all tokens of a sample, every token a mix of all slots (Puigcerver et al. 2024).

    mix_BLES: weight of each token in each slot, sums to 1 over L. weights: [B, L, E, S], weight of each slot
    in each token's output, sums to 1 over E and S. Both are differentiable.
    """

    mix_BLES: Tensor
    weights: Tensor
    sums: GateSums


Choice = TokenChoice | ExpertChoice | SoftChoice


def placed(choice: Choice, placement: ExpertPlacement, rank: int) -> Choice:
    """Return `choice` with experts numbered by position, as orders take them. rank: in the expert group.

    Costs a copy of E integers to the device, and nothing under the default placement.
    """
    if placement.is_even:
        return choice
    if isinstance(choice, TokenChoice):
        # The entry after the last expert keeps padding at -1.
        table = on_device((*placement.positions(rank), -1), choice.experts_Tk.device)
        return replace(choice, experts_Tk=table[choice.experts_Tk])
    experts = on_device(placement.by_position, choice.weights.device)
    if isinstance(choice, ExpertChoice):
        return replace(choice, tokens_ES=choice.tokens_ES[experts], weights=choice.weights[experts])
    mix_BLES, weights = (part.index_select(2, experts) for part in (choice.mix_BLES, choice.weights))
    return replace(choice, mix_BLES=mix_BLES, weights=weights)


def made_for(choice: Choice, tokens: Tokens) -> Choice:
    """Return `choice` with the number of tokens that slots are made for and of those that stay together."""
    if (tokens.most is None and not tokens.stay_whole) or not isinstance(choice, TokenChoice):
        return choice
    return replace(choice, most=tokens.most, inseparable=tokens.inseparable(len(choice.experts_Tk)))


def chunk_tokens(tokens: int, chunks: int, inseparable: int) -> tuple[int, ...]:
    """Return the tokens of every chunk: nearly equal, no run of `inseparable` consecutive tokens split."""
    return tuple(inseparable * size for size in split_sizes(tokens // inseparable, chunks))


def count_choices(experts_Tk: Tensor, samples: int, num_experts: int) -> Tensor:
    """Count how often each sample chose each expert, [B, E] int64; -1 is not counted. No wait for a GPU."""
    per_sample_BN = experts_Tk.view(samples, experts_Tk.numel() // max(1, samples))  # perhaps no sample
    counts = torch.zeros(samples, num_experts + 1, dtype=torch.int64, device=experts_Tk.device)
    slot = torch.where(per_sample_BN < 0, num_experts, per_sample_BN)
    return counts.scatter_add_(1, slot, torch.ones_like(slot))[:, :num_experts]


def sum_by_sample(value_TE: Tensor, tokens: Tokens) -> Tensor:
    """Sum values over each sample's valid tokens, [B, E]."""
    if tokens.valid_T is not None:
        value_TE = value_TE * tokens.valid_T.unsqueeze(1)
    return tokens.by_sample(value_TE).sum(dim=1)


def sum_z(logits_TE: Tensor, tokens: Tokens) -> Tensor:
    """Sum the squared log-partition over valid tokens (ST-MoE's z-loss before division), scalar."""
    z_T = logits_TE.logsumexp(dim=-1).square()
    return z_T.sum() if tokens.valid_T is None else (z_T * tokens.valid_T).sum()
