"""The numerics contract: a step on real ranks is that of one plain process, whatever is combined in it.

Pairs of all values of `tests.support.cases.AXES` always run, drawn cases beside them, and every case that
once was wrong or is special by its name. What finds a fault of the engine's numbers is added to NAMED.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from penstock.decision import TAIL, Partition, Portion, ScheduleConfig, Slot
from penstock.mesh import Group
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.moe.config import Compression
from penstock.runtime import PipelinedStack
from penstock.schedule import plan_step, unit_cost
from penstock.step import StepShape
from penstock.step.shape import ExpertForm
from tests.steps import PLAIN
from tests.support.cases import AXES, DISPATCHES, Step, drawn, fits, step_of, steps
from tests.support.close import check_all_close, digest
from tests.support.draws import draws
from tests.support.layouts import FORMS, TOKENS, Layout, layout_case
from tests.support.pairwise import covering
from tests.support.parity import (
    Case,
    StepResult,
    check_parity,
    check_result,
    merge,
    result_of,
    run_step,
    stack_of,
)
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

CUTS = [name for name in sorted(PLAIN) if name not in ("dense_overlap", "lina")]
"""Every way to cut a step: those two order what others cut likewise."""


def named(values: Mapping[str, Any]) -> str:
    """The values that are not the first of their axis."""
    return "-".join(str(value) for axis, value in values.items() if value != AXES[axis][0])


@pytest.mark.parametrize("values", [*covering(AXES, fits)], ids=named)
def test_pairs(ranks: Pools, values: Mapping[str, Any]) -> None:
    step_of(values).check(ranks)


def test_any_case(ranks: Pools) -> None:
    @draws(64)
    @given(step=steps())
    def check(step: Step) -> None:
        step.check(ranks)

    check()


@pytest.mark.soak
@pytest.mark.parametrize("number", range(3000))
def test_product(ranks: Pools, number: int) -> None:
    step_of(drawn(Random(number))).check(ranks)


NAMED: dict[str, dict[str, Any]] = {
    "samples of one token on ranks that share them": {
        "layout": "tp 2", "schedule": "flowmoe", "moves": "rotated", "seq_len": 1, "batches": (4, 1),
    },
    "one token for each of four ranks": {
        "layout": "tp 4", "schedule": "flowmoe", "seq_len": 4, "padding": True,
    },
    "uneven parts of samples, converted": {
        "layout": "tp 4", "schedule": "penstock", "tokens": "replicated", "seq_len": 7, "batch": 2,
    },
    "uneven parts of samples, converted back": {
        "layout": "tp 4, etp 2", "schedule": "penstock", "form": "s2", "seq_len": 7, "batch": 2,
    },
    "uneven parts with slots of their own": {
        "layout": "tp 4", "schedule": "flowmoe", "order": "index", "seq_len": 7, "batch": 2,
    },
    "no samples but on the last rank": {
        "layout": "four ranks", "schedule": "penstock", "dispatch": "hierarchical_2d",
        "batches": (0, 0, 0, 3),
    },
    "all samples on one rank that move": {
        "layout": "four ranks", "schedule": "fsmoe", "moves": "netmoe", "batches": (0, 6, 0, 0),
        "padding": True,
    },
    "more microbatches than samples": {
        "layout": "one rank", "schedule": "flowmoe", "gate": "noisy", "order": "index", "batches": (1,),
    },
    "one rank gets all, compressed into one copy": {
        "layout": "four ranks", "schedule": "penstock", "order": "merged", "dispatch": "hierarchical_1d",
        "routing": "one rank", "top_k": 2,
    },
    "samples all want one expert": {
        "layout": "four ranks", "schedule": "penstock", "moves": "netmoe", "busy_experts": (5,),
    },
    "samples all want one node": {
        "layout": "four ranks", "schedule": "flowmoe", "moves": "random", "busy_experts": (0, 1, 2, 3),
    },
    "samples move between groups of replicas only": {
        "layout": "only edp", "schedule": "penstock", "moves": "random",
    },
    "samples move, conditional": {
        "layout": "four ranks", "schedule": "sequential", "moves": "netmoe", "prediction": "conditional",
    },
    "replicas and samples where ranks share both": {
        "layout": "tp 2, etp 2", "schedule": "penstock", "moves": "random", "replicas": 2,
    },
    "replicas by one copy per node": {
        "layout": "four ranks", "schedule": "penstock", "replicas": 2, "padding": True,
        "dispatch": "node_once",
    },
    "replicas recomputed": {
        "layout": "two ranks", "schedule": "penstock", "replicas": 2, "recompute": "blocks",
    },
    "copies of tokens differ by rounding": {
        "layout": "tp 2, etp 2", "schedule": "baseline_esp", "form": "baseline", "samples": "few",
    },
    "balance of a sample that ranks share": {
        "layout": "tp 2, etp 2", "schedule": "penstock", "group": "sequence", "tokens": "replicated",
    },
    "eight ranks, every axis of two": {
        "layout": (8, 2, 2, 2), "schedule": "penstock", "batch": 2, "shared_ffn_hidden_size": 6,
        "order": "index", "moe_layers": (1,), "ignore_labels": True,
    },
    "eight ranks, shards of four": {
        "layout": (8, 4, 2, 4), "schedule": "flowmoe", "form": "s2", "batch": 2, "order": "index",
        "shared_ffn_hidden_size": 6, "moe_layers": (1,), "ignore_labels": True,
    },
    "eight ranks, experts over eight": {
        "layout": (8, 4, 8, 1), "schedule": "sequential", "form": "s1", "batch": 2, "order": "index",
        "shared_ffn_hidden_size": 6, "moe_layers": (1,), "ignore_labels": True,
    },
}  # fmt: skip
"""Values of axes, and of settings that are no axis."""


@pytest.mark.parametrize("name", NAMED)
def test_named(ranks: Pools, name: str) -> None:
    case = NAMED[name]
    known = {axis: value for axis, value in case.items() if axis in AXES}
    step_of(known, **{key: value for key, value in case.items() if key not in AXES}).check(ranks)


# ---- what more there is to see of a step -------------------------------------------------------------------


def plain(world_size: int, schedule: str, **moe: object) -> Case:
    """A fixed case of a size at which float32 rounding is far below the tolerance."""
    sizes = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 24, "aux_loss_coeff": 0.05} | moe
    return Case(
        world_size=world_size,
        ep_size=None,
        schedule=ScheduleConfig(name=schedule, microbatches=2, chunks=3, all_reduce_chunk_bytes=2048),
        model=ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_len=7, vocab_size=11),
        moe=MoEConfig(**sizes),  # type: ignore[arg-type]  # a dict of settings is what a caller varies
        batch=3,
    )


@pytest.mark.every_value
@pytest.mark.parametrize("schedule", CUTS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_float32_within_rounding(
    ranks: Pools, world_size: int, schedule: str, capacity_factor: float | None
) -> None:
    check_parity(ranks, plain(world_size, schedule, capacity_factor=capacity_factor))


@pytest.mark.parametrize("schedule", ["flowmoe", "penstock"])
def test_experts_have_a_gradient_where_they_have_tokens_and_zeros_else(ranks: Pools, schedule: str) -> None:
    idle = replace(plain(4, schedule, num_experts=8), idle_expert=3, double=True)
    gradients = check_parity(ranks, idle).gradients
    found = [gradients[f"model.layers.0.mlp.experts.w_up.{expert}"].abs().sum() > 0 for expert in (2, 3)]
    assert found == [True, False]
    busy = replace(plain(4, schedule, num_experts=8, capacity_factor=1.0), busy_experts=(4, 5), double=True)
    gradients = check_parity(ranks, busy).gradients
    used = [bool(gradients[f"model.layers.1.mlp.experts.w_up.{e}"].abs().sum() > 0) for e in range(8)]
    assert used == [expert in (4, 5) for expert in range(8)]


@pytest.mark.parametrize(
    "case",
    [
        *(plain(size, schedule) for size, schedule in ((1, "fsmoe"), (2, "flowmoe"), (4, "penstock"))),
        layout_case((4, 2, 2, 2), "penstock", "gather", moe_layers=(1,)),
        *(pytest.param(plain(4, schedule), marks=pytest.mark.soak) for schedule in CUTS),
    ],
    ids=lambda case: f"{case.world_size}-{case.schedule.name}",
)  # fmt: skip
def test_same_seed_same_bits(ranks: Pools, case: Case) -> None:
    pool = ranks(case.world_size)
    first, second = (merge(pool.run(run_step, case)) for _ in range(2))
    assert first.loss == second.loss
    assert digest(first.gradients) == digest(second.gradients)
    assert digest(first.parameters) == digest(second.parameters)
    other = merge(pool.run(run_step, replace(case, seed=1)))
    assert digest(other.parameters) != digest(first.parameters)


def test_dropout_does_not_depend_on_schedule_or_layout(ranks: Pools) -> None:
    """Masks are keyed by sample and place: all schedules and two layouts, on which ranks whatever samples
    are, draw the same ones."""
    results = []
    for world_size, schedule in [(1, "flowmoe"), *((4, schedule) for schedule in CUTS)]:
        case = plain(world_size, schedule)
        dealt = (5, 0, 1, 6) if schedule == "fsmoe" else ()
        model = replace(case.model, dropout=0.3)
        case = replace(case, model=model, double=True, batch=12 // world_size, batches=dealt)
        results.append(merge(ranks(world_size).run(run_step, case)))
    whole = replace(plain(1, "flowmoe"), double=True, batch=12)
    assert abs(results[0].loss - merge(ranks(1).run(run_step, whole)).loss) > 1e-6
    check_equal(results)


@pytest.mark.every_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_dropout_does_not_depend_on_what_ranks_share(ranks: Pools, form: ExpertForm, tokens: str) -> None:
    """Masks are keyed by sample and position, of which a rank may have a part."""
    settings = {"dropout": 0.3, "moe_layers": (1,), "shared_ffn_hidden_size": 6, "tokens": tokens}
    results = [
        merge(ranks(1).run(run_step, layout_case((1, 1, 1, 1), "sequential", form, batch=4, **settings)))
    ]
    for layout, batch in (((2, 2, 1, 2), 4), ((4, 2, 2, 2), 2), ((4, 4, 4, 1), 4)):
        step = layout_case(layout, "penstock", form, batch=batch, **settings)
        results.append(merge(ranks(layout[0]).run(run_step, step)))
    check_equal(results)


def check_equal(results: list[Any]) -> None:
    base, *others = results
    for result in others:
        assert abs(result.loss - base.loss) <= 1e-10 * base.loss
        check_all_close(result.gradients, base.gradients, 1e-10)


def less_precise(
    layout: Layout, form: ExpertForm = "gather", *, degrees: tuple[int, int] = (1, 1), **moe: Any
) -> Case:
    """In float32, on the same samples whatever the layout; tokens between blocks lie as they do not at the
    gate, so that they are converted. degrees: chunks forward and backward."""
    schedule, (chunks, backward) = "sequential" if layout == ALONE else "penstock", degrees
    tokens = "replicated" if form in ("gather", "s1") else "split"
    step = layout_case(layout, schedule, form, num_layers=1, tokens=tokens, **moe)
    cut = replace(step.schedule, chunks=chunks, backward_chunks=backward)
    samples = 12 // step.mesh.size(Group.DATA)
    return replace(step, schedule=cut, double=False, batch=samples, seed=1)  # no token is between two experts


ALONE: Layout = (1, 1, 1, 1)


@pytest.mark.every_value
@pytest.mark.parametrize("way", [*DISPATCHES, *FORMS])
@pytest.mark.parametrize("comm_dtype", ["bfloat16", "int8"])
def test_compression_is_the_same_on_any_layout_and_in_any_cut(
    ranks: Pools, comm_dtype: Compression, way: Any
) -> None:
    """A row is rounded by itself, there and back, whoever sends it with which others.

    way: the dispatch, or the form of the MoE part of ranks that share attention.
    """
    if way in DISPATCHES:
        four = less_precise((4, 1, 4, 1), degrees=(2, 3), comm_dtype=comm_dtype, dispatch=way, node_size=2)
    else:
        four = less_precise((4, 2, 4, 1), way, comm_dtype=comm_dtype)
    ours = merge(ranks(4).run(run_step, four))
    one, exact = (run_step(0, less_precise(ALONE, comm_dtype=each)) for each in (comm_dtype, None))
    assert abs(ours.loss - one.loss) <= 1e-5 * one.loss
    check_all_close(ours.gradients, one.gradients, 5e-3)  # rounding may fall to either side of a tie
    name = "model.layers.0.mlp.experts.w_up.0"
    distance = (one.gradients[name] - exact.gradients[name]).norm() / exact.gradients[name].norm()
    assert 1e-4 < distance < 5e-2


def rounded_step(rank: int, case: Case) -> StepResult:
    """Of a stack that computes in bfloat16 where autocast does."""
    stack = stack_of(rank, case)
    stack.compute_in(torch.bfloat16)
    return result_of(stack, rank, case)


def flat(result: StepResult) -> Tensor:
    return torch.cat([result.gradients[name].flatten() for name in sorted(result.gradients)])


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_on_ranks_that_share_is_bfloat16_on_one(ranks: Pools, form: ExpertForm) -> None:
    """Sums over shards are of rounded parts, so ranks that share are as far from float32 as one rank is."""
    shared = merge(ranks(4).run(rounded_step, less_precise((4, 2, 2, 2), form)))
    (one,), exact = ranks(1).run(rounded_step, less_precise(ALONE)), run_step(0, less_precise(ALONE))
    usual, away = (float((flat(each) - flat(exact)).norm() / flat(exact).norm()) for each in (one, shared))
    assert 1e-3 < usual < 0.2, "autocast is on"
    assert shared.loss == pytest.approx(one.loss, rel=1e-2)
    assert {gradient.dtype for gradient in shared.gradients.values()} == {torch.float32}
    assert away < 2 * usual


def random_partition(shape: StepShape, sizes_bytes: tuple[int, ...], seed: int) -> Partition:
    """Every layer's gradients in some parts of any size, each in any gap behind the layer's backward."""
    rng, portions = Random(seed), []
    for layer, size in enumerate(sizes_bytes):
        slots = [TAIL] + [Slot(layer=lower, part="dense") for lower in range(layer)]
        slots += [Slot(layer=lower, part="moe") for lower in range(layer) if shape.moe_layers[lower]]
        parts = [rng.choice([1, 3, rng.randint(1, size)]) for _ in range(rng.randint(1, 5))]
        portions.append(tuple(Portion(size_bytes=part, slot=rng.choice(slots)) for part in parts))
    return Partition(tuple(portions))


def adopt_partition(stack: PipelinedStack, seed: int, config: ScheduleConfig) -> None:
    sizes = stack.gradients.sizes_bytes
    partition = random_partition(stack.base_shape, sizes[0], seed)
    choice = replace(config.decision("flat"), schedule="fsmoe", partition=partition)
    stack.adopt(plan_step(choice, stack.base_shape, sizes, lambda _: unit_cost))


def step_with_partition(rank: int, step: Case, seed: int) -> Any:
    stack = stack_of(rank, step)
    adopt_partition(stack, seed, step.schedule)
    return result_of(stack, rank, step)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 40))]
)
def test_gradients_in_random_parts_are_the_reference_s(ranks: Pools, seed: int) -> None:
    step = layout_case((2, 1, 2, 1), "fsmoe", "gather", num_layers=3, moe_layers=(0, 2))
    check_result(merge(ranks(2).run(step_with_partition, step, seed)), step)


DENSE = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
)
WHOLE = (
    "model.layers.0.self_attn.k_norm.weight",
    "model.norm.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.shared.expert.w_up",
)


@pytest.mark.parametrize(("layout", "attention", "experts"), [((4, 2, 1, 4), 2, 4), ((4, 4, 2, 2), 4, 2)])
def test_ranks_hold_their_part_and_no_more(
    ranks: Pools, layout: Layout, attention: int, experts: int
) -> None:
    step = layout_case(layout, "sequential", "gather", moe_layers=(1,), shared_ffn_hidden_size=6)
    results = ranks(4).run(run_step, step)
    whole = merge(results).parameters
    of_expert = [f"model.layers.1.mlp.experts.{name}.7" for name in ("w_gate", "w_up", "w_down")]
    for result in results:
        held = {name: whole[name].numel() / part.numel() for name, part in result.parameters.items()}
        assert {held[name] for name in DENSE} == {attention}
        assert {held[name] for name in of_expert if name in held} <= {experts}
        assert {held[name] for name in WHOLE} == {1}
