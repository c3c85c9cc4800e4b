"""What the formulas of published planners need, read off the costs of a problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.decision import Decision
from penstock.graph import Graph, Lane, Name, Phase
from penstock.mesh import Group
from penstock.ops import Op
from penstock.plan.problem import Problem
from penstock.plan.published.backward import Backward, GapLayer, Made
from penstock.plan.published.degree import DEGREES, Linear, MoEPart
from penstock.schedule.freeze import Cost, slowest
from penstock.step import StepShape, build_graph

Seconds = Callable[[str, Phase, int], float]
"""Seconds of one op of one layer's MoE part in all chunks together, by their number."""


@dataclass(frozen=True)
class Durations:
    """The costs of a problem whose batch is not cut."""

    problem: Problem

    @property
    def choice(self) -> Decision:
        """Published planners choose no dispatch."""
        return Decision(dispatch=self.problem.workload.dispatch)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """From the highest to the lowest, as the way back takes them."""
        layers = enumerate(self.problem.shape.moe_layers)
        return tuple(layer for layer, is_moe in layers if is_moe)[::-1]

    @property
    def degrees(self) -> tuple[int, ...]:
        """No more chunks than a rank has tokens."""
        tokens = self.problem.workload.tokens(0, 1)
        return tuple(degree for degree in DEGREES if degree <= max(1, tokens))

    def part(self, layer: int, phase: Phase) -> MoEPart:
        """The MoE part of a layer in one direction.

        The first all-to-all stands for both. Where rows gather inside a node before they leave it, too, that
        time counts with the leg on arrival, and the formulas are an estimate.
        """
        once, twice = self._shape(1), self._shape(2)
        out = [(hop.op, hop.lane) for hop in once.dispatch]
        home = [(hop.home.op, hop.lane) for hop in reversed(once.dispatch)]
        before, behind = (out, home) if phase is Phase.FORWARD else (home, out)

        def linear(ops: Sequence[tuple[str, Lane]], lane: Lane) -> Linear:
            mine = [op for op, on in ops if on is lane]
            whole_s = sum(self._seconds(layer, op, phase, once) for op in mine)
            halves_s = sum(self._seconds(layer, op, phase, twice) for op in mine)
            start_s = max(0.0, halves_s - whole_s)  # two start-ups less one
            return Linear(alpha_s=start_s, linear_s=whole_s - start_s)

        return MoEPart(
            a2a=linear(before, Lane.INTER),
            ag=linear(before, Lane.INTRA),
            rs=linear(behind, Lane.INTRA),
            experts=linear([(Op.EXPERTS, Lane.COMPUTE)], Lane.COMPUTE),
        )

    def backward(self) -> Backward:
        """The backward pass for a partition."""
        problem, layers = self.problem, self.moe_layers
        sizes = problem.workload.all_reduce_bytes
        ends = (*layers[1:], -1)

        def made(first: int, last: int) -> tuple[Made, ...]:
            downwards = range(first, last, -1)
            return tuple(Made(layer=layer, size_bytes=sizes[layer]) for layer in downwards if sizes[layer])

        return Backward(
            num_layers=problem.shape.num_layers,
            gaps=tuple(
                GapLayer(
                    layer=layer,
                    part=self.part(layer, Phase.BACKWARD),
                    dense_s=self._dense_s(layer, end),
                    made=made(layer, end),
                )
                for layer, end in zip(layers, ends, strict=True)
            ),
            all_reduce=problem.cluster.all_reduce(problem.workload.span(Group.WORLD)),
            above=made(problem.shape.last, layers[0]),
            degrees=self.degrees,
        )

    def _dense_s(self, layer: int, end: int) -> float:
        """Computation between the MoE parts of `layer` and of `end`, the next below (-1: the start)."""
        back = Phase.BACKWARD
        names = [Name(between, Op.ATTENTION, back, 0) for between in range(layer, end, -1)]
        names.append(Name(end, Op.UNORDER, back, 0) if end >= 0 else Name(0, Op.EMBED, back, 0))
        cost, tasks = self._costs[1], self._graphs[1].by_name
        return sum(slowest(cost(tasks[name])) for name in names)

    @cached_property
    def _costs(self) -> dict[int, Cost]:
        """By the number of chunks. Layers that are alike are worked out once."""
        return {chunks: self.problem.cost(self.choice, self._shape(chunks)) for chunks in (1, 2)}

    @cached_property
    def _graphs(self) -> dict[int, Graph]:
        """The same for the tasks."""
        return {chunks: build_graph(self._shape(chunks)) for chunks in (1, 2)}

    def _seconds(self, layer: int, op: str, phase: Phase, shape: StepShape) -> float:
        cost, tasks = self._costs[shape.chunks], self._graphs[shape.chunks].by_name
        pieces = (tasks[Name(layer, op, phase, 0, chunk)] for chunk in range(shape.chunks))
        return sum(slowest(cost(piece)) for piece in pieces)

    def _shape(self, chunks: int) -> StepShape:
        return replace(self.problem.shape, microbatches=1, chunks=chunks, degree_backward=0)
