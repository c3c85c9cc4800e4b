"""What no order of a cut beats, without building the cut's graph: quick enough for thousands of cuts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from penstock.graph import Lane, Phase, Task
from penstock.ops import Op
from penstock.plan.choice import Choice
from penstock.plan.predict import alone
from penstock.plan.problem import Problem
from penstock.schedule import Cost
from penstock.schedule.freeze import slowest
from penstock.simulate import lower_bound
from penstock.step import StepShape, build_graph
from penstock.step.passes.gradient_pieces import reductions
from penstock.step.plain import statistics

Half = tuple[bool, Lane]
"""Forward or not, and the lane."""


@dataclass(frozen=True)
class _Part:
    """Work by half and lane, and a chain of dependencies. Seconds.

    first_s, last_s: from the start of the forward half until a transfer can begin, and from the last transfer
    until its end; back_s: from the start of the backward half until a transfer can begin.
    """

    work: Mapping[Half, float]
    chain_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    back_s: float = 0.0


class QuickBounds:
    """Lower bounds of the cuts of one problem. A kind of layer and its gradients are worked out once.

    The sums that normalise the loss part a step in two: all of forward ends before any backward begins. So
    each half takes as long as its busiest lane, transfers wait for the first attention, and the chain is that
    of the largest microbatch through all layers and of layer 0's longest reduction. Work is exact, since
    layers add up; with uneven pieces some chain may be longer.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = alone(problem)
        self._kinds = Counter(problem.shape.moe_layers)
        self._example = {is_moe: problem.shape.moe_layers.index(is_moe) for is_moe in self._kinds}
        self._known: dict[Hashable, tuple[_Part, _Part]] = {}
        self._known_reductions: dict[Hashable, tuple[float, float]] = {}

    def seconds(self, choice: Choice) -> float:
        """No order of this cut takes less."""
        cut = self._problem.cut(choice)
        parts = {is_moe: self._parts(choice, cut, is_moe) for is_moe in self._kinds}
        ends = next(iter(parts.values()))[0]
        work, chain_s = defaultdict(float, ends.work), ends.chain_s
        for is_moe, count in self._kinds.items():
            layer = parts[is_moe][1]
            chain_s += count * layer.chain_s
            for half, seconds in layer.work.items():
                work[half] += count * seconds
        cost = self._problem.cost(choice, cut)
        statistics_s = slowest(cost(statistics(cut.last)))  # of all layers at once
        reductions = self._reductions(choice, cut, cost)
        work[False, Lane.INTER] += sum(sum_s for sum_s, _ in reductions)
        first, last = (parts[is_moe][1] for is_moe in (cut.moe_layers[0], cut.moe_layers[-1]))
        if work[True, Lane.INTER]:
            work[True, Lane.INTER] += ends.first_s + first.first_s + ends.last_s + last.last_s
        if work[False, Lane.INTER]:
            work[False, Lane.INTER] += ends.back_s + last.back_s
        halves = [
            max((s for (half, _), s in work.items() if half is each), default=0.0) for each in (True, False)
        ]
        return statistics_s + max(chain_s + reductions[0][1], sum(halves))

    def _parts(self, choice: Choice, cut: StepShape, is_moe: bool) -> tuple[_Part, _Part]:
        """The ends of a step and one layer, of a step that has no more."""
        key = (
            is_moe,
            cut.microbatches,
            cut.chunks,
            cut.backward_chunks,
            cut.split_experts,
            choice.dispatch,
            choice.more,
        )
        if key not in self._known:
            self._known[key] = self._work_out(choice, cut, is_moe)
        return self._known[key]

    def _work_out(self, choice: Choice, cut: StepShape, is_moe: bool) -> tuple[_Part, _Part]:
        shape = replace(
            cut,
            moe_layers=(is_moe,),
            all_reduce_chunks=(0,),
            all_reduce_parts=(),
            expert_all_reduce_chunks=(0,),
        )
        graph = build_graph(shape)
        cost = self._problem.only((self._example[is_moe],)).cost(choice, shape)
        seconds = {task: slowest(cost(task)) for task in graph.tasks}
        sums = statistics(shape.last)
        ends = {task: each for task, each in seconds.items() if task.op in (Op.EMBED, Op.HEAD)}
        inner = {task: each for task, each in seconds.items() if task not in ends and task.name != sums.name}
        ends_s = sum(each for task, each in ends.items() if task.microbatch == 0)
        chain_s = lower_bound(graph, seconds.__getitem__).critical_path_s - ends_s - slowest(cost(sums))
        return _part(ends, ends_s), _part(inner, chain_s)

    def _reductions(self, choice: Choice, cut: StepShape, cost: Cost) -> list[tuple[float, float]]:
        """For every layer the seconds of its reductions, and of the longest one of replicated gradients."""
        work = self._problem.workload
        found = []
        for layer in range(cut.num_layers):
            parts = cut.all_reduce_parts[layer] if cut.all_reduce_parts else ()
            pieces = (cut.all_reduce_chunks[layer], cut.expert_all_reduce_chunks[layer])
            key = (
                work.all_reduce_bytes[layer],
                work.expert_all_reduce_bytes[layer],
                parts,
                pieces,
                cut.moe_layers[layer],
                choice.more,
            )
            if key not in self._known_reductions:
                self._known_reductions[key] = _reduce_s(cost, layer, cut)
            found.append(self._known_reductions[key])
        return found


def _part(seconds: Mapping[Task, float], chain_s: float) -> _Part:
    def least(op: str, phase: Phase) -> float:
        return min(
            (each for task, each in seconds.items() if (task.op, task.phase) == (op, phase)), default=0.0
        )

    work: dict[Half, float] = defaultdict(float)
    for task, each in seconds.items():
        work[task.forward, task.lane] += each
    return _Part(
        work=work,
        chain_s=chain_s,
        first_s=least(Op.EMBED, Phase.FORWARD) + least(Op.ATTENTION, Phase.FORWARD),
        last_s=least(Op.UNORDER, Phase.FORWARD) + least(Op.HEAD, Phase.FORWARD),
        back_s=least(Op.HEAD, Phase.BACKWARD) + least(Op.UNORDER, Phase.BACKWARD),
    )


def _reduce_s(cost: Cost, layer: int, cut: StepShape) -> tuple[float, float]:
    parts = cut.parts_of(layer)
    equal = (1,) * (cut.expert_all_reduce_chunks[layer] if cut.moe_layers[layer] else 0)
    replicated, experts = (
        [slowest(cost(task)) for task in tasks] for tasks in reductions(layer, parts, equal)
    )
    return sum(replicated) + sum(experts), max(replicated, default=0.0)
