"""Checks that a pass of one's own loses no gradient and no sum over ranks, which would be silent."""

from __future__ import annotations

from collections import defaultdict

from penstock.graph import Graph, Phase, ScheduleError, Task
from penstock.ops import Backward, spec_of
from penstock.ops.core import GRADIENT_KINDS, summed
from penstock.step.shape import StepShape

GRADIENT = "d_"


def check_complete(graph: Graph, shape: StepShape) -> None:
    """Raise ScheduleError naming a gradient that no task reads, or one that is not reduced over the ranks.

    An edge that is meant to have no gradient is `given` in its op; a task that takes the place of a reduction
    writes the state that the reduction wrote.
    """
    _check_gradients(graph)
    # Every buffer that tasks add to is reduced over the ranks as a whole.
    added = {state for task in graph.tasks for state in task.accumulates}
    # By state the pieces that are written, each with the number into which its buffer is cut.
    written: dict[str, set[tuple[int | None, int]]] = defaultdict(set)
    for task in graph.tasks:
        for state in task.writes:
            written[state].add((task.piece, len(task.cut.parts)))
    for name, kind in GRADIENT_KINDS.items():
        for layer in range(shape.num_layers):
            state = kind.state.format(layer=layer)
            if state not in added or not shape.parts_of(layer, name):
                continue
            pieces = written[state]
            if not any(piece is None or {(i, of) for i in range(of)} <= pieces for piece, of in pieces):
                raise ScheduleError(
                    f"{state} are not reduced over the ranks, or not all of them: no {kind.reduce} of layer "
                    f"{layer} writes that piece, and no task in its place"
                )
    # Over fewer ranks the others keep theirs; over more, experts count twice.
    sharing = shape.sharing.tp_size > 1
    for task in graph.tasks:
        sums = summed(task.op)
        if sums and task.axes != (axes := GRADIENT_KINDS[sums].axes_of(sharing=sharing)):
            met, wanted = " x ".join(task.axes) or "no axis", " x ".join(axes)
            raise ScheduleError(
                f"{task} sums over {met}, and gradients of that kind are summed over {wanted}: "
                "give a sum over other ranks an op of its own"
            )


def _check_gradients(graph: Graph) -> None:
    """Check that every gradient that a backward task makes for an input of its forward task is read."""
    read = {
        (name, role.removeprefix(GRADIENT))
        for task in graph.tasks
        for role, names in task.inputs.items()
        for name in names
    }
    # By piece the roles of a forward task whose sources have a backward of their own.
    wanted = {
        _piece(task): [
            role
            for role, names in task.inputs.items()
            if role not in spec_of(task.op).given
            and any(spec_of(name.op).backward is Backward.TASK for name in names)
        ]
        for task in graph.tasks
        if task.forward
    }
    for task in graph.tasks:
        for role in wanted.get(_piece(task), ()) if task.phase in (Phase.BACKWARD, Phase.INPUT) else ():
            if (task.name, role) not in read:
                raise ScheduleError(
                    f"nobody reads {GRADIENT}{role} of {task}: the gradient is lost. Where none is wanted, "
                    f"name {role} in `given` of op {task.op}"
                )
    # A task that reads a sum as its gradient is among the tasks that were summed.
    for task in graph.tasks:
        for role, names in task.inputs.items():
            output = role.removeprefix(GRADIENT)
            if task.forward or role == output:
                continue
            for total in (name for name in names if spec_of(name.op).backward is Backward.VALUE):
                if task.name._replace(phase=Phase.FORWARD) not in graph.by_name[total].inputs.get(output, ()):
                    raise ScheduleError(f"{task} reads {role} of {total}, which does not sum its {output}")


def _piece(task: Task) -> tuple[int, str, int | None]:
    """Return what a task has in common with its backward, whose chunks may differ: layer, op, microbatch."""
    return task.layer, task.op, task.microbatch
