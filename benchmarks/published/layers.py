"""The layers of the FSMoE and FlowMoE studies, as problems that a planner can be asked.

What the papers leave open is decided here: a problem is a stack of equal layers, so that gradients of a layer
can be reduced under the ones below: four of them on FSMoE's testbeds (of two, half of all gradients have no
layer below), two for FlowMoE. Embedding, head and the sums behind the
loss cost nothing, routing is even. Attention computes four projections and its scores; on FSMoE's testbeds
the ranks of a node share that and the dense gradients (4 M^2 + M E over N_MP), and copies cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from penstock.cost import AlphaBeta, ClusterFile, ProfiledCluster, Span, Workload
from penstock.cost.cluster_file import TaskModel
from penstock.cost.clusters import find_cluster
from penstock.decision import Decision
from penstock.graph import Phase
from penstock.ops import Op
from penstock.ops.transfers import FLAT, Hop
from penstock.plan import Problem
from penstock.plan.subject import SHARDED
from penstock.schedule import Cost
from penstock.step import StepShape

FLOAT_BYTES = 4
FSMOE_STACK, FLOWMOE_STACK = 4, 2
TOP_K = 2
ATTENTION_PRODUCTS = 6
"""Projections of q, k, v and the output; scores; values."""

NO_COPIES_BYTES_PER_S = 1e30


class LayerProblem(Problem):
    """Layers alone: no embedding, no head, no sums behind the loss."""

    def cost(self, choice: Decision, cut: StepShape) -> Cost:
        cost = super().cost(choice, cut)
        return lambda task: 0.0 if task.op in (Op.EMBED, Op.HEAD, Op.STATISTICS) else cost(task)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One configured layer, in a stack of so many.

    batch: samples of a group of shards, which is one device where nothing is sharded. heads: change no cost.
    """

    batch: int
    seq_len: int
    hidden_size: int
    ffn_hidden_size: int
    capacity_factor: float | None
    expert_matrices: int = 2
    heads: int = 8
    stack: int = FLOWMOE_STACK

    def workload(self, file: ClusterFile, *, shard_size: int) -> Workload:
        """One expert group in all, one expert per rank or group of shards."""
        groups = num_experts = file.ranks // shard_size
        dense = 4 * self.hidden_size**2 + self.hidden_size * num_experts
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
            world_size=groups,
            ep_size=groups,
            element_bytes=FLOAT_BYTES,
            all_reduce_bytes=(dense // shard_size * FLOAT_BYTES,) * self.stack,
            expert_all_reduce_bytes=(0,) * self.stack,
            devices_per_node=file.ranks_per_node,
            shard_size=shard_size,
        )


# ---- FSMoE -------------------------------------------------------------------------------------------------

FSMOE_SEQ_LENS = {"fsmoe-testbed-a": (512, 1024, 2048), "fsmoe-testbed-b": (256, 512, 1024)}


def fsmoe_layers(cluster: str) -> Iterator[LayerSpec]:
    """The 1,458 configured layers of one testbed; the number of heads changes no cost."""
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
    """On lanes `inter` and `intra`: all-to-all between nodes, all-gather and reduce-scatter inside."""
    file = find_cluster(cluster)
    tuned = replace(
        file,
        rates=replace(file.rates, memory_bytes_per_s=NO_COPIES_BYTES_PER_S),
        tasks=_compute_models(file.rates.task_overhead_s, spec.expert_matrices),
    )
    return LayerProblem(
        shape=_shape(spec.stack, SHARDED),
        workload=spec.workload(file, shard_size=file.ranks_per_node),
        cluster=ProfiledCluster.build(tuned),
    )


def one_lane(problem: LayerProblem) -> LayerProblem:
    """The same layer without overlap of traffic inside a node and between nodes: one lane carries both.

    A chunk's all-gather goes with its all-to-all, and so does its reduce-scatter: one transfer with the time
    of the two.
    """
    assert isinstance(problem.cluster, ProfiledCluster)
    built = ProfiledCluster.build(problem.cluster.file)
    shards = problem.workload.shard_size
    cluster = OneLaneCluster(**vars(built), shards_per_group=shards)
    return replace(problem, shape=_shape(problem.shape.num_layers, FLAT), cluster=cluster)


@dataclass(frozen=True, kw_only=True)
class OneLaneCluster(ProfiledCluster):
    """All-to-alls that take the time of the collective inside the node as well."""

    shards_per_group: int

    def leg(self, dispatch: str, op: str, span: Span) -> AlphaBeta:
        """Dispatch with the all-gather, combine with the reduce-scatter; on the way back it is the other way
        round, which changes no sum."""
        between = super().leg(dispatch, op, span)
        inside = self.shards(self.shards_per_group, scatters=op == Op.COMBINE)
        return AlphaBeta(
            alpha_s=between.alpha_s + inside.alpha_s,
            beta_s_per_byte=between.beta_s_per_byte + self.shards_per_group * inside.beta_s_per_byte,
        )


def _compute_models(product_s: float, expert_matrices: int) -> tuple[TaskModel, ...]:
    """Every matrix product starts up; a backward is twice a forward, start-ups included."""
    products = {Op.EXPERTS: expert_matrices, Op.ATTENTION: ATTENTION_PRODUCTS, Op.UNORDER: 0}
    scales = {Phase.FORWARD: 1.0, Phase.BACKWARD: 2.0, Phase.INPUT: 1.0, Phase.WEIGHT: 1.0}
    return tuple(
        TaskModel(op=op, phase=phase, alpha_s=scale * count * product_s, scale=scale)
        for op, count in products.items()
        for phase, scale in scales.items()
    )


def _shape(layers: int, dispatch: tuple[Hop, ...]) -> StepShape:
    return StepShape(moe_layers=(True,) * layers, exchange_counts=False, dispatch=dispatch)


# ---- FlowMoE -----------------------------------------------------------------------------------------------

FLOWMOE_SIZES = (512, 1024, 2048, 4096, 8192)


def flowmoe_layers() -> Iterator[LayerSpec]:
    """The 675 layers."""
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
    """One expert per device and a flat all-to-all; see the cluster's file for what its rates assume."""
    file = find_cluster(cluster)
    return LayerProblem(
        shape=_shape(spec.stack, FLAT),
        workload=spec.workload(file, shard_size=1),
        cluster=ProfiledCluster.build(file),
    )
