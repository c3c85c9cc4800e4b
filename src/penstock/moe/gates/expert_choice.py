"""Expert choice: Zhou et al. 2022, "Mixture-of-experts with expert choice routing" (arXiv 2202.09368).

Every expert takes the tokens that like it best, so experts are balanced by construction. They choose among
the tokens of one microbatch on one rank: which tokens compete, and with it the result, depends on the split.
Shapes: T tokens, M hidden size, E experts, S slots per expert.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.moe.choices import ExpertChoice, GateSums, sum_by_sample, sum_z
from penstock.moe.gates.base import Gate, linear_weight
from penstock.moe.tokens import Tokens
from penstock.routing.sizes import capacity_slots


class ExpertChoiceGate(Gate):
    """Softmax over experts; each expert takes its S tokens of largest probability, which is their weight.

    S = ceil(capacity_factor * top_k * T / E), at least min_capacity, at most T: equal on all ranks that have
    the same number of tokens, padding included. scale: multiplies the weights.
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
        tokens_ES = self._select(probability_ET.detach(), tokens)
        weights_ES = probability_ET.gather(1, tokens_ES) * self.scale
        weights_ES[:, x_TM.shape[0] :] = 0.0  # tokens taken again, as there are no more
        if tokens.valid_T is not None:
            weights_ES = weights_ES.masked_fill(~tokens.valid_T[tokens_ES], 0.0)
        taken_TE = torch.zeros_like(logits_TE, dtype=torch.int64).scatter_(0, tokens_ES.t(), 1)
        sums = GateSums(
            chosen_BE=sum_by_sample(taken_TE, tokens),
            probability_BE=logits_TE.new_zeros(tokens.samples, self.num_experts),
            z=sum_z(logits_TE, tokens),
        )
        return ExpertChoice(tokens_ES, weights_ES, sums, tokens=x_TM.shape[0])

    def _select(self, probability_ET: Tensor, tokens: Tokens) -> Tensor:
        """Return the tokens that each expert takes, best first, [E, S]; padding only if nothing else is left.

        On a rank with fewer tokens than slots, since another rank has more, an expert takes all tokens, and
        then the first one again.
        """
        if tokens.valid_T is not None:
            probability_ET = probability_ET.masked_fill(~tokens.valid_T, -1.0)
        here = probability_ET.shape[1]
        if here == 0 and tokens.most:
            raise ValueError(
                "experts choose among a rank's own tokens (moe.gate = expert_choice), and this rank has "
                "none: samples are shorter than parallel.tp_size. Use longer samples, or "
                "schedule.expert_form=s2"
            )
        most = here if tokens.most is None else tokens.most
        slots = capacity_slots(most, self.num_experts, self.top_k, self.capacity_factor, self.min_capacity)
        slots = min(most, slots)
        named_ES = probability_ET.topk(min(here, slots), dim=1).indices
        return pad(named_ES, (0, slots - named_ES.shape[1]))
