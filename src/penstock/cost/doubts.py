"""What measurements could not tell, in words: in full in a file, in one sentence where a plan is shown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.words import counted

STOPPED = "measuring was stopped early, so all of these figures are rough"
OVERRAN = "measuring took too long and was ended: what it has not reached is estimated by rates"
"""A machine was so busy that not even the least was measured in the time that it may take."""

IN_A_RUN = "Measure longer (plan.profile_s) or while it is idle; cluster.json lists them (doubts)"


_DIFFERS = re.compile(r"(.+): predicted as measured by itself, since it differs by (\d+ %) from step to step")


def scattered(what: str, why: str) -> str:
    """Return the doubt about work that is predicted as measured by itself: real steps tell nothing of it."""
    return f"{what}: predicted as measured by itself, since {why}"


def listed(doubts: Sequence[str]) -> tuple[str, ...]:
    """Return all doubts, to show with measurements; work that differs between steps is named in one line."""
    differing = [found for doubt in doubts if (found := _DIFFERS.fullmatch(doubt))]
    if len(differing) < 2:
        return tuple(doubts)
    each = ", ".join(f"{found[1]} ({found[2]})" for found in differing)
    line = f"predicted as measured by themselves, since they differ from step to step: {each}"
    return (line, *(doubt for doubt in doubts if not _DIFFERS.fullmatch(doubt)))


def summary(doubts: Sequence[str], *, intervals: bool, remedy: str = IN_A_RUN) -> tuple[str, ...]:
    """Return one labelled line for all doubts; () if there are none.

    intervals: whether predictions have intervals. remedy: advice for where the plan is shown.
    """
    ended = (f"Caution  {OVERRAN}. {remedy}",) if OVERRAN in doubts else ()
    scattered = [doubt for doubt in doubts if doubt != OVERRAN]
    if not scattered:
        return ended
    rough = "so the prediction is rough" if intervals else "so the prediction is rough and has no interval"
    return (
        *ended,
        f"Caution  {counted(len(scattered), 'measurement')} scattered or contradicted real steps, {rough}: "
        f"another program may have used the machine. {remedy}",
    )
