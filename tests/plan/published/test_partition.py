"""Every byte is reduced once, after it is made; what fits is hidden; the rest costs no more than the tail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cost import AlphaBeta
from penstock.decision import TAIL, Partition, Portion, Slot
from penstock.graph import ScheduleError
from penstock.plan.published import (
    PARTITION_PLANNERS,
    Backward,
    GapLayer,
    Linear,
    Made,
    MoEPart,
    makespan_s,
    plan_partition,
)
from penstock.plan.published.partition import LINA_BYTES, fill_idle, reductions_s
from penstock.plan.published.spread import Rest, evolved, greedy
from tests.plan.published.layers import backwards
from tests.support.draws import draws

MIB = 1 << 20


def sizes(backward: Backward) -> list[int]:
    """Bytes that are made, by layer."""
    found = [0] * backward.num_layers
    for made in [*backward.above, *(made for gap in backward.gaps for made in gap.made)]:
        found[made.layer] += made.size_bytes
    return found


@pytest.mark.parametrize("name", PARTITION_PLANNERS)
@draws(25)
@given(backward=backwards())
def test_every_byte_is_reduced_once_in_a_gap_behind_its_making(name: str, backward: Backward) -> None:
    partition = PARTITION_PLANNERS[name](backward)  # building it refuses gaps before the making
    placed = [sum(portion.size_bytes for portion in portions) for portions in partition.portions]
    assert placed == sizes(backward)
    layers = {gap.layer for gap in backward.gaps}
    for portions in partition.portions:
        places = [_place(portion.slot) for portion in portions]
        assert places == sorted(set(places)), "gaps in the order of the way back, each once"
        assert all(p.slot == TAIL or p.slot.layer in layers for p in portions)
        assert all(portion.size_bytes % 4 == 0 for portion in portions)


def _place(slot: Slot) -> tuple[int, int]:
    """Where a gap stands on the way back."""
    return (1, 0) if slot == TAIL else (-slot.layer, ("moe", "dense").index(slot.part))


@settings(deadline=None)
@given(backward=backwards())
def test_filling_idle_time_makes_no_layer_longer(backward: Backward) -> None:
    partition = PARTITION_PLANNERS["fsmoe_idle"](backward)
    for gap in backward.gaps:
        alone = backward.degree(gap)
        inside_s = reductions_s(backward, partition, Slot(layer=gap.layer, part="moe"))
        assert makespan_s(gap.part, alone.chunks, inside_s) == pytest.approx(alone.seconds)
        assert reductions_s(backward, partition, Slot(layer=gap.layer, part="dense")) <= gap.dense_s + 1e-9


@settings(deadline=None)
@given(backward=backwards())
def test_reductions_under_dense_parts_alone_leave_moe_parts_alone(backward: Backward) -> None:
    partition = PARTITION_PLANNERS["dense"](backward)
    assert not any(portion.slot.part == "moe" for portions in partition.portions for portion in portions)


@draws(30)
@given(backward=backwards())
def test_spreading_the_rest_is_causal_and_never_worse_than_the_tail(backward: Backward) -> None:
    _, reduce_s, left = fill_idle(backward)
    rest = Rest.of(backward, reduce_s, left)
    nothing_s = float(rest.seconds(np.zeros(len(left))))
    for solve in (evolved, greedy):
        extra = np.array(solve(rest))
        assert float(rest.seconds(extra)) <= nothing_s
        assert (extra >= 0).all()
        assert (extra.cumsum() <= rest.left_bytes + 1e-6).all()


@given(backward=backwards(), seed=st.integers(0, 2**32))
def test_every_share_of_what_is_there_is_causal(backward: Backward, seed: int) -> None:
    _, reduce_s, left = fill_idle(backward)
    rest = Rest.of(backward, reduce_s, left)
    shares = np.random.default_rng(seed).random((5, len(left)))
    extra = rest.causal(shares)
    assert (extra.cumsum(axis=-1) <= rest.left_bytes * (1 + 1e-12) + 1e-6).all()


@draws(25)
@given(backward=backwards())
def test_degrees_shared_by_all_layers_cost_something_or_nothing(backward: Backward) -> None:
    planned = plan_partition(backward)
    assert planned.common.seconds >= planned.apart_s * (1 - 1e-12)
    assert planned.common.chunks in backward.degrees
    assert len(planned.apart) == len(backward.gaps)
    again = plan_partition(backward)
    assert again == planned, "the same problem has the same partition"


def example(*, size: int, all_reduce: AlphaBeta, dense_s: float = 0.0) -> Backward:
    """Two equal MoE layers whose experts take long."""
    part = MoEPart(a2a=Linear(alpha_s=1e-3), experts=Linear(alpha_s=10e-3))
    gaps = [
        GapLayer(layer=layer, part=part, dense_s=dense_s, made=(Made(layer=layer, size_bytes=size),))
        for layer in (1, 0)
    ]
    return Backward(num_layers=2, gaps=tuple(gaps), all_reduce=all_reduce)


def test_what_fits_is_put_between_the_all_to_alls_and_then_under_attention() -> None:
    """10 ms of experts hide 9 000 bytes at 1 us and a start-up of 1 ms; attention as many as it can."""
    model = AlphaBeta(alpha_s=1e-3, beta_s_per_byte=1e-6)
    partition = PARTITION_PLANNERS["fsmoe_idle"](example(size=12_000, all_reduce=model, dense_s=3e-3))
    inside, under = Slot(layer=0, part="moe"), Slot(layer=0, part="dense")
    top = [(portion.slot, portion.size_bytes) for portion in partition.portions[1]]
    assert [slot for slot, _ in top] == [inside, under, TAIL]
    assert [size for _, size in top] == pytest.approx([9_000, 2_000, 1_000], abs=8)
    assert [portion.slot for portion in partition.portions[0]] == [TAIL]


def test_a_gap_shorter_than_a_start_up_takes_nothing() -> None:
    """The inverse of the model is never negative."""
    model = AlphaBeta(alpha_s=50e-3, beta_s_per_byte=1e-9)
    partition = PARTITION_PLANNERS["fsmoe_idle"](example(size=1 << 20, all_reduce=model))
    assert [portion.slot for portions in partition.portions for portion in portions] == [TAIL, TAIL]


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


def test_a_gap_before_the_gradients_are_made_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no gradients yet"):
        Partition(((Portion(size_bytes=4, slot=Slot(layer=0, part="dense")),),))
