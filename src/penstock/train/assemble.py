"""Builds the model of a configuration, which runs by a schedule on this rank, if it fits into memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from penstock.config import ConfigError
from penstock.cost import Attention, HeldBytes, StepCost, Workload
from penstock.decision import Decision, GradientBytes, PlacementConfig
from penstock.device import device_of
from penstock.features.dispatch import DISPATCHES
from penstock.features.expert_replicas.planners import PLANNERS
from penstock.features.expert_replicas.prices import expert_costs, splits_exactly
from penstock.models import ModelConfig, MoEDecoder
from penstock.models.decoder import MakeLayer, TensorShard, on_meta
from penstock.moe import MoEConfig
from penstock.moe.build import dispatch_of
from penstock.moe.experts import ExpertShard
from penstock.ops.work import FLOAT32_BYTES
from penstock.plan.problem import replica_slack
from penstock.routing.sizes import split_sizes
from penstock.runtime import Machinery, PipelinedStack, ShardedAdamW
from penstock.runtime.features.expert_replicas.manager import ExpertMoving
from penstock.runtime.features.sample_placement import NetMoE, SampleMoving
from penstock.runtime.gradients import sizes_bytes
from penstock.runtime.groups import build_transports
from penstock.runtime.machinery import build_lanes
from penstock.runtime.parts import ModelParts, shape_of, sharing_of
from penstock.schedule import StepPlan, plan_step
from penstock.step import StepShape
from penstock.step.shape import Updating
from penstock.topology import Control, Layout, ParallelConfig
from penstock.topology.groups import TransportName
from penstock.topology.local import STAGED, memory_limit, nothing_to_stage
from penstock.train.config import Precision, RunConfig
from penstock.train.optimizer import MOMENTS, OptimizerConfig, build_adamw, groups_of, initialise_state
from penstock.words import gib

Stack = TypeVar("Stack", bound=PipelinedStack)


def build_machinery(
    layout: Layout, device: torch.device, parallel: ParallelConfig, precision: Precision
) -> Machinery:
    """Build transport, lanes and groups for this rank. Every rank must call it at the same point.

    Raises:
        CommunicationError: If another rank does not call it.
        ConfigError: If ranks cannot exchange tensors by `parallel.transport`.
    """
    control = Control(layout.rank, layout.world_size)
    check_devices(device, control, parallel.transport)
    with control.naming("connecting the ranks of every group"):
        transports = build_transports(layout, device, parallel)
    rounds = _meant(precision, device) == "bfloat16"
    return Machinery(
        lanes=build_lanes(device, transports.abort, alone=layout.world_size == 1),
        transports=transports,
        layout=layout,
        control=control,
        device=device,
        autocast_dtype=torch.bfloat16 if rounds else None,
    )


def check_devices(device: torch.device, control: Control, transport: TransportName) -> None:
    """Raise ConfigError, on all ranks, if two of them compute on one GPU: NCCL refuses it without a reason.

    Tensors that are staged in the host's memory may share a GPU, but must be on one, and on all ranks so.
    """
    everyone = control.gather((transport, device_of(device).identity(device)), "comparing GPUs")
    for rank, (other, _) in enumerate(everyone):
        if other != everyone[0][0]:
            why = f"is so on rank 0, and on rank {rank} it is {other}, which exchanges in another way"
            raise ConfigError("parallel.transport", everyone[0][0], why, "Give all ranks the same.")
    if transport == "staged":
        if not device_of(device).is_gpu:
            raise nothing_to_stage(f"ranks compute on {device.type}")
        return
    ranks: dict[str, int] = {}
    for rank, (_, identity) in enumerate(everyone):
        if identity and ranks.setdefault(identity, rank) != rank:
            raise ConfigError(
                "parallel.processes",
                control.world_size,
                f"ranks {ranks[identity]} and {rank} would share a GPU, and NCCL takes one process for each",
                'Start one for each GPU ("cuda" is the first one in every process, until a program calls '
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))), let ranks share a GPU with '
                f"{STAGED}, or hide GPUs (CUDA_VISIBLE_DEVICES=) to compute on processors.",
            )


def build_stack(
    config: RunConfig,
    machinery: Machinery,
    dtype: torch.dtype = torch.float32,
    make_moe: MakeLayer | None = None,
    plan: StepPlan | None = None,
    moving: ExpertMoving | None = None,
    *,
    begins: bool = False,
) -> PipelinedStack:
    """Build the model of `config` on this rank, initialised from its seed, with its first plan.

    Args:
        dtype: Type of the parameters.
        make_moe: Makes MoE layers that `config.moe` cannot describe.
        plan: The first plan; None = the one that section [schedule] describes.
        moving: How replicas are planned where experts move; None = with the costs of section [cluster].
        begins: Whether the model begins with the weights in `model.config`, if it has any; else with random
            ones.
    """
    layout = machinery.layout
    model = model_of(config.model, config.moe, layout, make_moe)
    model.to(device=machinery.device, dtype=dtype)
    model.initialise(config.train.seed)
    if begins:
        from penstock.train.checkpoint import begin_with  # reads checkpoints, which takes a second to load

        with machinery.control.waiting(*config.parallel.at_checkpoints):
            begin_with(model, config.model.config, machinery.control)
    samples = SampleMoving(NetMoE(config.placement.solver), config.placement.prediction)
    return stack_of_run(
        PipelinedStack, model, model, config.moe, config, machinery, plan=plan, moving=moving, samples=samples
    )


def stack_of_run(
    kind: type[Stack],
    model: nn.Module,
    parts: ModelParts,
    moe: MoEConfig,
    config: RunConfig,
    machinery: Machinery,
    *,
    plan: StepPlan | None,
    moving: ExpertMoving | None,
    samples: SampleMoving,
) -> Stack:
    """Return the stack of a run's model, as the run's sections say.

    Args:
        kind: The class of the stack.
        plan, moving: As for `build_stack`.
        samples: How the stack moves samples.
    """
    layout = machinery.layout
    if moving is None and (choice := _given(config)).experts != "none":  # planned with assumed costs
        cost = StepCost(base_shape(config, layout), workload(config, layout), config.cluster)
        moving = expert_moving(config.placement, choice, cost)
    return kind(
        model,
        parts,
        moe,
        machinery,
        partial(first_plan, config, layout) if plan is None else lambda *_: plan,
        seed=config.train.seed,
        sample_moving=samples,
        gathers_loads=base_shape(config, layout).gathers_loads,
        updating=updating_of(config.optimizer, layout),
        moving=moving,
    )


def expert_moving(
    placement: PlacementConfig, choice: Decision, cost: StepCost, plan: StepPlan | None = None
) -> ExpertMoving | None:
    """Return how the replicas of the next step are planned; None where experts stay.

    Args:
        cost: The cost of a step, cut in any way.
        plan: The plan whose order tells how much of the replicas' transfer is hidden; None = Eq 8 tells it.
    """
    if choice.experts == "none":
        return None
    planner, exact = PLANNERS[choice.experts], splits_exactly(choice, cost.workload)
    slack = () if plan is None else replica_slack(plan, cost, cost.workload.mesh)
    costs, every = expert_costs(cost.workload, cost.cluster), placement.every
    return ExpertMoving(planner=planner, costs=costs, slack=slack, every=every, exact=exact)


def _given(config: RunConfig) -> Decision:
    """Return what the sections of a run decide."""
    return config.schedule.decision(dispatch_of(config.moe), config.placement, config.plan.given_recompute)


def model_of(
    model: ModelConfig, moe: MoEConfig, layout: Layout, make_moe: MakeLayer | None = None
) -> MoEDecoder:
    """Return a rank's part of the model, not initialised.

    Args:
        make_moe: Makes MoE layers that `moe` cannot describe.
    """
    return MoEDecoder(
        model,
        moe,
        ep_size=layout.ep_size,
        ep_rank=layout.ep_rank,
        node_size=layout.ep_node_size,
        make_moe=make_moe,
        shard=TensorShard(layout.tp_rank, layout.tp_size),
        expert_shard=ExpertShard(layout.etp_rank, layout.etp_size),
    )


def first_plan(config: RunConfig, layout: Layout, shape: StepShape, gradients: GradientBytes) -> StepPlan:
    """Return the plan made from section [cluster], before anything has been measured.

    Args:
        shape: The uncut shape of a step.
        gradients: Bytes of the layers' reduced gradients.
    """
    sizes = workload(config, layout, gradients)
    return plan_step(_given(config), shape, gradients, lambda cut: StepCost(cut, sizes, config.cluster))


def workload(config: RunConfig, layout: Layout, gradients: GradientBytes | None = None) -> Workload:
    """Return the sizes of a step on one rank, for the cost model.

    Args:
        gradients: Bytes of the layers' reduced gradients; None = computed from the model.
    """
    model, moe = config.model, config.moe
    if gradients is None:
        gradients = gradient_bytes(model, moe, layout, sharded=config.optimizer.is_sharded)
    held: HeldBytes | None = None
    attention: Attention | None = None  # None: that of the decoder
    if model.config is not None and model.of_transformers:  # sizes alone do not tell what a rank holds
        from penstock.families.sections import described_in  # transformers takes seconds to load

        every = gradient_bytes(model, moe, layout, sharded=True)
        experts = sum(every.experts)
        weights = sum(every.replicated) + sum(every.partial) + experts
        held = HeldBytes(weights=weights, trained_experts=experts, cast=True)
        attention = described_in(model.config).sizes.attention
    element_bytes = 2 if config.train.precision == "bfloat16" else 4
    return Workload(
        batch=config.data.batch_per_device,
        ffn_hidden_size=moe.moe_ffn_hidden_size,
        dense_ffn_hidden_size=model.dense_hidden_size,
        capacity_factor=moe.slots_factor,
        element_bytes=element_bytes,
        wire_row_bytes=moe.row_bytes(model.hidden_size, element_bytes),
        all_reduce_bytes=gradients.replicated,
        expert_all_reduce_bytes=gradients.experts,
        partial_all_reduce_bytes=gradients.partial,
        partial_by_form=gradients.partial_by_form,
        dispatch=dispatch_of(moe),
        node_size=layout.ep_node_size,
        devices_per_node=layout.node_size,
        held=held,
        attention=attention,
        tied_embeddings=model.tie_word_embeddings,
        **_named(layout, "world_size", "ep_size", "tp_size", "etp_size"),
        **_named(model, "seq_len", "hidden_size", "vocab_size", "attention_size", "key_value_size"),
        **_named(moe, "num_experts", "top_k", "expert_matrices", "expert_groups", "min_capacity"),
        **_named(moe, "slots_per_sample", "one_copy_per_rank", "shared_ffn_hidden_size"),
    )


def _named(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def base_shape(config: RunConfig, layout: Layout) -> StepShape:
    """Return the uncut shape of a step, before a system transforms it."""
    moe_layers = config.model.has_experts
    # Rows carry the residual stream where they are as exact, and are added to it unchanged.
    exact = config.train.precision != "bfloat16" and config.moe.comm_dtype is None
    return StepShape(
        moe_layers=moe_layers,
        exchange_counts=config.moe.exchanges_counts,
        dispatch=DISPATCHES[dispatch_of(config.moe)].hops,
        shared_experts=config.moe.shared_ffn_hidden_size > 0,
        sharing=sharing_of(layout, config.moe.aux_loss_group),
        gathers_loads=config.output.loads and any(moe_layers),
        updating=updating_of(config.optimizer, layout),
        carries_residual=exact and config.model.dropout == 0 and not config.model.of_transformers,
    )


def updating_of(config: OptimizerConfig, layout: Layout) -> Updating | None:
    """Return how steps themselves update parameters; None where the optimiser updates them between steps."""
    if not config.is_sharded:
        return None
    return Updating(
        clips=config.clip_grad_norm is not None,
        edp=layout.edp_size > 1,
        releases=config.releases,
    )


def build_optimizer(stack: PipelinedStack, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters of a stack built for it: whole, or a share on every rank."""
    named = list(stack.model.named_parameters())
    if not config.is_sharded:
        optimizer = build_adamw(named, config)
        initialise_state(optimizer)
        return optimizer
    return ShardedAdamW(
        stack,
        groups_of(named, config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        max_norm=config.clip_grad_norm,
    )


def gradient_bytes(
    model: ModelConfig, moe: MoEConfig, layout: Layout, *, sharded: bool = False
) -> GradientBytes:
    """Return the bytes of every layer's reduced gradients, by kind.

    They are read from the real model, built without memory for its weights, and with few of the layers that
    are alike.

    Args:
        sharded: Whether to return the bytes of all gradients that are updated, reduced or not.
    """
    edp, sharing = sharded or layout.edp_size > 1, sharing_of(layout, moe.aux_loss_group)
    if model.config is not None and model.of_transformers:
        from penstock.families.sections import gradient_bytes_of  # transformers takes seconds to load

        shape = StepShape(moe_layers=model.has_experts, sharing=sharing)
        return gradient_bytes_of(model.config, layout, shape, edp=edp)
    # The last layers that are alike, but for the very last one, are counted by one of them.
    is_moe, last = model.has_experts, model.num_layers - 1
    first = next(i for i in range(last, -1, -1) if i == 0 or is_moe[i - 1] is not is_moe[last])
    count = min(max(first, 1) + 2, model.num_layers)
    experts_in = model.moe_layers and tuple(layer for layer in model.moe_layers if layer < count)
    few = replace(model, num_layers=count, moe_layers=experts_in)
    with on_meta():
        parts = model_of(few, moe, layout)
    shape = shape_of([part.moe for part in parts.parts], sharing)
    few_bytes, more = sizes_bytes(parts, parts, shape, edp=edp), model.num_layers - few.num_layers

    def spread(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (*sizes[:-1], *sizes[-2:-1] * more, *sizes[-1:])

    return GradientBytes(
        spread(few_bytes.replicated),
        spread(few_bytes.experts),
        spread(few_bytes.partial),
        tuple((form, spread(sizes)) for form, sizes in few_bytes.partial_by_form),
        few_bytes.expert,
    )


def on_device(config: RunConfig, device: torch.device) -> RunConfig:
    """Return the run with the precision that `auto` means on `device`, for planning and computing alike."""
    return config.computing_in(_meant("auto", device))


def _meant(precision: Precision, device: torch.device) -> Precision:
    """Return the precision that a setting means on a device."""
    if precision != "auto":
        return precision
    return "bfloat16" if device_of(device).computes_in_bfloat16() else "float32"


COPIES = 4
"""Copies of a weight: itself, its gradient and AdamW's two moments, all in float32."""

KEPT_COPIES, KEPT_HEADS, KEPT_RECOMPUTED = 4, 3, 1
"""Least number of hidden states kept per token and block from forward to backward, and of numbers for each of
its heads' (of queries and of keys): all that attention saves; or the block's input alone where the block is
recomputed. See `plan.memory`, which also counts what norms keep that are not one kernel."""

SMALLEST_ELEMENT_BYTES = 2

RANK_BYTES = 160 << 20
"""Memory of a process with torch before there is a model. Measured: 190 MiB."""

SPARING = {
    0: ", or share moments (optimizer.zero_stage = 1)",
    MOMENTS: ", or share gradients (optimizer.zero_stage = 2)",
}
"""What else would help, by the number of copies that are shared already."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Least bytes that one rank needs, by the setting with which they grow.

    Attributes:
        vocabulary_bytes: Weights, gradients and optimizer state of embedding and output.
        layers_bytes: Those of the layers, without experts.
        experts_bytes: Those of the experts.
        activations_bytes: What a step keeps for its backward pass.
        masks_bytes: Masks of separate documents: attention keeps in every block which tokens of a sample see
            each other, one number for each pair of tokens.
    """

    vocabulary_bytes: int
    layers_bytes: int
    experts_bytes: int
    activations_bytes: int
    masks_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.activations_bytes + self.masks_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.vocabulary_bytes + self.layers_bytes + self.experts_bytes


def memory_of(config: RunConfig, layout: Layout) -> RankMemory:
    """Estimate the memory of one rank, without scratch memory; takes milliseconds for any size.

    Args:
        config: A `resolved` configuration.
    """
    model, moe, batch = config.model, config.moe, config.data.batch_per_device
    shared_copies = config.optimizer.shared_copies
    whole = COPIES - shared_copies
    copies, expert_copies = whole + shared_copies / layout.dp_size, whole + shared_copies / layout.edp_size
    held = gradient_bytes(model, moe, layout, sharded=True)
    matrices, row_bytes = 1 if model.tie_word_embeddings else 2, model.hidden_size * FLOAT32_BYTES
    ends = matrices * model.vocab_size * row_bytes // layout.tp_size
    tokens = min(split_sizes(model.seq_len, layout.tp_size)) if layout.tokens == "split" else model.seq_len
    heads = (model.attention_size + model.key_value_size) // layout.tp_size
    kept = KEPT_COPIES * model.hidden_size + KEPT_HEADS * heads
    recomputes = config.plan.may_repeat_blocks
    token_bytes = SMALLEST_ELEMENT_BYTES * (KEPT_RECOMPUTED * model.hidden_size if recomputes else kept)
    mask_bytes = batch * model.seq_len**2 * SMALLEST_ELEMENT_BYTES if config.data.separate_documents else 0
    return RankMemory(
        vocabulary_bytes=int(copies * ends),
        layers_bytes=int(copies * (sum(held.replicated) + sum(held.partial) - ends)),
        experts_bytes=int(expert_copies * sum(held.experts)),
        activations_bytes=model.num_layers * batch * tokens * token_bytes,
        masks_bytes=model.num_layers * mask_bytes,
    )


def check_run(config: RunConfig, layout: Layout, *, there_bytes: int, sharing: int = 1) -> None:
    """Raise ConfigError, naming the setting that takes most, if `sharing` ranks exceed `there_bytes`.

    Args:
        config: A `resolved` configuration.
        there_bytes: Memory of the device, or the machine, on which these ranks run.
        sharing: Number of ranks that share it.
    """
    need = memory_of(config, layout)
    if sharing * need.total_bytes <= there_bytes:
        return
    parts: dict[str, tuple[object, int]] = {
        "model.vocab_size": (config.model.vocab_size, need.vocabulary_bytes),
        "model.hidden_size": (config.model.hidden_size, need.layers_bytes),
        "moe.num_experts": (config.moe.num_experts, need.experts_bytes),
        "data.batch_per_device": (config.data.batch_per_device, need.activations_bytes),
        "data.separate_documents": (True, need.masks_bytes),
    }
    key = max(parts, key=lambda name: parts[name][1])
    ranks = "a rank needs" if sharing == 1 else f"each of {sharing} ranks needs"
    masks = f", masks of documents {gib(need.masks_bytes)}" if need.masks_bytes else ""
    why = (
        f"{ranks} {gib(need.total_bytes)} at the least (weights, gradients and optimizer state "
        f"{gib(need.state_bytes)}, activations {gib(need.activations_bytes)}{masks}), and there are "
        f"{gib(there_bytes)} in all"
    )
    spare = SPARING.get(config.optimizer.shared_copies, "")
    spare += "" if config.plan.may_repeat_blocks else ", or compute blocks again (plan.recompute=blocks)"
    hint = (
        "Masks grow with the square of model.seq_len: lower it or data.batch_per_device, or leave it out."
        if key == "data.separate_documents"
        else "Make the model or the batch smaller, or share it among more devices (parallel.tp_size, "
        f"ep_size, etp_size){spare}."
    )
    raise ConfigError(key, parts[key][0], why, hint)


def check_processes(processes: int) -> None:
    """Raise ConfigError for more local processes than this machine has memory for, even without a model."""
    most = max(1, host_bytes() // RANK_BYTES)
    if processes > most:
        why = f"each takes {RANK_BYTES >> 20} MiB before there is a model, and there are {gib(host_bytes())}"
        raise ConfigError("parallel.processes", processes, why, f"Use {most} or fewer.")


def host_bytes() -> int:
    """Return the memory of this machine, or of the container in which this process runs, in bytes."""
    machine, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()
    return machine if limit is None else min(machine, limit)


def device_bytes(device: torch.device, control: Control) -> int:
    """Return what this rank may have of the memory of its device, in bytes. All ranks call it together.

    Of a GPU that is what is free, or this rank's part of it; of a machine it is everything.
    """
    kind = device_of(device)
    everyone = control.gather(kind.identity(device), "counting ranks on every GPU")
    own = everyone[control.rank]
    own_bytes = kind.memory_bytes(device, everyone.count(own) if own else 1)
    return host_bytes() if own_bytes is None else own_bytes
