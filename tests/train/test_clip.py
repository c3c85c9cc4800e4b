"""Gradient norm and clipping: every expert counts once, whatever the layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from penstock.runtime import clip_grad_norm_
from penstock.sharding import Sharding
from tests.support.close import check_close
from tests.support.joining import joined
from tests.support.layouts import tiny_case
from tests.support.parity import Case, gradients_of, logical, own_batch, parts_of, stack_of
from tests.support.ranks import Pools

LAYOUTS = [(1, 1, 1, 1), (2, 1, 1, 1), (2, 1, 2, 1), (4, 1, 1, 1), (4, 1, 2, 1), (4, 1, 4, 1)]
LAYOUTS += [(2, 2, 1, 2), (2, 2, 2, 1), (2, 1, 1, 2), (4, 2, 2, 2), (4, 4, 2, 1), (4, 2, 1, 4)]
"""Ranks, and how many of them share attention (tp), the experts of a layer (ep) and every expert (etp)."""


@dataclass(frozen=True)
class Clipped:
    """What clipping left on one rank, by logical name."""

    norm: float
    again: float
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    parts: dict[str, Sharding]


def case_of(layout: tuple[int, int, int, int], *, double: bool = True) -> Case:
    world_size, tp_size, ep_size, etp_size = layout
    return tiny_case(
        world_size,
        microbatches=1,
        num_heads=4,
        vocab_size=12,
        moe_layers=(1,),
        aux_loss_coeff=0.1,
        tp_size=tp_size,
        ep_size=ep_size,
        etp_size=etp_size,
        batch=4 * tp_size // world_size,
        double=double,
    )


def clip(rank: int, case: Case, max_norm: float | None) -> Clipped:
    stack = stack_of(rank, case)
    stack(*own_batch(rank, case)).backward()

    def gradients() -> dict[str, Tensor]:
        found = gradients_of(stack.model)
        return logical(stack, found)

    before = gradients()
    norm = clip_grad_norm_(stack, math.inf if max_norm is None else max_norm)
    assert norm.dtype == torch.float64
    return Clipped(float(norm), float(clip_grad_norm_(stack, math.inf)), before, gradients(), parts_of(stack))


def together(results: list[Clipped]) -> dict[str, Tensor]:
    """The gradients of the whole model."""
    return joined((result.before, result.parts) for result in results)


def norm_of(gradients: dict[str, Tensor]) -> float:
    return float(torch.cat([g.flatten().double() for g in gradients.values()]).norm())


@pytest.mark.every_value
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("double", [False, True])
def test_the_norm_is_that_of_the_whole_model(
    ranks: Pools, layout: tuple[int, int, int, int], double: bool
) -> None:
    case = case_of(layout, double=double)
    results = ranks(case.world_size).run(clip, case, None)
    whole = together(results)
    assert sum(".experts." in name for name in whole) == 3 * case.moe.num_experts
    assert len({result.norm for result in results}) == 1, "the ranks have different norms"
    assert results[0].norm == pytest.approx(norm_of(whole), rel=1e-12 if double else 1e-6)
    # The same batch on one rank: a norm that counts anything twice differs.
    alone = clip(0, case_of((1, 1, 1, 1), double=double), None)
    assert results[0].norm == pytest.approx(alone.norm, rel=1e-10 if double else 1e-5)
    for result in results:  # without a limit nothing is scaled
        assert all(torch.equal(result.after[name], g) for name, g in result.before.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_scales_every_gradient_alike(ranks: Pools, layout: tuple[int, int, int, int]) -> None:
    results = ranks(layout[0]).run(clip, case_of(layout), 0.25)
    norm = norm_of(together(results))
    assert norm > 0.5
    for result in results:
        assert result.norm == pytest.approx(norm, rel=1e-12)  # the norm before clipping
        assert result.again == pytest.approx(0.25, rel=1e-5)
        for name, gradient in result.before.items():
            check_close(result.after[name], gradient * 0.25 / norm, 1e-5, name)


def test_a_norm_below_the_limit_changes_no_bit(ranks: Pools) -> None:
    for result in ranks(2).run(clip, case_of((2, 1, 2, 1)), 1e6):
        assert result.norm == result.again
        assert all(torch.equal(result.after[name], g) for name, g in result.before.items())


def test_gradients_that_are_not_there_count_nothing() -> None:
    stack = stack_of(0, case_of((1, 1, 1, 1)))
    assert float(clip_grad_norm_(stack, 1.0)) == 0.0
    next(stack.parameters()).grad = torch.full_like(next(stack.parameters()), 2.0)
    count = next(stack.parameters()).numel()
    assert float(clip_grad_norm_(stack, math.inf)) == pytest.approx(2.0 * count**0.5)
