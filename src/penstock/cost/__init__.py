"""`cost(task)`: seconds. The only place that knows a duration. Pure Python: no torch."""

from penstock.cost.cluster import AlphaBeta, ClusterConfig
from penstock.cost.fitted import FittedCluster
from penstock.cost.measured import MeasuredCost
from penstock.cost.step import StepCost
from penstock.cost.workload import Workload, split_sizes

__all__ = [
    "AlphaBeta",
    "ClusterConfig",
    "FittedCluster",
    "MeasuredCost",
    "StepCost",
    "Workload",
    "split_sizes",
]
