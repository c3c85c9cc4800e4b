"""Shapes, durations and example plans that the tests of the planning layers share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from penstock.decision import Decision, GradientBytes
from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Graph, Lane, Name, Phase, Task
from penstock.mesh import Group
from penstock.ops import Kind, Op, Sizes, Work, spec_of
from penstock.ops.core import FLAT
from penstock.schedule import SCHEDULES, StepPlan, cut, plan_step, unit_cost
from penstock.step import Sharing, StepShape
from penstock.step.shape import FORM_TOKENS
from penstock.timing import Cost, simulate

PICTURE_WIDTH = 106
"""Columns of a picture inside a class docstring: 110 less the indentation."""

CUT_INSIDE = ["moe_pipeline", "dense_overlap", "lina", "fsmoe", "penstock"]
"""The schedules that cut tokens inside MoE layers."""

PLAIN = [name for name, system in SCHEDULES.items() if system.expert_form in (None, "gather")]
"""The schedules that differ where no ranks share attention or experts."""

SHARED = Sharing(tp_size=2, etp_size=2)
"""Pairs of ranks share attention and every expert, and have each a part of the tokens."""

Times = Mapping[Task, tuple[float, float]]

seeds = st.integers(0, 2**32 - 1)


@st.composite
def shapes(
    draw: st.DrawFn,
    *,
    layers: int = 3,
    dense: bool = True,
    pieces: int = 3,
    chunks: int = 3,
    plain: bool = False,
) -> StepShape:
    """Any shape with at most so many layers, microbatches and chunks; some without all-reduces.

    plain: what the published systems know, without shared experts and legs inside nodes.
    """
    legs = [FLAT] if plain else [dispatch.hops for dispatch in DISPATCHES.values()]
    kinds = st.booleans() if dense else st.just(True)
    moe_layers = draw(st.lists(kinds, min_size=1, max_size=layers))
    per_layer = st.tuples(*[st.integers(0, 3)] * len(moe_layers))
    return StepShape(
        moe_layers=tuple(moe_layers),
        microbatches=draw(st.integers(1, pieces)),
        chunks=draw(st.integers(1, chunks)),
        degree_backward=draw(st.integers(0, chunks)),
        exchange_counts=draw(st.booleans()),
        pieces={"replicated": draw(per_layer), "experts": draw(per_layer)},
        dispatch=draw(st.sampled_from(legs)),
        shared_experts=not plain and draw(st.booleans()),
    )


def task_at(graph: Graph, text: str) -> Task:
    """The task of that name."""
    return graph.by_name[Name.parse(text)]


def lone_task(text: str) -> Task:
    """A task outside any graph, which reads nothing, on the lane and with the group of a flat dispatch."""
    name = Name.parse(text)
    if spec_of(name.op).kind is not Kind.COLLECTIVE:
        return Task(name, Lane.COMPUTE)
    summed = {
        Op.EXPERT_ALL_REDUCE: Group.EXPERT_DATA,
        Op.ALL_REDUCE: Group.WORLD,
        Op.STATISTICS: Group.WORLD,
    }
    return Task(name, Lane.INTER, summed.get(name.op, Group.EXPERT))


def random_seconds(graph: Graph, seed: int) -> dict[Task, float]:
    """A duration for every task, log-uniform over two decades."""
    rng = random.Random(seed)
    return {task: 10 ** rng.uniform(-2, 0) for task in graph.tasks}


def random_orders(graph: Graph, seed: int) -> dict[Lane, tuple[Task, ...]]:
    """Lane orders cut from one random order in which every task stands after its dependencies."""
    rng = random.Random(seed)
    missing = {task: len(graph.needs[task]) for task in graph.tasks}
    ready = [task for task in graph.tasks if not missing[task]]
    done: list[Task] = []
    while ready:
        done.append(ready.pop(rng.randrange(len(ready))))
        for reader in graph.readers[done[-1]]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return {
        lane: tuple(task for task in done if task.lane is lane)
        for lane in Lane
        if any(t.lane is lane for t in done)
    }


def no_work(task: Task, sizes: Sizes) -> Work:
    """What an op of a test asks of a rank."""
    del task, sizes
    return Work()


def gradients_of(shape: StepShape) -> GradientBytes:
    """Bytes that FlowMoE cuts, in chunks of a kibibyte, into as many pieces per layer as `shape` has."""
    return GradientBytes(
        tuple(1024 * count for count in shape.pieces["replicated"]),
        tuple(1024 * count for count in shape.pieces["experts"]),
    )


def decision(name: str, **decided: Any) -> Decision:
    """Two microbatches, the usual chunks, and all-reduces of a kibibyte, unless it is said otherwise."""
    usual = {"microbatches": 2, "chunks": None, "backward_chunks": None, "all_reduce_chunk_bytes": 1024}
    return Decision(schedule=name, **{**usual, **decided})


def planned(
    name: str, shape: StepShape, cost_of: Callable[[StepShape], Cost] = lambda _: unit_cost, **decided: Any
) -> StepPlan:
    """The plan of a schedule for an uncut shape."""
    return plan_step(decision(name, **decided), shape, gradients_of(shape), cost_of)


def run_alone(name: str, shape: StepShape, seed: int = 0, **decided: Any) -> tuple[StepPlan, Times]:
    """Plan with random durations, and simulate the plan on one rank with the same durations."""
    seconds: dict[Task, float] = {}

    def cost_of(cut: StepShape) -> Any:
        seconds.update(random_seconds(build_graph(cut), seed))
        return seconds.__getitem__

    plan = planned(name, shape, cost_of, **decided)
    times = simulate(plan.schedule, plan.graph, seconds.__getitem__).times
    return plan, {task: (float(when.start[0]), float(when.end[0])) for task, when in times.items()}


def cut_by(name: str, shape: StepShape, **decided: Any) -> StepShape:
    """The shape that a schedule makes of an uncut one."""
    return cut(decision(name, **decided), shape, gradients_of(shape))


def example_plan(name: str, *, exchange_counts: bool = True) -> StepPlan:
    """The plan in the pictures: two MoE layers, two microbatches or chunks, two all-reduce chunks.

    FSMoE's has three chunks on the way back. What says how rows meet shards has pairs of ranks that share
    attention and experts, and between blocks the tokens that it wants at the gate.
    """
    form = SCHEDULES[name].expert_form
    shared = replace(SHARED, tokens=FORM_TOKENS[form]) if form else Sharing()
    shape = StepShape(
        moe_layers=(True, True),
        exchange_counts=exchange_counts,
        pieces={"replicated": (2, 2)},
        sharing=shared,
    )
    degrees: dict[str, Any] = {"chunks": 2, "backward_chunks": 3} if name == "fsmoe" else {}
    return planned(name, shape, **degrees)


def ready_s(task: Task, graph: Graph, times: Times) -> float:
    """When the last input of the task is there."""
    return max((times[need][1] for need in graph.needs[task]), default=0.0)


def overlapping(times: Times) -> Iterator[tuple[Task, Task]]:
    """Pairs of a compute task and a communication task that run at the same time."""
    compute = [task for task in times if task.lane is Lane.COMPUTE]
    network = [task for task in times if task.lane is not Lane.COMPUTE]
    for first in compute:
        for second in network:
            if max(times[first][0], times[second][0]) < min(times[first][1], times[second][1]):
                yield first, second


def of_phase(tasks: tuple[Task, ...], phase: Phase) -> list[Task]:
    return [task for task in tasks if task.phase is phase]
