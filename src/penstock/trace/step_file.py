"""`step.json`: the last step of a run, task by task, beside what its plan had predicted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from penstock.config import (
    Checked,
    ConfigError,
    Items,
    Within,
    check_bounds,
    check_name,
    from_dict,
    read_json,
    to_dict,
)
from penstock.config.bounds import MOST_RANKS
from penstock.graph import Lane, Name, ScheduleError
from penstock.trace.analysis import Straggler
from penstock.writing import write_whole

STEP_FILE: Final = "step.json"
VERSION: Final = 1
MOST_SHOWN: Final = 8
"""Most ranks whose timelines are kept: more make a large file, and nobody looks at them one by one."""
MOST_TASKS: Final = 1_000_000

REMOVE: Final = "Move the file away: the report then leaves out what it holds."
Seconds = Annotated[float, Within(0, 1e9, "it is a moment of a step", hint=REMOVE)]
Rank = Annotated[int, Within(0, MOST_RANKS, "ranks count up from 0", hint=REMOVE)]
Row = Annotated[tuple[Seconds, ...], Items(MOST_TASKS, "one per task")]
Rows = Annotated[tuple[Row, ...], Items(2 * MOST_SHOWN, "one per rank")]


@dataclass(frozen=True, kw_only=True)
class Spans(Checked):
    """When every task ran, on every rank that is shown. Seconds from the start of the step."""

    start_s: Rows
    end_s: Rows


@dataclass(frozen=True, kw_only=True)
class PathLink(Checked):
    """A task of the critical path; see `trace.analysis.Link`."""

    task: str
    lane: str
    rank: Rank
    start_s: Seconds
    end_s: Seconds
    gap_s: Seconds


@dataclass(frozen=True, kw_only=True)
class StepFile:
    """The last step of a run.

    Attributes:
        step: The number of the step.
        ranks: The number of ranks of the run.
        nodes: On how many nodes they are; 1 where that is not known.
        shown: The ranks that have timelines.
        source: What predictions are made from, as text; "" without a prediction.
        predicted_s, measured_s: The seconds of a step; the measured ones are the median of the last
            `typical_steps` on the slowest rank.
        bound_s: The seconds that no order of the same tasks beats with the durations that they had in the
            last `traced_steps`.
        tasks, lanes: The name and the lane of every task.
        predicted, measured: When each task ran. The predicted numbers are None where nobody knew the cluster.
        typical_predicted_s, typical_measured_s: How long each task takes, measured by its median over
            `typical_steps` steps: for computation the mean over ranks; for a transfer the rank that waited
            least. () without a prediction.
        first_step: The first of the `typical_steps`, which lie apart where GPUs time some steps only; None in
            older files.
        traced_s: The seconds of a step in the last `traced_steps`; None in older files, where `measured_s` is
            that.
        path: The measured critical path.
        stragglers: The ranks that computed slowly in these steps; older files have none.
    """

    version: Annotated[int, Within(0, 2**62, "versions count up from 1")] = VERSION
    step: Annotated[int, Within(0, 2**62, "steps count up from 1")]
    ranks: Rank
    nodes: Rank = 1
    shown: Annotated[tuple[Rank, ...], Items(2 * MOST_SHOWN, "some ranks are shown")]
    source: str = ""
    predicted_s: Seconds | None = None
    measured_s: Seconds
    bound_s: Seconds
    typical_steps: Annotated[int, Within(1, 2**62, "there was a step")]
    first_step: Annotated[int, Within(0, 2**62, "steps count up from 1")] | None = None
    tasks: Annotated[tuple[str, ...], Items(MOST_TASKS, "one per task")]
    lanes: Annotated[tuple[str, ...], Items(MOST_TASKS, "one per task")]
    predicted: Spans | None = None
    measured: Spans
    typical_predicted_s: Row = ()
    typical_measured_s: Row
    path: Annotated[tuple[PathLink, ...], Items(MOST_TASKS, "one per task")]
    traced_s: Seconds | None = None
    traced_steps: Annotated[int, Within(1, 2**62, "a step was traced")] | None = None
    stragglers: Annotated[tuple[Straggler, ...], Items(MOST_RANKS, "they are some of the ranks")] = ()

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError("version", self.version, "is a version that cannot be read here", REMOVE)
        check_bounds(self)
        runs = {"measured": self.measured}
        if self.predicted is not None:
            runs["predicted"] = self.predicted
        for name in ("lanes", *(f"typical_{run}_s" for run in runs)):
            self._check_length(name, len(getattr(self, name)), len(self.tasks), "task")
        for name, spans in runs.items():
            for end in ("start_s", "end_s"):
                rows = getattr(spans, end)
                self._check_length(f"{name}.{end}", len(rows), len(self.shown), "rank that is shown")
                for row in rows:
                    self._check_length(f"{name}.{end}", len(row), len(self.tasks), "task")
        for lane in {*self.lanes, *(link.lane for link in self.path)}:
            check_name("lanes", lane, Lane)
        for task in (*self.tasks, *(link.task for link in self.path)):
            try:
                Name.parse(task)
            except ScheduleError as error:
                raise ConfigError("tasks", task, f"names no task: {error}", REMOVE) from error

    @property
    def efficiency(self) -> float | None:
        """How near the traced steps came to their bound; None = they took no time."""
        traced_s = self.measured_s if self.traced_s is None else self.traced_s
        return self.bound_s / traced_s if traced_s > 0 else None

    @property
    def apart(self) -> bool:
        """Whether steps that were not timed lie between the timed ones."""
        return self.first_step is not None and self.step - self.first_step >= self.typical_steps

    @staticmethod
    def _check_length(key: str, found: int, wanted: int, of: str) -> None:
        if found != wanted:
            raise ConfigError(key, f"{found} items", f"needs one for every {of} ({wanted})", REMOVE)

    def save(self, folder: Path) -> None:
        """Write the file into a folder; a half-written file never replaces a whole one."""
        write_json(folder / STEP_FILE, to_dict(self))

    @staticmethod
    def read(path: Path) -> StepFile:
        """Read a file.

        Raises:
            ConfigError: For a file that cannot be used; it names file and key.
        """
        return from_dict(StepFile, read_json(path, REMOVE), str(path))


def write_json(path: Path, plain: object) -> None:
    """Write JSON on one line, since it is long and meant for programs."""
    write_whole(path, json.dumps(plain, separators=(",", ":")) + "\n")
