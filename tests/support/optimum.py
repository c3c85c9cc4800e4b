"""Small steps, and the shortest time that any order of their tasks allows: by constraint programming."""

from __future__ import annotations

import random
from collections import defaultdict

from ortools.sat.python import cp_model

from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Graph, Lane, Task
from penstock.step import StepShape

TICK_S = 1e-4
"""The solver counts in whole ticks, and every duration is a number of them."""

MOST_TASKS = 70
LIMIT_S = 60.0

Times = dict[Task, float]


def small_step(seed: int) -> tuple[Graph, Times]:
    """Two or three layers, cut in two at most, of any dispatch; every kind of task has a duration of its own.

    Of one op they scatter by 5 %, of all by up to 30 times, and links are faster or slower than devices.
    """
    rng = random.Random(seed)
    graph = build_graph(_shape(rng))
    while len(graph.tasks) > MOST_TASKS:
        graph = build_graph(_shape(rng))
    decades, link = rng.choice([0.5, 1.0, 1.5]), 10 ** rng.uniform(-0.3, 0.3)
    kinds: dict[tuple[str, str], float] = defaultdict(lambda: 10 ** rng.uniform(-decades, 0))
    seconds = {}
    for task in graph.tasks:
        kind_s = kinds[task.op, task.phase] * (1 if task.lane.computes else link)
        seconds[task] = TICK_S * max(1, round(kind_s * rng.uniform(0.95, 1.05) / TICK_S))
    return graph, seconds


def _shape(rng: random.Random) -> StepShape:
    layers, (microbatches, chunks) = rng.choice([2, 2, 3]), rng.choice([(1, 1), (2, 1), (1, 2)])
    return StepShape(
        moe_layers=(True, *(rng.random() < 0.8 for _ in range(layers - 1))),
        microbatches=microbatches,
        chunks=chunks,
        degree_backward=rng.choice([0, 1, 2]),
        exchange_counts=rng.random() < 0.5,
        pieces={
            "replicated": tuple(rng.randint(1, 2) for _ in range(layers)),
            "experts": (rng.choice([0, 0, 1]),) * layers,
        },
        dispatch=rng.choice(list(DISPATCHES.values())).hops,
        shared_experts=rng.random() < 0.3,
        split_experts=True,
    )


def shortest_s(graph: Graph, seconds: Times) -> float:
    """Seconds of the best of all orders, proven."""
    model, ticks = cp_model.CpModel(), [round(seconds[task] / TICK_S) for task in graph.tasks]
    most = sum(ticks)
    starts = [model.new_int_var(0, most, "") for _ in ticks]
    end = model.new_int_var(0, most, "")
    lanes: dict[Lane, list[cp_model.IntervalVar]] = defaultdict(list)
    for place, (task, needs) in enumerate(zip(graph.tasks, graph.links, strict=True)):
        lanes[task.lane].append(model.new_fixed_size_interval_var(starts[place], ticks[place], ""))
        model.add(end >= starts[place] + ticks[place])
        for need in needs:
            model.add(starts[place] >= starts[need] + ticks[need])
    for spans in lanes.values():
        model.add_no_overlap(spans)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.max_time_in_seconds = 1, LIMIT_S
    solver.parameters.catch_sigint_signal = False  # else it returns an order that is not proven
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL, solver.status_name(status)
    return TICK_S * round(solver.objective_value)
