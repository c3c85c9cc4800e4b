"""Which samples and experts move where: assignment of samples to devices, planners of guests. No torch."""

from penstock.placing.prediction import ConditionalTable
from penstock.placing.rows import Nearness, sample_problem
from penstock.placing.samples import SampleProblem, assign
from penstock.placing.transport import SOLVERS, find_solver, prepare

__all__ = [
    "SOLVERS",
    "ConditionalTable",
    "Nearness",
    "SampleProblem",
    "assign",
    "find_solver",
    "prepare",
    "sample_problem",
]
