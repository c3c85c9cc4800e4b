"""Initial weights: a function of seed and logical name, whatever the layout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.models import ModelConfig, MoEDecoder
from penstock.models.decoder import fill_normal
from penstock.moe import MoEConfig

MODEL = ModelConfig(num_layers=3, hidden_size=32, num_heads=2, seq_len=8, vocab_size=50, moe_layers=(0, 2))
MOE = MoEConfig(num_experts=8, moe_ffn_hidden_size=24)


def model(seed: int, ep_size: int = 1, ep_rank: int = 0) -> MoEDecoder:
    made = MoEDecoder(MODEL, MOE, ep_size=ep_size, ep_rank=ep_rank)
    made.initialise(seed)
    return made


@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_every_layout_draws_the_same_weights(ep_size: int) -> None:
    whole = dict(model(7).named_parameters())
    for ep_rank in range(ep_size):
        mine = model(7, ep_size, ep_rank)
        share = MOE.num_experts // ep_size
        for name, parameter in mine.named_parameters():
            expected: Tensor = whole[name]
            if ".experts." in name:
                expected = expected[ep_rank * share : (ep_rank + 1) * share]
            assert torch.equal(parameter, expected), f"{name} on ep_rank {ep_rank}"


def test_no_two_experts_or_layers_are_alike() -> None:
    weights = dict(model(7).named_parameters())
    drawn: list[Tensor] = [weights[f"model.layers.{layer}.mlp.experts.w_up"] for layer in (0, 2)]
    experts = torch.cat(drawn).flatten(1)
    assert len(experts.unique(dim=0)) == 2 * MOE.num_experts


def test_the_seed_decides() -> None:
    first, again, other = (dict(model(seed).named_parameters()) for seed in (1, 1, 2))
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        if parameter.dim() >= 2:
            assert not torch.equal(parameter, other[name])


def test_scales() -> None:
    """0.02, less for projections into the residual stream; norms start as ones."""
    for name, parameter in model(0).named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            small = name.endswith(("self_attn.o_proj.weight", "w_down", "mlp.down_proj.weight"))
            std = 0.02 / math.sqrt(6) if small else 0.02
            assert float(parameter.detach().std()) == pytest.approx(std, rel=0.15), name
            assert abs(float(parameter.detach().mean())) < 5 * std / math.sqrt(parameter.numel()), name


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    fill_normal(torch.empty(5, 5), "name", 0, 1.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_float64_weights_are_the_same_numbers() -> None:
    single, double = torch.empty(9), torch.empty(9, dtype=torch.float64)
    for tensor in (single, double):
        fill_normal(tensor, "name", 3, 0.02)
    assert torch.equal(single.double(), double)


def test_meta_tensors_stay_without_data() -> None:
    with torch.device("meta"):
        made = model(0)
    assert all(parameter.is_meta for parameter in made.parameters())
