"""Routers: a gate decides which tokens meet which experts, and with what weight.

A new gate defines `logits` (where tokens choose) or `choose` (anything else).

Shapes: T tokens, M hidden size, E experts (total), k choices per token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import pad

from penstock.moe.choices import (
    Choice,
    ExpertChoice,
    RouterSums,
    SoftChoice,
    TokenChoice,
    Tokens,
    count_choices,
    normal,
    sum_by_sample,
    sum_z,
)
from penstock.moe.config import BalanceGroup, ChoiceKind
from penstock.routing.sizes import capacity_slots

INITIAL_STD = 0.02


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
            tiny = torch.finfo(weights_Tk.dtype).tiny  # sigmoids of very negative logits are all zero
            weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + tiny)
        if self.scale != 1.0:
            weights_Tk = weights_Tk * self.scale
        if tokens.valid_T is not None:
            experts_Tk = experts_Tk.masked_fill(~tokens.valid_T.unsqueeze(1), -1)
        sums = RouterSums(
            chosen_BE=count_choices(experts_Tk, tokens.samples, self.num_experts),
            probability_BE=sum_by_sample(self.probabilities(scores_TE), tokens),
            z=sum_z(logits_TE, tokens),
        )
        return TokenChoice(experts_Tk, weights_Tk, sums, masked=tokens.valid_T is not None)


def linear_weight(rows: int, columns: int) -> nn.Parameter:
    """Return a gate's matrix, [rows, columns], drawn as small as a decoder's weights."""
    weight = nn.Parameter(torch.empty(rows, columns))
    nn.init.normal_(weight, std=min(INITIAL_STD, 1 / math.sqrt(columns)))
    return weight


# ---- group-limited choice (DeepSeek-V2 and V3): a token's experts come from few groups, so from few nodes -
#
# Shapes: T tokens, E experts, G groups.


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
# Shapes: E experts.


class ExpertBias(nn.Module):
    """The bias of one layer's experts and the choices counted since its last update.

    Neither is cast with a model that is cast to bfloat16: steps of 0.001 and counts would be lost there.
    """

    value_E: Tensor
    counted_E: Tensor

    def __init__(self, num_experts: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("value_E", torch.zeros(num_experts))
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
        super()._apply(fn, recurse)
        self.value_E = self.value_E.float()  # whatever the rest of the model was cast to
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


# ---- gates that judge experts with one matrix: softmax, sigmoid, and softmax with learnt noise ------------
#
# Shapes: T tokens, B samples of L tokens, M hidden size, E experts.


FIRST_PLACE = 1 << 20
"""Where noise begins in the counter's numbering: far above the dropouts, which count from 0."""


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


class SigmoidRouter(SoftmaxRouter):
    """A router whose scores are sigmoids of the logits, each expert by itself.

    BASE layers, StableMoE and DeepSeek-V3 (arXiv 2103.16716, 2204.08396, 2412.19437): experts do not compete
    for a score as they do in a softmax. DeepSeek-V3 is this gate with `groups`, `bias`, `renormalise` and
    `scale`. Parameters are those of `SoftmaxRouter`.
    """

    def scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid()

    def probabilities(self, scores_TE: Tensor) -> Tensor:
        """Return scores as shares of their sum (DeepSeek-V3's balance loss)."""
        tiny = torch.finfo(scores_TE.dtype).tiny  # sigmoids of very negative logits are all zero
        return scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + tiny)


class NoisyRouter(SoftmaxRouter):
    """The softmax gate with learnt noise on its logits: Shazeer et al. 2017 (arXiv 1701.06538), GShard.

    logits = x Wg + n * softplus(x Wn) with n ~ N(0, 1): how much noise an expert's logit gets is learnt.
    Choice, weights, balance and z-loss all see the noisy logits in training; in evaluation there is none.

    With `Tokens.keys` the noise of a token depends on run, place, sample and position only, hence neither on
    microbatches nor on ranks.

    Args:
        place: A number that is unique among the model's noisy gates, the layer's for example.
        options: See `TokenRouter`.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, place: int = 0, **options: Any
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        # Zero as in Shazeer et al.: every logit starts with the same spread, softplus(0) = 0.69.
        self.noise_weight = nn.Parameter(torch.zeros(num_experts, hidden_size))
        self.place = FIRST_PLACE + place

    def logits(self, x_TM: Tensor, tokens: Tokens) -> Tensor:
        clean_TE = super().logits(x_TM, tokens)
        if not self.training or tokens.clean:
            return clean_TE
        spread_TE = F.softplus(x_TM @ self.noise_weight.to(x_TM.dtype).t())
        if tokens.keys is None:
            noise_TE = torch.randn_like(clean_TE)
        else:
            noise_BLE = normal(tokens.by_sample(clean_TE).shape, self.place, tokens.keys)
            noise_TE = noise_BLE.to(clean_TE).view_as(clean_TE)
        return clean_TE + noise_TE * spread_TE


# ---- the cosine gate: X-MoE, "On the representation collapse of sparse mixture of experts" (arXiv
# 2204.09179)
#
# logits = cos(W x, e) / temperature in a space of few dimensions, so that the length of a hidden state has no
# effect and hidden states are not drawn towards the experts' vectors.
# Shapes: T tokens, M hidden size, P size of the projection, E experts.


INITIAL_TEMPERATURE = 0.07
SHORTEST = 1e-4
"""Vectors shorter than this are not stretched to length one: the gradient of a zero vector stays finite."""


class CosineRouter(TokenRouter):
    """Softmax over cosines between projected tokens and expert vectors; the temperature is learnt.

    Args:
        hidden_size: The width of hidden states, M.
        proj_size: The width of the projection, P.
        options: See `TokenRouter`.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, proj_size: int, **options: Any
    ) -> None:
        super().__init__(num_experts, top_k, **options)
        self.projection = linear_weight(proj_size, hidden_size)
        self.weight = linear_weight(num_experts, proj_size)
        # The logarithm is learnt, so the temperature is positive whatever the optimiser does.
        self.log_temperature = nn.Parameter(torch.tensor(math.log(INITIAL_TEMPERATURE)))

    def logits(self, x_TM: Tensor, tokens: Tokens) -> Tensor:
        del tokens
        token_TP = F.normalize(x_TM @ self.projection.to(x_TM.dtype).t(), dim=1, eps=SHORTEST)
        expert_EP = F.normalize(self.weight.to(x_TM.dtype), dim=1, eps=SHORTEST)
        return token_TP @ expert_EP.t() / self.log_temperature.to(x_TM.dtype).exp()


# ---- SoftMoE: Puigcerver et al. 2024, "From sparse to soft mixtures of experts" (arXiv 2308.00951) --------
#
# Nothing is chosen: a slot is a mix of all tokens of its sample, a token's output a mix of all slots.
# Tokens and slot vectors are normalised, and a learnt scale is applied (section 2.3 of the paper), as
# otherwise every softmax of a wide model would collapse to a single token or slot. Shapes: T tokens, B
# samples of L tokens, M hidden size, E experts, S slots per expert and sample.


class SoftRouter(Router):
    """A router where slots and outputs are mixes.

    The paper chooses E * S close to L: then the experts compute as much as with one expert per token.

    Attributes:
        slots_per_expert: Slots per expert and sample, S; every slot has a learnt vector.
    """

    kind = "soft"

    def __init__(self, hidden_size: int, num_experts: int, *, slots_per_expert: int) -> None:
        super().__init__(num_experts)
        if slots_per_expert < 1:
            raise ValueError(f"slots_per_expert = {slots_per_expert}: an expert needs a slot; use 1 or more")
        self.slots_per_expert = slots_per_expert
        self.weight = linear_weight(num_experts * slots_per_expert, hidden_size)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def choose(self, x_TM: Tensor, tokens: Tokens) -> SoftChoice:
        slots, dtype = self.slots_per_expert, x_TM.dtype
        slot_NM = F.normalize(self.weight.to(dtype), dim=1, eps=SHORTEST) * self.logit_scale.to(dtype)
        logits_TN = F.normalize(x_TM, dim=1, eps=SHORTEST) @ slot_NM.t()
        weights_TN = logits_TN.softmax(dim=-1)
        if tokens.valid_T is not None:
            weights_TN = weights_TN.masked_fill(~tokens.valid_T.unsqueeze(1), 0.0)
        chosen_BE = torch.full((tokens.samples, self.num_experts), slots, device=x_TM.device)
        sums = RouterSums(
            chosen_BE=chosen_BE,
            probability_BE=torch.zeros_like(chosen_BE, dtype=dtype),
            z=sum_z(logits_TN, tokens),
        )
        shape, logits_BLN = (self.num_experts, slots), tokens.by_sample(logits_TN)
        if tokens.valid_T is None:
            mix_BLN = logits_BLN.softmax(dim=1)
        else:
            padding_BL1 = ~tokens.by_sample(tokens.valid_T).unsqueeze(2)
            # Not minus infinity, which would give NaN for a sample of nothing but padding.
            low_BLN = logits_BLN.masked_fill(padding_BL1, torch.finfo(logits_BLN.dtype).min)
            mix_BLN = low_BLN.softmax(dim=1).masked_fill(padding_BL1, 0.0)
        weights_BLN = tokens.by_sample(weights_TN)
        return SoftChoice(mix_BLN.unflatten(2, shape), weights_BLN.unflatten(2, shape), sums)


# ---- expert choice: Zhou et al. 2022, "Mixture-of-experts with expert choice routing" (arXiv 2202.09368) --
#
# Every expert takes the tokens that like it best, so experts are balanced by construction. They choose
# among the tokens of one microbatch on one rank: which tokens compete, and with it the result, depends on
# the split. Shapes: T tokens, M hidden size, E experts, S slots per expert.


class ExpertChoiceRouter(Router):
    """Softmax over experts; each expert takes its S tokens of largest probability, which is their weight.

    S = ceil(capacity_factor * top_k * T / E), at least min_capacity, at most T: equal on all ranks that have
    the same number of tokens, padding included.

    Attributes:
        scale: Multiplies the weights.
    """

    kind = "expert"

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        top_k: int = 1,
        capacity_factor: float = 1.0,
        min_capacity: int = 1,
        scale: float = 1.0,
    ) -> None:
        super().__init__(num_experts)
        self.top_k, self.capacity_factor, self.min_capacity = top_k, capacity_factor, min_capacity
        self.scale = scale
        self.weight = linear_weight(num_experts, hidden_size)

    def choose(self, x_TM: Tensor, tokens: Tokens) -> ExpertChoice:
        logits_TE = x_TM @ self.weight.to(x_TM.dtype).t()
        probability_ET = logits_TE.softmax(dim=-1).t()
        # The tokens that each expert takes, best first; padding only if nothing else is left.
        wanted_ET, here = probability_ET.detach(), len(x_TM)
        if tokens.valid_T is not None:
            wanted_ET = wanted_ET.masked_fill(~tokens.valid_T, -1.0)
        if here == 0 and tokens.most:
            raise ValueError(
                "experts choose among a rank's own tokens (moe.gate = expert_choice), and this rank has "
                "none: samples are shorter than parallel.tp_size. Use longer samples, or "
                "schedule.expert_form=s2"
            )
        most = here if tokens.most is None else tokens.most
        slots = capacity_slots(most, self.num_experts, self.top_k, self.capacity_factor, self.min_capacity)
        slots = min(most, slots)
        # On a rank with fewer tokens than slots, since another rank has more, an expert takes all tokens, and
        # then the first one again.
        named_ES = wanted_ET.topk(min(here, slots), dim=1).indices
        tokens_ES = pad(named_ES, (0, slots - named_ES.shape[1]))
        weights_ES = probability_ET.gather(1, tokens_ES) * self.scale
        weights_ES[:, x_TM.shape[0] :] = 0.0  # tokens taken again, as there are no more
        if tokens.valid_T is not None:
            weights_ES = weights_ES.masked_fill(~tokens.valid_T[tokens_ES], 0.0)
        taken_TE = torch.zeros_like(logits_TE, dtype=torch.int64).scatter_(0, tokens_ES.t(), 1)
        sums = RouterSums(
            chosen_BE=sum_by_sample(taken_TE, tokens),
            probability_BE=logits_TE.new_zeros(tokens.samples, self.num_experts),
            z=sum_z(logits_TE, tokens),
        )
        return ExpertChoice(tokens_ES, weights_ES, sums, tokens=x_TM.shape[0])


# ---- the load-balance loss, by the group of tokens over which balance is judged ---------------------------
#
# aux = E * sum_e f_e * P_e per layer; f_e is the share of (token, choice) pairs that chose expert e, before
# any drop, P_e the mean gate probability. f_e has no gradient, so backward needs only one factor per expert.
# The loss is not a mean over tokens: judged on pieces it has another value and another gradient. Shapes: B
# samples of a microbatch, E experts, Y MoE layers.


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


class _PiecewiseBalance(ABC):
    """Balance judged on parts of the batch, averaged by their tokens. A subclass says what a part is."""

    @abstractmethod
    def _shares(self, chosen_BE: Tensor) -> Tensor:
        """Return the shares by which each sample's tokens are judged."""

    def piece(self, chosen_BE: Tensor, probability_BE: Tensor) -> Tensor:
        return (self._shares(chosen_BE) * probability_BE).sum() * chosen_BE.shape[-1]

    def by_layer(self, pieces_Y: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        del chosen_YE, probability_YE
        return pieces_Y / tokens

    def slope(self, chosen_BE: Tensor, chosen_YE: Tensor, layer: int, tokens: Tensor) -> Tensor:
        del chosen_YE, layer
        return self._shares(chosen_BE) * chosen_BE.shape[-1] / tokens


class MicrobatchBalance(_PiecewiseBalance):
    """Balance judged on each rank's microbatch by itself, as most frameworks do. Splitting changes it."""

    group: BalanceGroup = "microbatch"

    def _shares(self, chosen_BE: Tensor) -> Tensor:
        return _share(chosen_BE.sum(dim=0)).expand(chosen_BE.shape)


class SequenceBalance(_PiecewiseBalance):
    """Balance judged on every sample by itself (DeepSeek-V3): exact for any split, as samples stay whole."""

    group: BalanceGroup = "sequence"

    def _shares(self, chosen_BE: Tensor) -> Tensor:
        return _share(chosen_BE)


BALANCES: dict[BalanceGroup, Balance] = {
    balance.group: balance for balance in (GlobalBalance(), MicrobatchBalance(), SequenceBalance())
}


def _share(chosen: Tensor) -> Tensor:
    """Turn counts into shares along the last dimension, float64."""
    counts = chosen.double()
    return counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)
