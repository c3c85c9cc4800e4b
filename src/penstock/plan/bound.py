"""What no order of a cut beats, without building the cut's graph: quick enough for thousands of cuts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from penstock.decision import Decision
from penstock.graph import Lane, Phase, Task
from penstock.ops import Op
from penstock.ops.sums import REDUCTIONS
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
        self._few, self._counts = _kinds(self._problem)
        layers = self._few.shape.moe_layers
        self._moe_counts = {
            kind: sum(n for n, is_moe in zip(self._counts, layers, strict=True) if is_moe is kind)
            for kind in dict.fromkeys(layers)
        }
        self._known: dict[Hashable, tuple[_Part, _Part]] = {}
        self._known_reductions: dict[Hashable, tuple[float, float]] = {}
        self._known_statistics: dict[Hashable, float] = {}

    def of(self, problem: Problem) -> QuickBounds:
        """Bounds of a model with more or fewer of the same layers; what is known of one holds for both."""
        other = QuickBounds(problem)
        other._known, other._known_reductions = self._known, self._known_reductions
        return other

    def seconds(self, choice: Decision) -> float:
        """No order of this cut takes less."""
        problem, counts = self._few, self._counts
        if choice.partition is not None:  # says for every single layer where its gradients go
            problem, counts = self._problem, (1,) * self._problem.shape.num_layers
        cut = problem.cut(choice)
        parts = {is_moe: self._parts(choice, cut, is_moe) for is_moe in self._moe_counts}
        ends = next(iter(parts.values()))[0]
        work, chain_s = defaultdict(float, ends.work), ends.chain_s
        for is_moe, count in self._moe_counts.items():
            layer = parts[is_moe][1]
            chain_s += count * layer.chain_s
            for half, seconds in layer.work.items():
                work[half] += count * seconds
        reductions = self._reductions(problem, choice, cut)
        work[False, Lane.INTER] += sum(n * sum_s for n, (sum_s, _) in zip(counts, reductions, strict=True))
        first, last = (parts[is_moe][1] for is_moe in (cut.moe_layers[0], cut.moe_layers[-1]))
        if work[True, Lane.INTER]:
            work[True, Lane.INTER] += ends.first_s + first.first_s + ends.last_s + last.last_s
        if work[False, Lane.INTER]:
            work[False, Lane.INTER] += ends.back_s + last.back_s
        halves = [
            max((s for (half, _), s in work.items() if half is each), default=0.0) for each in (True, False)
        ]
        return self._statistics_s(choice) + max(chain_s + reductions[0][1], sum(halves))

    def _statistics_s(self, choice: Decision) -> float:
        """The sums that normalise the loss; they are of all layers at once, however a step is cut."""
        key = choice.dispatch, choice.more
        if key not in self._known_statistics:
            shape = self._problem.uncut(choice)
            cost = self._problem.cost(choice, shape)
            self._known_statistics[key] = slowest(cost(statistics(shape.last)))
        return self._known_statistics[key]

    def _parts(self, choice: Decision, cut: StepShape, is_moe: bool) -> tuple[_Part, _Part]:
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
        seconds = {task: slowest(cost(task)) for task in graph.tasks}
        sums = statistics(shape.last)
        ends = {task: each for task, each in seconds.items() if task.op in (Op.EMBED, Op.HEAD)}
        inner = {task: each for task, each in seconds.items() if task not in ends and task.name != sums.name}
        ends_s = sum(each for task, each in ends.items() if task.microbatch == 0)
        chain_s = lower_bound(graph, seconds.__getitem__).critical_path_s - ends_s - slowest(cost(sums))
        return _part(ends, ends_s), _part(inner, chain_s)

    def _reductions(self, problem: Problem, choice: Decision, cut: StepShape) -> list[tuple[float, float]]:
        """For every layer the seconds of its reductions, and of the longest one of replicated gradients."""
        work, cost, found = problem.workload, problem.cost(choice, cut), []
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


def _kinds(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """The first layer, the last, and one of each kind between them; and how many layers each stands for."""
    work, last = problem.workload, problem.shape.last
    kinds = list(
        zip(problem.shape.moe_layers, work.all_reduce_bytes, work.expert_all_reduce_bytes, strict=True)
    )
    examples: dict[Hashable, int] = {}
    counts: dict[int, int] = {}
    for layer, kind in enumerate(kinds):
        example = layer if layer in (0, last) else examples.setdefault(kind, layer)
        counts[example] = counts.get(example, 0) + 1
    kept = sorted(counts)
    return problem.only(tuple(kept)), tuple(counts[layer] for layer in kept)


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
    parts = {op: cut.parts_of(layer, op) for op in REDUCTIONS}
    if not cut.moe_layers[layer]:
        parts[Op.EXPERT_ALL_REDUCE] = ()
    made = reductions(layer, parts, sharing=cut.sharing.mp_size > 1)
    seconds = {op: [slowest(cost(task)) for task in tasks] for op, tasks in made.items()}
    return sum(map(sum, seconds.values())), max(seconds[Op.ALL_REDUCE], default=0.0)
