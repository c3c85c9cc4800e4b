"""Ops of experts that ranks hold as replicas (Pro-Prophet): parameters out, gradients home, the next plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from penstock.config import Within
from penstock.features.expert_replicas.encoding import FIRST_NUMBERS, NUMBER_BYTES
from penstock.features.expert_replicas.prices import ROUTED
from penstock.features.feature import Feature
from penstock.features.field import Asked, Choice, Field
from penstock.graph import Cut, Graph, Lane, Name, Phase, Task
from penstock.mesh import Axes, Group
from penstock.ops.base import Backward, Kind, Op, OpSpec, parameters_of
from penstock.ops.core import EXPERTS as OWN_GRADIENTS
from penstock.ops.core import LOAD_BYTES
from penstock.ops.work import DIGEST_BYTES, Sizes, Work
from penstock.step.passes import GatheredLoads, last_to_add
from penstock.step.rewrite import Pass, Stage, end_layers, require
from penstock.step.shape import StepShape

REPLICAS = "replica gradients of L{layer}"
"""State: the gradients of the experts of which a rank holds replicas for a step."""


def _replicas(task: Task, sizes: Sizes) -> Work:
    """Return the work at most: every rank has all replicas for which it has room."""
    assert task.piece is not None, task
    parts = task.cut.parts
    return Work(collective="all_to_all", sent_bytes=sizes.replica_bytes * parts[task.piece] / sum(parts))


def _planning(task: Task, sizes: Sizes) -> Work:
    """Return the work of reading the loads; the planner's own time is added where it is known: `Placed`."""
    del task
    return Work(copied_bytes=sum(sizes.moe_layers) * sizes.num_experts * LOAD_BYTES)


def _replications(task: Task, sizes: Sizes) -> Work:
    """Return the work of exchanging all layers' replicas and a hash; for longer splits see `prices`."""
    replicas_bytes = sum(sizes.moe_layers) * NUMBER_BYTES * (FIRST_NUMBERS + sizes.num_replica_slots)
    return Work(collective="all_gather", sent_bytes=replicas_bytes + 2 * DIGEST_BYTES * sizes.members(task))


OPS = (
    OpSpec(
        name=Op.REPLICA_PARAMETERS,
        title="parameters of experts, from owners to replicas",
        kind=Kind.COLLECTIVE,
        work=_replicas,
        backward=Backward.NONE,
        indices="p",
    ),
    OpSpec(
        name=Op.REPLICA_GRADIENTS,
        title="gradients of experts, from replicas to owners",
        kind=Kind.COLLECTIVE,
        work=_replicas,
        backward=Backward.NONE,
        indices="p",
    ),
    OpSpec(
        name=Op.PLAN_REPLICAS,
        once=True,
        title="which replicas ranks hold in the next step",
        kind=Kind.HOST,
        work=_planning,
        backward=Backward.NONE,
        indices="",
    ),
    OpSpec(
        name=Op.COMPARE_REPLICAS,
        once=True,
        title="exchange of the next replicas",
        kind=Kind.COLLECTIVE,
        work=_replications,
        backward=Backward.NONE,
        indices="",
    ),
)


# ---- experts as replicas of other ranks for a step: parameters out, gradients home, and the next plan -----


@dataclass(frozen=True)
class Replicas:
    """Pro-Prophet's Trans: before experts compute, ranks get the parameters of experts that they do not own.

    No edge leads to GP, since parameters are those that the last step left: GP runs in any gap before X. All
    ranks of an expert group meet, including those without a replica.

    before  D ─rows─ X
    after   D ─rows─ X          GP.p0, GP.p1 ─replicas─ X

    Attributes:
        pieces: The number of pieces into which every replica is cut.
    """

    pieces: int
    name = "replicas"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        require(graph, Op.EXPERTS)
        moe_layers = {task.layer for task in graph.tasks if task.op == Op.EXPERTS}
        begun, out = set[int](), list[Task]()
        for task in graph.tasks:
            if task.layer in moe_layers - begun:
                begun.add(task.layer)
                out += _pieces(task.layer, Op.REPLICA_PARAMETERS, Phase.FORWARD, self.pieces)
            if task.op == Op.EXPERTS:
                made = _pieces(task.layer, Op.REPLICA_PARAMETERS, Phase.FORWARD, self.pieces)
                inputs = {**task.inputs, "replicas": tuple(each.name for each in made)}
                reads = (*task.reads, parameters_of(REPLICAS.format(layer=task.layer)))
                out.append(replace(task.reading(inputs), reads=reads))
            else:
                out.append(task)
        return Graph.of(out)


@dataclass(frozen=True)
class ReplicaGradients:
    """Pro-Prophet's Agg: a piece waits for every task that adds to replicas, and adds to owners' gradients.

    before  X.m1.B, X.m0.B
    after   X.m1.B, X.m0.B ─gradients─ GG.p0, GG.p1

    Attributes:
        pieces: The number of pieces into which every replica is cut.
    """

    pieces: int
    name = "replica_gradients"
    stage = Stage.GRADIENTS

    def __call__(self, graph: Graph) -> Graph:
        last = last_to_add(graph)
        added: dict[int, list[Task]] = {}
        for layer in {task.layer for task in graph.tasks if task.op == Op.REPLICA_PARAMETERS}:
            inputs = {"gradients": tuple(last[REPLICAS.format(layer=layer)])}
            made = _pieces(layer, Op.REPLICA_GRADIENTS, Phase.BACKWARD, self.pieces)
            added[layer] = [task.reading(inputs) for task in made]
        return end_layers(graph, added)


@dataclass(frozen=True)
class PlannedReplicas:
    """Which ranks hold replicas of which experts next is planned from the loads of this step, while it still
    runs.

    Only the comparison of what all ranks have found, at the end of the step, waits for the plan.

    before  LG.B
    after   LG.B ─loads─ PE.B ─replications─ PH.B

    Attributes:
        axes: The axes along which the ranks meet that exchange rows.
    """

    axes: Axes
    name = "planned_replicas"
    stage = Stage.GRADIENTS

    def __call__(self, graph: Graph) -> Graph:
        require(graph, Op.LOADS)
        (loads,) = [task for task in graph.tasks if task.op == Op.LOADS]
        names = [loads.name._replace(op=Op.PLAN_REPLICAS), Name(0, Op.COMPARE_REPLICAS, Phase.BACKWARD)]
        plan = Task(names[0], Lane.HOST, (), {"loads": (loads.name,)})
        compare = Task(names[1], Lane.INTER, self.axes, {"replications": (plan.name,)})
        return end_layers(end_layers(graph, {plan.layer: [plan]}), {0: [compare]})


def _pieces(layer: int, op: str, phase: Phase, pieces: int) -> list[Task]:
    names = [Name(layer, op, phase, piece=piece) for piece in range(pieces)]
    replicas, own = REPLICAS.format(layer=layer), OWN_GRADIENTS.format(layer=layer)
    there = phase is Phase.FORWARD
    return [
        Task(
            name,
            Lane.INTER,
            Group.EXPERT,
            cut=Cut(parts=(1,) * pieces),
            accumulates=() if there else (own,),
            reads=(parameters_of(own),) if there else (replicas,),
            writes=(parameters_of(replicas),) if there else (),
        )
        for name in names
    ]


# ---- expert replicas: hot experts are computed on other ranks, too, for a step ----------------------------


ExpertMoves = Literal["none", "pro_prophet", "shadowing", "least_loaded", "planned"]
Split = Literal["auto", "exact", "last_step"]
MOST_REPLICA_SLOTS = 64

SPLIT_WORDS = {"exact": "the loads of each step", "last_step": "the loads of the step before"}

ReplicaSlots = Annotated[
    int,
    Within(1, MOST_REPLICA_SLOTS, "every slot takes the memory of an expert and its gradients, per layer"),
]


def why_experts_stay(asked: Asked, choice: Choice) -> str:
    """Return why experts cannot move with this choice; "" = they may."""
    if not any(asked.shape.moe_layers):
        return "no layer has experts"
    if not asked.shape.sharing.is_none and choice.form != "gather":
        return f"expert form {choice.form} sends rows to all shards of their experts at once"
    return ""


def _experts(asked: Asked, choice: Choice) -> Sequence[str]:
    return ("none",) if why_experts_stay(asked, choice) else asked.movable.experts


def _expert_words(choice: Choice) -> str:
    if choice.experts == "none":
        return ""
    slots = "a replica slot" if choice.replica_slots == 1 else f"{choice.replica_slots} replica slots"
    split = "" if choice.split == "auto" else f", split by {SPLIT_WORDS[choice.split]}"
    return f"experts move ({choice.experts}, {slots} per rank{split})"


EXPERTS = Field(
    values=_experts,
    words=_expert_words,
    head="experts",
    cell=lambda d: "-" if d.experts == "none" else d.experts.replace("_", " "),
    affects=("cut", "cost", "memory"),
    may_be_left_out=True,
)
REPLICA_SLOTS = Field(
    values=lambda asked, choice: asked.movable.replica_slots if choice.experts != "none" else (1,),
    affects=("cut", "cost", "memory"),
    may_be_left_out=True,
)
SPLIT = Field(
    values=lambda asked, choice: (asked.movable.split,),
    affects=("cut", "cost", "memory"),
    may_be_left_out=True,
)


def _passes(shape: StepShape) -> Sequence[Pass]:
    if not (shape.replica_slots and any(shape.moe_layers)):
        return ()
    moving: tuple[Pass, ...] = (Replicas(shape.replica_pieces), ReplicaGradients(shape.replica_pieces))
    shards = shape.sharing.etp_size > 1
    planned = PlannedReplicas(Group.EXPERT_SHARDS if shards else Group.EXPERT)
    return (*moving, GatheredLoads(), planned) if shape.gathers_loads else moving


def _why_not(shape: StepShape) -> str:
    if not (shape.replica_slots and any(shape.moe_layers)) or shape.exchange_counts:
        return ""
    return (
        "replica_slots: every expert has a fixed number of rows from every rank, whoever computes them, "
        "so replicas would spare nothing. Use dropless routing, or set placement.experts=none"
    )


FEATURE = Feature(
    name="expert_replicas",
    title="holds replicas of hot experts where their rows are, planned ahead and moved beside other work",
    source="Pro-Prophet; FasterMoE for shadowing",
    ops=OPS,
    passes=_passes,
    why_not=_why_not,
    fields={"experts": EXPERTS, "replica_slots": REPLICA_SLOTS, "split": SPLIT},
    routed=ROUTED,
)
