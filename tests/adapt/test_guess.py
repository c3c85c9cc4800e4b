"""Models of families that are not described."""

from __future__ import annotations

import pytest
import torch

import penstock
from penstock.adapt import FAMILIES
from tests.support.adapted import small


def test_what_is_not_a_number_agrees_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: each for name, each in FAMILIES.items() if name != "olmoe"}
    monkeypatch.setattr("penstock.adapt.families.FAMILIES", few)
    model = small("olmoe")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = torch.nan
    with pytest.raises(ValueError, match="computes something else than whole"):
        penstock.parallelize(model)
