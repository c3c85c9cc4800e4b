"""Lower bounds for any order of a cut, without building its graph: fast enough for thousands of cuts.

Where ranks differ, one may be busy with experts and another slow at attention. So the work on a lane is
summed rank by rank, and chains count every task with the seconds of its fastest rank: no path is shorter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import inf
from operator import attrgetter
from typing import Any, Final

import numpy as np

from penstock.decision import Decision
from penstock.features.build import build_graph
from penstock.features.sharded_optimizer.feature import norm_of, updates_of
from penstock.graph import Graph, Lane, Name, Phase, Task
from penstock.ops import Op, spec_of
from penstock.ops.base import Family, place_of
from penstock.ops.core import GRADIENT_KINDS, ByKind, KindName
from penstock.plan.predict import alone, step_ratio
from penstock.plan.problem import Problem
from penstock.step import StepShape
from penstock.step.passes import reductions
from penstock.step.shape import Updating
from penstock.timing import Cost, earliest, fastest, lower_bound, slowest, tail

USUAL = Decision()

Slot = tuple[bool, Lane, bool]
"""Whether a task belongs to the forward half, its lane, and whether it is a transfer between nodes that waits
for no layer of its half."""

Work = Mapping[Slot, Any]
"""Seconds of work by slot, each a number or an array [ranks]."""

NORM = norm_of(())
"""The norm of all gradients where a step updates parameters, only to be priced."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Seconds of work, and of a chain of dependencies in the largest microbatch.

    For a layer placed between the ends of its step: first_s, last_s: from the start of the forward half until
    a transfer between nodes that waits for a layer can begin, and from the end of the last such transfer to
    the end of the half; back_s: from the start of the backward half until such a transfer can begin. Without
    such transfers: until the layer is left.
    """

    work: Work
    chain_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    back_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A step with one layer of a kind. once: tasks that a step has once, however many its layers."""

    ends: _Part
    layer: _Part
    once: tuple[Task, ...]


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What a cut consists of, however many its layers.

    kinds: by whether a layer has experts. reduced: by layer, its reductions and updates. once, sums_s,
    norm_s: see `QuickBounds._once`. updating: None where nothing is updated.
    """

    kinds: Mapping[bool, _Kind]
    reduced: Sequence[_Part]
    once: Work
    sums_s: float
    norm_s: Any
    updating: Updating | None


class QuickBounds:
    """Lower bounds on the predicted times of one problem's cuts.

    Each kind of layer and its gradients are worked out only once.

    The sums that normalise the loss divide a step in two: the whole forward half ends before any backward
    pass begins. Therefore each half takes as long as its busiest lane, transfers wait for the first
    attention, and the chain is that of the largest microbatch through all layers plus layer 0's longest
    reduction. Work is exact: layers add up, and what a step does once is counted once. With uneven pieces
    some chain may be longer.

    A registered decision's passes may treat every layer differently, so a cut with such passes has the bound
    of its whole graph, which is slower.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.evidence is None, (
            "layers of one kind are taken for alike, and routing tells them apart"
        )
        self._given, self._problem, self._ratio = problem, alone(problem), step_ratio(problem)
        # The first layer, the last and one of each kind between, with the number of layers of each.
        last, kinds = self._problem.shape.last, self._problem.layer_kinds
        examples: dict[Hashable, int] = {}
        counts: dict[int, int] = {}
        for layer, kind in enumerate(kinds):
            example = layer if layer in (0, last) else examples.setdefault(kind, layer)
            counts[example] = counts.get(example, 0) + 1
        kept = sorted(counts)
        self._few, self._counts = self._problem.only(tuple(kept)), tuple(counts[layer] for layer in kept)
        layers = self._few.shape.moe_layers
        self._moe_counts = {
            kind: sum(n for n, is_moe in zip(self._counts, layers, strict=True) if is_moe is kind)
            for kind in dict.fromkeys(layers)
        }
        self._known: dict[Hashable, _Kind] = {}
        self._known_reductions: dict[Decision, dict[Hashable, _Part]] = {}
        self._known_once: dict[Decision, tuple[float, Any, Work]] = {}
        self._known_parts: dict[Decision, _Parts | None] = {}
        self._known_seconds: dict[Decision, float] = {}
        self._known_alone: dict[int, Problem] = {}
        self._known_cuts: dict[Decision, tuple[Decision, Decision]] = {}

    def of(self, problem: Problem) -> QuickBounds:
        """Return bounds for a model with more or fewer of the same layers; both share what they know."""
        if problem is self._given:
            return self
        other = QuickBounds(problem)
        other._known, other._known_reductions = self._known, self._known_reductions
        if other._few == self._few:  # they differ in the numbers of their layers alone
            other._known_once, other._known_parts = self._known_once, self._known_parts
        return other

    def seconds(self, choice: Decision) -> float:
        """Return a time that no order of this cut beats, whatever the priority rule of `choice`."""
        cut = choice.affecting("cut", "cost")
        if cut not in self._known_seconds:
            self._known_seconds[cut] = self._ratio * self._seconds(cut)
        return self._known_seconds[cut]

    def loose(self, choice: Decision) -> float:
        """Return a bound that may be lower, without working out steps in which something is recomputed.

        Such a step has all tasks and edges of the one that recomputes nothing, and more.
        """
        if choice not in self._known_cuts:
            cut = choice.affecting("cut", "cost")
            self._known_cuts[choice] = cut, cut.deciding("recompute", USUAL.recompute)
        cut, plain = self._known_cuts[choice]
        return self._known_seconds[cut] if cut in self._known_seconds else self.seconds(plain)

    def _seconds(self, choice: Decision) -> float:
        if choice.partition is not None:  # a partition places every single layer's gradients
            parts, counts = self._parts(self._problem, choice), (1,) * self._problem.shape.num_layers
        else:
            if choice not in self._known_parts:
                self._known_parts[choice] = self._parts(self._few, choice)
            parts, counts = self._known_parts[choice], self._counts
        if parts is None:
            cut = self._problem.cut(choice)
            cost = self._problem.cost(choice, cut)
            return lower_bound(build_graph(cut), cost, self._problem.mesh).seconds
        kinds, reduced = parts.kinds, parts.reduced
        ends = next(iter(kinds.values())).ends
        counted = [
            (1, ends.work),
            (1, parts.once),
            *((count, kinds[is_moe].layer.work) for is_moe, count in self._moe_counts.items()),
            *((count, each.work) for count, each in zip(counts, reduced, strict=True)),
        ]
        if parts.updating is not None:
            counted.append((1, {_slot(NORM): parts.norm_s}))
        work = _total(counted)
        first, last = (kinds[self._problem.shape.moe_layers[layer]].layer for layer in (0, -1))
        forward_s = _half_s(work, forward=True, waits_s=first.first_s + last.last_s)
        backward_s = _half_s(work, forward=False, waits_s=last.back_s)
        chain_s = ends.chain_s + reduced[0].chain_s
        chain_s += sum(count * kinds[is_moe].layer.chain_s for is_moe, count in self._moe_counts.items())
        if parts.updating is not None and parts.updating.clips and reduced[0].chain_s:
            chain_s += fastest(parts.norm_s)
        return parts.sums_s + max(chain_s, forward_s + backward_s)

    def _parts(self, problem: Problem, choice: Decision) -> _Parts | None:
        """Return what a cut consists of, of the layers that `problem` has; None if its passes may treat every
        layer differently."""
        cut = problem.cut(choice)
        if cut.more:
            return None
        priced = choice.affecting("cost")
        kinds = {is_moe: self._kind(choice, priced, cut, is_moe) for is_moe in self._moe_counts}
        # By layer, its reductions and what updates its parameters.
        cached, reduced = self._known_reductions.setdefault(priced, {}), []
        sizes = problem.gradients.of_form(cut.expert_form).by_kind.values()
        for layer in range(cut.num_layers):
            parts = {kind: cut.parts_of(layer, kind) for kind in GRADIENT_KINDS}
            if not cut.moe_layers[layer]:
                parts["experts"] = ()
            key = layer == 0, tuple(each[layer] for each in sizes), tuple(parts.values())
            if key not in cached:
                cached[key] = _reduced(problem.cost(choice, cut), layer, cut, parts)
            reduced.append(cached[key])
        sums_s, norm_s, once = self._once(choice, priced, kinds.values())
        return _Parts(
            kinds=kinds,
            reduced=reduced,
            once=once,
            sums_s=sums_s,
            norm_s=norm_s,
            updating=cut.updating if any(each.work for each in reduced) else None,
        )

    def _once(self, choice: Decision, priced: Decision, kinds: Iterable[_Kind]) -> tuple[float, Any, Work]:
        """Return the seconds of the sums that normalise the loss, those of the gradients' norm, and the work
        of all else that a step does once: the same however it is cut."""
        if priced not in self._known_once:
            shape = replace(self._problem.uncut(choice), replica_slots=choice.num_replica_slots)
            cost = self._problem.cost(choice, shape)
            tasks = {task.op: task for each in kinds for task in each.once}
            (sums,) = (tasks.pop(op) for op in list(tasks) if spec_of(op).normalises)
            work = _work({task: cost(task) for task in tasks.values()})
            self._known_once[priced] = fastest(cost(sums)), cost(NORM), work
        return self._known_once[priced]

    def _kind(self, choice: Decision, priced: Decision, cut: StepShape, is_moe: bool) -> _Kind:
        """Return a step with one layer of a kind and nothing to reduce."""
        key = is_moe, priced, OF_ONE_LAYER(cut)
        if key not in self._known:
            shape = replace(
                cut,
                moe_layers=(is_moe,),
                pieces=ByKind(dict.fromkeys(GRADIENT_KINDS, (0,))),
                all_reduce_parts=(),
                updating=None,  # with nothing to reduce there is nothing to update
            )
            example = self._few.shape.moe_layers.index(is_moe)
            if example not in self._known_alone:
                self._known_alone[example] = self._few.only((example,))
            cost = self._known_alone[example].cost(choice, shape)
            self._known[key] = _layer_of(shape).priced(cost)
        return self._known[key]


OF_ONE_LAYER: Final = attrgetter(
    *(
        field.name
        for field in fields(StepShape)
        if field.name not in ("moe_layers", "pieces", "all_reduce_parts", "updating")
    )
)
"""What of a shape is left in a step with one layer of a kind and nothing to reduce."""


# ---- a step with one layer ---------------------------------------------------------------------------------


@lru_cache(maxsize=128)
def _layer_of(shape: StepShape) -> _Layer:
    """Return the step with one layer that has this shape; cached, since searches price the same steps."""
    return _Layer(build_graph(shape))


class _Layer:
    """A step with one layer that reduces nothing: all that its bounds need and no cost changes."""

    def __init__(self, graph: Graph) -> None:
        self.graph, tasks = graph, graph.tasks
        self._slots = [_slot(task) for task in tasks]
        once = [spec_of(task.op).once for task in tasks]
        ends = [place_of(task.op) in ("input", "output") for task in tasks]
        places = range(len(tasks))
        self._once = tuple(task for task, each in zip(tasks, once, strict=True) if each)
        self._ends = [i for i in places if ends[i]]
        self._first_ends = [i for i in self._ends if tasks[i].microbatch == 0]
        self._layer = [i for i in places if not ends[i] and not once[i]]
        (self._sums,) = (i for i in places if once[i] and spec_of(tasks[i].op).normalises)
        # The longest chain from the first microbatch's embedding to the embedding's backward. Only that goes
        # through every layer: experts' weight gradients, or parameters of replicas, leave or enter a chain
        # inside one layer, and all layers may do so at the same time.
        first, self._last = (
            graph.position[graph.by_name[Name(0, Op.EMBED, phase, microbatch=0)]]
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        self._begin_s = [0.0 if i == first else -inf for i in places]
        # Of every task, those of its forward readers that end before the sums of the loss begin.
        counted = [task.forward and not spec_of(task.op).normalises for task in tasks]
        self._counted = [[place for place in each if counted[place]] for each in graph.readers_at]
        # Of a half, what lies between the ends of the step, without free transfers.
        inner = [i for i in self._layer if not self._slots[i][2]]
        self._there, self._back = ([i for i in inner if tasks[i].forward is half] for half in (True, False))

    def priced(self, cost: Cost) -> _Kind:
        """Return what the step is at this cost."""
        graph, whole = self.graph, [cost(task) for task in self.graph.tasks]
        seconds = [fastest(each) for each in whole]
        ends_s = sum(seconds[i] for i in self._first_ends)
        chain_s = earliest(graph.links, seconds, self._begin_s)[self._last] - ends_s - seconds[self._sums]
        ends, tails = earliest(graph.links, seconds), tail(self._counted, seconds)
        starts = [end - each for end, each in zip(ends, seconds, strict=True)]
        passing = [after + each for after, each in zip(tails, seconds, strict=True)]
        layer = _Part(
            work=self._work(self._layer, whole),
            chain_s=chain_s,
            first_s=_least(graph, self._there, starts, ends),
            last_s=_least(graph, self._there, tails, passing),
            back_s=_least(graph, self._back, starts, ends) - ends[self._sums],
        )
        return _Kind(
            ends=_Part(work=self._work(self._ends, whole), chain_s=ends_s), layer=layer, once=self._once
        )

    def _work(self, places: Iterable[int], seconds: Sequence[Any]) -> Work:
        return _total((1, {self._slots[i]: seconds[i]}) for i in places)


# ---- work --------------------------------------------------------------------------------------------------


def _slot(task: Task) -> Slot:
    spec = spec_of(task.op)  # what a step has once waits for no layer, but the norm of all gradients
    free = not task.inputs if task.forward else spec.once and spec.family is not Family.OPTIMIZER
    return task.forward, task.lane, free and task.lane is Lane.INTER


def _work(seconds: Mapping[Task, Any]) -> Work:
    return _total((1, {_slot(task): each}) for task, each in seconds.items())


def _total(counted: Iterable[tuple[int, Work]]) -> Work:
    """Return the sum of works, each of which is done a number of times."""
    total: dict[Slot, Any] = {}
    for count, work in counted:
        for slot, seconds in work.items():
            total[slot] = total.get(slot, 0.0) + count * seconds  # not in place: arrays are kept
    return total


def _half_s(work: Work, *, forward: bool, waits_s: float) -> float:
    """Return the seconds of a half by its busiest lane.

    waits_s: before and after the transfers between nodes that wait for layers; free ones may run meanwhile.
    """
    lanes = {lane: work.get((forward, lane, False), 0.0) for lane in Lane}
    between_s, free_s = lanes[Lane.INTER], work.get((forward, Lane.INTER, True), 0.0)
    lanes[Lane.INTER] = between_s + (np.maximum(waits_s, free_s) if slowest(between_s) else free_s)
    return max(map(slowest, lanes.values()))


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


def _reduced(cost: Cost, layer: int, cut: StepShape, parts: Mapping[KindName, Sequence[int]]) -> _Part:
    """Return the reductions of a layer and what updates its parameters.

    Their chain is that of the longest piece of replicated gradients, from gradients to sums or to updated
    parameters.
    """
    updating = cut.updating
    made = reductions(layer, parts, sharing=cut.sharing.tp_size > 1, scatters=updating is not None)
    work, summed_s, used_s, in_turn_s = dict[Task, Any](), 0.0, 0.0, 0.0
    for kind, tasks in made.items():
        for task in tasks:
            after = () if updating is None else updates_of(task, edp=updating.edp)
            priced = {each: cost(each) for each in (task, *after)}
            work |= priced
            if kind == "replicated":  # of which the embedding's are a part: all others may be complete before
                sum_s, *after_s = map(fastest, priced.values())
                summed_s, used_s = max(summed_s, sum_s), max(used_s, sum(after_s))
                in_turn_s = max(in_turn_s, sum_s + sum(after_s))
    apart = updating is not None and updating.clips  # every update waits for all sums
    return _Part(work=_work(work), chain_s=summed_s + used_s if apart else in_turn_s)
