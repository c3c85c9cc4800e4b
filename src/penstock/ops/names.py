"""The names of Penstock's own ops. An op is a string; anybody may register more."""

from __future__ import annotations

from typing import Final


class Op:
    """What the tasks of Penstock's own steps are called."""

    EMBED: Final = "EM"
    ATTENTION: Final = "AT"
    COUNTS: Final = "N"
    DISPATCH_GATHER: Final = "DG"
    DISPATCH: Final = "D"
    DISPATCH_SCATTER: Final = "DS"
    SHARED: Final = "S"
    EXPERTS: Final = "X"
    COMBINE_GATHER: Final = "CG"
    COMBINE: Final = "C"
    COMBINE_SCATTER: Final = "CS"
    UNORDER: Final = "U"
    HEAD: Final = "HD"
    STATISTICS: Final = "ST"
    ALL_REDUCE: Final = "AR"
    EXPERT_ALL_REDUCE: Final = "XR"
