"""Computation that is recomputed before its backward, so that it keeps only its inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.features.feature import Feature
from penstock.features.field import Field
from penstock.graph import Graph, Name, Phase, RefusalError, Task
from penstock.ops import spec_of
from penstock.ops.base import place_of
from penstock.ops.core import computes_experts
from penstock.step.rewrite import Pass, Stage
from penstock.step.shape import StepShape

Names = tuple[Name, ...]


@dataclass(frozen=True)
class Recompute:
    """Inserts a task X.R between X.F and X.B. Transfers are not repeated: X.R gets the rows that X.F got.

    It may start as soon as the gradient of what leaves the block is there (`due`), so it runs while rows of
    gradients are in transit.

        before  X ─saved─ X.B
        after   X ─kept─ X.R ─saved─ X.B          AT.B of the block above ─due─ X.R

    Attributes:
        experts_only: Whether the rest of a block keeps what its backward needs.
        nest: Whether every backward chunk lies in one forward chunk.
    """

    experts_only: bool
    nest: bool = True
    name = "recompute"
    stage = Stage.TRANSPOSE

    def __call__(self, graph: Graph) -> Graph:
        # By layer the tasks that bring gradients to it: those of the layer above, or of the head.
        due: dict[int, Names] = defaultdict(tuple)
        for task in graph.tasks:
            if task.forward or place_of(task.op) == "output":
                continue
            above = [
                name
                for name in task.sources()
                if name.phase is Phase.BACKWARD and (name.layer > task.layer or place_of(name.op) == "output")
            ]
            due[task.layer] = tuple(dict.fromkeys((*due[task.layer], *above)))
        out: list[Task] = []
        for task in graph.tasks:
            wanted = computes_experts(task.op) or (spec_of(task.op).recomputable and not self.experts_only)
            if not (wanted and task.phase is Phase.BACKWARD and "saved" in task.inputs):
                out.append(task)
                continue
            if not (self.nest or computes_experts(task.op)) and "c" in spec_of(task.op).indices:
                raise RefusalError(
                    f"{task.op} runs again by whole forward chunks, and a backward chunk lies in several: "
                    "take a multiple of forward chunks for backward, or an op that is not recomputable"
                )
            (forward,) = task.inputs["saved"]
            name = task.name._replace(phase=Phase.RECOMPUTE)
            inputs = {"kept": (forward,), "due": due[task.layer]}
            out.append(Task(name, task.lane, (), inputs, task.cut, reads=graph.by_name[forward].reads))
            out.append(task.reading({**task.inputs, "saved": (name,)}))
        return Graph.of(out)


# ---- recomputation of experts or blocks before their backward ---------------------------------------------


RECOMPUTE = Field(
    values=lambda asked, choice: asked.recompute,
    words=lambda d: "" if d.recompute == "none" else f"{d.recompute} recomputed",
    head="recompute",
    cell=lambda d: "-" if d.recompute == "none" else d.recompute,
    affects=("cut", "memory"),
    may_be_left_out=True,
)


def _passes(shape: StepShape) -> Sequence[Pass]:
    if shape.recompute == "none":
        return ()
    nest = shape.backward_chunks % shape.chunks == 0
    return (Recompute(experts_only=shape.recompute == "experts", nest=nest),)


FEATURE = Feature(
    name="recompute",
    title="computes experts or whole blocks a second time instead of keeping what they save",
    source="Chen et al. 2016, activation checkpointing",
    passes=_passes,
    fields={"recompute": RECOMPUTE},
)
