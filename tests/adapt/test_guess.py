"""Models of families that are not described."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import OlmoeForCausalLM

import penstock
from penstock.adapt import FAMILIES
from tests.support.adapted import Batch, small


def test_what_is_not_a_number_agrees_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: each for name, each in FAMILIES.items() if name != "olmoe"}
    monkeypatch.setattr("penstock.families.known.FAMILIES", few)
    model = small("olmoe")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = torch.nan
    with pytest.raises(ValueError, match="computes something else than whole"):
        penstock.parallelize(model)


class Weighed(OlmoeForCausalLM):
    """Weighs its router loss by a number of another name, some times."""

    times = 1.0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.my_aux_loss_coef = 0.5
        del self.router_aux_loss_coef

    def forward(self, *arguments: Any, **named: Any) -> Any:
        self.router_aux_loss_coef = self.my_aux_loss_coef * self.times
        try:
            return super().forward(*arguments, **named)
        finally:
            del self.router_aux_loss_coef


class WeighedTwice(Weighed):
    """By none of its numbers."""

    times = 2.0


@pytest.mark.slow
def test_what_weighs_a_router_loss_is_found_by_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: each for name, each in FAMILIES.items() if name != "olmoe"}
    monkeypatch.setattr("penstock.families.known.FAMILIES", few)
    given = {**Batch().inputs(), "output_router_logits": True}
    config = small("olmoe").config
    wanted = Weighed(config).train()
    model = copy.deepcopy(wanted)
    expected = wanted(**given)
    found = penstock.parallelize(model)(**given)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-5)
    other = penstock.parallelize(WeighedTwice(config).train())
    assert other(**Batch().inputs()).loss.item() > 0
    with pytest.raises(ValueError, match="how WeighedTwice weighs its router loss was not understood"):
        other(**given)


class WeighedALittle(WeighedTwice):
    """By none of its numbers, and so little that the loss hardly shows it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.my_aux_loss_coef = 5e-5
        self.no_aux_loss_coef = None


class Broken(OlmoeForCausalLM):
    """Has never computed a router loss."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if named.get("output_router_logits"):
            raise KeyError("router_logits")
        return super().forward(*arguments, **named)


@pytest.mark.parametrize("kind", [WeighedALittle, Broken])
def test_a_router_loss_that_is_not_understood_is_refused_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, kind: type[OlmoeForCausalLM]
) -> None:
    few = {name: each for name, each in FAMILIES.items() if name != "olmoe"}
    monkeypatch.setattr("penstock.families.known.FAMILIES", few)
    model = penstock.parallelize(kind(small("olmoe").config).train())
    assert model(**Batch().inputs()).loss.item() > 0
    with pytest.raises(ValueError, match=f"how {kind.__name__} weighs its router loss was not understood"):
        model(**Batch().inputs(), output_router_logits=True)
