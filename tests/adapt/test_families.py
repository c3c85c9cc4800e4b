"""Every family with routed experts in transformers: right, or refused with its reason, as a page says."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import penstock
from penstock.adapt import FAMILIES
from tests.support.adapted import Batch, distance, grads_of
from tests.support.families import found, tiny
from tests.support.ranks import Pools
from tests.support.survey import CASES, agreement, row, rows

ROWS = rows()
RIGHT = [family for family, line in ROWS.items() if "| no: " not in line]
LIMIT = 1e-10


def test_the_page_has_all_families() -> None:
    assert list(found()) == list(ROWS)
    assert {*FAMILIES} == {family for family, line in ROWS.items() if "| yes, described |" in line}


@pytest.mark.slow
@pytest.mark.parametrize("family", ROWS)
def test_the_page_says_what_becomes_of_a_family(family: str) -> None:
    """Make it anew with `python -m tests.support.survey`."""
    assert row(family) == ROWS[family]
    if family in FAMILIES:
        assert ROWS[family].endswith("| yes |" if FAMILIES[family].separates_documents else "| no |")


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in RIGHT if family not in FAMILIES])
def test_a_family_that_is_taken_trains_as_in_transformers(family: str) -> None:
    distances = agreement(0, 1, family)
    assert max(distances.values()) < LIMIT, distances


def agreements(rank: int, world: int, families: list[str]) -> dict[str, float]:
    """The largest distance for every family, in all cases."""
    return {family: max(agreement(rank, world, family, tuple(CASES)).values()) for family in families}


@pytest.mark.slow
@pytest.mark.parametrize(
    "families", [["qwen3_vl_moe", "lfm2_moe"], pytest.param(RIGHT, marks=pytest.mark.soak)]
)
def test_families_train_on_ranks_as_in_transformers(ranks: Pools, families: list[str]) -> None:
    for distances in ranks(2).run(agreements, 2, families, timeout_s=600):
        assert max(distances.values()) < LIMIT, distances


@pytest.mark.parametrize("family", [family for family in ROWS if family not in RIGHT])
def test_a_model_that_is_refused_is_as_it_was(family: str) -> None:
    model = tiny(family)
    with pytest.raises(ValueError):
        penstock.parallelize(model)
    assert model.training and not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


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
    expected, grads = grads_of(wanted), grads_of(model)
    assert all(distance(grads[name], grad) < 1e-4 for name, grad in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_the_text_configuration_asks_for_a_router_loss(family: str) -> None:
    """Of a model that also sees, as its own code reads it; and so does an argument, for one step."""
    asked, model = (tiny(family, output_router_logits=value) for value in (True, False))
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


def test_positions_of_a_batch_before_are_no_trouble() -> None:
    """Qwen3-Omni keeps what it needed for the positions of an evaluated batch, of another size."""
    model = tiny("qwen3_omni_moe_thinker")
    given = Batch().inputs()
    wanted = model(**given).loss.item()
    scheduled = penstock.parallelize(model, plan="flowmoe").eval()
    scheduled(**Batch(padded=True).inputs(0, 3))
    assert scheduled.train()(**given).loss.item() == pytest.approx(wanted, rel=1e-5)
