"""Handlers of computation that is recomputed before its backward (phase R), and of its first run.

The first time a task runs without autograd and keeps its inputs; the second time the same handler makes
segments of them. Nothing else in the step knows: the backward finds in `saved` what it always finds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.graph import Phase, Task
from penstock.moe import ChunkRoute
from penstock.ops import OPS, Op
from penstock.runtime.features.recompute.replay import Replay
from penstock.runtime.handlers import Handler, Handlers, Inputs, Outputs, StepContext
from penstock.runtime.ops.experts import compute_slice, take_slices
from penstock.runtime.ops.transfers import routes_of


@dataclass(frozen=True)
class Kept:
    """What a task was given, and how it is repeated."""

    inputs: Inputs
    replay: Replay


@dataclass(frozen=True)
class Keep:
    """Runs a forward task and keeps its inputs, in `kept`, for a second run."""

    handler: Handler

    def __call__(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        replay = Replay(context.marks.device)
        with replay.first():
            outputs = self.handler(context, task, inputs)
        return {**outputs, "kept": Kept(inputs, replay)}


@dataclass(frozen=True)
class Repeat:
    """Runs a task again: leaves `saved` for the backward, and nothing else, since all else has been read."""

    handler: Handler

    def __call__(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        kept: Kept = inputs.one("kept")
        with kept.replay.second():
            outputs = self.handler(context, task, kept.inputs)
        return {"saved": outputs["saved"]}


@dataclass(frozen=True)
class KeptSlice:
    """The values that run a slice of X.F a second time."""

    rows_RM: Tensor
    route: ChunkRoute
    replay: Replay


def keep_experts(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return the rows of `experts`, without autograd; kept: by slice, what another run needs."""
    layer = context.layers[task.layer]
    routes = routes_of(inputs).at_experts[task.cut.first : task.cut.stop]
    kept = [
        KeptSlice(rows_RM, route, Replay(rows_RM.device))
        for rows_RM, route in zip(inputs.one("rows"), routes, strict=True)
    ]
    out = []
    for each in kept:
        with each.replay.first():
            out.append(compute_slice(context, layer, each.rows_RM, each.route)[0])
    return {"rows": tuple(out), "kept": dict(zip(task.cut.held, kept, strict=True))}


def recompute_experts(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return saved: what X.F would have left of the slices of a backward chunk."""
    layer, saved = context.layers[task.layer], {}
    for number, each in zip(task.cut.held, take_slices(task, inputs.all("kept")), strict=True):
        with each.replay.second():
            saved[number] = compute_slice(context, layer, each.rows_RM, each.route)[1]
    return {"saved": saved}


OWN: Handlers = {
    (Op.EXPERTS, Phase.FORWARD): keep_experts,
    (Op.EXPERTS, Phase.RECOMPUTE): recompute_experts,
}
"""Handlers of ops whose second run is not that of the first handler on the kept inputs: experts keep and
repeat their rows slice by slice."""


def repeated(handlers: Handlers) -> Handlers:
    """Return the handlers of tasks that run twice, for every op that may: phases F and R."""
    found: dict[tuple[str, Phase], Handler] = {}
    for op, spec in OPS.items():
        if spec.recomputable and (op, Phase.FORWARD) in handlers:
            handler = handlers[op, Phase.FORWARD]
            found[op, Phase.FORWARD], found[op, Phase.RECOMPUTE] = Keep(handler), Repeat(handler)
    return {**found, **OWN}


def handlers_of(tasks: Collection[Task], handlers: Handlers, twice: Handlers) -> Mapping[Task, Handler]:
    """Return the handler of every task; of those that run twice, in both their runs, the one in `twice`.

    Raises KeyError where there is none.
    """
    again = [task for task in tasks if task.phase is Phase.RECOMPUTE] if twice else []
    run_twice = {name for task in again for name in (task.name, *task.inputs["kept"])}
    return {task: (twice if task.name in run_twice else handlers)[task.op, task.phase] for task in tasks}
