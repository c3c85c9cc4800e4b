"""Orders of steps whose ranks share attention and experts: every rule, every form of experts' shards."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise as neighbours
from typing import Any

import pytest

from penstock.decision import Decision, Partition, Portion, Slot
from penstock.decision.record import CHUNKS, FIELDS
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Lane, Phase, Task
from penstock.ops import Op
from penstock.schedule import SCHEDULES, StepPlan, unit_cost
from penstock.schedule.system import is_all_reduce
from penstock.step import Sharing, Stage, StepShape
from penstock.step.shape import FORM_TOKENS, ExpertForm, TokenLayout
from penstock.timing import simulate
from tests.plan.problems import problem, with_sharing
from tests.step.support import Rewriting, ancestors
from tests.steps import (
    SHARED,
    decision,
    example_plan,
    gradients_of,
    overlapping,
    planned,
    task_at,
)
from tests.steps import run_alone as run
from tests.support.pairwise import pairwise

B = Phase.BACKWARD
FORMS: tuple[ExpertForm, ...] = ("gather", "s1", "s2", "baseline")
OWN_FORM = [name for name, system in SCHEDULES.items() if system.expert_form]
DECIDED = [name for name, system in SCHEDULES.items() if "expert_form" in system.reads]
LAYERS = {"MoE": (True, True), "mixed": (True, False, True), "dense last": (False, True, False)}


@pairwise(
    name=list(SCHEDULES),
    form=FORMS,
    ranks=[(2, 2), (2, 1), (1, 2), (4, 2)],
    tokens=["split", "replicated"],
    layers=list(LAYERS),
    pieces=[(1, 1, 1), (2, 2, 3), (3, 3, 2)],
    counts=[True, False],
    shared_experts=[True, False],
    edp=[0, 2],
)
def test_every_schedule_goes_with_every_form(
    name: str,
    form: ExpertForm,
    ranks: tuple[int, int],
    tokens: TokenLayout,
    layers: str,
    pieces: tuple[int, int, int],
    counts: bool,
    shared_experts: bool,
    edp: int,
) -> None:
    """Graphs that are whole, orders that are complete and in which no lane waits for another in a circle."""
    kinds, (microbatches, chunks, backward) = LAYERS[layers], pieces
    shape = StepShape(
        moe_layers=kinds,
        sharing=Sharing(tp_size=ranks[0], etp_size=ranks[1], tokens=tokens),
        exchange_counts=counts,
        shared_experts=shared_experts,
        pieces={"replicated": (2,) * len(kinds), "experts": (edp,) * len(kinds)},
        more=(Rewriting("same", Stage.SETTLE, lambda graph: graph),),  # has it checked that nothing is lost
    )
    cut: dict[str, Any] = {"microbatches": microbatches, "chunks": chunks, "backward_chunks": backward}
    plan, times = run(name, shape, **cut, expert_form=form, priority="critical_path")
    assert plan.shape.expert_form == (SCHEDULES[name].expert_form or form)
    assert len(times) == len(plan.graph.tasks)
    adding = [task for task in plan.graph.tasks if task.accumulates]
    for task in plan.graph.tasks:
        if is_all_reduce(task):
            made = {other for other in adding if set(other.accumulates) & set(task.writes)}
            assert made and made <= ancestors(plan.graph, task)
    partial = {task.layer for task in plan.graph.tasks if task.op == Op.PARTIAL_ALL_REDUCE}
    assert partial == (set(range(len(kinds))) if ranks[0] > 1 else set())


@pytest.mark.parametrize("name", DECIDED)
@pytest.mark.parametrize("dispatch", ["hierarchical_1d", "hierarchical_2d"])
def test_legs_inside_nodes_go_with_rows_that_are_gathered_there(name: str, dispatch: str) -> None:
    hops = DISPATCHES[dispatch].hops
    shape = StepShape(moe_layers=(True, True), sharing=SHARED, dispatch=hops)
    plan, times = run(name, shape, dispatch=dispatch, priority="critical_path")
    assert {"XG", "XS", "DG", "CS", "TG", "TS"} <= {task.op for task in times if task.lane is Lane.INTRA}
    assert plan.shape.dispatch == hops


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_what_a_search_finds_is_no_worse_than_its_rules(form: ExpertForm) -> None:
    shape = StepShape(moe_layers=(True, True), sharing=SHARED)
    ends = {}
    for priority in ("search", "critical_path", "all_to_all_first"):
        plan, times = run("penstock", shape, 1, expert_form=form, priority=priority)
        ends[priority] = max(end for _, end in times.values())
        assert [task for task in plan.graph.tasks if task.phase is Phase.WEIGHT]
    assert ends["search"] <= min(ends.values()) * 1.02  # judged by durations that may be 10 % off, too


# ---- all at the end ----------------------------------------------------------------------------------------


def as_published(name: str, **changes: Any) -> StepShape:
    """Two MoE layers, with tokens between blocks as the schedule's form has them at the gate."""
    form = SCHEDULES[name].expert_form or "gather"
    sharing = replace(SHARED, tokens=FORM_TOKENS[form])
    return StepShape(moe_layers=(True, True), sharing=sharing, **changes)


@pytest.mark.parametrize("name", ["baseline_esp", "parm_s1", "sequential"])
def test_plain_ones_overlap_nothing_and_reduce_at_the_end(name: str) -> None:
    plan, times = run(name, as_published(name, shared_experts=True))
    spans = sorted((times[task], str(task)) for task in plan.graph.tasks if not is_all_reduce(task))
    ahead = ("S.m0.F", "S.m0.B")  # shared experts wait for no transfer
    for (first, name_of), (second, other) in neighbours(spans):
        shared = any(each.endswith(ahead) for each in (name_of, other))
        assert first[1] <= second[0] or shared, (name_of, other)


@pytest.mark.parametrize("name", ["baseline_esp", "parm_s1", "parm_s2", "sequential", "moe_pipeline"])
@pytest.mark.parametrize("seed", range(5))
def test_reductions_of_all_kinds_come_after_the_last_backward_computation(name: str, seed: int) -> None:
    plan, times = run(name, as_published(name), seed)
    computed = max(end for task, (_, end) in times.items() if task.lane is Lane.COMPUTE)
    reduced = [task for task in plan.graph.tasks if is_all_reduce(task)]
    assert {task.op for task in reduced} == {Op.ALL_REDUCE, Op.PARTIAL_ALL_REDUCE}
    assert all(times[task][0] >= computed for task in reduced)


# ---- parm_s2 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_a_slice_is_gathered_while_the_next_one_crosses_nodes(slices: int) -> None:
    plan = planned("parm_s2", as_published("parm_s2"), chunks=slices)
    assert (plan.shape.pair_slices, plan.shape.degrees) == (slices, (1, 1))
    times = simulate(plan.schedule, plan.graph, unit_cost).times
    for first, second, phase in (("C", "SG", "F"), ("D", "SD", "B")):
        for i in range(slices - 1):
            crossing = times[task_at(plan.graph, f"L0.{first}.m0.c{i + 1}.{phase}")]
            gathered = times[task_at(plan.graph, f"L0.{second}.m0.c{i}.{phase}")]
            assert crossing.start == gathered.start


def test_a_pair_is_cut_where_something_is_gathered_alone() -> None:
    shape = StepShape(moe_layers=(True,), sharing=Sharing(etp_size=2))
    assert planned("parm_s2", shape, chunks=4).shape.pair_slices == 1
    dense = planned("parm_s2", StepShape(moe_layers=(False, False), sharing=SHARED))
    assert {task.op for task in dense.graph.tasks} >= {"TG", "FF", "HL"}


@pytest.mark.parametrize(("tp_size", "tried"), [(1, 1), (2, len(CHUNKS))])
def test_numbers_of_slices_are_tried_where_something_is_gathered(tp_size: int, tried: int) -> None:
    asked = with_sharing(problem((True,)), tp_size, 2)
    assert len(FIELDS["chunks"].values(asked, Decision(schedule="parm_s2"))) == tried
    assert len(FIELDS["chunks"].values(asked, Decision(schedule="fsmoe"))) == len(CHUNKS)


# ---- fsmoe, dense_overlap ----------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [(1, 1), (2, 3), (4, 2)])
def test_fsmoe_issues_all_gathers_before_any_scatter(degrees: tuple[int, int]) -> None:
    forward, backward = degrees
    plan = planned("fsmoe", as_published("fsmoe"), chunks=forward, backward_chunks=backward)
    order = [task for task in plan.schedule.lanes[Lane.INTRA] if task.op in ("XG", "XS")]
    rounds = [("XG", 0, "F"), ("XS", 0, "F"), ("XG", 1, "F"), ("XS", 1, "F")]
    rounds += [("XS", 1, "B"), ("XG", 1, "B"), ("XS", 0, "B"), ("XG", 0, "B")]
    expected = [
        f"L{layer}.{op}.m0.c{i}.{phase}"
        for op, layer, phase in rounds
        for i in range(forward if phase == "F" else backward)
    ]
    assert list(map(str, order)) == expected


def test_fsmoe_is_under_way_on_three_lanes_at_once() -> None:
    plan = planned("fsmoe", as_published("fsmoe"), chunks=4, backward_chunks=4)
    times = simulate(plan.schedule, plan.graph, unit_cost).times
    starts: dict[int, set[str]] = {}
    for task, when in times.items():
        if task.layer == 1 and task.forward:
            starts.setdefault(int(when.start[0]), set()).add(task.op)
    assert any({"D", "XG", "X"} <= ops for ops in starts.values())
    assert any({"C", "XS"} <= ops for ops in starts.values())


def dense_gap_of(plan: StepPlan, task: Task) -> int:
    """The highest layer whose all-to-alls have all been passed when this reduction stands in its lane."""
    order = plan.schedule.lanes[Lane.INTER]
    behind = order[order.index(task) :]
    moving = {t.layer for t in behind if t.phase is B and t.op in (Op.DISPATCH, Op.COMBINE)}
    return 1 + max(moving, default=-1)


@pytest.mark.parametrize("name", ["fsmoe", "dense_overlap"])
@pytest.mark.parametrize("seed", range(3))
def test_partial_gradients_are_reduced_under_attention_of_the_next_layer(name: str, seed: int) -> None:
    shape = StepShape(moe_layers=(True,) * 4, sharing=SHARED, pieces={"experts": (1,) * 4})
    plan, _ = run(name, shape, seed, chunks=2, backward_chunks=3)
    for task in plan.graph.tasks:
        if task.op == Op.PARTIAL_ALL_REDUCE:
            assert dense_gap_of(plan, task) == max(0, task.layer - 1)
        elif task.op == Op.EXPERT_ALL_REDUCE:
            assert dense_gap_of(plan, task) == task.layer


def test_a_partition_says_nothing_of_partial_gradients() -> None:
    """They stay whole, whatever pieces the others are cut into."""
    portions = tuple(Portion(size_bytes=size, slot=Slot(layer=0, part="moe")) for size in (3, 5))
    plan = planned("fsmoe", as_published("fsmoe"), partition=Partition(((), portions)))
    pieces = [(task.op, task.layer) for task in plan.graph.tasks if is_all_reduce(task)]
    assert sorted(pieces) == [("AR", 1), ("AR", 1), ("PR", 0), ("PR", 1)]


# ---- flowmoe, lina -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flowmoe", "lina", "penstock"])
def test_partial_gradients_are_cut_into_pieces_of_the_same_size(name: str) -> None:
    shape = StepShape(moe_layers=(True, True), sharing=SHARED)
    gradients = gradients_of(shape)._replace(partial=(4096, 1000))
    choice = decision(name, all_reduce_chunk_bytes=1024)
    cut = SCHEDULES[name].shape(shape, choice, gradients)
    assert cut.pieces["partial"] == (4, 1)


@pytest.mark.parametrize("name", OWN_FORM)
def test_examples_use_the_lane_inside_nodes(name: str) -> None:
    plan = example_plan(name)
    assert plan.schedule.lanes[Lane.INTRA]
    times = simulate(plan.schedule, plan.graph, unit_cost).times
    spans = {task: (float(when.start[0]), float(when.end[0])) for task, when in times.items()}
    hidden = {second.op for _, second in overlapping(spans)}
    assert bool(hidden & {"D", "C", "XG", "XS"}) is (name == "fsmoe")
