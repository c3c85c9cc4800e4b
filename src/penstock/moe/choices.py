"""Tokens, and what a router decided for them: who chooses is tokens, experts, or nobody (SoftMoE).

Shapes: T tokens, B samples of L tokens, E experts (total), k choices per token, S slots per expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.device import on_device
from penstock.placement import ExpertPlacement
from penstock.routing.sizes import split_sizes


@dataclass(frozen=True)
class RouterSums:
    """The sums from which balance and z-losses are computed, for one microbatch in one layer.

    Attributes:
        chosen_BE: How often each sample chose each expert, before any drop, int64.
        probability_BE: Gate probabilities summed over a sample's tokens, differentiable; zeros where a gate
            balances experts by construction.
        z: Sum over tokens of the squared log-partition, differentiable.
        judged_BE: The choices that balance is judged by, where those are not this rank's alone: ranks may
            share the tokens of a sample. None: chosen_BE.
        ids_B: The numbers of the samples; None: not known.
        slots: How many choices of an expert fit, where that is limited; None: all.
        wanted_N: Choices of every position on this rank, [N] int64, where rows are bounded by those of
            earlier steps.
        logits_TE: The router's logits, differentiable, where a step hands them out.
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
        """The number of choices that did not fit into their expert's slots, scalar."""
        if self.slots is None:
            return self.chosen_BE.new_zeros(())
        return (self.chosen_E - self.slots).clamp(min=0).sum()

    @property
    def chosen_E(self) -> Tensor:  # noqa: N802  # the suffix is its shape
        return self.chosen_BE.sum(dim=0)


@dataclass(frozen=True)
class TokenChoice:
    """The choice of a gate where every token names its k experts.

    Attributes:
        experts_Tk: The experts of every token, int64, best first; -1 throughout for padding.
        weights: The weights of these experts, [T, k], in the gate's precision, differentiable.
        masked: Whether any -1 can occur.
        most: The number of tokens that a fixed number of slots is made for; None: T.
        inseparable: The length of the runs of consecutive tokens that no chunk splits.
    """

    experts_Tk: Tensor
    weights: Tensor
    sums: RouterSums
    masked: bool = False
    most: int | None = None
    inseparable: int = 1

    @property
    def counted(self) -> int:
        """The number of tokens that a fixed number of slots is made for."""
        return len(self.experts_Tk) if self.most is None else self.most


@dataclass(frozen=True)
class ExpertChoice:
    """The choice of a gate where every expert names its S tokens (Zhou et al. 2022).

    Attributes:
        tokens_ES: The tokens of every expert, int64.
        weights: The weights of these tokens, [E, S], differentiable; 0 where an expert had to name padding.
        tokens: The number of tokens, T.
    """

    tokens_ES: Tensor
    weights: Tensor
    sums: RouterSums
    tokens: int


@dataclass(frozen=True)
class SoftChoice:
    """Every slot is a mix of all tokens of a sample, every token a mix of all slots (Puigcerver et al. 2024).

    Both kinds of weights are differentiable.

    Attributes:
        mix_BLES: The weight of each token in each slot; sums to 1 over L.
        weights: The weight of each slot in each token's output, [B, L, E, S]; sums to 1 over E and S.
    """

    mix_BLES: Tensor
    weights: Tensor
    sums: RouterSums


Choice = TokenChoice | ExpertChoice | SoftChoice


def placed(choice: Choice, placement: ExpertPlacement, rank: int) -> Choice:
    """Return `choice` with experts numbered by position, as orders take them.

    Costs a copy of E integers to the device, and nothing under the default placement.

    Args:
        rank: This rank's place in the expert group.
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


# ---- what a layer knows about tokens besides their hidden states ------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A batch of tokens, sample after sample, all samples of one length.

    Attributes:
        samples: The number of samples, possibly 0.
        keys: The keys of random noise; None: it is drawn from PyTorch's own generator.
        valid_T: bool, False for padding, which goes to no expert and is not counted; None: all are valid.
        most: The tokens of the rank that has most, where ranks have different numbers of tokens and equal
            numbers of slots; None: all ranks have equally many.
        stay_whole: Whether chunks are made of whole samples.
        clean: Whether gates add no noise.
    """

    samples: int = 1
    keys: SampleKeys | None = None
    valid_T: Tensor | None = None
    most: int | None = None
    stay_whole: bool = False
    clean: bool = False

    def inseparable(self, tokens: int) -> int:
        """Return the number of consecutive tokens, of `tokens`, that no chunk splits."""
        return max(1, tokens // max(1, self.samples)) if self.stay_whole else 1

    def by_sample(self, values: Tensor) -> Tensor:
        """Return values [T, ...] as [B, L, ...]; without samples there are no tokens, and L is 0."""
        length = values.shape[0] // max(1, self.samples)
        return values.view(self.samples, length, *values.shape[1:])


# ---- random numbers from a counter: a hash of where a number is used, not of what was drawn before it -----
#
# So the numbers do not depend on microbatches, on the rank a sample lives on, or on the order of tasks.


BITS = 32
_MASK = 0xFFFFFFFF
_PLACE_STEP = 0x9E3779B1  # odd, so no two places coincide


@dataclass(frozen=True)
class SampleKeys:
    """The keys of random numbers, and what attention must know of samples.

    Attributes:
        seed: The seed of the run.
        sample_ids_B: One number per sample, unique over the run.
        first_token: The place in its sample of the first token that is here, where ranks share the tokens of
            a sample.
        documents_BL: int64, for every token of a sample, here or not, the place in the sample where its
            document begins; None: a sample is one document.
    """

    seed: int
    sample_ids_B: Tensor
    first_token: int = 0
    documents_BL: Tensor | None = None


def uniform_bits(shape: torch.Size, place: int, keys: SampleKeys) -> Tensor:
    """Return independent uniform numbers in [0, 2**32), int64 [B, L, ...].

    Args:
        shape: [B, L, ...].
        place: The number of whatever draws, unique in the model.
    """
    ids_B = keys.sample_ids_B
    start = _mix(torch.full((), (keys.seed * 0x85EBCA6B + place * _PLACE_STEP) & _MASK, device=ids_B.device))
    low, high = ids_B & _MASK, (ids_B >> BITS) & _MASK
    sample_B = _mix(_mix(start ^ low) ^ high)
    count = shape[1:].numel()
    counter = torch.arange(count, device=ids_B.device) + keys.first_token * shape[2:].numel()
    return _mix(_mix(sample_B.unsqueeze(1) + counter) ^ sample_B.unsqueeze(1)).view(shape)


def normal(shape: torch.Size, place: int, keys: SampleKeys) -> Tensor:
    """Return independent standard normal numbers, float64 [B, ...] (Box and Muller).

    Args:
        place: A number that makes 2 * place and 2 * place + 1 unique in the model, see `uniform_bits`.
    """
    radius, angle = (
        (uniform_bits(shape, 2 * place + half, keys).double() + 0.5) / (_MASK + 1) for half in (0, 1)
    )
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers in int64 arithmetic: every input bit affects every output bit."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x46A56C5D) & _MASK
    return x ^ (x >> 16)
