"""Every family with routed experts in transformers: right, or refused with its reason, as a page says."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import OlmoeForCausalLM

import penstock
from penstock.adapt import FAMILIES
from penstock.cost.model_flops import PASSES, ModelFlops
from penstock.decision import GradientBytes
from penstock.families.inspection import look
from penstock.families.known import family_of
from penstock.topology import Layout
from penstock.train.optimizer import OptimizerConfig, groups_of
from tests.support.adapted import Batch, distance, grads_of, small
from tests.support.families import found, tiny
from tests.support.families import found as known
from tests.support.families_table import table
from tests.support.ranks import Pools
from tests.support.survey import CASES, agreement, row, rows

ROWS = rows()
RIGHT = [family for family, line in ROWS.items() if "| no: " not in line]
LIMIT = 1e-10


def test_the_page_has_all_families() -> None:
    assert list(found()) == list(ROWS)
    assert {*FAMILIES} == {family for family, line in ROWS.items() if "| described |" in line}


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


# ---- families that are not described -----------------------------------------------------------------------


@pytest.fixture
def unknown_olmoe(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: each for name, each in FAMILIES.items() if name != "olmoe"}
    monkeypatch.setattr("penstock.families.known.FAMILIES", few)


@pytest.mark.usefixtures("unknown_olmoe")
def test_what_is_not_a_number_agrees_with_nothing() -> None:
    model = small("olmoe")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = torch.nan
    with pytest.raises(ValueError, match="computes something else than whole"):
        penstock.parallelize(model)


@pytest.mark.usefixtures("unknown_olmoe")
@pytest.mark.parametrize("gpus", [0, 2])
def test_a_model_is_compared_on_its_own_device_alone(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a device that is the default, nor random numbers of GPUs of other ranks, are touched."""
    model = small("olmoe")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with torch.device("cpu" if gpus else "meta"):
        penstock.parallelize(model, plan="flowmoe")


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
@pytest.mark.usefixtures("unknown_olmoe")
def test_what_weighs_a_router_loss_is_found_by_what_it_does() -> None:
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


@pytest.mark.usefixtures("unknown_olmoe")
@pytest.mark.parametrize("kind", [WeighedALittle, Broken])
def test_a_router_loss_that_is_not_understood_is_refused_when_it_is_asked_for(
    kind: type[OlmoeForCausalLM],
) -> None:
    model = penstock.parallelize(kind(small("olmoe").config).train())
    assert model(**Batch().inputs()).loss.item() > 0
    with pytest.raises(ValueError, match=f"how {kind.__name__} weighs its router loss was not understood"):
        model(**Batch().inputs(), output_router_logits=True)


# ---- the table of features and families --------------------------------------------------------------------


PAGE = Path(__file__).parents[2] / "docs/features.md"


@pytest.mark.parametrize("family", FAMILIES)
def test_no_embedding_decays(family: str) -> None:
    model = small(family)
    decaying = {id(weight) for weight in groups_of(model.named_parameters(), OptimizerConfig())[0]["params"]}
    assert not any(id(m.weight) in decaying for m in model.modules() if isinstance(m, torch.nn.Embedding))


def test_the_page_has_the_table_of_the_register() -> None:
    """Make it anew with `print(table(FAMILIES))`, where `penstock.adapt` is imported."""
    assert table(FAMILIES) in PAGE.read_text(encoding="utf-8")


def test_a_family_that_is_registered_appears_with_its_reasons() -> None:
    own = dataclasses.replace(FAMILIES["dbrx"], name="own", uncut="its heads are knotted")
    rows = table({**FAMILIES, "own": own}).splitlines()
    (row,) = [row for row in rows if row.startswith("| `own` |")]
    number = next(row.split(".")[0] for row in rows if row.endswith("its heads are knotted"))
    assert f"no ({number})" in row and row.count("no (") == 3


# ---- operations that plans count ---------------------------------------------------------------------------


TOKENS = 24
PRODUCTS = ("mm", "addmm")
"""What linear layers are made of; heads compare in batches of products."""

ALL_TOKENS = "llama4_text"
"""Its experts get all tokens, in a batch of products."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() & known().keys()))
def test_every_product_of_a_family_is_counted(name: str) -> None:
    model = tiny(name)
    family = family_of(model)
    assert family is not None
    found = look(model, family)
    with FlopCounterMode(display=False) as counter:
        model.eval()(input_ids=torch.arange(TOKENS)[None] % 50)
    there = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    computed = sum(flops for op, flops in there.items() if op.removeprefix("aten.") in PRODUCTS)
    layout, gradients = Layout(world_size=1, ep_size=1, rank=0), GradientBytes((0,), (0,), (0,))
    work = found.sizes.workload(layout, gradients, 1, TOKENS)
    moe_layers = [block is not None for block in found.blocks]
    scores = len(moe_layers) * work.heads.score_flops(TOKENS)
    counted = ModelFlops.of(work, moe_layers, None).per_token / PASSES - scores
    if name == ALL_TOKENS:
        counted -= sum(moe_layers) * work.expert_flops(work.top_k)
    assert TOKENS * counted == pytest.approx(computed, rel=0.05)
