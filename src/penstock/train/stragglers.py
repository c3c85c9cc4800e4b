"""Compares how fast the ranks of a run compute."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.topology import Control
from penstock.trace import TaskRecord
from penstock.trace.stragglers import Straggler, stragglers, typical_seconds


def find_stragglers(control: Control, steps: Sequence[Sequence[TaskRecord]]) -> tuple[Straggler, ...]:
    """Return the ranks that compute slowly; all ranks call it together and get the same.

    steps: this rank's records of some steps under one plan. Costs an exchange of a number per kind of task.
    """
    mine = typical_seconds(record for records in steps for record in records)
    return stragglers(control.gather(mine, "comparing how fast ranks compute"))
