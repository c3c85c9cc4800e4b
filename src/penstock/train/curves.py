"""Where the curves of a run are written in addition to its own file: TensorBoard events, Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from penstock.train.metrics import BY_LAYER, OPTIONAL, StepMetrics

TENSORBOARD_FOLDER: Final = "tensorboard"
HEAT_MAP: Final = "moe/loads"
Picture = npt.NDArray[np.uint8]


class ScalarLog(Protocol):
    """A place to which curves are written."""

    def write(self, metrics: StepMetrics) -> None: ...

    def draw(self, step: int, picture: Picture) -> None:
        """Show loads as colours, [height, width, 3]."""

    def close(self) -> None: ...


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


class WandbRun(Protocol):
    """The methods that are used of a run of the package wandb."""

    def log(self, data: dict[str, Any]) -> None: ...

    def finish(self) -> None: ...


class WeightsAndBiases:
    """Writes the curves to a run of Weights & Biases.

    Every step is one entry, placed by its number `step`: steps that were repeated after a resumption stand
    where they belong. image: converts a picture into what wandb displays.
    """

    def __init__(self, run: WandbRun, image: Callable[[Picture], Any], layers: Sequence[int]) -> None:
        self._run, self._image, self._layers = run, image, layers

    def write(self, metrics: StepMetrics) -> None:
        self._run.log({"step": metrics.step, **curves(metrics, self._layers)})

    def draw(self, step: int, picture: Picture) -> None:
        self._run.log({"step": step, HEAT_MAP: self._image(picture)})

    def close(self) -> None:
        self._run.finish()


def curves(metrics: StepMetrics, layers: Sequence[int]) -> Mapping[str, float]:
    """Return the value of each curve that has one. layers: numbers of the MoE layers."""
    found = {
        "loss/train": metrics.loss,
        "optimizer/learning_rate": metrics.learning_rate,
        "optimizer/grad_norm": metrics.grad_norm,
        "speed/iteration_s": metrics.iteration_s,
        "speed/tokens_per_s": metrics.tokens_per_s,
        "network/communication_s": metrics.communication_s,
        "network/exposed_communication_s": metrics.exposed_communication_s,
        "network/hidden_communication": metrics.hidden_communication,
        "speed/compute_s": metrics.compute_s,
        "moe/tokens_per_expert_max_over_mean": metrics.tokens_per_expert_max_over_mean,
    }
    optional = {
        "loss/eval": metrics.eval_loss,
        "loss/total": metrics.total_loss,
        "moe/z_loss": metrics.z_loss,
        "speed/model_flops_per_s": metrics.model_flops_per_s,
        "speed/model_flops_utilisation": metrics.model_flops_utilisation,
        "memory/peak_bytes": metrics.peak_memory_bytes,
    }
    optional |= {f"moe/{name}": getattr(metrics, name) for name in OPTIONAL if _is_balance_loss(name)}
    for name in BY_LAYER:
        values = getattr(metrics, name)
        if values:
            optional[f"moe/{name}"] = fmean(values)
            optional |= {f"layers/{name}/L{layer}": v for layer, v in zip(layers, values, strict=True)}
    return found | {name: value for name, value in optional.items() if value is not None}


def _is_balance_loss(name: str) -> bool:
    return name.startswith("aux_loss") and name not in BY_LAYER
