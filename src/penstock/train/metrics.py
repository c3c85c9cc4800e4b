"""What a run says about itself: one record per step, kept in files and shown as curves.

::

    StepMetrics -> MetricsWriter     -> every `MetricsLog`: metrics.jsonl, TensorBoard, Weights & Biases
                -> progress.Progress -> a live line on a terminal, plain lines anywhere else
"""

from __future__ import annotations

import math
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, WrapValidator

from penstock.apportion import Counts
from penstock.config import (
    UNSET,
    ConfigError,
    check_no_link,
    is_missing,
    open_regular,
    read_text,
    to_dict,
)
from penstock.config.validate import adapter
from penstock.extras import is_there
from penstock.report.loads import colours
from penstock.train.config import MetricsConfig, RunConfig
from penstock.writing import LineFile, write_whole

METRICS_FILE = "metrics.jsonl"
Picture = npt.NDArray[np.uint8]
WHAT_TO_DO = "Correct or delete the line, or move the file away."
HEAT_MAP_EVERY = 20
"""Steps between two heat maps of loads; TensorBoard shows ten of them, evenly chosen."""


def _number(value: Any, read: Callable[[Any], float]) -> float:
    return math.nan if value is None else read(value)


Number = Annotated[float, Field(allow_inf_nan=False), WrapValidator(_number)]
"""A number as files have it: where it was not finite they have null, as JSON knows no other."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One training step, measured; docs/training.md has a table of what each field means, and how exactly.

    None: the step has no such number. A tuple has one for every MoE layer. Times are those of rank 0, counts
    those of all ranks.
    """

    step: int
    loss: Number
    learning_rate: Number
    grad_norm: Number
    iteration_s: Number
    tokens_per_s: Number
    exposed_communication_s: Number
    communication_s: Number
    compute_s: Number
    tokens_per_expert_max_over_mean: Number
    eval_loss: float | None = None
    eval_noise: float | None = None
    total_loss: float | None = None
    z_loss: float | None = None
    aux_loss_global: float | None = None
    aux_loss_sequence: float | None = None
    aux_loss_microbatch: float | None = None
    plan: str | None = None
    all_reduce_chunk_bytes: int | None = None
    expert_load_max_over_mean: tuple[Number, ...] | None = None
    rank_load_max_over_mean: tuple[Number, ...] | None = None
    rank_rows_max_over_mean: tuple[Number, ...] | None = None
    expert_load_entropy: tuple[Number, ...] | None = None
    loads_in_common: tuple[Number, ...] | None = None
    rows_crossing_nodes: tuple[Number, ...] | None = None
    skipped: bool | None = None
    aux_loss_by_layer: tuple[Number, ...] | None = None
    rows_dropped: tuple[Number, ...] | None = None
    repeated_steps: int | None = None
    resumed: bool | None = None
    model_flops_per_s: float | None = None
    model_flops_utilisation: float | None = None
    peak_memory_bytes: int | None = None

    @property
    def hidden_communication(self) -> float:
        """Share of the communication that ran under computation; 1 when there was none."""
        if self.communication_s == 0:
            return 1.0
        return 1 - self.exposed_communication_s / self.communication_s


BY_LAYER = tuple(field.name for field in fields(StepMetrics) if "tuple" in str(field.type))
"""Fields with a number for every MoE layer."""

MARKS = ("skipped", "resumed")
"""Fields that are true or false."""

OPTIONAL = frozenset(field.name for field in fields(StepMetrics) if field.default is None)
"""Fields that a step may lack."""


# ---------------------------------------------------------------- files


class MetricsLog(Protocol):
    """A place to which metrics are written, step by step."""

    def write(self, metrics: StepMetrics) -> None:
        """Record one step; steps ascend."""

    def draw(self, step: int, picture: Picture) -> None:
        """Show loads of experts as colours, [height, width, 3], if the place has pictures."""

    def close(self) -> None: ...


class JsonLines(LineFile):
    """Appends each step to `metrics.jsonl` in `folder`.

    A line is JSON, and in the file before `write` returns. A number that is not finite is written as null,
    since JSON cannot express it.

    Args:
        resume_step: Number of steps done before; 0 starts a new record. Lines of later steps, left by a run
            that was killed after its last checkpoint, are dropped, so that no step appears twice.

    Raises:
        ConfigError: About the file, if its record cannot be continued.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        path = folder / METRICS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept = [m for m in read_metrics(path) if m.step <= resume_step] if path.exists() else []
            super().__init__(path, (_to_line(metrics) for metrics in kept))
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
            raise ConfigError(str(path), UNSET, why, "Move away what is there, or make room.") from error
        self._last_step = kept[-1].step if kept else 0

    def write(self, metrics: StepMetrics) -> None:
        assert metrics.step > self._last_step, f"step {metrics.step} after step {self._last_step}"
        self.add(_to_line(metrics))
        self._last_step = metrics.step

    def draw(self, step: int, picture: Picture) -> None:
        """Do nothing: the loads have a file of their own."""


class MetricsWriter:
    """Writes to all of a run's logs, and closes them."""

    def __init__(self, *logs: MetricsLog) -> None:
        self.logs = list(logs)

    def write(self, metrics: StepMetrics) -> None:
        """Record one step; steps must ascend."""
        for log in self.logs:
            log.write(metrics)

    def draw(self, step: int, loads_YE: Counts) -> None:
        """Show how often each expert was chosen, by MoE layer, as a heat map, in some of the steps."""
        if step == 1 or step % HEAT_MAP_EVERY == 0:
            picture = colours(loads_YE)
            for log in self.logs:
                log.draw(step, picture)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        for log in self.logs:
            log.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """Return the steps recorded in a `metrics.jsonl`; null reads as NaN, for `eval_loss` as None.

    A last line that a killed run left without its end is dropped.

    Raises:
        ConfigError: Naming file and line, for any other line that is not a step, or whose step does not come
            after the one before.
    """
    with open_regular(path, str(path), "Move it away.") as file:
        lines = file.read().split(b"\n")
    # A whole line ends with a newline, so what follows the last newline is nothing, or a line cut short.
    steps = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            steps.append(adapter(StepMetrics).validate_json(line, strict=True))
        except ValidationError as found:
            first = found.errors(include_url=False)[0]
            why = f"not a training step ({': '.join(map(str, (*first['loc'], first['msg'])))})"
            raise ConfigError(f"{path}, line {number}", UNSET, why, WHAT_TO_DO) from found
    for number, (before, after) in enumerate(pairwise(steps), start=2):
        if after.step <= before.step:
            why = f"is step {after.step} after step {before.step}, and steps count up"
            raise ConfigError(f"{path}, line {number}", UNSET, why, WHAT_TO_DO)
    return steps


def _to_line(metrics: StepMetrics) -> bytes:
    lacking = {name for name in OPTIONAL - {"eval_loss"} if getattr(metrics, name) is None}
    return adapter(StepMetrics).dump_json(metrics, exclude=lacking) + b"\n"


TENSORBOARD_FOLDER: Final = "tensorboard"
EVENTS: Final = "events.out.tfevents."
"""Begins the names of event files; seconds follow, in ten digits."""
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


class TensorBoard(LineFile):
    """Writes TensorBoard events, which are in the file when a method returns.

    Files are read in the order of their names, which begin with the seconds of a clock: where that has gone
    back, the name comes after those of earlier starts all the same.

    Args:
        resume_step: Number of steps done before; events of later steps, left by a killed run, are hidden.
        layers: Numbers of the MoE layers, in the order in which metrics have them.
    """

    def __init__(self, folder: Path, resume_step: int, layers: Sequence[int]) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # takes seconds to import

        self._layers, self._folder = layers, folder / TENSORBOARD_FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        begun_s = [int(time.time())]
        for path in self._folder.glob(f"{EVENTS}*"):
            text = path.name.removeprefix(EVENTS).partition(".")[0]
            begun_s += [1 + int(text)] if text.isdecimal() else []
        name = f"{EVENTS}{max(begun_s):010}.{platform.node()}.{os.getpid()}"
        started = {"session_log": SessionLog(status=SessionLog.START), "step": resume_step + 1}
        super().__init__(self._folder / name, map(_event, ({"file_version": "brain.Event:2"}, started)))

    def write(self, metrics: StepMetrics) -> None:
        values = [{"tag": tag, "simple_value": each} for tag, each in curves(metrics, self._layers).items()]
        self.add(_event({"summary": {"value": values}, "step": metrics.step}))

    def draw(self, step: int, picture: Picture) -> None:
        from torch.utils.tensorboard.summary import image

        self.add(_event({"summary": image(HEAT_MAP, picture, dataformats="HWC"), "step": step}))

    def renew(self) -> None:
        """Make the file again in its folder, with the events of all steps."""
        self._folder.mkdir(parents=True, exist_ok=True)
        super().renew()


def _event(fields: Mapping[str, Any]) -> bytes:
    """Return an event as it stands in a file, with its length and checksums."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return record.getvalue()


class WeightsAndBiases:
    """Writes the curves to a run of Weights & Biases.

    Every step is one entry, placed by its number `step`: steps that were repeated after a resumption stand
    where they belong.

    Args:
        run: A run of the package wandb.
        image: Converts a picture into what wandb displays.
        layers: Numbers of the MoE layers, in the order in which metrics have them.
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

    Args:
        layers: Numbers of the MoE layers.
        first: Number of steps that were done before.

    Raises:
        ConfigError: If one of them cannot be opened.
    """
    output = config.output
    yield JsonLines(output.dir, first)
    if output.tensorboard and is_there("tensorboard"):
        yield TensorBoard(output.dir, first, layers)
    if config.metrics.wandb:
        import wandb

        settings, folder = config.metrics, config.output.dir
        try:
            run = wandb.init(
                project=settings.wandb_project,
                entity=settings.wandb_entity,
                name=settings.wandb_name or folder.name,
                tags=settings.wandb_tags or None,
                id=_id_in(folder, resumes=first > 0),
                dir=str(folder),
                resume="allow",
                mode="offline" if settings.wandb == "offline" else "online",
                config=to_dict(config),
                settings=wandb.Settings(silent=True),
            )
        except wandb.Error as error:
            hint = "Run `wandb login` first, or use metrics.wandb=offline."
            raise ConfigError("metrics.wandb", settings.wandb, f"was refused: {error}", hint) from error
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
    run_id = secrets.token_hex(4)
    write_whole(path, run_id + "\n")
    return run_id


def curves(metrics: StepMetrics, layers: Sequence[int]) -> Mapping[str, float]:
    """Return the value of each curve that has one.

    Args:
        layers: Numbers of the MoE layers.
    """
    by_name: dict[str, float | None] = {
        "loss/train": metrics.loss,
        "loss/eval": metrics.eval_loss,
        "loss/total": metrics.total_loss,
        "optimizer/learning_rate": metrics.learning_rate,
        "optimizer/grad_norm": metrics.grad_norm,
        "network/hidden_communication": metrics.hidden_communication,
        "memory/peak_bytes": metrics.peak_memory_bytes,
    }
    for place, names in PLACES.items():
        by_name |= {f"{place}/{name}": getattr(metrics, name) for name in names}
    for name in BY_LAYER:
        values = getattr(metrics, name)
        if values:
            by_name[f"moe/{name}"] = fmean(values)
            by_name |= {f"layers/{name}/L{layer}": v for layer, v in zip(layers, values, strict=True)}
    return {name: value for name, value in by_name.items() if value is not None}
