"""The interpreter: any valid order gives the same numbers, and a failure names its task."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.graph import Graph, Lane, Phase, ScheduleError, Task
from penstock.mesh import Group
from penstock.ops import spec_of
from penstock.runtime import TaskError
from penstock.runtime.executor import Execution, ThreadLanes
from penstock.runtime.handlers import Inputs, Missing, Outputs
from penstock.schedule import Schedule, StepPlan, freeze
from penstock.step import StepShape
from tests.runtime.programs import program_of
from tests.steps import example_plan, random_orders, random_seconds, task_at
from tests.support.close import check_all_close
from tests.support.draws import draws
from tests.support.layouts import tiny_case
from tests.support.parity import (
    Case,
    StepResult,
    executed_as_planned,
    gradients_of,
    logical,
    merge,
    own_batch,
    reference_step,
    stack_of,
)
from tests.support.ranks import Pools

# ---- any order ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a step is cut and ordered. frozen: by the list scheduler, otherwise drawn as it comes."""

    microbatches: int
    chunks: int
    all_reduce_chunks: int
    seed: int
    frozen: bool


cuts = st.builds(
    Cut,
    microbatches=st.integers(1, 3),
    chunks=st.integers(1, 3),
    all_reduce_chunks=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    frozen=st.booleans(),
)


def random_plan(shape: StepShape, cut: Cut) -> StepPlan:
    """The same on every rank, since it follows from the seed."""
    edp = tuple(cut.all_reduce_chunks if n else 0 for n in shape.pieces["experts"])
    shape = replace(
        shape,
        microbatches=cut.microbatches,
        chunks=cut.chunks,
        pieces={"replicated": (cut.all_reduce_chunks,) * shape.num_layers, "experts": edp},
    )
    graph = build_graph(shape)
    return StepPlan(graph, random_schedule(graph, cut), shape)


def random_schedule(graph: Graph, cut: Cut) -> Schedule:
    if not cut.frozen:
        return Schedule("random", random_orders(graph, cut.seed))
    rng = random.Random(cut.seed)
    keys = {task: (rng.randrange(4),) for task in graph.tasks}
    return freeze("random", graph, random_seconds(graph, cut.seed).__getitem__, keys.__getitem__)


def run_cut(rank: int, case: Case, cut: Cut) -> StepResult:
    stack = stack_of(rank, case)
    stack.adopt(random_plan(stack.plan.shape, cut))
    loss = stack(*own_batch(rank, case))
    loss.backward()
    gradients = gradients_of(stack.model)
    return StepResult(loss.item(), 0.0, logical(stack, gradients), {}, executed_as_planned(stack))


def case_of(world_size: int, ep_size: int) -> Case:
    return tiny_case(
        world_size,
        "sequential",
        num_layers=3,
        moe_layers=(0, 2),
        aux_loss_coeff=0.1,
        z_loss_coeff=0.01,
        ep_size=ep_size,
        batch=3,
        double=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (2, 2), (2, 1)])
def test_any_valid_order_gives_the_same_loss_and_gradients(
    ranks: Pools, world_size: int, ep_size: int
) -> None:
    case = case_of(world_size, ep_size)
    expected = reference_step(case)

    @draws(20)
    @given(cuts)
    def check(cut: Cut) -> None:
        result = merge(ranks(world_size).run(run_cut, case, cut))  # asserts executed == planned
        assert abs(result.loss - expected.loss) <= 1e-10 * expected.loss
        check_all_close(result.gradients, expected.gradients, 1e-10)

    check()


# ---- results and records -----------------------------------------------------------------------------------


class Recorder:
    """A handler that leaves under every name whose output it is, notes what it got, and fails at one task."""

    def __init__(
        self, plan: StepPlan, failing: Task | None = None, error: BaseException | None = None
    ) -> None:
        self.plan, self.failing, self.error = plan, failing, error
        self.seen: dict[Task, Inputs] = {}
        self.contexts: list[Any] = []

    def __call__(self, context: Any, task: Task, inputs: Inputs) -> Outputs:
        self.seen[task] = inputs
        self.contexts.append(context)
        if task == self.failing:
            assert self.error is not None
            raise self.error
        return Everything(task)


class Everything(dict[str, str]):
    """The outputs of a task: whatever is asked for."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> str:
        return f"{name} of {self._task}"


def execution_of(recorder: Recorder, *, training: bool = True) -> tuple[Execution, ThreadLanes]:
    lanes, program = ThreadLanes(lambda: None), program_of(recorder.plan, recorder, training=training)
    return Execution(recorder.plan, program, lanes, "context", 3), lanes


@pytest.mark.parametrize("name", ["sequential", "moe_pipeline", "flowmoe"])
def test_handlers_get_the_results_of_their_dependencies(name: str) -> None:
    recorder = Recorder(example_plan(name))
    execution, lanes = execution_of(recorder)
    execution.run()
    assert {task.phase for task in recorder.seen} == {Phase.FORWARD}
    execution.run()
    lanes.close()
    for task in recorder.plan.graph.tasks:
        wanted = {
            role: tuple(f"{role.removeprefix('d_')} of {name}" for name in names)
            for role, names in task.inputs.items()
        }
        assert recorder.seen[task] == wanted
    assert set(recorder.contexts) == {"context"}
    assert execution.values == [None] * len(execution.values)
    records = execution.times.records(step=7)
    assert sorted(str(r.task) for r in records) == sorted(str(t) for t in recorder.plan.graph.tasks)
    assert {(r.rank, r.step) for r in records} == {(3, 7)}
    assert all(0 <= r.start_s <= r.end_s for r in records)


def test_a_role_may_have_one_output_several_or_none() -> None:
    recorder = Recorder(example_plan("flowmoe"))
    execution, lanes = execution_of(recorder)
    execution.run()
    lanes.close()
    sums = recorder.seen[task_at(recorder.plan.graph, "L1.ST.F")]
    assert sums.all("loss") == ("loss of L1.HD.m0.F", "loss of L1.HD.m1.F")
    assert sums.all("shared") == () and sums.maybe("shared") is None
    order = recorder.seen[task_at(recorder.plan.graph, "L1.U.m0.F")]
    assert order.one("order") == order.maybe("order") == "order of L1.AT.m0.F"
    with pytest.raises(ScheduleError, match="needs one edge loss, and the task has 2"):
        sums.one("loss")


def test_an_output_that_was_not_left_is_refused_by_whoever_reads_it() -> None:
    """None in its place would be no gradient, and everything above would be trained without it."""
    missing = Missing(task_at(example_plan("flowmoe").graph, "L1.HD.m0.B"), "hidden")
    inputs = Inputs(d_hidden=(missing,), saved=(None,))
    assert inputs.one("saved") is None
    for read in (inputs.one, inputs.all, inputs.maybe):
        with pytest.raises(ScheduleError, match=r"L1\.HD\.m0\.B has left no output 'hidden', which is read"):
            read("d_hidden")


# ---- failures ----------------------------------------------------------------------------------------------

FAILING = ["L0.AT.m1.F", "L1.D.m0.c0.F", "L1.ST.F", "L0.X.m0.c0.B", "L1.AR.p1.B"]


@pytest.mark.parametrize("name", FAILING)
def test_a_failure_names_task_rank_and_cell(name: str) -> None:
    plan, error = example_plan("flowmoe"), OSError("the cable\nis cut")
    task = task_at(plan.graph, name)
    recorder = Recorder(plan, task, error)
    execution, lanes = execution_of(recorder)
    with pytest.raises(TaskError) as caught:
        for _ in range(2):
            execution.run()
    lanes.close()
    assert (caught.value.task, caught.value.rank) == (task, 3)
    assert caught.value.__cause__ is error
    first, _, grid = str(caught.value).partition("\n\n")
    assert first.startswith(f"rank 3: task {task} ({spec_of(task.op).title}) failed on lane {task.lane}")
    assert first.endswith("OSError: the cable")
    assert grid == recorder.plan.schedule.grid(recorder.plan.graph, mark=task)
    assert grid.count(f">{task.cell}<") == 1
    if task.lane is Lane.INTER:
        assert f"with the {Group.name(task.axes)} group" in first
    else:
        assert "group" not in first


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2)], ids=repr)
def test_an_interrupt_stays_an_interrupt(error: BaseException) -> None:
    plan = example_plan("flowmoe")
    recorder = Recorder(plan, task_at(plan.graph, FAILING[1]), error)
    execution, lanes = execution_of(recorder)
    with pytest.raises(type(error)) as caught:
        execution.run()
    lanes.close()
    assert caught.value is error


def test_an_error_in_the_model_names_its_task() -> None:
    """A token that the vocabulary does not have: the embedding's task fails, before any transfer."""
    stack = stack_of(0, case_of(1, 1))
    with pytest.raises(TaskError) as caught:
        stack(torch.full((3, 5), 999), torch.zeros(3, 5, dtype=torch.int64))
    assert str(caught.value.task) == "L0.EM.m0.F"
    assert ">EM0<" in str(caught.value)
