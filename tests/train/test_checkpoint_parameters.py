"""Checkpoints of models with tied and with frozen parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.config import ConfigError
from penstock.train.checkpoint import Checkpoints
from penstock.train.optimizer import build_adamw, initialise_state
from tests.support.checkpoints import CASE, IDENTITY, check_equal, state_of, train, trained
from tests.support.parity import Case, stack_of

TIED = replace(CASE, model=replace(CASE.model, tie_word_embeddings=True))


@pytest.mark.slow
def test_a_tied_head_comes_back(tmp_path: Path) -> None:
    first = trained(0, TIED, tmp_path)
    path = first.save(2)
    second = trained(0, replace(TIED, seed=5), tmp_path)
    assert second.load(path) == 2
    check_equal(state_of(second), state_of(first))
    model = second.stack.model
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert train(second, 0, TIED, 2) == train(first, 0, TIED, 2)


@pytest.mark.parametrize(
    ("saved", "wanted", "problem"),
    [
        (TIED, CASE, "lm_head.weight is missing in it"),
        (CASE, TIED, r"lm_head.weight\S* exists there and not here"),
    ],
)
def test_tied_and_untied_refuse_each_other(tmp_path: Path, saved: Case, wanted: Case, problem: str) -> None:
    path = trained(0, saved, tmp_path).save(2)
    with pytest.raises(ConfigError, match=problem):
        trained(0, wanted, tmp_path).load(path)


def with_frozen_norms(case: Case, folder: Path) -> Checkpoints:
    stack = stack_of(0, case)
    for name, parameter in stack.model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    optimizer = build_adamw(stack.model.named_parameters(), case.config.optimizer)
    initialise_state(optimizer)
    return Checkpoints(folder, stack, optimizer, keep=2, identity=IDENTITY)


def test_frozen_parameters_are_saved_without_moments(tmp_path: Path) -> None:
    first = with_frozen_norms(CASE, tmp_path)
    train(first, 0, CASE, 2)
    path = first.save(2)
    second = with_frozen_norms(replace(CASE, seed=5), tmp_path)
    assert second.load(path) == 2
    assert train(second, 0, CASE, 2) == train(first, 0, CASE, 2)
    saved = dict(first.stack.model.named_parameters())
    for name, parameter in second.stack.model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
    with pytest.raises(ConfigError, match=r"norm.* is missing in it"):
        trained(0, CASE, tmp_path).load(path)
