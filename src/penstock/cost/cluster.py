"""What a cluster costs: alpha-beta models of its links, rates of its devices."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from penstock.config import ConfigError
from penstock.cost.legs import busiest_share
from penstock.graph import Phase
from penstock.ops import Op


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """A start-up and a time per byte: `t = alpha + beta * n`."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, size_bytes: float) -> float:
        """Time for a collective of `size_bytes` in its own group; 0 if there is nothing to move."""
        return self.alpha_s + self.beta_s_per_byte * size_bytes if size_bytes > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Section `[cluster]`: what is assumed of the machines until durations have been measured.

    The defaults describe one core of a server and Gloo over a loopback link.
    flops_per_s: matrix products of one rank. memory_bytes_per_s: copies of one rank.
    link_latency_s, link_bytes_per_s: what one rank sends to another, one direction.
    intra_latency_s, intra_bytes_per_s: the same between ranks of one node.
    task_overhead_s: fixed cost of any compute task.
    """

    flops_per_s: float = 3e10
    memory_bytes_per_s: float = 4e9
    link_latency_s: float = 2e-4
    link_bytes_per_s: float = 1e9
    intra_latency_s: float = 2e-4
    intra_bytes_per_s: float = 1e9
    task_overhead_s: float = 1e-4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                why = "must be finite" if value == math.inf else "must be positive"
                raise ConfigError(field.name, value, why, f"The default is {field.default}.")

    def all_to_all(self, ranks: int) -> AlphaBeta:
        """Argument: bytes of the buffer each rank sends, its own share included."""
        return self._collective(ranks - 1, (ranks - 1) / ranks)

    def leg(self, dispatch: str, op: str, nodes: int, node_size: int) -> AlphaBeta:
        """One leg of a dispatch or combine. Argument: bytes of the rows that each rank has for all experts.

        Ranks of a node share its links, so one that sends alone has the whole of them.
        """
        if dispatch == "flat":
            return self.all_to_all(nodes * node_size)
        share = busiest_share(dispatch, op, nodes, node_size)
        if op not in (Op.DISPATCH, Op.COMBINE):
            return AlphaBeta(
                alpha_s=(node_size - 1) * self.intra_latency_s, beta_s_per_byte=share / self.intra_bytes_per_s
            )
        alone = node_size if dispatch == "hierarchical_1d" else 1
        return AlphaBeta(
            alpha_s=(nodes - 1) * self.link_latency_s, beta_s_per_byte=share / alone / self.link_bytes_per_s
        )

    def all_reduce(self, ranks: int) -> AlphaBeta:
        """Argument: bytes of the tensor. A ring sends it almost twice."""
        return self._collective(2 * (ranks - 1), 2 * (ranks - 1) / ranks)

    def shards(self, ranks: int, *, scatters: bool) -> AlphaBeta:
        """Reduce-scatter (argument: bytes of its input) or all-gather (of its output) inside a node."""
        del scatters  # the same bytes either way
        share = (ranks - 1) / ranks
        return AlphaBeta(
            alpha_s=(ranks - 1) * self.intra_latency_s, beta_s_per_byte=share / self.intra_bytes_per_s
        )

    def compute_s(self, op: str, phase: Phase, flops: float, moved_bytes: float, pieces: int = 1) -> float:
        """A compute task whose forward has so many operations and copies. Backward is twice forward.

        pieces: in so many the work is done; by assumption that costs nothing, as published planners have it.
        """
        del op, pieces
        scale = 2 if phase is Phase.BACKWARD else 1  # a split backward is two halves of that
        return self.task_overhead_s + scale * self.nominal_s(flops, moved_bytes)

    def nominal_s(self, flops: float, moved_bytes: float) -> float:
        """What so much work takes by the two rates alone."""
        return flops / self.flops_per_s + moved_bytes / self.memory_bytes_per_s

    def _collective(self, rounds: int, share: float) -> AlphaBeta:
        return AlphaBeta(alpha_s=rounds * self.link_latency_s, beta_s_per_byte=share / self.link_bytes_per_s)
