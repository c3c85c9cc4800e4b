"""The MoE layer alone: an ordinary module, equal to a loop over tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.features.dispatch import FlatDispatch, Place
from penstock.moe import MoEConfig, MoELayer, RouteMaker, Tokens, build_layer
from tests.support.draws import draws

HIDDEN = 8


def layer_of(config: MoEConfig, dtype: torch.dtype = torch.float64) -> MoELayer:
    layer = build_layer(HIDDEN, config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def tokens(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    made = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return made.to(dtype).requires_grad_()


def loop(layer: MoELayer, x_TM: Tensor, config: MoEConfig) -> Tensor:
    """Token by token, choice by choice; slots are given out choice-major."""
    w = dict(layer.named_parameters())
    probability_TE = (x_TM @ w["gate.weight"].t()).softmax(-1)
    values, indices = probability_TE.topk(config.top_k)
    if config.renormalise:
        values = values / values.sum(-1, keepdim=True)
    slots: float = math.inf
    if config.capacity_factor is not None:
        exact = config.capacity_factor * config.top_k * len(x_TM) / config.num_experts
        slots = max(config.min_capacity, math.ceil(exact))
    taken = [0] * config.num_experts
    out = [x_TM.new_zeros(HIDDEN) for _ in x_TM]
    for choice in range(config.top_k):
        for t, x in enumerate(x_TM):
            e = int(indices[t, choice])
            taken[e] += 1
            if taken[e] <= slots:
                up = x @ w["experts.w_up"][e]
                swiglu = config.expert == "swiglu"
                hidden = F.silu(x @ w["experts.w_gate"][e]) * up if swiglu else F.gelu(up)
                out[t] = out[t] + values[t, choice] * (hidden @ w["experts.w_down"][e])
    return torch.stack(out)


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
def test_forward_and_gradients_equal_a_loop(config: MoEConfig, count: int) -> None:
    layer, x_TM = layer_of(config), tokens(count)
    ours, theirs = layer(x_TM), loop(layer, x_TM, config)
    torch.testing.assert_close(ours, theirs)
    variables = [x_TM, *layer.parameters()]
    weight = torch.arange(ours.numel(), dtype=ours.dtype).view_as(ours)
    found, wanted = (
        torch.autograd.grad((out * weight).sum(), variables, allow_unused=True, materialize_grads=True)
        for out in (ours, theirs)
    )
    torch.testing.assert_close(found, wanted)


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
        out = layer_of(config, torch.float32)(tokens(9, dtype))
        assert out.dtype == dtype
        assert (out.double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize(
    ("num_experts", "ep_size", "nearest"), [(8, 3, 9), (10, 3, 9), (7, 4, 8), (2, 4, 4), (9, 4, 8)]
)
def test_experts_that_do_not_divide_are_refused(num_experts: int, ep_size: int, nearest: int) -> None:
    with pytest.raises(ValueError, match=rf"num_experts = {num_experts} .*nearest valid: {nearest}$"):
        build_layer(HIDDEN, MoEConfig(num_experts=num_experts), ep_size=ep_size)


def test_a_rank_holds_its_share() -> None:
    layer = build_layer(HIDDEN, MoEConfig(num_experts=6, moe_ffn_hidden_size=12), ep_size=3, ep_rank=2)
    assert (layer.num_local_experts, layer.placement.held(2)) == (2, (4, 5))
    assert {p.shape[0] for p in layer.experts.parameters()} == {2}
    assert layer.gate.get_parameter("weight").shape == (6, HIDDEN)


def test_forward_across_ranks_needs_a_stack() -> None:
    layer = build_layer(HIDDEN, MoEConfig(num_experts=4), ep_size=2)
    with pytest.raises(RuntimeError, match=r"2 ranks: give the layer an exchange"):
        layer(tokens(3))


def test_padding_may_hold_anything() -> None:
    """A NaN there reaches neither other tokens nor the gradient of a weight."""
    layer = layer_of(MoEConfig(num_experts=4, top_k=2, moe_ffn_hidden_size=8))
    x_TM, valid_T = tokens(6).detach(), torch.tensor([True, True, False, True, False, True])
    found = []
    for padding in (0.0, math.nan):
        given_TM = x_TM.clone()
        given_TM[~valid_T] = padding
        layer.zero_grad()
        out_TM = layer(given_TM, valid_T)
        losses = layer.losses
        assert losses is not None
        (out_TM[valid_T].square().sum() + losses.balance + losses.z).backward()
        grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        found.append([out_TM[valid_T].detach(), losses.balance.detach(), *grads])
    for plain, other in zip(*found, strict=True):
        assert other.isfinite().all() and torch.equal(plain, other)
