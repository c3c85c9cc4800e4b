"""Gates beside softmax: sigmoid, noisy, cosine, SoftMoE, and experts that choose.

Shapes: T tokens, M hidden size, P size of a projection, B samples of L tokens, E experts, S slots per expert
(and sample, where all is mixed), N slots of all experts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import pad

from penstock.moe.routers import (
    BITS,
    ExpertChoice,
    Router,
    RouterSums,
    SampleKeys,
    SoftChoice,
    SoftmaxRouter,
    TokenRouter,
    Tokens,
    least_sum,
    linear_weight,
    sum_by_sample,
    sum_z,
    uniform_bits,
)
from penstock.routing.sizes import capacity_slots


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
        return scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + least_sum(scores_TE))


# ---- softmax with learnt noise ----------------------------------------------------------------------------


FIRST_PLACE = 1 << 20
"""Where noise begins in the counter's numbering: far above the dropouts, which count from 0."""


def normal(shape: torch.Size, place: int, keys: SampleKeys) -> Tensor:
    """Return independent standard normal numbers, float64 [B, ...] (Box and Muller).

    Args:
        place: A number that makes 2 * place and 2 * place + 1 unique in the model, see `uniform_bits`.
    """
    radius, angle = (
        (uniform_bits(shape, 2 * place + half, keys).double() + 0.5) / (1 << BITS) for half in (0, 1)
    )
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


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
# otherwise every softmax of a wide model would collapse to a single token or slot.


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
# the split.


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
