"""The time that a schedule leaves its network for replicas: parameters on the way out, gradients home."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from penstock.features.expert_replicas.problem import Slack
from penstock.graph import Lane, Phase, Task
from penstock.mesh import Mesh
from penstock.ops import Op
from penstock.schedule import StepPlan
from penstock.timing import Cost, simulate

REPLICAS = (Op.REPLICA_PARAMETERS, Op.REPLICA_GRADIENTS)

Span = tuple[float, float]


def replica_slack(plan: StepPlan, cost: Cost, mesh: Mesh) -> tuple[Slack, ...]:
    """Return, by MoE layer, the seconds in which the lane between nodes is idle while replicas may travel.

    Replicas take no time in this step: they may travel before the layer's experts begin, and after their
    backward. Each gap counts for one layer: forward for the layer whose experts are next, backward for the
    one whose experts were last.
    """

    def without(task: Task) -> object:
        return 0.0 if task.op in REPLICAS else cost(task)

    times = simulate(plan.schedule, plan.graph, without, mesh).times
    spans = {task: (float(span.start[0]), float(span.end[0])) for task, span in times.items()}
    layers = [layer for layer, is_moe in enumerate(plan.shape.moe_layers) if is_moe]
    experts = {layer: [t for t in spans if t.op == Op.EXPERTS and t.layer == layer] for layer in layers}
    begins_s = [min(spans[t][0] for t in experts[layer] if t.forward) for layer in layers]
    last_s = [
        max(spans[t][1] for t in experts[layer] if not t.forward and t.phase is not Phase.RECOMPUTE)
        for layer in reversed(layers)
    ]
    end_s = max(end for _, end in spans.values())
    busy = [span for task, span in spans.items() if task.lane is Lane.INTER]
    forward = (_idle(busy, gap) for gap in pairwise([0.0, *begins_s]))
    backward = (_idle(busy, gap) for gap in pairwise([*last_s, end_s]))
    return tuple(Slack(*both) for both in zip(forward, reversed([*backward]), strict=True))


def _idle(busy: Sequence[Span], gap: Span) -> float:
    """Return the seconds of a gap in which none of the spans runs; the spans of one lane do not overlap."""
    begin, end = gap
    common_s = sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in busy)
    return max(0.0, end - begin - common_s)
