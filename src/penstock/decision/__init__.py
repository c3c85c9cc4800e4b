"""Everything that a plan decides, as one record: searches, settings, files and texts derive from it."""

from penstock.decision.partition import TAIL, Partition, Portion, Slot
from penstock.decision.placement import PlacementConfig
from penstock.decision.record import MOST_PIECES, MOST_SLICES, Decision, ScheduleConfig, register, unregister
from penstock.features.field import Asked, Field, GradientBytes, Movable, Reader

__all__ = [
    "MOST_PIECES",
    "MOST_SLICES",
    "TAIL",
    "Asked",
    "Decision",
    "Field",
    "GradientBytes",
    "Movable",
    "Partition",
    "PlacementConfig",
    "Portion",
    "Reader",
    "ScheduleConfig",
    "Slot",
    "register",
    "unregister",
]
