"""Section `[moe]`: what it refuses, and what it makes of what is not set."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import ConfigError
from penstock.moe import MoEConfig

CAPACITY = {"capacity_factor": 1.0}


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("num_experts", {"num_experts": 0}),
        ("top_k", {"top_k": 0}),
        ("top_k", {"num_experts": 4, "top_k": 5}),
        ("moe_ffn_hidden_size", {"moe_ffn_hidden_size": 0}),
        ("capacity_factor", {"capacity_factor": 0.0}),
        ("capacity_factor", {"capacity_factor": float("nan")}),
        ("capacity_factor", {"gate": "soft", **CAPACITY}),
        ("norm_topk_prob", {"top_k": 1, "norm_topk_prob": True}),
        ("min_capacity", {"min_capacity": 0}),
        ("aux_loss_coeff", {"aux_loss_coeff": -0.1}),
        ("z_loss_coeff", {"z_loss_coeff": -0.1}),
        ("bound_factor", {"bound_factor": 0.9}),
        ("bound_factor", {"bound_factor": 2.0, **CAPACITY}),
        ("bound_factor", {"bound_factor": 2.0, "gate": "soft"}),
        ("bound_factor", {"bound_factor": 2.0, "one_copy_per_rank": True}),
        ("bound_factor", {"bound_factor": 2.0, "dispatch": "node_once"}),
        ("gate", {"gate": "expert_choice"}),
        ("permutation", {"gate": "expert_choice", "permutation": "sort", **CAPACITY}),
        ("permutation", {"gate": "soft", "permutation": "sort"}),
        ("permutation", {"gate": "soft", "permutation": "index"}),
        ("permutation", {"permutation": "sort", **CAPACITY}),
        ("permutation", {"permutation": "index"}),
        ("permutation", {"permutation": "einsum"}),
        ("one_copy_per_rank", {"one_copy_per_rank": True, **CAPACITY}),
        ("comm_dtype", {"one_copy_per_rank": True, "comm_dtype": "int8"}),
        ("dispatch", {"dispatch": "node_once", "gate": "soft"}),
        ("dispatch", {"dispatch": "node_once", "permutation": "einsum", **CAPACITY}),
        ("dispatch", {"dispatch": "node_once", "one_copy_per_rank": True}),
        ("dispatch", {"dispatch": "node_once", "comm_dtype": "int8"}),
        ("expert_bias_rate", {"gate": "soft", "expert_bias_rate": 0.1}),
        ("num_groups", {"gate": "expert_choice", "num_groups": 2, "group_top_k": 1, "top_k": 1, **CAPACITY}),
        ("num_groups", {"num_groups": 3, "group_top_k": 1}),
        ("group_top_k", {"num_groups": 4}),
        ("group_top_k", {"num_groups": 8, "group_top_k": 1}),
    ],
)
def test_what_is_refused_has_a_way_out(key: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        MoEConfig(**settings)
    assert caught.value.key == key and caught.value.hint


def test_a_plan_joins_no_rows_that_are_bounded() -> None:
    """It would choose a dispatch that the configuration then refuses."""
    assert MoEConfig().can_join and not MoEConfig(bound_factor=2.0).can_join


@pytest.mark.parametrize(
    ("top_k", "norm_topk_prob", "renormalise"),
    [(1, None, False), (1, False, False), (2, None, True), (2, True, True), (2, False, False)],
)
def test_weights_are_renormalised_by_default_from_two_choices_on(
    top_k: int, norm_topk_prob: bool | None, renormalise: bool
) -> None:
    assert MoEConfig(top_k=top_k, norm_topk_prob=norm_topk_prob).renormalise is renormalise
