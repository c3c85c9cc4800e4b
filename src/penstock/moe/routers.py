"""Routers: what a gate knows of tokens, and which tokens meet which experts, with what weight.

Tokens choose experts, experts choose tokens, or all are mixed (SoftMoE). A new gate defines `logits` (where
tokens choose) or `choose` (anything else); `gates` has more of them.

Shapes: T tokens, M hidden size, B samples of L tokens, E experts (total), G groups of experts, k choices per
token, S slots per expert, Y MoE layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from penstock.moe.config import BalanceGroup, ChoiceKind
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


Masked = bool | Callable[[], np.ndarray[Any, Any]]
"""Whether tokens may go to no expert, or what returns, on the host, whether each of them goes to some."""


@dataclass(frozen=True)
class TokenChoice:
    """The choice of a gate where every token names its k experts.

    Attributes:
        experts_Tk: The experts of every token, int64, best first; -1 throughout for padding.
        weights: The weights of these experts, [T, k], in the gate's precision, differentiable.
        masked: Whether any -1 can occur; where padding alone has them, what tells which tokens are none.
        most: The number of tokens that a fixed number of slots is made for; None: T.
        inseparable: The length of the runs of consecutive tokens that no chunk splits.
    """

    experts_Tk: Tensor
    weights: Tensor
    sums: RouterSums
    masked: Masked = False
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
        valid_here: Returns the same on the host, without a wait for what was issued since the step began.
        most: The tokens of the rank that has most, where ranks have different numbers of tokens and equal
            numbers of slots; None: all ranks have equally many.
        stay_whole: Whether chunks are made of whole samples.
        clean: Whether gates add no noise.
    """

    samples: int = 1
    keys: SampleKeys | None = None
    valid_T: Tensor | None = None
    valid_here: Callable[[], np.ndarray[Any, Any]] | None = None
    most: int | None = None
    stay_whole: bool = False
    clean: bool = False

    @property
    def masked(self) -> Masked:
        """What a choice says that sends padding, and nothing else, to no expert."""
        return self.valid_here or self.valid_T is not None

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


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers in int64 arithmetic: every input bit affects every output bit."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x46A56C5D) & _MASK
    return x ^ (x >> 16)


# ---- routers ----------------------------------------------------------------------------------------------


INITIAL_STD = 0.02
LEAST_SUM = 1e-20


def least_sum(scores: Tensor) -> float:
    """Return what is added to sums of scores before a division, as in DeepSeek-V3.

    Sigmoids of very negative logits are all zero, and gradients divided by this are finite in float32.
    """
    return max(LEAST_SUM, torch.finfo(scores.dtype).tiny)  # it is zero in float16


class Router(nn.Module, ABC):
    """Decides which tokens meet which experts, and with what weight. Works in float32 at least.

    Attributes:
        kind: Who chooses: tokens, experts, or nobody.
        bias: The bias of a gate that balances experts without a loss; None: it has none.
    """

    kind: ClassVar[ChoiceKind]

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.bias: ExpertBias | None = None

    def forward(self, x_TM: Tensor, tokens: Tokens) -> Choice:
        """Return the choice for x_TM: hidden states in any precision, [T, M]."""
        with torch.autocast(x_TM.device.type, enabled=False):
            return self.choose(x_TM.to(torch.promote_types(x_TM.dtype, torch.float32)), tokens)

    @abstractmethod
    def choose(self, x_TM: Tensor, tokens: Tokens) -> Choice:
        """Return the choice for x_TM, [T, M] in float32 or float64."""


class TokenRouter(Router):
    """A router where tokens choose the k experts with the largest scores. A subclass defines the logits.

    Attributes:
        top_k: Experts per token.
        renormalise: Whether the chosen weights are scaled to sum to one.
        scale: Multiplies them after that (DeepSeek's routed_scaling_factor).
        groups: The groups of experts, of which a token may use a few only; None: it may use all experts.
        bias: Added to scores for the choice and not for the weight; None: there is none.
    """

    kind = "token"

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        *,
        renormalise: bool = True,
        scale: float = 1.0,
        groups: ExpertGroups | None = None,
        bias: ExpertBias | None = None,
    ) -> None:
        super().__init__(num_experts)
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k = {top_k}: a token can choose 1 to num_experts ({num_experts}) experts")
        if groups is not None:
            groups.check(num_experts, top_k)
        self.top_k, self.renormalise, self.scale = top_k, renormalise, scale
        self.groups, self.bias = groups, bias

    @abstractmethod
    def logits(self, x_TM: Tensor, tokens: Tokens) -> Tensor:
        """Return the logits from which scores are computed, [T, E]."""

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the weights of all experts before the choice, not negative, [T, E]."""
        return logits_TE.softmax(dim=-1)

    def probabilities(self, scores_TE: Tensor) -> Tensor:
        """Return the gate probabilities for the balance loss, which sum to one over experts, [T, E]."""
        return scores_TE

    def choose(self, x_TM: Tensor, tokens: Tokens) -> TokenChoice:
        logits_TE = self.logits(x_TM, tokens)
        scores_TE = self.scores(logits_TE)
        judged_TE = scores_TE.detach()
        if self.bias is not None:
            judged_TE = judged_TE + self.bias.value_E.to(judged_TE.dtype)
        if self.groups is not None:
            judged_TE = self.groups.limit(judged_TE)
        experts_Tk = judged_TE.topk(self.top_k, dim=-1).indices  # best first
        weights_Tk = scores_TE.gather(1, experts_Tk)
        if self.renormalise:
            weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + least_sum(weights_Tk))
        if self.scale != 1.0:
            weights_Tk = weights_Tk * self.scale
        if tokens.valid_T is not None:
            experts_Tk = experts_Tk.masked_fill(~tokens.valid_T.unsqueeze(1), -1)
        sums = RouterSums(
            chosen_BE=count_choices(experts_Tk, tokens.samples, self.num_experts),
            probability_BE=sum_by_sample(self.probabilities(scores_TE), tokens),
            z=sum_z(logits_TE, tokens),
        )
        return TokenChoice(experts_Tk, weights_Tk, sums, masked=tokens.masked)


def linear_weight(rows: int, columns: int) -> nn.Parameter:
    """Return a gate's matrix, [rows, columns], drawn as small as a decoder's weights."""
    weight = nn.Parameter(torch.empty(rows, columns))
    nn.init.normal_(weight, std=min(INITIAL_STD, 1 / math.sqrt(columns)))
    return weight


# ---- group-limited choice (DeepSeek-V2 and V3): a token's experts come from few groups, so from few nodes -


@dataclass(frozen=True, kw_only=True)
class ExpertGroups:
    """Experts in `groups` equal groups, of which a token may use `limit_to`.

    The worth of a group is the sum of its `best` largest scores: 2 in DeepSeek-V3, 1 (the maximum) in
    DeepSeek-V2.
    """

    groups: int
    limit_to: int
    best: int = 2

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise ValueError if the groups do not fit the experts."""
        if self.groups < 1 or num_experts % self.groups:
            near = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            nearest = min(near, key=lambda n: abs(n - self.groups))
            raise ValueError(f"{self.groups} groups do not divide {num_experts} experts; nearest: {nearest}")
        size = num_experts // self.groups
        if not 1 <= self.limit_to <= self.groups or self.limit_to * size < top_k:
            least = -(-top_k // size)
            raise ValueError(
                f"a choice limited to {self.limit_to} of {self.groups} groups of {size} experts cannot take "
                f"top_k = {top_k}; use {least} to {self.groups}"
            )

    def limit(self, scores_TE: Tensor) -> Tensor:
        """Return the scores with minus infinity outside each token's best groups."""
        size = scores_TE.shape[1] // self.groups
        by_group_TGN = scores_TE.view(scores_TE.shape[0], self.groups, size)  # no -1: there may be no token
        best = min(self.best, by_group_TGN.shape[2])
        worth_TG = by_group_TGN.topk(best, dim=-1).values.sum(dim=-1)
        allowed = torch.zeros_like(worth_TG, dtype=torch.bool)
        allowed.scatter_(1, worth_TG.topk(self.limit_to, dim=-1).indices, True)
        return by_group_TGN.masked_fill(~allowed.unsqueeze(2), float("-inf")).flatten(1)


# ---- balance without a loss (DeepSeek-V3): a bias per expert that steers the choice and not the weights ---
#
# After every optimiser step the bias of an expert that got less than its share rises by `rate`, that of an
# expert that got more falls by it. Only what was trained on is counted: a forward pass counts once, when its
# backward has run, so evaluation and recomputation do not count and gradient accumulation adds up.


class ExpertBias(nn.Module):
    """The bias of one layer's experts and the choices counted since its last update.

    Neither is cast with a model that is cast to bfloat16: steps of 0.001 and counts would be lost there.
    """

    value_E: Tensor
    counted_E: Tensor

    def __init__(self, num_experts: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("value_E", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("counted_E", torch.zeros(num_experts, dtype=torch.int64))

    def count(self, chosen_E: Tensor) -> None:
        """Add the choices of a pass whose backward has run."""
        self.counted_E += chosen_E.to(self.counted_E.dtype)

    def forget(self) -> None:
        """Drop what has been counted since the last update, because the step was not applied."""
        self.counted_E.zero_()

    def when_trained(self, weights: Tensor, chosen_E: Tensor) -> Tensor:
        """Return `weights` unchanged; `chosen_E` is counted when their gradient comes back."""
        counted: Tensor = _CountInBackward.apply(weights, chosen_E, self)
        return counted

    @torch.no_grad()
    def update(self, sum_over_ranks: Callable[[Tensor], Tensor] | None = None) -> None:
        """Move the bias once, after an optimiser step.

        Args:
            sum_over_ranks: Sums counts over ranks, where the counts here are those of one rank; None: they
                are those of all ranks.
        """
        counted_E = self.counted_E.double()
        if sum_over_ranks is not None:
            counted_E = sum_over_ranks(counted_E)
        missing_E = counted_E.mean() - counted_E
        self.value_E += self.rate * missing_E.sign().to(self.value_E.dtype)
        self.counted_E.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertBias:
        def kept(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(kept, recurse)
        return self


class _CountInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, chosen_E: Tensor, bias: ExpertBias) -> Tensor:
        ctx.bias, ctx.counted = bias, False
        ctx.save_for_backward(chosen_E)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (chosen_E,) = ctx.saved_tensors
        if not ctx.counted:  # a graph that was retained may run backward again
            ctx.bias.count(chosen_E)
        ctx.counted = True
        return grads[0], None, None


# ---- the usual gate: softmax over one matrix --------------------------------------------------------------


class SoftmaxRouter(TokenRouter):
    """Probabilities over all experts from one matrix; a token's choices are the k largest.

    GShard, Switch, Mixtral (weights renormalised), Qwen3-MoE, OLMoE (weights unchanged).

    Args:
        hidden_size: The width of hidden states, M.
        options: See `TokenRouter`.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, **options: Any) -> None:
        super().__init__(num_experts, top_k, **options)
        self.weight = linear_weight(num_experts, hidden_size)

    def logits(self, x_TM: Tensor, tokens: Tokens) -> Tensor:
        del tokens
        return x_TM @ self.weight.to(x_TM.dtype).t()


# ---- the load-balance loss, by the group of tokens over which balance is judged ---------------------------
#
# aux = E * sum_e f_e * P_e per layer; f_e is the share of (token, choice) pairs that chose expert e, before
# any drop, P_e the mean gate probability. f_e has no gradient, so backward needs only one factor per expert.
# The loss is not a mean over tokens: judged on pieces it has another value and another gradient.


class Balance(Protocol):
    """The balance loss of one reduction group.

    Attributes:
        group: The name of the group.
    """

    group: BalanceGroup

    def piece(self, chosen_BE: Tensor, probability_BE: Tensor) -> Tensor:
        """Return what one microbatch of one rank adds to the batch's sum, before division by its tokens."""
        ...

    def by_layer(self, pieces_Y: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss of every layer, [Y], from sums over all ranks and microbatches."""
        ...

    def slope(self, chosen_BE: Tensor, chosen_YE: Tensor, layer: int, tokens: Tensor) -> Tensor:
        """Return the derivative of the losses' sum by a microbatch's summed probabilities, [B, E].

        Args:
            chosen_YE, tokens: The choices and the number of tokens of the whole batch.
            layer: The number of the MoE layer.
        """
        ...


class GlobalBalance:
    """Balance judged over the whole batch of all ranks: exact for any split into microbatches and ranks."""

    group: BalanceGroup = "global"

    def piece(self, chosen_BE: Tensor, probability_BE: Tensor) -> Tensor:
        del chosen_BE
        return probability_BE.new_zeros(())

    def by_layer(self, pieces_Y: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        del pieces_Y
        return (_share(chosen_YE) * probability_YE).sum(dim=1) * chosen_YE.shape[-1] / tokens

    def slope(self, chosen_BE: Tensor, chosen_YE: Tensor, layer: int, tokens: Tensor) -> Tensor:
        return (_share(chosen_YE[layer]) * chosen_YE.shape[-1] / tokens).expand(chosen_BE.shape)


def _share(chosen: Tensor) -> Tensor:
    """Turn counts into shares along the last dimension, float64: of a sample, by itself."""
    counts = chosen.double()
    return counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)


def _share_of_all(chosen_BE: Tensor) -> Tensor:
    return _share(chosen_BE.sum(dim=0)).expand(chosen_BE.shape)


class PiecewiseBalance:
    """Balance judged on parts of the batch, averaged by their tokens.

    Judged on every sample by itself (DeepSeek-V3) it is exact for any split, as samples stay whole; on each
    rank's microbatch by itself, as in most frameworks, splitting changes it.

    Args:
        shares: Returns the shares by which each sample's tokens are judged, [B, E], from its choices.
    """

    def __init__(self, group: BalanceGroup, shares: Callable[[Tensor], Tensor]) -> None:
        self.group, self._shares = group, shares

    def piece(self, chosen_BE: Tensor, probability_BE: Tensor) -> Tensor:
        return (self._shares(chosen_BE) * probability_BE).sum() * chosen_BE.shape[-1]

    def by_layer(self, pieces_Y: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        del chosen_YE, probability_YE
        return pieces_Y / tokens

    def slope(self, chosen_BE: Tensor, chosen_YE: Tensor, layer: int, tokens: Tensor) -> Tensor:
        del chosen_YE, layer
        return self._shares(chosen_BE) * chosen_BE.shape[-1] / tokens


MICROBATCH = PiecewiseBalance("microbatch", _share_of_all)
SEQUENCE = PiecewiseBalance("sequence", _share)
BALANCES: dict[BalanceGroup, Balance] = {each.group: each for each in (GlobalBalance(), MICROBATCH, SEQUENCE)}
