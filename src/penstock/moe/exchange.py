"""How rows change ranks when the layer runs outside a stack, as `penstock.ExpertParallel` does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor, nn

from penstock.features.dispatch import Dispatch, Place
from penstock.moe.permute.sort import Permutation, PermutationPlan
from penstock.routing.routes import ChunkRoute, RouteMaker, Routes


def check_dispatch(permutation: Permutation, dispatch: Dispatch, node_size: int | None = None) -> None:
    """Raise ValueError unless `permutation` makes rows for as many ranks as `dispatch` brings them to.

    Args:
        node_size: Ranks of an expert group in one node; None: not known.
    """
    made_for = getattr(permutation, "node_size", 1)
    if made_for > 1 and not dispatch.joins_rows:
        raise ValueError(
            f"{type(permutation).__name__}(node_size={made_for}) makes one row for all of a token's experts "
            f'in a node, and dispatch {dispatch.name} brings a row to one rank: use dispatch="node_once", or '
            "node_size=1"
        )
    if not dispatch.joins_rows:
        return
    if not permutation.row_counts:
        raise ValueError(
            f"dispatch {dispatch.name} sends one row for all of a token's experts in a node, and "
            f"{type(permutation).__name__} makes one for each: use MergedPermutation(..., node_size=ranks of "
            'a node, rank=ep_rank), or dispatch="hierarchical_2d"'
        )
    if node_size is not None and node_size != made_for:
        raise ValueError(
            f"{type(permutation).__name__} was built for node_size = {made_for}, and {node_size} ranks of an "
            f"expert group are in one node: build it with node_size={node_size}"
        )


def route_maker(dispatch: Dispatch, place: Place, permutation: Permutation) -> RouteMaker:
    """Return the maker of the routes of whole experts.

    Raises:
        ValueError: If the permutation was made for other nodes.
    """
    check_dispatch(permutation, dispatch, place.node_size)
    return RouteMaker(dispatch, place, permutation.row_counts)


class Exchange(Protocol):
    """The ranks that share a layer's experts."""

    @property
    def ep_size(self) -> int: ...

    @property
    def ep_rank(self) -> int: ...

    def maker(self, dispatch: Dispatch, permutation: Permutation) -> RouteMaker:
        """Return the maker of routes.

        Raises:
            ValueError: If these ranks cannot run this dispatch and permutation.
        """
        ...

    def routes(
        self, plan: PermutationPlan, num_local_experts: int, maker: RouteMaker, experts: nn.Module
    ) -> Routes:
        """Exchange the row counts that ranks must know, and return the routes to these experts."""
        ...

    def to_experts(self, rows: Tensor, route: ChunkRoute) -> Tensor:
        """Send rows to their experts' ranks, differentiable."""
        ...

    def to_home(self, rows: Tensor, route: ChunkRoute) -> Tensor:
        """Send rows back from the experts' ranks, differentiable."""
        ...

    def adopt(self, experts: nn.Module) -> None:
        """Take note of a layer's experts, when it is built and whenever they may have been replaced."""
        ...

    def check(self, experts: nn.Module, x: Tensor, parts: str, *, first: bool) -> None:
        """Check what is about to run, before each forward.

        Args:
            x: The tokens.
            parts: The parts of the layer, in words.
            first: Whether the layer has not run before, on any rank.

        Raises:
            ValueError: If experts would be mixed up: taken over by another tool, or, the first time,
                different from other ranks'.
        """
        ...

    def run(self, experts: nn.Module, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return `function(rows)`, where `function` calls `experts`.

        The gradients that the experts' parameters get from this are those of the loss averaged over ranks.
        """
        ...

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks that train together, not differentiable."""
        ...

    def sum_of_alike(
        self, tensor: Tensor, experts: nn.Module, parameters: Mapping[str, Tensor], rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sum a float64 tensor [N] over ranks, once per forward, after `check` and before any row leaves.

        Here or in `routes` an error is raised if parameters are not alike, or if ranks have different layers.

        Args:
            experts: The experts of the layer.
            parameters: The parameters that all these ranks should hold alike.
            rows: The rows that will leave.

        Returns:
            The sum, and the rows, which need a gradient if any rank's rows or experts need one: all ranks
            have to take part in backward then.
        """
        ...

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that train together."""
        ...


class Alone:
    """An exchange of one rank: all experts are here and nothing moves."""

    ep_size, ep_rank, data_parallel_size = 1, 0, 1

    def maker(self, dispatch: Dispatch, permutation: Permutation) -> RouteMaker:
        return RouteMaker(dispatch, Place(0, 1, 1), permutation.row_counts)

    def routes(
        self, plan: PermutationPlan, num_local_experts: int, maker: RouteMaker, experts: nn.Module
    ) -> Routes:
        del experts
        if plan.slots is not None:
            return maker.even(plan.slots, num_local_experts)
        assert plan.counts_CN is not None
        counts_1CN = plan.counts_CN.unsqueeze(0).cpu().numpy()
        return maker.from_pair(counts_1CN, counts_1CN)

    def to_experts(self, rows: Tensor, route: ChunkRoute) -> Tensor:
        del route
        return rows

    def to_home(self, rows: Tensor, route: ChunkRoute) -> Tensor:
        del route
        return rows

    def adopt(self, experts: nn.Module) -> None:
        del experts

    def check(self, experts: nn.Module, x: Tensor, parts: str, *, first: bool) -> None:
        """Do nothing: a single rank cannot mix up experts."""

    def run(self, experts: nn.Module, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        del experts
        return function(rows)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor

    def sum_of_alike(
        self, tensor: Tensor, experts: nn.Module, parameters: Mapping[str, Tensor], rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        del experts, parameters
        return tensor, rows
