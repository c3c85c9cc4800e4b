"""Everything that a plan decides, as one record: searched over, set, saved, told and applied from here."""

from penstock.decision.field import Asked, Field, GradientBytes, Reader
from penstock.decision.partition import TAIL, Partition, Portion, Slot
from penstock.decision.record import MOST_PIECES, MOST_SLICES, Decision, ScheduleConfig, register, unregister

__all__ = [
    "MOST_PIECES",
    "MOST_SLICES",
    "TAIL",
    "Asked",
    "Decision",
    "Field",
    "GradientBytes",
    "Partition",
    "Portion",
    "Reader",
    "ScheduleConfig",
    "Slot",
    "register",
    "unregister",
]
