"""The step as data: the plainest one, and the passes of the core that rewrite it. Pure Python: no torch."""

from penstock.step.shape import Sharing, StepShape
from penstock.step.stages import Pass, Stage, apply

__all__ = ["Pass", "Sharing", "Stage", "StepShape", "apply"]
