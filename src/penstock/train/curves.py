"""Where the metrics of a run go: its own file, and as curves TensorBoard events and Weights & Biases."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from penstock.config import ConfigError, check_no_link, is_missing, read_text, to_dict
from penstock.extras import is_there
from penstock.train.config import MetricsConfig, RunConfig
from penstock.train.metrics import BY_LAYER, JsonLines, MetricsLog, Picture, StepMetrics
from penstock.writing import write_whole

TENSORBOARD_FOLDER: Final = "tensorboard"
HEAT_MAP: Final = "moe/loads"
ID_FILE: Final = "wandb-id.txt"
MOST_ID_BYTES: Final = 1 << 10
HINT: Final = "Move it away: the run then begins another one at Weights & Biases."
AUX_LOSSES: Final = ("aux_loss_global", "aux_loss_sequence", "aux_loss_microbatch")
PLACES: Final = {
    "speed": ("iteration_s", "tokens_per_s", "compute_s", "model_flops_per_s", "model_flops_utilisation"),
    "network": ("communication_s", "exposed_communication_s"),
    "moe": ("tokens_per_expert_max_over_mean", "z_loss", *AUX_LOSSES),
}
"""Metrics whose curves have their names, by place."""


class TensorBoard:
    """Writes TensorBoard events; events of steps after `resume_step`, left by a killed run, are hidden.

    layers: numbers of the MoE layers, in the order in which metrics have them.
    """

    def __init__(self, folder: Path, resume_step: int, layers: Sequence[int]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

        self._layers, self.path = layers, folder / TENSORBOARD_FOLDER
        self._open = partial(SummaryWriter, str(self.path), flush_secs=10)
        self._events = self._open(purge_step=resume_step + 1)
        self._folder = self.path.stat()

    def write(self, metrics: StepMetrics) -> None:
        for tag, value in curves(metrics, self._layers).items():
            self._events.add_scalar(tag, value, metrics.step)

    def draw(self, step: int, picture: Picture) -> None:
        self._events.add_image(HEAT_MAP, picture, step, dataformats="HWC")

    @property
    def is_there(self) -> bool:
        """Whether the folder of the events is the one that was opened."""
        try:
            return os.path.samestat(self.path.stat(), self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def renew(self) -> None:
        """Go on in a new file; events of earlier steps are gone with their folder."""
        self._events.close()
        self._events = self._open()
        self._folder = self.path.stat()

    def close(self) -> None:
        self._events.close()


class WeightsAndBiases:
    """Writes the curves to a run of Weights & Biases.

    Every step is one entry, placed by its number `step`: steps that were repeated after a resumption stand
    where they belong. run: of the package wandb. image: converts a picture into what wandb displays.
    """

    def __init__(self, run: Any, image: Callable[[Picture], Any], layers: Sequence[int]) -> None:
        self._run, self._image, self._layers = run, image, layers
        self.close = run.finish

    def write(self, metrics: StepMetrics) -> None:
        self._run.log({"step": metrics.step, **curves(metrics, self._layers)})

    def draw(self, step: int, picture: Picture) -> None:
        self._run.log({"step": step, HEAT_MAP: self._image(picture)})


def open_logs(config: RunConfig, layers: Sequence[int], first: int) -> Iterator[MetricsLog]:
    """Open the logs that the settings require, one after the other, on one rank.

    layers: numbers of the MoE layers. first: steps that were done before. Raises ConfigError if one of them
    cannot be opened.
    """
    output = config.output
    yield JsonLines(output.dir, first)
    if output.tensorboard and is_there("tensorboard"):
        yield TensorBoard(output.dir, first, layers)
    if config.metrics.wandb:
        import wandb

        asked, folder = config.metrics, config.output.dir
        try:
            run = wandb.init(
                project=asked.wandb_project,
                entity=asked.wandb_entity,
                name=asked.wandb_name or folder.name,
                tags=asked.wandb_tags or None,
                id=_id_in(folder, resumes=first > 0),
                dir=str(folder),
                resume="allow",
                mode="offline" if asked.wandb == "offline" else "online",
                config=to_dict(config),
                settings=wandb.Settings(silent=True),
            )
        except wandb.Error as error:
            hint = "Run `wandb login` first, or use metrics.wandb=offline."
            raise ConfigError("metrics.wandb", asked.wandb, f"was refused: {error}", hint) from error
        run.define_metric("*", step_metric="step")
        yield WeightsAndBiases(run, wandb.Image, layers)


def check_wandb(config: MetricsConfig) -> None:
    """Raise ConfigError if the package is requested and missing."""
    if config.wandb and not is_there("wandb"):
        why = "needs the package wandb, which is not installed"
        hint = "Install it: pip install 'penstock[wandb]'. Or leave metrics.wandb out."
        raise ConfigError("metrics.wandb", config.wandb, why, hint)


def _id_in(folder: Path, *, resumes: bool) -> str:
    """Return the run's own id, kept in its folder; a run that resumes continues the one logged from there."""
    path = folder / ID_FILE
    if resumes and not is_missing(path):
        check_no_link(path, HINT)
        return read_text(path, str(path), HINT, MOST_ID_BYTES).strip()
    found = secrets.token_hex(4)
    write_whole(path, found + "\n")
    return found


def curves(metrics: StepMetrics, layers: Sequence[int]) -> Mapping[str, float]:
    """Return the value of each curve that has one. layers: numbers of the MoE layers."""
    found: dict[str, float | None] = {
        "loss/train": metrics.loss,
        "loss/eval": metrics.eval_loss,
        "loss/total": metrics.total_loss,
        "optimizer/learning_rate": metrics.learning_rate,
        "optimizer/grad_norm": metrics.grad_norm,
        "network/hidden_communication": metrics.hidden_communication,
        "memory/peak_bytes": metrics.peak_memory_bytes,
    }
    for place, names in PLACES.items():
        found |= {f"{place}/{name}": getattr(metrics, name) for name in names}
    for name in BY_LAYER:
        values = getattr(metrics, name)
        if values:
            found[f"moe/{name}"] = fmean(values)
            found |= {f"layers/{name}/L{layer}": v for layer, v in zip(layers, values, strict=True)}
    return {name: value for name, value in found.items() if value is not None}
