"""Weights & Biases as one more place for metrics. The package is imported only where it is requested."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from penstock.config import ConfigError, check_bounds, check_no_link, is_missing, read_text
from penstock.config.bounds import Name
from penstock.train.curves import WeightsAndBiases
from penstock.writing import write_whole

Mode = Literal[True, False, "offline"]
ID_FILE: Final = "wandb-id.txt"
MOST_ID_BYTES: Final = 1 << 10
HINT: Final = "Move it away: the run then begins another one at Weights & Biases."
INSTALL: Final = "Install it: pip install 'penstock[wandb]'. Or leave metrics.wandb out."


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Section `[metrics]`: where metrics go beside the run's own files.

    wandb: to Weights & Biases: true = to its server, "offline" = into the run's folder, from where
    `wandb sync` sends them. wandb_project: under which project.
    """

    wandb: Mode = False
    wandb_project: Name = "penstock"

    def __post_init__(self) -> None:
        check_bounds(self)


def check_wandb(config: MetricsConfig) -> None:
    """Raise ConfigError if the package is requested and missing."""
    if config.wandb and find_spec("wandb") is None:
        why = "needs the package wandb, which is not installed"
        raise ConfigError("metrics.wandb", config.wandb, why, INSTALL)


def open_wandb(
    config: MetricsConfig,
    folder: Path,
    settings: Mapping[str, Any],
    layers: Sequence[int],
    *,
    resumes: bool,
) -> WeightsAndBiases:
    """Open a run named like its folder.

    resumes: whether to continue the run that was logged from that folder. settings: shown beside the curves.
    layers: numbers of the MoE layers. Raises ConfigError where the package refuses, such as without a key.
    """
    check_wandb(config)
    import wandb

    try:
        run = wandb.init(
            project=config.wandb_project,
            name=folder.name,
            id=_id_in(folder, resumes=resumes),
            dir=str(folder),
            resume="allow",
            mode="offline" if config.wandb == "offline" else "online",
            config=dict(settings),
            settings=wandb.Settings(silent=True),
        )
    except wandb.Error as error:
        hint = "Run `wandb login` first, or use metrics.wandb=offline."
        raise ConfigError("metrics.wandb", config.wandb, f"was refused: {error}", hint) from error
    run.define_metric("*", step_metric="step")
    return WeightsAndBiases(run, wandb.Image, layers)


def _id_in(folder: Path, *, resumes: bool) -> str:
    """Return the run's own id, kept in its folder."""
    path = folder / ID_FILE
    if resumes and not is_missing(path):
        check_no_link(path, HINT)
        return read_text(path, str(path), HINT, MOST_ID_BYTES).strip()
    found = secrets.token_hex(4)
    write_whole(path, found + "\n")
    return found
