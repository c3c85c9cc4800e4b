"""The parts that the documentation shows: run as shown, against formulas and under every schedule."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from penstock import MoELayer
from penstock.decision import ScheduleConfig
from penstock.features.dispatch import Place
from penstock.mesh import Group
from penstock.models import ModelConfig
from penstock.moe import ModuleExperts, MoEConfig, SampleKeys, SoftmaxRouter, SortPermutation, SwiGLUExperts
from penstock.runtime import PipelinedStack
from penstock.train.assemble import build_stack
from tests.features.dispatch.test_legs import exchanged, permuted, tables
from tests.steps import PLAIN
from tests.support.alone import numbers as drawn
from tests.support.close import check_close
from tests.support.formulas import FORMULAS, SLOTS, mixed, softmax, swiglu
from tests.support.pages import CHOICES, EXPERTS, EXTENDING, HIDDEN, MOE_LAYER, OWN_LOOP, blocks, run_block
from tests.support.parity import (
    Case,
    StepResult,
    batch_of,
    executed_as_planned,
    logical,
    machinery,
    merge,
    prepare,
)
from tests.support.ranks import Pools
from tests.support.reference_step import settings_of

WIDTH = 12


@cache
def shown(heading: str) -> dict[str, Any]:
    """What the only block of a section of extending.md defines."""
    (code,) = blocks(EXTENDING, heading)
    return run_block(code)


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "gate": lambda _: {"gate": shown("A router")["DistanceRouter"](HIDDEN, EXPERTS, CHOICES)},
    "experts": lambda local: {"expert": shown("Experts")["SquaredReluExperts"](HIDDEN, WIDTH, local)},
    "module": lambda local: {"expert": ModuleExperts(shown("Any module as an expert")["bottleneck"], local)},
    "hook": lambda _: {"hooks": (shown("A hook")["ClipRowGradients"](longest=0.01),)},
    "permutation": lambda _: {
        "permutation": shown("A permutation")["SurestFirstPermutation"](
            EXPERTS, capacity_factor=0.7, min_capacity=1
        )
    },
    "dispatch": lambda _: {"dispatch": shown("A dispatch")["AdaptiveDispatch"](few=100)},
}
"""What each section adds to a layer, from the number of local experts."""


def layer_with(part: str, number: int = 0, ep_size: int = 1, ep_rank: int = 0) -> MoELayer:
    """An ordinary layer in which one part is the documentation's."""
    del number
    usual = {
        "gate": SoftmaxRouter(HIDDEN, EXPERTS, CHOICES),
        "permutation": SortPermutation(EXPERTS),
        "expert": SwiGLUExperts(HIDDEN, WIDTH, EXPERTS // ep_size),
    }
    return MoELayer(**{**usual, **PARTS[part](EXPERTS // ep_size)}, ep_size=ep_size, ep_rank=ep_rank)


# ---- against formulas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_layer_with_it_is_a_formula(part: str) -> None:
    layer, tokens = layer_with(part).double(), 16  # 0.7 * 2 * 16 / 8 = 2.8: three slots
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=i) / parameter.shape[-1] ** 0.5)
    x_TM, direction_TM = drawn(tokens, HIDDEN, seed=100).requires_grad_(), drawn(tokens, HIDDEN, seed=101)
    outputs = [layer(x_TM), FORMULAS[part](layer, x_TM)]
    torch.testing.assert_close(*outputs)
    found, wanted = (
        torch.autograd.grad(
            (out_TM * direction_TM).sum(),
            [x_TM, *layer.parameters()],
            allow_unused=True,
            materialize_grads=True,
        )
        for out_TM in outputs
    )
    torch.testing.assert_close(found, wanted)


def test_the_order_drops_some_and_others_than_the_index_order() -> None:
    torch.manual_seed(0)  # other weights might send few enough to every expert
    layer, x_TM = layer_with("permutation").double(), drawn(16, HIDDEN, seed=100)
    scores_TE = softmax(layer, x_TM)
    kept = [
        mixed(x_TM, scores_TE, partial(swiglu, layer), slots, first)
        for slots, first in ((float("inf"), False), (SLOTS, False), (SLOTS, True))
    ]
    assert len({tuple(out_TM.flatten().tolist()) for out_TM in kept}) == 3


@pytest.mark.parametrize("few", [0, 20, 10_000])
@given(case=tables())
def test_rows_arrive_sorted_by_source(few: int, case: tuple[Any, int]) -> None:
    table, size = case
    dispatch = shown("A dispatch")["AdaptiveDispatch"](few)
    places = [Place(rank, len(table), size) for rank in range(len(table))]
    legs = [dispatch.legs(table, place) for place in places]
    rows = [[(s, t, n) for t in range(len(table)) for n in range(table[s, t])] for s in range(len(table))]
    for number in range(len(dispatch.hops)):
        now = [mine[number] for mine in legs]
        rows = exchanged(
            [permuted(r, leg) for r, leg in zip(rows, now, strict=True)], now, places, back=False
        )
    for target, held in enumerate(rows):
        assert held == [(s, target, n) for s in range(len(table)) for n in range(table[s, target])]


def test_the_dispatch_goes_both_ways_in_the_test_below() -> None:
    """Of the two microbatches of four ranks one has many rows and the other few."""
    dispatch = shown("A dispatch")["AdaptiveDispatch"](few=100)
    groups = [dispatch.legs(np.full((4, 4), rows), Place(0, 4, 2))[1].axes for rows in (5, 10)]
    assert groups == [Group.RAIL, Group.EXPERT]


# ---- under every schedule ----------------------------------------------------------------------------------


def case_of(part: str, world_size: int, schedule: str) -> Case:
    capacity = {"capacity_factor": 0.7, "min_capacity": 1} if part == "permutation" else {}
    return Case(
        world_size=world_size,
        ep_size=None,
        schedule=ScheduleConfig(name=schedule, microbatches=2, chunks=3, all_reduce_chunk_bytes=65536),
        model=ModelConfig(num_layers=2, hidden_size=HIDDEN, num_heads=4, seq_len=5, vocab_size=11),
        moe=MoEConfig(
            num_experts=EXPERTS,
            top_k=CHOICES,
            moe_ffn_hidden_size=WIDTH,
            aux_loss_coeff=0.1,
            aux_loss_group="microbatch",
            z_loss_coeff=0.01,
            **capacity,  # type: ignore[arg-type]  # two numbers
        ),
        batch=3,
        double=True,
        node_size=world_size // 2 if world_size > 1 else None,
    )


def stack_of(rank: int, case: Case, part: str) -> PipelinedStack:
    found = machinery(case.world_size, case.world_size, rank, case.node_size or 0)
    make_moe = partial(layer_with, part, ep_size=case.world_size, ep_rank=rank)
    stack = build_stack(case.config, found, torch.float64, make_moe)
    prepare(stack, case)
    return stack


def result_of(stack: PipelinedStack, loss: Tensor, as_planned: bool) -> StepResult:
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in stack.model.named_parameters()
    }
    return StepResult(loss.item(), 0.0, logical(stack, gradients), {}, as_planned)


def run_scheduled(rank: int, case: Case, part: str) -> StepResult:
    """One step on this rank."""
    stack = stack_of(rank, case, part)
    tokens, labels = batch_of(case)
    mine = slice(rank * case.batch, (rank + 1) * case.batch)
    loss = stack(tokens[mine], labels[mine], torch.arange(len(tokens))[mine])
    loss.backward()
    return result_of(stack, loss, executed_as_planned(stack))


def run_alone(case: Case, part: str) -> StepResult:
    """The same model without any schedule, its layers called as modules: microbatch by microbatch."""
    stack = stack_of(0, case_of(part, 1, "sequential"), part)
    model: Any = stack.model
    tokens, labels = batch_of(case)
    loss = torch.zeros((), dtype=torch.float64)
    for samples in settings_of(case).pieces:
        keys, share = SampleKeys(case.seed, torch.tensor(samples)), len(samples) / len(tokens)
        h_BLM = model.embed(tokens[samples], keys)
        for block in model.parts:
            residual_BLM, x_TM = block.attend(h_BLM, keys)
            out_BLM = block.moe(x_TM.view_as(h_BLM))
            h_BLM = block.add(residual_BLM, out_BLM.flatten(0, 1), keys)
            losses = block.moe.losses
            loss = loss + share * (
                case.moe.aux_loss_coeff * losses.balance + case.moe.z_loss_coeff * losses.z
            )
        loss = loss + model.head(h_BLM, labels[samples]) / labels.numel()
    loss.backward()
    return result_of(stack, loss, True)


def check_part(ranks: Pools, part: str, world_size: int, schedule: str) -> None:
    case = case_of(part, world_size, schedule)
    result = merge(ranks(world_size).run(run_scheduled, case, part))
    expected = run_alone(case, part)
    assert result.loss == pytest.approx(expected.loss, rel=1e-10)
    assert result.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert gradient.any() or ".experts." in name, f"{name} was not trained"  # an expert may be idle
        check_close(result.gradients[name], gradient, 1e-10, f"gradient of {name}")


TURNS = [
    (part, schedule) for i, part in enumerate(PARTS) for schedule in islice(cycle(PLAIN), 2 * i, 2 * i + 2)
]
"""Two schedules for every part; all of them take turns."""


@pytest.mark.slow
@pytest.mark.parametrize(("part", "schedule"), TURNS)
def test_scheduled_it_is_the_layer_alone(ranks: Pools, part: str, schedule: str) -> None:
    check_part(ranks, part, 1, schedule)


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize("schedule", ["moe_pipeline", "penstock"])
@pytest.mark.parametrize("part", PARTS)
def test_on_two_nodes_as_well(ranks: Pools, part: str, schedule: str, world_size: int) -> None:
    check_part(ranks, part, world_size, schedule)


# ---- what the pages show -----------------------------------------------------------------------------------


def run_page(rank: int, first: str, session: str) -> tuple[bool, str]:
    """Two blocks of a page after each other: whether experts are shared, and the gate that was trained."""
    del rank
    run = run_block(session, **run_block(first))["run"]
    layers = run.model.model.parts
    assert all(p.grad is not None and p.grad.isfinite().all() for p in run.model.parameters())
    return run.model.plan.shape.shared_experts, type(layers[1].moe.gate).__name__


def test_a_layer_of_ones_own_in_a_session(ranks: Pools) -> None:
    alone, session = blocks(OWN_LOOP, "A layer of your own")
    known = run_block(alone)
    assert known["out"].shape == known["x"].shape == known["x"].grad.shape
    assert all(p.grad is not None for name, p in known["layer"].named_parameters() if "experts" not in name)
    assert ranks(2).run(run_page, alone, session) == [(True, "SigmoidRouter")] * 2


def test_every_block_of_the_pages_is_run_here() -> None:
    headings = re.findall(r"^## (.*)$", EXTENDING.read_text(), re.M)
    shown = sum(len(blocks(EXTENDING, heading)) for heading in headings)
    assert (
        shown == len(PARTS) + 3
    )  # test_own_step.py, test_own_decision.py and adapt/test_parity.py run one each
    headings = re.findall(r"^## (.*)$", MOE_LAYER.read_text(), re.M)
    found = [heading for heading in headings if blocks(MOE_LAYER, heading)]
    assert found == ["Padding", "By itself, on several ranks", "From Hugging Face"]


def test_examples_import_from_few_packages() -> None:
    for page in (EXTENDING, MOE_LAYER):
        imported = set(re.findall(r"^from (penstock\S*) import", page.read_text(), re.M))
        assert imported <= {
            "penstock",
            "penstock.adapt",
            "penstock.moe",
            "penstock.features.dispatch",
            "penstock.models.huggingface",
            "penstock.runtime.expert_parallel.exchange",
            # what a step is made of
            "penstock.decision",
            "penstock.graph",
            "penstock.mesh",
            "penstock.ops",
            "penstock.runtime",
            "penstock.schedule",
            "penstock.schedule.flowmoe",
            "penstock.step",
            "penstock.step.passes",
            "penstock.step.rewrite",
        }
