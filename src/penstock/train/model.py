"""The model of a run on this rank, as the training loop has it, and what builds one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.families.described import GENERATION, read_table
from penstock.models.qwen3_moe import CONFIG, config_json, lack_of
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.features.expert_replicas.manager import ExpertMoving
from penstock.schedule import StepPlan
from penstock.train.assemble import build_stack
from penstock.train.config import RunConfig
from penstock.train.run_state import DecoderNaming, Naming

Files = Mapping[str, Mapping[str, Any]]
"""JSON files by which transformers knows a model, by name; none where it knows no such model."""


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """The model of a run.

    Attributes:
        stack: The stack that runs its steps.
        naming: Returns how checkpoints name the tensors of the model.
        files: Returns, for the sha256 of the tokenizer of the run's text, the JSON files of a checkpoint that
            make it a folder of transformers.
        repeats_late: Whether a step may be found only after its backward pass to have to run again, which
            spares a GPU's host a wait.
    """

    stack: PipelinedStack
    naming: Callable[[nn.Module], Naming]
    files: Callable[[str | None], Files]
    repeats_late: bool


MakeModel = Callable[..., RunModel]
"""Builds the model of a run, with its first plan, as `decoder_of` does; all ranks call it together."""


def decoder_of(
    config: RunConfig,
    machinery: Machinery,
    *,
    plan: StepPlan | None,
    moving: ExpertMoving | None,
    begins: bool,
) -> RunModel:
    """Return Penstock's own decoder as the model of a run.

    Args:
        plan, moving, begins: As for `build_stack`.
    """

    def files(tokenizer: str | None) -> Files:
        if lack_of(config.moe) is not None:
            return {}
        like = config.model.config
        made = {CONFIG: config_json(config.model, config.moe, tokenizer_digest=tokenizer, like=like)}
        if like is not None and (generation := like / GENERATION).is_file():
            made[GENERATION] = read_table(generation)
        return made

    stack = build_stack(config, machinery, plan=plan, moving=moving, begins=begins)
    return RunModel(stack=stack, naming=DecoderNaming, files=files, repeats_late=True)
