"""Section `[moe]`: what an MoE layer is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from penstock.config import ConfigError

ExpertKind = Literal["gelu", "swiglu"]
BalanceGroup = Literal["microbatch", "global"]

MOST_CAPACITY = 1000
EXPERT_MATRICES: dict[ExpertKind, int] = {"gelu": 2, "swiglu": 3}


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The MoE layer.

    num_experts: in total, over all ranks. top_k: experts per token.
    moe_ffn_hidden_size: hidden width of one expert. expert: its kind.
    capacity_factor: None is dropless; otherwise an expert takes ceil(f * k * tokens / num_experts) tokens
        from each rank and microbatch, and drops the rest (first choices go first, then token order).
    min_capacity: the least number of slots with a capacity_factor.
    norm_topk_prob: whether the weights of the chosen experts are scaled to sum to one; none = if top_k > 1.
        With one choice the weight would always be one and the router would get no gradient: refused.
    aux_loss_coeff: weight of the load-balance loss. z_loss_coeff: weight of the router z-loss.
    aux_loss_group: over which tokens the balance of experts is judged: `global` (the whole batch of all
        ranks: splitting does not change it) or `microbatch` (each rank's microbatch by itself).
    """

    num_experts: int = 8
    top_k: int = 2
    moe_ffn_hidden_size: int = 256
    expert: ExpertKind = "swiglu"
    capacity_factor: float | None = None
    min_capacity: int = 4
    norm_topk_prob: bool | None = None
    aux_loss_coeff: float = 0.01
    z_loss_coeff: float = 0.001
    aux_loss_group: BalanceGroup = "global"

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ConfigError("num_experts", self.num_experts, "there must be an expert", "Use 1 or more.")
        if not 1 <= self.top_k <= self.num_experts:
            nearest = min(max(self.top_k, 1), self.num_experts)
            why = f"a token can choose between 1 and num_experts ({self.num_experts}) experts"
            raise ConfigError("top_k", self.top_k, why, f"Nearest valid: {nearest}.")
        if self.moe_ffn_hidden_size < 1:
            raise ConfigError("moe_ffn_hidden_size", self.moe_ffn_hidden_size, "must be positive", "Use 256.")
        if self.capacity_factor is not None and not 0 < self.capacity_factor <= MOST_CAPACITY:
            why = f"must be between 0 (no expert would take any token) and {MOST_CAPACITY}"
            raise ConfigError("capacity_factor", self.capacity_factor, why, "For dropless routing use none.")
        if self.norm_topk_prob and self.top_k == 1:
            why = "with top_k = 1 every weight would be 1 and the router would learn nothing from the loss"
            raise ConfigError("norm_topk_prob", True, why, "Use false, or top_k of 2 or more.")
        if self.min_capacity < 1:
            raise ConfigError("min_capacity", self.min_capacity, "an expert needs a slot", "Use 1 or more.")
        for key in ("aux_loss_coeff", "z_loss_coeff"):
            if not 0 <= getattr(self, key) < math.inf:
                why = "must be a number and not negative"
                raise ConfigError(key, getattr(self, key), why, "Use 0 to switch it off.")

    @property
    def renormalise(self) -> bool:
        return self.top_k > 1 if self.norm_topk_prob is None else self.norm_topk_prob

    @property
    def expert_matrices(self) -> int:
        """Matrix products of one expert: 2 for GELU, 3 for SwiGLU."""
        return EXPERT_MATRICES[self.expert]
