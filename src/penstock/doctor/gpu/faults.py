"""One rank fails in a task: what the others say, and how soon. Processes cannot go on afterwards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from penstock.config import shorten
from penstock.device import device_of
from penstock.doctor.gpu.here import Case, Here, Running, small_machinery, small_run
from penstock.doctor.gpu.outcome import Outcome, Verdict, together
from penstock.runtime import TaskError
from penstock.topology import CommunicationError
from penstock.words import counted

MOST_CHARACTERS: Final = 500
"""Of an error; those of tasks are half as long."""


class PlantedError(Exception):
    """The fault of the one rank."""


def run(here: Here) -> Outcome:
    """Run a step, then one in which the last rank fails at its head; every rank says how that ends."""
    case = Case(name="flowmoe")
    ran = small_run(here, case, small_machinery(here, case))
    ran.step(0)
    here.control.barrier("the step before the fault")
    faulty = here.info.rank == here.world_size - 1
    if faulty:
        _plant(ran)
    start_s = time.monotonic()
    said = _ending(ran, here)
    waited_s = time.monotonic() - start_s
    figures = {
        "rank": here.info.rank,
        "failed": faulty,
        "seconds": waited_s,
        "said": shorten(said, MOST_CHARACTERS),
    }
    wrong = why_wrong(
        said, waited_s, faulty=faulty, lost=here.world_size - 1, timeout_s=here.config.parallel.timeout_s
    )
    return Outcome.of([], figures, wrong=wrong)


def why_wrong(said: str, waited_s: float, *, faulty: bool, lost: int, timeout_s: float) -> str:
    """Return what is wrong with the way in which a rank ended; "" if nothing is.

    Args:
        said: The rank's error, "" if its step ended.
        waited_s: Seconds until the rank ended.
        faulty: Whether it is the rank that failed.
        lost: The rank that failed.
        timeout_s: Seconds after which a rank that knows nothing of a failure would give up.
    """
    if not said:
        return "the step ended as if no rank had failed"
    if faulty:
        return "" if PlantedError.__name__ in said else f"its own error was lost: {said}"
    if f"rank {lost}" not in said:
        return f"rank {lost} is not named: {said}"
    if waited_s >= timeout_s:
        return f"it learned of the failure after {waited_s:.1f} s, and would have given up by itself"
    return ""


def judge(outcomes: Mapping[int, Outcome]) -> Outcome:
    """Show what every rank said."""
    outcome = together(outcomes)
    ranks: list[dict[str, Any]] = [dict(each.figures) for _, each in sorted(outcomes.items()) if each.figures]
    others = [each for each in ranks if not each["failed"]]
    lines = []
    if others:
        last = max(others, key=lambda each: float(each["seconds"]))
        lines = [
            f"{counted(len(others), 'other rank')} learned of it, the last after {last['seconds']:.2f} s:",
            last["said"],
        ]
    elif outcome.verdict is not Verdict.FAIL:
        lines = ["the rank's own error names its task; there is no other rank"]
    return replace(outcome, lines=tuple(lines), figures={"ranks": ranks})


def _plant(ran: Running) -> None:
    def fail(*given: Any) -> None:
        del given
        raise PlantedError("a fault of this rank alone")

    object.__setattr__(ran.stack.model, "head", fail)


def _ending(ran: Running, here: Here) -> str:
    """Return the error with which a step ends, its first paragraph; "" if it ends without."""
    try:
        ran.step(1)
        device_of(here.device).synchronize(here.device)
        ran.step(2)  # what waited on the device went on with any numbers: the next step must refuse
    except (TaskError, CommunicationError) as error:
        return str(error).partition("\n\n")[0].replace("\n", " ")
    return ""
