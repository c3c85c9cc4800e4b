"""Better orders than any rule gives: local search over priorities, judged by the simulated iteration.

A rule looks at ready tasks only. Whether it pays to finish one microbatch first, so that the network has
something to send while the others are computed, shows many tasks later; simulating the whole step sees it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from penstock.graph import Graph, Lane, Task
from penstock.schedule.board import Board, Keys, lanes_of
from penstock.schedule.freeze import Cost, slowest
from penstock.schedule.schedule import Schedule

SCENARIOS = ((1.0, 1.0), (1.1, 1.0), (1.0, 1.1))
"""Factors on computation and on transfers: predictions are some percent off, in either direction."""

LARGEST_GROUP = 8
WHOLE_KIND = 0.3


def search(
    name: str, graph: Graph, cost: Cost, starts: Sequence[Mapping[Task, float]], evaluations: int
) -> Schedule:
    """The best order that `evaluations` simulated iterations find, from the best of `starts`.

    starts: priorities in seconds, smaller first. Judged by the sum over SCENARIOS, so that an order which is
    good only if every duration is exactly as predicted does not win. The same graph and costs give the same
    order on every rank: the random numbers have a fixed seed, and there is no time limit.
    """
    seconds, rng = [slowest(cost(task)) for task in graph.tasks], random.Random(0)
    boards = [Board(graph, _scaled(graph, seconds, factors)) for factors in SCENARIOS]

    def judge(keys: Keys) -> float:
        return sum(board.play(keys).seconds for board in boards)

    keys = min(([start[task] for task in graph.tasks] for start in starts), key=judge)
    best_s, kinds = judge(keys), _kinds(graph)
    step_s = 2 * sum(seconds) / len(seconds)
    for _ in range(evaluations // len(boards)):
        moved = _move(keys, kinds, step_s, rng)
        moved_s = judge(moved)
        if moved_s <= best_s:  # an equal one is taken too: it may lead on
            best_s, keys = moved_s, moved
    return Schedule(name, lanes_of(graph, Board(graph, seconds).play(keys).orders))


def _scaled(graph: Graph, seconds: Sequence[float], factors: tuple[float, float]) -> list[float]:
    compute, transfers = factors
    return [
        s * (compute if task.lane is Lane.COMPUTE else transfers)
        for task, s in zip(graph.tasks, seconds, strict=True)
    ]


def _kinds(graph: Graph) -> list[list[int]]:
    """Positions of tasks that differ in microbatch and chunk only."""
    kinds: dict[object, list[int]] = {}
    for position, task in enumerate(graph.tasks):
        kinds.setdefault((task.layer, task.op, task.phase), []).append(position)
    return list(kinds.values())


def _move(keys: Keys, kinds: Sequence[Sequence[int]], step_s: float, rng: random.Random) -> Keys:
    """Shift the priorities of a few tasks, each by its own amount, or of one kind by the same."""
    moved = keys.copy()
    if rng.random() < WHOLE_KIND:
        shift_s = rng.gauss(0, step_s)
        for position in rng.choice(kinds):
            moved[position] += shift_s
        return moved
    for _ in range(rng.randint(1, LARGEST_GROUP)):
        moved[rng.randrange(len(keys))] += rng.gauss(0, step_s)
    return moved
