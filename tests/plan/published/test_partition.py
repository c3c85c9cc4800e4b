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
    Backward,
    GapLayer,
    Linear,
    Made,
    MoEPart,
    adaptive,
    idle_only,
    makespan_s,
)
from penstock.plan.published.partition import PartitionPlanner, fill_idle, seconds_by_slot
from penstock.plan.published.spread import Rest, evolved
from tests.plan.published.layers import backwards
from tests.support.draws import draws


def sizes(backward: Backward) -> list[int]:
    """Bytes that are made, by layer."""
    found = [0] * backward.num_layers
    for made in [*backward.above, *(made for gap in backward.gaps for made in gap.made)]:
        found[made.layer] += made.size_bytes
    return found


@pytest.mark.parametrize("plan", [adaptive, idle_only])
@draws(25)
@given(backward=backwards())
def test_every_byte_is_reduced_once_in_a_gap_behind_its_making(
    plan: PartitionPlanner, backward: Backward
) -> None:
    check_partition(plan(backward), backward)  # building it refuses gaps before the making


def check_partition(partition: Partition, backward: Backward) -> None:
    """Every byte once, in gaps that are there, in the order of the way back."""
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
    partition = idle_only(backward)
    for gap in backward.gaps:
        alone = backward.degree(gap)
        seconds = seconds_by_slot(backward, partition)
        inside_s = seconds.get(Slot(layer=gap.layer, part="moe"), 0.0)
        assert makespan_s(gap.part, alone.chunks, inside_s) == pytest.approx(alone.seconds)
        assert seconds.get(Slot(layer=gap.layer, part="dense"), 0.0) <= gap.dense_s + 1e-9


@draws(30)
@given(backward=backwards())
def test_spreading_the_rest_is_causal_and_never_worse_than_the_tail(backward: Backward) -> None:
    _, reduce_s, left = fill_idle(backward)
    rest = Rest.of(backward, reduce_s, left)
    nothing_s = float(rest.seconds(np.zeros(len(left))))
    extra = np.array(evolved(rest))
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
    partition = idle_only(example(size=12_000, all_reduce=model, dense_s=3e-3))
    inside, under = Slot(layer=0, part="moe"), Slot(layer=0, part="dense")
    top = [(portion.slot, portion.size_bytes) for portion in partition.portions[1]]
    assert [slot for slot, _ in top] == [inside, under, TAIL]
    assert [size for _, size in top] == pytest.approx([9_000, 2_000, 1_000], abs=8)
    assert [portion.slot for portion in partition.portions[0]] == [TAIL]


def test_a_gap_shorter_than_a_start_up_takes_nothing() -> None:
    """The inverse of the model is never negative."""
    model = AlphaBeta(alpha_s=50e-3, beta_s_per_byte=1e-9)
    partition = idle_only(example(size=1 << 20, all_reduce=model))
    assert [portion.slot for portions in partition.portions for portion in portions] == [TAIL, TAIL]


def test_a_gap_before_the_gradients_are_made_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no gradients yet"):
        Partition(((Portion(size_bytes=4, slot=Slot(layer=0, part="dense")),),))
