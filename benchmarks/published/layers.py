"""The layers of the FSMoE and FlowMoE studies, as problems that a planner can be asked.

What the papers leave open is decided here: a problem is a stack of equal layers, so that gradients of a layer
can be reduced under the ones below: four of them on FSMoE's testbeds (of two, half of all gradients have no
layer below), two for FlowMoE. Embedding, head and the sums behind the
loss cost nothing, routing is even. Attention computes four projections and its scores; on FSMoE's testbeds
the ranks of a node share that, its gradients (4 M^2 over N_MP) and every expert, and copies cost nothing; the
gate's gradients (M E) are summed over all ranks, since each sees its part of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from penstock.cost import ClusterFile, ProfiledCluster, Workload
from penstock.cost.cluster_file import TaskModel
from penstock.cost.clusters import find_cluster
from penstock.decision import Decision
from penstock.graph import Lane, Phase, Task
from penstock.mesh import Group, holders
from penstock.ops import OPS, Op
from penstock.plan import Problem
from penstock.step import StepShape
from penstock.step.shape import Sharing
from penstock.timing import Cost

FLOAT_BYTES = 4
FSMOE_STACK, FLOWMOE_STACK = 4, 2
TOP_K = 2
ATTENTION_PRODUCTS = 6
"""Projections of q, k, v and the output; scores; values."""

NO_COPIES_BYTES_PER_S = 1e18


class LayerProblem(Problem):
    """Layers alone: no embedding, no head, no sums behind the loss."""

    def cost(self, choice: Decision, cut: StepShape) -> Cost:
        cost = super().cost(choice, cut)
        outside = {op for op, spec in OPS.items() if spec.normalises or spec.place in ("input", "output")}
        return lambda task: 0.0 if task.op in outside else cost(task)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One configured layer, in a stack of so many.

    Attributes:
        batch: Samples of the ranks that share attention, or of one rank.
        heads: Heads of attention, which change no cost.
    """

    batch: int
    seq_len: int
    hidden_size: int
    ffn_hidden_size: int
    capacity_factor: float | None
    expert_matrices: int = 2
    heads: int = 8
    stack: int = FLOWMOE_STACK

    def workload(self, file: ClusterFile, *, shards: int) -> Workload:
        """Return a workload of one expert group, one expert per rank or group of ranks that share it."""
        groups = num_experts = holders(file.ranks, shards)
        attention, gate = 4 * self.hidden_size**2 * FLOAT_BYTES, self.hidden_size * num_experts * FLOAT_BYTES
        return Workload(
            batch=self.batch,
            seq_len=self.seq_len,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            vocab_size=1,
            num_experts=num_experts,
            top_k=TOP_K,
            expert_matrices=self.expert_matrices,
            capacity_factor=self.capacity_factor,
            min_capacity=1,
            world_size=file.ranks,
            ep_size=groups,
            element_bytes=FLOAT_BYTES,
            all_reduce_bytes=(attention // shards + (gate if shards == 1 else 0),) * self.stack,
            expert_all_reduce_bytes=(0,) * self.stack,
            partial_all_reduce_bytes=(gate if shards > 1 else 0,) * self.stack,
            devices_per_node=file.ranks_per_node,
            tp_size=shards,
            etp_size=shards,
        )


# ---- FSMoE -------------------------------------------------------------------------------------------------

FSMOE_SEQ_LENS = {"fsmoe-testbed-a": (512, 1024, 2048), "fsmoe-testbed-b": (256, 512, 1024)}


def fsmoe_layers(cluster: str) -> Iterator[LayerSpec]:
    """Yield the 1,458 configured layers of one testbed; the number of heads changes no cost."""
    grid = product(
        (1, 2, 4),
        (8, 16, 32),
        FSMOE_SEQ_LENS[cluster],
        (1024, 2048, 4096),
        (2, 3, 4),
        (1.2, 2.4, None),
        (2, 3),
    )
    for batch, heads, seq_len, dim, ratio, capacity_factor, matrices in grid:
        yield LayerSpec(
            batch=batch,
            seq_len=seq_len,
            hidden_size=dim,
            ffn_hidden_size=ratio * dim,
            capacity_factor=capacity_factor,
            expert_matrices=matrices,
            heads=heads,
            stack=FSMOE_STACK,
        )


def fsmoe_problem(spec: LayerSpec, cluster: str) -> LayerProblem:
    """Return a problem on lanes `inter` and `intra`: all-to-all between nodes, the others inside."""
    file = find_cluster(cluster)
    tuned = replace(
        file,
        rates=replace(file.rates, memory_bytes_per_s=NO_COPIES_BYTES_PER_S),
        tasks=_compute_models(file.rates.task_overhead_s, spec.expert_matrices),
    )
    return LayerProblem(
        shape=_shape(spec.stack, file.ranks_per_node),
        workload=spec.workload(file, shards=file.ranks_per_node),
        cluster=ProfiledCluster.build(tuned),
    )


def one_lane(problem: LayerProblem) -> LayerProblem:
    """Return the same layer where traffic inside a node and between nodes does not overlap: on one lane.

    A chunk's all-gather goes with its all-to-all, and so does its reduce-scatter: one transfer with the time
    of the two.
    """
    return OneLaneProblem(**{each.name: getattr(problem, each.name) for each in fields(problem) if each.init})


class OneLaneProblem(LayerProblem):
    """All-to-alls take the time of the collective over shards as well, which takes none by itself."""

    def cost(self, choice: Decision, cut: StepShape) -> Cost:
        cost = super().cost(choice, cut)

        def joined(task: Task) -> Any:
            if task.op in WITHIN.values():
                return 0.0
            inside = WITHIN.get(task.op)
            return cost(task) + (cost(_beside(task, inside)) if inside else 0.0)

        return joined


WITHIN = {Op.DISPATCH: Op.SHARD_GATHER, Op.COMBINE: Op.SHARD_SCATTER}


def _beside(task: Task, op: str) -> Task:
    """Return the task of `op` inside the node that has the same rows."""
    return replace(task, name=task.name._replace(op=op), lane=Lane.INTRA, axes=Group.SHARDS)


def _compute_models(product_s: float, expert_matrices: int) -> tuple[TaskModel, ...]:
    """Return prices: every matrix product starts up; a backward is twice a forward, start-ups included."""
    products = {Op.EXPERTS: expert_matrices, Op.HEADS: ATTENTION_PRODUCTS, Op.GATE: 0, Op.UNPERMUTE: 0}
    scales = {Phase.FORWARD: 1.0, Phase.BACKWARD: 2.0, Phase.INPUT: 1.0, Phase.WEIGHT: 1.0}
    return tuple(
        TaskModel(op=op, phase=phase, alpha_s=scale * count * product_s, scale=scale)
        for op, count in products.items()
        for phase, scale in scales.items()
    )


def _shape(layers: int, shards: int) -> StepShape:
    sharing = Sharing(tp_size=shards, etp_size=shards)
    return StepShape(moe_layers=(True,) * layers, exchange_counts=False, sharing=sharing)


# ---- FlowMoE -----------------------------------------------------------------------------------------------

FLOWMOE_SIZES = (512, 1024, 2048, 4096, 8192)


def flowmoe_layers() -> Iterator[LayerSpec]:
    """Yield the 675 layers."""
    grid = product((2, 4, 8), (1.0, 1.1, 1.2), (512, 1024, 2048), FLOWMOE_SIZES, FLOWMOE_SIZES)
    for batch, capacity_factor, seq_len, dim, hidden in grid:
        yield LayerSpec(
            batch=batch,
            seq_len=seq_len,
            hidden_size=dim,
            ffn_hidden_size=hidden,
            capacity_factor=capacity_factor,
        )


def flowmoe_problem(spec: LayerSpec, cluster: str) -> LayerProblem:
    """Return a problem with one expert per device and a flat all-to-all.

    The cluster's file says what its rates assume.
    """
    file = find_cluster(cluster)
    return LayerProblem(
        shape=_shape(spec.stack, 1),
        workload=spec.workload(file, shards=1),
        cluster=ProfiledCluster.build(file),
    )


def simulated_s(problem: Problem, choice: Decision) -> float:
    """Return the simulated seconds of an iteration."""
    return problem.simulate(choice, problem.plan(choice)).iteration_s
