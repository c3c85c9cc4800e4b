"""Lower bounds for any order of a cut, without building its graph: fast enough for thousands of cuts.

Where ranks differ, one may be busy with experts and another slow at attention. So the work on a lane is
summed rank by rank, and chains count every task with the seconds of its fastest rank: no path is shorter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.decision import Decision
from penstock.graph import Graph, Lane, Task
from penstock.ops import Op
from penstock.ops.places import INPUT, OUTPUT
from penstock.ops.sums import REDUCTIONS
from penstock.plan.predict import alone, step_ratio
from penstock.plan.problem import Problem
from penstock.schedule import Cost
from penstock.schedule.freeze import fastest, slowest
from penstock.simulate import chain_ends, lower_bound
from penstock.step import StepShape, build_graph
from penstock.step.passes.gradient_pieces import reductions
from penstock.step.plain import statistics

USUAL = Decision()

Half = tuple[bool, Lane]
"""Whether a task belongs to the forward half, and its lane."""


@dataclass(frozen=True)
class _Part:
    """Seconds of work by half and lane, a number or an array [ranks], and of a chain of dependencies.

    For a layer placed between the ends of its step: first_s, last_s: from the start of the forward half until
    a transfer between nodes can begin, and from the end of the last such transfer to the end of the half;
    back_s: from the start of the backward half until such a transfer can begin. Without transfers between
    nodes: until the layer is left.
    """

    work: Mapping[Half, Any]
    chain_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    back_s: float = 0.0


class QuickBounds:
    """Lower bounds on the predicted times of one problem's cuts.

    Each kind of layer and its gradients are worked out only once.

    The sums that normalise the loss divide a step in two: the whole forward half ends before any backward
    pass begins. Therefore each half takes as long as its busiest lane, transfers wait for the first
    attention, and the chain is that of the largest microbatch through all layers plus layer 0's longest
    reduction. Work is exact, since layers add up; with uneven pieces some chain may be longer.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.evidence is None, (
            "layers of one kind are taken for alike, and routing tells them apart"
        )
        self._given, self._problem, self._ratio = problem, alone(problem), step_ratio(problem)
        self._few, self._counts = _kinds(self._problem)
        layers = self._few.shape.moe_layers
        self._moe_counts = {
            kind: sum(n for n, is_moe in zip(self._counts, layers, strict=True) if is_moe is kind)
            for kind in dict.fromkeys(layers)
        }
        self._known: dict[Hashable, tuple[_Part, _Part]] = {}
        self._known_reductions: dict[Hashable, tuple[Any, float]] = {}
        self._known_statistics: dict[Hashable, float] = {}
        self._known_seconds: dict[Decision, float] = {}

    def of(self, problem: Problem) -> QuickBounds:
        """Return bounds for a model with more or fewer of the same layers; both share what they know."""
        if problem is self._given:
            return self
        other = QuickBounds(problem)
        other._known, other._known_reductions = self._known, self._known_reductions
        return other

    def seconds(self, choice: Decision) -> float:
        """Return a time that no order of this cut beats, whatever the priority rule of `choice`."""
        cut = replace(choice, priority=USUAL.priority)
        if cut not in self._known_seconds:
            self._known_seconds[cut] = self._seconds(cut)
        return self._known_seconds[cut]

    def _seconds(self, choice: Decision) -> float:
        problem, counts = self._few, self._counts
        if choice.partition is not None:  # a partition places every single layer's gradients
            problem, counts = self._problem, (1,) * self._problem.shape.num_layers
        cut = problem.cut(choice)
        parts = {is_moe: self._parts(choice, cut, is_moe) for is_moe in self._moe_counts}
        ends = next(iter(parts.values()))[0]
        work, chain_s = defaultdict[Half, Any](float, ends.work), ends.chain_s
        for is_moe, count in self._moe_counts.items():
            layer = parts[is_moe][1]
            chain_s += count * layer.chain_s
            for half, seconds in layer.work.items():
                work[half] = work[half] + count * seconds  # not in place: arrays are kept
        reductions = self._reductions(problem, choice, cut)
        reduced_s = sum(n * sum_s for n, (sum_s, _) in zip(counts, reductions, strict=True))
        work[False, Lane.INTER] = work[False, Lane.INTER] + reduced_s
        first, last = (parts[is_moe][1] for is_moe in (cut.moe_layers[0], cut.moe_layers[-1]))
        for forward, waits_s in ((True, first.first_s + last.last_s), (False, last.back_s)):
            if np.any(work[forward, Lane.INTER]):
                work[forward, Lane.INTER] = work[forward, Lane.INTER] + waits_s
        halves = [
            max((slowest(s) for (half, _), s in work.items() if half is each), default=0.0)
            for each in (True, False)
        ]
        whole_s = self._statistics_s(choice) + max(chain_s + reductions[0][1], sum(halves))
        return self._ratio * whole_s

    def _statistics_s(self, choice: Decision) -> float:
        """Return the seconds of the sums that normalise the loss; they are the same however a step is cut."""
        key = choice.dispatch, choice.compression, choice.more
        if key not in self._known_statistics:
            shape = self._problem.uncut(choice)
            cost = self._problem.cost(choice, shape)
            self._known_statistics[key] = fastest(cost(statistics(shape.last)))
        return self._known_statistics[key]

    def _parts(self, choice: Decision, cut: StepShape, is_moe: bool) -> tuple[_Part, _Part]:
        """Return the ends of a step and one layer, from a step with that layer alone."""
        key = (
            is_moe,
            cut.microbatches,
            cut.chunks,
            cut.backward_chunks,
            cut.split_experts,
            cut.expert_form,
            cut.pair_slices,
            cut.moves_samples,
            cut.residual_in_rows,
            cut.guest_slots,
            cut.recompute,
            choice.samples,
            choice.experts,
            choice.split,
            choice.dispatch,
            choice.compression,
            choice.more,
        )
        if key not in self._known:
            self._known[key] = self._work_out(choice, cut, is_moe)
        return self._known[key]

    def _work_out(self, choice: Decision, cut: StepShape, is_moe: bool) -> tuple[_Part, _Part]:
        shape = replace(
            cut,
            moe_layers=(is_moe,),
            all_reduce_chunks=(0,),
            all_reduce_parts=(),
            expert_all_reduce_chunks=(0,),
            partial_all_reduce_chunks=(0,),
        )
        graph = build_graph(shape)
        example = self._few.shape.moe_layers.index(is_moe)
        cost = self._few.only((example,)).cost(choice, shape)
        whole = {task: cost(task) for task in graph.tasks}
        seconds = {task: fastest(each) for task, each in whole.items()}
        sums = statistics(shape.last)
        ends = {task: each for task, each in whole.items() if task.op in (*INPUT, *OUTPUT)}
        inner = {task: each for task, each in whole.items() if task not in ends and task.name != sums.name}
        ends_s = sum(seconds[task] for task in ends if task.microbatch == 0)
        chain_s = lower_bound(graph, seconds.__getitem__).critical_path_s - ends_s - fastest(cost(sums))
        waits = _waits(graph, list(seconds.values()))
        return _Part(_work(ends), ends_s), _Part(_work(inner), chain_s, *waits)

    def _reductions(self, problem: Problem, choice: Decision, cut: StepShape) -> list[tuple[Any, float]]:
        """Return, by layer, the seconds of all its reductions and of the longest one outside of experts."""
        cost, found = problem.cost(choice, cut), []
        reduced = problem.gradients.of_form(cut.expert_form).kinds
        for layer in range(cut.num_layers):
            parts = cut.all_reduce_parts[layer] if cut.all_reduce_parts else ()
            pieces = tuple(len(cut.parts_of(layer, op)) for op in REDUCTIONS)
            key = (
                *(sizes[layer] for sizes in reduced),
                parts,
                pieces,
                cut.moe_layers[layer],
                choice.more,
            )
            if key not in self._known_reductions:
                self._known_reductions[key] = _reduce_s(cost, layer, cut)
            found.append(self._known_reductions[key])
        return found


def _kinds(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """Return the first layer, the last and one of each kind between, with the number of layers of each."""
    last, kinds = problem.shape.last, problem.layer_kinds
    examples: dict[Hashable, int] = {}
    counts: dict[int, int] = {}
    for layer, kind in enumerate(kinds):
        example = layer if layer in (0, last) else examples.setdefault(kind, layer)
        counts[example] = counts.get(example, 0) + 1
    kept = sorted(counts)
    return problem.only(tuple(kept)), tuple(counts[layer] for layer in kept)


def _work(seconds: Mapping[Task, Any]) -> Mapping[Half, Any]:
    work: dict[Half, Any] = defaultdict(float)
    for task, each in seconds.items():
        half = task.forward, task.lane
        work[half] = work[half] + each
    return work


def _waits(graph: Graph, seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return `first_s`, `last_s` and `back_s` of a one-layer step that reduces nothing."""
    ends, tails = chain_ends(graph, seconds), _tails(graph, seconds)
    sums_s = next(end for task, end in zip(graph.tasks, ends, strict=True) if task.op == Op.STATISTICS)
    starts = [end - each for end, each in zip(ends, seconds, strict=True)]
    there, back = _inner(graph, forward=True), _inner(graph, forward=False)
    first_s = _least(graph, there, starts, ends)
    last_s = _least(graph, there, tails, [tail + each for tail, each in zip(tails, seconds, strict=True)])
    return first_s, last_s, _least(graph, back, starts, ends) - sums_s


def _inner(graph: Graph, *, forward: bool) -> list[int]:
    """Return the positions of a half's tasks that lie between the ends of a step."""
    outside = (*INPUT, *OUTPUT, Op.STATISTICS)
    return [i for i, task in enumerate(graph.tasks) if task.forward is forward and task.op not in outside]


def _least(
    graph: Graph, positions: Sequence[int], crossing: Sequence[float], passing: Sequence[float]
) -> float:
    """Return the least `crossing` of tasks between nodes, or else the least `passing` of microbatches.

    A microbatch has passed backward through the layer once all its gradients are added: their reductions wait
    for nothing more.
    """
    across = [i for i in positions if graph.tasks[i].lane is Lane.INTER]
    if across:
        return min(crossing[i] for i in across)
    longest: dict[int | None, float] = defaultdict(float)
    for i in positions:
        task = graph.tasks[i]
        if task.forward or task.accumulates:
            longest[task.microbatch] = max(longest[task.microbatch], passing[i])
    return min(longest.values())


def _tails(graph: Graph, seconds: Sequence[float]) -> list[float]:
    """Return, for every forward task by position, the longest chain from its end to the sums of the loss."""
    tasks, tails = graph.tasks, [0.0] * len(graph.tasks)
    for position in reversed(range(len(tasks))):
        if not tasks[position].forward or tasks[position].op == Op.STATISTICS:
            continue
        for need in graph.links[position]:
            tails[need] = max(tails[need], tails[position] + seconds[position])
    return tails


def _reduce_s(cost: Cost, layer: int, cut: StepShape) -> tuple[Any, float]:
    parts = {op: cut.parts_of(layer, op) for op in REDUCTIONS}
    if not cut.moe_layers[layer]:
        parts[Op.EXPERT_ALL_REDUCE] = ()
    made = reductions(layer, parts, sharing=cut.sharing.mp_size > 1, scatters=cut.updating is not None)
    seconds = {op: [cost(task) for task in tasks] for op, tasks in made.items()}
    whole = [fastest(each) for each in (*seconds[Op.ALL_REDUCE], *seconds[Op.PARTIAL_ALL_REDUCE])]
    return sum(map(sum, seconds.values())), max(whole, default=0.0)
