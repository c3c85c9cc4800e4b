"""The optimiser and its learning rate."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.train.optimizer import (
    OptimizerConfig,
    build_adamw,
    initialise_state,
    learning_rate,
    set_learning_rate,
)

schedules = st.builds(
    OptimizerConfig,
    lr=st.floats(1e-6, 1.0),
    min_lr_ratio=st.floats(0, 1),
    warmup_steps=st.integers(0, 50),
)


class Net(nn.Module):
    """One parameter of every kind; `dtype` of all."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(7, 12, dtype=dtype)
        self.mix = nn.Linear(12, 9, dtype=dtype)
        self.norm = nn.LayerNorm(9, dtype=dtype)
        self.expert_weight = nn.Parameter(torch.randn(3, 9, 5, dtype=dtype))
        self.expert_bias = nn.Parameter(torch.randn(3, 5, dtype=dtype))


def set_gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)


def take_steps(net: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        set_gradients(net, seed)
        optimizer.step()


def identical(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


@given(schedules, st.integers(0, 400), st.integers(1, 300))
def test_the_learning_rate_stays_in_its_range(config: OptimizerConfig, step: int, total_steps: int) -> None:
    lr = learning_rate(config, step, total_steps)
    floor = 0.0 if step < config.warmup_steps else config.lr * config.min_lr_ratio
    assert floor * (1 - 1e-9) <= lr <= config.lr * (1 + 1e-9)


@given(schedules, st.integers(1, 300))
def test_the_learning_rate_rises_and_then_falls(config: OptimizerConfig, steps_down: int) -> None:
    total_steps = config.warmup_steps + steps_down
    rates = [learning_rate(config, step, total_steps) for step in range(total_steps)]
    rise, fall = rates[: config.warmup_steps], rates[config.warmup_steps :]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert not rise or rise[-1] == config.lr
    assert fall[-1] == pytest.approx(config.lr * config.min_lr_ratio)


def test_weights_decay_and_embeddings_norms_and_biases_do_not() -> None:
    net = Net()
    decay, no_decay = build_adamw(net.named_parameters(), OptimizerConfig(weight_decay=0.3)).param_groups
    assert decay["weight_decay"] == 0.3
    assert no_decay["weight_decay"] == 0.0
    assert decay["param_names"] == ["expert_weight", "mix.weight"]
    assert no_decay["param_names"] == [
        "expert_bias",
        "mix.bias",
        "norm.bias",
        "norm.weight",
        "token_embedding.weight",
    ]
    named = dict(net.named_parameters())
    for group in (decay, no_decay):
        pairs = zip(group["param_names"], group["params"], strict=True)
        assert all(parameter is named[name] for name, parameter in pairs)


@given(st.permutations(list(range(7))))
def test_the_order_of_parameters_is_that_of_their_names(order: list[int]) -> None:
    named = list(Net().named_parameters())
    groups = build_adamw([named[i] for i in order], OptimizerConfig()).param_groups
    expected = build_adamw(named, OptimizerConfig()).param_groups
    assert [group["param_names"] for group in groups] == [group["param_names"] for group in expected]


def test_frozen_parameters_are_left_alone() -> None:
    net = Net()
    net.expert_weight.requires_grad_(False)
    groups = build_adamw(net.named_parameters(), OptimizerConfig()).param_groups
    assert groups[0]["param_names"] == ["mix.weight"]
    with pytest.raises(ValueError, match="no parameter wants a gradient"):
        build_adamw(net.requires_grad_(False).named_parameters(), OptimizerConfig())


def test_the_learning_rate_reaches_every_group() -> None:
    net = Net()
    optimizer = build_adamw(net.named_parameters(), OptimizerConfig())
    before = copy.deepcopy(net)
    set_learning_rate(optimizer, 0.0)
    take_steps(net, optimizer, range(1))
    assert identical(net, before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_an_update_is_that_of_the_published_formula(dtype: torch.dtype, tolerance: float) -> None:
    config = OptimizerConfig()
    weight = nn.Parameter(torch.randn(9, 12, dtype=dtype))
    optimizer = build_adamw([("mix.weight", weight)], config)
    before, gradient = weight.detach().clone(), torch.randn(9, 12, dtype=dtype)
    weight.grad = gradient.clone()
    optimizer.step()
    # At the first step the bias-corrected averages are the gradient and its square.
    expected = before * (1 - config.lr * config.weight_decay)
    expected -= config.lr * gradient / (gradient.abs() + config.eps)
    difference = (weight.detach() - expected).norm() / expected.norm()
    assert difference.item() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_after_early_state_is_identical_to_the_bit(dtype: torch.dtype) -> None:
    lazy_net = Net(dtype)
    early_net = copy.deepcopy(lazy_net)
    lazy = build_adamw(lazy_net.named_parameters(), OptimizerConfig())
    early = build_adamw(early_net.named_parameters(), OptimizerConfig())
    initialise_state(early)
    assert identical(lazy_net, early_net)
    take_steps(lazy_net, lazy, range(5))
    take_steps(early_net, early, range(5))
    assert identical(lazy_net, early_net)
    for a, b in zip(lazy_net.parameters(), early_net.parameters(), strict=True):
        left, right = lazy.state[a], early.state[b]
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
        assert all(left[key].dtype == right[key].dtype for key in left)


def test_state_that_exists_is_kept() -> None:
    net = Net()
    optimizer = build_adamw(net.named_parameters(), OptimizerConfig())
    take_steps(net, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    initialise_state(optimizer)
    after = optimizer.state_dict()
    for index, state in before["state"].items():
        assert all(torch.equal(state[key], after["state"][index][key]) for key in state)
