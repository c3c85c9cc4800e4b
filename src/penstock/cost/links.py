"""All-to-alls in which pairs of ranks send different amounts, over links inside nodes and cards between them.

Shapes: P ranks of the world, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.cost.cluster import ClusterConfig
from penstock.cost.workload import Workload
from penstock.mesh import Group, node_of

Amounts = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NodeLinks:
    """The links of a cluster in an all-to-all of all expert groups at once.

    What leaves a node passes its card (or its device's, see `ClusterConfig.link_rate_of`) while the rest
    passes the devices' links inside.
    """

    work: Workload
    cluster: ClusterConfig

    def argument(self, sent_PP: Amounts) -> Amounts:
        """Of an even all-to-all, the buffer with which it takes as long as each rank's links do, [P].

        sent_PP: from rank to rank, in any unit; what stays on a rank takes no time.
        """
        inside_PP, across_PP = sent_PP * self._inside_PP, sent_PP * self._across_PP
        card_P = _busier(across_PP)
        if self.cluster.link_rate_of == "node":
            card_P = self._of_node_NP.T @ _busier(self._of_node_NP @ across_PP @ self._of_node_NP.T)
        if not self._even_s:  # one rank, which sends nothing
            return np.zeros(len(sent_PP))
        inside_s, card_s = 1 / self.cluster.intra_bytes_per_s, 1 / self.cluster.link_bytes_per_s
        argument: Amounts = np.maximum(_busier(inside_PP) * inside_s, card_P * card_s) / self._even_s
        return argument

    def crossing(self, sent_PP: Amounts) -> float:
        """What leaves its node, or its rank where there is one node."""
        several = self._of_node_NP.shape[0] > 1
        return float((sent_PP * (self._across_PP if several else self._inside_PP)).sum())

    @cached_property
    def _even_s(self) -> float:
        """Seconds of one unit of an even buffer, by the rates of links."""
        even = ClusterConfig.all_to_all(self.cluster, self.work.span(Group.EXPERT))
        return even.beta_s_per_byte

    @cached_property
    def _of_node_NP(self) -> Amounts:  # noqa: N802  # the suffix is its shape
        """1 where a rank is in a node."""
        nodes = np.array([node_of(rank, self._per_node) for rank in range(self.work.world_size)])
        found: Amounts = np.equal.outer(np.arange(nodes.max() + 1), nodes).astype(np.float64)
        return found

    @cached_property
    def _across_PP(self) -> Amounts:  # noqa: N802
        """1 where two ranks are in different nodes."""
        return 1.0 - self._of_node_NP.T @ self._of_node_NP

    @cached_property
    def _inside_PP(self) -> Amounts:  # noqa: N802
        """1 where two different ranks are in one node."""
        return 1.0 - self._across_PP - np.eye(self.work.world_size)

    @property
    def _per_node(self) -> int:
        return self.work.devices_per_node or self.work.ranks_per_node * self.work.esp_size


def _busier(sent: Amounts) -> Amounts:
    """By row what is sent or received, whichever is more."""
    busier: Amounts = np.maximum(sent.sum(axis=1), sent.sum(axis=0))
    return busier
