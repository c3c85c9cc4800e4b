"""The published planners by name: degrees, gradient partitions, and whole choices for a problem."""

from penstock.plan.published.degree import (
    DEGREE_PLANNERS,
    Degree,
    Degrees,
    Linear,
    MoEPart,
    case_times,
    common_degree,
    makespan_s,
    plan_degrees,
)
from penstock.plan.published.durations import Durations
from penstock.plan.published.partition import (
    PARTITION_PLANNERS,
    Backward,
    GapLayer,
    Made,
    PlannedPartition,
    plan_partition,
)
from penstock.plan.published.table import (
    PUBLISHED,
    Planner,
    dense_overlap_choice,
    flowmoe_choice,
    flowmoe_published_choice,
    fsmoe_choice,
    lina_choice,
    pipemoe_choice,
    sequential_choice,
)

__all__ = [
    "DEGREE_PLANNERS",
    "PARTITION_PLANNERS",
    "PUBLISHED",
    "Backward",
    "Degree",
    "Degrees",
    "Durations",
    "GapLayer",
    "Linear",
    "Made",
    "MoEPart",
    "PlannedPartition",
    "Planner",
    "case_times",
    "common_degree",
    "dense_overlap_choice",
    "flowmoe_choice",
    "flowmoe_published_choice",
    "fsmoe_choice",
    "lina_choice",
    "makespan_s",
    "pipemoe_choice",
    "plan_degrees",
    "plan_partition",
    "sequential_choice",
]
