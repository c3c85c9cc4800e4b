"""The rows of a report's tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.ops.families import family_of
from penstock.plan import PlanFile
from penstock.report.page.findings import KindOfTask
from penstock.report.page.render import Row
from penstock.report.page.style import COLOURS
from penstock.words import change, lane_words, milliseconds

MOST_KINDS = 40
MANY_TIMES = 10
MINUS = "\N{MINUS SIGN}"


def kind_rows(kinds: Sequence[KindOfTask]) -> Iterator[Row]:
    """Yield predicted and measured times by kind, the largest difference first, and by lane."""
    widest = max([abs(kind.difference_s) for kind in kinds], default=0.0) or 1.0
    for kind in kinds[:MOST_KINDS]:
        yield Row(
            title=kind.title,
            note=kind.op,
            colour=COLOURS[family_of(kind.op)],
            cells=_times(kind.lane, kind.count, kind.predicted_s, kind.measured_s),
            bar=kind.difference_s / widest,
        )
    for lane in (lanes := dict.fromkeys(kind.lane for kind in kinds)):
        own = [kind for kind in kinds if kind.lane == lane]
        sums = (sum(getattr(kind, name) for kind in own) for name in ("count", "predicted_s", "measured_s"))
        title = f"all of {lane_words(lane, nodes='intra' in lanes)}"
        yield Row(title=title, cells=_times(lane, *sums), bar=0.0, total=True)


def plan_rows(plan: PlanFile) -> Iterator[Row]:
    """Yield the plan that ran and the next best ones; with the times of trials, if there were any."""
    tried = was_tried(plan)
    yield Row(
        title=plan.choice.words,
        note="chosen",
        strong=True,
        cells=[milliseconds(plan.predicted_s), "", *([_trial(plan.trial_s)] if tried else [])],
    )
    for other in plan.others:
        cells = [milliseconds(other.predicted_s), signed_change(other.predicted_s, plan.predicted_s)]
        yield Row(title=other.words, cells=[*cells, *([_trial(other.measured_s)] if tried else [])])


def was_tried(plan: PlanFile) -> bool:
    """Return whether steps of any of the plans were timed before one was chosen."""
    return any(seconds is not None for seconds in (plan.trial_s, *(each.measured_s for each in plan.others)))


def _trial(seconds: float | None) -> str:
    return "not tried" if seconds is None else milliseconds(seconds)


def _times(lane: str, count: int, predicted_s: float, measured_s: float) -> Sequence[str]:
    return (
        lane,
        str(count),
        milliseconds(predicted_s),
        milliseconds(measured_s),
        signed(measured_s - predicted_s),
        relative(measured_s / predicted_s) if predicted_s > 0 else "",
    )


def relative(ratio: float) -> str:
    """Return measured over predicted as text: `+3.2 %`, and from ten times on `12 times`."""
    return signed_change(ratio, 1.0) if ratio < MANY_TIMES else f"{ratio:,.0f} times"


def signed_change(seconds: float, base_s: float) -> str:
    """Return `change` with a typographic minus."""
    return change(seconds, base_s).replace("-", MINUS)


def signed(seconds: float) -> str:
    """Return a difference with its sign."""
    return f"{'+' if seconds >= 0 else MINUS}{milliseconds(abs(seconds))}"
