"""The check that all ranks replan_request for another plan before the same step, without an exchange of its
own.

Only all ranks together can plan again, and a rank that has changed something does not know whether the others
have. So it runs a forward pass of the present plan, as they would, and its replan_request is one of the facts
(`fingerprints.marks`) that ranks compare in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.errors import ScheduleMismatchError
from penstock.runtime.fingerprints.facts import REPLAN
from penstock.topology import Control, Layout


def check_replan_requests(
    facts: Sequence[float], replan_request: str, layout: Layout, control: Control
) -> None:
    """Raise ScheduleMismatchError, on every rank, if some replan_request for another plan and others do not.

    facts: their sums. replan_request: why this rank requests for one, "" if it does not.
    """
    if facts[REPLAN] in (0, layout.world_size):
        return
    requests = enumerate(control.gather(replan_request, "comparing plans"))
    rank, why = next((rank, why) for rank, why in requests if why)
    raise ScheduleMismatchError(
        f"rank {rank} needs another plan, since {why}, and not all ranks do. Freeze, thaw and switch "
        "gradient checkpointing on all ranks before the same step"
    )
