"""Which samples and experts move where: assignment of samples to devices, planners of replicas. No torch."""

from penstock.placing.experts import PLANNERS, Planner, find_planner, overlap, pays, planning_s
from penstock.placing.model import LayerLoad, LayerSeconds, copies_of, layer_seconds
from penstock.placing.prediction import ConditionalTable
from penstock.placing.problem import ExpertCosts, ExpertProblem, Links, Slack
from penstock.placing.rows import Nearness, SampleProblem, sample_problem
from penstock.placing.samples import assign
from penstock.placing.transport import SOLVERS, find_solver, prepare

__all__ = [
    "PLANNERS",
    "SOLVERS",
    "ConditionalTable",
    "ExpertCosts",
    "ExpertProblem",
    "LayerLoad",
    "LayerSeconds",
    "Links",
    "Nearness",
    "Planner",
    "SampleProblem",
    "Slack",
    "assign",
    "copies_of",
    "find_planner",
    "find_solver",
    "layer_seconds",
    "overlap",
    "pays",
    "planning_s",
    "prepare",
    "sample_problem",
]
