"""Parm's Algorithm 1: its formulas by hand, and its choice against simulated layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import AlphaBeta, ClusterFile, ProfiledCluster
from penstock.cost.cluster_file import PAIR, LinkModel
from penstock.decision import Decision
from penstock.ops import Op
from penstock.plan import Problem, find_plan
from penstock.plan.published import algorithm_1, parm_choice, planners
from penstock.plan.published.parm import (
    ParmModels,
    ParmSizes,
    derived_pair,
    overlapped_s,
    parm_models,
    parm_sizes,
    s1_s,
    s2_s,
)
from penstock.plan.published.table import PUBLISHED
from penstock.step import Sharing
from tests.plan.problems import FILE, problem, with_sharing

lines = st.builds(
    AlphaBeta, alpha_s=st.floats(0, 1e-3), beta_s_per_byte=st.floats(1e-11, 1e-8, allow_subnormal=False)
)


def shared(tp_size: int, etp_size: int, tokens: str = "replicated") -> Problem:
    asked = with_sharing(problem((True,)), tp_size, etp_size)
    sharing = Sharing(
        tp_size=tp_size, etp_size=etp_size, tokens="split" if tokens == "split" else "replicated"
    )
    return replace(asked, shape=replace(asked.shape, sharing=sharing))


def test_formulas_by_hand() -> None:
    """Formulas 13 and 14 of the paper with round numbers."""
    models = ParmModels(
        all_to_all=AlphaBeta(alpha_s=1.0, beta_s_per_byte=0.1),
        gather=AlphaBeta(alpha_s=0.5, beta_s_per_byte=0.01),
        pair=AlphaBeta(alpha_s=1.2, beta_s_per_byte=0.12),
    )
    sizes = ParmSizes(y_bytes=100, gathered_bytes=40)
    assert s1_s(models, sizes) == pytest.approx(2 * 11 + 0.9)
    assert s2_s(models, sizes) == pytest.approx(11 + 13.2)
    assert algorithm_1(models, sizes) == "s1"
    assert algorithm_1(models, replace(sizes, gathered_bytes=400)) == "s2"


@given(all_to_all=lines, gather=lines, ratio=st.floats(0.25, 4), size=st.floats(1e3, 1e9))
def test_a_pair_takes_no_longer_than_both_and_no_less_than_the_longer(
    all_to_all: AlphaBeta, gather: AlphaBeta, ratio: float, size: float
) -> None:
    pair_s = derived_pair(all_to_all, gather, ratio, size).seconds(size)
    both = all_to_all.seconds(size), gather.seconds(ratio * size)
    slopes = all_to_all.beta_s_per_byte * size, gather.beta_s_per_byte * ratio * size
    assert max(slopes) * (1 - 1e-6) <= pair_s <= sum(both) * (1 + 1e-6)


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_the_overlap_is_what_a_step_simulates(slices: int) -> None:
    asked = shared(2, 2)
    choice = Decision(schedule="parm_s2", chunks=slices, backward_chunks=slices)
    times = asked.simulate(choice, asked.plan(choice)).times
    pair = {
        task: at for task, at in times.items() if task.forward and task.op in (Op.COMBINE, Op.GATHER_SLOTS)
    }
    start_s, end_s = min(at.start.min() for at in pair.values()), max(at.end.max() for at in pair.values())
    sent, gathered = (
        next(at for task, at in pair.items() if task.op == op) for op in (Op.COMBINE, Op.GATHER_SLOTS)
    )
    sent_s, gathered_s = (float((at.end - at.start).max()) for at in (sent, gathered))
    assert end_s - start_s == pytest.approx(overlapped_s(sent_s, gathered_s, slices), rel=0.02), (
        "slices are nearly equal"
    )


def test_sizes_are_those_of_the_tasks() -> None:
    """256 tokens of a pair, of which each goes to two experts of two shards: y is what D sends."""
    sizes = parm_sizes(shared(2, 2))
    assert sizes == ParmSizes(y_bytes=128 * 2 * 2 * 128 * 4, gathered_bytes=256 * 128 * 4)
    split = parm_sizes(shared(2, 2, "split"))
    assert (split.gathered_bytes, split.converted_bytes) == (0.0, 256 * 128 * 4)


def test_a_measured_pair_decides() -> None:
    asked = shared(2, 2)

    def measured(alpha_s: float) -> Problem:
        line = LinkModel(
            collective=PAIR, group="ep x etp", lane="inter", ranks=8, alpha_s=alpha_s, beta_s_per_byte=1e-12
        )
        file: ClusterFile = replace(FILE, ranks_per_node=4, links=(line,))
        return replace(asked, cluster=ProfiledCluster.build(file))

    assert parm_models(measured(3.0)).pair == AlphaBeta(alpha_s=3.0, beta_s_per_byte=1e-12)
    assert parm_choice(measured(3.0)).schedule == "parm_s1"
    assert parm_choice(measured(1e-9)).schedule == "parm_s2"


def test_without_attention_in_common_both_are_the_same_and_without_sharing_there_is_neither() -> None:
    assert parm_choice(shared(1, 2)) == Decision(schedule="parm_s1")
    assert parm_choice(problem((True,))) == Decision()
    assert list(planners(problem((True,)))) == [*PUBLISHED]
    assert list(planners(shared(2, 2))) == [*PUBLISHED, "parm"]


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [(2, 2), (2, 1), (1, 2)])
def test_the_joint_plan_is_never_worse_than_parm(sharing: tuple[int, int]) -> None:
    asked = shared(*sharing)
    choice = parm_choice(asked)
    parm_s = asked.simulate(choice, asked.plan(choice)).iteration_s
    assert find_plan(asked, effort="low").best.predicted_s <= parm_s * (1 + 1e-9)
