"""The MoE layer alone, an ordinary module: against loops over tokens, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.features.dispatch import FlatDispatch, Place
from penstock.moe import (
    GeluExperts,
    MergedPermutation,
    MoEConfig,
    MoELayer,
    RouteMaker,
    SoftmaxRouter,
    SortPermutation,
    Tokens,
    build_layer,
)
from penstock.moe.config import BalanceGroup
from penstock.moe.exchange import Alone
from penstock.moe.experts import ExpertShard
from tests.support.alone import (
    AUX,
    EXPERTS,
    HIDDEN,
    KINDS,
    LENGTH,
    SAMPLES,
    Z,
    close,
    config_of,
    gradients,
    layer_of,
    losses_of,
    numbers,
    padding,
    states,
    tokens,
    total_loss,
    weighted,
)
from tests.support.draws import draws
from tests.support.reference import Settings
from tests.support.reference_moe import moe_layer

GROUPS: tuple[BalanceGroup, ...] = ("global", "sequence", "microbatch")


def settings_of(config: MoEConfig, samples: int, valid: Tensor | None) -> Settings:
    groups = (config.num_groups, config.group_top_k)
    return Settings(
        num_layers=1,
        num_heads=1,
        key_value_heads=1,
        head_size=2,
        theta=1e4,
        eps=1e-6,
        moe_layers=frozenset({0}),
        num_experts=config.num_experts,
        top_k=config.top_k,
        swiglu=config.expert == "swiglu",
        renormalise=config.renormalise,
        gate=config.gate,
        scale=config.routed_scaling_factor,
        groups=None if None in groups else groups,  # type: ignore[arg-type]  # either none is None or both
        slots_per_expert=config.slots_per_expert,
        modules=False,
        seed=0,
        padding=None if valid is None else ~valid,
        capacity_factor=config.capacity_factor,
        min_capacity=config.min_capacity,
        aux_coeff=AUX,
        aux_group=config.aux_loss_group,
        z_coeff=Z,
        pieces=[list(range(samples))],
        expert_slots=[samples],
    )


def weights_of(layer: MoELayer) -> dict[str, Tensor]:
    return dict(layer.named_parameters())


# Against loops


def check_loops(config: MoEConfig, x_BLM: Tensor, valid: Tensor | None = None) -> None:
    """Compare outputs, losses and gradients."""
    layer = layer_of(config)
    settings, weights = settings_of(config, len(x_BLM), valid), weights_of(layer)
    out = layer(x_BLM, valid)
    wanted, extra = moe_layer(x_BLM, weights, settings, 0)
    _, balance = moe_layer(x_BLM, weights, replace(settings, z_coeff=0.0), 0)
    close(out, wanted)
    close(losses_of(layer).balance * AUX, balance)
    close(losses_of(layer).z * Z, extra - balance)
    variables = [x_BLM, *layer.parameters()]
    close(gradients(total_loss(layer, out), variables), gradients(weighted(wanted) + extra, variables))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_output_losses_and_gradients_equal_loops(kind: str, padded: bool) -> None:
    for group in GROUPS:
        check_loops(config_of(kind, aux_loss_group=group), states(), padding() if padded else None)


@st.composite
def configs(draw: st.DrawFn) -> MoEConfig:
    num_experts = draw(st.integers(1, 5))
    return MoEConfig(
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        moe_ffn_hidden_size=12,
        expert=draw(st.sampled_from(["gelu", "swiglu"])),
        capacity_factor=draw(st.none() | st.sampled_from([0.5, 1.0])),
        min_capacity=draw(st.integers(1, 3)),
    )


@draws(40)
@given(configs(), st.integers(1, 10))
def test_a_layer_of_any_size_equals_loops(config: MoEConfig, count: int) -> None:
    check_loops(config, numbers(1, count, HIDDEN).requires_grad_())


@draws(40)
@given(configs(), st.integers(1, 10), st.integers(1, 12))
def test_chunks_do_not_change_the_result(config: MoEConfig, count: int, chunks: int) -> None:
    """The halves of the layer around a loop over chunks give what `forward` gives."""
    layer, x_TM = layer_of(config), tokens(count)
    routed = layer.route(x_TM, Tokens(), chunks)
    maker = RouteMaker(FlatDispatch(), Place(0, 1, 1))
    if routed.plan.slots is not None:
        routes = maker.even(routed.plan.slots, config.num_experts)
    else:
        assert routed.plan.counts_CN is not None
        counts = routed.plan.counts_CN.unsqueeze(0).numpy()
        routes = maker.from_pair(counts, counts)
    pieces = routed.rows_RM.split(list(routed.plan.chunk_rows))
    outputs = [layer.expert_rows(rows, route) for rows, route in zip(pieces, routes.slices, strict=True)]
    out_TM = layer.unpermute(torch.cat(outputs), routed.weights, routed.plan)
    torch.testing.assert_close(out_TM, layer(x_TM))


def test_rows_of_several_ranks_meet_the_right_experts() -> None:
    """Rows arrive sorted by (source, expert) and go back in that order."""
    layer = layer_of(MoEConfig(num_experts=3, moe_ffn_hidden_size=12))
    rows_RM = tokens(8)
    counts = np.array([[[2, 0, 1]], [[1, 3, 1]]])
    (route,) = RouteMaker(FlatDispatch(), Place(0, 2, 2)).from_pair(counts, counts).slices
    expert_of_row = [0, 0, 2, 0, 1, 1, 1, 2]
    out_RM = layer.expert_rows(rows_RM, route)
    for row, out, e in zip(rows_RM, out_RM, expert_of_row, strict=True):
        sizes = [int(expert == e) for expert in range(3)]
        torch.testing.assert_close(out, layer.experts(row.unsqueeze(0), sizes)[0])


def test_float32_and_bfloat16_work_alone() -> None:
    config = MoEConfig(num_experts=4, moe_ffn_hidden_size=16)
    exact = layer_of(config)(tokens(9))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        # float32 weights; only what enters is rounded. The router may see a tie otherwise.
        out = layer_of(config).float()(tokens(9).to(dtype))
        assert out.dtype == dtype
        assert (out.double() - exact).norm() <= tolerance * exact.norm()


def test_a_rank_holds_its_share() -> None:
    layer = build_layer(HIDDEN, MoEConfig(num_experts=6, moe_ffn_hidden_size=12), ep_size=3, ep_rank=2)
    assert (layer.num_local_experts, layer.placement.held(2)) == (2, (4, 5))
    assert {p.shape[0] for p in layer.experts.parameters()} == {2}
    assert layer.gate.get_parameter("weight").shape == (6, HIDDEN)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_parts_of_all_samples_have_slots_of_their_own(kind: str) -> None:
    """What the loops make of shares is what the layer makes of every share alone."""
    layer, x, valid = layer_of(config_of(kind)), states()[:, :4], padding()[:, :4]
    settings = replace(settings_of(config_of(kind), SAMPLES, valid), shares=[range(2), range(2, 4)])
    wanted, _ = moe_layer(x, weights_of(layer), settings, 0)
    close(torch.cat([layer(x[:, :2], valid[:, :2]), layer(x[:, 2:], valid[:, 2:])], dim=1), wanted)


def test_the_balance_groups_differ() -> None:
    """Or the test above would not tell them apart."""
    values = []
    for group in ("global", "sequence"):
        layer = layer_of(config_of("softmax sort", aux_loss_group=group))
        layer(states())
        values.append(losses_of(layer).balance.item())
    assert abs(values[0] - values[1]) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_without_samples_all_tokens_are_one(kind: str) -> None:
    config = config_of(kind, aux_loss_group="sequence")
    layer, x_TM = layer_of(config), states()[0]
    valid = padding()[0]
    out = layer(x_TM, valid)
    wanted, extra = moe_layer(
        x_TM.unsqueeze(0), weights_of(layer), settings_of(config, 1, valid.unsqueeze(0)), 0
    )
    assert out.shape == x_TM.shape
    close(out, wanted[0])
    close(AUX * losses_of(layer).balance + Z * losses_of(layer).z, extra)


@pytest.mark.parametrize("kind", KINDS)
def test_what_padding_holds_does_not_matter(kind: str) -> None:
    """A NaN there reaches neither other tokens nor the gradient of a routed expert or a gate."""
    layer, valid = layer_of(config_of(kind)), padding()
    results = []
    for filling in (0.0, 3.0, *([math.nan] if layer.shared is None else [])):
        x = states().detach().masked_fill(~valid.unsqueeze(-1), filling).requires_grad_()
        out = layer(x, valid)
        loss = weighted(out[valid]) + AUX * losses_of(layer).balance + Z * losses_of(layer).z
        results.append([loss, *gradients(loss, list(layer.parameters()))])
    for result in results[1:]:
        close(result, results[0])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "soft"])
def test_a_batch_of_nothing_but_padding_gives_zeros_and_finite_gradients(kind: str) -> None:
    layer, x = layer_of(config_of(kind)), states()
    out = layer(x, torch.zeros(SAMPLES, LENGTH, dtype=torch.bool))
    loss = total_loss(layer, out)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(loss, [x, *layer.parameters()]))
    if layer.shared is None:
        assert not out.any()
    assert losses_of(layer).balance.item() == losses_of(layer).z.item() == 0.0


# What does not fit


@pytest.mark.parametrize(
    ("num_experts", "ep_size", "nearest"), [(8, 3, 9), (10, 3, 9), (7, 4, 8), (2, 4, 4), (9, 4, 8)]
)
def test_experts_that_do_not_divide_are_refused(num_experts: int, ep_size: int, nearest: int) -> None:
    with pytest.raises(ValueError, match=rf"num_experts = {num_experts} .*nearest valid: {nearest}$"):
        build_layer(HIDDEN, MoEConfig(num_experts=num_experts), ep_size=ep_size)


def test_forward_across_ranks_needs_a_stack() -> None:
    layer = build_layer(HIDDEN, MoEConfig(num_experts=4), ep_size=2)
    with pytest.raises(RuntimeError, match=r"2 ranks: give the layer an exchange"):
        layer(tokens(3))


@pytest.mark.parametrize("shape", [(HIDDEN,), (1, 2, 3, HIDDEN)])
def test_x_of_another_dimension(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[tokens, hidden\] or \[samples, tokens, hidden\], not \["):
        layer_of(config_of("softmax sort"))(torch.zeros(shape))


@pytest.mark.parametrize("kind", KINDS)
def test_another_hidden_size(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"hidden size {HIDDEN + 1}, and \w+Router was built for {HIDDEN}$"):
        layer_of(config_of(kind))(numbers(4, HIDDEN + 1))


def test_another_failure_of_a_gate_keeps_its_name() -> None:
    layer = layer_of(config_of("softmax sort"))
    layer.gate.register_forward_pre_hook(lambda module, inputs: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        layer(states())


@pytest.mark.parametrize(
    "valid",
    [
        torch.ones(SAMPLES * LENGTH, dtype=torch.bool),
        torch.ones(SAMPLES, LENGTH, dtype=torch.int64),
        torch.zeros(SAMPLES, LENGTH),
    ],
)
def test_a_mask_of_another_shape_or_type(valid: Tensor) -> None:
    with pytest.raises(ValueError, match=rf"bool \[{SAMPLES}, {LENGTH}\] .* not torch\.\w+ \["):
        layer_of(config_of("softmax sort"))(states(), valid)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"expert": GeluExperts(HIDDEN, 5, 3)}, "num_experts = 4, but 1 rank.* 3 experts each hold 3"),
        (
            {"permutation": SortPermutation(6)},
            "SortPermutation was built for num_experts = 6, but .* num_experts = 4",
        ),
        (
            {"permutation": MergedPermutation(4, 2, 2)},
            "MergedPermutation was built for ranks = 2, but .* ranks = 1",
        ),
    ],
)
def test_parts_of_different_sizes(parts: dict[str, Any], why: str) -> None:
    fitting = {
        "gate": SoftmaxRouter(HIDDEN, EXPERTS, 2),
        "permutation": SortPermutation(EXPERTS),
        "expert": GeluExperts(HIDDEN, 5, EXPERTS),
    }
    MoELayer(**fitting)  # type: ignore[arg-type]  # a table of parts
    with pytest.raises(ValueError, match=why):
        MoELayer(**{**fitting, **parts})


def test_a_shard_of_experts_does_not_run_by_itself() -> None:
    """Its outputs are partial sums, which only a stack adds up."""
    config = MoEConfig(num_experts=4, moe_ffn_hidden_size=8)
    layer = build_layer(HIDDEN, config, shard=ExpertShard(0, 2))
    with pytest.raises(ValueError, match=r"shard 0 of 2, .* run inside a penstock stack only"):
        layer(torch.randn(3, HIDDEN))
    with pytest.raises(ValueError, match="run inside a penstock stack only"):
        MoELayer(gate=layer.gate, permutation=layer.permutation, expert=layer.experts, exchange=Alone())


@pytest.mark.parametrize("part", ["experts", "gate"])
def test_an_update_between_forward_and_backward_is_refused(part: str) -> None:
    """Also by a fused optimiser, whose kernel leaves the version of what it writes."""
    layer = layer_of(config_of("softmax sort"))
    optimizer = torch.optim.AdamW(layer.get_submodule(part).parameters(), lr=0.1, fused=True)
    total_loss(layer, layer(states())).backward()
    loss = total_loss(layer, layer(states()))
    optimizer.step()
    with pytest.raises(RuntimeError):
        loss.backward()
