"""The step as data: the plainest one, and the passes that rewrite it. Pure Python: no torch."""

from penstock.step.build import build_graph
from penstock.step.shape import Sharing, StepShape
from penstock.step.stages import Pass, Stage, apply

__all__ = ["Pass", "Sharing", "Stage", "StepShape", "apply", "build_graph"]
