"""Partitions that FSMoE's is compared with: every byte once, and what each is worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from benchmarks.published.partitions import PARTITION_PLANNERS, greedy, plan_partition
from penstock.cost import AlphaBeta
from penstock.plan.published import Backward, GapLayer, Linear, Made, MoEPart
from penstock.plan.published.partition import fill_idle
from penstock.plan.published.spread import Rest
from penstock.plan.published.table import LINA_BYTES
from tests.plan.published.layers import backwards
from tests.plan.published.test_partition import check_partition, example
from tests.support.draws import draws

MIB = 1 << 20


@pytest.mark.parametrize("name", PARTITION_PLANNERS)
@draws(25)
@given(backward=backwards())
def test_every_byte_is_reduced_once_in_a_gap_behind_its_making(name: str, backward: Backward) -> None:
    check_partition(PARTITION_PLANNERS[name](backward), backward)


@settings(deadline=None)
@given(backward=backwards())
def test_reductions_under_dense_parts_alone_leave_moe_parts_alone(backward: Backward) -> None:
    partition = PARTITION_PLANNERS["dense"](backward)
    assert not any(portion.slot.part == "moe" for portions in partition.portions for portion in portions)


@draws(30)
@given(backward=backwards())
def test_the_greedy_rule_is_causal_and_never_worse_than_the_tail(backward: Backward) -> None:
    _, reduce_s, left = fill_idle(backward)
    rest = Rest.of(backward, reduce_s, left)
    nothing_s = float(rest.seconds(np.zeros(len(left))))
    extra = np.array(greedy(rest))
    assert float(rest.seconds(extra)) <= nothing_s
    assert (extra >= 0).all()
    assert (extra.cumsum() <= rest.left_bytes + 1e-6).all()


@draws(25)
@given(backward=backwards())
def test_degrees_shared_by_all_layers_cost_something_or_nothing(backward: Backward) -> None:
    planned = plan_partition(backward)
    assert planned.common.seconds >= planned.apart_s * (1 - 1e-12)
    assert planned.common.chunks in backward.degrees
    assert len(planned.apart) == len(backward.gaps)
    again = plan_partition(backward)
    assert again == planned, "the same problem has the same partition"


def test_fixed_chunks_are_put_in_whole_or_not_at_all() -> None:
    model = AlphaBeta(alpha_s=1e-6, beta_s_per_byte=10e-3 / (1.5 * LINA_BYTES))
    partition = PARTITION_PLANNERS["lina"](example(size=4 * LINA_BYTES, all_reduce=model))
    top = [(portion.slot.part, portion.size_bytes) for portion in partition.portions[1]]
    assert top == [("moe", LINA_BYTES), ("tail", 3 * LINA_BYTES)]


def test_the_rest_goes_where_a_smaller_degree_pays() -> None:
    """Start-ups make eight chunks worse than one as soon as a reduction hides the experts anyway."""
    part = MoEPart(a2a=Linear(alpha_s=1e-3, linear_s=4e-3), experts=Linear(alpha_s=0.1e-3, linear_s=24e-3))
    model = AlphaBeta(alpha_s=0.5e-3, beta_s_per_byte=1e-9)
    gaps = [
        GapLayer(layer=layer, part=part, dense_s=0.0, made=(Made(layer=layer, size_bytes=40 * MIB),))
        for layer in (1, 0)
    ]
    backward = Backward(num_layers=2, gaps=tuple(gaps), all_reduce=model)
    total_s = {}
    for name in ("tail", "fsmoe_idle", "fsmoe", "fsmoe_greedy"):
        planned = plan_partition(backward, name)
        total_s[name] = planned.apart_s + planned.tail_s
    assert total_s["fsmoe_idle"] < total_s["tail"]
    assert total_s["fsmoe"] < total_s["fsmoe_idle"]
    assert total_s["fsmoe_greedy"] == pytest.approx(total_s["fsmoe"], rel=0.01)
    top, bottom = plan_partition(backward, "fsmoe").apart
    assert bottom < top, "the gap that reduces has fewer chunks"
