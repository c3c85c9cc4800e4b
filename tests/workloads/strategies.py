"""Sizes, configurations and workloads that tests of routing share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from penstock.cost import ClusterConfig, Workload, routing_sizes
from penstock.step import StepShape
from penstock.workloads import RecordedModel, Recording, Routing, RoutingConfig, RoutingSizes, routing_of
from penstock.workloads.catalogue import GENERATED, READ_BY
from penstock.workloads.recorded import RecordedRouting
from tests.steps import shapes

CLUSTER = ClusterConfig(
    flops_per_s=1e9, memory_bytes_per_s=1e8, link_latency_s=1e-3, link_bytes_per_s=1e7, task_overhead_s=1e-2
)


@st.composite
def sizes(draw: st.DrawFn) -> RoutingSizes:
    """Small batches; also one expert, all experts for every token, and a token per sample."""
    experts = draw(st.integers(1, 9))
    holders = [n for n in range(1, experts + 1) if experts % n == 0]
    return RoutingSizes(
        groups=draw(st.integers(1, 4)),
        samples=draw(st.integers(1, 4)),
        seq_len=draw(st.integers(1, 40)),
        moe_layers=draw(st.integers(1, 3)),
        num_experts=experts,
        top_k=draw(st.integers(1, experts)),
        holders=draw(st.sampled_from(holders)),
    )


SETTINGS = {
    "zipf_exponent": st.sampled_from([0.0, 0.7, 3.0, 10.0]),
    "gini": st.sampled_from([0.0, 0.3, 0.99]),
    "dirichlet_concentration": st.sampled_from([1e-3, 0.05, 1.0, 1e6]),
    "hot_share": st.sampled_from([0.01, 0.5, 0.999]),
    "period": st.integers(4, 9),
    "burst_steps": st.integers(1, 4),
    "drift": st.sampled_from([0.0, 0.01, 0.37, 1.0]),
    "change_at": st.sampled_from([None, 1, 5]),
}


@st.composite
def generated(draw: st.DrawFn) -> RoutingConfig:
    """Any workload that is generated, with any of the settings that it reads."""
    name = draw(st.sampled_from(list(GENERATED)))
    settings = {key: draw(SETTINGS[key]) for key in READ_BY[name]}  # type: ignore[index]  # one of the literals
    return RoutingConfig(routing=name, seed=draw(st.integers(0, 2**32)), **settings)  # type: ignore[arg-type]


@st.composite
def recordings(draw: st.DrawFn, of: RoutingSizes, *, steps: int = 3) -> Recording:
    """What a run with another batch may have left: loads of a model of these sizes."""
    other = RoutingSizes(
        groups=draw(st.integers(1, 3)),
        samples=draw(st.integers(1, 3)),
        seq_len=draw(st.integers(1, 50)),
        moe_layers=of.moe_layers,
        num_experts=of.num_experts,
        top_k=of.top_k,
    )
    routing = routing_of(draw(generated()), other)
    counts = [routing.counts(step) for step in range(draw(st.integers(1, steps)))]
    found = recording_of(of, [each.sum(axis=(0, 1)).tolist() for each in counts])
    if not draw(st.booleans()):
        return found
    return replace(found, samples=tuple(each.reshape(-1, *each.shape[2:]) for each in counts))


def recording_of(of: RoutingSizes, loads: list[list[list[int]]]) -> Recording:
    """Without samples. loads: [steps][MoE layers][experts]."""
    model = RecordedModel(moe_layers=of.moe_layers, num_experts=of.num_experts, top_k=of.top_k)
    steps = tuple(range(1, len(loads) + 1))
    return Recording(model, steps, np.array(loads, dtype=np.int64), (None,) * len(steps))


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Any routing of any small batch."""
    return draw(routings_of(draw(sizes())))


@st.composite
def routings_of(draw: st.DrawFn, batch: RoutingSizes) -> Routing:
    """Any routing of this batch, generated or recorded."""
    if draw(st.booleans()):
        return RecordedRouting(batch, draw(recordings(batch)))
    return routing_of(draw(generated()), batch)


@st.composite
def steps(draw: st.DrawFn, *, capacity: bool | None = None) -> tuple[StepShape, Workload, Routing]:
    """A step's shape, its sizes, and routing of its batch. capacity: with a capacity_factor, or either."""
    shape = draw(shapes(plain=True).filter(lambda shape: any(shape.moe_layers)))
    ep_size, local = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    experts = ep_size * local
    limited = draw(st.booleans()) if capacity is None else capacity
    work = Workload(
        batch=draw(st.integers(shape.microbatches, shape.microbatches + 3)),
        seq_len=draw(st.integers(1, 9)),
        hidden_size=8,
        ffn_hidden_size=12,
        vocab_size=50,
        num_experts=experts,
        top_k=draw(st.integers(1, min(experts, 3))),
        expert_matrices=3,
        capacity_factor=1.1 if limited else None,
        min_capacity=2,
        world_size=4,
        ep_size=ep_size,
        element_bytes=4,
        all_reduce_bytes=tuple(400 * chunks for chunks in shape.pieces["replicated"]),
        expert_all_reduce_bytes=tuple(400 * chunks for chunks in shape.pieces["experts"]),
    )
    batch = routing_sizes(work, sum(shape.moe_layers))
    return shape, work, draw(routings_of(batch))
