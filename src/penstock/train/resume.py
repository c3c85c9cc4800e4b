"""Finds the checkpoint from which a run continues: the newest one that is whole, if its settings fit.

All of this is decided before anything is measured or written, and by all ranks together. A continued run may
change settings that train the model, but not those that make it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from penstock.checkpoint.folder import RECORD, all_checkpoints, step_of
from penstock.checkpoint.storage import DamagedCheckpointError
from penstock.config import UNSET, ConfigError, from_dict, to_dict
from penstock.config.bounds import by_key
from penstock.models import ModelConfig
from penstock.models.config import value_of
from penstock.models.qwen3_moe import CONFIG
from penstock.moe import MoEConfig
from penstock.topology import Control
from penstock.train.checkpoint import Checkpoints, verify
from penstock.train.config import IF_PRESENT, RunConfig
from penstock.train.pilot import Resumption

MAY_CHANGE: Final[Mapping[str, str]] = {
    "model.preset": "the sizes that it stands for are compared one by one",
    "model.config": "the sizes that it stands for are compared one by one",
    "model.dropout": "regularises training, and is not there in evaluation",
    "moe.permutation": "another way to compute the same",
    "moe.dispatch": "another way to compute the same",
    "moe.one_copy_per_rank": "another way to compute the same",
    "moe.bound_factor": "another way to compute the same",
    "moe.comm_dtype": "rounds rows in transit, as train.precision rounds products",
    "moe.aux_loss_coeff": "weighs a term of the loss",
    "moe.aux_loss_group": "chooses a term of the loss",
    "moe.z_loss_coeff": "weighs a term of the loss",
    "moe.expert_bias_rate": "a learning rate; where it becomes 0, or is 0 no more, the missing bias is named",
}
"""Fields of sections [model] and [moe] that do not change what the trained parameters compute, and why. All
others, including those that are added later, must be as they were."""

SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("num_layers", "hidden_size", "num_heads", "seq_len", "vocab_size"),
    "moe": ("num_experts", "top_k"),
}
"""Settings that every version has written; a default in their place would make another model."""

OF_FILE: Final = "model.config_sha256"
"""The setting that stands for all that a model's own file says."""

UNSAID: Final = ("train.resume", "output.", "metrics.", "parallel.processes")
"""Settings whose changes are not reported here; for processes, those that ran are compared instead."""

MOST_SHOWN: Final = 60


def check_model(config: RunConfig, settings: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for the first setting that would change the function of the saved parameters."""
    check_sizes_given(settings, path)
    for section, now in (("model", config.model), ("moe", config.moe)):
        try:
            then: ModelConfig | MoEConfig = from_dict(type(now), settings[section], section)
        except ConfigError as error:
            why = f"{path} was made by another version of Penstock, with settings that this one does not know"
            hint = "Continue with that version."
            raise ConfigError("train.resume", True, f"{why} ({error})", hint) from error
        for field in fields(now):
            key = f"{section}.{field.name}"
            if key == OF_FILE and getattr(then, field.name) != getattr(now, field.name):
                file = config.model.config
                why = f"describes another model, and {path} was trained with its own: they would compute "
                why += "something else"
                hint = f"Give the file with which the run began, or a copy of {path / CONFIG} outside of "
                hint += "output.dir."
                raise ConfigError("model.config", UNSET if file is None else str(file), why, hint)
            if key not in MAY_CHANGE and value_of(then, field.name) != value_of(now, field.name):
                was, value = _shown(getattr(then, field.name)), getattr(now, field.name)
                why = f"{path} was trained with {was}; its parameters would compute something else"
                hint = f"Use {key}={was.replace(' ', '')}, or start a new run in another output.dir."
                raise ConfigError(key, list(value) if isinstance(value, tuple) else value, why, hint)


def check_sizes_given(settings: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError if a checkpoint's settings lack a size of the model.

    Args:
        settings: All settings of the checkpoint.
        path: Its folder.
    """
    for section, names in SIZES.items():
        table = settings.get(section)
        for name in names:
            if not isinstance(table, Mapping) or name not in table:
                key, why = f"{path / RECORD}: settings.{section}.{name}", "without it the model is not known"
                raise ConfigError(key, UNSET, f"is missing, and {why}", "Use another checkpoint.")


def changes(config: RunConfig, settings: Mapping[str, Any]) -> list[str]:
    """Return what differs from the settings of a checkpoint, such as `optimizer.lr 0.003 -> 0.001`."""
    before, now = by_key(RunConfig, settings), by_key(RunConfig, to_dict(config))
    return [
        f"{key} {_shown(before[key])} -> {_shown(value)}"
        for key, value in now.items()
        if not key.startswith(UNSAID) and key in before and before[key] != value
    ]


def _shown(value: object) -> str:
    if value is None:
        return "none"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


logger = logging.getLogger(__name__)


class RunCompleteError(RuntimeError):
    """The run that is to be continued has done all its steps, which is no failure. Raised on all ranks.

    Attributes:
        steps: How many steps these are.
        path: The checkpoint of the last one.
    """

    def __init__(self, steps: int, path: Path) -> None:
        more = f"set train.steps to more than {steps} to train further"
        super().__init__(f"step {steps} of {steps} is done and saved in {path}; {more}")
        self.steps, self.path = steps, path


def checkpoints_folder(config: RunConfig) -> Path:
    """Return the folder in which a run keeps its checkpoints."""
    return config.output.dir / "checkpoints"


def _saved(config: RunConfig) -> list[Path]:
    """Return the checkpoints of a run, also those that turn out not to be whole: none is left out unsaid."""
    folder = checkpoints_folder(config)
    try:
        return all_checkpoints(folder)
    except OSError as error:
        why = f"{folder}, where checkpoints are, cannot be read ({error.strerror})"
        hint = "Make it readable, or choose another output.dir."
        raise ConfigError("output.dir", str(config.output.dir), why, hint) from error


def require_checkpoint(config: RunConfig) -> None:
    """Raise ConfigError if the run is to be continued and there is nothing to continue."""
    if config.train.resume is True and not _saved(config):
        folder = checkpoints_folder(config)
        hint = f"Check output.dir, or use train.resume={IF_PRESENT} to start afresh where there is none."
        raise ConfigError("train.resume", True, f"{folder} contains no checkpoint to continue from", hint)


def find_resumption(config: RunConfig, control: Control) -> Resumption | None:
    """Return the checkpoint to continue from; None for a run that starts afresh. All ranks call it.

    Raises:
        ConfigError: If a required checkpoint is missing, if none can be used, or if the run was another.
        RunCompleteError: If there is no step left to do.
    """
    if config.train.resume is False:
        return None
    # What rank 0 sees counts: another rank may see a folder a moment earlier or later.
    purpose = "looking for checkpoints"
    paths = control.decided(lambda: _saved(config), purpose)
    if not paths:
        require_checkpoint(config)
        logger.info(f"{checkpoints_folder(config)} contains no checkpoint: starting from the beginning")
        return None
    return _newest_whole(config, control, tuple(reversed(paths)), ())


def restore(config: RunConfig, control: Control, checkpoints: Checkpoints, resumption: Resumption) -> int:
    """Load the checkpoint, or an older one if it turns out to be damaged; return the steps already done.

    Args:
        checkpoints: The checkpoints of this run, which hold the stack to load into.
        resumption: The checkpoint to load, with older ones.
    """
    while True:
        try:
            done = checkpoints.load(resumption.path, verified=True)
        except DamagedCheckpointError as error:
            logger.info(f"{error}: trying the previous checkpoint")
            damaged = (*resumption.damaged, resumption.path)
            resumption = _newest_whole(config, control, resumption.older, damaged)
            continue
        for path in resumption.damaged:
            checkpoints.set_aside(path)
            logger.info(f"{path} is damaged; it was renamed to damaged-{path.name}")
        logger.info(f"continuing from {resumption.path}")
        return done


def _newest_whole(
    config: RunConfig, control: Control, candidates: tuple[Path, ...], damaged: tuple[Path, ...]
) -> Resumption:
    """Return the first candidate that is whole; report what has changed since."""
    for number, path in enumerate(candidates):
        try:
            record = verify(path, control)
        except DamagedCheckpointError as error:
            logger.info(f"{error}: trying the previous checkpoint")
            damaged = (*damaged, path)
            continue
        steps = config.train.steps
        if (done := step_of(path)) > steps:
            why = f"{path} has already done {done} steps"
            raise ConfigError("train.steps", steps, why, f"Use more than {done}.")
        if record.settings is not None:
            check_model(config, record.settings, path)
            differences = changes(config, record.settings)
            if record.processes != control.world_size:
                differences.append(f"processes {record.processes} -> {control.world_size}")
            if differences:
                logger.info(f"changed since {path.name}: {'; '.join(differences)}")
        if done == steps:
            raise RunCompleteError(steps, path)
        return Resumption(path=path, record=record, older=candidates[number + 1 :], damaged=damaged)
    folder = checkpoints_folder(config)
    why = f"none of the checkpoints in {folder} can be used ({', '.join(path.name for path in damaged)})"
    hint = "Restore one from a copy, or start a new run in another output.dir."
    raise ConfigError("train.resume", config.train.resume, why, hint)
