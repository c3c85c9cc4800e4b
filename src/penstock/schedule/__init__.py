"""A schedule is data: for every lane, the ordered list of tasks. One file per system."""

from penstock.schedule.catalogue import SCHEDULES, ScheduleConfig, StepPlan, plan_step
from penstock.schedule.freeze import Cost, freeze
from penstock.schedule.fsmoe import FSMoE
from penstock.schedule.partition import TAIL, Partition, Portion, Slot
from penstock.schedule.penstock import Penstock
from penstock.schedule.schedule import Schedule, unit_cost
from penstock.schedule.system import Pieces, System

__all__ = [
    "SCHEDULES",
    "TAIL",
    "Cost",
    "FSMoE",
    "Partition",
    "Penstock",
    "Pieces",
    "Portion",
    "Schedule",
    "ScheduleConfig",
    "Slot",
    "StepPlan",
    "System",
    "freeze",
    "plan_step",
    "unit_cost",
]
