"""The MoE layer alone, an ordinary module: against loops over tokens, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe import (
    GeluExperts,
    MergedPermutation,
    MoEConfig,
    MoELayer,
    SoftmaxRouter,
    SortPermutation,
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
from tests.support.layouts import tiny_case
from tests.support.reference import Settings
from tests.support.reference_moe import moe_layer
from tests.support.reference_step import settings_of as step_settings

GROUPS: tuple[BalanceGroup, ...] = ("global", "sequence", "microbatch")


def settings_of(config: MoEConfig, samples: int, valid: Tensor | None) -> Settings:
    """For the reference: one layer, which sees all samples at once."""
    case = replace(tiny_case(schedule="sequential"), moe=config, batch=samples)
    mask = None if valid is None else ~valid
    return replace(step_settings(case), aux_coeff=AUX, z_coeff=Z, padding=mask, shares=[])


# Against loops


def check_loops(config: MoEConfig, x_BLM: Tensor, valid: Tensor | None = None) -> None:
    """Compare outputs, losses and gradients."""
    layer = layer_of(config)
    settings = settings_of(config, len(x_BLM), valid)
    weights: dict[str, Tensor] = dict(layer.named_parameters())
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


@pytest.mark.parametrize("kind", KINDS)
def test_without_samples_all_tokens_are_one(kind: str) -> None:
    config = config_of(kind, aux_loss_group="sequence")
    layer, x_TM = layer_of(config), states()[0]
    valid = padding()[0]
    out = layer(x_TM, valid)
    wanted, extra = moe_layer(
        x_TM.unsqueeze(0), dict(layer.named_parameters()), settings_of(config, 1, valid.unsqueeze(0)), 0
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
