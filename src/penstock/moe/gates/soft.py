"""SoftMoE: Puigcerver et al. 2024, "From sparse to soft mixtures of experts" (arXiv 2308.00951).

Nothing is chosen: a slot is a mix of all tokens of its sample, a token's output a mix of all slots. Tokens
and slot vectors are normalised, and a learnt scale is applied (section 2.3 of the paper), as otherwise every
softmax of a wide model would collapse to a single token or slot.
Shapes: T tokens, B samples of L tokens, M hidden size, E experts, S slots per expert and sample.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.moe.choices import GateSums, SoftChoice, sum_z
from penstock.moe.gates.base import Gate, linear_weight
from penstock.moe.tokens import Tokens

SHORTEST = 1e-4
"""Vectors shorter than this are not stretched to length one: the gradient of a zero vector stays finite."""


class SoftGate(Gate):
    """A gate where slots and outputs are mixes.

    slots_per_expert: S, per sample; every slot has a learnt vector.
    The paper chooses E * S close to L: then the experts compute as much as with one expert per token.
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
        sums = GateSums(
            chosen_BE=chosen_BE,
            probability_BE=torch.zeros_like(chosen_BE, dtype=dtype),
            z=sum_z(logits_TN, tokens),
        )
        shape = (self.num_experts, slots)
        weights_BLN = tokens.by_sample(weights_TN)
        return SoftChoice(_mix(logits_TN, tokens).unflatten(2, shape), weights_BLN.unflatten(2, shape), sums)


def _mix(logits_TN: Tensor, tokens: Tokens) -> Tensor:
    """Return the softmax over each sample's valid tokens, 0 for padding, [B, L, E * S]."""
    logits_BLN = tokens.by_sample(logits_TN)
    if tokens.valid_T is None:
        return logits_BLN.softmax(dim=1)
    padding_BL1 = ~tokens.by_sample(tokens.valid_T).unsqueeze(2)
    # Not minus infinity, which would give NaN for a sample of nothing but padding.
    low_BLN = logits_BLN.masked_fill(padding_BL1, torch.finfo(logits_BLN.dtype).min)
    return low_BLN.softmax(dim=1).masked_fill(padding_BL1, 0.0)
