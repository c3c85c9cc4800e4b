"""Finds the checkpoint from which a run continues: the newest one that is whole, if its settings fit.

All of this is decided before anything is measured or written, and by all ranks together.
"""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.checkpoint.folder import Record, all_checkpoints, step_of
from penstock.checkpoint.storage import DamagedCheckpointError
from penstock.config import ConfigError
from penstock.topology import Control
from penstock.train.checkpoint import Checkpoints, verify
from penstock.train.config import IF_PRESENT, RunConfig
from penstock.train.pilot import Resumption
from penstock.train.resume_settings import changes, check_model

logger = logging.getLogger(__name__)


def checkpoints_folder(config: RunConfig) -> Path:
    """Return the folder in which a run keeps its checkpoints."""
    return config.output.dir / "checkpoints"


def _saved(config: RunConfig) -> list[Path]:
    """Return the checkpoints of a run, also those that turn out not to be whole: none is left out unsaid.

    Raises ConfigError where their folder cannot be read.
    """
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

    Raises ConfigError if a required checkpoint is missing, if none can be used, or if the run was another.
    """
    if config.train.resume is False:
        return None
    # What rank 0 sees counts: another rank may see a folder a moment earlier or later.
    mine, purpose = list[Path](), "looking for checkpoints"
    control.agreed(lambda: mine.extend(_saved(config)), purpose, by=0)
    found = control.gather(mine, purpose)[0]
    if not found:
        require_checkpoint(config)
        logger.info(f"{checkpoints_folder(config)} contains no checkpoint: starting from the beginning")
        return None
    return _newest_whole(config, control, tuple(reversed(found)), ())


def restore(config: RunConfig, control: Control, checkpoints: Checkpoints, resumption: Resumption) -> int:
    """Load the checkpoint, or an older one if it turns out to be damaged; return the steps already done."""
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
    for number, path in enumerate(candidates):
        try:
            record = verify(path, control)
        except DamagedCheckpointError as error:
            logger.info(f"{error}: trying the previous checkpoint")
            damaged = (*damaged, path)
            continue
        _check(config, control, record, path)
        return Resumption(path=path, record=record, older=candidates[number + 1 :], damaged=damaged)
    folder = checkpoints_folder(config)
    why = f"none of the checkpoints in {folder} can be used ({', '.join(path.name for path in damaged)})"
    hint = "Restore one from a copy, or start a new run in another output.dir."
    raise ConfigError("train.resume", config.train.resume, why, hint)


def _check(config: RunConfig, control: Control, record: Record, path: Path) -> None:
    """Raise ConfigError for another model and for a run that is over; report what else has changed."""
    steps = config.train.steps
    if (done := step_of(path)) >= steps:
        why = f"{path} has already done {done} steps"
        raise ConfigError("train.steps", steps, why, f"Use more than {done}.")
    if record.settings is None:
        return
    check_model(config, record.settings, path)
    found = changes(config, record.settings)
    if record.processes != control.world_size:
        found.append(f"processes {record.processes} -> {control.world_size}")
    if found:
        logger.info(f"changed since {path.name}: {'; '.join(found)}")
