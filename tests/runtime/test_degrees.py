"""Forward and backward cut otherwise, and gradients in unequal parts: still the reference's step."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.decision import TAIL, Partition, Portion, ScheduleConfig, Slot
from penstock.moe.config import Compression
from penstock.runtime import PipelinedStack
from penstock.schedule import plan_step, unit_cost
from penstock.step import StepShape
from tests.support.cases import small_case as case
from tests.support.close import check_close
from tests.support.parity import Case, check_result, merge, result_of, run_step, stack_of
from tests.support.ranks import Pools

DEGREES = [(1, 2), (2, 1), (2, 3), (3, 2), (4, 2), (1, 4)]


def cut(base: Case, degrees: tuple[int, int]) -> Case:
    chunks, backward = degrees
    schedule = replace(base.schedule, chunks=chunks, backward_chunks=backward)
    return replace(base, schedule=schedule)


FOUR = [
    ((1, 2), "sort", "flat", "gelu", "moe_pipeline"),
    ((2, 1), "merged", "hierarchical_1d", "swiglu", "penstock"),
    ((2, 3), "sort", "hierarchical_2d", "module", "penstock"),
    ((3, 2), "index", "flat", "swiglu", "fsmoe"),
    ((4, 2), "index", "hierarchical_1d", "gelu", "penstock"),
    ((1, 4), "merged", "hierarchical_2d", "gelu", "fsmoe"),
    ((3, 2), "sort", "hierarchical_1d", "swiglu", "lina"),
    ((2, 3), "index", "hierarchical_2d", "gelu", "dense_overlap"),
]
"""Every degree, order, dispatch, kind of expert and schedule that cuts there; most of them twice."""


@pytest.mark.slow
@pytest.mark.parametrize("comm_dtype", ["bfloat16", "int8"])
def test_compressed_rows_are_the_same_in_any_cut(ranks: Pools, comm_dtype: Compression) -> None:
    """Rows are encoded one by one, so it does not matter with which others they travel."""
    base = case(4, "softmax", "sort", "hierarchical_2d", "gelu", "moe_pipeline")
    base = replace(base, moe=replace(base.moe, comm_dtype=comm_dtype), double=False)
    one, other = (merge(ranks(4).run(run_step, cut(base, degrees))) for degrees in ((1, 1), (2, 3)))
    assert abs(one.loss - other.loss) <= 1e-5 * one.loss
    for name, gradient in one.gradients.items():
        check_close(other.gradients[name], gradient, 2e-3, name)  # rounding may fall to either side of a tie


def evaluated(rank: int, step: Case) -> tuple[float, float]:
    """The loss in training and in evaluation, which has no backward."""
    stack = stack_of(rank, step)
    tokens = torch.arange(step.batch * step.model.seq_len).view(step.batch, -1) % step.model.vocab_size
    trained = stack(tokens, tokens, torch.arange(step.batch)).item()
    stack.eval()
    return trained, stack(tokens, tokens, torch.arange(step.batch)).item()


@pytest.mark.slow
def test_evaluation_runs_forward_alone(ranks: Pools) -> None:
    step = cut(case(2, "softmax", "sort", "flat", "gelu", "moe_pipeline"), (2, 3))
    for trained, alone in ranks(2).run(evaluated, step):
        assert trained == alone


# ---- parts of gradients ------------------------------------------------------------------------------------


def random_partition(shape: StepShape, sizes_bytes: tuple[int, ...], seed: int) -> Partition:
    """Every layer's gradients in some parts of any size, each in any gap behind the layer's backward."""
    rng, portions = random.Random(seed), []
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_gradients_in_random_parts_are_the_reference_s(ranks: Pools, seed: int) -> None:
    base = cut(case(2, "softmax", "sort", "flat", "gelu", "fsmoe"), (2, 3))
    step = replace(base, model=replace(base.model, num_layers=3, moe_layers=(0, 2)))
    check_result(merge(ranks(2).run(step_with_partition, step, seed)), step)
