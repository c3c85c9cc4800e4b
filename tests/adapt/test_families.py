"""Families of transformers that are not described: each is taken and right, or refused with its reason."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import penstock
from penstock.adapt import FAMILIES
from tests.support.adapted import Batch, distance, grads_of
from tests.support.families import REFUSED, SEEING, TAKEN, seeing, undescribed

DESCRIBED = {*FAMILIES, "granitemoeshared"}
WHOLE = {"dots3_note", "gemma4", "llama4", "qwen3_5_moe", "qwen4_exp"}
"""Configurations whose text part is that of another name here."""


def check_step(wanted: Any, model: Any, given: dict[str, Any]) -> None:
    """A step of `model` is that of `wanted`: loss, router loss and gradients."""
    for each in (wanted, model):
        each.zero_grad()
    theirs, ours = wanted(**given), model(**given)
    for name in ("loss", "aux_loss"):
        if theirs.get(name) is not None:
            assert ours[name].item() == pytest.approx(theirs[name].item(), rel=1e-5), name
            assert theirs[name].item() > 0
    theirs.loss.backward()
    ours.loss.backward()
    expected, found = grads_of(wanted), grads_of(model)
    assert all(distance(found[name], grad) < 1e-4 for name, grad in expected.items())
    assert not any(grad.any() for name, grad in found.items() if name not in expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", TAKEN)
def test_a_family_that_is_taken_trains_as_in_transformers(family: str) -> None:
    model = undescribed(family)
    wanted = copy.deepcopy(model)
    check_step(wanted, penstock.parallelize(model, plan="flowmoe"), Batch(padded=True).inputs())


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_refused_has_its_own_reason(family: str) -> None:
    """And the model is as it was."""
    model = undescribed(family)
    with pytest.raises(ValueError, match=REFUSED[family][1]):
        penstock.parallelize(model)
    assert model.training and not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_every_family_with_experts_is_in_a_table() -> None:
    """Those whose code has experts in modules, which a router of theirs chooses."""
    root = Path(transformers.__file__).parent / "models"
    found = set()
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        folder = root / model_type_to_module_name(model_type)
        code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py"))
        if re.search(r"^class \w*(Experts|Router|MoE|MOE|Moe\w*Block)\b", code, re.MULTILINE):
            found.add(model_type)
    assert found >= {"mixtral", "zaya", *WHOLE}
    assert found - WHOLE <= DESCRIBED | TAKEN.keys() | REFUSED.keys()


@pytest.mark.parametrize("family", SEEING)
def test_the_text_configuration_asks_for_a_router_loss(family: str) -> None:
    """Of a model that also sees, as its own code reads it; and so does an argument, for one step."""
    asked, model = (seeing(family, output_router_logits=value) for value in (True, False))
    wanted = copy.deepcopy(asked)
    scheduled = penstock.parallelize(asked, plan="flowmoe")
    given = Batch(padded=True).inputs()
    check_step(wanted, scheduled, given)
    for each in (wanted, scheduled):
        each.config.text_config.router_aux_loss_coef = 0.7
    check_step(wanted, scheduled, given)
    wanted = copy.deepcopy(model)
    penstock.parallelize(model, plan="flowmoe")
    check_step(wanted, model, given)
    check_step(wanted, model, {**given, "output_router_logits": True})
