"""A compiled plan: slots live exactly as long as somebody will read them, and lanes wait just enough."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.graph import Graph, Lane, Name, Phase, ScheduleError, Task
from penstock.mesh import Axes, Group
from penstock.ops import Op
from penstock.runtime.executor import Call, Execution, Program, ThreadLanes, compile_plan
from penstock.runtime.handlers import Inputs, Outputs
from penstock.runtime.streams import in_issue_order, issue_order_of
from penstock.schedule import StepPlan
from penstock.step import StepShape
from penstock.timing import positions, slot_order
from tests.runtime.programs import all_by, nothing, plan_in, program_of, stops_of
from tests.steps import PLAIN, example_plan, planned, random_orders, seeds, shapes
from tests.support.draws import draws

KINDS: list[Axes] = list(Group.NAMES.values())
silences = st.sets(st.sampled_from(KINDS)).map(sorted)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """A small step in any valid order."""
    shape, seed = draw(shapes(layers=2, pieces=2, chunks=2)), draw(seeds)
    return plan_in(shape, lambda graph: random_orders(graph, seed))


def calls_of(program: Program) -> Iterator[tuple[int, Lane, int, Call]]:
    """Every call with its span, its lane and its place there."""
    for number, span in enumerate(program.spans):
        for lane, calls in span.items():
            yield from ((number, lane, place, call) for place, call in enumerate(calls))


def call_at(program: Program, text: str) -> Call:
    return next(call for *_, call in calls_of(program) if str(call.task) == text)


# ---- slots -------------------------------------------------------------------------------------------------


class Thing:
    """Something whose end can be seen."""


def output_of(role: str) -> str:
    """What a role reads: a gradient is an output of the backward that has the name of the role's end."""
    return role.removeprefix("d_")


class Watched:
    """Runs a program one call at a time, in any order that its lanes and waits allow; knows what is alive."""

    def __init__(self, plan: StepPlan, program: Program) -> None:
        self.tasks = {call.task for *_, call in calls_of(program)}
        self.graph, self.ran = plan.graph, set[Task]()
        self.things: dict[tuple[Name, str], weakref.ref[Thing]] = {}
        self.execution = Execution(plan, program, ThreadLanes(lambda: None), self, 0)
        self.outputs = {
            (name, output_of(role))
            for task in self.tasks
            for role, names in task.inputs.items()
            for name in names
        }

    def __call__(self, context: Any, task: Task, inputs: Inputs) -> Outputs:
        assert context is self
        assert set(inputs) == set(task.inputs)
        for role, names in task.inputs.items():
            found = [self.things[name, output_of(role)]() for name in names]
            assert None not in found, f"{task} reads what is gone"
            assert inputs[role] == tuple(found)
        return {output: self._thing(task.name, output) for output in ("unread", *self._read(task.name))}

    def _read(self, name: Name) -> list[str]:
        return [output for of, output in self.outputs if of == name]

    def _thing(self, name: Name, output: str) -> Thing:
        thing = Thing()
        self.things[name, output] = weakref.ref(thing)
        return thing

    def run(self, call: Call) -> None:
        self.execution._execute(call)
        self.ran.add(call.task)

    def check(self) -> None:
        """An output lives while a reader of that very output is to come, and no longer."""
        for (name, output), thing in self.things.items():
            awaited = any(
                name in names and output_of(role) == output
                for task in self.tasks - self.ran
                for role, names in task.inputs.items()
            )
            assert (thing() is not None) == awaited, (str(name), output)


def any_order(program: Program, seed: int) -> Iterator[Call]:
    """The calls span by span, in an order that lanes and waits allow."""
    rng = random.Random(seed)
    for span in program.spans:
        done = dict.fromkeys(span, 0)
        while ready := [
            lane
            for lane, calls in span.items()
            if done[lane] < len(calls) and all(done[o] >= n for o, n in calls[done[lane]].waits)
        ]:
            lane = rng.choice(ready)
            yield span[lane][done[lane]]
            done[lane] += 1
        assert done == {lane: len(calls) for lane, calls in span.items()}, "the lanes got stuck"


def watched(plan: StepPlan, silent: list[Axes], *, training: bool) -> tuple[Watched, Program]:
    made: list[Watched] = []

    def handler(context: Any, task: Task, inputs: Inputs) -> Outputs:
        return made[0](context, task, inputs)

    program = program_of(plan, handler, silent=silent, training=training)
    made.append(Watched(plan, program))
    return made[0], program


@draws(40)
@given(plans(), seeds, silences)
def test_every_output_lives_until_its_last_reader(plan: StepPlan, seed: int, silent: list[Axes]) -> None:
    """Whatever the order in which lanes happen to run: readers on two lanes need not agree beforehand."""
    run, program = watched(plan, silent, training=True)
    for call in any_order(program, seed):
        run.run(call)
        run.check()
    assert run.ran == set(plan.graph.tasks)
    assert run.execution.values == [None] * program.slots


@draws(40)
@given(plans(), seeds)
def test_evaluation_keeps_nothing_for_the_backward(plan: StepPlan, seed: int) -> None:
    """With the forward tasks alone nobody will read what they save: it is not even kept for an instant."""
    run, program = watched(plan, [], training=False)
    assert not any(name == "saved" for *_, call in calls_of(program) for name, _ in call.writes)
    for call in any_order(program, seed):
        run.run(call)
        run.check()
    assert {task.phase for task in run.ran} == {Phase.FORWARD}
    assert run.ran == {task for task in plan.graph.tasks if task.forward}
    assert run.execution.values == [None] * program.slots


@given(plans())
def test_slots_belong_to_one_output_each(plan: StepPlan) -> None:
    program = program_of(plan)
    written = [slot for *_, call in calls_of(program) for _, slot in call.writes]
    freed = [slot for *_, call in calls_of(program) for slot in call.frees]
    shared = [slot for *_, call in calls_of(program) for slot in call.shared]
    assert sorted(written) == list(range(program.slots))
    assert sorted([*freed, *set(shared)]) == list(range(program.slots))
    assert {slot: shared.count(slot) for slot in shared} == program.shared


# ---- waits -------------------------------------------------------------------------------------------------


def before(program: Program, span: int) -> dict[Task, set[Task]]:
    """For every call of a span all that have ended when it starts, by lanes and waits."""
    known: dict[Task, set[Task]] = {}
    calls = program.spans[span]
    for lane, call in in_issue_order(calls):
        place = calls[lane].index(call)
        direct = [calls[other][count - 1].task for other, count in call.waits]
        direct += [calls[lane][place - 1].task] if place else []
        known[call.task] = set(direct).union(*(known[task] for task in direct))
    return known


@draws(40)
@given(plans(), silences)
def test_what_starts_earlier_is_issued_earlier(plan: StepPlan, silent: list[Axes]) -> None:
    """The issuing thread follows the schedule's picture, in which every task takes one slot."""
    for span in program_of(plan, silent=silent).spans:
        issued = [call.task for _, call in in_issue_order(span)]
        orders = {lane: [call.task for call in calls] for lane, calls in span.items()}
        assert sorted(map(str, issued)) == sorted(str(task) for order in orders.values() for task in order)
        lane_of = {task: lane for lane, order in orders.items() for task in order}
        ends: dict[Task, int] = {}
        free = dict.fromkeys(span, 0)
        slots = []
        for task in issued:
            needed = [ends[need] for need in plan.graph.needs[task] if need in lane_of]
            assert all(need in ends for need in plan.graph.needs[task] if need in lane_of), str(task)
            slots.append(max([free[lane_of[task]], *needed]))
            ends[task] = free[lane_of[task]] = slots[-1] + 1
        assert slots == sorted(slots)
        assert all(
            [task for task in issued if lane_of[task] is lane] == order for lane, order in orders.items()
        )


@draws(40)
@given(plans())
def test_a_simulation_issues_in_the_same_order(plan: StepPlan) -> None:
    """Where a step has two halves, which is where steps stop."""
    spans = program_of(plan).spans
    halves = [
        {call.task.phase is Phase.FORWARD for calls in span.values() for call in calls} for span in spans
    ]
    assume(halves == [{True}, {False}])
    issued = [call.task for span in spans for _, call in in_issue_order(span)]
    graph = plan.graph
    orders = positions(plan.schedule.lanes, graph)
    row = slot_order(orders, graph.links, [task.forward for task in graph.tasks])
    assert issued == [graph.tasks[place] for place in row]


def test_counts_are_waited_for_with_work_in_the_queues() -> None:
    """Two microbatches: experts of the first are issued before the host needs the counts of the second."""
    program = program_of(example_plan("flowmoe"))
    issued = [str(call.task) for _, call in in_issue_order(program.spans[0])]
    assert issued.index("L0.X.m0.c0.F") < issued.index("L0.D.m1.c0.F")
    assert issued.index("L0.X.m0.c0.F") < issued.index("L0.N.m1.F")


@pytest.mark.parametrize("name", PLAIN)
def test_a_host_that_is_held_up_has_left_the_device_more_than_a_layer(name: str) -> None:
    layers = 6
    shape = StepShape(moe_layers=(True,) * layers, pieces={"replicated": (2,) * layers})
    for span in program_of(planned(name, shape)).spans:
        order = issue_order_of(span)
        issued = [(lane, number) for lane, number, _ in order.calls]
        per_layer = Counter(call.task.layer for lane, _, call in order.calls if lane.computes)[layers // 2]
        assert len(order.held_up) > layers
        for late, ended in order.held_up.items():
            between = issued[issued.index(ended) + 1 : issued.index(late)]
            assert sum(lane.computes for lane, _ in between) > per_layer


@draws(40)
@given(plans(), silences)
def test_waits_suffice(plan: StepPlan, silent: list[Axes]) -> None:
    """What a task reads has ended when it starts: on its lane, by a wait, or in an earlier span."""
    program = program_of(plan, silent=silent)
    ended: set[Task] = set()
    for number in range(len(program.spans)):
        for task, done in before(program, number).items():
            assert set(plan.graph.needs[task]) <= done | ended, str(task)
        ended |= set(before(program, number))


@draws(40)
@given(plans(), silences)
def test_no_wait_is_for_nothing(plan: StepPlan, silent: list[Axes]) -> None:
    """A lane asks another one at most once per call, further than ever before, for something it reads."""
    program = program_of(plan, silent=silent)
    for span in program.spans:
        for lane, calls in span.items():
            known: dict[Lane, int] = {}
            for call in calls:
                lanes = [other for other, _ in call.waits]
                assert len(set(lanes)) == len(lanes) and lane not in lanes
                for other, count in call.waits:
                    assert span[other][count - 1].task in plan.graph.needs[call.task]
                    assert count > known.get(other, 0)
                    known[other] = count


# ---- spans -------------------------------------------------------------------------------------------------


@given(plans())
def test_the_forward_half_ends_with_the_statistics(plan: StepPlan) -> None:
    first, second = program_of(plan).spans
    for span, forward in ((first, True), (second, False)):
        for lane, calls in span.items():
            order = plan.schedule.lanes[lane]
            assert [call.task for call in calls] == [task for task in order if task.forward is forward]


@given(plans(), st.data())
def test_a_span_ends_with_its_stop_and_holds_what_does_not_need_it(
    plan: StepPlan, data: st.DataObject
) -> None:
    """Wherever one stops."""
    stop = data.draw(st.sampled_from(plan.graph.tasks))
    program = compile_plan(plan, all_by(nothing), [stop.name])
    behind: set[Task] = set()
    for task in plan.graph.tasks:
        if any(need is stop or need in behind for need in plan.graph.needs[task]):
            behind.add(task)
    found = [{call.task for calls in span.values() for call in calls} for span in program.spans]
    assert found == [set(plan.graph.tasks) - behind, behind]


# ---- lanes -------------------------------------------------------------------------------------------------


@given(plans(), silences)
def test_lanes_that_send_nothing_run_on_the_compute_lane(plan: StepPlan, silent: list[Axes]) -> None:
    """All tasks of such a lane are in groups of one rank; the order among them stays."""
    program = program_of(plan, silent=silent)
    quiet = {
        lane
        for lane, order in plan.schedule.lanes.items()
        if lane is not Lane.COMPUTE and all(task.axes in silent for task in order)
    }
    for span in program.spans:
        assert not quiet & set(span)
        for lane, calls in span.items():
            own = [call.task for call in calls if call.task.lane is lane]
            assert own == [task for task in plan.schedule.lanes[lane] if task in own]
            assert {call.task.lane for call in calls} <= ({lane, *quiet} if lane is Lane.COMPUTE else {lane})
    assert sum(1 for _ in calls_of(program)) == len(plan.graph.tasks)


def test_on_one_rank_nobody_waits_for_anybody() -> None:
    program = program_of(example_plan("flowmoe"), silent=KINDS)
    assert all(set(span) == {Lane.COMPUTE} for span in program.spans)
    assert all(call.waits == () and call.shared == () for *_, call in calls_of(program))


# ---- refusals ----------------------------------------------------------------------------------------------


def without(**gone: Any) -> Mapping[tuple[str, Phase], Any]:
    return {key: handler for key, handler in all_by(nothing).items() if key != (gone["op"], gone["phase"])}


def test_a_task_that_nothing_runs_is_named() -> None:
    plan = example_plan("sequential")
    with pytest.raises(ScheduleError, match=r"^L1\.X\.m0\.c0\.B: op X has no handler for phase B"):
        compile_plan(plan, without(op=Op.EXPERTS, phase=Phase.BACKWARD), stops_of(plan))


def test_a_task_of_an_unknown_op_is_named() -> None:
    plan = example_plan("sequential")
    strange = Task(Name(0, "QQ", Phase.FORWARD, 0), Lane.COMPUTE)
    graph = Graph.of([*plan.graph.tasks, strange])
    with pytest.raises(ScheduleError, match=r"^L0\.QQ\.m0\.F: no op is called QQ"):
        compile_plan(StepPlan(graph, plan.schedule, plan.shape), all_by(nothing), stops_of(plan))


def test_the_shape_is_no_part_of_what_a_program_needs() -> None:
    """Graph and order say everything."""
    plan = example_plan("flowmoe")
    other = StepPlan(plan.graph, plan.schedule, StepShape(moe_layers=(False,)))
    assert program_of(other) == program_of(plan)
