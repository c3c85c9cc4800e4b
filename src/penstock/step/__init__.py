"""The step as data: the plainest one, and the passes of the core that rewrite it. No torch."""

from penstock.step.rewrite import Pass, Stage
from penstock.step.shape import Sharing, StepShape

__all__ = ["Pass", "Sharing", "Stage", "StepShape"]
