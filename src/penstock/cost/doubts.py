"""What measurements could not tell, for people: all of it in a file, one sentence where a plan is shown."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.words import counted

STOPPED = "measuring was stopped early, so all of these figures are rough"
IN_A_RUN = "Measure longer (plan.profile_s) or while it is idle; cluster.json lists them (doubts)"


def scattered(what: str, why: str) -> str:
    """The doubt about a kind of work that real steps say nothing of, and is taken as it was by itself."""
    return f"{what}: predicted as measured by itself, since {why}"


def summary(doubts: Sequence[str], *, intervals: bool, remedy: str = IN_A_RUN) -> tuple[str, ...]:
    """One line for all of them, with its label; none if there are none.

    intervals: whether predictions have them. remedy: what can be done where the plan is shown.
    """
    if not doubts:
        return ()
    rough = "so the prediction is rough" if intervals else "so the prediction is rough and has no interval"
    return (
        f"Caution  {counted(len(doubts), 'measurement')} scattered or contradicted real steps, {rough}: "
        f"another program may have used the machine. {remedy}",
    )
