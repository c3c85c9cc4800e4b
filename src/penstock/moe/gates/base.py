"""Base classes of gates. A new gate defines `logits` (where tokens choose) or `choose` (anything else).

Shapes: T tokens, M hidden size, E experts (total), k choices per token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from penstock.moe.choices import Choice, GateSums, TokenChoice, count_choices, sum_by_sample, sum_z
from penstock.moe.config import ChoiceKind
from penstock.moe.gates.expert_bias import ExpertBias
from penstock.moe.gates.groups import ExpertGroups
from penstock.moe.tokens import Tokens

INITIAL_STD = 0.02


class Gate(nn.Module, ABC):
    """Decides which tokens meet which experts, and with what weight. Works in float32 at least.

    kind: who chooses: tokens, experts, or nobody. `bias` is an `ExpertBias` or None.
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


class TokenGate(Gate):
    """A gate where tokens choose the k experts with the largest scores. A subclass defines the logits.

    top_k: experts per token. renormalise: scale the chosen weights to sum to one. scale: multiplies them
    after that (DeepSeek's routed_scaling_factor). groups: choose inside few groups of experts only.
    bias: added to scores for the choice and not for the weight.
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
        sums = GateSums(
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
