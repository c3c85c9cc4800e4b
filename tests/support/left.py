"""What tests have left in their process."""

from __future__ import annotations

import sys


def left_group() -> str:
    """Leave the process group that tests have left joined, and say so; empty if there is none.

    Others find it, and take this process for one that somebody else has joined.
    """
    distributed = sys.modules.get("torch.distributed")  # unless torch is loaded, there is none
    if distributed is None or not distributed.is_initialized():
        return ""
    from penstock.topology import leave

    leave()
    return (
        "tests of this file left a process group: use the fixture `alone`, or call `penstock.topology.leave`"
    )
