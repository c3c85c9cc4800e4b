"""Section `[moe]`: what it refuses, and with which way out."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import ConfigError
from penstock.moe import MoEConfig


@pytest.mark.parametrize(
    ("settings", "key", "hint"),
    [
        ({"num_experts": 0}, "num_experts", "Nearest valid: 1."),
        ({"top_k": 0}, "top_k", "Nearest valid: 1."),
        ({"num_experts": 4, "top_k": 5}, "top_k", "Nearest valid: 4."),
        ({"moe_ffn_hidden_size": 0}, "moe_ffn_hidden_size", "Nearest valid: 1."),
        ({"capacity_factor": 0.0}, "capacity_factor", "none"),
        ({"capacity_factor": -1.0}, "capacity_factor", "none"),
        ({"capacity_factor": float("nan")}, "capacity_factor", "none"),
        ({"top_k": 1, "norm_topk_prob": True}, "norm_topk_prob", "Use false"),
        ({"min_capacity": 0}, "min_capacity", "Nearest valid: 1."),
        ({"aux_loss_coeff": -0.1}, "aux_loss_coeff", "0"),
        ({"z_loss_coeff": -0.1}, "z_loss_coeff", "0"),
        ({"bound_factor": 0.9}, "bound_factor", "1"),
        ({"bound_factor": 2.0, "capacity_factor": 2.0}, "bound_factor", "capacity_factor"),
        ({"bound_factor": 2.0, "gate": "soft"}, "bound_factor", "gate"),
        ({"bound_factor": 2.0, "one_copy_per_rank": True}, "bound_factor", "one_copy_per_rank"),
        ({"bound_factor": 2.0, "dispatch": "node_once"}, "bound_factor", "dispatch"),
    ],
)
def test_refuses_with_a_way_out(settings: dict[str, Any], key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MoEConfig(**settings)
    assert caught.value.key == key
    assert hint in caught.value.hint


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


def test_matrices_per_expert() -> None:
    assert MoEConfig(expert="gelu").expert_matrices == 2
    assert MoEConfig(expert="swiglu").expert_matrices == 3


def test_every_expert_may_be_chosen() -> None:
    assert MoEConfig(num_experts=3, top_k=3).top_k == 3


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"gate": "expert_choice", "permutation": "sort", "capacity_factor": 1.0}, "every slot is filled"),
        ({"gate": "soft", "permutation": "sort"}, "no token has a row of its own"),
        ({"gate": "soft", "permutation": "index"}, "it has no index"),
        ({"gate": "soft", "capacity_factor": 1.0}, "slots_per_expert says"),
        ({"gate": "expert_choice"}, "capacity_factor says how many"),
        ({"permutation": "sort", "capacity_factor": 1.0}, "would have no effect"),
        ({"permutation": "index"}, "set a capacity_factor"),
        ({"permutation": "einsum"}, "set a capacity_factor"),
        ({"one_copy_per_rank": True, "capacity_factor": 1.0}, "slots belong to experts"),
        ({"one_copy_per_rank": True, "comm_dtype": "int8"}, "would be rounded"),
        ({"dispatch": "node_once", "gate": "soft"}, "whose tokens do not choose"),
        (
            {"dispatch": "node_once", "permutation": "einsum", "capacity_factor": 1.0},
            "a slot for every choice",
        ),
        ({"dispatch": "node_once", "one_copy_per_rank": True}, "the same by rank"),
        ({"dispatch": "node_once", "comm_dtype": "int8"}, "rounds what is beside it"),
        ({"gate": "soft", "expert_bias_rate": 0.1}, "how tokens choose"),
        ({"gate": "expert_choice", "capacity_factor": 1.0, "num_groups": 2, "group_top_k": 1}, "how tokens"),
        ({"num_groups": 3, "group_top_k": 1}, "must divide num_experts"),
        ({"num_groups": 4}, "belong together"),
        ({"num_groups": 8, "group_top_k": 1}, "need 2 groups"),
    ],
)
def test_what_does_not_fit_together_says_why(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        MoEConfig(**settings)
    assert caught.value.hint
