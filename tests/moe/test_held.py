"""Experts of another rank are not loaded without a word, and saving those of one rank alone is told."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from penstock.moe.held import NAME, HeldExperts


def layer(*numbers: int) -> nn.Module:
    held = HeldExperts(numbers, 8, first=numbers[:1] == (0,))
    return nn.ModuleDict({"gate": nn.Linear(2, 2), NAME: held})


def test_the_first_rank_warns_once_that_it_saves_its_own_alone() -> None:
    first = layer(0, 1, 2, 3)
    with pytest.warns(UserWarning, match=r"experts 0 to 3 of a layer whose 8 experts .* on every rank"):
        first.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.state_dict()
        layer(4, 5, 6, 7).state_dict()


def test_a_rank_takes_its_own_experts_only() -> None:
    other = layer(1, 3, 6).state_dict()
    layer(1, 3, 6).load_state_dict(other)
    with pytest.raises(ValueError, match="has experts 1, 3, 6, and this rank holds experts 4 to 7 of 8"):
        layer(4, 5, 6, 7).load_state_dict(other, strict=False)
    with pytest.raises(ValueError, match="has experts 1, 3, 6, and this rank holds no experts of 8"):
        layer().load_state_dict(other, strict=False)


def test_a_state_that_says_nothing_is_taken_and_all_else_must_be_there() -> None:
    state = {"gate.weight": torch.ones(2, 2), "gate.bias": torch.ones(2)}
    filled = layer(4, 5)
    filled.load_state_dict(state)
    assert torch.equal(next(filled.parameters()), torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "gate.bias"\.'):
        filled.load_state_dict({"gate.weight": state["gate.weight"]})
