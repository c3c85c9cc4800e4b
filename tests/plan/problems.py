"""Problems that the tests of the planner share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from hypothesis import strategies as st

from penstock.cost import ClusterConfig, ClusterFile, Workload
from penstock.decision import Movable
from penstock.features.dispatch import DISPATCHES
from penstock.plan import Problem
from penstock.plan.optimizers import sharing_updates
from penstock.step import Sharing, StepShape
from penstock.step.shape import Recompute, TokenLayout

FILE = ClusterFile(
    name="two-nodes",
    nodes=2,
    ranks_per_node=2,
    rates=ClusterConfig(flops_per_s=1e12, link_bytes_per_s=2e8, task_overhead_s=2e-5),
    memory_bytes=8 << 30,
)


def problem(
    moe_layers: tuple[bool, ...] = (True, True),
    *,
    batch: int = 4,
    cluster: ClusterConfig | None = None,
    dispatches: tuple[str, ...] = ("flat",),
    all_reduce_bytes: int = 1 << 20,
    ranks: int = 4,
    slowness: tuple[float, ...] = (),
) -> Problem:
    """Four ranks on two nodes, a slow link."""
    layers = len(moe_layers)
    work = Workload(
        batch=batch,
        seq_len=64,
        hidden_size=128,
        ffn_hidden_size=256,
        vocab_size=64,
        num_experts=4,
        top_k=2,
        expert_matrices=2,
        capacity_factor=None,
        min_capacity=1,
        world_size=ranks,
        ep_size=4,
        element_bytes=4,
        all_reduce_bytes=(all_reduce_bytes,) * layers,
        expert_all_reduce_bytes=(0 if ranks == 4 else 1 << 18,) * layers,
        dense_ffn_hidden_size=256,
        node_size=2,
    )
    return Problem(
        shape=StepShape(moe_layers=moe_layers),
        workload=work,
        cluster=cluster or ClusterConfig(flops_per_s=2e10, link_bytes_per_s=2e8, task_overhead_s=2e-5),
        dispatches=dispatches,
        slowness=slowness,
    )


Shared = Callable[[Problem], Problem]


@st.composite
def shared(draw: st.DrawFn) -> Shared:
    """The same step on two or four times the ranks, which share attention, experts or both."""
    tp_size, etp_size = draw(st.sampled_from(((2, 2), (2, 1), (1, 2), (4, 2), (2, 4))))
    tokens: TokenLayout = draw(st.sampled_from(("split", "replicated")))
    return lambda each: with_sharing(each, tp_size, etp_size, tokens)


def with_sharing(each: Problem, tp_size: int, etp_size: int, tokens: TokenLayout = "split") -> Problem:
    """The same step on nodes with `max(tp_size, etp_size)` times the ranks."""
    work, size = each.workload, max(tp_size, etp_size)
    shape = replace(
        each.shape,
        moe_layers=each.shape.moe_layers,
        sharing=Sharing(tp_size=tp_size, etp_size=etp_size, tokens=tokens),
        pieces={},
    )
    work = replace(
        work,
        world_size=work.world_size * size,
        tp_size=tp_size,
        etp_size=etp_size,
        devices_per_node=work.ranks_per_node * size,
        node_size=work.ranks_per_node * size // etp_size if size == etp_size else 0,
        partial_all_reduce_bytes=(1 << 16 if tp_size > 1 else 0,) * len(each.shape.moe_layers),
    )
    return replace(each, shape=shape, workload=work, dispatches=("flat",), slowness=())


@st.composite
def problems(draw: st.DrawFn, *, layers: int = 2) -> Problem:
    """One or two layers on machines of very different speeds."""

    def rate(low: int, high: int) -> float:
        return float(10 ** draw(st.floats(low, high)))

    cluster = ClusterConfig(
        flops_per_s=rate(9, 12),
        memory_bytes_per_s=rate(9, 11),
        link_latency_s=rate(-6, -3),
        link_bytes_per_s=rate(7, 10),
        task_overhead_s=rate(-6, -4),
    )
    return problem(
        tuple(draw(st.lists(st.booleans(), min_size=1, max_size=layers))),
        batch=draw(st.sampled_from((1, 2, 3))),
        cluster=cluster,
        dispatches=draw(st.sampled_from((("flat",), tuple(DISPATCHES)))),
        all_reduce_bytes=draw(st.sampled_from((0, 1 << 18, 1 << 20))),
        ranks=draw(st.sampled_from((4, 8))),
    )


NOTHING_MOVES, SAMPLES_MOVE = ("none",), ("none", "netmoe")
EXPERTS_MOVE = ("none", "planned", "pro_prophet")


@st.composite
def every_kind(draw: st.DrawFn) -> Problem:
    """Steps of every kind: with sharing, moves, recomputation, rounded rows, updates, loads, slow ranks."""
    each, maybe = draw(problems(layers=4)), st.booleans()
    if draw(maybe):
        each = draw(shared())(each)
    if draw(maybe):
        each = replace(each, workload=replace(each.workload, shared_ffn_hidden_size=64))
    shape = replace(
        each.shape,
        gathers_loads=draw(maybe),
        shared_experts=each.workload.shared_ffn_hidden_size > 0,
        carries_residual=draw(maybe),
    )
    each = replace(
        each,
        shape=shape,
        movable=Movable(
            samples=draw(st.sampled_from((NOTHING_MOVES, SAMPLES_MOVE, ("netmoe",)))),
            experts=draw(st.sampled_from((NOTHING_MOVES, EXPERTS_MOVE, ("planned",)))),
            replica_slots=draw(st.sampled_from(((1,), (1, 3)))),
        ),
        recompute=draw(st.sampled_from((("none",), get_args(Recompute)))),
        comm_dtypes=draw(st.sampled_from((("none",), ("none", "int8")))),
    )
    if draw(maybe):
        each = sharing_updates(each, releases=draw(maybe))
    if draw(maybe):
        ranks = each.workload.world_size
        each = replace(each, slowness=tuple(draw(st.floats(1, 4)) for _ in range(ranks)))
    return each
