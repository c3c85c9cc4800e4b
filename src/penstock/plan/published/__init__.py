"""The published planners by name: degrees, gradient partitions, and whole choices for a problem."""

from penstock.plan.published.degree import (
    Backward,
    GapLayer,
    Linear,
    Made,
    MoEPart,
    common_degree,
    makespan_s,
)
from penstock.plan.published.durations import Durations
from penstock.plan.published.parm import algorithm_1, parm_choice
from penstock.plan.published.partition import adaptive, idle_only
from penstock.plan.published.table import (
    PUBLISHED,
    dense_overlap_choice,
    flowmoe_choice,
    flowmoe_published_choice,
    fsmoe_choice,
    lina_choice,
    pipemoe_choice,
    planners,
    sequential_choice,
)

__all__ = [
    "PUBLISHED",
    "Backward",
    "Durations",
    "GapLayer",
    "Linear",
    "Made",
    "MoEPart",
    "adaptive",
    "algorithm_1",
    "common_degree",
    "dense_overlap_choice",
    "flowmoe_choice",
    "flowmoe_published_choice",
    "fsmoe_choice",
    "idle_only",
    "lina_choice",
    "makespan_s",
    "parm_choice",
    "pipemoe_choice",
    "planners",
    "sequential_choice",
]
