"""Less than full precision on ranks that share attention: autocast, and rows compressed under way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.moe.config import Compression
from penstock.step.shape import ExpertForm
from penstock.train.assemble import build_stack
from tests.support.close import check_close
from tests.support.layouts import FORMS, Layout, layout_case
from tests.support.parity import Case, StepResult, machinery_of, merge, prepare, result_of, run_step
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

ALONE: Layout = (1, 1, 1, 1)
GROUPS = 2
"""Of ranks with samples of their own."""


def case_of(layout: Layout, form: ExpertForm = "gather", comm_dtype: Compression | None = None) -> Case:
    """In float32, on the same samples whatever the layout; tokens between blocks lie as they do not at the
    gate, so that they are converted."""
    schedule = "sequential" if layout == ALONE else "penstock"
    tokens = "replicated" if form in ("gather", "s1") else "split"
    found = layout_case(layout, schedule, form, num_layers=1, comm_dtype=comm_dtype, tokens=tokens)
    samples = found.batch * (GROUPS if layout == ALONE else 1)
    return replace(found, double=False, batch=samples, seed=1)  # no token is between two experts there


def rounded_steps(rank: int, cases: list[Case]) -> list[StepResult]:
    """Of stacks that compute in bfloat16 where autocast does."""
    found = []
    for case in cases:
        machinery = replace(machinery_of(rank, case), autocast_dtype=torch.bfloat16)
        stack = build_stack(case.config, machinery, case.dtype)
        prepare(stack, case)
        found.append(result_of(stack, rank, case))
    return found


def steps(rank: int, cases: list[Case]) -> list[StepResult]:
    return [run_step(rank, case) for case in cases]


def flat(result: StepResult) -> Tensor:
    return torch.cat([result.gradients[name].flatten() for name in sorted(result.gradients)])


def test_bfloat16_on_ranks_that_share_is_bfloat16_on_one(ranks: Pools) -> None:
    """Sums over shards are of rounded parts, so ranks that share are as far from float32 as one rank is."""
    cases = [case_of((4, 2, 2, 2), form) for form in FORMS]
    shared = [merge(list(each)) for each in zip(*ranks(4).run(rounded_steps, cases), strict=True)]
    one = ranks(1).run(rounded_steps, [case_of(ALONE)])[0][0]
    exact = run_step(0, case_of(ALONE))
    usual = float((flat(one) - flat(exact)).norm() / flat(exact).norm())
    assert 1e-3 < usual < 0.2, "autocast is on"
    for form, result in zip(FORMS, shared, strict=True):
        assert result.loss == pytest.approx(one.loss, rel=1e-2), form
        assert {gradient.dtype for gradient in result.gradients.values()} == {torch.float32}
        away = float((flat(result) - flat(exact)).norm() / flat(exact).norm())
        assert away < 2 * usual, f"{form}: {away:.3g}, on one rank {usual:.3g}"


@pytest.mark.parametrize("comm_dtype", ["bfloat16", "int8"])
def test_compressed_rows_are_those_of_one_rank(ranks: Pools, comm_dtype: Compression) -> None:
    """A row is rounded by itself, whoever sends it; experts are whole, see what is refused for shards."""
    cases = [case_of((4, 2, 4, 1), form, comm_dtype) for form in FORMS]
    shared = [merge(list(each)) for each in zip(*ranks(4).run(steps, cases), strict=True)]
    one, exact = run_step(0, case_of(ALONE, comm_dtype=comm_dtype)), run_step(0, case_of(ALONE))
    name = "model.layers.0.mlp.experts.w_up.0"
    assert (one.gradients[name] - exact.gradients[name]).norm() > 1e-4 * exact.gradients[name].norm()
    for form, result in zip(FORMS, shared, strict=True):
        assert result.loss == pytest.approx(one.loss, rel=1e-5), form
        for each, gradient in one.gradients.items():  # rounding may fall to either side of a tie
            check_close(result.gradients[each], gradient, 5e-3, f"{form}: {each}")
