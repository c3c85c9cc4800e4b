"""Inputs for the formulas of published planners, derived from the costs of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.decision import Decision
from penstock.features.build import build_graph
from penstock.graph import Graph, Lane, Name, Phase
from penstock.ops.base import place_of
from penstock.ops.core import GRADIENT_KINDS, computes_experts
from penstock.plan.problem import Problem
from penstock.plan.published.degree import DEGREES, Backward, GapLayer, Linear, Made, MoEPart
from penstock.step import StepShape
from penstock.timing import Cost, slowest

Where = tuple[str, Lane]
"""An op and its lane."""

PLACES = {"after": "after", "input": "before", "block": "before"}
"""Whether tasks outside MoE parts come before or after that of their layer in the forward order, by the place
of their op. Backward it is the other way round."""


@dataclass(frozen=True)
class Durations:
    """The costs of a problem whose batch is not cut."""

    problem: Problem
    _known: dict[tuple[int, Phase], MoEPart] = field(default_factory=dict, init=False, compare=False)

    @property
    def choice(self) -> Decision:
        """A plain decision with the problem's dispatch: published planners choose none."""
        return Decision(dispatch=self.problem.workload.dispatch)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """MoE layers from the highest to the lowest, as in the backward pass."""
        layers = enumerate(self.problem.shape.moe_layers)
        return tuple(layer for layer, is_moe in layers if is_moe)[::-1]

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees to try: no more chunks than a rank has tokens."""
        tokens = self.problem.workload.tokens(0, 1)
        return tuple(degree for degree in DEGREES if degree <= max(1, tokens))

    def part(self, layer: int, phase: Phase) -> MoEPart:
        """Return the MoE part of a layer in one direction.

        The first all-to-all stands for both. Where rows also gather inside a node before they leave it, that
        time counts with the leg on arrival, and the formulas are an estimate.
        """
        if self.problem.evidence is None:  # otherwise rows tell layers of one kind apart
            layer = self.problem.layer_kinds.index(self.problem.layer_kinds[layer])
        key = layer, phase
        if key not in self._known:
            once, twice = self._shape(1), self._shape(2)
            first = (layer, phase, 0, 0)
            moves = [
                (task.op, task.lane)
                for task in self._graphs[1].tasks
                if (task.layer, task.phase, task.microbatch, task.chunk) == first
            ]
            at = next(i for i, (op, _) in enumerate(moves) if computes_experts(op))
            before, experts, after = moves[:at], moves[at : at + 1], moves[at + 1 :]

            def linear(ops: Sequence[Where], lane: Lane) -> Linear:
                there = [op for op, on in ops if on is lane]
                whole_s = sum(self._seconds(layer, op, phase, once) for op in there)
                halves_s = sum(self._seconds(layer, op, phase, twice) for op in there)
                start_s = max(0.0, halves_s - whole_s)  # two start-ups less one
                return Linear(alpha_s=start_s, linear_s=whole_s - start_s)

            self._known[key] = MoEPart(
                a2a=linear(before, Lane.INTER),
                ag=linear(before, Lane.INTRA),
                rs=linear(after, Lane.INTRA),
                experts=linear(experts, Lane.COMPUTE),
            )
        return self._known[key]

    def backward(self) -> Backward:
        """Return the backward pass for a partition.

        Only gradients that are whole on every rank are partitioned. The partial ones, mostly of norms and
        gates, are reduced in one piece, for which the formulas have no term.
        """
        problem, layers = self.problem, self.moe_layers
        sizes = problem.workload.all_reduce_bytes
        ends = (*layers[1:], -1)

        def made(first: int, last: int) -> tuple[Made, ...]:
            downwards = range(first, last, -1)
            return tuple(Made(layer=layer, size_bytes=sizes[layer]) for layer in downwards if sizes[layer])

        gaps = []
        for layer, end in zip(layers, ends, strict=True):
            # From this MoE part to the next below: computation, and exchanges inside nodes between ranks that
            # share attention.
            between = [*self._dense.get(("after", end), ())]
            for each in range(layer, end, -1):
                between += self._dense.get(("before", each), ())
            dense_s = sum((seconds for _, seconds in sorted(between)), 0.0)
            part = self.part(layer, Phase.BACKWARD)
            gaps.append(GapLayer(layer=layer, part=part, dense_s=dense_s, made=made(layer, end)))
        summing = GRADIENT_KINDS["replicated"].axes_of(sharing=problem.workload.tp_size > 1)
        return Backward(
            num_layers=problem.shape.num_layers,
            gaps=tuple(gaps),
            all_reduce=problem.cluster.all_reduce(problem.workload.span(summing)),
            above=made(problem.shape.last, layers[0]),
            degrees=self.degrees,
        )

    @cached_property
    def _dense(self) -> dict[tuple[str, int], list[tuple[int, float]]]:
        """Places and seconds of backward tasks outside MoE parts, by whether they come before (in the forward
        order) or after that of their layer, and by the layer."""
        cost, by_place = self._costs[1], dict[tuple[str, int], list[tuple[int, float]]]()
        for place, task in enumerate(self._graphs[1].tasks):
            whole = task.chunk is None and task.piece is None  # neither rows in transit nor a reduction
            where = PLACES.get(place_of(task.op), "")
            if where and whole and task.phase is Phase.BACKWARD:
                by_place.setdefault((where, task.layer), []).append((place, slowest(cost(task))))
        return by_place

    @cached_property
    def _costs(self) -> dict[int, Cost]:
        """Costs by the number of chunks. Layers that are alike are computed once."""
        return {chunks: self.problem.cost(self.choice, self._shape(chunks)) for chunks in (1, 2)}

    @cached_property
    def _graphs(self) -> dict[int, Graph]:
        """Graphs of tasks by the number of chunks."""
        return {chunks: build_graph(self._shape(chunks)) for chunks in (1, 2)}

    def _seconds(self, layer: int, op: str, phase: Phase, shape: StepShape) -> float:
        cost, tasks = self._costs[shape.chunks], self._graphs[shape.chunks].by_name
        pieces = (tasks[Name(layer, op, phase, 0, chunk)] for chunk in range(shape.chunks))
        return sum(slowest(cost(piece)) for piece in pieces)

    def _shape(self, chunks: int) -> StepShape:
        return replace(self.problem.shape, microbatches=1, chunks=chunks, degree_backward=0)
