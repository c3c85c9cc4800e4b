"""The engine: runs a schedule with real tensors, threads and transfers."""

from penstock.runtime.clip import clip_grad_norm_
from penstock.runtime.consistency import ScheduleMismatchError
from penstock.runtime.executor import TaskError
from penstock.runtime.expert_parallel.exchange import ExpertParallel, expert_parameters, ignore_experts
from penstock.runtime.features.sharded_optimizer.adamw import ShardedAdamW
from penstock.runtime.fingerprints import ParameterMismatchError
from penstock.runtime.handlers import Inputs, Outputs, StepContext, handles
from penstock.runtime.machinery import Machinery
from penstock.runtime.parts import BlockParts, ModelParts
from penstock.runtime.stack import PipelinedStack
from penstock.runtime.statistics import StepStatistics

__all__ = [
    "BlockParts",
    "ExpertParallel",
    "Inputs",
    "Machinery",
    "ModelParts",
    "Outputs",
    "ParameterMismatchError",
    "PipelinedStack",
    "ScheduleMismatchError",
    "ShardedAdamW",
    "StepContext",
    "StepStatistics",
    "TaskError",
    "clip_grad_norm_",
    "expert_parameters",
    "handles",
    "ignore_experts",
]
