"""The plan file: what to run, in JSON that people can read and edit, and how it is replayed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from penstock.config import (
    UNSET,
    Checked,
    ConfigError,
    Items,
    Within,
    check_bounds,
    from_dict,
    read_json,
    to_dict,
)
from penstock.config.bounds import SizeBytes
from penstock.cost.cluster_file import write_json
from penstock.decision import Decision
from penstock.decision.record import FIELDS
from penstock.features.build import build_graph
from penstock.features.expert_replicas.feature import ExpertMoves
from penstock.features.sample_placement.feature import SampleMoves
from penstock.graph import ScheduleError
from penstock.plan.candidate import Candidate, whole_bound_s, whole_s
from penstock.plan.effort import Searched
from penstock.plan.predict import interval_s
from penstock.plan.problem import Problem
from penstock.schedule import Schedule, StepPlan
from penstock.schedule.schedule import parse_orders
from penstock.step.shape import TokenLayout

VERSION = 1
RECOMPUTE = "Correct the number, or make the file again with `penstock plan --out`."
Size = Annotated[int, Within(1, 2**62, "it says for what step the plan was made", hint=RECOMPUTE)]
Seconds = Annotated[float, Within(0, 1e9, "it is the duration of a step", above=True, hint=RECOMPUTE)]
Bound = Annotated[float, Within(0, 1e9, "it is the duration of a step", hint=RECOMPUTE)]
MOST_LINES = 100_000
NEW_ORDER = 'Delete "schedule" from the file to compute a new order.'


@dataclass(frozen=True, kw_only=True)
class PlanSizes:
    """The sizes of the step for which a plan was made; they must be the same where it is replayed."""

    layers: Size
    moe_layers: Annotated[int, Within(0, 2**62, "a model may have dense layers alone", hint=RECOMPUTE)]
    batch_per_rank: Size
    seq_len: Size
    hidden_size: Size
    ffn_hidden_size: Size
    num_experts: Size
    top_k: Size
    ranks: Size
    ep_size: Size
    tp_size: Size = 1
    etp_size: Size = 1
    tokens: TokenLayout = "split"
    zero_stage: Annotated[int, Within(0, 2, "higher stages are not executed")] = 0
    passes: Size = 1

    def __post_init__(self) -> None:
        check_bounds(self)
        for part, whole in (("moe_layers", "layers"), ("top_k", "num_experts"), ("ep_size", "ranks")):
            if (value := getattr(self, part)) > (most := getattr(self, whole)):
                raise ConfigError(part, value, f"is more than {whole} = {most}", RECOMPUTE)

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
            tp_size=work.tp_size,
            etp_size=work.etp_size,
            tokens=problem.shape.sharing.tokens,
            zero_stage=0 if problem.shape.updating is None else problem.shape.updating.zero_stage,
            passes=problem.passes,
        )


LABEL = 9
"""Columns of the label of a line that explains a plan."""
PLACED = "Placed "
"""Begins the line that names the plan that runs instead of the one that was found, where moving pays."""
IN_USE = "In use "
"""Begins the line that names the plan to which a run has changed since its plan was found."""
MOST_OTHERS = 5
"""The number of plans reported besides the best."""


@dataclass(frozen=True, kw_only=True)
class OtherPlan(Checked):
    """A plan that was not chosen, in words.

    Attributes:
        predicted_s: The predicted seconds of a whole step, as in PlanFile.
        measured_s: The measured seconds per step if the plan was tried; null = it was not.
    """

    words: str
    predicted_s: Seconds
    measured_s: Seconds | None = None

    @staticmethod
    def among(problem: Problem, found: Sequence[Candidate]) -> tuple[OtherPlan, ...]:
        """Return the fastest few of some candidates, each description once."""
        seconds_of = {each.choice.words: whole_s(problem, each) for each in reversed(found)}
        ordered = sorted(seconds_of.items(), key=lambda each: each[1])
        return tuple(OtherPlan(words=text, predicted_s=seconds) for text, seconds in ordered[:MOST_OTHERS])


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """The content of a plan file.

    Attributes:
        model, cluster: Their names, as text.
        predicted_s, lower_bound_s: The seconds of a whole step, clipping and update included.
        interval_s: The range of the prediction, see Candidate; empty = unknown.
        memory_bytes: The estimated bytes per rank.
        why: The explanation of the plan, line by line.
        schedule: The text of the order, a line per lane; null = the order is computed again from the choice.
        search: How much was examined to find it; null = unknown.
        others: The next best plans.
        trial_s: The seconds per step when the plan was tried; null = it was not.
        lost: The trials that the run will not repeat, see LostTrial.
    """

    version: Annotated[int, Within(0, 2**62, "versions count up from 1")] = VERSION
    model: str
    cluster: str
    predicted_s: Seconds
    interval_s: Annotated[tuple[Seconds, ...], Items(2, "it has two ends")] = ()
    lower_bound_s: Bound
    memory_bytes: SizeBytes
    why: Annotated[tuple[str, ...], Items(1000, "it is for people")]
    sizes: PlanSizes
    choice: Decision
    schedule: Annotated[tuple[str, ...], Items(MOST_LINES, "a step has a line per lane")] | None = None
    search: Searched | None = None
    others: Annotated[tuple[OtherPlan, ...], Items(1000, "they are for people")] = ()
    trial_s: Seconds | None = None
    lost: Annotated[tuple[LostTrial, ...], Items(1000, "one for each way of moving")] = ()

    def __post_init__(self) -> None:
        if self.version != VERSION:
            hint = f"Make it again with `penstock plan --out`; this version writes {VERSION}."
            raise ConfigError("version", self.version, "is not a version that this Penstock can read", hint)
        check_bounds(self)
        try:
            self.choice.check()
        except ConfigError as error:
            raise error.under("choice") from error

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
        """Return the plan file of a candidate.

        Args:
            model, cluster: Their names, as text.
            why: The explanation of the plan, line by line.
            search: How much was examined to find it; None = unknown.
        """
        predicted_s = whole_s(problem, candidate)
        return PlanFile(
            model=model,
            cluster=cluster,
            predicted_s=predicted_s,
            interval_s=interval_s(problem, predicted_s) or (),
            lower_bound_s=whole_bound_s(problem, candidate),
            memory_bytes=candidate.memory_bytes,
            why=why,
            sizes=PlanSizes.of(problem),
            choice=candidate.choice,
            schedule=tuple(candidate.plan.schedule.text().splitlines()),
            search=search,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return to_dict(self)

    def save(self, path: Path) -> None:
        """Write the plan to `path`; a half-written file never replaces a whole one."""
        write_json(path, self.to_dict())

    @staticmethod
    def read(path: Path) -> PlanFile:
        """Read a plan file.

        Raises:
            ConfigError: For a file that cannot be used. It names file, key and value, and says what to do.
        """
        table = read_json(path, "Give a plan file, or make one with `penstock plan --out`.")
        try:
            file = from_dict(PlanFile, table, str(path))
            # The default of a missing decision is not what the file was made for. Some files are older
            # than one that may be left out.
            given = table.get("choice", {})
            for name in file.choice.deciding_fields:
                if name not in given and not FIELDS[name].may_be_left_out:
                    hint = (
                        f"Write it, such as {json.dumps(getattr(file.choice, name))}, or make the file again."
                    )
                    raise ConfigError(
                        f"{path}.choice.{name}", UNSET, "is missing, so the file does not say it", hint
                    )
            return file
        except ScheduleError as error:
            hint = "Correct the portion, or set partition to null."
            raise ConfigError(f"{path}.choice.partition", UNSET, str(error), hint) from error

    @property
    def explains_choice(self) -> bool:
        """Whether the explanation, if any, describes the choice: the file may have been edited."""
        said = [line for line in self.why if line.startswith(("Plan ", PLACED, IN_USE))]
        texts = [line[LABEL:].strip() for line in said]
        text = self.choice.words
        return not texts or texts[-1] == text or texts[-1].startswith(f"{text} (")  # what rounded rows save

    def check_alone(self, name: str) -> None:
        """Raise ConfigError where parts of the file contradict each other, whatever it is for.

        Args:
            name: What messages call the file, such as its path.
        """
        self._check_microbatches(name)
        interval_s, microbatches = self.interval_s, self._microbatches
        if interval_s and (len(interval_s) != 2 or interval_s[0] > interval_s[1]):
            why = "needs its two ends, the smaller first"
            raise ConfigError(f"{name}.interval_s", str(list(interval_s)), why, RECOMPUTE)
        if self.schedule is None:
            return
        try:
            orders = parse_orders("\n".join(self.schedule) + "\n")[1]
        except ScheduleError as error:
            raise ConfigError(f"{name}.schedule", UNSET, f"{error}", NEW_ORDER) from error
        tasks = [task for order in orders.values() for task in order]
        ordered = {
            "sizes.layers": (self.sizes.layers, {task.layer for task in tasks}),
            "choice.microbatches": (microbatches, {task.microbatch or 0 for task in tasks}),
        }
        for key, (number, indices) in ordered.items():
            if (most := max(indices, default=0) + 1) != number:
                raise ConfigError(f"{name}.{key}", number, f"the order in the file has {most}", NEW_ORDER)

    def telling_use(self) -> PlanFile:
        """Return the same with a line that names the plan, where the explanation is of an earlier one."""
        file = replace(self, why=tuple(line for line in self.why if not line.startswith(IN_USE)))
        if file.explains_choice:
            return file
        return replace(file, why=(*file.why, f"{IN_USE}  {self.choice.words}"))

    def step_plan(self, problem: Problem, name: str = "plan") -> StepPlan:
        """Return what to run.

        Args:
            name: What messages call the file, such as its path.

        Raises:
            ConfigError: If the file does not fit the problem, or its order does not fit its choice.
        """
        choice = self.choice
        try:
            choice.check()  # a decision registered when the file was read may be gone by now
        except ConfigError as error:
            raise error.under(f"{name}.choice") from error
        for key, value in to_dict(PlanSizes.of(problem)).items():
            if (planned := getattr(self.sizes, key)) != value:
                why = f"this step has {value}: the plan was made for another step"
                raise ConfigError(f"{name}.sizes.{key}", planned, why, "Make a plan for this one.")
        if choice.dispatch not in problem.dispatches:
            hint = f"Use one of {', '.join(problem.dispatches)}."
            key = f"{name}.choice.dispatch"
            raise ConfigError(key, choice.dispatch, "this layout cannot run that dispatch", hint)
        same = problem.workload_of(choice).wire_row_bytes == problem.workload.wire_row_bytes
        if choice.comm_dtype not in problem.comm_dtypes and not same:
            key, why = f"{name}.choice.comm_dtype", "rounds rows in transit, which this run does not allow"
            raise ConfigError(key, choice.comm_dtype, why, "Set plan.comm_dtype=auto, or use another plan.")
        self._check_partition(problem, choice, name)
        self._check_microbatches(name)
        try:
            if self.schedule is None:
                return problem.plan(choice)
            shape = problem.cut(choice)
            graph = build_graph(shape)
            schedule = Schedule.parse("\n".join(self.schedule) + "\n", graph)
            schedule.check(graph)
        except ScheduleError as error:
            key = "choice" if self.schedule is None else "schedule"
            raise ConfigError(f"{name}.{key}", UNSET, f"{error}", NEW_ORDER) from error
        return StepPlan(graph, schedule, shape)

    @property
    def _microbatches(self) -> int:
        return self.choice.microbatches if self.choice.reads("microbatches") else 1

    def _check_microbatches(self, name: str) -> None:
        most, given = self.sizes.batch_per_rank, self._microbatches
        if given > most:
            why = f"a batch of {most} samples has at most {most} microbatches"
            raise ConfigError(f"{name}.choice.microbatches", given, why, f"Nearest valid: {most}.")

    @staticmethod
    def _check_partition(problem: Problem, choice: Decision, name: str) -> None:
        """Check that every gradient is reduced exactly once; otherwise the ranks would diverge silently."""
        if choice.partition is None:
            return
        sizes, parts = problem.gradients.of_form(choice.form).replicated, choice.partition.parts
        key, hint = f"{name}.choice.partition", "Correct the portions, or set partition to null."
        if len(parts) != len(sizes):
            raise ConfigError(key, f"{len(parts)} layers", f"this step has {len(sizes)}", hint)
        for layer, (size, portions) in enumerate(zip(sizes, parts, strict=True)):
            if sum(portions) != size:
                why = f"layer {layer} has {size} bytes of gradients to reduce"
                raise ConfigError(f"{key}.portions[{layer}]", f"{sum(portions)} bytes", why, hint)


# ---- trials that a plan lost to another which moves otherwise: by how much predictions of its moves err ---


Moves = tuple[SampleMoves, ExpertMoves]
Ratio = Annotated[float, Within(0, 1e9, "it is one step's duration over another's", above=True)]


@dataclass(frozen=True, kw_only=True)
class LostTrial(Checked):
    """A plan that ran in turns with another, and took longer. Both are told by what moves.

    Attributes:
        samples, experts: What moves by the slower plan.
        against_samples, against_experts: What moves by the faster plan.
        predicted, measured: The seconds per step of the slower plan over those of the faster one. The
            prediction is by all that was known after the trial, measured transfers included.
    """

    samples: SampleMoves
    experts: ExpertMoves
    against_samples: SampleMoves
    against_experts: ExpertMoves
    predicted: Ratio
    measured: Ratio

    @staticmethod
    def of(slower: Decision, faster: Decision, *, predicted: float, measured: float) -> LostTrial:
        """Return the record of a trial between two choices.

        Args:
            predicted, measured: The seconds per step of the slower plan over those of the faster one.
        """
        return LostTrial(
            samples=slower.samples,
            experts=slower.experts,
            against_samples=faster.samples,
            against_experts=faster.experts,
            predicted=predicted,
            measured=measured,
        )

    @property
    def moves(self) -> Moves:
        """What moves by the slower plan."""
        return self.samples, self.experts

    @property
    def against(self) -> Moves:
        """What moves by the faster plan."""
        return self.against_samples, self.against_experts

    def settles(self, one: Decision, other: Decision) -> bool:
        """Tell whether the trial was between plans that move as these do."""
        return {self.moves, self.against} == {moves_of(one), moves_of(other)}


def moves_of(choice: Decision) -> Moves:
    """Return what moves by a choice: what its replica slots cost is predicted, whatever their number."""
    return choice.samples, choice.experts


def miss(lost: Sequence[LostTrial], choice: Decision, still: Decision) -> float:
    """Return measured over predicted seconds of a choice, where those of `still` are as predicted.

    Where moves were never tried, samples count as they did with other experts, and experts as with another
    planner, whose replicas travel alike: the one that did best. The result is 1 where no trial tells.
    """
    # The misses of what was tried. A plan without moves that lost to one with them tells of these.
    misses: dict[Moves, float] = {moves_of(still): 1.0}
    for trial in lost:
        err = trial.measured / trial.predicted
        if trial.moves == moves_of(still):
            misses[trial.against] = 1 / err
        else:
            misses[trial.moves] = err * misses.get(trial.against, 1.0)
    if moves_of(choice) in misses:
        return misses[moves_of(choice)]
    alone = {experts: err for (samples, experts), err in misses.items() if samples == still.samples}
    moving = [err for experts, err in alone.items() if experts != still.experts]
    experts = 1.0 if choice.experts == still.experts else alone.get(choice.experts, min(moving, default=1.0))
    return experts * misses.get((choice.samples, still.experts), 1.0)


def corrected(candidate: Candidate, times: float) -> Candidate:
    """Return a candidate whose prediction is `times` as long."""
    interval = candidate.interval_s
    return replace(
        candidate,
        predicted_s=times * candidate.predicted_s,
        interval_s=None if interval is None else (times * interval[0], times * interval[1]),
    )
