"""Contenders have the same weights and compute the same; the comparison refuses others."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from torch import Tensor, nn

from benchmarks.layer import measure_layers, render_layers
from benchmarks.layer.contenders import (
    EAGER,
    GROUPED,
    LOOP,
    PENSTOCK,
    TOLERANCE,
    LayerSize,
    build_contenders,
    check_agreement,
    outcome,
    require_transformers,
)
from benchmarks.layer.layers import _hopeless
from penstock.config import ConfigError

SIZES = (
    LayerSize(tokens=24, hidden_size=8, ffn_hidden_size=16, experts=2),
    LayerSize(tokens=5, hidden_size=16, ffn_hidden_size=8, experts=9),  # some experts get nothing
    LayerSize(tokens=12, hidden_size=8, ffn_hidden_size=8, experts=4, top_k=3),
)


def inputs(size: LayerSize) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = size.tokens, size.hidden_size
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_contenders_give_the_same_output_and_input_gradient(size: LayerSize) -> None:
    contenders, (x_TM, grad_TM) = build_contenders(size), inputs(size)
    assert list(contenders) == [PENSTOCK, EAGER, GROUPED, LOOP]
    found = {name: outcome(each, x_TM, grad_TM) for name, each in contenders.items()}
    for tensors in found.values():
        for ours, theirs in zip(found[PENSTOCK], tensors, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    check_agreement(contenders, x_TM, grad_TM)


def test_contenders_have_as_many_weights_and_train_them_all() -> None:
    size = SIZES[0]
    contenders, (x_TM, grad_TM) = build_contenders(size), inputs(size)
    counts = {sum(p.numel() for p in each.parameters()) for each in contenders.values()}
    assert counts == {size.experts * size.hidden_size * (1 + 3 * size.ffn_hidden_size)}
    for each in contenders.values():
        each(x_TM).backward(grad_TM)
        assert all(p.grad is not None and p.grad.any() for p in each.parameters())


def test_another_result_is_refused() -> None:
    contenders, (x_TM, grad_TM) = build_contenders(SIZES[0]), inputs(SIZES[0])
    with torch.no_grad():
        next(contenders[LOOP].parameters()).mul_(-1.0)
    with pytest.raises(RuntimeError, match="penstock and loop differ by"):
        check_agreement(contenders, x_TM, grad_TM)


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x_TM: Tensor) -> Tensor:
        return x_TM * self.factor


@pytest.mark.parametrize("factor", [1 + 2 * TOLERANCE, float("nan")])
def test_the_tolerance_is_relative_and_a_nan_never_agrees(factor: float) -> None:
    x_TM = torch.full((3, 2), 1e-6)
    check_agreement({"one": Scaled(1.0), "other": Scaled(1 + 0.5 * TOLERANCE)}, x_TM, x_TM)
    with pytest.raises(RuntimeError, match="in the output"):
        check_agreement({"one": Scaled(1.0), "other": Scaled(factor)}, x_TM, x_TM)


def test_only_what_is_far_behind_gets_few_rounds() -> None:
    assert _hopeless({PENSTOCK: 1.0, LOOP: 2.9, EAGER: 3.1}) == [EAGER]
    assert _hopeless({PENSTOCK: 9.0, LOOP: 1.0}) == [], "the others are measured against it"


def test_everything_is_measured_and_shown() -> None:
    found = measure_layers(sizes=SIZES, rounds=3)
    assert [case.size for case in found.cases] == list(SIZES)
    for case in found.cases:
        assert [each.name for each in case.contenders] == [PENSTOCK, EAGER, GROUPED, LOOP]
        assert case.contender(PENSTOCK).to_penstock.median == 1.0
        assert case.best_other.name != PENSTOCK
        for each in case.contenders:
            assert 0 < each.step_s.low <= each.step_s.median <= each.step_s.high
    assert f"transformers {metadata.version('transformers')}" in render_layers(found)


@pytest.mark.parametrize(("version", "why"), [(None, "not installed"), ("4.57.1", "4.57.1 is installed")])
def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, version: str | None, why: str
) -> None:
    def find(package: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(metadata, "version", find)
    with pytest.raises(ConfigError, match=why) as caught:
        measure_layers(sizes=SIZES[:1], rounds=1)
    assert "pip install 'transformers" in str(caught.value)
    with pytest.raises(ConfigError):
        require_transformers()
