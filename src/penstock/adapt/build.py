"""`penstock.parallelize`, `penstock.load_pretrained`: models of transformers whose steps run by a schedule.

The one spreads a model that all ranks have whole; of what the other reads, a rank reads what it will hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.adapt.cut import Cut, CutGate
from penstock.adapt.decoder import Calls, CutLayer, Decoder, SharedDenseLayer, WholeLayer
from penstock.adapt.engine import Engine
from penstock.adapt.guess import EpPlan, brought_by, check, check_ep_plan, check_spread, coefficient_of, guess
from penstock.adapt.passes import JoinAdapters, NarrowSpread, Passes, Spread, TakeAdapters
from penstock.adapt.planning import Planner, choice_of, moving_of
from penstock.adapt.scheduled import engine_of, is_wrapped_by_peft, plain_class, saved_together, schedule
from penstock.adapt.tensor import TensorShares, check_can_narrow, check_can_share
from penstock.decision import Decision
from penstock.device import numbered
from penstock.families.adapters import core_of
from penstock.families.experts import ModelExperts, Shares, sharding_of_experts
from penstock.families.inspection import Found, look
from penstock.families.known import FAMILIES, Family, family_inside, family_of
from penstock.families.weights import ModelFolder, folder_of, share_of_experts
from penstock.features.dispatch import find_dispatch
from penstock.graph import Lane
from penstock.mesh import Group
from penstock.moe import MoELayer
from penstock.moe.build import build_hooks, build_permutation
from penstock.moe.experts import ExpertShard
from penstock.moe.permute.sort import SortPermutation
from penstock.partial_state import local_state, spread_states
from penstock.placement import ExpertPlacement
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.clip import follow_torch
from penstock.runtime.features.expert_replicas.manager import ExpertReplicas
from penstock.sharding import Sharding
from penstock.step.shape import Updating
from penstock.topology import (
    Control,
    Layout,
    ParallelConfig,
    find_node_size,
)
from penstock.topology.device_mesh import Meshes, sizes_of
from penstock.topology.groups import TransportName, with_variable
from penstock.topology.join import detect, joined
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

    All ranks call this function, and later every forward pass, together; each has samples of its own. In
    training mode `model(input_ids=..., labels=...)` gives the loss of the batch of all ranks, and its
    `backward` every gradient, summed over ranks: DistributedDataParallel is not needed, and refused.
    Everything else works as before: logits in evaluation (`model.eval()`), `generate`, `save_pretrained`,
    which all ranks call together. `model.device_mesh` has all dimensions of the layout. Joins processes that
    torchrun, srun or mpirun has started, once.

    Args:
        model: A causal language model of transformers 5, whole and equal on every rank, or a model of peft
            around one; one of an unknown family is taken if it can be cut into pieces that compute the same.
        ep_size: Number of ranks over which experts are spread; None = all, after `etp_size`.
        tp_size: Number of ranks that share attention, dense layers and vocabulary, and are given the same
            samples, for some families (docs/features.md); None = 1.
        etp_size: Number of ranks that share every expert, each a part of its width; None = 1.
        mesh: What says these sizes in their place: a DeviceMesh of all ranks with names as ("dp", "ep"),
            several, or groups by name (docs/parallelism.md).
        plan: "auto" measures the cluster at the first step and searches; else the name of a schedule, or a
            decision.
        ep_plan: Which modules hold experts, as transformers says; None = as its family or configuration says.
        ranks_per_node, timeout_s, transport: See ParallelConfig.
        bound_factor: See MoEConfig.
        updating: How steps sum gradients in shares, for a `ShardedAdamW` of `penstock.adapt.stack_of`; None =
            any optimiser updates parameters.
        gradient_reduction: Whether gradients of a loss that the caller makes of logits are averaged over
            ranks or summed, see docs/hugging-face.md.

    Returns:
        The model, in training mode. It keeps its class, its modules and the names of its parameters; of the
        experts it keeps this rank's share.

    Raises:
        ValueError: For a model that cannot be scheduled; it is unchanged then.
        ConfigError: For sizes and plans that do not fit; the model is unchanged then.
    """
    inner = model.get_base_model() if is_wrapped_by_peft(model) else model
    if "_penstock" in inner.__dict__:
        raise ValueError("the model is scheduled already: parallelize it once")
    found = replace(_found(inner, ep_plan), bound_factor=bound_factor, choice=choice_of(plan))
    device = next(inner.parameters()).device
    settings = ParallelConfig(ranks_per_node=ranks_per_node, timeout_s=timeout_s, transport=transport)
    sizes = {"ep_size": ep_size, "tp_size": tp_size, "etp_size": etp_size}
    parallel = shared_as(settings, sizes, mesh, found, device)
    with machinery_for(parallel, found.num_experts, device) as machinery, sharing(found, machinery) as tensor:
        scheduled(found, machinery, parallel, plan, tensor, updating)
    engine_of(inner).averages_own = gradient_reduction == "mean"
    return (model if inner is model else saved_together(model)).train()  # from_pretrained left it in eval()


@contextmanager
def sharing(found: Found, machinery: Machinery) -> Iterator[TensorShares | None]:
    """Leave a model this rank's share of it; where what is inside fails, it is as it was.

    Yields:
        This rank's part of attention, where ranks share that.
    """
    undone: list[Shares | TensorShares] = [found.shares(machinery.layout)]
    try:
        if tensor := TensorShares.of(found, machinery.layout):
            undone.append(tensor)
        yield tensor
    except BaseException:
        for share in undone:
            share.undo()
        raise
    for share in undone:
        share.settle()


def scheduled(
    found: Found,
    machinery: Machinery,
    parallel: ParallelConfig,
    plan: str | Decision,
    tensor: TensorShares | None = None,
    updating: Updating | None = None,
) -> Any:
    """Let a schedule run the training steps of a model that has its share of experts; returns the model.

    Args:
        plan: See `parallelize`.
        tensor: This rank's part of attention, where ranks share that.
        updating: See `parallelize`.
    """
    layout = machinery.layout
    planner = Planner.asked(plan, found.sizes, layout, parallel)
    with pieces_of(found, layout, tensor) as decoder:
        stack = PipelinedStack(found.model, decoder, found.moe, machinery, planner.first, updating=updating)
        stack.timed = False  # nothing reads when tasks ran
        stack.of(ExpertReplicas).moving = moving_of(found.choice, found.sizes, stack)
        if layout.ep_size * layout.etp_size > 1:
            machinery.transports.open([(Lane.INTER, Group.EXPERT), (Lane.INTER, Group.SHARDS)])
        if tensor is not None:
            tensor.ranks.open(machinery)
    spread_parts(decoder, machinery)
    passes = Passes(machinery.control, stack.turns)
    for part in decoder.cut_layers:
        cut, moe = part.cut, part.experts
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
        model.activation_checkpointing_disable()  # on its own a layer would recompute its transfers
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
    with pieces_of(found) as decoder:
        check(model, decoder, changed)
        family = replace(found.family, coefficient=coefficient_of(model, decoder))
    for part in decoder.cut_layers:
        part.cut.undo()
    return replace(found, family=family)


def shared_as(
    settings: ParallelConfig,
    sizes: Mapping[str, int | None],
    mesh: Meshes | None,
    found: Found,
    device: torch.device,
) -> ParallelConfig:
    """Return the settings with the sizes of groups that share a model, as they or a mesh say.

    All ranks call it.

    Args:
        sizes: Sizes that were given besides a mesh; None = not said.
        mesh: See `parallelize`.
        device: The model's device.

    Raises:
        ConfigError: For sizes by which the model cannot be shared.
    """
    said: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    parallel = replace(settings, **said)
    if mesh is not None:
        info = joined(settings.timeout_s, device, settings.transport)
        said |= sizes_of(mesh, said, Control(info.rank, info.world_size), device.type)
        parallel = replace(settings, **said)
    if parallel.tp_size > 1:
        check_can_share(found, parallel.tp_size)
    check_can_narrow(found, parallel.etp_size)
    return parallel


@contextmanager
def machinery_for(parallel: ParallelConfig, num_experts: int, device: torch.device) -> Iterator[Machinery]:
    """Join the ranks that a launcher started, and yield what runs steps on them.

    All ranks enter this context. The machinery is closed where the work inside fails.
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


@contextmanager
def pieces_of(found: Found, layout: Layout = ALONE, tensor: TensorShares | None = None) -> Iterator[Decoder]:
    """Cut a model, which has its share of experts; where what is inside fails, it is as it was.

    Args:
        tensor: This rank's part of attention, where ranks share that.
    """
    calls = Calls(None if tensor is None else tensor.ranks.inside)
    layers, cuts = list[CutLayer | WholeLayer](), list[Cut]()
    try:
        if find_dispatch(found.choice.dispatch).needs_table:
            layout.require_nodes("plan.dispatch", found.choice.dispatch)
        for number, (layer, block) in enumerate(zip(found.layers, found.blocks, strict=True)):
            shared = None if tensor is None else tensor.layers[number]
            if block is None:
                kind = WholeLayer if shared is None else SharedDenseLayer
                layers.append(kind(layer, number, calls, found.family, shared))
                continue
            cut = Cut(block, found.family, shared=found.shared_of(block), top_k=found.top_k)
            cuts.append(cut)
            cut.ranks, cut.holds_share = layout.world_size, layout.ep_size * layout.etp_size > 1
            moe = _moe_layer(found, cut, layout)
            layers.append(CutLayer(layer, number, moe, cut, calls, found.family, shared))
        yield Decoder(found.model, found.family, layers, calls, type(found.model).forward, tensor)
    except BaseException:
        for cut in cuts:
            cut.undo()
        raise


def _moe_layer(found: Found, cut: Cut, layout: Layout) -> MoELayer:
    """Return the experts of a cut layer as the engine runs them: this rank's share."""
    config, ep_size, ep_rank = found.moe, layout.ep_size, layout.ep_rank
    placement = ExpertPlacement.even(found.num_experts, ep_size)
    shard = ExpertShard(layout.etp_rank, layout.etp_size)
    cut.rows = ModelExperts(cut.experts, placement.slots, found.family.form, shard)
    moe = MoELayer(
        gate=CutGate(found.num_experts, cut),
        permutation=build_permutation(config, ep_size, ep_rank=ep_rank, node_size=layout.ep_node_size),
        expert=cut.rows,
        dispatch=config.dispatch,
        hooks=build_hooks(found.family.form.entering(core_of(cut.experts)), config),
        shared=None if cut.shared is None else SharedPart(cut.block, found.family),
        ep_size=ep_size,
        ep_rank=ep_rank,
        placement=placement,
    )
    for hook in moe.hooks:
        hook.to(dtype=next(found.model.parameters()).dtype)
    return moe


def spread_parts(decoder: Decoder, machinery: Machinery) -> None:
    """Let state dicts say which part of experts, and of what ranks share beside them, a rank has."""
    layout = machinery.layout
    if layout.ep_size * layout.etp_size * layout.tp_size == 1:
        return
    cores = [core_of(part.cut.experts) for part in decoder.cut_layers]
    for module in decoder.model.modules():
        parts: dict[str, Sharding] = getattr(module, "shardings", {})
        if any(module is core for core in cores):
            shardings = (
                (name, sharding_of_experts(p.shape, parts.get(name), layout))
                for name, p in module.named_parameters()
            )
            parts = {name: each for name, each in shardings if each is not None}
        if parts:
            spread_states(module, parts, machinery.meshes)


class SharedPart(nn.Module):
    """The output of a block's shared experts, which is added to that of its routed experts."""

    def __init__(self, block: Any, family: Family) -> None:
        super().__init__()
        self.output = partial(family.shared_output, block)  # no submodule: the block has routed experts, too

    def forward(self, x_TM: Tensor) -> Tensor:
        return self.output(x_TM)


ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that keeps transformers' threads from reading ahead, which needs memory twice."""


def load_pretrained(
    folder: str | Path,
    *,
    ep_size: int | None = None,
    plan: str | Decision = "auto",
    tp_size: int | None = None,
    etp_size: int | None = None,
    mesh: Meshes | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ranks_per_node: int | None = None,
    timeout_s: float = 60.0,
    transport: TransportName = "direct",
    bound_factor: float | None = None,
    updating: Updating | None = None,
) -> Any:
    """Read a model of transformers from a folder and parallelize it.

    Of the experts a rank reads its share only, tensor by tensor, so that it needs memory for what it will
    hold and for one layer's experts; what ranks share (`tp_size`, `etp_size`) each reads whole first. All
    ranks call this together. Other parameters: see `parallelize`.

    Args:
        folder: A folder of configuration and safetensors, as save_pretrained writes them, or the name of a
            model on the Hugging Face hub.
        dtype: Type of the weights; None = as the configuration says.
        device: Where the model is; "cuda" is this rank's GPU.

    Returns:
        The model, in training mode.

    Raises:
        ValueError: For a family that is not known, or if a tensor is missing, of another shape, not finite,
            or not the model's.
        ConfigError: For sizes that do not fit.
    """
    started = detect(os.environ)
    device = numbered(torch.device(device), 0 if started is None else started.local_rank)
    opened = ModelFolder.open(folder_of(folder))
    found = replace(skeleton(opened), bound_factor=bound_factor, choice=choice_of(plan))
    settings = ParallelConfig(ranks_per_node=ranks_per_node, timeout_s=timeout_s, transport=transport)
    sizes = {"ep_size": ep_size, "tp_size": tp_size, "etp_size": etp_size}
    parallel = shared_as(settings, sizes, mesh, found, device)
    with machinery_for(parallel, found.num_experts, device) as machinery:
        layout, kind = machinery.layout, dtype or opened.config.dtype or torch.float32
        with machinery.control.waiting_for_files():  # what one rank finds in what it reads, all must learn
            found = machinery.control.agreed(
                partial(read_share, found, opened, layout, kind, device), f"reading {folder}"
            )
        tensor = TensorShares.of(found, layout)
        scheduled(found, machinery, parallel, plan, tensor, updating)
        if tensor is not None:
            tensor.settle()
        return found.model.train()


def read_share(
    found: Found,
    opened: ModelFolder,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device | str,
    own: Mapping[str, Tensor] | None = None,
) -> Found:
    """Return the parts of a model with this rank's share of experts, read from its folder.

    Experts that ranks share are read whole, and cut afterwards.

    Args:
        found: The parts of the model without weights, see `skeleton`.
        dtype: Type of the weights.
        device: Where the model is to be.
        own: Tensors of a model, of which those that are read get the types, by name; None = all get `dtype`.
    """
    held = ExpertPlacement.even(found.num_experts, layout.ep_size).held(layout.ep_rank)
    ids = {id(p) for experts in found.experts for p in experts.parameters()}
    named = found.model.named_parameters(remove_duplicate=False)
    rows = {name: len(p) // found.num_experts for name, p in named if id(p) in ids}
    tensors = share_of_experts(opened.tensors, found.model, rows, held, found.num_experts)
    plain: Any = type(found.model)

    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        """Begin a model with these experts alone: transformers makes it without memory."""
        plain.__init__(self, *arguments, **named)
        Shares(look(self, found.family).experts, held, found.num_experts).settle()
        for name, tensor in self.state_dict(keep_vars=True).items():
            tensor.data = tensor.data.to((own or {}).get(name, tensor).dtype)

    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__init__": begin}
    with with_variable(os.environ, ASYNC, "1"):
        model = opened.read(type(plain.__name__, (plain,), names), tensors, dtype)
    model.__class__ = plain
    for name, parameter in found.model.named_parameters():  # transformers unfreezes what it reads
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    found, shard = found.of(model.to(device)), ExpertShard(layout.etp_rank, layout.etp_size)
    Shares(found.experts, range(len(held)), len(held), shard, found.family.form).settle()
    return found


def reload(model: Any, folder: str | Path) -> None:
    """Give a scheduled model the weights in a folder.

    A rank holds its share twice while they are read; of a family that is not described the whole model, in
    the widest of its types.

    Raises:
        ValueError: If the folder holds another model.
    """
    kind, own = plain_class(model), local_state(model.state_dict())
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in own.values()))
    opened = ModelFolder.open(Path(folder), kind)
    other = f"{folder} holds another model than {kind.__name__} is here"
    if family_of(opened.model) is None:
        try:
            model.load_state_dict(opened.read(kind, None, dtype).state_dict())
        except RuntimeError as error:
            raise ValueError(other) from error
        return
    found = read_share(skeleton(opened, compared=True), opened, engine_of(model).layout, dtype, "cpu", own)
    read = found.model.state_dict()
    if {name: tensor.shape for name, tensor in own.items()} != {name: read[name].shape for name in read}:
        raise ValueError(other)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(read[name])


def skeleton(opened: ModelFolder, *, compared: bool = False) -> Found:
    """Return the parts of the model in a folder, without its weights.

    Args:
        compared: Steps of a model of this code were compared with it whole, so that it may be changed code.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model = opened.model
    family = family_of(model)
    if family is None:
        guess(model, brought_by(model))  # where there is nothing to spread, parallelize would refuse it, too
        raise ValueError(
            f"{type(model).__name__} is of no family that Penstock knows ({', '.join(FAMILIES)}), and is "
            "looked at with its numbers: load it with from_pretrained, and call parallelize"
        )
    found = look(model, family)
    if not compared and (changed := found.changed_code()) and family.name in CONFIG_MAPPING_NAMES:
        raise ValueError(
            f"{', '.join(changed)} is not the function that transformers defines for {family.name}, and only "
            "with the model's numbers can it be seen whether steps compute the same: load the model with "
            "from_pretrained, and call parallelize"
        )
    return found
