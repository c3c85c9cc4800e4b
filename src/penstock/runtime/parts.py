"""The interface of the engine to a model: its pieces between transfers. Any model that has them can be
scheduled.

Shapes: B samples, L tokens per sample, M hidden size, T = B * L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.config import ConfigError
from penstock.moe import ChunkRoute, MoELayer, Product, RouteMaker, SampleKeys, Tokens
from penstock.moe.exchange import route_maker
from penstock.moe.layer import RoutedTokens
from penstock.moe.routers import SoftRouter
from penstock.routing.routes import ShardPlace
from penstock.step.shape import FORM_TOKENS, ExpertForm
from penstock.topology import Layout


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

        However tokens lie, they are those that are whole on every rank and compute before shards of weights.
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


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer as a step finds it: between two steps its modules may be replaced.

    Tasks ask hundreds of times for what a step looks up once; an attribute of a module is searched for in
    several dictionaries.

    Attributes:
        moe: The MoE layer; None in a dense layer.
        before: The number of MoE layers before it.
    """

    block: BlockParts
    moe: MoELayer | None
    before: int

    @property
    def experts(self) -> MoELayer:
        """The MoE layer, for tasks that only a layer with experts has."""
        assert self.moe is not None, "tasks of experts are those of MoE layers"
        return self.moe


def layers_of(parts: ModelParts) -> tuple[Layer, ...]:
    """Return all layers as they are now."""
    layers: list[Layer] = []
    before = 0
    for block in parts.parts:
        moe = block.moe
        layers.append(Layer(block, moe, before))
        before += moe is not None
    return tuple(layers)


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
    if moe.hooks.any and layout.etp_size > 1:
        why = (
            "hooks around transfers (moe.comm_dtype) change what experts leave, and with "
            f"{layout.etp_size} shards of every expert those are partial sums that are still to be added"
        )
        hint = "Use 1, or no hooks (moe.comm_dtype=none)."
        raise ConfigError("parallel.etp_size", layout.etp_size, why, hint)
    return RouteMaker(moe.dispatch, layout.place, shards=shards)


# ---- how the residual stream of a token gets to where its experts' outputs are added to it ----------------
#
# Shapes: B samples, L tokens per sample, M hidden size, T = B * L tokens, R rows.


class ResidualTransport(Protocol):
    """What leaves the ranks of tokens, and what their experts' ranks send.

    Attributes:
        separate_bytes: Bytes per number of the residual stream that follow a sample beside its rows.
    """

    @property
    def separate_bytes(self) -> int: ...

    def route(
        self, layer: Layer, residual_BLM: Tensor, x_TM: Tensor, tokens: Tokens, slices: int
    ) -> RoutedTokens:
        """Choose experts for tokens x, and order rows of the tokens or of the residual stream."""
        ...

    def compute(self, layer: Layer, rows: Tensor, route: ChunkRoute, product: Product) -> Tensor:
        """Return what goes home for rows that have come to this rank's experts, [R, M]."""
        ...


@dataclass(frozen=True)
class SeparateResidual:
    """The residual stream stays at home, or follows its sample.

    Attributes:
        wire_dtype: The type of rows in transit; None: unchanged.
    """

    wire_dtype: torch.dtype | None = None
    separate_bytes = torch.float32.itemsize

    def route(
        self, layer: Layer, residual_BLM: Tensor, x_TM: Tensor, tokens: Tokens, slices: int
    ) -> RoutedTokens:
        del residual_BLM
        return layer.experts.route(in_dtype(x_TM, self.wire_dtype), tokens, slices)

    def compute(self, layer: Layer, rows: Tensor, route: ChunkRoute, product: Product) -> Tensor:
        return layer.experts.expert_rows(rows, route, product)


def in_dtype(x_TM: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return x in another type; None = unchanged."""
    return x_TM if dtype is None else x_TM.to(dtype)
