"""What a run has left, and what its measured step shows: wrong predictions, and what the step waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from penstock.cost import ClusterFile
from penstock.graph import Lane, Name, Phase
from penstock.ops import OPS
from penstock.ops.base import Family, family_of
from penstock.plan import PlanFile
from penstock.report.loads import LoadCourse
from penstock.report.summary import RunSummary
from penstock.trace.step_file import PathLink, StepFile
from penstock.words import milliseconds, percent

Values = tuple[float | None, ...]
ByLayer = tuple[tuple[float, ...] | None, ...]


@dataclass(frozen=True, kw_only=True)
class Course:
    """The steps of a run, by the names of `StepMetrics`; None = a step has no such value.

    Attributes:
        step: Numbers of the steps.
        loss, eval_loss, eval_noise: In nats per token.
        model_flops_utilisation: Model FLOPs over the peak.
        plan: The plan that ran each step.
        skipped: Whether a step was not finite and changed nothing.
        resumed: Whether a step was the first after a resumption.
        aux_loss_by_layer, rows_dropped, rank_rows_max_over_mean, loads_in_common: One value per MoE layer.
    """

    step: tuple[int, ...]
    loss: Values
    eval_loss: Values
    eval_noise: Values
    tokens_per_s: Values
    iteration_s: Values
    communication_s: Values
    exposed_communication_s: Values
    model_flops_utilisation: Values
    peak_memory_bytes: Values
    plan: tuple[str | None, ...]
    skipped: tuple[bool, ...]
    resumed: tuple[bool, ...]
    aux_loss_by_layer: ByLayer
    rows_dropped: ByLayer
    rank_rows_max_over_mean: ByLayer
    loads_in_common: ByLayer

    @property
    def last_start(self) -> Course:
        """The steps since the run was resumed last; all steps of a run that never was."""
        first = max((place for place, resumed in enumerate(self.resumed) if resumed), default=0)
        return Course(**{field.name: getattr(self, field.name)[first:] for field in fields(self)})


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """What a run has left.

    Attributes:
        name: The name of its folder.
        settings: The text of its configuration.
        failures: What ranks said before they failed.
        missing: Sentences on files that do not exist, and why that may be.
    """

    name: str
    course: Course
    settings: str
    summary: RunSummary | None = None
    step: StepFile | None = None
    plan: PlanFile | None = None
    cluster: ClusterFile | None = None
    loads: LoadCourse | None = None
    failures: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


PHASES: Final = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.INPUT: "backward, gradients of inputs",
    Phase.WEIGHT: "backward, gradients of weights",
    Phase.RECOMPUTE: "forward, recomputed",
}
MOSTLY: Final = 0.6
"""A side with a larger share of the critical path than this limits the step."""
LEAST_SHARE: Final = 0.005
"""Smaller shares are not mentioned."""


def title_of(op: str) -> str:
    """Return what an op does; its name if it is not registered, as with ops of other programs."""
    return OPS[op].title if op in OPS else op


@dataclass(frozen=True, kw_only=True)
class KindOfTask:
    """Tasks that differ only in layer, microbatch and piece. Seconds are sums over all of them in a step.

    Without a prediction `predicted_s` is None.
    """

    op: str
    phase: Phase
    lane: str
    count: int
    predicted_s: float | None
    measured_s: float

    @property
    def title(self) -> str:
        return f"{title_of(self.op)}, {PHASES[self.phase]}"

    @property
    def difference_s(self) -> float:
        """Measured less predicted seconds, if there are any."""
        return self.measured_s - (self.predicted_s or 0.0)


def kinds_of(step: StepFile) -> list[KindOfTask]:
    """Return every kind of task, the largest difference first; without a prediction, the longest."""
    predicted_s = step.typical_predicted_s
    places: dict[tuple[str, Phase, str], list[int]] = defaultdict(list)
    for place, (task, lane) in enumerate(zip(step.tasks, step.lanes, strict=True)):
        name = Name.parse(task)
        places[name.op, name.phase, lane].append(place)
    kinds = [
        KindOfTask(
            op=op,
            phase=phase,
            lane=lane,
            count=len(at),
            predicted_s=sum(predicted_s[place] for place in at) if predicted_s else None,
            measured_s=sum(step.typical_measured_s[place] for place in at),
        )
        for (op, phase, lane), at in places.items()
    ]
    return sorted(kinds, key=lambda kind: -abs(kind.difference_s))


@dataclass(frozen=True, kw_only=True)
class Binding:
    """What determined the length of a step.

    Seconds are parts of its critical path.

    Attributes:
        computed_s, moved_s: Seconds of computation and of transfers, by family.
        gaps_s: Seconds in which nothing on the path ran.
        length_s: Seconds of the whole path.
        ranks: How many ranks the run had.
    """

    computed_s: Mapping[Family, float]
    moved_s: Mapping[Family, float]
    gaps_s: float
    ranks: int

    @property
    def length_s(self) -> float:
        return sum(self.computed_s.values()) + sum(self.moved_s.values()) + self.gaps_s

    @property
    def families(self) -> list[Family]:
        """The families on the path, in the order of legends."""
        return [family for family in Family if family in self.computed_s or family in self.moved_s]

    @property
    def compute_share(self) -> float:
        return sum(self.computed_s.values()) / self.length_s

    @property
    def network_share(self) -> float:
        return sum(self.moved_s.values()) / self.length_s

    @property
    def gap_share(self) -> float:
        return self.gaps_s / self.length_s

    def sentences(self) -> list[str]:
        """Return in words what determined the step's length, and what would have shortened the step."""
        sides = [
            (self.compute_share, "computation", self.computed_s),
            (self.network_share, "transfers between ranks", self.moved_s),
        ]
        parts = [
            f"{percent(share)} {what}" + (f" ({families})" if families else "")
            for share, what, families in ((share, what, self._families(s)) for share, what, s in sides)
            if share > 0
        ]
        if self.gap_share >= LEAST_SHARE:
            parts.append(f"{percent(self.gap_share)} pauses between two tasks")
        return [
            f"The longest chain of tasks that waited for each other took {milliseconds(self.length_s)}: "
            f"{', '.join(parts)}.",
            self._verdict(),
        ]

    def _verdict(self) -> str:
        if self.ranks == 1:
            return "Only faster computation would shorten it: on one process nothing crosses a network."
        if self.network_share > MOSTLY:
            return (
                "The network limits this step: with devices of any speed it would be shorter by "
                f"{percent(self.compute_share)} at most."
            )
        if self.compute_share > MOSTLY:
            return (
                "Computation limits this step: with a network of any speed it would be shorter by "
                f"{percent(self.network_share)} at most."
            )
        return (
            "Neither limits this step alone: with a network of any speed it would be shorter by "
            f"{percent(self.network_share)} at most, with devices of any speed by "
            f"{percent(self.compute_share)}."
        )

    def _families(self, seconds: Mapping[Family, float]) -> str:
        shares = {family: each / self.length_s for family, each in seconds.items()}
        ordered = sorted(shares.items(), key=lambda each: -each[1])
        return ", ".join(f"{family} {percent(share)}" for family, share in ordered if share >= LEAST_SHARE)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "critical_path_s": self.length_s,
            "computation_s": {str(family): seconds for family, seconds in self.computed_s.items()},
            "transfers_s": {str(family): seconds for family, seconds in self.moved_s.items()},
            "pauses_s": self.gaps_s,
        }


def slow_ranks(step: StepFile) -> list[str]:
    """Return a sentence for every rank that computed slowly."""
    return [f"C{each.words[1:]}." for each in step.stragglers]


def binding_of(step: StepFile) -> Binding | None:
    """Return what determined the length of a step; None where no path is known."""
    path = step.path
    computed, moved = _by_family(path, network=False), _by_family(path, network=True)
    gaps_s = sum(link.gap_s for link in path)
    if step.ranks == 1:  # nothing is sent: tasks on the network's lanes are issued and done at once
        gaps_s, moved = gaps_s + sum(moved.values()), {}
    binding = Binding(computed_s=computed, moved_s=moved, gaps_s=gaps_s, ranks=step.ranks)
    return binding if path and binding.length_s > 0 else None


def _by_family(path: Iterable[PathLink], *, network: bool) -> dict[Family, float]:
    seconds: dict[Family, float] = defaultdict(float)
    for link in path:
        if Lane(link.lane).is_network is network:
            seconds[family_of(Name.parse(link.task).op)] += link.end_s - link.start_s
    return dict(seconds)
