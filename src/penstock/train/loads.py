"""How evenly a run loads its experts and ranks: numbers of a step, and what is kept for pictures.

Shapes: P ranks, Y MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from penstock.mesh import Group
from penstock.report.loads import NUMBERS, LoadCourse
from penstock.runtime import PipelinedStack
from penstock.train.metrics import StepMetrics
from penstock.workloads.figures import HostedRows, LoadFigures, Whole

MOST_KEPT = 256


def with_loads(metrics: StepMetrics, stack: PipelinedStack) -> StepMetrics:
    """Return the metrics with how even the step's loads were, if they were gathered. All ranks call it."""
    loads_PYE, layout = stack.loads.last, stack.machinery.layout
    if loads_PYE is None:
        return metrics
    placements = [part.moe.placement for part in stack.parts.parts if part.moe is not None]
    found = LoadFigures.of(
        loads_PYE,
        placements,
        layout.mesh,
        layout.node_size,
        hosted=_hosted_rows(stack) if stack.loads.hostings else None,
        before_PYE=stack.loads[-2] if len(stack.loads) > 1 else None,
    )
    return replace(
        metrics,
        expert_load_max_over_mean=found.expert_max_over_mean,
        rank_load_max_over_mean=found.rank_max_over_mean,
        rank_rows_max_over_mean=found.rank_rows_max_over_mean,
        expert_load_entropy=found.entropy,
        loads_in_common=found.in_common,
        rows_crossing_nodes=found.crossing_nodes,
    )


def _hosted_rows(stack: PipelinedStack) -> HostedRows:
    """Return the rows that all ranks computed. Each expert group's guests are known only to its own ranks."""
    loads_PYE, layout = stack.loads[-1], stack.machinery.layout
    mine = HostedRows.of_group(loads_PYE, stack.loads.hostings, layout.mesh, layout.node_size, layout.rank)
    groups = layout.mesh.groups(Group.EXPERT_SHARDS)
    if len(groups) == 1:
        return mine
    share = mine.share(layout.mesh, layout.rank)
    return HostedRows.joined(stack.machinery.control.gather(share, "adding up what guests compute"))


def expert_loads(stack: PipelinedStack) -> Whole | None:
    """Return how often all ranks chose every expert in the last step, [Y, E]; None where not gathered."""
    loads_PYE = stack.loads.last
    return None if loads_PYE is None else loads_PYE.sum(axis=0, dtype=np.int64)


@dataclass
class LoadBook:
    """Loads over a run, of every step at first; beyond MOST_KEPT steps every other one is dropped."""

    _steps: list[int] = field(default_factory=list)
    _loads: list[Whole] = field(default_factory=list)
    _every: int = 1

    def add(self, step: int, loads_YE: Whole) -> None:
        """Add the loads of step number `step`, which ascends."""
        if step % self._every:
            return
        self._steps.append(step)
        self._loads.append(loads_YE)
        if len(self._steps) > MOST_KEPT:
            self._every *= 2
            kept = [i for i, held in enumerate(self._steps) if held % self._every == 0]
            self._steps, self._loads = [self._steps[i] for i in kept], [self._loads[i] for i in kept]

    @staticmethod
    def resumed(folder: Path, done: int) -> LoadBook:
        """Return what an earlier start kept of steps up to `done`. Raises ConfigError for a damaged file."""
        book, path = LoadBook(), folder / NUMBERS
        if done and path.exists():
            course = LoadCourse.read(path)
            for step, loads_YE in zip(course.steps, course.loads_SYE, strict=True):
                if step <= done:
                    book.add(step, loads_YE)
        return book

    def course(self, layers: Sequence[int]) -> LoadCourse | None:
        """Return what is drawn; None where no loads are known. layers: numbers of the MoE layers."""
        if not self._steps:
            return None
        return LoadCourse(tuple(layers), tuple(self._steps), np.stack(self._loads))
