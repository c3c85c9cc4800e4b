"""Group-limited choice (DeepSeek-V2 and V3): a token's experts come from few groups, so from few nodes.

Shapes: T tokens, E experts, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
