"""What to run: the published planners by name, and a joint search over every choice. No torch."""

from penstock.plan.candidate import Candidate, evaluate
from penstock.plan.explain import Explanation, explain, reasons
from penstock.plan.memory import MemoryEstimate, estimate_memory
from penstock.plan.models import MODELS, PublishedModel
from penstock.plan.plan_file import PlanFile
from penstock.plan.predict import predict_s
from penstock.plan.problem import Problem
from penstock.plan.search import FoundPlan, Progress, find_plan
from penstock.plan.subject import Subject, published_problem

__all__ = [
    "MODELS",
    "Candidate",
    "Explanation",
    "FoundPlan",
    "MemoryEstimate",
    "PlanFile",
    "Problem",
    "Progress",
    "PublishedModel",
    "Subject",
    "estimate_memory",
    "evaluate",
    "explain",
    "find_plan",
    "predict_s",
    "published_problem",
    "reasons",
]
