"""A cluster on one machine: nodes made of Linux network namespaces with rate-limited links.

    with Cluster(EmulateConfig(nodes=2, devices=1, inter_rate_bit_per_s=parse_rate("400mbit"))) as cluster:
        subprocess.run(cluster.command(0, ["ping", "-c1", cluster.address(1)]))

What runs in the cluster is real: processes, sockets, TCP. Only the speed of the links is emulated. Needs
Linux, root, and the commands `ip` and `tc`; `check_available` says what is missing.
"""

from penstock.lab.emulate.cluster import Cluster, ClusterState, Owner, clusters, open_cluster, remove_stale
from penstock.lab.emulate.links import (
    EmulateConfig,
    Shape,
    Uplink,
    UplinkBytes,
    format_rate,
    parse_rate,
    parse_shape,
)
from penstock.lab.emulate.system import EmulationError, EmulationUnavailable, check_available

__all__ = [
    "Cluster",
    "ClusterState",
    "EmulateConfig",
    "EmulationError",
    "EmulationUnavailable",
    "Owner",
    "Shape",
    "Uplink",
    "UplinkBytes",
    "check_available",
    "clusters",
    "format_rate",
    "open_cluster",
    "parse_rate",
    "parse_shape",
    "remove_stale",
]
