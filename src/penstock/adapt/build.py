"""`penstock.parallelize`: a model of transformers whose training steps run by a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.adapt.cut import Cut, CutGate
from penstock.adapt.decoder import Calls, CutLayer, Decoder, Layers, WholeLayer
from penstock.adapt.engine import Engine
from penstock.adapt.guess import EpPlan, brought_by, check, check_ep_plan, check_spread, coefficient_of, guess
from penstock.adapt.passes import Passes
from penstock.adapt.planning import choice_of, moving_of, planner_of
from penstock.adapt.scheduled import engine_of, is_wrapped_by_peft, saved_together, schedule
from penstock.adapt.shared import SharedCutLayer, SharedDenseLayer
from penstock.adapt.spread import JoinAdapters, NarrowSpread, Spread, TakeAdapters
from penstock.adapt.tensor import TensorShares, check_can_narrow, check_can_share
from penstock.decision import Decision
from penstock.dtensors import spread_states
from penstock.families.adapters import core_of
from penstock.families.experts import ModelExperts, sharding_of_experts
from penstock.families.family import Family
from penstock.families.inspection import Found, look
from penstock.families.known import family_inside, family_of
from penstock.features.dispatch import find_dispatch
from penstock.graph import Lane
from penstock.mesh import Group
from penstock.moe import MoELayer
from penstock.moe.build import build_hooks, build_permutation
from penstock.moe.experts import ExpertShard
from penstock.moe.permute.sort import SortPermutation
from penstock.placement import ExpertPlacement
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.clip import follow_torch
from penstock.runtime.features.expert_replicas.handlers import ExpertReplicas
from penstock.sharding import Sharding
from penstock.step.shape import Updating
from penstock.topology import (
    Control,
    Layout,
    ParallelConfig,
    find_node_size,
)
from penstock.topology.device_mesh import GroupSizes, Meshes, sizes_of
from penstock.topology.groups import TransportName
from penstock.topology.join import joined
from penstock.train.assemble import build_machinery

ALONE = Layout(world_size=1, ep_size=1, rank=0)


def parallelize(
    model: Any,
    *,
    ep_size: int | None = None,
    plan: str | Decision = "auto",
    tp_size: int | None = None,
    etp_size: int | None = None,
    mesh: Meshes | None = None,
    ep_plan: EpPlan | None = None,
    ranks_per_node: int | None = None,
    timeout_s: float = 60.0,
    transport: TransportName = "direct",
    bound_factor: float | None = None,
    updating: Updating | None = None,
    gradient_reduction: Literal["mean", "sum"] = "mean",
) -> Any:
    """Spread the experts of `model` over ranks, and let a schedule run its training steps.

    Returns the model, in training mode. model: a causal language model of transformers 5, whole and equal on
    every rank; one of an unknown family is taken if it can be cut into pieces that compute the same; or a
    model of peft around one. It keeps its class, its modules and the names of its parameters; of the experts
    it keeps this rank's share. All ranks call this function, and later every forward pass, together; each has
    samples of its own. In training mode `model(input_ids=..., labels=...)` gives the loss of the batch of all
    ranks, and its `backward` every gradient, summed over ranks: DistributedDataParallel is not needed, and
    refused. Everything else works as before: logits in evaluation (`model.eval()`), `generate`,
    `save_pretrained`, which all ranks call together. ep_size: over how many ranks experts are spread; None =
    all, after `etp_size`. tp_size: how many ranks share attention, dense layers and vocabulary, and are given
    the same samples; of some families (docs/features.md). etp_size: how many ranks share every expert, each a
    part of its width; None = 1. mesh: says these sizes in their place: a DeviceMesh of all ranks with names
    as ("dp", "ep"), several, or groups by name (docs/parallelism.md); `model.device_mesh` has all dimensions
    of the layout. plan: "auto" measures the cluster at the first step and searches; else the name of a
    schedule, or a decision. ep_plan: which modules hold experts, as transformers says; None = as its family
    or configuration says. ranks_per_node, timeout_s, transport: see ParallelConfig; bound_factor: see
    MoEConfig. updating: steps sum gradients in shares, for a `ShardedAdamW` of `penstock.adapt.stack_of`;
    None: any optimiser updates parameters. Joins processes that torchrun or Slurm has started, once. Raises
    ValueError for a model that cannot be scheduled, ConfigError for sizes and plans that do not fit; it is
    unchanged then.
    """
    inner = model.get_base_model() if is_wrapped_by_peft(model) else model
    if "_penstock" in inner.__dict__:
        raise ValueError("the model is scheduled already: parallelize it once")
    found = replace(_found(inner, ep_plan), bound_factor=bound_factor, choice=choice_of(plan))
    device = next(inner.parameters()).device
    settings = ParallelConfig(ranks_per_node=ranks_per_node, timeout_s=timeout_s, transport=transport)
    sizes = GroupSizes(ep_size=ep_size, tp_size=tp_size, etp_size=etp_size)
    parallel = shared_as(settings, sizes, mesh, found, device)
    with machinery_for(parallel, found.num_experts, device) as machinery:
        shares, tensor = found.shares(machinery.layout), TensorShares.of(found, machinery.layout)
        undone = (shares,) if tensor is None else (shares, tensor)
        try:
            scheduled(found, machinery, parallel, plan, tensor, updating)
        except BaseException:
            for each in undone:
                each.undo()
            raise
    for each in undone:
        each.settle()
    engine_of(inner).averages_own = gradient_reduction == "mean"
    made = model if inner is model else saved_together(model)
    return made.train()  # from_pretrained leaves it in evaluation mode, which runs no step


def scheduled(
    found: Found,
    machinery: Machinery,
    parallel: ParallelConfig,
    plan: str | Decision,
    tensor: TensorShares | None = None,
    updating: Updating | None = None,
) -> Any:
    """Let a schedule run the training steps of a model that has its share of experts; returns the model.

    tensor: its part of attention, where ranks share that. updating: see `parallelize`.
    """
    layout = machinery.layout
    planner = planner_of(plan, found.sizes, layout, parallel)
    with pieces_of(found, layout, tensor) as pieces:
        decoder = pieces.decoder
        stack = PipelinedStack(found.model, decoder, found.moe, machinery, planner.first, updating=updating)
        stack.timed = False  # nothing reads when tasks ran
        stack.of(ExpertReplicas).manager.moving = moving_of(found.choice, found.sizes, stack)
        if layout.ep_size * layout.etp_size > 1:
            machinery.transports.open([(Lane.INTER, Group.EXPERT), (Lane.INTER, Group.SHARDS)])
        if tensor is not None:
            tensor.ranks.open(machinery)
    stack.mark_experts()
    spread_parts(pieces, machinery)
    passes = Passes(machinery.control, stack.turns)
    for layer, cut in pieces.cuts.items():
        moe = decoder.parts[layer].moe
        assert moe is not None, "it is cut where it has experts"
        if layout.ep_size * layout.etp_size > 1:
            width = found.family.form.entering(core_of(cut.experts))
            spread = Spread if layout.etp_size == 1 else NarrowSpread
            cut.spread = spread(
                machinery,
                MoELayer(
                    gate=moe.gate,
                    permutation=SortPermutation(moe.num_experts),
                    expert=moe.experts,
                    ep_size=moe.ep_size,
                    ep_rank=moe.ep_rank,
                    placement=moe.placement,
                ),
                passes,
                width,
            )
        if layout.ep_size > 1:
            cut.block.register_state_dict_post_hook(JoinAdapters(cut, machinery))
            cut.block.register_load_state_dict_pre_hook(TakeAdapters(cut, machinery))
    model, engine = found.model, Engine(stack, decoder, planner, passes)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        model.gradient_checkpointing_disable()  # on its own a layer would recompute its transfers
        engine.recompute("blocks")
    follow_torch()
    schedule(model, engine)
    engine.watch_outside()
    return model


def _found(model: Any, ep_plan: EpPlan | None) -> Found:
    """Return the parts of a model; of an unknown family or with changed code, if they compute the same."""
    if ep_plan is not None:
        check_ep_plan(ep_plan)
    family = family_of(model)
    described = family or family_inside(model)
    if described is None:
        return _checked(look(model, guess(model, ep_plan or brought_by(model))))
    found = look(model, described)
    if ep_plan is not None:
        check_spread(ep_plan, model, found.experts)
    changed = found.changed_code()
    return _checked(found, changed) if changed or family is None else found


def _checked(found: Found, changed: Sequence[str] = ()) -> Found:
    """Return the parts of a model if they compute what it does whole, see `check`."""
    model = found.model
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__}: its family is not known, or its code is not that of transformers, and "
            "pieces of such a model are compared with the whole by their logits over a vocabulary, for which "
            "get_output_embeddings() has no weights. Use a family in penstock.adapt.FAMILIES"
        )
    cuts, calls = _cuts(found), Calls()
    layers = _layers(found, cuts, calls)
    try:
        decoder = Decoder(model, found.family, layers, calls, type(model).forward)
        check(model, decoder, changed)
        family = replace(found.family, coefficient=coefficient_of(model, decoder))
    finally:
        _undo(cuts)
    return replace(found, family=family)


def shared_as(
    settings: ParallelConfig, sizes: GroupSizes, mesh: Meshes | None, found: Found, device: torch.device
) -> ParallelConfig:
    """Return the settings with the sizes of groups that share a model, as they or a mesh say.

    All ranks call it. Raises ConfigError for sizes by which the model cannot be shared.
    """
    if mesh is not None:
        info = joined(settings.timeout_s, device, settings.transport)
        sizes = sizes_of(mesh, sizes, Control(info.rank, info.world_size), device.type)
    tp_size, etp_size = (1 if each is None else each for each in (sizes.tp_size, sizes.etp_size))
    if tp_size > 1:
        check_can_share(found, tp_size)
    check_can_narrow(found, etp_size)
    return replace(settings, ep_size=sizes.ep_size, tp_size=tp_size, etp_size=etp_size)


@contextmanager
def machinery_for(parallel: ParallelConfig, num_experts: int, device: torch.device) -> Iterator[Machinery]:
    """Join the ranks that a launcher started, and yield what runs steps on them.

    All ranks enter this context.
    The machinery is closed where the work inside fails.
    """
    info, node_size = joined(parallel.timeout_s, device, parallel.transport), None
    if info.launcher != "alone" and parallel.ranks_per_node is None:
        node_size = find_node_size(Control(info.rank, info.world_size), info.local_rank)
    layout = Layout.build(parallel, info.world_size, info.rank, num_experts, node_size)
    machinery = build_machinery(layout, device, parallel, "float32")
    try:
        yield machinery
    except BaseException:
        with suppress(Exception):  # the reason is the first error
            machinery.close()
        raise


@dataclass(frozen=True)
class Pieces:
    """A model in the pieces that a step runs. cuts: of its layers with experts, by number."""

    decoder: Decoder
    cuts: Mapping[int, Cut]


@contextmanager
def pieces_of(found: Found, layout: Layout, tensor: TensorShares | None) -> Iterator[Pieces]:
    """Cut a model, which has its share of experts; where what is inside fails, it is as it was.

    tensor: its part of attention, where ranks share that.
    """
    calls, cuts = Calls(None if tensor is None else tensor.ranks.inside), _cuts(found)
    try:
        if find_dispatch(found.choice.dispatch).needs_table:
            layout.require_nodes("plan.dispatch", found.choice.dispatch)
        layers = _layers(found, cuts, calls, layout, tensor)
        for each in cuts.values():
            each.ranks, each.holds_share = layout.world_size, layout.ep_size * layout.etp_size > 1
        yield Pieces(
            Decoder(found.model, found.family, layers, calls, type(found.model).forward, tensor), cuts
        )
    except BaseException:
        _undo(cuts)
        raise


def spread_parts(pieces: Pieces, machinery: Machinery) -> None:
    """Let state dicts say which part of experts, and of what ranks share beside them, a rank has."""
    layout = machinery.layout
    if layout.ep_size * layout.etp_size * layout.tp_size == 1:
        return
    cores = [core_of(cut.experts) for cut in pieces.cuts.values()]
    for module in pieces.decoder.model.modules():
        parts: dict[str, Sharding] = getattr(module, "shardings", {})
        if any(module is core for core in cores):
            found = (
                (name, sharding_of_experts(p.shape, parts.get(name), layout))
                for name, p in module.named_parameters()
            )
            parts = {name: each for name, each in found if each is not None}
        if parts:
            spread_states(module, parts, machinery.meshes)


def _undo(cuts: Mapping[int, Cut]) -> None:
    for cut in cuts.values():
        cut.undo()


def _cuts(found: Found) -> dict[int, Cut]:
    """Return the cuts of the layers with experts, by the layers' numbers."""
    return {
        number: Cut(block, found.family, shared=found.shared_of(block), top_k=found.top_k)
        for number, block in enumerate(found.blocks)
        if block is not None
    }


def _layers(
    found: Found,
    cuts: Mapping[int, Cut],
    calls: Calls,
    layout: Layout = ALONE,
    tensor: TensorShares | None = None,
) -> Layers:
    """Return the layers as the engine runs them; of the experts this rank has its share."""
    layers: list[CutLayer | WholeLayer] = []
    ep_size, ep_rank = layout.ep_size, layout.ep_rank
    placement = ExpertPlacement.even(found.num_experts, ep_size)
    config, node_size = found.moe, layout.ep_node_size
    for number, (layer, block) in enumerate(zip(found.layers, found.blocks, strict=True)):
        cut, shared = cuts.get(number), None if tensor is None else tensor.layers[number]
        if cut is None:
            layers.append(
                WholeLayer(layer, number, calls)
                if shared is None
                else SharedDenseLayer(layer, number, calls, found.family, shared)
            )
            continue
        shard = ExpertShard(layout.etp_rank, layout.etp_size)
        cut.rows = ModelExperts(cut.experts, placement.slots, found.family.form, shard)
        moe = MoELayer(
            gate=CutGate(found.num_experts, cut),
            permutation=build_permutation(config, ep_size, ep_rank=ep_rank, node_size=node_size),
            expert=cut.rows,
            dispatch=config.dispatch,
            hooks=build_hooks(found.family.form.entering(core_of(cut.experts)), config),
            shared=None if found.shared_of(block) is None else SharedPart(block, found.family),
            ep_size=ep_size,
            ep_rank=ep_rank,
            placement=placement,
        )
        moe.hooks.to(dtype=next(found.model.parameters()).dtype)
        layers.append(
            CutLayer(layer, number, moe, cut, calls, found.family)
            if shared is None
            else SharedCutLayer(layer, number, moe, cut, calls, found.family, shared)
        )
    return layers


class SharedPart(nn.Module):
    """The output of a block's shared experts, which is added to that of its routed experts."""

    def __init__(self, block: Any, family: Family) -> None:
        super().__init__()
        # Not as a submodule, as the block has the routed experts, too.
        self.__dict__.update(block=block, family=family)

    def forward(self, x_TM: Tensor) -> Tensor:
        family: Family = self.__dict__["family"]
        return family.shared_output(self.__dict__["block"], x_TM)
