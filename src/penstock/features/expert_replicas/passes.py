"""Experts as replicas of other ranks for a step: parameters out, gradients home, and the next plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.features.expert_replicas.ops import REPLICAS
from penstock.graph import Cut, Graph, Lane, Name, Phase, Task
from penstock.mesh import Axes, Group
from penstock.ops.base import parameters_of
from penstock.ops.blocks import EXPERTS
from penstock.ops.names import Op
from penstock.step.passes import last_to_add
from penstock.step.rewrite import end_layers, require
from penstock.step.stages import Stage


@dataclass(frozen=True)
class Replicas:
    """Pro-Prophet's Trans: before experts compute, ranks get the parameters of experts that they do not own.

    No edge leads to GP, since parameters are those that the last step left: GP runs in any gap before X. All
    ranks of an expert group meet, including those without a replica.

    before  D ─rows─ X
    after   D ─rows─ X          GP.p0, GP.p1 ─replicas─ X

    pieces: number of pieces into which every replica is cut.
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

    pieces: number of pieces into which every replica is cut.
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

    axes: axes along which the ranks meet that exchange rows.
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
    replicas, own = REPLICAS.format(layer=layer), EXPERTS.format(layer=layer)
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
