"""The plan file: what to run, in JSON that people can read and edit, and how it is replayed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from penstock.config import (
    UNSET,
    ConfigError,
    Items,
    Within,
    check_bounds,
    from_dict,
    parse_json,
    read_json,
    to_dict,
)
from penstock.config.bounds import SizeBytes
from penstock.cost.json_file import write_json
from penstock.graph import ScheduleError
from penstock.plan.choice import Choice
from penstock.plan.dimensions import DIMENSIONS
from penstock.plan.effort import Searched
from penstock.plan.problem import Problem
from penstock.plan.search import Candidate
from penstock.plan.words import choice_words
from penstock.schedule import SCHEDULES, Partition, Schedule, StepPlan
from penstock.schedule.catalogue import ChunkBytes, PieceCount
from penstock.schedule.penstock import PriorityName
from penstock.step import build_graph

VERSION = 1
AGAIN = "Correct the number, or make the file again with `penstock plan --out`."
Size = Annotated[int, Within(0, 2**62, "it says for what step the plan was made")]
Seconds = Annotated[float, Within(0, 1e9, "it is the duration of a step", above=True, hint=AGAIN)]
Bound = Annotated[float, Within(0, 1e9, "it is the duration of a step", hint=AGAIN)]
NOT_FINITE = (math.inf, -math.inf)
MOST_LINES = 100_000
ORDER_ANEW = 'Delete "schedule" from the file to have the tasks ordered anew.'


@dataclass(frozen=True, kw_only=True)
class More:
    """A decision of a dimension that was registered. value: as JSON."""

    name: str
    value: str

    def __post_init__(self) -> None:
        try:
            if parse_json(self.value) in NOT_FINITE:
                raise ValueError("no decision is infinite")
        except ValueError as error:
            hint = 'Write a number such as "2", or text in quotes of its own such as "\\"mine\\"".'
            raise ConfigError("value", self.value, f"is not JSON: {error}", hint) from error


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """What Choice holds, as a section of the file. partition: null = all of a layer's into the next gap."""

    schedule: str
    microbatches: PieceCount = 1
    chunks: PieceCount = 1
    backward_chunks: PieceCount = 1
    all_reduce_chunk_bytes: ChunkBytes = 1 << 20
    priority: PriorityName = "search"
    dispatch: str = "flat"
    partition: Partition | None = None
    more: Annotated[tuple[More, ...], Items(100, "one per registered dimension")] = ()

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.schedule not in SCHEDULES:
            near = get_close_matches(self.schedule, SCHEDULES, n=1, cutoff=0.0)[0]
            hint = f"Nearest: {near}. All: {', '.join(SCHEDULES)}."
            raise ConfigError("schedule", self.schedule, "no such schedule", hint)

    @staticmethod
    def of(choice: Choice) -> PlanChoice:
        fields = {name: getattr(choice, name) for name in PLAIN}
        return PlanChoice(
            **fields, more=tuple(More(name=name, value=json.dumps(value)) for name, value in choice.more)
        )

    @property
    def choice(self) -> Choice:
        fields: dict[str, Any] = {name: getattr(self, name) for name in PLAIN}
        return Choice(**fields, more=tuple((each.name, json.loads(each.value)) for each in self.more))


PLAIN = (
    "schedule",
    "microbatches",
    "chunks",
    "backward_chunks",
    "all_reduce_chunk_bytes",
    "priority",
    "dispatch",
    "partition",
)
"""Fields that are the same in the file and in Choice."""


@dataclass(frozen=True, kw_only=True)
class PlanSizes:
    """For what step a plan was made: where it is replayed, these must be the same."""

    layers: Size
    moe_layers: Size
    batch_per_rank: Size
    seq_len: Size
    hidden_size: Size
    ffn_hidden_size: Size
    num_experts: Size
    top_k: Size
    ranks: Size
    ep_size: Size
    shard_size: Size

    def __post_init__(self) -> None:
        check_bounds(self)

    @staticmethod
    def of(problem: Problem) -> PlanSizes:
        work = problem.workload
        return PlanSizes(
            layers=problem.shape.num_layers,
            moe_layers=sum(problem.shape.moe_layers),
            batch_per_rank=work.batch,
            seq_len=work.seq_len,
            hidden_size=work.hidden_size,
            ffn_hidden_size=work.ffn_hidden_size,
            num_experts=work.num_experts,
            top_k=work.top_k,
            ranks=work.world_size,
            ep_size=work.ep_size,
            shard_size=work.shard_size,
        )


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan on paper. why: its explanation; schedule: the text of the order, a line per lane; null = the
    order is made anew from the choice. search: how much was looked at to find it; null = unknown."""

    version: Annotated[int, Within(0, 2**62, "versions count up from 1")] = VERSION
    model: str
    cluster: str
    predicted_s: Seconds
    lower_bound_s: Bound
    memory_bytes: SizeBytes
    why: Annotated[tuple[str, ...], Items(1000, "it is for people")]
    sizes: PlanSizes
    choice: PlanChoice
    schedule: Annotated[tuple[str, ...], Items(MOST_LINES, "a step has a line per lane")] | None = None
    search: Searched | None = None

    def __post_init__(self) -> None:
        if self.version != VERSION:
            hint = f"Make it again with `penstock plan --out`; this version writes {VERSION}."
            raise ConfigError("version", self.version, "is a version that cannot be read here", hint)
        check_bounds(self)

    @staticmethod
    def of(
        problem: Problem,
        candidate: Candidate,
        *,
        model: str,
        cluster: str,
        why: tuple[str, ...] = (),
        search: Searched | None = None,
    ) -> PlanFile:
        """What is to be saved of a plan."""
        return PlanFile(
            model=model,
            cluster=cluster,
            predicted_s=candidate.predicted_s,
            lower_bound_s=candidate.bound_s,
            memory_bytes=candidate.memory_bytes,
            why=why,
            sizes=PlanSizes.of(problem),
            choice=PlanChoice.of(candidate.choice),
            schedule=tuple(candidate.plan.schedule.text().splitlines()),
            search=search,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return to_dict(self)

    def save(self, path: Path) -> None:
        """Write it where the path says; a half-written file never replaces a whole one."""
        write_json(path, self.to_dict())

    @staticmethod
    def read(path: Path) -> PlanFile:
        """Raises ConfigError that names the file, the key and its value, and says what to do."""
        table = read_json(path, "Give a plan file, or make one with `penstock plan --out`.")
        try:
            file = from_dict(PlanFile, table, str(path))
        except ScheduleError as error:
            hint = "Correct the portion, or set partition to null."
            raise ConfigError(f"{path}.choice.partition", UNSET, str(error), hint) from error
        file._check_more(str(path))
        return file

    @property
    def explains_choice(self) -> bool:
        """Whether the explanation, if there is one, is that of the choice: either may have changed since."""
        said = next((line for line in self.why if line.startswith("Plan ")), None)
        return said is None or said.removeprefix("Plan ").strip() == choice_words(self.choice.choice)

    def step_plan(self, problem: Problem, name: str = "plan") -> StepPlan:
        """What to run. Raises ConfigError if the file does not fit the problem, or its order not its choice.

        name: what messages call the file, such as its path.
        """
        choice = self.choice.choice
        self._check_more(name)
        self._check(problem, choice, name)
        try:
            if self.schedule is None:
                return problem.plan(choice)
            shape = problem.cut(choice)
            graph = build_graph(shape)
            schedule = Schedule.parse("\n".join(self.schedule) + "\n", graph)
            schedule.check(graph)
        except ScheduleError as error:
            key = "choice" if self.schedule is None else "schedule"
            raise ConfigError(f"{name}.{key}", UNSET, f"{error}", ORDER_ANEW) from error
        return StepPlan(graph, schedule, shape)

    def _check_more(self, name: str) -> None:
        """Every further decision is one that somebody registered: any other would decide nothing."""
        known = [dimension for dimension in DIMENSIONS if dimension not in PLAIN]
        for number, more in enumerate(self.choice.more):
            if more.name not in known:
                key, why = f"{name}.choice.more[{number}].name", "no such dimension is registered"
                have = f"Registered: {', '.join(known)}." if known else "Register it first, or take it out."
                own = "Write it into the choice itself, beside more."
                raise ConfigError(key, more.name, why, own if more.name in PLAIN else have)

    def _check(self, problem: Problem, choice: Choice, name: str) -> None:
        for key, value in to_dict(PlanSizes.of(problem)).items():
            if (planned := getattr(self.sizes, key)) != value:
                why = f"this step has {value}, so the plan is one for another step"
                raise ConfigError(f"{name}.sizes.{key}", planned, why, "Make a plan for this one.")
        if choice.dispatch not in problem.dispatches:
            hint = f"Use one of {', '.join(problem.dispatches)}."
            key = f"{name}.choice.dispatch"
            raise ConfigError(key, choice.dispatch, "these ranks cannot dispatch so", hint)
        self._check_partition(problem, choice, name)
        samples = problem.workload.batch
        if choice.microbatches > samples:
            key, why = f"{name}.choice.microbatches", f"a batch of {samples} samples has no more pieces"
            raise ConfigError(key, choice.microbatches, why, f"Nearest valid: {samples}.")

    @staticmethod
    def _check_partition(problem: Problem, choice: Choice, name: str) -> None:
        """Every gradient is reduced, once: a byte left out would let the ranks drift apart in silence."""
        if choice.partition is None:
            return
        sizes, parts = problem.workload.all_reduce_bytes, choice.partition.parts
        key, hint = f"{name}.choice.partition", "Correct the portions, or set partition to null."
        if len(parts) != len(sizes):
            raise ConfigError(key, f"{len(parts)} layers", f"this step has {len(sizes)}", hint)
        for layer, (size, portions) in enumerate(zip(sizes, parts, strict=True)):
            if sum(portions) != size:
                why = f"layer {layer} has {size} bytes of gradients to reduce"
                raise ConfigError(f"{key}.portions[{layer}]", f"{sum(portions)} bytes", why, hint)
