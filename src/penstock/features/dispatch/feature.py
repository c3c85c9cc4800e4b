"""Legs of dispatch and combine inside the node, around the leg between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.features.dispatch import DISPATCHES
from penstock.features.feature import Feature
from penstock.features.field import READERS, Asked, Choice, Field
from penstock.graph import Graph
from penstock.ops.base import Op
from penstock.ops.core import FLAT, Hop
from penstock.step.rewrite import Beside, Pass, Stage, insert_after, insert_before
from penstock.step.shape import StepShape


@dataclass(frozen=True)
class Hierarchical:
    """A dispatch in several legs; combine takes the same legs home, last leg first.

        before  AT ─rows─ D ─rows─ X ─rows─ C ─rows─ U
        after   AT ─rows─ DG ─rows─ D ─rows─ DS ─rows─ X ─rows─ CG ─rows─ C ─rows─ CS ─rows─ U

    Attributes:
        hops: The legs in their order, one of them D.
    """

    hops: Sequence[Hop]
    name = "hierarchical"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        middle = [hop.op for hop in self.hops].index(Op.DISPATCH)
        for hop in self.hops[:middle]:
            graph = insert_before(graph, Op.DISPATCH, "rows", Beside(hop).before)
            graph = insert_after(graph, Op.COMBINE, "rows", Beside(hop.home).after)
        for hop in reversed(self.hops[middle + 1 :]):
            graph = insert_after(graph, Op.DISPATCH, "rows", Beside(hop).after)
            graph = insert_before(graph, Op.COMBINE, "rows", Beside(hop.home).before)
        axes, between = self.hops[middle].axes, (Op.DISPATCH, Op.COMBINE)
        return Graph.of(replace(task, axes=axes) if task.op in between else task for task in graph.tasks)


# ---- the way of rows to the ranks of their experts, as legs on lanes --------------------------------------


def _dispatches(asked: Asked, choice: Choice) -> Sequence[str]:
    if READERS[choice.schedule].expert_form not in (None, "gather"):
        return ("flat",)
    may_stay = "none" in asked.movable.samples  # a row for several experts has no single sample's home
    fitting = [name for name in asked.dispatches if may_stay or not DISPATCHES[name].joins_rows]
    return fitting or asked.dispatches


def _comm_dtypes(asked: Asked, choice: Choice) -> Sequence[str]:
    joined = DISPATCHES[choice.dispatch].joins_rows  # the numbers sent with a row would be rounded, too
    return ("none",) if joined or not any(asked.shape.moe_layers) else asked.comm_dtypes


DISPATCH = Field(
    values=_dispatches,
    words=lambda d: f"{d.dispatch.replace('_', ' ')} dispatch",
    head="dispatch",
    cell=lambda d: d.dispatch.replace("_", " "),
    affects=("cut", "cost", "memory"),
)
COMPRESSION = Field(
    values=_comm_dtypes,
    words=lambda d: "" if d.comm_dtype == "none" else f"rows as {d.comm_dtype}",
    head="rows",
    cell=lambda d: "-" if d.comm_dtype == "none" else d.comm_dtype,
    affects=("cut", "cost", "memory"),
    may_be_left_out=True,
)


def _passes(shape: StepShape) -> Sequence[Pass]:
    hierarchical = shape.dispatch != FLAT and any(shape.moe_layers)
    return (Hierarchical(shape.dispatch),) if hierarchical else ()


FEATURE = Feature(
    name="dispatch",
    title="brings rows to their experts in legs inside and between nodes, at the same time",
    source="FSMoE, section 4; DeepSpeed-MoE and HetuMoE for the two hierarchical ways",
    passes=_passes,
    fields={"dispatch": DISPATCH, "comm_dtype": COMPRESSION},
)
