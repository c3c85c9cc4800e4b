"""The engine: runs a schedule with real tensors, threads and transfers."""

from penstock.runtime.errors import ScheduleMismatchError, TaskError
from penstock.runtime.parts import BlockParts, ModelParts, SampleKeys
from penstock.runtime.stack import Machinery, PipelinedStack
from penstock.runtime.statistics import StepStatistics

__all__ = [
    "BlockParts",
    "Machinery",
    "ModelParts",
    "PipelinedStack",
    "SampleKeys",
    "ScheduleMismatchError",
    "StepStatistics",
    "TaskError",
]
