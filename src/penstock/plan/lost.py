"""Trials that a plan lost to another which moves otherwise: by how much predictions of its moves err."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from penstock.config import Within, check_bounds
from penstock.decision import Decision
from penstock.features.expert_replicas.feature import ExpertMoves
from penstock.features.sample_placement.feature import SampleMoves
from penstock.plan.candidate import Candidate

Moves = tuple[SampleMoves, ExpertMoves]
Ratio = Annotated[float, Within(0, 1e9, "it is one step's duration over another's", above=True)]


@dataclass(frozen=True, kw_only=True)
class LostTrial:
    """A plan that ran in turns with another, and took longer. Both are told by what moves.

    samples, experts: of the slower plan; against_samples, against_experts: of the faster one. predicted,
    measured: seconds per step of the slower plan over those of the faster one. The prediction is by all that
    was known after the trial, measured transfers included.
    """

    samples: SampleMoves
    experts: ExpertMoves
    against_samples: SampleMoves
    against_experts: ExpertMoves
    predicted: Ratio
    measured: Ratio

    def __post_init__(self) -> None:
        check_bounds(self)

    @staticmethod
    def of(slower: Decision, faster: Decision, *, predicted: float, measured: float) -> LostTrial:
        """Return the record of a trial between two choices."""
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

    Of moves that were never tried, samples count as they did with other experts, and experts as with another
    planner, whose replicas travel alike: the one that did best. 1 where no trial tells.
    """
    # The misses of what was tried. A plan without moves that lost to one with them tells of these.
    known: dict[Moves, float] = {moves_of(still): 1.0}
    for trial in lost:
        err = trial.measured / trial.predicted
        if trial.moves == moves_of(still):
            known[trial.against] = 1 / err
        else:
            known[trial.moves] = err * known.get(trial.against, 1.0)
    if moves_of(choice) in known:
        return known[moves_of(choice)]
    alone = {experts: err for (samples, experts), err in known.items() if samples == still.samples}
    moving = [err for experts, err in alone.items() if experts != still.experts]
    experts = 1.0 if choice.experts == still.experts else alone.get(choice.experts, min(moving, default=1.0))
    return experts * known.get((choice.samples, still.experts), 1.0)


def corrected(candidate: Candidate, times: float) -> Candidate:
    """Return a candidate whose prediction is `times` as long."""
    interval = candidate.interval_s
    return replace(
        candidate,
        predicted_s=times * candidate.predicted_s,
        interval_s=None if interval is None else (times * interval[0], times * interval[1]),
    )
