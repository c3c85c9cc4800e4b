"""Scales of gradients in all forms of the MoE part on ranks that share attention and experts.

Where ranks of an tp group hold the same tokens, a gradient is easily `tp` times too large, or too small: the
tests of scales say which one is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import Tensor

from penstock.config import ConfigError
from penstock.moe import MoEConfig, build_layer
from penstock.moe.config import BalanceGroup
from penstock.moe.experts import ExpertShard
from penstock.runtime.makers import maker_of
from penstock.step.shape import ExpertForm
from penstock.topology import Layout as Place
from tests.support.cases import GATES, ORDERS
from tests.support.layouts import FORMS, TOKENS, Layout, layout_case
from tests.support.parity import merge, reference_step, run_step
from tests.support.ranks import Pools
from tests.support.reference_moe import Weights

ALONE = (4, 2, 4, 1)
"""A layout in which no expert is shared."""


@pytest.mark.parametrize(
    ("moe", "layout", "forms", "key"),
    [
        (
            ORDERS["merged"],
            (4, 1, 2, 2),
            FORMS,
            "moe.one_copy_per_rank",
        ),
        ({"comm_dtype": "int8"}, (4, 1, 2, 2), FORMS, "parallel.etp_size"),
        (GATES["soft"], (4, 2, 4, 1), ("gather", "s1"), "moe.gate"),
    ],
)
def test_what_ranks_cannot_share_says_why(
    moe: dict[str, Any], layout: Layout, forms: tuple[ExpertForm, ...], key: str
) -> None:
    world_size, tp_size, ep_size, etp_size = layout
    config = MoEConfig(**{"num_experts": 8, "moe_ffn_hidden_size": 8} | moe)
    place = Place(world_size=world_size, tp_size=tp_size, ep_size=ep_size, etp_size=etp_size, rank=0)
    layer = build_layer(8, config, ep_size=ep_size, shard=ExpertShard(0, etp_size))
    for form in forms:
        with pytest.raises(ConfigError) as refused:
            maker_of(layer, place, form)
        assert refused.value.key == key


# ---- scales ------------------------------------------------------------------------------------------------

EXPERT = tuple(f"model.layers.0.mlp.experts.{name}.6" for name in ("w_gate", "w_up", "w_down"))
AT_THE_GATE = tuple(
    f"model.layers.0.{name}"
    for name in ("mlp.gate.weight", "post_attention_layernorm.weight", "mlp.shared.expert.w_up")
)
AROUND = (
    "model.embed_tokens.weight",
    "model.layers.1.self_attn.q_norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.post_attention_layernorm.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)


@cache
def gradients(
    ranks: Pools, form: ExpertForm, tokens: str, balance: float, group: BalanceGroup
) -> tuple[Weights, Weights]:
    """Of two tp groups with two shards of every expert, and of the reference."""
    settings: dict[str, Any] = {
        "aux_loss_coeff": balance,
        "aux_loss_group": group,
        "shared_ffn_hidden_size": 6,
    }
    step = layout_case((4, 2, 2, 2), "sequential", form, tokens=tokens, moe_layers=(0,), **settings)
    return merge(ranks(4).run(run_step, step)).gradients, reference_step(step).gradients


def check_scales(ours: Weights, theirs: Weights, names: tuple[str, ...]) -> None:
    scales = {name: scale_of(ours[name], theirs[name]) for name in names}
    wrong = {name: round(scale, 6) for name, scale in scales.items() if abs(scale - 1) > 1e-9}
    assert not wrong, f"so many times too large: {wrong}"


def scale_of(ours: Tensor, theirs: Tensor) -> float:
    size = float(theirs.square().sum())
    assert size > 1e-12, "a gradient of zero has no scale"
    return float((ours * theirs).sum()) / size


@pytest.mark.slow
@pytest.mark.parametrize("tokens", TOKENS)
class TestScales:
    def test_experts_of_the_baseline_count_a_row_once(self, ranks: Pools, tokens: str) -> None:
        """Every rank of an tp group sends the same rows."""
        check_scales(*gradients(ranks, "baseline", tokens, 0.0, "global"), EXPERT)

    @pytest.mark.parametrize("form", [form for form in FORMS if form != "baseline"])
    def test_experts_count_a_row_once(self, ranks: Pools, form: ExpertForm, tokens: str) -> None:
        check_scales(*gradients(ranks, form, tokens, 0.0, "global"), EXPERT)

    @pytest.mark.parametrize("form", ["gather", "s1"])
    def test_gates_of_split_tokens_are_summed_over_the_mp_group(
        self, ranks: Pools, form: ExpertForm, tokens: str
    ) -> None:
        check_scales(*gradients(ranks, form, tokens, 0.0, "global"), AT_THE_GATE)

    @pytest.mark.parametrize("form", ["s2", "baseline"])
    def test_gates_of_whole_tokens_are_complete_on_every_rank(
        self, ranks: Pools, form: ExpertForm, tokens: str
    ) -> None:
        check_scales(*gradients(ranks, form, tokens, 0.0, "global"), AT_THE_GATE)

    @pytest.mark.parametrize("form", FORMS)
    def test_what_stands_around_the_moe_part(self, ranks: Pools, form: ExpertForm, tokens: str) -> None:
        check_scales(*gradients(ranks, form, tokens, 0.0, "global"), AROUND)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("group", ["global", "microbatch", "sequence"])
    def test_balance_losses_count_once(
        self, ranks: Pools, form: ExpertForm, group: BalanceGroup, tokens: str
    ) -> None:
        """They are judged on whole samples and microbatches, whoever has the tokens."""
        with_it = gradients(ranks, form, tokens, 5.0, group)
        without = gradients(ranks, form, tokens, 0.0, "global")  # no loss, no group
        ours, theirs = ({n: a[n] - b[n] for n in a} for a, b in zip(with_it, without, strict=True))
        check_scales(ours, theirs, AT_THE_GATE[:2])
