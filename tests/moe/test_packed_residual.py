"""Rows that carry the residual stream: the block is the same, wherever a token's outputs are added to it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.features.dispatch import FlatDispatch, Place
from penstock.moe import ChunkRoute, MoEConfig, MoELayer, RouteMaker, Tokens
from penstock.moe.expert_slots import ResidualRows, given_back
from tests.moe.test_layer import layer_of, tokens
from tests.support.draws import draws


def block(layer: MoELayer, norm: nn.Module, residual_TM: Tensor, known: Tokens) -> Tensor:
    """The feed-forward half of a pre-norm block, padding left as it is."""
    routed = layer.route(norm(residual_TM), known)
    route = route_of(routed.plan.counts_CN)
    rows_RM = layer.expert_rows(routed.rows_RM, route)
    return residual_TM + layer.unpermute(rows_RM, routed.weights, routed.plan)


def carried(layer: MoELayer, norm: nn.Module, residual_TM: Tensor, known: Tokens) -> Tensor:
    """The same by rows with everything in them."""
    routed = layer.route(norm(residual_TM), known, 1, ResidualRows(residual_TM))
    route = route_of(routed.plan.counts_CN)
    rows_RM = given_back(routed.rows_RM, norm, partial(layer.expert_rows, route=route), residual=True)
    return layer.unpermute(rows_RM, None, routed.plan)


def route_of(counts_CN: Tensor | None) -> ChunkRoute:
    assert counts_CN is not None
    counts = counts_CN.unsqueeze(0).numpy()
    (route,) = RouteMaker(FlatDispatch(), Place(0, 1, 1)).from_pair(counts, counts).slices
    return route


@draws(30)
@given(
    st.integers(1, 4),
    st.sampled_from([{}, {"norm_topk_prob": False, "routed_scaling_factor": 2.5}]),
    st.integers(0, 9),
    st.data(),
)
def test_outputs_and_gradients_are_those_of_the_block(
    top_k: int, weighing: dict[str, Any], count: int, data: st.DataObject
) -> None:
    valid = data.draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count))
    if top_k == 1:
        weighing = {**weighing, "norm_topk_prob": False}
    config = MoEConfig(num_experts=4, top_k=top_k, moe_ffn_hidden_size=12, **weighing)
    layer, residual_TM = layer_of(config), tokens(count)
    norm = nn.LayerNorm(residual_TM.shape[1], dtype=residual_TM.dtype)
    known = Tokens(valid_T=None if valid is None else torch.tensor(valid, dtype=torch.bool))
    variables = [residual_TM, *norm.parameters(), *layer.parameters()]
    found, wanted = (half(layer, norm, residual_TM, known) for half in (carried, block))
    torch.testing.assert_close(found, wanted)
    slope = torch.arange(wanted.numel(), dtype=wanted.dtype).view_as(wanted)
    gradients = partial(torch.autograd.grad, inputs=variables, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(gradients((found * slope).sum()), gradients((wanted * slope).sum()))


def test_of_ranks_that_compute_a_row_together_one_adds_the_residual() -> None:
    rows_RN = tokens(3)
    alone, others = (
        given_back(rows_RN, nn.Identity(), lambda x_RM: 2 * x_RM, residual=adds) for adds in (True, False)
    )
    torch.testing.assert_close(alone - others, rows_RN[:, :-2] * rows_RN[:, -1:])
