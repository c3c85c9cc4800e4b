"""All-to-alls in which pairs of ranks send different amounts, over links inside nodes and cards between them.

Shapes: P ranks of the world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.apportion import Counts
from penstock.cost.cluster import ClusterConfig
from penstock.cost.workload import Workload
from penstock.features.expert_replicas.problem import Links
from penstock.mesh import Group, node_of

Amounts = npt.NDArray[np.float64]


def nodes_of(work: Workload, ranks: Sequence[int]) -> Counts:
    """Return the node of every one of these ranks, counted from 0."""
    per_node = work.devices_per_node or work.ranks_per_node * work.etp_size
    nodes = [node_of(rank, per_node) for rank in ranks]
    return np.unique(nodes, return_inverse=True)[1].astype(np.int64)


def links_of(work: Workload, cluster: ClusterConfig, ranks: Sequence[int]) -> Links:
    """Return the links between these ranks, by the cluster's rates."""
    return Links(
        nodes=tuple(nodes_of(work, ranks).tolist()),
        across_s_per_byte=1 / cluster.link_bytes_per_s,
        inside_s_per_byte=1 / cluster.intra_bytes_per_s,
        card_per_rank=cluster.link_rate_of == "device",
    )


@dataclass(frozen=True)
class NodeLinks:
    """The links of a cluster in an all-to-all of all expert groups at once.

    What leaves a node passes its card (or its device's, see `ClusterConfig.link_rate_of`) while the rest
    passes the devices' links inside.
    """

    work: Workload
    cluster: ClusterConfig

    def argument(self, sent_PP: Amounts) -> Amounts:
        """Return the buffer of an even all-to-all that takes as long as each rank's links do here, [P].

        sent_PP: from rank to rank, in any unit; what stays on a rank takes no time.
        """
        if not self._even_s:  # one rank, which sends nothing
            return np.zeros(len(sent_PP))
        argument: Amounts = self._links.rank_seconds(sent_PP) / self._even_s
        return argument

    def crossing(self, sent_PP: Amounts) -> float:
        """Return the amount that leaves its node, or its rank where there is one node."""
        links = self._links
        return float((sent_PP * (links.across if max(links.nodes) else links.inside)).sum())

    @cached_property
    def _even_s(self) -> float:
        """Seconds of one unit of an even buffer, by the rates of links."""
        even = ClusterConfig.all_to_all(self.cluster, self.work.span(Group.EXPERT))
        return even.beta_s_per_byte

    @cached_property
    def _links(self) -> Links:
        return links_of(self.work, self.cluster, range(self.work.world_size))
