"""The check that all ranks wish for another plan before the same step, without an exchange of its own.

Only all ranks together can plan again, and a rank that has changed something does not know whether the others
have. So it runs a forward pass of the present plan, as they would, and its wish is one of the facts
(`fingerprints.marks`) that ranks compare in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.errors import ScheduleMismatchError
from penstock.runtime.fingerprints.marks import WISH
from penstock.topology import Control, Layout


def check_wishes(facts: Sequence[float], wish: str, layout: Layout, control: Control) -> None:
    """Raise ScheduleMismatchError, on every rank, if some wish for another plan and others do not.

    facts: their sums. wish: why this rank wishes for one, "" if it does not.
    """
    if facts[WISH] in (0, layout.world_size):
        return
    wishes = enumerate(control.gather(wish, "comparing plans"))
    rank, why = next((rank, why) for rank, why in wishes if why)
    raise ScheduleMismatchError(
        f"rank {rank} needs another plan, since {why}, and not all ranks do. Freeze, thaw and switch "
        "gradient checkpointing on all ranks before the same step"
    )
