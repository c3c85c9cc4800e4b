"""Ranks: how a process joins the others, and which ranks form which group."""

from penstock.topology.control import CommunicationError, Control, find_node_size
from penstock.topology.groups import INTER_GROUPS, Layout, ParallelConfig, lane_groups
from penstock.topology.join import ProcessInfo, detect, join, leave

__all__ = [
    "INTER_GROUPS",
    "CommunicationError",
    "Control",
    "Layout",
    "ParallelConfig",
    "ProcessInfo",
    "detect",
    "find_node_size",
    "join",
    "lane_groups",
    "leave",
]
