"""From a configuration to a model that runs by a schedule on this rank."""

from __future__ import annotations

from functools import partial

import torch

from penstock.cost import StepCost, Workload
from penstock.graph import StepShape
from penstock.models import GPT
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.lanes import Lanes, StreamLanes, ThreadLanes
from penstock.runtime.transport import GlooTransport, LocalTransport, NcclTransport, Transport
from penstock.schedule import StepPlan, plan_step
from penstock.topology import Control, Layout, ParallelConfig, lane_groups
from penstock.train.config import Precision, RunConfig


def build_machinery(
    layout: Layout, device: torch.device, parallel: ParallelConfig, precision: Precision
) -> Machinery:
    """Transport, lanes and groups for this rank. Every rank must call it at the same point."""
    transport = _transport(layout, device, parallel)
    lanes: Lanes = (
        StreamLanes(device, transport.abort) if device.type == "cuda" else ThreadLanes(transport.abort)
    )
    return Machinery(
        lanes=lanes,
        transport=transport,
        layout=layout,
        control=Control(layout.rank, layout.world_size),
        device=device,
        autocast_dtype=_autocast_dtype(device, precision),
    )


def build_stack(
    config: RunConfig, machinery: Machinery, dtype: torch.dtype = torch.float32
) -> PipelinedStack:
    """The model of `config` on this rank, initialised from its seed, with its first plan."""
    layout = machinery.layout
    model = GPT(config.model, config.moe, ep_size=layout.ep_size, ep_rank=layout.ep_rank)
    model.to(device=machinery.device, dtype=dtype)
    model.initialise(config.train.seed)
    make_plan = partial(first_plan, config, layout)
    return PipelinedStack(model, model, config.moe, machinery, make_plan, seed=config.train.seed)


def first_plan(
    config: RunConfig,
    layout: Layout,
    shape: StepShape,
    all_reduce_bytes: tuple[int, ...],
    expert_all_reduce_bytes: tuple[int, ...],
) -> StepPlan:
    """The plan from section [cluster], before anything has been measured."""
    sizes = workload(config, layout, all_reduce_bytes, expert_all_reduce_bytes)
    return plan_step(
        config.schedule.system,
        shape,
        config.schedule.pieces(all_reduce_bytes, expert_all_reduce_bytes),
        lambda cut: StepCost(cut, sizes, config.cluster),
    )


def workload(
    config: RunConfig, layout: Layout, all_reduce_bytes: tuple[int, ...], expert_bytes: tuple[int, ...]
) -> Workload:
    """The sizes of a step on one rank, for the cost model."""
    return Workload(
        batch=config.data.batch_per_device,
        seq_len=config.model.seq_len,
        hidden_size=config.model.hidden_size,
        ffn_hidden_size=config.moe.moe_ffn_hidden_size,
        vocab_size=config.model.vocab_size,
        num_experts=config.moe.num_experts,
        top_k=config.moe.top_k,
        expert_matrices=config.moe.expert_matrices,
        capacity_factor=config.moe.capacity_factor,
        min_capacity=config.moe.min_capacity,
        world_size=layout.world_size,
        ep_size=layout.ep_size,
        element_bytes=2 if config.train.precision == "bfloat16" else 4,
        all_reduce_bytes=all_reduce_bytes,
        expert_all_reduce_bytes=expert_bytes,
        dense_ffn_hidden_size=config.model.dense_hidden_size,
    )


def pick_device(local_rank: int) -> torch.device:
    """The GPU of this rank where there is one, the CPU elsewhere."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _transport(layout: Layout, device: torch.device, parallel: ParallelConfig) -> Transport:
    if layout.world_size == 1:
        return LocalTransport()
    make_groups = partial(lane_groups, layout, parallel.timeout_s)
    if device.type == "cuda":
        return NcclTransport(make_groups)
    return GlooTransport(make_groups, parallel.send_buffer_bytes)


def _autocast_dtype(device: torch.device, precision: Precision) -> torch.dtype | None:
    if precision == "bfloat16":
        return torch.bfloat16
    if precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return None
