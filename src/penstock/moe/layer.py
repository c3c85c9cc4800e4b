"""The MoE layer: router, order, experts. The engine runs its parts as tasks; alone it is a module.

Shapes: T tokens, M hidden size, k choices, R rows in expert order.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from penstock.moe.config import MoEConfig
from penstock.moe.experts import Product, build_experts, by_expert, by_source, grouped_product
from penstock.moe.gather import from_rows, to_rows
from penstock.moe.order import Ordered, build_order
from penstock.moe.router import Routing, TopKRouter
from penstock.moe.routes import ChunkRoute


@dataclass(frozen=True)
class RoutedTokens:
    """What leaves the first half of the layer. rows_RM: all chunks, sorted by chunk, rank, expert."""

    rows_RM: Tensor
    routing: Routing
    ordered: Ordered


class MoELayer(nn.Module):
    """Top-k routed experts of which this rank holds `num_experts / ep_size`, from `ep_rank` on.

    `route` and `unorder` are the halves around the transfer, `expert_rows` is what happens at the experts.
    `forward` runs all three and needs every expert on this rank; across ranks the engine runs them.
    """

    def __init__(self, hidden_size: int, config: MoEConfig, *, ep_size: int = 1, ep_rank: int = 0) -> None:
        super().__init__()
        if config.num_experts % ep_size:
            raise ValueError(
                f"num_experts = {config.num_experts} cannot be shared evenly by ep_size = {ep_size} ranks; "
                f"nearest valid: {max(1, round(config.num_experts / ep_size)) * ep_size}"
            )
        self.ep_size, self.num_local_experts = ep_size, config.num_experts // ep_size
        self.first_expert = ep_rank * self.num_local_experts
        self.router = TopKRouter(hidden_size, config)
        self.order = build_order(config)
        self.experts = build_experts(hidden_size, config, self.num_local_experts)

    def route(self, x_TM: Tensor, chunks: int = 1) -> RoutedTokens:
        """Choose experts and bring the tokens into their order."""
        routing = self.router(x_TM)
        ordered = self.order.plan(routing.experts_Tk, chunks)
        return RoutedTokens(to_rows(x_TM, ordered.rows), routing, ordered)

    def expert_rows(self, rows_RM: Tensor, route: ChunkRoute, product: Product = grouped_product) -> Tensor:
        """Outputs of this rank's experts for rows sorted by (source rank, expert), in the same order.

        product: how rows and weights are multiplied; it decides when weight gradients are made.
        """
        sizes = [sum(column) for column in zip(*route.received, strict=True)]
        out_RM = self.experts(by_expert(rows_RM, route.received), sizes, product)
        return by_source(out_RM, route.received)

    def unorder(self, rows_RM: Tensor, weights_Tk: Tensor, ordered: Ordered) -> Tensor:
        """Weighted sums of the expert outputs, back in token order. Returns [T, M]."""
        return from_rows(rows_RM, weights_Tk, ordered.rows)

    def forward(self, x_TM: Tensor) -> Tensor:
        if self.ep_size != 1:
            raise RuntimeError(
                f"experts are spread over {self.ep_size} ranks: run the layer inside a penstock stack"
            )
        routed = self.route(x_TM)
        counts = routed.ordered.tokens_per_expert_E
        slots = routed.ordered.slots
        sizes = counts.tolist() if slots is None else [slots[0]] * self.num_local_experts
        rows_RM = self.expert_rows(routed.rows_RM, ChunkRoute([sizes], [sizes]))
        return self.unorder(rows_RM, routed.routing.weights_Tk, routed.ordered)
