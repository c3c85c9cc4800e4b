"""Loads of experts in a training run, in a readable file that is written while training and replayed here.

The file is JSON lines: a header, then one line per step::

    {"format": "penstock routing", "version": 2, "moe_layers": 2, "num_experts": 4, "top_k": 2}
    {"step": 1, "tokens_per_expert": [[12, 4, 9, 7], [8, 8, 8, 8]], "samples": [[[8, 0, ...], ...], ...]}

tokens_per_expert: per MoE layer, how often each expert was chosen in the whole batch of all ranks, before
any drop. samples: tokens_per_expert of every sample, [samples][MoE layers][experts]; it may be missing, and
always is in version 1. Then loads are shared out over samples evenly. Where experts choose tokens, the header
says `"experts_choose": true`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import numpy as np

from penstock.apportion import Counts, apportion
from penstock.config import ConfigError, open_regular, parse_json, shorten
from penstock.config.bounds import MOST_STEPS
from penstock.config.error import shown
from penstock.workloads.routing import RoutingSizes
from penstock.writing import LineFile

FORMAT, VERSION, READ = "penstock routing", 2, (1, 2)
MOST_SIZE, MOST_COUNT = 1 << 16, 1 << 40
MOST_COUNTS, MOST_LINE_BYTES = 1 << 27, 64 << 20
"""Limits of the numbers in a file (a gibibyte in memory) and of a line, which holds the loads of one step."""

KEY, HINT = "recorded", "Give the file that a training run recorded."
"""The setting that names the file, and what to do."""

BEGINNING: Final = re.compile(rb'\{"step": (\d{1,8}), ')
"""The beginning of a line that a `RoutingRecorder` wrote."""

OUT_OF_ORDER: Final = "is step {} after step {}, and steps count up"

WHOLE: Final = "tokens_per_expert"
SIZES: Final = ("moe_layers", "num_experts", "top_k")


@dataclass(frozen=True, kw_only=True)
class RecordedModel:
    """The model that a file's routing fits.

    Attributes:
        experts_choose: Whether experts choose tokens instead of tokens experts: a token may then have any
            number of experts, and an expert may choose several or no tokens of a sample.
    """

    moe_layers: int
    num_experts: int
    top_k: int
    experts_choose: bool = False


@dataclass(frozen=True)
class Recording:
    """A file's content.

    Attributes:
        steps: The numbers of the steps, as counted while training.
        loads_SYE: The loads of experts, int64, [steps, MoE layers, experts].
        samples: The loads of each sample that has any tokens, by step, [samples, MoE layers, experts]; None
            where they are unknown.
    """

    model: RecordedModel
    steps: tuple[int, ...]
    loads_SYE: Counts
    samples: tuple[Counts | None, ...]


Loads = Sequence[Sequence[float]]
"""How often each expert was chosen, [MoE layers][experts]."""


class RoutingRecorder:
    """Writes the loads of each step; a line is in the file before `write` returns. One rank writes.

    The old file stays until the new one is on the disk.

    Args:
        resume_step: The number of steps already done. 0 starts a new file; otherwise lines up to that step
            are kept as they are, so that a run that was killed and continued records no step twice.

    Raises:
        ConfigError: For a line that no recorder wrote, which it names.
    """

    def __init__(self, path: Path, model: RecordedModel, resume_step: int = 0) -> None:
        self._model = model
        described = asdict(model)
        if described.pop("experts_choose"):
            described["experts_choose"] = True  # the last, and only where it is so
        header = _line({"format": FORMAT, "version": VERSION, **described})
        kept = _until(path, resume_step) if resume_step and path.exists() else ()
        self.file = LineFile(path, chain([header], kept))

    def write(self, step: int, tokens_per_expert: Loads, samples: Sequence[Loads] | None = None) -> None:
        """Record one step.

        `StepStatistics.chosen_YE.tolist()` is what a stack has after each step.

        Args:
            tokens_per_expert: How often each expert was chosen, by MoE layer: whole numbers of any type.
            samples: The same for each sample.
        """
        record: dict[str, Any] = {"step": step, WHOLE: self._whole(tokens_per_expert)}
        if samples is not None:
            record["samples"] = [self._whole(sample) for sample in samples]
        self.file.add(_line(record))

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _whole(self, loads: Loads) -> list[list[int]]:
        whole = [[int(count) for count in layer] for layer in loads]
        sizes = {(len(whole), len(layer)) for layer in whole}
        assert sizes == {(self._model.moe_layers, self._model.num_experts)}, "the model has not changed"
        return whole


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record) + "\n").encode()


def _until(path: Path, last: int) -> Iterator[bytes]:
    """Yield the lines of the steps up to `last`, of any length and number, without parsing them."""
    with open_regular(path, KEY, HINT, str(path)) as file:
        file.readline()  # the header
        before: int | None = None
        for number in count(2):
            line = file.readline()
            if not line.endswith(b"\n"):  # the end, or a line that a killed run left unfinished
                return
            match = BEGINNING.match(line)
            if match is None:
                raise _wrong_line(path, number, "is no step that a training run recorded")
            step = int(match[1])
            if before is not None and step <= before:
                raise _wrong_line(path, number, OUT_OF_ORDER.format(step, before))
            before = step
            if step <= last:
                yield line


@dataclass(frozen=True)
class RecordedRouting:
    """Routing of step n as in step n of the recording, which begins again at its end.

    Loads are scaled to this run's number of tokens. Samples are routed as the recorded ones in turn, or else
    each gets its even share of the loads.
    """

    sizes: RoutingSizes
    recording: Recording

    def loads(self, step: int) -> Counts:
        """Return the recorded loads of a step's experts, [MoE layers, experts]."""
        loads_YE: Counts = self.recording.loads_SYE[step % len(self.recording.steps)]
        return loads_YE

    def of_layers(self, layers: Sequence[int]) -> RecordedRouting:
        """Return the routing of some layers alone."""
        kept, whole = list(layers), self.recording
        samples = tuple(None if each is None else each[:, kept] for each in whole.samples)
        model = replace(whole.model, moe_layers=len(kept))
        recording = Recording(model, whole.steps, whole.loads_SYE[:, kept], samples)
        return RecordedRouting(replace(self.sizes, moe_layers=len(kept)), recording)

    def counts(self, step: int) -> Counts:
        """Return token copies; see `Routing.counts`."""
        sizes, turn = self.sizes, step % len(self.recording.steps)
        samples = sizes.groups * sizes.samples
        recorded, loads_YE = self.recording.samples[turn], self.recording.loads_SYE[turn]
        if recorded is not None:
            unused = recorded.sum(axis=-1, keepdims=True) == 0  # no expert chose any of its tokens there
            recorded = np.where(unused, loads_YE, recorded)
            return apportion(recorded[np.arange(samples) % len(recorded)], sizes.copies).reshape(sizes.shape)
        left_YE = apportion(loads_YE, samples * sizes.copies)
        shares = np.empty((samples, *left_YE.shape), dtype=np.int64)
        for sample in range(samples):  # each takes its even share of what earlier samples left
            shares[sample] = apportion(left_YE, sizes.copies)
            left_YE = left_YE - shares[sample]
        return shares.reshape(sizes.shape)


def recorded_routing(path: Path, sizes: RoutingSizes) -> RecordedRouting:
    """Return the routing of the run that wrote `path`.

    Raises:
        ConfigError: If the file is no recording or does not fit.
    """
    recording = read_recording(path)
    wanted = RecordedModel(moe_layers=sizes.moe_layers, num_experts=sizes.num_experts, top_k=sizes.top_k)
    for name in SIZES:
        ours, theirs = getattr(wanted, name), getattr(recording.model, name)
        if theirs != ours:
            why = f"was recorded with {name} = {theirs}, and this model has {ours}"
            raise ConfigError(KEY, str(path), why, "Use the model that was recorded, or record this one.")
    if not recording.steps:
        raise ConfigError(KEY, str(path), "holds no step", "Record at least one.")
    copies = sizes.groups * sizes.samples * sizes.copies
    if copies * int(recording.loads_SYE.max()) >= 2**63:
        why = f"holds loads that cannot be scaled to the {copies} rows of a step here: they are too large"
        raise ConfigError(KEY, str(path), why, "Use a smaller batch, or record a shorter step.")
    return RecordedRouting(sizes, recording)


def read_recording(path: Path) -> Recording:
    """Read a file of `RoutingRecorder`; an unfinished last line, left by a killed run, is dropped.

    Raises:
        ConfigError: For a line that is wrong, which it names.
    """
    with open_regular(path, KEY, HINT, str(path)) as file:
        lines = _lines(path, file)
        _, first = next(lines, (1, b"{}"))
        model = _header(path, _json(path, 1, first))
        steps, loads, samples, held = list[int](), [], list[Counts | None](), 0
        for number, line in lines:
            step, load_YE, of_samples = _step(path, number, _json(path, number, line), model)
            if steps and step <= steps[-1]:
                raise _wrong_line(path, number, OUT_OF_ORDER.format(step, steps[-1]))
            steps.append(step)
            loads.append(load_YE)
            samples.append(of_samples)
            held += load_YE.size + (0 if of_samples is None else of_samples.size)
            if held > MOST_COUNTS:
                raise _wrong_line(
                    path, number, f"is one too many: a recording has at most {MOST_COUNTS} numbers"
                )
    shape = (len(steps), model.moe_layers, model.num_experts)
    return Recording(model, tuple(steps), np.array(loads, dtype=np.int64).reshape(shape), tuple(samples))


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the finished lines, counted from 1; at no time is more than one in memory."""
    for number in count(1):
        try:
            line = file.readline(MOST_LINE_BYTES)
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
            raise ConfigError(KEY, str(path), why, HINT) from error
        if not line.endswith(b"\n"):
            if len(line) == MOST_LINE_BYTES:
                raise _wrong_line(path, number, f"has over {MOST_LINE_BYTES} characters")
            return
        yield number, line


def _json(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise _wrong_line(path, number, f"is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise _wrong_line(path, number, "is not a JSON object")
    return record


def _header(path: Path, record: dict[str, Any]) -> RecordedModel:
    if record.get("format") != FORMAT:
        why = f'is no recorded routing: line 1 does not say "format": "{FORMAT}"'
        raise ConfigError(KEY, str(path), why, HINT)
    if record.get("version") not in READ:
        read = " and ".join(map(str, READ))
        why = f"has version {shown(record.get('version'))} of the format, and versions {read} are read here"
        raise ConfigError(KEY, str(path), why, "Record it again with this version of penstock.")
    sizes: dict[str, Any] = {name: record.get(name) for name in SIZES}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise _wrong_line(path, 1, f"{name} is {shorten(repr(size))} and no positive whole number")
        if size > MOST_SIZE:
            raise _wrong_line(path, 1, f"{name} is {shown(size)}, and no model has over {MOST_SIZE}")
    choose = record.get("experts_choose", False)
    if type(choose) is not bool:
        raise _wrong_line(path, 1, f"experts_choose is {shown(choose)}, and neither true nor false")
    return RecordedModel(**sizes, experts_choose=choose)


Step = tuple[int, Counts, Counts | None]


def _step(path: Path, number: int, record: dict[str, Any], model: RecordedModel) -> Step:
    """Return a step's number, its loads, and those of its samples if they are known."""
    step: Any = record.get("step")
    if type(step) is not int:
        raise _wrong_line(path, number, "has no step number")
    if not 0 <= step <= MOST_STEPS:
        raise _wrong_line(path, number, f"is step {shown(step)}, and steps count from 0 to {MOST_STEPS}")
    loads_YE = _loads(path, number, record.get(WHOLE), model, WHOLE)
    return step, loads_YE, _samples(path, number, record.get("samples"), model, loads_YE)


def _loads(path: Path, number: int, loads: Any, model: RecordedModel, name: str) -> Counts:
    """Return loads, [MoE layers][experts]."""
    if not _is_table(loads, model.moe_layers, model.num_experts):
        shape = f"{model.moe_layers} lists of {model.num_experts} whole numbers"
        raise _wrong_line(path, number, f"has no {name} of {shape}, as line 1 promises")
    for load in loads:
        if sum(load) > MOST_COUNT:
            raise _wrong_line(path, number, f"has over {MOST_COUNT} tokens, more than a batch can have")
        if model.experts_choose:
            if sum(load) == 0 and name == WHOLE:
                raise _wrong_line(path, number, "has a layer whose experts have chosen no token")
        # A token chooses distinct experts, so none has more than one copy of it.
        elif sum(load) == 0 or max(load) * model.top_k > sum(load):
            why = f"has an expert chosen by more tokens than there are: {shorten(str(load))}"
            raise _wrong_line(path, number, why)
    return np.array(loads, dtype=np.int64)


def _samples(path: Path, number: int, samples: Any, model: RecordedModel, loads_YE: Counts) -> Counts | None:
    """Return each sample's loads, [samples, MoE layers, experts], without samples that are padding alone."""
    if samples is None:
        return None
    if not isinstance(samples, list):
        raise _wrong_line(path, number, "has samples that are no list")
    routed = [sample for sample in samples if not _is_padding(sample)]
    loads = [_loads(path, number, sample, model, "samples") for sample in routed]
    if not loads or (np.sum(loads, axis=0) != loads_YE).any():
        raise _wrong_line(path, number, "has samples whose loads do not add up to tokens_per_expert")
    return np.array(loads)


def _is_padding(sample: Any) -> bool:
    """Return whether nothing of a sample was routed."""
    return isinstance(sample, list) and all(isinstance(row, list) and not any(row) for row in sample)


def _is_table(loads: Any, rows: int, columns: int) -> bool:
    return (
        isinstance(loads, list)
        and len(loads) == rows
        and all(isinstance(row, list) and len(row) == columns for row in loads)
        and all(type(count) is int and count >= 0 for row in loads for count in row)
    )


def _wrong_line(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(KEY, str(path), f"line {number} {why}", "Mend or delete the line, or record again.")
