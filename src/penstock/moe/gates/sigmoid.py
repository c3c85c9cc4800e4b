"""The sigmoid gate of BASE layers, StableMoE and DeepSeek-V3 (arXiv 2103.16716, 2204.08396, 2412.19437).

Experts do not compete for a score as they do in a softmax. DeepSeek-V3 is this gate with `groups`, `bias`,
`renormalise` and `scale`.
Shapes: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.moe.gates.softmax import SoftmaxGate


class SigmoidGate(SoftmaxGate):
    """A gate whose scores are sigmoids of the logits, each expert by itself. Parameters as in SoftmaxGate."""

    def scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid()

    def probabilities(self, scores_TE: Tensor) -> Tensor:
        """Return scores as shares of their sum (DeepSeek-V3's balance loss)."""
        tiny = torch.finfo(scores_TE.dtype).tiny  # sigmoids of very negative logits are all zero
        return scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + tiny)
