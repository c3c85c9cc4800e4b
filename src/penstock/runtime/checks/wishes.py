"""The check that all ranks wish for another plan before the same step, without an exchange of its own.

Only all ranks together can plan again, and a rank that has changed something does not know whether the others
have. So it runs a forward pass of the present plan, as they would, and its wish stands beside the marks of
parameters (`checks.marks`) in the sums of the statistics task.
"""

from __future__ import annotations

from torch import Tensor

from penstock.device import device_of
from penstock.runtime.checks.marks import WISH
from penstock.runtime.errors import ScheduleMismatchError
from penstock.topology import Control, Layout


def with_wish(marks: Tensor, wish: str) -> Tensor:
    """Return `marks`, with a one where this rank wishes for another plan."""
    if wish:
        marks[WISH] = 1.0
    return marks


def check_wishes(total: Tensor, wish: str, layout: Layout, control: Control) -> None:
    """Raise ScheduleMismatchError, on every rank, if some wish for another plan and others do not.

    total: the sums of the marks. wish: why this rank wishes for one, "" if it does not. Where reading the
    sums makes the host wait, only ranks that have a wish or have taken something up read them, and raise by
    themselves: a rank without a wish cannot ask the others for theirs.
    """
    if int(total[WISH]) in (0, layout.world_size):
        return
    if not device_of(total).is_gpu:
        wishes = enumerate(control.gather(wish, "comparing plans"))
        who = next(_needs(rank, why) for rank, why in wishes if why)
    elif wish:
        who = _needs(layout.rank, wish)
    else:
        who = "another rank, whose own error says why, needs another plan"
    raise ScheduleMismatchError(
        f"{who}, and not all ranks do. Freeze, thaw and switch gradient checkpointing on all ranks before "
        "the same step"
    )


def _needs(rank: int, why: str) -> str:
    return f"rank {rank} needs another plan, since {why}"
