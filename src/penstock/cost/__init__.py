"""`cost(task)` in seconds: the only package that knows durations. No torch."""

from penstock.cost.cluster import AlphaBeta, ClusterConfig
from penstock.cost.cluster_file import ClusterFile
from penstock.cost.measured import MeasuredCost
from penstock.cost.profiled import ProfiledCluster
from penstock.cost.routed import RoutedCost, routing_sizes
from penstock.cost.span import Span
from penstock.cost.step import StepCost, UnevenRanks, slowed
from penstock.cost.workload import Attention, HeldBytes, StateTypes, Workload

__all__ = [
    "AlphaBeta",
    "Attention",
    "ClusterConfig",
    "ClusterFile",
    "HeldBytes",
    "MeasuredCost",
    "ProfiledCluster",
    "RoutedCost",
    "Span",
    "StateTypes",
    "StepCost",
    "UnevenRanks",
    "Workload",
    "routing_sizes",
    "slowed",
]
