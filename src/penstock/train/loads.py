"""How evenly a run loads its experts and ranks: numbers of a step, and what is kept for pictures.

Shapes: Y MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.report.loads import LoadCourse
from penstock.runtime import PipelinedStack
from penstock.train.metrics import StepMetrics
from penstock.workloads.figures import LoadFigures, Whole

MOST_KEPT = 256


def with_loads(metrics: StepMetrics, stack: PipelinedStack) -> StepMetrics:
    """The same with how even the step's loads were, as far as they were gathered."""
    loads_PYE, layout = stack.loads.last, stack.machinery.layout
    if loads_PYE is None:
        return metrics
    placements = [part.moe.placement for part in stack.parts.parts if part.moe is not None]
    found = LoadFigures.of(loads_PYE, placements, layout.mesh, layout.node_size)
    return replace(
        metrics,
        expert_load_max_over_mean=found.expert_max_over_mean,
        rank_load_max_over_mean=found.rank_max_over_mean,
        expert_load_entropy=found.entropy,
        rows_crossing_nodes=found.crossing_nodes,
    )


def expert_loads(stack: PipelinedStack) -> Whole | None:
    """Choices of every expert by all ranks in the last step, [Y, E]; None where they were not gathered."""
    loads_PYE = stack.loads.last
    return None if loads_PYE is None else loads_PYE.sum(axis=0, dtype=np.int64)


@dataclass
class LoadBook:
    """Loads over a run, of every step at first; when MOST_KEPT are held every other one is forgotten."""

    _steps: list[int] = field(default_factory=list)
    _loads: list[Whole] = field(default_factory=list)
    _every: int = 1

    def add(self, step: int, loads_YE: Whole) -> None:
        """The loads of step number `step`, which ascends."""
        if step % self._every:
            return
        self._steps.append(step)
        self._loads.append(loads_YE)
        if len(self._steps) > MOST_KEPT:
            self._every *= 2
            kept = [i for i, held in enumerate(self._steps) if held % self._every == 0]
            self._steps, self._loads = [self._steps[i] for i in kept], [self._loads[i] for i in kept]

    def course(self, moe_layers: Sequence[bool]) -> LoadCourse | None:
        """What is drawn; None where nothing is known. moe_layers: for every layer, whether it is one."""
        if not self._steps:
            return None
        numbers = tuple(layer for layer, is_moe in enumerate(moe_layers) if is_moe)
        return LoadCourse(numbers, tuple(self._steps), np.stack(self._loads))
