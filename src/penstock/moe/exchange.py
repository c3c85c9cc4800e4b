"""How rows change ranks when the layer runs outside a stack. The real one is `penstock.ExpertParallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor, nn

from penstock.dispatch import Dispatch, Place
from penstock.moe.orders.base import Order, OrderPlan
from penstock.moe.routes import ChunkRoute, RouteMaker, Routes


class Exchange(Protocol):
    """The ranks that share a layer's experts."""

    @property
    def ep_size(self) -> int: ...

    @property
    def ep_rank(self) -> int: ...

    def maker(self, dispatch: Dispatch, order: Order) -> RouteMaker:
        """What makes routes here. Raises ValueError if these ranks cannot run this dispatch of this order."""
        ...

    def routes(self, plan: OrderPlan, num_local_experts: int, maker: RouteMaker) -> Routes:
        """Exchange what must be known about sizes."""
        ...

    def to_experts(self, rows: Tensor, route: ChunkRoute) -> Tensor:
        """Rows to their experts' ranks, differentiable."""
        ...

    def to_home(self, rows: Tensor, route: ChunkRoute) -> Tensor:
        """The way back, differentiable."""
        ...

    def adopt(self, experts: nn.Module) -> None:
        """Told which experts a layer has, when it is built and whenever they may have been replaced."""
        ...

    def check(self, experts: nn.Module, x: Tensor, parts: str, *, first: bool) -> None:
        """Told before each forward what is to run: tokens x, and what the layer is made of, in words.

        first: whether the layer has not run before, on any rank. Raises ValueError if experts would be mixed
        up: taken over by another tool, or, the first time, unlike other ranks'.
        """
        ...

    def run(self, experts: nn.Module, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """`function(rows)`, which calls `experts`.

        Gradients that their parameters get from it are those of the loss averaged over ranks.
        """
        ...

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks that train together, not differentiable."""
        ...

    def sum_of_alike(self, tensor: Tensor, experts: nn.Module, parameters: Iterable[Tensor]) -> Tensor:
        """The same, float64 [N], once in every forward, after `check` and before any row leaves.

        experts: of the layer. parameters: those that all these ranks should hold alike. Raises ValueError if
        they do not, or if ranks have different layers.
        """
        ...

    @property
    def data_parallel_size(self) -> int:
        """How many ranks train together."""
        ...


class Alone:
    """All experts are here: nothing moves."""

    ep_size, ep_rank, data_parallel_size = 1, 0, 1

    def maker(self, dispatch: Dispatch, order: Order) -> RouteMaker:
        return RouteMaker(dispatch, Place(0, 1, 1), order.row_counts)

    def routes(self, plan: OrderPlan, num_local_experts: int, maker: RouteMaker) -> Routes:
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
        """Nothing to mix up."""

    def run(self, experts: nn.Module, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        del experts
        return function(rows)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor

    def sum_of_alike(self, tensor: Tensor, experts: nn.Module, parameters: Iterable[Tensor]) -> Tensor:
        del experts, parameters
        return tensor
