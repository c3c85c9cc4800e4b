"""The interface of the engine to a model: its pieces between transfers, and what the engine refuses of it.

Any model that has these pieces can be scheduled.

Shapes: B samples, L tokens per sample, M hidden size, T = B * L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Final, NoReturn, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn

from penstock.config import ConfigError
from penstock.mesh import Group
from penstock.moe import MoELayer, RouteMaker, SampleKeys
from penstock.moe.config import BalanceGroup, MoEConfig
from penstock.moe.exchange import route_maker
from penstock.moe.gates import SoftRouter
from penstock.placement import PlacementError
from penstock.routing.routes import ShardPlace
from penstock.sharding import shardings_of
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS, ExpertForm, Sharing, Updating
from penstock.topology import Control, Layout


class BlockParts(Protocol):
    """One transformer block. `moe` is None in a dense block."""

    @property
    def moe(self) -> MoELayer | None: ...

    @property
    def row_norm(self) -> nn.Module | None:
        """What makes rows for experts of the residual stream's rows, [R, M]; None where rows cannot carry it.

        They can where expert outputs are added to the residual stream unchanged.
        """
        ...

    def attend(self, h_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        """Run attention: return the new residual stream [B, L, M], and its norm as tokens [T, M]."""
        ...

    def mix(self, h_BLM: Tensor, keys: SampleKeys) -> Tensor:
        """Return what attention adds to the residual stream, [B, L, M]; a shard adds its heads' part."""
        ...

    def settle(self, h_BLM: Tensor, attended_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        """Run the second half of `attend`: return the sum of both, and its norm as tokens [T, M].

        Where ranks share a sample's tokens they are this rank's, from `keys.first_token` on.
        """
        ...

    def add(self, residual_BLM: Tensor, out_TM: Tensor, keys: SampleKeys) -> Tensor:
        """Return the residual stream with the output of the feed-forward part added."""
        ...

    def dense(self, x_TM: Tensor) -> Tensor:
        """Run the feed-forward part of a dense block."""
        ...


class ModelParts(Protocol):
    """A decoder in pieces."""

    @property
    def parts(self) -> Sequence[BlockParts]: ...

    def embed(self, tokens_BL: Tensor, keys: SampleKeys) -> Tensor:
        """Return the hidden states of token ids, [B, L, M]."""
        ...

    def logits(self, h_BLM: Tensor) -> Tensor:
        """Return the logits [T, V] of this rank's vocabulary."""
        ...

    def head(self, h_BLM: Tensor, labels_BL: Tensor) -> Tensor:
        """Return the sum (not the mean) of the token losses; labels of -100 count for nothing."""
        ...

    def replicated_parameters(self, layer: int) -> list[nn.Parameter]:
        """Return the parameters of a layer that every rank holds.

        The first layer has the embedding too, the last one the head. A layer names all that it uses,
        including what other layers use: the stack counts it once.
        """
        ...

    def partial_parameters(self, layer: int) -> list[nn.Parameter]:
        """Return the replicated parameters to whose gradients every rank that shares attention adds a part.

        However tokens lie, they are those that are whole on every rank and compute before shards of weights,
        or beside them, as a bias does that one rank adds.
        """
        ...

    def token_parameters(self, layer: int) -> list[nn.Parameter]:
        """Return the replicated parameters that are whole and compute on tokens one by one.

        They are those from attention to the end of the block. Where ranks share a sample's tokens each adds a
        part, else each has all.
        """
        ...

    def expert_parameters(self, layer: int) -> list[nn.Parameter]:
        """Return the parameters of this rank's experts of one layer."""
        ...


# ---- the maker of routes from counts on a rank, by how its rows meet all shards of their experts ----------


def maker_of(moe: MoELayer, layout: Layout, form: ExpertForm) -> RouteMaker:
    """Return the maker of a layer's routes.

    Raises:
        ConfigError: If a part of the layer cannot be shared.
    """
    # The slots of a soft gate are means over all tokens of a sample.
    if layout.tp_size > 1 and FORM_TOKENS[form] == "split" and isinstance(moe.gate, SoftRouter):
        why = (
            f"mixes all tokens of a sample, and with parallel.tp_size = {layout.tp_size} and "
            f"expert form {form} every rank routes its own part of them"
        )
        raise ConfigError("moe.gate", "soft", why, "Set schedule.expert_form=s2, or parallel.tp_size=1.")
    shards = ShardPlace.of(form, layout.mesh, layout.rank)
    if shards is None:
        return route_maker(moe.dispatch, layout.place, moe.permutation)
    if moe.permutation.row_counts:
        joined = moe.dispatch.joins_rows
        raise ConfigError(
            "moe.dispatch" if joined else "moe.one_copy_per_rank",
            moe.dispatch.name if joined else True,
            f"sends one row for several experts, and with parallel.etp_size = {layout.etp_size} and "
            f"expert form {form} rows are counted by expert",
            "Use another dispatch." if joined else "Use false.",
        )
    if moe.hooks and layout.etp_size > 1:
        why = (
            "hooks around transfers (moe.comm_dtype) change what experts leave, and with "
            f"{layout.etp_size} shards of every expert those are partial sums that are still to be added"
        )
        hint = "Use 1, or no hooks (moe.comm_dtype=none)."
        raise ConfigError("parallel.etp_size", layout.etp_size, why, hint)
    return RouteMaker(moe.dispatch, layout.place, shards=shards)


# ---- checks of a model's layers, and the shape of a step that follows from them ---------------------------


def check_layers(layers: Sequence[MoELayer | None], moe: MoEConfig, layout: Layout) -> None:
    """Raise ValueError unless layers that a user built match the configuration and the layout."""
    for number, layer in enumerate(layers):
        if layer is None:
            continue
        for what, actual, wanted in (
            ("num_experts", layer.num_experts, moe.num_experts),
            ("ep_size", layer.ep_size, layout.ep_size),
            ("ep_rank", layer.ep_rank, layout.ep_rank),
            ("etp_size", layer.experts.shard.size, layout.etp_size),
            ("etp_rank", layer.experts.shard.rank, layout.etp_rank),
        ):
            if actual != wanted:
                why = f"layer {number} was built with {what} = {actual}, the stack with {wanted}"
                raise ValueError(f"{why}: build the layer with the stack's {what}")


def check_shards(model: nn.Module, parts: ModelParts, layout: Layout) -> None:
    """Raise ValueError unless the model's parts are those of this rank, and exist where they are needed.

    Ranks that share attention and each had a whole model would silently add it several times.
    """
    shardings = shardings_of(model)
    mesh, rank = layout.mesh, layout.rank
    for name, sharding in shardings.items():
        wanted = mesh.place(rank, sharding.axes), mesh.size(sharding.axes)
        if (sharding.index, sharding.count) != wanted:
            raise ValueError(
                f"{name} is part {sharding.index} of {sharding.count}, and this rank has part {wanted[0]} of "
                f"{wanted[1]}: build the model with the layout's TensorShard(layout.tp_rank, layout.tp_size)"
            )
    if layout.tp_size == 1:
        return
    cut = {id(model.get_parameter(name)) for name, s in shardings.items() if s.axes == Group.TENSOR}
    for layer in range(len(parts.parts)):
        if cut.isdisjoint(map(id, parts.replicated_parameters(layer))):
            raise ValueError(
                f"layer {layer} has no part of a shared parameter, and tp_size = {layout.tp_size} ranks "
                "share attention: each would compute all of it, and the sum be that many times too large. "
                "Build the model with shard=TensorShard(layout.tp_rank, layout.tp_size), or set "
                "parallel.tp_size=1"
            )


Placements = tuple[str | None, ...]
"""For every layer a digest of where its experts are; None for a dense layer."""


def placements_of(layers: Sequence[MoELayer | None]) -> Placements:
    """Return digests of where the layers' experts are, to compare."""
    return tuple(None if layer is None else layer.placement.digest for layer in layers)


def check_placements(mine: Placements, control: Control) -> Placements:
    """Return `mine` if all ranks have the same; else raise PlacementError, on all of them.

    Rows would meet the wrong experts, although shapes would fit. Costs an exchange of 32 bytes per layer.
    """
    everyone = control.gather(mine, "comparing where experts are")
    for number, digests in enumerate(zip(*everyone, strict=True)):
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise PlacementError(
                    f"layer {number}: rank {rank} has experts placed otherwise than rank 0. Build the layer "
                    "with the same placement on all ranks"
                )
    return mine


def check_not_moved(now: Placements, before: Placements) -> None:
    """Raise PlacementError if a layer was exchanged for one whose experts are elsewhere."""
    for number, (actual, wanted) in enumerate(zip(now, before, strict=True)):
        if actual != wanted:
            raise PlacementError(
                f"layer {number} was exchanged for one with its experts placed otherwise, which other ranks "
                "need not have. Build the new layer with the old one's placement, or build a new stack"
            )


def check_same(now: StepShape, before: StepShape) -> None:
    """Raise ValueError if the layers now lead to another shape than when the stack was built."""
    for field in fields(StepShape):
        actual, wanted = getattr(now, field.name), getattr(before, field.name)
        if actual != wanted:
            raise ValueError(
                f"the model's layers have changed: {field.name} is {actual} and was {wanted} when the stack "
                "was built, and a step's tasks depend on it. Build a new stack for the changed model."
            )


MADE_OF: Final = ("moe_layers", "exchange_counts", "shared_experts", "sharing")
"""Fields of a step's shape that layers decide, and no plan."""


def check_planned_for(planned: StepShape, own: StepShape) -> None:
    """Raise ValueError for a plan of other layers: it would leave out tasks, or run some that do nothing."""
    for name in MADE_OF:
        actual, wanted = getattr(planned, name), getattr(own, name)
        if actual != wanted:
            raise ValueError(
                f"the plan is for another model: its {name} is {actual}, and that of the layers is {wanted}. "
                "Plan for the stack's base_shape."
            )


def sharing_of(layout: Layout, balance: BalanceGroup) -> Sharing:
    """Return which ranks share what.

    Args:
        balance: The tokens over which balance is judged.
    """
    return Sharing(
        tp_size=layout.tp_size,
        etp_size=layout.etp_size,
        tokens=layout.tokens,
        judges_samples=balance != "global",
    )


def shape_of(
    layers: Sequence[MoELayer | None],
    sharing: Sharing,
    *,
    gathers_loads: bool = False,
    updating: Updating | None = None,
) -> StepShape:
    """Return the uncut shape of a step of these layers, which need the same kinds of tasks.

    Args:
        layers: The MoE layers of the model; None stands for a dense one.
        gathers_loads, updating: See StepShape.

    Raises:
        ValueError: If layers need different kinds of tasks.
    """
    moe = [layer for layer in layers if layer is not None]
    if not moe:
        return StepShape(moe_layers=(False,) * len(layers), sharing=sharing, updating=updating)
    dynamic = {layer.permutation.dynamic for layer in moe}
    legs = {layer.dispatch.hops for layer in moe}
    shared = {layer.shared is not None for layer in moe}
    for what, kinds in (("permutation", dynamic), ("dispatch", legs), ("shared experts", shared)):
        if len(kinds) > 1:
            raise ValueError(f"all MoE layers of a stack need the same kind of {what}: their tasks are alike")
    return StepShape(
        moe_layers=tuple(layer is not None for layer in layers),
        exchange_counts=dynamic.pop(),
        dispatch=legs.pop(),
        shared_experts=shared.pop(),
        sharing=sharing,
        gathers_loads=gathers_loads,
        updating=updating,
    )


# ---- refusals of what cannot be done with a stack, with what to do instead --------------------------------
#
# Messages say "a scheduled model": who has called `penstock.parallelize` has never seen the stack inside.


def refuse_data_parallel() -> NoReturn:
    """Raise TypeError: DistributedDataParallel around a stack would average gradients a second time."""
    raise TypeError(
        "a scheduled model needs no DistributedDataParallel or DataParallel: when loss.backward() returns, "
        "every gradient is synchronised already. Use the model as it is."
    )


STACKS: WeakKeyDictionary[nn.Module, ReferenceType[Any]] = WeakKeyDictionary()
"""The stack that trains a model. The model itself has no reference to it, so it can be copied and pickled."""


def living_stacks() -> Iterator[Any]:
    """Yield the stacks that train models now."""
    yield from (stack for reference in list(STACKS.values()) if (stack := reference()) is not None)


def watch_model(model: nn.Module, stack: Any) -> None:
    """Make `model.state_dict()` raise, too, where it would have old values."""
    if refuse_stale_model not in model._state_dict_pre_hooks.values():  # a copy has those of its original
        model.register_state_dict_pre_hook(refuse_stale_model)
    STACKS[model] = ref(stack)


def refuse_stale_model(model: nn.Module, *args: object) -> None:
    """Raise as `refuse_stale` does, for the stack that trains `model`."""
    stack = STACKS[model]() if model in STACKS else None
    if stack is not None:
        refuse_stale(stack, *args)


def refuse_stale(stack: Any, *args: object) -> None:
    """Raise RuntimeError if this rank has old values of some parameters."""
    del args
    for feature in stack.features.values():
        feature.check_current()
